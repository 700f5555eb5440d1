"""Every setting of a run: read, checked and printed. Imports neither jax nor flax.

A setting is an environment variable, such as `NUM_PRE_Q=4`, or a line of YAML, such as
`rollout.num_pre_q: 4`, in the file that `--config FILE.yaml` names. The environment wins over the
file `.env` beside config.py, `.env` over the YAML file, and the YAML file over the defaults. If no
layer sets MODEL_PATH, the settings of recipes/tiny.yaml replace the defaults. If a layer sets one
setting of a batch size, lower layers lose all settings of the same size. `python config.py` prints
every setting with its value, meaning and default, as YAML that `--config` reads.

Two ways to save work have no setting. With MAX_LENGTH_SAMPLE of 128 or more, decoding drops
sequences that have ended (Config.drops_ended). Updates skip sequences whose advantage is 0, unless
another term of the loss needs them (Config.skips_zero_advantages).
"""

import argparse
import dataclasses
import functools
import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra import sizes
from infra.mistakes import UserMistake, describe_ignored_names, exit_with_mistakes, reading
from infra.packages import describe_newer_packages
from infra.settings import (
    MESH,
    REPO,
    expand_path,
    overlay_layers,
    parse_command_line,
    read_dotenv,
    read_env,
    read_yaml,
    setting_field,
    to_text,
    yaml_name,
)
from infra.sizes import MICRO_SIZES, PASS_SIZES, STEP_SIZES
from objectives import ESTIMATORS, OBJECTIVES

STARTED = time.monotonic()  # of the program, which imports this file first; MAX_HOURS count from it
DTYPES = "auto|bfloat16|float32"
LOSS_TYPES, ADV_ESTIMATORS = "|".join(OBJECTIVES), "|".join(ESTIMATORS)
IS_MODES = "none|token_truncate|token_mask|sequence_truncate|sequence_mask"
TINY_LAYER = "recipes/tiny.yaml"
TINY = REPO / TINY_LAYER
MAX_TOP_K = 128  # equals MAX_SUPPORT of model/next_token.py, which imports jax
TRACKERS = "((wandb|trackio|tensorboard)(,(?!$)|$))*"  # names, separated by commas
LOW_FOR_LORA = 1e-5  # lower learning rates get a note in a run with LoRA
DEFAULT_TURNS = 8  # MAX_TURNS with an environment, if it is not set
LONG_COMPLETIONS = 128  # the MAX_LENGTH_SAMPLE from which Config.drops_ended holds
ANY_SIZES = PASS_SIZES + STEP_SIZES
MICRO_SETTINGS = (*MICRO_SIZES, "grad_accum_steps")
# Pairs (names, hidden): if a layer sets one of the names, lower layers lose all settings in hidden.
SYNONYMS = [(names, names) for names in (PASS_SIZES, STEP_SIZES, MICRO_SETTINGS)]
TINY_SYNONYMS = [  # any size that the user sets hides those of recipes/tiny.yaml
    (ANY_SIZES, ANY_SIZES + MICRO_SIZES),
    (("num_pre_q", "num_mini_batches", *MICRO_SETTINGS), MICRO_SIZES),
]

ANSWER_TAGS = r"(?!(\w+),\1$)[A-Za-z]\w*,[A-Za-z]\w*"  # a pattern of ANSWER_TAGS
# The functions of rewards.py that read these tags. (It needs NumPy, and this file no package.)
TAG_READERS = ("reward_correct", "exact_match", "reward_format", "tag_count_reward")

