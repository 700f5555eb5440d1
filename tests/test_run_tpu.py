"""A run with run_tpu.sh, from a laptop to two workers, that succeeds, is stopped, or fails.

Git, the commands, the processes and the training on CPUs are real. Only gcloud is a stand-in
(stand_in_gcloud.py), which runs the commands in one folder for each worker.
"""

import getpass
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from cloud import KEY, REPO, SHORT, Cloud, git, last_line

# ---- The run succeeds ----------------------------------------------------------------------------


def test_from_setup_to_stop_two_workers_train_one_model(cloud: Cloud) -> None:
    code, lines = cloud.call("setup")
    assert code == 0, lines
    head = git(cloud.laptop, "rev-parse", "HEAD")
    for worker in range(2):
        assert f"worker-{worker} HEAD={head}" in lines
        assert re.search(rf"^worker-{worker} set up: Python 3\.1\d.* jax \d", lines, re.M), lines

    (cloud.laptop / ".env").write_text(f"# keys\nWANDB_API_KEY={KEY}\nexport HF_TOKEN='ab c'\n")
    code, lines = cloud.call("env")
    assert code == 0, lines
    for worker in range(2):
        assert f"worker-{worker} .env WANDB_API_KEY: 30 characters" in lines
        assert f"worker-{worker} .env HF_TOKEN: 4 characters" in lines
        assert (cloud.clone(worker) / ".env").stat().st_mode & 0o777 == 0o600

    code, lines = cloud.call("check")
    assert code == 0, lines
    for worker in range(2):
        assert f"backend=cpu process={worker}/2 device_count=2 local_device_count=1" in lines
    assert lines.count("versions python=3.") == 2
    me = getpass.getuser()
    for worker in range(2):
        wanted = rf"^worker-{worker} check: {me}, \w.*, Linux \d\S+, Python 3\.\d+\.\d+$"
        assert re.search(wanted, lines, re.M), "the host name, the user, the system and Python"

    prompt = """It's "quoted"; $HOME `date` \\ & <answer>\nsecond line"""
    code, lines = cloud.call(
        "run",
        "--ssh-flag=-o ConnectTimeout=9",
        **SHORT,
        SYSTEM_PROMPT=prompt,
        UNRELATED="elsewhere",
    )
    assert code == 0, lines
    assert len(re.findall(r"^worker-\d nohup_\S+ exit=0 .*: DONE: steps=1", lines, re.M)) == 2
    assert cloud.exits() == ["0\n", "0\n"]
    for worker in range(2):
        log = cloud.logs("log", worker)
        assert re.fullmatch(r"nohup_train_grpo_\d{8}T\d{6}Z\.log", log.resolve().name)
        text = log.read_text()
        assert f"process={worker}/2" in text
        assert re.search(r"^DONE: steps=1 elapsed_sec=\d+\.\d{3}$", text, re.M)
        assert KEY not in text
    assert re.search(r"^step=0 loss=", lines, re.M), "the log of worker 0 is followed"
    saved = [*cloud.clone(0).glob("runs/*/config.yaml")]
    assert len(saved) == 1 and not (cloud.clone(1) / "runs").exists(), "only process 0 writes"
    settings = subprocess.run(
        [
            sys.executable,
            "-c",
            "import config, sys; c = config.Config.from_env({}, sys.argv[1]); "
            "print(c.system_prompt, c.require_jax_process_count)",
            saved[0],
        ],
        cwd=REPO,
        text=True,
        capture_output=True,
    )
    assert settings.stdout == f"{prompt} 2\n", settings.stderr
    assert "UNRELATED" not in cloud.calls() and "elsewhere" not in cloud.calls()
    assert "--ssh-flag=-o ConnectTimeout=9" in cloud.calls()

    code, lines = cloud.call("status")
    assert (
        code == 0 and len(re.findall(r"^worker-\d nohup_\S+Z exit=0 .*: DONE: ", lines, re.M)) == 2
    )
    code, lines = cloud.call("logs", "--worker=1")
    assert code == 0 and "process=1/2" in lines and "process=0/2" not in lines
    code, lines = cloud.call("stop")
    assert code == 0 and lines.count("has nothing running") == 2

    told = [*cloud.folder.glob("worker*/grpo/logs/*"), *saved[0].parent.rglob("*")]
    told = [file for file in told if file.is_file()] + [cloud.folder / "calls"]
    assert all(KEY.encode() not in file.read_bytes() for file in told)


