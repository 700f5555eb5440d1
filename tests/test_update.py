"""Claims about update.py: one step's loss, gradient and new parameters, however it is computed.

The reference is the float64 numpy model of test_sampling.py; it gives gradients as finite
differences.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from small_model import batch_of, counts_by_hand, in_rows
from test_sampling import MODEL, numpy_logits, numpy_softmax, weights

from loss import Objective
from metrics import merge_metrics
from models.model import Compute, Params, param_shardings
from runtime.layout import TRAIN_BATCH_AXES, Layout, shard_batch
from update import (
    MicroBatch,
    Optimizer,
    compute_logps_and_entropies,
    init_state,
    micro_step,
    optimizer_step,
    zero_grads,
)

K, T = 8, 6
PROMPTS = [[5, 11, 2], [7, 7, 30, 1, 19, 8]]
TEMPERATURE = 0.7
OBJECTIVE = Objective(eps_low=0.2, eps_high=0.3, beta=0.1, kl_bias_correction=False)
SGD = Optimizer("sgd", weight_decay=0.1, clip_norm=0.5)
ADAMW = Optimizer("adamw", weight_decay=0.1, clip_norm=0.5)
FLOAT32 = jnp.dtype("float32")


class Sequences(NamedTuple):
    """The B = 16 sequences of a step; the values under the mask are garbage."""

    completion_ids: np.ndarray  # [B, T]
    mask: np.ndarray  # [B, T]
    sampling_logps: np.ndarray  # [B, T]
    advantages: np.ndarray  # [B]
    old_logps: np.ndarray  # [B, T]
    ref_logps: np.ndarray  # [B, T]
    top_mask: np.ndarray | None = None  # [B, T]


def numpy_logps(params: Params, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[B, T] float64: logps of the completions, and the entropy of each distribution."""
    logps, entropy = np.zeros(ids.shape), np.zeros(ids.shape)
    for i, tokens in enumerate(ids.tolist()):
        prompt = PROMPTS[i // K]
        logits = numpy_logits(params, prompt + tokens)[len(prompt) - 1 : -1]  # [T, V]
        probs = numpy_softmax(logits / TEMPERATURE)
        logps[i] = np.log(probs[np.arange(T), tokens])
        entropy[i] = -(probs * np.log(probs)).sum(axis=-1)
    return logps, entropy


@functools.cache
def sequences() -> Sequences:
    """Random tokens; old and reference logps are near the model's, so that some ratios clip."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, T + 1, 2 * K)
    lengths[:2] = T, 1
    ids = rng.integers(0, MODEL.vocab_size, (2 * K, T)).astype(np.int32)
    mask = np.arange(T) < lengths[:, None]
    logps = numpy_logps(weights(), ids)[0]
    noise = [np.where(mask, s * rng.normal(size=mask.shape), 99) for s in (0.1, 0.3, 0.5)]
    sampling, old, ref = (np.float32(logps + x) for x in noise)
    advantages = np.float32(rng.normal(size=2 * K))
    return Sequences(ids, mask.astype(np.int32), sampling, advantages, old, ref)


class Step(NamedTuple):
    metrics: dict[str, float]
    grads: Params
    params: Params  # after the update
    logps: np.ndarray  # [B, T], before the update
    stayed: bool  # no array has changed its sharding


def layout(*shape: int) -> Layout:
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Layout(Mesh(devices, ("dp", "fsdp", "tp")), TRAIN_BATCH_AXES)


def laid_out(mesh: Mesh, params: Params | None = None) -> Params:
    """A new float32 copy, because optimizer_step takes over the buffers that it is given."""
    params = jax.tree.map(np.float32, params or weights())
    return jax.device_put(params, param_shardings(MODEL, mesh))


def micro_batches(
    x: Sequences, micro: int, share: int, wider: int, where: Layout
) -> list[MicroBatch]:
    """Prompts are padded to 8 + wider tokens, completions to T + wider.

    micro: sequences of a micro-batch. share: consecutive sequences with one prompt in common.
    """
    pad = ((0, 0), (0, wider))
    padded = [a if a is None or a.ndim == 1 else np.pad(a, pad, constant_values=7) for a in x]
    padded[1] = np.pad(x.mask, pad)
    batch = batch_of(PROMPTS, *padded)

    def micro_batch(start: int) -> MicroBatch:
        arrays = in_rows(batch, share, range(start, start + micro), S=7 + wider)
        return MicroBatch(**{name: shard_batch(a, where) for name, a in arrays.items()})

    return [micro_batch(start) for start in range(0, 2 * K, micro)]


def shardings(tree: Any) -> list:
    return [(x.sharding, x.ndim) for x in jax.tree.leaves(tree)]


def same_shardings(a: list, b: list) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x.is_equivalent_to(y, ndim) for (x, ndim), (y, _) in pairs)


def step(
    *,
    micro: int = 16,
    share: int = 8,
    mesh: tuple[int, int, int] = (1, 1, 1),
    remat: str = "none",
    wider: int = 0,
    on_policy: bool = False,
    params: Params | None = None,
    optimizer: Any = SGD,
    x: Sequences | None = None,
    lr: float = 0.1,
    objective: Objective = OBJECTIVE,
    kernel: Any = None,
    layer_loop: str = "scan",
) -> Step:
    """One update, as train_grpo.py does it."""
    x, where = x or sequences(), layout(*mesh)
    compute = Compute(MODEL, FLOAT32, where, remat, kernel, layer_loop=layer_loop)
    state = init_state(laid_out(where.mesh, params), optimizer=optimizer, model=MODEL)
    grads, parts, logps = zero_grads(state.params), [], []
    before = shardings((state, grads))
    grads = grads if micro < 2 * K else None
    top = x.mask if x.top_mask is None else x.mask * x.top_mask
    counts = counts_by_hand(x.mask.sum(), 2 * K, top.sum())
    how = {"objective": objective, "temperature": TEMPERATURE, "compute": compute}
    for batch in micro_batches(x, micro, share, wider, where):
        batch = batch._replace(old_logps=None) if on_policy else batch
        grads, metrics, now = micro_step(state.params, grads, batch, counts, **how)
        parts.append(metrics)
        logps.append(np.where(batch.completion_mask, now, 0)[:, :T])
    loss = sum(metrics["loss"] for metrics in parts)
    state, norm = optimizer_step(
        state, grads, np.float32(lr), loss, optimizer=optimizer, model=MODEL
    )
    stayed = same_shardings(before, shardings((state, grads)))
    metrics = merge_metrics(parts) | {"grad_norm": float(norm)}
    grads, params = jax.device_get((grads, state.params))
    return Step(metrics, grads, params, np.concatenate(logps), stayed)


@functools.cache
def reference() -> Step:
    """The step in one micro-batch on one device."""
    return step()


def assert_close(a: Params, b: Params, atol: float) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=atol), a, b)


# ---- One step is what the formulas say -----------------------------------------------------------


def numpy_loss(params: Params, x: Sequences, old: np.ndarray) -> float:
    """The objective of the step in float64."""
    logps, _ = numpy_logps(params, x.completion_ids)
    total = 0.0
    for i, t in zip(*np.nonzero(x.mask), strict=True):
        ratio, A = math.exp(logps[i, t] - old[i, t]), float(x.advantages[i])
        gap = float(x.ref_logps[i, t]) - logps[i, t]
        clipped = min(max(ratio, 0.8), 1.3)
        total += -min(ratio * A, clipped * A) + 0.1 * (math.exp(gap) - gap - 1)
    return total / x.mask.sum()


def assert_gradient_is_the_slope(grads: Params, x: Sequences, old: np.ndarray) -> None:
    """The slope of numpy's loss along a random direction, for each kind of parameter."""
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


def test_loss_gradient_and_metrics_equal_those_of_numpy() -> None:
    x, got = sequences(), reference()
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
    # A second update of the same policy: old_logps are the logps that the first update returned.
    again = step(x=x._replace(old_logps=got.logps))
    assert again.metrics == pytest.approx(got.metrics, rel=1e-5, abs=1e-5)
    assert_close(again.grads, got.grads, 1e-5)
    # The second update of a step: the policy has moved; old_logps still come from before the first.
    moved = step(params=step(on_policy=True, lr=1.0).params, x=x._replace(old_logps=got.logps))
    change = (np.exp(moved.logps - got.logps) - 1) * np.sign(x.advantages)[:, None]
    cut = x.mask * np.where(x.advantages[:, None] > 0, change > 0.3, change > 0.2)
    assert moved.metrics["clip_ratio/region_mean"] == pytest.approx(cut.sum() / x.mask.sum())
    assert cut.sum() > 1


def test_reference_logps_equal_those_of_the_policy_before_its_first_update() -> None:
    where = layout(1, 1, 1)
    [batch] = micro_batches(sequences(), 16, 8, 0, where)
    compute = Compute(MODEL, FLOAT32, where)
    logps, entropy = compute_logps_and_entropies(laid_out(where.mesh), batch, TEMPERATURE, compute)
    logps, mask = np.asarray(logps), sequences().mask
    assert logps.shape == entropy.shape == (16, T) and logps.dtype == FLOAT32
    np.testing.assert_allclose(logps * mask, reference().logps * mask, atol=1e-5)


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


# ---- Settings of speed and memory leave a step unchanged -----------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"micro": 1, "share": 1},
        {"micro": 2, "share": 2, "remat": "dots", "wider": 3},
        {"micro": 4, "share": 4, "remat": "full"},
        {"share": 2, "mesh": (1, 8, 1)},
        {"share": 4, "mesh": (1, 4, 2), "remat": "full"},
        {"layer_loop": "unroll"},
        {"micro": 8, "share": 2, "mesh": (1, 2, 2), "layer_loop": "unroll"},
    ],
    ids=str,
)
def test_how_a_step_is_computed_does_not_change_it(settings: dict[str, Any]) -> None:
    """Micro-batches, shared prompts, recomputation, padding, devices and unrolled layers."""
    got = step(**settings)
    assert got.metrics == pytest.approx(reference().metrics, rel=1e-5, abs=1e-6)
    mask = sequences().mask
    np.testing.assert_allclose(got.logps * mask, reference().logps * mask, atol=1e-5)
    assert_close(got.grads, reference().grads, 1e-6)
    assert_close(got.params, reference().params, 1e-6)
    assert got.stayed, "if a sharding changes, the next step compiles again"
