"""What a step tells: its metrics, the lines that people parse, the records of metrics.jsonl and
W&B, and completions to read."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from infra.chips import chip_of, memory_peaks
from infra.log import Clock, RunLog, mean_without_nan, to_json_values
from loss import MERGE, equal_groups
from model.params import ModelConfig
from model.placement import update_flops
from rollout import Rollout, decode_part, parts_of, texts_of
from rows import Batch, MicroBatch

if TYPE_CHECKING:
    from startup import Run

# The mean difference between the sampler's log-probabilities and the trainer's which rounding does
# not explain. With float32 it is about 1e-6. With bfloat16, whose numbers have 8 significant bits,
# hidden states are rounded, and a mean of 0.01 to 0.03 is usual; wrong weights give 0.1 or more.
DRIFT_LEVELS = {"float32": 1e-3, "bfloat16": 0.05}
# In the order of the published line; the completions are gathered (shard) before the advantages,
# and log-probabilities before the first update.
PHASES = ("rollout_sync", "rollout_generate", "reward", "advantages", "shard", "update", "logps")
# Metrics of the tokens that an update computes.
COMPUTED_TOKEN_METRICS = ("sampling_logp_difference/", "is_weight/")
METRICS_WITHOUT_TOKENS = (
    "loss",
    "policy_loss",
    "update_token_count",
)  # 0 if no token of an update counts


# ---- An update -----------------------------------------------------------------------------------


def merge_metrics(micro_steps: list[dict[str, jax.Array]]) -> dict[str, float]:
    """The metrics of an update from those of its micro-steps, merged as loss.MERGE says."""
    all_values = jax.device_get(micro_steps)
    names = all_values[0]
    return {name: float(MERGE.get(name, sum)(x[name] for x in all_values)) for name in names}


def rescale_to_all_tokens(
    metrics: dict[str, float], batch: Batch, sequences: np.ndarray
) -> dict[str, float]:
    """The update's metrics from those that its micro-steps add up to.

    batch: all sequences of the update. sequences: those that the micro-steps have computed.

    The entropy is minus the mean of the sampling_logps of all tokens that count: unbiased, because
    the sampler has drawn them. A sequence that is skipped has the advantage 0: it clips nothing and
    adds no loss. Values that need the trainer's log-probabilities are over the update_token_count
    tokens that were computed. NaN stands for no value.
    """
    mask = batch.completion_mask
    counted, computed = mask.sum(), mask[sequences].sum()
    logps = np.where(mask > 0, batch.sampling_logps, 0)
    entropy = -logps.sum(dtype=np.float64) / max(counted, 1)
    metrics = metrics | {"entropy": float(entropy), "update_token_count": float(computed)}
    if not counted:
        return {
            name: x if name in METRICS_WITHOUT_TOKENS else math.nan for name, x in metrics.items()
        }
    for name in (x for x in metrics if x.startswith(COMPUTED_TOKEN_METRICS) and x not in MERGE):
        metrics[name] *= float(counted / computed)
    if computed < counted and "clip_ratio/low_min" in metrics:
        metrics["clip_ratio/low_min"] = 0.0
    return metrics


def computed_per_token(
    micro_batches: Sequence[MicroBatch], batch: Batch, sequences: np.ndarray
) -> float:
    """The places of all rows, divided by the tokens of prompts and completions in them.

    sequences: those of the batch that the rows hold.
    """
    prompts = {batch.prompt_of(i) for i in sequences}
    tokens = sum(len(batch.prompts[p].ids) - 1 for p in prompts) + batch.lengths[sequences].sum()
    places = sum(micro_batch.ids.size for micro_batch in micro_batches)
    return float(places / tokens) if tokens else math.nan


def merge_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its updates: extremes as loss.MERGE says, else means.

    A NaN of a finite update is no value and is left out. An update without a sequence to learn from
    has fewer metrics.
    """
    merged = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [
            update[name]
            for update in updates
            if name in update and (nonfinite_metric(update) or not math.isnan(update[name]))
        ]
        merged[name] = float(MERGE.get(name, np.mean)(values)) if values else math.nan
    return merged


# ---- A step --------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What one training step has done, for its lines and its record."""

    number: int
    metrics: dict[str, float]  # of the updates, with the learning rate
    batch: Batch
    sampled_tokens: int  # of all rounds of sampling
    clock: Clock


