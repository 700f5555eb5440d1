"""Runs the demo while faults strike it at random moments, and checks that no result changes.

    python tools/faults.py --minutes 60 --processes both

The demo is `python train_grpo.py` with the tiny model, as a user starts it, in short runs on a CPU.
Settings of the environment, such as STEPS=80, win over the SETTINGS below. Whenever a run ends, the
same command is started again with the same OUTPUT_DIR, until all its steps are done. Then a run
with the next SEED begins, until the minutes are over. The faults:

* killed: SIGKILL. stopped: SIGTERM. Either strikes one of two processes, or both.
* frozen: SIGSTOP, and SIGCONT up to 5 seconds later.
* silent: SIGSTOP to one of two processes, until the heartbeat's timeout has ended the other one.
* full disk: OUTPUT_DIR is in a tmpfs, and a file fills it up to a random rest. The file is removed
  up to 15 seconds later, or when the run has ended. This needs the right to mount.
* file limit: RLIMIT_FSIZE of the living process, so that no file gets longer than a random size.
  This needs no rights. It also strikes the cache of compiled programs.

A frozen or starved run is often struck again before it ends. Each fault aims at a phase, which
follows from the last lines of process 0 and from its files. To strike a compilation, a run is
started with a cache of its own, which none of the other starts has filled.

Each run is compared with an undisturbed run of the same settings and number of processes:
fault_checks.py says how. The exit codes have to be those of docs/survival.md, an exit code 1 or 2
needs a line that begins with "error:", and no run may print a traceback. Goodput in steps is the
share of the computed steps that count: a step that a resumed run computes again counts once.
Goodput in time is the time of the steps that count, divided by all time.

The exit code is 1 if anything is wrong.
"""

import argparse
import collections
import contextlib
import dataclasses
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

import jax

from runtime.records import read_lines
from tools.fault_attempt import PHASES, Attempt, Struck
from tools.fault_checks import mistakes_in

SETTINGS = dict(
    pair.split("=")
    for pair in """
    STEPS=40 ROLLOUT_GLOBAL_BATCH_SIZE=4 NUM_PRE_Q=8 TRAIN_MICRO_BATCH_SIZE=16 EVAL_EVERY_STEPS=8
    EVAL_PROMPTS=64 SAVE_EVERY_STEPS=3 SAMPLE_EVERY_STEPS=4 INIT_TIMEOUT_S=300
    """.split()
)
ALWAYS = {  # What phases are known by, and where results are equal to the bit.
    "JAX_PLATFORMS": "cpu",
    "JAX_LOG_COMPILES": "1",
    "PRINT_TRAIN_TIME_BREAKDOWN": "1",
    "WANDB_MODE": "disabled",
}
FATAL, STARVING = ("killed", "stopped", "silent"), ("full disk", "file limit")
KINDS = ("killed", "stopped", "frozen", "silent", *STARVING)
# The longest time from the begin of a phase to a fault that aims at it.
DELAY_S = {"start": 8, "compile": 4, "rollout": 0.5, "update": 0.5, "evaluation": 2, "save": 0.2}
DISK_MIB = 128
MOST_STARTS = 25  # of a run; the next start is not disturbed, so that each run ends
HUNG_S = 1800  # a run that is silent for so long does not end by itself


class Aim(NamedTuple):
    """The next fault and the phase in which it should strike."""

    kind: str
    phase: str


def aims(rng: random.Random, kinds: list[str]) -> Iterator[Aim]:
    """Faults without end; each phase is as likely as the others, and so is each kind."""
    while True:
        yield Aim(rng.choice(kinds), rng.choice(PHASES[:-1]))


# ---- One start of the command --------------------------------------------------------------------


