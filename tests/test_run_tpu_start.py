"""run_tpu.sh before a run starts: what it sends to the workers, and which mistakes it finds."""

import dataclasses
import json
import re
import subprocess

import pytest
from cloud import KEY, REPO, SHORT, Cloud, git, last_line

from config import Config
from runtime.parsing import read_dotenv, yaml_name

# ---- What the workers get ------------------------------------------------------------------------


def test_settings_of_libraries_are_sent_and_secrets_are_not(cloud: Cloud) -> None:
    (cloud.laptop / "train_grpo.py").write_text(
        "import os, pathlib\n"
        "print('names', *sorted(n for n in os.environ if n[:3] in ('HF_', 'WAN', 'TOK', 'STE')))\n"
        "print('transfer', os.environ['HF_HUB_ENABLE_HF_TRANSFER'])\n"
        "for pid in (os.getpid(), os.getppid()):\n"
        "    print('words', pathlib.Path(f'/proc/{pid}/cmdline').read_text())\n"
    )
    cloud.commit("a run that prints its environment")
    code, lines = cloud.call(
        "run",
        STEPS="3",
        HF_HUB_ENABLE_HF_TRANSFER="1",
        TOKENIZERS_PARALLELISM="false",
        WANDB_ENTITY="us",
        HF_TOKEN=KEY,
        HF_API_KEY=KEY,
        HF_SECRET=KEY,
        HF_PASSWORD=KEY,
        WANDB_API_KEY=KEY,
        WANDB_DIR="elsewhere",
    )
    assert code == 0, lines
    names = "names HF_HUB_ENABLE_HF_TRANSFER STEPS TOKENIZERS_PARALLELISM WANDB_ENTITY\n"
    for worker in range(2):
        log = cloud.logs("log", worker).read_text()
        assert names in log and "transfer 1\n" in log
        assert all(KEY not in file.read_text() for file in cloud.clone(worker).glob("logs/*"))
    assert KEY not in lines and KEY not in cloud.calls()


def test_a_path_of_this_machine_is_sent_with_a_warning(cloud: Cloud) -> None:
    home, there = str(cloud.folder / "me"), str(cloud.laptop / "rewards.py")
    code, lines = cloud.call(
        "run",
        "--dry-run",
        HOME=home,
        MODEL_PATH=f"{home}/model",
        REWARD_FN=f"{there}:mine",
        HF_HOME="/nowhere/else",
        OUTPUT_DIR="runs/here",
        CHECKPOINT_DIR="gs://bucket/run",
        JAX_COMPILATION_CACHE_DIR="",
    )
    assert code == 0 and f"MODEL_PATH={home}/model" in lines, lines
    end = "a path of this machine; the same path must exist on the workers"
    assert [line for line in lines.splitlines() if line.startswith("warning: ")] == [
        f"warning: MODEL_PATH has {home}/model, {end}",
        f"warning: REWARD_FN has {there}, {end}",
    ]


def test_the_user_who_logs_in_is_named_only_to_ssh_and_scp(cloud: Cloud) -> None:
    (cloud.laptop / ".env").write_text(f"WANDB_API_KEY={KEY}\n")
    assert cloud.call("sync", "--user", "me")[0] == 0
    assert cloud.call("env", "--user=me")[0] == 0
    assert "no run has been started on this worker" in cloud.call("status", TPU_USER="me")[1]
    calls = [json.loads(call)[3:] for call in cloud.calls().splitlines()]
    assert {call[1] for call in calls if call[0] == "ssh"} == {"me@mine"}
    assert [call[2] for call in calls if call[0] == "scp"] == ["me@mine:grpo/.env"]


