"""Checkpoints of a whole run: saved by orbax while the run goes on, restored onto any mesh.

A checkpoint N holds what a run needs to go on after N steps as if it had never stopped: arrays (the
training state, a moving reference) and a record (JSON: settings, data position, evaluations). It
counts once it is whole. With it go a checksum of every array, which is the same however the array
is sharded, and one of the record; what does not match them is never restored.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from runtime.processes import gather_texts, told_by_all

RECORD, ARRAYS = "record", "arrays"  # the items of a checkpoint, folders in its folder
MISSED = "another process could not do its part"
PROBE_BYTES = 2**20  # of a file that is made and removed before a save
BEGIN_LIMIT_S = 60  # for the others to tell how a save began, where it failed to on this process
SAVE_LIMIT_S = 1200  # for all processes to have written a checkpoint
HALF_WRITTEN = ".orbax-checkpoint-tmp"  # in the name of a folder that is not whole


class SaveBarrier:
    """Where the processes wait for each other while orbax saves in the background.

    At jax's own barrier the others would wait 20 minutes for a process whose write has failed.
    At this one such a process leaves a mark, which ends the waiting of all by an error.
    """

    def __init__(self, name: str) -> None:
        """name: the same on all processes, and used once."""
        self._name, self._times = name, collections.Counter()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        client, me = ocp.multihost.get_jax_distributed_client(), jax.process_index()
        in_background = threading.current_thread() is not threading.main_thread()
        if in_background and sys.exc_info()[1]:  # on orbax's way out of a save that has failed
            client.key_value_set(f"{self._name}/failed/{me}", "", allow_overwrite=True)
            return
        self._times[key] += 1  # orbax uses its keys again
        here, end = f"{self._name}/{key}:{self._times[key]}/", time.monotonic() + timeout_ms / 1000
        client.key_value_set(f"{here}{me}", "")
        while len(client.key_value_dir_get(here)) < jax.process_count():
            if client.key_value_dir_get(f"{self._name}/failed/"):
                raise RuntimeError(MISSED)
            if time.monotonic() > end:
                raise TimeoutError(f"not all processes have written it in {timeout_ms // 1000} s")
            time.sleep(0.05)


class Checkpoints:
    """Those in one folder, which every process has to see; made by the first save."""

    def __init__(self, folder: str, keep: int = 0, read_only: bool = False) -> None:
        """folder: local, or gs://bucket/folder. keep: how many of the newest stay; 0: all.
        read_only: True for the folder of another run, which may be alive."""
        local = "://" not in folder
        self.folder = str(Path(folder).absolute()) if local else folder
        self._path, self._keep = Path(self.folder) if local else None, keep
        self._read_only, self._short_name = read_only, _digest({"folder": self.folder})[:12]
        self.say: Callable[[str], None] = lambda line: print(line, flush=True)
        self._manager: ocp.CheckpointManager | None = None
        self._evals: dict[int, float] = {}
        self._saving = self.newest = -1  # step
        self._votes = self._opened = 0  # how often
        self._lost = -1  # the newest step whose save has failed

    def steps(self) -> list[int]:
        """Of the checkpoints that look whole."""
        there = self._path is None or self._path.is_dir()
        everywhere = gather_texts("yes" if there else "")
        if any(everywhere) and not all(everywhere):
            raise ValueError(f"{self.folder} is there on some hosts and not on others")
        steps = sorted(self._open().all_steps()) if there else []
        return json.loads(gather_texts(json.dumps(steps))[0])  # as process 0 sees them

    def stop_if_out_of_reach(self) -> None:
        """Raises ValueError if a folder in a bucket cannot be looked into from here."""
        try:
            epath.Path(self.folder).exists()
        except Exception as error:  # gs:// needs gcsfs, whose own errors have no common base
            raise ValueError(f"CHECKPOINT_DIR={self.folder}: {_brief(error)}") from None

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            # Of a failed save orbax, and asyncio for it, show every thread's and task's error with
            # all frames, some only when the program ends; here it is a line.
            for name in ("absl", "asyncio"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            own = not self._read_only
            if own:
                hook = functools.partial(_leave_out_closed_loops, sys.__unraisablehook__)
                sys.unraisablehook = hook
            self._opened += 1
            barrier = SaveBarrier(f"{self._short_name}/barrier{self._opened}")
            options = ocp.CheckpointManagerOptions(
                create=own, cleanup_tmp_directories=own, read_only=not own,
                save_root_metadata=False,
                async_options=ocp.AsyncOptions(
                    SAVE_LIMIT_S, barrier_sync_fn=barrier if jax.process_count() > 1 else None
                ),
            )  # fmt: skip
            try:
                self._manager = ocp.CheckpointManager(self.folder, options=options)
            except ImportError as error:  # gs:// needs gcsfs
                raise ValueError(f"{self.folder} cannot be opened: {error}") from None
        return self._manager

    @property
    def latest(self) -> int:
        """The step of the newest checkpoint, whole or being saved; -1: there is none."""
        return max(self.newest, self._saving)

    @staticmethod
    def shapes(arrays: Any) -> list[str]:
        """A text for each array, or what stands for it: path, dtype and shape."""
        leaves = jax.tree.leaves_with_path(arrays)
        return [f"{jax.tree_util.keystr(path)} {x.dtype}{[*x.shape]}" for path, x in leaves]

    # ---- Saving ----------------------------------------------------------------------------------

    def save(self, step: int, arrays: Any, record: dict[str, Any], evals: dict[int, float]) -> None:
        """Begins to save the arrays after `step` steps; they may change as soon as this returns.

        record: JSON values. evals: the accuracy at each step evaluated so far; besides the newest
        checkpoints the one of the best stays. One that cannot be written costs a line, not the run,
        and is not tried again.
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
            if step in self._open().all_steps():  # of an earlier run, passed over
                self._open().delete(step)
            self._open().save(
                step,
                args=ocp.args.Composite(
                    **{ARRAYS: ocp.args.StandardSave(arrays), RECORD: ocp.args.JsonSave(record)}
                ),
                force=True,
            )
        except Exception as error:  # the storage's errors have no common base
            wrong = _brief(error)
        if not self._failed(step, self._vote(wrong, BEGIN_LIMIT_S)):
            self._saving = step

    def _no_room(self, arrays: Any) -> str:
        """Why this process could not write its part of the arrays; "" if it most likely can.

        All processes find this out and tell each other before a save begins, since orbax lets the
        others wait for one that fails in the midst of it.
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
            return _brief(error)
        return ""

    def _vote(self, wrong: str, limit_s: int) -> list[str]:
        """What went wrong in this part of a save, of every process; "" where nothing did.

        The processes tell each other through the service by which they have joined, because one
        that waits within orbax cannot take part in a collective of arrays. If this process has
        failed and another one says nothing for limit_s, the other waits for this process in a
        collective of orbax's, which only the end of this process releases. Raises SystemExit.
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
                f"error: a checkpoint cannot be written to {self.folder} from here: {wrong}; "
                f"another process waits for this part of it, so that the run has to end"
            ) from None
        return ["" if text == "done" else text for text in told]

    def wait(self) -> None:
        """Until what is being saved is whole; then drops those that need not stay."""
        if self._saving < 0:
            return
        step, self._saving, wrong = self._saving, -1, ""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            wrong = _brief(error)
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
                    self.say(f"checkpoint {self.folder}/{old} stays: {_brief(error)}")

    def _failed(self, step: int, told: list[str]) -> bool:
        """True, with a line, if a process could not save: then none has. told: by each process."""
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
    ) -> tuple[Any, dict[str, Any]] | None:
        """The arrays and the record of the newest checkpoint that is complete, or None.

        wanted: the shapes, dtypes and shardings of the arrays. check: raises ValueError if this run
        may not go on from a checkpoint with this record. steps: the only steps to try.
        A checkpoint that some process cannot read costs a line. Raises ValueError if there are
        checkpoints and none of them can be read.
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
            except Exception as error:  # whatever a damaged file makes of a reader
                wrong = _brief(error)
            wrong = _first(gather_texts(wrong))
            if not wrong:
                check(record)
                try:
                    arrays = self._restore(step, wanted)
                except Exception as error:
                    if "RESOURCE_EXHAUSTED" in str(error):  # the checkpoint is not to blame
                        raise
                    wrong = _brief(error)
                wrong = _first(gather_texts(wrong))
            if not wrong:
                sums = [int(x) for x in jax.device_get(jax.tree.leaves(checksums(arrays)))]
                wrong = "" if sums == record["checksums"] else "its arrays are not what was saved"
            if not wrong:
                self.newest = step
                return arrays, record
            self.say(f"checkpoint {self.folder}/{step} is damaged and passed over: {wrong}")
        if tried:
            raise ValueError(
                f"none of the checkpoints in {self.folder} can be read; RESUME=never begins anew"
            )
        return None

    def _read(self, step: int) -> dict[str, Any]:
        args = ocp.args.Composite(**{RECORD: ocp.args.JsonRestore()})
        record = dict(self._open().restore(step, args=args)[RECORD])
        if record.pop("sha256", None) != _digest(record) or record["step"] != step:
            raise ValueError("its record is not what was saved")
        return record

    def _restore(self, step: int, abstract: Any) -> Any:
        args = ocp.args.Composite(**{ARRAYS: ocp.args.StandardRestore(abstract)})
        return self._open().restore(step, args=args)[ARRAYS]

    def set_aside(self, after: int, where: Path) -> None:
        """Moves the checkpoints of later steps than `after`, which this run will make anew, to a
        folder `where`. ValueError if the folder is not local and has some."""
        later = [step for step in self.steps() if step > after]
        if later and self._path is None:
            raise ValueError(
                f"CHECKPOINT_DIR={self.folder} has checkpoints of steps {later[0]} to {later[-1]} "
                f"of another run; choose an empty folder"
            )
        with told_by_all():  # nobody looks before they are gone
            try:
                if later and jax.process_index() == 0:
                    where.mkdir(parents=True, exist_ok=True)
                    for step in later:
                        shutil.move(self._path / str(step), where / str(step))
            except OSError as error:
                name = f"the checkpoints in {self.folder}"
                raise ValueError(f"{name} cannot be moved to {where}: {error.strerror}") from None
        self._manager = None


@jax.jit
def checksums(arrays: Any) -> Any:
    """uint32 of each array: the sum over its elements of their bits times 2 * index + 1, modulo
    2^32, which is the same in whatever order it is added up."""

    def of(x: jax.Array) -> jax.Array:
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
        index = jnp.zeros(bits.shape, jnp.uint32)
        for axis, size in enumerate(bits.shape):
            index = index * size + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        return (bits * (2 * index + 1)).sum(dtype=jnp.uint32)

    return jax.tree.map(of, arrays)


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    known = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
    return next((os.strerror(n) for n in known if os.strerror(n) in text), text[:200])


def _first(texts: list[str]) -> str:
    """The first that is not empty; a reason comes before its consequence."""
    return next((text for text in sorted(texts, key=MISSED.__eq__) if text), "")


def _leave_out_closed_loops(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Prints an error that has no caller who could catch it, as Python does, but for one: when one
    write of orbax fails, its other writes report to an event loop that is closed by then."""
    if str(unraisable.exc_value) != "Event loop is closed" or unraisable.object is not None:
        hook(unraisable)
