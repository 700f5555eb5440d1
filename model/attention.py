"""Attention within packed rows, and attention with a cache.

Two implementations give the same values, and skip the blocks of keys that no query may see. `xla`
goes through blocks in plain JAX (blocks.py); `splash` is the block-sparse TPU kernel that ships
with jax, and has no sliding window. Short rows, and prompts alone in the rollout, are multiplied
with dense masks instead of `xla`'s blocks: if their scores need more than SCORES_BYTES, in chunks
of queries, so that they never exist at once.

Dimensions: X rows of t = S + C tokens: S for prompts and C for completions, R = G*share sequences
and S prompt tokens in decoding, H query heads, N kv heads, h head_dim.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.sharding import PartitionSpec

from model.layout import Layout, constrain_batch

# Bytes of float32 scores, about, that a device holds of short rows and of prompts alone.
SCORES_BYTES = 256 * 2**20
# The most tokens of a short row. On CPUs blocks were slower up to here, by up to 70 percent.
SHORT_TOKENS = 384
# Tokens of a block of `xla`. On CPUs 64 was the fastest of 32 to 512. Elsewhere small blocks would
# be many small kernels.
BLOCK = {"cpu": 64, "others": 512}
LANES = 128  # a block of splash is a multiple of 128 tokens
BLOCKS = (512, 384, 256, LANES)  # possible numbers of queries and of keys in a block
# The most tokens of a row, and of a completion, for splash, which holds both in an int32.
MOST_PLACES, MOST_TOKENS = 2**17, 2**14


class KV(NamedTuple):
    """Keys and values of X rows, G prompts or R sequences. Those of several layers are either
    stacked, with a first dimension L, or a tuple with a KV for each layer."""

    k: jax.Array  # [X, N, h, tokens], rotated; a new token's scores read it in this order
    v: jax.Array  # [X, N, tokens, h]

    def empty(self, X: int, tokens: int) -> "KV":
        """Zeros for X sequences of `tokens` tokens; all else is as in this KV."""
        *stacked, _, N, h, _ = self.k.shape
        k = jnp.zeros((*stacked, X, N, h, tokens), self.k.dtype)
        return KV(k, jnp.zeros((*stacked, X, N, tokens, h), self.v.dtype))

    def widen(self, tokens: int) -> "KV":
        """This KV with zeros behind its tokens, so that there is room for `tokens` tokens."""
        pad = [(0, 0)] * self.k.ndim
        pad[-1] = 0, tokens - self.k.shape[-1]
        return KV(jnp.pad(self.k, pad), jnp.pad(self.v, [*pad[:-2], pad[-1], pad[-2]]))


def map_kv(change: Callable[[KV], KV], kvs: Any) -> Any:
    """`change` of a stacked KV, or of each KV of a tuple of layers."""
    return jax.tree.map(change, kvs, is_leaf=lambda x: isinstance(x, KV))


def of_layer(layers: Any, i: Any) -> Any:
    """What belongs to layer i, from arrays that are stacked by layer or from a tuple of layers."""
    if type(layers) is tuple:
        return layers[i]
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), layers)


def write(kvs: Any, i: Any, new: KV, index: jax.Array) -> Any:
    """The KV of all layers, stacked or in a tuple, with the keys and values of a token, which `new`
    holds, at place `index` of layer i."""
    if type(kvs) is tuple:
        k = jax.lax.dynamic_update_slice(kvs[i].k, new.k, (0, 0, 0, index))
        v = jax.lax.dynamic_update_slice(kvs[i].v, new.v, (0, 0, index, 0))
        return (*kvs[:i], KV(k, v), *kvs[i + 1 :])
    k = jax.lax.dynamic_update_slice(kvs.k, new.k[None], (i, 0, 0, 0, index))
    return KV(k, jax.lax.dynamic_update_slice(kvs.v, new.v[None], (i, 0, 0, index, 0)))


class Cache(NamedTuple):
    """The keys and values that a new token of each sequence may see."""

    prompt: Any  # KV of the G prompts; sequence i begins with prompt i // (R/G)
    prompt_mask: jax.Array  # [G, S] bool, False hides a prompt token (left padding)
    completion: Any  # KV of the R sequences, written up to and including `index`
    index: jax.Array  # the place of the new token in its completion, from 0


class PackedRows(NamedTuple):
    """Which tokens of packed rows see each other: a token sees its prompt, and what stands before
    it in its completion. rows.py draws a row and its mask."""

    prompt: jax.Array  # [X, t] int32, the number of the token's prompt in the row; -1: padding
    start: jax.Array  # [X, t] int32, where in the row the token's prompt or completion begins
    S: int  # places for prompts, in front of the completions
    # Each token's position and the lowest position that it sees, [X, t] int32; (): it sees all.
    window: tuple[jax.Array, ...] = ()

    def within(self, positions: jax.Array, window: jax.Array) -> "PackedRows":
        """These rows, in which a token sees only the last `window` positions, its own included.

        positions: [X, t] int32. Places would not do, because other prompts and completions stand
        between a completion and its prompt.
        """
        return self._replace(window=(positions, positions - window + 1))


def prompt_rows(mask: jax.Array) -> PackedRows:
    """PackedRows of one prompt each, without completions. mask: [X, S] bool, False: padding."""
    return PackedRows(jnp.where(mask, 0, -1), jnp.zeros(mask.shape, jnp.int32), mask.shape[1])


def attention(q: jax.Array, kv: KV, rows: PackedRows, layout: Layout, impl: str) -> jax.Array:
    """softmax(q k^T / sqrt(h)) v over the keys that a token may see: [X, t, H*h] in q's dtype.

    q: [X, t, H, h]. kv: of the X rows. impl: xla, or splash for training on a TPU, without a
    window, where S and t are multiples of LANES. The values of padding are finite, and mean
    nothing.
    """
    q = q * q.shape[-1] ** -0.5
    S, (X, t) = rows.S, rows.prompt.shape
    if impl == "splash" or t > max(S, SHORT_TOKENS):
        return _on_each_device(q, kv, rows, layout, impl)
    place = jnp.broadcast_to(jnp.arange(t), (X, t))
    tokens = jnp.stack([place, rows.prompt, rows.start, *rows.window], axis=-1)  # [X, t, 3 or 5]
    prompts = KV(kv.k[..., :S], kv.v[:, :, :S]), tokens[:, :S]
    out = _in_chunks(q[:, :S], tokens[:, :S], *prompts, S, layout)  # [X, S, H*h]
    if t == S:
        return out
    of_completions = _in_chunks(q[:, S:], tokens[:, S:], kv, tokens, S, layout)
    return jnp.concatenate([out, of_completions], axis=1)


def cached_attention(
    q: jax.Array, cache: Cache, layout: Layout, window: jax.Array | None = None
) -> jax.Array:
    """Attention of one new token per sequence: [R, 1, H*h].

    q: [R, 1, H, h]. cache: of one layer, in which the new token's key and value are written.
    window: how many positions the token sees, its own included; None: all.
    """
    keys = jnp.arange(cache.completion.k.shape[-1])
    written, of_prompt = keys <= cache.index, cache.prompt_mask[:, None]  # [T], [G, 1, S]
    if window is not None:
        # Prompts are padded on the left, so that their last tokens stand at -1, -2 and so on, if
        # the places of a completion are counted from 0.
        S, oldest = cache.prompt_mask.shape[1], cache.index - window + 1
        written, of_prompt = written & (keys >= oldest), of_prompt & (jnp.arange(S) - S >= oldest)
    prompt = cache.prompt, of_prompt
    return _dense(
        q * q.shape[-1] ** -0.5, [(cache.completion, written[None, None]), prompt], layout
    )


# ---- Short rows, prompts alone, and a new token --------------------------------------------------
# `_in_chunks` chooses how many queries are computed at a time, `_dense` joins parts of keys in one
# softmax, and `_unnormalized` computes one part.


def _in_chunks(
    q: jax.Array, queries: jax.Array, kv: KV, keys: jax.Array, S: int, layout: Layout
) -> jax.Array:
    """_dense with the mask of `seen`: [X, t, H*h]. It takes as many queries at a time as
    SCORES_BYTES allows.

    q: [X, t, H, h]. queries, keys: [X, tokens, 3 or 5] int32, as `seen` takes them.
    """
    X, t, H, h = q.shape
    query_bytes = 4 * X * H * keys.shape[1] // layout.mesh.size  # on each device
    size = min(max(SCORES_BYTES // max(query_bytes, 1), 1), t)  # queries of a chunk

    def chunk(q: jax.Array, queries: jax.Array) -> jax.Array:
        of_queries = jnp.moveaxis(queries[:, :, None], -1, 0)  # [3 or 5, X, size, 1]
        of_keys = jnp.moveaxis(keys[:, None], -1, 0)  # [3 or 5, X, 1, keys]
        return _dense(q, [(kv, seen(of_queries, of_keys, S))], layout)

    if size >= t:
        return chunk(q, queries)
    chunks = -(-t // size)
    size = -(-t // chunks)  # chunks of equal size need the least padding

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, chunks * size - t), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(X, chunks, size, *x.shape[2:]).swapaxes(0, 1)

    # No scores are kept; backward computes the scores of each chunk again.
    recomputed = jax.checkpoint(lambda x: chunk(*x), prevent_cse=False)
    out = jax.lax.map(recomputed, (cut(q), cut(queries)))  # [chunks, X, size, H*h]
    return out.swapaxes(0, 1).reshape(X, chunks * size, H * h)[:, :t]


def _dense(q: jax.Array, parts: list[tuple[KV, jax.Array]], layout: Layout) -> jax.Array:
    """Attention with all scores at once: [Y, t, H*h] in q's dtype.

    q: [Y, t, H, h]. parts: keys and values, and their mask [Z, queries or 1, keys], False hides a
    key. If a part has Z < Y inputs, each serves Y/Z consecutive inputs of q.
    """
    Y, t, H, h = q.shape
    N = parts[0][0].k.shape[1]
    M = t * H // N  # queries of a kv head
    q = q.reshape(Y, t, N, H // N, h).swapaxes(1, 2).reshape(Y, N, M, h)
    scored = []
    for kv, mask in parts:
        Z = len(kv.k)
        mask = mask if mask.shape[1] == 1 else jnp.repeat(mask, H // N, axis=1)
        if Z == Y:
            scored.append(_unnormalized(q, kv, mask[:, None]))
            continue
        share = Y // Z  # one product for all queries that see the same keys
        grouped = q.reshape(Z, share, N, M, h).swapaxes(1, 2).reshape(Z, N, share * M, h)
        part = _unnormalized(constrain_batch(grouped, layout), kv, mask[:, None])
        part = [x.reshape(Z, N, share, M, -1).swapaxes(1, 2).reshape(Y, N, M, -1) for x in part]
        scored.append([constrain_batch(x, layout) for x in part])
    top = functools.reduce(jnp.maximum, [top for top, _, _ in scored])  # [Y, N, M, 1]
    total = sum(total * jnp.exp(part_top - top) for part_top, total, _ in scored)
    out = sum(values * jnp.exp(part_top - top) for part_top, _, values in scored) / total
    out = out.astype(q.dtype).reshape(Y, N, t, H // N, h)
    return out.swapaxes(1, 2).reshape(Y, t, H * h)


def _unnormalized(q: jax.Array, kv: KV, mask: jax.Array) -> list[jax.Array]:
    """Three float32 arrays: the highest score [Z, N, M, 1], and relative to it the sum of the
    weights [Z, N, M, 1] and the weighted sum of the values [Z, N, M, h].

    q: [Z, N, M, h]. kv: of u tokens. mask: broadcast to [Z, N, M, u].
    """
    f32 = {"preferred_element_type": jnp.float32}
    scores = jnp.where(mask, jnp.einsum("znmh,znhu->znmu", q, kv.k, **f32), MASKED)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))  # it cancels in the quotient
    weights = jnp.exp(scores - top)
    values = jnp.einsum("znmu,znuh->znmh", weights.astype(q.dtype), kv.v, **f32)
    return [top, weights.sum(axis=-1, keepdims=True), values]


# ---- Attention of the rows and heads of one device -----------------------------------------------


def _on_each_device(
    q: jax.Array, kv: KV, rows: PackedRows, layout: Layout, impl: str, interpret: bool = False
) -> jax.Array:
    """`attention` by impl; each device computes the rows and heads that lie on it."""
    S, t = rows.S, rows.prompt.shape[1]
    k, v = kv.k.swapaxes(2, 3), kv.v
    if impl == "splash":
        assert not rows.window, "splash has no sliding window"
        in_blocks = S % LANES == t % LANES == 0
        assert in_blocks, f"rows of {t} places with {S} for prompts are no multiples of {LANES}"
        of_device = functools.partial(_splash_shard, S, interpret)
    else:
        of_device = functools.partial(_blocks_shard, S, layout)
        if k.shape[1] % layout.mesh.shape["tp"]:  # each query head gets its kv head
            k, v = (jnp.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in (k, v))
    batch = PartitionSpec(layout.batch_axes)
    by_head = PartitionSpec(layout.batch_axes, "tp")
    shard = jax.shard_map(
        of_device,
        mesh=layout.mesh,
        in_specs=(by_head, by_head, by_head, batch, batch, *[batch for _ in rows.window]),
        out_specs=PartitionSpec(layout.batch_axes, None, "tp"),
        check_vma=False,
    )
    return shard(q.swapaxes(1, 2), k, v, rows.prompt, rows.start, *rows.window)


def _blocks_shard(
    S: int, layout: Layout, q: jax.Array, k: jax.Array, v: jax.Array, *of_tokens: jax.Array
) -> jax.Array:
    """As _splash_shard, in blocks. of_tokens: prompt, start and the window of PackedRows."""
    X, H, t, h = q.shape
    size = min(BLOCK["cpu" if layout.mesh.devices.flat[0].platform == "cpu" else "others"], t)
    N, missing = k.shape[1], -t % size

    def padded(x: jax.Array, axis: int, value: int = 0) -> jax.Array:
        pad = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, pad, constant_values=value)

    q = padded(q, 2).reshape(X, N, H // N, t + missing, h)
    prompt, *others = of_tokens
    place = jnp.broadcast_to(jnp.arange(t + missing), (X, t + missing))
    of_tokens = place, padded(prompt, 1, -1), *(padded(x, 1) for x in others)
    out = block_attention(q, padded(k, 2), padded(v, 2), of_tokens, S, size)
    return out.reshape(X, H, -1, h)[:, :, :t].swapaxes(1, 2).reshape(X, t, -1)


# ---- splash --------------------------------------------------------------------------------------


def _splash_shard(
    S: int,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prompt: jax.Array,
    start: jax.Array,
) -> jax.Array:
    """`attention` of the rows and heads of one device: [X, t, H*h]. q: [X, H, t, h]. k and v:
    [X, N, t, h]. prompt, start: [X, t] int32."""
    t = q.shape[2]
    block = next(block for block in BLOCKS if S % block == t % block == 0)
    names = "block_q block_kv block_q_dkv block_kv_dkv block_q_dq block_kv_dq".split()

    def kernel(
        q: jax.Array, k: jax.Array, v: jax.Array, prompt: jax.Array, start: jax.Array
    ) -> Any:
        by_query, by_key = _blocks_to_compute(prompt, start, S, block)
        attend = splash.SplashAttentionKernel(
            by_query,
            by_query,
            by_key,
            is_mqa=False,
            mask_function=functools.partial(_splash_mask, S),
            mask_value=splash.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None,
            block_sizes=splash.BlockSizes(**dict.fromkeys(names, block)),
            save_residuals=False,
            residual_checkpoint_name=None,
            interpret=interpret,
        )
        return attend(q, k, v, splash.SegmentIds(q=prompt, kv=prompt))

    out = jax.vmap(kernel)(q, k, v, prompt, start)  # [X, H, t, h]
    return out.swapaxes(1, 2).reshape(len(q), t, -1)


def _splash_mask(S: int, query: jax.Array, key: jax.Array) -> jax.Array:
    """What a query sees among the tokens of its prompt. query: its place, and how far behind its
    start it is, as _blocks_to_compute joins them."""
    place, behind = query % MOST_PLACES, query // MOST_PLACES
    return sees(place, place - behind, key, S)


def _blocks_to_compute(
    prompt: jax.Array, start: jax.Array, S: int, block: int
) -> tuple[MaskInfo, MaskInfo]:
    """The blocks of keys that the queries of each block see, and the reverse, of one row.

    prompt, start: [t] int32. The results have the form of the kernel's static masks, but they are
    traced arrays, since prompt and start are.
    """
    places = jnp.arange(len(prompt), dtype=jnp.int32)
    queries = places + MOST_PLACES * jnp.where(places < S, 0, places - start)
    (needed,) = needed_blocks((places[None], prompt[None], start[None]), S, block)
    query, key = jnp.indices(needed.shape, dtype=jnp.int32)

    def info(other: jax.Array, axis: int) -> MaskInfo:
        # For a block that is left out, the kernel keeps the block that it has fetched last.
        return MaskInfo(
            data_next=jax.lax.cummax(jnp.where(needed, other, 0), axis=axis)[None],
            mask_next=None,
            block_mask=needed.astype(jnp.int32)[None],
            partial_mask_blocks=None,
            q_sequence=queries,
        )

    return info(key, 1), info(query, 0)


# ---- Attention in blocks -------------------------------------------------------------------------


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
