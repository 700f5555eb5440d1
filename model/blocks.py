"""Attention of long rows, in training and prefill, in blocks of queries and keys.

Pairs of blocks in which no query sees a key are skipped, and the scores of one pair exist at a
time, so that memory grows with the tokens and not with their square: the online softmax of
FlashAttention (arXiv 2205.14135) in plain JAX. The results are those of attention.py.

There are two schedules. A loop over the pairs that are needed, whose number is an array, computes
only these. But a GPU waits for its host before each iteration of such a loop. There, all blocks of
queries compute at once, in rounds: each has a list of the blocks of keys that it needs, and takes
one of them in each round. The number of rounds is a shape, which the compiler knows.

Dimensions as in attention.py. Arrays in blocks have a first dimension for them:
q [num_blocks, X, N, H/N, block_size, h], k and v [num_blocks, X, N, block_size, h], and each array
of `tokens`, which are the arguments of `visible`, [num_blocks, X, block_size] int32. The slots of
all rows are equal, so X is 1 in theirs. In rounds, a function has the arrays of one row, and the
dimension of its blocks takes the place of X.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from model.attention import ALL_POSITIONS, KV, PackedRows, multiply, visible
from model.layout import Layout, gather_processes
from model.logps import MASKED, softcap

# Tokens of a block. On CPUs 64 was the fastest of 32 to 512. Elsewhere small blocks would
# be many small kernels.
BLOCK = {"cpu": 64, "gpu": 256, "others": 512}
IN_ROUNDS = {"gpu"}  # the platforms with this schedule
# Rounds whose code follows each other. In a loop a round has 1.5 times as many kernels, but memory
# holds the scores of all rounds that are not in a loop.
UNROLLED_ROUNDS = 3


def block_attention(
    q: jax.Array, kv: KV, rows: PackedRows, layout: Layout, cap: float = 0.0
) -> jax.Array:
    q = q * q.shape[-1] ** -0.5
    (X, t), lists = rows.segment_ids.shape, rows.key_blocks
    block_size, in_rounds = schedule(t, layout)
    if in_rounds and lists is None:  # Any query may see all keys before it.
        n = math.ceil(t / block_size)
        lists = np.tile(np.where(np.tri(n), np.arange(n), n).astype(np.int32), (X, 1, 1))
    shard = functools.partial(_blocks_shard, rows.S, cap, layout)
    arrays = rows.segment_ids, rows.start, rows.window, lists if in_rounds else None
    return on_each_device(shard, q, kv, layout, *arrays)


def with_key_blocks(micro_steps: Sequence[Any], S: int, layout: Layout) -> Sequence[Any]:
    """The rows of each micro-step with their lists as key_blocks: [X, num_blocks, R] int32, the
    blocks of keys that a block of queries needs, then num_blocks. Not where no lists are needed.

    micro_steps: named tuples with segment_ids and start of PackedRows, in NumPy arrays of this
    process. R is the length of the longest list of all processes, rounded up to one of two values
    between two powers of two, so that a run compiles few programs.
    """
    t = micro_steps[0].segment_ids.shape[1] if micro_steps else 1
    block_size, in_rounds = schedule(t, layout)
    if not in_rounds:
        return micro_steps

    def needed_of_row(*row: np.ndarray) -> np.ndarray:
        padded = (np.pad(x, (0, -t % block_size), constant_values=-1) for x in row)
        return needed_blocks(tuple(x.reshape(-1, 1, block_size) for x in padded), S)

    needed = [np.array([*map(needed_of_row, x.segment_ids, x.start)]) for x in micro_steps]
    counts = [np.ones(1, int), *(x.sum(axis=-1).ravel() for x in needed)]
    most = int(gather_processes(np.concatenate(counts).max(keepdims=True)).max())
    step, n = max((1 << (most - 1).bit_length()) // 4, 1), math.ceil(t / block_size)
    R = min(math.ceil(most / step) * step, n)
    lists = [np.sort(np.where(x, np.arange(n), n))[..., :R].astype(np.int32) for x in needed]
    return [x._replace(key_blocks=y) for x, y in zip(micro_steps, lists, strict=True)]


def schedule(slots: int, layout: Layout) -> tuple[int, bool]:
    """The tokens of a block, and whether blocks are computed in rounds."""
    platform = layout.mesh.devices.flat[0].platform
    return min(BLOCK.get(platform, BLOCK["others"]), slots), platform in IN_ROUNDS


# ---- Each device computes its rows and heads -----------------------------------------------------


def on_each_device(
    attend: Callable[..., jax.Array], q: jax.Array, kv: KV, layout: Layout, *of_rows: Any
) -> jax.Array:
    """What attend computes of the rows and heads of each device: [X, t, H*h]. Rows are sharded
    over the batch axes, and heads over tp if it is not one of them. q: [X, t, H, h].

    attend: gets q [X, H, t, h], k and v [X, N, t, h] and of_rows. of_rows: pytrees of [X, ...].
    """
    head_axis = None if "tp" in layout.batch_axes else "tp"
    k, v = kv.k.swapaxes(2, 3), kv.v  # [X, N, t, h]
    if head_axis and k.shape[1] % layout.mesh.shape["tp"]:  # each query head gets its kv head
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in (k, v))
    batch, head_spec = PartitionSpec(layout.batch_axes), PartitionSpec(layout.batch_axes, head_axis)
    shard = jax.shard_map(
        attend,
        mesh=layout.mesh,
        in_specs=(head_spec, head_spec, head_spec, *[batch for _ in of_rows]),
        out_specs=PartitionSpec(layout.batch_axes, None, head_axis),
        check_vma=False,
    )
    return shard(q.swapaxes(1, 2), k, v, *of_rows)


# ---- Blocks of queries and keys ------------------------------------------------------------------


def _blocks_shard(
    S: int,
    cap: float,
    layout: Layout,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    start: jax.Array,
    window: tuple[jax.Array, ...],
    lists: jax.Array | None,
) -> jax.Array:
    """Attention of the rows and heads of a device, in blocks: [X, t, H*h]. q: [X, H, t, h]. k, v:
    [X, N, t, h]. segment_ids, start, window: of PackedRows. lists: key_blocks, if in rounds."""
    (X, H, t, h), N = q.shape, k.shape[1]
    block_size, _ = schedule(t, layout)
    missing = -t % block_size

    def split(x: jax.Array, axis: int, padding: int = 0) -> jax.Array:
        pad = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, pad, constant_values=padding)
        blocks = x.reshape(*x.shape[:axis], -1, block_size, *x.shape[axis + 1 :])
        return jnp.moveaxis(blocks, axis, 0)

    slot = jnp.arange(t + missing).reshape(-1, 1, block_size)
    tokens = slot, split(segment_ids, 1, padding=-1), *(split(x, 1) for x in (start, *window))
    arrays = split(q.reshape(X, N, H // N, t, h), 3), split(k, 2), split(v, 2)
    attend = functools.partial(_attend_in_blocks, S, cap)
    if lists is None:
        out = attend(*arrays, tokens, block_pairs(needed_blocks(tokens[1:], S)))
    else:
        slot = jnp.broadcast_to(slot, (len(slot), X, block_size))
        out = jax.vmap(attend, (1, 1, 1, 1, 0), 1)(*arrays, (slot, *tokens[1:]), lists)
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(X, t + missing, H * h)[:, :t]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_in_blocks(
    S: int, cap: float, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Any, steps: Any
) -> jax.Array:
    """Attention of a scaled q, in its shape and dtype. steps: the pairs and their number from
    block_pairs, or the lists [num_blocks, R] of a row."""
    return _forward(S, cap, q, k, v, tokens, steps)[0]


def _forward(
    S: int, cap: float, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Any, steps: Any
) -> tuple[jax.Array, Any]:
    """The attention, and the residuals of _backward: the arguments, the attention, and the
    logarithm of the sum of each query's weights [num_blocks, X, N, H/N, block_size] float32.

    A query keeps its highest score so far, and relative to it the sum of its weights and of its
    weighted values. MASKED is finite, so a query whose first blocks are all masked sums weights of
    1 there; its first visible score rescales them to 0.
    """

    def step(carry: Any, i: Any, j: jax.Array) -> Any:
        max_score, total, values = (x[i] for x in carry)
        scores = _scores(q, k, tokens, S, cap, i, j)
        new_max = jnp.maximum(max_score, scores.max(axis=-1))
        weights, scale = jnp.exp(scores - new_max[..., None]), jnp.exp(max_score - new_max)
        new_values = multiply("xnmqk,xnkh->xnmqh", weights.astype(q.dtype), _take(v, j))
        new = new_max, total * scale + weights.sum(axis=-1), values * scale[..., None] + new_values
        return new if i is ... else tuple(x.at[i].set(y) for x, y in zip(carry, new, strict=True))

    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    first = zeros + MASKED, zeros, jnp.zeros(q.shape, jnp.float32)
    max_score, total, values = _run(steps, step, first)
    out = (values / total[..., None]).astype(q.dtype)
    return out, (q, k, v, tokens, steps, out, max_score + jnp.log(total))


def _backward(S: int, cap: float, residuals: Any, grad_out: jax.Array) -> Any:
    """The gradients of q, k and v. The attention weights are recomputed from the scores and their
    logsumexp."""
    q, k, v, tokens, steps, out, log_total = residuals
    inner = (grad_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)

    def step(carry: Any, i: Any, j: jax.Array) -> Any:
        grad_q, grad_k, grad_v = carry
        scores = _scores(q, k, tokens, S, cap, i, j)
        weights = jnp.exp(scores - log_total[i][..., None])
        grad_weights = multiply("xnmqh,xnkh->xnmqk", grad_out[i], _take(v, j))
        grad_scores = weights * (grad_weights - inner[i][..., None])
        if cap:  # Clipped, since the square of MASKED is infinite.
            grad_scores *= 1 - jnp.clip(scores / cap, -1, 1) ** 2
        grad_scores, weights = grad_scores.astype(q.dtype), weights.astype(q.dtype)
        return (
            _add(grad_q, i, multiply("xnmqk,xnkh->xnmqh", grad_scores, _take(k, j))),
            _add(grad_k, j, multiply("xnmqk,xnmqh->xnkh", grad_scores, q[i])),
            _add(grad_v, j, multiply("xnmqk,xnmqh->xnkh", weights, grad_out[i])),
        )

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    grads = _run(steps, step, zeros)
    grad_q, grad_k, grad_v = (x.astype(y.dtype) for x, y in zip(grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v, None, None


_attend_in_blocks.defvjp(_forward, _backward)


def _run(steps: Any, step: Callable[..., Any], carry: Any) -> Any:
    """The carry after all steps. step(carry, i, j): of block i of queries and block j of keys; in
    rounds i is `...`, all blocks of queries, and j [num_blocks] are their blocks of keys."""
    if isinstance(steps, tuple):
        pairs, count = steps
        return jax.lax.fori_loop(0, count, lambda n, carry: step(carry, *pairs[n]), carry)
    rounds, unroll = steps.T, min(UNROLLED_ROUNDS, steps.shape[1])
    return jax.lax.scan(lambda x, j: (step(x, ..., j), None), carry, rounds, unroll=unroll)[0]


def _take(x: jax.Array, j: jax.Array, fill: int | None = None) -> jax.Array:
    """The block or blocks j of x; for one that does not exist, `fill` or some other block."""
    mode = "clip" if fill is None else "fill"
    return x[j] if j.ndim == 0 else x.at[j].get(mode=mode, fill_value=fill)


def _add(x: jax.Array, at: Any, y: jax.Array) -> jax.Array:
    """x with y added to its block or blocks `at`."""
    if at is ...:
        return x + y
    if at.ndim == 0:
        return x.at[at].add(y)
    # This matmul adds the parts of a block in a fixed order. The atomic additions of a scatter
    # would have a different order in every run.
    is_block = (at[:, None] == jnp.arange(len(x))).astype(y.dtype)
    return x + jnp.einsum("ij,inkh->jnkh", is_block, y, precision=jax.lax.Precision.HIGHEST)


def _scores(
    q: jax.Array, k: jax.Array, tokens: Any, S: int, cap: float, i: Any, j: jax.Array
) -> jax.Array:
    """The masked scores of block i of queries and block j of keys, which may be none: [X, N, H/N,
    block_size, block_size] float32."""
    queries = [x[i][:, None, None, :, None] for x in tokens]
    # The keys of a block that does not exist are of no prompt.
    keys = [_take(x, j, fill=ALL_POSITIONS)[:, None, None, None, :] for x in tokens]
    scores = softcap(multiply("xnmqh,xnkh->xnmqk", q[i], _take(k, j)), cap)
    return jnp.where(visible(queries, keys, S), scores, MASKED)


def block_pairs(needed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All pairs [num_blocks**2, 2] of a block of queries and a block of keys, first those that are
    needed, and the number of these. needed: see needed_blocks."""
    order = jnp.argsort(~needed.reshape(-1), stable=True)
    return jnp.stack([order // len(needed), order % len(needed)], axis=1), needed.sum()


def needed_blocks(tokens: tuple[Any, ...], S: int) -> Any:
    """[num_blocks, num_blocks] bool: whether in any row a query of a block may see a key of a
    block. Every block sees itself. tokens: without the slots, of jax or of NumPy, as the result."""
    segment_ids, start, *window = tokens
    num_blocks, _, block_size = segment_ids.shape
    is_padding, t = segment_ids < 0, num_blocks * block_size
    xp = jnp if isinstance(segment_ids, jax.Array) else np
    lowest = xp.where(is_padding, t, segment_ids).min(axis=2)  # [num_blocks, X]
    highest = segment_ids.max(axis=2)
    first = xp.where(is_padding, t, start).min(axis=2)
    query, key = xp.arange(num_blocks)[:, None], xp.arange(num_blocks)
    key_end = (key[:, None] + 1) * block_size  # [num_blocks, 1]
    seen = (lowest <= highest[:, None]) & (lowest[:, None] <= highest)  # the same prompt
    seen &= (key_end - block_size < S) | (key_end > first[:, None])
    if window:
        position, oldest = window
        newest = xp.where(is_padding, -1, position).max(axis=2)  # of the keys
        oldest = xp.where(is_padding, ALL_POSITIONS, oldest).min(axis=2)  # of the queries
        seen &= newest >= oldest[:, None]
    return (key <= query) & (seen.any(axis=2) | (key == query))
