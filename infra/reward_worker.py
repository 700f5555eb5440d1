"""Runs the code of a user's file in a reward worker, a separate Python interpreter: its reward
functions, and the environments of its class.

The first half of this file runs in the trainer. The second half runs in the reward worker, which
executes this file as its main script. Both sides send JSON through a connection.
"""

import ast
import contextlib
import functools
import importlib.util
import inspect
import json
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from subprocess import DEVNULL, Popen
from types import SimpleNamespace
from typing import Any, NamedTuple, SupportsFloat

if __package__:  # As a script this file cannot import its neighbours.
    from infra.mistakes import UserMistake
    from infra.settings import REPO

LOADING_S = 60.0  # added to the limit of the first request: the user's file may import torch


# ---- In the trainer ------------------------------------------------------------------------------


class RewardWorker:
    """The reward worker of a file. It calls the functions and the class of the file.

    Because of the worker a time limit holds on any thread, and a hang or a crash becomes one line.
    The worker is a fresh interpreter: a fork would copy the locks of JAX, and multiprocessing's
    spawn would import the main script of the trainer. The worker does not use the accelerator. At
    close(), or when the trainer ends, it ends with its process group: all that it has started.
    """

    def __init__(self, file: str, timeout_s: float) -> None:
        """timeout_s: the time limit of each call. The first request also loads the file."""
        self._timeout_s = timeout_s
        self._connection, remote = Pipe()
        with remote:
            program = [sys.executable, "-u", __file__, str(remote.fileno()), str(os.getpid())]
            self._process = Popen(
                [*program, os.path.abspath(file)],
                stdin=DEVNULL,
                stdout=2,  # What the user's code prints goes to stderr.
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                pass_fds=[remote.fileno()],
                start_new_session=True,  # and a new group: Ctrl-C only reaches the trainer
            )

    def ask(self, label: str, request: str, *arguments: object, more_s: float = 0.0) -> Any:
        """Calls the method `request` of _Server in the worker, and returns its value.

        label: the called function in messages, such as "REWARD_FN my.py:score". more_s: seconds
        that the request may take beyond the time limit. Without a reply in this time the worker
        ends. Raises UserMistake with a message of one line for every failure.
        """
        limit_s, setting = self._timeout_s + more_s, f"REWARD_TIMEOUT_S={self._timeout_s:g}"
        reply: dict[str, Any] = {}
        try:
            self._connection.send_bytes(json.dumps([request, *arguments]).encode())
            reply = {"error": f"is not done after {limit_s:g} s; raise {setting} or speed it up"}
            if self._connection.poll(limit_s):
                # parse_int: an integer too large for a float becomes inf, which the caller refuses.
                reply = json.loads(self._connection.recv_bytes(), parse_int=float)
        except (OSError, EOFError):  # The worker is dead.
            reply = {}
        finally:
            # Also after Ctrl-C: otherwise the next call would receive the reply to this request.
            if "returned" not in reply:
                self.close()
        if "returned" not in reply:
            died = f"died: its process ended with exit code {self._process.returncode}"
            raise UserMistake(f"{label} {reply.get('error', died)}")
        return reply["returned"]

    def close(self) -> None:
        """Ends the worker and all that it has started at once, also during a call."""
        if self._process.returncode is None:  # else another process may have its number by now
            with contextlib.suppress(PermissionError):  # on macOS, if all of them have ended
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()


def get_worker(
    setting: str, source: str, timeout_s: float, workers: dict[str, RewardWorker]
) -> RewardWorker:
    """The reward worker of the file in `source`, "file.py:name". A file has a single worker.

    setting: the name of the setting with this source. workers: {file: worker}, to which a new
    worker is added. Raises UserMistake if there is no such file.
    """
    file = source.rpartition(":")[0]
    if not os.path.isfile(file):
        raise UserMistake(f"{setting}: there is no file {file} (looked in {os.getcwd()})")
    file = os.path.realpath(file)
    if file not in workers:
        workers[file] = RewardWorker(file, timeout_s)
    return workers[file]


