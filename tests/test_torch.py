"""One training step is torch's: transformers' Qwen2 in float64, autograd and torch.optim.

Tokens and rewards are given. The reference sees each row alone and without padding. transformers
keeps norms, rotary angles and the softmax in float32 even so, so that neither side is exact.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from formula_model import write_folder
from jax.sharding import Mesh

from loss import Objective, group_advantages
from models import hf
from runtime.layout import TRAIN_BATCH_AXES, Layout, shard_batch
from update import (
    Compute,
    Counts,
    MicroBatch,
    Optimizer,
    init_state,
    merge_metrics,
    micro_step,
    optimizer_step,
    zero_grads,
)

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 11, 2], [7, 7, 30, 1, 19, 8]]
LENGTHS = [4, 1, 7, 2, 7, 5, 6, 3]  # of 4 completions each, but for the third and fifth stopped
K, T, WIDTH, STOP = 4, 7, 8, 9
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
def quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of arrays this small, more wait for one another
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("qwen2"), "qwen2")


class Given(NamedTuple):
    """A step's 8 rows; of each list an entry a row, of a row's numbers one a token."""

    prompts: list[list[int]]
    completions: list[list[int]]
    advantages: np.ndarray
    old_logps: list[np.ndarray]
    ref_logps: list[np.ndarray]


@functools.cache
def given(folder: Path) -> Given:
    """Old and reference log-probabilities are near the model's, so that some tokens clip."""
    rng = np.random.default_rng(0)
    prompts = [PROMPTS[row // K] for row in range(2 * K)]
    completions = [rng.integers(STOP + 1, 48, n).tolist() for n in LENGTHS]
    for tokens in completions:
        tokens[-1] = STOP if len(tokens) < T else tokens[-1]
    model = load_torch(folder)
    rows = zip(prompts, completions, strict=True)
    with torch.no_grad():
        logps = [torch_logps(model, *row).numpy() for row in rows]
    old, ref = ([np.float32(x + s * rng.normal(size=x.shape)) for x in logps] for s in (0.3, 0.5))
    advantages = np.float32(group_advantages(np.array(REWARDS), K))
    return Given(prompts, completions, advantages, old, ref)


class Step(NamedTuple):
    loss: float
    norm: float  # of the gradient, before clipping
    grads: dict[str, np.ndarray]  # by transformers' names
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


# ---- By torch ------------------------------------------------------------------------------------


def load_torch(folder: Path) -> Any:
    model = transformers.Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.double().eval()


def torch_logps(model: Any, prompt: list[int], completion: list[int]) -> Any:
    """[n] float64 log-probability of each token of the completion."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    table = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    return table[torch.arange(len(completion)), completion]


def torch_loss(model: Any, x: Given, variant: str, micro: int) -> Any:
    """The step's objective, of all rows; micro < 8: wrongly, the mean of its micro-batches'."""
    low, high = (LOW_GSPO, HIGH_GSPO) if variant == "gspo" else (LOW, HIGH)
    means = []
    for start in range(0, 2 * K, micro):
        rows, tokens = [], 0
        for row in range(start, start + micro):
            now = torch_logps(model, x.prompts[row], x.completions[row])
            old, ref = (torch.tensor(a[row]).double() for a in (x.old_logps, x.ref_logps))
            A, log_ratio = float(x.advantages[row]), now - old
            if variant == "gspo":
                log_ratio = log_ratio.mean().expand(len(now))
            ratio = log_ratio.exp()
            surrogate = torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
            k3 = (ref - now).exp() - (ref - now) - 1
            losses = -surrogate + BETA * ratio * k3
            rows.append(losses.sum() if variant == "dapo" else losses.mean())
            tokens += len(now)
        means.append(sum(rows) / (tokens if variant == "dapo" else micro))
    return sum(means) / len(means)


@functools.cache
def torch_step(folder: Path, variant: str, optimizer: str, micro: int = 2 * K) -> Step:
    model = load_torch(folder)
    named = dict(model.named_parameters())
    before = {name: p.detach().numpy().copy() for name, p in named.items()}
    loss = torch_loss(model, given(folder), variant, micro)
    loss.backward()
    grads = {name: p.grad.numpy().copy() for name, p in named.items()}
    norm = torch.nn.utils.clip_grad_norm_(named.values(), CLIP_NORM)
    if optimizer == "sgd":
        torch.optim.SGD(named.values(), LR["sgd"]).step()
    else:  # biases and norms, the vectors, do not decay
        groups = [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
        ]
        torch.optim.AdamW(groups, LR["adamw"], betas=(0.9, 0.999), eps=1e-8).step()
    after = {name: p.detach().numpy() for name, p in named.items()}
    return Step(loss.item(), norm.item(), grads, before, after)


# ---- By ours -------------------------------------------------------------------------------------


def our_step(folder: Path, variant: str, optimizer: str) -> Step:
    """In 4 micro-batches of 2 rows with one prompt, as train_grpo.py does it."""
    config = hf.read_config(folder)
    where = Layout(
        Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("dp", "fsdp", "tp")), TRAIN_BATCH_AXES
    )
    params = hf.load_params(folder, config, where.mesh, np.dtype("float32"))
    before = dict(hf.hf_tensors(params, config))
    counts = Counts(*map(np.float32, (sum(LENGTHS), 2 * K, sum(LENGTHS))))
    grads, parts = zero_grads(params), []
    for batch in micro_batches(given(folder), 2, where):
        grads, metrics, _ = micro_step(
            params, grads, batch, counts, objective=OBJECTIVES[variant], temperature=TEMPERATURE,
            compute=Compute(config, np.dtype("float32"), where),
        )  # fmt: skip
        parts.append(metrics)
    metrics = merge_metrics(parts)
    assert min(metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]) > 0
    rule = Optimizer(optimizer, DECAY if optimizer == "adamw" else 0.0, CLIP_NORM)
    state = init_state(params, optimizer=rule, config=config)
    lr = np.float32(LR[optimizer])
    state, norm = optimizer_step(state, grads, lr, optimizer=rule, config=config)
    exported = [dict(hf.hf_tensors(tree, config)) for tree in (grads, state.params)]
    return Step(metrics["loss"], float(norm), exported[0], before, exported[1])


def micro_batches(x: Given, micro: int, where: Layout) -> list[MicroBatch]:
    """Prompts left-padded; garbage after the stop token."""
    prompt_ids, ids = (np.full((2 * K, n), STOP, np.int32) for n in (WIDTH, T))
    prompt_mask, mask = np.zeros_like(prompt_ids), np.zeros_like(ids)
    old, ref = np.full((2, 2 * K, T), 99, np.float32)
    for row, (prompt, n) in enumerate(zip(x.prompts, LENGTHS, strict=True)):
        prompt_ids[row, -len(prompt) :], prompt_mask[row, -len(prompt) :] = prompt, 1
        ids[row, :n], mask[row, :n] = x.completions[row], 1
        old[row, :n], ref[row, :n] = x.old_logps[row], x.ref_logps[row]
    batches = []
    for start in range(0, 2 * K, micro):
        own = slice(start, start + micro)
        prompts = [a[own][:1] for a in (prompt_ids, prompt_mask)]
        rows = [a[own] for a in (ids, mask, old, x.advantages, old, ref)]  # the sampler's are old
        batches.append(MicroBatch(*(shard_batch(a, where) for a in [*prompts, *rows])))
    return batches


# ---- They agree ----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("variant", OBJECTIVES)
def test_loss_gradient_and_new_weights_are_torch_s(
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
        # AdamW's first step is the gradient's sign: noise where that is 0 but for rounding.
        sure = np.abs(grad) > (1e-6 * theirs.norm if optimizer == "adamw" else -1)
        sure |= grad == 0  # embeddings of tokens that are no input
        unsure += (~sure).sum()
        np.testing.assert_allclose(
            ours.after[name][sure], expected[sure], rtol=0, atol=2e-6, err_msg=name
        )
        assert np.abs(expected - theirs.before[name]).max() > 1e-3, f"{name} has not moved"
    assert unsure < 40, "of 17184"


def test_the_comparison_sees_a_wrong_denominator(folder: Path) -> None:
    """Each micro-batch divided by its own tokens, and those means averaged."""
    ours = our_step(folder, "dapo", "sgd")
    theirs = torch_step(folder, "dapo", "sgd", micro=2)
    assert abs(ours.loss - theirs.loss) > 1e-3 and abs(ours.norm - theirs.norm) > 1e-3
    assert max(np.abs(ours.after[name] - theirs.after[name]).max() for name in ours.after) > 1e-3
