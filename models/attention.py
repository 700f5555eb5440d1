"""Attention within a row, a prompt and s sequences that each continue it, and from a cache.

Two ways to the same values. `xla`: dense products, the sequences' over the prompt's keys and over
their own merged by their maxima, in chunks of queries so that no large [H, t, S+T] is ever whole.
`splash`: the block-sparse TPU kernel that ships with jax, which skips the blocks nobody sees.

Dimensions: G rows of t = S + s*T tokens, R = G*s sequences, S prompt tokens, T tokens of a
sequence, H query heads, N kv heads, h head_dim.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec as P

from runtime.layout import Layout, by_row

MASKED = -1e30  # finite, so that a fully padded row gives a uniform softmax and not a NaN
# float32 scores that `xla` may hold per device: little beside a chip's 16 GiB.
SCORES_BYTES = 256 * 2**20
LANES = 128  # splash's blocks are multiples of it
BLOCKS = (512, 384, 256, LANES)  # tokens of a block of queries and of keys


class KV(NamedTuple):
    """Keys (rotated) and values: [L, rows, N, tokens, h], or one layer's without L."""

    k: jax.Array
    v: jax.Array


def attention(
    q: jax.Array, kv: KV, prompt_mask: jax.Array, s: int, layout: Layout | None, impl: str
) -> jax.Array:
    """softmax(q k^T / sqrt(h)) v over the keys that a token sees: [G, t, H*h] in q's dtype.

    q: [G, t, H, h]. kv: [G, N, t, h]. A token sees itself and, of its own sequence and of the
    prompt, what came before. prompt_mask: [G, S] bool, False hides a prompt token (left padding).
    impl: xla, or splash on a TPU.
    """
    q = q * q.shape[-1] ** -0.5
    S = prompt_mask.shape[1]
    if impl == "splash":
        return _splash(q, kv, prompt_mask, s, layout)
    prompt = KV(*(x[:, :, :S] for x in kv))
    out = _causal(q[:, :S], prompt, prompt_mask, None, layout)  # [G, S, H*h]
    if q.shape[1] == S:
        return out
    own = KV(*(_unpack(x[:, :, S:], s, 2) for x in kv))
    sequences = _causal(_unpack(q[:, S:], s, 1), own, None, (prompt, prompt_mask), layout)
    return jnp.concatenate([out, sequences.reshape(*out.shape[:1], -1, out.shape[2])], axis=1)