# `setting_field` for each group in YAML. A resumed run may change the settings that are not
# fixed_on_resume, as long as its files, prompts and sizes stay the same; free_in_GROUP makes such a
# setting in a group whose other settings are fixed.
in_model = functools.partial(setting_field, "model", fixed_on_resume=False)
in_lora = functools.partial(setting_field, "model")
in_data = functools.partial(setting_field, "data", fixed_on_resume=False)
in_rollout = functools.partial(setting_field, "rollout")
free_in_rollout = functools.partial(setting_field, "rollout", fixed_on_resume=False)
in_reward = functools.partial(setting_field, "reward")
free_in_reward = functools.partial(setting_field, "reward", fixed_on_resume=False)
in_train = functools.partial(setting_field, "train")
free_in_train = functools.partial(setting_field, "train", fixed_on_resume=False)
in_loss = functools.partial(setting_field, "loss")
free_in_loss = functools.partial(setting_field, "loss", fixed_on_resume=False)
in_eval = functools.partial(setting_field, "eval", fixed_on_resume=False)
in_run = functools.partial(setting_field, "run", fixed_on_resume=False)
# Processes may have different values of these.
in_run_per_process = functools.partial(in_run, per_process=True)


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings, under their environment names in lower case."""

    model_path: str = in_model("", "Hugging Face id or folder; empty: a tiny model.", yaml="path")
    model_revision: str = in_model("", "Branch, tag or commit on the hub; empty: the main branch.")
    dtype: str = in_model(
        "auto", "Compute dtype; auto: bfloat16, or float32 on CPUs and older GPUs.", choices=DTYPES
    )
    chat_template: str = in_model("", "Jinja file of a chat template; empty: the tokenizer's.")
    lora_rank: int = in_lora(
        0, "Rank of new LoRA adapters; 0: train those of MODEL_PATH, or if it has none all weights."
    )
    lora_alpha: float = in_lora(32.0, "Adapters add LORA_ALPHA / LORA_RANK * x A B.", above=0)
    lora_targets: str = in_lora(
        "", "Matrices with adapters, such as q_proj,v_proj; empty: all, without experts."
    )
    lora_base_dtype: str = in_model(
        "auto", "Dtype of LoRA's base; auto: DTYPE; int8: 8-bit matrices.", choices="auto|int8"
    )

    dataset: str = in_data("openai/gsm8k", "Hugging Face id, file, or folder of SPLIT.jsonl files.")
    dataset_config: str = in_data("", "Hub configuration; empty: main for GSM8K, else the default.")
    train_split: str = in_data("train", "Split to train on.")
    eval_split: str = in_data("test", "Split to evaluate on.")
    question_column: str = in_data("question", "Column of questions, as texts or message lists.")
    answer_column: str = in_data("answer", "Column of the dataset that holds the answer.")
    completion_column: str = in_data(
        "", "Column of completions for train_sft.py; empty: those in QUESTION_COLUMN's messages."
    )
    system_prompt: str = in_data("", "System prompt, or its file; empty: that of rewards.py.")
    chat_template_kwargs: str = in_data(
        "", 'Arguments of the chat template as JSON, such as {"enable_thinking": false}.'
    )
    max_prompt_length: int = in_data(0, "Skip prompts with more tokens than this; 0: no limit.")
    seed: int = in_data(
        0, "Seed of all random choices of a run.", at_most=2**31 - 1, fixed_on_resume=True
    )

    rollout_backend: str = in_rollout(
        "naive", "Program that samples completions.", choices="naive|sglang_jax", yaml="backend"
    )
    batch_size: int = free_in_rollout(
        0, "Prompts per pass on each process; 0: not set.", yaml="prompt_batch_size"
    )
    rollout_per_device_batch_size: int = free_in_rollout(
        0, "Prompts per pass on each device; 0: not set.", yaml="per_device_batch_size"
    )
    rollout_global_batch_size: int = free_in_rollout(
        0, "Prompts per step over all processes; 0: not set.", yaml="global_prompt_batch_size"
    )
    rollout_batch_size: int = free_in_rollout(
        0, "Sequences per step over all processes; 0: not set.", yaml="batch_size"
    )
    num_pre_q: int = in_rollout(8, "K: number of completions per prompt.", at_least=1)
    global_length: int = free_in_rollout(0, "Pad prompts to at least this number of tokens.")
    max_length_sample: int = in_rollout(1024, "Maximum tokens of a completion.", at_least=1)
    environment_class: str = in_rollout(
        "", "Environment that answers the policy in turns, such as my.py:Game; empty: none."
    )
    max_turns: int = in_rollout(
        0, "Maximum turns of the policy in a completion; 0: 8 with ENVIRONMENT_CLASS, else 1."
    )
    temperature: float = in_rollout(1.0, "Temperature in sampling and in the loss.", above=0)
    top_k: int = in_rollout(
        0, "Sample among the TOP_K likeliest tokens, at most 128; 0: among all.", at_most=MAX_TOP_K
    )
    top_p: float = in_rollout(
        1.0, "Sample in the nucleus of this probability, at most 128 tokens.", above=0, at_most=1
    )
    min_p: float = in_rollout(
        0.0, "Drop tokens below MIN_P * the highest probability; at most 128 are left.", below=1
    )
    sampling_support: str = in_rollout(
        "auto", "Softmax of the loss; auto: over tokens that can be sampled.", choices="auto|full"
    )
    rollout_mesh_shape: str = free_in_rollout(
        "auto", "Rollout mesh: auto, or dp,fsdp,tp; -1: the rest.", form=MESH, yaml="mesh_shape"
    )
    lora_base_copy: str = free_in_rollout(
        "auto", "Sample with a fast copy of LoRA's base; auto: GPUs with room.", choices="auto|0|1"
    )
    sglang_jax_mem_fraction_static: float = free_in_rollout(
        0.25, "Fraction of each device's free memory for the engine.", above=0, below=1
    )
    sglang_jax_max_total_tokens: int = free_in_rollout(
        0, "Tokens in the engine's cache; 0: those of a pass."
    )
    sglang_jax_context_length: int = free_in_rollout(
        0, "Longest sequence of the engine in tokens; 0: the longest of the run."
    )
    sglang_jax_dtype: str = in_rollout("bfloat16", "Dtype of the engine.", choices=DTYPES)
    dynamic_sampling: bool = in_rollout(False, "Sample until P groups have unequal rewards.")
    dynamic_sampling_max_rounds: int = in_rollout(4, "Maximum sampling rounds a step.", at_least=1)

    answer_tags: str = free_in_reward(
        "think,answer",
        "Two different names of tags, around reasoning and answer.",
        form=ANSWER_TAGS,
    )
    reward_weights: tuple[float, ...] = in_reward((), "Reward weights; empty: see rewards.py.")
    reward_fn: str = in_reward("", "Reward functions, such as my.py:name; empty: the default ones.")
    reward_timeout_s: float = free_in_reward(
        10.0, "Seconds that a call of a reward or an environment may take.", above=0, at_most=10**6
    )
    reward_model_path: str = free_in_reward("", "Folder or hub id of reward_model; empty: none.")
    judge_prompt: str = free_in_reward("", "Prompt file of a judge; see docs/scorer.md.")
    judge_words: str = free_in_reward(
        "Yes,No", "Words of a judge for right and wrong, each of one token.", form="[^,]+,[^,]+"
    )
    judge_template_kwargs: str = free_in_reward(
        "", "Arguments of a judge's chat template, as JSON."
    )
    overlong_cache: int = in_reward(
        0, "Last tokens that soft_overlong_penalty punishes; 0: MAX_LENGTH_SAMPLE / 5."
    )

    steps: int = free_in_train(100, "Number of training steps; 0: only evaluate.")
    train_micro_batch_size: int = free_in_train(
        0,
        "Full sequences per micro-step of a process, or up to 8x short ones; 0: up to 4 a device.",
        yaml="micro_batch_size",
    )
    train_per_device_micro_batch_size: int = free_in_train(
        0,
        "Full sequences per micro-step of a device, or up to 8x short ones; 0: not set.",
        yaml="per_device_micro_batch_size",
    )
    grad_accum_steps: int = free_in_train(0, "Maximum micro-steps of an update; 0: not set.")
    ppo_epochs: int = in_train(1, "How many times a step trains on each of its groups.", at_least=1)
    num_mini_batches: int = in_train(1, "Mini-batches of a step, with one update each.", at_least=1)
    optimizer: str = in_train("adamw", "Optimizer of the weights.", choices="adamw|lion|sgd")
    learning_rate: float = in_train(1e-6, "Peak learning rate.")
    lr_schedule: str = in_train(
        "warmup_cosine", "Learning rate after the warmup.", choices="warmup_cosine|linear|constant"
    )
    warmup_ratio: float = in_train(0.05, "Fraction of the schedule that is warmup.", at_most=1)
    lr_decay_steps: int = free_in_train(0, "Steps until the schedule ends; 0: STEPS.")
    weight_decay: float = in_train(0.0, "Weight decay, decoupled from the gradient as in AdamW.")
    clip_norm: float = in_train(1.0, "Maximum global norm of the gradient; 0: no clipping.")
    mesh_shape: str = free_in_train(
        "auto", "Training mesh: auto, or dp,fsdp,tp; -1: the rest.", form=MESH
    )
    remat: str = free_in_train(
        "full", "What backward recomputes; dots: all but the matmuls.", choices="none|dots|full"
    )
    policy_loss_impl: str = free_in_train(
        "jax", "Code of the loss's log-probabilities; pallas: a TPU kernel.", choices="jax|pallas"
    )
    attention_impl: str = free_in_train(
        "auto", "Code of attention in training; splash: a TPU kernel.", choices="auto|xla|splash"
    )

    loss_type: str = in_loss(
        "dapo", "Objective; see objectives.py; sft: only for train_sft.py.", choices=LOSS_TYPES
    )
    adv_estimator: str = in_loss(
        "grpo", "Advantages; see group_advantages in loss.py.", choices=ADV_ESTIMATORS
    )
    scale_rewards: str = in_loss(
        "group", "Standard deviation that divides grpo's advantages.", choices="group|batch|none"
    )
    eps_low: float = in_loss(
        0.2, "The ratio is clipped below 1 - EPS_LOW; gmpo, dppo: see loss.py.", at_most=1
    )
    eps_high: float = in_loss(
        0.2, "The ratio is clipped above 1 + EPS_HIGH; cispo, gmpo, dppo: see loss.py."
    )
    delta: float = in_loss(0.0, "Upper limit of the ratio (two-sided clipping); 0: no limit.")
    beta: float = in_loss(0.0, "Weight of the KL to the initial model; 0: no reference.")
    kl_estimator: str = in_loss("k3", "Estimator of the KL.", choices="k1|k2|k3")
    kl_bias_correction: bool = in_loss(True, "Multiply the KL by the ratio, which unbiases it.")
    entropy_coef: float = in_loss(0.0, "Weight of the entropy bonus.")
    teacher_path: str = free_in_loss(
        "", "Folder or hub id of a teacher that judges each token; empty: none."
    )
    distill_coef: float = free_in_loss(1.0, "Weight of log p_teacher - log p in advantages.")
    reward_coef: float = free_in_loss(1.0, "With a teacher, weight of the rewards in advantages.")
    top_entropy_quantile: float = in_loss(
        1.0, "Train on this fraction of the tokens: the highest entropies.", above=0, at_most=1
    )
    mask_truncated_completions: bool = in_loss(False, "Drop truncated completions from the loss.")
    is_mode: str = in_loss("none", "Importance weights p_trainer / p_sampler.", choices=IS_MODES)
    is_floor: float = in_loss(
        0.0, "Importance weights below IS_FLOOR become IS_FLOOR (truncate) or 0 (mask).", at_most=1
    )
    is_cap: float = in_loss(
        3.0, "Importance weights above IS_CAP become IS_CAP (truncate) or 0 (mask).", at_least=1
    )
    off_policy_mask_threshold: float = free_in_loss(
        0.0, "Drop bad completions whose mean log(p_sampler / p) is above this; 0: none."
    )

    eval_every_steps: int = in_eval(10, "Steps between evaluations, from step 0 on; 0: never.")
    eval_prompts: int = in_eval(128, "Questions per evaluation; 0: all.")
    eval_full_sweep: bool = in_eval(False, "Evaluate on the complete eval split at the end.")
    eval_samples: int = in_eval(1, "Completions per question of an evaluation.", at_least=1)
    eval_temperature: float = in_eval(
        0.0, "Temperature of evaluations; 0: TEMPERATURE if EVAL_SAMPLES > 1, else greedy."
    )

    output_dir: str = in_run("", "Folder of all outputs; empty: a new runs/NAME_UTC.")
    checkpoint_dir: str = in_run("", "Folder or gs://bucket/folder; empty: OUTPUT_DIR/checkpoints.")
    save_every_steps: int = in_run(50, "Steps between checkpoints; 0: none, not even at the end.")
    save_keep: int = in_run(2, "Number of newest checkpoints to keep besides the best; 0: all.")
    max_hours: float = in_run(0.0, "Hours until a start saves, exports and ends; 0: no limit.")
    resume: str = in_run(
        "auto", "A run or checkpoint to fork; auto: OUTPUT_DIR's own run; never: a new run."
    )
    preemption_grace_s: int = in_run(30, "Maximum seconds from SIGTERM to the end.", at_least=2)
    export_hf: str = in_run("", "Folder of the export; empty: OUTPUT_DIR/hf; none: no export.")
    export_lora: str = in_run("adapters", "What a LoRA run exports.", choices="adapters|merged")
    push_to_hub: str = in_run(
        "", "Hub repository owner/name of the export; empty: none.", form=r"|[\w.-]+/[\w.-]+"
    )
    push_to_hub_private: bool = in_run(True, "Make the repository of PUSH_TO_HUB private.")
    sample_every_steps: int = in_run(10, "Steps between samples of completions; 0: never.")
    print_train_time_breakdown: bool = in_run_per_process(
        False, "Add the seconds of each phase, and lengths, to the line of a step."
    )
    report_to: str = in_run_per_process(
        "", "Trackers: any of wandb,trackio,tensorboard; empty: as WANDB_MODE says.", form=TRACKERS
    )
    wandb_mode: str = in_run_per_process(
        "", "Mode of W&B; empty: online with WANDB_API_KEY.", choices="disabled|online|offline"
    )
    wandb_project: str = in_run_per_process("", "Project in W&B and trackio; empty: grpo.")
    wandb_name: str = in_run_per_process(
        "", "Name in trackers and of a new folder in runs/; empty: the folder's, or the model's."
    )
    jax_compilation_cache_dir: str = in_run_per_process(
        "", "Folder of compiled programs; empty: .jax_cache."
    )
    require_multihost: bool = in_run(False, "Refuse to run as a single process.")
    require_jax_process_count: int = in_run(0, "Number of processes that must join; 0: any.")
    init_timeout_s: int = in_run_per_process(
        90, "Seconds in which all processes must join.", at_least=1, at_most=10**6
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str], config_file: str | Path = "") -> "Config":
        """The settings of all layers. Raises UserMistake with a line for every mistake."""
        return read_layers(env, config_file)[0]

    def evaluates(self) -> bool:
        return self.eval_every_steps > 0 or self.eval_full_sweep

    def max_turns_or_default(self) -> int:
        return self.max_turns or (DEFAULT_TURNS if self.environment_class else 1)

    def max_rounds(self) -> int:
        """The most rounds of sampling in a step."""
        return self.dynamic_sampling_max_rounds if self.dynamic_sampling else 1

    def tag_names(self) -> tuple[str, ...]:
        """The two names in ANSWER_TAGS."""
        return tuple(self.answer_tags.split(","))

    def has_reward_model(self) -> bool:
        return "reward_model" in re.split(r"\s*,\s*", self.reward_fn.strip())

    def template_kwargs(self, name: str = "chat_template_kwargs") -> dict[str, Any]:
        """This setting as arguments. Raises ValueError if it is no JSON object."""
        kwargs = json.loads(getattr(self, name) or "{}")
        if not isinstance(kwargs, dict):
            raise ValueError("it is not an object")
        return kwargs

    def drops_ended(self) -> bool:
        """Whether decoding drops sequences that have ended from the batch. With short completions
        the programs of smaller batches take longer to compile than they save."""
        return self.max_length_sample >= LONG_COMPLETIONS and self.rollout_backend == "naive"

    def ignores_rewards(self) -> bool:
        """Whether the policy learns only from the teacher."""
        return bool(self.teacher_path) and self.reward_coef == 0

    def skips_zero_advantages(self) -> bool:
        """Whether updates do not compute sequences whose advantage is 0, because no other term of
        the loss needs them."""
        needs_all = self.beta or self.entropy_coef or self.teacher_path
        return not needs_all and self.top_entropy_quantile == 1

    def has_sampling_filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def loss_uses_support(self) -> bool:
        """Whether the loss's softmax is over the tokens that the sampler could draw."""
        return self.has_sampling_filters() and self.sampling_support != "full"

    def filters_logps(self) -> bool:
        """Whether sampling_logps are those of the filtered distribution, and the loss's logps are
        not. An engine reports logps without the filters."""
        are_filtered = self.has_sampling_filters() and self.rollout_backend == "naive"
        return are_filtered and not self.loss_uses_support()


