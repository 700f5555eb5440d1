"""The metrics of a step: the lines that scripts parse, the record for metrics.jsonl and W&B, and
samples of completions."""

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from chat import completion_parts, decode_part
from infra.chips import chip_of
from infra.log import Clock, RunLog, mean_without_nan, to_json_values
from loss import MERGE, AdvantageConfig, equal_groups
from model.network import ComputeConfig
from model.params import ModelConfig
from model.placement import update_flops
from rollout import RolloutConfig, completion_texts, have_equal_rewards
from rows import Batch
from run import Run

# The largest mean difference, in nats, between the sampler's log-probabilities and the trainer's
# that rounding explains. Usual means are 1e-6 with float32, and 0.01 to 0.03 with bfloat16, which
# rounds hidden states to 8 significant bits. Wrong weights give 0.1 or more.
DRIFT_LEVELS = {"float32": 1e-3, "bfloat16": 0.05}
RIGHT = 1 - 1e-6  # the lowest reward of a right completion: 0.7 + 0.2 + 0.1 is less than 1
# The order of the printed line, which is MLLM-JAX's. A step runs gather before advantages, and
# logps before update.
PHASES = ("rollout_sync", "rollout_generate", "reward", "advantages", "gather", "update", "logps")


def merge_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step: those of its updates, reduced by loss.MERGE, or else their means.

    In a finite update NaN means that there is no value, and is left out of the mean. An update that
    computes no sequence has fewer metrics than others.
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


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step, as its lines and its record describe it."""

    index: int
    metrics: dict[str, float]  # of merge_updates, with the learning rate
    batch: Batch
    rounds: list[Batch]  # all that were sampled
    clock: Clock


def nonfinite_metric(metrics: dict[str, float]) -> str:
    """The loss or a norm that is not finite, with its value; "" if all of them are finite."""
    names = ("loss", "grad_norm", "param_norm")
    wrong = [name for name in names if not math.isfinite(metrics[name])]
    return f"{wrong[0]} is {metrics[wrong[0]]}" if wrong else ""


def log_step(run: Run, log: RunLog, step: Step) -> None:
    """Prints the step's lines and writes its record. Every SAMPLE_EVERY_STEPS steps, and in the
    last one, it also writes samples of completions, and prints those of one group."""
    first, *notes = step_lines(step, run.cfg.print_train_time_breakdown)
    for line in (first + log.time_left(step.index, step.clock), *notes):
        log.print_line(line)
    record = step_record(step, run.rollout, run.sizes.local_batch)
    record |= device_record(step, run.learner.compute.model, run.sizes.updates_per_step)
    log.record_metrics(step.index, record)
    every = run.cfg.sample_every_steps
    due = every and (step.index % every == 0 or step.index == run.cfg.steps - 1)
    if due and jax.process_index() == 0:
        entries = sample_entries(run.rollout, step.batch)
        log.append_entries("samples.jsonl", step.index, entries)
        log.print_line(sample_table(step.index, entries[0]))


def drift_level(
    filters_logps: bool, train_compute: ComputeConfig, rollout_compute: ComputeConfig
) -> float:
    """The level of DRIFT_LEVELS for the dtypes of a run. It is infinite if the sampler's
    log-probabilities are those of a filtered distribution, and the trainer's logps are not."""
    if filters_logps:
        return math.inf
    # Linear layers amplify rounding: a Qwen3.5 has 0.06 where a Qwen3 of the same size has 0.026.
    # After rounding a router may choose other experts.
    scale = 2 if train_compute.model.linear or train_compute.model.moe else 1
    computes = (train_compute, rollout_compute)
    return scale * max(DRIFT_LEVELS[str(compute.dtype)] for compute in computes)


def check_drift(
    run: Run, log: RunLog, step: int, metrics: Mapping[str, float], *, is_new_run: bool
) -> bool:
    """Whether the step has computed log-probabilities of the trainer. If those of the sampler
    differ by more than rounding explains, raises RuntimeError in a new run, and prints a note in a
    resumed one. metrics: of the step."""
    if (name := "sampling_logp_difference/mean") not in metrics:
        return False
    level = drift_level(run.cfg.filters_logps(), run.learner.compute, run.rollout.compute)
    difference = metrics[name]
    if difference > level:  # not NaN: the loss is not finite either, and a note says so
        drift = (
            f"for the same weights, log-probabilities of sampler and trainer differ by "
            f"{difference:.3g} nats on average; rounding explains at most {level:g}"
        )
        if is_new_run:
            plain = "ROLLOUT_BACKEND=naive, ATTENTION_IMPL=xla, POLICY_LOSS_IMPL=jax, DTYPE=float32"
            raise RuntimeError(f"{drift}; to find the cause set, one after the other, {plain}")
        log.print_line(f"note step={step}: {drift}")
    return True


