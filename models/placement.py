"""How a run computes its model: dtypes, kernels and meshes, with the smallest useful tensor
parallelism for training and decoding.

cfg is the Config of config.py.

Dimensions: n devices, R sequences and G prompts of a program over all devices, S prompt tokens, T
completion tokens, V vocabulary, D model.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.attention import LANES, MOST_PLACES, MOST_TOKENS
from models.model import Compute, ModelConfig, param_table, stop_if_indivisible
from runtime.chips import Work, chip_of, memory_bytes
from runtime.layout import (
    ROLLOUT_BATCH_AXES,
    TRAIN_BATCH_AXES,
    Layout,
    local_count,
    make_mesh,
    mesh_text,
)
from runtime.mistakes import UserMistake
from runtime.packing import Limits
from runtime.sizes import Sizes, prompt_share


class Workload(NamedTuple):
    """What a rollout pass or a micro-step works on, over all devices."""

    R: int  # sequences
    G: int  # prompts; each is shared by R/G sequences
    S: int
    T: int

    @property
    def tokens(self) -> int:
        return self.R * self.T + self.G * self.S

    @property
    def pairs(self) -> float:
        """The number of pairs of a query and a key that this query sees."""
        return self.G * self.S**2 / 2 + self.R * (self.T * self.S + self.T**2 / 2)


class Layouts(NamedTuple):
    """Where training and rollout lie, and why ROLLOUT_MESH_SHAPE=auto chose its mesh, else ""."""

    train: Layout
    rollout: Layout
    reason: str


def how_to_compute(
    cfg: Any, model: ModelConfig, sizes: Sizes, S: int, devices: Sequence[jax.Device]
) -> tuple[Compute, Compute, str]:
    """How training and rollout are computed, and why ROLLOUT_MESH_SHAPE=auto is what it is.

    S: prompt tokens. devices: they need not exist on this machine. Raises UserMistake for settings
    that the devices or the model cannot do.
    """
    platform = devices[0].platform
    dtype = cfg.dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if cfg.policy_loss_impl == "pallas" and (platform, dtype) != ("tpu", "bfloat16"):
        raise UserMistake(
            f"POLICY_LOSS_IMPL=pallas needs DTYPE=bfloat16 on a TPU, and this run has {dtype} on "
            f"{platform}; set POLICY_LOSS_IMPL=jax, which gives the same numbers"
        )

    processes = len(devices) // local_count(devices)
    R = sizes.prompt_batch_size * cfg.num_pre_q * processes
    G = R // prompt_share(cfg.num_pre_q, R // len(devices))
    layouts = choose_layouts(
        model,
        devices,
        Workload(R, G, S, cfg.max_length_sample),
        jnp.dtype(dtype).itemsize,
        mesh_shape=cfg.mesh_shape,
        rollout_mesh_shape=cfg.rollout_mesh_shape,
    )
    tp = layouts.train.mesh.shape["tp"]
    T, of_shard = cfg.max_length_sample, sizes.micro_batch_size * processes
    share = prompt_share(cfg.num_pre_q, of_shard // layouts.train.batch_shards)
    row = sum(-(-n // LANES) * LANES for n in (S, share * T))
    attention = choose_attention(cfg.attention_impl, model, platform, tp, row, T)
    loop, rollout_loop = (choose_layer_loop(platform, remat) for remat in (cfg.remat, "none"))
    training = Compute(
        model,
        dtype=jnp.dtype(dtype),
        layout=layouts.train,
        remat=cfg.remat,
        attention_impl=attention,
        layer_loop=loop,
    )
    # The rollout has no backward.
    rollout = training._replace(layout=layouts.rollout, remat="none", layer_loop=rollout_loop)
    if cfg.rollout_backend == "sglang_jax":  # this is the copy of the weights that the engine gets
        name = dtype if cfg.sglang_jax_dtype == "auto" else cfg.sglang_jax_dtype
        rollout = rollout._replace(layout=layouts.train, dtype=jnp.dtype(name), layer_loop="unroll")
        return training, rollout, "; the engine has all devices on tp"
    return training, rollout, f"; {layouts.reason}" if layouts.reason else ""


def limits_of(cfg: Any, sizes: Sizes, training: Compute, processes: int, S: int) -> Limits:
    """The limits of packed rows. S: padded tokens of the longest prompt without the last one."""
    model, X = training.model, training.layout.batch_shards
    matmuls = 2 * model.num_layers * layer_weights(model)  # FLOPs of a token
    return Limits(
        shards=X,
        sequences=sizes.micro_batch_size * processes // X,
        completions=cfg.num_pre_q,
        longest_completion=cfg.max_length_sample,
        longest_prompt=S,
        shortest_prompt=cfg.global_length,
        pack=cfg.packs(),
        unit=LANES if training.attention_impl == "splash" else 1,
        row_tokens=MOST_PLACES if training.attention_impl == "splash" else sys.maxsize,
        matmul_keys=matmuls / attention_flops(model, 1),
    )


def stop_if_too_long(max_length_sample: int, model: ModelConfig, longest: int) -> None:
    """Raises UserMistake if the model has too few positions for a prompt of `longest` tokens."""
    length, room = longest + max_length_sample, model.max_positions - max_length_sample
    if length > model.max_positions:
        shorter = f" or set MAX_PROMPT_LENGTH={room}" if room > 0 else ""
        raise UserMistake(
            f"MAX_LENGTH_SAMPLE={max_length_sample} after the longest prompt makes {length} "
            f"tokens, and the model has {model.max_positions} positions; lower it{shorter}"
        )


def rollout_mesh(cfg: Any, rollout: Compute) -> str:
    """The mesh that samples, as ROLLOUT_MESH_SHAPE writes it; an engine has all devices on tp."""
    mesh = rollout.layout.mesh
    return mesh_text(mesh) if cfg.rollout_backend == "naive" else f"1,1,{mesh.size}"


def choose_layouts(
    model: ModelConfig,
    devices: Sequence[jax.Device],
    workload: Workload,
    itemsize: int,
    *,
    mesh_shape: str,
    rollout_mesh_shape: str,
) -> Layouts:
    """The layouts for MESH_SHAPE and ROLLOUT_MESH_SHAPE, on devices that need not exist here.

    workload: one rollout pass. itemsize: bytes of a weight in the copy that decodes.
    Raises UserMistake for a mesh that does not divide the devices or the weights.
    """
    # A process can ask only for the memory of its devices; a device of another machine has the
    # memory of its chip.
    local = next((d for d in devices if d.process_index == jax.process_index()), devices[0])
    auto = (1, -1, smallest_tp(model, memory_bytes(local), local_count(devices)))
    mesh = make_mesh("MESH_SHAPE", mesh_shape, devices, auto)
    tp, reason = fastest_tp(model, local, len(devices), local_count(devices), workload, itemsize)
    rollout_mesh = make_mesh("ROLLOUT_MESH_SHAPE", rollout_mesh_shape, devices, (-1, 1, tp))
    stop_if_indivisible("MESH_SHAPE", model, mesh)
    stop_if_indivisible("ROLLOUT_MESH_SHAPE", model, rollout_mesh)
    train, rollout = Layout(mesh, TRAIN_BATCH_AXES), Layout(rollout_mesh, ROLLOUT_BATCH_AXES)
    return Layouts(train, rollout, reason if rollout_mesh_shape == "auto" else "")


def choose_attention(
    setting: str, model: ModelConfig, platform: str, tp: int, row: int = 0, completion: int = 0
) -> str:
    """xla or splash; raises UserMistake if ATTENTION_IMPL=splash cannot run here.

    row, completion: the most tokens of a row and of a completion in training.
    """
    why_not = ""
    if platform != "tpu":
        why_not = f"it is a TPU kernel, and this is {platform}"
    elif model.head_dim % 64:
        why_not = f"it wants a head_dim that is a multiple of 64, not {model.head_dim}"
    elif model.num_kv_heads % tp:
        why_not = f"MESH_SHAPE's tp={tp} does not divide {model.num_kv_heads} kv heads"
    elif row > MOST_PLACES or completion > MOST_TOKENS:
        why_not = f"rows may have {MOST_PLACES} tokens and completions {MOST_TOKENS}, and here "
        why_not += f"they have up to {row} and {completion}"
    if setting == "splash" and why_not:
        raise UserMistake(f"ATTENTION_IMPL=splash: {why_not}; leave it at auto")
    return setting if setting != "auto" else "xla" if why_not else "splash"


def choose_layer_loop(platform: str, remat: str) -> str:
    """scan or unroll.

    A scan copies each layer's weights and caches out of stacked arrays, except on TPUs. With REMAT
    unrolled layers are not worth it: on a CPU XLA would not compute again what REMAT drops, and on
    a GPU they move as many bytes and REMAT=full saves less.
    """
    return "scan" if platform == "tpu" or remat != "none" else "unroll"


# ---- Tensor parallelism --------------------------------------------------------------------------


def possible_tp(model: ModelConfig, local_devices: int) -> list[int]:
    """The powers of two that divide a host's devices and every dimension that tp splits."""
    leaves = jax.tree.leaves(param_table(model))
    pairs = [pair for leaf in leaves for pair in zip(leaf.shape, leaf.axes, strict=True)]
    sizes = [size for size, axes in pairs if axes and "tp" in axes]
    powers = [2**i for i in range(local_devices.bit_length())]
    return [tp for tp in powers if not any(size % tp for size in (local_devices, *sizes))]


