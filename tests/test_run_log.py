"""Claims about runtime/run_log.py, and about the tool that plots its records."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime.run_log import RunLog

REPO = Path(__file__).resolve().parent.parent
NAN = float("nan")


def test_only_process_0_writes_and_numbers_that_are_not_finite_become_null(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for writes, out in ((True, tmp_path / "0"), (False, tmp_path / "1")):
        log = RunLog(out, steps=1, writes=writes, wandb=None)
        log.line("hello")
        log.record(0, {"time/train/step_s": 2.0, "a": np.float32(0.5), "b": NAN, "c": "test"})
        log.record(1, {"time/train/step_s": 4.0})
        log.samples(0, [{"completion": "é"}])
        log.close()
    assert capsys.readouterr().out == "hello\nhello\n"
    assert not (tmp_path / "1").exists()
    lines = (tmp_path / "0" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, second = map(json.loads, lines)
    assert (first["step"], first["a"], first["b"], first["c"]) == (0, 0.5, None, "test")
    assert second["time/train/step_avg_last10_s"] == 3.0
    sample = json.loads((tmp_path / "0" / "samples.jsonl").read_text(encoding="utf-8"))
    assert sample == {"step": 0, "completion": "é"}


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (3720, "1h02m"),
        (183600, "2d03h"),
    ],
)
def test_the_time_left_is_that_of_steps_that_compiled_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, text: str
) -> None:
    class Took:
        def __init__(self, seconds: float, *compiled: str) -> None:
            self.total, self.compiled = lambda: seconds, lambda: [*compiled]

    log = RunLog(tmp_path, steps=14, first_step=3, writes=True, wandb=None)
    assert log.time_left(3, Took(99.0)) == ""  # the first step of this process
    assert log.time_left(4, Took(1e6, "micro_step")) == " left=14m51s"  # 9 steps of 99 s
    for _ in range(10):
        left = log.time_left(9, Took(seconds / 4))
    assert left == f" left={text}"  # 4 steps
    assert log.time_left(13, Took(1.0)) == ""
    monkeypatch.setattr(log._bar, "disable", False)  # as on a terminal
    assert log.time_left(9, Took(1.0)) == ""


def test_plot_run_draws_a_run_and_names_a_folder_that_holds_none(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a development package")
    run = tmp_path / "run"
    run.mkdir()
    records = [{"step": 0, "eval/accuracy": 0.25}, {"step": 0, "train-reward/total/mean": 1.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "eval')

    def plot(folder: Path, out: str = "curve.png") -> subprocess.CompletedProcess:
        command = [sys.executable, "tools/plot_run.py", folder, "--out", tmp_path / out]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True)

    drawn = plot(run)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "metrics.jsonl line 3 is not JSON; left out" in drawn.stderr
    heights = []  # of the bar that shows the standard error
    for error in (0.1, 0.2):
        evaluated = {"step": 0, "eval/accuracy": 0.25, "eval/accuracy_se": error}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(evaluated) + "\n")
        assert plot(tmp_path, "curve.svg").returncode == 0
        bars = (tmp_path / "curve.svg").read_text().partition('id="LineCollection_1"')[2]
        ends = re.search(r'd="M (\S+) (\S+)\s+L (\S+) (\S+)', bars)
        heights.append(float(ends[2]) - float(ends[4]))
    assert abs(heights[1]) == pytest.approx(2 * abs(heights[0]), rel=0.01) and heights[0] != 0
    (tmp_path / "metrics.jsonl").unlink()
    for out in ("nowhere/curve.png", "curve.xyz"):
        failed = plot(run, out)
        assert failed.returncode == 1 and failed.stderr.splitlines()[-1].startswith("error: --out ")
    failed = plot(tmp_path)
    assert failed.returncode == 1
    assert (
        failed.stderr.strip() == f"error: {tmp_path} has no metrics.jsonl; give a run's OUTPUT_DIR"
    )
