"""A run that was killed, stopped or moved ends like an undisturbed run; how bad steps end a run."""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import Popen

import numpy as np
import pytest
from runs import (
    DEMANDING,
    OLDER_EMITTERS,
    REPO,
    Result,
    assert_same_run,
    checkpoint_arrays,
    copy_at_call,
    environment,
    finish,
    latest_checkpoint,
    run_here,
    start_run,
    start_two,
    wait_for,
)
from safetensors.numpy import load_file, save_file

import train_grpo

# Each of two processes has half of the prompts, and one device.
HALF = environment("BATCH_SIZE=2 TRAIN_MICRO_BATCH_SIZE=4")
HALF["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=1 {OLDER_EMITTERS}"


def start_both(folder: Path, **env: str) -> list[Popen]:
    """Two processes of one run, whose OUTPUT_DIR is the folder."""
    outs = [folder, folder.with_name(f"{folder.name}_1")]
    return start_two(outs, 1, **DEMANDING | HALF | env)


def finish_both(running: list[Popen], folder: Path) -> list[Result]:
    return [finish(process, folder) for process in running]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


# ---- Killed and stopped --------------------------------------------------------------------------


def wait_for_a_checkpoint_after(step: int, folder: Path, process: Popen) -> None:
    while latest_checkpoint(folder) <= step and process.poll() is None:
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_that_is_killed_and_stopped_ends_like_the_undisturbed_run(out: Path) -> None:
    """It is killed while it starts, in a step before its first checkpoint, and as soon as this is
    complete. A signal saves a checkpoint of the last complete step."""
    folder, rng = out / "disturbed", random.Random(0)
    for moment in ("start", "step", "saved", signal.SIGHUP, signal.SIGTERM):
        saved = latest_checkpoint(folder)
        process = start_run(folder, SAVE_EVERY_STEPS="1" if moment == "saved" else "1000")
        if moment == "start":
            time.sleep(rng.uniform(0.1, 3.0))
        else:
            wait_for(process, r"^step=\d+ ")
        if moment == "saved":
            wait_for_a_checkpoint_after(saved, folder, process)
        else:  # in the rollout or the update of the next step
            time.sleep(rng.uniform(0.0, 0.3))
        assert process.poll() is None, f"the run has ended before {moment}"
        if not isinstance(moment, signal.Signals):
            process.kill()
            process.communicate()
            continue
        process.send_signal(moment)
        result = finish(process, folder)
        assert result.code == 128 + moment, result.errors
        done = re.search(r"^STOPPED: (\w+) steps=(\d+) saved_step=(\d+)$", result.lines, re.M)
        assert done[1] == moment.name and done[2] == done[3] and int(done[3]) > saved
    results = [finish(start_run(x), x) for x in (folder, out / "undisturbed")]
    assert [result.code for result in results] == [0, 0], [result.errors for result in results]
    assert "\nresumed after " in results[0].lines
    assert_same_run(folder, out / "undisturbed")


@pytest.mark.slow
def test_adapters_that_play_in_turns_end_like_an_undisturbed_run_if_they_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill in the third step leaves is copied."""
    game = f"ENVIRONMENT_CLASS={Path(__file__).parent}/games.py:Chance MAX_TURNS=2"
    env = DEMANDING | environment(f"{game} MAX_LENGTH_SAMPLE=64 LORA_RANK=4 LEARNING_RATE=3e-3")
    env |= environment("STEPS=4 EVAL_EVERY_STEPS=0 REWARD_FN= REWARD_WEIGHTS=")
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    with monkeypatch.context() as patch:
        copy_at_call(patch, train_grpo, "update_policy", 3, undisturbed, 2, killed)
        assert run_here(undisturbed, train_grpo, env).code == 0
    result = run_here(killed, train_grpo, env)
    assert result.code == 0 and "\nresumed after 2 of 4 steps" in result.lines
    assert_same_run(killed, undisturbed, 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_the_first_step_ends_the_run_at_once_without_a_traceback(
    out: Path, number: signal.Signals
) -> None:
    process = start_run(out / "early")
    wait_for(process, "^backend=")
    process.send_signal(number)
    result = finish(process, out / "early")
    assert (result.code, result.errors) == (-number, "")  # a shell calls this 130 or 129


def test_a_run_in_the_background_of_a_script_ignores_ctrl_c_from_the_start(tmp_path: Path) -> None:
    """Here it arrives while jax is imported."""
    (tmp_path / "jax.py").write_text("import os; os.kill(os.getpid(), 2); os._exit(7)")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    for script in ("train_grpo.py", "train_sft.py"):
        command = ["sh", "-c", f"{sys.executable} {REPO}/{script} & wait $!"]
        assert subprocess.run(command, cwd=tmp_path, env=env, capture_output=True).returncode == 7


# ---- Two processes -------------------------------------------------------------------------------


@pytest.mark.slow
def test_if_one_of_two_processes_is_struck_both_end_and_go_on_together_to_the_same_bits(
    out: Path,
) -> None:
    """One after the other, a process is killed, frozen, cannot write, and gets SIGTERM. The
    connections of a frozen process stay open, but it sends no heartbeats. While the other one waits
    for them, the undisturbed run takes place."""
    straight, folder = out / "two", out / "two_struck"
    env = environment("EVAL_EVERY_STEPS=0 PPO_EPOCHS=1 DYNAMIC_SAMPLING=0 BETA=0")
    for strike, struck in (("kill", 0), ("freeze", 1), ("refuse", 1), ("stop", 1)):
        saved = latest_checkpoint(folder)
        running = start_both(folder, **env)
        wait_for(running[struck], r"^step=\d+ ")
        wait_for_a_checkpoint_after(saved, folder, running[0])
        began = time.monotonic()
        if strike == "refuse":
            pid, most = running[struck].pid, (100_000, resource.RLIM_INFINITY)  # bytes of a file
            resource.prlimit(pid, resource.RLIMIT_FSIZE, most)
            ended = finish(running[struck], folder)
            assert ended.code == 1, ended.errors
            told = "^error: checkpoint of step . cannot be written to .*: File too large; "
            assert re.search(told, ended.errors, re.M)
        numbers = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "stop": signal.SIGTERM}
        if strike in numbers:
            running[struck].send_signal(numbers[strike])
        if strike == "freeze":
            undisturbed = finish_both(start_both(straight, **env), straight)
            assert [result.code for result in undisturbed] == [0, 0], undisturbed[0].errors
            began = time.monotonic()  # the frozen process is missed after 30 silent seconds
        other = finish(running[1 - struck], folder)
        assert time.monotonic() - began < 120
        if strike in ("kill", "freeze"):
            running[struck].kill()
            running[struck].communicate()
        if strike == "stop":
            ended = finish(running[struck], folder)
            assert ended.code == other.code == 143
            lines = [re.search(r"^STOPPED: SIGTERM .*$", r.lines, re.M)[0] for r in (ended, other)]
            assert lines[0] == lines[1]
            assert re.search(r" steps=(\d+) saved_step=\1$", lines[0]), "the last step is saved"
        else:
            told = "error: another process is gone|another task died"  # a line of ours or of jax
            assert re.search(told, other.errors), other.errors
            by_jax = other.code == -signal.SIGABRT
            assert by_jax or (other.code == 1 and "Traceback" not in other.errors)
    results = finish_both(start_both(folder, **env), folder)
    assert [result.code for result in results] == [0, 0], results[0].errors
    assert re.search("^resumed after ", results[0].lines, re.M)
    assert_same_run(folder, straight)


# ---- Steps that are not finite -------------------------------------------------------------------


def test_steps_that_are_not_finite_are_not_applied_and_end_the_run_after_the_limit(out) -> None:
    """With this learning rate the weights leave the range of float32 in the first update."""
    folder = out / "nan"
    settings = environment(
        """LEARNING_RATE=1e39 LR_SCHEDULE=constant WARMUP_RATIO=0 BETA=0
        NUM_MINI_BATCHES=1 DYNAMIC_SAMPLING=0 DYNAMIC_SAMPLING_MAX_ROUNDS=4 EVAL_EVERY_STEPS=0
        SAVE_KEEP=0"""
    )
    result = finish(start_run(folder, **settings), folder)
    assert result.code == 1
    last = result.errors.strip().splitlines()[-1]
    assert last == (
        "error: step 2: param_norm is inf, the last of 3 such steps in a row. Lower LEARNING_RATE?"
    )
    assert result.lines.splitlines()[-1].startswith("verdict: non_finite_steps: ")
    told = re.findall("update (.) of this step was not applied: param_norm is inf\n", result.lines)
    assert told == ["1", "1", "1"]
    good, bad = checkpoint_arrays(folder, 1), checkpoint_arrays(folder, 2)
    assert all(good[name].tobytes() == bad[name].tobytes() for name in good)


def test_weights_that_are_not_finite_end_the_run_with_a_line_that_names_them(out: Path) -> None:
    """They sample equal nonsense, whose equal rewards are no cause."""
    model = out / "model"
    shutil.copytree(REPO / "tiny", model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    settings = environment("BETA=0 NUM_MINI_BATCHES=1 DYNAMIC_SAMPLING=0 EVAL_EVERY_STEPS=0")
    result = finish(start_run(out / "run", MODEL_PATH=str(model), **settings), out / "run")
    assert result.code == 1 and "Traceback" not in result.errors
    last = result.errors.strip().splitlines()[-1]
    assert last == (
        "error: step 2: loss is nan, the last of 3 such steps in a row. Are the weights of "
        "MODEL_PATH finite?"
    )
    assert "equal" not in result.lines and "differ by" not in result.lines
