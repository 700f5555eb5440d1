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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from processes import gather_texts, told_by_all

RECORD, ARRAYS = "record", "arrays"  # the items of a checkpoint, folders in its folder
MISSED = "another process could not do its part"
SAVE_LIMIT_S = 1200  # for all processes to have written a checkpoint
HALF_WRITTEN = ".orbax-checkpoint-tmp"  # in the name of a folder that is not whole


class Meeting:
    """Where all processes wait for each other while orbax saves: its barrier.

    Jax's own barrier would keep the others for 20 minutes from one whose write failed, which skips
    it. This one also ends, by an error, when a process has gone on without having come to it.
    """

    def __init__(self, name: str) -> None:
        """name: the same on all processes, and used once."""
        self._name, self._times = name, collections.Counter()
        self._been: set[str] = set()
        self.is_over = False  # True: nobody comes any more

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        client = ocp.multihost.get_jax_distributed_client()
        me, count = jax.process_index(), jax.process_count()
        self._times[key] += 1  # orbax uses some keys again
        here, end = f"{key}:{self._times[key]}", time.monotonic() + timeout_ms / 1000
        self._been.add(here)
        client.key_value_set(f"{self._name}/came/{here}/{me}", "yes")
        client.key_value_set(f"{self._name}/newest/{me}", here, allow_overwrite=True)
        while True:
            newest = [where for _, where in client.key_value_dir_get(f"{self._name}/newest/")]
            came = client.key_value_dir_get(f"{self._name}/came/{here}/")
            if len(came) == count:
                return
            if self.is_over or not self._been.issuperset(newest):
                raise RuntimeError(MISSED)
            if time.monotonic() > end:
                raise TimeoutError(f"not all processes have done it in {timeout_ms // 1000} s")
            time.sleep(0.1)


class Checkpoints:
    """Those in one folder, which every process has to see; made by the first save."""

    def __init__(self, folder: str, keep: int = 0, read_only: bool = False) -> None:
        """folder: local, or gs://bucket/folder. keep: how many of the newest stay; 0: all.
        read_only: of another run, which may be alive."""
        local = "://" not in folder
        self.folder = str(Path(folder).absolute()) if local else folder
        self._path, self._keep = Path(self.folder) if local else None, keep
        self._read_only = read_only
        self.say: Callable[[str], None] = lambda line: print(line, flush=True)
        self._manager: ocp.CheckpointManager | None = None
        self._evals: dict[int, float] = {}
        self._saving = self.newest = -1  # step
        self._opened, self._meeting = 0, None  # times; of the manager

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
            # Orbax logs an error once for each of its threads, with all frames; here it is a line.
            logging.getLogger("absl").setLevel(logging.CRITICAL)
            own, self._meeting = not self._read_only, None
            if own:
                hook = functools.partial(_leave_out_closed_loops, sys.__unraisablehook__)
                sys.unraisablehook = hook
            if own and jax.process_count() > 1:
                self._opened += 1
                self._meeting = Meeting(f"{_digest({'folder': self.folder})}:{self._opened}")
            options = ocp.CheckpointManagerOptions(
                create=own, cleanup_tmp_directories=own, read_only=not own,
                save_root_metadata=False,
                async_options=ocp.AsyncOptions(SAVE_LIMIT_S, barrier_sync_fn=self._meeting),
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
        checkpoints the one of the best stays. One that cannot be written costs a line, not the run.
        """
        self.wait()
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
        if not self._failed(step, wrong):
            self._saving = step

    def wait(self) -> None:
        """Until what is being saved is whole; then drops those that need not stay."""
        if self._saving < 0:
            return
        step, self._saving, wrong = self._saving, -1, ""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            wrong = _brief(error)
        if self._failed(step, wrong):
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

    def _failed(self, step: int, wrong: str) -> bool:
        """True, with a line, if a process could not save: then none has."""
        wrong = _first(gather_texts(wrong))
        if not wrong:
            return False
        left = f"step {self.newest} stays the newest" if self.newest >= 0 else "there is none yet"
        self.say(f"checkpoint of step {step} cannot be written to {self.folder}: {wrong}; {left}")
        self._manager = None
        if self._meeting:
            self._meeting.is_over = True
        if self._path is not None and jax.process_index() == 0:
            for rest in self._path.glob(f"{step}{HALF_WRITTEN}*"):
                shutil.rmtree(rest, ignore_errors=True)
        return True

    # ---- Restoring -------------------------------------------------------------------------------

    def restore(
        self, abstract: Callable[[dict[str, Any]], Any], steps: list[int] | None = None
    ) -> tuple[Any, dict[str, Any]] | None:
        """The arrays and the record of the newest checkpoint that is whole; None if there is none.

        abstract: of a record, the shapes, dtypes and shardings of its arrays; it may refuse the
        record by a ValueError, which is passed on. steps: the only ones to try. One that cannot be
        used, by all processes, costs a line. Raises ValueError if there are some and none can be.
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
                wanted = abstract(record)
                try:
                    arrays = self._restore(step, wanted)
                except Exception as error:
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
    """The first that is not empty; of what a save says, a reason before its consequence."""
    return next((text for text in sorted(texts, key=MISSED.__eq__) if text), "")


def _leave_out_closed_loops(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Prints an error that a library's thread can raise to nobody, but for one: when a write of
    orbax's fails, its other writes find the event loop closed that they report to."""
    if str(unraisable.exc_value) != "Event loop is closed" or unraisable.object is not None:
        hook(unraisable)
