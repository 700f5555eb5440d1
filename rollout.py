"""The completions of a step and their rewards: rounds of sampling, and the groups to learn from.

Dimensions: P prompts of a step, K completions per prompt, B = P*K sequences over all processes, b
of them on this process, T completion tokens, padded to MAX_LENGTH_SAMPLE.
"""

from typing import NamedTuple

import jax
import numpy as np

import data
import rewards
from loss import equal_groups
from models.model import Params
from run import Run
from runtime.layout import gather_processes
from runtime.processes import StopSignal
from runtime.run_log import Clock
from runtime.sizes import prompt_width
from sampling import Completions, PaddedPrompts, generate


class StepResults(NamedTuple):
    """What came of every sequence of a step, of all processes, on every process."""

    rewards: np.ndarray  # [B] float64, weighted total
    prompt_lengths: np.ndarray  # [B] tokens
    completion_lengths: np.ndarray  # [B] tokens, stop token included
    stopped: np.ndarray  # [B] 1: a stop token ended it, 0: it was cut off
    per_function: np.ndarray  # [B, functions] float64, NaN where a function does not apply


class Groups(NamedTuple):
    """K completions of each of P prompts, with their rewards; a prompt's sequences are adjacent."""

    prompts: list[data.Prompt]  # [P] on every process
    completions: Completions  # [b, T] of this process
    results: StepResults  # [B] of all processes


class Sampled(NamedTuple):
    """The groups of a step, and what was sampled to find them."""

    groups: Groups
    num_rounds: int
    equal: np.ndarray  # [num_rounds * P] bool: all rewards of this group are equal
    rewards: np.ndarray  # [num_rounds * B] float64


def sample_groups(
    run: Run, decoder: Params, stop: StopSignal, key: jax.Array, first_round: int, clock: Clock
) -> Sampled:
    """The P groups of a step: K completions of each of P prompts, with their rewards.

    With DYNAMIC_SAMPLING it samples P more prompts until P groups have rewards that differ, at most
    DYNAMIC_SAMPLING_MAX_ROUNDS times. decoder: the weights laid out for decoding. first_round: how
    many rounds the run has sampled before; the number of a round decides its prompts and what is
    drawn.
    """
    rounds: list[Groups] = []
    while not enough(run, rounds):
        rounds.append(_sample_round(run, decoder, stop, key, first_round + len(rounds), clock))
    rewarded = np.concatenate([groups.results.rewards for groups in rounds])
    return Sampled(
        groups=choose_groups(run, rounds),
        num_rounds=len(rounds),
        equal=have_equal_rewards(run, rounds),
        rewards=rewarded,
    )


def enough(run: Run, rounds: list[Groups]) -> bool:
    """True after one round or, with DYNAMIC_SAMPLING, once the rewards of P groups differ, or after
    DYNAMIC_SAMPLING_MAX_ROUNDS. All processes see all rewards, so that they agree."""
    limit = run.cfg.dynamic_sampling_max_rounds if run.cfg.dynamic_sampling else 1
    if not rounds or len(rounds) == limit:
        return bool(rounds)
    return (~have_equal_rewards(run, rounds)).sum() >= run.sizes.prompts_per_step


def have_equal_rewards(run: Run, rounds: list[Groups]) -> np.ndarray:
    """[rounds * P] bool: all rewards of the group are equal; for gdpo, those of each function that
    has a weight."""
    results, counts = [groups.results for groups in rounds], np.asarray(run.weights) != 0
    gdpo = run.cfg.adv_estimator == "gdpo"
    compared = [x.per_function[:, counts] if gdpo else x.rewards for x in results]
    return np.concatenate([equal_groups(x, run.cfg.num_pre_q) for x in compared])


