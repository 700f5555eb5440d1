"""What a run did, for people to see: a summary, a verdict and a report; a comparison of two runs.

    python extras/report.py runs/a                       # writes runs/a/report.html
    python extras/report.py runs/a runs/b                # how good and how fast both are
    python extras/report.py runs/a runs/b --out ab.png   # the main curves; it needs matplotlib

A run writes its own report at each evaluation and at its end. This command writes it at any other
time, also for a run that was killed, whose summary.json it brings up to date. The picture shows on
the left the held-out accuracy with its standard error, on the right the mean reward of each step.

A difference of accuracies within two standard errors is noise: on the 1,319 test questions of GSM8K
an accuracy of 0.78 has a standard error of 1.1 points, and the difference of two runs one of 1.6.
"""

import argparse
import fnmatch
import html
import json
import math
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from config import Config
from infra.log import (
    RUNNING,
    SUMMARY,
    RunLog,
    column,
    mean_of,
    read_lines,
    read_settings,
    replace_file,
    state_of,
)
from infra.mistakes import UserMistake, fail
from infra.settings import yaml_lines
from metrics import pairs_of

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
    state: str  # of the run, see infra/log.py
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
    parts = [f"<p>{escaped(told)}</p>"]
    for line in verdict(history):
        style = "" if line.startswith((HEALTHY, NONE_YET)) else ' class="bad"'
        parts.append(f"<p{style}>{escaped(line)}</p>")
    charts = [chart(title, metrics, history.records) for title, metrics in CHARTS.items()]
    parts.append(f'<div class="charts">{"".join(charts)}</div>')
    parts += [held_out_table(out), group_tables(out)]
    defaults = yaml.safe_load("\n".join(yaml_lines(Config())))
    parts.append(settings_table(history.settings, defaults))
    return document(name, "\n".join(parts))


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


# ---- PAGE ----------------------------------------------------------------------------------------


