"""The run in W&B: whether there is one, and what it gets.

W&B gets the records of metrics.jsonl, which has each step once, also after a kill and a resume. It
gets all records of a step together, once they are complete: W&B takes no more values for a step
that it has. A resumed run first sends the steps that W&B does not have yet. The summary in W&B gets
an evaluation at once, because a run may end before the step of this evaluation is sent.
"""

import contextlib
import functools
import heapq
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from runtime.mistakes import UserMistake, in_one_line

LIMIT_S = 30  # how long a run waits for W&B's answer at the start
TRAINED = "time/train/step_s"  # the training record of a step has this value


def check_wandb(mode: str) -> None:
    """Raises UserMistake if WANDB_MODE cannot work here; it asks neither a server nor the user."""
    if mode in ("", "disabled"):
        return
    try:
        import wandb
    except Exception as error:  # an ImportError, or any error of a broken installation
        why = "" if isinstance(error, ImportError) else f" ({in_one_line(error, with_type=False)})"
        raise UserMistake(f"WANDB_MODE={mode} needs wandb: pip install wandb{why}") from None
    if mode == "offline" or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    with contextlib.redirect_stderr(io.StringIO()):  # wandb warns that it is old
        key = wandb.api.api_key or ""  # from WANDB_API_KEY, or from `wandb login`
    if len(key) < 40:
        found = f"the API key that is set has {len(key)} characters, not 40 or more"
        raise UserMistake(
            f"WANDB_MODE=online: {found if key else 'there is no API key'}; set WANDB_API_KEY or "
            f"run `wandb login`, or set WANDB_MODE=offline"
        )


def chosen_mode(mode: str) -> str:
    """WANDB_MODE; if that is empty, "online" if there is a WANDB_API_KEY that can be used."""
    if mode or not os.environ.get("WANDB_API_KEY"):
        return mode or "disabled"
    try:
        check_wandb("online")
        return "online"
    except UserMistake as error:
        text = f"W&B: there is a WANDB_API_KEY, but the run goes on without W&B: {error}"
        print(text, flush=True)
        return "disabled"


class WandbRun:
    """The run in W&B. After an error it prints a line, and a line at the end; the run goes on."""

    def __init__(self, out: Path, settings: dict[str, Any], say: Callable[[str], None]) -> None:
        """out: the run's folder, with metrics.jsonl. settings: the arguments of wandb.init.

        say: prints a line. Without an answer of W&B's server the run is logged in files instead,
        which `wandb sync` uploads.
        """
        self.id = ""
        self._out, self._say = out, say
        self._unsent: list[str] = []  # lines for the end, about what W&B does not have
        self._values: dict[str, Any] = {}  # of the newest step
        self._samples: list[dict[str, Any]] = []  # of the newest step
        self._step = self._first = 0  # the newest step; the first one that W&B does not have
        self._run = self._start(settings)
        if self._run:
            self.id = self._run.id
            self._try(self._catch_up)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Adds values of a step; an earlier step is complete now."""
        if self._run:
            self._begin_step(step)
            self._values |= values
            if TRAINED not in values:
                known = {name: value for name, value in values.items() if value is not None}
                self._try(lambda: self._run.summary.update(known))

    def sample(self, step: int, group: dict[str, Any]) -> None:
        """Adds a group of completions, as RunLog.samples has it, to the table of a step."""
        if self._run and "completions" in group:
            self._begin_step(step)
            self._samples.append(group)

    def close(self, summary: dict[str, Any], finished: bool) -> None:
        """Ends the run in W&B, and prints the lines about what W&B does not have.

        The last step is not sent if it lacks its training record, because a resumed run makes this
        step again. finished: no step is to come, and the last values are of the last evaluation.
        """
        if finished or TRAINED in self._values:
            self._try(self._send)
        self._try(lambda: self._run.summary.update(summary))
        self._try(lambda: self._run.finish())
        for line in self._unsent:
            self._say(line)

    def _start(self, settings: dict[str, Any]) -> Any:
        """The run of wandb, or None."""
        import wandb

        limit = wandb.Settings(init_timeout=LIMIT_S, login_timeout=LIMIT_S)
        settings = {"dir": os.fspath(self._out), "settings": limit} | settings
        resume = {"resume": "allow"} if "id" in settings else {}
        try:
            if settings["mode"] != "offline":
                return wandb.init(**settings | resume)
        except Exception as error:  # the errors of W&B and its transports have no common base
            why, folder = in_one_line(error, with_type=False), f"{self._out}/wandb"
            self._say(f"W&B: {why}; the run is logged for it in {folder} instead")
        try:
            run = wandb.init(**settings | {"mode": "offline"})
        except Exception as error:
            self._lose(error)
            return None
        if settings["mode"] != "offline":
            folder = Path(run.dir).parent
            self._unsent.append(f"W&B does not have this run; upload it by: wandb sync {folder}")
        return run

    def _catch_up(self) -> None:
        """Sends the steps that an earlier start of this run has recorded and W&B does not have.

        Files for `wandb sync` are made anew, and those of earlier starts are removed, so that
        there is one folder and it has each step once.
        """
        self._first = self._run.starting_step  # 0 for files, and for a run that W&B does not have
        current = Path(self._run.dir).resolve().parent
        records = ((line, self.record) for line in _lines_of(self._out / "metrics.jsonl"))
        tables = ((line, self.sample) for line in _lines_of(self._out / "samples.jsonl"))
        for line, add in heapq.merge(records, tables, key=lambda pair: pair[0]["step"]):
            add(line.pop("step"), line)
        older = (self._out / "wandb").glob(f"offline-run-*-{self.id}") if self._run else []
        for folder in older:
            if folder.resolve() != current:
                shutil.rmtree(folder, ignore_errors=True)

    def _begin_step(self, step: int) -> None:
        if step != self._step:
            self._try(self._send)
            self._step = step

    def _send(self) -> None:
        """Sends the values of the newest step, unless W&B has them, and forgets them."""
        values, self._values = self._values, {}
        samples, self._samples = self._samples, []
        if self._step < self._first or not (values or samples):
            return
        log = functools.partial(self._run.log, step=self._step, commit=True)
        if not samples:
            log(values)
            return
        try:  # logging a table asks the server, which logging numbers does not
            log(values | {"samples": table_of(self._step, samples)})
        except Exception as error:
            log(values)
            why = in_one_line(error, with_type=False)
            self._say(f"W&B: {why}; it has no samples of step {self._step}")

    def _try(self, act: Callable[[], None]) -> None:
        """Does something with the run, if there still is one."""
        try:
            if self._run:
                act()
        except Exception as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self._say(f"W&B: {in_one_line(error, with_type=False)}; the run goes on without it")
        self._unsent.append(
            f"W&B may have no records from step {self._step} on; {self._out}/metrics.jsonl has "
            f"them all"
        )
        self._run = None


def table_of(step: int, groups: list[dict[str, Any]]) -> Any:
    """A table of W&B with a row for each completion."""
    import wandb

    completions = [(group, each) for group in groups for each in group["completions"]]
    names = list(dict.fromkeys(name for _, each in completions for name in each["rewards"]))
    columns = ["step", "question", "answer", "completion", "reward", *names]
    rows = [
        [step, str(group["question"]), str(group["answer"]), each["text"], each["reward"]]
        + [each["rewards"].get(name) for name in names]
        + [each["advantage"], each["tokens"], each["ended"]]
        for group, each in completions
    ]
    return wandb.Table(columns=[*columns, "advantage", "tokens", "ended"], data=rows)


def _lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of the run."""
    if file.exists():
        with file.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)