class Disturber:
    """Strikes an attempt with faults, and waits until it has ended."""

    def __init__(self, attempt: Attempt, rng: random.Random, filler: Path) -> None:
        """filler: the file that fills the disk."""
        self._attempt, self._rng, self._filler = attempt, rng, filler
        self._relief: float | None = None  # when the run has space again; None: it is not starved
        self.hung = False

    def disturb(self, plan: Iterable[Aim]) -> None:
        """Strikes with the faults of the plan until one of them ends the run."""
        try:
            for aim in plan:
                if not self._reach(aim.phase):
                    break
                self._strike(aim)
                if aim.kind in FATAL:
                    break
            while self._goes_on():
                pass
        finally:
            self._attempt.kill()
            self._relieve()
            for console in self._attempt.consoles:
                console.close()

    def _goes_on(self) -> bool:
        """Waits for a moment; False: all processes have ended."""
        if self._relief is not None and time.monotonic() > self._relief:
            self._relieve()
        if self._attempt.silent_s() > HUNG_S and not self._attempt.over():
            self.hung = True
            self._attempt.kill()
        time.sleep(0.003)
        return not self._attempt.over()

    def _reach(self, phase: str) -> bool:
        """Waits for a random moment of a phase; False: the run has ended before it."""
        first, in_a_step = self._attempt.consoles[0], phase in ("rollout", "update", "save")
        wanted = first.computed + self._rng.randrange(6) * in_a_step
        delay = self._rng.uniform(0, DELAY_S.get(phase, 0))
        while self._goes_on():
            if first.computed >= wanted and self._attempt.phase() == phase:
                end = time.monotonic() + delay
                while time.monotonic() < end and self._goes_on():
                    pass
                return not self._attempt.over()
        return False

    def _strike(self, aim: Aim) -> None:
        attempt, rng, kind = self._attempt, self._rng, aim.kind
        victims = [rng.randrange(len(attempt.consoles))]
        if kind != "silent" and rng.random() < 0.5:
            victims = [*range(len(attempt.consoles))]
        if kind == "full disk":
            victims = [*range(len(attempt.consoles))]
        attempt.struck.append(Struck(kind, attempt.phase(), victims))
        consoles = [attempt.consoles[i] for i in victims]
        if kind in STARVING:
            self._starve(kind, victims)
            return
        first = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM}.get(kind, signal.SIGSTOP)
        for console in consoles:
            attempt.signal(console, first)
        if first == signal.SIGSTOP:
            end, others = time.monotonic() + rng.uniform(0.2, 5), attempt.consoles
            others = [each for each in others if each not in consoles]
            while time.monotonic() < end if kind == "frozen" else self._lives(others):
                self._goes_on()
            for console in consoles:
                attempt.signal(console, signal.SIGCONT)

    def _lives(self, consoles: list) -> bool:
        return not self.hung and any(console.code() is None for console in consoles)

    def _starve(self, kind: str, victims: list[int]) -> None:
        size = int(2 ** self._rng.uniform(8, 24))  # from 256 bytes to more than a checkpoint
        if kind == "full disk":
            self._attempt.fill_disk(self._filler, size)
        else:
            self._attempt.limit_files(victims, size)
        until_its_end = self._rng.random() < 0.3
        self._relief = (
            float("inf") if until_its_end else time.monotonic() + self._rng.uniform(0, 15)
        )

    def _relieve(self) -> None:
        self._relief = None
        self._filler.unlink(missing_ok=True)
        self._attempt.limit_files([*range(len(self._attempt.consoles))], None)


def wrong_end(attempt: Attempt) -> list[str]:
    """What is wrong in how the processes of an attempt have ended and in what they have printed."""
    kinds, wrong, two = [s.kind for s in attempt.struck], [], len(attempt.consoles) > 1
    for i, console in enumerate(attempt.consoles):
        code, errors = console.code(), [e for e in console.errors if e.startswith("error: ")]
        allowed = {0}
        if {*STARVING} & {*kinds}:
            allowed |= {1, 2}
        if two and {*FATAL, *STARVING} & {*kinds}:
            allowed |= {1, 134}
        if "stopped" in kinds:
            allowed |= {143}
        if any(s.kind == "killed" and i in s.victims for s in attempt.struck):
            allowed |= {137}
        if code not in allowed:
            wrong.append(f"process {i} has ended with exit code {code} after {kinds or 'no fault'}")
        if code == 0 and not console.done:
            wrong.append(f"process {i} has ended with exit code 0 and is not done")
        if code in (1, 2) and not errors:
            wrong.append(f"process {i} has ended with exit code {code} and does not say why")
        if code != 134 and any("Traceback" in line for line in console.errors):
            wrong.append(f"process {i} has printed a traceback")
    return wrong


