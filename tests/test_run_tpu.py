"""run_tpu.sh from a laptop to two workers: real git, ssh commands, processes and training on CPU.

Only gcloud is a stand-in (stand_in_gcloud.py): it runs what it is given in a folder per worker.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
KEY = "fake0key1which2nobody3may4see5"
SHORT = {"STEPS": "1", "BATCH_SIZE": "2", "EVAL_EVERY_STEPS": "0", "TRAIN_MICRO_BATCH_SIZE": "16"}


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, text=True, capture_output=True, check=True
    )
    return done.stdout.strip()


class Cloud:
    """A laptop with a clone of this working tree, and a TPU VM of two workers."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.laptop, origin = folder, folder / "grpo", folder / "origin.git"
        left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "wandb", "logs")
        shutil.copytree(REPO, self.laptop, ignore=left_out)
        shutil.copy(REPO / ".gitignore", self.laptop)
        git(folder, "init", "--quiet", "--bare", "--initial-branch=main", str(origin))
        git(self.laptop, "init", "--quiet", "--initial-branch=main")
        git(self.laptop, "remote", "add", "origin", str(origin))
        self.commit("first")
        (folder / "bin").mkdir()
        program = folder / "bin" / "gcloud"
        program.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{REPO}/tests/stand_in_gcloud.py" "$@"\n'
        )
        program.chmod(0o755)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.lockfile = folder / "libtpu_lockfile"
        self.machines()
        self.cache = cache
        for worker in range(2):
            self.home(worker).mkdir()
        (folder / "state").write_text("READY")

    def program(self, name: str, prints: str) -> None:
        """A program on the laptop's PATH that prints a text on stderr, as ssh -V does."""
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/sh\necho '{prints}' | tee /dev/stderr\n")
        file.chmod(0o755)

    def machines(self, *each: dict[str, str]) -> None:
        """What the workers' processes find in their environment, as a TPU VM's find each other."""
        shared = {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": self.address}
        shared |= {"JAX_NUM_PROCESSES": "2", "LIBTPU_LOCKFILE": str(self.lockfile)}
        (self.folder / "environ.json").write_text(json.dumps([shared, *each]))

    def faults(self, *faults: tuple[int, str, str]) -> None:
        (self.folder / "faults.json").write_text(json.dumps(faults))

    def commit(self, message: str, push: bool = True) -> None:
        git(self.laptop, "add", "--all")
        git(self.laptop, "commit", "--quiet", "--message", message)
        if push:
            git(self.laptop, "push", "--quiet", "origin", "HEAD")

    def home(self, worker: int) -> Path:
        return self.folder / f"worker{worker}"

    def clone(self, worker: int) -> Path:
        return self.home(worker) / "grpo"

    def environ(self, **settings: str) -> dict[str, str]:
        shell = {k: os.environ[k] for k in os.environ if k in ("PATH", "HOME", "LANG", "TMPDIR")}
        shell |= {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
        shell["PATH"] = f"{self.folder}/bin:{shell['PATH']}"
        shell |= {"TPU_NAME": "mine", "ZONE": "a-zone", "CLOUD": str(self.folder)}
        shell |= {"TPU_VENV": sys.prefix, "PYTHON": sys.executable, "RETRY_S": "1"}
        return shell | {"JAX_COMPILATION_CACHE_DIR": str(self.cache)} | settings

    def start(self, *words: str, **settings: str) -> subprocess.Popen:
        """./run_tpu.sh, its output and errors in one text."""
        return subprocess.Popen(
            ["./run_tpu.sh", *words], cwd=self.laptop, env=self.environ(**settings), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def call(self, *words: str, **settings: str) -> tuple[int, str]:
        process = self.start(*words, **settings)
        lines, _ = process.communicate(timeout=300)
        return process.returncode, lines

    def calls(self) -> str:
        file = self.folder / "calls"
        return file.read_text() if file.exists() else ""

    def logs(self, kind: str, worker: int, name: str = "train_grpo") -> Path:
        return self.clone(worker) / "logs" / f"nohup_{name}_latest.{kind}"

    def wait_for(self, worker: int, words: str, name: str = "train_grpo") -> None:
        """Until the worker's log has the words."""
        log, deadline = self.logs("log", worker, name), time.monotonic() + 120
        while not (log.exists() and re.search(words, log.read_text(), re.M)):
            assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
            time.sleep(0.2)

    def pid(self, worker: int, name: str = "train_grpo") -> int:
        return int(self.logs("pid", worker, name).read_text())

    def exits(self) -> list[str]:
        return [self.logs("exit", worker).read_text() for worker in range(2)]


def last_line(lines: str) -> str:
    """Of what run_tpu.sh says; the stand-in for gcloud ends each call with a notice."""
    return lines.splitlines()[-1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cloud(tmp_path: Path, cache: Path):
    made = Cloud(tmp_path, cache)
    yield made
    for file in tmp_path.glob("worker*/grpo/logs/*Z.pid"):  # of a test that failed
        try:
            os.kill(int(file.read_text()), signal.SIGKILL)
        except (ProcessLookupError, ValueError):
            continue


# ---- All goes well -------------------------------------------------------------------------------


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
    for worker in range(2):
        wanted = rf"^worker-{worker} check: \w.*, Linux \d\S+, Python 3\.\d+\.\d+$"
        assert re.search(wanted, lines, re.M), "host name, OS, Python"

    prompt = """It's "quoted"; $HOME `date` \\ & <answer>\nsecond line"""
    code, lines = cloud.call(
        "run", "--ssh-flag=-o ConnectTimeout=9", **SHORT, SYSTEM_PROMPT=prompt,
        UNRELATED="elsewhere",
    )  # fmt: skip
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
    assert re.search(r"^step=0 loss=", lines, re.M), "worker 0's log is followed"
    saved = [*cloud.clone(0).glob("runs/*/config.yaml")]
    assert len(saved) == 1 and not (cloud.clone(1) / "runs").exists(), "process 0 alone writes"
    settings = subprocess.run(
        [sys.executable, "-c", "import config, sys; c = config.Config.from_env({}, sys.argv[1]); "
         "print(c.system_prompt, c.require_jax_process_count)", saved[0]],
        cwd=REPO, text=True, capture_output=True,
    )  # fmt: skip
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
    assert lines.count("worker-1 started") == 1, "sent twice by gcloud, started once"
    first, head = cloud.pid(0, "long"), git(cloud.clone(0), "rev-parse", "HEAD")
    cloud.wait_for(1, "^step=1 ", "long")

    (cloud.laptop / "README.md").write_text("changed")
    cloud.commit("second")
    code, lines = cloud.call("--name", "another", **SHORT)
    assert code == 2
    assert re.fullmatch(r"error: worker-[01]: a run is alive; .* stop ends it", last_line(lines))
    assert (cloud.pid(0, "long"), git(cloud.clone(0), "rev-parse", "HEAD")) == (first, head)
    code, lines = cloud.call("status")
    wanted = r"^worker-(\d) nohup_long_\S+Z exit=running pid=(\d+) elapsed=0:0\d:\d\d "
    wanted += r"step (\d+) of 5000, (\d+\.\d\d) s a step: step=(\d+) loss=.* dt=(\S+)s$"
    found = {int(line[0]): line[1:] for line in re.findall(wanted, lines, re.M)}
    assert code == 0 and sorted(found) == [0, 1], lines
    for worker, (pid, step, seconds, step_of_line, dt) in found.items():
        assert int(pid) == cloud.pid(worker, "long")
        assert (step, seconds) == (step_of_line, dt)

    began = time.monotonic()
    code, lines = cloud.call("stop")
    assert time.monotonic() - began < 20
    assert code == 0 and len(re.findall(r"stopped nohup_long_\w+: exit=143$", lines, re.M)) == 2
    for worker in range(2):
        assert cloud.logs("exit", worker, "long").read_text() == "143\n"
        with pytest.raises(ProcessLookupError):
            os.kill(cloud.pid(worker, "long"), 0)
        assert re.search("^STOPPED: SIGTERM ", cloud.logs("log", worker, "long").read_text(), re.M)


@pytest.mark.slow
def test_a_preempted_tpu_vm_is_made_anew_and_the_run_started_again(cloud: Cloud) -> None:
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
    assert lines.count(told) == 1, "once, however often it asks"
    assert "TPU VM mine is PREEMPTED" in lines and "DONE: steps=3" in lines
    assert lines.count("no TPU VM to be had") == 1, "once, however often it asks"
    calls = [json.loads(call) for call in cloud.calls().splitlines()]
    changed = [call for call in calls if call[3] in ("create", "delete")]
    assert [call[3] for call in changed] == ["delete"] + ["create"] * 4
    assert "--spot" in changed[1] and "--version=v2-alpha-tpuv6e" in changed[1]
    starts = [call for call in calls if "run_tpu_worker.sh start " in call[-2]]
    assert ["RESUME=auto" in start[-2] for start in starts] == [False, True]
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


def test_only_a_preempted_tpu_vm_is_made_anew(cloud: Cloud) -> None:
    def restart() -> tuple[int, str]:
        (cloud.folder / "calls").unlink(missing_ok=True)
        return cloud.call("--restart", **SHORT, TPU_TYPE="v6e-8", LERNING="1")

    program = cloud.folder / "bin" / "gcloud"
    works = program.read_text()
    program.write_text("#!/bin/sh\necho Reauthentication required >&2; exit 1\n")
    code, lines = restart()
    assert code == 1 and lines.count("Reauthentication required") == 1
    assert lines.count("gcloud does not tell the state of TPU VM mine; asking again\n") == 1
    for said in ("ERROR: no login", "WARNING: a login may be NOT_FOUND"):
        program.write_text(f"#!/bin/sh\n[ $4 = describe ] || touch made; echo {said} >&2; exit 1\n")
        assert restart()[0] == 1 and not (cloud.laptop / "made").exists(), said
    gone = "if [ $4 = describe ]; then echo ERROR: NOT_FOUND; else echo WARNING: capacity; fi >&2"
    program.write_text(f"#!/bin/sh\n{gone}; echo ERROR: PERMISSION_DENIED >&2; exit 1\n")
    code, lines = restart()
    assert code == 1 and lines.count("ERROR: PERMISSION_DENIED") == 1, "no capacity to wait for"
    program.write_text(works)
    cloud.faults((0, "run_tpu_worker.sh start", "fail"))
    code, lines = restart()
    assert code == 255, lines
    assert not re.search('"(create|delete)"', cloud.calls())


# ---- What the workers get ------------------------------------------------------------------------


def test_settings_of_libraries_are_forwarded_and_secrets_are_not(cloud: Cloud) -> None:
    (cloud.laptop / "train_grpo.py").write_text(
        "import os, pathlib\n"
        "print('names', *sorted(n for n in os.environ if n[:3] in ('HF_', 'WAN', 'TOK', 'STE')))\n"
        "print('transfer', os.environ['HF_HUB_ENABLE_HF_TRANSFER'])\n"
        "for pid in (os.getpid(), os.getppid()):\n"
        "    print('words', pathlib.Path(f'/proc/{pid}/cmdline').read_text())\n"
    )
    cloud.commit("a run that prints what it gets")
    code, lines = cloud.call(
        "run", STEPS="3", HF_HUB_ENABLE_HF_TRANSFER="1", TOKENIZERS_PARALLELISM="false",
        WANDB_ENTITY="us", HF_TOKEN=KEY, HF_API_KEY=KEY, HF_SECRET=KEY, WANDB_API_KEY=KEY,
        WANDB_DIR="elsewhere",
    )  # fmt: skip
    assert code == 0, lines
    names = "names HF_HUB_ENABLE_HF_TRANSFER STEPS TOKENIZERS_PARALLELISM WANDB_ENTITY\n"
    for worker in range(2):
        log = cloud.logs("log", worker).read_text()
        assert names in log and "transfer 1\n" in log
        assert all(KEY not in file.read_text() for file in cloud.clone(worker).glob("logs/*"))
    assert KEY not in lines and KEY not in cloud.calls()


def test_a_path_of_this_machine_is_forwarded_with_a_warning(cloud: Cloud) -> None:
    home, there = str(cloud.folder / "me"), str(cloud.laptop / "rewards.py")
    code, lines = cloud.call(
        "run", "--dry-run", HOME=home, MODEL_PATH=f"{home}/model", REWARD_FN=f"{there}:mine",
        HF_HOME="/nowhere/else", OUTPUT_DIR="runs/here", CHECKPOINT_DIR="gs://bucket/run",
        JAX_COMPILATION_CACHE_DIR="",
    )  # fmt: skip
    assert code == 0 and f"MODEL_PATH={home}/model" in lines, lines
    end = "a path of this machine; the workers need the same path"
    assert [line for line in lines.splitlines() if line.startswith("warning: ")] == [
        f"warning: MODEL_PATH has {home}/model, {end}",
        f"warning: REWARD_FN has {there}, {end}",
    ]


def test_the_user_of_the_login_is_named_to_ssh_and_scp_alone(cloud: Cloud) -> None:
    (cloud.laptop / ".env").write_text(f"WANDB_API_KEY={KEY}\n")
    assert cloud.call("sync", "--user", "me")[0] == 0
    assert cloud.call("env", "--user=me")[0] == 0
    assert "no run has been started here" in cloud.call("status", TPU_USER="me")[1]
    calls = [json.loads(call)[3:] for call in cloud.calls().splitlines()]
    assert {call[1] for call in calls if call[0] == "ssh"} == {"me@mine"}
    assert [call[2] for call in calls if call[0] == "scp"] == ["me@mine:grpo/.env"]


@pytest.mark.parametrize(
    "ssh, system, keepalives",
    [
        ("OpenSSH_9.6p1, OpenSSL 3.0.13", "Darwin", 1),
        ("plink: Release 0.80", "Linux", 0),
        ("OpenSSH_for_Windows_9.5p1", "MINGW64_NT-10.0", 0),  # gcloud brings plink there
    ],
)
def test_options_of_openssh_are_for_openssh_alone(
    cloud: Cloud, ssh: str, system: str, keepalives: int
) -> None:
    cloud.program("ssh", ssh)
    cloud.program("uname", system)
    (cloud.laptop / ".env").write_text(f"WANDB_API_KEY={KEY}\n")
    code, lines = cloud.call("env", "--dry-run", "--ssh-flag=-v")
    assert code == 0, lines
    assert [lines.count(f"--{kind}-flag=-v ") for kind in ("ssh", "scp")] == [2, 1], lines
    found = [lines.count(f"--{kind}-flag=-oServerAliveInterval=15") for kind in ("ssh", "scp")]
    assert found == [2 * keepalives, keepalives], lines
    assert keepalives or "-o" not in lines, lines


# ---- A worker fails ------------------------------------------------------------------------------


def test_a_worker_killed_in_mid_step_takes_the_run_down_within_a_minute(cloud: Cloud) -> None:
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


def test_a_worker_that_never_joins_is_told_within_the_limit(cloud: Cloud) -> None:
    assert cloud.call("sync")[0] == 0
    cloud.machines({}, {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"})
    code, lines = cloud.call("run", **SHORT, INIT_TIMEOUT_S="8")
    assert code == 1, lines
    assert "error: not all processes have joined in INIT_TIMEOUT_S=8 seconds" in lines
    assert cloud.exits() == ["1\n", "1\n"]


@pytest.mark.parametrize("kind", [pytest.param("hang", marks=pytest.mark.slow), "fail", "mistake"])
def test_a_worker_that_is_down_stops_the_start_everywhere(cloud: Cloud, kind: str) -> None:
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
    assert code != 0 and "not every worker of mine has started; ending those that have" in lines
    assert "worker-0 stopped" in lines
    cause |= {"hang": "no answer in 12 seconds", "fail": "not every worker of mine has started"}
    assert last_line(lines).startswith(f"error: {cause[kind]}")
    with pytest.raises(ProcessLookupError):
        os.kill(cloud.pid(0), 0)


# ---- Mistakes ------------------------------------------------------------------------------------


def test_only_what_is_pushed_and_the_same_everywhere_is_run(cloud: Cloud) -> None:
    readme = cloud.laptop / "README.md"
    readme.write_text("changed")
    code, lines = cloud.call("run", **SHORT)
    assert code == 2 and "error: uncommitted changes in README.md; commit and push" in lines
    cloud.commit("second", push=False)
    code, lines = cloud.call("sync")
    assert code == 2
    assert re.search(r"^error: HEAD \(\w{40}\) is on no branch of origin: git push", lines, re.M)
    assert cloud.call("sync", "--ref=HEAD~1")[0] == 0
    assert cloud.call("sync", "--ref", "nowhere")[0] == 2
    git(cloud.laptop, "push", "--quiet", "origin", "HEAD")

    hook = cloud.clone(1) / ".git" / "hooks" / "post-checkout"  # its checkout goes astray
    hook.write_text("#!/bin/sh\nGIT_DIR=.git git update-ref --no-deref HEAD HEAD~1\n")
    hook.chmod(0o755)
    code, lines = cloud.call("run", **SHORT)
    assert code == 2 and "the workers' HEADs above are not all" in lines, lines
    assert len(set(re.findall(r"HEAD=(\w{40})$", lines, re.M))) == 2
    hook.unlink()

    (cloud.clone(0) / "loss.py").write_text("mine")
    code, lines = cloud.call("sync")
    assert code == 2
    assert "error: worker-0: these files differ there: loss.py; ./run_tpu.sh sync --force" in lines
    (cloud.laptop / ".env").write_text(f"KEY={KEY}\n")
    assert git(cloud.laptop, "status", "--porcelain") == "", "keys are not for git"
    git(cloud.laptop, "add", "--force", ".env")
    code, lines = cloud.call("sync", "--ref=HEAD")
    assert code == 2 and ".env is in git" in lines


def test_sync_force_stashes_what_differs_on_a_worker_and_names_it(cloud: Cloud) -> None:
    assert cloud.call("sync")[0] == 0
    for name in ("new.py", "runs/kept.txt"):
        (cloud.laptop / name).parent.mkdir(exist_ok=True)
        (cloud.laptop / name).write_text("of the commit")
    git(cloud.laptop, "add", "--force", "runs/kept.txt")
    cloud.commit("two new files, one of them in a folder that git ignores")
    clone = cloud.clone(1)
    (clone / "runs").mkdir()
    for name in ("loss.py", "new.py", "runs/kept.txt", "notes.txt"):
        (clone / name).write_text("of the worker")
    (clone / "data.py").unlink()
    code, lines = cloud.call("sync")
    names = "data.py loss.py new.py runs/kept.txt"
    assert code == 2 and last_line(lines) == (
        f"error: worker-1: these files differ there: {names}; "
        "./run_tpu.sh sync --force stashes them"
    )
    assert (clone / "new.py").read_text() == "of the worker"

    code, lines = cloud.call("sync", "--force")
    assert code == 0, lines
    assert f"worker-1 has put into git stash: {names}\n" in lines
    assert "worker-0 has put into" not in lines
    assert (clone / "new.py").read_text() == "of the commit" and (clone / "data.py").exists()
    assert (clone / "notes.txt").read_text() == "of the worker", "in nobody's way"
    stashed = ["loss.py", "new.py", "runs/kept.txt"]
    assert [git(clone, "show", f"stash@{{0}}:{name}") for name in stashed] == ["of the worker"] * 3
    assert cloud.call("sync", "--force")[0] == 0
    assert len(git(clone, "stash", "list").splitlines()) == 1


@pytest.mark.parametrize(
    "words, settings, message",
    [
        (["env"], {}, ".env is not here"),
        (["start"], {}, "there is no verb start"),
        (["--tpu", "x", "stop", "run"], {}, "one verb, not stop and run"),
        (["create"], {}, "set TPU_TYPE"),
        (["run", "--worker=0,2"], {}, "--worker is all or the number of one"),
        (["run", "-f"], {}, "-f is a flag of logs"),
        (["run", "--force"], {}, "--force is a flag of sync"),
        (["run", "--steps=3"], {}, "there is no flag --steps=3"),
        (["run", "--config"], {}, "--config needs a value"),
        (["run", "--config=recipes/none.yaml"], {}, "is no file of this repository"),
        (["run"], {"LERNING_RATE": "1"}, "unknown setting LERNING_RATE; did you mean LEARN"),
        (["run"], {"NUM_PRE_Q": "eight"}, "NUM_PRE_Q='eight' is not a whole number"),
        (["run"], {"TPU_NAME": ""}, "which TPU VM?"),
        (["run", "--restart"], {}, "--restart has to know TPU_TYPE"),
        (["run", "--name=a/b"], {}, "--name takes letters"),
        (["run", "--user=a b"], {}, "--user takes letters"),
        (["sync"], {"REPO_URL": f"https://me:{KEY}@host/repo"}, "has a user or a password in it"),
    ],
)
def test_a_mistake_costs_one_line(
    cloud: Cloud, words: list[str], settings: dict[str, str], message: str
) -> None:
    code, lines = cloud.call(*words, **settings)
    assert code == 2, lines
    assert lines.splitlines()[-1].startswith("error: ") and message in lines
    assert "Traceback" not in lines and KEY not in lines + cloud.calls()


def test_a_dry_run_prints_commands_that_a_shell_takes_and_runs_none(cloud: Cloud) -> None:
    prompt = 'it\'s "so"'
    code, lines = cloud.call("run", "--dry-run", SYSTEM_PROMPT=prompt, TPU_GCLOUD="alpha")
    assert code == 0, lines
    assert not cloud.calls() and not [*cloud.home(0).iterdir()]
    gcloud = [line for line in lines.splitlines() if line.startswith("gcloud")]
    assert [line.split()[5] for line in gcloud] == ["describe", "ssh", "ssh", "ssh", "ssh"]
    assert all(line.startswith("gcloud alpha compute tpus tpu-vm ") for line in gcloud)
    for line in gcloud:
        assert subprocess.run(["bash", "-n", "-c", line]).returncode == 0
    command = next(w for w in words_of(gcloud[2]) if w.startswith("--command="))
    assert f"SYSTEM_PROMPT={prompt}" in words_of(command.partition("&& ")[2])
    again = cloud.call("run", "--dry-run", "--restart", TPU_GCLOUD="alpha", TPU_TYPE="v6e-8")
    assert again[0] == 0 and again[1].count("gcloud alpha compute tpus tpu-vm ") == 5
    assert "REQUIRE_JAX_PROCESS_COUNT" not in lines, "nobody was asked how many there are"


def words_of(command: str) -> list[str]:
    """As bash takes them apart."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True)
    return done.stdout.decode().split("\0")[:-1]


def test_the_help_fits_one_screen(cloud: Cloud) -> None:
    code, lines = cloud.call("--help")
    assert code == 0
    assert len(lines.splitlines()) <= 30 and max(map(len, lines.splitlines())) <= 100
