"""random_faults.py: its checks find what is planted, and a disturbed run passes them."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from faults.random_faults import (
    SETTINGS,
    End,
    Fault,
    Totals,
    mistakes_in,
    run_to_its_end,
    wrong_ends,
)

WHY = "error: checkpoint of step 3 cannot be written to /x: File too large"
TRACE = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    "kind, code, last, errors, says",
    [
        ("frozen", 1, "", WHY, "has ended with exit code 1"),
        ("starved", 1, "", f"{TRACE}\n{WHY}", None),
        ("starved", 1, "", TRACE, "has exit code 1, and no line at the end says why"),
        ("killed", -9, "", "", None),
        ("starved", -9, "", "", "has ended with exit code -9"),
        ("stopped", 143, "", "", None),
        ("stopped", 143, "", TRACE, "has printed a traceback"),
        ("stopped", 0, "DONE: steps=6", "", None),
        ("stopped", 0, "step=5", "", "has ended with exit code 0 and is not done"),
    ],
)
def test_an_end_that_does_not_follow_from_the_fault_is_found(
    kind: str, code: int, last: str, errors: str, says: str | None
) -> None:
    found = wrong_ends([End(code, [last], errors)], {kind})
    assert found == ([f"process 0 {says}"] if says else [])


def test_if_one_of_two_processes_is_killed_the_other_ends_with_a_line_or_by_jax() -> None:
    killed, other, by_jax = End(-9, [], ""), End(1, [], WHY), End(-6, [], TRACE)
    assert wrong_ends([killed, other], {"killed"}) == wrong_ends([killed, by_jax], {"killed"}) == []
    assert wrong_ends([other, End(1, [], "")], {"killed"}) == [
        "process 1 has exit code 1, and no line at the end says why"
    ]


# ---- Real runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Totals]:
    """The folder of a disturbed run `a` and of an undisturbed run `b`, and what happened to a."""
    folder, totals = tmp_path_factory.mktemp("faults"), Totals(Counter(), Counter(), Counter())
    env = SETTINGS | {"STEPS": "6", "EVAL_EVERY_STEPS": "3", "EVAL_PROMPTS": "8", "SEED": "1"}
    faults = [Fault("frozen", "evaluation"), Fault("killed", "step"), Fault("starved", "compile")]
    assert run_to_its_end(folder / "b", env, 1, iter(()), Totals(*map(Counter, "   "))) == []
    assert run_to_its_end(folder / "a", env, 1, iter(faults), totals) == []
    return folder, totals


@pytest.mark.slow
def test_a_run_that_is_frozen_killed_and_starved_ends_like_the_undisturbed_one(runs) -> None:
    folder, totals = runs
    assert mistakes_in(folder / "a", folder / "b") == []
    assert totals.struck.total() == 3 and totals.codes[-9] == totals.codes[0] == 1
    assert totals.steps["computed"] >= totals.steps["counted"] == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, old, new, says",
    [
        ("metrics.jsonl", '"step": 4', '"step": 5', "metrics.jsonl: "),
        ("eval.jsonl", '"step": 3', '"step": 4', "eval.jsonl has other bytes"),
        ("hf/model.safetensors", "F32", "F16", "hf/model.safetensors has other bytes"),
        ("run.json", '"SEED": "1"', '"SEED": "2"', "run.json: made_with"),
        ("summary.json", '"done"', '"died"', "summary.json: state"),
        ("checkpoints/6/record/metadata", '"rounds": 6', '"rounds": 7', "checkpoints/6/record"),
    ],
)
def test_what_is_planted_in_a_file_of_a_run_is_found(runs, tmp_path, name, old, new, says) -> None:
    out = Path(shutil.copytree(runs[0] / "b", tmp_path / "b"))
    content = (out / name).read_bytes()
    (out / name).write_bytes(content.replace(old.encode(), new.encode(), 1))
    assert [text for text in mistakes_in(out, runs[0] / "b") if text.startswith(says)]


@pytest.mark.slow
def test_files_that_are_left_over_and_older_arrays_are_found(runs, tmp_path: Path) -> None:
    out = Path(shutil.copytree(runs[0] / "b", tmp_path / "b"))
    (out / "x.1.partial").touch()
    shutil.rmtree(out / "checkpoints" / "6" / "arrays")
    shutil.copytree(out / "checkpoints" / "3" / "arrays", out / "checkpoints" / "6" / "arrays")
    found = mistakes_in(out, runs[0] / "b")
    assert found[0] == "x.1.partial is left over"
    assert [text for text in found if "['opt_state']" in text]
