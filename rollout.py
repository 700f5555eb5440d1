"""The rollout: completions of the prompts of a step, their texts and rewards, and the batch of all
processes, in the order in which `main` of train_grpo.py asks for them.

Dimensions: P prompts of a step, K completions per prompt, B = P*K sequences over all processes,
local_batch sequences of this process. T completion tokens: padded to MAX_LENGTH_SAMPLE, and from
choose_groups on to the longest completion.
"""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import data
from config import Config
from infra.hosts import StopSignal
from infra.log import progress_bar
from infra.mistakes import UserMistake
from infra.sizes import prompt_width
from loss import equal_groups
from model.layout import concatenate_trees, gather_processes
from model.network import Compute
from model.next_token import Sampling
from rewards import RewardFunction, total_rewards
from rows import Batch, Limits
from sampling import Backend, Completions, Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from extras.turns import Environments
    from startup import Run


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What completes prompts and rewards the completions, in steps and in evaluations."""

    compute: Compute  # of the weights that sample
    sampling: Sampling  # of a training step
    eval_sampling: Sampling
    stopping: Stopping
    tokenizer: "PreTrainedTokenizerBase"
    system_prompt: str
    functions: list[RewardFunction]
    reward_weights: tuple[float, ...]  # of each function in the total reward
    environments: "Environments | None"  # None: a completion is a single turn of the policy
    max_turns: int  # of the policy in a completion
    min_prompt_width: int  # padded tokens: GLOBAL_LENGTH
    max_prompt_width: int  # padded tokens of the longest prompt of the run
    stop: StopSignal


# ---- Completions ---------------------------------------------------------------------------------


def prompts_of_round(run: "Run", round_number: int) -> list[data.Prompt]:
    """[P] the prompts of a round of sampling, counted from 0 over the run; the same on every
    process. With an environment their episodes begin."""
    P, K = run.sizes.prompts_per_step, run.cfg.num_pre_q
    indices = data.batch_indices(len(run.train_prompts), P, round_number, run.cfg.seed)  # [P]
    prompts = [run.train_prompts[i] for i in indices]
    if run.rollout.environments is None:
        return prompts
    return run.rollout.environments.begin_episodes(run.rollout, prompts, round_number + 1, K)


def complete_prompts(
    run: "Run", backend: Backend, prompts: list[data.Prompt], key: jax.Array
) -> Completions:
    """K completions of each of this process's part of P prompts."""
    return complete(
        run.rollout,
        backend,
        prompts,
        key,
        run.rollout.sampling,
        completions_per_prompt=run.cfg.num_pre_q,
        prompts_per_pass=run.sizes.prompt_batch_size,
        title="rollout",
    )


def complete(
    rollout: Rollout,
    backend: Backend,
    prompts: list[data.Prompt],
    key: jax.Array,
    sampling: Sampling,
    *,
    completions_per_prompt: int,
    prompts_per_pass: int,
    title: str,
) -> Completions:
    """The completions of this process's part of the prompts.

    prompts: of all processes. prompts_per_pass: of this process. title: of the progress bar.
    """
    longest = max(len(prompt.ids) for prompt in prompts)
    width = prompt_width(longest, rollout.min_prompt_width)  # S+1
    local_prompts, passes = slice_of_process(prompts), []
    total = len(local_prompts) * completions_per_prompt
    sequence_ids = np.array(
        slice_of_process(range(len(prompts) * completions_per_prompt)), np.int32
    )  # [local_batch]
    sequences_per_pass = prompts_per_pass * completions_per_prompt
    with progress_bar(title, total, "completions") as bar:
        for i in range(0, len(local_prompts), prompts_per_pass):
            rollout.stop.raise_if_stopped()
            ids = [prompt.ids for prompt in local_prompts[i : i + prompts_per_pass]]
            prompt_ids, prompt_mask = data.pad_prompts(ids, width, rollout.stopping.pad_id)
            first = i * completions_per_prompt
            ids_of_pass = sequence_ids[first : first + sequences_per_pass]
            passes.append(backend.generate(prompt_ids, prompt_mask, ids_of_pass, key, sampling))
            bar.update(sequences_per_pass)
    completions = concatenate_trees(passes)
    if rollout.environments is None:
        return completions
    return rollout.environments.take_turns(
        rollout, backend, local_prompts, completions, key, sampling, sequences_per_pass
    )


# ---- Texts and rewards ---------------------------------------------------------------------------


def texts_of(
    rollout: Rollout, prompts: list[data.Prompt], completions: Completions | Batch
) -> list[str]:
    """The text of each completion; the completions of a prompt are adjacent."""
    count = len(completions.lengths)
    return [text_of(rollout, prompts, completions, i) for i in range(count)]


