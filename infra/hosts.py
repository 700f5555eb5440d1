"""The processes of a run: they join, compare what they are about to run, and end together."""

import contextlib
import errno
import gc
import itertools
import json
import os
import re
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.extend.backend import register_backend_factory

from infra.chips import MEM_FRACTION, OUR_MEM_FRACTION
from infra.mistakes import Unwritable, UserMistake

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HEARTBEAT_TIMEOUT_S = 30  # a process that is silent for so many seconds counts as dead
# The errors of failed writes. One without the name of a file may be of stdout, which is then tried.
WRITE_ERRNOS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
WRITE_ERRNOS |= {errno.EAGAIN, errno.ESTALE, errno.EROFS}
# The number of processes, as jax, MaxText, MPIs, torchrun, Horovod and SkyPilot call it.
COUNT_VARIABLES = """JAX_NUM_PROCESSES JAX_PROCESS_COUNT NNODES OMPI_COMM_WORLD_SIZE PMI_SIZE
    MV2_COMM_WORLD_SIZE WORLD_SIZE LOCAL_WORLD_SIZE HOROVOD_SIZE FLUX_JOB_SIZE JSM_NAMESPACE_SIZE
    SKYPILOT_NUM_NODES""".split()

# ---- Joining -------------------------------------------------------------------------------------


def start_jax(compilation_cache_dir: str, init_timeout_s: int) -> None:
    """Joins the other processes, if there are any, and prints the devices.

    It has to come before anything touches a device. compilation_cache_dir: "" means .jax_cache.
    Raises UserMistake if there is no device of the kind that JAX_PLATFORMS names.
    """
    for number in heeded_signals():
        signal.signal(number, signal.SIG_DFL)  # it ends the process at once, see StopSignal
    os.environ.setdefault(MEM_FRACTION, OUR_MEM_FRACTION)  # only GPUs read it, and only once
    cache = os.path.abspath(compilation_cache_dir or ".jax_cache")
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    # Tracing creates many objects that stay, and the collector would look through them too often.
    gc.set_threshold(10_000)
    if not os.environ.get("JAX_PLATFORMS") and not has_tpu():
        # jax would start libtpu, if it is installed, and libtpu prints errors without a TPU.
        register_backend_factory("tpu", lambda: None)
    for name, value in changed_random_numbers().items():
        print(f"note: {name}={value} makes other random numbers, so a resumed run must keep it")
    join_processes(init_timeout_s)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an AssertionError: it is not installed
        if is_lost_connection(error):
            raise
        platforms, reason = os.environ.get("JAX_PLATFORMS", ""), " ".join(str(error).split())
        raise UserMistake(f"JAX_PLATFORMS={platforms}: no such device here. {reason}") from None
    print(
        f"backend={jax.default_backend()} process={jax.process_index()}/{jax.process_count()} "
        f"device_count={jax.device_count()} local_device_count={jax.local_device_count()}",
        flush=True,
    )


