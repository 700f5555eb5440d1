"""run_tpu.sh, from a laptop to two workers: what it sends, how a run succeeds, is stopped or fails.

Git, the commands and the processes are real, and so is the training of two tests. Only gcloud is a
stand-in (stand_in_gcloud.py), which runs the commands in one folder for each worker.
"""

import dataclasses
import getpass
import json
import os
import re
import signal
import subprocess
import time

import pytest
import yaml
from cloud import KEY, REPO, SHORT, Cloud, git, write_program
from runs import few_examples

from config import Config
from infra.settings import yaml_name

# In place of train_grpo.py: two steps of a run that ends at SIGTERM only, as a run does.
ENDLESS = """
import signal, sys, time
def stop(number, frame):
    print("STOPPED: SIGTERM steps=2 saved_step=2", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("step=0 loss=0.1 dt=9.00s\\nstep=1 loss=0.1 dt=1.00s", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Cloud:
    """A cloud for tests that change nothing on the workers."""
    return Cloud(tmp_path_factory.mktemp("cloud"), {})


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
    assert code == 0 and lines.count("versions python=3.") == 2, lines
    for worker in range(2):
        assert f"backend=cpu process={worker}/2 device_count=2 local_device_count=1" in lines
        wanted = rf"^worker-{worker} check: {getpass.getuser()}, \w.*, Linux \d\S+, Python 3\.\d+"
        assert re.search(wanted, lines, re.M), "the user, the system and Python"

    prompt = """It's "quoted"; $HOME `date` \\ & <answer>\nsecond line"""
    settings = SHORT | {"SYSTEM_PROMPT": prompt, "DATASET": str(few_examples())}
    code, lines = cloud.call("--ssh-flag=-o ConnectTimeout=9", **settings)
    assert code == 0, lines
    assert len(re.findall(r"^worker-\d nohup_\S+ exit=0 .* DONE: steps=1", lines, re.M)) == 2
    assert re.search(r"^step=0 loss=", lines, re.M), "the log of worker 0 is followed"
    assert "--ssh-flag=-o ConnectTimeout=9" in cloud.calls()
    for worker in range(2):
        assert cloud.logs("exit", worker).read_text() == "0\n"
        log = cloud.logs("log", worker)
        assert re.fullmatch(r"nohup_train_grpo_\d{8}T\d{6}Z\.log", log.resolve().name)
        assert f"process={worker}/2" in log.read_text()
    [saved] = cloud.clone(0).glob("runs/*/config.yaml")
    assert not (cloud.clone(1) / "runs").exists(), "only process 0 writes"
    settings = yaml.safe_load(saved.read_text())
    assert settings["data.system_prompt"] == prompt
    assert settings["run.require_jax_process_count"] == 2

    code, lines = cloud.call("logs", "--worker=1")
    assert code == 0 and "process=1/2" in lines and "process=0/2" not in lines
    code, lines = cloud.call("stop")
    assert code == 0 and lines.count("has nothing running") == 2
    told = [*cloud.folder.glob("worker*/grpo/logs/*"), *saved.parent.rglob("*")]
    told = [file for file in told if file.is_file()] + [cloud.folder / "calls"]
    assert all(KEY.encode() not in file.read_bytes() for file in told)


def test_a_second_start_is_refused_and_stop_ends_the_first(cloud: Cloud) -> None:
    cloud.train_with(ENDLESS)
    assert cloud.call("sync")[0] == 0
    cloud.faults((1, "run_tpu_worker.sh start", "again"))
    code, lines = cloud.call("--detach", "--name=long", **SHORT)
    assert code == 0, lines
    assert lines.count("worker-1 started") == 1, "gcloud sent the command twice: one run started"
    first, head = cloud.pid(0, "long"), git(cloud.clone(0), "rev-parse", "HEAD")
    cloud.wait_for(1, "^step=1 ", "long")

    (cloud.laptop / "README.md").write_text("changed")
    cloud.commit("second")
    code, lines = cloud.call("--name", "another", **SHORT)
    assert code == 2 and re.search("^error: worker-[01]: a run is still alive", lines, re.M)
    assert (cloud.pid(0, "long"), git(cloud.clone(0), "rev-parse", "HEAD")) == (first, head)
    code, lines = cloud.call("status")
    wanted = r"^worker-(\d) nohup_long_\S+Z exit=running pid=(\d+) elapsed=0:0\d:\d\d step=1 loss="
    found = {int(worker): int(pid) for worker, pid in re.findall(wanted, lines, re.M)}
    assert code == 0 and found == {worker: cloud.pid(worker, "long") for worker in range(2)}, lines

    cloud.faults((1, "run_tpu_worker.sh stop", "fail"))
    code, lines = cloud.call("stop")
    assert code == 255, "a worker that is down is reported, and the other one is stopped"
    assert len(re.findall(r"^worker-0 stopped nohup_long_\w+: exit=143$", lines, re.M)) == 1
    cloud.faults((1, "run_tpu_worker.sh stop", "again"))
    code, lines = cloud.call("stop")
    assert code == 0 and lines.count("worker-1 stopped") == 1, lines
    for worker in range(2):
        assert cloud.logs("exit", worker, "long").read_text() == "143\n"
        with pytest.raises(ProcessLookupError):
            os.kill(cloud.pid(worker, "long"), 0)


