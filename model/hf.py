"""Reads and writes Hugging Face folders: config.json, weights and tokenizer."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
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
from model import families
from model.families import FUSED_EXPERTS, older_rope_keys, raise_if_without, read_json, text_values
from model.int8 import Int8, quantize
from model.layout import gather_to_host
from model.params import (
    Leaf,
    ModelConfig,
    Params,
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
MAX_EXTRA_TOKENS = 16
MARKERS = ("config.json", "adapter_config.json")  # of a complete folder: a model, or adapters
EXPORTED = "exported_from.json"  # marks an exported model, which a later export may replace
# Checkpoints of multimodal models: from the names of text tensors "language_model." is stripped;
# the tensors of the vision tower and of Qwen3.5's multi-token prediction (MTP) are not read.
TEXT_PREFIX, MTP = re.compile(r"^(base_model\.model\.)?(model\.)?language_model\."), "mtp."
UNREAD_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.visual.", MTP)
# Keys of config.json about tensors and code that an export leaves out: of MTP (some models call it
# nextn), and of Python files.
DROPPED_KEYS = re.compile("mtp|nextn|auto_map")


def fetch_model(path: str, revision: str = "", files: list[str] = MODEL_FILES) -> Path:
    """The local folder of a model: `path` itself, or the cached download of a hub id."""
    with reading(f"MODEL_PATH={path} cannot be read"):  # such as that of another user
        if Path(path).is_dir():
            return Path(path)
    if path.startswith(("/", "./", "../")) or path.count("/") > 1:  # never a hub id
        raise UserMistake(f"MODEL_PATH={path}: this folder does not exist")
    with reading(f"MODEL_PATH={path}: no such folder, and the hub says"):
        download = functools.partial(snapshot_download, path, revision=revision or None)
        return Path(download(allow_patterns=files, ignore_patterns=SECOND_COPY))


def read_config(folder: Path) -> ModelConfig:
    """The ModelConfig of a folder. With weights that have experts, it names their tensors as the
    weights do: each expert has its own, or all experts of a layer are stacked."""
    model = families.read_config(folder)
    if model.moe is None or not any(folder.glob("model*.safetensors*")):
        return model
    tensors = open_files(folder, WEIGHTS)
    fused = any(name.endswith(".mlp.experts.down_proj") for name in tensors)
    return dataclasses.replace(model, names=FUSED_EXPERTS if fused else ())


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
    if num_tokens > model.vocab_size + MAX_EXTRA_TOKENS:
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
    A process reads only the parts of the tensors that its devices hold, but all for int8. Raises
    UserMistake, naming the tensor, if one is missing or unknown, or has a wrong shape.
    """
    table = _without_or_only_adapters(param_table(model, layer_loop), adapters)
    tensors = open_tensors(folder, table)
    if vocab_size:
        cut = dataclasses.replace(model, vocab_size=vocab_size)
        table = _without_or_only_adapters(param_table(cut, layer_loop), adapters)

    def read(leaf: Leaf) -> jax.Array | Int8:
        shape = abstract_array(leaf, mesh, dtype)

        def shard(index: Any) -> np.ndarray:  # a slice for each dimension, also slice(None)
            pairs = zip(index, leaf.shape, strict=True)
            index = tuple(slice(*part.indices(size)[:2]) for part, size in pairs)
            part = np.empty([x.stop - x.start for x in index], leaf.dtype(dtype))
            if "{}" not in leaf.name:
                part[...] = read_weight(leaf, tensors, leaf.name, index)
            else:  # a layer at a time, as there is no memory for two copies of all experts
                for layer, i in zip(part, leaf.layers[index[0]], strict=True):
                    layer[...] = read_weight(leaf, tensors, leaf.name.format(i), index[1:])
            return part

        bar.update()
        if leaf.int8:
            return _read_int8(leaf, shape, tensors)
        return jax.make_array_from_callback(leaf.shape, shape.sharding, shard)

    with progress_bar("loading weights", len(jax.tree.leaves(table)), "arrays") as bar:
        return jax.tree.map(read, table)


def read_weight(
    leaf: Leaf, tensors: dict[str, Any], name: str, index: tuple[slice, ...]
) -> np.ndarray:
    """A part of the weight of one layer, from its tensor in a file, or from those of its experts.
    name: of the tensor. index: slices with numbers, of the weight's dimensions."""
    if "*" in name:
        names = [name.replace("*", str(e)) for e in range(index[0].start, index[0].stop)]
        return np.stack([read_weight(leaf, tensors, x, index[1:]) for x in names])
    tensor = tensors[name]
    if not leaf.transposed:
        return tensor[index]
    *others, columns, rows = index  # others: of a stack of matrices
    rows = slice(leaf.first_row + rows.start, leaf.first_row + rows.stop)
    return tensor[(*others, rows, columns)].swapaxes(-1, -2)


