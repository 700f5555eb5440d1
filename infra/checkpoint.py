"""Checkpoints of a run: orbax saves them while the run goes on, and restores them onto any mesh.

Checkpoint N holds what a run needs to go on after N steps as if it had never stopped: the arrays of
the training state, and a record (JSON: what the results follow from, rounds of sampling,
evaluations). The reference of BETA is read from MODEL_PATH again. Only a complete checkpoint
counts. The record also holds a checksum of every array, which does not depend on how the array is
sharded, and a checksum of the record. Arrays or a record that do not match their checksums are
never restored.

A folder belongs to one run. RUN, a file in OUTPUT_DIR, says which: what the run's results follow
from, and the checkpoint of another run with which it began. A run goes on only in its own folders.
A new run and a fork need empty ones, so that nobody's records are moved or lost. A fork saves a
checkpoint of its own before its first record.
"""

import errno
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

from infra import hosts
from infra.chips import program
from infra.hosts import end_process, ending_together, gather_texts, lost_contact
from infra.log import FILES, LOCK, replace_file
from infra.mistakes import Unwritable, UserMistake, in_one_line

RECORD, ARRAYS = "record", "arrays"  # the items of a checkpoint, folders in its folder
FORMAT = 2  # of the record; other versions of this code may write other ones
SAVE_LIMIT_S = 1200  # the time in which all processes must have written a checkpoint


class Preserved(ocp.checkpoint_managers.PreservationPolicy):
    """Which checkpoints stay when a new one is saved: the newest `keep` (0: all), and the best one.

    The best one has the highest accuracy among the evaluations that are known now. orbax's own
    BestN would not know it, because checkpoint N is saved before evaluation N.
    """

    def __init__(self, keep: int) -> None:
        self.keep, self.evals = keep, {}  # evals: {step: accuracy}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        known = [step for step in steps if self.evals.get(step, math.nan) >= 0]
        best = max(known, key=self.evals.get, default=-1)
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
        self._read_only, self._policy = read_only, Preserved(keep)
        self._manager: ocp.CheckpointManager | None = None
        self._damaged: list[int] = []
        self._saving = -1  # the step whose checkpoint is being saved
        self.newest, self.shared = -1, True

    def steps(self) -> list[int]:
        """The steps of the checkpoints that look complete, in order."""
        if not self.shared:
            return []
        there = not self.local or Path(self.folder).is_dir()
        everywhere = gather_texts("yes" if there else "")
        if any(everywhere) and not all(everywhere):
            raise UserMistake(f"{self.folder} exists on some hosts and not on others")
        steps = sorted(self._open().all_steps()) if there else []
        return json.loads(gather_texts(json.dumps(steps))[0])  # process 0 decides

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                create=not self._read_only,
                cleanup_tmp_directories=not self._read_only,  # those that are half-written
                save_root_metadata=False,
                preservation_policy=self._policy,
                async_options=ocp.AsyncOptions(
                    SAVE_LIMIT_S,
                    barrier_sync_fn=self._barrier if jax.process_count() > 1 else None,
                    create_directories_asynchronously=False,  # its failure would be told late
                ),
            )
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager

    # ---- Saving ----------------------------------------------------------------------------------

    def save(self, arrays: Any, record: dict[str, Any]) -> None:
        """Begins to save the arrays, which may change as soon as this returns. It saves nothing if
        the step has a checkpoint, or if the processes see no common folder.

        record: JSON values; "step" is how many steps the run has done, and "evals" has pairs of a
        step and the accuracy after it. Raises Unwritable.
        """
        step = record["step"]
        if not self.shared or step in (self.newest, self._saving):
            return
        self.wait()
        with program("checksums"):
            record = record | {"format": FORMAT, "arrays": checksums_by_name(arrays)}
        record["sha256"] = digest_of(record)
        self._policy.evals, self._saving = dict(record["evals"]), step
        items = {ARRAYS: ocp.args.PyTreeSave(arrays), RECORD: ocp.args.JsonSave(record)}
        try:
            while self._damaged:
                self._open().delete(self._damaged.pop())
            self._open().save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:  # the storage's errors have no common base
            self._stop(error)

    def check(self) -> None:
        """Raises Unwritable if the save in the background has failed; it does not wait for it."""
        if self._saving >= 0 and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until the save in the background is complete. Raises Unwritable."""
        if self._saving < 0:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._stop(error)
        self.newest, self._saving = self._saving, -1

    def _stop(self, error: Exception) -> NoReturn:
        if lost_contact(error):
            raise error
        raise Unwritable(self._failure(error)) from None

    def _failure(self, error: BaseException) -> str:
        left = f"step {self.newest} stays the newest" if self.newest >= 0 else "there is none yet"
        return (
            f"checkpoint of step {self._saving} cannot be written to {self.folder}: "
            f"{_reason(error)}; {left}"
        )

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Where orbax's threads of all processes wait for each other. A process whose part of a
        save has failed ends here, because the others would wait for it for SAVE_LIMIT_S."""
        error = sys.exc_info()[1]
        if error and threading.current_thread() is not threading.main_thread():
            end_process(1, f"\nerror: {self._failure(error)}")  # other threads print, too
        with ending_together():  # orbax would print the traceback of a thread whose peer is gone
            ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    # ---- Restoring -------------------------------------------------------------------------------

    def restore(
        self,
        wanted: Any,
        check: Callable[[dict[str, Any]], None],
        step: int | None = None,
    ) -> tuple[Any, dict[str, Any]] | None:
        """The arrays and the record of the newest checkpoint that is complete, or None.

        wanted: the shapes, dtypes and shardings of the arrays. check: raises UserMistake if this
        run may not go on from a checkpoint with this record. step: the only step to try.
        Arrays of the checkpoint that are not wanted are not read.
        If some process cannot read a checkpoint, this prints a line and tries the next older one.
        Raises UserMistake if there are checkpoints and none of them can be read.
        """
        tried = [each for each in self.steps() if step in (None, each)]
        for each in reversed(tried):
            arrays = None
            record, wrong = _read_by_all(self._read, each)
            if not wrong:
                check(record)
                arrays, wrong = _read_by_all(self._restore, each, wanted)
            if not wrong and not checksums_by_name(arrays).items() <= record["arrays"].items():
                wrong = "its arrays are not what was saved"
            if not wrong:
                self.newest = each
                return arrays, record
            self._damaged.append(each)
            line = f"checkpoint {self.folder}/{each} is damaged and passed over: {wrong}"
            print(line, flush=True)
        if tried:
            raise UserMistake(
                f"the checkpoints of step {', '.join(map(str, tried))} in {self.folder} cannot be "
                f"read; begin a new run in a new folder"
            )
        return None

    def _read(self, step: int) -> dict[str, Any]:
        args = ocp.args.Composite(**{RECORD: ocp.args.JsonRestore()})
        record = dict(self._open().restore(step, args=args)[RECORD])
        if record.pop("sha256", None) != digest_of(record) or record["step"] != step:
            raise ValueError("its record is not what was saved")
        if record.get("format") != FORMAT:
            raise ValueError("another version of this code has saved it")
        return record

    def _restore(self, step: int, wanted: Any) -> Any:
        how = ocp.checkpoint_utils.construct_restore_args(wanted)
        args = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)
        return self._open().restore(step, args=ocp.args.Composite(**{ARRAYS: args}))[ARRAYS]


