"""The weights of a serving engine from those of the trainer, by the engine's own table."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models.model import Leaf, ModelConfig, Params, param_table
from runtime.mistakes import UserMistake


def family_of(model: ModelConfig) -> str:
    """The family of a model, as model_type in config.json names it."""
    return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"


def engine_leaves(
    params: Params,
    model: ModelConfig,
    mappings: Mapping[str, Any],
    paths: Sequence[str],
    shapes: Sequence[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """The engine's weights in its order, shapes, dtypes and shardings, from the trainer's.

    params: unrolled. mappings: the engine's own table, {name in a Hugging Face file: an entry with
    target_path, transpose and kv_head_padding}. paths, shapes: of the engine's weights. Raises
    UserMistake if a weight has no source or another shape, or if a source is not used.
    """
    sources = _sources(params, model)
    del params
    entries = {mappings[name].target_path: name for name in sources if name in mappings}
    problems = [f"{path} has no source" for path in paths if path not in entries]
    used = {entries[path] for path in paths if path in entries}
    problems += [f"{name} is not used" for name in sources if name not in used]
    leaves = []
    for path, shape in zip(paths, shapes, strict=True):
        if path not in entries:
            continue
        name = entries[path]
        leaf, x = sources.pop(name)
        x = x if mappings[name].transpose == leaf.transposed else x.T
        if mappings[name].kv_head_padding and x.shape != shape.shape:
            # With more devices than kv heads, each head is there several times.
            heads = x.reshape(*x.shape[:-1], -1, model.head_dim)
            x = jnp.repeat(heads, shape.shape[-1] // x.shape[-1], axis=-2)
            x = x.reshape(*x.shape[:-2], -1)
        if x.shape != shape.shape:
            problems.append(f"{path} is {[*shape.shape]}, and {name} is {[*x.shape]}")
            continue
        leaves.append(jax.device_put(x.astype(shape.dtype), shape.sharding))
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise UserMistake(
            f"this sglang-jax has other weights than the trainer: {problems[0]}{more}; install "
            f"sglang-jax==0.1.0rc0"
        )
    return leaves


def _sources(params: Params, model: ModelConfig) -> dict[str, tuple[Leaf, jax.Array]]:
    """{name in a Hugging Face file: what the array is, and the array} of unrolled params."""
    table, found = param_table(model, "unroll"), {}
    for i, (leaves, arrays) in enumerate(zip(table.layers, params.layers, strict=True)):
        pairs = zip(jax.tree.leaves(leaves), jax.tree.leaves(arrays), strict=True)
        found |= {leaf.name.format(i): (leaf, array) for leaf, array in pairs}
    leaves, arrays = (jax.tree.leaves(tree.replace(layers=())) for tree in (table, params))
    return found | {leaf.name: (leaf, x) for leaf, x in zip(leaves, arrays, strict=True)}


def take_weights(model: Any) -> tuple[list[str], list[jax.ShapeDtypeStruct]]:
    """Takes the first weights from the engine's model: their paths and shapes are returned, and
    their memory is free."""
    from flax import nnx

    state = nnx.split(model)[1]
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    nnx.update(model, shapes)
    found = jax.tree.leaves_with_path(shapes)
    names = [[str(getattr(k, "key", getattr(k, "name", k))) for k in path] for path, _ in found]
    return [".".join(path).removesuffix(".value") for path in names], [x for _, x in found]
