"""Attention of packed rows in training and prefill, and of one new token with its cache in decode.

Short rows are multiplied at once. Longer rows are computed in blocks of queries and keys. Pairs of
blocks in which no query sees a key are skipped, and the scores of one pair exist at a time, so that
memory grows with the tokens and not with their square: the online softmax of FlashAttention (arXiv
2205.14135) in plain JAX. On TPUs the kernel of splash.py takes its place in training.

Dimensions: X rows of t = S + C tokens, S places for prompts and C for completions; in decode B
sequences of P prompts, S prompt tokens and T completion tokens; L layers, H query heads, N kv
heads, h head_dim.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from model.layout import Layout, constrain_batch
from model.logps import MASKED  # the score of a key that is not seen

# The most tokens of a short row. On CPUs blocks take up to 3 times as long as all scores at once,
# for rows of 128 tokens; with gradients they are faster from 256 tokens on.
SHORT_TOKENS = 224
# Tokens of a block. On CPUs 64 was the fastest of 32 to 512. Elsewhere small blocks would
# be many small kernels.
BLOCK = {"cpu": 64, "others": 512}
ALL_POSITIONS = 2**30  # above every position: a window of this size hides nothing


# ---- Keys and values -----------------------------------------------------------------------------


class KV(NamedTuple):
    """Keys and values of X rows, or of P prompts or B sequences. Those of several layers are either
    stacked along a first dimension L, or a tuple with a KV for each layer."""

    k: jax.Array  # [X, N, h, tokens], rotated; scores of a new token read it in this order
    v: jax.Array  # [X, N, tokens, h]

    def empty(self, num_sequences: int, tokens: int) -> "KV":
        """Zeros for this number of sequences and tokens, with the other sizes of this KV."""
        *stacked, _, N, h, _ = self.k.shape
        k = jnp.zeros((*stacked, num_sequences, N, h, tokens), self.k.dtype)
        return KV(k, jnp.zeros((*stacked, num_sequences, N, tokens, h), self.v.dtype))

    def widen(self, tokens: int) -> "KV":
        """This KV, padded with zeros to `tokens` tokens."""
        pad = [(0, 0)] * self.k.ndim
        pad[-1] = 0, tokens - self.k.shape[-1]
        return KV(jnp.pad(self.k, pad), jnp.pad(self.v, [*pad[:-2], pad[-1], pad[-2]]))


def map_kv(change: Callable[[KV], KV], kvs: Any) -> Any:
    """`change` of a stacked KV, or of each KV of a tuple of layers."""
    return jax.tree.map(change, kvs, is_leaf=lambda x: isinstance(x, KV))


def select_layer(layers: Any, i: int | jax.Array) -> Any:
    """The arrays of layer i, from arrays that are stacked by layer or from a tuple of layers."""
    if type(layers) is tuple:
        return layers[i]
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), layers)


def write_token(kvs: Any, i: int | jax.Array, new: KV, place: jax.Array) -> Any:
    """The KV of all layers, stacked or in a tuple, with the keys and values of one token, `new`,
    written to this place of layer i."""
    if type(kvs) is tuple:
        k = jax.lax.dynamic_update_slice(kvs[i].k, new.k, (0, 0, 0, place))
        v = jax.lax.dynamic_update_slice(kvs[i].v, new.v, (0, 0, place, 0))
        return (*kvs[:i], KV(k, v), *kvs[i + 1 :])
    k = jax.lax.dynamic_update_slice(kvs.k, new.k[None], (i, 0, 0, 0, place))
    return KV(k, jax.lax.dynamic_update_slice(kvs.v, new.v[None], (i, 0, 0, place, 0)))


class Cache(NamedTuple):
    """The keys and values that a new token of each sequence may see."""

    prompt: Any  # KV of the P prompts; sequence i continues prompt i // (B/P)
    prompt_mask: jax.Array  # [P, S] bool, False on left padding
    completion: Any  # KV of the B sequences, written up to and including `place`
    place: jax.Array  # int32, the place of the new token in its completion


# ---- Which keys a token sees ---------------------------------------------------------------------


class PackedRows(NamedTuple):
    """The mask of packed rows, by token: a token sees its prompt's and its own completion's tokens
    up to itself. rows.py draws a row and its mask."""

    prompt: jax.Array  # [X, t] int32, the number of the token's prompt in the row; -1: padding
    start: jax.Array  # [X, t] int32, the place at which the token's prompt or completion begins
    S: int  # places for prompts, in front of the completions
    # Each token's position and the lowest position that it sees, [X, t] int32; (): it sees all.
    window: tuple[jax.Array, ...] = ()

    def with_window(self, positions: jax.Array, window: jax.Array) -> "PackedRows":
        """These rows with a sliding window: a token sees only the last `window` positions, its own
        included.

        positions: [X, t] int32. Places would not do, because other prompts and completions stand
        between a completion and its prompt.
        """
        return self._replace(window=(positions, positions - window + 1))


def prompt_rows(mask: jax.Array) -> PackedRows:
    """PackedRows of one prompt each, without completions. mask: [X, S] bool, False on padding."""
    return PackedRows(jnp.where(mask, 0, -1), jnp.zeros(mask.shape, jnp.int32), mask.shape[1])


def visible_in_prompt(place: jax.Array, start: jax.Array, key: jax.Array, S: int) -> jax.Array:
    """Whether a query at a place sees a key of the same prompt, bool. start: the query's, as in
    PackedRows. key: a place."""
    return (key <= place) & ((key < S) | (key >= start))


def _visible(queries: Iterable[jax.Array], keys: Iterable[jax.Array], S: int) -> jax.Array:
    """Whether queries see keys, bool. queries, keys: the place, and prompt, start and window of
    PackedRows, in shapes that broadcast against each other."""
    place, prompt, start, *window = queries
    key, key_prompt, _, *key_window = keys
    mask = visible_in_prompt(place, start, key, S) & (key_prompt == prompt)
    return mask & (key_window[0] >= window[1]) if window else mask


# ---- Attention -----------------------------------------------------------------------------------


def attention(q: jax.Array, kv: KV, rows: PackedRows, layout: Layout) -> jax.Array:
    """softmax(q k^T / sqrt(h)) v over the keys that a token sees: [X, t, H*h] in q's dtype.

    q: [X, t, H, h]. kv: of the X rows. The values of padding are finite, and mean nothing.
    """
    q = q * q.shape[-1] ** -0.5
    X, t = rows.prompt.shape
    if t > SHORT_TOKENS:
        return on_each_device(functools.partial(_blocks_shard, rows.S, layout), q, kv, rows, layout)
    place = jnp.broadcast_to(jnp.arange(t), (X, t))
    tokens = place, rows.prompt, rows.start, *rows.window
    mask = _visible([x[:, :, None] for x in tokens], [x[:, None] for x in tokens], rows.S)
    return _attend_at_once(q, [(kv, mask)], layout)


def cached_attention(
    q: jax.Array, cache: Cache, layout: Layout, window: jax.Array | None = None
) -> jax.Array:
    """Attention of one new token per sequence: [B, 1, H*h].

    q: [B, 1, H, h]. cache: of one layer, in which the new token's key and value are written.
    window: how many positions the token sees, its own included; None: all.
    """
    q = q * q.shape[-1] ** -0.5
    keys = jnp.arange(cache.completion.k.shape[-1])
    written, of_prompt = keys <= cache.place, cache.prompt_mask[:, None]  # [T], [P, 1, S]
    if window is not None:
        # Prompts are padded on the left: counted from the first place of a completion, the last
        # tokens of a prompt have the places -1, -2 and so on.
        S, oldest = cache.prompt_mask.shape[1], cache.place - window + 1
        written, of_prompt = written & (keys >= oldest), of_prompt & (jnp.arange(S) - S >= oldest)
    parts = [(cache.completion, written[None, None]), (cache.prompt, of_prompt)]
    return _attend_at_once(q, parts, layout)


# ---- All scores at once: short rows, and a new token with its cache ------------------------------


def _attend_at_once(q: jax.Array, parts: list[tuple[KV, jax.Array]], layout: Layout) -> jax.Array:
    """Attention with all scores at once, one softmax over all parts: [X, t, H*h] in q's dtype.

    q: [X, t, H, h]. parts: a KV of X rows, or of P that X/P consecutive rows of q share, and its
    mask [X or P, queries or 1, keys], False hides a key.
    """
    X, t, H, h = q.shape
    N = parts[0][0].k.shape[1]
    queries = t * H // N  # of a kv head
    q = q.reshape(X, t, N, H // N, h).swapaxes(1, 2).reshape(X, N, queries, h)
    scored = []
    for kv, mask in parts:
        P = len(kv.k)
        share = X // P  # rows that see the same keys, which one product multiplies
        mask = mask if mask.shape[1] == 1 else jnp.repeat(mask, H // N, axis=1)
        grouped = q.reshape(P, share, N, queries, h).swapaxes(1, 2)
        grouped = constrain_batch(grouped.reshape(P, N, share * queries, h), layout)
        part = _unnormalized(grouped, kv, mask[:, None])
        part = [x.reshape(P, N, share, queries, -1).swapaxes(1, 2) for x in part]
        scored.append([constrain_batch(x.reshape(X, N, queries, -1), layout) for x in part])
    top = functools.reduce(jnp.maximum, [top for top, _, _ in scored])  # [X, N, queries, 1]
    total = sum(total * jnp.exp(part_top - top) for part_top, total, _ in scored)
    out = sum(values * jnp.exp(part_top - top) for part_top, _, values in scored) / total
    out = jnp.asarray(out, q.dtype).reshape(X, N, t, H // N, h)
    return out.swapaxes(1, 2).reshape(X, t, H * h)


def _unnormalized(q: jax.Array, kv: KV, mask: jax.Array) -> list[jax.Array]:
    """Three float32 arrays: the highest score [X, N, queries, 1], and relative to it the sum of the
    weights [X, N, queries, 1] and the weighted sum of the values [X, N, queries, h].

    q: [X, N, queries, h]. mask: it broadcasts to [X, N, queries, keys].
    """
    scores = jnp.where(mask, _multiply("xnqh,xnhk->xnqk", q, kv.k), MASKED)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))  # it cancels in the quotient
    weights = jnp.exp(scores - top)
    values = _multiply("xnqk,xnkh->xnqh", weights.astype(q.dtype), kv.v)
    return [top, weights.sum(axis=-1, keepdims=True), values]


def _multiply(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """The einsum of x and y, accumulated in float32."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


