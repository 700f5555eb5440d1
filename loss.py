"""Group advantages and the policy objective, in every published variant, equal to TRL's numbers.

Dimensions: P prompts, K completions per prompt, B = P*K sequences of a whole step, R sequences of
one micro-batch, T completion tokens (padded).

The loss is a SUM over a micro-batch, divided by counts of the whole step (all micro-batches, passes
and processes): how the step is cut into micro-batches leaves the gradient unchanged.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

STD_EPS = 1e-4  # TRL's
SAPO_TAU_POSITIVE, SAPO_TAU_NEGATIVE = 1.0, 1.05  # the paper's

# ---- Advantages, on the host in float64 ----------------------------------------------------------


def group_advantages(
    rewards: np.ndarray,
    num_pre_q: int,
    *,
    estimator: str = "grpo",
    scale_rewards: str = "group",
    per_function: np.ndarray | None = None,
    weights: Sequence[float] = (),
) -> np.ndarray:
    """How much better each completion is than the others: [B] float64.

    rewards: [B] of the whole step, groups of num_pre_q contiguous rows; NaN (no reward applies)
    counts in no mean or std and gets 0. All but reinforce give exactly 0 to a group whose rewards
    are equal (gdpo: in every function).
    estimator:
      grpo         (r - group mean) / std of the "group" or the "batch", by scale_rewards, or "none"
      rloo         r - mean of the group's others
      reinforce    (r - batch mean) / batch std
      reinforce++  r - group mean, then divided by its batch std
      gdpo         grpo for each function, their weighted sum, then divided by its batch std;
                   per_function: [B, F] rewards, NaN where one does not apply; weights: [F]
    Every std is of ddof 1 and has STD_EPS added. Source: GRPO, arXiv 2402.03300 section 4.1; RLOO,
    2402.14740; REINFORCE++, 2501.03262; GDPO, 2601.05242; TRL.
    """
    groups = np.asarray(rewards, np.float64).reshape(-1, num_pre_q)  # [P, K]
    centered = _centered(groups)
    if estimator == "grpo":
        spread = _std(groups, axis=1 if scale_rewards == "group" else None)
        advantages = centered if scale_rewards == "none" else centered / (spread + STD_EPS)
    elif estimator == "rloo":
        count = (~np.isnan(groups)).sum(axis=1, keepdims=True)
        advantages = centered * count / np.maximum(count - 1, 1)
    elif estimator == "reinforce":
        advantages = _centered(groups.reshape(1, -1)) / (_std(groups) + STD_EPS)
    elif estimator == "reinforce++":  # the batch mean of what is centered is 0
        advantages = centered / (_std(centered) + STD_EPS)
    elif estimator == "gdpo":
        columns = [column.reshape(-1, num_pre_q) for column in per_function.T]
        scaled = [_centered(c) / (_std(c, axis=1) + STD_EPS) for c in columns]
        total = sum(w * np.nan_to_num(x) for w, x in zip(weights, scaled, strict=True))
        total = np.where(np.isnan(groups), np.nan, total)  # its batch mean is 0 again
        advantages = total / (_std(total) + STD_EPS)
    else:
        raise ValueError(f"ADV_ESTIMATOR={estimator!r} is not one of those above")
    return np.nan_to_num(advantages.reshape(-1))


def _centered(groups: np.ndarray) -> np.ndarray:
    """[P, K] minus the mean of each row, past NaN; exactly 0 where a row's values are equal."""
    count = np.maximum((~np.isnan(groups)).sum(axis=1, keepdims=True), 1)
    centered = groups - np.nansum(groups, axis=1, keepdims=True) / count
    low, high = (f.reduce(groups, axis=1, keepdims=True) for f in (np.fmin, np.fmax))
    # max == min and not std == 0: the mean of three 0.7 is not 0.7 in binary.
    return np.where(low < high, centered, 0.0 * groups)


def _std(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """With ddof 1 and past NaN; 0 of fewer than two values."""
    count = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    mean = np.nansum(values, axis=axis, keepdims=True) / np.maximum(count, 1)
    squares = np.nansum((values - mean) ** 2, axis=axis, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1))


# ---- The objective -------------------------------------------------------------------------------


