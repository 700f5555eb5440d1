"""What a step and an evaluation tell: their metrics, the lines that people parse, and the records
of metrics.jsonl and W&B. It also runs an evaluation. review.py has the completions to read."""

import collections
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from loss import MERGE, equal_groups
from models.model import Params
from models.placement import update_flops
from review import completion_entries, sample_entries, sample_table
from rewards import extract_answer
from rollout import Run, answer_questions, have_equal_rewards, texts_of
from runtime.chips import chip_of, memory_peaks
from runtime.packing import Batch
from runtime.records import mean_of
from runtime.run_log import Clock, RunLog
from sampling import Backend

# The mean difference between the sampler's log-probabilities and the trainer's which rounding does
# not explain. With float32 it is about 1e-6. With bfloat16, whose numbers have 8 significant bits,
# hidden states are rounded, and a mean of 0.01 to 0.03 is usual; wrong weights give 0.1 or more.
DRIFT_LEVELS = {"float32": 1e-3, "bfloat16": 0.05}
# In the order of the published line; the completions are gathered (shard) before the advantages,
# and log-probabilities before the first update.
PHASES = ("rollout_sync", "rollout_generate", "reward", "advantages", "shard", "update", "logps")
EVAL_PHASES = ("rollout_sync", "rollout_generate", "reward")
# Metrics of the tokens that an update computes.
OF_COMPUTED = ("sampling_logp_difference/", "is_weight/")
OF_NOTHING = ("loss", "policy_loss", "update_token_count")  # 0 if no token of an update counts


# ---- An update -----------------------------------------------------------------------------------


def merge_metrics(micro_steps: list[dict[str, jax.Array]]) -> dict[str, float]:
    """The metrics of an update from those of its micro-steps, merged as loss.MERGE says."""
    all_values = jax.device_get(micro_steps)
    names = all_values[0]
    return {name: float(MERGE.get(name, sum)(x[name] for x in all_values)) for name in names}


