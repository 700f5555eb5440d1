"""Claims about infra/log.py."""

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from life import life_of
from runs import REPO

from infra import hosts
from infra.log import RunLog, compile_seconds, replace_file
from infra.mistakes import Unwritable
from infra.resume import read_run

NAN = float("nan")


def test_only_process_0_writes_and_numbers_that_are_not_finite_become_null(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for writes, out in ((True, tmp_path / "0"), (False, tmp_path / "1")):
        log = RunLog(out, steps=1, writes=writes)
        log.print_line("hello")
        log.record_metrics(
            0, {"time/train/step_s": 2.0, "a": np.float32(0.5), "b": NAN, "c": "test"}
        )
        log.record_metrics(1, {"time/train/step_s": 4.0})
        log.append_entries("samples.jsonl", 0, [{"completion": "é"}])
        log.close()
    assert capsys.readouterr().out == "hello\nhello\n"
    assert not (tmp_path / "1").exists()
    lines = (tmp_path / "0" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, second = map(json.loads, lines)
    assert (first["step"], first["a"], first["b"], first["c"]) == (0, 0.5, None, "test")
    assert second["time/train/step_avg_last10_s"] == 3.0
    sample = json.loads((tmp_path / "0" / "samples.jsonl").read_text(encoding="utf-8"))
    assert sample == {"step": 0, "completion": "é"}


def test_the_time_left_is_that_of_a_median_step(tmp_path: Path) -> None:
    def left(step: int, seconds: float) -> str:
        text = log.time_left(step, SimpleNamespace(total=lambda: seconds))
        log.record_metrics(step, {"time/train/step_s": seconds})
        return text

    log = RunLog(tmp_path, steps=14, writes=True)
    assert left(3, 1e6) == ""  # the first step of this process compiles
    assert left(4, 99.0) == " left=14:51"  # 9 steps of 99 s
    for _ in range(10):
        text = left(9, 930.0)
    assert text == " left=1:02:00"  # 4 steps
    assert log.time_left(13, SimpleNamespace(total=lambda: 930.0)) == ""  # the last step
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["time/train/step_avg_last10_s"] == 930.0


def test_a_program_counts_when_it_is_compiled_and_not_when_it_runs_again() -> None:
    x = jnp.ones(3)
    before = len(compile_seconds())
    program = jax.jit(lambda x: x * 3 + 1)
    program(x), program(x)
    compiled = compile_seconds()[before:]
    assert len(compiled) == 1 and compiled[0] > 0


# ---- Evaluations, checkpoints and the end --------------------------------------------------------


def test_a_checkpoint_knows_its_evaluations_the_best_step_and_the_lengths_of_the_files(
    tmp_path: Path,
) -> None:
    lifecycle = life_of(tmp_path, eval_every_steps=3, save_every_steps=3)
    accuracies = iter((0.95, 0.9, 0.7))
    records = []
    for step in range(5):
        lifecycle.log.append_entries("eval.jsonl", step, [{}])  # '{"step": 0}' and a line feed
        assert lifecycle.evaluation_is_due() == (step in (0, 3, 4))
        if lifecycle.evaluation_is_due():
            lifecycle.finish_evaluation(next(accuracies))
        assert not lifecycle.evaluation_is_due()
        assert lifecycle.save_is_due() == (step in (3, 4))
        if lifecycle.save_is_due():
            lifecycle.save({"x": jnp.zeros(2)})
        lifecycle.checkpoints.wait_until_saved()
        file = tmp_path / "checkpoints" / str(step) / "record" / "metadata"
        if file.exists():
            records.append(json.loads(file.read_text()))
        lifecycle.finish_step(1, "")
    third, fourth = records
    assert (third["accuracy"], third["best_step"]) == (0.9, 3)
    assert (fourth["accuracy"], fourth["best_step"]) == (0.7, 3)
    none = {"metrics.jsonl": 0, "samples.jsonl": 0}
    assert (third["lengths"], fourth["lengths"]) == (
        none | {"eval.jsonl": 48},
        none | {"eval.jsonl": 60},
    )


def test_three_steps_that_are_not_finite_end_a_run_if_they_follow_each_other(
    tmp_path: Path,
) -> None:
    lifecycle, wrong = life_of(tmp_path), "loss is nan"
    for not_finite in (wrong, wrong, "", wrong, wrong):
        lifecycle.finish_step(1, not_finite)
    with pytest.raises(SystemExit, match=f"step 5: {wrong}, the last of 3 such steps in a row"):
        lifecycle.finish_step(1, wrong)


def test_a_run_without_a_reviewer_and_checkpoints_ends_and_is_not_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lifecycle = life_of(tmp_path, save_every_steps=0)
    lifecycle.claim_folder({})
    lifecycle.finish_step(1, "")
    lifecycle.log.record_metrics(0, {})
    assert not read_run(tmp_path)["has_saved"]
    lifecycle.finish(lambda is_done: None)
    assert capsys.readouterr().out.startswith("DONE: steps=4 elapsed_sec=")
    assert read_run(tmp_path)["has_saved"]
    assert not (tmp_path / "summary.json").exists()


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_a_line_and_is_told_in_the_summary(
    tmp_path: Path,
) -> None:
    lifecycle, reviews = life_of(tmp_path, save_every_steps=1), []
    lifecycle.review = lambda state, reason: {} if reviews.append((state, reason)) else {}
    with file_limit(2000), pytest.raises(SystemExit) as end, lifecycle.ending(None, None, None):
        lifecycle.finish_step(1, "")
        lifecycle.save({"x": jnp.asarray(np.random.default_rng(0).random(10_000))})
    line = f"checkpoint of step 1 cannot be written to {tmp_path}/checkpoints: File too large; "
    assert end.value.code == f"error: {line}there is none yet"
    assert reviews == [("failed", f"{line}there is none yet")]


# ---- Files ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Within this context no file of this process gets longer than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_record_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    log, file = RunLog(tmp_path, steps=9, writes=True), tmp_path / "metrics.jsonl"
    log.record_metrics(0, {"a": 0})
    with file_limit(30):
        with pytest.raises(Unwritable, match=f"^{file} cannot be written: File too large$"):
            log.record_metrics(1, {"a": 1})
    assert file.read_text() == '{"step": 0, "a": 0}\n{"step": 1'


def test_a_line_that_cannot_be_printed_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(tmp_path, steps=9, writes=False)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(open("/dev/full", "wb", buffering=0)))
    with pytest.raises(Unwritable, match="the log cannot be written: No space left on device"):
        log.print_line("step=0")


CLOSED = "error: stdout or stderr is closed; redirect it to a file or to /dev/null\n"
BROKEN = "error: the log cannot be written: Broken pipe\n"
FULL = "error: the log cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "command, errors",
    [
        ("train_grpo.py >&-", CLOSED),
        ("train_grpo.py 2>&-", ""),
        ("train_grpo.py | head -1", BROKEN),
        ("train_sft.py > /dev/full", FULL),
        ("startup.py | true", BROKEN),
        ("train_grpo.py --config nowhere.yaml 2>&1 | true", ""),
    ],
)
def test_a_log_that_cannot_be_written_at_the_start_is_one_line(
    tmp_path: Path, command: str, errors: str
) -> None:
    unbuffered = {"PYTHONUNBUFFERED": "1"} if "head" in command else {}
    env = os.environ | {"OUTPUT_DIR": f"{tmp_path}/run", "STEPS": "0", "EVAL_EVERY_STEPS": "1"}
    shell = f"{sys.executable} {REPO}/{command}; exit ${{PIPESTATUS[0]}}"
    arguments = {"cwd": tmp_path, "env": env | unbuffered, "capture_output": True, "text": True}
    done = subprocess.run(["bash", "-c", shell], **arguments)
    assert (done.returncode, done.stderr) == (2, errors)


