"""What happens before the first step, and the export after the last one. Startup reads and checks
the inputs, chooses how the model is computed, and loads or resumes the training state.

Cheap checks come first. The mistakes of a user end in a UserMistake with a line for each.
`python startup.py` only joins the processes and prints their devices and versions.
"""

import dataclasses
import inspect
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import config
import data
import rewards
from chat import (
    ChatFormat,
    check_chat_format,
    check_messages,
    end_of_turn_id,
    has_system_message,
    read_prefix_messages,
    text_after_answer,
    token_text,
)
from config import Config
from contracts import Backend, Environments
from demonstrations import build_demonstrations
from fingerprint import commit_of, package_versions, process_fingerprint, result_fingerprint
from infra import hosts, resume
from infra.checkpoint import Progress
from infra.chips import attribute_oom_to, has_bfloat16
from infra.lifecycle import Lifecycle
from infra.log import RUNNING, RunLog, raise_if_not_writable, replace_file
from infra.mistakes import Unwritable, UserMistake, exit_with_mistakes, import_optional, writing
from infra.reward_worker import RewardWorker, get_worker
from infra.settings import REPO, to_text
from infra.sizes import Sizes, derive_sizes, prompt_width
from loss import Objective
from metrics import drift_level
from model import hf, lora, placement
from model.layout import mesh_text
from model.linear_attention import CHUNK
from model.network import ComputeConfig
from model.next_token import Sampling
from model.params import ModelConfig, Params, combine_params
from model.splash import LANES
from optimizer import Optimizer, Schedule, TrainState, abstract_state, init_state
from rollout import RolloutConfig
from rows import RowLimits
from run import Run
from sampling import NaiveBackend, Stopping
from update import LearnerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROUNDED_AWAY = 0.5  # a merge that changes a smaller share of the numbers gets a note