def read_layers(
    env: Mapping[str, str], config_file: str | Path = "", customize: Callable | None = None
) -> tuple[Config, dict[str, str], list[str]]:
    """The settings of all layers; {attribute: layer}, the layer that has set each of them; and the
    lines of `customize`, which changes both for train_sft.py.

    Raises UserMistake with a line for every mistake.
    """
    mistakes: list[str] = []
    settings = read_env(env, Config, mistakes)
    layers = dict.fromkeys(settings, "environment")
    if config_file:
        lower = read_yaml(config_file, Config, mistakes)
        layers = dict.fromkeys(lower, str(config_file)) | layers
        settings = overlay_layers(settings, lower, SYNONYMS)
    if not settings.get("model_path"):
        for empty in (settings, layers):
            empty.pop("model_path", None)
        lower = read_yaml(TINY, Config, mistakes)
        layers = dict.fromkeys(lower, TINY_LAYER) | layers
        settings = overlay_layers(settings, lower, TINY_SYNONYMS)
    lines = customize(settings, layers) if customize else []
    cfg = Config(**settings)
    mistaken = "\n".join(mistakes).upper()
    for line in contradictions(cfg):
        # A setting with a mistake of its own has its default in cfg, which may contradict others.
        if not any(name in mistaken for name in re.findall("[A-Z_]{4,}", line)):
            mistakes.append(line)
    if mistakes:
        raise UserMistake("\n".join(mistakes))
    return cfg, layers, lines


