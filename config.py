"""Every setting of a run: read, checked and printed. Imports neither jax nor flax.

A setting is an environment variable, such as `NUM_PRE_Q=4`, or a line of YAML, such as
`rollout.num_pre_q: 4`, in the file that `--config FILE.yaml` names. The YAML name is group.name in
lower case; where it is another name, the table gives it. The environment wins over the file `.env`
beside config.py, `.env` over the YAML file, and the YAML file over the defaults. If no layer sets
MODEL_PATH, the settings of recipes/tiny.yaml replace the defaults. `python config.py` prints every
setting with its value, meaning and default, as YAML that `--config` reads; with `--processes 2
--local-devices 4` the batch sizes at the end are those of 2 processes with 4 devices each. A run
prints a line `changed:` with each setting that is not at its default and the layer that set it. A
run stops with exit code 2 and a line for each setting that is misspelt, malformed, in contradiction
with another, or under the name of another program.

In the table, every number is at least 0 if no other limit is given. "Results depend on" is `value`
if a resumed run must keep the value of the setting, `content` if a resumed run must load the same
files and get the same prompts and sizes, which the checkpoint records, and `none` if the setting
may change: speed, memory, outputs or evaluation depend on it, and results at most by rounding. "Per
process" is yes if the processes of a run may have different values.
"""

import argparse
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from runtime import parsing, sizes
from runtime.parsing import REPO, Mistake, knob, to_text
from runtime.sizes import MICRO_SIZES, PASS_SIZES, STEP_SIZES

DTYPES = "auto|bfloat16|float32"
TINY = REPO / "recipes" / "tiny.yaml"
# Pairs (names, hidden): if a layer sets one of the names, lower layers lose all hidden ones.
SYNONYMS = [(names, names) for names in (PASS_SIZES, STEP_SIZES, MICRO_SIZES)]
# Any size that the user sets hides the sizes of recipes/tiny.yaml.
ANY_SIZES = PASS_SIZES + STEP_SIZES
TINY_YIELDS = [(ANY_SIZES, ANY_SIZES + MICRO_SIZES), (("num_pre_q", *MICRO_SIZES), MICRO_SIZES)]