def start(cfg: Config) -> tuple[Run, Lifecycle, Backend, TrainState, Params | None]:
    """The run, its lifecycle, the sampler, the training state, and the reference of BETA or None.

    Ends the program after a user's mistake.
    """
    began = time.perf_counter()
    backend = None
    try:
        hosts.start_jax(cfg.jax_compilation_cache_dir, cfg.init_timeout_s)
        run = set_up(cfg)
        name = f"runs/{cfg.wandb_name or Path(cfg.model_path).name}"
        out = resume.output_folder(cfg.output_dir, name)
        checkpoints = resume.open_checkpoints(
            out, cfg.checkpoint_dir, cfg.save_keep, cfg.save_every_steps
        )
        if cfg.max_hours and not checkpoints.shared:
            reason = "ends a start, and there are no checkpoints for the next one"
            raise UserMistake(f"MAX_HOURS={cfg.max_hours:g} {reason}; set CHECKPOINT_DIR")
        backend = make_backend(run)
        reading = time.monotonic()
        with attribute_oom_to("the arrays of the weights and the optimizer state"):
            model, optimizer = run.learner.compute.model, run.learner.optimizer
            wanted = {"state": abstract_state(model, run.learner.compute.layout.mesh, optimizer)}
            arrays, progress = resume.begin_or_resume(
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
        read_s = time.monotonic() - reading
        if run.teacher:  # It is not exported, so its seconds do not count.
            teacher = open_teacher(cfg).load_weights(run.teacher, run.teacher_folder)
            run = dataclasses.replace(run, teacher=teacher)
        log = open_log(run, out, progress)
        lifecycle = Lifecycle(
            steps=cfg.steps,
            eval_every_steps=cfg.eval_every_steps,
            save_every_steps=cfg.save_every_steps,
            out=out,
            log=log,
            checkpoints=checkpoints,
            progress=progress,
            review=open_reviewer(out, log),
            began=began,
            stop_signal=run.rollout.stop_signal,
        )
        if cfg.max_hours and cfg.steps:
            exported = state.params, base if cfg.export_lora == "merged" else None
            itemsize = run.learner.compute.dtype.itemsize
            lifecycle.limit_hours(cfg.max_hours, config.STARTED, read_s, state, exported, itemsize)
        lifecycle.claim_folder({"state": state})
        run.rollout.stop_signal.watch(cfg.preemption_grace_s)
        lifecycle.review(RUNNING, "")
    except (UserMistake, Unwritable) as error:
        if backend:
            backend.close()
        exit_with_mistakes(error)
    return run, lifecycle, backend, state, ref_params


def read_base(folder: Path, compute: ComputeConfig) -> Params | None:
    """LoRA's frozen weights, or None without LoRA. They have the dtype and the arrangement that
    `forward` needs, so that no program copies them. Raises UserMistake."""
    if not compute.model.lora:
        return None
    mesh = compute.layout.mesh
    return hf.load_params(folder, compute.model, mesh, compute.dtype, compute.layer_loop)


def first_params(run: Run, dtype: DTypeLike) -> Params:
    """The trained weights before the first step, in this dtype; adapters are always float32.
    Raises UserMistake."""
    model, mesh = run.learner.compute.model, run.learner.compute.layout.mesh
    if model.lora:
        return lora.initial_adapters(run.adapters, model, mesh, run.cfg.seed)
    return hf.load_params(run.folder, model, mesh, dtype)


# ---- Set up: read and check the inputs -----------------------------------------------------------


def set_up(cfg: Config, example: dict[str, str] | None = None) -> Run:
    """Reads and checks all inputs, and chooses how to compute, alike on all processes. Prints the
    choices. Raises UserMistake.

    example: a single question, which replaces the eval split.
    """
    with hosts.raising_on_all_processes():
        run = with_teacher(make_run(cfg, example))
        fingerprint = process_fingerprint(run)
    hosts.raise_if_processes_differ(fingerprint)
    # Supervised training scores nothing but evaluations.
    scored = [*run.eval_prompts, *(run.train_prompts if cfg.loss_type != "sft" else [])]
    for function in run.rollout.functions if scored else ():
        if function.prepare:
            function.prepare(run.rollout.chat_format, scored)
    if not example:
        note_prompts_without_tags(run)
        # An environment reads all columns: the same text may begin different episodes.
        data.print_repeats(
            run.train_prompts, run.eval_prompts, cfg.dataset, bool(cfg.environment_class)
        )
        if cfg.eval_every_steps and (cfg.steps or not cfg.eval_full_sweep):  # --eval-only takes all
            data.print_uneven_head(run.eval_prompts, cfg.eval_prompts, cfg.eval_split)
    train_compute, rollout_compute = run.learner.compute, run.rollout.compute
    print(
        f"model={run.folder} parameters={placement.num_params(train_compute.model) / 1e6:.2f}M "
        f"dtype={train_compute.dtype} train={len(run.train_prompts)} "
        f"test={len(run.eval_prompts)} prompts "
        f"rewards={','.join(f.name for f in run.rollout.functions)}\n"
        f"{dtype_note(cfg.dtype)}"
        f"mesh dp,fsdp,tp train={mesh_text(train_compute.layout.mesh)} ({cfg.mesh_shape}) "
        f"rollout={placement.rollout_mesh_text(cfg, rollout_compute)} "
        f"({cfg.rollout_mesh_shape}{run.mesh_reason})\n"
        f"{lora_line(train_compute.model, rollout_compute)}"
        f"rollout.backend: {cfg.rollout_backend}\n"
        f"loss.loss_type={cfg.loss_type} loss.adv_estimator={cfg.adv_estimator} "
        f"train.policy_loss_impl={cfg.policy_loss_impl} "
        f"train.attention_impl={train_compute.attention_impl}",
        flush=True,
    )
    return run


def dtype_note(dtype: str) -> str:
    """A line if DTYPE=auto is float32 because an accelerator lacks bfloat16, else an empty text."""
    device = jax.devices()[0]
    if dtype != "auto" or device.platform == "cpu" or has_bfloat16(device):
        return ""
    return f"note: {device.device_kind} has no bfloat16, so DTYPE=auto is float32\n"


def lora_line(model: ModelConfig, rollout_compute: ComputeConfig) -> str:
    """A line about the adapters, and about their base: that the rollout shares it with training, or
    how much memory the rollout's copy takes. Empty without LoRA."""
    if model.lora is None:
        return ""
    rank, alpha, targets, is_int8 = model.lora
    base_params = placement.num_params(dataclasses.replace(model, lora=None))
    adapter_params = placement.num_params(model) - base_params
    mesh, itemsize = rollout_compute.layout.mesh, rollout_compute.dtype.itemsize
    base_bytes = placement.params_bytes(model, itemsize) - adapter_params * itemsize
    gib = base_bytes / mesh.shape["fsdp"] / mesh.shape["tp"] / 2**30
    base = "shared" if rollout_compute.shares_base else f"copied ({gib:.2f} GiB on each device)"
    slow = is_int8 and mesh.devices.flat[0].platform == "cpu"
    note = "note: on a CPU LORA_BASE_DTYPE=int8 saves memory, and steps take longer\n"
    return (
        f"lora rank={rank} alpha={alpha:g} targets={','.join(targets)} "
        f"trained={adapter_params / 1e6:.2f}M base={base}{' int8' * is_int8}\n{note * slow}"
    )


def make_run(cfg: Config, example: dict[str, str] | None) -> Run:
    """The run of this process, with cheap checks first. Raises UserMistake. example: see set_up."""
    if cfg.rollout_backend == "sglang_jax":
        (sglang := open_sglang()).import_engine(sglang.engine_devices())
    if jax.process_index() == 0:  # the only process that writes
        check_outputs(cfg)
    hosts.raise_if_process_count_differs(cfg.require_multihost, cfg.require_jax_process_count)
    sizes = derive_sizes(cfg, jax.process_count(), jax.local_device_count())
    print(sizes.to_line(), flush=True)
    workers: dict[str, RewardWorker] = {}
    functions = []
    # Otherwise environments give the rewards, or supervised training needs none.
    if cfg.reward_fn or not (cfg.environment_class or cfg.loss_type == "sft"):
        limits = cfg.reward_timeout_s, cfg.max_length_sample, cfg.overlong_cache
        reward_model = open_reward_model(cfg, sizes)
        arguments = *limits, workers, cfg.dataset, cfg.tag_names(), reward_model
        functions = rewards.load_reward_functions(cfg.reward_fn, *arguments)
    prefix_messages = read_prefix_messages(cfg.system_prompt)

    folder, adapters, model, tokenizer = open_model(cfg)
    default = [{"role": "system", "content": rewards.system_prompt(cfg.tag_names())}]
    chat_format = ChatFormat(tokenizer, prefix_messages, default, kwargs=cfg.template_kwargs())
    stop_ids = find_stop_ids(folder, chat_format, model.vocab_size)
    stopping = Stopping(cfg.max_length_sample, stop_ids, pad_id=stop_ids[0])
    environments = open_environments(cfg, workers, chat_format, stop_ids)
    chat_format = environments.chat_format if environments else chat_format  # with their tools
    check_chat_format(chat_format, math.inf if cfg.loss_type == "sft" else cfg.max_length_sample)
    if environments and environments.has_reward:
        functions.append(rewards.RewardFunction("get_reward", environments.get_reward))
    reward_weights = rewards.parse_reward_weights(
        cfg.reward_weights, cfg.reward_fn, [function.name for function in functions]
    )

    def read_prompts(split: str) -> list[data.Prompt]:
        examples = [example] if example else load_split(cfg, split, functions)
        prompts = prompts_of_split(cfg, examples, chat_format, model, split)
        if rewards.reward_correct in [inspect.unwrap(f.call) for f in functions] and not example:
            raise_if_no_number(cfg.dataset, split, [prompt.columns["answer"] for prompt in prompts])
        return prompts

    train_prompts = read_prompts(cfg.train_split) if cfg.steps else []
    eval_prompts = read_prompts(cfg.eval_split) if cfg.evaluates() else []
    longest = max((len(prompt.ids) for prompt in train_prompts + eval_prompts), default=1)
    if functions:  # completions are sampled
        placement.raise_if_too_long(cfg.max_length_sample, model, longest)
    S = prompt_width(longest, cfg.global_length) - 1
    train_compute, rollout_compute, mesh_reason = placement.plan_compute(
        cfg, model, sizes, S, jax.devices()
    )
    rollout = RolloutConfig(
        compute=rollout_compute,
        sampling=make_sampling(cfg),
        eval_sampling=make_eval_sampling(cfg),
        stopping=stopping,
        chat_format=chat_format,
        functions=functions,
        reward_weights=reward_weights,
        environments=environments,
        max_turns=cfg.max_turns_or_default(),
        global_length=cfg.global_length,
        max_prompt_width=S + 1,
        stop_signal=hosts.StopSignal(),
    )
    train_compute = with_kernel(cfg, train_compute, jax.devices()[0])
    decay_steps = cfg.lr_decay_steps or cfg.steps
    return Run(
        cfg=cfg,
        sizes=sizes,
        folder=folder,
        adapters=adapters,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        rollout=rollout,
        learner=make_learner(cfg, sizes, train_compute, S, stopping.pad_id),
        schedule=Schedule(cfg.learning_rate, cfg.lr_schedule, cfg.warmup_ratio, decay_steps),
        teacher=None,
        teacher_folder=None,
        mesh_reason=mesh_reason,
    )


def check_outputs(cfg: Config) -> None:
    """Raises UserMistake if a tracker, the export's folder or its repository cannot be used."""
    if cfg.report_to or cfg.wandb_mode:
        open_trackers(cfg)
    if cfg.export_hf not in ("", "none"):
        raise_if_not_writable(f"EXPORT_HF={cfg.export_hf}", Path(cfg.export_hf))
    if cfg.push_to_hub:
        open_hub(cfg).open_repository(cfg.push_to_hub, cfg.push_to_hub_private)


def open_model(cfg: Config) -> tuple[Path, Path | None, ModelConfig, "PreTrainedTokenizerBase"]:
    """The folder of the model, the folder of its adapters if MODEL_PATH names adapters, the model
    and its tokenizer. No weight is read. Raises UserMistake."""
    folder, adapters = lora.fetch_base(cfg.model_path, cfg.model_revision)
    for source in (folder, adapters or folder):
        hf.raise_if_overwriting(cfg.export_hf, cfg.output_dir, source)
    model, tokenizer = hf.read_model(folder, chat_template_file(cfg, adapters))
    model = dataclasses.replace(model, lora=lora.read_lora(cfg, model, adapters))
    return folder, adapters, model, tokenizer


def chat_template_file(cfg: Config, adapters: Path | None) -> str:
    """The file that replaces the tokenizer's chat template: that of CHAT_TEMPLATE, or of the folder
    of the adapters, which were trained with it; "" if there is none."""
    if cfg.chat_template or not adapters:
        return cfg.chat_template
    jinja, settings = (adapters / name for name in ("chat_template.jinja", "tokenizer_config.json"))
    if jinja.is_file():
        return str(jinja)
    values = hf.read_json(settings) if settings.is_file() else {}
    return str(settings) if isinstance(values.get("chat_template"), str) else ""


def find_stop_ids(folder: Path, chat_format: ChatFormat, vocab_size: int) -> tuple[int, ...]:
    """The sorted ids of all stop tokens: those that the model's files name, and the token with
    which the chat template ends an answer. Raises UserMistake."""
    tokenizer, end = chat_format.tokenizer, end_of_turn_id(chat_format)
    named = hf.read_stop_ids(folder, tokenizer, vocab_size)
    if end is not None and end < vocab_size and end not in named:
        reason = "the chat template ends an answer with it, though the model's files do not name it"
        print(f"note: {token_text([end], tokenizer)} is a stop token: {reason}", flush=True)
        return tuple(sorted((*named, end)))
    if end is None and (text := text_after_answer(chat_format)):
        ends = ", ".join(token_text([i], tokenizer) for i in named)
        reason = f"{text!r:.40}, which is no token: the model may write it and go on"
        print(f"note: the chat template ends an answer with {reason} until {ends}", flush=True)
    return named


def load_split(
    cfg: Config, split: str, functions: Sequence[rewards.RewardFunction]
) -> list[dict[str, Any]]:
    """The examples of a split of DATASET; without answers if there are none and no reward function
    reads them. Raises UserMistake."""
    is_sft = cfg.loss_type == "sft"
    answer = None if is_sft and not cfg.reward_fn else cfg.answer_column
    completion = cfg.completion_column if is_sft else None
    needs_answers = any(function.reads_answer for function in functions)
    examples = data.load_examples(
        cfg.dataset,
        cfg.dataset_config,
        split,
        cfg.question_column,
        answer,
        completion,
        needs_answers,
    )
    for name in ("tools", "chat_template_kwargs"):
        if any(example.get(name) for example in examples):
            print(f"note: the {split} prompts are written without column {name!r}", flush=True)
    return examples


def prompts_of_split(
    cfg: Config,
    examples: list[data.Example],
    chat_format: ChatFormat,
    model: ModelConfig,
    split: str,
) -> list[data.Prompt]:
    """The prompts of the examples, or the demonstrations of train_sft.py, without those that are
    too long. Raises UserMistake."""
    if cfg.system_prompt and (count := sum(map(has_system_message, examples))):
        reason = "have a system message, which replaces that of SYSTEM_PROMPT"
        print(f"note: {count} of {len(examples)} {split} prompts {reason}", flush=True)
    # First: examples that a template writes only in part have other faults as well.
    check_messages(examples, chat_format, split)
    if cfg.loss_type != "sft":
        prompts = data.build_prompts(examples, chat_format, model.vocab_size)
        lengths = [len(prompt.ids) for prompt in prompts]
        return data.drop_long_prompts(prompts, lengths, cfg.max_prompt_length, split)
    demonstrations = build_demonstrations(examples, chat_format, model.vocab_size)
    lengths = [len(x.ids) for x in demonstrations]
    demonstrations = data.drop_long_prompts(demonstrations, lengths, cfg.max_prompt_length, split)
    lengths = [len(x.completion_ids) for x in demonstrations]
    demonstrations = data.drop_long_prompts(
        demonstrations, lengths, cfg.max_length_sample, split, "completion"
    )
    for demonstration in demonstrations:
        length = len(demonstration.ids) + len(demonstration.completion_ids)
        if length > model.max_positions:
            longer = f"{demonstration.source} has {length} tokens, and the model has"
            remedy = "lower MAX_LENGTH_SAMPLE or set MAX_PROMPT_LENGTH"
            raise UserMistake(f"{longer} {model.max_positions} positions; {remedy}")
    return demonstrations


def raise_if_no_number(dataset: str, split: str, answers: list[str]) -> None:
    """Prints how many right answers of a split have no number for reward_correct. Raises
    UserMistake if none of them has a number."""
    without = [answer for answer in answers if rewards.reference_number(answer) is None]
    if len(without) == len(answers):
        raise UserMistake(
            f"DATASET={dataset}: none of the {len(answers)} {split} answers, such as "
            f"{without[0]!r:.80}, has a number for reward_correct; set ANSWER_COLUMN to a column "
            f"with numbers, or REWARD_FN to exact_match (letters, words), "
            f"recipes/math_answers.py:math_correct (LaTeX) or my.py:score"
        )
    if without:
        share = f"{len(without)} of {len(answers)} {split} answers"
        reason = f"have no number, such as {without[0]!r:.80}: reward_correct leaves them out"
        print(f"note: {share} {reason}", flush=True)


def note_prompts_without_tags(run: Run) -> None:
    """Prints how many prompts do not ask for the tags that a reward function counts."""
    cfg, rollout = run.cfg, run.rollout
    weights = zip(rollout.functions, rollout.reward_weights, strict=True)
    counting = {rewards.reward_format, rewards.tag_count_reward}
    names = [f.name for f, weight in weights if inspect.unwrap(f.call) in counting and weight]
    tags = {f"<{name}>" for name in cfg.tag_names()} - {"<think>"}  # which models may know
    for split, prompts in (cfg.train_split, run.train_prompts), (cfg.eval_split, run.eval_prompts):
        chats = (rollout.chat_format.messages_of(prompt.columns) for prompt in prompts)
        texts = ("\n".join(message["content"] for message in chat) for chat in chats)
        untold = (not all(tag in text for tag in tags) for text in texts)
        if names and cfg.loss_type != "sft" and (count := sum(untold)):
            reason = f"do not ask for the tags that {' and '.join(names)} count"
            remedy = "ask for them in SYSTEM_PROMPT, or set another REWARD_FN"
            print(f"note: {count} of {len(prompts)} {split} prompts {reason}; {remedy}", flush=True)


# ---- Optional modules, imported lazily -----------------------------------------------------------


def open_environments(
    cfg: Config, workers: dict[str, RewardWorker], chat_format: ChatFormat, stop_ids: Sequence[int]
) -> Environments | None:
    """The environments of ENVIRONMENT_CLASS; None if it is empty. workers: see get_worker. Raises
    UserMistake."""
    source = cfg.environment_class
    if not source:
        return None
    turns = import_optional("extras.turns", f"ENVIRONMENT_CLASS={source}")
    file, _, name = source.rpartition(":")
    if not (file.endswith(".py") and name.isidentifier()):
        raise UserMistake(f"ENVIRONMENT_CLASS={source} is not file.py:Class")
    worker = get_worker("ENVIRONMENT_CLASS", source, cfg.reward_timeout_s, workers)
    environments = turns.TurnEnvironments(source, worker, chat_format, stop_ids, cfg.seed)
    if not environments.has_reward and not cfg.reward_fn:
        raise UserMistake(
            f"ENVIRONMENT_CLASS={source} has no get_reward(self); write one, or set REWARD_FN"
        )
    if cfg.reward_fn:
        print(f"note: with ENVIRONMENT_CLASS={source} REWARD_FN gets the text of the last turn")
    return environments


def make_backend(run: Run) -> Backend:
    """The backend that ROLLOUT_BACKEND names. Raises UserMistake if it cannot compute the run."""
    if run.cfg.rollout_backend == "naive":
        return NaiveBackend(run.rollout.compute, run.rollout.stopping, run.cfg.drops_ended())
    with hosts.raising_on_all_processes():  # a host may have too little memory
        return open_sglang().SglangBackend(run)


def open_sglang() -> ModuleType:
    return import_optional("extras.sglang", "ROLLOUT_BACKEND=sglang_jax")


def with_kernel(cfg: Config, compute: ComputeConfig, device: jax.Device) -> ComputeConfig:
    """The compute of training, with the kernel if POLICY_LOSS_IMPL=pallas. Raises UserMistake if
    the model is too wide for the kernel."""
    if cfg.policy_loss_impl == "jax":
        return compute
    loss_pallas = import_optional("loss_pallas", f"POLICY_LOSS_IMPL={cfg.policy_loss_impl}")
    try:
        sizes = compute.model.hidden_size, 2, device.device_kind, bool(compute.model.logits_softcap)
        loss_pallas.block_sizes(*sizes)
    except ValueError as error:  # loss_pallas.py imports no UserMistake
        raise UserMistake(str(error)) from None
    return compute._replace(logps_kernel=loss_pallas.Kernel(device.device_kind))


def with_teacher(run: Run) -> Run:
    """The run with the teacher of TEACHER_PATH, if it takes a step. The teacher is checked, and its
    weights are not read. Raises UserMistake."""
    cfg, sizes, rollout = run.cfg, run.sizes, run.rollout
    if not cfg.teacher_path or not cfg.steps:
        return run
    S, longest = rollout.max_prompt_width - 1, max(len(prompt.ids) for prompt in run.train_prompts)
    student = run.folder, run.learner.compute.model.vocab_size
    folder, compute = open_teacher(cfg).read_teacher(cfg, *student, sizes, S, longest)
    hf.raise_if_overwriting(cfg.export_hf, cfg.output_dir, folder, "TEACHER_PATH")
    if rollout.environments:
        rollout.environments.teacher = cfg.teacher_path, compute.model
    teacher = make_learner(cfg, sizes, compute, S, rollout.stopping.pad_id)
    return dataclasses.replace(run, teacher=teacher, teacher_folder=folder)


def open_teacher(cfg: Config) -> ModuleType:
    return import_optional("extras.teacher", f"TEACHER_PATH={cfg.teacher_path}")


def open_scorer(cfg: Config) -> ModuleType:
    return import_optional("extras.scorer", f"REWARD_MODEL_PATH={cfg.reward_model_path}")


def open_reward_model(cfg: Config, sizes: Sizes) -> rewards.RewardFunction | None:
    """The function reward_model, or None if REWARD_FN does not name it. Raises UserMistake."""
    if not cfg.has_reward_model():
        return None
    return open_scorer(cfg).read_scorer(cfg, sizes).as_reward_function()


def open_reviewer(out: Path, log: RunLog) -> Callable[[str, str], dict[str, Any]]:
    """The function that writes a run's summary and report. Without extras/report.py it writes none,
    and a line of the log says so."""
    try:
        return import_optional("extras.report", "report.html").Reviewer(out, log).write
    except UserMistake:
        log.print_line("note: without extras/report.py the run has no report and no verdict")
        return lambda state, reason: {}


def open_trackers(cfg: Config) -> ModuleType | None:
    """The module of the trackers, or None if the run has none. Raises UserMistake if its file is
    missing, or a tracker that a setting asks for cannot work. A key of W&B never ends a run."""
    mode, is_set = cfg.wandb_mode, cfg.report_to or cfg.wandb_mode
    if not cfg.report_to and (mode == "disabled" or not (mode or os.environ.get("WANDB_API_KEY"))):
        return None
    if not is_set and not (REPO / "extras/trackers.py").is_file():
        print("note: without extras/trackers.py W&B gets no records", flush=True)
        return None
    setting = f"REPORT_TO={cfg.report_to}" if cfg.report_to else f"WANDB_MODE={mode}"
    trackers = import_optional("extras.trackers", setting)
    if is_set:
        trackers.raise_if_unusable(cfg.report_to or "wandb", setting, mode)
    return trackers


def open_hub(cfg: Config) -> ModuleType:
    return import_optional("extras.hub", f"PUSH_TO_HUB={cfg.push_to_hub}")


# ---- Settings as the modules take them -----------------------------------------------------------


def make_sampling(cfg: Config) -> Sampling:
    return Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, cfg.loss_uses_support())


