"""Attention of a prompt and its continuations, and attention with a cache.

Two implementations give the same values. `xla` multiplies dense matrices: a continuation attends to
the prompt's keys and to the continuation's keys, and the two parts are merged by their maxima. If
the scores [H, t, S+T] of an input need more than SCORES_BYTES, it takes the queries in chunks, so
that they never exist at once. `splash` is the
block-sparse TPU kernel that ships with jax; it skips the blocks of keys that no query may see.

Dimensions: G inputs of t = S + share*T tokens, each a prompt and its `share` continuations, so that
R = G*share sequences; S prompt tokens, T tokens of a continuation, H query heads, N kv heads, h
head_dim.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

from runtime.layout import Layout, constrain_batch

MASKED = -1e30  # finite, so that the softmax of a fully masked query is uniform and not NaN
# In training and prefill `xla` holds about so many bytes of float32 scores per device.
SCORES_BYTES = 256 * 2**20
LANES = 128  # a block of splash is a multiple of 128 tokens
BLOCKS = (512, 384, 256, LANES)  # possible numbers of queries and of keys in a block


class KV(NamedTuple):
    """Keys and values of X = G inputs or R sequences. Those of several layers are either stacked,
    with a first dimension L, or a tuple with a KV for each layer."""

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

    def write(self, new: "KV", index: jax.Array, layer: jax.Array | None = None) -> "KV":
        """This KV with the keys and values of a token, which `new` holds, at place `index`.

        layer: the layer to write to if this KV is stacked; `new` is of one layer.
        """
        first = () if layer is None else (layer,)
        k, v = new if layer is None else (new.k[None], new.v[None])
        return KV(
            jax.lax.dynamic_update_slice(self.k, k, (*first, 0, 0, 0, index)),
            jax.lax.dynamic_update_slice(self.v, v, (*first, 0, 0, index, 0)),
        )


def map_kv(change: Callable[[KV], KV], kvs: Any) -> Any:
    """`change` of a stacked KV, or of each KV of a tuple of layers."""
    return jax.tree.map(change, kvs, is_leaf=lambda x: isinstance(x, KV))


class Cache(NamedTuple):
    """The keys and values that a new token of each sequence may see."""

    prompt: Any  # KV of the G prompts; sequence i begins with prompt i // (R/G)
    prompt_mask: jax.Array  # [G, S] bool, False hides a prompt token (left padding)
    completion: Any  # KV of the R sequences, written up to and including `index`
    index: jax.Array  # the place of the new token in its completion, from 0


def attention(
    q: jax.Array, kv: KV, prompt_mask: jax.Array, share: int, layout: Layout | None, impl: str
) -> jax.Array:
    """softmax(q k^T / sqrt(h)) v over the keys that a token may see: [G, t, H*h] in q's dtype.

    q: [G, t, H, h]. kv: of the G inputs. A token sees itself and the earlier tokens of its
    continuation and of the prompt. prompt_mask: [G, S] bool, False hides a prompt token (left
    padding). impl: xla, or splash on a TPU.
    """
    q = q * q.shape[-1] ** -0.5
    S = prompt_mask.shape[1]
    if impl == "splash":
        return _splash(q, kv, prompt_mask, share, layout)
    prompt = KV(kv.k[..., :S], kv.v[:, :, :S])
    out = _causal(q[:, :S], prompt, prompt_mask, None, layout)  # [G, S, H*h]
    if q.shape[1] == S:
        return out
    continuations = KV(_unpack(kv.k[..., S:], share, 3), _unpack(kv.v[:, :, S:], share, 2))
    seen = (prompt, prompt_mask)
    after = _causal(_unpack(q[:, S:], share, 1), continuations, None, seen, layout)  # [R, T, H*h]
    return jnp.concatenate([out, after.reshape(*out.shape[:1], -1, out.shape[2])], axis=1)


def _unpack(x: jax.Array, share: int, axis: int) -> jax.Array:
    """x [G, ..., share*T, ...] as [G*share, ..., T, ...]; the tokens are at `axis`."""
    x = x.reshape(*x.shape[:axis], share, x.shape[axis] // share, *x.shape[axis + 1 :])
    x = jnp.moveaxis(x, axis, 1)
    return x.reshape(-1, *x.shape[2:])


def cached_attention(q: jax.Array, cache: Cache, layout: Layout | None) -> jax.Array:
    """Attention of one new token per sequence: [R, 1, H*h].

    q: [R, 1, H, h]. cache: of one layer, in which the new token's key and value are written.
    """
    written = jnp.arange(cache.completion.k.shape[-1]) <= cache.index  # [T]
    q, prompt = q * q.shape[-1] ** -0.5, (cache.prompt, cache.prompt_mask)
    return _dense(q, cache.completion, written[None, None], prompt, layout)


# ---- xla -----------------------------------------------------------------------------------------


def _causal(
    q: jax.Array,
    kv: KV,
    mask: jax.Array | None,
    prompt: tuple[KV, jax.Array] | None,
    layout: Layout | None,
) -> jax.Array:
    """Causal attention: [X, t, H*h]. It takes as many queries at a time as SCORES_BYTES allows.

    X: R continuations, or G prompts. q: [X, t, H, h]. kv: of t tokens; a query sees the keys up to
    its position. mask: [X, t] bool, False hides a key. prompt: keys and values of G prompts and
    their mask [G, S]; each query sees all of them that are not masked.
    """
    X, t, H, h = q.shape
    keys = t + (prompt[0].k.shape[-1] if prompt else 0)
    query_bytes = 4 * X * H * keys // _score_shards(kv.k.shape[1], layout)
    size = min(max(SCORES_BYTES // max(query_bytes, 1), 1), t)  # queries of a chunk

    def chunk(first: Any, q: jax.Array) -> jax.Array:
        seen = (first + jnp.arange(q.shape[1])[:, None] >= jnp.arange(t))[None]  # [1, size, t]
        seen = seen if mask is None else seen & mask[:, None]
        return _dense(q, kv, seen, prompt, layout)

    if size == t:
        return chunk(0, q)
    chunks = -(-t // size)
    size = -(-t // chunks)  # chunks of equal size need the least padding
    q = jnp.pad(q, ((0, 0), (0, chunks * size - t), (0, 0), (0, 0)))
    q = q.reshape(X, chunks, size, H, h).swapaxes(0, 1)
    # No scores are kept; backward computes the scores of each chunk again.
    recomputed = jax.checkpoint(lambda x: chunk(*x), prevent_cse=False)
    out = jax.lax.map(recomputed, (jnp.arange(chunks) * size, q))  # [chunks, X, size, H*h]
    return out.swapaxes(0, 1).reshape(X, chunks * size, H * h)[:, :t]


def _score_shards(N: int, layout: Layout | None) -> int:
    """The number of devices that split the scores: by batch, and by heads if tp divides N."""
    if layout is None:
        return 1
    tp = layout.mesh.shape["tp"] if layout.heads_axis else 1
    return layout.batch_shards * (tp if N % tp == 0 else 1)


def _dense(
    q: jax.Array,
    kv: KV,
    mask: jax.Array,
    prompt: tuple[KV, jax.Array] | None,
    layout: Layout | None,
) -> jax.Array:
    """Attention with all scores at once: [X, t, H*h]. kv: of u tokens. mask: [X or 1, t, u].

    X: R continuations, or G prompts. prompt: as for _causal; then X is R.
    """
    X, t, H, h = q.shape
    N = kv.k.shape[1]
    M = t * H // N  # queries of a kv head
    q = q.reshape(X, t, N, H // N, h).swapaxes(1, 2).reshape(X, N, M, h)
    parts = [_unnormalized(q, kv, jnp.repeat(mask, H // N, axis=1)[:, None])]
    if prompt:  # one product for the queries of all continuations of a prompt
        G = prompt[0].k.shape[0]
        share = X // G
        grouped = q.reshape(G, share, N, M, h).swapaxes(1, 2).reshape(G, N, share * M, h)
        part = _unnormalized(constrain_batch(grouped, layout), prompt[0], prompt[1][:, None, None])
        part = [x.reshape(G, N, share, M, -1).swapaxes(1, 2).reshape(X, N, M, -1) for x in part]
        parts.append([constrain_batch(x, layout) for x in part])
    top = functools.reduce(jnp.maximum, [top for top, _, _ in parts])  # [X, N, M, 1]
    total = sum(total * jnp.exp(part_top - top) for part_top, total, _ in parts)
    out = sum(values * jnp.exp(part_top - top) for part_top, _, values in parts) / total
    out = out.astype(q.dtype).reshape(X, N, t, H // N, h)
    return out.swapaxes(1, 2).reshape(X, t, H * h)


def _unnormalized(q: jax.Array, kv: KV, mask: jax.Array) -> list[jax.Array]:
    """Three float32 arrays: the highest score [X, N, M, 1], and relative to it the sum of the
    weights [X, N, M, 1] and the weighted sum of the values [X, N, M, h].

    X: R continuations, or G prompts. q: [X, N, M, h]. kv: of u tokens. mask: broadcast to
    [X, N, M, u].
    """
    f32 = {"preferred_element_type": jnp.float32}
    scores = jnp.where(mask, jnp.einsum("xnmh,xnhu->xnmu", q, kv.k, **f32), MASKED)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))  # it cancels in the quotient
    weights = jnp.exp(scores - top)
    values = jnp.einsum("xnmu,xnuh->xnmh", weights.astype(q.dtype), kv.v, **f32)
    return [top, weights.sum(axis=-1, keepdims=True), values]


# ---- splash --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SharedPromptMask(masks.Mask):
    """Which keys each query sees in a prompt of S tokens and its `share` continuations of T tokens.

    The kernel asks for the mask block by block.
    """

    S: int
    share: int
    T: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.S + self.share * self.T,) * 2

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        query, key = (np.arange(n)[part] for n, part in zip(self.shape, index, strict=True))
        query, key = query[:, None], key[None]
        same = (query - self.S) // max(self.T, 1) == (key - self.S) // max(self.T, 1)
        return (key <= query) & ((key < self.S) | same)


def _block(S: int, share: int, T: int) -> int:
    """Tokens of a block: the largest block that needs at most a tenth more padding than LANES.

    Prompt and continuations are padded to complete blocks, so that only the blocks on a diagonal
    need a mask, and all of these need the same mask.
    """

    def padded(block: int) -> int:
        return -(-S // block) * block + share * -(-T // block) * block

    return next(block for block in BLOCKS if padded(block) <= 1.1 * padded(LANES))


@functools.lru_cache
def _kernel(mask: SharedPromptMask, num_heads: int, block: int, interpret: bool) -> Any:
    """The kernel of one input: q [H, t, h], k [N, t, h], v [N, t, h] -> [H, t, h]."""
    names = "block_q block_kv block_q_dkv block_kv_dkv block_q_dq block_kv_dq".split()
    with jax.ensure_compile_time_eval():  # a cached kernel must not hold values of one trace
        return splash.make_splash_mha(
            masks.MultiHeadMask([mask] * num_heads),
            block_sizes=splash.BlockSizes(**dict.fromkeys(names, block)),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )


def _splash(
    q: jax.Array,
    kv: KV,
    prompt_mask: jax.Array,
    share: int,
    layout: Layout | None,
    interpret: bool = False,
) -> jax.Array:
    """`attention` by the kernel; each device computes the inputs and heads that lie on it."""
    shard = functools.partial(_splash_shard, share, interpret)
    if layout is None:
        return shard(q, kv, prompt_mask)
    batch, heads = layout.batch_axes, layout.heads_axis
    by_token, by_head = PartitionSpec(batch, None, heads), PartitionSpec(batch, heads)
    return jax.shard_map(
        shard,
        mesh=layout.mesh,
        in_specs=(by_token, by_head, PartitionSpec(batch)),
        out_specs=by_token,
        check_vma=False,
    )(q, kv, prompt_mask)


def _splash_shard(
    share: int, interpret: bool, q: jax.Array, kv: KV, prompt_mask: jax.Array
) -> jax.Array:
    """`attention` of the inputs and heads of one device."""
    G, t, H, h = q.shape
    S = prompt_mask.shape[1]
    T = (t - S) // share
    block = _block(S, share, T)
    front, end = -S % block, -T % block

    def pad(x: jax.Array) -> jax.Array:
        """x [G, heads, t, h] with the prompt padded in front and each continuation at its end."""
        if front == end == 0:
            return x
        heads = x.shape[1]
        prompt = jnp.pad(x[:, :, :S], ((0, 0), (0, 0), (front, 0), (0, 0)))
        rest = x[:, :, S:].reshape(G, heads, share, T, h)
        rest = jnp.pad(rest, ((0, 0), (0, 0), (0, 0), (0, end), (0, 0)))
        return jnp.concatenate([prompt, rest.reshape(G, heads, -1, h)], axis=2)

    # Tokens see only tokens of their segment: hidden tokens are one segment, all others another.
    seen = jnp.pad(prompt_mask, ((0, 0), (front, 0)))
    seen = jnp.pad(seen, ((0, 0), (0, share * (T + end))), constant_values=True).astype(jnp.int32)
    kernel = _kernel(SharedPromptMask(S + front, share, T + end), H, block, interpret)
    out = jax.vmap(kernel)(
        pad(q.swapaxes(1, 2)),
        pad(kv.k.swapaxes(2, 3)),
        pad(kv.v),
        splash.SegmentIds(q=seen, kv=seen),
    )  # [G, H, padded t, h]
    if front or end:
        rest = out[:, :, S + front :].reshape(G, H, share, T + end, h)[:, :, :, :T]
        out = jnp.concatenate(
            [out[:, :, front : S + front], rest.reshape(G, H, share * T, h)], axis=2
        )
    return out.swapaxes(1, 2).reshape(G, t, H * h)
