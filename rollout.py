"""The completions of a step and their rewards, as `main` in train_grpo.py asks for them.

`Run` has what all steps need: settings, inputs, and how the programs compute.

Dimensions: P prompts of a step, K completions per prompt, B = P*K sequences over all processes, b
of them on this process, T completion tokens, padded to MAX_LENGTH_SAMPLE.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

import data
import rewards
from config import Config
from loss import Objective, equal_groups
from models.draw import Sampling
from models.model import Compute, ModelConfig, Params
from runtime.chips import program
from runtime.layout import gather_processes
from runtime.long_work import progress_bar
from runtime.mistakes import UserMistake
from runtime.packing import Limits
from runtime.processes import StopSignal, gather_texts
from runtime.run_log import Clock
from runtime.sizes import PASS_SIZES, Sizes, eval_questions, prompt_width
from sampling import Completions, PaddedPrompts, Stopping, generate
from update import Optimizer, sync_weights


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

    sampling: Sampling  # of a step
    eval_sampling: Sampling  # of an evaluation
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


class Rewarded(NamedTuple):
    """n completions of this process and their rewards, NaN where no function applies."""

    texts: list[str]  # [n]
    totals: np.ndarray  # [n] float64, weighted
    per_function: np.ndarray  # [n, functions] float64


class StepResults(NamedTuple):
    """What came of every sequence of a step, of all processes, on every process."""

    rewards: np.ndarray  # [B] float64, weighted total
    prompt_lengths: np.ndarray  # [B] tokens
    completion_lengths: np.ndarray  # [B] tokens, stop token included
    stopped: np.ndarray  # [B] 1: a stop token ended it, 0: it was cut off
    computed_tokens: np.ndarray  # [B] tokens that decoding computed for it
    cut_tokens: np.ndarray  # [B] tokens whose support lost ids, see Completions
    per_function: np.ndarray  # [B, functions] float64, NaN where a function does not apply


class Groups(NamedTuple):
    """K completions of each of P prompts, with their rewards; a prompt's sequences are adjacent."""

    prompts: list[data.Prompt]  # [P] on every process
    completions: Completions  # [b, T] of this process
    results: StepResults  # [B] of all processes


class Sampled(NamedTuple):
    """What was sampled in all rounds of a step, also what the step does not learn from."""

    num_rounds: int
    equal: np.ndarray  # [num_rounds * P] bool: all rewards of this group are equal
    results: StepResults  # [num_rounds * B] of all processes


class Evaluation(NamedTuple):
    """The completions of an evaluation and their rewards, on every process.

    n = questions * EVAL_SAMPLES; the completions of a question are adjacent.
    """

    rewards: np.ndarray  # [n] float64, weighted total
    per_function: np.ndarray  # [n, functions] float64, NaN where a function does not apply
    lengths: np.ndarray  # [n] tokens, stop token included
    stopped: np.ndarray  # [n] 1: a stop token ended it, 0: it was cut off
    texts: list[str]  # [n] with a <think> that the chat template has opened


class NaiveBackend:
    """ROLLOUT_BACKEND=naive: the programs of sampling.py, on the devices of all processes."""

    def __init__(self, rollout: Compute, stopping: Stopping, drop_ended: bool) -> None:
        self._rollout = rollout
        self._stopping = stopping
        self._drop_ended = drop_ended
        self._weights: Params | None = None

    @program("the copy of the weights that samples")
    def update_weights(self, params: Params) -> None:
        """Copies the weights in the dtype and the layout of the rollout, and waits until they are
        there."""
        rollout = self._rollout
        sync = sync_weights(rollout.model, rollout.layout.mesh, rollout.dtype, rollout.layer_loop)
        self._weights = jax.block_until_ready(sync(params))

    @program("prefill, decode or drop_sequences", PASS_SIZES)
    def generate(
        self, prompts: PaddedPrompts, sequence_ids: np.ndarray, key: jax.Array, sampling: Sampling
    ) -> Completions:
        """The completions of one rollout pass; see generate in sampling.py."""
        return generate(
            self._weights,
            self._rollout,
            prompts,
            sequence_ids,
            key,
            sampling=sampling,
            stopping=self._stopping,
            drop=self._drop_ended,
        )

    def release(self) -> None:
        """Frees the copy of the weights, until the next update_weights."""
        self._weights = None

    def close(self) -> None:
        """Does nothing; other backends end their threads."""


