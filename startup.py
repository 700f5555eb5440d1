"""Everything before the first step, and the export after the last one: reads and checks the inputs,
decides how the model is computed, loads or resumes the training state, and writes the model.

The checks that cost little come first. A user's mistakes are a UserMistake with a line for each.
`python startup.py` only joins the processes and prints the devices and versions they see.
"""

import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import config
import data
import rewards
from config import Config
from loss import Objective
from loss_pallas import Kernel, block_sizes
from metrics import drift_level
from models import hf, placement
from models.draw import Sampling
from models.model import Compute, Params
from review import Reviewer
from rollout import Backend, Inputs, NaiveBackend, Run
from runtime import processes, resume
from runtime.checkpoint import Checkpoints
from runtime.chips import program
from runtime.layout import mesh_text
from runtime.lifecycle import Lifecycle
from runtime.mistakes import Unwritable, UserMistake, fail
from runtime.parsing import REPO, to_text
from runtime.processes import StopSignal
from runtime.records import RUNNING
from runtime.run_log import RunLog, replace_file, stop_if_not_writable
from runtime.sizes import derive, most_checkpoints, prompt_width
from runtime.wandb_run import check_wandb, chosen_mode
from sampling import Stopping
from update import Optimizer, TrainState, abstract_state, init_state


def start(cfg: Config) -> tuple[Run, Lifecycle, Backend, TrainState, Params | None] | None:
    """The run, its life-cycle, what samples, the training state and the reference of BETA.

    None if OUTPUT_DIR holds this run and all is done. Ends the program for a user's mistake.
    """
    began = time.perf_counter()
    stop, backend = StopSignal(), None
    try:
        processes.start_jax(cfg)
        run = set_up(cfg)
        name = f"runs/{cfg.wandb_name or Path(cfg.model_path).name}"
        out = resume.output_folder(cfg.output_dir, name)
        checkpoints, reachable = resume.open_checkpoints(cfg, out)
        beginning = resume.Beginning(cfg, checkpoints, out, reachable, run.made_with, asked_of(run))
        if not beginning.missing:
            print(
                f"OUTPUT_DIR={out}: all STEPS={cfg.steps} are done; what can follow are a larger "
                f"STEPS, another EXPORT_HF and EVAL_FULL_SWEEP=1"
            )
            print(f"DONE: steps={cfg.steps} elapsed_sec={time.perf_counter() - began:.3f}")
            return None
        backend = make_backend(run)
        with program("what holds the weights and the optimizer's state"):
            wanted = {"state": abstract_state(run.model, run.training.layout.mesh, run.optimizer)}
            arrays, progress = beginning.restore(wanted)
            state = arrays["state"] if arrays else begin_state(run)
            ref_params = load_reference(run) if cfg.beta > 0 else None
            jax.block_until_ready((state, ref_params))
        kept = resume.evaluations_done(progress, beginning.done)
        if "eval" in kept:
            progress.evals.setdefault(progress.step, math.nan)  # known to the log alone
        saves = reachable and cfg.save_every_steps > 0
        if saves and progress.step and checkpoints.newest < 0:  # a fork
            record = resume.record_of(progress, run.made_with)
            checkpoints.save(progress.step, arrays, record, progress.evals)
            checkpoints.wait()
        with processes.told_by_all():
            resume.write_run(out, progress, run.made_with, beginning.done, checkpoints.newest)
        log = open_log(run, out, progress, kept)
        if saves and cfg.steps and checkpoints.local:
            log.line(checkpoint_space(cfg, checkpoints, state))
        stop.watch(cfg.preemption_grace_s)
        reviewer = Reviewer(out, log, jax.process_index() == 0)
        reviewer.write(RUNNING)
    except (UserMistake, Unwritable) as error:
        if backend:
            backend.close()
        fail(error)
    life = Lifecycle(
        cfg=cfg,
        out=out,
        log=log,
        stop=stop,
        checkpoints=checkpoints,
        progress=progress,
        made_with=run.made_with,
        missing=beginning.missing,
        done=beginning.done,
        reviewer=reviewer,
        saves=saves,
        began=began,
    )
    return run, life, backend, state, ref_params