def _sample_round(
    run: Run, decoder: Params, stop: StopSignal, key: jax.Array, number: int, clock: Clock
) -> Groups:
    """The groups of round `number` of the run, from 0."""
    P, K = run.sizes.prompts_per_step, run.cfg.num_pre_q
    indices = data.batch_indices(len(run.train_prompts), P, number, run.cfg.seed)  # [P]
    prompts = [run.train_prompts[i] for i in indices]
    completions = _complete_prompts(run, decoder, stop, prompts, jax.random.fold_in(key, number))
    clock.lap("rollout_generate")

    local = prompts[run.local_prompts()]  # [b/K]
    totals, per_function = reward_completions(run, completions, local)  # [b], [b, functions]
    clock.lap("reward")
    prompt_lengths = np.repeat([len(prompt.ids) for prompt in local], K)
    stopped = np.isin(completions.last_ids(), run.stopping.stop_ids)
    columns = [totals, prompt_lengths, completions.lengths(), stopped, *per_function.T]
    table = gather_processes(np.column_stack(columns).astype(np.float64))  # [B, 4 + functions]
    clock.lap("advantages")
    return Groups(prompts, completions, StepResults(*table[:, :4].T, table[:, 4:]))


def choose_groups(run: Run, rounds: list[Groups]) -> Groups:
    """P of the sampled groups, in their order: all whose rewards differ, and others if needed."""
    if len(rounds) == 1:
        return rounds[0]
    P, K = run.sizes.prompts_per_step, run.cfg.num_pre_q
    chosen = np.sort(
        np.argsort(have_equal_rewards(run, rounds), kind="stable")[:P]
    )  # [P] of rounds * P groups
    sequences = (chosen[:, None] * K + np.arange(K)).reshape(-1)  # [B] of rounds * B
    joined = [np.concatenate(x) for x in zip(*(groups.results for groups in rounds), strict=True)]
    # A group may be trained on another process than the one that sampled it.
    everywhere = [
        np.concatenate([gather_processes(x) for x in arrays])  # [rounds * B, T]
        for arrays in zip(*(groups.completions for groups in rounds), strict=True)
    ]
    sampled = [prompt for groups in rounds for prompt in groups.prompts]  # [rounds * P]
    return Groups(
        [sampled[group] for group in chosen],
        Completions(*(x[sequences[run.local_sequences()]] for x in everywhere)),
        StepResults(*(x[sequences] for x in joined)),
    )


def _complete_prompts(
    run: Run, decoder: Params, stop: StopSignal, prompts: list[data.Prompt], key: jax.Array
) -> Completions:
    """K completions of each of this process's part of P prompts, in passes of the rollout."""
    K, size, pad_id = run.cfg.num_pre_q, run.sizes.prompt_batch_size, run.stopping.pad_id
    width = prompt_width(max(len(prompt.ids) for prompt in prompts), run.cfg.global_length)
    local = run.local_prompts()
    passes = []
    for first in range(local.start, local.stop, size):
        stop.check()
        ids = [prompt.ids for prompt in prompts[first : first + size]]
        passes.append(
            generate(
                decoder,
                run.rollout,
                PaddedPrompts(*data.pad_prompts(ids, width, pad_id)),
                np.arange(first * K, (first + size) * K, dtype=np.int32),
                key,
                sampling=run.sampling,
                stopping=run.stopping,
            )
        )
    return Completions(*(np.concatenate(arrays) for arrays in zip(*passes, strict=True)))


def reward_completions(
    run: Run, completions: Completions, prompts: list[data.Prompt]
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted rewards and the rewards of each function, [n] and [n, functions] for n completions;
    NaN where none applies.

    A tag that the chat template has opened belongs to the text that is rewarded, but not to the
    tokens of the completion. Raises UserMistake.
    """
    texts = completions.texts(run.tokenizer)
    per_prompt = len(texts) // len(prompts)
    opened = [data.opened_tag(prompt, run.tokenizer) for prompt in prompts]
    texts = [opened[i // per_prompt] + text for i, text in enumerate(texts)]
    columns = {
        name: [prompt.columns.get(name) for prompt in prompts for _ in range(per_prompt)]
        for name in prompts[0].columns
    }
    columns["completion_ids"] = completions.ids()
    return rewards.total_rewards(texts, columns, run.functions, run.weights)
