"""run_tpu_worker.sh on this machine: exit files, locks, a second start, and stop."""

import fcntl
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cloud import SHORT, Cloud


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    return Cloud(tmp_path, tmp_path / "cache")


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


@pytest.mark.slow
def test_the_exit_file_has_the_exit_code_when_the_log_is_on_a_full_disk(cloud: Cloud) -> None:
    logs = cloud.laptop / "logs"
    logs.mkdir()
    (logs / "nohup_x_20260101T000000Z.log").symlink_to("/dev/full")
    base, cache = "logs/nohup_x_20260101T000000Z", f"JAX_COMPILATION_CACHE_DIR={cloud.cache}"
    settings = [f"{name}={value}" for name, value in SHORT.items()]
    assert worker(cloud, "run", base, sys.prefix, "", cache, *settings).returncode == 0
    assert (logs / "nohup_x_latest.exit").read_text() == "0\n"
    assert len([*cloud.laptop.glob("runs/*/metrics.jsonl")]) == 1
    worker(cloud, "run", base, sys.prefix, "", "STEPS=-1")
    assert (logs / "nohup_x_latest.exit").read_text() == "2\n"


def test_setup_installs_wandb_if_the_settings_ask_for_it(cloud: Cloud) -> None:
    told, env = "w installs wandb", {"PIP_DRY_RUN": "1"}  # pip looks, but installs nothing
    recipe = "recipes/grpo_gsm8k_qwen25_3b_bs128_steps100.yaml"
    assert told in worker(cloud, "setup", sys.prefix, recipe, "", **env).stdout
    for settings in (["", ""], [recipe, "", "WANDB_MODE=disabled"]):
        done = worker(cloud, "setup", sys.prefix, *settings, **env)
        assert done.returncode == 0 and told not in done.stdout


@pytest.mark.slow
def test_setup_installs_the_engine_that_the_settings_ask_for(cloud: Cloud) -> None:
    recipe = "recipes/tunix_qwen3_4b_10steps_sglang.yaml"
    told, env = "w installs sglang-jax", {"PIP_DRY_RUN": "1"}  # pip looks, but installs nothing
    without = worker(cloud, "setup", sys.prefix, "", "", **env)
    assert without.returncode == 0 and told not in without.stdout
    overridden = worker(cloud, "setup", sys.prefix, recipe, "", "ROLLOUT_BACKEND=naive", **env)
    assert overridden.returncode == 0 and told not in overridden.stdout
    for asked in ([recipe, ""], ["", "", "ROLLOUT_BACKEND=sglang_jax"]):
        done = worker(cloud, "setup", sys.prefix, *asked, **env)
        if sys.version_info < (3, 12):
            assert done.returncode == 2 and "has a Python older than 3.12" in done.stderr
        else:
            assert done.returncode == 0 and told in done.stdout


def test_check_prints_the_version_of_sglang_jax_if_it_is_installed(cloud: Cloud) -> None:
    installed = cloud.folder / "packages" / "sglang_jax-0.1.0rc0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Name: sglang-jax\nVersion: 0.1.0rc0\n")
    done = worker(cloud, "check", sys.prefix, PYTHONPATH=str(installed.parent))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^versions python=3\S+ jax=.* sglang-jax=0\.1\.0rc0$", done.stdout, re.M)


def test_a_start_that_is_sent_again_does_not_repeat_a_run_that_has_ended(cloud: Cloud) -> None:
    start = ["start", "x", "20260101T000000Z", sys.prefix, "", "STEPS=-1"]
    assert "w started: process" in worker(cloud, *start).stdout
    exit_file = cloud.laptop / "logs" / "nohup_x_latest.exit"
    while not exit_file.exists():
        time.sleep(0.1)
    assert exit_file.read_text() == "2\n"
    again = worker(cloud, *start)
    assert (again.returncode, again.stdout) == (0, "")