def test_a_second_start_is_refused_and_stop_ends_the_first(cloud: Cloud) -> None:
    assert cloud.call("sync")[0] == 0
    cloud.faults((1, "run_tpu_worker.sh start", "again"))
    code, lines = cloud.call("--detach", "--name=long", **SHORT | {"STEPS": "5000"})
    assert code == 0, lines
    assert lines.count("worker-1 started") == 1, (
        "gcloud sent the command twice, and one run started"
    )
    first, head = cloud.pid(0, "long"), git(cloud.clone(0), "rev-parse", "HEAD")
    cloud.wait_for(1, "^step=1 ", "long")

    (cloud.laptop / "README.md").write_text("changed")
    cloud.commit("second")
    code, lines = cloud.call("--name", "another", **SHORT)
    assert code == 2
    assert re.fullmatch(
        r"error: worker-[01]: a run is still alive; end it .* stop", last_line(lines)
    )
    assert (cloud.pid(0, "long"), git(cloud.clone(0), "rev-parse", "HEAD")) == (first, head)
    code, lines = cloud.call("status")
    wanted = r"^worker-(\d) nohup_long_\S+Z exit=running pid=(\d+) elapsed=0:0\d:\d\d "
    wanted += (
        r"step (\d+) of 5000, (\d+\.\d\d) s a step: step=(\d+) loss=.* dt=(\S+)s(?: left=\S+)?$"
    )
    found = {int(line[0]): line[1:] for line in re.findall(wanted, lines, re.M)}
    assert code == 0 and sorted(found) == [0, 1], lines
    for worker, (pid, step, seconds, step_of_line, dt) in found.items():
        assert int(pid) == cloud.pid(worker, "long")
        assert (int(step), seconds) == (int(step_of_line) + 1, dt)

    began = time.monotonic()
    code, lines = cloud.call("stop")
    assert time.monotonic() - began < 20
    stopped = re.findall(r"stopped nohup_long_\w+: exit=143$", lines, re.M)
    # Both processes end together, so a worker may have ended before it is told to.
    ended = re.findall(r"^worker-1 has nothing running$", lines, re.M)
    assert code == 0 and stopped and len(stopped + ended) == 2, lines
    for worker in range(2):
        assert cloud.logs("exit", worker, "long").read_text() == "143\n"
        with pytest.raises(ProcessLookupError):
            os.kill(cloud.pid(worker, "long"), 0)
        assert re.search("^STOPPED: SIGTERM ", cloud.logs("log", worker, "long").read_text(), re.M)


@pytest.mark.slow
def test_a_preempted_tpu_vm_is_created_again_and_the_run_starts_again(cloud: Cloud) -> None:
    (cloud.folder / "state").write_text("CREATING")
    running = cloud.start("--restart", **SHORT | {"STEPS": "3"}, TPU_TYPE="v6e-8", TPU_SPOT="1")
    while cloud.calls().count('"describe"') < 3:
        time.sleep(0.1)
    (cloud.folder / "state").write_text("READY")
    cloud.wait_for(0, "^backend=")
    for worker in range(2):
        os.kill(cloud.pid(worker), signal.SIGKILL)
    (cloud.folder / "scarce").write_text("3")
    (cloud.folder / "state").write_text("PREEMPTED")
    lines, _ = running.communicate(timeout=300)
    assert running.returncode == 0, lines
    told = "TPU VM mine is CREATING; waiting for it to be READY\n"
    assert lines.count(told) == 1, "the state is printed once"
    assert "TPU VM mine is PREEMPTED" in lines and "DONE: steps=3" in lines
    assert lines.count("there is no capacity") == 1, "it is printed once"
    calls = [json.loads(call) for call in cloud.calls().splitlines()]
    changed = [call for call in calls if call[3] in ("create", "delete")]
    assert [call[3] for call in changed] == ["delete"] + ["create"] * 4
    assert "--spot" in changed[1] and "--version=v2-alpha-tpuv6e" in changed[1]
    commands = [word for call in calls for word in call if word.startswith("--command=")]
    starts = [command for command in commands if "run_tpu_worker.sh start " in command]
    assert ["RESUME=auto" in start for start in starts] == [False, True]
    assert cloud.exits() == ["0\n", "0\n"]


def test_a_mistake_in_the_setup_of_a_new_tpu_vm_ends_restart(cloud: Cloud) -> None:
    (cloud.folder / "state").unlink()
    for worker in range(2):
        cloud.home(worker).rmdir()
    cloud.faults((0, "setup", "mistake"), (1, "setup", "mistake"))
    running = cloud.start("--restart", **SHORT, TPU_TYPE="v6e-8")
    try:
        lines, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 2, lines
    assert "error: worker-0: this will not do" in lines
    assert sum("setup" in call for call in cloud.calls().splitlines()) == 1


