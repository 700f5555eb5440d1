"""What is wrong in a run that was disturbed: in its ends, and in what it leaves.

Each function returns a sentence for everything that is wrong, and nothing for a run without a
mistake. What a run leaves has to be equal to that of the same run without a disturbance.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from faults.attempt import FATAL, STARVING, End, Struck

from review import read_history, report
from runtime.records import SUMMARY
from runtime.resume import RUN

TIMES = ("time/", "throughput/", "memory/", "compile/")  # metrics that depend on the clock


def wrong_end(ends: Sequence[End], struck: Sequence[Struck]) -> list[str]:
    """What is wrong in how the processes have ended after these faults, and in what they say."""
    kinds, wrong = {fault.kind for fault in struck}, []
    for i, end in enumerate(ends):
        allowed = {0}
        if kinds & {*STARVING}:
            allowed |= {1} if end.computed else {1, 2}
        if len(ends) > 1 and kinds & {*FATAL, *STARVING}:
            allowed |= {1, 134}
        if "stopped" in kinds:
            allowed |= {143}
        if any(fault.kind == "killed" and i in fault.victims for fault in struck):
            allowed |= {137}
        if end.code not in allowed:
            after = sorted(kinds) or "no fault"
            wrong.append(f"process {i} has ended with exit code {end.code} after {after}")
        if end.code == 0 and not end.done:
            wrong.append(f"process {i} has ended with exit code 0 and is not done")
        # Threads of orbax may still print when the line is there.
        says_why = any(line.startswith("error: ") for line in end.errors[-8:])
        if end.code in (1, 2) and not says_why:
            wrong.append(f"process {i} has exit code {end.code}, and no line at the end says why")
        elif end.code not in (134, 137) and not says_why and "Traceback" in str(end.errors):
            wrong.append(f"process {i} has printed a traceback, and no line says why")
    return wrong


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """The values of a record that do not depend on the clock."""
    return {name: value for name, value in record.items() if not name.startswith(TIMES)}


def metric_records(out: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl without the values that depend on the clock."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [without_times(json.loads(line)) for line in lines]


def different(what: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """A sentence for each value that two records do not share, at most five."""
    return [
        f"{what}: {name} is {ours.get(name, 'missing')}, undisturbed {theirs.get(name, 'missing')}"
        for name in {**theirs, **ours}
        if ours.get(name, "missing") != theirs.get(name, "missing")
    ][:5]


def wrong_metrics(out: Path, undisturbed: Path) -> list[str]:
    """What differs in the first line of metrics.jsonl that is not equal to the undisturbed one."""
    pairs = itertools.zip_longest(metric_records(out), metric_records(undisturbed), fillvalue={})
    for number, (ours, theirs) in enumerate(pairs, start=1):
        if ours != theirs:
            return different(f"metrics.jsonl line {number}", ours, theirs)
    return []


def wrong_files(out: Path, undisturbed: Path) -> list[str]:
    """The files of the log and of the export whose bytes differ, and files that are left over."""
    exported = sorted(path.relative_to(undisturbed) for path in (undisturbed / "hf").iterdir())
    wrong = [
        f"{name} has other bytes than in the undisturbed run"
        for name in (Path("eval.jsonl"), Path("samples.jsonl"), *exported)
        if (out / name).read_bytes() != (undisturbed / name).read_bytes()
    ]
    for folder in (Path(), Path("checkpoints"), Path("hf")):
        known = {path.name for path in (undisturbed / folder).iterdir()}
        left = {path.name for path in (out / folder).iterdir()} - known
        # A signal saves checkpoints that the undisturbed run has not made.
        wrong += [f"{folder / name} is left over" for name in sorted(left) if not name.isdecimal()]
    return wrong


def wrong_run(out: Path, undisturbed: Path) -> list[str]:
    """Whether run.json says that another run is here, or that something else is done."""
    runs = [json.loads((each / RUN).read_text()) for each in (out, undisturbed)]
    for run in runs:
        del run["run_id"]
    return different("run.json", *runs)


def wrong_review(out: Path, undisturbed: Path) -> list[str]:
    """What summary.json and report.html say that is not so."""
    summaries = [json.loads((each / SUMMARY).read_text()) for each in (out, undisturbed)]
    for summary in summaries:
        del summary["written"], summary["settings"]  # the settings have the names of folders
        summary |= without_times(summary.pop("last"))
    wrong = different("summary.json", *summaries)
    if (out / "report.html").read_text(encoding="utf-8") != report({out: read_history(out)}):
        wrong.append("report.html is not the report of the files beside it")
    return wrong


def wrong_checkpoint(out: Path, undisturbed: Path) -> list[str]:
    """The arrays of the last checkpoint whose bits differ, and what differs in its record.

    A run that is stopped after its last step, and before it has evaluated this step, saves the
    checkpoint without this accuracy; the run that goes on evaluates the step and keeps the file.
    """
    last = max(int(path.name) for path in (undisturbed / "checkpoints").glob("[0-9]*"))
    records = [
        json.loads((each / "checkpoints" / str(last) / "record" / "metadata").read_text())
        for each in (out, undisturbed)
    ]
    for record in records:
        del record["run_id"], record["sha256"]
        record["evals"] = [pair for pair in record["evals"] if pair[0] < record["step"]]
    wrong = different(f"the record of checkpoint {last}", *records)
    saved, wanted = (
        {name: array.tobytes() for name, array in checkpoint_arrays(each, last).items()}
        for each in (out, undisturbed)
    )
    names = [name for name in {**wanted, **saved} if saved.get(name) != wanted.get(name)]
    return wrong + [f"other bits in {name} of checkpoint {last}" for name in names]


def checkpoint_arrays(out: Path, step: int) -> dict[str, np.ndarray]:
    """{path: array} of a run's checkpoint, as orbax reads them without our code."""
    folder, reader = out / "checkpoints" / str(step) / "arrays", ocp.PyTreeCheckpointer()
    saved = reader.metadata(folder).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
    leaves = jax.tree.leaves_with_path(reader.restore(folder, restore_args=as_numpy))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def mistakes_in(out: Path, undisturbed: Path, reviewed: bool = True) -> list[str]:
    """All that is wrong in the folder of a run that has ended with exit code 0.

    reviewed: False if the run has said that it could not write summary.json or report.html.
    """
    wrong, checks = [], [wrong_metrics, wrong_files, wrong_run, wrong_checkpoint]
    for check in [*checks, *[wrong_review] * reviewed]:
        try:
            wrong += check(out, undisturbed)
        except (OSError, ValueError, KeyError) as error:
            wrong.append(f"{check.__name__}: {error}")
    return wrong
