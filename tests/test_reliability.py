"""Runs that are killed, stopped, resumed or lose their disk end as if nothing had happened."""

import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from test_train import Result, finish, start, start_two

from config import Config
from runtime.resume import FREE

STEPS = 16
# Everything that a checkpoint holds moves: a following reference, two updates a step, extra rounds.
SETTINGS = {
    "STEPS": str(STEPS), "BATCH_SIZE": "4", "NUM_PRE_Q": "4", "TRAIN_MICRO_BATCH_SIZE": "8",
    "PPO_EPOCHS": "2", "BETA": "0.05", "REF_SYNC_STEPS": "6", "DYNAMIC_SAMPLING": "1",
    "DYNAMIC_SAMPLING_MAX_ROUNDS": "2", "LEARNING_RATE": "3e-4", "WEIGHT_DECAY": "0.01",
    "EVAL_EVERY_STEPS": "6", "EVAL_PROMPTS": "16", "SAVE_EVERY_STEPS": "1",
}  # fmt: skip
TIMES = ("time/", "throughput/", "memory/", "mfu")


def records(out: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(TIMES)}
        for line in lines
    ]


def arrays(out: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, read by orbax alone."""
    folder = out / "checkpoints" / str(step) / "arrays"
    reader = ocp.PyTreeCheckpointer()
    saved = reader.metadata(folder).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
    leaves = jax.tree.leaves_with_path(reader.restore(folder, restore_args=as_numpy))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_same_run(a: Path, b: Path, tolerance: float = 0) -> None:
    """Same parameters, optimizer state, reference and metrics: to the bit, or to a tolerance."""
    ours, theirs = arrays(a), arrays(b)
    assert ours.keys() == theirs.keys()
    assert {"['state']['params']['embed']", "['ref_params']['embed']"} <= ours.keys()
    for name in ours:
        if tolerance:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance)
        else:
            assert ours[name].tobytes() == theirs[name].tobytes(), name
    logged = records(a), records(b)
    assert [r["step"] for r in logged[0]] == [r["step"] for r in logged[1]]
    if not tolerance:
        assert logged[0] == logged[1]
        assert (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()


def one(out: Path, devices: int = 1, **env: str) -> subprocess.Popen:
    return start(out, SETTINGS | env, devices)


def wait_for(process: subprocess.Popen, words: str) -> None:
    for line in process.stdout:
        if re.search(words, line):
            return


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(out: Path) -> Path:
    result = finish(one(out / "undisturbed"), out / "undisturbed")
    assert result.code == 0, result.errors
    return out / "undisturbed"


def logged_steps(folder: Path) -> list[dict]:
    names = "train-other/"
    steps = [r for r in records(folder) if f"{names}loss" in r]
    return [{name.removeprefix(names): value for name, value in r.items()} for r in steps]


# ---- Killed and stopped --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_killed_at_twenty_moments_ends_as_the_undisturbed_one(out, undisturbed) -> None:
    folder, rng, kills = out / "killed", random.Random(0), 0
    moments = ["start"] * 4 + ["step"] * 10 + ["save"] * 6
    rng.shuffle(moments)
    while kills < 20:
        process = one(folder)
        moment = moments[kills]
        if moment == "start":
            time.sleep(rng.uniform(0.1, 4.0))
        else:
            wait_for(process, r"^step=\d+ ")
            if moment == "step":  # in the rollout or the update of the next one
                time.sleep(rng.uniform(0.0, 0.5))
            else:  # while a checkpoint is half-written
                deadline = time.monotonic() + 2
                while time.monotonic() < deadline:
                    if [*(folder / "checkpoints").glob("*orbax-checkpoint-tmp*")]:
                        break
        if process.poll() is not None:
            break  # it is through: too few moments were left for twenty kills
        process.kill()
        process.communicate()
        kills += 1
    assert kills == 20, f"only {kills}"
    result = finish(one(folder), folder)
    assert result.code == 0, result.errors
    assert "resumed after step" in result.lines
    assert_same_run(folder, undisturbed)


@pytest.mark.slow
def test_sigterm_saves_and_says_so_and_the_run_goes_on_from_there(out, undisturbed) -> None:
    folder, saved = out / "stopped", -1
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGTERM]
    for i, number in enumerate(numbers):
        process = one(folder, SAVE_EVERY_STEPS="1000")
        wait_for(process, r"^step=\d+ ")
        time.sleep(0.1 * i)
        process.send_signal(number)
        sent = time.monotonic()
        result = finish(process, folder)
        assert time.monotonic() - sent < 30
        assert result.code == 128 + number, result.errors
        done = re.search(r"^STOPPED: (\w+) steps=(\d+) saved_step=(\d+)$", result.lines, re.M)
        assert done[1] == number.name and done[2] == done[3] and int(done[3]) > saved
        saved = int(done[3])
    assert finish(one(folder), folder).code == 0
    assert_same_run(folder, undisturbed)


def test_a_signal_before_the_first_step_ends_the_run_at_once(out: Path) -> None:
    process = one(out / "early")
    wait_for(process, "^backend=")
    process.send_signal(signal.SIGTERM)
    result = finish(process, out / "early")
    assert result.code == 143
    assert "SIGTERM: stopped before the first step" in result.lines


def test_a_signal_in_the_middle_of_a_compilation_ends_the_run_within_its_grace(out: Path) -> None:
    folder, cold = out / "compiling", {"JAX_COMPILATION_CACHE_DIR": str(out / "cold")}
    once = {"DYNAMIC_SAMPLING": "0", "DYNAMIC_SAMPLING_MAX_ROUNDS": "4", "EVAL_EVERY_STEPS": "0"}
    process = one(folder, PREEMPTION_GRACE_S="2", **once, **cold)
    while not (folder / "completions.jsonl").exists():  # rewarded: next the update is compiled
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    result = finish(process, folder)
    assert time.monotonic() - sent < 2.5
    assert result.code == 143
    assert "PREEMPTION_GRACE_S=2 seconds are over; nothing more is saved" in result.errors


# ---- Other devices and processes -----------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_devices_and_with_more_processes(out, undisturbed) -> None:
    folder = out / "moved"
    for devices, mesh in ((8, "1,8,1"), (4, "1,2,2")):
        process = one(folder, devices, MESH_SHAPE=mesh, SAVE_EVERY_STEPS="1000")
        wait_for(process, r"^step=[25] ")
        process.send_signal(signal.SIGTERM)
        assert finish(process, folder).code == 143
    outs = [folder, out / "moved1"]
    both = SETTINGS | {"BATCH_SIZE": "2", "TRAIN_MICRO_BATCH_SIZE": "4"}
    results = [finish(p, o) for p, o in zip(start_two(outs, 1, **both), outs, strict=True)]
    for result in results:
        assert result.code == 0, result.errors
        assert re.search("^resumed after step ", result.lines, re.M)
    # The same prompts, tokens and rewards until rounding decides a token otherwise.
    names = ("train-reward/total/mean", "dynamic_sampling/rounds", "train-seq_len/prompt/mean")
    ours, theirs = logged_steps(folder), logged_steps(undisturbed)
    assert len(ours) == len(theirs) == STEPS
    for a, b in zip(ours, theirs, strict=True):
        assert a["step"] == b["step"]
        for name in names:
            assert math.isclose(a[name], b[name], rel_tol=1e-5), (a["step"], name)
    assert_same_run(folder, undisturbed, tolerance=1e-5)


@pytest.mark.slow
def test_two_processes_stop_together_and_go_on_together(out: Path) -> None:
    each = {"BATCH_SIZE": "2", "TRAIN_MICRO_BATCH_SIZE": "4", "STEPS": "10"}
    straight, folder = out / "two", out / "two_stopped"

    def launch(where: Path, **env: str) -> tuple[list[subprocess.Popen], list[Path]]:
        outs = [where, where.with_name(f"{where.name}_1")]
        return start_two(outs, 1, **SETTINGS | each | {"HEARTBEAT_TIMEOUT_S": "10"} | env), outs

    def ended(running: list[subprocess.Popen], outs: list[Path]) -> list[Result]:
        return [finish(process, o) for process, o in zip(running, outs, strict=True)]

    assert [result.code for result in ended(*launch(straight))] == [0, 0]

    running, outs = launch(folder, SAVE_EVERY_STEPS="1000")
    wait_for(running[1], r"^step=2 ")
    running[1].send_signal(signal.SIGTERM)  # to one of them alone
    results = ended(running, outs)
    assert [result.code for result in results] == [143, 143]
    stopped = [re.search(r"^STOPPED: SIGTERM .*$", r.lines, re.M)[0] for r in results]
    assert stopped[0] == stopped[1]
    assert re.search(r" steps=(\d+) saved_step=\1$", stopped[0]), "the last whole step is saved"

    running, outs = launch(folder)
    wait_for(running[0], r"^step=5 ")
    running[0].kill()
    assert all(result.code != 0 for result in ended(running, outs))

    assert [result.code for result in ended(*launch(folder))] == [0, 0]
    ours, theirs = arrays(folder, 10), arrays(straight, 10)
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes(), name
    assert records(folder) == records(straight)


# ---- Damaged and missing -------------------------------------------------------------------------


@pytest.fixture
def short(out: Path, tmp_path: Path) -> Path:
    """A run of three steps with a checkpoint of each, to be damaged."""
    source = out / "short"
    if not source.exists():
        settings = {"STEPS": "3", "SAVE_KEEP": "0", "EVAL_EVERY_STEPS": "0"}
        assert finish(one(source, **settings), source).code == 0
    shutil.copytree(source, tmp_path / "run")
    (tmp_path / "run" / "finished").unlink()
    return tmp_path / "run"


def test_a_damaged_newest_checkpoint_is_passed_over_in_a_real_run(out: Path, short: Path) -> None:
    (short / "checkpoints" / "3" / "arrays" / "manifest.ocdbt").write_bytes(b"")
    half = short / "checkpoints" / "4.orbax-checkpoint-tmp-17"
    half.mkdir()
    settings = {"STEPS": "3", "SAVE_KEEP": "0", "EVAL_EVERY_STEPS": "0"}
    result = finish(one(short, **settings), short)
    assert result.code == 0, result.errors
    assert f"checkpoint {half} is half-written and passed over" in result.lines
    assert re.search(
        r"^checkpoint \S+/checkpoints/3 is damaged and passed over: ", result.lines, re.M
    )
    assert "resumed after step 2 of 3" in result.lines
    ours, theirs = arrays(short, 3), arrays(out / "short", 3)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    assert records(short) == records(out / "short")
    kept = [*short.glob("earlier_*/3")]
    assert len(kept) == 1, "the damaged one is set aside, not deleted"


@pytest.mark.parametrize("size", [300_000, 2_000_000], ids=["before a save", "in its midst"])
def test_a_full_disk_under_checkpoints_costs_a_line_and_no_step(out: Path, size: int) -> None:
    folder = out / f"full{size}"
    limit = f"import resource, runpy, sys; limit = ({size}, {size}); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, limit); "
    program = (
        limit + "sys.argv = sys.argv[1:]; runpy.run_path('train_grpo.py', run_name='__main__')"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    env |= SETTINGS | {"STEPS": "3", "OUTPUT_DIR": str(folder), "JAX_PLATFORMS": "cpu"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(out / "cache"), "EVAL_EVERY_STEPS": "0"}
    repo = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", program, "train_grpo.py"], env=env, cwd=repo, text=True,
        capture_output=True, timeout=200,
    )  # fmt: skip
    lost = re.findall(
        r"^checkpoint of step (\d) cannot be written to \S+: File too large", done.stdout, re.M
    )
    assert lost == ["1", "2", "3"], done.stdout + done.stderr
    assert [r["step"] for r in records(folder)] == [0, 1, 2]
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr, "a library's thread has shown what our lines say"
    assert not [*folder.glob("checkpoints/*orbax-checkpoint-tmp*")]


# ---- Not finite ----------------------------------------------------------------------------------


def test_steps_that_are_not_finite_are_not_applied_and_end_the_run_after_the_limit(out) -> None:
    """A learning rate that throws the weights out of float32's range in its second step."""
    folder = out / "nan"
    settings = {"LEARNING_RATE": "1e38", "LR_SCHEDULE": "constant", "WARMUP_RATIO": "0"}
    settings |= {"PPO_EPOCHS": "1", "BETA": "0", "REF_SYNC_STEPS": "0", "DYNAMIC_SAMPLING": "0"}
    settings |= {"DYNAMIC_SAMPLING_MAX_ROUNDS": "4", "EVAL_EVERY_STEPS": "0", "SAVE_KEEP": "0"}
    result = finish(one(folder, **settings), folder)
    assert result.code == 1
    last = result.errors.strip().splitlines()[-1]
    assert re.fullmatch(
        r"error: step 3: loss is nan, for NONFINITE_LIMIT=3 steps in a row; their batches are "
        rf"{folder}/bad_step_N.npz. Lower LEARNING_RATE\?", last,
    ), last  # fmt: skip
    assert result.lines.count(": its update was not applied: loss is nan\n") == 3
    good, bad = arrays(folder, 1), arrays(folder, 3)
    assert all(good[name].tobytes() == bad[name].tobytes() for name in good)
    for step in (1, 2, 3):
        batch = np.load(folder / f"bad_step_{step}.npz", allow_pickle=False)
        assert batch["completion_ids"].shape[0] == batch["advantages"].shape[0] == 16
        assert batch["prompt_ids"].shape == batch["prompt_mask"].shape


COMPARED = """
    seed rollout_backend num_pre_q max_length_sample temperature top_k top_p min_p
    dynamic_sampling dynamic_sampling_max_rounds reward_weights reward_fn overlong_cache
    repetition_ngram ppo_epochs optimizer learning_rate lr_schedule warmup_ratio weight_decay
    clip_norm loss_type adv_estimator scale_rewards eps_low eps_high delta importance_sampling_level
    beta kl_estimator kl_bias_correction ref_sync_steps ref_sync_alpha entropy_coef
    top_entropy_quantile mask_truncated_completions is_mode is_cap
"""


def test_a_new_setting_has_to_be_sorted_into_those_that_change_results_or_do_not() -> None:
    settings = [field.name for field in dataclasses.fields(Config)]
    assert [name for name in settings if name not in FREE] == COMPARED.split()
    assert set(settings) > FREE


# ---- Going on ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_more_steps_continue_and_a_changed_setting_stops_with_its_name(out, short: Path) -> None:
    def run(**env: str) -> Result:
        settings = {"EVAL_EVERY_STEPS": "0", "SAVE_KEEP": "0", "STEPS": "3"}
        return finish(one(short, **settings | env), short)

    def refused(words: str, **env: str) -> None:
        result = run(**env)
        assert result.code == 2, result.lines
        last = result.errors.strip().splitlines()[-1]
        assert last.startswith("error: ") and words in last, last
        assert [r["step"] for r in records(short)] == [0, 1, 2], "nothing is lost"

    another = "the run after step 3 was another: "
    refused(f"{another}LEARNING_RATE was 0.0003 and is 1e-05", LEARNING_RATE="1e-5")
    refused(f"{another}NUM_PRE_Q was 4 and is 8", NUM_PRE_Q="8")
    refused("prompts per step was 4 and is 8", BATCH_SIZE="8")
    refused("LR_DECAY_STEPS (else STEPS) was 3 and is 4", STEPS="4")
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
    assert "RESUME_FORCE=1: the run after step 4 was another: SEED was 0" in result.lines


@pytest.mark.slow
def test_resume_may_name_a_checkpoint_or_begin_anew_and_loses_nothing(out, short: Path) -> None:
    settings = {"EVAL_EVERY_STEPS": "0", "SAVE_KEEP": "0", "STEPS": "3"}

    def run(folder: Path, **env: str) -> Result:
        return finish(one(folder, **settings | env), folder)

    result = run(short, RESUME=str(short / "checkpoints" / "2"))
    assert result.code == 0 and "resumed after step 2 of 3" in result.lines
    assert len([*short.glob("earlier_*/3")]) == 1
    assert records(short) == records(out / "short")

    other = short.with_name("other")
    process = one(other, **settings | {"RESUME": str(short), "STEPS": "5", "LR_DECAY_STEPS": "3"})
    wait_for(process, "^step=3 ")
    process.kill()
    process.communicate()
    result = run(other, STEPS="5", LR_DECAY_STEPS="3")
    assert result.code == 0 and "resumed after step" in result.lines, result.errors
    assert [r["step"] for r in records(other)] == [3, 4]

    result = run(short, RESUME="never")
    assert result.code == 0 and "resumed" not in result.lines
    assert [r["step"] for r in records(short)] == [0, 1, 2]
    aside = [f.name for f in short.glob("earlier_*/*")]
    assert {"1", "2", "3", "metrics.jsonl", "samples.jsonl", "hf"} <= {*aside}
    process = one(short, **settings | {"RESUME": "never"})
    wait_for(process, "^step=0 ")
    process.kill()
    process.communicate()
    result = run(short)
    assert "are done" not in result.lines and "step=2 " in result.lines, "it was not finished"
    result = run(short, RESUME=str(short / "nowhere"))
    assert result.code == 2
    assert f"RESUME={short}/nowhere is no folder of a whole checkpoint" in result.errors
