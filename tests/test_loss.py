"""Claims about the objective of loss.py, in every variant; its advantages: test_advantages.py.

goldens/trl.npz holds what TRL 1.16 makes of seeded random inputs, trl.json the settings behind it.
goldens/objectives.npz and .json have other inputs and newer objectives, of TRL 1.16 and verl 0.9.1.
"""

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from small_model import value_and_grad

from loss import MERGE, TOKEN_LOSSES, Objective, policy_loss, sampler_weights, top_entropy_mask
from objectives import OBJECTIVES

GOLDENS = Path(__file__).parent / "goldens"
TRL = json.loads((GOLDENS / "trl.json").read_text(encoding="utf-8"))
NEWER = json.loads((GOLDENS / "objectives.json").read_text(encoding="utf-8"))
ARRAYS = {**np.load(GOLDENS / "trl.npz"), **np.load(GOLDENS / "objectives.npz")}
NAN, INF, LN2 = math.nan, math.inf, math.log(2)


# ---- The objective: TRL's figures ----------------------------------------------------------------


def trl_inputs(
    old: str = "old_logps",
    tool: bool = False,
    weight: str = "is_ratio_token",
    sampling: str = "",
    group: str = "loss",
) -> dict:
    """Inputs with finite garbage under the mask; sequence 4 has no token."""
    names = ("logps", "ref_logps", "entropy", "advantages")
    x = {name: ARRAYS[f"{group}.in.{name}"] for name in names}
    x["old_logps"], x["mask"] = ARRAYS[f"{group}.in.{old}"], ARRAYS[f"{group}.in.completion_mask"]
    if tool:
        x["mask"] = x["mask"] * ARRAYS[f"{group}.in.tool_mask"]
    ratio = ARRAYS[f"{group}.in.{weight}"]  # [B, T], or [B, 1] of the sequence
    gap = np.log(np.where(ratio > 0, ratio, 10.0))  # 0 is what TRL makes of more than its cap
    gap = gap if weight == "is_ratio_token" else gap * np.eye(1, 12)  # [B, T]
    x["sampling_logps"] = np.float32(x["old_logps"] - gap)
    if sampling:
        x["sampling_logps"] = ARRAYS[f"{group}.in.{sampling}"]
    return {name: value.copy() for name, value in x.items()}


def part(x: dict, chosen: slice = slice(8), quantile: float = 1.0, **others: Any) -> tuple:
    """Returns value_and_grad of the micro-batch `chosen` of the sequences of x."""
    top = top_entropy_mask(x["entropy"], x["mask"], quantile)
    counts = {"num_tokens": max(x["mask"].sum(), 1), "num_sequences": len(x["mask"])}
    counts["num_top_tokens"] = max(top.sum(), 1)
    arrays = {name: value[chosen] for name, value in x.items()}
    arrays["old"] = arrays.pop("old_logps")
    arrays["top_mask"] = (top | (x["mask"] == 0))[chosen]  # 1 under the mask is garbage too.
    return value_and_grad(**arrays, **counts | others)


CASES = {
    f"{group}.{name}": golden
    for group, cases in (("loss", TRL["loss"]), ("objectives", NEWER["objectives"]))
    for name, golden in cases.items()
    # TRL has a ratio for each sequence with other losses than grpo, too.
    if name.startswith("grpo.") or "importance_sampling_level" not in golden["settings"]
}


