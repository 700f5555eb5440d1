"""Group advantages, and the policy objective in the variants that objectives.py lists.

Tests compare both with TRL's numbers, and DPPO with verl's. The loss is a SUM over a micro-batch,
divided by counts of the entire update (all its micro-batches and all processes). The gradient
therefore does not depend on the sizes of the micro-batches.

Dimensions: P prompts of a step, K completions per prompt (NUM_PRE_Q), B sequences: P*K of a step
for advantages, those of a micro-batch for the objective; T completion tokens (padded).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from objectives import OBJECTIVES

STD_EPS = 1e-4  # as in TRL
MEAN_EPS = 1e-6  # of maxrl
EQUAL_REWARDS = 1e-6  # differences, relative to the largest |reward|, that are rounding
SAPO_TAU_POSITIVE, SAPO_TAU_NEGATIVE = 1.0, 1.05  # as in the paper
VESPO_MIN, VESPO_MAX = 1e-8, 20.0  # lower limit of w, upper one of its logarithm, as in TRL
DPPO_FLOOR = 1e-8  # added to 1 - p, whose logarithm is then finite, as in verl

# MERGE.get(name, sum) reduces a metric of the micro-batches to that of their update. The metrics
# that are not listed here are parts of a mean over the update, which add up to that mean.
MERGE: Mapping[str, Callable] = {
    "clip_ratio/low_min": min,
    "clip_ratio/high_max": max,
    "sampling_logp_difference/max": max,
}


# ---- Advantages, on the host in float64 ----------------------------------------------------------


class AdvantageConfig(NamedTuple):
    """How group_advantages compares rewards."""

    estimator: str = "grpo"  # ADV_ESTIMATOR
    scale_rewards: str = "group"  # or batch, none; for grpo
    weights: Sequence[float] = ()  # REWARD_WEIGHTS, [functions]; for gdpo


def group_advantages(
    rewards: np.ndarray,
    completions_per_prompt: int,
    config: AdvantageConfig,
    function_rewards: np.ndarray | None = None,
) -> np.ndarray:
    """The advantage of each completion: [B] float64.

    rewards: [B] of the entire step; each K consecutive rewards are a group. NaN means that
    there is no reward: it enters no mean and no std, and its advantage is 0. If all rewards of a
    group are equal (gdpo: of every function) but for rounding (EQUAL_REWARDS), its advantages are
    exactly 0, except with reinforce, and update.computed_sequences leaves its sequences out.
    estimator:
      grpo         (reward - group mean) / std of the "group" or of the "batch", as scale_rewards
                   says; scale_rewards "none": without the division
      rloo         reward - mean of the other rewards of the group
      reinforce    (reward - batch mean) / batch std
      reinforce++  reward - group mean, then divided by the batch std of these differences
      gdpo         grpo for each function, then the weighted sum, divided by its batch std;
                   function_rewards: [B, functions], NaN where a function does not apply
      maxrl        (reward - group mean) / (group mean + MEAN_EPS), for rewards of 0 or 1
    Every std has ddof 1, and STD_EPS is added to it. Raises ValueError for names not listed here.
    Source: GRPO, arXiv 2402.03300 section 4.1; RLOO, 2402.14740; REINFORCE++, 2501.03262; GDPO,
    2601.05242; MaxRL, 2602.02710; TRL.
    """
    estimator, scale_rewards, weights = config
    groups = np.asarray(rewards, np.float64).reshape(-1, completions_per_prompt)  # [P, K]
    count = (~np.isnan(groups)).sum(axis=1, keepdims=True)  # [P, 1]
    centered = _centered(groups)
    if estimator == "grpo":
        if scale_rewards not in ("group", "batch", "none"):
            raise ValueError(f"SCALE_REWARDS={scale_rewards} is not known")
        spread = _std(groups, axis=1 if scale_rewards == "group" else None)
        advantages = centered if scale_rewards == "none" else centered / (spread + STD_EPS)
    elif estimator == "rloo":
        # reward - mean of the others = (reward - mean of all) * count / (count - 1)
        advantages = centered * count / np.maximum(count - 1, 1)
    elif estimator == "reinforce":
        advantages = _centered(groups.reshape(1, -1)) / (_std(groups) + STD_EPS)
    elif estimator == "reinforce++":  # The batch mean of centered rewards is 0.
        advantages = centered / (_std(centered) + STD_EPS)
    elif estimator == "maxrl":
        mean = np.nansum(groups, axis=1, keepdims=True) / np.maximum(count, 1)
        advantages = centered / (mean + MEAN_EPS)
    elif estimator == "gdpo":
        columns = [
            column.reshape(-1, completions_per_prompt) for column in np.asarray(function_rewards).T
        ]
        scaled = [_centered(c) / (_std(c, axis=1) + STD_EPS) for c in columns]
        total = sum(w * np.nan_to_num(x) for w, x in zip(weights, scaled, strict=True))
        total = np.where(np.isnan(columns).all(axis=0), np.nan, total)  # [P, K], again of mean 0
        advantages = total / (_std(total) + STD_EPS)
    else:
        raise ValueError(f"ADV_ESTIMATOR={estimator} is not known")
    return np.nan_to_num(advantages.reshape(-1))


def equal_groups(rewards: np.ndarray, completions_per_prompt: int) -> np.ndarray:
    """[P] bool: whether all rewards of a group are equal, but for rounding.

    rewards: [B], or [B, functions]; then the rewards must be equal in each column. NaN is ignored.
    """
    K = completions_per_prompt
    groups = rewards.reshape(len(rewards) // K, K, -1)  # [P, K, 1 or functions]
    return np.logical_not(_differ(groups).any(axis=(1, 2)))


def _differ(groups: np.ndarray) -> np.ndarray:
    """[P, 1, ...] bool: whether the rewards of groups [P, K, ...] differ by more than rounding: the
    mean of three 0.7 is not 0.7 in binary, and 0.3 - 0.1 - 0.2 is not 0. NaN is ignored."""
    low, high = (f.reduce(groups, axis=1, keepdims=True) for f in (np.fmin, np.fmax))
    return high - low > EQUAL_REWARDS * np.fmax(abs(low), abs(high)) + 1e-12


def _centered(groups: np.ndarray) -> np.ndarray:
    """Groups [P, K] minus the mean of each group; exact zeros for equal rewards. NaN does not count
    in the mean, and stays NaN."""
    count = np.maximum((~np.isnan(groups)).sum(axis=1, keepdims=True), 1)
    centered = groups - np.nansum(groups, axis=1, keepdims=True) / count
    return np.where(_differ(groups), centered, 0.0 * groups)


def _std(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The std with ddof 1 of the values that are not NaN; 0 for fewer than two values."""
    count = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    mean = np.nansum(values, axis=axis, keepdims=True) / np.maximum(count, 1)
    squares = np.nansum((values - mean) ** 2, axis=axis, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1))


