"""Claims about recipes/gym.py: the questions that it writes, its scores, and wrong arguments."""

import ast
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from runs import REPO, environment, run_as_user

import rewards
from rewards import RewardFunction, load_reward_functions

TRIANGLE = "graph_color min_num_vertices=3 max_num_vertices=3 edge_probability=0.99 size=2"
SLOW_TO_DRAW = {"knight_swap", "sokoban"}  # one item may take seconds
pytestmark = pytest.mark.parity
reasoning_gym = pytest.importorskip("reasoning_gym")
from recipes import gym  # noqa: E402 - it needs the package

FILE = REPO / "recipes" / "gym.py"


def write(folder: Path, command: str) -> tuple[list[list[dict]], dict[str, str]]:
    """The examples of both splits, and the settings that the command prints."""
    task, *arguments = command.split()
    words = [sys.executable, FILE, task, folder, *arguments]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    files = [folder / f"{split}.jsonl" for split in ("train", "test")]
    splits = [[json.loads(line) for line in file.open(encoding="utf-8")] for file in files]
    settings = shlex.split(printed.splitlines()[-1].removesuffix(" python train_grpo.py"))
    return splits, dict(setting.split("=", 1) for setting in settings)


# ---- Questions -----------------------------------------------------------------------------------


def test_the_last_tenth_of_the_questions_is_held_out_and_each_question_is_there_once(
    tmp_path: Path,
) -> None:
    (train, test), _ = write(tmp_path, "chain_sum max_terms=2 max_digits=1 size=400")
    task = reasoning_gym.create_dataset("chain_sum", seed=0, max_terms=2, max_digits=1, size=400)
    distinct = {item["question"]: item["answer"] for item in task}  # 200 questions are possible
    assert [(each["question"], each["answer"]) for each in train + test] == [*distinct.items()]
    assert (len(train), len(test)) == (159, 18)
    prompt = rewards.SYSTEM_PROMPT.replace("number", "answer")
    assert (tmp_path / "prompt.txt").read_text(encoding="utf-8") == prompt


# These draw with sets of texts, with a global generator of Python, and with one of NumPy.
@pytest.mark.parametrize("task", ["ransom_note", "list_functions", "codeio"])
def test_two_starts_write_the_same_bytes(task: str, tmp_path: Path, monkeypatch) -> None:
    written = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        write(tmp_path / seed, f"{task} size=60")
        written.append([file.read_bytes() for file in sorted((tmp_path / seed).iterdir())])
    assert written[0] == written[1] and len(written[0]) == 3


@pytest.mark.parametrize(
    "command, message",
    [
        ("countdwon", "reasoning_gym has no task 'countdwon'; the nearest names are countdown, "),
        (
            "chain_sum min_term=2",
            "chain_sum has no argument 'min_term'; it has min_terms, max_terms, min_digits, "
            "max_digits, allow_negation, seed, size",
        ),
        ("chain_sum min_terms=7", "chain_sum: AssertionError: max_terms must be >= min_terms"),
        ("chain_sum min_terms=two", "min_terms=two is not of the type int"),
        ("chain_sum allow_negation=2", "allow_negation=2 is not of the type bool"),
        ("chain_sum size", "size= is not of the type int"),
        ("countdown max_value=1", "countdown: ValueError: Failed to generate valid expr"),
        ("composite", "composite: AssertionError: Must specify at least one dataset"),
        ("countdown operators=[", "countdown: ParserError: while parsing a flow node"),
    ],
)
def test_a_mistake_in_a_command_is_one_line(
    command: str, message: str, tmp_path: Path, monkeypatch
) -> None:
    task, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", ["gym.py", task, str(tmp_path / "new"), *arguments])
    with pytest.raises(SystemExit) as error:
        gym.main()
    assert error.value.code.startswith(message) and "\n" not in error.value.code
    assert not (tmp_path / "new").exists()


def test_arguments_become_what_the_task_takes() -> None:
    arguments = "operators=[+] min_numbers=2 max_numbers=2 min_target=2 shuffle=false size=40"
    assert all(" + " in each["answer"] for each in gym.draw("countdown", arguments.split()))
    [item, _] = gym.draw("chain_sum", ["seed=1", "size=2"])
    assert item["answer"] == "-4", "item i of a task is the one of seed + i"
    assert gym.draw("word_sorting", ["transformation=uppercase", "size=2"])


