"""Plans the rows of docs/plan_table.md again, and writes what they need into their last columns.

    python tools/plan_table.py Qwen3-4B v5e-8     # the rows with all these words

A row has the settings of its run, beside those of the page, in its first columns. It takes minutes.
A row of a GPU needs jax's compiler for it, and one of a TPU libtpu.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "plan_table.md"
TOO_LARGE = "does not fit"  # in the third column: not with any of OPTIMIZERS and sizes of 1
OPTIMIZERS = ("adamw", "lion", "sgd")


def plan_row(cells: list[str], step: str) -> list[str]:
    """The cells of a row with its GiB, its largest program and its seconds. step: the settings of
    the page."""
    model, device, prompts, sequences, others, *_ = cells
    if prompts != TOO_LARGE:
        sizes = f"BATCH_SIZE={prompts} TRAIN_PER_DEVICE_MICRO_BATCH_SIZE={sequences}"
        return [*cells[:5], *run_plan(f"{step} MODEL_PATH={model} {sizes} {others}", device)]
    sizes, plans = "BATCH_SIZE=1 TRAIN_PER_DEVICE_MICRO_BATCH_SIZE=1", []
    for name in OPTIMIZERS:
        plans.append(run_plan(f"{step} MODEL_PATH={model} {sizes} OPTIMIZER={name}", device))
    gib = [needed.partition(" of ")[0] for needed, *_ in plans]
    rest = "".join(f"; `OPTIMIZER={x}`: {y}" for x, y in zip(OPTIMIZERS[1:], gib[1:], strict=True))
    largest = ", ".join(dict.fromkeys(name for _, name, _ in plans))
    return [*cells[:5], plans[0][0] + rest, largest, ""]


def run_plan(settings: str, device: str) -> tuple[str, str, str]:
    """`12.63 of 15.75`, the largest program and the seconds of a step, by --plan. The seconds are
    empty if the run does not fit. Ends the program if there is no plan."""
    env = os.environ | dict(pair.split("=", 1) for pair in settings.replace("`", "").split())
    command = [sys.executable, str(REPO / "train_grpo.py"), "--plan", device]
    done = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, check=False)
    total = re.search(r"(?:fits|DOES NOT FIT), (.+) GiB in (\w+)\n$", done.stdout)
    if total is None:
        sys.exit(f"error: no plan of {settings} on {device}")
    step = re.search(r"^\| step \| (.+?) \|", done.stdout, re.MULTILINE)
    return *total.groups(), step[1] if step else ""


def main(words: list[str]) -> None:
    lines = PAGE.read_text().splitlines()
    step = next(line for line in lines if line.startswith("export ")).removeprefix("export ")
    found = False
    for i, line in enumerate(lines):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and "/" in cells[0] and all(word in line for word in words):
            lines[i] = f"| {' | '.join(plan_row(cells, step))} |"
            print(lines[i], flush=True)
            PAGE.write_text("\n".join(lines) + "\n")
            found = True
    if not found:
        sys.exit(f"error: no row of {PAGE} has all these words: {' '.join(words)}")


if __name__ == "__main__":
    main(sys.argv[1:])
