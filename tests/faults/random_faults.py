"""Runs the demo while faults strike it at random moments, and checks that no result changes.

    python tests/faults/random_faults.py --minutes 60 --processes both

The demo is train_grpo.py with the tiny model, in short runs on a CPU. Whenever a run ends, the same
command is started again with the same OUTPUT_DIR, until all its steps are done. Then what it leaves
is compared with an undisturbed run, and a run with the next SEED begins, until the minutes are
over. The faults, which strike one of two processes or both:

* killed: SIGKILL. stopped: SIGTERM. frozen: SIGSTOP, and SIGCONT up to 5 seconds later.
* silent: SIGSTOP to one of two processes, until the heartbeat's timeout has ended the other one.
* starved: no file of the process gets longer than a random size (RLIMIT_FSIZE).

A fault comes a random time after a line that process 0 prints in a phase. Goodput is the share of
the computed steps that count: a step that a resumed run computes again counts once. The exit code
is 1 if anything is wrong.
"""

import argparse
import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from runs import checkpoint_arrays, environment, metric_records, start, start_two

KINDS = ("killed", "stopped", "frozen", "silent", "starved")
# A line of each phase, and the longest time in seconds from it to a fault.
PHASES = {"start": ("^backend=", 5), "compile": ("^output=", 5), "step": ("^step=", 0.5)}
PHASES |= {"evaluation": ("^eval step=", 1), "end": ("^verdict", 0.1)}
SETTINGS = environment(
    """STEPS=40 ROLLOUT_GLOBAL_BATCH_SIZE=4 NUM_PRE_Q=8 TRAIN_MICRO_BATCH_SIZE=16 REWARD_FN=
    EVAL_EVERY_STEPS=8 EVAL_PROMPTS=64 SAVE_EVERY_STEPS=3 SAMPLE_EVERY_STEPS=4 REWARD_WEIGHTS=
    INIT_TIMEOUT_S=300 WANDB_MODE=disabled"""
)
HUNG_S = 400  # a run that takes longer after its last fault does not end by itself


class Fault(NamedTuple):
    """What strikes, and in which phase."""

    kind: str
    phase: str


def random_faults(rng: random.Random, processes: int) -> Iterator[Fault]:
    """Faults without end; each kind and each phase is as likely as the others."""
    kinds = [kind for kind in KINDS if processes > 1 or kind != "silent"]
    while True:
        yield Fault(rng.choice(kinds), rng.choice([*PHASES]))


# ---- One start of the command --------------------------------------------------------------------


class End(NamedTuple):
    """How a process has ended."""

    code: int  # as Popen has it
    lines: list[str]  # of stdout
    errors: str


def run_once(
    out: Path, env: dict[str, str], processes: int, faults: Iterator[Fault], rng: random.Random
) -> tuple[list[Fault], list[End]]:
    """Starts the command; returns the faults that have struck it, and how its processes have ended.
    Only a frozen run is struck again."""
    outs = [out.with_name(f"{out.name}_files{i}") for i in range(processes)]
    if processes == 1:
        running = [start(outs[0], env | {"OUTPUT_DIR": str(out)}, 1)]
    else:
        each = [{"OUTPUT_DIR": str(out)}] * 2
        running = start_two(outs, 1, *each, **env)
    struck, lines = [], []
    for fault in faults:
        words, seconds = PHASES[fault.phase]
        to_come = 1 + rng.randrange(6) * (fault.phase == "step")
        while to_come and (line := running[0].stdout.readline().decode()):
            lines.append(line)
            to_come -= bool(re.match(words, line))
        if to_come:
            break  # the run has ended before this phase
        time.sleep(rng.uniform(0, seconds))
        struck.append(fault)
        strike(running, fault.kind, rng)
        if fault.kind != "frozen":
            break
    ends = []
    for i, process in enumerate(running):
        try:
            texts = process.communicate(timeout=HUNG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            texts = *process.communicate(), b"it hung"
        stdout, *errors = (text.decode() for text in texts)
        read = lines if i == 0 else []
        ends.append(End(process.returncode, [*read, *stdout.splitlines()], "".join(errors)))
    return struck, ends


def strike(running: list[subprocess.Popen], kind: str, rng: random.Random) -> None:
    """Strikes one process or all, now."""
    both = kind != "silent" and rng.random() < 0.5
    victims = running if both else [rng.choice(running)]
    size = int(2 ** rng.uniform(8, 24))  # from 256 bytes to more than a checkpoint
    numbers = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM}
    for victim in victims:
        if victim.poll() is None:
            if kind == "starved":
                resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            else:
                victim.send_signal(numbers.get(kind, signal.SIGSTOP))
    if kind == "frozen":
        time.sleep(rng.uniform(0.2, 5))
    while kind == "silent" and any(p.poll() is None for p in running if p not in victims):
        time.sleep(0.1)
    if kind in ("frozen", "silent"):
        for victim in victims:
            victim.send_signal(signal.SIGCONT)


def wrong_ends(ends: list[End], kinds: set[str]) -> list[str]:
    """What is wrong in how the processes have ended after these kinds of faults."""
    allowed = {0}
    if len(ends) > 1 and kinds - {"frozen"}:  # another process is gone, as we or jax have found
        allowed |= {1, -signal.SIGABRT}
    if "killed" in kinds:
        allowed |= {-signal.SIGKILL}
    if "stopped" in kinds:
        allowed |= {-signal.SIGTERM, 128 + signal.SIGTERM}
    if "starved" in kinds:
        allowed |= {1, 2}
    wrong = []
    for i, end in enumerate(ends):
        if end.code not in allowed:
            wrong.append(f"process {i} has ended with exit code {end.code}")
        # A signal that comes after this line is still acknowledged by one of its own.
        if end.code == 0 and not any(line.startswith("DONE: ") for line in end.lines[-3:]):
            wrong.append(f"process {i} has ended with exit code 0 and is not done")
        # Threads of orbax may still print when the line is there.
        says_why = re.search("^error: ", "\n".join(end.errors.splitlines()[-8:]), re.M)
        if end.code in (1, 2) and not says_why:
            wrong.append(f"process {i} has exit code {end.code}, and no line at the end says why")
        if end.code == 143 and "Traceback" in end.errors:
            wrong.append(f"process {i} has printed a traceback")
    return wrong