def nonfinite_metric(metrics: dict[str, float]) -> str:
    """The loss or a norm of the update, with its value, if it is not finite; else ""."""
    names = ("loss", "grad_norm", "param_norm")
    wrong = [name for name in names if not math.isfinite(metrics[name])]
    return f"{wrong[0]} is {metrics[wrong[0]]}" if wrong else ""


def log_step(run: "Run", log: RunLog, step: Step) -> None:
    """Prints the step's lines and writes its record; every SAMPLE_EVERY_STEPS steps, and at the
    last one, it also shows a group of completions."""
    first, *others = step_lines(step, run.cfg.print_train_time_breakdown)
    for line in (first + log.time_left(step.number, step.clock), *others):
        log.print_line(line)
    records = step_records(step, run.rollout, run.sizes.local_batch)
    records |= device_records(step, run.learner.compute.model, run.sizes.updates_per_step)
    log.record_metrics(step.number, records)
    every = run.cfg.sample_every_steps
    due = every and (step.number % every == 0 or step.number == run.cfg.steps - 1)
    if due and jax.process_index() == 0:
        entries = sample_entries(run.rollout, step.batch)
        log.append_entries("samples.jsonl", step.number, entries)
        log.print_line(sample_table(step.number, entries[0]))


def raise_if_logps_differ(metrics: Mapping[str, float], drift_level: float) -> None:
    """Raises RuntimeError if the log-probabilities of sampler and trainer differ in a first step by
    more than rounding, which explains drift_level nats on average."""
    difference = metrics.get("sampling_logp_difference/mean", 0.0)
    if difference > drift_level:
        raise RuntimeError(
            f"with the same weights sampler and trainer compute log-probabilities that differ by "
            f"{difference:.3g} nats on average, and rounding explains {drift_level:g}"
        )


def step_lines(step: Step, breakdown: bool) -> list[str]:
    """The line that people parse, then a line for each thing to note about the step.

    breakdown: the first line ends with the seconds of each phase and with lengths.
    """
    metrics = step.metrics
    text = (
        f"step={step.number} loss={metrics['loss']:z.6f} entropy={metrics['entropy']:z.4f} "
        f"reward_mean={mean_without_nan(step.batch.rewards):z.4f} dt={step.clock.total():.2f}s"
    )
    if breakdown:
        lengths = step.batch.lengths
        seconds = phase_seconds(step.clock)
        del seconds["logps"]  # The line that people parse has only the other phases.
        text += "".join(f" {phase}={x:.2f}s" for phase, x in seconds.items())
        text += (
            f" prompt_len_mean={step.batch.prompt_lengths().mean():.1f} "
            f"completion_len_mean={lengths.mean():.1f} completion_len_max={lengths.max():.0f} "
            f"completion_hit_max_frac={1 - step.batch.stopped.mean():.4f}"
        )
    lines = [text]
    note = f"note step={step.number}"
    if not step.batch.advantages[step.batch.completion_mask.any(axis=1)].any():
        lines.append(f"{note}: rewards are equal in each group, so that the policy gradient is 0")
    if wrong := nonfinite_metric(metrics):
        number = metrics["updates_applied"] + 1
        lines.append(f"{note}: update {number:.0f} of this step was not applied: {wrong}")
    return lines


def step_records(step: Step, rollout: Rollout, local_batch: int) -> dict[str, float]:
    """The step's record in metrics.jsonl, but for device_records. local_batch: sequences of a step
    on each process."""
    seconds, step_s = phase_seconds(step.clock), step.clock.total()
    compiled = step.clock.compiled()  # seconds of each program
    batch, prompt_lengths = step.batch, step.batch.prompt_lengths()
    tokens = batch.drawn_mask.sum()
    records = {
        name if name.startswith("throughput/") else f"train-other/{name}": value
        for name, value in step.metrics.items()
    }
    records["train-other/batch_global"] = len(batch.rewards)
    records["train-other/batch_local"] = local_batch
    records["train-other/total_valid_token_count"] = tokens
    if rollout.sampling.replay:
        records["train-other/support/cut_tokens"] = batch.cut_tokens.sum()
    equal = equal_groups(batch.rewards, batch.completions_per_prompt())  # of the totals, as in TRL
    records["train-other/frac_reward_zero_std"] = equal.mean()
    records |= completion_records("train-", rollout, batch)
    records["train-reward/accuracy"] = mean_without_nan(are_right(batch.per_function))
    records |= _spread("train-reward/advantage", batch.advantages, "mean", "std", "min", "max")
    records["train-reward/advantage/zero_frac"] = (batch.advantages == 0).mean()
    records |= _spread("train-seq_len/prompt", prompt_lengths, "mean", "max")
    records |= _spread("train-seq_len/total", prompt_lengths + batch.lengths, "mean", "max")
    records |= {f"time/train/{phase}_s": value for phase, value in seconds.items()}
    records["time/train/step_s"] = step_s
    records["compile/programs"] = len(compiled)
    records["compile/s"] = sum(compiled)
    computed = batch.computed_tokens.sum()
    records["throughput/rollout/computed_per_token"] = computed / tokens
    records["throughput/train/valid_tokens_per_s"] = tokens / step_s
    records["throughput/train/valid_tokens_per_s_update"] = tokens / seconds["update"]
    return records


