"""What a run did, for people to see: completions to read, a summary, a verdict and a report."""

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml

from config import Config
from loss import equal_groups
from rollout import Run, dialogues_of
from runtime import page
from runtime.mistakes import UserMistake
from runtime.packing import Batch
from runtime.parsing import yaml_lines
from runtime.records import RUNNING, SUMMARY, column, mean_of, read_lines, read_settings, state_of
from runtime.run_log import RunLog, plain, replace_file

ENDED = ("MAX_LENGTH_SAMPLE", "stop token")  # what ended a completion whose `stopped` is 0, or 1
LONGEST_TEXT = 400  # characters of a text in the log; the files have the complete text


# ---- Completions to read -------------------------------------------------------------------------


def sample_entries(run: Run, batch: Batch) -> list[dict[str, Any]]:
    """Entries of samples.jsonl for two groups, with all their completions. Groups whose total
    rewards differ come first."""
    equal = equal_groups(batch.rewards, run.cfg.num_pre_q)
    shown = batch.groups(np.argsort(equal, kind="stable")[:2])
    entries = completion_entries(run, shown, "advantage", shown.advantages)
    prompts = [run.tokenizer.decode(prompt.ids) for prompt in shown.prompts]
    return [{"prompt": text} | entry for text, entry in zip(prompts, entries, strict=True)]


def completion_entries(
    run: Run, batch: Batch, name: str, values: np.ndarray
) -> list[dict[str, Any]]:
    """An entry for each prompt of a batch, with its completions. Under this name a completion has
    one of the values; docs/survival.md has its other fields."""
    texts = dialogues_of(run, batch)
    names = [function.__name__ for function in run.functions]
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
    return plain(entries)


def sample_table(step: int, entry: dict[str, Any]) -> str:
    """The completions of one group for the log. Programs read a log, so that no line of a text
    begins like a line of the run."""
    lines = [f"sample step={step} question: {visible(shorten(entry['question']))}"]
    for each in entry["completions"]:
        lines.append("  " + " ".join(f"{name}={value}" for name, value in page.pairs_of(each)))
        lines += [f"    {visible(line)}" for line in shorten(each["text"]).splitlines() or [""]]
    return "\n".join(lines)


def visible(text: str) -> str:
    """The text as a single line, with what is not printable as escapes such as \\n."""
    return "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)


def shorten(text: str) -> str:
    """The text, or its beginning if it is longer than LONGEST_TEXT."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


# ---- What a run has recorded ---------------------------------------------------------------------

WINDOW = 10  # The rules look at so many steps at the start and at the end of a run.
HEALTHY, NONE_YET = "verdict: no sign of trouble", "verdict: none yet"
LOSS, NORM, ENTROPY = "train-other/loss", "train-other/grad_norm", "train-other/entropy"
OF_UPDATES = (LOSS, NORM, "train-other/param_norm")  # null for an update that is not finite
TOTAL, ACCURACY = "train-reward/total/mean", "train-reward/accuracy"
ZERO, CUT = "train-reward/advantage/zero_frac", "train-seq_len/completion/hit_max_frac"
DRIFT = "train-other/sampling_logp_difference/mean"
# Where DYNAMIC_SAMPLING has recorded a metric of all that it sampled. The groups that a step keeps
# are neither too hard nor too easy, so that their mean reward hardly moves.
OF_SAMPLED = {
    TOTAL: "train-other/dynamic_sampling/reward_mean",
    ACCURACY: "train-other/dynamic_sampling/accuracy",
    CUT: "train-other/dynamic_sampling/hit_max_frac",
}


class History(NamedTuple):
    """What a run has written into its folder."""

    settings: dict[str, Any]  # of config.yaml, by their YAML names, with derived.* values
    records: list[dict[str, Any]]  # all of metrics.jsonl
    steps: list[dict[str, Any]]  # those of training steps
    evals: list[dict[str, Any]]  # those of evaluations of EVAL_PROMPTS questions
    state: str  # of the run, see runtime/records.py
    why: str  # it is in this state


def read_history(out: Path) -> History:
    """The history of the run in this folder. Raises UserMistake if the folder is not a run's."""
    settings, records = read_settings(out), [*read_lines(out / "metrics.jsonl")]
    steps = [record for record in records if LOSS in record]
    evals = [record for record in records if "eval/accuracy" in record]
    return History(settings, records, steps, evals, *state_of(out))


# ---- The verdict ---------------------------------------------------------------------------------

