"""What a run did, for people to see: completions to read, a summary, a verdict and a report."""

import collections
import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import data
from config import Config
from loss import equal_groups
from rewards import mean_of
from rollout import Answers, Groups, Run
from runtime.page import charts_of, escaped, group_tables, held_out_table, page, settings_table
from runtime.parsing import yaml_lines
from runtime.records import (
    SUMMARY,
    column,
    names_of,
    parse_yaml,
    read_lines,
    read_settings,
    replace_file,
    state_of,
    summary_of,
)
from runtime.run_log import RunLog
from runtime.tables import shorten, table_text

ENDED = ("MAX_LENGTH_SAMPLE", "stop token")  # what ended a completion: without, with stopped


# ---- Completions to read -------------------------------------------------------------------------


def sample_entries(run: Run, groups: Groups, advantages: np.ndarray) -> list[dict[str, Any]]:
    """Entries of samples.jsonl for two groups of this process, with all their completions. Groups
    whose rewards differ come first, since the step learns from them.

    advantages: [B] float64.
    """
    K, local, results = run.cfg.num_pre_q, run.local_sequences(), groups.results
    prompts, texts = groups.prompts[run.local_prompts()], groups.completions.texts(run.tokenizer)
    columns = (results.rewards, results.per_function, results.completion_lengths, results.stopped)
    completions = completion_entries(run, texts, *(column[local] for column in columns))
    for entry, advantage in zip(completions, advantages[local], strict=True):
        entry["advantage"] = float(advantage)
    shown = np.argsort(equal_groups(results.rewards[local], K), kind="stable")[:2]
    return [
        {
            "question": prompts[i].columns["question"],
            "prompt": run.tokenizer.decode(prompts[i].ids),
            "answer": prompts[i].columns["answer"],
            "completions": completions[i * K : (i + 1) * K],
        }
        for i in shown
    ]


