"""Qwen2/Qwen2.5, Qwen3 (dense) and Llama 3: one forward for prefill, decode and training.

Dimensions: G rows of t tokens, R sequences, S prompt tokens before the last one, T completion
tokens, V vocabulary, D model, F feed-forward, L layers, H query heads, N kv heads, h head_dim.

The last prompt token is fed together with the completion, in all three uses. So the prompt gives
only keys and values, hidden state i predicts completion token i, and no use has a special case:

    prefill   _, kv = forward(prompt[:, :-1])                               once per prompt row
    decode    hidden, cache = forward(last token, prompt=kv, cache=...)     once per new token
    training  hidden, _ = forward([prompt[:-1], (last prompt token, completion[:-1]) * s])

A training row holds a prompt once and the s sequences that continue it.
"""

import dataclasses
import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.attention import KV, attention, cached_attention
from runtime.layout import TRAIN_ROWS, Layout, constrain, whole


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # N
    head_dim: int  # h
    rms_norm_eps: float
    rope_theta: float
    rope_llama3: tuple[float, float, float, int] | None  # factor, low, high, original positions
    tied: bool  # the embedding is also the lm_head
    qkv_bias: bool
    qk_norm: bool
    max_positions: int  # tokens


# ---- The parameters: shapes, mesh axes and Hugging Face names, side by side ----------------------


@flax.struct.dataclass
class Layers:
    """Every array has a leading layer axis; lax.scan walks it. None: the family has no such one."""

    attn_norm: Any
    wq: Any
    wk: Any
    wv: Any
    wo: Any
    bq: Any
    bk: Any
    bv: Any
    q_norm: Any
    k_norm: Any
    mlp_norm: Any
    gate: Any
    up: Any
    down: Any


@flax.struct.dataclass
class Params:
    embed: Any
    layers: Layers
    final_norm: Any
    lm_head: Any  # None: tied to embed


@dataclasses.dataclass(frozen=True)
class Leaf:
    shape: tuple[int, ...]
    axes: tuple[Any, ...]  # mesh axis of each dimension, or axes, or None
    name: str  # in the Hugging Face file; {} is the layer
    transposed: bool = False  # there [out, in], here [in, out]


def param_table(c: ModelConfig) -> Params:
    """A Params of Leaf: what every parameter is, where it lies, and what others call it."""
    L, D, F, V = c.num_layers, c.hidden_size, c.intermediate_size, c.vocab_size
    Hh, Nh, h = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.head_dim
    block = "model.layers.{}."
    attn, mlp = block + "self_attn.", block + "mlp."

    def bias(width: int, name: str) -> Leaf | None:
        return Leaf((L, width), (None, "tp"), attn + name) if c.qkv_bias else None

    def head_norm(name: str) -> Leaf | None:
        return Leaf((L, h), (None, None), attn + name) if c.qk_norm else None

    layers = Layers(
        attn_norm=Leaf((L, D), (None, None), block + "input_layernorm.weight"),
        wq=Leaf((L, D, Hh), (None, "fsdp", "tp"), attn + "q_proj.weight", True),
        wk=Leaf((L, D, Nh), (None, "fsdp", "tp"), attn + "k_proj.weight", True),
        wv=Leaf((L, D, Nh), (None, "fsdp", "tp"), attn + "v_proj.weight", True),
        wo=Leaf((L, Hh, D), (None, ("tp", "fsdp"), None), attn + "o_proj.weight", True),
        bq=bias(Hh, "q_proj.bias"),
        bk=bias(Nh, "k_proj.bias"),
        bv=bias(Nh, "v_proj.bias"),
        q_norm=head_norm("q_norm.weight"),
        k_norm=head_norm("k_norm.weight"),
        mlp_norm=Leaf((L, D), (None, None), block + "post_attention_layernorm.weight"),
        gate=Leaf((L, D, F), (None, "fsdp", "tp"), mlp + "gate_proj.weight", True),
        up=Leaf((L, D, F), (None, "fsdp", "tp"), mlp + "up_proj.weight", True),
        down=Leaf((L, F, D), (None, ("tp", "fsdp"), None), mlp + "down_proj.weight", True),
    )
    return Params(
        embed=Leaf((V, D), ("tp", "fsdp"), "model.embed_tokens.weight"),
        layers=layers,
        final_norm=Leaf((D,), (None,), "model.norm.weight"),
        lm_head=None if c.tied else Leaf((V, D), ("tp", "fsdp"), "lm_head.weight"),
    )


