"""Everything before the first step, and the export after the last one: reads and checks the inputs,
decides how the model is computed, loads or resumes the training state, and writes the model.

The checks that cost little come first. A user's mistakes are a UserMistake with a line for each.
`python startup.py` only joins the processes and prints the devices and versions they see.
"""

import ast
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import config
import data
import rewards
from config import Config
from infra import checkpoint, hosts
from infra.chips import attribute_oom_to, has_bfloat16
from infra.lifecycle import Lifecycle
from infra.log import (
    RUNNING,
    RunLog,
    choose_wandb_mode,
    raise_if_not_writable,
    raise_if_wandb_unusable,
    replace_file,
)
from infra.mistakes import Unwritable, UserMistake, exit_with_mistakes, side_file
from infra.reward_worker import RewardWorker, get_worker
from infra.settings import GYM_PREFIX, REPO, to_text
from infra.sizes import Sizes, derive_sizes, prompt_width
from loss import Objective
from metrics import DRIFT_LEVELS
from model import hf, lora, placement
from model.layout import mesh_text
from model.network import Compute
from model.next_token import Sampling
from model.params import ModelConfig, Params, combine_params
from model.placement import attention_flops, layer_matrix_size
from model.splash import LANES, MAX_ROW_TOKENS
from rollout import Rollout
from rows import Limits
from sampling import Backend, NaiveBackend, Stopping
from update import Learner, Optimizer, TrainState, abstract_state, init_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from extras.report import Reviewer
    from extras.turns import Environments


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run reads, checks and chooses before its first step; it does not change."""

    cfg: Config
    sizes: Sizes
    folder: Path  # of the model; with LoRA of the base
    adapters: Path | None  # the folder of the adapters that training begins with; None: new ones
    train_prompts: list[data.Prompt]
    eval_prompts: list[data.Prompt]  # empty for a run that never evaluates
    rollout: Rollout
    learner: Learner
    mesh_reason: str  # why ROLLOUT_MESH_SHAPE=auto is what it is


def start(cfg: Config) -> tuple[Run, Lifecycle, Backend, TrainState, Params | None]:
    """The run, its life-cycle, what samples, the training state and the reference of BETA.

    Ends the program for a user's mistake.
    """
    began = time.perf_counter()
    backend = None
    try:
        hosts.start_jax(cfg.jax_compilation_cache_dir, cfg.init_timeout_s)
        run = set_up(cfg)
        name = f"runs/{cfg.wandb_name or Path(cfg.model_path).name}"
        out = checkpoint.output_folder(cfg.output_dir, name)
        checkpoints = checkpoint.open_checkpoints(
            out, cfg.checkpoint_dir, cfg.save_keep, cfg.save_every_steps
        )
        backend = make_backend(run)
        with attribute_oom_to("what holds the weights and the optimizer's state"):
            model, optimizer = run.learner.compute.model, run.learner.optimizer
            wanted = {"state": abstract_state(model, run.learner.compute.layout.mesh, optimizer)}
            arrays, progress = checkpoint.begin_or_resume(
                out,
                checkpoints,
                result_fingerprint(run),
                wanted,
                resume=cfg.resume,
                steps=cfg.steps,
            )
            base = read_base(run.folder, run.learner.compute)
            run = dataclasses.replace(run, learner=dataclasses.replace(run.learner, base=base))
            if arrays:
                state = arrays["state"]
            else:
                params = first_params(run, jnp.float32)
                state = init_state(params, optimizer=optimizer, model=model)
            ref_params = None
            if cfg.beta > 0:
                ref_params = combine_params(base, first_params(run, run.learner.compute.dtype))
            jax.block_until_ready((base, state, ref_params))
        log = open_log(run, out, progress)
        reviewer = open_reviewer(out, log)
        life = Lifecycle(
            steps=cfg.steps,
            save_every_steps=cfg.save_every_steps,
            eval_every_steps=cfg.eval_every_steps,
            out=out,
            log=log,
            checkpoints=checkpoints,
            progress=progress,
            reviewer=reviewer,
            began=began,
        )
        life.claim_folder({"state": state})
        run.rollout.stop.watch(cfg.preemption_grace_s)
        if reviewer:
            reviewer.write(RUNNING)
    except (UserMistake, Unwritable) as error:
        if backend:
            backend.close()
        exit_with_mistakes(error)
    return run, life, backend, state, ref_params


def read_base(folder: Path, compute: Compute) -> Params | None:
    """LoRA's base, in the dtype of the matmuls and arranged as `forward` needs it, so that no
    program copies it; None without LoRA. Raises UserMistake."""
    if not compute.model.lora:
        return None
    mesh = compute.layout.mesh
    return hf.load_params(folder, compute.model, mesh, compute.dtype, compute.layer_loop)


def first_params(run: Run, dtype: Any) -> Params:
    """The trained weights before the first step; adapters are always float32. Raises
    UserMistake."""
    model, mesh = run.learner.compute.model, run.learner.compute.layout.mesh
    if model.lora:
        return lora.initial_adapters(run.adapters, model, mesh, run.cfg.seed)
    return hf.load_params(run.folder, model, mesh, dtype)


def set_up(cfg: Config, example: dict[str, str] | None = None) -> Run:
    """Reads and checks all inputs and decides how to compute, on all processes alike. Raises
    UserMistake for a user's mistake.

    example: the only question to evaluate, instead of the eval split.
    """
    with hosts.raising_on_all_processes():
        run = make_run(cfg, example)
        facts = process_fingerprint(run)
    hosts.raise_if_processes_differ(facts)
    training, rollout = run.learner.compute, run.rollout.compute
    print(
        f"model={run.folder} parameters={placement.num_params(training.model) / 1e6:.2f}M "
        f"dtype={training.dtype} train={len(run.train_prompts)} "
        f"test={len(run.eval_prompts)} prompts "
        f"rewards={','.join(f.__name__ for f in run.rollout.functions)}\n"
        f"{dtype_note(cfg.dtype)}"
        f"mesh dp,fsdp,tp train={mesh_text(training.layout.mesh)} ({cfg.mesh_shape}) "
        f"rollout={placement.rollout_mesh_text(cfg, rollout)} "
        f"({cfg.rollout_mesh_shape}{run.mesh_reason})\n"
        f"{lora_line(training.model, rollout)}rollout.backend: {cfg.rollout_backend}\n"
        f"loss.loss_type={cfg.loss_type} loss.adv_estimator={cfg.adv_estimator} "
        f"train.policy_loss_impl={cfg.policy_loss_impl} "
        f"train.attention_impl={training.attention_impl}",
        flush=True,
    )
    return run


def dtype_note(dtype: str) -> str:
    """A line if the device is no CPU and DTYPE=auto does not mean bfloat16 on it."""
    device = jax.devices()[0]
    if dtype != "auto" or device.platform == "cpu" or has_bfloat16(device):
        return ""
    return f"note: {device.device_kind} has no bfloat16, so that DTYPE=auto is float32\n"


def lora_line(model: ModelConfig, rollout: Compute) -> str:
    """A line that says which adapters are trained, and whether their base is in memory once, or how
    much memory the rollout's copy of it takes."""
    if model.lora is None:
        return ""
    rank, alpha, targets = model.lora
    base_params = placement.num_params(dataclasses.replace(model, lora=None))
    adapter_params = placement.num_params(model) - base_params
    mesh = rollout.layout.mesh
    gib = base_params * rollout.dtype.itemsize / mesh.shape["fsdp"] / mesh.shape["tp"] / 2**30
    copied = f"copied ({gib:.2f} GiB on each device)"
    return (
        f"lora rank={rank} alpha={alpha:g} targets={','.join(targets)} "
        f"trained={adapter_params / 1e6:.2f}M base={'shared' if rollout.shares_base else copied}\n"
    )


