"""Tells whether a run fits a TPU slice or a GPU, without the device and without weights.

    python train_grpo.py --plan v6e-8        # the environment and --config are as for the run

The device programs of the run are compiled with libtpu or with XLA's compiler for GPUs, for the
layouts that they have in the run, and their memory is read from the compiled programs. The exit
code is 0 if the run fits, 3 if it does not, and 2 if the settings are wrong or the compiler is
missing.
"""

import dataclasses
import math
import re
import time
from typing import NamedTuple, NoReturn

import jax

from config import Config
from models.lora import lora_of
from models.placement import how_to_compute, num_params, rollout_mesh, stop_if_too_long
from rollout_sglang import PAGE_TOKENS, pool_of, stop_if_unable
from runtime.chips import GPUS, OUT_OF_MEMORY_CODE, memory_bytes, remedy
from runtime.layout import local_count, mesh_text
from runtime.mistakes import UserMistake, fail
from runtime.sizes import derive, prompt_width
from startup import with_kernel
from tools import known_models
from tools.programs import Plan, Program, bytes_of, programs_of, slice_devices

GIB = 2**30
ASSUMED_PROMPT = 512  # tokens, if neither MAX_PROMPT_LENGTH nor GLOBAL_LENGTH is set


class Memory(NamedTuple):
    """The memory of a program, in bytes per device."""

    arguments: float
    temporaries: float  # with the outputs that do not reuse the memory of arguments
    rest: float  # other arrays of the run, which stay in memory meanwhile

    @property
    def total(self) -> float:
        return sum(self)


def plan_and_exit(cfg: Config, name: str) -> NoReturn:
    """Prints the plan of the run with these settings on the slice `name`, and ends the program."""
    try:
        raise SystemExit(print_plan(make_plan(cfg, name), name))
    except UserMistake as error:
        fail(error)


