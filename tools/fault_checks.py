"""What has to be equal in a run that was disturbed and in the same run without a disturbance.

Each function returns a sentence for everything that is wrong, and nothing for a run without a
mistake. faults.py uses them after each run, and the tests use them, too.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from review import read_history, report
from runtime.records import SUMMARY, read_settings

TIMES = ("time/", "throughput/", "memory/", "compile/")  # metrics that depend on the clock
PLACES = ("output_dir", "jax_compilation_cache_dir")  # the ends of settings that may differ
DEFECTS_SHOWN = 5  # of one kind


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """The values of a record that do not depend on the clock."""
    return {name: value for name, value in record.items() if not name.startswith(TIMES)}


def metric_records(out: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl without the values that depend on the clock. Raises ValueError
    for a line that is not JSON."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [without_times(json.loads(line)) for line in lines]


def checkpoint_arrays(out: Path, step: int) -> dict[str, np.ndarray]:
    """{path: array} of a checkpoint, as orbax reads them without our code."""
    folder = out / "checkpoints" / str(step) / "arrays"
    reader = ocp.PyTreeCheckpointer()
    saved = reader.metadata(folder).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
    leaves = jax.tree.leaves_with_path(reader.restore(folder, restore_args=as_numpy))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


# ---- The records ---------------------------------------------------------------------------------


def expected_order(steps: int, eval_every_steps: int) -> list[str]:
    """The names of all records of a run, in order, such as "evaluation 0" and "step 0"."""
    names = []
    for step in range(steps):
        if eval_every_steps and step % eval_every_steps == 0:
            names.append(f"evaluation {step}")
        names.append(f"step {step}")
    return names + [f"evaluation {steps}"] * (eval_every_steps > 0)


def name_of(record: dict[str, Any]) -> str:
    kind = "evaluation" if "eval/accuracy" in record else "step"
    return f"{kind} {record['step']}"


def wrong_order(records: Sequence[dict[str, Any]], expected: Sequence[str]) -> list[str]:
    """What is missing in metrics.jsonl, there more than once, or not where it should be."""
    found, wrong = [name_of(record) for record in records], []
    for name in dict.fromkeys([*expected, *found]):
        if found.count(name) != expected.count(name):
            times = f"{found.count(name)} times, not {expected.count(name)} times"
            wrong.append(f"metrics.jsonl has {name} {times}")
    if not wrong and found != [*expected]:
        wrong.append("metrics.jsonl has its records in another order")
    return wrong[:DEFECTS_SHOWN]


def changed_values(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> list[str]:
    """The results that differ between the records of the same name in two runs."""
    undisturbed, wrong = {name_of(record): record for record in theirs}, []
    for record in ours:
        other = undisturbed.get(name_of(record), record)
        for key in {**other, **record}:
            if record.get(key, "nothing") != other.get(key, "nothing"):
                here, there = record.get(key, "nothing"), other.get(key, "nothing")
                wrong.append(f"{name_of(record)}: {key} is {here}, and undisturbed {there}")
    return wrong[:DEFECTS_SHOWN]


def wrong_metrics(out: Path, undisturbed: Path, steps: int, eval_every_steps: int) -> list[str]:
    try:
        ours = metric_records(out)
    except (OSError, ValueError) as error:
        return [f"metrics.jsonl cannot be read: {error}"]
    wrong = wrong_order(ours, expected_order(steps, eval_every_steps))
    return wrong + changed_values(ours, metric_records(undisturbed))


# ---- The other files -----------------------------------------------------------------------------


def wrong_files(out: Path, undisturbed: Path) -> list[str]:
    """The files whose bytes differ, and those that the undisturbed run has not left.

    Compares eval.jsonl, samples.jsonl and the exported model. A folder earlier_UTC may be there:
    it has what a run left that began anew because it had no checkpoint yet.
    """
    exported = sorted(path.relative_to(undisturbed) for path in (undisturbed / "hf").glob("*"))
    wrong = []
    for name in (Path("eval.jsonl"), Path("samples.jsonl"), *exported):
        there = out / name
        if not there.is_file():
            wrong.append(f"{name} is missing")
        elif there.read_bytes() != (undisturbed / name).read_bytes():
            wrong.append(f"{name} has other bytes than in the undisturbed run")
    known = {path.name for path in undisturbed.iterdir()}
    left = [path for path in out.iterdir() if path.name not in known]
    left += [path for path in (out / "checkpoints").glob("*") if not path.name.isdecimal()]
    wrong += [
        f"{path.relative_to(out)} is left over"
        for path in sorted(left)
        if not path.name.startswith("earlier_") and path.name != ".lock"
    ]
    return wrong


def wrong_review(out: Path, undisturbed: Path, steps: int) -> list[str]:
    """What summary.json and report.html say that is not so."""
    ours, theirs = (json.loads((each / SUMMARY).read_text()) for each in (out, undisturbed))
    wrong = []
    if (ours["state"], ours["steps_done"]) != ("done", steps):
        wrong.append(f"summary.json says {ours['state']} after {ours['steps_done']} steps")
    parts = [(name, ours[name], theirs[name]) for name in ("why", "verdict", "best")]
    parts.append(("last", without_times(ours["last"]), without_times(theirs["last"])))
    wrong += [f"summary.json has another {name}" for name, a, b in parts if a != b]
    settings = ours["settings"], theirs["settings"]
    for name in {**settings[0], **settings[1]}:
        if not name.endswith(PLACES) and settings[0].get(name) != settings[1].get(name):
            wrong.append(f"summary.json has another {name}")
    if ours["settings"] != json.loads(json.dumps(read_settings(out), default=str)):
        wrong.append("summary.json has other settings than config.yaml")
    if (out / "report.html").read_text(encoding="utf-8") != report({out: read_history(out)}):
        wrong.append("report.html is not the report of the files beside it")
    if json.loads((out / "finished").read_text())["step"] != steps:
        wrong.append("finished has another step")
    return wrong


def wrong_checkpoint(out: Path, undisturbed: Path, steps: int) -> list[str]:
    """The arrays of the last checkpoint whose bits differ, and whether its record differs.

    A run that is stopped after its last step, and before it has evaluated this step, saves the
    checkpoint without this accuracy; the run that goes on evaluates the step and keeps the file.
    """
    records = [
        json.loads((each / "checkpoints" / str(steps) / "record" / "metadata").read_text())
        for each in (out, undisturbed)
    ]
    for record in records:  # the lines that waited for space are in their files by now
        del record["waiting"], record["sha256"]
        record["evals"] = [pair for pair in record["evals"] if pair[0] < steps]
    wrong = [] if records[0] == records[1] else ["the record of the last checkpoint differs"]
    ours, theirs = checkpoint_arrays(out, steps), checkpoint_arrays(undisturbed, steps)
    if ours.keys() != theirs.keys():
        return [*wrong, "the last checkpoint has other arrays"]
    names = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
    return wrong + [f"other bits in {name} of the last checkpoint" for name in names]


def mistakes_in(out: Path, undisturbed: Path, steps: int, eval_every_steps: int) -> list[str]:
    """All that is wrong in the folder of a run that has ended with exit code 0."""
    wrong = wrong_metrics(out, undisturbed, steps, eval_every_steps)
    wrong += wrong_files(out, undisturbed)
    for check in (wrong_review, wrong_checkpoint):
        try:
            wrong += check(out, undisturbed, steps)
        except (OSError, ValueError, KeyError) as error:
            wrong.append(f"a file that {check.__name__} needs: {error}")
    return wrong