def make_eval_sampling(cfg: Config) -> Sampling:
    """The settings of sampling in evaluations; greedy decoding has temperature 0 and no filters."""
    temperature = cfg.eval_temperature or (cfg.temperature if cfg.eval_samples > 1 else 0.0)
    if temperature == 0:
        return Sampling(temperature=0.0)
    return make_sampling(cfg)._replace(temperature=temperature, record_support=False)


def make_learner(
    cfg: Config, sizes: Sizes, compute: ComputeConfig, S: int, pad_id: int
) -> LearnerConfig:
    """The learner of a run. S: the padded length of its longest prompt without the last token."""
    shards, processes = compute.layout.batch_shards, sizes.global_batch // sizes.local_batch
    chunk = CHUNK if compute.model.linear else 1  # it divides LANES
    limits = RowLimits(
        shards=shards,
        full_length_sequences_per_shard=sizes.micro_batch_size * processes // shards,
        completions_per_prompt=cfg.num_pre_q,
        max_length_sample=cfg.max_length_sample,
        longest_prompt_slots=S,
        unit=LANES if compute.attention_impl == "splash" else chunk,
        chunk=chunk,
    )
    return LearnerConfig(
        compute=compute,
        # The settings of policy_loss have the same names in Objective as in Config.
        objective=Objective(**{name: getattr(cfg, name) for name in Objective._fields}),
        optimizer=Optimizer(cfg.optimizer, cfg.weight_decay, cfg.clip_norm),
        temperature=cfg.temperature,
        limits=limits,
        pad_id=pad_id,
        accumulates=sizes.grad_accum_steps > 1,
        skips_zero_advantages=cfg.skips_zero_advantages(),
    )


