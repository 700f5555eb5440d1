"""Whether and where a run goes on: its folders, its checkpoint, and what it has done already.

A folder belongs to one run. RUN, a file in OUTPUT_DIR, says which: what the run's results follow
from, the checkpoint of another run with which it began, and what it has done. A run goes on only in
its own folders. A new run and a fork need empty ones, so that nobody's records are moved or lost. A
fork saves a checkpoint of its own before its first record.
"""

import functools
import json
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from etils import epath

from runtime import processes
from runtime.checkpoint import RECORD, Checkpoints, names_of
from runtime.mistakes import Unwritable, UserMistake
from runtime.run_log import FILES, replace_file

SCHEDULE_END = "LR_DECAY_STEPS (else STEPS)"  # in made_with: the step at which the schedule ends
LOCK = ".lock"  # a file in the folders of a run; process 0 locks it for as long as it lives
RUN = "run.json"  # says whose folder it is; see write_run


@dataclass
class Progress:
    """How far a run is; the record of a checkpoint holds all of it."""

    step: int = 0  # steps done
    rounds: int = 0  # rounds of sampling done; each takes the next prompts
    not_finite: int = 0  # steps in a row whose loss or gradient was not finite
    evals: dict[int, float] = field(default_factory=dict)  # accuracy at each step
    forked_from: str = ""  # the checkpoint of another run with which this run began
    run_id: str = ""  # also of the run in W&B


# ---- Folders -------------------------------------------------------------------------------------


def output_folder(output_dir: str, name: str) -> Path:
    """OUTPUT_DIR, or a new folder NAME_UTC, the same on all processes; this run holds it."""
    chosen = output_dir or f"{name}_{datetime.now(UTC):%Y%m%d_%H%M%S}"
    with processes.told_by_all():
        if jax.process_index() == 0:
            while not output_dir and Path(chosen).exists():  # another run began in this second
                chosen += "_2"
            hold(Path(chosen), f"OUTPUT_DIR={chosen}")
    return Path(processes.gather_texts(chosen)[0])


def hold(folder: Path, name: str) -> None:
    """Makes the folder and locks it against other runs, until this process ends in any way.

    name: the setting and its value. Raises UserMistake if another run holds the folder, or if it
    cannot be written.
    """
    import fcntl  # Windows has none, but there only config.py has to run

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # not inherited by children
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(lock, 200, 0).decode(errors="replace")
            raise UserMistake(
                f"{name} belongs to another run, which is alive: {who}. Choose another folder, or "
                f"wait until that run has ended"
            ) from None
        except OSError as error:  # some network file systems have no locks
            why = f"{name} cannot be locked: {error.strerror}"
            print(f"{why}; nothing stops a second run in this folder", flush=True)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {platform.node()}".encode(), 0)
    except OSError as error:
        raise UserMistake(f"{name} cannot be written: {error.strerror}") from None


def open_checkpoints(cfg: Any, out: Path) -> tuple[Checkpoints, bool]:
    """The run's checkpoints in CHECKPOINT_DIR, or in its output folder, and whether all processes
    reach their folder.

    If they do, this run holds the folder; if they do not, the run saves no checkpoints. Raises
    UserMistake for a folder that cannot be used.
    """
    with processes.told_by_all():
        checkpoints = Checkpoints(cfg.checkpoint_dir or str(out / "checkpoints"), cfg.save_keep)
    if not checkpoints.local:
        return checkpoints, True
    folder = Path(checkpoints.folder)
    with processes.told_by_all():
        if jax.process_index() == 0 and folder != out.resolve():
            hold(folder, f"CHECKPOINT_DIR={folder}" if cfg.checkpoint_dir else f"OUTPUT_DIR={out}")
    lock = folder / LOCK  # says which process holds the folder
    told = lock.read_text(errors="replace") if lock.is_file() else ""
    reachable = len({*processes.gather_texts(told)}) == 1
    if not reachable and cfg.save_every_steps:
        print(
            f"no checkpoints: {folder} is not the same folder on all hosts; set CHECKPOINT_DIR to "
            f"one they share, such as gs://bucket/folder",
            flush=True,
        )
    return checkpoints, reachable


