"""Claims about model/next_token.py: filters keep the tokens of their rule, and what is drawn."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import assert_drawn_from, numpy_filter, numpy_softmax

from config import MAX_TOP_K
from model.logps import MASKED
from model.next_token import MAX_SUPPORT, Drawn, Sampling, draw_tokens

LARGE = 20011  # a prime; the blocks of the vocabulary do not divide it
FILTERS = [
    Sampling(top_k=50),
    Sampling(top_p=0.9),
    Sampling(min_p=0.05),
    Sampling(top_k=3, top_p=0.6),
    Sampling(top_k=100, top_p=0.95, min_p=0.02),
]


def draw(logits: np.ndarray, sampling: Sampling) -> Drawn:
    """A token for each row of logits [R, V], each with a key of its own."""
    keys = jax.random.split(jax.random.key(3), len(logits))
    drawing = jax.jit(draw_tokens, static_argnums=2)
    return jax.device_get(drawing(keys, jnp.float32(logits), sampling))


def number_kept(logits: np.ndarray, sampling: Sampling, slack: float) -> int:
    """How many of the likeliest tokens the filters keep, in float64, without a limit.

    slack: how much mass and how many nats more than the settings the filters may keep.
    """
    x = -np.sort(-np.float64(np.float32(logits)))[: sampling.top_k or None]
    x = x[x > MASKED]
    probs = np.exp(x - x[0]) / np.exp(x - x[0]).sum()
    keep = probs.cumsum() - probs < sampling.top_p + slack
    if sampling.min_p:
        keep &= x >= x[0] + math.log(sampling.min_p) - slack
    return int(keep.sum())


def many_kinds(V: int) -> np.ndarray:
    """[R, V] float32 logits."""
    rng = np.random.default_rng(V)
    flat = rng.normal(scale=0.1, size=(3, V))
    peaked = rng.normal(scale=2.0, size=(3, V)) + 12 * (rng.random((3, V)) < 3 / V)
    tied = np.round(2 * peaked) / 2
    few_values = rng.integers(-1, 2, (2, V))  # far more tokens tie than any top-k keeps
    ends = np.full((2, V), -3.0)
    ends[0, -1], ends[1, 0] = 50, 50  # a token has all the mass
    descending = -np.arange(V)[None] * 30.0 / V  # all that a filter keeps lies in the first blocks
    order = rng.permutation(V).astype(np.int32)[None]
    neighbours = (np.float32(1).view(np.int32) + order).view(np.float32)  # of all float32
    special = peaked.copy()
    special[0, ::3] = MASKED
    special[1, ::3] = -np.inf
    special[2, V // 2] = 3e38
    kinds = [flat, peaked, peaked - 500, tied, few_values, ends, descending, -descending, special]
    return np.float32(np.concatenate([*kinds, neighbours, -neighbours, 0 * ends]))


@pytest.mark.parametrize("V", [6, LARGE])
@pytest.mark.parametrize("sampling", FILTERS, ids=lambda v: "-".join(map(str, v)))
def test_the_support_has_the_likeliest_tokens_that_the_filters_keep_at_most_128(
    V: int, sampling: Sampling
) -> None:
    logits = many_kinds(V)
    drawn = draw(logits, sampling)
    assert drawn.support.shape == (len(logits), min(sampling.top_k or 128, V))
    for i, (row, support) in enumerate(zip(logits, drawn.support, strict=True)):
        ids = support[support >= 0]
        assert len(set(ids.tolist())) == len(ids) and drawn.token[i] in ids, i
        assert row[ids].tolist() == (-np.sort(-row))[: len(ids)].tolist(), i  # ties in any order
        least, most = (number_kept(row, sampling, slack) for slack in (-1e-5, 1e-5))
        assert min(least, 128) <= len(ids) <= most, i
        if least > 128 or most <= 128:
            assert drawn.was_cut[i] == (least > 128), i
    assert drawn.was_cut.any() == (V == LARGE and not sampling.top_k)


def test_the_settings_allow_no_larger_top_k_than_the_support_holds() -> None:
    assert MAX_TOP_K == MAX_SUPPORT == 128


def test_logits_that_are_not_a_number_stay_so_and_change_no_other_sequence() -> None:
    logits = many_kinds(300)[:4]
    for sampling in (Sampling(top_k=3), Sampling(top_p=0.5), Sampling(top_k=9, min_p=0.1)):
        expected = draw(logits, sampling)
        drawn = draw(np.where(np.arange(4)[:, None] == 2, np.nan, logits), sampling)
        assert np.isnan(drawn.logp).tolist() == [False, False, True, False]
        for ours, theirs in zip(drawn, expected, strict=True):
            assert np.delete(ours, 2, axis=0).tolist() == np.delete(theirs, 2, axis=0).tolist()


# ---- One token -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "V, sampling",
    [
        (1000, Sampling(1.0)),
        (37, Sampling(0.5, top_k=5)),
        (37, Sampling(2.0, top_k=20, top_p=0.7, min_p=0.3)),
    ],
    ids=["large", "top_k", "all"],
)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(V: int, sampling: Sampling) -> None:
    logits = np.random.default_rng(V).normal(scale=0.7, size=V)
    drawn = draw(np.tile(logits, (10000, 1)), sampling)
    probs = numpy_filter(numpy_softmax(logits / sampling.temperature), sampling)
    assert_drawn_from(drawn.token, probs)
    np.testing.assert_allclose(drawn.logp, np.log(probs[drawn.token]), atol=1e-5)
    assert drawn.token.dtype == np.int32 and drawn.logp.dtype == np.float32
    if sampling.has_filters():
        assert set(drawn.support[0].tolist()) - {-1} == set(np.flatnonzero(probs).tolist())