def imported_files(main: Path) -> list[Path]:
    """A user's file, and the files of its folder that it imports, directly or not. The rewards.py
    of this project is left out."""
    files, known = [main], {main, REPO / "rewards.py"}
    for file in files:  # The list grows.
        try:
            nodes = [*ast.walk(ast.parse(file.read_bytes()))]
        except SyntaxError:  # It may be for another version of Python.
            continue
        for node in nodes:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            level, module = getattr(node, "level", 0), getattr(node, "module", None) or ""
            folder = file.parents[level - 1] if level else main.parent
            for alias in node.names:
                name = folder.joinpath(*f"{module}.{alias.name}".strip(".").split("."))
                paths = [path for path in (name, *name.parents) if folder in path.parents]
                candidates = {path.with_suffix(".py") for path in paths}
                candidates |= {path / "__init__.py" for path in paths}
                files += sorted(file for file in candidates - known if file.is_file())
                known |= candidates
    return files


# ---- In the reward worker ------------------------------------------------------------------------

MODULE = "REWARD_WORKER_MODULE"  # NAME:FILE of the user's module, a variable of the environment
# Arguments that TRL passes to reward functions that name them. Here they log nothing.
TRL_ARGUMENTS: dict[str, Any] = {
    "log_extra": lambda *_, **__: None,
    "log_metric": lambda *_, **__: None,
}
# A reward function without **columns must name one of these; the last two are verl's.
PASSED_NAMES = {"completion_ids", "solution_str", "solution_strs"}


# The types of Python for those of JSON schemas.
TYPES: dict[str, Any] = {"string": str, "integer": int, "number": int | float, "array": list}
TYPES |= {"object": dict, "null": type(None)}


class _Finder(NamedTuple):
    """Lets `import` find the user's file by this name, and its neighbours before other modules."""

    name: str
    file: str

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == self.name:
            return importlib.util.spec_from_file_location(name, self.file)
        folder, base = os.path.split(self.file)
        is_neighbour = path is None and f"{name}.py" != base  # math.py imports Python's math
        return PathFinder.find_spec(name, [folder, *sys.path]) if is_neighbour else None


