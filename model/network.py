"""The forward of Qwen2, Qwen3 and Qwen3.5 (text, also with experts), Llama 3, Mistral, SmolLM3,
Granite 3 (dense), Gemma 2 and 3 (text) and Phi-4-mini in its three uses: prefill, decode, training.

In all three the last token of the prompt is fed together with the completion. Prefill therefore
computes only keys and values, and the hidden state of token i predicts completion token i:

    prefill   _, kvs = forward(prompt[:, :-1])                          once per prompt
    decode    hidden, kvs = forward_token(last token, Cache(kvs, ...))  once per new token
    training  hidden, _ = forward([prompt[:-1] of some prompts,
                                   (last token, completion[:-1]) of their completions])

A training input is a row of such prompts and completions, end to end (rows.py).

The layer loop iterates over periods: a layer with full attention, in some models behind linear
layers, which have a state instead of keys and values (linear_attention.py).

Dimensions: X rows of t tokens: packed rows, or the P prompts of S tokens in prefill; B sequences in
decode, V vocabulary, D model, F feed-forward, L layers, H query heads, N kv heads, h head_dim.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model.attention import (
    ALL_POSITIONS,
    KV,
    Cache,
    PackedRows,
    attention,
    cached_attention,
    select_layer,
    write_token,
)
from model.blocks import block_attention
from model.experts import feed_forward
from model.families import ACTIVATIONS, inverse_frequencies
from model.int8 import Int8, matmul
from model.layout import TRAIN_BATCH_AXES, Layout, constrain, constrain_batch, exchange, gather_fsdp
from model.linear_attention import State, gated_norm, linear_attention, linear_attention_token
from model.params import LINEAR, Layers, Leaf, Lora, ModelConfig, Params, param_table, share_a
from model.splash import splash_attention

Rotary = tuple[jax.Array, jax.Array]  # cos and sin of the rotary angles
LogpsKernel = Callable[..., tuple[jax.Array, jax.Array]]  # called like token_logps; hashable
# The most tokens of a row whose attention is computed at once. On CPUs, where this was measured,
# blocks take up to 3 times as long for rows of 128 tokens, and less time from 256 tokens on.
SHORT_TOKENS = 224


class ComputeConfig(NamedTuple):
    """A model and how it is computed. Apart from rounding, results depend only on the model.

    It is hashable, so that jitted functions can take it as a static argument.
    """

    model: ModelConfig
    dtype: np.dtype  # of matmuls and activations; softmax, norms and rotary angles are float32
    layout: Layout
    remat: str = "none"  # what backward recomputes; full: all; dots: all but matmuls
    logps_kernel: LogpsKernel | None = None  # in place of token_logps, without a support
    attention_impl: str = "xla"  # or splash, the TPU kernel of splash.py
    layer_loop: str = "scan"  # unroll: the program has code, arrays and caches for each layer
    shares_base: bool = False  # with LoRA, the rollout reads the base of training and has no copy


# ---- The three uses ------------------------------------------------------------------------------


def split_prefix(prompt_ids: jax.Array, prompt_mask: jax.Array) -> tuple[jax.Array, ...]:
    """ids, positions and mask [P, S] for prefill, from left-padded prompts [P, S+1]: all tokens but
    the last."""
    mask = prompt_mask[:, :-1].astype(bool)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)  # [P, S]
    return prompt_ids[:, :-1], positions, mask


def forward(
    params: Params, compute: ComputeConfig, ids: jax.Array, positions: jax.Array, rows: PackedRows
) -> tuple[jax.Array, list[Any]]:
    """The final hidden states of `ids`, whose products with the lm_head are the logits, and their
    keys and values, for prefill and training.

    ids, positions: [X, t] int32. rows: which tokens see each other.
    Returns hidden [X, t, D] in compute.dtype, and the KV or the State of each layer of a period,
    those of all periods stacked like params.layers, or in a tuple.
    """
    layout, model = compute.layout, compute.model
    rotary = _rotary(model, positions)
    attend = attention if ids.shape[1] <= SHORT_TOKENS else block_attention
    attend = splash_attention if compute.attention_impl == "splash" else attend

    def layer(
        x: jax.Array, w_and_variant: tuple[LayerWeights, jax.Array | None]
    ) -> tuple[jax.Array, KV]:
        w, variant = w_and_variant
        w = _cast_and_gather(w, compute)
        q, kv, gate = _qkv(x, w, compute, _rotary_of_layer(rotary, variant))
        window = _window(model, variant)
        visible = rows if window is None else rows.with_window(positions, window)
        out = attend(q, kv, visible, layout, model.attention_softcap)
        return _output_proj_and_mlp(x, out, w, compute, gate), kv

    def linear_layer(x: jax.Array, w: LayerWeights) -> tuple[jax.Array, State]:
        attend = functools.partial(linear_attention, rows=rows, layout=layout)
        return _linear_layer(x, w, compute, attend)

    if compute.remat != "none":
        saved = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
        options = dict(policy=saved[compute.remat], prevent_cse=False)  # in a scan
        layer, linear_layer = (jax.checkpoint(f, **options) for f in (layer, linear_layer))

    def run_period(
        x: jax.Array, w_and_variant: tuple[LayerWeights, jax.Array | None]
    ) -> tuple[jax.Array, list[Any]]:
        (weights, variant), kvs = w_and_variant, []
        for kind, w in zip(model.period, weights.layers_of_period(), strict=True):
            x, kv = linear_layer(x, w) if kind == LINEAR else layer(x, (w, variant))
            kvs.append(kv)
        return x, kvs

    x = _embed(params.embed, ids, compute)  # [X*t, D]
    if isinstance(params.layers, Layers):
        weights = LayerWeights(params.layers, params.adapters)
        x, kvs = jax.lax.scan(run_period, x, (weights, _variant(model)))
    else:
        kvs_of_periods = []
        for i in range(model.num_periods):
            x, kvs = run_period(x, (_weights_of_period(params, i), _variant(model, i)))
            kvs_of_periods.append(kvs)
        kvs = [*zip(*kvs_of_periods, strict=True)]
    hidden = _rms_norm(x, params.final_norm, model) / model.logits_divisor
    return hidden.reshape(*ids.shape, -1), kvs


def forward_token(
    params: Params, compute: ComputeConfig, token: jax.Array, position: jax.Array, cache: Cache
) -> tuple[jax.Array, list[Any]]:
    """The final hidden states of one new token of each sequence, for decode.

    token, position: [B] int32. cache: the keys and values that the tokens see.
    Returns hidden [B, D], and cache.completion with the keys and values of the new tokens written
    to it.
    """
    rotary = _rotary(compute.model, position[:, None])

    def run_period(i: int | jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        (x, old), kvs, variant = carry, [], _variant(compute.model, i)
        parts = _weights_of_period(params, i).layers_of_period(), cache.prompt, old
        for kind, w, prompt, completion in zip(compute.model.period, *parts, strict=True):
            if kind == LINEAR:
                state = select_layer(completion, i)
                attend = functools.partial(linear_attention_token, state=state)
                x, state = _linear_layer(x, w, compute, attend)
                kvs.append(write_token(completion, i, state, cache.slot))
                continue
            w = _cast_and_gather(w, compute)
            q, kv, gate = _qkv(x, w, compute, _rotary_of_layer(rotary, variant))
            kvs.append(write_token(completion, i, kv, cache.slot))
            prompt, completion = select_layer(prompt, i), select_layer(kvs[-1], i)
            layer_cache = cache._replace(prompt=prompt, completion=completion)
            window, cap = _window(compute.model, variant), compute.model.attention_softcap
            out = cached_attention(q, layer_cache, compute.layout, window, cap)
            x = _output_proj_and_mlp(x, out, w, compute, gate)
        return x, kvs

    carry = _embed(params.embed, token[:, None], compute), cache.completion
    if isinstance(params.layers, Layers):
        # A loop updates its carry in place; inputs and outputs of a scan would be copied.
        carry = jax.lax.fori_loop(0, compute.model.num_periods, run_period, carry)
    else:
        for i in range(compute.model.num_periods):
            carry = run_period(i, carry)
    x, completion = carry
    hidden = _rms_norm(x, params.final_norm, compute.model) / compute.model.logits_divisor
    return hidden, completion


# ---- A layer -------------------------------------------------------------------------------------
# Activations between layers are [X*t, D]: with two dimensions the gradients of matmuls are fast on
# a CPU. In decode X is B, and t is 1.


def _embed(embed: jax.Array, ids: jax.Array, compute: ComputeConfig) -> jax.Array:
    """The embeddings [X*t, D] of ids [X, t].

    fsdp splits D of the table, so each device looks up a slice of D for the tokens of all devices
    along fsdp; an all-to-all then gives each device the complete vectors of its tokens. The table
    and its gradient never move.
    """
    layout = compute.layout
    x = embed[constrain(ids, layout, "dp")].astype(compute.dtype)  # [X, t, D]
    x = constrain(constrain(x, layout, "dp", None, "fsdp"), layout, TRAIN_BATCH_AXES)
    # bfloat16 makes 34 of Gemma's sqrt(1152) = 33.94, as when it was trained.
    x = x * jnp.asarray(compute.model.embedding_multiplier, x.dtype)
    return x.reshape(ids.size, -1)


class LayerWeights(NamedTuple):
    """The weights of a layer or of a period, or those of all periods, stacked."""

    base: Any  # Layers
    adapters: Any  # Layers with an Adapter for each adapted matrix; None: no LoRA

    def project(self, x: jax.Array, name: str, lora: Lora | None) -> jax.Array:
        """x W for the matrix W of this name, plus the product with its adapter."""
        y = matmul(x, getattr(self.base, name))
        if lora is None or getattr(self.adapters, name) is None:
            return y
        a, b = getattr(self.adapters, name)
        # With a float32 result XLA does not merge this matmul with x W. On GPUs the merge would
        # copy W and A into one matrix for every token.
        low = jnp.matmul(x, a, preferred_element_type=jnp.float32) * lora.scale
        return y + low.astype(x.dtype) @ b

    def layers_of_period(self) -> "list[LayerWeights]":
        """The linear layers of the period, and then its full-attention layer."""

        def split(layers: Any) -> list[Any]:
            return [*(layers.linear or []), dataclasses.replace(layers, linear=None)]

        base = split(self.base)
        adapters = split(self.adapters) if self.adapters else [None] * len(base)
        return [LayerWeights(*pair) for pair in zip(base, adapters, strict=True)]


def _weights_of_period(params: Params, i: int | jax.Array) -> LayerWeights:
    return LayerWeights(select_layer(params.layers, i), select_layer(params.adapters, i))


def _cast_and_gather(w: LayerWeights, compute: ComputeConfig) -> LayerWeights:
    """The weights of a layer in compute.dtype, gathered over fsdp."""
    table = param_table(compute.model)
    *linear, leaves = LayerWeights(table.layers, table.adapters).layers_of_period()
    leaves = linear[0] if w.base.wq is None else leaves  # linear layers have no wq

    def usable(leaf: Leaf, x: jax.Array | Int8) -> jax.Array | Int8:
        if isinstance(x, Int8):
            return x._replace(values=gather_fsdp(x.values, leaf.axes[1:], compute.layout))
        return gather_fsdp(x.astype(leaf.dtype(compute.dtype)), leaf.axes[1:], compute.layout)

    base, adapters = (jax.tree.map(usable, *pair) for pair in zip(leaves, w, strict=True))
    return LayerWeights(base, share_a(adapters))


def _linear_layer(
    x: jax.Array, w: LayerWeights, compute: ComputeConfig, attend: Callable[..., Any]
) -> tuple[jax.Array, State]:
    """The output [X*t, D] of a linear layer, and its State. x: its input [X*t, D]. attend:
    linear_attention of rows, or linear_attention_token of states."""
    model, layout, w = compute.model, compute.layout, _cast_and_gather(w, compute)
    y = _rms_norm(x, w.base.attn_norm, model)

    names = "in_qkv", "in_z", "in_a", "in_b"
    projected = [w.project(y, name, model.lora) for name in names]
    qkv, z, a, b = exchange(projected, layout)
    out, state = attend(qkv, a, b, w.base, model.linear)
    out = gated_norm(out, z, w.base.out_norm, model.rms_norm_eps)
    return _output_proj_and_mlp(x, out, w, compute), state


def _qkv(
    x: jax.Array, w: LayerWeights, compute: ComputeConfig, rotary: Rotary
) -> tuple[jax.Array, KV, jax.Array | None]:
    """Rotated queries [X, t, H, h], the KV, and the gate [X, t, H, h] of attention or None, of the
    input [X*t, D] of a layer."""
    model, layout, base = compute.model, compute.layout, w.base
    X, t = rotary[0].shape[:2]
    y = _rms_norm(x, base.attn_norm, model)

    def project(name: str, bias: jax.Array | None) -> jax.Array:
        z = w.project(y, name, model.lora)
        return z if bias is None else z + bias

    projected = project("wq", base.bq), project("wk", base.bk), project("wv", base.bv)
    counts = model.num_heads, model.num_kv_heads, model.num_kv_heads
    arrays = zip(exchange(projected, layout), counts, strict=True)
    (q, k, v), gate = (z.reshape(X, t, count, -1) for z, count in arrays), None
    if model.output_gate:  # it follows the queries in each head
        q, gate = jnp.split(q, 2, axis=-1)
    q = _rotate(_rms_norm(q, base.q_norm, model), rotary, model.query_multiplier)
    k = _rotate(_rms_norm(k, base.k_norm, model), rotary)
    return q, KV(k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)), gate


def _output_proj_and_mlp(
    x: jax.Array,
    out: jax.Array,
    w: LayerWeights,
    compute: ComputeConfig,
    attention_gate: jax.Array | None = None,
) -> jax.Array:
    """The output [X*t, D] of a layer. x: its input [X*t, D]. out: of its attention, [X, t, H*h].
    attention_gate: from _qkv."""
    layout, model, lora = compute.layout, compute.model, compute.model.lora

    def scaled(y: jax.Array, scale: jax.Array | None) -> jax.Array:
        y = _rms_norm(y, scale, model).astype(jnp.float32)
        # bfloat16 would make 0.2197 of Granite's 0.22.
        return (y * model.residual_multiplier).astype(x.dtype)

    if attention_gate is not None:
        gate = jax.nn.sigmoid(attention_gate.astype(jnp.float32)).astype(out.dtype)
        out = out * gate.reshape(out.shape)
    # Without the first constraint tp would split kv heads, of which there may be too few.
    out = constrain_batch(out.reshape(len(x), -1), layout)
    out = constrain(out, layout, TRAIN_BATCH_AXES, "tp")
    y = constrain(w.project(out, "wo", lora), layout, TRAIN_BATCH_AXES)
    x = x + scaled(y, w.base.attn_post_norm)
    y = _rms_norm(x, w.base.mlp_norm, model)
    if model.moe:
        y = feed_forward(y, w, compute)
    else:
        y = ACTIVATIONS[model.activation](w.project(y, "gate", lora)) * w.project(y, "up", lora)
        y = w.project(y, "down", lora)  # of [X*t, F]
    return x + scaled(constrain(y, layout, TRAIN_BATCH_AXES), w.base.mlp_post_norm)


def _rms_norm(x: jax.Array, scale: jax.Array | None, model: ModelConfig) -> jax.Array:
    if scale is None:  # the model does not have this norm
        return x
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + model.rms_norm_eps)
    if model.norm_adds_one:  # The scale is rounded first, as in the copy of the rollout.
        return (x32 * inverse * (1 + scale.astype(x.dtype).astype(jnp.float32))).astype(x.dtype)
    return (x32 * inverse).astype(x.dtype) * scale.astype(x.dtype)


# ---- Rotary angles, and variants of layers -------------------------------------------------------


def _rotary(model: ModelConfig, positions: jax.Array) -> Rotary:
    """cos and sin of positions [X, t], each [X, t, 1, h/2] float32, or [variants, X, t, 1, h/2] if
    layers differ. If only a part of h is rotated, the last dimension is smaller."""
    angles = positions[:, :, None, None].astype(jnp.float32) * inverse_frequencies(model)
    return model.rotary_scale * jnp.cos(angles), model.rotary_scale * jnp.sin(angles)


def _rotary_of_layer(rotary: Rotary, variant: jax.Array | None) -> Rotary:
    cos, sin = rotary
    return rotary if variant is None else (cos[variant], sin[variant])


def _rotate(x: jax.Array, rotary: Rotary, multiplier: float = 1.0) -> jax.Array:
    """x [X, t, heads, h] with its halves (not pairs) rotated, as Hugging Face's weights need it,
    and multiplied. If cos has fewer numbers, only the first ones of h are rotated."""
    cos, sin = rotary
    half = cos.shape[-1]
    ends = [half] if 2 * half == x.shape[-1] else [half, 2 * half]
    left, right, *rest = jnp.split(x.astype(jnp.float32), ends, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin, *rest], axis=-1)
    return (rotated * multiplier).astype(x.dtype)


def _variant(model: ModelConfig, i: int | jax.Array | slice = slice(None)) -> jax.Array | None:
    """int32, ModelConfig.layer_variants: of layer i, or [L] of all layers; None if all layers are
    alike."""
    variants = model.layer_variants
    return jnp.array(variants, jnp.int32)[i] if variants else None


def _window(model: ModelConfig, variant: jax.Array | None) -> jax.Array | None:
    """How many positions a token sees in a layer; None if no layer has a window."""
    if not model.has_windows():
        return None
    windows = jnp.array([variant.window or ALL_POSITIONS for variant in model.variants])
    return windows[0 if variant is None else variant]
