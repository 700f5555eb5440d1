"""Shows runs: the report of one as an HTML file, or the two main curves of several as a picture.

    python tools/report.py runs/a                       # writes runs/a/report.html
    python tools/report.py runs/a runs/b --out ab.png   # a picture; it needs matplotlib

A run writes its own report at each evaluation and at its end. This command writes it at any other
time, also for a run that was killed, whose summary.json it brings up to date. The picture shows on
the left the held-out accuracy with its standard error, on the right the mean reward of each step.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from review import TOTAL, History, read_history, report, write_review
from runtime.mistakes import UserMistake, fail
from runtime.records import RUNNING, column
from runtime.run_log import replace_file


def draw_picture(runs: dict[Path, History], file: Path) -> None:
    """Writes the picture. Raises UserMistake without matplotlib or for another kind of file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserMistake("a picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for folder, run in runs.items():
        values = [column(run.evals, name) for name in ("step", "eval/accuracy", "eval/accuracy_se")]
        left.errorbar(*values, marker=".", capsize=2, label=folder.name)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="OUTPUT_DIR of a run")
    parser.add_argument("--out", type=Path, metavar="PICTURE", help="such as ab.png or ab.svg")
    args = parser.parse_args()
    if len(args.runs) > 1 and not args.out:
        parser.error("--out PICTURE is needed for several runs")
    first, file = args.runs[0], args.out or args.runs[0] / "report.html"
    try:
        runs = {folder: read_history(folder) for folder in args.runs}
        if args.out:
            draw_picture(runs, file)
        elif runs[first].state == RUNNING:  # the run writes its summary
            replace_file(file, report(first, runs[first]))
        else:
            write_review(first, runs[first])
    except UserMistake as error:
        fail(error)
    except OSError as error:
        fail(UserMistake(f"{error.filename} cannot be written: {error.strerror}"))
    print(file)


if __name__ == "__main__":
    main()