@pytest.mark.parametrize(
    "error",
    [
        OSError("no number"),
        OSError(111, "Connection refused"),
        TimeoutError("the hub"),
        FileNotFoundError(2, "No such file", "x"),
        OSError(28, "No space left on device", "x"),
    ],
)
def test_an_error_that_is_not_of_the_log_prints_its_traceback_and_no_empty_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    monkeypatch.setattr(hosts.os, "_exit", Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit), hosts.exiting_on_error():
        raise error
    hosts.os._exit.assert_called_once_with(1)
    printed, errors = capsys.readouterr()
    assert printed == "" and errors.startswith("Traceback")


def test_a_file_is_replaced_by_a_complete_one_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    replace_file(file, "old")
    with file_limit(30), pytest.raises(OSError):
        replace_file(file, "x" * 31)
    assert file.read_text() == "old"


def test_files_end_at_the_lengths_of_the_checkpoint_and_a_shorter_one_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for lengths, texts in (
        (None, ("abcdef", "ghi")),  # there is nothing to write again
        ({"metrics.jsonl": 4, "samples.jsonl": 3}, ("abcd", "ghi")),
        ({"metrics.jsonl": 2, "samples.jsonl": 5}, ("ab", "ghi\n\n")),  # lengths stay right
        ({}, ("", "")),  # the run begins again
    ):
        (tmp_path / "samples.jsonl").write_text("ghi")
        (tmp_path / "metrics.jsonl").write_text("abcdef")
        RunLog(tmp_path, steps=9, writes=True, lengths=lengths)
        names = ("metrics.jsonl", "samples.jsonl")
        assert tuple((tmp_path / name).read_text() for name in names) == texts
    why = "the checkpoint was saved when it had 5: records are missing"
    assert capsys.readouterr().out == f"note: {tmp_path}/samples.jsonl has 3 bytes, and {why}\n"
