"""Two processes do what one process does, with nearly all features at once."""

import json
from pathlib import Path

import pytest
from runs import REPO, environment, metric_records, train, train_two
from small_model import TINY_EXPERTS, TINY_QWEN35, stopping_model

# Packed rows and ended sequences that leave the batch come with MAX_LENGTH_SAMPLE >= 128. At
# TEMPERATURE=1 the entropies of the random model are so equal that rounding would decide which
# tokens the quantile keeps. SGD, since Adam divides the rounding of small gradients by their size.
# With this SEED and so few sequences the rows of both steps have one shape, compiled once.
EVERYTHING = environment(
    """
    BATCH_SIZE=4 NUM_PRE_Q=4 MAX_LENGTH_SAMPLE=128 TEMPERATURE=0.3 TRAIN_MICRO_BATCH_SIZE=4
    DYNAMIC_SAMPLING=1 DYNAMIC_SAMPLING_MAX_ROUNDS=2 PPO_EPOCHS=2 EPS_LOW=0.05 EPS_HIGH=0.05 SEED=1
    BETA=0.05 TOP_ENTROPY_QUANTILE=0.6 ENTROPY_COEF=0.001 REMAT=none
    TOP_K=20 TOP_P=0.95 IS_MODE=token_mask IS_FLOOR=0.5 MASK_TRUNCATED_COMPLETIONS=1
    REWARD_FN=mine.py:odd,soft_overlong_penalty,repetition_penalty REWARD_WEIGHTS=0,1,1,0
    OVERLONG_CACHE=60 MAX_TURNS=3
    OPTIMIZER=sgd LEARNING_RATE=0.05 LR_SCHEDULE=constant WARMUP_RATIO=0 EXPORT_HF=none
    EVAL_EVERY_STEPS=1 EVAL_PROMPTS=4 EVAL_SAMPLES=4 SAMPLE_EVERY_STEPS=1
    """
)


# It decides about the accuracy, and has no weight in the reward.
ODD = """
def odd(completions, completion_ids, **columns):
    return [len(ids) % 2 for ids in completion_ids]
"""


def measured(out: Path) -> list[dict]:
    """The records without what the machine decides, and without differences of rounding."""
    left_out = ("logp_difference", "batch_local")
    return [
        {k: v for k, v in record.items() if not any(words in k for words in left_out)}
        for record in metric_records(out)
    ]


@pytest.mark.slow
def test_two_processes_and_then_one_learn_and_write_what_one_process_does(tmp_path: Path) -> None:
    """Two processes take the first step, and one process goes on with their checkpoint. The model
    has a layer of linear attention and one of full attention, both with experts."""
    (tmp_path / "mine.py").write_text(ODD)
    model = stopping_model(tmp_path, TINY_QWEN35 | TINY_EXPERTS)
    given = {"MODEL_PATH": str(model), "DATASET": str(REPO / "tiny")}
    given["ENVIRONMENT_CLASS"] = f"{REPO}/tests/games.py:Chance"
    given["REWARD_FN"] = EVERYTHING["REWARD_FN"].replace("mine.py", f"{tmp_path}/mine.py")
    settings = EVERYTHING | given
    alone, moved = tmp_path / "alone", tmp_path / "moved" / "0"
    half = {"BATCH_SIZE": "2", "TRAIN_MICRO_BATCH_SIZE": "2"}
    train(alone, **settings, STEPS="2")
    train_two(moved.parent, 2, **settings | half, STEPS="1")
    assert "resumed after 1 of 2 steps" in train(moved, **settings, STEPS="2").lines
    theirs, ours = measured(alone), measured(moved)
    assert [record["step"] for record in theirs] == [0, 0, 1, 1, 2]  # with three evaluations
    assert ours == [pytest.approx(record, rel=1e-5, abs=1e-6) for record in theirs]
    for name in ("samples.jsonl", "eval.jsonl"):
        assert (moved / name).read_bytes() == (alone / name).read_bytes()
    ours, theirs = (json.loads((out / "summary.json").read_text()) for out in (moved, alone))
    for name in ("state", "why", "steps_done", "verdict"):
        assert ours[name] == theirs[name]
    assert (moved / "report.html").is_file()
    # What the settings turn on has happened.
    first, second = (record for record in measured(alone) if "train-other/kl" in record)
    assert min(step["train-other/kl"] for step in (first, second)) > 0
    assert max(step["train-other/clip_ratio/region_mean"] for step in (first, second)) > 0
    assert max(step["train-other/dynamic_sampling/rounds"] for step in (first, second)) == 2
    assert "train-other/support/cut_tokens" in first
    evaluated = measured(alone)[0]
    assert 0 < evaluated["eval/accuracy/pass_at_1"] < evaluated["eval/accuracy/pass_at_4"]
    for name in ("eval/turns", "train-turns"):
        of_each = [
            record[f"{name}/number"] for record in measured(alone) if f"{name}/number" in record
        ]
        assert 1.3 < min(of_each) and max(of_each) < 2.7