def make_run(cfg: Config, example: dict[str, str] | None) -> Run:
    """The run as this process sees it. The checks that cost little come first. Raises UserMistake.

    example: see set_up.
    """
    if cfg.rollout_backend == "sglang_jax":
        open_sglang().import_engine(jax.devices())
    if jax.process_index() == 0:  # it alone writes
        raise_if_wandb_unusable(cfg.wandb_mode)
        if cfg.export_hf not in ("", "none"):
            raise_if_not_writable(f"EXPORT_HF={cfg.export_hf}", Path(cfg.export_hf))
    hosts.raise_if_process_count_differs(cfg.require_multihost, cfg.require_jax_process_count)
    sizes = derive_sizes(cfg, jax.process_count(), jax.local_device_count())
    print(sizes.to_line(), flush=True)
    workers: dict[str, RewardWorker] = {}
    data.raise_if_gym_is_missing(cfg.dataset)
    functions = []
    if cfg.reward_fns() or not cfg.environment_class:  # else the environments alone give rewards
        cache = cfg.overlong_cache or cfg.max_length_sample // 5
        functions = rewards.load_reward_functions(
            cfg.reward_fns(), cfg.reward_timeout_s, cfg.max_length_sample, cache, workers
        )
    asked = "answer" if cfg.dataset.startswith(GYM_PREFIX) else "number"  # a task's may be any text
    default = rewards.SYSTEM_PROMPT.replace("number", asked)
    system_prompt = data.read_system_prompt(cfg.system_prompt) or default

    folder, adapters, model, tokenizer = open_model(cfg)
    stop_ids = find_stop_ids(folder, tokenizer, model.vocab_size)
    stopping = Stopping(cfg.max_length_sample, stop_ids, pad_id=stop_ids[0])
    environments = None
    if cfg.environment_class:
        environments = open_environments(cfg, workers, tokenizer, stop_ids)
    tools = environments.tools if environments else []
    if not data.has_system_role(tokenizer, tools):
        why = "the chat template has no system role"
        print(f"note: {why}; SYSTEM_PROMPT stands in front of each question", flush=True)
    if environments and environments.has_reward:
        functions.append(environments.get_reward)
    reward_weights = rewards.parse_reward_weights(
        cfg.reward_weights, cfg.reward_fns(), [function.__name__ for function in functions]
    )

    def prompts_of(split: str) -> list[data.Prompt]:
        examples = [example] if example else load_examples(cfg, split)
        prompts = data.build_prompts(examples, tokenizer, system_prompt, tools, model.vocab_size)
        prompts = data.drop_long_prompts(prompts, cfg.max_prompt_length, split)
        if rewards.reward_correct in functions and not example:
            raise_if_no_number(cfg.dataset, split, [prompt.columns["answer"] for prompt in prompts])
        return prompts

    train_prompts = prompts_of(cfg.train_split) if cfg.steps else []
    eval_prompts = prompts_of(cfg.eval_split) if cfg.evaluates() else []
    longest = max((len(prompt.ids) for prompt in train_prompts + eval_prompts), default=1)
    placement.raise_if_too_long(cfg.max_length_sample, model, longest)
    S = prompt_width(longest, cfg.global_length) - 1
    training, sampling, reason = placement.plan_compute(cfg, model, sizes, S, jax.devices())
    rollout = Rollout(
        compute=sampling,
        sampling=sampling_of(cfg),
        eval_sampling=eval_sampling_of(cfg),
        stopping=stopping,
        tokenizer=tokenizer,
        system_prompt=system_prompt,
        functions=functions,
        reward_weights=reward_weights,
        environments=environments,
        max_turns=cfg.turns(),
        min_prompt_width=cfg.global_length,
        max_prompt_width=S + 1,
        stop=hosts.StopSignal(),
    )
    learner = learner_of(cfg, sizes, with_kernel(cfg, training, jax.devices()[0]), S, stopping)
    prompts = train_prompts, eval_prompts
    return Run(cfg, sizes, folder, adapters, *prompts, rollout, learner, reason)