def has_tpu(pci: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether this machine has a TPU: a PCI device of Google's, neither a disk nor a network card.

    The files in /dev cannot tell: GPUs and accelerators of other makers have the same names there.
    """
    for vendor in pci.glob("*/vendor"):
        disk_or_network = vendor.with_name("class").read_text().startswith(("0x01", "0x02"))
        if vendor.read_text().strip() == "0x1ae0" and not disk_or_network:
            return True
    return False


def join_processes(init_timeout_s: int) -> None:
    """Joins the other processes, if there are any, before anything touches a device.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID name the processes. Without them
    the tasks of srun and the hosts of a TPU slice find each other. If they have not all joined
    after init_timeout_s, this process ends with exit code 1. If one falls silent later, jax ends
    the others after HEARTBEAT_TIMEOUT_S.
    """
    env, this_process = os.environ, ""
    cluster: dict[str, Any] = {}  # arguments of jax.distributed.initialize
    if address := env.get("JAX_COORDINATOR_ADDRESS"):
        if not re.fullmatch(r"(dns:///)?([^:/]+|\[.+\]):[1-9]\d{0,4}", address):
            form = "host:port, such as 10.0.0.1:8476 or [::1]:8476"
            raise UserMistake(f"JAX_COORDINATOR_ADDRESS={address} is not {form}")
        counts = [env.get(name, "") for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")]
        if not all(count.isdecimal() for count in counts) or int(counts[1]) >= int(counts[0]):
            raise UserMistake(
                f"JAX_COORDINATOR_ADDRESS={address} needs JAX_NUM_PROCESSES (the same on all "
                f"processes) and JAX_PROCESS_ID (0 to JAX_NUM_PROCESSES - 1, different on each)"
            )
        count, number = map(int, counts)
        cluster = {"coordinator_address": address, "num_processes": count, "process_id": number}
        this_process = f" at {address}; this is process {number} of {count}"
    elif int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # a script of sbatch is no step
        cluster = {"cluster_detection_method": "slurm"}
    elif not ((env.get("JAX_PLATFORMS") or "tpu").startswith("tpu") and has_tpu()):
        raise_if_launched_with_others()
        return  # this is the only process
    # jax gives each task of srun one GPU. The only task of a node takes all GPUs, and so
    # does a task to which Slurm shows no others.
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "1")
    is_only_task = re.fullmatch(r"1(\(x\d+\))?", per_node)  # "1(x2)": two nodes with one task each
    if (is_only_task or "SLURM_GPUS_PER_TASK" in env) and "JAX_LOCAL_DEVICE_IDS" not in env:
        cluster["local_device_ids"] = []
    # This limit comes before jax's, which ends the process with a dump of C++ frames.
    message = (
        f"error: not all processes have joined within INIT_TIMEOUT_S={init_timeout_s} "
        f"seconds{this_process}. Is the same command running on every worker? Their logs say why "
        f"not"
    )
    limit = end_after(init_timeout_s, 1, message)
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is StopSignal's
    jax.distributed.initialize(
        **cluster,
        initialization_timeout=init_timeout_s + 30,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    )
    limit.cancel()


def raise_if_launched_with_others() -> None:
    """Raises UserMistake if a launcher has started several processes, which would train alone."""
    env = os.environ
    # srun may set PMI_SIZE; with SLURM_STEP_NUM_TASKS=1 each of its tasks is a run of its own.
    tasks = env.get("SLURM_NTASKS") if "SLURM_STEP_NUM_TASKS" in env else None
    seen = [name for name in COUNT_VARIABLES if env.get(name, "") not in ("", "0", "1", tasks)]
    seen += [name for name in ("JAX_COORDINATOR_IP", "JAX_PROCESS_ID") if env.get(name)]
    if seen and env.get("JAX_NUM_PROCESSES") != "1":
        raise UserMistake(
            f"{' '.join(f'{name}={env[name]}' for name in seen)}: this seems to be one of several "
            f"processes, and would train alone; set JAX_COORDINATOR_ADDRESS=host:port, "
            f"JAX_NUM_PROCESSES and JAX_PROCESS_ID on each, or JAX_NUM_PROCESSES=1 to train alone"
        )


# ---- Comparing -----------------------------------------------------------------------------------


def raise_if_process_count_differs(require_multihost: bool, require_process_count: int) -> None:
    """Raises UserMistake if the number of processes that have joined is not the required one."""
    count = jax.process_count()
    if require_multihost and count == 1:
        raise UserMistake(
            "REQUIRE_MULTIHOST=1, and this process is alone: start the same command on every host "
            "of the slice, elsewhere with srun or JAX_COORDINATOR_ADDRESS"
        )
    if require_process_count not in (0, count):
        raise UserMistake(f"REQUIRE_JAX_PROCESS_COUNT={require_process_count}, but {count} joined")


def raise_if_processes_differ(facts: dict[str, str]) -> None:
    """Raises the same UserMistake on every process if the facts of a process differ from those of
    process 0. All processes have to call it.

    facts: {name: value} of all that has to be the same.
    """
    first, *rest = (json.loads(text) for text in gather_texts(json.dumps(facts)))
    for i, other in enumerate(rest, 1):
        differences = [
            f"{name} is {first.get(name, 'missing')} on process 0, "
            f"{other.get(name, 'missing')} on process {i}"
            for name in first | other
            if first.get(name) != other.get(name)
        ]
        if differences:
            raise UserMistake(f"the processes differ: {', '.join(differences)}")


@contextlib.contextmanager
def raising_on_all_processes(kind: type[Exception] = UserMistake) -> Iterator[None]:
    """If a process finds a mistake within this context, all processes raise an error of this kind
    with the same text, so that all end alike. A mistake is a UserMistake, an Unwritable, or an
    OSError about a file.

    Nothing within the context may wait for another process.
    """
    mistake = ""
    try:
        yield
    except (UserMistake, Unwritable) as error:
        mistake = str(error)
    except OSError as error:
        if not error.filename:  # such as a lost connection
            raise
        mistake = f"{error.filename}: {error.strerror}"
    for i, text in enumerate(gather_texts(mistake)):
        if text:
            prefix = f"process {i}: " if i else ""
            raise kind("\n".join(prefix + line for line in text.splitlines()))


def gather_texts(text: str) -> list[str]:
    """The texts of all processes, in process order; all processes have to call it."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))  # [processes]
    width = 1 << int(sizes.max()).bit_length()  # few widths, so that few programs are compiled
    padded = np.pad(data, (0, width - data.size))
    gathered = multihost_utils.process_allgather(padded)  # [processes, bytes]
    return [bytes(x[:size]).decode() for x, size in zip(gathered, sizes, strict=True)]


_barriers = itertools.count()


@contextlib.contextmanager
def waiting_for_processes() -> Iterator[None]:
    """At the end of this context each process waits for the others, and no device waits. If a
    process raises an error within it, all processes raise one."""
    if jax.process_count() == 1:
        yield
        return
    client: Any = distributed.global_state.client
    name = f"wait_{next(_barriers)}"
    week_ms = 7 * 24 * 3600 * 1000  # the service ends the wait when a process is gone
    try:
        yield
    except Exception:
        client.key_value_set(f"{name}/{jax.process_index()}", "failed")
        raise
    finally:
        client.wait_at_barrier(name, week_ms)
    if failed := client.key_value_dir_get(name):  # keys and values
        raise RuntimeError(f"process {failed[0][0].rpartition('/')[2]} failed before a barrier")


def changed_random_numbers() -> dict[str, str]:
    """The settings of jax that make other random numbers than its defaults, {name: value}."""
    usual = dict(
        default_prng_impl="threefry2x32", threefry_partitionable=True, random_seed_offset=0
    )
    values = {name: getattr(jax.config, f"jax_{name}") for name in usual}
    return {f"JAX_{name.upper()}": str(x) for name, x in values.items() if x != usual[name]}


# ---- Stopping ------------------------------------------------------------------------------------


DEADLINE = -1  # in place of the number of a signal: MAX_HOURS are nearly over


class StopRequested(Exception):
    """The run has to stop here. number: of the signal that asks for it, or DEADLINE."""

    def __init__(self, number: int) -> None:
        self.at_deadline = number == DEADLINE
        super().__init__("MAX_HOURS" if self.at_deadline else signal.Signals(number).name)
        self.exit_code = 0 if self.at_deadline else 128 + number


def heeded_signals() -> list[signal.Signals]:
    """STOP_SIGNALS without those that the process was started to ignore: nohup and the background
    of a script do so."""
    ignored = [x for x in STOP_SIGNALS[1:] if signal.getsignal(x) == signal.SIG_IGN]
    return [x for x in STOP_SIGNALS if x not in ignored]


class StopSignal:
    """STOP_SIGNALS end the process at once, until `watch` is called on the main thread; from then
    on they stop the run at its next `raise_if_stopped`. So does the clock if is_late() is true."""

    def __init__(self) -> None:
        self._number = 0  # of the signal that has arrived
        self.is_late: Callable[[], bool] = lambda: False

    def watch(self, grace_s: int) -> None:
        """From now on a thread receives signals, because Python's handlers wait while the main
        thread compiles. It ends the process at a second signal, and when the time is over.

        grace_s: the longest time in seconds from a signal to the end of the process.
        """
        pipe, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)  # gets a byte with the number of each signal
        for number in heeded_signals():
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._wait, args=[pipe, grace_s], daemon=True).start()

    def _wait(self, pipe: int, grace_s: int) -> None:
        number = _next_signal(pipe)
        arrived, code = time.monotonic(), 128 + number
        if number == signal.SIGHUP:  # the terminal is gone: writing to it would end the run
            for stream in (1, 2):
                if stat.S_ISCHR(os.fstat(stream).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        self._number = number  # from here on the main thread stops, and prints
        message = f"error: PREEMPTION_GRACE_S={grace_s} seconds are over; nothing more is saved"
        end_after(max(1, grace_s - 1), code, message)
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # the disk is full, or the pipe is closed
            print(f"{name}: stopping at the next point where the run can be saved", flush=True)
        while time.monotonic() < arrived + 0.5:  # a wrapper may repeat the terminal's Ctrl-C
            _next_signal(pipe)
        end_process(code, "error: a second signal; ending without a checkpoint")

    def raise_if_stopped(self) -> None:
        """Raises StopRequested on all processes, at the same call, after a signal to any one, or if
        any one is late. A signal takes precedence."""
        number = self._number or DEADLINE * self.is_late()
        if jax.process_count() > 1:
            numbers = multihost_utils.process_allgather(np.int32(number))
            number = int(numbers.max() or numbers.min())
        if number:
            raise StopRequested(number)


def _next_signal(pipe: int) -> int:
    while (number := os.read(pipe, 1)[0]) not in STOP_SIGNALS:
        pass
    return number


# ---- Ending --------------------------------------------------------------------------------------


@contextlib.contextmanager
def exiting_on_error() -> Iterator[None]:
    """An error within this context ends this process at once, with its line as the last one. A
    UserMistake, and a log that cannot be written, end it with exit code 2.

    jax's normal exit would wait for minutes for the other processes, which wait for this one.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit):
            if isinstance(error.code, int):
                end_process(error.code)
            end_process(1, error.code or "")
        if isinstance(error, UserMistake):
            end_process(2, "\n".join(f"error: {line}" for line in str(error).splitlines()))
        if isinstance(error, OSError) and error.errno in WRITE_ERRNOS and not error.filename:
            try:
                print(flush=True)
            except OSError as failure:
                end_process(2, f"error: the log cannot be written: {failure.strerror}")
        if is_lost_connection(error):
            reason = " ".join(str(error).split())[:200]
            end_process(1, f"error: another process is gone; its log says why ({reason})")
        end_process(1, "".join(traceback.format_exception(error)).rstrip())


def is_lost_connection(error: BaseException) -> bool:
    """Whether this process has joined others, and the error says that one of them is gone."""
    # jax.process_count() would start the devices, and that may be what has failed.
    joined = distributed.global_state.num_processes > 1
    # Words in the errors of Gloo (CPUs), NCCL (GPUs), jax's service and waiting_for_processes.
    words = r"(?i)\bgloo\b|\bnccl|coordination.?service|heartbeat|before a barrier|barrier.id:"
    is_lost = bool(re.search(rf"{words}|barrier (timed out|failed)", str(error)))
    return joined and isinstance(error, RuntimeError | ValueError) and is_lost


def end_after(seconds: float, code: int, line: str) -> threading.Timer:
    """The timer that ends this process after so many seconds, unless it is cancelled before."""
    timer = threading.Timer(seconds, end_process, [code, line])
    timer.daemon = True
    timer.start()
    return timer


def end_process(code: int, line: str = "") -> NoReturn:
    """Ends this process at once, from any thread, with a last line on stderr if there is one. It
    waits for no thread and no other process."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, f"{line}\n" if line else "")):
        with contextlib.suppress(OSError):  # the disk is full, or the pipe is closed
            stream.write(text)
            stream.flush()
    os._exit(code)
