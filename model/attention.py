"""Attention of packed rows in training and prefill, and of one new token with its cache in decode.

All scores of a row are computed at once. For long rows network.py computes the same attention with
blocks.py, which skips fully masked blocks, or with splash.py, which does so in a TPU kernel.

Dimensions: X rows of t = S + C tokens, S slots for prompts and C for completions; in decode B
sequences of P prompts, S prompt tokens and T completion tokens; L layers, H query heads, N kv
heads, h head_dim.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from model.layout import Layout, constrain_batch
from model.logps import MASKED, softcap  # MASKED: the score of a key that is not seen
from model.one_softmax import attend_with_one_softmax, has_one_softmax

ALL_POSITIONS = 2**30  # above every position: a window of this size hides nothing


# ---- Keys and values -----------------------------------------------------------------------------


class KV(NamedTuple):
    """Keys and values of X rows, or of P prompts or B sequences, of a layer with full attention.

    All layers of a model are a list with an entry for each layer of a period: a KV, or the State of
    a linear layer. An entry has all periods, stacked along a first dimension or in a tuple.
    """

    k: jax.Array  # [X, N, h, tokens], rotated; scores of a new token read it in this order
    v: jax.Array  # [X, N, tokens, h]

    def begin_completions(self, num_sequences: int, tokens: int) -> "KV":
        """Zeros, the KV of this number of completions before their first token."""
        *stacked, _, N, h, _ = self.k.shape
        k = jnp.zeros((*stacked, num_sequences, N, h, tokens), self.k.dtype)
        return KV(k, jnp.zeros((*stacked, num_sequences, N, tokens, h), self.v.dtype))

    def widen(self, tokens: int) -> "KV":
        """This KV, padded with zeros to `tokens` tokens."""
        pad = [(0, 0)] * self.k.ndim
        pad[-1] = 0, tokens - self.k.shape[-1]
        return KV(jnp.pad(self.k, pad), jnp.pad(self.v, [*pad[:-2], pad[-1], pad[-2]]))


def map_kv(change: Callable[[Any], Any], kvs: Any) -> Any:
    """Changes each KV and each State, which has the same two methods."""
    return jax.tree.map(change, kvs, is_leaf=lambda x: hasattr(x, "widen"))


def select_layer(layers: Any, i: int | jax.Array) -> Any:
    """The arrays of layer i, from arrays that are stacked by layer or from a tuple of layers."""
    if type(layers) is tuple:
        return layers[i]
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), layers)


def write_token(kvs: Any, i: int | jax.Array, new: Any, slot: jax.Array) -> Any:
    """The KV or State of all layers, stacked or in a tuple, after one token in layer i: with its
    keys and values, the KV `new`, written to this slot, or with the State `new`."""
    if type(kvs) is tuple:
        if isinstance(new, KV):
            k = jax.lax.dynamic_update_slice(kvs[i].k, new.k, (0, 0, 0, slot))
            new = KV(k, jax.lax.dynamic_update_slice(kvs[i].v, new.v, (0, 0, slot, 0)))
        return (*kvs[:i], new, *kvs[i + 1 :])
    if isinstance(new, KV):
        k = jax.lax.dynamic_update_slice(kvs.k, new.k[None], (i, 0, 0, 0, slot))
        return KV(k, jax.lax.dynamic_update_slice(kvs.v, new.v[None], (i, 0, 0, slot, 0)))
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
    return jax.tree.map(write, kvs, new)


class Cache(NamedTuple):
    """The keys and values that a new token of each sequence may see, of all layers or of one."""

    prompt: Any  # of the P prompts; sequence i continues prompt i // (B/P)
    prompt_mask: jax.Array  # [P, S] bool, False on left padding
    completion: Any  # of the B sequences, written up to and including `slot`
    slot: jax.Array  # int32, the slot of the new token in its completion


# ---- Which keys a token sees ---------------------------------------------------------------------


class PackedRows(NamedTuple):
    """The attention mask of packed rows: a token attends to its prompt and to its own completion,
    up to itself. rows.py has a picture of a row and its mask."""

    segment_ids: jax.Array  # [X, t] int32, the index of the token's prompt in the row; -1: padding
    start: jax.Array  # [X, t] int32, the slot at which the token's prompt or completion begins
    S: int  # slots for prompts, before those for completions
    # Each token's position and the lowest position that it sees, [X, t] int32; (): it sees all.
    window: tuple[jax.Array, ...] = ()
    key_blocks: Any = None  # [X, num_blocks, R] int32 or None, of with_key_blocks

    def with_window(self, positions: jax.Array, window: jax.Array) -> "PackedRows":
        """These rows with a sliding window: a token sees only the last `window` positions, its own
        included.

        positions: [X, t] int32, and not slots, because other prompts and completions are
        between a completion and its prompt.
        """
        return self._replace(window=(positions, positions - window + 1))


def prompt_rows(mask: jax.Array) -> PackedRows:
    """PackedRows of one prompt each, without completions. mask: [X, S] bool, False on padding."""
    return PackedRows(jnp.where(mask, 0, -1), jnp.zeros(mask.shape, jnp.int32), mask.shape[1])


def visible_in_prompt(slot: jax.Array, start: jax.Array, key: jax.Array, S: int) -> jax.Array:
    """Whether a query at a slot sees a key of the same prompt, bool. start: the query's, as in
    PackedRows. key: a slot."""
    return (key <= slot) & ((key < S) | (key >= start))


def visible(queries: Iterable[jax.Array], keys: Iterable[jax.Array], S: int) -> jax.Array:
    """Whether queries see keys, bool. queries, keys: the slot, and segment_ids, start and window of
    PackedRows, in shapes that broadcast against each other."""
    slot, segment_ids, start, *window = queries
    key, key_segment_ids, _, *key_window = keys
    mask = visible_in_prompt(slot, start, key, S) & (key_segment_ids == segment_ids)
    return mask & (key_window[0] >= window[1]) if window else mask


# ---- Attention -----------------------------------------------------------------------------------


def attention(
    q: jax.Array, kv: KV, rows: PackedRows, layout: Layout, cap: float = 0.0
) -> jax.Array:
    """softmax(q k^T / sqrt(h)) v over the keys that a token sees: [X, t, H*h] in q's dtype.

    q: [X, t, H, h]. kv: of the X rows. cap: of the scores, for softcap. Padding gets finite sums.
    """
    q = q * q.shape[-1] ** -0.5
    X, t = rows.segment_ids.shape
    slot = jnp.broadcast_to(jnp.arange(t), (X, t))
    tokens = slot, rows.segment_ids, rows.start, *rows.window
    mask = visible([x[:, :, None] for x in tokens], [x[:, None] for x in tokens], rows.S)
    return _attend_at_once(q, [(kv, mask)], layout, cap)


def cached_attention(
    q: jax.Array, cache: Cache, layout: Layout, window: jax.Array | None = None, cap: float = 0.0
) -> jax.Array:
    """Attention of one new token per sequence: [B, 1, H*h].

    q: [B, 1, H, h]. cache: of one layer, in which the new token's key and value are written.
    window: how many positions the token sees, its own included; None: all.
    """
    q = q * q.shape[-1] ** -0.5
    keys = jnp.arange(cache.completion.k.shape[-1])
    written, prompt_mask = keys <= cache.slot, cache.prompt_mask[:, None]  # [keys], [P, 1, S]
    if window is not None:
        # Prompts are padded on the left: counted from the first slot of a completion, the last
        # tokens of a prompt have the slots -1, -2 and so on.
        S, oldest = cache.prompt_mask.shape[1], cache.slot - window + 1
        written, prompt_mask = (
            written & (keys >= oldest),
            prompt_mask & (jnp.arange(S) - S >= oldest),
        )
    parts = [(cache.completion, written[None, None]), (cache.prompt, prompt_mask)]
    attend = attend_with_one_softmax if has_one_softmax(cache.prompt, layout) else _attend_at_once
    return attend(q, parts, layout, cap)


# ---- All scores at once: short rows, and a new token with its cache ------------------------------


def _attend_at_once(q: jax.Array, parts: Any, layout: Layout, cap: float) -> jax.Array:
    """Attention with all scores at once, one softmax over all parts: [X, t, H*h] in q's dtype.

    q: [X, t, H, h]. parts: pairs of a KV and its mask. A KV is of the X rows, and its mask is
    [X, t, keys]; or it is of P prompts, each shared by X/P consecutive rows, and its mask is
    [P, 1, keys]. A mask of [1, 1, keys] is that of all rows. False hides a key.
    """
    (X, t, H, h), N = q.shape, parts[0][0].k.shape[1]
    queries = t * H // N  # of a kv head
    q = q.reshape(X, t, N, H // N, h).swapaxes(1, 2).reshape(X, N, queries, h)
    scored = []
    for kv, mask in parts:
        P, share = len(kv.k), X // len(kv.k)  # rows with the same keys: one product
        mask = mask if mask.shape[1] == 1 else jnp.repeat(mask, H // N, axis=1)
        grouped = q.reshape(P, share, N, queries, h).swapaxes(1, 2)
        grouped = constrain_batch(grouped.reshape(P, N, share * queries, h), layout)
        part = _unnormalized(grouped, kv, mask[:, None], cap)
        part = [x.reshape(P, N, share, queries, -1).swapaxes(1, 2) for x in part]
        scored.append([constrain_batch(x.reshape(X, N, queries, -1), layout) for x in part])
    # The sums of a part are relative to its own maximum.
    maxima, totals, values = zip(*scored, strict=True)
    max_score = functools.reduce(jnp.maximum, maxima)  # [X, N, queries, 1]
    scales = [jnp.exp(x - max_score) for x in maxima]
    total = sum(scale * x for scale, x in zip(scales, totals, strict=True))
    out = sum(scale * x for scale, x in zip(scales, values, strict=True)) / total
    out = jnp.asarray(out, q.dtype).reshape(X, N, t, H // N, h)
    return out.swapaxes(1, 2).reshape(X, t, H * h)


def _unnormalized(q: jax.Array, kv: KV, mask: jax.Array, cap: float) -> list[jax.Array]:
    """Three float32 arrays: the highest score [X, N, queries, 1], and relative to it the sum of the
    weights [X, N, queries, 1] and the weighted sum of the values [X, N, queries, h].

    q: [X, N, queries, h]. mask: it broadcasts to [X, N, queries, keys].
    """
    scores = jnp.where(mask, softcap(multiply("xnqh,xnhk->xnqk", q, kv.k), cap), MASKED)
    # No gradient: the highest score cancels in the quotient.
    max_score = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - max_score)
    values = multiply("xnqk,xnkh->xnqh", weights.astype(q.dtype), kv.v)
    return [max_score, weights.sum(axis=-1, keepdims=True), values]


def multiply(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """The einsum of x and y, accumulated in float32."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)