class Objective(NamedTuple):
    """The settings of policy_loss; hashable. A = advantage, ratio = exp(logps - old_logps).

    loss_type: the loss of a token, and how those of all tokens are averaged:
      dapo     -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A), mean over the step's tokens
      bnpo     the same here: TRL's divides by the tokens of a micro-batch, so memory would decide
      grpo     the same loss; mean over each sequence's tokens, then over the step's sequences
      dr_grpo  the same loss; sum over tokens / (sequences * max_completion_length)
      gspo     as grpo, with one ratio for each sequence: importance_sampling_level "sequence"
      cispo    -min(ratio, eps_high) A logps, no gradient through the ratio; averaged as dapo
      sapo     -(4 / tau) sigmoid(tau (ratio - 1)) A; averaged as grpo
    """

    loss_type: str = "dapo"
    eps_low: float = 0.2
    eps_high: float = 0.2
    delta: float = 0.0  # where clipping: the ratio counts as this at most; 0: no such limit
    importance_sampling_level: str = "token"  # "sequence": exp of the mean over the row's tokens
    beta: float = 0.0
    kl_estimator: str = "k3"
    kl_bias_correction: bool = True  # times the ratio: the gradient is that of the KL itself
    entropy_coef: float = 0.0
    is_mode: str = "none"
    is_cap: float = 3.0
    max_completion_length: int = 0  # tokens; dr_grpo's


