"""Every setting of a run: read once, checked, derived, printed. Imports neither jax nor flax.

Names are environment variables (NUM_PRE_Q); in YAML and in print they are group.name
(rollout.num_pre_q), in code attributes (cfg.num_pre_q). Layers, lowest first: the defaults below;
recipes/tiny.yaml, if no layer sets MODEL_PATH; `--config FILE.yaml`; the file .env beside this one;
the environment.

    python config.py                                   # every setting, its value, default and help
    python config.py --processes 2 --local-devices 4   # with the sizes that follow on that slice
    python config.py > run.yaml; python train_grpo.py --config run.yaml
"""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from contradictions import contradictions, notes
from runtime.parsing import (
    REPO,
    Mistake,
    overlay,
    read_dotenv,
    read_env,
    read_yaml,
    to_text,
    yaml_name,
)
from runtime.sizes import MICRO_SIZES, PASS_SIZES, STEP_SIZES, derive

TINY = REPO / "recipes" / "tiny.yaml"
SYNONYMS = [(sizes, sizes) for sizes in (PASS_SIZES, STEP_SIZES, MICRO_SIZES)]  # (set, silenced)
# The sizes of tiny.yaml are defaults, which give way to any size that the user sets: BATCH_SIZE=2
# alone means one pass of two prompts, whatever tiny.yaml would have made of the step.
ANY_SIZES = PASS_SIZES + STEP_SIZES
TINY_YIELDS = [(ANY_SIZES, ANY_SIZES + MICRO_SIZES), (("num_pre_q", *MICRO_SIZES), MICRO_SIZES)]