def test_status_is_one_line_with_process_time_step_and_seconds_a_step(cloud: Cloud) -> None:
    base = cloud.laptop / "logs" / "nohup_x_20260101T000000Z"
    base.parent.mkdir()
    for kind, text in (("pid", "4242"), ("steps", "100"), ("exit", "143"), ("log", "")):
        base.with_suffix(f".{kind}").write_text(text)
    os.utime(base.with_suffix(".pid"), (1_700_000_000, 1_700_000_000))
    os.utime(base.with_suffix(".exit"), (1_700_003_723, 1_700_003_723))
    begin = "w nohup_x_20260101T000000Z exit=143 pid=4242 elapsed=1:02:03 "
    assert worker(cloud, "status").stdout == begin + "no step of 100 yet: (nothing logged yet)\n"
    base.with_suffix(".log").write_text(
        "step=6 loss=0.1 reward_mean=0.5 dt=41.00s\nstep=7 loss=0.1 reward_mean=0.5 dt=3.21s\n"
        "eval step=8 split=test t=9.00s\nstep by step\n"
    )
    end = "step 8 of 100, 3.21 s a step: eval step=8 split=test t=9.00s\n"
    assert worker(cloud, "status").stdout == begin + end
    with base.with_suffix(".log").open("a") as log:  # what a reward function may print
        log.write("step=99 of a proof\nevaluate x\nerrors are human\nDONE\nSTOPPED here\n")
    assert worker(cloud, "status").stdout == begin + end


def test_stop_does_not_end_another_process_that_has_the_number_of_an_old_run(cloud: Cloud) -> None:
    (cloud.laptop / "logs").mkdir()
    stranger = subprocess.Popen(["sleep", "60"])
    (cloud.laptop / "logs" / "nohup_x_20260101T000000Z.pid").write_text(f"{stranger.pid}\n")
    (cloud.laptop / "logs" / "nohup_x_20260101T000000Z.log").touch()
    for kind in ("pid", "log"):
        file = cloud.laptop / "logs" / f"nohup_x_20260101T000000Z.{kind}"
        os.utime(file, (1_700_000_000, 1_700_000_000))
    status = worker(cloud, "status").stdout
    assert f"exit=unknown pid={stranger.pid} elapsed=0:00:00 no step yet: " in status
    assert "w has nothing running" in worker(cloud, "stop").stdout
    assert stranger.poll() is None
    stranger.kill()


def test_an_old_libtpu_lockfile_is_removed_and_a_lock_in_use_stops_the_start(cloud: Cloud) -> None:
    start = ["start", "x", "20260101T000000Z", sys.prefix, "", "STEPS=-1"]
    with cloud.lockfile.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        held = worker(cloud, *start)
        assert held.returncode == 2
        assert f"error: w: process {os.getpid()} holds the TPU (" in held.stderr
        assert cloud.lockfile.exists()
    assert worker(cloud, *start).returncode == 0
    assert not cloud.lockfile.exists()