# ---- Whose folder it is --------------------------------------------------------------------------


def run_in(out: Path) -> dict[str, Any]:
    """What RUN says of the run in this folder, on all processes, and "has_records": whether the run
    has written a line into one of FILES."""
    text = ""
    with processes.told_by_all():
        if jax.process_index() == 0:
            files = [out / name for name in FILES]
            has_records = any(file.is_file() and file.stat().st_size for file in files)
            run = (out / RUN).read_text(encoding="utf-8") if (out / RUN).is_file() else "{}"
            try:
                text = json.dumps(json.loads(run) | {"has_records": has_records})
            except ValueError as error:
                raise UserMistake(
                    f"{out / RUN} is damaged: {error}; choose a new OUTPUT_DIR"
                ) from None
    return json.loads(processes.gather_texts(text)[0])


def write_run(
    out: Path,
    progress: Progress,
    made_with: Mapping[str, str],
    done: Mapping[str, int],
    newest: int,
) -> None:
    """Writes RUN, on process 0. Raises Unwritable.

    done: {what: after how many steps}. newest: the step of the newest complete checkpoint; -1: the
    run has none yet, so that the same command may begin it again.
    """
    values = {"run_id": progress.run_id, "forked_from": progress.forked_from, "newest": newest}
    values |= {"made_with": dict(made_with), "done": dict(done)}
    if jax.process_index() == 0:
        try:
            replace_file(out / RUN, json.dumps(values, indent=1) + "\n")
        except OSError as error:
            raise Unwritable(f"{out} cannot be written: {error.strerror}") from None


def evaluations_done(progress: Progress, done: Mapping[str, int]) -> list[str]:
    """Which evaluations after the newest step are complete: "eval", "eval_full", both or none."""
    kinds = {what.partition(" ")[0] for what, step in done.items() if step == progress.step}
    known = {"eval"} if progress.step in progress.evals else set()
    return [kind for kind in ("eval", "eval_full") if kind in kinds | known]


def what_changed(record: Mapping[str, Any], made_with: Mapping[str, str], what: str) -> str:
    """A line that names what has changed since the record, or "".

    made_with: all that the results follow from, now. what: has the record, such as "step 4".
    """
    before = record["made_with"]
    changed = [
        f"{name} was {before.get(name, 'not there')} and is {made_with.get(name, 'not there')}"
        for name in {**before, **made_with}
        if before.get(name) != made_with.get(name)
    ]
    text = f"{what} was made with other settings or files: {'; '.join(changed[:5])}"
    return text if changed else ""


def stop_if_another(
    record: Mapping[str, Any], made_with: Mapping[str, str], what: str, folder: str = ""
) -> None:
    """Raises UserMistake if something has changed; see what_changed. folder: of the checkpoints
    with which a fork could go on."""
    if text := what_changed(record, made_with, what):
        end = record["made_with"].get(SCHEDULE_END, "0")
        back = f" with LR_DECAY_STEPS={end}" if SCHEDULE_END in text and end != "0" else ""
        fork = f" with RESUME={folder}, which goes on as changed" if folder else ""
        raise UserMistake(f"{text}; set it back{back}, or choose a new OUTPUT_DIR{fork}")


# ---- How a run begins ----------------------------------------------------------------------------


