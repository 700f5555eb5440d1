"""Adapters of a small model, with the reference of their gradients."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from small_model import QWEN2, batch_of, counts_by_hand, in_rows, train_layout, weights

from loss import Objective
from model.attention import prompt_rows
from model.blocks import with_key_blocks
from model.layout import shard_batch
from model.network import ComputeConfig, forward
from model.params import (
    Adapter,
    Lora,
    Params,
    arrange_layers,
    cast,
    combine_params,
    init_params,
    param_shardings,
    trainable_params,
)
from update import micro_step

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FIELDS = ("wq", "wk", "wv", "wo", "gate", "up", "down")
MODEL = dataclasses.replace(QWEN2, lora=Lora(4, 6.0, ALL))
SCALE = 1.5  # alpha / r of MODEL
FLOAT32 = jnp.dtype("float32")


def whole() -> Params:
    """The parameters of MODEL, with random adapters whose A and B are not 0, in float32."""
    rng, made = np.random.default_rng(1), trainable_params(init_params(MODEL, jax.random.key(1)))
    made = jax.tree.map(lambda x: np.float32(0.3 * rng.normal(size=x.shape)), made)
    return combine_params(jax.tree.map(np.float32, weights()), made)


def merged_by_hand(params: Params) -> Params:
    """The weights W + s A B in float64, without adapters."""
    layers = params.layers
    for name in FIELDS:
        adapter = getattr(params.adapters, name)
        if adapter is not None:
            a, b = np.float64(adapter.a), np.float64(adapter.b)
            layers = layers.replace(**{name: getattr(layers, name) + SCALE * a @ b})
    return params.replace(layers=layers, adapters=None)


def hidden_of(params: Params, model: Any, layer_loop: str = "scan") -> np.ndarray:
    ids = np.array([[5, 11, 2, 7, 30, 1, 19, 8], [7, 7, 30, 1, 19, 8, 24, 3]], np.int32)
    positions = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    compute = ComputeConfig(model, FLOAT32, train_layout(1, 1, 1), layer_loop=layer_loop)
    params = arrange_layers(cast(params, FLOAT32), layer_loop, FLOAT32)
    rows = prompt_rows(jnp.ones(ids.shape, bool))
    return np.asarray(jax.jit(lambda p: forward(p, compute, ids, positions, rows)[0])(params))


def gradient(
    params: Params,
    model: Any,
    mesh: tuple[int, int, int] = (1, 1, 1),
    layer_loop: str = "scan",
    remat: str = "none",
    micro: int = 8,
) -> Params:
    """The gradient of 8 sequences of two prompts with respect to what training changes."""
    rng, where = np.random.default_rng(0), train_layout(*mesh)
    ids = rng.integers(0, model.vocab_size, (8, 6)).astype(np.int32)
    mask = np.arange(6) < np.array([6, 1, 4, 5, 2, 6, 3, 6])[:, None]
    logps, advantages = np.zeros((8, 6), np.float32), np.float32(rng.normal(size=8))
    batch = batch_of([[5, 11, 2], [7, 7, 30, 1]], ids, mask.astype(np.int32), logps, advantages)
    compute = ComputeConfig(model, FLOAT32, where, remat=remat, layer_loop=layer_loop)
    shapes = param_shardings(model, where.mesh)
    shapes = shapes if params.adapters is not None else shapes.replace(adapters=None)
    params = jax.device_put(cast(params, FLOAT32), shapes)
    grads = jax.tree.map(jnp.zeros_like, trainable_params(params)) if micro < 8 else None
    for first in range(0, 8, micro):
        rows = in_rows(batch, micro // mesh[0] // mesh[1], range(first, first + micro), S=8)
        [rows] = with_key_blocks([rows], 8, where)
        grads, *_ = micro_step(
            params,
            grads,
            shard_batch(rows, where),
            counts_by_hand(int(mask.sum()), 8, int(mask.sum())),
            objective=Objective("dapo", 0.2, 0.2),
            temperature=0.7,
            compute=compute,
        )
    return grads


def by_full_training(params: Params) -> dict[str, Adapter]:
    """The gradients of A and B that follow from those of the merged weights."""
    of_matrices = gradient(merged_by_hand(params), QWEN2).layers

    def of_adapter(name: str) -> Adapter:
        adapter, grad = getattr(params.adapters, name), np.float64(getattr(of_matrices, name))
        return Adapter(
            SCALE * grad @ adapter.b.swapaxes(1, 2), SCALE * adapter.a.swapaxes(1, 2) @ grad
        )

    return {name: of_adapter(name) for name in FIELDS}


KL, DRIFT = "train-other/kl", "train-other/sampling_logp_difference/max"


def answers(out: Path, step: int) -> list[str]:
    """The texts of the evaluation after this step."""
    entries = [json.loads(line) for line in (out / "eval.jsonl").open()]
    return [x["completions"][0]["text"] for x in entries if x["step"] == step]
