"""The facts about each objective (LOSS_TYPE), without jax; loss.py has its loss of a token."""

from typing import NamedTuple


class Facts(NamedTuple):
    """The defaults are those of DAPO, with the clipped loss of PPO."""

    mean: str = "token-mean"  # over tokens, in verl's words; policy_loss has the divisors
    ratio: str = "token"  # one for each token; sequence: exp of the mean log ratio of its tokens
    anchor: str = "old"  # ratio = policy / policy before the updates; sampler: policy / sampler
    weights_ratios: bool = False  # IS_MODE's weights multiply the ratios, not the loss
    reads: tuple[str, ...] = ("eps_low", "eps_high", "delta")  # settings that the loss reads
    limits: str = "ratio"  # what EPS_LOW and EPS_HIGH bound, or distance; cap: EPS_HIGH is a bound
    published: tuple[float, float] | None = None  # EPS_LOW and EPS_HIGH in the paper


EPS = ("eps_low", "eps_high")
OBJECTIVES = {
    "dapo": Facts(),  # arXiv 2503.14476 eq. 8
    "grpo": Facts("seq-mean-token-mean"),  # 2402.03300
    "dr_grpo": Facts("seq-mean-token-sum-norm"),  # 2503.20783
    "cispo": Facts(reads=("eps_high",), limits="cap"),  # 2506.13585
    "gspo": Facts("seq-mean-token-mean", ratio="sequence", published=(3e-4, 4e-4)),  # 2507.18071
    "sapo": Facts("seq-mean-token-mean", reads=()),  # 2511.20347
    "luspo": Facts("seq-mean-token-sum", ratio="sequence", published=(2e-3, 2.5e-3)),  # 2602.05261
    "gmpo": Facts("seq-mean-token-mean", reads=EPS, published=(0.4, 0.4)),  # 2507.20673
    "vespo": Facts(weights_ratios=True, reads=()),  # 2602.10693
    "dppo_tv": Facts(anchor="sampler", limits="distance", published=(0.15, 0.15)),  # 2602.04879
    "dppo_kl": Facts(anchor="sampler", limits="distance", published=(0.05, 0.05)),
    "sft": Facts(reads=()),
}
