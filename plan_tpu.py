"""Does a run fit a TPU slice, and what does it cost there? Asked of the TPU's compiler, anywhere.

    python train_grpo.py --plan v6e-8        # environment and --config as for the run itself

Compiles the run's own programs, for the layouts in which they run, with libtpu; no TPU and no
weights are needed. Memory and collectives are the compiler's. Times are estimates (roofline.py).
Exit codes: 0 it fits, 3 it does not, 2 a mistake in the settings or no libtpu.
"""

import importlib.util
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import config as settings
import hf
import roofline
from attention import KV
from hlo import Collective, collectives
from layout import Layout, mesh_text
from model import ModelConfig, Params, param_shardings, param_table
from rollout import Sampling, decode, prefill, prompt_width, share
from sizes import Sizes, derive
from startup import layouts, objective_of, optimizer_of
from update import (
    Compute,
    Counts,
    MicroBatch,
    TrainState,
    micro_step,
    optimizer_step,
    score_tokens,
    sync_program,
    transform,
)

GIB = 2**30
ASSUMED_PROMPT = 512  # tokens, where neither MAX_PROMPT_LENGTH nor GLOBAL_LENGTH says
PROGRAMS = ("sync_weights", "prefill", "decode", "score_tokens", "micro_step", "optimizer_step")


class Plan(NamedTuple):
    """What the shapes of all programs follow from."""

    cfg: settings.Config
    config: ModelConfig
    sizes: Sizes
    compute: Compute  # of training
    rollout: Layout
    processes: int
    S: int  # prompt tokens but for the last
    T: int  # completion tokens


class Memory(NamedTuple):
    """Of one program, bytes per device."""

    arguments: float
    temporaries: float  # and outputs that do not replace arguments
    rest: float  # what else the run holds while it runs

    @property
    def total(self) -> float:
        return sum(self)


def slice_devices(name: str) -> Sequence[jax.Device]:
    """The devices of a slice that is not here, to compile for."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # else libtpu looks for the TPU's host
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nor does it need a TPU to itself
    jax.config.update("jax_platforms", "cpu")
    return topologies.get_topology_desc(**roofline.SLICES[name].topology).devices


def main(cfg: settings.Config, name: str) -> int:
    """Prints the plan of the run that cfg describes on that slice; returns the exit code."""
    if name not in roofline.SLICES:
        raise ValueError(f"--plan {name} is not one of {', '.join(roofline.SLICES)}")
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError('--plan needs the TPU compiler: pip install "jax[tpu]"')
    plan = make_plan(cfg, name)
    chip = roofline.CHIPS[roofline.SLICES[name].chip]
    limit = chip.hbm_gib * GIB
    print("\n| program | arguments GiB | temporaries | rest of the run | total | | compiled in s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    memories, texts = {}, {}
    for program in PROGRAMS:
        if program == "score_tokens" and not scores(cfg):
            print("| score_tokens | not run with BETA=0 and TOP_ENTROPY_QUANTILE=1 | | | | | |")
            continue
        began = time.perf_counter()
        memory, texts[program] = compiled(plan, program)
        memories[program] = memory
        row = " | ".join(f"{x / GIB:.2f}" for x in (*memory, memory.total))
        verdict = f"{'fits' if memory.total <= limit else 'DOES NOT FIT'} {chip.hbm_gib}"
        print(f"| {program} | {row} | {verdict} | {time.perf_counter() - began:.0f} |", flush=True)

    print_collectives(texts, plan)
    print_estimates(plan, name)
    misfits = [program for program, memory in memories.items() if memory.total > limit]
    for program in misfits:
        print(
            f"\n{program} does not fit: {'; or '.join(remedies(plan, program, limit))}", flush=True
        )
    most = max(memories, key=lambda program: memories[program].total)
    total = f"{memories[most].total / GIB:.2f} of {chip.hbm_gib} GiB in {most}"
    print(f"\n{name}: {'does not fit' if misfits else 'fits'}, {total}")
    return 3 if misfits else 0


def make_plan(cfg: settings.Config, name: str) -> Plan:
    """Raises ValueError for settings that do not suit the model or the slice; prints the layout."""
    devices, hosts = slice_devices(name), roofline.SLICES[name].hosts
    sizes = derive(cfg, hosts, len(devices) // hosts)
    config = hf.config_of(cfg.model_path, cfg.model_revision)
    longest = cfg.max_prompt_length or cfg.global_length or ASSUMED_PROMPT
    S, T = prompt_width(longest, cfg.global_length) - 1, cfg.max_length_sample
    compute, rollout, why = layouts(cfg, config, sizes, S, devices)
    assumed = (
        "" if cfg.max_prompt_length or cfg.global_length else " (assumed: no MAX_PROMPT_LENGTH)"
    )
    per_device = len(devices) // hosts
    print(
        f"{name}: {len(devices)} devices of {devices[0].device_kind} on {hosts} hosts, "
        f"{cfg.model_path} of {roofline.num_params(config) / 1e9:.2f}B parameters\n"
        f"per device: {sizes.prompt_batch_size * cfg.num_pre_q // per_device} sequences a pass, "
        f"{sizes.micro_batch_size // per_device} a micro-step, of {S}{assumed} + {T} tokens; "
        f"a step: {sizes.global_batch} sequences, {sizes.passes_per_step} passes, "
        f"{sizes.grad_accum_steps} micro-steps\n"
        f"mesh dp,fsdp,tp train={mesh_text(compute.layout.mesh)} ({cfg.mesh_shape}) "
        f"rollout={mesh_text(rollout.mesh)} ({cfg.rollout_mesh_shape}{why})\n"
        f"dtype={compute.dtype} remat={compute.remat} attention_impl={compute.attention_impl} "
        f"policy_loss_impl={compute.impl}",
        flush=True,
    )
    return Plan(cfg, config, sizes, compute, rollout, hosts, S, T)


def scores(cfg: settings.Config) -> bool:
    """True if the run has a forward pass of its own for logps."""
    return cfg.beta > 0 or cfg.top_entropy_quantile < 1


# ---- The programs --------------------------------------------------------------------------------


def array(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


def params_on(config: ModelConfig, mesh: Mesh, dtype: Any) -> Params:
    """Params of ShapeDtypeStruct."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=where),
        param_table(config), param_shardings(config, mesh),
    )  # fmt: skip


