"""Draws the next token of each sequence from its logits, with temperature, top-k, top-p and min-p.

The support is the set of tokens that these filters keep: a token is drawn from the softmax over it.

Dimensions: B sequences, V vocabulary, U places of a support.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.logps import MASKED

MAX_SUPPORT = 128  # the most tokens of a support


class Sampling(NamedTuple):
    """The settings of drawing a token. The filters apply in this order; each is off by default."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    replay: bool = False  # record the support of each token, and limit it to MAX_SUPPORT ids


def draw_tokens(keys: jax.Array, logits: jax.Array, sampling: Sampling) -> tuple[jax.Array, ...]:
    """The tokens [B] int32, and the log-probabilities [B] float32 with which they were drawn; a
    greedy token has its log-probability at temperature 1.

    keys: [B]. logits: [B, V] float32. With sampling.replay two more arrays follow: the support
    [B, U] int32 with -1 in unused places, and [B] whether MAX_SUPPORT cut it.
    """
    if sampling.replay:
        scaled = logits / sampling.temperature
        kept, ids, was_cut = _support(scaled, sampling)  # [B, U], [B, U], [B]
        place = jax.vmap(jax.random.categorical)(keys, kept)[:, None]  # [B, 1]
        token, logp = (jnp.take_along_axis(x, place, axis=-1)[:, 0] for x in (ids, kept))
        support = jnp.where(kept > MASKED, ids, -1)
        return token, logp - jax.nn.logsumexp(kept, axis=-1), support, was_cut
    if sampling.temperature == 0:
        token, logsumexp = jnp.argmax(logits, axis=-1), jax.nn.logsumexp(logits, axis=-1)
    else:
        logits = filter_logits(logits / sampling.temperature, sampling)
        token, logsumexp = jax.vmap(_categorical)(keys, logits)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token.astype(jnp.int32), chosen - logsumexp


def _categorical(key: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A token drawn from the softmax of logits [V], and their logsumexp.

    A block of about sqrt(V) tokens is drawn first, then a token of the block. The distribution is
    that of jax.random.categorical, with 2 sqrt(V) random numbers instead of V. The logsumexp is
    computed from those of the blocks, so that the logits are read less often.
    """
    V = logits.shape[0]
    width = 2 ** math.ceil(math.log2(V) / 2)
    blocks = jnp.pad(logits, (0, -V % width), constant_values=MASKED).reshape(-1, width)
    block_key, token_key = jax.random.split(key)
    block_logits = jax.nn.logsumexp(blocks, axis=-1)  # [blocks]
    block = jax.random.categorical(block_key, block_logits)
    token = block * width + jax.random.categorical(token_key, blocks[block])
    return token, jax.nn.logsumexp(block_logits)


def support_size(sampling: Sampling, V: int) -> int:
    """The places U of a support."""
    return min(sampling.top_k or MAX_SUPPORT, V)


def _support(logits: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The U largest of logits [B, V], in which those that the filters drop are masked, their ids
    [B, U], and whether the filters would keep more than U tokens [B] bool.

    The rules are those of filter_logits, but not all tokens that tie with the last one are kept.
    With top-k nothing is cut, since U is top_k.
    """
    U, V = support_size(sampling, logits.shape[-1]), logits.shape[-1]
    values, ids = _largest(logits, U if sampling.top_k else min(U + 1, V))  # descending
    highest = values[:, :1]
    keep = jnp.ones(values.shape, bool)
    if sampling.top_p < 1:
        weights = jnp.exp(values - highest)
        candidates = values if sampling.top_k else logits
        mass = jnp.exp(candidates - highest).sum(axis=-1, keepdims=True)
        keep &= weights.cumsum(axis=-1) - weights < sampling.top_p * mass
    if sampling.min_p > 0:
        keep &= values >= highest + math.log(sampling.min_p)
    was_cut = keep[:, U:].any(axis=-1)
    return jnp.where(keep, values, MASKED)[:, :U], ids[:, :U], was_cut


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """logits [B, V], already divided by the temperature, in which the tokens that top-k, top-p and
    min-p drop are masked. Tokens that tie with the last one that is kept are kept too."""
    candidates = logits  # [B, V or top_k]
    if 0 < sampling.top_k < logits.shape[-1]:
        candidates, _ = _largest(logits, sampling.top_k)
        # XLA compiles the minimum to a fast top_k, and the last of the candidates to a full sort.
        kth = candidates.min(axis=-1, keepdims=True)
        logits = jnp.where(logits < kth, MASKED, logits)
    if sampling.top_p < 1:
        # Tokens that tie with the k-th are missing in the candidates, but not in the mass. If top-p
        # needs their mass, it keeps them all: no candidate is the last, and the floor is -inf.
        highest = logits.max(axis=-1, keepdims=True)
        mass = jnp.exp(logits - highest).sum(axis=-1, keepdims=True)
        floor = _weighted_floor(candidates, jnp.exp(candidates - highest), sampling.top_p * mass)
        logits = jnp.where(logits < floor, MASKED, logits)
    if sampling.min_p > 0:
        floor = jnp.max(logits, axis=-1, keepdims=True) + math.log(sampling.min_p)
        logits = jnp.where(logits < floor, MASKED, logits)
    return logits


def _largest(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of logits [B, V] and their ids, both [B, k]. They lie in the k blocks that have
    the largest maxima."""
    B, V = logits.shape
    width = 128  # the lanes of a TPU
    if k * width >= V / 2:
        return jax.lax.top_k(logits, k)
    blocks = jnp.pad(logits, ((0, 0), (0, -V % width)), constant_values=-jnp.inf)
    blocks = blocks.reshape(B, -1, width)
    _, block_ids = jax.lax.top_k(blocks.max(axis=-1), k)  # [B, k]
    chosen = jnp.take_along_axis(blocks, block_ids[..., None], axis=1).reshape(B, -1)
    values, places = jax.lax.top_k(chosen, k)
    block = jnp.take_along_axis(block_ids, places // width, axis=-1)
    return values, block * width + places % width


def _weighted_floor(values: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """The highest floor [B, 1] such that the weights of the values at or above it sum up to at
    least `limit` [B, 1]. values, weights: [B, V or top_k].

    The floor is one of the values, or -inf if the sum of all weights is less. Nothing is sorted:
    each of 16 iterations finds the next two of the 32 bits of the floor's rank.
    """

    def add_bits(i: jax.Array, rank: jax.Array) -> jax.Array:
        unit = jnp.uint32(1) << (30 - 2 * i).astype(jnp.uint32)
        above = [
            jnp.where(values >= _float_at(rank + bits * unit), weights, 0) for bits in (1, 2, 3)
        ]
        return rank + unit * sum(w.sum(axis=-1, keepdims=True) >= limit for w in above)

    rank = jax.lax.fori_loop(0, 16, add_bits, jnp.zeros(limit.shape, jnp.uint32))
    return jnp.where(rank == 0, -jnp.inf, _float_at(rank))


def _float_at(rank: jax.Array) -> jax.Array:
    """The float32 of a rank, a uint32, in the ascending order of all float32."""
    bits = jnp.where(rank >> 31 == 1, rank ^ jnp.uint32(1 << 31), ~rank)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
