"""Claims about hf.py: folders of every family are read and written exactly, and a model that is not
supported or damaged gets a clear line."""

import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from mistakes import refused
from runs import REPO, environment, few_examples, finish, start_two, train
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from small_model import (
    FAMILIES,
    LLAMA3,
    copy_tiny,
    tensors,
    transformers_logits,
    write_config,
    write_folder,
    write_folder_with_tokenizer,
)

from chat import ChatFormat
from config import Config
from fingerprint import result_fingerprint
from model import hf
from model.int8 import quantize
from model.layout import make_mesh
from model.params import (
    FULL,
    LINEAR,
    LinearSizes,
    Lora,
    ModelConfig,
    Moe,
    Params,
    Rope,
    Variant,
    param_shardings,
)
from rewards import SYSTEM_PROMPT
from startup import find_stop_ids, set_up

TINY = Path(__file__).parent.parent / "tiny"


def mesh(shape: str = "1,8,1") -> Mesh:
    return make_mesh("MESH_SHAPE", shape, jax.devices())


def load(folder: Path) -> Params:
    return hf.load_params(folder, hf.read_config(folder), mesh(), np.float32)


# ---- config.json ---------------------------------------------------------------------------------


def test_config_by_hand(tmp_path: Path) -> None:
    """As it was written before transformers 5, as transformers 5 writes it, and with null where a
    key may be missing; Qwen2 may name its biases."""
    from transformers import AutoConfig

    sizes = dict(vocab_size=48, hidden_size=32, intermediate_size=40, num_layers=2, num_heads=4)
    sizes |= dict(num_kv_heads=2, rms_norm_eps=1e-5, max_positions=256)
    plain = dict(head_dim=8, tied=False)
    names = dict(attn_post_norm="post_attention_layernorm.weight")
    names |= dict(mlp_norm="pre_feedforward_layernorm.weight")
    names |= dict(mlp_post_norm="post_feedforward_layernorm.weight")
    of_gemma = dict(layer_variants=(1, 0), qk_norm=True, norm_adds_one=True, post_norms=True)
    of_gemma |= dict(activation="gelu", names=(*names.items(),), head_dim=12, tied=True)
    of_gemma |= dict(embedding_multiplier=32**0.5, query_multiplier=(12 / 20) ** 0.5)
    of_gemma2 = of_gemma | dict(qk_norm=False, attention_softcap=4.0, logits_softcap=3.0)
    of_qwen35 = dict(head_dim=12, qk_norm=True, norm_adds_one=True, output_gate=True)
    of_qwen35 |= dict(period=(LINEAR, FULL), linear=LinearSizes(2, 4, 6, 10, taps=4))
    of_phi3 = dict(tied=True, max_positions=128, rotary_scale=(1 + 1 / 7) ** 0.5)
    fused = [(x, "self_attn.qkv_proj.weight") for x in ("wq", "wk", "wv")]
    of_phi3 |= dict(names=(*fused, *((x, "mlp.gate_up_proj.weight") for x in ("gate", "up"))))
    experts = dict(intermediate_size=12, moe=Moe(8, 3, normed=True))
    of_qwen35_moe = of_qwen35 | experts | dict(moe=Moe(8, 3, normed=True, shared_width=16))
    stacks = [(x, "mlp.experts.gate_up_proj") for x in ("gate", "up")]
    of_qwen35_moe |= dict(names=(*stacks, ("down", "mlp.experts.down_proj")))
    multipliers = dict(embedding_multiplier=1.5, query_multiplier=0.2 * 8**0.5)
    multipliers |= dict(residual_multiplier=0.22, logits_divisor=0.75)
    expected = {
        "qwen2": dict(qkv_bias=True),
        "qwen2_tied": dict(qkv_bias=True, tied=True),
        "qwen3": dict(head_dim=12, qk_norm=True),
        "llama3": {},
        "gemma3": of_gemma,
        "gemma2": of_gemma2,
        "mistral": {},
        "smollm3": dict(tied=True, layer_variants=(0, 1)),
        "granite": multipliers,
        "qwen3_5": of_qwen35,
        "phi3": of_phi3,
        "qwen3_moe": dict(head_dim=12, qk_norm=True) | experts,
        "qwen3_5_moe": of_qwen35_moe,
    }
    ropes = {
        "qwen2": Rope(700.0),
        "qwen2_tied": Rope(300.0),
        "qwen3": Rope(200.0),
        "llama3": Rope(100.0, llama3=(8.0, 1.0, 4.0, 32)),
        "gemma3": Rope(5e3, factor=8.0),
        "gemma2": Rope(450.0),
        "mistral": Rope(150.0),
        "smollm3": Rope(250.0),
        "granite": Rope(350.0),
        "qwen3_5": Rope(400.0, rotated=6),
        "phi3": Rope(550.0, rotated=6, factor=(1.0, 1.5, 2.0)),
        "qwen3_moe": Rope(200.0),
        "qwen3_5_moe": Rope(400.0, rotated=6),
    }
    others = {"gemma3": Variant(Rope(50.0), window=16), "smollm3": Variant(None)}
    others |= {"gemma2": Variant(Rope(450.0), window=16)}
    for family in FAMILIES:
        write_config(tmp_path, FAMILIES[family])
        AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
        assert "rope_parameters" in (tmp_path / "saved" / "config.json").read_text()
        optional = "rope_scaling rope_parameters head_dim hidden_act use_sliding_window mlp_bias"
        nulls = {**dict.fromkeys(optional.split()), **FAMILIES[family]}
        (tmp_path / "nulls").mkdir(exist_ok=True)
        write_config(tmp_path / "nulls", nulls | {"attention_bias": family.startswith("qwen2")})
        other = (others[family],) if family in others else ()
        variants = Variant(ropes[family]), *other
        for folder in (tmp_path, tmp_path / "saved", tmp_path / "nulls"):
            model = ModelConfig(variants=variants, **sizes | plain | expected[family])
            assert hf.read_config(folder) == model


