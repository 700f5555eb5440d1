"""Claims about tiny/: its dataset is right, and it can be made again; and about random models."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from models import hf
from models.model import init_params
from rewards import extract_answer, parse_number
from tools import make_tiny

REPO = Path(__file__).resolve().parent.parent
TINY = REPO / "tiny"


def examples(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (TINY / f"{split}.jsonl").open(encoding="utf-8")]


def operands(example: dict[str, str]) -> tuple[str, ...]:
    """The first calculation and the rest of the second: 12+7 and -4 for 12+7=19, 19-4=15."""
    first, second = re.findall(r"<<(.*?)=", example["answer"])
    return first, second.lstrip("0123456789")


def test_no_question_and_no_operands_of_test_are_in_train() -> None:
    train, test = examples("train"), examples("test")
    assert (len(train), len(test)) == (4000, 500)
    assert not {x["question"] for x in train} & {x["question"] for x in test}
    assert not set(map(operands, train)) & set(map(operands, test))


def test_every_shown_step_and_answer_is_right() -> None:
    for example in examples("train") + examples("test"):
        steps = re.findall(r"<<(\d+)([-+])(\d+)=(\d+)>>\4\n", example["answer"])
        assert len(steps) == 2
        for a, sign, b, result in steps:
            assert int(a) + (int(b) if sign == "+" else -int(b)) == int(result)
        assert extract_answer(example["answer"]) == parse_number(steps[1][3])


def test_make_tiny_makes_this_dataset() -> None:
    made = make_tiny.word_problems(random.Random(make_tiny.SEED))
    assert made == (examples("train"), examples("test"))


def test_the_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 6e6


@pytest.mark.slow
def test_every_stage_of_its_supervised_training_takes_a_step() -> None:
    tokenizer, model = hf.load_tokenizer(TINY), hf.read_config(TINY)
    stages = [stage._replace(steps=1, prompts=4) for stage in make_tiny.STAGES]
    params = make_tiny.warm_up(model, tokenizer, examples("train")[:8], stages)
    untrained = init_params(model, jax.random.key(make_tiny.SEED))
    for new, old in zip(jax.tree.leaves(params), jax.tree.leaves(untrained), strict=True):
        assert np.isfinite(new).all() and (new != old).any()


# ---- make_random.py ------------------------------------------------------------------------------


def made(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REPO / "tools" / "make_random.py"), str(TINY), "small", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_random_model_has_the_given_sizes_and_can_be_read(tmp_path: Path) -> None:
    assert made(tmp_path, "hidden_size=64", "num_hidden_layers=2").returncode == 0
    model, _ = hf.read_model(tmp_path / "small", "")
    assert (model.hidden_size, model.num_layers, model.intermediate_size) == (64, 2, 384)
    again = made(tmp_path, "hidden_size=64")
    assert (again.returncode, again.stderr) == (2, "error: small exists; choose another folder\n")


def test_a_random_model_that_cannot_be_computed_leaves_no_folder(tmp_path: Path) -> None:
    unknown = made(tmp_path, "hidden=64")
    assert unknown.returncode == 2 and "config.json has no hidden; it has [" in unknown.stderr
    assert not (tmp_path / "small").exists()
