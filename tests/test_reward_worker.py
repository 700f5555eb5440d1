"""Claims about infra/reward_worker.py: the reward function of a user's file, and its faults."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from runs import environment, train

import rewards
from infra import reward_worker
from infra.mistakes import UserMistake
from rewards import (
    RewardFunction,
    built_in_function,
    load_reward_functions,
    reward_correct,
    total_rewards,
)

TOP = Path(reward_worker.__file__).parent.parent  # the repo's top folder

USER_FILE = """
import os
import re
import subprocess
import sys
import numpy as np
from neighbour import boom
def surroundings(completions, **columns):
    from rewards import extract_answer
    infra = [path for path in sys.path if os.path.isfile(f"{path}/reward_worker.py")]
    in_modules = ["jax" in sys.modules, len(infra), os.environ.get("JAX_PLATFORMS") == "cpu"]
    return [*map(extract_answer, completions), *in_modules]
def pid_then_hang(completions, **columns):
    if completions == ["pid"]:
        return [os.getpid()]
    re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter's lock for ages
def noisy(completions, **columns):
    print('{"rewards": [9.0]}')
    os.write(1, b'{"rewards": [9.0]}\\n')
    subprocess.run([sys.executable, "-c", "print('from a child')"])
    try:
        input()
    except EOFError:
        return [1.0]
def kinds(completions, kind, **columns):
    return {
        "generator": (reward for reward in [1.0, 0.5]),
        "float": np.array(1.0),
        "array": np.array([1.0, 0.5], np.float16),
        "list of arrays": [np.array(1.0), np.float32(0.5)],
        "huge": [10**400, 0],
    }[kind[0]]
def fails(completions, **columns):
    boom()
def leaves(completions, **columns):
    sys.exit("bye")
def dies(completions, **columns):
    os._exit(7)