class _Server:
    """Serves the requests of the trainer: each public method is one, and returns a JSON value."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._module: Any = None
        self._class: Any = None  # of the environments
        self._is_concurrent = False  # the class says that its methods may run in threads
        self._environments: dict[int, Any] = {}  # of the last round, by the completion's number
        self._tools: dict[str, dict] = {}  # the schemas of the arguments of each tool, by its name
        self._seeds: list[int] = []  # SEED and the number of the round
        self._loop: Any = None  # clients of async functions may need the same event loop each time

    def find(self, name: str) -> tuple[float, bool, bool, bool]:
        """Loads the file. Returns the seconds that each completion of a call adds to its time
        limit: SECONDS_FOR_EACH_COMPLETION of the file, else 0; whether the file defines
        extract_answer(text); whether the function needs an argument `answer`; and whether the file
        defines prefetch. Raises ValueError if the file does not define the function, and TypeError
        if the function or prefetch takes no other columns than it names."""
        if not callable(getattr(self._load(), name, None)):
            raise ValueError(f"{os.path.basename(self._file)} defines no function {name}")
        seconds = float(getattr(self._module, "SECONDS_FOR_EACH_COMPLETION", 0))
        answer = inspect.signature(getattr(self._module, name)).parameters.get("answer")
        reads_answer = answer is not None and answer.default is answer.empty
        has_prefetch = callable(getattr(self._module, "prefetch", None))
        for called in (name, *["prefetch"] * has_prefetch):
            function = getattr(self._module, called)
            signatures = [inspect.signature(function)]
            with contextlib.suppress(ValueError):  # functools.cache has none of its own
                signatures.append(inspect.signature(function, follow_wrapped=False))
            parameters = [p for signature in signatures for p in signature.parameters.values()]
            if all(p.kind is not p.VAR_KEYWORD and p.name not in PASSED_NAMES for p in parameters):
                reason = "each call also passes completion_ids and every column of the dataset"
                raise TypeError(f"{called} must end with **columns: {reason}")
        extract_answer: Any = getattr(self._module, "extract_answer", None)
        try:
            inspect.signature(extract_answer).bind("a text")
        except (TypeError, ValueError):  # it is missing, or takes something else
            return seconds, False, reads_answer, has_prefetch
        return seconds, True, reads_answer, has_prefetch

    def extract_answer(self, text: str) -> str | None:
        """The answer in a completion, as a text, which maj@n counts; None: no answer."""
        answer = self._module.extract_answer(text)
        return None if answer is None else str(answer)

    def _load(self) -> Any:
        """The file's module. MODULE has its name for the processes that it starts by spawn."""
        if self._module is None:
            name = os.path.basename(self._file).removesuffix(".py").replace(".", "_")
            spec = importlib.util.find_spec(name)
            if spec and spec.origin != self._file:  # another module has this name
                name = f"user_{name}"
            os.environ[MODULE] = f"{name}:{self._file}"
            sys.meta_path.insert(0, _Finder(name, self._file))
            self._module = importlib.import_module(name)
        return self._module

    def call(
        self, name: str, completions: list[str], columns: dict[str, Any], dataset: str = ""
    ) -> Any:
        """Calls a reward function as TRL does, by the names of the arguments; one without the name
        `completions` gets them first. If the questions are lists of messages, so are `prompts` and
        `completions`. The numbers in the column `environments` become the objects; functions in
        other files than that of the class do not get this column. A function with `solution_str`
        or `solution_strs` is verl's, and is called as there."""
        state = columns.pop("trainer_state", None) or None
        numbers = columns.pop("environments", None)
        if numbers and self._class:
            columns["environments"] = [self._environments[n] for n in numbers]
        function = getattr(self._module, name)
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        is_batch = "solution_strs" in parameters
        if is_batch or "solution_str" in parameters:
            calls = _verl_arguments(completions, columns, dataset)
            if is_batch:
                calls = [{f"{name}s": [x[name] for x in calls] for name in calls[0]}]
            calls = [{k: x[k] for k in x if takes_all or k in parameters} for x in calls]
            scores = [self._result(function(**arguments)) for arguments in calls]
            scores = scores[0] if is_batch else scores
            return [score["score"] if isinstance(score, dict) else score for score in scores]
        prompts = columns.pop("prompts", None)
        answers: list = completions
        if prompts:
            answers = [[{"role": "assistant", "content": text}] for text in completions]
        named: dict[str, Any] = {"completions": answers, **columns}
        if "prompts" in parameters or takes_all:
            named["prompts"] = prompts or columns.get("question")
        trl_arguments = TRL_ARGUMENTS | {"trainer_state": state and SimpleNamespace(**state)}
        named |= {name: value for name, value in trl_arguments.items() if name in parameters}
        try:
            for follows in (True, False):  # a decorator may take other names than its function
                inspect.signature(function, follow_wrapped=follows).bind(**named)
        except TypeError:  # such as that of score(texts, **columns)
            function = functools.partial(function, named.pop("completions"))
        try:
            return self._result(function(**named))
        except Exception as error:
            if prompts:
                error.add_note("prompts and completions are lists of messages, like the questions")
            raise

    def _result(self, returned: Any) -> Any:
        """What a function has returned, and an async one returns in the end."""
        if inspect.iscoroutine(returned):
            import asyncio  # slow to import, as NumPy; processes by spawn need not wait for it

            self._loop = self._loop or asyncio.new_event_loop()
            return self._loop.run_until_complete(returned)
        return returned

    def open(self, name: str) -> str:
        """Checks the class of the environments. Returns its tools as chat templates take them,
        whether it has a reward, and whether its completions may be served at the same time; as a
        text, since the trainer makes floats of numbers.

        Raises TypeError or ValueError if the class cannot be used, and what its methods raise.
        """
        cls = getattr(self._load(), name, None)
        if not inspect.isclass(cls):
            raise ValueError(f"{os.path.basename(self._file)} defines no class {name}")
        methods = [n for n, _ in inspect.getmembers(cls, inspect.isfunction) if n[0] != "_"]
        for method in methods:
            if inspect.iscoroutinefunction(getattr(cls, method)):
                raise TypeError(f"{method} is async; write it without async")
        if "reset" not in methods:
            raise TypeError(f"{name} has no reset(self, **columns), which begins an episode")
        self._class = cls
        environment = cls()  # shows at once what the constructor raises
        schemas = []
        if "reply" not in methods:
            from transformers.utils import get_json_schema  # takes a second to import

            tools = [n for n in methods if n not in ("reset", "get_reward")]
            schemas = [get_json_schema(getattr(environment, tool)) for tool in tools]
            functions = [schema["function"] for schema in schemas]
            self._tools = {tool["name"]: tool["parameters"]["properties"] for tool in functions}
            if not tools:
                raise TypeError(f"{name} has no public method as a tool, and no reply(self, text)")
        self._is_concurrent = bool(getattr(cls, "concurrent", False))
        described = {"tools": schemas, "has_reward": "get_reward" in methods}
        return json.dumps(described | {"is_concurrent": self._is_concurrent})

    def begin_round(self, seed: int, round_number: int) -> None:
        """Forgets the environments of other rounds."""
        self._environments, self._seeds = {}, [seed, round_number]

    def run_in_threads(self, request: str, arguments: list[list]) -> list:
        """The values of a request for several completions, all at the same time. An error is raised
        at once, while other threads may still wait."""
        threads = ThreadPoolExecutor(len(arguments))
        futures = [threads.submit(getattr(self, request), *args) for args in arguments]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        threads.shutdown(wait=False, cancel_futures=True)
        failed = [future for future in done if future.exception()]
        return [future.result() for future in failed or futures]

    def reset(self, number: int, first: int, columns: dict[str, Any]) -> str | None:
        """Makes the environment of a completion and begins its episode. first: the number of the
        first completion of the question; all completions get its random numbers."""
        self._seed(first, 0)
        self._environments[number] = self._class()
        return _text_or_none("reset", self._environments[number].reset(**columns))

    def reply(self, number: int, turn: int, text: str) -> str | None:
        """The environment's answer to the policy's text; None: the episode is over."""
        self._seed(number, turn)
        return _text_or_none("reply", self._environments[number].reply(text))

    def use(self, number: int, turn: int, calls: list[str]) -> list[str]:
        """The answer to each call of a tool: its returned value as a text, or its error."""
        return [_encodable(self._use(number, turn, i, call)) for i, call in enumerate(calls)]

    def _use(self, number: int, turn: int, i: int, call: str) -> str:
        try:
            name, arguments = parse_call(call)
            if name not in self._tools:
                raise ValueError(f"there is no tool {name!r}, only {', '.join(self._tools)}")
            schemas, tool = self._tools[name], getattr(self._environments[number], name)
            if not isinstance(arguments, dict):
                raise TypeError(f"arguments is a JSON object of {', '.join(schemas)}")
            for argument in schemas.keys() & arguments.keys():
                arguments[argument] = _cast(argument, arguments[argument], schemas[argument])
            self._seed(number, turn, i)
            return str(tool(**arguments))
        except BaseException as error:  # The policy and the tool may do anything, also exit().
            return f"error: {type(error).__name__}: {error}"

    def get_reward(self, number: int) -> Any:
        self._seed(number, 0, 1)
        return self._environments[number].get_reward()

    def _seed(self, *numbers: int) -> None:
        """Seeds the global random generators of Python and NumPy, which threads would share."""
        if self._is_concurrent:
            return
        import numpy as np

        random.seed(str([*self._seeds, *numbers]))
        np.random.seed([*self._seeds, *numbers])


