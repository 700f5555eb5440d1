"""Qwen3.5: a reference that goes token by token through each sequence alone, in float64 numpy, and
random configs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from small_model import QWEN2, numpy_softmax

from model.families import QWEN35
from model.params import FULL, LINEAR, LinearSizes, ModelConfig, Params, Rope, Variant, lm_head

# Two periods of a linear and a full layer.
MODEL = dataclasses.replace(
    QWEN2,
    num_layers=4,
    max_positions=512,
    qkv_bias=False,
    variants=(Variant(Rope(100.0, rotated=4)),),
    period=(LINEAR, FULL),
    linear=LinearSizes(key_heads=2, value_heads=4, key_dim=6, value_dim=10, taps=4),
    **QWEN35,
)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms(x: np.ndarray, model: ModelConfig) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + model.rms_norm_eps)


def linear_layer(y: np.ndarray, w: Any, model: ModelConfig) -> np.ndarray:
    """The output of linear attention before its projection, [n, value_heads * value_dim]."""
    c, n = model.linear, len(y)
    x = np.concatenate([np.zeros((c.taps - 1, w.in_qkv.shape[1])), y @ w.in_qkv])
    x = silu(sum(x[i : i + n] * w.taps[:, 0, i] for i in range(c.taps)))
    q, k, v = np.split(x, [c.key_heads * c.key_dim, 2 * c.key_heads * c.key_dim], axis=1)
    share, v = c.value_heads // c.key_heads, v.reshape(n, c.value_heads, c.value_dim)
    q, k = (z.reshape(n, c.key_heads, c.key_dim).repeat(share, axis=1) for z in (q, k))
    q, k = (z / np.sqrt((z * z).sum(axis=-1, keepdims=True) + 1e-6) for z in (q, k))
    beta = 1 / (1 + np.exp(-y @ w.in_b))
    decay = np.exp(-np.exp(w.a_log) * np.log1p(np.exp(y @ w.in_a + w.dt_bias)))
    state, out = np.zeros((c.value_heads, c.key_dim, c.value_dim)), []
    for t in range(n):
        state = state * decay[t][:, None, None]
        new = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * new[:, None]
        out.append(np.einsum("hkv,hk->hv", state, q[t]) / np.sqrt(c.key_dim))
    return (w.out_norm * rms(np.stack(out), model)).reshape(n, -1) * silu(y @ w.in_z)


def full_layer(y: np.ndarray, w: Any, model: ModelConfig) -> np.ndarray:
    """The gated output of attention before its projection, [n, H*h]."""
    n, H, h, rope = len(y), model.num_heads, model.head_dim, model.variants[0].rope
    half = rope.rotated // 2
    angles = np.arange(n)[:, None, None] * rope.theta ** (-np.arange(half) / half)

    def rotate(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        a, b, rest = np.split(rms(x, model) * (1 + scale), [half, 2 * half], axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    q, gate = np.split((y @ w.wq).reshape(n, H, 2 * h), 2, axis=-1)
    k, v = ((y @ x).reshape(n, -1, h) for x in (w.wk, w.wv))
    k, v = (x.repeat(H // model.num_kv_heads, axis=1) for x in (rotate(k, w.k_norm), v))
    scores = np.einsum("ihd,jhd->hij", rotate(q, w.q_norm), k) / np.sqrt(h)
    scores = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
    out = np.einsum("hij,jhd->ihd", scores / scores.sum(axis=-1, keepdims=True), v)
    return (out / (1 + np.exp(-gate))).reshape(n, -1)


def reference(params: Params, ids: Sequence[int], model: ModelConfig = MODEL) -> np.ndarray:
    """[n, V] float64: the logits after each of n tokens, of a model with periods of two layers."""
    x = params.embed[list(ids)]
    for i in range(model.num_periods):
        full = jax.tree.map(lambda x, i=i: x[i], params.layers)
        for w, attend in [(full.linear[0], linear_layer), (full, full_layer)]:
            x = x + attend(rms(x, model) * (1 + w.attn_norm), w, model) @ w.wo
            y = rms(x, model) * (1 + w.mlp_norm)
            x = x + (silu(y @ w.gate) * (y @ w.up)) @ w.down
    return rms(x, model) * (1 + params.final_norm) @ lm_head(params).T


def reference_logps(params: Params, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray:
    """[n] float64: the log-probability of each of n completion tokens."""
    probs = numpy_softmax(reference(params, [*prompt, *completion[:-1]])[len(prompt) - 1 :])
    return np.log(probs[np.arange(len(completion)), list(completion)])


def random_config(seed: int, experts: bool = False) -> Any:
    """The config of transformers of a random Qwen3.5, or of one with experts."""
    import transformers

    rng = np.random.default_rng(seed)

    def pick(*values: int) -> int:
        return int(rng.choice(values))

    interval, key_heads, head_dim = pick(2, 3, 4), pick(1, 2, 3), pick(8, 16, 24)
    pairs = head_dim // 4
    sizes, make = {}, transformers.Qwen3_5TextConfig
    if experts:
        make = transformers.Qwen3_5MoeTextConfig
        names = "num_experts", "num_experts_per_tok", "moe_intermediate_size"
        values = pick(4, 6, 11), pick(2, 3, 4), pick(8, 20)
        sizes = dict(zip(names, values, strict=True), shared_expert_intermediate_size=pick(12, 24))
    return make(
        **sizes,
        vocab_size=pick(50, 97),
        hidden_size=pick(24, 40),
        intermediate_size=pick(40, 56),
        num_hidden_layers=interval * pick(1, 2),
        full_attention_interval=interval,
        num_attention_heads=4,
        num_key_value_heads=pick(1, 2, 4),
        head_dim=head_dim,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * pick(1, 2, 3),
        linear_key_head_dim=pick(4, 8, 12),
        linear_value_head_dim=pick(4, 8, 20),
        linear_conv_kernel_dim=pick(2, 4),
        # With 1e-6 the norm behind the rule would enlarge the rounding of outputs that are near 0.
        rms_norm_eps=1e-2,
        max_position_embeddings=512,
        tie_word_embeddings=bool(pick(0, 1)),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
            "mrope_interleaved": True,
        },
    )
