"""Whether and where a run goes on: its folders, and the checkpoint with which it begins.

A folder belongs to one run. RUN, a file in OUTPUT_DIR, says which: what the run's results follow
from, and the checkpoint of another run with which it began. A run goes on only in its own folders.
A new run and a fork need empty ones, so that nobody's records are moved or lost. A fork saves a
checkpoint of its own before its first record.
"""

import json
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import jax
from etils import epath

from runtime import processes
from runtime.checkpoint import RECORD, Checkpoints, names_of
from runtime.mistakes import Unwritable, UserMistake
from runtime.records import LOCK
from runtime.run_log import FILES, replace_file

RUN = "run.json"  # says whose folder it is; see write_run


@dataclass
class Progress:
    """Which run it is, and how far it is; the record of a checkpoint holds all of it."""

    made_with: dict[str, str] = field(default_factory=dict)  # all that its results follow from
    step: int = 0  # steps done
    rounds: int = 0  # rounds of sampling done; each takes the next prompts
    not_finite: int = 0  # steps in a row whose loss or gradient was not finite
    evals: dict[int, float] = field(default_factory=dict)  # accuracy at each step
    forked_from: str = ""  # the checkpoint of another run with which this run began
    run_id: str = ""  # also of the run in W&B


# ---- Folders -------------------------------------------------------------------------------------


def output_folder(output_dir: str, name: str) -> Path:
    """OUTPUT_DIR, or a new folder NAME_UTC, the same on all processes; this run holds it."""
    chosen = output_dir or f"{name}_{datetime.now(UTC):%Y%m%d_%H%M%S}"
    with processes.told_by_all():
        if jax.process_index() == 0:
            while not output_dir and Path(chosen).exists():  # another run began in this second
                chosen += "_2"
            hold(Path(chosen), f"OUTPUT_DIR={chosen}")
    return Path(processes.gather_texts(chosen)[0])


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
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {platform.node()}".encode(), 0)
    except OSError as error:
        raise UserMistake(f"{name} cannot be written: {error.strerror}") from None


def open_checkpoints(cfg: Any, out: Path) -> Checkpoints:
    """The run's checkpoints in CHECKPOINT_DIR, or in its output folder.

    This run holds their folder. If the processes do not see the same folder, the run saves none.
    Raises UserMistake for a folder that cannot be used.
    """
    with processes.told_by_all():
        checkpoints = Checkpoints(cfg.checkpoint_dir or str(out / "checkpoints"), cfg.save_keep)
        folder = Path(checkpoints.folder)
        if checkpoints.local and jax.process_index() == 0 and folder != out.resolve():
            hold(folder, f"CHECKPOINT_DIR={folder}")
    if not checkpoints.local:
        return checkpoints
    lock = folder / LOCK  # says which process holds the folder
    told = lock.read_text(errors="replace") if lock.is_file() else ""
    checkpoints.shared = len({*processes.gather_texts(told)}) == 1
    if not checkpoints.shared and cfg.save_every_steps:
        print(
            f"no checkpoints: {folder} is not the same folder on all hosts; set CHECKPOINT_DIR to "
            f"one they share, such as gs://bucket/folder",
            flush=True,
        )
    return checkpoints


# ---- Whose folder it is --------------------------------------------------------------------------


def run_in(out: Path) -> dict[str, Any]:
    """What RUN says of the run in this folder, on all processes; nothing if that run has ended
    before its first record. Raises UserMistake if there are records and no RUN."""
    text = "{}"
    with processes.told_by_all():
        files = [out / name for name in FILES if (out / name).is_file()]
        if jax.process_index() == 0 and any(file.stat().st_size for file in files):
            text = (out / RUN).read_text(encoding="utf-8")
    return json.loads(processes.gather_texts(text)[0])


def write_run(out: Path, progress: Progress, newest: int) -> None:
    """Writes RUN, on process 0. Raises Unwritable.

    newest: the newest step for which there is a complete checkpoint, or the last step of a run that
    is done; -1: the same command may begin the run again.
    """
    values = {"run_id": progress.run_id, "forked_from": progress.forked_from, "newest": newest}
    values["made_with"] = progress.made_with
    if jax.process_index() == 0:
        try:
            replace_file(out / RUN, json.dumps(values, indent=1) + "\n")
        except OSError as error:
            raise Unwritable(f"{out} cannot be written: {error.strerror}") from None


def what_changed(record: Mapping[str, Any], made_with: Mapping[str, str], what: str) -> str:
    """A line that names what has changed since the record, or "".

    made_with: all that the results follow from, now. what: has the record, such as "step 4".
    """
    before = record["made_with"]
    changed = [
        f"{name} was {before.get(name, 'not there')} and is {made_with.get(name, 'not there')}"
        for name in {**before, **made_with}
        if before.get(name) != made_with.get(name)
    ]
    text = f"{what} was made with other settings or files: {'; '.join(changed[:5])}"
    return text if changed else ""


# ---- How a run begins ----------------------------------------------------------------------------


