"""ATTENTION_IMPL=splash: attention of packed rows by the block-sparse TPU kernel that ships with
jax. It skips the same blocks as blocks.py.

It has no sliding window. A mask of the kernel is a function of an int32 of the query and of the
key's slot. Where a window ends in a prompt depends on three numbers of the query: its slot, its
distance to the start of its completion, and the slot at which its prompt ends. They do not fit.

Dimensions as in attention.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from model.attention import KV, PackedRows, visible_in_prompt
from model.blocks import needed_blocks, on_each_device
from model.layout import Layout

LANES = 128  # a block of the kernel is a multiple of 128 tokens
# Longer rows are padded to a multiple of the first: by the compiler's count of instructions a block
# of 128 takes a fifth as long as one of 512, with a sixteenth of its scores.
BLOCKS = (512, 384, 256, LANES)
# The mask of the kernel packs a slot of a row and a distance within a completion into an int32.
SLOT_BITS = 17
MAX_ROW_TOKENS, MAX_COMPLETION_TOKENS = 2**SLOT_BITS, 2 ** (31 - SLOT_BITS)


def splash_attention(
    q: jax.Array,
    kv: KV,
    rows: PackedRows,
    layout: Layout,
    cap: float = 0.0,
    interpret: bool = False,
) -> jax.Array:
    """As `attention`, for rows without a window whose S and t are multiples of LANES.

    interpret: whether Pallas' interpreter runs the kernel, for tests on CPUs.
    """
    S, t = rows.S, rows.segment_ids.shape[1]
    assert not rows.window, "splash has no sliding window"
    is_aligned = S % LANES == t % LANES == 0
    assert is_aligned, f"rows of {t} slots with {S} for prompts are no multiples of {LANES}"
    assert t <= MAX_ROW_TOKENS, f"the mask of a row of {t} slots does not fit into an int32"
    q = q * q.shape[-1] ** -0.5
    shard = functools.partial(_splash_shard, S, cap, interpret)
    return on_each_device(shard, q, kv, layout, rows.segment_ids, rows.start)


def _splash_shard(
    S: int,
    cap: float,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    start: jax.Array,
) -> jax.Array:
    """The attention of the rows and heads of a device: [X, t, H*h]. q: [X, H, t, h]. k, v:
    [X, N, t, h]. segment_ids, start: [X, t] int32, of PackedRows."""
    t = q.shape[2]
    aligned = (size for size in BLOCKS if S % size == t % size == 0)
    block_size = BLOCKS[0] if t > BLOCKS[0] else next(aligned)
    missing = -t % block_size
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))) for x in (q, k, v))
    segment_ids = jnp.pad(segment_ids, ((0, 0), (0, missing)), constant_values=-1)
    start = jnp.pad(start, ((0, 0), (0, missing)))
    names = "block_q block_kv block_q_dkv block_kv_dkv block_q_dq block_kv_dq".split()

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, start: jax.Array
    ) -> jax.Array:
        query_info, key_info = _blocks_to_compute(segment_ids, start, S, block_size)
        kernel = splash.SplashAttentionKernel(
            query_info,
            query_info,
            key_info,
            is_mqa=False,
            mask_function=functools.partial(_splash_mask, S),
            mask_value=splash.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=cap or None,
            block_sizes=splash.BlockSizes(**dict.fromkeys(names, block_size)),
            save_residuals=False,
            residual_checkpoint_name=None,
            interpret=interpret,
        )
        return kernel(q, k, v, splash.SegmentIds(q=segment_ids, kv=segment_ids))

    out = jax.vmap(attend)(q, k, v, segment_ids, start)[:, :, :t]  # [X, H, t, h]
    return out.swapaxes(1, 2).reshape(len(q), t, -1)


def _splash_mask(S: int, query: jax.Array, key: jax.Array) -> jax.Array:
    """Whether queries see keys of their prompt. query: as _blocks_to_compute packs it: the slot,
    and the distance to the start of its completion."""
    slot, distance = query & (MAX_ROW_TOKENS - 1), query >> SLOT_BITS  # cheaper than % and //
    return visible_in_prompt(slot, slot - distance, key, S)


def _blocks_to_compute(
    segment_ids: jax.Array, start: jax.Array, S: int, block_size: int
) -> tuple[MaskInfo, MaskInfo]:
    """The blocks of keys that the queries of each block see, and the reverse, of one row.

    segment_ids, start: [t] int32. The results have the form of the kernel's static masks, but they
    are traced arrays, since these two are.
    """
    slots = jnp.arange(len(segment_ids), dtype=jnp.int32)
    has_distance = (slots >= S) & (segment_ids >= 0)
    queries = slots + MAX_ROW_TOKENS * jnp.where(has_distance, slots - start, 0)
    tokens = segment_ids.reshape(-1, 1, block_size), start.reshape(-1, 1, block_size)
    needed = needed_blocks(tokens, S)
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
