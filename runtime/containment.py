"""Keeps a serving engine in this process from slowing, changing or ending the process."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

import numpy as np

IDLE_S = 0.2  # the time after which an idle scheduler looks whether it should end


class EngineFailed(RuntimeError):
    """A thread of the engine has ended with an exception, whose traceback is the message."""


class Gate:
    """Lets the engine's scheduler work only while a rollout pass waits for it.

    Otherwise it would ask for new sequences all the time, also while the trainer computes. It gets
    all sequences of a pass at once and in their order, so that it computes the same each time.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._receive = scheduler, scheduler.recv_requests
        self._open, self._missing, self._ended = threading.Event(), 0, False
        self._arrived: list[Any] = []
        scheduler.recv_requests = self._next

    @contextlib.contextmanager
    def passing(self, sequences: int) -> Iterator[None]:
        """The scheduler works within this context, once so many sequences have arrived."""
        ERRORS.text, self._missing = "", sequences
        self._open.set()
        try:
            yield
            # A program may still run that was started before its last sequence was known to end.
            while self._scheduler.last_batch is not None:
                time.sleep(0.001)
        finally:
            self._open.clear()

    def end(self) -> None:
        """Ends the thread of the scheduler."""
        self._ended = True
        self._open.set()
        for thread in threading.enumerate():
            if thread.name.startswith("sglang::scheduler"):
                thread.join(timeout=5)

    def _next(self) -> list[Any]:
        """Replaces recv_requests of the scheduler, which calls it before each of its programs."""
        self._open.wait(IDLE_S)
        if self._ended:
            raise SystemExit
        self._arrived += self._receive()
        if not self._arrived or len(self._arrived) < self._missing:
            time.sleep(0.001)
            return []
        arrived, self._arrived, self._missing = self._arrived, [], 0
        return sorted(arrived, key=lambda request: request.sampling_params.sampling_seed)


class Errors(logging.Handler):
    """Keeps the first error that the engine logs; its threads log their exceptions. What it logs
    after that is about its own end."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


ERRORS = Errors()


class ThisProcess:
    """Takes the place of the parent process, to which the engine's threads send their signal."""

    def send_signal(self, number: int) -> None:
        os.kill(os.getpid(), number)


def fail_on_main_thread(*_: Any, **__: Any) -> None:
    """Raises EngineFailed on the main thread. It replaces the engine's kill_process_tree, and it is
    the handler of SIGQUIT, which the threads of the engine send after an exception."""
    if threading.current_thread() is not threading.main_thread():
        os.kill(os.getpid(), signal.SIGQUIT)
    elif ERRORS.text:
        raise EngineFailed(ERRORS.text)
    else:  # somebody else sent it, such as Ctrl-\ in a terminal
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGQUIT)


@contextlib.contextmanager
def side_effects_undone() -> Iterator[None]:
    """Restores what an import of the engine, and an engine that starts, change in this process."""
    root, policy = logging.getLogger(), asyncio.get_event_loop_policy()
    numbers, draws, logs, level = (
        np.random.get_state(),
        random.getstate(),
        [*root.handlers],
        root.level,
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGQUIT)}
    places = [(threading, "_register_atexit"), (resource_tracker._resource_tracker, "_fd")]
    values = [getattr(*place) for place in places]
    try:
        yield
    finally:
        np.random.set_state(numbers)
        random.setstate(draws)
        root.handlers[:] = logs
        root.setLevel(level)
        asyncio.set_event_loop_policy(policy)  # orbax needs the policy of Python
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for place, value in zip(places, values, strict=True):
            setattr(*place, value)
