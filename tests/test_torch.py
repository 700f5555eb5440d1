"""An update equals torch's: transformers' Qwen2 in float64, autograd and torch.optim.

Tokens and rewards are given. The reference sees each sequence alone and without padding. Even in
float64, transformers keeps norms, rotary angles and the softmax in float32, so that neither side is
exact. The objective is dapo with a KL; test_loss.py compares the others with TRL.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import batch_of, counts_by_hand, in_rows, train_layout, write_folder

from loss import AdvantageConfig, Objective, group_advantages
from model import hf
from model.layout import shard_batch
from model.network import ComputeConfig
from optimizer import Optimizer, init_state, optimizer_step
from rows import Batch
from update import merge_metrics, micro_step

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 11, 2], [7, 7, 30, 1, 19, 8]]
# The completions of both prompts; a stop token ends each but those of 7 tokens.
LENGTHS = [4, 1, 7, 2, 7, 5, 6, 3]
K, T, STOP = 4, 7, 9
REWARDS = [1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, 0.2]
TEMPERATURE, BETA, LOW, HIGH = 0.9, 0.1, 0.2, 0.3
LR, DECAY, CLIP_NORM = 0.01, 0.1, 1.0


class Step(NamedTuple):
    loss: float
    norm: float  # the norm of the gradient before clipping
    grads: dict[str, np.ndarray]  # by the names of transformers
    before: dict[str, np.ndarray]  # the weights before the update
    after: dict[str, np.ndarray]  # the weights after the update


# ---- By torch ------------------------------------------------------------------------------------


def torch_logps(model: Any, prompt: list[int], completion: list[int]) -> Any:
    """[n] float64 log-probability of each token of the completion."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    table = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    return table[torch.arange(len(completion)), completion]


def batch_near(model: Any) -> Batch:
    """The 8 sequences of a step. Old and reference log-probabilities are near the model's, so that
    some tokens clip. After the stop token there is garbage."""
    rng = np.random.default_rng(0)
    ids, mask = np.full((2 * K, T), STOP, np.int32), np.zeros((2 * K, T), np.int32)
    old, ref = np.full((2, 2 * K, T), 99, np.float32)
    for i, n in enumerate(LENGTHS):
        ids[i, :n] = rng.integers(STOP + 1, 48, n)
        ids[i, n - 1] = STOP if n < T else ids[i, n - 1]
        mask[i, :n] = 1
        with torch.no_grad():
            logps = torch_logps(model, PROMPTS[i // K], ids[i, :n].tolist()).numpy()
        old[i, :n], ref[i, :n] = (logps + scale * rng.normal(size=n) for scale in (0.3, 0.5))
    advantages = np.float32(group_advantages(np.array(REWARDS), K, AdvantageConfig()))
    return batch_of(PROMPTS, ids, mask, old, advantages, old, ref)  # the sampler's logps are old


def torch_step(model: Any, batch: Batch) -> Step:
    named = dict(model.named_parameters())
    before = {name: p.detach().numpy().copy() for name, p in named.items()}
    loss = 0
    for i, n in enumerate(LENGTHS):
        now = torch_logps(model, PROMPTS[i // K], batch.completion_ids[i, :n].tolist())
        old, ref = (torch.tensor(x[i, :n]).double() for x in (batch.old_logps, batch.ref_logps))
        A, ratio = float(batch.advantages[i]), (now - old).exp()
        surrogate = torch.minimum(ratio * A, ratio.clamp(1 - LOW, 1 + HIGH) * A)
        k3 = (ref - now).exp() - (ref - now) - 1
        loss = loss + (BETA * ratio * k3 - surrogate).sum() / sum(LENGTHS)
    loss.backward()
    grads = {name: p.grad.numpy().copy() for name, p in named.items()}
    norm = torch.nn.utils.clip_grad_norm_(named.values(), CLIP_NORM)
    groups = [  # biases and norms, which are vectors, do not decay
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, LR, betas=(0.9, 0.999), eps=1e-8).step()
    after = {name: p.detach().numpy() for name, p in named.items()}
    return Step(loss.item(), norm.item(), grads, before, after)


# ---- By this project -----------------------------------------------------------------------------


def our_step(folder: Path, batch: Batch) -> Step:
    """In 4 micro-batches of 2 sequences with a prompt in common, as train_grpo.py does it."""
    model, where = hf.read_config(folder), train_layout(1, 1, 1)
    params = hf.load_params(folder, model, where.mesh, np.dtype("float32"))
    before = dict(hf.hf_tensors(params, model))
    grads, parts = jax.tree.map(jnp.zeros_like, params), []
    for first in range(0, 2 * K, 2):
        grads, metrics = micro_step(
            params,
            grads,
            shard_batch(in_rows(batch, 2, range(first, first + 2)), where),
            counts_by_hand(sum(LENGTHS), 2 * K, sum(LENGTHS)),
            objective=Objective("dapo", LOW, HIGH, beta=BETA),
            temperature=TEMPERATURE,
            compute=ComputeConfig(model, np.dtype("float32"), where),
        )
        parts.append(metrics)
    metrics = merge_metrics(parts)
    assert min(metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]) > 0
    settings = {"optimizer": Optimizer("adamw", DECAY, CLIP_NORM), "model": model}
    state = init_state(params, **settings)
    state, norms = optimizer_step(state, grads, np.float32(LR), metrics["loss"], **settings)
    exported = [dict(hf.hf_tensors(tree, model)) for tree in (grads, state.params)]
    return Step(metrics["loss"], norms["grad_norm"], exported[0], before, exported[1])


# ---- They agree ----------------------------------------------------------------------------------


def test_loss_gradient_and_new_weights_equal_those_of_torch(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "qwen2")
    model = transformers.Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="eager")
    batch = batch_near(model.double().eval())
    ours, theirs = our_step(folder, batch), torch_step(model, batch)
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
    assert ours.norm == pytest.approx(theirs.norm, rel=5e-6) and theirs.norm > 2 * CLIP_NORM
    assert ours.after.keys() == theirs.after.keys() and len(ours.after) == 27
    unsure = 0
    for name, expected in theirs.after.items():
        grad = theirs.grads[name]
        np.testing.assert_array_equal(ours.before[name], theirs.before[name])
        np.testing.assert_allclose(ours.grads[name], grad, rtol=1e-5, atol=5e-6, err_msg=name)
        # The first update of AdamW is the sign of the gradient: noise where the gradient is only
        # rounding. It is 0 for the embeddings of tokens that do not occur.
        sure = (np.abs(grad) > 1e-6 * theirs.norm) | (grad == 0)
        unsure += (~sure).sum()
        np.testing.assert_allclose(
            ours.after[name][sure], expected[sure], rtol=0, atol=2e-6, err_msg=name
        )
        assert np.abs(expected - theirs.before[name]).max() > 1e-3, f"{name} has not moved"
    assert unsure < 40, "of 17184"