def param_shardings(config: ModelConfig, mesh: Mesh, setting: str = "MESH_SHAPE") -> Params:
    """A Params of NamedSharding. ValueError, naming `setting`, if an axis divides no parameter."""

    def sharding(leaf: Leaf) -> NamedSharding:
        for size, axes in zip(leaf.shape, leaf.axes, strict=True):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            if size % math.prod(mesh.shape[axis] for axis in axes):
                shape = ",".join(str(n) for n in mesh.shape.values())
                sizes = " * ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
                raise ValueError(
                    f"{setting} (dp,fsdp,tp) = {shape}: {sizes} does not divide {leaf.name} "
                    f"{list(leaf.shape)}; use a smaller {axes[-1]} and more dp"
                )
        return NamedSharding(mesh, P(*leaf.axes))

    return jax.tree.map(sharding, param_table(config))


def abstract_params(config: ModelConfig, mesh: Mesh, dtype: Any) -> Params:
    """Shapes, dtypes and shardings of the parameters on a mesh, which need not be here."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=where),
        param_table(config), param_shardings(config, mesh),
    )  # fmt: skip


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random float32 Params: normal(0, 0.02), norms one, biases zero (transformers' own rule)."""
    leaves, tree = jax.tree.flatten(param_table(config))

    def init(leaf: Leaf, leaf_key: jax.Array) -> jax.Array:
        if "norm" in leaf.name:
            return jnp.ones(leaf.shape)
        return jnp.zeros(leaf.shape) if "bias" in leaf.name else 0.02 * normal(leaf_key, leaf.shape)

    normal = jax.random.normal
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([init(leaf, k) for leaf, k in zip(leaves, keys, strict=True)])


# ---- The forward ---------------------------------------------------------------------------------


def forward(
    params: Params,
    config: ModelConfig,
    ids: jax.Array,
    positions: jax.Array,
    *,
    dtype: Any,
    prompt_mask: jax.Array | None = None,
    num_sequences: int = 1,
    prompt: tuple[KV, jax.Array] | None = None,
    cache: KV | None = None,
    cache_index: jax.Array | int = 0,
    layout: Layout | None = None,
    remat: str = "none",
    attention_impl: str = "xla",
) -> tuple[jax.Array, KV]:
    """The final hidden states of `ids`, after the last norm, and their keys and values.

    ids, positions: [G, t] int32. A row is a prompt of S tokens, then num_sequences sequences of
    equal length; each continues the prompt and does not see the others.
    prompt_mask: [G, S] bool, False hides a token (left padding). None: all is prompt and seen.
    cache: KV [L, R, N, T, h]; then ids are [R, 1], written at cache_index, and see what is before
    and their prompt: KV [L, G, N, S, h], which row r sees as row r // (R/G), and its mask [G, S].
    dtype: the compute dtype; softmax, norms and rotary angles are float32.
    remat: what the backward pass recomputes of a layer: none, dots (all but matmuls), full.
    attention_impl: xla or splash, see attention.py.
    Returns hidden [G, t, D] in dtype, and the cache, or without one the own KV [L, G, N, t, h].
    """
    assert prompt is None or cache is not None, "a prompt's keys are for sequences with a cache"
    prompt_mask = jnp.ones(ids.shape, bool) if prompt_mask is None else prompt_mask
    prompt_kv, cached_mask = prompt or (None, None)
    rotary = _rotary(config, positions)
    specs = jax.tree.map(lambda leaf: leaf.axes, param_table(config))

    def layer(carry: Any, per_layer: Any) -> tuple[Any, KV | None]:
        x, cache, i = carry
        w, prompt_kv = per_layer
        w = jax.tree.map(lambda a, axes: whole(a.astype(dtype), axes[1:], layout), w, specs.layers)
        q, k, v = _qkv(_rms_norm(x, w.attn_norm, config), w, config, rotary, layout)
        own = KV(k, v)
        if cache is None:
            out = attention(q, own, prompt_mask, num_sequences, layout, attention_impl)
        else:
            at = (i, 0, 0, cache_index, 0)
            cache = jax.tree.map(
                lambda c, u: jax.lax.dynamic_update_slice(c, u[None], at), cache, own
            )
            own = jax.tree.map(lambda c: jax.lax.dynamic_index_in_dim(c, i, keepdims=False), cache)
            seen = prompt and (prompt_kv, cached_mask)
            out = cached_attention(q, own, cache_index, seen, layout)
        x = x + constrain(constrain(out, layout, TRAIN_ROWS, None, "tp") @ w.wo, layout, TRAIN_ROWS)
        y = _rms_norm(x, w.mlp_norm, config)
        y = (jax.nn.silu(y @ w.gate) * (y @ w.up)) @ w.down
        x = x + constrain(y, layout, TRAIN_ROWS)
        return (x, cache, i + 1), (None if cache is not None else own)

    if remat != "none":
        saved = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
        layer = jax.checkpoint(layer, policy=saved[remat], prevent_cse=False)
    x = _embed(params.embed, ids, dtype, layout)
    # The cache is a carry, updated in place; as scan input and output it would be copied.
    (x, cache, _), own = jax.lax.scan(layer, (x, cache, 0), (params.layers, prompt_kv))
    return _rms_norm(x, params.final_norm, config), own if cache is None else cache


