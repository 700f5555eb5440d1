"""Reads and writes Hugging Face folders: config.json, weights and tokenizer."""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from huggingface_hub import snapshot_download, split_state_dict_into_shards_factory
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from infra.log import progress_bar
from infra.mistakes import UserMistake, reading
from infra.settings import read_text
from model.int8 import Int8, quantize
from model.layout import gather_to_host
from model.params import (
    Gemma3,
    Leaf,
    ModelConfig,
    Params,
    Qwen35,
    abstract_array,
    is_unrolled,
    param_table,
    trainable_params,
)

MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]  # of a model, on the hub
SECOND_COPY = "consolidated*"  # Mistral's files of the same weights under other names
LARGEST_FILE = "5GB"  # of an exported model's weights
WEIGHTS, ADAPTERS = "model.safetensors", "adapter_model.safetensors"
TEMPLATES = "additional_chat_templates"  # a folder with named chat templates, such as tool_use
# A tokenizer may have this many tokens more than the model has rows, such as a trainer's [PAD].
MORE_TOKENS = 16
MARKERS = ("config.json", "adapter_config.json")  # of a complete folder: a model, or adapters
EXPORTED = "exported_from.json"  # marks an exported model, which a later export may replace
# Checkpoints of multimodal models: OF_TEXT matches the prefix of text tensors, from which
# "language_model." is stripped; NOT_READ are the prefixes of tensors that are not read, of the
# vision tower and of Qwen3.5's multi-token prediction (MTP).
OF_TEXT, MTP = re.compile(r"^(base_model\.model\.)?(model\.)?language_model\."), "mtp."
NOT_READ = ("vision_tower.", "multi_modal_projector.", "model.visual.", MTP)
# Keys of config.json about tensors and code that an export leaves out: of MTP (some models call it
# nextn), and of Python files.
LEFT_OUT = re.compile("mtp|nextn|auto_map")
# model_type of a model that also sees images -> the architecture of its text part
TEXT_PARTS = {"gemma3": "Gemma3ForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM"}
LIKE_LLAMA = ("qwen2", "qwen3", "llama", "mistral", "smollm3", "granite")  # values of model_type
LOCAL, LINEAR, GLOBAL = "sliding_attention", "linear_attention", "full_attention"  # types of layers
# Keys of config.json with the only value that is supported, which is also the default.
ONLY = {
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",  # of Gemma 3
    "use_sliding_window": False,
    "mlp_bias": False,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "attn_output_gate": True,  # of Qwen3.5
}
# Keys that a config.json must have, although transformers has defaults. The list of Gemma 3 is
# shorter, because its large models leave out the other keys.
SIZES = ["hidden_size", "intermediate_size", "num_hidden_layers"]
REQUIRED_OF_GEMMA = [*SIZES, "sliding_window"]
REQUIRED = [*SIZES, "vocab_size", "num_attention_heads", "rms_norm_eps", "max_position_embeddings"]


def fetch_model(path: str, revision: str = "", files: list[str] = MODEL_FILES) -> Path:
    """The local folder of a model: `path` itself, or the cached download of a hub id."""
    if Path(path).is_dir():
        return Path(path)
    if path.startswith(("/", "./", "../")) or path.count("/") > 1:  # never a hub id
        raise UserMistake(f"MODEL_PATH={path}: this folder does not exist")
    with reading(f"MODEL_PATH={path}: no such folder, and the hub says"):
        download = functools.partial(snapshot_download, path, revision=revision or None)
        return Path(download(allow_patterns=files, ignore_patterns=SECOND_COPY))


def read_model(folder: Path, chat_template: str) -> tuple[ModelConfig, Any]:
    """The ModelConfig and the tokenizer of a folder. The weights are checked, but not read.

    Raises UserMistake for a folder that is not complete, or whose model is not supported.
    """
    model = read_config(folder)
    tokenizer = load_tokenizer(folder, chat_template)
    check_weights(folder, model, len(tokenizer))
    return model, tokenizer