@pytest.mark.parametrize("name", CASES)
def test_the_objective_is_that_of_its_source(name: str) -> None:
    """Of TRL; dppo, and gmpo in the cases geo_mean, of verl."""
    golden, group = CASES[name], name.split(".")[0]
    inputs, settings = golden["inputs"].copy(), golden["settings"].copy()
    if "off_policy_mask_threshold" in settings:
        inputs.setdefault("sampling", inputs["old"])  # as TRL without a sampler of its own
    x = trl_inputs(**inputs, group=group)
    if settings["loss_type"] == "bnpo":  # With the counts of the update it is dapo.
        settings["loss_type"] = "dapo"
    if settings["loss_type"] == "dr_grpo":
        settings["max_length_sample"] = settings.pop("max_completion_length", 32)
    chosen = slice(*golden["rows"])
    if settings.pop("importance_sampling_level", "token") == "sequence":
        settings["loss_type"] = "gspo"
    if settings["loss_type"].startswith("dppo"):  # verl counts an advantage of 0 as negative.
        x["advantages"][x["advantages"] == 0] = -1e-30
    expected = ARRAYS[f"{name}.loss"]
    if ".gmpo_trl." in name:  # TRL gives a sequence without a token the ratio 1.
        without = x["mask"][chosen].sum(axis=1) == 0
        expected = expected + x["advantages"][chosen][without].sum() / len(x["mask"])
    loss, grad, metrics = part(x, chosen, **settings)
    assert loss == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(grad, ARRAYS[f"{name}.grad_logps"], rtol=1e-6, atol=1e-6)
    # Its means are over a micro-batch, ours are the micro-batch's share of the update's mean.
    share = x["mask"][chosen].sum() / settings["num_tokens"]
    if settings["loss_type"] in ("gspo", "luspo"):
        share = len(x["mask"][chosen]) / settings["num_sequences"]
    expected = {n: v * share if n.endswith("mean") else v for n, v in golden["metrics"].items()}
    assert {n: metrics[n] for n in expected} == pytest.approx(expected, abs=1e-6)


# ---- The objective: every variant ----------------------------------------------------------------

VARIANTS = [
    {},
    {"loss_type": "dapo", "delta": 1.1, "eps_high": 0.3},
    {"loss_type": "grpo", "entropy_coef": 0.1},
    {"loss_type": "dr_grpo", "max_length_sample": 32, "quantile": 0.5, "is_mode": "token_mask"},
    {"loss_type": "gspo", "eps_low": 0.01, "eps_high": 0.02, "beta": 0.1},
    {"loss_type": "cispo", "eps_high": 1.2, "is_mode": "token_truncate", "is_cap": 1.1},
    {"loss_type": "sapo", "is_mode": "sequence_truncate", "is_cap": 1.1},
    {"loss_type": "sft"},
    {"loss_type": "luspo", "eps_low": 0.01, "eps_high": 0.02, "beta": 0.1},
    {"loss_type": "gmpo", "is_mode": "token_mask", "is_cap": 1.1, "quantile": 0.5},
    {"loss_type": "vespo", "is_mode": "token_truncate", "is_cap": 1.1},
    {"loss_type": "dppo_tv", "eps_low": 0.01, "eps_high": 0.02, "delta": 1.1},
    {"loss_type": "dppo_kl", "eps_low": 1e-3, "eps_high": 1e-3, "entropy_coef": 0.1},
    {"off_policy_mask_threshold": 0.01, "beta": 0.1, "entropy_coef": 0.1},
    {"is_mode": "token_mask", "is_cap": 1.1, "beta": 0.1, "kl_estimator": "k1"},
    {"is_mode": "sequence_mask", "is_cap": 1.1, "beta": 0.1, "kl_bias_correction": False},
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


@every_variant
def test_what_is_under_the_mask_changes_nothing_and_without_a_token_a_step_teaches_nothing(
    variant: dict,
) -> None:
    clean = trl_inputs()
    under = clean["mask"] == 0
    loss, grad, metrics = part(clean, **variant)
    assert under[4].all() and (grad[under] == 0).all() and (grad[~under] != 0).any()
    for garbage in ((-1e4, 1e4), (INF, -INF), (NAN, NAN)):
        dirty = trl_inputs()
        for i, name in enumerate(("logps", "old_logps", "entropy", "ref_logps", "sampling_logps")):
            dirty[name][under] = garbage[i % 2]
        dirty_loss, dirty_grad, dirty_metrics = part(dirty, **variant)
        assert (dirty_loss, dirty_metrics) == (loss, metrics)
        assert dirty_grad.tolist() == grad.tolist()
    clean["mask"][:] = 0
    loss, grad, metrics = part(clean, **variant)
    assert loss == 0 and not grad.any() and np.isfinite(list(metrics.values())).all()


@every_variant
def test_micro_batches_add_up_to_the_batch(variant: dict) -> None:
    x = trl_inputs()
    loss, grad, metrics = part(x, **variant)
    parts = [part(x, slice(*rows), **variant) for rows in ((0, 1), (1, 5), (5, 8))]
    losses, grads, partial = zip(*parts, strict=True)
    assert sum(losses) == pytest.approx(loss, abs=1e-6)
    np.testing.assert_allclose(np.concatenate(grads), grad, atol=1e-7)
    for name, of_step in metrics.items():
        merged = MERGE.get(name, sum)(p[name] for p in partial)
        assert merged == pytest.approx(of_step, abs=1e-6), name


def test_each_objective_has_an_entry_of_facts_and_a_loss_of_a_token() -> None:
    assert {*OBJECTIVES} == {*TOKEN_LOSSES}


@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_an_objective_reads_the_settings_of_clipping_that_its_facts_name(loss_type: str) -> None:
    """The gradient depends on these alone."""
    first = {"eps_low": 0.01, "eps_high": 0.01, "delta": 0.0}
    x, settings = trl_inputs(), first | {"loss_type": loss_type, "max_length_sample": 32}
    grad = part(x, **settings)[1]
    others = {"eps_low": 0.3, "eps_high": 0.3, "delta": 0.5}
    read = {n for n in others if (part(x, **settings | {n: others[n]})[1] != grad).any()}
    assert read == {*OBJECTIVES[loss_type].reads}


# ---- The objective: by hand ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss_type, length, words",
    [
        ("dr_grpo", 0, "divides by max_length_sample=0"),
        ("dr_grpo", -1, "divides by max_length_sample=-1"),
        ("ppo", 2, "is not known"),
    ],
)
def test_no_objective_and_dr_grpo_without_a_length_are_errors_and_not_nan(
    loss_type: str, length: int, words: str
) -> None:
    x, objective = np.full((1, 2), -1.0), Objective(loss_type, max_length_sample=length)
    with pytest.raises(ValueError, match=f"^LOSS_TYPE={loss_type} {words}$"):
        policy_loss(x, x, np.zeros(1), np.ones((1, 2)), 2.0, objective=objective)


