"""The verdict on a run: each rule on records that are written by hand, the rules that
docs/verdict.md names, and a run whose reward is hacked beside the healthy one of the README."""

import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from runs import REPO, environment, run_as_user, train

from extras.report import RULES, History, Reviewer, verdict
from infra.log import RunLog

LOSS, NORM, PARAM_NORM = (f"train-other/{name}" for name in ("loss", "grad_norm", "param_norm"))
TOTAL, RIGHT, ENTROPY = "train-reward/total/mean", "train-reward/accuracy", "train-other/entropy"
ZERO, CUT = "train-reward/advantage/zero_frac", "train-seq_len/completion/hit_max_frac"
DRIFT = "train-other/sampling_logp_difference/mean"
TOO_LONG, OF_SCORER = "train-reward/model/too_long_frac", "train-reward/func/reward_model/mean"
SETTINGS = {"derived.drift_level": 0.001}
SAMPLED = "train-other/dynamic_sampling"
NAN = math.nan
Values = float | None | Callable[[int], float | None]  # of all steps, or of step i


def change(before: float, after: float | None) -> Values:
    """A value for the first ten steps, and another for all later ones."""
    return lambda i: before if i < 10 else after


def noisy(before: float, after: float) -> Values:
    """A change with noise: means of n steps differ with a standard error of sqrt(2 / n). A rule
    compares n = 10 steps, or a third of the run if that is more."""
    return lambda i: (before if i < 10 else after) + (1 if i % 2 else -1)


FINITE: dict[str, Values] = {LOSS: 0.1, NORM: 0.5, PARAM_NORM: 9.0}
HEALTHY = FINITE | {TOTAL: change(1.0, 1.5), RIGHT: change(0.4, 0.6)}
HEALTHY |= {ENTROPY: 0.5, ZERO: 0.2, CUT: 0.1, DRIFT: 1e-6}


def records(n: int, metrics: dict[str, Values]) -> list[dict[str, Any]]:
    """The records of n steps; without `metrics` they are those of a healthy run."""
    table = HEALTHY | metrics
    return [
        {"step": i} | {name: x(i) if callable(x) else x for name, x in table.items()}
        for i in range(n)
    ]


def history(
    metrics: dict[str, Values], n: int = 20, evals: Sequence[tuple[float, ...]] = ()
) -> History:
    """evals: (step, accuracy, its standard error) of each evaluation of 500 questions; one of
    which not all are scored has also the share of those that are."""
    steps = records(n, metrics)
    evaluations = [
        {"step": i, "eval/accuracy": x, "eval/accuracy_se": e, "eval/questions_global": 500}
        | dict(zip(["eval/reward/scored_frac"], share, strict=False))
        for i, x, e, *share in evals
    ]
    return History(SETTINGS, [*steps, *evaluations], steps, evaluations, "done", "", {})


def sft(losses: Values, held_out: Sequence[float], n: int = 20) -> History:
    """A run of train_sft.py. held_out: the losses of its evaluations."""
    steps = [{"step": i, NORM: 0.5, PARAM_NORM: 9.0, LOSS: losses(i)} for i in range(n)]
    evaluations = [{"step": i, "eval/loss": x} for i, x in enumerate(held_out)]
    settings = {"loss.loss_type": "sft"}
    return History(settings, [*steps, *evaluations], steps, [], "done", "", {})


