"""tools/faults.py: its checks find what is planted, and a disturbed run passes them."""

import json
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tools.fault_checks import (
    changed_values,
    expected_order,
    mistakes_in,
    name_of,
    wrong_order,
)
from tools.faults import (
    Aim,
    Totals,
    aims,
    disturbed_run,
    environment,
    table,
    undisturbed_run,
)

RECORDS = [
    {"step": 0, "eval/accuracy": 0.5},
    {"step": 0, "train-other/loss": 1.0},
    {"step": 1, "train-other/loss": 2.0},
    {"step": 2, "eval/accuracy": 0.75},
]
ORDER = ["evaluation 0", "step 0", "step 1", "evaluation 2"]


def test_a_run_has_each_step_and_each_evaluation_once_and_in_order() -> None:
    assert [name_of(record) for record in RECORDS] == expected_order(2, 2) == ORDER
    assert expected_order(2, 0) == ["step 0", "step 1"]
    assert wrong_order(RECORDS, ORDER) == []


@pytest.mark.parametrize(
    "kept, says",
    [
        ([0, 1, 3], "metrics.jsonl has step 1 0 times, not 1 times"),
        ([0, 1, 1, 2, 3], "metrics.jsonl has step 0 2 times, not 1 times"),
        ([0, 1, 2], "metrics.jsonl has evaluation 2 0 times, not 1 times"),
        ([0, 2, 1, 3], "metrics.jsonl has its records in another order"),
    ],
)
def test_a_step_that_is_missing_double_or_at_another_place_is_found(kept, says) -> None:
    assert wrong_order([RECORDS[i] for i in kept], ORDER) == [says]


def test_a_number_that_differs_in_its_last_bit_is_found() -> None:
    changed = [dict(record) for record in RECORDS]
    changed[1]["train-other/loss"] = float(np.nextafter(1.0, 2.0))
    changed[3]["extra"] = 0
    assert changed_values(RECORDS, RECORDS) == []
    assert changed_values(changed, RECORDS) == [
        "step 0: train-other/loss is 1.0000000000000002, and undisturbed 1.0",
        "evaluation 2: extra is 0, and undisturbed nothing",
    ]


def test_the_faults_of_a_seed_are_always_the_same() -> None:
    first, again, other = (aims(random.Random(seed), ["killed", "frozen"]) for seed in (0, 0, 1))
    ours = [next(first) for _ in range(50)]
    assert ours == [next(again) for _ in range(50)] != [next(other) for _ in range(50)]
    assert {aim.kind for aim in ours} == {"killed", "frozen"}
    assert {aim.phase for aim in ours} == set(
        "start compile rollout update save evaluation export".split()
    )


# ---- Real runs -----------------------------------------------------------------------------------

STEPS, EVERY = 6, 3
SEED = 15724  # its faults strike soon after the begin of their phases, and space is back after 2 s


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Totals]:
    """The folder of a run that was killed, frozen and starved, an undisturbed run, and totals."""
    folder, totals = tmp_path_factory.mktemp("faults"), Totals(1)
    straight, cache = folder / "undisturbed", folder / "cache"
    plan = [Aim("killed", "update"), Aim("frozen", "evaluation"), Aim("file limit", "rollout")]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # programs compile in half the time
        for name, value in {"STEPS": STEPS, "EVAL_EVERY_STEPS": EVERY, "EVAL_PROMPTS": 8}.items():
            patch.setenv(name, str(value))
        undisturbed_run(straight, environment(straight, cache, SEED), totals)
        until = time.monotonic() + 3600
        disturbed_run(folder / "disturbed", straight, cache, SEED, plan, until, totals)
    return folder / "disturbed" / "disk" / "run", straight, totals


@pytest.mark.slow
def test_a_run_that_is_killed_frozen_and_starved_ends_like_the_undisturbed_one(run) -> None:
    totals = run[2]
    assert totals.wrong == [] and totals.runs == 1 and totals.counted == STEPS
    assert totals.starts >= 2 and totals.codes[137] == 1 and totals.codes[0] >= 1
    assert sorted(kind for kind, _ in totals.struck) == ["file limit", "frozen", "killed"]
    assert totals.computed >= STEPS and 0 < totals.counted_s < totals.wall_s
    text = table(totals)
    assert f"goodput in steps: {STEPS} of " in text and text.endswith("wrong: 0")


def drop(file: Path, what: str) -> None:
    """Removes the first line that has this text."""
    lines = file.read_text().splitlines(keepends=True)
    lines.remove(next(line for line in lines if what in line))
    file.write_text("".join(lines))


def last_arrays_of_an_earlier_step(out: Path) -> None:
    last, earlier = (out / "checkpoints" / str(step) / "arrays" for step in (STEPS, EVERY))
    shutil.rmtree(last)
    shutil.copytree(earlier, last)


def one_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def not_done(out: Path) -> None:
    summary = json.loads((out / "summary.json").read_text())
    (out / "summary.json").write_text(json.dumps(summary | {"state": "stopped"}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant, says",
    [
        (lambda out: drop(out / "metrics.jsonl", '{"step": 4'), "metrics.jsonl has step 4 0 times"),
        (lambda out: drop(out / "eval.jsonl", "question"), "eval.jsonl has other bytes"),
        (lambda out: (out / "samples.jsonl").unlink(), "samples.jsonl is missing"),
        (lambda out: one_bit(out / "hf" / "model.safetensors"), "hf/model.safetensors has other"),
        (lambda out: (out / "x.1.partial").touch(), "x.1.partial is left over"),
        (last_arrays_of_an_earlier_step, "other bits in ['state']['opt_state']"),
        (not_done, f"summary.json says stopped after {STEPS} steps"),
        (lambda out: (out / "report.html").write_text(""), "report.html is not the report of"),
    ],
)
def test_what_is_planted_in_the_folder_of_a_run_is_found(run, tmp_path: Path, plant, says) -> None:
    out = tmp_path / run[1].name  # which the report has
    shutil.copytree(run[1], out)
    assert mistakes_in(out, run[1], STEPS, EVERY) == []
    plant(out)
    found = mistakes_in(out, run[1], STEPS, EVERY)
    assert [text for text in found if text.startswith(says)], found
