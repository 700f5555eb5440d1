"""Many processes, one run: they join, compare what they are about to run, and stop together."""

import contextlib
import hashlib
import json
import os
import platform
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.backend import register_backend_factory

from runtime.long_work import tell_compilations
from runtime.mistakes import UserMistake

# What the errors of Gloo (CPUs), NCCL (GPUs) and jax's service say when another process is gone.
LOST_CONTACT = re.compile(r"gloo|nccl|coordination.?service|heartbeat", re.IGNORECASE)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STATUS = re.compile("[A-Z_]+: ")  # a status, with which ValueErrors of jax begin, but none of ours
GOOGLE = "0x1ae0"  # a PCI vendor
DISK, NETWORK = "0x01", "0x02"  # the beginning of the PCI class of a disk and of a network card
TASKS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")  # how srun and mpirun name the number of tasks


def start_jax(cfg: Any) -> None:
    """Joins the other processes, if there are any, and prints the devices. From then on long
    compilations are told.

    It has to come before anything touches a device. Raises UserMistake if there is no device of the
    kind that JAX_PLATFORMS names.
    """
    cache = os.path.abspath(cfg.jax_compilation_cache_dir or ".jax_cache")
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if not os.environ.get("JAX_PLATFORMS") and not has_tpu():
        # jax would start libtpu, if it is installed, and libtpu prints errors without a TPU.
        register_backend_factory("tpu", lambda: None)
    join(init_timeout_s=cfg.init_timeout_s, heartbeat_timeout_s=cfg.heartbeat_timeout_s)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an AssertionError: it is not installed
        if lost_contact(error):
            raise
        wanted, reason = os.environ.get("JAX_PLATFORMS", ""), " ".join(str(error).split())
        raise UserMistake(f"JAX_PLATFORMS={wanted}: no such device here. {reason}") from None
    tell_compilations()
    print(
        f"backend={jax.default_backend()} process={jax.process_index()}/{jax.process_count()} "
        f"device_count={jax.device_count()} local_device_count={jax.local_device_count()}",
        flush=True,
    )


def has_tpu(pci: Path = Path("/sys/bus/pci/devices")) -> bool:
    """True if this machine has a TPU: a PCI device of Google's that is no disk and no network card.

    The files in /dev cannot tell: a GPU that is passed through to a virtual machine is in /dev/vfio
    too, and accelerators of other makers are in /dev/accel.
    """
    for vendor in pci.glob("*/vendor"):
        kind = vendor.with_name("class")
        other = kind.exists() and kind.read_text().startswith((DISK, NETWORK))
        if vendor.read_text().strip() == GOOGLE and not other:
            return True
    return False


