"""Runs the demo while faults strike it at random moments, and checks that no result changes.

    python tests/faults/random_faults.py --minutes 60 --processes both --faults 30

The demo is train_grpo.py with the tiny model, in short runs on a CPU. Whenever a run ends, the same
command is started again with the same OUTPUT_DIR, until all its steps are done. Then what it leaves
is compared with an undisturbed run, and a run with the next SEED begins, until the minutes are
over or so many faults have struck. The faults, which strike one of two processes or both:

* killed: SIGKILL. stopped: SIGTERM. interrupted: SIGINT. hung up: SIGHUP.
* frozen: SIGSTOP, and SIGCONT up to 5 seconds later.
* silent: SIGSTOP to one of two processes, until the heartbeat's timeout has ended the other one.
* starved: no file of the process gets longer than a random size (RLIMIT_FSIZE).
* damaged: SIGKILL to all, and a file of a checkpoint, of the export or of the run is emptied, cut,
  deleted, or a byte of it changes. If the next start refuses it, the file is put back.

A fault comes a random time after a line that process 0 prints in a phase, or after the export has
begun. After each end all checkpoints but those that were damaged must match their checksums, the
newest must not be older than the steps allow, and the next start must resume from it. Goodput is
the share of the computed steps that count: a step that a resumed run computes again counts once.
The exit code is 1 if anything is wrong.
"""

import argparse
import itertools
import json
import logging
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

import numpy as np
from runs import checkpoint_arrays, environment, metric_records, start, start_two

SIGNALS = {"killed": signal.SIGKILL, "damaged": signal.SIGKILL, "stopped": signal.SIGTERM}
SIGNALS |= {"interrupted": signal.SIGINT, "hung up": signal.SIGHUP}
KINDS = (*SIGNALS, "frozen", "silent", "starved")
# A line of each phase, and the longest time in seconds from it to a fault. The export writes its
# files after the line.
PHASES = {"start": ("^backend=", 5), "compile": ("^output=", 5), "step": ("^step=", 0.5)}
PHASES |= {"evaluation": ("^eval step=", 1), "end": ("^verdict", 0.1)}
PHASES |= {"export": ("^(eval step=|resumed after ){STEPS} ", 0.1)}
SETTINGS = environment(
    """STEPS=40 ROLLOUT_GLOBAL_BATCH_SIZE=4 NUM_PRE_Q=8 TRAIN_MICRO_BATCH_SIZE=16 REWARD_FN=
    EVAL_EVERY_STEPS=8 EVAL_PROMPTS=64 SAVE_EVERY_STEPS=3 SAMPLE_EVERY_STEPS=4 REWARD_WEIGHTS=
    INIT_TIMEOUT_S=900 WANDB_MODE=disabled"""
)
HUNG_S = 1800  # a run that takes longer after its last fault does not end by itself
HUNG = f"it had not ended after {HUNG_S} s"


class Fault(NamedTuple):
    """What strikes, and in which phase."""

    kind: str
    phase: str


def random_faults(
    rng: random.Random, processes: int, kinds: list[str], phases: list[str]
) -> Iterator[Fault]:
    """Faults without end, in random order; each kind comes as often as the others in each phase."""
    kinds = [kind for kind in kinds if processes > 1 or kind != "silent"]
    pairs = [*itertools.product(kinds, phases)]
    while True:
        yield from itertools.starmap(Fault, rng.sample(pairs, len(pairs)))


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
        words = words.replace("{STEPS}", env["STEPS"])
        exported = changed_at(out / "hf")
        to_come = 1 + rng.randrange(6) * (fault.phase == "step")
        while to_come and (line := running[0].stdout.readline().decode()):
            lines.append(line)
            to_come -= bool(re.match(words, line))
        if to_come:
            break  # the run has ended before this phase
        while fault.phase == "export" and changed_at(out / "hf") == exported:
            if running[0].poll() is not None:
                break
            time.sleep(0.001)
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
            texts = *process.communicate(), HUNG.encode()
        stdout, *errors = (text.decode() for text in texts)
        read = lines if i == 0 else []
        ends.append(End(process.returncode, [*read, *stdout.splitlines()], "".join(errors)))
    return struck, ends


def changed_at(folder: Path) -> int:
    return folder.stat().st_mtime_ns if folder.exists() else 0


