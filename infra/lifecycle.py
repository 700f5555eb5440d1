"""How a run goes on and ends: when it saves, and what follows a signal, a mistake or a bad step.

After a signal the run saves a checkpoint of its last complete step, and so it does after a user's
mistake, such as a reward that fails, if there is one process. Everything else that stops a run ends
it at once: the newest complete checkpoint stays, and the same command goes on from it.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from infra.checkpoint import Checkpoints, Progress, progress_record, write_run
from infra.hosts import StopRequested, raising_on_all_processes
from infra.log import DONE, FAILED, RUNNING, STOPPED, RunLog
from infra.mistakes import Unwritable, UserMistake, exit_with_mistakes, in_one_line

if TYPE_CHECKING:
    from extras.report import Reviewer

NONFINITE_LIMIT = 3  # steps in a row whose loss or gradient is not finite


@dataclasses.dataclass
class Lifecycle:
    """What `main` needs to save a run, to log it and to end it."""

    steps: int  # STEPS
    save_every_steps: int
    eval_every_steps: int
    out: Path  # the run's folder
    log: RunLog
    checkpoints: Checkpoints
    progress: Progress
    reviewer: "Reviewer | None"  # None: without extras/report.py there are no reviews
    began: float  # time.perf_counter() at the start

    def claim_folder(self, arrays: Any) -> None:
        """Says whose folder this is, before the first record. A fork first saves a checkpoint of
        its own, so that it needs no other run any more. Raises UserMistake and Unwritable."""
        if self.progress.step and self.checkpoints.newest < 0:
            self.save(arrays)
            self.checkpoints.wait_until_saved()
        with raising_on_all_processes():
            self._write_run()

    def save(self, arrays: Any) -> None:
        """Saves a checkpoint, unless this step has one already (SAVE_EVERY_STEPS=0: never)."""
        if self.save_every_steps:
            self.checkpoints.save(arrays, progress_record(self.progress))
            self._write_run()  # the checkpoint before this one is complete now

    def evaluation_is_due(self, step: int) -> bool:
        """Whether an evaluation after so many steps is due, and not done yet."""
        every = self.eval_every_steps
        due = every > 0 and (step % every == 0 or step == self.steps)
        return due and step not in self.progress.evals

    def record_evaluation(self, step: int, accuracy: float) -> None:
        """Keeps the accuracy of an evaluation, and reviews the run so far."""
        self.progress.evals[step] = accuracy
        self._review(RUNNING)

    def count_step(self, rounds: int, not_finite: str) -> None:
        """Counts a step; ends the run if NONFINITE_LIMIT steps in a row were not finite.

        rounds: the rounds of sampling in this step. not_finite: the metrics that were not finite,
        or "". Raises Unwritable if the save in the background has failed.
        """
        progress, step = self.progress, self.progress.step
        progress.step, progress.rounds = step + 1, progress.rounds + rounds
        progress.not_finite = progress.not_finite + 1 if not_finite else 0
        if progress.not_finite >= NONFINITE_LIMIT:
            self.checkpoints.wait_until_saved()
            in_a_row = f"the last of {NONFINITE_LIMIT} such steps in a row"
            why = f"step {step}: {not_finite}, {in_a_row}. Lower LEARNING_RATE?"
            for line in self.close(FAILED, why):
                self.log.print_line(line)
            raise SystemExit(f"error: {why}")
        self.checkpoints.raise_if_save_failed()

    # ---- The end ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def ending(self, save: Callable[[], None]) -> Iterator[None]:
        """Runs the steps. After a signal it saves the last complete step and ends the program, and
        so it does after a user's mistake, if there is one process. A file that cannot be written
        ends the program, too. The summary says why the run has ended, also after any other error.

        save: calls Lifecycle.save with the newest arrays.
        """
        try:
            try:
                yield
            except StopRequested as signal:
                save()
                self.checkpoints.wait_until_saved()
                self._write_run()
                saved = self.checkpoints.newest if self.checkpoints.newest >= 0 else "none"
                self.log.print_line(
                    f"STOPPED: {signal} steps={self.progress.step} saved_step={saved}"
                )
                self.close(STOPPED, str(signal))
                raise SystemExit(signal.exit_code) from None
            except UserMistake:  # of a reward or an environment, before the step changes anything
                # Other processes do not know of the mistake, so only a single process saves.
                if jax.process_count() == 1 and self.progress.step:
                    save()
                    self.checkpoints.wait_until_saved()
                raise
        except Unwritable as error:
            self._close_failed(str(error))
            raise SystemExit(f"error: {error}") from None
        except UserMistake as error:
            self._close_failed(str(error))
            exit_with_mistakes(error)
        except Exception as error:
            out_of_memory = "RESOURCE_EXHAUSTED" in str(error)
            self._close_failed("memory ran out" if out_of_memory else in_one_line(error))
            raise

    def finish(self, export: Callable[[], None]) -> None:
        """Waits for the last checkpoint, exports the model and prints the last line.

        export: writes the trained model. Raises Unwritable.
        """
        self.checkpoints.wait_until_saved()
        if self.steps:
            export()
            # Also without a checkpoint the same command does not begin the run again.
            write_run(self.out, self.progress, self.progress.step)
        verdict = self.close(DONE)
        seconds = time.perf_counter() - self.began
        for line in (*verdict, f"DONE: steps={self.steps} elapsed_sec={seconds:.3f}"):
            self.log.print_line(line)

    def close(self, state: str, why: str = "") -> list[str]:
        """Writes the last review, whose verdict it returns, and ends W&B. state, why: see
        infra/log.py."""
        summary = self._review(state, why)
        self.log.close(summary, finished=state == DONE)
        return summary.get("verdict", [])

    def _close_failed(self, why: str) -> None:
        with contextlib.suppress(Unwritable):  # it may be the log that cannot be written
            self.close(FAILED, why)

    def _review(self, state: str, why: str = "") -> dict[str, Any]:
        return self.reviewer.write(state, why) if self.reviewer else {}

    def _write_run(self) -> None:
        write_run(self.out, self.progress, self.checkpoints.newest)
