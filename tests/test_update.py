"""Claims about update.py: one step's loss, gradient and new parameters, however it is computed.

The reference is the float64 numpy model of test_rollout.py; gradients are its finite differences.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from test_rollout import CONFIG, PAD, numpy_logits, numpy_softmax, weights

from loss import Objective
from models.model import Params, param_shardings
from runtime.layout import TRAIN_BATCH_AXES, Layout, shard_batch
from update import (
    Compute,
    Counts,
    MicroBatch,
    Optimizer,
    compute_logps,
    init_state,
    learning_rate,
    merge_metrics,
    micro_step,
    optimizer_step,
    sync_weights,
    zero_grads,
)

K, T = 8, 6
PROMPTS = [[5, 11, 2], [7, 7, 30, 1, 19, 8]]
TEMPERATURE = 0.7
OBJECTIVE = Objective(eps_low=0.2, eps_high=0.3, beta=0.1, kl_bias_correction=False)
SGD = Optimizer("sgd", weight_decay=0.1, clip_norm=0.5)
ADAMW = Optimizer("adamw", weight_decay=0.1, clip_norm=0.5)
FLOAT32 = jnp.dtype("float32")


@pytest.fixture(scope="module", autouse=True)
def quick_compiles() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class Sequences(NamedTuple):
    """A whole step's, B = 16; what is under the mask is garbage."""

    completion_ids: np.ndarray  # [B, T]
    mask: np.ndarray  # [B, T]
    sampling_logps: np.ndarray  # [B, T]
    advantages: np.ndarray  # [B]
    old_logps: np.ndarray  # [B, T]
    ref_logps: np.ndarray  # [B, T]
    top_mask: np.ndarray | None = None  # [B, T]


def numpy_logps(params: Params, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[B, T] float64: log p of the completions and the entropy of each distribution."""
    logps, entropy = np.zeros(ids.shape), np.zeros(ids.shape)
    for row, tokens in enumerate(ids.tolist()):
        prompt = PROMPTS[row // K]
        logits = numpy_logits(params, prompt + tokens)[len(prompt) - 1 : -1]  # [T, V]
        probs = numpy_softmax(logits / TEMPERATURE)
        logps[row] = np.log(probs[np.arange(T), tokens])
        entropy[row] = -(probs * np.log(probs)).sum(axis=-1)
    return logps, entropy


@functools.cache
def sequences() -> Sequences:
    """Random tokens; old and reference log-probabilities near the model's, so that some clip."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, T + 1, 2 * K)
    lengths[:2] = T, 1
    ids = rng.integers(0, CONFIG.vocab_size, (2 * K, T)).astype(np.int32)
    mask = np.arange(T) < lengths[:, None]
    logps = numpy_logps(weights(), ids)[0]
    noise = [np.where(mask, s * rng.normal(size=mask.shape), 99) for s in (0.1, 0.3, 0.5)]
    sampling, old, ref = (np.float32(logps + x) for x in noise)
    advantages = np.float32(rng.normal(size=2 * K))
    return Sequences(ids, mask.astype(np.int32), sampling, advantages, old, ref)


class Step(NamedTuple):
    metrics: dict[str, float]
    grads: Params
    params: Params  # after
    logps: np.ndarray  # [B, T], before
    stayed: bool  # every array lies where it did before


def layout(*shape: int) -> Layout:
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Layout(Mesh(devices, ("dp", "fsdp", "tp")), TRAIN_BATCH_AXES)


def laid_out(mesh: Mesh, params: Params | None = None) -> Params:
    """A float32 copy of its own: optimizer_step takes the buffers over."""
    params = jax.tree.map(np.float32, params or weights())
    return jax.device_put(params, param_shardings(CONFIG, mesh))


def micro_batches(x: Sequences, micro: int, s: int, wider: int, where: Layout) -> list[MicroBatch]:
    """Prompts 8 + wider and completions T + wider wide; s sequences share a prompt row."""
    width = 8 + wider
    ids, mask = np.full((2 * K, width), PAD, np.int32), np.zeros((2 * K, width), np.int32)
    for row in range(2 * K):
        prompt = PROMPTS[row // K]
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1
    pad = ((0, 0), (0, wider))
    given = [a for a in x if a is not None]
    rows = [a if a.ndim == 1 else np.pad(a, pad, constant_values=7) for a in given]
    rows[1] = np.pad(x.mask, pad)

    def one(start: int) -> MicroBatch:
        own = slice(start, start + micro)
        prompts = [shard_batch(a[own][::s], where) for a in (ids, mask)]
        completions, completion_mask, *rest = (shard_batch(a[own], where) for a in rows)
        return MicroBatch(*prompts, completions, completion_mask, *rest)

    return [one(start) for start in range(0, 2 * K, micro)]


def places(tree: Any) -> list:
    return [(x.sharding, x.ndim) for x in jax.tree.leaves(tree)]


def step(
    *, micro: int = 16, s: int = 8, mesh: tuple[int, int, int] = (1, 1, 1), remat: str = "none",
    wider: int = 0, on_policy: bool = False, params: Params | None = None, optimizer: Any = SGD,
    x: Sequences | None = None, lr: float = 0.1, objective: Objective = OBJECTIVE,
    impl: str = "jax",
) -> Step:  # fmt: skip
    """One training step, as train_grpo.py does it."""
    x, where = x or sequences(), layout(*mesh)
    state = init_state(laid_out(where.mesh, params), optimizer=optimizer, config=CONFIG)
    grads, parts, logps = zero_grads(state.params), [], []
    before = places((state, grads))
    top = x.mask if x.top_mask is None else x.mask * x.top_mask
    counts = Counts(*map(np.float32, (x.mask.sum(), 2 * K, top.sum())))
    for batch in micro_batches(x, micro, s, wider, where):
        batch = batch._replace(old_logps=None) if on_policy else batch
        grads, metrics, now = micro_step(
            state.params, grads, batch, counts, objective=objective, temperature=TEMPERATURE,
            compute=Compute(CONFIG, FLOAT32, where, remat, impl),
        )  # fmt: skip
        parts.append(metrics)
        logps.append(np.asarray(now)[:, :T])
    state, norm = optimizer_step(state, grads, np.float32(lr), optimizer=optimizer, config=CONFIG)
    assert int(state.step) == 1
    pairs = zip(before, places((state, grads)), strict=True)
    stayed = all(a.is_equivalent_to(b, ndim) for (a, ndim), (b, _) in pairs)
    metrics = merge_metrics(parts) | {"grad_norm": float(norm)}
    grads, params = jax.device_get((grads, state.params))
    return Step(metrics, grads, params, np.concatenate(logps), stayed)


@functools.cache
def whole() -> Step:
    """The step in one micro-batch on one device."""
    return step()


def assert_close(a: Params, b: Params, atol: float) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=atol), a, b)


