"""Trains a track of docs/speedruns.md with its seeds, and prints the row of the board.

    python tools/speedrun.py tiny [NAME=VALUE ...]

Each seed is a process of its own with an empty compilation cache. It counts from its start to its
end, which comes after the evaluation on all held-out questions.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that it runs from any folder

from runtime.mistakes import UserMistake, fail
from runtime.processes import commit_of
from tools.bench import ONLY_STEPS, setting, train


class Track(NamedTuple):
    recipe: str
    accuracy: float  # that the mean over the seeds has to reach, on the held-out questions
    seeds: int = 3


TRACKS = {
    "tiny": Track("tiny", 0.95),
    "guess": Track("guess", 0.7),
    "sums": Track("smollm2_arithmetic", 0.75, seeds=1),
}
# The rules fix these settings. A run only trains, and is evaluated once, at its end.
FIXED = """
    DATASET DATASET_CONFIG TRAIN_SPLIT EVAL_SPLIT EVAL_SAMPLES QUESTION_COLUMN ANSWER_COLUMN
    MAX_PROMPT_LENGTH REWARD_FN ENVIRONMENT_CLASS MAX_TURNS SEED RESUME CHECKPOINT_DIR OUTPUT_DIR
    JAX_COMPILATION_CACHE_DIR
"""
ONLY_TRAIN = ONLY_STEPS | {"EVAL_FULL_SWEEP": "1"}


def run(track: Track, given: dict[str, str], seed: int) -> dict[str, float]:
    """The accuracy of a seed, and its seconds: of the whole process, of compiling in the training
    steps, of the rest of these steps, and of the evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = {"OUTPUT_DIR": f"{folder}/run", "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
        began = time.monotonic()
        settings = given | ONLY_TRAIN | fresh | {"SEED": str(seed)}
        records = train(settings, "--config", f"recipes/{track.recipe}.yaml")
        whole = time.monotonic() - began
    steps = [record for record in records if "time/train/step_s" in record]
    compiling = sum(record["compile/s"] for record in steps)
    return {
        "accuracy": records[-1]["eval_full/accuracy"],
        "whole": whole,
        "compiling": compiling,
        "steps": sum(record["time/train/step_s"] for record in steps) - compiling,
        "evaluation": records[-1]["time/eval_full/step_s"],
    }


def row(name: str, given: dict[str, str], runs: list[dict[str, Any]]) -> str:
    """The row of the board: means over the seeds."""
    mean = {key: statistics.mean(each[key] for each in runs) for key in runs[0]}
    start = mean["whole"] - mean["compiling"] - mean["steps"] - mean["evaluation"]
    seconds = [mean["whole"], start, mean["compiling"], mean["steps"], mean["evaluation"]]
    accuracies = ", ".join(f"{each['accuracy']:.3f}" for each in runs)
    settings = " ".join(f"{key}={value}" for key, value in given.items())
    cells = [name, settings, *(f"{x:.1f}" for x in seconds), accuracies, commit_of(REPO)[:7]]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("track", choices=TRACKS)
    parser.add_argument("settings", nargs="*", type=setting, metavar="NAME=VALUE")
    args = parser.parse_args()
    track, given = TRACKS[args.track], dict(args.settings)
    try:
        if fixed := {*given} & {*FIXED.split(), *ONLY_TRAIN}:
            raise UserMistake(f"the rules of docs/speedruns.md fix {min(fixed)}; leave it out")
        if (REPO / ".env").exists():
            raise UserMistake(".env has settings, which the row would not show; move it away")
        runs = [run(track, given, seed) for seed in range(track.seeds)]
    except UserMistake as error:
        fail(error)
    reached = statistics.mean(each["accuracy"] for each in runs)
    if reached < track.accuracy:
        raise SystemExit(f"no entry: {reached:.3f} is below the track's {track.accuracy}")
    print(row(args.track, given, runs))


if __name__ == "__main__":
    main()