def objective_contradictions(cfg: Config) -> Iterator[str]:
    """A line for each combination of settings of the objective that contradict each other."""
    facts, loss_type = OBJECTIVES[cfg.loss_type], f"LOSS_TYPE={cfg.loss_type}"
    estimator = ESTIMATORS[cfg.adv_estimator]
    compares = estimator.baseline == "group" and cfg.loss_type != "sft"
    if cfg.num_pre_q == 1 and cfg.steps and compares and not cfg.ignores_rewards():
        reason = f"NUM_PRE_Q=1 makes every advantage of ADV_ESTIMATOR={cfg.adv_estimator} 0"
        yield f"{reason}; set at least 2, or ADV_ESTIMATOR=reinforce"
    if cfg.dynamic_sampling and estimator.baseline != "group":
        name = f"ADV_ESTIMATOR={cfg.adv_estimator}"
        yield f"DYNAMIC_SAMPLING=1 drops groups that {name} can use; leave it out"
    if cfg.dynamic_sampling and cfg.ignores_rewards():
        yield "DYNAMIC_SAMPLING=1 drops groups that REWARD_COEF=0 can use; leave it out"
    if cfg.ignores_rewards() and cfg.distill_coef == 0:
        yield "DISTILL_COEF=0 and REWARD_COEF=0 leave no training signal; set one of them"
    if cfg.teacher_path and cfg.off_policy_mask_threshold:
        reason = "needs one advantage for a completion, and TEACHER_PATH gives one to each token"
        yield f"OFF_POLICY_MASK_THRESHOLD={cfg.off_policy_mask_threshold} {reason}; leave one out"
    if facts.bounded == "cap" and cfg.eps_high < 1:
        yield f"EPS_HIGH={cfg.eps_high} caps every ratio of {loss_type} below 1; set EPS_HIGH=5"
    clips_ratios = facts.bounded == "ratio" and "delta" in facts.reads
    if clips_ratios and cfg.delta and cfg.delta <= (limit := 1 + cfg.eps_high):
        yield f"DELTA={cfg.delta} must be above 1 + EPS_HIGH = {limit}, where clipping begins"
    if cfg.beta and cfg.kl_estimator == "k1" and not cfg.kl_bias_correction:
        yield "KL_ESTIMATOR=k1 has no gradient on average with KL_BIAS_CORRECTION=0; set it to 1"
    if cfg.is_mode.startswith("sequence") and cfg.filters_logps():
        reason = "with SAMPLING_SUPPORT=full shrinks a sequence's weight with every token"
        yield f"IS_MODE={cfg.is_mode} {reason}; leave SAMPLING_SUPPORT out, or set token_truncate"
    if cfg.is_mode != "none" and facts.anchor == "sampler":
        reason = f"corrects for the sampler, as {loss_type} already does"
        yield f"IS_MODE={cfg.is_mode} {reason}; leave IS_MODE out"
    if cfg.is_mode.startswith("sequence") and facts.weights_ratios:
        reason = f"weights sequences, and {loss_type} multiplies the weights of tokens"
        yield f"IS_MODE={cfg.is_mode} {reason}; set token_truncate or token_mask"
    anchors = [loss_type] if facts.anchor == "sampler" else []
    if cfg.off_policy_mask_threshold:
        anchors.append(f"OFF_POLICY_MASK_THRESHOLD={cfg.off_policy_mask_threshold}")
    for text in anchors if cfg.filters_logps() else ():
        reason = "would count TOP_K, TOP_P, MIN_P as a policy change with SAMPLING_SUPPORT=full"
        yield f"{text} {reason}; leave SAMPLING_SUPPORT out"
    for name, text in (("policy_loss_impl", "pallas"), ("rollout_backend", "sglang_jax")):
        if cfg.loss_uses_support() and getattr(cfg, name) == text:
            setting, support = name.upper(), "the tokens that TOP_K, TOP_P, MIN_P leave"
            advice = f"leave {setting} out, or set SAMPLING_SUPPORT=full (a biased loss)"
            yield f"{setting}={text} cannot restrict the softmax to {support}; {advice}"


