"""Claims about loss.py: the advantages and the objective, in every variant.

goldens/trl.npz holds what TRL 1.16 makes of seeded random inputs, trl.json the settings behind it.
"""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loss import group_advantages, policy_loss, sampler_weights, top_entropy_mask

GOLDENS = Path(__file__).parent / "goldens"
TRL = json.loads((GOLDENS / "trl.json").read_text(encoding="utf-8"))
ARRAYS = dict(np.load(GOLDENS / "trl.npz"))
NAN, INF, LN2 = math.nan, math.inf, math.log(2)


# ---- Advantages ----------------------------------------------------------------------------------


@np.errstate(divide="raise", invalid="raise")
def advantages_of(per_function: np.ndarray, weights: Any, K: int, how: str) -> np.ndarray:
    """per_function: [B, F]; how: the scale of grpo, or another estimator."""
    rewards = np.nansum(per_function * weights, axis=1)
    rewards[np.isnan(per_function).all(axis=1)] = NAN
    if how in ("group", "batch", "none"):
        return group_advantages(rewards, K, scale_rewards=how)
    functions = {"per_function": per_function, "weights": weights} if how == "gdpo" else {}
    return group_advantages(rewards, K, estimator=how, **functions)


@pytest.mark.parametrize(
    "rewards, K, how, expected",
    [
        # std of 1,0,0,0 (ddof 1) is 0.5; of 1,0,2 is 1
        ([1, 0, 0, 0, 1, 1, 1, 1], 4, "none", [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0]),
        ([1, 0, 0, 0], 4, "group", [0.75 / 0.5001, *[-0.25 / 0.5001] * 3]),
        ([1, 0, 2], 3, "group", [0, -1 / 1.0001, 1 / 1.0001]),
        # "batch": the std of all of 2,0,1,1 is sqrt(2/3); the mean is still the group's
        ([2, 0, 1, 1], 2, "batch", [1 / 0.8165966, -1 / 0.8165966, 0, 0]),
        ([5, 7], 1, "group", [0, 0]),
        ([5, 7], 1, "batch", [0, 0]),
        # NaN counts in neither mean nor std and gets 0
        ([1, NAN, 0, 2], 4, "group", [0, 0, -1 / 1.0001, 1 / 1.0001]),
        ([1, NAN, 3, NAN], 4, "none", [-1, 0, 1, 0]),
        ([2, NAN, 0, NAN, 1, 1], 2, "batch", [0] * 6),  # alone in its group: nothing to compare to
        ([4, 2, NAN, NAN], 2, "batch", [1 / 1.4143136, -1 / 1.4143136, 0, 0]),
        ([NAN, NAN, 1, 3], 2, "none", [0, 0, -1, 1]),
        ([NAN] * 4, 2, "group", [0] * 4),
        ([NAN] * 4, 2, "batch", [0] * 4),
        # the mean of the others: 7/3, 8/3, 2, 1
        ([1, 0, 2, 5], 4, "rloo", [-4 / 3, -8 / 3, 0, 4]),
        ([1, NAN, 3, NAN, 5, NAN, NAN, NAN], 4, "rloo", [-2, 0, 2, 0, 0, 0, 0, 0]),
        ([5, 7], 1, "rloo", [0, 0]),
        # the mean of all is 2, the std sqrt(14/3); the groups do not matter
        ([1, 0, 2, 5], 2, "reinforce", [-1 / 2.1603469, -2 / 2.1603469, 0, 3 / 2.1603469]),
        ([1, 0, 2, 5], 1, "reinforce", [-1 / 2.1603469, -2 / 2.1603469, 0, 3 / 2.1603469]),
        ([1, NAN, 3], 1, "reinforce", [-1 / 1.4143136, 0, 1 / 1.4143136]),
        ([0.7] * 6, 3, "reinforce", [0] * 6),
        ([5], 1, "reinforce", [0]),
        # the std of 1,-1,1/2,-1/2 is sqrt(2.5/3); of 1,-1,0 is 1
        ([2, 0, 5, 4], 2, "reinforce++", np.array([1, -1, 0.5, -0.5]) / 0.9129709),
        ([2, 0, NAN, 4], 2, "reinforce++", [1 / 1.0001, -1 / 1.0001, 0, 0]),
    ],
)
def test_advantages_by_hand(rewards: list, K: int, how: str, expected: list) -> None:
    advantages = advantages_of(np.array(rewards, float)[:, None], [1.0], K, how)
    np.testing.assert_allclose(advantages, expected, atol=1e-7)
    assert advantages.shape == (len(rewards),) and advantages.dtype == np.float64