def set_up(cfg: Config, example: dict[str, str] | None = None) -> Run:
    """Reads and checks all inputs, on all processes. Raises UserMistake for a user's mistake.

    example: the only question to evaluate, instead of the eval split.
    """
    with processes.told_by_all():
        if cfg.rollout_backend == "sglang_jax":
            from rollout_sglang import import_engine

            import_engine(jax.devices())
        if jax.process_index() == 0:  # it alone writes
            check_wandb(cfg.wandb_mode)
            if cfg.export_hf not in ("", "none"):
                stop_if_not_writable(f"EXPORT_HF={cfg.export_hf}", Path(cfg.export_hf))
        inputs = read_inputs(cfg, example)
    digests = digests_of(inputs)
    processes.stop_if_different(facts_of(cfg, inputs, digests))

    prompts = inputs.train_prompts + inputs.eval_prompts
    longest = max((len(prompt.ids) for prompt in prompts), default=1)
    placement.stop_if_too_long(cfg.max_length_sample, inputs.model, longest)
    S = prompt_width(longest, cfg.global_length) - 1
    training, rollout, reason = placement.how_to_compute(
        cfg, inputs.model, inputs.sizes, S, jax.devices()
    )
    device_kind = jax.devices()[0].device_kind
    kernel = logps_kernel(cfg.policy_loss_impl, inputs.model.hidden_size, device_kind)
    training = training._replace(logps_kernel=kernel)
    stop_ids = hf.stop_ids(inputs.folder, inputs.tokenizer, inputs.model.vocab_size)
    run = Run(
        **vars(inputs),
        sampling=sampling_of(cfg),
        eval_sampling=eval_sampling_of(cfg),
        stopping=Stopping(cfg.max_length_sample, stop_ids, pad_id=stop_ids[0]),
        objective=objective_of(cfg),
        optimizer=optimizer_of(cfg),
        training=training,
        rollout=rollout,
        limits=placement.limits_of(cfg, inputs.sizes, training, jax.process_count(), S),
        made_with=made_with(inputs, training, stop_ids) | digests,
    )
    print(
        f"model={inputs.folder} parameters={placement.num_params(inputs.model) / 1e6:.2f}M "
        f"dtype={training.dtype} train={len(inputs.train_prompts)} "
        f"test={len(inputs.eval_prompts)} prompts "
        f"rewards={cfg.reward_fn or ','.join(f.__name__ for f in inputs.functions)}\n"
        f"mesh dp,fsdp,tp train={mesh_text(training.layout.mesh)} ({cfg.mesh_shape}) "
        f"rollout={placement.rollout_mesh(cfg, rollout)} ({cfg.rollout_mesh_shape}{reason})\n"
        f"{cfg.rollout_lines()}"
        f"loss.loss_type={cfg.loss_type} loss.adv_estimator={cfg.adv_estimator} "
        f"train.policy_loss_impl={cfg.policy_loss_impl} "
        f"train.attention_impl={training.attention_impl}",
        flush=True,
    )
    return run


def make_backend(run: Run) -> Backend:
    """The backend that ROLLOUT_BACKEND names. Raises UserMistake if it cannot compute the run."""
    if run.cfg.rollout_backend == "naive":
        return NaiveBackend(run.rollout, run.stopping, run.cfg.drops_ended())
    from rollout_sglang import SglangBackend  # its packages are needed only here

    return SglangBackend(run)


def objective_of(cfg: Config) -> Objective:
    """The settings of policy_loss; all but one have the same names in Objective as in Config."""
    same_names = [name for name in Objective._fields if name != "max_completion_length"]
    settings = {name: getattr(cfg, name) for name in same_names}
    return Objective(**settings, max_completion_length=cfg.max_length_sample)


def sampling_of(cfg: Config) -> Sampling:
    return Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, replay=cfg.replays())


