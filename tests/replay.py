"""What passes through the updates of a run, and the metrics that the formulas of
tests/test_replay_by_hand.py make of it."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from qwen35_by_hand import reference
from runs import REPO, Result, train
from small_model import numpy_logits, numpy_softmax

from model import hf
from model.params import ModelConfig, Params
from rows import Batch

TINY = REPO / "tiny"
MODEL = hf.read_config(TINY)
K, STEPS, UPDATES = 4, 2, 4  # completions per prompt; steps; updates of a step
BETA, EPS_LOW, EPS_HIGH, TEMPERATURE = 0.04, 0.01, 0.015, 1.4


class Sequence(NamedTuple):
    """A completion, before the first update of its step."""

    prompt: np.ndarray
    ids: np.ndarray
    drawn: np.ndarray  # bool; False for what an environment has said
    support: np.ndarray | None
    sampling_logps: np.ndarray
    A: float
    model: ModelConfig

    def scored(self, weights: Params) -> np.ndarray:
        """The log-probability of each token that was drawn, among those that could be drawn."""
        logits_of = reference if self.model.linear else numpy_logits
        logits = logits_of(weights, np.concatenate([self.prompt, self.ids]), self.model)
        table = np.log(numpy_softmax(logits / TEMPERATURE))  # [n, V]
        table = table[len(self.prompt) - 1 : -1][self.drawn]  # [drawn, V]
        logps = np.take_along_axis(table, self.ids[self.drawn][:, None], axis=1)[:, 0]
        if self.support is None:
            return logps
        possible = np.take_along_axis(table, self.support[self.drawn], axis=1)
        return logps - np.log(np.exp(possible).sum(axis=1))


class Saved(NamedTuple):
    """What a run has recorded, and what has passed through its updates."""

    result: Result
    model: ModelConfig
    batches: list[Batch]  # of each step
    # Of each step those of its updates: float64 weights before the update, and the numbers of the
    # sequences it learns from.
    updates: list[list[tuple[Params, np.ndarray]]]

    def sequences(self, step: int) -> list[Sequence]:
        x = self.batches[step]
        return [
            Sequence(
                np.array(x.prompts[i // K].ids),
                x.completion_ids[i, :n],
                x.sampled_mask[i, :n] > 0,
                None if x.support is None else x.support[i, :n],
                x.sampling_logps[i, :n].astype(np.float64),
                float(x.advantages[i]),
                self.model,
            )
            for i, n in enumerate(x.lengths)
        ]


def saved_run(out: Path, script: Any, model: ModelConfig = MODEL, **env: str) -> Saved:
    """A run in this process that saves what passes through two functions of its script, and changes
    nothing. script: train_grpo."""
    batches, updates = [], []
    update_policy, train_on_mini_batch = script.update_policy, script.train_on_mini_batch

    def saving_policy(learner: Any, state: Any, batch: Batch, *others: Any) -> Any:
        batches.append(batch)
        updates.append([])
        numbers = np.arange(len(batch.lengths))
        batch = batch._replace(decode_steps=numbers)  # no update reads them
        return update_policy(learner, state, batch, *others)

    def saving_update(learner: Any, state: Any, mini_batch: Batch, *others: Any) -> Any:
        weights = jax.tree.map(lambda x: np.array(x, np.float64), state.params)
        updates[-1].append((weights, mini_batch.decode_steps))
        return train_on_mini_batch(learner, state, mini_batch, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "update_policy", saving_policy)
        patch.setattr(script, "train_on_mini_batch", saving_update)
        return Saved(train(out / "replay", **env), model, batches, updates)


def update_by_hand(
    saved: Saved, step: int, update: int, weights: Params | None = None
) -> np.ndarray:
    """The metrics of an update, in the order of METRICS. weights: None means its own."""
    reference, before = saved.updates[0][0][0], saved.updates[step][0][0]
    own, chosen = saved.updates[step][update]
    sequences, columns = saved.sequences(step), []
    for sequence in (sequences[i] for i in chosen):
        old = sequence.scored(before)
        ref = sequence.scored(reference) if step else old
        A, logps = sequence.A, sequence.scored(weights or own)
        ratio = np.exp(logps - old)
        low, high = (ratio < 1 - EPS_LOW) & (A < 0), (ratio > 1 + EPS_HIGH) & (A > 0)
        kl = ratio * (np.exp(ref - logps) - (ref - logps) - 1)
        clipped = np.clip(ratio, 1 - EPS_LOW, 1 + EPS_HIGH)
        loss = BETA * kl - np.minimum(ratio * A, clipped * A)
        of_sampler = sequence.sampling_logps[sequence.drawn]
        columns.append(np.array([loss, -of_sampler, kl, np.abs(old - of_sampler), low, high]))
    *means, low, high = np.concatenate(columns, axis=1).mean(axis=1)
    extremes = min(c[4].mean() for c in columns), max(c[5].mean() for c in columns)
    return np.array([*means, low, high, low + high, *extremes])


METRICS = """
    loss entropy kl sampling_logp_difference/mean clip_ratio/low_mean clip_ratio/high_mean
    clip_ratio/region_mean clip_ratio/low_min clip_ratio/high_max
""".split()


def by_hand(saved: Saved, step: int) -> dict[str, float]:
    """The metrics of a step: the means of its updates, but for the extremes."""
    updates = np.array([update_by_hand(saved, step, update) for update in range(UPDATES)])
    values = [*updates[:, :-2].mean(axis=0), updates[:, -2].min(), updates[:, -1].max()]
    return dict(zip(METRICS, values, strict=True))
