"""Small models, micro-batches of given sequences, a reference in float64 numpy, what the sampler
says, and Hugging Face folders of every family, with weights by a formula. It computes with
integers, so that no version of a library changes the weights.

`PYTHONPATH=. python tests/small_model.py` writes goldens/logits.json again; it needs torch.
"""

import dataclasses
import functools
import json
import math
import operator
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from config import Config
from data import Prompt, pad_prompts
from infra.settings import REPO
from loss import Objective, policy_loss
from loss_pallas import Kernel
from model.layout import ROLLOUT_BATCH_AXES, TRAIN_BATCH_AXES, Layout
from model.network import ComputeConfig
from model.next_token import Sampling
from model.params import Leaf, ModelConfig, Params, Rope, Variant, param_shardings, param_table
from rows import Batch, MicroBatch, RowShape, pack, prompts_of
from sampling import Completions, NaiveBackend, Stopping
from tools.bench import make_random_model

# The matrices of a layer have 16*32 + 2*16*16 + 32*16 + 3*16*24 = 2688 numbers, those of three
# layers 8064. All parameters: 48*16 + 3*(2688 + 2*16) + 16 = 8944.
MODEL = ModelConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    variants=(Variant(Rope(1e4)),),
    tied=True,
    qkv_bias=False,
    qk_norm=False,
    max_positions=64,
)


def batch_of(
    prompts: Iterable[Sequence[int]],
    completion_ids: np.ndarray,
    completion_mask: np.ndarray,
    sampling_logps: np.ndarray,
    advantages: np.ndarray,
    *others: np.ndarray | None,
    **named: np.ndarray | None,
) -> Batch:
    """A batch whose masks have no holes. prompts: their token ids. others: from old_logps on."""
    others = dict(zip(("old_logps", "ref_logps", "top_mask"), others, strict=False))
    named = without_rewards(completion_mask) | {"advantages": advantages} | named
    return Batch(
        [Prompt(ids, {}) for ids in prompts],
        completion_ids,
        completion_mask,
        lengths=completion_mask.sum(axis=1),
        sampling_logps=sampling_logps,
        **others | named,
    )


