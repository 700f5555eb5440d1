"""Shows runs: the report of one as an HTML file, a comparison of two, or a picture of several.

    python tools/report.py runs/a                       # writes runs/a/report.html
    python tools/report.py runs/a runs/b                # how good and how fast both are
    python tools/report.py runs/a runs/b --out ab.png   # the main curves; it needs matplotlib

A run writes its own report at each evaluation and at its end. This command writes it at any other
time, also for a run that was killed, whose summary.json it brings up to date. The picture shows on
the left the held-out accuracy with its standard error, on the right the mean reward of each step.

A difference of accuracies within two standard errors is noise: on the 1,319 test questions of GSM8K
an accuracy of 0.78 has a standard error of 1.1 points, and the difference of two runs one of 1.6.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from review import TOTAL, History, read_history, report, write_review
from runtime.mistakes import UserMistake, fail
from runtime.records import RUNNING, column
from runtime.run_log import replace_file

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
