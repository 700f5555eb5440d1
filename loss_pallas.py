"""Token log-probabilities and entropies from hidden states, without an array of all logits.

The program walks the vocabulary in tiles of the lm_head. Forward keeps a running maximum, sum,
entropy and the sampled token's logit for each token. Backward computes the logits of each tile
again. Inside a tile runs plain jnp (`jax`) or a TPU kernel (`pallas`); all code around the tiles is
the same for both. docs/kernel.md compares their memory and time.

Dimensions: n tokens of a device, V vocabulary, D model width, v lm_head rows of a tile. A mesh
splits the tokens over (dp, fsdp), V over tp and D over fsdp; a tile is gathered before its use.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

# Float32 logits that `jax` may hold per device; 4096 columns for 16k tokens make fast matmuls.
LOGITS_TILE_BYTES = 256 * 2**20
MASKED = -1e30  # A logit of probability 0. It is finite because inf - inf is NaN.
BATCH_AXES = ("dp", "fsdp")  # mesh axes over which the tokens are split

# Two arrays [n, 4] float32 belong to the tokens. Columns of `stats`, over the tiles so far: the
# largest logit, sums of e = exp(logit - largest) and of e (logit - largest), the sampled token's
# logit. Columns of `known`, in backward: logsumexp, entropy, gradients in logp and in entropy.


class Static(NamedTuple):
    """The settings of one call; hashable."""

    temperature: float
    impl: str
    mesh: Mesh | None
    interpret: Any  # False on a TPU; True or pltpu.InterpretParams run the kernel on any device.


def token_logps(
    hidden: jax.Array,
    lm_head: jax.Array,
    ids: jax.Array,
    *,
    temperature: float = 1.0,
    impl: str = "jax",
    mesh: Mesh | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns log p of `ids` and the entropy of each distribution, both [..., n] float32 nats.

    hidden: [..., n, D] float32 or bfloat16; the matmuls use this dtype. lm_head: [V, D].
    ids: [..., n] int32. The logits are float32, divided by temperature.
    mesh: the axes are dp, fsdp and tp; the first axis of hidden and both axes of lm_head are split
    over them. None: one device holds everything. impl: "jax" runs anywhere, "pallas" on a TPU.
    Raises ValueError for an unknown impl.
    """
    if impl not in ("jax", "pallas"):
        raise ValueError(f"POLICY_LOSS_IMPL={impl!r} is not one of jax, pallas")
    shards = np.prod([mesh.shape[axis] for axis in mesh.axis_names]) if mesh else 1
    logits_bytes = 4 * ids.size * lm_head.shape[0] // shards
    if impl == "jax" and logits_bytes <= LOGITS_TILE_BYTES:
        return token_logps_reference(hidden, lm_head, ids, temperature=temperature)
    return _token_logps(hidden, lm_head, ids, Static(temperature, impl, mesh, interpret))


