"""A TPU kernel for the log-probabilities of tokens, their entropies and the gradients of both.

It computes what token_logps of model/logps.py computes, but its logits stay in VMEM, the fast
memory of the chip. The program walks the vocabulary in tiles of the lm_head. Forward keeps four
running statistics of each token; backward computes the logits of each tile again, and adds the
tile's part to both gradients. This file can be copied into another project; docs/kernel.md has the
memory of both ways.

Dimensions: V vocabulary, D model width; `tokens` are all tokens of a device, `tile` the lm_head
rows of a tile, `block` the tokens that are in VMEM at once. A mesh splits the sequences over
(dp, fsdp), V over tp and D over fsdp.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

MASKED = -1e30  # A logit of probability 0. It is finite because inf - inf is NaN.
Ref = Any  # a block of an array in VMEM, or the scalars in SMEM
TOKENS, HEAD = PartitionSpec(("dp", "fsdp")), PartitionSpec("tp", "fsdp")
# (MiB of VMEM of a core, cores of a device) by the beginning of device_kind, as in jax 0.10's
# jax/_src/pallas/mosaic/tpu_info.py. The first match counts, so v5e ("v5 lite") stands before v5p.
CORES = {
    "TPU v4": (16, 2),
    "TPU v5 lite": (128, 1),
    "TPU v5e": (128, 1),
    "TPU v5": (64, 2),
    "TPU v6": (128, 1),
}
# The sizes that block_sizes tries. Multiples of 64 tokens and of 128 rows fill the chip's tiles.
TOKEN_BLOCKS, VOCABULARY_TILES = (256, 128, 64), (2048, 1024, 512, 256, 128)
COLUMNS = 4  # float32 numbers of a token that the kernels read and write as one array


class Kernel(NamedTuple):
    """Computes log-probabilities on a TPU; called like token_logps of model/logps.py. Hashable."""

    device_kind: str
    interpret: bool | pltpu.InterpretParams = False  # else the kernel is interpreted on any device

    def __call__(
        self,
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

        hidden: [..., D] bfloat16 or float32; the matmuls use this dtype. lm_head: [V, D].
        ids: [...] int32. The logits are float32, divided by temperature. With a cap, products x
        of hidden and lm_head become cap tanh(x / cap) before.
        mesh: its axes are dp, fsdp and tp; the first axis of hidden and both axes of lm_head are
        split over them. None: one device holds everything.
        Raises ValueError for a support, which the kernel does not compute.
        """
        if support is not None:
            raise ValueError("the kernel of POLICY_LOSS_IMPL=pallas computes no support; jax does")
        return _token_logps(hidden, lm_head, ids, Call(self, temperature, cap, mesh))


def reference(
    hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, temperature: float = 1.0, cap: float = 0
) -> tuple[jax.Array, jax.Array]:
    """The same as the kernel, from an array of all logits."""
    products = _dot(hidden, lm_head.astype(hidden.dtype), hidden.ndim - 1, 1)
    logits = _softcap(products, cap) / temperature
    table = jax.nn.log_softmax(logits)  # [..., V]
    logps = jnp.take_along_axis(table, ids[..., None], axis=-1)[..., 0]
    return logps, -(jnp.exp(table) * table).sum(axis=-1)


# ---- The walk over the vocabulary ----------------------------------------------------------------


class Call(NamedTuple):
    """The arguments that are not arrays; hashable, as custom_vjp needs."""

    kernel: Kernel
    temperature: float
    cap: float
    mesh: Mesh | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_logps(
    hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, call: Call
) -> tuple[jax.Array, jax.Array]:
    return _forward(hidden, lm_head, ids, call)[0]


def _forward(hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, call: Call) -> Any:
    program = _on_mesh(_forward_shard, call, (TOKENS, HEAD, TOKENS), (TOKENS, TOKENS, TOKENS))
    logps, entropy, logsumexp = program(hidden, lm_head, ids)  # each [...]
    return (logps, entropy), (hidden, lm_head, ids, entropy, logsumexp)


def _backward(call: Call, residuals: Any, cotangents: Any) -> Any:
    ins = (TOKENS, HEAD, *[TOKENS] * 5)
    program = _on_mesh(_backward_shard, call, ins, (TOKENS, HEAD))
    return *program(*residuals, *cotangents), None


_token_logps.defvjp(_forward, _backward)


def _on_mesh(program: Callable[..., Any], call: Call, ins: Any, outs: Any) -> Callable[..., Any]:
    """`program` on each device's part of the arrays."""
    program = functools.partial(program, call)
    if call.mesh is None:
        return program
    # check_vma=False: the programs make the sums over devices themselves.
    return jax.shard_map(program, mesh=call.mesh, in_specs=ins, out_specs=outs, check_vma=False)


