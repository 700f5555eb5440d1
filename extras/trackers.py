"""The run in W&B, which gets a row for each step, with all its records in metrics.jsonl.

A run that goes on after a kill sends the rows that W&B does not have.
"""

import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.log import STEP_S, RunLog, read_lines
from infra.mistakes import UserMistake, in_one_line


def raise_if_unusable(mode: str) -> None:
    """Raises UserMistake if WANDB_MODE cannot work here; it asks neither a server nor the user."""
    try:
        import wandb
    except Exception as error:  # a broken installation may raise any error
        why = f"WANDB_MODE={mode} needs wandb: pip install wandb ({in_one_line(error)})"
        raise UserMistake(why) from None
    if mode == "offline":
        return
    with contextlib.redirect_stderr(io.StringIO()):  # wandb warns that this name is old
        key = wandb.api.api_key or ""  # from WANDB_API_KEY, or from `wandb login`
    if len(key) < 40:
        wrong = f"the API key that is set has {len(key)} characters, not 40 or more"
        raise UserMistake(
            f"WANDB_MODE=online: {wrong if key else 'there is no API key'}; set WANDB_API_KEY or "
            f"run `wandb login`, or set WANDB_MODE=offline"
        )


class WandbRun:
    """The run in W&B. After an error one line says so, and W&B gets nothing more."""

    def __init__(self, out: Path, settings: dict[str, Any], log: RunLog) -> None:
        """out: the run's folder. settings: of wandb.init; the same "id" continues the same run."""
        self._out, self._log = out, log
        self._step = 0  # the newest step
        self._row: dict[str, Any] = {}  # its values that are not sent yet
        self._run: Any = None  # of wandb; None: it has failed
        with self._surviving():
            import wandb

            if settings["mode"] == "offline":  # wandb cannot continue the files of earlier starts
                shutil.rmtree(out / "wandb", ignore_errors=True)
            self._run = wandb.init(dir=str(out), resume="allow", **settings)
        for record in read_lines(out / "metrics.jsonl"):
            self.record(record.pop("step"), record)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Adds values to the row of this step, and sends it with the training record, which is the
        last of a step. A resumed run makes a step again that lacks this record."""
        self._step, self._row = step, self._row | values
        if STEP_S in values:
            self._send_row()

    def close(self, summary: dict[str, Any], finished: bool) -> None:
        """Ends the run in W&B, with these values in its summary. finished: no step is to come, so
        that the evaluations after the last one are sent too."""
        if finished:
            self._send_row()
        with self._surviving():
            if self._run:
                self._run.summary.update(summary)
                self._run.finish()

    def _send_row(self) -> None:
        with self._surviving():
            if self._run and self._row and self._step >= self._run.starting_step:
                self._run.log(self._row, step=self._step, commit=True)
        self._row = {}

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """Prints a line about an error of W&B within this context, and drops the run there."""
        try:
            yield
        except Exception as error:  # the errors of W&B and its transports have no common base
            self._run, why = None, in_one_line(error, with_type=False)
            kept = f"{self._out}/metrics.jsonl has the records"
            self._log.print_line(f"W&B: {why}; the run goes on without it, and {kept}")
