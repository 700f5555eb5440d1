"""run_tpu_worker.sh on this machine: set-up, exit files, locks, status, and stop."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cloud import Cloud

BASE = "logs/nohup_x_20260101T000000Z"
START = ["start", "x", "20260101T000000Z", sys.prefix, "", "STEPS=-1"]  # a run that ends with 2


def worker(cloud: Cloud, *words: str, **env: str) -> subprocess.CompletedProcess:
    alone = {"PATH": os.environ["PATH"], "HOME": str(cloud.home(0)), "JAX_PLATFORMS": "cpu"}
    alone |= {"HOSTNAME": "w", "LIBTPU_LOCKFILE": str(cloud.lockfile)}
    return subprocess.run(
        ["bash", "tools/run_tpu_worker.sh", *words],
        cwd=cloud.laptop,
        env=alone | env,
        text=True,
        capture_output=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "config, settings, wanted",
    [
        ("recipes/grpo_gsm8k_qwen25_3b_bs128_steps100.yaml", [], ["wandb"]),
        ("recipes/grpo_gsm8k_qwen25_3b_bs128_steps100.yaml", ["WANDB_MODE=disabled"], []),
        ("recipes/tiny.yaml", ["REPORT_TO=tensorboard,wandb"], ["wandb", "tensorboard"]),
        ("recipes/tunix_qwen3_4b_10steps_sglang.yaml", [], ["sglang"]),
        ("recipes/tunix_qwen3_4b_10steps_sglang.yaml", ["ROLLOUT_BACKEND=naive"], []),
    ],
)
def test_setup_installs_what_the_settings_ask_for(
    cloud: Cloud, config: str, settings: list[str], wanted: list[str]
) -> None:
    done = worker(cloud, "setup", str(cloud.venv), config, "gcsfs tqdm", *settings)
    installed = cloud.read("installed")
    assert "-m pip install --quiet -r requirements.txt jax[tpu] gcsfs tqdm\n" in installed
    if wanted == ["sglang"] and sys.version_info < (3, 12):
        assert done.returncode == 2 and "has a Python older than 3.12" in done.stderr
        return
    assert done.returncode == 0 and "w set up: Python 3." in done.stdout, done.stderr
    assert [x for x in ("wandb", "tensorboard", "sglang") if x in installed] == wanted


def test_an_old_libtpu_lockfile_is_removed_and_a_lock_in_use_stops_the_start(cloud: Cloud) -> None:
    with cloud.lockfile.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        held = worker(cloud, *START)
        assert held.returncode == 2
        assert f"error: w: process {os.getpid()} holds the TPU (" in held.stderr
        assert cloud.lockfile.exists()
    begun = worker(cloud, *START)
    assert begun.returncode == 0 and "w started: process" in begun.stdout, begun.stderr
    assert not cloud.lockfile.exists()
    exit_file = cloud.laptop / "logs" / "nohup_x_latest.exit"
    while not exit_file.exists():
        time.sleep(0.1)
    assert exit_file.read_text() == "2\n"
    again = worker(cloud, *START)  # A start that is sent again does not repeat the run.
    assert (again.returncode, again.stdout) == (0, "")


def test_a_lock_file_that_cannot_be_removed_or_opened_is_one_line_with_the_host(
    cloud: Cloud,
) -> None:
    """Here it is a folder, as root could remove and open another user's file."""
    of_libtpu = f"error: w: rm: cannot remove '{cloud.lockfile}': Is a directory; it belongs to "
    of_run = "error: w: logs/.lock cannot be opened; another user has made it"
    for lock, line in ((cloud.laptop / "logs" / ".lock", of_run), (cloud.lockfile, of_libtpu)):
        lock.mkdir(parents=True)
        done = worker(cloud, *START)
        lock.rmdir()
        assert done.returncode == 2 and done.stderr.startswith(line), done.stderr
        assert done.stderr.count("\n") == 1


def test_the_target_of_a_lock_that_is_a_link_is_not_overwritten(cloud: Cloud) -> None:
    (cloud.laptop / "logs").mkdir()
    (cloud.laptop / "mine").write_text("notes")
    (cloud.laptop / "logs" / ".lock").symlink_to("../mine")
    assert worker(cloud, *START).returncode == 0
    assert (cloud.laptop / "mine").read_text() == "notes"


def test_status_is_one_line_with_the_process_the_time_and_the_last_step(cloud: Cloud) -> None:
    base = cloud.laptop / BASE
    base.parent.mkdir()
    for kind, text in (("pid", "4242"), ("exit", "143"), ("log", "")):
        base.with_suffix(f".{kind}").write_text(text)
    os.utime(base.with_suffix(".pid"), (1_700_000_000, 1_700_000_000))
    os.utime(base.with_suffix(".exit"), (1_700_003_723, 1_700_003_723))
    begin = "w nohup_x_20260101T000000Z exit=143 pid=4242 elapsed=1:02:03 "
    assert worker(cloud, "status").stdout == begin + "(no step yet)\n"
    base.with_suffix(".log").write_text(
        "step=7 loss=0.1 reward_mean=0.5 dt=3.21s\neval step=8 split=test t=9.00s\n"
        "step=99 of a proof\nevaluate x\nerrors are human\nDONE\nSTOPPED here\n"  # of a reward
    )
    assert worker(cloud, "status").stdout == begin + "eval step=8 split=test t=9.00s\n"


@pytest.mark.parametrize("is_python", [True, False])
def test_stop_does_not_end_another_process_that_has_the_number_of_an_old_run(
    cloud: Cloud, is_python: bool, tmp_path: Path
) -> None:
    """A script of another folder, or another program in this one."""
    (cloud.laptop / "logs").mkdir()
    script = tmp_path / "train_grpo.py"
    script.write_text("import time; time.sleep(60)")
    command = [sys.executable, str(script)] if is_python else ["sleep", "60"]
    stranger = subprocess.Popen(command, cwd=None if is_python else cloud.laptop)
    (cloud.laptop / f"{BASE}.pid").write_text(f"{stranger.pid}\n")
    (cloud.laptop / f"{BASE}.log").touch()
    assert f"exit=unknown pid={stranger.pid} " in worker(cloud, "status").stdout
    with (cloud.laptop / "logs" / ".lock").open("w") as file:  # Another run is alive.
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "w has nothing running" in worker(cloud, "stop").stdout
    assert stranger.poll() is None
    stranger.kill()
