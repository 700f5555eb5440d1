"""Tells whether a run fits a TPU slice or a GPU and how long a step takes, without the device.

    python train_grpo.py --plan v6e-8        # the environment and --config are as for the run

libtpu, or XLA's compiler for GPUs, compiles the device programs of the run for the layouts that
they have in the run, and the compiled programs say how much memory they need. The exit code is 0 if
the run fits, 3 if it does not, and 2 if the settings are wrong or the compiler is missing.

Dimensions: S prompt tokens without the last, K completions of a prompt, T completion tokens.
"""

import argparse
import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from config import Config
from data import Prompt
from infra.chips import GPUS, OUT_OF_MEMORY_CODE, SLICES, usable_memory_bytes
from infra.mistakes import UserMistake, exit_with_mistakes, in_one_line, naming
from infra.sizes import (
    MICRO_SIZES,
    PASS_SIZES,
    bucket_length,
    completions_per_prompt_in_shard,
    derive_sizes,
    divisors,
    eval_questions,
    prompt_width,
    suggest_smaller_size,
)
from model import hf, placement
from model.attention import KV, map_kv
from model.blocks import with_key_blocks
from model.families import parse_config
from model.layout import devices_per_process, mesh_text
from model.lora import read_lora
from model.network import ComputeConfig
from model.next_token import Sampling, support_size
from model.params import ModelConfig, Params, abstract_params, combine_params, param_formats
from model.placement import num_params, plan_compute, raise_if_too_long, rollout_mesh_text
from optimizer import abstract_state, apply_update
from rows import Batch, MicroBatch, RowLimits, pack
from sampling import (
    Decoding,
    Stopping,
    begin_decoding,
    decode,
    drop_sequences,
    prefill,
    smaller_batches,
    stage_ends,
    sync_weights,
    widen,
)
from startup import (
    make_eval_sampling,
    make_learner,
    make_sampling,
    open_scorer,
    open_sglang,
    open_teacher,
    with_kernel,
)
from tools.launches import count_launches
from tools.plan_time import Memory, Plan, describe_time, suggest_larger_micro_batch
from update import compute_logps_and_entropies, micro_step

# ---- The plan ------------------------------------------------------------------------------------

ASSUMED_PROMPT = 512  # tokens, if neither MAX_PROMPT_LENGTH nor GLOBAL_LENGTH is set


class Program(NamedTuple):
    """A program of the run with its arguments, and what stays in memory while it runs."""

    function: jax.stages.Wrapped  # what jax.jit returns
    arguments: tuple[Any, ...]  # pytrees of shapes, and values
    rest: int  # bytes per device of the run's other arrays
    sizes: tuple[str, ...] = ()  # the settings that make it smaller, for suggest_smaller_size
    static: dict[str, Any] = {}  # keyword arguments


def plan_and_exit(cfg: Config, flags: argparse.Namespace) -> NoReturn:
    """Prints the plan of the run with these settings on this slice or GPU, and ends the program."""
    try:
        raise SystemExit(print_plan(make_plan(cfg, flags.plan), flags))
    except UserMistake as error:
        exit_with_mistakes(error)