def load_examples(cfg: Config, split: str) -> list[dict[str, Any]]:
    """The examples of a split of DATASET. Raises UserMistake."""
    return data.load_examples(
        cfg.dataset, cfg.dataset_config, split, cfg.question_column, cfg.answer_column
    )


def learner_of(cfg: Config, sizes: Sizes, training: Compute, S: int, stopping: Stopping) -> Learner:
    """The learner of the run. S: padded tokens of the longest prompt without the last one."""
    return Learner(
        compute=training,
        objective=objective_of(cfg),
        optimizer=optimizer_of(cfg),
        temperature=cfg.temperature,
        limits=limits_of(cfg, sizes, training, jax.process_count(), S),
        pad_id=stopping.pad_id,
        accumulates=sizes.grad_accum_steps > 1,
        skips_zero_advantages=cfg.skips(),
    )


def drift_level(cfg: Config, training: Compute, rollout: Compute) -> float:
    """The level of DRIFT_LEVELS for the dtypes of a run; infinite where the difference also has
    another cause: the log-probabilities of `naive` are those of the filtered distribution."""
    if cfg.filters_logps():
        return math.inf
    return max(DRIFT_LEVELS[str(compute.dtype)] for compute in (training, rollout))


def limits_of(cfg: Config, sizes: Sizes, training: Compute, processes: int, S: int) -> Limits:
    """The limits of packed rows. S: padded tokens of the longest prompt without the last one."""
    model, X = training.model, training.layout.batch_shards
    matmuls = 2 * model.num_layers * layer_matrix_size(model)  # FLOPs of a token
    return Limits(
        shards=X,
        sequences=sizes.micro_batch_size * processes // X,
        completions=cfg.num_pre_q,
        max_length_sample=cfg.max_length_sample,
        longest_prompt=S,
        shortest_prompt=cfg.global_length,
        pack=cfg.packs(),
        unit=LANES if training.attention_impl == "splash" else 1,
        row_tokens=MAX_ROW_TOKENS if training.attention_impl == "splash" else sys.maxsize,
        matmul_keys=matmuls / attention_flops(model, 1),
    )


