"""Tiny Hugging Face folders of every family, with weights by a formula, and their logits.

`python tests/formula_model.py` writes goldens/logits.json again, with transformers' torch model; it
needs torch. The formula computes with integers, so that no version of a library changes it.
"""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

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
FAMILIES: dict[str, dict[str, Any]] = {  # config.json, as written before transformers 5
    "qwen2": {
        **SIZES,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 700.0,
        "tie_word_embeddings": False,
    },
    "qwen2_tied": {
        **SIZES,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 300.0,
        "tie_word_embeddings": True,
    },
    "qwen3": {  # its head_dim 12 is not 32/4
        **SIZES,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 12,
        "rope_theta": 200.0,
        "tie_word_embeddings": False,
    },
    "llama3": {  # of its four frequencies one is kept, one is blended and two are slowed by 8
        **SIZES,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 100.0,
        "rope_scaling": LLAMA3,
        "tie_word_embeddings": False,
    },
}

# Two inputs; the second is left-padded. The golden logits are those of 12 tokens at PLACES.
LENGTH, PADDING = 80, 23
IDS = (np.arange(2 * LENGTH) ** 2 // 3 % 48).reshape(2, LENGTH).astype(np.int32)
MASK = np.arange(LENGTH) >= np.array([[0], [PADDING]])
POSITIONS = np.maximum(np.arange(LENGTH) - np.array([[0], [PADDING]]), 0).astype(np.int32)
PLACES = (np.array([0, 0, 1, 1]), np.array([40, 79, 40, 79]))  # inputs, tokens


def tensor_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint, under transformers' names."""
    D, F, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
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
    if c["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm.weight": (h,), "self_attn.k_norm.weight": (h,)}
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(c["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes if c["tie_word_embeddings"] else {**shapes, "lm_head.weight": (V, D)}


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [-0.5, 0.5): hashes of the name and the index."""
    n = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()))
    for _ in range(2):
        n = (n ^ (n >> np.uint64(16))) * np.uint64(0x45D9F3B) & np.uint64(0xFFFFFFFF)
    return ((n ^ (n >> np.uint64(16))) / 2**32 - 0.5).reshape(shape)


def tensors(c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Name -> float32 array: norms 0.5 to 1.5, biases -1 to 1, matrices that keep the variance."""
    made = {}
    for name, shape in tensor_shapes(c).items():
        x = uniform(name, shape)
        if "norm" in name:
            made[name] = 1 + x
        elif "bias" in name:
            made[name] = 2 * x
        else:
            made[name] = x * math.sqrt(12 / shape[-1]) * (4 if "q_proj" in name else 1)
    return {name: x.astype(np.float32) for name, x in made.items()}


def write_config(folder: Path, c: dict[str, Any], *, rope_parameters: bool = False) -> None:
    """Writes config.json. transformers 5 writes rope_parameters for rope_theta and rope_scaling."""
    if rope_parameters:
        c = dict(c)
        rope = {"rope_type": "default", **c.pop("rope_scaling", {})}
        c["rope_parameters"] = {**rope, "rope_theta": c.pop("rope_theta")}
    (folder / "config.json").write_text(json.dumps(c))


def write_folder(folder: Path, family: str, *, rope_parameters: bool = False) -> Path:
    """Writes a folder of the family that is complete except for a tokenizer; returns it."""
    write_config(folder, FAMILIES[family], rope_parameters=rope_parameters)
    save_file(tensors(FAMILIES[family]), folder / "model.safetensors", metadata={"format": "pt"})
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


def main() -> None:
    import tempfile

    lines = []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            logits = transformers_logits(write_folder(Path(folder), family))
        golden = logits[PLACES][:, :12].astype(np.float64).round(6)
        lines.append(f'"{family}": {json.dumps(golden.tolist())}')
    GOLDENS.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
