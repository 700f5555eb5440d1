"""recipes/gsm8k.py: the demonstrations, and the commands of docs/gsm8k.md on the tiny model."""

import json
from pathlib import Path

import pytest
from runs import REPO, Result, environment, few_examples, run_as_user_here

from recipes.gsm8k import check_equations, demonstration, reward_steps
from rewards import extract_answer, reward_correct, reward_format, tag_count_reward

RECIPE = REPO / "recipes/gsm8k.py"
SOLUTIONS = [
    (
        "He buys 5*2=<<5*2=10>>10 pens.\nHe has 10 / 4 = $<<10/4=2.5>>2.50 left.\n#### 2.50",
        "<think>He buys 5*2=10 pens.\nHe has 10 / 4 = $2.50 left.</think>\n<answer>2.50</answer>",
    ),
    ("1000+1 = <<1000+1=1001>>1,001\n#### 1,001", "<think>1000+1 = 1,001</think>\n"),
    ("5-8 = -3\n#### -3", "<think>5-8 = -3</think>\n<answer>-3</answer>"),
]


@pytest.mark.parametrize("solution, text", SOLUTIONS)
def test_a_demonstration_has_no_calculator_marks_and_gets_all_rewards(
    solution: str, text: str
) -> None:
    completion = demonstration(solution)
    assert completion.startswith(text) and extract_answer(completion) == extract_answer(solution)
    for reward in (reward_correct, reward_format, tag_count_reward):
        assert reward(completions=[completion], answer=[solution]) == [1.0], reward


SOLUTION = "10 pens are 5*2=<<5*2=10>>10\n4 are 10 - 6 = $<<10-6=4>>4\n#### 4"
CHECKED = [  # completion, its equations and the right ones, its reward for the steps of SOLUTION
    ("5 * 2 = 10, then 10-6 = $4", 2, 2, 1),
    ("He has 2 x 5 = 10 and 10 - 6 = 5", 2, 1, 0.5),
    ("5 * 2 = 10", 1, 1, 0.5),
    ("5 * 2 = 10, 5 + 2 = 7, 5 - 2 = 3, 10 - 6 = 4", 4, 4, 0.5),  # two of four are wanted
    ("(1 + 4) * 2 = 10, 1,000 / 3 = 333.33 and 20 / 5 = 4.5.", 3, 2, 1 / 3),
    ("1 + 9 = 10 " * 3 + "6 - 2 = 5", 4, 3, 0.25),
    ("10 = 10 and 4 = 4 and 5 apples * 2 = 10", 0, 0, 0),  # these are no equations
    ("1/0 = 10, 5 ** 2 = 4 and ((10 = 10", 2, 0, 0),
]


@pytest.mark.parametrize("completion, equations, right, reward", CHECKED)
def test_steps_are_results_of_the_solution_that_right_equations_reach(
    completion: str, equations: int, right: int, reward: float
) -> None:
    count, results = check_equations(completion)
    assert (count, len(results)) == (equations, right)
    assert reward_steps([completion], [SOLUTION]) == [reward]


def test_a_solution_without_equations_rewards_no_steps() -> None:
    assert reward_steps(["1 + 1 = 2"], ["two\n#### 2"]) == [0.0]


def write_gsm8k(folder: Path, dataset: Path, *more: str) -> Result:
    words = (str(folder), "--dataset", str(dataset), *more)
    return run_as_user_here(folder, *words, SCRIPT=str(RECIPE))


def test_a_dataset_without_solutions_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    done = write_gsm8k(tmp_path / "out", tmp_path)
    lacks = "an answer of split 'train' has no result after ####, '2'"
    line = f"error: --dataset {tmp_path}: {lacks}; give a dataset with GSM8K's solutions\n"
    assert (done.code, done.errors) == (2, line)


def test_long_solutions_are_left_out_of_the_training_questions_only(tmp_path: Path) -> None:
    rows = [{"question": "?", "answer": "<<1+1=2>>2 " * n + "#### 2"} for n in (0, 1, 2, 3)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    lines = [f"{out}/train.jsonl has 3 questions", f"{out}/test.jsonl has 4 questions"]
    assert write_gsm8k(out, tmp_path, "--most-equations", "2").lines.splitlines() == lines


@pytest.mark.slow
def test_the_commands_of_the_page_run_on_the_tiny_model(tmp_path: Path) -> None:
    data, cold = tmp_path / "gsm8k", tmp_path / "cold"
    lines = [f"{data}/train.jsonl has 32 questions", f"{data}/test.jsonl has 8 questions"]
    assert write_gsm8k(data, few_examples(32, 8)).lines.splitlines() == lines
    recipe = ("--config", str(REPO / "recipes/gsm8k_135m.yaml"))
    small = environment(
        f"""ROLLOUT_GLOBAL_BATCH_SIZE=8 STEPS=2 MAX_LENGTH_SAMPLE=48 TRAIN_MICRO_BATCH_SIZE=8
        DATASET={data} REWARD_FN=reward_correct,reward_format,{RECIPE}:reward_steps"""
    )
    sft = {"SCRIPT": "train_sft.py", "COMPLETION_COLUMN": "completion"}
    done = run_as_user_here(cold, *recipe, MODEL_PATH=str(REPO / "tiny"), **small | sft)
    assert done.code == 0, done.errors
    small |= {"MODEL_PATH": str(cold / "hf"), "EVAL_EVERY_STEPS": "2", "EVAL_PROMPTS": "8"}
    done = run_as_user_here(tmp_path / "grpo", *recipe, **small)
    assert done.code == 0, done.errors
    assert [x["step"] for x in done.records if "train-other/loss" in x] == [0, 1]
    assert [x["step"] for x in done.records if "eval/accuracy" in x] == [0, 2]
