"""processes.py: what two processes refuse to start, and how one's end ends the other."""

import os
import signal
import time
from pathlib import Path

import pytest
from jax._src import hardware_utils  # private, and the only list of the TPUs that jax can use
from test_train import Result, finish, start_two

import processes


def run_two(out: Path, *each: dict[str, str], **env: str) -> list[Result]:
    outs = [out / str(i) for i in range(2)]
    running = start_two(outs, 1, *each, EVAL_EVERY_STEPS="0", **env)
    return [finish(process, o) for process, o in zip(running, outs, strict=True)]


def last_error(result: Result) -> str:
    return [line for line in result.errors.splitlines() if line.startswith("error: ")][-1]


def test_processes_that_would_not_run_the_same_stop_and_name_what_differs(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "1+1?", "answer": "#### 2"}\n' * 10)
    each = ({"SEED": "1"}, {"SEED": "2", "DATASET": str(other), "HEARTBEAT_TIMEOUT_S": "11"})
    results = run_two(tmp_path, *each)
    for result in results:
        assert result.code == 2
        error = last_error(result)
        assert "error: the processes would not run the same: " in error
        assert "SEED is 1 on process 0, 2 on process 1" in error
        assert "DATASET is {repo}/tiny on process 0, " in error
        assert "the tokenized prompts is " in error
        assert "HEARTBEAT" not in error and "Traceback" not in result.errors


def test_a_mistake_of_one_process_is_told_by_all(tmp_path: Path) -> None:
    results = run_two(tmp_path, {}, {"DATASET": "nowhere.jsonl"})
    assert [result.code for result in results] == [2, 2]
    assert last_error(results[0]) == "error: process 1: DATASET=nowhere.jsonl: no such file"
    assert last_error(results[1]) == "error: DATASET=nowhere.jsonl: no such file"


def test_two_processes_are_not_three_and_one_is_not_many(tmp_path: Path) -> None:
    for result in run_two(tmp_path, REQUIRE_JAX_PROCESS_COUNT="3"):
        assert result.code == 2
        assert last_error(result) == "error: REQUIRE_JAX_PROCESS_COUNT=3, and 2 joined"
    for result in run_two(tmp_path, {}, {"REQUIRE_MULTIHOST": "1"}, STEPS="0"):
        assert result.code == 2 and "REQUIRE_MULTIHOST is False on process 0" in last_error(result)


def test_a_process_that_dies_between_steps_takes_the_other_down(tmp_path: Path) -> None:
    outs = [tmp_path / str(i) for i in range(2)]
    both = {"STEPS": "5000", "EVAL_EVERY_STEPS": "0", "HEARTBEAT_TIMEOUT_S": "10"}
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
    told = ("error: another process is gone", "another task died")  # ours, or jax's own
    assert any(words in survivor.errors for words in told), survivor.errors
    assert survivor.code != 1 or "Traceback" not in survivor.errors


def test_what_differs_is_compared_with_process_0_and_named_once() -> None:
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
        (ValueError("DATASET=heartbeat.jsonl: no such file"), False),
        (KeyError("gloo"), False),
    ],
)
def test_another_s_end_is_told_from_a_mistake(error: Exception, lost: bool) -> None:
    assert processes.lost_contact(error) is lost


def test_a_process_number_beyond_their_count_is_a_mistake(monkeypatch) -> None:
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    for name, value in zip(names, ("127.0.0.1:1", "2", "2"), strict=True):
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(ValueError, match="JAX_PROCESS_ID .from 0, below it"):
        processes.join(init_timeout_s=1, heartbeat_timeout_s=10)


@pytest.mark.parametrize(
    "device, found",
    [
        (("0x1ae0", "0x006f"), True),  # TPU v6e
        (("0x1ae0", "0x0027"), True),  # TPU v2
        (("0x1ae0", "0x0042"), False),  # the network card of a VM in Google's cloud
        (("0x10de", "0x2330"), False),  # a GPU, which may well be in /dev/vfio
        (("0x10de", "0x006f"), False),
    ],
)
def test_a_tpu_is_told_from_other_devices(
    tmp_path: Path, device: tuple[str, str], found: bool
) -> None:
    for slot, (vendor, number) in enumerate([("0x8086", "0x1237"), device]):
        folder = tmp_path / f"0000:00:{slot:02x}.0"
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{number}\n")
    assert processes.has_tpu(tmp_path) is found
    assert processes.has_tpu(tmp_path / "none") is False


def test_every_tpu_that_jax_knows_is_known_here() -> None:
    assert sorted(hardware_utils._TPU_PCI_DEVICE_IDS) == sorted(processes.TPUS)
    assert hardware_utils._GOOGLE_PCI_VENDOR_ID == processes.GOOGLE


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_tasks_that_do_not_know_of_each_other_are_told_what_to_set(
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
