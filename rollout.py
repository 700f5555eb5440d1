"""The phases of a rollout, in the order in which `main` calls them: prompts, completions, rewards,
and the Batch of all processes.

Dimensions: P prompts, K completions per prompt, B = P*K sequences over all processes, `count` of
them on this process. T completion tokens, padded to MAX_LENGTH_SAMPLE.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import data
from chat import ChatFormat, completion_text
from contracts import Backend, Environments
from infra.hosts import StopSignal
from infra.log import progress_bar
from infra.mistakes import UserMistake
from infra.sizes import prompt_width
from loss import AdvantageConfig, equal_groups
from model.layout import concatenate_trees, gather_processes, slice_of_process
from model.network import ComputeConfig
from model.next_token import Sampling
from objectives import ESTIMATORS
from rewards import RewardFunction, total_rewards
from rows import Batch
from sampling import Completions, Stopping


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled and rewarded, in training steps and in evaluations."""

    compute: ComputeConfig  # how the sampler computes the model
    sampling: Sampling  # in training steps
    eval_sampling: Sampling  # in evaluations
    stopping: Stopping
    chat_format: ChatFormat  # with the tokenizer
    functions: list[RewardFunction]
    reward_weights: tuple[float, ...]  # the weight of each function in the total reward
    environments: Environments | None  # None: a completion is a single turn of the policy
    max_turns: int  # the most turns of the policy in a completion
    global_length: int  # prompts are padded to at least this S
    max_prompt_width: int  # S+1 for the longest prompt of the run
    stop_signal: StopSignal


# ---- Completions ---------------------------------------------------------------------------------


def prompts_of_round(
    rollout: RolloutConfig, pool: list[data.Prompt], P: int, K: int, round_number: int, seed: int
) -> list[data.Prompt]:
    """[P] the prompts of a round of sampling, from the pool (the training split), the same on every
    process. With an environment their episodes begin, numbered from 1 (evaluations: 0)."""
    indices = data.batch_indices(len(pool), P, round_number, seed)  # [P]
    prompts = [pool[i] for i in indices]
    if rollout.environments is None:
        return prompts
    T, model = rollout.stopping.max_length_sample, rollout.compute.model
    return rollout.environments.begin_episodes(prompts, round_number + 1, K, model, T)


def sample_completions(
    rollout: RolloutConfig,
    backend: Backend,
    prompts: list[data.Prompt],
    key: jax.Array,
    sampling: Sampling,
    *,
    completions_per_prompt: int,
    prompts_per_pass: int,
    title: str,
) -> Completions:
    """The completions of the prompts that belong to this process, pass by pass.

    prompts: of all processes. prompts_per_pass: on this process. title: of the progress bar.
    """
    width = prompt_width(max(len(prompt.ids) for prompt in prompts), rollout.global_length)  # S+1
    local_prompts, passes = slice_of_process(prompts), []
    total = len(local_prompts) * completions_per_prompt
    sequence_ids = np.arange(total, dtype=np.int32) + jax.process_index() * total  # [count]
    sequences_per_pass = prompts_per_pass * completions_per_prompt

    def run_pass(
        ids: list[list[int]], width: int, sequence_ids: np.ndarray, earlier: np.ndarray | None
    ) -> Completions:
        rollout.stop_signal.raise_if_stopped()
        prompt_ids, prompt_mask = data.pad_prompts(ids, width, rollout.stopping.pad_id)
        return backend.generate(prompt_ids, prompt_mask, sequence_ids, key, sampling, earlier)

    with progress_bar(title, total, "completions") as bar:
        for i in range(0, len(local_prompts), prompts_per_pass):
            ids = [prompt.ids for prompt in local_prompts[i : i + prompts_per_pass]]
            first = i * completions_per_prompt
            ids_of_pass = sequence_ids[first : first + sequences_per_pass]
            passes.append(run_pass(ids, width, ids_of_pass, None))
            begin_rewards(rollout, local_prompts[i : i + prompts_per_pass], passes[-1])
            bar.update(sequences_per_pass)
    completions = concatenate_trees(passes)
    if rollout.environments is None:
        return completions
    return rollout.environments.take_turns(
        run_pass,
        local_prompts,
        completions,
        sequences_per_pass,
        stopping=rollout.stopping,
        max_turns=rollout.max_turns,
        max_prompt_width=rollout.max_prompt_width,
    )


# ---- Texts and rewards ---------------------------------------------------------------------------


