"""What a run leaves behind: its lines, metrics.jsonl, samples.jsonl, eval.jsonl and W&B.

Every process prints its lines; only process 0 writes files and W&B.
"""

import collections
import json
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from runtime.long_work import Compilation, compilations
from runtime.mistakes import Unwritable, UserMistake
from runtime.wandb_run import TRAINED, WandbRun

FILES = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")  # each line has a step
PARTIAL = ".partial"  # the end of the name of a file that will replace another one


class Clock:
    """Seconds of each phase of a step, and what jax compiled in it."""

    def __init__(self, phases: Iterable[str]) -> None:
        self.started = self._last = time.perf_counter()
        self.seconds = dict.fromkeys(phases, 0.0)
        self._compiled_before = len(compilations())

    def compiled(self) -> list[Compilation]:
        """What jax compiled since the clock was made."""
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
        Raises OSError if the folder cannot be written, and UserMistake.
        """
        self._recent: collections.deque[float] = collections.deque(maxlen=10)  # seconds of steps
        self._timed: collections.deque[float] = collections.deque(maxlen=10)  # without compiling
        hidden = None if writes else True  # tqdm takes None as: hidden unless on a terminal
        self._bar = tqdm(total=steps, initial=first_step, unit="step", disable=hidden)
        self._out, self._files = out, {}
        self._steps, self._steps_seen = steps, 0
        self._wandb: WandbRun | None = None
        if not writes:
            return
        out.mkdir(parents=True, exist_ok=True)
        for rest in out.glob(f"*{PARTIAL}"):  # a killed run may leave one
            rest.unlink()
        for name in FILES:
            cut_back(out / name, first_step, kept)
            self._files[name] = open(out / name, "ab", buffering=0)
        if wandb:
            self._wandb = WandbRun(out, wandb, self.line)

    def line(self, text: str) -> None:
        """Prints one line, above the progress bar if there is one."""
        try:
            if self._bar.disable:
                print(text, flush=True)
            else:
                self._bar.write(text)
        except UnicodeEncodeError as error:  # stdout may know fewer characters than a model
            self.line(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError as error:
            raise Unwritable(f"the log cannot be written: {error.strerror}") from None

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Appends one record to metrics.jsonl, and to W&B."""
        if TRAINED in values:
            self._recent.append(values[TRAINED])
            values = values | {"time/train/step_avg_last10_s": np.mean(self._recent)}
        values = {name: _plain(value) for name, value in values.items()}
        self._write("metrics.jsonl", [{"step": step, **values}])
        if self._wandb:
            self._wandb.record(step, values)

    def samples(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Appends full texts to samples.jsonl, and so to W&B's table, to see what is rewarded.

        groups: each has "question", "prompt", "answer" and "completions", a list in which each has
        "text", "reward", "rewards" by the functions' names, "advantage", "tokens" and "ended".
        """
        self._write("samples.jsonl", [{"step": step, **group} for group in groups])

    def answers(self, step: int, entries: list[dict[str, Any]]) -> None:
        """Appends the questions of an evaluation with their completions to eval.jsonl."""
        self._write("eval.jsonl", [{"step": step, **entry} for entry in entries])

    def arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Writes an .npz file into the run's folder."""
        if self._files:
            try:
                np.savez_compressed(self._out / name, **arrays)
            except OSError as error:
                self.line(f"{self._out / name} cannot be written: {error.strerror}")

    def time_left(self, step: int, clock: Clock) -> str:
        """The end of the step's line, such as " left=1:02:00", or "".

        It follows from the mean of the last 10 steps that compiled nothing. It is empty for the
        first and the last step, and on a terminal, where the bar has it.
        """
        self._steps_seen += 1
        if not clock.compiled():
            self._timed.append(clock.total())
        steps = self._steps - step - 1
        if not self._bar.disable or self._steps_seen == 1 or not (self._timed and steps > 0):
            return ""
        return f" left={tqdm.format_interval(steps * float(np.mean(self._timed)))}"

    def move_bar(self) -> None:
        """Moves the progress bar."""
        self._bar.update()

    def close(self, summary: dict[str, Any] | None = None, *, finished: bool = False) -> None:
        """Ends the bar and W&B.

        summary: values for the run's summary in W&B. finished: all steps and evaluations are done.
        """
        self._bar.close()
        if self._wandb:
            values = {name: _plain(value) for name, value in (summary or {}).items()}
            self._wandb.close(values, finished)

    def _write(self, name: str, records: list[dict[str, Any]]) -> None:
        """Appends a line for each record. A part of a line that an error leaves goes at the next
        start, by cut_back."""
        if file := self._files.get(name):
            text = "".join(json.dumps(record, default=str) + "\n" for record in records).encode()
            try:
                while text:
                    text = text[file.write(text) :]  # a disk that is almost full takes a part
            except OSError as error:
                raise Unwritable(f"{file.name} cannot be written: {error.strerror}") from None


def replace_file(file: Path, text: str) -> None:
    """Replaces a file at once, so that nobody reads a part of it. Raises OSError with its name."""
    partial = file.with_name(f"{file.name}.{os.getpid()}{PARTIAL}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(file)) from None


def cut_back(file: Path, step: int, kept: Collection[str] = frozenset()) -> None:
    """Ends the file before the first line that a run will write again if it goes on after `step`
    steps, and before a last line that is incomplete.

    kept: the kinds of evaluations, "eval" or "eval_full", whose lines after `step` steps stay.
    Raises UserMistake for a line without a step, and OSError.
    """
    if not file.exists():
        return
    length = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise UserMistake(f"{file} line {number} has no step; remove this line")
            if record["step"] > step or (record["step"] == step and not _is_of(record, kept)):
                break
            length += len(line)
    os.truncate(file, length)  # it needs no space, which writing the file anew would


def _is_of(record: dict[str, Any], evaluations: Collection[str]) -> bool:
    """Whether a record of metrics.jsonl, or an entry of eval.jsonl, belongs to one of them."""
    return record.get("evaluation") in evaluations or any(
        name.partition("/")[0] in evaluations for name in record
    )


def _plain(value: Any) -> Any:
    """A JSON value; a number that is not finite becomes null, since JSON has no NaN."""
    if value is None or isinstance(value, str):
        return value
    value = value.item() if hasattr(value, "item") else value
    return value if np.isfinite(value) else None
