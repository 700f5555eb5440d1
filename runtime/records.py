"""What the folder of a run says: its settings, the records of its files, and whether it goes on."""

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from runtime.mistakes import UserMistake, in_one_line

SUMMARY = "summary.json"
LOCK = ".lock"  # a file in the folders of a run; process 0 locks it for as long as it lives
# The states of a run. `died`: it is gone and has left no word; it was killed, or the machine was.
RUNNING, DONE, STOPPED, FAILED, DIED = "running", "done", "stopped", "failed", "died"


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


def state_of(out: Path) -> tuple[str, str]:
    """The state of a run, and why it is so. A run that is killed cannot change its summary, so that
    the lock on its folder says whether it is still running."""
    import fcntl  # Windows has none

    with contextlib.suppress(OSError, ValueError):
        told = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
        if told["state"] != RUNNING:
            return told["state"], told["why"]
    try:
        with (out / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return RUNNING, ""
    except OSError:
        pass  # there is no lock
    return DIED, "it left no word: it was killed, or its machine was"


def column(records: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """[records] float64: the values of a metric; NaN where it is missing or null."""
    values = [record.get(name) for record in records]
    return np.array([np.nan if value is None else value for value in values], np.float64)


def mean_of(values: np.ndarray) -> float:
    """The mean of the values that are not NaN; NaN if there are none."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else math.nan
