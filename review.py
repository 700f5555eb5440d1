"""What a run did, for people to see: completions to read, a summary, a verdict and a report."""

import collections
import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import Config
from loss import equal_groups
from rollout import Run, texts_of
from runtime.mistakes import UserMistake
from runtime.packing import Batch
from runtime.page import charts_of, escaped, group_tables, held_out_table, page, settings_table
from runtime.parsing import yaml_lines
from runtime.records import (
    SUMMARY,
    column,
    mean_of,
    names_of,
    parse_yaml,
    read_lines,
    read_settings,
    state_of,
    summary_of,
)
from runtime.run_log import RunLog, replace_file
from runtime.tables import pairs_of, shorten, table_text

ENDED = ("MAX_LENGTH_SAMPLE", "stop token")  # what ended a completion whose `stopped` is 0, or 1


# ---- Completions to read -------------------------------------------------------------------------


def sample_entries(run: Run, batch: Batch) -> list[dict[str, Any]]:
    """Entries of samples.jsonl for two groups of this process, with all their completions. Groups
    whose total rewards differ come first."""
    first = run.local_prompts().start
    equal = equal_groups(batch.rewards[run.local_sequences()], run.cfg.num_pre_q)
    entries = []
    for number in first + np.argsort(equal, kind="stable")[:2]:
        group = batch.groups(np.array([number]))
        texts = texts_of(run.tokenizer, group.prompts, group)
        columns = group.rewards, group.per_function, group.lengths, group.stopped
        completions = completion_entries(run, texts, *columns)
        for completion, advantage in zip(completions, group.advantages, strict=True):
            completion["advantage"] = float(advantage)
        [prompt] = group.prompts
        entry = {"question": prompt.columns["question"], "prompt": run.tokenizer.decode(prompt.ids)}
        entries.append(entry | {"answer": prompt.columns["answer"], "completions": completions})
    return entries


def answer_entries(
    run: Run, evaluation: Batch, texts: list[str], correct: np.ndarray, full: bool
) -> list[dict[str, Any]]:
    """Entries of eval.jsonl for all questions of an evaluation.

    texts: of its completions. correct: [questions, samples] float64: 1, 0, or NaN. full: True for
    the complete split.
    """
    n = run.cfg.eval_samples
    columns = evaluation.rewards, evaluation.per_function, evaluation.lengths, evaluation.stopped
    completions = completion_entries(run, texts, *columns)
    for entry, right in zip(completions, correct.reshape(-1), strict=True):
        entry["correct"] = number_or_none(right)
    return [
        {
            "evaluation": "eval_full" if full else "eval",
            "question": prompt.columns["question"],
            "answer": prompt.columns["answer"],
            "completions": completions[i * n : (i + 1) * n],
        }
        for i, prompt in enumerate(evaluation.prompts)
    ]


def completion_entries(
    run: Run,
    texts: list[str],
    rewards: np.ndarray,
    per_function: np.ndarray,
    lengths: np.ndarray,
    stopped: np.ndarray,
) -> list[dict[str, Any]]:
    """An entry for each of n completions. The arrays are [n], per_function is [n, functions]."""
    names = [function.__name__ for function in run.functions]
    return [
        {
            "text": text,
            "reward": number_or_none(reward),
            "rewards": {name: number_or_none(x) for name, x in zip(names, row, strict=True)},
            "tokens": int(tokens),
            "ended": ENDED[int(ended)],
        }
        for text, reward, row, tokens, ended in zip(
            texts, rewards, per_function, lengths, stopped, strict=True
        )
    ]


def number_or_none(number: float) -> float | None:
    """The number as JSON writes it; NaN, which stands for no value, becomes None."""
    return None if math.isnan(number) else float(number)


def sample_table(step: int, entry: dict[str, Any]) -> str:
    """The completions of one group as a table: for a terminal, or as plain lines."""
    rows = [(pairs_of(each), shorten(each["text"])) for each in entry["completions"]]
    return table_text(f"sample step={step} question: {shorten(entry['question'])}", rows)


