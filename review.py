"""What a run did, for people to see: completions to read, a summary, a verdict and a report."""

import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import Config
from loss import equal_groups
from rollout import Run, texts_of
from runtime import page
from runtime.mistakes import UserMistake
from runtime.packing import Batch
from runtime.parsing import yaml_lines
from runtime.records import (
    RUNNING,
    SUMMARY,
    column,
    mean_of,
    parse_yaml,
    read_lines,
    read_settings,
    state_of,
)
from runtime.run_log import RunLog, plain, replace_file

ENDED = ("MAX_LENGTH_SAMPLE", "stop token")  # what ended a completion whose `stopped` is 0, or 1
LONGEST_TEXT = 400  # characters of a text in the log; the files have the complete text
# Line separators and what controls a terminal; a tab does no harm.
CONTROL = re.compile(r"[\x00-\x08\n-\x1f\x7f-\x9f\u2028\u2029]")


# ---- Completions to read -------------------------------------------------------------------------


def sample_entries(run: Run, batch: Batch) -> list[dict[str, Any]]:
    """Entries of samples.jsonl for two groups of this process, with all their completions. Groups
    whose total rewards differ come first."""
    first = run.local_prompts().start
    equal = equal_groups(batch.rewards[run.local_sequences()], run.cfg.num_pre_q)
    shown = batch.groups(first + np.argsort(equal, kind="stable")[:2])
    texts = texts_of(run.tokenizer, shown.prompts, shown)
    entries = completion_entries(run, shown, texts, "advantage", shown.advantages)
    prompts = [run.tokenizer.decode(prompt.ids) for prompt in shown.prompts]
    return [{"prompt": text} | entry for text, entry in zip(prompts, entries, strict=True)]


def completion_entries(
    run: Run, batch: Batch, texts: list[str], name: str, values: np.ndarray
) -> list[dict[str, Any]]:
    """An entry for each prompt of a batch, with its completions. A completion has one of the texts
    and, under this name, one of the values; docs/survival.md has its other fields."""
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
    """The text as a single line, with its control characters as escapes such as \\n."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shorten(text: str) -> str:
    """The text, or its beginning if it is longer than LONGEST_TEXT."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


# ---- What a run has recorded ---------------------------------------------------------------------

WINDOW = 10  # The rules look at so many steps at the start and at the end of a run.
LEVEL, HEALTHY, NONE_YET = "derived.drift_level", "verdict: no sign of trouble", "verdict: none yet"
LOSS, NORM, ENTROPY = "train-other/loss", "train-other/grad_norm", "train-other/entropy"
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


