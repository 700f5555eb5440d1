"""The facts about each objective (LOSS_TYPE) and each estimator of advantages (ADV_ESTIMATOR),
without jax; loss.py has their formulas."""

from typing import NamedTuple


class Facts(NamedTuple):
    """The defaults are those of DAPO, with the clipped loss of PPO."""

    aggregation: str = "token-mean"  # of tokens, in verl's words; policy_loss has the divisors
    ratio: str = "token"  # one for each token; sequence: exp of the mean log ratio of its tokens
    anchor: str = "old"  # ratio = policy / policy before the updates; sampler: policy / sampler
    weights_ratios: bool = False  # IS_MODE's weights multiply the ratios, not the loss
    reads: tuple[str, ...] = ("eps_low", "eps_high", "delta")  # settings that the loss reads
    # What EPS_LOW and EPS_HIGH bound: the ratio, with cap the ratio from above only (EPS_HIGH), or
    # the distance between the probabilities of the policy and of the anchor.
    bounded: str = "ratio"
    published: tuple[float, float] | None = None  # EPS_LOW and EPS_HIGH in the paper


EPS = ("eps_low", "eps_high")
OBJECTIVES = {
    "dapo": Facts(),  # arXiv 2503.14476 eq. 8
    "grpo": Facts("seq-mean-token-mean"),  # 2402.03300
    "dr_grpo": Facts("seq-mean-token-sum-norm"),  # 2503.20783
    "cispo": Facts(reads=("eps_high",), bounded="cap"),  # 2506.13585
    "gspo": Facts("seq-mean-token-mean", ratio="sequence", published=(3e-4, 4e-4)),  # 2507.18071
    "sapo": Facts("seq-mean-token-mean", reads=()),  # 2511.20347
    "luspo": Facts("seq-mean-token-sum", ratio="sequence", published=(2e-3, 2.5e-3)),  # 2602.05261
    "gmpo": Facts("seq-mean-token-mean", reads=EPS, published=(0.4, 0.4)),  # 2507.20673
    "vespo": Facts(weights_ratios=True, reads=()),  # 2602.10693
    "dppo_tv": Facts(anchor="sampler", bounded="distance", published=(0.15, 0.15)),  # 2602.04879
    "dppo_kl": Facts(anchor="sampler", bounded="distance", published=(0.05, 0.05)),
    "sft": Facts(reads=()),
}


class EstimatorFacts(NamedTuple):
    """What an estimator of advantages makes of rewards. Each compares completions of a group by
    default."""

    baseline: str = "group"  # the rewards whose mean is subtracted, or batch
    by_function: bool = False  # compares the rewards of each function, not their sum
    needs_rewards_from_0: bool = False
    reads_scale_rewards: bool = False


ESTIMATORS = {
    "grpo": EstimatorFacts(reads_scale_rewards=True),
    "rloo": EstimatorFacts(),
    "reinforce": EstimatorFacts(baseline="batch"),
    "reinforce++": EstimatorFacts(),
    "gdpo": EstimatorFacts(by_function=True),
    "maxrl": EstimatorFacts(needs_rewards_from_0=True),
}
