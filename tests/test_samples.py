"""The completions that the log shows to people."""

from review import sample_table
from runtime.page import pairs_of

# A question and a completion with line separators and sequences that move or erase on a terminal.
ODD = "1\nerror: x\r\nDONE: \x85step=9\u2028eval\x1b[2K\x9b1A\rSTOPPED: \t2"
COMPLETION = {"text": ODD, "reward": 1.0, "rewards": {}, "tokens": 3, "ended": "stop token"}


def test_a_question_is_one_line_and_no_line_of_a_completion_begins_like_one_of_the_run() -> None:
    assert sample_table(7, {"question": ODD, "completions": [COMPLETION]}).split("\n") == [
        "sample step=7 question: 1\\nerror: x\\r\\nDONE: \\x85step=9\\u2028eval\\x1b[2K\\x9b1A\\r"
        "STOPPED: \t2",
        "  reward=1 tokens=3 ended=stop token",
        "    1",
        "    error: x",
        "    DONE: ",
        "    step=9",
        "    eval\\x1b[2K\\x9b1A",
        "    STOPPED: \t2",
    ]


def test_a_long_text_is_cut_and_an_empty_one_has_a_line() -> None:
    texts = ["a" * 400, "a" * 401, ""]
    entry = {"question": "q" * 401, "completions": [COMPLETION | {"text": x} for x in texts]}
    first, *lines = sample_table(7, entry).split("\n")
    assert first == "sample step=7 question: " + "q" * 400 + " ..."
    assert lines[1::2] == ["    " + "a" * 400, "    " + "a" * 400 + " ...", "    "]


def test_a_completion_without_a_reward_has_a_dash() -> None:
    """Two functions of the user may be called like the total reward and like a column."""
    rewards = {"reward": 1.4000000000000001, "tokens": None}
    told = {"text": "5", "reward": None, "rewards": rewards, "advantage": -0.70711, "tokens": 3}
    assert pairs_of(told | {"ended": "stop token"}) == [
        ("reward", "-"),
        ("reward", "1.4"),
        ("tokens", "-"),
        ("advantage", "-0.7071"),
        ("tokens", "3"),
        ("ended", "stop token"),
    ]


def test_a_zero_has_no_sign_in_the_log() -> None:
    """The advantages of equal negative rewards are -0.0."""
    assert pairs_of(COMPLETION | {"reward": -0.0, "advantage": -0.0})[:2] == [
        ("reward", "0"),
        ("advantage", "0"),
    ]
