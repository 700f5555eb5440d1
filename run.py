"""What a run has from its start to its end: settings, inputs, and how its programs compute."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import data
import rewards
from config import Config
from loss import Objective
from loss_pallas import block_sizes
from models.attention import LANES, MOST_PLACES
from models.draw import Sampling
from models.model import Compute, ModelConfig, Params
from models.placement import (
    Workload,
    attention_flops,
    choose_attention,
    choose_layer_loop,
    choose_layouts,
    layer_weights,
)
from runtime.layout import local_count
from runtime.mistakes import UserMistake
from runtime.packing import Limits
from runtime.sizes import Sizes, prompt_share
from sampling import Completions, PaddedPrompts, Stopping
from update import Optimizer


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a process reads and derives before there are meshes and weights."""

    cfg: Config
    sizes: Sizes
    functions: list[rewards.RewardFunction]
    weights: tuple[float, ...]  # of the functions in the total reward
    accuracy: rewards.AccuracyRule
    folder: Path  # of the model
    model: ModelConfig
    tokenizer: Any
    train_prompts: list[data.Prompt]
    eval_prompts: list[data.Prompt]  # empty for a run that never evaluates


@dataclasses.dataclass(frozen=True)
class Run(Inputs):
    """The inputs and what startup.py makes of them before the first step; it does not change."""

    sampling: Sampling
    stopping: Stopping
    objective: Objective
    optimizer: Optimizer
    training: Compute
    rollout: Compute
    limits: Limits  # of the rows of an update
    made_with: dict[str, str]  # all settings and files that decide the results, but not the code

    def local_sequences(self) -> slice:
        """This process's part, b, of the B sequences of a step."""
        b = self.sizes.local_batch
        return slice(jax.process_index() * b, (jax.process_index() + 1) * b)

    def local_prompts(self) -> slice:
        """This process's part of the P prompts of a step."""
        sequences = self.local_sequences()
        return slice(sequences.start // self.cfg.num_pre_q, sequences.stop // self.cfg.num_pre_q)


class Backend(Protocol):
    """What samples completions, as ROLLOUT_BACKEND names it: token ids in, token ids out."""

    def update_weights(self, params: Params) -> None:
        """Takes these weights, before the rollout passes of a step or of an evaluation."""

    def generate(
        self, prompts: PaddedPrompts, sequence_ids: np.ndarray, key: jax.Array, sampling: Sampling
    ) -> Completions:
        """The completions of one rollout pass, as generate in sampling.py describes them."""

    def release(self) -> None:
        """Frees the memory that the update needs."""

    def close(self) -> None:
        """Ends what the backend has started."""


# ---- From settings -------------------------------------------------------------------------------


def objective_of(cfg: Config) -> Objective:
    """The settings of policy_loss; all but one have the same names in Objective as in Config."""
    same_names = [name for name in Objective._fields if name != "max_completion_length"]
    settings = {name: getattr(cfg, name) for name in same_names}
    return Objective(**settings, max_completion_length=cfg.max_length_sample)


def sampling_of(cfg: Config) -> Sampling:
    filters = {"top_k": cfg.top_k, "top_p": cfg.top_p, "min_p": cfg.min_p}
    return Sampling(cfg.temperature, **filters, replay=cfg.replays())


def optimizer_of(cfg: Config) -> Optimizer:
    return Optimizer(name=cfg.optimizer, weight_decay=cfg.weight_decay, clip_norm=cfg.clip_norm)


def limits_of(cfg: Config, sizes: Sizes, training: Compute, processes: int, S: int) -> Limits:
    """The limits of packed rows. S: padded tokens of the longest prompt without the last one."""
    model, X = training.model, training.layout.batch_shards
    matmuls = 2 * model.num_layers * layer_weights(model)  # FLOPs of a token
    return Limits(
        shards=X,
        sequences=sizes.micro_batch_size * processes // X,
        completions=cfg.num_pre_q,
        longest_completion=cfg.max_length_sample,
        longest_prompt=S,
        shortest_prompt=cfg.global_length,
        pack=cfg.packs(),
        unit=LANES if training.attention_impl == "splash" else 1,
        row_tokens=MOST_PLACES if training.attention_impl == "splash" else sys.maxsize,
        matmul_keys=matmuls / attention_flops(model, 1),
    )


def stop_if_too_wide_for_pallas(D: int, device_kind: str) -> None:
    """Raises UserMistake if POLICY_LOSS_IMPL=pallas cannot run with hidden states of width D."""
    try:
        block_sizes(D, 2, device_kind)
    except ValueError as error:  # loss_pallas.py knows no UserMistake
        raise UserMistake(str(error)) from None


def how_to_compute(
    cfg: Config, model: ModelConfig, sizes: Sizes, S: int, devices: Sequence[jax.Device]
) -> tuple[Compute, Compute, str]:
    """How training and rollout are computed, and why ROLLOUT_MESH_SHAPE=auto is what it is.

    S: prompt tokens. devices: they need not exist on this machine. Raises UserMistake for settings
    that the devices or the model cannot do.
    """
    platform = devices[0].platform
    dtype, impl = cfg.dtype, cfg.policy_loss_impl
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if impl == "pallas" and (platform, dtype) != ("tpu", "bfloat16"):
        print(
            f"POLICY_LOSS_IMPL=pallas needs bfloat16 on a TPU; with {dtype} on {platform} jax runs"
        )
        impl = "jax"
    if impl == "pallas":
        stop_if_too_wide_for_pallas(model.hidden_size, devices[0].device_kind)

    processes = len(devices) // local_count(devices)
    R = sizes.prompt_batch_size * cfg.num_pre_q * processes
    G = R // prompt_share(cfg.num_pre_q, R // len(devices))
    layouts = choose_layouts(
        model,
        devices,
        Workload(R, G, S, cfg.max_length_sample),
        jnp.dtype(dtype).itemsize,
        mesh_shape=cfg.mesh_shape,
        rollout_mesh_shape=cfg.rollout_mesh_shape,
    )
    tp = layouts.train.mesh.shape["tp"]
    T, of_shard = cfg.max_length_sample, sizes.micro_batch_size * processes
    share = prompt_share(cfg.num_pre_q, of_shard // layouts.train.batch_shards)
    row = sum(-(-n // LANES) * LANES for n in (S, share * T))
    attention = choose_attention(cfg.attention_impl, model, platform, tp, row, T)
    loop, rollout_loop = (
        choose_layer_loop(cfg.layer_loop, platform, remat) for remat in (cfg.remat, "none")
    )
    training = Compute(
        model,
        dtype=jnp.dtype(dtype),
        layout=layouts.train,
        remat=cfg.remat,
        policy_loss_impl=impl,
        attention_impl=attention,
        layer_loop=loop,
    )
    # The rollout has no backward.
    rollout = training._replace(layout=layouts.rollout, remat="none", layer_loop=rollout_loop)
    if cfg.rollout_backend == "sglang_jax":  # this is the copy of the weights that the engine gets
        name = dtype if cfg.sglang_jax_dtype == "auto" else cfg.sglang_jax_dtype
        rollout = rollout._replace(layout=layouts.train, dtype=jnp.dtype(name), layer_loop="unroll")
        return training, rollout, "; the engine has all devices on tp"
    return training, rollout, f"; {layouts.reason}" if layouts.reason else ""


def reference_dtype(cfg: Config, dtype: Any) -> Any:
    """The dtype of the reference; one that follows the policy in small steps needs float32.

    dtype: of training.
    """
    return jnp.dtype("float32") if cfg.ref_sync_steps else dtype