@pytest.mark.parametrize(
    "ssh, system, keepalives",
    [
        ("OpenSSH_9.6p1, OpenSSL 3.0.13", "Darwin", 1),
        ("plink: Release 0.80", "Linux", 0),
        ("OpenSSH_for_Windows_9.5p1", "MINGW64_NT-10.0", 0),  # On Windows gcloud calls plink.
    ],
)
def test_options_of_openssh_are_passed_only_to_openssh(
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


# ---- Mistakes ------------------------------------------------------------------------------------


def test_a_run_needs_a_commit_that_is_pushed_and_checked_out_on_all_workers(cloud: Cloud) -> None:
    readme = cloud.laptop / "README.md"
    readme.write_text("changed")
    code, lines = cloud.call("run", **SHORT)
    assert code == 2 and "error: commit and push your changes in README.md first" in lines
    cloud.commit("second", push=False)
    code, lines = cloud.call("sync")
    assert code == 2
    assert re.search(
        r"^error: HEAD \(\w{40}\) is on no branch of origin; run git push", lines, re.M
    )
    assert cloud.call("sync", "--ref=HEAD~1")[0] == 0
    assert cloud.call("sync", "--ref", "nowhere")[0] == 2
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
    assert code == 2
    assert "error: worker-0: these files differ: loss.py; ./run_tpu.sh sync --force" in lines
    (cloud.laptop / ".env").write_text(f"KEY={KEY}\n")
    assert git(cloud.laptop, "status", "--porcelain") == "", "git ignores .env"
    git(cloud.laptop, "add", "--force", ".env")
    code, lines = cloud.call("sync", "--ref=HEAD")
    assert code == 2 and ".env is in git" in lines


def test_sync_force_stashes_files_that_differ_on_a_worker_and_names_them(cloud: Cloud) -> None:
    assert cloud.call("sync")[0] == 0
    for name in ("new.py", "runs/kept.txt"):
        (cloud.laptop / name).parent.mkdir(exist_ok=True)
        (cloud.laptop / name).write_text("of the commit")
    git(cloud.laptop, "add", "--force", "runs/kept.txt")
    cloud.commit("two new files, one of them in a folder that git ignores")
    clone = cloud.clone(1)
    untracked = "my notes é.txt"
    (clone / untracked).write_text("of the worker")
    (clone / "runs").mkdir()
    for name in ("loss.py", "new.py", "runs/kept.txt", "notes.txt"):
        (clone / name).write_text("of the worker")
    (clone / "data.py").unlink()
    code, lines = cloud.call("sync")
    names = "data.py loss.py new.py runs/kept.txt"
    assert code == 2 and last_line(lines) == (
        f"error: worker-1: these files differ: {names}; ./run_tpu.sh sync --force stashes them"
    )
    assert (clone / "new.py").read_text() == "of the worker"

    code, lines = cloud.call("sync", "--force")
    assert code == 0, lines
    assert f"worker-1 has put these files into git stash: {names}\n" in lines
    assert "worker-0 has put" not in lines
    assert f'worker-1 git: ?? "{untracked}"\n' in lines and (clone / untracked).exists()
    assert lines.count(" git: ## HEAD (no branch)\n") == 2, "git status -sb of each worker"
    assert (clone / "new.py").read_text() == "of the commit" and (clone / "data.py").exists()
    assert (clone / "notes.txt").read_text() == "of the worker", "the commit has no such file"
    stashed = ["loss.py", "new.py", "runs/kept.txt"]
    assert [git(clone, "show", f"stash@{{0}}:{name}") for name in stashed] == ["of the worker"] * 3
    assert cloud.call("sync", "--force", "--quiet")[0] == 0  # people pass this flag of gcloud
    assert len(git(clone, "stash", "list").splitlines()) == 1


@pytest.mark.parametrize(
    "words, settings, message",
    [
        (["env"], {}, "there is no file .env here"),
        (["start"], {}, "there is no verb start"),
        (["--tpu", "x", "stop", "run"], {}, "one verb, not both stop and run"),
        (["create"], {}, "set TPU_TYPE"),
        (["run", "--worker=0,2"], {}, "--worker must be all or the number of a worker"),
        (["run", "-f"], {}, "-f is a flag of logs"),
        (["run", "--force"], {}, "--force is a flag of sync"),
        (["run", "--steps=3"], {}, "there is no flag --steps=3"),
        (["run", "--config"], {}, "--config needs a value"),
        (["run", "--config=recipes/none.yaml"], {}, "is not a file of this repository"),
        (["run"], {"LERNING_RATE": "1"}, "unknown setting LERNING_RATE; did you mean LEARN"),
        (["run"], {"NUM_PRE_Q": "eight"}, "NUM_PRE_Q='eight' is not a whole number"),
        (["run"], {"TPU_NAME": ""}, "the name of the TPU VM is missing"),
        (["run", "--restart"], {}, "--restart needs TPU_TYPE"),
        (["run", "--name=a/b"], {}, "--name may have only letters"),
        (["run", "--user=a b"], {}, "--user may have only letters"),
        (["sync"], {"REPO_URL": f"https://me:{KEY}@host/repo"}, "has a user or a password in it"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    cloud: Cloud, words: list[str], settings: dict[str, str], message: str
) -> None:
    code, lines = cloud.call(*words, **settings)
    assert code == 2, lines
    assert lines.splitlines()[-1].startswith("error: ") and message in lines
    assert "Traceback" not in lines and KEY not in lines + cloud.calls()


def test_a_dry_run_prints_commands_in_the_syntax_of_bash_and_runs_none(cloud: Cloud) -> None:
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
    assert "REQUIRE_JAX_PROCESS_COUNT" not in lines, (
        "gcloud was not asked for the number of workers"
    )


def words_of(command: str) -> list[str]:
    """The words into which bash splits the command."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True)
    return done.stdout.decode().split("\0")[:-1]


def test_it_works_from_another_folder(cloud: Cloud) -> None:
    for words in (["--help"], ["run", "--dry-run"]):
        done = subprocess.run(
            [cloud.laptop / "run_tpu.sh", *words],
            cwd=cloud.folder,
            env=cloud.environ(),
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        assert "tpu-vm ssh mine" in done.stdout or "--help" in words


def test_the_help_has_at_most_40_lines(cloud: Cloud) -> None:
    code, lines = cloud.call("--help")
    assert code == 0
    assert len(lines.splitlines()) <= 40 and max(map(len, lines.splitlines())) <= 100


# ---- The pages in docs/ --------------------------------------------------------------------------


def test_the_page_on_tpu_vms_names_only_verbs_and_flags_that_exist() -> None:
    usage = (REPO / "run_tpu.sh").read_text(encoding="utf-8")
    page = (REPO / "docs" / "tpu_vm.md").read_text(encoding="utf-8")
    verbs = set(re.findall(r"\./run_tpu\.sh ([a-z]+)", page))
    assert verbs == {"create", "setup", "env", "check", "status", "logs", "stop", "delete"}
    assert all(re.search(rf"^  (\w+, )?{verb}\b", usage, re.M) for verb in verbs), verbs
    flags = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", page))
    [sent] = re.findall(r'OF_LIBRARIES = """(.*?)"""', usage, re.S)
    assert all(re.search(rf"\b{name}\b", page) for name in sent.split())
    assert "--restart" in flags and all(re.search(rf"{flag}\b", usage) for flag in flags), flags


def test_the_example_of_a_file_env_has_the_two_keys_without_values() -> None:
    assert read_dotenv(REPO / ".env.example") == {"WANDB_API_KEY": "", "HF_TOKEN": ""}


def test_the_page_on_migration_names_only_settings_that_exist() -> None:
    names = {field.name.upper(): yaml_name(field) for field in dataclasses.fields(Config)}
    page = (REPO / "docs" / "migration.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([A-Z_]{4,}(?:, [A-Z_]{4,})*)(?:=none)? [|(]", page, re.M)
    found = {name for cell in cells for name in cell.split(", ")}
    assert len(found) >= 30 and found <= names.keys(), found - names.keys()
    in_a_file = re.findall(r"^\| ([A-Z_]+) \| `([a-z]+\.[a-z_]+)` \|", page, re.M)
    assert len(in_a_file) == 6 and dict(in_a_file).items() <= names.items()
