"""Attention in blocks, in plain JAX: the scores of a block of queries and a block of keys are the
only ones that exist at a time, so that memory grows with the tokens and not with their square.

A loop goes through the pairs of blocks in which any query sees a key; the others cost nothing. A
query keeps the highest score so far, and relative to it the sum of its weights and of its weighted
values. Backward computes the scores again from the logarithm of the sum (arXiv 2205.14135).

Dimensions: X rows of t tokens, S of them places for prompts, H = N*M query heads, N kv heads, h
head_dim, n blocks of b tokens.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

# The score of a key that is not seen. It is finite, so that no difference of two scores is NaN; the
# weights of a query that sees no key of a block become 0 with its first score that is seen.
MASKED = -1e30

ALL_POSITIONS = 2**30  # above every position, and a window that hides nothing


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def block_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, of_tokens: tuple[jax.Array, ...], S: int, b: int
) -> jax.Array:
    """Attention of q, which is scaled, to the keys that `seen` says: [X, N, M, t, h] in q's dtype.

    q: [X, N, M, t, h]. k, v: [X, N, t, h]. of_tokens: as in `seen`, [X, t] int32. b: tokens of a
    block; it divides t.
    """
    return _forward(q, k, v, of_tokens, S, b)[0]


def sees(place: jax.Array, start: jax.Array, key: jax.Array, S: int) -> jax.Array:
    """Whether a query sees a key of its prompt: it sees the prompt, and what stands before it in
    its completion. place: of the query. start: where its prompt or completion begins. key: a place.
    """
    return (key <= place) & ((key < S) | (key >= start))


def seen(queries: Iterable[jax.Array], keys: Iterable[jax.Array], S: int) -> jax.Array:
    """Which keys the queries see, bool. queries, keys: of tokens the place, and prompt, start and
    the window of PackedRows, with shapes that broadcast."""
    place, prompt, start, *window = queries
    key, of_key, _, *key_window = keys
    mask = sees(place, start, key, S) & (of_key == prompt)
    return mask & (key_window[0] >= window[1]) if window else mask


def needed_blocks(of_tokens: tuple[jax.Array, ...], S: int, b: int) -> jax.Array:
    """[X, n, n] bool: in which blocks of queries and of keys something may be seen. Every block
    sees itself. of_tokens: as in block_attention."""
    _, prompt, start, *window = of_tokens
    n, t = prompt.shape[1] // b, prompt.shape[1]
    of_block, is_padding = prompt.reshape(-1, n, b), prompt.reshape(-1, n, b) < 0
    lowest = jnp.where(is_padding, t, of_block).min(axis=2)  # [X, n]
    highest = of_block.max(axis=2)
    first = jnp.where(is_padding, t, start.reshape(-1, n, b)).min(axis=2)
    query, key = jnp.arange(n)[:, None], jnp.arange(n)[None]
    same = (lowest[:, None] <= highest[:, :, None]) & (lowest[:, :, None] <= highest[:, None])
    near = (key * b < S) | ((key + 1) * b > first[:, :, None])
    if window:
        position, oldest = (x.reshape(-1, n, b) for x in window)
        newest = jnp.where(is_padding, -1, position).max(axis=2)  # [X, n] of the keys
        oldest = jnp.where(is_padding, ALL_POSITIONS, oldest).min(axis=2)  # [X, n] of the queries
        near &= newest[:, None] >= oldest[:, :, None]
    return (key <= query) & ((same & near) | (key == query))


def pairs_of(of_tokens: tuple[jax.Array, ...], S: int, b: int) -> tuple[jax.Array, jax.Array]:
    """The pairs [n*n, 2] of blocks of queries and of keys that any row needs, in front of the
    others, and their number. of_tokens: as in block_attention."""
    needed = needed_blocks(of_tokens, S, b).any(axis=0)  # [n, n]
    n, order = len(needed), jnp.argsort(~needed.reshape(-1), stable=True)
    return jnp.stack([order // n, order % n], axis=1), needed.sum()


def _in_blocks(x: jax.Array, b: int, axis: int) -> jax.Array:
    """x [..., t, ...] as [n, ..., b, ...]."""
    shape = (*x.shape[:axis], -1, b, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _joined(x: jax.Array, axis: int) -> jax.Array:
    """The reverse of _in_blocks."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, of_tokens: tuple[jax.Array, ...], S: int, b: int
) -> tuple[jax.Array, Any]:
    """The attention, and what _backward needs: the arguments, the attention, and the logarithm of
    the sum of each query's weights [X, N, M, t] float32."""
    qs, ks, vs = _in_blocks(q, b, 3), _in_blocks(k, b, 2), _in_blocks(v, b, 2)
    tokens = [_in_blocks(x, b, 1) for x in of_tokens]  # [n, X, b]
    pairs, count = pairs_of(of_tokens, S, b)

    def step(index: jax.Array, carry: Any) -> Any:
        top, total, values = carry  # [n, X, N, M, b], the same, [n, X, N, M, b, h]
        i, j = pairs[index]
        scores = _scores(qs[i], ks[j], _mask(tokens, S, i, j))
        new_top = jnp.maximum(top[i], scores.max(axis=-1))
        weights, scale = jnp.exp(scores - new_top[..., None]), jnp.exp(top[i] - new_top)
        more = _multiply("xnmqk,xnkh->xnmqh", weights.astype(q.dtype), vs[j])
        return (
            top.at[i].set(new_top),
            total.at[i].set(total[i] * scale + weights.sum(axis=-1)),
            values.at[i].set(values[i] * scale[..., None] + more),
        )

    flat = jnp.zeros(qs.shape[:-1], jnp.float32)
    begun = flat + MASKED, flat, jnp.zeros(qs.shape, jnp.float32)
    top, total, values = jax.lax.fori_loop(0, count, step, begun)
    out = _joined((values / total[..., None]).astype(q.dtype), 3)
    return out, (q, k, v, of_tokens, out, _joined(top + jnp.log(total), 3))


