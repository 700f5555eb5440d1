"""runtime/resume.py: whose a folder is, which checkpoint a run begins with, what it refuses."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults.checks import checkpoint_arrays, metric_records
from test_reliability import start_run, wait_for
from test_train import Result, finish

from config import Config
from runtime.checkpoint import Checkpoints, names_of
from runtime.mistakes import UserMistake
from runtime.parsing import REPO
from runtime.resume import (
    Beginning,
    Progress,
    record_of,
    run_in,
    stop_if_another,
    stop_if_other_arrays,
    what_changed,
    write_run,
)
from startup import set_up
from update import TrainState

# ---- Whose a folder is ---------------------------------------------------------------------------

MADE_WITH = {"SEED": "0"}


def arrays_after(step: int) -> dict:
    return {"x": jnp.full((4, 4), step, jnp.float32)}


def beginning_of(made_with: dict, asked: dict, reachable: bool = True, **settings) -> Beginning:
    """How a run with these settings begins in the working directory."""
    cfg = Config(**{"steps": 6, "save_keep": 0} | settings)
    out = Path.cwd() / cfg.output_dir
    checkpoints = Checkpoints(cfg.checkpoint_dir or f"{out}/checkpoints")
    return Beginning(cfg, checkpoints, out, reachable, made_with, asked)


LIKE = arrays_after(0)["x"]
WANTED = {"x": jax.ShapeDtypeStruct(LIKE.shape, LIKE.dtype, sharding=LIKE.sharding)}


def begun(made_with: dict = MADE_WITH, **settings) -> tuple:
    """The step and the value with which a run with these settings begins, its id and its origin."""
    arrays, progress = beginning_of(made_with, {"steps": "training"}, **settings).restore(WANTED)
    value = None if arrays is None else int(arrays["x"][0, 0])
    return progress.step, value, progress.run_id, progress.forked_from


def make_run(
    out: Path,
    *steps: int,
    began: str = "",
    done: dict | None = None,
    newest: int = -1,
    at: str = "",
) -> str:
    """Writes what a run leaves that has saved these steps, and returns its id. at: the folder of
    its checkpoints."""
    out.mkdir(parents=True)
    progress = Progress(forked_from=began, run_id=out.name)
    checkpoints = Checkpoints(at or f"{out}/checkpoints")
    for step in steps:
        progress.step = step
        checkpoints.save(step, arrays_after(step), record_of(progress, MADE_WITH), {})
    checkpoints.wait()
    write_run(out, progress, MADE_WITH, done or {}, newest)
    (out / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(5)))
    return progress.run_id


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run `a` that has checkpoints of the steps 2 and 4, and a new run `b`."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", 2, 4)
    make_run(tmp_path / "b")
    return tmp_path


def test_a_run_goes_on_in_its_own_folder_however_the_folder_is_named(runs: Path) -> None:
    run_id = run_in(runs / "a")["run_id"]
    assert begun(output_dir="a") == (4, 4, run_id, "")
    (runs / "link").symlink_to("a")
    for own in ("a", "a/checkpoints", "b/../a", "a/checkpoints/4", "link", str(runs / "a")):
        assert begun(output_dir="a", resume=own) == (4, 4, run_id, ""), own
    shutil.rmtree(runs / "a")  # the disk of a machine that was made anew is empty
    run_id = make_run(runs / "c", 2, at=f"{runs}/bucket")
    assert begun(output_dir="a", checkpoint_dir="bucket") == (2, 2, run_id, "")


def test_a_run_without_a_checkpoint_begins_again_and_is_the_same_run(runs: Path) -> None:
    assert begun(output_dir="b") == (0, None, run_in(runs / "b")["run_id"], "")
    (runs / "locked").mkdir()
    for name in (".lock", "metrics.jsonl"):  # a start that was killed may leave an empty file
        (runs / "locked" / name).touch()
    assert begun(output_dir="locked", resume="never")[:2] == (0, None)


def test_a_fork_needs_an_empty_folder_and_then_goes_on_with_its_own_checkpoints(
    runs: Path,
) -> None:
    source = f"{runs}/a/checkpoints"
    for resume, step in (("a", 4), ("a/checkpoints/2", 2), ("b/../a/", 4)):
        found = begun(output_dir="fork", resume=resume)
        assert found[:2] == (step, step) and found[3] == f"{source}/{step}"
        assert found[2] != run_in(runs / "a")["run_id"]
    run_id = make_run(runs / "f", began=f"{source}/2")  # with SAVE_EVERY_STEPS=0
    for resume in ("a/checkpoints/2", "a"):  # also if a has gone on since then
        assert begun(output_dir="f", resume=resume) == (2, 2, run_id, f"{source}/2")
    make_run(runs / "gone", began=f"{source}/3")
    with pytest.raises(UserMistake, match="^RESUME=a is not the folder of a complete checkpoint$"):
        begun(output_dir="gone", resume="a")
    run_id = make_run(runs / "g", 3, began=f"{source}/2")
    shutil.rmtree(runs / "a")
    for resume in ("a/checkpoints/2", "a", "auto", "g"):
        found = begun(output_dir="g", resume=resume)
        assert found == (3, 3, run_id, f"{source}/2"), resume


def test_the_folder_of_a_run_may_have_a_number_as_its_name(runs: Path) -> None:
    make_run(runs / "r" / "7", 5)
    assert begun(output_dir="new", resume="r/7")[0] == 5


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"resume": "never"}, "OUTPUT_DIR={}/a holds a run, and RESUME=never begins a new one"),
        (
            {"resume": "a/checkpoints/2"},
            "OUTPUT_DIR={}/a holds a run, and its newest checkpoint is of step 4; RESUME=auto goes "
            "on with it",
        ),
        (
            {"resume": "a/checkpoints/9"},
            "OUTPUT_DIR={}/a holds a run, and its newest checkpoint is of step 4; RESUME=auto goes "
            "on with it",
        ),
        (
            {"resume": "other"},
            "OUTPUT_DIR={}/a holds a run that began with the model, and RESUME=other asks for "
            "another",
        ),
        (
            {"output_dir": "b", "resume": "a"},
            "OUTPUT_DIR={}/b holds a run that began with the model, and RESUME=a asks for another",
        ),
        (
            {"output_dir": "fork", "resume": "a/checkpoints/4"},
            "OUTPUT_DIR={}/fork holds a run that began with {}/a/checkpoints/2, and "
            "RESUME=a/checkpoints/4 asks for another",
        ),
        (
            {"output_dir": "fork"},
            "OUTPUT_DIR={}/fork holds a run that began with {}/a/checkpoints/2, and RESUME=auto "
            "asks for another",
        ),
        (
            {"output_dir": "old"},
            "OUTPUT_DIR={}/old holds a run, and neither a checkpoint nor run.json says which run "
            "it is",
        ),
        (
            {"output_dir": "new", "checkpoint_dir": "a/checkpoints", "resume": "never"},
            "CHECKPOINT_DIR={}/a/checkpoints holds a run, and RESUME=never begins a new one",
        ),
        (
            {"output_dir": "new", "checkpoint_dir": "a/checkpoints", "resume": "other"},
            "CHECKPOINT_DIR={}/a/checkpoints holds a run that began with the model, and "
            "RESUME=other asks for another",
        ),
        (
            {"output_dir": "done", "checkpoint_dir": "elsewhere"},
            "OUTPUT_DIR={}/done: what is missing (training) needs a checkpoint of "
            "this run, and {}/elsewhere has none; set CHECKPOINT_DIR to its folder, or",
        ),
    ],
)
def test_the_folder_of_another_run_is_refused_and_nothing_in_it_changes(
    runs: Path, settings: dict, says: str
) -> None:
    make_run(runs / "other", 3)
    make_run(runs / "fork", began=f"{runs}/a/checkpoints/2")
    make_run(runs / "done", 2, newest=2)
    (runs / "old").mkdir()
    (runs / "old" / "eval.jsonl").write_text('{"step": 0}\n')

    def files() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in runs.rglob("*") if file.is_file()}

    before = files()
    with pytest.raises(UserMistake) as error:
        begun(**{"output_dir": "a"} | settings)
    end = " choose a new OUTPUT_DIR"
    assert str(error.value).removesuffix(end).removesuffix(";") == says.replace("{}", str(runs))
    assert str(error.value).endswith(end) and files() == before


def test_other_settings_are_refused_by_name_before_and_after_the_first_checkpoint(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fork = f" with RESUME={runs}/a/checkpoints, which goes on as changed"
    for out, what, end in (("a", "step 4", fork), ("b", f"the run in {runs}/b", "")):
        told = f"{what} was made with other settings or files: SEED was 0 and is 1"
        with pytest.raises(UserMistake) as error:
            begun({"SEED": "1"}, output_dir=out)
        assert str(error.value) == f"{told}; set it back, or choose a new OUTPUT_DIR{end}"
    begun({"SEED": "1"}, output_dir="new", resume="a")
    told = "step 4 was made with other settings or files: SEED was 0 and is 1"
    assert f"RESUME=a: {told}\n" in capsys.readouterr().out


def test_what_a_finished_run_has_not_done_is_missing(runs: Path) -> None:
    asked = {"steps": "training", "export": "export to hf"}

    def missing(asked: dict = asked, made_with: dict = MADE_WITH, **settings) -> list[str]:
        settings = {"steps": 4, "output_dir": "done"} | settings
        return list(beginning_of(made_with, asked, **settings).missing)

    make_run(runs / "done", 4, done={"training": 4, "export to hf": 4})
    assert missing() == missing(resume="done") == missing(resume="done/checkpoints/4") == []
    assert missing({**asked, "export": "export to new"}) == ["export"]
    assert missing(made_with={"SEED": "1"}) == ["steps", "export"]
    assert missing(output_dir="b") == missing(output_dir="nowhere") == ["steps", "export"]
    (runs / "b" / "run.json").write_text('{"made_with": ')
    with pytest.raises(UserMistake, match="b/run.json is damaged: .*; choose a new OUTPUT_DIR"):
        missing(output_dir="b")
    shutil.rmtree(runs / "done" / "checkpoints")
    assert missing() == []
    with pytest.raises(UserMistake, match=r"what is missing \(export to new\) needs a checkpoint"):
        missing({**asked, "export": "export to new"})


def test_what_was_done_after_a_damaged_checkpoint_is_done_again(runs: Path) -> None:
    make_run(runs / "done", 2, 4, done={"training": 4, "eval of test": 4, "export to hf": 2})
    (runs / "done" / "checkpoints" / "4" / "record" / "metadata").write_text("{}")
    asked = {"steps": "training", "eval": "eval of test", "export": "export to other"}
    beginning = beginning_of(MADE_WITH, asked, steps=4, output_dir="done")
    assert beginning.missing == {"export": "export to other"}
    assert beginning.restore(WANTED)[1].step == 2
    assert beginning.missing == asked and beginning.done == {"export to hf": 2}


def test_the_folders_of_two_runs_with_the_same_settings_are_not_mixed(runs: Path) -> None:
    with pytest.raises(UserMistake, match=f"^OUTPUT_DIR={runs}/b and CHECKPOINT_DIR={runs}/a/che"):
        begun(output_dir="b", checkpoint_dir="a/checkpoints")


# ---- Damaged checkpoints and other arrays --------------------------------------------------------


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def short(out: Path, tmp_path: Path) -> Path:
    """A copy of a run of three steps with a checkpoint of each step, for a test to change."""
    source = out / "short"
    if not source.exists():
        settings = {"STEPS": "3", "SAVE_KEEP": "0", "EVAL_EVERY_STEPS": "0"}
        assert finish(start_run(source, **settings), source).code == 0
    shutil.copytree(source, tmp_path / "run")
    run = json.loads((source / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(run | {"done": {}}))
    return tmp_path / "run"


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(out: Path, short: Path) -> None:
    (short / "checkpoints" / "3" / "arrays" / "manifest.ocdbt").write_bytes(b"")
    (short / "checkpoints" / "4.orbax-checkpoint-tmp-17").mkdir()
    settings = {"STEPS": "3", "SAVE_KEEP": "0", "EVAL_EVERY_STEPS": "0"}
    result = finish(start_run(short, **settings), short)
    assert result.code == 0, result.errors
    assert re.search(
        r"^checkpoint \S+/checkpoints/3 is damaged and passed over: ", result.lines, re.M
    )
    assert "resumed after step 2 of 3" in result.lines
    ours, theirs = checkpoint_arrays(short, 3), checkpoint_arrays(out / "short", 3)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    assert metric_records(short) == metric_records(out / "short")


def test_a_checkpoint_with_an_array_of_an_earlier_version_is_refused_in_one_line() -> None:
    """TrainState once counted the updates in `step`."""
    state = TrainState(params=np.zeros(3), opt_state=())
    arrays = [*names_of({"state": state}), "['state'].step int32[]"]
    with pytest.raises(UserMistake) as error:
        stop_if_other_arrays({"state": state}, {"step": 3, "arrays": arrays})
    assert str(error.value) == (
        "the checkpoint of step 3 has ['state'].step int32[], unused by this run: MODEL_PATH and "
        "OPTIMIZER have to be those of its run, and the code has to be of the same version"
    )


def test_a_run_with_a_reference_must_find_the_same_weights_in_its_model(tmp_path: Path) -> None:
    """The reference is no part of a checkpoint."""
    model, found = tmp_path / "model", []
    shutil.copytree(REPO / "tiny", model)
    for end in ("", "changed"):
        content = (REPO / "tiny" / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(content[: len(content) - len(end)] + end.encode())
        given = {"MODEL_PATH": str(model), "DATASET": str(REPO / "tiny"), "EVAL_EVERY_STEPS": "0"}
        runs = [set_up(Config.from_env(given | {"BETA": beta})) for beta in ("0", "0.1")]
        assert "the model's weights" not in runs[0].made_with
        found.append(runs[1].made_with)
    told = what_changed({"made_with": found[0]}, found[1], "step 1")
    assert told.startswith("step 1 was made with other settings or files: the model's weights was ")
    assert ";" not in told


def test_a_longer_schedule_is_refused_with_the_setting_that_keeps_it() -> None:
    end = "LR_DECAY_STEPS (else STEPS)"
    for before, back in {"1": " with LR_DECAY_STEPS=1", "0": ""}.items():
        with pytest.raises(UserMistake) as error:
            stop_if_another({"made_with": {end: before}}, {end: "2"}, "step 1")
        assert str(error.value) == (
            f"step 1 was made with other settings or files: {end} was {before} and is 2; set it "
            f"back{back}, or choose a new OUTPUT_DIR"
        )


# ---- Going on ------------------------------------------------------------------------------------

THREE = {"EVAL_EVERY_STEPS": "0", "SAVE_KEEP": "0", "STEPS": "3"}


def run(folder: Path, **env: str) -> Result:
    return finish(start_run(folder, **THREE | env), folder)


@pytest.mark.slow
def test_a_run_goes_on_with_more_steps_and_a_changed_setting_stops_it_with_its_name(
    short: Path,
) -> None:
    def refused(words: str, **env: str) -> None:
        result = run(short, **env)
        assert result.code == 2, result.lines
        last = result.errors.strip().splitlines()[-1]
        assert last.startswith("error: ") and words in last, last
        assert [r["step"] for r in metric_records(short)] == [0, 1, 2], "no record is lost"

    another = "step 3 was made with other settings or files: "
    refused(f"{another}LEARNING_RATE was 0.0003 and is 1e-05", LEARNING_RATE="1e-5")
    refused(f"{another}NUM_PRE_Q was 4 and is 8", NUM_PRE_Q="8")
    refused("prompts per step was 4 and is 8", BATCH_SIZE="8")
    schedule = "LR_DECAY_STEPS (else STEPS) was 3 and is 4; set it back with LR_DECAY_STEPS=3, or "
    refused(schedule, STEPS="4")
    refused("the tokenized prompts was", SYSTEM_PROMPT="Short.")
    fork = {"RESUME": f"{short}/checkpoints", "OUTPUT_DIR": f"{short}/fork"}
    refused("has ['state'].opt_state[0].nu.embed", **fork, OPTIMIZER="lion")
    lines = (short / "metrics.jsonl").read_text()
    (short / "metrics.jsonl").write_text(f'{{"step": null}}\n{lines}')
    result = run(short)
    told = f"{short}/metrics.jsonl line 1 has no step; remove this line"
    assert result.code == 2 and result.errors.strip().splitlines()[-1] == f"error: {told}"
    (short / "metrics.jsonl").write_text(lines)
    longer = {"STEPS": "4", "LR_DECAY_STEPS": "3"}
    speed = {"TRAIN_MICRO_BATCH_SIZE": "4", "REMAT": "none", "SAVE_EVERY_STEPS": "3"}
    result = run(short, **longer, EVAL_SPLIT="train", **speed)
    assert result.code == 0 and "resumed after step 3 of 4" in result.lines
    result = run(short, **longer, SEED="1")
    assert result.code == 2 and "SEED was 0 and is 1" in result.errors
    result = run(short, LR_DECAY_STEPS="3")
    assert result.code == 2
    assert "STEPS=3, and the checkpoint is after step 4; raise it" in result.errors
    result = run(short, STEPS="5", LR_DECAY_STEPS="3", SEED="1", **fork)
    assert result.code == 0
    told = "step 4 was made with other settings or files: SEED was 0 and is 1"
    assert f"RESUME={short}/checkpoints: {told}\n" in result.lines


@pytest.mark.slow
def test_a_finished_run_does_what_is_asked_and_missing_and_nothing_twice(short: Path) -> None:
    """It has been evaluated at its end, and no later start evaluates it again or loses this."""
    env = {"EVAL_EVERY_STEPS": "3", "EVAL_PROMPTS": "4"}

    def evaluations() -> list[tuple[int, str]]:
        records = [r for r in metric_records(short) if "train-other/loss" not in r]
        return [(r["step"], "full" if "eval_full/accuracy" in r else "") for r in records]

    assert run(short, **env).code == 0 and evaluations() == [(3, "")]
    for asked, adds in (
        ({}, []),
        ({"EXPORT_HF": f"{short}/new"}, []),
        ({"EVAL_FULL_SWEEP": "1"}, [(3, "full")]),
        ({"EXPORT_HF": f"{short}/newer"}, []),
    ):
        expected = evaluations() + adds
        result = run(short, **env | asked)
        assert result.code == 0 and ("resumed after step 3 of 3" in result.lines) == bool(asked)
        assert evaluations() == expected, (asked, result.lines, result.errors)
        result = run(short, **env | asked)
        assert f"OUTPUT_DIR={short}: all STEPS=3 are done; " in result.lines
        assert "resumed" not in result.lines and re.search("^DONE: steps=3 ", result.lines, re.M)
    weights = [short / name / "model.safetensors" for name in ("hf", "new", "newer")]
    assert len({file.read_bytes() for file in weights}) == 1


@pytest.mark.slow
def test_a_fork_that_is_killed_goes_on_by_the_same_command(short: Path, tmp_path: Path) -> None:
    """It is killed twice: before its first step, and after three of its steps. It has a checkpoint
    of its own before its first line, and notes the newest one whenever it saves."""
    longer = {"STEPS": "6", "LR_DECAY_STEPS": "3", "RESUME": f"{short}/checkpoints/2"}
    straight, fork = tmp_path / "straight", tmp_path / "fork"
    assert run(straight, **longer).code == 0
    before = sorted((file, file.stat().st_mtime_ns) for file in short.rglob("*"))
    for words, newest in (("^output=", 2), ("^step=4 ", 3)):
        process = start_run(fork, **THREE | longer)
        wait_for(process, words)
        process.kill()
        process.communicate()
        assert run_in(fork)["newest"] >= newest and (fork / "checkpoints" / str(newest)).is_dir()
    result = run(fork, **longer)
    assert result.code == 0, result.errors
    assert int(re.search("^resumed after step (.) of 6", result.lines, re.M)[1]) >= 3
    assert metric_records(fork) == metric_records(straight)
    assert [r["step"] for r in metric_records(fork)] == [2, 3, 4, 5]
    ours, theirs = checkpoint_arrays(fork, 6), checkpoint_arrays(straight, 6)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    assert sorted((file, file.stat().st_mtime_ns) for file in short.rglob("*")) == before
    result = run(fork, RESUME=f"{short}/nowhere", **{k: longer[k] for k in ("STEPS",)})
    assert result.code == 2 and "holds a run that began with" in result.errors
    result = run(tmp_path / "other", RESUME=f"{short}/nowhere")
    assert f"RESUME={short}/nowhere is not the folder of a complete checkpoint" in result.errors
