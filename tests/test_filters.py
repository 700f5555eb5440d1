"""Claims about model/next_token.py: filters keep the tokens of their rule, and what is drawn."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import assert_drawn_from, numpy_filter, numpy_softmax

from model.logps import MASKED
from model.next_token import MAX_SUPPORT, Sampling, draw_tokens, filter_logits

filtered = jax.jit(filter_logits, static_argnums=1)
LARGE = 20011  # a prime; the blocks of the vocabulary do not divide it


def kept(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[R, V] bool: the tokens that the filters keep. A token of probability 0 is not kept."""
    found = np.asarray(filtered(jnp.float32(logits), sampling))
    assert ((found == np.float32(logits)) | (found <= MASKED)).all(), "a logit is changed"
    return found > MASKED


def kept_by_rule(logits: np.ndarray, sampling: Sampling, slack: float = 0.0) -> np.ndarray:
    """[V] bool: the tokens that the rule of each filter keeps, in float64.

    slack: how much mass and how many nats more than the settings the filters may keep.
    """
    x = np.float64(np.float32(logits))
    keep = x > MASKED
    if sampling.top_k:
        larger = len(x) - np.searchsorted(np.sort(x), x, side="right")
        keep &= larger < sampling.top_k
    if sampling.top_p < 1:
        probs = np.where(keep, np.exp(x - x.max()), 0.0)
        probs /= probs.sum()
        values, places = np.unique(x, return_inverse=True)
        masses = np.bincount(places, probs)  # of each value
        likelier = masses[::-1].cumsum()[::-1] - masses
        keep &= likelier[places] < sampling.top_p + slack
    if sampling.min_p:
        keep &= x >= x.max() + math.log(sampling.min_p) - slack
    return keep


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
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=50),
        Sampling(top_p=0.9),
        Sampling(min_p=0.05),
        Sampling(top_k=3, top_p=0.6),
        Sampling(top_k=100, top_p=0.95, min_p=0.02),
    ],
    ids=lambda v: "-".join(map(str, v)),
)
def test_the_filters_keep_the_tokens_of_their_rule(V: int, sampling: Sampling) -> None:
    logits = many_kinds(V)
    for i, found in enumerate(kept(logits, sampling)):
        least, most = (kept_by_rule(logits[i], sampling, slack) for slack in (-2e-6, 2e-6))
        assert (least <= found).all() and (found <= most).all(), i
        assert found.any()


def test_logits_that_are_not_a_number_stay_so_and_change_no_other_sequence() -> None:
    logits = many_kinds(300)[:4]
    logits[2] = np.nan
    for sampling in (Sampling(top_k=3), Sampling(top_p=0.5), Sampling(top_k=9, top_p=0.9)):
        found = np.asarray(filtered(jnp.asarray(logits), sampling))
        assert np.isnan(found[2]).all() and not np.isnan(found[[0, 1, 3]]).any()


# ---- One token -----------------------------------------------------------------------------------


def draw(logits: np.ndarray, sampling: Sampling) -> list[np.ndarray]:
    """A token and its log-probability for logits [R, V], each row with a key of its own; with
    sampling.replay also the support and whether it was cut."""
    keys = jax.random.split(jax.random.key(3), len(logits))
    drawing = jax.jit(draw_tokens, static_argnums=2)
    return [np.asarray(x) for x in drawing(keys, jnp.float32(logits), sampling)]


@pytest.mark.parametrize(
    "V, sampling",
    [
        (1000, Sampling(1.0)),
        (37, Sampling(0.5, top_k=5)),
        (37, Sampling(2.0, top_k=20, top_p=0.7, min_p=0.3)),
        (37, Sampling(0.5, top_k=5, replay=True)),
        (37, Sampling(2.0, top_k=20, top_p=0.7, min_p=0.3, replay=True)),
    ],
    ids=["large", "top_k", "all", "top_k replay", "all replay"],
)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(V: int, sampling: Sampling) -> None:
    logits = np.random.default_rng(V).normal(scale=0.7, size=V)
    token, logp, *drawn_from = draw(np.tile(logits, (10000, 1)), sampling)
    probs = numpy_filter(numpy_softmax(logits / sampling.temperature), sampling)
    assert_drawn_from(token, probs)
    np.testing.assert_allclose(logp, np.log(probs[token]), atol=1e-5)
    assert token.dtype == np.int32 and logp.dtype == np.float32
    if sampling.replay:
        support = drawn_from[0][0]
        assert set(support[support >= 0].tolist()) == set(np.flatnonzero(probs).tolist())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=50),
        Sampling(top_p=0.9),
        Sampling(min_p=0.05),
        Sampling(top_k=50, top_p=0.9, min_p=0.05),
    ],
    ids=["top_k", "top_p", "min_p", "all"],
)
@pytest.mark.parametrize("V", [40, 20011])
def test_the_support_is_what_the_filters_leave_at_most_128(V: int, sampling: Sampling) -> None:
    scales = np.repeat([0.1, 1.0, 3.0, 8.0], 5)[:, None]
    logits = np.float32(scales * np.random.default_rng(V).normal(size=(20, V)))
    _, _, support, was_cut = draw(logits, sampling._replace(replay=True))
    assert support.shape[1] == min(sampling.top_k or MAX_SUPPORT, V)
    for row, ids, cut in zip(logits, support, was_cut, strict=True):
        found = set(ids[ids >= 0].tolist())
        assert len(found) == (ids >= 0).sum(), "an id twice"
        least, most = (
            set(np.flatnonzero(kept_by_rule(row, sampling, slack)).tolist())
            for slack in (-1e-5, 1e-5)
        )
        if cut:
            likeliest = np.argsort(-np.float32(row), kind="stable")[:MAX_SUPPORT]
            assert found == set(likeliest.tolist()) and len(most) > MAX_SUPPORT
        else:
            assert least <= found <= most
    assert was_cut.any() == (V > 40 and not sampling.top_k)