# The config.json of a Gemma 3 of 4B parts.
SIZES = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
SCALING = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
SEES_IMAGES = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text"} | SIZES | SCALING,
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def test_what_a_gemma_that_also_sees_images_leaves_out_is_as_in_the_released_model(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEES_IMAGES))
    model = hf.read_config(tmp_path)
    assert (model.vocab_size, model.max_positions, model.tied) == (262208, 131072, True)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (8, 4, 256)
    assert (model.rms_norm_eps, model.sees_images) == (1e-6, True)
    assert model.variants == (Variant(Rope(1e6, factor=8.0)), Variant(Rope(1e4), window=1024))
    assert model.layer_variants == tuple(int(i % 6 < 5) for i in range(34))


def test_a_mistral_takes_no_more_tokens_than_its_sliding_window(tmp_path: Path) -> None:
    """There a window hides nothing. transformers has one of 4096 if the file has no such key."""
    config = FAMILIES["mistral"] | {"max_position_embeddings": 32768}
    del config["sliding_window"]
    positions = []
    for window in ({}, {"sliding_window": 1024}, {"sliding_window": None}):
        write_config(tmp_path, config | window)
        positions.append(hf.read_config(tmp_path).max_positions)
    assert positions == [4096, 1024, 32768]


@pytest.mark.parametrize("cap, expected", [(None, 0.0), (2.5, 2.5)])
def test_null_turns_the_softcaps_of_a_gemma2_off(tmp_path: Path, cap: float, expected: float):
    """transformers has caps of 50 and 30 if the file has no such keys."""
    caps = {"attn_logit_softcapping": cap, "final_logit_softcapping": cap}
    write_config(tmp_path, FAMILIES["gemma2"] | caps)
    model = hf.read_config(tmp_path)
    assert (model.attention_softcap, model.logits_softcap) == (expected, expected)


def rope(**values: object) -> dict[str, object]:
    return {"rope_scaling": values}


def rope35(**values: object) -> dict[str, object]:
    return {"rope_parameters": FAMILIES["qwen3_5"]["rope_parameters"] | values}


def quantized(**values: object) -> dict[str, object]:
    return {"quantization_config": values}


