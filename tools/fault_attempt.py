"""One start of a training command by faults.py, up to its end: its processes, what they print, in
which phase they are, and the faults that strike them."""

import contextlib
import dataclasses
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from models.hf import EXPORTED
from runtime.checkpoint import HALF_WRITTEN
from runtime.parsing import REPO

PHASES = ("start", "compile", "rollout", "update", "save", "evaluation", "export", "end")
STEP = re.compile(r"step=(\d+) loss=.* rollout=([\d.]+)s ")  # as PRINT_TRAIN_TIME_BREAKDOWN has it
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
COMPILES, COMPILED = "Compiling jit(", "Finished XLA compilation"  # of JAX_LOG_COMPILES=1


class Console:
    """The lines of one process, read as they come, and what they tell of it."""

    def __init__(self, process: subprocess.Popen, log: Path) -> None:
        self.process, self.errors, self.lines = process, [], []
        self.compiling = self.updating = self.opened = self.done = False
        self.steps_done = self.computed = 0
        self.evaluated, self.rollout_s = -1, math.inf
        self.heard = self.step_began = time.monotonic()
        self._log = log.open("w", encoding="utf-8")
        readers = ((process.stdout, self._line), (process.stderr, self._error))
        self._threads = [threading.Thread(target=self._read, args=each) for each in readers]
        for thread in self._threads:
            thread.start()

    def code(self) -> int | None:
        """The exit code as a shell shows it; None while the process lives."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def close(self) -> None:
        """Waits for the last lines of a process that has ended."""
        for thread in self._threads:
            thread.join()
        self._log.close()

    def _read(self, pipe: IO[str], tell: object) -> None:
        for line in pipe:
            self.heard = time.monotonic()
            tell(line.rstrip("\n"))

    def _line(self, line: str) -> None:
        self._keep(line)
        self.lines.append(line)
        if found := STEP.match(line):
            self.steps_done, self.rollout_s = int(found[1]) + 1, float(found[2])
            self.computed += 1
        elif found := re.match(r"eval step=(\d+) ", line):
            self.evaluated = int(found[1])
        elif found := re.match(r"resumed after step (\d+) of", line):
            self.steps_done = int(found[1])
        self.opened = self.opened or line.startswith("output=")
        self.done = self.done or line.startswith("DONE: ")
        if found:
            self.updating, self.step_began = False, time.monotonic()

    def _error(self, line: str) -> None:
        if COMPILES in line:
            self.compiling = True
            self.updating = self.updating or "jit(micro_step)" in line
        elif COMPILED in line:
            self.compiling = False
        if not line.startswith("WARNING:jax._src"):  # the lines of JAX_LOG_COMPILES
            self.errors.append(line)
            self._keep(f"stderr: {line}")

    def _keep(self, line: str) -> None:
        with contextlib.suppress(ValueError):  # the log is closed
            print(f"{time.strftime('%H:%M:%S')} {line}", file=self._log, flush=True)


@dataclasses.dataclass
class Struck:
    """A fault, and where it struck."""

    kind: str
    phase: str
    victims: list[int]  # the processes


class Attempt:
    """The command, started once, with one or two processes."""

    def __init__(self, out: Path, env: Mapping[str, str], processes: int, logs: Path) -> None:
        """out: OUTPUT_DIR. env: of each process. logs: the beginning of the names of the logs."""
        self.out, self.struck = out, []
        logs.parent.mkdir(parents=True, exist_ok=True)
        self.steps, self.eval_every = int(env["STEPS"]), int(env["EVAL_EVERY_STEPS"])
        where = [{}]
        if processes > 1:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                address = f"127.0.0.1:{probe.getsockname()[1]}"
            join = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
            where = [join | {"JAX_PROCESS_ID": str(i)} for i in range(processes)]
        self.began, pipe = time.monotonic(), subprocess.PIPE
        command, how = [sys.executable, "train_grpo.py"], {"cwd": REPO, "text": True}
        self.consoles = [
            Console(
                subprocess.Popen(command, env={**env, **each}, stdout=pipe, stderr=pipe, **how),
                logs.with_name(f"{logs.name}_process{i}.log"),
            )
            for i, each in enumerate(where)
        ]

    def codes(self) -> list[int | None]:
        return [console.code() for console in self.consoles]

    def over(self) -> bool:
        """Whether all processes have ended."""
        return None not in self.codes()

    def phase(self) -> str:
        """The phase of process 0, from its lines and from the files of the run.

        Once programs are compiled, no line says that an update begins: the rollout is taken to last
        as long as that of the step before.
        """
        first = self.consoles[0]
        steps, last = first.steps_done, first.steps_done == self.steps
        if first.compiling:
            return "compile"
        if not first.opened:
            return "start"
        if first.done:
            return "end"
        if [*(self.out / "checkpoints").glob(f"*{HALF_WRITTEN}*")]:
            return "save"
        if last and (self.out / "hf" / EXPORTED).exists() and first.evaluated == steps:
            return "export"
        if (last or steps % self.eval_every == 0) and first.evaluated < steps:
            return "evaluation"
        if last:
            return "save"
        rolled = time.monotonic() - first.step_began > first.rollout_s
        return "update" if first.updating or rolled else "rollout"

    def silent_s(self) -> float:
        """Seconds since a process has printed anything."""
        return time.monotonic() - max(console.heard for console in self.consoles)

    def kill(self) -> None:
        for console in self.consoles:
            self.signal(console, signal.SIGKILL)

    def signal(self, console: Console, number: int) -> None:
        if console.process.poll() is None:
            console.process.send_signal(number)

    # ---- Starving of disk ------------------------------------------------------------------------

    def fill_disk(self, filler: Path, free_bytes: int) -> None:
        """Leaves so many bytes free on the file system of the run."""
        filesystem = os.statvfs(self.out.parent)
        size = filesystem.f_bavail * filesystem.f_frsize - free_bytes
        if size > 0:
            with filler.open("wb") as file, contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, size)

    def limit_files(self, victims: list[int], size: int | None) -> None:
        """No file that these processes write gets longer than so many bytes; None: no limit."""
        limit = NO_LIMIT if size is None else (size, resource.RLIM_INFINITY)
        for i in victims:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self.consoles[i].process.pid, resource.RLIMIT_FSIZE, limit)
