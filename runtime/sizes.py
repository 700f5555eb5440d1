"""The sizes of a step that follow from the batch settings on a slice; exact, or an error.

A size is in prompts or in sequences (a prompt with one of its K = NUM_PRE_Q completions), of one
pass or of the whole step, per device, per process or in all: README.md, "Settings".
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

# Prompts per rollout pass and sequences per micro-step, per device, where no setting says.
DEFAULT_PROMPTS_PER_DEVICE = 2
DEFAULT_MICRO_BATCH_PER_DEVICE = 4

# Two names for one size. A size set at a higher layer silences its synonyms at lower ones.
PASS_SIZES = ("batch_size", "rollout_per_device_batch_size")
STEP_SIZES = ("rollout_batch_size", "rollout_global_batch_size")
MICRO_SIZES = ("train_micro_batch_size", "train_per_device_micro_batch_size")


class Sizes(NamedTuple):
    """The sizes of one step; a sequence is a prompt with one of its completions."""

    local_batch: int  # sequences per step per process
    global_batch: int  # sequences per step over all processes
    prompt_batch_size: int  # prompts per rollout pass per process
    passes_per_step: int
    micro_batch_size: int  # sequences per micro-step per process
    grad_accum_steps: int  # micro-steps per update
    prompts_per_step: int  # P, over all processes


def derive(cfg: Any, processes: int, local_devices: int) -> Sizes:
    """The sizes of a step on `processes` with `local_devices` each; ValueError if none fit."""
    k, devices = cfg.num_pre_q, f"{local_devices} local devices"
    _, size, unit = one_size(cfg, *PASS_SIZES, local_devices, devices)
    prompts = size * unit  # per pass per process
    step_name, step_size, step_unit = one_size(cfg, *STEP_SIZES, k, f"NUM_PRE_Q {k}")
    if not prompts and not step_size:
        prompts = DEFAULT_PROMPTS_PER_DEVICE * local_devices
    fill = local_devices // math.gcd(local_devices, k)  # prompts whose sequences fill the devices
    filling = f"{fill} prompts (NUM_PRE_Q {k} on {devices})"
    exact_quotient("BATCH_SIZE", prompts, fill, filling)
    passes = 1
    if step_size:
        share = f"{processes} processes * " + (f"BATCH_SIZE {prompts}" if prompts else filling)
        share += f" * NUM_PRE_Q {k}" if step_unit == 1 else ""
        smallest = processes * (prompts or fill) * k // step_unit
        quotient = exact_quotient(step_name, step_size, smallest, share)
        passes, prompts = (quotient, prompts) if prompts else (1, quotient * fill)

    local_batch = passes * prompts * k
    made = f"local_batch = passes {passes} * BATCH_SIZE {prompts} * NUM_PRE_Q {k} = {local_batch}"
    micro = micro_batch(cfg, local_devices, local_batch, made)
    accum = local_batch // micro
    if cfg.grad_accum_steps not in (0, accum):
        wrong = f"GRAD_ACCUM_STEPS={cfg.grad_accum_steps} contradicts {made} / micro-batch {micro}"
        raise ValueError(f"{wrong} = {accum}; leave it out, it follows from the sizes")
    per_step = processes * passes * prompts
    return Sizes(local_batch, per_step * k, prompts, passes, micro, accum, per_step)


def smaller_sizes(
    cfg: Any, sizes: Sizes, processes: int, local_devices: int, names: tuple[str, str]
) -> list[dict[str, int]]:
    """Settings, smallest first, of every smaller size that leaves the step as it is.

    names: PASS_SIZES for a smaller rollout pass, MICRO_SIZES for a smaller micro-batch. A size is
    in the unit that the user has set it in, per process or per device.
    """
    if names == PASS_SIZES:
        size, whole = sizes.prompt_batch_size, sizes.prompts_per_step // processes
        free = (
            {}
            if cfg.rollout_batch_size or cfg.rollout_global_batch_size
            else {"rollout_batch_size": sizes.global_batch}
        )
    else:
        size, whole = sizes.micro_batch_size, sizes.local_batch
        free = {"grad_accum_steps": 0} if cfg.grad_accum_steps else {}
    per_process = getattr(cfg, names[0]) > 0
    return [
        ({names[0]: n * local_devices} if per_process else {names[1]: n}) | free
        for n in range(1, size // local_devices)
        if whole // local_devices % n == 0
    ]


def eval_questions(cfg: Any, sizes: Sizes, local_devices: int) -> int:
    """Questions of an evaluation's pass per process: about as many sequences as a rollout's."""
    sequences = sizes.prompt_batch_size * cfg.num_pre_q
    return local_devices * max(1, sequences // (cfg.eval_samples * local_devices))


def one_size(cfg: Any, whole: str, part: str, unit: int, unit_text: str) -> tuple[str, int, int]:
    """The one of two synonyms that is set: name, value, and how many of `whole` one of it makes."""
    total, parts = getattr(cfg, whole), getattr(cfg, part)
    if total and parts and total != parts * unit:
        product = f"{part.upper()}={parts} * {unit_text} = {parts * unit}"
        raise ValueError(f"{whole.upper()}={total} contradicts {product}; set only one of them")
    return (part.upper(), parts, unit) if parts else (whole.upper(), total, 1)


def exact_quotient(name: str, size: int, unit: int, made: str) -> int:
    if size % unit:
        works = nearest(size, [size // unit * unit, size // unit * unit + unit])
        raise ValueError(
            f"{name}={size} must be a multiple of {made} = {unit}; nearest that are: {works}"
        )
    return size // unit


def micro_batch(cfg: Any, local_devices: int, local_batch: int, made: str) -> int:
    """Sequences per micro-step per process: a multiple of the devices that divides local_batch."""
    devices = f"{local_devices} local devices"
    name, size, unit = one_size(cfg, *MICRO_SIZES, local_devices, devices)
    rows = local_batch // local_devices
    fits = [n * local_devices for n in range(1, rows + 1) if rows % n == 0]
    if not size:
        return max(n for n in fits if n <= DEFAULT_MICRO_BATCH_PER_DEVICE * local_devices)
    if size * unit not in fits:
        times = f" * {devices} = {size * unit}" if unit > 1 else ""
        fill = f" and fill {devices}" if local_devices > 1 else ""
        works = nearest(size, [n // unit for n in fits])
        raise ValueError(f"{name}={size}{times} must divide {made}{fill}; nearest that do: {works}")
    return size * unit


def nearest(size: int, works: Sequence[int]) -> str:
    """Of the sizes that work, the next below `size` and the next above."""
    below = [n for n in works if 0 < n < size][-1:]
    above = [n for n in works if n > size][:1]
    return ", ".join(map(str, below + above))
