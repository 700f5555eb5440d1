"""The owner of an output folder, and the checkpoint a run starts from.

A folder belongs to one run, which locks it, and which run.json in OUTPUT_DIR identifies. The newest
checkpoint in the run's own folder always wins. RESUME is only read in an empty folder, where it
begins a fork: a run with an id and records of its own, which saves a checkpoint before its first
record and needs the other run no more.

A resumed run: start (startup.py) calls begin_or_resume, which compares the fingerprint
(fingerprint.py) and restores the newest checkpoint whose digests are right (checkpoint.py). Its
Progress has the steps and rounds that are done, from which main goes on, and the lengths to which
the .jsonl files are cut back.
"""

import contextlib
import json
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import jax
from etils import epath

from infra.checkpoint import RECORD, Checkpoints, Progress, raise_if_arrays_differ
from infra.hosts import gather_texts, raising_on_all_processes
from infra.log import FILES, LOCK, replace_file
from infra.mistakes import UserMistake, writing

RUN = "run.json"  # in OUTPUT_DIR; see write_run
RUN_VALUES = ("run_id", "forked_from", "made_with")
SAVED = ".saved"  # in OUTPUT_DIR: a checkpoint of the run was complete once, or the run was done

# ---- The folders of a run ------------------------------------------------------------------------


def output_folder(output_dir: str, name: str) -> Path:
    """OUTPUT_DIR, or a new folder NAME_UTC, the same on all processes; this run locks it."""
    chosen = output_dir or f"{name}_{datetime.now(UTC):%Y%m%d_%H%M%S}"
    with raising_on_all_processes():
        if jax.process_index() == 0:
            while not output_dir and Path(chosen).exists():  # another run began in this second
                chosen += "_2"
            lock_folder(Path(chosen), f"OUTPUT_DIR={chosen}")
    return Path(gather_texts(chosen)[0])


def open_checkpoints(
    out: Path, checkpoint_dir: str, save_keep: int, save_every_steps: int
) -> Checkpoints:
    """The run's checkpoints in CHECKPOINT_DIR, or in its output folder.

    This run locks their folder. If the processes do not see the same folder, the run saves none.
    Raises UserMistake for a folder that cannot be used.
    """
    with raising_on_all_processes():
        checkpoints = Checkpoints(checkpoint_dir or str(out / "checkpoints"), save_keep)
        folder = Path(checkpoints.folder)
        if checkpoints.local and jax.process_index() == 0 and folder != out.resolve():
            lock_folder(folder, f"CHECKPOINT_DIR={folder}")
    if not checkpoints.local:
        return checkpoints
    lock = folder / LOCK
    holder = lock.read_text(errors="replace") if lock.is_file() else ""
    checkpoints.shared = len({*gather_texts(holder)}) == 1
    if not checkpoints.shared and save_every_steps:
        print(
            f"no checkpoints: {folder} is not the same folder on all hosts; set CHECKPOINT_DIR to "
            f"one they share, such as gs://bucket/folder",
            flush=True,
        )
    return checkpoints


def lock_folder(folder: Path, name: str) -> None:
    """Makes the folder and locks it against other runs, until this process ends in any way.

    name: the setting and its value. Raises UserMistake if another run has the lock, or if the
    folder cannot be written.
    """
    import fcntl  # Windows has none, but there only config.py has to run

    with writing(name, UserMistake):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LOCK
        if path.is_symlink() or (path.exists() and path.stat().st_nlink > 1):
            raise UserMistake(f"{name}: {path} is a link to another file; delete it")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = os.open(path, flags, 0o666)  # not inherited by children
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 200, 0).decode(errors="replace")
            raise UserMistake(
                f"{name} is in use by another run: {holder}. Choose another folder, "
                f"or wait until that run has ended"
            ) from None
        except OSError as error:  # some network file systems have no locks
            failure = f"{name} cannot be locked: {error.strerror}"
            print(f"{failure}; nothing stops a second run in this folder", flush=True)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {platform.node()}".encode(), 0)


def write_run(out: Path, progress: Progress, has_saved: bool) -> None:
    """Writes run.json, on process 0: which run it is, and has_saved. The file SAVED, which is made
    or removed, says the latter as well, but is hidden: copies may lack it. Raises Unwritable.

    has_saved: a checkpoint was complete once, or the run is done.
    """
    values = {name: getattr(progress, name) for name in RUN_VALUES} | {"has_saved": has_saved}
    if jax.process_index() == 0:
        with writing(out):
            if has_saved:
                (out / SAVED).touch()
            else:
                (out / SAVED).unlink(missing_ok=True)
            replace_file(out / RUN, json.dumps(values, indent=1) + "\n")


