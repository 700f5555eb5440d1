"""The completions of a step and their rewards: rounds of sampling, and the groups to learn from.

P prompts, K completions of each, B = P*K sequences over all processes, of which this one has b.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import data
import rewards
from metrics import Clock, StepRows
from models.model import Params
from rollout import Rollout, Sampling, generate, pad_prompts, prompt_width
from runtime.layout import Layout, gather_rows
from runtime.processes import StopSignal
from startup import Run
from update import sync_weights


class RewardError(ValueError):
    """A reward function of the user's has failed."""


class Round(NamedTuple):
    """K completions of each of P prompts, with their rewards."""

    prompts: list[data.Prompt]  # [P], on every process
    roll: Rollout  # [b, T] of this process
    rows: StepRows  # [B] of all processes


def sample_round(
    run: Run,
    decoder: Params,
    stop: StopSignal,
    rollout_key: jax.Array,
    number: int,
    own: slice,
    clock: Clock,
) -> Round:
    """Round `number` (from 0) of the run: it alone decides the prompts and what is drawn."""
    P, K, size = run.sizes.prompts_per_step, run.cfg.num_pre_q, run.sizes.prompt_batch_size
    indices = data.batch_indices(len(run.train), P, number, run.cfg.seed)  # [P]
    prompts = [run.train[i] for i in indices]
    width = prompt_width(max(len(p.ids) for p in prompts), run.cfg.global_length)
    mine = prompts[own.start // K : own.stop // K]  # [b/K]
    row_ids = np.arange(own.start, own.stop, dtype=np.int32)  # [b]
    key = jax.random.fold_in(rollout_key, number)
    roll = complete(run, decoder, stop, mine, row_ids, key, K, run.sampling, width, size)
    clock.lap("rollout_generate")

    scores, per_function = score(run, roll, mine, K)  # [b], [b, F]
    clock.lap("reward")
    prompt_lengths = np.repeat([len(p.ids) for p in mine], K)
    stopped = np.isin(roll.last_ids(), run.stop_ids)
    columns = [scores, prompt_lengths, roll.lengths(), stopped, *per_function.T]
    rows = StepRows.of(gather_rows(np.column_stack(columns).astype(np.float64)))
    clock.lap("advantages")
    return Round(prompts, roll, rows)


def enough(run: Run, rounds: list[Round]) -> bool:
    """True after one round or, with DYNAMIC_SAMPLING, once the rewards differ in P groups, or
    after DYNAMIC_SAMPLING_MAX_ROUNDS: the same on every process, which all see all rewards."""
    limit = run.cfg.dynamic_sampling_max_rounds if run.cfg.dynamic_sampling else 1
    if not rounds or len(rounds) == limit:
        return bool(rounds)
    return (~equal_groups(run, rounds)).sum() >= run.sizes.prompts_per_step


def equal_groups(run: Run, rounds: list[Round]) -> np.ndarray:
    """[rounds * P] bool: the group's rewards are equal; for gdpo, those of each function."""
    K, by_function = run.cfg.num_pre_q, run.cfg.adv_estimator == "gdpo"
    return np.concatenate([r.rows.equal_groups(K, by_function) for r in rounds])


def choose_groups(
    run: Run, rounds: list[Round], own: slice
) -> tuple[list[data.Prompt], Rollout, StepRows]:
    """The step's P groups: the first whose rewards differ, then others if those are fewer.

    Returns this process's prompts [b/K] and completions [b, T], and all processes' rows [B].
    """
    P, K = run.sizes.prompts_per_step, run.cfg.num_pre_q
    groups = np.sort(np.argsort(equal_groups(run, rounds), kind="stable")[:P])
    chosen = (groups[:, None] * K + np.arange(K)).reshape(-1)  # [B] of rounds * B
    columns = zip(*(r.rows for r in rounds), strict=True)
    rows = StepRows(*(np.concatenate(column)[chosen] for column in columns))
    prompts = [p for r in rounds for p in r.prompts]
    mine = [prompts[group] for group in groups[own.start // K : own.stop // K]]
    if len(rounds) == 1:
        return mine, rounds[0].roll, rows
    everyone = []  # of all processes: a group may be learnt from elsewhere than it was sampled
    for arrays in zip(*(r.roll for r in rounds), strict=True):
        everyone.append(np.concatenate([gather_rows(x) for x in arrays]))  # [rounds * B, T]
    return mine, Rollout(*(x[chosen[own]] for x in everyone)), rows


def copy_weights(run: Run, params: Params, layout: Layout, dtype: jnp.dtype) -> Params:
    """The parameters in dtype, laid out for decoding or for training."""
    return sync_weights(params, config=run.compute.config, mesh=layout.mesh, dtype=dtype)


def complete(
    run: Run, params: Params, stop: StopSignal, prompts: list[data.Prompt], rows: np.ndarray,
    key: jax.Array, num_pre_q: int, sampling: Sampling, width: int, size: int,
) -> Rollout:  # fmt: skip
    """num_pre_q completions of each prompt, in passes of `size` prompts."""
    passes = []
    for start in range(0, len(prompts), size):
        stop.check()
        ids, mask = pad_prompts(
            [p.ids for p in prompts[start : start + size]], width, run.stop_ids[0]
        )
        one = generate(
            params, run.compute.config, ids, mask,
            rows[start * num_pre_q : (start + size) * num_pre_q], key,
            num_pre_q=num_pre_q, max_new_tokens=run.cfg.max_length_sample, stop_ids=run.stop_ids,
            pad_id=run.stop_ids[0], sampling=sampling, dtype=run.compute.dtype, layout=run.rollout,
            attention_impl=run.compute.attention_impl,
        )  # fmt: skip
        passes.append(one)
    return Rollout(*(np.concatenate(parts) for parts in zip(*passes, strict=True)))


def score(
    run: Run, roll: Rollout, prompts: list[data.Prompt], num_pre_q: int
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted rewards [b] and those of each function [b, F], NaN where none applies.

    A tag that the chat template opened belongs to the text that is scored, not to its tokens.
    """
    opened = [data.opened_tag(p, run.tokenizer) for p in prompts for _ in range(num_pre_q)]
    texts = [tag + text for tag, text in zip(opened, roll.texts(run.tokenizer), strict=True)]
    names = prompts[0].columns
    columns = {n: [p.columns.get(n) for p in prompts for _ in range(num_pre_q)] for n in names}
    columns["completion_ids"] = roll.ids()
    try:
        return rewards.score(texts, columns, run.functions, run.cfg.reward_weights)
    except ValueError as error:  # the message names the function
        raise RewardError(str(error)) from None
