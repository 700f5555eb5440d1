"""Claims about recipes/math_answers.py: what answers are right, in what time, and its questions."""

import gc
import hashlib
import json
import shlex
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from runs import REPO

from chat import read_prefix_messages
from config import Config
from data import load_examples
from evaluation import majority_accuracy
from rewards import load_reward_functions

pytestmark = pytest.mark.parity
math_verify = pytest.importorskip("math_verify")
from recipes import math_answers  # noqa: E402 - it needs the package
from recipes.math_answers import extract_answer, math_correct  # noqa: E402

FILE = REPO / "recipes" / "math_answers.py"
PAIRS = json.loads((REPO / "tests" / "goldens" / "math_verify.json").read_text())["pairs"]
FORMS = (  # of MATH; \boxed{} with one of these is right for the same one
    r"5\sqrt{7};\frac{\sqrt{5}}{4};\sqrt[3]{10};\frac{3\pi}{8};2\sqrt7;3617_8;312_{5};\frac 47;"
    r"\frac{4}7;22,\! 333,\! 400;0.\overline{36};2^{10};7!;\binom{7}{3};\log_2 9;-\frac{7}{12};"
    r"\$41{,}350;125^\circ;37\%;8\frac{1}{3};e^3;6 \text{ cm}^2;\frac{1+\sqrt{13}}{2};(-3)^3;"
    r"3 \times 10^{5};4+3i;(2,-5);x^2-3x+8;6 \text{ and } -9;y=4x-1;(-\infty, 8];\{1, 3\}"
).split(";")
LINE = 'Put your answer on its own line after "Answer:".'  # as a question of DAPO-17k asks


def judge(text: str, right: str, question: str = "?") -> float | None:
    [reward] = math_correct([text], answer=[right], prompts=[question])
    return reward


def test_25_of_30_pairs_have_math_verify_s_verdict_and_5_that_of_the_answer_alone() -> None:
    verdicts = [judge(pair["text"], pair["gold"]) for pair in PAIRS]
    others = {i for i in range(30) if verdicts[i] != PAIRS[i]["default"]}
    assert {i + 1: verdicts[i] for i in others} == {4: 0, 5: 1, 8: 0, 13: 1, 28: 1}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_math_is_right_for_itself_and_wrong_for_another_answer(form: str) -> None:
    parsed = math_verify.parse(rf"\boxed{{{form}}}")
    assert math_verify.verify(parsed, parsed)
    for text in (rf"\boxed{{{form}}}", rf"So $\boxed{{{form}}}$.", f"<answer>{form}.</answer>"):
        assert judge(text, form) == judge(text, f"${form}$") == 1.0
        assert (
            judge(text, "17") == judge(text + r" \boxed{17}", form if "box" in text else "17") == 0
        )


JUDGED = [  # completion, right answer, question, reward
    (r"<think>so \boxed{4}</think> It is 5.", "5", "?", 0.0),  # the text's last number is no answer
    (r"We find \boxed{42", "42", "?", 0.0),
    ("<think>I get 42", "42", "?", 0.0),
    ("**Answer: 42**\n\nHope it helps.", "42", "End with Answer: X.", 1.0),
    ("<answer>There are 6 or 7 pens</answer>", "7", "?", 0.0),
    ("<answer>12 cm</answer>", "12", "?", 1.0),
    ("<answer>B</answer>", r"\text{B}", "?", 1.0),
    ("<answer></answer>", "0", "?", 0.0),
    (r"\boxed{42" + "+0" * 150 + "}", "42", "?", 0.0),  # more than 300 characters
    (r"\boxed{3}", r"First \boxed{2}, but then \boxed{3}.", "?", 1.0),  # a solution of MATH
    (r"\boxed{72}", "She has 5 cats.\n#### 72", "?", 1.0),
    (r"\boxed{72}", "", "?", None),
    ("3 + 4\nAnswer: 34", "34", "?", 0.0),  # nobody has asked for the line
    ("3 + 4\nAnswer: 34", "34", LINE, 1.0),
    ("Answer: 3\n**Answer:** $34$.\nThis is 5.", "34", LINE, 1.0),  # the last such line
    ("**Answer: 34**", "34", LINE, 1.0),
    ("Answer:\n34", "34", LINE, 1.0),
    ("Answer:", "34", LINE, 0.0),
    (r"\boxed{34}, so Answer: 35", "34", LINE, 1.0),
    ("<think>Maybe Answer: 34", "34", LINE, 0.0),  # a thought that is never closed
    (r"<think>It is \boxed{34}.", "34", "?", 0.0),
    ("\\boxed{1\N{FRACTION SLASH}2}", "0.5", "?", 1.0),
    ("It is 34", "34", LINE, 0.0),
]


