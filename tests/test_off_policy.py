"""Claims about what limits learning from samples that the policy would not make any more."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_loss import part, trl_inputs

from loss import sampler_weights


@pytest.mark.parametrize("how, limits", [("truncate", (0.5, 5.0)), ("mask", (0.0, 0.0))])
def test_a_floor_limits_the_weights_on_the_other_side(how: str, limits: tuple) -> None:
    """IcePop keeps the weights from 0.5 to 5 and drops all others; here these are 1/4 and 8."""
    gap = jnp.log(jnp.array([[0.25, 0.5, 1, 5, 8]]))
    inputs = (gap, jnp.zeros((1, 5)), jnp.ones((1, 5)))
    weight, under, over = sampler_weights(*inputs, f"token_{how}", 0.4999, 5.0001)
    floor, cap = limits
    np.testing.assert_allclose(weight, [[floor, 0.5, 1, 5, cap]], atol=2e-4)
    assert under.tolist() == [[True, False, False, False, False]]
    assert over.tolist() == [[False, False, False, False, True]]


def test_delta_is_the_dual_clip_of_verl() -> None:
    """verl, with clip_ratio_c=3: for A < 0 the loss of a token is at most -3 A."""
    x = trl_inputs()
    x["old_logps"] = np.float32(x["logps"] - np.random.default_rng(0).normal(0, 1.2, (8, 12)))
    mask, A = x["mask"].astype(bool), x["advantages"].astype(np.float64)[:, None]
    ratio = np.exp(np.where(mask, x["logps"] - x["old_logps"], 0).astype(np.float64))
    clipped = np.maximum(-A * ratio, -A * np.clip(ratio, 0.8, 1.2))
    dual = np.where(A < 0, np.minimum(clipped, -3 * A), clipped)
    assert ((A < 0) & (clipped > -3 * A) & mask).sum() >= 2
    loss, _, _ = part(x, delta=3.0)
    assert loss == pytest.approx(np.where(mask, dual, 0).sum() / mask.sum(), rel=1e-6)
