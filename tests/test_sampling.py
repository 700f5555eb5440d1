"""Claims about sampling.py: what is drawn, with which probability, and where a completion ends.

The reference is a Qwen2 in float64 numpy. It sees a single unpadded sequence and has no cache.
"""

import dataclasses
import functools
import math
import operator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_model
from jax.sharding import Mesh

from data import pad_prompts
from models.draw import Sampling, draw_tokens
from models.model import Compute, Leaf, Params, param_table
from runtime.layout import ROLLOUT_BATCH_AXES, Layout
from sampling import (
    Completions,
    Stopping,
    _asking_is_slow,
    begin,
    decode,
    generate,
    prefill,
    stage_ends,
)
from update import sync_weights

MODEL = dataclasses.replace(
    small_model.MODEL, vocab_size=40, rms_norm_eps=1e-5, rope_theta=100.0, tied=False, qkv_bias=True
)
PAD = 39  # this is also an ordinary token: it may be drawn and does not stop
NEVER = -1  # a stop id that no token has
WARM = Sampling(0.7)
PROMPTS = [[5, 11, 2], [7, 7, 30, 1, 19, 8, 24]]


@functools.cache
def weights() -> Params:
    """Float64 numpy parameters whose distributions have about 2 nats and depend on every token."""
    rng = np.random.default_rng(0)

    def draw(leaf: Leaf) -> np.ndarray:
        scales = {"norm": 0.2, "bias": 0.3, "embed": 1.0, "lm_head": 0.4}
        known = [scale for word, scale in scales.items() if word in leaf.name]
        scale = known[0] if known else leaf.shape[1] ** -0.5
        return scale * rng.normal(size=leaf.shape) + ("norm" in leaf.name)

    return jax.tree.map(draw, param_table(MODEL))


def numpy_logits(params: Params, ids: list[int]) -> np.ndarray:
    """[n, V] float64: the logits after each of n tokens."""
    c, n = MODEL, len(ids)
    angles = np.arange(n)[:, None] * c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + c.rms_norm_eps) * scale

    def heads(x: np.ndarray, count: int, rotated: bool = True) -> np.ndarray:
        x = x.reshape(n, count, c.head_dim)
        a, b = np.split(x, 2, axis=-1)
        turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return (turned if rotated else x).repeat(c.num_heads // count, axis=1)  # [n, H, h]

    x = params.embed[ids]
    for i in range(c.num_layers):
        w = jax.tree.map(operator.itemgetter(i), params.layers)
        y = norm(x, w.attn_norm)
        q, k = heads(y @ w.wq + w.bq, c.num_heads), heads(y @ w.wk + w.bk, c.num_kv_heads)
        v = heads(y @ w.wv + w.bv, c.num_kv_heads, rotated=False)
        scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(c.head_dim)
        scores = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
        attention = scores / scores.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", attention, v).reshape(n, -1) @ w.wo
        y = norm(x, w.mlp_norm)
        gate = y @ w.gate
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w.up)) @ w.down
    return norm(x, params.final_norm) @ params.lm_head.T


def numpy_softmax(logits: np.ndarray) -> np.ndarray:
    unnormalised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return unnormalised / unnormalised.sum(axis=-1, keepdims=True)


def numpy_filter(probs: np.ndarray, sampling: Sampling) -> np.ndarray:
    """probs [V], 0 for the tokens that the filters drop; the others are scaled to sum to 1."""
    ranked = list(np.argsort(-probs))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total, mass, kept = probs[ranked].sum(), 0.0, []
    for token in ranked:
        if mass < sampling.top_p * total:
            kept.append(token)
        mass += probs[token]
    kept = [token for token in kept if probs[token] >= sampling.min_p * probs.max()]
    filtered = np.zeros_like(probs)
    filtered[kept] = probs[kept] / probs[kept].sum()
    return filtered


def layout(*shape: int) -> Layout:
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Layout(Mesh(devices, ("dp", "fsdp", "tp")), ROLLOUT_BATCH_AXES)