def values_of(records: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """[records] float64: a metric as the rules see it, of all that was sampled; NaN without one."""
    sampled, of_step = column(records, OF_SAMPLED.get(name, name)), column(records, name)
    return np.where(np.isnan(sampled), of_step, sampled)


class History(NamedTuple):
    """What a run has written into its folder, and how the rules see it."""

    settings: dict[str, Any]  # of config.yaml, by their YAML names, with derived.* values
    records: list[dict[str, Any]]  # all of metrics.jsonl
    steps: list[dict[str, Any]]  # those of training steps
    evals: list[dict[str, Any]]  # those of evaluations of EVAL_PROMPTS questions
    state: str  # of the run, see runtime/records.py
    why: str  # it is in this state

    def last(self, name: str) -> np.ndarray:
        """[WINDOW] the values of a metric in the last steps."""
        return values_of(self.steps[-WINDOW:], name)

    def mean(self, name: str) -> float:
        """The mean of a metric over the last steps, without missing values."""
        return mean_of(self.last(name))

    def began(self, name: str) -> float:
        """The mean of a metric over the first steps, without missing values."""
        return mean_of(values_of(self.steps[:WINDOW], name))

    def reward_rose(self) -> float:
        """By how many standard errors the mean reward rose in the run; 99 if it has no noise."""
        n = max(WINDOW, len(self.steps) // 3)  # a slow rise needs long windows
        before, after = values_of(self.steps[:n], TOTAL), values_of(self.steps[-n:], TOTAL)
        rise, spread = mean_of(after) - mean_of(before), np.nanvar(before) + np.nanvar(after)
        return rise / math.sqrt(spread / n) if spread else 99 * float(np.sign(rise))

    def accuracy(self, which: int) -> tuple[float, float]:
        """The accuracy of the first (0) or the newest (-1) evaluation, and its standard error."""
        record = self.evals[which] if self.evals else {}
        return column([record], "eval/accuracy")[0], column([record], "eval/accuracy_se")[0]

    def accuracy_rose(self) -> float:
        """By how many standard errors the accuracy rose from the first to the newest evaluation."""
        (before, error), (after, later_error) = self.accuracy(0), self.accuracy(-1)
        return (after - before) / max(math.hypot(error, later_error), 1e-9)

    def held_out_gap(self) -> float:
        """How far an evaluation during the last steps is below their accuracy; NaN without one."""
        recent = self.evals and self.evals[-1]["step"] >= self.steps[-WINDOW]["step"]
        return self.mean(ACCURACY) - self.accuracy(-1)[0] if recent else math.nan


def read_history(out: Path) -> History:
    """The history of the run in this folder. Raises UserMistake if the folder is not a run's."""
    settings, records = read_settings(out), [*read_lines(out / "metrics.jsonl")]
    steps = [record for record in records if LOSS in record]
    evals = [record for record in records if "eval/accuracy" in record]
    return History(settings, records, steps, evals, *state_of(out))


# ---- The verdict ---------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A sign that a run is sick. docs/survival.md says why the thresholds are what they are."""

    name: str
    after: int  # steps; a shorter run is not asked
    holds: Callable[[History], bool]  # a comparison with NaN, for no value, is False
    says: str


# The first rules are about causes, the later ones about what may follow from them.
RULES = (
    Rule(
        "non_finite_steps",
        1,
        lambda run: not np.isfinite([run.last(LOSS), run.last(NORM)]).all(),
        "An update was not finite and was not applied. Lower LEARNING_RATE or, at the first step, "
        "check the weights of MODEL_PATH; read bad_step_N.npz.",
    ),
    Rule(
        "sampler_drift",
        1,
        lambda run: np.nanmin(run.last(DRIFT)) > run.settings.get(LEVEL, math.inf),
        "The sampler's log-probabilities are not the trainer's: its weights or programs differ.",
    ),
    Rule(
        "all_truncated",
        WINDOW,
        lambda run: run.mean(CUT) >= 0.9,
        "Nearly all completions are cut off before they end. Raise MAX_LENGTH_SAMPLE or, if they "
        "ended at the start of the run, lower LEARNING_RATE.",
    ),
    Rule(
        "entropy_collapsed",
        WINDOW,
        lambda run: run.mean(ENTROPY) < 0.1 * run.began(ENTROPY) and run.mean(ACCURACY) < 0.7,
        "The policy has become almost deterministic before it was right, so it tries nothing new. "
        "Lower LEARNING_RATE, or raise EPS_HIGH, TEMPERATURE, BETA or ENTROPY_COEF.",
    ),
    Rule(
        "no_signal",
        WINDOW,
        lambda run: run.mean(ZERO) >= 0.98,
        "Hardly any advantage differs from 0, so there is nothing to learn from. Questions may be "
        "too hard or too easy, or the reward may be constant.",
    ),
    Rule(
        "reward_hacked",
        WINDOW,
        lambda run: run.reward_rose() > 2 and run.accuracy_rose() < -2,
        "The reward rises and the accuracy falls: the policy gets rewards without right answers. "
        "Read samples.jsonl, and change the reward.",
    ),
    Rule(
        "held_out_below_train",
        WINDOW,
        lambda run: run.held_out_gap() > max(3 * run.accuracy(-1)[1], 0.15),
        "Held-out questions are answered far worse than those of training: the policy has learnt "
        "them by heart. Take more questions or fewer steps.",
    ),
    Rule(
        "no_learning",
        50,
        lambda run: run.reward_rose() <= 2 and not run.accuracy_rose() > 2,
        "Neither the reward nor the accuracy has risen beyond noise: LEARNING_RATE is too low, or "
        "so high that it ruins the policy, or a step has too few completions.",
    ),
)


def rules_that_hold(run: History) -> list[Rule]:
    """The rules that hold; no_learning only if no other does."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # means of no value
        broken = [rule for rule in RULES if len(run.steps) >= rule.after and rule.holds(run)]
    return [rule for rule in broken if rule.name != "no_learning"] or broken


def verdict(run: History) -> list[str]:
    """One to three lines about a run: what is wrong, or what it has reached."""
    if broken := rules_that_hold(run):
        return [f"verdict: {rule.name}: {rule.says}" for rule in broken[:3]]
    if not run.steps:
        return []
    if len(run.steps) < WINDOW:
        return [f"{NONE_YET}: it needs {WINDOW} steps, and the run has {len(run.steps)}"]
    parts = [f"mean reward {run.began(TOTAL):.4f} -> {run.mean(TOTAL):.4f}"]
    if len(run.evals) > 1:
        pairs = [f"{x:.4f} (standard error {e:.4f})" for x, e in map(run.accuracy, (0, -1))]
        parts.insert(0, f"accuracy {' -> '.join(pairs)}")
    return [f"{HEALTHY} in {len(run.steps)} steps: {', '.join(parts)}"]


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


def report(out: Path, run: History) -> str:
    """The HTML about the run in this folder."""
    name = out.resolve().name
    parts = [page.paragraph(f"{name}: {run.state} after {len(run.steps)} steps. {run.why}", "soft")]
    for line in verdict(run):
        parts.append(page.paragraph(line, "" if line.startswith((HEALTHY, NONE_YET)) else "bad"))
    charts = [page.chart(title, metrics, run.records) for title, metrics in CHARTS.items()]
    parts.append(f'<div class="charts">{"".join(charts)}</div>')
    parts += [page.held_out_table(out), page.group_tables(out)]
    defaults = parse_yaml("\n".join(yaml_lines(Config())))
    parts.append(page.settings_table(name, run.settings, defaults))
    return page.document(name, "\n".join(parts))


def write_review(out: Path, run: History) -> dict[str, Any]:
    """Writes summary.json and report.html of a run, and returns the summary. Raises OSError."""
    last, best = {}, {}
    for record in run.records:
        last |= {name: value for name, value in record.items() if value is not None}
    for name in BEST:
        if having := [record for record in run.records if record.get(name) is not None]:
            record = max(having, key=lambda record: record[name])
            best[name] = {"step": record["step"], "value": record[name]}
    summary = {
        "state": run.state,
        "why": run.why,
        "verdict": verdict(run),
        "steps_done": run.steps[-1]["step"] + 1 if run.steps else 0,
        "written": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "last": {name: value for name, value in last.items() if name != "step"},
        "best": best,
        "settings": run.settings,
    }
    replace_file(out / SUMMARY, json.dumps(summary, indent=1, default=str) + "\n")
    replace_file(out / "report.html", report(out, run))
    return summary


class Reviewer:
    """What process 0 tells about its run: summary.json and report.html, notes while it goes on, and
    the verdict. If these files cannot be written, one line says so, and the run goes on."""

    def __init__(self, out: Path, log: RunLog, writes: bool) -> None:
        """writes: whether this is process 0; the others say and write nothing."""
        self._out, self._log, self._writes = out, log, writes
        self._told: set[str] = set()  # the rules, and the error, that have their line
        self._verdict: list[str] = []  # as written last

    def write(self, state: str, why: str = "") -> dict[str, Any]:
        """Writes the review of the run so far; returns the numbers and texts of its summary. While
        the run goes on, a line tells of each rule that holds for the first time."""
        if not self._writes:
            return {}
        try:
            run = read_history(self._out)._replace(state=state, why=why)
            summary = write_review(self._out, run)
        except (OSError, UserMistake) as error:  # somebody may have damaged config.yaml
            reason = error.strerror if isinstance(error, OSError) else error
            self._tell_once("error", f"{self._out}/report.html cannot be written: {reason}")
            return {}
        self._verdict = summary["verdict"]
        note = f"note step={summary['steps_done']}"
        for rule in rules_that_hold(run) if state == RUNNING else ():
            self._tell_once(rule.name, f"{note}: {rule.name}: {rule.says}")
        best = {f"best/{name}": best["value"] for name, best in summary["best"].items()}
        return best | {"state": state, "why": why, "verdict": " ".join(self._verdict)}

    def verdict(self) -> None:
        """Prints the verdict that was written last."""
        for line in self._verdict:
            self._log.line(line)

    def _tell_once(self, name: str, line: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._log.line(line)
