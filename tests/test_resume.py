"""runtime/resume.py: which checkpoint a run goes on from, and which changes of settings stop it."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_config import DEFAULTS
from test_reliability import start_run, wait_for
from test_train import Result, finish

from config import Config
from runtime.checkpoint import Checkpoints
from runtime.mistakes import UserMistake
from runtime.parsing import compared_by_value
from runtime.resume import finished_line, is_finished, stop_if_another, stop_if_unusable
from tools.fault_checks import checkpoint_arrays, metric_records
from update import TrainState


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
    (tmp_path / "run" / "finished").unlink()
    return tmp_path / "run"


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(out: Path, short: Path) -> None:
    (short / "checkpoints" / "3" / "arrays" / "manifest.ocdbt").write_bytes(b"")
    half = short / "checkpoints" / "4.orbax-checkpoint-tmp-17"
    half.mkdir()
    settings = {"STEPS": "3", "SAVE_KEEP": "0", "EVAL_EVERY_STEPS": "0"}
    result = finish(start_run(short, **settings), short)
    assert result.code == 0, result.errors
    assert f"checkpoint {half} is half-written and passed over" in result.lines
    assert re.search(
        r"^checkpoint \S+/checkpoints/3 is damaged and passed over: ", result.lines, re.M
    )
    assert "resumed after step 2 of 3" in result.lines
    ours, theirs = checkpoint_arrays(short, 3), checkpoint_arrays(out / "short", 3)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    assert metric_records(short) == metric_records(out / "short")
    kept = [*short.glob("earlier_*/3")]
    assert len(kept) == 1, "the damaged checkpoint is set aside, not deleted"


COMPARED = [setting.partition("=")[0] for setting in DEFAULTS["value"].split()]


def test_a_resumed_run_must_keep_exactly_these_settings() -> None:
    assert compared_by_value(Config) == COMPARED


WEIGHTS = """
    embed final_norm layers.attn_norm layers.wq layers.wk layers.wv layers.wo layers.bq layers.bk
    layers.bv layers.mlp_norm layers.gate layers.up layers.down
""".split()
TREES = """
    ['state'].params ['state'].opt_state[0].mu ['state'].opt_state[0].nu ['ref_params']