# ---- The objective -------------------------------------------------------------------------------


class Objective(NamedTuple):
    """The settings of policy_loss and of a teacher; hashable."""

    loss_type: str = "dapo"  # a name of OBJECTIVES and of TOKEN_LOSSES
    eps_low: float = 0.2
    eps_high: float = 0.2
    delta: float = 0.0  # upper limit of the ratio in clipped losses and dppo; 0: no limit
    beta: float = 0.0
    kl_estimator: str = "k3"  # or k1, k2
    kl_bias_correction: bool = True  # multiplies by the ratio; per token, the gradient is unbiased
    entropy_coef: float = 0.0
    is_mode: str = "none"  # or token or sequence, then _truncate or _mask
    is_floor: float = 0.0
    is_cap: float = 3.0
    off_policy_mask_threshold: float = 0.0  # nats; 0: no sequence is dropped
    max_length_sample: int = 0  # tokens; dr_grpo needs it
    distill_coef: float = 1.0  # with a teacher, of teacher_logps - old_logps in advantages
    reward_coef: float = 1.0  # with a teacher, of the advantage of the sequence


class Tokens(NamedTuple):
    """What the loss of a token is computed from. Ratios are 1 where the mask is 0, and logps 0."""

    ratio: jax.Array  # [B, T], or [B, 1] of sequences: exp(logps - old_logps or sampling_logps)
    log_ratio: jax.Array  # of the same shape
    A: jax.Array  # advantages, [B, 1] or [B, T]
    logps: jax.Array  # [B, T]
    sequence_tokens: jax.Array  # [B, 1]
    weight: jax.Array  # of IS_MODE, [B, T] or [B, 1], or 1; read if weights_ratios is true


