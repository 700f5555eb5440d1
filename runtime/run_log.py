"""What a run leaves behind: its lines, metrics.jsonl, samples.jsonl and W&B.

Every process prints its lines; only process 0 writes files and W&B.
"""

import collections
import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from runtime.mistakes import UserMistake


class Compilation(NamedTuple):
    """A program that jax has compiled, or read from its cache of compiled programs."""

    program: str  # the name of the jitted function
    seconds: float


COMPILATIONS: list[Compilation] = []  # of this process


def _on_duration(event: str, seconds: float, *, fun_name: str = "", **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        program = fun_name.removeprefix("jit(").removesuffix(")")
        COMPILATIONS.append(Compilation(program, seconds))


jax.monitoring.register_event_duration_secs_listener(_on_duration)

FILES = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")  # each line has a step
WANDB_LIMIT_S = 30  # how long a run waits for W&B's answer at the start


class Clock:
    """Seconds of each phase of a step, and what jax compiled in it."""

    def __init__(self) -> None:
        self.started = self._last = time.perf_counter()
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._compiled_before = len(COMPILATIONS)

    def compiled(self) -> list[Compilation]:
        """What jax compiled since the clock was made."""
        return COMPILATIONS[self._compiled_before :]

    def lap(self, phase: str) -> None:
        """Ends a phase: the seconds since the end of the phase before belong to it."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self.started


def check_wandb(mode: str) -> None:
    """Raises UserMistake if WANDB_MODE cannot work here; it asks neither a server nor the user."""
    if mode == "disabled":
        return
    try:
        import wandb
    except Exception as error:  # an ImportError, or any error of a broken installation
        why = "" if isinstance(error, ImportError) else f" ({_message(error)})"
        raise UserMistake(f"WANDB_MODE={mode} needs wandb: pip install wandb{why}") from None
    if mode == "offline" or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    with contextlib.redirect_stderr(io.StringIO()):  # wandb warns that it is old
        key = wandb.api.api_key or ""  # from WANDB_API_KEY, or from `wandb login`
    if len(key) < 40:
        found = f"the API key that is set has {len(key)} characters, not 40 or more"
        raise UserMistake(
            f"WANDB_MODE=online: {found if key else 'there is no API key'}; set WANDB_API_KEY or "
            f"run `wandb login`, or set WANDB_MODE=offline"
        )


def stop_if_not_writable(name: str, folder: Path) -> None:
    """Raises UserMistake, naming the setting, if the folder cannot be made or written."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is not writable" if there.is_dir() else "is not a folder"
        raise UserMistake(f"{name} cannot be written: {there} {why}")


class RunLog:
    """The run's outputs. Once it is open, a full disk or a failing W&B costs only a line."""

    def __init__(
        self,
        out: Path,
        *,
        steps: int,
        writes: bool,
        wandb: dict[str, Any] | None,
        first_step: int = 0,
    ) -> None:
        """out: the run's folder, which is made if writes is True, on process 0.

        wandb: the arguments of wandb.init, or None. first_step: the first step of a resumed run;
        records of this and later steps, from before, are dropped.
        """
        self._recent: collections.deque[float] = collections.deque(maxlen=10)
        hidden = None if writes else True  # tqdm takes None as: hidden unless on a terminal
        self._bar = tqdm(total=steps, initial=first_step, unit="step", disable=hidden)
        self._out, self._files = out, {}
        self._lost: set[str] = set()  # the outputs that cannot be written
        self._wandb, self.wandb_id = None, ""
        self._unsent: list[str] = []  # lines for the end, about records that W&B does not have
        self._step = first_step  # the step of the newest record
        if not writes:
            return
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            keep_steps_before(first_step, out / name)
            self._files[name] = open(out / name, "a", encoding="utf-8")
        if wandb:
            self._start_wandb(out, wandb)

    def line(self, text: str) -> None:
        """Prints one line, above the progress bar if there is one."""
        try:
            if self._bar.disable:
                print(text, flush=True)
            else:
                self._bar.write(text)
        except OSError as error:  # a full disk; stderr may go to another one
            if "stdout" not in self._lost:
                self._lost.add("stdout")
                print(f"the log cannot be written: {error.strerror}", file=sys.stderr)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Appends one record to metrics.jsonl, and to W&B."""
        self._step = step
        if "time/train/step_s" in values:
            self._recent.append(values["time/train/step_s"])
            values = values | {"time/train/step_avg_last10_s": np.mean(self._recent)}
        values = {name: _plain(value) for name, value in values.items()}
        self._write("metrics.jsonl", [{"step": step, **values}])
        if self._wandb:
            try:
                self._wandb.log(values, step=step)
            except Exception as error:
                self._lose_wandb(error, step)

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Appends full texts to samples.jsonl, for a look at what is rewarded."""
        self._write("samples.jsonl", [{"step": step, **sample} for sample in samples])

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

    def step_done(self) -> None:
        """Moves the progress bar."""
        self._bar.update()

    def close(self) -> None:
        """Writes what is left, ends W&B, and prints the lines about records it does not have."""
        self._bar.close()
        for name in self._files:
            self._write(name, [])
        if self._wandb:
            try:
                self._wandb.finish()
            except Exception as error:
                self._lose_wandb(error, self._step)
        for line in self._unsent:
            self.line(line)

    def _write(self, name: str, records: list[dict[str, Any]]) -> None:
        """Appends lines; lines that a full disk cannot take wait in the file's buffer."""
        file = self._files.get(name)
        if file is None:
            return
        try:
            for record in records:
                file.write(json.dumps(record, default=str) + "\n")
            file.flush()
        except OSError as error:
            if name not in self._lost:
                self._lost.add(name)
                self.line(f"{file.name} cannot be written: {error.strerror}; the run goes on")

    def _start_wandb(self, out: Path, settings: dict[str, Any]) -> None:
        """Starts W&B; without an answer of its server the records go to files for `wandb sync`."""
        import wandb

        limit = wandb.Settings(init_timeout=WANDB_LIMIT_S, login_timeout=WANDB_LIMIT_S)
        settings = {"dir": os.fspath(out), "settings": limit} | settings
        try:
            self._wandb = wandb.init(**settings)
        except Exception as error:  # the errors of W&B and its transports have no common base
            if settings["mode"] == "offline":
                self._lose_wandb(error, 0)
                return
            self.line(f"W&B: {_message(error)}; the run is logged for it in {out}/wandb instead")
            try:
                self._wandb = wandb.init(**settings | {"mode": "offline"})
            except Exception as again:
                self._lose_wandb(again, 0)
                return
            folder = Path(self._wandb.dir).parent
            self._unsent.append(f"W&B does not have this run; upload it by: wandb sync {folder}")
        self.wandb_id = self._wandb.id

    def _lose_wandb(self, error: Exception, step: int) -> None:
        self.line(f"W&B: {_message(error)}; the run goes on without it")
        self._unsent.append(
            f"W&B may have no records from step {step} on; {self._out}/metrics.jsonl has them all"
        )
        self._wandb = None


def _message(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def keep_steps_before(step: int, file: Path) -> None:
    """Drops the records of this and later steps, and a last line that is incomplete."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and isinstance(record, dict) and record.get("step", step) < step:
            kept.append(line)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(file)


def _plain(value: Any) -> Any:
    """A JSON value; a number that is not finite becomes null, since JSON has no NaN."""
    if isinstance(value, str):
        return value
    value = value.item() if hasattr(value, "item") else value
    return value if np.isfinite(value) else None
