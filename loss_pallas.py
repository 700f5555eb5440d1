"""A TPU kernel for the log-probabilities of tokens, their entropies and the gradients of both.

token_logps in model/logps.py walks the vocabulary in tiles, and passes each tile to the Kernel of
this file if it gets one. The kernel computes a tile with the same functions as the jnp there, but
does not write the logits to HBM. docs/kernel.md compares both.

Dimensions: D model width; `tokens` are all tokens of a device, `tile` the lm_head rows of a tile.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from model.logps import (
    BackwardInputs,
    CallSettings,
    Statistics,
    Target,
    Tile,
    dot,
    forward_tile,
    logits_gradient,
)

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
PACKED = 4  # float32 numbers of a token: the fields of Statistics or of BackwardInputs


def _vmem_and_cores(device_kind: str) -> tuple[int, int]:
    """Returns (VMEM bytes of a core, cores of a device); an unknown chip gets (16 MiB, 1)."""
    mib, cores = next((CORES[name] for name in CORES if device_kind.startswith(name)), (16, 1))
    return mib * 2**20, cores


def block_sizes(D: int, itemsize: int, device_kind: str) -> tuple[int, int]:
    """Returns (tokens of a block, rows of a tile), the largest whose backward fits into VMEM.

    With more rows in a tile, hidden and its gradient are read from HBM fewer times.
    Raises ValueError if no size fits.
    """

    def vmem_bytes(block: int, tile: int) -> int:
        # The weights, their transpose and their gradient.
        weight_bytes = tile * D * (2 * itemsize + 4)
        # Two buffers of hidden, of its gradient in and of its gradient out; a temporary sum.
        hidden_bytes = block * D * (2 * itemsize + 4 * 4 + 4)
        # 12 float32 arrays: logits, probabilities and temporaries. The margin is wide: at the sizes
        # that were compiled (libtpu 0.0.42) the compiler added less than one array.
        return weight_bytes + hidden_bytes + 12 * block * tile * 4

    limit = _vmem_and_cores(device_kind)[0]
    sizes = [(block, tile) for tile in VOCABULARY_TILES for block in TOKEN_BLOCKS]
    if fits := [size for size in sizes if vmem_bytes(*size) < limit]:
        return fits[0]
    raise ValueError(
        f"POLICY_LOSS_IMPL=pallas: hidden size {D} is too wide for the {limit / 2**20:.0f} MiB of "
        f"VMEM of {device_kind}; set POLICY_LOSS_IMPL=jax"
    )


class Kernel(NamedTuple):
    """Computes the tiles of model/logps.py on a TPU, without a support; hashable."""

    device_kind: str
    interpret: bool | pltpu.InterpretParams = False  # else the kernel is interpreted on any device

    def blocks(self, hidden: jax.Array) -> tuple[int, int]:
        """The block_sizes for hidden [tokens, D]."""
        return block_sizes(hidden.shape[1], hidden.dtype.itemsize, self.device_kind)

    @staticmethod
    def pack(columns: Sequence[jax.Array]) -> jax.Array:
        """One array [tokens, PACKED] for the kernel, from columns [tokens, 1]."""
        lane = jax.lax.broadcasted_iota(jnp.int32, (len(columns[0]), PACKED), 1)
        packed = jnp.zeros(lane.shape)
        for i, column in enumerate(columns):
            packed = jnp.where(lane == i, column, packed)
        return packed

    @staticmethod
    def unpack(packed: jax.Array) -> list[jax.Array]:
        """The columns [tokens, 1] of [tokens, PACKED]."""
        return [packed[:, i : i + 1] for i in range(PACKED)]

    def settings(self, *semantics: Literal["parallel", "arbitrary"]) -> dict[str, Any]:
        """Arguments of pallas_call. semantics: of the dimensions of its grid."""
        limit = _vmem_and_cores(self.device_kind)[0]
        params = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)
        return {"compiler_params": params, "interpret": self.interpret}

    def forward(
        self, call: CallSettings, hidden: jax.Array, tile: Tile, target: Target, stats: jax.Array
    ) -> jax.Array:
        """Runs forward_tile on one block of tokens after the other. stats: packed."""
        tokens, D = hidden.shape
        block = min(self.blocks(hidden)[0], tokens)

        def kernel(tile_position, hidden, w, ids, stats, new_stats):
            tile = Tile(w[...], tile_position[0], tile_position[1])
            target = Target(ids[...], None)
            stats = Statistics(*self.unpack(stats[...]))
            new_stats[...] = self.pack(forward_tile(call, hidden[...], tile, target, stats))

        def token_block(width: int) -> pl.BlockSpec:
            return pl.BlockSpec((block, width), lambda i: (i, 0))

        scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
        weights_block = pl.BlockSpec(tile.w.shape, lambda i: (0, 0), pipeline_mode=pl.Buffered(1))
        tile_position = jnp.stack([tile.first, tile.repeated]).astype(jnp.int32)  # [2]
        return pl.pallas_call(
            kernel,
            grid=(pl.cdiv(tokens, block),),
            in_specs=[scalars, token_block(D), weights_block, token_block(1), token_block(PACKED)],
            out_specs=token_block(PACKED),
            out_shape=jax.ShapeDtypeStruct(stats.shape, stats.dtype),
            **self.settings("parallel"),
        )(tile_position, hidden, tile.w, target.ids, stats)

    def backward(
        self,
        call: CallSettings,
        hidden: jax.Array,
        tile: Tile,
        target: Target,
        inputs: jax.Array,
        grad_hidden: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """grad_hidden [tokens, D] plus the tile's part, and grad_w [tile, D]. Each block of tokens
        adds to its part of grad_hidden, and all blocks of a core add to the same grad_w. inputs:
        packed.

        Two kernels, one for each gradient, would compute the logits twice, but would not read and
        write grad_hidden in HBM for every tile.
        """
        (tokens, D), tile_rows = hidden.shape, tile.w.shape[0]
        block = min(self.blocks(hidden)[0], tokens)
        blocks = pl.cdiv(tokens, block)
        cores = _vmem_and_cores(self.device_kind)[1]
        cores = cores if blocks % cores == 0 else 1

        def kernel(tile_position, hidden, w, ids, inputs, before, grad_hidden, grad_w):
            hidden, tile = hidden[...], Tile(w[...], tile_position[0], tile_position[1])
            target, inputs = Target(ids[...], None), BackwardInputs(*self.unpack(inputs[...]))
            grad_logits = logits_gradient(call, hidden, tile, target, inputs)  # [block, tile]
            if tokens % block:  # The last block reads past the end, where the values may be NaN.
                i = pl.program_id(0) * (blocks // cores) + pl.program_id(1)
                token = i * block + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
                is_token = token < tokens  # [block, 1]
                hidden, grad_logits = (jnp.where(is_token, x, 0) for x in (hidden, grad_logits))
            grad_hidden[...] = before[...] + dot(grad_logits, tile.w, 1, 0)

            @pl.when(pl.program_id(1) == 0)
            def _():
                grad_w[...] = jnp.zeros_like(grad_w)

            grad_w[...] += dot(grad_logits, hidden, 0, 0)

        def token_block(width: int) -> pl.BlockSpec:
            return pl.BlockSpec((block, width), lambda core, i: (core * (blocks // cores) + i, 0))

        scalars, once = pl.BlockSpec(memory_space=pltpu.SMEM), pl.Buffered(1)
        weights_block = pl.BlockSpec((tile_rows, D), lambda core, i: (0, 0), pipeline_mode=once)
        gradient_block = pl.BlockSpec(
            (None, tile_rows, D), lambda core, i: (core, 0, 0), pipeline_mode=once
        )
        tile_position = jnp.stack([tile.first, tile.repeated]).astype(jnp.int32)  # [2]
        widths = (1, PACKED, D)  # of ids, inputs, grad_hidden
        grad_hidden, grad_w = pl.pallas_call(
            kernel,
            grid=(cores, blocks // cores),
            in_specs=[scalars, token_block(D), weights_block, *map(token_block, widths)],
            out_specs=[token_block(D), gradient_block],
            out_shape=[
                jax.ShapeDtypeStruct((tokens, D), jnp.float32),
                jax.ShapeDtypeStruct((cores, tile_rows, D), jnp.float32),
            ],
            input_output_aliases={5: 0},  # grad_hidden is updated in place.
            **self.settings("parallel", "arbitrary"),
        )(tile_position, hidden, tile.w, target.ids, inputs, grad_hidden)
        return grad_hidden, grad_w.sum(axis=0)