def _verl_arguments(completions: list[str], columns: dict[str, Any], dataset: str) -> list[dict]:
    """The arguments of verl's compute_score for each completion."""
    none, arguments = [None] * len(completions), []
    names = ("data_source", "answer", "reward_model", "extra_info")
    rows = zip(completions, *(columns.get(name, none) for name in names), strict=True)
    for text, source, answer, fields, extra_info in rows:
        truth = (fields or {}).get("ground_truth") if answer is None else answer
        named = {"data_source": source or dataset, "solution_str": text, "ground_truth": truth}
        arguments.append(named | {"extra_info": extra_info or {}})
    return arguments


def _text_or_none(method: str, returned: object) -> str | None:
    if not isinstance(returned, str | None):
        raise TypeError(f"{method} returned {returned!r:.80}, not a text or None")
    return returned and _encodable(returned)


def _encodable(text: str) -> str:
    """The text without lone surrogates, which no tokenizer takes."""
    return text.encode(errors="replace").decode()


def parse_call(call: str) -> tuple[Any, Any]:
    """The name and the arguments of a call of a tool, as chat templates ask for it: JSON with both,
    or <function=NAME><parameter=KEY>VALUE</parameter></function>, whose values are texts.

    Raises ValueError or TypeError, whose text tells the policy what is wrong.
    """
    if call.startswith("<tool_call>"):  # see tool_calls of extras/turns.py
        raise ValueError("the call has no closing </tool_call>")
    if not call.startswith("<function="):
        parsed = json.loads(call)
        if not isinstance(parsed, dict):
            raise TypeError("a call is a JSON object with name and arguments")
        arguments = parsed.get("arguments") or {}
        if isinstance(arguments, str):  # Some models write JSON within JSON.
            arguments = json.loads(arguments)
        return parsed.get("name"), arguments
    body, end, _ = call.removeprefix("<function=").rpartition("</function>")
    name, *parameters = body.split("<parameter=")
    arguments = {}
    for parameter in parameters:
        key, _, value = parameter.partition(">")
        value, closed, rest = value.rpartition("</parameter>")
        if not closed or rest.strip():
            raise ValueError(f"<parameter={key}> has no closing </parameter>")
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    if not end or not name.rstrip().endswith(">"):
        raise ValueError("a call is <function=NAME><parameter=KEY>VALUE</parameter></function>")
    return name.rstrip().removesuffix(">").strip(), arguments