def _unpack(x: jax.Array, s: int, axis: int) -> jax.Array:
    """[G, ..., s*T, ...] as [G*s, ..., T, ...]; the tokens are at `axis`."""
    x = x.reshape(*x.shape[:axis], s, x.shape[axis] // s, *x.shape[axis + 1 :])
    x = jnp.moveaxis(x, axis, 1)
    return x.reshape(-1, *x.shape[2:])


def cached_attention(
    q: jax.Array, cache: KV, cache_index: jax.Array, prompt: tuple[KV, jax.Array] | None,
    layout: Layout | None,
) -> jax.Array:  # fmt: skip
    """attention of one new token a sequence: [R, 1, H*h].

    q: [R, 1, H, h]. cache: [R, N, T, h], written up to and including cache_index.
    prompt: KV [G, N, S, h], which row r sees as row r // (R/G), and its mask [G, S].
    """
    mask = (jnp.arange(cache.k.shape[2]) <= cache_index)[None, None]  # [1, 1, T]
    return _dense(q * q.shape[-1] ** -0.5, cache, mask, prompt, layout)


# ---- xla -----------------------------------------------------------------------------------------


def _causal(
    q: jax.Array, own: KV, own_mask: jax.Array | None, prompt: tuple[KV, jax.Array] | None,
    layout: Layout | None,
) -> jax.Array:  # fmt: skip
    """Each of q [R, t, H, h] over own keys [R, N, t, h] up to itself and all of the prompt's
    [G, N, S, h]: [R, t, H*h]. own_mask: [R, t] bool. As many queries at a time as fit."""
    R, t, H, h = q.shape
    keys = t + (prompt[0].k.shape[2] if prompt else 0)
    row_bytes = 4 * R * H * keys // _score_shards(own.k.shape[1], layout)
    size = min(max(SCORES_BYTES // max(row_bytes, 1), 1), t)  # queries of a chunk

    def chunk(first: Any, q: jax.Array) -> jax.Array:
        mask = (first + jnp.arange(q.shape[1])[:, None] >= jnp.arange(t))[None]  # [1, size, t]
        mask = mask if own_mask is None else mask & own_mask[:, None]
        return _dense(q, own, mask, prompt, layout)

    if size == t:
        return chunk(0, q)
    chunks = -(-t // size)
    size = -(-t // chunks)  # as many as there are chunks, and little padding
    q = jnp.pad(q, ((0, 0), (0, chunks * size - t), (0, 0), (0, 0)))
    q = q.reshape(R, chunks, size, H, h).swapaxes(0, 1)
    # No scores are kept: backward makes each chunk's again.
    remade = jax.checkpoint(lambda x: chunk(*x), prevent_cse=False)
    out = jax.lax.map(remade, (jnp.arange(chunks) * size, q))  # [chunks, R, size, H*h]
    return out.swapaxes(0, 1).reshape(R, chunks * size, H * h)[:, :t]


def _score_shards(N: int, layout: Layout | None) -> int:
    """Devices over which scores lie: by rows, and by heads where tp divides the kv heads."""
    if layout is None:
        return 1
    tp = layout.mesh.shape["tp"] if layout.heads else 1
    return layout.row_shards * (tp if N % tp == 0 else 1)


def _dense(
    q: jax.Array, own: KV, mask: jax.Array, prompt: tuple[KV, jax.Array] | None,
    layout: Layout | None,
) -> jax.Array:  # fmt: skip
    """With all scores at once: [R, t, H*h]. own: [R, N, u, h]. mask: [R or 1, t, u]."""
    R, t, H, h = q.shape
    N = own.k.shape[1]
    M = t * H // N  # queries of a kv head
    q = q.reshape(R, t, N, H // N, h).swapaxes(1, 2).reshape(R, N, M, h)
    parts = [_unnormalized(q, own, jnp.repeat(mask, H // N, axis=1)[:, None])]
    if prompt:  # the queries of the s sequences of a prompt, as those of one
        G = prompt[0].k.shape[0]
        s = R // G
        grouped = q.reshape(G, s, N, M, h).swapaxes(1, 2).reshape(G, N, s * M, h)
        part = _unnormalized(by_row(grouped, layout), prompt[0], prompt[1][:, None, None])
        part = [x.reshape(G, N, s, M, -1).swapaxes(1, 2).reshape(R, N, M, -1) for x in part]
        parts.append([by_row(x, layout) for x in part])
    top = functools.reduce(jnp.maximum, [top for top, _, _ in parts])  # [R, N, M, 1]
    total = sum(total * jnp.exp(part_top - top) for part_top, total, _ in parts)
    out = sum(values * jnp.exp(part_top - top) for part_top, _, values in parts) / total
    out = out.astype(q.dtype).reshape(R, N, t, H // N, h)
    return out.swapaxes(1, 2).reshape(R, t, H * h)


def _unnormalized(q: jax.Array, kv: KV, mask: jax.Array) -> list[jax.Array]:
    """Of q [R, N, M, h] over kv [R, N, u, h], mask broadcast to [R, N, M, u], all float32: the
    highest score [R, N, M, 1], and the weights' sum [R, N, M, 1] and weighted values [R, N, M, h]
    relative to it."""
    f32 = {"preferred_element_type": jnp.float32}
    scores = jnp.where(mask, jnp.einsum("rnmh,rnuh->rnmu", q, kv.k, **f32), MASKED)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))  # cancels in the end
    weights = jnp.exp(scores - top)
    values = jnp.einsum("rnmu,rnuh->rnmh", weights.astype(q.dtype), kv.v, **f32)
    return [top, weights.sum(axis=-1, keepdims=True), values]


# ---- splash --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SharedPromptMask(masks.Mask):
    """Who sees whom in a row of a prompt of S tokens and s sequences of T; made block by block."""

    S: int
    s: int
    T: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.S + self.s * self.T,) * 2

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        query, key = (np.arange(n)[part] for n, part in zip(self.shape, index, strict=True))
        query, key = query[:, None], key[None]
        same_sequence = (query - self.S) // max(self.T, 1) == (key - self.S) // max(self.T, 1)
        return (key <= query) & ((key < self.S) | same_sequence)


def _block(S: int, s: int, T: int) -> int:
    """Tokens of a block: the most that pad prompt and sequences by at most a tenth more than
    LANES do. Of whole blocks only those on a diagonal need a mask, all the same one."""

    def padded(block: int) -> int:
        return -(-S // block) * block + s * -(-T // block) * block

    return next(block for block in BLOCKS if padded(block) <= 1.1 * padded(LANES))


@functools.lru_cache
def _kernel(mask: SharedPromptMask, num_heads: int, block: int, interpret: bool) -> Any:
    """The kernel [H, t, h], [N, t, h], [N, t, h] -> [H, t, h] of one row."""
    sizes = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq",
                           "block_kv_dq"), block)  # fmt: skip
    with jax.ensure_compile_time_eval():  # what is cached must not belong to one trace
        return splash.make_splash_mha(
            masks.MultiHeadMask([mask] * num_heads), block_sizes=splash.BlockSizes(**sizes),
            head_shards=1, q_seq_shards=1, interpret=interpret,
        )  # fmt: skip


def _splash(
    q: jax.Array, kv: KV, prompt_mask: jax.Array, s: int, layout: Layout | None,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """attention by the kernel, on each device its own rows and heads."""
    shard = functools.partial(_splash_shard, s, interpret)
    if layout is None:
        return shard(q, kv, prompt_mask)
    rows, heads = layout.rows, layout.heads
    return jax.shard_map(
        shard, mesh=layout.mesh, in_specs=(P(rows, None, heads), P(rows, heads), P(rows)),
        out_specs=P(rows, None, heads), check_vma=False,
    )(q, kv, prompt_mask)  # fmt: skip


def _splash_shard(
    s: int, interpret: bool, q: jax.Array, kv: KV, prompt_mask: jax.Array
) -> jax.Array:
    G, t, H, h = q.shape
    S = prompt_mask.shape[1]
    T = (t - S) // s
    block = _block(S, s, T)
    front, end = -S % block, -T % block

    def pad(x: jax.Array) -> jax.Array:
        """[G, heads, t, h] with the prompt padded in front and each sequence at its end."""
        if front == end == 0:
            return x
        heads = x.shape[1]
        prompt = jnp.pad(x[:, :, :S], ((0, 0), (0, 0), (front, 0), (0, 0)))
        rest = x[:, :, S:].reshape(G, heads, s, T, h)
        rest = jnp.pad(rest, ((0, 0), (0, 0), (0, 0), (0, end), (0, 0)))
        return jnp.concatenate([prompt, rest.reshape(G, heads, -1, h)], axis=2)

    # Tokens see each other within a segment: the hidden ones, and all others.
    seen = jnp.pad(prompt_mask, ((0, 0), (front, 0)))
    seen = jnp.pad(seen, ((0, 0), (0, s * (T + end))), constant_values=True).astype(jnp.int32)
    kernel = _kernel(SharedPromptMask(S + front, s, T + end), H, block, interpret)
    out = jax.vmap(kernel)(
        pad(q.swapaxes(1, 2)), pad(kv.k), pad(kv.v), splash.SegmentIds(q=seen, kv=seen)
    )  # [G, H, padded t, h]
    if front or end:
        rest = out[:, :, S + front :].reshape(G, H, s, T + end, h)[:, :, :, :T]
        out = jnp.concatenate([out[:, :, front : S + front], rest.reshape(G, H, s * T, h)], axis=2)
    return out.swapaxes(1, 2).reshape(G, t, H * h)
