"""runtime/processes.py: two processes run only if they run the same, and they end together."""

import datetime
import errno
import fcntl
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from forked import Process
from test_train import REPO, Result, copy_repository, few_examples, finish, start, start_two

from runtime import processes, resume
from runtime.mistakes import UserMistake


def wait_for(process: Process, words: str) -> None:
    """Reads the lines of a process up to a line that begins with these words."""
    next(line for line in process.stdout if line.startswith(words))


def ended(out: Path, *each: dict[str, str], repos=(REPO, REPO), **env: str) -> list[Result]:
    """Two processes that had to end with exit code 2."""
    outs = [out / str(i) for i in range(2)]
    running = start_two(outs, 1, *each, repos=repos, **env)
    results = [finish(process, o) for process, o in zip(running, outs, strict=True)]
    assert [result.code for result in results] == [2, 2], results[0].errors
    assert not any("model=" in result.lines for result in results), "none reads the weights"
    return results


# ---- What processes compare ----------------------------------------------------------------------


def test_processes_with_other_settings_code_or_data_stop_and_name_what_differs(
    tmp_path: Path,
) -> None:
    repo, other = copy_repository(tmp_path / "copy"), tmp_path / "other.jsonl"
    other.write_text('{"question": "1+1?", "answer": "#### 2"}\n' * 10)
    with open(repo / "runtime" / "layout.py", "a") as file:
        file.write("# another version\n")
    each = ({"SEED": "1"}, {"SEED": "2", "DATASET": str(other), "HEARTBEAT_TIMEOUT_S": "11"})
    line = (
        rf"error: the processes would not run the same: "
        rf"DATASET is {few_examples()} on process 0, {other} on process 1, "
        r"SEED is 1 on process 0, 2 on process 1, "
        r"our code is \w{12} on process 0, \w{12} on process 1, "
        r"the content of config.json, tokenizer.json, the prompts and the files of REWARD_FN is "
        r"\w{12} on process 0, \w{12} on process 1"
    )
    for result in ended(tmp_path, *each, repos=(REPO, repo)):
        assert re.fullmatch(line, result.errors.splitlines()[-1]), result.errors


def test_the_compared_code_is_that_of_every_folder_and_not_of_a_virtual_environment(
    tmp_path: Path, monkeypatch
) -> None:
    repo = tmp_path / "repo"
    compared = {
        "__script__": "script.py",
        "new": "new/__init__.py",
        "bare.deep.b": "bare/deep/b.py",
    }
    others = {"lib": ".venv/site-packages/lib.py", "other": "../other/loss.py"}
    for name, path in (compared | others).items():
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        (repo / path).touch()
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__file__ = str(repo / path)
    for name, path in (compared | others).items():
        before = processes.code_digest(repo)
        (repo / path).write_text("another version")
        assert (processes.code_digest(repo) != before) == (name in compared), name


def test_all_processes_tell_the_mistakes_of_one_process_before_they_read_the_weights(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(REPO / "tiny", model)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for result in ended(tmp_path, {}, {"MODEL_PATH": str(model), "DATASET": "nowhere.jsonl"}):
        damaged, missing = result.errors.strip().splitlines()[-2:]
        told = f"{model}/model.safetensors is not a complete safetensors file"
        assert damaged.startswith(f"error: process 1: {told}")
        assert missing == "error: process 1: DATASET=nowhere.jsonl: no such file"


def test_only_an_error_about_a_file_is_a_mistake_of_the_user() -> None:
    mistakes: list[str] = []
    processes.tried(mistakes, Path("/nowhere").read_text)
    assert mistakes == ["/nowhere: No such file or directory"]
    with pytest.raises(BrokenPipeError), processes.told_by_all():
        raise OSError(errno.EPIPE, "no file")


# ---- Who joins -----------------------------------------------------------------------------------


def test_a_run_stops_if_more_or_fewer_processes_join_than_the_settings_require() -> None:
    processes.stop_if_not_so_many(False, 0)
    processes.stop_if_not_so_many(False, 1)
    with pytest.raises(UserMistake, match="^REQUIRE_JAX_PROCESS_COUNT=3, and 1 joined$"):
        processes.stop_if_not_so_many(False, 3)


def test_a_process_number_must_be_below_the_number_of_processes(monkeypatch) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    with pytest.raises(UserMistake, match="JAX_PROCESS_ID .from 0, below it"):
        processes.join(init_timeout_s=1, heartbeat_timeout_s=10)


STEP = "SLURM_JOB_ID=7 SLURM_STEP_NODELIST=n1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS="
MPIRUN = "OMPI_MCA_orte_hnp_uri=1.0;tcp://10.0.0.1:1 OMPI_COMM_WORLD_SIZE="


def environment(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


@pytest.mark.parametrize(
    "text, found, alone",
    [
        (STEP + "2 SLURM_STEP_NUM_TASKS=2", "slurm", ""),
        (MPIRUN + "2", "ompi", ""),
        (STEP + "1 SLURM_STEP_NUM_TASKS=1", "", ""),
        (MPIRUN + "1", "", ""),
        (STEP + "4", "", "SLURM_NTASKS=4"),  # a script of sbatch
        ("SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2", "", "SLURM_NTASKS=2"),
        ("OMPI_COMM_WORLD_SIZE=2", "", "OMPI_COMM_WORLD_SIZE=2"),  # jax does not know Open MPI 5
    ],
)
def test_tasks_join_where_jax_finds_the_others_and_print_elsewhere_what_to_set(
    monkeypatch, capsys, text: str, found: str, alone: str
) -> None:
    assert processes.launcher(environment(text)) == found
    if not found:
        for name, value in environment(text + " JAX_PLATFORMS=cpu").items():
            monkeypatch.setenv(name, value)
        processes.join(init_timeout_s=1, heartbeat_timeout_s=10)
    line = (
        f"{alone}, but this process trains alone. For one run of all tasks use srun, or set "
        f"JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; REQUIRE_MULTIHOST=1 makes "
        f"this an error\n"
    )
    assert capsys.readouterr().out == (line if alone else "")


def test_two_tasks_of_srun_train_one_run(tmp_path: Path) -> None:
    for job in range(os.getpid(), os.getpid() + 4096):  # jax makes the port from the job's number
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 61440 + job % 4096)) != 0:
                break
    both = "SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2"
    both += f" SLURM_STEP_TASKS_PER_NODE=2 SLURM_JOB_ID={job} OUTPUT_DIR={tmp_path}/0"
    outs = [tmp_path / str(i) for i in range(2)]
    tasks = [f"{both} SLURM_PROCID={i} SLURM_LOCALID={i}" for i in range(2)]
    running = [start(out, environment(text), 1) for out, text in zip(outs, tasks, strict=True)]
    for i, result in enumerate(finish(p, o) for p, o in zip(running, outs, strict=True)):
        assert result.code == 0, result.errors
        assert f"backend=cpu process={i}/2 device_count=2 local_device_count=1" in result.lines
        assert "\nDONE: steps=1 " in result.lines


