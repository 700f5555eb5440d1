"""Claims about infra/log.py."""

import contextlib
import io
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from infra.checkpoint import Checkpoints, Progress
from infra.lifecycle import Lifecycle
from infra.log import RunLog, replace_file, truncate_records
from infra.mistakes import Unwritable

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

    log = RunLog(tmp_path, steps=14, first_step=3, writes=True)
    assert left(3, 1e6) == ""  # the first step of this process compiles
    assert left(4, 99.0) == " left=14:51"  # 9 steps of 99 s
    for _ in range(10):
        text = left(9, 930.0)
    assert text == " left=1:02:00"  # 4 steps
    assert log.time_left(13, SimpleNamespace(total=lambda: 930.0)) == ""  # the last step
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["time/train/step_avg_last10_s"] == 930.0


def test_a_run_without_a_reviewer_ends_without_a_summary_and_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Lifecycle(
        steps=2,
        save_every_steps=0,
        eval_every_steps=1,
        out=tmp_path,
        log=RunLog(tmp_path, steps=2, writes=True),
        checkpoints=Checkpoints(f"{tmp_path}/checkpoints"),
        progress=Progress(step=1),
        reviewer=None,
        began=time.perf_counter(),
    )
    life.claim_folder({})
    life.count_step(1, "")
    life.record_evaluation(2, 0.5)
    life.finish(lambda: None)
    assert capsys.readouterr().out.startswith("DONE: steps=2 elapsed_sec=")
    assert json.loads((tmp_path / "run.json").read_text())["newest"] == 2
    assert not (tmp_path / "summary.json").exists()


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Within this context no file of this process gets longer than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_record_that_cannot_be_written_ends_the_run_and_the_next_start_cuts_off_its_part(
    tmp_path: Path,
) -> None:
    log, file = RunLog(tmp_path, steps=9, writes=True), tmp_path / "metrics.jsonl"
    log.record_metrics(0, {"a": 0})
    with file_limit(30):
        with pytest.raises(Unwritable, match=f"^{file} cannot be written: File too large$"):
            log.record_metrics(1, {"a": 1})
    assert file.read_text() == '{"step": 0, "a": 0}\n{"step": 1'
    RunLog(tmp_path, steps=9, first_step=1, writes=True).close()
    assert file.read_text() == '{"step": 0, "a": 0}\n'


def test_a_line_that_cannot_be_printed_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(tmp_path, steps=9, writes=False)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(open("/dev/full", "wb", buffering=0)))
    with pytest.raises(Unwritable, match="the log cannot be written: No space left on device"):
        log.print_line("step=0")


def test_a_file_is_replaced_by_a_complete_one_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    replace_file(file, "old")
    with file_limit(30), pytest.raises(OSError):
        replace_file(file, "x" * 31)
    assert file.read_text() == "old"


# An evaluation before step 0, two steps, and two evaluations after them; eval.jsonl has the kind of
# an evaluation as a value.
WRITTEN = [
    {"step": 0, "eval/accuracy": 0.5},
    {"step": 0, "time/train/step_s": 1.0, "text": "\u2028é"},
    {"step": 1, "time/train/step_s": 1.0},
    {"step": 2, "eval/accuracy": 0.5, "time/eval/step_s": 1.0},
    {"step": 2, "evaluation": "eval"},
    {"step": 2, "eval_full/accuracy": 0.5, "time/eval_full/step_s": 1.0},
    {"step": 2, "evaluation": "eval_full"},
]


@pytest.mark.parametrize(
    "step, kept, lines",
    [(0, (), 0), (0, ("eval",), 1), (1, ("eval",), 2), (2, (), 3), (2, ("eval",), 5), (3, (), 7)],
)
def test_a_file_ends_before_the_first_line_that_a_resumed_run_writes_again(
    tmp_path: Path, step: int, kept: tuple[str, ...], lines: int
) -> None:
    file = tmp_path / "a.jsonl"
    complete = [json.dumps(x, ensure_ascii=False) + "\n" for x in WRITTEN]
    for damaged in ('{"step": 0, "a', "\0\0\0\n"):  # a kill or a crash of the machine leaves them
        file.write_text("".join(complete) + damaged, encoding="utf-8")
        truncate_records(file, step, kept)
        assert file.read_text(encoding="utf-8") == "".join(complete[:lines])
