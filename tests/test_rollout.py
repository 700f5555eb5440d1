"""Claims about rollout.py: what is drawn, with which probability, and where a completion ends.

The reference is a Qwen2 in float64 numpy that sees one unpadded sequence and has no cache.
"""

import functools
import math
import operator
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.model import Leaf, ModelConfig, Params, param_shardings, param_table
from rollout import (
    Rollout,
    Sampling,
    bucket,
    decode,
    filter_logits,
    generate,
    pad_prompts,
    prefill,
    prompt_width,
    sample,
    share,
)
from runtime.layout import ROLLOUT_BATCH_AXES, Layout

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    rope_llama3=None,
    tied=False,
    qkv_bias=True,
    qk_norm=False,
    max_positions=64,
)
PAD = 39  # also an ordinary token, that may be drawn and does not stop
NEVER = -1  # a stop id that no token has
WARM = Sampling(0.7)
PROMPTS = [[5, 11, 2], [7, 7, 30, 1, 19, 8, 24]]


@pytest.fixture(scope="module", autouse=True)
def quick_compiles() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def weights() -> Params:
    """Float64 numpy parameters whose distributions have about 2 nats and depend on every token."""
    rng = np.random.default_rng(0)

    def draw(leaf: Leaf) -> np.ndarray:
        scales = {"norm": 0.2, "bias": 0.3, "embed": 1.0, "lm_head": 0.4}
        known = [scale for word, scale in scales.items() if word in leaf.name]
        scale = known[0] if known else leaf.shape[1] ** -0.5
        return scale * rng.normal(size=leaf.shape) + ("norm" in leaf.name)

    return jax.tree.map(draw, param_table(CONFIG))


def numpy_logits(params: Params, ids: list[int]) -> np.ndarray:
    """[n, V] float64: the logits after each of n tokens."""
    c, n = CONFIG, len(ids)
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
    """probs [V] with what the filters drop at 0, and the rest made to sum to 1."""
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
    rows: range | None = None,
    key: int = 0,
    stop_ids: tuple[int, ...] = (NEVER,),
    mesh: tuple[int, int, int] = (1, 1, 1),
    params: Params | None = None,
) -> Rollout:
    where = layout(*mesh)
    params = jax.tree.map(np.float32, params or weights())
    ids, mask = pad_prompts(prompts, 11, PAD)
    return generate(
        jax.device_put(params, param_shardings(CONFIG, where.mesh)), CONFIG, ids, mask,
        np.array(rows or range(len(prompts) * K), np.int32), jax.random.key(key),
        num_pre_q=K, max_new_tokens=T, stop_ids=stop_ids, pad_id=PAD, sampling=sampling,
        dtype=jnp.dtype("float32"), layout=where,
    )  # fmt: skip


def assert_same(a: Rollout, b: Rollout) -> None:
    assert a.completion_ids.tolist() == b.completion_ids.tolist()
    assert a.completion_mask.tolist() == b.completion_mask.tolist()
    np.testing.assert_allclose(a.sampling_logps, b.sampling_logps, atol=1e-5)


# ---- What is drawn -------------------------------------------------------------------------------


def test_greedy_tokens_are_the_argmax_of_the_whole_sequence_s_forward() -> None:
    """Until every row has ended; what comes after is padding that no one computed."""
    prompts, K, T = [*PROMPTS, [33]], 5, 7  # the last has nothing before its last token
    tokens: list[list[int]] = [[], [], []]
    logps: list[list[float]] = [[], [], []]
    for p, prompt in enumerate(prompts):
        for _ in range(T):
            probs = numpy_softmax(numpy_logits(weights(), prompt + tokens[p])[-1])
            tokens[p].append(int(probs.argmax()))
            logps[p].append(math.log(probs.max()))
    stop_ids = tuple({row[4] for row in tokens})
    roll = run(Sampling(temperature=0.0), prompts, K, T=T, stop_ids=stop_ids)
    for name, dtype in zip(roll._fields, ("int32", "int32", "float32"), strict=True):
        assert getattr(roll, name).shape == (15, 7) and getattr(roll, name).dtype == dtype
    for p in range(3):
        n = 1 + min(t for t in range(T) if tokens[p][t] in stop_ids)
        group = slice(p * K, (p + 1) * K)
        assert roll.completion_ids[group].tolist() == [tokens[p][:n] + [PAD] * (T - n)] * K
        assert roll.lengths()[group].tolist() == [n] * K
        expected = [logps[p][:n] + [0.0] * (T - n)] * K
        np.testing.assert_allclose(roll.sampling_logps[group], expected, atol=2e-5)


