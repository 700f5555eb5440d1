"""Compares two runs: how they ended, how good and how fast they are, and what of it is noise.

    python tools/compare_runs.py runs/a runs/b

A difference of accuracies within two standard errors is noise: on the 1,319 test questions of GSM8K
an accuracy of 0.78 has a standard error of 1.1 points, and the difference of two runs one of 1.6.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from review import History, read_history
from runtime.mistakes import UserMistake, fail
from runtime.records import column, state_of

METRICS = (  # the rows, each with the last value of a run
    "eval_full/accuracy",
    "eval/accuracy",
    "eval/reward/func/reward_correct/mean",
    "eval/reward/total/mean",
    "time/train/step_avg_last10_s",
    "time/eval_full/step_s",
)
STEP_TIME = "time/train/step_avg_last10_s"
CHOSEN = ("policy_loss_impl", "attention_impl", "layer_loop", "dtype", "mesh_shape", "device")


def last_value(history: History, name: str) -> tuple[float, float]:
    """The last value of a metric and its standard error; NaN where there is none.

    The time of a step is the mean of the last ten steps in which nothing was compiled.
    """
    if name == STEP_TIME:
        warm = [record for record in history.steps if not record.get("compile/programs")][-10:]
        times = column(warm, "time/train/step_s")
        return (float(times.mean()) if len(times) else math.nan), math.nan
    found = [record for record in history.all() if record.get(name) is not None]
    if not found:
        return math.nan, math.nan
    return tuple(float(column(found[-1:], key)[0]) for key in (name, f"{name}_se"))


def temperatures(name: str, histories: Sequence[History]) -> list[str]:
    """The temperatures behind a metric of an evaluation; greedy completions have 0."""
    key = f"{name.partition('/')[0]}/temperature"
    return [f"{last_value(history, key)[0]:g}" for history in histories]


def number(value: float, error: float = math.nan) -> str:
    """A value for the table, with its standard error if it has one; - without a value."""
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def cells_of(name: str, first: History, second: History) -> list[str]:
    """The cells of a metric: both values, and their difference with what it means."""
    (a, a_error), (b, b_error) = (last_value(history, name) for history in (first, second))
    if name.startswith("time/"):
        ratio = f"{b / a:.2f} times" if a > 0 and not math.isnan(b) else "-"
        return [name, number(a), number(b), ratio]
    error = math.hypot(a_error, b_error)
    change = number(b - a, error)
    if not math.isnan(error) and change != "-":
        change += ": noise" if abs(b - a) <= 2 * error else ": beyond noise"
    if change != "-" and len(set(temperatures(name, (first, second)))) > 1:
        change = "other temperature"
    return [name, number(a, a_error), number(b, b_error), change]


def what_ran(history: History) -> dict[str, Any]:
    """The implementations that a run has really used."""
    return {name: history.settings.get(f"derived.{name}", "?") for name in CHOSEN}


def conclusion(names: list[str], histories: list[History]) -> list[str]:
    """The lines below the table: what differs between the runs, and what the accuracies say."""
    first, second = map(what_ran, histories)
    lines = []
    different = [name for name in CHOSEN if first[name] != second[name]]
    told = [f"{name} {first[name]} and {second[name]}" for name in different]
    lines.append(f"the implementations differ in: {', '.join(told) or 'nothing'}")
    asked = [str(history.settings.get("train.attention_impl")) for history in histories]
    if asked[0] != asked[1] and "attention_impl" not in different:
        lines.append(
            f"this is no comparison of ATTENTION_IMPL={asked[0]} with {asked[1]}: both runs "
            f"computed {first['attention_impl']}"
        )
    settings = [history.settings for history in histories]
    keys = [k for k in settings[0] | settings[1] if not k.startswith(("derived.", "run."))]
    changed = [key for key in keys if settings[0].get(key) != settings[1].get(key)]
    told = [f"{key} {settings[0].get(key)} and {settings[1].get(key)}" for key in changed]
    lines.append(f"the settings differ in: {', '.join(told) or 'nothing'}")
    for name in ("eval_full/accuracy", "eval/accuracy"):
        (a, a_error), (b, b_error) = (last_value(history, name) for history in histories)
        error = math.hypot(a_error, b_error)
        if math.isnan(error + a + b):
            continue
        told = temperatures(name, histories)
        if told[0] != told[1]:
            lines.append(
                f"verdict: none, since {name} is at temperature {told[0]} and {told[1]}; set "
                f"EVAL_SAMPLES and EVAL_TEMPERATURE to the same values in both runs"
            )
        else:
            better = names[int(np.argmax([a, b]))]
            noise = abs(b - a) <= 2 * error
            lines.append(
                f"verdict: {name} differs by {b - a:+.4f} with a standard error of {error:.4f}: "
                + ("that is noise" if noise else f"{better} is better")
            )
        break
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="OUTPUT_DIR of a run")
    folders = parser.parse_args().runs
    try:
        histories = [read_history(folder) for folder in folders]
    except UserMistake as error:
        fail(error)
    names = [str(folder) for folder in folders]
    states = [state_of(folder) for folder in folders]
    rows = [["state", *(f"{state} {why}".strip() for state, why in states), ""]]
    rows.append(["steps", *(str(len(history.steps)) for history in histories), ""])
    rows += [cells_of(name, *histories) for name in METRICS]
    print(f"| | {names[0]} | {names[1]} | second - first |\n|---|---|---|---|")
    print("\n".join(f"| {' | '.join(cells)} |" for cells in rows))
    print("\n".join(conclusion(names, histories)))


if __name__ == "__main__":
    main()