@pytest.mark.parametrize("completion, right, question, reward", JUDGED)
def test_only_the_answer_is_judged_and_in_the_same_way_of_messages(
    completion: str, right: str, question: str, reward: float | None
) -> None:
    assert judge(completion, right, question) == reward
    chats = [[{"role": "system", "content": "Reason."}, {"role": "user", "content": question}]]
    said = [[{"role": "assistant", "content": completion}]]
    assert math_correct(said, answer=[right], prompts=chats, completion_ids=[[1]]) == [reward]


EQUAL = {  # the text that maj@n counts for each of the answers
    "0.5": (r"\frac{1}{2}", "0.5", r"\dfrac12", ".50", "1/2", r"x=\frac12", "1\u20442"),
    "42": ("42", "42.0", r"42^\circ", "y=42", "042"),
    "2.828427": (r"\sqrt{8}", r"2\sqrt2"),
    "41350": (r"\$41{,}350", "41350", "41{,}350"),
    "{1, 3}": (r"\{1, 3\}", r"\{3,1\}"),
    "b": ("B", r"\text{B}"),
    "0.333333": (r"\frac{1}{3}", "0.333333"),
    "9^{9^{9}}": ("9^{9^{9}}",),  # too large to calculate
    "(10^8)!": ("(10^8)!",),
}


@pytest.mark.parametrize("text", EQUAL)
def test_maj_counts_equal_answers_as_one(text: str) -> None:
    answers = [extract_answer(rf"So \boxed{{{answer}}}.") for answer in EQUAL[text]]
    assert answers == [text] * len(answers)


def test_maj_of_equal_answers_in_three_forms_is_right() -> None:
    forms = [rf"\boxed{{{answer}}}" for answer in (r"\frac{1}{2}", "7", "0.5", "7", r"\dfrac12")]
    correct = np.array([[judge(text, r"\frac{1}{2}") for text in forms]])
    assert majority_accuracy(correct, [*map(extract_answer, forms)]) == 1.0


def test_maj_counts_the_text_of_the_answer_without_its_dot() -> None:
    texts = {"<answer> 42. </answer>": "42", r"\boxed{42}.": "42", "Answer: 42": "42"}
    texts |= {"": None, "42": None, r"\boxed{ }": None}
    assert {text: extract_answer(text) for text in texts} == texts


def test_answers_that_take_ages_are_wrong_within_the_limit_of_a_call() -> None:
    ages = ["9^{9^{9}}", "(10^8)!", r"\sin(10^{1000000})", "x^" * 140 + "1", "{" * 140 + "}" * 140]
    texts, workers = [rf"\boxed{{{text}}}" for text in [*ages, "3"]], {}
    functions = load_reward_functions(f"{FILE}:math_correct", 1.0, 9, 2, workers)
    with closing(*workers.values()):
        columns = {"answer": ["3"] * len(texts), "question": ["?"] * len(texts)}
        assert functions[0](texts, **columns) == [0.0] * len(ages) + [1.0]
        assert functions[0].extract_answer(texts[-1]) == "3"


def test_400_different_completions_are_judged_in_less_than_6_seconds() -> None:
    n = len(FORMS)
    rights = [FORMS[i % n] for i in range(400)]
    answers = [FORMS[(i + i // n) % n] for i in range(400)]  # the first n are right
    texts = [rf"Case {i}. \boxed{{{answer}}}" for i, answer in enumerate(answers)]
    gc.freeze()  # a collection of all tests in this process would take seconds
    start = time.thread_time()
    rewards = math_correct(texts, answer=rights, prompts=["?"] * 400)
    assert time.thread_time() - start < 6.0
    gc.unfreeze()
    assert rewards[:n] == [1.0] * n
    assert sum(rewards) == n + 1  # \frac 47 is \frac{4}7


def test_the_recipe_writes_equal_easy_questions_with_right_answers_and_prints_the_command_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(FILE), str(tmp_path / "a folder")])
    math_answers.main()
    *settings, python, script = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert (python, script) == ("python", "train_grpo.py")
    cfg = Config.from_env(dict(setting.split("=", 1) for setting in settings))
    assert cfg.reward_fn == f"{FILE}:math_correct"
    assert read_prefix_messages(cfg.system_prompt)[-1]["role"] == "assistant"
    examples = load_examples(cfg.dataset, "", "train", cfg.question_column, cfg.answer_column)
    assert len(examples) == 160

    files = sorted((tmp_path / "a folder").iterdir())
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}
    assert digests == {"train.jsonl": "610655acb00c955e", "test.jsonl": "30b35b9a12b42a3a"}
    examples = [json.loads(line) for file in files for line in file.open(encoding="utf-8")]
    assert len({example["problem"] for example in examples}) == len(examples) == 200
    for example in examples:
        assert judge(rf"\boxed{{{example['answer']}}}", example["answer"]) == 1.0