def test_gdpo_by_hand() -> None:
    """Groups (1, 0), (0, 0) scale to +-.5/.7072068, 0; (0, 4), (3, 1) to -+2/2.8285271, +-1/1.4143.

    Weighted by 1 and 1/2 they are +-.3534659, +-.3535284, of std 0.4081833.
    """
    advantages = advantages_of(np.array([[1, 0], [0, 4], [0, 3], [0, 1.0]]), [1, 0.5], 2, "gdpo")
    expected = [0.8657368, -0.8657368, 0.8658898, -0.8658898]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    # The second function skips row 1, so that row 0 has nothing to compare to; row 3 has no reward.
    # +-.7070068, 0 have a std of .7070068.
    per_function = np.array([[1, 0], [0, NAN], [0, 3], [NAN, NAN]])
    advantages = advantages_of(per_function, [1, 0.5], 2, "gdpo")
    np.testing.assert_allclose(advantages, [0.9998586, -0.9998586, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("value", [0.7, 0.1, 1.0, -0.3, 1e6 + 0.1])
@pytest.mark.parametrize("how", ["group", "batch", "none", "rloo", "reinforce++", "gdpo"])
def test_equal_rewards_have_no_advantage_at_all(value: float, how: str) -> None:
    for rewards in (np.full(6, value), np.full(6, value, np.float32)):
        rewards[3:] = [1, 0, NAN]  # the other group has some
        advantages = advantages_of(rewards[:, None], np.ones(1, rewards.dtype), 3, how)
        assert advantages[:3].tolist() == [0, 0, 0]
        assert advantages[3] > 0 > advantages[4] and advantages[5] == 0


@pytest.mark.parametrize("name", TRL["advantages"])
def test_advantages_are_those_of_trl(name: str) -> None:
    golden, (case, how) = TRL["advantages"][name], name.split(".")
    per_function = ARRAYS[f"advantages.{case}.rewards"].astype(float)  # [B, F]
    advantages = advantages_of(per_function, golden["weights"], golden["num_generations"], how)
    # TRL leaks float32 noise into the equal group of point1; the rest is 2e-7 of its size.
    atol = 4e-6 if case == "point1" else 2e-7
    np.testing.assert_allclose(advantages, ARRAYS[f"advantages.{name}"], rtol=2e-7, atol=atol)


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="ADV_ESTIMATOR='ppo'"):
        group_advantages(np.array([1.0, 0.0]), 2, estimator="ppo")


# ---- The objective: TRL's figures ----------------------------------------------------------------


def value_and_grad(
    logps: Any, old: Any, advantages: Any, mask: Any, num_tokens: float, **others: Any
) -> tuple[float, np.ndarray, dict[str, float]]:
    """The loss, its gradient [R, T] and its metrics; lists count as float32 arrays."""
    inputs = [jnp.asarray(x, jnp.float32) for x in (old, advantages)]
    others = {name: jnp.float32(x) if np.ndim(x) else x for name, x in others.items()}

    def loss(logps: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return policy_loss(logps, *inputs, jnp.asarray(mask), num_tokens, **others)

    (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(jnp.float32(logps))
    assert value.shape == () and float(metrics.pop("loss")) == float(value)
    return float(value), np.asarray(grad), {name: float(x) for name, x in metrics.items()}


def trl_inputs(old: str = "old_logps", tool: bool = False, weight: str = "is_ratio_token") -> dict:
    """Finite garbage under the mask, row 4 without a token."""
    names = ("logps", "ref_logps", "entropy", "advantages")
    x = {name: ARRAYS[f"loss.in.{name}"] for name in names}
    x["old_logps"], x["mask"] = ARRAYS[f"loss.in.{old}"], ARRAYS["loss.in.completion_mask"]
    if tool:
        x["mask"] = x["mask"] * ARRAYS["loss.in.tool_mask"]
    ratio = ARRAYS[f"loss.in.{weight}"]  # [B, T], or [B, 1] of the sequence
    gap = np.log(np.where(ratio > 0, ratio, 10.0))  # 0 is what TRL makes of more than its cap
    gap = gap if weight == "is_ratio_token" else gap * np.eye(1, 12)  # [B, T]
    x["sampling_logps"] = np.float32(x["old_logps"] - gap)
    return {name: value.copy() for name, value in x.items()}


def part(x: dict, rows: slice = slice(8), quantile: float = 1.0, **others: Any) -> tuple:
    """value_and_grad of the micro-batch `rows` of the step x."""
    top = top_entropy_mask(x["entropy"], x["mask"], quantile)
    counts = {"num_tokens": max(x["mask"].sum(), 1), "num_sequences": len(x["mask"])}
    counts["num_top_tokens"] = max(top.sum(), 1)
    own = {name: value[rows] for name, value in x.items()}
    own["old"] = own.pop("old_logps")
    own["top_mask"] = (top | (x["mask"] == 0))[rows]  # 1 under the mask is garbage as well
    return value_and_grad(**own, **counts | others)


@pytest.mark.parametrize("name", TRL["loss"])
def test_the_objective_is_that_of_trl(name: str) -> None:
    golden = TRL["loss"][name]
    x, rows, settings = trl_inputs(**golden["inputs"]), slice(*golden["rows"]), golden["settings"]
    loss, grad, metrics = part(x, rows, **settings)
    assert loss == pytest.approx(ARRAYS[f"loss.{name}.loss"], abs=1e-6)
    np.testing.assert_allclose(grad, ARRAYS[f"loss.{name}.grad_logps"], atol=1e-6)
    # TRL's means are over the tokens of a micro-batch, ours are its share of the step's mean.
    share = x["mask"][rows].sum() / settings["num_tokens"]
    expected = {n: v * share if n.endswith("mean") else v for n, v in golden["metrics"].items()}
    metrics = {n: v for n, v in metrics.items() if not n.startswith("is_weight/")}
    assert metrics == pytest.approx(expected, abs=1e-6)


# ---- The objective: every variant ----------------------------------------------------------------

VARIANTS = [
    {},
    {"loss_type": "bnpo", "delta": 1.1, "eps_high": 0.3},
    {"loss_type": "grpo", "entropy_coef": 0.1},
    {"loss_type": "dr_grpo", "max_completion_length": 32, "quantile": 0.5, "is_mode": "token_mask"},
    {"loss_type": "gspo", "eps_low": 0.01, "eps_high": 0.02, "beta": 0.1},
    {"loss_type": "cispo", "eps_high": 1.2, "is_mode": "token_truncate", "is_cap": 1.1},
    {"loss_type": "sapo", "is_mode": "sequence_truncate", "is_cap": 1.1},
    {"loss_type": "sapo", "importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence", "eps_high": 0.01, "beta": 0.1, "kl_estimator": "k2"},
    {"loss_type": "cispo", "eps_high": 1.01, "importance_sampling_level": "sequence"},
    {"is_mode": "token_mask", "is_cap": 1.1, "beta": 0.1, "kl_estimator": "k1"},
    {"is_mode": "sequence_mask", "is_cap": 1.1, "beta": 0.1, "kl_bias_correction": False},
    {"loss_type": "grpo", "beta": 0.1, "entropy_coef": 0.1, "quantile": 0.3, "delta": 1.25},
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


@every_variant
def test_what_is_under_the_mask_changes_nothing(variant: dict) -> None:
    clean = trl_inputs()
    under = clean["mask"] == 0
    loss, grad, metrics = part(clean, **variant)
    assert under[4].all() and (grad[under] == 0).all() and (grad[~under] != 0).any()
    for garbage in ((1e4, 1e4), (-1e4, 1e4), (INF, INF), (INF, -INF), (-INF, INF), (NAN, NAN)):
        dirty = trl_inputs()
        for i, name in enumerate(("logps", "old_logps", "entropy", "ref_logps", "sampling_logps")):
            dirty[name][under] = garbage[i % 2]
        dirty_loss, dirty_grad, dirty_metrics = part(dirty, **variant)
        assert (dirty_loss, dirty_metrics) == (loss, metrics)
        assert dirty_grad.tolist() == grad.tolist()


@every_variant
def test_micro_batches_add_up_to_the_batch(variant: dict) -> None:
    x = trl_inputs()
    loss, grad, metrics = part(x, **variant)
    for size in (1, 2, 4):
        parts = [part(x, slice(i, i + size), **variant) for i in range(0, 8, size)]
        losses, grads, partial = zip(*parts, strict=True)
        assert sum(losses) == pytest.approx(loss, abs=1e-6)
        np.testing.assert_allclose(np.concatenate(grads), grad, atol=1e-7)
        for name, whole in metrics.items():
            over_step = {"min": min, "max": max}.get(name[-3:], sum)
            assert over_step(p[name] for p in partial) == pytest.approx(whole, abs=1e-6), name


@every_variant
def test_a_step_without_a_token_teaches_nothing(variant: dict) -> None:
    x = trl_inputs()
    x["mask"][:] = 0
    loss, grad, metrics = part(x, **variant)
    assert loss == 0 and not grad.any() and np.isfinite(list(metrics.values())).all()


# ---- The objective: by hand ----------------------------------------------------------------------


def clip_ratios(*shares: float) -> dict[str, float]:
    names = ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
    return {f"clip_ratio/{name}": share for name, share in zip(names, shares, strict=True)}


CLIP, SAPO = {"eps_high": 0.3}, {"loss_type": "sapo"}
CISPO = {"loss_type": "cispo", "eps_high": 5.0}
NONE, LOW, HIGH = clip_ratios(0, 0, 0, 0, 0), clip_ratios(1, 0, 1, 1, 0), clip_ratios(0, 1, 1, 0, 1)


@pytest.mark.parametrize(
    "settings, ratio, advantage, loss, slope, metrics",
    [  # the loss of one token and its slope in logp, d(-ratio A)/dlogp = -ratio A unless clipped
        (CLIP, 1.1, 2.0, -2.2, -2.2, NONE),
        (CLIP, 1.5, 2.0, -2.6, 0.0, HIGH),  # held at 1.3: no reward for going further
        (CLIP, 0.5, 2.0, -1.0, -1.0, NONE),  # a good token got rarer: never clipped
        (CLIP, 0.5, -2.0, 1.6, 0.0, LOW),  # held at 0.8
        (CLIP, 1.5, -2.0, 3.0, 3.0, NONE),  # a bad token got likelier: never clipped
        (CLIP, 0.9, -2.0, 1.8, 1.8, NONE),
        (CLIP | {"delta": 4.0}, 3.0, -2.0, 6.0, 6.0, NONE),
        (CLIP | {"delta": 4.0}, 10.0, -2.0, 8.0, 0.0, NONE),  # but with delta
        (CLIP | {"delta": 4.0}, 10.0, 2.0, -2.6, 0.0, HIGH),
        (CLIP | {"delta": 1.1}, 1.5, 2.0, -2.2, 0.0, NONE),  # 1.1 is not above 1.3
        (CLIP | {"delta": 1.1}, 1.5, -2.0, 2.6, 0.0, NONE),  # the clipped side ends at 1.3 still
        # -min(ratio, 5) A (ln(ratio) - 3) of slope -min(ratio, 5) A, past the cap too
        (CISPO, 2.0, 3.0, 13.8411169, -6.0, {"cispo_clip_ratio": 0}),
        (CISPO, 10.0, 3.0, 10.4612236, -15.0, {"cispo_clip_ratio": 1}),
        (CISPO, 10.0, -2.0, -6.9741491, 10.0, {"cispo_clip_ratio": 0}),
        (CISPO | {"eps_high": 1.0}, 1.0, 2.0, 6.0, -2.0, {"cispo_clip_ratio": 0}),  # not above
        # slope -4 s (1 - s) ratio A; s = 1/2, sigmoid(2) = .8807971, sigmoid(2.1) = .8909032
        (SAPO, 1.0, 2.0, -4.0, -2.0, {}),
        (SAPO, 3.0, 2.0, -7.0463766, -2.5198460, {}),
        (SAPO, 1.0, -2.0, 3.8095238, 2.0, {}),
        (SAPO, 3.0, -2.0, 6.7878337, 2.3326729, {}),
    ],
)
def test_the_loss_of_a_token_by_hand(
    settings: dict, ratio: float, advantage: float, loss: float, slope: float, metrics: dict
) -> None:
    token = ([[math.log(ratio) - 3]], [[-3.0]], [advantage], [[1]], 1.0)
    value, grad, own_metrics = value_and_grad(*token, **settings)
    assert (value, grad[0, 0]) == pytest.approx((loss, slope), rel=1e-6)
    assert own_metrics == metrics


def test_a_ratio_of_1_is_beyond_no_epsilon() -> None:
    for advantage in (1.0, -1.0):
        token = ([[0.0]], [[0.0]], [advantage], [[1]], 1.0)
        assert value_and_grad(*token, eps_low=0.0, eps_high=0.0)[2] == NONE


def test_the_extremes_of_clipping_are_of_rows_with_a_token() -> None:
    """Of 5 tokens 3 are clipped, 1/2 and 2/3 of the rows' tokens; the third row has none."""
    mask = [[1, 1, 0], [1, 1, 1], [0, 0, 0]]
    low, high = clip_ratios(0.6, 0, 0.6, 0.5, 0), clip_ratios(0, 0.6, 0.6, 0, 2 / 3)
    for advantage, far, expected in ((-1.0, -LN2, low), (1.0, LN2, high)):
        logps = [[far, 0, far], [far, far, 0], [far, far, far]]
        metrics = value_and_grad(logps, np.zeros((3, 3)), [advantage] * 3, mask, 5.0)[2]
        assert metrics == pytest.approx(expected)


@pytest.mark.parametrize(
    "loss_type, loss, first, second",
    [  # the loss, and its slope at a token of the first row and at each of the second's
        ("dapo", -(5 + 3) / 8, -5 / 8, -1 / 8),
        ("bnpo", -(5 + 3) / 8, -5 / 8, -1 / 8),
        ("cispo", (5 + 3) / 8, -5 / 8, -1 / 8),  # times the logp, -1
        ("grpo", -(5 + 3 / 3) / 4, -5 / 4, -1 / 12),
        ("gspo", -(5 + 3 / 3) / 4, -5 / 4, -1 / 12),
        ("sapo", -(10 + 6 / 3) / 4, -5 / 4, -1 / 12),  # -2 A, of slope -A
        ("dr_grpo", -(5 + 3) / 40, -5 / 40, -1 / 40),
    ],
)
def test_the_denominators_by_hand(loss_type: str, loss: float, first: float, second: float) -> None:
    """Rows of 1 and 3 tokens, advantages 5 and 1; 8 tokens and 4 sequences of up to 10 a step."""
    logps, mask = np.full((2, 3), -1.0), [[1, 0, 0], [1, 1, 1]]
    step = (logps, logps, [5.0, 1.0], mask, 8.0)
    settings = {"loss_type": loss_type, "max_completion_length": 10, "eps_high": 1.0}
    value, grad, _ = value_and_grad(*step, num_sequences=4, **settings)
    assert value == pytest.approx(loss)
    np.testing.assert_allclose(grad, [[first, 0, 0], [second] * 3], atol=1e-7)
    if loss_type not in ("dapo", "bnpo", "cispo"):  # without num_sequences there are the 2 here
        assert value_and_grad(*step, **settings)[0] == pytest.approx(2 * loss)


@pytest.mark.parametrize("loss_type, level", [("gspo", "token"), ("grpo", "sequence")])
def test_the_ratio_of_a_sequence_is_the_geometric_mean(loss_type: str, level: str) -> None:
    """Of 2, 4 and 1 it is 2; the row's slope, -2 A, is spread over its three tokens."""
    logps = [[LN2, 2 * LN2, 0.0], [-LN2, 0, 0], [0, 0, 0]]
    mask = [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    step = (logps, np.zeros((3, 3)), [1.0, -1.0, 1.0], mask, 5.0)
    settings = {"loss_type": loss_type, "importance_sampling_level": level, "num_sequences": 4}
    loss, grad, metrics = value_and_grad(*step, eps_low=0.9, eps_high=9.0, **settings)
    assert loss == pytest.approx((-2 + 0.5) / 4) and not any(metrics.values())
    np.testing.assert_allclose(grad, [[-2 / 12] * 3, [0.5 / 4, 0, 0], [0] * 3], atol=1e-7)
    loss, grad, metrics = value_and_grad(*step, **settings)
    assert loss == pytest.approx((-1.2 + 0.8) / 4) and not grad.any()
    assert metrics == clip_ratios(1 / 4, 1 / 4, 2 / 4, 0, 1)  # of sequences


@pytest.mark.parametrize(
    "kind, corrected, ratio, kl, slope",
    [  # ref_logps - logps = ln 2; corrected by the ratio r: r k, of slope r (k + dk/dlogp)
        ("k1", False, 2.0, -0.6931472, 1.0),
        ("k2", False, 2.0, 0.2402265, -0.6931472),
        ("k3", False, 2.0, 0.3068528, -1.0),
        ("k1", True, 2.0, -1.3862944, 0.6137056),
        ("k2", True, 2.0, 0.4804530, -1.3862944),
        ("k3", True, 2.0, 0.6137056, -1.3862944),
        ("k3", True, 1.0, 0.3068528, -0.6931472),  # the ratio has a slope where it is 1
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


def test_what_weights_top_tokens_and_entropy_apply_to() -> None:
    """Three tokens of ratio 1, A = 2, weights 1/2, 2 (of 8 held at 2) and 1; the first a top one.

    Policy -2 / 2, KL 2 * .3068528 of slope .3068528 - 1 each, over 8; entropy .1 * 1.5 / 4.
    """
    zeros = np.zeros((1, 3))
    step = (zeros, zeros, [2.0], [[1, 1, 1]], 8.0)
    settings = {"is_mode": "token_truncate", "is_cap": 2.0, "beta": 1.0, "entropy_coef": 0.1}
    settings |= {"sampling_logps": [[LN2, -3 * LN2, 0]], "ref_logps": [[LN2, LN2, 0]]}
    settings |= {"top_mask": [[1, 0, 0]], "entropy": [[1.5, 7.0, 5.0]]}
    loss, grad, metrics = value_and_grad(*step, num_top_tokens=4.0, **settings)
    assert metrics["policy_loss"] == pytest.approx((-1 + 0.6137056) / 8)
    assert loss == pytest.approx((-1 + 0.6137056) / 8 - 0.15 / 4)
    np.testing.assert_allclose(grad, [[-1.6931472 / 8, -0.6931472 / 8, 0]], atol=1e-7)
    shares = {"is_weight/mean": 3.5 / 8, "is_weight/over_cap": 1 / 8, "kl": 0.6137056 / 8}
    assert {name: metrics[name] for name in shares} == pytest.approx(shares)
    # Without the counts: the 1 top token here; without top_mask all three are, of mean entropy 4.5.
    for others, policy, entropy in ((settings, -1, 1.5), (settings | {"top_mask": None}, -7, 4.5)):
        loss = value_and_grad(*step, **others)[0]
        assert loss == pytest.approx((policy + 0.6137056) / 8 - 0.1 * entropy)


# ---- Sampler weights and top tokens --------------------------------------------------------------


@pytest.mark.parametrize("how, beyond", [("truncate", 3.0), ("mask", 0.0)])
def test_sampler_weights_by_hand(how: str, beyond: float) -> None:
    """Of a sequence they are the product: 2 * 1/2 * 4, 2, infinite, 0; NaN counts as 1."""
    gap = [[LN2, -LN2, 2 * LN2, INF], [LN2, NAN, 0, NAN], [INF, LN2, 0, 9], [-INF, 0, 0, 9]]
    mask = jnp.array([[1, 1, 1, 0]] * 4)
    inputs = (jnp.zeros((4, 4)), -jnp.array(gap), mask)
    weight, over = sampler_weights(*inputs, f"token_{how}", 3.0)
    expected = [[2, 0.5, beyond, 1], [2, 1, 1, 1], [beyond, 2, 1, 1], [0, 1, 1, 1]]
    np.testing.assert_allclose(weight, expected, rtol=1e-6)
    assert np.argwhere(over).tolist() == [[0, 2], [2, 0]]
    weight, over = sampler_weights(*inputs, f"sequence_{how}", 3.0)
    np.testing.assert_allclose(weight, [[beyond], [2], [beyond], [0]], rtol=1e-6)
    assert over.tolist() == [[True], [False], [True], [False]]


@pytest.mark.parametrize("how", ["truncate", "mask"])
@pytest.mark.parametrize("level, total", [("token", 6), ("sequence", 2)])
def test_a_weight_at_the_cap_is_kept_and_has_no_gradient(level: str, total: int, how: str) -> None:
    def weights(old: jax.Array, sampling: jax.Array) -> jax.Array:
        weight, over = sampler_weights(old, sampling, jnp.ones((2, 3)), f"{level}_{how}", 1.0)
        return weight.sum() + 100 * over.sum()

    value, grads = jax.value_and_grad(weights, (0, 1))(jnp.ones((2, 3)), jnp.ones((2, 3)))
    assert value == total and not np.any(grads)


def test_top_tokens_by_hand() -> None:
    """The 0.6 quantile of 1, 2, 3, 4, 6 is 3.4, the 0.7 one 3.8, the median 3 itself."""
    entropy, mask = np.array([[4.0, 1, 2], [6, 3, NAN]]), np.array([[1, 1, 1], [1, 1, 0]])
    for quantile, kept in ((0.4, {4, 6}), (0.3, {4, 6}), (0.5, {3, 4, 6}), (1.0, {1, 2, 3, 4, 6})):
        top = top_entropy_mask(entropy, mask, quantile)
        assert top.shape == (2, 3) and set(entropy[top]) == kept
    entropy[1, 2] = 9.0  # garbage
    assert top_entropy_mask(entropy, mask, 0.2).tolist() == [[False] * 3, [True, False, False]]
    assert not top_entropy_mask(entropy, 0 * mask, 0.5).any()