# ---- What a run has recorded ---------------------------------------------------------------------


class History(NamedTuple):
    """What a run has written into its folder."""

    settings: dict[str, Any]  # of config.yaml, by their YAML names, with derived.* values
    steps: list[dict[str, Any]]  # the records of training steps
    evals: list[dict[str, Any]]  # the records of evaluations of EVAL_PROMPTS questions
    sweeps: list[dict[str, Any]]  # the records of evaluations of the complete split

    def all(self) -> list[dict[str, Any]]:
        """All records, in the order of their steps."""
        records = (*self.steps, *self.evals, *self.sweeps)
        return sorted(records, key=lambda record: record["step"])


def read_history(out: Path) -> History:
    """The history of the run in this folder. Raises UserMistake if the folder is not a run's."""
    records = read_lines(out / "metrics.jsonl")
    return History(
        read_settings(out),
        [r for r in records if "train-other/loss" in r],
        [r for r in records if "eval/accuracy" in r],
        [r for r in records if "eval_full/accuracy" in r],
    )


# ---- The verdict ---------------------------------------------------------------------------------

WINDOW = 10  # The rules look at so many steps at the start and at the end of a run.
LEVEL, HEALTHY, NONE_YET = "derived.drift_level", "verdict: no sign of trouble", "verdict: none yet"
LOSS, NORM = "train-other/loss", "train-other/grad_norm"
TOTAL, FORMAT = "train-reward/total/mean", "train-reward/func/reward_format/mean"
ZERO, CUT = "train-reward/advantage/zero_frac", "train-seq_len/completion/hit_max_frac"
DRIFT, ENTROPY = "train-other/sampling_logp_difference/mean", "train-other/entropy"
ACCURACY, CLIPPED = "train-reward/accuracy", "train-other/clip_ratio_later/region_mean"
LR = "train-other/learning_rate"
# Where DYNAMIC_SAMPLING has recorded a metric of all that it sampled. The groups that a step keeps
# are neither too hard nor too easy, so that their mean reward hardly moves.
OF_SAMPLED = {
    TOTAL: "train-other/dynamic_sampling/reward_mean",
    FORMAT: "train-other/dynamic_sampling/func/reward_format/mean",
    ACCURACY: "train-other/dynamic_sampling/accuracy",
    CUT: "train-other/dynamic_sampling/hit_max_frac",
}
SEEN = ("step", LOSS, NORM, TOTAL, FORMAT, ZERO, CUT, DRIFT, ENTROPY, ACCURACY, CLIPPED, LR)
SEEN += (*OF_SAMPLED.values(),)


