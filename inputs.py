"""What a process reads by itself, before it needs a device or the others: the sizes, the reward
functions, the model's folder and the data. And the part of it that processes and resumed runs
compare.
"""

import contextlib
import dataclasses
import hashlib
import json
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

import config as settings
import data
import rewards
from metrics import AccuracyRule
from models import hf
from models.model import ModelConfig
from runtime import processes
from runtime.sizes import Sizes, derive

# Settings that a process may have for itself: what it writes, where, and how long it waits.
OWN_SETTINGS = (
    *("wandb_mode", "wandb_project", "wandb_name", "jax_compilation_cache_dir"),
    *("print_train_time_breakdown", "init_timeout_s", "heartbeat_timeout_s"),
)


class Inputs(NamedTuple):
    """What a process reads by itself, before it needs a device or the others."""

    sizes: Sizes
    functions: list[rewards.RewardFunction]
    accuracy: AccuracyRule
    folder: Path  # of the model
    config: ModelConfig
    tokenizer: Any
    train: list[data.Prompt]
    test: list[data.Prompt]


def read_inputs(cfg: settings.Config) -> Inputs:
    """Raises ValueError with a line for every mistake that can be found beside the others."""
    mistakes: list[str] = []
    sizes = tried(mistakes, read_sizes, cfg)
    functions = tried(mistakes, reward_functions, cfg)
    accuracy = functions and tried(mistakes, accuracy_rule, cfg, functions)
    model = tried(mistakes, read_model, cfg)
    names = cfg.train_split, cfg.eval_split
    splits = [tried(mistakes, load_rows, cfg, name) for name in names]
    if model and all(splits):
        splits = [
            tried(mistakes, prompts_of, cfg, model[-1], rows, name)
            for rows, name in zip(splits, names, strict=True)
        ]
    if mistakes:
        raise ValueError("\n".join(dict.fromkeys(mistakes)))
    return Inputs(sizes, functions, accuracy, *model, *splits)


def tried(mistakes: list[str], read: Callable[..., Any], *arguments: Any) -> Any:
    """What `read` returns; None if it finds a mistake of the user's, which goes to `mistakes`."""
    try:
        return read(*arguments)
    except ValueError as error:
        mistakes.append(str(error))
    except OSError as error:  # such as a file that this user may not read
        mistakes.append(f"{error.filename}: {error.strerror}")
    return None


def read_sizes(cfg: settings.Config) -> Sizes:
    processes.stop_if_not_so_many(cfg.require_multihost, cfg.require_jax_process_count)
    sizes = derive(cfg, jax.process_count(), jax.local_device_count())
    print(
        f"local_batch={sizes.local_batch} global_batch={sizes.global_batch} "
        f"rollout.prompt_batch_size={sizes.prompt_batch_size} "
        f"rollout.passes_per_step={sizes.passes_per_step} "
        f"train.micro_batch_size={sizes.micro_batch_size} "
        f"train.grad_accum_steps={sizes.grad_accum_steps}",
        flush=True,
    )
    return sizes


def read_model(cfg: settings.Config) -> tuple[Path, ModelConfig, Any]:
    """The model's folder, its config and its tokenizer; its weights are checked and not read."""
    folder = hf.fetch_model(cfg.model_path, cfg.model_revision)
    stop_if_overwritten(cfg, folder)
    config = hf.read_config(folder)
    tokenizer = hf.load_tokenizer(folder, cfg.chat_template)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"MODEL_PATH={folder}: its tokenizer has {len(tokenizer)} tokens, its config.json "
            f"vocab_size={config.vocab_size}; they are of two models"
        )
    hf.check_weights(folder, config)
    return folder, config, tokenizer


def stop_if_overwritten(cfg: settings.Config, model: Path) -> None:
    """Raises ValueError if the export would replace a model that no run has exported."""
    if cfg.export_hf == "none" or not (cfg.export_hf or cfg.output_dir):
        return
    folder = Path(cfg.export_hf or f"{cfg.output_dir}/hf")
    name = f"EXPORT_HF={folder}" if cfg.export_hf else f"OUTPUT_DIR={cfg.output_dir}: its hf"
    if folder.resolve() == model.resolve():
        raise ValueError(f"{name} is MODEL_PATH; the model would be overwritten")
    if (folder / "config.json").exists() and not (folder / hf.EXPORTED).exists():
        raise ValueError(f"{name} holds a model that no run has exported; choose another folder")