SCALED = {"rope_type": "linear", "factor": 2.0}
NESTED = {"full_attention": SCALED, "sliding_attention": SCALED}
LOCAL_IS_SCALED = {"rope_scaling": None, "rope_parameters": NESTED}
UNQUANTIZED = "format are not read; use unquantized ones"
BAD_CONFIGS = [  # family, changed keys (None removes a key), a part of the error
    ("qwen2", {"model_type": None}, "model_type=None is not supported"),
    ("qwen2", {"model_type": "mamba"}, "model_type='mamba' is not supported; qwen2, qwen3, llama"),
    ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; silu is"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not supported; false is"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True is not supported; false is"),
    ("llama3", {"mlp_bias": True}, "mlp_bias=True is not supported"),
    ("llama3", rope(rope_type="yarn", factor=4.0), "rope_type default or llama3"),
    ("llama3", rope(type="linear", factor=2.0), "rope_scaling={'type': 'linear'"),
    ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters={'r"),
    ("llama3", rope(rope_type="llama3"), "'rope_type'='llama3': {'"),
    (
        "llama3",
        rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        "rope_scaling has no 'original_max_position_embeddings'",
    ),
    ("qwen2", {"rms_norm_eps": None}, "has no 'rms_norm_eps'"),
    ("qwen2", {"max_position_embeddings": None}, "has no 'max_position_embeddings'"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported; n"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported; gelu_py"),
    ("gemma3", {"layer_types": ["full_attention"] * 3}, "`num_hidden_layers` (2) must be equal to"),
    ("gemma3", {"layer_types": ["chunked_attention"] * 2}, "_attention or full_attention is"),
    ("gemma3", LOCAL_IS_SCALED, "rope_type default for sliding_attention is"),
    ("gemma3", rope(**LLAMA3), "rope_type default or linear is"),
    ("gemma3", rope(rope_type="linear"), "'rope_type'='linear': {'factor'}"),
    ("gemma3", {"sliding_window": None}, "has no 'sliding_window'"),
    ("gemma2", {"sliding_window": None}, "has no 'sliding_window'"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported; gelu_py"),
    ("gemma2", rope(rope_type="linear", factor=2.0), "rope_type default is"),
    ("mistral", rope(rope_type="yarn", factor=4.0), "rope_type default or llama3"),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window=True is not supported; false is"),
    (
        "granite",
        {"model_type": "granitemoehybrid"},
        "model_type='granitemoehybrid' is not supported",
    ),
    ("granite", {"attention_bias": True}, "attention_bias=True is not supported; false is"),
    ("qwen3_moe", {"norm_topk_prob": None}, "has no 'norm_topk_prob'"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "has no 'moe_intermediate_size'"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is not supported; 1 to 8"),
    ("qwen3_5_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is not supported; 1 to"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported; 1 is"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers=[0] is not supported; [] is"),
    ("qwen3_moe", {"model_type": "gpt_oss"}, "model_type='gpt_oss' is not supported"),
    ("qwen3_moe", {"model_type": "qwen3_vl_moe"}, "model_type='qwen3_vl_moe' is not supported"),
    ("qwen3_moe", {"model_type": "deepseek_v3"}, "model_type='deepseek_v3' is not supported"),
    ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate=False is not supported; true is"),
    ("qwen3_5", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported; s"),
    ("qwen3_5", {"layer_types": ["full_attention", "linear_attention"]}, "before each full_attent"),
    ("qwen3_5", rope35(rope_type="yarn", factor=4.0), "rope_parameters={'rope_type': 'yarn'"),
    ("phi3", rope(rope_type="yarn", factor=4.0), "short_factor"),
    ("phi3", rope(type="linear", factor=4.0), "must be one of ['longrope']"),
    ("qwen2", quantized(quant_method="gptq", bits=4), f"weights in gptq {UNQUANTIZED}"),
    ("qwen2", quantized(load_in_4bit=True), f"weights in bitsandbytes {UNQUANTIZED}"),
    ("sees_images", quantized(quant_method="fp8"), f"weights in fp8 {UNQUANTIZED}"),
]


@pytest.mark.parametrize("family, changes, says", BAD_CONFIGS)
def test_a_config_that_is_not_supported_is_refused_in_one_line(tmp_path, family, changes, says):
    config = SEES_IMAGES if family == "sees_images" else FAMILIES[family]
    changed = {key: value for key, value in (config | changes).items() if value is not None}
    write_config(tmp_path, changed)
    refused(lambda: hf.read_config(tmp_path), str(tmp_path / "config.json"), says)


def test_no_code_of_a_folder_runs_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = {"AutoConfig": "mine.Mine", "AutoTokenizer": ["mine.Mine", "mine.Mine"]}
    auto_map = {"auto_map": code}
    folder = copy_tiny(tmp_path / "model", config=auto_map, tokenizer_config=auto_map)
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question is asked"))
    assert hf.read_model(folder, "")[0] == hf.read_config(TINY)
    assert not (tmp_path / "ran").exists()


# ---- Weights -------------------------------------------------------------------------------------


def write_shards(folder: Path, source: dict[str, np.ndarray]) -> list[str]:
    """Writes the tensors as two files, each with some tensors of every layer, and an index, as
    large checkpoints have them; returns the names of the files."""
    files = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    names = sorted(source, key=lambda name: name[::-1])
    places = {name: files[i % 2] for i, name in enumerate(names)}
    for file in files:
        save_file({name: source[name] for name in names if places[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def test_a_single_file_comes_before_an_index_that_an_earlier_save_has_left(tmp_path: Path) -> None:
    """As in transformers, whose save_pretrained leaves the old index."""
    new = tensors(FAMILIES["qwen2"])
    write_config(tmp_path, FAMILIES["qwen2"])
    shards = write_shards(tmp_path, {name: x + 1 for name, x in new.items()})
    np.testing.assert_array_equal(load(tmp_path).final_norm, new[NORM] + 1)
    (tmp_path / shards[1]).unlink()
    refused(lambda: load(tmp_path), f"MODEL_PATH={tmp_path} has no {shards[1]}")
    save_file(new, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(load(tmp_path).final_norm, new[NORM])
    (tmp_path / "model.safetensors.index.json").write_text("{")
    np.testing.assert_array_equal(load(tmp_path).final_norm, new[NORM])


HEADS = {  # how a tied checkpoint repeats its embedding, and whether it is refused
    "equal": (lambda embed: embed.astype(np.float64), False),
    "one number": (lambda embed: embed + np.pad([[1]], [(8999, 0), (31, 0)]), True),
    "one row less": (lambda embed: embed[:-1].copy(), True),
}


@pytest.mark.parametrize("family", ["qwen2_tied", "gemma3"])  # Gemma 3 need not say that it is tied
@pytest.mark.parametrize("head", HEADS)
def test_a_tied_head_that_is_not_the_embedding_is_refused(tmp_path, family, head) -> None:
    make_head, is_refused = HEADS[head]
    # The heads are compared in parts, of which the last is short.
    config = FAMILIES[family] | {"vocab_size": 9000}
    source, folder = tensors(config), copy_tiny(tmp_path / "model")
    write_config(folder, config | ({"tie_word_embeddings": None} if family == "gemma3" else {}))
    source["lm_head.weight"] = make_head(source["model.embed_tokens.weight"])
    source["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4)  # as in old checkpoints
    save_file(source, folder / "model.safetensors")
    if is_refused:
        why = "config.json: tie_word_embeddings is true, but lm_head.weight is not the embedding"
        refused(lambda: hf.read_model(folder, ""), f"{folder}/{why}; set it to false, or delete")
    else:
        assert hf.read_model(folder, "")[0].tied and load(folder).lm_head is None


def test_the_model_of_text_is_read_from_a_gemma_that_also_sees_images(tmp_path: Path) -> None:
    text = {**FAMILIES["gemma3"], "architectures": None}
    (tmp_path / "config.json").write_text(json.dumps(SEES_IMAGES | {"text_config": text}))
    source = tensors(FAMILIES["gemma3"])
    of_images = {"vision_tower.a.weight": np.ones(3), "multi_modal_projector.b": np.ones(3)}
    named = {f"language_model.{name}": x for name, x in source.items()}
    save_file(named | of_images, tmp_path / "model.safetensors")
    target = exported(tmp_path, tmp_path / "text")
    written = tensors_of(target)
    assert written.keys() == source.keys()
    assert all((written[name] == source[name]).all() for name in source)
    config = json.loads((target / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    write_config(tmp_path, FAMILIES["gemma3"])
    assert hf.read_config(target) == hf.read_config(tmp_path)


def test_the_model_of_text_is_read_from_a_qwen35_and_a_line_names_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Here the folder says only on its top level that it has a head of its own."""
    folder, family = copy_tiny(tmp_path / "model"), FAMILIES["qwen3_5"] | {"vocab_size": 558}
    text = {key: value for key, value in family.items() if key != "tie_word_embeddings"}
    top = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(top | {"vision_config": {"depth": 1}}))
    source = tensors(family)
    others = {"model.visual.merger.norm.bias": np.ones(3), "mtp.fc.weight": np.ones((3, 6))}
    named = {name.replace("model.", "model.language_model.", 1): x for name, x in source.items()}
    save_file(named | others, folder / "model.safetensors")
    model, _ = hf.read_model(folder, "")
    note = f"note: {folder}: its 1 tensors mtp.*, which predict several tokens, are not"
    assert note in capsys.readouterr().out and not model.tied
    target = exported(folder, tmp_path / "text")
    written = tensors_of(target)
    assert written.keys() == source.keys()
    assert all((written[name] == source[name]).all() for name in source)
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert hf.read_config(target) == model


@pytest.mark.parametrize("mesh_shape", ["1,8,1", "1,2,4"])
@pytest.mark.parametrize("int8", [False, True])
def test_the_rows_of_a_fused_tensor_are_weights_of_their_own(
    tmp_path: Path, mesh_shape: str, int8: bool
) -> None:
    """32, 16 and 16 rows of queries, keys and values; 40 rows of gate and 40 of up."""
    folder, source = write_folder(tmp_path, "phi3"), tensors(FAMILIES["phi3"])
    model = dataclasses.replace(hf.read_config(folder), lora=Lora(2, 4.0, ("o_proj",), int8))
    layers = hf.load_params(folder, model, mesh(mesh_shape), np.float32).layers
    for i in range(2):
        names = [f"model.layers.{i}.{x}_proj.weight" for x in ("self_attn.qkv", "mlp.gate_up")]
        parts = np.split(source[names[0]], [32, 48]) + np.split(source[names[1]], 2)
        for name, part in zip(("wq", "wk", "wv", "gate", "up"), parts, strict=True):
            ours = jax.tree.map(lambda x, i=i: x[i], getattr(layers, name))
            jax.tree.map(np.testing.assert_array_equal, ours, quantize(part.T) if int8 else part.T)


NORM = "model.norm.weight"
CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"


def with_norm_of(dtype: type) -> Callable:
    return lambda t: t | {NORM: np.ones(3, dtype), "its.scales": t[NORM]}


THREE = ", ".join(f"model.layers.0.self_attn.{name}_proj.bias" for name in "kqv")
DAMAGES = [  # a file of tiny/; its new bytes, its new name or what changes its tensors; the line
    (CONFIG, None, "has no config.json"),
    (CONFIG, b'{"model_type": "qwen2",', "config.json cannot be read: JSONDecodeError: "),
    (CONFIG, b"\xff\xfe{", "config.json cannot be read: UnicodeDecodeError: "),
    (CONFIG, "model-Q4_K_M.gguf", "has no config.json, but model-Q4_K_M.gguf; give a Hugging Face"),
    (TOKENIZER, None, "has no tokenizer.json"),
    (TOKENIZER, b"{}", "its tokenizer cannot be read"),
    ("tokenizer_config.json", b"{}", "its tokenizer has no chat template"),
    (
        "tokenizer_config.json",
        b'{"split_special_tokens": true}',
        "split_special_tokens would spell",
    ),
    (WEIGHTS, None, "has no model.safetensors; weights are read as safetensors"),
    (WEIGHTS, "training_args.bin", "has no model.safetensors; weights are read as safetensors"),
    (WEIGHTS, "pytorch_model.bin", "has no model.safetensors, but pytorch_model.bin; weights are"),
    (WEIGHTS, "pytorch_model-1-of-1.bin", "has no model.safetensors, but pytorch_model-1-of-1.bin"),
    (WEIGHTS, "a.q8_0.gguf", "has no model.safetensors, but a.q8_0.gguf;"),
    (WEIGHTS, "consolidated.00.pth", "has no model.safetensors, but consolidated.00.pth;"),
    (WEIGHTS, b"version https://git-lfs.github.com/spec/v1", "is not a complete safetensors file"),
    (WEIGHTS, lambda t: t | {"extra": t[NORM]}, "has unknown tensors extra"),
    (WEIGHTS, lambda t: {x: t[x] for x in t if "bias" not in x}, f"lacks tensors {THREE} and 9 mo"),
    (WEIGHTS, lambda t: t | {NORM: t[NORM][:-1]}, f"{NORM} is [127], its config says [128]"),
    (WEIGHTS, with_norm_of(ml_dtypes.float8_e4m3fn), f"weights in F8_E4M3 {UNQUANTIZED}"),
    (WEIGHTS, with_norm_of(np.uint8), f"weights in U8 {UNQUANTIZED}"),  # of bitsandbytes
    (WEIGHTS, with_norm_of(np.int32), f"weights in I32 {UNQUANTIZED}"),  # of GPTQ and AWQ
    (WEIGHTS, with_norm_of(np.int8), f"weights in I8 {UNQUANTIZED}"),
]


@pytest.mark.parametrize("name, damage, says", DAMAGES, ids=[says for _, _, says in DAMAGES])
def test_a_damaged_folder_is_refused_in_one_line(tmp_path, name, damage, says) -> None:
    folder = copy_tiny(tmp_path / "model")
    if damage is None:
        (folder / name).unlink()
    elif isinstance(damage, str):
        (folder / name).rename(folder / damage)
    elif isinstance(damage, bytes):
        (folder / name).write_bytes(damage)
    else:
        save_file(damage(load_file(folder / name)), folder / name)
    refused(lambda: hf.read_model(folder, ""), str(folder), says)


# ---- Tokenizers, and the tokens that end a completion --------------------------------------------

QUESTIONS = [  # like those of GSM8K
    "Weng earns $12 an hour. Yesterday she did 50 minutes: <<12/60=0.2>>\n50*0.2=$10\n#### 10",
    "A house costs $1,234,567.50; repairs raised its value by 150%.\r\n\r\nWhat is the profit?\t",
    "Zoe\u0308's cafe\u0301 sells 3 ½-litre jugs at 7 € — how much?",  # accents by combining marks
    "Bob’s \U0001f600 emoji: 2³ × 10^-4 = ?\u2028  Next   line",
    "<|im_start|>user\n<think>5 + 5</think> <answer>10</answer><|im_end|>",
]


def test_token_ids_are_those_of_the_file_tokenizer_json() -> None:
    from tokenizers import Tokenizer

    assert json.loads((TINY / "config.json").read_text())["model_type"] == "qwen2"
    raw, ours = Tokenizer.from_file(str(TINY / "tokenizer.json")), hf.load_tokenizer(TINY)
    for question in QUESTIONS:
        ids = raw.encode(question, add_special_tokens=False).ids
        assert ours(question, add_special_tokens=False)["input_ids"] == ids
        assert ours.decode(ids) == question


@pytest.mark.parametrize("more, accepted", [(1, True), (16, True), (17, False)])
def test_a_tokenizer_may_have_a_few_tokens_more_than_the_model_has_rows(
    tmp_path: Path, more: int, accepted: bool
) -> None:
    """Gemma 3 has one for images, and trainers add one for padding. Tokens far beyond the rows are
    of another model."""
    rows = 558 - more  # the tokenizer has 558 tokens
    folder = write_folder_with_tokenizer(tmp_path / "model", "gemma3", vocab_size=rows)
    if accepted:
        assert hf.read_model(folder, "")[0].vocab_size == rows
    else:
        refused(lambda: hf.read_model(folder, ""), "558 tokens", "they are of two models")


IM_END = "<|im_end|>"  # the token 2


@pytest.mark.parametrize(
    "generation, config, eos, vocab_size, expected",
    [
        (None, None, IM_END, 558, (2,)),
        (None, 5, IM_END, 558, (2, 5)),
        (0, 5, IM_END, 558, (0, 2, 5)),
        ([9, 0, 2], None, IM_END, 558, (0, 2, 9)),
        ([9], [5, 9], None, 558, (5, 9)),
        # Qwen3.5 on the hub names it in the part of its language model alone.
        (None, {"text_config": 0}, IM_END, 558, (0, 2)),
        # The model draws no token without a row. The first stop token fills the padding.
        (None, [7, 5], IM_END, 7, (2, 5)),
        (None, [7, 5], None, 5, None),
        (None, None, None, 558, None),
    ],
)
def test_stop_ids_are_those_of_all_files_that_have_a_row(
    tmp_path, generation, config, eos, vocab_size, expected
) -> None:
    tokenizer = hf.load_tokenizer(TINY)
    tokenizer.eos_token = eos
    values = {"eos_token_id": config}
    if isinstance(config, dict):
        text = {"eos_token_id": config["text_config"], "model_type": "qwen3_5_text"}
        values = {"model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        values = {"eos_token_id": generation}
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    if expected:
        assert hf.read_stop_ids(tmp_path, tokenizer, vocab_size) == expected
    else:
        words = f"MODEL_PATH={tmp_path}: neither configs nor tokenizer name a stop token"
        refused(lambda: hf.read_stop_ids(tmp_path, tokenizer, vocab_size), words)


def listed(templates: dict[str, str]) -> list[dict[str, str]]:
    """Named chat templates as tokenizer_config.json has them."""
    return [{"name": name, "template": text} for name, text in templates.items()]


def test_the_end_of_an_answer_by_the_chat_template_is_a_stop_token_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Base models of Qwen2.5 name only the end of a text. This one has no system message either,
    and another template for tools, which a resumed run compares."""
    turns = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    named = {"default": turns, "tool_use": (REPO / "docs" / "qwen3_turns.jinja").read_text()}
    tokenizer = {"chat_template": listed(named), "eos_token": "<|endoftext|>"}
    folder = copy_tiny(tmp_path / "base", config={"eos_token_id": 0}, tokenizer_config=tokenizer)
    env = environment("EVAL_EVERY_STEPS=0 REWARD_FN=reward_format")
    env |= {"MODEL_PATH": str(folder), "DATASET": str(few_examples(32, 32))}
    env["SYSTEM_PROMPT"] = "Think."
    run = set_up(Config.from_env(env))
    assert run.rollout.stopping.stop_ids == (0, 2) and run.rollout.stopping.pad_id == 0
    lines = capsys.readouterr().out
    note = "note: <|im_end|> is a stop token: the chat template ends an answer with it, though the"
    assert f"{note} model's files do not name it\n" in lines
    note = "note: the chat template has no system role; system messages are prepended to"
    assert f"{note} the question\n" in lines
    tools = {"ENVIRONMENT_CLASS": f"{REPO}/recipes/calculator.py:Calculator"}
    run = set_up(Config.from_env(env | tools))
    digest = hashlib.sha256(named["tool_use"].encode()).hexdigest()
    assert result_fingerprint(run)["the chat template"] == digest[:12]
    assert note not in capsys.readouterr().out, "the template for tools has the role"


@pytest.mark.parametrize(
    "end, says", [("<|end|>\\n", "'<|end|>'"), ("\\n\\n", ""), ("<|im_end|>", "")]
)
def test_an_end_of_an_answer_that_is_no_token_gets_a_line(end: str, says: str, capsys) -> None:
    """As a ChatML template with the tokenizer of a base model that lacks its tokens."""
    tokenizer = hf.load_tokenizer(REPO / "tiny")
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{{{ m.content + '{end}' }}}}{{% endfor %}}"
    )
    assert find_stop_ids(REPO / "tiny", ChatFormat(tokenizer, []), 576) == (2,)
    reason = f"{says}, which is no token: the model may write it and go on until <|im_end|>"
    line = f"note: the chat template ends an answer with {reason}\n"
    assert capsys.readouterr().out == (line if says else "")


# ---- The export ----------------------------------------------------------------------------------


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as content:
            found |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    return found


def exported(source: Path, target: Path, mesh_shape: str = "1,8,1", **how: object) -> Path:
    """The folder `target` with the weights of the folder `source`."""
    model = hf.read_config(source)
    params = hf.load_params(source, model, mesh(mesh_shape), np.float32)
    shardings = param_shardings(model, mesh(mesh_shape))
    for x, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
        assert (x.dtype, x.sharding) == (np.float32, sharding)
    how = {"dtype": "float32", "stop_ids": [2]} | how
    hf.save_model(target, hf.hf_tensors(params, model, how["dtype"]), model, source, **how)
    return target


@pytest.mark.parametrize(
    "family, mesh_shape, stored, dtype",
    [
        ("qwen2", "1,8,1", np.float32, "bfloat16"),
        ("qwen2_tied", "1,4,2", np.float32, "float32"),
        ("qwen3", "2,2,2", np.float16, "float32"),
        ("llama3", "8,1,1", ml_dtypes.bfloat16, "float32"),
        ("gemma3", "1,8,1", np.float32, "float32"),
        ("gemma2", "2,2,2", np.float32, "bfloat16"),
        ("mistral", "1,8,1", ml_dtypes.bfloat16, "bfloat16"),
        ("smollm3", "1,4,2", np.float32, "float32"),
        ("granite", "2,2,2", np.float32, "bfloat16"),
        ("qwen3_5", "1,4,2", np.float32, "bfloat16"),
        ("phi3", "1,4,2", np.float32, "bfloat16"),
        ("qwen3_moe", "1,2,4", np.float32, "bfloat16"),
        ("qwen3_5_moe", "1,4,2", np.float32, "bfloat16"),
    ],
)
def test_an_export_has_every_tensor_of_its_source_in_any_dtype_and_on_any_mesh(
    tmp_path, family, mesh_shape, stored, dtype, monkeypatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    before = {name: x.astype(stored) for name, x in tensors(FAMILIES[family]).items()}
    write_config(source, FAMILIES[family])
    write_shards(source, before)
    (source / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.6}')
    monkeypatch.setattr(hf, "LARGEST_FILE", 20_000)
    target = exported(source, tmp_path / "target", mesh_shape, dtype=dtype, stop_ids=(1, 2))
    after = tensors_of(target)
    assert before.keys() == after.keys(), "tied heads stay tied"
    for name, tensor in after.items():
        # As in released files of Qwen3.5.
        kept = name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
        assert tensor.dtype == np.dtype("float32" if kept else dtype)
        assert (tensor == before[name].astype(np.float32).astype(tensor.dtype)).all(), name
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys() and len(set(index["weight_map"].values())) > 1
    names = {"dtype": dtype, "torch_dtype": dtype}
    assert json.loads((target / "config.json").read_text()) == FAMILIES[family] | names
    generation = json.loads((target / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [1, 2], "temperature": 0.6}, "it stops as the policy did"
    assert len({file.stat().st_mode for file in target.iterdir()}) == 1, "all can be read alike"


MTP = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
CODE = {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}


def exported_config(source: Path, target: Path) -> dict[str, object]:
    """The config.json of an export of the folder `source` as it is, without its devices."""
    weights, model = iter(tensors_of(source).items()), hf.read_config(source)
    hf.save_model(target, weights, model, source, dtype="float32", stop_ids=[2])
    return json.loads((target / "config.json").read_text())


@pytest.mark.parametrize(
    "family, told",
    [
        ("qwen2", {"dtype": "float16", "torch_dtype": "bfloat16"}),
        ("llama3", {"dtype": "float16", "torch_dtype": None}),
        ("gemma3", {"torch_dtype": "bfloat16"}),
        ("qwen3_5", MTP),
        ("qwen3", {"num_nextn_predict_layers": 2}),
        ("mistral", {"nextn_predict_layers": 1, "dtype": "bfloat16"}),
        ("smollm3", CODE),
    ],
)
def test_the_config_of_an_export_names_its_dtype_and_nothing_that_the_folder_lacks(
    tmp_path: Path, family: str, told: dict[str, object]
) -> None:
    source = write_folder(tmp_path, family)
    write_config(source, FAMILIES[family] | told)
    config = exported_config(source, tmp_path / "hf")
    assert config == FAMILIES[family] | {"dtype": "float32", "torch_dtype": "float32"}


DEFAULT, LINEAR_ROPE = {"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}
LONG_ROPE = FAMILIES["phi3"]["rope_scaling"]
NEW_ROPES = [  # family, its rope_parameters; the keys in which transformers 4 has them
    ("qwen3", DEFAULT | {"rope_theta": 5e5}, {"rope_theta": 5e5}),
    ("llama3", LLAMA3 | {"rope_theta": 100.0}, {"rope_theta": 100.0, "rope_scaling": LLAMA3}),
    (
        "gemma3",
        {
            "full_attention": LINEAR_ROPE | {"rope_theta": 5e3},
            "sliding_attention": DEFAULT | {"rope_theta": 50.0},
        },
        {"rope_theta": 5e3, "rope_scaling": LINEAR_ROPE, "rope_local_base_freq": 50.0},
    ),
    (
        "phi3",
        LONG_ROPE
        | {"rope_type": "longrope", "original_max_position_embeddings": 128}
        | {"rope_theta": 550.0, "partial_rotary_factor": 0.75},
        {"rope_theta": 550.0, "partial_rotary_factor": 0.75, "rope_scaling": LONG_ROPE},
    ),
    (  # transformers 5 would read the factor where there are older keys
        "phi3",
        LONG_ROPE
        | {"rope_type": "longrope", "original_max_position_embeddings": 128}
        | {"rope_theta": 550.0, "partial_rotary_factor": 0.75, "attention_factor": 1.5},
        {"rope_theta": 550.0, "partial_rotary_factor": 0.75},
    ),
]


@pytest.mark.parametrize("family, parameters, older", NEW_ROPES)
def test_the_rope_of_an_export_stands_also_where_earlier_versions_of_transformers_look_for_it(
    tmp_path: Path, family: str, parameters: dict, older: dict
) -> None:
    """They take their default of 10000 if they find none."""
    source = write_folder(tmp_path, family)
    config = {key: x for key, x in FAMILIES[family].items() if key not in {*older, "rope_scaling"}}
    write_config(source, config | {"rope_parameters": parameters})
    told = exported_config(source, tmp_path / "hf")
    assert told.items() >= (older | {"rope_parameters": parameters}).items()
    assert hf.read_config(tmp_path / "hf") == hf.read_config(source)


def test_an_export_needs_no_permission_to_change_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on mounts of buckets. The templates are in a folder, which is copied as well."""
    source = copy_tiny(tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")

    def chmod(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "chmod", chmod)
    target = exported(source, tmp_path / "hf")
    assert hf.load_tokenizer(target).chat_template["tool_use"] == "tools"
    assert tensors_of(target).keys() == tensors_of(source).keys()


# What llama.cpp's converter reads: names of the number of layers, of layers beside them, and what
# it needs of the other keys. Its program then looks for the norm of each layer.
NUM_LAYERS = ("n_layers", "num_hidden_layers", "n_layer", "num_layers")
MORE_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
CONVERTED = {f"{x}ForCausalLM" for x in ("Qwen2", "Qwen3", "Qwen3_5", "Llama", "Gemma2")}
CONVERTED |= {f"{x}ForCausalLM" for x in ("Qwen3Moe", "Qwen3_5Moe")}
CONVERTED |= {f"{x}ForCausalLM" for x in ("Mistral", "SmolLM3", "Granite", "Gemma3", "Phi3")}
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
MERGED = "LORA_RANK=4 EXPORT_LORA=merged"


def check_as_llama_cpp(folder: Path) -> None:
    """Makes the checks of keys and tensors that llama.cpp's converter makes."""
    config, found = json.loads((folder / "config.json").read_text()), tensors_of(folder)
    assert config["architectures"][0] in CONVERTED and "text_config" not in config
    sizes = {"intermediate_size": config.get("moe_intermediate_size")} | config
    assert all(sizes[key] > 0 for key in (*NEEDED, "rms_norm_eps", "max_position_embeddings"))
    layers = next(config[key] for key in NUM_LAYERS if key in config)
    layers += sum(config.get(key) or 0 for key in MORE_LAYERS)
    norms = {f"model.layers.{i}.input_layernorm.weight" for i in range(layers)}
    assert norms == {name for name in found if name.endswith("input_layernorm.weight")}
    numbers = {int(name.split(".")[2]) for name in found if name.startswith("model.layers.")}
    assert numbers == {*range(layers)}
    assert ("lm_head.weight" in found) == (not config["tie_word_embeddings"])
    rows, columns = found["model.embed_tokens.weight"].shape
    assert (rows, columns) == (config["vocab_size"], config["hidden_size"])
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    ids = [*vocabulary["model"]["vocab"].values(), *(x["id"] for x in vocabulary["added_tokens"])]
    assert max(ids) < rows


def with_mtp(folder: Path, family: str) -> Path:
    """A folder of the family with the tokenizer in tiny/; those of Qwen3.5 also tell of MTP."""
    return write_folder_with_tokenizer(folder, family, **MTP if "qwen3_5" in family else {})


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_opens_an_export_that_can_be_converted_and_gives_the_same_logits(
    tmp_path: Path, family: str
) -> None:
    pytest.importorskip("torch", reason="opens the folder with transformers' torch model")
    source = with_mtp(tmp_path / "source", family)
    target = exported(source, tmp_path / "ours")
    check_as_llama_cpp(target)
    np.testing.assert_array_equal(transformers_logits(target), transformers_logits(source))


@pytest.mark.parity
@pytest.mark.parametrize(
    "family, lora",
    [("gemma2", ""), ("gemma3", MERGED), ("phi3", ""), ("qwen3_moe", ""), ("qwen3_5_moe", "")],
)
def test_an_export_says_in_transformers_what_the_run_has_said_and_can_be_converted(
    tmp_path: Path, family: str, lora: str
) -> None:
    """The greedy answers of the evaluation after the last step."""
    torch = pytest.importorskip("torch", reason="opens the folder with transformers' torch model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, out = with_mtp(tmp_path / "model", family), tmp_path / "run"
    sizes = environment("BATCH_SIZE=2 NUM_PRE_Q=4 TRAIN_MICRO_BATCH_SIZE=8 LEARNING_RATE=1e-3")
    asked = environment("EVAL_EVERY_STEPS=1 EVAL_PROMPTS=8 MAX_LENGTH_SAMPLE=16 DTYPE=float32")
    train(out, MODEL_PATH=str(folder), **sizes | asked | environment(lora))
    check_as_llama_cpp(out / "hf")
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    model = AutoModelForCausalLM.from_pretrained(out / "hf")
    assert model.dtype == torch.float32
    records = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
    answers = {r["question"]: r["completions"][0]["text"] for r in records if r["step"] == 1}
    assert len(answers) == 8 and len({*answers.values()}) > 1
    for question, answer in answers.items():
        chat = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        said = model.generate(**ids, do_sample=False, max_new_tokens=16)
        completion = said[0, ids["input_ids"].shape[1] :].tolist()
        stopped = completion[-1] in model.generation_config.eos_token_id
        assert tokenizer.decode(completion[:-1] if stopped else completion) == answer


def test_an_export_replaces_an_earlier_export_and_no_other_file_and_keeps_the_tokenizer(
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    target = tmp_path / "hf"
    target.mkdir()
    (target / "notes.md").write_text("mine")
    (target / "config.json").write_text("{}")
    (target / "model-00001-of-00002.safetensors").write_text("of an earlier export")
    source = copy_tiny(tmp_path / "source")
    (source / "tokenizer.model").write_text("for converters to other formats")
    exported(source, target, chat_template="{{ messages[0]['content'] }}!")
    names = "chat_template.jinja config.json exported_from.json generation_config.json"
    names += " model.safetensors notes.md tokenizer.json tokenizer.model tokenizer_config.json"
    assert sorted(file.name for file in target.iterdir()) == names.split()
    load(target)
    for tokenizer in (hf.load_tokenizer(target), AutoTokenizer.from_pretrained(target)):
        chat = [{"role": "user", "content": "Hi"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "Hi!"
    again = exported(target, tmp_path / "again")
    assert json.loads((again / "exported_from.json").read_text()) == {"model": str(target)}


def test_an_export_keeps_named_templates_unless_one_replaces_them(tmp_path: Path) -> None:
    """In a list of tokenizer_config.json, or in files of a folder."""
    named = {"default": "{{ messages[0].content }}!", "tool_use": "tools"}
    in_list = copy_tiny(tmp_path / "listed", tokenizer_config={"chat_template": listed(named)})
    files = copy_tiny(tmp_path / "files")
    (files / "chat_template.jinja").write_text(named["default"])
    (files / "additional_chat_templates").mkdir()
    (files / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    for source in (in_list, files):
        assert hf.load_tokenizer(source).chat_template == named
        target = exported(source, tmp_path / f"{source.name}_hf")
        assert hf.load_tokenizer(target).chat_template == named
        exported(source, target, chat_template="mine")
        assert hf.load_tokenizer(target).chat_template == "mine"
        in_settings = json.loads((target / "tokenizer_config.json").read_text())["chat_template"]
        assert in_settings == "mine", "llama.cpp takes this one"


def test_a_tokenizer_removes_no_space_before_punctuation(tmp_path: Path) -> None:
    """That of Llama 3 asks for it; newer versions of transformers want a second key to do it."""
    keys = ["_for_bpe_even_though_it_will_corrupt_output", ""]
    spaces = {f"clean_up_tokenization_spaces{key}": True for key in keys}
    tokenizer = hf.load_tokenizer(copy_tiny(tmp_path / "model", tokenizer_config=spaces))
    assert tokenizer.decode(tokenizer("It is 5 .")["input_ids"]) == "It is 5 ."


def test_a_model_that_no_run_has_exported_is_not_overwritten(tmp_path: Path) -> None:
    mine = write_folder(tmp_path, "qwen2")
    refused(lambda: hf.raise_if_overwriting(str(mine), "", TINY), f"EXPORT_HF={mine} holds a model")
    refused(lambda: hf.raise_if_overwriting(str(mine), "", mine), f"EXPORT_HF={mine} is MODEL_PATH")
    (mine / "exported_from.json").write_text("{}")
    hf.raise_if_overwriting(str(mine), "", TINY)
    hf.raise_if_overwriting("none", str(tmp_path), tmp_path / "hf")
    (tmp_path / "hf").mkdir()
    hf.raise_if_overwriting("", str(tmp_path), TINY)
    (tmp_path / "hf" / "model.safetensors").touch()
    refused(lambda: hf.raise_if_overwriting("", str(tmp_path), TINY), f"OUTPUT_DIR={tmp_path}: its")


@pytest.mark.slow
def test_two_processes_export_the_same_weights_as_one_process(tmp_path: Path) -> None:
    one = train(tmp_path / "one", BATCH_SIZE="4", NUM_PRE_Q="4", TRAIN_MICRO_BATCH_SIZE="16")
    outs = [tmp_path / "two", tmp_path / "two_1"]
    each = {"BATCH_SIZE": "2", "NUM_PRE_Q": "4", "TRAIN_MICRO_BATCH_SIZE": "8"}
    running = start_two(outs, 1, **each, MESH_SHAPE="1,2,1", EXPORT_HF=str(tmp_path / "elsewhere"))
    results = [finish(process, out) for process, out in zip(running, outs, strict=True)]
    assert [result.code for result in (one, *results)] == [0, 0, 0]
    ours, theirs = tensors_of(tmp_path / "one" / "hf"), tensors_of(tmp_path / "elsewhere")
    assert ours.keys() == theirs.keys() and not (outs[0] / "hf").exists()
    start = tensors_of(TINY)
    assert any((ours[name] != start[name]).any() for name in ours), "it was trained"
    # Adam divides by the size of a gradient, so that the rounding of one near 0 counts: at most a
    # fifth of the learning rate of 1e-4 here.
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=2e-5)
