"""Tables for people: drawn on a terminal, plain lines elsewhere."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from review import sample_table
from runtime.tables import LONGEST_TEXT, drawn_table, pairs_of, shorten, table_text

REPO = Path(__file__).resolve().parent.parent
ROWS = [
    ([("reward", "2.0"), ("tokens", "7")], "<think>[red]\n</think>"),
    ([("reward", "0.5"), ("tokens", "12")], ""),
]
DRAWN = """\
step 3
┌────────────┬─────────────────────────┐
│ reward 2.0 │ <think>[red]            │
│ tokens 7   │ </think>                │
├────────────┼─────────────────────────┤
│ reward 0.5 │                         │
│ tokens 12  │                         │
└────────────┴─────────────────────────┘"""


def test_a_row_is_a_line_of_pairs_and_an_indented_text(capsys) -> None:
    assert table_text("step 3", ROWS) == (
        "step 3\n"
        "  reward=2.0 tokens=7\n"
        "    <think>[red]\n"
        "    </think>\n"
        "  reward=0.5 tokens=12\n"
        "    "
    )


def test_a_drawn_table_fits_its_width_and_shows_brackets_as_they_are() -> None:
    lines = [line.rstrip() for line in drawn_table("step 3", ROWS, 40).splitlines()]
    assert lines == DRAWN.splitlines()


def drawn_on_a_terminal(title: str, rows: list) -> str:
    """What table_text prints on a terminal of 40 characters."""
    master, terminal = pty.openpty()
    code = f"from runtime.tables import table_text; print(table_text({title!r}, {rows!r}))"
    env = os.environ | {"COLUMNS": "40", "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", code], cwd=REPO, stdout=terminal, env=env, check=True)
    os.close(terminal)
    return os.read(master, 10_000).decode().replace("\r\n", "\n")


def test_a_terminal_gets_the_drawn_table() -> None:
    told = drawn_on_a_terminal("step 3", ROWS)
    assert [line.rstrip() for line in told.rstrip().splitlines()] == DRAWN.splitlines()


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


def test_a_terminal_gets_no_control_character_of_a_text() -> None:
    told = drawn_on_a_terminal(f"question {ODD[:10]}", [([], ODD)]).splitlines()
    assert told[0].rstrip() == "question 1\\nerror: x"
    assert [line.strip("│ ") for line in told if "eval" in line] == ["eval\\x1b[2K\\x9b1A"]


def test_a_long_text_is_cut_in_a_table_only() -> None:
    assert shorten("a" * LONGEST_TEXT) == "a" * LONGEST_TEXT
    assert shorten("a" * (LONGEST_TEXT + 1)) == "a" * LONGEST_TEXT + " ..."


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


def test_a_zero_has_no_sign_in_a_table() -> None:
    """The advantages of equal negative rewards are -0.0."""
    assert pairs_of(COMPLETION | {"reward": -0.0, "advantage": -0.0})[:2] == [
        ("reward", "0"),
        ("advantage", "0"),
    ]
