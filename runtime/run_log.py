"""What a run leaves behind: its lines, metrics.jsonl, samples.jsonl, eval.jsonl and W&B.

Every process prints its lines; only process 0 writes files and W&B.
"""

import collections
import contextlib
import json
import os
import statistics
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from runtime.long_work import compilations
from runtime.mistakes import Unwritable, UserMistake, in_one_line
from runtime.wandb_run import TRAINED, WandbRun

FILES = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")  # each line has a step


class Clock:
    """Seconds of each phase of a step, and what jax compiled in it."""

    def __init__(self, phases: Iterable[str]) -> None:
        self.started = self._last = time.perf_counter()
        self.seconds = dict.fromkeys(phases, 0.0)
        self._compiled_before = len(compilations())

    def compiled(self) -> list[float]:
        """The seconds of each program that jax compiled since the clock was made."""
        return compilations()[self._compiled_before :]

    def lap(self, phase: str) -> None:
        """Ends a phase, one of `phases`: the seconds since the last phase ended belong to it."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self.started


def stop_if_not_writable(name: str, folder: Path) -> None:
    """Raises UserMistake, naming the setting, if the folder cannot be made or written."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is not writable" if there.is_dir() else "is not a folder"
        raise UserMistake(f"{name} cannot be written: {there} {why}")


class RunLog:
    """What the run prints and records. A line that cannot be written ends the run: Unwritable."""

    def __init__(
        self,
        out: Path,
        *,
        steps: int,
        writes: bool,
        wandb: dict[str, Any] | None,
        first_step: int = 0,
        kept: Collection[str] = frozenset(),
    ) -> None:
        """out: the run's folder, which is made if writes is True, on process 0.

        wandb: the arguments of wandb.init, or None. first_step: how many steps are done. kept: the
        evaluations after these steps that are not made again; see cut_back.
        Raises OSError if the folder cannot be written.
        """
        self._out, self._steps, self._writes = out, steps, writes
        self._recent: collections.deque[float] = collections.deque(maxlen=10)  # seconds of steps
        self._wandb: WandbRun | None = None
        if not writes:
            return
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            cut_back(out / name, first_step, kept)
        if wandb:
            with self._surviving_wandb():
                self._wandb = WandbRun(out, wandb)

    def line(self, text: str) -> None:
        """Prints one line, above a progress bar if there is one, and in one piece, since another
        thread may print now."""
        try:
            with tqdm.external_write_mode():
                print(text + "\n", end="", flush=True)
        except OSError as error:
            raise Unwritable(f"the log cannot be written: {error.strerror}") from None

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Appends one record to metrics.jsonl, and to W&B."""
        if TRAINED in values:
            self._recent.append(values[TRAINED])
            values = values | {"time/train/step_avg_last10_s": np.mean(self._recent)}
        values = plain(values)
        self.entries("metrics.jsonl", step, [values])
        if self._wandb:
            with self._surviving_wandb():
                self._wandb.record(step, values)

    def entries(self, name: str, step: int, entries: list[dict[str, Any]]) -> None:
        """Appends a line for each entry to one of FILES. A part of a line that an error leaves goes
        at the next start, by cut_back."""
        if not self._writes:
            return
        text = "".join(json.dumps({"step": step} | entry) + "\n" for entry in entries)
        try:
            with (self._out / name).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise Unwritable(f"{self._out / name} cannot be written: {error.strerror}") from None

    def time_left(self, step: int, clock: Clock) -> str:
        """The end of the step's line, such as " left=1:02:00", from the median seconds of this step
        and of the ten before. It is empty for the first step, which compiles, and for the last."""
        steps = self._steps - step - 1
        if not self._recent or not steps:
            return ""
        seconds = statistics.median_low([*self._recent, clock.total()])
        return f" left={tqdm.format_interval(steps * seconds)}"

    def close(self, summary: dict[str, Any] | None = None, *, finished: bool = False) -> None:
        """Ends W&B.

        summary: values for the run's summary there. finished: all steps and evaluations are done.
        """
        if self._wandb:
            with self._surviving_wandb():
                self._wandb.close(plain(summary or {}), finished)

    @contextlib.contextmanager
    def _surviving_wandb(self) -> Iterator[None]:
        """After an error of W&B within this context a line says so, and W&B gets nothing more."""
        try:
            yield
        except Exception as error:  # the errors of W&B and its transports have no common base
            self._wandb, why = None, in_one_line(error, with_type=False)
            there = f"{self._out}/metrics.jsonl has the records"
            self.line(f"W&B: {why}; the run goes on without it, and {there}")


def replace_file(file: Path, text: str) -> None:
    """Replaces a file at once, so that nobody reads a part of it. Raises OSError."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def cut_back(file: Path, step: int, kept: Collection[str] = frozenset()) -> None:
    """Ends the file before the first line that a run will write again if it goes on after `step`
    steps, and before a last line that is incomplete or damaged. Makes a file that is missing.

    kept: the kinds of evaluations, "eval" or "eval_full", whose lines after `step` steps stay.
    Raises OSError.
    """
    file.touch()
    length = 0
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
            except ValueError:  # A crash of the machine may leave zeros at the end of a file.
                break
            later = record["step"] - step
            kinds = {name.partition("/")[0] for name in record} | {record.get("evaluation")}
            if later > 0 or (later == 0 and kinds.isdisjoint(kept)):
                break
            length += len(line)
    os.truncate(file, length)  # it needs no space, which writing the file anew would


def plain(value: Any) -> Any:
    """The value as JSON has it: a number of NumPy is one of Python, and one that is not finite
    becomes null, since JSON has no NaN."""
    text = json.dumps(value, default=lambda x: x.item() if hasattr(x, "item") else str(x))
    return json.loads(text, parse_constant=lambda name: None)
