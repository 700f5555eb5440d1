"""The checkpoints of a run, the folders that hold them, and how a run goes on from a checkpoint.

Checkpoint N holds what a run needs to go on after N steps as if it had never stopped: the arrays of
the training state, and a record in JSON (Progress). The reference of BETA is read from MODEL_PATH
again. orbax saves checkpoints while the run goes on, and restores them onto any mesh. The record
has a checksum of each array, which does not depend on the sharding, and a checksum of itself. A
checkpoint that is incomplete, or does not match its checksums, is never restored.

A folder belongs to one run. run.json in OUTPUT_DIR says to which: what the run's results follow
from, and the checkpoint of another run with which it began. A run goes on only in its own folders.
A new run and a fork need empty ones, so that nobody's records are moved or lost. A fork saves a
checkpoint of its own before its first record.
"""

import errno
import functools
import hashlib
import json
import math
import os
import platform
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from infra.chips import attribute_oom_to
from infra.hosts import (
    end_process,
    exiting_on_error,
    gather_texts,
    is_lost_connection,
    raising_on_all_processes,
)
from infra.log import FILES, LOCK, replace_file
from infra.mistakes import Unwritable, UserMistake, in_one_line, writing

RUN = "run.json"  # in OUTPUT_DIR; see write_run
RECORD, ARRAYS = "record", "arrays"  # the items of a checkpoint, folders in its folder
FORMAT = 2  # of the record; other versions of this code may write other ones
SAVE_LIMIT_S = 1200  # the time in which all processes must have written a checkpoint


@dataclass
class Progress:
    """Which run it is, and its progress; the record of a checkpoint has all of these values."""

    made_with: dict[str, str] = field(default_factory=dict)  # all that its results follow from
    step: int = 0  # steps done
    rounds: int = 0  # rounds of sampling done; each takes the next prompts
    not_finite: int = 0  # steps in a row whose loss or gradient was not finite
    evals: dict[int, float] = field(default_factory=dict)  # accuracy at each step
    forked_from: str = ""  # the checkpoint of another run with which this run began
    run_id: str = ""  # also of the run in W&B


def progress_record(progress: Progress) -> dict[str, Any]:
    """The progress as JSON values; the keys of JSON are texts, so that `evals` becomes pairs."""
    return asdict(progress) | {"evals": [*progress.evals.items()]}


# ---- The checkpoints in a folder -----------------------------------------------------------------


