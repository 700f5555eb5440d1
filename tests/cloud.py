"""A laptop and a TPU VM of two workers, for the tests of run_tpu.sh.

Git, the commands, the processes and the training are real. Only gcloud is a stand-in
(stand_in_gcloud.py), which runs the commands in one folder for each worker.
"""

import atexit
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
KEY = "fake0key1which2nobody3may4see5"
# A run needs none of these files, and every test copies all other files.
LEFT_OUT = (".*", "__pycache__", "runs", "wandb", "logs", "shared", "tests", "docs", "*.png")
SHORT = {"STEPS": "1", "BATCH_SIZE": "2", "NUM_PRE_Q": "2", "TRAIN_MICRO_BATCH_SIZE": "4"}
SHORT |= {"MAX_LENGTH_SAMPLE": "16", "EVAL_EVERY_STEPS": "0", "EXPORT_HF": "none"}


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, text=True, capture_output=True, check=True
    )
    return done.stdout.strip()


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)


def write_program(file: Path, commands: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{commands}\n")
    file.chmod(0o755)


@functools.cache
def laptop_and_origin() -> Path:
    """A folder with the laptop's clone and its origin, which each test copies."""
    folder = Path(tempfile.mkdtemp(prefix="cloud_"))
    atexit.register(shutil.rmtree, folder)
    laptop, origin = folder / "grpo", folder / "origin.git"
    shutil.copytree(REPO, laptop, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copy(REPO / ".gitignore", laptop)
    git(laptop, "init", "--quiet", "--initial-branch=main")
    commit(laptop, "first")
    git(folder, "clone", "--quiet", "--bare", str(laptop), str(origin))
    git(laptop, "remote", "add", "origin", str(origin))
    git(laptop, "fetch", "--quiet")
    return folder


class Cloud:
    """A laptop with a clone of this working tree, and a TPU VM of two workers."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        """environment: variables of all workers, beside those that join their processes."""
        self.folder, self.laptop = folder, folder / "grpo"
        shutil.copytree(laptop_and_origin(), folder, dirs_exist_ok=True)
        git(self.laptop, "remote", "set-url", "origin", str(folder / "origin.git"))
        stand_in = f'exec "{sys.executable}" "{REPO}/tests/stand_in_gcloud.py" "$@"'
        write_program(folder / "bin" / "gcloud", stand_in)
        # The laptop's Python has no packages.
        write_program(folder / "bin" / "python_of_laptop", f'exec "{sys.executable}" -S "$@"')
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.lockfile = folder / "libtpu_lockfile"
        self.venv = folder / "venv"  # this Python, in which pip notes what it would install
        notes = f'case "$*" in "-m pip install "*) echo "$*" >>{folder}/installed; exit ;;\n'
        notes += '"-m pip list") echo "jax 0.10.2"; exit ;; esac'
        write_program(self.venv / "bin" / "python", f'{notes}\nexec "{sys.executable}" "$@"')
        shared = {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": address}
        shared |= {"JAX_NUM_PROCESSES": "2", "LIBTPU_LOCKFILE": str(self.lockfile)}
        (folder / "environ.json").write_text(json.dumps(shared | environment))
        self.faults()
        for worker in range(2):
            self.home(worker).mkdir()
        (folder / "state").write_text("READY")

    def faults(self, *faults: tuple[int, str, str]) -> None:
        """Breaks commands on workers from now on; stand_in_gcloud.py describes the faults."""
        written = self.folder / "faults.new"
        written.write_text(json.dumps(faults))
        written.replace(self.folder / "faults.json")  # a command that runs finds a complete file

    def train_with(self, program: str) -> None:
        """Puts a program in place of train_grpo.py, so that a run takes no time of its own."""
        (self.laptop / "train_grpo.py").write_text(program)
        self.commit("another program")

    def commit(self, message: str, push: bool = True) -> None:
        commit(self.laptop, message)
        if push:
            git(self.laptop, "push", "--quiet", "origin", "HEAD")

    def home(self, worker: int) -> Path:
        return self.folder / f"worker{worker}"

    def clone(self, worker: int) -> Path:
        return self.home(worker) / "grpo"

    def environ(self, **settings: str) -> dict[str, str]:
        kept = ("PATH", "HOME", "LANG", "TMPDIR", "JAX_COMPILATION_CACHE_DIR")
        shell = {k: os.environ[k] for k in os.environ if k in kept}
        shell["PATH"] = f"{self.folder}/bin:{shell['PATH']}"
        shell |= {"TPU_NAME": "mine", "ZONE": "a-zone", "CLOUD": str(self.folder)}
        shell |= {"TPU_VENV": str(self.venv), "PYTHON": "python_of_laptop", "RETRY_S": "1"}
        return shell | settings

    def start(self, *words: str, **settings: str) -> subprocess.Popen:
        """Starts ./run_tpu.sh, with stdout and stderr in one text."""
        return subprocess.Popen(
            ["./run_tpu.sh", *words],
            cwd=self.laptop,
            env=self.environ(**settings),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def call(self, *words: str, **settings: str) -> tuple[int, str]:
        process = self.start(*words, **settings)
        lines, _ = process.communicate(timeout=300)
        return process.returncode, lines

    def calls(self) -> str:
        return self.read("calls")

    def read(self, name: str) -> str:
        file = self.folder / name
        return file.read_text() if file.exists() else ""

    def logs(self, kind: str, worker: int, name: str = "train_grpo") -> Path:
        return self.clone(worker) / "logs" / f"nohup_{name}_latest.{kind}"

    def wait_for(self, worker: int, words: str, name: str = "train_grpo") -> None:
        """Waits until the worker's log has the words, a regular expression."""
        log, deadline = self.logs("log", worker, name), time.monotonic() + 120
        while not (log.exists() and re.search(words, log.read_text(), re.M)):
            assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
            time.sleep(0.2)

    def pid(self, worker: int, name: str = "train_grpo") -> int:
        return int(self.logs("pid", worker, name).read_text())
