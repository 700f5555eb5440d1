"""Log-probabilities and entropies of tokens from hidden states, without an array of all logits.

If the logits need more than LOGITS_TILE_BYTES, or a kernel computes them, the program walks the
vocabulary in tiles of the lm_head. Forward keeps a running maximum, sum, entropy and the sampled
token's logit for each token. Backward computes the logits of each tile again. A tile is computed by
the plain jnp of this file, or by the TPU kernel of loss_pallas.py; docs/kernel.md explains both.
These two files can be copied into another project.

A support lists the tokens that the sampler's filters have kept; then the log-probability is that of
the softmax over the support.

Dimensions: V vocabulary, D model width, U ids of a support. `tokens` are all tokens of a device,
`tile` the lm_head rows of a tile, `sums` 1, or 2 with a support. A mesh splits the sequences over
(dp, fsdp), V over tp and D over fsdp.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

if TYPE_CHECKING:
    from loss_pallas import Kernel

# Float32 logits that jnp may hold per device; 4096 columns for 16k tokens make fast matmuls.
LOGITS_TILE_BYTES = 256 * 2**20
MASKED = -1e30  # A logit or score of probability 0. It is finite because inf - inf is NaN.
SMALLEST = 1e-37  # The smallest sum of exponentials, because the logarithm of 0 is infinite.
BATCH_AXES = ("dp", "fsdp")  # mesh axes over which the sequences are split


def token_logps(
    hidden: jax.Array,
    lm_head: jax.Array,
    ids: jax.Array,
    *,
    support: jax.Array | None = None,
    temperature: float = 1.0,
    mesh: Mesh | None = None,
    kernel: "Kernel | None" = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns log p of `ids` and the entropy of each distribution, both [...] float32 nats.

    With a support p is the softmax over its tokens; the entropy is always that of all tokens.
    hidden: [..., D] float32 or bfloat16; the matmuls use this dtype. lm_head: [V, D].
    ids: [...] int32. The logits are float32, divided by temperature.
    support: [..., U] int32. The U ids of a token differ; unused places are -1.
    mesh: its axes are dp, fsdp and tp; the first axis of hidden and both axes of lm_head are split
    over them. None: one device holds everything.
    kernel: None computes in jnp; small inputs then are computed by token_logps_reference.
    Raises ValueError for a kernel with a support.
    """
    if kernel and support is not None:
        raise ValueError("the kernel of POLICY_LOSS_IMPL=pallas computes no support; jax does")
    logits_bytes = 4 * ids.size * lm_head.shape[0] // (mesh.size if mesh else 1)
    if kernel is None and logits_bytes <= LOGITS_TILE_BYTES:
        return token_logps_reference(hidden, lm_head, ids, support=support, temperature=temperature)
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
    logits = dot(hidden, head, hidden.ndim - 1, 1) / temperature  # [..., V]
    logsumexp = jax.nn.logsumexp(logits, axis=-1)  # [...]
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]  # [...]
    log_probs = logits - logsumexp[..., None]  # [..., V]
    # logsumexp - sum(p logits) would cancel for large logits and leave few digits of the entropy.
    entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=-1)
    if support is None:
        return chosen - logsumexp, entropy
    in_support = jnp.take_along_axis(log_probs, jnp.maximum(support, 0), axis=-1)  # [..., U]
    in_support = jnp.where(support < 0, MASKED, in_support)
    return chosen - logsumexp - jax.nn.logsumexp(in_support, axis=-1), entropy


# ---- Around the tiles ----------------------------------------------------------------------------


class CallSettings(NamedTuple):
    """The arguments of token_logps that are not arrays; hashable, as custom_vjp needs."""

    temperature: float
    mesh: Mesh | None
    kernel: "Kernel | None"


class Target(NamedTuple):
    """The ids whose logits are needed."""

    ids: jax.Array  # [..., 1] int32, the sampled token
    support: jax.Array | None  # [..., U] int32, -1 in unused places


class Statistics(NamedTuple):
    """The running statistics of each token in forward, after the tiles so far; float32. The first
    of the sums is over the vocabulary, the second over the support."""

    largest: jax.Array  # [tokens, 1], the largest logit
    chosen: jax.Array  # [tokens, 1], the sampled token's logit; 0 before its tile
    exp_sum: jax.Array  # [tokens, sums], the sum of e = exp(logit - largest)
    entropy_sum: jax.Array  # [tokens, 1], the sum of e (logit - largest) over all tokens

    def relative_to(self, largest: jax.Array) -> "Statistics":
        """The same statistics relative to a larger logit [tokens, 1]."""
        below = self.largest - largest
        scale = jnp.exp(below)
        entropy_sum = scale * (self.entropy_sum + below * self.exp_sum[:, :1])
        return Statistics(largest, self.chosen, scale * self.exp_sum, entropy_sum)


