"""Claims about the objectives and estimators of a step, on runs of the main job.

The reward functions of these runs record what they reward. Before the first update every ratio is
1, so that the loss follows from the advantages alone.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_rollout import (
    K,
    P,
    T,
    centered,
    groups_of,
    lengths,
    of,
    scaled,
    settings_of,
    token_mean_loss,
)
from test_train import Result, train

from config import Config
from loss import Objective
from models.draw import Sampling
from startup import set_up
from update import Optimizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objectives")


@pytest.fixture(scope="module")
def base(folder: Path) -> dict[str, str]:
    return settings_of(folder) | {"TEMPERATURE": "0.7"}


@pytest.fixture(scope="module")
def four_steps(folder: Path, base: dict[str, str]) -> Result:
    settings = {"BETA": "0.1", "STEPS": "4"}
    settings |= {"LEARNING_RATE": "1e-3", "LR_SCHEDULE": "linear", "WARMUP_RATIO": "0.4"}
    return train(folder / "four", **base | settings | {"LR_DECAY_STEPS": "5"})


def test_the_learning_rates_of_a_run_are_those_of_its_warmup_and_its_schedule(
    four_steps: Result,
) -> None:
    """Two of five steps warm up, and the rate falls to 0 in the three steps after them."""
    rates = of(four_steps, "other/learning_rate")
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 1e-3 * 2 / 3], rel=1e-9)


def test_the_reference_is_the_model_with_which_the_run_began(four_steps: Result) -> None:
    assert max(of(four_steps, "other/sampling_logp_difference/max")) < 1e-4, "at one temperature"
    kl = of(four_steps, "other/kl")
    assert kl[0] < 1e-9 and min(kl[1:]) > 1e-5


def over_std(x: np.ndarray, of: np.ndarray) -> np.ndarray:
    return x / (of.std(ddof=1) + 1e-4)


def gdpo(r: np.ndarray, f: np.ndarray) -> np.ndarray:
    x = scaled(f[0]) + 0.5 * scaled(f[1]) + 2 * scaled(f[2])
    return over_std(x, x)


def sequence_mean_loss(A: np.ndarray, n: np.ndarray) -> float:
    return -A.mean()


def dr_grpo_loss(A: np.ndarray, n: np.ndarray) -> float:
    return -(A * n).sum() / (P * K * T)


def sapo_loss(A: np.ndarray, n: np.ndarray) -> float:
    return -(2 * A / np.where(A > 0, 1, 1.05)).mean()


# The advantages [P, K] follow from the rewards r [P, K] and, for gdpo, from the rewards f [F, P, K]
# of each function. The loss follows from the advantages A [P*K] and the lengths n [P*K]; it is None
# for cispo, whose loss needs the logps.
OBJECTIVES: dict[str, tuple[Callable, Callable | None]] = {
    "LOSS_TYPE=gspo ADV_ESTIMATOR=rloo": (lambda r, f: centered(r) * 8 / 7, sequence_mean_loss),
    "LOSS_TYPE=cispo EPS_HIGH=5 ADV_ESTIMATOR=reinforce": (
        lambda r, f: over_std(r - r.mean(), r),
        None,
    ),
    "LOSS_TYPE=dr_grpo SCALE_REWARDS=none": (lambda r, f: centered(r), dr_grpo_loss),
    "LOSS_TYPE=sapo ADV_ESTIMATOR=gdpo": (gdpo, sapo_loss),
    "LOSS_TYPE=dapo ADV_ESTIMATOR=reinforce++": (
        lambda r, f: over_std(centered(r), centered(r)),
        token_mean_loss,
    ),
    "LOSS_TYPE=grpo SCALE_REWARDS=batch IS_MODE=sequence_mask": (
        lambda r, f: over_std(centered(r), r),
        sequence_mean_loss,
    ),
}
SLOW = [x for x in OBJECTIVES if "sapo" not in x]
ALL = [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in OBJECTIVES]


@pytest.mark.parametrize("settings", ALL)
def test_every_objective_and_estimator_takes_its_step(
    folder: Path, base: dict[str, str], settings: str
) -> None:
    env = dict(setting.split("=") for setting in settings.split())
    repeated = base["REWARD_FN"].replace(":hashed", ":repeated")
    functions = f"{base['REWARD_FN']},soft_overlong_penalty,{repeated}"
    env |= {"REWARD_FN": functions, "REWARD_WEIGHTS": "1,0.5,2", "OVERLONG_CACHE": "8"}
    result = train(folder / env["LOSS_TYPE"], **base | env)
    assert f"loss.loss_type={env['LOSS_TYPE']} loss.adv_estimator=" in result.lines

    groups = groups_of(result)
    n = lengths(groups)
    hashed = np.concatenate([g.rewards for g in groups])
    distinct = np.array([len(set(ids)) for g in groups for ids in g.ids])
    f = np.array([hashed, np.clip((T - 8 - n) / 8, -1, 0), distinct / n - 1]).reshape(3, P, K)
    names = ("hashed", "soft_overlong_penalty", "repeated")
    means = [of(result, f"reward/func/{name}/mean")[0] for name in names]
    assert means == pytest.approx([x.mean() for x in f]) and max(means[1:]) < 0
    advantages_of, loss_of = OBJECTIVES[settings]
    A = advantages_of(f[0] + 0.5 * f[1] + 2 * f[2], f).reshape(-1)
    spread = [of(result, f"reward/advantage/{name}")[0] for name in ("min", "std", "max")]
    assert spread == pytest.approx([A.min(), A.std(), A.max()], 1e-6)
    if loss_of:
        assert of(result, "other/loss") == pytest.approx([loss_of(A, n)], 1e-5, 5e-6)
    assert of(result, "other/grad_norm")[0] > 1e-3
    if "IS_MODE" in env:
        assert of(result, "other/is_weight/mean") == pytest.approx([1], 1e-3)
        assert of(result, "other/is_weight/over_cap") == [0]


def test_every_setting_of_the_objective_the_sampler_and_the_optimizer_reaches_it() -> None:
    settings = {
        "LOSS_TYPE": "grpo",
        "EPS_LOW": "0.1",
        "EPS_HIGH": "0.3",
        "DELTA": "2",
        "BETA": "0.05",
        "KL_ESTIMATOR": "k2",
        "KL_BIAS_CORRECTION": "0",
        "ENTROPY_COEF": "0.01",
        "IS_MODE": "token_mask",
        "IS_FLOOR": "0.5",
        "IS_CAP": "2.5",
        "MAX_LENGTH_SAMPLE": "24",
        "TEMPERATURE": "0.7",
        "TOP_K": "9",
        "TOP_P": "0.8",
        "MIN_P": "0.2",
        "OPTIMIZER": "lion",
        "WEIGHT_DECAY": "0.04",
        "CLIP_NORM": "0.5",
    }
    run = set_up(Config.from_env(settings))
    assert run.objective == Objective(
        loss_type="grpo",
        eps_low=0.1,
        eps_high=0.3,
        delta=2.0,
        beta=0.05,
        kl_estimator="k2",
        kl_bias_correction=False,
        entropy_coef=0.01,
        is_mode="token_mask",
        is_floor=0.5,
        is_cap=2.5,
        max_completion_length=24,
    )
    assert run.sampling == Sampling(temperature=0.7, top_k=9, top_p=0.8, min_p=0.2, replay=True)
    assert run.optimizer == Optimizer(name="lion", weight_decay=0.04, clip_norm=0.5)
    for made in (run.objective, run.sampling, run.optimizer):
        left = {name for name, x in made._asdict().items() if x == made._field_defaults[name]}
        assert not left, "a new field needs a value in this test"