# ---- The log and the export ----------------------------------------------------------------------


def open_log(run: Run, out: Path, progress: Progress) -> RunLog:
    """The log of a run in its folder. Records after the checkpoint from which the run resumes are
    removed, unless there is nothing left to train or to evaluate. Writes config.yaml."""
    cfg, writes = run.cfg, jax.process_index() == 0
    evaluates = cfg.eval_every_steps > 0 and progress.accuracy is None
    has_work = progress.step < cfg.steps or evaluates or cfg.eval_full_sweep
    with hosts.raising_on_all_processes(), writing(f"OUTPUT_DIR={out}", UserMistake):
        log = RunLog(
            out, steps=cfg.steps, writes=writes, lengths=progress.lengths if has_work else None
        )
        if writes:
            text = config.describe(cfg, jax.process_count(), jax.local_device_count())
            text += "".join(f"\n{name}: {value}" for name, value in resolved_choices(run).items())
            replace_file(out / "config.yaml", text + "\n")
            if module := open_trackers(cfg):
                settings = tracker_settings(run, out, progress)
                names = cfg.report_to or "wandb"
                log.trackers = module.Trackers(names, out, settings, log.print_line)
            log.print_line(f"output={out}")
    return log


def tracker_settings(run: Run, out: Path, progress: Progress) -> dict[str, Any]:
    """The arguments of wandb.init, for every tracker. Without WANDB_MODE W&B is online."""
    cfg = run.cfg
    derived = {f"derived.{name}": value for name, value in run.sizes._asdict().items()}
    values = dataclasses.asdict(cfg) | derived | resolved_choices(run)
    if progress.forked_from:
        values["forked_from"] = progress.forked_from
    settings = {"mode": cfg.wandb_mode or "online", "config": values, "id": progress.run_id}
    project, name = cfg.wandb_project or "grpo", cfg.wandb_name or out.resolve().name
    return settings | {"project": project, "name": name}


