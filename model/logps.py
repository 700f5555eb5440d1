"""Log-probabilities and entropies of tokens from hidden states, without an array of all logits.

If the logits need more than LOGITS_TILE_BYTES, the program goes through the lm_head in tiles of
rows. A tile leaves a few sums for each token, from which log p and the entropy are computed after
the last tile. Backward is autodiff: jax.checkpoint computes the logits of each tile again.
docs/kernel.md explains this, and compares the TPU kernel of loss_pallas.py. This file can be copied
into another project.

Dimensions: V vocabulary, D model width, U ids of a support, `tile` rows of the lm_head. A mesh
splits the sequences over (dp, fsdp), V over tp and D over fsdp.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Float32 logits that a device may hold; 4096 columns for 16k tokens make fast matmuls.
LOGITS_TILE_BYTES = 256 * 2**20
MASKED = -1e30  # A logit or score of probability 0. It is finite because inf - inf is NaN.
SMALLEST = 1e-37  # The smallest sum of exponentials, because the logarithm of 0 is infinite.
BATCH_AXES = ("dp", "fsdp")  # mesh axes over which the sequences are split


def token_logps(
    hidden: jax.Array,
    lm_head: jax.Array,
    ids: jax.Array,
    *,
    support: jax.Array | None = None,
    temperature: float = 1.0,
    cap: float = 0.0,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log p of `ids` and the entropy of each distribution, both [...] float32 nats.

    With a support p is the softmax over its tokens; the entropy is over the whole vocabulary.
    hidden: [..., D] float32 or bfloat16; the matmuls use this dtype. lm_head: [V, D].
    ids: [...] int32. The logits are float32: softcap(product, cap) / temperature.
    support: [..., U] int32. The U ids of a token differ; unused slots are -1.
    mesh: its axes are dp, fsdp and tp; the first axis of hidden and both axes of lm_head are split
    over them. None: one device holds everything.
    """
    (V, D), tp = lm_head.shape, mesh.shape["tp"] if mesh else 1
    tiles = _number_of_tiles(V // tp, 4 * ids.size * V // (mesh.size if mesh else 1))
    # In float32, so that the gradients of the tiles are summed in float32.
    flat = hidden.reshape(-1, D).astype(jnp.float32)  # [tokens, D]
    ids = ids.reshape(-1, 1)
    support = None if support is None else support.reshape(len(ids), -1)
    shard_sums = functools.partial(
        _shard_sums, tiles=tiles, dtype=hidden.dtype, temperature=temperature, cap=cap, mesh=mesh
    )
    if tp == 1:  # On a CPU, vmap over a single shard would take 1.5 times as long.
        sums = shard_sums(flat, _constrain(lm_head, mesh, None, "fsdp"), ids, support)
    else:
        # Each tp shard has its copy of hidden, so that the gradients of the copies are summed over
        # tp once, and not for every tile.
        copies = _constrain(jnp.broadcast_to(flat, (tp, *flat.shape)), mesh, "tp", BATCH_AXES)
        shards = _constrain(lm_head.reshape(tp, V // tp, D), mesh, "tp", None, "fsdp")
        first = jnp.arange(tp)[:, None, None] * (V // tp)
        shard_ids = (ids - first, None if support is None else support - first)  # [tp, tokens, _]
        sums = jax.vmap(shard_sums, spmd_axis_name="tp")(copies, shards, *shard_ids)
        sums = jax.tree.map(lambda x: x.reshape(tp * tiles, -1), sums)

    largest = sums.largest.max(axis=0)  # [tokens]
    below = sums.largest - largest  # [tp * tiles, tokens]
    scale = jnp.exp(below)
    chosen = sums.chosen.sum(axis=0)
    total = (scale * sums.total).sum(axis=0)
    weighted = (scale * (sums.weighted + below * sums.total)).sum(axis=0)
    support_total = jnp.maximum((scale * sums.support_total).sum(axis=0), SMALLEST)
    logps = chosen - largest - jnp.log(support_total)
    # logsumexp - sum(p logits) would cancel for large logits and leave few digits of the entropy.
    entropy = jnp.log(total) - weighted / total
    return logps.reshape(hidden.shape[:-1]), entropy.reshape(hidden.shape[:-1])


class TileSums(NamedTuple):
    """Sums over the columns of a tile, [tokens] float32, or of more tiles [tiles, tokens]; e is
    exp(logit - largest)."""

    largest: jax.Array  # the largest logit
    chosen: jax.Array  # the logit of the sampled token, 0 if the tile does not have it
    total: jax.Array  # of e
    weighted: jax.Array  # of e (logit - largest)
    support_total: jax.Array  # of e of the support's tokens; without a support, of all


def _shard_sums(
    hidden: jax.Array,
    shard: jax.Array,
    ids: jax.Array,
    support: jax.Array | None,
    *,
    tiles: int,
    dtype: np.dtype,
    temperature: float,
    cap: float,
    mesh: Mesh | None,
) -> TileSums:
    """The sums of each tile of one tp shard of the lm_head, [tiles, tokens].

    hidden: [tokens, D]. shard: [V / tp, D]. ids: [tokens, 1] and support: [tokens, U], as rows of
    the shard; those below 0 or from V / tp on are in other shards.
    """
    height, D = shard.shape
    tile = -(-height // tiles)
    ids = jnp.where(ids < height, ids, -1)  # An id of the next shard must not match a padded row.

    def tile_sums(weights_and_start: tuple[jax.Array, jax.Array]) -> TileSums:
        weights, start = weights_and_start  # [tile, D], and its first row in the shard
        multiply = _multiply if tiles == 1 else _multiply_tile
        products = softcap(multiply(hidden, weights, dtype, mesh), cap)  # [tokens, tile]
        column = jnp.arange(tile)
        if height % tiles:  # the last tile is padded
            products = jnp.where(column < height - start, products, MASKED)
        logits = products / temperature
        largest = jax.lax.stop_gradient(products).max(axis=1) / temperature
        largest = checkpoint_name(largest, "largest")
        below = logits - largest[:, None]
        e = jnp.exp(below)
        total = support_total = e.sum(axis=1)
        if support is not None:
            support_total = jnp.where(_support_mask(support - start, tile), e, 0.0).sum(axis=1)
        chosen = jnp.where(column == ids - start, logits, 0.0).sum(axis=1)
        return TileSums(largest, chosen, total, (e * below).sum(axis=1), support_total)

    if tiles == 1:
        return jax.tree.map(lambda x: x[None], tile_sums((shard, jnp.int32(0))))
    shard = jnp.pad(shard, ((0, tiles * tile - height), (0, 0))).reshape(tiles, tile, D)
    # The largest logits are saved for backward: recomputing them would take one more pass.
    policy = jax.checkpoint_policies.save_only_these_names("largest")
    checkpointed = jax.checkpoint(tile_sums, policy=policy, prevent_cse=False)
    return jax.lax.map(checkpointed, (shard, jnp.arange(tiles) * tile))


def _number_of_tiles(height: int, logits_bytes: int) -> int:
    """The number of tiles, of 128 rows or more, for the `height` rows of a device's lm_head."""
    fewest = max(1, min(-(-logits_bytes // LOGITS_TILE_BYTES), height // 128))
    # Padding would copy the lm_head, so a number that divides the rows is better if it is close.
    return next((n for n in range(fewest, 2 * fewest) if height % n == 0), fewest)


def _constrain(x: jax.Array, mesh: Mesh | None, *axes: Any) -> jax.Array:
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


def _multiply(
    hidden: jax.Array, weights: jax.Array, dtype: np.dtype, mesh: Mesh | None
) -> jax.Array:
    """hidden [tokens, D] times weights [tile, D], in dtype. The weights are gathered over fsdp.
    Returns [tokens, tile] float32."""
    return dot(hidden.astype(dtype), _constrain(weights.astype(dtype), mesh), 1, 1)


def _multiply_backward(
    dtype: np.dtype, mesh: Mesh | None, inputs: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of hidden and weights are float32, since those of tiles and of devices are
    summed; autodiff would round them to dtype before."""
    hidden, weights = (x.astype(dtype) for x in inputs)
    g = g.astype(dtype)  # [tokens, tile]
    grad_hidden = dot(g, _constrain(weights, mesh), 1, 0)  # [tokens, D]
    grad_weights = dot(g, hidden, 0, 0)  # [tile, D]
    return grad_hidden, grad_weights.astype(inputs[1].dtype)


_multiply_tile = jax.custom_vjp(_multiply, nondiff_argnums=(2, 3))
_multiply_tile.defvjp(lambda *args: (_multiply(*args), args[:2]), _multiply_backward)


def softcap(x: jax.Array, cap: float) -> jax.Array:
    """x squashed into (-cap, cap), as Gemma 2 does with scores and logits; cap 0: x."""
    return cap * jnp.tanh(x / cap) if cap else x


def dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Contracts axis_a of a with axis_b of b, in float32."""
    # A TPU would round float32 operands to bfloat16 by default.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = ((axis_a,), (axis_b,)), ((), ())
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def _support_mask(columns: jax.Array, tile: int) -> jax.Array:
    """[tokens, tile] bool: whether a column of a tile is among the columns [tokens, U];
    those below 0 or from `tile` on are in another tile.

    Each word has the bits of 32 columns, so that a column is compared with tile / 32 words, not
    with all columns. With 3 words, column 7 is bit 2 of word 1. No two of the ids set the same bit,
    and the sum of their bits is the word.
    """
    words, columns = -(-tile // 32), columns[:, :, None]  # [tokens, U, 1]
    word = jnp.where((columns >= 0) & (columns < 32 * words), columns % words, -1)
    bit = jnp.uint32(1) << (columns // words).astype(jnp.uint32)
    packed = jnp.where(word == jnp.arange(words), bit, 0).sum(axis=1, dtype=jnp.uint32)
    bits = [packed >> i & 1 == 1 for i in range(32)]
    return jnp.concatenate(bits, axis=1)[:, :tile]
