"""The answer format we ask for, and text -> score.

A reward is any function `fn(completions, **columns)`: the completions' texts, their tokens
`completion_ids` and the dataset's columns (`answer` among them) as lists beside them; one float per
completion comes back, or None where it does not apply. Three are built in, two penalties ready to
be named in REWARD_FN; REWARD_FN=file.py:name runs others, each in its own process.
"""

import contextlib
import faulthandler
import importlib.util
import json
import os
import queue
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from subprocess import PIPE, Popen
from types import MappingProxyType

import numpy as np

SYSTEM_PROMPT = """\
Reason step by step inside <think> </think>. Then, on the next line, write only the final number \
inside <answer> </answer>. Use exactly this form:
<think>your reasoning</think>
<answer>your number</answer>"""

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
Rewards = list[float | None]  # one per completion
RewardFunction = Callable[..., Rewards]

# Longest number and largest power of ten read: int() refuses 4301 digits, 1e999999999 is 400 MB.
_MAX_NUMBER = 300
_WINDOW = 4096  # characters up to the last digit in which the last number is looked for
_LOAD_LIMIT_S = 60.0  # a reward's file may import torch; scoring has its own limit

# Minus sign, en dash and fraction slash are written as their ASCII cousins.
_PLAIN = str.maketrans({"−": "-", "–": "-", "⁄": "/", "½": " 1/2", "¼": " 1/4", "¾": " 3/4"})
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")

# Linear on any text: no two repeats can share a character, so a failed try gives up at once.
_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|(?<![\w.])\.[0-9]+)"
_NUMBER = re.compile(
    rf"""
    \^\{{?[-+]?[0-9]+                                    # a power, as in 72 cm^2: not the answer
    | (?P<minus>(?:(?<![0-9A-Za-z)\]}}%])-               # "-5", but 5 in "10-5" and "GPT-5"
      | (?:^|(?<=[=:($\[{{])[ ]?)-[ ])\\?[$€£]?)?        # "- 5", but 5 in "10 - 5"
      (?P<number>{_DECIMAL})
      (?: (?:[eE]|[ ]?(?:[x×*]|\\times)[ ]?10\^\{{?)(?P<power>[-+]?[0-9]+)
        | (?:[ ](?P<top>[0-9]+)/|[ ]?/[ ]?)(?P<bottom>{_DECIMAL})  # "1 1/2" or "1/2"
      )?
    """,
    re.VERBOSE,
)


def parse_number(text: str) -> Fraction | None:
    """The last number in `text`, exactly; None if there is none, or one nobody would write.

    Reads 1,234 and .5 and 5. and -$5 and 3/4 and 1 1/2 and 2e3 and 2 x 10^3, and LaTeX's fractions;
    units, currency and the percent sign are dropped (50% is 50, as GSM8K writes it). Several
    numbers ("23+45=68", "5 or 6"): the last. A zero denominator is no number.
    """
    text = text.strip().translate(_PLAIN)
    last, match = max(map(text.rfind, "0123456789")), None
    text = text[max(0, last - _WINDOW) : last + 2].replace("{,}", ",").replace(r",\!", ",")
    for found in _NUMBER.finditer(_LATEX_FRACTION.sub(r" \1/\2", text)):
        match = found if found["number"] else match
    if match is None or len(match[0]) > _MAX_NUMBER:
        return None
    exponent = int(match["power"] or 0)
    bottom = Fraction((match["bottom"] or "1").replace(",", ""))
    if abs(exponent) > _MAX_NUMBER or bottom == 0:
        return None
    value = Fraction(match["number"].replace(",", "")) * Fraction(10) ** exponent
    # "1 1/2" is one number; "5 10/2" and "2.5 1/2" are two, and the last one counts
    part = Fraction(match["top"] or value) / bottom
    mixed = match["top"] and part < 1 and value.denominator == 1
    value = value + part if mixed else part
    return -value if match["minus"] else value


def extract_answer(text: str) -> Fraction | None:
    """The number a completion answers with, or None.

    It stands in the last closed <answer>; with none closed (a truncated completion), between the
    last <answer> and the end; without any, it is the last number of the text. An <answer> that
    holds no number is no answer, whatever stands around it.
    """
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start == -1:
        start = text.rfind("<answer>")
    return parse_number(text if start == -1 else text[start + 8 :].partition("</answer>")[0])


def reward_correct(completions: list[str], answer: list[str], **columns: list) -> Rewards:
    """1.0 where the completion's number equals the reference's, else 0.0.

    answer: references; the number after the last ####, GSM8K's form, or the last one without it.
    None where the reference holds no number.
    """
    rewards: Rewards = []
    for completion, reference in zip(completions, answer, strict=True):
        expected = parse_number(str(reference).rpartition("####")[2])
        rewards.append(None if expected is None else float(extract_answer(completion) == expected))
    return rewards