class BackwardInputs(NamedTuple):
    """The gradients of the loss and the results of forward for each token; float32."""

    grad_logp: jax.Array  # [..., 1]
    grad_entropy: jax.Array  # [..., 1]
    entropy: jax.Array  # [..., 1]
    logsumexp: jax.Array  # [..., sums]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _tiled_token_logps(
    hidden: jax.Array, lm_head: jax.Array, target: Target, call: CallSettings
) -> tuple[jax.Array, jax.Array]:
    """Returns logps [...] and the entropy [..., 1]."""
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


def _on_mesh(program: Callable[..., Any], call: CallSettings, *arrays: Any) -> Any:
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
    """Consecutive rows of the lm_head, and their position in the vocabulary."""

    w: jax.Array  # [tile, D] in the dtype of hidden
    first: jax.Array  # token id of the first row
    repeated: jax.Array  # number of rows at the front that the previous tile has counted already


def _tile_size(call: CallSettings, lm_head: jax.Array, hidden: jax.Array) -> int:
    """Returns the rows of a tile, for a device's part of the lm_head [V / tp, D / fsdp] and of
    hidden [tokens, D]."""
    if call.kernel:
        size = call.kernel.blocks(hidden)[1]
    else:
        size = LOGITS_TILE_BYTES // (4 * hidden.shape[0]) // 128 * 128
    return min(max(size, 128), lm_head.shape[0])


def _tile(call: CallSettings, lm_head: jax.Array, size: int, i: jax.Array, dtype: np.dtype) -> Tile:
    """Returns tile i, gathered over fsdp. The last tile overlaps the one before it, so that all
    tiles have the same size without padding."""
    local_vocab = lm_head.shape[0]  # V / tp
    start = jnp.minimum(i * size, local_vocab - size)
    w = jax.lax.dynamic_slice_in_dim(lm_head, start, size).astype(dtype)  # [tile, D / fsdp]
    if call.mesh is None:
        return Tile(w, start, i * size - start)
    w = jax.lax.all_gather(w, "fsdp", axis=1, tiled=True)  # [tile, D]
    return Tile(w, jax.lax.axis_index("tp") * local_vocab + start, i * size - start)


def _add_tile(
    call: CallSettings, grad_lm_head: jax.Array, i: jax.Array, grad_w: jax.Array
) -> jax.Array:
    """Adds grad_w [tile, D] of tile i, summed over fsdp, to grad_lm_head [V / tp, D / fsdp]."""
    size = len(grad_w)
    start = jnp.minimum(i * size, len(grad_lm_head) - size)
    if call.mesh:  # each device keeps [tile, D / fsdp] of the sum
        grad_w = jax.lax.psum_scatter(grad_w, "fsdp", scatter_dimension=1, tiled=True)
    before = jax.lax.dynamic_slice_in_dim(grad_lm_head, start, size)
    return jax.lax.dynamic_update_slice_in_dim(grad_lm_head, before + grad_w, start, 0)


def _flatten_tokens(arrays: Any) -> Any:
    """The arrays [..., width] as [tokens, width]."""
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), arrays)


