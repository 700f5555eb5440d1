"""Prints the settings with which models train on TPU slices, without a TPU and without weights.

    python tools/memory_table.py --models Qwen/Qwen2.5-7B --slices v4-8
    python tools/memory_table.py --compiled table.json     # the table of docs/memory.md

For each model and slice it compiles the programs of the run, as --plan does, and looks for the
largest micro-batch and the largest pass that fit. Where not even the smallest ones fit, it tries
again with the next of CHANGES. Settings of the environment hold for all rows. --compiled names a
file that keeps what the compiler has said, so that an interrupted table goes on where it was. A row
takes some minutes on two CPU cores.
"""
# ruff: noqa: E402 - the project's folder comes into sys.path before the imports from it

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from config import Config
from runtime.chips import CHIPS, SLICES
from runtime.mistakes import UserMistake, fail
from runtime.sizes import fewest_prompts
from tools.plan_tpu import GIB, compiled, make_plan, phases
from tools.programs import PROGRAMS, Plan, bytes_of, call, rest_of_run, runs, train_state

MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B", "Qwen3-4B")  # of Qwen
TPUS = ("v5e-1", "v5e-8", "v4-8", "v6e-8")
STEP = {
    "ROLLOUT_GLOBAL_BATCH_SIZE": "16",
    "NUM_PRE_Q": "8",
    "GLOBAL_LENGTH": "512",
    "MAX_LENGTH_SAMPLE": "1024",
}
PASS, MICRO_BATCH = "BATCH_SIZE", "TRAIN_PER_DEVICE_MICRO_BATCH_SIZE"
MICRO_BATCHES = (16, 8, 4, 2, 1)  # what is tried; larger ones would hardly be faster
# What is tried in this order. lion and sgd have less state than adamw, but learn otherwise.
CHANGES = ({}, {"OPTIMIZER": "lion"}, {"OPTIMIZER": "sgd"})
OPTIMIZER_STEP = "optimizer_step"
OF_MICRO_BATCHES = ("compute_logps_and_entropies", "micro_step")
HEADER = f"""\
| model | TPU | {PASS} | {MICRO_BATCH} | other settings | GiB of a chip | largest in | s a step |
|---|---|---|---|---|---|---|---|"""


class Kept(NamedTuple):
    """What the compiler has said: the GiB of each program, by slice, program and settings."""

    file: Path | None
    programs: dict[str, float]  # without the rest of the run


class Found(NamedTuple):
    """Settings, and the GiB per device of the programs that have been planned with them."""

    settings: dict[str, str]
    totals: dict[str, float]
    limit: float  # GiB

    @property
    def largest(self) -> str:
        """The program that needs the most memory."""
        return max(self.totals, key=lambda program: self.totals[program])

    @property
    def fits(self) -> bool:
        return not self.totals or self.totals[self.largest] <= self.limit


# ---- The memory of a program ---------------------------------------------------------------------


def plan_of(name: str, settings: dict[str, str]) -> Plan:
    return make_plan(Config.from_env(settings), name)[0]


def key_of(name: str, program: str, settings: dict[str, str]) -> str:
    """The program on the slice, with the settings that it depends on."""
    ignored = () if program == OPTIMIZER_STEP else ("OPTIMIZER",)
    texts = [f"{k}={v}" for k, v in sorted(settings.items()) if k not in ignored]
    return " ".join([name, program, *texts])


def total_gib(kept: Kept, name: str, settings: dict[str, str], program: str) -> float:
    """What a program and the rest of the run take, in GiB per device, by the compiler."""
    key, plan = key_of(name, program, settings), plan_of(name, settings)
    rest = rest_of_run(plan, program) / GIB
    if key not in kept.programs:
        memory, _ = compiled(plan, program)
        jax.clear_caches()
        kept.programs[key] = memory.total / GIB - rest
        if kept.file:
            kept.file.write_text(json.dumps(kept.programs, indent=0))
        print(f"{key}: {memory.total / GIB:.2f} GiB", file=sys.stderr, flush=True)
    return kept.programs[key] + rest


def state_gib(plan: Plan) -> float:
    """The weights, the gradients and the state of the optimizer, in GiB per device."""
    return bytes_of(call(plan, OPTIMIZER_STEP)[1]) / GIB


def least_gib(plan: Plan, program: str) -> float:
    """What a program and the rest of the run take at least, in GiB per device, by arithmetic."""
    least = rest_of_run(plan, program) + bytes_of(call(plan, program)[1])
    if program == "micro_step":
        training, tokens = plan.training, plan.train_workload().tokens
        if plan.sizes.grad_accum_steps == 1:  # the gradients are a result and not an argument
            least += bytes_of(train_state(plan).params)
        # Backward gets the input of every layer.
        inputs = training.model.num_layers * tokens * training.model.hidden_size
        least += training.dtype.itemsize * inputs / training.layout.mesh.size
    return least / GIB


