"""Checkpoints of a run: orbax saves them while the run goes on, and restores them onto any mesh.

Checkpoint N holds what a run needs to go on after N steps as if it had never stopped: the arrays of
the training state, and a record (JSON: what the results follow from, rounds of sampling,
evaluations). The reference of BETA is read from MODEL_PATH again. Only a complete checkpoint
counts. The record also holds a checksum of every array, which does not depend on how the array is
sharded, and a checksum of the record. Arrays or a record that do not match their checksums are
never restored.
"""

import errno
import hashlib
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from runtime.chips import program
from runtime.mistakes import Unwritable, UserMistake, in_one_line
from runtime.processes import end_process, ending_together, gather_texts, lost_contact

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
