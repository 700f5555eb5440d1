"""Token log-probabilities and entropies from hidden states, without a large array of all logits.

If the logits need more than LOGITS_TILE_BYTES, or a kernel computes them, the program walks the
vocabulary in tiles of the lm_head. Forward keeps a running maximum, sum, entropy and the sampled
token's logit for each token. Backward computes the logits of each tile again. Inside a tile runs
the plain jnp of this file, or the TPU kernel of loss_pallas.py: docs/kernel.md has both. Only these
two files are needed to compute the same in another project.

A support lists the tokens among which the sampler has drawn, if its filters dropped the others.

Dimensions: t tokens of an input, n tokens of a device, V vocabulary, D model width, v lm_head rows
of a tile, U ids of a support, k sums of a token: 1, or 2 with a support. A mesh splits the
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


def token_logps(
    hidden: jax.Array,
    lm_head: jax.Array,
    ids: jax.Array,
    *,
    support: jax.Array | None = None,
    temperature: float = 1.0,
    mesh: Mesh | None = None,
    kernel: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns log p of `ids` and the entropy of each distribution, both [..., t] float32 nats.

    With a support p is the probability among its tokens, and the entropy still that of all tokens.
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
    call = CallSettings(temperature, mesh, kernel)
    target = Target(ids[..., None], support)
    logps, entropy = _tiled_token_logps(hidden, lm_head, target, call)
    return logps, entropy[..., 0]


def token_logps_reference(
    hidden: jax.Array,
    lm_head: jax.Array,
    ids: jax.Array,
    *,
    support: jax.Array | None = None,
    temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Returns the same as token_logps, computed from an array of all logits."""
    head = lm_head.astype(hidden.dtype)
    logits = dot(hidden, head, hidden.ndim - 1, 1) / temperature  # [..., t, V]
    logsumexp = jax.nn.logsumexp(logits, axis=-1)  # [..., t]
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]  # [..., t]
    log_probs = logits - logsumexp[..., None]  # [..., t, V]
    # logsumexp - sum(p logits) would cancel for large logits and leave few digits of the entropy.
    entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=-1)
    if support is None:
        return chosen - logsumexp, entropy
    kept = jnp.take_along_axis(log_probs, jnp.maximum(support, 0), axis=-1)  # [..., t, U]
    kept = jnp.where(support < 0, MASKED, kept)
    return chosen - logsumexp - jax.nn.logsumexp(kept, axis=-1), entropy


# ---- Around the tiles ----------------------------------------------------------------------------


class CallSettings(NamedTuple):
    """The arguments of token_logps that are not arrays; hashable, as custom_vjp needs."""

    temperature: float
    mesh: Mesh | None
    # None: jnp. Else the Kernel of loss_pallas.py, for its methods blocks (the sizes of tiles),
    # pack and unpack (Statistics or BackwardInputs as one array), forward and backward (of a tile).
    kernel: Any


class Target(NamedTuple):
    """The ids that the program looks for in the vocabulary."""

    ids: jax.Array  # [..., t, 1] int32, the sampled token
    support: jax.Array | None  # [..., t, U] int32, -1 in unused places


class Statistics(NamedTuple):
    """What forward knows of each token after the tiles so far; float32. The first of the k sums is
    over all tokens of the vocabulary, the second over those of the support."""

    largest: jax.Array  # [n, 1], the largest logit
    chosen: jax.Array  # [n, 1], the sampled token's logit; 0 before its tile
    exp_sum: jax.Array  # [n, k], the sum of e = exp(logit - largest)
    entropy_sum: jax.Array  # [n, 1], the sum of e (logit - largest) over all tokens

    def relative_to(self, largest: jax.Array) -> "Statistics":
        """The same statistics after a larger logit [n, 1] has been found."""
        below = self.largest - largest
        scale = jnp.exp(below)
        entropy_sum = scale * (self.entropy_sum + below * self.exp_sum[:, :1])
        return Statistics(largest, self.chosen, scale * self.exp_sum, entropy_sum)


class BackwardInputs(NamedTuple):
    """What backward knows of each token; float32. The gradients are those of the loss."""

    grad_logp: jax.Array  # [..., t, 1]
    grad_entropy: jax.Array  # [..., t, 1]
    entropy: jax.Array  # [..., t, 1]
    logsumexp: jax.Array  # [..., t, k]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _tiled_token_logps(
    hidden: jax.Array, lm_head: jax.Array, target: Target, call: CallSettings
) -> tuple[jax.Array, jax.Array]:
    """Returns logps [..., t] and the entropy [..., t, 1]."""
    return _forward(hidden, lm_head, target, call)[0]