# ---- Longer rows: each device computes its rows and heads ----------------------------------------


def on_each_device(
    of_device: Callable[..., jax.Array], q: jax.Array, kv: KV, rows: PackedRows, layout: Layout
) -> jax.Array:
    """What of_device computes of the rows and heads of each device: [X, t, H*h]. Rows are sharded
    over the batch axes, and heads over tp if it is not one of them. q: [X, t, H, h].

    of_device: a function as _blocks_shard is, after its first two arguments.
    """
    head_axis = None if "tp" in layout.batch_axes else "tp"
    k, v = kv.k.swapaxes(2, 3), kv.v  # [X, N, t, h]
    if head_axis and k.shape[1] % layout.mesh.shape["tp"]:  # each query head gets its kv head
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in (k, v))
    batch, by_head = PartitionSpec(layout.batch_axes), PartitionSpec(layout.batch_axes, head_axis)
    shard = jax.shard_map(
        of_device,
        mesh=layout.mesh,
        in_specs=(by_head, by_head, by_head, batch, batch, *[batch for _ in rows.window]),
        out_specs=PartitionSpec(layout.batch_axes, None, head_axis),
        check_vma=False,
    )
    return shard(q.swapaxes(1, 2), k, v, rows.prompt, rows.start, *rows.window)