# ---- One step is what the formulas say -----------------------------------------------------------


def numpy_loss(params: Params, x: Sequences, old: np.ndarray) -> float:
    """The objective of the whole step in float64."""
    logps, _ = numpy_logps(params, x.completion_ids)
    total = 0.0
    for row, t in zip(*np.nonzero(x.mask), strict=True):
        ratio, A = math.exp(logps[row, t] - old[row, t]), float(x.advantages[row])
        gap = float(x.ref_logps[row, t]) - logps[row, t]
        held = min(max(ratio, 0.8), 1.3)
        total += -min(ratio * A, held * A) + 0.1 * (math.exp(gap) - gap - 1)
    return total / x.mask.sum()


def assert_gradient_is_the_slope(grads: Params, x: Sequences, old: np.ndarray) -> None:
    """Of numpy's loss, along one random direction for each kind of parameter."""
    leaves, tree = jax.tree.flatten(weights())
    rng = np.random.default_rng(5)
    for i, grad in enumerate(jax.tree.leaves(grads)):
        way = rng.normal(size=leaves[i].shape)
        moved = [
            tree.unflatten([p + e * way if j == i else p for j, p in enumerate(leaves)])
            for e in (1e-5, -1e-5)
        ]
        slope = (numpy_loss(moved[0], x, old) - numpy_loss(moved[1], x, old)) / 2e-5
        assert (grad * way).sum() == pytest.approx(slope, rel=1e-4, abs=2e-6), i


def test_loss_gradient_and_metrics_are_those_of_numpy() -> None:
    x, got = sequences(), whole()
    mask, tokens = x.mask.astype(bool), x.mask.sum()
    logps, entropy = numpy_logps(weights(), x.completion_ids)
    np.testing.assert_allclose(got.logps[mask], logps[mask], atol=2e-5)
    ratio, A = np.exp(logps - x.old_logps), x.advantages[:, None]
    below, above = mask & (ratio < 0.8) & (A < 0), mask & (ratio > 1.3) & (A > 0)
    low, high = below.sum(), above.sum()
    assert low > 1 and high > 1, "the case must clip on both sides"
    gap = (x.ref_logps - logps)[mask]
    grads = jax.tree.leaves(got.grads)
    drift = np.abs(x.old_logps - x.sampling_logps)[mask]
    assert got.metrics == pytest.approx(
        {
            "loss": numpy_loss(weights(), x, x.old_logps),
            "entropy": entropy[mask].mean(),
            "kl": (np.exp(gap) - gap - 1).mean(),
            "clip_ratio/low_mean": low / tokens,
            "clip_ratio/high_mean": high / tokens,
            "clip_ratio/region_mean": (low + high) / tokens,
            "clip_ratio/low_min": (below.sum(axis=1) / mask.sum(axis=1)).min(),
            "clip_ratio/high_max": (above.sum(axis=1) / mask.sum(axis=1)).max(),
            "sampling_logp_difference/mean": drift.mean(),
            "sampling_logp_difference/max": drift.max(),
            "grad_norm": math.sqrt(sum((g.astype(float) ** 2).sum() for g in grads)),
        },
        rel=2e-5,
    )
    assert_gradient_is_the_slope(got.grads, x, x.old_logps)


