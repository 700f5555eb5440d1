"""Says that work which takes long goes on: a bar on a terminal, and elsewhere a line every 30 s.

LongWork that is done sooner says nothing. A thread looks at all work once in a while, so that work
itself only counts what it has done.
"""

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Iterator

import jax
from tqdm import tqdm

INTERVAL_S = 30.0  # between two lines; a bar appears after a tenth of it
LOOKS = 30  # how often the thread looks in an interval
COMPILING = "/jax/core/compile/backend_compile_duration"  # jax's name for a compilation


class LongWork:
    """A piece of work that may take long."""

    def __init__(self, what: str, total: float | None, unit: str) -> None:
        self.done: float = 0
        self._what, self._total, self._unit = what, total, unit
        self._began, self._lines = time.time(), 0
        self._shows_bar = jax.process_index() == 0 and sys.stderr.isatty()
        self._bar: tqdm | None = None

    def advance(self, amount: float = 1) -> None:
        """Counts a part that is done."""
        self.done += amount

    def tell(self, interval_s: float) -> None:
        """Moves the bar, or prints a line if the next one is due."""
        seconds = time.time() - self._began
        if self._shows_bar:
            if seconds >= interval_s / 10:
                self._move_bar()
        elif seconds >= interval_s * (self._lines + 1):
            self._lines += 1
            amounts = "" if self._total is None else f": {self._amounts()}"
            # In one piece, since another thread may print at the same time.
            print(f"{self._what} for {seconds:.0f} s{amounts}\n", end="", flush=True)

    def end(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()

    def _amounts(self) -> str:
        form = ".1f" if isinstance(self._total, float) else "d"
        return f"{self.done:{form}} of {self._total:{form}} {self._unit}"

    def _move_bar(self) -> None:
        if self._bar is None:
            form = "{desc} for {elapsed}" if self._total is None else None
            more = {"total": self._total, "unit": f" {self._unit}", "bar_format": form}
            self._bar = tqdm(desc=self._what, leave=False, **more)
            self._bar.start_t = self._began
        self._bar.n = self.done
        self._bar.refresh()


class _Watched:
    """The work that a thread looks at, each piece until it ends."""

    def __init__(self, interval_s: float) -> None:
        self._works: list[LongWork] = []
        self._interval_s, self._lock = interval_s, threading.Lock()
        threading.Thread(target=self._look, daemon=True, name="long work").start()

    def add(self, work: LongWork) -> None:
        with self._lock:
            self._works.append(work)

    def remove(self, work: LongWork) -> None:
        """After this nothing is said about the work."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._works.remove(work)
            work.end()

    def _look(self) -> None:
        while True:
            time.sleep(self._interval_s / LOOKS)
            with self._lock:
                for work in self._works:
                    with contextlib.suppress(OSError, ValueError):  # the disk or the pipe is full
                        work.tell(self._interval_s)


@functools.cache
def _watched(interval_s: float) -> _Watched:
    return _Watched(interval_s)


@contextlib.contextmanager
def long_work(
    what: str, total: float | None = None, unit: str = "", *, interval_s: float = INTERVAL_S
) -> Iterator[LongWork]:
    """Says how far the work within this context is, while it lasts.

    what: such as "loading weights". total: how much there is to do, in `unit`; None: not known.
    """
    work, watched = LongWork(what, total, unit), _watched(interval_s)
    watched.add(work)
    try:
        yield work
    finally:
        watched.remove(work)


@functools.cache  # jax would tell each of two listeners
def tell_compilations(interval_s: float = INTERVAL_S) -> None:
    """From now on jax's compilations are long work, too."""
    running: dict[int, contextlib.ExitStack] = {}  # the compilation of each thread

    def begins(event: str, _: float, *, fun_name: str = "", **__: object) -> None:
        if event == COMPILING:
            stack = running[threading.get_ident()] = contextlib.ExitStack()
            what = f"compiling {program_of(fun_name) or 'a program'}"
            stack.enter_context(long_work(what, interval_s=interval_s))

    def ends(event: str, _: float, **__: object) -> None:  # also after an error
        if event == COMPILING and threading.get_ident() in running:
            running.pop(threading.get_ident()).close()

    jax.monitoring.register_scalar_listener(begins)
    jax.monitoring.register_event_duration_secs_listener(ends)


def program_of(fun_name: str) -> str:
    """The jitted function's name, as it is in the code, from jax's name for it."""
    return fun_name.removeprefix("jit(").removesuffix(")")
