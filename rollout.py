"""The completions of a step and their rewards, as `main` in train_grpo.py asks for them.

`Run` has what all steps need: settings, inputs, and how the programs compute.

Dimensions: P prompts of a step, K completions per prompt, B = P*K sequences over all processes, b
sequences of a step or of a pass on this process, T completion tokens: padded to MAX_LENGTH_SAMPLE,
and from choose_groups on to the longest completion.
"""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import data
import rewards
from config import Config
from infra.hosts import StopSignal
from infra.log import progress_bar
from infra.mistakes import UserMistake
from infra.sizes import Sizes, prompt_width
from loss import Objective, equal_groups
from model.layout import gather_processes, join
from model.network import Compute
from model.next_token import Sampling
from model.params import ModelConfig, Params
from rows import Batch, Limits
from sampling import Backend, Completions, Stopping
from update import Optimizer


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings, the inputs and how to compute, as startup.py makes them; it does not change."""

    cfg: Config
    sizes: Sizes
    functions: list[rewards.RewardFunction]
    weights: tuple[float, ...]  # of the functions in the total reward
    folder: Path  # of the model; with LoRA of the base
    adapters: Path | None  # the folder of the adapters that training begins with; None: new ones
    model: ModelConfig
    tokenizer: Any
    train_prompts: list[data.Prompt]
    eval_prompts: list[data.Prompt]  # empty for a run that never evaluates
    sampling: Sampling  # of a step
    eval_sampling: Sampling  # of an evaluation
    stopping: Stopping
    objective: Objective
    optimizer: Optimizer
    training: Compute
    rollout: Compute
    mesh_reason: str  # why ROLLOUT_MESH_SHAPE=auto is what it is
    limits: Limits  # of the rows of an update
    system_prompt: str
    environments: Any  # None: each completion is a single turn of the policy
    base: Params | None = None  # the weights that LoRA does not change; None: there are none
    stop: StopSignal = dataclasses.field(default_factory=StopSignal)


# ---- A step --------------------------------------------------------------------------------------


def enough(run: Run, rounds: list[Batch]) -> bool:
    """Whether a step needs no more rounds: without DYNAMIC_SAMPLING after one, with it once there
    are P groups within which rewards differ, or after DYNAMIC_SAMPLING_MAX_ROUNDS. All processes
    see all rewards, so that they agree."""
    if not rounds:
        return False
    if not run.cfg.dynamic_sampling or len(rounds) == run.cfg.dynamic_sampling_max_rounds:
        return True
    return (~have_equal_rewards(run, rounds)).sum() >= run.sizes.prompts_per_step


def have_equal_rewards(run: Run, rounds: list[Batch]) -> np.ndarray:
    """[rounds * P] bool: all rewards of the group are equal; for gdpo, those of each function that
    has a weight."""
    compared = [batch.rewards for batch in rounds]
    if run.cfg.adv_estimator == "gdpo":
        has_weight = np.asarray(run.weights) != 0  # [functions]
        compared = [batch.per_function[:, has_weight] for batch in rounds]
    return np.concatenate([equal_groups(x, run.cfg.num_pre_q) for x in compared])


def prompts_of_round(run: Run, number: int) -> list[data.Prompt]:
    """[P] the prompts of round `number` of the run, from 0; the same on every process. With an
    environment their episodes begin."""
    P = run.sizes.prompts_per_step
    indices = data.batch_indices(len(run.train_prompts), P, number, run.cfg.seed)  # [P]
    prompts = [run.train_prompts[i] for i in indices]
    from extras.turns import begin_episodes

    return begin_episodes(run, prompts, number + 1, run.cfg.num_pre_q)


def complete_prompts(
    run: Run, backend: Backend, prompts: list[data.Prompt], key: jax.Array
) -> Completions:
    """K completions of each of this process's part of P prompts."""
    K, size = run.cfg.num_pre_q, run.sizes.prompt_batch_size
    return complete(run, backend, prompts, key, "rollout", run.sampling, K, size)


def complete(
    run: Run,
    backend: Backend,
    prompts: list[data.Prompt],
    key: jax.Array,
    name: str,
    sampling: Sampling,
    per_prompt: int,
    size: int,
) -> Completions:
    """The completions of this process's part of the prompts, per_prompt for each.

    prompts: of all processes. name: of the progress bar. size: prompts of a rollout pass of this
    process.
    """
    longest = max(len(prompt.ids) for prompt in prompts)
    width = prompt_width(longest, run.cfg.global_length)  # S+1
    local, passes = local_part_of(prompts), []
    count = len(local)
    numbers = np.array(local_part_of(range(len(prompts) * per_prompt)), np.int32)
    with progress_bar(name, count * per_prompt, "completions") as bar:
        for first in range(0, count, size):
            run.stop.check()
            ids = [prompt.ids for prompt in local[first : first + size]]
            padded = data.pad_prompts(ids, width, run.stopping.pad_id)
            of_pass = numbers[first * per_prompt : (first + size) * per_prompt]
            passes.append(backend.generate(*padded, of_pass, key, sampling))
            bar.update(size * per_prompt)
    completions = join(passes)
    if run.environments is None:
        return completions
    from extras.turns import take_turns

    return take_turns(run, backend, local, completions, key, sampling, size * per_prompt)


