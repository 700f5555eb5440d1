"""Prints the settings with which models train on TPU slices, without a TPU and without weights.

    python tools/memory_table.py                           # the table of docs/plan.md
    python tools/memory_table.py --models Qwen/Qwen2.5-7B --slices v4-8

For each model and slice it compiles the programs of the run, as --plan does, and looks for the
largest micro-batch and the largest pass that fit. Where not even the smallest ones fit, it tries
again with the next of CHANGES. Settings of the environment hold for all rows. A row takes some
minutes on two CPU cores.
"""
# ruff: noqa: E402 - the project's folder comes into sys.path before the imports from it

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from config import Config
from runtime.mistakes import UserMistake, fail
from runtime.sizes import fewest_prompts
from tools.plan_tpu import GIB, compiled, limit_of, make_plan
from tools.programs import OF_MICRO_BATCHES, ROLLOUT, runs

MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B", "Qwen3-4B")  # of Qwen
TPUS = ("v5e-1", "v5e-8", "v4-8", "v6e-8")
STEP = {
    "ROLLOUT_GLOBAL_BATCH_SIZE": "16",
    "NUM_PRE_Q": "8",
    "GLOBAL_LENGTH": "512",
    "MAX_LENGTH_SAMPLE": "1024",
}
PASS, MICRO_BATCH = "batch_size", "train_per_device_micro_batch_size"
MICRO_BATCHES = (16, 8, 4, 2, 1)  # what is tried; larger ones would hardly be faster
# What is tried in this order. lion and sgd have less state than adamw, but learn otherwise.
CHANGES = ({}, {"OPTIMIZER": "lion"}, {"OPTIMIZER": "sgd"})
COLUMNS = ("model", "TPU", PASS.upper(), MICRO_BATCH.upper())
COLUMNS += ("other settings", "GiB of a chip", "largest in")
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def largest_sizes(cfg: Config, name: str) -> tuple[dict[str, int], dict[str, float]]:
    """The settings of the largest micro-batch, and with it of the largest pass, with which all
    programs fit, or of the smallest that was tried; and the bytes per device of each program."""
    plan, _ = make_plan(cfg, name)
    devices = plan.training.layout.mesh.size // plan.processes
    sequences = plan.sizes.local_batch // devices  # of a device in a step
    prompts = plan.sizes.prompts_per_step // plan.processes
    fill = fewest_prompts(cfg.num_pre_q, devices)
    micro_batches = [{MICRO_BATCH: n} for n in MICRO_BATCHES if sequences % n == 0]
    passes = [{PASS: n} for n in range(prompts, 0, -1) if prompts % n == 0 and n % fill == 0]
    changes, totals = {}, {}
    for programs, candidates in (
        (("optimizer_step",), passes[:1]),
        (OF_MICRO_BATCHES, micro_batches),
        (("sync_weights", *ROLLOUT), passes),
    ):
        for candidate in candidates:
            plan, _ = make_plan(dataclasses.replace(cfg, **changes | candidate), name)
            of_run = [program for program in programs if runs(plan, program)]
            tried = {program: compiled(plan, program).total for program in of_run}
            if max(tried.values()) <= limit_of(name):
                break
        changes, totals = changes | candidate, totals | tried
        if max(totals.values()) > limit_of(name):
            break
    return changes, totals


def row(name: str, model: str, given: dict[str, str]) -> str:
    """A row of the table: the first change with which the model fits, or what each one needs."""
    refused = {}
    for change in CHANGES:
        cfg = Config.from_env(given | {"MODEL_PATH": model} | change)
        changes, totals = largest_sizes(cfg, name)
        jax.clear_caches()
        largest = max(totals, key=lambda program: totals[program])
        gib, limit = totals[largest] / GIB, limit_of(name) / GIB
        told = " ".join(f"`{k}={v}`" for k, v in change.items())
        if gib <= limit:
            sizes = f"{changes[PASS]} | {changes[MICRO_BATCH]} | {told}"
            return f"| {model} | {name} | {sizes} | {gib:.2f} of {limit} | {largest} |"
        refused[f"{told}: {gib:.2f}" if told else f"{gib:.2f} of {limit}"] = largest
    programs = ", ".join(dict.fromkeys(refused.values()))
    return f"| {model} | {name} | does not fit | | | {'; '.join(refused)} | {programs} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="MODEL")
    parser.add_argument("--slices", nargs="+", default=TPUS, metavar="SLICE")
    args = parser.parse_args()
    names = [field.name.upper() for field in dataclasses.fields(Config)]
    given = STEP | {name: os.environ[name] for name in names if name in os.environ}
    print(f"{' '.join(f'{k}={v}' for k, v in given.items())}\n\n{HEADER}", flush=True)
    try:
        for model in args.models or [f"Qwen/{model}" for model in MODELS]:
            for name in args.slices:
                print(row(name, model, given), flush=True)
    except UserMistake as error:
        fail(error)


if __name__ == "__main__":
    main()
