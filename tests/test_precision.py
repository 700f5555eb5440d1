"""Claims about how far micro-batches and bfloat16 change a step's gradient, on the model tiny/.

In float32 micro-batches change nothing; in bfloat16 each forward and backward pass rounds.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from small_model import batch_of, counts_by_hand, in_rows

import data
import rewards
from loss import Objective
from models import hf
from models.model import Compute
from runtime.layout import TRAIN_BATCH_AXES, Layout, shard_batch
from runtime.packing import Batch
from update import MicroBatch, micro_step, zero_grads

TINY = Path(__file__).resolve().parent.parent / "tiny"
P, K, T = 8, 4, 32
B = P * K
WHERE = Layout(
    Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("dp", "fsdp", "tp")), TRAIN_BATCH_AXES
)


@functools.cache
def step() -> Batch:
    """The sequences of the step, of P questions with K answers each.

    One answer is right, two are wrong by 10 and by 1, and one has no answer.
    """
    tokenizer = hf.load_tokenizer(TINY)
    questions = data.load_examples(str(TINY), "main", "test")[:P]
    prompts = data.build_prompts(questions, tokenizer, rewards.SYSTEM_PROMPT)
    ids, mask, answers = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32), []
    for question in questions:
        steps = ", ".join(re.findall("<<(.*?)>>", question["answer"]))
        result = int(question["answer"].rpartition(" ")[2])
        thought = f"<think>{steps}</think>"
        answers += [f"{thought}\n<answer>{result - wrong}</answer>" for wrong in (0, 10, 1)]
        answers += [thought]
    for i, answer in enumerate(answers):
        tokens = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id][:T]
        ids[i, : len(tokens)], mask[i, : len(tokens)] = tokens, 1
    advantages = np.tile(np.float32([1.5, -0.5, -0.5, -0.5]), P)
    return batch_of([p.ids for p in prompts], ids, mask, np.zeros((B, T), np.float32), advantages)


@functools.cache
def gradient(dtype: str, micro: int, wrong: str = "") -> np.ndarray:
    """The gradient of the step as a vector. wrong: a mistake made on purpose."""
    model = hf.read_config(TINY)
    params = hf.load_params(TINY, model, WHERE.mesh, jnp.float32)
    batch, mask = step(), step().completion_mask
    longest = max(len(prompt.ids) for prompt in batch.prompts)
    total, compute = zero_grads(params), Compute(model, jnp.dtype(dtype), WHERE)
    for start in range(0, B - micro if wrong == "one is left out" else B, micro):
        arrays = in_rows(batch, K, range(start, start + micro), S=longest - 1)
        tokens = mask.size if wrong == "padding is counted" else mask.sum()
        total, _, _ = micro_step(
            params,
            total,
            MicroBatch(**{name: shard_batch(x, WHERE) for name, x in arrays.items()}),
            counts_by_hand(tokens, B, tokens),
            objective=Objective(),
            temperature=1.0,
            compute=compute,
        )
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(total)])


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(
    "dtype, micro, other, least, most",
    [
        ("float32", 4, "float32", 0, 1e-5),
        ("float32", 8, "float32", 0, 1e-5),
        ("bfloat16", 4, "bfloat16", 1e-4, 0.02),
        ("bfloat16", 4, "float32", 1e-4, 0.04),
        ("bfloat16", B, "float32", 1e-4, 0.04),
    ],
)
def test_micro_batches_and_bfloat16_change_the_gradient_of_a_step_by_little(
    dtype: str, micro: int, other: str, least: float, most: float
) -> None:
    """2 % and 4 % in bfloat16. The other gradient is that of a single micro-batch."""
    assert least <= difference(gradient(dtype, micro), gradient(other, B)) < most


@pytest.mark.parametrize("wrong", ["one is left out", "padding is counted"])
def test_a_micro_batch_left_out_or_a_wrong_divisor_changes_the_gradient_more_than_that(
    wrong: str,
) -> None:
    assert difference(gradient("bfloat16", 4, wrong), gradient("float32", B)) > 0.04