class Tiles(NamedTuple):
    """The tiles of a device's part of the lm_head [V / tp, D / fsdp]. The last one overlaps the one
    before it, so that all tiles have the same size without padding."""

    rows: int  # V / tp
    size: int  # rows of a tile
    mesh: Mesh | None

    @property
    def num_tiles(self) -> int:
        return -(-self.rows // self.size)

    def start(self, i: jax.Array) -> jax.Array:
        """The first row of tile i in the device's part."""
        return jnp.minimum(i * self.size, self.rows - self.size)

    def load(self, lm_head: jax.Array, i: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Tile i, gathered over fsdp, [tile, D]; and [2] int32: the token id of its first
        row, and the number of rows at its front that the previous tile has counted already."""
        w = jax.lax.dynamic_slice_in_dim(lm_head, self.start(i), self.size).astype(dtype)
        first = self.start(i)
        if self.mesh:
            w = jax.lax.all_gather(w, "fsdp", axis=1, tiled=True)
            first += jax.lax.axis_index("tp") * self.rows
        return w, jnp.stack([first, i * self.size - self.start(i)]).astype(jnp.int32)

    def add(self, grad_lm_head: jax.Array, i: jax.Array, grad_w: jax.Array) -> jax.Array:
        """Adds grad_w [tile, D], summed over fsdp, to the rows of tile i."""
        if self.mesh:  # each device keeps [tile, D / fsdp] of the sum
            grad_w = jax.lax.psum_scatter(grad_w, "fsdp", scatter_dimension=1, tiled=True)
        before = jax.lax.dynamic_slice_in_dim(grad_lm_head, self.start(i), self.size)
        after = before + grad_w
        return jax.lax.dynamic_update_slice_in_dim(grad_lm_head, after, self.start(i), 0)


def _tiles(call: Call, hidden: jax.Array, lm_head: jax.Array) -> Tiles:
    rows = lm_head.shape[0]
    return Tiles(rows, min(_sizes(call, hidden)[1], rows), call.mesh)


def _forward_shard(
    call: Call, hidden: jax.Array, lm_head: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logps, entropy and logsumexp of this device's tokens, each [...] as ids."""
    shape, tiles = ids.shape, _tiles(call, hidden, lm_head)
    hidden, ids = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1, 1)

    def add_tile(i: jax.Array, statistics: jax.Array) -> jax.Array:
        w, tile_offset = tiles.load(lm_head, i, hidden.dtype)
        return _forward_tile(call, tile_offset, hidden, w, ids, statistics)

    zeros = jnp.zeros((len(ids), 1))
    statistics = _pack(zeros + MASKED, zeros, zeros, zeros)
    statistics = jax.lax.fori_loop(0, tiles.num_tiles, add_tile, statistics)
    largest, chosen, total, weighted = statistics.T
    if call.mesh:
        max_logit = jax.lax.pmax(largest, "tp")
        scale = jnp.exp(largest - max_logit)
        weighted = scale * (weighted + (largest - max_logit) * total)
        chosen, total, weighted = jax.lax.psum((chosen, scale * total, weighted), "tp")
        largest = max_logit
    logsumexp = largest + jnp.log(total)
    # logsumexp - sum(p logits) would cancel for large logits and leave few digits of the entropy.
    entropy = jnp.log(total) - weighted / total
    return tuple(x.reshape(shape) for x in (chosen - logsumexp, entropy, logsumexp))


def _backward_shard(
    call: Call, hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, *token_arrays: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of hidden and lm_head, in their dtypes. token_arrays: entropy,
    logsumexp, and the gradients of logps and entropy, each [...]."""
    shape, tiles = hidden.shape, _tiles(call, hidden, lm_head)
    hidden, ids = hidden.reshape(-1, shape[-1]), ids.reshape(-1, 1)
    inputs = _pack(*(x.reshape(-1, 1) for x in token_arrays))

    def add_tile(i: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        w, tile_offset = tiles.load(lm_head, i, hidden.dtype)
        grad_hidden, grad_w = _backward_tile(call, tile_offset, hidden, w, ids, inputs, grads[0])
        return grad_hidden, tiles.add(grads[1], i, grad_w)

    zeros = jnp.zeros(hidden.shape), jnp.zeros(lm_head.shape)
    grad_hidden, grad_lm_head = jax.lax.fori_loop(0, tiles.num_tiles, add_tile, zeros)
    if call.mesh:
        grad_hidden = jax.lax.psum(grad_hidden, "tp")
        grad_lm_head = jax.lax.psum(grad_lm_head, "dp")
    return grad_hidden.reshape(shape).astype(hidden.dtype), grad_lm_head.astype(lm_head.dtype)


# ---- The kernels, for one tile -------------------------------------------------------------------


def _logits(
    call: Call, tile_offset: Any, hidden: jax.Array, w: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three arrays [block, tile]: the float32 logits, whether a logit is new (its row is
    not one that the previous tile has counted), and whether it is the sampled token's new logit."""
    logits = _softcap(_dot(hidden, w, 1, 1), call.cap) * (1 / call.temperature)
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_new = column >= tile_offset[1]
    return logits, is_new, is_new & (column == ids - tile_offset[0])


def _forward_tile(
    call: Call,
    tile_offset: jax.Array,
    hidden: jax.Array,
    w: jax.Array,
    ids: jax.Array,
    statistics: jax.Array,
) -> jax.Array:
    """The statistics [tokens, COLUMNS] with the tile added. They are, with e = exp(logit -
    largest): the largest logit, the sampled token's logit, the sum of e, and the sum of
    e (logit - largest). tile_offset: [2], of Tiles.load."""
    tokens, D = hidden.shape
    block = min(_sizes(call, hidden)[0], tokens)

    def kernel(
        offset_ref: Ref,  # [2]
        hidden_ref: Ref,  # [block, D]
        w_ref: Ref,  # [tile, D]
        ids_ref: Ref,  # [block, 1]
        before_ref: Ref,  # [block, COLUMNS], the statistics without the tile
        after_ref: Ref,  # [block, COLUMNS]
    ) -> None:
        largest, chosen, total, weighted = _unpack(before_ref[...])  # each [block, 1]
        arrays = hidden_ref[...], w_ref[...], ids_ref[...]
        logits, is_new, is_sampled = _logits(call, offset_ref, *arrays)
        logits = jnp.where(is_new, logits, MASKED)
        max_logit = jnp.maximum(largest, logits.max(axis=1, keepdims=True))
        old_shift, below = largest - max_logit, logits - max_logit
        scale, e = jnp.exp(old_shift), jnp.exp(below)
        chosen += jnp.where(is_sampled, logits, 0.0).sum(axis=1, keepdims=True)
        weighted = scale * (weighted + old_shift * total) + (e * below).sum(axis=1, keepdims=True)
        total = scale * total + e.sum(axis=1, keepdims=True)
        after_ref[...] = _pack(max_logit, chosen, total, weighted)

    def token_spec(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, width), lambda i: (i, 0))

    tile_spec = pl.BlockSpec(w.shape, lambda i: (0, 0), pipeline_mode=pl.Buffered(1))
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(tokens, block),),
        in_specs=[scalars, token_spec(D), tile_spec, token_spec(1), token_spec(COLUMNS)],
        out_specs=token_spec(COLUMNS),
        out_shape=jax.ShapeDtypeStruct(statistics.shape, statistics.dtype),
        **_settings(call, "parallel"),
    )(tile_offset, hidden, w, ids, statistics)


