"""The review of a run: a summary, a verdict and a report; and a comparison of several runs.

    python extras/report.py runs/a                       # writes runs/a/report.html
    python extras/report.py runs/a runs/b                # how good and how fast both are
    python extras/report.py runs/a runs/b --out ab.png   # the main curves; it needs matplotlib

A run writes its own review at its end and at evaluations, if it is long not at each. This command
writes the review at any other time, also for a run that was killed. The picture shows the held-out
accuracy with its standard error on the left, and the mean reward of each step on the right.

A difference of accuracies within two standard errors is noise: on the 1,319 test questions of GSM8K
an accuracy of 0.78 has a standard error of 1.1 points, and the difference of two runs one of 1.6.
"""

import argparse
import fnmatch
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jinja2
import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from config import Config, yaml_lines
from infra.log import (
    RUNNING,
    SUMMARY,
    RunLog,
    mean_without_nan,
    metric_values,
    read_lines,
    read_settings,
    replace_file,
    run_state,
)
from infra.mistakes import UserMistake, exit_with_mistakes, in_one_line, reading, writing
from infra.resume import RUN
from metrics import completion_facts

# ---- The records of a run ------------------------------------------------------------------------

LOSS, GRAD_NORM = "train-other/loss", "train-other/grad_norm"
REWARD, ACCURACY = "train-reward/total/mean", "train-reward/accuracy"
ENTROPY, TRUNCATED = "train-other/entropy", "train-seq_len/completion/hit_max_frac"
ZERO_ADVANTAGES = "train-reward/advantage/zero_frac"
DRIFT = "train-other/sampling_logp_difference/mean"
EVAL_ACCURACY, EVAL_LOSS = "eval/accuracy", "eval/loss"
TOO_LONG, OF_SCORER = "train-reward/model/too_long_frac", "train-reward/func/reward_model/mean"
SCORED = "reward/scored_frac"  # of eval/ and eval_full/, if completions are not scored

Record = dict[str, Any]  # a line of a .jsonl file, or all settings: any value of JSON or YAML


class History(NamedTuple):
    """Everything that a run has written into its folder so far."""

    settings: Record  # of config.yaml, by their YAML names, with derived.* values
    records: list[Record]  # all lines of metrics.jsonl
    steps: list[Record]  # the records of training steps
    evals: list[Record]  # the records of evaluations of EVAL_PROMPTS questions
    state: str  # of the run, see infra/log.py
    why: str  # the reason for this state
    run_json: Record  # the values of this file, see infra/resume.py


def read_history(out: Path) -> History:
    """The history of the run in this folder. Raises UserMistake if the folder is not a run's."""
    settings, records = read_settings(out), [*read_lines(out / "metrics.jsonl")]
    steps = [record for record in records if LOSS in record]
    evals = [record for record in records if EVAL_ACCURACY in record]
    file = out / RUN
    with reading(f"{file} is damaged"):
        run_json = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return History(settings, records, steps, evals, *run_state(out), run_json)


def records_with(records: Sequence[Record], name: str) -> list[Record]:
    return [record for record in records if record.get(name) is not None]


# ---- The verdict ---------------------------------------------------------------------------------

