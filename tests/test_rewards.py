"""Claims about rewards.py: what scores, in what time, and what a custom reward may do wrong."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from datetime import date
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import rewards
from rewards import RewardWorker, load_reward_functions, parse_number, score

GSM8K = "She has 6*12=<<6*12=72>>72 clips.\n#### "


def form(answer: str, think: str = "I count 3 and 4.") -> str:
    return f"<think>{think}</think>\n<answer>{answer}</answer>"


CORRECT = [  # completion, reference as in GSM8K's last line, score
    (form("72"), "72", 1.0),
    (form("73"), "72", 0.0),
    (form("72", think="Or 5?") + " 9", "72", 1.0),  # the tag counts, not the text's last number
    (form("9") + " so 72", "72", 0.0),
    ("<answer>5</answer> no, <answer>72</answer>", "72", 1.0),  # the last tag
    ("<answer>72</answer> and <answer>5", "72", 1.0),  # the last closed tag
    ("<answer>72 clips", "72", 1.0),  # truncated: from the tag to the end
    ("72 of them, <answer>", "72", 0.0),
    ("72 <answer></answer>", "72", 0.0),  # an empty answer is no answer
    (form("seventy-two"), "72", 0.0),
    ("She has 3 + 69 = 72 clips.", "72", 1.0),
    ("72 clips, of which 3 are red", "72", 0.0),
    (form("1,234"), "1234", 1.0),
    (form("1234"), "1,234", 1.0),
    (form("234"), "1,234", 0.0),
    (form("1,2345"), "2345", 1.0),  # no thousands: two numbers
    (form("$1,234,567.50"), "1234567.5", 1.0),
    (form("-5"), "-5", 1.0),
    (form("-5"), "5", 0.0),
    (form("5"), "-5", 0.0),
    (form("- 5"), "-5", 1.0),
    (form("\N{MINUS SIGN}5"), "-5", 1.0),
    (form("-$5"), "-5", 1.0),
    (form("x = - 5"), "-5", 1.0),
    (form("10 - 5"), "5", 1.0),  # an operator between two numbers is no sign
    (form("10-5"), "-5", 0.0),
    (form("\N{EN DASH}5"), "-5", 1.0),
    (form("72."), "72", 1.0),
    (form(".5"), "0.5", 1.0),
    (form("so...72"), "72", 1.0),
    (form("0.50"), "1/2", 1.0),
    (form("3 / 4"), "0.75", 1.0),
    (form("1 1/2"), "1.5", 1.0),
    (form("1\N{VULGAR FRACTION ONE HALF}"), "1.5", 1.0),
    (form("take 5 10/2"), "5", 1.0),
    (form("1/0"), "1", 0.0),
    (form("50%"), "50", 1.0),
    (form("50%"), "0.5", 0.0),
    (form("72 clips"), "72", 1.0),
    (form("72 cm^2"), "72", 1.0),
    (form("23+45=68"), "68", 1.0),
    (form("68=23+45"), "68", 0.0),  # several numbers: the last
    (form("2e3"), "2000", 1.0),
    (form("2.5E-1"), "0.25", 1.0),
    (form("2 x 10^3"), "2000", 1.0),
    (form(r"2 \times 10^{3}"), "2000", 1.0),
    (r"\boxed{72}", "72", 1.0),
    (r"\boxed{-\frac{3}{4}}", "-0.75", 1.0),
    (r"\boxed{1,\!234{,}567}", "1234567", 1.0),
    (form("1e999999999"), "72", 0.0),
    (form("1e-999999999"), "0", 0.0),
]


@pytest.mark.parametrize("completion, reference, expected", CORRECT)
def test_the_completions_number_is_compared_exactly(completion, reference, expected):
    assert rewards.reward_correct([completion], answer=[GSM8K + reference]) == [expected]


def test_a_reference_needs_no_hashes_and_one_without_a_number_does_not_apply() -> None:
    answers = ["72", "so 3 and 72", 72, "no number", None, "72\n#### none", "3\n#### 5\n#### 72"]
    scores = rewards.reward_correct([form("72")] * 7, answer=answers, question=["?"] * 7)
    assert scores == [1.0, 1.0, 1.0, None, None, None, 1.0]


def test_numbers_are_exact_fractions() -> None:
    assert parse_number("0.1") == Fraction(1, 10)
    assert parse_number("2 3/8 cups") == Fraction(19, 8)
    assert parse_number("12345678901234567890.5") == Fraction(24691357802469135781, 2)
    assert parse_number("1e300") == 10**300
    assert parse_number("1e301") is None
    assert parse_number("9" * 300) == 10**300 - 1
    assert parse_number("9" * 301) is None


FORMAT = [  # completion, reward_format, tag_count_reward
    (form("72"), 1.0, 1.0),
    (form("72", think="two\n\nlines"), 1.0, 1.0),
    ("\n " + form("72") + "\n", 1.0, 1.0),
    ("Sure: " + form("72"), 0.0, 1.0),
    (form("72") + " clips", 0.0, 1.0),
    ("<think>3</think><answer>72</answer>", 0.0, 1.0),
    ("<think>3</think>\n\n<answer>72</answer>", 0.0, 1.0),
    ("<answer>72</answer>\n<think>3</think>", 0.0, 1.0),
    (form("72", think=" "), 0.0, 1.0),
    (form("\n"), 0.0, 1.0),
    (form("72", think="<answer>3"), 0.0, 0.75),
    (form("72") + form("72"), 0.0, 0.0),
    ("<think>3</think>\n<answer>72", 0.0, 0.75),
    ("<THINK>3</THINK>\n<ANSWER>72</ANSWER>", 0.0, 0.0),
    ("", 0.0, 0.0),
]


@pytest.mark.parametrize("completion, whole, tags", FORMAT)
def test_the_format_is_all_or_nothing_and_the_tags_count_a_quarter_each(completion, whole, tags):
    assert rewards.reward_format([completion], answer=["#### 72"]) == [whole]
    assert rewards.tag_count_reward([completion], answer=["#### 72"]) == [tags]


def test_the_system_prompt_shows_a_form_that_earns_the_format_reward() -> None:
    shown = rewards.SYSTEM_PROMPT[rewards.SYSTEM_PROMPT.index("form:") + 5 :]
    assert rewards.reward_format([shown]) == [1.0]
    assert len(rewards.SYSTEM_PROMPT.split()) <= 45


REPEATED = ["<answer>", "</answer>", "</think>\n<answer>", "9", "1,", "-", "- ", "1/", "1 ", "1 1/"]
REPEATED += ["1,111,", ".", "1.", "1e", "^{", "= -", " ", r"\frac{1", "1x10^", "\N{MINUS SIGN}"]
LONG = {
    **{text: text * (10**6 // len(text)) for text in REPEATED},
    "digits space digits": "9" * 500_000 + " " + "9" * 500_000,
    "groups that end wrong": "1" + ",111" * 250_000 + "1",
    "exponent": "1e" + "9" * 10**6,
    "blank think": form(" " * 500_000, think=" " * 500_000),
}


@pytest.mark.parametrize("name", LONG)
def test_a_megabyte_of_anything_scores_in_linear_time(name: str) -> None:
    start = time.process_time()
    for function in (rewards.reward_correct, rewards.reward_format, rewards.tag_count_reward):
        assert function([LONG[name]], answer=["#### 72"])[0] in (0.0, 0.25, 0.5, 1.0)
    assert time.process_time() - start < 2.0, "a quadratic pattern takes minutes here"


def test_no_text_raises() -> None:
    pieces = ["<think>", "</think>", "\n", "<answer>", "</answer>", "1", "0", "23", ",", ".", "-"]
    pieces += ["/", " ", "e", "^", "x", "10", "$", "%", "=", "\\frac{1}{0}", "{", "}", "####", "é"]
    pieces += ["\ud800", "\x00", "\N{VULGAR FRACTION ONE HALF}", "\N{ARABIC-INDIC DIGIT FIVE}", "²"]
    draw = random.Random(0)
    texts = ["".join(draw.choices(pieces, k=draw.randint(0, 12))) for _ in range(20_000)]
    for function in load_reward_functions("", timeout_s=1):
        for value in function(texts, answer=texts[::-1]):
            assert value is None or 0.0 <= value <= 1.0


def test_a_total_is_the_weighted_sum_of_what_applies() -> None:
    def odd(completions, **columns):
        return [None if text == "b" else 1 for text in completions]

    def rated(completions, answer, **columns):
        return [None if a is None else np.float32(a) for a in answer]

    columns = {"answer": [0.5, None, -2.0, None], "question": ["?"] * 4}
    total, per_function = score(["a", "b", "c", "d"], columns, [odd, rated], [2.0, 0.5])
    assert total.dtype == per_function.dtype == np.float64
    np.testing.assert_array_equal(total, [2.25, np.nan, 1.0, 2.0])
    np.testing.assert_array_equal(per_function, [[1, 0.5], [np.nan] * 2, [1, -2.0], [1, np.nan]])


def test_the_default_rewards_are_the_three_built_in_ones() -> None:
    functions = load_reward_functions("", timeout_s=1)
    names = " ".join(function.__name__ for function in functions)
    assert names == "reward_correct reward_format tag_count_reward"
    texts = [form("72"), form("71"), "72", "<think>"]
    total, per_function = score(texts, {"answer": ["#### 72"] * 4}, functions, [1.0, 0.5, 0.5])
    assert total.tolist() == [2.0, 1.0, 1.0, 0.125]
    assert per_function.tolist() == [[1, 1, 1], [0, 1, 1], [1, 0, 0], [0, 0, 0.25]]


@pytest.mark.parametrize(
    "returned, message",
    [
        ([1.0], "reward odd must return a list of 2 rewards, not 1"),
        (None, "reward odd must return a list of 2 rewards, not NoneType"),
        ([1.0, "1.0"], "reward odd, row 1: '1.0' is no finite number"),
        ([1.0, float("nan")], "reward odd, row 1: nan is no finite number"),
        ([float("-inf"), 1.0], "reward odd, row 0: -inf is no finite number"),
        (np.array([1.0, np.inf], np.float32), r"reward odd, row 1: .*inf.* is no finite number"),
        ([[1.0], [2.0]], r"reward odd, row 0: \[1.0\] is no finite number"),
    ],
)
def test_a_malformed_return_is_named(returned: object, message: str) -> None:
    def odd(completions, **columns):
        return returned

    with pytest.raises(ValueError, match=message):
        score(["a", "b"], {}, [odd], [1.0])


def test_each_function_has_a_weight() -> None:
    functions = load_reward_functions("reward_correct,reward_format", timeout_s=1)
    with pytest.raises(ValueError, match="REWARD_WEIGHTS has 3 numbers.*correct, reward_format"):
        score(["a"], {"answer": ["1"]}, functions, [1.0, 0.5, 0.5])


USER_FILE = """
import os
import re
import subprocess
import sys
import time
import numpy as np
from neighbour import HALF, boom
def brevity(completions, answer, **columns):
    return [HALF if len(text) < len(a) else None for text, a in zip(completions, answer)]
