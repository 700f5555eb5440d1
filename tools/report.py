"""Writes the report of runs as one HTML file: curves, completions, settings and the verdict.

    python tools/report.py runs/a                       # writes runs/a/report.html
    python tools/report.py runs/a runs/b --out ab.html  # the curves of both over each other

A run writes its own report at each evaluation and at its end. This command writes it at any other
time, also for a run that was killed, whose summary.json it brings up to date.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from review import read_history, report, write_review
from runtime.mistakes import UserMistake, fail
from runtime.records import RUNNING, state_of
from runtime.run_log import replace_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="OUTPUT_DIR of a run")
    parser.add_argument("--out", type=Path, help="the file; default: report.html in the only run")
    args = parser.parse_args()
    if len(args.runs) > 1 and not args.out:
        parser.error("--out FILE.html is needed for several runs")
    try:
        histories = {run: read_history(run) for run in args.runs}
        state, why = state_of(args.runs[0])
        if args.out or state == RUNNING:
            replace_file(args.out or args.runs[0] / "report.html", report(histories))
        else:
            write_review(args.runs[0], histories[args.runs[0]], state, why)
    except UserMistake as error:
        fail(error)
    except OSError as error:
        fail(UserMistake(f"{error.filename} cannot be written: {error.strerror}"))
    print(args.out or args.runs[0] / "report.html")


if __name__ == "__main__":
    main()