def smallest_tp(model: ModelConfig, memory: float, local_devices: int) -> int:
    """The tp of training: the smallest that leaves enough memory, or the largest that is possible.

    Enough means that two layers gathered over fsdp and one gradient, all in bfloat16, take at most
    a quarter of a device's memory.
    """
    possible = possible_tp(model, local_devices)
    small = [tp for tp in possible if 3 * 2 * layer_weights(model) / tp <= memory / 4]
    return (small or possible[-1:])[0]


def fastest_tp(
    model: ModelConfig,
    device: jax.Device,
    n: int,
    local_devices: int,
    workload: Workload,
    itemsize: int,
) -> tuple[int, str]:
    """The tp with which decoding a token is estimated to take the least time, and the reason.

    Only values count for which the weights take at most 40 % of the memory of `device`, which must
    be a device of this process. On devices other than TPUs it is the smallest of these values, and
    the reason is "". n: devices of all processes.
    """
    chip, possible = chip_of(device), possible_tp(model, local_devices)
    limit = 0.4 * memory_bytes(device)
    fits = [tp for tp in possible if itemsize * num_params(model) / tp <= limit]
    fits = fits or possible[-1:]
    if chip is None:
        return fits[0], ""
    costs = {}
    for tp in fits:
        hbm, ici = (1e3 * x for x in decode_work(model, n, tp, workload).seconds(chip))
        costs[tp] = (hbm + ici, f"tp={tp} {hbm:.2f} + {ici:.2f}")
    fastest = min(costs, key=lambda tp: costs[tp][0])
    reason = ", ".join(text for _, text in costs.values())
    return fastest, f"estimated ms per token, HBM + collectives: {reason}"


