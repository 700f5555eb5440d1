"""The embedded default: what tiny/ holds, and what its model can and cannot do before training."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from test_train import train

from models import hf
from models.model import init_params
from rewards import extract_answer, parse_number
from tools import make_tiny

TINY = Path(__file__).resolve().parent.parent / "tiny"


def rows(split: str) -> list[dict]:
    return [json.loads(line) for line in (TINY / f"{split}.jsonl").open(encoding="utf-8")]


def operands(row: dict) -> tuple[str, ...]:
    """(first step, second operation and operand): 12+7 and -4 of <<12+7=19>>, <<19-4=15>>."""
    first, second = re.findall(r"<<(.*?)=", row["answer"])
    return first, second.lstrip("0123456789")


def test_held_out_questions_and_operands_are_not_in_train() -> None:
    train_rows, test_rows = rows("train"), rows("test")
    assert (len(train_rows), len(test_rows)) == (4000, 500)
    assert not {r["question"] for r in train_rows} & {r["question"] for r in test_rows}
    assert not set(map(operands, train_rows)) & set(map(operands, test_rows))


def test_every_shown_step_and_answer_is_right() -> None:
    for row in rows("train") + rows("test"):
        steps = re.findall(r"<<(\d+)([-+])(\d+)=(\d+)>>\4\n", row["answer"])
        assert len(steps) == 2
        for a, sign, b, result in steps:
            assert int(a) + (int(b) if sign == "+" else -int(b)) == int(result)
        assert extract_answer(row["answer"]) == parse_number(steps[1][3])


def test_the_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 6e6


def test_every_stage_of_its_supervised_training_takes_a_step() -> None:
    tokenizer, config = hf.load_tokenizer(TINY), hf.read_config(TINY)
    stages = [stage._replace(steps=1, prompts=4) for stage in make_tiny.STAGES]
    params = make_tiny.warm_up(config, tokenizer, rows("train")[:8], stages)
    untrained = init_params(config, jax.random.key(make_tiny.SEED))
    for new, old in zip(jax.tree.leaves(params), jax.tree.leaves(untrained), strict=True):
        assert np.isfinite(new).all() and (new != old).any()


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Step 0, eight samples of each held-out question."""
    out = tmp_path_factory.mktemp("tiny") / "run"
    return train(out, STEPS="0", EVAL_EVERY_STEPS="1", EVAL_SAMPLES="8").records[0]


def test_before_training_it_has_the_format_and_finds_most_answers_in_eight_tries(
    evaluated: dict,
) -> None:
    assert evaluated["eval/reward/func/reward_format/mean"] >= 0.8
    assert evaluated["eval/pass_at_8"] >= 0.8
    assert evaluated["eval/accuracy"] <= 0.5