def step_lines(step: Step, breakdown: bool) -> list[str]:
    """The stable line that scripts parse, then a line for each note about the step.

    breakdown: append the seconds of each phase, and lengths, to the first line.
    """
    metrics = step.metrics
    text = (
        f"step={step.index} loss={metrics['loss']:z.6f} entropy={metrics['entropy']:z.4f} "
        f"reward_mean={mean_without_nan(step.batch.rewards):z.4f} dt={step.clock.total():.2f}s"
    )
    if breakdown:
        lengths = step.batch.lengths
        seconds = phase_seconds(step.clock)
        del seconds["logps"]  # the published line does not have this phase
        text += "".join(f" {phase}={x:.2f}s" for phase, x in seconds.items())
        text += (
            f" prompt_len_mean={step.batch.prompt_lengths().mean():.1f} "
            f"completion_len_mean={lengths.mean():.1f} completion_len_max={lengths.max():.0f} "
            f"completion_hit_max_frac={1 - step.batch.stopped.mean():.4f}"
        )
    lines = [text]
    note = f"note step={step.index}"
    is_counted = step.batch.completion_mask.any(axis=1)  # [B]
    if wrong := nonfinite_metric(metrics):
        update = metrics["updates_applied"] + 1
        lines.append(f"{note}: update {update:.0f} of this step was not applied: {wrong}")
    elif step.batch.teacher_logps is None and not step.batch.advantages[is_counted].any():
        lines.append(f"{note}: {_why_no_gradient(step.batch)}, so the policy gradient is 0")
    return lines


def _why_no_gradient(batch: Batch) -> str:
    if np.isnan(batch.rewards).all():
        return "no completion has a total reward"
    if equal_groups(batch.rewards, batch.completions_per_prompt()).all():
        return "all rewards of each group are equal"
    return "MASK_TRUNCATED_COMPLETIONS=1 drops all completions whose advantage is not 0"


def step_record(step: Step, rollout: RolloutConfig, local_batch: int) -> dict[str, float]:
    """The metrics of the step's record but those of device_record. local_batch: the sequences of a
    step on each process."""
    seconds, step_s = phase_seconds(step.clock), step.clock.total()
    compiled = step.clock.compiled()  # the seconds of each compilation
    batch, prompt_lengths = step.batch, step.batch.prompt_lengths()
    tokens = batch.sampled_mask.sum()
    record = {
        name if name.startswith("throughput/") else f"train-other/{name}": value
        for name, value in step.metrics.items()
    }
    record["train-other/batch_global"] = len(batch.rewards)
    record["train-other/batch_local"] = local_batch
    record["train-other/total_valid_token_count"] = tokens
    if batch.cut_tokens is not None:
        record["train-other/support/cut_tokens"] = batch.cut_tokens.sum()
    # As in TRL by the total rewards, also if the estimator compares those of each function.
    are_equal = equal_groups(batch.rewards, batch.completions_per_prompt())
    record["train-other/frac_reward_zero_std"] = are_equal.mean()
    record |= completion_record("train-", rollout, batch)
    record["train-reward/accuracy"] = mean_without_nan(are_right(batch.function_rewards))
    record |= _spread("train-reward/advantage", batch.advantages, "mean", "std", "min", "max")
    record["train-reward/advantage/zero_frac"] = (batch.advantages == 0).mean()
    record |= _spread("train-seq_len/prompt", prompt_lengths, "mean", "max")
    record |= _spread("train-seq_len/total", prompt_lengths + batch.lengths, "mean", "max")
    record |= {f"time/train/{phase}_s": value for phase, value in seconds.items()}
    record["time/train/step_s"] = step_s
    record["compile/programs"] = len(compiled)
    record["compile/s"] = sum(compiled)
    assert batch.decode_steps is not None, "a rollout counts them"
    computed = batch.decode_steps.sum()
    record["throughput/rollout/computed_per_token"] = computed / tokens
    record["throughput/train/valid_tokens_per_s"] = tokens / step_s
    record["throughput/train/valid_tokens_per_s_update"] = tokens / seconds["update"]
    return record


