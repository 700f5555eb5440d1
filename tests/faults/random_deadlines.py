"""Runs the demo with MAX_HOURS of random lengths, and checks that each start ends in time.

    python tests/faults/random_deadlines.py --deadlines 20 --seconds 50 90

The demo is train_grpo.py with the tiny model on a CPU, on a machine that was made slow: its
updates, its evaluations and its disk take seconds more. The same command is started again, each
time with other hours, until all its steps are done. Each start that the clock ends must have ended,
with exit code 0, before its hours were over, counted from before it was started, with a checkpoint
of its last step, an evaluation after this step, and the export of its weights. The run that is left
is compared with a run without hours: weights, samples, records but for seconds and memory. Then a
run with the next SEED begins. The exit code is 1 if anything is wrong.
"""

import argparse
import logging
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from faults.random_faults import SETTINGS, mistakes_in
from runs import Result, checkpoint_arrays, finish, start
from safetensors.numpy import load_file

EXPORT_S = 4.0
SLOW = f"""
import time
import evaluation
from infra import resume

def slow(function, seconds):
    def slower(*arguments, **named):
        time.sleep(seconds)
        return function(*arguments, **named)
    return slower

train_grpo.update_policy = slow(train_grpo.update_policy, 1.0)
evaluation.sample_completions = slow(evaluation.sample_completions, 3.0)
train_grpo.export = slow(train_grpo.export, {EXPORT_S})
resume.begin_or_resume = slow(resume.begin_or_resume, {EXPORT_S})
"""


class Start(NamedTuple):
    """A start with MAX_HOURS, which the clock has ended or which was done before."""

    steps: int
    unused_s: float  # of its hours
    done: bool
    mistakes: list[str]


def start_with(seconds: float, out: Path, env: dict[str, str]) -> Start:
    """A start with MAX_HOURS of so many seconds, and what is wrong with its end."""
    shutil.rmtree(out / "hf", ignore_errors=True)
    began = time.monotonic()
    env = env | {"MAX_HOURS": f"{seconds / 3600:.9f}"}
    result = finish(start(out, env, 1, changes=SLOW), out)
    unused = began + seconds - time.monotonic()
    if re.search("^DONE: ", result.lines, re.M) and result.code == 0:
        return Start(int(env["STEPS"]), unused, True, [])
    stopped = re.search(r"^STOPPED: MAX_HOURS steps=(\d+) saved_step=\1$", result.lines, re.M)
    if result.code or not stopped:
        last = (result.lines + result.errors).splitlines()[-3:]
        return Start(-1, unused, False, [f"exit code {result.code}: {last}"])
    mistakes = [f"it has ended {-unused:.1f} s too late"] if unused < 0 else []
    return Start(int(stopped[1]), unused, False, mistakes + missing(result, int(stopped[1])))


def missing(result: Result, step: int) -> list[str]:
    """What a stopped run lacks after this step."""
    mistakes, out = [], result.out
    if not any("eval/accuracy" in x and x["step"] == step for x in result.records):
        mistakes.append(f"no evaluation after step {step}")
    if not (out / "checkpoints" / str(step)).is_dir():
        return [*mistakes, f"no checkpoint of step {step}"]
    arrays = checkpoint_arrays(out, step)
    saved = next(x for name, x in arrays.items() if "params" in name and "final_norm" in name)
    file = out / "hf" / "model.safetensors"
    if not file.is_file() or load_file(file)["model.norm.weight"].tobytes() != saved.tobytes():
        mistakes.append("the export lacks the weights of the checkpoint")
    return mistakes


def run_to_its_end(out: Path, env: dict[str, str], rng: random.Random, limits: list[float]) -> list:
    """The starts of a run until it is done, or until one of them is wrong."""
    starts: list[Start] = []
    while not starts or not (starts[-1].done or starts[-1].mistakes):
        seconds = rng.uniform(*limits)
        starts.append(start_with(seconds, out, env))
        steps, unused, done, mistakes = starts[-1]
        end = "done" if done else f"after step {steps} {unused:.1f} s were unused"
        print(f"MAX_HOURS of {seconds:.1f} s: {'; '.join([end, *mistakes])}", flush=True)
    return starts


def main() -> int:
    parser = argparse.ArgumentParser(description="See the docstring of this file.")
    parser.add_argument("--deadlines", type=int, default=20)
    parser.add_argument("--seconds", type=float, nargs=2, default=[50.0, 90.0])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # also of this process, which reads checkpoints
    logging.getLogger("absl").setLevel(logging.ERROR)
    rng, starts, mistakes = random.Random(args.seed), [], []
    for seed in range(args.deadlines):
        env = SETTINGS | {"SEED": str(seed)}
        with tempfile.TemporaryDirectory() as folder:
            out, undisturbed = Path(folder, "out"), Path(folder, "undisturbed")
            finish(start(undisturbed, env, 1, changes="pass"), undisturbed)
            made = run_to_its_end(out, env, rng, args.seconds)
            starts += [x for x in made if not x.done]
            found = [text for x in made for text in x.mistakes] or mistakes_in(out, undisturbed)
            print(f"SEED={seed}: {len(made)} starts; {found or 'equal to the undisturbed run'}")
        mistakes += found
        if len(starts) >= args.deadlines:
            break
    in_time = sum(not x.mistakes for x in starts)
    unused = [x.unused_s for x in starts]
    print(f"{in_time} of {len(starts)} starts have ended in time with all three; unused seconds:")
    print(f"median {statistics.median(unused):.1f}, largest {max(unused):.1f}")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
