"""Runs a user's reward function in a reward worker, a separate Python interpreter.

The first half of this file runs in the trainer. The second half runs in the reward worker, which
executes this file as its main script. Both sides speak JSON, a line per message.
"""

import contextlib
import faulthandler
import importlib.util
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Set
from subprocess import PIPE, Popen

if __name__ != "__main__":  # As a script this file cannot import its neighbours.
    from runtime.mistakes import UserMistake

LOAD_LIMIT_S = 60.0  # The user's file may import torch. Each call has its own limit.


# ---- In the trainer ------------------------------------------------------------------------------


class RewardWorker:
    """Calls the function that `source` ("file.py:name") names, in a reward worker.

    Because of the worker a time limit holds on any thread, and a hang or a crash becomes one line.
    The worker is a fresh interpreter: a fork would copy the locks of JAX, and multiprocessing's
    spawn would import the main script of the trainer. The worker does not use the accelerator. It
    ends when its stdin closes: at close(), or when the trainer ends.
    Raises UserMistake with a message of one line for every failure.
    """

    def __init__(self, source: str, timeout_s: float) -> None:
        """timeout_s: the time limit of each call. Returns when the user's file is loaded."""
        file, _, self.__name__ = source.rpartition(":")
        self._source, self._timeout_s, self._lock = source, timeout_s, threading.Lock()
        program = [sys.executable, "-u", __file__]
        command = [*program, os.path.abspath(file), self.__name__, str(timeout_s)]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        # A new session, so that Ctrl-C reaches the trainer alone.
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, env=env, start_new_session=True)
        self._ask(b"", LOAD_LIMIT_S, f"did not load within {LOAD_LIMIT_S:g} s")

    def __call__(self, completions: list[str], /, **columns: list) -> list[float | None]:
        """Returns the rewards of the completions. columns: lists of the same length."""
        try:
            request = json.dumps([[completions], columns])
        except (TypeError, ValueError) as error:
            names = ", ".join(columns)
            raise UserMistake(f"REWARD_FN {self._source}: columns {names}: {error}") from error
        late = f"is not done after REWARD_TIMEOUT_S={self._timeout_s:g}; raise it or speed it up"
        with self._lock:
            return self._ask(request.encode() + b"\n", self._timeout_s, late)

    def _ask(self, request: bytes, limit_s: float, late: str) -> list[float | None]:
        """Sends the request and returns the rewards of the reply.

        Without a reply within limit_s it ends the worker; `late` is the error message then.
        """
        replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def talk() -> None:
            try:
                self._process.stdin.write(request)
                self._process.stdin.flush()
                replies.put(self._process.stdout.readline())
            except (OSError, ValueError):  # The worker is dead, or close() has closed the pipes.
                replies.put(b"")

        # A thread waits on the pipes because no portable read or write takes a time limit.
        self._talker = threading.Thread(target=talk, daemon=True)
        self._talker.start()
        reply: dict = {"error": late}
        try:
            with contextlib.suppress(queue.Empty):
                line = replies.get(timeout=limit_s)
                # parse_int: an integer too large for a float becomes inf, which the caller refuses.
                reply = json.loads(line, parse_int=float) if line.endswith(b"\n") else {}
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
        self._talker.join(timeout=1)
        if not self._talker.is_alive():  # Otherwise a child of the worker still holds the pipes.
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.stdout.close()


# ---- In the reward worker ------------------------------------------------------------------------


def _serve(file: str, name: str, timeout_s: float) -> None:
    """Loads the function `name` of `file`, then answers requests until stdin closes."""
    requests, replies = open(os.dup(0), "rb"), open(os.dup(1), "wb")
    nowhere = open(os.devnull, "r+b")
    os.dup2(nowhere.fileno(), 0)
    os.dup2(2, 1)  # The function's prints go to stderr, so that they never mix with the replies.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The trainer handles Ctrl-C.

    def respond(limit_s: float, act: Callable, args: list, columns: dict) -> None:
        # Ends the worker without a word if it hangs, even inside a regular expression, after the
        # trainer has died. A living trainer ends it earlier.
        faulthandler.dump_traceback_later(2 * limit_s, exit=True, file=nowhere)
        try:
            returned = act(*args, **columns)
            if wrong := _what_is_no_list(returned):
                told = f"must return a list of {len(args[0])} rewards, not {wrong}"
                reply = json.dumps({"error": told})
            else:
                # default=float converts the scalars of NumPy, JAX and torch.
                reply = json.dumps({"rewards": list(returned)}, default=float)
        except (Exception, SystemExit) as error:  # The user's code may raise anything.
            reply = json.dumps({"error": "raised " + _as_raised(error, file)})
        faulthandler.cancel_dump_traceback_later()
        try:
            replies.write(reply.encode() + b"\n")
            replies.flush()
        except BrokenPipeError:  # The trainer is gone. A normal exit would flush `replies` again.
            os._exit(0)

    respond(LOAD_LIMIT_S, _load, [file, name], {})
    for line in requests:
        if not line.endswith(b"\n"):  # The trainer has ended while it was writing the request.
            return
        respond(timeout_s, getattr(sys.modules["user_rewards"], name), *json.loads(line))


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


def _what_is_no_list(returned: object) -> str:
    """Returns "" for anything that gives one reward after the other, else its type.

    list() would make the keys of a dict into rewards, and the names of a table's columns.
    """
    kind, shape = type(returned).__name__, getattr(returned, "shape", (0,))
    without_order = isinstance(returned, Mapping | Set | str | bytes | bytearray)
    if without_order or not isinstance(returned, Iterable):
        return kind
    return "" if len(shape) == 1 else f"{kind} of shape {tuple(shape)}"


def _as_raised(error: BaseException, file: str) -> str:
    """Returns the type of the exception, its message, and the last line of `file` that raised.

    runtime.mistakes is not used here: its import would hide a runtime.py beside the user's file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    at = [f" ({os.path.basename(file)}:{f.lineno})" for f in frames if f.filename == file]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{''.join(at[-1:])}"


if __name__ == "__main__":
    # The user's file may import rewards.py. Python has put runtime/ here, the folder of this file.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    _serve(sys.argv[1], sys.argv[2], float(sys.argv[3]))