def contradictions(cfg: Config) -> Iterator[str]:
    """A line for each combination of settings that contradict each other."""
    yield from objective_contradictions(cfg)
    if cfg.lora_base_dtype == "int8" and cfg.rollout_backend == "sglang_jax":
        reason = "has no float weights to merge for ROLLOUT_BACKEND=sglang_jax"
        yield f"LORA_BASE_DTYPE=int8 {reason}; leave out one of them"
    if cfg.max_turns > 1 and not cfg.environment_class:
        yield f"MAX_TURNS={cfg.max_turns} needs an ENVIRONMENT_CLASS, which answers the policy"
    if cfg.environment_class and cfg.rollout_backend != "naive":
        reason = f"ROLLOUT_BACKEND={cfg.rollout_backend} samples completions of a single turn"
        yield f"{reason}; leave it or ENVIRONMENT_CLASS out"
    if cfg.dataset.startswith("reasoning_gym:"):
        text = cfg.dataset.removeprefix("reasoning_gym:").rstrip("?&")
        task, *arguments = re.split(r"[?&]+", text)
        command = shlex.join(["python", "recipes/gym.py", task, f"runs/{task}", *arguments])
        yield f"DATASET={cfg.dataset}: write these questions to a folder; run {command}"
    if cfg.max_hours and cfg.steps and not cfg.save_every_steps:
        reason = "ends a start, and SAVE_EVERY_STEPS=0 saves nothing for the next one"
        yield f"MAX_HOURS={cfg.max_hours:g} {reason}; set SAVE_EVERY_STEPS"
    for name in ("chat_template_kwargs", "judge_template_kwargs"):
        try:
            cfg.template_kwargs(name)
        except ValueError as error:
            reason = f'is no JSON object such as {{"enable_thinking": false}}: {error}'
            yield f"{name.upper()}={getattr(cfg, name)} {reason}"
    functions = f"REWARD_FN={cfg.reward_fn}"
    if cfg.has_reward_model() and not cfg.reward_model_path:
        yield f"{functions}: reward_model needs REWARD_MODEL_PATH, the folder or hub id of a model"
    if cfg.has_reward_model() and cfg.environment_class:
        yield f"{functions}: reward_model scores a single turn; leave it or ENVIRONMENT_CLASS out"
    if re.match(r"\s*reward_model\s*(,|$)", cfg.reward_fn) and cfg.evaluates():
        reason = "evaluations count the rewards of 1 of the first function; put one that gives them"
        yield f"{functions}: {reason} before reward_model"
    if "://" in cfg.output_dir + cfg.export_hf:
        yield "OUTPUT_DIR and EXPORT_HF are folders of this machine; CHECKPOINT_DIR may be gs://"
    if cfg.push_to_hub and (cfg.export_hf == "none" or not cfg.steps):
        yield f"PUSH_TO_HUB={cfg.push_to_hub} has nothing to upload with EXPORT_HF=none or STEPS=0"
    if cfg.push_to_hub and cfg.push_to_hub == cfg.model_path:
        yield f"PUSH_TO_HUB={cfg.push_to_hub} is MODEL_PATH; the model would be overwritten"
    if "wandb" in cfg.report_to and cfg.wandb_mode == "disabled":
        yield f"REPORT_TO={cfg.report_to} needs W&B, and WANDB_MODE=disabled; leave out one of them"
    if cfg.overlong_cache > (T := cfg.max_length_sample):
        yield f"OVERLONG_CACHE={cfg.overlong_cache} must be at most MAX_LENGTH_SAMPLE={T}"