def reward_functions(cfg: settings.Config) -> list[rewards.RewardFunction]:
    """Those of REWARD_FN, as many as there are REWARD_WEIGHTS."""
    cache = cfg.overlong_cache or cfg.max_length_sample // 5
    penalties = rewards.penalties(cfg.max_length_sample, cache, cfg.repetition_ngram)
    functions = rewards.load_reward_functions(cfg.reward_fn, cfg.reward_timeout_s, penalties)
    if len(cfg.reward_weights) != len(functions):
        names = ", ".join(f.__name__ for f in functions)
        weights = ",".join(map(str, cfg.reward_weights))
        raise ValueError(
            f"REWARD_WEIGHTS={weights} has {len(cfg.reward_weights)} numbers; "
            f"give {len(functions)}, one each for {names}"
        )
    return functions


def accuracy_rule(cfg: settings.Config, functions: list[rewards.RewardFunction]) -> AccuracyRule:
    """What makes a completion right: reward_correct where it is among the functions, else the
    first of them, unless ACCURACY_OF names another one."""
    names = [function.__name__ for function in functions]
    usual = "reward_correct" if "reward_correct" in names else names[0]
    name = cfg.accuracy_of.rpartition(":")[2] or usual
    if name not in names:
        raise ValueError(
            f"ACCURACY_OF={cfg.accuracy_of} is none of the run's reward functions, "
            f"{', '.join(names)}; add it to REWARD_FN, with weight 0 if it is only to measure"
        )
    return AccuracyRule(name, cfg.accuracy_threshold)


def load_rows(cfg: settings.Config, split: str) -> list[dict[str, Any]]:
    columns = cfg.question_column, cfg.answer_column
    return data.load_rows(cfg.dataset, cfg.dataset_config, split, *columns)


def prompts_of(
    cfg: settings.Config, tokenizer: Any, rows: list[dict[str, Any]], split: str
) -> list[data.Prompt]:
    system_prompt = data.text_of(cfg.system_prompt) or rewards.SYSTEM_PROMPT
    prompts = data.build_prompts(rows, tokenizer, system_prompt)
    return data.fit_prompts(prompts, cfg.max_prompt_length, cfg.prompt_too_long, split)


# ---- What processes and resumed runs compare -----------------------------------------------------


def facts_of(cfg: settings.Config, inputs: Inputs | None) -> dict[str, str]:
    """The settings, code, versions and files that have to be the same on every process."""
    facts = {
        field.name.upper(): str(getattr(cfg, field.name)).replace(str(settings.REPO), "{repo}")
        for field in dataclasses.fields(cfg)
        if field.name not in OWN_SETTINGS
    }
    sources = {Path(m.__file__) for m in [*sys.modules.values()] if getattr(m, "__file__", None)}
    for source in sorted(source for source in sources if source.parent == settings.REPO):
        facts[source.name] = digest(source.read_bytes())
    if inputs:
        files = [*inputs.folder.glob("*.json"), *inputs.folder.glob("*.safetensors")]
        listing = sorted((file.name, file.stat().st_size) for file in files)
        facts["the list of the model's files"] = digest(json.dumps(listing).encode())
        facts["the evaluated prompts"] = digest(json.dumps(inputs.test, default=str).encode())
    return facts | {f"the version of {name}": version for name, version in versions().items()}


def digests_of(cfg: settings.Config, inputs: Inputs) -> dict[str, str]:
    """The beginning of the SHA-256 of all that training follows from besides settings and code."""
    found = {
        f"the model's {name}": digest((inputs.folder / name).read_bytes())
        for name in ("config.json", "tokenizer.json")
    }
    found["the tokenized prompts"] = digest(json.dumps(inputs.train, default=str).encode())
    for file in {entry.rpartition(":")[0] for entry in cfg.reward_fn.split(",") if ":" in entry}:
        found[f"the file of REWARD_FN {Path(file).name}"] = digest(Path(file).read_bytes())
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "libtpu", "flax", "optax", "numpy", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
