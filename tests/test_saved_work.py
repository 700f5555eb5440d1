"""What saves time changes no result: packed rows, and sequences that are skipped because they add
nothing to the gradient; and the metrics of an update that computes a part of its tokens."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Result, environment, train
from safetensors.numpy import load_file
from small_model import TINY_QWEN35, batch_of, stopping_model

import update
from infra.sizes import next_multiple
from metrics import merge_updates
from rows import Batch, RowLimits, RowShape
from update import rescale_to_all_tokens

COMPUTED = "throughput/update/computed_per_token"
NAN = math.nan

# ---- The metrics of an update and of a step ------------------------------------------------------


def test_the_metrics_of_the_whole_step_by_hand() -> None:
    """Two groups of two sequences; the advantages of the second group are 0."""
    mask = np.array([[1, 1], [1, 0], [1, 1], [1, 0]], np.int32)
    logps = np.array([[-1, -1], [-1, 9], [-0.5, -1.5], [-4, 9]], np.float32)
    advantages = np.array([1, -1, 0, 0], np.float32)
    batch = batch_of([[1], [2]], mask, mask, logps, advantages)
    batch = batch._replace(lengths=np.full(4, 2))  # no metric counts tokens outside the mask
    of_steps = {"loss": 0.3, "clip_ratio/low_min": 0.2, "clip_ratio/high_max": 0.4}
    of_steps |= {"sampling_logp_difference/mean": 0.1, "is_weight/mean": 0.5}
    of_steps |= {"sampling_logp_difference/max": 0.7, "grad_norm": 1.0, "param_norm": 9.0}
    assert rescale_to_all_tokens(of_steps, batch, np.arange(2)) == pytest.approx(
        {
            "loss": 0.3,
            "entropy": (1 + 1 + 1 + 0.5 + 1.5 + 4) / 6,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_max": 0.4,
            "sampling_logp_difference/mean": 0.1 * 6 / 3,
            "is_weight/mean": 0.5 * 6 / 3,
            "sampling_logp_difference/max": 0.7,
            "grad_norm": 1.0,
            "param_norm": 9.0,
            "update_token_count": 3.0,
        }
    )
    everything = rescale_to_all_tokens(of_steps, batch, np.arange(4))
    assert everything == of_steps | {"entropy": 1.5, "update_token_count": 6.0}
    zeros = {"loss": 0.0, "grad_norm": 0.0, "param_norm": 9.0}
    nothing = rescale_to_all_tokens(zeros, batch, np.arange(0))
    assert nothing == zeros | {"entropy": 1.5, "update_token_count": 0.0}
    assert merge_updates([nothing, everything])["is_weight/mean"] == 0.5


def test_an_update_without_a_value_is_left_out_of_a_step_and_one_that_is_not_finite_is_not() -> (
    None
):
    names = ("loss", "grad_norm", "param_norm", "entropy", "clip_ratio/low_min")
    nothing = dict(zip(names, (0.0, 0.0, 9.0, NAN, NAN), strict=True))
    learnt = dict(zip(names, (0.5, 2.0, 9.5, 1.5, 0.25), strict=True))
    later = dict(zip(names, (0.1, 1.0, 10.0, 2.5, 0.125), strict=True))
    step = dict(zip(names, (0.2, 1.0, 9.5, 2.0, 0.125), strict=True))
    assert merge_updates([learnt, nothing, later]) == pytest.approx(step)
    assert merge_updates([nothing, nothing]) == pytest.approx(nothing, nan_ok=True)
    broken = learnt | {"loss": NAN, "entropy": NAN}
    assert math.isnan(merge_updates([learnt, broken])["entropy"])


# ---- Runs ----------------------------------------------------------------------------------------

# Two updates in a step, with ratios that are clipped. With sgd the weights change by the gradient.
SETTINGS = """
    STEPS=1 BATCH_SIZE=8 NUM_PRE_Q=4 MAX_LENGTH_SAMPLE=128 TRAIN_MICRO_BATCH_SIZE=8 OPTIMIZER=sgd
    NUM_MINI_BATCHES=2 LEARNING_RATE=1 WARMUP_RATIO=0 EPS_LOW=1e-4 EPS_HIGH=1e-4
    IS_MODE=token_truncate REWARD_WEIGHTS=1