def values_of(records: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """[records] float64: a metric as the rules see it, of all that was sampled; NaN without one."""
    sampled, of_step = column(records, OF_SAMPLED.get(name, name)), column(records, name)
    return np.where(np.isnan(sampled), of_step, sampled)


class View(NamedTuple):
    """What the rules see of a run."""

    run: History
    first: Sequence[dict[str, Any]]  # the records of the first WINDOW steps
    last: Sequence[dict[str, Any]]  # the records of the last WINDOW steps

    def mean(self, name: str) -> float:
        """The mean of a metric over the last steps, without missing values."""
        return mean_of(values_of(self.last, name))

    def began(self, name: str) -> float:
        """The mean of a metric over the first steps, without missing values."""
        return mean_of(values_of(self.first, name))

    def rose(self, name: str) -> float:
        """By how many standard errors a metric rose in the run; 99 if it has no noise."""
        n = max(WINDOW, len(self.run.steps) // 3)  # a slow rise needs long windows
        before, after = values_of(self.run.steps[:n], name), values_of(self.run.steps[-n:], name)
        rise, spread = mean_of(after) - mean_of(before), np.nanvar(before) + np.nanvar(after)
        return rise / math.sqrt(spread / n) if spread else 99 * float(np.sign(rise))

    def accuracy(self, which: int) -> tuple[float, float]:
        """The accuracy of the first (0) or the newest (-1) evaluation, and its standard error."""
        record = self.run.evals[which] if self.run.evals else {}
        return column([record], "eval/accuracy")[0], column([record], "eval/accuracy_se")[0]

    def accuracy_rose(self) -> float:
        """By how many standard errors the accuracy rose from the first to the newest evaluation."""
        (before, error), (after, later_error) = self.accuracy(0), self.accuracy(-1)
        return (after - before) / max(math.hypot(error, later_error), 1e-9)

    def held_out_gap(self) -> float:
        """How far an evaluation during the last steps is below their accuracy; NaN without one."""
        recent = self.run.evals and self.run.evals[-1]["step"] >= self.last[0]["step"]
        return self.mean(ACCURACY) - self.accuracy(-1)[0] if recent else math.nan

    def never(self, name: str) -> bool:
        """Whether a metric was 0 in all steps, and the learning rate has stopped rising."""
        rates = column(self.last, LR)
        return np.nanmax(column(self.run.steps, name)) == 0 and rates[-1] <= rates[0]


class Rule(NamedTuple):
    """A sign that a run is sick."""

    name: str
    holds: Callable[[View], bool]  # a comparison with NaN, which stands for no value, is False
    says: str
    why: str  # why the thresholds are what they are


# The first rules are about causes, the later ones about what may follow from them.
RULES = (
    Rule(
        "non_finite_steps",
        lambda v: not np.isfinite([column(v.last, name) for name in (LOSS, NORM)]).all(),
        "An update was not finite and was not applied. Lower LEARNING_RATE or, at the first step, "
        "check the weights of MODEL_PATH; read bad_step_N.npz.",
        "One such step in ten is enough: a healthy run has none.",
    ),
    Rule(
        "sampler_drift",
        lambda v: np.nanmin(column(v.last, DRIFT)) > v.run.settings.get(LEVEL, math.inf),
        "The sampler's log-probabilities are not the trainer's: its weights or programs differ.",
        "DRIFT_LEVELS in metrics.py has what rounding explains; ten steps in a row are no noise.",
    ),
    Rule(
        "all_truncated",
        lambda v: v.mean(CUT) >= 0.9,
        "Nearly all completions are cut off before they end. Raise MAX_LENGTH_SAMPLE or, if they "
        "ended at the start of the run, lower LEARNING_RATE.",
        "In a healthy run up to half of the completions may be cut off at the start.",
    ),
    Rule(
        "entropy_collapsed",
        lambda v: v.mean(ENTROPY) < 0.1 * v.began(ENTROPY) and v.mean(ACCURACY) < 0.7,
        "The policy has become almost deterministic before it was right, so it tries nothing new. "
        "Lower LEARNING_RATE, or raise EPS_HIGH, TEMPERATURE, BETA or ENTROPY_COEF.",
        "A tenth of the entropy leaves groups without differences. A right policy needs none.",
    ),
    Rule(
        "no_signal",
        lambda v: v.mean(ZERO) >= 0.98,
        "Hardly any advantage differs from 0, so there is nothing to learn from. Questions may be "
        "too hard or too easy, or the reward may be constant.",
        "At 0.98 one completion in fifty teaches something, or less than a group in a usual step.",
    ),
    Rule(
        "reward_hacked",
        lambda v: v.rose(TOTAL) > 2 and v.accuracy_rose() < -2,
        "The reward rises and the accuracy falls: the policy gets rewards without right answers. "
        "Read samples.jsonl, and change the reward.",
        "Two standard errors are beyond noise, and noise seldom moves both in these directions.",
    ),
    Rule(
        "format_only",
        lambda v: v.mean(FORMAT) >= 0.8 and v.rose(FORMAT) > 3 and v.rose(ACCURACY) < 2,
        "The answer format is learnt, and right answers are not. Raise the weight of "
        "reward_correct, take easier questions, or sample more completions per prompt.",
        "The format is there in four of five completions and rose beyond noise; answers did not.",
    ),
    Rule(
        "held_out_below_train",
        lambda v: v.held_out_gap() > max(3 * v.accuracy(-1)[1], 0.15),
        "Held-out questions are answered far worse than those of training: the policy has learnt "
        "them by heart. Take more questions or fewer steps.",
        "Greedy answers usually beat samples; 0.15 and three standard errors are beyond noise.",
    ),
    Rule(
        "never_clipped",
        lambda v: v.never(CLIPPED),
        "A step has several updates, and none of them ever clips a ratio: the later updates hardly "
        "change the policy. Raise LEARNING_RATE, or take fewer updates per step.",
        "At the highest learning rate of a useful run a few ratios in a thousand are clipped.",
    ),
    Rule(
        "no_learning",
        lambda v: len(v.run.steps) >= 50 and v.rose(TOTAL) <= 2 and not v.accuracy_rose() > 2,
        "Neither the reward nor the accuracy has risen beyond noise: LEARNING_RATE is too low, or "
        "so high that it ruins the policy, or a step has too few completions.",
        "In fifty steps of 64 or more completions a useful run rises beyond noise.",
    ),
)


def rules_that_hold(view: View) -> list[Rule]:
    """The rules that hold: before WINDOW steps only RULES[0], and no_learning only if no other."""
    rules = RULES if len(view.last) == WINDOW else RULES[:1]
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # means of no value
        broken = [rule for rule in rules if rule.holds(view)]
    return [rule for rule in broken if rule.name != "no_learning"] or broken


def verdict(history: History) -> list[str]:
    """One to three lines about a run: what is wrong, or what it has reached."""
    view = View(history, history.steps[:WINDOW], history.steps[-WINDOW:])
    if broken := rules_that_hold(view):
        return [f"verdict: {rule.name}: {rule.says}" for rule in broken[:3]]
    if not history.steps:
        return []
    if len(history.steps) < WINDOW:
        return [f"{NONE_YET}: it needs {WINDOW} steps, and the run has {len(history.steps)}"]
    parts = [f"mean reward {view.began(TOTAL):.4f} -> {view.mean(TOTAL):.4f}"]
    if len(history.evals) > 1:
        pairs = [f"{x:.4f} (standard error {e:.4f})" for x, e in map(view.accuracy, (0, -1))]
        parts.insert(0, f"accuracy {' -> '.join(pairs)}")
    return [f"{HEALTHY} in {len(history.steps)} steps: {', '.join(parts)}"]


# ---- The report ----------------------------------------------------------------------------------

BEST = ("eval/accuracy", "eval_full/accuracy", TOTAL)  # summary.json has their highest values
CHARTS = {  # title -> the metrics in it; * stands for every reward function
    "accuracy on held-out questions": ("eval/accuracy",),
    "accuracy on the complete split": ("eval_full/accuracy",),
    "mean reward": (TOTAL,),
    "mean reward of each function": ("train-reward/func/*/mean",),
    "tokens of a completion": ("train-seq_len/completion/mean",),
    "completions that are cut off": (CUT,),
    "entropy, nats per token": (ENTROPY,),
    "KL to the reference, nats per token": ("train-other/kl",),
    "ratios that are clipped": ("train-other/clip_ratio/region_mean", "train-other/cispo_clip*"),
    "norm of the gradient": ("train-other/grad_norm",),
    "groups whose rewards are equal": ("train-other/frac_reward_zero_std",),
    "sampler and trainer differ, nats": (DRIFT,),
    "seconds of a step": ("time/train/step_s", "time/train/rollout_s", "time/train/update_s"),
    "tokens per second": (
        "throughput/train/valid_tokens_per_s",
        "throughput/generated_tokens_per_s",
    ),
    "memory, GiB": ("memory/device_peak_gib", "memory/host_peak_gib"),
    "learning rate": ("train-other/learning_rate",),
}


def report(runs: dict[Path, History]) -> str:
    """The HTML of one run, or of several whose curves are drawn over each other.

    runs: the history of each folder.
    """
    parts, names = [], dict(zip(runs, names_of([*runs]), strict=True))
    for folder, history in runs.items():
        state, why = state_of(folder)
        text = f"{names[folder]}: {state} after {len(history.steps)} steps. {why}"
        parts.append(f'<p class="soft">{escaped(text)}</p>')
        for line in verdict(history):
            sick = "" if line.startswith((HEALTHY, NONE_YET)) else ' class="bad"'
            parts.append(f"<p{sick}>{escaped(line)}</p>")
    records = {names[folder]: history.all() for folder, history in runs.items()}
    charts = [charts_of(title, metrics, records) for title, metrics in CHARTS.items()]
    parts.append(f'<div class="charts">{"".join(charts)}</div>')
    if len(runs) == 1:
        parts += [held_out_table(*runs), group_tables(*runs)]
    defaults = parse_yaml("\n".join(yaml_lines(Config())))
    settings = {names[folder]: history.settings for folder, history in runs.items()}
    parts.append(f"<h2>Settings</h2>{settings_table(defaults, settings)}")
    return page(", ".join(names.values()), "\n".join(parts))


def write_review(out: Path, history: History, state: str, why: str) -> dict[str, Any]:
    """Writes summary.json and report.html of a run, and returns the summary. Raises OSError."""
    summary = {"state": state, "why": why, "verdict": verdict(history)}
    summary |= summary_of(history.settings, history.all(), BEST)
    replace_file(out / SUMMARY, json.dumps(summary, indent=1, default=str) + "\n")
    replace_file(out / "report.html", report({out: history}))
    return summary


class Reviewer:
    """What process 0 tells about its run: notes while it goes on, then summary.json, report.html
    and the verdict. If these files cannot be written, one line says so, and the run goes on."""

    def __init__(self, out: Path, log: RunLog, writes: bool) -> None:
        """writes: whether this is process 0; the others say and write nothing."""
        self._out, self._log, self._writes, self._failed = out, log, writes, False
        self._held, self._told = collections.Counter(), set()
        self._history = read_history(out) if writes else None

    def note_trouble(self, record: dict[str, Any]) -> None:
        """Prints a note if a rule has held for WINDOW steps, once for each rule."""
        if not self._writes:
            return
        steps = self._history.steps
        steps.append({name: record.get(name) for name in SEEN})
        holding = rules_that_hold(View(self._history, steps[:WINDOW], steps[-WINDOW:]))
        self._held = collections.Counter({r.name: self._held[r.name] + 1 for r in holding})
        for rule in holding:
            if self._held[rule.name] >= WINDOW and rule.name not in self._told:
                self._told.add(rule.name)
                self._log.line(f"note step={record['step']}: {rule.name}: {rule.says}")

    def verdict(self) -> None:
        """Prints the verdict."""
        for line in verdict(self._history) if self._writes else ():
            self._log.line(line)

    def write(self, state: str, why: str = "") -> dict[str, Any]:
        """Writes the review of the run so far; returns the numbers and texts of its summary."""
        if not self._writes:
            return {}
        try:
            history = read_history(self._out)
            summary = write_review(self._out, history, state, why)
        except (OSError, UserMistake) as error:  # somebody may have damaged config.yaml
            if not self._failed:
                self._failed = True
                reason = error.strerror if isinstance(error, OSError) else error
                self._log.line(f"{self._out}/report.html cannot be written: {reason}")
            return {}
        seen = [{name: record.get(name) for name in SEEN} for record in history.steps]
        self._history = history._replace(steps=seen)
        best = {f"best/{name}": best["value"] for name, best in summary["best"].items()}
        return best | {"state": state, "why": why, "verdict": " ".join(summary["verdict"])}
