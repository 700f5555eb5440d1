"""Compares two runs: how they ended, how good and how fast they are, and what of it is noise.

    python tools/compare_runs.py runs/a runs/b

A difference of accuracies within two standard errors is noise: on the 1,319 test questions of GSM8K
an accuracy of 0.78 has a standard error of 1.1 points, and the difference of two runs one of 1.6.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from review import History, read_history
from runtime.mistakes import UserMistake, fail
from runtime.records import column

ACCURACIES = ("eval_full/accuracy", "eval/accuracy")  # the first that both runs have decides
METRICS = (  # the rows, each with the last value of a run
    *ACCURACIES,
    "eval/reward/func/reward_correct/mean",
    "eval/reward/total/mean",
    "time/train/step_avg_last10_s",
    "time/eval_full/step_s",
)


def last_value(run: History, name: str) -> tuple[float, float]:
    """The last value of a metric and its standard error; NaN where there is none."""
    having = [record for record in run.records if record.get(name) is not None][-1:] or [{}]
    return column(having, name)[0], column(having, f"{name}_se")[0]


def number(value: float, error: float = math.nan) -> str:
    """A value for the table, with its standard error if it has one; - without a value."""
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def row_of(metric: str, names: list[str], runs: list[History]) -> list[str]:
    """The cells of a metric: both values, and their difference with what it means."""
    (a, a_error), (b, b_error) = (last_value(run, metric) for run in runs)
    of = f"{metric.partition('/')[0]}/temperature"  # greedy completions have 0
    temperatures = [last_value(run, of)[0] for run in runs]
    error = math.hypot(a_error, b_error)
    if math.isnan(b - a):
        change = "-"
    elif metric.startswith("time/"):
        change = f"{b / a:.2f} times"
    elif temperatures[0] != temperatures[1]:
        change = "not compared: the temperature is {:g} and {:g}".format(*temperatures)
    elif math.isnan(error):
        change = number(b - a)
    else:
        better = f"{names[1] if b > a else names[0]} is better"
        change = f"{number(b - a, error)}: {'noise' if abs(b - a) <= 2 * error else better}"
    return [metric, number(a, a_error), number(b, b_error), change]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs=2, metavar="RUN", help="OUTPUT_DIR of a run")
    names = parser.parse_args().runs
    try:
        runs = [read_history(Path(name)) for name in names]
    except UserMistake as error:
        fail(error)
    rows = [["", *names, "second - first"], ["---"] * 4]
    rows.append(["state", *(f"{run.state} {run.why}".strip() for run in runs), ""])
    rows.append(["steps", *(str(len(run.steps)) for run in runs), ""])
    rows += [row_of(metric, names, runs) for metric in METRICS]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in rows))
    a, b = (run.settings for run in runs)
    different = [key for key in a | b if a.get(key) != b.get(key) and not key.startswith("run.")]
    told = ", ".join(f"{key} {a.get(key)} and {b.get(key)}" for key in different)
    print(f"the settings differ in: {told or 'nothing'}")
    told = [f"{row[0]}: {row[3]}" for row in rows if row[0] in ACCURACIES and row[3] != "-"]
    print(f"verdict: {told[0] if told else 'none, since the runs have no accuracy in common'}")


if __name__ == "__main__":
    main()