# ---- Blocks of queries and keys ------------------------------------------------------------------
# Arrays have a first dimension of blocks: q [num_blocks, X, N, H/N, block_size, h], k and v
# [num_blocks, X, N, block_size, h], and each array of `tokens`, which are the arrays of _visible,
# [num_blocks, X, block_size] int32. The places of all rows are equal, so that X is 1 in theirs.


def _blocks_shard(
    S: int,
    layout: Layout,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prompt: jax.Array,
    start: jax.Array,
    *window: jax.Array,
) -> jax.Array:
    """Attention of the rows and heads of a device, in blocks: [X, t, H*h]. q: [X, H, t, h]. k, v:
    [X, N, t, h]. prompt, start, window: [X, t] int32, of PackedRows."""
    (X, H, t, h), N = q.shape, k.shape[1]
    platform = layout.mesh.devices.flat[0].platform
    block_size = min(BLOCK["cpu" if platform == "cpu" else "others"], t)
    missing = -t % block_size

    def split(x: jax.Array, axis: int, padding: int = 0) -> jax.Array:
        pad = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, pad, constant_values=padding)
        blocks = x.reshape(*x.shape[:axis], -1, block_size, *x.shape[axis + 1 :])
        return jnp.moveaxis(blocks, axis, 0)

    place = jnp.arange(t + missing).reshape(-1, 1, block_size)
    tokens = place, split(prompt, 1, padding=-1), *(split(x, 1) for x in (start, *window))
    pairs, count = block_pairs(needed_blocks(tokens[1:], S))
    q = split(q.reshape(X, N, H // N, t, h), 3)
    out = block_attention(q, split(k, 2), split(v, 2), tokens, pairs, count, S)
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(X, t + missing, H * h)[:, :t]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def block_attention(
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
        top, total, values = carry
        i, j = pairs[index]
        scores = _scores(q[i], k[j], tokens, S, i, j)
        new_top = jnp.maximum(top[i], scores.max(axis=-1))
        weights, scale = jnp.exp(scores - new_top[..., None]), jnp.exp(top[i] - new_top)
        new_values = _multiply("xnmqk,xnkh->xnmqh", weights.astype(q.dtype), v[j])
        return (
            top.at[i].set(new_top),
            total.at[i].set(total[i] * scale + weights.sum(axis=-1)),
            values.at[i].set(values[i] * scale[..., None] + new_values),
        )

    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    first = zeros + MASKED, zeros, jnp.zeros(q.shape, jnp.float32)
    top, total, values = jax.lax.fori_loop(0, count, step, first)
    out = (values / total[..., None]).astype(q.dtype)
    return out, (q, k, v, tokens, pairs, count, out, top + jnp.log(total))


def _backward(S: int, residuals: Any, grad_out: jax.Array) -> Any:
    """The gradients of q, k and v. It computes the weights again from the scores and the logarithm
    of their sum."""
    q, k, v, tokens, pairs, count, out, log_total = residuals
    inner = (grad_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)

    def step(index: jax.Array, carry: Any) -> Any:
        grad_q, grad_k, grad_v = carry
        i, j = pairs[index]
        weights = jnp.exp(_scores(q[i], k[j], tokens, S, i, j) - log_total[i][..., None])
        grad_weights = _multiply("xnmqh,xnkh->xnmqk", grad_out[i], v[j])
        grad_scores = (weights * (grad_weights - inner[i][..., None])).astype(q.dtype)
        weights = weights.astype(q.dtype)
        return (
            grad_q.at[i].add(_multiply("xnmqk,xnkh->xnmqh", grad_scores, k[j])),
            grad_k.at[j].add(_multiply("xnmqk,xnmqh->xnkh", grad_scores, q[i])),
            grad_v.at[j].add(_multiply("xnmqk,xnmqh->xnkh", weights, grad_out[i])),
        )

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    grads = jax.lax.fori_loop(0, count, step, zeros)
    grad_q, grad_k, grad_v = (x.astype(y.dtype) for x, y in zip(grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v, None, None, None


block_attention.defvjp(_forward, _backward)


def _scores(
    q: jax.Array, k: jax.Array, tokens: tuple[jax.Array, ...], S: int, i: jax.Array, j: jax.Array
) -> jax.Array:
    """The masked scores of q, block i of queries, and k, block j of keys: [X, N, H/N, block_size,
    block_size] float32."""
    queries = [x[i][:, None, None, :, None] for x in tokens]
    keys = [x[j][:, None, None, None, :] for x in tokens]
    return jnp.where(_visible(queries, keys, S), _multiply("xnmqh,xnkh->xnmqk", q, k), MASKED)


def block_pairs(needed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All pairs [num_blocks**2, 2] of a block of queries and a block of keys, first those that are
    needed, and the number of these. needed: see needed_blocks."""
    order = jnp.argsort(~needed.reshape(-1), stable=True)
    return jnp.stack([order // len(needed), order % len(needed)], axis=1), needed.sum()


def needed_blocks(tokens: tuple[jax.Array, ...], S: int) -> jax.Array:
    """[num_blocks, num_blocks] bool: whether in any row a query of a block may see a key of a
    block. Every block sees itself. tokens: without the places."""
    prompt, start, *window = tokens
    num_blocks, _, block_size = prompt.shape
    is_padding, t = prompt < 0, num_blocks * block_size
    lowest = jnp.where(is_padding, t, prompt).min(axis=2)  # [num_blocks, X]
    highest = prompt.max(axis=2)
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