# ---- What a run leaves ---------------------------------------------------------------------------


def mistakes_in(out: Path, undisturbed: Path) -> list[str]:
    """A sentence for everything in the folder of a run that is not as the undisturbed run left it;
    what depends on the clock and on names of folders is left out."""
    records = [
        {f"line {i}": x for i, x in enumerate(metric_records(x))} for x in (out, undisturbed)
    ]
    wrong = differences("metrics.jsonl", *records)
    exported = [path.relative_to(undisturbed) for path in sorted((undisturbed / "hf").iterdir())]
    for name in (Path("eval.jsonl"), Path("samples.jsonl"), *exported):
        if (out / name).read_bytes() != (undisturbed / name).read_bytes():
            wrong.append(f"{name} has other bytes")
    for folder in (Path(), Path("checkpoints"), Path("hf")):
        known, names = ({x.name for x in (each / folder).iterdir()} for each in (undisturbed, out))
        # A signal saves checkpoints that the undisturbed run has not made.
        left = sorted(name for name in names - known if not name.isdecimal())
        wrong += [f"{folder / name} is left over" for name in left]
    last = max(int(path.name) for path in (undisturbed / "checkpoints").glob("[0-9]*"))
    for name in ("run.json", "summary.json", f"checkpoints/{last}/record/metadata"):
        values = [json.loads((each / name).read_text()) for each in (out, undisturbed)]
        for each in values:
            for clock in ("run_id", "sha256", "last", "settings", "lengths"):
                each.pop(clock, None)
            # A run that is stopped after its last step saves it before it is evaluated.
            for evaluation in ("accuracy", "best_step", "best_accuracy"):
                each.pop(evaluation, None)
        wrong += differences(name, *values)
    arrays = [checkpoint_arrays(each, last) for each in (out, undisturbed)]
    return wrong + differences(
        f"checkpoint {last}", *({name: x.tobytes() for name, x in each.items()} for each in arrays)
    )


def differences(what: str, ours: dict, theirs: dict) -> list[str]:
    """A sentence for each of the first five names whose values differ."""
    names = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    return [f"{what}: {name} is another" for name in names[:5]]


# ---- Runs ----------------------------------------------------------------------------------------


class Totals(NamedTuple):
    """What has happened in several runs."""

    struck: Counter  # of Fault
    codes: Counter  # of all processes
    steps: Counter  # "computed" and "counted"


def run_to_its_end(
    out: Path, env: dict[str, str], processes: int, faults: Iterator[Fault], totals: Totals
) -> list[str]:
    """Starts a run again and again until all its steps are done, or a start without faults fails;
    returns what was wrong."""
    rng, wrong = random.Random(f"{env['SEED']} {processes}"), []
    for number in itertools.count(1):
        struck, ends = run_once(out, env, processes, faults, rng)
        codes = [end.code for end in ends]
        found = wrong_ends(ends, {fault.kind for fault in struck})
        wrong += [f"start {number} of {out}: {text}\n{ends}" for text in found]
        totals.struck.update(struck)
        totals.codes.update(codes)
        totals.steps["computed"] += sum(line.startswith("step=") for line in ends[0].lines)
        told = "; ".join(f"{kind} in {phase}" for kind, phase in struck) or "no fault"
        print(f"{out.name} start {number}: {told}: exit {codes}", flush=True)
        if not any(codes) or not struck:
            totals.steps["counted"] += int(env["STEPS"])
            return wrong


def drill(folder: Path, processes: int, minutes: float, seed: int) -> list[str]:
    """Disturbs runs with so many processes for so many minutes; returns what was wrong."""
    totals, wrong, end = (
        Totals(Counter(), Counter(), Counter()),
        [],
        time.monotonic() + 60 * minutes,
    )
    for number in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(seed)):
        env = SETTINGS | {"SEED": str(number)}
        ours, theirs = (folder / f"{name}{processes}_{number}" for name in ("run", "undisturbed"))
        failed = run_to_its_end(theirs, env, processes, iter(()), Totals(*map(Counter, "   ")))
        if failed:
            return failed
        faults = random_faults(random.Random(number), processes)
        faults = itertools.takewhile(lambda _: time.monotonic() < end, faults)
        wrong += run_to_its_end(ours, env, processes, faults, totals)
        wrong += [f"{ours}: {text}" for text in mistakes_in(ours, theirs)]
    counts = ", ".join(f"{kind} in {phase} {n}" for (kind, phase), n in totals.struck.items())
    print(f"{processes} process(es): {totals.struck.total()} faults: {counts}")
    print(f"exit codes: {dict(totals.codes)}; steps: {dict(totals.steps)}", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="for how long faults strike")
    parser.add_argument("--processes", choices=["1", "2", "both"], default="both")
    parser.add_argument("--seed", type=int, default=0, help="the SEED of the first run")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # also of this process, which reads checkpoints
    counts = [1, 2] if args.processes == "both" else [int(args.processes)]
    folder, minutes = Path(tempfile.mkdtemp(prefix="faults_")), args.minutes / len(counts)
    wrong = [text for n in counts for text in drill(folder, n, minutes, args.seed)]
    print(f"wrong: {len(wrong)}; the runs are in {folder}", *wrong, sep="\n")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