def strike(running: list[subprocess.Popen], kind: str, rng: random.Random) -> None:
    """Strikes one process or all, now."""
    both = kind == "damaged" or (kind != "silent" and rng.random() < 0.5)
    victims = running if both else [rng.choice(running)]
    size = int(2 ** rng.uniform(8, 24))  # from 256 bytes to more than a checkpoint
    for victim in victims:
        if victim.poll() is None:
            if kind == "starved":
                resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            else:
                victim.send_signal(SIGNALS.get(kind, signal.SIGSTOP))
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
    heeded = {128 + number for number in SIGNALS.values() if number != signal.SIGKILL}
    for number in {SIGNALS[kind] for kind in kinds & SIGNALS.keys()}:
        allowed |= {-number, 128 + number} - {128 + signal.SIGKILL}
    if "starved" in kinds:
        allowed |= {1, 2}
    if "damage" in kinds:  # it was damaged before this start, which may refuse it
        allowed |= {2}
    wrong = []
    for i, end in enumerate(ends):
        text = "\n".join(end.lines)
        if end.errors.endswith(HUNG):
            wrong.append(f"process {i}: {HUNG}")
        if end.code not in allowed:
            wrong.append(f"process {i} has ended with exit code {end.code}")
        # A signal that comes after this line is still acknowledged by one of its own.
        if end.code == 0 and not any(line.startswith("DONE: ") for line in end.lines[-3:]):
            wrong.append(f"process {i} has ended with exit code 0 and is not done")
        # Threads of orbax may still print when the line is there.
        says_why = re.search("^error: ", "\n".join(end.errors.splitlines()[-8:]), re.M)
        if end.code in (1, 2) and not says_why:
            wrong.append(f"process {i} has exit code {end.code}, and no line at the end says why")
        if end.code in heeded and "Traceback" in end.errors:
            wrong.append(f"process {i} has printed a traceback")
        for steps, saved in re.findall(r"^STOPPED: .*steps=(\d+) saved_step=(\w+)", text, re.M):
            if steps != saved and steps != "0":
                wrong.append(f"process {i} has stopped after {steps} steps and saved {saved}")
    return wrong


# ---- Damages -------------------------------------------------------------------------------------


class Damage(NamedTuple):
    """A file of a run that we have damaged."""

    file: Path
    how: str
    before: bytes
    after: bytes | None  # None: it was deleted

    def is_there(self) -> bool:
        """Whether the run has not replaced the file, nor deleted the checkpoint that it is of."""
        content = self.file.read_bytes() if self.file.exists() else None
        return self.file.parent.exists() and content == self.after


def damage_file(out: Path, rng: random.Random) -> Damage | None:
    """Damages a file of the run's checkpoints, of its export or of the run; None if it has none."""
    checkpoints = sorted(path for path in (out / "checkpoints").glob("*") if path.name.isdecimal())
    single = [out / name for name in ("run.json", ".saved", "config.yaml", "summary.json")]
    groups = [[*path.rglob("*")] for path in (*checkpoints, out / "hf")] + [single]
    groups = [files for group in groups if (files := sorted(x for x in group if x.is_file()))]
    if not groups:
        return None
    file, how = rng.choice(rng.choice(groups)), rng.choice(("emptied", "cut", "changed", "deleted"))
    before, at = file.read_bytes(), rng.random()
    i = int(at * len(before))
    changed = before[:i] + bytes(x ^ 0x55 for x in before[i : i + 1]) + before[i + 1 :]
    after = {"emptied": b"", "cut": before[:i], "changed": changed}.get(how)
    file.unlink() if after is None else file.write_bytes(after)
    return Damage(file, how, before, after)


def add_damage(damages: list[Damage], made: Damage) -> list[Damage]:
    """The damages with one more; one of the same file keeps what this file was before the first."""
    whole = next((x.before for x in damages if x.file == made.file), made.before)
    return [x for x in damages if x.file != made.file] + [made._replace(before=whole)]


# ---- What a run leaves ---------------------------------------------------------------------------


def checksum(x: np.ndarray) -> int:
    """The checksum that infra/checkpoint.py documents, by NumPy."""
    bits = x.reshape(-1).view(f"u{x.dtype.itemsize}").astype(np.uint64)
    return int((bits * (2 * np.arange(bits.size, dtype=np.uint64) + 1)).sum() % 2**32)


def read_checkpoints(out: Path, damaged: set[int] = frozenset()) -> dict[int, str]:
    """{step: why it cannot be read, or ""} of the checkpoints that look complete. damaged: steps of
    those that are not read."""
    found = {i: "damaged" for i in damaged if (out / "checkpoints" / str(i)).exists()}
    for path in (out / "checkpoints").glob("*"):
        if path.name.isdecimal() and int(path.name) not in damaged:
            try:
                record = json.loads((path / "record" / "metadata").read_text())
                sums = map(checksum, checkpoint_arrays(out, int(path.name)).values())
                is_same = sorted(sums) == sorted(record["arrays"].values())
                found[int(path.name)] = "" if is_same else "an array has another checksum"
            except Exception as error:  # orbax's errors of damaged files are of any kind
                found[int(path.name)] = repr(error)[:200]
    return found