def knob(
    group: str, default: Any, help: str, *, choices: str = "", others: str = "", **limits: float
) -> Any:
    """One setting; `group` is its YAML group, or group.name where that name is not the env's.

    others: what other programs call it, to be told its name here; in lower case only in YAML.
    limits: at_least, at_most, above, below; a number is at least 0 where no lower one is given.
    """
    if not {"at_least", "above"} & limits.keys():
        limits["at_least"] = 0
    metadata = {"group": group, "help": help, "choices": choices, "limits": limits}
    metadata["others"] = others.split()
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings, under their environment names in lower case."""

    model_path: str = knob(
        "model.path",
        "",
        "Hugging Face id or folder; empty: recipes/tiny.yaml",
        others="MODEL_NAME_OR_PATH",
    )
    model_revision: str = knob("model", "", "branch, tag or commit on the Hub; empty: its main")
    dtype: str = knob(
        "model", "auto", "auto: bfloat16, CPU float32", choices="auto|bfloat16|float32"
    )
    chat_template: str = knob(
        "model", "", "Jinja file of the chat template; empty: the tokenizer's own"
    )

    dataset: str = knob("data", "openai/gsm8k", "Hugging Face id, file, or folder of SPLIT.jsonl")
    dataset_config: str = knob("data", "main", "configuration of a dataset on the Hub")
    train_split: str = knob("data", "train", "split to train on")
    eval_split: str = knob("data", "test", "split to evaluate on")
    question_column: str = knob("data", "question", "column of the dataset with the question")
    answer_column: str = knob("data", "answer", "column of the dataset with the answer")
    system_prompt: str = knob("data", "", "text, or a file of it; empty: the one of rewards.py")
    max_prompt_length: int = knob("data", 0, "tokens; 0: unlimited")
    prompt_too_long: str = knob("data", "skip", "what becomes of one", choices="skip|error")
    seed: int = knob(
        "data", 0, "of the data order and all sampling", at_most=2**31 - 1, others="RANDOM_SEED"
    )

    rollout_backend: str = knob(
        "rollout.backend", "naive", "who generates", choices="naive", others="ROLLOUT_ENGINE"
    )
    batch_size: int = knob(
        "rollout.prompt_batch_size",
        0,
        "prompts per pass per process; 0: unset",
        others="ROLLOUT_PROMPT_BATCH_SIZE",
    )
    rollout_per_device_batch_size: int = knob(
        "rollout.per_device_batch_size", 0, "prompts per pass per device; 0: unset (then 2)"
    )
    rollout_global_batch_size: int = knob(
        "rollout.global_prompt_batch_size", 0, "prompts per step over all processes; 0: unset"
    )
    rollout_batch_size: int = knob("rollout.batch_size", 0, "sequences per step in all; 0: unset")
    num_pre_q: int = knob(
        "rollout",
        8,
        "K: completions per prompt",
        at_least=1,
        others="NUM_GENERATIONS GROUP_SIZE rollout.n",
    )
    global_length: int = knob("rollout", 0, "tokens; prompts are padded to at least this")
    max_length_sample: int = knob(
        "rollout",
        1024,
        "tokens; a completion ends here",
        at_least=1,
        others="MAX_NEW_TOKENS MAX_COMPLETION_LENGTH",
    )
    temperature: float = knob("rollout", 1.0, "of sampling", above=0)
    top_k: int = knob("rollout", 0, "sample among the k likeliest tokens; 0: all")
    top_p: float = knob("rollout", 1.0, "sample within this probability mass", above=0, at_most=1)
    min_p: float = knob("rollout", 0.0, "drop tokens below min_p * the likeliest one's", below=1)
    rollout_mesh_shape: str = knob("rollout.mesh_shape", "auto", "auto or dp,fsdp,tp; -1: rest")

    dynamic_sampling: bool = knob("rollout", False, "sample until enough groups' rewards differ")
    dynamic_sampling_max_rounds: int = knob("rollout", 4, "rollouts in a step at most", at_least=1)

    reward_weights: tuple[float, ...] = knob("reward", (1.0, 0.5, 0.5), "with REWARD_FN 1 each")
    reward_fn: str = knob(
        "reward", "", "functions, such as my.py:name; empty: the built-in", others="REWARD_FUNCS"
    )
    reward_timeout_s: float = knob("reward", 10.0, "seconds for a call to one of yours", above=0)

    overlong_cache: int = knob(
        "reward", 0, "tokens in which soft_overlong_penalty grows; 0: a fifth of the completion's"
    )
    repetition_ngram: int = knob("reward", 3, "tokens that repetition_penalty counts", at_least=1)

    steps: int = knob(
        "train",
        100,
        "rollouts to learn from; 0: only evaluate",
        others="MAX_STEPS TOTAL_TRAINING_STEPS",
    )
    train_micro_batch_size: int = knob(
        "train.micro_batch_size",
        0,
        "sequences per micro-step per process; 0: unset",
        others="MICRO_BATCH_SIZE",
    )
    train_per_device_micro_batch_size: int = knob(
        "train.per_device_micro_batch_size",
        0,
        "the same per device; 0: unset (then up to 4)",
        others="PER_DEVICE_TRAIN_BATCH_SIZE MICRO_BATCH_SIZE_PER_DEVICE",
    )
    grad_accum_steps: int = knob(
        "train", 0, "follows from the sizes above; 0: unset", others="GRADIENT_ACCUMULATION_STEPS"
    )
    ppo_epochs: int = knob("train", 1, "updates per rollout", at_least=1, others="NUM_ITERATIONS")
    optimizer: str = knob("train", "adamw", "update rule", choices="adamw|lion|sgd")
    learning_rate: float = knob("train", 1e-6, "at its peak", others="LR")
    lr_schedule: str = knob(
        "train",
        "warmup_cosine",
        "to zero",
        choices="warmup_cosine|linear|constant",
        others="LR_SCHEDULER_TYPE",
    )
    warmup_ratio: float = knob("train", 0.05, "share of the decay steps that warm up", at_most=1)
    lr_decay_steps: int = knob("train", 0, "steps until the schedule ends; 0: STEPS")
    weight_decay: float = knob("train", 0.0, "decoupled from the gradient")
    clip_norm: float = knob(
        "train", 1.0, "largest global norm of a gradient; 0: any", others="MAX_GRAD_NORM"
    )
    mesh_shape: str = knob(
        "train", "auto", "auto or dp,fsdp,tp; -1: rest", others="MESH_SHAPE_FSDP"
    )
    remat: str = knob(
        "train",
        "full",
        "what backward recomputes",
        choices="none|dots|full",
        others="GRADIENT_CHECKPOINTING",
    )
    policy_loss_impl: str = knob("train", "jax", "pallas: a TPU kernel", choices="jax|pallas")
    attention_impl: str = knob("train", "auto", "splash: a TPU kernel", choices="auto|xla|splash")

    loss_type: str = knob(
        "loss", "dapo", "loss.py says of each", choices="dapo|grpo|bnpo|dr_grpo|cispo|gspo|sapo"
    )
    adv_estimator: str = knob(
        "loss", "grpo", "advantages", choices="grpo|rloo|reinforce|reinforce++|gdpo"
    )
    scale_rewards: str = knob("loss", "group", "grpo's std", choices="group|batch|none")
    eps_low: float = knob(
        "loss",
        0.2,
        "the ratio is clipped below 1 - eps_low",
        at_most=1,
        others="EPSILON CLIP_RATIO_LOW",
    )
    eps_high: float = knob(
        "loss",
        0.2,
        "the ratio is clipped above 1 + eps_high; cispo: eps_high",
        others="EPSILON_HIGH CLIP_RATIO_HIGH",
    )
    delta: float = knob("loss", 0.0, "two-sided clipping: no ratio counts as more; 0: any does")
    importance_sampling_level: str = knob(
        "loss", "token", "what has a ratio; gspo: sequence", choices="token|sequence"
    )
    beta: float = knob("loss", 0.0, "weight of the KL to the reference; 0: none", others="KL_COEF")
    kl_estimator: str = knob("loss", "k3", "of that KL", choices="k1|k2|k3")
    kl_bias_correction: bool = knob("loss", True, "times the ratio: the gradient is the KL's own")
    ref_sync_steps: int = knob(
        "loss", 0, "updates until the reference moves; 0: never", others="REF_MODEL_SYNC_STEPS"
    )
    ref_sync_alpha: float = knob(
        "loss", 0.6, "the policy's share in it then", at_most=1, others="REF_MODEL_MIXUP_ALPHA"
    )
    entropy_coef: float = knob("loss", 0.0, "weight of the entropy bonus")
    top_entropy_quantile: float = knob(
        "loss", 1.0, "share of tokens, of the highest entropy, to learn from", above=0, at_most=1
    )
    mask_truncated_completions: bool = knob("loss", False, "learn nothing from what was cut off")
    is_mode: str = knob(
        "loss",
        "none",
        "weight by trainer's / sampler's probability",
        choices="none|token_truncate|token_mask|sequence_truncate|sequence_mask",
        others="VLLM_IMPORTANCE_SAMPLING_MODE",
    )
    is_cap: float = knob(
        "loss",
        3.0,
        "largest such weight; beyond: cut to it, or 0",
        at_least=1,
        others="VLLM_IMPORTANCE_SAMPLING_CAP",
    )

    eval_every_steps: int = knob(
        "eval", 10, "from step 0 on; 0: never", others="EVAL_STEPS TEST_FREQ"
    )
    eval_prompts: int = knob("eval", 128, "questions in such an evaluation; 0: all")
    eval_full_sweep: bool = knob("eval", False, "evaluate the whole split at the end")
    eval_samples: int = knob("eval", 1, "completions per question", at_least=1)
    accuracy_of: str = knob(
        "eval", "", "reward function that accuracy follows; empty: reward_correct, else the first"
    )
    accuracy_threshold: float = knob("eval", 1.0, "a completion is right from this reward on")

    output_dir: str = knob("run", "", "empty: a new runs/NAME_UTC")
    checkpoint_dir: str = knob("run", "", "empty: OUTPUT_DIR/checkpoints; gs://bucket/folder too")
    save_every_steps: int = knob(
        "run",
        50,
        "steps between checkpoints; 0: none, not at the end",
        others="SAVE_STEPS SAVE_FREQ",
    )
    save_keep: int = knob(
        "run",
        2,
        "newest checkpoints that stay, besides the best; 0: all",
        others="SAVE_TOTAL_LIMIT",
    )
    resume: str = knob(
        "run",
        "auto",
        "auto: newest checkpoint there, never, or a checkpoint's path",
        others="RESUME_FROM_CHECKPOINT",
    )
    resume_force: bool = knob("run", False, "go on although settings changed that change results")
    preemption_grace_s: int = knob("run", 30, "seconds from SIGTERM to the end", at_least=2)
    nonfinite_limit: int = knob("run", 3, "steps not finite in a row that end a run", at_least=1)
    export_hf: str = knob("run", "", "folder of the trained model; empty: OUTPUT_DIR/hf; none")
    export_dtype: str = knob(
        "run", "auto", "of that; auto: DTYPE's", choices="auto|bfloat16|float32"
    )
    print_train_time_breakdown: bool = knob("run", False, "seconds per phase in the step line")
    wandb_mode: str = knob("run", "disabled", "W&B", choices="disabled|online|offline")
    wandb_project: str = knob("run", "", "W&B project")
    wandb_name: str = knob("run", "", "W&B name of the run")
    jax_compilation_cache_dir: str = knob("run", "", "empty: .jax_cache")
    require_multihost: bool = knob("run", False, "stop if this process is alone")
    require_jax_process_count: int = knob("run", 0, "stop unless so many joined; 0: any number")
    init_timeout_s: int = knob("run", 90, "seconds for all processes to join", at_least=1)
    heartbeat_timeout_s: int = knob("run", 30, "seconds until a silent one is dead", at_least=10)

    @classmethod
    def from_env(cls, env: Mapping[str, str], config_file: str | Path = "") -> "Config":
        """The settings of `env` over those of `config_file`, over the recipe and the defaults.

        Raises ValueError with a line for every mistake.
        """
        return read_layers(env, config_file)[0]


def read_layers(
    env: Mapping[str, str], config_file: str | Path = ""
) -> tuple[Config, dict[str, str]]:
    """Config.from_env's settings, and the layer that each comes from, {attribute: layer}."""
    mistakes: list[Mistake] = []
    settings = read_env(env, Config, mistakes)
    layers = dict.fromkeys(settings, "environment")
    if config_file:
        found = read_yaml(config_file, Config, mistakes)
        layers = dict.fromkeys(found, str(config_file)) | layers
        settings = overlay(settings, found, SYNONYMS)
    if not settings.get("model_path"):
        settings.pop("model_path", None)
        found = read_yaml(TINY, Config, mistakes)
        layers = dict.fromkeys(found, "recipes/tiny.yaml") | layers
        settings = overlay(settings, found, TINY_YIELDS)
    if settings.get("reward_fn") and "reward_weights" not in settings:
        settings["reward_weights"] = (1.0,) * len(settings["reward_fn"].split(","))
        layers["reward_weights"] = "for REWARD_FN"
    cfg = Config(**settings)
    texts, wrong = [mistake.text for mistake in mistakes], {m.setting for m in mistakes}
    for text in [] if "MODEL_PATH" in wrong else contradictions(cfg):
        # One that names a setting whose value could not be read says nothing.
        if not any(re.search(rf"\b{name}\b", text) for name in wrong):
            texts.append(text)
    if texts:
        raise ValueError("\n".join(texts))
    return cfg, layers