@pytest.mark.parametrize(
    "kind, corrected, ratio, kl, slope",
    [  # ref_logps - logps = ln 2; corrected by the ratio r: r k, of slope r (k + dk/dlogp)
        ("k1", False, 2.0, -0.6931472, 1.0),
        ("k2", False, 2.0, 0.2402265, -0.6931472),
        ("k1", True, 2.0, -1.3862944, 0.6137056),
        ("k2", True, 2.0, 0.4804530, -1.3862944),
    ],
)
def test_the_kl_by_hand(kind: str, corrected: bool, ratio: float, kl: float, slope: float) -> None:
    logp = math.log(ratio) - 3
    step = ([[logp, -1.0]], [[-3.0, -1.0]], [0.0], [[1, 0]], 4.0)
    settings = {"ref_logps": [[logp + LN2, 9.0]], "kl_estimator": kind}
    value, grad, metrics = value_and_grad(*step, beta=0.5, kl_bias_correction=corrected, **settings)
    assert (metrics["kl"], value) == pytest.approx((kl / 4, 0.5 * kl / 4), abs=1e-6)
    np.testing.assert_allclose(grad, [[0.5 * slope / 4, 0]], atol=1e-6)
    value, grad, metrics = value_and_grad(*step, **settings)
    assert value == 0 and not grad.any() and "kl" not in metrics


@pytest.mark.parametrize("loss_type", ["dppo_tv", "dppo_kl"])
def test_dppo_drops_tokens_of_extreme_probabilities_without_nan(loss_type: str) -> None:
    """The sampler was certain of one token, and all but certain not to draw another."""
    logps, sampling = [[-LN2, -1.0], [-1.0, -1.0]], [[0.0, -1.0], [-100.0, -1.0]]
    step = (logps, logps, [-1.0, 1.0], [[1, 1]] * 2, 4.0)
    value, grad, metrics = value_and_grad(*step, loss_type=loss_type, sampling_logps=sampling)
    assert value == 0 and grad.tolist() == [[0, 0.25], [0, -0.25]]
    assert [metrics[f"clip_ratio/{side}_mean"] for side in ("low", "high")] == [0.25, 0.25]