def _forward_shard(
    call: CallSettings, hidden: jax.Array, lm_head: jax.Array, target: Target
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns logps [...], the entropy [..., 1] and the logsumexp over the vocabulary and over the
    support [..., sums], of this device's tokens."""
    lead, kernel = hidden.shape[:-1], call.kernel
    hidden, target = _flatten_tokens((hidden, target))
    tokens, size = len(hidden), _tile_size(call, lm_head, hidden)
    sums = 1 if target.support is None else 2

    def add_tile(i: jax.Array, stats: Any) -> Any:
        tile = _tile(call, lm_head, size, i, hidden.dtype)
        forward = kernel.forward if kernel else forward_tile
        return forward(call, hidden, tile, target, stats)

    zeros, lowest = jnp.zeros((tokens, 1)), jnp.full((tokens, 1), MASKED, jnp.float32)
    stats: Any = Statistics(lowest, zeros, exp_sum=jnp.zeros((tokens, sums)), entropy_sum=zeros)
    # The kernel needs the statistics in one array. They are packed once, not for every tile.
    stats = kernel.pack(stats) if kernel else stats
    stats = jax.lax.fori_loop(0, -(-lm_head.shape[0] // size), add_tile, stats)
    stats = Statistics(*kernel.unpack(stats)) if kernel else stats
    if call.mesh:
        stats = stats.relative_to(jax.lax.pmax(stats.largest, "tp"))
        stats = Statistics(stats.largest, *jax.lax.psum(stats[1:], "tp"))
    exp_sum = jnp.maximum(stats.exp_sum, SMALLEST)
    logsumexp = stats.largest + jnp.log(exp_sum)  # [tokens, sums]
    entropy = jnp.log(exp_sum[:, :1]) - stats.entropy_sum / exp_sum[:, :1]
    logps = stats.chosen[:, 0] - logsumexp[:, -1]
    return logps.reshape(lead), entropy.reshape(*lead, 1), logsumexp.reshape(*lead, sums)


def _backward_shard(
    call: CallSettings,
    hidden: jax.Array,
    lm_head: jax.Array,
    target: Target,
    inputs: BackwardInputs,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of hidden and lm_head, in their dtypes."""
    shape, kernel = hidden.shape, call.kernel
    hidden, target, inputs = _flatten_tokens((hidden, target, inputs))
    size = _tile_size(call, lm_head, hidden)
    packed: Any = kernel.pack(inputs) if kernel else inputs

    def add_tile(i: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tile, (grad_hidden, grad_lm_head) = _tile(call, lm_head, size, i, hidden.dtype), grads
        backward = kernel.backward if kernel else _backward_tile
        grad_hidden, grad_w = backward(call, hidden, tile, target, packed, grad_hidden)
        return grad_hidden, _add_tile(call, grad_lm_head, i, grad_w)

    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(lm_head.shape, jnp.float32)
    grads = jax.lax.fori_loop(0, -(-lm_head.shape[0] // size), add_tile, zeros)
    if call.mesh:
        grads = jax.lax.psum(grads[0], "tp"), jax.lax.psum(grads[1], "dp")
    return grads[0].reshape(shape).astype(hidden.dtype), grads[1].astype(lm_head.dtype)


# ---- One tile; the TPU kernel calls these functions with a block of tokens -----------------------


def dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Contracts axis_a of a with axis_b of b, in float32."""
    # A TPU would round float32 operands to bfloat16 by default.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = ((axis_a,), (axis_b,)), ((), ())
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def _logits(
    call: CallSettings, hidden: jax.Array, tile: Tile, target: Target
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns three arrays [tokens, tile]: the float32 logits of the tile, whether a logit is new
    (its row is not a repeated row), and whether it is the new logit of the sampled token."""
    logits = dot(hidden, tile.w, 1, 1) * (1 / call.temperature)  # [tokens, tile]
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_new = column >= tile.repeated
    return logits, is_new, is_new & (column == target.ids - tile.first)


def _in_support(support: jax.Array, tile: Tile) -> jax.Array:
    """Returns [tokens, tile] bool: whether the token of a column is in the support.

    Each word has the bits of 32 columns, so that an id is compared with tile / 32 words, not with
    all columns. With 3 words, column 7 is bit 2 of word 1. No two of the ids set the same bit, and
    the sum of their bits is the word.
    """
    words = -(-len(tile.w) // 32)
    column = support[:, :, None] - tile.first  # [tokens, U, 1]
    word = jnp.where((column >= 0) & (column < 32 * words), column % words, -1)
    bit = jnp.uint32(1) << (column // words).astype(jnp.uint32)
    packed = jnp.where(word == jnp.arange(words), bit, 0).sum(axis=1, dtype=jnp.uint32)
    bits = jnp.concatenate(
        [packed >> i & 1 == 1 for i in range(32)], axis=1
    )  # [tokens, 32 * words]
    return bits[:, : len(tile.w)]


def forward_tile(
    call: CallSettings, hidden: jax.Array, tile: Tile, target: Target, stats: Statistics
) -> Statistics:
    """Returns stats with the tile added. hidden: [tokens, D]."""
    logits, is_new, is_sampled = _logits(call, hidden, tile, target)
    logits = jnp.where(is_new, logits, MASKED)
    chosen = jnp.where(is_sampled, logits, 0.0).sum(axis=1, keepdims=True)
    before = stats.relative_to(jnp.maximum(stats.largest, logits.max(axis=1, keepdims=True)))
    below = logits - before.largest
    e = jnp.exp(below)  # [tokens, tile]
    exp_sum, entropy_sum = (x.sum(axis=1, keepdims=True) for x in (e, e * below))  # [tokens, 1]
    if target.support is not None:
        in_support = jnp.where(_in_support(target.support, tile), e, 0.0)
        exp_sum = jnp.concatenate([exp_sum, in_support.sum(axis=1, keepdims=True)], axis=1)
    return Statistics(
        before.largest,
        before.chosen + chosen,
        before.exp_sum + exp_sum,
        before.entropy_sum + entropy_sum,
    )


def logits_gradient(
    call: CallSettings, hidden: jax.Array, tile: Tile, target: Target, inputs: BackwardInputs
) -> jax.Array:
    """Returns the gradient of the logits before their division by the temperature: [tokens, tile]
    in the dtype of hidden."""
    logits, is_new, is_sampled = _logits(call, hidden, tile, target)
    logsumexp = inputs.logsumexp[:, :1]
    logp = logits - logsumexp
    p = jnp.where(is_new, jnp.exp(logp), 0.0)
    sampling_p = p  # the probability with which the sampler draws a token
    if target.support is not None:
        p_in_support = p * jnp.exp(logsumexp - inputs.logsumexp[:, 1:])
        sampling_p = jnp.where(_in_support(target.support, tile), p_in_support, 0.0)
    grad_logits = jnp.where(is_sampled, inputs.grad_logp, 0.0) - sampling_p * inputs.grad_logp
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
    """Returns grad_hidden [tokens, D] plus the tile's part, and grad_w [tile, D], both float32."""
    grad_logits = logits_gradient(call, hidden, tile, target, inputs)  # [tokens, tile]
    return grad_hidden + dot(grad_logits, tile.w, 1, 0), dot(grad_logits, hidden, 0, 0)