def read_run(out: Path) -> dict[str, Any]:
    """The values of RUN in this folder, on all processes; "has_saved" is also true if the folder
    has SAVED. {} if there are no records. Raises UserMistake if there are records and no RUN, or
    one that is damaged."""
    values: Any = {}
    with raising_on_all_processes():
        files = [out / name for name in FILES if (out / name).is_file()]
        if jax.process_index() == 0 and any(file.stat().st_size for file in files):
            if not (out / RUN).is_file():
                raise UserMistake(
                    f"OUTPUT_DIR={out} has records, such as {files[0].name}, but no {RUN}, which "
                    f"says which run wrote them; choose another folder"
                )
            with contextlib.suppress(ValueError):  # of JSON and of UTF-8
                values = json.loads((out / RUN).read_text(encoding="utf-8"))
            if not isinstance(values, dict) or not values.keys() >= {*RUN_VALUES}:
                raise UserMistake(
                    f"OUTPUT_DIR={out}: its {RUN} is damaged, as after a loss of power; choose a "
                    f"new OUTPUT_DIR, with RESUME={out} if there are checkpoints"
                )
            values["has_saved"] = values.get("has_saved", False) or (out / SAVED).exists()
    return json.loads(gather_texts(json.dumps(values))[0])


# ---- How a run begins ----------------------------------------------------------------------------


def begin_or_resume(
    out: Path,
    checkpoints: Checkpoints,
    fingerprint: dict[str, str],
    wanted: Any,
    *,
    resume: str,
    steps: int,
) -> tuple[Any, Progress]:
    """The arrays and the progress with which a run begins; the arrays are None if it begins with
    the model.

    checkpoints: of this run. fingerprint: all that the results follow from. wanted: shapes, dtypes
    and shardings of the arrays. resume, steps: RESUME and STEPS. Raises UserMistake for a folder or
    a checkpoint of another run, and for a RESUME that names no checkpoint.
    """
    saved_steps, run_json = checkpoints.steps(), read_run(out)
    folder = f"OUTPUT_DIR={out}" if run_json else f"CHECKPOINT_DIR={checkpoints.folder}"

    def refuse(reason: str) -> NoReturn:
        raise UserMistake(f"{folder} holds a run, and {reason}; choose a new OUTPUT_DIR")

    def validate(record: Mapping[str, Any]) -> None:
        step = record["step"]
        if saved_steps and run_json and run_json["run_id"] != record["run_id"]:
            refuse(f"CHECKPOINT_DIR={checkpoints.folder} holds another")
        if steps < step:
            raise UserMistake(f"STEPS={steps}, but {step} steps are done already; raise it")
        changes = describe_changes(record, fingerprint, f"step {step}")
        if changes and saved_steps:
            raise UserMistake(
                f"{changes}; set it back, or choose a new OUTPUT_DIR with "
                f"RESUME={checkpoints.folder}, which continues with the changes"
            )
        if changes:
            print(f"RESUME={resume}: {changes}", flush=True)
        raise_if_arrays_differ(wanted, record)

    if saved_steps or run_json:
        if resume == "never":
            refuse("RESUME=never begins a new one")
        if resume != "auto":
            print(f"note: RESUME={resume} is ignored, because {folder} holds a run", flush=True)
    if run_json and not saved_steps:  # the same command begins the run again
        if run_json["has_saved"]:
            refuse(f"no checkpoint of it is in {checkpoints.folder} (CHECKPOINT_DIR)")
        if changes := describe_changes(run_json, fingerprint, f"the run in {out}"):
            raise UserMistake(f"{changes}; set it back, or choose a new OUTPUT_DIR")
        reason = "has records and no checkpoint: the run begins again, and replaces them"
        print(f"note: {folder} {reason}", flush=True)
        resume = run_json["forked_from"] or "auto"  # this checkpoint, not a newer one
    source, step = (checkpoints, None) if saved_steps else find_checkpoints(resume)
    run_id = run_json.get("run_id") or secrets.token_hex(4)
    if not source:
        return None, Progress(fingerprint, run_id=run_id)
    restored = source.restore(wanted, validate, step)
    if not restored:
        raise UserMistake(f"RESUME={resume} is not the folder of a complete checkpoint")
    arrays, record = restored
    progress = Progress(**{field.name: record[field.name] for field in fields(Progress)})
    print(f"resumed after {progress.step} of {steps} steps", flush=True)
    if saved_steps:
        return arrays, progress
    fork = Progress(fingerprint, progress.step, progress.rounds, progress.not_finite)
    return arrays, replace(fork, forked_from=f"{source.folder}/{progress.step}", run_id=run_id)


def find_checkpoints(resume: str) -> tuple[Checkpoints | None, int | None]:
    """The checkpoints of another run that RESUME names, or None, and the only step to choose."""
    if resume in ("auto", "never"):
        return None, None
    named, step = epath.Path(Checkpoints(resume, read_only=True).folder), None
    if (named / "checkpoints").is_dir():
        named = named / "checkpoints"
    elif named.name.isdecimal() and ((named / RECORD).exists() or not named.exists()):
        named, step = named.parent, int(named.name)
    return Checkpoints(os.fspath(named), read_only=True), step


def describe_changes(record: Mapping[str, Any], fingerprint: dict[str, str], subject: str) -> str:
    """A line that names what has changed since the record, or "".

    fingerprint: all that the results follow from, now. subject: of the line, such as "step 4".
    """
    values = record["made_with"], fingerprint
    before, now = ({key: text or "empty" for key, text in each.items()} for each in values)
    changes = [
        f"{key} was {before.get(key, 'not there')} and is {now.get(key, 'not there')}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    text = f"{subject} was made with other settings or files: {'; '.join(changes[:5])}"
    return text if changes else ""
