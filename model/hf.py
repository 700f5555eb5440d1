"""Reads and writes Hugging Face folders: config.json, weights and tokenizer."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from infra.log import progress_bar
from infra.mistakes import UserMistake, in_one_line
from infra.settings import read_text
from model.layout import on_host
from model.params import Gemma3, Leaf, ModelConfig, Params, param_table, trained, unrolled

FILES = ["*.json", "*.safetensors", "*.jinja"]
LARGEST_FILE = "5GB"  # of the weights of an exported model
WEIGHTS, ADAPTERS = "model.safetensors", "adapter_model.safetensors"
TEMPLATES = "additional_chat_templates"  # a folder with named chat templates, such as tool_use
MORE_TOKENS = 16  # that a tokenizer may have beyond the model's rows, such as a [PAD] of a trainer
MARKERS = ("config.json", "adapter_config.json")  # of a complete folder: a model, or adapters
EXPORTED = "exported_from.json"  # marks an exported model, which a later export may replace
# In the files of a Gemma 3 that also sees images, the names of its model of text begin so.
OF_TEXT, OF_IMAGES = "language_model.", ("vision_tower.", "multi_modal_projector.")
# What the config.json of a Gemma 3 may leave out; those of 4B and more leave out most of it.
GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


def fetch_model(path: str, revision: str = "", files: Sequence[str] = FILES) -> Path:
    """The local folder of a model: `path` itself, or the cached download of a hub id."""
    if Path(path).is_dir():
        return Path(path)
    if path.startswith(("/", "~", "./", "../")):  # this is no id of a model on the hub
        raise UserMistake(f"MODEL_PATH={path}: this folder does not exist")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision or None, allow_patterns=files))
    except Exception as error:  # errors of the hub, of its transports and of proxies share no base
        text = f"MODEL_PATH={path}: no such folder, and the hub says: {in_one_line(error)}"
        raise UserMistake(text) from None


def read_model(folder: Path, chat_template: str) -> tuple[ModelConfig, Any]:
    """The ModelConfig and the tokenizer of a folder. The weights are checked, but not read.

    Raises UserMistake for a folder that is not complete, or whose model is not supported.
    """
    model = read_config(folder)
    tokenizer = load_tokenizer(folder, chat_template)
    if len(tokenizer) > model.vocab_size + MORE_TOKENS:
        raise UserMistake(
            f"MODEL_PATH={folder}: its tokenizer has {len(tokenizer)} tokens, its config.json "
            f"vocab_size={model.vocab_size}; they are of two models"
        )
    files = open_tensors(folder, param_table(model))  # for its mistakes
    if model.tied and (head := files.get("lm_head.weight")):
        embed, V = files["model.embed_tokens.weight"], model.vocab_size
        parts = [slice(i, min(i + 4096, V)) for i in range(0, V, 4096)]  # which memory can hold
        if head.get_shape() != embed.get_shape() or any((head[x] != embed[x]).any() for x in parts):
            why = "tie_word_embeddings is true, but lm_head.weight is not the embedding"
            raise UserMistake(f"{folder}/config.json: {why}; set it to false, or delete the tensor")
    return model, tokenizer


def read_config(folder: Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder.

    Raises UserMistake, naming the key of config.json, for a model that is not supported.
    """
    path = folder / "config.json"
    _stop_if_without(folder, "config.json", "give a Hugging Face folder")
    # transformers writes null for what a model does not have.
    values = read_json(path)
    c = {key: value for key, value in _of_text(values).items() if value is not None}
    model_type = c.get("model_type")
    is_gemma = model_type == "gemma3_text"
    c = GEMMA3 | c if is_gemma else c
    if quantized := values.get("quantization_config") or c.get("quantization_config"):
        method = quantized.get("quant_method", "bitsandbytes")  # which did not write it at first
        raise UserMistake(f"{path}: weights in {method} format are not read; use unquantized ones")

    def need(ok: bool, key: str, supported: str) -> None:
        if not ok:
            raise UserMistake(f"{path}: {key}={c.get(key)!r} is not supported; {supported} is")

    known = is_gemma or model_type in ("qwen2", "qwen3", "llama")
    need(known, "model_type", "qwen2, qwen3, llama, gemma3_text or gemma3")
    need(c.get("hidden_act", "silu") == "silu", "hidden_act", "silu")
    need(not c.get("use_sliding_window", False), "use_sliding_window", "false")
    need(not c.get("mlp_bias", False), "mlp_bias", "false")
    # Qwen2 always has the three biases. Every release of Qwen3 and Llama has false in this key.
    need(not c.get("attention_bias", False) or model_type == "qwen2", "attention_bias", "false")
    # transformers 5 writes rope_parameters; earlier versions write rope_theta and rope_scaling.
    key = "rope_parameters" if "rope_parameters" in c else "rope_scaling"
    rope = c.get(key, {})
    rope, local_rope = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    scaled = "linear" if is_gemma else "llama3"
    need(rope_type in ("default", scaled), key, f"rope_type default or {scaled}")
    llama3 = gemma3 = None
    try:
        if is_gemma:
            factor = float(rope["factor"]) if rope_type == "linear" else 1.0
            gemma3 = _gemma3(c, factor, local_rope, need)._replace(
                sees_images="text_config" in values
            )
        if rope_type == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            original = int(rope["original_max_position_embeddings"])
            llama3 = (*(float(rope[name]) for name in names), original)
        return ModelConfig(
            vocab_size=c["vocab_size"],
            hidden_size=c["hidden_size"],
            intermediate_size=c["intermediate_size"],
            num_layers=c["num_hidden_layers"],
            num_heads=c["num_attention_heads"],
            num_kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
            head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
            rms_norm_eps=float(c["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0),
            rope_llama3=llama3,
            tied=c.get("tie_word_embeddings", False),
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3" or is_gemma,
            max_positions=c["max_position_embeddings"],
            gemma3=gemma3,
        )
    except KeyError as missing:
        raise UserMistake(f"{path} has no {missing.args[0]!r}") from None


def _of_text(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a config.json; of a Gemma 3 that also sees images, those of its model of text,
    which transformers opens alone, too."""
    if values.get("model_type") != "gemma3":
        return values
    return values.get("text_config", {}) | {"architectures": ["Gemma3ForCausalLM"]}


def _gemma3(
    c: dict[str, Any], rope_factor: float, local_rope: dict[str, Any], need: Callable
) -> Gemma3:
    """What config.json says of Gemma 3 alone. local_rope: what it says of the rotary angles of
    local layers. need: of read_config."""
    gelu = "gelu_pytorch_tanh"
    need(c["hidden_activation"] == gelu, "hidden_activation", gelu)
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        need(not c.get(key), key, "null")
    is_default = local_rope.get("rope_type", "default") == "default"
    need(is_default, "rope_parameters", "rope_type default for sliding_attention")
    L, local, whole = c["num_hidden_layers"], "sliding_attention", "full_attention"
    every = c.get("sliding_window_pattern", c.get("_sliding_window_pattern", 6))
    types = c.get("layer_types", [local if (i + 1) % every else whole for i in range(L)])
    known = len(types) == L and {*types} <= {local, whole}
    need(known, "layer_types", f"{local} or {whole} for each of the {L} layers")
    return Gemma3(
        query_scalar=float(c["query_pre_attn_scalar"]),
        rope_factor=rope_factor,
        local_rope_theta=float(local_rope.get("rope_theta", c["rope_local_base_freq"])),
        window=c["sliding_window"],
        local_layers=tuple(layer_type == local for layer_type in types),
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # such as a download that has stopped
        raise UserMistake(f"{path} is not JSON: {error}") from None


# ---- Weights -------------------------------------------------------------------------------------


def load_params(
    folder: Path,
    model: ModelConfig,
    mesh: Mesh,
    dtype: Any,
    layer_loop: str = "scan",
    *,
    adapters: bool = False,
) -> Params:
    """The weights of a folder's safetensors files on a mesh, arranged for this layer_loop: all but
    adapters, or the adapters alone of a folder of PEFT.

    A process reads only the parts of the tensors that its devices hold. Raises UserMistake, naming
    the tensor, if one is missing or unknown, or has a wrong shape.
    """
    table = param_table(model, layer_loop)
    table = trained(table) if adapters else table.replace(adapters=None)
    files = open_tensors(folder, table)

    def read(leaf: Leaf) -> jax.Array:
        def slice_of(name: str, index: tuple[slice, ...]) -> np.ndarray:
            tensor = files[name]
            return tensor[index[::-1]].T if leaf.transposed else tensor[index]

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            if "{}" not in leaf.name:
                return slice_of(leaf.name, index).astype(dtype)
            numbers = range(leaf.shape[0])[index[0]]
            layers = [slice_of(leaf.name.format(i), index[1:]) for i in numbers]
            return np.stack(layers).astype(dtype)

        sharding = NamedSharding(mesh, PartitionSpec(*leaf.axes))
        array = jax.make_array_from_callback(leaf.shape, sharding, shard)
        bar.update()
        return array

    with progress_bar("loading weights", len(jax.tree.leaves(table)), "arrays") as bar:
        return jax.tree.map(read, table)


def hf_tensors(params: Params, model: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """The (name, array) pairs of a Hugging Face checkpoint, in the dtype of params: all weights
    without adapters, or adapters alone, which are named as PEFT does.

    Only one tensor at a time is gathered on the host. All processes have to take all tensors.
    """
    table = param_table(model, "unroll" if unrolled(params.layers) else "scan")
    table = trained(table) if params.adapters else table.replace(adapters=None)
    leaves = jax.tree.leaves(table)
    for leaf, array in zip(leaves, jax.tree.leaves(params), strict=True):
        stacked = "{}" in leaf.name
        for i in range(leaf.shape[0] if stacked else 1):
            tensor = on_host(array[i] if stacked else array)
            tensor = np.ascontiguousarray(tensor.T if leaf.transposed else tensor)
            yield leaf.name.format(i), tensor


def save_model(
    folder: Path,
    params: Params,
    model: ModelConfig,
    source: Path,
    *,
    dtype: Any,
    chat_template: str = "",
) -> None:
    """Writes the weights as a Hugging Face folder that transformers opens; tied heads stay tied.

    All processes have to call it, and process 0 writes; config.json comes last, so that it marks a
    complete folder.
    source: the folder of the model that was trained, whose config and tokenizer are copied.
    dtype: of the written weights, float32 or bfloat16.
    chat_template: replaces the tokenizer's template; "" keeps the tokenizer's.
    Raises OSError.
    """
    dtype, writes = np.dtype(dtype), jax.process_index() == 0
    split = split_state_dict_into_shards_factory(
        _tensor_shapes(param_table(model).replace(adapters=None)),
        get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=LARGEST_FILE,
    )
    if writes:
        begin_folder(folder, str(source))
    # A file is written as soon as its last tensor has come, so that the host holds little.
    held: dict[str, dict[str, np.ndarray]] = {name: {} for name in split.filename_to_tensors}
    with progress_bar("exporting the model", len(split.tensor_to_filename), "tensors") as bar:
        for name, array in hf_tensors(params, model):
            if writes:
                file = split.tensor_to_filename[name]
                held[file][name] = array.astype(dtype)
                if len(held[file]) == len(split.filename_to_tensors[file]):
                    save_tensors(held.pop(file), folder / file)
            bar.update()
    if not writes:
        return
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for file in source.iterdir():
        # The source may itself be an export, which names the model that it comes from.
        written = file.name in ("config.json", EXPORTED) or "safetensors" in file.name
        if file.suffix in (".json", ".jinja", ".txt") and not written:
            shutil.copyfile(file, folder / file.name)
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    elif (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES)
    values = _of_text(read_json(source / "config.json"))
    values["torch_dtype" if "torch_dtype" in values else "dtype"] = dtype.name
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def stop_if_overwritten(export_hf: str, output_dir: str, model_folder: Path) -> None:
    """Raises UserMistake if the export would overwrite a model that no run has exported."""
    if export_hf == "none" or not (export_hf or output_dir):
        return
    folder = Path(export_hf or f"{output_dir}/hf")
    name = f"EXPORT_HF={folder}" if export_hf else f"OUTPUT_DIR={output_dir}: its hf"
    if folder.resolve() == model_folder.resolve():
        raise UserMistake(f"{name} is MODEL_PATH; the model would be overwritten")
    if any((folder / marker).exists() for marker in MARKERS) and not (folder / EXPORTED).exists():
        raise UserMistake(f"{name} holds a model that no run has exported; choose another folder")


def begin_folder(folder: Path, source: str) -> None:
    """Makes the folder of an export of the trained model `source`, and removes what an earlier
    export has left there: first the files that mark a complete folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EXPORTED).write_text(json.dumps({"model": source}) + "\n", encoding="utf-8")
    template = folder / "chat_template.jinja"
    weights = folder.glob("*model*.safetensors*")
    for old in [*(folder / marker for marker in MARKERS), template, *weights]:
        old.unlink(missing_ok=True)
    if (folder / TEMPLATES).is_dir():
        shutil.rmtree(folder / TEMPLATES)


def save_tensors(tensors: dict[str, np.ndarray], file: Path) -> None:
    try:
        save_file(tensors, file, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file.name}: {error}") from None
    umask = os.umask(0)  # it is read by setting it
    os.umask(umask)
    file.chmod(0o666 & ~umask)  # safetensors lets only the owner read the file


def _tensor_shapes(table: Params) -> dict[str, list[int]]:
    """Name -> shape of every tensor of a Hugging Face checkpoint."""
    shapes = {}
    for leaf in jax.tree.leaves(table):
        layers, shape = (leaf.shape[0], leaf.shape[1:]) if "{}" in leaf.name else (1, leaf.shape)
        for i in range(layers):
            shapes[leaf.name.format(i)] = list(shape[::-1] if leaf.transposed else shape)
    return shapes


def open_tensors(folder: Path, table: Params) -> dict[str, Any]:
    """Tensor name -> the tensor in its file, of which nothing is read yet. Raises UserMistake for
    tensors that are not those of the table."""
    file = ADAPTERS if table.embed is None else WEIGHTS
    index = folder / f"{file}.index.json"  # adapters have none
    shards = {file}  # comes first, as in transformers: an index beside it may be an old one
    if index.is_file() and not (folder / file).is_file():
        shards = set(read_json(index)["weight_map"].values())
    files: dict[str, Any] = {}
    for name in sorted(shards):
        _stop_if_without(folder, name, "weights are read as safetensors")
        try:
            handle = safe_open(folder / name, framework="numpy")
        except Exception as error:  # safetensors has no public type for a damaged header
            text = f"{folder / name} is not a complete safetensors file: {error}"
            raise UserMistake(text) from None
        names = [name for name in handle.keys() if not name.startswith(OF_IMAGES)]  # noqa: SIM118
        files |= {name.removeprefix(OF_TEXT): handle.get_slice(name) for name in names}
    wanted = _tensor_shapes(table)
    # Tied checkpoints may repeat the embedding, and old checkpoints store the rotary frequencies.
    ignored = {n for n in files if n == "lm_head.weight" or n.endswith("rotary_emb.inv_freq")}
    known = {"F64", "F32", "F16", "BF16", "I64", "BOOL"}  # the last two are of buffers
    if others := {x.get_dtype() for x in files.values()} - known:
        why = f"weights in {', '.join(sorted(others))} format are not read; use unquantized ones"
        raise UserMistake(f"MODEL_PATH={folder}: {why}")
    missing, unknown = sorted(wanted.keys() - files), sorted(files.keys() - wanted - ignored)
    for what, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserMistake(f"MODEL_PATH={folder} {what} tensors {', '.join(names[:3])}{more}")
    for name, shape in wanted.items():
        found = files[name].get_shape()
        if found != shape:
            raise UserMistake(f"MODEL_PATH={folder}: {name} is {found}, its config says {shape}")
    return files


def _stop_if_without(folder: Path, name: str, why: str) -> None:
    """Raises UserMistake if the folder has no such file; it names weights of another format."""
    if not (folder / name).is_file():
        others = [*folder.glob("*model*.bin*"), *folder.glob("*.gguf"), *folder.glob("*.pth")]
        instead = f", but {others[0].name}" if others else ""
        raise UserMistake(f"MODEL_PATH={folder} has no {name}{instead}; {why}")


# ---- Tokenizer -----------------------------------------------------------------------------------


def load_tokenizer(folder: Path, chat_template: str = "") -> Any:
    """The tokenizer of a model folder, exactly as its tokenizer.json describes it.

    chat_template: a Jinja file that replaces the tokenizer's template; "" keeps the tokenizer's.
    Raises UserMistake if the folder has no usable tokenizer or chat template.
    """
    # transformers would warn that PyTorch is missing, which this project does not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # This is not AutoTokenizer, which rebuilds the tokenizers of some model types (qwen2) by rules
    # of the type, and then gives other ids than the file does. The import takes a second.
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        raise UserMistake(f"MODEL_PATH={folder} has no tokenizer.json")
    try:
        # Some files ask to remove the spaces before punctuation from what a model has written.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder, clean_up_tokenization_spaces=False
        )
    except Exception as error:  # a damaged file raises errors that share no base
        text = f"MODEL_PATH={folder}: its tokenizer cannot be read: {in_one_line(error)}"
        raise UserMistake(text) from None
    if chat_template:
        tokenizer.chat_template = read_text(chat_template, "CHAT_TEMPLATE")
    if not tokenizer.chat_template:
        raise UserMistake(
            f"MODEL_PATH={folder}: its tokenizer has no chat template; use an instruct model, or "
            f"set CHAT_TEMPLATE to a Jinja file such as docs/chat_template.jinja"
        )
    return tokenizer


def stop_ids(folder: Path, tokenizer: Any, vocab_size: float = math.inf) -> tuple[int, ...]:
    """Every token id that ends a completion, sorted, by generation_config.json, config.json and the
    tokenizer, below vocab_size. Raises UserMistake if none of them names such a stop token."""
    named = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            named.append(read_json(folder / name).get("eos_token_id"))
    found = {i for ids in named for i in (ids if isinstance(ids, list) else [ids])} - {None}
    found = {i for i in found if i < vocab_size}  # the model can draw no other
    if not found:
        raise UserMistake(f"MODEL_PATH={folder}: neither configs nor tokenizer name a stop token")
    return tuple(sorted(found))