def device_records(step: Step, model: ModelConfig, updates_per_step: int) -> dict[str, float]:
    """The speed and the memory of the devices. The MFU of an update is the share of the devices'
    peak FLOPs that the matmuls of the computed tokens need, without recomputation."""
    seconds = step.clock.seconds
    records = {f"memory/{name}": value for name, value in memory_peaks().items()}
    tokens = step.sampled_tokens / seconds["rollout_generate"]
    records["throughput/generated_tokens_per_s"] = tokens
    if chip := chip_of(jax.devices()[0]):
        K = step.batch.completions_per_prompt()
        lengths = step.batch.lengths.reshape(-1, K)  # [P, K]
        flops = update_flops(model, step.batch.prompt_lengths()[::K], lengths)
        computed = step.metrics["update_token_count"] * updates_per_step
        flops *= computed / step.batch.drawn_mask.sum()
        peak = 1e12 * chip.tflops * jax.device_count()  # FLOPs per second
        records["throughput/update/mfu"] = flops / seconds["update"] / peak
    return records


def phase_seconds(clock: Clock) -> dict[str, float]:
    """Seconds of each phase; rollout is rollout_sync + rollout_generate."""
    seconds = clock.seconds
    return {"rollout": seconds["rollout_sync"] + seconds["rollout_generate"], **seconds}


def dynamic_sampling_metrics(
    rounds: list[Batch], have_equal_rewards: np.ndarray
) -> dict[str, float]:
    """The metrics of DYNAMIC_SAMPLING: of all groups that were sampled, also those that the step
    leaves out. have_equal_rewards: [rounds * P] bool, of each group."""
    sampled = Batch.concatenate(rounds)
    metrics = {
        "rounds": len(rounds),
        "kept_frac": 1 - have_equal_rewards.mean(),
        "reward_mean": mean_without_nan(sampled.rewards),
        "accuracy": mean_without_nan(are_right(sampled.per_function)),
        "hit_max_frac": 1 - sampled.stopped.mean(),
    }
    return {f"dynamic_sampling/{name}": float(value) for name, value in metrics.items()}


def are_right(per_function: np.ndarray) -> np.ndarray:
    """[n] float64: 1 for a right completion, else 0; NaN where the function of the accuracy does
    not apply. It is the first one, and gives at least 1. per_function: [n, functions]."""
    reward = per_function[:, 0]
    return np.where(np.isnan(reward), np.nan, reward >= 1)


def completion_records(prefix: str, rollout: Rollout, batch: Batch) -> dict[str, float]:
    """What is recorded of the completions of a step and of an evaluation: their rewards, their
    lengths and, with an environment, their turns."""
    records = _spread(f"{prefix}reward/total", batch.rewards, "mean", "std", "min", "max")
    for function, column in zip(rollout.functions, batch.per_function.T, strict=True):
        records[f"{prefix}reward/func/{function.__name__}/mean"] = mean_without_nan(column)
    records |= _spread(f"{prefix}seq_len/completion", batch.lengths, "mean", "max")
    records[f"{prefix}seq_len/completion/hit_max_frac"] = 1 - batch.stopped.mean()
    if rollout.environments is not None:
        drawn = batch.drawn_mask.sum(axis=1)
        turns = (np.diff(batch.drawn_mask, axis=1, prepend=0) == 1).sum(axis=1)
        records[f"{prefix}turns/number"] = turns.mean()
        records[f"{prefix}turns/drawn_tokens"] = drawn.mean()
        records[f"{prefix}turns/environment_tokens"] = (batch.lengths - drawn).mean()
    return records


