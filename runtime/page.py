"""A page of curves, completions and tables in one HTML file: it needs no network and no other file,
and follows the dark or the light mode of the reader's system."""

import contextlib
import fnmatch
import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from runtime.records import column, read_lines
from runtime.tables import pairs_of

SHOWN_QUESTIONS = 6  # held-out questions with their answers
MOST_POINTS = 300  # of a curve; more points are replaced by means of neighbours
OUTLIERS = 0.005  # the share of values, at either end, that lie on the edge of a chart
WIDTH, HEIGHT = 360, 170  # of a chart in its own units
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 22  # the margins of the curves
STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --soft: #667; --line: #d5d8de; --back: #fff;
  --card: #f6f7f9; --bad: #b3261e; --c0: #1f6feb; --c1: #c2571a; --c2: #1a7f4b; --c3: #8250df;
  --c4: #b0338a; --c5: #60707f; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --soft: #9aa3ad; --line: #3a4049;
  --back: #14171b; --card: #1d2127; --bad: #ff8a80; --c0: #6cb0ff; --c1: #ffa657; --c2: #5dd39e;
  --c3: #c297ff; --c4: #f28ecb; --c5: #aab6c2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--text);
  background: var(--back); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
p { margin: .3rem 0; } .bad { color: var(--bad); } .soft, figcaption span { color: var(--soft); }
.charts { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); }
figure { margin: 0; padding: .5rem; background: var(--card); border-radius: .4rem;
  display: flex; flex-direction: column; justify-content: space-between; }
