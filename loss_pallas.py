"""A TPU kernel for the log-probabilities of tokens, their entropies and the gradients of both.

token_logps in model/logps.py walks the vocabulary in tiles, and hands each tile to the Kernel of
this file if it gets one. The kernel computes a tile with the same functions as the jnp there, but
does not write the logits to HBM. docs/kernel.md compares both.

Dimensions: n tokens of a device, V vocabulary, D model width, v lm_head rows of a tile.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

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
# What block_sizes chooses from. Multiples of 64 tokens and of 128 rows fill the chip's tiles.
TOKEN_BLOCKS, VOCABULARY_TILES = (256, 128, 64), (2048, 1024, 512, 256, 128)
PACKED = 4  # float32 numbers of a token: the fields of Statistics, and those of BackwardInputs


def _vmem_and_cores(device_kind: str) -> tuple[int, int]:
    """Returns (VMEM bytes of a core, cores of a device); an unknown chip gets (16 MiB, 1)."""
    mib, cores = next((CORES[name] for name in CORES if device_kind.startswith(name)), (16, 1))
    return mib * 2**20, cores


def block_sizes(D: int, itemsize: int, device_kind: str) -> tuple[int, int]:
    """Returns (tokens of a block, v rows of a tile), the largest whose backward fits into VMEM.

    With more rows in a tile, hidden and its gradient are read from HBM fewer times.
    Raises ValueError if no size fits.
    """

    def vmem_bytes(block: int, v: int) -> int:
        tile = v * D * (2 * itemsize + 4)  # The weights, their transpose and their gradient.
        # Two buffers of hidden, of its gradient in and of its gradient out; a temporary sum.
        tokens = block * D * (2 * itemsize + 4 * 4 + 4)
        # 12 float32 arrays: logits, probabilities and what the compiler adds. The margin is wide:
        # at the sizes that were compiled (libtpu 0.0.42) the compiler added less than one array.
        return tile + tokens + 12 * block * v * 4

    limit = _vmem_and_cores(device_kind)[0]
    sizes = [(block, v) for v in VOCABULARY_TILES for block in TOKEN_BLOCKS]
    if fits := [size for size in sizes if vmem_bytes(*size) < limit]:
        return fits[0]
    raise ValueError(
        f"POLICY_LOSS_IMPL=pallas: hidden size {D} is too wide for the {limit / 2**20:.0f} MiB of "
        f"VMEM of {device_kind}; set POLICY_LOSS_IMPL=jax"
    )


class Kernel(NamedTuple):
    """What computes the tiles of model/logps.py on a TPU; hashable. It computes no support."""

    device_kind: str
    interpret: Any = False  # True or pltpu.InterpretParams run the kernel on any device

    def blocks(self, hidden: jax.Array) -> tuple[int, int]:
        """The block_sizes for hidden [n, D]."""
        return block_sizes(hidden.shape[1], hidden.dtype.itemsize, self.device_kind)

    @staticmethod
    def pack(columns: Sequence[jax.Array]) -> jax.Array:
        """[n, PACKED], one array for the kernel, from columns [n, 1]."""
        lane = jax.lax.broadcasted_iota(jnp.int32, (len(columns[0]), PACKED), 1)
        packed = jnp.zeros(lane.shape)
        for i, column in enumerate(columns):
            packed = jnp.where(lane == i, column, packed)
        return packed

    @staticmethod
    def unpack(packed: jax.Array) -> list[jax.Array]:
        """The columns [n, 1] of [n, PACKED]."""
        return [packed[:, i : i + 1] for i in range(PACKED)]

    def settings(self, *semantics: str) -> dict[str, Any]:
        """Arguments of pallas_call. semantics: of the dimensions of its grid."""
        limit = _vmem_and_cores(self.device_kind)[0]
        params = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)
        return {"compiler_params": params, "interpret": self.interpret}

    def forward(
        self, call: CallSettings, hidden: jax.Array, tile: Tile, target: Target, stats: jax.Array
    ) -> jax.Array:
        """Runs forward_tile on one block of tokens after the other. stats: packed."""
        n, D = hidden.shape
        block = min(self.blocks(hidden)[0], n)

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
            grid=(pl.cdiv(n, block),),
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
        """The gradients of a tile. Each block of tokens adds to its part of grad_hidden, and all
        blocks of a core add to the same grad_w. inputs: packed.

        A single kernel computes the logits again once. Two kernels, one for each gradient, would do
        it twice, but they would not read and write grad_hidden in HBM for every tile.
        """
        (n, D), v = hidden.shape, tile.w.shape[0]
        block = min(self.blocks(hidden)[0], n)
        blocks = pl.cdiv(n, block)
        cores = _vmem_and_cores(self.device_kind)[1]
        cores = cores if blocks % cores == 0 else 1

        def kernel(tile_position, hidden, w, ids, inputs, before, grad_hidden, grad_w):
            hidden, tile = hidden[...], Tile(w[...], tile_position[0], tile_position[1])
            target, inputs = Target(ids[...], None), BackwardInputs(*self.unpack(inputs[...]))
            grad_logits = logits_gradient(call, hidden, tile, target, inputs)  # [block, v]
            if n % block:  # The last block reads past the end, where the values may be NaN.
                i = pl.program_id(0) * (blocks // cores) + pl.program_id(1)
                token = i * block + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
                hidden, grad_logits = (jnp.where(token < n, x, 0) for x in (hidden, grad_logits))
            grad_hidden[...] = before[...] + dot(grad_logits, tile.w, 1, 0)

            @pl.when(pl.program_id(1) == 0)
            def _():
                grad_w[...] = jnp.zeros_like(grad_w)

            grad_w[...] += dot(grad_logits, hidden, 0, 0)

        def token_block(width: int) -> pl.BlockSpec:
            return pl.BlockSpec((block, width), lambda core, i: (core * (blocks // cores) + i, 0))

        scalars, once = pl.BlockSpec(memory_space=pltpu.SMEM), pl.Buffered(1)
        weights_block = pl.BlockSpec((v, D), lambda core, i: (0, 0), pipeline_mode=once)
        gradient_block = pl.BlockSpec(
            (None, v, D), lambda core, i: (core, 0, 0), pipeline_mode=once
        )
        tile_position = jnp.stack([tile.first, tile.repeated]).astype(jnp.int32)  # [2]
        widths = (1, PACKED, D)  # of ids, inputs, grad_hidden
        grad_hidden, grad_w = pl.pallas_call(
            kernel,
            grid=(cores, blocks // cores),
            in_specs=[scalars, token_block(D), weights_block, *map(token_block, widths)],
            out_specs=[token_block(D), gradient_block],
            out_shape=[
                jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, D), (cores, v, D))
            ],
            input_output_aliases={5: 0},  # grad_hidden is updated in place.
            **self.settings("parallel", "arbitrary"),
        )(tile_position, hidden, tile.w, target.ids, inputs, grad_hidden)
        return grad_hidden, grad_w.sum(axis=0)
