"""Claims about hf.py: folders are read and written exactly, and a bad folder gives a clear line."""

import dataclasses
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from formula_model import FAMILIES, LLAMA3, tensors, transformers_logits, write_config, write_folder
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file

from models import hf
from models.model import ModelConfig, param_shardings
from runtime.layout import make_mesh
from runtime.mistakes import UserMistake

TINY = Path(__file__).parent.parent / "tiny"


def mesh(shape: str = "1,8,1"):
    return make_mesh("MESH_SHAPE", shape, jax.devices())


def load(folder: Path):
    return hf.load_params(folder, hf.read_config(folder), mesh(), np.float32)


def refused(call: Callable, *parts: str) -> None:
    """The call raises a UserMistake of one line that contains the parts."""
    with pytest.raises(UserMistake) as error:
        call()
    for part in parts:
        assert part in str(error.value) and "\n" not in str(error.value)


# ---- config.json ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rope_parameters", [False, True], ids=["rope_theta", "rope_parameters"])
def test_config_by_hand(tmp_path: Path, rope_parameters: object) -> None:
    common = ModelConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=700.0,
        rope_llama3=None,
        tied=False,
        qkv_bias=True,
        qk_norm=False,
        max_positions=256,
    )
    plain = dataclasses.replace(common, qkv_bias=False)
    expected = {
        "qwen2": common,
        "qwen2_tied": dataclasses.replace(common, rope_theta=300.0, tied=True),
        "qwen3": dataclasses.replace(plain, head_dim=12, rope_theta=200.0, qk_norm=True),
        "llama3": dataclasses.replace(plain, rope_theta=100.0, rope_llama3=(8.0, 1.0, 4.0, 32)),
    }
    for family in FAMILIES:
        write_config(tmp_path, FAMILIES[family], rope_parameters=rope_parameters)
        assert hf.read_config(tmp_path) == expected[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_config_files_are_read(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    write_config(tmp_path, FAMILIES[family])
    ours = hf.read_config(tmp_path)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    assert "rope_parameters" in (tmp_path / "saved" / "config.json").read_text()
    assert hf.read_config(tmp_path / "saved") == ours


BAD_CONFIGS = [  # family, changed keys (None removes a key), a part of the error
    (
        "qwen2",
        {"model_type": "gpt2"},
        "model_type='gpt2' is not supported; qwen2, qwen3 or",
    ),
    ("qwen2", {"model_type": None}, "model_type=None is not supported"),
    ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; silu is"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True is not supported; false is"),
    ("llama3", {"mlp_bias": True}, "mlp_bias=True is not supported"),
    (
        "llama3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_scaling={'rope_type': 'yarn', 'factor': 4.0} is not supported; rope_type default",
    ),
    (
        "llama3",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling={'type': 'li",
    ),
    (
        "qwen3",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
        "rope_parameters={'rope_type': 'dynamic'",
    ),
    (
        "llama3",
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "high_freq_factor"}},
        "has no 'high_freq_factor'",
    ),
    (
        "llama3",
        {"rope_scaling": {"rope_type": "llama3"}},
        "has no 'original_max_position_embeddings'",
    ),
    ("qwen2", {"hidden_size": None}, "has no 'hidden_size'"),
    ("qwen2", {"rms_norm_eps": None}, "has no 'rms_norm_eps'"),
    ("qwen2", {"num_attention_heads": None}, "has no 'num_attention_heads'"),
    ("qwen2", {"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' is not a positive number"),
    ("qwen2", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not a positive number"),
    ("qwen2", {"rope_theta": [1e6]}, "rope_theta=[1000000.0] is not a positive number"),
    ("qwen2", {"rope_theta": ""}, "rope_theta='' is not a positive number"),
    ("qwen2", {"rope_theta": 0}, "rope_theta=0 is not a positive number"),
    ("llama3", {"rope_scaling": {**LLAMA3, "factor": "8x"}}, "factor='8x' is not a positive n"),
    ("qwen3", {"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta='1e6' is not a positive n"),
    (
        "llama3",
        {"rope_scaling": "linear"},
        """rope_scaling='linear' is not an object such as {"rope_type": "default"}""",
    ),
    ("llama3", {"rope_scaling": [1]}, "rope_scaling=[1] is not an object such as"),
    ("qwen3", {"rope_parameters": 1e6}, "rope_parameters=1000000.0 is not an object such as"),
    ("llama3", {"rope_scaling": {"rope_type": ["llama3"]}}, "is not supported; rope_type default"),
    ("qwen2", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is not true or false"),
    ("qwen2", {"use_sliding_window": "false"}, "use_sliding_window='false' is not true or false"),
    ("qwen3", {"attention_bias": 0}, "attention_bias=0 is not true or false"),
    ("llama3", {"mlp_bias": []}, "mlp_bias=[] is not true or false"),
    ("qwen2", {"hidden_size": "32"}, "hidden_size='32' is not a positive whole number"),
    ("qwen2", {"num_hidden_layers": True}, "num_hidden_layers=True is not a positive whole"),
    ("qwen2", {"vocab_size": 48.0}, "vocab_size=48.0 is not a positive whole number"),
    ("qwen2", {"num_key_value_heads": "2"}, "num_key_value_heads='2' is not a positive whole"),
    ("qwen2", {"num_key_value_heads": 0}, "num_key_value_heads=0 is not a positive whole"),
    ("qwen3", {"head_dim": [12]}, "head_dim=[12] is not a positive whole number"),
    ("qwen3", {"head_dim": 12.5}, "head_dim=12.5 is not a positive whole number"),
    ("qwen2", {"model_type": ["qwen2"]}, "model_type=['qwen2'] is not supported; qwen2, qwen3 or"),
    ("qwen2", {"hidden_act": {"a": 1}}, "hidden_act={'a': 1} is not supported; silu is"),
]


@pytest.mark.parametrize("family, changes, says", BAD_CONFIGS)
def test_a_config_that_is_not_supported_is_refused_in_one_line(tmp_path, family, changes, says):
    changed = {**FAMILIES[family], **changes}
    write_config(tmp_path, {key: value for key, value in changed.items() if value is not None})
    refused(lambda: hf.read_config(tmp_path), str(tmp_path / "config.json"), says)


def test_a_key_that_is_null_is_as_if_it_were_missing(tmp_path: Path) -> None:
    """As transformers writes the keys that a model does not have."""
    write_config(tmp_path, FAMILIES["qwen2"])
    expected = hf.read_config(tmp_path)
    optional = "rope_scaling rope_parameters head_dim hidden_act use_sliding_window mlp_bias"
    write_config(tmp_path, {**FAMILIES["qwen2"], **dict.fromkeys(optional.split())})
    assert hf.read_config(tmp_path) == expected
    write_config(tmp_path, {**FAMILIES["qwen2"], "rms_norm_eps": None})
    refused(lambda: hf.read_config(tmp_path), "config.json has no 'rms_norm_eps'")


def test_a_qwen2_config_may_name_the_biases_it_always_has(tmp_path: Path) -> None:
    write_config(tmp_path, {**FAMILIES["qwen2"], "attention_bias": True})
    assert hf.read_config(tmp_path).qkv_bias


@pytest.mark.parametrize(
    "content, says",
    [
        (None, "has no config.json; give a Hugging Face folder"),
        (b"{'model_type': 'qwen2'}", "config.json is not JSON: Expecting property name"),
        (b"", "config.json is not JSON: Expecting value"),
        (b"\xff\xfe{\x00", "config.json is not JSON: 'utf-8' codec"),
        (b"[1]", "config.json is not a JSON object"),
        (b"[" * 20_000, "config.json is not JSON: maximum recursion depth"),
    ],
)
def test_a_folder_without_a_readable_config_is_refused_in_one_line(tmp_path, content, says):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    refused(lambda: hf.read_config(tmp_path), str(tmp_path), says)


# ---- Weights -------------------------------------------------------------------------------------


def write_shards(folder: Path, shards: list[dict[str, np.ndarray]]) -> None:
    """Writes the tensors as several files with an index, as large checkpoints have them."""
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name)
    places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def halves(all_tensors: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Two shards, each with some tensors of every layer."""
    names = sorted(all_tensors, key=lambda name: name[::-1])
    return [{n: all_tensors[n] for n in names[i::2]} for i in range(2)]


@pytest.mark.parametrize("mesh_shape", ["1,8,1", "2,2,2"])
@pytest.mark.parametrize("sharded", [False, True], ids=["one_file", "index"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_loading_and_writing_gives_back_every_tensor(tmp_path, dtype, sharded, mesh_shape):
    family = "qwen3" if sharded else "qwen2"
    source = {name: x.astype(dtype) for name, x in tensors(FAMILIES[family]).items()}
    write_config(tmp_path, FAMILIES[family])
    if sharded:
        write_shards(tmp_path, halves(source))
    else:
        save_file(source, tmp_path / "model.safetensors")
    model = hf.read_config(tmp_path)
    params = hf.load_params(tmp_path, model, mesh(mesh_shape), np.float32)
    leaves = jax.tree.leaves(params)
    shardings = jax.tree.leaves(param_shardings(model, mesh(mesh_shape)))
    assert all(x.dtype == np.float32 for x in leaves)
    assert all(x.sharding == s for x, s in zip(leaves, shardings, strict=True))
    saved = dict(hf.hf_tensors(params, model))
    assert saved.keys() == source.keys()
    for name, x in source.items():
        np.testing.assert_array_equal(saved[name], x.astype(np.float32), err_msg=name)


def test_tensors_that_were_written_load_again_to_the_bit(tmp_path: Path) -> None:
    model = hf.read_config(write_folder(tmp_path, "llama3"))
    params = hf.load_params(tmp_path, model, mesh(), ml_dtypes.bfloat16)
    save_file(dict(hf.hf_tensors(params, model)), tmp_path / "model.safetensors")
    again = hf.load_params(tmp_path, model, mesh("8,1,1"), ml_dtypes.bfloat16)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        assert x.dtype == y.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_matrices_are_input_by_output_stacked_by_layer_and_sharded(tmp_path: Path) -> None:
    params = load(write_folder(tmp_path, "qwen2"))
    source = tensors(FAMILIES["qwen2"])
    down = source["model.layers.1.mlp.down_proj.weight"]  # [32, 40]
    np.testing.assert_array_equal(params.layers.down[1], down.T)
    assert params.layers.down.addressable_shards[0].data.shape == (2, 5, 32)
    assert params.embed.sharding.spec == PartitionSpec("tp", "fsdp")
    np.testing.assert_array_equal(params.lm_head, source["lm_head.weight"])


def test_a_tied_checkpoint_may_repeat_its_embedding(tmp_path: Path) -> None:
    source = tensors(FAMILIES["qwen2_tied"])
    extra = {
        "lm_head.weight": source["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    write_config(tmp_path, FAMILIES["qwen2_tied"])
    save_file({**source, **extra}, tmp_path / "model.safetensors")
    params = load(tmp_path)
    assert params.lm_head is None
    assert dict(hf.hf_tensors(params, hf.read_config(tmp_path))).keys() == source.keys()


WQ, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"


def without(name: str) -> Callable:
    return lambda t: {n: x for n, x in t.items() if n != name}


@pytest.mark.parametrize(
    "damage, says",
    [
        (without(WQ), f"lacks tensors {WQ}"),
        (without("lm_head.weight"), "lacks tensors lm_head.weight"),
        (lambda t: {**t, "model.extra": t[NORM]}, "has unknown tensors model.extra"),
        (
            lambda t: {n: x for n, x in t.items() if ".bias" not in n},
            "lacks tensors model.layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.q_proj."
            "bias, model.layers.0.self_attn.v_proj.bias and 3 more",
        ),
        (lambda t: {**t, WQ: t[WQ][:-1]}, f"{WQ} is [31, 32], config.json says [32, 32]"),
        (lambda t: {**t, NORM: t[NORM][None]}, f"{NORM} is [1, 32], config.json says [32]"),
        (lambda t: {**t, WQ: t[WQ].astype(np.int8)}, f"{WQ} is I8, not F32/F16/BF16"),
        (lambda t: {**t, WQ: t[WQ].astype(np.float64)}, f"{WQ} is F64, not F32/F16/BF16"),
    ],
)
def test_wrong_tensors_are_named_in_one_line(tmp_path: Path, damage: object, says: str) -> None:
    write_config(tmp_path, FAMILIES["qwen2"])
    save_file(damage(tensors(FAMILIES["qwen2"])), tmp_path / "model.safetensors")
    refused(lambda: load(tmp_path), f"MODEL_PATH={tmp_path}", says)


def test_damaged_files_are_named_in_one_line(tmp_path: Path) -> None:
    write_config(tmp_path, FAMILIES["qwen2"])
    first, second = halves(tensors(FAMILIES["qwen2"]))
    name, file = next(iter(first)), tmp_path / "model-00002-of-00002.safetensors"

    write_shards(tmp_path, [first, {**second, name: first[name]}])
    refused(lambda: load(tmp_path), f"{file} repeats tensor {name} of another file")

    write_shards(tmp_path, [first, second])
    file.write_bytes(file.read_bytes()[:-7])
    refused(lambda: load(tmp_path), f"{file} is not a complete safetensors file")

    file.unlink()
    refused(lambda: load(tmp_path), f"MODEL_PATH={tmp_path} has no {file.name}")

    index = tmp_path / "model.safetensors.index.json"
    for text, says in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        index.write_text(text)
        refused(lambda: load(tmp_path), f"{index} {says}")

    index.unlink()
    refused(lambda: load(tmp_path), "has no model.safetensors; weights are read as safetensors")

    pointer = tmp_path / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988\n")
    refused(lambda: load(tmp_path), f"{pointer} is not a complete safetensors file")


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_opens_the_written_weights_and_gives_the_same_logits(tmp_path, family):
    pytest.importorskip("torch", reason="opens the folder with transformers' torch model")
    model = hf.read_config(write_folder(tmp_path, family))
    ours = tmp_path / "ours"
    ours.mkdir()
    write_config(ours, FAMILIES[family])
    written = dict(hf.hf_tensors(load(tmp_path), model))
    save_file(written, ours / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_array_equal(transformers_logits(ours), transformers_logits(tmp_path))


# ---- The hub -------------------------------------------------------------------------------------


class Refuses(http.server.BaseHTTPRequestHandler):
    """Answers 401 to a client of the hub (no such repository) and 407 to a client of a proxy."""

    def do_GET(self) -> None:
        self.send_response(407 if self.command == "CONNECT" else 401)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_CONNECT = do_GET

    def log_message(self, *_) -> None:
        pass


def test_a_hub_that_does_not_give_the_model_is_an_error_of_one_line(tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    cases = {  # a variable of the environment -> a part of the error
        ("HF_HUB_OFFLINE", "1"): "outgoing traffic has been disabled",
        ("HF_ENDPOINT", "http://127.0.0.1:1"): "Connection refused",
        ("HF_ENDPOINT", here): "Repository Not Found",
        ("HTTPS_PROXY", here): "ProxyError: 407",
    }
    code = """if True:
        from models import hf
        from runtime.mistakes import UserMistake
        try:
            hf.fetch_model("nobody/nothing-here")
        except UserMistake as error:
            print(error)
    """
    base = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and k[:3] != "HF_"}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=TINY.parent,
            text=True,
            stdout=subprocess.PIPE,
            env={**base, "HF_HOME": str(tmp_path), name: value},
        )
        for name, value in cases
    ]
    lines = [run.communicate(timeout=120)[0].splitlines() for run in runs]
    server.shutdown()
    for (printed,), says in zip(lines, cases.values(), strict=True):
        assert printed.startswith("MODEL_PATH=nobody/nothing-here: no such folder, and the hub say")
        assert says in printed


def test_a_folder_is_used_in_place(tmp_path: Path) -> None:
    assert hf.fetch_model(str(tmp_path)) == tmp_path
