"""Linear attention of Qwen3.5: a short convolution and the gated delta rule (arXiv 2412.06464).

Instead of keys and values a head keeps a state [dk, dv] float32, whose size does not grow with
the tokens. Each token decays the state, corrects what it holds for the token's key, and reads it:

    state = exp(g) state
    state = state + k (beta (v - state^T k))^T
    out = state^T q

In decode `linear_attention_token` does just this. Training and prefill compute CHUNK tokens of a
row at once: a triangular system gives the corrections of a chunk, and only the states go from chunk
to chunk (arXiv 2406.06484).

In a packed row (rows.py) a prompt ends, and the first of its completions begins, at a multiple of
CHUNK slots, so each chunk belongs to one prompt or to its completions. The loop over the
chunks of a row takes a prompt, then its completions, then the next prompt. It carries two states:
that of the sequence so far, and that of the prompt's end, from which each completion begins. Masks
separate the completions that share a chunk. The convolution, too, reads the end of the prompt
before the first tokens of a completion.

Dimensions: X rows of t tokens, n chunks of c tokens in a row; B sequences in decode; N key heads, M
value heads for each of them, dk and dv numbers of a head, channels = N (2 dk + M dv) and taps of
the convolution, S slots of a row for prompts.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from model.attention import PackedRows
from model.layout import Layout
from model.params import Layers, LinearSizes

CHUNK = 64  # tokens

# Float32 matmuls of TPUs and GPUs would round their inputs.
matmul_float32 = functools.partial(jnp.matmul, precision="highest")


class State(NamedTuple):
    """What a linear layer keeps of X prompts or B sequences."""

    conv: jax.Array  # [X, taps-1, channels], the last inputs of the convolution
    delta: jax.Array  # [X, N*M, dk, dv] float32, the state of each value head

    def begin_completions(self, num_sequences: int, tokens: int) -> "State":
        """Copies for this number of completions; their size does not depend on the tokens."""
        share = num_sequences // self.conv.shape[-3]
        return State(jnp.repeat(self.conv, share, -3), jnp.repeat(self.delta, share, -4))

    def widen(self, tokens: int) -> "State":
        return self


def gated_norm(out: jax.Array, z: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """The outputs of linear attention, normalized in each head and multiplied by silu(z), in the
    shape and dtype of z.

    out: [..., N*M, dv] float32. z: [X*t, N*M*dv]. scale: [dv] float32.
    """
    out = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + epsilon) * scale
    return (out.reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)


def _decay_and_beta(a: jax.Array, b: jax.Array, w: Layers) -> tuple[jax.Array, jax.Array]:
    """g, the logarithm of the decay, and beta, both [X*t, N*M] float32."""
    a, b, dt_bias = (x.astype(jnp.float32) for x in (a, b, w.dt_bias))
    return -jnp.exp(w.a_log) * jax.nn.softplus(a + dt_bias), jax.nn.sigmoid(b)


def _split_channels(x: jax.Array, sizes: LinearSizes, axis: int = -1) -> list[jax.Array]:
    width = sizes.key_heads * sizes.key_dim
    return jnp.split(x, [width, 2 * width], axis=axis)


def _heads(channels: Iterable[jax.Array], sizes: LinearSizes) -> tuple[jax.Array, ...]:
    """Queries and keys [..., N, dk] and values [..., N*M, dv] from their channels [..., N*dk] or
    [..., N*M*dv] after the convolution. Keys have length 1, and queries 1 / sqrt(dk)."""
    q, k, v = channels

    def unit(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:-1], -1, sizes.key_dim)
        return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)

    v = v.reshape(*v.shape[:-1], -1, sizes.value_dim)
    return unit(q) * sizes.key_dim**-0.5, unit(k), v


# ---- One new token of each sequence, in decode ---------------------------------------------------


def linear_attention_token(
    qkv: jax.Array, a: jax.Array, b: jax.Array, w: Layers, sizes: LinearSizes, state: State
) -> tuple[jax.Array, State]:
    """The outputs [B, N*M, dv] float32 of one new token of each sequence, and the new states. The
    arguments are those of linear_attention."""
    g, beta = _decay_and_beta(a, b, w)
    x = jnp.concatenate([state.conv, qkv[:, None]], axis=1)  # [B, taps, channels]
    summed = (x.astype(jnp.float32) * w.taps[:, 0].T.astype(jnp.float32)).sum(axis=1)
    q, k, v = _heads(_split_channels(jax.nn.silu(summed), sizes), sizes)
    q, k = (jnp.repeat(y, v.shape[1] // y.shape[1], axis=1) for y in (q, k))  # [B, N*M, dk]
    decayed = state.delta * jnp.exp(g)[..., None, None]
    # Both products with the old state are computed in one pass over it.
    key_read, query_read = ((decayed * y[..., None]).sum(axis=-2) for y in (k, q))  # [B, N*M, dv]
    correction = beta[..., None] * (v - key_read)
    delta = decayed + k[..., None] * correction[..., None, :]
    out = query_read + (k * q).sum(axis=-1, keepdims=True) * correction
    return out, State(x[:, 1:], delta)


# ---- Rows, in training and prefill ---------------------------------------------------------------


def linear_attention(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    w: Layers,
    sizes: LinearSizes,
    rows: PackedRows,
    layout: Layout,
) -> tuple[jax.Array, State]:
    """The outputs [X, t, N*M, dv] float32 of the tokens of rows, and the State after the last
    slot of rows that hold one prompt each; in other rows it is meaningless.

    qkv: [X*t, channels], those of queries, keys and values before the convolution. a, b: [X*t,
    N*M], from which g and beta are computed. w: the weights of the layer. Each device computes its
    rows, and its heads if tp splits them.
    """
    X, t = rows.segment_ids.shape
    x, g, beta = (y.reshape(X, t, -1) for y in (qkv, *_decay_and_beta(a, b, w)))
    missing = -t % CHUNK  # only rows of a prompt are padded, on the left
    aligned = rows.S == t or rows.S % CHUNK == missing == 0
    assert aligned, f"rows of {t} slots with {rows.S} for prompts are no multiples of {CHUNK}"
    x = jnp.where(
        (rows.segment_ids >= 0)[..., None], x, 0
    )  # the padding before a prompt writes nothing
    distance = jnp.arange(t) - rows.start

    def pad(y: jax.Array, value: int = 0) -> jax.Array:
        widths = [(0, 0), (missing, 0), *[(0, 0)] * (y.ndim - 2)]
        return jnp.pad(y, widths, constant_values=value)

    batch, tp = layout.batch_axes, None if "tp" in layout.batch_axes else "tp"
    row_spec, head_spec = PartitionSpec(batch), PartitionSpec(batch, None, tp)
    sharded = jax.shard_map(
        functools.partial(_rows_of_device, sizes, rows.S + missing),
        mesh=layout.mesh,
        in_specs=(head_spec, PartitionSpec(tp), head_spec, head_spec, row_spec, row_spec),
        out_specs=(head_spec, PartitionSpec(batch, tp)),
        check_vma=False,
    )
    x, segment_ids = pad(x), pad(rows.segment_ids, -1)
    channels, taps = _split_channels(x, sizes), _split_channels(w.taps[:, 0], sizes, axis=0)
    out, delta = sharded(channels, taps, pad(g), pad(beta), segment_ids, pad(distance))
    return out[:, missing:], State(x[:, 1 - sizes.taps :], delta)


class ChunkOrder(NamedTuple):
    """The order in which the loop takes the n chunks of each row."""

    indices: jax.Array  # [X, n] int32, the chunk at each step; chunks of padding come last
    is_prompt: jax.Array  # [X, n] bool: the chunk holds tokens of a prompt
    is_first: jax.Array  # [X, n] bool: the first chunk of a prompt, or of completions without one
    prompt_end: jax.Array  # [X, n] int32, of completions the step of their prompt's end; else -1
    distance: jax.Array  # [X, n, c] int32, slots between a token and the first of its sequence


def _chunk_order(segment_ids: jax.Array, distance: jax.Array, S: int) -> ChunkOrder:
    """segment_ids, distance: [X, t] int32. S: slots for prompts."""
    X, t = segment_ids.shape
    number = segment_ids.reshape(X, -1, CHUNK).max(
        axis=2
    )  # [X, n], of the chunk's prompt; -1: padding
    indices = jnp.argsort(jnp.where(number < 0, t, number), axis=1, stable=True)
    number = jnp.take_along_axis(number, indices, axis=1)
    before = jnp.pad(number, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    is_prompt = (indices * CHUNK < S) & (number >= 0)
    last = jax.lax.cummax(jnp.where(is_prompt, jnp.arange(t // CHUNK), -1), axis=1)
    has_prompt = jnp.take_along_axis(number, jnp.maximum(last, 0), axis=1) == number
    return ChunkOrder(
        indices,
        is_prompt,
        is_first=(number >= 0) & (number != before),
        prompt_end=jnp.where(has_prompt & ~is_prompt, last, -1),
        distance=_take_chunks(distance.reshape(X, -1, CHUNK), indices),
    )


def _take_chunks(chunks: jax.Array, indices: jax.Array) -> jax.Array:
    """The chunks [X, n, ...] in the order of indices [X, n] of each row."""
    return jax.vmap(lambda x, i: x[i])(chunks, indices)


def _rows_of_device(
    sizes: LinearSizes,
    S: int,
    channels: list[jax.Array],
    taps: list[jax.Array],
    g: jax.Array,
    beta: jax.Array,
    segment_ids: jax.Array,
    distance: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The outputs [X, t, N*M, dv] of the rows and heads of a device, and the state at the end of
    the last prompt [X, N*M, dk, dv], both float32. t and S are multiples of CHUNK."""
    (X, t), order = segment_ids.shape, _chunk_order(segment_ids, distance, S)

    def reorder(x: jax.Array) -> jax.Array:
        """x [X, t, ...] as [X, n, c, ...]."""
        return _take_chunks(x.reshape(X, -1, CHUNK, *x.shape[2:]), order.indices)

    pairs = zip(channels, taps, strict=True)
    q, k, v = _heads((_convolve(reorder(x), w, order) for x, w in pairs), sizes)
    N = q.shape[3]

    def split_heads(x: jax.Array) -> jax.Array:
        """x [X, n, c, heads, ...] as [n, X, N, 1 or M, c, ...]."""
        return jnp.moveaxis(x.reshape(*x.shape[:3], N, -1, *x.shape[4:]), (1, 2), (0, 4))

    out, end = _delta_rule([split_heads(x) for x in (q, k, v, reorder(g), reorder(beta))], order)
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(X, -1, CHUNK, *v.shape[3:])
    out = _take_chunks(out, jnp.argsort(order.indices, axis=1))
    return out.reshape(X, t, *v.shape[3:]), end.reshape(X, -1, *end.shape[3:])


