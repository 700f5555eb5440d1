"""infra/hosts.py: two processes run only if they run the same, and they end together."""

import errno
import fcntl
import os
import platform
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from jax._src import distributed
from runs import (
    REPO,
    copy_repository,
    environment,
    few_examples,
    finish,
    latest_checkpoint,
    start_two,
    wait_for,
)

from infra import hosts, resume
from infra.mistakes import Unwritable, UserMistake

# ---- What processes compare ----------------------------------------------------------------------


def test_two_processes_stop_if_their_settings_code_or_data_differ(tmp_path: Path) -> None:
    repos = [copy_repository(tmp_path / f"copy{i}") for i in range(2)]
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "1+1?", "answer": "#### 2"}\n' * 10)
    with open(repos[1] / "model" / "layout.py", "a") as file:
        file.write("# another version\n")
    each = ({"SEED": "1"}, {"SEED": "2", "DATASET": str(other), "INIT_TIMEOUT_S": "91"})
    line = (
        rf"error: the processes differ: "
        rf"DATASET is {few_examples()} on process 0, {other} on process 1, "
        r"SEED is 1 on process 0, 2 on process 1, "
        r"the tokenized prompts is \w{12} on process 0, \w{12} on process 1, "
        r"our code is \w{12} on process 0, \w{12} on process 1"
    )
    outs = [tmp_path / str(i) for i in range(2)]
    running = start_two(outs, 1, *each, repos=repos)
    for result in [finish(process, out) for process, out in zip(running, outs, strict=True)]:
        assert re.fullmatch(line, result.errors.splitlines()[-1]), result.errors
        assert result.code == 2 and "model=" not in result.lines, "neither reads the weights"


def test_a_mistake_and_a_file_that_cannot_be_read_or_written_are_told_and_no_other_error() -> None:
    no_file = FileNotFoundError(errno.ENOENT, "No such file or directory", "/nowhere")
    errors = {"SEED=a": UserMistake("SEED=a"), "x is full": Unwritable("x is full")}
    errors["/nowhere: No such file or directory"] = no_file
    for text, error in errors.items():
        with pytest.raises(UserMistake, match=f"^{text}$"), hosts.raising_on_all_processes():
            raise error
    with pytest.raises(BrokenPipeError), hosts.raising_on_all_processes():
        raise OSError(errno.EPIPE, "a connection is lost")


# ---- Who joins -----------------------------------------------------------------------------------


def arguments_of_jax(monkeypatch, text: str) -> dict:
    """What jax is told of the other processes in this environment; empty: nothing."""
    arguments: dict = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **kwargs: arguments.update(kwargs))
    for name, value in environment(text).items():
        monkeypatch.setenv(name, value)
    hosts.join_processes(60)
    limits = ("initialization_timeout", "heartbeat_timeout_seconds")
    return {name: value for name, value in arguments.items() if name not in limits}


SECOND = "JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1 JAX_COORDINATOR_ADDRESS="
STEP = "SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE="
SLURM = {"cluster_detection_method": "slurm"}
ALL = {"local_device_ids": []}
JOINED = [
    *(
        (
            SECOND + address,
            ALL | {"coordinator_address": address, "num_processes": 2, "process_id": 1},
        )
        for address in ("[::1]:29512", "node-7.cluster:8476", "dns:///10.0.0.1:1")
    ),
    (f"{STEP}1(x4)", SLURM | ALL),  # it is alone on its node
    (f"{STEP}2(x2)", SLURM),  # jax gives each task one GPU
    (f"{STEP}1,3", SLURM),
    (f"{STEP}2(x2) SLURM_GPUS_PER_TASK=2", SLURM | ALL),
    (f"{STEP}1(x4) JAX_LOCAL_DEVICE_IDS=1", SLURM),
    ("JAX_PLATFORMS=tpu,cpu WORLD_SIZE=2 NNODES=2", ALL),  # hosts of a TPU, whatever is set
]
ALONE = [
    "WORLD_SIZE=8 JAX_PROCESS_ID=0 JAX_NUM_PROCESSES=1",
    "OMPI_COMM_WORLD_SIZE=1 PMI_SIZE=1 WORLD_SIZE=1 NNODES=1 JAX_PROCESS_COUNT=1",
    # The tasks of srun, which also sets PMI_SIZE, are runs of their own.
    "SLURM_NTASKS=4 PMI_SIZE=4 SLURM_STEP_NUM_TASKS=1",
    "SLURM_NTASKS=4 SLURM_STEP_TASKS_PER_NODE=1(x4)",  # a script of sbatch, which is no step
]