def device_record(step: Step, model: ModelConfig, updates_per_step: int) -> dict[str, float]:
    """The speed and the memory of the devices. The MFU of an update counts the FLOPs of the matmuls
    for the computed tokens, without recomputation, relative to the peak FLOPs of all devices."""
    seconds = step.clock.seconds
    record = {f"memory/{name}": value for name, value in memory_peaks().items()}
    tokens = sum(sampled.sampled_mask.sum() for sampled in step.rounds)
    record["throughput/generated_tokens_per_s"] = tokens / seconds["rollout_generate"]
    if chip := chip_of(jax.devices()[0]):
        K = step.batch.completions_per_prompt()
        lengths = step.batch.lengths.reshape(-1, K)  # [P, K]
        flops = update_flops(model, step.batch.prompt_lengths()[::K], lengths)
        computed = step.metrics["update_token_count"] * updates_per_step
        flops *= computed / step.batch.sampled_mask.sum()
        peak = 1e12 * chip.tflops * jax.device_count()  # FLOPs per second
        record["throughput/update/mfu"] = flops / seconds["update"] / peak
    return record


def memory_peaks() -> dict[str, float]:
    """The peak memory so far in GiB, of this process and of its devices, if they report it."""
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    device_peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices()]
    if known := [peak for peak in device_peaks if peak]:
        peaks["device_peak_gib"] = max(known) / 2**30
    return peaks


def phase_seconds(clock: Clock) -> dict[str, float]:
    """The seconds of each phase by its published name, which is shard for gather, as in MLLM-JAX;
    and of the rollout: rollout_sync + rollout_generate."""
    seconds = {"shard" if name == "gather" else name: x for name, x in clock.seconds.items()}
    return {"rollout": seconds["rollout_sync"] + seconds["rollout_generate"], **seconds}


def dynamic_sampling_metrics(
    rounds: list[Batch], advantage_config: AdvantageConfig
) -> dict[str, float]:
    """The metrics of DYNAMIC_SAMPLING, over all sampled groups, including those that the step does
    not train on."""
    sampled = Batch.concatenate(rounds)
    are_equal = have_equal_rewards(sampled, advantage_config)  # [rounds * P]
    metrics = {
        "rounds": len(rounds),
        "kept_frac": 1 - are_equal.mean(),
        "reward_mean": mean_without_nan(sampled.rewards),
        "accuracy": mean_without_nan(are_right(sampled.function_rewards)),
        "hit_max_frac": 1 - sampled.stopped.mean(),
    }
    return {f"dynamic_sampling/{name}": float(value) for name, value in metrics.items()}


def are_right(function_rewards: np.ndarray) -> np.ndarray:
    """[completions] float64: 1 for a right completion, else 0; NaN where the function does not
    apply. Right means that the first reward function gives at least 1, but for rounding.

    function_rewards: [completions, functions] rewards.
    """
    reward = function_rewards[:, 0]
    return np.where(np.isnan(reward), np.nan, reward >= RIGHT)


def completion_record(
    prefix: str, rollout: RolloutConfig, batch: Batch, count: int | None = None
) -> dict[str, float]:
    """The metrics of completions, of a step or an evaluation: their rewards, their lengths and,
    with an environment, their turns. count: see take_metrics of extras/scorer.py."""
    record = _spread(f"{prefix}reward/total", batch.rewards, "mean", "std", "min", "max")
    for function, column in zip(rollout.functions, batch.function_rewards.T, strict=True):
        record[f"{prefix}reward/func/{function.name}/mean"] = mean_without_nan(column)
        if function.take_metrics:
            metrics = function.take_metrics(count)
            record |= {f"{prefix}reward/model/{name}": x for name, x in metrics.items()}
    is_scored = ~np.isnan(batch.function_rewards[:, 0])  # [B]
    if not is_scored.all():  # The accuracy is that of the others.
        record[f"{prefix}reward/scored_frac"] = is_scored.mean()
    record |= _spread(f"{prefix}seq_len/completion", batch.lengths, "mean", "max")
    record[f"{prefix}seq_len/completion/hit_max_frac"] = 1 - batch.stopped.mean()
    if rollout.environments is not None:
        sampled_tokens = batch.sampled_mask.sum(axis=1)  # [B]
        turns = (np.diff(batch.sampled_mask, axis=1, prepend=0) == 1).sum(axis=1)  # [B]
        record[f"{prefix}turns/number"] = turns.mean()
        record[f"{prefix}turns/drawn_tokens"] = sampled_tokens.mean()
        record[f"{prefix}turns/environment_tokens"] = (batch.lengths - sampled_tokens).mean()
    return record