def test_without_old_logps_the_ratio_is_one_and_the_gradient_flows() -> None:
    x, got = sequences(), step(on_policy=True)
    assert_gradient_is_the_slope(got.grads, x, numpy_logps(weights(), x.completion_ids)[0])
    assert [v for name, v in got.metrics.items() if "clip_ratio" in name] == [0] * 5
    # The second epoch of the same policy: old_logps are what the first returned.
    again = step(x=x._replace(old_logps=got.logps))
    assert again.metrics == pytest.approx(got.metrics, abs=1e-6)
    assert_close(again.grads, got.grads, 1e-6)
    # The second update of a step: the policy has moved, old_logps are still those before the first.
    moved = step(params=step(on_policy=True, lr=1.0).params, x=x._replace(old_logps=got.logps))
    change = (np.exp(moved.logps - got.logps) - 1) * np.sign(x.advantages)[:, None]
    cut = x.mask * np.where(x.advantages[:, None] > 0, change > 0.3, change > 0.2)
    assert moved.metrics["clip_ratio/region_mean"] == pytest.approx(cut.sum() / x.mask.sum())
    assert cut.sum() > 1


def test_reference_logps_are_the_policy_s_own_before_it_moves() -> None:
    where = layout(1, 1, 1)
    [batch] = micro_batches(sequences(), 16, 8, 0, where)
    compute = Compute(CONFIG, FLOAT32, where)
    logps, entropy = compute_logps(laid_out(where.mesh), batch, TEMPERATURE, compute)
    assert logps.shape == entropy.shape == (16, T) and logps.dtype == FLOAT32
    np.testing.assert_allclose(logps, whole().logps, atol=1e-6)


def test_five_updates_lower_the_loss_and_make_the_rewarded_tokens_likelier() -> None:
    x, params = sequences(), weights()
    before = numpy_logps(params, x.completion_ids)[0]
    x = x._replace(old_logps=np.float32(before), ref_logps=np.float32(before))
    losses = [numpy_loss(params, x, before)]
    for _ in range(5):
        params = step(params=params, optimizer=ADAMW, x=x, lr=1e-3).params
        losses.append(numpy_loss(params, x, before))
    assert max(losses[1:]) < losses[0] - 0.08
    gain = numpy_logps(params, x.completion_ids)[0] - before
    good, bad = (x.mask.astype(bool) & (sign * x.advantages[:, None] > 0.5) for sign in (1, -1))
    assert gain[good].mean() > 0.05 and gain[bad].mean() < -0.05