class NewestAndBest(ocp.checkpoint_managers.PreservationPolicy):
    """Which checkpoints stay when a new one is saved: the newest `keep` (0: all), and the best one.

    The best one has the highest accuracy among the evaluations that are known now. orbax's own
    BestN would not know it, because checkpoint N is saved before evaluation N.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.evals: dict[int, float] = {}  # the accuracy at each step

    def should_preserve(
        self,
        checkpoints: Sequence[ocp.checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: ocp.checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        evaluated = [step for step in steps if self.evals.get(step, math.nan) >= 0]
        best = max(evaluated, key=lambda step: self.evals[step], default=-1)
        return [step in steps[-self.keep :] or step == best for step in steps]


class Checkpoints:
    """The checkpoints in one folder, which all processes must see. The first save makes the folder.

    newest: the step of the newest checkpoint that this run has saved or restored; -1: none.
    shared: False if the processes turn out not to see the same folder, which then counts as empty.
    """

    def __init__(self, folder: str, keep: int = 0, read_only: bool = False) -> None:
        """folder: a local folder, or gs://bucket/folder. keep: how many of the newest checkpoints
        stay; 0: all stay. read_only: True for the folder of another run, which may be alive.

        Raises UserMistake if this process cannot look into the folder, such as one in a bucket.
        """
        self.local = "://" not in folder
        self.folder = str(Path(folder).resolve()) if self.local else folder.rstrip("/")
        try:
            epath.Path(self.folder).exists()
        except Exception as error:  # gs:// needs gcsfs, whose errors have no common base
            name = "RESUME" if read_only else "CHECKPOINT_DIR"
            raise UserMistake(f"{name}={self.folder}: {_reason(error)}") from None
        self._read_only, self._policy = read_only, NewestAndBest(keep)
        self._damaged: list[int] = []
        self._saving = -1  # the step whose checkpoint is being saved
        self.newest, self.shared = -1, True

    def steps(self) -> list[int]:
        """The steps of the checkpoints that look complete, in order."""
        if not self.shared:
            return []
        exists = not self.local or Path(self.folder).is_dir()
        answers = gather_texts("yes" if exists else "")
        if any(answers) and not all(answers):
            raise UserMistake(f"{self.folder} exists on some hosts and not on others")
        steps = sorted(self._manager.all_steps()) if exists else []
        return json.loads(gather_texts(json.dumps(steps))[0])  # process 0 decides

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """orbax's manager, which makes the folder unless it is read-only."""
        options = ocp.CheckpointManagerOptions(
            create=not self._read_only,
            cleanup_tmp_directories=not self._read_only,  # those that are half-written
            save_root_metadata=False,
            preservation_policy=self._policy,
            async_options=ocp.AsyncOptions(
                SAVE_LIMIT_S,
                barrier_sync_fn=self._barrier if jax.process_count() > 1 else None,
                create_directories_asynchronously=False,  # its failure would be reported late
            ),
        )
        return ocp.CheckpointManager(self.folder, options=options)

    # ---- Saving ----------------------------------------------------------------------------------

    def save(self, arrays: Any, record: dict[str, Any]) -> None:
        """Begins to save the arrays, which may change as soon as this returns. It saves nothing if
        the step has a checkpoint, or if the processes see no common folder.

        record: JSON values; "step" is the number of steps that are done, and "evals" has pairs of a
        step and the accuracy after it. Raises Unwritable.
        """
        step = record["step"]
        if not self.shared or step in (self.newest, self._saving):
            return
        self.wait_until_saved()
        with attribute_oom_to("checksums"):
            record = record | {"format": FORMAT, "arrays": checksums_by_name(arrays)}
        record["sha256"] = record_digest(record)
        self._policy.evals, self._saving = dict(record["evals"]), step
        items = {ARRAYS: ocp.args.PyTreeSave(arrays), RECORD: ocp.args.JsonSave(record)}
        try:
            while self._damaged:
                self._manager.delete(self._damaged.pop())
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:  # the storage's errors have no common base
            self._raise_unwritable(error)

    def raise_if_save_failed(self) -> None:
        """Raises Unwritable if the save in the background has failed; it does not wait for it."""
        if self._saving >= 0 and not self._manager.is_saving_in_progress():
            self.wait_until_saved()

    def wait_until_saved(self) -> None:
        """Waits until the save in the background is complete. Raises Unwritable."""
        if self._saving < 0:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._raise_unwritable(error)
        self.newest, self._saving = self._saving, -1

    def _raise_unwritable(self, error: Exception) -> NoReturn:
        if is_lost_connection(error):
            raise error
        raise Unwritable(self._failure(error)) from None

    def _failure(self, error: BaseException) -> str:
        kept = f"step {self.newest} stays the newest" if self.newest >= 0 else "there is none yet"
        return (
            f"checkpoint of step {self._saving} cannot be written to {self.folder}: "
            f"{_reason(error)}; {kept}"
        )

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits until orbax's threads of all processes have come here. A process whose part of a
        save has failed ends here, because the others would wait for it for SAVE_LIMIT_S."""
        error = sys.exc_info()[1]
        if error and threading.current_thread() is not threading.main_thread():
            end_process(1, f"\nerror: {self._failure(error)}")  # other threads print, too
        with exiting_on_error():  # orbax would print the traceback of a thread whose peer is gone
            ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    # ---- Restoring -------------------------------------------------------------------------------

    def restore(
        self,
        wanted: Any,
        validate: Callable[[dict[str, Any]], None],
        step: int | None = None,
    ) -> tuple[Any, dict[str, Any]] | None:
        """The arrays and the record of the newest checkpoint that is complete, or None.

        wanted: the shapes, dtypes and shardings of the arrays. validate: raises UserMistake if this
        run may not go on from a checkpoint with this record. step: the only step to try.
        Arrays of the checkpoint that are not wanted are not read.
        If some process cannot read a checkpoint, this prints a line and tries the next older one.
        Raises UserMistake if there are checkpoints and none of them can be read.
        """
        candidates = [saved for saved in self.steps() if step in (None, saved)]
        for saved in reversed(candidates):
            arrays = None
            record, failure = _read_on_all(functools.partial(self._read_record, saved))
            if not failure:
                validate(record)
                read = functools.partial(self._read_arrays, saved, wanted)
                arrays, failure = _read_on_all(read)
            if not failure and not checksums_by_name(arrays).items() <= record["arrays"].items():
                failure = "its arrays are not what was saved"
            if not failure:
                self.newest = saved
                return arrays, record
            self._damaged.append(saved)
            line = f"checkpoint {self.folder}/{saved} is damaged and passed over: {failure}"
            print(line, flush=True)
        if candidates:
            raise UserMistake(
                f"the checkpoints of step {', '.join(map(str, candidates))} in {self.folder} "
                f"cannot be read; begin a new run in a new folder"
            )
        return None

    def _read_record(self, step: int) -> dict[str, Any]:
        args = ocp.args.Composite(**{RECORD: ocp.args.JsonRestore()})
        record = dict(self._manager.restore(step, args=args)[RECORD])
        if record.pop("sha256", None) != record_digest(record) or record["step"] != step:
            raise ValueError("its record is not what was saved")
        if record.get("format") != FORMAT:
            raise ValueError("another version of this code has saved it")
        return record

    def _read_arrays(self, step: int, wanted: Any) -> Any:
        as_wanted = ocp.checkpoint_utils.construct_restore_args(wanted)
        args = ocp.args.PyTreeRestore(wanted, restore_args=as_wanted, partial_restore=True)
        return self._manager.restore(step, args=ocp.args.Composite(**{ARRAYS: args}))[ARRAYS]


def _read_on_all(read: Callable[[], Any]) -> tuple[Any, str]:
    """The value of `read`, and why a process could not read a checkpoint; "" if all could."""
    value, failure = None, ""
    try:
        value = read()
    except Exception as error:  # damaged files raise errors of any kind
        if "RESOURCE_EXHAUSTED" in str(error):  # the checkpoint is not to blame
            raise
        failure = _reason(error)
    return value, next((text for text in gather_texts(failure) if text), "")


def _reason(error: BaseException) -> str:
    """The message of the system if one is in the error's text, else this text in one line."""
    text = in_one_line(error, with_type=False)
    known = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENOTDIR)
    return next((os.strerror(n) for n in known if os.strerror(n) in str(error)), text)


