"""What each family of models is: the reader of its config.json, which sets the fields of a
ModelConfig, the names of its tensors, and its formulas. A new family is an entry of FAMILIES.

Dimensions: D model, L layers, h head_dim.
"""

import copy
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from infra.mistakes import UserMistake, reading
from model.params import FULL, LINEAR, LinearSizes, ModelConfig, Moe, Rope, Variant

LOCAL = "sliding_attention"  # a type of layers, as FULL and LINEAR are
# model_type of a model that also sees images -> the architecture of its text part
TEXT_PARTS = {"gemma3": "Gemma3ForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM"}
TEXT_PARTS |= {"qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
OPENED_WITH_TOWER = ("gemma3",)  # those that transformers opens with their vision tower
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # null: none
# Keys of config.json with the only value that is supported, which is also the default.
SUPPORTED_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",  # of Gemma
    "use_sliding_window": False,
    "mlp_bias": False,
    "attention_bias": False,
    **dict.fromkeys(SOFTCAPS),
    "use_bidirectional_attention": False,
    "attn_output_gate": True,  # of Qwen3.5
    "decoder_sparse_step": 1,  # of Qwen3 with experts
    "mlp_only_layers": [],
}
# Keys that a config.json must have, although transformers has defaults.
SIZES = ["hidden_size", "intermediate_size", "num_hidden_layers"]
REQUIRED = [*SIZES, "vocab_size", "num_attention_heads", "rms_norm_eps", "max_position_embeddings"]
# What a model with experts must have in place of intermediate_size.
REQUIRED_WITH_EXPERTS = [name for name in REQUIRED if name != "intermediate_size"]
REQUIRED_WITH_EXPERTS += ["moe_intermediate_size", "num_experts_per_tok"]
Require = Callable[[bool, str, str], None]  # that of parse_config


def read_config(folder: Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder, as parse_config reads its config.json."""
    raise_if_without(folder, "config.json", "give a Hugging Face folder")
    return parse_config(folder / "config.json", read_json(folder / "config.json"))


def parse_config(path: Path, file_values: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the values of a config.json; transformers fills in what they leave out.

    path: for messages. Raises UserMistake, naming the key, for a model that is not supported.
    """
    # transformers writes null where a model does not have something.
    values = _without_nulls(text_values(file_values))
    if quantized := file_values.get("quantization_config") or values.get("quantization_config"):
        # Early versions of bitsandbytes did not write their name.
        method = quantized.get("quant_method", "bitsandbytes")
        raise UserMistake(f"{path}: weights in {method} format are not read; use unquantized ones")

    def require(ok: bool, key: str, supported: str) -> None:
        if not ok:
            raise UserMistake(f"{path}: {key}={values.get(key)!r} is not supported; {supported} is")

    model_types = ", ".join([*FAMILIES, *TEXT_PARTS])
    require(values.get("model_type") in FAMILIES, "model_type", model_types)
    family = FAMILIES[values["model_type"]]
    for key, value in SUPPORTED_VALUES.items():
        if key not in family.unchecked_keys:
            require(values.get(key, value) == value, key, json.dumps(value).strip('"'))
    for key in family.required:
        if values.get(key) is None:
            raise UserMistake(f"{path} has no {key!r}")
    # transformers would warn that PyTorch is missing, which this project does not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoConfig  # a second

    with reading(f"{path} cannot be read"):
        # Without the folder none of its code can run. transformers changes the values that it gets.
        config = AutoConfig.for_model(**copy.deepcopy(values))
    # transformers 5 writes rope_parameters, and earlier versions wrote rope_scaling.
    key = "rope_scaling" if "rope_scaling" in values else "rope_parameters"
    rope = config.rope_parameters.get(FULL, config.rope_parameters)
    supported = "default", *family.scaled_rope
    require(rope["rope_type"] in supported, key, f"rope_type {' or '.join(supported)}")
    original = "original_max_position_embeddings"  # transformers would guess it
    if rope["rope_type"] == "llama3" and original not in values[key]:
        raise UserMistake(f"{path}: {key} has no {original!r}")
    head_dim = getattr(config, "head_dim", None)  # some files leave it out
    model = ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "moe_intermediate_size", 0) or config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        variants=(Variant(_rope(rope)),),
        tied=config.tie_word_embeddings,
        max_positions=config.max_position_embeddings,
        sees_images=file_values["model_type"] in OPENED_WITH_TOWER,
        **family.fields,
    )
    return dataclasses.replace(model, **family.read(config, model, require))


