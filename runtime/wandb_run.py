"""The run in W&B: whether there is one, and what it gets.

Its rows are read from metrics.jsonl and samples.jsonl, also those that a killed run did not send. A
row has all records of a step, and it is sent once the step is complete, because W&B takes no more
values for a step that it has. The summary in W&B gets an evaluation at once.
"""

import contextlib
import io
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from runtime.mistakes import UserMistake, in_one_line

LIMIT_S = 30  # how long a run waits for W&B's answer at the start
TRAINED = "time/train/step_s"  # the training record of a step, which is its last, has this value


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
    """The run in W&B. After any error of W&B it prints a line, and the run goes on without it."""

    def __init__(self, out: Path, settings: dict[str, Any], say: Callable[[str], None]) -> None:
        """out: the run's folder, with metrics.jsonl and samples.jsonl. say: prints a line.

        settings: the arguments of wandb.init. The same "id" continues the same run.
        """
        self._out, self._say, self._run = out, say, None
        self._metrics = (out / "metrics.jsonl").open("rb")
        self._samples = (out / "samples.jsonl").open("rb")
        self._complete = 0  # all steps below this one are complete
        # Files of earlier starts for `wandb sync`: all their rows are written anew, or sent.
        older = [*(out / "wandb").glob(f"offline-run-*-{settings['id']}")]
        with self._surviving():
            import wandb

            limits = wandb.Settings(init_timeout=LIMIT_S, login_timeout=LIMIT_S)
            self._run = wandb.init(dir=str(out), resume="allow", settings=limits, **settings)
            for folder in older:
                shutil.rmtree(folder, ignore_errors=True)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Sends the rows of earlier steps. metrics.jsonl has the values of this step already."""
        self._complete = step + 1 if TRAINED in values else step
        if self._run:
            with self._surviving():
                self._send(step)
                if TRAINED not in values:
                    known = {name: x for name, x in values.items() if x is not None}
                    self._run.summary.update(known)

    def close(self, summary: dict[str, Any], finished: bool) -> None:
        """Ends the run in W&B, with these values in its summary.

        finished: no step is to come. Otherwise a resumed run makes the last step again if it lacks
        its training record, and this step is not sent.
        """
        if self._run:
            with self._surviving():
                self._send(math.inf if finished else self._complete)
                self._run.summary.update(summary)
                self._run.finish()

    def _send(self, before: float) -> None:
        """Sends the rows of steps below `before` that W&B does not have."""
        lines = _next_records(self._metrics, before)
        for step, records in itertools.groupby(lines, lambda record: record["step"]):
            row = {name: value for record in records for name, value in record.items()}
            del row["step"]
            groups = [*_next_records(self._samples, step + 1)]
            if step < self._run.starting_step:  # W&B had it before this start
                continue
            if groups:
                row["samples"] = _table_of(groups)
            self._run.log(row, step=step, commit=True)

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the errors of W&B and its transports have no common base
            self._run, why = None, in_one_line(error, with_type=False)
            there = f"{self._out}/metrics.jsonl has the records"
            self._say(f"W&B: {why}; the run goes on without it, and {there}")


def _next_records(file: IO[bytes], before: float) -> Iterator[dict[str, Any]]:
    """The next records of the file, up to a record of the step `before`, which is read later."""
    while line := file.readline():
        record = json.loads(line) if line.endswith(b"\n") else {"step": math.inf}
        if record["step"] >= before:  # infinite: a full disk has cut the line
            file.seek(-len(line), os.SEEK_CUR)
            return
        yield record


def _table_of(groups: list[dict[str, Any]]) -> Any:
    """A table of W&B with a row for each completion of these entries of samples.jsonl."""
    import wandb

    completions = [(group, each) for group in groups for each in group["completions"]]
    names = list(dict.fromkeys(name for _, each in completions for name in each["rewards"]))
    columns = ["step", "question", "answer", "completion", "reward", *names]
    rows = [
        [group["step"], str(group["question"]), str(group["answer"]), each["text"], each["reward"]]
        + [each["rewards"].get(name) for name in names]
        + [each["advantage"], each["tokens"], each["ended"]]
        for group, each in completions
    ]
    return wandb.Table(columns=[*columns, "advantage", "tokens", "ended"], data=rows)
