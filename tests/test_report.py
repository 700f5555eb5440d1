"""Claims about report.html and summary.json: of runs, of a run that was killed, and what they cost.

A report is read as its text; that a browser shows it well is nothing that a test can say.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_train import REPO, finish, start, train

from review import Reviewer, read_history, report
from runtime.records import read_lines
from runtime.run_log import RunLog

SMALL = {
    "BATCH_SIZE": "2",
    "NUM_PRE_Q": "4",
    "EVAL_EVERY_STEPS": "1",
    "EVAL_PROMPTS": "4",
    "SAMPLE_EVERY_STEPS": "1",
    "SAVE_EVERY_STEPS": "0",
    "EXPORT_HF": "none",
}
SCRIPT = "<script>alert(1)</script>"
# The demo, `python train_grpo.py`, takes 200 steps of 0.3 s and asks 500 questions.
STEPS, STEP_S, QUESTIONS, REPORTS = 200, 0.3, 500, 20
MOST_SHARE = 0.025  # of a step's time, for the notes and the reports


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(out: Path) -> Path:
    """The folder of a run of two steps with three evaluations."""
    train(out / "short", STEPS="2", **SMALL)
    return out / "short"


def tool(*args: str | Path) -> tuple[int, str, str]:
    """Runs tools/report.py: its exit code, stdout and stderr."""
    command = [sys.executable, REPO / "tools" / "report.py", *args]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


class Records:
    """The records of a run, to write them again with other steps."""

    def __init__(self, run: Path) -> None:
        records = [*read_lines(run / "metrics.jsonl")]
        records = [{k: x for k, x in r.items() if x is not None} for r in records]
        self.step = next(r for r in records if "time/train/step_s" in r)
        self.evaluation = next(r for r in records if "eval/accuracy" in r)
        self.answers = [e for e in read_lines(run / "eval.jsonl") if e["step"] == 0]
        self.samples = [e for e in read_lines(run / "samples.jsonl") if e["step"] == 0]

    def many_answers(self) -> list[dict[str, Any]]:
        """An entry for each of QUESTIONS questions."""
        few = self.answers
        return [few[i % len(few)] | {"question": f"question {i}"} for i in range(QUESTIONS)]


def new_folder(run: Path, to: Path) -> RunLog:
    """A folder with the settings of the run, and the log that writes its files."""
    log = RunLog(to, steps=STEPS, writes=True, wandb=None)
    shutil.copy(run / "config.yaml", to)
    return log


def write_evaluation(log: RunLog, records: Records, step: int) -> None:
    log.record(step, records.evaluation | {"step": step})
    log.answers(step, [entry | {"step": step} for entry in records.many_answers()])


# ---- One run -------------------------------------------------------------------------------------


def test_the_report_of_a_run_needs_no_network_and_no_script(run: Path) -> None:
    text = (run / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and text.endswith("</body></html>\n")
    assert not re.search(r"https?:|<script|<link|<img|<iframe|src=|href=|url\(|@import", text)
    assert "short: done after 2 steps." in text
    assert "<p>verdict: none yet: it needs 10 steps, and the run has 2" in text
    for title in ("accuracy on held-out questions", "mean reward", "norm of the gradient"):
        assert f"<figcaption>{title}<br>" in text
    for head in ("Held-out questions", "A group of step 0", "A group of step 1", "Settings"):
        assert f"<h2>{head}</h2>" in text
    entry = next(read_lines(run / "eval.jsonl"))
    assert f"<pre>{entry['question']}</pre>" in text


def test_html_in_texts_is_shown_and_not_executed(run: Path, tmp_path: Path) -> None:
    """A completion, a question, an answer, a setting and the folder may hold HTML."""
    folder = tmp_path / "a<script>b"
    shutil.copytree(run, folder)
    for name in ("samples.jsonl", "eval.jsonl"):
        entries = [*read_lines(folder / name)]
        for entry in entries:
            entry |= {"question": f"question {SCRIPT}", "answer": f"answer {SCRIPT}"}
            for completion in entry["completions"]:
                completion["text"] = f"completion {SCRIPT}"
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    with open(folder / "config.yaml", "a", encoding="utf-8") as file:
        file.write(f"derived.{SCRIPT}: '{SCRIPT}'\n")
    text = report({folder: read_history(folder)})
    assert "<script" not in text and "alert(1)</" not in text
    escaped = "&lt;script&gt;alert(1)&lt;/script&gt;"
    for word in ("question", "answer:", "answer", "completion", "derived."):
        told = f"{word} {escaped}" if word in ("question", "completion") else escaped
        assert told in text, word


def test_the_report_of_1000_steps_is_smaller_than_5_mb(run: Path, tmp_path: Path) -> None:
    records, log = Records(run), new_folder(run, tmp_path / "long")
    for step in range(1000):
        if step % 50 == 0:
            write_evaluation(log, records, step)
        log.record(step, records.step | {"step": step, "train-reward/total/mean": step / 1000})
        if step % 10 == 0:
            log.samples(step, [sample | {"step": step} for sample in records.samples])
    log.close()
    text = report({tmp_path / "long": read_history(tmp_path / "long")})
    assert "long: died after 1000 steps." in text
    reward = text.partition("<figcaption>mean reward<br>")[2].partition("</figure>")[0]
    assert ">0.999</span>" in reward and ">step 999</text>" in reward, "the last step"
    assert re.findall(r"<th>(step \d+)</th>", text) == ["step 0", "step 500", "step 950"]
    assert re.findall(r"<pre>(question \d+)</pre>", text) == [f"question {i}" for i in range(6)]
    assert len(re.findall("<polyline", text)) >= 15 and max(map(len, text.split("<g "))) > 3000
    assert len(text.encode()) < 5e6


# ---- tools/report.py -----------------------------------------------------------------------------


def test_several_runs_are_drawn_over_each_other(run: Path, tmp_path: Path) -> None:
    """Two of the folders have the same name."""
    others = [tmp_path / "other", tmp_path / "again" / "short"]
    for other in others:
        shutil.copytree(run, other)
    ab = tmp_path / "ab.html"
    assert tool(run, others[0], "--out", ab) == (0, f"{ab}\n", "")
    text = ab.read_text(encoding="utf-8")
    assert "<title>short, other</title>" in text
    accuracy = text.partition("<figcaption>accuracy on held-out questions<br>")[2]
    accuracy = accuracy.partition("</figure>")[0]
    assert re.findall(r">(\w+): [\d.]+ ± [\d.]+</span>", accuracy) == ["short", "other"]
    assert accuracy.count("<polyline") == 2
    assert tool(run, others[1], "--out", ab) == (0, f"{ab}\n", "")
    assert f"<title>{run}, {others[1]}</title>" in ab.read_text(encoding="utf-8")


def test_what_is_no_run_ends_in_one_line_and_code_2(run: Path, tmp_path: Path) -> None:
    code, lines, errors = tool(tmp_path)
    assert (code, lines) == (2, "")
    assert errors == f"error: {tmp_path} has no config.yaml; give the OUTPUT_DIR of a run\n"
    code, _, errors = tool(run, run)
    assert code == 2 and "--out FILE is needed for several runs" in errors
    assert not [*tmp_path.iterdir()]


def test_a_config_without_derived_values_has_a_report(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(run, folder)
    lines = (folder / "config.yaml").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("derived.")]
    assert len(kept) < len(lines)
    (folder / "config.yaml").write_text("".join(kept))
    assert tool(folder) == (0, f"{folder / 'report.html'}\n", "")


def test_a_run_that_was_killed_has_died(out: Path, run: Path) -> None:
    """Nothing can write the word of a run that kill -9 ends, so its files say that it goes on."""
    folder = out / "killed"
    # Without evaluations the run writes its summary only at the start.
    process = start(folder, SMALL | {"STEPS": "99999", "EVAL_EVERY_STEPS": "0"}, 1)
    assert any(line.startswith("step=1 ") for line in process.stdout)
    assert tool(folder)[0] == 0
    assert json.loads((folder / "summary.json").read_text())["state"] == "running"
    process.send_signal(signal.SIGKILL)
    assert finish(process, folder).code == -signal.SIGKILL
    assert tool(folder) == (0, f"{folder / 'report.html'}\n", "")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["state"] == "died" and summary["steps_done"] >= 2
    assert summary["why"] == "it left no word: it was killed, or its machine was"
    assert "killed: died after" in (folder / "report.html").read_text()


def test_a_report_that_cannot_be_written_gets_a_line_and_the_run_goes_on(
    run: Path, tmp_path: Path, capsys
) -> None:
    folder = tmp_path / "full"
    log = new_folder(run, folder)
    (folder / "report.html").mkdir()
    reviewer = Reviewer(folder, log, writes=True)
    assert (reviewer.write("running"), reviewer.write("done")) == ({}, {})
    log.close()
    assert capsys.readouterr().out == f"{folder}/report.html cannot be written: Is a directory\n"
    reviewer = Reviewer(folder, log, writes=True)
    (folder / "config.yaml").write_text("a: [")  # somebody has damaged it while the run goes on
    assert reviewer.write("running") == {}
    told = f"{folder}/report.html cannot be written: {folder}/config.yaml cannot be read: "
    assert capsys.readouterr().out.startswith(told)


def test_a_bug_in_the_review_ends_the_run(run: Path, tmp_path: Path) -> None:
    log = new_folder(run, tmp_path / "raises")
    reviewer = Reviewer(tmp_path / "raises", log, writes=True)
    log.record(0, Records(run).step | {"step": 0, "train-other/loss": "x"})
    with pytest.raises(ValueError, match="could not convert string to float"):
        reviewer.note_trouble(Records(run).step | {"step": 0, "train-other/loss": "x"})
    with pytest.raises(ValueError, match="could not convert string to float"):
        reviewer.write("running")
    log.close()


def test_a_picture_has_the_two_main_curves(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a development package")
    picture = tmp_path / "curve.svg"  # whose texts can be read
    assert tool(run, "--out", picture) == (0, f"{picture}\n", "")
    text = picture.read_text(encoding="utf-8")
    for label in ("held-out accuracy", "mean reward of the step", "short"):
        assert f"<!-- {label} -->" in text
    assert tool(run, "--out", tmp_path / "curve.png")[0] == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    for out in ("nowhere/curve.png", "curve.xyz"):
        code, _, errors = tool(run, "--out", tmp_path / out)
        assert (code, errors.count("\n")) == (2, 1) and errors.startswith("error: ")
        assert f"{tmp_path / out} cannot be written" in errors


# ---- What it costs -------------------------------------------------------------------------------


def test_notes_and_reports_take_little_of_a_step(run: Path, tmp_path: Path) -> None:
    """Seconds of the CPU, since other programs may run beside the tests."""
    records, log = Records(run), new_folder(run, tmp_path / "cost")
    reviewer, spent = Reviewer(tmp_path / "cost", log, writes=True), 0.0

    def timed(call: Any, *args: Any) -> None:
        nonlocal spent
        began = time.process_time()
        call(*args)
        spent += time.process_time() - began

    for step in range(STEPS):
        record = records.step | {"step": step}
        if step % (STEPS // REPORTS) == 0:
            write_evaluation(log, records, step)
            timed(reviewer.write, "running")
        log.record(step, record)
        timed(reviewer.note_trouble, record)
    log.close()
    assert spent / STEPS < MOST_SHARE * STEP_S
