"""Claims about tiny/: its dataset is right, and it can be made again."""

import json
import random
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from model import hf
from model.params import init_params
from rewards import extract_answer, parse_number
from tiny import make

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
    made = make.word_problems(random.Random(make.SEED))
    assert made == (examples("train"), examples("test"))


@pytest.mark.slow
def test_every_stage_of_its_supervised_training_takes_a_step(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    stages = [stage._replace(steps=1, prompts=16) for stage in make.STAGES]
    make.warm_up(tmp_path, examples("train")[:16], stages)
    trained, model = load_file(tmp_path / "model.safetensors"), hf.read_config(TINY)
    untrained = dict(hf.hf_tensors(init_params(model, jax.random.key(make.SEED)), model))
    assert trained.keys() == untrained.keys()
    for name, weights in trained.items():
        assert np.isfinite(weights).all() and (weights != untrained[name]).any(), name
