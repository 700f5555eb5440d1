"""Runs the demo while faults strike it at random moments, and checks that no result changes.

    python tests/faults/random_faults.py --minutes 60 --processes both

The demo is `python train_grpo.py` with the tiny model, as a user starts it, in short runs on a CPU.
Settings of the environment, such as STEPS=80, win over the SETTINGS below. Whenever a run ends, the
same command is started again with the same OUTPUT_DIR, until all its steps are done. Then a run
with the next SEED begins, until the minutes are over. The faults:

* killed: SIGKILL. stopped: SIGTERM. Either strikes one of two processes, or both.
* frozen: SIGSTOP, and SIGCONT up to 5 seconds later.
* silent: SIGSTOP to one of two processes, until the heartbeat's timeout has ended the other one.
* full disk: OUTPUT_DIR is in a tmpfs, and a file fills it up to a random rest, until the run has
  ended. This needs the right to mount.
* file limit: RLIMIT_FSIZE of the living process, so that no file gets longer than a random size.
  This needs no rights. It also strikes the cache of compiled programs.

A run that goes on after a fault is struck again. Each fault aims at a phase, which follows from the
last lines of process 0 and from its files. To strike a compilation, a run is started with a cache
of its own, which none of the other starts has filled.

checks.py says which ends of a run are right, and compares what it leaves with an undisturbed run.
Goodput in steps is the share of the computed steps that count: a step that a resumed run computes
again counts once. Goodput in time is the share of all time that was not lost: the time of the steps
that count, divided by all time. The exit code is 1 if anything is wrong.
"""

import argparse
import contextlib
import itertools
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
from faults.attempt import FATAL, KINDS, PHASES, Attempt, Console, End, Struck
from faults.checks import mistakes_in, wrong_end

from runtime.records import read_lines

SETTINGS = """
    STEPS=40 ROLLOUT_GLOBAL_BATCH_SIZE=4 NUM_PRE_Q=8 TRAIN_MICRO_BATCH_SIZE=16 EVAL_EVERY_STEPS=8
    EVAL_PROMPTS=64 SAVE_EVERY_STEPS=3 SAMPLE_EVERY_STEPS=4 INIT_TIMEOUT_S=300
"""
# What phases are known by, and where results are equal to the bit: no environment changes these.
ALWAYS = "JAX_PLATFORMS=cpu JAX_LOG_COMPILES=1 PRINT_TRAIN_TIME_BREAKDOWN=1 WANDB_MODE=disabled"
# The longest time from the begin of a phase to a fault that aims at it.
DELAY_S = {"start": 8, "compile": 4, "rollout": 0.5, "update": 0.5, "evaluation": 2, "save": 0.2}


class Aim(NamedTuple):
    """The next fault and the phase in which it should strike."""

    kind: str
    phase: str


def aims(rng: random.Random, kinds: list[str]) -> Iterator[Aim]:
    """Faults without end; each phase is as likely as the others, and so is each kind."""
    while True:
        yield Aim(rng.choice(kinds), rng.choice(PHASES[:-1]))


# ---- One start of the command --------------------------------------------------------------------


def disturb(
    attempt: Attempt, first: Aim | None, plan: Iterator[Aim], until: float, rng: random.Random
) -> list[End]:
    """Strikes with the first fault and then with those of the plan; returns how the run has ended.

    until: no more fault strikes after this time.monotonic().
    """
    aim = first
    try:
        while aim and time.monotonic() < until and reach(attempt, aim.phase, rng):
            strike(attempt, aim.kind, rng)
            if aim.kind in FATAL:
                break
            # What begins a run is past when a second fault strikes.
            aim = next((aim for aim in plan if aim.phase not in ("start", "compile")), None)
        while attempt.goes_on():
            pass
    finally:
        ends = attempt.close()
    return ends


