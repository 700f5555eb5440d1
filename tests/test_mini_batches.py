"""The mini-batches of a step, their sizes, and which of their sequences the devices compute."""

from unittest.mock import Mock

import numpy as np
import pytest
from runs import REPO, environment, few_examples
from small_model import without_rewards

import data
import train_grpo
from config import Config
from infra.sizes import Sizes, derive_sizes
from rows import Batch
from run import Run
from startup import set_up
from train_grpo import groups_of_updates, with_logps
from update import computed_sequences, loss_counts, pack_to_devices

# ---- Sizes ---------------------------------------------------------------------------------------


def sizes(slice_: str, settings: str) -> Sizes:
    """slice_: processes x local devices, such as 2x4."""
    return derive_sizes(Config.from_env(environment(settings)), *map(int, slice_.split("x")))


def test_an_update_has_its_own_micro_steps() -> None:
    found = sizes("1x1", "BATCH_SIZE=8 NUM_PRE_Q=4 NUM_MINI_BATCHES=4 PPO_EPOCHS=2")
    assert found.local_batch == 32 and found.updates_per_step == 8
    assert found.micro_batch_size * found.grad_accum_steps == 8  # two groups of four
    found = sizes("2x4", "BATCH_SIZE=8 NUM_PRE_Q=4 NUM_MINI_BATCHES=4 GRAD_ACCUM_STEPS=2")
    assert (found.micro_batch_size, found.grad_accum_steps, found.updates_per_step) == (4, 2, 4)
    assert sizes("1x1", "NUM_MINI_BATCHES=8").micro_batch_size == 4


# ---- The mini-batches ----------------------------------------------------------------------------


SMALL = "BATCH_SIZE=8 NUM_PRE_Q=4 NUM_MINI_BATCHES=4 TRAIN_MICRO_BATCH_SIZE=8"


def run_of(settings: str) -> Run:
    folders = f"MODEL_PATH={REPO / 'tiny'} DATASET={few_examples(32, 32)}"
    return set_up(Config.from_env(environment(f"{SMALL} {folders} {settings}")))


def step_of(masked: int) -> Batch:
    """A step of 8 groups of 4 sequences; every array tells the group or the sequence.

    masked: the sequence of which no token counts.
    """
    sequence = np.arange(32)
    mask = np.ones((32, 3), np.int32)
    mask[masked] = 0
    return Batch(
        prompts=[data.Prompt([group] * 5, {}) for group in range(8)],
        completion_ids=np.repeat(sequence[:, None], 3, axis=1).astype(np.int32),
        completion_mask=mask,
        lengths=np.full(32, 3),
        sampling_logps=np.repeat(sequence[:, None], 3, axis=1).astype(np.float32),
        advantages=sequence.astype(np.float64),
        **without_rewards(mask),
    )


def test_every_group_is_in_one_mini_batch_with_all_its_sequences_and_each_has_its_own_counts() -> (
    None
):
    """A sequence of which no token counts is not computed, but it is one of the sequences. With
    ENTROPY_COEF no sequence is skipped."""
    run = run_of("MESH_SHAPE=2,1,4 ENTROPY_COEF=0.1")
    all_groups = groups_of_updates(8, num_mini_batches=4, ppo_epochs=1, seed=(0, 3))
    assert all_groups.shape == (4, 2) and sorted(all_groups.reshape(-1)) == [*range(8)]
    for groups in all_groups:
        mini_batch = step_of(masked=5).select_groups(groups)
        assert [prompt.ids[0] for prompt in mini_batch.prompts] == [*groups]
        members = (groups[:, None] * 4 + np.arange(4)).reshape(-1)  # [8]
        assert [*mini_batch.advantages] == [*members]
        sequences = computed_sequences(mini_batch, run.learner.skips_zero_advantages)
        micro_batches = pack_to_devices(run.learner, mini_batch, sequences)
        advantages = np.concatenate([x.advantages for x in micro_batches])
        counted = np.concatenate([x.completion_mask for x in micro_batches])[:, 0] > 0
        assert sorted(advantages[counted]) == sorted({*members} - {5})
        tokens = 24 - 3 * (1 in groups)  # sequence 5 is one of group 1
        assert [*loss_counts(mini_batch).values()] == [tokens, 8, tokens]


def test_the_mini_batches_follow_from_seed_step_and_epoch_and_a_single_one_is_not_shuffled() -> (
    None
):
    groups = groups_of_updates(8, num_mini_batches=4, ppo_epochs=2, seed=(2, 3))
    orders = [np.random.default_rng([2, 3, epoch]).permutation(8) for epoch in (0, 1)]
    assert groups.tolist() == np.concatenate(orders).reshape(8, 2).tolist()
    whole = groups_of_updates(8, num_mini_batches=1, ppo_epochs=2, seed=(2, 3))
    assert whole.tolist() == [[*range(8)], [*range(8)]]


@pytest.mark.parametrize("quantile, computed", [("1", 0), ("0.5", 1)])
def test_a_step_of_one_update_leaves_every_ratio_at_1_and_computes_entropies_for_their_quantile(
    monkeypatch: pytest.MonkeyPatch, quantile: str, computed: int
) -> None:
    run, batch = run_of(f"NUM_MINI_BATCHES=1 TOP_ENTROPY_QUANTILE={quantile}"), step_of(masked=5)
    ones = np.ones(batch.completion_mask.shape, np.float32)
    compute = Mock(return_value=(ones, ones))
    monkeypatch.setattr(train_grpo, "compute_batch_logps_and_entropies", compute)
    batch = with_logps(run, 0, None, batch)
    assert batch.old_logps is None and (batch.top_mask is not None) == computed
    assert compute.call_count == computed


# ---- Sequences that are left out -----------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, skips",
    [
        ("TOP_P=0.9", True),
        ("BETA=0.01", False),
        ("ENTROPY_COEF=0.01", False),
        ("TOP_ENTROPY_QUANTILE=0.5", False),
        ("LOSS_TYPE=cispo EPS_HIGH=5 ADV_ESTIMATOR=reinforce IS_MODE=token_mask", True),
    ],
)
def test_a_run_skips_only_where_the_advantage_is_all_that_counts(
    settings: str, skips: bool
) -> None:
    assert Config.from_env(environment(settings)).skips_zero_advantages() is skips


def test_a_sequence_is_computed_if_a_log_probability_is_not_finite() -> None:
    """Broken weights draw the same tokens for all sequences, so that all advantages are 0."""
    batch = step_of(masked=5)
    logps = batch.sampling_logps.copy()
    logps[7, 1] = np.nan
    batch = batch._replace(advantages=np.zeros(32), sampling_logps=logps)
    assert computed_sequences(batch, True).tolist() == [7]