# The rules, each a sign that a run is sick, with what its line says. The first ones are about
# causes, the later ones about what may follow from them.
RULES = {
    "non_finite_steps": (
        "An update was not finite and was not applied. Lower LEARNING_RATE or, at the first step, "
        "check the weights of MODEL_PATH."
    ),
    "sampler_drift": (
        "The sampler's log-probabilities are not the trainer's: its weights or programs differ."
    ),
    "no_accuracy": (
        "No completion was judged right or wrong, because the first reward function applied to "
        "none. Check this function and the answers of DATASET."
    ),
    "all_truncated": (
        "Nearly all completions are cut off before they end. Raise MAX_LENGTH_SAMPLE or, if they "
        "ended at the start of the run, lower LEARNING_RATE."
    ),
    "entropy_collapsed": (
        "The policy has become almost deterministic before it was right, so it tries nothing new. "
        "Lower LEARNING_RATE, or raise EPS_HIGH, TEMPERATURE, BETA or ENTROPY_COEF."
    ),
    "no_signal": (
        "Hardly any advantage differs from 0, so there is nothing to learn from. Questions may be "
        "too hard or too easy, or the reward may be constant."
    ),
    "reward_hacked": (
        "The reward rises and the accuracy falls: the policy gets rewards without right answers. "
        "Read samples.jsonl, and change the reward."
    ),
    "held_out_below_train": (
        "Held-out questions are answered far worse than those of training: the policy has learnt "
        "them by heart. Take more questions or fewer steps."
    ),
    "no_learning": (
        "Neither the reward nor the accuracy has risen beyond noise: LEARNING_RATE is too low, or "
        "so high that it ruins the policy, or a step has too few completions."
    ),
}


def rules_that_hold(history: History) -> list[str]:
    """The names of the rules that hold; no_learning only if no other does. docs/survival.md says
    why the thresholds are what they are. NaN is no value: a comparison with it is False."""
    steps, evals = history.steps, history.evals
    first, last = steps[:WINDOW], steps[-WINDOW:]
    drift, level = values_of(last, DRIFT), history.settings.get("derived.drift_level", math.inf)
    # Runs of earlier versions have no param_norm.
    of_updates = [values_of([step for step in last if name in step], name) for name in OF_UPDATES]
    holds = {
        "non_finite_steps": not all(np.isfinite(values).all() for values in of_updates),
        "sampler_drift": min(drift[~np.isnan(drift)], default=0) > level,
    }
    if len(steps) >= WINDOW:
        right, reward_rose = mean_over(last, ACCURACY), reward_rise(steps)
        (before, before_error), (after, error) = accuracy_of(evals, 0), accuracy_of(evals, -1)
        accuracy_rose = (after - before) / max(math.hypot(before_error, error), 1e-9)
        evaluated = evals and evals[-1]["step"] >= last[0]["step"]
        holds |= {
            "no_accuracy": np.isnan(right) or (evals and np.isnan(after)),
            "all_truncated": mean_over(last, CUT) >= 0.9,
            "entropy_collapsed": (
                mean_over(last, ENTROPY) < 0.1 * mean_over(first, ENTROPY) and right < 0.7
            ),
            "no_signal": mean_over(last, ZERO) >= 0.98,
            "reward_hacked": reward_rose > 2 and accuracy_rose < -2,
            "held_out_below_train": evaluated and right - after > max(3 * error, 0.15),
            "no_learning": len(steps) >= 50 and reward_rose <= 2 and not accuracy_rose > 2,
        }
    held = [name for name in RULES if holds.get(name)]
    return [name for name in held if name != "no_learning"] or held


