"""Claims about the completions that a log shows, report.html and summary.json, how a run ended, and
extras/report.py.

A report is read as its text; that a browser shows it well is nothing that a test can say.
"""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import REPO, Result, environment, finish, in_this_process, start, train, wait_for

from extras import report
from extras.report import History, Reviewer, first_steps, make_chart, read_history, render_report
from infra.log import RunLog, read_lines
from metrics import sample_table

SMALL = environment(
    """STEPS=2 BATCH_SIZE=2 NUM_PRE_Q=4 MAX_LENGTH_SAMPLE=8 EVAL_EVERY_STEPS=1 EVAL_PROMPTS=4
    SAMPLE_EVERY_STEPS=1 EXPORT_HF=none"""
)
SCRIPT = "<script>alert(1)</script>"
# A text with line separators and sequences that move or erase on a terminal.
ODD = "1\nerror: x\r\nDONE: \x85step=9\u2028eval\x1b[2K\x9b1A\rSTOPPED: \t2"
COMPLETION = {"text": ODD, "reward": 1.0, "rewards": {}, "tokens": 3, "ended": "stop token"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run of two steps with three evaluations and a sweep."""
    return train(tmp_path_factory.mktemp("runs") / "short", **SMALL, EVAL_FULL_SWEEP="1")


def summary_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def tool(*args: str | Path) -> tuple[int, str, str]:
    """Runs extras/report.py: its exit code, stdout and stderr."""

    def run(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(sys, "argv", ["report.py", *map(str, args)])
        report.main()

    return in_this_process(Path(args[0]), run)[:3]


# ---- Completions in the log ----------------------------------------------------------------------


def test_a_question_is_one_line_and_no_line_of_a_completion_begins_like_one_of_the_run() -> None:
    assert sample_table(7, {"question": ODD, "completions": [COMPLETION]}).split("\n") == [
        "sample step=7 question: 1\\nerror: x\\r\\nDONE: \\x85step=9\\u2028eval\\x1b[2K\\x9b1A\\r"
        "STOPPED: \\t2",
        "  reward=1 tokens=3 ended=stop token",
        "    1",
        "    error: x",
        "    DONE: ",
        "    step=9",
        "    eval\\x1b[2K\\x9b1A",
        "    STOPPED: \\t2",
    ]


def test_a_long_text_is_cut_and_an_empty_one_has_a_line() -> None:
    texts = ["a" * 400, "a" * 401, ""]
    entry = {"question": "q" * 401, "completions": [COMPLETION | {"text": x} for x in texts]}
    first, *lines = sample_table(7, entry).split("\n")
    assert first == "sample step=7 question: " + "q" * 400 + " ..."
    assert lines[1::2] == ["    " + "a" * 400, "    " + "a" * 400 + " ...", "    "]


def test_half_a_character_in_an_answer_does_not_end_a_run(tmp_path: Path) -> None:
    """JSON can hold half an emoji, and UTF-8 cannot."""
    answers = ["\ud83d 2", "4 \ude00 2", "\udcff 2", "😀 \ud83d 2"]
    rows = [json.dumps({"question": f"What is 1 + {x!a}?", "answer": x}) + "\n" for x in answers]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(rows))
    done = train(tmp_path / "run", **SMALL, DATASET=str(tmp_path))
    page = (done.out / "report.html").read_text(encoding="utf-8")
    for half in ("\\ud83d 2", "4 \\ude00 2", "\\udcff 2", "😀 \\ud83d 2"):
        assert f"answer: {half}<" in page, half


# ---- summary.json --------------------------------------------------------------------------------


def test_the_summary_of_a_run_has_its_last_values_under_their_published_names(done: Result) -> None:
    summary = summary_of(done.out)
    assert (summary["state"], summary["why"], summary["steps_done"]) == ("done", "", 2)
    assert summary["verdict"] == ["verdict: none yet: it needs 10 steps, and the run has 2"]
    for name in ("eval/accuracy", "eval_full/accuracy", "eval_full/accuracy/pass_at_1"):
        *_, newest = (record[name] for record in done.records if name in record)
        assert summary["last"][name] == newest is not None
    seconds = [r["time/train/step_s"] for r in done.records if "time/train/step_s" in r]
    mean = summary["last"]["time/train/step_avg_last10_s"]
    assert mean == pytest.approx(sum(seconds) / 2) and "time/eval_full/step_s" in summary["last"]
    assert summary["settings"]["rollout.num_pre_q"] == 4
    assert summary["settings"]["derived.policy_loss_impl"] == "jax"


def test_the_summary_says_that_a_run_goes_on_has_died_or_was_stopped(tmp_path: Path) -> None:
    """Nothing can write the word of a run that kill -9 ends, so its files say that it goes on. A
    copy of the files of this moment, which nobody locks, is what it leaves."""
    out, killed = tmp_path / "run", tmp_path / "killed"
    process = start(out, SMALL | {"STEPS": "99999", "EVAL_EVERY_STEPS": "0"}, 1)
    wait_for(process, "^step=2 ")
    assert tool(out) == (0, f"{out / 'report.html'}\n", "")
    assert summary_of(out)["state"] == "running"
    shutil.copytree(out, killed)
    process.send_signal(signal.SIGTERM)
    assert finish(process, out).code == 143
    assert (summary_of(out)["state"], summary_of(out)["why"]) == ("stopped", "SIGTERM")
    assert summary_of(killed)["state"] == "running"
    assert tool(killed) == (0, f"{killed / 'report.html'}\n", "")
    assert summary_of(killed)["state"] == "died" and summary_of(killed)["steps_done"] >= 3
    assert "killed: died after" in (killed / "report.html").read_text()


# ---- report.html ---------------------------------------------------------------------------------


def test_a_report_needs_no_network_and_shows_html_in_texts_but_does_not_execute_it(
    done: Result, tmp_path: Path
) -> None:
    """A completion, a question, an answer, a setting and the folder may hold HTML."""
    folder = tmp_path / "a<script>b"
    shutil.copytree(done.out, folder)
    for name in ("samples.jsonl", "eval.jsonl"):
        entries = [*read_lines(folder / name)]
        for entry in entries:
            entry |= {"question": f"question {SCRIPT}", "answer": f"answer {SCRIPT}"}
            for completion in entry["completions"]:
                completion["text"] = f"completion {SCRIPT}"
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    with open(folder / "config.yaml", "a", encoding="utf-8") as file:
        file.write(f"derived.{SCRIPT}: 'value {SCRIPT}'\n")
    text = render_report(folder, read_history(folder))
    for word in ("question ", "answer: answer ", "completion ", "derived.", "value "):
        assert f"{word}&lt;script&gt;alert(1)&lt;/script&gt;" in text, word
    assert not re.search(r"https?:|<script|<link|<img|<iframe|src=|href=|url\(|@import", text)
    assert text.startswith("<!doctype html>") and "b: done after 2 steps." in text
    assert "<p>verdict: none yet: " in text
    for title in ("accuracy on held-out questions", "mean reward", "norm of the gradient"):
        assert f"<figcaption>{title}<br>" in text
    for head in ("Held-out questions", "A group of step 0", "A group of step 1", "Settings"):
        assert f"<h2>{head}</h2>" in text


def test_a_long_run_is_shown_from_its_start_to_its_end(done: Result, tmp_path: Path) -> None:
    """It was killed in step 1000. It has evaluated 500 questions five times."""
    training = next(r for r in done.records if "time/train/step_s" in r)
    evaluation = next(r for r in done.records if "eval/accuracy" in r)
    answer = next(read_lines(done.out / "eval.jsonl"))
    sample = next(read_lines(done.out / "samples.jsonl"))
    log = RunLog(tmp_path, steps=2000, writes=True)
    shutil.copy(done.out / "config.yaml", tmp_path)
    for step in range(1000):
        if step % 200 == 0:
            log.record_metrics(step, evaluation | {"step": step})
            answers = [answer | {"question": f"question {i}", "step": step} for i in range(500)]
            log.append_entries("eval.jsonl", step, answers)
        reward = {"step": step, "train-reward/total/mean": step / 1000}
        log.record_metrics(step, training | reward)
        log.append_entries("samples.jsonl", step, [sample | {"step": step}])
    text = render_report(tmp_path, read_history(tmp_path))
    assert f"{tmp_path.name}: died after 1000 steps." in text
    chart = text.partition("<figcaption>mean reward<br>")[2].partition("</figure>")[0]
    assert ": 0.999</span>" in chart and ">step 999</text>" in chart
    assert re.findall(r"<th>(step \d+)</th>", text) == ["step 0", "step 400", "step 800"]
    assert re.findall(r"<pre>(question \d+)</pre>", text) == [f"question {i}" for i in range(6)]
    assert re.findall(r"A group of (step \d+)", text) == ["step 0", "step 500", "step 999"]
    assert len(re.findall("<polyline", text)) >= 15 and len(text.encode()) < 2e6


def test_an_answer_stands_under_its_own_step_where_another_step_has_none(tmp_path: Path) -> None:
    """EVAL_PROMPTS and the eval split may change when a run goes on."""
    with open(tmp_path / "eval.jsonl", "w") as file:
        for step, questions in {0: "ab", 10: "bc", 20: "ac"}.items():
            for question in questions:
                completion = COMPLETION | {"text": f"{question}{step}"}
                entry = {"evaluation": "eval", "step": step, "question": question, "answer": "1"}
                file.write(json.dumps(entry | {"completions": [completion]}) + "\n")
    text = render_report(tmp_path, History({}, [], [], [], "done", "", {}))
    shown = re.findall(r"<td>(?:<pre>)?([^<]+)", text)
    assert " ".join(shown) == "a a0 - a20 b b0 b10 - c - c10 c20"


def test_a_long_curve_is_drawn_by_the_lowest_and_the_highest_value_of_each_part() -> None:
    records = [{"step": i, "x": i % 10} for i in range(100_000)]
    records[31_415]["x"], records[92_653]["x"] = 999, -999  # beyond the ends of the axis
    [(name, corners, last)] = make_chart(records, ["x"]).curves
    assert (name, last) == ("x", 9) and len(corners.split()) == 601
    assert "94.2,0.0" in corners.split() and "278.0,140.0" in corners.split()


def test_long_reviews_take_a_twentieth_of_the_time(done: Result, tmp_path: Path, monkeypatch):
    shutil.copytree(done.out, tmp_path, dirs_exist_ok=True)
    moments = iter([0, 4, 10, 16, 129, 131, 132, 133, 134])  # the second review takes 6 s
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    reviewer = Reviewer(tmp_path, RunLog(tmp_path, steps=2, writes=True))
    states = ["running", "running", "running", "running", "done"]
    assert [bool(reviewer.write(state)) for state in states] == [True, True, False, True, True]
    assert not [*moments]


def test_a_report_that_cannot_be_written_gets_a_line_and_the_run_goes_on(
    done: Result, tmp_path: Path, capsys, monkeypatch
) -> None:
    log = RunLog(tmp_path, steps=2, writes=True)
    shutil.copy(done.out / "config.yaml", tmp_path)
    (tmp_path / "report.html").mkdir()
    reviewer = Reviewer(tmp_path, log)
    assert (reviewer.write("running"), reviewer.write("done")) == ({}, {})
    assert capsys.readouterr().out == f"{tmp_path}/report.html cannot be written: Is a directory\n"
    monkeypatch.setattr("extras.report.TEMPLATE", "report.gone")
    assert Reviewer(tmp_path, log).write("done") == {}
    line = "the template of the report: TemplateNotFound: 'report.gone' not found in search path"
    assert capsys.readouterr().out.startswith(line)


# ---- extras/report.py ----------------------------------------------------------------------------


def test_what_is_no_run_ends_in_one_line_and_code_2(tmp_path: Path) -> None:
    command = [sys.executable, REPO / "extras" / "report.py", tmp_path]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path} has no config.yaml; give the OUTPUT_DIR of a run\n"
    assert not [*tmp_path.iterdir()]


def test_a_picture_has_the_two_main_curves_of_all_runs(done: Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a development package")
    shutil.copytree(done.out, tmp_path / "other")
    picture = tmp_path / "curve.svg"  # whose texts can be read
    assert tool(done.out, tmp_path / "other", "--out", picture) == (0, f"{picture}\n", "")
    text = picture.read_text(encoding="utf-8")
    for label in ("held-out accuracy", "mean reward of the step", "short", "other"):
        assert f"<!-- {label} -->" in text
    for out in ("nowhere/curve.png", "curve.xyz"):
        code, _, errors = tool(done.out, "--out", tmp_path / out)
        assert (code, errors.count("\n")) == (2, 1) and errors.startswith("error: ")
        assert f"{tmp_path / out} cannot be written" in errors


def test_a_run_from_the_export_of_another_one_begins_in_the_picture_where_this_one_ended() -> None:
    models = {"a": "Qwen/Qwen3-0.6B", "b": "a/hf", "c": "b/hf", "d": "ab/hf"}
    runs = [History({"model.path": x}, [], [{}] * 5, [], "", "", {}) for x in models.values()]
    assert first_steps([*models], runs) == [0, 5, 10, 0]


# ---- Two runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "accuracy, change",
    [
        (0.810, "0.0270 ± 0.0157: noise"),
        (0.829, "0.0460 ± 0.0154: B is better"),
        (0.737, "-0.0460 ± 0.0166: A is better"),
    ],
    ids=str,
)
def test_a_difference_within_two_standard_errors_is_noise(
    tmp_path: Path, accuracy: float, change: str
) -> None:
    """Both runs have evaluated the 1319 test questions of GSM8K."""
    a, b = tmp_path / "a", tmp_path / "b"
    for run, value, impl in ((a, 0.783, "xla"), (b, accuracy, "auto")):
        run.mkdir()
        error = math.sqrt(value * (1 - value) / 1319)
        record = {"step": 100, "eval_full/accuracy": value, "eval_full/accuracy_se": error}
        record |= {"eval/reward/func/larger/mean": value, f"eval/reward/func/{impl}/mean": 0.5}
        (run / "metrics.jsonl").write_text(json.dumps(record))
        settings = f"train.attention_impl: {impl}\nrun.output_dir: {run}\n"
        (run / "config.yaml").write_text(settings)
    code, lines, errors = tool(a, b)
    assert (code, errors) == (0, "")
    change = change.replace("A is", f"{a} is").replace("B is", f"{b} is")
    (row,) = (line for line in lines.splitlines() if line.startswith("| eval_full/accuracy |"))
    assert f"| 0.7830 ± 0.0113 | {accuracy:.4f} ±" in row and row.endswith(f"| {change} |")
    rewards = [line.split("/")[3] for line in lines.splitlines() if "/func/" in line]
    assert rewards == ["larger", "xla", "auto"] and "eval/accuracy" not in lines
    assert lines.endswith("the settings differ in: train.attention_impl xla and auto\n")


def test_a_comparison_of_other_questions_or_rewards_says_so_above_the_table(tmp_path: Path) -> None:
    runs = tmp_path / "a", tmp_path / "b"
    for run, split, digest in zip(runs, ("test", "train"), ("1f", "2e"), strict=True):
        run.mkdir()
        (run / "config.yaml").write_text(
            f"data.dataset: d\ndata.eval_split: {split}\nreward.reward_fn: my.py:f\n"
        )
        made_with = {"SEED": digest, "the file of REWARD_FN my.py": digest, "REWARD_FN": "my.py:f"}
        (run / "run.json").write_text(json.dumps({"forked_from": "", "made_with": made_with}))
    note = "note: the metrics of both runs are not comparable: data.eval_split test and train, "
    assert tool(*runs)[1].startswith(f"{note}the file of REWARD_FN my.py\n| ")
    assert tool(runs[0], runs[0])[1].startswith("|  | ")
