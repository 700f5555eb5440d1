"""processes.py: what two processes refuse to start, and how one's end ends the other."""

import os
import signal
import time
from pathlib import Path

import pytest
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
