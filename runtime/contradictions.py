"""Settings that cannot work together, and settings that do nothing beside others.

cfg is the Config of config.py.
"""

import os
from collections.abc import Collection, Iterator
from typing import Any

from runtime.parsing import to_text

MAX_REPLAYED = 128  # MAX_SUPPORT of models/draw.py; this file imports no jax


def contradictions(cfg: Any) -> Iterator[str]:
    """Lines about combinations that would give a wrong or an empty run."""
    if cfg.num_pre_q == 1 and cfg.steps and cfg.adv_estimator != "reinforce":
        why = f"NUM_PRE_Q=1 leaves ADV_ESTIMATOR={cfg.adv_estimator} nothing to compare"
        yield f"{why} a completion with; set at least 2, or ADV_ESTIMATOR=reinforce"
    if cfg.dynamic_sampling and cfg.adv_estimator == "reinforce":
        yield "DYNAMIC_SAMPLING=1 drops groups that ADV_ESTIMATOR=reinforce can use; leave it out"
    if cfg.loss_type == "cispo" and cfg.eps_high < 1:
        yield f"EPS_HIGH={cfg.eps_high} caps every ratio of LOSS_TYPE=cispo below 1; set EPS_HIGH=5"
    if cfg.delta and cfg.delta <= (limit := 1 + cfg.eps_high):
        yield f"DELTA={cfg.delta} must be above 1 + EPS_HIGH = {limit}, where clipping begins"
    if cfg.beta and cfg.kl_estimator == "k1" and not cfg.kl_bias_correction:
        yield "KL_ESTIMATOR=k1 has no gradient on average with KL_BIAS_CORRECTION=0; set it to 1"
    if cfg.is_mode.startswith("sequence") and cfg.filters_logps():
        why = "with SAMPLING_SUPPORT=full shrinks a sequence's weight with every token"
        yield f"IS_MODE={cfg.is_mode} {why}; leave SAMPLING_SUPPORT out, or set token_truncate"
    for name, text in (("policy_loss_impl", "pallas"), ("rollout_backend", "sglang_jax")):
        if cfg.replays() and getattr(cfg, name) == text:
            why = f"{name.upper()}={text} cannot replay the tokens that TOP_K, TOP_P, MIN_P leave"
            yield f"{why}; leave {name.upper()} out, or set SAMPLING_SUPPORT=full (a biased loss)"
    if cfg.replays() and cfg.top_k > MAX_REPLAYED:
        why = f"TOP_K={cfg.top_k} is too many tokens to replay"
        yield f"{why}; set at most {MAX_REPLAYED}, or SAMPLING_SUPPORT=full"
    if "://" in cfg.output_dir + cfg.export_hf:
        yield "OUTPUT_DIR and EXPORT_HF are folders of this machine; CHECKPOINT_DIR may be gs://"
    if cfg.overlong_cache > (T := cfg.max_length_sample):
        yield f"OVERLONG_CACHE={cfg.overlong_cache} must be at most MAX_LENGTH_SAMPLE={T}"


def notes(cfg: Any, tiny: Collection[str]) -> Iterator[str]:
    """Lines about settings that may not do what the user expects, but are no mistakes.

    tiny: the settings that recipes/tiny.yaml has set, not the user.
    """
    if "model_path" in tiny and "dataset" not in tiny:
        yield f"MODEL_PATH is not set, so DATASET={cfg.dataset} trains this project's tiny model"
    yield from idle_settings(cfg, tiny)
    if cfg.filters_logps() and cfg.is_mode == "none":
        why = "TOP_K, TOP_P, MIN_P change sampling only, and the loss has a bias"
        yield f"{why}; leave out SAMPLING_SUPPORT=full, or set IS_MODE=token_truncate"
    if 0 < cfg.lr_decay_steps < cfg.steps and cfg.lr_schedule != "constant":
        decay = f"LR_DECAY_STEPS={cfg.lr_decay_steps} is less than STEPS={cfg.steps}"
        yield f"{decay}: later steps have learning rate 0"


def idle_settings(cfg: Any, tiny: Collection[str]) -> Iterator[str]:
    """Lines about settings of the user that have no effect beside the others, where people often
    expect one."""
    engine = " ".join(name for name in vars(cfg) if name.startswith("sglang_jax"))
    sends = cfg.wandb_mode or os.environ.get("WANDB_API_KEY")
    ratio_free = cfg.loss_type in ("cispo", "sapo")
    several = cfg.ppo_epochs * cfg.num_mini_batches > 1
    once = "one update per step, whose ratios are all 1; NUM_MINI_BATCHES=2 gives two"
    table = [  # settings, what they need to have an effect, and why they have none
        (engine, cfg.rollout_backend == "sglang_jax", f"ROLLOUT_BACKEND={cfg.rollout_backend}"),
        ("sampling_support", cfg.filters(), "TOP_K=0, TOP_P=1.0 and MIN_P=0.0"),
        ("overlong_cache", "soft_overlong" in cfg.reward_fn, f"REWARD_FN={cfg.reward_fn}"),
        ("scale_rewards", cfg.adv_estimator == "grpo", f"ADV_ESTIMATOR={cfg.adv_estimator}"),
        ("delta eps_low", not ratio_free, f"LOSS_TYPE={cfg.loss_type}"),
        ("eps_high", cfg.loss_type != "sapo", "LOSS_TYPE=sapo"),
        ("eps_low eps_high delta", several, once),
        ("kl_estimator kl_bias_correction", cfg.beta > 0, "BETA=0"),
        ("is_floor is_cap", cfg.is_mode != "none", "IS_MODE=none"),
        ("wandb_project", sends, "WANDB_MODE empty and no WANDB_API_KEY"),
    ]
    for name, value in vars(cfg).items():
        reasons = [why for names, needs, why in table if name in names.split() and not needs]
        if reasons and name not in tiny and value != getattr(type(cfg), name):
            yield f"{name.upper()}={to_text(value)} does nothing with {reasons[0]}"
