"""What is seen of work that takes long: bars on a terminal, and one line after 30 seconds."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import NamedTuple

import jax
from tqdm import tqdm

LIMIT_S = 30.0  # work that takes longer gets its line
DELAY_S = 3.0  # work that takes longer gets its bar
COMPILING = "/jax/core/compile/backend_compile_duration"  # jax's name for a compilation


def print_line(text: str) -> None:
    """Prints a line above the bars, in one piece, since another thread may print now."""
    with tqdm.external_write_mode():
        print(text + "\n", end="", flush=True)


def progress_bar(what: str, total: int, unit: str) -> tqdm:
    """A bar on the terminal of process 0, for use in a `with`; elsewhere it shows nothing.

    total: how much there is to do, in `unit`; bar.update(amount) counts what is done. unit: such as
    "tokens"; "B" are bytes, which the bar shows as GB.
    """
    hidden = None if jax.process_index() == 0 else True  # None: hidden unless on a terminal
    look = {"unit": f" {unit}", "unit_scale": unit == "B", "leave": False}
    return tqdm(desc=what, total=total, delay=DELAY_S, disable=hidden, **look)


@contextlib.contextmanager
def tell_if_long(what: str) -> Iterator[None]:
    """Prints one line if the work within this context, such as "loading weights", takes long."""
    timer = _started_timer(what)
    try:
        yield
    finally:
        timer.cancel()


class Compilation(NamedTuple):
    """A program that jax has compiled, or read from its cache of compiled programs."""

    program: str  # the name of the jitted function
    seconds: float


@functools.cache  # jax would tell each of two listeners
def compilations() -> list[Compilation]:
    """What jax has compiled in this process since the first call; the list grows. From then on a
    compilation that takes long gets a line, too."""
    done: list[Compilation] = []
    running: dict[int, threading.Timer] = {}  # the timer of each thread that compiles

    def begins(event: str, _: float, *, fun_name: str = "", **__: object) -> None:
        if event == COMPILING:
            running[threading.get_ident()] = _started_timer(f"compiling {_program_of(fun_name)}")

    def ends(event: str, seconds: float, *, fun_name: str = "", **_: object) -> None:
        if event == COMPILING:  # also after an error
            running.pop(threading.get_ident()).cancel()
            done.append(Compilation(_program_of(fun_name), seconds))

    jax.monitoring.register_scalar_listener(begins)
    jax.monitoring.register_event_duration_secs_listener(ends)
    return done


def _program_of(fun_name: str) -> str:
    """The jitted function's name, as it is in the code, from jax's name for it."""
    return fun_name.removeprefix("jit(").removesuffix(")")


def _started_timer(what: str) -> threading.Timer:
    timer = threading.Timer(LIMIT_S, print_line, [f"{what} takes longer than {LIMIT_S:g} s"])
    timer.daemon = True
    timer.start()
    return timer