def policy_loss(
    logps: jax.Array,
    old_logps: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    num_tokens: jax.Array | float,
    *,
    num_sequences: jax.Array | float | None = None,
    num_top_tokens: jax.Array | float | None = None,
    ref_logps: jax.Array | None = None,
    sampling_logps: jax.Array | None = None,
    entropy: jax.Array | None = None,
    top_mask: jax.Array | None = None,
    **settings: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The objective, a scalar, and its metrics; of a micro-batch, to be summed over the step.

    logps, old_logps, ref_logps, sampling_logps: [R, T] float32 nats of the sampled tokens, of the
    policy now, when the step began, of the reference (when beta > 0) and of the sampler (when
    is_mode is on). entropy: [R, T] (when entropy_coef > 0). advantages: [R].
    mask: [R, T], 1 on the completion tokens that count; what is under 0 may be any garbage.
    top_mask: [R, T], of top_entropy_mask: the tokens that the policy learns from; None: all.
    num_tokens, num_sequences, num_top_tokens: mask.sum(), rows and (mask * top_mask).sum() of the
    WHOLE step; None for the latter two: this is the whole step. settings: fields of Objective.
    Metrics that end in min or max are extremes over the step, the rest add up to its means.
    Source: PPO, arXiv 1707.06347 eq. 7; DAPO, 2503.14476 eq. 8; Dr. GRPO, 2503.20783; GSPO,
    2507.18071; CISPO, 2506.13585; SAPO, 2511.20347; TRL.
    """
    o = Objective(**settings)
    mask, A = mask.astype(bool), advantages[:, None]  # [R, T], [R, 1]
    top = mask if top_mask is None else mask & (top_mask > 0)  # [R, T]
    num_sequences = len(advantages) if num_sequences is None else num_sequences
    num_top_tokens = jnp.maximum(top.sum(), 1) if num_top_tokens is None else num_top_tokens
    own_tokens = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)  # [R, 1]

    def token_mean(x: jax.Array) -> jax.Array:
        return jnp.where(mask, x, 0.0).sum() / num_tokens

    log_ratio = jnp.where(mask, logps - old_logps, 0.0)  # [R, T]
    by_sequence = o.importance_sampling_level == "sequence" or o.loss_type == "gspo"
    if by_sequence:
        log_ratio = log_ratio.sum(axis=1, keepdims=True) / own_tokens  # [R, 1]
    ratio = jnp.exp(log_ratio)
    loss, cut = _token_loss(o, ratio, A, jnp.where(mask, logps, 0.0))  # [R, T] or [R, 1]
    metrics = _shares_cut(cut, mask, num_sequences if by_sequence else num_tokens)

    loss = jnp.where(top, loss, 0.0)  # [R, T]
    if o.is_mode != "none":
        weight, over = sampler_weights(old_logps, sampling_logps, mask, o.is_mode, o.is_cap)
        loss = loss * weight
        metrics |= {"is_weight/mean": token_mean(weight), "is_weight/over_cap": token_mean(over)}
    if o.beta > 0:
        kl = _kl(o.kl_estimator, jnp.where(mask, ref_logps - logps, 0.0))  # [R, T]
        if o.kl_bias_correction:  # the gradient of k2 is the KL's as it is, but for the samples
            kl = kl * (jax.lax.stop_gradient(ratio) if o.kl_estimator == "k2" else ratio)
        metrics["kl"] = token_mean(kl)
        loss = loss + o.beta * kl

    divisor = num_tokens
    if o.loss_type in ("grpo", "gspo", "sapo"):
        divisor = own_tokens * num_sequences
    elif o.loss_type == "dr_grpo":
        divisor = num_sequences * o.max_completion_length
    loss = jnp.where(mask, loss / divisor, 0.0).sum()
    if o.entropy_coef > 0:
        metrics["policy_loss"] = loss
        loss = loss - o.entropy_coef * jnp.where(top, entropy, 0.0).sum() / num_top_tokens
    return loss, {"loss": loss, **metrics}


def _token_loss(
    o: Objective, ratio: jax.Array, A: jax.Array, logps: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of each token, and where its ratio is cut; [R, T], or [R, 1] as the ratio may be."""
    if o.loss_type == "cispo":
        loss = -jax.lax.stop_gradient(jnp.minimum(ratio, o.eps_high)) * A * logps
        return loss, {"cispo_clip_ratio": (ratio > o.eps_high) & (A > 0)}
    if o.loss_type == "sapo":
        tau = jnp.where(A > 0, SAPO_TAU_POSITIVE, SAPO_TAU_NEGATIVE)
        return -4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * A, {}
    clipped = jnp.clip(ratio, 1 - o.eps_low, 1 + o.eps_high)
    ratio = jnp.minimum(ratio, o.delta) if o.delta else ratio
    low = (ratio < 1 - o.eps_low) & (A < 0)
    high = (ratio > 1 + o.eps_high) & (A > 0)
    cut = {"low": low, "high": high, "region": low | high}
    cut = {f"clip_ratio/{which}_mean": x for which, x in cut.items()}
    return -jnp.minimum(ratio * A, clipped * A), cut


def _shares_cut(
    cut: dict[str, jax.Array], mask: jax.Array, count: jax.Array | float
) -> dict[str, jax.Array]:
    """Means of `cut` over the step, and the extremes over the rows that have a token.

    cut: of _token_loss, False under the mask, where the ratio is 1. count: the step's ratios.
    """
    metrics = {name: x.sum() / count for name, x in cut.items()}
    if "clip_ratio/low_mean" in cut:
        tokens = mask.sum(axis=1)  # [R]
        low, high = (cut[f"clip_ratio/{which}_mean"] for which in ("low", "high"))
        ratios = jnp.maximum(tokens, 1) if low.shape == mask.shape else 1
        low, high = low.sum(axis=1) / ratios, high.sum(axis=1) / ratios  # [R]
        metrics["clip_ratio/low_min"] = jnp.where(tokens > 0, low, 1.0).min()
        metrics["clip_ratio/high_max"] = high.max()
    return metrics


def _kl(estimator: str, gap: jax.Array) -> jax.Array:
    """Of each token; gap: ref_logps - logps. Source: http://joschu.net/blog/kl-approx.html."""
    if estimator == "k1":
        return -gap
    return gap**2 / 2 if estimator == "k2" else jnp.expm1(gap) - gap


def sampler_weights(
    old_logps: jax.Array, sampling_logps: jax.Array, mask: jax.Array, mode: str, cap: float
) -> tuple[jax.Array, jax.Array]:
    """What makes up for a sampler of slightly other probabilities, and where it exceeds the cap.

    The trainer's probability of what was drawn over the sampler's, of each token [R, T] or, mode
    sequence_*, of the whole sequence [R, 1]; above cap it counts as cap (*_truncate) or 0 (*_mask).
    Source: https://fengyao.notion.site/off-policy-rl; TRL.
    """
    gap = jnp.nan_to_num(jnp.where(mask, old_logps - sampling_logps, 0.0))
    if mode.startswith("sequence"):
        gap = gap.sum(axis=1, keepdims=True)
    ratio = jax.lax.stop_gradient(jnp.exp(gap))
    over = ratio > cap
    return jnp.where(over, cap if mode.endswith("truncate") else 0.0, ratio), over


def top_entropy_mask(entropy: np.ndarray, mask: np.ndarray, quantile: float) -> np.ndarray:
    """[B, T] bool: the tokens of a whole step whose entropy is in its highest share, `quantile`.

    Source: arXiv 2506.01939; the threshold is interpolated between tokens, as TRL's.
    """
    mask = mask.astype(bool)
    if not mask.any():
        return mask
    return mask & (entropy >= np.quantile(entropy[mask], 1 - quantile))