def _read_by_all(read: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What `read` returns, and why a process could not read a checkpoint; "" if all could."""
    value, wrong = None, ""
    try:
        value = read(*arguments)
    except Exception as error:  # damaged files raise errors of any kind
        if "RESOURCE_EXHAUSTED" in str(error):  # the checkpoint is not to blame
            raise
        wrong = _reason(error)
    return value, next((text for text in gather_texts(wrong) if text), "")


# ---- Checksums -----------------------------------------------------------------------------------


def names_of(arrays: Any) -> list[str]:
    """A text for each array or abstract array: its path, dtype and shape."""
    leaves = jax.tree.leaves_with_path(arrays)
    return [f"{jax.tree_util.keystr(path)} {x.dtype}{[*x.shape]}" for path, x in leaves]


def checksums_by_name(arrays: Any) -> dict[str, int]:
    """The checksum of each array, by its name."""
    sums = jax.device_get(jax.tree.leaves(checksums(arrays)))
    return dict(zip(names_of(arrays), map(int, sums), strict=True))


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


def digest_of(record: dict[str, Any]) -> str:
    """The SHA-256 of the values of a record."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _reason(error: BaseException) -> str:
    """The message of the system if one is in the error's text, else this text in one line."""
    text = in_one_line(error, with_type=False)
    known = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENOTDIR)
    return next((os.strerror(n) for n in known if os.strerror(n) in str(error)), text)


# ---- Whether and where a run goes on -------------------------------------------------------------


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
    with hosts.told_by_all():
        if jax.process_index() == 0:
            while not output_dir and Path(chosen).exists():  # another run began in this second
                chosen += "_2"
            hold(Path(chosen), f"OUTPUT_DIR={chosen}")
    return Path(hosts.gather_texts(chosen)[0])


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
    with hosts.told_by_all():
        checkpoints = Checkpoints(cfg.checkpoint_dir or str(out / "checkpoints"), cfg.save_keep)
        folder = Path(checkpoints.folder)
        if checkpoints.local and jax.process_index() == 0 and folder != out.resolve():
            hold(folder, f"CHECKPOINT_DIR={folder}")
    if not checkpoints.local:
        return checkpoints
    lock = folder / LOCK  # says which process holds the folder
    told = lock.read_text(errors="replace") if lock.is_file() else ""
    checkpoints.shared = len({*hosts.gather_texts(told)}) == 1
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
    with hosts.told_by_all():
        files = [out / name for name in FILES if (out / name).is_file()]
        if jax.process_index() == 0 and any(file.stat().st_size for file in files):
            text = (out / RUN).read_text(encoding="utf-8")
    return json.loads(hosts.gather_texts(text)[0])


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