def _ppo_loss(objective: Objective, x: Tokens) -> tuple[jax.Array, dict]:
    """-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A): PPO, 1707.06347 eq. 7."""
    lowest, highest = 1 - objective.eps_low, 1 + objective.eps_high
    capped = jnp.minimum(x.ratio, objective.delta) if objective.delta else x.ratio
    clipped = jnp.clip(x.ratio, lowest, highest)
    low, high = (capped < lowest) & (x.A < 0), (capped > highest) & (x.A > 0)
    loss = -jnp.minimum(capped * x.A, clipped * x.A)
    return loss, {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high}


def policy_loss(
    logps: jax.Array,
    old_logps: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    num_tokens: jax.Array | float,
    *,
    objective: Objective,
    num_sequences: jax.Array | float | None = None,
    num_top_tokens: jax.Array | float | None = None,
    ref_logps: Any = None,
    sampling_logps: Any = None,
    entropy: Any = None,
    top_mask: Any = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The objective of a micro-batch, a scalar, and its metrics, which MERGE reduces.

    logps, old_logps, ref_logps, sampling_logps: [B, T] float32 nats of the sampled tokens, by the
    policy now, by the policy before the first update, by the reference (if beta > 0) and by the
    sampler (if is_mode is not "none", with off_policy_mask_threshold, or as the ratio's anchor).
    entropy: [B, T] nats (if entropy_coef > 0). advantages: [B], or [B, T] of tokens. mask: [B, T],
    1 on the tokens that count, with the stop token; where it is 0, the others may hold anything.
    top_mask: [B, T], 1 on tokens with a policy loss and an entropy bonus; the KL is of all tokens.
    num_tokens, num_sequences, num_top_tokens: loss_counts of the ENTIRE update: mask.sum(), the
    number of sequences (including those whose mask is 0 everywhere), (mask * top_mask).sum(). The
    last two may be None if this micro-batch is the entire update. num_top_tokens divides only the
    entropy bonus; the other sums are divided by the counts of all tokens, also with a top_mask.
    Raises ValueError for an unknown name, other shapes, and dr_grpo without max_length_sample.
    Source: objectives.py; the off-policy mask, arXiv 2512.02556 eq. 9; TRL; verl for DPPO.
    """
    arrays = logps, old_logps, mask, ref_logps, sampling_logps, entropy, top_mask
    _raise_if_invalid(objective, advantages, [x for x in arrays if x is not None])
    facts = OBJECTIVES[objective.loss_type]
    mask = mask.astype(bool)  # [B, T]
    # Masked advantages may be NaN, and the clip metrics test their sign.
    A = advantages[:, None] if advantages.ndim == 1 else jnp.where(mask, advantages, 0.0)
    top_mask = mask if top_mask is None else mask & (top_mask > 0)  # [B, T]
    num_sequences = len(advantages) if num_sequences is None else num_sequences
    num_top_tokens = jnp.maximum(top_mask.sum(), 1) if num_top_tokens is None else num_top_tokens
    sequence_tokens = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)  # [B, 1]

    def token_mean(x: jax.Array) -> jax.Array:
        return jnp.where(mask, x, 0.0).sum() / num_tokens

    anchor_logps = sampling_logps if facts.anchor == "sampler" else old_logps
    log_ratio = jnp.where(mask, logps - anchor_logps, 0.0)  # [B, T]
    has_sequence_ratio = facts.ratio == "sequence"
    log_ratio = _sequence_mean(log_ratio, sequence_tokens) if has_sequence_ratio else log_ratio
    ratio = jnp.exp(log_ratio)  # [B, T] or [B, 1]
    weight, metrics = jnp.float32(1), {}
    if objective.is_mode != "none":
        limits = objective.is_mode, objective.is_floor, objective.is_cap
        weight, parts = sampler_weights(old_logps, sampling_logps, mask, *limits)
        metrics = {f"is_weight/{name}": token_mean(x) for name, x in parts.items()}
    tokens = Tokens(ratio, log_ratio, A, jnp.where(mask, logps, 0.0), sequence_tokens, weight)
    loss, is_clipped = TOKEN_LOSSES[objective.loss_type](objective, tokens)
    count = num_sequences if has_sequence_ratio and advantages.ndim == 1 else num_tokens
    metrics |= _clip_metrics(is_clipped, mask, count)
    if (threshold := objective.off_policy_mask_threshold) > 0:
        gap = jnp.nan_to_num(jnp.where(mask, sampling_logps - logps, 0.0))  # [B, T]
        is_dropped = (A < 0) & (_sequence_mean(gap, sequence_tokens) > threshold)  # [B, 1]
        loss = jnp.where(is_dropped, 0.0, loss)
        metrics["off_policy_dropped"] = token_mean(is_dropped)
    loss = jnp.where(top_mask, loss, 0.0) * (1.0 if facts.weights_ratios else weight)  # [B, T]
    if objective.beta > 0:
        kl = _kl(objective, jnp.where(mask, ref_logps - logps, 0.0), ratio)  # [B, T]
        metrics["kl"] = token_mean(kl)
        loss = loss + objective.beta * kl
    divisor = {
        "token-mean": num_tokens,
        "seq-mean-token-mean": sequence_tokens * num_sequences,
        "seq-mean-token-sum": num_sequences,
        "seq-mean-token-sum-norm": num_sequences * objective.max_length_sample,
    }[facts.aggregation]
    loss = jnp.where(mask, loss / divisor, 0.0).sum()
    if objective.entropy_coef > 0:
        metrics["policy_loss"] = loss
        total_entropy = jnp.where(top_mask, entropy, 0.0).sum()
        loss = loss - objective.entropy_coef * total_entropy / num_top_tokens
    return loss, {"loss": loss, **metrics}


def _raise_if_invalid(objective: Objective, advantages: jax.Array, arrays: list[jax.Array]) -> None:
    """Raises ValueError as policy_loss says; arrays should be [B, T], advantages [B] or [B, T]."""
    if objective.loss_type not in TOKEN_LOSSES:
        raise ValueError(f"LOSS_TYPE={objective.loss_type} is not known")
    has_length = OBJECTIVES[objective.loss_type].aggregation == "seq-mean-token-sum-norm"
    if has_length and (length := objective.max_length_sample) < 1:
        raise ValueError(f"LOSS_TYPE={objective.loss_type} divides by max_length_sample={length}")
    B, T = len(advantages), arrays[0].shape[-1]
    if advantages.shape not in ((B,), (B, T)) or {x.shape for x in arrays} != {(B, T)}:
        shapes = ", ".join(sorted({str(x.shape) for x in arrays}))  # they would be broadcast
        needed = "advantages [B] or [B, T] and other arrays [B, T]"
        raise ValueError(f"policy_loss needs {needed}, not {advantages.shape} and {shapes}")


def _sequence_mean(x: jax.Array, sequence_tokens: jax.Array) -> jax.Array:
    return x.sum(axis=1, keepdims=True) / sequence_tokens  # [B, 1]


def _clip_metrics(is_clipped: dict, mask: jax.Array, count: jax.Array | float) -> dict:
    """This micro-batch's contributions to the clip fractions of the update, the lowest `low` and
    the highest `high` fraction of its sequences that have at least one token.

    is_clipped: of TOKEN_LOSSES, [B, T] or [B, 1] bool; False where the mask is 0: the ratio is
    1 there, and never clipped. mask: [B, T]. count: of the ratios of the update.
    """
    metrics = {name: x.sum() / count for name, x in is_clipped.items()}
    if "clip_ratio/low_mean" in is_clipped:
        low, high = (is_clipped[f"clip_ratio/{side}_mean"] for side in ("low", "high"))
        metrics["clip_ratio/region_mean"] = (low | high).sum() / count
        tokens = mask.sum(axis=1)  # [B]
        ratios = jnp.maximum(tokens, 1) if low.shape == mask.shape else 1
        low, high = low.sum(axis=1) / ratios, high.sum(axis=1) / ratios  # [B]
        metrics["clip_ratio/low_min"] = jnp.where(tokens > 0, low, 1.0).min()
        metrics["clip_ratio/high_max"] = high.max()
    return metrics


def _kl(objective: Objective, gap: jax.Array, ratio: jax.Array) -> jax.Array:
    """The KL estimate of each token [B, T]. gap: ref_logps - logps [B, T]. ratio: [B, T],
    or [B, 1] of sequences.

    Source: http://joschu.net/blog/kl-approx.html.
    """
    if objective.kl_estimator == "k1":
        kl = -gap
    elif objective.kl_estimator == "k2":
        kl = gap**2 / 2
        # For samples of the policy, the gradient of k2 is already that of the KL.
        ratio = jax.lax.stop_gradient(ratio)
    elif objective.kl_estimator == "k3":
        kl = jnp.expm1(gap) - gap
    else:
        raise ValueError(f"KL_ESTIMATOR={objective.kl_estimator} is not known")
    return kl * ratio if objective.kl_bias_correction else kl


def sampler_weights(
    old_logps: jax.Array,
    sampling_logps: jax.Array,
    mask: jax.Array,
    mode: str,
    floor: float,
    cap: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The importance weights of a sampler whose probabilities differ from the trainer's.

    A weight is the trainer's probability of the sample / the sampler's probability: of each token
    [B, T], or of the sequence [B, 1] if mode is sequence_*. A weight below floor or above cap
    becomes floor or cap (*_truncate) or 0 (*_mask). The second result has arrays of the same shape
    whose means are metrics: the weights, and True where one was above cap or below floor.
    old_logps, sampling_logps, mask: [B, T].
    Source: https://fengyao.notion.site/off-policy-rl; IcePop (a floor), arXiv 2510.18855; TRL.
    """
    level, _, limiting = mode.partition("_")
    if level not in ("token", "sequence") or limiting not in ("truncate", "mask"):
        raise ValueError(f"IS_MODE={mode} is not known")
    gap = jnp.nan_to_num(jnp.where(mask, old_logps - sampling_logps, 0.0))  # [B, T]
    if level == "sequence":
        gap = gap.sum(axis=1, keepdims=True)  # [B, 1]
    ratio = jax.lax.stop_gradient(jnp.exp(gap))
    under, over = ratio < floor, ratio > cap
    limited = jnp.clip(ratio, floor, cap) if limiting == "truncate" else 0.0
    weight = jnp.where(under | over, limited, ratio)
    parts = {"mean": weight, "over_cap": over}
    return weight, parts | ({"under_floor": under} if floor else {})


def top_entropy_mask(entropy: np.ndarray, mask: np.ndarray, quantile: float) -> np.ndarray:
    """[B, T] bool: the tokens of a step whose entropy is among the highest.

    entropy, mask: [B, T]. quantile: the fraction of tokens to keep.
    Source: arXiv 2506.01939; the threshold is interpolated between tokens, as in TRL.
    """
    mask = mask.astype(bool)
    if not mask.any():
        return mask
    return mask & (entropy >= np.quantile(entropy[mask], 1 - quantile))


# ---- The other losses of a token, and {metric: where they are clipped} -------------------------


def _gmpo_loss(objective: Objective, x: Tokens) -> tuple[jax.Array, dict]:
    """-A times the geometric mean of a sequence's ratios, whose logarithms are clipped at eps_high
    where A > 0, and at -eps_low where A < 0: arXiv 2507.20673."""
    eps_low, eps_high = objective.eps_low, objective.eps_high
    low, high = (x.log_ratio < -eps_low) & (x.A < 0), (x.log_ratio > eps_high) & (x.A > 0)
    log_ratio = jnp.where(low, -eps_low, jnp.where(high, eps_high, x.log_ratio))
    loss = -jnp.exp(_sequence_mean(log_ratio, x.sequence_tokens)) * x.A
    return loss, {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high}


def _dppo_loss(objective: Objective, x: Tokens, distance: jax.Array) -> tuple[jax.Array, dict]:
    """-min(ratio, delta) A logps, without gradient through the ratio; 0 where the probability moved
    from the sampler's in the direction of A by more than eps_high (A > 0), eps_low (A < 0)."""
    low = (distance > objective.eps_low) & (x.log_ratio < 0) & (x.A < 0)
    high = (distance > objective.eps_high) & (x.log_ratio > 0) & (x.A > 0)
    capped = jnp.minimum(x.ratio, objective.delta) if objective.delta else x.ratio
    loss = -jax.lax.stop_gradient(jnp.where(low | high, 0.0, capped)) * x.A * x.logps
    return loss, {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high}


def _dppo_tv_loss(objective: Objective, x: Tokens) -> tuple[jax.Array, dict]:
    """It has moved by the difference between the two probabilities: the total variation."""
    distance = jnp.abs(jnp.exp(x.logps) - jnp.exp(x.logps - x.log_ratio))
    return _dppo_loss(objective, x, distance)


def _dppo_kl_loss(objective: Objective, x: Tokens) -> tuple[jax.Array, dict]:
    """It has moved by the KL divergence of drawing the token or not."""
    anchor = x.logps - x.log_ratio
    # -expm1(logps) is 1 - p, which would round to 0 if p is nearly 1.
    rest_p, rest_mu = (DPPO_FLOOR - jnp.expm1(jnp.minimum(y, 0)) for y in (x.logps, anchor))
    distance = rest_mu * jnp.log(rest_mu / rest_p) - jnp.exp(anchor) * x.log_ratio
    return _dppo_loss(objective, x, distance)


def _cispo_loss(objective: Objective, x: Tokens) -> tuple[jax.Array, dict]:
    """-min(ratio, eps_high) A logps, without gradient through the ratio; eps_high >= 1 is a cap."""
    loss = -jax.lax.stop_gradient(jnp.minimum(x.ratio, objective.eps_high)) * x.A * x.logps
    return loss, {"cispo_clip_ratio": (x.ratio > objective.eps_high) & (x.A > 0)}


def _sapo_loss(objective: Objective, x: Tokens) -> tuple[jax.Array, dict]:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A."""
    tau = jnp.where(x.A > 0, SAPO_TAU_POSITIVE, SAPO_TAU_NEGATIVE)
    return -4 / tau * jax.nn.sigmoid(tau * (x.ratio - 1)) * x.A, {}


def _vespo_loss(objective: Objective, x: Tokens) -> tuple[jax.Array, dict]:
    """-phi A logps, without gradient through phi = w^k exp(lambda (1 - w)), where w is the product
    of a sequence's ratios and weights."""
    log_w = jnp.clip(x.log_ratio, -VESPO_MAX, VESPO_MAX) + jnp.log(jnp.maximum(x.weight, VESPO_MIN))
    log_w = jnp.clip(log_w.sum(axis=1, keepdims=True), jnp.log(VESPO_MIN), VESPO_MAX)  # [B, 1]
    k, lambda_ = jnp.where(x.A < 0, 3, 2), jnp.where(x.A < 0, 2, 3)  # as in the paper
    phi = jnp.exp(k * log_w + lambda_ * (1 - jnp.exp(log_w)))
    return -jax.lax.stop_gradient(phi) * x.A * x.logps, {}


TOKEN_LOSSES: Mapping[str, Callable[[Objective, Tokens], tuple[jax.Array, dict]]] = {
    **dict.fromkeys(("dapo", "grpo", "dr_grpo", "gspo", "luspo"), _ppo_loss),
    "cispo": _cispo_loss,
    "sapo": _sapo_loss,
    "gmpo": _gmpo_loss,
    "vespo": _vespo_loss,
    "dppo_tv": _dppo_tv_loss,
    "dppo_kl": _dppo_kl_loss,
    "sft": lambda objective, x: (-x.logps, {}),  # the cross-entropy
}