def _backward_tile(
    call: Call,
    tile_offset: jax.Array,
    hidden: jax.Array,
    w: jax.Array,
    ids: jax.Array,
    inputs: jax.Array,
    grad_hidden: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """grad_hidden [tokens, D] plus the tile's part, and grad_w [tile, D], both float32.
    Each block of tokens adds to its part of grad_hidden, and all blocks of a core add to the same
    grad_w. inputs: [tokens, COLUMNS], as _backward_shard packs them.

    Two kernels, one for each gradient, would compute the logits twice, but would not read and
    write grad_hidden in HBM for every tile.
    """
    (tokens, D), tile = hidden.shape, len(w)
    block = min(_sizes(call, hidden)[0], tokens)
    blocks = pl.cdiv(tokens, block)
    cores = _vmem_and_cores(call.kernel.device_kind)[1]
    cores = cores if blocks % cores == 0 else 1

    def kernel(
        offset_ref: Ref,  # [2]
        hidden_ref: Ref,  # [block, D]
        w_ref: Ref,  # [tile, D]
        ids_ref: Ref,  # [block, 1]
        inputs_ref: Ref,  # [block, COLUMNS]
        before_ref: Ref,  # [block, D], grad_hidden without the tile
        grad_hidden_ref: Ref,  # [block, D]
        grad_w_ref: Ref,  # [tile, D]
    ) -> None:
        hidden, w = hidden_ref[...], w_ref[...]
        entropy, logsumexp, grad_logp, grad_entropy = _unpack(inputs_ref[...])  # each [block, 1]
        logits, is_new, is_sampled = _logits(call, offset_ref, hidden, w, ids_ref[...])
        logp = logits - logsumexp
        p = jnp.where(is_new, jnp.exp(logp), 0.0)
        g = jnp.where(is_sampled, grad_logp, 0.0)
        g -= p * (grad_logp + grad_entropy * (logp + entropy))
        if call.cap:  # the derivative of the capped logit
            g *= 1 - (logits * (call.temperature / call.cap)) ** 2
        g = (g * (1 / call.temperature)).astype(hidden.dtype)  # [block, tile]
        if tokens % block:  # The last block reads past the end, where the values may be NaN.
            i = pl.program_id(0) * (blocks // cores) + pl.program_id(1)
            token = i * block + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
            hidden, g = (jnp.where(token < tokens, x, 0) for x in (hidden, g))
        grad_hidden_ref[...] = before_ref[...] + _dot(g, w, 1, 0)

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            grad_w_ref[...] = jnp.zeros_like(grad_w_ref)

        grad_w_ref[...] += _dot(g, hidden, 0, 0)

    def token_spec(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, width), lambda core, i: (core * (blocks // cores) + i, 0))

    once = pl.Buffered(1)
    tile_spec = pl.BlockSpec((tile, D), lambda core, i: (0, 0), pipeline_mode=once)
    core_spec = pl.BlockSpec((None, tile, D), lambda core, i: (core, 0, 0), pipeline_mode=once)
    scalars, widths = pl.BlockSpec(memory_space=pltpu.SMEM), (1, COLUMNS, D)
    grad_hidden, grad_w = pl.pallas_call(
        kernel,
        grid=(cores, blocks // cores),
        in_specs=[scalars, token_spec(D), tile_spec, *map(token_spec, widths)],
        out_specs=[token_spec(D), core_spec],
        out_shape=[
            jax.ShapeDtypeStruct((tokens, D), jnp.float32),
            jax.ShapeDtypeStruct((cores, tile, D), jnp.float32),
        ],
        input_output_aliases={5: 0},  # grad_hidden is updated in place.
        **_settings(call, "parallel", "arbitrary"),
    )(tile_offset, hidden, w, ids, inputs, grad_hidden)
    return grad_hidden, grad_w.sum(axis=0)


def _pack(*columns: jax.Array) -> jax.Array:
    """One array [tokens, COLUMNS] from columns [tokens, 1]."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (len(columns[0]), COLUMNS), 1)
    packed = jnp.zeros(lane.shape)
    for i, column in enumerate(columns):
        packed = jnp.where(lane == i, column, packed)
    return packed


def _unpack(packed: jax.Array) -> list[jax.Array]:
    return [packed[:, i : i + 1] for i in range(COLUMNS)]


def _softcap(x: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(x / cap) if cap else x


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Contracts axis_a of a with axis_b of b, in float32."""
    # A TPU would round float32 operands to bfloat16 by default.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = ((axis_a,), (axis_b,)), ((), ())
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


# ---- Sizes ---------------------------------------------------------------------------------------


def _vmem_and_cores(device_kind: str) -> tuple[int, int]:
    """(VMEM bytes of a core, cores of a device); an unknown chip gets (16 MiB, 1)."""
    mib, cores = next((CORES[name] for name in CORES if device_kind.startswith(name)), (16, 1))
    return mib * 2**20, cores


def block_sizes(D: int, itemsize: int, device_kind: str, has_cap: bool = False) -> tuple[int, int]:
    """(tokens of a block, rows of a tile), the largest whose backward fits into VMEM.

    With more rows in a tile, hidden and its gradient are read from HBM fewer times.
    Raises ValueError if no size fits.
    """

    def vmem_bytes(block: int, tile: int) -> int:
        # The weights, their transpose and their gradient.
        weight_bytes = tile * D * (2 * itemsize + 4)
        # Two buffers of hidden, of its gradient in and of its gradient out; a temporary sum.
        hidden_bytes = block * D * (2 * itemsize + 4 * 4 + 4)
        # 12 float32 arrays: logits, probabilities and temporaries, and with a softcap its
        # derivative. The margin is wide: at the sizes that were compiled (libtpu 0.0.42) the
        # compiler added less than one array.
        return weight_bytes + hidden_bytes + (12 + has_cap) * block * tile * 4

    limit = _vmem_and_cores(device_kind)[0]
    sizes = [(block, tile) for tile in VOCABULARY_TILES for block in TOKEN_BLOCKS]
    if fits := [size for size in sizes if vmem_bytes(*size) < limit]:
        return fits[0]
    raise ValueError(
        f"POLICY_LOSS_IMPL=pallas: hidden size {D} is too wide for the {limit / 2**20:.0f} MiB of "
        f"VMEM of {device_kind}; set POLICY_LOSS_IMPL=jax"
    )


def _sizes(call: Call, hidden: jax.Array) -> tuple[int, int]:
    arguments = hidden.shape[-1], hidden.dtype.itemsize, call.kernel.device_kind
    return block_sizes(*arguments, has_cap=bool(call.cap))


def _settings(call: Call, *semantics: Literal["parallel", "arbitrary"]) -> dict[str, Any]:
    limit = _vmem_and_cores(call.kernel.device_kind)[0]
    params = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)
    return {"compiler_params": params, "interpret": call.kernel.interpret}
