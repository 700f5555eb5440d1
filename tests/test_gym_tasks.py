"""Tasks of reasoning_gym as a dataset: their items, their scores and the mistakes in their names.

The claims that need the package are those of the parity tests, and compare with the package.
"""

import pickle
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from runs import REPO, Result, assert_same_run, run_as_user

import data
from config import Config
from data import load_examples
from infra.mistakes import UserMistake
from infra.settings import GYM_FILE
from rewards import RewardFunction, load_reward_functions
from startup import set_up

SUMS = "reasoning_gym:chain_sum?max_terms=3&max_digits=2&size=400"
# These draw with sets of texts, with a global generator of Python, and with one of NumPy.
HARD_TO_REPEAT = ["ransom_note?size=40", "list_functions?size=40", "codeio?size=60"]
TRIANGLE = "graph_color?min_num_vertices=3&max_num_vertices=3&edge_probability=0.99&size=2"
SLOW_TO_DRAW = {"knight_swap", "sokoban"}  # one item may take seconds
needs_package = pytest.mark.parity


def gym() -> Any:
    return pytest.importorskip("reasoning_gym")


def parts(dataset: str) -> list[list[dict[str, Any]]]:
    return [load_examples(dataset, "", split) for split in ("train", "test")]


def refused(dataset: str, split: str = "train") -> str:
    with pytest.raises(UserMistake) as error:
        load_examples(f"reasoning_gym:{dataset}", "", split)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"DATASET=reasoning_gym:{dataset}")


# ---- Without the package -------------------------------------------------------------------------


def test_without_the_package_a_run_says_at_once_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # it cannot be found now
    with pytest.raises(UserMistake) as error:
        set_up(Config.from_env({"DATASET": "reasoning_gym:countdown"}))
    message = "DATASET=reasoning_gym:countdown needs a package: pip install reasoning-gym"
    assert str(error.value) == message


def test_a_task_scores_its_answers_itself_unless_the_user_names_rewards() -> None:
    rewards = [
        Config(dataset=dataset, reward_fn=reward_fn).reward_fns()
        for dataset in ("reasoning_gym:countdown", "openai/gsm8k")
        for reward_fn in ("", "reward_format")
    ]
    score = f"{REPO}/recipes/gym.py:score_answer"
    assert rewards == [score, "reward_format", "", "reward_format"]


# ---- Items ---------------------------------------------------------------------------------------


@needs_package
def test_the_last_tenth_of_a_task_s_items_is_held_out_and_the_rest_is_trained_on() -> None:
    task = gym().create_dataset("chain_sum", seed=0, size=2500)
    train, test = parts("reasoning_gym:chain_sum")
    wanted = [{name: task[i][name] for name in ("question", "answer")} for i in range(2500)]
    texts = [{name: example[name] for name in wanted[0]} for example in train + test]
    assert len(train) == 2250 and texts[:2250] == wanted[:2250]
    assert texts[2250:] == [x for x in wanted[2250:] if x not in wanted[:2250]]
    question = "State the final answer to the following arithmetic problem: 4 - 1 - 7 ="
    assert texts[1] == {"question": question, "answer": "-4"}
    assert {example["task"] for example in train} == {"chain_sum"}
    (other,) = load_examples("reasoning_gym:chain_sum?seed=1&size=2", "", "train")
    assert other["question"] == question  # item i of a task is the one of seed + i


@needs_package
def test_no_question_of_the_training_is_held_out_and_each_held_out_one_is_there_once(
    capsys: pytest.CaptureFixture,
) -> None:
    gym()
    task = "reasoning_gym:chain_sum?max_terms=2&max_digits=1&size=400"
    train, test = parts(task)
    message = f"left out {40 - len(test)} of 40 held-out questions of {task}: they repeat train"
    assert capsys.readouterr().out.startswith(message)
    train, test = [[example["question"] for example in part] for part in (train, test)]
    assert len(train) == 360 and 0 < len(test) < 40, "200 questions are possible"
    assert len({*train, *test}) == len({*train}) + len(test)
    message = " has no examples in split 'test'; its last tenth only repeats questions of train"
    assert refused("chain_sum?min_terms=1&max_terms=1&max_digits=1&size=400", "test") == message
    assert refused("chain_sum?size=1", "train") == " has no examples in split 'train'"


