"""What passes through the updates of a run, and the metrics that the formulas of
tests/test_replay_by_hand.py make of it."""

from typing import NamedTuple

import jax
import numpy as np
from qwen35_by_hand import reference
from runs import REPO, Result
from safetensors.numpy import load_file
from small_model import numpy_logits, numpy_softmax

from model import hf
from model.params import ModelConfig, Params, param_table

TINY = REPO / "tiny"
MODEL = hf.read_config(TINY)
K, STEPS, UPDATES = 4, 2, 4  # completions per prompt; steps; updates of a step
BETA, EPS_LOW, EPS_HIGH, TEMPERATURE = 0.04, 0.01, 0.015, 1.4
SAVING = """
import os
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

folder, counts = Path(os.environ["OUTPUT_DIR"]), [-1, 0]
update_policy, train_on_mini_batch = train_grpo.update_policy, train_grpo.train_on_mini_batch

def saving_policy(learner, state, batch, groups, lr):
    step = counts[0] + 1
    arrays = {name: x for name, x in batch._asdict().items() if isinstance(x, np.ndarray)}
    prompts = {f"prompt{i}": np.array(prompt.ids) for i, prompt in enumerate(batch.prompts)}
    counts[:] = step, 0
    save_file(arrays | prompts, folder / f"step{step}.safetensors")
    batch = batch._replace(decode_steps=np.arange(len(batch.lengths)))  # no update reads them
    return update_policy(learner, state, batch, groups, lr)

def saving_update(learner, state, mini_batch, lr):
    weights = {str(i): np.array(x) for i, x in enumerate(jax.tree.leaves(state.params))}
    weights["sequences"] = mini_batch.decode_steps
    save_file(weights, folder / "weights{}_{}.safetensors".format(*counts))
    counts[1] += 1
    return train_on_mini_batch(learner, state, mini_batch, lr)

train_grpo.update_policy, train_grpo.train_on_mini_batch = saving_policy, saving_update
"""


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


class Saved:
    """What the script has saved of a run, and what the run has recorded."""

    def __init__(self, result: Result, model: ModelConfig = MODEL) -> None:
        self.result, self.model = result, model

    def step(self, step: int) -> dict[str, np.ndarray]:
        """The arrays and the prompts of a step."""
        return load_file(self.result.out / f"step{step}.safetensors")

    def weights(self, step: int, update: int) -> tuple[Params, np.ndarray]:
        """Float64 weights before an update, and the numbers of the sequences it learns from."""
        found = load_file(self.result.out / f"weights{step}_{update}.safetensors")
        sequences = found.pop("sequences")
        leaves = [found[str(i)].astype(np.float64) for i in range(len(found))]
        return jax.tree.unflatten(jax.tree.structure(param_table(self.model)), leaves), sequences

    def sequences(self, step: int) -> list[Sequence]:
        x = self.step(step)
        return [
            Sequence(
                x[f"prompt{i // K}"],
                x["completion_ids"][i, :n],
                x["sampled_mask"][i, :n] > 0,
                x["support"][i, :n] if "support" in x else None,
                x["sampling_logps"][i, :n].astype(np.float64),
                float(x["advantages"][i]),
                self.model,
            )
            for i, n in enumerate(x["lengths"])
        ]


def update_by_hand(
    saved: Saved, step: int, update: int, weights: Params | None = None
) -> np.ndarray:
    """The metrics of an update, in the order of METRICS. weights: None means its own."""
    (reference, _), (before, _) = saved.weights(0, 0), saved.weights(step, 0)
    own, chosen = saved.weights(step, update)
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
