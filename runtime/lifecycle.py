"""How a run goes on and ends: what it saves, and what follows a signal, a mistake or a bad step.

After a signal, a mistake or too many bad steps the run leaves a line and closed files. A signal,
and a mistake in a run of one process, also leave a checkpoint of the last complete step. If memory
runs out or another process is gone, nothing more is saved: the newest complete checkpoint remains.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from runtime.checkpoint import Checkpoints
from runtime.mistakes import UserMistake, fail, in_one_line
from runtime.packing import Widths
from runtime.processes import Stopped, StopSignal
from runtime.records import DONE, FAILED, RUNNING, STOPPED
from runtime.resume import Progress, mark_finished, record_of
from runtime.run_log import RunLog


@dataclasses.dataclass
class Lifecycle:
    """What `main` needs to save a run, to log it and to end it."""

    cfg: Any  # the run's settings
    out: Path  # the run's folder
    log: RunLog
    stop: StopSignal
    checkpoints: Checkpoints
    progress: Progress
    made_with: Mapping[str, str]  # all that the results follow from
    reviewer: Any  # Reviewer of review.py
    saves: bool  # False: SAVE_EVERY_STEPS=0, or the processes do not see one folder
    began: float  # time.perf_counter() at the start
    widths: list[Widths] = dataclasses.field(init=False)  # of all rows of updates so far

    def __post_init__(self) -> None:
        self.widths = [*self.progress.widths]

    def save(self, arrays: Any) -> None:
        """Saves a checkpoint, unless this step has one already or the run saves none."""
        if self.saves and self.checkpoints.newest_begun != self.progress.step:
            self.progress.waiting = self.log.waiting()
            record = record_of(self.progress, self.made_with)
            self.checkpoints.save(self.progress.step, arrays, record, self.progress.evals)

    @contextlib.contextmanager
    def ending(self, save: Callable[[], None]) -> Iterator[None]:
        """Runs the steps, and ends the program after a signal, a user's mistake or too little
        memory; any other error is noted in the summary. save: calls Lifecycle.save with the newest
        arrays."""
        try:
            # Without a checkpoint of its own, the run went on from that of another run.
            if self.progress.step and self.checkpoints.newest_begun < 0:
                save()
            yield
        except Stopped as signal:
            save()
            self.checkpoints.wait()
            saved = self.checkpoints.newest if self.checkpoints.newest >= 0 else "none"
            self.log.line(f"STOPPED: {signal} steps={self.progress.step} saved_step={saved}")
            self.close(STOPPED, str(signal))
            raise SystemExit(signal.exit_code) from None
        except UserMistake as error:
            if jax.process_count() == 1:  # the other processes do not know of the mistake
                save()
                self.checkpoints.wait()
            self.close(FAILED, str(error))
            fail(error)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                self.close(FAILED, "memory ran out")
            else:
                self.reviewer.write(FAILED, in_one_line(error))
            raise
        except Exception as error:
            self.reviewer.write(FAILED, in_one_line(error))
            raise

    def count_step(self, rounds: int, wrong: str, batch: dict[str, np.ndarray]) -> None:
        """Counts a step; ends the run if NONFINITE_LIMIT steps in a row were not finite.

        rounds: of sampling, in this step. wrong: what was not finite, or "". batch: the arrays of a
        step that was not finite, which are kept.
        """
        progress, step = self.progress, self.progress.step
        progress.step, progress.rounds = step + 1, progress.rounds + rounds
        progress.not_finite = progress.not_finite + 1 if wrong else 0
        progress.widths = [*self.widths]  # a step that is not done is done again with the same
        if wrong:
            self.log.arrays(f"bad_step_{step}.npz", batch)
        if progress.not_finite >= self.cfg.nonfinite_limit:
            self.checkpoints.wait()
            self.fail(
                f"step {step}: {wrong}, for NONFINITE_LIMIT={self.cfg.nonfinite_limit} "
                f"steps in a row; their batches are {self.out}/bad_step_N.npz. Lower LEARNING_RATE?"
            )

    def finish(self, export: Callable[[], None]) -> None:
        """Waits for the last checkpoint, exports the model and prints the last line.

        export: writes the trained model; it may raise OSError, whose text names the folder.
        """
        self.checkpoints.wait()
        if self.cfg.steps:
            try:
                export()
                if self.saves and self.checkpoints.newest < self.cfg.steps:
                    self.fail(f"the last checkpoint is not in {self.checkpoints.folder}")
                if waiting := self.log.waiting():
                    self.fail(f"lines of {', '.join(waiting)} in {self.out} cannot be written")
                mark_finished(self.out, self.cfg.steps, self.made_with)
            except OSError as error:
                self.fail(str(error))
            self.reviewer.verdict()
        seconds = time.perf_counter() - self.began
        self.log.line(f"DONE: steps={self.cfg.steps} elapsed_sec={seconds:.3f}")
        self.close(DONE)

    def evaluated(self, step: int, accuracy: float) -> None:
        """Keeps the accuracy of an evaluation, and shows how the run stands."""
        self.progress.evals[step] = accuracy
        self.reviewer.write(RUNNING)

    def fail(self, why: str) -> NoReturn:
        """Ends the program with an error, after the verdict."""
        self.reviewer.verdict()
        self.close(FAILED, why)
        raise SystemExit(f"error: {why}")

    def close(self, state: str, why: str = "") -> None:
        """Writes the last review and closes the log. state, why: see runtime/records.py."""
        summary = self.reviewer.write(state, why)
        self.log.close(summary, finished=state == DONE)