@needs_package
@pytest.mark.parametrize("task", HARD_TO_REPEAT)
def test_every_process_draws_the_same_items(task: str, monkeypatch) -> None:
    gym()
    drawn = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        data._draw_task.cache_clear()
        drawn.append(load_examples(f"reasoning_gym:{task}", "", "train"))
    assert drawn[0] == drawn[1] and len(drawn[0]) >= 36


@needs_package
@pytest.mark.parametrize(
    "dataset, message",
    [
        ("countdwon", ": reasoning_gym has no task 'countdwon'; the nearest names are countdown, "),
        ("", ": reasoning_gym has no task ''; the nearest names are "),
        (
            "chain_sum?min_term=2",
            ": chain_sum has no argument 'min_term'; it has min_terms, max_terms, min_digits, "
            "max_digits, allow_negation, seed, size",
        ),
        ("chain_sum?min_terms=7", ": AssertionError: max_terms must be >= min_terms"),
        ("chain_sum?min_terms=two", ": min_terms=two is not of the type int"),
        ("chain_sum?allow_negation=2", ": allow_negation=2 is not of the type bool"),
        ("chain_sum?size", ": size= is not of the type int"),
        ("coin_flip?allow_ratio=x", ": coin_flip has no argument 'allow_ratio'; it has "),
        ("countdown?max_value=1&max_numbers=4", ": ValueError: Failed to generate valid expr"),
        ("composite", ": AssertionError: Must specify at least one dataset"),
        ("countdown?operators=[", ": ParserError: while parsing a flow node"),
    ],
)
def test_a_mistake_in_a_task_is_one_line(dataset: str, message: str) -> None:
    gym()
    assert refused(dataset).startswith(message)


@needs_package
def test_a_task_has_no_other_splits_than_train_and_test() -> None:
    gym()
    why = "those of a task are train, and test, its last tenth"
    assert refused("chain_sum?size=9", "dev") == f" has no split 'dev'; {why}"


@needs_package
def test_arguments_become_what_the_task_takes() -> None:
    gym()
    arguments = "operators=[+]&min_numbers=2&max_numbers=2&min_target=2&shuffle=false&size=40"
    (train, _) = parts(f"reasoning_gym:countdown?{arguments}")
    assert all(" + " in example["answer"] for example in train)
    assert load_examples("reasoning_gym:word_sorting?transformation=uppercase&size=2", "", "train")


# ---- Scores --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def score() -> Iterator[RewardFunction]:
    """The reward of a task's answers, as a run loads it beside a built-in one."""
    gym()
    named = f"{GYM_FILE}:score_answer,reward_format"
    workers = {}
    function, _ = load_reward_functions(named, 60, 32, 0, workers)
    with closing(*workers.values()):
        yield function


def scores(score: RewardFunction, dataset: str, texts: list[str]) -> list[float]:
    """Of texts as completions of the first question of a task."""
    (example, *_) = load_examples(f"reasoning_gym:{dataset}", "", "train")
    return score(texts, **{name: [x] * len(texts) for name, x in example.items()})


