"""Token log-probabilities and entropies straight from hidden states: no [n, V] is ever whole.

The vocabulary is walked in tiles of the lm_head. Forward keeps a running maximum, sum, entropy and
the sampled token's logit per token; backward makes each tile's logits again. What happens within a
tile is plain jnp (`jax`) or one TPU kernel (`pallas`); what goes around it, the mesh included, is
the same. bench.py counts the bytes and matmul passes of both, README.md has its table.

Dimensions: n tokens of a device, V vocabulary, D model, v rows of a tile. On a mesh tokens lie over
(dp, fsdp), V over tp, D over fsdp; a tile is gathered over fsdp when its turn comes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

# float32 logits that one tile of `jax` may hold per device, and the whole if they fit: little
# beside a chip's 16 GiB, and 4096 columns for 16k tokens, enough for a full matmul.
LOGITS_TILE_BYTES = 256 * 2**20
MASKED = -1e30  # a logit of probability 0; finite, since inf - inf is not
ROWS = ("dp", "fsdp")

# Two arrays [n, 4] float32 go along with the tokens. `stats`, of the tiles so far: the largest
# logit, the sum of e = exp(logit - largest), the sum of e (logit - largest), the sampled token's
# logit. `known`, in backward: logsumexp, entropy, and the gradients towards logp and entropy.


class Static(NamedTuple):
    """Hashable settings of one call."""

    temperature: float
    impl: str
    mesh: Mesh | None
    interpret: Any  # False, True or pltpu.InterpretParams: the kernel runs on any device


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
    """log p of `ids` and the entropy of each distribution: two arrays [..., n] float32, nats.

    hidden: [..., n, D] float32 or bfloat16, the operands' dtype; lm_head: [V, D]; ids: [..., n]
    int32. Logits are float32, divided by temperature. mesh: of axes dp, fsdp, tp, over which the
    leading axis of hidden and both of lm_head lie; None: all is on one device.
    impl: "jax" runs anywhere, "pallas" on a TPU.
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
    """What token_logps returns, computed from the whole of the logits."""
    head = lm_head.astype(hidden.dtype)
    logits = jnp.einsum(
        "...d,vd->...v", hidden, head, precision=_precision(hidden.dtype),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    logits = logits / temperature  # [..., n, V]
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    log_probs = logits - logsumexp[..., None]
    # Not logsumexp - sum(p z): large logits would cancel to an entropy of few digits.
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
    rows = (logsumexp, entropy, *towards)
    to_hidden, to_lm_head = _on_mesh(_backward_shard, static, hidden, lm_head, ids, *rows)
    return to_hidden, to_lm_head, np.zeros(ids.shape, jax.dtypes.float0)


_token_logps.defvjp(_forward, _backward)


def _on_mesh(program: Any, static: Static, hidden: Any, lm_head: Any, ids: Any, *rows: Any) -> Any:
    """`program` on each device's part, or on all of it where there is no mesh."""
    program = functools.partial(program, static)
    if static.mesh is None:
        return program(hidden, lm_head, ids, *rows)
    row, head = P(ROWS), P("tp", "fsdp")
    back = (row, head) if rows else (row, row, row)
    return jax.shard_map(
        program, mesh=static.mesh, in_specs=(row, head, row, *[row for _ in rows]),
        out_specs=back, check_vma=False,  # the gradient is written out below
    )(hidden, lm_head, ids, *rows)  # fmt: skip


class Tile(NamedTuple):
    """v rows of the lm_head and their place."""

    w: jax.Array  # [v, D] in the operands' dtype
    first: Any  # the first row's token id
    seen: Any  # rows at the front that belong to the tile before: they do not count here


def _tile_size(static: Static, lm_head: jax.Array, h: jax.Array) -> int:
    """v, of a device's lm_head [V / tp, D / fsdp] and its hidden h [n, D]."""
    if static.impl == "pallas":
        size = block_sizes(h.shape[1], h.dtype.itemsize, _device_kind(static))[1]
    else:
        size = LOGITS_TILE_BYTES // (4 * h.shape[0]) // 128 * 128
    return min(max(size, 128), lm_head.shape[0])


def _tile(static: Static, lm_head: jax.Array, size: int, i: Any, dtype: Any) -> Tile:
    """Tile i, from all of fsdp. The last one reaches back over rows of the one before it, so that
    all have one size and none is padded."""
    rows = lm_head.shape[0]
    start = jnp.minimum(i * size, rows - size)
    w = jax.lax.dynamic_slice_in_dim(lm_head, start, size).astype(dtype)
    if static.mesh is None:
        return Tile(w, start, i * size - start)
    w = jax.lax.all_gather(w, "fsdp", axis=1, tiled=True)
    return Tile(w, jax.lax.axis_index("tp") * rows + start, i * size - start)


def _add_tile(static: Static, total: jax.Array, size: int, i: Any, to_w: jax.Array) -> jax.Array:
    """total [V / tp, D / fsdp] with the gradient of tile i [v, D] of all of fsdp added."""
    start = jnp.minimum(i * size, total.shape[0] - size)
    if static.mesh:
        to_w = jax.lax.psum_scatter(to_w, "fsdp", scatter_dimension=1, tiled=True)
    before = jax.lax.dynamic_slice_in_dim(total, start, size)
    return jax.lax.dynamic_update_slice_in_dim(total, before + to_w, start, 0)


def _forward_shard(
    static: Static, hidden: jax.Array, lm_head: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """logps, entropy and logsumexp [..., n] of this device's tokens."""
    h, target = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1, 1)  # [n, D], [n, 1]
    size = _tile_size(static, lm_head, h)
    forward = _forward_tile if static.impl == "jax" else _forward_kernel_call

    def step(i: jax.Array, stats: jax.Array) -> jax.Array:
        return forward(static, h, _tile(static, lm_head, size, i, h.dtype), target, stats)

    stats = jnp.zeros((len(h), 4), jnp.float32).at[:, 0].set(MASKED)
    stats = jax.lax.fori_loop(0, -(-lm_head.shape[0] // size), step, stats)
    largest, total, entropy_sum, chosen = stats.T
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
    """The gradients of hidden and lm_head, in their dtypes. known: its columns, [..., n]."""
    h, target = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1, 1)
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


# ---- Within a tile, in jnp: on values, so that the kernels call it too ---------------------------


def _dot(a: jax.Array, b: jax.Array, i: int, j: int) -> jax.Array:
    """a and b contracted over axis i of a and axis j of b, in float32."""
    return jax.lax.dot_general(
        a, b, (((i,), (j,)), ((), ())), precision=_precision(a.dtype),
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 operands are multiplied as such, on a TPU too, which would round them to bfloat16."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _logits(
    static: Static, h: jax.Array, tile: Tile, target: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tile's logits [n, v] float32; where they count; where they are the sampled token's."""
    x = _dot(h, tile.w, 1, 1) * (1 / static.temperature)
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    counts = column >= tile.seen
    return x, counts, counts & (column == target - tile.first)


def _forward_tile(
    static: Static, h: jax.Array, tile: Tile, target: jax.Array, stats: jax.Array
) -> jax.Array:
    """stats [n, 4] float32 with the tile taken in. h: [n, D]. target: [n, 1] int32."""
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
    """The gradient of h w^T, before the temperature: [n, v] in h's dtype. known: [n, 4]."""
    x, counts, hit = _logits(static, h, tile, target)
    lse, entropy, to_logp, to_entropy = (known[:, i : i + 1] for i in range(4))
    logp = x - lse
    p = jnp.where(counts, jnp.exp(logp), 0.0)
    towards = jnp.where(hit, to_logp, 0.0) - p * (to_logp + to_entropy * (logp + entropy))
    return (towards * (1 / static.temperature)).astype(h.dtype)


def _backward_tile(
    static: Static, h: jax.Array, tile: Tile, target: jax.Array, known: jax.Array,
    to_hidden: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """to_hidden [n, D] with the tile's share added, and the gradient of w [v, D]; float32."""
    d = _to_logits(static, h, tile, target, known)
    return to_hidden + _dot(d, tile.w, 1, 0), _dot(d, h, 0, 0)


# ---- Within a tile, on a TPU ---------------------------------------------------------------------

# MiB of VMEM of a core, and cores of a device, by the beginning of its device_kind; jax knows them
# only of the device that is here.
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
    """VMEM bytes of a core, cores of a device; of the smallest chip where it is unknown."""
    names = [name for name in CORES if device_kind.startswith(name)]
    mib, cores = CORES[names[0]] if names else (16, 1)
    return mib * 2**20, cores


def block_sizes(D: int, itemsize: int, device_kind: str) -> tuple[int, int]:
    """Tokens of a block and rows of a tile, as large as backward's blocks fit into VMEM.

    The more rows, the fewer times hidden and its gradient pass through HBM. ValueError if no size
    fits.
    """

    def vmem_bytes(n: int, v: int) -> int:
        tile = v * D * (2 * itemsize + 4)  # the weights, turned too, and their gradient
        tokens = n * D * (2 * itemsize + 4 * 4 + 4)  # hidden, its gradient in and out: two; a sum
        return tile + tokens + 12 * n * v * 4  # logits, probabilities and what the compiler adds

    limit = _vmem_and_cores(device_kind)[0]
    for v in (2048, 1024, 512, 256, 128):
        for n in (256, 128, 64):
            if vmem_bytes(n, v) < limit:
                return n, v
    raise ValueError(
        f"POLICY_LOSS_IMPL=pallas: hidden size {D} is too wide for the {limit / 2**20:.0f} MiB of "
        f"VMEM of {device_kind}; set POLICY_LOSS_IMPL=jax"
    )


def _params(static: Static, *semantics: str) -> dict[str, Any]:
    limit = _vmem_and_cores(_device_kind(static))[0]
    params = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)
    return {"compiler_params": params, "interpret": static.interpret}


def _forward_kernel_call(
    static: Static, h: jax.Array, tile: Tile, target: jax.Array, stats: jax.Array
) -> jax.Array:
    """_forward_tile, one block of tokens after the other."""
    n, D = h.shape
    block = min(block_sizes(D, h.dtype.itemsize, _device_kind(static))[0], n)

    def kernel(place, h, w, target, stats, new_stats):
        tile = Tile(w[...], place[0], place[1])
        new_stats[...] = _forward_tile(static, h[...], tile, target[...], stats[...])

    def rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, width), lambda i: (i, 0))

    whole = pl.BlockSpec(tile.w.shape, lambda i: (0, 0), pipeline_mode=pl.Buffered(1))
    place = jnp.stack([tile.first, tile.seen]).astype(jnp.int32)
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(n, block),),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), rows(D), whole, rows(1), rows(4)],
        out_specs=rows(4),
        out_shape=jax.ShapeDtypeStruct(stats.shape, stats.dtype),
        **_params(static, "parallel"),
    )(place, h, tile.w, target, stats)


