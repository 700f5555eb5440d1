"""The device programs of a run with shapes as arguments, so that they can be compiled, not run.

planner.py and the tests compile these programs for TPU slices and GPUs that are not here.

Dimensions: R sequences of a rollout pass or of a micro-batch, over all processes, G = R/share
prompts, each shared by `share` sequences, S prompt tokens without the last, T completion tokens.
"""

import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from config import Config
from models.draw import Sampling, support_size
from models.model import Compute, abstract_params, on_base
from models.placement import limits_of
from runtime.chips import GPUS, SLICES
from runtime.mistakes import UserMistake, in_one_line
from runtime.packing import MicroBatch, widest
from runtime.sizes import MICRO_SIZES, PASS_SIZES, Sizes, eval_questions, prompt_share
from sampling import (
    Stopping,
    begin,
    decode,
    drop_sequences,
    prefill,
    smaller_batches,
    sync_weights,
)
from startup import eval_sampling_of, objective_of, optimizer_of, sampling_of
from update import abstract_state, apply_update, compute_logps_and_entropies, micro_step

GPU_PLUGIN = "jax_plugins.xla_cuda13"
# What the compiler has to know of an H100.
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


class Plan(NamedTuple):
    """The settings, sizes and layouts that the shapes of a run's programs follow from."""

    cfg: Config
    sizes: Sizes
    training: Compute
    rollout: Compute
    processes: int
    S: int  # prompt tokens without the last
    mesh_reason: str  # why ROLLOUT_MESH_SHAPE=auto is what it is

    def local_devices(self) -> int:
        return self.rollout.layout.mesh.size // self.processes


class Program(NamedTuple):
    """A program of the run, as the run calls it, and the memory that it leaves to other arrays."""

    function: Any  # jitted
    arguments: tuple
    static: dict[str, Any]  # keyword arguments
    rest: int  # bytes per device of arrays that the run keeps meanwhile, beside the arguments
    sizes: tuple[str, ...] = ()  # the settings that make it smaller, as `remedy` takes them


def slice_devices(name: str) -> Sequence[jax.Device]:
    """The devices of a TPU slice that is not here, or the only one of a GPU.

    Raises UserMistake if the name is unknown or its compiler is not installed.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read these programs again
    if name in GPUS:
        return gpu_devices(name)
    if name not in SLICES:
        known = ", ".join([*SLICES, *GPUS])
        raise UserMistake(f"{name!r} is not a slice or a GPU known here; these are: {known}")
    if importlib.util.find_spec("libtpu") is None:
        raise UserMistake('the TPU compiler is not installed: pip install "jax[tpu]"')
    # libtpu asks which host this is, and lets only one process load it; compiling needs neither.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v6e-8"}
    (shape, options), chip = SLICES[name], name.partition("-")[0]
    return topologies.get_topology_desc(f"{chip}:{shape}", "tpu", **options).devices


def gpu_devices(name: str) -> Sequence[jax.Device]:
    """The only device of a GPU that is not here. Its compiler makes programs for an H100, whatever
    the name, and chooses kernels without timing them.

    Raises UserMistake if the compiler is not installed, or fails.
    """
    install = f'the GPU compiler is not installed: pip install "jax[cuda13]=={jax.__version__}"'
    plugin = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(GPU_PLUGIN)
    if not plugin:
        raise UserMistake(install)
    folder = Path(plugin.submodule_search_locations[0]).parents[1] / "nvidia" / "cu13"
    flags = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={folder}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    target = f'{H100} device_description_str: "{GPUS[name].kinds[0]}"'
    try:
        options = {"target_config": target, "topology": "1x1x1"}
        return topologies.get_topology_desc(name, "cuda", **options).devices
    except Exception as error:  # it is no public part of jax, and may raise anything
        raise UserMistake(f"{install} ({in_one_line(error)})") from None


def array(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array on a mesh; axes: the mesh axis or axes that split each dimension."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def bytes_of(tree: Any) -> int:
    """The bytes per device of the arrays among the leaves."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]
    shapes = [x.sharding.shard_shape(x.shape) if x.sharding else x.shape for x in arrays]
    sizes = [math.prod(shape) for shape in shapes]
    return sum(n * x.dtype.itemsize for n, x in zip(sizes, arrays, strict=True))