# ---- The families --------------------------------------------------------------------------------
# Each function returns fields of the ModelConfig that follow from transformers' config. model: what
# is known before, with the variant of its layers with full attention.


def _mistral(config: Any, model: ModelConfig, require: Require) -> dict[str, Any]:
    # Within its sliding window a token sees all others.
    return {"max_positions": min(model.max_positions, config.sliding_window or math.inf)}


def _phi3(config: Any, model: ModelConfig, require: Require) -> dict[str, Any]:
    """Beyond the original positions longrope has other angles for all tokens of a sequence."""
    rope, scale, positions = config.rope_parameters, 1.0, model.max_positions
    if rope["rope_type"] == "longrope":
        original = rope.get("original_max_position_embeddings", 0)
        original = original or config.original_max_position_embeddings
        factor = max(rope.get("factor") or positions / original, 1.0)
        scale = math.sqrt(1 + math.log(factor) / math.log(original))
        scale, positions = rope.get("attention_factor") or scale, min(original, positions)
    rotated = int(model.head_dim * rope["partial_rotary_factor"])
    return {
        "variants": (Variant(_rope(rope)._replace(rotated=rotated)),),
        "rotary_scale": scale,
        "max_positions": min(positions, config.sliding_window or math.inf),
    }


def _smollm3(config: Any, model: ModelConfig, require: Require) -> dict[str, Any]:
    layer_variants = tuple(int(not x) for x in config.no_rope_layers[: model.num_layers])
    return {"variants": (*model.variants, Variant(None)), "layer_variants": layer_variants}


def _granite(config: Any, model: ModelConfig, require: Require) -> dict[str, Any]:
    return {
        "embedding_multiplier": config.embedding_multiplier,
        "query_multiplier": config.attention_multiplier * math.sqrt(model.head_dim),
        "residual_multiplier": config.residual_multiplier,
        "logits_divisor": config.logits_scaling,
    }


def _gemma(config: Any, model: ModelConfig, require: Require) -> dict[str, Any]:
    """Local layers have a sliding window, and in Gemma 3 a rope of their own; the others are
    global. Only Gemma 2 has softcaps."""
    rope = config.rope_parameters.get(LOCAL, config.rope_parameters)
    require(rope["rope_type"] == "default", "rope_parameters", f"rope_type default for {LOCAL}")
    require({*config.layer_types} <= {LOCAL, FULL}, "layer_types", f"{LOCAL} or {FULL}")
    return {
        "variants": (*model.variants, Variant(_rope(rope), config.sliding_window)),
        "layer_variants": tuple(int(kind == LOCAL) for kind in config.layer_types),
        "embedding_multiplier": math.sqrt(model.hidden_size),
        "query_multiplier": math.sqrt(model.head_dim / config.query_pre_attn_scalar),
        "attention_softcap": config.attn_logit_softcapping or 0.0,
        "logits_softcap": config.final_logit_softcapping or 0.0,
    }