class Beginning:
    """How a run begins: what RESUME asks for, and what is in the run's folders already.

    missing: {name: what} of what the settings ask for after STEPS steps and the run has not done.
    done: {what: after how many steps} of what the run has done.
    """

    def __init__(
        self,
        cfg: Any,
        checkpoints: Checkpoints,
        out: Path,
        reachable: bool,
        made_with: Mapping[str, str],
        asked: Mapping[str, str],
    ) -> None:
        """reachable: whether all processes see the folder of the checkpoints. made_with: all that
        the results follow from. asked: {name: what} of what the settings ask for.

        Raises UserMistake if a folder belongs to another run.
        """
        self._cfg, self._checkpoints, self._made_with = cfg, checkpoints, made_with
        self._asked, self._own = asked, checkpoints.steps() if reachable else []
        source, self._step = checkpoint_source(cfg.resume, checkpoints)
        self._other = None if source is checkpoints else source  # a fork begins with that run
        run = run_in(out)
        recorded = run.pop("has_records")
        self._run = run if recorded or self._own else {}  # else it has ended before it left any
        self._where = (
            f"OUTPUT_DIR={out}" if recorded or self._run else f"CHECKPOINT_DIR={checkpoints.folder}"
        )
        if recorded or self._own:
            self._stop_if_taken()
        self.done: dict[str, int] = self._run.get("done", {})
        same = self._run and self._run["made_with"] == made_with
        undone = {name: what for name, what in asked.items() if self.done.get(what) != cfg.steps}
        self.missing = undone if same else {**asked}
        if self._run and not self._own:  # the same command begins it again
            stop_if_another(self._run, made_with, f"the run in {out}")
            if self.missing and (self.done or self._run["newest"] >= 0):
                raise UserMistake(
                    f"OUTPUT_DIR={out}: what is missing ({', '.join(self.missing.values())}) needs "
                    f"a checkpoint of this run, and {checkpoints.folder} has none; set "
                    f"CHECKPOINT_DIR to its folder, or choose a new OUTPUT_DIR"
                )
            if self._other:  # it begins with the same checkpoint
                self._step = int(self._run["forked_from"].rpartition("/")[2])

    def _stop_if_taken(self) -> None:
        """Raises UserMistake unless the run in the folder is the one that RESUME asks for."""
        own, why = self._own, ""
        if self._cfg.resume == "never":
            why = "RESUME=never begins a new one"
        elif own and not self._other and self._step not in (None, own[-1]):
            why = f"its newest checkpoint is of step {own[-1]}; RESUME=auto goes on with it"
        elif not own and not self._run:
            why = f"neither a checkpoint nor {RUN} says which run it is"
        if why:
            raise UserMistake(f"{self._where} holds a run, and {why}; choose a new OUTPUT_DIR")
        if self._run:
            self._stop_if_begun_otherwise(self._run)

    def _stop_if_begun_otherwise(self, run: Mapping[str, Any]) -> None:
        """Raises UserMistake if the folder's run has begun with another checkpoint than RESUME asks
        for. run: the values of RUN, or the record of a checkpoint."""
        began, other = run["forked_from"], self._other
        if other:
            folder, _, step = began.rpartition("/")  # the folder may be gone, with "checkpoints"
            same = folder in (other.folder, f"{other.folder}/checkpoints")
            same = same and self._step in (None, int(step))
        else:  # it only goes on, or it begins again
            same = self._own or not began
        if not same:
            raise UserMistake(
                f"{self._where} holds a run that began with {began or 'the model'}, and "
                f"RESUME={self._cfg.resume} asks for another; choose a new OUTPUT_DIR"
            )

    def _check(self, record: Mapping[str, Any], wanted: Any) -> None:
        """Raises UserMistake if the run may not go on from the checkpoint with this record."""
        if self._own and not self._run:  # OUTPUT_DIR is empty, and CHECKPOINT_DIR is not
            self._stop_if_begun_otherwise(record)
        elif self._own and self._run["run_id"] != record["run_id"]:
            raise UserMistake(
                f"{self._where} and CHECKPOINT_DIR={self._checkpoints.folder} hold two runs; "
                f"choose a new folder for one of them"
            )
        step, made_with = record["step"], self._made_with
        if self._cfg.steps < step:
            raise UserMistake(
                f"STEPS={self._cfg.steps}, and the checkpoint is after step {step}; raise it"
            )
        if self._own:
            stop_if_another(record, made_with, f"step {step}", self._checkpoints.folder)
        elif text := what_changed(record, made_with, f"step {step}"):  # a fork may differ
            print(f"RESUME={self._cfg.resume}: {text}", flush=True)
        stop_if_other_arrays(wanted, record)
        before, now = record["versions"], processes.versions()
        if old := [f"{name}={before.get(name)}" for name in now if before.get(name) != now[name]]:
            print(f"the checkpoint was made with {' '.join(old)}", flush=True)

    def restore(self, wanted: Any) -> tuple[Any, Progress]:
        """The arrays and the progress of the checkpoint with which the run begins; no arrays (None)
        for a run that begins with the model.

        wanted: shapes, dtypes and shardings of the arrays. Raises UserMistake for a checkpoint of
        another run, and for a RESUME that names no checkpoint.
        """
        cfg, check, found = self._cfg, functools.partial(self._check, wanted=wanted), None
        if self._own:  # also a fork, once it has a checkpoint of its own
            found = self._checkpoints.restore(wanted, check)
        elif self._other:
            found = self._other.restore(wanted, check, self._step)
        if not found and cfg.resume not in ("auto", "never"):
            raise UserMistake(f"RESUME={cfg.resume} is not the folder of a complete checkpoint")
        run_id = self._run.get("run_id") or secrets.token_hex(4)
        if not found:
            return None, Progress(run_id=run_id)
        arrays, record = found
        progress = Progress(**{field.name: record[field.name] for field in fields(Progress)})
        progress.evals = {int(step): accuracy for step, accuracy in record["evals"]}
        print(f"resumed after step {progress.step} of {cfg.steps}", flush=True)
        if not self._own:
            began = f"{self._other.folder}/{progress.step}"
            return arrays, replace(progress, evals={}, run_id=run_id, forked_from=began)
        if progress.step < cfg.steps:  # perhaps the last checkpoint is damaged
            self.missing = {**self._asked}
            self.done = {what: step for what, step in self.done.items() if step <= progress.step}
        return arrays, progress


