"""Runs whose updates compute packed rows give the results of runs whose updates compute padding."""

from pathlib import Path

import pytest
from test_drop_ended import small_model
from test_reliability import assert_same_run, start_run, wait_for
from test_train import Result, finish, train, train_two

REPO = Path(__file__).resolve().parent.parent
COMPUTED = "throughput/update/computed_per_token"
PADDED = {"SWITCHED_OFF": "packs skips drops_ended"}
# All that a step can have: a reference, a quantile of the step's entropies, several mini-batches,
# several epochs, the tokens that could be drawn, and a ratio for each sequence. At TEMPERATURE=1
# the entropies of the random model are so equal that rounding would decide which tokens the
# quantile keeps.
EVERYTHING = dict(
    pair.split("=")
    for pair in """
    BETA=0.05 TOP_ENTROPY_QUANTILE=0.6 NUM_MINI_BATCHES=2 PPO_EPOCHS=2 TOP_K=20 LOSS_TYPE=gspo
    IS_MODE=sequence_truncate EPS_LOW=3e-4 EPS_HIGH=4e-4 LEARNING_RATE=3e-4
    MASK_TRUNCATED_COMPLETIONS=1 TEMPERATURE=0.3
    """.split()
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    small = small_model(tmp_path_factory.mktemp("models"))
    text = "STEPS=2 BATCH_SIZE=8 NUM_PRE_Q=4 MAX_LENGTH_SAMPLE=128 EXPORT_HF=none"
    text += f" TRAIN_MICRO_BATCH_SIZE=8 MODEL_PATH={small}"
    return dict(pair.split("=") for pair in text.split()) | {"SWITCHED_OFF": "skips drops_ended"}


def assert_same(result: Result, expected: Result) -> None:
    assert sorted(result.completions) == sorted(expected.completions)
    for ours, theirs in zip(result.records, expected.records, strict=True):
        names = [name for name in theirs if name.startswith(("train-other/", "train-reward/"))]
        names = [n for n in names if "batch_local" not in n and "logp_difference" not in n]
        assert {n: ours[n] for n in names} == pytest.approx(
            {n: theirs[n] for n in names}, rel=1e-4, abs=1e-5
        )


def test_a_run_learns_the_same_and_computes_less(tmp_path: Path, settings: dict[str, str]) -> None:
    expected = train(tmp_path / "off", **settings | PADDED)
    result = train(tmp_path / "auto", **settings)
    assert_same(result, expected)
    assert max(record[COMPUTED] for record in result.records) < 1.3
    assert min(record[COMPUTED] for record in expected.records) > 2


@pytest.mark.slow
def test_every_part_of_a_step_is_the_same_on_devices_and_processes(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    settings = settings | EVERYTHING
    expected = train(tmp_path / "off", **settings | PADDED)
    assert expected.records[1]["train-other/clip_ratio_later/region_mean"] > 0
    assert_same(train(tmp_path / "one", **settings), expected)
    assert_same(train(tmp_path / "eight", devices=8, **settings), expected)
    both = settings | {"BATCH_SIZE": "4", "TRAIN_MICRO_BATCH_SIZE": "4"}
    results = train_two(tmp_path / "two", 2, **both)
    texts = [pair for result in results for pair in result.completions]
    assert_same(results[0]._replace(completions=texts), expected)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_the_same_rows(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    """Which rows a step takes depends on those that the run has used."""
    settings = settings | {"STEPS": "6", "EVAL_EVERY_STEPS": "0"}
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert finish(start_run(undisturbed, **settings), undisturbed).code == 0
    process = start_run(killed, **settings)
    wait_for(process, "^step=3 ")
    process.kill()
    process.communicate()
    result = finish(start_run(killed, **settings), killed)
    assert result.code == 0 and "resumed after step" in result.lines, result.errors
    assert_same_run(undisturbed, killed, steps=6)
