"""Token log-probabilities and entropies from hidden states, without a large array of all logits.

If the logits need more than LOGITS_TILE_BYTES, or a kernel computes them, the program walks the
vocabulary in tiles of the lm_head. Forward keeps a running maximum, sum, entropy and the sampled
token's logit for each token. Backward computes the logits of each tile again. Inside a tile runs
the plain jnp of this file, or the TPU kernel of loss_pallas.py: docs/kernel.md has both. Only these
two files are needed to compute the same in another project.

A support lists the tokens among which the sampler has drawn, if its filters dropped the others.

Dimensions: t tokens of an input, n tokens of a device, V vocabulary, D model width, v lm_head rows
of a tile, U ids of a support, k distributions of a token: 1, or 2 with a support. A mesh splits the
sequences over (dp, fsdp), V over tp and D over fsdp.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

# Float32 logits that jnp may hold per device; 4096 columns for 16k tokens make fast matmuls.
LOGITS_TILE_BYTES = 256 * 2**20
MASKED = -1e30  # A logit of probability 0. It is finite because inf - inf is NaN.
SMALLEST = 1e-37  # A less probable support counts as this, because the logarithm of 0 is infinite.
BATCH_AXES = ("dp", "fsdp")  # mesh axes over which the sequences are split

# The tiles work on three arrays with a row for each token; the last two are float32.
# `target` [n, 1 + U] has the sampled token's id and the ids of the support (U = 0: no support).
# `stats` [n, 2 + 2k], in forward, covers the tiles so far. Its columns are the largest logit, the
#     sampled token's logit, the sum of e = exp(logit - largest), the sum of e (logit - largest),
#     and these two sums over the tokens of the support alone.
# `saved` [n, 3 + k], in backward, has the cotangents of logps and entropy, which are the gradients
#     of the loss in these two, then entropy, logsumexp and the logsumexp of the support.


class CallSettings(NamedTuple):
    """The arguments of tiled_token_logps that are not arrays; hashable, as custom_vjp needs."""

    temperature: float
    mesh: Mesh | None
    kernel: Any  # the Kernel of loss_pallas.py; None: jnp


def tiled_token_logps(
    hidden: jax.Array,
    lm_head: jax.Array,
    ids: jax.Array,
    *,
    support: jax.Array | None = None,
    temperature: float = 1.0,
    mesh: Mesh | None = None,
    kernel: Any = None,
) -> tuple[jax.Array, ...]:
    """Returns log p of `ids` and the entropy of each distribution, both [..., t] float32 nats.

    With a support p is the probability among its tokens, and the entropy still that of all tokens.
    The entropy within the support and the probability of the support follow, both [..., t] float32
    and without a gradient.
    hidden: [..., t, D] float32 or bfloat16; the matmuls use this dtype. lm_head: [V, D].
    ids: [..., t] int32. The logits are float32, divided by temperature.
    support: [..., t, U] int32. The U ids of a token differ; unused places are -1.
    mesh: the axes are dp, fsdp and tp; the first axis of hidden and both axes of lm_head are split
    over them. None: one device holds everything.
    kernel: the Kernel of loss_pallas.py. None: jnp, for small inputs as token_logps_reference.
    Raises ValueError for a kernel with a support.
    """
    if kernel and support is not None:
        raise ValueError("the kernel of POLICY_LOSS_IMPL=pallas computes no support; jax does")
    shards = np.prod([mesh.shape[axis] for axis in mesh.axis_names]) if mesh else 1
    logits_bytes = 4 * ids.size * lm_head.shape[0] // shards
    if kernel is None and logits_bytes <= LOGITS_TILE_BYTES:
        settings = {"support": support, "temperature": temperature}
        return token_logps_reference(hidden, lm_head, ids, **settings)
    target = ids[..., None]  # [..., t, 1]
    target = target if support is None else jnp.concatenate([target, support], axis=-1)
    call = CallSettings(temperature, mesh, kernel)
    logps, entropy, logsumexp = _tiled_token_logps(hidden, lm_head, target, call)
    if support is None:
        return logps, entropy[..., 0]
    mass = jnp.exp(logsumexp[..., 1] - logsumexp[..., 0])
    return logps, entropy[..., 0], *jax.lax.stop_gradient((entropy[..., 1], mass))


def token_logps_reference(
    hidden: jax.Array,
    lm_head: jax.Array,
    ids: jax.Array,
    *,
    support: jax.Array | None = None,
    temperature: float = 1.0,
) -> tuple[jax.Array, ...]:
    """Returns the same as tiled_token_logps, computed from an array of all logits."""
    head = lm_head.astype(hidden.dtype)
    in_float32 = {"precision": _precision(hidden.dtype), "preferred_element_type": jnp.float32}
    logits = jnp.einsum("...d,vd->...v", hidden, head, **in_float32) / temperature  # [..., t, V]
    logsumexp = jax.nn.logsumexp(logits, axis=-1)  # [..., t]
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]  # [..., t]
    log_probs = logits - logsumexp[..., None]  # [..., t, V]
    # logsumexp - sum(p logits) would cancel for large logits and leave few digits of the entropy.
    entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=-1)
    if support is None:
        return chosen - logsumexp, entropy
    kept = jnp.take_along_axis(log_probs, jnp.maximum(support, 0), axis=-1)  # [..., t, U]
    kept = jnp.where(support < 0, MASKED, kept)
    log_mass = jax.nn.logsumexp(kept, axis=-1)
    within = kept - log_mass[..., None]
    of_support = -(jnp.exp(within) * within).sum(axis=-1), jnp.exp(log_mass)
    return chosen - logsumexp - log_mass, entropy, *jax.lax.stop_gradient(of_support)


# ---- Around the tiles ----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _tiled_token_logps(
    hidden: jax.Array, lm_head: jax.Array, target: jax.Array, call: CallSettings
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns logps [..., t], and the entropy and logsumexp of each distribution [..., t, k]. Only
    logps and the first entropy have a gradient."""
    return _forward(hidden, lm_head, target, call)[0]


