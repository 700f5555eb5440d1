"""The verdict on a run: each rule on records that are written by hand."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from review import RULES, History, Reviewer, verdict
from runtime.run_log import RunLog

LOSS, NORM = "train-other/loss", "train-other/grad_norm"
TOTAL, FORMAT = "train-reward/total/mean", "train-reward/func/reward_format/mean"
RIGHT, ENTROPY = "train-reward/accuracy", "train-other/entropy"
ZERO, CUT = "train-reward/advantage/zero_frac", "train-seq_len/completion/hit_max_frac"
DRIFT, CLIPPED = (
    "train-other/sampling_logp_difference/mean",
    "train-other/clip_ratio_later/region_mean",
)
RATE = "train-other/learning_rate"
SETTINGS = {"derived.drift_level": 0.001}
NO_SIGNAL = (
    "no_signal: Hardly any advantage differs from 0, so there is nothing to learn from. "
    "Questions may be too hard or too easy, or the reward may be constant."
)
SAMPLED = "train-other/dynamic_sampling"
NAN = math.nan
Values = float | None | Callable[[int], float | None]  # of all steps, or of step i


def change(before: float, after: float) -> Values:
    """A value for the first ten steps, and another for all later ones."""
    return lambda i: before if i < 10 else after


def noisy(before: float, after: float, spread: float = 1.0, at: int = 10) -> Values:
    """A change at step `at`, with noise: means of n steps differ with a standard error of
    spread * sqrt(2 / n). A rule compares n = 10 steps, or a third of the run if that is more."""
    return lambda i: (before if i < at else after) + (spread if i % 2 else -spread)


HEALTHY: dict[str, Values] = {
    LOSS: 0.1,
    NORM: 0.5,
    TOTAL: change(1.0, 1.5),
    FORMAT: 0.95,
    RIGHT: change(0.4, 0.6),
    ENTROPY: 0.5,
    ZERO: 0.2,
    CUT: 0.1,
    DRIFT: 1e-6,
    CLIPPED: 1e-3,
    RATE: 1e-4,
}


def records(n: int, metrics: dict[str, Values]) -> list[dict[str, Any]]:
    """The records of n steps; without `metrics` they are those of a healthy run."""
    table = HEALTHY | metrics
    return [
        {"step": i} | {name: x(i) if callable(x) else x for name, x in table.items()}
        for i in range(n)
    ]


def of_steps(steps: list[dict[str, Any]], evals: list[dict[str, Any]]) -> History:
    return History(SETTINGS, [*steps, *evals], steps, evals, "done", "")


def history(
    metrics: dict[str, Values], n: int = 20, evals: Sequence[tuple[int, float, float]] = ()
) -> History:
    """evals: (step, accuracy, its standard error) of each evaluation."""
    found = [{"step": i, "eval/accuracy": x, "eval/accuracy_se": e} for i, x, e in evals]
    return of_steps(records(n, metrics), found)


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
FLAT, RUINED = {TOTAL: 1.0}, [(0, 0.5, 0.03), (50, 0.0, 0.0)]
FORMAT_ROSE = {FORMAT: noisy(0.70, 0.84, 0.1), RIGHT: 0.1}  # by 3.13 standard errors

SICK = [
    ("non_finite_steps", history({LOSS: lambda i: None if i == 19 else 0.1})),
    ("non_finite_steps", history({NORM: lambda i: None if i == 10 else 0.5})),
    ("non_finite_steps", history({NORM: lambda i: math.inf if i == 15 else 0.5})),
    ("sampler_drift", history({DRIFT: 0.00101})),
    ("sampler_drift", history({DRIFT: lambda i: NAN if i % 2 else 0.00101})),
    ("all_truncated", history({CUT: 0.9})),
    ("entropy_collapsed", history({ENTROPY: change(1, 0.099), RIGHT: change(0.4, 0.69)})),
    ("no_signal", history({ZERO: 0.98})),
    (
        "reward_hacked",
        history(ENDS_HALF_RIGHT | {TOTAL: noisy(1, 1.9)}, evals=FELL),
    ),  # 2.01 and -2.12 errors
    ("format_only", history(FORMAT_ROSE)),
    ("held_out_below_train", history(ENDS_RIGHT, evals=[(20, 0.60, 0.05)])),
    ("held_out_below_train", history(ENDS_RIGHT, evals=[(10, 0.60, 0.01)])),
    ("never_clipped", history({CLIPPED: 0})),
    ("never_clipped", history({CLIPPED: lambda i: None if i % 2 else 0})),
    ("no_learning", history(FLAT, n=50)),
    ("no_learning", history({TOTAL: noisy(1, 1.7, at=25)}, n=50)),  # 1.98 standard errors
    ("no_learning", history({TOTAL: change(1.5, 0.5), RIGHT: 0.1}, n=50, evals=RUINED)),
    ("no_learning", history(FLAT, n=50, evals=ROSE_LESS)),  # 1.89 standard errors
]
WELL = [
    ("non_finite_steps", history({NORM: lambda i: None if i == 9 else 0.5})),
    ("sampler_drift", history({DRIFT: lambda i: 0.00099 if i == 12 else 0.5})),
    ("all_truncated", history({CUT: 0.89})),
    ("entropy_collapsed", history({ENTROPY: change(1, 0.101), RIGHT: change(0.4, 0.69)})),
    ("entropy_collapsed", history({ENTROPY: change(1, 0.01), RIGHT: change(0.4, 0.7)})),
    ("no_signal", history({ZERO: 0.97})),
    # A group of one completion has equal rewards, and reinforce teaches it.
    ("no_signal", history({ZERO: 0.0, "train-other/frac_reward_zero_std": 1.0})),
    ("reward_hacked", history(ENDS_HALF_RIGHT | {TOTAL: noisy(1, 1.89)}, evals=FELL)),
    (
        "reward_hacked",
        history(ENDS_HALF_RIGHT | {TOTAL: noisy(1, 1.9)}, evals=FELL_LESS),
    ),  # -1.89 errors
    ("format_only", history(FORMAT_ROSE | {FORMAT: noisy(0.70, 0.83, 0.1)})),  # 2.91 errors
    ("format_only", history(FORMAT_ROSE | {FORMAT: noisy(0.60, 0.79, 0.1)})),
    ("format_only", history(FORMAT_ROSE | {RIGHT: noisy(0.1, 0.191, 0.1)})),  # 2.03 errors
    ("held_out_below_train", history(ENDS_RIGHT, evals=[(20, 0.62, 0.01)])),  # by 0.14
    ("held_out_below_train", history(ENDS_RIGHT, evals=[(20, 0.60, 0.06)])),  # 2.67 errors
    ("held_out_below_train", history(ENDS_RIGHT, evals=[(9, 0.60, 0.01)])),  # before the last ten
    ("held_out_below_train", history(ENDS_RIGHT, evals=[(20, 0.0, NAN)])),  # of one question
    ("never_clipped", history({CLIPPED: lambda i: 1e-6 if i == 15 else 0}, n=30)),
    ("never_clipped", history({CLIPPED: 0, RATE: lambda i: 1e-6 * i})),
    ("never_clipped", history({CLIPPED: None})),
    ("no_learning", history(FLAT, n=49)),
    ("no_learning", history({TOTAL: noisy(1, 1.72, at=25)}, n=50)),  # 2.04 standard errors
    ("no_learning", history(FLAT, n=50, evals=ROSE)),  # 2.12 standard errors
]


@pytest.mark.parametrize(("name", "run"), SICK, ids=[f"{x[0]}-{i}" for i, x in enumerate(SICK)])
def test_each_rule_holds_just_above_its_threshold_and_alone(name: str, run: History) -> None:
    assert names(run) == [name]


@pytest.mark.parametrize(("name", "run"), WELL, ids=[f"{x[0]}-{i}" for i, x in enumerate(WELL)])
def test_no_rule_holds_just_below_a_threshold(name: str, run: History) -> None:
    assert names(run) == []


def test_every_rule_has_a_sick_and_a_healthy_case() -> None:
    every = {rule.name for rule in RULES}
    assert len(every) == 10
    assert {name for name, _ in SICK} == every == {name for name, _ in WELL}


# ---- What the rules look at ----------------------------------------------------------------------

# The kept groups stay as they are and the sampled completions do not, or the other way round.
OF_SAMPLED = [
    (history({TOTAL: 1.0, f"{SAMPLED}/reward_mean": change(1.0, 1.5)}, n=50), []),
    (history({f"{SAMPLED}/reward_mean": 1.0}, n=50), ["no_learning"]),
    (history({CUT: 1.0, f"{SAMPLED}/hit_max_frac": 0.5}), []),
    (history({f"{SAMPLED}/hit_max_frac": 0.9}), ["all_truncated"]),
    (history(ENDS_RIGHT | {f"{SAMPLED}/accuracy": 0.6}, evals=[(20, 0.60, 0.05)]), []),
    (history({f"{SAMPLED}/accuracy": 0.9}, evals=[(20, 0.60, 0.05)]), ["held_out_below_train"]),
    (history(FORMAT_ROSE | {f"{SAMPLED}/func/reward_format/mean": 0.5}), []),
    (
        history(
            FORMAT_ROSE | {FORMAT: 0.5, f"{SAMPLED}/func/reward_format/mean": FORMAT_ROSE[FORMAT]}
        ),
        ["format_only"],
    ),
    (
        history(ENDS_RIGHT | {f"{SAMPLED}/accuracy": None}, evals=[(20, 0.60, 0.05)]),
        ["held_out_below_train"],
    ),
]


@pytest.mark.parametrize(("run", "expected"), OF_SAMPLED, ids=range(len(OF_SAMPLED)))
def test_under_dynamic_sampling_a_rule_looks_at_all_that_was_sampled(
    run: History, expected: list[str]
) -> None:
    """The groups that a step keeps are neither too hard nor too easy, whatever the policy does."""
    assert names(run) == expected


def test_a_note_under_dynamic_sampling_looks_at_all_that_was_sampled(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on(out, 0, records(30, {CUT: 1.0, f"{SAMPLED}/hit_max_frac": 0.5}))
    assert capsys.readouterr().out == ""


def test_a_step_is_not_finite_by_its_own_record_whatever_the_settings_are_now() -> None:
    """After a fork a step may have more updates than those before it had."""
    run = history({"train-other/updates_applied": 1})
    assert names(run._replace(settings={"derived.updates_per_step": 2})) == []
    assert names(history({LOSS: NAN})._replace(settings={})) == ["non_finite_steps"]


# ---- The lines -----------------------------------------------------------------------------------


def test_a_healthy_run_is_told_what_it_has_reached() -> None:
    evals = [(0, 0.446, 0.0222), (10, 0.7, 0.0205), (20, 0.968, 0.0079)]
    start = "verdict: no sign of trouble in 20 steps: "
    assert verdict(history({}, evals=evals)) == [
        f"{start}accuracy 0.4460 (standard error 0.0222) -> 0.9680 (standard error 0.0079), "
        "mean reward 1.0000 -> 1.5000"
    ]
    assert verdict(history({}, evals=evals[:1])) == [f"{start}mean reward 1.0000 -> 1.5000"]


def test_a_sick_run_has_at_most_three_lines_and_causes_come_first() -> None:
    sick = {NORM: NAN, DRIFT: 0.5, CUT: 1, ZERO: 1, CLIPPED: 0} | FLAT
    lines = [
        "verdict: non_finite_steps: An update was not finite and was not applied. Lower "
        "LEARNING_RATE or, at the first step, check the weights of MODEL_PATH; "
        "read bad_step_N.npz.",
        "verdict: sampler_drift: The sampler's log-probabilities are not the trainer's: its "
        "weights or programs differ.",
        "verdict: all_truncated: Nearly all completions are cut off before they end. Raise "
        "MAX_LENGTH_SAMPLE or, if they ended at the start of the run, lower LEARNING_RATE.",
    ]
    assert verdict(history(sick, n=60)) == lines


def test_that_nothing_is_learnt_is_said_only_if_no_other_rule_says_why() -> None:
    assert verdict(history(FLAT | {ZERO: 1}, n=60)) == [f"verdict: {NO_SIGNAL}"]
    assert names(history(FLAT | {CUT: 1, DRIFT: 1}, n=60)) == ["sampler_drift", "all_truncated"]


def test_fewer_than_ten_steps_are_only_asked_for_updates_that_are_not_finite() -> None:
    sick = {ZERO: 1, CUT: 1}
    assert verdict(history(sick, n=0)) == []  # a run that only evaluates
    assert verdict(history(sick, n=9)) == [
        "verdict: none yet: it needs 10 steps, and the run has 9"
    ]
    assert names(history(sick, n=10)) == ["all_truncated", "no_signal"]
    assert names(history(sick | {LOSS: lambda i: None if i else 0.1}, n=2)) == ["non_finite_steps"]


@pytest.mark.parametrize("missing", [None, NAN], ids=["null", "nan"])
def test_values_that_are_missing_raise_no_alarm(missing: float | None) -> None:
    for name in set(HEALTHY) - {LOSS, NORM, TOTAL}:
        assert names(history({name: missing}, n=60, evals=ROSE)) == [], name
    finite = {LOSS: 0.1, NORM: 0.5}  # without these an update was not finite
    values = dict.fromkeys(HEALTHY, missing) | finite
    nothing = history(values, n=60, evals=[(0, NAN, NAN), (60, NAN, NAN)])
    assert verdict(nothing) == [
        "verdict: no sign of trouble in 60 steps: accuracy nan (standard error nan) -> nan "
        "(standard error nan), mean reward nan -> nan"
    ]
    bare = [{"step": i} | finite for i in range(60)]
    told = "verdict: no sign of trouble in 60 steps: mean reward nan -> nan"
    assert verdict(of_steps(bare, [])) == [told]


# ---- Notes while a run goes on -------------------------------------------------------------------


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    settings = [f"{name}: {value}\n" for name, value in SETTINGS.items()]
    (tmp_path / "config.yaml").write_text("".join(settings))
    yield tmp_path


def go_on(out: Path, first: int, steps: list[dict[str, Any]], writes: bool = True) -> None:
    """Steps of a run that starts, or resumes, at step `first`; each is recorded and reviewed."""
    log = RunLog(out, steps=99, first_step=first, writes=writes, wandb=None)
    reviewer = Reviewer(out, log, writes)
    for record in steps[first:]:
        values = {name: value for name, value in record.items() if name != "step"}
        log.record(record["step"], values)
        reviewer.note_trouble(record)
    log.close()


def test_a_note_comes_once_after_a_rule_has_held_for_ten_steps(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The mean of the last ten steps is 0.98 or more from step 10 to 18, and from step 30 on.
    go_on(out, 0, records(60, {ZERO: lambda i: 0.5 if i in (0, 19, 20) else 1}))
    assert capsys.readouterr().out == f"note step=39: {NO_SIGNAL}\n"


def test_a_resumed_run_compares_with_its_first_steps_and_says_a_note_once(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = records(60, {ENTROPY: change(1, 0.05)})
    go_on(out, 0, steps[:15])
    assert capsys.readouterr().out == ""
    go_on(out, 15, steps)
    # The mean entropy of ten steps is below a tenth from step 19 on.
    assert capsys.readouterr().out == (
        "note step=28: entropy_collapsed: The policy has become almost deterministic before it was "
        "right, so it tries nothing new. Lower LEARNING_RATE, or raise EPS_HIGH, TEMPERATURE, BETA "
        "or ENTROPY_COEF.\n"
    )


def test_held_out_answers_are_compared_with_the_steps_around_their_evaluation(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An old evaluation says nothing about a policy that has learnt since then."""
    log = RunLog(out, steps=99, writes=True, wandb=None)
    reviewer = Reviewer(out, log, True)
    for record in records(70, {RIGHT: change(0.4, 0.9)}):
        if record["step"] in (0, 50):
            log.record(record["step"], {"eval/accuracy": 0.4, "eval/accuracy_se": 0.02})
            reviewer.write("running")
        log.record(record["step"], {name: x for name, x in record.items() if name != "step"})
        reviewer.note_trouble(record)
    told = capsys.readouterr().out
    assert told.startswith("note step=59: held_out_below_train: Held-out questions are answered ")
    assert told.count("\n") == 1


def test_only_process_0_reviews(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go_on(tmp_path / "1", 0, records(40, {ZERO: 1}), writes=False)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "1").exists()