SHOWN_QUESTIONS = 6  # held-out questions with their answers
OUTLIERS = 0.005  # the share of values, at either end, that lie on the edge of a chart
WIDTH, HEIGHT = 360, 170  # of a chart in its own units
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 22  # the margins of the curves
COLOURS = ("#3b82f6", "#d9772b", "#22a05c", "#9a6cf0", "#d0509a", "#7a8794")  # in both modes
STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; font: 15px/1.45 system-ui, sans-serif; }
h1, figcaption { overflow-wrap: anywhere; } p { margin: .3rem 0; } .bad { color: #e5484d; }
.charts { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); }
figure { margin: 0; padding: .5rem; border: 1px solid #8886; }
figcaption, table { font-size: .85rem; }
svg text { fill: currentColor; font: 11px system-ui, sans-serif; } line { stroke: #8886; }
polyline { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linecap: round; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
th, td { border: 1px solid #8886; padding: .25rem .5rem; text-align: left; vertical-align: top; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; } td pre { min-width: 13rem; }
"""


# ---- The page and its tables ---------------------------------------------------------------------


def escaped(text: object) -> str:
    """The text with the characters of HTML replaced, so that it is shown as it is."""
    return html.escape(str(text))


def document(title: str, body: str) -> str:
    """A complete HTML file. title: plain text. body: HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style></head>\n"
        f"<body>\n<h1>{escaped(title)}</h1>\n{body}\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls sideways where it is too wide. head: plain texts, or none.
    rows: HTML."""
    lines = ["".join(f"<th>{escaped(name)}</th>" for name in head)] * bool(head)
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>{body}</table></div>'


def settings_table(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The settings that differ from the defaults, and what follows from all settings."""
    rows = [
        [escaped(key), *(f"<pre>{escaped(x)}</pre>" for x in (defaults.get(key, ""), value))]
        for key, value in settings.items()
        if value != defaults.get(key)
    ]
    return f"<h2>Settings</h2>{table(['setting', 'default', 'of this run'], rows)}"


# ---- Charts --------------------------------------------------------------------------------------


def chart(title: str, patterns: Sequence[str], records: Sequence[dict[str, Any]]) -> str:
    """A figure with a curve and its last value for each metric that has values; "" without any.

    patterns: names of metrics; * in a name stands for any part of it.
    """
    recorded = dict.fromkeys(name for record in records for name in record)
    curves = {}  # {name: its steps and values}
    for name in (name for pattern in patterns for name in fnmatch.filter(recorded, pattern)):
        having = [record for record in records if record.get(name) is not None]
        if having:
            curves[name] = column(having, "step"), column(having, name)
    if not curves:
        return ""
    x_low, x_high = axis_ends([steps for steps, _ in curves.values()])
    y_low, y_high = axis_ends([values for _, values in curves.values()], OUTLIERS)
    parts = axes(x_low, x_high, y_low, y_high)
    captions = [escaped(title)]
    for number, (name, (steps, values)) in enumerate(curves.items()):
        x = LEFT + (steps - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        share = np.clip((values - y_low) / (y_high - y_low), 0, 1)
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        points = [f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True)]
        points.append(points[-1])  # so that a single value is a dot
        colour = f'style="color: {COLOURS[number % len(COLOURS)]}"'
        parts.append(f'<polyline {colour} points="{" ".join(points)}"/>')
        captions.append(f"<span {colour}>{escaped(name)}: {values[-1]:.4g}</span>")
    return (
        f"<figure><figcaption>{'<br>'.join(captions)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg></figure>'
    )


def axes(x_low: float, x_high: float, y_low: float, y_high: float) -> list[str]:
    """Three lines with their values, and the first and the last step."""
    parts = []
    for share in (0, 0.5, 1):
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        label = f"{y_low + share * (y_high - y_low):.3g}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y + 4}" text-anchor="end">{label}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 5}">{x_low:g}</text>')
    end = f'x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end"'
    return [*parts, f"<text {end}>step {x_high:g}</text>"]


def axis_ends(arrays: Sequence[np.ndarray], outliers: float = 0) -> tuple[float, float]:
    """The ends of an axis on which all values lie, but for a share of outliers."""
    low, high = np.quantile(np.concatenate(arrays), [outliers, 1 - outliers], method="nearest")
    around = max(0.5, abs(low) / 2)
    return (low, high) if high > low else (low - around, high + around)


# ---- Completions ---------------------------------------------------------------------------------


def held_out_table(folder: Path) -> str:
    """The same held-out questions, answered at the first, the middle and the last evaluation."""
    found: dict[str, dict[int, dict[str, Any]]] = {}  # {question: {step: entry}}
    for entry in read_lines(folder / "eval.jsonl"):
        question = entry["question"]
        if entry["evaluation"] == "eval" and (question in found or len(found) < SHOWN_QUESTIONS):
            found.setdefault(question, {})[entry["step"]] = entry
    if not found:
        return ""
    shown, rows = three_of({step for entries in found.values() for step in entries}), []
    for entries in found.values():
        first = next(iter(entries.values()))
        asked = f"<pre>{escaped(first['question'])}</pre><p>answer: {escaped(first['answer'])}</p>"
        cells = {step: completion_cell(x["completions"][0]) for step, x in entries.items()}
        rows.append([asked, *(cells.get(step, "-") for step in shown)])
    heads = ["question", *(f"step {step}" for step in shown)]
    return f"<h2>Held-out questions</h2>{table(heads, rows)}"


def group_tables(folder: Path) -> str:
    """A group of completions from the start, the middle and the end of training."""
    groups: dict[int, dict[str, Any]] = {}  # {step: its first entry}
    for entry in read_lines(folder / "samples.jsonl"):
        groups.setdefault(entry["step"], entry)
    parts = []
    for step in three_of(groups):
        entry = groups[step]
        cells = [completion_cell(completion) for completion in entry["completions"]]
        half = (len(cells) + 1) // 2
        parts.append(f"<h2>A group of step {step}</h2><pre>{escaped(entry['question'])}</pre>")
        parts.append(table([], [cells[:half], cells[half:]]))
    return "".join(parts)


def three_of(steps: Collection[int]) -> list[int]:
    """The first, the middle and the last of the steps, each once."""
    steps = sorted(steps)
    return sorted({steps[i] for i in (0, len(steps) // 2, -1)}) if steps else []


def completion_cell(completion: dict[str, Any]) -> str:
    """The HTML of a completion, with what is known of it."""
    told = ", ".join(f"{name} {value}" for name, value in pairs_of(completion))
    return f"<pre>{escaped(completion['text'])}</pre><p>{escaped(told)}</p>"


# ---- COMMAND -------------------------------------------------------------------------------------


COMPARED = (  # the rows of the comparison, each with the last value of a run
    "eval_full/accuracy",
    "eval/accuracy",
    "eval/reward/func/reward_correct/mean",
    "eval/reward/total/mean",
    "time/train/step_avg_last10_s",
    "time/eval_full/step_s",
)


def write_report(folder: Path, history: History) -> None:
    """Writes the report of a run. Raises OSError."""
    if history.state == RUNNING:  # the run writes its summary
        replace_file(folder / "report.html", report(folder, history))
    else:
        write_review(folder, history)
    print(folder / "report.html")


# ---- Two runs ------------------------------------------------------------------------------------


def print_comparison(names: list[str], runs: list[History]) -> None:
    """Prints a table of both runs, and the settings that differ."""
    rows = [["", *names, "second - first"], ["---"] * 4]
    rows.append(["state", *(f"{run.state} {run.why}".strip() for run in runs), ""])
    rows.append(["steps", *(str(len(run.steps)) for run in runs), ""])
    rows += [row_of(metric, names, runs) for metric in COMPARED]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in rows))
    a, b = (run.settings for run in runs)
    different = [key for key in a | b if a.get(key) != b.get(key) and not key.startswith("run.")]
    told = ", ".join(f"{key} {a.get(key)} and {b.get(key)}" for key in different)
    print(f"the settings differ in: {told or 'nothing'}")


def row_of(metric: str, names: list[str], runs: list[History]) -> list[str]:
    """The cells of a metric: both values, and their difference with what it means."""
    (a, a_error), (b, b_error) = (last_value(run, metric) for run in runs)
    error = math.hypot(a_error, b_error)
    if math.isnan(b - a):
        change = "-"
    elif metric.startswith("time/"):
        change = f"{b / a:.2f} times"
    else:
        change = number(b - a, error)
        if not math.isnan(error):
            better = f"{names[1] if b > a else names[0]} is better"
            change += f": {'noise' if abs(b - a) <= 2 * error else better}"
    return [metric, number(a, a_error), number(b, b_error), change]


def last_value(run: History, name: str) -> tuple[float, float]:
    """The last value of a metric and its standard error; NaN where there is none."""
    having = [record for record in run.records if record.get(name) is not None][-1:] or [{}]
    return column(having, name)[0], column(having, f"{name}_se")[0]


def number(value: float, error: float) -> str:
    """A value for the table, with its standard error if it has one; - without a value."""
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


# ---- Several runs --------------------------------------------------------------------------------


def draw_picture(names: list[str], runs: list[History], file: Path) -> None:
    """Writes the picture. Raises UserMistake without matplotlib or for another kind of file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserMistake("a picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, run in zip(names, runs, strict=True):
        values = [column(run.evals, x) for x in ("step", "eval/accuracy", "eval/accuracy_se")]
        left.errorbar(*values, marker=".", capsize=2, label=Path(name).name)
        right.plot(column(run.steps, "step"), column(run.steps, TOTAL), linewidth=0.8)
    left.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    left.legend()
    right.set(xlabel="step", ylabel="mean reward of the step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(file, dpi=120)
    except ValueError as error:  # matplotlib does not know the ending
        raise UserMistake(f"--out {file} cannot be written: {error}") from None
    print(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="OUTPUT_DIR of a run")
    parser.add_argument("--out", type=Path, metavar="PICTURE", help="such as ab.png or ab.svg")
    args = parser.parse_args()
    names, file = args.runs, args.out
    if len(names) > 2 and not file:
        parser.error("more than two runs need --out PICTURE")
    try:
        runs = [read_history(Path(name)) for name in names]
        if file:
            draw_picture(names, runs, file)
        elif len(runs) == 1:
            write_report(Path(names[0]), runs[0])
        else:
            print_comparison(names, runs)
    except UserMistake as error:
        fail(error)
    except OSError as error:
        fail(UserMistake(f"{error.filename} cannot be written: {error.strerror}"))


if __name__ == "__main__":
    main()