def notes(cfg: Config, layers: Mapping[str, str]) -> Iterator[str]:
    """A line for each setting that may not do what the user expects, but is no mistake.

    layers: see read_layers.
    """
    if layers.get("model_path") == TINY_LAYER and layers["dataset"] != TINY_LAYER:
        yield f"MODEL_PATH is not set, so DATASET={cfg.dataset} trains this project's tiny model"
    if cfg.steps and not any(getattr(cfg, name) for name in ANY_SIZES):
        prompts = f"a step has {sizes.DEFAULT_PROMPTS_PER_DEVICE} prompts for each device"
        yield f"{prompts}; ROLLOUT_GLOBAL_BATCH_SIZE sets their number"
    if cfg.checkpoint_dir and cfg.steps and not cfg.save_every_steps:
        yield f"CHECKPOINT_DIR={cfg.checkpoint_dir} gets no checkpoint with SAVE_EVERY_STEPS=0"
    if cfg.filters_logps() and cfg.is_mode == "none":
        reason = "TOP_K, TOP_P, MIN_P change sampling only, and the loss has a bias"
        yield f"{reason}; leave out SAMPLING_SUPPORT=full, or set IS_MODE=token_truncate"
    if cfg.lora_rank and cfg.learning_rate < LOW_FOR_LORA:
        rate = f"LEARNING_RATE={cfg.learning_rate} is low for adapters (LORA_RANK)"
        yield f"{rate}, which usually need ten times the rate of full fine-tuning"
    has_adapters = cfg.lora_rank or os.path.isfile(f"{cfg.model_path}/adapter_config.json")
    no_adapters = "LORA_RANK=0, unless MODEL_PATH is a repository of adapters"
    off_policy = cfg.ppo_epochs * cfg.num_mini_batches > 1
    differs_from_sampler = off_policy or cfg.rollout_backend != "naive"
    facts, loss_type = OBJECTIVES[cfg.loss_type], f"LOSS_TYPE={cfg.loss_type}"
    estimator = ESTIMATORS[cfg.adv_estimator]
    clips = (
        differs_from_sampler if facts.anchor == "sampler" else off_policy or facts.bounded == "cap"
    )
    if clips and facts.published and not {"eps_low", "eps_high"} <= layers.keys():
        published = "EPS_LOW={} EPS_HIGH={}".format(*facts.published)
        yield f"{loss_type} was published with {published}; the defaults are 0.2"
    if facts.bounded == "distance" and not clips:
        yield f"{loss_type} drops no token with one update per step, and is then dapo"
    reads_tags = not (cfg.system_prompt and cfg.reward_fn) or any(
        name in cfg.reward_fn for name in TAG_READERS
    )
    judge_settings = "judge_prompt judge_words judge_template_kwargs"
    engine_settings = " ".join(name for name in vars(cfg) if name.startswith("sglang_jax_"))
    for names, has_effect, reason in (
        ("lora_alpha lora_targets lora_base_copy export_lora", has_adapters, no_adapters),
        ("sampling_support", cfg.has_sampling_filters(), "TOP_K=0, TOP_P=1.0 and MIN_P=0.0"),
        ("scale_rewards", estimator.reads_scale_rewards, f"ADV_ESTIMATOR={cfg.adv_estimator}"),
        ("adv_estimator scale_rewards", not cfg.ignores_rewards(), "REWARD_COEF=0"),
        *((name, name in facts.reads, loss_type) for name in ("eps_low", "eps_high", "delta")),
        (" ".join(facts.reads), clips, "one update per step"),
        ("off_policy_mask_threshold", differs_from_sampler, "one update per step"),
        ("kl_estimator kl_bias_correction", cfg.beta, "BETA=0"),
        ("distill_coef reward_coef", cfg.teacher_path, "TEACHER_PATH="),
        ("reward_model_path", cfg.has_reward_model(), f"REWARD_FN={cfg.reward_fn}"),
        (judge_settings, cfg.reward_model_path, "REWARD_MODEL_PATH="),
        ("dynamic_sampling_max_rounds", cfg.dynamic_sampling, "DYNAMIC_SAMPLING=0"),
        ("overlong_cache", "soft_overlong_penalty" in cfg.reward_fn, f"REWARD_FN={cfg.reward_fn}"),
        ("answer_tags", reads_tags, f"SYSTEM_PROMPT and REWARD_FN={cfg.reward_fn}"),
        ("wandb_mode", "wandb" in (cfg.report_to or "wandb"), f"REPORT_TO={cfg.report_to}"),
        ("eval_temperature", cfg.evaluates(), "no evaluation"),
        ("reward_fn", cfg.evaluates() or cfg.loss_type != "sft", "no evaluation"),
        ("max_hours", cfg.steps, "STEPS=0"),
        (
            engine_settings,
            cfg.rollout_backend == "sglang_jax",
            f"ROLLOUT_BACKEND={cfg.rollout_backend}",
        ),
        ("push_to_hub_private", cfg.push_to_hub, "PUSH_TO_HUB="),
        ("is_floor is_cap", cfg.is_mode != "none", "IS_MODE=none"),
        ("completion_column", cfg.loss_type == "sft", "train_grpo.py"),
    ):
        for name in names.split():
            if not has_effect and getattr(cfg, name) != getattr(Config, name):
                text = to_text(getattr(cfg, name))
                yield f"{name.upper()}={text} does nothing with {reason}"
    if cfg.tag_names()[1] != "answer" and ".py:" in cfg.reward_fn and not cfg.system_prompt:
        reason = "the prompt asks for this tag, and functions of files read their own"
        yield f"ANSWER_TAGS={cfg.answer_tags}: {reason}; check them, or set SYSTEM_PROMPT"
    if cfg.environment_class and "soft_overlong_penalty" in cfg.reward_fn:
        reason = "counts only the policy's tokens, and MAX_LENGTH_SAMPLE the environment's, too"
        yield f"soft_overlong_penalty {reason}: a dialogue that is cut off may get no penalty"
    if 0 < cfg.lr_decay_steps < cfg.steps and cfg.lr_schedule != "constant":
        decay = f"LR_DECAY_STEPS={cfg.lr_decay_steps} is less than STEPS={cfg.steps}"
        yield f"{decay}: later steps have learning rate 0"