""".split()


def test_a_checkpoint_keeps_the_names_by_which_older_checkpoints_are_compared(short: Path) -> None:
    """A run refuses a checkpoint with other names, even if nothing but the names has changed."""
    record = json.loads((short / "checkpoints" / "3" / "record" / "metadata").read_text())
    assert list(record["made_with"]) == [
        *(name.upper() for name in COMPARED),
        "LR_DECAY_STEPS (else STEPS)",
        "prompts per step",
        "DTYPE",
        "the stop tokens",
        "the model's config.json",
        "the model's tokenizer.json",
        "the tokenized prompts",
        "the file of REWARD_FN recorder.py",
    ]
    progress = "step rounds not_finite evals wandb_id widths forked_from waiting".split()
    others = "made_with versions checksums arrays sha256".split()
    assert sorted(record) == sorted(progress + others)
    names = [text.partition(" ")[0] for text in record["arrays"]]
    weights = [f"{tree}.{weight}" for tree in TREES for weight in WEIGHTS]
    assert sorted(names) == sorted([*weights, "['state'].opt_state[0].count"])


def test_a_checkpoint_with_an_array_of_an_earlier_version_is_refused_in_one_line() -> None:
    """TrainState once counted the updates in `step`."""
    state = TrainState(params=np.zeros(3), opt_state=())
    arrays = [*Checkpoints.shapes({"state": state}), "['state'].step int32[]"]
    record = {"step": 3, "made_with": {}, "arrays": arrays, "versions": {}}
    with pytest.raises(UserMistake) as error:
        stop_if_unusable(3, False, {"state": state}, {}, record)
    assert str(error.value) == (
        "the checkpoint of step 3 has ['state'].step int32[], unused by this run: it was saved "
        "with other settings or by another version of the code; RESUME=never begins anew"
    )


def test_a_damaged_mark_of_a_finished_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "finished").write_text('{"step": 3, "ma')
    with pytest.raises(UserMistake, match=f"^{tmp_path}/finished is damaged: .*; remove this file"):
        is_finished(Config(steps=3, output_dir=str(tmp_path)), {})


def test_a_finished_run_says_which_settings_make_it_longer() -> None:
    forced = "RESUME_FORCE=1 for the longer schedule of the learning rate"
    for settings, advice in {
        "": f", and {forced}; with LR_DECAY_STEPS=4 instead, it is 0 in the added steps",
        "LR_SCHEDULE=linear LR_DECAY_STEPS=3": f" and LR_DECAY_STEPS, and {forced}; "
        "with LR_DECAY_STEPS=3 instead, it is 0 in the added steps",
        "LR_DECAY_STEPS=9": "",
        "LR_SCHEDULE=constant": " and LR_DECAY_STEPS=4",
        "LR_SCHEDULE=constant LR_DECAY_STEPS=3": "",
        "LR_SCHEDULE=constant WARMUP_RATIO=0": "",
    }.items():
        env = dict(pair.split("=") for pair in settings.split())
        cfg = Config.from_env({"MODEL_PATH": "m", "OUTPUT_DIR": "runs/a", "STEPS": "4"} | env)
        start = "OUTPUT_DIR=runs/a: all STEPS=4 are done. To train longer, set a larger STEPS"
        assert finished_line(cfg) == start + advice, settings


def test_a_longer_schedule_is_refused_with_the_setting_that_keeps_it() -> None:
    end = "LR_DECAY_STEPS (else STEPS)"
    for before, back in {"1": " with LR_DECAY_STEPS=1", "0": ""}.items():
        with pytest.raises(UserMistake) as error:
            stop_if_another({"step": 1, "made_with": {end: before}}, {end: "2"}, False)
        assert str(error.value) == (
            f"step 1 was made with other settings or files: {end} was {before} and is 2; set it "
            f"back{back}, or RESUME_FORCE=1 to go on, or RESUME=never to begin anew"
        )


# ---- Going on ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_with_more_steps_and_a_changed_setting_stops_it_with_its_name(
    out, short: Path
) -> None:
    def run(**env: str) -> Result:
        settings = {"EVAL_EVERY_STEPS": "0", "SAVE_KEEP": "0", "STEPS": "3"}
        return finish(start_run(short, **settings | env), short)

    def refused(words: str, **env: str) -> None:
        result = run(**env)
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
    refused("has ['state'].opt_state[0].nu.embed", OPTIMIZER="lion", RESUME_FORCE="1")
    speed = {"TRAIN_MICRO_BATCH_SIZE": "4", "REMAT": "none", "SAVE_EVERY_STEPS": "3"}
    result = run(STEPS="4", LR_DECAY_STEPS="3", EVAL_SPLIT="train", **speed)
    assert result.code == 0 and "resumed after step 3 of 4" in result.lines
    result = run(STEPS="4", LR_DECAY_STEPS="3")
    assert result.code == 0 and "all STEPS=4 are done" in result.lines
    assert re.search(r"^DONE: steps=4 elapsed_sec=", result.lines, re.M)
    assert not re.search("^step=", result.lines, re.M)
    result = run(STEPS="4", LR_DECAY_STEPS="3", SEED="1")
    assert result.code == 2 and "SEED was 0 and is 1" in result.errors
    result = run(STEPS="3", LR_DECAY_STEPS="3", RESUME=str(short / "checkpoints" / "4"))
    assert result.code == 2
    assert "STEPS=3, and the checkpoint is after step 4; raise it" in result.errors
    result = run(STEPS="5", LR_DECAY_STEPS="3", SEED="1", RESUME_FORCE="1")
    assert result.code == 0
    assert (
        "RESUME_FORCE=1: step 4 was made with other settings or files: SEED was 0" in result.lines
    )


@pytest.mark.slow
def test_resume_names_a_checkpoint_or_begins_anew_and_nothing_is_lost(out, short: Path) -> None:
    settings = {"EVAL_EVERY_STEPS": "0", "SAVE_KEEP": "0", "STEPS": "3"}

    def run(folder: Path, **env: str) -> Result:
        return finish(start_run(folder, **settings | env), folder)

    result = run(short, RESUME=str(short / "checkpoints" / "2"))
    assert result.code == 0 and "resumed after step 2 of 3" in result.lines
    assert len([*short.glob("earlier_*/3")]) == 1
    assert metric_records(short) == metric_records(out / "short")

    other = short.with_name("other")
    process = start_run(
        other, **settings | {"RESUME": str(short), "STEPS": "5", "LR_DECAY_STEPS": "3"}
    )
    wait_for(process, "^step=3 ")
    process.kill()
    process.communicate()
    result = run(other, STEPS="5", LR_DECAY_STEPS="3")
    assert result.code == 0 and "resumed after step" in result.lines, result.errors
    assert [r["step"] for r in metric_records(other)] == [3, 4]

    (short / "wandb").mkdir()
    result = run(short, RESUME="never")
    assert result.code == 0 and "resumed" not in result.lines
    assert [r["step"] for r in metric_records(short)] == [0, 1, 2]
    aside = [f.name for f in short.glob("earlier_*/*")]
    assert {"1", "2", "3", "metrics.jsonl", "samples.jsonl", "hf", "wandb"} <= {*aside}
    process = start_run(short, **settings | {"RESUME": "never"})
    wait_for(process, "^step=0 ")
    process.kill()
    process.communicate()
    result = run(short)
    assert "are done" not in result.lines and "step=2 " in result.lines, "the run was not finished"
    result = run(short, RESUME=str(short / "nowhere"))
    assert result.code == 2
    assert f"RESUME={short}/nowhere is not the folder of a complete checkpoint" in result.errors