def check_weights(folder: Path, model: ModelConfig, num_tokens: int) -> None:
    """Raises UserMistake unless the folder's weights are those of the model and of its tokenizer,
    which has this number of tokens."""
    if num_tokens > model.vocab_size + MORE_TOKENS:
        raise UserMistake(
            f"MODEL_PATH={folder}: its tokenizer has {num_tokens} tokens, its config.json "
            f"vocab_size={model.vocab_size}; they are of two models"
        )
    tensors = open_tensors(folder, param_table(model))  # for its mistakes
    if mtp := sum(name.startswith(MTP) for name in open_files(folder, WEIGHTS)):
        reason = (
            f"its {mtp} tensors {MTP}*, which predict several tokens, are not trained or exported"
        )
        print(f"note: {folder}: {reason}", flush=True)
    if model.tied and (head := tensors.get("lm_head.weight")):
        embed, V = tensors["model.embed_tokens.weight"], model.vocab_size
        parts = [slice(i, min(i + 4096, V)) for i in range(0, V, 4096)]  # to save memory
        if head.get_shape() != embed.get_shape() or any((head[x] != embed[x]).any() for x in parts):
            raise UserMistake(
                f"{folder}/config.json: tie_word_embeddings is true, but lm_head.weight is not the "
                f"embedding; set it to false, or delete the tensor"
            )


