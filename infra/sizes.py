"""The sizes of a step, from the batch settings and the devices. Imports neither jax nor numpy.

docs/migration.md says what each batch size counts. A pass is the prefill and decode of one batch of
prompts, and a micro-step the forward and backward of one micro-batch of sequences. A micro-batch is
limited in slots, those of sequences of full length: up to eight times as many short ones are packed
into it, so that an update has at most GRAD_ACCUM_STEPS micro-steps. If no rollout size is set, a
step is one pass of 2 prompts per device; if only the size of the step is set, the step is one pass.
If no micro-batch size is set, a micro-step has up to 4 full sequences per device.
Every division must be exact; otherwise an error names the nearest sizes that fit.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from infra.mistakes import UserMistake

# Prompts per pass and sequences per micro-step, per device, if no setting gives them.
DEFAULT_PROMPTS_PER_DEVICE = 2
DEFAULT_MICRO_BATCH_PER_DEVICE = 4

# Pairs of settings for the same size: a layer that sets one hides both in the layers below.
PASS_SIZES = ("batch_size", "rollout_per_device_batch_size")
STEP_SIZES = ("rollout_batch_size", "rollout_global_batch_size")
MICRO_SIZES = ("train_micro_batch_size", "train_per_device_micro_batch_size")


@dataclasses.dataclass(frozen=True, match_args=False)  # read only, like the fields of Config
class BatchSettings(Protocol):
    """The settings that give the sizes of a step, as config.Config describes them; 0: not set."""

    batch_size: int
    rollout_per_device_batch_size: int
    rollout_batch_size: int
    rollout_global_batch_size: int
    num_pre_q: int
    num_mini_batches: int
    ppo_epochs: int
    train_micro_batch_size: int
    train_per_device_micro_batch_size: int
    grad_accum_steps: int


class Sizes(NamedTuple):
    """The sizes of a step."""

    local_batch: int  # sequences per step per process
    global_batch: int  # B: sequences per step over all processes
    prompt_batch_size: int  # prompts per pass per process
    passes_per_step: int
    # Sequences of full length per micro-step per process. It bounds the slots of packed rows (see
    # widest_row), of which short sequences need fewer.
    micro_batch_size: int
    grad_accum_steps: int  # the largest number of micro-steps of an update
    prompts_per_step: int  # P: prompts per step over all processes
    updates_per_step: int = 1  # NUM_MINI_BATCHES * PPO_EPOCHS

    def to_line(self) -> str:
        """A stable line of the log, which scripts parse."""
        return (
            f"local_batch={self.local_batch} global_batch={self.global_batch} "
            f"rollout.prompt_batch_size={self.prompt_batch_size} "
            f"rollout.passes_per_step={self.passes_per_step} "
            f"train.micro_batch_size={self.micro_batch_size} "
            f"train.grad_accum_steps={self.grad_accum_steps} "
            f"train.updates_per_step={self.updates_per_step}"
        )


def derive_sizes(cfg: BatchSettings, processes: int, local_devices: int) -> Sizes:
    """The sizes of a step on `processes` with `local_devices` each.

    Raises UserMistake if the settings contradict each other or do not divide exactly.
    """
    prompts, passes = pass_sizes(cfg, processes, local_devices)
    mini_batches = cfg.num_mini_batches
    local_prompts = passes * prompts  # prompts per step per process
    fewest = fewest_prompts(cfg.num_pre_q, local_devices)
    scope = f" on each of {processes} processes" if processes > 1 else ""
    scope += f" in parts of {fewest}, which fill the local devices," if fewest > 1 else ""
    text = f"NUM_MINI_BATCHES={mini_batches} must divide the step's {local_prompts} prompts{scope}"
    require(mini_batches, divisors(local_prompts // fewest), f"{text} evenly; nearest that do")

    local_batch = local_prompts * cfg.num_pre_q
    formula = f"local_batch = passes {passes} * BATCH_SIZE {prompts} * NUM_PRE_Q {cfg.num_pre_q}"
    formula += f" = {local_batch}"
    update_batch = local_batch // mini_batches  # sequences per update per process
    if mini_batches > 1:
        formula += f" / NUM_MINI_BATCHES {mini_batches} = {update_batch}"
    micro_batch = micro_batch_size(cfg, update_batch, formula, local_devices)
    return Sizes(
        local_batch=local_batch,
        global_batch=processes * local_batch,
        prompt_batch_size=prompts,
        passes_per_step=passes,
        micro_batch_size=micro_batch,
        grad_accum_steps=update_batch // micro_batch,
        prompts_per_step=processes * local_prompts,
        updates_per_step=mini_batches * cfg.ppo_epochs,
    )


def pass_sizes(cfg: BatchSettings, processes: int, local_devices: int) -> tuple[int, int]:
    """Prompts per pass on each process, and passes per step. Raises UserMistake."""
    K, devices = cfg.num_pre_q, f"{local_devices} local devices"
    fewest = fewest_prompts(K, local_devices)
    fewest_text = f"{fewest} prompts (NUM_PRE_Q {K} on {devices})"
    _, pass_size, pass_factor = size_setting(cfg, *PASS_SIZES, local_devices, devices)
    prompts = pass_size * pass_factor
    step_name, step_size, step_factor = size_setting(cfg, *STEP_SIZES, K, f"NUM_PRE_Q {K}")
    if not step_size:
        prompts = prompts or DEFAULT_PROMPTS_PER_DEVICE * local_devices
    require_multiple("BATCH_SIZE", prompts, fewest, fewest_text)
    if not step_size:
        return prompts, 1
    formula = f"{processes} processes * "
    formula += f"BATCH_SIZE {prompts}" if prompts else fewest_text
    formula += f" * NUM_PRE_Q {K}" if step_factor == 1 else ""
    smallest_step = processes * (prompts or fewest) * K // step_factor
    require_multiple(step_name, step_size, smallest_step, formula)
    multiple = step_size // smallest_step
    return (prompts, multiple) if prompts else (multiple * fewest, 1)


def micro_batch_size(
    cfg: BatchSettings, update_batch: int, formula: str, local_devices: int
) -> int:
    """Sequences per micro-step on each process. Raises UserMistake.

    update_batch: sequences of an update on each process. formula: the settings that give it.
    """
    devices, accum = f"{local_devices} local devices", cfg.grad_accum_steps
    scope = f" in micro-batches that fill {devices}" if local_devices > 1 else ""
    # Micro-batches that divide the update's sequences and fill the devices.
    valid = [local_devices * n for n in divisors(update_batch // local_devices)]
    name, size, factor = size_setting(cfg, *MICRO_SIZES, local_devices, devices)
    if size:
        product = f" * {devices} = {size * factor}" if factor > 1 else ""
        text = f"{name}={size}{product} must divide {formula}{scope}; nearest that do"
        require(size, [n // factor for n in valid], text)
        micro_batch = size * factor
    elif accum:
        text = f"GRAD_ACCUM_STEPS={accum} must divide {formula}{scope}; nearest that do"
        require(accum, [update_batch // n for n in reversed(valid)], text)
        micro_batch = update_batch // accum
    else:
        micro_batch = max(n for n in valid if n <= DEFAULT_MICRO_BATCH_PER_DEVICE * local_devices)
    micro_steps = update_batch // micro_batch
    if accum not in (0, micro_steps):
        formula += f" / micro-batch {micro_batch} = {micro_steps}"
        raise UserMistake(f"GRAD_ACCUM_STEPS={accum} contradicts {formula}; set only one of them")
    return micro_batch


def suggest_smaller_size(
    cfg: BatchSettings, sizes: Sizes, processes: int, local_devices: int, names: tuple[str, ...]
) -> str:
    """Advice that makes a program smaller: the next smaller pass or micro-batch that leaves the
    step as it is, if there is one.

    names: PASS_SIZES or MICRO_SIZES if a smaller size makes the program smaller, else (). The size
    is per process or per device, as the user has set it.
    """
    if not names:
        return "Use more devices; OPTIMIZER=sgd or lion, or BETA=0, need less"
    size = sizes.micro_batch_size
    same_step: dict[str, Any] = {}
    if names == PASS_SIZES:
        size = sizes.prompt_batch_size
        if not cfg.rollout_batch_size and not cfg.rollout_global_batch_size:
            same_step = {"rollout_batch_size": sizes.global_batch}
    elif cfg.grad_accum_steps:
        same_step = {"grad_accum_steps": 0}
    per_process = getattr(cfg, names[0]) > 0
    name, size = (names[0], size) if per_process else (names[1], size // local_devices)
    for smaller in range(size - 1, 0, -1):
        settings = {name: smaller} | same_step
        with contextlib.suppress(UserMistake):  # it does not divide the step
            derive_sizes(dataclasses.replace(cfg, **settings), processes, local_devices)
            return "Try " + " ".join(f"{name.upper()}={value}" for name, value in settings.items())
    return "Use more devices, or a lower MAX_LENGTH_SAMPLE or MAX_PROMPT_LENGTH"


def fewest_prompts(completions_per_prompt: int, local_devices: int) -> int:
    """The fewest prompts whose sequences divide evenly among the devices."""
    return local_devices // math.gcd(local_devices, completions_per_prompt)


def eval_questions(
    sizes: Sizes, completions_per_prompt: int, eval_samples: int, local_devices: int
) -> int:
    """Questions per evaluation pass per process: the most whose sequences fill the local devices
    evenly and are no more than those of a rollout pass, or the fewest that fill the devices."""
    sequences = sizes.prompt_batch_size * completions_per_prompt
    fewest = fewest_prompts(eval_samples, local_devices)
    return fewest * max(1, sequences // (eval_samples * fewest))


def size_setting(
    cfg: BatchSettings, large: str, small: str, factor: int, factor_text: str
) -> tuple[str, int, int]:
    """The setting that gives a size: its name, its value, and the factor to the unit of `large`.

    large, small: two settings of the same size, `small` per device, for example. factor: from the
    unit of `small` to the unit of `large`. factor_text: the factor in words.
    Raises UserMistake if the two settings contradict each other.
    """
    total, count = getattr(cfg, large), getattr(cfg, small)
    if total and count and total != count * factor:
        product = f"{small.upper()}={count} * {factor_text} = {count * factor}"
        raise UserMistake(f"{large.upper()}={total} contradicts {product}; set only one of them")
    return (small.upper(), count, factor) if count else (large.upper(), total, 1)


def require_multiple(name: str, size: int, factor: int, formula: str) -> None:
    """Raises UserMistake unless `size` is a multiple of `factor`, which the formula explains."""
    text = f"{name}={size} must be a multiple of {formula} = {factor}; nearest that are"
    require(size, range(0, size + factor, factor), text)


def require(size: int, valid_sizes: Sequence[int], text: str) -> None:
    """Raises UserMistake with the text and the nearest valid sizes, unless `size` is valid."""
    if size not in valid_sizes:
        below = [n for n in valid_sizes if 0 < n < size][-1:]
        above = [n for n in valid_sizes if n > size][:1]
        raise UserMistake(f"{text}: {', '.join(map(str, below + above))}")


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# ---- Padded lengths ------------------------------------------------------------------------------


def bucket_length(length: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96, ... that is at least `length`, in tokens.

    Padding to few lengths means few shapes, and so few compilations.
    """
    power = 1 << max(length - 1, 15).bit_length()
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power


