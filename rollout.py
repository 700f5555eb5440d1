"""The completions of a step and their rewards, as `main` in train_grpo.py asks for them.

`Run` has what all steps need: settings, inputs, and how the programs compute.

Dimensions: P prompts of a step, K completions per prompt, B = P*K sequences over all processes, b
sequences of a step or of a pass on this process, T completion tokens: padded to MAX_LENGTH_SAMPLE,
and from choose_groups on to the longest completion.
"""

import dataclasses
import itertools
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import data
import rewards
from config import Config
from loss import Objective, equal_groups
from models import placement
from models.draw import Sampling
from models.model import Compute, ModelConfig, Params
from runtime.layout import gather_processes, join
from runtime.long_work import progress_bar
from runtime.mistakes import UserMistake
from runtime.packing import Batch, Limits
from runtime.processes import StopSignal, gather_texts
from runtime.run_log import Clock
from runtime.sizes import Sizes, eval_questions, prompt_width, turn_sequences, turn_width
from sampling import Backend, Completions, Stopping
from turns import EVALUATION, Environments
from update import Optimizer

# Stands for the number of a place without a sequence. Results come in the order of the numbers, so
# that such places are the last ones.
NO_SEQUENCE = np.iinfo(np.int32).max


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
    environments: Environments | None  # None: each completion is a single turn of the policy
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


# ---- Turns ---------------------------------------------------------------------------------------


