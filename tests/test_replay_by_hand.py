"""Two steps of a real run, computed again by hand: rewards, advantages, entropy, clipping and KL.

The reference is a model in float64 numpy that sees one unpadded sequence at a time. With
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

import numpy as np
import pytest
from replay import BETA, EPS_HIGH, EPS_LOW, STEPS, TEMPERATURE, TINY, K, Saved, by_hand, saved_run
from runs import environment
from small_model import TINY_QWEN35
from tokenizers import Tokenizer

import train_grpo
from model import hf
from tools.bench import make_random_model

SETTINGS = environment(
    f"""STEPS={STEPS} BATCH_SIZE=4 NUM_PRE_Q={K} NUM_MINI_BATCHES=2 PPO_EPOCHS=2
    TRAIN_MICRO_BATCH_SIZE=4 BETA={BETA} EPS_LOW={EPS_LOW} EPS_HIGH={EPS_HIGH}
    TEMPERATURE={TEMPERATURE} LEARNING_RATE=3e-4 LR_SCHEDULE=constant WARMUP_RATIO=0
    SAVE_EVERY_STEPS=0 EXPORT_HF=none"""
)
pytestmark = pytest.mark.slow  # test_turns.py has a run of Qwen2


# ---- The steps by hand ---------------------------------------------------------------------------


def reward_of(text: str, answer: str) -> float:
    """For completions with plain numbers, as the tiny model writes them."""
    right = answer.rpartition("#### ")[2]
    given = re.findall(r"<answer>(-?\d+)</answer>", text) or re.findall(r"-?\d+", text)
    form = re.fullmatch(r"<think>[^<]+</think>\n<answer>[^<]+</answer>", text.strip())
    tags = [text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")]
    return float(given[-1:] == [right]) + 0.5 * bool(form) + 0.125 * sum(tags)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A run of a Qwen3.5 with random weights."""
    runs = tmp_path_factory.mktemp("runs")
    make_random_model(TINY, runs / "model", TINY_QWEN35 | {"num_hidden_layers": 4})
    model = hf.read_config(runs / "model")
    return saved_run(runs, train_grpo, model, MODEL_PATH=str(runs / "model"), **SETTINGS)


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
