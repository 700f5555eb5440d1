"""Where a run begins: with the model, or after the steps of a checkpoint that is the same run's."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import config as settings
from inputs import versions
from models import hf
from models.model import Params, abstract_params
from runtime import processes
from runtime.checkpoint import Checkpoints
from sampling import copy_weights
from startup import Run
from update import TrainState, abstract_state, init_state

# Settings that change no result, or only by rounding: speed, memory, outputs, evaluation; and those
# of which a checkpoint keeps what they come to: steps, sizes, model, tokenized data.
FREE = frozenset(
    """
    batch_size rollout_per_device_batch_size rollout_global_batch_size rollout_batch_size
    global_length rollout_mesh_shape reward_timeout_s steps lr_decay_steps train_micro_batch_size
    train_per_device_micro_batch_size grad_accum_steps mesh_shape remat policy_loss_impl
    attention_impl eval_every_steps eval_prompts eval_full_sweep eval_samples eval_split
    accuracy_of accuracy_threshold output_dir checkpoint_dir save_every_steps save_keep resume
    resume_force preemption_grace_s nonfinite_limit export_hf export_dtype
    print_train_time_breakdown wandb_mode wandb_project wandb_name jax_compilation_cache_dir
    require_multihost require_jax_process_count init_timeout_s heartbeat_timeout_s model_path
    model_revision dataset dataset_config train_split question_column answer_column chat_template
    system_prompt max_prompt_length prompt_too_long dtype
""".split()
)
LOCK = ".lock"  # in a run's folders; process 0 holds it for as long as it lives


@dataclasses.dataclass
class Progress:
    """What the host knows of how far the run is; a checkpoint's record holds all of it."""

    step: int = 0  # steps done
    rounds: int = 0  # of sampling; each takes the next P prompts
    not_finite: int = 0  # steps in a row whose loss or gradient was not finite
    evals: dict[int, float] = dataclasses.field(default_factory=dict)  # accuracy at each step
    wandb_id: str = ""
    forked_from: str = ""  # the checkpoint of another run that this one began with


# ---- Folders -------------------------------------------------------------------------------------


def output_folder(cfg: settings.Config) -> Path:
    """OUTPUT_DIR, or a new folder under runs/; the same on every process, and held by this run."""
    chosen = ""
    with processes.told_by_all():
        if jax.process_index() == 0:
            chosen = cfg.output_dir or new_folder(cfg.wandb_name or Path(cfg.model_path).name)
            hold(Path(chosen), f"OUTPUT_DIR={chosen}")
    return Path(processes.gather_texts(chosen)[0])


def new_folder(name: str) -> str:
    """Makes runs/NAME_UTC, or with _2, _3, ... after it where another run was as quick."""
    start = f"runs/{name}_{datetime.now(UTC):%Y%m%d_%H%M%S}"
    for number in itertools.count(1):
        folder = Path(start if number == 1 else f"{start}_{number}")
        try:
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(f"OUTPUT_DIR={folder} cannot be written: {error.strerror}") from None


def hold(folder: Path, name: str) -> None:
    """Makes the folder, and keeps other runs out of it until this process ends, however it ends.

    name: the setting and its value. Raises ValueError if another run holds the folder, or if it
    cannot be written.
    """
    import fcntl  # not on Windows, where only config.py has to run

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # no child inherits it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(lock, 200, 0).decode(errors="replace")
            raise ValueError(
                f"{name} belongs to another run, which is alive: {who}. Choose another folder, or "
                f"wait until that run has ended"
            ) from None
        except OSError as error:  # some network file systems have no locks
            why = f"{name} cannot be locked: {error.strerror}"
            print(f"{why}; nothing stops a second run in this folder", flush=True)
            return
        if os.fstat(lock).st_nlink == 0:  # a run that did not begin has just removed the file
            os.close(lock)
            return hold(folder, name)
        os.ftruncate(lock, 0)
        os.pwrite(lock, this_process().encode(), 0)
    except OSError as error:
        raise ValueError(f"{name} cannot be written: {error.strerror}") from None


def this_process() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def leave(*folders: Path) -> None:
    """Removes each folder in which this process, whose run does not begin, has left only a lock."""
    for folder in folders:
        if folder.is_dir() and [file.name for file in folder.iterdir()] == [LOCK]:
            if (folder / LOCK).read_text(errors="replace") == this_process():
                (folder / LOCK).unlink()
                with contextlib.suppress(OSError):  # where something else is mounted
                    folder.rmdir()