def test_bad_completions_that_the_policy_has_left_behind_are_dropped() -> None:
    """The mean of log(p_sampler / p) is 1, 1 and 1/2."""
    logps = [[-2.0, -2.0], [-2.0, -2.0], [-2.0, -1.0]]
    step = (logps, logps, [-1.0, 1.0, -1.0], [[1, 1]] * 3, 6.0)
    settings = {"sampling_logps": [[-1.0, -1.0]] * 3, "off_policy_mask_threshold": 0.6}
    _, grad, metrics = value_and_grad(*step, **settings)
    np.testing.assert_allclose(grad, [[0, 0], [-1 / 6] * 2, [1 / 6] * 2], rtol=1e-6)
    assert metrics["off_policy_dropped"] == pytest.approx(1 / 3)


# ---- Sampler weights and top tokens --------------------------------------------------------------


@pytest.mark.parametrize("loss_type, share", [("gspo", 1 / 4), ("luspo", 1 / 4), ("dapo", 1 / 2)])
def test_clip_fractions_of_sequences_are_of_sequences_also_with_one_token(
    loss_type: str, share: float
) -> None:
    """One of four sequences is clipped; two of them have a token, so one of two tokens is."""
    _, _, metrics = value_and_grad(
        [[1.0], [0.0], [0.0], [0.0]],
        np.zeros((4, 1)),
        [1.0] * 4,
        [[1], [1], [0], [0]],
        2,
        loss_type=loss_type,
    )
    assert metrics["clip_ratio/high_mean"] == metrics["clip_ratio/region_mean"] == share
    assert metrics["clip_ratio/high_max"] == 1 and metrics["clip_ratio/low_min"] == 0


@pytest.mark.parametrize("limiting, below, beyond", [("truncate", 0.6, 3.0), ("mask", 0.0, 0.0)])
def test_sampler_weights_by_hand(limiting: str, below: float, beyond: float) -> None:
    """Of a sequence they are the product: 2 * 1/2 * 4, 2, infinite, 0; NaN counts as 1. IcePop has
    a floor, too: with 0.6, here 1/2 and 0 are below it."""
    gap = [[LN2, -LN2, 2 * LN2, INF], [LN2, NAN, 0, NAN], [INF, LN2, 0, 9], [-INF, 0, 0, 9]]
    mask = jnp.array([[1, 1, 1, 0]] * 4)
    inputs = (jnp.zeros((4, 4)), -jnp.array(gap), mask)
    for floor, half, zero in ((0.0, 0.5, 0.0), (0.6, below, below)):
        weight, parts = sampler_weights(*inputs, f"token_{limiting}", floor, 3.0)
        expected = [[2, half, beyond, 1], [2, 1, 1, 1], [beyond, 2, 1, 1], [zero, 1, 1, 1]]
        np.testing.assert_allclose(weight, expected, rtol=1e-6)
        assert np.argwhere(parts["over_cap"]).tolist() == [[0, 2], [2, 0]]
        if floor:
            assert np.argwhere(parts["under_floor"]).tolist() == [[0, 1], [3, 0]]
    weight, parts = sampler_weights(*inputs, f"sequence_{limiting}", 0.0, 3.0)
    np.testing.assert_allclose(weight, [[beyond], [2], [beyond], [0]], rtol=1e-6)
    assert parts["over_cap"].tolist() == [[True], [False], [True], [False]]


def test_top_tokens_by_hand() -> None:
    """The 0.6 quantile of 1, 2, 3, 4, 6 is 3.4, the 0.7 one 3.8, the median 3 itself."""
    entropy, mask = np.array([[4.0, 1, 2], [6, 3, NAN]]), np.array([[1, 1, 1], [1, 1, 0]])
    for quantile, kept in ((0.4, {4, 6}), (0.3, {4, 6}), (0.5, {3, 4, 6}), (1.0, {1, 2, 3, 4, 6})):
        top = top_entropy_mask(entropy, mask, quantile)
        assert top.shape == (2, 3) and set(entropy[top]) == kept
    entropy[1, 2] = 9.0  # garbage
    assert top_entropy_mask(entropy, mask, 0.2).tolist() == [[False] * 3, [True, False, False]]
    assert not top_entropy_mask(entropy, 0 * mask, 0.5).any()
