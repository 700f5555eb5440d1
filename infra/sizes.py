"""The sizes of a step, from the batch settings and the devices. Imports neither jax nor numpy.

docs/migration.md says what each batch size counts. A pass is the prefill and decode of one batch of
prompts, and a micro-step the forward and backward of one micro-batch of sequences. If no rollout
size is set, a step is one pass of 2 prompts per device; if only the size of the step is set, the
step is one pass. If no micro-batch size is set, a micro-step has up to 4 sequences per device.
Every division must be exact; otherwise an error names the nearest sizes that fit.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from infra.mistakes import UserMistake

# Prompts per pass and sequences per micro-step, per device, if no setting gives them.
DEFAULT_PROMPTS_PER_DEVICE = 2
DEFAULT_MICRO_BATCH_PER_DEVICE = 4

# Pairs of settings for the same size: a layer that sets one hides both in the layers below.
PASS_SIZES = ("batch_size", "rollout_per_device_batch_size")
STEP_SIZES = ("rollout_batch_size", "rollout_global_batch_size")
MICRO_SIZES = ("train_micro_batch_size", "train_per_device_micro_batch_size")


class Sizes(NamedTuple):
    """The sizes of a step."""

    local_batch: int  # sequences per step per process
    global_batch: int  # B: sequences per step over all processes
    prompt_batch_size: int  # prompts per pass per process
    passes_per_step: int
    micro_batch_size: int  # sequences per micro-step per process
    grad_accum_steps: int  # the largest number of micro-steps of an update
    prompts_per_step: int  # P: prompts per step over all processes
    updates_per_step: int = 1  # NUM_MINI_BATCHES * PPO_EPOCHS

    def line(self) -> str:
        """The line that people parse."""
        return (
            f"local_batch={self.local_batch} global_batch={self.global_batch} "
            f"rollout.prompt_batch_size={self.prompt_batch_size} "
            f"rollout.passes_per_step={self.passes_per_step} "
            f"train.micro_batch_size={self.micro_batch_size} "
            f"train.grad_accum_steps={self.grad_accum_steps} "
            f"train.updates_per_step={self.updates_per_step}"
        )


def derive(cfg: Any, processes: int, local_devices: int) -> Sizes:
    """The sizes of a step on `processes` with `local_devices` each.

    Raises UserMistake if the settings contradict each other or do not divide exactly.
    """
    prompts, passes = pass_sizes(cfg, processes, local_devices)
    mini_batches, per_process = cfg.num_mini_batches, passes * prompts  # prompts per process
    fill = fewest_prompts(cfg.num_pre_q, local_devices)
    where = f" on each of {processes} processes" if processes > 1 else ""
    where += f" in parts of {fill}, which fill the local devices," if fill > 1 else ""
    text = f"NUM_MINI_BATCHES={mini_batches} must divide the step's {per_process} prompts{where}"
    check(mini_batches, divisors(per_process // fill), f"{text} evenly; nearest that do")

    local_batch = per_process * cfg.num_pre_q
    made = f"local_batch = passes {passes} * BATCH_SIZE {prompts} * NUM_PRE_Q {cfg.num_pre_q}"
    made += f" = {local_batch}"
    update_batch = local_batch // mini_batches  # sequences per update per process
    if mini_batches > 1:
        made += f" / NUM_MINI_BATCHES {mini_batches} = {update_batch}"
    micro = micro_batch_size(cfg, update_batch, made, local_devices)
    return Sizes(
        local_batch=local_batch,
        global_batch=processes * local_batch,
        prompt_batch_size=prompts,
        passes_per_step=passes,
        micro_batch_size=micro,
        grad_accum_steps=update_batch // micro,
        prompts_per_step=processes * per_process,
        updates_per_step=mini_batches * cfg.ppo_epochs,
    )


def pass_sizes(cfg: Any, processes: int, local_devices: int) -> tuple[int, int]:
    """Prompts per pass on each process, and passes per step. Raises UserMistake."""
    k, devices = cfg.num_pre_q, f"{local_devices} local devices"
    fill = fewest_prompts(k, local_devices)
    filling = f"{fill} prompts (NUM_PRE_Q {k} on {devices})"
    _, size, unit = size_of(cfg, *PASS_SIZES, local_devices, devices)
    prompts = size * unit
    step_name, step_size, step_unit = size_of(cfg, *STEP_SIZES, k, f"NUM_PRE_Q {k}")
    if not step_size:
        prompts = prompts or DEFAULT_PROMPTS_PER_DEVICE * local_devices
    check_multiple("BATCH_SIZE", prompts, fill, filling)
    if not step_size:
        return prompts, 1
    made = f"{processes} processes * " + (f"BATCH_SIZE {prompts}" if prompts else filling)
    made += f" * NUM_PRE_Q {k}" if step_unit == 1 else ""
    smallest = processes * (prompts or fill) * k // step_unit  # of the steps that fit
    check_multiple(step_name, step_size, smallest, made)
    times = step_size // smallest
    return (prompts, times) if prompts else (times * fill, 1)


def micro_batch_size(cfg: Any, update_batch: int, made: str, local_devices: int) -> int:
    """Sequences per micro-step on each process. Raises UserMistake.

    update_batch: sequences of an update on each process. made: how it is made, in words.
    """
    devices, accum = f"{local_devices} local devices", cfg.grad_accum_steps
    filled = f" in micro-batches that fill {devices}" if local_devices > 1 else ""
    # Sizes of micro-batches that divide the update and fill the devices.
    works = [d * local_devices for d in divisors(update_batch // local_devices)]
    name, size, unit = size_of(cfg, *MICRO_SIZES, local_devices, devices)
    if size:
        times = f" * {devices} = {size * unit}" if unit > 1 else ""
        text = f"{name}={size}{times} must divide {made}{filled}; nearest that do"
        check(size, [n // unit for n in works], text)
        micro = size * unit
    elif accum:
        text = f"GRAD_ACCUM_STEPS={accum} must divide {made}{filled}; nearest that do"
        check(accum, [update_batch // n for n in reversed(works)], text)
        micro = update_batch // accum
    else:
        micro = max(n for n in works if n <= DEFAULT_MICRO_BATCH_PER_DEVICE * local_devices)
    if accum not in (0, update_batch // micro):
        made = f"{made} / micro-batch {micro} = {update_batch // micro}"
        raise UserMistake(f"GRAD_ACCUM_STEPS={accum} contradicts {made}; set only one of the two")
    return micro


def smaller_sizes(
    cfg: Any, sizes: Sizes, processes: int, local_devices: int, names: tuple[str, str]
) -> list[dict[str, int]]:
    """The settings of every smaller pass or micro-batch in the same step, smallest first.

    names: PASS_SIZES for a smaller pass, MICRO_SIZES for a smaller micro-batch. The settings are
    per process or per device, as the user has set the size.
    """
    per_process, unit, others = getattr(cfg, names[0]) > 0, local_devices, {}
    if names == PASS_SIZES:
        size, total = sizes.prompt_batch_size, sizes.prompts_per_step // processes
        unit = fewest_prompts(cfg.num_pre_q, local_devices) if per_process else local_devices
        if not cfg.rollout_batch_size and not cfg.rollout_global_batch_size:
            others = {"rollout_batch_size": sizes.global_batch}
    else:
        size, total = sizes.micro_batch_size, sizes.micro_batch_size * sizes.grad_accum_steps
        if cfg.grad_accum_steps:
            others = {"grad_accum_steps": 0}
    works = [n for n in divisors(total // unit) if n < size // unit]
    return [({names[0]: n * unit} if per_process else {names[1]: n}) | others for n in works]


def fewest_prompts(num_pre_q: int, local_devices: int) -> int:
    """The fewest prompts whose sequences divide evenly among the devices."""
    return local_devices // math.gcd(local_devices, num_pre_q)


def eval_questions(sizes: Sizes, num_pre_q: int, eval_samples: int, local_devices: int) -> int:
    """Questions per evaluation pass per process, with about as many sequences as a rollout pass."""
    sequences = sizes.prompt_batch_size * num_pre_q
    return local_devices * max(1, sequences // (eval_samples * local_devices))


def size_of(cfg: Any, large: str, small: str, unit: int, unit_text: str) -> tuple[str, int, int]:
    """The setting that gives a size: its name, its value, and the factor to the unit of `large`.

    large, small: two settings of the same size, `small` per device, for example. unit: the factor
    from the unit of `small` to the unit of `large`. unit_text: the factor in words.
    Raises UserMistake if the two settings contradict each other.
    """
    total, count = getattr(cfg, large), getattr(cfg, small)
    if total and count and total != count * unit:
        product = f"{small.upper()}={count} * {unit_text} = {count * unit}"
        raise UserMistake(f"{large.upper()}={total} contradicts {product}; set only one of them")
    return (small.upper(), count, unit) if count else (large.upper(), total, 1)


def check_multiple(name: str, size: int, unit: int, made: str) -> None:
    """Raises UserMistake unless `size` is a multiple of `unit`. made: how `unit` is made."""
    text = f"{name}={size} must be a multiple of {made} = {unit}; nearest that are"
    check(size, range(0, size + unit, unit), text)


def check(size: int, works: Sequence[int], text: str) -> None:
    """Raises UserMistake with the text and the nearest sizes that work, unless `size` works."""
    if size not in works:
        below = [n for n in works if 0 < n < size][-1:]
        above = [n for n in works if n > size][:1]
        raise UserMistake(f"{text}: {', '.join(map(str, below + above))}")


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# ---- Padded lengths ------------------------------------------------------------------------------


def bucket(length: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96, ... that is at least `length`, in tokens.

    Padding to few lengths means few shapes, and so few compilations.
    """
    power = 16
    while power < length:
        power *= 2
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power


def prompt_width(longest: int, floor: int = 0) -> int:
    """S+1: the padded length of prompts of up to `longest` tokens.

    All tokens but the last are padded to a bucket of at least `floor`; the last token is fed with
    the completion.
    """
    return bucket(max(floor, longest - 1)) + 1


def turn_sequences(count: int, most: int, local_devices: int) -> int:
    """The sequences of a pass of a later turn, on each process: `most`, or a half or a quarter of
    it if the `count` sequences that go on fit in."""
    parts = [most // n for n in (4, 2) if most % (n * local_devices) == 0]
    return next((part for part in parts if count <= part), most)


def turn_width(longest: int, most: int) -> int:
    """The padded length of the prompts of a later turn, which hold up to `longest` tokens, of their
    completions too: all but the last are padded to a power of two. most: the tokens of the longest
    prompt and the longest completion of the run, which only the text of an environment exceeds."""
    width = 2 ** math.ceil(math.log2(max(longest - 1, 16))) + 1
    return most if longest <= most < width else width


def prompt_share(num_pre_q: int, sequences_per_shard: int) -> int:
    """`share`: how many consecutive sequences of a shard have one prompt in common."""
    return math.gcd(num_pre_q, sequences_per_shard)