def values_of(records: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """[records] float64: a metric as the rules see it, of all that was sampled; NaN without one."""
    sampled, of_step = column(records, OF_SAMPLED.get(name, name)), column(records, name)
    return np.where(np.isnan(sampled), of_step, sampled)


def mean_over(records: Sequence[dict[str, Any]], name: str) -> float:
    """The mean of a metric as the rules see it, without missing values."""
    return mean_of(values_of(records, name))


def reward_rise(steps: Sequence[dict[str, Any]]) -> float:
    """By how many standard errors the mean reward rose in these steps; 99 if it has no noise."""
    n = max(WINDOW, len(steps) // 3)  # a slow rise needs long windows
    rise = mean_over(steps[-n:], TOTAL) - mean_over(steps[:n], TOTAL)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # there is no value
        spread = sum(np.nanvar(values_of(part, TOTAL)) for part in (steps[:n], steps[-n:]))
    return rise / math.sqrt(spread / n) if spread else 99 * float(np.sign(rise))


def accuracy_of(evals: Sequence[dict[str, Any]], which: int) -> tuple[float, float]:
    """The accuracy of the first (0) or the newest (-1) evaluation, and its standard error."""
    record = evals[which] if evals else {}
    return column([record], "eval/accuracy")[0], column([record], "eval/accuracy_se")[0]


def verdict(history: History) -> list[str]:
    """One to three lines about a run: what is wrong, or what it has reached."""
    steps, evals = history.steps, history.evals
    if held := rules_that_hold(history):
        return [f"verdict: {name}: {RULES[name]}" for name in held[:3]]
    if not steps:
        return []
    if len(steps) < WINDOW:
        return [f"{NONE_YET}: it needs {WINDOW} steps, and the run has {len(steps)}"]
    rewards = mean_over(steps[:WINDOW], TOTAL), mean_over(steps[-WINDOW:], TOTAL)
    parts = ["mean reward {:.4f} -> {:.4f}".format(*rewards)]
    if len(evals) > 1:
        pairs = [accuracy_of(evals, which) for which in (0, -1)]
        told = [f"{accuracy:.4f} (standard error {error:.4f})" for accuracy, error in pairs]
        parts.insert(0, f"accuracy {' -> '.join(told)}")
    return [f"{HEALTHY} in {len(steps)} steps: {', '.join(parts)}"]


# ---- The report ----------------------------------------------------------------------------------

CHARTS = {  # title -> the metrics in it; * stands for every reward function
    "accuracy on held-out questions": ("eval/accuracy", "eval_full/accuracy"),
    "mean reward": (TOTAL,),
    "mean reward of each function": ("train-reward/func/*/mean",),
    "tokens of a completion": ("train-seq_len/completion/mean",),
    "completions that are cut off": (CUT,),
    "entropy, nats per token": (ENTROPY,),
    "KL to the reference, nats per token": ("train-other/kl",),
    "ratios that are clipped": ("train-other/clip_ratio/region_mean", "train-other/cispo_clip*"),
    "norm of the gradient": (NORM,),
    "groups whose rewards are equal": ("train-other/frac_reward_zero_std",),
    "sampler and trainer differ, nats": (DRIFT,),
    "seconds of a step": ("time/train/step_s", "time/train/rollout_s", "time/train/update_s"),
    "tokens per second": (
        "throughput/train/valid_tokens_per_s",
        "throughput/generated_tokens_per_s",
    ),
    "memory, GiB": ("memory/device_peak_gib", "memory/host_peak_gib"),
}


def report(out: Path, history: History) -> str:
    """The HTML about the run in this folder."""
    name = out.resolve().name
    told = f"{name}: {history.state} after {len(history.steps)} steps. {history.why}"
    parts = [f"<p>{page.escaped(told)}</p>"]
    for line in verdict(history):
        style = "" if line.startswith((HEALTHY, NONE_YET)) else ' class="bad"'
        parts.append(f"<p{style}>{page.escaped(line)}</p>")
    charts = [page.chart(title, metrics, history.records) for title, metrics in CHARTS.items()]
    parts.append(f'<div class="charts">{"".join(charts)}</div>')
    parts += [page.held_out_table(out), page.group_tables(out)]
    defaults = yaml.safe_load("\n".join(yaml_lines(Config())))
    parts.append(page.settings_table(history.settings, defaults))
    return page.document(name, "\n".join(parts))


def write_review(out: Path, history: History) -> dict[str, Any]:
    """Writes summary.json and report.html of a run, and returns the summary. Raises OSError."""
    last = {}
    for record in history.records:
        last |= {name: x for name, x in record.items() if x is not None and name != "step"}
    summary = {
        "state": history.state,
        "why": history.why,
        "verdict": verdict(history),
        "steps_done": history.steps[-1]["step"] + 1 if history.steps else 0,
        "last": last,
        "settings": history.settings,
    }
    replace_file(out / SUMMARY, json.dumps(summary, indent=1, default=str) + "\n")
    replace_file(out / "report.html", report(out, history))
    return summary


class Reviewer:
    """What process 0 tells about its run: summary.json and report.html, and notes while it goes on;
    the others say and write nothing. If these files cannot be written, one line says so, and the
    run goes on."""

    def __init__(self, out: Path, log: RunLog) -> None:
        self._out, self._log = out, log
        self._told: set[str] = set()  # the rules, and the error, that have their line

    def write(self, state: str, why: str = "") -> dict[str, Any]:
        """Writes the review of the run so far; returns its state, why and verdict, or nothing.
        While the run goes on, a line tells of each rule that holds for the first time."""
        if jax.process_index() != 0:
            return {}
        try:
            history = read_history(self._out)._replace(state=state, why=why)
            summary = write_review(self._out, history)
        except (OSError, UserMistake) as error:  # somebody may have damaged config.yaml
            reason = error.strerror if isinstance(error, OSError) else error
            self._tell_once("error", f"{self._out}/report.html cannot be written: {reason}")
            return {}
        note = f"note step={summary['steps_done']}"
        for name in rules_that_hold(history) if state == RUNNING else ():
            self._tell_once(name, f"{note}: {name}: {RULES[name]}")
        return {name: summary[name] for name in ("state", "why", "verdict")}

    def _tell_once(self, name: str, line: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._log.line(line)