def _forward(hidden: jax.Array, lm_head: jax.Array, target: jax.Array, call: CallSettings) -> Any:
    outputs = _on_mesh(_forward_shard, call, hidden, lm_head, target)
    return outputs, (hidden, lm_head, target, *outputs[1:])


def _backward(call: CallSettings, residuals: Any, cotangents: Any) -> Any:
    hidden, lm_head, target, entropy, logsumexp = residuals
    of_all = [cotangents[0], cotangents[1][..., 0], entropy[..., 0]]
    saved = jnp.concatenate([jnp.stack(of_all, axis=-1), logsumexp], axis=-1)  # [..., t, 3 + k]
    grad_hidden, grad_lm_head = _on_mesh(_backward_shard, call, hidden, lm_head, target, saved)
    return grad_hidden, grad_lm_head, np.zeros(target.shape, jax.dtypes.float0)


_tiled_token_logps.defvjp(_forward, _backward)


def _on_mesh(program: Any, call: CallSettings, *arrays: jax.Array) -> Any:
    """Runs `program` on each device's part of hidden, lm_head, target and, in backward, saved."""
    if call.mesh is None:
        return program(call, *arrays)
    tokens, head = PartitionSpec(BATCH_AXES), PartitionSpec("tp", "fsdp")
    ins = (tokens, head, *[tokens for _ in arrays[2:]])
    outs = (tokens, head) if program is _backward_shard else tokens
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
    if call.kernel:
        size = call.kernel.blocks(hidden)[1]
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
    call: CallSettings, hidden: jax.Array, lm_head: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what _tiled_token_logps returns, of this device's tokens."""
    lead, k = target.shape[:-1], min(target.shape[-1], 2)
    hidden, target = (x.reshape(-1, x.shape[-1]) for x in (hidden, target))
    size = _tile_size(call, lm_head, hidden)
    forward = call.kernel.forward if call.kernel else forward_tile

    def one_tile(i: jax.Array, stats: jax.Array) -> jax.Array:
        return forward(call, hidden, _tile(call, lm_head, size, i, hidden.dtype), target, stats)

    stats = jnp.zeros((len(hidden), 2 + 2 * k), jnp.float32).at[:, 0].set(MASKED)
    stats = jax.lax.fori_loop(0, -(-lm_head.shape[0] // size), one_tile, stats)
    largest, chosen, exp_sum, entropy_sum = (
        stats[:, :1],
        stats[:, 1],
        stats[:, 2::2],
        stats[:, 3::2],
    )
    if call.mesh:
        largest_of_all = jax.lax.pmax(largest, "tp")
        below = largest - largest_of_all
        entropy_sum = jnp.exp(below) * (entropy_sum + below * exp_sum)
        sums = jnp.exp(below) * exp_sum, entropy_sum, chosen
        (exp_sum, entropy_sum, chosen), largest = jax.lax.psum(sums, "tp"), largest_of_all
    exp_sum = jnp.maximum(exp_sum, SMALLEST)
    logsumexp = largest + jnp.log(exp_sum)  # [n, k]
    entropy = jnp.log(exp_sum) - entropy_sum / exp_sum
    logps = chosen - logsumexp[:, -1]
    return logps.reshape(lead), entropy.reshape(*lead, k), logsumexp.reshape(*lead, k)


def _backward_shard(
    call: CallSettings, hidden: jax.Array, lm_head: jax.Array, target: jax.Array, saved: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of hidden and lm_head, in their dtypes."""
    shape = hidden.shape
    hidden, target, saved = (x.reshape(-1, x.shape[-1]) for x in (hidden, target, saved))
    size = _tile_size(call, lm_head, hidden)
    backward = call.kernel.backward if call.kernel else _backward_tile

    def one_tile(i: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tile, (grad_hidden, grad_lm_head) = _tile(call, lm_head, size, i, hidden.dtype), grads
        grad_hidden, grad_w = backward(call, hidden, tile, target, saved, grad_hidden)
        return grad_hidden, _add_tile(call, grad_lm_head, i, grad_w)

    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(lm_head.shape, jnp.float32)
    grads = jax.lax.fori_loop(0, -(-lm_head.shape[0] // size), one_tile, zeros)
    if call.mesh:
        grads = jax.lax.psum(grads[0], "tp"), jax.lax.psum(grads[1], "dp")
    return grads[0].reshape(shape).astype(hidden.dtype), grads[1].astype(lm_head.dtype)


# ---- Inside a tile; the TPU kernel calls dot, forward_tile and logits_gradient with a part of n --


def dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
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
    logits = dot(hidden, tile.w, 1, 1) * (1 / call.temperature)  # [n, v]
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_new = column >= tile.repeated
    return logits, is_new, is_new & (column == target[:, :1] - tile.first)


def _in_support(target: jax.Array, tile: Tile) -> jax.Array:
    """Returns [n, v] bool: whether the token of a column is in the support.

    Each word has the bits of 32 columns, so that an id is compared with v / 32 words, not with v
    columns. No two of the ids set the same bit, and the sum of their bits is the word.
    """
    words = -(-len(tile.w) // 32)
    column = target[:, 1:, None] - tile.first  # [n, U, 1]
    word = jnp.where((column >= 0) & (column < 32 * words), column % words, -1)
    bit = jnp.uint32(1) << (column // words).astype(jnp.uint32)
    packed = jnp.where(word == jnp.arange(words), bit, 0).sum(axis=1, dtype=jnp.uint32)
    bits = jnp.concatenate([packed >> i & 1 == 1 for i in range(32)], axis=1)  # [n, 32 * words]
    return bits[:, : len(tile.w)]


def forward_tile(
    call: CallSettings, hidden: jax.Array, tile: Tile, target: jax.Array, stats: jax.Array
) -> jax.Array:
    """Returns stats with the tile added. hidden: [n, D]."""
    logits, is_new, is_sampled = _logits(call, hidden, tile, target)
    logits = jnp.where(is_new, logits, MASKED)
    before, chosen, *sums = (stats[:, i : i + 1] for i in range(stats.shape[1]))
    largest = jnp.maximum(before, logits.max(axis=1, keepdims=True))
    chosen += jnp.where(is_sampled, logits, 0.0).sum(axis=1, keepdims=True)
    below = logits - largest
    scale, e = jnp.exp(before - largest), jnp.exp(below)
    columns = [largest, chosen]
    for i in range(0, len(sums), 2):
        e = jnp.where(_in_support(target, tile), e, 0.0) if i else e
        exp_sum, entropy_sum = sums[i], scale * (sums[i + 1] + (before - largest) * sums[i])
        columns.append(scale * exp_sum + e.sum(axis=1, keepdims=True))
        columns.append(entropy_sum + (e * below).sum(axis=1, keepdims=True))
    lane = jax.lax.broadcasted_iota(jnp.int32, stats.shape, 1)
    for i, new in enumerate(columns):
        stats = jnp.where(lane == i, new, stats)
    return stats


def logits_gradient(
    call: CallSettings, hidden: jax.Array, tile: Tile, target: jax.Array, saved: jax.Array
) -> jax.Array:
    """Returns the gradient of hidden w^T, the logits before the division by the temperature: [n, v]
    in the dtype of hidden."""
    logits, is_new, is_sampled = _logits(call, hidden, tile, target)
    grad_logp, grad_entropy, entropy, logsumexp = (saved[:, i : i + 1] for i in range(4))
    logp = logits - logsumexp
    p = jnp.where(is_new, jnp.exp(logp), 0.0)
    drawn = p  # the probability with which the sampler draws a token
    if target.shape[1] > 1:
        drawn = jnp.where(_in_support(target, tile), p * jnp.exp(logsumexp - saved[:, 4:]), 0.0)
    grad_logits = jnp.where(is_sampled, grad_logp, 0.0) - drawn * grad_logp
    grad_logits -= p * grad_entropy * (logp + entropy)
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
    grad_logits = logits_gradient(call, hidden, tile, target, saved)  # [n, v]
    return grad_hidden + dot(grad_logits, tile.w, 1, 0), dot(grad_logits, hidden, 0, 0)
