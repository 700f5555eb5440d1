"""Claims about update.py: one step's loss, gradient and new parameters, however it is computed.

The reference is the complete step in float64 numpy, by the model of small_model.py; it gives
gradients as finite differences.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_model import (
    KERNELS,
    QWEN2,
    assert_close,
    batch_of,
    counts_by_hand,
    in_rows,
    laid_out,
    numpy_logits,
    numpy_softmax,
    same_shardings,
    shardings,
    train_layout,
    weights,
)

from loss import Objective
from model.layout import shard_batch
from model.network import ComputeConfig
from model.params import Params
from optimizer import Optimizer, init_state, optimizer_step
from rows import Batch, RowLimits, pack, plan_rows
from update import merge_metrics, micro_step

K, T = 8, 6
PROMPTS = [[5, 11, 2], [7, 7, 30, 1, 19, 8]]
TEMPERATURE = 0.7
SGD = Optimizer("sgd", weight_decay=0.1, clip_norm=0.5)
FLOAT32 = jnp.dtype("float32")
TOKEN, SEQUENCE = (f"{level}_truncate" for level in ("token", "sequence"))
VARIANTS = {
    "dapo": Objective("dapo", 0.2, 0.3, beta=0.1, is_mode=TOKEN, is_cap=1.1),
    "gspo": Objective("gspo", 3e-4, 4e-4, beta=0.1, is_mode=SEQUENCE, is_cap=1.2),
    "cispo": Objective("cispo", eps_high=1.2, entropy_coef=0.2),
}
TOP = ("cispo", "gspo")  # the variants that learn from a part of the tokens
NOT_COUNTED = [4, 5, 11]  # truncated completions; they count only in the number of sequences


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
def sequences() -> Batch:
    """The B = 16 sequences of a step; the values under the mask are garbage. Old and reference
    logps are near the model's, so that some ratios clip."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, T + 1, 2 * K)
    lengths[:2] = T, 1
    ids = rng.integers(0, QWEN2.vocab_size, (2 * K, T)).astype(np.int32)
    mask = np.arange(T) < lengths[:, None]
    logps = numpy_logps(weights(), ids)[0]
    noise = [np.where(mask, s * rng.normal(size=mask.shape), 99) for s in (0.1, 0.3, 0.5)]
    sampling, old, ref = (np.float32(logps + x) for x in noise)
    advantages = np.float32(rng.normal(size=2 * K))
    return batch_of(PROMPTS, ids, mask.astype(np.int32), sampling, advantages, old, ref)


@functools.cache
def batch_for(variant: str) -> Batch:
    """The sequences; three of them have no token that counts."""
    x, rng = sequences(), np.random.default_rng(2)
    mask = x.completion_mask.copy()
    mask[NOT_COUNTED] = 0
    garbage = np.where(np.arange(2 * K) == 5, np.float32("nan"), np.float32(99))[:, None]
    names = ("sampling_logps", "old_logps", "ref_logps")
    logps = {name: np.where(mask, getattr(x, name), garbage) for name in names}
    top = ((rng.random(mask.shape) < 0.5) | (mask == 0)).astype(np.int32)
    top = top if variant in TOP else None
    lengths = mask.sum(axis=1)
    return x._replace(completion_mask=mask, lengths=lengths, top_mask=top, **logps)


def counted_top(x: Batch) -> np.ndarray:
    """[B, T], 1 on the tokens that count and that the policy loss is of."""
    return x.completion_mask if x.top_mask is None else x.completion_mask * x.top_mask


class Step(NamedTuple):
    metrics: dict[str, float]
    grads: Params
    params: Params  # after the update
    stayed: bool  # no array has changed its sharding