def token_logps_reference(
    hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, *, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Returns the same as token_logps, computed from an array of all logits."""
    head = lm_head.astype(hidden.dtype)
    kind = {"precision": _precision(hidden.dtype), "preferred_element_type": jnp.float32}
    logits = jnp.einsum("...d,vd->...v", hidden, head, **kind) / temperature  # [..., n, V]
    logsumexp = jax.nn.logsumexp(logits, axis=-1)  # [..., n]
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]  # [..., n]
    log_probs = logits - logsumexp[..., None]  # [..., n, V]
    # logsumexp - sum(p logits) would cancel for large logits and leave few digits of the entropy.
    return chosen - logsumexp, -(jnp.exp(log_probs) * log_probs).sum(axis=-1)


# ---- Around the tiles ----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_logps(
    hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, static: Static
) -> tuple[jax.Array, jax.Array]:
    return _forward(hidden, lm_head, ids, static)[0]


def _forward(hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, static: Static) -> Any:
    logps, entropy, logsumexp = _on_mesh(_forward_shard, static, hidden, lm_head, ids)
    return (logps, entropy), (hidden, lm_head, ids, logsumexp, entropy)


def _backward(static: Static, saved: Any, towards: tuple[jax.Array, jax.Array]) -> Any:
    hidden, lm_head, ids, logsumexp, entropy = saved
    known = (logsumexp, entropy, *towards)
    to_hidden, to_lm_head = _on_mesh(_backward_shard, static, hidden, lm_head, ids, *known)
    return to_hidden, to_lm_head, np.zeros(ids.shape, jax.dtypes.float0)


_token_logps.defvjp(_forward, _backward)


def _on_mesh(program: Any, static: Static, hidden: Any, lm_head: Any, ids: Any, *known: Any) -> Any:
    """Runs `program` on each device's part of the arrays; without a mesh on the entire arrays."""
    program = functools.partial(program, static)
    if static.mesh is None:
        return program(hidden, lm_head, ids, *known)
    tokens, head = PartitionSpec(BATCH_AXES), PartitionSpec("tp", "fsdp")
    specs = {
        "in_specs": (tokens, head, tokens, *[tokens for _ in known]),
        "out_specs": (tokens, head) if known else (tokens, tokens, tokens),
    }
    # check_vma=False: the programs make the sums over devices themselves.
    program = jax.shard_map(program, mesh=static.mesh, check_vma=False, **specs)
    return program(hidden, lm_head, ids, *known)


class Tile(NamedTuple):
    """v rows of the lm_head, and their place in the vocabulary."""

    w: jax.Array  # [v, D] in the dtype of hidden
    first: Any  # the token id of the first row
    seen: Any  # The first `seen` rows belong to the previous tile and do not count here.


def _tile_size(static: Static, lm_head: jax.Array, h: jax.Array) -> int:
    """Returns v for a device's part of the lm_head [V / tp, D / fsdp] and its hidden h [n, D]."""
    if static.impl == "pallas":
        size = block_sizes(h.shape[1], h.dtype.itemsize, _device_kind(static))[1]
    else:
        size = LOGITS_TILE_BYTES // (4 * h.shape[0]) // 128 * 128
    return min(max(size, 128), lm_head.shape[0])


def _tile(static: Static, lm_head: jax.Array, size: int, i: Any, dtype: Any) -> Tile:
    """Returns tile i, gathered over fsdp. The last tile overlaps the previous tile, so that all
    tiles have the same size without padding."""
    height = lm_head.shape[0]  # V / tp
    start = jnp.minimum(i * size, height - size)
    w = jax.lax.dynamic_slice_in_dim(lm_head, start, size).astype(dtype)  # [v, D / fsdp]
    if static.mesh is None:
        return Tile(w, start, i * size - start)
    w = jax.lax.all_gather(w, "fsdp", axis=1, tiled=True)  # [v, D]
    return Tile(w, jax.lax.axis_index("tp") * height + start, i * size - start)


def _add_tile(static: Static, total: jax.Array, size: int, i: Any, to_w: jax.Array) -> jax.Array:
    """Adds the gradient of tile i, to_w [v, D], to total [V / tp, D / fsdp]; sums over fsdp."""
    start = jnp.minimum(i * size, total.shape[0] - size)
    if static.mesh:
        to_w = jax.lax.psum_scatter(to_w, "fsdp", scatter_dimension=1, tiled=True)  # [v, D / fsdp]
    before = jax.lax.dynamic_slice_in_dim(total, start, size)
    return jax.lax.dynamic_update_slice_in_dim(total, before + to_w, start, 0)


def _forward_shard(
    static: Static, hidden: jax.Array, lm_head: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns logps, entropy and logsumexp of this device's tokens, each [..., n]."""
    h, target = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1, 1)  # [n, D], [n, 1]
    size = _tile_size(static, lm_head, h)
    forward = _forward_tile if static.impl == "jax" else _forward_kernel_call

    def step(i: jax.Array, stats: jax.Array) -> jax.Array:
        return forward(static, h, _tile(static, lm_head, size, i, h.dtype), target, stats)

    stats = jnp.zeros((len(h), 4), jnp.float32).at[:, 0].set(MASKED)  # [n, 4]
    stats = jax.lax.fori_loop(0, -(-lm_head.shape[0] // size), step, stats)
    largest, total, entropy_sum, chosen = stats.T  # each [n]
    if static.mesh:
        over_all = jax.lax.pmax(largest, "tp")
        scale = jnp.exp(largest - over_all)
        entropy_sum = scale * (entropy_sum + (largest - over_all) * total)
        sums = jnp.stack([scale * total, entropy_sum, chosen])
        (total, entropy_sum, chosen), largest = jax.lax.psum(sums, "tp"), over_all
    logsumexp = largest + jnp.log(total)
    entropy = jnp.log(total) - entropy_sum / total
    return tuple(x.reshape(ids.shape) for x in (chosen - logsumexp, entropy, logsumexp))


def _backward_shard(
    static: Static, hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, *known: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of hidden and lm_head, in their dtypes. known: 4 columns [..., n]."""
    h, target = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1, 1)  # [n, D], [n, 1]
    size = _tile_size(static, lm_head, h)
    backward = _backward_tile if static.impl == "jax" else _backward_kernel_call
    known = jnp.stack([x.reshape(-1) for x in known], axis=1)  # [n, 4]

    def step(i: jax.Array, totals: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tile, (to_hidden, to_lm_head) = _tile(static, lm_head, size, i, h.dtype), totals
        to_hidden, to_w = backward(static, h, tile, target, known, to_hidden)
        return to_hidden, _add_tile(static, to_lm_head, size, i, to_w)

    zeros = jnp.zeros(h.shape, jnp.float32), jnp.zeros(lm_head.shape, jnp.float32)
    totals = jax.lax.fori_loop(0, -(-lm_head.shape[0] // size), step, zeros)
    if static.mesh:
        totals = jax.lax.psum(totals[0], "tp"), jax.lax.psum(totals[1], "dp")
    to_hidden, to_lm_head = totals
    return to_hidden.reshape(hidden.shape).astype(hidden.dtype), to_lm_head.astype(lm_head.dtype)


# ---- Inside a tile, in jnp; the TPU kernels call these functions too -----------------------------


def _dot(a: jax.Array, b: jax.Array, i: int, j: int) -> jax.Array:
    """Contracts axis i of a with axis j of b, in float32."""
    kind = {"precision": _precision(a.dtype), "preferred_element_type": jnp.float32}
    return jax.lax.dot_general(a, b, (((i,), (j,)), ((), ())), **kind)


def _precision(dtype: Any) -> jax.lax.Precision | None:
    """Keeps float32 operands in float32; a TPU would round them to bfloat16 by default."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _logits(
    static: Static, h: jax.Array, tile: Tile, target: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns, each [n, v], the logits of the tile in float32, whether a logit counts, and whether
    it is the logit of the sampled token."""
    x = _dot(h, tile.w, 1, 1) * (1 / static.temperature)  # [n, v]
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    counts = column >= tile.seen
    return x, counts, counts & (column == target - tile.first)


def _forward_tile(
    static: Static, h: jax.Array, tile: Tile, target: jax.Array, stats: jax.Array
) -> jax.Array:
    """Adds the tile to stats [n, 4] float32. h: [n, D]. target: [n, 1] int32."""
    x, counts, hit = _logits(static, h, tile, target)
    x = jnp.where(counts, x, MASKED)
    before, total, entropy_sum, chosen = (stats[:, i : i + 1] for i in range(4))
    largest = jnp.maximum(before, x.max(axis=1, keepdims=True))
    below = x - largest
    e = jnp.exp(below)
    scale = jnp.exp(before - largest)
    entropy_sum = scale * (entropy_sum + (before - largest) * total)
    entropy_sum += (e * below).sum(axis=1, keepdims=True)
    total = scale * total + e.sum(axis=1, keepdims=True)
    chosen += jnp.where(hit, x, 0.0).sum(axis=1, keepdims=True)
    lane = jax.lax.broadcasted_iota(jnp.int32, stats.shape, 1)
    for i, new in enumerate((largest, total, entropy_sum, chosen)):
        stats = jnp.where(lane == i, new, stats)
    return stats


def _to_logits(
    static: Static, h: jax.Array, tile: Tile, target: jax.Array, known: jax.Array
) -> jax.Array:
    """Returns the gradient of h w^T, the logits before the division by the temperature: [n, v] in
    the dtype of h. known: [n, 4]."""
    x, counts, hit = _logits(static, h, tile, target)
    lse, entropy, to_logp, to_entropy = (known[:, i : i + 1] for i in range(4))
    logp = x - lse
    p = jnp.where(counts, jnp.exp(logp), 0.0)
    towards = jnp.where(hit, to_logp, 0.0) - p * (to_logp + to_entropy * (logp + entropy))
    return (towards * (1 / static.temperature)).astype(h.dtype)


def _backward_tile(
    static: Static,
    h: jax.Array,
    tile: Tile,
    target: jax.Array,
    known: jax.Array,
    to_hidden: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns to_hidden [n, D] plus the tile's part, and the gradient of w [v, D], in float32."""
    d = _to_logits(static, h, tile, target, known)
    return to_hidden + _dot(d, tile.w, 1, 0), _dot(d, h, 0, 0)


# ---- Inside a tile, on a TPU ---------------------------------------------------------------------

# (MiB of VMEM of a core, cores of a device) by the beginning of device_kind. jax tells them for the
# devices of this machine alone.
CORES = {
    "TPU v4": (16, 2),
    "TPU v5 lite": (128, 1),
    "TPU v5e": (128, 1),
    "TPU v5": (64, 2),
    "TPU v6": (128, 1),
}


def _device_kind(static: Static) -> str:
    devices = static.mesh.devices.flat if static.mesh else jax.devices()
    return devices[0].device_kind


def _vmem_and_cores(device_kind: str) -> tuple[int, int]:
    """Returns (VMEM bytes of a core, cores of a device); of the smallest chip for unknown kinds."""
    names = [name for name in CORES if device_kind.startswith(name)]
    mib, cores = CORES[names[0]] if names else (16, 1)
    return mib * 2**20, cores


def block_sizes(D: int, itemsize: int, device_kind: str) -> tuple[int, int]:
    """Returns (n tokens of a block, v rows of a tile), the largest whose backward fits into VMEM.

    More rows mean that hidden and its gradient pass through HBM fewer times.
    Raises ValueError if no size fits.
    """

    def vmem_bytes(n: int, v: int) -> int:
        tile = v * D * (2 * itemsize + 4)  # The weights, their transpose and their gradient.
        # Two buffers of hidden, of its gradient in and of its gradient out; a temporary sum.
        tokens = n * D * (2 * itemsize + 4 * 4 + 4)
        return tile + tokens + 12 * n * v * 4  # Logits, probabilities, temporaries of the compiler.

    limit = _vmem_and_cores(device_kind)[0]
    sizes = [(n, v) for v in (2048, 1024, 512, 256, 128) for n in (256, 128, 64)]
    if fits := [size for size in sizes if vmem_bytes(*size) < limit]:
        return fits[0]
    raise ValueError(
        f"POLICY_LOSS_IMPL=pallas: hidden size {D} is too wide for the {limit / 2**20:.0f} MiB of "
        f"VMEM of {device_kind}; set POLICY_LOSS_IMPL=jax"
    )


def stop_if_too_wide(D: int, itemsize: int, device_kind: str) -> None:
    """Raises the ValueError of block_sizes if the kernel cannot run."""
    block_sizes(D, itemsize, device_kind)


def _params(static: Static, *semantics: str) -> dict[str, Any]:
    limit = _vmem_and_cores(_device_kind(static))[0]
    params = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)
    return {"compiler_params": params, "interpret": static.interpret}


def _forward_kernel_call(
    static: Static, h: jax.Array, tile: Tile, target: jax.Array, stats: jax.Array
) -> jax.Array:
    """Runs _forward_tile on one block of tokens after the other, in a kernel."""
    n, D = h.shape
    block = min(block_sizes(D, h.dtype.itemsize, _device_kind(static))[0], n)

    def kernel(place, h, w, target, stats, new_stats):
        tile = Tile(w[...], place[0], place[1])
        new_stats[...] = _forward_tile(static, h[...], tile, target[...], stats[...])

    def token_block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, width), lambda i: (i, 0))

    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    weights_block = pl.BlockSpec(tile.w.shape, lambda i: (0, 0), pipeline_mode=pl.Buffered(1))
    place = jnp.stack([tile.first, tile.seen]).astype(jnp.int32)  # [2]
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(n, block),),
        in_specs=[scalars, token_block(D), weights_block, token_block(1), token_block(4)],
        out_specs=token_block(4),
        out_shape=jax.ShapeDtypeStruct(stats.shape, stats.dtype),
        **_params(static, "parallel"),
    )(place, h, tile.w, target, stats)