def changed(cfg: Config, layers: Mapping[str, str]) -> str:
    """A line with every setting that differs from its default, and the layer it comes from."""
    return "changed: " + " ".join(
        f"{field.name.upper()}={to_text(getattr(cfg, field.name))} ({layers[field.name]})"
        for field in dataclasses.fields(cfg)
        if getattr(cfg, field.name) != field.default
    )


def describe(cfg: Config, processes: int = 1, local_devices: int = 1) -> str:
    """Every setting as a line of YAML that `--config` reads back, then what follows from them."""
    lines = []
    for field in dataclasses.fields(cfg):
        value, help = getattr(cfg, field.name), field.metadata["help"]
        choices = f" ({field.metadata['choices']})" if field.metadata["choices"] else ""
        mark = "default" if value == field.default else f"changed from {to_text(field.default)}"
        line = f"{yaml_name(field)}: {to_text(value)}"
        lines.append(f"{line:<40}  # {field.name.upper()}: {help}{choices}  [{mark}]")
    lines.append(f"# On {processes} x {local_devices} devices (processes x local); not read back:")
    sizes = derive(cfg, processes, local_devices)._asdict()
    return "\n".join(lines + [f"derived.{name}: {value}" for name, value in sizes.items()])


class Command(NamedTuple):
    """What a command line and the environment ask for."""

    cfg: Config
    slice_name: str  # of --plan, or ""
    lines: list[str]  # for the log: the settings that are not the default's, and idle ones