@pytest.mark.parametrize("text, arguments", [*JOINED, *((text, {}) for text in ALONE)])
def test_processes_find_each_other_and_one_that_is_meant_to_be_alone_is_no_mistake(
    monkeypatch, text: str, arguments: dict
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(hosts, "has_tpu", lambda: True)
    assert arguments_of_jax(monkeypatch, text) == arguments


BAD = ("10.0.0.1", "host:", ":1234", "host:0", "::1:29511", "[::1]", "http://host:1234")
NO_ADDRESS = "^JAX_COORDINATOR_ADDRESS={} is not host:port, such as "


@pytest.mark.parametrize(
    "text, words",
    [
        *((SECOND + address, NO_ADDRESS.format(re.escape(address))) for address in BAD),
        (f"{SECOND}10.0.0.1:1 JAX_PROCESS_ID=2", "JAX_PROCESS_ID .0 to JAX_NUM_PROCESSES - 1"),
    ],
)
def test_an_address_is_a_host_and_a_port_and_a_process_number_is_below_their_number(
    monkeypatch, text: str, words: str
) -> None:
    with pytest.raises(UserMistake, match=words):
        arguments_of_jax(monkeypatch, text)


@pytest.mark.parametrize(
    "text",
    [
        "OMPI_COMM_WORLD_SIZE=2",
        "PMI_SIZE=4",  # MPICH and Intel MPI
        "MV2_COMM_WORLD_SIZE=2",
        "WORLD_SIZE=8",  # torchrun
        "JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1",
        "JAX_PROCESS_ID=0",
        "NNODES=2 JAX_COORDINATOR_IP=10.0.0.1",  # MaxText
        "JAX_PROCESS_COUNT=2 JAX_PROCESS_ID=0",  # MaxText on CPUs
        "HOROVOD_SIZE=2",
        "SKYPILOT_NUM_NODES=2",
    ],
)
def test_a_process_that_a_launcher_started_among_others_does_not_train_alone(
    monkeypatch, text: str
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(UserMistake) as error:
        arguments_of_jax(monkeypatch, f"{text} SLURM_NTASKS=2")
    assert str(error.value) == (
        f"{text}: this seems to be one of several processes, and would train alone; set "
        "JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID on each, or "
        "JAX_NUM_PROCESSES=1 to train alone"
    )
    for name in environment(text):
        monkeypatch.setenv(name, "" if name.startswith("JAX") else "1")
    assert arguments_of_jax(monkeypatch, "RANK=0 SLURM_NTASKS=2") == {}


def test_a_tpu_is_a_device_of_google_that_is_no_disk_and_no_network_card(tmp_path: Path) -> None:
    device = tmp_path / "0000:00:05.0"
    device.mkdir()
    for vendor, kind, tpu in (
        ("0x1ae0", "0x120000", True),
        ("0x10de", "0x030200", False),  # a GPU
        ("0x1ae0", "0x020000", False),  # a network card of Google
        ("0x1ae0", "0x010802", False),  # a disk of Google
    ):
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
        assert hosts.has_tpu(tmp_path) is tpu, (vendor, kind)


# ---- How processes end ---------------------------------------------------------------------------

# The main thread does not come back to Python, as while a program is compiled: it waits for a lock
# that it has itself, and signals do not interrupt this.
WATCHING = """
import ctypes, sys
from infra.hosts import StopSignal
StopSignal().watch(grace_s=int(sys.argv[1]))
lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_mutex_init(lock, None)
libc.pthread_mutex_lock(lock)
print("watching", flush=True)
libc.pthread_mutex_lock(lock)
"""


def heed_hangup() -> None:
    """For a child of tests that nohup has started, or that a library has made deaf."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def start_watching(grace_s: int, ignored: str = "") -> subprocess.Popen:
    """ignored: signals that the process is started to ignore, such as "INT HUP"."""
    command, pipe = [sys.executable, "-c", WATCHING, str(grace_s)], subprocess.PIPE
    if ignored:
        command = ["sh", "-c", f"trap '' {ignored}; exec \"$@\"", "sh", *command]
    options = {"cwd": REPO, "bufsize": 0, "preexec_fn": heed_hangup}
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, **options)
    wait_for(process, "^watching")
    return process


def test_a_second_signal_ends_the_process_at_once_but_a_ctrl_c_may_arrive_twice() -> None:
    process = start_watching(grace_s=30)
    process.send_signal(signal.SIGINT)
    wait_for(process, "^SIGINT: stopping at the next point where the run can be saved")
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    message = b"error: a second signal; ending without a checkpoint\n"
    assert process.communicate(timeout=20) == (b"", message) and process.returncode == 130


def test_a_signal_ends_the_process_within_the_grace_period_whatever_it_does() -> None:
    process = start_watching(grace_s=2)
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 129
    assert errors == b"error: PREEMPTION_GRACE_S=2 seconds are over; nothing more is saved\n"


@pytest.mark.parametrize(
    "ignored, sent, heeded",
    [
        ("HUP", signal.SIGHUP, signal.SIGINT),  # by nohup
        ("INT QUIT", signal.SIGINT, signal.SIGHUP),  # in the background of a script
    ],
)
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(
    ignored: str, sent: signal.Signals, heeded: signal.Signals
) -> None:
    process = start_watching(30, ignored)
    process.send_signal(sent)
    time.sleep(1)
    process.send_signal(heeded)
    wait_for(process, f"^{heeded.name}: stopping")
    time.sleep(1)
    process.send_signal(sent)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + heeded


ON_A_TERMINAL = """
import fcntl, sys, termios, time
from infra.hosts import StopRequested, StopSignal
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
stop = StopSignal()
stop.watch(30)
print("watching", flush=True)
try:
    while True:
        stop.raise_if_stopped()
        time.sleep(0.01)
except StopRequested as request:
    print(f"STOPPED: {request}", flush=True)
    sys.exit(request.exit_code)
"""


def test_a_run_whose_terminal_is_gone_stops_without_an_error_of_its_log() -> None:
    terminal, stream = os.openpty()
    command = [sys.executable, "-c", ON_A_TERMINAL]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), stream)
    options = {"cwd": REPO, "start_new_session": True, "preexec_fn": heed_hangup}
    process = subprocess.Popen(command, **options, **streams)
    os.close(stream)
    seen = b""
    while b"watching\r\n" not in seen:  # the whole line, or its end meets a closed terminal
        seen += os.read(terminal, 1000)
    os.close(terminal)
    assert process.wait(timeout=60) == 129


def start_tasks(script: str, *arguments: str) -> list[subprocess.Popen]:
    """Two tasks of srun on this machine that run the script."""
    for job in range(os.getpid(), os.getpid() + 4096):  # jax makes the port from the job's number
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 61440 + job % 4096)) != 0:
                break
    both = f"SLURM_JOB_ID={job} SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=2"
    both += " SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 JAX_PLATFORMS=cpu XLA_FLAGS="
    envs = [environment(f"{both} SLURM_PROCID={i} SLURM_LOCALID={i}") for i in range(2)]
    command, pipe = [sys.executable, "-c", script, *arguments], subprocess.PIPE
    options = {"cwd": REPO, "bufsize": 0, "stdout": pipe, "stderr": pipe}
    return [subprocess.Popen(command, env=os.environ | env, **options) for env in envs]


FAILING = """
import jax
from infra import hosts
from infra.mistakes import UserMistake
hosts.join_processes(60)
with hosts.exiting_on_error():
    number = jax.process_index()
    try:
        with hosts.raising_on_all_processes():
            if number == 1:
                raise UserMistake("SEED=a\\nSTEPS=b")
    except UserMistake as error:
        devices = f"{jax.local_device_count()} of {jax.device_count()} devices"
        print(f"{number} of {jax.process_count()} with {devices}: {error}", flush=True)
    if number == 1:
        raise SystemExit("error: no space")
    hosts.gather_texts("it waits for process 1")
"""


def test_two_tasks_of_srun_join_tell_a_mistake_of_one_of_them_and_end_if_one_fails() -> None:
    running = start_tasks(FAILING)
    waits, fails = ([x.decode() for x in p.communicate(timeout=60)] for p in running)
    message = "of 2 with 1 of 2 devices: process 1: SEED=a\nprocess 1: STEPS=b\n"
    assert f"0 {message}" in waits[0] and f"1 {message}" in fails[0]
    assert fails[1] == "error: no space\n"
    assert waits[1].startswith("error: another process is gone; its log says why (")
    assert [process.returncode for process in running] == [1, 1]


# The life of a run whose weights follow from the step; each process has half of them.
LIFE = """
import sys, time
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
sys.path += ["tests"]
from infra import hosts
from infra.resume import begin_or_resume
from life import life_of
hosts.join_processes(60)
with hosts.exiting_on_error():
    out, steps = Path(sys.argv[1]), 10**6
    life = life_of(out, steps=steps, save_every_steps=1)
    halves = NamedSharding(jax.make_mesh((2,), ("half",)), PartitionSpec("half"))
    def weights():
        x = np.random.default_rng(life.progress.step).random((2, 10**5), np.float32)
        return jax.make_array_from_callback(x.shape, halves, lambda index: x[index])
    wanted = jax.ShapeDtypeStruct((2, 10**5), "float32", sharding=halves)
    restored, life.progress = begin_or_resume(
        out, life.checkpoints, {}, {"x": wanted}, resume="auto", steps=steps
    )
    if restored:
        halves_read = (x.addressable_shards[0].data for x in (restored["x"], weights()))
        np.testing.assert_array_equal(*map(np.asarray, halves_read))
    life.stop_signal.watch(30)
    def save():
        life.save({"x": weights()})
    with life.ending(save, None, None):
        for _ in range(500):
            life.finish_step(1, "")
            life.stop_signal.raise_if_stopped()  # this step has no checkpoint yet
            save()
            print(f"step={life.progress.step}", flush=True)
            time.sleep(0.1)
"""


@pytest.mark.slow
def test_if_one_of_two_processes_is_struck_both_end_and_go_on_together_from_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    """One after the other, a process is killed, frozen, cannot write, and gets SIGTERM. The
    connections of a frozen process stay open, but it sends no heartbeats, and is missed after 30
    silent seconds."""
    for strike, struck in (("kill", 0), ("freeze", 1), ("refuse", 1), ("stop", 1)):
        saved = latest_checkpoint(tmp_path)
        running = start_tasks(LIFE, str(tmp_path))
        for process in running:
            if saved > 0:
                wait_for(process, f"^resumed after {saved} of ")
            wait_for(process, f"^step={max(saved, 0) + 3}$")
        if strike == "refuse":
            most = (100_000, resource.RLIM_INFINITY)  # bytes of a file
            resource.prlimit(running[struck].pid, resource.RLIMIT_FSIZE, most)
        else:
            numbers = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "stop": signal.SIGTERM}
            running[struck].send_signal(numbers[strike])
        lines, errors = (x.decode() for x in running[1 - struck].communicate(timeout=120))
        if strike == "freeze":
            running[struck].kill()
        its_lines, its_errors = (x.decode() for x in running[struck].communicate(timeout=20))
        codes = [running[i].returncode for i in (struck, 1 - struck)]
        if strike == "stop":
            stopped = [re.search("^STOPPED: SIGTERM .*$", x, re.M)[0] for x in (its_lines, lines)]
            assert stopped[0] == stopped[1] and codes == [143, 143]
            assert re.search(r" steps=(\d+) saved_step=\1$", stopped[0]), "the last step is saved"
        else:
            told = "error: another process is gone|another task died"  # a line of ours or of jax
            assert re.search(told, errors), errors
            assert codes[1] == -signal.SIGABRT or (codes[1] == 1 and "Traceback" not in errors)
            assert latest_checkpoint(tmp_path) >= saved + 2
        if strike == "refuse":
            line = r"^error: checkpoint of step \d+ cannot be written to .*: File too large; "
            assert re.search(line, its_errors, re.M) and codes[0] == 1, its_errors


LOST = """
    UNKNOWN: Gloo AllGather failed: Connection closed by peer
    NCCL operation ncclAllReduce() failed: remote process exited
    UNAVAILABLE: Task 1 heartbeat timeout.
    while calling /xla.coordination.CoordinationService/Get
    DEADLINE_EXCEEDED: Barrier timed out. Id: save_2
    process 1 failed before a barrier
"""
OTHERS = """
    RESOURCE_EXHAUSTED: Out of memory
    Barrier semaphore reference must be rank 0
    INTERNAL: cannot lower optimization-barrier
    /data/gloomy/run cannot be read
"""


def test_an_error_says_that_another_process_is_gone_only_if_there_are_others(monkeypatch) -> None:
    errors = [RuntimeError(line) for line in LOST.strip().splitlines()]
    assert not any(map(hosts.is_lost_connection, errors))
    monkeypatch.setattr(distributed.global_state, "num_processes", 2)
    assert all(map(hosts.is_lost_connection, errors))
    others = [RuntimeError(line) for line in OTHERS.strip().splitlines()]
    assert not any(map(hosts.is_lost_connection, others))


FAILING_ALONE = """
from infra import hosts
hosts.join_processes(60)
with hosts.exiting_on_error():
    raise RuntimeError("libnccl.so.2 not found behind the barrier")
"""


def test_a_process_that_trains_alone_keeps_the_traceback_of_any_error() -> None:
    """Also one that has joined the processes of its job, and is the only one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"JAX_COORDINATOR_ADDRESS=127.0.0.1:{probe.getsockname()[1]}"
    env = environment(f"{address} JAX_NUM_PROCESSES=1 JAX_PROCESS_ID=0")
    command, pipes = [sys.executable, "-c", FAILING_ALONE], {"text": True, "capture_output": True}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, env=os.environ | env, cwd=REPO, timeout=60, **pipes)
    first, *_, last = done.stderr.splitlines()
    assert (done.returncode, first) == (1, "Traceback (most recent call last):"), done.stderr
    assert last == "RuntimeError: libnccl.so.2 not found behind the barrier"


# ---- Two runs, one folder ------------------------------------------------------------------------


def test_a_second_run_cannot_use_the_folders_of_a_run_that_is_alive(tmp_path: Path) -> None:
    folder = resume.output_folder(str(tmp_path / "held"), "")
    shared = resume.open_checkpoints(folder, "", 0, 1).folder
    who = f"process {os.getpid()} on {platform.node()}"
    message = f"{folder} is in use by another run: {who}. "
    with pytest.raises(UserMistake, match=f"^OUTPUT_DIR={re.escape(message)}"):
        resume.output_folder(str(folder), "")
    message = message.replace(str(folder), shared)
    with pytest.raises(UserMistake, match=f"^CHECKPOINT_DIR={re.escape(message)}"):
        resume.open_checkpoints(tmp_path / "second", shared, 0, 1)


def test_runs_that_start_in_the_same_second_get_different_folders(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len({resume.output_folder("", "runs/mine") for _ in range(3)}) == 3


def test_a_run_goes_on_without_locks_and_says_so(tmp_path, monkeypatch, capsys) -> None:
    no_locks = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=no_locks))
    resume.lock_folder(tmp_path, "OUTPUT_DIR=a")
    assert "OUTPUT_DIR=a cannot be locked: No locks available" in capsys.readouterr().out