def echo(completions, pause=(0,), **columns):
    time.sleep(pause[0])
    return [float(text) for text in completions]
def surroundings(completions, **columns):
    main = os.path.basename(sys.modules["__main__"].__file__)
    return ["jax" in sys.modules, os.environ["JAX_PLATFORMS"] == "cpu", main == "rewards.py"]
def pid_then_hang(completions, **columns):
    if completions[0] == "pid":
        return [os.getpid()]
    re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter's lock for ages
def sleep(completions, **columns):
    time.sleep(60)
def noisy(completions, **columns):
    print('{"rewards": [9.0]}')
    os.write(1, b'{"rewards": [9.0]}\\n')
    subprocess.run([sys.executable, "-c", "print('from a child')"])
    try:
        input()
    except EOFError:
        return [1.0]
def arrays(completions, **columns):
    return np.array([0.5, 1.0], np.float32)
def huge(completions, **columns):
    return [10**400]
def short(completions, **columns):
    return [0.0]
def fails(completions, **columns):
    boom()
def leaves(completions, **columns):
    sys.exit("bye")
def dies(completions, **columns):
    os._exit(7)
number = 3
"""
NEIGHBOUR = "HALF = 0.5\n\ndef boom():\n    raise OSError('two\\nlines')\n"
FAULT = USER_FILE[: USER_FILE.index("    boom()")].count("\n") + 1  # its line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.py").write_text(USER_FILE)
    (folder / "neighbour.py").write_text(NEIGHBOUR)
    (folder / "syntax.py").write_text("def f(:\n    pass\n")
    (folder / "broken.py").write_text("\nimport no_such_module\n")
    return folder


def worker(folder, name: str, timeout_s: float = 30.0) -> closing:
    return closing(RewardWorker(f"{folder / 'mine.py'}:{name}", timeout_s))


def test_a_function_from_a_file_scores_beside_a_built_in_one(folder: Path) -> None:
    functions = load_reward_functions(f"reward_correct, {folder / 'mine.py'}:brevity", 30)
    with closing(functions[1]):
        assert [f.__name__ for f in functions] == ["reward_correct", "brevity"]
        columns = {"answer": ["#### 72", "#### 7"], "question": ["\ud800?", "é"]}
        for _ in range(2):  # the worker answers again and again
            total, _ = score(["72", "a long one: 7"], columns, functions, [1.0, 0.5])
            assert total.tolist() == [1.25, 1.0]


def test_the_worker_has_neither_jax_nor_our_main_script_nor_the_accelerator(folder: Path) -> None:
    with worker(folder, "surroundings") as function:
        assert function(["a", "b", "c"], act=[1], self=[2]) == [False, True, True]


def test_an_array_comes_back_as_floats(folder: Path) -> None:
    with worker(folder, "arrays") as function:
        assert function(["a", "b"]) == [0.5, 1.0]


def test_a_hang_is_ended_at_the_limit_on_any_thread(folder: Path) -> None:
    caught, pids = [], []

    def off_the_main_thread():
        with worker(folder, "pid_then_hang", timeout_s=1.0) as function:
            pids.extend(function(["pid"]))
            for _ in range(2):  # the second call finds the worker gone
                try:
                    function(["hang"])
                except ValueError as error:
                    caught.append(str(error))

    thread = threading.Thread(target=off_the_main_thread)
    start = time.monotonic()
    thread.start()
    thread.join()
    assert time.monotonic() - start < 10.0, "the limit is one second"
    assert "mine.py:pid_then_hang is not done after REWARD_TIMEOUT_S=1; raise it" in caught[0]
    assert "died" in caught[1] and "\n" not in caught[0] + caught[1]
    if os.name == "posix":
        with pytest.raises(ProcessLookupError):
            os.kill(int(pids[0]), 0)


def test_prints_and_reads_of_the_function_stay_out_of_the_replies(folder, capfd):
    with worker(folder, "noisy") as function:
        assert [function(["a"]), function(["b"])] == [[1.0], [1.0]]
    out, err = capfd.readouterr()
    assert out == "" and err.count('{"rewards": [9.0]}') == 4 and "from a child" in err


@pytest.mark.parametrize(
    "name, message",
    [
        ("fails", rf"mine.py:fails raised OSError: two lines \(mine.py:{FAULT}\)$"),
        ("leaves", r"mine.py:leaves raised SystemExit: bye \(mine.py:\d+\)$"),
        ("dies", r"mine.py:dies died: its process ended with exit code 7$"),
        ("short", r"reward short must return a list of 2 rewards, not 1$"),
    ],
)
def test_a_fault_of_the_function_is_one_clear_line(folder: Path, name: str, message: str) -> None:
    with worker(folder, name) as function, pytest.raises(ValueError, match=message) as caught:
        score(["a", "b"], {"answer": ["1", "2"]}, [function], [1.0])
    assert "\n" not in str(caught.value)


def test_an_int_beyond_the_floats_is_refused(folder: Path) -> None:
    with worker(folder, "huge") as function, pytest.raises(ValueError, match="row 0: inf is no"):
        score(["a"], {}, [function], [1.0])


def test_a_column_that_json_cannot_carry_is_refused(folder: Path) -> None:
    with worker(folder, "short") as function, pytest.raises(ValueError, match="s day: .*date"):
        function(["a"], day=[date(2024, 1, 1)])


@pytest.mark.parametrize(
    "entry, message",
    [
        ("absent.py:f", "there is no file .*absent.py"),
        ("mine.py:absent", r"mine.py:absent raised ValueError: mine.py defines no function absent"),
        ("mine.py:number", r"mine.py defines no function number"),
        ("syntax.py:f", r"raised SyntaxError: invalid syntax \(syntax.py, line 1\)"),
        ("broken.py:f", r"ModuleNotFoundError: No module named 'no_such_module' \(broken.py:2\)"),
        ("mine.py", "is not file.py:name, nor one of .*reward_format"),
        ("mine.py:brevity,", "REWARD_FN: '' is not file.py:name"),
        ("mine.py:brevity,mine.py:brevity", "two rewards have the name brevity"),
    ],
)
def test_a_reward_that_cannot_load_stops_at_once(folder, monkeypatch, entry, message):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=message):
        load_reward_functions(entry, timeout_s=30)


def test_a_file_that_hangs_on_import_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(rewards, "_LOAD_LIMIT_S", 0.5)
    with pytest.raises(ValueError, match="slow.py:f did not load within 0.5 s"):
        load_reward_functions(f"{tmp_path / 'slow.py'}:f", timeout_s=30)


def test_an_idle_worker_outlives_the_limit_of_its_last_call(folder: Path) -> None:
    with worker(folder, "echo", timeout_s=0.4) as function:
        assert function(["1"]) == [1.0]
        time.sleep(1.0)
        assert function(["2"]) == [2.0]


def test_calls_from_two_threads_get_their_own_replies(folder: Path) -> None:
    with worker(folder, "echo") as function:
        results: dict[int, list] = {}

        def ask(k: int) -> None:
            results[k] = [function([str(10 * k + i)])[0] for i in range(10)]

        threads = [threading.Thread(target=ask, args=(k,)) for k in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert results == {k: [10.0 * k + i for i in range(10)] for k in range(4)}


def test_a_reply_that_ctrl_c_left_behind_is_never_taken_for_the_next_one(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with worker(folder, "echo") as function:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            function(["1"], pause=[1.0])
        with pytest.raises(ValueError, match="died"):
            function(["2"])


@pytest.mark.parametrize("name", ["echo", "sleep"])
def test_the_worker_ends_with_its_parent_also_inside_a_call(folder: Path, name: str) -> None:
    script = f"""
    import os
    import threading
    import time
    from rewards import RewardWorker
    function = RewardWorker({str(folder / "mine.py") + ":" + name!r}, 1.0)
    threading.Thread(target=function, args=[["1"]]).start()
    time.sleep(0.3)
    os._exit(3)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    env = os.environ | {"PYTHONPATH": os.path.dirname(rewards.__file__)}
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, timeout=20)  # until both end
    assert done.returncode == 3, done.stderr.decode()