def _spread(name: str, values: np.ndarray, *statistics: str) -> dict[str, float]:
    """{name/statistic: number} of the values that are not NaN; NaN if there are none.

    statistics: functions of NumPy, such as "mean".
    """
    values = values[~np.isnan(values)]
    values = values if values.size else np.array([np.nan])
    return {f"{name}/{statistic}": getattr(np, statistic)(values) for statistic in statistics}


# ---- Completions to read -------------------------------------------------------------------------


FINISH_REASONS = ("MAX_LENGTH_SAMPLE", "stop token")  # by `stopped`, as samples.jsonl has them
LONGEST_TEXT = 400  # the most characters of a text in the log; samples.jsonl has all of them


def dialogues_of(rollout: RolloutConfig, batch: Batch) -> list[str]:
    """The text of each completion for people to read. With an environment it has all turns, with
    the speaker of each part."""
    if rollout.environments is None:
        return completion_texts(rollout, batch.prompts, batch)
    speakers = ("[environment]", "[policy]")
    tokens = rollout.chat_format.tokenizer, rollout.stopping.stop_ids
    dialogues = []
    for each in zip(batch.completion_ids, batch.sampled_mask, batch.lengths, strict=True):
        parts = [
            (speakers[k], decode_part(ids, *tokens).strip()) for k, ids in completion_parts(*each)
        ]
        dialogues.append("\n".join(f"{speaker} {text}" for speaker, text in parts))
    return dialogues


def sample_entries(rollout: RolloutConfig, batch: Batch) -> list[dict[str, Any]]:
    """Two entries of samples.jsonl: two groups with all their completions. Groups whose total
    rewards differ come first."""
    are_equal = equal_groups(batch.rewards, batch.completions_per_prompt())
    shown = batch.select_groups(np.argsort(are_equal, kind="stable")[:2])
    entries = completion_entries(rollout, shown, "advantage", shown.advantages)
    prompts = [rollout.chat_format.tokenizer.decode(prompt.ids) for prompt in shown.prompts]
    return [{"prompt": text} | entry for text, entry in zip(prompts, entries, strict=True)]


def completion_entries(
    rollout: RolloutConfig, batch: Batch, name: str, values: np.ndarray
) -> list[dict[str, Any]]:
    """An entry for each prompt of a batch, with its completions; docs/survival.md lists the fields.

    name, values: one more field of each completion, such as its advantage.
    """
    texts = dialogues_of(rollout, batch)
    names = [function.name for function in rollout.functions]
    completions = [
        {
            "text": text,
            "reward": batch.rewards[i],
            "rewards": dict(zip(names, batch.function_rewards[i], strict=True)),
            "tokens": batch.lengths[i],
            "ended": FINISH_REASONS[int(batch.stopped[i])],
            name: values[i],
        }
        for i, text in enumerate(texts)
    ]
    K = batch.completions_per_prompt()
    entries = [
        {column: prompt.columns.get(column) for column in ("question", "answer")}
        | {"completions": completions[i * K : (i + 1) * K]}
        for i, prompt in enumerate(batch.prompts)
    ]
    return to_json_values(entries)


def sample_table(step: int, entry: dict[str, Any]) -> str:
    """The completions of one group for the log. Lines of their texts are indented, so that programs
    that parse the log do not take them for lines of the run."""
    lines = [
        f"sample step={step} question: {escape_control_characters(shorten(entry['question']))}"
    ]
    for completion in entry["completions"]:
        facts = completion_facts(completion)
        lines.append("  " + " ".join(f"{name}={value}" for name, value in facts))
        text_lines = shorten(completion["text"]).splitlines() or [""]
        lines += [f"    {escape_control_characters(line)}" for line in text_lines]
    return "\n".join(lines)


def escape_control_characters(text: str) -> str:
    """The text in a single line: characters that cannot be printed become escapes such as \\n."""
    return "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)


def shorten(text: str) -> str:
    """The first LONGEST_TEXT characters of the text, and " ..." if it is longer."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


def completion_facts(completion: dict[str, Any]) -> list[tuple[str, str]]:
    """The fields of a completion in samples.jsonl or eval.jsonl but its text, as (name, text)."""
    values = [("reward", completion["reward"]), *completion["rewards"].items()]
    if "advantage" in completion:
        values.append(("advantage", completion["advantage"]))
    pairs = [(name, "-" if value is None else f"{value:z.4g}") for name, value in values]
    return [*pairs, ("tokens", f"{completion['tokens']}"), ("ended", completion["ended"])]