@pytest.mark.parametrize(
    "sampling",
    [WARM, Sampling(1.3, top_k=9, top_p=0.8, min_p=0.1)],
    ids=["temperature", "filtered"],
)
def test_sampling_logps_are_of_the_distribution_that_was_drawn_from(sampling: Sampling) -> None:
    roll = run(sampling)
    for row, tokens in enumerate(roll.completion_ids.tolist()):
        prompt = PROMPTS[row // 8]
        logits = numpy_logits(weights(), prompt + tokens)[len(prompt) - 1 : -1]
        probs = numpy_softmax(logits / sampling.temperature)  # [T, V]
        drawn = [numpy_filter(p, sampling)[token] for p, token in zip(probs, tokens, strict=True)]
        assert min(drawn) > 0, "a token that the filters drop was drawn"
        np.testing.assert_allclose(roll.sampling_logps[row], np.log(drawn), atol=2e-5)


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 1, 4)], ids=str)
def test_eight_devices_draw_what_one_does(mesh: tuple[int, int, int]) -> None:
    assert_same(run(mesh=mesh), run())


def test_two_passes_draw_what_one_does() -> None:
    first, second = run(prompts=PROMPTS[:1]), run(prompts=PROMPTS[1:], rows=range(8, 16))
    both = Rollout(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))
    assert_same(both, run())


def test_a_prompt_repeated_draws_what_one_prompt_with_a_group_does() -> None:
    assert_same(run(prompts=[p for p in PROMPTS for _ in range(8)], K=1), run())


def test_the_rows_of_a_group_and_the_keys_draw_different_tokens() -> None:
    rolls = [run(), run(key=1), run(rows=range(16, 32))]
    rows = [(row // 8 % 2, tuple(r)) for roll in rolls for row, r in enumerate(roll.completion_ids)]
    assert len(set(rows)) == 48


def test_every_token_of_a_sequence_is_drawn_anew() -> None:
    """With all logits equal, the tokens of every row and step together are uniform."""
    flat = weights().replace(lm_head=np.zeros((40, 16)))
    tokens = np.stack([run(key=key, params=flat).completion_ids for key in range(20)])
    assert_drawn_from(tokens.reshape(-1), np.full(40, 1 / 40))
    pairs = tokens[..., :-1] % 4 * 4 + tokens[..., 1:] % 4  # of neighbours
    assert_drawn_from(pairs.reshape(-1), np.full(16, 1 / 16))


# ---- Where a completion ends ---------------------------------------------------------------------


def test_every_stop_id_ends_a_completion_from_the_first_token_on() -> None:
    free = run().completion_ids
    stop_ids = (int(free[0, 0]), int(free[9, 5]))
    stopped = run(stop_ids=stop_ids)
    lengths = []
    for row, tokens in enumerate(free.tolist()):
        ends = [t + 1 for t, token in enumerate(tokens) if token in stop_ids]
        length = min(ends, default=12)
        assert stopped.completion_ids[row].tolist() == tokens[:length] + [PAD] * (12 - length)
        assert stopped.completion_mask[row].tolist() == [1] * length + [0] * (12 - length)
        assert (stopped.sampling_logps[row, :length] < 0).all()
        assert (stopped.sampling_logps[row, length:] == 0).all()
        lengths.append(length)
    # The cases are all there: ended by each, at the first token, in the middle, never.
    assert set(stop_ids) <= set(stopped.last_ids().tolist())
    assert lengths[0] == 1 and set(range(2, 12)) & set(lengths)
    cut_off = [row for row, token in enumerate(stopped.last_ids()) if token not in stop_ids]
    assert cut_off and all(lengths[row] == 12 for row in cut_off)
    assert stopped.lengths().tolist() == lengths


def test_lengths_ids_and_last_ids_read_the_mask() -> None:
    ids = np.array([[7, 9, 9, 9], [5, 6, 7, 8], [1, 2, 3, 9]], np.int32)
    mask = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]], np.int32)
    roll = Rollout(ids, mask, np.zeros((3, 4), np.float32))
    assert roll.lengths().tolist() == [1, 4, 3]
    assert roll.ids() == [[7], [5, 6, 7, 8], [1, 2, 3]]
    assert roll.last_ids().tolist() == [7, 8, 3]


