"""What transformers has computed in float64 with random models, as goldens/NAME.npz and .json hold
it with their weights; what it computes now; and decoding beside it."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from small_model import GOLDENS, batch_of, numpy_softmax, train_layout

from model import hf
from model.attention import Cache, map_kv, prompt_rows
from model.families import FUSED_EXPERTS
from model.logps import softcap
from model.network import ComputeConfig, forward, forward_token, split_prefix
from model.params import ModelConfig, Params, arrange_layers, lm_head
from rows import Batch

# torch's own product of experts has no odd sizes.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    """The ids and the mask of three sequences of 24, 19 and 12 tokens, left-padded, what they give,
    and as `weight:NAME` the weights."""
    return dict(np.load(GOLDENS.with_name(f"{name}.npz")))


def golden_folder(folder: Path, name: str) -> Path:
    weights = {x.removeprefix("weight:"): y for x, y in golden(name).items() if "weight:" in x}
    (folder / "config.json").write_text(GOLDENS.with_name(f"{name}.json").read_text())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def golden_batch(name: str, prompt_tokens: int = 1, share: int = 1) -> Batch:
    """The sequences, each `share` times behind a prompt of its first tokens. A completion behind a
    prompt of one token is all that transformers' loss counts."""
    pairs = zip(golden(name)["ids"], golden(name)["mask"], strict=True)
    sequences = [ids[mask == 1] for ids, mask in pairs]
    completions = [x[prompt_tokens:] for x in sequences for _ in range(share)]
    T = max(map(len, completions))
    ids = np.stack([np.pad(x, (0, T - len(x))) for x in completions])
    mask = np.int32(np.arange(T) < np.array([[len(x)] for x in completions]))
    zeros = np.zeros(ids.shape, np.float32)
    return batch_of([x[:prompt_tokens] for x in sequences], ids, mask, zeros, zeros[:, 0])


def golden_logps(
    name: str, prompt_tokens: int = 1, share: int = 1, temperature: float = 1.0
) -> np.ndarray:
    """The logps and the entropies of golden_batch, [2, B, T] float64, 0 where there is no token."""
    arrays = []
    for ids, mask, logits in zip(
        *(golden(name)[x] for x in ("ids", "mask", "logits")), strict=True
    ):
        ids, p = ids[mask == 1], numpy_softmax(logits[mask == 1].astype(float) / temperature)
        ids, p = ids[prompt_tokens:], p[prompt_tokens - 1 : -1]
        values = np.log(p[np.arange(len(ids)), ids]), -(p * np.log(p)).sum(axis=-1)
        arrays += [np.pad(values, [(0, 0), (0, 24 - prompt_tokens - len(ids))])] * share
    return np.stack(arrays, axis=1)


def golden_gradients(name: str) -> dict[str, np.ndarray]:
    """Of the loss, under the names of a model of text."""
    return {
        x.removeprefix("grad:").replace("model.language_model.", "model."): y
        for x, y in golden(name).items()
        if x.startswith("grad:")
    }


def decoded(
    params: Params,
    compute: ComputeConfig,
    prompt_ids: jax.Array,
    prompt_mask: jax.Array,
    completion_ids: jax.Array,
) -> jax.Array:
    """[B, T, D] hidden states that predict the completions, computed token by token from a cache.

    prompt_ids, prompt_mask: [P, S+1], left-padded. completion_ids: [B, T]."""
    params = arrange_layers(params, compute.layer_loop, compute.dtype)
    share = len(completion_ids) // len(prompt_ids)
    before, positions, mask = split_prefix(prompt_ids, prompt_mask)
    _, prompt = forward(params, compute, before, positions, rows=prompt_rows(mask))
    start = jnp.repeat(prompt_mask.sum(axis=1) - 1, share)

    def step(state: Any, t: jax.Array) -> tuple[Any, jax.Array]:
        token, completion = state
        cache = Cache(prompt, mask, completion, t)
        hidden, completion = forward_token(params, compute, token, start + t, cache)
        return (completion_ids[:, t], completion), hidden

    empty = map_kv(lambda kv: kv.begin_completions(*completion_ids.shape), prompt)
    if not compute.model.linear:  # places of the cache that are not written yet must not be read
        empty = jax.tree.map(lambda x: jnp.full_like(x, 1e4), empty)
    first = jnp.repeat(prompt_ids[:, -1], share)
    _, hidden = jax.lax.scan(step, (first, empty), jnp.arange(completion_ids.shape[1]))
    return hidden.swapaxes(0, 1)


def compare_with_transformers(
    other: Any, folder: Path, ids: np.ndarray, of_logits: float, of_gradients: float
) -> None:
    """A model of transformers and its folder have the same logits and gradients of a mean, up to
    these parts of the largest number of each array.

    ids: [X, t] without padding."""
    import torch

    theirs = other(input_ids=torch.tensor(ids)).logits
    torch.log_softmax(theirs, dim=-1).mean().backward()
    theirs, model, layout = theirs.detach().numpy(), hf.read_config(folder), train_layout(1, 1, 1)
    compute, rows = ComputeConfig(model, np.dtype("float32"), layout), np.ones(ids.shape, bool)
    positions = np.arange(ids.shape[1])[None].repeat(len(ids), axis=0)

    def mean(params: Params) -> tuple[jax.Array, jax.Array]:
        hidden, _ = forward(params, compute, ids, positions, prompt_rows(rows))
        logits = softcap(hidden @ lm_head(params).T, model.logits_softcap)
        return jax.nn.log_softmax(logits).mean(), logits

    params = hf.load_params(folder, model, layout.mesh, np.float32)
    (_, logits), grads = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=of_logits * np.abs(theirs).max())
    named = dataclasses.replace(model, names=FUSED_EXPERTS) if model.moe else model
    expected = {name: x.grad.numpy() for name, x in other.named_parameters()}
    assert_same_gradients(grads, named, expected, of_gradients)


def assert_same_gradients(
    grads: Params, model: ModelConfig, expected: dict[str, np.ndarray], tolerance: float
) -> None:
    """Those of all tensors, up to `tolerance` times the largest number of each one."""
    ours = dict(hf.hf_tensors(grads, model))
    assert ours.keys() == expected.keys()
    for name, x in expected.items():
        atol = tolerance * np.abs(x).max()
        np.testing.assert_allclose(ours[name], x, rtol=0, atol=atol, err_msg=name)