def _forward(hidden: jax.Array, lm_head: jax.Array, target: Target, call: CallSettings) -> Any:
    logps, entropy, logsumexp = _on_mesh(_forward_shard, call, hidden, lm_head, target)
    return (logps, entropy), (hidden, lm_head, target, entropy, logsumexp)


def _backward(call: CallSettings, residuals: Any, cotangents: Any) -> Any:
    hidden, lm_head, target, entropy, logsumexp = residuals
    inputs = BackwardInputs(cotangents[0][..., None], cotangents[1], entropy, logsumexp)
    grad_hidden, grad_lm_head = _on_mesh(_backward_shard, call, hidden, lm_head, target, inputs)
    return grad_hidden, grad_lm_head, None


_tiled_token_logps.defvjp(_forward, _backward)


def _on_mesh(program: Any, call: CallSettings, *arrays: Any) -> Any:
    """Runs `program` on each device's part of the arrays; the first two are hidden and lm_head."""
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


def _flatten_tokens(arrays: Any) -> Any:
    """The arrays [..., t, width] as [n, width]."""
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), arrays)


def _forward_shard(
    call: CallSettings, hidden: jax.Array, lm_head: jax.Array, target: Target
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns logps [..., t], the entropy [..., t, 1] and the logsumexp over all tokens, and over
    those of the support [..., t, k], of this device's tokens."""
    lead, k = hidden.shape[:-1], 1 if target.support is None else 2
    hidden, target = _flatten_tokens((hidden, target))
    n, size = len(hidden), _tile_size(call, lm_head, hidden)
    forward = call.kernel.forward if call.kernel else forward_tile

    def one_tile(i: jax.Array, stats: Any) -> Any:
        return forward(call, hidden, _tile(call, lm_head, size, i, hidden.dtype), target, stats)

    nothing, lowest = jnp.zeros((n, 1)), jnp.full((n, 1), MASKED, jnp.float32)
    stats = Statistics(lowest, nothing, exp_sum=jnp.zeros((n, k)), entropy_sum=nothing)
    # The kernel needs the statistics in one array. They are packed once, not for every tile.
    stats = call.kernel.pack(stats) if call.kernel else stats
    stats = jax.lax.fori_loop(0, -(-lm_head.shape[0] // size), one_tile, stats)
    stats = Statistics(*call.kernel.unpack(stats)) if call.kernel else stats
    if call.mesh:
        stats = stats.relative_to(jax.lax.pmax(stats.largest, "tp"))
        stats = Statistics(stats.largest, *jax.lax.psum(stats[1:], "tp"))
    exp_sum = jnp.maximum(stats.exp_sum, SMALLEST)
    logsumexp = stats.largest + jnp.log(exp_sum)  # [n, k]
    entropy = jnp.log(exp_sum[:, :1]) - stats.entropy_sum / exp_sum[:, :1]
    logps = stats.chosen[:, 0] - logsumexp[:, -1]
    return logps.reshape(lead), entropy.reshape(*lead, 1), logsumexp.reshape(*lead, k)


def _backward_shard(
    call: CallSettings,
    hidden: jax.Array,
    lm_head: jax.Array,
    target: Target,
    inputs: BackwardInputs,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of hidden and lm_head, in their dtypes."""
    shape = hidden.shape
    hidden, target, inputs = _flatten_tokens((hidden, target, inputs))
    size = _tile_size(call, lm_head, hidden)
    backward = call.kernel.backward if call.kernel else _backward_tile
    inputs = call.kernel.pack(inputs) if call.kernel else inputs

    def one_tile(i: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tile, (grad_hidden, grad_lm_head) = _tile(call, lm_head, size, i, hidden.dtype), grads
        grad_hidden, grad_w = backward(call, hidden, tile, target, inputs, grad_hidden)
        return grad_hidden, _add_tile(call, grad_lm_head, i, grad_w)

    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(lm_head.shape, jnp.float32)
    grads = jax.lax.fori_loop(0, -(-lm_head.shape[0] // size), one_tile, zeros)
    if call.mesh:
        grads = jax.lax.psum(grads[0], "tp"), jax.lax.psum(grads[1], "dp")
    return grads[0].reshape(shape).astype(hidden.dtype), grads[1].astype(lm_head.dtype)


# ---- Inside a tile; the TPU kernel calls dot, forward_tile and logits_gradient with a part of n --


def dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Contracts axis_a of a with axis_b of b, in float32."""
    # A TPU would round float32 operands to bfloat16 by default.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    how = {"precision": precision, "preferred_element_type": jnp.float32}
    return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), **how)


def _logits(
    call: CallSettings, hidden: jax.Array, tile: Tile, target: Target
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns three arrays [n, v]: the logits of the tile in float32, whether a logit is new (its
    row is not a repeated row), and whether it is the new logit of the sampled token."""
    logits = dot(hidden, tile.w, 1, 1) * (1 / call.temperature)  # [n, v]
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_new = column >= tile.repeated
    return logits, is_new, is_new & (column == target.ids - tile.first)


def _in_support(support: jax.Array, tile: Tile) -> jax.Array:
    """Returns [n, v] bool: whether the token of a column is in the support.

    Each word has the bits of 32 columns, so that an id is compared with v / 32 words, not with v
    columns. With 3 words, column 7 is bit 2 of word 1. No two of the ids set the same bit, and the
    sum of their bits is the word.
    """
    words = -(-len(tile.w) // 32)
    column = support[:, :, None] - tile.first  # [n, U, 1]
    word = jnp.where((column >= 0) & (column < 32 * words), column % words, -1)
    bit = jnp.uint32(1) << (column // words).astype(jnp.uint32)
    packed = jnp.where(word == jnp.arange(words), bit, 0).sum(axis=1, dtype=jnp.uint32)
    bits = jnp.concatenate([packed >> i & 1 == 1 for i in range(32)], axis=1)  # [n, 32 * words]
    return bits[:, : len(tile.w)]


def forward_tile(
    call: CallSettings, hidden: jax.Array, tile: Tile, target: Target, stats: Statistics
) -> Statistics:
    """Returns stats with the tile added. hidden: [n, D]."""
    logits, is_new, is_sampled = _logits(call, hidden, tile, target)
    logits = jnp.where(is_new, logits, MASKED)
    chosen = jnp.where(is_sampled, logits, 0.0).sum(axis=1, keepdims=True)
    before = stats.relative_to(jnp.maximum(stats.largest, logits.max(axis=1, keepdims=True)))
    below = logits - before.largest
    e = jnp.exp(below)  # [n, v]
    exp_sum, entropy_sum = (x.sum(axis=1, keepdims=True) for x in (e, e * below))  # [n, 1]
    if target.support is not None:
        kept = jnp.where(_in_support(target.support, tile), e, 0.0).sum(axis=1, keepdims=True)
        exp_sum = jnp.concatenate([exp_sum, kept], axis=1)  # [n, 2]
    return Statistics(
        before.largest,
        before.chosen + chosen,
        before.exp_sum + exp_sum,
        before.entropy_sum + entropy_sum,
    )


def logits_gradient(
    call: CallSettings, hidden: jax.Array, tile: Tile, target: Target, inputs: BackwardInputs
) -> jax.Array:
    """Returns the gradient of hidden w^T, the logits before the division by the temperature: [n, v]
    in the dtype of hidden."""
    logits, is_new, is_sampled = _logits(call, hidden, tile, target)
    logsumexp = inputs.logsumexp[:, :1]
    logp = logits - logsumexp
    p = jnp.where(is_new, jnp.exp(logp), 0.0)
    drawn = p  # the probability with which the sampler draws a token
    if target.support is not None:
        within = p * jnp.exp(logsumexp - inputs.logsumexp[:, 1:])
        drawn = jnp.where(_in_support(target.support, tile), within, 0.0)
    grad_logits = jnp.where(is_sampled, inputs.grad_logp, 0.0) - drawn * inputs.grad_logp
    grad_logits -= p * inputs.grad_entropy * (logp + inputs.entropy)
    return (grad_logits * (1 / call.temperature)).astype(hidden.dtype)


def _backward_tile(
    call: CallSettings,
    hidden: jax.Array,
    tile: Tile,
    target: Target,
    inputs: BackwardInputs,
    grad_hidden: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns grad_hidden [n, D] plus the tile's part, and grad_w [v, D], both in float32."""
    grad_logits = logits_gradient(call, hidden, tile, target, inputs)  # [n, v]
    return grad_hidden + dot(grad_logits, tile.w, 1, 0), dot(grad_logits, hidden, 0, 0)