def _cast(name: str, value: object, schema: dict[str, Any]) -> object:
    """The value of a tool's argument as its annotated type. A model may write 2.0 or "2" for 2,
    "False" for a bool, and 12345 for a text. Raises TypeError for a value of another type."""
    wanted = schema.get("type") or [x.get("type", "any") for x in schema.get("anyOf", ())]
    wanted = [wanted] if isinstance(wanted, str) else [*wanted]
    wanted += ["null"] * bool(schema.get("nullable"))
    for form in _forms_of(value) if wanted else ():
        types = [TYPES.get(x, object) for x in wanted if x != "boolean"]
        # Python counts a bool as an integer.
        if "boolean" in wanted if isinstance(form, bool) else isinstance(form, (*types,)):
            of_parts = "items" if isinstance(form, list) else "additionalProperties"
            parts = [x.get(of_parts) for x in (schema, *schema.get("anyOf", ()))]
            items = next((part for part in parts if isinstance(part, dict)), {})
            if isinstance(form, dict):
                return {key: _cast(f"{name}[{key!r}]", x, items) for key, x in form.items()}
            if isinstance(form, list):
                return [_cast(f"{name}[{i}]", x, items) for i, x in enumerate(form)]
            return form
    if wanted:
        raise TypeError(f"{name} must be {' or '.join(wanted)}, not {value!r:.80}")
    return value


def _forms_of(value: Any) -> Iterator[Any]:
    """The value, what it reads as if it is a text, the integer that it equals, and its text."""
    forms = [value]
    for read in (json.loads, ast.literal_eval) if isinstance(value, str) else ():
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            forms.append(read(value))
    yield from forms
    yield from (int(form) for form in forms if isinstance(form, float) and form.is_integer())
    if isinstance(value, bool | int | float):
        yield json.dumps(value)


def _serve(connection: Connection, trainer: int, file: str) -> None:
    """Answers requests until the trainer, the process of this number, ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The trainer handles Ctrl-C.
    threading.Thread(target=_end_with, args=[trainer], daemon=True).start()
    # The trainer sees that the worker has died only if no child of it has the connection open.
    os.register_at_fork(after_in_child=connection.close)
    server = _Server(file)
    with contextlib.suppress(EOFError, OSError):  # The trainer has ended.
        while True:
            name, *arguments = json.loads(connection.recv_bytes())
            connection.send_bytes(_reply(getattr(server, name), arguments, file).encode())
    if os.getpid() == os.getpgrp():  # The user's code has a second for what it does at exit.
        Popen(["sh", "-c", "sleep 1; kill -9 0"], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)


def _end_with(trainer: int) -> None:
    """Ends this process and its group within a second after the trainer, also during a call."""
    while os.getppid() == trainer:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _reply(request: Callable, arguments: list, file: str) -> str:
    try:
        return json.dumps({"returned": request(*arguments)}, default=_plain)
    except (Exception, SystemExit) as error:  # The user's code may raise anything.
        if os.getpid() != os.getpgrp():  # A child by os.fork ends as it would anywhere.
            raise
        return json.dumps({"error": "raised " + _as_raised(error, file)})


def _plain(value: SupportsFloat) -> object:
    """Lists and numbers for the arrays and scalars of NumPy, JAX, torch and pandas."""
    return value.tolist() if hasattr(value, "tolist") else float(value)


def _as_raised(error: BaseException, file: str) -> str:
    """The type of the exception, its message, and the last line of `file` that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f" ({os.path.basename(file)}:{f.lineno})" for f in frames if f.filename == file]
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{''.join(lines[-1:])}"
    notes = getattr(error, "__notes__", [])
    messages_of_text = "string ind(ices must|ex out)|'str' object has no attribute 'get'"
    if not notes and re.search(messages_of_text, text):
        notes = ["completions are texts, not messages, and so are prompts"]
    return "; ".join([text, *notes])


if __name__ == "__main__":
    # The user's file may import rewards.py. Python has put infra/ here, the folder of this file.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
elif __name__ == "__mp_main__":  # in a process that the user's code has started by spawn
    sys.meta_path.insert(0, _Finder(*os.environ[MODULE].split(":", 1)))