# ---- A step --------------------------------------------------------------------------------------


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
    compared = [groups.results.rewards for groups in rounds]
    if run.cfg.adv_estimator == "gdpo":
        has_weight = np.asarray(run.weights) != 0  # [functions]
        compared = [groups.results.per_function[:, has_weight] for groups in rounds]
    return np.concatenate([equal_groups(x, run.cfg.num_pre_q) for x in compared])


def prompts_of_round(run: Run, number: int) -> list[data.Prompt]:
    """[P] the prompts of round `number` of the run, from 0; the same on every process."""
    P = run.sizes.prompts_per_step
    indices = data.batch_indices(len(run.train_prompts), P, number, run.cfg.seed)  # [P]
    return [run.train_prompts[i] for i in indices]


def complete_prompts(
    run: Run, backend: Backend, stop: StopSignal, prompts: list[data.Prompt], key: jax.Array
) -> Completions:
    """K completions of each of this process's part of P prompts, in passes of the rollout."""
    K, size = run.cfg.num_pre_q, run.sizes.prompt_batch_size
    width = prompt_width(max(len(prompt.ids) for prompt in prompts), run.cfg.global_length)
    local = run.local_prompts()
    passes = []
    with progress_bar("rollout", (local.stop - local.start) * K, "completions") as bar:
        for first in range(local.start, local.stop, size):
            stop.check()
            ids = [prompt.ids for prompt in prompts[first : first + size]]
            passes.append(
                backend.generate(
                    PaddedPrompts(*data.pad_prompts(ids, width, run.stopping.pad_id)),
                    np.arange(first * K, (first + size) * K, dtype=np.int32),
                    key,
                    run.sampling,
                )
            )
            bar.update(size * K)
    return Completions.join(passes)


