"""LoRA, see Lora in model/params.py: which matrices get adapters, where the adapters come from, and
PEFT's folders, with adapter_config.json, which names the base, and adapter_model.safetensors.

The base, all weights but the adapters, never changes. cfg is the Config of config.py.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from infra.mistakes import UserMistake
from model import hf
from model.params import (
    Adapter,
    Lora,
    ModelConfig,
    Params,
    arrange_layers,
    init_params,
    param_shardings,
    param_table,
    trained,
)

CONFIG = "adapter_config.json"
# What a folder may ask for beyond plain LoRA, by its name in adapter_config.json.
BEYOND = """bias use_dora use_rslora lora_bias fan_in_fan_out rank_pattern alpha_pattern
    modules_to_save layers_to_transform target_parameters trainable_token_indices
    alora_invocation_tokens""".split()
# Other ways to begin change the base.
KEEP_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
NEEDED = dict(base_model_name_or_path=str, r=int, lora_alpha=int | float, target_modules=list)


# ---- Which matrices get adapters -----------------------------------------------------------------


def fetch_base(path: str, revision: str) -> tuple[Path, Path | None]:
    """The folder of the model, and of the adapters with which training begins if `path` is a folder
    of PEFT. Raises UserMistake."""
    folder = hf.fetch_model(path, revision)
    if not (folder / CONFIG).is_file():
        return folder, None
    try:
        return hf.fetch_model(*base_of(folder)), folder
    except UserMistake as error:
        raise UserMistake(f"the base of MODEL_PATH={folder}, by its {CONFIG}: {error}") from None


def base_of(adapters: Path) -> tuple[str, str]:
    """The folder or the id of the base that a folder of PEFT names, and its revision on the hub."""
    values = _read_config(adapters)
    return values["base_model_name_or_path"], values.get("revision") or ""


def lora_of(cfg: Any, model: ModelConfig, adapters: Path | None) -> Lora | None:
    """What the folder of the adapters says, or else LORA_RANK, LORA_ALPHA and LORA_TARGETS; None if
    training changes all weights. Raises UserMistake before any weight is read."""
    leaves = jax.tree.leaves(param_table(model).layers)
    sizes = {x.name.split(".")[-2]: x.shape[1:] for x in leaves if x.kind == "matrix"}
    targets = cfg.lora_targets.split(",") if cfg.lora_targets else sizes
    lora = Lora(cfg.lora_rank, cfg.lora_alpha, tuple(targets))
    if adapters:
        values = _read_config(adapters)
        # Some are full paths; the tensors tell whether every layer has such an adapter.
        names = sorted({str(name).rpartition(".")[2] for name in values["target_modules"]})
        lora = Lora(values["r"], float(values["lora_alpha"]), tuple(names))
        for name, theirs in lora._replace(targets=",".join(names))._asdict().items():
            ours, default = (getattr(x, f"lora_{name}") for x in (cfg, type(cfg)))
            if ours not in (theirs, default):
                raise UserMistake(
                    f"LORA_{name.upper()}={ours}, and the adapters of MODEL_PATH={adapters} have "
                    f"{theirs}; leave it out"
                )
    elif cfg.lora_rank == 0:
        return None
    for name in lora.targets:
        if name not in sizes:
            where = f"MODEL_PATH={adapters}" if adapters else f"LORA_TARGETS={cfg.lora_targets}"
            raise UserMistake(f"{where}: {name!r} is none of {','.join(sizes)}")
        if lora.rank > min(sizes[name]):
            raise UserMistake(
                f"LORA_RANK={lora.rank} is above {min(sizes[name])}, the smaller side of {name}; "
                f"lower it"
            )
    if adapters:  # for mistakes in its tensors
        table = param_table(dataclasses.replace(model, lora=lora))
        hf.open_tensors(adapters, trained(table))
    return lora


def _read_config(folder: Path) -> dict[str, Any]:
    """The values of adapter_config.json. Raises UserMistake for anything but plain LoRA."""
    values = hf.read_json(folder / CONFIG)
    plain = {name: values.get(name) in (None, False, "none", [], {}) for name in BEYOND}
    plain["peft_type"] = values.get("peft_type") == "LORA"
    plain["init_lora_weights"] = values.get("init_lora_weights") in KEEP_BASE
    for name, kind in NEEDED.items():
        plain[name] = bool(values.get(name)) and isinstance(values[name], kind)
    for name in [name for name in plain if not plain[name]]:
        raise UserMistake(
            f"MODEL_PATH={folder}: {CONFIG} has {name}={values.get(name)!r}; only plain LoRA is "
            f"supported"
        )
    return values


# ---- Weights -------------------------------------------------------------------------------------


def first_adapters(adapters: Path | None, model: ModelConfig, mesh: Mesh, seed: int) -> Params:
    """The float32 adapters with which training begins: those of a folder, or new ones, which change
    nothing yet. Raises UserMistake."""
    if adapters:
        return hf.load_params(adapters, model, mesh, np.float32, adapters=True)
    # The compiled program makes only what it returns.
    init = jax.jit(
        lambda key: trained(init_params(model, key)),
        out_shardings=trained(param_shardings(model, mesh)),
    )
    return init(jax.random.key(seed))


@functools.partial(jax.jit, static_argnames=("model",))
def merge(params: Params, model: ModelConfig) -> tuple[Params, jax.Array]:
    """The weights with their adapters added in float32 and then rounded to their dtype, without
    adapters; and the share of these matrices' numbers that this has changed."""
    if isinstance(params.layers, tuple):
        params = arrange_layers(params, "unroll", jnp.float32)  # the adapters alone are stacked

    def add(w: jax.Array, adapter: Adapter | None) -> jax.Array:
        if adapter is None:
            return w
        if w.ndim == 3:  # a layer after the other, since a product of all in float32 would be large
            return jax.lax.map(lambda x: add(*x), (w, adapter))
        a, b = (x.astype(jnp.float32) for x in adapter)
        added = jnp.matmul(a, b, precision="highest") * (model.lora.alpha / model.lora.rank)
        return (w.astype(jnp.float32) + added).astype(w.dtype)

    layers = jax.tree.map(add, params.layers, params.adapters)
    pairs = zip(*map(jax.tree.leaves, (layers, params.layers)), strict=True)
    changed = [((new != old).mean(), new.size) for new, old in pairs if new is not old]
    share = sum(part * size for part, size in changed) / sum(size for _, size in changed)
    return params.replace(layers=layers, adapters=None), share


def save_adapters(
    folder: Path, params: Params, model: ModelConfig, base: str, revision: str, chat_template: str
) -> None:
    """Writes the adapters of params, float32, as a folder that PEFT opens. Raises OSError.

    base, revision: the folder of the base, or its id and revision on the hub. The rest is as for
    hf.save_model.
    """
    base = str(Path(base).resolve()) if Path(base).is_dir() else base
    tensors = dict(hf.hf_tensors(trained(params), model))
    if jax.process_index() != 0:
        return
    hf.begin_folder(folder, base)
    hf.save_tensors(tensors, folder / hf.ADAPTERS)
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    targets = [*model.lora.targets]
    if model.gemma3 and model.gemma3.sees_images:  # the part for images has a q_proj, too
        paths = {name.partition(".lora_")[0] for name in tensors}
        targets = sorted(path.removeprefix("base_model.model.") for path in paths)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "target_modules": targets,
        "bias": "none",
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
