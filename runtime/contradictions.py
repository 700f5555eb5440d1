"""Settings that cannot work together, and settings that do nothing beside others.

cfg is the Config of config.py.
"""

import dataclasses
import os
from collections.abc import Collection, Iterator
from typing import Any

from runtime.parsing import to_text

MAX_REPLAYED = 128  # MAX_SUPPORT of models/draw.py; this file imports no jax
DEFAULT_REWARDS = ("reward_correct", "reward_format", "tag_count_reward")  # DEFAULTS of rewards.py


def idle_settings(cfg: Any) -> list[tuple[dataclasses.Field, str]]:
    """The settings that are not at their defaults and that the table finds idle, with a line."""
    engine = " ".join(name for name in cfg.__dataclass_fields__ if name.startswith("sglang_jax"))
    loss_type, estimator = f"LOSS_TYPE={cfg.loss_type}", f"ADV_ESTIMATOR={cfg.adv_estimator}"
    functions, folder = f"REWARD_FN={cfg.reward_fn}", f"the folder MODEL_PATH={cfg.model_path}"
    scheduled = cfg.lr_schedule != "constant" or cfg.warmup_ratio > 0
    keyless = not (cfg.wandb_mode or os.environ.get("WANDB_API_KEY"))
    table = [  # settings, what they need to have an effect, and why they have none
        ("model_revision", not os.path.isdir(cfg.model_path), folder),
        ("dataset_config", not os.path.exists(cfg.dataset), f"the local DATASET={cfg.dataset}"),
        ("prompt_too_long", cfg.max_prompt_length > 0, "MAX_PROMPT_LENGTH=0"),
        (engine, cfg.rollout_backend == "sglang_jax", f"ROLLOUT_BACKEND={cfg.rollout_backend}"),
        ("rollout_mesh_shape", cfg.rollout_backend == "naive", "ROLLOUT_BACKEND=sglang_jax"),
        ("drop_ended", cfg.rollout_backend == "naive", "ROLLOUT_BACKEND=sglang_jax"),
        ("sampling_support", cfg.filters(), "TOP_K=0, TOP_P=1.0 and MIN_P=0.0"),
        ("dynamic_sampling_max_rounds", cfg.dynamic_sampling, "DYNAMIC_SAMPLING=0"),
        ("reward_timeout_s", ":" in cfg.reward_fn, functions),
        ("overlong_cache", "soft_overlong_penalty" in cfg.reward_fn, functions),
        ("repetition_ngram", "repetition_penalty" in cfg.reward_fn, functions),
        ("lr_decay_steps", scheduled, "LR_SCHEDULE=constant and WARMUP_RATIO=0"),
        ("scale_rewards", cfg.adv_estimator == "grpo", estimator),
        ("delta eps_low", cfg.loss_type not in ("cispo", "sapo"), loss_type),
        ("eps_high", cfg.loss_type != "sapo", loss_type),
        ("importance_sampling_level", cfg.loss_type != "gspo", loss_type),
        ("kl_estimator kl_bias_correction ref_sync_steps", cfg.beta > 0, "BETA=0"),
        ("ref_sync_alpha", cfg.ref_sync_steps > 0, "REF_SYNC_STEPS=0"),
        ("is_floor is_cap", cfg.is_mode != "none", "IS_MODE=none"),
        ("eval_prompts", cfg.eval_every_steps > 0, "EVAL_EVERY_STEPS=0"),
        ("eval_split eval_samples", cfg.evaluates(), "EVAL_EVERY_STEPS=0"),
        ("eval_temperature", cfg.evaluates(), "EVAL_EVERY_STEPS=0"),
        ("sample_every_steps", cfg.steps > 0, "STEPS=0"),
        ("save_every_steps", cfg.steps > 0, "STEPS=0"),
        ("save_keep", cfg.save_every_steps > 0, "SAVE_EVERY_STEPS=0"),
        ("resume_force", cfg.resume != "never", "RESUME=never"),
        ("export_dtype", cfg.export_hf != "none", "EXPORT_HF=none"),
        ("wandb_project", cfg.wandb_mode != "disabled", "WANDB_MODE=disabled"),
        ("wandb_project", not keyless, "WANDB_MODE empty and no WANDB_API_KEY"),
    ]
    idle = {n: reason for names, needs, reason in table if not needs for n in names.split()}
    return [
        (field, f"{name.upper()}={to_text(getattr(cfg, name))} does nothing with {idle[name]}")
        for name, field in cfg.__dataclass_fields__.items()
        if name in idle and getattr(cfg, name) != field.default
    ]


