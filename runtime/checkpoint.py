"""Checkpoints of a run: orbax saves them while the run goes on, and restores them onto any mesh.

Checkpoint N holds what a run needs to go on after N steps as if it had never stopped: its arrays
(the training state, the reference of BETA) and a record (JSON: settings, data position,
evaluations). Only a complete checkpoint counts. The record also holds a checksum of every array,
which does not depend on how the array is sharded, and a checksum of the record. Arrays or a record
that do not match their checksums are never restored.
"""

import collections
import errno
import functools
import hashlib
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from runtime.mistakes import UserMistake, in_one_line
from runtime.processes import gather_texts, told_by_all

RECORD, ARRAYS = "record", "arrays"  # the items of a checkpoint, folders in its folder
MISSED = "another process could not do its part"
PROBE_BYTES = 2**20  # the largest size of a test file that is written before a save
BEGIN_LIMIT_S = 60  # the time to wait for the other processes if a save fails to begin on this one
SAVE_LIMIT_S = 1200  # the time in which all processes must have written a checkpoint
HALF_WRITTEN = ".orbax-checkpoint-tmp"  # a part of the name of a folder that is not complete


class SaveBarrier:
    """A barrier at which the processes wait for each other while orbax saves in the background.

    At jax's barrier the other processes would wait 20 minutes for a process whose write has failed.
    At this barrier the failed process leaves a mark, and the mark ends the waiting with an error.
    """

    def __init__(self, name: str) -> None:
        """name: the same on all processes, and used by no other barrier."""
        self._name, self._times = name, collections.Counter()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        client, me = ocp.multihost.get_jax_distributed_client(), jax.process_index()
        in_background = threading.current_thread() is not threading.main_thread()
        if in_background and sys.exc_info()[1]:  # orbax is leaving a failed save
            client.key_value_set(f"{self._name}/failed/{me}", "", allow_overwrite=True)
            return
        self._times[key] += 1  # orbax uses a key more than once
        here, end = f"{self._name}/{key}:{self._times[key]}/", time.monotonic() + timeout_ms / 1000
        client.key_value_set(f"{here}{me}", "")
        while len(client.key_value_dir_get(here)) < jax.process_count():
            if client.key_value_dir_get(f"{self._name}/failed/"):
                raise RuntimeError(MISSED)
            if time.monotonic() > end:
                raise TimeoutError(
                    f"not all processes have written their parts in {timeout_ms // 1000} s"
                )
            time.sleep(0.05)