@pytest.mark.parametrize(
    "where, seconds",
    [
        ("forwarded", 100 + 15),
        pytest.param(".env", 80 + 15, marks=pytest.mark.slow),
        pytest.param("--config", 60 + 15, marks=pytest.mark.slow),
        ("default", 30 + 15),
    ],
)
def test_stop_kills_a_run_15_s_after_its_preemption_grace_s(
    cloud: Cloud, where: str, seconds: int
) -> None:
    (cloud.laptop / "train_grpo.py").write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('error: asked to stop', flush=True))\n"
        "print('step=0', flush=True)\n"
        "for _ in range(600):\n"
        "    time.sleep(0.1)\n"
    )
    (cloud.laptop / "slow.yaml").write_text("run: {preemption_grace_s: 60}")
    if where == ".env":
        (cloud.laptop / ".env").write_text("PREEMPTION_GRACE_S=80\n")
    config = "slow.yaml" if where != "default" else ""
    settings = ["PREEMPTION_GRACE_S=100"] if where == "forwarded" else []
    begun = worker(cloud, "start", "x", "20260101T000000Z", sys.prefix, config, *settings)
    assert begun.returncode == 0, begun.stderr
    log = cloud.laptop / "logs" / "nohup_x_latest.log"
    while "step=0" not in log.read_text():
        time.sleep(0.1)

    # The script measures time by its calls of sleep. This sleep is short and notes the seconds.
    slept, sleep = cloud.folder / "slept", cloud.folder / "bin" / "sleep"
    sleep.write_text(f'#!/bin/sh\necho "$1" >>{slept}\nexec /bin/sleep 0.01\n')
    sleep.chmod(0o755)
    path = f"{cloud.folder}/bin:{os.environ['PATH']}"
    asked = [worker(cloud, "stop", "x", PATH=path).stdout for _ in range(2)]
    assert (
        asked
        == [f"w is stopping nohup_x_20260101T000000Z, which ends within {seconds} seconds\n"] * 2
    )
    stopped = worker(cloud, "stopped", "x", PATH=path)
    assert stopped.stdout == "w stopped nohup_x_20260101T000000Z: exit=137\n"
    waited = sum(map(float, slept.read_text().split()))
    assert seconds - 1 < waited < seconds + 10, "it waits up to 10 seconds more for the exit file"
    assert log.read_text().count("asked to stop") == 1, (
        "a second SIGTERM would prevent a checkpoint"
    )


# ---- From the laptop -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_followed_to_its_end_when_a_connection_breaks(
    cloud: Cloud,
) -> None:
    assert cloud.call("sync")[0] == 0
    cloud.faults((0, "run_tpu_worker.sh logs", "fail"))
    running = cloud.start("run", **SHORT)
    while cloud.calls().count("run_tpu_worker.sh logs") < 2:
        assert running.poll() is None, running.stdout.read()
        time.sleep(0.1)
    cloud.faults()
    lines, _ = running.communicate(timeout=120)
    assert running.returncode == 0, lines
    assert re.search("^DONE: steps=1 ", lines, re.M), lines


def test_stop_reports_a_worker_that_is_down_and_stops_the_others(
    cloud: Cloud,
) -> None:
    (cloud.laptop / "train_grpo.py").write_text("import time; time.sleep(600)")
    cloud.commit("a run that ends at SIGTERM")
    assert cloud.call("sync")[0] == 0
    code, lines = cloud.call("--detach", **SHORT)
    assert code == 0, lines
    cloud.faults((1, "run_tpu_worker.sh stop ", "hang"), (1, "run_tpu_worker.sh stopped", "fail"))
    began = time.monotonic()
    code, lines = cloud.call("stop", SSH_TIMEOUT_S="4")
    assert code == 255 and time.monotonic() - began < 15, lines
    assert "error: no answer in 4 seconds (SSH_TIMEOUT_S); is every worker up?" in lines
    assert len(re.findall(r"^worker-0 stopped \S+: exit=143$", lines, re.M)) == 1

    cloud.faults((1, "run_tpu_worker.sh stop ", "again"))
    code, lines = cloud.call("stop")
    assert code == 0, lines
    assert lines.count("worker-1 stopped") == 1 and "worker-0 has nothing running" in lines


@pytest.mark.parametrize(
    "seconds, limit",
    [(1, "SSH_TIMEOUT_S"), (2, "SSH_TIMEOUT_S=1, and 1 more for the run to end")],
)
def test_the_error_names_the_time_limit_in_seconds(cloud: Cloud, seconds: int, limit: str) -> None:
    script = f"SSH_TIMEOUT_S=1; source tools/run_tpu_gcloud.sh; limited {seconds} sleep 60"
    done = subprocess.run(
        ["bash", "-c", script], cwd=cloud.laptop, text=True, capture_output=True, timeout=30
    )
    told = f"error: no answer in {seconds} seconds ({limit}); is every worker up?"
    assert done.returncode == 124 and told in done.stderr