def _backward(S: int, b: int, kept: Any, to_out: jax.Array) -> Any:
    """The gradients of q, k and v. kept: by _forward. to_out: the gradient of the result."""
    q, k, v, of_tokens, out, log_total = kept
    qs, ks, vs = _in_blocks(q, b, 3), _in_blocks(k, b, 2), _in_blocks(v, b, 2)
    to_outs, log_totals = _in_blocks(to_out, b, 3), _in_blocks(log_total, b, 3)
    f32 = jnp.float32
    inner = _in_blocks((to_out.astype(f32) * out.astype(f32)).sum(axis=-1), b, 3)
    tokens = [_in_blocks(x, b, 1) for x in of_tokens]
    pairs, count = pairs_of(of_tokens, S, b)

    def step(index: jax.Array, carry: Any) -> Any:
        to_q, to_k, to_v = carry
        i, j = pairs[index]
        scores = _scores(qs[i], ks[j], _mask(tokens, S, i, j))
        weights = jnp.exp(scores - log_totals[i][..., None])  # [X, N, M, b, b]
        to_weights = _multiply("xnmqh,xnkh->xnmqk", to_outs[i], vs[j])
        to_scores = (weights * (to_weights - inner[i][..., None])).astype(q.dtype)
        weights = weights.astype(q.dtype)
        return (
            to_q.at[i].add(_multiply("xnmqk,xnkh->xnmqh", to_scores, ks[j])),
            to_k.at[j].add(_multiply("xnmqk,xnmqh->xnkh", to_scores, qs[i])),
            to_v.at[j].add(_multiply("xnmqk,xnmqh->xnkh", weights, to_outs[i])),
        )

    begun = tuple(jnp.zeros(x.shape, f32) for x in (qs, ks, vs))
    to_q, to_k, to_v = jax.lax.fori_loop(0, count, step, begun)
    gradients = _joined(to_q, 3), _joined(to_k, 2), _joined(to_v, 2)
    return *(x.astype(y.dtype) for x, y in zip(gradients, (q, k, v), strict=True)), None


def _mask(tokens: list[jax.Array], S: int, i: Any, j: Any) -> jax.Array:
    """[X, 1, 1, b, b] bool: which keys of block j the queries of block i see."""
    queries = [x[i][:, None, None, :, None] for x in tokens]
    return seen(queries, [x[j][:, None, None, None, :] for x in tokens], S)


def _scores(q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
    """[X, N, M, b, b] float32."""
    return jnp.where(mask, _multiply("xnmqh,xnkh->xnmqk", q, k), MASKED)


def _multiply(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


block_attention.defvjp(_forward, _backward)