def reward_format(completions: list[str], **columns: list) -> Rewards:
    """1.0 where the completion is <think>...</think>, one newline, <answer>...</answer>, else 0.0.

    Nothing but white space around it; each tag once; neither part blank. Either part may run over
    many lines, and what the answer says does not matter here.
    """
    rewards: Rewards = []
    for completion in completions:
        think, _, answer = completion.strip().partition("</think>\n<answer>")
        whole = think.startswith("<think>") and answer.endswith("</answer>")
        filled = bool(think[len("<think>") :].strip() and answer[: -len("</answer>")].strip())
        once = all(completion.count(tag) == 1 for tag in TAGS)
        rewards.append(float(whole and filled and once))
    return rewards


def tag_count_reward(completions: list[str], **columns: list) -> Rewards:
    """0.25 for each of the four tags that the completion holds exactly once."""
    return [0.25 * sum(text.count(tag) == 1 for tag in TAGS) for text in completions]


BUILT_IN = {f.__name__: f for f in (reward_correct, reward_format, tag_count_reward)}


def penalties(
    max_length: int, overlong_cache: int, repetition_ngram: int
) -> dict[str, RewardFunction]:
    """Rewards from 0 down to -1 that REWARD_FN may name, with their settings, which are in tokens.

    max_length: the longest completion. Source: soft overlong punishment, DAPO, arXiv 2503.14476
    eq. 13; repetition penalty, arXiv 2502.03373 section 4.2.
    """

    def soft_overlong_penalty(
        completions: list[str], completion_ids: list[list[int]], **columns: list
    ) -> Rewards:
        """0 as long as overlong_cache tokens are left, -1 at max_length, a line between them."""
        left = [max_length - len(ids) for ids in completion_ids]
        return [max(min(n / max(overlong_cache, 1) - 1, 0.0), -1.0) for n in left]

    def repetition_penalty(
        completions: list[str], completion_ids: list[list[int]], **columns: list
    ) -> Rewards:
        """-(the share of its n-grams of tokens that occurred in it before)."""
        rewards: Rewards = []
        for ids in completion_ids:
            distinct = set(zip(*(ids[i:] for i in range(repetition_ngram)), strict=False))
            total = len(ids) - repetition_ngram + 1
            rewards.append(len(distinct) / total - 1 if distinct else 0.0)
        return rewards

    return {f.__name__: f for f in (soft_overlong_penalty, repetition_penalty)}


def score(
    completions: list[str],
    columns: dict[str, list],
    functions: Sequence[RewardFunction],
    weights: Sequence[float],
) -> tuple[np.ndarray, np.ndarray]:
    """Total rewards [B] and per-function rewards [B, F], float64; NaN where nothing applies.

    B completions, F functions. A total is the weighted sum over the functions that apply to the row
    (TRL's rule); a row to which none applies is NaN.
    """
    if len(weights) != len(functions):
        names = ", ".join(function.__name__ for function in functions)
        raise ValueError(f"REWARD_WEIGHTS has {len(weights)} numbers; give one each for {names}")
    per_function = np.full((len(completions), len(functions)), np.nan)  # [B, F]
    for k, function in enumerate(functions):
        per_function[:, k] = _checked(function, function(completions, **columns), len(completions))
    applies = ~np.isnan(per_function)  # [B, F]
    rewards = np.where(applies, per_function * np.asarray(weights, float), 0.0).sum(1)  # [B]
    return np.where(applies.any(1), rewards, np.nan), per_function


def _checked(function: RewardFunction, returned: object, count: int) -> list[float]:
    """What `function` returned for `count` completions, as floats with NaN for None."""
    name, listed = function.__name__, isinstance(returned, list | tuple | np.ndarray)
    got = len(returned) if listed else type(returned).__name__
    if got != count:
        raise ValueError(f"reward {name} must return a list of {count} rewards, not {got}")
    for row, value in enumerate(returned):
        finite = isinstance(value, int | float | np.number | np.bool_) and -np.inf < value < np.inf
        if value is not None and not finite:
            raise ValueError(f"reward {name}, row {row}: {value!r:.80} is no finite number or None")
    return [np.nan if value is None else float(value) for value in returned]


def load_reward_functions(
    reward_fn: str, timeout_s: float, penalties: Mapping[str, RewardFunction] = MappingProxyType({})
) -> list[RewardFunction]:
    """The functions REWARD_FN names, in its order; the three built-in ones if it is empty.

    reward_fn: names separated by commas, each a built-in's, one of `penalties` or file.py:name.
    timeout_s: REWARD_TIMEOUT_S, the limit of one call to a function from a file.
    Raises ValueError for an unknown name, a missing file, or a file that does not load.
    """
    entries = [entry.strip() for entry in reward_fn.split(",")] if reward_fn else list(BUILT_IN)
    names = [entry.rpartition(":")[2] for entry in entries]
    known = BUILT_IN | dict(penalties)
    for entry, name in zip(entries, names, strict=True):
        file = entry.rpartition(":")[0]
        if entry not in known and not (file.endswith(".py") and name.isidentifier()):
            raise ValueError(f"REWARD_FN: {entry!r} is not file.py:name, nor one of {[*known]}")
        if file and not os.path.isfile(file):
            raise ValueError(f"REWARD_FN: there is no file {file} (looked in {os.getcwd()})")
        if names.count(name) > 1:
            raise ValueError(f"REWARD_FN: two rewards have the name {name}; rename one")
    return [known.get(entry) or RewardWorker(entry, timeout_s) for entry in entries]


