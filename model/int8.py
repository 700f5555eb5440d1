"""Weight-only int8 quantization of LoRA's frozen base: int8 values with a float32 scale for each
column.

The scale of a column is its largest magnitude / 127, and its numbers are rounded to the nearest
multiple of the scale.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Int8(NamedTuple):
    """A matrix [in, out] whose column j is values[:, j] * scale[j]. Stacked matrices have a first
    dimension L, those of experts then E; the same tuple also holds shapes or shardings."""

    values: Any  # [in, out] int8
    scale: Any  # [out] float32


def quantize(matrix: np.ndarray) -> Int8:
    """The nearest Int8 of a float matrix [in, out], as NumPy arrays."""
    matrix = matrix.astype(np.float32)
    scale = np.maximum(matrix.max(axis=0), -matrix.min(axis=0)) / np.float32(127)
    scale[scale == 0] = 1  # a column of zeros
    return Int8(np.rint(matrix / scale).astype(np.int8), scale)


def matmul(x: jax.Array, w: jax.Array | Int8) -> jax.Array:
    """x [..., in] times a matrix, in the dtype of x. Returns [..., out]."""
    return _matmul_int8(x, w) if isinstance(w, Int8) else x @ w


@jax.custom_vjp
def _matmul_int8(x: jax.Array, w: Int8) -> jax.Array:
    # If the scale follows the product, compilers convert the values within the matmul, and no float
    # copy of them is in memory.
    y = jnp.matmul(x, w.values.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y * w.scale).astype(x.dtype)


def _backward(w: Int8, g: jax.Array) -> tuple[jax.Array, None]:
    """The gradient of x; w has none. Autodiff would keep the converted values for it."""
    g = (g * w.scale).astype(g.dtype)
    return jnp.matmul(g, w.values.T.astype(g.dtype)), None


_matmul_int8.defvjp(lambda x, w: (_matmul_int8(x, w), w), _backward)