def _convolve(x: jax.Array, weights: jax.Array, order: ChunkOrder) -> jax.Array:
    """silu of the causal convolution of each channel, float32. x: [X, n, c, channels], in the order
    of the loop. weights: [channels, taps]."""
    x, weights = x.astype(jnp.float32), weights.astype(jnp.float32)
    c, taps = x.shape[2], weights.shape[1]
    tails = x[:, :, 1 - taps :]  # [X, n, taps-1, channels], the end of each chunk
    before = jnp.pad(tails, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    before = jnp.where(order.is_first[..., None, None], 0, before)
    prompt_tails = _take_chunks(tails, jnp.maximum(order.prompt_end, 0))
    prompt_tails = jnp.where(order.prompt_end[..., None, None] < 0, 0, prompt_tails)
    x, total = jnp.concatenate([before, x], axis=2), jnp.zeros((), jnp.float32)
    for tap in range(taps):
        source = x[:, :, tap : tap + c]  # the token that is taps-1-tap slots before
        for distance in range(
            taps - 1 - tap
        ):  # the source is before the first token of its sequence
            at_end = prompt_tails[:, :, tap + distance, None]
            source = jnp.where((order.distance == distance)[..., None], at_end, source)
        total = total + source * weights[:, tap]
    return jax.nn.silu(total)


def _delta_rule(inputs: list[jax.Array], order: ChunkOrder) -> tuple[jax.Array, jax.Array]:
    """The outputs [n, X, N, M, c, dv], and the state at the end of the last prompt [X, N, M, dk,
    dv].

    inputs: q and k [n, X, N, 1, c, dk], v [n, X, N, M, c, dv], g and beta [n, X, N, M, c], all
    float32 and in the order of the loop. Backward keeps them and the states before each chunk, and
    computes the rest again.
    """
    (*_, dk), (_, X, N, M, c, dv) = inputs[1].shape, inputs[2].shape
    slot = jnp.arange(c)

    @jax.checkpoint
    def scan_chunk(states: Any, chunk: Any) -> Any:
        q, k, v, g, beta, is_prompt, is_first, distance = chunk  # [X, N, M, ...]
        state, end = (jnp.where(is_first, 0, x) for x in states)  # of the sequence, of its prompt
        # The slot in the chunk at which the token's sequence begins; below 0 in an earlier chunk.
        start = (slot - distance)[:, None, None]  # [X, 1, 1, c]
        began_earlier = start[..., None] < 0  # [X, 1, 1, c, 1]
        same = (start[..., None] == start[..., None, :]) & (slot <= slot[:, None])
        # The logarithm of the decay since the chunk, or the sequence within it, began.
        total = (same * g[..., None, :]).sum(axis=-1)  # [X, N, M, c]
        decay = jnp.exp(jnp.where(same, total[..., None] - total[..., None, :], -jnp.inf))

        def read(x: jax.Array) -> jax.Array:
            return jnp.where(began_earlier, matmul_float32(x, state), matmul_float32(x, end))

        k_transposed = k.swapaxes(-1, -2)
        system = jnp.tril(beta[..., None] * matmul_float32(k, k_transposed) * decay, -1)
        sides = beta[..., None] * jnp.concatenate([v, jnp.exp(total)[..., None] * k], axis=-1)
        # The corrections without the state, and its share.
        corrections, state_share = jnp.split(matmul_float32(_inverse(system), sides), [dv], axis=-1)
        corrections = corrections - read(state_share)
        scores = matmul_float32(q, k_transposed) * decay
        out = read(jnp.exp(total)[..., None] * q) + matmul_float32(scores, corrections)
        k = decay[..., -1, :, None] * k  # as the state at the end of the chunk adds it
        state = jnp.where(began_earlier[..., -1:, :], state, end)
        state = jnp.exp(total[..., -1, None, None]) * state
        state = state + matmul_float32(k.swapaxes(-1, -2), corrections)
        return (state, jnp.where(is_prompt, state, end)), out

    flags = [x.T[..., None, None, None, None] for x in (order.is_prompt, order.is_first)]
    empty = jnp.zeros((X, N, M, dk, dv), jnp.float32)
    chunks = *inputs, *flags, order.distance.swapaxes(0, 1)
    (_, end), out = jax.lax.scan(scan_chunk, (empty, empty), chunks)
    return out, end


def _inverse(system: jax.Array) -> jax.Array:
    """(1 + system)^-1 of strictly lower triangular matrices [..., c, c]; c is a power of two.

    Blocks along the diagonal are inverted, then those of twice their size, and so on: with M below
    the blocks D it is D^-1 - D^-1 M D^-1. (A program with jax's triangular_solve hangs on a
    CPU with two cores.)
    """
    c = system.shape[-1]
    row, column = jnp.arange(c)[:, None], jnp.arange(c)
    inverse, size = jnp.eye(c), 1
    while size < c:
        is_below = (row // size != column // size) & (row // (2 * size) == column // (2 * size))
        below = jnp.where(is_below, system, 0)
        inverse = inverse - matmul_float32(inverse, matmul_float32(below, inverse))
        size *= 2
    return inverse