class Checkpoints:
    """The checkpoints in one folder, which all processes must see. The first save makes the folder.

    newest: the step of the newest checkpoint that this run has saved or restored; -1: none.
    say: prints a line; the run's log replaces it.
    """

    def __init__(self, folder: str, keep: int = 0, read_only: bool = False) -> None:
        """folder: a local folder, or gs://bucket/folder. keep: how many of the newest checkpoints
        stay; 0: all stay. read_only: True for the folder of another run, which may be alive."""
        local = "://" not in folder
        self.folder = str(Path(folder).absolute()) if local else folder
        self._path, self._keep = Path(self.folder) if local else None, keep
        self._read_only, self._short_name = read_only, _digest({"folder": self.folder})[:12]
        self.say: Callable[[str], None] = lambda line: print(line, flush=True)
        self._manager: ocp.CheckpointManager | None = None
        self._evals: dict[int, float] = {}
        self._saving = -1  # the step whose checkpoint is being saved
        self.newest = -1
        self._lost = -1  # the newest step whose save has failed
        self._votes = self._opened = 0  # the numbers of votes and of managers so far

    def steps(self) -> list[int]:
        """The steps of the checkpoints that look complete, in order."""
        there = self._path is None or self._path.is_dir()
        everywhere = gather_texts("yes" if there else "")
        if any(everywhere) and not all(everywhere):
            raise UserMistake(f"{self.folder} exists on some hosts and not on others")
        steps = sorted(self._open().all_steps()) if there else []
        return json.loads(gather_texts(json.dumps(steps))[0])  # process 0 decides

    def stop_if_out_of_reach(self) -> None:
        """Raises UserMistake if this process cannot look into a folder in a bucket."""
        try:
            epath.Path(self.folder).exists()
        except Exception as error:  # gs:// needs gcsfs, whose errors have no common base
            raise UserMistake(f"CHECKPOINT_DIR={self.folder}: {_reason(error)}") from None

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            # After a failed save orbax and asyncio print the errors of all threads and tasks with
            # all frames, some of them only when the program ends. One line of ours replaces them.
            for name in ("absl", "asyncio"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            writes = not self._read_only
            if writes:
                hook = functools.partial(_leave_out_closed_loops, sys.__unraisablehook__)
                sys.unraisablehook = hook
            self._opened += 1
            barrier = None
            if jax.process_count() > 1:
                barrier = SaveBarrier(f"{self._short_name}/barrier{self._opened}")
            options = ocp.CheckpointManagerOptions(
                create=writes,
                cleanup_tmp_directories=writes,
                read_only=not writes,
                save_root_metadata=False,
                async_options=ocp.AsyncOptions(SAVE_LIMIT_S, barrier_sync_fn=barrier),
            )
            try:
                self._manager = ocp.CheckpointManager(self.folder, options=options)
            except ImportError as error:  # gs:// needs gcsfs
                raise UserMistake(f"{self.folder} cannot be opened: {error}") from None
        return self._manager

    @property
    def newest_begun(self) -> int:
        """The step of the newest checkpoint, complete or being saved; -1 if there is none."""
        return max(self.newest, self._saving)

    @staticmethod
    def shapes(arrays: Any) -> list[str]:
        """A text for each array or abstract array: its path, dtype and shape."""
        leaves = jax.tree.leaves_with_path(arrays)
        return [f"{jax.tree_util.keystr(path)} {x.dtype}{[*x.shape]}" for path, x in leaves]

    # ---- Saving ----------------------------------------------------------------------------------

    def save(self, step: int, arrays: Any, record: dict[str, Any], evals: dict[int, float]) -> None:
        """Begins to save the arrays after `step` steps; they may change as soon as this returns.

        record: JSON values. evals: {step: accuracy} of all evaluations so far; the checkpoint with
        the best accuracy stays, besides the newest checkpoints. If a checkpoint cannot be written,
        this prints a line, and the run goes on; the same step is not tried again.
        """
        if step == self._lost:
            return
        self.wait()
        if self._failed(step, gather_texts(self._no_room(arrays))):
            return
        sums = [int(x) for x in jax.device_get(jax.tree.leaves(checksums(arrays)))]
        record = record | {"step": step, "checksums": sums, "arrays": self.shapes(arrays)}
        record["sha256"] = _digest(record)
        self._evals, wrong = evals, ""
        try:
            if step in self._open().all_steps():  # it was damaged and skipped
                self._open().delete(step)
            self._open().save(
                step,
                args=ocp.args.Composite(
                    **{ARRAYS: ocp.args.StandardSave(arrays), RECORD: ocp.args.JsonSave(record)}
                ),
                force=True,
            )
        except Exception as error:  # the storage's errors have no common base
            wrong = _reason(error)
        if not self._failed(step, self._vote(wrong, BEGIN_LIMIT_S)):
            self._saving = step

    def _no_room(self, arrays: Any) -> str:
        """The reason why this process cannot write its part of the arrays; "" if it probably can.

        All processes try this and tell each other before a save begins, because in orbax the other
        processes wait for a process that fails during the save.
        """
        if self._path is None:
            return ""
        shards = [shard for x in jax.tree.leaves(arrays) for shard in x.addressable_shards]
        size = sum(shard.data.nbytes for shard in shards if shard.replica_id == 0)
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._path).free < size:
                return os.strerror(errno.ENOSPC)
            with tempfile.TemporaryFile(dir=self._path) as file:
                file.write(b"0" * min(size, PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return _reason(error)
        return ""

    def _vote(self, wrong: str, limit_s: int) -> list[str]:
        """What went wrong on each process in this part of a save; "" for a process without errors.

        wrong: the error of this process, or "". The processes tell each other through the service
        by which they have joined, because a process that waits within orbax cannot take part in a
        collective of arrays. Raises SystemExit if this process has failed and another one says
        nothing for limit_s seconds: the other one then waits within orbax until this one ends.
        """
        if jax.process_count() == 1:
            return [wrong]
        self._votes += 1
        votes = f"{self._short_name}/vote{self._votes}"
        client = ocp.multihost.get_jax_distributed_client()
        client.key_value_set(f"{votes}/{jax.process_index()}", wrong or "done")
        limit_s = limit_s if wrong else SAVE_LIMIT_S
        try:
            told = [
                client.blocking_key_value_get(f"{votes}/{i}", limit_s * 1000)
                for i in range(jax.process_count())
            ]
        except jax.errors.JaxRuntimeError as error:
            if not wrong or "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise SystemExit(
                f"error: this process cannot write its part of a checkpoint to {self.folder}: "
                f"{wrong}; another process waits for this part, so the run has to end"
            ) from None
        return ["" if text == "done" else text for text in told]

    def wait(self) -> None:
        """Waits until the save is complete; then deletes the checkpoints that need not stay."""
        if self._saving < 0:
            return
        step, self._saving, wrong = self._saving, -1, ""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            wrong = _reason(error)
        if self._failed(step, self._vote(wrong, SAVE_LIMIT_S)):
            return
        self.newest = step
        steps = self.steps()
        known = [s for s in steps if self._evals.get(s, math.nan) >= 0]
        best = max(known, key=self._evals.get, default=-1)
        for old in steps[: -self._keep] if self._keep else []:
            if old != best:
                try:
                    self._manager.delete(old)
                except Exception as error:
                    self.say(f"checkpoint {self.folder}/{old} stays: {_reason(error)}")

    def _failed(self, step: int, told: list[str]) -> bool:
        """True if a process could not save; then this prints a line, and no process has saved.

        told: what went wrong on each process.
        """
        wrong = _first(told)
        if not wrong:
            return False
        left = f"step {self.newest} stays the newest" if self.newest >= 0 else "there is none yet"
        self.say(f"checkpoint of step {step} cannot be written to {self.folder}: {wrong}; {left}")
        self._manager, self._lost = None, step
        if self._path is not None and jax.process_index() == 0:
            for rest in self._path.glob(f"{step}{HALF_WRITTEN}*"):
                shutil.rmtree(rest, ignore_errors=True)
        return True

    # ---- Restoring -------------------------------------------------------------------------------

    def restore(
        self,
        wanted: Any,
        check: Callable[[dict[str, Any]], None],
        steps: list[int] | None = None,
        part: bool = False,
    ) -> tuple[Any, dict[str, Any]] | None:
        """The arrays and the record of the newest checkpoint that is complete, or None.

        wanted: the shapes, dtypes and shardings of the arrays. check: raises UserMistake if this
        run may not go on from a checkpoint with this record. steps: the only steps to try. part:
        True if the checkpoint may have more arrays than `wanted`; they are not read.
        If some process cannot read a checkpoint, this prints a line and tries the next older one.
        Raises UserMistake if there are checkpoints and none of them can be read.
        """
        if self._path is not None and self._path.is_dir() and not self._read_only:
            for rest in sorted(self._path.glob(f"*{HALF_WRITTEN}*")):
                self.say(f"checkpoint {rest} is half-written and passed over")
        there = self.steps()
        tried = [step for step in there if steps is None or step in steps]
        for step in reversed(tried):
            record, arrays, wrong = None, None, ""
            try:
                record = self._read(step)
            except Exception as error:  # damaged files raise errors of any kind
                wrong = _reason(error)
            wrong = _first(gather_texts(wrong))
            if not wrong:
                check(record)
                try:
                    arrays = self._restore(step, wanted, part)
                except Exception as error:
                    if "RESOURCE_EXHAUSTED" in str(error):  # the checkpoint is not to blame
                        raise
                    wrong = _reason(error)
                wrong = _first(gather_texts(wrong))
            if not wrong:
                sums = [int(x) for x in jax.device_get(jax.tree.leaves(checksums(arrays)))]
                saved = dict(zip(record["arrays"], record["checksums"], strict=True))
                same = sums == [saved[name] for name in self.shapes(arrays)]
                wrong = "" if same else "its arrays are not what was saved"
            if not wrong:
                self.newest = step
                return arrays, record
            self.say(f"checkpoint {self.folder}/{step} is damaged and passed over: {wrong}")
        if tried:
            raise UserMistake(
                f"none of the checkpoints in {self.folder} can be read; RESUME=never begins anew"
            )
        return None

    def _read(self, step: int) -> dict[str, Any]:
        args = ocp.args.Composite(**{RECORD: ocp.args.JsonRestore()})
        record = dict(self._open().restore(step, args=args)[RECORD])
        if record.pop("sha256", None) != _digest(record) or record["step"] != step:
            raise ValueError("its record is not what was saved")
        return record

    def _restore(self, step: int, abstract: Any, part: bool) -> Any:
        args = ocp.args.StandardRestore(abstract)
        if part:
            how = ocp.checkpoint_utils.construct_restore_args(abstract)
            args = ocp.args.PyTreeRestore(abstract, restore_args=how, partial_restore=True)
        return self._open().restore(step, args=ocp.args.Composite(**{ARRAYS: args}))[ARRAYS]

    def set_aside(self, after: int, where: Path) -> None:
        """Moves the checkpoints of later steps than `after` to the folder `where`.

        This run will make these checkpoints again. Raises UserMistake if they are in a bucket.
        """
        later = [step for step in self.steps() if step > after]
        if later and self._path is None:
            raise UserMistake(
                f"CHECKPOINT_DIR={self.folder} has checkpoints of steps {later[0]} to {later[-1]} "
                f"of another run; choose an empty folder"
            )
        with told_by_all():  # no process looks into the folder before they are moved
            try:
                if later and jax.process_index() == 0:
                    where.mkdir(parents=True, exist_ok=True)
                    for step in later:
                        shutil.move(self._path / str(step), where / str(step))
            except OSError as error:
                name = f"the checkpoints in {self.folder}"
                raise UserMistake(f"{name} cannot be moved to {where}: {error.strerror}") from None
        self._manager = None


def space_lines(needs: Sequence[tuple[str, Path, int]]) -> list[str]:
    """A line with what a run will write and the space that is free for it, and a note for each disk
    that has too little space.

    needs: (what, the folder that it will be in, bytes).
    """
    texts, needed, free = [], collections.Counter(), {}
    for what, folder, size in needs:
        there = next(f for f in (folder, *folder.absolute().parents) if f.exists())
        disk = there.stat().st_dev
        needed[disk] += size
        free[disk] = shutil.disk_usage(there).free
        texts.append(f"{what} in {folder}, {free[disk] / 1e9:.3g} GB free")
    notes = [
        f"note: the run needs {needed[disk] / 1e9:.3g} GB of disk, and {space / 1e9:.3g} GB are "
        f"free; lower SAVE_KEEP, raise SAVE_EVERY_STEPS (0 saves nothing), set EXPORT_HF=none, or "
        f"set CHECKPOINT_DIR and EXPORT_HF to a larger disk"
        for disk, space in free.items()
        if needed[disk] > space
    ]
    return [f"disk: {'; '.join(texts) or 'no checkpoints and no export'}", *notes]


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


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _reason(error: Exception) -> str:
    """The message of the system if one is in the error's text, else this text in one line."""
    text = in_one_line(error, with_type=False)
    known = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
    return next((os.strerror(n) for n in known if os.strerror(n) in str(error)), text)


def _first(texts: list[str]) -> str:
    """The first text that is not empty; MISSED comes last, because another text is its reason."""
    return next((text for text in sorted(texts, key=MISSED.__eq__) if text), "")


def _leave_out_closed_loops(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Passes an error that no caller can catch to `hook`, which prints it, with one exception.

    When a write of orbax fails, orbax's other writes report to an event loop that is closed by
    then; the error about that is left out.
    """
    if str(unraisable.exc_value) != "Event loop is closed" or unraisable.object is not None:
        hook(unraisable)
