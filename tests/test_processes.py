"""runtime/processes.py: two processes run only if they run the same, and they end together."""

import datetime
import errno
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import sys
import time
import types
from pathlib import Path

import pytest
from forked import Process
from test_train import REPO, Result, copy_repository, few_examples, finish, start, start_two

from runtime import processes, resume
from runtime.mistakes import UserMistake


def run_two(
    out: Path, *each: dict[str, str], repos: tuple[Path, Path] = (REPO, REPO), **env: str
) -> list[Result]:
    outs = [out / str(i) for i in range(2)]
    running = start_two(outs, 1, *each, repos=repos, EVAL_EVERY_STEPS="0", **env)
    return [finish(process, o) for process, o in zip(running, outs, strict=True)]


def wait_for(process: Process, words: str) -> None:
    """Reads the lines of a process up to a line that begins with these words."""
    next(line for line in process.stdout if line.startswith(words))


def last_error(result: Result) -> str:
    return [line for line in result.errors.splitlines() if line.startswith("error: ")][-1]


def test_processes_with_different_settings_or_data_stop_and_name_the_differences(
    tmp_path: Path,
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "1+1?", "answer": "#### 2"}\n' * 10)
    each = ({"SEED": "1"}, {"SEED": "2", "DATASET": str(other), "HEARTBEAT_TIMEOUT_S": "11"})
    results = run_two(tmp_path, *each)
    for result in results:
        assert result.code == 2
        error = last_error(result)
        assert "error: the processes would not run the same: " in error
        assert "SEED is 1 on process 0, 2 on process 1" in error
        assert f"DATASET is {few_examples()} on process 0, " in error
        assert "the tokenized prompts is " in error
        assert "HEARTBEAT" not in error and "Traceback" not in result.errors


def test_processes_with_different_code_in_any_room_stop_and_name_the_files(
    tmp_path: Path,
) -> None:
    repo = copy_repository(tmp_path / "copy")
    for name in ("models/model.py", "runtime/layout.py"):
        with open(repo / name, "a") as file:
            file.write("# another version\n")
    for result in run_two(tmp_path, repos=(REPO, repo)):
        assert result.code == 2
        error = last_error(result)
        files = r"models/model\.py is {0} on process 1, runtime/layout\.py is {0} on process 1$"
        files = files.format(r"\w{12} on process 0, \w{12}")
        assert re.search(f"would not run the same: {files}", error), error


def test_the_compared_code_is_that_of_every_folder_and_not_of_a_virtual_environment(
    tmp_path: Path, monkeypatch
) -> None:
    repo = tmp_path / "repo"
    compared = {"__script__": "script.py", "new": "new/__init__.py", "new.a": "new/a.py"}
    compared |= {"bare.deep.b": "bare/deep/b.py", "plain": "plain.py"}
    others = {"lib.c": ".venv/lib/python3/site-packages/lib/c.py", "other": "../other/loss.py"}
    others |= {"site": "venv/site.py"}
    for name, path in (compared | others).items():
        file = repo / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
        module = types.ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)
    digests = {path: hashlib.sha256(name.encode()).hexdigest() for name, path in compared.items()}
    assert processes.code_facts(repo) == {path: digests[path][:12] for path in sorted(digests)}


def test_all_processes_report_a_mistake_of_one_process(tmp_path: Path) -> None:
    results = run_two(tmp_path, {}, {"DATASET": "nowhere.jsonl"})
    assert [result.code for result in results] == [2, 2]
    assert last_error(results[0]) == "error: process 1: DATASET=nowhere.jsonl: no such file"
    assert last_error(results[1]) == "error: DATASET=nowhere.jsonl: no such file"