# ---- A worker fails ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, wanted", [("fail", 255), ("mistake", 2)])
def test_a_worker_that_is_down_stops_the_start_on_all_workers(
    cloud: Cloud, kind: str, wanted: int
) -> None:
    cloud.train_with(ENDLESS)
    cloud.faults((1, "git", kind))
    code, lines = cloud.call("run", **SHORT)
    assert code == wanted and "worker-0 HEAD=" in lines, lines
    assert lines.splitlines()[-1] == "error: not every worker of mine has the commit"
    assert not (cloud.clone(0) / "logs").exists()
    cloud.faults((1, "run_tpu_worker.sh start", kind))
    code, lines = cloud.call("run", **SHORT)
    assert code == wanted and "worker-0 stopped" in lines, lines
    assert kind != "mistake" or "error: worker-1: this will not do" in lines
    with pytest.raises(ProcessLookupError):
        os.kill(cloud.pid(0), 0)


def test_a_run_is_followed_to_its_end_when_a_connection_breaks(cloud: Cloud) -> None:
    cloud.train_with("print('step=0 loss=1')\nprint('DONE: steps=1')\n")
    cloud.faults((0, "run_tpu_worker.sh follow", "fail"))
    running = cloud.start("run", **SHORT)
    while cloud.calls().count("run_tpu_worker.sh follow") < 2:
        assert running.poll() is None, running.stdout.read()
        time.sleep(0.1)
    cloud.faults()
    lines, _ = running.communicate(timeout=60)
    assert running.returncode == 0 and re.search("^DONE: steps=1$", lines, re.M), lines
    assert "connecting again" in lines


def start_loop(cloud: Cloud, **settings: str) -> subprocess.Popen:
    """The loop of the page, with a folder in place of its bucket."""
    [loop] = re.findall(r"```bash\n([^`]*until [^`]*)```", TPU_VM)
    assert len(loop.splitlines()) <= 11 and loop.count("gs://my-bucket/run1") == 1
    loop = loop.replace("gs://my-bucket/run1", str(cloud.folder / "bucket"))
    (cloud.laptop / ".env").write_text("HF_TOKEN=x\n")
    write_program(cloud.folder / "bin" / "sleep", "exec /bin/sleep 0.2")
    env = cloud.environ(TPU_TYPE="v6e-8", TPU_SPOT="1", **settings)
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", "-c", loop], cwd=cloud.laptop, env=env, **pipe)


@pytest.mark.slow
def test_the_loop_of_the_page_creates_a_preempted_tpu_vm_again_and_the_run_goes_on(
    cloud: Cloud,
) -> None:
    """The trainer is real: it is killed after a checkpoint, and goes on from it to its end."""
    tiny = {"MODEL_PATH": "tiny", "DATASET": str(few_examples(40, 4)), "GLOBAL_LENGTH": "0"}
    running = start_loop(cloud, **SHORT | tiny | {"ROLLOUT_BATCH_SIZE": "8", "STEPS": "30"})
    name = "grpo_gsm8k_bs128_steps100"
    cloud.wait_for(0, "^step=0 ", name)
    while not (cloud.folder / "bucket" / "10").exists():
        assert running.poll() is None, running.stdout.read()
        time.sleep(0.05)
    first = [cloud.pid(worker, name) for worker in range(2)]
    # The machines are gone some time before the state says so, and there is no capacity at first.
    (cloud.folder / "scarce").write_text("1")
    (cloud.folder / "state").write_text("PREEMPTED")
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    lines, _ = running.communicate(timeout=120)
    assert running.returncode == 0, lines
    log = cloud.logs("log", 0, name).read_text()
    [saved] = re.findall("^resumed after (10|20) of 30 steps$", log, re.M)
    assert re.findall(r"^step=(\d+) ", log, re.M) == [str(step) for step in range(int(saved), 30)]
    assert re.search("^DONE: steps=30 ", log, re.M)
    verbs = [json.loads(call)[3] for call in cloud.calls().splitlines()]
    assert [verb for verb in verbs if verb in ("create", "delete")] == ["delete"] + 2 * ["create"]
    assert verbs.count("describe") == 1 and verbs.count("scp") == 1, lines
    assert "--spot" in cloud.calls() and "--version=v2-alpha-tpuv6e" in cloud.calls()