def without_rewards(mask: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a Batch that an update does not read. mask: [B, T]."""
    arrays = {"sampled_mask": mask, "stopped": mask.any(axis=1), "rewards": np.zeros(len(mask))}
    return arrays | {"function_rewards": np.zeros((len(mask), 1))}


def in_rows(
    batch: Batch, share: int, sequences: Iterable[int] | None = None, S: int = 0
) -> MicroBatch:
    """A micro-batch with sequences of the batch in their order, so many in each row; then R is
    their number. sequences: None means all. S: places for prompts; 0: as needed.
    """
    chosen = list(range(len(batch.completion_ids)) if sequences is None else sequences)
    rows = [chosen[i : i + share] for i in range(0, len(chosen), share)]
    lengths = [len(prompt.ids) - 1 for prompt in batch.prompts]
    S = S or max(sum(lengths[p] for p in prompts_of(batch, row)) for row in rows)
    T = batch.completion_ids.shape[1]
    return pack(batch, rows, RowShape(S, share * T, share), pad_id=0)


def counts_by_hand(num_tokens: int, num_sequences: int, num_top_tokens: int) -> dict[str, Any]:
    """What policy_loss divides by."""
    counts = {"num_tokens": num_tokens, "num_sequences": num_sequences}
    counts |= {"num_top_tokens": num_top_tokens}
    return {name: np.float32(count) for name, count in counts.items()}


def choices_of(name: str) -> list[str]:
    """The texts that a setting may have. name: that of the field in Config."""
    return Config.__dataclass_fields__[name].metadata["choices"].split("|")


# ---- A model whose distributions depend on every token, in float64 numpy and on devices ----------

QWEN2 = dataclasses.replace(
    MODEL,
    vocab_size=40,
    rms_norm_eps=1e-5,
    variants=(Variant(Rope(100.0)),),
    tied=False,
    qkv_bias=True,
)


@functools.cache
def weights() -> Params:
    """Float64 numpy parameters whose distributions have about 2 nats and depend on every token."""
    rng = np.random.default_rng(0)

    def draw(leaf: Leaf) -> np.ndarray:
        scales = {"norm": 0.2, "bias": 0.3, "embed": 1.0, "lm_head": 0.4}
        known = [scale for word, scale in scales.items() if word in leaf.name]
        scale = known[0] if known else leaf.shape[1] ** -0.5
        return scale * rng.normal(size=leaf.shape) + ("norm" in leaf.name)

    return jax.tree.map(draw, param_table(QWEN2))


def numpy_logits(params: Params, ids: Sequence[int], c: ModelConfig = QWEN2) -> np.ndarray:
    """[n, V] float64: the logits after each of n tokens, by a Qwen2."""
    n = len(ids)
    theta, h = c.variants[0].rope.theta, c.head_dim
    angles = np.arange(n)[:, None] * theta ** (-np.arange(0, h, 2) / h)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + c.rms_norm_eps) * scale

    def heads(x: np.ndarray, count: int, rotated: bool = True) -> np.ndarray:
        x = x.reshape(n, count, c.head_dim)
        a, b = np.split(x, 2, axis=-1)
        turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return (turned if rotated else x).repeat(c.num_heads // count, axis=1)  # [n, H, h]

    x = params.embed[ids]
    for i in range(c.num_layers):
        w = jax.tree.map(operator.itemgetter(i), params.layers)
        y = norm(x, w.attn_norm)
        q, k = heads(y @ w.wq + w.bq, c.num_heads), heads(y @ w.wk + w.bk, c.num_kv_heads)
        v = heads(y @ w.wv + w.bv, c.num_kv_heads, rotated=False)
        scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(c.head_dim)
        scores = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
        attention = scores / scores.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", attention, v).reshape(n, -1) @ w.wo
        y = norm(x, w.mlp_norm)
        gate = y @ w.gate
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w.up)) @ w.down
    return norm(x, params.final_norm) @ (params.embed if c.tied else params.lm_head).T


def numpy_softmax(logits: np.ndarray) -> np.ndarray:
    unnormalised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return unnormalised / unnormalised.sum(axis=-1, keepdims=True)


def train_layout(*shape: int) -> Layout:
    """The layout of training on a mesh of this shape."""
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Layout(Mesh(devices, ("dp", "fsdp", "tp")), TRAIN_BATCH_AXES)


def laid_out(mesh: Mesh, params: Params | None = None) -> Params:
    """A new float32 copy, because optimizer_step takes over the buffers that it is given."""
    params = jax.tree.map(np.float32, params or weights())
    return jax.device_put(params, param_shardings(QWEN2, mesh))


def assert_close(a: Params, b: Params, atol: float) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=atol), a, b)


def shardings(tree: Any) -> list:
    return [(x.sharding, x.ndim) for x in jax.tree.leaves(tree)]


def same_shardings(a: list, b: list) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x.is_equivalent_to(y, ndim) for (x, ndim), (y, _) in pairs)


# ---- What the sampler says -----------------------------------------------------------------------

PAD = 39  # this is also an ordinary token of QWEN2: it may be drawn and does not stop
NEVER = -1  # a stop id that no token has
PROMPTS = [[5, 11, 2], [7, 7, 30, 1, 19, 8, 24]]


def numpy_filter(probs: np.ndarray, sampling: Sampling) -> np.ndarray:
    """probs [V], 0 for the tokens that the filters drop; the others are scaled to sum to 1."""
    ranked = list(np.argsort(-probs))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total, mass, kept = probs[ranked].sum(), 0.0, []
    for token in ranked:
        if mass < sampling.top_p * total:
            kept.append(token)
        mass += probs[token]
    kept = [token for token in kept if probs[token] >= sampling.min_p * probs.max()]
    filtered = np.zeros_like(probs)
    filtered[kept] = probs[kept] / probs[kept].sum()
    return filtered


def assert_drawn_from(tokens: np.ndarray, probs: np.ndarray) -> None:
    """Pearson's chi-square is within 5 standard deviations; no token of probability 0 is drawn."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert len(counts) == len(probs), f"index {len(counts) - 1} of {len(probs)}"
    possible = probs > 0
    assert counts[~possible].sum() == 0
    expected = len(tokens) * probs[possible]
    chi_square, freedom = ((counts[possible] - expected) ** 2 / expected).sum(), possible.sum() - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom), (chi_square, freedom)


