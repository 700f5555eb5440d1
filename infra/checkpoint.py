"""The checkpoints of a run: what they hold, and how they are saved and restored.

Checkpoint N holds what a run needs to continue after N steps as if it had never stopped: the arrays
of the training state, and a record in JSON (Progress). The reference of BETA is read from
MODEL_PATH again. orbax saves checkpoints in the background, and restores them onto any mesh. The
record has a checksum of each array, which does not depend on the sharding, and a checksum of
itself. A checkpoint that is incomplete, or does not match its checksums, is never restored.
"""

import errno
import functools
import glob
import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from etils.epath.gpath import PosixGPath
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, CustomSteps, LatestN

from infra.chips import attribute_oom_to
from infra.hosts import end_process, exiting_on_error, gather_texts, is_lost_connection
from infra.mistakes import Unwritable, UserMistake, in_one_line

RECORD, ARRAYS = "record", "arrays"  # the items of a checkpoint, folders in its folder
FORMAT = 3  # of the record; other versions of this code may write other ones
EARLIER_HOOK = sys.unraisablehook
SAVE_LIMIT_S = 1200  # the time in which all processes must have written a checkpoint


@dataclass
class Progress:
    """Which run it is, and its progress; the record of a checkpoint has all of these values."""

    made_with: dict[str, str] = field(default_factory=dict)  # the fingerprint of its results
    step: int = 0  # steps done
    rounds: int = 0  # rounds of sampling done; each takes the next prompts
    not_finite: int = 0  # steps in a row whose loss or gradient was not finite
    accuracy: float | None = None  # of the evaluation after `step` steps
    best_step: int = -1  # the step of the checkpoint with the best accuracy; -1: none
    best_accuracy: float = -1.0
    lengths: dict[str, int] = field(default_factory=dict)  # bytes of metrics.jsonl and the others
    forked_from: str = ""  # the checkpoint of another run with which this run began
    run_id: str = ""  # also of the run in W&B


# ---- The checkpoints in a folder -----------------------------------------------------------------


class LiteralPath(PosixGPath):
    """A path that may have brackets and stars in its name. With other paths orbax finds the parts
    of an array by a pattern that begins with the path, in which these characters would match."""

    def glob(self, pattern: str) -> Iterator["LiteralPath"]:
        return map(LiteralPath, epath.Path(glob.escape(os.fspath(self))).glob(pattern))


