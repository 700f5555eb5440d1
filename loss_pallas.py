"""Token log-probabilities and entropies from hidden states, without a large array of all logits.

If the logits need more than LOGITS_TILE_BYTES, or `pallas` computes them, the program walks the
vocabulary in tiles of the lm_head. Forward keeps a running maximum, sum, entropy and the sampled
token's logit for each token. Backward computes the logits of each tile again. Inside a tile runs
plain jnp (`jax`) or a TPU kernel (`pallas`): docs/kernel.md has both.

Dimensions: t tokens of an input, n tokens of a device, V vocabulary, D model width, v lm_head
rows of a tile. A mesh splits the sequences over (dp, fsdp), V over tp and D over fsdp.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

# Float32 logits that `jax` may hold per device; 4096 columns for 16k tokens make fast matmuls.
LOGITS_TILE_BYTES = 256 * 2**20
MASKED = -1e30  # A logit of probability 0. It is finite because inf - inf is NaN.
BATCH_AXES = ("dp", "fsdp")  # mesh axes over which the sequences are split

# The tiles work on two arrays [n, 4] float32, with a row for each token.
# `stats`, in forward, covers the tiles so far. Its columns are the largest logit, the sum of
#     e = exp(logit - largest), the sum of e (logit - largest), and the sampled token's logit.
# `saved`, in backward, has the columns logsumexp and entropy, which forward saved, and the
#     cotangents of logps and entropy, which are the gradients of the loss in these two.


class CallSettings(NamedTuple):
    """The arguments of token_logps that are not arrays; hashable, as custom_vjp needs."""

    temperature: float
    impl: str
    mesh: Mesh | None
    interpret: Any  # False on a TPU; True or pltpu.InterpretParams run the kernel on any device.


def token_logps(
    hidden: jax.Array,
    lm_head: jax.Array,
    ids: jax.Array,
    *,
    temperature: float = 1.0,
    impl: str = "jax",
    mesh: Mesh | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns log p of `ids` and the entropy of each distribution, both [..., t] float32 nats.

    hidden: [..., t, D] float32 or bfloat16; the matmuls use this dtype. lm_head: [V, D].
    ids: [..., t] int32. The logits are float32, divided by temperature.
    mesh: the axes are dp, fsdp and tp; the first axis of hidden and both axes of lm_head are split
    over them. None: one device holds everything. impl: "jax" runs anywhere, for small inputs as
    token_logps_reference; "pallas" runs on a TPU.
    Raises ValueError for an unknown impl.
    """
    if impl not in ("jax", "pallas"):
        raise ValueError(f"POLICY_LOSS_IMPL={impl!r} is not one of jax, pallas")
    shards = np.prod([mesh.shape[axis] for axis in mesh.axis_names]) if mesh else 1
    logits_bytes = 4 * ids.size * lm_head.shape[0] // shards
    if impl == "jax" and logits_bytes <= LOGITS_TILE_BYTES:
        return token_logps_reference(hidden, lm_head, ids, temperature=temperature)
    return _token_logps(hidden, lm_head, ids, CallSettings(temperature, impl, mesh, interpret))


