"""run_tpu.sh's half on a worker: exit files, locks and a second start, on this machine."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_run_tpu import SHORT, Cloud


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    return Cloud(tmp_path, tmp_path / "cache")


def worker(cloud: Cloud, *words: str, **env: str) -> subprocess.CompletedProcess:
    alone = {"PATH": os.environ["PATH"], "HOME": str(cloud.home(0)), "JAX_PLATFORMS": "cpu"}
    alone |= {"HOSTNAME": "w", "LIBTPU_LOCKFILE": str(cloud.lockfile)}
    return subprocess.run(
        ["bash", "run_tpu.sh", *words], cwd=cloud.laptop, env=alone | env, text=True,
        capture_output=True, timeout=120,
    )  # fmt: skip


def test_the_exit_file_is_true_when_the_disk_is_full_for_the_log(cloud: Cloud) -> None:
    logs = cloud.laptop / "logs"
    logs.mkdir()
    (logs / "nohup_x_20260101T000000Z.log").symlink_to("/dev/full")
    base, cache = "logs/nohup_x_20260101T000000Z", f"JAX_COMPILATION_CACHE_DIR={cloud.cache}"
    settings = [f"{name}={value}" for name, value in SHORT.items()]
    assert worker(cloud, "worker-run", base, sys.prefix, "", cache, *settings).returncode == 0
    assert (logs / "nohup_x_latest.exit").read_text() == "0\n"
    assert len([*cloud.laptop.glob("runs/*/metrics.jsonl")]) == 1
    worker(cloud, "worker-run", base, sys.prefix, "", "STEPS=-1")
    assert (logs / "nohup_x_latest.exit").read_text() == "2\n"


def test_a_command_sent_again_does_not_start_a_run_that_has_ended(cloud: Cloud) -> None:
    start = ["worker-start", "x", "20260101T000000Z", sys.prefix, "", "STEPS=-1"]
    assert "w started: process" in worker(cloud, *start).stdout
    exit_file = cloud.laptop / "logs" / "nohup_x_latest.exit"
    while not exit_file.exists():
        time.sleep(0.1)
    assert exit_file.read_text() == "2\n"
    again = worker(cloud, *start)
    assert (again.returncode, again.stdout) == (0, "")


def test_stop_ends_no_stranger_with_the_number_of_a_run_that_is_gone(cloud: Cloud) -> None:
    (cloud.laptop / "logs").mkdir()
    stranger = subprocess.Popen(["sleep", "60"])
    (cloud.laptop / "logs" / "nohup_x_20260101T000000Z.pid").write_text(f"{stranger.pid}\n")
    (cloud.laptop / "logs" / "nohup_x_20260101T000000Z.log").touch()
    assert "exit=unknown (nothing logged yet)" in worker(cloud, "worker-status").stdout
    assert "w has nothing running" in worker(cloud, "worker-stop").stdout
    assert stranger.poll() is None
    stranger.kill()


def test_a_stale_libtpu_lockfile_goes_and_one_in_use_stops_the_start(cloud: Cloud) -> None:
    start = ["worker-start", "x", "20260101T000000Z", sys.prefix, "", "STEPS=-1"]
    with cloud.lockfile.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        held = worker(cloud, *start)
        assert held.returncode == 2
        assert f"error: w: process {os.getpid()} holds the TPU (" in held.stderr
        assert cloud.lockfile.exists()
    assert worker(cloud, *start).returncode == 0
    assert not cloud.lockfile.exists()