@pytest.mark.parametrize(
    "text, devices",
    [
        ("", []),
        ("SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_LOCALID=0", []),  # all that the task sees
        ("SLURM_STEP_TASKS_PER_NODE=2(x3) SLURM_LOCALID=1", [4, 5, 6, 7]),
        ("SLURM_STEP_TASKS_PER_NODE=1,4(x2) SLURM_LOCALID=1", [2, 3]),
        ("SLURM_STEP_TASKS_PER_NODE=8 SLURM_LOCALID=7", [7]),
        ("SLURM_STEP_TASKS_PER_NODE=2 SLURM_LOCALID=1 CUDA_VISIBLE_DEVICES=0,1,5,7", [2, 3]),
        ("SLURM_STEP_TASKS_PER_NODE=2 SLURM_LOCALID=1 CUDA_VISIBLE_DEVICES=5", []),
        ("SLURM_STEP_TASKS_PER_NODE=2 SLURM_LOCALID=1 SLURM_GPUS_PER_TASK=4", []),
        ("OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0", [0, 1, 2, 3]),
        ("OMPI_COMM_WORLD_LOCAL_SIZE=16 OMPI_COMM_WORLD_LOCAL_RANK=3", []),
    ],
)
def test_tasks_on_one_node_take_equal_parts_of_its_gpus(
    tmp_path: Path, text: str, devices: list[int]
) -> None:
    for name in (*(f"nvidia{i}" for i in range(8)), "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert processes.devices_of_task(environment(text), tmp_path) == devices


@pytest.mark.parametrize(
    "vendor, kind, tpu",
    [
        ("0x1ae0", "0x120000", True),
        ("0x10de", "0x030200", False),  # a GPU, which can be in /dev/vfio
        ("0x1ae0", "0x020000", False),  # a network card of Google
        ("0x1ae0", "0x010802", False),  # a disk of Google
    ],
)
def test_a_tpu_is_a_device_of_google_that_is_no_disk_and_no_network_card(
    tmp_path, vendor: str, kind: str, tpu: bool
) -> None:
    device = tmp_path / "0000:00:05.0"
    device.mkdir()
    (device / "vendor").write_text(vendor + "\n")
    assert processes.has_tpu(tmp_path) is (vendor == "0x1ae0")  # a device may have no class
    (device / "class").write_text(kind + "\n")
    assert processes.has_tpu(tmp_path) is tpu


# ---- How processes end ---------------------------------------------------------------------------

WATCHING = """
import time
from runtime.processes import StopSignal
StopSignal().watch(grace_s=30)
print("watching", flush=True)
time.sleep(60)
"""


def test_a_second_signal_ends_the_process_at_once_but_a_ctrl_c_may_arrive_twice() -> None:
    command, pipe = [sys.executable, "-c", WATCHING], subprocess.PIPE
    process = subprocess.Popen(command, cwd=REPO, text=True, stdout=pipe, stderr=pipe)
    wait_for(process, "watching")
    process.send_signal(signal.SIGINT)
    wait_for(process, "SIGINT: stopping at the next point where the run can be saved")
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    told = "error: a second signal; nothing more is saved\n"
    assert process.communicate(timeout=5) == ("", told) and process.returncode == 130


@pytest.mark.parametrize(
    "number, struck",
    [
        (signal.SIGKILL, 1),
        # The connections of a frozen process stay open, but it sends no heartbeats.
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_dead_or_frozen_ends_the_other_process(
    tmp_path: Path, number: int, struck: int
) -> None:
    outs = [tmp_path / str(i) for i in range(2)]
    both = {"STEPS": "5000", "BATCH_SIZE": "2", "HEARTBEAT_TIMEOUT_S": "10"}
    running = start_two(outs, 1, **both)
    wait_for(running[struck], "step=1 ")
    running[struck].send_signal(number)
    began = time.monotonic()
    other = finish(running[1 - struck], outs[1 - struck])
    assert time.monotonic() - began < 40
    running[struck].kill()
    running[struck].communicate()
    told = ("error: another process is gone", "another task died")  # our line, or a line of jax
    assert any(words in other.errors for words in told), other.errors
    assert other.code in (1, -signal.SIGABRT)
    assert other.code != 1 or "Traceback" not in other.errors


FAILING = """
import jax
from runtime import processes
processes.join(init_timeout_s=60, heartbeat_timeout_s=100)
with processes.ending_together():
    processes.gather_texts("both are connected")
    if jax.process_index() == 1:
        raise SystemExit("error: no space")
    processes.gather_texts("it waits for process 1")
"""


def test_a_process_that_fails_ends_the_other_process_which_waits_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    both = f"JAX_COORDINATOR_ADDRESS=127.0.0.1:{port} JAX_NUM_PROCESSES=2 JAX_PLATFORMS=cpu"
    envs = [os.environ | environment(f"{both} JAX_PROCESS_ID={i}") for i in range(2)]
    command, how = [sys.executable, "-c", FAILING], {"cwd": REPO, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, env=env, text=True, **how) for env in envs]
    waits, fails = (process.communicate(timeout=60)[1] for process in running)
    assert [process.returncode for process in running] == [1, 1]
    assert fails == "error: no space\n"
    assert waits.startswith("error: another process is gone; its log says why (")


def test_the_error_after_the_end_of_another_process_is_known() -> None:
    for error in (
        ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"),
        RuntimeError("NCCL operation ncclAllReduce() failed: remote process exited"),
        RuntimeError("UNAVAILABLE: Task 1 heartbeat timeout."),
        RuntimeError("while calling /xla.coordination.CoordinationService/Get"),
    ):
        assert processes.lost_contact(error), error
    assert not processes.lost_contact(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"))


# ---- Two runs, one folder ------------------------------------------------------------------------


def test_a_second_run_cannot_use_the_folders_of_a_run_that_is_alive(tmp_path: Path) -> None:
    """It cannot use OUTPUT_DIR or CHECKPOINT_DIR. The lock ends with the process."""
    folder, short = tmp_path / "held", {"BATCH_SIZE": "2"}
    process = start(folder, short | {"STEPS": "1000"}, 1)
    wait_for(process, "step=1 ")
    before = (folder / "metrics.jsonl").read_text()
    shared = f"{folder}/checkpoints"
    elsewhere = {"OUTPUT_DIR": str(tmp_path / "second"), "CHECKPOINT_DIR": shared}
    for setting, env in ((f"OUTPUT_DIR={folder}", {}), (f"CHECKPOINT_DIR={shared}", elsewhere)):
        second = finish(start(folder, short | env, 1), folder)
        assert second.code == 2
        assert second.errors.splitlines()[-1] == (
            f"error: {setting} belongs to another run, which is alive: process {process.pid} on "
            f"{platform.node()}. Choose another folder, or wait until that run has ended"
        )
    assert process.poll() is None
    assert (folder / "metrics.jsonl").read_text().startswith(before)
    process.kill()
    process.communicate()
    again = finish(start(folder, short | {"STEPS": "1000", "RESUME": "never"}, 1), folder)
    assert again.code == 2 and "holds a run, and RESUME=never begins a new one" in again.errors


def test_runs_that_start_in_the_same_second_get_different_folders(
    tmp_path: Path, monkeypatch
) -> None:
    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, zone: datetime.tzinfo) -> datetime.datetime:
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=zone)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resume, "datetime", Stopped)
    folders = [resume.output_folder("", "runs/mine") for _ in range(2)]
    name = "runs/mine_20260102_030405"
    assert [str(folder) for folder in folders] == [name, f"{name}_2"]


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


def test_a_disk_that_is_full_at_the_start_is_a_mistake_that_names_the_folder(
    tmp_path: Path,
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(UserMistake, match="^OUTPUT_DIR=a cannot be written: File too large$"):
            resume.hold(tmp_path / "run", "OUTPUT_DIR=a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