def make_plan(cfg: Config, name: str) -> Plan:
    """The plan of the run. Raises UserMistake for settings that do not suit the model, or the slice
    with this name."""
    devices = slice_devices(name)
    hosts = len(devices) // local_count(devices)
    sizes = derive(cfg, hosts, len(devices) // hosts)
    model = known_models.config_of(cfg.model_path, cfg.model_revision)
    model = dataclasses.replace(model, lora=lora_of(cfg, model, None))
    longest = cfg.max_prompt_length or cfg.global_length or ASSUMED_PROMPT
    stop_if_too_long(cfg.max_length_sample, model, longest)
    if cfg.rollout_backend == "sglang_jax":
        if hosts > 1:
            raise UserMistake(f"ROLLOUT_BACKEND=sglang_jax runs on one host; {name} has {hosts}")
        stop_if_unable(cfg, model, longest, devices)
    S = prompt_width(longest, cfg.global_length) - 1
    training, rollout, reason = how_to_compute(cfg, model, sizes, S, devices)
    training = with_kernel(cfg, training, devices[0])
    return Plan(cfg, sizes, training, rollout, hosts, S, reason)


def print_plan(plan: Plan, name: str) -> int:
    """Prints the sizes and the layouts of the run, and the memory of its programs as they are
    compiled. Returns the exit code."""
    print_sizes(plan, name)
    print(
        "| GiB per device | arguments | temporaries | rest of run | total | fits | compiled in |\n"
        "|---|---|---|---|---|---|---|",
        flush=True,
    )
    limit = memory_bytes(plan.rollout.layout.mesh.devices.flat[0])
    programs, memories = programs_of(plan), {}
    if plan.cfg.rollout_backend == "sglang_jax":
        sync = programs["sync_weights"]
        memories["engine"] = engine_memory(plan, limit, bytes_of(sync.arguments) + sync.rest)
        print(f"| engine | {columns(memories['engine'], limit)} | not compiled |", flush=True)
    for program, how in programs.items():
        began = time.perf_counter()
        memories[program] = compiled(how)
        seconds = time.perf_counter() - began
        print(f"| {program} | {columns(memories[program], limit)} | {seconds:.0f} s |", flush=True)

    misfits = [program for program, memory in memories.items() if memory.total > limit]
    for program in misfits:
        hint = "Use more devices, or a lower SGLANG_JAX_MEM_FRACTION_STATIC"
        if program != "engine":
            where = plan.processes, plan.local_devices()
            hint = remedy(plan.cfg, plan.sizes, *where, programs[program].sizes)
        print(f"{program} does not fit. {hint}")
    most = max(memories, key=lambda program: memories[program].total)
    total = f"{memories[most].total / GIB:.2f} of {limit / GIB:.4g} GiB in {most}"
    print(f"{name}: {'DOES NOT FIT' if misfits else 'fits'}, {total}")
    return OUT_OF_MEMORY_CODE if misfits else 0


def print_sizes(plan: Plan, name: str) -> None:
    cfg, sizes, training = plan.cfg, plan.sizes, plan.training
    mesh, local = plan.rollout.layout.mesh, plan.local_devices()
    S = f"{plan.S}{'' if cfg.max_prompt_length else ' (assumed, as MAX_PROMPT_LENGTH=0)'}"
    print(
        f"{name}: {mesh.size} x {mesh.devices.flat[0].device_kind}, hosts={plan.processes}, "
        f"{cfg.model_path} of {num_params(training.model) / 1e9:.2f}B parameters\n"
        f"a step: {sizes.global_batch} sequences of {S} + {cfg.max_length_sample} tokens; "
        f"per device {sizes.prompt_batch_size * cfg.num_pre_q // local} in each of "
        f"{sizes.passes_per_step} passes, {sizes.micro_batch_size // local} in each of "
        f"{sizes.grad_accum_steps} micro-steps\n"
        f"mesh dp,fsdp,tp train={mesh_text(training.layout.mesh)} ({cfg.mesh_shape}) "
        f"rollout={rollout_mesh(cfg, plan.rollout)} ({cfg.rollout_mesh_shape}{plan.mesh_reason})\n"
        f"dtype={training.dtype} remat={training.remat} attention_impl={training.attention_impl} "
        f"policy_loss_impl={cfg.policy_loss_impl}",
        *["compiled for an H100, with the memory of this GPU"] * (name in GPUS),
        sep="\n",
        flush=True,
    )


def columns(memory: Memory, limit: float) -> str:
    """The memory of a program in GiB, and whether it fits, as columns of the table."""
    numbers = " | ".join(f"{x / GIB:.2f}" for x in (*memory, memory.total))
    fits = "yes" if memory.total <= 0.95 * limit else "barely"
    return f"{numbers} | {fits if memory.total <= limit else 'NO'}"


def engine_memory(plan: Plan, limit: float, rest: int) -> Memory:
    """What the serving engine holds while it samples: its weights, and a pool of keys and values,
    which together get at most SGLANG_JAX_MEM_FRACTION_STATIC of `limit`, the bytes of a device, or
    as much as the weights need."""
    cfg, model, rollout = plan.cfg, plan.rollout.model, plan.rollout
    devices = [*rollout.layout.mesh.devices.flat]
    _, tokens = pool_of(cfg, plan.sizes, plan.S + 1, devices)
    tokens += PAGE_TOKENS["tpu"]  # a page that holds what is not needed
    heads = max(model.num_kv_heads, len(devices))  # each device holds at least one
    width = 128 * math.ceil(model.head_dim / 128)
    numbers = tokens * model.num_layers * 2 * heads * width
    bytes_each = rollout.dtype.itemsize / len(devices)
    weights, pool = num_params(model) * bytes_each, numbers * bytes_each
    most = cfg.sglang_jax_mem_fraction_static * limit
    return Memory(0, max(weights, min(weights + pool, most)), rest)


def compiled(program: Program) -> Memory:
    """The memory of a program as compiled for the device, or what the compiler says that it would
    need if it is too large to be compiled."""
    try:
        lowered = program.function.lower(*program.arguments, **program.static)
        m = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        match = re.search(r"HLO temporaries \(([\d.]+)G\) exceeds", str(error))
        if not match:
            raise
        given = bytes_of(program.arguments)
        # This number of the compiler includes the arguments.
        return Memory(given, float(match.group(1)) * GIB - given, program.rest)
    made = m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return Memory(m.argument_size_in_bytes, made, program.rest)