figcaption { font-size: .85rem; overflow-wrap: anywhere; } svg { width: 100%; display: block; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
.grid { stroke: var(--line); } .curve { fill: none; stroke-width: 1.6; stroke: var(--c); }
.band { fill: var(--c); opacity: .18; } .dot { fill: var(--c); } .name { color: var(--c); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { border: 1px solid var(--line); padding: .25rem .5rem; text-align: left;
  vertical-align: top; }
th { background: var(--card); } td { min-width: 4rem; } pre { margin: 0; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.4 ui-monospace, monospace; }
td pre { min-width: 13rem; } .numbers { color: var(--soft); font-size: .8rem; }
"""


class Curve(NamedTuple):
    """A line of a chart. A value that is not finite leaves a gap."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    errors: Sequence[float] | None = None  # standard errors, drawn as a band


def escaped(text: object) -> str:
    """The text with the characters of HTML replaced, so that it is shown as it is."""
    return html.escape(str(text))


def page(title: str, body: str) -> str:
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


def figure_text(value: float) -> str:
    """A number for people to read, with four digits that count."""
    return f"{value:.4g}" if math.isfinite(value) else "-"


def tick_text(value: float) -> str:
    """A number beside an axis, short enough for the margin."""
    return f"{value / 1000:.3g}k" if abs(value) >= 1000 else f"{value:.3g}"


def chart(title: str, curves: Sequence[Curve]) -> str:
    """A figure with a line for each curve and its last value; "" if no curve has a value."""
    curves = [thinned(curve) for curve in curves]
    shown = [curve for curve in curves if np.isfinite(curve.values).any()]
    if not shown:
        return ""
    x_low, x_high = axis_ends([curve.steps for curve in shown])
    reach = [np.add(c.values, sign * errors_of(c)) for c in shown for sign in (-1, 1)]
    y_low, y_high = axis_ends(reach, OUTLIERS)

    def place(steps: np.ndarray, values: np.ndarray) -> list[str]:
        x = LEFT + (steps - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        share = np.clip((values - y_low) / (y_high - y_low), 0, 1)
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        return [f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True)]

    parts = []
    for share in (0, 0.5, 1):
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        label = tick_text(y_low + share * (y_high - y_low))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y + 4}" text-anchor="end">{label}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 5}">{x_low:g}</text>')
    last = f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end">step {x_high:g}</text>'
    parts += [last, *(drawn(curve, number, place) for number, curve in enumerate(curves))]
    names = ", ".join(legend(curve, number, len(curves) > 1) for number, curve in enumerate(curves))
    return (
        f"<figure><figcaption>{escaped(title)}<br>{names}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg></figure>'
    )


def thinned(curve: Curve) -> Curve:
    """The curve in float64 with at most MOST_POINTS points: means of neighbours, and the last."""
    steps, values, errors = (
        np.asarray(x, np.float64) for x in (curve.steps, curve.values, errors_of(curve))
    )
    if len(steps) > MOST_POINTS:
        last = len(steps) - 1
        parts = [*np.array_split(np.arange(last), MOST_POINTS - 1), np.array([last])]
        steps, values, errors = (
            np.array([mean_of_finite(x[part]) for part in parts]) for x in (steps, values, errors)
        )
    return Curve(curve.name, steps, values, errors if curve.errors is not None else None)


def mean_of_finite(values: np.ndarray) -> float:
    """The mean of the finite values; NaN without any."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def errors_of(curve: Curve) -> np.ndarray:
    """The standard errors of the curve's values; 0 where there are none."""
    errors = np.zeros(len(curve.values)) if curve.errors is None else np.asarray(curve.errors)
    return np.nan_to_num(errors)


def axis_ends(arrays: Sequence[np.ndarray], outliers: float = 0) -> tuple[float, float]:
    """The ends of an axis on which all finite values lie, but for a share of outliers."""
    values = np.concatenate(arrays)
    low, high = np.quantile(values[np.isfinite(values)], [outliers, 1 - outliers], method="nearest")
    low, high = float(low), float(high)
    around = max(0.5, abs(low) / 2)
    return (low, high) if high > low else (low - around, high + around)


def drawn(curve: Curve, number: int, place: Callable[..., list[str]]) -> str:
    """The SVG of one curve: its band of standard errors, its line, and dots if it is short."""
    finite = np.isfinite(curve.values)
    parts = []
    if curve.errors is not None and finite.any():
        x, y, e = curve.steps[finite], curve.values[finite], errors_of(curve)[finite]
        around = [*place(x, y + e), *reversed(place(x, y - e))]
        parts.append(f'<polygon class="band" points="{" ".join(around)}"/>')
    points = place(curve.steps, np.where(finite, curve.values, 0))
    for piece in pieces(finite):
        parts.append(f'<polyline class="curve" points="{" ".join(points[piece])}"/>')
    if finite.sum() <= 40:
        for point, there in zip(points, finite, strict=True):
            x, y = point.split(",")
            parts += [f'<circle class="dot" cx="{x}" cy="{y}" r="2"/>'] * bool(there)
    return f'<g style="--c: var(--c{number % 6})">{"".join(parts)}</g>'


def pieces(finite: np.ndarray) -> list[slice]:
    """The stretches without a gap."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], finite.astype(int), [0]])))
    return [slice(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def legend(curve: Curve, number: int, named: bool) -> str:
    """The last value of a curve, with its standard error and, among several, its name."""
    finite = np.flatnonzero(np.isfinite(curve.values))
    if not len(finite):
        return ""
    text = figure_text(curve.values[finite[-1]])
    if curve.errors is not None:
        text += f" ± {figure_text(curve.errors[finite[-1]])}"
    name = f"{escaped(curve.name)}: " if named else ""
    return f'<span class="name" style="--c: var(--c{number % 6})">{name}{text}</span>'


def charts_of(title: str, names: Sequence[str], runs: Mapping[str, list[dict[str, Any]]]) -> str:
    """A chart of these metrics for one run; for several runs a chart of each metric with a curve
    for each run. It leaves out what has no value.

    names: * in a name stands for any part of it. runs: the records of each run in their order.
    """
    there = dict.fromkeys(name for records in runs.values() for r in records for name in r)
    found = {n: wanted for wanted in names for n in there if fnmatch.fnmatchcase(n, wanted)}
    shown = {name: distinct_part(name, wanted) for name, wanted in found.items()}
    pairs = {(run, name): curve_of(name, runs[run]) for name in shown for run in runs}
    if len(runs) == 1:
        return chart(title, [pair._replace(name=shown[name]) for (_, name), pair in pairs.items()])
    several = len(names) > 1 or "*" in names[0]
    return "".join(
        chart(
            f"{title}: {shown[name]}" if several else title,
            [pairs[run, name]._replace(name=run) for run in runs],
        )
        for name in shown
    )


def curve_of(name: str, records: list[dict[str, Any]]) -> Curve:
    """The curve of a metric, with its standard errors if they are recorded."""
    having = [record for record in records if name in record]
    errors = column(having, f"{name}_se") if having and f"{name}_se" in having[-1] else None
    return Curve(name, [record["step"] for record in having], column(having, name), errors)


def distinct_part(name: str, wanted: str) -> str:
    """What * stands for in the name of a metric, or the last part of a name without *."""
    start, star, end = wanted.partition("*")
    return name.removeprefix(start).removesuffix(end) if star else name.rpartition("/")[2]


def settings_table(defaults: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> str:
    """The settings of runs that differ from the defaults, and what follows from all settings."""
    rows = []
    for name in dict.fromkeys(name for settings in runs.values() for name in settings):
        values = [settings.get(name, "") for settings in runs.values()]
        if name.startswith("derived.") or any(value != defaults.get(name) for value in values):
            cells = [defaults.get(name, ""), *values]
            rows.append([escaped(name), *(f"<pre>{escaped(cell)}</pre>" for cell in cells)])
    return table(["setting", "default", *runs], rows)


def held_out_table(folder: Path) -> str:
    """The same held-out questions, answered at the first, the middle and the last evaluation."""
    file = folder / "eval.jsonl"
    questions = first_questions(file)
    entries = read_lines(file, having=[json.dumps(question) for question in questions])
    entries = [entry for entry in entries if entry["evaluation"] == "eval"]
    steps = three_of(sorted({entry["step"] for entry in entries}))
    rows = []
    for question in questions:
        found = {e["step"]: e for e in entries if e["question"] == question}
        asked = f"<pre>{escaped(question)}</pre>"
        asked += f'<p class="numbers">answer: {escaped(next(iter(found.values()))["answer"])}</p>'
        rows.append(
            [asked, *(completion_cell(found[s]["completions"][0]) for s in steps if s in found)]
        )
    if not rows:
        return ""
    heads = ["question", *(f"step {step}" for step in steps)]
    return f"<h2>Held-out questions</h2>{table(heads, rows)}"


def first_questions(file: Path) -> list[str]:
    """The first SHOWN_QUESTIONS questions in an eval.jsonl, which may have a million lines."""
    questions: dict[str, None] = {}
    with contextlib.suppress(FileNotFoundError), open(file, encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # a killed run leaves half a line
                entry = json.loads(line)
                questions |= {entry["question"]: None} if entry["evaluation"] == "eval" else {}
            if len(questions) == SHOWN_QUESTIONS:
                break
    return [*questions]


def group_tables(folder: Path) -> str:
    """A group of completions from the start, the middle and the end of training."""
    entries = [e for e in read_lines(folder / "samples.jsonl") if "completions" in e]
    groups = {entry["step"]: entry for entry in reversed(entries)}  # the first of each step
    parts = []
    for step in three_of(sorted(groups)):
        entry = groups[step]
        cells = [completion_cell(completion) for completion in entry["completions"]]
        half = (len(cells) + 1) // 2
        parts.append(f"<h2>A group of step {step}</h2><pre>{escaped(entry['question'])}</pre>")
        parts.append(table([], [cells[:half], cells[half:]]))
    return "".join(parts)


def completion_cell(completion: dict[str, Any]) -> str:
    """The HTML of a completion, with what is known of it."""
    told = escaped(", ".join(f"{name} {value}" for name, value in pairs_of(completion)))
    return f'<pre>{escaped(completion["text"])}</pre><p class="numbers">{told}</p>'


def three_of(values: list[int]) -> list[int]:
    """The first, the middle and the last of the values, each once."""
    return sorted({values[0], values[len(values) // 2], values[-1]}) if values else []
