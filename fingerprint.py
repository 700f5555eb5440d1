"""What determines the results of a run, as {name: value}. A resumed run must have the values of
its checkpoint, and all processes must have the same values.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import rewards
from infra import hosts
from infra.reward_worker import imported_files
from infra.settings import REPO, to_text
from model import hf, lora
from run import Run


def result_fingerprint(run: Run) -> dict[str, str]:
    """The settings, sizes and digests of files that determine the results, but not the code. They
    must be the same in a resumed run."""
    cfg, folder = run.cfg, run.folder
    values = {
        field.name.upper(): to_text(getattr(cfg, field.name))
        for field in dataclasses.fields(cfg)
        if field.metadata["fixed_on_resume"]
    }
    functions = rewards.reward_entries(cfg.reward_fn)  # each a name, or file.py:name
    values["REWARD_WEIGHTS"] = to_text(run.rollout.reward_weights)
    values["REWARD_FN"] = ",".join(Path(function).name for function in functions)
    has_schedule = cfg.lr_schedule != "constant" or cfg.warmup_ratio > 0
    schedule_end = (cfg.lr_decay_steps or cfg.steps) * has_schedule
    values["LR_DECAY_STEPS (else STEPS)"] = str(schedule_end)
    values["prompts per step"] = str(run.sizes.prompts_per_step)
    values["DTYPE"] = str(run.learner.compute.dtype)
    values["the stop tokens"] = str(run.rollout.stopping.stop_ids)
    for name in ("config.json", "tokenizer.json"):
        values[f"the model's {name}"] = short_digest((folder / name).read_bytes())
    # Of a demonstration without its source.
    prompts = (prompt[:4] if prompt.completion_ids else prompt[:2] for prompt in run.train_prompts)
    values["the tokenized prompts"] = json_digest(prompts)
    if cfg.beta > 0 or run.learner.compute.model.lora:  # a resumed run reads these weights again
        files = sorted(folder.glob("*.safetensors"))
        if run.adapters:
            files += [run.adapters / lora.CONFIG, run.adapters / hf.ADAPTERS]
        fingerprints = [file_fingerprint(file) for file in files]
        values["the model's weights"] = json_digest(fingerprints)
    for name in ("lora_base_dtype", "off_policy_mask_threshold", "answer_tags"):
        if (value := getattr(cfg, name)) != getattr(type(cfg), name):  # older checkpoints have none
            values[name.upper()] = to_text(value)
    if run.teacher_folder:
        values["the teacher's weights"] = weights_digest(run.teacher_folder)
        values["DISTILL_COEF"] = to_text(cfg.distill_coef)
        values["REWARD_COEF"] = to_text(cfg.reward_coef)
    for function in run.rollout.functions:
        values |= function.fingerprint() if function.fingerprint else {}
    if cfg.chat_template_kwargs:
        values["CHAT_TEMPLATE_KWARGS"] = json.dumps(cfg.template_kwargs(), sort_keys=True)
    values |= hosts.changed_random_numbers()
    values["ENVIRONMENT_CLASS"] = Path(cfg.environment_class).name
    if run.rollout.environments:  # the template also writes their messages
        template = run.rollout.chat_format.template()
        values["the chat template"] = short_digest(template.encode())
    sources = {"REWARD_FN": functions, "ENVIRONMENT_CLASS": [cfg.environment_class]}
    for setting, names in sources.items():
        mains = [Path(name.rpartition(":")[0]).resolve() for name in names if ":" in name]
        for main in dict.fromkeys(mains):
            for file in imported_files(main):
                label = f"the file of {setting} {os.path.relpath(file, main.parent)}"
                digest = short_digest(file.read_bytes())
                # Files in two folders may have the same relative path.
                values[label] = f"{values[label]},{digest}" if label in values else digest
    return values


def process_fingerprint(run: Run) -> dict[str, str]:
    """What must be the same on every process: the fingerprint of the results, all settings but
    those of a single process, the code, the versions and the questions of evaluations."""
    settings = {
        field.name.upper(): str(getattr(run.cfg, field.name)).replace(str(REPO), "{repo}")
        for field in dataclasses.fields(run.cfg)
        if not field.metadata["per_process"]
    }
    versions = {f"the version of {name}": x for name, x in package_versions().items()}
    code_and_data = {
        "our code": code_digest(REPO),
        "the questions of evaluations": json_digest(run.eval_prompts),
    }
    return settings | result_fingerprint(run) | code_and_data | versions


# ---- Digests and versions ------------------------------------------------------------------------


def short_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def json_digest(values: Iterable[Any]) -> str:
    """Of the JSON of a list of the values, which is never in memory as a whole."""
    digest, encode = hashlib.sha256(b"["), json.JSONEncoder(default=str).encode
    for i, value in enumerate(values):
        digest.update(((", " if i else "") + encode(value)).encode())
    digest.update(b"]")
    return digest.hexdigest()[:12]


def file_fingerprint(file: Path) -> list[Any]:
    """The name and the size of a file, and a digest of a part of it, since reading all of it would
    take too long: the first and the last MiB, and about 4096 evenly spaced bytes."""
    content = np.memmap(file, mode="r")
    pieces = content[: 2**20], content[:: max(len(content) // 4096, 1)], content[-(2**20) :]
    return [file.name, len(content), short_digest(b"".join(x.tobytes() for x in pieces))]


def weights_digest(folder: Path) -> str:
    """Of the config.json and the weights of a model's folder."""
    files = [folder / "config.json", *folder.glob("*.safetensors")]
    return json_digest([file_fingerprint(file) for file in sorted(files)])


def code_digest(root: Path) -> str:
    folders = (".", "model", "infra", "extras")
    files = [file for folder in folders for file in root.glob(f"{folder}/*.py")]
    return short_digest(b"".join(file.read_bytes() for file in sorted(files)))


def commit_of(root: Path) -> str:
    """The commit of the code in a folder, with "-dirty" if tracked files differ from it; empty if
    there is no git, and if git knows nothing of the folder."""
    describe = "describe --always --dirty --abbrev=40 --exclude=*".split()
    command = ["git", "--no-optional-locks", "-C", str(root), *describe]
    try:
        git = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return git.stdout.strip()


def package_versions() -> dict[str, str]:
    """The versions of Python and of the packages on which results depend."""
    numbers = {"python": platform.python_version()}
    for package in "jax jaxlib libtpu flax optax numpy transformers sglang-jax".split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            numbers[package] = metadata.version(package)
    return numbers