class RewardWorker:
    """Scores as the function in `source` ("file.py:name") does, in a process of its own.

    A time limit then holds on any thread, and a hang or a crash costs one line. The process is a
    fresh interpreter: a fork would copy JAX's locks, multiprocessing's spawn would import the
    parent's main script. It speaks JSON lines, leaves the accelerator alone, and ends when close()
    or the parent's end closes its stdin. Whatever goes wrong is a ValueError of one line.
    """

    def __init__(self, source: str, timeout_s: float) -> None:
        file, _, self.__name__ = source.rpartition(":")
        self._source, self._timeout_s, self._lock = source, timeout_s, threading.Lock()
        program = [sys.executable, "-u", __file__]
        command = [*program, os.path.abspath(file), self.__name__, str(timeout_s)]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        # In a session of its own: Ctrl-C is for the run to answer.
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, env=env, start_new_session=True)
        self._ask(b"", _LOAD_LIMIT_S, f"did not load within {_LOAD_LIMIT_S:g} s")

    def __call__(self, completions: list[str], /, **columns: list) -> Rewards:
        try:
            request = json.dumps([[completions], columns])
        except (TypeError, ValueError) as error:
            names = ", ".join(columns)
            raise ValueError(f"REWARD_FN {self._source}: columns {names}: {error}") from error
        late = f"is not done after REWARD_TIMEOUT_S={self._timeout_s:g}; raise it or speed it up"
        with self._lock:
            return self._ask(request.encode() + b"\n", self._timeout_s, late)

    def _ask(self, request: bytes, limit_s: float, late: str) -> Rewards:
        """The worker's reply to `request`; without one in time, the worker is ended."""
        replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def talk() -> None:
            try:
                self._process.stdin.write(request)
                self._process.stdin.flush()
                replies.put(self._process.stdout.readline())
            except (OSError, ValueError):  # a dead worker's pipe, or one that close() has closed
                replies.put(b"")

        # A thread waits on the pipes because no portable read or write takes a time limit.
        self._talker = threading.Thread(target=talk, daemon=True)
        self._talker.start()
        reply: dict = {"error": late}
        try:
            with contextlib.suppress(queue.Empty):
                line = replies.get(timeout=limit_s)
                # parse_int: an int beyond the floats becomes inf, which score() refuses
                reply = json.loads(line, parse_int=float) if line.endswith(b"\n") else {}
        finally:
            if "rewards" not in reply:  # also on Ctrl-C: the next call would get this one's reply
                self.close()
        if "rewards" not in reply:
            died = f"died: its process ended with exit code {self._process.returncode}"
            raise ValueError(f"REWARD_FN {self._source} {reply.get('error', died)}")
        return reply["rewards"]

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._talker.join(timeout=1)
        if not self._talker.is_alive():  # else a process the reward forked holds the pipes
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.stdout.close()


def _serve(file: str, name: str, timeout_s: float) -> None:
    """Loads `name` of `file`, then answers requests until stdin ends: the worker's side."""
    requests, replies = open(os.dup(0), "rb"), open(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the function prints goes to stderr, never between the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle

    def respond(limit_s: float, act: Callable, args: list, columns: dict) -> None:
        # Ends an orphan that hangs, even inside a regex; a live parent has ended it before.
        faulthandler.dump_traceback_later(2 * limit_s, exit=True)
        try:
            # default=float: NumPy's, JAX's and torch's scalars
            reply = json.dumps({"rewards": list(act(*args, **columns))}, default=float)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            reply = json.dumps({"error": "raised " + _in_one_line(error, file)})
        faulthandler.cancel_dump_traceback_later()
        replies.write(reply.encode() + b"\n")
        replies.flush()

    respond(_LOAD_LIMIT_S, _load, [file, name], {})
    for line in requests:
        respond(timeout_s, getattr(sys.modules["user_rewards"], name), *json.loads(line))


def _load(file: str, name: str) -> Rewards:
    """No rewards yet; imports `file` as sys.modules["user_rewards"], which must define `name`."""
    sys.path.insert(0, os.path.dirname(file))  # the file's neighbours, as for any script
    spec = importlib.util.spec_from_file_location("user_rewards", file)
    module = sys.modules["user_rewards"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{os.path.basename(file)} defines no function {name}")
    return []


def _in_one_line(error: BaseException, file: str) -> str:
    """The exception's type, its message, and the last line of `file` it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    at = [f" ({os.path.basename(file)}:{f.lineno})" for f in frames if f.filename == file]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{''.join(at[-1:])}"


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], float(sys.argv[3]))