def layout(*shape: int) -> Layout:
    """The layout of sampling on a mesh of this shape."""
    return train_layout(*shape)._replace(batch_axes=ROLLOUT_BATCH_AXES)


def sample(
    sampling: Sampling = Sampling(0.7),  # noqa: B008 - it does not change
    prompts: list[list[int]] = PROMPTS,
    K: int = 8,
    *,
    T: int = 12,
    sequence_ids: range | None = None,
    key: int = 0,
    stop_ids: tuple[int, ...] = (NEVER,),
    mesh: tuple[int, int, int] = (1, 1, 1),
    params: Params | None = None,
    layer_loop: str = "scan",
    drop: bool = False,
) -> Completions:
    """What QWEN2 with these weights says to the prompts."""
    compute = ComputeConfig(QWEN2, jnp.dtype("float32"), layout(*mesh), layer_loop=layer_loop)
    backend = NaiveBackend(compute, Stopping(T, stop_ids, PAD), drop)
    backend.update_weights(jax.tree.map(np.float32, params or weights()))
    ids = np.array(sequence_ids or range(len(prompts) * K), np.int32)
    return backend.generate(*pad_prompts(prompts, 11, PAD), ids, jax.random.key(key), sampling)


def assert_same_completions(a: Completions, b: Completions) -> None:
    assert a.completion_ids.tolist() == b.completion_ids.tolist()
    assert a.sampled_mask.tolist() == b.sampled_mask.tolist()
    np.testing.assert_allclose(a.sampling_logps, b.sampling_logps, atol=1e-5)


# ---- Log-probabilities of tokens -----------------------------------------------------------------

KERNELS = {"jax": None, "pallas": Kernel("cpu", interpret=True)}