def run(
    sampling: Sampling = WARM,
    prompts: list[list[int]] = PROMPTS,
    K: int = 8,
    *,
    T: int = 12,
    sequence_ids: range | None = None,
    key: int = 0,
    stop_ids: tuple[int, ...] = (NEVER,),
    mesh: tuple[int, int, int] = (1, 1, 1),
    params: Params | None = None,
    layer_loop: str = "scan",
    drop: bool = False,
) -> Completions:
    where, dtype = layout(*mesh), jnp.dtype("float32")
    params = jax.tree.map(np.float32, params or weights())
    return generate(
        sync_weights(MODEL, where.mesh, dtype, layer_loop)(params),
        Compute(MODEL, dtype, where, layer_loop=layer_loop),
        *pad_prompts(prompts, 11, PAD),
        np.array(sequence_ids or range(len(prompts) * K), np.int32),
        jax.random.key(key),
        sampling=sampling,
        stopping=Stopping(T, stop_ids, PAD),
        drop=drop,
    )


def assert_same(a: Completions, b: Completions) -> None:
    assert a.completion_ids.tolist() == b.completion_ids.tolist()
    assert a.completion_mask.tolist() == b.completion_mask.tolist()
    np.testing.assert_allclose(a.sampling_logps, b.sampling_logps, atol=1e-5)


# ---- What is drawn -------------------------------------------------------------------------------


def test_greedy_tokens_are_the_argmax_of_a_forward_pass_over_the_full_sequence() -> None:
    """This holds until a sequence ends. Only padding follows its end."""
    prompts, K, T = [*PROMPTS, [33]], 5, 7  # the last prompt is a single token
    tokens: list[list[int]] = [[], [], []]
    logps: list[list[float]] = [[], [], []]
    for p, prompt in enumerate(prompts):
        for _ in range(T):
            probs = numpy_softmax(numpy_logits(weights(), prompt + tokens[p])[-1])
            tokens[p].append(int(probs.argmax()))
            logps[p].append(math.log(probs.max()))
    stop_ids = tuple({drawn[4] for drawn in tokens})
    found = run(Sampling(temperature=0.0), prompts, K, T=T, stop_ids=stop_ids)
    dtypes = {"completion_ids": "int32", "completion_mask": "int32", "sampling_logps": "float32"}
    for name, dtype in dtypes.items():
        assert getattr(found, name).shape == (15, 7) and getattr(found, name).dtype == dtype
    assert found.lengths.tolist() == found.completion_mask.sum(axis=1).tolist()
    for p in range(3):
        n = 1 + min(t for t in range(T) if tokens[p][t] in stop_ids)
        group = slice(p * K, (p + 1) * K)
        assert found.completion_ids[group].tolist() == [tokens[p][:n] + [PAD] * (T - n)] * K
        assert found.lengths[group].tolist() == [n] * K
        expected = [logps[p][:n] + [0.0] * (T - n)] * K
        np.testing.assert_allclose(found.sampling_logps[group], expected, atol=2e-5)