def prompt_width(longest: int, floor: int = 0) -> int:
    """S+1: the padded length of prompts of up to `longest` tokens.

    All tokens but the last are padded to a bucket of at least `floor`; the last token is fed with
    the completion.
    """
    return bucket_length(max(floor, longest - 1)) + 1


def turn_batch_size(count: int, largest: int, local_devices: int) -> int:
    """The sequences of a pass of a later turn, on each process: `largest`, or a half or a quarter
    of it if that holds the `count` sequences that have not ended."""
    parts = [largest // n for n in (4, 2) if largest % (n * local_devices) == 0]
    return next((part for part in parts if count <= part), largest)


def turn_width(longest: int, limit: int) -> int:
    """The padded length of the prompts of a later turn, which contain the turns before: up to
    `longest` tokens, of which all but the last are padded to a power of two.

    limit: the tokens of the run's longest prompt and a completion of MAX_LENGTH_SAMPLE tokens. Only
    prompts to which an environment adds text are longer.
    """
    width = 2 ** math.ceil(math.log2(max(longest - 1, 16))) + 1
    return limit if longest <= limit < width else width


def completions_per_prompt_in_shard(completions_per_prompt: int, sequences_per_shard: int) -> int:
    """The number of consecutive sequences of a shard that have the same prompt."""
    return math.gcd(completions_per_prompt, sequences_per_shard)


def widest_row(
    sequences: int, completions_per_prompt: int, S: int, T: int, *, chunk: int, unit: int
) -> tuple[int, int]:
    """The slots for prompts and for completions in a packed row of this number of completions, all
    of T tokens, and their prompts, all of S tokens. No row of a run has more slots in all.

    chunk, unit: see RowLimits in rows.py.
    """
    prompts = sequences // completions_per_prompt_in_shard(completions_per_prompt, sequences)
    in_chunks = (prompts * next_multiple(n, chunk) for n in (S, sequences // prompts * T))
    prompt_slots, completion_slots = (next_multiple(n, unit) for n in in_chunks)
    return prompt_slots, completion_slots


def next_multiple(n: int, step: int) -> int:
    return math.ceil(n / step) * step