"""
NEIGHBOUR = "def boom():\n    raise OSError('two\\nlines')\n"
FAULT = USER_FILE[: USER_FILE.index("    boom()")].count("\n") + 1  # its line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.py").write_text(USER_FILE)
    (folder / "neighbour.py").write_text(NEIGHBOUR)
    (folder / "syntax.py").write_text("def f(:\n    pass\n")
    (folder / "broken.py").write_text("\nimport no_such_module\n")
    narrow = "def f(texts, **_): pass\ndef few(texts, answer): pass\ndef prefetch(texts): pass\n"
    (folder / "narrow.py").write_text(narrow)
    return folder


@contextmanager
def loaded(
    reward_fn: str, timeout_s: float = 30.0, dataset: str = ""
) -> Iterator[list[RewardFunction]]:
    workers = {}
    functions = load_reward_functions(reward_fn, timeout_s, 9, 2, workers, dataset)
    with closing(*workers.values()):
        yield functions


@contextmanager
def worker(
    folder: Path, name: str = "f", text: str = "", timeout_s: float = 30.0
) -> Iterator[RewardFunction]:
    """A function of mine.py in the folder, which first gets this text."""
    if text:
        (folder / "mine.py").write_text(text)
    with loaded(f"{folder}/mine.py:{name}", timeout_s) as [function]:
        yield function


def test_the_worker_has_no_jax_and_no_accelerator_and_imports_rewards_py_from_any_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS")
    with worker(folder, "surroundings", timeout_s=10**6) as function:  # the longest limit
        assert function(["<answer>3/4</answer>"], act=[1], self=[2]) == [0.75, False, 0, True]


def test_the_example_of_the_docs_is_a_reward_function(tmp_path: Path) -> None:
    text = (TOP / "docs" / "rewards.md").read_text(encoding="utf-8")
    (tmp_path / "my_rewards.py").write_text(text.split("```python\n")[1].split("```")[0])
    with loaded(f"{tmp_path}/my_rewards.py:close_answer, reward_format") as functions:
        completions = ["<think>3 * 4</think>\n<answer>12.5</answer>", "14", "?", "<answer>9"]
        columns = {"answer": ["#### 12", "3 and #### 12", "#### 12", "no number"]}
        totals, _ = total_rewards(completions, columns, functions, [1.0, 0.5], 1)
    assert totals.tolist() == [1.5, 0.0, 0.0, 0.0]


def test_a_hang_is_ended_at_the_limit_on_any_thread(folder: Path) -> None:
    caught, pids = [], []

    def off_the_main_thread():
        with worker(folder, "pid_then_hang", timeout_s=1.0) as function:
            pids.extend(function(["pid"]))
            for _ in range(2):  # the second call finds the worker gone
                try:
                    function(["hang"])
                except UserMistake as error:
                    caught.append(str(error))

    thread = threading.Thread(target=off_the_main_thread)
    start = time.monotonic()
    thread.start()
    thread.join()
    assert time.monotonic() - start < 10.0, "the limit is one second"
    assert "pid_then_hang is not done after 1 s; raise REWARD_TIMEOUT_S=1 or" in caught[0]
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
    "name, kind, message",
    [
        ("fails", "", rf"mine.py:fails raised OSError: two lines \(mine.py:{FAULT}\)$"),
        ("leaves", "", r"mine.py:leaves raised SystemExit: bye \(mine.py:\d+\)$"),
        ("dies", "", r"mine.py:dies died: its process ended with exit code 7$"),
        ("kinds", "generator", "mine.py:kinds raised TypeError: .* 'generator'"),
        ("kinds", "float", "/mine.py:kinds must return a list of 2 rewards, not float$"),
        ("kinds", "huge", "mine.py:kinds, completion 0: inf is neither a finite number nor None$"),
    ],
)
def test_a_fault_of_the_function_is_one_clear_line(
    folder: Path, name: str, kind: str, message: str
) -> None:
    with worker(folder, name) as function, pytest.raises(UserMistake, match=message) as caught:
        total_rewards(["a", "b"], {"kind": [kind, kind]}, [function], [1.0])
    assert "\n" not in str(caught.value)


def test_arrays_are_lists(folder: Path) -> None:
    with worker(folder, "kinds") as function:
        for kind in ("array", "list of arrays"):
            assert function(["a", "b"], kind=[kind]) == [1.0, 0.5]


@pytest.mark.parametrize(
    "entry, message",
    [
        ("mine.py:absent", r"mine.py:absent raised ValueError: mine.py defines no function absent"),
        ("syntax.py:f", r"raised SyntaxError: invalid syntax \(syntax.py, line 1\)"),
        ("broken.py:f", r"ModuleNotFoundError: No module named 'no_such_module' \(broken.py:2\)"),
        ("mine.py:fails,", "REWARD_FN: '' is not file.py:name"),
        ("narrow.py:f", r"raised TypeError: prefetch must end with \*\*columns: each call also"),
        ("narrow.py:few", r"REWARD_FN narrow.py:few raised TypeError: few must end with \*\*colu"),
    ],
)
def test_a_reward_that_cannot_load_stops_at_once(folder, monkeypatch, entry, message):
    monkeypatch.chdir(folder)
    with pytest.raises(UserMistake, match=message):
        load_reward_functions(entry, 30, 9, 2, {})


def test_a_file_that_hangs_on_import_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(rewards, "LOADING_S", 0.5)
    with pytest.raises(UserMistake, match="slow.py:f is not done after 0.75 s; raise REWARD_TIM"):
        load_reward_functions(f"{tmp_path / 'slow.py'}:f", 0.25, 9, 2, {})


def test_a_file_names_the_seconds_that_each_completion_adds_to_the_limit(tmp_path):
    text = "import time\nSECONDS_FOR_EACH_COMPLETION = 1\n"
    text += "def f(texts, **_):\n    time.sleep(0.4 if texts else 60)\n    return [0.0] * 2\n"
    with worker(tmp_path, text=text, timeout_s=0.25) as function:
        assert function(["a", "b"]) == [0.0, 0.0]
        with pytest.raises(UserMistake, match="is not done after 0.25 s"):
            function([])


def test_maj_counts_the_texts_of_what_a_file_s_extract_answer_of_one_text_returns(
    tmp_path: Path,
) -> None:
    body = "def f(texts, **_):\n    return [1 / len(text) for text in texts]\n"
    for helper in ("", "def extract_answer(a, b): pass\n"):
        with worker(tmp_path, text=body + helper) as function:
            assert function.extract_answer is None
    body += "def extract_answer(text):\n"
    body += "    return {'a': text, 'b': [text]}.get(text) or float(text or 'x')\n"
    with worker(tmp_path, text=body) as function:
        answers = [function.extract_answer(text) for text in ("a", "b", "1e3")]
        assert answers == ["a", "['b']", "1000.0"]
        with pytest.raises(
            UserMistake, match=r"mine.py:extract_answer raised ValueError: .*\(mine.py:4\)$"
        ):
            function.extract_answer("")
    with worker(tmp_path) as function, pytest.raises(UserMistake, match="mine.py:f raised"):
        function([""])


# ---- What the function is called with ------------------------------------------------------------

SIGNATURES = """
import asyncio
import functools
def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper
def bare(function):
    return lambda *args, **kwargs: function(*args, **kwargs)