def of_all_tokens(
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
        return {name: x if name in OF_NOTHING else math.nan for name, x in metrics.items()}
    for name in (x for x in metrics if x.startswith(OF_COMPUTED) and x not in MERGE):
        metrics[name] *= float(counted / computed)
    if computed < counted and "clip_ratio/low_min" in metrics:
        metrics["clip_ratio/low_min"] = 0.0
    return metrics


def merge_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its updates: extremes as loss.MERGE says, else means.

    An update that is finite is left out where it has no value. One that has learnt nothing has
    fewer metrics.
    """
    merged = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        there = [x for x in updates if name in x]
        values = [x[name] for x in there if what_is_not_finite(x) or not math.isnan(x[name])]
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


def what_is_not_finite(metrics: dict[str, float]) -> str:
    """The loss or a norm of the update, with its value, if it is not finite; else ""."""
    names = ("loss", "grad_norm", "param_norm")
    wrong = [name for name in names if not math.isfinite(metrics[name])]
    return f"{wrong[0]} is {metrics[wrong[0]]}" if wrong else ""


def log_step(run: Run, log: RunLog, step: Step) -> None:
    """Prints the step's lines and writes its record; every SAMPLE_EVERY_STEPS steps, and at the
    last one, it also shows a group of completions."""
    first, *others = step_lines(step, run.cfg.print_train_time_breakdown)
    for line in (first + log.time_left(step.number, step.clock), *others):
        log.line(line)
    log.record(step.number, step_records(run, step) | device_records(run, step))
    every = run.cfg.sample_every_steps
    due = every and (step.number % every == 0 or step.number == run.cfg.steps - 1)
    if due and jax.process_index() == 0:
        entries = sample_entries(run, step.batch)
        log.entries("samples.jsonl", step.number, entries)
        log.line(sample_table(step.number, entries[0]))


def drift_level(run: Run) -> float:
    """The level of DRIFT_LEVELS for the dtypes of a run; infinite where the difference also has
    another cause: the log-probabilities of `naive` are those of the filtered distribution."""
    if run.cfg.filters_logps():
        return math.inf
    return max(DRIFT_LEVELS[str(x.dtype)] for x in (run.training, run.rollout))


def stop_if_apart(run: Run, metrics: Mapping[str, float]) -> None:
    """Raises RuntimeError if sampler and trainer disagree in a first step by more than rounding."""
    difference, level = metrics.get("sampling_logp_difference/mean", 0.0), drift_level(run)
    if difference > level:
        raise RuntimeError(
            f"with the same weights sampler and trainer compute log-probabilities that differ by "
            f"{difference:.3g} nats on average, and rounding explains {level:g}"
        )


def step_lines(step: Step, breakdown: bool) -> list[str]:
    """The line that people parse, then a line for each thing to note about the step.

    breakdown: the first line ends with the seconds of each phase and with lengths.
    """
    metrics = step.metrics
    text = (
        f"step={step.number} loss={metrics['loss']:z.6f} entropy={metrics['entropy']:z.4f} "
        f"reward_mean={mean_of(step.batch.rewards):z.4f} dt={step.clock.total():.2f}s"
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
    if wrong := what_is_not_finite(metrics):
        number = metrics["updates_applied"] + 1
        lines.append(f"{note}: update {number:.0f} of this step was not applied: {wrong}")
    return lines


def step_records(run: Run, step: Step) -> dict[str, float]:
    """The step's record in metrics.jsonl, but for device_records."""
    seconds, step_s = phase_seconds(step.clock), step.clock.total()
    compiled = step.clock.compiled()  # seconds of each program
    batch, prompt_lengths = step.batch, step.batch.prompt_lengths()
    tokens = batch.drawn_mask.sum()
    records = {
        name if name.startswith("throughput/") else f"train-other/{name}": value
        for name, value in step.metrics.items()
    }
    records["train-other/batch_global"] = len(batch.rewards)
    records["train-other/batch_local"] = run.sizes.local_batch
    records["train-other/total_valid_token_count"] = tokens
    if run.sampling.replay:
        records["train-other/support/cut_tokens"] = batch.cut_tokens.sum()
    equal = equal_groups(batch.rewards, run.cfg.num_pre_q)  # of the totals, as in TRL
    records["train-other/frac_reward_zero_std"] = equal.mean()
    records |= completion_records("train-", run, batch)
    records["train-reward/accuracy"] = mean_of(are_right(batch.per_function))
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


def device_records(run: Run, step: Step) -> dict[str, float]:
    """The speed and the memory of the devices. The MFU of an update is the share of the devices'
    peak FLOPs that the matmuls of the computed tokens need, without recomputation."""
    seconds = step.clock.seconds
    records = {f"memory/{name}": value for name, value in memory_peaks().items()}
    tokens = step.sampled_tokens / seconds["rollout_generate"]
    records["throughput/generated_tokens_per_s"] = tokens
    if chip := chip_of(jax.devices()[0]):
        K = run.cfg.num_pre_q
        lengths = step.batch.lengths.reshape(-1, K)  # [P, K]
        flops = update_flops(run.training.model, step.batch.prompt_lengths()[::K], lengths)
        computed = step.metrics["update_token_count"] * run.sizes.updates_per_step
        flops *= computed / step.batch.drawn_mask.sum()
        peak = 1e12 * chip.tflops * jax.device_count()  # FLOPs per second
        records["throughput/update/mfu"] = flops / seconds["update"] / peak
    return records


def phase_seconds(clock: Clock) -> dict[str, float]:
    """Seconds of each phase; rollout is rollout_sync + rollout_generate."""
    seconds = clock.seconds
    return {"rollout": seconds["rollout_sync"] + seconds["rollout_generate"], **seconds}


def sampling_metrics(run: Run, rounds: list[Batch]) -> dict[str, float]:
    """The metrics of DYNAMIC_SAMPLING, of all that was sampled, also what the step does not learn
    from; OF_SAMPLED in review.py names those that the verdict looks at."""
    sampled = Batch.join(rounds)
    metrics = {
        "rounds": len(rounds),
        "kept_frac": 1 - have_equal_rewards(run, rounds).mean(),
        "reward_mean": mean_of(sampled.rewards),
        "accuracy": mean_of(are_right(sampled.per_function)),
        "hit_max_frac": 1 - sampled.stopped.mean(),
    }
    return {f"dynamic_sampling/{name}": float(value) for name, value in metrics.items()}


# ---- An evaluation -------------------------------------------------------------------------------


def evaluate(
    run: Run,
    log: RunLog,
    backend: Backend,
    key: jax.Array,
    params: Params,
    step: int,
    full: bool = False,
) -> float:
    """The accuracy on the first EVAL_PROMPTS questions of the eval split or, if `full`, on all.

    Each question has EVAL_SAMPLES completions, greedy or at EVAL_TEMPERATURE. It prints the line
    of the evaluation, and writes its record and an entry of eval.jsonl for each question.
    """
    clock = Clock(EVAL_PHASES)
    limit = run.cfg.eval_prompts
    questions = run.eval_prompts if full or not limit else run.eval_prompts[:limit]
    backend.update_weights(params)
    clock.lap("rollout_sync")
    evaluation = answer_questions(run, backend, questions, key, clock)
    backend.release()
    line, records = evaluation_record(run, step, evaluation, clock, full)
    log.line(line)
    log.record(step, records)
    prefix = "eval_full" if full else "eval"
    if jax.process_index() == 0:
        correct = are_right(evaluation.per_function)
        entries = completion_entries(run, evaluation, "correct", correct)
        log.entries("eval.jsonl", step, [{"evaluation": prefix} | entry for entry in entries])
    return records[f"{prefix}/accuracy"]


def are_right(per_function: np.ndarray) -> np.ndarray:
    """[n] float64: 1 for a right completion, else 0; NaN where the function of the accuracy does
    not apply. It is the first one, and gives at least 1. per_function: [n, functions]."""
    reward = per_function[:, 0]
    return np.where(np.isnan(reward), np.nan, reward >= 1)


def evaluation_record(
    run: Run, step: int, evaluation: Batch, clock: Clock, full: bool
) -> tuple[str, dict[str, Any]]:
    """The line and the record of one evaluation.

    The accuracy is pass@1: the mean over the questions of the share of right completions among
    those to which the accuracy's function applies.
    """
    n, split, seconds = run.cfg.eval_samples, run.cfg.eval_split, clock.total()
    prefix, place = ("eval_full", "eval_full/accuracy") if full else ("eval", "eval")
    correct = are_right(evaluation.per_function).reshape(-1, n)  # [questions, n]
    questions = len(correct)
    accuracy, error = pass_at(correct, 1), standard_error(correct)
    # Of the powers of two, and of n.
    shown = [k for k in range(1, n + 1) if k == n or k & (k - 1) == 0]
    more = {f"pass_at_{k}": pass_at(correct, k) for k in shown}
    judge = run.functions[0].__name__  # says what is right
    if n > 1 and judge == "reward_correct":
        texts = texts_of(run, evaluation.prompts, evaluation)
        more[f"maj_at_{n}"] = majority_accuracy(correct, texts)
    ending = f"accuracy={accuracy:.4f} accuracy_se={error:.4f} accuracy_of={judge}"
    ending += "".join(f" {k}={x:.4f}" for k, x in more.items() if k.endswith(f"_{n}") and n > 1)
    decoding = "sampled" if run.eval_sampling.temperature else "greedy"
    ending += f" decoding={decoding} t={seconds:.2f}s"
    records = {f"{prefix}/accuracy": accuracy, f"{prefix}/accuracy_se": error}
    records |= {f"{place}/{name}": value for name, value in more.items()}
    records[f"{prefix}/questions_global"] = questions
    records |= completion_records(f"{prefix}/", run, evaluation)
    records[f"time/{prefix}/step_s"] = seconds
    if full:
        records["time/eval_full/s_per_question"] = seconds / questions
        records |= {"eval_full/split": split, "eval_full/samples_per_question": n}
        asked = f"eval_full split={split} questions={questions} samples_per_question={n}"
    else:
        records |= {f"time/eval/{phase}_s": x for phase, x in phase_seconds(clock).items()}
        asked = f"eval step={step} split={split} questions={questions}"
    return f"{asked} {ending}", records


def completion_records(prefix: str, run: Run, batch: Batch) -> dict[str, float]:
    """What is recorded of the completions of a step and of an evaluation: their rewards, their
    lengths and, with an environment, their turns."""
    records = _spread(f"{prefix}reward/total", batch.rewards, "mean", "std", "min", "max")
    for function, column in zip(run.functions, batch.per_function.T, strict=True):
        records[f"{prefix}reward/func/{function.__name__}/mean"] = mean_of(column)
    records |= _spread(f"{prefix}seq_len/completion", batch.lengths, "mean", "max")
    records[f"{prefix}seq_len/completion/hit_max_frac"] = 1 - batch.stopped.mean()
    if run.environments is not None:
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


# ---- Accuracy over many questions ----------------------------------------------------------------


def standard_error(correct: np.ndarray) -> float:
    """The standard error of the accuracy, over the questions: NaN for fewer than two.

    correct: [questions, samples], NaN where the accuracy does not apply.
    """
    means = np.array([mean_of(samples) for samples in correct])
    means = means[~np.isnan(means)]
    return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan


def pass_at(correct: np.ndarray, k: int) -> float:
    """The probability that at least one of k samples of a question is right, without bias: the
    mean over the questions that have k samples with a value. pass_at(correct, 1) is the accuracy.

    correct: [questions, samples], NaN where a sample has no value. Source: arXiv 2107.03374, eq. 1.
    """
    hits = []
    for samples in correct:
        n, wrong = np.isfinite(samples).sum(), (samples == 0).sum()
        if n >= k:
            sets = math.comb(n, k)  # of k samples; an integer of any size
            hits.append((sets - math.comb(wrong, k)) / sets)
    return mean_of(np.array(hits))


def majority_accuracy(correct: np.ndarray, texts: list[str]) -> float:
    """maj@n: the share of questions whose most frequent answer is right; of answers that are
    equally frequent the first one counts. No answer counts as one, and it is never right.

    correct: [questions, n samples], NaN where a sample has no value: it is left out, and so is a
    question without any value. texts: [questions * n].
    """
    answers = iter(map(extract_answer, texts))
    chosen = []
    for samples in correct:
        given = [(next(answers), right) for right in samples]
        given = [(answer, right) for answer, right in given if not np.isnan(right)]
        if given:
            counts = collections.Counter(answer for answer, _ in given)
            frequent = counts.most_common(1)[0][0]
            chosen.append(next(right for answer, right in given if answer == frequent))
    return mean_of(np.array(chosen))
