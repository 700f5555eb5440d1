"""Trains the tiny model with each objective and prints a table of the accuracies.

    python tools/compare_objectives.py            # all objectives: about 20 minutes on 2 CPU cores
    python tools/compare_objectives.py rloo gspo_4  # two objectives

The runs are in runs/objectives/NAME_SEED. Those with _4 in their names have four updates per step,
each on a fourth of its groups: in a single update every ratio is 1, and nothing is clipped. The
column `clipped` has the part of the ratios that were clipped in the updates after the first one of
a step (cispo: in all updates), as the mean over all steps.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
FOUR = {"NUM_MINI_BATCHES": "4", "TRAIN_MICRO_BATCH_SIZE": "32"}
DAPO = {"EPS_HIGH": "0.28", "DYNAMIC_SAMPLING": "1"}
DAPO |= {"REWARD_FN": "reward_correct,soft_overlong_penalty"}
OBJECTIVES = {  # name -> the seeds, the settings
    "dapo": ((0, 1, 2), {}),
    "grpo": ((0,), {"LOSS_TYPE": "grpo"}),
    "dr_grpo": ((0,), {"LOSS_TYPE": "dr_grpo", "SCALE_REWARDS": "none"}),
    "rloo": ((0,), {"ADV_ESTIMATOR": "rloo"}),
    "gspo_4": ((0,), FOUR | {"LOSS_TYPE": "gspo", "EPS_LOW": "3e-4", "EPS_HIGH": "4e-4"}),
    "cispo_4": ((0,), FOUR | {"LOSS_TYPE": "cispo", "EPS_HIGH": "5"}),
    "sapo_4": ((0,), FOUR | {"LOSS_TYPE": "sapo"}),
    "dapo_4": ((0,), FOUR | DAPO),
    "maxrl": ((0,), {"ADV_ESTIMATOR": "maxrl"}),
    "icepop": ((0,), {"IS_MODE": "token_mask", "IS_FLOOR": "0.5", "IS_CAP": "5"}),
    "dual_clip_4": ((0,), FOUR | {"DELTA": "3"}),
    "off_policy_4": ((0,), FOUR | {"OFF_POLICY_MASK_THRESHOLD": "0.1"}),
}


def train(out: Path, settings: dict[str, str]) -> tuple[list[float], str]:
    """The accuracies of all evaluations of a run, of which the first is before training, and the
    part of the ratios that were clipped, as a text."""
    env = os.environ | settings | {"OUTPUT_DIR": str(out), "RESUME": "never"}
    env["WANDB_MODE"] = "disabled"
    subprocess.run([sys.executable, str(REPO / "train_grpo.py")], env=env, check=True)
    records = [*map(json.loads, (out / "metrics.jsonl").open(encoding="utf-8"))]
    names = "clip_ratio_later/region_mean", "cispo_clip_ratio"
    clipped = [r[key] for r in records for name in names if (key := f"train-other/{name}") in r]
    text = f"{sum(clipped) / len(clipped):.2%}" if clipped else ""
    return [record["eval/accuracy"] for record in records if "eval/accuracy" in record], text


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
            train(Path("runs/objectives") / f"{name}_{seed}", settings | {"SEED": str(seed)})
            for seed in seeds
        ]
        text = " ".join(f"{key}={value}" for key, value in settings.items()) or "the defaults"
        ends = ", ".join(f"{found[0]:.3f} -> {found[-1]:.3f}" for found, _ in runs)
        lines.append(f"| {name} | {text} | {ends} | {runs[0][1]} |")
    print("| objective | settings | held-out accuracy, before -> after | clipped |")
    print("|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
