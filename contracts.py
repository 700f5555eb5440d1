"""What a rollout needs of a backend and of environments. Those of a fork have these methods, and
inherit from no class of this project; a backend returns its Completions.

Dimensions: `count` completions of a pass, S+1 padded prompt tokens, T completion tokens.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import jax
import numpy as np

from chat import ChatFormat
from data import Prompt
from model.next_token import Sampling
from model.params import ModelConfig, Params
from sampling import Completions, Stopping

# A pass of a backend. It gets the ids of prompts, their padded length S+1, and sequence_ids [count]
# and earlier_tokens [count] or None, as `generate` has them.
Pass: TypeAlias = Callable[[list[list[int]], int, np.ndarray, np.ndarray | None], Completions]


class Backend(Protocol):
    """What samples completions: NaiveBackend of sampling.py, SglangBackend of extras/sglang.py."""

    def update_weights(self, params: Params) -> None:
        """Takes the weights of the policy, which stay until `release`."""

    def generate(
        self,
        prompt_ids: np.ndarray,
        prompt_mask: np.ndarray,
        sequence_ids: np.ndarray,
        key: jax.Array,
        sampling: Sampling,
        earlier_tokens: np.ndarray | None = None,
    ) -> Completions:
        """The completions of one pass, see NaiveBackend.generate."""

    def release(self) -> None:
        """Frees the memory of the weights until the next update_weights."""

    def close(self) -> None:
        """Ends what the backend has started."""


class Environments(Protocol):
    """The environments of the completions of a run, such as those of extras/turns.py."""

    chat_format: ChatFormat  # with the tools of the environments
    has_reward: bool  # whether get_reward is one of the reward functions
    teacher: tuple[str, ModelConfig] | None  # TEACHER_PATH and its model, which sees the prompts

    def begin_episodes(
        self,
        prompts: list[Prompt],
        round_number: int,
        completions_per_prompt: int,
        model: ModelConfig,
        max_length_sample: int,
    ) -> list[Prompt]:
        """Begins an episode for each completion. Returns the prompts, of all processes as those
        that it gets, with what the environments add to them."""

    def take_turns(
        self,
        run_pass: Pass,
        prompts: Sequence[Prompt],
        completions: Completions,
        sequences_per_pass: int,
        *,
        stopping: Stopping,
        max_turns: int,
        max_prompt_width: int,
    ) -> Completions:
        """Adds the later turns to the completions of this process, which have their first."""

    def get_reward(
        self, completions: list[str], environments: Sequence[int], **columns: list
    ) -> list[float | None]:
        """The rewards of these texts. environments: the sequence_ids of the completions."""