# ---- Scores --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def score() -> Iterator[RewardFunction]:
    """The reward of a task's answers, as a run loads it beside a built-in one. Its time limit is
    longer than that of all answers of a test together."""
    workers = {}
    function, _ = load_reward_functions(f"{FILE}:score_answer,reward_format", 60, 32, 0, workers)
    with closing(*workers.values()):
        yield function


def scores(score: RewardFunction, command: str, answers: list[str]) -> list[float]:
    """Of completions of the first question of a task."""
    task, *arguments = command.split()
    example, *_ = gym.draw(task, arguments)
    return score(answers, **{name: [x] * len(answers) for name, x in example.items()})


def test_the_text_in_the_last_closed_answer_is_scored(score) -> None:
    rewards = {
        "<think>4-1=3</think>\n<answer>-4</answer>": 1.0,
        "<answer>\n -4.0 </answer> 5": 1.0,
        "<answer>5</answer><answer>-4</answer>": 1.0,
        "<answer>-4</answer><answer>5</answer>": 0.0,
        "<answer>-4</answer><answer>5": 1.0,
        "<answer>-4": 0.0,
        "-4": 0.0,
        "-4</answer>": 0.0,
        "": 0.0,
        "<answer></answer>": 0.0,
    }
    assert scores(score, "chain_sum seed=1 size=2", [*rewards]) == [*rewards.values()]


def test_the_score_is_in_parts_and_an_answer_that_takes_ages_gets_0(score) -> None:
    item = reasoning_gym.create_dataset("countdown", seed=0, size=2)[0]
    rewards = {item["answer"]: 1.0, "1+1": 0.05, "one": 0.01, " ": 0.01, "9**9**9**9": 0.0}
    rewards |= {"exit()": 0.01, "(" * 5000: 0.01}
    texts = [f"<answer>{text}</answer>" for text in rewards] + ["<answer>1+1</answer>"]
    expected = [*rewards.values(), 0.05]
    assert scores(score, "countdown size=2", texts) == pytest.approx(expected, abs=0.001)


def test_every_task_gives_1_to_the_answer_that_it_shows_and_to_others_what_it_would_give(
    score,
) -> None:
    hidden = []
    for name in sorted(gym.DATASETS.keys() - SLOW_TO_DRAW - {"composite"}):
        [example] = gym.draw(name, ["size=1"])
        item = ast.literal_eval(example["entry"])
        if item["answer"] is None:
            hidden.append(name)
            assert example["answer"] == "(the task shows no answer)"
            continue
        texts = [item["answer"], item["answer"][:-1]]
        columns = {key: [value] * 2 for key, value in example.items()}
        right, cut = score([f"<answer>{text}</answer>" for text in texts], **columns)
        assert right == 1.0, name
        task = reasoning_gym.create_dataset(name, seed=0, size=1)
        try:
            expected = task.score_answer(texts[1].strip(), task[0])
        except Exception:  # of the task
            expected = 0
        assert cut == expected, name
    assert hidden == ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]


@pytest.mark.parametrize(
    "task, right, wrong",
    [
        ("propositional_logic size=2", "(Q ∨ P)", "no formula"),
        (TRIANGLE, '{"0": 1, "1": 2, "2": 3}', '{"0": 1, "1": 2, "2": 2}'),
    ],
)
def test_a_task_that_shows_no_answer_scores_answers(score, task, right, wrong) -> None:
    returned = scores(score, task, [f"<answer>{text}</answer>" for text in (right, wrong)])
    assert returned[0] == 1.0 and returned[1] < 1


def test_the_score_does_not_apply_to_a_question_of_the_user(score) -> None:
    assert score(["<answer>4</answer>"], question=["2+2?"], answer=["4"]) == [None]


def test_a_run_with_the_printed_settings_trains_and_its_accuracy_is_the_task_s(
    tmp_path: Path,
) -> None:
    _, settings = write(tmp_path / "sums", "chain_sum max_terms=3 max_digits=2 size=100")
    short = environment("STEPS=1 BATCH_SIZE=4 EVAL_EVERY_STEPS=1 EVAL_PROMPTS=8 EXPORT_HF=none")
    done = run_as_user(tmp_path / "run", **settings, **short)
    assert done.code == 0, done.errors
    assert " accuracy_of=score_answer " in done.lines
    assert any("train-reward/func/score_answer/mean" in record for record in done.records)