# ---- What only speed and memory depend on --------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"micro": 1, "s": 1},
        {"micro": 2, "s": 2, "remat": "dots", "wider": 3},
        {"micro": 4, "s": 4, "remat": "full"},
        {"s": 2, "mesh": (1, 8, 1)},
        {"s": 4, "mesh": (1, 4, 2), "remat": "full"},
    ],
    ids=str,
)
def test_how_a_step_is_computed_does_not_change_it(settings: dict[str, Any]) -> None:
    """Micro-batches, shared prompt rows, recomputation, padding and devices."""
    got = step(**settings)
    assert got.metrics == pytest.approx(whole().metrics, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(got.logps, whole().logps, atol=1e-5)
    assert_close(got.grads, whole().grads, 1e-6)
    assert_close(got.params, whole().params, 1e-6)
    assert got.stayed, "an array that moves has the next step compiled again"


def test_the_optimizer_s_arrays_lie_as_the_parameters_do() -> None:
    """From the start and after a step: a copy of them whole on each device would not fit."""
    params = laid_out(layout(1, 4, 2).mesh)
    expected = places(params)
    assert not all(sharding.is_fully_replicated for sharding, _ in expected)
    grads = jax.tree.map(jnp.zeros_like, params)
    state = init_state(params, optimizer=ADAMW, config=CONFIG)
    for _ in range(2):
        adam = state.opt_state[0]
        for tree in (adam.mu, adam.nu, state.params):
            pairs = zip(places(tree), expected, strict=True)
            assert all(a.is_equivalent_to(b, ndim) for (a, ndim), (b, _) in pairs)
        assert adam.count.sharding.is_equivalent_to(state.step.sharding, 0)
        state, _ = optimizer_step(state, grads, np.float32(0), optimizer=ADAMW, config=CONFIG)


# ---- The optimizer -------------------------------------------------------------------------------


# embed, attn_norm, wq wk wv wo, bq bk bv, mlp_norm, gate up down, final_norm, lm_head
DECAYED = [1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 1]


def numpy_optimizer(name: str, grads: list, params: Params, decay: float, clip: float) -> Params:
    """Float64 parameters after steps with lr 0.1, 0.2, ..."""
    leaves, tree = jax.tree.flatten(params)
    p = [x.astype(float) for x in leaves]
    m, v = [0 * x for x in p], [0 * x for x in p]
    for t, grad in enumerate(grads, start=1):
        g = [x.astype(float) for x in jax.tree.leaves(grad)]
        norm = math.sqrt(sum((x**2).sum() for x in g))
        factor = min(1, clip / (norm + 1e-6)) if clip else 1
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


@pytest.mark.parametrize(
    "optimizer",
    [ADAMW, SGD, Optimizer("sgd", clip_norm=0), Optimizer("lion", weight_decay=0.2)],
    ids=lambda o: "-".join(map(str, o)),
)
def test_three_updates_are_those_of_the_formulas(optimizer: Optimizer) -> None:
    """With gradients that are clipped, far from clipped and clipped again."""
    rng = np.random.default_rng(1)
    mesh = layout(1, 1, 1).mesh
    grads = [
        jax.tree.map(lambda p, scale=scale: scale * rng.normal(size=p.shape), weights())
        for scale in (1.0, 1e-3, 0.1)
    ]
    state = init_state(laid_out(mesh), optimizer=optimizer, config=CONFIG)
    for t, grad in enumerate(grads, start=1):
        norm = math.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grad)))
        state, logged = optimizer_step(
            state, laid_out(mesh, grad), np.float32(0.1 * t), optimizer=optimizer, config=CONFIG
        )
        assert float(logged) == pytest.approx(norm, rel=1e-5), "the norm before clipping"
    assert int(state.step) == 3
    name, decay, clip = optimizer
    expected = numpy_optimizer(name, grads, weights(), decay, clip)
    assert_close(state.params, expected, 2e-5 if clip else 2e-4)


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
    settings = {"peak": 2e-6, "schedule": schedule, "warmup_ratio": warmup_ratio, "decay_steps": 8}
    rates = [learning_rate(step, **settings) for step in range(10)]
    np.testing.assert_allclose(rates, 2e-6 * np.array(expected), atol=1e-13)
    assert min(rates[0], rates[7]) > 0


# ---- The copy that decodes -----------------------------------------------------------------------


@pytest.mark.parametrize("target", [(1, 1, 8), (8, 1, 1), (1, 8, 1)], ids=str)
def test_synced_weights_are_rounded_and_laid_out_for_the_rollout(target: tuple) -> None:
    values = jax.tree.map(np.float32, weights())
    values.embed[0, 0] = 257  # bfloat16 has 256 and 258
    params = laid_out(layout(1, 8, 1).mesh, values)
    mesh = layout(*target).mesh
    copy = sync_weights(params, config=CONFIG, mesh=mesh, dtype=jnp.dtype("bfloat16"))
    assert float(copy.embed[0, 0]) == 256
    shardings = jax.tree.leaves(param_shardings(CONFIG, mesh))
    pairs = zip(jax.tree.leaves(copy), jax.tree.leaves(values), shardings, strict=True)
    for x, value, sharding in pairs:
        assert x.sharding == sharding and x.dtype == jnp.bfloat16
        assert np.array_equal(np.asarray(x), value.astype(jnp.bfloat16))
    jax.tree.map(np.testing.assert_array_equal, params, values)
    assert {x.dtype for x in jax.tree.leaves(params)} == {FLOAT32}


def test_a_copy_of_the_same_type_and_layout_outlives_the_step_that_replaces_the_original() -> None:
    """The reference policy is one: optimizer_step takes over the buffers of what it is given."""
    mesh = layout(1, 1, 1).mesh
    params = laid_out(mesh)
    state = init_state(params, optimizer=SGD, config=CONFIG)
    copy = sync_weights(params, config=CONFIG, mesh=mesh, dtype=FLOAT32)
    optimizer_step(state, laid_out(mesh), np.float32(0.1), optimizer=SGD, config=CONFIG)
    assert params.embed.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, copy, jax.tree.map(np.float32, weights()))