def names(run: History) -> list[str]:
    """The names of the rules in the verdict; it also has to be silent about missing values."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines = verdict(run)
    return [line.split(": ")[1] for line in lines if not line.startswith("verdict: no sign")]


# ---- Each rule -----------------------------------------------------------------------------------

FELL, FELL_LESS = [(0, 0.5, 0.03), (20, 0.41, 0.03)], [(0, 0.5, 0.03), (20, 0.42, 0.03)]
ROSE, ROSE_LESS = [(0, 0.41, 0.03), (50, 0.5, 0.03)], [(0, 0.42, 0.03), (50, 0.5, 0.03)]
ENDS_RIGHT, ENDS_HALF_RIGHT = {RIGHT: change(0.4, 0.76)}, {RIGHT: change(0.4, 0.5)}
WRONG, GRADED = {RIGHT: change(0.4, 0.02)}, "train-reward/func/graded/mean"
HACKED = ENDS_HALF_RIGHT | {TOTAL: noisy(1, 1.9)}
FAR_BELOW, SAMPLED_RIGHT = [(20, 0.60, 0.05)], f"{SAMPLED}/accuracy"
FLAT, RUINED = {TOTAL: 1.0}, [(0, 0.5, 0.03), (50, 0.0, 0.0)]

SICK = [
    ("non_finite_steps", history({NORM: lambda i: None if i == 10 else 0.5})),
    ("non_finite_steps", history({NORM: lambda i: math.inf if i == 15 else 0.5})),
    ("non_finite_steps", history({PARAM_NORM: lambda i: None if i == 19 else 9.0})),
    ("sampler_drift", history({DRIFT: 0.00101})),
    ("no_accuracy", history({RIGHT: None})),
    ("no_accuracy", history({RIGHT: change(0.4, None)})),
    ("no_accuracy", history(FLAT | {RIGHT: NAN}, n=60)),
    ("no_accuracy", history({}, evals=[(0, 0.4, 0.02), (20, NAN, NAN)])),
    ("few_scored", history({}, evals=[(0, 0.4, 0.02), (20, 1.0, NAN, 1 / 500)])),
    ("few_scored", history({}, evals=[(0, 0.4, 0.02), (20, 1.0, NAN)])),
    ("few_scored", history({}, n=1, evals=[(0, 0.7, 0.2, 9 / 500)])),
    ("all_truncated", history({CUT: 0.9})),
    ("too_long_for_scorer", history({TOO_LONG: change(0.1, 0.12)})),
    ("entropy_collapsed", history({ENTROPY: change(1, 0.099), RIGHT: change(0.4, 0.69)})),
    ("all_wrong", history(WRONG | {GRADED: 0.02}, evals=[(0, 0.0, 0.0), (20, 0.02, 0.01)])),
    ("all_wrong", history(WRONG | {f"{SAMPLED}/accuracy": 0.0, RIGHT: 0.5})),
    ("no_signal", history({ZERO: 0.9})),
    # Four groups a step, all of them with equal rewards in eight of ten steps.
    ("no_signal", history({ZERO: lambda i: 0.75 if i % 5 == 0 else 1.0})),
    ("no_signal", history(ENDS_RIGHT | {ZERO: 0.98})),
    ("reward_hacked", history(HACKED, evals=FELL)),  # 2.01 and -2.12 standard errors
    ("held_out_below_train", history(ENDS_RIGHT, evals=FAR_BELOW)),
    # Without a value for all that was sampled, the rule takes the groups that the step keeps.
    ("held_out_below_train", history({SAMPLED_RIGHT: 0.9}, evals=FAR_BELOW)),
    ("held_out_below_train", history(ENDS_RIGHT | {SAMPLED_RIGHT: None}, evals=FAR_BELOW)),
    ("no_learning", history(FLAT, n=50)),
    ("no_learning", history({TOTAL: change(1.5, 0.5), RIGHT: 0.1}, n=50, evals=RUINED)),
    ("no_learning", history(FLAT, n=50, evals=ROSE_LESS)),  # 1.89 standard errors
    ("held_out_loss_rose", sft(change(2.0, 1.0), [2.0, 1.0, 1.11])),
    ("loss_rose", sft(change(2.0, 2.11), [])),
]
WELL = [
    ("non_finite_steps", history({NORM: lambda i: None if i == 9 else 0.5})),
    ("sampler_drift", history({DRIFT: lambda i: 0.00099 if i == 12 else 0.5})),
    ("no_accuracy", history({RIGHT: lambda i: 0.5 if i == 19 else None})),
    ("no_accuracy", history({}, evals=[(0, NAN, NAN), (20, 0.6, 0.02)])),
    ("few_scored", history({}, evals=[(0, 0.4, 0.1, 9 / 500), (20, 0.6, 0.1, 10 / 500)])),
    ("all_truncated", history({CUT: 0.89})),
    ("too_long_for_scorer", history({TOO_LONG: 0.5})),
    ("all_wrong", history({RIGHT: 0.0, OF_SCORER: -3.0})),
    ("entropy_collapsed", history({ENTROPY: change(1, 0.101), RIGHT: change(0.4, 0.69)})),
    ("entropy_collapsed", history({ENTROPY: change(1, 0.01), RIGHT: change(0.4, 0.7)})),
    ("all_wrong", history(WRONG | {RIGHT: change(0.4, 0.021)})),
    ("all_wrong", history(WRONG, evals=[(20, 0.021, 0.01)])),
    ("all_wrong", history(WRONG | {GRADED: 0.021})),  # no graded reward has to reach 1
    ("all_wrong", history(WRONG | {"train-other/reverse_kl": 0.1})),
    ("no_signal", history({ZERO: 0.89})),
    ("no_signal", history(ENDS_RIGHT | {ZERO: 0.97})),
    ("no_signal", history({ZERO: 1.0, "train-other/reverse_kl": 0.1})),
    # A group of one completion has equal rewards, and reinforce teaches it.
    ("no_signal", history({ZERO: 0.0, "train-other/frac_reward_zero_std": 1.0})),
    ("reward_hacked", history(ENDS_HALF_RIGHT | {TOTAL: noisy(1, 1.89)}, evals=FELL)),
    ("reward_hacked", history(HACKED, evals=FELL_LESS)),  # -1.89 standard errors
    ("held_out_below_train", history(ENDS_RIGHT, evals=[(20, 0.62, 0.01)])),  # by 0.14
    ("held_out_below_train", history(ENDS_RIGHT, evals=[(20, 0.60, 0.06)])),  # 2.67 errors
    # The groups that a step keeps are neither too hard nor too easy, whatever the policy does.
    ("no_learning", history({TOTAL: 1.0, f"{SAMPLED}/reward_mean": change(1.0, 1.5)}, n=50)),
    ("all_truncated", history({CUT: 1.0, f"{SAMPLED}/hit_max_frac": 0.5})),
    ("no_learning", history(FLAT, n=49)),
    ("no_learning", history(FLAT, n=50, evals=ROSE)),  # 2.12 standard errors
    ("held_out_loss_rose", sft(change(2.0, 1.0), [2.0, 1.0, 1.09])),
    ("held_out_loss_rose", sft(change(2.0, 1.0), [1.401, 0.021, 0.0222])),
    ("loss_rose", sft(change(2.0, 2.09), [])),
]


@pytest.mark.parametrize(("name", "run"), SICK, ids=[f"{x[0]}-{i}" for i, x in enumerate(SICK)])
def test_each_rule_holds_just_above_its_threshold_and_alone(name: str, run: History) -> None:
    assert names(run) == [name]


@pytest.mark.parametrize(("name", "run"), WELL, ids=[f"{x[0]}-{i}" for i, x in enumerate(WELL)])
def test_no_rule_holds_just_below_a_threshold(name: str, run: History) -> None:
    assert names(run) == []


# ---- The lines -----------------------------------------------------------------------------------


def test_a_healthy_run_is_told_what_it_has_reached() -> None:
    evals = [(0, 0.446, 0.0222), (10, 0.7, 0.0205), (20, 0.968, 0.0079)]
    start = "verdict: no sign of trouble in 20 steps: "
    assert verdict(history({}, evals=evals)) == [
        f"{start}accuracy 0.4460 (500 questions, standard error 0.0222) -> 0.9680 (500 questions, "
        "standard error 0.0079), mean reward 1.0000 -> 1.5000"
    ]
    scored = verdict(history({}, evals=[(0, 0.4, 0.02), (20, 0.6, 0.03, 0.5)]))
    assert scored[0].startswith(
        f"{start}accuracy 0.4000 (500 questions, standard error 0.0200) -> 0.6000 (500 questions, "
        "0.5000 of the completions scored, standard error 0.0300), mean reward"
    )
    assert verdict(history({}, evals=evals[:1])) == [f"{start}mean reward 1.0000 -> 1.5000"]
    assert verdict(history({}, evals=[(0, 0.446, 0.03), (20, 0.52, 0.03)])) == [
        f"{start}accuracy 0.4460 (500 questions, standard error 0.0300) -> 0.5200 (500 questions, "
        "standard error 0.0300), mean reward 1.0000 -> 1.5000, the reward has risen beyond noise, "
        "but the accuracy has not"
    ]
    losses = "loss 2.0000 -> 1.0000, held-out loss 2.1000 -> 0.9000"
    assert verdict(sft(change(2.0, 1.0), [2.1, 0.9])) == [start + losses]


def test_ten_steps_show_no_trend_and_eleven_do() -> None:
    start = "verdict: no sign of trouble in "
    assert verdict(history({}, n=10)) == [f"{start}10 steps: mean reward 1.0000"]
    assert verdict(history({}, n=11)) == [f"{start}11 steps: mean reward 1.0000 -> 1.0500"]
    assert verdict(sft(change(2.0, 1.0), [2.1, 0.9], n=10)) == [
        f"{start}10 steps: loss 2.0000, held-out loss 2.1000 -> 0.9000"
    ]


def test_the_steps_of_a_fork_count_from_the_fork() -> None:
    since = "since the fork of runs/x/checkpoints/50"
    fork = {"forked_from": "runs/x/checkpoints/50"}
    (line,) = verdict(history({}, n=9)._replace(run_json=fork))
    assert line == f"verdict: none yet: it needs 10 steps, and the run has 9 {since}"
    (line,) = verdict(history({})._replace(run_json=fork))
    assert line.startswith(f"verdict: no sign of trouble in 20 steps {since}: mean reward 1.0000 ")


def test_a_sick_run_has_at_most_three_lines_causes_come_first_and_no_learning_comes_alone() -> None:
    sick = {NORM: NAN, DRIFT: 0.5, CUT: 1, ZERO: 1} | FLAT
    assert names(history(sick, n=60)) == ["non_finite_steps", "sampler_drift", "all_truncated"]
    assert names(history(FLAT | {ZERO: 1}, n=60)) == ["no_signal"]
    (line,) = verdict(history({NORM: NAN}))
    assert line.startswith("verdict: non_finite_steps: ") and "Lower LEARNING_RATE" in line


def test_fewer_than_ten_steps_are_only_asked_for_bad_updates_and_a_sampler_that_differs() -> None:
    sick = {ZERO: 1, CUT: 1}
    assert verdict(history(sick, n=0)) == []  # a run that only evaluates
    assert verdict(history(sick, n=9)) == [
        "verdict: none yet: it needs 10 steps, and the run has 9"
    ]
    assert names(history(sick, n=10)) == ["all_truncated", "no_signal"]
    assert names(history(sick | {LOSS: lambda i: None if i else 0.1}, n=2)) == ["non_finite_steps"]
    assert names(history(sick | {DRIFT: 0.5}, n=1)) == ["sampler_drift"]
    assert names(history(sick | {DRIFT: None}, n=1)) == ["none yet"]


@pytest.mark.parametrize("missing", [None, NAN], ids=["null", "nan"])
def test_values_that_are_missing_raise_no_alarm_but_for_the_accuracy(missing: float | None) -> None:
    for name in (ENTROPY, ZERO, CUT, DRIFT):
        assert names(history({name: missing}, n=60, evals=ROSE)) == [], name
    values = dict.fromkeys(HEALTHY, missing) | FINITE  # else an update was not finite
    assert names(history(values, n=60, evals=[(0, NAN, NAN), (60, NAN, NAN)])) == ["no_accuracy"]


# ---- Notes while a run goes on -------------------------------------------------------------------


def go_on(out: Path, first: int, steps: list[dict[str, Any]]) -> None:
    """Steps of a run that starts, or resumes, at step `first`, with a review every 10 steps."""
    log = RunLog(out, steps=99, writes=True)
    reviewer = Reviewer(out, log)
    for record in steps[first:]:
        if record["step"] % 10 == 0:
            reviewer.write("running")
        log.record_metrics(record["step"], record)
    print(*reviewer.write("done").get("verdict", []), sep="\n", end="")


def test_a_note_comes_once_when_a_rule_holds_also_for_a_resumed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"{name}: {value}\n" for name, value in SETTINGS.items()]
    (tmp_path / "config.yaml").write_text("".join(settings))
    steps = records(45, {ENTROPY: change(1, 0.05)})  # the resumed run compares with its first steps
    go_on(tmp_path, 0, steps[:15])
    assert capsys.readouterr().out.startswith("verdict: no sign of trouble in 15 steps: ")
    go_on(tmp_path, 15, steps)
    notes = [line.split(": ")[:2] for line in capsys.readouterr().out.splitlines()]
    assert notes == [["note step=20", "entropy_collapsed"], ["verdict", "entropy_collapsed"]]


# ---- The verdicts on two runs of the tiny model --------------------------------------------------

REWARDS = """
def nines(completions, **columns):
    return [text.partition("<answer>")[2].count("9") / 3 for text in completions]