def contradictions(cfg: Any) -> Iterator[str]:
    """Lines about combinations that stop a run, and about idle settings on which results depend."""
    updates = cfg.steps * cfg.ppo_epochs * cfg.num_mini_batches
    for field, text in idle_settings(cfg):
        if field.metadata["results"] != "none" or field.name.startswith("sglang_jax"):
            yield f"{text}; leave it out"
    if cfg.num_pre_q == 1 and cfg.steps and cfg.adv_estimator != "reinforce":
        yield (
            f"NUM_PRE_Q=1 leaves ADV_ESTIMATOR={cfg.adv_estimator} nothing to compare a completion "
            f"with; set at least 2, or ADV_ESTIMATOR=reinforce"
        )
    if cfg.dynamic_sampling and cfg.adv_estimator == "reinforce":
        yield "DYNAMIC_SAMPLING=1 drops groups that ADV_ESTIMATOR=reinforce can use; leave it out"
    if cfg.loss_type == "cispo" and cfg.eps_high < 1:
        yield f"EPS_HIGH={cfg.eps_high} caps every ratio of LOSS_TYPE=cispo below 1; set EPS_HIGH=5"
    if cfg.delta and cfg.delta <= (limit := 1 + cfg.eps_high):
        yield f"DELTA={cfg.delta} must be above 1 + EPS_HIGH = {limit}, where clipping begins"
    if cfg.beta and cfg.kl_estimator == "k1" and not cfg.kl_bias_correction:
        yield "KL_ESTIMATOR=k1 has no gradient on average with KL_BIAS_CORRECTION=0; set it to 1"
    if cfg.ref_sync_steps > updates > 0:
        made = f"{updates} = STEPS * PPO_EPOCHS * NUM_MINI_BATCHES updates"
        yield f"REF_SYNC_STEPS={cfg.ref_sync_steps} is more than the run's {made}; lower it"
    if cfg.is_mode.startswith("sequence") and cfg.filters_logps():
        yield (
            f"IS_MODE={cfg.is_mode} with TOP_K, TOP_P or MIN_P shrinks a sequence's weight with "
            f"every token; set token_truncate or token_mask, or leave out "
            f"SAMPLING_SUPPORT=full"
        )
    for name, text in (("policy_loss_impl", "pallas"), ("rollout_backend", "sglang_jax")):
        if cfg.replays() and getattr(cfg, name) == text:
            why = f"{name.upper()}={text} cannot replay the tokens that TOP_K, TOP_P, MIN_P leave"
            yield f"{why}; leave {name.upper()} out, or set SAMPLING_SUPPORT=full (a biased loss)"
    if cfg.replays() and cfg.top_k > MAX_REPLAYED:
        why = f"TOP_K={cfg.top_k} is too many tokens to replay"
        yield f"{why}; set at most {MAX_REPLAYED}, or SAMPLING_SUPPORT=full"
    entries = [entry.strip() for entry in cfg.reward_fn.split(",")]
    entries = entries if cfg.reward_fn else DEFAULT_REWARDS
    weights = cfg.reward_weights or (1.0,) * len(entries)
    if len(weights) != len(entries):
        names = ", ".join(entry.rpartition(":")[2] for entry in entries)
        why = f"REWARD_WEIGHTS={to_text(weights)} has {len(weights)} numbers"
        yield f"{why}; give {len(entries)}, one each for {names}"
    counted = {entry for entry, weight in zip(entries, weights, strict=False) if weight}
    if cfg.adv_estimator == "maxrl" and counted & {"soft_overlong_penalty", "repetition_penalty"}:
        yield "ADV_ESTIMATOR=maxrl needs rewards of at least 0; leave the penalties out"
    if cfg.off_policy_mask_threshold and cfg.filters_logps():
        wrong = "OFF_POLICY_MASK_THRESHOLD would measure TOP_K, TOP_P or MIN_P"
        yield f"{wrong}; leave it out, or leave out SAMPLING_SUPPORT=full"
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
    for field, text in idle_settings(cfg):
        if field.metadata["results"] == "none" and field.name not in tiny:
            yield text
    if cfg.filters_logps() and cfg.is_mode == "none" and cfg.steps:
        why = "TOP_K, TOP_P, MIN_P change sampling only, and the loss has a bias"
        yield f"{why}; leave out SAMPLING_SUPPORT=full, or set IS_MODE=token_truncate"
    ends = cfg.lr_schedule in ("warmup_cosine", "linear")  # at a learning rate of 0
    if 0 < cfg.lr_decay_steps < cfg.steps and ends:
        decay = f"LR_DECAY_STEPS={cfg.lr_decay_steps} is less than STEPS={cfg.steps}"
        yield f"{decay}: later steps have learning rate 0"
    names = [
        n for n in ("eps_low", "eps_high", "delta") if getattr(cfg, n) != getattr(type(cfg), n)
    ]
    idle = [f"{name.upper()}={getattr(cfg, name)}" for name in names]
    if cfg.loss_type in ("gspo", "cispo", "sapo"):
        idle.append(f"the ratios of LOSS_TYPE={cfg.loss_type}")
    if idle and cfg.ppo_epochs * cfg.num_mini_batches == 1 and cfg.steps:
        why = f"with one update per step every ratio is 1, and {' and '.join(idle)} do nothing"
        yield f"{why}; with NUM_MINI_BATCHES=2 or PPO_EPOCHS=2 they count"
