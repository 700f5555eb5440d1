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


@pytest.mark.slow
def test_a_disturbed_run_ends_like_the_undisturbed_one_and_what_is_planted_is_found(
    tmp_path: Path,
) -> None:
    undisturbed, disturbed, out = (tmp_path / name for name in ("b", "a", "planted"))
    totals = Totals(Counter(), Counter(), Counter())
    env = SETTINGS | {"STEPS": "6", "EVAL_EVERY_STEPS": "3", "EVAL_PROMPTS": "8", "SEED": "1"}
    faults = [Fault("frozen", "evaluation"), Fault("killed", "step"), Fault("starved", "compile")]
    assert run_to_its_end(undisturbed, env, 1, iter(()), Totals(*map(Counter, "   "))) == []
    assert run_to_its_end(disturbed, env, 1, iter(faults), totals) == []
    assert mistakes_in(disturbed, undisturbed) == []
    assert totals.struck.total() == 3 and totals.codes[-9] == totals.codes[0] == 1
    assert totals.steps["computed"] >= totals.steps["counted"] == 6
    shutil.copytree(undisturbed, out)
    (out / "x.1.partial").touch()
    arrays = out / "checkpoints" / "6" / "arrays"
    shutil.rmtree(arrays)
    shutil.copytree(out / "checkpoints" / "3" / "arrays", arrays)
    sentences = ["x.1.partial is left over", "checkpoint 6: ['state']['opt_state']"]
    for name, old, new, sentence in (
        ("metrics.jsonl", '"step": 4', '"step": 5', "metrics.jsonl: "),
        ("eval.jsonl", '"step": 3', '"step": 4', "eval.jsonl has other bytes"),
        ("hf/model.safetensors", "F32", "F16", "hf/model.safetensors has other bytes"),
        ("run.json", '"SEED": "1"', '"SEED": "2"', "run.json: made_with"),
        ("summary.json", '"done"', '"died"', "summary.json: state"),
        ("checkpoints/6/record/metadata", '"rounds": 6', '"rounds": 7', "checkpoints/6/record"),
    ):
        content = (out / name).read_bytes()
        (out / name).write_bytes(content.replace(old.encode(), new.encode(), 1))
        sentences.append(sentence)
    mistakes = mistakes_in(out, undisturbed)
    for sentence in sentences:
        assert any(mistake.startswith(sentence) for mistake in mistakes), sentence
