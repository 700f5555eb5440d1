"""Two steps of a real run, computed again by hand: rewards, advantages, entropy, clipping and KL.

A script wraps two functions of train_grpo.py to save what passes through them, and changes nothing.
The references are models in float64 numpy that see one unpadded sequence at a time. With
logps_u: by the weights before update u; old: by those before the step's first update; ref: by those
before the run's first update; ratio = exp(logps_u - old); and A, the advantage of the sequence:
  reward     1.0 if the answer is right + 0.5 for the form + 0.125 for each tag that occurs once
  A          (reward - mean of its group) / (standard deviation of its group, ddof 1, + 1e-4)
  entropy    mean over the tokens of -log p, by the sampler
  low, high  share of the tokens with ratio < 1 - EPS_LOW and A < 0, ratio > 1 + EPS_HIGH and A > 0
  kl         mean over the tokens of ratio (exp(ref - logps_u) - (ref - logps_u) - 1)
  loss       mean over the tokens of -min(ratio A, clip(ratio, 1 - EPS_LOW, 1 + EPS_HIGH) A), plus
             BETA times kl
The tokens are those of the update's sequences; a step has the means over its updates.
"""

import re
from typing import NamedTuple

import jax
import numpy as np
import pytest
from runs import REPO, Result, environment, train
from safetensors.numpy import load_file
from small_model import TINY_QWEN35, numpy_logits, numpy_softmax
from test_qwen35 import reference
from tokenizers import Tokenizer

from model import hf
from model.params import ModelConfig, Params, param_table
from tools.bench import make_random_model

TINY = REPO / "tiny"
MODEL = hf.read_config(TINY)
K, STEPS, UPDATES = 4, 2, 4  # completions per prompt; steps; updates of a step
BETA, EPS_LOW, EPS_HIGH, TEMPERATURE = 0.04, 0.01, 0.015, 1.4
SETTINGS = environment(
    f"""STEPS={STEPS} BATCH_SIZE=4 NUM_PRE_Q={K} NUM_MINI_BATCHES=2 PPO_EPOCHS=2
    TRAIN_MICRO_BATCH_SIZE=4 BETA={BETA} EPS_LOW={EPS_LOW} EPS_HIGH={EPS_HIGH}
    TEMPERATURE={TEMPERATURE} LEARNING_RATE=1e-4 LR_SCHEDULE=constant WARMUP_RATIO=0
    SAVE_EVERY_STEPS=0 EXPORT_HF=none"""
)
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


# ---- The steps by hand ---------------------------------------------------------------------------


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


def reward_of(text: str, answer: str) -> float:
    """For completions with plain numbers, as the tiny model writes them."""
    right = answer.rpartition("#### ")[2]
    given = re.findall(r"<answer>(-?\d+)</answer>", text) or re.findall(r"-?\d+", text)
    form = re.fullmatch(r"<think>[^<]+</think>\n<answer>[^<]+</answer>", text.strip())
    tags = [text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")]
    return float(given[-1:] == [right]) + 0.5 * bool(form) + 0.125 * sum(tags)


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


@pytest.fixture(scope="module", params=["qwen2", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The runs of the tiny model, and of a Qwen3.5 with random weights."""
    runs, folder, settings = tmp_path_factory.mktemp("runs"), TINY, SETTINGS
    if request.param == "qwen3_5":
        folder = runs / "model"
        make_random_model(TINY, folder, TINY_QWEN35 | {"num_hidden_layers": 4})
        settings = SETTINGS | {"MODEL_PATH": str(folder), "LEARNING_RATE": "3e-4"}
    return Saved(train(runs / "replay", changes=SAVING, **settings), hf.read_config(folder))


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


# ---- They agree ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", range(STEPS))
def test_the_updates_of_a_step_are_what_the_formulas_give(saved: Saved, step: int) -> None:
    expected, record = by_hand(saved, step), saved.result.records[step]
    found = {name: record[f"train-other/{name}"] for name in expected}
    assert found == pytest.approx(expected, rel=1e-4, abs=2e-6)

    assert min(expected[f"clip_ratio/{name}_mean"] for name in ("low", "high")) > 0.005
    assert expected["kl"] > 1e-3


@pytest.mark.parametrize("step", range(STEPS))
def test_rewards_advantages_and_lengths_are_those_of_the_texts(saved: Saved, step: int) -> None:
    record, sequences = saved.result.records[step], saved.sequences(step)
    B = len(sequences)
    answers, texts = zip(*saved.result.completions[step * B : (step + 1) * B], strict=True)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    decoded = [tokenizer.decode(s.ids.tolist(), skip_special_tokens=False) for s in sequences]
    assert [text.removesuffix("<|im_end|>") for text in decoded] == list(texts)

    rewards = np.array([reward_of(*pair) for pair in zip(texts, answers, strict=True)])
    assert len(set(rewards)) > 1
    assert record["train-reward/total/mean"] == pytest.approx(rewards.mean(), abs=1e-9)
    assert record["train-reward/total/std"] == pytest.approx(rewards.std(), abs=1e-9)
    groups = rewards.reshape(-1, K)
    std = groups.std(axis=1, ddof=1, keepdims=True)
    advantages = (groups - groups.mean(axis=1, keepdims=True)) / (std + 1e-4)
    np.testing.assert_allclose([s.A for s in sequences], advantages.reshape(-1), atol=1e-6)
    assert record["train-reward/advantage/std"] == pytest.approx(advantages.std(), abs=1e-6)
    assert record["train-other/frac_reward_zero_std"] == (std == 0).mean()

    lengths = [len(s.ids) for s in sequences]
    assert record["train-seq_len/completion/mean"] == np.mean(lengths)
    assert record["train-seq_len/completion/max"] == max(lengths)
    assert record["train-seq_len/prompt/mean"] == np.mean([len(s.prompt) for s in sequences])
    assert record["train-other/total_valid_token_count"] == sum(lengths)
