"""Attention of a new token with its cache on a GPU: what attention.py computes, in fewer kernels,
since most of them take longer to start than to run. Dimensions as in attention.py."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from model.layout import Layout, constrain_batch
from model.logps import MASKED, softcap

ONE_SOFTMAX = {"gpu"}  # the platforms that decode with this file
MOST_KV_HEADS = 4  # with N kv heads the products for the scores have N times the FLOPs
multiply = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def has_one_softmax(kv: Any, layout: Layout) -> bool:
    """Whether decoding with these keys and values of a layer uses attend_with_one_softmax."""
    platform = layout.mesh.devices.flat[0].platform
    return platform in ONE_SOFTMAX and kv.v.shape[1] <= MOST_KV_HEADS


def attend_with_one_softmax(q: jax.Array, parts: Any, layout: Layout, cap: float) -> jax.Array:
    """Attention of one token per sequence, without a gradient: [B, 1, H*h] in q's dtype.

    q: [B, 1, H, h]. parts, cap: those of cached_attention. One reduction over the scores of
    both parts finds the highest and the sum of the weights.
    """
    (B, _, H, h), N = q.shape, parts[0][0].k.shape[1]
    # Zeros for the keys of other heads: one product of all heads needs no transposed queries.
    wide = q.reshape(B, N, -1, 1, h) * jnp.eye(N, dtype=q.dtype)[:, None, :, None]
    scores, out = [], jnp.zeros(())
    for kv, mask in parts:
        P, *_, keys = kv.k.shape
        x = constrain_batch(wide.reshape(P, -1, N * h), layout)  # [P, B/P * H, N*h]
        x = softcap(multiply("pqd,pdk->pqk", x, kv.k.reshape(P, N * h, keys)), cap)
        x = jnp.where(mask, x, MASKED)
        scores.append(constrain_batch(x.reshape(B, N, H // N, keys), layout))
    # A concatenation would often be a kernel of its own; a maximum is part of the reduction.
    (x, y), none = scores, [(0, 0, 0)] * 3
    x, y = (
        jax.lax.pad(x, MASKED, [*none, (0, y.shape[-1], 0)]),
        jax.lax.pad(y, MASKED, [*none, (x.shape[-1], 0, 0)]),
    )
    x = jnp.maximum(x, y)
    highest, total = jax.lax.reduce((x, jnp.ones_like(x)), (MASKED, 0.0), _join, (3,))
    for (kv, _), x in zip(parts, scores, strict=True):
        weights = jnp.exp(x - highest[..., None]).astype(q.dtype)
        weights = constrain_batch(weights.reshape(len(kv.v), -1, *x.shape[1:]), layout)
        values = multiply("psngk,pnkh->pnsgh", weights, kv.v).swapaxes(1, 2)
        out += constrain_batch(values.reshape(B, N, H // N, h), layout)
    return (out / total[..., None]).astype(q.dtype).reshape(B, 1, H * h)


def _join(x: Any, y: Any) -> Any:
    highest = jnp.maximum(x[0], y[0])
    return highest, sum(total * jnp.exp(score - highest) for score, total in (x, y))