def wrong_checkpoints(
    out: Path, end: End, before: dict[int, str], damages: list[Damage], save_every: int
) -> tuple[dict[int, str], list[str]]:
    """The checkpoints after a start, see read_checkpoints, and what is wrong with them.

    end: of process 0. before: the checkpoints before this start. damages: of before it.
    """
    folder, text = out / "checkpoints", "\n".join(end.lines)
    damaged = {
        int(x.file.relative_to(folder).parts[0]) for x in damages if folder in x.file.parents
    }
    after = read_checkpoints(out, damaged)
    wrong = [f"checkpoint {i}: {why}" for i, why in after.items() if why and i not in damaged]
    for step in map(int, re.findall(r"checkpoint \S+/(\d+) is damaged and passed over", text)):
        if step not in damaged:
            wrong.append(f"checkpoint {step} was passed over")
    newest = max((i for i, why in before.items() if i not in damaged), default=0)
    resumed = [int(x) for x in re.findall(r"^resumed after (\d+) of", text, re.M)]
    begun = re.search("^step=|^eval step=", text, re.M)
    if (resumed and resumed[0] < newest) or (newest and begun and not resumed):
        wrong.append(f"it had checkpoint {newest} and resumed from {resumed or 'none'}")
    printed = [int(x) + 1 for x in re.findall(r"^step=(\d+) ", text, re.M)]
    at_least = max(printed, default=0) // save_every * save_every - save_every
    if at_least > 0 and max(after, default=0) < at_least:
        wrong.append(f"{max(printed)} steps were done, and {max(after, default=0)} are saved")
    return after, wrong


def mistakes_in(out: Path, undisturbed: Path) -> list[str]:
    """A sentence for everything in the folder of a run that is not as the undisturbed run left it;
    what depends on the clock and on names of folders is left out."""
    exported = [path.relative_to(undisturbed) for path in sorted((undisturbed / "hf").iterdir())]
    kept = [*map(Path, ("metrics.jsonl", "eval.jsonl", "samples.jsonl")), *exported]
    last = max(int(path.name) for path in (undisturbed / "checkpoints").glob("[0-9]*"))
    documents = [*map(Path, ("run.json", "summary.json", f"checkpoints/{last}/record/metadata"))]
    if missing := [name for name in (*kept, *documents) if not (out / name).is_file()]:
        return [f"{name} is missing" for name in missing]
    records = [
        {f"line {i}": x for i, x in enumerate(metric_records(x))} for x in (out, undisturbed)
    ]
    wrong = differences("metrics.jsonl", *records)
    for name in kept[1:]:
        if (out / name).read_bytes() != (undisturbed / name).read_bytes():
            wrong.append(f"{name} has other bytes")
    for folder in (Path(), Path("checkpoints"), Path("hf")):
        known, names = ({x.name for x in (each / folder).iterdir()} for each in (undisturbed, out))
        # A signal saves checkpoints that the undisturbed run has not made.
        left = sorted(name for name in names - known if not name.isdecimal())
        wrong += [f"{folder / name} is left over" for name in left]
    for name in documents:
        values = [json.loads((each / name).read_text()) for each in (out, undisturbed)]
        for each in values:
            for clock in ("run_id", "sha256", "last", "settings", "lengths"):
                each.pop(clock, None)
            # A run that is stopped after its last step saves it before it is evaluated.
            for evaluation in ("accuracy", "best_step", "best_accuracy"):
                each.pop(evaluation, None)
        wrong += differences(str(name), *values)
    arrays = [checkpoint_arrays(each, last) for each in (out, undisturbed)]
    return wrong + differences(
        f"checkpoint {last}", *({name: x.tobytes() for name, x in each.items()} for each in arrays)
    )


def differences(what: str, ours: dict, theirs: dict) -> list[str]:
    """A sentence for each of the first five names whose values differ."""
    names = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    return [f"{what}: {name} is another" for name in names[:5]]


# ---- Runs ----------------------------------------------------------------------------------------


class Totals:
    """What has happened in several runs."""

    def __init__(self) -> None:
        self.struck: Counter = Counter()  # of Fault
        self.outcomes: Counter = Counter()  # of (kind, what the exit codes were)
        self.codes: Counter = Counter()  # of all processes
        self.steps: Counter = Counter()  # "computed" and "counted"


