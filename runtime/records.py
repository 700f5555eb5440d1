"""What the folder of a run says: the records of its files, whether it is alive, and its summary."""

import contextlib
import json
import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from runtime.mistakes import UserMistake, in_one_line
from runtime.resume import LOCK

SUMMARY = "summary.json"
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
        return parse_yaml(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise UserMistake(
            f"{file} cannot be read: {in_one_line(error, with_type=False)}; mend it, or put the "
            f"text in quotes"
        ) from None


def parse_yaml(text: str) -> dict[str, Any]:
    """The values of a YAML text. The parser in C, which some installations of PyYAML lack, takes a
    tenth of the time."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_lines(file: Path, having: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The records of a .jsonl file, each with its step; none if there is no file.

    having: parses only lines that have one of these texts. Empty: all lines.
    """
    if not file.is_file():
        return []
    parsed = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not having or any(text in line for text in having):
                with contextlib.suppress(ValueError):  # a killed run leaves half a line
                    parsed.append(json.loads(line))
    return [record for record in parsed if isinstance(record, dict) and "step" in record]


def column(records: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """[records] float64: the values of a metric; NaN where it is missing or null."""
    values = [record.get(name) for record in records]
    return np.array([np.nan if value is None else value for value in values], np.float64)


def mean_of(values: np.ndarray) -> float:
    """The mean of the values that are not NaN; NaN if there are none."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else math.nan


def is_alive(out: Path) -> bool:
    """Whether a process holds the folder."""
    import fcntl  # Windows has none

    try:
        lock = os.open(out / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def state_of(out: Path) -> tuple[str, str]:
    """The state of a run, and why it is so; from its summary and from the lock on its folder."""
    told: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        told = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
    if told.get("state", RUNNING) != RUNNING:
        return told["state"], told["why"]
    if is_alive(out):
        return RUNNING, ""
    return DIED, "it left no word: it was killed, or its machine was"


def summary_of(
    settings: dict[str, Any], records: Sequence[dict[str, Any]], best: Sequence[str]
) -> dict[str, Any]:
    """The settings of a run and its last and best values, for summary.json.

    best: the metrics whose highest value is kept, with its step.
    """
    last: dict[str, Any] = {}
    for record in records:
        last |= {name: value for name, value in record.items() if value is not None}
    highest = {}
    for name in best:
        values = column(records, name)
        if not np.isnan(values).all():
            i = int(np.nanargmax(values))
            highest[name] = {"step": records[i]["step"], "value": float(values[i])}
    steps = [record["step"] for record in records if "time/train/step_s" in record]
    return {
        "steps_done": max(steps, default=-1) + 1,
        "written": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "last": {name: value for name, value in last.items() if name != "step"},
        "best": highest,
        "settings": settings,
    }


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or the complete paths if two of the parts are equal."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]
