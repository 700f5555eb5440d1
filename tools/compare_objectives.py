"""Trains the tiny model with each objective and prints a table of the accuracies.

    python tools/compare_objectives.py            # all objectives: about 25 minutes on 2 CPU cores
    python tools/compare_objectives.py rloo gspo  # two objectives

The runs are in runs/objectives/NAME_SEED. gspo and cispo clip ratios of off-policy updates, so they
get two updates per step; in a single update every ratio is 1.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
OBJECTIVES = {  # name -> the seeds, the settings
    "dapo": ((0, 1, 2), {}),
    "grpo": ((0,), {"LOSS_TYPE": "grpo"}),
    "dr_grpo": ((0,), {"LOSS_TYPE": "dr_grpo", "SCALE_REWARDS": "none"}),
    "rloo": ((0,), {"ADV_ESTIMATOR": "rloo"}),
    "gspo": ((0,), {"LOSS_TYPE": "gspo", "EPS_LOW": "3e-4", "EPS_HIGH": "4e-4", "PPO_EPOCHS": "2"}),
    "cispo": ((0,), {"LOSS_TYPE": "cispo", "EPS_HIGH": "5", "PPO_EPOCHS": "2"}),
}


def accuracies(out: Path, settings: dict[str, str]) -> list[float]:
    """The accuracies of all evaluations of a run, of which the first is before training."""
    env = os.environ | settings | {"OUTPUT_DIR": str(out), "RESUME": "never"}
    subprocess.run([sys.executable, str(REPO / "train_grpo.py")], env=env, check=True)
    records = map(json.loads, (out / "metrics.jsonl").open(encoding="utf-8"))
    return [record["eval/accuracy"] for record in records if "eval/accuracy" in record]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"an objective: {', '.join(OBJECTIVES)} (default: all)",
    )
    names = parser.parse_args().names or list(OBJECTIVES)
    if unknown := set(names) - set(OBJECTIVES):
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(OBJECTIVES)}")

    lines = []
    for name in names:
        seeds, settings = OBJECTIVES[name]
        runs = [
            accuracies(Path("runs/objectives") / f"{name}_{seed}", settings | {"SEED": str(seed)})
            for seed in seeds
        ]
        text = " ".join(f"{key}={value}" for key, value in settings.items()) or "the defaults"
        ends = ", ".join(f"{run[0]:.3f} -> {run[-1]:.3f}" for run in runs)
        lines.append(f"| {name} | {text} | {ends} |")
    print("| objective | settings | held-out accuracy before -> after |\n|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
