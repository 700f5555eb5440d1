"""One start of a training command by random_faults.py, up to its end: its processes, what they
print, in which phase they are, and the faults that strike them."""

import contextlib
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from runtime.parsing import REPO

PHASES = ("start", "compile", "rollout", "update", "save", "evaluation", "export", "end")
STEP = re.compile(r"step=(\d+) loss=.* rollout=([\d.]+)s ")  # as PRINT_TRAIN_TIME_BREAKDOWN has it
# The lines of JAX_LOG_COMPILES=1, on stderr.
LOGGED, COMPILES, COMPILED = "WARNING:jax._src", "Compiling jit(", "Finished XLA compilation"
FATAL, STARVING = ("killed", "stopped", "silent"), ("full disk", "file limit")
KINDS = ("killed", "stopped", "frozen", "silent", *STARVING)
HALF_WRITTEN = ".orbax-checkpoint-tmp"  # a part of the name of a folder that is not complete
HUNG_S = 400  # a run that is silent for so long does not end by itself


class Struck(NamedTuple):
    """A fault, and where it struck."""

    kind: str
    phase: str
    victims: list[int]  # the processes


class End(NamedTuple):
    """How a process has ended."""

    code: int | None  # as a shell shows it; None: the process lives
    computed: int  # steps
    done: bool  # its last line says that the run is done
    errors: list[str]  # the lines of stderr


class Console:
    """The lines of one process, read as they come, and what they tell of it."""

    def __init__(self, process: subprocess.Popen, log: Path) -> None:
        self.process, self._errors = process, []
        self.compiling = self.updating = self.opened = self.done = self.unreviewed = False
        self.steps_done = self.computed = 0
        self.evaluated, self.rollout_s = -1, math.inf
        self.heard = self.step_began = time.monotonic()
        self._log = log.open("w", encoding="utf-8")
        readers = (process.stdout, "", self._line), (process.stderr, "stderr: ", self._error)
        self._threads = [threading.Thread(target=self._read, args=each) for each in readers]
        for thread in self._threads:
            thread.start()

    def code(self) -> int | None:
        """The exit code as a shell shows it; None while the process lives."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def end(self) -> End:
        """Waits for the end of the process, and for its last lines."""
        self.process.wait()
        for thread in self._threads:
            thread.join()
        self._log.close()
        return End(self.code(), self.computed, self.done, self._errors)

    def _read(self, pipe: IO[str], name: str, tell: Callable[[str], None]) -> None:
        for line in map(str.rstrip, pipe):
            self.heard = time.monotonic()
            tell(line)
            if not line.startswith(LOGGED):
                print(f"{time.strftime('%H:%M:%S')} {name}{line}", file=self._log, flush=True)

    def _line(self, line: str) -> None:
        if found := STEP.match(line):
            self.steps_done, self.rollout_s = int(found[1]) + 1, float(found[2])
            self.computed += 1
        elif found := re.match(r"eval step=(\d+) ", line):
            self.evaluated = int(found[1])
        elif found := re.match(r"resumed after step (\d+) of", line):
            self.steps_done = int(found[1])
        if found:
            self.updating, self.step_began = False, time.monotonic()
        self.opened |= line.startswith("output=")
        self.done |= line.startswith("DONE: ")
        self.unreviewed |= "report.html cannot be written" in line

    def _error(self, line: str) -> None:
        if COMPILES in line:
            self.compiling = True
            self.updating |= "jit(micro_step)" in line
        elif COMPILED in line:
            self.compiling = False
        if not line.startswith(LOGGED):
            self._errors.append(line)


class Attempt:
    """The command, started once, with one or two processes."""

    def __init__(self, env: Mapping[str, str], processes: int, logs: Path) -> None:
        """env: of each process. logs: the beginning of the names of the logs."""
        self.out, self.struck, self.hung = Path(env["OUTPUT_DIR"]), [], False
        self._filler = self.out.with_name("filler")  # the file that fills the disk
        logs.parent.mkdir(parents=True, exist_ok=True)
        self.steps, self.eval_every = int(env["STEPS"]), int(env["EVAL_EVERY_STEPS"])
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        join = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
        how = {"cwd": REPO, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.began, self.consoles = time.monotonic(), []
        for i in range(processes):
            each = {**env, **join, "JAX_PROCESS_ID": str(i)} if processes > 1 else env
            process = subprocess.Popen([sys.executable, "train_grpo.py"], env=each, **how)
            self.consoles.append(Console(process, logs.with_name(f"{logs.name}_process{i}.log")))

    def alive(self) -> list[int]:
        """The processes that have not ended."""
        return [i for i, each in enumerate(self.consoles) if each.code() is None]

    def goes_on(self) -> bool:
        """Waits for a moment, and kills a run that hangs. False: all processes have ended."""
        time.sleep(0.003)
        heard = max(console.heard for console in self.consoles)
        self.hung |= bool(self.alive()) and time.monotonic() - heard > HUNG_S
        if self.hung:
            self.signal(self.alive(), signal.SIGKILL)
        return bool(self.alive())

    def close(self) -> list[End]:
        """Kills the processes that live, and gives the disk back; how all processes have ended."""
        self.signal(self.alive(), signal.SIGKILL)
        self._filler.unlink(missing_ok=True)
        return [console.end() for console in self.consoles]

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
        if (last or steps % self.eval_every == 0) and first.evaluated < steps:
            return "evaluation"
        if last:
            return "export"
        rolled = time.monotonic() - first.step_began > first.rollout_s
        return "update" if first.updating or rolled else "rollout"

    # ---- Faults ----------------------------------------------------------------------------------

    def signal(self, victims: list[int], number: int) -> None:
        for i in victims:
            self.consoles[i].process.send_signal(number)  # nothing for a process that has ended

    def fill_disk(self, free_bytes: int) -> None:
        """Leaves so many bytes free on the file system of the run."""
        size = shutil.disk_usage(self.out.parent).free - free_bytes
        with self._filler.open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(size, 1))

    def limit_files(self, victims: list[int], size: int) -> None:
        """No file that these processes write gets longer than so many bytes."""
        for i in victims:
            with contextlib.suppress(ProcessLookupError):
                process = self.consoles[i].process.pid
                resource.prlimit(process, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