WINDOW = 10  # steps at the start and at the end of a run that the rules compare
# Metrics that are null in the record of an update that is not finite.
UPDATE_METRICS = (LOSS, GRAD_NORM, "train-other/param_norm")
# With DYNAMIC_SAMPLING the rules take the metric on the right, which counts all groups that were
# sampled. The groups that a step keeps are neither too hard nor too easy, so their mean reward
# hardly moves.
SAMPLED_METRICS = {
    REWARD: "train-other/dynamic_sampling/reward_mean",
    ACCURACY: "train-other/dynamic_sampling/accuracy",
    TRUNCATED: "train-other/dynamic_sampling/hit_max_frac",
}
# Each rule is a symptom of a sick run, with the text of its line. Causes stand before what may
# follow from them.
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
    "few_scored": (
        "So few held-out completions have a score of the first reward function that the accuracy "
        "cannot be judged. Check this function, or raise EVAL_PROMPTS."
    ),
    "all_truncated": (
        "Nearly all completions are cut off before they end. Raise MAX_LENGTH_SAMPLE or, if they "
        "ended at the start of the run, lower LEARNING_RATE."
    ),
    "too_long_for_scorer": (
        "A growing share of the completions is too long for REWARD_MODEL_PATH and has no score, so "
        "that the policy may escape its scores by length. Lower MAX_LENGTH_SAMPLE."
    ),
    "entropy_collapsed": (
        "The policy has become almost deterministic before it was right, so it tries nothing new. "
        "Lower LEARNING_RATE, or raise EPS_HIGH, TEMPERATURE, BETA or ENTROPY_COEF."
    ),
    "all_wrong": (
        "Nearly all completions are wrong, so hardly any of them shows the policy what is right. "
        "Check the reward on samples.jsonl; if it is right, take easier questions or a better "
        "model, such as one of train_sft.py, or lower LEARNING_RATE if the accuracy has fallen."
    ),
    "no_signal": (
        "Hardly any advantage differs from 0, so there is nothing to learn from. Questions may be "
        "too hard or too easy, or the reward may be constant."
    ),
    "reward_hacked": (
        "Reward hacking: the reward rises while the accuracy falls. "
        "Read samples.jsonl, and change the reward."
    ),
    "held_out_below_train": (
        "Overfitting: the accuracy on held-out questions is far below that on training questions. "
        "Take more questions or fewer steps."
    ),
    "no_learning": (
        "Neither the reward nor the accuracy has risen beyond noise: LEARNING_RATE is too low, or "
        "so high that it ruins the policy, or a step has too few completions."
    ),
    "loss_rose": "The loss of training has risen: LEARNING_RATE is too high.",
    "held_out_loss_rose": (
        "The loss of held-out demonstrations has risen again: the model memorizes those of "
        "training. Take fewer steps or more demonstrations."
    ),
}


