"""A page of curves, completions and tables in one HTML file: it needs no network and no other file,
and follows the dark or the light mode of the reader's system."""

import fnmatch
import html
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.records import column, read_lines

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


def pairs_of(completion: dict[str, Any]) -> list[tuple[str, str]]:
    """What an entry of samples.jsonl or eval.jsonl says of a completion, but for its text."""
    numbers = [("reward", completion["reward"]), *completion["rewards"].items()]
    if "advantage" in completion:
        numbers.append(("advantage", completion["advantage"]))
    pairs = [(name, "-" if number is None else f"{number:z.4g}") for name, number in numbers]
    return [*pairs, ("tokens", f"{completion['tokens']}"), ("ended", completion["ended"])]
