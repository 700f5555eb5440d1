"""What process 0 of a real run leaves for people to read: how it ended, and a report."""

import json
import signal
import time
from pathlib import Path

import pytest
from test_train import Result, finish, start, train, train_two

BASE = {"STEPS": "2", "BATCH_SIZE": "2", "NUM_PRE_Q": "2", "MAX_LENGTH_SAMPLE": "8"}
BASE |= {"SAMPLE_EVERY_STEPS": "1", "EXPORT_HF": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("review")


def summary_of(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def reviewed(result: Result) -> list[str]:
    """The lines that are for people, of which only process 0 prints any."""
    beginnings = ("sample step=", "verdict: ", "  reward=")
    return [line for line in result.lines.splitlines() if line.startswith(beginnings)]


def test_a_run_that_is_done_says_so_with_its_last_and_its_best_values(folder: Path) -> None:
    settings = {"EVAL_EVERY_STEPS": "1", "EVAL_PROMPTS": "4"}
    records = train(folder / "done", **BASE, **settings).records
    summary = summary_of(folder / "done")
    assert (summary["state"], summary["why"], summary["steps_done"]) == ("done", "", 2)
    assert summary["verdict"] == ["verdict: none yet: it needs 10 steps, and the run has 2"]
    accuracies = {r["step"]: r["eval/accuracy"] for r in records if "eval/accuracy" in r}
    best = max(accuracies, key=accuracies.get)
    assert summary["best"]["eval/accuracy"] == {"step": best, "value": accuracies[best]}
    assert summary["last"]["eval/accuracy"] == accuracies[2]
    assert summary["last"]["train-other/loss"] == records[-2]["train-other/loss"]
    assert summary["settings"]["rollout.num_pre_q"] == 2
    assert summary["settings"]["derived.policy_loss_impl"] == "jax"


def test_the_summary_has_the_published_values_under_their_own_names(folder: Path) -> None:
    out = folder / "published"
    settings = {"EVAL_FULL_SWEEP": "1", "EVAL_EVERY_STEPS": "2", "EVAL_PROMPTS": "2"}
    records = train(out, **BASE, **settings).records
    (sweep,) = (record for record in records if "eval_full/accuracy" in record)
    steps = [record for record in records if "time/train/step_s" in record]
    seconds = [record["time/train/step_s"] for record in steps]
    last = summary_of(out)["last"]
    assert last["time/train/step_s"] == seconds[1]
    assert last["time/train/step_avg_last10_s"] == pytest.approx(sum(seconds) / 2)
    for name in ("eval_full/accuracy", "eval_full/accuracy/pass_at_1", "time/eval_full/step_s"):
        assert last[name] == sweep[name] is not None
    assert 0 <= last["eval_full/accuracy"] == last["eval_full/accuracy/pass_at_1"]


@pytest.mark.slow
def test_only_process_0_shows_samples_and_writes_a_review(folder: Path) -> None:
    first, second = train_two(folder / "two", 1, **BASE)
    kinds = [line.split(" ")[0] for line in reviewed(first)]
    assert kinds.count("sample") == 2 and kinds[-1] == "verdict:"
    assert reviewed(second) == []
    assert summary_of(folder / "two" / "0")["state"] == "done"
    assert (folder / "two" / "0" / "report.html").is_file()
    assert not [file for file in (folder / "two" / "1").iterdir() if file.suffix == ".html"]


def test_a_disk_that_is_full_under_the_review_gets_one_line_and_the_run_goes_on(
    folder: Path,
) -> None:
    out = folder / "full"
    # The trainer waits for the reward, and so it writes nothing while the links are made.
    (folder / "fills.py").write_text(
        "import os\n"
        "def fills(completions, **columns):\n"
        "    for name in ('report.html', 'summary.json'):\n"
        f"        link = f'{out}/{{name}}.partial'\n"
        "        os.path.lexists(link) or os.symlink('/dev/full', link)\n"
        "    return [0.0] * len(completions)\n"
    )
    function = {"REWARD_FN": f"{folder}/fills.py:fills", "REWARD_WEIGHTS": "1"}
    result = train(out, EVAL_EVERY_STEPS="1", EVAL_PROMPTS="2", **BASE, **function)
    assert result.lines.count(f"{out}/report.html cannot be written: No space left on device") == 1
    assert len(result.records) == 5 and "\nDONE: steps=2" in result.lines


def test_a_run_that_is_stopped_says_by_which_signal(folder: Path) -> None:
    out = folder / "stopped"
    process = start(out, BASE | {"STEPS": "5000"}, 1)
    records = out / "metrics.jsonl"
    while process.poll() is None and not (records.exists() and records.stat().st_size):
        time.sleep(0.1)
    assert summary_of(out)["state"] == "running"
    process.send_signal(signal.SIGTERM)
    assert finish(process, out).code == 143
    assert (summary_of(out)["state"], summary_of(out)["why"]) == ("stopped", "SIGTERM")


def test_a_run_that_fails_says_why(folder: Path) -> None:
    (folder / "fails.py").write_text(
        "calls = []\n"
        "def fails(completions, **columns):\n"
        "    calls.append(1)\n"
        "    return [1.0 / (len(calls) < 2)] * len(completions)\n"
    )
    out = folder / "failed"
    function = {"REWARD_FN": f"{folder}/fails.py:fails", "REWARD_WEIGHTS": "1"}
    assert finish(start(out, BASE | function, 1), out).code == 2
    summary = summary_of(out)
    assert (summary["state"], summary["steps_done"]) == ("failed", 1)
    assert "fails.py:fails raised ZeroDivisionError" in summary["why"]