def load(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Command:
    """The settings of a command line and the environment. Exits if they are only to be printed."""
    parser = argparse.ArgumentParser(description="Settings are environment variables: STEPS=1 ...")
    parser.add_argument("--config", metavar="FILE.yaml", default="", help="settings below the env")
    parser.add_argument("--print-config", action="store_true", help="print every setting and exit")
    parser.add_argument("--plan", metavar="SLICE", default="", help="does it fit, say, a v6e-8?")
    parser.add_argument("--processes", type=int, default=1, help="to print sizes for; default 1")
    parser.add_argument("--local-devices", type=int, default=1, help="of each process; default 1")
    args = parser.parse_args(argv)
    if min(args.processes, args.local_devices) < 1:
        parser.error("--processes and --local-devices must be at least 1")
    try:
        # Keys for W&B and the Hub, which read them there, and settings too.
        dotenv = read_dotenv(REPO / ".env") if env is None else {}
        env = os.environ if env is None else env
        dotenv = {name: value for name, value in dotenv.items() if name not in env}
        env.update(dotenv)
        cfg, layers = read_layers(env, args.config)
        layers |= {name.lower(): ".env" for name in dotenv}
        if args.print_config:
            print(describe(cfg, args.processes, args.local_devices))
            raise SystemExit(0)
        return Command(cfg, args.plan, [changed(cfg, layers), *notes(cfg)])
    except ValueError as error:
        fail(error)


def fail(error: ValueError) -> NoReturn:
    """Ends the program the way a user's mistakes do: a line for each, and exit code 2."""
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    load(["--print-config", *sys.argv[1:]])
