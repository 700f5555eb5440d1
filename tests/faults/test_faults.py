"""random_faults.py: its checks find what is planted, and a disturbed run passes them."""

import json
import shutil
import time
from pathlib import Path

import pytest
from faults.attempt import End, Struck
from faults.checks import mistakes_in, wrong_end, wrong_metrics
from faults.random_faults import Aim, Totals, environment, run_to_its_end, table

WHY = "error: checkpoint of step 3 cannot be written to /x: File too large"
TRACE = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    "kind, end, says",
    [
        (
            "frozen",
            End(1, 9, False, [WHY]),
            "process 0 has ended with exit code 1 after ['frozen']",
        ),
        ("file limit", End(1, 9, False, [TRACE, WHY]), None),
        ("file limit", End(1, 9, False, [TRACE]), "process 0 has exit code 1, and no line at"),
        ("file limit", End(2, 0, False, [WHY]), None),
        ("file limit", End(2, 9, False, [WHY]), "process 0 has ended with exit code 2 after"),
        ("stopped", End(143, 0, False, []), None),
        ("stopped", End(143, 9, False, [TRACE]), "process 0 has printed a traceback, and no line"),
        ("stopped", End(0, 9, False, []), "process 0 has ended with exit code 0 and is not done"),
    ],
)
def test_an_end_that_does_not_follow_from_the_faults_is_found(kind, end, says) -> None:
    found = wrong_end([end], [Struck(kind, "save", [0])])
    assert len(found) == (says is not None) and "".join(found).startswith(says or "")


def test_if_one_of_two_processes_is_killed_the_other_ends_with_a_line_or_by_jax() -> None:
    killed, other = End(137, 9, False, []), End(1, 9, False, [WHY])
    by_jax = End(134, 9, False, [TRACE])
    struck = [Struck("killed", "save", [0])]
    assert wrong_end([killed, other], struck) == wrong_end([killed, by_jax], struck) == []
    assert wrong_end([other, killed], struck) == [
        "process 1 has ended with exit code 137 after ['killed']"
    ]


@pytest.mark.parametrize(
    "lines, says",
    [
        ([{"a": 1.0}, {"a": 2}], []),
        ([{"a": 1.0, "time/x": 3}, {"a": 2}], []),
        ([{"a": 1.0000000000000002}], ["line 1: a is 1.0000000000000002, undisturbed 1.0"]),
        ([{"a": 1.0}], ["line 2: a is missing, undisturbed 2"]),
        ([{"a": 1.0}, {"a": 2}, {"b": 2}], ["line 3: b is 2, undisturbed missing"]),
    ],
)
def test_a_record_that_is_missing_double_or_differs_in_its_last_bit_is_found(
    tmp_path: Path, lines, says
) -> None:
    for name, records in (("ours", lines), ("theirs", [{"a": 1.0}, {"a": 2}])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = wrong_metrics(tmp_path / "ours", tmp_path / "theirs")
    assert found == [f"metrics.jsonl {text}" for text in says]


# ---- Real runs -----------------------------------------------------------------------------------

SEED = 36178  # its faults strike soon, and its file limit is shorter than metrics.jsonl


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Totals, Totals]:
    """The folder of a disturbed and of an undisturbed run, and what happened to each of them."""
    folder, totals, straight = tmp_path_factory.mktemp("faults"), Totals(1), Totals(1)
    plan = [Aim("frozen", "evaluation"), Aim("killed", "update"), Aim("file limit", "rollout")]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # programs compile in half the time
        for name, value in {"STEPS": "6", "EVAL_EVERY_STEPS": "3", "EVAL_PROMPTS": "8"}.items():
            patch.setenv(name, value)
        ours, theirs = (environment(folder / name, folder / "cache", SEED) for name in "ab")
        until = time.monotonic() + 3600
        assert run_to_its_end(folder / "log_b", theirs, straight, iter(()), 0)[0] == []
        assert run_to_its_end(folder / "log_a", ours, totals, iter(plan), until)[0] == []
    return folder, totals, straight


@pytest.mark.slow
def test_a_run_that_is_frozen_killed_and_starved_ends_like_the_undisturbed_one(runs) -> None:
    folder, totals, straight = runs
    assert mistakes_in(folder / "a", folder / "b") == []
    assert sorted(kind for kind, _ in totals.struck) == ["file limit", "frozen", "killed"]
    assert totals.codes == {137: 1, 1: 1, 0: 1} and totals.computed > totals.counted == 6
    assert "goodput in steps: 6 of " in table(totals, straight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, old, new, says",
    [
        ("metrics.jsonl", '"step": 4', '"step": 5', "metrics.jsonl line 7: step is 5, undisturbed"),
        ("eval.jsonl", '"step": 3', '"step": 4', "eval.jsonl has other bytes"),
        ("hf/model.safetensors", "F32", "F16", "hf/model.safetensors has other bytes"),
        ("run.json", "training", "testing", "run.json: done is"),
        ("summary.json", '"done"', '"died"', "summary.json: state is died, undisturbed done"),
        ("report.html", "accuracy", "", "report.html is not the report of"),
        ("checkpoints/6/record/metadata", '"rounds": 6', '"rounds": 7', "the record of checkpoint"),
    ],
)
def test_what_is_planted_in_a_file_of_a_run_is_found(runs, tmp_path, name, old, new, says) -> None:
    out = tmp_path / "b"  # a name that the report has
    shutil.copytree(runs[0] / "b", out)
    content = (out / name).read_bytes()
    (out / name).write_bytes(content.replace(old.encode(), new.encode(), 1))
    assert [text for text in mistakes_in(out, runs[0] / "b") if text.startswith(says)]


@pytest.mark.slow
def test_files_that_are_left_over_and_older_arrays_are_found(runs, tmp_path: Path) -> None:
    out = tmp_path / "b"
    shutil.copytree(runs[0] / "b", out)
    (out / "x.1.partial").touch()
    shutil.rmtree(out / "checkpoints" / "6" / "arrays")
    shutil.copytree(out / "checkpoints" / "3" / "arrays", out / "checkpoints" / "6" / "arrays")
    found = mistakes_in(out, runs[0] / "b")
    assert found[0] == "x.1.partial is left over"
    assert [text for text in found if text.startswith("other bits in ['state']['opt_state']")]
