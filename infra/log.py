"""What a run leaves behind: its lines, its files, and its rows in W&B.

Every process prints its lines; only process 0 writes files and W&B. metrics.jsonl has the metrics
of each step and evaluation, samples.jsonl some completions of training, eval.jsonl the answers of
evaluations. config.yaml has the settings, summary.json the state of the run.
"""

import collections
import contextlib
import functools
import io
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from tqdm import tqdm

from infra.mistakes import UserMistake, in_one_line, writing

FILES = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")  # each line has a step
SUMMARY = "summary.json"
LOCK = ".lock"  # a file in the folders of a run; process 0 locks it for as long as it lives
# The states of a run. `died`: it is gone and has left no word; it was killed, or the machine was.
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
        """The seconds of each program that jax compiled since the clock was made."""
        return compile_seconds()[self._compiled_before :]

    def lap(self, phase: str) -> None:
        """Ends a phase, one of `phases`: the seconds since the last phase ended belong to it."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds since the clock was made."""
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

        wandb: the arguments of wandb.init, or None. first_step: the number of steps that are done.
        kept: the evaluations after these steps that are not made again; see truncate_records.
        Raises OSError if the folder cannot be written.
        """
        self._out, self._steps, self._writes = out, steps, writes
        self._recent: collections.deque[float] = collections.deque(maxlen=10)  # seconds of steps
        self._wandb: WandbRun | None = None
        if not writes:
            return
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            truncate_records(out / name, first_step, kept)
        if wandb:
            with self._surviving_wandb():
                self._wandb = WandbRun(out, wandb)

    def print_line(self, text: str) -> None:
        """Prints one line, above a progress bar if there is one, and in one piece, since another
        thread may print now."""
        with writing("the log"), tqdm.external_write_mode():
            print(text + "\n", end="", flush=True)

    def record_metrics(self, step: int, values: dict[str, Any]) -> None:
        """Appends one record to metrics.jsonl, and to W&B."""
        if STEP_S in values:
            self._recent.append(values[STEP_S])
            values = values | {"time/train/step_avg_last10_s": np.mean(self._recent)}
        values = to_json_values(values)
        self.append_entries("metrics.jsonl", step, [values])
        if self._wandb:
            with self._surviving_wandb():
                self._wandb.record(step, values)

    def append_entries(self, name: str, step: int, entries: list[dict[str, Any]]) -> None:
        """Appends a line for each entry to one of FILES. If an error leaves a part of a line,
        truncate_records removes it at the next start."""
        if not self._writes:
            return
        file = self._out / name
        text = "".join(json.dumps({"step": step} | entry) + "\n" for entry in entries)
        with writing(file), file.open("a", encoding="utf-8") as lines:
            lines.write(text)

    def time_left(self, step: int, clock: Clock) -> str:
        """The end of the step's line, such as " left=1:02:00", from the median seconds of this step
        and of the ten before. It is empty for the first step, which compiles, and for the last."""
        steps = self._steps - step - 1
        if not self._recent or not steps:
            return ""
        seconds = statistics.median_low([*self._recent, clock.total()])
        return f" left={tqdm.format_interval(steps * seconds)}"

    def close(self, summary: dict[str, Any] | None = None, *, finished: bool = False) -> None:
        """Ends the run in W&B.

        summary: values for its summary there. finished: all steps and evaluations are done.
        """
        if self._wandb:
            with self._surviving_wandb():
                self._wandb.close(to_json_values(summary or {}), finished)

    @contextlib.contextmanager
    def _surviving_wandb(self) -> Iterator[None]:
        """Prints a line about an error of W&B within this context, and sends W&B nothing more."""
        try:
            yield
        except Exception as error:  # the errors of W&B and its transports have no common base
            self._wandb, why = None, in_one_line(error, with_type=False)
            kept = f"{self._out}/metrics.jsonl has the records"
            self.print_line(f"W&B: {why}; the run goes on without it, and {kept}")


# ---- Writing files -------------------------------------------------------------------------------


def raise_if_not_writable(name: str, folder: Path) -> None:
    """Raises UserMistake, naming the setting, if the folder cannot be made or written."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "is not writable" if nearest.is_dir() else "is not a folder"
        raise UserMistake(f"{name} cannot be written: {nearest} {why}")


