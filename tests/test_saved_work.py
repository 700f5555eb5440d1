"""What saves time changes no result: packed rows, and sequences that are skipped because they add
nothing to the gradient; and the metrics of an update that computes a part of its tokens."""

import math
from pathlib import Path

import numpy as np
import pytest
from runs import Result, environment, train, train_two
from safetensors.numpy import load_file
from small_model import batch_of, stopping_model

from metrics import merge_metrics, merge_updates, of_all_tokens

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
    of_steps |= {"sampling_logp_difference/max": 0.7, "grad_norm": 1.0}
    assert of_all_tokens(of_steps, batch, np.arange(2)) == pytest.approx(
        {
            "loss": 0.3,
            "entropy": (1 + 1 + 1 + 0.5 + 1.5 + 4) / 6,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_max": 0.4,
            "sampling_logp_difference/mean": 0.1 * 6 / 3,
            "is_weight/mean": 0.5 * 6 / 3,
            "sampling_logp_difference/max": 0.7,
            "grad_norm": 1.0,
            "update_token_count": 3.0,
        }
    )
    everything = of_all_tokens(of_steps, batch, np.arange(4))
    assert everything == of_steps | {"entropy": 1.5, "update_token_count": 6.0}
    zeros = {"loss": 0.0, "grad_norm": 0.0}
    nothing = of_all_tokens(zeros, batch, np.arange(0))
    assert nothing == zeros | {"entropy": 1.5, "update_token_count": 0.0}
    assert merge_updates([nothing, everything])["is_weight/mean"] == 0.5


def missing(metrics: dict[str, float]) -> set[str]:
    """The names of the metrics that are NaN."""
    return {name for name, value in metrics.items() if math.isnan(value)}


def test_an_update_without_a_token_that_counts_has_a_loss_and_no_other_value() -> None:
    """All its completions were cut off, and MASK_TRUNCATED_COMPLETIONS leaves them out."""
    mask = np.zeros((4, 2), np.int32)
    batch = batch_of([[1], [2]], mask, mask, mask.astype("f"), np.array([1, -1, 0, 0], "f"))
    found = of_all_tokens({"loss": 0.0}, batch, np.arange(0))
    assert (found["loss"], found["update_token_count"]) == (0.0, 0.0)
    assert missing(found) == {*found} - {"loss", "update_token_count"}


def test_the_updates_of_a_step_have_means_and_the_extremes_of_all() -> None:
    """An update without a value is left out, and one that is not finite is not."""
    nothing = {"loss": 0.0, "grad_norm": 0.0, "entropy": NAN, "clip_ratio/low_min": NAN}
    learnt = {"loss": 0.5, "grad_norm": 2.0, "entropy": 1.5, "clip_ratio/low_min": 0.25}
    later = {"loss": 0.1, "grad_norm": 1.0, "entropy": 2.5, "clip_ratio/low_min": 0.125}
    step = merge_updates([learnt, nothing, later])
    assert step == pytest.approx(
        {
            "loss": 0.2,
            "grad_norm": 1.0,
            "entropy": 2.0,
            "clip_ratio/low_min": 0.125,
        }
    )
    most = [learnt | {"clip_ratio/high_max": x} for x in (0.0, 0.5, 0.25)]
    assert merge_updates(most)["clip_ratio/high_max"] == 0.5
    assert merge_updates([learnt]) == learnt
    assert missing(merge_updates([nothing, nothing])) == {*step} - {"loss", "grad_norm"}
    broken = {"loss": NAN, "grad_norm": NAN, "entropy": NAN}
    assert missing(merge_updates([learnt, learnt | broken])) == {*broken}


def test_extremes_of_micro_steps_are_merged_as_extremes_and_other_metrics_are_summed() -> None:
    names = ("loss", "clip_ratio/low_min", "clip_ratio/high_max", "sampling_logp_difference/max")
    parts = [(0.5, 0.25, 0.5, 1.0), (-2.0, 1.0, 0.75, 0.5), (0.25, 0.5, 0.0, 0.0)]
    parts = [dict(zip(names, np.float32(values), strict=True)) for values in parts]
    assert merge_metrics(parts) == dict(zip(names, (-1.25, 0.25, 0.75, 1.0), strict=True))


# ---- Runs ----------------------------------------------------------------------------------------

