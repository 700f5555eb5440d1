"""Starts train_grpo.py in processes that find its libraries imported, which saves 2 seconds of CPU.

A server imports the libraries once and forks each process, which imports our own files and has the
environment, the folder and the arguments that it would have if it started anew.
"""

import atexit
import importlib.metadata
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import PIPE

JAXLIB = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:3])
# Newer versions have only the other emitters, and end a program at an unknown flag.
OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false" if JAXLIB < (0, 11, 1) else ""
# With XLA's older emitters, with few passes of LLVM, and with one part for LLVM instead of many,
# programs compile in a third of the CPU time. They run slower.
FLAGS = f"--xla_cpu_parallel_codegen_split_count=1 {OLDER_EMITTERS}"
FASTER_TO_COMPILE = {"XLA_FLAGS": FLAGS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
TESTS = Path(__file__).resolve().parent
LIBRARIES = """
    jax jax.experimental.multihost_utils jax.experimental.pallas.tpu flax.struct optax tqdm yaml
    jax.experimental.pallas.ops.tpu.splash_attention orbax.checkpoint safetensors.numpy
    huggingface_hub transformers.tokenization_utils_tokenizers
""".split()
# Libraries read these when they are imported, and nothing here tells the libraries a new value.
AT_IMPORT = ("JAX_PLATFORMS", "HF_HUB_OFFLINE", "PYTHONPATH", "PYTHONIOENCODING")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(LIBRARIES)
LOCK = threading.Lock()  # two threads that ask for an exit code at once would lose it


class Forked:
    """A script in a forked process, with what tests use of subprocess.Popen."""

    def __init__(self, script: Path, *arguments: str, cwd: Path, env: dict[str, str]) -> None:
        pipes = [SERVER.Pipe(duplex=False) for _ in ("stdout", "stderr")]
        self.stdout, self.stderr = (
            os.fdopen(os.dup(reader.fileno()), encoding="utf-8") for reader, _ in pipes
        )
        told = (script, arguments, cwd, env, *(writer for _, writer in pipes))
        self._process = SERVER.Process(target=_run, args=told, daemon=True)
        with LOCK:
            self._process.start()
        self.pid = self._process.pid
        for pipe in pipes:
            for end in pipe:
                end.close()

    def poll(self) -> int | None:
        with LOCK:
            return self._process.exitcode

    returncode = property(poll)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of stdout and of stderr, once the process has ended."""
        texts = ["", ""]

        def read(i: int) -> None:
            texts[i] = (self.stdout, self.stderr)[i].read()

        readers = [threading.Thread(target=read, args=[i], daemon=True) for i in range(2)]
        for reader in readers:
            reader.start()
        wait([self._process.sentinel], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        for reader in readers:
            reader.join()
        self.stdout.close()
        self.stderr.close()
        return texts[0], texts[1]


Process = Forked | subprocess.Popen


def start(script: Path, *arguments: str, cwd: Path, env: dict[str, str]) -> Process:
    """Starts a script, forked if libraries that are imported already behave as in `env`."""
    if all(env.get(name) == os.environ.get(name) for name in AT_IMPORT):
        return Forked(script, *arguments, cwd=cwd, env=env)
    command = [sys.executable, str(script), *arguments]
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, stdout=PIPE, stderr=PIPE)


def _run(
    script: Path,
    arguments: tuple[str, ...],
    cwd: Path,
    env: dict[str, str],
    stdout: Connection,
    stderr: Connection,
) -> None:
    """Runs the script in this process, which the server has just forked."""
    for number, pipe in ((1, stdout), (2, stderr)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # the server's is that of a file
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [str(script), *arguments]
    unoptimized = env.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"
    sys.modules["jax"].config.update("jax_disable_most_optimizations", unoptimized)
    of_pytest = ("", str(TESTS), str(TESTS.parent))
    others = [folder for folder in sys.path if folder not in of_pytest]
    sys.path[:] = [str(script.absolute().parent), *others]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