# ---- The sampler ---------------------------------------------------------------------------------


def assert_drawn_from(tokens: np.ndarray, probs: np.ndarray) -> None:
    """Pearson's chi-square is within 5 of its standard deviations; nothing impossible is drawn."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert len(counts) == len(probs), f"index {len(counts) - 1} of {len(probs)}"
    possible = probs > 0
    assert counts[~possible].sum() == 0
    expected = len(tokens) * probs[possible]
    chi_square, freedom = ((counts[possible] - expected) ** 2 / expected).sum(), possible.sum() - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom), (chi_square, freedom)


def draw(logits: np.ndarray, sampling: Sampling, count: int) -> tuple[np.ndarray, np.ndarray]:
    """count tokens, and their logps, from logits [V], each with its own key."""
    rows = jnp.broadcast_to(jnp.float32(logits), (count, len(logits)))  # [count, V]
    keys = jax.random.split(jax.random.key(3), count)
    token, logp = jax.jit(sample, static_argnums=2)(keys, rows, sampling)
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
def test_tokens_come_as_often_as_their_probability_says(V: int, sampling: Sampling) -> None:
    logits = np.random.default_rng(V).normal(scale=0.7, size=V)
    token, logp = draw(logits, sampling, 10000)
    probs = numpy_filter(numpy_softmax(logits / sampling.temperature), sampling)
    assert_drawn_from(token, probs)
    np.testing.assert_allclose(logp, np.log(probs[token]), atol=1e-5)


@pytest.mark.parametrize("V", [1, 3, 17, 37])
def test_a_vocabulary_that_fills_no_whole_block_yields_no_token_beyond_it(V: int) -> None:
    logits = np.where(np.arange(V) == V - 1, -40.0, -45.0)  # far below 0, as padding is
    token, _ = draw(logits, Sampling(), 2000)
    assert_drawn_from(token, numpy_softmax(logits))


# probabilities .25 .03 .5 .07 .15, not in order
LOGITS = np.log([[0.25, 0.03, 0.5, 0.07, 0.15]])


@pytest.mark.parametrize(
    "sampling, kept",
    [
        (Sampling(), [0, 1, 2, 3, 4]),
        (Sampling(top_k=1), [2]),
        (Sampling(top_k=3), [0, 2, 4]),
        (Sampling(top_k=5), [0, 1, 2, 3, 4]),
        (Sampling(top_k=99), [0, 1, 2, 3, 4]),
        (Sampling(top_p=0.01), [2]),
        (Sampling(top_p=0.49), [2]),
        (Sampling(top_p=0.51), [0, 2]),
        (Sampling(top_p=0.74), [0, 2]),
        (Sampling(top_p=0.76), [0, 2, 4]),
        (Sampling(top_p=0.98), [0, 1, 2, 3, 4]),
        (Sampling(min_p=0.16), [0, 2, 4]),  # at least .08
        (Sampling(min_p=0.13), [0, 2, 3, 4]),  # at least .065
        (Sampling(min_p=0.9), [2]),
        (Sampling(top_k=3, top_p=0.8), [0, 2]),  # of what top-k left: .56 .28 .17
        (Sampling(top_p=0.8, min_p=0.4), [0, 2]),
    ],
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, Sampling) else "",
)
def test_a_filter_keeps_just_these(sampling: Sampling, kept: list[int]) -> None:
    other = np.log([[0.03, 0.9, 0.04, 0.02, 0.01]])  # a second row has a filter of its own
    filtered = np.asarray(filter_logits(jnp.float32(np.concatenate([LOGITS, other])), sampling))
    assert np.flatnonzero(filtered[0] > -1e29).tolist() == kept
    np.testing.assert_allclose(filtered[0, kept], LOGITS[0, kept], rtol=1e-6)
    assert filtered[1].argmax() == 1


def test_a_token_that_ties_with_the_last_one_kept_is_kept() -> None:
    logits = jnp.log(jnp.array([[0.2, 0.4, 0.2, 0.2]]))
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.5)):
        assert (filter_logits(logits, sampling) > -1e29).all()


# ---- Shapes --------------------------------------------------------------------------------------


def test_the_documented_shapes() -> None:
    L, G, s, N, S, h, T = 3, 5, 7, 2, 10, 8, 13
    ids = jax.ShapeDtypeStruct((G, S + 1), jnp.int32)
    rows = jax.ShapeDtypeStruct((G * s,), jnp.int32)
    params = jax.tree.map(jnp.float32, weights())
    dtype = jnp.dtype("bfloat16")
    prefilled = functools.partial(prefill, config=CONFIG, dtype=dtype)
    prefix = jax.eval_shape(prefilled, params, prompt_ids=ids, prompt_mask=ids)
    assert prefix.k.shape == prefix.v.shape == (L, G, N, S, h)
    assert prefix.k.dtype == dtype
    drawn = functools.partial(
        decode, config=CONFIG, max_new_tokens=T, stop_ids=(3,), pad_id=3, sampling=Sampling(),
        dtype=dtype,
    )  # fmt: skip
    drawn = jax.eval_shape(
        drawn, params, prefix=prefix, prompt_ids=ids, prompt_mask=ids, sequence_ids=rows,
        key=jax.random.key(0),
    )  # fmt: skip
    assert [(x.shape, x.dtype) for x in drawn] == [
        ((G * s, T), jnp.int32), ((G * s, T), jnp.float32), ((G * s,), jnp.int32)
    ]  # fmt: skip


def test_bucket_is_the_next_power_of_two_or_three_quarters_of_it() -> None:
    lengths = [0, 1, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 96, 97, 128, 250, 1000, 1025, 1537]
    widths = [16, 16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 96, 96, 128, 128, 256, 1024, 1536, 2048]
    assert [bucket(n) for n in lengths] == widths


def test_a_prompt_is_as_wide_as_a_bucket_and_its_last_token() -> None:
    assert [prompt_width(n) for n in (1, 17, 18, 25, 26)] == [17, 17, 25, 25, 33]
    assert [prompt_width(n, 30) for n in (1, 33, 34)] == [33, 33, 49]  # at least 30 and it


@pytest.mark.parametrize(
    "num_pre_q, rows_per_shard, s",
    [(8, 16, 8), (8, 8, 8), (8, 12, 4), (8, 4, 4), (8, 2, 2), (8, 1, 1), (6, 4, 2), (3, 8, 1)],
)
def test_share_divides_the_group_and_the_shard(num_pre_q: int, rows_per_shard: int, s: int) -> None:
    assert share(num_pre_q, rows_per_shard) == s


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = pad_prompts([[5, 6], [1, 2, 3, 4], [7]], 4, 9)
    assert ids.tolist() == [[9, 9, 5, 6], [1, 2, 3, 4], [9, 9, 9, 7]]
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]
    assert ids.dtype == mask.dtype == np.int32