def train_state(plan: Plan) -> TrainState:
    """As init_state makes it, of ShapeDtypeStruct."""
    mesh, optimizer = plan.compute.layout.mesh, optimizer_of(plan.cfg)
    params = params_on(plan.config, mesh, jnp.dtype(plan.cfg.param_dtype))
    rule = transform(optimizer, plan.config)
    moments = optax.tree_utils.tree_map_params(
        rule, lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.sharding),
        jax.eval_shape(rule.init, params), params,
        transform_non_params=lambda x: array(mesh, x.shape, x.dtype),
    )  # fmt: skip
    return TrainState(params=params, opt_state=moments, step=array(mesh, (), jnp.int32))


def micro_batch(plan: Plan) -> MicroBatch:
    R = plan.sizes.micro_batch_size * plan.processes
    layout = plan.compute.layout
    G = R // share(plan.cfg.num_pre_q, R // layout.row_shards)

    def rows(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return array(layout.mesh, shape, dtype, layout.rows)

    prompt, tokens = rows(G, plan.S + 1, dtype=jnp.int32), rows(R, plan.T, dtype=jnp.int32)
    logps, cfg = rows(R, plan.T), plan.cfg
    return MicroBatch(
        prompt, prompt, tokens, tokens, logps, rows(R),
        old_logps=logps if cfg.ppo_epochs > 1 else None,
        ref_logps=logps if cfg.beta > 0 else None,
        top_mask=tokens if cfg.top_entropy_quantile < 1 else None,
    )  # fmt: skip


def call(plan: Plan, program: str) -> tuple[Any, tuple, dict[str, Any]]:
    """The jitted function, its arguments and its static ones, as the run calls it."""
    cfg, config, compute = plan.cfg, plan.config, plan.compute
    mesh, dtype = plan.rollout.mesh, compute.dtype
    state = train_state(plan)
    if program == "sync_weights":
        return sync_program(config, mesh, dtype), (state.params,), {}
    if program == "optimizer_step":
        grads = params_on(config, compute.layout.mesh, jnp.float32)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        static = {"optimizer": optimizer_of(cfg), "config": config}
        return optimizer_step, (state, grads, rate), static
    if program == "score_tokens":  # the reference, where there is one
        scored = state.params
        if cfg.beta > 0:
            scored = params_on(
                config, compute.layout.mesh, jnp.float32 if cfg.ref_sync_steps else dtype
            )
        return score_tokens, (scored, micro_batch(plan), cfg.temperature, compute), {}
    if program == "micro_step":
        grads = params_on(config, compute.layout.mesh, jnp.float32)
        counts = Counts(*[jax.ShapeDtypeStruct((), jnp.float32)] * 3)
        static = {"objective": objective_of(cfg), "temperature": cfg.temperature}
        return (
            micro_step,
            (state.params, grads, micro_batch(plan), counts),
            static | {"compute": compute},
        )

    B, G = rollout_rows(plan)
    rows = plan.rollout.rows
    weights = params_on(config, mesh, dtype)
    prompt = array(mesh, (G, plan.S + 1), jnp.int32, rows)
    static = {"dtype": dtype, "layout": plan.rollout}
    if program == "prefill":
        static["attention_impl"] = compute.attention_impl
        return prefill, (weights, config, prompt, prompt), static
    shape = (config.num_layers, G, config.num_kv_heads, plan.S, config.head_dim)
    kv = array(mesh, shape, dtype, None, rows)
    key = jax.eval_shape(lambda: jax.random.key(0))
    static |= {"max_new_tokens": plan.T, "stop_ids": (0, 1), "pad_id": 0}
    static["sampling"] = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p)
    row_ids = array(mesh, (B,), jnp.int32, rows)
    arguments = (weights, config, KV(kv, kv), prompt, prompt, row_ids, array(mesh, (), key.dtype))
    return decode, arguments, static


