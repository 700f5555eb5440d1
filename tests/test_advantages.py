"""Claims about the advantages of loss.py, of every estimator, and about groups of equal rewards.

goldens/trl.npz holds what TRL 1.16 makes of seeded random inputs, trl.json the settings behind it.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loss import AdvantageConfig, group_advantages

GOLDENS = Path(__file__).parent / "goldens"
TRL = json.loads((GOLDENS / "trl.json").read_text(encoding="utf-8"))
ARRAYS = dict(np.load(GOLDENS / "trl.npz"))
NAN = math.nan
# The mean of the first group is 1/4, that of the second one 3/4.
MAXRL = [0.75 / 0.250001, *[-0.25 / 0.250001] * 3, *[0.25 / 0.750001] * 3, -0.75 / 0.750001]


@np.errstate(divide="raise", invalid="raise")
def advantages_of(function_rewards: np.ndarray, weights: Any, K: int, how: str) -> np.ndarray:
    """function_rewards: [B, F]; how: the scale of grpo, or another estimator."""
    rewards = np.nansum(function_rewards * weights, axis=1)
    rewards[np.isnan(function_rewards).all(axis=1)] = NAN
    if how in ("group", "batch", "none"):
        return group_advantages(rewards, K, AdvantageConfig(scale_rewards=how))
    config = AdvantageConfig(how, weights=weights)
    return group_advantages(rewards, K, config, function_rewards if how == "gdpo" else None)


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
        # NaN counts in neither mean nor std and gets 0
        ([1, NAN, 0, 2], 4, "group", [0, 0, -1 / 1.0001, 1 / 1.0001]),
        ([1, NAN, 3, NAN], 4, "none", [-1, 0, 1, 0]),
        ([2, NAN, 0, NAN, 1, 1], 2, "batch", [0] * 6),  # alone in its group: nothing to compare to
        ([4, 2, NAN, NAN], 2, "batch", [1 / 1.4143136, -1 / 1.4143136, 0, 0]),
        ([NAN] * 4, 2, "group", [0] * 4),
        ([NAN] * 4, 2, "batch", [0] * 4),
        # the mean of the others: 7/3, 8/3, 2, 1
        ([1, 0, 2, 5], 4, "rloo", [-4 / 3, -8 / 3, 0, 4]),
        ([1, NAN, 3, NAN, 5, NAN, NAN, NAN], 4, "rloo", [-2, 0, 2, 0, 0, 0, 0, 0]),
        ([5, 7], 1, "rloo", [0, 0]),
        # the mean of all is 2, the std sqrt(14/3); the groups do not matter
        ([1, 0, 2, 5], 2, "reinforce", [-1 / 2.1603469, -2 / 2.1603469, 0, 3 / 2.1603469]),
        ([1, NAN, 3], 1, "reinforce", [-1 / 1.4143136, 0, 1 / 1.4143136]),
        # Differences within 1e-6 of the largest |reward| are rounding.
        ([-1e6, -1e6 - 0.9], 2, "none", [0, 0]),
        ([-1e6, -1e6 - 1.1], 2, "none", [0.55, -0.55]),
        ([0.7 + 0.2 + 0.1, 1, 1, 0.9999], 4, "none", [*[2.5e-5] * 3, -7.5e-5]),
        ([0.3 - 0.1 - 0.2, 0, 0], 3, "group", [0, 0, 0]),
        ([1e-9, 0], 2, "none", [5e-10, -5e-10]),
        ([1e30, 0], 2, "group", [0.5**0.5, -(0.5**0.5)]),  # the largest reward that is not refused
        ([0.7] * 6, 3, "reinforce", [0] * 6),
        # the std of 1,-1,1/2,-1/2 is sqrt(2.5/3); of 1,-1,0 is 1
        ([2, 0, 5, 4], 2, "reinforce++", np.array([1, -1, 0.5, -0.5]) / 0.9129709),
        ([2, 0, NAN, 4], 2, "reinforce++", [1 / 1.0001, -1 / 1.0001, 0, 0]),
        # one right completion of four weighs 3, three of four 1/3 each
        ([1, 0, 0, 0, 1, 1, 1, 0], 4, "maxrl", MAXRL),
        ([2, NAN, 1, 0], 4, "maxrl", [1 / 1.000001, 0, 0, -1 / 1.000001]),
        ([0, 0, 0, 0, 1, 1, 1, 1], 4, "maxrl", [0] * 8),
        # Groups (1, 0), (0, 0) scale to +-.5/.7072068, 0; (0, 4), (3, 1) to -+2/2.8285271,
        # +-1/1.4143. Weighted by 1 and 1/2 they are +-.3534659, +-.3535284, of std 0.4081833.
        (
            [[1, 0], [0, 4], [0, 3], [0, 1]],
            2,
            "gdpo",
            [0.8657368, -0.8657368, 0.8658898, -0.8658898],
        ),
        # The second function skips completion 1, so that completion 0 has nothing to compare to.
        # Completion 3 has no reward. +-.7070068, 0 have a std of .7070068.
        ([[1, 0], [0, NAN], [0, 3], [NAN, NAN]], 2, "gdpo", [0.9998586, -0.9998586, 0, 0]),
    ],
)
def test_advantages_by_hand(rewards: list, K: int, how: str, expected: list) -> None:
    """A second reward function, of gdpo, has the weight 1/2."""
    function_rewards = np.array(rewards, float).reshape(len(rewards), -1)
    weights = [1.0, 0.5][: function_rewards.shape[1]]
    advantages = advantages_of(function_rewards, weights, K, how)
    np.testing.assert_allclose(advantages, expected, atol=1e-7)
    assert advantages.shape == (len(rewards),) and advantages.dtype == np.float64


@pytest.mark.parametrize("value", [0.7, 0.1, 1.0, -0.3, 1e6 + 0.1])
@pytest.mark.parametrize("how", ["group", "batch", "none", "rloo", "reinforce++", "gdpo"])
def test_equal_rewards_have_no_advantage_at_all(value: float, how: str) -> None:
    """Or equal but for rounding, as 0.1 + 0.2 and 0.3."""
    rounded = value * np.array([1, 1 + 2e-16, 1 - 9e-7, 1, 1, 1])
    for rewards in (np.full(6, value), np.full(6, value, np.float32), rounded):
        rewards[3:] = [1, 0, NAN]  # the other group has some
        advantages = advantages_of(rewards[:, None], np.ones(1, rewards.dtype), 3, how)
        assert advantages[:3].tolist() == [0, 0, 0]
        assert advantages[3] > 0 > advantages[4] and advantages[5] == 0


@pytest.mark.parametrize("name", TRL["advantages"])
def test_advantages_are_those_of_trl(name: str) -> None:
    golden, (case, how) = TRL["advantages"][name], name.split(".")
    function_rewards = ARRAYS[f"advantages.{case}.rewards"].astype(float)  # [B, F]
    advantages = advantages_of(function_rewards, golden["weights"], golden["num_generations"], how)
    # TRL leaks float32 noise into the equal group of point1; the rest is 2e-7 of its size.
    atol = 4e-6 if case == "point1" else 2e-7
    np.testing.assert_allclose(advantages, ARRAYS[f"advantages.{name}"], rtol=2e-7, atol=atol)
