"""Trains as train_grpo.py does, and profiles the last step.

    STEPS=3 python tools/profile_step.py FOLDER

jax's profiler writes its trace to the folder, for XProf, and docs/speed.md explains the summary in
profile.json there. The profiler slows the step down, so that metrics.jsonl does not have it.
"""

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that it runs from any folder

from config import Config, load

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python tools/profile_step.py FOLDER [arguments of train_grpo.py]")
    CFG, _, LINES = load(sys.argv[2:])  # before jax is imported, as in train_grpo.py

import jax
from jax.profiler import ProfileData, ProfileOptions

import train_grpo
from infra.chips import exit_on_oom
from infra.hosts import exiting_on_error
from infra.log import RunLog
from infra.mistakes import UserMistake
from metrics import Step
from run import Run

# By platform: the plane of the first device in a trace, the beginning of the names of its lines of
# kernels, and a pattern of other events there: loops and branches, which contain those of their
# bodies. On a CPU, lines are threads, and operations of a program stand for kernels.
KERNELS = {
    "cpu": ("/host:CPU", "tf_XLA", "while|cond|call"),
    "gpu": ("/device:GPU:0", "Stream #", "$^"),
    "tpu": ("/device:TPU:0", "XLA Ops", "%?(while|cond|call)"),
}
LONGEST = 5  # waits in a profile


class Kernel(NamedTuple):
    start: float  # ns
    end: float
    program: str  # "jit_" and the name of the function, or "none": a copy between programs
    name: str


def train_and_profile(cfg: Config, folder: Path) -> None:
    """Trains from step 0, without evaluations and checkpoints, and writes the profile of the last
    step. Raises UserMistake for a single step."""
    if cfg.steps < 2:
        raise UserMistake(f"STEPS={cfg.steps}: the first step compiles; a profile needs 2 or more")
    cfg = dataclasses.replace(cfg, resume="never", eval_every_steps=0, save_every_steps=0)
    log_step, last = train_grpo.log_step, cfg.steps - 1

    def log_or_profile(run: Run, log: RunLog, step: Step) -> None:
        if step.index < last:
            log_step(run, log, step)
        jax.block_until_ready(jax.live_arrays())  # the devices have ended the step
        if step.index == last - 1:
            options = ProfileOptions()
            options.python_tracer_level = 0  # it would slow the host down
            jax.profiler.start_trace(folder, profiler_options=options)
        if step.index == last:
            seconds = step.clock.total()
            jax.profiler.stop_trace()
            profile = summarize(read_kernels(folder), seconds)
            (folder / "profile.json").write_text(json.dumps(profile, indent=1))

    train_grpo.log_step = log_or_profile
    train_grpo.main(cfg)


def read_kernels(folder: Path) -> list[Kernel]:
    """The kernels in the trace of a folder, by their start."""
    platform = jax.devices()[0].platform
    plane_name, line_name, others = KERNELS[platform]
    newest = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    trace = ProfileData.from_file(str(newest))
    plane = trace.find_plane_with_name(plane_name)
    kernels = [
        Kernel(x.start_ns, x.end_ns, dict(x.stats).get("hlo_module", "none"), x.name[:80])
        for line in (plane.lines if plane else ())
        if line.name.startswith(line_name)
        for x in line.events
        if not re.match(others, x.name)
    ]
    # The threads of a CPU also have events of no program.
    return sorted(x for x in kernels if platform != "cpu" or x.program != "none")


def summarize(kernels: Sequence[Kernel], seconds: float) -> dict[str, Any]:
    """The fields of profile.json. kernels: by their start. seconds: those of the step."""
    ended_last = [*itertools.accumulate(kernels, lambda x, y: max(x, y, key=lambda z: z.end))]
    waits = [(y.start - x.end, x, y) for x, y in zip(ended_last, kernels[1:], strict=False)]
    waits = sorted((wait for wait in waits if wait[0] > 0), reverse=True)
    span_ns = ended_last[-1].end - kernels[0].start if kernels else 0
    ns: dict[str, list[float]] = {}
    for kernel in kernels:
        ns.setdefault(kernel.program, []).append(kernel.end - kernel.start)
    return {
        "step_s": round(seconds, 3),
        "kernels": len(kernels),
        "busy_share": round((span_ns - sum(wait[0] for wait in waits)) / 1e9 / seconds, 4),
        "programs": {
            name: {"kernels": len(x), "ms": round(sum(x) / 1e6, 3)} for name, x in ns.items()
        },
        "longest_waits": [
            {"ms": round(wait_ns / 1e6, 3), "after": "/".join(x[2:]), "before": "/".join(y[2:])}
            for wait_ns, x, y in waits[:LONGEST]
        ],
    }


if __name__ == "__main__":
    print(*LINES, sep="\n", flush=True)
    with exiting_on_error(), exit_on_oom(CFG):
        train_and_profile(CFG, Path(sys.argv[1]))
