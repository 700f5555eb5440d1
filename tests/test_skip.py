"""What adds nothing to the gradient is not computed, and changes nothing."""

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_model import batch_of, choices_of
from test_drop_ended import small_model
from test_mini_batches import run_of, step_of
from test_train import Result, train, train_two

from config import Config
from loss import Objective, metrics_of_nothing, policy_loss
from metrics import merge_updates, of_all_tokens
from train_grpo import computed_sequences, to_devices
from update import counts_of, to_batch

REPO = Path(__file__).resolve().parent.parent
NAN = math.nan


@pytest.mark.parametrize(
    "settings, skips",
    [
        ("", True),
        ("BETA=0.01", False),
        ("ENTROPY_COEF=0.01", False),
        ("TOP_ENTROPY_QUANTILE=0.5", False),
        ("TOP_P=0.9", True),
        (
            "LOSS_TYPE=cispo EPS_HIGH=5 ADV_ESTIMATOR=reinforce PPO_EPOCHS=2 IS_MODE=token_mask",
            True,
        ),
    ],
)
def test_a_run_skips_only_where_the_advantage_is_all_that_counts(settings, skips) -> None:
    assert Config.from_env(dict(pair.split("=") for pair in settings.split())).skips() is skips


def test_sequences_of_advantage_zero_are_in_no_micro_step() -> None:
    run, batch = run_of("MESH_SHAPE=8,1,1 NUM_MINI_BATCHES=1", "packs"), step_of(masked=5)
    ones = np.ones(32)
    some = batch._replace(advantages=ones * (np.arange(32) % 8 < 4))
    every = batch._replace(advantages=ones)
    assert computed_sequences(run, some).tolist() == [i for i in range(32) if i % 8 < 4]
    assert computed_sequences(run, every).tolist() == [i for i in range(32) if i != 5]
    micro_batches = to_devices(run, some, computed_sequences(run, some))
    assert (
        len(micro_batches) == 2 and len(to_devices(run, every, computed_sequences(run, every))) == 4
    )
    held = np.concatenate([micro_batch.sequences for micro_batch in micro_batches])
    assert sorted(held[held >= 0]) == [i for i in range(32) if i % 8 < 4]
    assert counts_of(some) == counts_of(every)


def test_a_sequence_whose_log_probabilities_are_not_finite_is_computed() -> None:
    """Broken weights draw the same tokens for all sequences, so that all advantages are 0."""
    run, batch = run_of("MESH_SHAPE=8,1,1 NUM_MINI_BATCHES=1"), step_of(masked=5)
    logps = np.where(np.arange(32)[:, None] == 7, np.nan, batch.sampling_logps)
    batch = batch._replace(advantages=np.zeros(32), sampling_logps=logps)
    assert computed_sequences(run, batch).tolist() == [7]


@pytest.mark.parametrize("loss_type", choices_of("loss_type"))
def test_an_update_that_computes_nothing_clips_nothing_and_has_a_loss_of_zero(loss_type) -> None:
    """Its names are those of an update of the same loss that learns."""
    x, length = np.ones((2, 3), np.float32), {"max_completion_length": 3}
    _, learnt = policy_loss(x, x, x[:, 0], x, 6.0, objective=Objective(loss_type, **length))
    assert metrics_of_nothing(loss_type) == dict.fromkeys(learnt, 0.0)


def test_nothing_is_computed_if_every_advantage_is_zero() -> None:
    run, batch = run_of("MESH_SHAPE=8,1,1 NUM_MINI_BATCHES=1"), step_of(masked=5)
    batch = batch._replace(advantages=np.zeros(32))
    assert to_devices(run, batch, computed_sequences(run, batch)) == []
    assert counts_of(batch)["num_tokens"] == 31 * 3
    assert not to_batch([], [], batch).any()