def _backward_kernel_call(
    static: Static, h: jax.Array, tile: Tile, target: jax.Array, known: jax.Array,
    to_hidden: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """_backward_tile: each block of tokens adds to its rows of to_hidden, and all blocks of a core
    to one gradient of w. One kernel and not one for each: the logits are made again once, not
    twice, at the price of to_hidden passing through HBM for every tile."""
    (n, D), v = h.shape, tile.w.shape[0]
    block = min(block_sizes(D, h.dtype.itemsize, _device_kind(static))[0], n)
    blocks = pl.cdiv(n, block)
    cores = _vmem_and_cores(_device_kind(static))[1]
    cores = cores if blocks % cores == 0 else 1

    def kernel(place, h, w, target, known, before, to_hidden, to_w):
        h, tile = h[...], Tile(w[...], place[0], place[1])
        d = _to_logits(static, h, tile, target[...], known[...])
        if n % block:  # the last block reads past the end: what is there may be NaN
            i = pl.program_id(0) * (blocks // cores) + pl.program_id(1)
            row = i * block + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
            h, d = jnp.where(row < n, h, 0), jnp.where(row < n, d, 0)
        to_hidden[...] = before[...] + _dot(d, tile.w, 1, 0)

        @pl.when(pl.program_id(1) == 0)
        def _():
            to_w[...] = jnp.zeros_like(to_w)

        to_w[...] += _dot(d, h, 0, 0)

    def rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, width), lambda core, i: (core * (blocks // cores) + i, 0))

    once = pl.Buffered(1)
    whole = pl.BlockSpec((v, D), lambda core, i: (0, 0), pipeline_mode=once)
    own = pl.BlockSpec((None, v, D), lambda core, i: (core, 0, 0), pipeline_mode=once)
    place = jnp.stack([tile.first, tile.seen]).astype(jnp.int32)
    to_hidden, to_w = pl.pallas_call(
        kernel,
        grid=(cores, blocks // cores),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM), rows(D), whole, rows(1), rows(4), rows(D)
        ],
        out_specs=[rows(D), own],
        out_shape=[
            jax.ShapeDtypeStruct((n, D), jnp.float32),
            jax.ShapeDtypeStruct((cores, v, D), jnp.float32),
        ],
        input_output_aliases={5: 0},
        **_params(static, "parallel", "arbitrary"),
    )(place, h, tile.w, target, known, to_hidden)  # fmt: skip
    return to_hidden, to_w.sum(axis=0)