def verdict(history: History) -> list[str]:
    """One to three lines about a run: its symptoms, or what it has reached."""
    steps, evals = history.steps, history.evals
    if rules := triggered_rules(history):
        return [f"verdict: {name}: {RULES[name]}" for name in rules[:3]]
    if not steps:
        return []
    forked_from = history.run_json.get("forked_from")  # its records begin with the fork
    since = f" since the fork of {forked_from}" if forked_from else ""
    if len(steps) < WINDOW:
        return [f"verdict: none yet: it needs {WINDOW} steps, and the run has {len(steps)}{since}"]
    is_sft = history.settings.get("loss.loss_type") == "sft"
    name, title = (LOSS, "loss") if is_sft else (REWARD, "mean reward")
    before, after = mean_over(steps[:WINDOW], name), mean_over(steps[-WINDOW:], name)
    parts = [f"{title} {before:.4f} -> {after:.4f}"]
    if len(steps) == WINDOW:  # both windows are the same steps
        parts = [f"{title} {after:.4f}"]
    if (losses := held_out_losses(history)).size > 1:
        parts.append(f"held-out loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    if len(evals) > 1:
        texts = []
        for record in (evals[0], evals[-1]):
            accuracy, error = value_and_error([record], EVAL_ACCURACY)
            questions, share = record["eval/questions_global"], record.get(f"eval/{SCORED}", 1)
            scored = "" if share == 1 else f"{share:.4f} of the completions scored, "
            text = f"{accuracy:.4f} ({questions} questions, {scored}standard error {error:.4f})"
            texts.append(text)
        parts.insert(0, f"accuracy {' -> '.join(texts)}")
        if reward_rise(steps) > 2 and accuracy_rise(evals) <= 2:
            parts.append("the reward has risen beyond noise, but the accuracy has not")
    return [f"verdict: no sign of trouble in {len(steps)} steps{since}: {', '.join(parts)}"]


def triggered_rules(history: History) -> list[str]:
    """The names of the rules that hold; no_learning is among them only if no other rule holds.
    docs/verdict.md explains the thresholds. A comparison with NaN, a missing value, is False."""
    steps, evals = history.steps, history.evals
    first, last = steps[:WINDOW], steps[-WINDOW:]
    drift, level = values_of(last, DRIFT), history.settings.get("derived.drift_level", math.inf)
    updates = [values_of(last, name) for name in UPDATE_METRICS]
    holds = {
        "non_finite_steps": not all(np.isfinite(values).all() for values in updates),
        "sampler_drift": min(drift[~np.isnan(drift)], default=0) > level,
        "few_scored": any(
            has_few_scores(history.records, prefix) for prefix in ("eval", "eval_full")
        ),
    }
    if history.settings.get("loss.loss_type") == "sft" and len(steps) >= WINDOW:
        losses = held_out_losses(history)
        holds |= {
            "loss_rose": mean_over(last, LOSS) > 1.05 * mean_over(first, LOSS),
            # 5 % of the first loss, because the lowest one may be as small as its noise.
            "held_out_loss_rose": losses.size > 1 and losses[-1] > losses.min() + 0.05 * losses[0],
        }
    elif len(steps) >= WINDOW:
        train_accuracy, reward_rose = mean_over(last, ACCURACY), reward_rise(steps)
        accuracy_rose = accuracy_rise(evals)
        after, after_error = value_and_error(evals[-1:], EVAL_ACCURACY)
        # Completions count as right from a reward of 1 on, which a graded reward may never give.
        functions = [name for name in last[0] if name.startswith("train-reward/func/")]
        reward_of_first = mean_over(last, functions[0]) if functions else math.nan
        # Of a teacher every token is a signal, whatever the rewards are.
        has_teacher = "train-other/reverse_kl" in last[0]
        is_recent = evals and evals[-1]["step"] >= last[0]["step"]
        gap = train_accuracy - after
        holds |= {
            "no_accuracy": np.isnan(train_accuracy) or (evals and np.isnan(after)),
            "all_truncated": mean_over(last, TRUNCATED) >= 0.9,
            "too_long_for_scorer": mean_over(last, TOO_LONG) > mean_over(first, TOO_LONG) + 0.01,
            "entropy_collapsed": (
                mean_over(last, ENTROPY) < 0.1 * mean_over(first, ENTROPY) and train_accuracy < 0.7
            ),
            "all_wrong": (
                train_accuracy <= 0.02
                and not (after > 0.02 or reward_of_first > 0.02 or has_teacher)
                and functions[:1] != [OF_SCORER]  # its scores may all be below 0
            ),
            # Many groups of a policy that is mostly right have equal rewards.
            "no_signal": (
                mean_over(last, ZERO_ADVANTAGES) >= (0.9 if train_accuracy < 0.7 else 0.98)
                and not has_teacher
            ),
            "reward_hacked": reward_rose > 2 and accuracy_rose < -2,
            "held_out_below_train": is_recent and gap > max(3 * after_error, 0.15),
            "no_learning": len(steps) >= 50 and reward_rose <= 2 and not accuracy_rose > 2,
        }
    names = [name for name in RULES if holds.get(name)]
    return [name for name in names if name != "no_learning"] or names


def has_few_scores(records: Sequence[Record], prefix: str) -> bool:
    """Whether in the newest evaluation a single question has a score, or at most half of the
    completions, those of less than WINDOW questions. prefix: eval, or eval_full."""
    last = (records_with(records, f"{prefix}/accuracy")[-1:] or [{}])[0]
    share = last.get(f"{prefix}/{SCORED}", 1)
    accuracy, error = value_and_error([last], f"{prefix}/accuracy")
    if f"{prefix}/accuracy_se" in last and math.isnan(error) and not math.isnan(accuracy):
        return True
    return share <= 0.5 and share * last[f"{prefix}/questions_global"] < WINDOW


def held_out_losses(history: History) -> np.ndarray:
    """[evaluations] float64: the losses of train_sft.py on held-out demonstrations."""
    return metric_values(records_with(history.records, EVAL_LOSS), EVAL_LOSS)


def values_of(records: Sequence[Record], name: str) -> np.ndarray:
    """[records] float64: a metric as the rules see it, see SAMPLED_METRICS; NaN where it is
    missing."""
    sampled = metric_values(records, SAMPLED_METRICS.get(name, name))
    return np.where(np.isnan(sampled), metric_values(records, name), sampled)


def mean_over(records: Sequence[Record], name: str) -> float:
    return mean_without_nan(values_of(records, name))


def reward_rise(steps: Sequence[Record]) -> float:
    """The rise of the mean reward in these steps, in standard errors; 99 if it has no noise."""
    window = max(WINDOW, len(steps) // 3)  # a slow rise needs long windows
    rise = mean_over(steps[-window:], REWARD) - mean_over(steps[:window], REWARD)
    variance = sum(np.var(values_of(part, REWARD)) for part in (steps[:window], steps[-window:]))
    return rise / math.sqrt(variance / window) if variance else 99 * float(np.sign(rise))


def accuracy_rise(evals: Sequence[Record]) -> float:
    """The rise of the accuracy from the first to the newest evaluation, in standard errors; NaN
    without evaluations."""
    before, before_error = value_and_error(evals[:1], EVAL_ACCURACY)
    after, after_error = value_and_error(evals[-1:], EVAL_ACCURACY)
    return (after - before) / max(math.hypot(before_error, after_error), 1e-9)


def value_and_error(records: Sequence[Record], name: str) -> tuple[float, float]:
    """The last value of a metric in these records, and its standard error; NaN where there is
    none."""
    last = records_with(records, name)[-1:] or [{}]
    return metric_values(last, name)[0], metric_values(last, f"{name}_se")[0]


# ---- summary.json and report.html ----------------------------------------------------------------

TEMPLATE = "report.html.jinja"  # beside this file


class Reviewer:
    """Keeps summary.json and report.html of a run up to date, and prints a note for each symptom.

    Only process 0 writes and prints. If the files cannot be written, one line says so, and the run
    continues.
    """

    def __init__(self, out: Path, log: RunLog) -> None:
        self._out, self._log = out, log
        self._printed: set[str] = set()  # the names of the lines that were printed
        self._next = 0.0  # by time.monotonic(); until then none is written during the run

    def write(self, state: str, reason: str = "") -> Record:
        """Writes the review of the run so far, and returns its state, why and verdict, or nothing
        if there is no review. During the run each rule that holds gets a line once, and reviews,
        which read all records, take a twentieth of the time once one of them takes 5 seconds."""
        began = time.monotonic()
        if jax.process_index() != 0 or (state == RUNNING and began < self._next):
            return {}
        try:
            with writing(self._out / "report.html", UserMistake):
                history = read_history(self._out)._replace(state=state, why=reason)
                summary = write_review(self._out, history)
        except UserMistake as error:
            self._print_once("error", str(error))
            return {}
        note = f"note step={summary['steps_done']}"
        for name in triggered_rules(history) if state == RUNNING else ():
            self._print_once(name, f"{note}: {name}: {RULES[name]}")
        seconds = time.monotonic() - began
        self._next = began + 20 * seconds if seconds > 5 else 0.0
        return {name: summary[name] for name in ("state", "why", "verdict")}

    def _print_once(self, name: str, line: str) -> None:
        if name not in self._printed:
            self._printed.add(name)
            self._log.print_line(line)


def write_review(out: Path, history: History) -> Record:
    """Writes summary.json and report.html of a run, and returns the summary. Raises OSError, and
    UserMistake for the template."""
    last: Record = {}
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
    replace_file(out / "report.html", render_report(out, history))
    return summary


def render_report(out: Path, history: History) -> str:
    """The complete page about the run in this folder. Raises UserMistake if the template is missing
    or has a mistake."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    answers = read_answers(out)
    try:
        return environment.get_template(TEMPLATE).render(
            name=out.resolve().name,
            history=history,
            verdict=verdict(history),
            is_sick=bool(triggered_rules(history)),
            make_chart=functools.partial(make_chart, history.records),
            width=WIDTH,
            height=HEIGHT,
            answers=answers,
            eval_steps=first_middle_last({step for steps in answers.values() for step in steps}),
            groups=read_groups(out),
            defaults=yaml.safe_load("\n".join(yaml_lines(Config()))),
            completion_facts=completion_facts,
        )
    except jinja2.TemplateError as error:
        raise UserMistake(f"the template of the report: {in_one_line(error)}") from None


# ---- Charts --------------------------------------------------------------------------------------

WIDTH, HEIGHT = 300, 140  # of the area of the curves, in units of the SVG
OUTLIERS = 0.005  # the fraction of values, at either end, that lie on the edge of a chart


class Chart(NamedTuple):
    """The numbers of a chart. A curve is the name of its metric, the corners "x,y x,y ..." of an
    SVG polyline with y from the top, and the last value."""

    first_step: float
    last_step: float
    ticks: list[float]  # the values at the top, in the middle and at the bottom
    curves: list[tuple[str, str, float]]


def make_chart(records: Sequence[Record], patterns: Sequence[str]) -> Chart | None:
    """The chart of the metrics that have values, or None if none has.

    patterns: names of metrics; * in a name stands for any part of it.
    """
    recorded = dict.fromkeys(itertools.chain.from_iterable(records))
    values = {}  # {name: its steps and its values}
    for name in (name for pattern in patterns for name in fnmatch.filter(recorded, pattern)):
        if points := records_with(records, name):
            values[name] = metric_values(points, "step"), metric_values(points, name)
    if not values:
        return None
    left, right = axis_ends([x for x, _ in values.values()])
    bottom, top = axis_ends([y for _, y in values.values()], OUTLIERS)
    curves = []
    for name, (x, y) in values.items():
        shown = shown_points(y)
        across = WIDTH * (x[shown] - left) / (right - left)
        down = HEIGHT * (1 - np.clip((y[shown] - bottom) / (top - bottom), 0, 1))
        corners = [f"{a:.1f},{b:.1f}" for a, b in zip(across, down, strict=True)]
        corners.append(corners[-1])  # so that a single value is a dot
        curves.append((name, " ".join(corners), y[-1]))
    return Chart(left, right, [top, (bottom + top) / 2, bottom], curves)


def shown_points(y: np.ndarray) -> np.ndarray:
    """The indices of the points that a chart shows of a curve: all, or of a long curve the lowest
    and the highest in each of WIDTH parts."""
    if len(y) <= 2 * WIDTH:
        return np.arange(len(y))
    parts = np.array_split(np.arange(len(y)), WIDTH)
    extremes = [part[find(y[part])] for part in parts for find in (np.argmin, np.argmax)]
    return np.unique(extremes)


def axis_ends(arrays: Sequence[np.ndarray], outliers: float = 0) -> tuple[float, float]:
    """The ends of an axis on which all values lie, but for a fraction of outliers."""
    low, high = np.quantile(np.concatenate(arrays), [outliers, 1 - outliers], method="nearest")
    margin = max(0.5, abs(low) / 2)
    return (low, high) if high > low else (low - margin, high + margin)


# ---- Completions ---------------------------------------------------------------------------------

SHOWN_QUESTIONS = 6  # held-out questions with their answers


def read_answers(folder: Path) -> dict[str, dict[int, Record]]:
    """{question: {step: its entry}} of the same held-out questions at each evaluation."""
    answers: dict[str, dict[int, Record]] = {}
    for entry in read_lines(folder / "eval.jsonl"):
        question = entry["question"]
        is_shown = question in answers or len(answers) < SHOWN_QUESTIONS
        if entry["evaluation"] == "eval" and is_shown:
            answers.setdefault(question, {})[entry["step"]] = entry
    return answers


def read_groups(folder: Path) -> dict[int, Record]:
    groups: dict[int, Record] = {}
    for entry in read_lines(folder / "samples.jsonl"):
        groups.setdefault(entry["step"], entry)
    return {step: groups[step] for step in first_middle_last(groups)}


def first_middle_last(steps: Collection[int]) -> list[int]:
    steps = sorted(steps)
    return sorted({steps[i] for i in (0, len(steps) // 2, -1)}) if steps else []


# ---- A comparison of two runs --------------------------------------------------------------------

COMPARED = (  # patterns; the last value of each such metric of either run is compared
    "eval_full/accuracy",
    "eval/accuracy",
    f"eval*/{SCORED}",
    "eval/loss",
    "eval/reward/func/*/mean",
    "eval/reward/total/mean",
    "time/train/step_avg_last10_s",
    "time/eval_full/step_s",
)
# Settings that say on which questions and by which rewards a run is measured.
MEASURES = ["data.dataset", "data.dataset_config", "data.eval_split", "reward.reward_fn"]
MEASURES += ["reward.reward_weights"]


def print_comparison(names: list[str], histories: list[History]) -> None:
    """Prints a table of both runs, and the settings that differ. A line above the table names what
    differs in the questions, the reward functions and their files."""
    a, b = (run.settings for run in histories)
    keys = [key for key in a | b if a.get(key) != b.get(key) and not key.startswith("run.")]
    differences = {key: f"{key} {a.get(key)} and {b.get(key)}" for key in keys}
    measures = [text for key, text in differences.items() if key in MEASURES]
    first, second = (run.run_json.get("made_with", {}) for run in histories)  # the fingerprints
    for key in first | second:
        is_measure = key.startswith(("the file of REWARD_FN", "the scorer's", "the text of JUDGE"))
        if is_measure and first.get(key) != second.get(key):
            measures.append(key)
    if measures:
        print(f"note: the metrics of both runs are not comparable: {', '.join(measures)}")
    lines = [["", *names, "second - first"], ["---"] * 4]
    lines.append(["state", *(f"{run.state} {run.why}".strip() for run in histories), ""])
    lines.append(["steps", *(str(len(run.steps)) for run in histories), ""])
    metrics = dict.fromkeys(name for run in histories for record in run.records for name in record)
    lines += [
        compared_cells(metric, names, histories)
        for pattern in COMPARED
        for metric in fnmatch.filter(metrics, pattern)
    ]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    print(f"the settings differ in: {', '.join(differences.values()) or 'nothing'}")


def compared_cells(metric: str, names: list[str], histories: list[History]) -> list[str]:
    """The cells of a metric: both values, and their difference with its meaning."""
    (a, a_error), (b, b_error) = (value_and_error(run.records, metric) for run in histories)
    error = math.hypot(a_error, b_error)
    if math.isnan(b - a):
        change = "-"
    elif metric.startswith("time/"):
        change = f"{b / a:.2f} times"
    else:
        change = value_text(b - a, error)
        if not math.isnan(error):
            better = f"{names[1] if b > a else names[0]} is better"
            change += f": {'noise' if abs(b - a) <= 2 * error else better}"
    return [metric, value_text(a, a_error), value_text(b, b_error), change]


def value_text(value: float, error: float) -> str:
    """A value with its standard error if it has one; - for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


# ---- The picture and the command -----------------------------------------------------------------


def draw_picture(names: list[str], histories: list[History], file: Path) -> None:
    """Writes the picture. Raises UserMistake without matplotlib or for another kind of file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserMistake("a picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    begins = first_steps(names, histories)
    for name, run, begin in zip(names, histories, begins, strict=True):
        steps = begin + metric_values(run.evals, "step")
        accuracies = metric_values(run.evals, EVAL_ACCURACY)
        errors = metric_values(run.evals, f"{EVAL_ACCURACY}_se")
        left.errorbar(steps, accuracies, errors, marker=".", capsize=2, label=Path(name).name)
        steps = begin + metric_values(run.steps, "step")
        right.plot(steps, metric_values(run.steps, REWARD), linewidth=0.8)
    left.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    left.legend()
    right.set(xlabel="step", ylabel="mean reward of the step")
    for plot in (left, right):
        plot.grid(alpha=0.3)
    try:
        with writing(f"--out {file}", UserMistake):
            figure.savefig(file, dpi=120)
    except ValueError as error:  # matplotlib does not know the ending
        raise UserMistake(f"--out {file} cannot be written: {error}") from None
    print(file)


def first_steps(names: list[str], histories: list[History]) -> list[int]:
    """The step of the picture at which each run begins: where an earlier one ended, such as a cold
    start, if MODEL_PATH lies in the folder of this one; else 0."""
    begins: list[int] = []
    ends: dict[Path, int] = {}  # by the folders of the runs
    for name, run in zip(names, histories, strict=True):
        model = Path(run.settings["model.path"]).resolve()
        begins.append(next((end for out, end in ends.items() if model.is_relative_to(out)), 0))
        ends[Path(name).resolve()] = begins[-1] + len(run.steps)
    return begins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", metavar="RUN", help="OUTPUT_DIR of a run")
    parser.add_argument("--out", type=Path, metavar="PICTURE", help="such as ab.png or ab.svg")
    args = parser.parse_args()
    names, picture = args.folders, args.out
    if len(names) > 2 and not picture:
        parser.error("more than two runs need --out PICTURE")
    try:
        histories = [read_history(Path(name)) for name in names]
        if picture:
            draw_picture(names, histories, picture)
        elif len(histories) == 1:
            [history], out = histories, Path(names[0])
            with writing(out / "report.html", UserMistake):
                if history.state == RUNNING:  # it may end just now, and its summary is its own
                    replace_file(out / "report.html", render_report(out, history))
                else:
                    write_review(out, history)
            print(out / "report.html")
        else:
            print_comparison(names, histories)
    except UserMistake as error:
        exit_with_mistakes(error)


if __name__ == "__main__":
    main()