def yaml_lines(cfg: Config) -> list[str]:
    """A line of YAML for each setting, with its environment name, help and default."""
    lines = []
    for field in dataclasses.fields(cfg):
        value, help = getattr(cfg, field.name), field.metadata["help"]
        choices = f" ({field.metadata['choices']})" if field.metadata["choices"] else ""
        mark = "default" if value == field.default else f"changed from {to_text(field.default)}"
        mark += ", fixed on resume" if field.metadata["fixed_on_resume"] else ""
        line = f"{yaml_name(field)}: {to_text(value)}"
        lines.append(f"{line:<40}  # {field.name.upper()}: {help}{choices}  [{mark}]")
    return lines


def describe(cfg: Config, processes: int = 1, local_devices: int = 1) -> str:
    """A line of YAML for every setting, then the batch sizes that are derived from them."""
    derived = sizes.derive_sizes(cfg, processes, local_devices)._asdict()
    slice_ = f"# On {processes} x {local_devices} devices (processes x local); not read back:"
    lines = [f"derived.{name}: {value}" for name, value in derived.items()]
    return "\n".join([*yaml_lines(cfg), slice_, *lines])


def changed(cfg: Config, layers: Mapping[str, str]) -> str:
    """A line with every setting that differs from its default, and the layer that has set it."""
    return "changed: " + " ".join(
        f"{field.name.upper()}={to_text(getattr(cfg, field.name))} ({layers[field.name]})"
        for field in dataclasses.fields(cfg)
        if getattr(cfg, field.name) != field.default
    )