def step(
    variant: str,
    *,
    micro: int = 16,
    share: int = 8,
    packed: bool = False,
    mesh: tuple[int, int, int] = (1, 1, 1),
    remat: str = "none",
    on_policy: bool = False,
    kernel: str = "jax",
    layer_loop: str = "scan",
    dtype: str = "float32",
) -> Step:
    """One update, as train_grpo.py does it.

    micro: sequences of a micro-batch. share: consecutive sequences with one prompt in common.
    packed: the rows are those of plan_rows. on_policy: without old_logps.
    """
    batch, where = batch_for(variant), train_layout(*mesh)
    if packed:
        limits = RowLimits(where.batch_shards, micro, K, T, longest_prompt_slots=8, unit=1)
        steps, widths = plan_rows(batch, range(2 * K), limits)
        micro_batches = [pack(batch, rows, widths, pad_id=3) for rows in steps]
    else:
        starts = range(0, 2 * K, micro)
        micro_batches = [in_rows(batch, share, range(i, i + micro), S=7) for i in starts]
    compute = ComputeConfig(
        QWEN2, jnp.dtype(dtype), where, remat, KERNELS[kernel], layer_loop=layer_loop
    )
    state = init_state(laid_out(where.mesh), optimizer=SGD, model=QWEN2)
    grads, parts = jax.tree.map(jnp.zeros_like, state.params), []
    before = shardings((state, grads))
    grads = grads if len(micro_batches) > 1 else None
    counts = counts_by_hand(batch.completion_mask.sum(), 2 * K, counted_top(batch).sum())
    settings = {"objective": VARIANTS[variant], "temperature": TEMPERATURE, "compute": compute}
    for micro_batch in micro_batches:
        micro_batch = micro_batch._replace(old_logps=None) if on_policy else micro_batch
        micro_batch = shard_batch(micro_batch, where)
        grads, metrics = micro_step(state.params, grads, micro_batch, counts, **settings)
        parts.append(metrics)
    loss = sum(metrics["loss"] for metrics in parts)
    state, norms = optimizer_step(state, grads, np.float32(0.1), loss, optimizer=SGD, model=QWEN2)
    stayed = same_shardings(before, shardings((state, grads)))
    metrics = merge_metrics(parts) | {"grad_norm": norms["grad_norm"]}
    return Step(metrics, *jax.device_get((grads, state.params)), stayed)


@functools.cache
def step_by_pairs(variant: str, on_policy: bool = False) -> Step:
    """The step in micro-batches of 2 sequences; one micro-batch has no token that counts."""
    return step(variant, micro=2, share=2, on_policy=on_policy)


# ---- One step is what the formulas say -----------------------------------------------------------


def numpy_step(o: Objective, x: Batch, logps: np.ndarray, entropy: np.ndarray) -> dict[str, float]:
    """The metrics of the step in float64, its loss among them."""
    mask, top, tokens, sequences_cut = x.completion_mask, counted_top(x), [], []
    num_tokens, num_sequences = mask.sum(), 2 * K
    fixed = numpy_logps(weights(), x.completion_ids)[0]  # no gradient goes through these
    for i in np.flatnonzero(mask.any(axis=1)):
        counted = np.flatnonzero(mask[i])
        n, A = len(counted), float(x.advantages[i])
        arrays = (logps, fixed, x.old_logps, x.sampling_logps, x.ref_logps)
        now, held, old, sampling, ref = (a[i, counted].astype(float) for a in arrays)

        ratio = np.exp(np.full(n, (now - old).mean()) if o.loss_type == "gspo" else now - old)
        low, high = (ratio < 1 - o.eps_low) & (A < 0), (ratio > 1 + o.eps_high) & (A > 0)
        loss = -np.minimum(ratio * A, np.clip(ratio, 1 - o.eps_low, 1 + o.eps_high) * A)
        if o.loss_type == "cispo":
            high = (ratio > o.eps_high) & (A > 0)
            loss = -np.minimum(np.exp(held - old), o.eps_high) * A * now

        gap = old - sampling
        weight = np.exp(np.full(n, gap.sum()) if o.is_mode == SEQUENCE else gap)
        over = weight > o.is_cap
        weight = np.ones(n) if o.is_mode == "none" else np.minimum(weight, o.is_cap)
        kl = ratio * (np.exp(ref - now) - (ref - now) - 1)
        divisor = n * num_sequences if o.loss_type == "gspo" else num_tokens
        losses = (loss * weight * top[i, counted] + o.beta * kl) / divisor
        tokens.append([losses, low, high, kl, weight, over, np.abs(gap)])
        sequences_cut.append([low.mean(), high.mean()])

    losses, low, high, kl, weight, over, gap = np.concatenate(tokens, axis=1)
    low_of, high_of = np.transpose(sequences_cut)  # of each sequence
    metrics = {
        "loss": losses.sum() - o.entropy_coef * entropy[top == 1].mean(),
        "sampling_logp_difference/mean": gap.mean(),
        "sampling_logp_difference/max": gap.max(),
    }
    if o.loss_type == "cispo":
        entropies = {"policy_loss": losses.sum(), "exact_entropy": entropy[mask == 1].mean()}
        return metrics | entropies | {"cispo_clip_ratio": high.mean()}
    shares = [low.mean(), high.mean()]
    if o.loss_type == "gspo":
        shares = [low_of.sum() / num_sequences, high_of.sum() / num_sequences]
        metrics["exact_entropy"] = entropy[mask == 1].mean()
    names = ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
    values = (*shares, sum(shares), low_of.min(), high_of.max())
    metrics |= {f"clip_ratio/{name}": x for name, x in zip(names, values, strict=True)}
    weights_of = {"is_weight/mean": weight.mean(), "is_weight/over_cap": over.mean()}
    return metrics | weights_of | {"kl": kl.mean()}


