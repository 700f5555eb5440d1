"""A run that was killed, stopped or moved ends like an undisturbed run; how bad steps end a run."""

import random
import re
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from runs import (
    DEMANDING,
    OLDER_EMITTERS,
    Process,
    Result,
    assert_same_run,
    checkpoint_arrays,
    environment,
    finish,
    metric_records,
    start_run,
    start_two,
    wait_for,
)

# Each of two processes has half of the prompts, and one device.
HALF = environment("BATCH_SIZE=2 TRAIN_MICRO_BATCH_SIZE=4")
HALF["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=1 {OLDER_EMITTERS}"


def start_both(folder: Path, **env: str) -> list[Process]:
    """Two processes of one run, whose OUTPUT_DIR is the folder."""
    outs = [folder, folder.with_name(f"{folder.name}_1")]
    return start_two(outs, 1, **DEMANDING | HALF | env)


def finish_both(running: list[Process], folder: Path) -> list[Result]:
    return [finish(process, folder) for process in running]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(out: Path) -> Path:
    result = finish(start_run(out / "undisturbed"), out / "undisturbed")
    assert result.code == 0, result.errors
    return out / "undisturbed"


# ---- Killed and stopped --------------------------------------------------------------------------


def latest_checkpoint(folder: Path) -> int:
    """The step of the newest complete checkpoint, or -1."""
    names = [path.name for path in (folder / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=-1)


def wait_for_a_checkpoint_after(step: int, folder: Path, process: Process) -> None:
    while latest_checkpoint(folder) <= step and process.poll() is None:
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_killed_10_times_ends_like_the_undisturbed_run(out, undisturbed) -> None:
    """It is killed while it starts, in a step, and as soon as another checkpoint is complete. Each
    kill of the last kind brings it on by a step or more."""
    folder, rng = out / "killed", random.Random(0)
    moments = ["start"] * 2 + ["step"] * 4 + ["saved"] * 4
    rng.shuffle(moments)
    for number, moment in enumerate(moments, start=1):
        saved = latest_checkpoint(folder)
        process = start_run(folder, SAVE_EVERY_STEPS="1000" if moment == "step" else "1")
        if moment == "start":
            time.sleep(rng.uniform(0.1, 3.0))
        else:
            wait_for(process, r"^step=\d+ ")
        if moment == "step":  # in the rollout or the update of the next step
            time.sleep(rng.uniform(0.0, 0.5))
        if moment == "saved":
            wait_for_a_checkpoint_after(saved, folder, process)
        assert process.poll() is None, f"the run has ended before kill {number}"
        process.kill()
        process.communicate()
    result = finish(start_run(folder), folder)
    assert result.code == 0, result.errors
    assert "resumed after step" in result.lines
    assert_same_run(folder, undisturbed)


@pytest.mark.slow
def test_a_signal_saves_a_checkpoint_from_which_the_run_goes_on(out, undisturbed) -> None:
    folder, saved = out / "stopped", -1
    for i, number in enumerate((signal.SIGTERM, signal.SIGINT)):
        process = start_run(folder, SAVE_EVERY_STEPS="1000")
        wait_for(process, r"^step=\d+ ")
        time.sleep(0.2 * i)
        process.send_signal(number)
        sent = time.monotonic()
        result = finish(process, folder)
        assert time.monotonic() - sent < 30
        assert result.code == 128 + number, result.errors
        done = re.search(r"^STOPPED: (\w+) steps=(\d+) saved_step=(\d+)$", result.lines, re.M)
        assert done[1] == number.name and done[2] == done[3] and int(done[3]) > saved
        saved = int(done[3])
    assert finish(start_run(folder), folder).code == 0
    assert_same_run(folder, undisturbed)


def test_a_signal_before_the_first_step_ends_the_run_at_once_without_a_traceback(out: Path) -> None:
    process = start_run(out / "early")
    wait_for(process, "^backend=")
    process.send_signal(signal.SIGINT)
    result = finish(process, out / "early")
    assert (result.code, result.errors) == (-signal.SIGINT, "")  # a shell calls this 130


# ---- Other devices and processes -----------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_devices_and_with_more_processes(out: Path) -> None:
    """The run is short, because rounding changes a sampled token now and then."""
    folder, straight, six = out / "moved", out / "straight", {"STEPS": "6"}
    assert finish(start_run(straight, **six), straight).code == 0
    for devices, mesh in ((8, "1,8,1"), (4, "1,2,2")):
        process = start_run(folder, devices, MESH_SHAPE=mesh, SAVE_EVERY_STEPS="1000", **six)
        wait_for(process, r"^step=[02] ")
        process.send_signal(signal.SIGTERM)
        assert finish(process, folder).code == 143
    for result in finish_both(start_both(folder, **six), folder):
        assert result.code == 0, result.errors
        assert re.search("^resumed after step ", result.lines, re.M)
    # The tokens are equal, or the weights would differ more. They differ because of 24 updates of
    # Adam, which divides the rounding of small gradients by their size.
    assert_same_run(folder, straight, tolerance=5e-5, steps=6)


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both_and_they_go_on_to_the_same_bits(out) -> None:
    straight, folder = out / "two", out / "two_stopped"
    results = finish_both(start_both(straight, STEPS="6"), straight)
    assert [result.code for result in results] == [0, 0]
    running = start_both(folder, STEPS="6", SAVE_EVERY_STEPS="1000")
    wait_for(running[1], r"^step=1 ")
    running[1].send_signal(signal.SIGTERM)
    results = finish_both(running, folder)
    assert [result.code for result in results] == [143, 143]
    stopped = [re.search(r"^STOPPED: SIGTERM .*$", r.lines, re.M)[0] for r in results]
    assert stopped[0] == stopped[1]
    assert re.search(r" steps=(\d+) saved_step=\1$", stopped[0]), "the last complete step is saved"
    results = finish_both(start_both(folder, STEPS="6"), folder)
    assert [result.code for result in results] == [0, 0]
    assert_same_run(folder, straight, steps=6)


# ---- A disk that refuses -------------------------------------------------------------------------


def limit_files(process: Process, size: int) -> None:
    """From now on the process cannot write a file of more bytes."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_disk_that_refuses_a_checkpoint_ends_the_run_and_the_same_command_goes_on(out) -> None:
    """The newest checkpoint stays, and no more is lost than the steps after it."""
    folder, env = out / "refused", environment("STEPS=6 EVAL_EVERY_STEPS=0 SAVE_KEEP=0")
    process = start_run(folder, **env)
    wait_for_a_checkpoint_after(0, folder, process)
    limit_files(process, 200_000)
    result = finish(process, folder)
    assert result.code == 1
    [last] = re.findall("^error: .*$", result.errors, re.M)
    told = rf"checkpoint of step (.) cannot be written to {folder}/checkpoints: File too large"
    refused, newest = re.fullmatch(rf"error: {told}; step (.) stays the newest", last).groups()
    assert int(refused) == int(newest) + 1 >= 2
    again = finish(start_run(folder, **env), folder)
    assert again.code == 0, again.errors
    assert f"resumed after step {newest} of 6" in again.lines
    assert [r["step"] for r in metric_records(folder)] == [*range(6)]


@pytest.mark.slow
@pytest.mark.parametrize("strike, struck", [("kill", 0), ("freeze", 1), ("refuse", 1)])
def test_if_one_of_two_processes_is_killed_frozen_or_cannot_write_both_end_and_go_on_together(
    out: Path, strike: str, struck: int
) -> None:
    """The connections of a frozen process stay open, but it sends no heartbeats."""
    folder, env = out / f"two_{strike}{struck}", environment("STEPS=6 EVAL_EVERY_STEPS=0")
    running = start_both(folder, **env)
    wait_for(running[struck], r"^step=1 ")
    wait_for_a_checkpoint_after(0, folder, running[0])
    began = time.monotonic()
    if strike == "refuse":
        limit_files(running[struck], 100_000)
        ended = finish(running[struck], folder)
        assert ended.code == 1, ended.errors
        told = "^error: checkpoint of step . cannot be written to .*: File too large; "
        assert re.search(told, ended.errors, re.M)  # threads of orbax may print after it
    else:
        running[struck].send_signal(signal.SIGKILL if strike == "kill" else signal.SIGSTOP)
    other = finish(running[1 - struck], folder)
    assert time.monotonic() - began < 120
    told = "error: another process is gone|another task died"
    assert re.search(told, other.errors), other.errors  # a line of ours or of jax
    assert other.code == -signal.SIGABRT or (other.code == 1 and "Traceback" not in other.errors)
    if strike != "refuse":
        running[struck].kill()
        running[struck].communicate()
    again = finish_both(start_both(folder, **env), folder)
    assert [result.code for result in again] == [0, 0], again[0].errors
    assert [r["step"] for r in metric_records(folder)] == [*range(6)]


# ---- Steps that are not finite -------------------------------------------------------------------


def test_steps_that_are_not_finite_are_not_applied_and_end_the_run_after_the_limit(out) -> None:
    """With this learning rate the weights leave the range of float32 in the first update.

    The second update of step 0 and the first updates of steps 1 and 2 are not finite.
    """
    folder = out / "nan"
    settings = environment(
        """LEARNING_RATE=1e38 LR_SCHEDULE=constant WARMUP_RATIO=0 BETA=0
        NUM_MINI_BATCHES=1 DYNAMIC_SAMPLING=0 DYNAMIC_SAMPLING_MAX_ROUNDS=4 EVAL_EVERY_STEPS=0
        SAVE_KEEP=0"""
    )
    result = finish(start_run(folder, **settings), folder)
    assert result.code == 1
    last = result.errors.strip().splitlines()[-1]
    assert last == (
        f"error: step 2: loss is nan, the last of 3 such steps in a row; their batches are "
        f"{folder}/bad_step_N.npz. Lower LEARNING_RATE?"
    )
    told = re.findall("update (.) of this step was not applied: loss is nan\n", result.lines)
    assert told == ["2", "1", "1"]
    good, bad = checkpoint_arrays(folder, 1), checkpoint_arrays(folder, 2)
    assert all(good[name].tobytes() == bad[name].tobytes() for name in good)
    for step in (0, 1, 2):
        batch = np.load(folder / f"bad_step_{step}.npz", allow_pickle=False)
        assert batch["completion_ids"].shape[0] == batch["advantages"].shape[0] == 16
        assert ("old_logps" in batch) == (step == 0), "the ratios of a second update need them"