def token_logps_reference(
    hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, *, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Returns the same as token_logps, computed from an array of all logits."""
    head = lm_head.astype(hidden.dtype)
    in_float32 = {"precision": _precision(hidden.dtype), "preferred_element_type": jnp.float32}
    logits = jnp.einsum("...d,vd->...v", hidden, head, **in_float32) / temperature  # [..., t, V]
    logsumexp = jax.nn.logsumexp(logits, axis=-1)  # [..., t]
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]  # [..., t]
    log_probs = logits - logsumexp[..., None]  # [..., t, V]
    # logsumexp - sum(p logits) would cancel for large logits and leave few digits of the entropy.
    return chosen - logsumexp, -(jnp.exp(log_probs) * log_probs).sum(axis=-1)


# ---- Around the tiles ----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_logps(
    hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, call: CallSettings
) -> tuple[jax.Array, jax.Array]:
    return _forward(hidden, lm_head, ids, call)[0]


def _forward(hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, call: CallSettings) -> Any:
    logps, entropy, logsumexp = _on_mesh(_forward_shard, call, hidden, lm_head, ids)
    return (logps, entropy), (hidden, lm_head, ids, logsumexp, entropy)


def _backward(call: CallSettings, residuals: Any, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    hidden, lm_head, ids, logsumexp, entropy = residuals
    saved = (logsumexp, entropy, *cotangents)
    grad_hidden, grad_lm_head = _on_mesh(_backward_shard, call, hidden, lm_head, ids, *saved)
    return grad_hidden, grad_lm_head, np.zeros(ids.shape, jax.dtypes.float0)


_token_logps.defvjp(_forward, _backward)


def _on_mesh(program: Any, call: CallSettings, *arrays: jax.Array) -> Any:
    """Runs `program` on each device's part of hidden, lm_head, ids and, in backward, `saved`."""
    if call.mesh is None:
        return program(call, *arrays)
    tokens, head = PartitionSpec(BATCH_AXES), PartitionSpec("tp", "fsdp")
    ins = (tokens, head, *[tokens for _ in arrays[2:]])
    outs = (tokens, head) if program is _backward_shard else (tokens, tokens, tokens)
    program = functools.partial(program, call)
    # check_vma=False: the programs make the sums over devices themselves.
    program = jax.shard_map(program, mesh=call.mesh, in_specs=ins, out_specs=outs, check_vma=False)
    return program(*arrays)


class Tile(NamedTuple):
    """v rows of the lm_head, and their position in the vocabulary."""

    w: jax.Array  # [v, D] in the dtype of hidden
    first: Any  # token id of the first row
    repeated: Any  # number of rows at the front that the previous tile has counted already


def _tile_size(call: CallSettings, lm_head: jax.Array, hidden: jax.Array) -> int:
    """Returns v for a device's part of the lm_head [V / tp, D / fsdp] and of hidden [n, D]."""
    if call.impl == "pallas":
        size = block_sizes(hidden.shape[1], hidden.dtype.itemsize, _device_kind(call))[1]
    else:
        size = LOGITS_TILE_BYTES // (4 * hidden.shape[0]) // 128 * 128
    return min(max(size, 128), lm_head.shape[0])


def _tile(call: CallSettings, lm_head: jax.Array, size: int, i: Any, dtype: Any) -> Tile:
    """Returns tile i, gathered over fsdp. The last tile overlaps the previous tile, so that all
    tiles have the same size without padding."""
    local_vocab = lm_head.shape[0]  # V / tp
    start = jnp.minimum(i * size, local_vocab - size)
    w = jax.lax.dynamic_slice_in_dim(lm_head, start, size).astype(dtype)  # [v, D / fsdp]
    if call.mesh is None:
        return Tile(w, start, i * size - start)
    w = jax.lax.all_gather(w, "fsdp", axis=1, tiled=True)  # [v, D]
    return Tile(w, jax.lax.axis_index("tp") * local_vocab + start, i * size - start)


def _add_tile(call: CallSettings, grad_lm_head: jax.Array, i: Any, grad_w: jax.Array) -> jax.Array:
    """Adds grad_w [v, D] of tile i, summed over fsdp, to grad_lm_head [V / tp, D / fsdp]."""
    size = len(grad_w)
    start = jnp.minimum(i * size, len(grad_lm_head) - size)
    if call.mesh:  # Each device keeps [v, D / fsdp] of the sum.
        grad_w = jax.lax.psum_scatter(grad_w, "fsdp", scatter_dimension=1, tiled=True)
    before = jax.lax.dynamic_slice_in_dim(grad_lm_head, start, size)
    return jax.lax.dynamic_update_slice_in_dim(grad_lm_head, before + grad_w, start, 0)


def _forward_shard(
    call: CallSettings, hidden: jax.Array, lm_head: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns logps, entropy and logsumexp of this device's tokens, each [..., t]."""
    hidden, target = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1, 1)  # [n, D], [n, 1]
    size = _tile_size(call, lm_head, hidden)
    forward = _forward_tile if call.impl == "jax" else _forward_kernel_call

    def one_tile(i: jax.Array, stats: jax.Array) -> jax.Array:
        return forward(call, hidden, _tile(call, lm_head, size, i, hidden.dtype), target, stats)

    stats = jnp.zeros((len(hidden), 4), jnp.float32).at[:, 0].set(MASKED)  # [n, 4]
    stats = jax.lax.fori_loop(0, -(-lm_head.shape[0] // size), one_tile, stats)
    largest, exp_sum, entropy_sum, chosen = stats.T  # each [n]
    if call.mesh:
        largest_of_all = jax.lax.pmax(largest, "tp")
        scale = jnp.exp(largest - largest_of_all)
        entropy_sum = scale * (entropy_sum + (largest - largest_of_all) * exp_sum)
        sums = jnp.stack([scale * exp_sum, entropy_sum, chosen])
        (exp_sum, entropy_sum, chosen), largest = jax.lax.psum(sums, "tp"), largest_of_all
    logsumexp = largest + jnp.log(exp_sum)
    entropy = jnp.log(exp_sum) - entropy_sum / exp_sum
    return tuple(x.reshape(ids.shape) for x in (chosen - logsumexp, entropy, logsumexp))


def _backward_shard(
    call: CallSettings, hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, *saved: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of hidden and lm_head, in their dtypes. saved: 4 arrays [..., t]."""
    hidden, target = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1, 1)  # [n, D], [n, 1]
    size = _tile_size(call, lm_head, hidden)
    backward = _backward_tile if call.impl == "jax" else _backward_kernel_call
    saved = jnp.stack([x.reshape(-1) for x in saved], axis=1)  # [n, 4]

    def one_tile(i: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tile, (grad_hidden, grad_lm_head) = _tile(call, lm_head, size, i, hidden.dtype), grads
        grad_hidden, grad_w = backward(call, hidden, tile, target, saved, grad_hidden)
        return grad_hidden, _add_tile(call, grad_lm_head, i, grad_w)

    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(lm_head.shape, jnp.float32)
    grads = jax.lax.fori_loop(0, -(-lm_head.shape[0] // size), one_tile, zeros)
    if call.mesh:
        grads = jax.lax.psum(grads[0], "tp"), jax.lax.psum(grads[1], "dp")
    grad_hidden = grads[0].reshape(*ids.shape, -1).astype(hidden.dtype)  # [..., t, D]
    return grad_hidden, grads[1].astype(lm_head.dtype)


# ---- Inside a tile, in jnp; the TPU kernels call these functions with a block of the n tokens ----


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Contracts axis_a of a with axis_b of b, in float32."""
    in_float32 = {"precision": _precision(a.dtype), "preferred_element_type": jnp.float32}
    return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), **in_float32)


def _precision(dtype: Any) -> jax.lax.Precision | None:
    """Keeps float32 operands in float32; a TPU would round them to bfloat16 by default."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _logits(
    call: CallSettings, hidden: jax.Array, tile: Tile, target: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns three arrays [n, v]: the logits of the tile in float32, whether a logit is new (its
    row is not a repeated row), and whether it is the new logit of the sampled token."""
    logits = _dot(hidden, tile.w, 1, 1) * (1 / call.temperature)  # [n, v]
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_new = column >= tile.repeated
    return logits, is_new, is_new & (column == target - tile.first)


def _forward_tile(
    call: CallSettings, hidden: jax.Array, tile: Tile, target: jax.Array, stats: jax.Array
) -> jax.Array:
    """Adds the tile to stats [n, 4] float32. hidden: [n, D]. target: [n, 1] int32 token ids."""
    logits, is_new, is_sampled = _logits(call, hidden, tile, target)
    logits = jnp.where(is_new, logits, MASKED)
    before, exp_sum, entropy_sum, chosen = (stats[:, i : i + 1] for i in range(4))
    largest = jnp.maximum(before, logits.max(axis=1, keepdims=True))
    below = logits - largest
    e = jnp.exp(below)
    scale = jnp.exp(before - largest)
    entropy_sum = scale * (entropy_sum + (before - largest) * exp_sum)
    entropy_sum += (e * below).sum(axis=1, keepdims=True)
    exp_sum = scale * exp_sum + e.sum(axis=1, keepdims=True)
    chosen += jnp.where(is_sampled, logits, 0.0).sum(axis=1, keepdims=True)
    lane = jax.lax.broadcasted_iota(jnp.int32, stats.shape, 1)
    for i, new in enumerate((largest, exp_sum, entropy_sum, chosen)):
        stats = jnp.where(lane == i, new, stats)
    return stats


def _logits_gradient(
    call: CallSettings, hidden: jax.Array, tile: Tile, target: jax.Array, saved: jax.Array
) -> jax.Array:
    """Returns the gradient of hidden w^T, the logits before the division by the temperature: [n, v]
    in the dtype of hidden. saved: [n, 4]."""
    logits, is_new, is_sampled = _logits(call, hidden, tile, target)
    logsumexp, entropy, grad_logp, grad_entropy = (saved[:, i : i + 1] for i in range(4))
    logp = logits - logsumexp
    p = jnp.where(is_new, jnp.exp(logp), 0.0)
    grad_logits = jnp.where(is_sampled, grad_logp, 0.0)
    grad_logits -= p * (grad_logp + grad_entropy * (logp + entropy))
    return (grad_logits * (1 / call.temperature)).astype(hidden.dtype)


def _backward_tile(
    call: CallSettings,
    hidden: jax.Array,
    tile: Tile,
    target: jax.Array,
    saved: jax.Array,
    grad_hidden: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns grad_hidden [n, D] plus the tile's part, and grad_w [v, D], both in float32."""
    grad_logits = _logits_gradient(call, hidden, tile, target, saved)  # [n, v]
    return grad_hidden + _dot(grad_logits, tile.w, 1, 0), _dot(grad_logits, hidden, 0, 0)


# ---- Inside a tile, on a TPU ---------------------------------------------------------------------

# (MiB of VMEM of a core, cores of a device) by the beginning of device_kind, as in jax 0.10's
# jax/_src/pallas/mosaic/tpu_info.py. The first match counts, so v5e ("v5 lite") stands before v5p.
CORES = {
    "TPU v4": (16, 2),
    "TPU v5 lite": (128, 1),
    "TPU v5e": (128, 1),
    "TPU v5": (64, 2),
    "TPU v6": (128, 1),
}


def _device_kind(call: CallSettings) -> str:
    devices = call.mesh.devices.flat if call.mesh else jax.devices()
    return devices[0].device_kind


def _vmem_and_cores(device_kind: str) -> tuple[int, int]:
    """Returns (VMEM bytes of a core, cores of a device); an unknown chip gets (16 MiB, 1)."""
    mib, cores = next((CORES[name] for name in CORES if device_kind.startswith(name)), (16, 1))
    return mib * 2**20, cores


def block_sizes(D: int, itemsize: int, device_kind: str) -> tuple[int, int]:
    """Returns (tokens of a block, v rows of a tile), the largest whose backward fits into VMEM.

    With more rows in a tile, hidden and its gradient are read from HBM fewer times.
    Raises ValueError if no size fits.
    """

    def vmem_bytes(block: int, v: int) -> int:
        tile = v * D * (2 * itemsize + 4)  # The weights, their transpose and their gradient.
        # Two buffers of hidden, of its gradient in and of its gradient out; a temporary sum.
        tokens = block * D * (2 * itemsize + 4 * 4 + 4)
        # 12 float32 arrays: logits, probabilities and what the compiler adds. The margin is wide:
        # at the sizes that were compiled (libtpu 0.0.42) the compiler added less than one array.
        return tile + tokens + 12 * block * v * 4

    limit = _vmem_and_cores(device_kind)[0]
    sizes = [(block, v) for v in (2048, 1024, 512, 256, 128) for block in (256, 128, 64)]
    if fits := [size for size in sizes if vmem_bytes(*size) < limit]:
        return fits[0]
    raise ValueError(
        f"POLICY_LOSS_IMPL=pallas: hidden size {D} is too wide for the {limit / 2**20:.0f} MiB of "
        f"VMEM of {device_kind}; set POLICY_LOSS_IMPL=jax"
    )


def _kernel_settings(call: CallSettings, *semantics: str) -> dict[str, Any]:
    limit = _vmem_and_cores(_device_kind(call))[0]
    params = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)
    return {"compiler_params": params, "interpret": call.interpret}


def _forward_kernel_call(
    call: CallSettings, hidden: jax.Array, tile: Tile, target: jax.Array, stats: jax.Array
) -> jax.Array:
    """Runs _forward_tile on one block of tokens after the other, in a kernel."""
    n, D = hidden.shape
    block = min(block_sizes(D, hidden.dtype.itemsize, _device_kind(call))[0], n)

    def kernel(tile_position, hidden, w, target, stats, new_stats):
        tile = Tile(w[...], tile_position[0], tile_position[1])
        new_stats[...] = _forward_tile(call, hidden[...], tile, target[...], stats[...])

    def token_block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, width), lambda i: (i, 0))

    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    weights_block = pl.BlockSpec(tile.w.shape, lambda i: (0, 0), pipeline_mode=pl.Buffered(1))
    tile_position = jnp.stack([tile.first, tile.repeated]).astype(jnp.int32)  # [2]
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(n, block),),
        in_specs=[scalars, token_block(D), weights_block, token_block(1), token_block(4)],
        out_specs=token_block(4),
        out_shape=jax.ShapeDtypeStruct(stats.shape, stats.dtype),
        **_kernel_settings(call, "parallel"),
    )(tile_position, hidden, tile.w, target, stats)