def rollout_rows(plan: Plan) -> tuple[int, int]:
    """B sequences and G prompt rows of a pass."""
    B = plan.sizes.prompt_batch_size * plan.cfg.num_pre_q * plan.processes
    return B, B // share(plan.cfg.num_pre_q, B // plan.rollout.row_shards)


def bytes_of(tree: Any) -> float:
    """Per device."""
    total = 0
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.ShapeDtypeStruct):
            shape = x.sharding.shard_shape(x.shape) if x.sharding else x.shape
            total += jnp.dtype(x.dtype).itemsize * int(jnp.prod(jnp.array(shape, float)))
    return total


def rest_of_run(plan: Plan, program: str) -> float:
    """Bytes per device of what the run keeps from step to step and the program is not given."""
    cfg, mesh, state = plan.cfg, plan.compute.layout.mesh, train_state(plan)
    dtype = jnp.float32 if cfg.ref_sync_steps else plan.compute.dtype
    reference = bytes_of(params_on(plan.config, mesh, dtype)) if cfg.beta > 0 else 0
    params, moments = bytes_of(state.params), bytes_of(state.opt_state)
    given = {
        "sync_weights": params,
        "score_tokens": reference or params,
        "micro_step": params,
        "optimizer_step": params + moments,
    }
    return params + moments + reference - given.get(program, 0)


def compiled(plan: Plan, program: str) -> tuple[Memory, str]:
    """The memory of a program by the TPU's compiler, and its HLO: "" if it cannot be compiled."""
    function, arguments, static = call(plan, program)
    rest = rest_of_run(plan, program)
    try:
        executable = function.lower(*arguments, **static).compile()
    except jax.errors.JaxRuntimeError as error:
        match = re.search(r"HLO temporaries \(([\d.]+)G\) exceeds", str(error))
        if not match:
            raise
        return Memory(bytes_of(arguments), float(match.group(1)) * GIB, rest), ""
    m = executable.memory_analysis()
    made = m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return Memory(m.argument_size_in_bytes, made, rest), executable.as_text()


# ---- What would fit ------------------------------------------------------------------------------


