"""Claims about optimizer.py, and about the copies of the weights (sampling.py).

The reference of the optimizer is its formula in float64 numpy.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwen35_by_hand import MODEL as LINEAR
from small_model import QWEN2 as MODEL
from small_model import assert_close, laid_out, same_shardings, shardings, weights
from small_model import train_layout as layout

from model.hf import hf_tensors
from model.network import ComputeConfig
from model.params import Lora, ModelConfig, Params, param_shardings, param_table, trainable_params
from optimizer import (
    Optimizer,
    Schedule,
    abstract_state,
    init_state,
    learning_rate,
    make_transformation,
    optimizer_step,
)
from sampling import sync_weights

SGD = Optimizer("sgd", weight_decay=0.1, clip_norm=0.5)
ADAMW = Optimizer("adamw", weight_decay=0.1, clip_norm=0.5)
ADAPTED = dataclasses.replace(MODEL, lora=Lora(4, 6.0, ("q_proj", "down_proj")))
FLOAT32, ZERO = jnp.dtype("float32"), np.float32(0)

# 1 for each array that decays, in the order: embed, attn_norm, wq wk wv wo, bq bk bv, mlp_norm,
# gate up down, final_norm, lm_head.
DECAYED = [1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 1]


def numpy_optimizer(name: str, grads: list, params: Params, decay: float, clip: float) -> Params:
    """Float64 parameters after updates with the learning rates 0.1, 0.2, ..."""
    leaves, tree = jax.tree.flatten(params)
    p = [x.astype(float) for x in leaves]
    m, v = [0 * x for x in p], [0 * x for x in p]
    for t, grad in enumerate(grads, start=1):
        g = [x.astype(float) for x in jax.tree.leaves(grad)]
        norm = math.sqrt(sum((x**2).sum() for x in g))
        factor = min(1, clip / norm) if clip else 1
        g, lr = [x * factor for x in g], 0.1 * t
        for i, x in enumerate(g):
            if name == "adamw":
                m[i], v[i] = 0.9 * m[i] + 0.1 * x, 0.999 * v[i] + 0.001 * x * x
                way = m[i] / (1 - 0.9**t) / (np.sqrt(v[i] / (1 - 0.999**t)) + 1e-8)
            elif name == "lion":
                way = np.sign(0.9 * m[i] + 0.1 * x)
                m[i] = 0.99 * m[i] + 0.01 * x
            else:
                way = x
            p[i] = p[i] - lr * (way + decay * DECAYED[i] * p[i])
    return tree.unflatten(p)


def ones(model: ModelConfig) -> Params:
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), param_table(model))


def test_norms_and_biases_of_linear_attention_do_not_decay() -> None:
    """As transformers decides for Qwen3.5."""
    params = ones(LINEAR)
    rule = make_transformation(Optimizer("sgd", weight_decay=0.5), LINEAR)
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = rule.update(zeros, rule.init(params), params)
    kept = {
        re.sub(r"^model\.(layers\.\d+\.)?", "", x)
        for x, y in hf_tensors(updates, LINEAR)
        if not np.any(y)
    }
    norms = "input_layernorm post_attention_layernorm linear_attn.norm self_attn.q_norm"
    names = [*norms.split(), "self_attn.k_norm", "norm"]
    assert kept == {"linear_attn.dt_bias", *(f"{name}.weight" for name in names)}


@pytest.mark.parametrize(("name", "size"), [("adamw", 12), ("lion", 8), ("sgd", 4)])
@pytest.mark.parametrize("model", [MODEL, ADAPTED], ids=["all", "adapters"])
def test_the_state_that_a_checkpoint_saves_has_so_many_bytes_per_trained_parameter(
    model: ModelConfig, name: str, size: int
) -> None:
    state = abstract_state(model, layout(1, 1, 1).mesh, Optimizer(name))
    trained = sum(x.size for x in jax.tree.leaves(state.params))
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert 0 <= total - size * trained <= 8  # the number of steps


@pytest.mark.parametrize(
    "optimizer",
    [ADAMW, SGD, Optimizer("sgd", clip_norm=0), Optimizer("lion", weight_decay=0.2)],
    ids=lambda o: "-".join(map(str, o)),
)
def test_three_updates_follow_the_formulas(optimizer: Optimizer) -> None:
    """The first and the third gradient are clipped; the second is far from being clipped."""
    rng = np.random.default_rng(1)
    mesh = layout(1, 1, 1).mesh
    grads = [
        jax.tree.map(lambda p, scale=scale: scale * rng.normal(size=p.shape), weights())
        for scale in (1.0, 1e-3, 0.1)
    ]
    state = init_state(laid_out(mesh), optimizer=optimizer, model=MODEL)
    for t, grad in enumerate(grads, start=1):
        norm = math.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grad)))
        state, norms = optimizer_step(
            state, laid_out(mesh, grad), np.float32(0.1 * t), ZERO, optimizer=optimizer, model=MODEL
        )
        assert norms["grad_norm"] == pytest.approx(norm, rel=1e-5), "before clipping"
    name, decay, clip = optimizer
    expected = numpy_optimizer(name, grads, weights(), decay, clip)
    assert_close(state.params, expected, 2e-5 if clip else 2e-4)
    norm = math.sqrt(sum((x**2).sum() for x in jax.tree.leaves(expected)))
    assert norms["param_norm"] == pytest.approx(norm, rel=1e-4), "of the new weights"


def test_the_arrays_of_the_optimizer_are_sharded_like_the_parameters() -> None:
    """They are so from the start: a full copy on each device would not fit."""
    params = laid_out(layout(1, 4, 2).mesh)
    expected = shardings(params)
    assert not all(sharding.is_fully_replicated for sharding, _ in expected)
    grads = jax.tree.map(jnp.zeros_like, params)
    state = init_state(params, optimizer=ADAMW, model=MODEL)
    for _ in range(2):
        adam = state.opt_state[1]
        for tree in (adam.mu, adam.nu, state.params):
            assert same_shardings(shardings(tree), expected)
        count = adam.count.sharding
        assert count.is_fully_replicated and len(count.device_set) == 8
        state, _ = optimizer_step(state, grads, ZERO, ZERO, optimizer=ADAMW, model=MODEL)


# ---- The learning rate ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule, warmup_ratio, expected",
    [
        # Warm-up of 2 of 8 steps; then 1 - x or (1 + cos pi x) / 2 at x = 0, 1/6, 2/6, ...
        ("warmup_cosine", 0.25, [0.5, 1, 1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873, 0, 0]),
        ("linear", 0.25, [0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0]),
        ("constant", 0.25, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", 0.0, [1] * 10),
        ("linear", 0.0, [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0]),
        ("linear", 1.0, [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1, 0, 0]),
    ],
)
def test_the_learning_rate_by_hand(schedule: str, warmup_ratio: float, expected: list) -> None:
    rates = [learning_rate(i, Schedule(2e-6, schedule, warmup_ratio, 8)) for i in range(10)]
    np.testing.assert_allclose(rates, 2e-6 * np.array(expected), atol=1e-13)
    assert min(rates[0], rates[7]) > 0


# ---- Copies of the weights -----------------------------------------------------------------------


@pytest.mark.parametrize("target", [(1, 1, 8), (8, 1, 1)], ids=str)
def test_synced_weights_are_rounded_and_laid_out_for_the_rollout(target: tuple) -> None:
    values = jax.tree.map(np.float32, weights())
    values.embed[0, 0] = 257  # bfloat16 has 256 and 258
    params = laid_out(layout(1, 8, 1).mesh, values)
    mesh = layout(*target).mesh
    copy = sync_weights(ComputeConfig(MODEL, jnp.dtype("bfloat16"), layout(*target)))(params)
    assert float(copy.embed[0, 0]) == 256
    leaves = map(jax.tree.leaves, (copy, values, param_shardings(MODEL, mesh)))
    pairs = zip(*leaves, strict=True)
    for x, value, sharding in pairs:
        assert x.sharding == sharding and x.dtype == jnp.bfloat16
        assert np.array_equal(np.asarray(x), value.astype(jnp.bfloat16))
    jax.tree.map(np.testing.assert_array_equal, params, values)
    assert {x.dtype for x in jax.tree.leaves(params)} == {FLOAT32}


def update(
    optimizer: Optimizer, lr: float, grad: float, loss: float = 1.0, model: ModelConfig = MODEL
) -> tuple[bool, dict[str, float]]:
    """Whether an update has left the state unchanged to the bit, and the norms that it gives.

    grad: that of a single number of the first array.
    """
    shardings_of_all = param_shardings(model, layout(1, 1, 1).mesh)
    params = jax.device_put(*map(trainable_params, (ones(model), shardings_of_all)))
    (first, *others), tree = jax.tree.flatten(jax.tree.map(jnp.ones_like, params))
    grads = tree.unflatten([first.at[(0,) * first.ndim].set(grad), *others])
    settings = {"optimizer": optimizer, "model": model}
    before = init_state(params, **settings)
    kept = jax.tree.map(np.array, before)  # optimizer_step reuses the memory of the state
    after, norms = optimizer_step(before, grads, np.float32(lr), np.float32(loss), **settings)
    pairs = zip(jax.tree.leaves(kept), jax.tree.leaves(after), strict=True)
    unchanged = all(a.tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    return unchanged, norms


@pytest.mark.parametrize(
    "optimizer, lr, grad, settings",
    [
        (ADAMW, 0.1, np.nan, {}),
        (ADAMW, 0.1, np.inf, {}),
        (ADAMW, 0.1, 1.0, {"loss": np.nan}),
        # New weights: the learning rate is such as 1e39 in float32.
        (Optimizer("sgd"), np.inf, 1.0, {}),
        (Optimizer("sgd", clip_norm=0), 1e30, 1e10, {}),
        (Optimizer("lion", weight_decay=1e30), 1e10, 1.0, {}),
        (Optimizer("adamw", weight_decay=1e30), 1e10, 1.0, {"model": ADAPTED}),
    ],
    ids=["nan", "infinite", "loss", "rate", "gradient", "decay", "lora"],
)
def test_an_update_that_is_not_finite_leaves_the_state_unchanged_to_the_bit(
    optimizer: Optimizer, lr: float, grad: float, settings: dict[str, Any]
) -> None:
    unchanged, norms = update(optimizer, lr, grad, **settings)
    assert unchanged
    if optimizer != ADAMW:
        assert math.isfinite(norms["grad_norm"]) and not math.isfinite(norms["param_norm"])
