"""The completions of a step and their rewards, as `main` in train_grpo.py asks for them.

`Run` has what all steps need: settings, inputs, and how the programs compute.

Dimensions: P prompts of a step, K completions per prompt, B = P*K sequences over all processes, b
sequences of a step or of a pass on this process, T completion tokens: padded to MAX_LENGTH_SAMPLE,
and from choose_groups on to the longest completion.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import data
import rewards
from config import Config
from loss import Objective, equal_groups
from models.draw import Sampling
from models.model import Compute, ModelConfig, Params
from runtime.layout import gather_processes, join
from runtime.long_work import progress_bar
from runtime.mistakes import UserMistake
from runtime.packing import Batch, Limits
from runtime.processes import StopSignal
from runtime.run_log import Clock
from runtime.sizes import Sizes, eval_questions, prompt_width
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
    base: Params | None = None  # the weights that LoRA does not change; None: there are none

    def local_sequences(self) -> slice:
        """This process's part, b, of the B sequences of a step."""
        b = self.sizes.local_batch
        return slice(jax.process_index() * b, (jax.process_index() + 1) * b)

    def local_prompts(self) -> slice:
        """This process's part of the P prompts of a step."""
        sequences = self.local_sequences()
        return slice(sequences.start // self.cfg.num_pre_q, sequences.stop // self.cfg.num_pre_q)


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
    """[P] the prompts of round `number` of the run, from 0; the same on every process."""
    P = run.sizes.prompts_per_step
    indices = data.batch_indices(len(run.train_prompts), P, number, run.cfg.seed)  # [P]
    return [run.train_prompts[i] for i in indices]


def complete_prompts(
    run: Run, backend: Backend, stop: StopSignal, prompts: list[data.Prompt], key: jax.Array
) -> Completions:
    """K completions of each of this process's part of P prompts."""
    K, size = run.cfg.num_pre_q, run.sizes.prompt_batch_size
    passes = rollout_passes(run, backend, stop, prompts, key, "rollout", run.sampling, K, size)
    return join([completions for _, completions in passes])


def rollout_passes(
    run: Run,
    backend: Backend,
    stop: StopSignal,
    prompts: list[data.Prompt],
    key: jax.Array,
    name: str,
    sampling: Sampling,
    per_prompt: int,
    size: int,
) -> Iterator[tuple[list[data.Prompt], Completions]]:
    """Yields the prompts of each rollout pass, `size` of this process, and their completions,
    per_prompt for each.

    prompts: of all processes; each process has an equal part of them, in order, as in
    Run.local_prompts. name: of the progress bar.
    """
    longest = max(len(prompt.ids) for prompt in prompts)
    width = prompt_width(longest, run.cfg.global_length)  # S+1
    count = len(prompts) // jax.process_count()
    with progress_bar(name, count * per_prompt, "completions") as bar:
        for first in range(jax.process_index() * count, (jax.process_index() + 1) * count, size):
            stop.check()
            of_pass = prompts[first : first + size]
            ids = [prompt.ids for prompt in of_pass]
            completions = backend.generate(
                *data.pad_prompts(ids, width, run.stopping.pad_id),
                np.arange(first * per_prompt, (first + size) * per_prompt, dtype=np.int32),
                key,
                sampling,
            )
            bar.update(size * per_prompt)
            yield of_pass, completions


def texts_of(
    tokenizer: Any, prompts: list[data.Prompt], completions: Completions | Batch
) -> list[str]:
    """The text of each completion, without its stop token and other special tokens; the completions
    of a prompt are adjacent.

    A tag that the chat template has opened belongs to the text that is rewarded, but not to the
    tokens of the completion.
    """
    drawn = tokenizer.batch_decode(token_ids(completions), skip_special_tokens=True)
    opened = [data.opened_tag(prompt, tokenizer) for prompt in prompts]
    per_prompt = len(drawn) // len(prompts)
    return [opened[i // per_prompt] + text for i, text in enumerate(drawn)]


def token_ids(completions: Completions | Batch) -> list[list[int]]:
    """The tokens of each completion, its stop token included."""
    padded = zip(completions.completion_ids.tolist(), completions.lengths, strict=True)
    return [ids[:length] for ids, length in padded]


def reward_completions(
    run: Run, prompts: list[data.Prompt], completions: Completions
) -> tuple[np.ndarray, np.ndarray]:
    """The rewards [b] of these completions of the prompts, weighted, and those of each function
    [b, functions], both float64; NaN where no function applies. Raises UserMistake."""
    texts = texts_of(run.tokenizer, prompts, completions)
    per_prompt = len(texts) // len(prompts)
    columns = {
        name: [prompt.columns.get(name) for prompt in prompts for _ in range(per_prompt)]
        for name in prompts[0].columns
    }
    columns["completion_ids"] = token_ids(completions)
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
    arrays |= {"rewards": totals, "per_function": per_function}
    # A stop token has ended the completion; it was not cut off.
    last = completions.lengths[:, None] - 1
    last_ids = np.take_along_axis(completions.completion_ids, last, axis=1)[:, 0]  # [b]
    arrays["stopped"] = np.isin(last_ids, run.stopping.stop_ids)
    return Batch(prompts, **gather_processes(arrays))


def choose_groups(run: Run, rounds: list[Batch]) -> Batch:
    """P of the sampled groups, in their order: those whose rewards differ, and others if these are
    too few. T holds the longest completion.

    Raises UserMistake if the estimator cannot take the rewards.
    """
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


# ---- An evaluation -------------------------------------------------------------------------------


def answer_questions(
    run: Run,
    backend: Backend,
    stop: StopSignal,
    questions: list[data.Prompt],
    key: jax.Array,
    clock: Clock,
) -> Batch:
    """EVAL_SAMPLES completions of each question, greedy or sampled as run.eval_sampling says."""
    samples = run.cfg.eval_samples
    # Questions of a pass on each process.
    size = eval_questions(run.sizes, run.cfg.num_pre_q, samples, jax.local_device_count())
    missing = -len(questions) % (size * jax.process_count())
    padded = [*questions, *[questions[-1]] * missing]
    passes = []
    for of_pass, completions in rollout_passes(
        run, backend, stop, padded, key, "evaluation", run.eval_sampling, samples, size
    ):
        clock.lap("rollout_generate")
        passes.append((completions, *reward_completions(run, of_pass, completions)))
        clock.lap("reward")
    batch = gather_batch(run, padded, *join(passes))
    clock.lap("reward")
    return batch.groups(np.arange(len(questions)))