def answer_entries(
    run: Run, questions: list[data.Prompt], answers: Answers, correct: np.ndarray, full: bool
) -> list[dict[str, Any]]:
    """Entries of eval.jsonl for all questions of an evaluation.

    correct: [questions, samples] float64: 1, 0, or NaN. full: True for the complete split.
    """
    n, columns = run.cfg.eval_samples, (answers.rewards, answers.per_function, answers.lengths)
    completions = completion_entries(run, answers.texts, *columns, answers.stopped)
    for entry, right in zip(completions, correct.reshape(-1), strict=True):
        entry["correct"] = number_or_none(right)
    return [
        {
            "evaluation": "eval_full" if full else "eval",
            "question": prompt.columns["question"],
            "answer": prompt.columns["answer"],
            "completions": completions[i * n : (i + 1) * n],
        }
        for i, prompt in enumerate(questions)
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
    rows = [
        {
            "reward": f"{completion['reward']}",
            **{name: f"{x}" for name, x in completion["rewards"].items()},
            "advantage": f"{completion['advantage']:.3f}",
            "tokens": f"{completion['tokens']}",
            "ended": completion["ended"],
            "completion": shorten(completion["text"]),
        }
        for completion in entry["completions"]
    ]
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

WINDOW = 10  # A rule compares so many steps at the start of a run with as many at its end.
HEALTHY = "verdict: no sign of trouble"
TOTAL, FORMAT = "train-reward/total/mean", "train-reward/func/reward_format/mean"
EQUAL, CUT = "train-other/frac_reward_zero_std", "train-seq_len/completion/hit_max_frac"
DRIFT, ENTROPY = "train-other/sampling_logp_difference/mean", "train-other/entropy"
RIGHT, CLIPPED = "train-reward/accuracy", "train-other/clip_ratio_later/region_mean"


class View(NamedTuple):
    """What the rules see of a run."""

    first: Sequence[dict[str, Any]]  # the records of the first WINDOW steps
    last: Sequence[dict[str, Any]]  # the records of the last WINDOW steps
    evals: Sequence[dict[str, Any]]
    drift: float  # the most that rounding explains between sampler and trainer, nats

    def mean(self, name: str) -> float:
        """The mean of a metric over the last steps, without missing values."""
        return mean_of(column(self.last, name))

    def began(self, name: str) -> float:
        """The mean of a metric over the first steps, without missing values."""
        return mean_of(column(self.first, name))

    def rose(self, name: str) -> float:
        """By how many standard errors the mean of a metric rose from the first to the last steps;
        99 stands for a rise without any noise."""
        spread = column(self.first, name).var() + column(self.last, name).var()
        rise = self.mean(name) - self.began(name)
        return rise / math.sqrt(spread / WINDOW) if spread else 99 * float(np.sign(rise))

    def accuracy(self, which: int) -> tuple[float, float]:
        """The accuracy of the first (0) or the newest (-1) evaluation, and its standard error."""
        if not self.evals:
            return math.nan, math.nan
        names = "eval/accuracy", "eval/accuracy_se"
        return tuple(float(column([self.evals[which]], name)[0]) for name in names)

    def accuracy_rose(self) -> float:
        """By how many standard errors the accuracy rose from the first to the newest evaluation."""
        (before, error), (after, later_error) = self.accuracy(0), self.accuracy(-1)
        return (after - before) / max(math.hypot(error, later_error), 1e-9)


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
        lambda v: bool(np.isnan(column(v.last, "train-other/grad_norm")).any()),
        "An update was not finite and was not applied. Lower LEARNING_RATE, and look into "
        "bad_step_N.npz.",
        "One such step in ten is enough: a healthy run has none.",
    ),
    Rule(
        "sampler_drift",
        lambda v: column(v.last, DRIFT).min() > v.drift,
        "The sampler's log-probabilities are not the trainer's, so the updates follow samples of "
        "another policy. Its weights or its programs differ.",
        "DRIFT_LEVELS in metrics.py has what rounding explains; ten steps in a row are no noise.",
    ),
    Rule(
        "all_truncated",
        lambda v: v.mean(CUT) >= 0.9,
        "Nearly all completions are cut off before they end. Raise MAX_LENGTH_SAMPLE.",
        "What is cut off has no answer. In a healthy run up to half of the completions may be cut "
        "off at the start.",
    ),
    Rule(
        "entropy_collapsed",
        lambda v: v.mean(ENTROPY) < 0.1 * v.began(ENTROPY) and v.mean(RIGHT) < 0.7,
        "The policy has become almost deterministic before it was right, so it tries nothing new. "
        "Lower LEARNING_RATE, or raise EPS_HIGH, TEMPERATURE, BETA or ENTROPY_COEF.",
        "A policy that is nearly always right may have little entropy; at less than 0.7 right a "
        "tenth of the entropy at the start leaves groups without differences.",
    ),
    Rule(
        "no_signal",
        lambda v: v.mean(EQUAL) >= 0.98,
        "Hardly any group has different rewards, so there is nothing to learn from. Questions may "
        "be too hard or too easy, or the reward may be constant.",
        "At 0.98 one group in fifty teaches something, or less than one in a usual step.",
    ),
    Rule(
        "reward_hacked",
        lambda v: v.rose(TOTAL) > 3 and v.accuracy_rose() < -2,
        "The reward rises and the accuracy falls: the policy gets rewards without right answers. "
        "Read samples.jsonl, and change the reward.",
        "Both changes are larger than noise: three and two standard errors.",
    ),
    Rule(
        "format_only",
        lambda v: v.mean(FORMAT) >= 0.8 and v.rose(FORMAT) > 3 and v.rose(RIGHT) < 2,
        "The answer format is learnt, and right answers are not. Raise the weight of "
        "reward_correct, take easier questions, or sample more completions per prompt.",
        "The format is there in four of five completions and rose beyond noise; answers did not.",
    ),
    Rule(
        "held_out_below_train",
        lambda v: v.mean(RIGHT) - v.accuracy(-1)[0] > max(0.15, 3 * v.accuracy(-1)[1]),
        "Held-out questions are answered far worse than those of training: the policy has learnt "
        "them by heart. Take more questions or fewer steps.",
        "Greedy answers to new questions are usually better than samples in training; 0.15 below "
        "them, and three standard errors, is no noise.",
    ),
    Rule(
        "never_clipped",
        lambda v: column([*v.first, *v.last], CLIPPED).max() == 0,
        "A step has several updates, and none of them ever clips a ratio: the later updates hardly "
        "change the policy. Raise LEARNING_RATE, or take fewer updates per step.",
        "With a useful learning rate a few ratios in a thousand leave the clip range.",
    ),
    Rule(
        "no_learning",
        lambda v: v.last[-1]["step"] >= 50 and abs(v.rose(TOTAL)) < 2 and not v.accuracy_rose() > 2,
        "Neither the reward nor the accuracy has changed beyond noise. Raise LEARNING_RATE, or "
        "sample more completions per step.",
        "Fifty steps move the mean of a useful run by more than two standard errors; shorter runs "
        "are not judged.",
    ),
)