def eval_sampling_of(cfg: Config) -> Sampling:
    """How evaluations sample; greedy decoding has temperature 0 and no filters."""
    temperature = cfg.eval_temperature or (cfg.temperature if cfg.eval_samples > 1 else 0.0)
    if temperature == 0:
        return Sampling(temperature=0.0)
    return sampling_of(cfg)._replace(temperature=temperature, replay=False)


def optimizer_of(cfg: Config) -> Optimizer:
    return Optimizer(name=cfg.optimizer, weight_decay=cfg.weight_decay, clip_norm=cfg.clip_norm)


def logps_kernel(policy_loss_impl: str, D: int, device_kind: str) -> Kernel | None:
    """The kernel of POLICY_LOSS_IMPL=pallas, or None for jax.

    Raises UserMistake if hidden states of width D are too wide for the kernel.
    """
    if policy_loss_impl == "jax":
        return None
    try:
        block_sizes(D, 2, device_kind)
    except ValueError as error:  # loss_pallas.py knows no UserMistake
        raise UserMistake(str(error)) from None
    return Kernel(device_kind)


def what_ran(run: Run) -> dict[str, str]:
    """What this machine has made of the settings that leave a choice, as config.yaml names it."""
    chosen = ("attention_impl", "layer_loop", "dtype")
    level = drift_level(run)
    return ({"derived.drift_level": to_text(level)} if level < math.inf else {}) | {
        "derived.reward_weights": to_text(run.weights),
        "derived.policy_loss_impl": run.cfg.policy_loss_impl,
        **{f"derived.{name}": str(getattr(run.training, name)) for name in chosen},
        "derived.mesh_shape": mesh_text(run.training.layout.mesh),
        "derived.rollout_mesh_shape": placement.rollout_mesh(run.cfg, run.rollout),
        "derived.commit": processes.commit_of(REPO),
        "derived.device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def wandb_arguments(run: Run, out: Path, progress: resume.Progress) -> dict[str, Any] | None:
    """The arguments of wandb.init, or None for a run that is not logged there."""
    cfg = run.cfg
    if (mode := chosen_mode(cfg.wandb_mode)) == "disabled":
        return None
    derived = {f"derived.{name}": value for name, value in run.sizes._asdict().items()}
    values = dataclasses.asdict(cfg) | derived | what_ran(run)
    if progress.forked_from:
        values["forked_from"] = progress.forked_from
    wandb = {"mode": mode, "config": values, "project": cfg.wandb_project or "grpo"}
    return wandb | {"id": progress.run_id, "name": cfg.wandb_name or out.resolve().name}


def open_log(run: Run, out: Path, progress: resume.Progress, kept: Sequence[str] = ()) -> RunLog:
    """The run's log in its folder, with config.yaml; it drops records after the checkpoint.

    kept: the evaluations after the newest step that are not made again.
    """
    cfg, writes = run.cfg, jax.process_index() == 0
    wandb = wandb_arguments(run, out, progress) if writes else None
    resumed = {"first_step": progress.step, "kept": kept}
    with processes.told_by_all():
        try:
            log = RunLog(out, steps=cfg.steps, writes=writes, wandb=wandb, **resumed)
            if writes:
                text = config.describe(cfg, jax.process_count(), jax.local_device_count())
                text += "".join(f"\n{name}: {value}" for name, value in what_ran(run).items())
                replace_file(out / "config.yaml", text + "\n")
                log.line(f"output={out}")
        except OSError as error:
            raise UserMistake(f"OUTPUT_DIR={out} cannot be written: {error.strerror}") from None
    return log


def checkpoint_space(cfg: Config, checkpoints: Checkpoints, state: TrainState) -> str:
    """A line with the size of the checkpoints that the run will write, and the space for them."""
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    count = most_checkpoints(cfg.steps, cfg.save_every_steps, cfg.save_keep)
    count = max(count - len(checkpoints.steps()), 0)
    free = shutil.disk_usage(checkpoints.folder).free
    text = f"disk: {count} x {size / 1e9:.3g} GB of checkpoints, {free / 1e9:.3g} GB free"
    if count * size <= free:
        return text
    return f"{text}: too little; lower SAVE_KEEP, raise SAVE_EVERY_STEPS, or set CHECKPOINT_DIR"


def asked_of(run: Run) -> dict[str, str]:
    """What the settings ask of a run after its last step, by name, as RUN notes what is done."""
    cfg, asked = run.cfg, {"steps": "training"}
    if cfg.eval_every_steps:
        asked["eval"] = f"eval of {cfg.eval_split}"
    if cfg.eval_full_sweep:
        asked["sweep"] = f"eval_full of {cfg.eval_split}"
    if folder := export_folder(cfg, Path()):
        asked["export"] = f"export to {folder} in {run.training.dtype}"
    return asked


def export_folder(cfg: Config, out: Path) -> Path | None:
    """The folder of the trained model's export; None if the run exports nothing."""
    return None if cfg.export_hf == "none" else Path(cfg.export_hf or out / "hf")


def export(run: Run, out: Path, params: Params) -> None:
    """Writes the trained model as a Hugging Face folder. Raises Unwritable."""
    folder = export_folder(run.cfg, out)
    if folder is None:
        return
    try:
        hf.save_model(
            folder,
            params,
            run.model,
            run.folder,
            dtype=run.training.dtype,
            writes=jax.process_index() == 0,
            chat_template=run.cfg.chat_template,
        )
    except OSError as error:
        raise Unwritable(f"EXPORT_HF={folder} cannot be written: {error}") from None


# ---- Inputs --------------------------------------------------------------------------------------


def read_inputs(cfg: Config, example: dict[str, str] | None) -> Inputs:
    """Reads all inputs, first what takes little time. Raises UserMistake.

    example: the only question of the eval split; None: all of the dataset.
    """
    processes.stop_if_not_so_many(cfg.require_multihost, cfg.require_jax_process_count)
    sizes = derive(cfg, jax.process_count(), jax.local_device_count())
    print(sizes.line(), flush=True)
    cache = cfg.overlong_cache or cfg.max_length_sample // 5
    penalties = rewards.penalties(cfg.max_length_sample, cache)
    functions = rewards.load_reward_functions(cfg.reward_fn, cfg.reward_timeout_s, penalties)
    weights = rewards.weights_of(cfg.reward_weights, cfg.reward_fn)
    system_prompt = data.text_of(cfg.system_prompt) or rewards.SYSTEM_PROMPT

    splits = [cfg.train_split] * (cfg.steps > 0) + [cfg.eval_split] * cfg.evaluates()
    if example:
        examples = {cfg.eval_split: [example]}
    else:
        examples = {split: examples_of(cfg, split) for split in splits}
    folder = hf.fetch_model(cfg.model_path, cfg.model_revision)
    hf.stop_if_overwritten(cfg.export_hf, cfg.output_dir, folder)
    model, tokenizer = hf.read_model(folder, cfg.chat_template)
    prompts = {
        split: data.fit_prompts(
            data.build_prompts(found, tokenizer, system_prompt), cfg.max_prompt_length, split
        )
        for split, found in examples.items()
    }
    return Inputs(
        cfg=cfg,
        sizes=sizes,
        functions=functions,
        weights=weights,
        folder=folder,
        model=model,
        tokenizer=tokenizer,
        train_prompts=prompts[cfg.train_split] if cfg.steps else [],
        eval_prompts=prompts[cfg.eval_split] if cfg.evaluates() else [],
    )


def examples_of(cfg: Config, split: str) -> list[dict[str, Any]]:
    """The examples of a split of DATASET. Raises UserMistake."""
    columns = cfg.question_column, cfg.answer_column
    return data.load_examples(cfg.dataset, cfg.dataset_config, split, *columns)


# ---- What processes and resumed runs compare -----------------------------------------------------


def facts_of(cfg: Config, inputs: Inputs, digests: dict[str, str]) -> dict[str, str]:
    """The settings, code, versions and files that have to be the same on every process.

    digests: of all files and data that the results follow from.
    """
    facts = {
        field.name.upper(): str(getattr(cfg, field.name)).replace(str(REPO), "{repo}")
        for field in dataclasses.fields(cfg)
        if not field.metadata["per_process"]
    }
    files = [*inputs.folder.glob("*.json"), *inputs.folder.glob("*.safetensors")]
    listing = sorted((file.name, file.stat().st_size) for file in files)
    content = json.dumps([digests, inputs.eval_prompts], default=str)
    facts |= {
        "our code": processes.code_digest(REPO),
        "the list of the model's files": processes.digest(json.dumps(listing).encode()),
        "the content of config.json, tokenizer.json, the prompts and the files of REWARD_FN": (
            processes.digest(content.encode())
        ),
    }
    versions = processes.versions().items()
    return facts | {f"the version of {name}": version for name, version in versions}


def digests_of(inputs: Inputs) -> dict[str, str]:
    """Digests of all files and data that the results follow from."""
    digests = {
        f"the model's {name}": processes.digest((inputs.folder / name).read_bytes())
        for name in ("config.json", "tokenizer.json")
    }
    prompts = json.dumps(inputs.train_prompts, default=str)
    digests["the tokenized prompts"] = processes.digest(prompts.encode())
    if inputs.cfg.beta > 0:  # every start reads the reference from the model's folder
        weights = sorted(inputs.folder.glob("*.safetensors"))
        digests["the model's weights"] = processes.digest_of_ends(weights)
    entries = rewards.entries_of(inputs.cfg.reward_fn)
    for file in {entry.rpartition(":")[0] for entry in entries if ":" in entry}:
        content = Path(file).read_bytes()
        digests[f"the file of REWARD_FN {Path(file).name}"] = processes.digest(content)
    return digests


def made_with(inputs: Inputs, training: Compute, stop_ids: tuple[int, ...]) -> dict[str, str]:
    """The settings and sizes that the results follow from; a resumed run must have the same."""
    cfg, entries = inputs.cfg, rewards.entries_of(inputs.cfg.reward_fn)
    values = {
        field.name.upper(): to_text(getattr(cfg, field.name))
        for field in dataclasses.fields(cfg)
        if field.metadata["kept"]
    }
    values["REWARD_WEIGHTS"] = to_text(inputs.weights)
    values["REWARD_FN"] = ",".join(Path(entry).name for entry in entries)
    scheduled = cfg.lr_schedule != "constant" or cfg.warmup_ratio > 0
    values[resume.SCHEDULE_END] = str((cfg.lr_decay_steps or cfg.steps) * scheduled)
    values["prompts per step"] = str(inputs.sizes.prompts_per_step)
    values["DTYPE"] = str(training.dtype)
    values["the stop tokens"] = str(stop_ids)
    return values


# ---- The training state --------------------------------------------------------------------------


def begin_state(run: Run) -> TrainState:
    """The training state of a run that begins with the model."""
    model, mesh = run.training.model, run.training.layout.mesh
    params = hf.load_params(run.folder, model, mesh, jnp.float32)
    return init_state(params, optimizer=run.optimizer, model=model)


def load_reference(run: Run) -> Params:
    """The reference of BETA: the weights of MODEL_PATH, in the dtype of the computation."""
    training = run.training
    return hf.load_params(run.folder, training.model, training.layout.mesh, training.dtype)


if __name__ == "__main__":
    with processes.ending_together():
        try:
            command = config.load(sys.argv[1:])
            if command.slice_name or command.eval_only or command.question:
                raise UserMistake("--plan, --eval-only and --ask are only for train_grpo.py")
            processes.start_jax(command.cfg)
        except UserMistake as error:
            fail(error)
        versions = processes.versions().items()
        print("versions", *(f"{name}={version}" for name, version in versions))
