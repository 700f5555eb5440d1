"""Draws the next token of each sequence from its logits, with temperature, top-k, top-p and min-p.

The support is the set of tokens that these filters keep, at most the MAX_SUPPORT likeliest: a token
is drawn from the softmax over it. Without filters it is drawn from the complete vocabulary.

Dimensions: B sequences, V vocabulary, U slots of a support.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.logps import MASKED

MAX_SUPPORT = 128  # the most tokens of a support; equal to MAX_TOP_K of config.py


class Sampling(NamedTuple):
    """The settings of drawing a token. The filters apply in this order; each is off by default."""

    temperature: float = 1.0  # 0: greedy, without filters
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    record_support: bool = False  # of each token, for the loss; needs filters

    def has_filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Drawn(NamedTuple):
    """The tokens that are drawn, one for each sequence."""

    token: jax.Array  # [B] int32
    logp: jax.Array  # [B] float32 nats, of the distribution that the token was drawn from
    support: jax.Array | None = None  # [B, U] int32 ids, -1 in unused slots; None: no filters
    was_cut: jax.Array | None = None  # [B] bool, whether MAX_SUPPORT has cut the support


def draw_tokens(keys: jax.Array, logits: jax.Array, sampling: Sampling) -> Drawn:
    """The next tokens. A greedy token has its log-probability at temperature 1.

    keys: [B]. logits: [B, V] float32.
    """
    if sampling.has_filters():
        support_logits, ids, was_cut = _support(logits / sampling.temperature, sampling)
        slot = jax.vmap(jax.random.categorical)(keys, support_logits)[:, None]  # [B, 1]
        token, chosen = (jnp.take_along_axis(x, slot, axis=-1)[:, 0] for x in (ids, support_logits))
        logp = chosen - jax.nn.logsumexp(support_logits, axis=-1)
        return Drawn(token, logp, jnp.where(support_logits > MASKED, ids, -1), was_cut)
    if sampling.temperature == 0:
        token, logsumexp = jnp.argmax(logits, axis=-1), jax.nn.logsumexp(logits, axis=-1)
    else:
        logits = logits / sampling.temperature
        token, logsumexp = jax.vmap(_categorical)(keys, logits)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return Drawn(token.astype(jnp.int32), chosen - logsumexp)


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
    """The slots U of a support."""
    return min(sampling.top_k or MAX_SUPPORT, V)


def _support(logits: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The U largest of logits [B, V], in descending order, in which those that the filters drop are
    masked [B, U]; their ids [B, U]; and whether the filters would keep more than U tokens [B] bool.

    With top-k nothing is cut, since U is top_k. NaN logits stay NaN.
    """
    U, V = support_size(sampling, logits.shape[-1]), logits.shape[-1]
    values, ids = _largest(logits, U if sampling.top_k else min(U + 1, V))
    highest = values[:, :1]
    is_dropped = jnp.zeros(values.shape, bool)
    if sampling.top_p < 1:
        weights = jnp.exp(values - highest)
        candidates = values if sampling.top_k else logits
        mass = jnp.exp(candidates - highest).sum(axis=-1, keepdims=True)
        is_dropped |= weights.cumsum(axis=-1) - weights >= sampling.top_p * mass
    if sampling.min_p > 0:
        is_dropped |= values < highest + math.log(sampling.min_p)
    was_cut = ~is_dropped[:, U:].all(axis=-1)
    return jnp.where(is_dropped, MASKED, values)[:, :U], ids[:, :U], was_cut


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
    values, slots = jax.lax.top_k(chosen, k)
    block = jnp.take_along_axis(block_ids, slots // width, axis=-1)
    return values, block * width + slots % width
