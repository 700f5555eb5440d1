"""sizes.py: the sizes of a step on a slice, by literal values."""

import itertools
from typing import Any

import numpy as np
import pytest

from config import Config
from data import pad_prompts
from runtime.mistakes import UserMistake
from runtime.sizes import Sizes, bucket, derive, eval_questions, prompt_share, prompt_width

# Sizes(local_batch, global_batch, prompt_batch_size, passes_per_step, micro_batch_size,
#       grad_accum_steps, prompts_per_step)
REAL = "MODEL_PATH=some/model"  # a run without recipes/tiny.yaml


def sizes(slice_: str, settings: str) -> Sizes:
    """slice_: processes x local devices, such as 2x4."""
    env = dict(setting.split("=") for setting in settings.split())
    return derive(Config.from_env(env), *map(int, slice_.split("x")))


@pytest.mark.parametrize("model", ["", REAL], ids=["tiny", "real"])
def test_the_worked_examples_come_out_to_the_digit(model: Any) -> None:
    a4 = sizes("2x4", f"{model} BATCH_SIZE=2 NUM_PRE_Q=8 TRAIN_MICRO_BATCH_SIZE=4")
    assert a4 == Sizes(16, 32, 2, 1, 4, 4, 4)
    rollout = "ROLLOUT_GLOBAL_BATCH_SIZE=16 ROLLOUT_PER_DEVICE_BATCH_SIZE=1 NUM_PRE_Q=2"
    b4 = sizes("2x4", f"{model} {rollout} TRAIN_PER_DEVICE_MICRO_BATCH_SIZE=1")
    assert b4 == Sizes(16, 32, 4, 2, 4, 4, 16)
    bs128 = f"{model} ROLLOUT_BATCH_SIZE=128 NUM_PRE_Q=8 TRAIN_MICRO_BATCH_SIZE=16"
    assert sizes("1x8", bs128) == Sizes(128, 128, 16, 1, 16, 8, 16)  # v6e-8
    assert sizes("2x4", bs128) == Sizes(64, 128, 8, 1, 16, 4, 16)  # v4-16
    assert sizes("4x4", bs128) == Sizes(32, 128, 4, 1, 16, 2, 16)  # v6e-16


def test_the_tiny_step_is_the_same_on_one_device_eight_devices_and_two_processes() -> None:
    for slice_ in ("1x1", "1x2", "1x4", "1x8", "2x1", "2x4"):
        batch = sizes(slice_, "")
        assert (batch.prompts_per_step, batch.global_batch) == (16, 128), slice_


def test_sizes_left_at_their_defaults_are_2_prompts_and_4_sequences_per_device_or_fewer() -> None:
    assert sizes("2x4", REAL) == Sizes(64, 128, 8, 1, 16, 4, 16)
    assert sizes("1x1", f"{REAL} BATCH_SIZE=2 NUM_PRE_Q=5").micro_batch_size == 2
    assert sizes("1x4", f"{REAL} BATCH_SIZE=1 NUM_PRE_Q=8").micro_batch_size == 8
    assert sizes("1x4", f"{REAL} BATCH_SIZE=1 NUM_PRE_Q=20").micro_batch_size == 4
    tiny = sizes("1x1", "BATCH_SIZE=1 NUM_PRE_Q=7")
    assert tiny.micro_batch_size == 1


def test_grad_accum_steps_alone_set_the_micro_batch() -> None:
    assert sizes("2x1", f"{REAL} BATCH_SIZE=4 GRAD_ACCUM_STEPS=2").micro_batch_size == 16
    assert sizes("1x4", f"{REAL} BATCH_SIZE=8 GRAD_ACCUM_STEPS=16").micro_batch_size == 4
    assert sizes("1x1", "GRAD_ACCUM_STEPS=4").micro_batch_size == 32  # also with the tiny recipe


def test_synonyms_that_agree_are_no_error() -> None:
    rollout = "BATCH_SIZE=1 ROLLOUT_PER_DEVICE_BATCH_SIZE=1 ROLLOUT_GLOBAL_BATCH_SIZE=4"
    train = "TRAIN_MICRO_BATCH_SIZE=2 TRAIN_PER_DEVICE_MICRO_BATCH_SIZE=2 GRAD_ACCUM_STEPS=8"
    assert sizes("2x1", f"{rollout} ROLLOUT_BATCH_SIZE=32 {train}") == Sizes(16, 32, 1, 2, 2, 8, 4)


# Slice, settings of which the last one does not fit -> what it must do -> the nearest that do.
MISFITS = """
1x1 BATCH_SIZE=2 TRAIN_MICRO_BATCH_SIZE=7 -> must divide {made}; -> 4, 8
1x4 BATCH_SIZE=2 TRAIN_MICRO_BATCH_SIZE=2 -> must divide {made} in micro-batches that fill 4 -> 4
1x4 BATCH_SIZE=2 TRAIN_PER_DEVICE_MICRO_BATCH_SIZE=3 -> * 4 local devices = 12 must divide -> 2, 4
1x1 BATCH_SIZE=2 GRAD_ACCUM_STEPS=3 -> must divide {made}; -> 2, 4
1x4 BATCH_SIZE=2 GRAD_ACCUM_STEPS=8 -> must divide {made} in micro-batches that fill 4 -> 4
1x4 NUM_PRE_Q=2 BATCH_SIZE=3 -> must be a multiple of 2 prompts -> 2, 4
2x4 NUM_PRE_Q=2 ROLLOUT_GLOBAL_BATCH_SIZE=10 -> a multiple of 2 processes * 2 prompts -> 8, 12
2x4 BATCH_SIZE=4 ROLLOUT_BATCH_SIZE=100 -> of 2 processes * BATCH_SIZE 4 * NUM_PRE_Q 8 -> 64, 128
1x1 ROLLOUT_BATCH_SIZE=4 -> must be a multiple of 1 processes * 1 prompts -> 8
"""


