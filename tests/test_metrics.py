"""What a run prints and leaves behind, on figures worked by hand."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from inputs import accuracy_rule

from config import Config
from metrics import (
    AccuracyRule,
    Clock,
    RunLog,
    StepRows,
    check_wandb,
    evaluation,
    sampling_metrics,
    step_lines,
    step_records,
)

REPO = Path(__file__).resolve().parent.parent
NAN = float("nan")
# Two groups of two; the second's rewards are equal. One row is cut off, one has no first reward.
ROWS = StepRows.of(
    np.array(
        [
            [2.0, 10, 3, 1, 1.0, 1.0],
            [0.5, 10, 5, 0, 0.0, 0.5],
            [1.0, 20, 4, 1, 1.0, 0.0],
            [1.0, 20, 8, 1, NAN, 1.0],
        ]
    )
)
MEANS = {"loss": 0.25, "entropy": 1.5, "grad_norm": 2.0}


def clock() -> Clock:
    one = Clock()
    for phase in ("rollout_sync", "rollout_generate", "update"):
        one.lap(phase)
    return one


LINE = "step=7 loss=0.250000 entropy=1.5000 reward_mean=1.1250 dt=0.00s"
NOTHING = "note step=7: no completion that counts has an advantage: no policy gradient"


def test_the_step_line_ends_in_its_seconds_and_what_is_to_note_has_lines_of_its_own() -> None:
    assert step_lines(7, MEANS, ROWS, True, clock(), False) == [LINE]
    assert step_lines(7, MEANS, ROWS, False, clock(), False) == [LINE, NOTHING]
    means = MEANS | {"grad_norm": NAN}
    assert step_lines(7, means, ROWS, True, clock(), False) == [
        LINE,
        "note step=7: its update was not applied: grad_norm is nan",
    ]


def test_dynamic_sampling_has_a_line_with_its_rounds_and_the_share_of_groups_kept() -> None:
    sampled = {"rounds": 3.0, "kept_frac": 5 / 12, "reward_mean": 0.5}
    means = MEANS | {f"dynamic_sampling/{name}": value for name, value in sampled.items()}
    told = "dynamic_sampling step=7 rounds=3 kept=0.4167"
    assert step_lines(7, means, ROWS, True, clock(), False) == [LINE, told]
    line, *others = step_lines(7, means, ROWS, False, clock(), True)
    assert line.endswith(" completion_hit_max_frac=0.2500") and others == [told, NOTHING]
    records = step_records(means, ROWS, np.zeros(4), clock(), 2, ["first", "second"])
    assert {f"train-other/dynamic_sampling/{name}": x for name, x in sampled.items()}.items() <= (
        records.items()
    )


def test_a_group_whose_applicable_rewards_are_equal_teaches_nothing() -> None:
    rewards = [NAN, NAN, NAN, NAN, 1, NAN, 1, 1, 0, NAN, 1, 1]
    rows = ROWS._replace(rewards=np.array(rewards))
    assert rows.equal_groups(4).tolist() == [True, True, False]


def test_the_breakdown_names_phases_and_lengths() -> None:
    (line,) = step_lines(7, MEANS, ROWS, True, clock(), True)
    assert " rollout=0.00s rollout_sync=0.00s rollout_generate=0.00s reward=0.00s" in line
    assert line.endswith(
        "prompt_len_mean=15.0 completion_len_mean=5.0 completion_len_max=8 "
        "completion_hit_max_frac=0.2500"
    )


def test_the_step_record_by_hand() -> None:
    advantages = np.array([1.0, -1.0, 0.0, 0.0])
    records = step_records(MEANS, ROWS, advantages, clock(), 2, ["first", "second"])
    expected = {
        "train-other/loss": 0.25,
        "train-other/batch_global": 4,
        "train-other/total_valid_token_count": 20,
        "train-other/frac_reward_zero_std": 0.5,
        "train-reward/total/mean": 1.125,
        "train-reward/total/min": 0.5,
        "train-reward/total/max": 2.0,
        "train-reward/func/first/mean": 2 / 3,  # of the three rows it applies to
        "train-reward/func/second/mean": 0.625,
        "train-reward/advantage/std": np.sqrt(0.5),
        "train-seq_len/prompt/mean": 15.0,
        "train-seq_len/total/max": 28.0,
        "train-seq_len/completion/hit_max_frac": 0.25,
    }
    assert {name: records[name] for name in expected} == pytest.approx(expected)


def test_accuracy_is_over_samples_and_pass_at_k_over_questions() -> None:
    table = np.array([[2.0, 1], [0.5, 0], [0.0, 0], [0.0, 0]])  # two samples each
    rule = AccuracyRule("right", 1.0)
    line, records = evaluation(3, "test", table, 2, ["right"], rule, clock(), False)
    assert line == (
        "eval step=3 split=test questions=2 accuracy=0.2500 accuracy_of=right pass_at_2=0.5000 "
        "t=0.00s"
    )
    assert (records["eval/accuracy"], records["eval/pass_at_2"]) == (0.25, 0.5)
    assert records["eval/reward/total/mean"] == 0.625
    line, records = evaluation(3, "test", table, 1, ["right"], rule, clock(), True)
    assert line == (
        "eval_full split=test questions=4 samples_per_question=1 accuracy=0.2500 "
        "accuracy_of=right t=0.00s"
    )
    assert records["eval_full/accuracy/pass_at_1"] == 0.25


def test_accuracy_is_the_share_of_rewards_of_one_function_from_the_threshold_on() -> None:
    table = np.array([[0.1, 1.0, 0.0], [0.2, 0.5, 1.0], [0.3, 0.99, NAN], [0.4, 2.0, 0.0]])

    def accuracy(function: str, threshold: float) -> float:
        rule = AccuracyRule(function, threshold)
        found = evaluation(0, "test", table, 1, ["a", "b"], rule, clock(), False)[1]
        return found["eval/accuracy"]

    assert accuracy("a", 1.0) == 0.5
    assert accuracy("a", 0.5) == 1.0
    assert accuracy("b", 1.0) == pytest.approx(1 / 3)  # of the three it applies to


def test_accuracy_follows_reward_correct_or_the_first_function_or_the_one_named() -> None:
    def rule(settings: str, functions: str) -> AccuracyRule:
        cfg = Config.from_env(dict(pair.split("=", 1) for pair in settings.split()))
        return accuracy_rule(cfg, [SimpleNamespace(__name__=name) for name in functions.split()])

    assert rule("", "reward_format reward_correct") == ("reward_correct", 1.0)
    assert rule("", "countdown reward_format") == ("countdown", 1.0)
    assert rule("ACCURACY_OF=reward_format", "reward_correct reward_format")[0] == "reward_format"
    assert rule("ACCURACY_OF=my.py:f ACCURACY_THRESHOLD=0.5", "reward_correct f") == ("f", 0.5)
    with pytest.raises(ValueError) as error:
        rule("ACCURACY_OF=other", "reward_correct f")
    assert str(error.value) == (
        "ACCURACY_OF=other is none of the run's reward functions, reward_correct, f; add it to "
        "REWARD_FN, with weight 0 if it is only to measure"
    )


def test_process_0_alone_writes_and_what_is_not_finite_becomes_null(
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


def test_wandb_is_asked_for_by_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    check_wandb("disabled")
    with pytest.raises(ValueError, match="WANDB_MODE=offline needs wandb: pip install wandb"):
        check_wandb("offline")


def test_plot_run_draws_a_run_and_names_a_folder_without_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a development package")
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"step": 0, "eval/accuracy": 0.25}, {"step": 0, "train-reward/total/mean": 1.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "eval')

    def plot(folder: Path, out: str = "curve.png") -> subprocess.CompletedProcess:
        command = [sys.executable, "tools/plot_run.py", folder, "--out", tmp_path / out]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True)

    drawn = plot(run)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "metrics.jsonl line 3 is not JSON; left out" in drawn.stderr
    for out in ("nowhere/curve.png", "curve.xyz"):
        failed = plot(run, out)
        assert failed.returncode == 1 and failed.stderr.splitlines()[-1].startswith("error: --out ")
    failed = plot(tmp_path)
    assert failed.returncode == 1
    assert (
        failed.stderr.strip() == f"error: {tmp_path} has no metrics.jsonl; give a run's OUTPUT_DIR"
    )


def test_the_metrics_of_dynamic_sampling_are_of_all_that_was_sampled() -> None:
    equal = np.array([True, False, True, True, True, False])
    rewards = np.array([0.7, 0.7, 0.5, 0, NAN, NAN, 1, 1, 0, 0, 1, 0])
    assert sampling_metrics(2, equal, rewards) == pytest.approx(
        {
            "dynamic_sampling/rounds": 2,
            "dynamic_sampling/kept_frac": 1 / 3,
            "dynamic_sampling/reward_mean": 4.9 / 10,
        }
    )
    none = sampling_metrics(4, np.array([True]), np.array([NAN]))
    assert np.isnan(none["dynamic_sampling/reward_mean"])