def raise_if_no_number(dataset: str, split: str, answers: list[str]) -> None:
    """Prints how many right answers of a split have no number for reward_correct. Raises
    UserMistake if none of them has one."""
    without = [answer for answer in answers if rewards.reference_number(answer) is None]
    if len(without) == len(answers):
        raise UserMistake(
            f"DATASET={dataset}: none of the {len(answers)} {split} answers, such as "
            f"{without[0]!r:.80}, has a number for reward_correct; set ANSWER_COLUMN to a column "
            f"with numbers, or REWARD_FN=my.py:score"
        )
    if without:
        share = f"{len(without)} of {len(answers)} {split} answers"
        why = f"have no number, such as {without[0]!r:.80}: reward_correct leaves them out"
        print(f"note: {share} {why}", flush=True)


def open_model(cfg: Config) -> tuple[Path, Path | None, ModelConfig, Any]:
    """The folder of the model, that of its adapters if MODEL_PATH names some, and what they say of
    the model and its tokenizer, before any weight is read. Raises UserMistake."""
    folder, adapters = lora.fetch_base(cfg.model_path, cfg.model_revision)
    for each in (folder, adapters or folder):
        hf.raise_if_overwriting(cfg.export_hf, cfg.output_dir, each)
    model, tokenizer = hf.read_model(folder, chat_template_file(cfg, adapters))
    model = dataclasses.replace(model, lora=lora.read_lora(cfg, model, adapters))
    return folder, adapters, model, tokenizer


def chat_template_file(cfg: Config, adapters: Path | None) -> str:
    """The file of the chat template, which an export of adapters may have, too; "": the tokenizer
    has the template."""
    exported = adapters and adapters / "chat_template.jinja"
    return cfg.chat_template or (str(exported) if exported and exported.is_file() else "")