# ---- The sizes of a model, and the work of a token -----------------------------------------------


def num_params(model: ModelConfig) -> int:
    """The number of all weights."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_table(model)))


def layer_weights(model: ModelConfig) -> int:
    """The numbers in the matrices of one layer; every token is multiplied by each of them once."""
    layers = jax.tree.leaves(param_table(model).layers)
    return sum(math.prod(leaf.shape[1:]) for leaf in layers if len(leaf.shape) == 3)


def attention_flops(model: ModelConfig, pairs: float) -> float:
    """FLOPs of attention, forward, in all layers, for this number of pairs of a query and a key."""
    return 4 * model.num_heads * model.head_dim * model.num_layers * pairs


def update_flops(model: ModelConfig, prompts: np.ndarray, completions: np.ndarray) -> float:
    """The FLOPs of forward and backward of all sequences of a step, without recomputation.

    prompts: [P] tokens; a prompt is computed once for its completions. completions: [P, K] tokens.
    """
    S, T = prompts[:, None], completions
    pairs = (S**2 / 2).sum() + (T * S + T**2 / 2).sum()
    weights = model.num_layers * layer_weights(model) * (S.sum() + T.sum())
    head = model.vocab_size * model.hidden_size * T.sum()
    return float(3 * (2 * (weights + head) + attention_flops(model, pairs)))


def decode_work(model: ModelConfig, n: int, tp: int, workload: Workload) -> Work:
    """The work of one new token of every sequence. The caches are read up to their capacity."""
    local_R = workload.R / n
    weights = model.num_layers * layer_weights(model) + model.vocab_size * model.hidden_size
    cached = workload.G * workload.S / n + local_R * workload.T  # tokens
    kv = 2 * 2 * model.num_kv_heads * model.head_dim * model.num_layers * cached
    logits = 4 * local_R * model.vocab_size
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    # A layer has two all-reduces, and four exchanges between heads and batch; the logits follow.
    sent = (
        model.num_layers * (2 * 2 * 2 * local_R * tp * model.hidden_size + 2 * local_R * heads)
        + logits
    )
    hops = (6 * model.num_layers + 2) * tp if tp > 1 else 0
    return Work(2 * weights / tp + kv + 4 * logits, sent * (tp - 1) / tp, hops)
