"""The weights of a serving engine from those of the trainer, by the engine's own table."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from models.model import Leaf, ModelConfig, Params, param_table
from runtime.mistakes import UserMistake


def family_of(model: ModelConfig) -> str:
    """The family of a model, as model_type in config.json names it."""
    if model.gemma3:
        return "gemma3_text"
    return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"


def engine_leaves(
    params: Params,
    model: ModelConfig,
    table: Mapping[str, Any],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """The engine's weights in its order, shapes, dtypes and shardings, from the trainer's.

    params: unrolled. table: of the engine, {name in a Hugging Face file: an entry with target_path,
    transpose and kv_head_padding}. shapes: of the engine's weights, by their paths. Raises
    UserMistake if the trainer has other weights than the engine.
    """
    sources = _sources(params, model)
    del params
    names = {table[name].target_path if name in table else name: name for name in sources}
    if different := names.keys() ^ shapes.keys():
        raise UserMistake(
            f"this sglang-jax has other weights than the trainer, such as {min(different)}; "
            f"install sglang-jax==0.1.0rc0"
        )
    leaves = []
    for path, shape in shapes.items():
        entry, (leaf, x) = table[names[path]], sources.pop(names[path])
        x = x if entry.transpose == leaf.transposed else x.T
        if entry.kv_head_padding:
            # With more devices than kv heads, each head is there several times.
            heads = x.reshape(*x.shape[:-1], -1, model.head_dim)
            copies = shape.shape[-1] // x.shape[-1]
            x = jnp.repeat(heads, copies, axis=-2).reshape(shape.shape)
        leaves.append(jax.device_put(x.astype(shape.dtype), shape.sharding))
    return leaves


def _sources(params: Params, model: ModelConfig) -> dict[str, tuple[Leaf, jax.Array]]:
    """{name in a Hugging Face file: what the array is, and the array} of unrolled params."""
    table, found = param_table(model, "unroll"), {}
    for i, (leaves, arrays) in enumerate(zip(table.layers, params.layers, strict=True)):
        pairs = zip(jax.tree.leaves(leaves), jax.tree.leaves(arrays), strict=True)
        found |= {leaf.name.format(i): (leaf, array) for leaf, array in pairs}
    leaves, arrays = (jax.tree.leaves(tree.replace(layers=())) for tree in (table, params))
    return found | {leaf.name: (leaf, x) for leaf, x in zip(leaves, arrays, strict=True)}


def take_weights(model: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Takes the first weights from the engine's model: {path: shape} of them is returned, in the
    engine's order, and their memory is free."""
    from flax import nnx

    state = nnx.split(model)[1]
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    nnx.update(model, shapes)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    found = jax.tree.leaves_with_path(shapes)
    return {keystr(path).removesuffix(".value"): x for path, x in found}