@pytest.mark.parametrize(
    "sampling",
    [WARM, Sampling(1.3, top_k=9, top_p=0.8, min_p=0.1)],
    ids=["temperature", "filtered"],
)
def test_sampling_logps_are_of_the_distribution_that_was_drawn_from(sampling: Sampling) -> None:
    found = run(sampling)
    for i, tokens in enumerate(found.completion_ids.tolist()):
        prompt = PROMPTS[i // 8]
        logits = numpy_logits(weights(), prompt + tokens)[len(prompt) - 1 : -1]
        probs = numpy_softmax(logits / sampling.temperature)  # [T, V]
        drawn = [numpy_filter(p, sampling)[token] for p, token in zip(probs, tokens, strict=True)]
        assert min(drawn) > 0, "a token that the filters drop was drawn"
        np.testing.assert_allclose(found.sampling_logps[i], np.log(drawn), atol=2e-5)


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 1, 4)], ids=str)
def test_eight_devices_draw_the_tokens_that_one_device_draws(mesh: tuple[int, int, int]) -> None:
    assert_same(run(mesh=mesh), run())


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 4)], ids=str)
def test_unrolled_layers_and_a_cache_that_grows_draw_the_same_tokens(
    mesh: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampling.STAGE_TOKENS", 4)
    assert stage_ends(12, "unroll") == [4, 8, 12] and stage_ends(12, "scan") == [12]
    assert_same(run(mesh=mesh, layer_loop="unroll"), run())


@pytest.mark.parametrize(
    "processes, platform, slow",
    [((0, 0), "cpu", False), ((0, 1), "cpu", True), ((0, 1), "gpu", True), ((0, 1), "tpu", False)],
)
def test_processes_ask_rarely_unless_links_of_a_tpu_join_them(processes, platform, slow) -> None:
    devices = [SimpleNamespace(process_index=i, platform=platform) for i in processes]
    assert _asking_is_slow(Layout(SimpleNamespace(devices=np.array(devices)), ())) is slow


def test_asking_rarely_whether_all_sequences_have_ended_draws_the_same_tokens(monkeypatch) -> None:
    """As several processes do; the stages and the completions end between two questions."""
    monkeypatch.setattr("sampling.STAGE_TOKENS", 4)
    monkeypatch.setattr("sampling.ASK_EVERY", 3)
    monkeypatch.setattr("sampling._asking_is_slow", lambda layout: True)
    assert stage_ends(13, "unroll") == [5, 9, 13]
    assert_same(run(T=13, layer_loop="unroll"), run(T=13))


def test_a_cache_grows_in_at_most_four_stages_of_128_tokens_or_more() -> None:
    ends = [stage_ends(T, "unroll") for T in (1, 128, 255, 257, 1000)]
    assert ends == [[1], [128], [255], [129, 257], [250, 500, 750, 1000]]


def test_two_passes_draw_the_tokens_that_one_pass_draws() -> None:
    first, second = run(prompts=PROMPTS[:1]), run(prompts=PROMPTS[1:], sequence_ids=range(8, 16))
    assert_same(jax.tree.map(lambda *x: np.concatenate(x), first, second), run())


def test_repeated_prompts_draw_the_tokens_that_one_prompt_with_a_group_draws() -> None:
    assert_same(run(prompts=[p for p in PROMPTS for _ in range(8)], K=1), run())


def test_other_sequences_of_a_group_and_other_keys_draw_other_tokens() -> None:
    passes = [run(), run(key=1), run(sequence_ids=range(16, 32))]
    drawn = [(i // 8, tuple(ids)) for x in passes for i, ids in enumerate(x.completion_ids)]
    assert len(set(drawn)) == 48


def test_every_token_of_a_sequence_is_drawn_anew() -> None:
    """With equal logits, the tokens of all sequences and positions together are uniform."""
    flat = weights().replace(lm_head=np.zeros((40, 16)))
    tokens = np.stack([run(key=key, params=flat).completion_ids for key in range(20)])
    assert_drawn_from(tokens.reshape(-1), np.full(40, 1 / 40))
    pairs = tokens[..., :-1] % 4 * 4 + tokens[..., 1:] % 4  # pairs of neighbours
    assert_drawn_from(pairs.reshape(-1), np.full(16, 1 / 16))


# ---- Where a completion ends ---------------------------------------------------------------------


def test_every_stop_id_ends_a_completion_from_the_first_token_on() -> None:
    free = run().completion_ids
    stop_ids = (int(free[0, 0]), int(free[9, 5]))
    stopped = run(stop_ids=stop_ids)
    lengths = []
    for i, tokens in enumerate(free.tolist()):
        ends = [t + 1 for t, token in enumerate(tokens) if token in stop_ids]
        length = min(ends, default=12)
        assert stopped.completion_ids[i].tolist() == tokens[:length] + [PAD] * (12 - length)
        assert stopped.completion_mask[i].tolist() == [1] * length + [0] * (12 - length)
        assert (stopped.sampling_logps[i, :length] < 0).all()
        assert (stopped.sampling_logps[i, length:] == 0).all()
        lengths.append(length)
    # All cases occur: each stop token ends a sequence; one ends at its first token, one in the
    # middle, and one never.
    last_ids = stopped.completion_ids[np.arange(16), stopped.lengths - 1]
    assert set(stop_ids) <= set(last_ids.tolist())
    assert lengths[0] == 1 and set(range(2, 12)) & set(lengths)
    cut_off = [i for i, token in enumerate(last_ids) if token not in stop_ids]
    assert cut_off and all(lengths[i] == 12 for i in cut_off)
    assert stopped.lengths.tolist() == lengths


# ---- One token -----------------------------------------------------------------------------------


def assert_drawn_from(tokens: np.ndarray, probs: np.ndarray) -> None:
    """Pearson's chi-square is within 5 standard deviations; no token of probability 0 is drawn."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert len(counts) == len(probs), f"index {len(counts) - 1} of {len(probs)}"
    possible = probs > 0
    assert counts[~possible].sum() == 0
    expected = len(tokens) * probs[possible]
    chi_square, freedom = ((counts[possible] - expected) ** 2 / expected).sum(), possible.sum() - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom), (chi_square, freedom)


def draw(logits: np.ndarray, sampling: Sampling, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` tokens from logits [V], each drawn with another key, and their logps."""
    copies = jnp.broadcast_to(jnp.float32(logits), (count, len(logits)))  # [count, V]
    keys = jax.random.split(jax.random.key(3), count)
    token, logp = jax.jit(draw_tokens, static_argnums=2)(keys, copies, sampling)
    assert token.shape == logp.shape == (count,)
    assert token.dtype == jnp.int32 and logp.dtype == jnp.float32
    return np.asarray(token), np.asarray(logp)


@pytest.mark.parametrize(
    "V, sampling",
    [
        (1000, Sampling(1.0)),
        (37, Sampling(0.5)),
        (37, Sampling(1.0, top_k=5)),
        (37, Sampling(2.0, top_k=20, top_p=0.7, min_p=0.3)),
    ],
    ids=["large", "temperature", "top_k", "all"],
)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(V: int, sampling: Sampling) -> None:
    logits = np.random.default_rng(V).normal(scale=0.7, size=V)
    token, logp = draw(logits, sampling, 10000)
    probs = numpy_filter(numpy_softmax(logits / sampling.temperature), sampling)
    assert_drawn_from(token, probs)
    np.testing.assert_allclose(logp, np.log(probs[token]), atol=1e-5)


@pytest.mark.parametrize("V", [1, 3, 17, 37])
def test_no_token_beyond_a_vocabulary_that_does_not_fill_its_blocks_is_drawn(V: int) -> None:
    logits = np.where(
        np.arange(V) == V - 1, -40.0, -45.0
    )  # far below 0, like the padding of a block
    token, _ = draw(logits, Sampling(), 2000)
    assert_drawn_from(token, numpy_softmax(logits))


# ---- Shapes --------------------------------------------------------------------------------------


def test_prefill_and_decode_give_the_documented_shapes() -> None:
    L, G, share, N, S, h, T = 3, 5, 7, 2, 10, 8, 13
    R, dtype = G * share, jnp.dtype("bfloat16")
    padded = jax.ShapeDtypeStruct((G, S + 1), jnp.int32)
    params, compute = jax.tree.map(jnp.float32, weights()), Compute(MODEL, dtype)
    prefix = jax.eval_shape(
        lambda params, *prompts: prefill(params, compute, *prompts), params, padded, padded
    )
    assert prefix.k.shape == (L, G, N, h, S)
    assert prefix.v.shape == (L, G, N, S, h)
    assert prefix.k.dtype == dtype
    how = {"sampling": Sampling(), "stopping": Stopping(T, (3,), 3)}

    def decoding(params: Params, *given: Any) -> dict[str, jax.Array]:
        state = begin(compute, *given, width=T, **how)
        return decode(params, compute, state, T, 0, **how).drawn

    given = padded, padded, prefix, jax.ShapeDtypeStruct((R,), jnp.int32), jax.random.key(0)
    results = jax.eval_shape(decoding, params, *given)
    assert {name: (x.shape, x.dtype) for name, x in results.items()} == {
        "completion_ids": ((R, T), jnp.int32),
        "sampling_logps": ((R, T), jnp.float32),
        "lengths": ((R,), jnp.int32),
    }
