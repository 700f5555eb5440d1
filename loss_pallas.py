"""Group advantages, the policy objective, and token log-probabilities from hidden states.

Dimensions: P prompts, K completions per prompt, B = P*K sequences of a whole step, R sequences of
one micro-batch, T completion tokens (padded), V vocabulary, D model.

The loss is a SUM over a micro-batch's completion tokens, divided by the completion tokens of the
whole step (all micro-batches, passes and processes): micro-batching leaves the gradient unchanged.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STD_EPS = 1e-4  # TRL's
# float32 logits one chunk of token_logps may hold per device: a vocabulary of 152k gives 440
# tokens, enough rows for a full matmul, little beside a chip's 16 GiB.
LOGITS_CHUNK_BYTES = 256 * 2**20


def group_advantages(
    rewards: np.ndarray, num_pre_q: int, *, scale_rewards: str = "group"
) -> np.ndarray:
    """How much better each completion is than its group: [B] float64.

    rewards: [B], groups of num_pre_q contiguous rows; NaN (no reward applies) gets advantage 0.
    scale_rewards: divide by the std (ddof = 1) of the "group", of the whole "batch", or "none".
    Equal rewards in a group give exactly 0. Source: GRPO, arXiv 2402.03300 section 4.1; TRL.
    """
    groups = np.asarray(rewards, np.float64).reshape(-1, num_pre_q)  # [P, K]
    scored = ~np.isnan(groups)
    count = np.maximum(scored.sum(axis=1, keepdims=True), 1)
    values = np.where(scored, groups, 0.0)
    centered = np.where(scored, values - values.sum(axis=1, keepdims=True) / count, 0.0)
    low, high = np.where(scored, groups, np.inf), np.where(scored, groups, -np.inf)
    # max == min and not std == 0: the mean of three 0.7 is not 0.7 in binary.
    centered = np.where(low.min(1, keepdims=True) >= high.max(1, keepdims=True), 0.0, centered)
    if scale_rewards == "group":
        variance = (centered**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)
        centered = centered / (np.sqrt(variance) + STD_EPS)
    elif scale_rewards == "batch":
        spread = groups[scored].std(ddof=1) if scored.sum() > 1 else 0.0
        centered = centered / (spread + STD_EPS)
    return centered.reshape(-1)


def policy_loss(
    logps: jax.Array,
    old_logps: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    num_tokens: jax.Array,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    beta: float = 0.0,
    ref_logps: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The clipped objective with a k3 penalty towards the reference: a scalar, and its metrics.

    logps, old_logps, ref_logps: [R, T] float32 nats of the sampled tokens, of the policy now, when
    the step began, and of the frozen reference (needed when beta > 0). advantages: [R].
    mask: [R, T], 1 on completion tokens up to and including the stop token; what is under 0 may be
    any finite garbage. num_tokens: mask.sum() over the WHOLE step. Loss and metrics of the
    micro-batches of a step sum to the step's token means.
    Source: PPO, arXiv 1707.06347 eq. 7; the token mean: DAPO, arXiv 2503.14476 eq. 8;
    k3: http://joschu.net/blog/kl-approx.html.
    """

    def token_mean(x: jax.Array) -> jax.Array:
        return jnp.where(mask, x, 0.0).sum() / num_tokens

    mask = mask.astype(bool)
    advantages = advantages[:, None]  # [R, 1]
    ratio = jnp.exp(jnp.where(mask, logps - old_logps, 0.0))  # [R, T]
    clipped = jnp.clip(ratio, 1 - eps_low, 1 + eps_high)
    loss = token_mean(-jnp.minimum(ratio * advantages, clipped * advantages))
    low = token_mean((ratio < 1 - eps_low) & (advantages < 0))
    high = token_mean((ratio > 1 + eps_high) & (advantages > 0))
    metrics = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high}
    metrics["clip_ratio/region_mean"] = low + high
    if beta > 0:
        gap = jnp.where(mask, ref_logps - logps, 0.0)  # [R, T]
        metrics["kl"] = token_mean(jnp.exp(gap) - gap - 1)
        loss = loss + beta * metrics["kl"]
    return loss, {"loss": loss, **metrics}


def token_logps(
    hidden: jax.Array,
    lm_head: jax.Array,
    ids: jax.Array,
    *,
    temperature: float = 1.0,
    impl: str = "jax",
    shards: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """log p of `ids` and the entropy of each distribution: two arrays [..., n] float32, nats.

    hidden: [..., n, D] and lm_head: [V, D], of one dtype; ids: [..., n] int32. The logits, in
    float32, are divided by temperature. shards: devices the leading axes are spread over.
    Walks the n axis in chunks of LOGITS_CHUNK_BYTES of logits per device and computes each again
    in the backward pass, so that no more of [..., n, V] exists at once.
    """
    if impl != "jax":
        raise ValueError(f"POLICY_LOSS_IMPL={impl!r} is not implemented; jax is")
    *lead, n, D = hidden.shape
    rows = max(int(np.prod(lead)) // shards, 1)
    chunk = max(1, LOGITS_CHUNK_BYTES // (rows * lm_head.shape[0] * 4))
    if chunk >= n:
        return token_logps_reference(hidden, lm_head, ids, temperature=temperature)

    def split(x: jax.Array, axis: int) -> jax.Array:  # n -> (n / chunk, chunk), the former first
        widths = [(0, -n % chunk) if i == axis else (0, 0) for i in range(x.ndim)]
        x = jnp.pad(x, widths)
        x = x.reshape(*x.shape[:axis], -1, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    @jax.checkpoint
    def one(pair: Any) -> tuple[jax.Array, jax.Array]:
        return token_logps_reference(pair[0], lm_head, pair[1], temperature=temperature)

    def join(x: jax.Array) -> jax.Array:  # [n / chunk, ..., chunk] -> [..., n]
        return jnp.moveaxis(x, 0, -2).reshape(*lead, -1)[..., :n]

    logps, entropy = jax.lax.map(one, (split(hidden, len(lead)), split(ids, len(lead))))
    return join(logps), join(entropy)


def token_logps_reference(
    hidden: jax.Array, lm_head: jax.Array, ids: jax.Array, *, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """What token_logps returns, computed from the whole of the logits."""
    logits = jnp.einsum("...d,vd->...v", hidden, lm_head, preferred_element_type=jnp.float32)
    logits = logits / temperature  # [..., n, V]
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    log_probs = logits - logsumexp[..., None]
    # Not logsumexp - sum(p z): large logits would cancel to an entropy of few digits.
    return chosen - logsumexp, -(jnp.exp(log_probs) * log_probs).sum(axis=-1)
