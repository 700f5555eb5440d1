"""What comes before the first step: joins the processes, settles meshes, objective and programs.

Cheapest checks first; a user's mistakes are a ValueError with a line each. `python startup.py` only
joins the processes and prints what they see.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.backend import register_backend_factory

import config as settings
import data
import rewards
from inputs import digests_of, facts_of, read_inputs, tried, versions
from loss import Objective
from loss_pallas import block_sizes
from metrics import AccuracyRule, RunLog, check_wandb
from models import hf
from models.model import ModelConfig, param_shardings
from rollout import Sampling, prompt_width, share
from runtime import processes
from runtime.layout import ROLLOUT_ROWS, TRAIN_ROWS, Layout, local_count, make_mesh, mesh_text
from runtime.sizes import Sizes
from tools.roofline import Rows, best_tp, layer_tp, memory_bytes, num_params
from update import Compute, Optimizer


class Run(NamedTuple):
    """What is settled before the first step and does not change."""

    cfg: settings.Config
    sizes: Sizes
    folder: Path  # of the model
    digests: dict[str, str]  # of the files that results follow from
    tokenizer: Any
    stop_ids: tuple[int, ...]
    train: list[data.Prompt]
    test: list[data.Prompt]
    functions: list[rewards.RewardFunction]
    accuracy: AccuracyRule
    sampling: Sampling
    objective: Objective
    optimizer: Optimizer
    compute: Compute  # of training
    rollout: Layout


def start_jax(cfg: settings.Config) -> None:
    """Joins the other processes, if there are any, before anything touches a device."""
    cache = cfg.jax_compilation_cache_dir or ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", os.path.abspath(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if not os.environ.get("JAX_PLATFORMS") and not processes.has_tpu():
        # jax would start libtpu, if it is installed, which prints errors where there is no TPU.
        register_backend_factory("tpu", lambda: None)
    processes.join(init_timeout_s=cfg.init_timeout_s, heartbeat_timeout_s=cfg.heartbeat_timeout_s)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for a platform not installed
        if processes.lost_contact(error):
            raise
        wanted, reason = os.environ.get("JAX_PLATFORMS", ""), " ".join(str(error).split())
        raise ValueError(f"JAX_PLATFORMS={wanted}: no such device here. {reason}") from None
    print(
        f"backend={jax.default_backend()} process={jax.process_index()}/{jax.process_count()} "
        f"device_count={jax.device_count()} local_device_count={jax.local_device_count()}",
        flush=True,
    )


def set_up(cfg: settings.Config) -> Run:
    """Everything a step needs, cheapest checks first. Raises ValueError for a user's mistake."""
    lines: list[str] = []
    tried(lines, stop_if_unable_to_write, cfg)
    inputs = tried(lines, read_inputs, cfg)
    mistake = ValueError("\n".join(lines)) if lines else None
    digests = digests_of(cfg, inputs) if inputs else {}
    here = facts_of(cfg, inputs) if jax.process_count() > 1 else {}
    processes.stop_if_different(here | digests, mistake)
    sizes, functions, accuracy, folder, config, tokenizer, train, test = inputs

    longest = max(len(p.ids) for p in train + test)
    stop_if_too_long(cfg, config, longest)
    S = prompt_width(longest, cfg.global_length) - 1
    compute, rollout, why = layouts(cfg, config, sizes, S, jax.devices())
    run = Run(
        cfg=cfg,
        sizes=sizes,
        folder=folder,
        digests=digests,
        tokenizer=tokenizer,
        stop_ids=hf.stop_ids(folder, tokenizer),
        train=train,
        test=test,
        functions=functions,
        accuracy=accuracy,
        sampling=sampling_of(cfg),
        objective=objective_of(cfg),
        optimizer=optimizer_of(cfg),
        compute=compute,
        rollout=rollout,
    )
    print(
        f"model={folder} parameters={num_params(config) / 1e6:.2f}M dtype={compute.dtype} "
        f"train={len(train)} test={len(test)} prompts "
        f"rewards={cfg.reward_fn or ','.join(f.__name__ for f in functions)}\n"
        f"mesh dp,fsdp,tp train={mesh_text(compute.layout.mesh)} ({cfg.mesh_shape}) "
        f"rollout={mesh_text(rollout.mesh)} ({cfg.rollout_mesh_shape}{why})\n"
        f"rollout.backend={cfg.rollout_backend} loss.loss_type={cfg.loss_type} "
        f"loss.adv_estimator={cfg.adv_estimator} train.policy_loss_impl={compute.impl} "
        f"train.attention_impl={compute.attention_impl}",
        flush=True,
    )
    return run


