"""MAX_HOURS: a run ends in time with its checkpoint, an evaluation and its export, and goes on to
the same bits."""

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from faults.random_deadlines import missing, start_with
from faults.random_faults import SETTINGS as DEMO
from life import life_of
from runs import REPO, Result, assert_same_run, environment, metric_records, run_here, train_two

import config
import sampling
import startup
import train_grpo
import train_sft
from extras import teacher
from infra import checkpoint, hosts, lifecycle, log, resume
from infra.hosts import DEADLINE, StopRequested
from infra.lifecycle import Lifecycle


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only tests move; its seconds are clock.now."""
    clock = SimpleNamespace(now=0.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    for module in (startup, lifecycle, checkpoint, log):
        monkeypatch.setattr(module, "time", fake)
    monkeypatch.setattr(config, "STARTED", 0.0)
    return clock


def limited(out: Path, **settings: int) -> Lifecycle:
    """A run with MAX_HOURS=1 that saves each step, and whose weights were read in 8 seconds."""
    life = life_of(out, **{"eval_every_steps": 5, "save_every_steps": 1} | settings)
    life.limit_hours(1, 0.0, 8.0, [], [], 2)
    return life


def stops_at(life: Lifecycle, clock: SimpleNamespace) -> float:
    """The second from which the next question of raise_if_stopped stops the run."""
    before = clock.now
    for clock.now in range(int(before), 3601):
        life.last_check = clock.now  # without a wait between two questions
        try:
            life.stop_signal.raise_if_stopped()
        except StopRequested as request:
            assert (str(request), request.exit_code) == ("MAX_HOURS", 0)
            stopped, clock.now = clock.now, before
            return stopped
    raise AssertionError("the run has not stopped")


# ---- The reserve ---------------------------------------------------------------------------------


def test_the_run_stops_before_1_25_times_the_measured_seconds_of_its_end_and_10_seconds_more(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    life = limited(tmp_path)
    assert stops_at(life, clock) == 3600 - 10 - 1.25 * 8
    life.log.record_metrics(0, {"time/eval/step_s": 20.0})
    assert stops_at(life, clock) == 3600 - 10 - 1.25 * (8 + 20)
    life.log.record_metrics(5, {"time/eval/step_s": 8.0, "time/eval/loss_s": 4.0})
    assert stops_at(life, clock) == 3600 - 10 - 1.25 * (8 + 12)
    life.checkpoints.save_s = 16.0
    assert stops_at(life, clock) == 3600 - 10 - 1.25 * (8 + 12 + 16)
    life.checkpoints.saving = 3  # a save in the background, for which the last one waits
    assert stops_at(life, clock) == 3600 - 10 - 1.25 * (8 + 12 + 2 * 16)
    life.checkpoints.saving = -1
    life.last_check, clock.now = 100.0, 140.0  # an update that takes 40 seconds
    life.stop_signal.raise_if_stopped()
    assert stops_at(life, clock) == 3600 - 10 - 1.25 * (8 + 12 + 16 + 40)
    life.finish_step(1, "")
    assert stops_at(life, clock) == 3600 - 10 - 1.25 * (8 + 12 + 16 + 0.8 * 40)


def test_a_save_is_measured_and_is_no_wait_but_what_comes_before_it_is(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = limited(tmp_path)
    save = life.checkpoints.save

    def slow_save(*arguments: object) -> None:
        save(*arguments)
        clock.now += 30

    monkeypatch.setattr(life.checkpoints, "save", slow_save)
    clock.now = 12.0
    life.finish_step(1, "")
    life.save({"x": jnp.zeros(2)})
    life.stop_signal.raise_if_stopped()
    assert life.wait_s == 12.0
    clock.now += 4
    life.finish_step(1, "")
    monkeypatch.undo()
    for module in (checkpoint, lifecycle):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    life.save({"x": jnp.zeros(2)})
    clock.now += 7
    assert life.checkpoints.save_s == 0.0  # the first took no second of this clock
    life.checkpoints._manager.wait_until_finished()
    life.stop_signal.raise_if_stopped()  # within the next step
    clock.now += 90
    life.checkpoints.wait_until_saved()
    assert life.checkpoints.save_s == 7.0


def test_a_run_whose_steps_and_evaluations_are_done_is_not_late_in_the_full_sweep(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    life = limited(tmp_path)
    life.progress.step, clock.now = life.steps, 4000.0
    with pytest.raises(StopRequested):  # the last evaluation is due
        life.stop_signal.raise_if_stopped()
    life.finish_evaluation(0.5)
    life.stop_signal.raise_if_stopped()


@pytest.mark.parametrize(
    ("dtype", "itemsize", "seconds"), [("float32", 2, 24), ("bfloat16", 2, 12), ("int8", 4, 24)]
)
def test_a_start_expects_the_newest_evaluation_of_its_records_and_a_slow_disk(
    tmp_path: Path, clock: SimpleNamespace, dtype: str, itemsize: int, seconds: int
) -> None:
    """An int8 base is exported in the dtype of the run."""
    lines = [json.dumps({"step": i, "time/eval/step_s": 10.0 * (3 - i)}) for i in range(2)]
    life = life_of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 2}\n')
    saved = jax.ShapeDtypeStruct((800, 10**6), "float32")
    exported = jax.ShapeDtypeStruct((600, 10**6), dtype)
    life.limit_hours(1, 0.0, 8.0, {"a": saved}, (exported, None), itemsize)
    assert stops_at(life, clock) == 3600 - 10 - 1.25 * (20 + 32 + seconds)


@pytest.mark.parametrize(
    "seconds, evaluation, line",
    [
        (30.0, 0.0, "note: MAX_HOURS=1 is enough for about 116 of STEPS=300"),
        (30.0, 50.0, "note: MAX_HOURS=1 is enough for about 87 of STEPS=300"),
        (3.0, 0.0, "note: MAX_HOURS=1 is enough for about 300 of STEPS=300"),
    ],
)
def test_after_the_tenth_step_a_line_says_how_many_steps_fit(
    tmp_path: Path, clock: SimpleNamespace, capsys, seconds: float, evaluation: float, line: str
) -> None:
    life = limited(tmp_path, steps=300)
    life.log.record_metrics(0, {"time/eval/step_s": evaluation})
    for step in range(12):
        clock.now += seconds + 100 * (step == 0)
        life.last_check = clock.now
        life.log.record_metrics(step, {log.STEP_S: seconds + 100 * (step == 0)})
        assert capsys.readouterr().out == ""
        life.finish_step(1, "")
        assert capsys.readouterr().out == (line + "\n") * (step == 9)


def test_the_time_left_is_that_of_the_hours_if_that_is_less(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    life = limited(tmp_path)
    life.log.record_metrics(0, {log.STEP_S: 1000.0})
    step = SimpleNamespace(total=lambda: 1000.0)
    assert life.log.time_left(1, step) == " left=33:20"  # two steps
    clock.now = 3000.0
    assert life.log.time_left(1, step) == " left=10:00"
    clock.now = 3700.0
    assert life.log.time_left(1, step) == " left=00:00"


# ---- How it ends ---------------------------------------------------------------------------------

NO_TIME = "note: MAX_HOURS were not enough for the last evaluation\n"
HOURS, TERM = (f"STOPPED: {name} steps=3 saved_step=3\n" for name in ("MAX_HOURS", "SIGTERM"))
ENDS = {  # seconds of a pass of the evaluation, when SIGTERM comes; calls, lines, exit code
    "as planned": (1, None, "save evaluate export", HOURS, 0),
    "an evaluation that takes too long": (9, None, "save evaluate export", NO_TIME + HOURS, 0),
    "SIGTERM and the deadline together": (1, "before", "save", TERM, 143),
    "SIGTERM in the save": (1, "save", "save evaluate", TERM, 143),
    "SIGTERM in the evaluation": (1, "evaluate", "save evaluate", TERM, 143),
    "SIGTERM in an evaluation that takes too long": (9, "evaluate", "save evaluate", TERM, 143),
    "SIGTERM in the export": (1, "export", "save evaluate export", TERM, 143),
}


def end_of(
    life: Lifecycle, clock: SimpleNamespace, capsys, pass_s: float = 1, comes: str | None = None
) -> tuple[str, str, str, int]:
    """The calls, the lines, the errors and the exit code of a run that stops after its deadline.
    comes: the call in which SIGTERM arrives."""
    calls: list[str] = []
    reviews: list[str] = []
    life.review = lambda state, reason: {} if reviews.append(f"{state} {reason}") else {}

    def call(name: str) -> None:
        calls.append(name)
        if name == comes:
            life.stop_signal._number = signal.SIGTERM

    def save() -> None:
        call("save")
        life.save({"x": jnp.zeros(2)})

    def evaluate() -> float:
        call("evaluate")
        for _ in range(3):
            life.stop_signal.raise_if_stopped()
            clock.now += pass_s
        return 1.0

    def export(is_done: bool) -> None:
        assert not is_done
        call("export")

    with pytest.raises(SystemExit) as end, life.ending(save, evaluate, export):
        clock.now = 3582.0
        if comes == "before":
            life.stop_signal._number = signal.SIGTERM
        life.stop_signal.raise_if_stopped()
    out, errors = capsys.readouterr()
    assert len(reviews) == 1
    return " ".join(calls), out, errors + reviews[0], end.value.code


def after_three_steps(out: Path, **settings: int) -> Lifecycle:
    life = limited(out, **settings)
    for _ in range(3):
        life.finish_step(1, "")
    return life


@pytest.mark.parametrize("name", ENDS)
def test_the_run_saves_first_then_evaluates_then_exports_and_a_signal_counts_more(
    tmp_path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    pass_s, comes, *expected = ENDS[name]
    life = after_three_steps(tmp_path)
    calls, lines, reviewed, code = end_of(life, clock, capsys, pass_s, comes)
    assert [calls, lines, code] == expected
    assert reviewed == f"stopped {'SIGTERM' if code else 'MAX_HOURS'}"
    record = tmp_path / "checkpoints" / "3" / "record" / "metadata"
    saved = json.loads(record.read_text())
    assert (saved["accuracy"], saved["best_step"]) == (None, -1)
    assert (life.progress.accuracy, life.progress.best_step) == (None, -1)


def test_what_was_evaluated_after_this_step_or_is_never_evaluated_gets_no_evaluation(
    tmp_path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = after_three_steps(tmp_path / "a")
    evaluated.progress.accuracy = 0.5
    never = after_three_steps(tmp_path / "b", eval_every_steps=0)
    for life in (evaluated, never):
        assert end_of(life, clock, capsys)[::3] == ("save export", 0)
        clock.now = 0.0


def test_a_start_that_adds_no_step_ends_with_code_2(
    tmp_path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    life = after_three_steps(tmp_path)
    life.first_step = 3  # it has resumed after three steps
    line = "MAX_HOURS=1 ended this start before it added a step; raise it"
    errors = f"error: {line}\nfailed {line}"
    assert end_of(life, clock, capsys) == ("save", "", errors, 2)


@pytest.mark.parametrize("numbers, raised", [([0, -1], -1), ([-1, 15], 15), ([0, 0], 0)])
def test_one_late_process_stops_all_and_a_signal_to_one_counts_more(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int], raised: int
) -> None:
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    gather = SimpleNamespace(process_allgather=lambda number: jnp.array(numbers))
    monkeypatch.setattr(hosts, "multihost_utils", gather)
    requests = []
    try:
        hosts.StopSignal().raise_if_stopped()
    except StopRequested as request:
        requests.append(str(request))
    names = {0: [], DEADLINE: ["MAX_HOURS"], 15: ["SIGTERM"]}
    assert requests == names[raised]


def test_the_hub_waits_until_all_steps_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uploads: list[bool] = []
    hub = SimpleNamespace(upload=lambda *arguments: uploads.append(True))
    monkeypatch.setattr(startup, "open_hub", lambda cfg: hub)
    monkeypatch.setattr(startup.hf, "hf_tensors", lambda *arguments: {})
    monkeypatch.setattr(startup.hf, "save_model", lambda *arguments, **named: None)
    cfg = config.Config(model_path="m", steps=9, eval_full_sweep=True, push_to_hub="me/model")
    compute = SimpleNamespace(model=SimpleNamespace(lora=None), dtype=None)
    rollout = SimpleNamespace(stopping=SimpleNamespace(stop_ids=()))
    learner = SimpleNamespace(compute=compute)
    run = SimpleNamespace(cfg=cfg, learner=learner, rollout=rollout, adapters=None, folder=None)
    startup.export(run, tmp_path, None, is_done=False)
    assert capsys.readouterr().out == (
        "note: left for the start that reaches STEPS=9: EVAL_FULL_SWEEP, PUSH_TO_HUB\n"
    )
    assert uploads == []
    startup.export(run, tmp_path, None, is_done=True)
    assert (uploads, capsys.readouterr().out) == ([True], "")


# ---- A run whose clock runs out in each phase ----------------------------------------------------

SETTINGS = environment(
    """STEPS=6 BATCH_SIZE=4 NUM_PRE_Q=4 TRAIN_MICRO_BATCH_SIZE=16 DYNAMIC_SAMPLING=1
    ROLLOUT_GLOBAL_BATCH_SIZE=8 DYNAMIC_SAMPLING_MAX_ROUNDS=2 LEARNING_RATE=3e-4
    MAX_LENGTH_SAMPLE=32 EVAL_EVERY_STEPS=2 EVAL_PROMPTS=32 EVAL_FULL_SWEEP=1
    SAVE_EVERY_STEPS=3 SAVE_KEEP=0"""
)
SFT = environment(
    """COMPLETION_COLUMN=answer NUM_PRE_Q=1 MAX_LENGTH_SAMPLE=128 TRAIN_MICRO_BATCH_SIZE=8 STEPS=3
    BATCH_SIZE=8"""
)


@pytest.fixture
def main(clock: SimpleNamespace) -> Callable[..., Result]:
    def run(module, out: Path, **env: str) -> Result:
        clock.now = 0.0
        return run_here(out, module, env)

    return run


def test_hosts_without_a_common_folder_have_no_max_hours(
    main: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "open_checkpoints", lambda *_: SimpleNamespace(shared=False))
    refused = main(train_grpo, tmp_path, MAX_HOURS="9")
    line = "MAX_HOURS=9 ends a start, and there are no checkpoints for the next one"
    assert (refused.code, refused.errors) == (2, f"error: {line}; set CHECKPOINT_DIR\n")


def test_the_seconds_of_reading_a_teacher_are_not_those_of_an_export(
    main: Callable, clock: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = teacher.load_weights

    def slow_read(*arguments: object) -> object:
        clock.now += 3000
        return read(*arguments)

    monkeypatch.setattr(teacher, "load_weights", slow_read)
    env = SETTINGS | environment("STEPS=1 EVAL_EVERY_STEPS=0 EVAL_FULL_SWEEP=0 MAX_HOURS=1")
    result = main(train_grpo, tmp_path, **env, TEACHER_PATH=str(REPO / "tiny"))
    assert result.code == 0 and "\nDONE: steps=1 " in result.lines, result.errors


# In which call of which function the clock runs out, start by start: with so many steps done, in an
# evaluation or not; then the steps that the stop leaves, and whether there is an extra evaluation.
OF_GRPO = [
    ("generate", 2, 1, False, 1, True),  # in a pass of the rollout
    ("gather_batch", 1, 2, False, 2, False),  # between two rounds of sampling
    ("generate", 2, 4, True, 4, True),
    ("update_policy", 1, 4, False, 5, True),
]
OF_SFT = [
    ("log_sft_step", 1, 0, False, 1, True),
    ("compute_batch_logps_and_entropies", 1, 2, True, 2, True),
]


def run_out(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, module, moment) -> None:
    """Lets the clock jump to two seconds after the deadline of the next run at this moment."""
    name, number, *when = moment[:4]
    runs: list[Lifecycle] = []
    evaluating: list[str] = []
    calls: list[str] = []

    def wrap(owner: object, function_name: str) -> None:
        function = getattr(owner, function_name)

        def wrapped(*arguments, **named):
            if function_name == "limit_hours":
                runs.append(arguments[0])
            if function_name == name and [runs[0].progress.step, bool(evaluating)] == when:
                calls.append(name)
                if len(calls) == number:
                    clock.now = 3592.0
            if function_name.startswith("evaluate"):
                evaluating.append(function_name)
            try:
                return function(*arguments, **named)
            finally:
                if function_name.startswith("evaluate"):
                    evaluating.pop()

        monkeypatch.setattr(owner, function_name, wrapped)

    wrap(Lifecycle, "limit_hours")
    for function_name in {"evaluate", "evaluate_loss", name} & {*vars(module)}:
        wrap(module, function_name)
    if name == "generate":
        wrap(sampling.NaiveBackend, name)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "moments"), [(train_grpo, OF_GRPO), (train_sft, OF_SFT)])
def test_a_run_whose_clock_runs_out_in_any_phase_ends_like_the_undisturbed_run(
    main: Callable, clock, tmp_path: Path, monkeypatch, module, moments: list[tuple]
) -> None:
    env = SETTINGS | (SFT if module is train_sft else {})
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "out"
    result = main(module, undisturbed, **env)
    assert result.code == 0 and "MAX_HOURS" not in result.lines
    for moment in moments:
        *_, steps, is_extra = moment
        with monkeypatch.context() as patch:
            run_out(patch, clock, module, moment)
            result = main(module, out, **env, MAX_HOURS="1")
        assert (result.code, clock.now) == (0, 3592.0)
        lines = result.lines
        assert f"\nSTOPPED: MAX_HOURS steps={steps} saved_step={steps}\n" in lines
        assert (out / "checkpoints" / str(steps)).is_dir()
        weights = out / "hf" / "model.safetensors"
        assert weights.is_file()
        weights.unlink()  # the next stop exports again
        summary = json.loads((out / "summary.json").read_text())
        assert (summary["state"], summary["why"]) == ("stopped", "MAX_HOURS")
        last = metric_records(out)[-1]
        assert (last["step"] == steps and "train-other/loss" not in last) == (
            is_extra or steps % 2 == 0
        )
        assert lines.count(f"\neval step={steps} ") == 1
        assert ": EVAL_FULL_SWEEP\n" in lines and "\neval_full " not in lines
    result = main(module, out, **env, MAX_HOURS="1")
    lines = result.lines
    assert result.code == 0
    assert "\neval_full " in lines and f"\nDONE: steps={env['STEPS']} " in lines
    assert_same_run(out, undisturbed, int(env["STEPS"]))
    weights = [folder / "hf" / "model.safetensors" for folder in (out, undisturbed)]
    assert len({file.read_bytes() for file in weights}) == 1


# ---- Processes -----------------------------------------------------------------------------------

# The clock of process 1 jumps to nine seconds before the end of its hour in its second update.
AHEAD = """
import os, time, types
import config
from infra import lifecycle
update, updates = train_grpo.update_policy, []
def counted(*arguments):
    updates.append(1)
    return update(*arguments)