def programs_of(plan: Plan) -> dict[str, Program]:
    """The programs of the run by their names, in the order of a step."""
    cfg, training, rollout = plan.cfg, plan.training, plan.rollout
    model, mesh = training.model, training.layout.mesh
    state = abstract_state(model, mesh, optimizer_of(cfg))
    base, reference = None, None
    if model.lora:
        base = abstract_params(model, mesh, training.dtype, training.layer_loop)
        base = base.replace(adapters=None)
    if cfg.beta > 0:  # with LoRA it has the same base
        reference = state.params if base else abstract_params(model, mesh, training.dtype)
    params, grads = on_base(base, state.params), state.params
    kept = bytes_of((state, base, reference))
    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    copied = state.params if rollout.shares_base else params
    rest = kept - bytes_of(copied)
    if base and not rollout.model.lora:  # an engine copies merged weights, a second base
        copied, rest = base, kept
    found = {"sync_weights": Program(sync_weights(rollout), (copied,), {}, rest)}
    if cfg.rollout_backend == "naive":  # an engine has programs of its own
        beside = kept - rollout.shares_base * bytes_of(base)  # the rollout reads the base too
        prompts, K = plan.sizes.prompt_batch_size, cfg.num_pre_q
        found |= rollout_programs(plan, plan.S, prompts, K, sampling_of(cfg), beside)
        if cfg.turns() > 1:  # The last turn has nearly all of the completion in its prompt.
            S = plan.S + cfg.max_length_sample
            of_turn = rollout_programs(plan, S, prompts * K, 1, sampling_of(cfg), beside)
            found |= {f"turn_{name}": of_turn[name] for name in ("prefill", "decode")}
        if cfg.evaluates():
            K = cfg.eval_samples
            prompts = eval_questions(plan.sizes, cfg.num_pre_q, K, plan.local_devices())
            of_eval = rollout_programs(plan, plan.S, prompts, K, eval_sampling_of(cfg), beside)
            found |= {f"eval_{name}": program for name, program in of_eval.items()}

    batch = micro_batch(plan)
    if cfg.beta > 0 or cfg.needs_policy_logps():
        scored = on_base(base, reference) if reference else params
        found["compute_logps_and_entropies"] = Program(
            compute_logps_and_entropies,
            (scored, batch, cfg.temperature, training),
            {},
            kept - bytes_of(scored),
            MICRO_SIZES,
        )
    counts = dict.fromkeys(("num_tokens", "num_sequences", "num_top_tokens"), scalar)
    grad_sum = grads if plan.sizes.grad_accum_steps > 1 else None
    static = {"objective": objective_of(cfg), "temperature": cfg.temperature, "compute": training}
    found["micro_step"] = Program(
        micro_step, (params, grad_sum, batch, counts), static, kept - bytes_of(params), MICRO_SIZES
    )
    arguments = state, grads, scalar, optimizer_of(cfg), model
    found["optimizer_step"] = Program(apply_update, arguments, {}, bytes_of((base, reference)))
    return found


def rollout_programs(
    plan: Plan, S: int, prompts: int, K: int, sampling: Sampling, kept: int
) -> dict[str, Program]:
    """The programs of a rollout pass. S: prompt tokens without the last. prompts: of each process.
    K: completions of each prompt. kept: bytes per device of what the run keeps beside the weights
    that sample."""
    rollout, T = plan.rollout, plan.cfg.max_length_sample
    mesh, batch_axes = rollout.layout
    shards = rollout.layout.batch_shards
    R = prompts * K * plan.processes
    G = R // prompt_share(K, R // shards)
    weights = abstract_params(rollout.model, mesh, rollout.dtype, rollout.layer_loop)
    ids_and_mask = (array(mesh, (G, S + 1), jnp.int32, batch_axes),) * 2
    stacked = (None,) * (rollout.layer_loop == "scan")  # the layers come before the sequences

    def placed(tree: Any, *axes: Any) -> Any:
        """The arrays of the tree on the mesh; a scalar is on every device."""
        return jax.tree.map(lambda x: array(mesh, x.shape, x.dtype, *axes[: x.ndim]), tree)

    static = {"sampling": sampling, "stopping": Stopping(T, stop_ids=(0, 1), pad_id=0)}
    sequence_ids, number = array(mesh, (R,), jnp.int32, batch_axes), array(mesh, (), jnp.int32)
    key = jax.eval_shape(jax.random.key, 0)
    prefix = prefill.eval_shape(weights, rollout, *ids_and_mask)
    numbers = sequence_ids, sequence_ids
    state = begin.eval_shape(rollout, *ids_and_mask, prefix, *numbers, key, width=T, **static)
    state = placed(state, batch_axes)._replace(
        prompt=placed(state.prompt, *stacked, batch_axes),
        completion=placed(state.completion, *stacked, batch_axes),
    )
    arguments = weights, rollout, state, number
    found = {
        "prefill": Program(prefill, (weights, rollout, *ids_and_mask), {}, kept, PASS_SIZES),
        "decode": Program(decode, arguments, static, kept, PASS_SIZES),
    }
    if plan.cfg.drops_ended() and R > shards:
        size = smaller_batches(R // shards)[0]  # the first time that sequences leave the batch
        kept += bytes_of(weights)
        found["drop_sequences"] = Program(
            drop_sequences, (rollout, state), {"size": size}, kept, PASS_SIZES
        )
    return found


def micro_batch(plan: Plan) -> MicroBatch:
    """The shapes of a micro-batch of the longest prompts and completions."""
    cfg, layout, T = plan.cfg, plan.training.layout, plan.cfg.max_length_sample
    limits = limits_of(cfg, plan.sizes, plan.training, plan.processes, plan.S)
    of_device, S, C, Q, _ = widest(limits)
    X = layout.batch_shards * of_device

    def batch(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return array(layout.mesh, shape, dtype, layout.batch_axes)

    row, tokens = batch(jnp.int32, X, S + C), batch(jnp.int32, X * Q, T)
    logps = batch(jnp.float32, X * Q, T)
    sampling = sampling_of(cfg)
    U = support_size(sampling, plan.training.model.vocab_size)
    return MicroBatch(
        ids=row,
        positions=row,
        prompt=row,
        start=row,
        targets=batch(jnp.int32, X, C),
        places=batch(jnp.int32, X, Q, T),
        sequences=batch(jnp.int32, X * Q),
        completion_mask=tokens,
        sampling_logps=logps,
        advantages=batch(jnp.float32, X * Q),
        old_logps=logps if plan.sizes.updates_per_step > 1 else None,
        ref_logps=logps if cfg.beta > 0 else None,
        top_mask=tokens if cfg.top_entropy_quantile < 1 else None,
        support=batch(jnp.int32, X, C, U) if sampling.replay else None,
    )