def _backward_kernel_call(
    call: CallSettings,
    hidden: jax.Array,
    tile: Tile,
    target: jax.Array,
    saved: jax.Array,
    grad_hidden: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs _backward_tile on blocks of tokens, in a kernel. Each block adds to its part of
    grad_hidden, and all blocks of a core add to the same grad_w.

    A single kernel computes the logits again once. Two kernels, one for each gradient, would do it
    twice, but they would not read and write grad_hidden in HBM for every tile.
    """
    (n, D), v = hidden.shape, tile.w.shape[0]
    block = min(block_sizes(D, hidden.dtype.itemsize, _device_kind(call))[0], n)
    blocks = pl.cdiv(n, block)
    cores = _vmem_and_cores(_device_kind(call))[1]
    cores = cores if blocks % cores == 0 else 1

    def kernel(tile_position, hidden, w, target, saved, before, grad_hidden, grad_w):
        hidden, tile = hidden[...], Tile(w[...], tile_position[0], tile_position[1])
        grad_logits = _logits_gradient(call, hidden, tile, target[...], saved[...])  # [block, v]
        if n % block:  # The last block reads past the end, where the values may be NaN.
            i = pl.program_id(0) * (blocks // cores) + pl.program_id(1)
            token = i * block + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
            hidden, grad_logits = (jnp.where(token < n, x, 0) for x in (hidden, grad_logits))
        grad_hidden[...] = before[...] + _dot(grad_logits, tile.w, 1, 0)

        @pl.when(pl.program_id(1) == 0)
        def _():
            grad_w[...] = jnp.zeros_like(grad_w)

        grad_w[...] += _dot(grad_logits, hidden, 0, 0)

    def token_block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, width), lambda core, i: (core * (blocks // cores) + i, 0))

    scalars, once = pl.BlockSpec(memory_space=pltpu.SMEM), pl.Buffered(1)
    weights_block = pl.BlockSpec((v, D), lambda core, i: (0, 0), pipeline_mode=once)
    gradient_block = pl.BlockSpec((None, v, D), lambda core, i: (core, 0, 0), pipeline_mode=once)
    tile_position = jnp.stack([tile.first, tile.repeated]).astype(jnp.int32)  # [2]
    token_blocks = [token_block(width) for width in (1, 4, D)]  # of target, saved, grad_hidden
    grad_hidden, grad_w = pl.pallas_call(
        kernel,
        grid=(cores, blocks // cores),
        in_specs=[scalars, token_block(D), weights_block, *token_blocks],
        out_specs=[token_block(D), gradient_block],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, D), (cores, v, D))],
        input_output_aliases={5: 0},  # grad_hidden is updated in place.
        **_kernel_settings(call, "parallel", "arbitrary"),
    )(tile_position, hidden, tile.w, target, saved, grad_hidden)
    return grad_hidden, grad_w.sum(axis=0)