# ---- One run -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Totals:
    """What has happened in all runs with the same number of processes."""

    processes: int
    runs: int = 0
    starts: int = 0
    struck: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    codes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)
    computed: int = 0  # steps, over all starts
    counted: int = 0  # steps
    counted_s: float = 0  # the time of the steps that count
    wall_s: float = 0
    undisturbed_step_s: float = 0
    undisturbed_s: float = 0


def seconds_of_steps(out: Path) -> float:
    records = read_lines(out / "metrics.jsonl", having=["time/train/step_s"])
    return sum(record["time/train/step_s"] for record in records)


def environment(out: Path, cache: Path, seed: int) -> dict[str, str]:
    """The environment of a run. Settings of the user's environment win over SETTINGS."""
    given = {"OUTPUT_DIR": str(out), "JAX_COMPILATION_CACHE_DIR": str(cache), "SEED": str(seed)}
    return {**SETTINGS, **os.environ, **ALWAYS, **given}


def undisturbed_run(folder: Path, env: dict[str, str], totals: Totals) -> None:
    """Makes the run with which disturbed ones are compared. Ends the program if it fails."""
    attempt = Attempt(folder, env, totals.processes, folder.with_name(f"{folder.name}_log"))
    Disturber(attempt, random.Random(0), folder.with_name("none")).disturb([])
    if any(attempt.codes()):
        raise SystemExit(f"error: an undisturbed run has ended with {attempt.codes()}: {folder}")
    totals.undisturbed_s += time.monotonic() - attempt.began
    totals.undisturbed_step_s += seconds_of_steps(folder)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mounts a file system of DISK_MIB as the folder, and yields whether that was possible."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:  # there is no such command
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def disturbed_run(
    folder: Path,
    undisturbed: Path,
    cache: Path,
    seed: int,
    plan: Iterable[Aim],
    until: float,
    totals: Totals,
    on_small_disk: bool = False,
) -> None:
    """Starts a run again and again until all its steps are done, and checks what it leaves.

    folder: of its output and logs; what was wrong stays there. cache: of compiled programs. plan:
    the faults. until: from this time.monotonic() on no more fault strikes. on_small_disk: whether
    the output is on a disk of its own, which a fault can fill; its files are gone at the end.
    """
    rng, plan = random.Random(f"{seed} {totals.processes}"), iter(plan)
    with small_disk(folder / "disk") if on_small_disk else contextlib.nullcontext():
        out, wrong = folder / "disk" / "run", []
        env, cold = environment(out, cache, seed), str(folder / "cold_cache")
        steps, eval_every_steps = int(env["STEPS"]), int(env["EVAL_EVERY_STEPS"])
        for number in range(1, MOST_STARTS + 2):
            aim = next(plan, None) if number <= MOST_STARTS and time.monotonic() < until else None
            where = {"JAX_COMPILATION_CACHE_DIR": cold} if aim and aim.phase == "compile" else {}
            attempt = Attempt(out, env | where, totals.processes, folder / f"start{number}")
            disturber = Disturber(attempt, rng, folder / "disk" / "filler")
            disturber.disturb(later_aims(aim, plan, until))
            ended = [*wrong_end(attempt), *["the run hung"] * disturber.hung]
            wrong += [f"start {number}: {text}" for text in ended]
            count(attempt, totals)
            codes = ",".join(map(str, attempt.codes()))
            told = [f"{s.kind} {s.victims} in {s.phase}" for s in attempt.struck] or ["no fault"]
            print(f"{folder.name} start {number}: {'; '.join(told)}: exit {codes}", flush=True)
            if not any(attempt.codes()):
                break
        totals.runs, totals.counted = totals.runs + 1, totals.counted + steps
        if any(attempt.codes()):
            wrong.append(f"the run did not end: {attempt.codes()}")
        else:
            totals.counted_s += seconds_of_steps(out)
            wrong += mistakes_in(out, undisturbed, steps, eval_every_steps)
        totals.wrong += [f"{folder.name}: {text}" for text in wrong]
        if wrong:
            print("\n".join(f"WRONG {folder.name}: {text}" for text in wrong), flush=True)
            shutil.copytree(out, folder / "wrong", dirs_exist_ok=True)