def replace_file(file: Path, text: str) -> None:
    """Replaces a file at once, so that nobody reads a part of it. Raises OSError."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def truncate_records(file: Path, step: int, kept: Collection[str] = frozenset()) -> None:
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
            except ValueError:  # a crash of the machine may leave zeros at the end of a file
                break
            later = record["step"] - step
            kinds = {name.partition("/")[0] for name in record} | {record.get("evaluation")}
            if later > 0 or (later == 0 and kinds.isdisjoint(kept)):
                break
            length += len(line)
    os.truncate(file, length)  # it needs no space, which writing the file anew would


def to_json_values(value: object) -> Any:
    """The value as JSON has it: a number of NumPy is one of Python, and one that is not finite
    becomes null, since JSON has no NaN."""
    text = json.dumps(value, default=lambda x: x.item() if hasattr(x, "item") else str(x))
    return json.loads(text, parse_constant=lambda name: None)


# ---- Reading files -------------------------------------------------------------------------------


def read_settings(out: Path) -> dict[str, Any]:
    """The values in config.yaml, by their YAML names.

    Raises UserMistake without this file, and for a value that YAML cannot read, such as 2026-02-30.
    """
    file = out / "config.yaml"
    if not file.is_file():
        raise UserMistake(f"{out} has no config.yaml; give the OUTPUT_DIR of a run")
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise UserMistake(
            f"{file} cannot be read: {in_one_line(error, with_type=False)}; mend it, or put the "
            f"text in quotes"
        ) from None


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
    return DIED, "it left no word: it was killed, or its machine was"


def metric_values(records: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """[records] float64: the values of a metric; NaN where it is missing or null."""
    values = [record.get(name) for record in records]
    return np.array([np.nan if value is None else value for value in values], np.float64)


def mean_without_nan(values: np.ndarray) -> float:
    """The mean of the values that are not NaN; NaN if there are none."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else math.nan


# ---- W&B -----------------------------------------------------------------------------------------


def raise_if_wandb_unusable(mode: str) -> None:
    """Raises UserMistake if WANDB_MODE cannot work here; it asks neither a server nor the user."""
    if mode in ("", "disabled"):
        return
    try:
        import wandb
    except Exception as error:  # a broken installation may raise any error
        why = f"WANDB_MODE={mode} needs wandb: pip install wandb ({in_one_line(error)})"
        raise UserMistake(why) from None
    if mode == "offline":
        return
    with contextlib.redirect_stderr(io.StringIO()):  # wandb warns that this name is old
        key = wandb.api.api_key or ""  # from WANDB_API_KEY, or from `wandb login`
    if len(key) < 40:
        wrong = f"the API key that is set has {len(key)} characters, not 40 or more"
        raise UserMistake(
            f"WANDB_MODE=online: {wrong if key else 'there is no API key'}; set WANDB_API_KEY or "
            f"run `wandb login`, or set WANDB_MODE=offline"
        )


def choose_wandb_mode(mode: str) -> str:
    """WANDB_MODE; if that is empty, "online" if there is a WANDB_API_KEY that can be used."""
    if mode:
        return mode
    if not os.environ.get("WANDB_API_KEY"):
        return "disabled"
    try:
        raise_if_wandb_unusable("online")
    except UserMistake as error:
        print(f"W&B: WANDB_API_KEY is set, but the run goes on without W&B: {error}", flush=True)
        return "disabled"
    return "online"


class WandbRun:
    """The run in W&B. All methods may raise any error of W&B and its transports."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        """out: the run's folder. settings: of wandb.init; the same "id" continues the same run."""
        import wandb

        self._step = 0  # the newest step
        self._row: dict[str, Any] = {}  # its values, which are not sent yet
        if settings["mode"] == "offline":  # all rows of earlier starts are written anew
            shutil.rmtree(out / "wandb", ignore_errors=True)
        self._run = wandb.init(dir=str(out), resume="allow", **settings)
        for record in read_lines(out / "metrics.jsonl"):
            self.record(record.pop("step"), record)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Adds values to the row of the step, after sending the row of an earlier step."""
        if step != self._step:
            self._send()
            self._step, self._row = step, {}
        self._row |= values

    def close(self, summary: dict[str, Any], finished: bool) -> None:
        """Ends the run in W&B, with these values in its summary.

        finished: no step is to come. Otherwise a resumed run makes the newest step again if it
        lacks its training record, and this step is not sent.
        """
        if finished or STEP_S in self._row:
            self._send()
        self._run.summary.update(summary)
        self._run.finish()

    def _send(self) -> None:
        """Sends the row of the newest step, if it has values that W&B does not have."""
        if self._row and self._step >= self._run.starting_step:
            self._run.log(self._row, step=self._step, commit=True)