def make_plan(cfg: Config, slice_name: str) -> Plan:
    """The plan of the run. Raises UserMistake for settings that do not suit the model or the slice,
    and for an unknown slice."""
    devices = slice_devices(slice_name)
    hosts = len(devices) // devices_per_process(devices)
    sizes = derive_sizes(cfg, hosts, len(devices) // hosts)
    model = known_config(cfg.model_path, cfg.model_revision)
    model = dataclasses.replace(model, lora=read_lora(cfg, model, None))
    longest = cfg.max_prompt_length or cfg.global_length or ASSUMED_PROMPT
    raise_if_too_long(cfg.max_length_sample, model, longest)
    S, engine_tokens = prompt_width(longest, cfg.global_length) - 1, 0
    if cfg.rollout_backend == "sglang_jax":
        sglang = open_sglang()
        of_host = devices[: len(devices) // hosts]
        sglang.raise_if_engine_cannot_compute(cfg, model, longest, of_host)
        _, engine_tokens = sglang.pool_size(cfg, sizes, S + 1, of_host)
        engine_tokens += sglang.PAGE_TOKENS["tpu"]  # the engine's page for padding
    training, rollout, mesh_reason = plan_compute(cfg, model, sizes, S, devices)
    training = with_kernel(cfg, training, devices[0])
    teacher = None
    if cfg.teacher_path and cfg.steps:
        teachers = open_teacher(cfg)
        with naming("TEACHER_PATH", cfg.teacher_path):
            models = known_config(cfg.teacher_path), model.vocab_size
            teacher = teachers.plan_teacher(cfg, *models, sizes, S, devices)
    plan = Plan(cfg, sizes, training, rollout, hosts, S, mesh_reason, engine_tokens, teacher)
    if not cfg.has_reward_model() or (cfg.loss_type == "sft" and not cfg.evaluates()):
        return plan
    with naming("REWARD_MODEL_PATH", cfg.reward_model_path):
        model = known_config(cfg.reward_model_path)
        return plan._replace(scorer=placement.plan_frozen(cfg, model, sizes, 0, devices))


# ---- The table -----------------------------------------------------------------------------------

GIB = 2**30


def print_plan(plan: Plan, flags: argparse.Namespace) -> int:
    """Prints the sizes and the layouts of the run, the memory of each program once the program is
    compiled, and if all fit the time of a step. Returns the exit code. Raises UserMistake."""
    slice_name, mean, T = flags.plan, flags.mean_completion or 0, plan.cfg.max_length_sample
    if mean > T:
        raise UserMistake(f"--mean-completion={mean} is above MAX_LENGTH_SAMPLE={T}; lower it")
    print_sizes(plan, slice_name)
    print(
        "| GiB per device | arguments | temporaries | rest of run | total | fits | compiled in |\n"
        "|---|---|---|---|---|---|---|",
        flush=True,
    )
    limit = usable_memory_bytes(plan.rollout.layout.mesh.devices.flat[0])
    programs, memories = list_programs(plan), {}
    if plan.engine_tokens:
        sync = programs["sync_weights"]
        rest = bytes_per_device(sync.arguments) + sync.rest
        memories["engine"] = engine_memory(plan, limit, rest)
        print(f"| engine | {columns(memories['engine'], limit)} | not compiled |", flush=True)
    for name, program in programs.items():
        began = time.perf_counter()
        memories[name] = measure_memory(program, name)
        seconds = time.perf_counter() - began
        print(f"| {name} | {columns(memories[name], limit)} | {seconds:.0f} s |", flush=True)

    too_large = [name for name, memory in memories.items() if memory.total > limit]
    of_micro_batch = {x: memories[x] for x in programs if programs[x].sizes == MICRO_SIZES}
    if {*too_large} <= {"micro_step"}:
        print(largest_micro_batch(plan, slice_name, of_micro_batch, limit))
    for name in too_large:
        hint = "Use more devices, or a lower SGLANG_JAX_MEM_FRACTION_STATIC"
        if name != "engine":
            sizes = programs[name].sizes
            hint = suggest_smaller_size(
                plan.cfg, plan.sizes, plan.processes, plan.local_devices(), sizes
            )
        print(f"{name} does not fit. {hint}")
    if not too_large:
        launches = memories["micro_step"].launches
        arguments = [*of_micro_batch.values()], launches[0], limit
        lines = suggest_larger_micro_batch(plan, flags, *arguments)
        print(*lines, *describe_time(plan, flags, launches), sep="\n")
    largest = max(memories, key=lambda name: memories[name].total)
    total = f"{memories[largest].total / GIB:.2f} of {limit / GIB:.4g} GiB in {largest}"
    print(f"{slice_name}: {'DOES NOT FIT' if too_large else 'fits'}, {total}")
    return OUT_OF_MEMORY_CODE if too_large else 0


def largest_micro_batch(
    plan: Plan, slice_name: str, memories: dict[str, Memory], limit: float
) -> str:
    """A line about the largest micro-batch that fits. A bisection compiles micro_step for at most
    three sizes, and adds a row of the table for each. memories: of all programs that compute a
    micro-batch, whose temporaries grow no faster than it. limit: bytes of a device."""
    local, size, seconds = plan.local_devices(), plan.sizes.micro_batch_size, []
    sizes = [local * n for n in divisors(size * plan.sizes.grad_accum_steps // local)]
    fits, too_large = sizes.index(size), len(sizes)  # indices
    if memories["micro_step"].total > limit:
        fits, too_large = -1, fits
    while too_large - fits > 1 and len(seconds) < 3:
        middle, began = (fits + too_large) // 2, time.perf_counter()
        settings = dict(zip(MICRO_SIZES, (sizes[middle], 0), strict=True)) | {"grad_accum_steps": 0}
        other = make_plan(dataclasses.replace(plan.cfg, **settings), slice_name)
        memory = measure_memory(list_programs(other)["micro_step"], "micro_step")
        seconds.append(time.perf_counter() - began)
        title = f"micro_step with {sizes[middle] // local} sequences"
        print(f"| {title} | {columns(memory, limit)} | {seconds[-1]:.0f} s |", flush=True)
        others = [x for name, x in memories.items() if name != "micro_step"]
        totals = [x.total + (sizes[middle] / size - 1) * x.temporaries for x in others]
        is_too_large = max([memory.total, *totals]) > limit
        fits, too_large = (fits, middle) if is_too_large else (middle, too_large)
    name, tried = MICRO_SIZES[1].upper(), " of those tried" * (too_large - fits > 1)
    text = f"{name}={sizes[fits] // local} is the largest{tried} that fits"
    text = text if fits >= 0 else f"no {name}{tried} fits"
    return f"{text}; {len(seconds)} more compilations took {sum(seconds):.0f} s"


def print_sizes(plan: Plan, slice_name: str) -> None:
    """Prints the devices, the sizes of a step and the layouts of the run."""
    cfg, sizes, training = plan.cfg, plan.sizes, plan.training
    mesh, local = plan.rollout.layout.mesh, plan.local_devices()
    S = f"{plan.S}{'' if cfg.max_prompt_length else ' (assumed, as MAX_PROMPT_LENGTH=0)'}"
    print(
        f"{slice_name}: {mesh.size} x {mesh.devices.flat[0].device_kind}, hosts={plan.processes}, "
        f"{cfg.model_path} of {num_params(training.model) / 1e9:.3g}B parameters\n"
        f"a step: {sizes.global_batch} sequences of {S} + {cfg.max_length_sample} tokens; "
        f"per device {sizes.prompt_batch_size * cfg.num_pre_q // local} in each of "
        f"{sizes.passes_per_step} passes, {sizes.micro_batch_size // local} in each of at most "
        f"{sizes.grad_accum_steps} micro-steps\n"
        f"mesh dp,fsdp,tp train={mesh_text(training.layout.mesh)} ({cfg.mesh_shape}) "
        f"rollout={rollout_mesh_text(cfg, plan.rollout)} "
        f"({cfg.rollout_mesh_shape}{plan.mesh_reason})\n"
        f"dtype={training.dtype} remat={training.remat} attention_impl={training.attention_impl} "
        f"policy_loss_impl={cfg.policy_loss_impl}",
        *["compiled for an H100, with the memory of this GPU"] * (slice_name.lower() in GPUS),
        sep="\n",
        flush=True,
    )


def columns(memory: Memory, limit: float) -> str:
    numbers = " | ".join(f"{x / GIB:.2f}" for x in (*memory[:3], memory.total))
    fits = "yes" if memory.total <= 0.95 * limit else "barely"
    return f"{numbers} | {fits if memory.total <= limit else 'NO'}"


# ---- The memory of a program ---------------------------------------------------------------------


def measure_memory(program: Program, name: str) -> Memory:
    """The memory of the program when it is compiled for the device, or the compiler's own estimate
    if the program is too large to be compiled. name: as in list_programs. Raises UserMistake if the
    compiler fails."""
    try:
        compiled = compile_program(program)
        stats = compiled.memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        match = re.search(r"HLO temporaries \(([\d.]+)G\) exceeds", str(error))
        if not match:
            reason = f"the compiler fails on {name}: {in_one_line(error)}"
            remedy = "try other sizes, such as a smaller BATCH_SIZE"
            raise UserMistake(f"{reason:.300}; {remedy}") from None
        arguments = bytes_per_device(program.arguments)
        # The compiler's number includes the arguments.
        return Memory(arguments, float(match.group(1)) * GIB - arguments, program.rest)
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    [device, *_] = jax.tree.leaves(compiled.input_shardings)[0].device_set
    launches = count_launches(compiled.as_text()) if device.platform == "gpu" else (0, 0)
    temporaries = stats.temp_size_in_bytes + outputs
    return Memory(stats.argument_size_in_bytes, temporaries, program.rest, launches)


def compile_program(program: Program) -> jax.stages.Compiled:
    lowered = program.function.lower(*program.arguments, **program.static)
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # Without a GPU to try kernels on, the compiler of jax 0.11 finds none for some matmuls.
        if "No supported config found" not in str(error):
            raise
        return lowered.compile({"xla_gpu_enable_triton_gemm": False})


def engine_memory(plan: Plan, limit: float, rest: int) -> Memory:
    """The memory of the serving engine: its weights, and a pool of keys and values.

    Together they get at most SGLANG_JAX_MEM_FRACTION_STATIC of `limit`, the bytes of a device, but
    no less than the weights need. rest: bytes per device of the run's other arrays.
    """
    model, rollout = plan.rollout.model, plan.rollout
    devices = plan.local_devices()  # of an engine
    heads = max(model.num_kv_heads, devices)  # each device holds at least one
    width = 128 * math.ceil(model.head_dim / 128)
    numbers = plan.engine_tokens * model.num_layers * 2 * heads * width
    bytes_each = rollout.dtype.itemsize / devices
    weights, pool = num_params(model) * bytes_each, numbers * bytes_each
    share = plan.cfg.sglang_jax_mem_fraction_static * limit
    return Memory(0, max(weights, min(weights + pool, share)), rest)


def bytes_per_device(tree: Any) -> int:
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]
    shapes = [x.sharding.shard_shape(x.shape) if x.sharding else x.shape for x in arrays]
    sizes = [math.prod(shape) for shape in shapes]
    return sum(size * x.dtype.itemsize for size, x in zip(sizes, arrays, strict=True))


# ---- Devices that are not here -------------------------------------------------------------------

GPU_PLUGIN = "jax_plugins.xla_cuda13"
# The compiler's description of an H100.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
"""


def slice_devices(name: str) -> Sequence[jax.Device]:
    """The devices of a TPU slice, or the only device of a GPU.

    Raises UserMistake if the name is unknown or its compiler is not installed.
    """
    name = name.lower().replace("v5litepod-", "v5e-")  # gcloud's name
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read these programs again
    if name in GPUS:
        return gpu_devices(name)
    if name not in SLICES:
        known = ", ".join([*SLICES, *GPUS])
        raise UserMistake(f"{name!r} is not a slice or a GPU known here; these are: {known}")
    if importlib.util.find_spec("libtpu") is None:
        raise UserMistake('the TPU compiler is not installed: pip install "jax[tpu]"')
    # libtpu asks which host this is, and only one process may load it; compiling needs neither.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v6e-8"}
    (shape, options), chip = SLICES[name], name.partition("-")[0]
    return topologies.get_topology_desc(f"{chip}:{shape}", "tpu", **options).devices


def gpu_devices(name: str) -> Sequence[jax.Device]:
    """The only device of a GPU. The compiler makes programs for an H100, whatever the name, and
    chooses kernels without timing them.

    Raises UserMistake if the compiler is not installed, or fails.
    """
    install = f'the GPU compiler is not installed: pip install "jax[cuda13]=={jax.__version__}"'
    plugin = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(GPU_PLUGIN)
    if not (plugin and plugin.submodule_search_locations):
        raise UserMistake(install)
    folder = Path(plugin.submodule_search_locations[0]).parents[1] / "nvidia" / "cu13"
    flags = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={folder}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    target = f'{H100} device_description_str: "{GPUS[name].kinds[0]}"'
    try:
        options = {"target_config": target, "topology": "1x1x1"}
        return topologies.get_topology_desc(name, "cuda", **options).devices
    except Exception as error:  # a private part of jax, which may raise anything
        raise UserMistake(f"{install} ({in_one_line(error)})") from None


# ---- The device programs -------------------------------------------------------------------------

Axes = str | tuple[str, ...] | None  # the mesh axis or axes that split a dimension


def array(
    mesh: Mesh, shape: tuple[int, ...], dtype: DTypeLike, *axes: Axes
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def list_programs(plan: Plan) -> dict[str, Program]:
    """The programs of the run by their names, in the order of a step."""
    cfg, training, rollout = plan.cfg, plan.training, plan.rollout
    model, mesh = training.model, training.layout.mesh
    learner = make_learner(cfg, plan.sizes, training, plan.S, pad_id=0)
    state = abstract_state(model, mesh, learner.optimizer)
    base, reference = None, None
    if model.lora:
        base = abstract_params(model, mesh, training.dtype, training.layer_loop)
        base = dataclasses.replace(base, adapters=None)
    if cfg.beta > 0:  # with LoRA it has the same base
        reference = state.params if base else abstract_params(model, mesh, training.dtype)
    params, frozen = combine_params(base, state.params), [base, reference]
    if teacher := plan.teacher:
        arguments = teacher.layout.mesh, teacher.dtype, teacher.layer_loop
        frozen.append(abstract_params(teacher.model, *arguments))
    if scorer := plan.scorer:
        arguments = scorer.layout.mesh, scorer.dtype, scorer.layer_loop
        frozen.insert(0, abstract_params(scorer.model, *arguments))
    held = bytes_per_device((state, frozen))

    copied = state.params if rollout.shares_base else params
    rest = held - bytes_per_device(copied)
    if base and not rollout.model.lora:  # an engine copies merged weights, a second base
        copied, rest = base, held
    programs = {"sync_weights": Program(sync_weights(rollout), (copied,), rest)}
    if cfg.loss_type == "sft":  # it samples nothing, but in evaluations with a REWARD_FN
        programs = {}
    elif cfg.rollout_backend == "naive":  # an engine has programs of its own
        # A shared base is among the arguments.
        rest = held - rollout.shares_base * bytes_per_device(base)
        prompts, K, sampling = plan.sizes.prompt_batch_size, cfg.num_pre_q, make_sampling(cfg)
        programs |= rollout_programs(plan, plan.S, prompts, K, sampling, rest)
        if cfg.max_turns_or_default() > 1:
            # The last turn has nearly all of the completion in its prompt.
            S = plan.S + cfg.max_length_sample
            turn_programs = rollout_programs(plan, S, prompts * K, 1, sampling, rest, drop=False)
            programs |= {f"turn_{name}": program for name, program in turn_programs.items()}
        if cfg.evaluates():
            K, sampling = cfg.eval_samples, make_eval_sampling(cfg)
            prompts = eval_questions(plan.sizes, cfg.num_pre_q, K, plan.local_devices())
            eval_programs = rollout_programs(plan, plan.S, prompts, K, sampling, rest)
            programs |= {f"eval_{name}": program for name, program in eval_programs.items()}

    batch = micro_batch(plan, learner.limits)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    def score(weights: Params, rows: MicroBatch, compute: ComputeConfig) -> Program:
        arguments = weights, rows, cfg.temperature, compute
        rest = held - bytes_per_device(weights)
        return Program(compute_logps_and_entropies, arguments, rest, MICRO_SIZES)

    if cfg.beta > 0 or plan.sizes.updates_per_step > 1 or cfg.top_entropy_quantile < 1:
        scored = combine_params(base, reference) if reference else params
        programs["compute_logps_and_entropies"] = score(scored, batch, training)
    if teacher:
        limits = make_learner(cfg, plan.sizes, teacher, plan.S, pad_id=0).limits
        judged = micro_batch(plan._replace(training=teacher), limits)
        programs["teacher"] = score(frozen[-1], judged, teacher)
    if scorer:
        tokens = bucket_length(plan.S + cfg.max_length_sample + 64)  # assumed: its template
        shape = plan.sizes.micro_batch_size * plan.processes, tokens
        ids = array(scorer.layout.mesh, shape, jnp.int32, scorer.layout.batch_axes)
        arguments = frozen[0], ids, ids, scorer, () if scorer.model.has_score else (0, 1)
        rest, program = held - bytes_per_device(frozen[0]), open_scorer(cfg).score_last_tokens
        programs["scorer"] = Program(program, arguments, rest, MICRO_SIZES)
    counts = dict.fromkeys(("num_tokens", "num_sequences", "num_top_tokens"), scalar)
    grad_sum = state.params if plan.sizes.grad_accum_steps > 1 else None
    static = {"objective": learner.objective, "temperature": cfg.temperature, "compute": training}
    arguments, rest = (params, grad_sum, batch, counts), held - bytes_per_device(params)
    programs["micro_step"] = Program(micro_step, arguments, rest, MICRO_SIZES, static)
    # state.params stands for the gradients, which have the same shapes.
    arguments = state, state.params, scalar, learner.optimizer, model
    programs["optimizer_step"] = Program(apply_update, arguments, bytes_per_device(frozen))
    return programs


def rollout_programs(
    plan: Plan, S: int, prompts: int, K: int, sampling: Sampling, rest: int, drop: bool = True
) -> dict[str, Program]:
    """The programs of a rollout pass.

    S: prompt tokens without the last. prompts: of each process. K: completions of each prompt.
    rest: bytes per device of the run's arrays, without the weights that sample. drop: False: as in
    later turns no sequence is dropped, whatever the settings say.
    """
    drop = drop and plan.cfg.drops_ended()
    rollout, T = plan.rollout, plan.cfg.max_length_sample
    mesh, batch_axes = rollout.layout
    shards = rollout.layout.batch_shards
    sequences = prompts * K * plan.processes
    # A prompt has a copy for each shard that has completions of it.
    copies = sequences // completions_per_prompt_in_shard(K, sequences // shards)

    def on_mesh(tree: Any, *axes: Axes) -> Any:
        return jax.tree.map(lambda x: array(mesh, x.shape, x.dtype, *axes[: x.ndim]), tree)

    weights = abstract_params(rollout.model, mesh, rollout.dtype, rollout.layer_loop)
    if not rollout.shares_base:
        formats = param_formats(rollout.model, mesh, rollout.layer_loop)
        weights = jax.tree.map(lambda x, at: x.update(sharding=at), weights, formats)
    prompt_ids = prompt_mask = array(mesh, (copies, S + 1), jnp.int32, batch_axes)
    sequence_ids = earlier = array(mesh, (sequences,), jnp.int32, batch_axes)
    key, fewest = jax.eval_shape(jax.random.key, 0), array(mesh, (), jnp.int32)
    static = {"sampling": sampling, "stopping": Stopping(T, stop_ids=(0, 1), pad_id=0)}
    prefix = prefill.eval_shape(weights, rollout, prompt_ids, prompt_mask)
    # In stacked keys and values the dimension of layers comes before that of sequences.
    kv_axes = (None, batch_axes) if rollout.layer_loop == "scan" else (batch_axes,)
    prompt = map_kv(lambda x: x if isinstance(x, KV) else None, prefix)

    def decoding(width: int) -> Decoding:
        arguments = rollout, prompt_ids, prompt_mask, prefix, sequence_ids, earlier, key
        state = begin_decoding.eval_shape(*arguments, width=width, **static)
        return on_mesh(state, batch_axes)._replace(
            prompt=on_mesh(prompt, *kv_axes), completion=on_mesh(state.completion, *kv_axes)
        )

    state = decoding(T)
    arguments = weights, rollout, prompt_ids, prompt_mask
    programs = {
        "prefill": Program(prefill, arguments, rest, PASS_SIZES),
        "decode": Program(decode, (weights, rollout, state, fewest), rest, PASS_SIZES, static),
    }
    rest += bytes_per_device(weights)
    drop_is_larger = drop and sequences >= 4 * shards
    if not drop_is_larger and (ends := stage_ends(T)[:-1]):
        programs["widen"] = Program(widen, (decoding(ends[-1]),), rest, PASS_SIZES, {"end": T})
    if drop and sequences > shards:
        static = {"size": smaller_batches(sequences // shards)[0]}  # when some first leave
        arguments = rollout, state
        programs["drop_sequences"] = Program(drop_sequences, arguments, rest, PASS_SIZES, static)
    return programs


def micro_batch(plan: Plan, limits: RowLimits) -> MicroBatch:
    """The shapes of a micro-batch of the longest prompts and completions."""
    cfg, layout, sampling = plan.cfg, plan.training.layout, make_sampling(plan.cfg)
    U = support_size(sampling, plan.training.model.vocab_size)
    count, shape = limits.full_length_sequences_per_shard, limits.widest()
    tokens = np.ones((count, cfg.max_length_sample), np.int32)
    logps = tokens.astype(np.float32)
    rewards = logps[:, :1]
    # Prompts that are shorter by a token end within blocks, as those of a run do.
    prompts = count // completions_per_prompt_in_shard(cfg.num_pre_q, count)
    batch = Batch(
        prompts=[Prompt([0] * plan.S, {})] * prompts,
        completion_ids=tokens,
        completion_mask=tokens,
        lengths=tokens.sum(axis=1),
        sampling_logps=logps,
        sampled_mask=tokens,
        stopped=tokens[:, 0] > 0,
        rewards=rewards[:, 0],
        function_rewards=rewards,
        advantages=rewards[:, 0],
        old_logps=logps if plan.sizes.updates_per_step > 1 else None,
        ref_logps=logps if cfg.beta > 0 else None,
        teacher_logps=logps if cfg.teacher_path else None,
        top_mask=tokens if cfg.top_entropy_quantile < 1 else None,
        support=np.zeros((*tokens.shape, U), np.int32) if sampling.record_support else None,
    )
    [row] = with_key_blocks([pack(batch, [range(count)], shape, pad_id=0)], shape.S, layout)

    def global_shape(x: np.ndarray) -> jax.ShapeDtypeStruct:
        shape = layout.batch_shards * len(x), *x.shape[1:]
        return array(layout.mesh, shape, x.dtype, layout.batch_axes)

    return jax.tree.map(global_shape, row)


# ---- Well-known models ---------------------------------------------------------------------------

QWEN2 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN3 = QWEN2 | {"model_type": "qwen3"}
QWEN3_2507 = QWEN3 | {"rope_theta": 5e6}
OF_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
QWEN3_MOE = QWEN3 | OF_EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True}
QWEN3_MOE_2507 = QWEN3_MOE | {"rope_theta": 1e7}
HEADS = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
QWEN35_16 = {"model_type": "qwen3_5_text", "rms_norm_eps": 1e-6, "rope_theta": 1e7, **HEADS}
QWEN35_16 |= {"linear_num_value_heads": 16, "partial_rotary_factor": 0.25}
QWEN35_32 = QWEN35_16 | {"linear_num_value_heads": 32}
QWEN35_48 = QWEN35_16 | {"linear_num_value_heads": 48}
QWEN35_MOE = QWEN35_32 | {"model_type": "qwen3_5_moe_text", "num_experts": 256}
QWEN35_MOE |= {"num_experts_per_tok": 8, "moe_intermediate_size": 512}
QWEN35_MOE |= {"shared_expert_intermediate_size": 512}
SCALING = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 8192}
LLAMA32 = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_scaling": SCALING}
MISTRAL = {"model_type": "mistral", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}
SMOLLM2 = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e5}
SMOLLM2_LARGE = SMOLLM2 | {"rope_theta": 1.3e5}
SMOLLM3 = {"model_type": "smollm3", "rms_norm_eps": 1e-6, "rope_theta": 5e6, "pad_token_id": None}
GEMMA2 = {"model_type": "gemma2", "rms_norm_eps": 1e-6, "sliding_window": 4096}
GEMMA2_27B = GEMMA2 | {"query_pre_attn_scalar": 144}
GEMMA3 = {"model_type": "gemma3_text", "rms_norm_eps": 1e-6, "sliding_window": 512}
GEMMA3_4B = GEMMA3 | {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8}}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}  # not read
PHI4 = {"model_type": "phi3", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": LONGROPE}
PHI4 |= {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096}
SIZES = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim tie_word_embeddings max_position_embeddings""".split()
# A model whose name has -Instruct, -Base, -it or -pt at its end or before its version has the same
# sizes. The number of positions is the smallest of all variants.
ROWS: dict[str, tuple[Any, ...]] = {
    "Qwen/Qwen2.5-0.5B": (QWEN2, 151936, 896, 4864, 24, 14, 2, 64, True, 32768),
    "Qwen/Qwen2.5-1.5B": (QWEN2, 151936, 1536, 8960, 28, 12, 2, 128, True, 32768),
    "Qwen/Qwen2.5-3B": (QWEN2, 151936, 2048, 11008, 36, 16, 2, 128, True, 32768),
    "Qwen/Qwen2.5-7B": (QWEN2, 152064, 3584, 18944, 28, 28, 4, 128, False, 32768),
    "Qwen/Qwen2.5-14B": (QWEN2, 152064, 5120, 13824, 48, 40, 8, 128, False, 32768),
    "Qwen/Qwen3-0.6B": (QWEN3, 151936, 1024, 3072, 28, 16, 8, 128, True, 32768),
    "Qwen/Qwen3-1.7B": (QWEN3, 151936, 2048, 6144, 28, 16, 8, 128, True, 32768),
    "Qwen/Qwen3-4B": (QWEN3, 151936, 2560, 9728, 36, 32, 8, 128, True, 32768),
    "Qwen/Qwen3-4B-Instruct-2507": (QWEN3_2507, 151936, 2560, 9728, 36, 32, 8, 128, True, 262144),
    "Qwen/Qwen3-8B": (QWEN3, 151936, 4096, 12288, 36, 32, 8, 128, False, 32768),
    "Qwen/Qwen3-30B-A3B": (QWEN3_MOE, 151936, 2048, 6144, 48, 32, 4, 128, False, 32768),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (
        *(QWEN3_MOE_2507, 151936, 2048, 6144, 48, 32, 4, 128, False, 262144),
    ),
    "Qwen/Qwen3.5-0.8B": (QWEN35_16, 248320, 1024, 3584, 24, 8, 2, 256, True, 262144),
    "Qwen/Qwen3.5-2B": (QWEN35_16, 248320, 2048, 6144, 24, 8, 2, 256, True, 262144),
    "Qwen/Qwen3.5-4B": (QWEN35_32, 248320, 2560, 9216, 32, 16, 4, 256, True, 262144),
    "Qwen/Qwen3.5-9B": (QWEN35_32, 248320, 4096, 12288, 32, 16, 4, 256, False, 262144),
    "Qwen/Qwen3.5-27B": (QWEN35_48, 248320, 5120, 17408, 64, 24, 4, 256, False, 262144),
    "Qwen/Qwen3.5-35B-A3B": (QWEN35_MOE, 248320, 2048, None, 40, 16, 2, 256, False, 262144),
    "Qwen/Qwen3.6-35B-A3B": (QWEN35_MOE, 248320, 2048, None, 40, 16, 2, 256, False, 262144),
    "meta-llama/Llama-3.2-1B": (LLAMA32, 128256, 2048, 8192, 16, 32, 8, 64, True, 131072),
    "meta-llama/Llama-3.2-3B": (LLAMA32, 128256, 3072, 8192, 28, 24, 8, 128, True, 131072),
    "mistralai/Mistral-7B-v0.3": (MISTRAL, 32768, 4096, 14336, 32, 32, 8, 128, False, 32768),
    "HuggingFaceTB/SmolLM2-135M": (SMOLLM2, 49152, 576, 1536, 30, 9, 3, 64, True, 8192),
    "HuggingFaceTB/SmolLM2-360M": (SMOLLM2, 49152, 960, 2560, 32, 15, 5, 64, True, 8192),
    "HuggingFaceTB/SmolLM2-1.7B": (SMOLLM2_LARGE, 49152, 2048, 8192, 24, 32, 32, 64, True, 8192),
    "HuggingFaceTB/SmolLM3-3B": (SMOLLM3, 128256, 2048, 11008, 36, 16, 4, 128, True, 65536),
    "microsoft/Phi-4-mini-instruct": (PHI4, 200064, 3072, 8192, 32, 24, 8, 128, True, 131072),
    "google/gemma-2-2b": (GEMMA2, 256000, 2304, 9216, 26, 8, 4, 256, True, 8192),
    "google/gemma-2-9b": (GEMMA2, 256000, 3584, 14336, 42, 16, 8, 256, True, 8192),
    "google/gemma-2-27b": (GEMMA2_27B, 256000, 4608, 36864, 46, 32, 16, 128, True, 8192),
    "google/gemma-3-270m": (GEMMA3, 262144, 640, 2048, 18, 4, 1, 256, True, 32768),
    "google/gemma-3-1b": (GEMMA3, 262144, 1152, 6912, 26, 4, 1, 256, True, 32768),
    "google/gemma-3-4b": (GEMMA3_4B, 262208, 2560, 10240, 34, 8, 4, 256, True, 131072),
}
KNOWN_MODELS = {  # the values of their config.json
    name: dict(zip(SIZES, sizes, strict=True)) | others for name, (others, *sizes) in ROWS.items()
}
ENDINGS = re.compile("-(Instruct|Base|it|pt)(?=$|-v)")


def known_config(path: str, revision: str = "") -> ModelConfig:
    """The ModelConfig of a folder, of a model in KNOWN_MODELS, or of a hub id, without weights."""
    name = ENDINGS.sub("", path)
    known = [full for full in KNOWN_MODELS if name in (full, full.rpartition("/")[2])]
    if os.path.isdir(path) or revision or not known:
        folder = hf.fetch_model(path, revision, ["config.json"])
        values = hf.read_json(folder / "config.json")
        model = parse_config(folder / "config.json", values)
        return dataclasses.replace(model, has_score="Sequence" in str(values.get("architectures")))
    return parse_config(Path(known[0]), KNOWN_MODELS[known[0]])