def reach(attempt: Attempt, phase: str, rng: random.Random) -> bool:
    """Waits for a random moment of a phase; False: the run has ended before it."""
    first, in_a_step = attempt.consoles[0], phase in ("rollout", "update", "save")
    wanted = first.computed + rng.randrange(6) * in_a_step
    delay = rng.uniform(0, DELAY_S.get(phase, 0))
    while attempt.goes_on():
        if first.computed >= wanted and attempt.phase() == phase:
            end = time.monotonic() + delay
            while time.monotonic() < end and attempt.goes_on():
                pass
            return bool(attempt.alive())
    return False


def strike(attempt: Attempt, kind: str, rng: random.Random) -> None:
    """Strikes one process or all, now."""
    everyone = [*range(len(attempt.consoles))]
    all_of_them = kind == "full disk" or (kind != "silent" and rng.random() < 0.5)
    victims = everyone if all_of_them else [rng.choice(everyone)]
    attempt.struck.append(Struck(kind, attempt.phase(), victims))
    size = int(2 ** rng.uniform(8, 24))  # from 256 bytes to more than a checkpoint
    if kind == "full disk":
        attempt.fill_disk(size)
    elif kind == "file limit":
        attempt.limit_files(victims, size)
    elif kind in ("killed", "stopped"):
        attempt.signal(victims, signal.SIGKILL if kind == "killed" else signal.SIGTERM)
    else:
        attempt.signal(victims, signal.SIGSTOP)
        end, others = time.monotonic() + rng.uniform(0.2, 5), {*everyone} - {*victims}
        while time.monotonic() < end if kind == "frozen" else others & {*attempt.alive()}:
            attempt.goes_on()
        attempt.signal(victims, signal.SIGCONT)


# ---- One run -------------------------------------------------------------------------------------


@dataclass
class Totals:
    """What has happened in several runs, each with so many processes."""

    processes: int
    runs: int = 0
    starts: int = 0
    struck: Counter = field(default_factory=Counter)  # of (kind, phase)
    codes: Counter = field(default_factory=Counter)
    computed: int = 0  # steps, over all starts
    counted: int = 0  # steps
    counted_s: float = 0  # the time of the steps that count
    wall_s: float = 0


def environment(out: Path, cache: Path, seed: int) -> dict[str, str]:
    """The environment of a run with this OUTPUT_DIR, cache of compiled programs and SEED."""
    ours, always = (dict(x.split("=") for x in text.split()) for text in (SETTINGS, ALWAYS))
    given = {"OUTPUT_DIR": str(out), "JAX_COMPILATION_CACHE_DIR": str(cache), "SEED": str(seed)}
    return {**ours, **os.environ, **always, **given}


def run_to_its_end(
    logs: Path, env: dict[str, str], totals: Totals, plan: Iterator[Aim], until: float
) -> tuple[list[str], Console]:
    """Starts a run again and again until all its steps are done, or a start without faults fails.

    logs: their folder. env: of the run. plan: the faults. until: no more fault strikes after this
    time.monotonic(). Returns what was wrong, and the console of process 0 of the last start.
    """
    rng, wrong = random.Random(f"{env['SEED']} {totals.processes}"), []
    cold = {"JAX_COMPILATION_CACHE_DIR": str(logs / "cold_cache")}
    for number in itertools.count(1):
        first = next(plan, None) if time.monotonic() < until else None
        cache = cold if first and first.phase == "compile" else {}
        attempt = Attempt(env | cache, totals.processes, logs / f"start{number}")
        ends = disturb(attempt, first, plan, until, rng)
        totals.starts += 1
        totals.wall_s += time.monotonic() - attempt.began
        totals.computed += ends[0].computed
        totals.struck.update((fault.kind, fault.phase) for fault in attempt.struck)
        codes = [end.code for end in ends]
        totals.codes.update(codes)
        ended = wrong_end(ends, attempt.struck) + ["the run hung"] * attempt.hung
        wrong += [f"start {number}: {text}" for text in ended]
        told = [f"{s.kind} {s.victims} in {s.phase}" for s in attempt.struck] or ["no fault"]
        print(f"{logs.name} start {number}: {'; '.join(told)}: exit {codes}", flush=True)
        if not any(codes) or not attempt.struck:
            break
    records, name = read_lines(Path(env["OUTPUT_DIR"]) / "metrics.jsonl"), "time/train/step_s"
    seconds = [record[name] for record in records if name in record]
    totals.runs, totals.counted = totals.runs + 1, totals.counted + len(seconds)
    totals.counted_s += sum(seconds)
    return wrong, attempt.consoles[0]