def lm_head(params: Params) -> jax.Array:
    """[V, D] output embedding."""
    return params.embed if params.lm_head is None else params.lm_head


def prefix_of(prompt_ids: jax.Array, prompt_mask: jax.Array) -> tuple[jax.Array, ...]:
    """ids, positions and mask [G, S] of a left-padded prompt [G, S+1] but for its last token."""
    mask = prompt_mask[:, :-1].astype(bool)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)  # [G, S]
    return prompt_ids[:, :-1], positions, mask


def _embed(embed: jax.Array, ids: jax.Array, dtype: Any, layout: Layout | None) -> jax.Array:
    """[R, t, D]. Where D lies over fsdp each device looks its part up for all of fsdp's rows, and
    rows are exchanged for parts: the table stays where it is, forward and backward."""
    x = embed[constrain(ids, layout, "dp")].astype(dtype)
    return constrain(constrain(x, layout, "dp", None, "fsdp"), layout, TRAIN_ROWS)


def _rms_norm(x: jax.Array, scale: jax.Array, config: ModelConfig) -> jax.Array:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.rms_norm_eps)
    return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)


def _qkv(
    y: jax.Array, w: Layers, c: ModelConfig, rotary: tuple[jax.Array, jax.Array], layout: Layout
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [R, t, H, h], rotated keys and values [R, N, t, h]."""
    R, t, _ = y.shape

    def heads(weight: jax.Array, bias: jax.Array | None, norm: jax.Array | None, count: int) -> Any:
        z = y @ weight
        z = z if bias is None else z + bias
        # First the layout the weights give, then the one attention wants: asked for the second
        # alone, the partitioner gathers the weights themselves, in every layer of every token.
        z = constrain(z, layout, TRAIN_ROWS, None, "tp").reshape(R, t, count, c.head_dim)
        if layout is not None and "tp" in layout.rows:
            z = constrain(z, layout, layout.rows)
        return z if norm is None else _rms_norm(z, norm, c)

    q = _rotate(heads(w.wq, w.bq, w.q_norm, c.num_heads), rotary)
    k = _rotate(heads(w.wk, w.bk, w.k_norm, c.num_kv_heads), rotary)
    v = heads(w.wv, w.bv, None, c.num_kv_heads)
    return q, k.swapaxes(1, 2), v.swapaxes(1, 2)


def _rotary(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [R, t, 1, h/2] float32 of the rotary angles."""
    angles = positions[:, :, None, None].astype(jnp.float32) * _inverse_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


@functools.lru_cache
def _inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """[h/2] float32. With rope_llama3, long wavelengths are slowed (Llama 3.1's scaling)."""
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inverse = config.rope_theta**-half
    if config.rope_llama3:
        factor, low, high, original = config.rope_llama3
        turns = original * inverse / (2 * np.pi)  # in the original context
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1: short wavelength, untouched
        inverse = keep * inverse + (1 - keep) * inverse / factor
    return inverse.astype(np.float32)


def _rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [R, t, heads, h] with halves (not pairs) rotated, as Hugging Face's checkpoints want it."""
    cos, sin = rotary
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