def later_aims(first: Aim | None, plan: Iterator[Aim], until: float) -> Iterator[Aim]:
    """The faults of one start. What begins a run is past when a second fault strikes."""
    if first:
        yield first
        for aim in plan:
            if time.monotonic() > until:
                return
            if aim.phase not in ("start", "compile"):
                yield aim


def count(attempt: Attempt, totals: Totals) -> None:
    totals.starts += 1
    totals.wall_s += time.monotonic() - attempt.began
    totals.computed += attempt.consoles[0].computed
    totals.struck.update((s.kind, s.phase) for s in attempt.struck)
    totals.codes.update(attempt.codes())


# ---- All runs ------------------------------------------------------------------------------------


def table(totals: Totals) -> str:
    """The faults by kind and phase, and the other figures."""
    phases = [phase for phase in PHASES if any(p == phase for _, p in totals.struck)]
    lines = [f"| {totals.processes} process(es): faults | {' | '.join(phases)} | all |"]
    lines.append("|---" * (len(phases) + 2) + "|")
    for kind in KINDS:
        row = [totals.struck[kind, phase] for phase in phases]
        if any(row):
            lines.append(f"| {kind} | {' | '.join(map(str, row))} | {sum(row)} |")
    codes = ", ".join(f"{code}: {n}" for code, n in sorted(totals.codes.items()))
    steps = totals.counted / max(totals.computed, 1)
    seconds = totals.counted_s / max(totals.wall_s, 1e-9)
    straight = totals.undisturbed_step_s / max(totals.undisturbed_s, 1e-9)
    return "\n".join(
        [
            *lines,
            f"runs {totals.runs}, starts {totals.starts}, restarts {totals.starts - totals.runs}, "
            f"faults {sum(totals.struck.values())} in {totals.wall_s / 60:.1f} minutes",
            f"exit codes of the processes: {codes}",
            f"goodput in steps: {totals.counted} of {totals.computed} computed = {steps:.3f}",
            f"goodput in time: {totals.counted_s:.0f} of {totals.wall_s:.0f} s = {seconds:.3f} "
            f"(undisturbed runs: {straight:.3f})",
            f"wrong: {len(totals.wrong)}",
            *totals.wrong,
        ]
    )


def drill(folder: Path, processes: int, minutes: float, seed: int) -> Totals:
    """Disturbs runs with so many processes for so many minutes."""
    totals = Totals(processes)
    kinds = [kind for kind in KINDS if processes > 1 or kind != "silent"]
    with small_disk(folder / "probe") as mounted:
        if not mounted:
            print("no right to mount a small disk: only file limits starve the runs")
            kinds.remove("full disk")
    end, number = time.monotonic() + 60 * minutes, seed
    while time.monotonic() < end:
        name, cache = folder / f"processes{processes}_seed{number}", folder / f"cache{processes}"
        undisturbed, began = name.with_name(f"{name.name}_undisturbed"), time.monotonic()
        undisturbed_run(undisturbed, environment(undisturbed, cache, number), totals)
        end += time.monotonic() - began  # the minutes are those of faults
        plan = aims(random.Random(f"aims {number} {processes}"), kinds)
        before = len(totals.wrong)
        disturbed_run(name, undisturbed, cache, number, plan, end, totals, "full disk" in kinds)
        if len(totals.wrong) == before:
            shutil.rmtree(name / "disk")
            shutil.rmtree(undisturbed)
        number += 1
    print(table(totals), flush=True)
    return totals


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
    wrong = [text for n in counts for text in drill(folder, n, minutes, args.seed).wrong]
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