def _read_int8(leaf: Leaf, shape: Int8, tensors: dict[str, Any]) -> Int8:
    """A matrix as Int8. The host quantizes one matrix at a time and complete columns, so that the
    numbers are the same on each mesh, and no device has a float copy."""
    values, scale = (np.empty(x.shape, x.dtype) for x in shape)
    for place in np.ndindex(values.shape[:-2]):  # a layer, an expert
        name, expert = leaf.name, place
        if leaf.layers:
            name, expert = name.format(leaf.layers[place[0]]), place[1:]
        matrix = [slice(0, size) for size in leaf.shape[-2:]]
        index = (*(slice(e, e + 1) for e in expert), *matrix)
        weight = read_weight(leaf, tensors, name, index)
        values[place], scale[place] = quantize(weight.reshape(leaf.shape[-2:]))

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
    pairs = zip(leaves, jax.tree.leaves(params), strict=True)
    for name, group in itertools.groupby(pairs, lambda pair: pair[0].name):
        weights = [*group]  # the rows of one tensor
        leaf = weights[0][0]
        for i, number in enumerate(leaf.layers or [0]):
            rows = [gather_to_host(x[i] if leaf.layers else x) for _, x in weights]
            rows = [x.swapaxes(-1, -2) if leaf.transposed else x for x in rows]
            tensor = np.concatenate(rows, axis=-2) if rows[1:] else rows[0]
            tensor = np.ascontiguousarray(tensor)
            dtype_of_tensor = leaf.dtype(dtype or tensor.dtype)
            tensor, names = tensor.astype(dtype_of_tensor, copy=False), tensor_names(leaf, number)
            yield from zip(names, tensor if "*" in name else [tensor], strict=True)


def tensor_names(leaf: Leaf, layer: int = 0) -> list[str]:
    """The name of the tensor of a layer's weight, or the names of those of its experts."""
    name = leaf.name.format(layer)
    if "*" not in name:
        return [name]
    return [name.replace("*", str(e)) for e in range(leaf.shape[-3])]


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
    settings = folder / "tokenizer_config.json"
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        if settings.is_file():  # llama.cpp and older servers prefer the template in this file
            values = read_json(settings) | {"chat_template": chat_template}
            settings.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    elif (source / TEMPLATES).is_dir():
        (folder / TEMPLATES).mkdir()
        for path in (source / TEMPLATES).iterdir():  # copytree would also copy the permissions
            shutil.copyfile(path, folder / TEMPLATES / path.name)
    generation = source / "generation_config.json"
    values = read_json(generation) if generation.is_file() else {}
    values["eos_token_id"] = [*stop_ids]  # a base model may only name the end of a text
    (folder / generation.name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    values = text_values(read_json(source / "config.json"))
    values = {key: value for key, value in values.items() if not DROPPED_KEYS.search(key)}
    # For transformers 5 and for earlier ones.
    values |= {"dtype": dtype.name, "torch_dtype": dtype.name}
    values = older_rope_keys(values) | values
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
    shapes: dict[str, list[int]] = {}
    for leaf in jax.tree.leaves(table):
        shape = [*(leaf.shape[1:] if leaf.layers else leaf.shape)]
        if leaf.transposed:
            shape[-2:] = leaf.first_row + shape[-1], shape[-2]
        shape = shape[1:] if "*" in leaf.name else shape
        for i in leaf.layers or [0]:
            shapes |= dict.fromkeys(tensor_names(leaf, i), shape)
    return shapes


def open_tensors(folder: Path, table: Params) -> dict[str, Any]:
    """The tensors of a folder by name, of which nothing is read yet. Raises UserMistake for tensors
    that are not those of the table."""
    handles = open_files(folder, ADAPTERS if table.embed is None else WEIGHTS)
    are_read = [name for name in handles if not name.startswith(UNREAD_PREFIXES)]
    expected = _tensor_shapes(table)
    shorter = {x: x if x in expected else TEXT_PREFIX.sub(r"\1\2", x) for x in are_read}
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
        raise_if_without(folder, name, "weights are read as safetensors")
        with reading(f"{folder / name} is not a complete safetensors file"):
            handle = safe_open(folder / name, framework="numpy")
        tensors |= {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
    return tensors


# ---- Tokenizer -----------------------------------------------------------------------------------


def load_tokenizer(folder: Path, chat_template: str = "") -> Any:
    """The tokenizer of a model folder, exactly as its tokenizer.json describes it.

    chat_template: a Jinja file, or a tokenizer_config.json with a template, that replaces the
    tokenizer's template; "" keeps the tokenizer's.
    Raises UserMistake if the folder has no usable tokenizer or chat template.
    """
    # AutoTokenizer would rebuild the tokenizers of some model types (qwen2) by rules of the type,
    # and give other ids than the file.
    from transformers import PreTrainedTokenizerFast

    raise_if_without(folder, "tokenizer.json", "give a folder with the model's tokenizer")
    with reading(f"MODEL_PATH={folder}: its tokenizer cannot be read"):
        # Some files ask for removing spaces before punctuation from decoded text.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder, clean_up_tokenization_spaces=False
        )
    if tokenizer.split_special_tokens:
        reason = "split_special_tokens would spell the chat template's tokens, such as <|im_end|>"
        raise UserMistake(f"{folder}/tokenizer_config.json: {reason}; set it to false")
    if chat_template:
        text, is_json = read_text(chat_template, "CHAT_TEMPLATE"), chat_template.endswith(".json")
        values = read_json(Path(chat_template)) if is_json else {"chat_template": text}
        if not isinstance(values.get("chat_template"), str):
            reason = "has no text as chat_template; give a Jinja file"
            raise UserMistake(f"CHAT_TEMPLATE={chat_template} {reason}")
        tokenizer.chat_template = values["chat_template"]
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
            eos += [part.get("eos_token_id") for part in (values, text_values(values))]
    stops = {i for ids in eos for i in (ids if isinstance(ids, list) else [ids])} - {None}
    stops = {i for i in stops if i < vocab_size}  # the model draws no others
    if not stops:
        raise UserMistake(f"MODEL_PATH={folder}: neither configs nor tokenizer name a stop token")
    return tuple(sorted(stops))