"""


@pytest.mark.slow
def test_a_sick_run_is_named_rightly_before_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    settings = environment(
        f"""STEPS=20 LEARNING_RATE=3e-4 EVAL_EVERY_STEPS=20 EVAL_PROMPTS=50 LR_SCHEDULE=constant
        WARMUP_RATIO=0 REWARD_FN=reward_correct,{tmp_path}/mine.py:nines REWARD_WEIGHTS=0,1
        ROLLOUT_GLOBAL_BATCH_SIZE=4 TRAIN_MICRO_BATCH_SIZE=32 SAVE_EVERY_STEPS=0 EXPORT_HF=none
        DATASET={REPO}/tiny"""
    )
    result = train(tmp_path / "run", **settings)
    verdict = json.loads((result.out / "summary.json").read_text())["verdict"]
    assert "reward_hacked" in [line.split(": ")[1] for line in verdict]
    lines = result.lines.splitlines()
    assert lines[-1].startswith("DONE: ") and lines[-1 - len(verdict) : -1] == verdict


@pytest.mark.slow
def test_the_run_of_the_readme_learns_to_calculate_and_raises_no_alarm(tmp_path: Path) -> None:
    """Three seeds in the README reach 0.966 and more."""
    fast = {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}  # 200 steps take a while
    result = run_as_user(tmp_path / "run", SAVE_EVERY_STEPS="0", EXPORT_HF="none", **fast)
    assert result.code == 0, result.errors
    accuracies = [r["eval/accuracy"] for r in result.records if "eval/accuracy" in r]
    assert accuracies[0] == pytest.approx(0.446, abs=0.01) and accuracies[-1] >= 0.95
    lines = result.lines.splitlines()
    (verdict,) = (line for line in lines if line.startswith("verdict: "))
    assert verdict.startswith("verdict: no sign of trouble in 200 steps: accuracy 0.44")
    notes = [line for line in lines if line.startswith("note ")]
    assert not [note for note in notes if "all rewards of each group are equal" not in note]


# ---- The page ------------------------------------------------------------------------------------


def test_the_page_tells_all_rules_in_their_order() -> None:
    page = (REPO / "docs" / "verdict.md").read_text(encoding="utf-8")
    assert re.findall(r"^- \*\*(\w+)\*\*", page, re.M) == [*RULES]
