"""What is seen of work that takes long: bars on a terminal, and the seconds of compilations."""

import functools

import jax
from tqdm import tqdm

DELAY_S = 3.0  # work that takes longer gets its bar
COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's name for a compilation


def progress_bar(what: str, total: int, unit: str) -> tqdm:
    """A bar on the terminal of process 0, for use in a `with`; elsewhere it shows nothing.

    total: how much there is to do, in `unit`, such as "tensors"; bar.update(amount) counts what is
    done.
    """
    hidden = None if jax.process_index() == 0 else True  # None: hidden unless on a terminal
    look = {"unit": f" {unit}", "delay": DELAY_S, "leave": False}
    return tqdm(desc=what, total=total, disable=hidden, **look)


@functools.cache  # jax would tell each of two listeners
def compilations() -> list[float]:
    """The seconds of each program that jax has compiled in this process since the first call, or
    read from its cache of compiled programs; the list grows."""
    done: list[float] = []

    def note(event: str, seconds: float, **_: object) -> None:
        if event == COMPILED:
            done.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    return done