def load(
    argv: Sequence[str], env: Mapping[str, str] | None = None, customize: Callable | None = None
) -> tuple[Config, argparse.Namespace, list[str]]:
    """The settings, the flags of the command line, and the lines to print: settings that differ
    from their defaults, and notes. Ends the program after --print-config and after mistakes.

    env: the environment; None: os.environ, to which the settings of `.env` are added.
    """
    args = parse_command_line(argv)
    try:
        if not (sys.stdout and sys.stderr):
            raise UserMistake("stdout or stderr is closed; redirect it to a file or to /dev/null")
        if isinstance(sys.stdout, io.TextIOWrapper):  # it may lack a model's characters
            sys.stdout.reconfigure(errors="backslashreplace")
        dotenv = {}
        if env is None:
            # `.env` is added to the environment, because W&B and the hub read their keys there.
            env, dotenv = os.environ, read_dotenv(REPO / ".env")
            dotenv = {name: value for name, value in dotenv.items() if name not in env}
            env.update(dotenv)
        # These commands use the settings of the run in OUTPUT_DIR, but not its RESUME.
        run_config = Path(expand_path(env.get("OUTPUT_DIR", "")), "config.yaml")
        answers = args.eval_only or bool(args.ask)
        has_run = (answers or args.probe) and not args.config and env.get("OUTPUT_DIR")
        with reading(f"{run_config} cannot be read"):
            has_run = has_run and run_config.is_file()
        args.config = str(run_config) if has_run else args.config
        cfg, layers, lines = read_layers(env, args.config, customize)
        if has_run and "RESUME" not in env:
            cfg = dataclasses.replace(cfg, resume="auto")
        if args.print_config:
            try:
                print(describe(cfg, args.processes, args.local_devices), flush=True)
            except BrokenPipeError:  # the reader of the pipe, such as `head`, has ended
                os._exit(0)  # A normal exit would flush again and print a traceback.
            raise SystemExit(0)
        if (x64 := env.get("JAX_ENABLE_X64", "0")).lower() not in "0 false f no n off".split():
            raise UserMistake(f"JAX_ENABLE_X64={x64}: a run has no numbers of 64 bits; unset it")
        newer = describe_newer_packages() if env is os.environ else []
    except UserMistake as error:
        exit_with_mistakes(error)
    layers |= {name.lower(): ".env" for name in dotenv}
    hours = env.get("MAX_HOURS", "")
    asks = hours and (answers or args.probe)
    unread = [f"MAX_HOURS={hours} does nothing with --ask, --probe and --eval-only"] if asks else []
    run_notes = unread if answers else (*unread, *notes(cfg, layers), *lines)
    ignored = describe_ignored_names(env, [field.name.upper() for field in dataclasses.fields(cfg)])
    note_lines = [f"note: {line}" for line in (*run_notes, *ignored, *newer)]
    return cfg, args, [changed(cfg, layers), *note_lines]


if __name__ == "__main__":
    load(["--print-config", *sys.argv[1:]])
