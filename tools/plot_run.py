"""Draws the curves of runs into a picture; needs matplotlib.

    python tools/plot_run.py runs/a runs/b --out curve.png

The left half shows the accuracy of the evaluations with its standard error, the right half the mean
reward of the steps, each with a line per run.
"""

import argparse
import json
import sys
from pathlib import Path


def read_series(folder: Path, name: str) -> tuple[list[int], list[float]]:
    """The steps and the values of a metric in the metrics.jsonl of a run."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise SystemExit(f"error: {folder} has no metrics.jsonl; give a run's OUTPUT_DIR")
    records = []
    for number, line in enumerate(file.open(encoding="utf-8"), start=1):
        try:
            records.append(json.loads(line))
        except ValueError:  # a killed run leaves half a line, and drops it when it is resumed
            print(f"{file} line {number} is not JSON; left out", file=sys.stderr)
    pairs = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="the folders of the runs")
    parser.add_argument("--out", type=Path, required=True, help="the file of the picture")
    args = parser.parse_args()
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("error: plot_run.py needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for run in args.runs:
        steps, accuracies = read_series(run, "eval/accuracy")
        errors = dict(zip(*read_series(run, "eval/accuracy_se"), strict=True))
        bars = [errors.get(step, 0.0) for step in steps]
        left.errorbar(steps, accuracies, bars, marker=".", capsize=2, label=run.name)
        right.plot(*read_series(run, "train-reward/total/mean"), linewidth=0.8, label=run.name)
    left.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    right.set(xlabel="step", ylabel="mean reward of the step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend()
    try:
        figure.savefig(args.out, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the file's ending
        raise SystemExit(f"error: --out {args.out} cannot be written: {error}") from None
    print(args.out)


if __name__ == "__main__":
    main()