def join(*, init_timeout_s: int, heartbeat_timeout_s: int) -> None:
    """Joins the other processes, if there are any, before anything touches a device.

    The hosts of a TPU slice find each other; elsewhere JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES
    and JAX_PROCESS_ID name the processes. If they have not all joined after init_timeout_s, this
    process ends with exit code 1. If one falls silent later, jax ends the others after
    heartbeat_timeout_s.
    """
    address, where = os.environ.get("JAX_COORDINATOR_ADDRESS"), ()
    if address:
        counts = [os.environ.get(name, "") for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")]
        if not all(count.isdecimal() for count in counts) or int(counts[1]) >= int(counts[0]):
            raise UserMistake(
                f"JAX_COORDINATOR_ADDRESS={address} needs JAX_NUM_PROCESSES (a number, the same "
                f"everywhere) and JAX_PROCESS_ID (from 0, below it, each process its own)"
            )
        where = (address, *map(int, counts))
    elif not ((os.environ.get("JAX_PLATFORMS") or "tpu").startswith("tpu") and has_tpu()):
        _say_if_alone()
        return
    # This limit comes before jax's, which ends the process with a dump of C++ frames.
    limit = threading.Timer(init_timeout_s, _end_alone, [init_timeout_s, where])
    limit.daemon = True
    limit.start()
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is StopSignal's
    jax.distributed.initialize(
        *where,
        initialization_timeout=init_timeout_s + 30,
        heartbeat_timeout_seconds=heartbeat_timeout_s,
    )
    limit.cancel()


def _say_if_alone() -> None:
    """Prints a line if a launcher has started many tasks that do not know of each other."""
    for name in TASKS:
        count = os.environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            print(
                f"{name}={count}, but JAX_COORDINATOR_ADDRESS is not set: each of the {count} "
                f"tasks trains alone. For one run of all tasks set JAX_COORDINATOR_ADDRESS, "
                f"JAX_NUM_PROCESSES and JAX_PROCESS_ID; REQUIRE_MULTIHOST=1 makes this an error",
                flush=True,
            )
            return


def _end_alone(seconds: int, where: tuple) -> NoReturn:
    who = f" at {where[0]}; this is process {where[2]} of {where[1]}" if where else ""
    print(
        f"error: not all processes have joined in INIT_TIMEOUT_S={seconds} seconds{who}. Is the "
        f"same command running on every worker? Their logs say why not",
        file=sys.stderr,
    )
    _end(1)


def stop_if_not_so_many(require_multihost: bool, require_process_count: int) -> None:
    """Raises UserMistake if fewer or more processes have joined than the settings require."""
    count = jax.process_count()
    if require_multihost and count == 1:
        raise UserMistake(
            "REQUIRE_MULTIHOST=1, and this process is alone: start the same command on every host "
            "of the slice, elsewhere with JAX_COORDINATOR_ADDRESS"
        )
    if require_process_count not in (0, count):
        raise UserMistake(f"REQUIRE_JAX_PROCESS_COUNT={require_process_count}, and {count} joined")


def stop_if_different(facts: dict[str, str], mistake: UserMistake | None) -> None:
    """Raises the same UserMistake on every process if one of them has found a mistake, or if their
    facts differ; it names up to five of these. All processes have to call it.

    facts: {name: value} of all that has to be the same. mistake: what this process has found.
    """
    if jax.process_count() > 1:
        told = gather_texts(json.dumps([str(mistake or ""), facts]))
        everyone = [json.loads(text) for text in told]
        for i, (text, _) in enumerate(everyone):
            if text and not mistake:
                lines = [f"process {i}: {line}" for line in text.splitlines()]
                raise UserMistake("\n".join(lines))
        if not mistake and (different := differences([facts for _, facts in everyone])):
            more = f", and {len(different) - 5} more" if len(different) > 5 else ""
            named = ", ".join(different[:5])
            raise UserMistake(f"the processes would not run the same: {named}{more}")
    if mistake:
        raise mistake


@contextlib.contextmanager
def told_by_all() -> Iterator[None]:
    """If one process raises a UserMistake, or an OSError about a file, within this context, all
    processes raise a UserMistake of the same words, so that all end alike.

    Nothing within it may wait for another process.
    """
    mistake = ""
    try:
        yield
    except UserMistake as error:
        mistake = str(error)
    except OSError as error:  # such as a folder that this user may not look into
        if not error.filename:
            raise
        mistake = f"{error.filename}: {error.strerror}"
    if first := next((text for text in gather_texts(mistake) if text), ""):
        raise UserMistake(first)


def code_facts(root: Path) -> dict[str, str]:
    """{file: digest} of this project's code that is imported. root: the project's folder."""
    imported = [m.__file__ for m in [*sys.modules.values()] if getattr(m, "__file__", None)]
    files = {Path(file).resolve() for file in imported}
    # Our module models.hf is the file models/hf.py of the folder. A package of a virtual
    # environment within the folder has a path that is longer than its name.
    names = [name.replace(".", "/") for name in [*sys.modules]]
    places = {root / f"{name}{end}" for name in names for end in (".py", "/__init__.py")}
    code = sorted(file for file in files if file.parent == root or file in places)
    return {str(file.relative_to(root)): digest(file.read_bytes()) for file in code}


def commit_of(root: Path) -> str:
    """The commit of the code in a folder, with "-dirty" if tracked files differ from it.

    It is empty if there is no git, and if git knows nothing of the folder.
    """

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def versions() -> dict[str, str]:
    """The versions of Python and of the packages on which results depend."""
    numbers = {"python": platform.python_version()}
    packages = "jax jaxlib libtpu flax optax numpy transformers sglang-jax"
    for package in packages.split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            numbers[package] = metadata.version(package)
    return numbers


def digest(content: bytes) -> str:
    """The first 12 digits of the SHA-256."""
    return hashlib.sha256(content).hexdigest()[:12]


def tried(mistakes: list[str], read: Callable[..., Any], *arguments: Any) -> Any:
    """What `read` returns; None if it finds a user's mistake, whose text goes to `mistakes`."""
    try:
        return read(*arguments)
    except UserMistake as error:
        mistakes.append(str(error))
    except OSError as error:  # such as a file that this user may not read
        if not error.filename:
            raise
        mistakes.append(f"{error.filename}: {error.strerror}")
    return None


def differences(everyone: list[dict[str, str]]) -> list[str]:
    """A text for each name whose value differs between process 0 and another process."""
    first, found = everyone[0], {}
    for i, facts in enumerate(everyone):
        for name in [*first, *(name for name in facts if name not in first)]:
            here, there = first.get(name, "missing"), facts.get(name, "missing")
            if here != there and name not in found:
                found[name] = f"{name} is {here} on process 0, {there} on process {i}"
    return list(found.values())


def gather_texts(text: str) -> list[str]:
    """The text of every process, in process order; all processes have to call it."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))  # [processes]
    width = 1 << int(sizes.max()).bit_length()  # few widths, so that few programs are compiled
    padded = np.pad(data, (0, width - data.size))
    gathered = multihost_utils.process_allgather(padded)  # [processes, bytes]
    return [bytes(x[:size]).decode() for x, size in zip(gathered, sizes, strict=True)]


# ---- Stopping ------------------------------------------------------------------------------------


class Stopped(Exception):
    """The run has to stop here, because of the signal with this number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class StopSignal:
    """Watches for SIGTERM and SIGINT from now on; the run obeys at its next `check`.

    A separate thread watches, because Python's signal handlers wait while the main thread compiles
    or waits for a device. This thread ends the process by itself if no check comes in time, at a
    second signal, and at once while `running` is False. It has to be made on the main thread.
    """

    def __init__(self, grace_s: int) -> None:
        """grace_s: the longest time in seconds from a signal to the end of the process."""
        self.running = False  # becomes True before the first step
        self._grace_s, self._number = grace_s, 0
        self._seen, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)  # only the byte in the pipe counts
        os.register_at_fork(after_in_child=_forget_signals)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        number = self._next(None)
        name = signal.Signals(number).name
        if not self.running:
            _say(f"{name}: stopped before the first step", sys.stdout)
            _end(128 + number)
        self._number = number
        _say(f"{name}: stopping at the next point where the run can be saved", sys.stdout)
        end = time.monotonic() + max(1, self._grace_s - 1)
        time.sleep(0.5)  # a Ctrl-C may arrive twice, from the terminal and from a wrapper
        while self._next(0):
            pass
        again = self._next(end - time.monotonic())
        why = "a second signal" if again else f"PREEMPTION_GRACE_S={self._grace_s} seconds are over"
        _say(f"error: {why}; nothing more is saved", sys.stderr)
        _end(128 + number)

    def _next(self, seconds: float | None) -> int:
        """The next of STOP_SIGNALS within so many seconds, else 0; it skips other signals."""
        while select.select([self._seen], [], [], seconds)[0]:
            if (number := os.read(self._seen, 1)[0]) in STOP_SIGNALS:
                return number
        return 0

    def check(self) -> None:
        """Raises Stopped on all processes, at the same call, after a signal to any of them."""
        number = self._number
        if jax.process_count() > 1:
            number = int(multihost_utils.process_allgather(np.int32(number)).max())
        if number:
            raise Stopped(number)


def lost_contact(error: BaseException) -> bool:
    """True if the error says that another process is gone."""
    ours = isinstance(error, ValueError) and not STATUS.match(str(error))
    told = isinstance(error, RuntimeError | ValueError) and not ours
    return told and bool(LOST_CONTACT.search(str(error)))


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """An error within this context ends this process at once, so that the others notice it.

    jax's normal exit would wait for minutes for the other processes, which wait for this one. Lines
    that a full disk has refused do not change the exit code.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        code = 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        elif lost_contact(error):
            reason = " ".join(str(error).split())[:200]
            print(f"error: another process is gone; its log says why ({reason})", file=sys.stderr)
        else:
            traceback.print_exception(error)
        _end(code)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # Python would try again at its end, and end with exit code 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _forget_signals() -> None:
    """Makes a forked child process handle its signals in the usual way again."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _say(line: str, where: Any) -> None:
    with contextlib.suppress(OSError, ValueError):  # the disk is full, or the pipe is closed
        print(line, file=where, flush=True)


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
