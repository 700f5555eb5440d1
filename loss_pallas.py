"""Token log-probabilities and entropies from hidden states, without all the logits at once.

Dimensions: n tokens, V vocabulary, D model; leading axes are kept.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# float32 logits one chunk of token_logps may hold per device: a vocabulary of 152k gives 440
# tokens, enough rows for a full matmul, little beside a chip's 16 GiB.
LOGITS_CHUNK_BYTES = 256 * 2**20


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