def begin(
    cfg: Any, out: Path, checkpoints: Checkpoints, made_with: dict[str, str], wanted: Any
) -> tuple[Any, Progress]:
    """The arrays and the progress with which a run begins; no arrays (None) if it begins with the
    model.

    checkpoints: of this run. made_with: all that the results follow from. wanted: shapes, dtypes
    and shardings of the arrays. Raises UserMistake for a folder or a checkpoint of another run, and
    for a RESUME that names no checkpoint.
    """
    own, run, resume = checkpoints.steps(), run_in(out), cfg.resume
    where = f"OUTPUT_DIR={out}" if run else f"CHECKPOINT_DIR={checkpoints.folder}"

    def stop(why: str) -> NoReturn:
        raise UserMistake(f"{where} holds a run, and {why}; choose a new OUTPUT_DIR")

    def stop_if_begun_otherwise(began: str) -> None:
        """began: the checkpoint of another run with which the run in the folders began, or ""."""
        known = [began, *(f"{checkpoints.folder}/{step}" for step in own[-1:])]
        if resume != "auto" and not any(_names(resume, checkpoint) for checkpoint in known):
            newest = f"step {own[-1]}" if own else "none"
            stop(
                f"RESUME={resume} is neither its newest checkpoint ({newest}) nor what it began "
                f"with ({began or 'the model'})"
            )

    def check(record: Mapping[str, Any]) -> None:
        after = f"step {record['step']}"
        if own and run and run["run_id"] != record["run_id"]:
            stop(f"CHECKPOINT_DIR={checkpoints.folder} holds another")
        if own:
            stop_if_begun_otherwise(record["forked_from"])
        if cfg.steps < record["step"]:
            raise UserMistake(f"STEPS={cfg.steps}, and the checkpoint is after {after}; raise it")
        changed = what_changed(record, made_with, after)
        if changed and own:
            raise UserMistake(
                f"{changed}; set it back, or choose a new OUTPUT_DIR with "
                f"RESUME={checkpoints.folder}, which goes on as changed"
            )
        if changed:
            print(f"RESUME={resume}: {changed}", flush=True)
        stop_if_other_arrays(wanted, record)

    if run and not own:  # the same command begins it again
        stop_if_begun_otherwise(run["forked_from"])
        if changed := what_changed(run, made_with, f"the run in {out}"):
            raise UserMistake(f"{changed}; set it back, or choose a new OUTPUT_DIR")
        if run["newest"] >= 0:
            stop(f"no checkpoint of it is in {checkpoints.folder} (CHECKPOINT_DIR)")
        resume = run["forked_from"] or "auto"  # the same one, also if the other run has gone on
    source, step = (checkpoints, None) if own else checkpoint_source(resume)
    found = source.restore(wanted, check, step) if source else None
    if source and not found:
        raise UserMistake(f"RESUME={resume} is not the folder of a complete checkpoint")
    run_id = run.get("run_id") or secrets.token_hex(4)
    if not found:
        return None, Progress(made_with, run_id=run_id)
    arrays, record = found
    progress = Progress(**{field.name: record[field.name] for field in fields(Progress)})
    progress.made_with = made_with
    progress.evals = dict(record["evals"])
    print(f"resumed after step {progress.step} of {cfg.steps}", flush=True)
    if not own:
        began = f"{source.folder}/{progress.step}"
        progress = replace(progress, evals={}, run_id=run_id, forked_from=began)
    return arrays, progress


def _names(resume: str, checkpoint: str) -> bool:
    """Whether RESUME names this checkpoint, the folder of its checkpoints, or its run."""
    named, number = Checkpoints(resume, read_only=True).folder, checkpoint.rpartition("/")[2]
    return checkpoint in (named, f"{named}/{number}", f"{named}/checkpoints/{number}")


def checkpoint_source(resume: str) -> tuple[Checkpoints | None, int | None]:
    """The checkpoints of another run that RESUME names, or None, and the only step to choose."""
    if resume in ("auto", "never"):
        return None, None
    named, step = epath.Path(Checkpoints(resume, read_only=True).folder), None
    if (named / "checkpoints").is_dir():
        named = named / "checkpoints"
    elif named.name.isdecimal() and ((named / RECORD).exists() or not named.exists()):
        named, step = named.parent, int(named.name)
    return Checkpoints(os.fspath(named), read_only=True), step


def stop_if_other_arrays(wanted: Any, record: Mapping[str, Any], part: bool = False) -> None:
    """Raises UserMistake if the checkpoint with this record has other arrays than the wanted ones.

    part: True if it may have more of them.
    """
    ours, theirs = names_of(wanted), record["arrays"]
    other = [f"has no array {text}" for text in ours if text not in theirs]
    if not part:
        other += [f"has {text}, unused by this run" for text in theirs if text not in ours]
    if other:
        raise UserMistake(
            f"the checkpoint of step {record['step']} {other[0]}: MODEL_PATH, OPTIMIZER, LORA_RANK "
            f"and LORA_TARGETS have to be those of its run, and the code of the same version"
        )


def record_of(progress: Progress) -> dict[str, Any]:
    """What a checkpoint keeps beside its arrays, in JSON values."""
    return asdict(progress) | {"evals": [*progress.evals.items()]}
