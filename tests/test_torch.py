"""Claims that an update equals torch's: transformers' Qwen2 in float64, autograd and torch.optim.

Tokens and rewards are given. The reference sees each sequence alone and without padding. Even in
float64, transformers keeps norms, rotary angles and the softmax in float32, so that neither side is
exact.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from small_model import batch_of, counts_by_hand, in_rows, write_folder

from loss import Objective, group_advantages
from metrics import merge_metrics
from model import hf
from model.layout import TRAIN_BATCH_AXES, Layout, shard_batch
from model.network import Compute
from rows import MicroBatch
from update import Optimizer, init_state, micro_step, optimizer_step

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 11, 2], [7, 7, 30, 1, 19, 8]]
# The completions of both prompts; a stop token ends each but those of 7 tokens.
LENGTHS = [4, 1, 7, 2, 7, 5, 6, 3]
K, T, WIDTH, STOP = 4, 7, 7, 9  # WIDTH: places for a prompt without its last token
REWARDS = [1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, 0.2]
TEMPERATURE, BETA = 0.9, 0.1
LOW, HIGH, LOW_GSPO, HIGH_GSPO = 0.2, 0.3, 3e-4, 4e-4
DECAY, CLIP_NORM = 0.1, 1.0
OBJECTIVES = {
    "dapo": Objective("dapo", LOW, HIGH, beta=BETA),
    "grpo": Objective("grpo", LOW, HIGH, beta=BETA),
    "gspo": Objective("gspo", LOW_GSPO, HIGH_GSPO, beta=BETA),
}
LR = {"sgd": 1.0, "adamw": 0.01}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with arrays this small, several threads wait for one another
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("qwen2"), "qwen2")


class Given(NamedTuple):
    """The 8 sequences of a step; each list has an entry for each sequence."""

    prompts: list[list[int]]
    completions: list[list[int]]
    advantages: np.ndarray
    old_logps: list[np.ndarray]  # a number for each token
    ref_logps: list[np.ndarray]  # a number for each token


@functools.cache
def given(folder: Path) -> Given:
    """Old and reference log-probabilities are near the model's, so that some tokens clip."""
    rng = np.random.default_rng(0)
    prompts = [PROMPTS[i // K] for i in range(2 * K)]
    completions = [rng.integers(STOP + 1, 48, n).tolist() for n in LENGTHS]
    for tokens in completions:
        tokens[-1] = STOP if len(tokens) < T else tokens[-1]
    model = load_torch(folder)
    with torch.no_grad():
        pairs = zip(prompts, completions, strict=True)
        logps = [torch_logps(model, *pair).numpy() for pair in pairs]
    old, ref = ([np.float32(x + s * rng.normal(size=x.shape)) for x in logps] for s in (0.3, 0.5))
    advantages = np.float32(group_advantages(np.array(REWARDS), K))
    return Given(prompts, completions, advantages, old, ref)


class Step(NamedTuple):
    loss: float
    norm: float  # the norm of the gradient before clipping
    grads: dict[str, np.ndarray]  # by the names of transformers
    before: dict[str, np.ndarray]  # the weights before the update
    after: dict[str, np.ndarray]  # the weights after the update


# ---- By torch ------------------------------------------------------------------------------------


def load_torch(folder: Path) -> Any:
    model = transformers.Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.double().eval()


def torch_logps(model: Any, prompt: list[int], completion: list[int]) -> Any:
    """[n] float64 log-probability of each token of the completion."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    table = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    return table[torch.arange(len(completion)), completion]


def torch_loss(model: Any, x: Given, variant: str) -> Any:
    """The objective of the step."""
    low, high = (LOW_GSPO, HIGH_GSPO) if variant == "gspo" else (LOW, HIGH)
    of_sequences = []
    for i in range(2 * K):
        now = torch_logps(model, x.prompts[i], x.completions[i])
        old, ref = (torch.tensor(a[i]).double() for a in (x.old_logps, x.ref_logps))
        A, log_ratio = float(x.advantages[i]), now - old
        if variant == "gspo":
            log_ratio = log_ratio.mean().expand(len(now))
        ratio = log_ratio.exp()
        surrogate = torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
        k3 = (ref - now).exp() - (ref - now) - 1
        losses = -surrogate + BETA * ratio * k3
        of_sequences.append(losses.sum() if variant == "dapo" else losses.mean())
    return sum(of_sequences) / (sum(LENGTHS) if variant == "dapo" else 2 * K)


@functools.cache
def torch_step(folder: Path, variant: str, optimizer: str) -> Step:
    model = load_torch(folder)
    named = dict(model.named_parameters())
    before = {name: p.detach().numpy().copy() for name, p in named.items()}
    loss = torch_loss(model, given(folder), variant)
    loss.backward()
    grads = {name: p.grad.numpy().copy() for name, p in named.items()}
    norm = torch.nn.utils.clip_grad_norm_(named.values(), CLIP_NORM)
    if optimizer == "sgd":
        torch.optim.SGD(named.values(), LR["sgd"]).step()
    else:  # biases and norms, which are vectors, do not decay
        groups = [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
        ]
        torch.optim.AdamW(groups, LR["adamw"], betas=(0.9, 0.999), eps=1e-8).step()
    after = {name: p.detach().numpy() for name, p in named.items()}
    return Step(loss.item(), norm.item(), grads, before, after)


# ---- By this project -----------------------------------------------------------------------------


def our_step(folder: Path, variant: str, optimizer: str) -> Step:
    """In 4 micro-batches of 2 sequences with a prompt in common, as train_grpo.py does it."""
    model = hf.read_config(folder)
    where = Layout(
        Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("dp", "fsdp", "tp")), TRAIN_BATCH_AXES
    )
    params = hf.load_params(folder, model, where.mesh, np.dtype("float32"))
    before = dict(hf.hf_tensors(params, model))
    counts = counts_by_hand(sum(LENGTHS), 2 * K, sum(LENGTHS))
    grads, parts = jax.tree.map(jnp.zeros_like, params), []
    for batch in micro_batches(given(folder), 2, where):
        grads, metrics = micro_step(
            params,
            grads,
            batch,
            counts,
            objective=OBJECTIVES[variant],
            temperature=TEMPERATURE,
            compute=Compute(model, np.dtype("float32"), where),
        )
        parts.append(metrics)
    metrics = merge_metrics(parts)
    assert min(metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]) > 0
    rule = Optimizer(optimizer, DECAY if optimizer == "adamw" else 0.0, CLIP_NORM)
    state = init_state(params, optimizer=rule, model=model)
    lr = np.float32(LR[optimizer])
    state, norms = optimizer_step(state, grads, lr, np.float32(0), optimizer=rule, model=model)
    exported = [dict(hf.hf_tensors(tree, model)) for tree in (grads, state.params)]
    return Step(metrics["loss"], norms["grad_norm"], exported[0], before, exported[1])


def micro_batches(x: Given, micro: int, where: Layout) -> list[MicroBatch]:
    """After the stop token there is garbage."""
    ids, mask = np.full((2 * K, T), STOP, np.int32), np.zeros((2 * K, T), np.int32)
    old, ref = np.full((2, 2 * K, T), 99, np.float32)
    for i, n in enumerate(LENGTHS):
        ids[i, :n], mask[i, :n] = x.completions[i], 1
        old[i, :n], ref[i, :n] = x.old_logps[i], x.ref_logps[i]
    # The logps of the sampler are old_logps.
    batch = batch_of(PROMPTS, ids, mask, old, x.advantages, old, ref)
    parts = [range(start, start + micro) for start in range(0, 2 * K, micro)]
    return [shard_batch(in_rows(batch, micro, part, S=WIDTH), where) for part in parts]


# ---- They agree ----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("variant", OBJECTIVES)
def test_loss_gradient_and_new_weights_equal_those_of_torch(
    folder: Path, variant: str, optimizer: str
) -> None:
    ours, theirs = our_step(folder, variant, optimizer), torch_step(folder, variant, optimizer)
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
    assert ours.norm == pytest.approx(theirs.norm, rel=5e-6) and theirs.norm > 2 * CLIP_NORM
    assert ours.after.keys() == theirs.after.keys() and len(ours.after) == 27
    unsure = 0
    for name, expected in theirs.after.items():
        grad = theirs.grads[name]
        np.testing.assert_array_equal(ours.before[name], theirs.before[name])
        np.testing.assert_allclose(ours.grads[name], grad, rtol=1e-5, atol=5e-6, err_msg=name)
        # The first update of AdamW is the sign of the gradient: noise where the gradient is only
        # rounding.
        sure = np.abs(grad) > (1e-6 * theirs.norm if optimizer == "adamw" else -1)
        sure |= grad == 0  # the embeddings of tokens that do not occur
        unsure += (~sure).sum()
        np.testing.assert_allclose(
            ours.after[name][sure], expected[sure], rtol=0, atol=2e-6, err_msg=name
        )
        assert np.abs(expected - theirs.before[name]).max() > 1e-3, f"{name} has not moved"
    assert unsure < 40, "of 17184"