def _qwen35(config: Any, model: ModelConfig, require: Require) -> dict[str, Any]:
    """A period is linear layers, and then a layer with full attention."""
    is_silu = getattr(config, "output_gate_type", "silu") in ("silu", "swish")
    require(is_silu, "output_gate_type", "silu")
    period = [*[LINEAR] * [*config.layer_types, FULL].index(FULL), FULL]
    supported = f"one number of {LINEAR} layers before each {FULL} layer"
    layer_types = period * (model.num_layers // len(period))
    require(config.layer_types == layer_types, "layer_types", supported)
    rotated = model.head_dim * config.rope_parameters.get("partial_rotary_factor", 0.25)
    keys = "num_key_heads num_value_heads key_head_dim value_head_dim conv_kernel_dim".split()
    linear = LinearSizes(*(getattr(config, f"linear_{key}") for key in keys))
    rope = _rope(config.rope_parameters)._replace(rotated=int(rotated))
    return {"variants": (Variant(rope),), "period": tuple(period), "linear": linear}


def _qwen3_moe(config: Any, model: ModelConfig, require: Require) -> dict[str, Any]:
    return {"moe": _moe(config, require, normed=config.norm_topk_prob)}


def _qwen35_moe(config: Any, model: ModelConfig, require: Require) -> dict[str, Any]:
    moe = _moe(config, require, normed=True)._replace(
        shared_width=config.shared_expert_intermediate_size
    )
    return _qwen35(config, model, require) | {"moe": moe}


def _moe(config: Any, require: Require, normed: bool) -> Moe:
    experts, top_k = config.num_experts, config.num_experts_per_tok
    require(0 < top_k <= experts, "num_experts_per_tok", f"1 to {experts} (num_experts)")
    return Moe(experts, top_k, normed)


GEMMA_NAMES = (
    ("attn_post_norm", "post_attention_layernorm.weight"),
    ("mlp_norm", "pre_feedforward_layernorm.weight"),
    ("mlp_post_norm", "post_feedforward_layernorm.weight"),
)
PHI3_NAMES = (
    *((f"w{x}", "self_attn.qkv_proj.weight") for x in "qkv"),
    *((x, "mlp.gate_up_proj.weight") for x in ("gate", "up")),
)
FUSED_EXPERTS = (
    *((x, "mlp.experts.gate_up_proj") for x in ("gate", "up")),
    ("down", "mlp.experts.down_proj"),
)
GEMMA = {"norm_adds_one": True, "post_norms": True, "activation": "gelu", "names": GEMMA_NAMES}
QWEN35 = {"norm_adds_one": True, "qk_norm": True, "output_gate": True}


class Family(NamedTuple):
    """How a family differs from Llama."""

    fields: dict[str, Any] = {}  # of its ModelConfig
    read: Callable[[Any, ModelConfig, Require], dict[str, Any]] = lambda *_: {}  # further fields
    required: list[str] = REQUIRED
    unchecked_keys: tuple[str, ...] = ()  # of SUPPORTED_VALUES
    scaled_rope: tuple[str, ...] = ("llama3",)  # types of rope, in addition to default


FAMILIES = {  # by model_type
    # Qwen2 always has the three biases. Every release of Qwen3 and Llama has false in this key.
    "qwen2": Family({"qkv_bias": True}, unchecked_keys=("attention_bias",)),
    "qwen3": Family({"qk_norm": True}),
    "llama": Family(),
    "mistral": Family(read=_mistral),
    "smollm3": Family(read=_smollm3),
    "granite": Family(read=_granite),
    "phi3": Family({"names": PHI3_NAMES}, _phi3, scaled_rope=("longrope",)),
    "gemma2": Family(GEMMA, _gemma, [*REQUIRED, "sliding_window"], ("hidden_act", *SOFTCAPS), ()),
    # Its large models leave out the other keys.
    "gemma3_text": Family(
        {"qk_norm": True, **GEMMA}, _gemma, [*SIZES, "sliding_window"], scaled_rope=("linear",)
    ),
    "qwen3_5_text": Family(QWEN35, _qwen35, scaled_rope=()),
    # transformers' default of norm_topk_prob is not that of any release.
    "qwen3_moe": Family({"qk_norm": True}, _qwen3_moe, [*REQUIRED_WITH_EXPERTS, "norm_topk_prob"]),
    "qwen3_5_moe_text": Family(
        QWEN35 | {"names": FUSED_EXPERTS},
        _qwen35_moe,
        [*REQUIRED_WITH_EXPERTS, "num_experts", "shared_expert_intermediate_size"],
        scaled_rope=(),
    ),
}


# ---- Formulas ------------------------------------------------------------------------------------


def _rope(rope: dict[str, Any]) -> Rope:
    """The Rope of transformers' parameters."""
    theta = float(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        return Rope(theta, factor=float(rope["factor"]))
    if rope["rope_type"] == "longrope":  # its long factors are for positions that are refused
        return Rope(theta, factor=tuple(map(float, rope["short_factor"])))
    if rope["rope_type"] == "llama3":
        names = "factor", "low_freq_factor", "high_freq_factor"
        factor, low, high = (float(rope[name]) for name in names)
        original = int(rope["original_max_position_embeddings"])
        return Rope(theta, llama3=(factor, low, high, original))
    return Rope(theta)


@functools.lru_cache
def inverse_frequencies(model: ModelConfig) -> np.ndarray:
    """[h/2] float32 radians per position, fewer if only a part of h is rotated; of several variants
    of layers [variants, 1, 1, 1, h/2]."""
    tables = [_frequencies(variant.rope, model.head_dim) for variant in model.variants]
    if len(tables) == 1:
        return tables[0].astype(np.float32)
    return np.stack(tables)[:, None, None, None].astype(np.float32)


def _frequencies(rope: Rope | None, h: int) -> np.ndarray:
    if rope is None:  # cos is 1 and sin is 0, which leaves queries and keys as they are
        return np.zeros(h // 2)
    rotated = rope.rotated or h
    inverse = rope.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    inverse = inverse / rope.factor
    if rope.llama3:
        factor, low, high, original = rope.llama3
        turns = original * inverse / (2 * np.pi)  # full turns within the original context
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1 leaves a wavelength as it is
        inverse = keep * inverse + (1 - keep) * inverse / factor
    return inverse


def _gelu(x: jax.Array) -> jax.Array:
    # In bfloat16 the 1 + tanh of GELU would have few digits where x is negative.
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu": _gelu}


# ---- Files ---------------------------------------------------------------------------------------


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """The values that are not null, also of dictionaries within them. In Mistral and Gemma 2 null
    turns off the sliding window and the softcaps that transformers would fill in."""
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None or key in ("sliding_window", *SOFTCAPS)
    }


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a config.json; of a model that also sees images, those of its language model,
    which transformers can open."""
    if values.get("model_type") not in TEXT_PARTS:
        return values
    architecture = {"architectures": [TEXT_PARTS[values["model_type"]]]}
    tied = {key: values[key] for key in ("tie_word_embeddings",) if key in values}
    return tied | values.get("text_config", {}) | architecture


def older_rope_keys(values: dict[str, Any]) -> dict[str, Any]:
    """The keys in which transformers 4 looks for what the rope_parameters of a config.json say. It
    does not know these, and takes its defaults without a warning."""
    parameters = values.get("rope_parameters") or {}
    rope, local = parameters.get(FULL, parameters), parameters.get(LOCAL, {})
    if "rope_theta" not in rope or "mrope_section" in rope:  # it does not know Qwen3.5 either
        return {}
    keys = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = {key: x for key, x in rope.items() if key not in keys}
    if rope.get("rope_type") == "longrope":  # it accepts no other key
        names = ("short_factor", "long_factor")
        loses = {"factor", "attention_factor"} & rope.keys()  # transformers 5 would read them there
        scaling = {} if loses else {"type": "longrope"} | {name: rope[name] for name in names}
    if rope.get("rope_type", "default") != "default" and scaling:
        keys["rope_scaling"] = scaling
    if "rope_theta" in local:
        keys["rope_local_base_freq"] = local["rope_theta"]
    return keys


def read_json(path: Path) -> dict[str, Any]:
    with reading(f"{path} cannot be read"):
        return json.loads(path.read_text(encoding="utf-8"))


def raise_if_without(folder: Path, name: str, reason: str) -> None:
    """Raises UserMistake if the folder has no such file; it names weights of another format."""
    if not (folder / name).is_file():
        unread = [*folder.glob("*model*.bin*"), *folder.glob("*.gguf"), *folder.glob("*.pth")]
        instead = f", but {unread[0].name}" if unread else ""
        raise UserMistake(f"MODEL_PATH={folder} has no {name}{instead}; {reason}")
