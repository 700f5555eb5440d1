"""The dtype, meshes, attention and layer loop of training and of the rollout, and the FLOPs of an
update.

Dimensions: P prompts of a step, K completions per prompt, S prompt tokens, T completion tokens, V
vocabulary, D model, L layers, H query heads, h head_dim.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from infra.chips import CHIPS, chip_of, has_bfloat16, usable_memory_bytes
from infra.mistakes import UserMistake
from infra.sizes import Sizes, widest_row
from model.layout import (
    ROLLOUT_BATCH_AXES,
    TRAIN_BATCH_AXES,
    Layout,
    devices_per_process,
    make_mesh,
    mesh_text,
)
from model.linear_attention import CHUNK
from model.network import ComputeConfig
from model.params import FULL, LINEAR, ModelConfig, param_table, raise_if_indivisible
from model.splash import LANES, MAX_COMPLETION_TOKENS, MAX_ROW_TOKENS

# The longest time that a chip may take to read its weights once, as every decoded token requires.
# With more chips each one reads less, but communication increases.
READ_SECONDS = 1.25e-3
# The largest fraction of a device's memory that weights may occupy during sampling.
MEMORY_SHARE = 0.4


@dataclasses.dataclass(frozen=True, match_args=False)  # read only, like the fields of Config
class ComputeSettings(Protocol):
    """The settings that say how the model is computed, as config.Config describes them."""

    dtype: str
    remat: str
    mesh_shape: str
    rollout_mesh_shape: str
    rollout_backend: str
    sglang_jax_dtype: str
    attention_impl: str
    policy_loss_impl: str
    lora_base_copy: str
    num_pre_q: int
    max_length_sample: int
    environment_class: str


def plan_compute(
    cfg: ComputeSettings, model: ModelConfig, sizes: Sizes, S: int, devices: Sequence[jax.Device]
) -> tuple[ComputeConfig, ComputeConfig, str]:
    """The ComputeConfig of training, that of the rollout, and the reason for the mesh that
    ROLLOUT_MESH_SHAPE=auto has chosen.

    devices: they need not exist on this machine. Raises UserMistake for settings that the devices
    or the model do not support.
    """
    platform = devices[0].platform
    if platform == "tpu" and not cfg.environment_class:  # a text of `reset` may exceed S
        model = drop_idle_windows(model, S + cfg.max_length_sample)
    dtype = cfg.dtype
    if dtype == "auto":
        dtype = "bfloat16" if has_bfloat16(devices[0]) else "float32"
    if cfg.policy_loss_impl == "pallas" and (platform, dtype) != ("tpu", "bfloat16"):
        raise UserMistake(
            f"POLICY_LOSS_IMPL=pallas needs DTYPE=bfloat16 on a TPU, and this run has {dtype} on "
            f"{platform}; set POLICY_LOSS_IMPL=jax, which gives the same numbers"
        )

    itemsize = jnp.dtype(dtype).itemsize
    auto: tuple[int, ...] = (1, -1, 1)
    heads = {"query heads": model.num_heads}
    if model.linear:
        heads["key heads of linear layers"] = model.linear.key_heads
    if model.lora:  # adapters need little memory, so the base is split only as far as it has to be
        common = math.gcd(*heads.values())
        auto = (-1, 1, rollout_tp(model, devices, itemsize, math.inf, common)[0])
    mesh = make_mesh("MESH_SHAPE", cfg.mesh_shape, devices, auto)
    raise_if_indivisible("MESH_SHAPE", model, mesh)
    for name, count in heads.items():
        if count % mesh.shape["tp"]:  # in training each device has complete heads
            raise UserMistake(
                f"MESH_SHAPE (dp,fsdp,tp) = {mesh_text(mesh)}: tp={mesh.shape['tp']} does not "
                f"divide the model's {count} {name}; use a smaller tp and more dp"
            )
    layout = Layout(mesh, TRAIN_BATCH_AXES)
    processes, T = len(devices) // devices_per_process(devices), cfg.max_length_sample
    sequences = sizes.micro_batch_size * processes // layout.batch_shards  # of the widest row
    chunk = CHUNK if model.linear else 1
    row_tokens = sum(widest_row(sequences, cfg.num_pre_q, S, T, chunk=chunk, unit=LANES))
    impl = choose_attention(cfg.attention_impl, model, platform, mesh.shape["tp"], row_tokens, T)
    training = ComputeConfig(
        model,
        dtype=jnp.dtype(dtype),
        layout=layout,
        remat=cfg.remat,
        attention_impl=impl,
        layer_loop=choose_layer_loop(platform, cfg.remat),
    )
    if cfg.rollout_backend == "sglang_jax":  # the ComputeConfig of the weights that the engine gets
        name = dtype if cfg.sglang_jax_dtype == "auto" else cfg.sglang_jax_dtype
        rollout = training._replace(dtype=jnp.dtype(name), remat="none", layer_loop="unroll")
        merged, of = dataclasses.replace(model, lora=None), " of a host" * (processes > 1)
        return training, rollout._replace(model=merged), f"; the engine has all devices{of} on tp"

    tp, reason = rollout_tp(model, devices, itemsize)
    auto, shares = (-1, 1, tp), bool(model.lora) and not copies_base(cfg, training, devices, tp)
    if shares:
        auto, reason = tuple(layout.mesh.shape.values()), "the base is in memory once"
    mesh = make_mesh("ROLLOUT_MESH_SHAPE", cfg.rollout_mesh_shape, devices, auto)
    shares = shares and mesh == layout.mesh
    raise_if_indivisible("ROLLOUT_MESH_SHAPE", model, mesh)
    rollout = training._replace(
        layout=Layout(mesh, ROLLOUT_BATCH_AXES),
        remat="none",  # the rollout has no backward
        attention_impl="xla",  # splash needs rows whose slots are multiples of LANES
        layer_loop=training.layer_loop if shares else choose_layer_loop(platform, "none"),
        shares_base=shares,
    )
    return training, rollout, f"; {reason}" if cfg.rollout_mesh_shape == "auto" else ""


def plan_frozen(
    cfg: ComputeSettings, model: ModelConfig, sizes: Sizes, S: int, devices: Sequence[jax.Device]
) -> ComputeConfig:
    """How a model that only judges is computed: on MESH_SHAPE and in the dtype of training. S: 0:
    its rows have any length, which splash cannot take. Raises UserMistake."""
    # It samples nothing, so the rollout's settings need not suit it.
    attention_impl = cfg.attention_impl if S else "xla"
    cfg = dataclasses.replace(
        cfg, rollout_mesh_shape="auto", rollout_backend="naive", attention_impl=attention_impl
    )
    compute, *_ = plan_compute(cfg, model, sizes, S, devices)
    return compute if S else compute._replace(model=model)


def gib_per_device(compute: ComputeConfig) -> float:
    mesh = compute.layout.mesh
    shards = mesh.shape["fsdp"] * mesh.shape["tp"]
    return num_params(compute.model) * compute.dtype.itemsize / shards / 2**30


def copies_base(
    cfg: ComputeSettings, training: ComputeConfig, devices: Sequence[jax.Device], tp: int
) -> bool:
    """Whether the rollout has a copy of LoRA's base, which is split over `tp` devices.

    auto: on a GPU, where the scan over the shared base copies every layer for every token, if both
    bases take at most 40 % of a device's memory.
    """
    if cfg.lora_base_copy != "auto":
        return cfg.lora_base_copy == "1"
    if devices[0].platform != "gpu" or training.layer_loop != "scan":
        return False
    base, axes = params_bytes(training.model, training.dtype.itemsize), training.layout.mesh.shape
    both = base / (axes["fsdp"] * axes["tp"]) + base / tp
    return both <= MEMORY_SHARE * usable_memory_bytes(own_device(devices))


def raise_if_too_long(max_length_sample: int, model: ModelConfig, longest: int) -> None:
    """Raises UserMistake if the model has too few positions for a prompt of `longest` tokens."""
    length, limit = longest + max_length_sample, model.max_positions - max_length_sample
    if length > model.max_positions:
        shorter = f" or set MAX_PROMPT_LENGTH={limit}" if limit > 0 else ""
        raise UserMistake(
            f"MAX_LENGTH_SAMPLE={max_length_sample} after the longest prompt makes {length} "
            f"tokens, and the model has {model.max_positions} positions; lower it{shorter}"
        )


def rollout_mesh_text(cfg: ComputeSettings, rollout: ComputeConfig) -> str:
    """The mesh of the rollout, as ROLLOUT_MESH_SHAPE writes it; an engine has all devices of
    its host on tp."""
    mesh = rollout.layout.mesh
    if cfg.rollout_backend == "naive":
        return mesh_text(mesh)
    local = devices_per_process([*mesh.devices.flat])
    return f"{mesh.size // local},1,{local}"


def choose_attention(
    setting: str, model: ModelConfig, platform: str, tp: int, row: int, completion: int
) -> str:
    """xla or splash; raises UserMistake if ATTENTION_IMPL=splash cannot run here.

    row, completion: the most tokens of a row and of a completion in training.
    """
    obstacle = ""  # to splash
    if platform != "tpu":
        obstacle = f"it is a TPU kernel, and this is {platform}"
    elif model.head_dim % 64:
        obstacle = f"it needs a head_dim that is a multiple of 64, not {model.head_dim}"
    elif model.has_windows():
        obstacle = "it has no sliding window, and one of the model's is shorter than a sequence"
    elif model.num_kv_heads % tp:
        obstacle = f"MESH_SHAPE's tp={tp} does not divide {model.num_kv_heads} kv heads"
    elif row > MAX_ROW_TOKENS or completion > MAX_COMPLETION_TOKENS:
        obstacle = f"rows may have {MAX_ROW_TOKENS} tokens and completions "
        obstacle += f"{MAX_COMPLETION_TOKENS}, and here they have up to {row} and {completion}"
    if setting == "splash" and obstacle:
        raise UserMistake(f"ATTENTION_IMPL=splash: {obstacle}; leave it at auto")
    return setting if setting != "auto" else "xla" if obstacle else "splash"


def drop_idle_windows(model: ModelConfig, tokens: int) -> ModelConfig:
    """The model without the windows that hide nothing of a prompt and a completion, which have at
    most this number of input tokens. splash has no windows."""
    variants = [x if (x.window or 0) < tokens else x._replace(window=None) for x in model.variants]
    return dataclasses.replace(model, variants=tuple(variants))


def choose_layer_loop(platform: str, remat: str) -> str:
    """scan or unroll.

    Except on TPUs, a scan copies each layer's weights and caches out of the stacked arrays. With
    REMAT unrolled layers are not worth it: on a CPU XLA would not recompute what REMAT drops, and
    on a GPU they move as many bytes and REMAT=full saves less.
    """
    return "scan" if platform == "tpu" or remat != "none" else "unroll"


# ---- Tensor parallelism --------------------------------------------------------------------------


def rollout_tp(
    model: ModelConfig,
    devices: Sequence[jax.Device],
    itemsize: int,
    seconds: float = READ_SECONDS,
    heads: int = 0,
) -> tuple[int, str]:
    """The tp of decoding, and the reason for it. It is the smallest power of two with which the
    weights take at most 40 % of a device's memory, and on a TPU are read in `seconds`; or else the
    largest that divides the devices of a host, `heads` and every dimension that tp splits.

    itemsize: bytes of a weight. heads: 0 if tp need not divide the heads.
    """
    device = own_device(devices)
    weights, limit = params_bytes(model, itemsize), MEMORY_SHARE * usable_memory_bytes(device)
    if (chip := chip_of(device)) and chip in CHIPS.values():
        limit = min(limit, seconds * chip.hbm_gbps * 1e9)
    leaves = jax.tree.leaves(param_table(model))
    pairs = [pair for leaf in leaves for pair in zip(leaf.shape, leaf.axes, strict=True)]
    split_sizes = [size for size, axes in pairs if axes and "tp" in axes]
    common, tp = math.gcd(devices_per_process(devices), heads, *split_sizes), 1
    while weights / tp > limit and common % (2 * tp) == 0:
        tp *= 2
    return tp, f"{weights / tp / 1e9:.3g} GB of weights on a device"


def own_device(devices: Sequence[jax.Device]) -> jax.Device:
    """A device of this process, if it has one: only local devices report their memory."""
    return next((d for d in devices if d.process_index == jax.process_index()), devices[0])


# ---- The sizes of a model, and the work of an update ---------------------------------------------


def num_params(model: ModelConfig) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_table(model)))


def params_bytes(model: ModelConfig, itemsize: int) -> int:
    """The bytes of the weights, adapters included, without the few scales of an int8 base.
    itemsize: bytes of a weight that is not int8."""
    leaves = jax.tree.leaves(param_table(model))
    return sum(math.prod(leaf.shape) * (1 if leaf.int8 else itemsize) for leaf in leaves)


def update_flops(model: ModelConfig, prompts: np.ndarray, completions: np.ndarray) -> float:
    """The FLOPs of forward and backward of all sequences of a step, without recomputation.

    prompts: [P] tokens; each prompt is computed once for its completions. completions: [P, K]
    tokens.
    """
    S, T, attention = prompts, completions, attention_flops(model, prompts, completions)
    attention += linear_attention_flops(model) * (S.sum() + T.sum())
    layers = jax.tree.leaves(param_table(model).layers)
    matrices = sum(math.prod(leaf.shape) for leaf in layers if leaf.kind in ("matrix", "router"))
    if model.moe:
        experts = sum(math.prod(leaf.shape) for leaf in layers if leaf.kind == "experts")
        matrices += experts * model.moe.top_k // model.moe.experts
    head = model.vocab_size * model.hidden_size * T.sum()
    passes = 2 if model.lora else 3  # matrices of the base have no gradient
    return float(passes * 2 * (matrices * (S.sum() + T.sum()) + head) + 3 * attention)


def attention_flops(model: ModelConfig, prompts: np.ndarray, completions: np.ndarray) -> float:
    """The FLOPs of scores and values in a forward, with the lengths of update_flops."""
    S, T = prompts[:, None], completions  # [P, 1], [P, K]
    # The pairs of a query and a key. Sliding windows are ignored: with them these are too many.
    pairs = (S**2 / 2).sum() + (T * S + T**2 / 2).sum()
    return 4 * model.num_heads * model.head_dim * model.count_layers(FULL) * pairs


def linear_attention_flops(model: ModelConfig) -> float:
    """The FLOPs of the delta rule for a token in forward, in all layers."""
    if (sizes := model.linear) is None:
        return 0.0
    dk, dv = sizes.key_dim, sizes.value_dim
    # The products of keys and queries with the keys of the chunk.
    key_head_flops = 4 * CHUNK * dk
    # The triangular system, the product with the corrections, and three with the state.
    value_head_flops = CHUNK * (dk + dv) + 2 * CHUNK * dv + 6 * dk * dv
    layer_flops = sizes.key_heads * key_head_flops + sizes.value_heads * value_head_flops
    return model.count_layers(LINEAR) * layer_flops