# ---- Checksums -----------------------------------------------------------------------------------


def array_names(arrays: Any) -> list[str]:
    """A text for each array or abstract array: its path, dtype and shape."""
    leaves = jax.tree.leaves_with_path(arrays)
    return [f"{jax.tree_util.keystr(path)} {x.dtype}{[*x.shape]}" for path, x in leaves]


def checksums_by_name(arrays: Any) -> dict[str, int]:
    """The checksum of each array, by its name."""
    sums = jax.device_get(jax.tree.leaves(checksums(arrays)))
    return dict(zip(array_names(arrays), map(int, sums), strict=True))


@jax.jit
def checksums(arrays: Any) -> Any:
    """A checksum of each array, uint32: the sum of (bits of the element) * (2 * index + 1).

    The sum is modulo 2^32, so that the order of the additions does not matter.
    """

    def checksum(x: jax.Array) -> jax.Array:
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
        index = jnp.zeros(bits.shape, jnp.uint32)
        for axis, size in enumerate(bits.shape):
            index = index * size + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        return (bits * (2 * index + 1)).sum(dtype=jnp.uint32)

    return jax.tree.map(checksum, arrays)


def record_digest(record: dict[str, Any]) -> str:
    """The SHA-256 of the values of a record."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


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
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # not inherited by children
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 200, 0).decode(errors="replace")
            raise UserMistake(
                f"{name} belongs to another run, which is alive: {holder}. Choose another folder, "
                f"or wait until that run has ended"
            ) from None
        except OSError as error:  # some network file systems have no locks
            failure = f"{name} cannot be locked: {error.strerror}"
            print(f"{failure}; nothing stops a second run in this folder", flush=True)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {platform.node()}".encode(), 0)


def write_run(out: Path, progress: Progress, newest: int) -> None:
    """Writes RUN, on process 0. Raises Unwritable.

    newest: the newest step for which there is a complete checkpoint, or the last step of a run that
    is done; -1: the same command may begin the run again.
    """
    values = {
        "run_id": progress.run_id,
        "forked_from": progress.forked_from,
        "newest": newest,
        "made_with": progress.made_with,
    }
    if jax.process_index() == 0:
        with writing(out):
            replace_file(out / RUN, json.dumps(values, indent=1) + "\n")


def read_run(out: Path) -> dict[str, Any]:
    """The values of RUN in this folder, on all processes; {} if its run has ended before its first
    record. Raises UserMistake if there are records and no RUN."""
    text = "{}"
    with raising_on_all_processes():
        files = [out / name for name in FILES if (out / name).is_file()]
        if jax.process_index() == 0 and any(file.stat().st_size for file in files):
            text = (out / RUN).read_text(encoding="utf-8")
    return json.loads(gather_texts(text)[0])


# ---- How a run begins ----------------------------------------------------------------------------


def begin_or_resume(
    out: Path,
    checkpoints: Checkpoints,
    made_with: dict[str, str],
    wanted: Any,
    *,
    resume: str,
    steps: int,
) -> tuple[Any, Progress]:
    """The arrays and the progress with which a run begins; the arrays are None if it begins with
    the model.

    checkpoints: of this run. made_with: all that the results follow from. wanted: shapes, dtypes
    and shardings of the arrays. resume, steps: RESUME and STEPS. Raises UserMistake for a folder or
    a checkpoint of another run, and for a RESUME that names no checkpoint.
    """
    saved_steps, run_json = checkpoints.steps(), read_run(out)

    def refuse(why: str) -> NoReturn:
        folder = f"OUTPUT_DIR={out}" if run_json else f"CHECKPOINT_DIR={checkpoints.folder}"
        raise UserMistake(f"{folder} holds a run, and {why}; choose a new OUTPUT_DIR")

    def refuse_other_origin(origin: str) -> None:
        """origin: the checkpoint of another run with which the run in the folders began, or ""."""
        known = [origin, *(f"{checkpoints.folder}/{step}" for step in saved_steps[-1:])]
        if resume != "auto" and not any(_names(resume, checkpoint) for checkpoint in known):
            newest = f"step {saved_steps[-1]}" if saved_steps else "none"
            refuse(
                f"RESUME={resume} is neither its newest checkpoint ({newest}) nor what it began "
                f"with ({origin or 'the model'})"
            )

    def validate(record: Mapping[str, Any]) -> None:
        after = f"step {record['step']}"
        if saved_steps and run_json and run_json["run_id"] != record["run_id"]:
            refuse(f"CHECKPOINT_DIR={checkpoints.folder} holds another")
        if saved_steps:
            refuse_other_origin(record["forked_from"])
        if steps < record["step"]:
            raise UserMistake(f"STEPS={steps}, and the checkpoint is after {after}; raise it")
        changes = describe_changes(record, made_with, after)
        if changes and saved_steps:
            raise UserMistake(
                f"{changes}; set it back, or choose a new OUTPUT_DIR with "
                f"RESUME={checkpoints.folder}, which goes on as changed"
            )
        if changes:
            print(f"RESUME={resume}: {changes}", flush=True)
        raise_if_arrays_differ(wanted, record)

    if run_json and not saved_steps:  # the same command begins it again
        refuse_other_origin(run_json["forked_from"])
        if changes := describe_changes(run_json, made_with, f"the run in {out}"):
            raise UserMistake(f"{changes}; set it back, or choose a new OUTPUT_DIR")
        if run_json["newest"] >= 0:
            refuse(f"no checkpoint of it is in {checkpoints.folder} (CHECKPOINT_DIR)")
        resume = run_json["forked_from"] or "auto"  # this checkpoint, not a newer one
    source, step = (checkpoints, None) if saved_steps else find_checkpoints(resume)
    run_id = run_json.get("run_id") or secrets.token_hex(4)
    if not source:
        return None, Progress(made_with, run_id=run_id)
    restored = source.restore(wanted, validate, step)
    if not restored:
        raise UserMistake(f"RESUME={resume} is not the folder of a complete checkpoint")
    arrays, record = restored
    progress = Progress(**{field.name: record[field.name] for field in fields(Progress)})
    progress = replace(progress, made_with=made_with, evals=dict(record["evals"]))
    print(f"resumed after step {progress.step} of {steps}", flush=True)
    if not saved_steps:  # a fork
        origin = f"{source.folder}/{progress.step}"
        progress = replace(progress, evals={}, run_id=run_id, forked_from=origin)
    return arrays, progress


def _names(resume: str, checkpoint: str) -> bool:
    """Whether RESUME names this checkpoint, the folder of its checkpoints, or its run."""
    named, number = Checkpoints(resume, read_only=True).folder, checkpoint.rpartition("/")[2]
    return checkpoint in (named, f"{named}/{number}", f"{named}/checkpoints/{number}")


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


def describe_changes(record: Mapping[str, Any], made_with: Mapping[str, str], subject: str) -> str:
    """A line that names what has changed since the record, or "".

    made_with: all that the results follow from, now. subject: of the line, such as "step 4".
    """
    before = record["made_with"]
    changes = [
        f"{key} was {before.get(key, 'not there')} and is {made_with.get(key, 'not there')}"
        for key in {**before, **made_with}
        if before.get(key) != made_with.get(key)
    ]
    text = f"{subject} was made with other settings or files: {'; '.join(changes[:5])}"
    return text if changes else ""


def raise_if_arrays_differ(wanted: Any, record: Mapping[str, Any], part: bool = False) -> None:
    """Raises UserMistake if the checkpoint with this record has other arrays than the wanted ones.

    part: True if the checkpoint may have arrays beside the wanted ones.
    """
    names, saved = array_names(wanted), record["arrays"]
    differences = [f"has no array {name}" for name in names if name not in saved]
    if not part:
        differences += [f"has {name}, unused by this run" for name in saved if name not in names]
    if differences:
        raise UserMistake(
            f"the checkpoint of step {record['step']} {differences[0]}: MODEL_PATH, OPTIMIZER, "
            f"LORA_RANK and LORA_TARGETS have to be those of its run, and the code of the same "
            f"version"
        )
