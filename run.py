"""What a run has from its start to its end: settings, inputs, and how its programs compute."""

import dataclasses
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import data
import rewards
from config import Config
from loss import Objective
from models.model import Compute, ModelConfig, Params
from runtime.sizes import Sizes
from sampling import Completions, PaddedPrompts, Sampling, Stopping
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
    return Sampling(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p)


def optimizer_of(cfg: Config) -> Optimizer:
    return Optimizer(name=cfg.optimizer, weight_decay=cfg.weight_decay, clip_norm=cfg.clip_norm)


def reference_dtype(cfg: Config, dtype: Any) -> Any:
    """The dtype of the reference; one that follows the policy in small steps needs float32.

    dtype: of training.
    """
    return jnp.dtype("float32") if cfg.ref_sync_steps else dtype