def broken_rules(view: View) -> list[Rule]:
    """The rules that hold. That nothing is learnt is said only if no other rule says why."""
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # a column may have no value at all
        found = [rule for rule in RULES if rule.holds(view)]
    return found[:-1] if len(found) > 1 and found[-1].name == "no_learning" else found


def verdict(history: History) -> list[str]:
    """One to three lines about a run: what is wrong, or what it has reached."""
    if len(history.steps) < WINDOW:
        return [f"verdict: a run of {len(history.steps)} steps is too short for one"]
    steps, drift = history.steps, history.settings["derived.drift_level"]
    view = View(steps[:WINDOW], steps[-WINDOW:], history.evals, drift)
    if found := broken_rules(view):
        return [f"verdict: {rule.name}: {rule.says}" for rule in found[:3]]
    parts = [f"mean reward {view.began(TOTAL):.4f} -> {view.mean(TOTAL):.4f}"]
    if len(history.evals) > 1:
        (before, error), (after, later_error) = view.accuracy(0), view.accuracy(-1)
        change = f"accuracy {before:.4f} (standard error {error:.4f}) -> {after:.4f}"
        parts.insert(0, f"{change} ({later_error:.4f})")
    return [f"{HEALTHY} in {len(steps)} steps: {', '.join(parts)}"]


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
    "ratios that are clipped": (
        "train-other/clip_ratio/region_mean",
        "train-other/cispo_clip_ratio",
    ),
    "norm of the gradient": ("train-other/grad_norm",),
    "groups whose rewards are equal": (EQUAL,),
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
        told = f"{names[folder]}: {state} after {len(history.steps)} steps. {why}"
        parts.append(f'<p class="soft">{escaped(told)}</p>')
        for line in verdict(history):
            sick = "" if line.startswith(HEALTHY) else ' class="bad"'
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


def write_review(out: Path, state: str, why: str = "") -> dict[str, Any]:
    """Writes summary.json and report.html of a run, and returns the summary. Raises OSError."""
    history = read_history(out)
    summary = {"state": state, "why": why, "verdict": verdict(history)}
    summary |= summary_of(history.settings, history.all(), BEST)
    replace_file(out / SUMMARY, json.dumps(summary, indent=1, default=str) + "\n")
    replace_file(out / "report.html", report({out: history}))
    return summary


class Reviewer:
    """What process 0 tells about its run: notes while it goes on, then summary.json, report.html
    and the verdict. A full disk costs a line."""

    def __init__(self, out: Path, log: RunLog, writes: bool) -> None:
        """writes: whether this is process 0; the others say and write nothing."""
        self._out, self._log, self._writes, self._lost = out, log, writes, False
        if writes:
            history = read_history(out)
            steps, self._evals = history.steps, history.evals
            self._drift = history.settings["derived.drift_level"]
            self._first, self._last = steps[:WINDOW], collections.deque(steps[-WINDOW:], WINDOW)
            self._held, self._told = collections.Counter(), set()

    def step_done(self, record: dict[str, Any]) -> None:
        """Prints a note if a rule has held for WINDOW steps, once for each rule."""
        if not self._writes:
            return
        self._last.append(record)
        self._first += [record] * (len(self._first) < WINDOW)
        if len(self._last) < WINDOW:
            return
        holding = broken_rules(View(self._first, [*self._last], self._evals, self._drift))
        self._held = collections.Counter({r.name: self._held[r.name] + 1 for r in holding})
        for rule in holding:
            if self._held[rule.name] >= WINDOW and rule.name not in self._told:
                self._told.add(rule.name)
                self._log.line(f"note step={record['step']}: {rule.name}: {rule.says}")

    def verdict(self) -> None:
        """Prints the verdict."""
        for line in verdict(read_history(self._out)) if self._writes else []:
            self._log.line(line)

    def write(self, state: str, why: str = "") -> dict[str, Any] | None:
        """Writes the review of the run so far, and returns its summary."""
        if not self._writes:
            return None
        try:
            self._evals = read_history(self._out).evals
            return write_review(self._out, state, why)
        except OSError as error:
            if not self._lost:
                self._lost = True
                self._log.line(f"{self._out}/report.html cannot be written: {error.strerror}")
        return None