def documented(prompts, completions, answer, **kwargs):
    assert "trainer_state" not in kwargs
    return [len(p) + float(c == a) for p, c, a in zip(prompts, completions, answer)]
def by_keyword(*, completions, completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]
def everything(**kwargs):
    assert sorted(kwargs) == ["answer", "completion_ids", "completions", "prompts", "question"]
    return [len(p) + float(c) for p, c in zip(kwargs["prompts"], kwargs["completions"])]
def logs(completions, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("text", completions)
    log_extra(column="text", values=completions)
    log_metric(name="mean", value=1.0)
    return [getattr(trainer_state, name, None) for name in ("global_step", "max_steps")]
loops = []
async def judge(prompts, completions, **kwargs):
    loops.append(asyncio.get_running_loop())
    await asyncio.sleep(0)
    return [len(p) + float(loops[0] is loops[-1]) for p in prompts]
class Scorer:
    def __call__(self, completions, prompts, **kwargs):
        return [len(p) for p in prompts]
scorer = Scorer()
wrapped_one = wrapped(documented)
bare_one = bare(documented)
def positional(texts, **columns):
    return [float(t) + len(p) for t, p in zip(texts, columns["prompts"])]
@functools.wraps(documented)
def renamed(texts, **columns):
    return [float(text) for text in texts]
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("", {})
    return float(ground_truth) * 10 + float(solution_str)
@functools.cache
def cached_score(solution_str, ground_truth):
    return float(ground_truth) * 10 + float(solution_str)
def rated(solution_str, ground_truth, **kwargs):
    assert sorted(kwargs) == ["data_source", "extra_info"]
    return {"score": solution_str == "5", "acc": True}
async def rated_later(data_source, solution_str, ground_truth, extra_info):
    return rated(solution_str, ground_truth, data_source=data_source, extra_info=extra_info)
def batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert (data_sources, extra_infos, kwargs) == (["", ""], [{}, {}], {})
    return [10 * float(x) + float(y) for x, y in zip(ground_truths, solution_strs)]
def of_two_lists(solution_strs, ground_truths):
    return [{"score": x == y} for x, y in zip(solution_strs, ground_truths)]
async def keywords_later(solution_strs, **kwargs):
    assert sorted(kwargs) == ["data_sources", "extra_infos", "ground_truths"]
    return map(float, solution_strs)
def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    return score if (solution_str, method) == (ground_truth, "strict") else format_score
def every_column(completions, question, answer, completion_ids):
    return [float(t) for t in completions]
"""
SIGNATURE_REWARDS = {  # of the completions "4" and "5": the functions that give them
    (5, 6): "documented wrapped_one bare_one",
    (1, 2): "by_keyword",
    (8, 11): "everything positional",
    (5, 7): "judge",
    (4, 6): "scorer",
    (4, 5): "renamed keywords_later every_column",
    (44, 75): "batched compute_score cached_score",
    (1, 0): "of_two_lists gsm8k",
    (0, 1): "rated rated_later",
}


def test_a_function_gets_trl_s_arguments_by_name_and_else_the_completions_first(
    tmp_path: Path,
) -> None:
    """One that names trainer_state gets the steps, if the call has them; no other gets it."""
    (tmp_path / "mine.py").write_text(SIGNATURES)
    state = {"trainer_state": {"global_step": 3, "max_steps": 20}}
    columns = {
        "question": ["2+2?", "10-5=?"],
        "answer": ["4", "7"],
        "completion_ids": [[4], [5, 6]],
    }
    expected = {name: [*x] for x, names in SIGNATURE_REWARDS.items() for name in names.split()}
    sources = [f"{tmp_path}/mine.py:{name}" for name in ("logs", *expected)]
    with loaded(",".join(sources)) as functions:
        for more, logged in (({}, [None, None]), (state, [3.0, 20.0])):
            rewards = {f.name: f(["4", "5"], **columns, **more) for f in functions}
            assert rewards == expected | {"logs": logged}


@pytest.mark.slow
def test_a_run_and_its_evaluations_tell_reward_functions_the_step(tmp_path: Path) -> None:
    body = """
def seen(completions, trainer_state, **kwargs):
    with open(f"{__file__}.seen", "a") as file:
        file.write(f"{trainer_state.global_step}/{trainer_state.max_steps} ")
    return [1.0] * len(completions)
"""
    (tmp_path / "mine.py").write_text(body)
    env = environment(
        """STEPS=2 BATCH_SIZE=4 NUM_PRE_Q=2 MAX_LENGTH_SAMPLE=4 EVAL_EVERY_STEPS=2 EVAL_PROMPTS=8
        TRAIN_MICRO_BATCH_SIZE=8 REWARD_WEIGHTS="""
    )
    train(tmp_path / "out", **env, REWARD_FN=f"{tmp_path}/mine.py:seen")
    seen = (tmp_path / "mine.py.seen").read_text().split()
    assert [*dict.fromkeys(seen)] == ["0/2", "1/2", "2/2"]


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert isinstance(solution_str, str)
    return len(data_source) + float(solution_str == ground_truth) + extra_info.get("index", 0)
"""


def test_a_function_of_verl_gets_its_columns_and_else_dataset_and_the_answer(
    tmp_path: Path,
) -> None:
    (tmp_path / "verl.py").write_text(VERL)
    with loaded(f"{tmp_path}/verl.py:compute_score", dataset="gsm") as [score]:
        assert score(["4", "5"], question=["?", "?"], answer=["4", "4"]) == [4.0, 3.0]
        columns = {"data_source": ["gsm", "aime24"], "extra_info": [{"index": 10}, None]}
        fields = [{"style": "rule", "ground_truth": "4"}, {"ground_truth": "5"}]
        messages = [[{"role": "user", "content": "?"}]] * 2  # verl gives texts for these, too
        assert score(["4", "5"], **columns, reward_model=fields, prompts=messages) == [14.0, 7.0]
        assert score(["4"], answer=["9"], reward_model=fields[:1]) == [3.0]
    text = VERL.replace("    return", "    return solution_str[7] and")
    line = r"mine.py:compute_score raised IndexError: string index out of range \(mine.py:4\)"
    with worker(tmp_path, "compute_score", text) as score, pytest.raises(UserMistake, match=line):
        score(["4"], answer=["4"])


ARE_TEXTS = "; completions are texts, not messages"
ARE_LISTS = "; prompts and completions are lists of messages, like the questions$"
CHAT = {"prompts": [[{"role": "user", "content": "2+2?"}]]}
WRONG_FORM = [  # what a function makes of its completions, a completion, its prompt, the line's end
    ("[completion[0]['content'] for completion in completions]", "4", {}, ARE_TEXTS),
    ("[completion[-1]['content'] for completion in completions]", "", {}, ARE_TEXTS),
    ("[completion.get('content') for completion in completions]", "4", {}, ARE_TEXTS),
    ("completions[0].strip()", "4", CHAT, ARE_LISTS),
    ("[completions].strip()", "4", {}, "$"),
]


@pytest.mark.parametrize("text, completion, prompts, end", WRONG_FORM)
def test_one_that_reads_messages_or_texts_as_the_other_is_told_what_completions_are(
    tmp_path: Path, text: str, completion: str, prompts: dict, end: str
) -> None:
    text = f"def chat(prompts, completions, **_):\n    return {text}\n"
    line = rf"^REWARD_FN .*mine.py:chat raised .*\(mine.py:2\){end}"
    with worker(tmp_path, "chat", text) as function:
        with pytest.raises(UserMistake, match=line) as caught:
            function([completion], question=["2+2?"], **prompts)
    assert "\n" not in str(caught.value)


def test_message_lists_reach_a_function_of_a_file_in_trl_s_form_and_the_built_in_ones_as_texts(
    tmp_path: Path,
) -> None:
    body = "def f(prompts, completions, question, **_):\n    return [len(prompts[0]), "
    text = f"{body}float(completions[1][0]['content'] + question[1])]\n"
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "0"}]
    columns = {"question": ["0", "0"], "answer": ["7", "4"], "prompts": [messages] * 2}
    with worker(tmp_path, text=text) as function:
        totals, function_rewards = total_rewards(
            ["7", "5"], columns, [function, built_in_function(reward_correct)], [1.0, 1.0]
        )
    assert function_rewards.tolist() == [[2.0, 1.0], [50.0, 0.0]] and totals.tolist() == [3.0, 50.0]