def run_to_its_end(
    out: Path, env: dict[str, str], processes: int, faults: Iterator[Fault], totals: Totals
) -> list[str]:
    """Starts a run again and again until all its steps are done, or a start without faults fails;
    returns what was wrong."""
    rng, wrong = random.Random(f"{env['SEED']} {processes}"), []
    damages: list[Damage] = []  # those that no run has repaired
    checkpoints: dict[int, str] = {}
    for number in itertools.count(1):
        began, damages = time.monotonic(), [x for x in damages if x.is_there()]
        struck, ends = run_once(out, env, processes, faults, rng)
        codes, kinds = [end.code for end in ends], {fault.kind for fault in struck}
        every = int(env["SAVE_EVERY_STEPS"])
        checkpoints, found = wrong_checkpoints(out, ends[0], checkpoints, damages, every)
        found += wrong_ends(ends, kinds | ({"damage"} if damages else set()))
        wrong += [f"start {number} of {out}: {text}\n{ends}" for text in found]
        totals.struck.update(struck)
        totals.codes.update(codes)
        totals.steps["computed"] += sum(line.startswith("step=") for line in ends[0].lines)
        refused = damages and 2 in codes
        told = "; ".join(f"{kind} in {phase}" for kind, phase in struck) or "no fault"
        told += f": exit {codes}, checkpoints {sorted(checkpoints)}"
        told += ", a damage was refused" * bool(refused)
        text = "\n".join(ends[0].lines)
        told += ", a damage was passed over" * ("is damaged and passed over" in text)
        for x in damages if refused else ():
            x.file.parent.mkdir(parents=True, exist_ok=True)
            x.file.write_bytes(x.before)
        damages = [] if refused else [x for x in damages if x.is_there()]
        if "damaged" in kinds and (made := damage_file(out, rng)):
            damages = add_damage(damages, made)
            told += f", {made.file.relative_to(out)} is {made.how}"
        totals.outcomes.update((kind, f"exit {sorted({*codes})}") for kind in kinds)
        told += f", {len(found)} wrong, {time.monotonic() - began:.0f} s"
        print(f"{out.name} start {number}: fault {totals.struck.total()}, {told}", flush=True)
        for line in found:
            print(f"    WRONG: {line}", flush=True)
        if not any(codes) and not damages or not (struck or refused):
            totals.steps["counted"] += int(env["STEPS"])
            return wrong


def drill(folder: Path, processes: int, args: argparse.Namespace) -> list[str]:
    """Disturbs runs with so many processes; returns what was wrong."""
    totals, wrong = Totals(), []
    end = time.monotonic() + 60 * args.minutes

    def goes_on(_: object) -> bool:
        return time.monotonic() < end and totals.struck.total() < args.faults

    for number in itertools.takewhile(goes_on, itertools.count(args.seed)):
        env = SETTINGS | {"SEED": str(number), "STEPS": str(args.steps)}
        ours, theirs = (folder / f"{name}{processes}_{number}" for name in ("run", "undisturbed"))
        failed = run_to_its_end(theirs, env, processes, iter(()), Totals())
        if failed:
            return failed
        chosen = random_faults(random.Random(number), processes, args.kinds, args.phases)
        faults = itertools.takewhile(goes_on, chosen)
        wrong += run_to_its_end(ours, env, processes, faults, totals)
        mistakes = mistakes_in(ours, theirs)
        wrong += [f"{ours}: {text}" for text in mistakes]
        told = "; ".join(mistakes) or "it equals the undisturbed run"
        print(f"{ours.name}: {told}", flush=True)
    counts = ", ".join(f"{kind} in {phase} {n}" for (kind, phase), n in totals.struck.items())
    print(f"{processes} process(es): {totals.struck.total()} faults: {counts}")
    for (kind, outcome), n in sorted(totals.outcomes.items()):
        print(f"{kind}: {n} x {outcome}")
    print(f"exit codes: {dict(totals.codes)}; steps: {dict(totals.steps)}", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="for how long faults strike")
    parser.add_argument(
        "--faults", type=int, default=10**6, help="the most of them, with 1 and with 2"
    )
    parser.add_argument("--steps", type=int, default=40, help="of a run")
    parser.add_argument("--processes", choices=["1", "2", "both"], default="both")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=[*PHASES])
    parser.add_argument("--seed", type=int, default=0, help="the SEED of the first run")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # also of this process, which reads checkpoints
    logging.getLogger("absl").setLevel(logging.ERROR)
    for number in (signal.SIGINT, signal.SIGHUP):  # a child of `nohup` and `&` would ignore them
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    counts = [1, 2] if args.processes == "both" else [int(args.processes)]
    args.minutes /= len(counts)
    folder = Path(tempfile.mkdtemp(prefix="faults_"))
    wrong = [text for n in counts for text in drill(folder, n, args)]
    print(f"wrong: {len(wrong)}; the runs are in {folder}", *wrong, sep="\n")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
