"""Keeps a serving engine in this process from slowing, changing or ending the process."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax


class EngineFailed(jax.errors.JaxRuntimeError):
    """A thread of the engine has ended with an exception, whose traceback is in the message.

    It is an error of jax, because it may be about the memory of a device.
    """


class Gate:
    """Lets the engine's scheduler work only while a rollout pass waits for it.

    Otherwise it would ask for new sequences all the time, also while the trainer computes. It gets
    all sequences of a pass at once and in their order, so that it computes the same each time.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._receive = scheduler, scheduler.recv_requests
        self._open, self._missing = threading.Event(), 0
        self._arrived: list[Any] = []
        scheduler.recv_requests = self._next

    @contextlib.contextmanager
    def passing(self, sequences: int) -> Iterator[None]:
        """The scheduler works within this context, once so many sequences have arrived."""
        self._missing = sequences
        self._open.set()
        try:
            yield
            # A program may still run that was started before its last sequence was known to end.
            while self._scheduler.last_batch is not None:
                time.sleep(0.001)
        finally:
            self._open.clear()

    def end(self) -> None:
        """Ends the scheduler's thread. If it computes while Python ends, the process aborts."""
        self._scheduler.recv_requests = sys.exit
        self._open.set()
        for thread in threading.enumerate():
            if thread.name.startswith("sglang::scheduler"):
                thread.join(timeout=5)

    def _next(self) -> list[Any]:
        """Replaces recv_requests of the scheduler, which calls it before each of its programs."""
        self._open.wait()
        self._arrived += self._receive()
        if not self._arrived or len(self._arrived) < self._missing:
            time.sleep(0.001)
            return []
        arrived, self._arrived, self._missing = self._arrived, [], 0
        return sorted(arrived, key=lambda request: request.sampling_params.sampling_seed)


class Errors(logging.Handler):
    """Raises on the main thread what a thread of the engine has logged before its end."""

    def __init__(self, logger: logging.Logger) -> None:
        """logger: of the engine, whose threads log an exception before they send SIGQUIT."""
        super().__init__(logging.ERROR)
        self._lines: list[str] = []
        logger.addHandler(self)
        logger.propagate = False  # what it says comes with the exception
        signal.signal(signal.SIGQUIT, self._raise)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def _raise(self, *_: Any) -> None:
        raise EngineFailed("\n".join(self._lines) or "SIGQUIT")


def fail_on_main_thread(*_: Any, **__: Any) -> None:
    """Replaces the functions with which the engine's threads would end this process or its parent
    after an exception."""
    os.kill(os.getpid(), signal.SIGQUIT)
