"""What a run leaves behind: its lines and its files.

Every process prints its lines; only process 0 writes files. metrics.jsonl has the metrics
of each step and evaluation, samples.jsonl some completions of training, eval.jsonl the answers of
evaluations. config.yaml has the settings, summary.json the state of the run.
"""

import collections
import contextlib
import functools
import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import yaml
from tqdm import tqdm

from infra.mistakes import UserMistake, reading, writing

FILES = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")  # each line has a step
SUMMARY = "summary.json"
LOCK = ".lock"  # a file in the folders of a run; process 0 locks it for as long as it lives
# The states of a run. `died`: it recorded no end: the process or its machine was killed.
RUNNING, DONE, STOPPED, FAILED, DIED = "running", "done", "stopped", "failed", "died"
STEP_S = "time/train/step_s"  # the training record of a step, which is its last, has this metric
COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's name for a compilation
BAR_DELAY_S = 3.0  # only work that takes longer gets a progress bar

# ---- Seconds -------------------------------------------------------------------------------------


class Clock:
    """Seconds of each phase of a step, and of what jax compiled in it."""

    def __init__(self, phases: Iterable[str]) -> None:
        self.started = self._last = time.perf_counter()
        self.seconds = dict.fromkeys(phases, 0.0)
        self._compiled_before = len(compile_seconds())

    def compiled(self) -> list[float]:
        return compile_seconds()[self._compiled_before :]

    def lap(self, phase: str) -> None:
        """Ends a phase, one of `phases`: the seconds since the last phase ended belong to it."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def total(self) -> float:
        return time.perf_counter() - self.started


@functools.cache  # jax would call each of two listeners
def compile_seconds() -> list[float]:
    """The seconds of each program that jax has compiled in this process since the first call, or
    read from its cache of compiled programs; the list grows."""
    seconds: list[float] = []

    def append(event: str, duration_secs: float, **_: object) -> None:
        if event == COMPILED:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(append)
    return seconds


def progress_bar(text: str, total: int, unit: str) -> tqdm:
    """A bar on the terminal of process 0, for use in a `with`; elsewhere it shows nothing.

    total: the amount of work in `unit`, such as "tensors"; bar.update(amount) counts work done.
    """
    hidden = None if jax.process_index() == 0 else True  # None: hidden unless on a terminal
    look = {"unit": f" {unit}", "delay": BAR_DELAY_S, "leave": False}
    return tqdm(desc=text, total=total, disable=hidden, **look)


# ---- Lines and records ---------------------------------------------------------------------------


class Tracker(Protocol):
    """What also gets the records of a run, such as extras/trackers.py."""

    def record(self, step: int, values: dict[str, Any]) -> None: ...

    def close(self, summary: dict[str, Any], finished: bool) -> None: ...


class RunLog:
    """What the run prints and records. A line that cannot be written ends the run: Unwritable."""

    def __init__(
        self, out: Path, *, steps: int, writes: bool, lengths: Mapping[str, int] | None = None
    ) -> None:
        """out: the run's folder, which is made if writes is True, on process 0. lengths: the bytes
        of each of FILES that stay; None: all. Raises OSError if the folder cannot be written.
        """
        self._out, self._steps, self._writes = out, steps, writes
        self.recent: collections.deque[float] = collections.deque(maxlen=10)  # seconds of steps
        self.newest: dict[str, Any] = {}  # the newest value of each metric
        self.deadline = math.inf  # the time.monotonic() at which MAX_HOURS are over
        self.trackers: Tracker | None = None  # they get the records too, see startup.open_log
        if not writes:
            return
        out.mkdir(parents=True, exist_ok=True)
        if lengths is not None:
            truncate_files(out, lengths)

    def print_line(self, text: str) -> None:
        """Prints one line, above a progress bar if there is one, and in one piece, since another
        thread may print now."""
        with writing("the log"), tqdm.external_write_mode():
            print(text + "\n", end="", flush=True)

    def record_metrics(self, step: int, values: dict[str, Any]) -> None:
        """Appends one record to metrics.jsonl, and adds it to the trackers."""
        if STEP_S in values:
            self.recent.append(values[STEP_S])
            values = values | {"time/train/step_avg_last10_s": np.mean(self.recent)}
        values = to_json_values(values)
        self.newest |= values
        self.append_entries("metrics.jsonl", step, [values])
        if self.trackers:
            self.trackers.record(step, values)

    def append_entries(self, name: str, step: int, entries: list[dict[str, Any]]) -> None:
        """Appends a line for each entry to one of FILES. If an error leaves a part of a line,
        truncate_files removes it at the next start."""
        if not self._writes:
            return
        file = self._out / name
        text = "".join(json.dumps({"step": step} | entry) + "\n" for entry in entries)
        with writing(file), file.open("a", encoding="utf-8") as lines:
            lines.write(text)

    def file_lengths(self) -> dict[str, int]:
        """The bytes of each of FILES, on disk, on process 0; elsewhere {}. Raises Unwritable."""
        lengths = {}
        for name in FILES if self._writes else ():
            with writing(self._out / name), (self._out / name).open("ab") as file:
                os.fsync(file.fileno())
                lengths[name] = file.tell()
        return lengths

    def time_left(self, step: int, clock: Clock) -> str:
        """The end of the step's line, such as " left=1:02:00", from the median seconds of this step
        and of the ten before, or what is left of MAX_HOURS, if that is less. It is empty for the
        first step, which compiles, and for the last."""
        steps = self._steps - step - 1
        if not self.recent or not steps:
            return ""
        seconds = statistics.median_low([*self.recent, clock.total()])
        left = max(0.0, min(steps * seconds, self.deadline - time.monotonic()))
        return f" left={tqdm.format_interval(left)}"

    def close(self, summary: dict[str, Any] | None = None, *, finished: bool = False) -> None:
        """Ends the run in its trackers.

        summary: values for its summary in W&B. finished: all steps and evaluations are done.
        """
        if self.trackers:
            self.trackers.close(summary or {}, finished)


# ---- Writing files -------------------------------------------------------------------------------


def raise_if_not_writable(name: str, folder: Path) -> None:
    """Raises UserMistake, naming the setting, if the folder cannot be made or written."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "is not writable" if nearest.is_dir() else "is not a folder"
        raise UserMistake(f"{name} cannot be written: {nearest} {reason}")