def texts_of(run: Run, prompts: list[data.Prompt], completions: Completions | Batch) -> list[str]:
    """The text of each completion; the completions of a prompt are adjacent."""
    return [text_of(run, prompts, completions, i) for i in range(len(completions.lengths))]


def text_of(run: Run, prompts: list[data.Prompt], completions: Completions | Batch, i: int) -> str:
    """The text of completion i, of its last turn.

    A tag that the chat template has opened belongs to the text that is rewarded, but not to the
    tokens of the completion.
    """
    *_, last = (ids for is_drawn, ids in parts_of(completions, i) if is_drawn)
    prompt = prompts[i * len(prompts) // len(completions.lengths)]
    return data.opened_tag(prompt, run.tokenizer) + decode_part(run, last)


def decode_part(run: Run, ids: list[int]) -> str:
    """The text of a part of a completion: of all its tokens, also of special ones such as a
    <tool_call> may be, but for the stop token that ends it."""
    return run.tokenizer.decode(ids[:-1] if ids[-1] in run.stopping.stop_ids else ids)


def parts_of(completions: Completions | Batch, i: int) -> list[tuple[int, list[int]]]:
    """The tokens of completion i in parts: 1 and a turn that the policy has drawn, then 0 and a
    message of the environment, and so on."""
    used = slice(completions.lengths[i])
    ids, drawn = (x[i, used].tolist() for x in (completions.completion_ids, completions.drawn_mask))
    parts = itertools.groupby(zip(drawn, ids, strict=True), key=operator.itemgetter(0))
    return [(is_drawn, [token for _, token in part]) for is_drawn, part in parts]


def dialogues_of(run: Run, batch: Batch) -> list[str]:
    """The text of each completion for people to read: with an environment all of its turns, and who
    has written each part."""
    if run.environments is None:
        return texts_of(run, batch.prompts, batch)
    names = "[environment]", "[policy]"

    def shown(is_drawn: int, ids: list[int]) -> str:
        return f"{names[is_drawn]} {decode_part(run, ids).strip()}"

    count = len(batch.lengths)
    return ["\n".join(shown(*part) for part in parts_of(batch, i)) for i in range(count)]


def reward_completions(
    run: Run, prompts: list[data.Prompt], completions: Completions
) -> tuple[np.ndarray, np.ndarray]:
    """The rewards [b] of these completions of the prompts, weighted, and those of each function
    [b, functions], both float64; NaN where no function applies. Raises UserMistake."""
    texts = texts_of(run, prompts, completions)
    per_prompt = len(texts) // len(prompts)
    columns = {
        name: [prompt.columns.get(name) for prompt in prompts for _ in range(per_prompt)]
        for name in prompts[0].columns
    }
    ids, drawn = completions.completion_ids, completions.drawn_mask > 0
    columns["completion_ids"] = [x[mask].tolist() for x, mask in zip(ids, drawn, strict=True)]
    if run.environments is not None:
        columns["environments"] = completions.sequence_ids.tolist()
    return rewards.total_rewards(texts, columns, run.functions, run.weights)


def gather_batch(
    run: Run,
    prompts: list[data.Prompt],
    completions: Completions,
    totals: np.ndarray,
    per_function: np.ndarray,
) -> Batch:
    """The batch of all processes, on every process.

    prompts: of all processes, each once. completions [b, T], totals [b] and per_function
    [b, functions]: of this process's part of them.
    """
    arrays = {name: x for name, x in completions._asdict().items() if x is not None}
    del arrays["sequence_ids"]
    arrays |= {"rewards": totals, "per_function": per_function}
    arrays["completion_mask"] = completions.drawn_mask
    # A stop token has ended the completion; it was not cut off, nor was an environment's message.
    last = completions.lengths[:, None] - 1
    last_ids = np.take_along_axis(completions.completion_ids, last, axis=1)[:, 0]  # [b]
    is_drawn = np.take_along_axis(completions.drawn_mask, last, axis=1)[:, 0] > 0  # [b]
    arrays["stopped"] = np.isin(last_ids, run.stopping.stop_ids) & is_drawn
    return Batch(prompts, **gather_processes(arrays))


def choose_groups(run: Run, rounds: list[Batch]) -> Batch:
    """P of the sampled groups, in their order: those whose rewards differ, and others if these are
    too few. T holds the longest completion. Raises UserMistake if the estimator cannot take the
    rewards."""
    batch = rounds[0]
    if len(rounds) > 1:
        # [P] of rounds * P groups; a stable sort puts those whose rewards differ first.
        chosen = np.argsort(have_equal_rewards(run, rounds), kind="stable")
        chosen = np.sort(chosen[: run.sizes.prompts_per_step])
        batch = Batch.join(rounds).groups(chosen)
    if run.cfg.adv_estimator == "maxrl" and (batch.rewards < 0).any():
        raise UserMistake(
            f"ADV_ESTIMATOR=maxrl needs rewards of at least 0, and one is "
            f"{np.nanmin(batch.rewards):g}; use another REWARD_FN or estimator"
        )
    return batch.cut(run.limits.completion_width(int(batch.lengths.max())))


# ---- Processes -----------------------------------------------------------------------------------


def local_part_of(values: Sequence[Any]) -> Sequence[Any]:
    """This process's part of the values of all processes; each has an equal part, in order."""
    count = len(values) // jax.process_count()
    return values[jax.process_index() * count : (jax.process_index() + 1) * count]