@pytest.mark.slow
def test_only_a_preempted_tpu_vm_is_created_again(cloud: Cloud) -> None:
    def restart() -> tuple[int, str]:
        (cloud.folder / "calls").unlink(missing_ok=True)
        return cloud.call("--restart", **SHORT, TPU_TYPE="v6e-8", LERNING="1")

    program = cloud.folder / "bin" / "gcloud"
    works = program.read_text()
    program.write_text("#!/bin/sh\necho Reauthentication required >&2; exit 1\n")
    code, lines = restart()
    assert code == 1 and lines.count("Reauthentication required") == 1
    assert lines.count("gcloud cannot describe TPU VM mine; trying again\n") == 1
    for said in ("ERROR: no login", "WARNING: a login may be NOT_FOUND"):
        program.write_text(f"#!/bin/sh\n[ $4 = describe ] || touch made; echo {said} >&2; exit 1\n")
        assert restart()[0] == 1 and not (cloud.laptop / "made").exists(), said
    gone = "if [ $4 = describe ]; then echo ERROR: NOT_FOUND; else echo WARNING: capacity; fi >&2"
    program.write_text(f"#!/bin/sh\n{gone}; echo ERROR: PERMISSION_DENIED >&2; exit 1\n")
    code, lines = restart()
    assert code == 1 and lines.count("ERROR: PERMISSION_DENIED") == 1, (
        "it does not wait for capacity"
    )
    program.write_text(works)
    cloud.faults((0, "run_tpu_worker.sh start", "fail"))
    code, lines = restart()
    assert code == 255, lines
    assert not re.search('"(create|delete)"', cloud.calls())


# ---- A worker fails ------------------------------------------------------------------------------


def test_a_run_ends_within_a_minute_after_one_worker_is_killed(cloud: Cloud) -> None:
    assert cloud.call("sync")[0] == 0
    running = cloud.start("run", **SHORT | {"STEPS": "5000"})
    cloud.wait_for(1, "^step=1 ")
    os.kill(cloud.pid(1), signal.SIGKILL)
    killed = time.monotonic()
    lines, _ = running.communicate(timeout=120)
    assert time.monotonic() - killed < 60
    assert running.returncode not in (0, 2), lines
    assert cloud.logs("exit", 1).read_text() == "137\n"
    assert int(cloud.logs("exit", 0).read_text()) == running.returncode
    assert re.search("^error: (another process is gone|exit code 134: jax ended)", lines, re.M)
    assert re.search(r"^worker-1 nohup_\S+ exit=137 .*: error: exit code 137: ", lines, re.M), lines
    assert "error: exit code 137" in cloud.logs("log", 1).read_text()


@pytest.mark.slow
def test_a_worker_that_never_joins_is_reported_within_the_time_limit(cloud: Cloud) -> None:
    assert cloud.call("sync")[0] == 0
    cloud.machines({}, {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"})
    code, lines = cloud.call("run", **SHORT, INIT_TIMEOUT_S="8")
    assert code == 1, lines
    assert "error: not all processes have joined in INIT_TIMEOUT_S=8 seconds" in lines
    assert cloud.exits() == ["1\n", "1\n"]


@pytest.mark.parametrize("kind", [pytest.param("hang", marks=pytest.mark.slow), "fail", "mistake"])
def test_a_worker_that_is_down_stops_the_start_on_all_workers(cloud: Cloud, kind: str) -> None:
    cloud.faults((1, "git", kind))
    began = time.monotonic()
    code, lines = cloud.call("run", **SHORT, SSH_TIMEOUT_S="6")
    assert code == {"hang": 124, "fail": 255, "mistake": 2}[kind] and time.monotonic() - began < 15
    assert ("no answer in 6 seconds (SSH_TIMEOUT_S)" in lines) == (kind == "hang")
    assert "worker-0 HEAD=" in lines and "not every worker of mine has the commit" in lines
    cause = {"hang": "no answer in 6 seconds", "fail": "not every worker of mine has the commit"}
    cause["mistake"] = "worker-1: this will not do"
    assert last_line(lines).startswith(f"error: {cause[kind]}")
    assert not (cloud.clone(0) / "logs").exists()

    cloud.faults((1, "run_tpu_worker.sh start", kind))
    code, lines = cloud.call("run", **SHORT, SSH_TIMEOUT_S="12")
    assert (
        code != 0 and "not every worker of mine has started the run; stopping the workers" in lines
    )
    assert "worker-0 stopped" in lines
    cause |= {
        "hang": "no answer in 12 seconds",
        "fail": "not every worker of mine has started the run",
    }
    assert last_line(lines).startswith(f"error: {cause[kind]}")
    with pytest.raises(ProcessLookupError):
        os.kill(cloud.pid(0), 0)