# ---- All runs ------------------------------------------------------------------------------------


def table(totals: Totals, straight: Totals) -> str:
    """The faults by kind and phase, and the other figures. straight: of the undisturbed runs."""
    title = f"{totals.processes} process(es): faults"
    rows = [[title, *PHASES, "all"], ["---"] * (len(PHASES) + 2)]
    for kind in KINDS:
        counts = [totals.struck[kind, phase] for phase in PHASES]
        rows.append([kind, *counts, sum(counts)])
    codes = ", ".join(f"{code}: {n}" for code, n in sorted(totals.codes.items()))
    lines = [
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
        f"runs {totals.runs}, starts {totals.starts}, restarts {totals.starts - totals.runs}, "
        f"faults {totals.struck.total()} in {totals.wall_s / 60:.1f} minutes",
        f"exit codes of the processes: {codes}",
        f"goodput in steps: {totals.counted} of {totals.computed} computed = "
        f"{totals.counted / totals.computed:.3f}",
        f"goodput in time, the share that was not lost: {totals.counted_s:.0f} of "
        f"{totals.wall_s:.0f} s = {totals.counted_s / totals.wall_s:.3f} "
        f"(undisturbed runs: {straight.counted_s / straight.wall_s:.3f})",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mounts a file system of 128 MiB as the folder, and yields whether that was possible."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(folder)]
    mounted = bool(shutil.which("mount")) and not subprocess.run(command).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def drill(folder: Path, processes: int, minutes: float, seed: int) -> list[str]:
    """Disturbs runs with so many processes for so many minutes; returns what was wrong."""
    totals, straight, wrong = Totals(processes), Totals(processes), []
    disk, cache = folder / f"disk{processes}", folder / f"cache{processes}"
    kinds = [kind for kind in KINDS if processes > 1 or kind != "silent"]
    with small_disk(disk) as mounted:
        if not mounted:
            print("no right to mount a small disk: only file limits starve the runs")
            kinds.remove("full disk")
        while (left := 60 * minutes - totals.wall_s) > 0:
            number, out = seed + totals.runs, disk / "run"
            logs = folder / f"processes{processes}_seed{number}"
            undisturbed = logs / "undisturbed" / "run"
            env = environment(undisturbed, cache, number)
            found, _ = run_to_its_end(undisturbed.parent, env, straight, iter(()), 0)
            if found:
                raise SystemExit(f"error: an undisturbed run has failed: {found}")
            plan = aims(random.Random(f"aims {number} {processes}"), kinds)
            env, until = environment(out, cache, number), time.monotonic() + left
            found, console = run_to_its_end(logs, env, totals, plan, until)
            if console.done:
                found += mistakes_in(out, undisturbed, not console.unreviewed)
            wrong += [f"WRONG {logs.name}: {text}" for text in found]
            if found:
                print(*wrong[-len(found) :], sep="\n", flush=True)
                shutil.copytree(out, logs / "wrong")
            else:
                shutil.rmtree(undisturbed)
            shutil.rmtree(out)
    print(table(totals, straight), f"wrong: {len(wrong)}", *wrong, sep="\n", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="for how long faults strike")
    parser.add_argument("--processes", choices=["1", "2", "both"], default="both")
    parser.add_argument("--seed", type=int, default=0, help="the SEED of the first run")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="a new folder")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"--out {args.out} is there already; remove it or choose another folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends what it has started, too
    jax.config.update("jax_platforms", "cpu")  # of this process, which reads checkpoints
    logging.getLogger("absl").setLevel(logging.ERROR)
    counts = [1, 2] if args.processes == "both" else [int(args.processes)]
    folder, minutes = args.out.absolute(), args.minutes / len(counts)
    wrong = [text for n in counts for text in drill(folder, n, minutes, args.seed)]
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