# `knob` for each group; `results` says how the results of a run depend on a setting.
model = functools.partial(knob, "model", results="content")
data = functools.partial(knob, "data", results="content")
rollout = functools.partial(knob, "rollout")
rollout_size = functools.partial(rollout, results="content")
reward = functools.partial(knob, "reward")
train = functools.partial(knob, "train")
speed = functools.partial(train, results="none")  # speed and memory of training
loss = functools.partial(knob, "loss")
evaluation = functools.partial(knob, "eval", results="none")
run = functools.partial(knob, "run", results="none")
local = functools.partial(run, per_process=True)  # settings of a single process


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings, under their environment names in lower case."""

    model_path: str = model(
        "", "Hugging Face id or folder of the model; empty: recipes/tiny.yaml.", yaml="path"
    )
    model_revision: str = model("", "Branch, tag or commit on the Hub; empty: the main branch.")
    dtype: str = model(
        "auto", "Compute dtype; auto: float32 on a CPU, else bfloat16.", choices=DTYPES
    )
    chat_template: str = model("", "Jinja chat template; empty: the tokenizer's template.")

    dataset: str = data("openai/gsm8k", "Hugging Face id, file, or folder with SPLIT.jsonl files.")
    dataset_config: str = data("main", "Configuration of a dataset on the Hub.")
    train_split: str = data("train", "Split to train on.")
    eval_split: str = data("test", "Split to evaluate on.", results="none")
    question_column: str = data("question", "Column of the dataset that holds the question.")
    answer_column: str = data("answer", "Column of the dataset that holds the answer.")
    system_prompt: str = data("", "System prompt, or its file; empty: SYSTEM_PROMPT of rewards.py.")
    max_prompt_length: int = data(0, "Longest prompt in tokens; 0: no limit.")
    prompt_too_long: str = data(
        "skip", "Skip prompts that are too long, or stop with an error.", choices="skip|error"
    )
    seed: int = data(0, "Seed of data order and sampling.", at_most=2**31 - 1, results="value")

    rollout_backend: str = rollout(
        "naive", "Program that samples completions.", choices="naive", yaml="backend"
    )
    batch_size: int = rollout_size(
        0,
        "Prompts per pass on each process, and per step if no step size is set; 0: not set.",
        yaml="prompt_batch_size",
    )
    rollout_per_device_batch_size: int = rollout_size(
        0, "Prompts per pass on each device; 0: not set.", yaml="per_device_batch_size"
    )
    rollout_global_batch_size: int = rollout_size(
        0, "Prompts per step over all processes; 0: not set.", yaml="global_prompt_batch_size"
    )
    rollout_batch_size: int = rollout_size(
        0, "Sequences per step over all processes; 0: not set.", yaml="batch_size"
    )
    num_pre_q: int = rollout(8, "K: number of completions per prompt.", at_least=1)
    global_length: int = rollout(0, "Smallest padded length of a prompt in tokens.", results="none")
    max_length_sample: int = rollout(1024, "Longest completion in tokens.", at_least=1)
    temperature: float = rollout(1.0, "Temperature of sampling.", above=0)
    top_k: int = rollout(0, "Sample among this many likeliest tokens; 0: all.")
    top_p: float = rollout(1.0, "Sample within this probability mass.", above=0, at_most=1)
    min_p: float = rollout(0.0, "Drop tokens below MIN_P times the highest probability.", below=1)
    rollout_mesh_shape: str = rollout(
        "auto",
        "Rollout mesh: auto, or dp,fsdp,tp; -1: the rest.",
        yaml="mesh_shape",
        results="none",
    )

    dynamic_sampling: bool = rollout(False, "Sample until the rewards differ within enough groups.")
    dynamic_sampling_max_rounds: int = rollout(4, "Most sampling rounds in a step.", at_least=1)

    reward_weights: tuple[float, ...] = reward(
        (1.0, 0.5, 0.5), "Weight of each reward function; 1 each if only REWARD_FN is set."
    )
    reward_fn: str = reward("", "Reward functions, such as my.py:name; empty: the built-in ones.")
    reward_timeout_s: float = reward(
        10.0, "Seconds that a call of your function may take.", above=0, results="none"
    )
    overlong_cache: int = reward(
        0, "Tokens over which soft_overlong_penalty grows; 0: a fifth of MAX_LENGTH_SAMPLE."
    )
    repetition_ngram: int = reward(3, "Tokens per n-gram of repetition_penalty.", at_least=1)

    steps: int = train(100, "Number of training steps; 0: only evaluate.", results="content")
    train_micro_batch_size: int = speed(
        0, "Sequences per micro-step on each process; 0: not set.", yaml="micro_batch_size"
    )
    train_per_device_micro_batch_size: int = speed(
        0,
        "Sequences per micro-step on each device; 0: not set.",
        yaml="per_device_micro_batch_size",
    )
    grad_accum_steps: int = speed(0, "Micro-steps per update; 0: derived from the sizes.")
    ppo_epochs: int = train(1, "Number of updates per step.", at_least=1)
    optimizer: str = train("adamw", "Update rule of the weights.", choices="adamw|lion|sgd")
    learning_rate: float = train(1e-6, "Highest learning rate of the schedule.")
    lr_schedule: str = train(
        "warmup_cosine", "Learning rate after the warmup.", choices="warmup_cosine|linear|constant"
    )
    warmup_ratio: float = train(0.05, "Fraction of the schedule that is warmup.", at_most=1)
    lr_decay_steps: int = train(0, "Steps until the schedule ends; 0: STEPS.", results="content")
    weight_decay: float = train(0.0, "Weight decay, decoupled from the gradient.")
    clip_norm: float = train(1.0, "Largest global norm of the gradient; 0: no limit.")
    mesh_shape: str = speed("auto", "Training mesh: auto, or dp,fsdp,tp; -1: the rest.")
    remat: str = speed(
        "full",
        "What backward recomputes: nothing, all but matmuls (dots), or all.",
        choices="none|dots|full",
    )
    policy_loss_impl: str = speed("jax", "Code that computes logps.", choices="jax|pallas")
    attention_impl: str = speed("auto", "Code of attention.", choices="auto|xla|splash")
    layer_loop: str = speed("auto", "How a program runs layers.", choices="auto|scan|unroll")

    loss_type: str = loss(
        "dapo",
        "Policy loss; see Objective in loss.py.",
        choices="dapo|grpo|bnpo|dr_grpo|cispo|gspo|sapo",
    )
    adv_estimator: str = loss(
        "grpo",
        "Advantages; see group_advantages in loss.py.",
        choices="grpo|rloo|reinforce|reinforce++|gdpo",
    )
    scale_rewards: str = loss(
        "group", "Standard deviation that divides grpo's advantages.", choices="group|batch|none"
    )
    eps_low: float = loss(0.2, "The ratio is clipped below 1 - EPS_LOW.", at_most=1)
    eps_high: float = loss(0.2, "The ratio is clipped above 1 + EPS_HIGH; cispo: above EPS_HIGH.")
    delta: float = loss(0.0, "Largest ratio in two-sided clipping; 0: no limit.")
    importance_sampling_level: str = loss(
        "token",
        "One ratio per token or per sequence; gspo: per sequence.",
        choices="token|sequence",
    )
    beta: float = loss(0.0, "Weight of the KL to the reference; 0: no reference.")
    kl_estimator: str = loss("k3", "Estimator of the KL.", choices="k1|k2|k3")
    kl_bias_correction: bool = loss(
        True, "Multiply the KL by the ratio, so that its gradient is unbiased."
    )
    ref_sync_steps: int = loss(0, "Policy updates per update of the reference; 0: no updates.")
    ref_sync_alpha: float = loss(
        0.6, "Weight of the policy in each update of the reference.", at_most=1
    )
    entropy_coef: float = loss(0.0, "Weight of the entropy bonus.")
    top_entropy_quantile: float = loss(
        1.0, "Fraction of the tokens, those of highest entropy, to learn from.", above=0, at_most=1
    )
    mask_truncated_completions: bool = loss(False, "Learn nothing from truncated completions.")
    is_mode: str = loss(
        "none",
        "Multiply the loss by p_trainer / p_sampler, capped by IS_CAP.",
        choices="none|token_truncate|token_mask|sequence_truncate|sequence_mask",
    )
    is_cap: float = loss(
        3.0, "Largest weight of IS_MODE; larger ones become IS_CAP (mask modes: 0).", at_least=1
    )

    eval_every_steps: int = evaluation(10, "Steps between evaluations, from step 0 on; 0: never.")
    eval_prompts: int = evaluation(128, "Questions per evaluation; 0: all.")
    eval_full_sweep: bool = evaluation(False, "Evaluate the full split at the end.")
    eval_samples: int = evaluation(1, "Completions per question; 1: greedy.", at_least=1)
    accuracy_of: str = evaluation(
        "", "Reward function of the accuracy; empty: reward_correct, else the first one."
    )
    accuracy_threshold: float = evaluation(1.0, "Smallest reward that counts as right.")

    output_dir: str = run("", "Folder of all outputs; empty: a new runs/NAME_UTC.")
    checkpoint_dir: str = run(
        "", "Folder of checkpoints, also gs://bucket/folder; empty: OUTPUT_DIR/checkpoints."
    )
    save_every_steps: int = run(50, "Steps between checkpoints; 0: none, not even at the end.")
    save_keep: int = run(2, "Newest checkpoints to keep besides the best; 0: all.")
    resume: str = run("auto", "Checkpoint to begin with: auto (the newest), never, or a path.")
    resume_force: bool = run(False, "Resume although settings that change results have changed.")
    preemption_grace_s: int = run(30, "Most seconds from SIGTERM to the end.", at_least=2)
    nonfinite_limit: int = run(3, "Consecutive non-finite steps that end a run.", at_least=1)
    export_hf: str = run("", "Folder of the exported model; empty: OUTPUT_DIR/hf; none: no export.")
    export_dtype: str = run(
        "auto", "Dtype of the exported weights; auto: as in the run.", choices=DTYPES
    )
    print_train_time_breakdown: bool = local(False, "Print the seconds of each phase per step.")
    wandb_mode: str = local("disabled", "How W&B logs.", choices="disabled|online|offline")
    wandb_project: str = local("", "Project in W&B.")
    wandb_name: str = local("", "Name of the run in W&B.")
    jax_compilation_cache_dir: str = local("", "Folder of compiled programs; empty: .jax_cache.")
    require_multihost: bool = run(False, "Stop if only one process joins.")
    require_jax_process_count: int = run(0, "Stop unless this many processes join; 0: any number.")
    init_timeout_s: int = local(90, "Seconds in which all processes must join.", at_least=1)
    heartbeat_timeout_s: int = local(30, "Seconds until a silent process is dead.", at_least=10)

    @classmethod
    def from_env(cls, env: Mapping[str, str], config_file: str | Path = "") -> "Config":
        """The settings of all layers. Raises ValueError with a line for every mistake."""
        return read_layers(env, config_file)[0]


def contradictions(cfg: Config) -> list[str]:
    """A line for each setting that another setting makes wrong or idle."""
    loss_type, estimator = f"LOSS_TYPE={cfg.loss_type}", f"ADV_ESTIMATOR={cfg.adv_estimator}"
    functions, updates = f"REWARD_FN={cfg.reward_fn}", cfg.steps * cfg.ppo_epochs
    idle = [  # a setting, what it needs to have an effect, and why it has none
        ("kl_estimator", cfg.beta > 0, "BETA=0"),
        ("kl_bias_correction", cfg.beta > 0, "BETA=0"),
        ("ref_sync_steps", cfg.beta > 0, "BETA=0"),
        ("ref_sync_alpha", cfg.ref_sync_steps > 0, "REF_SYNC_STEPS=0"),
        ("is_cap", cfg.is_mode != "none", "IS_MODE=none"),
        ("scale_rewards", cfg.adv_estimator == "grpo", estimator),
        ("delta", cfg.loss_type not in ("cispo", "sapo"), loss_type),
        ("eps_low", cfg.loss_type not in ("cispo", "sapo"), loss_type),
        ("eps_high", cfg.loss_type != "sapo", loss_type),
        ("dynamic_sampling_max_rounds", cfg.dynamic_sampling, "DYNAMIC_SAMPLING=0"),
        ("overlong_cache", "soft_overlong_penalty" in cfg.reward_fn, functions),
        ("repetition_ngram", "repetition_penalty" in cfg.reward_fn, functions),
        (
            "model_revision",
            not os.path.isdir(cfg.model_path),
            f"the folder MODEL_PATH={cfg.model_path}",
        ),
        ("dataset_config", not os.path.exists(cfg.dataset), f"the local DATASET={cfg.dataset}"),
        ("export_dtype", cfg.export_hf != "none", "EXPORT_HF=none"),
    ]
    found = [
        f"{name.upper()}={to_text(getattr(cfg, name))} does nothing with {reason}; leave it out"
        for name, has_effect, reason in idle
        if getattr(cfg, name) != getattr(Config, name) and not has_effect
    ]
    if cfg.num_pre_q == 1 and cfg.steps and cfg.adv_estimator != "reinforce":
        found.append(
            f"NUM_PRE_Q=1 leaves {estimator} nothing to compare a completion with; set at least 2, "
            f"or ADV_ESTIMATOR=reinforce"
        )
    if cfg.dynamic_sampling and cfg.adv_estimator == "reinforce":
        found.append(
            "DYNAMIC_SAMPLING=1 drops groups of equal rewards, which teach with "
            "ADV_ESTIMATOR=reinforce; leave it out"
        )
    if cfg.loss_type == "cispo" and cfg.eps_high < 1:
        found.append(
            f"EPS_HIGH={cfg.eps_high}: with {loss_type} this is the largest ratio, and below 1 it "
            f"shrinks every gradient; set EPS_HIGH=5"
        )
    if cfg.delta and cfg.delta <= (limit := 1 + cfg.eps_high):
        found.append(
            f"DELTA={cfg.delta} must be above 1 + EPS_HIGH = {limit}, where clipping begins"
        )
    if cfg.beta and cfg.kl_estimator == "k1" and not cfg.kl_bias_correction:
        found.append(
            "KL_ESTIMATOR=k1 has no gradient on average with KL_BIAS_CORRECTION=0; set it to 1"
        )
    if cfg.ref_sync_steps > updates > 0:
        found.append(
            f"REF_SYNC_STEPS={cfg.ref_sync_steps} is more than the run's {updates} updates "
            f"(STEPS * PPO_EPOCHS); lower it"
        )
    if cfg.is_mode.startswith("sequence") and (cfg.top_k > 0 or cfg.top_p < 1 or cfg.min_p > 0):
        found.append(
            f"IS_MODE={cfg.is_mode} with TOP_K, TOP_P or MIN_P shrinks a sequence's weight with "
            f"every token; set token_truncate or token_mask"
        )
    if "://" in cfg.output_dir + cfg.export_hf:
        found.append(
            "OUTPUT_DIR and EXPORT_HF are folders of this machine; CHECKPOINT_DIR may be gs://"
        )
    if cfg.overlong_cache > cfg.max_length_sample:
        found.append(
            f"OVERLONG_CACHE={cfg.overlong_cache} must be at most "
            f"MAX_LENGTH_SAMPLE={cfg.max_length_sample}"
        )
    return found


def notes(cfg: Config) -> list[str]:
    """Lines about settings that may not do what the user expects, but are no mistakes."""
    lines = []
    if 0 < cfg.lr_decay_steps < cfg.steps and cfg.lr_schedule != "constant":
        lines.append(
            f"LR_DECAY_STEPS={cfg.lr_decay_steps} is less than STEPS={cfg.steps}: later steps have "
            f"learning rate 0"
        )
    if cfg.ppo_epochs > 1 or not cfg.steps:
        return lines
    names = [n for n in ("eps_low", "eps_high", "delta") if getattr(cfg, n) != getattr(Config, n)]
    idle = [f"{name.upper()}={getattr(cfg, name)}" for name in names]
    if cfg.loss_type in ("gspo", "cispo", "sapo"):
        idle.append(f"the ratios of LOSS_TYPE={cfg.loss_type}")
    if idle:
        lines.append(
            f"PPO_EPOCHS=1 makes every ratio 1, so that {' and '.join(idle)} do nothing; with "
            f"PPO_EPOCHS=2 they count"
        )
    return lines


def read_layers(
    env: Mapping[str, str], config_file: str | Path = ""
) -> tuple[Config, dict[str, str]]:
    """The settings of all layers, and the layer that set each, {attribute: layer}.

    Raises ValueError with a line for every mistake.
    """
    mistakes: list[Mistake] = []
    settings = parsing.read_env(env, Config, mistakes)
    layers = dict.fromkeys(settings, "environment")
    if config_file:
        found = parsing.read_yaml(config_file, Config, mistakes)
        layers = dict.fromkeys(found, str(config_file)) | layers
        settings = parsing.overlay(settings, found, SYNONYMS)
    if not settings.get("model_path"):
        settings.pop("model_path", None)
        found = parsing.read_yaml(TINY, Config, mistakes)
        layers = dict.fromkeys(found, "recipes/tiny.yaml") | layers
        settings = parsing.overlay(settings, found, TINY_YIELDS)
    if settings.get("reward_fn") and "reward_weights" not in settings:
        settings["reward_weights"] = (1.0,) * len(settings["reward_fn"].split(","))
        layers["reward_weights"] = "for REWARD_FN"
    cfg = Config(**settings)
    texts, wrong = [mistake.text for mistake in mistakes], {m.setting for m in mistakes}
    for text in [] if "MODEL_PATH" in wrong else contradictions(cfg):
        # A contradiction with a setting that could not be read may not exist.
        if not any(re.search(rf"\b{name}\b", text) for name in wrong):
            texts.append(text)
    if texts:
        raise ValueError("\n".join(texts))
    return cfg, layers


def describe(cfg: Config, processes: int = 1, local_devices: int = 1) -> str:
    """A line of YAML for every setting, then the batch sizes that follow from the settings."""
    derived = sizes.derive(cfg, processes, local_devices)._asdict()
    slice_ = f"# On {processes} x {local_devices} devices (processes x local); not read back:"
    lines = [f"derived.{name}: {value}" for name, value in derived.items()]
    return "\n".join([*parsing.yaml_lines(cfg), slice_, *lines])


class Command(NamedTuple):
    """What a command line and the environment ask for."""

    cfg: Config
    slice_name: str  # the slice that --plan names, or ""
    lines: list[str]  # lines to print: the settings that are not at their defaults, and idle ones


def load(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Command:
    """The settings of a command line and the environment; exits if they are only to be printed."""
    parser = argparse.ArgumentParser(description="Example: STEPS=1 python train_grpo.py")
    parser.add_argument("--config", metavar="FILE.yaml", default="", help="settings as YAML")
    parser.add_argument("--print-config", action="store_true", help="print every setting and exit")
    parser.add_argument("--plan", metavar="SLICE", default="", help="say if the run fits there")
    parser.add_argument("--processes", type=int, default=1, help="processes to print sizes for")
    parser.add_argument("--local-devices", type=int, default=1, help="devices of each process")
    args = parser.parse_args(argv)
    if min(args.processes, args.local_devices) < 1:
        parser.error("--processes and --local-devices must be at least 1")
    if (args.processes, args.local_devices) != (1, 1) and not args.print_config:
        parser.error("--processes and --local-devices are only for --print-config")
    try:
        if args.plan and args.print_config:
            raise ValueError("--plan is only for train_grpo.py, without --print-config")
        # W&B and the Hub read their keys in the environment, so .env goes there.
        dotenv = parsing.read_dotenv(REPO / ".env") if env is None else {}
        env = os.environ if env is None else env
        dotenv = {name: value for name, value in dotenv.items() if name not in env}
        env.update(dotenv)
        cfg, layers = read_layers(env, args.config)
        layers |= {name.lower(): ".env" for name in dotenv}
        if args.print_config:
            parsing.print_and_exit(describe(cfg, args.processes, args.local_devices))
        return Command(cfg, args.plan, [parsing.changed(cfg, layers), *notes(cfg)])
    except ValueError as error:
        parsing.fail(error)


if __name__ == "__main__":
    load(["--print-config", *sys.argv[1:]])