# ---- The search ----------------------------------------------------------------------------------


def first_that_fits(
    kept: Kept,
    name: str,
    settings: dict[str, str],
    programs: Sequence[str],
    setting: str,
    sizes: Sequence[int],
    fixed: float = 0.0,
) -> Found:
    """The first of the sizes with which the programs fit; if none fits, what is known of the last.

    sizes: values of `setting`, the largest first. fixed: GiB that a program takes at any size.
    The programs behind one that does not fit are not planned, and a program that cannot fit by
    arithmetic is not compiled. What a program takes besides `fixed` falls at most as its size does.
    """
    limit, least = CHIPS[SLICES[name].chip].hbm_gib, 0.0
    for size in sizes:
        found = Found(settings | {setting: str(size)}, {}, limit)
        if fixed + least * size > limit and size != sizes[-1]:
            continue
        plan = plan_of(name, found.settings)
        for program in programs:
            if not runs(plan, program) or not found.fits:
                continue
            found.totals[program] = least_gib(plan, program)
            if found.fits:
                found.totals[program] = total_gib(kept, name, found.settings, program)
        if found.fits:
            break
        least = (found.totals[found.largest] - fixed) / size
    return found


def largest_sizes(kept: Kept, name: str, settings: dict[str, str]) -> Found:
    """The largest micro-batch and then the largest pass with which all programs fit."""
    plan = plan_of(name, settings)
    local, sizes = plan.training.layout.mesh.size // plan.processes, plan.sizes
    prompts = sizes.prompts_per_step // plan.processes
    fill = fewest_prompts(plan.cfg.num_pre_q, local)
    micro_batches = [n for n in MICRO_BATCHES if sizes.local_batch // local % n == 0]
    passes = [n for n in range(prompts, 0, -1) if prompts % n == 0 and n % fill == 0]
    of_passes = [
        program for program in PROGRAMS if program not in (OPTIMIZER_STEP, *OF_MICRO_BATCHES)
    ]
    found = Found(settings, {}, math.inf)
    for programs, setting, values, fixed in (
        ((OPTIMIZER_STEP,), PASS, passes[:1], 0.0),
        (OF_MICRO_BATCHES, MICRO_BATCH, micro_batches, state_gib(plan)),
        (of_passes, PASS, passes, 0.0),
    ):
        if found.fits:
            more = first_that_fits(kept, name, found.settings, programs, setting, values, fixed)
            found = more._replace(totals=found.totals | more.totals)
    return found


# ---- The table -----------------------------------------------------------------------------------


def row(kept: Kept, name: str, model: str, given: dict[str, str]) -> str:
    """A row of the table: the first change with which the model fits, or what each one needs."""
    given, refused = given | {"MODEL_PATH": model}, {}
    for change in CHANGES:
        found = largest_sizes(kept, name, given | change)
        gib, told = found.totals[found.largest], " ".join(f"`{k}={v}`" for k, v in change.items())
        if found.fits:
            sizes = f"{found.settings[PASS]} | {found.settings[MICRO_BATCH]} | {told}"
            seconds = sum(phase.seconds for phase in phases(plan_of(name, found.settings), name))
            memory = f"{gib:.2f} of {found.limit} | {found.largest}"
            return f"| {model} | {name} | {sizes} | {memory} | {seconds:.1f} |"
        refused[f"{told}: {gib:.2f}" if told else f"{gib:.2f} of {found.limit}"] = found.largest
    programs = ", ".join(dict.fromkeys(refused.values()))
    return f"| {model} | {name} | does not fit | | | {'; '.join(refused)} | {programs} | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="MODEL")
    parser.add_argument("--slices", nargs="+", default=TPUS, metavar="SLICE")
    parser.add_argument("--compiled", type=Path, metavar="FILE")
    args = parser.parse_args()
    file = args.compiled
    kept = Kept(file, json.loads(file.read_text()) if file and file.exists() else {})
    names = [field.name.upper() for field in dataclasses.fields(Config)]
    given = STEP | {name: os.environ[name] for name in names if name in os.environ}
    print(f"{' '.join(f'{k}={v}' for k, v in given.items())}\n\n{HEADER}", flush=True)
    try:
        for model in args.models or [f"Qwen/{model}" for model in MODELS]:
            for name in args.slices:
                print(row(kept, name, model, given), flush=True)
    except UserMistake as error:
        fail(error)


if __name__ == "__main__":
    main()