@functools.cache
def shifted_logps() -> list[tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]]:
    """For each array of parameters: a random direction, and numpy_logps ahead and behind."""
    leaves, tree = jax.tree.flatten(weights())
    rng = np.random.default_rng(5)
    found = []
    for i, leaf in enumerate(leaves):
        way = rng.normal(size=leaf.shape)
        ends = [[*leaves[:i], leaf + e * way, *leaves[i + 1 :]] for e in (1e-5, -1e-5)]
        ids = sequences().completion_ids
        found.append((way, [numpy_logps(tree.unflatten(end), ids) for end in ends]))
    return found


def slopes(value: Callable[[np.ndarray, np.ndarray], float]) -> list[float]:
    """The slopes of value(logps, entropy), along each direction."""
    return [(value(*ahead) - value(*behind)) / 2e-5 for _, (ahead, behind) in shifted_logps()]


def along(grads: Params) -> list[float]:
    pairs = zip(jax.tree.leaves(grads), shifted_logps(), strict=True)
    return [float((grad * way).sum()) for grad, (way, _) in pairs]


@pytest.mark.parametrize(
    "variant, on_policy",
    [*((variant, False) for variant in VARIANTS), pytest.param("dapo", True, id="ratio 1")],
)
def test_loss_metrics_and_gradient_in_micro_batches_follow_the_formulas(
    variant: str, on_policy: bool
) -> None:
    """Without old_logps the ratio is one, and the gradient flows."""
    o, x, got = VARIANTS[variant], batch_for(variant), step_by_pairs(variant, on_policy)
    logps, entropy = numpy_logps(weights(), x.completion_ids)
    if on_policy:
        x = x._replace(old_logps=logps)
    expected = numpy_step(o, x, logps, entropy)
    clipped = [expected[n] > 0 for n in expected if "clip" in n and "min" not in n]
    assert {*clipped} == {not on_policy} and expected.get("is_weight/over_cap", 1) > 0
    norm = math.sqrt(sum((g.astype(float) ** 2).sum() for g in jax.tree.leaves(got.grads)))
    assert got.metrics == pytest.approx(expected | {"grad_norm": norm}, rel=2e-5, abs=1e-6)
    expected = slopes(lambda *policy: numpy_step(o, x, *policy)["loss"])
    assert along(got.grads) == pytest.approx(expected, rel=1e-4, abs=2e-6)


# ---- Settings of speed and memory leave a step unchanged -----------------------------------------


@pytest.mark.parametrize(
    "variant, settings",
    [
        ("dapo", {"micro": 8, "share": 2, "mesh": (1, 2, 2), "layer_loop": "unroll"}),
        ("dapo", {"packed": True, "micro": 4, "remat": "dots", "layer_loop": "unroll"}),
        ("dapo", {"packed": True, "micro": 4, "mesh": (2, 2, 2), "remat": "full"}),
        ("cispo", {"share": 4, "mesh": (1, 4, 2), "kernel": "pallas", "remat": "full"}),
    ],
    ids=str,
)
def test_how_a_step_is_computed_does_not_change_it(
    variant: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches, shared prompts, packed rows, recomputation, padding, devices, unrolled layers
    and the kernel, also for the gradient of the entropy. The reference follows the formulas."""
    monkeypatch.setattr("loss_pallas.block_sizes", lambda *_, **__: (64, 16))
    got, expected = step(variant, **settings), step_by_pairs(variant)
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
    assert_close(got.grads, expected.grads, 1e-6)
    assert_close(got.params, expected.params, 1e-6)
    assert got.stayed, "if a sharding changes, the next step compiles again"


def test_in_bfloat16_the_gradient_of_a_step_is_off_by_a_few_percent() -> None:
    """Micro-batches do not make it worse, since their gradients are added in float32."""
    settings = {"micro": 1, "share": 1, "layer_loop": "unroll", "on_policy": True}
    got = step("dapo", dtype="bfloat16", **settings).grads
    exact = step_by_pairs("dapo", on_policy=True).grads
    assert {x.dtype for x in jax.tree.leaves(got)} == {FLOAT32}
    error = optax.tree.norm(jax.tree.map(np.subtract, got, exact))
    assert 1e-3 < error / optax.tree.norm(exact) < 0.05