def remedies(plan: Plan, program: str, limit: float) -> list[str]:
    """Settings with which the program fits, each confirmed by compiling it."""
    sizes, local = plan.sizes, plan.compute.layout.mesh.size // plan.processes
    if program in ("micro_step", "score_tokens"):
        name, size, most = "micro_batch_size", sizes.micro_batch_size, sizes.local_batch
        setting, per = "TRAIN_PER_DEVICE_MICRO_BATCH_SIZE", 1
    elif program in ("prefill", "decode"):
        name, size, most = (
            "prompt_batch_size",
            sizes.prompt_batch_size,
            sizes.prompts_per_step // plan.processes,
        )
        setting, per = "ROLLOUT_PER_DEVICE_BATCH_SIZE", plan.cfg.num_pre_q
    else:
        return ["weights, gradient and optimizer state alone are too much; take a larger slice"]
    most, size = most // local, size // local  # per device
    choices = [n for n in range(1, size) if most % n == 0]

    def resized(n: int, T: int) -> Plan:
        return plan._replace(sizes=sizes._replace(**{name: n * local}), T=T)

    def tokens(n: int, T: int) -> float:
        rows = n * per
        return rows * T + rows // share(plan.cfg.num_pre_q, rows) * plan.S

    def total(n: int, T: int) -> float:
        return compiled(resized(n, T), program)[0].total

    # Memory grows by the token: a line through two small programs says which sizes to try.
    n, T = choices[0] if choices else size, plan.T
    samples = [(n, T), (choices[1], T) if len(choices) > 1 else (n, T // 2)]
    (x1, y1), (x2, y2) = ((tokens(*sample), total(*sample)) for sample in samples)
    room = x1 + (limit - y1) * (x2 - x1) / (y2 - y1)  # tokens

    def largest(
        sizes: Sequence[int], make: Callable[[int], tuple[int, int]]
    ) -> tuple[int, float] | None:
        for size in sorted(sizes, reverse=True):
            if tokens(*make(size)) <= room and (found := total(*make(size))) <= limit:
                return size, found
        return None

    lengths = range(128, plan.T, 128)
    found = {setting: largest(choices, lambda n: (n, plan.T)),
             "MAX_LENGTH_SAMPLE": largest(lengths, lambda T: (size, T))}  # fmt: skip
    texts = [f"{name}={x[0]} does, {x[1] / GIB:.2f} GiB" for name, x in found.items() if x]
    return texts or [f"no {setting} or MAX_LENGTH_SAMPLE does; take a larger slice"]


# ---- Collectives and estimates -------------------------------------------------------------------


def print_collectives(texts: dict[str, str], plan: Plan) -> None:
    """Of each program, by the loops they are in."""
    print("\ncollectives of a device, by the loops they run in, MiB sent each time:")
    for program, text in texts.items():
        found = collectives(text)
        by_loop: dict[tuple, list[Collective]] = defaultdict(list)
        for one in found:
            by_loop[one.loops].append(one)
        total = sum(one.times * one.sent_bytes for one in found) / GIB
        unit = "a token" if program == "decode" else "in all"
        print(f"  {program}: {total:.3f} GiB {unit}" if found else f"  {program}: none")
        for loops, ones in sorted(by_loop.items(), key=lambda item: len(item[0])):
            where = " ".join("every token" if n is None else f"x {n}" for n in loops) or "once"
            kinds: dict[str, list[float]] = defaultdict(list)
            for one in ones:
                kinds[one.kind].append(one.sent_bytes / 2**20)
            text = ", ".join(f"{len(mib)} {kind} {sum(mib):.2f}" for kind, mib in kinds.items())
            print(f"    {where}: {text}")


def print_estimates(plan: Plan, name: str) -> None:
    """Roofline times of the phases of a step in which every completion runs to its end."""
    where = roofline.SLICES[name]
    chip = roofline.CHIPS[where.chip]
    links = sum(2 if size >= 16 else 1 for size in where.shape if size > 1)
    config, cfg, sizes = plan.config, plan.cfg, plan.sizes
    n, tp = plan.rollout.mesh.size, plan.rollout.mesh.shape["tp"]
    B, G = rollout_rows(plan)
    batch = micro_batch(plan)
    rows = roofline.Rows(len(batch.completion_ids.shape) and batch.completion_ids.shape[0],
                         batch.prompt_ids.shape[0], plan.S, plan.T)  # fmt: skip
    mesh = plan.compute.layout.mesh
    static = {"remat": cfg.remat, "impl": plan.compute.impl,
              "device_kind": mesh.devices.flat[0].device_kind}  # fmt: skip
    train = roofline.train_pass(config, mesh.shape, rows, backward=True, **static)
    score = roofline.train_pass(config, mesh.shape, rows, backward=False, **static)
    passes, accum = sizes.passes_per_step, sizes.grad_accum_steps
    phases = {
        "weight sync": (roofline.sync(config, n, tp), 1),
        "prefill": (roofline.prefill(config, n, tp, G, plan.S), passes),
        "decode, a token": (
            roofline.decode_token(config, n, tp, B, G, plan.S, plan.T),
            passes * plan.T,
        ),
        "logps": (score, accum * ((cfg.beta > 0) + (cfg.top_entropy_quantile < 1))),
        "micro-step": (train, accum * cfg.ppo_epochs),
        "optimizer step": (roofline.optimizer_step(config, n, cfg.optimizer), cfg.ppo_epochs),
    }
    print(
        "\nroofline estimate of a device, every completion running to its end; not a measurement:"
    )
    print("| phase | times | TFLOP | HBM GB | ICI GB | compute ms | HBM ms | ICI ms | s per step |")
    print("|---|---|---|---|---|---|---|---|---|")
    step = update = 0.0
    for phase, (work, times) in phases.items():
        seconds = work.seconds(chip, links)
        # Decoding waits for every collective; elsewhere they run beside the matmuls.
        longest = seconds[1] + seconds[2] if phase.startswith("decode") else max(seconds)
        columns = [
            f"{x:.3g}" for x in (work.flops / 1e12, work.hbm_bytes / 1e9, work.ici_bytes / 1e9)
        ]
        columns += [f"{1e3 * x:.3g}" for x in seconds] + [f"{times * longest:.3g}"]
        print(f"| {phase} | {times} | {' | '.join(columns)} |")
        step += times * longest
        update += times * longest if phase in ("micro-step", "optimizer step") else 0
    flops = 3 * accum * cfg.ppo_epochs * roofline.model_flops(config, rows)
    peak = n * chip.tflops * 1e12
    tokens = sizes.global_batch * plan.T
    print(
        f"a step {step:.1f} s, {tokens / step / n:.0f} new tokens per second and device; "
        f"MFU of the update {flops / update / peak:.0%}, of the step {flops / step / peak:.0%}"
    )
