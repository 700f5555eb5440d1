"""Claims about tiny/: its dataset is right, and it can be made again."""

import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import REPO, run_as_user_here
from safetensors.numpy import load_file

from model import hf
from model.params import init_params
from rewards import extract_answer, parse_number
from tiny import make

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


EXPERTS = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32}
EXPERTS |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
EXPERTS |= {"norm_topk_prob": True}  # docs/experts.md makes this model


@pytest.mark.slow
def test_make_tiny_makes_these_files_and_each_stage_trains_all_weights_of_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up, stages = make.warm_up, [x._replace(steps=1, prompts=16) for x in make.STAGES]
    monkeypatch.setattr(
        make, "warm_up", lambda folder, examples, _: warm_up(folder, examples[:16], stages)
    )
    argv = ["make.py", "--folder", str(tmp_path), "--config", json.dumps(EXPERTS)]
    monkeypatch.setattr(sys, "argv", argv)
    make.main()
    for name in ("train.jsonl", "test.jsonl", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes(), name
    config = json.loads((TINY / "config.json").read_text()) | EXPERTS
    assert json.loads((tmp_path / "config.json").read_text()) == config
    trained, model = load_file(tmp_path / "model.safetensors"), hf.read_config(tmp_path)
    untrained = dict(hf.hf_tensors(init_params(model, jax.random.key(make.SEED)), model))
    assert trained.keys() == untrained.keys()
    for name, weights in trained.items():
        assert np.isfinite(weights).all() and (weights != untrained[name]).any(), name


def test_a_model_that_no_run_could_train_is_refused_in_one_line(tmp_path: Path) -> None:
    folder, config = tmp_path / "model", json.dumps({"model_type": "gpt2"})
    flags = "--folder", str(folder), "--config", config
    done = run_as_user_here(tmp_path / "run", *flags, SCRIPT="tiny/make.py")
    line = rf"error: {folder}/config.json: model_type='gpt2' is not supported; .* is\n$"
    assert done.code == 2 and re.search(f"^{line}", done.errors, re.M)
    assert "Traceback" not in done.errors
