"""Runs a user's reward function in a reward worker, a separate Python interpreter.

The first half of this file runs in the trainer. The second half runs in the reward worker, which
executes this file as its main script. Both sides send JSON through a connection.
"""

import contextlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from subprocess import DEVNULL, Popen

if __name__ != "__main__":  # As a script this file cannot import its neighbours.
    from runtime.mistakes import UserMistake

LOAD_LIMIT_S = 60.0  # The user's file may import torch. Each call has its own limit.


# ---- In the trainer ------------------------------------------------------------------------------


class RewardWorker:
    """Calls the function that `source` ("file.py:name") names, in a reward worker.

    Because of the worker a time limit holds on any thread, and a hang or a crash becomes one line.
    The worker is a fresh interpreter: a fork would copy the locks of JAX, and multiprocessing's
    spawn would import the main script of the trainer. The worker does not use the accelerator. It
    ends at close(), or when the trainer ends.
    Raises UserMistake with a message of one line for every failure.
    """

    def __init__(self, source: str, timeout_s: float) -> None:
        """timeout_s: the time limit of each call. Returns when the user's file is loaded."""
        file, _, self.__name__ = source.rpartition(":")
        self._source, self._timeout_s = source, timeout_s
        self._connection, theirs = Pipe()
        with theirs:
            program = [sys.executable, "-u", __file__, str(theirs.fileno())]
            self._process = Popen(
                [*program, os.path.abspath(file), self.__name__],
                stdin=DEVNULL,
                stdout=2,  # What the function prints goes to stderr.
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C reaches the trainer alone
            )
        self._ask(None, LOAD_LIMIT_S, f"did not load within {LOAD_LIMIT_S:g} s")

    def __call__(self, completions: list[str], /, **columns: list) -> list[float | None]:
        """Returns the rewards of the completions. columns: lists of the same length, of what JSON
        can hold."""
        late = f"is not done after REWARD_TIMEOUT_S={self._timeout_s:g}; raise it or speed it up"
        return self._ask([[completions], columns], self._timeout_s, late)

    def _ask(self, request: list | None, limit_s: float, late: str) -> list[float | None]:
        """Sends the request, if there is one, and returns the rewards of the reply.

        Without a reply within limit_s it ends the worker; `late` is the error message then.
        """
        reply: dict = {}
        try:
            if request:
                self._connection.send_bytes(json.dumps(request).encode())
            reply = {"error": late}
            if self._connection.poll(limit_s):
                # parse_int: an integer too large for a float becomes inf, which the caller refuses.
                reply = json.loads(self._connection.recv_bytes(), parse_int=float)
        except (OSError, EOFError):  # The worker is dead.
            reply = {}
        finally:
            # After Ctrl-C too: otherwise the next call would receive the reply to this request.
            if "rewards" not in reply:
                self.close()
        if "rewards" not in reply:
            died = f"died: its process ended with exit code {self._process.returncode}"
            raise UserMistake(f"REWARD_FN {self._source} {reply.get('error', died)}")
        return reply["rewards"]

    def close(self) -> None:
        """Ends the worker at once, also during a call."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


# ---- In the reward worker ------------------------------------------------------------------------


def _serve(connection: Connection, file: str, name: str) -> None:
    """Loads the function `name` of `file`, then answers requests until the trainer ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The trainer handles Ctrl-C.

    def respond(act: Callable, args: list, columns: dict) -> None:
        try:
            reply = json.dumps({"rewards": act(*args, **columns)}, default=_plain)
        except (Exception, SystemExit) as error:  # The user's code may raise anything.
            reply = json.dumps({"error": "raised " + _as_raised(error, file)})
        connection.send_bytes(reply.encode())

    with contextlib.suppress(EOFError, OSError):  # The trainer has ended.
        respond(_load, [file, name], {})
        function = getattr(sys.modules["user_rewards"], name, None)
        while True:
            respond(function, *json.loads(connection.recv_bytes()))


def _load(file: str, name: str) -> list[float | None]:
    """Imports `file` as sys.modules["user_rewards"]; returns an empty list of rewards.

    Raises ValueError if the file does not define the function `name`.
    """
    sys.path.insert(0, os.path.dirname(file))  # The file imports its neighbours, like any script.
    spec = importlib.util.spec_from_file_location("user_rewards", file)
    module = sys.modules["user_rewards"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{os.path.basename(file)} defines no function {name}")
    return []


def _plain(value: object) -> object:
    """Returns lists and numbers for the arrays and scalars of NumPy, JAX, torch and pandas."""
    return value.tolist() if hasattr(value, "tolist") else float(value)


def _as_raised(error: BaseException, file: str) -> str:
    """Returns the type of the exception, its message, and the last line of `file` that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    at = [f" ({os.path.basename(file)}:{f.lineno})" for f in frames if f.filename == file]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{''.join(at[-1:])}"


if __name__ == "__main__":
    # The user's file may import rewards.py. Python has put runtime/ here, the folder of this file.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    _serve(Connection(int(sys.argv[1])), *sys.argv[2:4])