def monotonic():
    is_ahead = os.environ["JAX_PROCESS_ID"] == "1" and len(updates) > 1
    return config.STARTED + 3591 if is_ahead else time.monotonic()
train_grpo.update_policy = counted
lifecycle.time = types.SimpleNamespace(monotonic=monotonic, perf_counter=time.perf_counter)
"""


@pytest.mark.slow
def test_two_processes_whose_clocks_differ_stop_together(tmp_path: Path) -> None:
    env = environment("STEPS=9 BATCH_SIZE=2 NUM_PRE_Q=4 EVAL_EVERY_STEPS=5 EVAL_PROMPTS=8")
    results = train_two(tmp_path, 1, AHEAD, **env, MAX_HOURS="1")
    for result in results:
        assert "\nSTOPPED: MAX_HOURS steps=2 saved_step=2\n" in result.lines
    out = results[0].out
    assert [x["step"] for x in results[0].records if "eval/accuracy" in x] == [0, 2]
    assert (out / "checkpoints" / "2").is_dir() and (out / "hf" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_start_with_random_hours_ends_in_time_with_checkpoint_evaluation_and_export(
    tmp_path: Path,
) -> None:
    made = start_with(random.uniform(70, 75), tmp_path, DEMO | {"STEPS": "1000"})
    assert (made.mistakes, made.done) == ([], False)
    assert made.steps > 0 and 0 < made.unused_s < 40
    result = Result(0, "", "", [], [], tmp_path)
    assert missing(result, 99) == ["no evaluation after step 99", "no checkpoint of step 99"]
