"""Attention of long rows, in training and prefill, in blocks of queries and keys.

Pairs of blocks in which no query sees a key are skipped, and the scores of one pair exist at a
time, so that memory grows with the tokens and not with their square: the online softmax of
FlashAttention (arXiv 2205.14135) in plain JAX. The results are those of attention.py.

Dimensions as in attention.py. Arrays in blocks have a first dimension for them:
q [num_blocks, X, N, H/N, block_size, h], k and v [num_blocks, X, N, block_size, h], and each array
of `tokens`, which are the arguments of `visible`, [num_blocks, X, block_size] int32. The slots of
all rows are equal, so X is 1 in theirs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from model.attention import ALL_POSITIONS, KV, PackedRows, multiply, visible
from model.layout import Layout
from model.logps import MASKED

# Tokens of a block. On CPUs 64 was the fastest of 32 to 512. Elsewhere small blocks would
# be many small kernels.
BLOCK = {"cpu": 64, "others": 512}


def block_attention(q: jax.Array, kv: KV, rows: PackedRows, layout: Layout) -> jax.Array:
    q = q * q.shape[-1] ** -0.5
    return on_each_device(functools.partial(_blocks_shard, rows.S, layout), q, kv, rows, layout)


# ---- Each device computes its rows and heads -----------------------------------------------------


def on_each_device(
    attend: Callable[..., jax.Array], q: jax.Array, kv: KV, rows: PackedRows, layout: Layout
) -> jax.Array:
    """What attend computes of the rows and heads of each device: [X, t, H*h]. Rows are sharded
    over the batch axes, and heads over tp if it is not one of them. q: [X, t, H, h].

    attend: a function as _blocks_shard is, after its first two arguments.
    """
    head_axis = None if "tp" in layout.batch_axes else "tp"
    k, v = kv.k.swapaxes(2, 3), kv.v  # [X, N, t, h]
    if head_axis and k.shape[1] % layout.mesh.shape["tp"]:  # each query head gets its kv head
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in (k, v))
    batch, head_spec = PartitionSpec(layout.batch_axes), PartitionSpec(layout.batch_axes, head_axis)
    shard = jax.shard_map(
        attend,
        mesh=layout.mesh,
        in_specs=(head_spec, head_spec, head_spec, batch, batch, *[batch for _ in rows.window]),
        out_specs=PartitionSpec(layout.batch_axes, None, head_axis),
        check_vma=False,
    )
    return shard(q.swapaxes(1, 2), k, v, rows.segment_ids, rows.start, *rows.window)


# ---- Blocks of queries and keys ------------------------------------------------------------------


def _blocks_shard(
    S: int,
    layout: Layout,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    start: jax.Array,
    *window: jax.Array,
) -> jax.Array:
    """Attention of the rows and heads of a device, in blocks: [X, t, H*h]. q: [X, H, t, h]. k, v:
    [X, N, t, h]. segment_ids, start, window: [X, t] int32, of PackedRows."""
    (X, H, t, h), N = q.shape, k.shape[1]
    platform = layout.mesh.devices.flat[0].platform
    block_size = min(BLOCK["cpu" if platform == "cpu" else "others"], t)
    missing = -t % block_size

    def split(x: jax.Array, axis: int, padding: int = 0) -> jax.Array:
        pad = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, pad, constant_values=padding)
        blocks = x.reshape(*x.shape[:axis], -1, block_size, *x.shape[axis + 1 :])
        return jnp.moveaxis(blocks, axis, 0)

    slot = jnp.arange(t + missing).reshape(-1, 1, block_size)
    tokens = slot, split(segment_ids, 1, padding=-1), *(split(x, 1) for x in (start, *window))
    pairs, count = block_pairs(needed_blocks(tokens[1:], S))
    q = split(q.reshape(X, N, H // N, t, h), 3)
    out = _attend_in_blocks(q, split(k, 2), split(v, 2), tokens, pairs, count, S)
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(X, t + missing, H * h)[:, :t]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend_in_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: tuple[jax.Array, ...],
    pairs: jax.Array,
    count: jax.Array,
    S: int,
) -> jax.Array:
    """Attention of a scaled q, in its shape and dtype. pairs, count: see block_pairs."""
    return _forward(q, k, v, tokens, pairs, count, S)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: tuple[jax.Array, ...],
    pairs: jax.Array,
    count: jax.Array,
    S: int,
) -> tuple[jax.Array, Any]:
    """The attention, and the residuals of _backward: the arguments, the attention, and the
    logarithm of the sum of each query's weights [num_blocks, X, N, H/N, block_size] float32.

    A query keeps its highest score so far, and relative to it the sum of its weights and of its
    weighted values. MASKED is finite, so a query whose first blocks are all masked sums weights of
    1 there; its first visible score rescales them to 0.
    """

    def step(index: jax.Array, carry: Any) -> Any:
        max_score, total, values = carry
        i, j = pairs[index]
        scores = _scores(q[i], k[j], tokens, S, i, j)
        new_max = jnp.maximum(max_score[i], scores.max(axis=-1))
        weights, scale = jnp.exp(scores - new_max[..., None]), jnp.exp(max_score[i] - new_max)
        new_values = multiply("xnmqk,xnkh->xnmqh", weights.astype(q.dtype), v[j])
        return (
            max_score.at[i].set(new_max),
            total.at[i].set(total[i] * scale + weights.sum(axis=-1)),
            values.at[i].set(values[i] * scale[..., None] + new_values),
        )

    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    first = zeros + MASKED, zeros, jnp.zeros(q.shape, jnp.float32)
    max_score, total, values = jax.lax.fori_loop(0, count, step, first)
    out = (values / total[..., None]).astype(q.dtype)
    return out, (q, k, v, tokens, pairs, count, out, max_score + jnp.log(total))


def _backward(S: int, residuals: Any, grad_out: jax.Array) -> Any:
    """The gradients of q, k and v. The attention weights are recomputed from the scores and their
    logsumexp."""
    q, k, v, tokens, pairs, count, out, log_total = residuals
    inner = (grad_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)

    def step(index: jax.Array, carry: Any) -> Any:
        grad_q, grad_k, grad_v = carry
        i, j = pairs[index]
        weights = jnp.exp(_scores(q[i], k[j], tokens, S, i, j) - log_total[i][..., None])
        grad_weights = multiply("xnmqh,xnkh->xnmqk", grad_out[i], v[j])
        grad_scores = (weights * (grad_weights - inner[i][..., None])).astype(q.dtype)
        weights = weights.astype(q.dtype)
        return (
            grad_q.at[i].add(multiply("xnmqk,xnkh->xnmqh", grad_scores, k[j])),
            grad_k.at[j].add(multiply("xnmqk,xnmqh->xnkh", grad_scores, q[i])),
            grad_v.at[j].add(multiply("xnmqk,xnmqh->xnkh", weights, grad_out[i])),
        )

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    grads = jax.lax.fori_loop(0, count, step, zeros)
    grad_q, grad_k, grad_v = (x.astype(y.dtype) for x, y in zip(grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v, None, None, None


_attend_in_blocks.defvjp(_forward, _backward)


def _scores(
    q: jax.Array, k: jax.Array, tokens: tuple[jax.Array, ...], S: int, i: jax.Array, j: jax.Array
) -> jax.Array:
    """The masked scores of q, block i of queries, and k, block j of keys: [X, N, H/N, block_size,
    block_size] float32."""
    queries = [x[i][:, None, None, :, None] for x in tokens]
    keys = [x[j][:, None, None, None, :] for x in tokens]
    return jnp.where(visible(queries, keys, S), multiply("xnmqh,xnkh->xnmqk", q, k), MASKED)


def block_pairs(needed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All pairs [num_blocks**2, 2] of a block of queries and a block of keys, first those that are
    needed, and the number of these. needed: see needed_blocks."""
    order = jnp.argsort(~needed.reshape(-1), stable=True)
    return jnp.stack([order // len(needed), order % len(needed)], axis=1), needed.sum()


def needed_blocks(tokens: tuple[jax.Array, ...], S: int) -> jax.Array:
    """[num_blocks, num_blocks] bool: whether in any row a query of a block may see a key of a
    block. Every block sees itself. tokens: without the slots."""
    segment_ids, start, *window = tokens
    num_blocks, _, block_size = segment_ids.shape
    is_padding, t = segment_ids < 0, num_blocks * block_size
    lowest = jnp.where(is_padding, t, segment_ids).min(axis=2)  # [num_blocks, X]
    highest = segment_ids.max(axis=2)
    first = jnp.where(is_padding, t, start).min(axis=2)
    query, key = jnp.arange(num_blocks)[:, None], jnp.arange(num_blocks)
    key_end = (key[:, None] + 1) * block_size  # [num_blocks, 1]
    seen = (lowest <= highest[:, None]) & (lowest[:, None] <= highest)  # the same prompt
    seen &= (key_end - block_size < S) | (key_end > first[:, None])
    if window:
        position, oldest = window
        newest = jnp.where(is_padding, -1, position).max(axis=2)  # of the keys
        oldest = jnp.where(is_padding, ALL_POSITIONS, oldest).min(axis=2)  # of the queries
        seen &= newest >= oldest[:, None]
    return (key <= query) & (seen.any(axis=2) | (key == query))
