"""Whether and where a run goes on: its folders, which checkpoint, and how a run begins anew."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from runtime import processes
from runtime.checkpoint import Checkpoints
from runtime.mistakes import UserMistake
from runtime.packing import Widths
from runtime.run_log import FILES, replace_file

SCHEDULE_END = "LR_DECAY_STEPS (else STEPS)"  # in made_with: the step at which the schedule ends
LOCK = ".lock"  # a file in the folders of a run; process 0 locks it for as long as it lives


@dataclasses.dataclass
class Progress:
    """How far a run is; the record of a checkpoint holds all of it."""

    step: int = 0  # steps done
    rounds: int = 0  # rounds of sampling done; each takes the next prompts
    not_finite: int = 0  # steps in a row whose loss or gradient was not finite
    evals: dict[int, float] = dataclasses.field(default_factory=dict)  # accuracy at each step
    wandb_id: str = ""
    widths: list[Widths] = dataclasses.field(default_factory=list)  # of all rows of updates so far
    forked_from: str = ""  # the checkpoint of another run with which this run began
    waiting: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # see RunLog.waiting


# ---- Folders -------------------------------------------------------------------------------------


def output_folder(output_dir: str, name: str) -> Path:
    """OUTPUT_DIR, or a new folder NAME_UTC, the same on all processes; this run holds it."""
    chosen = ""
    with processes.told_by_all():
        if jax.process_index() == 0:
            chosen = output_dir or new_folder(name)
            hold(Path(chosen), f"OUTPUT_DIR={chosen}")
    return Path(processes.gather_texts(chosen)[0])


def new_folder(name: str) -> str:
    """Makes NAME_UTC, or NAME_UTC_2 if another run has made it in the same second."""
    start = f"{name}_{datetime.now(UTC):%Y%m%d_%H%M%S}"
    for number in itertools.count(1):
        folder = Path(start if number == 1 else f"{start}_{number}")
        try:
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserMistake(f"OUTPUT_DIR={folder} cannot be written: {error.strerror}") from None


def hold(folder: Path, name: str) -> None:
    """Makes the folder and locks it against other runs, until this process ends in any way.

    name: the setting and its value. Raises UserMistake if another run holds the folder, or if it
    cannot be written.
    """
    import fcntl  # Windows has none, but there only config.py has to run

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # not inherited by children
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(lock, 200, 0).decode(errors="replace")
            raise UserMistake(
                f"{name} belongs to another run, which is alive: {who}. Choose another folder, or "
                f"wait until that run has ended"
            ) from None
        except OSError as error:  # some network file systems have no locks
            why = f"{name} cannot be locked: {error.strerror}"
            print(f"{why}; nothing stops a second run in this folder", flush=True)
            return
        if os.fstat(lock).st_nlink == 0:  # another run, which did not begin, has removed the file
            os.close(lock)
            return hold(folder, name)
        os.ftruncate(lock, 0)
        os.pwrite(lock, this_process().encode(), 0)
    except OSError as error:
        raise UserMistake(f"{name} cannot be written: {error.strerror}") from None


def this_process() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def leave(*folders: Path) -> None:
    """Removes each folder in which this process has left only a lock, as its run does not begin."""
    for folder in folders:
        if folder.is_dir() and [file.name for file in folder.iterdir()] == [LOCK]:
            if (folder / LOCK).read_text(errors="replace") == this_process():
                (folder / LOCK).unlink()
                with contextlib.suppress(OSError):  # where something else is mounted
                    folder.rmdir()


def open_checkpoints(
    out: Path, checkpoint_dir: str, save_every_steps: int, save_keep: int
) -> tuple[Checkpoints, bool]:
    """The run's checkpoints, and whether all processes reach their folder.

    If they do, this run holds the folder; if they do not, the run saves no checkpoints. Raises
    UserMistake for a folder that cannot be used.
    """
    checkpoints = Checkpoints(checkpoint_dir or str(out / "checkpoints"), save_keep)
    if "://" in checkpoints.folder:
        with processes.told_by_all():
            checkpoints.stop_if_out_of_reach()
        return checkpoints, True
    folder, alone = Path(checkpoints.folder), jax.process_count() == 1
    mark = folder / f".seen_{processes.gather_texts(datetime.now(UTC).isoformat())[0]}"
    with processes.told_by_all():
        used = save_every_steps > 0 or folder.is_dir() or not alone
        if jax.process_index() == 0 and used:
            name = f"CHECKPOINT_DIR={folder}" if checkpoint_dir else f"OUTPUT_DIR={out}"
            if folder.resolve() != out.resolve():
                hold(folder, name)
            mark.touch()
    reachable = all(processes.gather_texts("yes" if mark.exists() or alone else ""))
    if jax.process_index() == 0:
        mark.unlink(missing_ok=True)
        if not reachable:
            leave(folder)
    if not reachable and save_every_steps:
        checkpoints.say(
            f"no checkpoints: {folder} is not the same folder on all hosts; set CHECKPOINT_DIR to "
            f"one they share, such as gs://bucket/folder"
        )
    return checkpoints, reachable


# ---- A run that is finished ----------------------------------------------------------------------


def is_finished(cfg: Any, made_with: Mapping[str, str]) -> bool:
    """True if OUTPUT_DIR holds this run with all its steps, evaluations and the export done.

    Raises UserMistake if it holds another run, as stop_if_another does.
    """
    text = ""
    file = Path(cfg.output_dir) / "finished"
    if cfg.output_dir and cfg.resume == "auto" and cfg.steps and file.is_file():
        text = file.read_text(encoding="utf-8")
    if not (text := processes.gather_texts(text)[0]):
        return False
    try:
        done = json.loads(text)
    except ValueError as error:
        raise UserMistake(f"{file} is damaged: {error}; remove this file to go on") from None
    if done["step"] < cfg.steps:
        return False
    stop_if_another(done, made_with, cfg.resume_force)
    return True


def finished_line(cfg: Any) -> str:
    """The line about a run that is finished, with what the user sets to train longer.

    A resumed run keeps the end of the schedule, after which only a constant rate is above 0.
    """
    line = f"OUTPUT_DIR={cfg.output_dir}: all STEPS={cfg.steps} are done. To train longer, set "
    if cfg.lr_schedule == "constant":
        ends_with_steps = cfg.warmup_ratio > 0 and not cfg.lr_decay_steps
        end = f" and LR_DECAY_STEPS={cfg.steps}" if ends_with_steps else ""
        return f"{line}a larger STEPS{end}"
    if cfg.lr_decay_steps > cfg.steps:
        return f"{line}a larger STEPS"
    return (
        f"{line}a larger STEPS{' and LR_DECAY_STEPS' * (cfg.lr_decay_steps > 0)}, and "
        f"RESUME_FORCE=1 for the longer schedule of the learning rate; with "
        f"LR_DECAY_STEPS={cfg.lr_decay_steps or cfg.steps} instead, it is 0 in the added steps"
    )


def mark_finished(out: Path, steps: int, made_with: Mapping[str, str]) -> None:
    """Notes in the run's folder that all is done, so that the same command does nothing again.

    Raises OSError.
    """
    if jax.process_index() == 0:
        done = {"step": steps, "made_with": made_with}
        try:
            replace_file(out / "finished", json.dumps(done) + "\n")
        except OSError as error:
            raise OSError(f"{out}/finished: {error.strerror}") from None


def stop_if_another(
    record: Mapping[str, Any], made_with: Mapping[str, str], resume_force: bool
) -> None:
    """Raises UserMistake naming what has changed since the record, unless RESUME_FORCE=1.

    made_with: all that the results follow from, now.
    """
    before = record["made_with"]
    changed = [
        f"{name} was {before.get(name, 'not there')} and is {made_with.get(name, 'not there')}"
        for name in {**before, **made_with}
        if before.get(name) != made_with.get(name)
    ]
    if not changed:
        return
    text = f"step {record['step']} was made with other settings or files: {'; '.join(changed[:5])}"
    if not resume_force:
        end = before.get(SCHEDULE_END, "0")
        back = f" with LR_DECAY_STEPS={end}" if SCHEDULE_END in text and end != "0" else ""
        raise UserMistake(
            f"{text}; set it back{back}, or RESUME_FORCE=1 to go on, or RESUME=never to begin anew"
        )
    print(f"RESUME_FORCE=1: {text}", flush=True)


# ---- The checkpoint that a run begins with -------------------------------------------------------


def restore(
    cfg: Any,
    checkpoints: Checkpoints,
    out: Path,
    reachable: bool,
    wanted: Any,
    made_with: Mapping[str, str],
) -> tuple[Any, Progress] | None:
    """The arrays and the progress of the checkpoint that RESUME asks for; None: begin anew.

    What an earlier run has left of later steps is set aside in `out`. reachable: whether all
    processes see the folder of the checkpoints. wanted: shapes, dtypes and shardings of the arrays.
    made_with: all that the results follow from.
    Raises UserMistake for a checkpoint of another run, and for a RESUME that names no checkpoint.
    """
    source, steps = checkpoint_source(cfg, checkpoints) if reachable else (None, None)
    check = functools.partial(stop_if_unusable, cfg.steps, cfg.resume_force, wanted, made_with)
    found = source.restore(wanted, check, steps) if source else None
    if cfg.resume not in ("auto", "never") and found is None:
        why = "is not the folder of a complete checkpoint"
        if not reachable:
            why = f"needs a folder for checkpoints that all hosts see; {checkpoints.folder} is none"
        raise UserMistake(f"RESUME={cfg.resume} {why}")
    aside = out / f"earlier_{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    with processes.told_by_all():
        if jax.process_index() == 0:
            outputs = (*FILES, "summary.json", "report.html", "hf", "wandb")
            make_way(out, aside, () if found else outputs)
    if not found:
        if reachable:
            checkpoints.set_aside(-1, aside)
        return None
    arrays, record = found
    names = [field.name for field in dataclasses.fields(Progress) if field.name in record]
    saved = {name: record[name] for name in names}  # old records do not have all of them
    evals = {int(s): a for s, a in record["evals"]}
    widths = [Widths(*w) for w in record.get("widths", [])]
    progress = Progress(**saved | {"evals": evals, "widths": widths})
    checkpoints.say(f"resumed after step {progress.step} of {cfg.steps}")
    same_run = source.folder == checkpoints.folder
    if not same_run:  # W&B has the other run, too
        progress.wandb_id, progress.waiting = "", {}
        progress.forked_from = f"{source.folder}/{progress.step}"
    checkpoints.newest = progress.step if same_run else -1
    checkpoints.set_aside(checkpoints.newest, aside)
    return arrays, progress


def checkpoint_source(
    cfg: Any, checkpoints: Checkpoints
) -> tuple[Checkpoints | None, list[int] | None]:
    """The checkpoints among which RESUME chooses, and the only steps that may be chosen."""
    if cfg.resume == "never":
        return None, None
    if cfg.resume == "auto":
        return (checkpoints if cfg.output_dir or cfg.checkpoint_dir else None), None
    folder, _, last = cfg.resume.rstrip("/").rpartition("/")
    steps = [int(last)] if last.isdecimal() else None
    if steps is None:
        inside = Path(cfg.resume) / "checkpoints"
        folder = str(inside) if inside.is_dir() else cfg.resume
    there = Checkpoints(folder or ".", read_only=True)
    return (checkpoints if there.folder == checkpoints.folder else there), steps


def stop_if_unusable(
    steps: int,
    resume_force: bool,
    wanted: Any,
    made_with: Mapping[str, str],
    record: Mapping[str, Any],
) -> None:
    """Raises UserMistake for a checkpoint of another run, or with other arrays than this run's.

    record: of the checkpoint.
    """
    step = record["step"]
    if steps < step:
        raise UserMistake(f"STEPS={steps}, and the checkpoint is after step {step}; raise it")
    stop_if_another(record, made_with, resume_force)
    stop_if_other_arrays(wanted, record)
    shapes = Checkpoints.shapes(wanted)
    if extra := [text for text in record["arrays"] if text not in shapes]:
        raise UserMistake(
            f"the checkpoint of step {step} has {extra[0]}, unused by this run: it was saved with "
            f"other settings or by another version of the code; RESUME=never begins anew"
        )
    before, now = record["versions"], processes.versions()
    if old := [f"{name}={before.get(name)}" for name in now if before.get(name) != now[name]]:
        print(f"the checkpoint was made with {' '.join(old)}", flush=True)


def stop_if_other_arrays(wanted: Any, record: Mapping[str, Any]) -> None:
    """Raises UserMistake if the checkpoint with this record lacks one of the wanted arrays."""
    shapes = Checkpoints.shapes(wanted)
    if missing := [text for text in shapes if text not in record["arrays"]]:
        raise UserMistake(
            f"the checkpoint of step {record['step']} has no array {missing[0]}: MODEL_PATH, "
            f"OPTIMIZER and BETA have to be those of its run"
        )


def make_way(out: Path, aside: Path, names: Sequence[str]) -> None:
    """Moves these outputs of an earlier run from `out` to `aside`; it is no longer finished."""
    try:
        if (out / "finished").exists():
            (out / "finished").unlink()
        for old in [out / name for name in names if (out / name).exists()]:
            aside.mkdir(parents=True, exist_ok=True)
            old.rename(aside / old.name)
    except OSError as error:
        raise UserMistake(f"OUTPUT_DIR={out} cannot be written: {error.strerror}") from None


def record_of(progress: Progress, made_with: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint keeps beside its arrays, in JSON values."""
    evals = [[step, accuracy] for step, accuracy in progress.evals.items()]
    more = {"made_with": dict(made_with), "versions": processes.versions()}
    return dataclasses.asdict(progress) | {"evals": evals} | more