"""
# Half of the questions give every completion the same reward.
REWARD = """
def half(completions, answer, completion_ids, **columns):
    odd = [int(text.rsplit(" ", 1)[-1]) % 2 for text in answer]
    return [float(len(ids)) if i else 1.0 for i, ids in zip(odd, completion_ids)]
"""


def padded_rows(
    batch: Batch, sequences: Sequence[int], limits: RowLimits
) -> tuple[list[list[list[int]]], RowShape]:
    """Each sequence has a row of its own, padded to the longest prompt and to MAX_LENGTH_SAMPLE."""
    S = max(batch.prompt_tokens(p) for p in range(len(batch.prompts)))
    T, chunk = batch.completion_ids.shape[1], limits.chunk
    return [[[i]] for i in sequences], RowShape(next_multiple(S, chunk), T, Q=1, chunk=chunk)


def assert_same(result: Result, expected: Result, *left_out: str) -> None:
    """left_out: parts of the names of metrics that need not be equal."""
    assert sorted(result.completions) == sorted(expected.completions)
    left_out = ("batch_local", "logp_difference", *left_out)
    for ours, theirs in zip(result.records, expected.records, strict=True):
        names = [name for name in theirs if name.startswith(("train-other/", "train-reward/"))]
        names = [name for name in names if not any(word in name for word in left_out)]
        assert {"train-other/loss", "train-other/clip_ratio/low_mean"} <= {*names}
        assert {n: ours[n] for n in names} == pytest.approx(
            {n: theirs[n] for n in names}, rel=1e-4, abs=1e-5
        )


@pytest.mark.parametrize(
    "model", [{}, pytest.param(TINY_QWEN35, marks=pytest.mark.slow)], ids=["qwen2", "qwen3_5"]
)
def test_a_run_learns_the_same_from_packed_rows_without_what_adds_nothing(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completions have uneven lengths. One run pads rows and skips nothing; in another ended
    sequences leave the batch, too."""
    (tmp_path / "half.py").write_text(REWARD)
    given = {
        "MODEL_PATH": str(stopping_model(tmp_path, model)),
        "REWARD_FN": f"{tmp_path}/half.py:half",
    }
    given |= environment(SETTINGS)
    computes_all = {"SWITCHED_OFF": "skips_zero_advantages drops_ended"}
    with monkeypatch.context() as patch:
        patch.setattr(update, "plan_rows", padded_rows)
        nothing_saved = train(tmp_path / "off", **given, **computes_all)
    packed = train(tmp_path / "packed", **given, **computes_all)
    both = train(tmp_path / "both", **given)
    assert_same(packed, nothing_saved)
    # Means over what was computed may differ.
    assert_same(both, nothing_saved, "update_token_count", "is_weight", "entropy")
    [ours], [theirs] = both.records, nothing_saved.records
    count, entropy = "train-other/update_token_count", "train-other/entropy"
    assert ours[count] < 0.7 * theirs[count]
    assert ours[entropy] == pytest.approx(theirs[entropy], rel=0.03)
    drawn = [x.records[0]["throughput/rollout/computed_per_token"] for x in (both, nothing_saved)]
    assert drawn[0] < 1.4 and drawn[1] > 2, "sequences that have ended leave the batch"
    limit = 1.4 if model else 1.3  # a chunk of Qwen3.5 is padded to 64 tokens
    assert packed.records[0][COMPUTED] < limit and nothing_saved.records[0][COMPUTED] > 2
    weights, *others = (
        load_file(result.out / "hf" / "model.safetensors")
        for result in (nothing_saved, packed, both)
    )
    for name, expected in weights.items():
        for found in others:
            np.testing.assert_allclose(found[name], expected, atol=1e-5, err_msg=name)