def reward_completions(run: Run, completions: Completions, prompts: list[data.Prompt]) -> Rewarded:
    """The texts and the rewards of the completions of these prompts.

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
    return Rewarded(texts, *rewards.total_rewards(texts, columns, run.functions, run.weights))


def gather_round(
    run: Run, prompts: list[data.Prompt], completions: Completions, rewarded: Rewarded
) -> Groups:
    """The groups of a round. Every process gets the results of all sequences.

    prompts: [P]. completions, rewarded: [b], of this process.
    """
    local = prompts[run.local_prompts()]  # [b/K]
    cut_tokens = completions.cut_tokens  # [b] or None
    columns = {  # [b] each
        "rewards": rewarded.totals,
        "prompt_lengths": np.repeat([len(prompt.ids) for prompt in local], run.cfg.num_pre_q),
        "completion_lengths": completions.lengths(),
        "stopped": np.isin(completions.last_ids(), run.stopping.stop_ids),
        "computed_tokens": completions.computed_tokens,
        "cut_tokens": np.zeros(len(rewarded.totals)) if cut_tokens is None else cut_tokens,
    }
    table = np.column_stack([*columns.values(), rewarded.per_function]).astype(np.float64)
    table = gather_processes(table)  # [B, 6 + functions]
    gathered = dict(zip(columns, table.T, strict=False))  # [B] each
    round_results = StepResults(**gathered, per_function=table[:, len(columns) :])
    if run.cfg.adv_estimator == "maxrl" and (round_results.rewards < 0).any():
        raise UserMistake(
            f"ADV_ESTIMATOR=maxrl needs rewards of at least 0, and one is "
            f"{np.nanmin(round_results.rewards):g}; use another REWARD_FN or estimator"
        )
    return Groups(prompts, completions, round_results)


def choose_groups(run: Run, rounds: list[Groups]) -> Groups:
    """P of the sampled groups, in their order: all whose rewards differ, and others if needed."""
    if len(rounds) == 1:
        return rounds[0]
    P, K = run.sizes.prompts_per_step, run.cfg.num_pre_q
    chosen = np.sort(
        np.argsort(have_equal_rewards(run, rounds), kind="stable")[:P]
    )  # [P] of rounds * P groups
    sequences = (chosen[:, None] * K + np.arange(K)).reshape(-1)  # [B] of rounds * B
    # A group may be trained on another process than the one that sampled it.
    everywhere = Completions.join(  # [rounds * B, T]
        [groups.completions.each(gather_processes) for groups in rounds]
    )
    sampled = [prompt for groups in rounds for prompt in groups.prompts]  # [rounds * P]
    return Groups(
        [sampled[index] for index in chosen],
        everywhere.at(sequences[run.local_sequences()]),
        StepResults(*(x[sequences] for x in results_of(rounds))),
    )


def results_of(rounds: list[Groups]) -> StepResults:
    """The results of all rounds, one after the other: [rounds * B]."""
    columns = zip(*(groups.results for groups in rounds), strict=True)
    return StepResults(*map(np.concatenate, columns))


def what_was_sampled(run: Run, rounds: list[Groups]) -> Sampled:
    return Sampled(len(rounds), have_equal_rewards(run, rounds), results_of(rounds))


# ---- An evaluation -------------------------------------------------------------------------------


def answer_questions(
    run: Run,
    backend: Backend,
    stop: StopSignal,
    questions: list[data.Prompt],
    key: jax.Array,
    clock: Clock,
) -> Evaluation:
    """EVAL_SAMPLES completions of each question, greedy or sampled as run.eval_sampling says."""
    samples = run.cfg.eval_samples
    processes = jax.process_count()
    # Questions of a pass on each process.
    size = eval_questions(run.sizes, run.cfg.num_pre_q, samples, jax.local_device_count())
    passes = math.ceil(len(questions) / (size * processes))
    padded = [*questions, *[questions[-1]] * (passes * size * processes - len(questions))]
    width = prompt_width(max(len(prompt.ids) for prompt in questions), run.cfg.global_length)
    tables, texts = [], []
    with progress_bar("evaluation", len(questions), "questions") as bar:
        for i in range(passes):
            stop.check()
            first = (i * processes + jax.process_index()) * size  # this process's first question
            local = padded[first : first + size]
            ids = [prompt.ids for prompt in local]
            completions = backend.generate(
                PaddedPrompts(*data.pad_prompts(ids, width, run.stopping.pad_id)),
                np.arange(first * samples, (first + size) * samples, dtype=np.int32),
                key,
                run.eval_sampling,
            )
            clock.lap("rollout_generate")
            rewarded = reward_completions(run, completions, local)
            stopped = np.isin(completions.last_ids(), run.stopping.stop_ids)
            lengths = completions.lengths()
            columns = {"rewards": rewarded.totals, "lengths": lengths, "stopped": stopped}
            table = np.column_stack([*columns.values(), rewarded.per_function]).astype(np.float64)
            tables.append(gather_processes(table))
            for texts_of_process in gather_texts(json.dumps(rewarded.texts)):
                texts += json.loads(texts_of_process)
            bar.update(min(size * processes, len(questions) - bar.n))
            clock.lap("reward")
    n = len(questions) * samples
    table = np.concatenate(tables)[:n]  # [n, 3 + functions]
    gathered = dict(zip(columns, table.T, strict=False))  # [n] each
    return Evaluation(**gathered, per_function=table[:, len(columns) :], texts=texts[:n])