def completion_texts(
    rollout: RolloutConfig, prompts: Sequence[data.Prompt], completions: Completions | Batch
) -> list[str]:
    """The text of each completion. prompts: each once, in the order of their completions."""
    arrays = completions.completion_ids, completions.sampled_mask, completions.lengths
    K, tokenizer = len(completions.lengths) // len(prompts), rollout.chat_format.tokenizer
    return [
        completion_text(prompts[i // K].ids, *tokens, tokenizer, rollout.stopping.stop_ids)
        for i, tokens in enumerate(zip(*arrays, strict=True))
    ]


def begin_rewards(
    rollout: RolloutConfig, prompts: Sequence[data.Prompt], completions: Completions
) -> None:
    """Calls `prefetch` of the files of REWARD_FN that define it, for a pass. Raises UserMistake."""
    calls = [f.prefetch for f in rollout.functions if f.prefetch]
    if calls and rollout.environments is None:  # else the worker is busy with them
        texts, columns = reward_arguments(rollout, prompts, completions)
        for prefetch in {call.__name__: call for call in calls}.values():  # one of each file
            prefetch(texts, **columns)


def reward_completions(
    rollout: RolloutConfig,
    prompts: Sequence[data.Prompt],
    completions: Completions,
    step: int = 0,
    max_steps: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The weighted total rewards [count] of the completions of these prompts, and the rewards of
    each function [count, functions], both float64; NaN: none. step: steps taken, of max_steps."""
    texts, columns = reward_arguments(rollout, prompts, completions)
    columns["trainer_state"] = {"global_step": step, "max_steps": max_steps}
    K = len(texts) // len(prompts)
    return total_rewards(texts, columns, rollout.functions, rollout.reward_weights, K)


def reward_arguments(
    rollout: RolloutConfig, prompts: Sequence[data.Prompt], completions: Completions
) -> tuple[list[str], dict[str, Any]]:
    """The texts of these completions and {column: values}, as reward functions get them."""
    texts = completion_texts(rollout, prompts, completions)
    K = len(texts) // len(prompts)
    columns: dict[str, Any] = {
        name: [prompt.columns.get(name) for prompt in prompts for _ in range(K)]
        for name in prompts[0].columns
    }
    ids, is_sampled = completions.completion_ids, completions.sampled_mask > 0
    columns["completion_ids"] = [x[mask].tolist() for x, mask in zip(ids, is_sampled, strict=True)]
    if rollout.environments is not None:
        columns["environments"] = completions.sequence_ids.tolist()
    return texts, columns


# ---- The batch of all processes ------------------------------------------------------------------


def gather_batch(
    rollout: RolloutConfig,
    prompts: list[data.Prompt],
    completions: Completions,
    rewards: np.ndarray,
    function_rewards: np.ndarray,
) -> Batch:
    """The sequences of all processes as a Batch, on every process.

    prompts: of all processes, each once. completions [count, T], rewards [count] and
    function_rewards [count, functions]: of this process.
    """
    arrays = {name: x for name, x in completions._asdict().items() if x is not None}
    del arrays["sequence_ids"]
    arrays |= {"rewards": rewards, "function_rewards": function_rewards}
    arrays["advantages"] = np.nan * rewards
    # A completion has stopped if its last token is a stop token that the policy has sampled.
    last = completions.lengths[:, None] - 1
    last_ids = np.take_along_axis(completions.completion_ids, last, axis=1)[:, 0]  # [count]
    is_sampled = np.take_along_axis(completions.sampled_mask, last, axis=1)[:, 0] > 0  # [count]
    arrays["stopped"] = np.isin(last_ids, rollout.stopping.stop_ids) & is_sampled
    gathered = gather_processes(arrays)
    return Batch(prompts, completion_mask=gathered["sampled_mask"], **gathered)


def has_enough_groups(
    rounds: list[Batch], advantage_config: AdvantageConfig, max_rounds: int
) -> bool:
    """Whether a step has sampled enough rounds: max_rounds, or so many that P groups have rewards
    that differ. All processes know all rewards, and so agree."""
    if not rounds or len(rounds) == max_rounds:
        return bool(rounds)
    are_equal = have_equal_rewards(Batch.concatenate(rounds), advantage_config)  # [rounds * P]
    return bool((~are_equal).sum() >= len(rounds[0].prompts))


def have_equal_rewards(batch: Batch, advantage_config: AdvantageConfig) -> np.ndarray:
    """[P] bool: whether all rewards of a group are equal. If the estimator compares the rewards of
    each function, those of each function whose weight is not 0 have to be equal."""
    is_compared = np.asarray(advantage_config.weights) != 0  # [functions]
    by_function = ESTIMATORS[advantage_config.estimator].by_function
    rewards = batch.function_rewards[:, is_compared] if by_function else batch.rewards
    return equal_groups(rewards, batch.completions_per_prompt())


def choose_groups(rounds: list[Batch], advantage_config: AdvantageConfig) -> Batch:
    """P of the sampled groups, preferably with rewards that differ, in their order. Raises
    UserMistake if the estimator cannot take the rewards."""
    batch = rounds[0]
    if len(rounds) > 1:
        sampled = Batch.concatenate(rounds)
        are_equal = have_equal_rewards(sampled, advantage_config)  # [rounds * P]
        # A stable sort puts the groups whose rewards differ first.
        order = np.argsort(are_equal, kind="stable")
        batch = sampled.select_groups(np.sort(order[: len(batch.prompts)]))
    if ESTIMATORS[advantage_config.estimator].needs_rewards_from_0 and (batch.rewards < 0).any():
        raise UserMistake(
            f"ADV_ESTIMATOR={advantage_config.estimator} needs rewards of at least 0, and one is "
            f"{np.nanmin(batch.rewards):g}; use another REWARD_FN or estimator"
        )
    return batch