def replace_file(file: Path, text: str) -> None:
    """Replaces a file at once, so that nobody reads a part of it, also after a loss of power. Half
    a character, which JSON and the bytes of a shell can hold, is written as its number. Raises
    OSError."""
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("w", encoding="utf-8", errors="backslashreplace") as lines:
        lines.write(text)
        lines.flush()
        os.fsync(lines.fileno())
    partial.replace(file)


def truncate_files(out: Path, lengths: Mapping[str, int]) -> None:
    """Ends each of FILES after its first bytes, those of `lengths` (else 0): a resumed run
    writes the rest again. Makes files that are missing. A file with fewer bytes is filled with
    empty lines, and a printed line says so. Raises OSError."""
    for name in FILES:
        file, length = out / name, lengths.get(name, 0)
        file.touch()
        size = file.stat().st_size
        os.truncate(file, min(size, length))  # it needs no space, which writing anew would
        if size < length:  # empty lines fill it, so that the lengths of later checkpoints are right
            reason = f"the checkpoint was saved when it had {length}: records are missing"
            print(f"note: {file} has {size} bytes, and {reason}", flush=True)
            with file.open("ab") as lines:
                lines.write(b"\n" * (length - size))


def to_json_values(value: object) -> Any:
    """The value as JSON has it: a number of NumPy is one of Python, and one that is not finite
    becomes null, since JSON has no NaN."""
    text = json.dumps(value, default=lambda x: x.item() if hasattr(x, "item") else str(x))
    return json.loads(text, parse_constant=lambda name: None)


# ---- Reading files -------------------------------------------------------------------------------


def read_settings(out: Path) -> dict[str, Any]:
    """The values in config.yaml, by their YAML names. Raises UserMistake without a readable one."""
    file = out / "config.yaml"
    if not file.is_file():
        raise UserMistake(f"{out} has no config.yaml; give the OUTPUT_DIR of a run")
    with reading(f"{file} cannot be read"):
        return yaml.safe_load(file.read_text(encoding="utf-8"))


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a .jsonl file, each with its step; none if there is no file."""
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # a killed run leaves half a line
                yield json.loads(line)


def run_state(out: Path) -> tuple[str, str]:
    """The state of a run, and the reason for it. A run that is killed cannot change its summary, so
    that the lock on its folder says whether it is still running."""
    import fcntl  # Windows has none

    with contextlib.suppress(OSError, ValueError):
        summary = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
        if summary["state"] != RUNNING:
            return summary["state"], summary["why"]
    try:
        with (out / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return RUNNING, ""
    except OSError:
        pass  # there is no lock
    return DIED, "it recorded no end: the process or its machine was killed"


def metric_values(records: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """[records] float64: the values of a metric; NaN where it is missing or null."""
    values = [record.get(name) for record in records]
    return np.array([np.nan if value is None else value for value in values], np.float64)


def mean_without_nan(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else math.nan