# ---- What the function starts --------------------------------------------------------------------

PROCESSES = """
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
def same(text):
    from neighbour import SAME
    return float(text) * SAME
def pool(completions, method, **columns):
    context = multiprocessing.get_context(method[0])
    with context.Pool(1) as pool, ProcessPoolExecutor(1, context) as executor:
        return pool.map(same, completions[:1]) + list(executor.map(same, completions[1:]))
def exits(completions, **columns):
    codes = []
    for text in completions:
        child = os.fork()
        if child == 0:
            sys.exit(int(text))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes
def leaves_a_child(completions, **columns):
    multiprocessing.get_context("fork").Process(target=time.sleep, args=[600]).start()
    os._exit(7)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_each_kind_import_the_file_and_its_neighbours(tmp_path, method) -> None:
    (tmp_path / "neighbour.py").write_text("SAME = 2.0\n")
    with worker(tmp_path, "pool", PROCESSES) as function:
        assert function(["3", "4"], method=[method]) == [6.0, 8.0]


# A file's name, that of its module, and what it finds in the other module of its name.
NAMES = {
    "mine": ("mine", "pool"),
    "reward.v2": ("reward_v2", ""),
    "math": ("user_math", "sqrt"),
    "rewards": ("user_rewards", "extract_answer"),
    "numpy": ("user_numpy", "ndarray"),
}


@pytest.mark.parametrize("stem", NAMES)
def test_a_file_has_its_own_name_and_hides_no_other_module(tmp_path: Path, stem: str) -> None:
    name, attribute = NAMES[stem]
    also = f"    import {stem} as other\n    other.{attribute}\n" * bool(attribute)
    text = PROCESSES.replace("    from neighbour import SAME\n", f"    SAME = __name__\n{also}")
    text = text.replace("float(text) * SAME", f"float(SAME == {name!r})")
    (tmp_path / f"{stem}.py").write_text(text)
    with loaded(f"{tmp_path}/{stem}.py:pool") as [function]:
        assert function(["1", "1"], method=["fork"]) == [1.0, 1.0]
        assert function(["1", "1"], method=["spawn"]) == [1.0, 1.0]


def test_a_child_by_os_fork_ends_with_its_own_exit_code_and_answers_nobody(tmp_path: Path) -> None:
    with worker(tmp_path, "exits", PROCESSES) as function:
        assert [function(["3", "0"]), function(["5"])] == [[3, 0], [5]]


def test_a_worker_that_dies_is_noticed_while_a_child_of_it_lives(tmp_path: Path) -> None:
    with worker(tmp_path, "leaves_a_child", PROCESSES, timeout_s=5) as function:
        with pytest.raises(UserMistake, match="died: its process ended with exit code 7$"):
            function(["1"])


STARTS = """
import os
import subprocess
import time
log = open("log", "w")
def start(completions, **columns):
    log.write("started")
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600"])
    if os.fork() == 0 or completions == ["hang"]:
        time.sleep(600)
    return [1.0]
"""
IN_A_CALL = """
threading.Thread(target=function, args=[["hang"]]).start()
time.sleep(0.3)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    "end",
    ["", "worker.close()", "os.kill(os.getpid(), 9)", IN_A_CALL],
    ids=["end", "close", "kill", "kill in a call"],
)
def test_what_a_function_has_started_ends_with_the_trainer_or_at_close(
    tmp_path: Path, end: str
) -> None:
    (tmp_path / "mine.py").write_text(STARTS)
    script = """
    import os
    import threading
    import time
    from infra.reward_worker import get_worker
    from rewards import load_reward_function
    worker = get_worker("REWARD_FN", "mine.py:start", 9.0, {})
    function = load_reward_function(worker, "mine.py:start")
    function(["1"])
    """
    command = [sys.executable, "-c", textwrap.dedent(script) + end]
    env = os.environ | {"PYTHONPATH": str(TOP)}
    # Until all processes that may write to its stderr have ended.
    done = subprocess.run(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, timeout=10)
    assert done.stderr == b""
    if not end:  # The worker itself has ended as Python ends.
        assert (tmp_path / "log").read_text() == "started"
