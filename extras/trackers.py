"""The run in W&B, trackio and TensorBoard: a row for each step, with all its records.

A run that is resumed after a kill sends W&B the rows that it lacks. All other records, which are
files of this machine, are removed and written again from metrics.jsonl.
"""

import contextlib
import importlib
import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infra.log import STEP_S, read_lines
from infra.mistakes import UserMistake, in_one_line


def raise_if_unusable(names: str, setting: str, mode: str) -> None:
    """Raises UserMistake if a tracker cannot work here; it asks neither a server nor the user.

    names: as of REPORT_TO. setting: what asks for them, with its value. mode: WANDB_MODE.
    """
    for name in names.split(","):
        try:
            package = importlib.import_module(name)
        except Exception as error:  # a broken installation may raise any error
            reason = f"{setting} needs {name}: pip install {name} ({in_one_line(error)})"
            raise UserMistake(reason) from None
        if name != "wandb" or mode == "offline":
            continue
        with contextlib.redirect_stderr(io.StringIO()):  # wandb warns that this name is old
            key = package.api.api_key or ""  # from WANDB_API_KEY, or from `wandb login`
        if len(key) < 40:
            wrong = f"the API key that is set has {len(key)} characters, not 40 or more"
            raise UserMistake(
                f"{setting}: {wrong if key else 'there is no API key'}; set WANDB_API_KEY or "
                f"run `wandb login`, or set WANDB_MODE=offline"
            )


class Trackers:
    """The trackers of a run. After an error of one a line says so, and that one gets no more."""

    def __init__(
        self, names: str, out: Path, settings: dict[str, Any], print_line: Callable[[str], None]
    ) -> None:
        """names: as of REPORT_TO. out: the run's folder. settings: of wandb.init; the same "id"
        continues the same run."""
        self._out, self._print_line = out, print_line
        self._step = 0  # the newest step
        self._row: dict[str, Any] = {}  # its values that are not sent yet
        self._runs: dict[str, WandbRun | TrackioRun | TensorBoardRun] = {}  # without an error yet
        for name in names.split(","):
            with self._surviving(name):
                self._runs[name] = TRACKERS[name](out, settings)
        for record in read_lines(out / "metrics.jsonl"):
            self.record(record.pop("step"), record)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Adds values to the row of this step, and sends it with the training record, which is the
        last of a step. A resumed run makes a step again that lacks this record."""
        self._step, self._row = step, self._row | values
        if STEP_S in values:
            self._send_row()

    def close(self, summary: dict[str, Any], finished: bool) -> None:
        """Ends the run in each tracker. finished: no step is to come, so the evaluations after
        the last one are sent too."""
        if finished and self._row:
            self._send_row()
        for name, run in [*self._runs.items()]:
            with self._surviving(name):
                run.close(summary)

    def _send_row(self) -> None:
        row, self._row = self._row, {}
        for name, run in [*self._runs.items()]:
            with self._surviving(name):
                run.log(self._step, row)

    @contextlib.contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        """Prints a line about an error of a tracker within this context, and drops it there."""
        try:
            yield
        except Exception as error:  # the errors of trackers and their transports share no base
            self._runs.pop(name, None)
            title, reason = name.replace("wandb", "W&B"), in_one_line(error, with_type=False)
            kept = f"{self._out}/metrics.jsonl has the records"
            self._print_line(f"{title}: {reason}; the run continues without it, and {kept}")


class WandbRun:
    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        import wandb

        if settings["mode"] == "offline":  # wandb cannot continue the files of earlier starts
            shutil.rmtree(out / "wandb", ignore_errors=True)
        self._run = wandb.init(dir=str(out), resume="allow", **settings)

    def log(self, step: int, row: dict[str, Any]) -> None:
        if step >= self._run.starting_step:
            self._run.log(row, step=step, commit=True)

    def close(self, summary: dict[str, Any]) -> None:
        self._run.summary.update(summary)
        self._run.finish()


class TrackioRun:
    """The run in trackio's database on this machine, under a name that no other run has."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        import trackio

        self._trackio = trackio
        project, name = settings["project"], f"{settings['name']}-{settings['id']}"
        runs: list = []
        with contextlib.suppress(ValueError):  # the project is new
            runs = [run for run in trackio.Api().runs(project) if run.name == name]
        for run in runs:
            run.delete()
        options = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        with contextlib.redirect_stdout(io.StringIO()):  # it explains its dashboard
            trackio.init(project, name, config=settings["config"], **options)

    def log(self, step: int, row: dict[str, Any]) -> None:
        self._trackio.log(row, step)

    def close(self, summary: dict[str, Any]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()


class TensorBoardRun:
    """The run's event files in OUTPUT_DIR/tensorboard, with the numbers of each row."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        from tensorboard.summary import Writer

        shutil.rmtree(out / "tensorboard", ignore_errors=True)
        self._writer = Writer(str(out / "tensorboard"))

    def log(self, step: int, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float):  # no text, and no null
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, summary: dict[str, Any]) -> None:
        self._writer.close()


TRACKERS: dict[str, type[WandbRun | TrackioRun | TensorBoardRun]] = {
    "wandb": WandbRun,
    "trackio": TrackioRun,
    "tensorboard": TensorBoardRun,
}