def token_inputs(*lead: int, V: int, D: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """hidden [*lead, D], lm_head [V, D] and ids [*lead]."""
    rng = np.random.default_rng(V)
    hidden, lm_head = rng.normal(size=(*lead, D)), rng.normal(size=(V, D))
    return np.float32(hidden), np.float32(lm_head), rng.integers(0, V, lead).astype(np.int32)


# ---- Folders -------------------------------------------------------------------------------------


# The changes of tiny/config.json that make a Qwen3.5 of a linear and a full layer.
TINY_QWEN35 = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
# Those that make of it one whose routers choose two of eight experts.
TINY_EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def stopping_model(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """Makes a model that ends a completion at each token with probability 1/32 or so. changes: of
    tiny/config.json."""
    small = folder / "small"
    changes = {"hidden_size": 32, "num_hidden_layers": 1} | (changes or {})
    make_random_model(REPO / "tiny", small, changes)
    stop_ids = list(range(0, json.loads((small / "config.json").read_text())["vocab_size"], 32))
    (small / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
    return small


# ---- Folders of every family ---------------------------------------------------------------------

GOLDENS = Path(__file__).parent / "goldens" / "logits.json"
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def family(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """A config.json as written before transformers 5."""
    of_family = {"model_type": model_type, "architectures": [f"{architecture}ForCausalLM"]}
    return {**SIZES, **of_family, "tie_word_embeddings": False, **changes}


FAMILIES = {
    "qwen2": family("qwen2", "Qwen2", rope_theta=700.0),
    "qwen2_tied": family("qwen2", "Qwen2", rope_theta=300.0, tie_word_embeddings=True),
    # Its head_dim 12 is not 32/4.
    "qwen3": family("qwen3", "Qwen3", head_dim=12, rope_theta=200.0),
    # Of its four frequencies one is kept, one is blended and two are slowed by 8.
    "llama3": family("llama", "Llama", rope_theta=100.0, rope_scaling=LLAMA3),
    # Its first layer is local, its second one global. Its scores are divided by sqrt(20).
    "gemma3": family(
        "gemma3_text",
        "Gemma3",
        head_dim=12,
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=20,
        rope_theta=5000.0,
        rope_local_base_freq=50.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=16,
        sliding_window_pattern=2,
        tie_word_embeddings=True,
    ),
    # Its even layers are local. transformers does not read its hidden_act.
    "gemma2": family(
        "gemma2",
        "Gemma2",
        head_dim=12,
        hidden_act="gelu",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=20,
        rope_theta=450.0,
        sliding_window=16,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
    ),
    "mistral": family("mistral", "Mistral", rope_theta=150.0, sliding_window=None),
    # Its second layer has no rotary angles.
    "smollm3": family(
        "smollm3",
        "SmolLM3",
        rope_theta=250.0,
        no_rope_layers=[1, 0],
        pad_token_id=None,
        tie_word_embeddings=True,
    ),
    # Attention would divide by sqrt(8) = 2.83, and this is a division by 5.
    "granite": family(
        "granite",
        "Granite",
        rope_theta=350.0,
        embedding_multiplier=1.5,
        attention_multiplier=0.2,
        residual_multiplier=0.22,
        logits_scaling=0.75,
    ),
    # Fused projections. It rotates 6 of the 8 numbers of a head; its short factors slow these down.
    "phi3": family(
        "phi3",
        "Phi3",
        rope_theta=550.0,
        partial_rotary_factor=0.75,
        rope_scaling={"type": "longrope", "short_factor": [1, 1.5, 2], "long_factor": [9] * 3},
        original_max_position_embeddings=128,
        pad_token_id=None,
        tie_word_embeddings=True,
    ),
    # A linear layer with two value heads for each key head, then a full one, which rotates 6 of the
    # 12 numbers of a head.
    "qwen3_5": family(
        "qwen3_5_text",
        "Qwen3_5",
        full_attention_interval=2,
        head_dim=12,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 400.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 1],
            "mrope_interleaved": True,
        },
    ),
}

OF_EXPERTS = {"moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 3}
# A tensor for each expert; intermediate_size is not used.
FAMILIES["qwen3_moe"] = (
    FAMILIES["qwen3"]
    | OF_EXPERTS
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
)
# Tensors of all experts, and an expert of 16 numbers for all tokens.
FAMILIES["qwen3_5_moe"] = (
    FAMILIES["qwen3_5"]
    | OF_EXPERTS
    | {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "shared_expert_intermediate_size": 16,
    }
)
del FAMILIES["qwen3_5_moe"]["intermediate_size"]

# Two inputs; the second is left-padded. The golden logits are those of 12 tokens at PLACES.
LENGTH, PADDING = 80, 23
IDS = (np.arange(2 * LENGTH) ** 2 // 3 % 48).reshape(2, LENGTH).astype(np.int32)
MASK = np.arange(LENGTH) >= np.array([[0], [PADDING]])
POSITIONS = np.maximum(np.arange(LENGTH) - np.array([[0], [PADDING]]), 0).astype(np.int32)
PLACES = (np.array([0, 0, 1, 1]), np.array([40, 79, 40, 79]))  # inputs, tokens


def tensor_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint, under transformers' names."""
    D, V = c["hidden_size"], c["vocab_size"]
    F = c.get("shared_expert_intermediate_size") or c["intermediate_size"]
    h = c.get("head_dim", D // c["num_attention_heads"])
    q, kv = c["num_attention_heads"] * h, c["num_key_value_heads"] * h
    layer = {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (q, D),
        "self_attn.k_proj.weight": (kv, D),
        "self_attn.v_proj.weight": (kv, D),
        "self_attn.o_proj.weight": (D, q),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
    if c["model_type"] == "qwen2":
        layer |= {f"self_attn.{n}_proj.bias": (s,) for n, s in (("q", q), ("k", kv), ("v", kv))}
    if c["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
        layer |= {"self_attn.q_norm.weight": (h,), "self_attn.k_norm.weight": (h,)}
    if c["model_type"] in ("gemma2", "gemma3_text"):
        layer |= {f"{place}_feedforward_layernorm.weight": (D,) for place in ("pre", "post")}
    if c["model_type"] == "phi3":
        fused = {"self_attn.qkv_proj.weight": (q + 2 * kv, D)}
        fused |= {"mlp.gate_up_proj.weight": (2 * F, D)}
        parts = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        others = {name: shape for name, shape in layer.items() if name.split(".")[-2] not in parts}
        layer = others | fused
    if "num_experts" in c:
        layer = with_experts(c, layer)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    layers = [layer] * c["num_hidden_layers"]
    if "linear_key_head_dim" in c:
        norms = {"self_attn.q_norm.weight": (h,), "self_attn.k_norm.weight": (h,)}
        full = layer | norms | {"self_attn.q_proj.weight": (2 * q, D)}
        layers = [linear_layer_shapes(c, layer), full]
    for i, layer in enumerate(layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes if c["tie_word_embeddings"] else {**shapes, "lm_head.weight": (V, D)}


def with_experts(
    c: dict[str, Any], layer: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer with experts in place of its feed-forward, in the family's layout."""
    D, E, F = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    dense = {name: shape for name, shape in layer.items() if name.startswith("mlp.")}
    layer = {name: shape for name, shape in layer.items() if name not in dense}
    layer["mlp.gate.weight"] = (E, D)
    if "shared_expert_intermediate_size" in c:
        layer |= {name.replace("mlp", "mlp.shared_expert"): dense[name] for name in dense}
        layer["mlp.shared_expert_gate.weight"] = (1, D)
        return layer | {
            "mlp.experts.gate_up_proj": (E, 2 * F, D),
            "mlp.experts.down_proj": (E, D, F),
        }
    for e in range(E):
        expert = {"gate": (F, D), "up": (F, D), "down": (D, F)}
        layer |= {f"mlp.experts.{e}.{name}_proj.weight": expert[name] for name in expert}
    return layer


def linear_layer_shapes(
    c: dict[str, Any], layer: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The tensors of a linear layer of Qwen3.5. layer: those of a layer with self-attention."""
    D, heads = c["hidden_size"], c["linear_num_value_heads"]
    width = heads * c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + width
    linear = {
        "in_proj_qkv.weight": (channels, D),
        "in_proj_z.weight": (width, D),
        "in_proj_b.weight": (heads, D),
        "in_proj_a.weight": (heads, D),
        "conv1d.weight": (channels, 1, 4),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (c["linear_value_head_dim"],),
        "out_proj.weight": (D, width),
    }
    others = {name: shape for name, shape in layer.items() if "self_attn" not in name}
    return others | {f"linear_attn.{name}": shape for name, shape in linear.items()}


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [-0.5, 0.5): hashes of the name and the index."""
    n = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()))
    for _ in range(2):
        n = (n ^ (n >> np.uint64(16))) * np.uint64(0x45D9F3B) & np.uint64(0xFFFFFFFF)
    return ((n ^ (n >> np.uint64(16))) / 2**32 - 0.5).reshape(shape)


def tensors(c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Name -> float32 array: norms that multiply by 0.5 to 1.5, biases -1 to 1, matrices that keep
    the variance."""
    made = {}
    for name, shape in tensor_shapes(c).items():
        x = uniform(name, shape)
        if "norm" in name:
            adds_one = c["model_type"].startswith(("gemma", "qwen3_5"))
            made[name] = x if adds_one and "linear_attn" not in name else 1 + x
        elif "bias" in name:
            made[name] = 2 * x
        else:
            made[name] = x * math.sqrt(12 / shape[-1]) * (4 if "q_proj" in name else 1)
    return {name: x.astype(np.float32) for name, x in made.items()}


def write_config(folder: Path, c: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(c))


def write_folder(folder: Path, family: str) -> Path:
    """Writes a folder of the family that is complete except for a tokenizer; returns it."""
    write_config(folder, FAMILIES[family])
    save_file(tensors(FAMILIES[family]), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# The chat templates of Gemma 2 and 3, with the tags of the tokenizer in tiny/. The first refuses a
# system message, the second writes it before the first question. Both refuse two messages of one
# role after each other, and all roles but these.
GEMMA_TURNS = """{% for message in loop_messages -%}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<|im_start|>' + role + '\n' + (first_user_prefix if loop.first else '') -}}
{{ message['content'] | trim }}{{ '<|im_end|>\n' }}
{%- endfor -%}
{% if add_generation_prompt -%}{{ '<|im_start|>model\n' }}{%- endif -%}
"""
GEMMA_TEMPLATES = {
    "gemma2": """{% if messages[0]['role'] == 'system' -%}
{{ raise_exception('System role not supported') }}{%- endif -%}
{% set loop_messages = messages -%}{% set first_user_prefix = '' -%}
""",
    "gemma3": """{% if messages[0]['role'] == 'system' -%}
{% set first_user_prefix = messages[0]['content'] + '\n\n' -%}
{% set loop_messages = messages[1:] -%}
{% else -%}{% set first_user_prefix = '' -%}{% set loop_messages = messages -%}{%- endif -%}
""",
}
GEMMA_TEMPLATES = {family: text + GEMMA_TURNS for family, text in GEMMA_TEMPLATES.items()}


def copy_tiny(folder: Path, **changes: dict[str, object]) -> Path:
    """A copy of tiny/ with these changes of its config.json and tokenizer_config.json."""
    shutil.copytree(REPO / "tiny", folder, ignore=shutil.ignore_patterns("*.jsonl"))
    for name, changed in changes.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return folder


def write_folder_with_tokenizer(folder: Path, family: str, **changes: Any) -> Path:
    """A folder of the family, with these changes, and with the tokenizer in tiny/."""
    config = FAMILIES[family] | {"vocab_size": 576} | changes
    write_config(copy_tiny(folder), config)
    save_file(tensors(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_gemma(folder: Path, family: str) -> Path:
    """As the last one, with the chat template of the family."""
    write_folder_with_tokenizer(folder, family)
    (folder / "chat_template.jinja").write_text(GEMMA_TEMPLATES[family])
    return folder


def write_gemma_with_images(folder: Path) -> Path:
    """Writes a Gemma 3 that also sees images, with random weights, by transformers; returns it."""
    import torch
    import transformers

    write_config(folder, FAMILIES["gemma3"])
    text = transformers.AutoConfig.from_pretrained(folder).to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    vision |= {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    sizes = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    config = transformers.Gemma3Config(**sizes, image_token_index=48)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for x in model.parameters():
            x.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def transformers_logits(folder: Path) -> np.ndarray:
    """[2, LENGTH, V] float32 logits of IDS, computed by transformers' torch model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(IDS, dtype=torch.long),
            attention_mask=torch.tensor(MASK, dtype=torch.long),
            position_ids=torch.tensor(POSITIONS, dtype=torch.long),
        )
    return out.logits.numpy()


def write_goldens() -> None:
    """Writes goldens/logits.json again, with transformers' torch model."""
    lines = []
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            logits = transformers_logits(write_folder(Path(folder), name))
        golden = logits[PLACES][:, :12].astype(np.float64).round(6)
        lines.append(f'"{name}": {json.dumps(golden.tolist())}')
    GOLDENS.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    write_goldens()


def value_and_grad(
    logps: Any, old: Any, advantages: Any, mask: Any, num_tokens: float, **others: Any
) -> tuple[float, np.ndarray, dict[str, float]]:
    """The loss, its gradient [R, T] and its metrics; lists count as float32 arrays."""
    inputs = [jnp.asarray(x, jnp.float32) for x in (old, advantages)]
    settings = {name: others.pop(name) for name in Objective._fields if name in others}
    keywords = {name: jnp.float32(x) if np.ndim(x) else x for name, x in others.items()}
    keywords["objective"] = Objective(**settings)

    def loss(logps: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return policy_loss(logps, *inputs, jnp.asarray(mask), num_tokens, **keywords)

    (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(jnp.float32(logps))
    assert value.shape == () and float(metrics.pop("loss")) == float(value)
    return float(value), np.asarray(grad), {name: float(x) for name, x in metrics.items()}
