"""What a run leaves behind: its lines, metrics.jsonl, samples.jsonl, eval.jsonl and W&B.

Every process prints its lines; only process 0 writes files and W&B.
"""

import collections
import contextlib
import functools
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from runtime.long_work import COMPILING, program_of
from runtime.mistakes import UserMistake
from runtime.wandb_run import TRAINED, WandbRun


class Compilation(NamedTuple):
    """A program that jax has compiled, or read from its cache of compiled programs."""

    program: str  # the name of the jitted function
    seconds: float


@functools.cache
def compilations() -> list[Compilation]:
    """What jax has compiled in this process since the first call; the list grows."""
    found: list[Compilation] = []

    def on_duration(event: str, seconds: float, *, fun_name: str = "", **_: Any) -> None:
        if event == COMPILING:
            found.append(Compilation(program_of(fun_name), seconds))

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    return found


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
    """The run's outputs. If W&B or a write fails later, it prints a line and the run goes on."""

    def __init__(
        self,
        out: Path,
        *,
        steps: int,
        writes: bool,
        wandb: dict[str, Any] | None,
        first_step: int = 0,
        waiting: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """out: the run's folder, which is made if writes is True, on process 0.

        wandb: the arguments of wandb.init, or None. first_step: the first step of a resumed run;
        records of this and later steps, from before, are dropped. waiting: what `waiting` said
        when the checkpoint of a resumed run was saved.
        """
        self._recent: collections.deque[float] = collections.deque(maxlen=10)  # seconds of steps
        self._timed: collections.deque[float] = collections.deque(maxlen=10)  # without compiling
        hidden = None if writes else True  # tqdm takes None as: hidden unless on a terminal
        self._bar = tqdm(total=steps, initial=first_step, unit="step", disable=hidden)
        self._out, self._files = out, {}
        self._waiting: dict[str, list[str]] = {name: [] for name in FILES}  # lines, on a full disk
        self._lost: set[str] = set()  # the outputs that cannot be written
        self._steps, self._steps_seen = steps, 0
        self._wandb: WandbRun | None = None
        if not writes:
            return
        out.mkdir(parents=True, exist_ok=True)
        for rest in out.glob(f"*{PARTIAL}"):  # a killed run may leave one
            rest.unlink()
        for name in FILES:
            keep_steps_before(first_step, out / name, (waiting or {}).get(name, ()))
            self._files[name] = open(out / name, "ab", buffering=0)
        if wandb:
            self._wandb = WandbRun(out, wandb, self.line)

    @property
    def wandb_id(self) -> str:
        """The id of the run in W&B, or ""."""
        return self._wandb.id if self._wandb else ""

    def line(self, text: str) -> None:
        """Prints one line, above the progress bar if there is one."""
        try:
            if self._bar.disable:
                print(text, flush=True)
            else:
                self._bar.write(text)
        except UnicodeEncodeError as error:  # stdout may know fewer characters than a model
            self.line(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError as error:  # a full disk; stderr may go to another one
            if "stdout" not in self._lost:
                self._lost.add("stdout")
                with contextlib.suppress(OSError):
                    print(f"the log cannot be written: {error.strerror}", file=sys.stderr)

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
        """Appends full texts to samples.jsonl and to W&B's table, for a look at what is rewarded.

        groups: each has "question", "prompt", "answer" and "completions", a list in which each has
        "text", "reward", "rewards" by the functions' names, "advantage", "tokens" and "ended".
        """
        self._write("samples.jsonl", [{"step": step, **group} for group in groups])
        for group in groups if self._wandb else ():
            self._wandb.sample(step, group)

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
        """The end of the step's line, such as " left=1h02m", or "".

        It follows from the mean of the last 10 steps that compiled nothing. It is empty for the
        first and the last step, and on a terminal, where the bar has it.
        """
        self._steps_seen += 1
        if not clock.compiled():
            self._timed.append(clock.total())
        steps = self._steps - step - 1
        if not self._bar.disable or self._steps_seen == 1 or not (self._timed and steps > 0):
            return ""
        return f" left={_short(steps * float(np.mean(self._timed)))}"

    def move_bar(self) -> None:
        """Moves the progress bar."""
        self._bar.update()

    def close(self, summary: dict[str, Any] | None = None, *, finished: bool = False) -> None:
        """Writes what is left, and ends W&B.

        summary: values for the run's summary in W&B. finished: all steps and evaluations are done.
        """
        self._bar.close()
        self.waiting()
        if self._wandb:
            values = {name: _plain(value) for name, value in (summary or {}).items()}
            self._wandb.close(values, finished)

    def waiting(self) -> dict[str, list[str]]:
        """The lines for each file that could not be written yet, after another try."""
        for name in self._files:
            self._write(name, [])
        return {name: [*lines] for name, lines in self._waiting.items() if lines}

    def _write(self, name: str, records: list[dict[str, Any]]) -> None:
        """Appends lines. Lines that a full disk cannot take wait for the next call."""
        file, waiting = self._files.get(name), self._waiting[name]
        if file is None:
            return
        waiting += [json.dumps(record, default=str) + "\n" for record in records]
        try:
            append("".join(waiting).encode(), file)
        except OSError as error:
            if name not in self._lost:
                self._lost.add(name)
                self.line(f"{file.name} cannot be written: {error.strerror}; the run goes on")
        else:
            waiting.clear()
            self._lost.discard(name)


def append(text: bytes, file: io.FileIO) -> None:
    """Appends all of the text or, if it raises OSError, nothing of it."""
    size = os.fstat(file.fileno()).st_size
    try:
        while text:
            text = text[file.write(text) :]  # a disk that is almost full takes a part
    except OSError:
        file.truncate(size)
        raise


def replace_file(file: Path, text: str) -> None:
    """Replaces a file at once, so that nobody reads a part of it. Raises OSError."""
    partial = file.with_name(f"{file.name}.{os.getpid()}{PARTIAL}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def keep_steps_before(step: int, file: Path, waiting: Sequence[str] = ()) -> None:
    """Drops the records of this and later steps, and a last line that is incomplete.

    waiting: the lines that waited for space when the checkpoint was saved; they are added, unless
    the run has written them later.
    """

    def is_earlier(line: str) -> bool:
        try:
            record = json.loads(line)
        except ValueError:
            return False
        return line.endswith("\n") and isinstance(record, dict) and record.get("step", step) < step

    there = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    kept = [line for line in there.splitlines(keepends=True) if is_earlier(line)]
    kept += [line for line in waiting if is_earlier(line) and line not in kept]
    if file.exists() or kept:
        replace_file(file, "".join(kept))


def _short(seconds: float) -> str:
    """The time in one or two units, such as 45s, 3m05s, 1h02m or 2d03h."""
    seconds = round(seconds)
    for size, name, smaller, its_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if seconds >= size:
            return f"{seconds // size}{name}{seconds % size // smaller:02d}{its_name}"
    return f"{seconds // 60}m{seconds % 60:02d}s" if seconds >= 60 else f"{seconds}s"


def _plain(value: Any) -> Any:
    """A JSON value; a number that is not finite becomes null, since JSON has no NaN."""
    if value is None or isinstance(value, str):
        return value
    value = value.item() if hasattr(value, "item") else value
    return value if np.isfinite(value) else None