def read_config(folder: Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder. transformers fills in what config.json leaves out.

    Raises UserMistake, naming the key of config.json, for a model that is not supported.
    """
    path = folder / "config.json"
    _raise_if_without(folder, "config.json", "give a Hugging Face folder")
    file_values = read_json(path)
    # transformers writes null where a model does not have something.
    values = _without_nulls(_of_text(file_values))
    if quantized := file_values.get("quantization_config") or values.get("quantization_config"):
        # Early versions of bitsandbytes did not write their name.
        method = quantized.get("quant_method", "bitsandbytes")
        raise UserMistake(f"{path}: weights in {method} format are not read; use unquantized ones")

    def need(ok: bool, key: str, supported: str) -> None:
        if not ok:
            raise UserMistake(f"{path}: {key}={values.get(key)!r} is not supported; {supported} is")

    model_type = values.get("model_type")
    is_gemma, is_qwen35 = model_type == "gemma3_text", model_type == "qwen3_5_text"
    known = is_gemma or is_qwen35 or model_type in LIKE_LLAMA
    need(known, "model_type", f"{', '.join(LIKE_LLAMA)}, gemma3_text, gemma3 or qwen3_5")
    for key, value in ONLY.items():
        # Qwen2 always has the three biases. Every release of Qwen3 and Llama has false in this key.
        if (model_type, key) != ("qwen2", "attention_bias"):
            need(values.get(key, value) == value, key, json.dumps(value).strip('"'))
    for key in REQUIRED_OF_GEMMA if is_gemma else REQUIRED:
        if key not in values:
            raise UserMistake(f"{path} has no {key!r}")
    # transformers would warn that PyTorch is missing, which this project does not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoConfig  # a second

    with reading(f"{path} cannot be read"):
        # Without the folder none of its code can run. transformers changes the values that it gets.
        config = AutoConfig.for_model(**copy.deepcopy(values))
    rope, gemma3, llama3 = config.rope_parameters, None, None
    if is_gemma:
        local_rope, rope = rope[LOCAL], rope[GLOBAL]
        is_default = local_rope["rope_type"] == "default"
        need(is_default, "rope_parameters", f"rope_type default for {LOCAL}")
        need({*config.layer_types} <= {LOCAL, GLOBAL}, "layer_types", f"{LOCAL} or {GLOBAL}")
        gemma3 = Gemma3(
            rope_factor=float(rope["factor"]) if rope["rope_type"] == "linear" else 1.0,
            local_rope_theta=float(local_rope["rope_theta"]),
            window=config.sliding_window,
            local_layers=tuple(layer_type == LOCAL for layer_type in config.layer_types),
            sees_images="text_config" in file_values,
        )
    qwen35 = _qwen35(config, need) if is_qwen35 else None
    # transformers 5 writes rope_parameters, and earlier versions wrote rope_scaling.
    key = "rope_scaling" if "rope_scaling" in values else "rope_parameters"
    scaled = "linear" if is_gemma else "llama3"
    need(rope["rope_type"] in ("default", scaled), key, f"rope_type default or {scaled}")
    if rope["rope_type"] == "llama3":
        if "original_max_position_embeddings" not in values[key]:  # transformers would guess it
            raise UserMistake(f"{path}: {key} has no 'original_max_position_embeddings'")
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        llama3 = float(rope["factor"]), low, high, int(rope["original_max_position_embeddings"])
    head_dim = getattr(config, "head_dim", None)  # some files leave it out
    model = ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        rope_llama3=llama3,
        tied=config.tie_word_embeddings,
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3" or is_gemma or is_qwen35,
        max_positions=config.max_position_embeddings,
        gemma3=gemma3,
        qwen35=qwen35,
    )
    return dataclasses.replace(model, **_of_family(config, model, file_values))


def _of_family(config: Any, model: ModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of the ModelConfig that only this family sets. config: transformers'. values: of
    config.json."""
    if config.model_type == "gemma3_text":
        multiplier = math.sqrt(model.head_dim / config.query_pre_attn_scalar)
        return dict(embedding_multiplier=math.sqrt(model.hidden_size), query_multiplier=multiplier)
    if config.model_type == "granite":
        return dict(
            embedding_multiplier=config.embedding_multiplier,
            query_multiplier=config.attention_multiplier * math.sqrt(model.head_dim),
            residual_multiplier=config.residual_multiplier,
            logits_divisor=config.logits_scaling,
        )
    if config.model_type == "smollm3":
        return dict(nope_layers=tuple(not x for x in config.no_rope_layers[: model.num_layers]))
    if config.model_type == "mistral":
        # Within its sliding window a token sees all others. null turns it off.
        window = values.get("sliding_window", config.sliding_window) or math.inf
        return dict(max_positions=min(model.max_positions, window))
    return {}


def _qwen35(config: Any, need: Callable[[bool, str, str], None]) -> Qwen35:
    """The part of a ModelConfig of transformers' config of a Qwen3.5. need: see read_config."""
    is_silu = getattr(config, "output_gate_type", "silu") in ("silu", "swish")
    need(is_silu, "output_gate_type", "silu")
    is_default = config.rope_parameters["rope_type"] == "default"
    need(is_default, "rope_parameters", "rope_type default")
    linear_layers = [*config.layer_types, GLOBAL].index(GLOBAL)
    groups = [*[LINEAR] * linear_layers, GLOBAL] * (config.num_hidden_layers // (linear_layers + 1))
    supported = f"one number of {LINEAR} layers before each {GLOBAL} layer"
    need(config.layer_types == groups, "layer_types", supported)
    rotated = config.head_dim * config.rope_parameters.get("partial_rotary_factor", 0.25)
    return Qwen35(
        linear_layers=linear_layers,
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim,
        rotated=int(rotated),
    )


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """The values that are not null, also of dictionaries within them."""
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }


def _of_text(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a config.json; of a model that also sees images, those of its language model,
    which transformers can open."""
    if values.get("model_type") not in TEXT_PARTS:
        return values
    architecture = {"architectures": [TEXT_PARTS[values["model_type"]]]}
    tied = {key: values[key] for key in ("tie_word_embeddings",) if key in values}
    return tied | values.get("text_config", {}) | architecture


def read_json(path: Path) -> dict[str, Any]:
    with reading(f"{path} cannot be read"):
        return json.loads(path.read_text(encoding="utf-8"))


# ---- Weights -------------------------------------------------------------------------------------


def load_params(
    folder: Path,
    model: ModelConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    layer_loop: str = "scan",
    *,
    adapters: bool = False,
    vocab_size: int = 0,
) -> Params:
    """The weights of a folder's safetensors files on a mesh, arranged for this layer_loop: the
    model without adapters, or only the adapters of a PEFT folder.

    vocab_size: of the vocabulary's rows only the first so many are read; 0: all of them.
    A process reads only the parts of the tensors that its devices hold. Raises UserMistake, naming
    the tensor, if one is missing or unknown, or has a wrong shape.
    """
    table = _without_or_only_adapters(param_table(model, layer_loop), adapters)
    tensors = open_tensors(folder, table)
    if vocab_size:
        cut = dataclasses.replace(model, vocab_size=vocab_size)
        table = _without_or_only_adapters(param_table(cut, layer_loop), adapters)

    def read(leaf: Leaf) -> jax.Array | Int8:
        shape = abstract_array(leaf, mesh, dtype)

        def slice_of(name: str, index: tuple[slice, ...]) -> np.ndarray:
            tensor = tensors[name]
            return tensor[index[::-1]].T if leaf.transposed else tensor[index]

        def shard(index: Any) -> np.ndarray:  # a slice for each dimension, also slice(None)
            pairs = zip(index, leaf.shape, strict=True)
            index = tuple(slice(*part.indices(size)[:2]) for part, size in pairs)
            if "{}" not in leaf.name:
                return slice_of(leaf.name, index).astype(leaf.dtype(dtype))
            numbers = leaf.layers[index[0]]
            layers = [slice_of(leaf.name.format(i), index[1:]) for i in numbers]
            return np.stack(layers).astype(leaf.dtype(dtype))

        bar.update()
        if leaf.int8:
            return _read_int8(leaf, shape, tensors)
        return jax.make_array_from_callback(leaf.shape, shape.sharding, shard)

    with progress_bar("loading weights", len(jax.tree.leaves(table)), "arrays") as bar:
        return jax.tree.map(read, table)


def _read_int8(leaf: Leaf, shape: Int8, tensors: dict[str, Any]) -> Int8:
    """A matrix as Int8. The host quantizes one tensor at a time and complete columns, so that the
    numbers are the same on each mesh, and no device has a float copy."""
    values, scale = (np.empty(x.shape, x.dtype) for x in shape)
    for i, number in enumerate(leaf.layers or [0]):
        index = i if leaf.layers else ...
        values[index], scale[index] = quantize(tensors[leaf.name.format(number)][:].T)

    def put(x: np.ndarray, on_mesh: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(x.shape, on_mesh.sharding, lambda index: x[index])

    return Int8(put(values, shape.values), put(scale, shape.scale))


def hf_tensors(
    params: Params, model: ModelConfig, dtype: DTypeLike | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """The (name, array) pairs of a Hugging Face checkpoint, in this dtype or that of params, which
    are a model without adapters, or only adapters; these get the names of PEFT.

    Only one tensor at a time is gathered on the host. All processes have to take all tensors.
    """
    table = param_table(model, "unroll" if is_unrolled(params.layers) else "scan")
    leaves = jax.tree.leaves(_without_or_only_adapters(table, bool(params.adapters)))
    for leaf, array in zip(leaves, jax.tree.leaves(params), strict=True):
        for i, number in enumerate(leaf.layers or [0]):
            tensor = gather_to_host(array[i] if leaf.layers else array)
            tensor = np.ascontiguousarray(tensor.T if leaf.transposed else tensor)
            dtype_of_tensor = leaf.dtype(dtype or tensor.dtype)
            yield leaf.name.format(number), tensor.astype(dtype_of_tensor, copy=False)


def _without_or_only_adapters(table: Params, only_adapters: bool) -> Params:
    return trainable_params(table) if only_adapters else dataclasses.replace(table, adapters=None)


def save_model(
    folder: Path,
    tensors: Iterator[tuple[str, np.ndarray]],
    model: ModelConfig,
    source: Path,
    *,
    dtype: DTypeLike,
    stop_ids: Sequence[int],
    chat_template: str = "",
) -> None:
    """Writes the weights as a Hugging Face folder that transformers opens; tied heads stay tied.

    All processes have to call it, and process 0 writes. config.json comes last: it marks a complete
    folder.
    tensors: those of hf_tensors, in dtype.
    source: the folder of the model that was trained, whose config and tokenizer are copied.
    dtype: of the written weights, float32 or bfloat16.
    stop_ids: the tokens that end a completion, for generation_config.json.
    chat_template: replaces the tokenizer's template; "" keeps the tokenizer's.
    Raises OSError.
    """
    dtype, writes = np.dtype(dtype), jax.process_index() == 0
    split = split_state_dict_into_shards_factory(
        _tensor_shapes(_without_or_only_adapters(param_table(model), False)),
        get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=LARGEST_FILE,
    )
    if writes:
        prepare_export_folder(folder, str(source))
    # A file is written as soon as it has all its tensors, so that the host holds few of them.
    pending: dict[str, dict[str, np.ndarray]] = {name: {} for name in split.filename_to_tensors}
    with progress_bar("exporting the model", len(split.tensor_to_filename), "tensors") as bar:
        for name, array in tensors:
            if writes:
                file = split.tensor_to_filename[name]
                pending[file][name] = array
                if len(pending[file]) == len(split.filename_to_tensors[file]):
                    save_tensors(pending.pop(file), folder / file)
            bar.update()
    if not writes:
        return
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for path in source.iterdir():
        # The source may itself be an export, which names the model that it comes from.
        is_written = path.name in ("config.json", EXPORTED) or "safetensors" in path.name
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not is_written:
            shutil.copyfile(path, folder / path.name)
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    elif (source / TEMPLATES).is_dir():
        (folder / TEMPLATES).mkdir()
        for path in (source / TEMPLATES).iterdir():  # copytree would also copy the permissions
            shutil.copyfile(path, folder / TEMPLATES / path.name)
    generation = source / "generation_config.json"
    values = read_json(generation) if generation.is_file() else {}
    values["eos_token_id"] = [*stop_ids]  # a base model may only name the end of a text
    (folder / generation.name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    values = _of_text(read_json(source / "config.json"))
    values = {key: value for key, value in values.items() if not LEFT_OUT.search(key)}
    values |= {"dtype": dtype.name, "torch_dtype": dtype.name}  # transformers 5 and earlier ones
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def raise_if_overwriting(
    export_hf: str, output_dir: str, model_folder: Path, setting: str = "MODEL_PATH"
) -> None:
    """Raises UserMistake if the export would overwrite the model that the setting names, or a model
    that no run has exported."""
    if export_hf == "none" or not (export_hf or output_dir):
        return
    folder = Path(export_hf or f"{output_dir}/hf")
    name = f"EXPORT_HF={folder}" if export_hf else f"OUTPUT_DIR={output_dir}: its hf"
    if folder.resolve() == model_folder.resolve():
        raise UserMistake(f"{name} is {setting}; the model would be overwritten")
    has_model = any(folder.glob("*.safetensors")) or any((folder / x).exists() for x in MARKERS)
    if has_model and not (folder / EXPORTED).exists():
        raise UserMistake(f"{name} holds a model that no run has exported; choose another folder")


def prepare_export_folder(folder: Path, source: str) -> None:
    """Makes the folder of an export of the trained model `source`, and removes the files of an
    earlier export, first those that mark a complete folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EXPORTED).write_text(json.dumps({"model": source}) + "\n", encoding="utf-8")
    template = folder / "chat_template.jinja"
    weights = folder.glob("*model*.safetensors*")
    for path in [*(folder / marker for marker in MARKERS), template, *weights]:
        path.unlink(missing_ok=True)
    if (folder / TEMPLATES).is_dir():
        shutil.rmtree(folder / TEMPLATES)


def save_tensors(tensors: dict[str, np.ndarray], file: Path) -> None:
    try:
        save_file(tensors, file, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file.name}: {error}") from None
    umask = os.umask(0)  # the only way to read it is to set it
    os.umask(umask)
    with contextlib.suppress(OSError):  # mounts of buckets and of other systems refuse it
        file.chmod(0o666 & ~umask)  # safetensors makes files that only their owner can read


def _tensor_shapes(table: Params) -> dict[str, list[int]]:
    """The shape of every tensor of a Hugging Face checkpoint, by name."""
    shapes = {}
    for leaf in jax.tree.leaves(table):
        shape = leaf.shape[1:] if leaf.layers else leaf.shape
        for i in leaf.layers or [0]:
            shapes[leaf.name.format(i)] = list(shape[::-1] if leaf.transposed else shape)
    return shapes


def open_tensors(folder: Path, table: Params) -> dict[str, Any]:
    """The tensors of a folder by name, of which nothing is read yet. Raises UserMistake for tensors
    that are not those of the table."""
    handles = open_files(folder, ADAPTERS if table.embed is None else WEIGHTS)
    are_read = [name for name in handles if not name.startswith(NOT_READ)]
    expected = _tensor_shapes(table)
    shorter = {name: name if name in expected else OF_TEXT.sub(r"\1\2", name) for name in are_read}
    tensors = {shorter[name]: handles[name] for name in are_read}
    known = {"F64", "F32", "F16", "BF16", "I64", "BOOL"}  # the last two are of buffers
    if unread := {tensor.get_dtype() for tensor in tensors.values()} - known:
        formats = ", ".join(sorted(unread))
        text = f"weights in {formats} format are not read; use unquantized ones"
        raise UserMistake(f"MODEL_PATH={folder}: {text}")
    unknown = tensors.keys() - expected.keys()
    # Tied checkpoints may repeat the embedding, and old checkpoints store the rotary frequencies.
    unknown -= {x for x in unknown if x == "lm_head.weight" or x.endswith("rotary_emb.inv_freq")}
    for verb, names in (("lacks", expected.keys() - tensors), ("has unknown", unknown)):
        if names:
            text = ", ".join(sorted(names)[:3])
            text += f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserMistake(f"MODEL_PATH={folder} {verb} tensors {text}")
    for name, shape in expected.items():
        actual = tensors[name].get_shape()
        if actual != shape:
            raise UserMistake(f"MODEL_PATH={folder}: {name} is {actual}, its config says {shape}")
    return tensors


def open_files(folder: Path, file: str) -> dict[str, Any]:
    """The tensors of ADAPTERS or WEIGHTS of a folder, by their names there."""
    index = folder / f"{file}.index.json"  # adapters have none
    shards = {file}  # it is preferred, as in transformers: an index beside it may be an old one
    if index.is_file() and not (folder / file).is_file():
        shards = set(read_json(index)["weight_map"].values())
    tensors: dict[str, Any] = {}
    for name in sorted(shards):
        _raise_if_without(folder, name, "weights are read as safetensors")
        with reading(f"{folder / name} is not a complete safetensors file"):
            handle = safe_open(folder / name, framework="numpy")
        tensors |= {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
    return tensors


def _raise_if_without(folder: Path, name: str, reason: str) -> None:
    """Raises UserMistake if the folder has no such file; it names weights of another format."""
    if not (folder / name).is_file():
        unread = [*folder.glob("*model*.bin*"), *folder.glob("*.gguf"), *folder.glob("*.pth")]
        instead = f", but {unread[0].name}" if unread else ""
        raise UserMistake(f"MODEL_PATH={folder} has no {name}{instead}; {reason}")


# ---- Tokenizer -----------------------------------------------------------------------------------


def load_tokenizer(folder: Path, chat_template: str = "") -> Any:
    """The tokenizer of a model folder, exactly as its tokenizer.json describes it.

    chat_template: a Jinja file that replaces the tokenizer's template; "" keeps the tokenizer's.
    Raises UserMistake if the folder has no usable tokenizer or chat template.
    """
    # AutoTokenizer would rebuild the tokenizers of some model types (qwen2) by rules of the type,
    # and give other ids than the file.
    from transformers import PreTrainedTokenizerFast

    _raise_if_without(folder, "tokenizer.json", "give a folder with the model's tokenizer")
    with reading(f"MODEL_PATH={folder}: its tokenizer cannot be read"):
        # Some files ask for removing spaces before punctuation from decoded text.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder, clean_up_tokenization_spaces=False
        )
    if chat_template:
        tokenizer.chat_template = read_text(chat_template, "CHAT_TEMPLATE")
    if not tokenizer.chat_template:
        raise UserMistake(
            f"MODEL_PATH={folder}: its tokenizer has no chat template; use an instruct model, or "
            f"set CHAT_TEMPLATE to a Jinja file such as docs/chat_template.jinja"
        )
    return tokenizer


def read_stop_ids(folder: Path, tokenizer: Any, vocab_size: float = math.inf) -> tuple[int, ...]:
    """Every token id that ends a completion, sorted, by generation_config.json, config.json and the
    tokenizer, below vocab_size. Raises UserMistake if none of them names such a stop token."""
    eos = [tokenizer.eos_token_id]  # ids, lists of ids and None
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            values = read_json(folder / name)
            eos += [part.get("eos_token_id") for part in (values, _of_text(values))]
    stops = {i for ids in eos for i in (ids if isinstance(ids, list) else [ids])} - {None}
    stops = {i for i in stops if i < vocab_size}  # the model draws no others
    if not stops:
        raise UserMistake(f"MODEL_PATH={folder}: neither configs nor tokenizer name a stop token")
    return tuple(sorted(stops))