def _spread(name: str, values: np.ndarray, *which: str) -> dict[str, float]:
    """{name/mean: ..., ...} of the values that are not NaN; NaN if there are none."""
    values = values[~np.isnan(values)]
    values = values if values.size else np.array([np.nan])
    return {f"{name}/{statistic}": getattr(np, statistic)(values) for statistic in which}


# ---- Completions to read -------------------------------------------------------------------------


ENDED = ("MAX_LENGTH_SAMPLE", "stop token")  # what ended a completion whose `stopped` is 0, or 1
LONGEST_TEXT = 400  # characters of a text in the log; the files have the complete text


def dialogues_of(rollout: Rollout, batch: Batch) -> list[str]:
    """The text of each completion for people to read: with an environment all of its turns, and who
    has written each part."""
    if rollout.environments is None:
        return texts_of(rollout, batch.prompts, batch)
    speakers = "[environment]", "[policy]"

    def line_of(is_drawn: int, ids: list[int]) -> str:
        return f"{speakers[is_drawn]} {decode_part(rollout, ids).strip()}"

    count = len(batch.lengths)
    return ["\n".join(line_of(*part) for part in parts_of(batch, i)) for i in range(count)]


def sample_entries(rollout: Rollout, batch: Batch) -> list[dict[str, Any]]:
    """Entries of samples.jsonl for two groups, with all their completions. Groups whose total
    rewards differ come first."""
    equal = equal_groups(batch.rewards, batch.completions_per_prompt())
    shown = batch.select_groups(np.argsort(equal, kind="stable")[:2])
    entries = completion_entries(rollout, shown, "advantage", shown.advantages)
    prompts = [rollout.tokenizer.decode(prompt.ids) for prompt in shown.prompts]
    return [{"prompt": text} | entry for text, entry in zip(prompts, entries, strict=True)]


def completion_entries(
    rollout: Rollout, batch: Batch, name: str, values: np.ndarray
) -> list[dict[str, Any]]:
    """An entry for each prompt of a batch, with its completions. Under this name a completion has
    one of the values; docs/survival.md has its other fields."""
    texts = dialogues_of(rollout, batch)
    names = [function.__name__ for function in rollout.functions]
    completions = [
        {
            "text": text,
            "reward": batch.rewards[i],
            "rewards": dict(zip(names, batch.per_function[i], strict=True)),
            "tokens": batch.lengths[i],
            "ended": ENDED[int(batch.stopped[i])],
            name: values[i],
        }
        for i, text in enumerate(texts)
    ]
    n = len(texts) // len(batch.prompts)
    entries = [
        {x: prompt.columns[x] for x in ("question", "answer")}
        | {"completions": completions[i * n : (i + 1) * n]}
        for i, prompt in enumerate(batch.prompts)
    ]
    return to_json_values(entries)


def sample_table(step: int, entry: dict[str, Any]) -> str:
    """The completions of one group for the log. Programs read a log, so that no line of a text
    begins like a line of the run."""
    lines = [f"sample step={step} question: {visible(shorten(entry['question']))}"]
    for each in entry["completions"]:
        lines.append("  " + " ".join(f"{name}={value}" for name, value in completion_facts(each)))
        lines += [f"    {visible(line)}" for line in shorten(each["text"]).splitlines() or [""]]
    return "\n".join(lines)


def visible(text: str) -> str:
    """The text as a single line, with what is not printable as escapes such as \\n."""
    return "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)


def shorten(text: str) -> str:
    """The text, or its beginning if it is longer than LONGEST_TEXT."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


def completion_facts(completion: dict[str, Any]) -> list[tuple[str, str]]:
    """What an entry of samples.jsonl or eval.jsonl says of a completion, but for its text."""
    numbers = [("reward", completion["reward"]), *completion["rewards"].items()]
    if "advantage" in completion:
        numbers.append(("advantage", completion["advantage"]))
    pairs = [(name, "-" if number is None else f"{number:z.4g}") for name, number in numbers]
    return [*pairs, ("tokens", f"{completion['tokens']}"), ("ended", completion["ended"])]