def _backward_kernel_call(
    static: Static,
    h: jax.Array,
    tile: Tile,
    target: jax.Array,
    known: jax.Array,
    to_hidden: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs _backward_tile in a kernel: each block of tokens adds to its part of to_hidden, and all
    blocks of a core add to one gradient of w.

    A single kernel makes the logits again once. Two kernels, one for each gradient, would make them
    twice, but to_hidden would not pass through HBM for every tile.
    """
    (n, D), v = h.shape, tile.w.shape[0]
    block = min(block_sizes(D, h.dtype.itemsize, _device_kind(static))[0], n)
    blocks = pl.cdiv(n, block)
    cores = _vmem_and_cores(_device_kind(static))[1]
    cores = cores if blocks % cores == 0 else 1

    def kernel(place, h, w, target, known, before, to_hidden, to_w):
        h, tile = h[...], Tile(w[...], place[0], place[1])
        d = _to_logits(static, h, tile, target[...], known[...])
        if n % block:  # The last block reads past the end, where the values may be NaN.
            i = pl.program_id(0) * (blocks // cores) + pl.program_id(1)
            token = i * block + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
            h, d = jnp.where(token < n, h, 0), jnp.where(token < n, d, 0)
        to_hidden[...] = before[...] + _dot(d, tile.w, 1, 0)

        @pl.when(pl.program_id(1) == 0)
        def _():
            to_w[...] = jnp.zeros_like(to_w)

        to_w[...] += _dot(d, h, 0, 0)

    def token_block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, width), lambda core, i: (core * (blocks // cores) + i, 0))

    scalars, once = pl.BlockSpec(memory_space=pltpu.SMEM), pl.Buffered(1)
    weights_block = pl.BlockSpec((v, D), lambda core, i: (0, 0), pipeline_mode=once)
    gradient_block = pl.BlockSpec((None, v, D), lambda core, i: (core, 0, 0), pipeline_mode=once)
    place = jnp.stack([tile.first, tile.seen]).astype(jnp.int32)  # [2]
    token_blocks = [token_block(width) for width in (1, 4, D)]  # of target, known, to_hidden
    to_hidden, to_w = pl.pallas_call(
        kernel,
        grid=(cores, blocks // cores),
        in_specs=[scalars, token_block(D), weights_block, *token_blocks],
        out_specs=[token_block(D), gradient_block],
        out_shape=[
            jax.ShapeDtypeStruct((n, D), jnp.float32),
            jax.ShapeDtypeStruct((cores, v, D), jnp.float32),
        ],
        input_output_aliases={5: 0},  # to_hidden is updated in place.
        **_params(static, "parallel", "arbitrary"),
    )(place, h, tile.w, target, known, to_hidden)
    return to_hidden, to_w.sum(axis=0)