def test_the_loop_of_the_page_ends_if_a_run_fails_on_a_tpu_vm_that_is_ready(cloud: Cloud) -> None:
    cloud.train_with("raise SystemExit('error: a mistake')")
    running = start_loop(cloud)
    lines, _ = running.communicate(timeout=60)
    verbs = [json.loads(call)[3] for call in cloud.calls().splitlines()]
    assert verbs.count("describe") == 1 and not {"create", "delete"} & {*verbs}, lines


# ---- What the workers get ------------------------------------------------------------------------


def test_settings_of_libraries_are_sent_and_secrets_are_not(cloud: Cloud) -> None:
    cloud.train_with(
        "import os, pathlib\n"
        "print('names', *sorted(n for n in os.environ if n[:3] in ('HF_', 'WAN', 'TOK', 'STE')))\n"
        "for pid in (os.getpid(), os.getppid()):\n"
        "    print('words', pathlib.Path(f'/proc/{pid}/cmdline').read_text())\n"
    )
    sent = {"HF_HUB_ENABLE_HF_TRANSFER": "1", "TOKENIZERS_PARALLELISM": "false", "STEPS": "3"}
    secrets = ("HF_TOKEN", "HF_API_KEY", "HF_SECRET", "HF_PASSWORD", "WANDB_API_KEY")
    code, lines = cloud.call("run", **sent, **dict.fromkeys(secrets, KEY), WANDB_DIR="elsewhere")
    assert code == 0, lines
    for worker in range(2):
        log = cloud.logs("log", worker).read_text()
        assert f"names {' '.join(sorted(sent))}\n" in log
        assert all(KEY not in file.read_text() for file in cloud.clone(worker).glob("logs/*"))
    assert KEY not in lines and KEY not in cloud.calls()


def test_a_dry_run_calls_nothing_and_needs_no_package_of_python(unchanged: Cloud) -> None:
    packages = subprocess.run(["python_of_laptop", "-c", "import yaml"], env=unchanged.environ())
    assert packages.returncode == 1
    code, lines = unchanged.call("run", "--dry-run", STEPS="3", TEMPERATURE="0.9")
    # The settings follow the file of settings, as the workers of an earlier --ref expect it.
    assert code == 0 and lines.count(r"\'\'\ TEMPERATURE=0.9\ STEPS=3") == 1, lines
    code, lines = unchanged.call("run", "--dry-run", "--script=train_sft.py", STEPS="3")
    assert re.search(r"SCRIPT=train_sft.py\S* cd.* start\S* train_sft\S* \S+Z", lines), lines
    (unchanged.laptop / ".env").write_text(f"WANDB_API_KEY={KEY}\n")
    code, lines = unchanged.call("env", "--dry-run", "--user=me", TPU_GCLOUD="alpha")
    logins = re.findall(r" alpha compute tpus tpu-vm (ssh|scp) (?:\S+ )?me@mine", lines)
    assert code == 0 and logins == ["ssh", "scp", "ssh"], lines
    assert "describe mine" not in lines and KEY not in lines
    assert not unchanged.calls() and not [*unchanged.home(0).iterdir()]


