"""The run in W&B: whether there is one, and what it gets.

A row has all records of a step. It is sent when the next step begins, since W&B takes no more
values for a step that it has. A start sends the rows that W&B lacks from the files of the run.
"""

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

from runtime.mistakes import UserMistake, in_one_line

TRAINED = "time/train/step_s"  # the training record of a step, which is its last, has this value


def check_wandb(mode: str) -> None:
    """Raises UserMistake if WANDB_MODE cannot work here; it asks neither a server nor the user."""
    if mode in ("", "disabled"):
        return
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
        found = f"the API key that is set has {len(key)} characters, not 40 or more"
        raise UserMistake(
            f"WANDB_MODE=online: {found if key else 'there is no API key'}; set WANDB_API_KEY or "
            f"run `wandb login`, or set WANDB_MODE=offline"
        )


def chosen_mode(mode: str) -> str:
    """WANDB_MODE; if that is empty, "online" if there is a WANDB_API_KEY that can be used."""
    if mode:
        return mode
    if not os.environ.get("WANDB_API_KEY"):
        return "disabled"
    try:
        check_wandb("online")
    except UserMistake as error:
        print(f"W&B: WANDB_API_KEY is set, but the run goes on without W&B: {error}", flush=True)
        return "disabled"
    return "online"


class WandbRun:
    """The run in W&B. All methods may raise any error of W&B and its transports."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        """out: the run's folder. settings: of wandb.init; the same "id" continues the same run."""
        import wandb

        self._step, self._row = 0, {}  # the newest step and its values, which are not sent yet
        if settings["mode"] == "offline":  # all rows of earlier starts are written anew
            shutil.rmtree(out / "wandb", ignore_errors=True)
        self._run = wandb.init(dir=str(out), resume="allow", **settings)
        with (out / "metrics.jsonl").open(encoding="utf-8") as lines:
            for record in map(json.loads, lines):
                self.record(record.pop("step"), record)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Adds values to the row of the step, after sending the row of an earlier step."""
        if step != self._step:
            self._send()
            self._step, self._row = step, {}
        self._row |= values

    def close(self, summary: dict[str, Any], finished: bool) -> None:
        """Ends the run in W&B, with these values in its summary.

        finished: no step is to come. Otherwise a resumed run makes the newest step again if it
        lacks its training record, and this step is not sent.
        """
        if finished or TRAINED in self._row:
            self._send()
        self._run.summary.update(summary)
        self._run.finish()

    def _send(self) -> None:
        """Sends the row of the newest step, if it has values that W&B does not have."""
        if self._row and self._step >= self._run.starting_step:
            self._run.log(self._row, step=self._step, commit=True)