def open_checkpoints(cfg: settings.Config, out: Path) -> tuple[Checkpoints, bool]:
    """The run's checkpoints, and whether all processes see their folder: else there are none.

    Where they do, this run holds the folder. Raises ValueError for one that cannot be used.
    """
    checkpoints = Checkpoints(cfg.checkpoint_dir or str(out / "checkpoints"), cfg.save_keep)
    if "://" in checkpoints.folder:
        with processes.told_by_all():
            checkpoints.stop_if_out_of_reach()
        return checkpoints, True
    folder, alone = Path(checkpoints.folder), jax.process_count() == 1
    mark = folder / f".seen_{processes.gather_texts(datetime.now(UTC).isoformat())[0]}"
    with processes.told_by_all():
        used = cfg.save_every_steps > 0 or folder.is_dir() or not alone
        if jax.process_index() == 0 and used:
            name = f"CHECKPOINT_DIR={folder}" if cfg.checkpoint_dir else f"OUTPUT_DIR={out}"
            if folder.resolve() != out.resolve():
                hold(folder, name)
            mark.touch()
    seen = all(processes.gather_texts("yes" if mark.exists() or alone else ""))
    if jax.process_index() == 0:
        mark.unlink(missing_ok=True)
        if not seen:
            leave(folder)
    if not seen and cfg.save_every_steps:
        checkpoints.say(
            f"no checkpoints: {folder} is not the same folder on all hosts; set CHECKPOINT_DIR to "
            f"one they share, such as gs://bucket/folder"
        )
    return checkpoints, seen


def is_finished(run: Run) -> bool:
    """True if OUTPUT_DIR holds this run with all its STEPS, evaluations and the export done.

    Raises ValueError if it holds another one, as a checkpoint of it would.
    """
    cfg, told = run.cfg, ""
    file = Path(cfg.output_dir) / "finished"
    if cfg.output_dir and cfg.resume == "auto" and cfg.steps and file.is_file():
        told = file.read_text(encoding="utf-8")
    if not (told := processes.gather_texts(told)[0]):
        return False
    done = json.loads(told)
    if done["step"] < cfg.steps:
        return False
    stop_if_another(run, done)
    return True


def mark_finished(run: Run, out: Path) -> None:
    if jax.process_index() == 0:
        done = {"step": run.cfg.steps, "made_with": made_with(run)}
        try:
            (out / "finished").write_text(json.dumps(done) + "\n", encoding="utf-8")
        except OSError as error:
            raise SystemExit(f"error: {out}/finished: {error.strerror}") from None


# ---- The state -----------------------------------------------------------------------------------


def begin(
    run: Run, checkpoints: Checkpoints, out: Path, seen: bool
) -> tuple[TrainState, Params | None, Progress]:
    """The training state, the reference of BETA, and how far the run is.

    From the checkpoint that RESUME asks for, or else from the model. What an earlier run has left
    of later steps is set aside in `out`. seen: whether all processes see the checkpoints' folder.
    Raises ValueError for a checkpoint of another run, and for a RESUME that is none.
    """
    cfg, source = run.cfg, source_of(run, checkpoints) if seen else (None, None)
    found = source[0].restore(functools.partial(arrays_of, run), source[1]) if source[0] else None
    if cfg.resume not in ("auto", "never") and found is None:
        why = "is no folder of a whole checkpoint"
        if not seen:
            why = f"needs a folder for checkpoints that all hosts see; {checkpoints.folder} is none"
        raise ValueError(f"RESUME={cfg.resume} {why}")
    aside = out / f"earlier_{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    with processes.told_by_all():
        if jax.process_index() == 0:
            make_way(out, aside, () if found else ("metrics.jsonl", "samples.jsonl", "hf"))
    if found:
        arrays, record = found
        state, ref_params = arrays["state"], arrays.get("ref_params")
        names = [field.name for field in dataclasses.fields(Progress) if field.name in record]
        saved = {name: record[name] for name in names}  # old records have no forked_from
        progress = Progress(**saved | {"evals": {int(s): a for s, a in record["evals"]}})
        checkpoints.say(f"resumed after step {progress.step} of {cfg.steps}")
        own = source[0].folder == checkpoints.folder
        if not own:  # this is another run, and W&B has it as one
            progress.wandb_id = ""
            progress.forked_from = f"{source[0].folder}/{progress.step}"
        checkpoints.newest = progress.step if own else -1
        checkpoints.set_aside(checkpoints.newest, aside)
    else:
        if seen:
            checkpoints.set_aside(-1, aside)
        mesh = run.compute.layout.mesh
        params = hf.load_params(run.folder, run.compute.config, mesh, jnp.float32)
        state = init_state(params, optimizer=run.optimizer, config=run.compute.config)
        ref_params, progress = None, Progress()
        if cfg.beta > 0:
            ref_params = copy_weights(run, params, run.compute.layout, reference_dtype(run))
    return state, ref_params, progress