def resolved_choices(run: Run) -> dict[str, str]:
    """The choices for this machine that settings leave open, by their names in config.yaml."""
    names = ("attention_impl", "layer_loop", "dtype")
    compute = run.learner.compute
    level = drift_level(run.cfg.filters_logps(), compute, run.rollout.compute)
    return ({"derived.drift_level": to_text(level)} if level < math.inf else {}) | {
        "derived.reward_weights": to_text(run.rollout.reward_weights),
        "derived.policy_loss_impl": run.cfg.policy_loss_impl,
        **{f"derived.{name}": str(getattr(compute, name)) for name in names},
        "derived.mesh_shape": mesh_text(compute.layout.mesh),
        "derived.rollout_mesh_shape": placement.rollout_mesh_text(run.cfg, run.rollout.compute),
        "derived.commit": commit_of(REPO),
        "derived.device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def export(run: Run, out: Path, params: Params, is_done: bool = True) -> None:
    """Writes the trained model as a Hugging Face folder, or the adapters as a PEFT folder, and then
    uploads the folder if PUSH_TO_HUB names a repository, and the run is done. Raises Unwritable."""
    later = [x for x in ("EVAL_FULL_SWEEP", "PUSH_TO_HUB") if getattr(run.cfg, x.lower())]
    if later and not is_done:
        start = f"the start that reaches STEPS={run.cfg.steps}"
        print(f"note: left for {start}: {', '.join(later)}", flush=True)
    if run.cfg.export_hf == "none":
        return
    cfg, folder = run.cfg, Path(run.cfg.export_hf or out / "hf")
    model, dtype = run.learner.compute.model, run.learner.compute.dtype
    is_replaced = chat_template_file(cfg, run.adapters) != ""
    chat_template = run.rollout.chat_format.tokenizer.chat_template if is_replaced else ""
    try:
        if model.lora and cfg.export_lora == "adapters":
            path, revision = cfg.model_path, cfg.model_revision
            if run.adapters:
                path, revision = lora.read_base_name(run.adapters)
            lora.save_adapters(
                folder, params, model, model.lora, path, revision, chat_template=chat_template
            )
        else:
            if model.lora and model.lora.int8_base:
                reason = (
                    f"trained on an int8 base, are merged with the float weights of {run.folder}"
                )
                print(f"note: the adapters, {reason}", flush=True)
                tensors = lora.merge_with_folder(run.folder, params, model, dtype)
            else:
                merged, share = params, 1.0
                if model.lora:
                    merged, share = lora.merge_adapters(params, model.lora)
                if 0 < share < ROUNDED_AWAY:
                    changes = f"changes {share:.2%} of the numbers of the adapted matrices"
                    reason = f"{dtype} rounds the others away; EXPORT_LORA=adapters keeps them"
                    print(f"note: EXPORT_LORA=merged {changes}; {reason}", flush=True)
                tensors = hf.hf_tensors(merged, model, dtype)
            hf.save_model(
                folder,
                tensors,
                model,
                run.folder,
                dtype=dtype,
                stop_ids=run.rollout.stopping.stop_ids,
                chat_template=chat_template,
            )
    except OSError as error:
        raise Unwritable(f"EXPORT_HF={folder} cannot be written: {error}") from None
    if cfg.push_to_hub and is_done:
        with hosts.raising_on_all_processes(Unwritable):  # the others wait for process 0
            if jax.process_index() == 0:
                open_hub(cfg).upload(run, out, folder)


if __name__ == "__main__":
    with hosts.exiting_on_error():
        cfg, *_ = config.load([])
        hosts.start_jax(cfg.jax_compilation_cache_dir, cfg.init_timeout_s)
        print("versions", *(f"{name}={x}" for name, x in package_versions().items()))