def find_stop_ids(folder: Path, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Every token id that ends a completion, sorted: those that the folder names, and the one with
    which the chat template ends an answer. Raises UserMistake."""
    named, end = hf.read_stop_ids(folder, tokenizer, vocab_size), data.end_of_turn_id(tokenizer)
    if end is not None and end < vocab_size and end not in named:
        why = "the chat template ends an answer with it, though the model's files do not name it"
        print(f"note: {tokenizer.decode([end])} is a stop token: {why}", flush=True)
        return tuple(sorted((*named, end)))
    return named


# ---- Doors: each side-file is imported here alone ------------------------------------------------


def open_environments(
    cfg: Config,
    workers: dict[str, RewardWorker],
    tokenizer: "PreTrainedTokenizerBase",
    stop_ids: Sequence[int],
) -> "Environments":
    """The environments of ENVIRONMENT_CLASS. Raises UserMistake.

    workers: as for rewards.load_reward_functions.
    """
    source = cfg.environment_class
    with side_file("extras/turns.py", f"ENVIRONMENT_CLASS={source}"):
        from extras.turns import Environments
    file, _, name = source.rpartition(":")
    if not (file.endswith(".py") and name.isidentifier()):
        raise UserMistake(f"ENVIRONMENT_CLASS={source} is not file.py:Class")
    worker = get_worker("ENVIRONMENT_CLASS", source, cfg.reward_timeout_s, workers)
    environments = Environments(source, worker, tokenizer, stop_ids, cfg.seed)
    if not environments.has_reward and not cfg.reward_fns():
        raise UserMistake(
            f"ENVIRONMENT_CLASS={source} has no get_reward(self); write one, or set REWARD_FN"
        )
    return environments


def make_backend(run: Run) -> Backend:
    """The backend that ROLLOUT_BACKEND names. Raises UserMistake if it cannot compute the run."""
    if run.cfg.rollout_backend == "naive":
        return NaiveBackend(run.rollout.compute, run.rollout.stopping, run.cfg.drops_ended())
    return open_sglang().SglangBackend(run)


def open_sglang() -> ModuleType:
    """The module of ROLLOUT_BACKEND=sglang_jax. Raises UserMistake if its file is missing."""
    with side_file("extras/sglang.py", "ROLLOUT_BACKEND=sglang_jax"):
        import extras.sglang
    return extras.sglang


def with_kernel(cfg: Config, training: Compute, device: jax.Device) -> Compute:
    """The training compute with the kernel of POLICY_LOSS_IMPL=pallas, if it is set. Raises
    UserMistake if the model is too wide for the kernel."""
    if cfg.policy_loss_impl == "jax":
        return training
    with side_file("loss_pallas.py", f"POLICY_LOSS_IMPL={cfg.policy_loss_impl}"):
        from loss_pallas import Kernel, block_sizes
    try:
        block_sizes(training.model.hidden_size, 2, device.device_kind)
    except ValueError as error:  # loss_pallas.py knows no UserMistake
        raise UserMistake(str(error)) from None
    return training._replace(logps_kernel=Kernel(device.device_kind))


def open_reviewer(out: Path, log: RunLog) -> "Reviewer | None":
    """Writes the summary and the report of a run; None, and a line that says so, without
    extras/report.py."""
    try:
        with side_file("extras/report.py", "report.html"):
            from extras.report import Reviewer
    except UserMistake:
        log.print_line("note: without extras/report.py the run has no report and no verdict")
        return None
    return Reviewer(out, log)


# ---- Settings as the modules take them -----------------------------------------------------------


def objective_of(cfg: Config) -> Objective:
    """The settings of policy_loss, which have the same names in Objective as in Config."""
    return Objective(**{name: getattr(cfg, name) for name in Objective._fields})


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


def resolved_choices(run: Run) -> dict[str, str]:
    """What this machine has made of the settings that leave a choice, as config.yaml names it."""
    chosen = ("attention_impl", "layer_loop", "dtype")
    training = run.learner.compute
    level = drift_level(run.cfg, training, run.rollout.compute)
    return ({"derived.drift_level": to_text(level)} if level < math.inf else {}) | {
        "derived.reward_weights": to_text(run.rollout.reward_weights),
        "derived.policy_loss_impl": run.cfg.policy_loss_impl,
        **{f"derived.{name}": str(getattr(training, name)) for name in chosen},
        "derived.mesh_shape": mesh_text(training.layout.mesh),
        "derived.rollout_mesh_shape": placement.rollout_mesh_text(run.cfg, run.rollout.compute),
        "derived.commit": hosts.commit_of(REPO),
        "derived.device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def open_log(run: Run, out: Path, progress: checkpoint.Progress) -> RunLog:
    """The run's log in its folder, with config.yaml; it drops records after the checkpoint."""
    cfg, writes, wandb = run.cfg, jax.process_index() == 0, None
    if writes and (mode := choose_wandb_mode(cfg.wandb_mode)) != "disabled":
        derived = {f"derived.{name}": value for name, value in run.sizes._asdict().items()}
        values = dataclasses.asdict(cfg) | derived | resolved_choices(run)
        if progress.forked_from:
            values["forked_from"] = progress.forked_from
        wandb = {"mode": mode, "config": values, "project": cfg.wandb_project or "grpo"}
        wandb |= {"id": progress.run_id, "name": cfg.wandb_name or out.resolve().name}
    # The evaluations after the newest step that are not made again.
    sweeps = cfg.eval_full_sweep and progress.step == cfg.steps
    kept = ["eval"] * (progress.step in progress.evals) + ["eval_full"] * (not sweeps)
    resumed = {"first_step": progress.step, "kept": kept}
    with hosts.raising_on_all_processes():
        try:
            log = RunLog(out, steps=cfg.steps, writes=writes, wandb=wandb, **resumed)
            if writes:
                text = config.describe(cfg, jax.process_count(), jax.local_device_count())
                text += "".join(
                    f"\n{name}: {value}" for name, value in resolved_choices(run).items()
                )
                replace_file(out / "config.yaml", text + "\n")
                log.print_line(f"output={out}")
        except OSError as error:
            raise UserMistake(f"OUTPUT_DIR={out} cannot be written: {error.strerror}") from None
    return log


def export(run: Run, out: Path, params: Params) -> None:
    """Writes the trained model as a Hugging Face folder, or adapters as one of PEFT. Raises
    Unwritable."""
    if run.cfg.export_hf == "none":
        return
    cfg, folder = run.cfg, Path(run.cfg.export_hf or out / "hf")
    model, dtype = run.learner.compute.model, run.learner.compute.dtype
    is_replaced = chat_template_file(cfg, run.adapters) != ""
    chat_template = run.rollout.tokenizer.chat_template if is_replaced else ""
    try:
        if model.lora and cfg.export_lora == "adapters":
            path, revision = cfg.model_path, cfg.model_revision
            if run.adapters:
                path, revision = lora.read_base_name(run.adapters)
            lora.save_adapters(
                folder, params, model, model.lora, path, revision, chat_template=chat_template
            )
            return
        if model.lora:
            params, _ = lora.merge_adapters(params, model.lora)
        hf.save_model(folder, params, model, run.folder, dtype=dtype, chat_template=chat_template)
    except OSError as error:
        raise Unwritable(f"EXPORT_HF={folder} cannot be written: {error}") from None


# ---- What processes and resumed runs compare -----------------------------------------------------


def result_fingerprint(run: Run) -> dict[str, str]:
    """What the results follow from, but the code: a resumed run must have the same settings, sizes
    and digests of files."""
    cfg, folder = run.cfg, run.folder
    values = {
        field.name.upper(): to_text(getattr(cfg, field.name))
        for field in dataclasses.fields(cfg)
        if field.metadata["kept"]
    }
    entries = rewards.reward_entries(cfg.reward_fns())
    values["REWARD_WEIGHTS"] = to_text(run.rollout.reward_weights)
    values["REWARD_FN"] = ",".join(Path(entry).name for entry in entries)
    scheduled = cfg.lr_schedule != "constant" or cfg.warmup_ratio > 0
    schedule_end = (cfg.lr_decay_steps or cfg.steps) * scheduled
    values["LR_DECAY_STEPS (else STEPS)"] = str(schedule_end)
    values["prompts per step"] = str(run.sizes.prompts_per_step)
    values["DTYPE"] = str(run.learner.compute.dtype)
    values["the stop tokens"] = str(run.rollout.stopping.stop_ids)
    for name in ("config.json", "tokenizer.json"):
        values[f"the model's {name}"] = hosts.short_digest((folder / name).read_bytes())
    values["the tokenized prompts"] = digest_of(run.train_prompts)
    if cfg.beta > 0 or run.learner.compute.model.lora:  # every start reads these weights again
        files = sorted(folder.glob("*.safetensors"))
        if run.adapters:
            files += [run.adapters / lora.CONFIG, run.adapters / hf.ADAPTERS]
        values["the model's weights"] = digest_of([digest_of_file(file) for file in files])
    values["ENVIRONMENT_CLASS"] = Path(cfg.environment_class).name
    if run.rollout.environments:  # their messages are written by it, too
        tools = run.rollout.environments.tools or None
        template = run.rollout.tokenizer.get_chat_template(tools=tools)
        values["the chat template"] = hosts.short_digest(template.encode())
    sources = {"REWARD_FN": entries, "ENVIRONMENT_CLASS": [cfg.environment_class]}
    for setting, named in sources.items():
        mains = [Path(entry.rpartition(":")[0]).resolve() for entry in named if ":" in entry]
        for main in dict.fromkeys(mains):
            for file in imported_files(main):
                name = f"the file of {setting} {os.path.relpath(file, main.parent)}"
                before = f"{values[name]}," if name in values else ""  # of another folder
                values[name] = before + hosts.short_digest(file.read_bytes())
    return values


def imported_files(main: Path) -> list[Path]:
    """A user's file, and the files of its folder that it and these import, but for rewards.py of
    this project."""
    files, known = [main], {main, REPO / "rewards.py"}
    for file in files:  # The list grows.
        try:
            nodes = [*ast.walk(ast.parse(file.read_bytes()))]
        except SyntaxError:  # It may be for another version of Python.
            continue
        for node in (each for each in nodes if isinstance(each, ast.Import | ast.ImportFrom)):
            level, module = getattr(node, "level", 0), getattr(node, "module", None) or ""
            folder = file.parents[level - 1] if level else main.parent
            for alias in node.names:
                name = folder.joinpath(*f"{module}.{alias.name}".strip(".").split("."))
                paths = [path for path in (name, *name.parents) if folder in path.parents]
                candidates = {path.with_suffix(".py") for path in paths}
                candidates |= {path / "__init__.py" for path in paths}
                files += sorted(file for file in candidates - known if file.is_file())
                known |= candidates
    return files


def digest_of_file(file: Path) -> list[Any]:
    """The name, the size, and a digest of the first and the last MiB and of a byte in each of 4096
    places between; to read all would take too long."""
    content = np.memmap(file, mode="r")
    pieces = content[: 2**20], content[:: max(len(content) // 4096, 1)], content[-(2**20) :]
    return [file.name, len(content), hosts.short_digest(b"".join(x.tobytes() for x in pieces))]


def process_fingerprint(run: Run) -> dict[str, str]:
    """What has to be the same on every process, besides what the results follow from: the other
    settings, the code, the versions and the names of the model's files."""
    settings = {
        field.name.upper(): str(getattr(run.cfg, field.name)).replace(str(REPO), "{repo}")
        for field in dataclasses.fields(run.cfg)
        if not field.metadata["per_process"]
    }
    files = [*run.folder.glob("*.json"), *run.folder.glob("*.safetensors")]
    versions = {f"the version of {name}": x for name, x in hosts.package_versions().items()}
    others = {
        "our code": hosts.code_digest(REPO),
        "the list of the model's files": digest_of(
            sorted((file.name, file.stat().st_size) for file in files)
        ),
        "the questions of evaluations": digest_of(run.eval_prompts),
    }
    return settings | result_fingerprint(run) | others | versions


def digest_of(values: Sequence[Any]) -> str:
    """A digest of JSON values, or of what is printed as a text."""
    return hosts.short_digest(json.dumps(values, default=str).encode())


if __name__ == "__main__":
    with hosts.exiting_on_error():
        try:
            cfg, *_ = config.load([])
            hosts.start_jax(cfg.jax_compilation_cache_dir, cfg.init_timeout_s)
        except UserMistake as error:
            exit_with_mistakes(error)
        print("versions", *(f"{name}={x}" for name, x in hosts.package_versions().items()))