def text_of(
    rollout: Rollout, prompts: list[data.Prompt], completions: Completions | Batch, i: int
) -> str:
    """The text of the last turn of completion i.

    A tag that the chat template has opened belongs to the text that is rewarded, but not to the
    tokens of the completion.
    """
    *_, ids = (ids for is_drawn, ids in parts_of(completions, i) if is_drawn)
    prompt = prompts[i * len(prompts) // len(completions.lengths)]
    return data.open_think_tag(prompt, rollout.tokenizer) + decode_part(rollout, ids)


def decode_part(rollout: Rollout, ids: list[int]) -> str:
    """The text of a part of a completion, with its special tokens (a <tool_call> may be one), but
    without the stop token that ends it."""
    ends = ids[-1] in rollout.stopping.stop_ids
    return rollout.tokenizer.decode(ids[:-1] if ends else ids)


def parts_of(completions: Completions | Batch, i: int) -> list[tuple[int, list[int]]]:
    """The tokens of completion i, turn by turn: (1, tokens that the policy has drawn), then
    (0, tokens of the environment's message), and so on."""
    used = slice(completions.lengths[i])
    ids, drawn = (x[i, used].tolist() for x in (completions.completion_ids, completions.drawn_mask))
    parts = itertools.groupby(zip(drawn, ids, strict=True), key=operator.itemgetter(0))
    return [(is_drawn, [token for _, token in part]) for is_drawn, part in parts]


def reward_completions(
    rollout: Rollout, prompts: list[data.Prompt], completions: Completions
) -> tuple[np.ndarray, np.ndarray]:
    """The weighted total rewards [local_batch] of the completions of these prompts, and the rewards
    of each function [local_batch, functions], both float64; NaN where no function applies. Raises
    UserMistake."""
    texts = texts_of(rollout, prompts, completions)
    per_prompt = len(texts) // len(prompts)
    columns: dict[str, list[Any]] = {
        name: [prompt.columns.get(name) for prompt in prompts for _ in range(per_prompt)]
        for name in prompts[0].columns
    }
    ids, drawn = completions.completion_ids, completions.drawn_mask > 0
    columns["completion_ids"] = [x[mask].tolist() for x, mask in zip(ids, drawn, strict=True)]
    if rollout.environments is not None:
        columns["environments"] = completions.sequence_ids.tolist()
    return total_rewards(texts, columns, rollout.functions, rollout.reward_weights)


# ---- The batch of all processes ------------------------------------------------------------------


def gather_batch(
    prompts: list[data.Prompt],
    completions: Completions,
    totals: np.ndarray,
    per_function: np.ndarray,
    stop_ids: tuple[int, ...],
) -> Batch:
    """The batch of all processes, on every process.

    prompts: of all processes, each once. completions [local_batch, T], totals [local_batch] and
    per_function [local_batch, functions]: of this process's part of them.
    """
    arrays = {name: x for name, x in completions._asdict().items() if x is not None}
    del arrays["sequence_ids"]
    arrays |= {"rewards": totals, "per_function": per_function}
    arrays["completion_mask"] = completions.drawn_mask
    # A completion has stopped if the policy has drawn a stop token as its last token.
    last = completions.lengths[:, None] - 1
    last_ids = np.take_along_axis(completions.completion_ids, last, axis=1)[:, 0]  # [local_batch]
    is_drawn = np.take_along_axis(completions.drawn_mask, last, axis=1)[:, 0] > 0  # [local_batch]
    arrays["stopped"] = np.isin(last_ids, stop_ids) & is_drawn
    return Batch(prompts, **gather_processes(arrays))


def has_enough_groups(cfg: Config, rounds: list[Batch], reward_weights: Sequence[float]) -> bool:
    """Whether a step needs no more rounds of sampling: it needs one without DYNAMIC_SAMPLING, and
    with it as many as give P groups with rewards that differ, at most
    DYNAMIC_SAMPLING_MAX_ROUNDS. All processes see all rewards, so they agree."""
    if not rounds:
        return False
    if not cfg.dynamic_sampling or len(rounds) == cfg.dynamic_sampling_max_rounds:
        return True
    have_signal = ~have_equal_rewards(rounds, cfg.adv_estimator, reward_weights)  # [rounds * P]
    return bool(have_signal.sum() >= len(rounds[0].prompts))


def have_equal_rewards(
    rounds: list[Batch], adv_estimator: str, reward_weights: Sequence[float]
) -> np.ndarray:
    """[rounds * P] bool: whether all rewards of a group are equal; for gdpo, all rewards of each
    function that has a weight."""
    if adv_estimator == "gdpo":
        has_weight = np.asarray(reward_weights) != 0  # [functions]
        compared = [batch.per_function[:, has_weight] for batch in rounds]
    else:
        compared = [batch.rewards for batch in rounds]
    K = rounds[0].completions_per_prompt()
    return np.concatenate([equal_groups(x, K) for x in compared])


def choose_groups(
    rounds: list[Batch], adv_estimator: str, reward_weights: Sequence[float], limits: Limits
) -> Batch:
    """P of the sampled groups, in their order: those whose rewards differ, and others if these are
    too few. T holds the longest completion. Raises UserMistake if the estimator cannot take the
    rewards."""
    batch = rounds[0]
    if len(rounds) > 1:
        # A stable sort puts the groups whose rewards differ first.
        order = np.argsort(have_equal_rewards(rounds, adv_estimator, reward_weights), kind="stable")
        chosen = np.sort(order[: len(batch.prompts)])  # [P]
        batch = Batch.concatenate(rounds).select_groups(chosen)
    if adv_estimator == "maxrl" and (batch.rewards < 0).any():
        raise UserMistake(
            f"ADV_ESTIMATOR=maxrl needs rewards of at least 0, and one is "
            f"{np.nanmin(batch.rewards):g}; use another REWARD_FN or estimator"
        )
    return batch.trim(limits.completion_width(int(batch.lengths.max())))


def slice_of_process(values: Sequence[Any]) -> Sequence[Any]:
    """This process's part of the values of all processes; each has an equal part, in order."""
    count = len(values) // jax.process_count()
    return values[jax.process_index() * count : (jax.process_index() + 1) * count]