def begin_episodes(
    run: Run, prompts: list[data.Prompt], round_number: int, per_prompt: int
) -> list[data.Prompt]:
    """The prompts of all processes as the environment begins the episodes of their completions: the
    text that `reset` returns stands behind the question. Raises UserMistake."""
    if run.environments is None:
        return prompts
    numbers = local_part_of(range(len(prompts) * per_prompt))
    columns = [prompt.columns for prompt in local_part_of(prompts)]
    texts = run.environments.reset(round_number, numbers, columns, per_prompt)
    texts = [text for part in gather_texts(json.dumps(texts)) for text in json.loads(part)]
    examples = [
        prompt.columns | {"question": prompt.columns["question"] + (text or "")}
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    model, tools = run.model, run.environments.tools
    begun = data.build_prompts(examples, run.tokenizer, run.system_prompt, tools, model.vocab_size)
    longest = max(len(prompt.ids) for prompt in begun)
    try:
        placement.stop_if_too_long(run.stopping.max_new_tokens, run.model, longest)
    except UserMistake as error:
        source = run.cfg.environment_class
        raise UserMistake(f"ENVIRONMENT_CLASS={source}, with the text of reset: {error}") from None
    pairs = zip(begun, prompts, strict=True)
    return [prompt._replace(columns=given.columns) for prompt, given in pairs]


def take_turns(
    run: Run,
    backend: Backend,
    prompts: list[data.Prompt],
    completions: Completions,
    key: jax.Array,
    sampling: Sampling,
    most: int,
) -> Completions:
    """The completions of this process's prompts after their later turns. A completion ends when its
    environment has nothing to say, after MAX_TURNS, or when it is full.

    most: sequences of a rollout pass of this process.
    """
    going = [*range(len(completions.lengths))]
    for turn in range(1, run.cfg.turns() + 1):
        going = [i for i in going if add_message(run, prompts, completions, i, turn)]
        earlier = [completions.completion_ids[i, : completions.lengths[i]].tolist() for i in going]
        of_prompts = [prompts[i * len(prompts) // len(completions.lengths)].ids for i in going]
        ids = [[*prompt, *tokens] for prompt, tokens in zip(of_prompts, earlier, strict=True)]
        # All processes compute the same number of passes, of the same shapes.
        sizes = np.array([[len(going), max(map(len, ids), default=1)]])
        count, longest = gather_processes(sizes).max(axis=0).tolist()
        if count == 0:
            break
        size = turn_sequences(count, most, jax.local_device_count())
        width = turn_width(longest, run.limits.longest_prompt + 1 + run.stopping.max_new_tokens)
        for first in range(0, count, size):
            run.stop.check()
            of_pass = going[first : first + size]
            # For an unused place no token is drawn, as if its completion were full.
            unused = size - len(of_pass)
            filled = ids[first : first + size] + [[run.stopping.pad_id]] * unused
            padded = data.pad_prompts(filled, width, run.stopping.pad_id)
            T = run.stopping.max_new_tokens
            numbers = np.append(completions.sequence_ids[of_pass], [NO_SEQUENCE] * unused)
            lengths = np.append(completions.lengths[of_pass], [T] * unused)
            numbers, lengths = numbers.astype(np.int32), lengths.astype(np.int32)
            drawn = backend.generate(*padded, numbers, key, sampling, lengths)
            for j, i in enumerate(of_pass):
                add_turn(completions, i, drawn, j)
    return completions


def add_message(
    run: Run, prompts: list[data.Prompt], completions: Completions, i: int, turn: int
) -> bool:
    """Whether completion i goes on after this turn: then it gets what its environment answers. A
    message that leaves no room for another token is cut, and ends the completion, which then counts
    as cut off, unless the stop token of its turn has taken the last place."""
    length, T = completions.lengths[i], run.stopping.max_new_tokens
    was_cut = completions.completion_ids[i, length - 1] not in run.stopping.stop_ids
    is_last = turn == run.cfg.turns()
    if was_cut or (is_last and run.environments.tools):  # Nobody would read what a tool answers.
        return False
    text = text_of(run, prompts, completions, i)
    ids = run.environments.answer(int(completions.sequence_ids[i]), turn, text)
    if ids is None or is_last:
        return False
    ids = ids[: T - length]
    completions.completion_ids[i, length : length + len(ids)] = ids
    completions.lengths[i] += len(ids)
    return completions.lengths[i] < T


def add_turn(completions: Completions, i: int, drawn: Completions, j: int) -> None:
    """Writes what was drawn in place j of a pass behind the tokens of completion i."""
    count = drawn.lengths[j]
    span = slice(completions.lengths[i], completions.lengths[i] + count)
    for name in Completions._fields:
        x, new = getattr(completions, name), getattr(drawn, name)
        if name == "sequence_ids" or x is None:
            continue
        if x.ndim > 1:  # of the tokens
            x[i, span] = new[j, :count]
        else:  # a sum over the tokens
            x[i] += new[j]


# ---- An evaluation -------------------------------------------------------------------------------


def answer_questions(
    run: Run, backend: Backend, questions: list[data.Prompt], key: jax.Array, clock: Clock
) -> Batch:
    """EVAL_SAMPLES completions of each question, greedy or sampled as run.eval_sampling says."""
    samples = run.cfg.eval_samples
    # Questions of a pass on each process.
    size = eval_questions(run.sizes, run.cfg.num_pre_q, samples, jax.local_device_count())
    missing = -len(questions) % (size * jax.process_count())
    padded = begin_episodes(run, [*questions, *[questions[-1]] * missing], EVALUATION, samples)
    how = run.eval_sampling, samples, size
    completions = complete(run, backend, padded, key, "evaluation", *how)
    clock.lap("rollout_generate")
    local = local_part_of(padded)
    rewarded = []
    for first in range(0, len(local), size):  # a call of a reward function is for a single pass
        of_pass = slice(first * samples, (first + size) * samples)
        part = jax.tree.map(lambda x, of_pass=of_pass: x[of_pass], completions)
        rewarded.append(reward_completions(run, local[first : first + size], part))
    batch = gather_batch(run, padded, completions, *join(rewarded))
    clock.lap("reward")
    return batch.groups(np.arange(len(questions)))


# ---- Processes -----------------------------------------------------------------------------------


def local_part_of(values: Sequence[Any]) -> Sequence[Any]:
    """This process's part of the values of all processes; each has an equal part, in order."""
    count = len(values) // jax.process_count()
    return values[jax.process_index() * count : (jax.process_index() + 1) * count]