class Checkpoints:
    """The checkpoints in one folder, which all processes must see. The first save makes the folder.

    newest: the step of the newest checkpoint that this run has saved or restored; -1: none.
    save_s: the seconds of the last save, until it was found complete; before it an estimate.
    shared: False if the processes turn out not to see the same folder, which then counts as empty.
    """

    def __init__(self, folder: str, keep: int = 0, read_only: bool = False) -> None:
        """folder: a local folder, or gs://bucket/folder. keep: how many of the newest checkpoints
        stay beside the best one; 0: all stay. read_only: True for the folder of another run, which
        may be alive.

        Raises UserMistake if this process cannot look into the folder, such as one in a bucket.
        """
        # Threads of orbax log the tracebacks of errors that this class raises again.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        sys.unraisablehook = _print_unless_loop_is_closed
        self.local = "://" not in folder
        self.folder = str(Path(folder).resolve()) if self.local else folder.rstrip("/")
        try:
            epath.Path(self.folder).exists()
        except Exception as error:  # gs:// needs gcsfs, whose errors have no common base
            name = "RESUME" if read_only else "CHECKPOINT_DIR"
            raise UserMistake(f"{name}={self.folder}: {_reason(error)}") from None
        self._read_only = read_only
        # BestN would read a file of metrics in each checkpoint, and raise if one is damaged.
        self._policies = [LatestN(keep or None), CustomSteps([])]
        self._damaged: list[int] = []
        self.saving = -1  # the step whose checkpoint is being saved
        self.newest, self.shared = -1, True
        self.save_s = self._began = 0.0
        self._is_measured = True

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
            preservation_policy=AnyPreservationPolicy(self._policies),
            async_options=ocp.AsyncOptions(
                SAVE_LIMIT_S,
                barrier_sync_fn=self._barrier if jax.process_count() > 1 else None,
                create_directories_asynchronously=False,  # its failure would be reported late
            ),
        )
        return ocp.CheckpointManager(LiteralPath(self.folder), options=options)

    # ---- Saving ----------------------------------------------------------------------------------

    def save(self, arrays: Any, progress: Progress) -> None:
        """Begins to save the arrays, which may change as soon as this returns. It saves nothing if
        the step has a checkpoint, or if the processes see no common folder. Raises Unwritable.

        The first checkpoint is complete when this returns, and was opened again.
        """
        step = progress.step
        if not self.shared or step in (self.newest, self.saving):
            return
        self.wait_until_saved()
        with attribute_oom_to("checksums"):
            record = asdict(progress) | {"format": FORMAT, "arrays": checksums_by_name(arrays)}
        record["sha256"] = record_digest(record)
        self._policies[1] = CustomSteps([progress.best_step])
        self.saving, self._began, self._is_measured = step, time.monotonic(), False
        items = {ARRAYS: ocp.args.PyTreeSave(arrays), RECORD: ocp.args.JsonSave(record)}
        try:
            while self._damaged:
                self._manager.delete(self._damaged.pop())
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:  # the storage's errors have no common base
            self._raise_unwritable(error)
        if self.newest < 0:
            self.wait_until_saved()
            self._raise_if_unreadable(arrays)

    def raise_if_save_failed(self) -> None:
        """Raises Unwritable if the save in the background has failed; it does not wait for it."""
        if self.saving >= 0 and not self._manager.is_saving_in_progress():
            self.wait_until_saved()

    def measure_save(self) -> None:
        """Updates save_s if the save in the background is complete; it does not wait for it."""
        if not (self._is_measured or self._manager.is_saving_in_progress()):
            self.save_s, self._is_measured = time.monotonic() - self._began, True

    def wait_until_saved(self) -> None:
        """Waits until the save in the background is complete. Raises Unwritable."""
        if self.saving < 0:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._raise_unwritable(error)
        self.measure_save()
        self.newest, self.saving = self.saving, -1

    def _raise_if_unreadable(self, arrays: Any) -> None:
        """Reads the record of the newest checkpoint and its smallest array, since the devices may
        have no memory for others. Raises Unwritable."""
        chosen = min(jax.tree.leaves(arrays), key=lambda x: (x.ndim == 0, x.nbytes))
        kept = jax.ShapeDtypeStruct(chosen.shape, chosen.dtype, sharding=chosen.sharding)
        wanted = jax.tree.map(lambda x: kept if x is chosen else ocp.PLACEHOLDER, arrays)
        _, failure = _read_on_all(
            lambda: (self._read_record(self.newest), self._read_arrays(self.newest, wanted))
        )
        if failure:
            raise Unwritable(
                f"checkpoint of step {self.newest} was saved, but {self.folder} cannot be read: "
                f"{failure}; set CHECKPOINT_DIR to another folder"
            )

    def _raise_unwritable(self, error: Exception) -> NoReturn:
        if is_lost_connection(error):
            raise error
        raise Unwritable(self._failure(error)) from None

    def _failure(self, error: BaseException) -> str:
        kept = f"step {self.newest} stays the newest" if self.newest >= 0 else "there is none yet"
        return (
            f"checkpoint of step {self.saving} cannot be written to {self.folder}: "
            f"{_reason(error)}; {kept}"
        )

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits until orbax's threads of all processes have come here. A process whose part of a
        save has failed ends here, because the others would wait for it for SAVE_LIMIT_S."""
        error = sys.exc_info()[1]
        if error and threading.current_thread() is not threading.main_thread():
            end_process(1, f"\nerror: {self._failure(error)}")  # other threads print as well
        with exiting_on_error():  # orbax would print the traceback of a thread whose peer is gone
            ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    # ---- Restoring -------------------------------------------------------------------------------

    def restore(
        self, wanted: Any, validate: Callable[[dict[str, Any]], None], step: int | None = None
    ) -> tuple[Any, dict[str, Any]] | None:
        """The arrays and the record of the newest checkpoint that is complete, or None.

        wanted: the shapes, dtypes and shardings of the arrays. validate: raises UserMistake if this
        run may not continue from a checkpoint with this record. step: the only step to try.
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
                failure = "the checksum of its arrays is wrong"
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
            raise ValueError("the checksum of its record is wrong")
        if record.get("format") != FORMAT:
            raise ValueError("another version of this code has saved it")
        return record

    def _read_arrays(self, step: int, wanted: Any) -> Any:
        as_wanted = ocp.checkpoint_utils.construct_restore_args(wanted)
        args = ocp.args.PyTreeRestore(wanted, restore_args=as_wanted, partial_restore=True)
        return self._manager.restore(step, args=ocp.args.Composite(**{ARRAYS: args}))[ARRAYS]


def _print_unless_loop_is_closed(unraisable: "sys.UnraisableHookArgs") -> None:
    """Replaces sys.unraisablehook. When the write of an array fails, orbax closes its event loop,
    and the writes of the other arrays call it in vain from threads of tensorstore."""
    error = unraisable.exc_value
    if not isinstance(error, RuntimeError) or str(error) != "Event loop is closed":
        EARLIER_HOOK(unraisable)


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


def raise_if_arrays_differ(wanted: Any, record: Mapping[str, Any], part: bool = False) -> None:
    """Raises UserMistake if the checkpoint with this record has other arrays than the wanted ones.

    part: True if the checkpoint may have more arrays than the wanted ones.
    """
    names, saved = array_names(wanted), record["arrays"]
    differences = [f"has no array {name}" for name in names if name not in saved]
    if not part:
        differences += [f"has {name}, unused by this run" for name in saved if name not in names]
    if differences:
        raise UserMistake(
            f"the checkpoint of step {record['step']} {differences[0]}: MODEL_PATH, OPTIMIZER, "
            f"LORA_RANK and LORA_TARGETS must be those of its run, and the code must have the same "
            f"version"
        )


def checksums_by_name(arrays: Any) -> dict[str, int]:
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
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