@needs_package
@pytest.mark.parametrize(
    "completion, reward",
    [
        ("<think>4-1=3</think>\n<answer>-4</answer>", 1.0),
        ("<answer>\n -4.0 </answer> 5", 1.0),
        ("<answer>5</answer><answer>-4</answer>", 1.0),
        ("<answer>-4</answer><answer>5</answer>", 0.0),
        ("<answer>-4</answer><answer>5", 1.0),
        ("<answer>-4", 0.0),
        ("-4", 0.0),
        ("-4</answer>", 0.0),
        ("", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
def test_the_text_in_the_last_closed_answer_is_scored(score, completion, reward) -> None:
    assert scores(score, "chain_sum?seed=1&size=2", [completion]) == [reward]


@needs_package
def test_the_score_is_the_one_of_the_task_also_in_parts(score) -> None:
    item = gym().create_dataset("countdown", seed=0, size=2)
    texts = [item[0]["answer"], "1+1", "one", " "]
    returned = scores(score, "countdown?size=2", [f"<answer>{text}</answer>" for text in texts])
    assert (
        returned == [item.score_answer(text, item[0]) for text in texts] == [1.0, 0.05, 0.01, 0.01]
    )


@needs_package
def test_an_answer_that_takes_ages_or_ends_python_gets_0_and_the_next_one_its_score() -> None:
    right = gym().create_dataset("countdown", seed=0, size=2)[0]["answer"]
    texts = ["9**9**9**9", "9**9**9**9", "9**9**9**9", "exit()", "(" * 5000, right]
    answers = [f"<answer>{text}</answer>" for text in texts]
    # Three seconds are more than REWARD_TIMEOUT_S, to which each answer adds a second.
    workers = {}
    (score,) = load_reward_functions(f"{GYM_FILE}:score_answer", 2, 32, 0, workers)
    with closing(*workers.values()):
        returned = scores(score, "countdown?size=2", answers)
    assert returned == [0.0, 0.0, 0.0, pytest.approx(0, abs=0.01), 0.01, 1.0]


@needs_package
def test_every_task_gives_1_to_the_answer_that_it_shows(score) -> None:
    gym()
    from recipes.gym import DATASETS, draw

    hidden = []
    for name in sorted(DATASETS.keys() - SLOW_TO_DRAW - {"composite"}):
        (example,) = draw(f"{name}?size=1")
        answer = pickle.loads(bytes.fromhex(example["entry"]))["answer"]
        if answer is None:
            hidden.append(name)
            assert example["answer"] == "(the task shows no answer)"
        else:
            columns = {key: [value] for key, value in example.items()}
            assert score([f"<answer>{answer}</answer>"], **columns) == [1.0], name
    assert hidden == ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]


@needs_package
@pytest.mark.parametrize(
    "task, right, wrong",
    [
        ("propositional_logic?size=2", "(Q ∨ P)", "no formula"),
        (TRIANGLE, '{"0": 1, "1": 2, "2": 3}', '{"0": 1, "1": 2, "2": 2}'),
    ],
)
def test_a_task_that_shows_no_answer_scores_answers(score, task, right, wrong) -> None:
    returned = scores(score, task, [f"<answer>{text}</answer>" for text in (right, wrong)])
    assert returned[0] == 1.0 and returned[1] < 1


@needs_package
def test_the_score_does_not_apply_to_a_question_of_the_user(score) -> None:
    assert score(["<answer>4</answer>"], question=["2+2?"], answer=["4"]) == [None]


# ---- Runs ----------------------------------------------------------------------------------------


def run(out: Path, cache: Path, **env: str) -> Result:
    settings = {"DATASET": SUMS, "LR_SCHEDULE": "constant", "WARMUP_RATIO": "0", "BATCH_SIZE": "4"}
    settings |= {"EVAL_EVERY_STEPS": "2", "EVAL_PROMPTS": "8", "SAVE_EVERY_STEPS": "1"}
    settings |= {"SAMPLE_EVERY_STEPS": "1", "EXPORT_HF": "none"}
    done = run_as_user(out, **settings, **env, JAX_COMPILATION_CACHE_DIR=str(cache))
    assert done.code == 0, done.errors
    return done


@needs_package
def test_a_resumed_run_trains_on_the_same_items_and_its_accuracy_is_of_the_task(
    tmp_path: Path, cache: Path
) -> None:
    gym()
    straight = run(tmp_path / "straight", cache, STEPS="4")
    assert " accuracy_of=score_answer " in straight.lines
    assert any("train-reward/func/score_answer/mean" in record for record in straight.records)
    run(tmp_path / "resumed", cache, STEPS="2")
    run(tmp_path / "resumed", cache, STEPS="4", PYTHONHASHSEED="7")
    assert_same_run(tmp_path / "straight", tmp_path / "resumed", steps=4)
