"""sizes.py: the sizes of a step on a slice, by literal values."""

import numpy as np
import pytest
from runs import environment

from config import Config
from data import pad_prompts
from infra.mistakes import UserMistake
from infra.sizes import Sizes, bucket_length, derive_sizes, eval_questions, prompt_width

# Sizes(local_batch, global_batch, prompt_batch_size, passes_per_step, micro_batch_size,
#       grad_accum_steps, prompts_per_step)
REAL = "MODEL_PATH=some/model"  # a run without recipes/tiny.yaml


def sizes(slice_: str, settings: str) -> Sizes:
    """slice_: processes x local devices, such as 2x4."""
    return derive_sizes(Config.from_env(environment(settings)), *map(int, slice_.split("x")))


def test_the_tiny_step_is_the_same_on_one_device_eight_devices_and_two_processes() -> None:
    for slice_ in ("1x1", "1x8", "2x4"):
        batch = sizes(slice_, "")
        assert (batch.prompts_per_step, batch.global_batch) == (16, 128), slice_


def test_sizes_left_at_their_defaults_are_2_prompts_and_4_sequences_per_device_or_fewer() -> None:
    assert sizes("2x4", REAL) == Sizes(64, 128, 8, 1, 16, 4, 16)
    assert sizes("1x1", f"{REAL} BATCH_SIZE=2 NUM_PRE_Q=5").micro_batch_size == 2
    assert sizes("1x4", f"{REAL} BATCH_SIZE=1 NUM_PRE_Q=8").micro_batch_size == 8
    assert sizes("1x4", f"{REAL} BATCH_SIZE=1 NUM_PRE_Q=20").micro_batch_size == 4
    assert sizes("1x1", "BATCH_SIZE=1 NUM_PRE_Q=7").micro_batch_size == 1


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
1x1 BATCH_SIZE=6 NUM_MINI_BATCHES=4 -> must divide the step's 6 prompts evenly -> 3, 6
1x8 BATCH_SIZE=8 NUM_PRE_Q=4 NUM_MINI_BATCHES=8 -> in parts of 2, which fill the local devices -> 4
"""


@pytest.mark.parametrize("row", MISFITS.strip().splitlines())
def test_a_size_that_does_not_fit_is_an_error_that_names_the_nearest_that_work(row: str) -> None:
    made = "local_batch = passes 1 * BATCH_SIZE 2 * NUM_PRE_Q 8 = 16"
    case, words, nearest = row.replace("{made}", made).split(" -> ")
    slice_, settings = case.split(" ", 1)
    wrong = settings.split()[-1]
    with pytest.raises(UserMistake) as error:
        sizes(slice_, f"{REAL} {settings}")
    message = str(error.value)
    assert message.startswith(f"{wrong} ") and words in message
    assert message.partition("; nearest that ")[2].split(": ")[1] == nearest
    for value in nearest.split(", "):
        sizes(slice_, f"{REAL} {settings} {wrong.split('=')[0]}={value}")


def test_two_settings_of_one_size_that_disagree_are_an_error() -> None:
    with pytest.raises(UserMistake, match=r"^ROLLOUT_BATCH_SIZE=64 contradicts .*=16 \* .* = 128;"):
        sizes("1x1", f"{REAL} ROLLOUT_BATCH_SIZE=64 ROLLOUT_GLOBAL_BATCH_SIZE=16")
    with pytest.raises(UserMistake, match="^GRAD_ACCUM_STEPS=3 contradicts local_batch = .* = 4;"):
        sizes("1x1", f"{REAL} BATCH_SIZE=2 TRAIN_MICRO_BATCH_SIZE=4 GRAD_ACCUM_STEPS=3")


# Local devices, prompts of a pass with NUM_PRE_Q=8, EVAL_SAMPLES -> the questions of a pass.
EVAL_PASSES = [
    (8, 16, 1, 128),  # 128 sequences, as in a rollout pass
    (8, 1, 8, 1),  # a pass of one prompt already fills the devices
    (8, 3, 8, 3),  # --probe samples as training does
    (8, 16, 6, 20),  # 4 questions fill the devices: 120 of 128 sequences
    (8, 1, 3, 8),  # fewer than 8 do not fill them
    (6, 3, 8, 3),
    (1, 4, 64, 1),
]


@pytest.mark.parametrize("devices, prompts, eval_samples, questions", EVAL_PASSES)
def test_an_evaluation_pass_has_as_many_sequences_as_a_rollout_pass_or_the_fewest_that_fit(
    devices: int, prompts: int, eval_samples: int, questions: int
) -> None:
    made = sizes(f"1x{devices}", f"{REAL} BATCH_SIZE={prompts} NUM_PRE_Q=8")
    assert eval_questions(made, 8, eval_samples, devices) == questions


# ---- Padded lengths ------------------------------------------------------------------------------


def test_bucket_is_the_next_power_of_two_or_three_quarters_of_it() -> None:
    lengths = [0, 1, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 96, 97, 128, 250, 1000, 1025, 1537]
    widths = [16, 16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 96, 96, 128, 128, 256, 1024, 1536, 2048]
    assert [bucket_length(n) for n in lengths] == widths


def test_a_prompt_is_padded_to_a_bucket_and_its_last_token() -> None:
    assert [prompt_width(n) for n in (1, 17, 18, 25, 26)] == [17, 17, 25, 25, 33]
    assert [prompt_width(n, 30) for n in (1, 33, 34)] == [33, 33, 49]  # at least 30


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = pad_prompts([[5, 6], [1, 2, 3, 4], [7]], 4, 9)
    assert ids.tolist() == [[9, 9, 5, 6], [1, 2, 3, 4], [9, 9, 9, 7]]
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]
    assert ids.dtype == mask.dtype == np.int32