# All that a step can have: a reference, a quantile of the step's entropies, several mini-batches,
# several epochs, the tokens that could be drawn, and a ratio for each sequence. At TEMPERATURE=1
# the entropies of the random model are so equal that rounding would decide which tokens the
# quantile keeps.
EVERYTHING = environment(
    """BETA=0.05 TOP_ENTROPY_QUANTILE=0.6 NUM_MINI_BATCHES=2 PPO_EPOCHS=2 TOP_K=20 LOSS_TYPE=gspo
    IS_MODE=sequence_truncate EPS_LOW=3e-4 EPS_HIGH=4e-4 LEARNING_RATE=3e-4
    MASK_TRUNCATED_COMPLETIONS=1 TEMPERATURE=0.3 STEPS=2 SWITCHED_OFF=drops_ended"""
)
# Two updates in a step, with ratios that are clipped. With sgd the weights change by the gradient.
SKIPPING = """NUM_MINI_BATCHES=2 OPTIMIZER=sgd LEARNING_RATE=1 WARMUP_RATIO=0 EPS_LOW=1e-4
    EPS_HIGH=1e-4 IS_MODE=token_truncate REWARD_WEIGHTS=1"""
# Half of the questions give every completion the same reward.
REWARD = """
def half(completions, answer, completion_ids, **columns):
    odd = [int(text.rsplit(" ", 1)[-1]) % 2 for text in answer]
    return [float(len(ids)) if i else 1.0 for i, ids in zip(odd, completion_ids)]

def same(completions, **columns):
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a model whose completions have uneven lengths."""
    folder = tmp_path_factory.mktemp("models")
    text = "STEPS=1 BATCH_SIZE=8 NUM_PRE_Q=4 MAX_LENGTH_SAMPLE=128 TRAIN_MICRO_BATCH_SIZE=8"
    return environment(f"{text} MODEL_PATH={stopping_model(folder)}")


@pytest.fixture(scope="module")
def skipping(settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("rewards") / "half.py"
    file.write_text(REWARD)
    return settings | environment(SKIPPING) | {"REWARD_FN": f"{file}:half"}


@pytest.fixture(scope="module")
def nothing_saved(skipping: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A step in padded rows with all sequences."""
    out = tmp_path_factory.mktemp("runs") / "off"
    return train(out, **skipping, SWITCHED_OFF="packs skips drops_ended")


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


def assert_skips_the_same(result: Result, expected: Result) -> None:
    """Equal, but for the means over what was computed."""
    assert_same(result, expected, "update_token_count", "is_weight", "entropy")
    [ours], [theirs] = result.records, expected.records
    count = "train-other/update_token_count"
    assert ours[count] < 0.7 * theirs[count]
    assert ours["train-other/entropy"] == pytest.approx(theirs["train-other/entropy"], rel=0.03)


def exported(result: Result) -> dict[str, np.ndarray]:
    return load_file(result.out / "hf" / "model.safetensors")


def test_a_run_learns_the_same_from_packed_rows_without_what_adds_nothing(
    tmp_path: Path, skipping: dict[str, str], nothing_saved: Result
) -> None:
    """One run packs and skips nothing, and the other does both."""
    packed = train(tmp_path / "packed", **skipping, SWITCHED_OFF="skips drops_ended")
    both = train(tmp_path / "both", **skipping)
    assert_same(packed, nothing_saved)
    assert_skips_the_same(both, nothing_saved)
    assert packed.records[0][COMPUTED] < 1.3 and nothing_saved.records[0][COMPUTED] > 2
    for result in (packed, both):
        ours, theirs = exported(result), exported(nothing_saved)
        for name, weights in theirs.items():
            np.testing.assert_allclose(ours[name], weights, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_every_part_of_a_step_is_the_same_on_one_device_and_on_eight(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    settings = settings | EVERYTHING
    off = {"SWITCHED_OFF": "packs drops_ended"}
    expected = train(tmp_path / "off", **settings | off)
    assert expected.records[1]["train-other/clip_ratio/region_mean"] > 0
    assert_same(train(tmp_path / "one", **settings), expected)
    assert_same(train(tmp_path / "eight", devices=8, **settings), expected)


@pytest.mark.slow
def test_two_processes_skip_the_same(
    tmp_path: Path, skipping: dict[str, str], nothing_saved: Result
) -> None:
    both = skipping | {"BATCH_SIZE": "4", "TRAIN_MICRO_BATCH_SIZE": "4"}
    results = train_two(tmp_path / "two", 2, **both)
    texts = [pair for result in results for pair in result.completions]
    assert_skips_the_same(results[0]._replace(completions=texts), nothing_saved)


def test_a_step_without_any_advantage_changes_no_weight(
    tmp_path: Path, skipping: dict[str, str]
) -> None:
    everything = skipping["REWARD_FN"].replace(":half", ":same")
    result = train(tmp_path / "run", **skipping | {"REWARD_FN": everything})
    [record] = result.records
    names = {name.removeprefix("train-other/") for name in record}
    assert not names & {"sampling_logp_difference/mean", "is_weight/mean", "is_weight/over_cap"}
    assert record["train-other/grad_norm"] == record["train-other/loss"] == 0
    assert record["train-other/update_token_count"] == 0 and record["train-other/entropy"] > 0
    before = load_file(f"{skipping['MODEL_PATH']}/model.safetensors")
    for name, weights in exported(result).items():
        np.testing.assert_array_equal(weights, before[name], err_msg=name)
