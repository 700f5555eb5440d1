"""What to do when a device has run out of memory, in words of the run's settings."""

import contextlib
import math
import shlex
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from runtime.sizes import MICRO_SIZES, PASS_SIZES, Sizes, derive, smaller_sizes
from tools.roofline import CHIPS, SLICES, chip_of

EXIT_CODE = 3  # as --plan's where a run does not fit
# The function that was waiting for the device -> what it runs there, and the sizes that decide.
WAITING = {
    "begin": ("what holds the weights and the optimizer's state", ()),
    "save": ("checksums", ()),
    "complete": ("prefill or decode", PASS_SIZES),
    "keep_top_entropy": ("score_tokens", MICRO_SIZES),
    "update": ("micro_step or optimizer_step", MICRO_SIZES),
    "learn": ("score_tokens or mix_weights", MICRO_SIZES),
}


def out_of_memory(cfg: Any, sizes: Sizes, error: jax.errors.JaxRuntimeError) -> str:
    """The line for a program that a device had too little memory for; "" for any other error.

    It names the program, what it asked for, the next smaller size that leaves the step as it is,
    and on a TPU the command that checks this size.
    """
    if "RESOURCE_EXHAUSTED" not in str(error):
        return ""
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    waiting = next((name for name in reversed(frames) if name in WAITING), "")
    program, names = WAITING.get(waiting, ("a copy of the weights", ()))
    wanted = " ".join(str(error).partition("RESOURCE_EXHAUSTED:")[2].split())[:200].rstrip(".")
    found = names and smaller_sizes(
        cfg, sizes, jax.process_count(), jax.local_device_count(), names
    )
    text = f"{program} does not fit the memory of a device: {wanted}. "
    if not names:
        return text + "Use more devices; OPTIMIZER=sgd or lion, or BETA=0, need less"
    if not found:
        return text + "Use more devices, or a lower MAX_LENGTH_SAMPLE or MAX_PROMPT_LENGTH"
    smaller = " ".join(f"{name.upper()}={size}" for name, size in found[-1].items())
    text += f"Try {smaller}"
    if name := slice_name(jax.devices()):
        flags = shlex.join([*sys.argv[1:], "--plan", name])
        text += f"; this checks it: {smaller} python train_grpo.py {flags}"
    return text


@contextlib.contextmanager
def told_in_sizes(cfg: Any) -> Iterator[None]:
    """Ends the program with the line of out_of_memory when a device runs out of memory within."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        sizes = derive(cfg, jax.process_count(), jax.local_device_count())
        if line := out_of_memory(cfg, sizes, error):
            print(f"error: {line}", file=sys.stderr)
            raise SystemExit(EXIT_CODE) from None
        raise


def slice_name(devices: list[jax.Device]) -> str:
    """The name by which --plan knows the TPU slice of these devices; "" for any other."""
    chip = chip_of(devices[0])
    for name, where in SLICES.items():
        if CHIPS[where.chip] is chip and math.prod(where.shape) == len(devices):
            return name
    return ""
