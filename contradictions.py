"""Settings that another setting makes wrong or idle. Imports neither jax nor flax."""

import dataclasses
import os
from typing import Any

from runtime.parsing import to_text


def contradictions(cfg: Any) -> list[str]:
    """A line for each setting that another one makes wrong or idle."""
    loss, estimator = f"LOSS_TYPE={cfg.loss_type}", f"ADV_ESTIMATOR={cfg.adv_estimator}"
    filtered = cfg.top_k > 0 or cfg.top_p < 1 or cfg.min_p > 0
    updates = cfg.steps * cfg.ppo_epochs
    idle = [  # setting, whether it does something, why not
        ("kl_estimator", cfg.beta, "BETA=0"),
        ("kl_bias_correction", cfg.beta, "BETA=0"),
        ("ref_sync_steps", cfg.beta, "BETA=0"),
        ("ref_sync_alpha", cfg.ref_sync_steps, "REF_SYNC_STEPS=0"),
        ("is_cap", cfg.is_mode != "none", "IS_MODE=none"),
        ("scale_rewards", cfg.adv_estimator == "grpo", estimator),
        ("delta", cfg.loss_type not in ("cispo", "sapo"), loss),
        ("eps_low", cfg.loss_type not in ("cispo", "sapo"), loss),
        ("eps_high", cfg.loss_type != "sapo", loss),
        ("dynamic_sampling_max_rounds", cfg.dynamic_sampling, "DYNAMIC_SAMPLING=0"),
        ("overlong_cache", "soft_overlong_penalty" in cfg.reward_fn, f"REWARD_FN={cfg.reward_fn}"),
        ("repetition_ngram", "repetition_penalty" in cfg.reward_fn, f"REWARD_FN={cfg.reward_fn}"),
        ("model_revision", not os.path.isdir(cfg.model_path), f"a folder, {cfg.model_path}"),
        ("dataset_config", not os.path.exists(cfg.dataset), f"a local DATASET, {cfg.dataset}"),
        ("export_dtype", cfg.export_hf != "none", "EXPORT_HF=none"),
    ]
    defaults = {field.name: field.default for field in dataclasses.fields(cfg)}
    found = [
        f"{name.upper()}={to_text(getattr(cfg, name))} does nothing with {reason}; leave it out"
        for name, works, reason in idle
        if getattr(cfg, name) != defaults[name] and not works
    ]
    wrong = [  # whether it is, what is wrong and what would do
        (cfg.num_pre_q == 1 and cfg.steps and cfg.adv_estimator != "reinforce",
         f"NUM_PRE_Q=1 leaves {estimator} nothing to compare a completion with; set at least 2, "
         f"or ADV_ESTIMATOR=reinforce"),
        (cfg.dynamic_sampling and cfg.adv_estimator == "reinforce",
         "DYNAMIC_SAMPLING=1 drops groups of equal rewards, which teach with "
         "ADV_ESTIMATOR=reinforce; leave it out"),
        (cfg.loss_type == "cispo" and cfg.eps_high < 1,
         f"EPS_HIGH={cfg.eps_high}: with {loss} this is the largest ratio, and below 1 it shrinks "
         f"every gradient; set EPS_HIGH=5"),
        (cfg.delta and cfg.delta <= 1 + cfg.eps_high,
         f"DELTA={cfg.delta} must be above 1 + EPS_HIGH = {1 + cfg.eps_high}, where clipping "
         f"begins"),
        (cfg.beta and cfg.kl_estimator == "k1" and not cfg.kl_bias_correction,
         "KL_ESTIMATOR=k1 has no gradient on average with KL_BIAS_CORRECTION=0; set it to 1"),
        (cfg.ref_sync_steps > updates > 0,
         f"REF_SYNC_STEPS={cfg.ref_sync_steps} is more than the run's {updates} updates "
         f"(STEPS * PPO_EPOCHS); lower it"),
        (cfg.is_mode.startswith("sequence") and filtered,
         f"IS_MODE={cfg.is_mode} with TOP_K, TOP_P or MIN_P shrinks a sequence's weight with every "
         f"token; set token_truncate or token_mask"),
        ("://" in cfg.output_dir + cfg.export_hf,
         "OUTPUT_DIR and EXPORT_HF are folders of this machine; CHECKPOINT_DIR may be gs://"),
        (cfg.overlong_cache > cfg.max_length_sample,
         f"OVERLONG_CACHE={cfg.overlong_cache} must be at most "
         f"MAX_LENGTH_SAMPLE={cfg.max_length_sample}"),
    ]  # fmt: skip
    return found + [message for is_wrong, message in wrong if is_wrong]


def notes(cfg: Any) -> list[str]:
    """A line for each setting that does nothing here and is no mistake."""
    idle = [
        f"{field.name.upper()}={to_text(getattr(cfg, field.name))}"
        for field in dataclasses.fields(cfg)
        if field.name in ("eps_low", "eps_high", "delta")
        and getattr(cfg, field.name) != field.default
    ]
    if cfg.loss_type in ("gspo", "cispo", "sapo"):
        idle.append(f"the ratios of LOSS_TYPE={cfg.loss_type}")
    if cfg.ppo_epochs > 1 or not idle or not cfg.steps:
        return []
    return [
        f"PPO_EPOCHS=1 makes every ratio 1, so that {' and '.join(idle)} do nothing; with "
        f"PPO_EPOCHS=2 they count"
    ]