def stop_if_unable_to_write(cfg: settings.Config) -> None:
    """Raises ValueError on every process, with a line for each output that process 0, which alone
    writes, could not write."""
    lines: list[str] = []
    with processes.told_by_all():
        if jax.process_index() == 0:
            tried(lines, check_wandb, cfg.wandb_mode)
            if cfg.export_hf not in ("", "none"):
                folder = Path(cfg.export_hf)
                tried(lines, stop_if_not_writable, f"EXPORT_HF={cfg.export_hf}", folder)
        if lines:
            raise ValueError("\n".join(lines))


def stop_if_not_writable(name: str, folder: Path) -> None:
    """Raises ValueError, naming the setting, if the folder cannot be made or written."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is not writable" if there.is_dir() else "is not a folder"
        raise ValueError(f"{name} cannot be written: {there} {why}")


def stop_if_too_long(cfg: settings.Config, config: ModelConfig, longest: int) -> None:
    """Raises ValueError if the model has too few positions for a prompt of `longest` tokens."""
    length, room = longest + cfg.max_length_sample, config.max_positions - cfg.max_length_sample
    if length > config.max_positions:
        shorter = f" or set MAX_PROMPT_LENGTH={room}" if room > 0 else ""
        raise ValueError(
            f"MAX_LENGTH_SAMPLE={cfg.max_length_sample} after the longest prompt makes {length} "
            f"tokens, and the model has {config.max_positions} positions; lower it{shorter}"
        )


def layouts(
    cfg: settings.Config, config: ModelConfig, sizes: Sizes, S: int, devices: Sequence[jax.Device]
) -> tuple[Compute, Layout, str]:
    """How to train and how to roll out with prompts of S tokens, on devices that need not be here,
    and why ROLLOUT_MESH_SHAPE=auto is what it is. Raises ValueError for what they cannot do."""
    device, backend = devices[0], devices[0].platform
    dtype, impl = cfg.dtype, cfg.policy_loss_impl
    if dtype == "auto":
        dtype = "float32" if backend == "cpu" else "bfloat16"
    if impl == "pallas" and (backend, dtype) != ("tpu", "bfloat16"):
        print(
            f"POLICY_LOSS_IMPL=pallas needs bfloat16 on a TPU; with {dtype} on {backend} jax runs"
        )
        impl = "jax"
    if impl == "pallas":
        block_sizes(config.hidden_size, 2, device.device_kind)  # or it says that none fits

    # Only this process's devices tell their memory; those that are not here have their chip's.
    mine = next((d for d in devices if d.process_index == jax.process_index()), device)
    local = local_count(devices)
    auto = (1, -1, layer_tp(config, memory_bytes(mine), local))
    mesh = make_mesh("MESH_SHAPE", cfg.mesh_shape, devices, auto)
    R = sizes.prompt_batch_size * cfg.num_pre_q * len(devices) // local
    G = R // share(cfg.num_pre_q, R // len(devices))
    rows = Rows(R, G, S, cfg.max_length_sample)
    tp, why = best_tp(config, mine, len(devices), local, rows, jnp.dtype(dtype).itemsize)
    rollout_mesh = make_mesh("ROLLOUT_MESH_SHAPE", cfg.rollout_mesh_shape, devices, (-1, 1, tp))
    param_shardings(config, mesh)  # or they say which size a mesh does not divide
    param_shardings(config, rollout_mesh, "ROLLOUT_MESH_SHAPE")
    why = f"; {why}" if why and cfg.rollout_mesh_shape == "auto" else ""

    attention = attention_impl(cfg.attention_impl, config, backend, mesh.shape["tp"])
    train = Layout(mesh, TRAIN_ROWS)
    compute = Compute(config, jnp.dtype(dtype), train, cfg.remat, impl, attention)
    return compute, Layout(rollout_mesh, ROLLOUT_ROWS), why


def attention_impl(setting: str, config: ModelConfig, backend: str, tp: int) -> str:
    """xla or splash; ValueError if splash is asked for and cannot be."""
    why_not = ""
    if backend != "tpu":
        why_not = f"it is a TPU kernel, and this is {backend}"
    elif config.head_dim % 64:
        why_not = f"it wants a head_dim that is a multiple of 64, not {config.head_dim}"
    elif config.num_kv_heads % tp:
        why_not = f"MESH_SHAPE's tp={tp} does not divide {config.num_kv_heads} kv heads"
    if setting == "splash" and why_not:
        raise ValueError(f"ATTENTION_IMPL=splash: {why_not}; leave it at auto")
    return setting if setting != "auto" else "xla" if why_not else "splash"


def objective_of(cfg: settings.Config) -> Objective:
    return Objective(
        loss_type=cfg.loss_type,
        eps_low=cfg.eps_low,
        eps_high=cfg.eps_high,
        delta=cfg.delta,
        importance_sampling_level=cfg.importance_sampling_level,
        beta=cfg.beta,
        kl_estimator=cfg.kl_estimator,
        kl_bias_correction=cfg.kl_bias_correction,
        entropy_coef=cfg.entropy_coef,
        is_mode=cfg.is_mode,
        is_cap=cfg.is_cap,
        max_completion_length=cfg.max_length_sample,
    )


def sampling_of(cfg: settings.Config) -> Sampling:
    return Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p)


def optimizer_of(cfg: settings.Config) -> Optimizer:
    return Optimizer(cfg.optimizer, cfg.weight_decay, cfg.clip_norm)


def what_ran(run: Run) -> dict[str, str]:
    """What this machine has made of the settings that leave a choice, by the names on record."""
    compute = run.compute
    return {
        "derived.policy_loss_impl": compute.impl,
        "derived.attention_impl": compute.attention_impl,
        "derived.dtype": str(compute.dtype),
        "derived.mesh_shape": mesh_text(compute.layout.mesh),
        "derived.rollout_mesh_shape": mesh_text(run.rollout.mesh),
    }


def open_log(
    run: Run, out: Path, first_step: int, wandb_id: str, forked_from: str = ""
) -> RunLog:  # fmt: skip
    """first_step, wandb_id: of a run that goes on; what it logged of later steps is dropped.
    forked_from: the checkpoint of another run, if this one began with that; W&B is told."""
    cfg, writes = run.cfg, jax.process_index() == 0
    wandb = None
    if cfg.wandb_mode != "disabled":
        derived = {f"derived.{name}": value for name, value in run.sizes._asdict().items()}
        asked_for = dataclasses.asdict(cfg)
        wandb = {"mode": cfg.wandb_mode, "config": asked_for | derived | what_ran(run)}
        wandb |= {"project": cfg.wandb_project or "grpo", "name": cfg.wandb_name or None}
        wandb["config"] |= {"forked_from": forked_from} if forked_from else {}
        wandb |= {"id": wandb_id, "resume": "allow"} if wandb_id else {}
    with processes.told_by_all():
        try:
            log = RunLog(out, steps=cfg.steps, first_step=first_step, writes=writes, wandb=wandb)
            if writes:
                text = settings.describe(cfg, jax.process_count(), jax.local_device_count())
                text += "".join(f"\n{name}: {value}" for name, value in what_ran(run).items())
                (out / "config.yaml").write_text(text + "\n", encoding="utf-8")
                log.line(f"output={out}")
        except OSError as error:
            raise ValueError(f"OUTPUT_DIR={out} cannot be written: {error.strerror}") from None
    return log


if __name__ == "__main__":
    with processes.ending_together():
        try:
            start_jax(settings.load(sys.argv[1:]).cfg)
        except ValueError as error:
            settings.fail(error)
        print("versions", *(f"{name}={version}" for name, version in versions().items()))
