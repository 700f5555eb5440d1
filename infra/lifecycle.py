"""When a run saves, and how it ends: by a signal, MAX_HOURS, a mistake, a non-finite step, or done.

After a signal the run saves a checkpoint of its last complete step, and so it does after a user's
mistake, such as a reward that fails, if there is one process. When MAX_HOURS are nearly over, it
also evaluates and exports what it has saved. Everything else that stops a run ends it at once: the
newest complete checkpoint stays, and the same command resumes from it.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from infra.checkpoint import Checkpoints, Progress
from infra.hosts import StopRequested, StopSignal, raising_on_all_processes
from infra.log import DONE, FAILED, RUNNING, STOPPED, RunLog, read_lines
from infra.mistakes import Unwritable, UserMistake, exit_with_mistakes, in_one_line
from infra.resume import write_run

NONFINITE_LIMIT = 3  # steps in a row whose loss or gradient is not finite
# The reserve of MAX_HOURS is MARGIN times the seconds that the end is expected to take, + MARGIN_S.
MARGIN, MARGIN_S = 1.25, 10.0
SLOW_DISK = 1e8  # bytes that it writes in a second, until this is measured
EVALUATION_S = ("time/eval/step_s", "time/eval/loss_s")  # train_sft.py may record both


@dataclasses.dataclass
class Lifecycle:
    """What `main` needs to save a run, to log it and to end it."""

    steps: int  # STEPS
    eval_every_steps: int
    save_every_steps: int
    out: Path  # the run's folder
    log: RunLog
    checkpoints: Checkpoints
    progress: Progress
    review: Callable[[str, str], dict[str, Any]]  # gets state and reason, see infra/log.py
    began: float  # time.perf_counter() at the start
    stop_signal: StopSignal
    # Set by limit_hours:
    max_hours: float = 0.0  # MAX_HOURS; 0: no limit
    first_step: int = 0  # of this start
    export_s: float = 0.0  # expected
    last_check: float = 0.0  # the time.monotonic() of the last call of is_late
    wait_s: float = 0.0  # the longest time between two of these calls; it decays by 0.8 per step

    def claim_folder(self, arrays: Any) -> None:
        """Writes run.json, which names the owner of the folder, before the first record. A fork
        first saves a checkpoint of its own, so that it no longer needs the other run. Raises
        UserMistake and Unwritable."""
        if self.progress.step and self.checkpoints.newest < 0:
            self.save(arrays)
            self.checkpoints.wait_until_saved()
        with raising_on_all_processes():
            write_run(self.out, self.progress, has_saved=self.checkpoints.newest >= 0)

    def evaluation_is_due(self) -> bool:
        """Whether an evaluation after the steps that are done is due, and not done yet."""
        return self.progress.accuracy is None and self._is_due(self.eval_every_steps)

    def finish_evaluation(self, accuracy: float) -> None:
        """Remembers the score, by which the best checkpoint is kept."""
        self.progress.accuracy = accuracy
        self.review(RUNNING, "")

    def save_is_due(self) -> bool:
        """Whether a checkpoint after the steps that are done is due."""
        return self.progress.step > 0 and self._is_due(self.save_every_steps)

    def _is_due(self, every: int) -> bool:
        step = self.progress.step
        return every > 0 and (step % every == 0 or step == self.steps)

    def save(self, arrays: Any) -> None:
        """Saves a checkpoint, unless this step has one already (SAVE_EVERY_STEPS=0: never)."""
        if not self.save_every_steps:
            return
        progress = self.progress
        if progress.accuracy is not None and progress.accuracy > progress.best_accuracy:
            progress.best_step, progress.best_accuracy = progress.step, progress.accuracy
        progress.lengths, had_saved = self.log.file_lengths(), self.checkpoints.newest >= 0
        self.is_late()  # wait_s leaves out the seconds of this save
        self.checkpoints.save(arrays, progress)
        self.last_check = time.monotonic()
        if self.checkpoints.newest >= 0 and not had_saved:
            write_run(self.out, progress, has_saved=True)

    def finish_step(self, rounds: int, not_finite: str) -> None:
        """Counts a step; ends the run if NONFINITE_LIMIT steps in a row were not finite.

        rounds: the rounds of sampling in this step. not_finite: the metrics that were not finite,
        or "". Raises Unwritable if the save in the background has failed.
        """
        progress, step = self.progress, self.progress.step
        progress.step, progress.rounds = step + 1, progress.rounds + rounds
        progress.accuracy = None
        self.wait_s *= 0.8  # a wait that compiled does not count for long
        progress.not_finite = progress.not_finite + 1 if not_finite else 0
        if progress.not_finite >= NONFINITE_LIMIT:
            self.checkpoints.wait_until_saved()
            count = f"the last of {NONFINITE_LIMIT} such steps in a row"
            # Updates that are not finite are not applied, so these weights are those of the start.
            is_model = progress.step == NONFINITE_LIMIT and not_finite.startswith("loss")
            advice = "Are the weights of MODEL_PATH finite" if is_model else "Lower LEARNING_RATE"
            reason = f"step {step}: {not_finite}, {count}. {advice}?"
            for line in self.close(FAILED, reason):
                self.log.print_line(line)
            raise SystemExit(f"error: {reason}")
        self.checkpoints.raise_if_save_failed()
        if self.max_hours and progress.step == self.first_step + 10:
            step_s = statistics.median(self.log.recent)
            step_s += self._evaluation_s() / max(self.eval_every_steps, 1)
            fitting = progress.step + max(0, int(self._seconds_left() / step_s))
            line = f"MAX_HOURS={self.max_hours:g} is enough for about {min(fitting, self.steps)}"
            self.log.print_line(f"note: {line} of STEPS={self.steps}")

    # ---- MAX_HOURS -------------------------------------------------------------------------------

    def limit_hours(
        self, hours: float, began: float, read_s: float, saved: Any, exported: Any, itemsize: int
    ) -> None:
        """From now on the clock stops the run, in time for its end within MAX_HOURS.

        began: the time.monotonic() from which they count. read_s: the seconds that reading the
        weights took. saved: the arrays of a checkpoint. exported: those that are exported, with at
        least itemsize bytes for each number, also of an int8 base.
        """
        self.max_hours, self.first_step = hours, self.progress.step
        self.last_check = time.monotonic()
        self.checkpoints.save_s, write_s = (
            sum(x.size * max(x.dtype.itemsize, min_itemsize) for x in jax.tree.leaves(tree))
            / SLOW_DISK
            for tree, min_itemsize in ((saved, 1), (exported, itemsize))
        )
        self.export_s = max(read_s, write_s)
        for record in read_lines(self.out / "metrics.jsonl"):
            self.log.newest |= record
        self.log.deadline = began + 3600 * hours
        self.stop_signal.is_late = self.is_late

    def is_late(self) -> bool:
        """Whether the run has to stop now. StopSignal asks before each pass and each update."""
        now = time.monotonic()
        self.wait_s, self.last_check = max(self.wait_s, now - self.last_check), now
        self.checkpoints.measure_save()
        # The evaluation of the complete split may take longer.
        is_done = self.progress.step == self.steps and not self.evaluation_is_due()
        return self._seconds_left() <= 0 and not is_done

    def _seconds_left(self) -> float:
        """Until the run has to stop. A save in the background delays the last one."""
        save_s = self.checkpoints.save_s * (2 if self.checkpoints.saving >= 0 else 1)
        end_s = self.wait_s + save_s + self._evaluation_s() + self.export_s
        return self.log.deadline - time.monotonic() - MARGIN * end_s - MARGIN_S

    def _evaluation_s(self) -> float:
        return sum(self.log.newest.get(name, 0.0) for name in EVALUATION_S)

    def _finish_early(self, evaluate: Callable[[], float], export: Callable[[bool], None]) -> None:
        """Evaluates, unless it is done or takes too long, and exports. The checkpoint is complete,
        so that a resumed run drops the records of this evaluation. Raises UserMistake if this start
        has added no step, and StopRequested after a signal."""
        if self.progress.step == self.first_step:
            hours = f"MAX_HOURS={self.max_hours:g}"
            raise UserMistake(f"{hours} ended this start before it added a step; raise it")
        latest = self.log.deadline - MARGIN * self.export_s
        self.stop_signal.is_late = lambda: time.monotonic() >= latest
        try:
            if self.eval_every_steps and self.progress.accuracy is None:
                evaluate()
        except StopRequested as request:
            if not request.at_deadline:
                raise
            self.log.print_line("note: MAX_HOURS were not enough for the last evaluation")
        self.stop_signal.is_late = lambda: False
        self.stop_signal.raise_if_stopped()
        export(False)
        self.stop_signal.raise_if_stopped()

    # ---- The end ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def ending(
        self,
        save: Callable[[], None],
        evaluate: Callable[[], float],
        export: Callable[[bool], None],
    ) -> Iterator[None]:
        """Runs the steps. After a signal it saves the last complete step and ends the program, and
        so it does after a user's mistake, if there is one process. When MAX_HOURS are nearly over,
        it also evaluates and exports. A file that cannot be written ends the program, too. The
        summary says why the run has ended, also after any other error.

        save: calls Lifecycle.save with the newest arrays. evaluate: returns the score of the newest
        weights. export: writes the trained model; it gets whether all steps are done.
        """
        try:
            try:
                yield
            except StopRequested as request:
                save()
                self.checkpoints.wait_until_saved()
                try:
                    if request.at_deadline:
                        self._finish_early(evaluate, export)
                except StopRequested as signal:
                    request = signal
                saved = self.checkpoints.newest if self.checkpoints.newest >= 0 else "none"
                self.log.print_line(
                    f"STOPPED: {request} steps={self.progress.step} saved_step={saved}"
                )
                self.close(STOPPED, str(request))
                raise SystemExit(request.exit_code) from None
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

    def finish(self, export: Callable[[bool], None]) -> None:
        """Waits for the last checkpoint, exports the model and prints the last line.

        export: as in `ending`. Raises Unwritable.
        """
        self.checkpoints.wait_until_saved()
        if self.steps:
            export(True)
            # Without a checkpoint, too, the run is not begun again.
            write_run(self.out, self.progress, has_saved=True)
        verdict = self.close(DONE)
        seconds = time.perf_counter() - self.began
        for line in (*verdict, f"DONE: steps={self.steps} elapsed_sec={seconds:.3f}"):
            self.log.print_line(line)

    def close(self, state: str, reason: str = "") -> list[str]:
        """Writes the last review, whose verdict it returns, and ends the trackers. state, reason:
        see infra/log.py."""
        summary = self.review(state, reason)
        self.log.close(summary, finished=state == DONE)
        return summary.get("verdict", [])

    def _close_failed(self, reason: str) -> None:
        with contextlib.suppress(Unwritable):  # it may be the log that cannot be written
            self.close(FAILED, reason)
