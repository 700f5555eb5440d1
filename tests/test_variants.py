"""Claims about update.py: one step of every variant of the objective, in any micro-batches.

The reference is the complete step in float64 numpy; it gives gradients as finite differences.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_loss_pallas import KERNELS
from test_sampling import weights
from test_update import (
    K,
    Sequences,
    Step,
    assert_close,
    numpy_logps,
    sequences,
    step,
)

from loss import MERGE, Objective
from metrics import merge_metrics, merge_updates
from models.model import Params

CLIP = {"eps_low": 0.2, "eps_high": 0.3}
KL, ENTROPY = {"beta": 0.1}, {"entropy_coef": 0.2}
VARIANTS = {
    "dapo": Objective("dapo", **CLIP),
    "dapo with KL": Objective("dapo", **CLIP, **KL),
    "grpo": Objective("grpo", **CLIP, delta=1.5, is_mode="sequence_mask", is_cap=1.2),
    "dr_grpo": Objective("dr_grpo", max_completion_length=9, is_mode="token_truncate", is_cap=1.1),
    "cispo": Objective("cispo", eps_high=1.2, **ENTROPY),
    "gspo": Objective("gspo", 3e-4, 4e-4, **KL, is_mode="sequence_truncate", is_cap=1.2),
    "sapo": Objective("sapo", **ENTROPY, **KL, kl_estimator="k2", kl_bias_correction=False),
}
TOP = ("cispo", "gspo", "sapo")  # the variants that learn from a part of the tokens
NOT_COUNTED = [4, 5, 11]  # truncated completions; they count only in the number of sequences


@functools.cache
def given(variant: str) -> Sequences:
    """The sequences of test_update.py; three of them have no token that counts."""
    x, rng = sequences(), np.random.default_rng(2)
    mask = x.mask.copy()
    mask[NOT_COUNTED] = 0
    garbage = np.where(np.arange(2 * K) == 5, np.float32("nan"), np.float32(99))[:, None]
    sampling, old, ref = (np.where(mask, a, garbage) for a in (x[2], x.old_logps, x.ref_logps))
    top = (rng.random(mask.shape) < 0.5) | (mask == 0)
    top = top.astype(np.int32) if variant in TOP else None
    return Sequences(x.completion_ids, mask, sampling, x.advantages, old, ref, top)


def run(variant: str, **settings: Any) -> Step:
    settings = {"micro": 2, "share": 2, "x": given(variant)} | settings
    return step(objective=VARIANTS[variant], **settings)


@functools.cache
def in_pairs(variant: str) -> Step:
    """The step in micro-batches of 2 sequences; one micro-batch has no token that counts."""
    return run(variant)


# ---- The step in numpy ---------------------------------------------------------------------------


def numpy_step(
    o: Objective, x: Sequences, logps: np.ndarray, entropy: np.ndarray
) -> dict[str, float]:
    """The metrics of the step in float64, its loss among them."""
    num_tokens, num_sequences, tokens, sequences_cut = x.mask.sum(), 2 * K, [], []
    top = x.mask if x.top_mask is None else x.mask * x.top_mask
    fixed = numpy_logps(weights(), x.completion_ids)[0]  # no gradient goes through these
    for i in np.flatnonzero(x.mask.any(axis=1)):
        counted = np.flatnonzero(x.mask[i])
        n, A = len(counted), float(x.advantages[i])
        arrays = (logps, fixed, x.old_logps, x.sampling_logps, x.ref_logps)
        now, held, old, sampling, ref = (a[i, counted].astype(float) for a in arrays)

        ratio = np.exp(np.full(n, (now - old).mean()) if o.loss_type == "gspo" else now - old)
        bound = np.minimum(ratio, o.delta or math.inf)
        low, high = (bound < 1 - o.eps_low) & (A < 0), (bound > 1 + o.eps_high) & (A > 0)
        loss = -np.minimum(bound * A, np.clip(ratio, 1 - o.eps_low, 1 + o.eps_high) * A)
        if o.loss_type == "cispo":
            high = (ratio > o.eps_high) & (A > 0)
            loss = -np.minimum(np.exp(held - old), o.eps_high) * A * now
        if o.loss_type == "sapo":
            tau = 1.0 if A > 0 else 1.05
            loss = -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * A

        gap = old - sampling
        weight = np.exp(np.full(n, gap.sum()) if "sequence" in o.is_mode else gap)
        over = weight > o.is_cap
        weight = np.where(over, o.is_cap if "truncate" in o.is_mode else 0, weight)
        weight = np.ones(n) if o.is_mode == "none" else weight
        kl = np.exp(ref - now) - (ref - now) - 1 if o.kl_estimator == "k3" else (ref - now) ** 2 / 2
        kl = kl * ratio if o.kl_bias_correction else kl
        divisor = n * num_sequences if o.loss_type in ("grpo", "gspo", "sapo") else num_tokens
        divisor = 9 * num_sequences if o.loss_type == "dr_grpo" else divisor
        losses = (loss * weight * top[i, counted] + o.beta * kl) / divisor
        tokens.append([losses, low, high, kl, weight, over, np.abs(gap)])
        sequences_cut.append([low.mean(), high.mean()])

    losses, low, high, kl, weight, over, gap = np.concatenate(tokens, axis=1)
    low_of, high_of = np.transpose(sequences_cut)  # of each sequence
    bonus = o.entropy_coef * entropy[top == 1].mean()
    metrics = {
        "loss": losses.sum() - bonus,
        "sampling_logp_difference/mean": gap.mean(),
        "sampling_logp_difference/max": gap.max(),
    }
    if o.loss_type == "cispo":
        metrics["cispo_clip_ratio"] = high.mean()
    elif o.loss_type != "sapo":
        shares = [low.mean(), high.mean()]
        if o.loss_type == "gspo":
            shares = [low_of.sum() / num_sequences, high_of.sum() / num_sequences]
        names = ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
        values = (*shares, sum(shares), low_of.min(), high_of.max())
        metrics |= {f"clip_ratio/{name}": x for name, x in zip(names, values, strict=True)}
    if o.beta:
        metrics["kl"] = kl.mean()
    if o.is_mode != "none":
        metrics |= {"is_weight/mean": weight.mean(), "is_weight/over_cap": over.mean()}
    if o.entropy_coef:
        metrics["policy_loss"] = losses.sum()
    if o.entropy_coef or x.top_mask is not None:
        metrics["exact_entropy"] = entropy[x.mask == 1].mean()
    return metrics


@functools.cache
def moved() -> list[tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]]:
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
    return [(value(*ahead) - value(*behind)) / 2e-5 for _, (ahead, behind) in moved()]


def along(grads: Params) -> list[float]:
    pairs = zip(jax.tree.leaves(grads), moved(), strict=True)
    return [float((grad * way).sum()) for grad, (way, _) in pairs]


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_metrics_and_gradient_in_micro_batches_follow_the_formulas(variant: str) -> None:
    o, x, got = VARIANTS[variant], given(variant), in_pairs(variant)
    expected = numpy_step(o, x, *numpy_logps(weights(), x.completion_ids))
    cuts = [expected[n] for n in expected if "clip" in n and "min" not in n or "over" in n]
    assert all(0 < share for share in cuts), "the case must cut something"
    norm = math.sqrt(sum((g.astype(float) ** 2).sum() for g in jax.tree.leaves(got.grads)))
    assert got.metrics == pytest.approx(expected | {"grad_norm": norm}, rel=2e-5, abs=1e-6)
    expected = slopes(lambda *policy: numpy_step(o, x, *policy)["loss"])
    assert along(got.grads) == pytest.approx(expected, rel=1e-4, abs=2e-6)


@pytest.mark.parametrize(
    "variant, settings",
    [
        ("gspo", {"micro": 16, "share": 8}),
        ("cispo", {"micro": 1, "share": 1}),
        ("sapo", {"micro": 4, "share": 4, "wider": 3}),
        ("dr_grpo", {"micro": 16, "share": 4, "mesh": (1, 4, 2)}),
    ],
    ids=str,
)
def test_how_a_variant_is_computed_does_not_change_it(variant: str, settings: dict) -> None:
    got, pairs = run(variant, **settings), in_pairs(variant)
    assert got.metrics == pytest.approx(pairs.metrics, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(got.logps, pairs.logps, atol=1e-5)
    assert_close(got.grads, pairs.grads, 1e-6)
    assert_close(got.params, pairs.params, 1e-6)


@pytest.mark.parametrize("impl", ["jax", "pallas"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 4, 2)], ids=str)
def test_the_vocabulary_in_tiles_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, impl: str, mesh: tuple[int, int, int]
) -> None:
    """So it is with remat and on a mesh, and for the gradient of the entropy."""
    monkeypatch.setattr("models.logps.LOGITS_TILE_BYTES", 1)
    got = run("cispo", micro=16, share=4, mesh=mesh, kernel=KERNELS[impl], remat="full")
    expected = in_pairs("cispo")
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
    assert_close(got.grads, expected.grads, 1e-6)
    assert got.stayed


def test_the_kl_changes_the_gradient_and_not_only_the_log() -> None:
    """The two variants differ in the KL alone, which has beta = 0.1."""
    x = given("dapo with KL")
    apart = jax.tree.map(np.subtract, in_pairs("dapo with KL").grads, in_pairs("dapo").grads)
    kl = slopes(lambda *policy: 0.1 * numpy_step(VARIANTS["dapo with KL"], x, *policy)["kl"])
    assert np.abs(kl).max() > 0.01
    assert along(apart) == pytest.approx(kl, rel=1e-4, abs=2e-6)


def test_the_sampler_is_compared_with_the_policy_before_the_first_update() -> None:
    """The sampler is 0.5 off, and 3 at the first token. The policy of now does not matter."""
    x = given("dapo")
    assert x.mask[0, 0] and not x.mask[5].any()
    sampling = x.old_logps + np.float32(0.5)
    sampling[0, 0] -= 3.5
    metrics = run("dapo", x=x._replace(sampling_logps=sampling)).metrics
    tokens = x.mask.sum()
    mean = (0.5 * (tokens - 1) + 3) / tokens
    assert metrics["sampling_logp_difference/mean"] == pytest.approx(mean, rel=1e-5)
    assert metrics["sampling_logp_difference/max"] == pytest.approx(3, rel=1e-5)


def test_a_sequence_or_micro_batch_without_a_token_is_no_extreme() -> None:
    """Every token that counts was bad and has become 1/e as likely, so all are clipped."""
    x = given("dapo")
    old, advantages = in_pairs("dapo").logps + 1, np.full(2 * K, -1, np.float32)
    metrics = run("dapo", x=x._replace(old_logps=old, advantages=advantages)).metrics
    shares = {name: value for name, value in metrics.items() if "clip_ratio" in name}
    assert shares == pytest.approx(
        {f"clip_ratio/{name}": 1 for name in ("low_mean", "region_mean", "low_min")}
        | {"clip_ratio/high_mean": 0, "clip_ratio/high_max": 0}
    )


def test_every_metric_that_is_an_extreme_is_merged_as_its_name_says() -> None:
    """The metrics are those that micro_step gives for all variants. All others are summed."""
    found = {name for variant in VARIANTS for name in in_pairs(variant).metrics}
    extremes = {name for name in found if re.search("(^|[_/])(min|max)$", name)}
    assert extremes == {
        "clip_ratio/low_min",
        "clip_ratio/high_max",
        "sampling_logp_difference/max",
    }
    assert {name: MERGE[name].__name__ for name in MERGE} == {n: n[-3:] for n in extremes}


def test_the_updates_of_a_step_have_means_and_the_extremes_of_all() -> None:
    updates = [
        {"loss": 0.5, "clip_ratio/low_min": 0.0, "clip_ratio/high_max": 0.0, "grad_norm": 1.0},
        {"loss": 0.1, "clip_ratio/low_min": 0.25, "clip_ratio/high_max": 0.5, "grad_norm": 2.0},
    ]
    expected = {
        "loss": 0.3,
        "clip_ratio/low_min": 0.0,
        "clip_ratio/high_max": 0.5,
        "grad_norm": 1.5,
    }
    expected |= {"clip_ratio_first/low_min": 0.0, "clip_ratio_first/high_max": 0.0}
    expected |= {"clip_ratio_later/low_min": 0.25, "clip_ratio_later/high_max": 0.5}
    assert merge_updates(updates) == pytest.approx(expected)
    assert merge_updates(updates[:1]) == updates[0]


def test_extremes_are_merged_as_extremes_and_other_metrics_are_summed() -> None:
    parts = [
        {"loss": 0.5, "clip_ratio/low_min": 0.25, "clip_ratio/high_max": 0.5, "entropy": 1.0},
        {"loss": -2.0, "clip_ratio/low_min": 1.0, "clip_ratio/high_max": 0.75, "entropy": 0.5},
        {"loss": 0.25, "clip_ratio/low_min": 0.5, "clip_ratio/high_max": 0.0, "entropy": 0.0},
    ]
    merged = merge_metrics([jax.tree.map(jnp.float32, part) for part in parts])
    assert merged == {
        "loss": -1.25,
        "clip_ratio/low_min": 0.25,
        "clip_ratio/high_max": 0.75,
        "entropy": 1.5,
    }
    assert {type(value) for value in merged.values()} == {float}