def test_the_metrics_of_the_whole_step_by_hand() -> None:
    """Two groups of two sequences; the advantages of the second group are 0."""
    mask = np.array([[1, 1], [1, 0], [1, 1], [1, 0]], np.int32)
    logps = np.array([[-1, -1], [-1, 9], [-0.5, -1.5], [-4, 9]], np.float32)
    advantages = np.array([1, -1, 0, 0], np.float32)
    batch = batch_of([[1], [2]], mask, mask, logps, advantages)
    batch = batch._replace(lengths=np.full(4, 2))  # no metric counts tokens outside the mask
    of_steps = {"loss": 0.3, "clip_ratio/low_min": 0.2, "clip_ratio/high_max": 0.4}
    of_steps |= {"sampling_logp_difference/mean": 0.1, "is_weight/mean": 0.5, "support/mass": 0.2}
    of_steps |= {"sampling_logp_difference/max": 0.7, "grad_norm": 1.0}
    assert of_all_tokens(of_steps, batch, np.arange(2)) == pytest.approx(
        {
            "loss": 0.3,
            "entropy": (1 + 1 + 1 + 0.5 + 1.5 + 4) / 6,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_max": 0.4,
            "sampling_logp_difference/mean": 0.1 * 6 / 3,
            "is_weight/mean": 0.5 * 6 / 3,
            "support/mass": 0.2 * 6 / 3,
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
    wrong = merge_updates([everything, everything | {"loss": math.nan, "entropy": math.nan}])
    assert math.isnan(wrong["loss"]) and math.isnan(wrong["entropy"])


def missing(metrics: dict[str, float]) -> set[str]:
    """The names of the metrics that are NaN."""
    return {name for name, value in metrics.items() if math.isnan(value)}


def test_an_update_without_a_token_that_counts_has_a_loss_and_no_other_value() -> None:
    """All its completions were cut off, and MASK_TRUNCATED_COMPLETIONS leaves them out."""
    mask = np.zeros((4, 2), np.int32)
    batch = batch_of([[1], [2]], mask, mask, mask.astype("f"), np.array([1, -1, 0, 0], "f"))
    found = of_all_tokens(metrics_of_nothing("dapo"), batch, np.arange(0))
    assert (found["loss"], found["update_token_count"]) == (0.0, 0.0)
    assert missing(found) == {*found} - {"loss", "update_token_count"}
    assert {"entropy", "clip_ratio/low_mean", "clip_ratio/low_min"} <= missing(found)


def test_an_update_without_a_value_is_left_out_of_the_step_and_one_that_is_not_finite_is_not() -> (
    None
):
    nothing = {"loss": 0.0, "grad_norm": 0.0, "entropy": NAN, "clip_ratio/low_min": NAN}
    learnt = {"loss": 0.5, "grad_norm": 2.0, "entropy": 1.5, "clip_ratio/low_min": 0.25}
    step = merge_updates([learnt, nothing, learnt])
    assert step == {
        "loss": 1 / 3,
        "grad_norm": 4 / 3,
        "entropy": 1.5,
        "clip_ratio/low_min": 0.25,
        "clip_ratio_first/low_min": 0.25,
        "clip_ratio_later/low_min": 0.25,
    }
    assert missing(merge_updates([nothing, nothing])) == {*step} - {"loss", "grad_norm"}
    broken = {"loss": NAN, "grad_norm": NAN, "entropy": NAN}
    assert missing(merge_updates([learnt, learnt | broken])) == {*broken}


# ---- Runs ----------------------------------------------------------------------------------------

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
    """Of two updates in a step, with ratios that are clipped. With sgd the weights change by the
    gradient."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "half.py").write_text(REWARD)
    text = f"""STEPS=1 BATCH_SIZE=8 NUM_PRE_Q=4 MAX_LENGTH_SAMPLE=128 TRAIN_MICRO_BATCH_SIZE=8
    NUM_MINI_BATCHES=2 OPTIMIZER=sgd LEARNING_RATE=1 WARMUP_RATIO=0 EPS_LOW=1e-4 EPS_HIGH=1e-4
    IS_MODE=token_truncate MODEL_PATH={small_model(folder)}
    REWARD_FN={folder / "half.py"}:half REWARD_WEIGHTS=1"""
    return dict(pair.split("=", 1) for pair in text.split())


def assert_same(result: Result, expected: Result) -> None:
    """Of one step: equal, but for the means over what was computed."""
    [ours], [theirs] = result.records, expected.records
    count = "train-other/update_token_count"
    assert ours[count] < 0.7 * theirs[count]
    names = [name for name in theirs if name.startswith(("train-other/", "train-reward/"))]
    own = "update_token_count logp_difference is_weight entropy batch_local".split()
    names = [name for name in names if not any(word in name for word in own)]
    assert {"train-other/loss", "train-other/clip_ratio_later/low_mean"} <= {*names}
    assert {n: ours[n] for n in names} == pytest.approx(
        {n: theirs[n] for n in names}, rel=1e-5, abs=1e-7
    )
    assert ours["train-other/entropy"] == pytest.approx(theirs["train-other/entropy"], rel=0.03)


def exported(out: Path) -> dict[str, np.ndarray]:
    return load_file(out / "hf" / "model.safetensors")


def test_a_run_learns_the_same(tmp_path: Path, settings: dict[str, str]) -> None:
    expected = train(tmp_path / "off", **settings, SWITCHED_OFF="skips")
    result = train(tmp_path / "auto", **settings)
    assert_same(result, expected)
    ours, theirs = exported(tmp_path / "auto"), exported(tmp_path / "off")
    for name, weights in theirs.items():
        np.testing.assert_allclose(ours[name], weights, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_step_without_any_advantage_is_a_step_of_zero_gradients(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    everything = settings["REWARD_FN"].replace(":half", ":same")
    expected = train(tmp_path / "off", **settings, SWITCHED_OFF="skips")
    result = train(tmp_path / "auto", **settings | {"REWARD_FN": everything})
    [record], [other] = result.records, expected.records
    lacking = {*other} - {name.replace("same", "half") for name in record}
    of_computed = ("sampling_logp_difference/mean", "sampling_logp_difference/max")
    of_computed += ("is_weight/mean", "is_weight/over_cap")
    assert lacking == {f"train-other/{name}" for name in of_computed}
    assert record["train-other/grad_norm"] == record["train-other/loss"] == 0
    assert record["train-other/update_token_count"] == 0
    entropy = other["train-other/entropy"]
    assert record["train-other/entropy"] == pytest.approx(entropy, rel=0.03)
    before, after = (
        load_file(f"{settings['MODEL_PATH']}/model.safetensors"),
        exported(tmp_path / "auto"),
    )
    for name, weights in after.items():
        np.testing.assert_array_equal(weights, before[name], err_msg=name)


def test_a_step_whose_completions_are_all_left_out_records_no_value_of_a_token(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    cut = {"MAX_LENGTH_SAMPLE": "2", "MODEL_PATH": str(REPO / "tiny"), "BETA": "0.1"}
    cut["MASK_TRUNCATED_COMPLETIONS"] = "1"
    [record] = train(tmp_path / "run", **settings | cut).records
    values = {name: x for name, x in record.items() if name.startswith("train-other/")}
    null = {name.removeprefix("train-other/") for name, x in values.items() if x is None}
    which = ("", "_first", "_later")
    clipped = {"low_mean", "high_mean", "region_mean", "low_min", "high_max"}
    expected = {f"clip_ratio{x}/{name}" for x in which for name in clipped}
    assert null == expected | {"entropy"}
    assert not {"train-other/kl", "train-other/is_weight/mean"} & {*values}
    assert record["train-other/loss"] == record["train-other/grad_norm"] == 0


@pytest.mark.slow
def test_devices_and_processes_skip_the_same(tmp_path: Path, settings: dict[str, str]) -> None:
    expected = train(tmp_path / "off", **settings, SWITCHED_OFF="skips")
    assert_same(train(tmp_path / "eight", devices=8, **settings), expected)
    both = settings | {"BATCH_SIZE": "4", "TRAIN_MICRO_BATCH_SIZE": "4"}
    assert_same(train_two(tmp_path / "two", 2, **both)[0], expected)