@pytest.mark.parametrize(
    "name, kind, version",
    [
        ("v5e-8", "v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v5litepod-16", "v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("V5E-1", "v5litepod-1", "v2-alpha-tpuv5-lite"),
        ("V6E-8", "v6e-8", "v2-alpha-tpuv6e"),
        ("v5p-8", "v5p-8", "v2-alpha-tpuv5"),
        ("v4-8", "v4-8", "tpu-ubuntu2204-base"),
    ],
)
def test_a_tpu_vm_is_created_by_the_name_of_gcloud(
    unchanged: Cloud, name: str, kind: str, version: str
) -> None:
    code, lines = unchanged.call("create", "--dry-run", TPU_TYPE=name)
    assert code == 0 and f" --accelerator-type={kind} --version={version} " in lines


def test_a_run_needs_a_commit_that_is_pushed_and_checked_out_on_all_workers(cloud: Cloud) -> None:
    cloud.train_with("print('DONE: ')")
    (cloud.laptop / "README.md").write_text("changed")
    code, lines = cloud.call("run", **SHORT)
    assert code == 2 and "error: commit and push your changes in README.md first" in lines
    cloud.commit("second", push=False)
    code, lines = cloud.call("sync")
    assert code == 2 and re.search(r"^error: HEAD \(\w{40}\) is on no branch", lines, re.M)
    assert cloud.call("sync", "--ref=HEAD~1")[0] == 0
    git(cloud.laptop, "push", "--quiet", "origin", "HEAD")

    hook = cloud.clone(1) / ".git" / "hooks" / "post-checkout"  # This hook moves HEAD.
    hook.write_text("#!/bin/sh\nGIT_DIR=.git git update-ref --no-deref HEAD HEAD~1\n")
    hook.chmod(0o755)
    code, lines = cloud.call("run", **SHORT)
    assert code == 2 and "the HEADs of the workers above are not all" in lines, lines
    assert len(set(re.findall(r"HEAD=(\w{40})$", lines, re.M))) == 2
    hook.unlink()

    (cloud.clone(0) / "loss.py").write_text("mine")
    code, lines = cloud.call("sync")
    assert code == 2 and "worker-0: these files differ from the commit there: loss.py" in lines
    assert (cloud.clone(0) / "loss.py").read_text() == "mine"
    (cloud.laptop / ".env").write_text(f"KEY={KEY}\n")
    assert git(cloud.laptop, "status", "--porcelain") == "", "git ignores .env"
    git(cloud.laptop, "add", "--force", ".env")
    code, lines = cloud.call("sync", "--ref=HEAD")
    assert code == 2 and ".env is in git" in lines


# ---- The command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, settings, message",
    [
        (["start"], {}, "there is no verb start"),
        (["create"], {}, "set TPU_TYPE"),
        (["run", "--steps=3"], {}, "there is no flag --steps=3"),
        (["run", "--config=recipes/none.yaml"], {}, "is not a file of this repository"),
        (["run", "--script=train.py"], {}, "--script train.py is not a file of this repository"),
        (["run"], {"LERNING_RATE": "1"}, "unknown setting LERNING_RATE; did you mean LEARN"),
        (["run", "--user=a b"], {}, "'a b' may have only letters"),
        (["sync"], {"REPO_URL": f"https://me:{KEY}@host/repo"}, "has a user or a password in it"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    unchanged: Cloud, words: list[str], settings: dict[str, str], message: str
) -> None:
    code, lines = unchanged.call(*words, **settings)
    assert code == 2, lines
    assert lines.splitlines()[-1].startswith("error: ") and message in lines
    assert "Traceback" not in lines and KEY not in lines + unchanged.calls()


# ---- The pages in docs/ --------------------------------------------------------------------------

TPU_VM = (REPO / "docs" / "tpu_vm.md").read_text(encoding="utf-8")


def test_the_page_on_tpu_vms_names_only_verbs_and_flags_that_exist() -> None:
    usage = (REPO / "run_tpu.sh").read_text(encoding="utf-8")
    verbs = set(re.findall(r"\./run_tpu\.sh ([a-z]+)", TPU_VM))
    assert {"create", "setup", "env", "check", "status", "delete"} <= verbs
    assert all(re.search(rf"^  (\w+, )?{verb}\b", usage, re.M) for verb in verbs), verbs
    commands = re.findall(r"^ *\./run_tpu\.sh .*", TPU_VM, re.M)
    flags = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(commands)))
    assert "--config" in flags and all(re.search(rf"{flag}\b", usage) for flag in flags), flags
    [sent] = re.findall(r'OF_LIBRARIES = """(.*?)"""', usage, re.S)
    assert all(re.search(rf"\b{name}\b", TPU_VM) for name in sent.split())


def test_the_page_on_migration_names_only_settings_that_exist() -> None:
    names = {field.name.upper(): yaml_name(field) for field in dataclasses.fields(Config)}
    page = (REPO / "docs" / "migration.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([A-Z_]{4,}(?:, [A-Z_]{4,})*)(?:=none)? [|(]", page, re.M)
    found = {name for cell in cells for name in cell.split(", ")}
    assert len(found) >= 30 and found <= names.keys(), found - names.keys()
    in_a_file = re.findall(r"^\| ([A-Z_]+) \| `([a-z]+\.[a-z_]+)` \|", page, re.M)
    assert len(in_a_file) == 6 and dict(in_a_file).items() <= names.items()