def checkpoint_source(
    resume: str, own: Checkpoints | None
) -> tuple[Checkpoints | None, int | None]:
    """The checkpoints among which RESUME chooses, and the only step that may be chosen.

    They are `own`, those of the run itself, or those of another run, or None.
    """
    if resume == "never":
        return None, None
    if resume == "auto":
        return own, None
    named, step = epath.Path(Checkpoints(resume, read_only=True).folder), None
    if (named / "checkpoints").is_dir():
        named = named / "checkpoints"
    elif named.name.isdecimal() and ((named / RECORD).exists() or not named.exists()):
        named, step = named.parent, int(named.name)
    source = Checkpoints(os.fspath(named), read_only=True)
    return (own if own and source.folder == own.folder else source), step


def stop_if_other_arrays(wanted: Any, record: Mapping[str, Any], part: bool = False) -> None:
    """Raises UserMistake if the checkpoint with this record has other arrays than the wanted ones.

    part: True if it may have more of them.
    """
    ours, theirs = names_of(wanted), record["arrays"]
    other = [f"has no array {text}" for text in ours if text not in theirs]
    if not part:
        other += [f"has {text}, unused by this run" for text in theirs if text not in ours]
    if other:
        raise UserMistake(
            f"the checkpoint of step {record['step']} {other[0]}: MODEL_PATH and OPTIMIZER have to "
            f"be those of its run, and the code has to be of the same version"
        )


def record_of(progress: Progress, made_with: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint keeps beside its arrays, in JSON values."""
    evals = [[step, accuracy] for step, accuracy in progress.evals.items()]
    more = {"made_with": dict(made_with), "versions": processes.versions()}
    return asdict(progress) | {"evals": evals} | more
