"""LoRA: which matrices get adapters, the first adapters, the merge with the base, and PEFT folders.

A PEFT folder has adapter_config.json, which names the base, and adapter_model.safetensors. Lora in
model/params.py has the formula. The base, all weights but the adapters, never changes.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from infra.mistakes import UserMistake
from model import hf
from model.layout import gather_to_host
from model.params import (
    Adapter,
    Lora,
    ModelConfig,
    Params,
    arrange_layers,
    init_params,
    param_shardings,
    param_table,
    share_a,
    trainable_params,
)

CONFIG = "adapter_config.json"
# Keys of adapter_config.json that ask for more than plain LoRA.
UNSUPPORTED_KEYS = """bias use_dora use_rslora lora_bias fan_in_fan_out rank_pattern alpha_pattern
    modules_to_save layers_to_transform target_parameters trainable_token_indices
    alora_invocation_tokens""".split()
# Other values of init_lora_weights change the base.
SUPPORTED_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
REQUIRED_KEYS = dict(
    base_model_name_or_path=str, r=int, lora_alpha=int | float, target_modules=list | str
)


# ---- Which matrices get adapters -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, match_args=False)  # read only, like the fields of Config
class LoraSettings(Protocol):
    """The settings of the adapters and of their base, as config.Config describes them."""

    lora_rank: int
    lora_alpha: float
    lora_targets: str
    lora_base_dtype: str


def fetch_base(path: str, revision: str) -> tuple[Path, Path | None]:
    """The folder of the base model, and that of the adapters with which training begins, if `path`
    is a PEFT folder. Raises UserMistake."""
    folder = hf.fetch_model(path, revision)
    if not (folder / CONFIG).is_file():
        return folder, None
    base, base_revision = read_base_name(folder)
    weights = sorted(folder.glob("model*.safetensors"))  # such as those of an earlier merge
    if weights and Path(base).resolve() != folder.resolve():
        reason = f"is a folder of adapters for {base}, and {weights[0].name} would not be read"
        raise UserMistake(f"MODEL_PATH={folder} {reason}; keep only one of them there")
    try:
        return hf.fetch_model(base, base_revision), folder
    except UserMistake as error:
        raise UserMistake(f"the base of MODEL_PATH={folder}, by its {CONFIG}: {error}") from None


def read_base_name(adapters: Path) -> tuple[str, str]:
    """The folder or hub id of the base that a PEFT folder names, and its revision on the hub."""
    values = _read_config(adapters)
    return values["base_model_name_or_path"], values.get("revision") or ""


def read_lora(cfg: LoraSettings, model: ModelConfig, adapters: Path | None) -> Lora | None:
    """The Lora of a PEFT folder, or of LORA_RANK, LORA_ALPHA and LORA_TARGETS; None if training
    changes all weights. Raises UserMistake before any weight is read."""
    leaves = jax.tree.leaves(param_table(model).layers)
    names = [leaf.name.split(".")[-2] for leaf in leaves if leaf.kind == "matrix"]
    matrices = [*dict.fromkeys(names)]  # those of linear layers are in the table several times
    if adapters:
        lora = _lora_of_folder(cfg, adapters)
    elif cfg.lora_rank == 0:
        if cfg.lora_base_dtype == "int8":
            reason = "quantizes LoRA's frozen base, and LORA_RANK=0 trains all weights"
            raise UserMistake(f"LORA_BASE_DTYPE=int8 {reason}; set LORA_RANK=16, or leave it out")
        return None
    else:
        targets = cfg.lora_targets.split(",") if cfg.lora_targets else matrices
        lora = Lora(cfg.lora_rank, cfg.lora_alpha, tuple(targets))
    for name in lora.targets:
        if name not in matrices:
            source = f"MODEL_PATH={adapters}" if adapters else f"LORA_TARGETS={cfg.lora_targets}"
            raise UserMistake(f"{source}: {name!r} is none of {','.join(matrices)}")
    if adapters:  # open_tensors raises if some do not match
        table = param_table(dataclasses.replace(model, lora=lora))
        hf.open_tensors(adapters, trainable_params(table))
    return lora._replace(int8_base=cfg.lora_base_dtype == "int8")


def _lora_of_folder(cfg: LoraSettings, adapters: Path) -> Lora:
    """Raises UserMistake for settings that contradict the folder."""
    values = _read_config(adapters)
    targets = values["target_modules"]
    if isinstance(targets, str):  # a regular expression, such as unsloth's
        names = [name.partition(".lora_") for name in hf.open_files(adapters, hf.ADAPTERS)]
        targets = [module for module, separator, _ in names if separator]
    # Some are full paths; the tensors tell whether every layer has such an adapter.
    targets = sorted({str(name).rpartition(".")[2] for name in targets})
    lora = Lora(values["r"], float(values["lora_alpha"]), tuple(targets))
    theirs = {"rank": lora.rank, "alpha": lora.alpha, "targets": ",".join(targets)}
    for name, value in theirs.items():
        ours, default = (getattr(x, f"lora_{name}") for x in (cfg, type(cfg)))
        if ours not in (value, default):
            raise UserMistake(
                f"LORA_{name.upper()}={ours}, and the adapters of MODEL_PATH={adapters} have "
                f"{value}; leave it out"
            )
    return lora


def _read_config(folder: Path) -> dict[str, Any]:
    """The values of adapter_config.json. Raises UserMistake for anything but plain LoRA."""
    values = hf.read_json(folder / CONFIG)
    plain = {name: values.get(name) in (None, False, "none", [], {}) for name in UNSUPPORTED_KEYS}
    plain["peft_type"] = values.get("peft_type") == "LORA"
    plain["init_lora_weights"] = values.get("init_lora_weights") in SUPPORTED_INITS
    for name, kind in REQUIRED_KEYS.items():
        plain[name] = bool(values.get(name)) and isinstance(values[name], kind)
    for name, is_plain in plain.items():
        if not is_plain:
            text = f"{CONFIG} has {name}={values.get(name)!r}; only plain LoRA is supported"
            raise UserMistake(f"MODEL_PATH={folder}: {text}")
    return values


# ---- Weights -------------------------------------------------------------------------------------


def initial_adapters(adapters: Path | None, model: ModelConfig, mesh: Mesh, seed: int) -> Params:
    """The float32 adapters with which training begins: those of a folder, or new ones, which do not
    change the model yet. Raises UserMistake."""
    if adapters:
        return hf.load_params(adapters, model, mesh, np.float32, adapters=True)
    # The compiler removes the weights that the program does not return.
    init = jax.jit(
        lambda key: trainable_params(init_params(model, key)),
        out_shardings=trainable_params(param_shardings(model, mesh)),
    )
    return init(jax.random.key(seed))


@functools.partial(jax.jit, static_argnames=("lora",))
def merge_adapters(params: Params, lora: Lora) -> tuple[Params, jax.Array]:
    """The weights without adapters, which are added to their matrices in float32 and then rounded
    to the matrices' dtype; and the share of the matrices' numbers that this has changed."""
    params = dataclasses.replace(params, adapters=share_a(params.adapters))
    if isinstance(params.layers, tuple):
        params = arrange_layers(params, "unroll", jnp.float32)  # only the adapters are stacked

    def add(w: jax.Array, adapter: Adapter | None) -> jax.Array:
        if adapter is None:
            return w
        if w.ndim == 3:  # one layer at a time: the float32 product of all would be large
            return jax.lax.map(lambda x: add(*x), (w, adapter))
        a, b = (x.astype(jnp.float32) for x in adapter)
        added = jnp.matmul(a, b, precision="highest") * lora.scale
        return (w.astype(jnp.float32) + added).astype(w.dtype)

    layers = jax.tree.map(add, params.layers, params.adapters)
    pairs = zip(*map(jax.tree.leaves, (layers, params.layers)), strict=True)
    changed = [((new != old).mean(), new.size) for new, old in pairs if new is not old]
    share = sum(part * size for part, size in changed) / sum(size for _, size in changed)
    return dataclasses.replace(params, layers=layers, adapters=None), share


def merge_with_folder(
    folder: Path, params: Params, model: ModelConfig, dtype: DTypeLike
) -> Iterator[tuple[str, np.ndarray]]:
    """The (name, array) pairs of the model in a folder, with the adapters of params added in
    float32 and then rounded to dtype, as for hf.save_model. The host has one tensor at a time. All
    processes have to take all tensors."""
    lora = model.lora
    assert lora, "a model without adapters is not merged"
    table = param_table(dataclasses.replace(model, lora=None), "unroll")
    tensors, adapters = hf.open_tensors(folder, table), trainable_params(params)
    layers = arrange_layers(adapters, "unroll", jnp.float32).adapters
    tree: Any  # a PyTreeDef
    leaves, tree = jax.tree.flatten(table)
    adapter_leaves = tree.flatten_up_to(Params(None, (*map(share_a, layers),), None, None))
    pairs = zip(leaves, adapter_leaves, strict=True)
    for _, weights in itertools.groupby(pairs, lambda pair: pair[0].name):
        of_tensor = [*weights]
        for part in hf.tensor_names(of_tensor[0][0]):
            tensor = tensors[part][:]
            for leaf, adapter in of_tensor:
                if adapter is not None:
                    a, b = map(gather_to_host, adapter)
                    tensor = tensor.astype(np.float32)
                    # Files hold [out, in].
                    tensor[leaf.first_row :][: leaf.shape[-1]] += lora.scale * (b.T @ a.T)
            yield part, tensor.astype(leaf.dtype(dtype))


def save_adapters(
    folder: Path,
    params: Params,
    model: ModelConfig,
    lora: Lora,
    base: str,
    revision: str,
    chat_template: str,
) -> None:
    """Writes the adapters of params, float32, as a folder that PEFT opens. Raises OSError.

    lora: that of the model. base, revision: the folder of the base, or its id and revision on the
    hub. The rest is as for hf.save_model.
    """
    base = str(Path(base).resolve()) if Path(base).is_dir() else base
    tensors = dict(hf.hf_tensors(trainable_params(params), model))
    if jax.process_index() != 0:
        return
    hf.prepare_export_folder(folder, base)
    hf.save_tensors(tensors, folder / hf.ADAPTERS)
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    targets = [*lora.targets]
    if model.sees_images:  # the vision tower has a q_proj, too
        paths = {name.partition(".lora_")[0] for name in tensors}
        targets = sorted(path.removeprefix("base_model.model.") for path in paths)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": targets,
        "bias": "none",
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