@pytest.mark.parametrize("row", MISFITS.strip().splitlines())
def test_a_size_that_does_not_fit_is_an_error_that_names_the_nearest_that_work(row: str) -> None:
    made = "local_batch = passes 1 * BATCH_SIZE 2 * NUM_PRE_Q 8 = 16"
    case, words, nearest = row.replace("{made}", made).split(" -> ")
    slice_, settings = case.split(" ", 1)
    wrong = settings.split()[-1]
    with pytest.raises(UserMistake) as error:
        sizes(slice_, f"{REAL} {settings}")
    told = str(error.value)
    assert told.startswith(f"{wrong} ") and words in told
    assert told.partition("; nearest that ")[2].split(": ")[1] == nearest
    for value in nearest.split(", "):
        sizes(slice_, f"{REAL} {settings} {wrong.split('=')[0]}={value}")


def test_two_settings_of_one_size_that_disagree_are_an_error() -> None:
    with pytest.raises(UserMistake, match=r"^ROLLOUT_BATCH_SIZE=64 contradicts .*=16 \* .* = 128;"):
        sizes("1x1", f"{REAL} ROLLOUT_BATCH_SIZE=64 ROLLOUT_GLOBAL_BATCH_SIZE=16")
    with pytest.raises(UserMistake, match="^GRAD_ACCUM_STEPS=3 contradicts local_batch = .* = 4;"):
        sizes("1x1", f"{REAL} BATCH_SIZE=2 TRAIN_MICRO_BATCH_SIZE=4 GRAD_ACCUM_STEPS=3")


def test_every_division_of_an_accepted_step_is_exact() -> None:
    accepted = 0
    slices = [(1, 1), (1, 3), (1, 8), (2, 4), (3, 2)]
    given = [(0, 0), (0, 24), (0, 48), (3, 36), (4, 24), (6, 0)]
    for (processes, devices), k, (pass_, step) in itertools.product(slices, (1, 2, 6, 8), given):
        settings = f"NUM_PRE_Q={k} BATCH_SIZE={pass_} ROLLOUT_GLOBAL_BATCH_SIZE={step}"
        try:
            b = sizes(f"{processes}x{devices}", f"{REAL} {settings}")
        except UserMistake:
            continue
        accepted += 1
        assert b.local_batch == b.passes_per_step * b.prompt_batch_size * k
        assert b.local_batch == b.micro_batch_size * b.grad_accum_steps
        assert b.global_batch == b.local_batch * processes == b.prompts_per_step * k
        assert b.micro_batch_size % devices == b.prompt_batch_size * k % devices == 0
        assert pass_ in (0, b.prompt_batch_size) and step in (0, b.prompts_per_step)
    assert accepted > 60


@pytest.mark.parametrize(
    "prompts, k, samples, devices, questions",
    [(16, 8, 1, 8, 128), (16, 8, 4, 8, 32), (16, 8, 3, 8, 40), (1, 2, 1, 8, 8), (2, 8, 64, 4, 4)],
)
def test_an_evaluation_s_pass_has_about_as_many_sequences_as_a_rollout_s(
    prompts: int, k: int, samples: int, devices: int, questions: int
) -> None:
    assert eval_questions(Sizes(0, 0, prompts, 1, 0, 0, 0), k, samples, devices) == questions


# ---- Padded lengths ------------------------------------------------------------------------------


def test_bucket_is_the_next_power_of_two_or_three_quarters_of_it() -> None:
    lengths = [0, 1, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 96, 97, 128, 250, 1000, 1025, 1537]
    widths = [16, 16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 96, 96, 128, 128, 256, 1024, 1536, 2048]
    assert [bucket(n) for n in lengths] == widths


def test_a_prompt_is_padded_to_a_bucket_and_its_last_token() -> None:
    assert [prompt_width(n) for n in (1, 17, 18, 25, 26)] == [17, 17, 25, 25, 33]
    assert [prompt_width(n, 30) for n in (1, 33, 34)] == [33, 33, 49]  # at least 30


@pytest.mark.parametrize(
    "num_pre_q, sequences_per_shard, share",
    [(8, 16, 8), (8, 8, 8), (8, 12, 4), (8, 4, 4), (8, 2, 2), (8, 1, 1), (6, 4, 2), (3, 8, 1)],
)
def test_the_share_of_a_prompt_divides_the_group_and_the_shard(
    num_pre_q: int, sequences_per_shard: int, share: int
) -> None:
    assert prompt_share(num_pre_q, sequences_per_shard) == share


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = pad_prompts([[5, 6], [1, 2, 3, 4], [7]], 4, 9)
    assert ids.tolist() == [[9, 9, 5, 6], [1, 2, 3, 4], [9, 9, 9, 7]]
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]
    assert ids.dtype == mask.dtype == np.int32