def make_way(out: Path, aside: Path, names: Sequence[str]) -> None:
    """Moves these outputs of an earlier run from `out` to `aside`; it is no longer finished."""
    try:
        if (out / "finished").exists():
            (out / "finished").unlink()
        for old in [out / name for name in names if (out / name).exists()]:
            aside.mkdir(parents=True, exist_ok=True)
            old.rename(aside / old.name)
    except OSError as error:
        raise ValueError(f"OUTPUT_DIR={out} cannot be written: {error.strerror}") from None


def source_of(run: Run, checkpoints: Checkpoints) -> tuple[Checkpoints | None, list[int] | None]:
    """Where RESUME looks for a checkpoint, and the only steps it may be of."""
    resume = run.cfg.resume
    if resume == "never" or (resume == "auto" and not run.cfg.output_dir + run.cfg.checkpoint_dir):
        return None, None
    if resume == "auto":
        return checkpoints, None
    folder, _, last = resume.rstrip("/").rpartition("/")
    if last.isdecimal():
        there = Checkpoints(folder or ".", read_only=True)
        return (checkpoints if there.folder == checkpoints.folder else there), [int(last)]
    inside = Path(resume) / "checkpoints"
    there = Checkpoints(str(inside) if inside.is_dir() else resume, read_only=True)
    return (checkpoints if there.folder == checkpoints.folder else there), None


def reference_dtype(run: Run) -> Any:
    """A reference that follows by small steps needs float32's digits."""
    return jnp.dtype("float32") if run.cfg.ref_sync_steps else run.compute.dtype


# ---- Records -------------------------------------------------------------------------------------


def record_of(run: Run, progress: Progress) -> dict[str, Any]:
    """What a checkpoint keeps beside its arrays, in JSON values."""
    evals = [[step, accuracy] for step, accuracy in progress.evals.items()]
    more = {"made_with": made_with(run), "versions": versions()}
    return dataclasses.asdict(progress) | {"evals": evals} | more


def made_with(run: Run) -> dict[str, str]:
    """All that the results follow from, but for the code: a resumed run has to have the same."""
    cfg = run.cfg
    values = {
        field.name.upper(): settings.to_text(getattr(cfg, field.name))
        for field in dataclasses.fields(cfg)
        if field.name not in FREE
    }
    values["REWARD_FN"] = ",".join(Path(entry).name for entry in cfg.reward_fn.split(","))
    scheduled = cfg.lr_schedule != "constant" or cfg.warmup_ratio > 0
    values["LR_DECAY_STEPS (else STEPS)"] = str((cfg.lr_decay_steps or cfg.steps) * scheduled)
    values["prompts per step"] = str(run.sizes.prompts_per_step)
    values["DTYPE"] = str(run.compute.dtype)
    values["the stop tokens"] = str(run.stop_ids)
    return values | run.digests


def stop_if_another(run: Run, record: dict[str, Any]) -> None:
    """Raises ValueError naming the settings that have changed, unless RESUME_FORCE=1."""
    before, now, step = record["made_with"], made_with(run), record["step"]
    changed = [
        f"{name} was {before.get(name, 'not there')} and is {now.get(name, 'not there')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if not changed:
        return
    text = f"the run after step {step} was another: {'; '.join(changed[:5])}"
    if not run.cfg.resume_force:
        raise ValueError(
            f"{text}; set it back, or RESUME_FORCE=1 to go on, or RESUME=never to begin anew"
        )
    print(f"RESUME_FORCE=1: {text}", flush=True)


def arrays_of(run: Run, record: dict[str, Any]) -> dict[str, Any]:
    """The shapes, dtypes and shardings of a checkpoint's arrays, if it is of this run.

    Raises ValueError for another one, and for one whose arrays this run has no use for.
    """
    if run.cfg.steps < record["step"]:
        raise ValueError(
            f"STEPS={run.cfg.steps}, and the checkpoint is after step {record['step']}; raise it"
        )
    stop_if_another(run, record)
    config, mesh = run.compute.config, run.compute.layout.mesh
    arrays: dict[str, Any] = {"state": abstract_state(config, mesh, run.optimizer)}
    if run.cfg.beta > 0:
        arrays["ref_params"] = abstract_params(config, mesh, reference_dtype(run))
    wanted = Checkpoints.shapes(arrays)
    if missing := [text for text in wanted if text not in record["arrays"]]:
        raise ValueError(
            f"the checkpoint of step {record['step']} has no array {missing[0]}: with other "
            f"settings of the model, the optimizer or BETA a run cannot go on from it"
        )
    if extra := [text for text in record["arrays"] if text not in wanted]:
        raise ValueError(
            f"the checkpoint of step {record['step']} has {extra[0]}, unused by this run"
        )
    if (before := record["versions"]) != versions():
        old = [
            f"{name}={before.get(name)}" for name, v in versions().items() if before.get(name) != v
        ]
        print(f"the checkpoint was made with {' '.join(old)}", flush=True)
    return arrays