def test_a_run_stops_if_more_or_fewer_processes_join_than_the_settings_require(
    tmp_path: Path,
) -> None:
    for result in run_two(tmp_path, REQUIRE_JAX_PROCESS_COUNT="3"):
        assert result.code == 2
        assert last_error(result) == "error: REQUIRE_JAX_PROCESS_COUNT=3, and 2 joined"
    for result in run_two(tmp_path, {}, {"REQUIRE_MULTIHOST": "1"}, STEPS="0"):
        assert result.code == 2 and "REQUIRE_MULTIHOST is False on process 0" in last_error(result)


def test_a_process_that_dies_between_steps_ends_the_other_process(tmp_path: Path) -> None:
    outs = [tmp_path / str(i) for i in range(2)]
    both = {"STEPS": "5000", "BATCH_SIZE": "2", "HEARTBEAT_TIMEOUT_S": "10"}
    running = start_two(outs, 1, **both)
    for line in running[1].stdout:
        if line.startswith("step=1 "):
            break
    running[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    survivor, dead = (finish(p, o) for p, o in zip(running, outs, strict=True))
    assert time.monotonic() - killed < 40
    assert dead.code == -signal.SIGKILL
    assert survivor.code in (1, -signal.SIGABRT)
    told = ("error: another process is gone", "another task died")  # our line, or a line of jax
    assert any(words in survivor.errors for words in told), survivor.errors
    assert survivor.code != 1 or "Traceback" not in survivor.errors


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_process_ends_the_other_process_too(tmp_path: Path, frozen: int) -> None:
    """The connections of a frozen process stay open, but it sends no heartbeats."""
    outs = [tmp_path / str(i) for i in range(2)]
    both = {"STEPS": "5000", "BATCH_SIZE": "2", "HEARTBEAT_TIMEOUT_S": "10"}
    running = start_two(outs, 1, **both)
    wait_for(running[frozen], "step=1 ")
    running[frozen].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    other = finish(running[1 - frozen], outs[1 - frozen])
    running[frozen].kill()
    running[frozen].communicate()
    assert time.monotonic() - stopped < 40
    assert other.code in (1, -signal.SIGABRT)
    assert "another process is gone" in other.errors or "another task died" in other.errors


def test_each_difference_from_process_0_is_named_once() -> None:
    everyone = [{"a": "1", "b": "x"}, {"a": "1", "b": "x"}, {"a": "2", "c": "z"}, {"a": "3"}]
    assert processes.differences(everyone) == [
        "a is 1 on process 0, 2 on process 2",
        "b is x on process 0, missing on process 2",
        "c is missing on process 0, z on process 2",
    ]
    assert processes.differences([{"a": "1"}] * 4) == []


@pytest.mark.parametrize(
    "error, lost",
    [
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (RuntimeError("NCCL operation ncclAllReduce() failed: remote process exited"), True),
        (RuntimeError("UNAVAILABLE: Task 1 heartbeat timeout."), True),
        (
            RuntimeError("UNAVAILABLE: while calling /xla.coordination.CoordinationService/Get"),
            True,
        ),
        (UserMistake("DATASET=heartbeat.jsonl: no such file"), False),
        (KeyError("gloo"), False),
    ],
)
def test_the_error_after_the_end_of_another_process_is_not_taken_for_a_mistake(
    error: Exception, lost: bool
) -> None:
    assert processes.lost_contact(error) is lost


def test_a_process_number_must_be_below_the_number_of_processes(monkeypatch) -> None:
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    for name, value in zip(names, ("127.0.0.1:1", "2", "2"), strict=True):
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(UserMistake, match="JAX_PROCESS_ID .from 0, below it"):
        processes.join(init_timeout_s=1, heartbeat_timeout_s=10)


@pytest.mark.parametrize(
    "files, tpu",
    [
        ({}, False),
        ({"vendor": "0x1ae0\n", "class": "0x120000\n"}, True),
        ({"vendor": "0x1ae0\n"}, True),
        ({"vendor": "0x8086\n", "class": "0x120000\n"}, False),
        ({"vendor": "0x10de\n", "class": "0x030200\n"}, False),  # a GPU, which can be in /dev/vfio
        ({"vendor": "0x1ae0\n", "class": "0x020000\n"}, False),  # a network card of Google
        ({"vendor": "0x1ae0\n", "class": "0x010802\n"}, False),  # a disk of Google
    ],
)
def test_a_tpu_is_a_device_of_google_that_is_no_disk_and_no_network_card(
    tmp_path, files, tpu: bool
) -> None:
    device = tmp_path / "0000:00:05.0"
    device.mkdir()
    for name, text in files.items():
        (device / name).write_text(text)
    assert processes.has_tpu(tmp_path) is tpu
    assert processes.has_tpu(tmp_path / "none") is False


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_tasks_that_do_not_know_of_each_other_print_what_to_set(
    monkeypatch, capsys, name: str
) -> None:
    for other in ("JAX_COORDINATOR_ADDRESS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for count in ("", "1"):
        monkeypatch.setenv(name, count)
        processes.join(init_timeout_s=1, heartbeat_timeout_s=10)
        assert capsys.readouterr().out == ""
    monkeypatch.setenv(name, "4")
    processes.join(init_timeout_s=1, heartbeat_timeout_s=10)
    assert capsys.readouterr().out == (
        f"{name}=4, but JAX_COORDINATOR_ADDRESS is not set: each of the 4 tasks trains alone. For "
        "one run of all tasks set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; "
        "REQUIRE_MULTIHOST=1 makes this an error\n"
    )


@pytest.mark.parametrize("error", [ValueError("bug"), KeyError("bug"), OSError(32, "bug")])
def test_an_error_that_is_no_mistake_of_the_user_is_not_gathered(error: Exception) -> None:
    """numpy, jax and zip raise ValueErrors; an OSError without a file is no wrong path."""

    def buggy() -> None:
        raise error

    mistakes: list[str] = []
    with pytest.raises(type(error)) as raised:
        processes.tried(mistakes, buggy)
    assert raised.value is error and mistakes == []
    with pytest.raises(type(error)) as raised, processes.told_by_all():
        buggy()
    assert raised.value is error


# ---- A mistake on one process stops all processes before they read the weights -------------------


def assert_all_stop_with(results: list[Result], line: str) -> None:
    for result in results:
        assert result.code == 2, result.errors
        assert last_error(result) == line
        assert result.errors.strip().splitlines()[-1] == line, "no library prints its frames"
        assert "\nstep=" not in result.lines and "output=" not in result.lines


def test_a_missing_wandb_ends_all_processes_before_they_read_the_weights(
    tmp_path: Path,
) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError('no such package')\n")
    env = {"WANDB_MODE": "offline", "PYTHONPATH": str(tmp_path)}
    results = run_two(tmp_path, **env)
    assert_all_stop_with(results, "error: WANDB_MODE=offline needs wandb: pip install wandb")
    for result in results:
        assert "model=" not in result.lines, "no process reads the weights"


@pytest.mark.slow
def test_a_folder_that_process_0_cannot_write_ends_all_processes_with_one_text(
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    results = run_two(tmp_path, EXPORT_HF=str(file / "hf"))
    assert_all_stop_with(
        results, f"error: EXPORT_HF={file}/hf cannot be written: {file} is not a folder"
    )
    results = run_two(tmp_path, CHECKPOINT_DIR=str(file / "c"))
    assert_all_stop_with(
        results, f"error: CHECKPOINT_DIR={file}/c cannot be written: Not a directory"
    )
    (tmp_path / "0" / "config.yaml").mkdir(parents=True)
    results = run_two(tmp_path)
    assert_all_stop_with(
        results, f"error: OUTPUT_DIR={tmp_path}/0 cannot be written: Is a directory"
    )


def test_damaged_weights_of_one_process_end_all_processes_before_they_read_weights(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(REPO / "tiny", model)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    results = run_two(tmp_path, {}, {"MODEL_PATH": str(model)})
    assert [result.code for result in results] == [2, 2]
    told = f"{model}/model.safetensors is not a complete safetensors file"
    assert last_error(results[0]).startswith(f"error: process 1: {told}")
    assert last_error(results[1]).startswith(f"error: {told}")


# ---- Two runs, one folder ------------------------------------------------------------------------


def test_a_second_run_cannot_use_the_folders_of_a_run_that_is_alive(tmp_path: Path) -> None:
    """It cannot use OUTPUT_DIR or CHECKPOINT_DIR; when the first run is killed, they are free."""
    folder, short = tmp_path / "held", {"BATCH_SIZE": "2", "RESUME": "never"}
    process = start(folder, short | {"STEPS": "1000"}, 1)
    wait_for(process, "step=1 ")
    holder = f"process {process.pid} on {platform.node()}"
    before = (folder / "metrics.jsonl").read_text()
    shared = f"{folder}/checkpoints"
    elsewhere = {"OUTPUT_DIR": str(tmp_path / "second"), "CHECKPOINT_DIR": shared}
    for setting, env in ((f"OUTPUT_DIR={folder}", {}), (f"CHECKPOINT_DIR={shared}", elsewhere)):
        second = finish(start(folder, short | env, 1), folder)
        assert second.code == 2
        assert second.errors.splitlines()[-1] == (
            f"error: {setting} belongs to another run, which is alive: {holder}. Choose another "
            f"folder, or wait until that run has ended"
        )
        assert "\nstep=" not in second.lines
    assert process.poll() is None
    assert (folder / "metrics.jsonl").read_text().startswith(before)
    assert not (tmp_path / "second").exists() and not [*folder.glob("earlier_*")]
    process.kill()
    process.communicate()
    again = finish(start(folder, short, 1), folder)
    assert again.code == 0, again.errors


@pytest.mark.slow
def test_both_processes_of_a_second_run_name_the_folder_that_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    process = start(folder, {"STEPS": "1000", "BATCH_SIZE": "2"}, 1)
    wait_for(process, "step=0 ")
    outs = [folder, tmp_path / "taken_1"]
    results = [finish(p, o) for p, o in zip(start_two(outs, 1), outs, strict=True)]
    process.kill()
    process.communicate()
    lines = [result.errors.splitlines()[-1] for result in results]
    assert [result.code for result in results] == [2, 2] and lines[0] == lines[1]
    assert lines[0].startswith(f"error: OUTPUT_DIR={folder} belongs to another run")


def test_runs_that_start_in_the_same_second_get_different_folders(
    tmp_path: Path, monkeypatch
) -> None:
    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, zone: datetime.tzinfo) -> datetime.datetime:
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=zone)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resume, "datetime", Stopped)
    folders = [resume.output_folder("", "runs/mine") for _ in range(3)]
    name = "runs/mine_20260102_030405"
    assert [str(folder) for folder in folders] == [name, f"{name}_2", f"{name}_3"]
    assert all((tmp_path / folder / ".lock").is_file() for folder in folders)


def test_a_run_on_a_file_system_without_locks_goes_on_and_says_so(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    resume.hold(tmp_path / "run", f"OUTPUT_DIR={tmp_path}/run")
    assert capsys.readouterr().out == (
        f"OUTPUT_DIR={tmp_path}/run cannot be locked: No locks available; nothing stops a second "
        f"run in this folder\n"
    )


def test_a_run_that_does_not_begin_removes_only_folders_of_its_process(tmp_path: Path) -> None:
    for name in ("mine", "other", "used"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").write_text(resume.this_process())
    (tmp_path / "other" / ".lock").write_text("process 1 on another")
    (tmp_path / "used" / "metrics.jsonl").touch()
    resume.leave(*(tmp_path / name for name in ("mine", "other", "used", "nowhere")))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["other", "used"]
