"""Claims about sampling.py: what is drawn, with which probability, and where a completion ends.

The reference is a Qwen2 in float64 numpy. It sees a single unpadded sequence and has no cache.
"""

import math
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from small_model import (
    PAD,
    PROMPTS,
    assert_drawn_from,
    assert_same_completions,
    numpy_filter,
    numpy_logits,
    numpy_softmax,
    sample,
    weights,
)

from model.next_token import Sampling
from model.one_softmax import attend_with_one_softmax
from sampling import decode, smaller_batches, stage_ends, widen

WARM = Sampling(0.7)


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
    found = sample(Sampling(temperature=0.0), prompts, K, T=T, stop_ids=stop_ids)
    dtypes = {"completion_ids": "int32", "sampled_mask": "int32", "sampling_logps": "float32"}
    for name, dtype in dtypes.items():
        assert getattr(found, name).shape == (15, 7) and getattr(found, name).dtype == dtype
    assert found.lengths.tolist() == found.sampled_mask.sum(axis=1).tolist()
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
    found = sample(sampling)
    for i, tokens in enumerate(found.completion_ids.tolist()):
        prompt = PROMPTS[i // 8]
        logits = numpy_logits(weights(), prompt + tokens)[len(prompt) - 1 : -1]
        probs = numpy_softmax(logits / sampling.temperature)  # [T, V]
        drawn = [numpy_filter(p, sampling)[token] for p, token in zip(probs, tokens, strict=True)]
        assert min(drawn) > 0, "a token that the filters drop was drawn"
        np.testing.assert_allclose(found.sampling_logps[i], np.log(drawn), atol=2e-5)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 4)], ids=str)
def test_stacked_caches_that_grow_change_no_bit_and_devices_no_token(
    mesh: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention reads 4, 8 and 12 slots instead of 12. Caches of other widths, of which XLA:CPU
    groups the sums otherwise, may change the rounding."""
    expected, grow = sample(mesh=mesh), Mock(wraps=widen)
    monkeypatch.setattr("sampling.STAGE_TOKENS", 4)
    monkeypatch.setattr("sampling.widen", grow)
    found = sample(mesh=mesh)
    assert stage_ends(12) == [4, 8, 12]
    assert [call.kwargs["end"] for call in grow.call_args_list] == [8, 12]
    assert found.completion_ids.tolist() == expected.completion_ids.tolist()
    assert found.sampling_logps.tolist() == expected.sampling_logps.tolist()
    monkeypatch.undo()
    assert_same_completions(found, sample())


def test_unrolled_layers_with_the_attention_of_a_gpu_draw_the_same_tokens_on_its_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache grows, too. No other test decodes with the mesh of a GPU's attention."""
    one_softmax = Mock(wraps=attend_with_one_softmax)
    monkeypatch.setattr("model.attention.attend_with_one_softmax", one_softmax)
    monkeypatch.setattr("model.one_softmax.ONE_SOFTMAX", {"cpu"})
    monkeypatch.setattr("sampling.STAGE_TOKENS", 6)
    assert stage_ends(12) == [6, 12]
    found = sample(mesh=(4, 1, 2), layer_loop="unroll")
    assert one_softmax.called
    monkeypatch.undo()
    assert_same_completions(found, sample())


def test_passes_and_groups_do_not_change_the_tokens() -> None:
    first = sample(prompts=PROMPTS[:1])
    second = sample(prompts=PROMPTS[1:], sequence_ids=range(8, 16))
    assert_same_completions(jax.tree.map(lambda *x: np.concatenate(x), first, second), sample())
    assert_same_completions(sample(prompts=[p for p in PROMPTS for _ in range(8)], K=1), sample())
    assert sample().support is None and sample().cut_tokens is None, "there are no filters"


def test_every_token_of_a_sequence_is_drawn_anew() -> None:
    """With equal logits, the tokens of all keys, sequences and positions together are uniform."""
    flat = weights().replace(lm_head=np.zeros((40, 16)))
    tokens = np.stack([sample(key=key, params=flat).completion_ids for key in range(20)])
    assert_drawn_from(tokens.reshape(-1), np.full(40, 1 / 40))
    pairs = tokens[..., :-1] % 4 * 4 + tokens[..., 1:] % 4  # pairs of neighbours
    assert_drawn_from(pairs.reshape(-1), np.full(16, 1 / 16))


@pytest.mark.parametrize("record_support", [True, False], ids=["support", "full"])
def test_tokens_whose_support_is_cut_are_counted(
    monkeypatch: pytest.MonkeyPatch, record_support: bool
) -> None:
    """Its size is that of the most likely tokens, here 8 at most. No other token is drawn."""
    monkeypatch.setattr("model.next_token.MAX_SUPPORT", 8)
    stop_ids = tuple(range(0, 40, 9))
    found = sample(Sampling(top_p=0.9, record_support=record_support), T=11, stop_ids=stop_ids)
    counts = []
    for i, (tokens, length) in enumerate(zip(found.completion_ids, found.lengths, strict=True)):
        prompt = PROMPTS[i // 8]
        logits = numpy_logits(weights(), prompt + tokens[:length].tolist())[len(prompt) - 1 : -1]
        kept = [numpy_filter(numpy_softmax(x), Sampling(top_p=0.9)) > 0 for x in logits]
        counts.append(int((np.sum(kept, axis=1) > 8).sum()))
        likeliest = np.argsort(-logits, axis=1)[:, :8]
        assert (likeliest == tokens[:length, None]).any(axis=1).all()
    assert found.cut_tokens.tolist() == counts and max(counts) > 1
    assert (found.support.shape == (16, 11, 8)) if record_support else (found.support is None)


# ---- Where a completion ends ---------------------------------------------------------------------


def test_every_stop_id_ends_a_completion_from_the_first_token_on() -> None:
    free = sample().completion_ids
    stop_ids = (int(free[0, 0]), int(free[9, 5]))
    stopped = sample(stop_ids=stop_ids)
    lengths = []
    for i, tokens in enumerate(free.tolist()):
        ends = [t + 1 for t, token in enumerate(tokens) if token in stop_ids]
        length = min(ends, default=12)
        assert stopped.completion_ids[i].tolist() == tokens[:length] + [PAD] * (12 - length)
        assert stopped.sampled_mask[i].tolist() == [1] * length + [0] * (12 - length)
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


# ---- Sequences that have ended leave the batch --------------------------------------------------


def often_stopping() -> tuple[int, ...]:
    """Stop ids with which the sequences have very different lengths."""
    drawn = sample().completion_ids
    return tuple({int(drawn[i, t]) for i, t in ((0, 1), (3, 4), (9, 7))})


@pytest.mark.parametrize("mesh, layer_loop", [((1, 1, 1), "unroll"), ((2, 1, 4), "scan")], ids=str)
def test_sequences_that_leave_the_batch_change_nothing(
    mesh: tuple[int, int, int], layer_loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, stop_ids = Sampling(0.7, top_k=9, record_support=True), often_stopping()
    how = {"mesh": mesh, "layer_loop": layer_loop, "stop_ids": stop_ids, "T": 24}
    expected = sample(sampling, **how)
    assert (expected.decode_steps == expected.lengths.max()).all()
    monkeypatch.setattr("sampling.STAGE_TOKENS", 8)
    found = sample(sampling, **how, drop=True)
    assert_same_completions(found, expected)
    for ours, theirs, length in zip(found.support, expected.support, found.lengths, strict=True):
        assert [{*row} for row in ours[:length]] == [{*row} for row in theirs[:length]]
    assert (found.lengths <= found.decode_steps).all()
    assert len({*found.lengths}) > 5, "the sequences have many lengths"
    share = {16: 0.7, 2: 0.95}[16 // math.prod(mesh)]  # by the sequences of a device
    assert found.decode_steps.sum() < share * expected.decode_steps.sum()


def test_sequences_leave_at_few_sizes_and_a_second_pass_compiles_none() -> None:
    stop_ids = often_stopping()
    assert smaller_batches(32) == [24, 16, 12, 8, 4, 2]
    assert smaller_batches(5) == [4, 3, 2, 1] and smaller_batches(1) == []
    before, programs = decode._cache_size(), []
    for key in (0, 1, 0, 1):
        sample(K=2, T=24, stop_ids=stop_ids, key=key, drop=True)
        programs.append(decode._cache_size() - before)
    assert programs[3] == programs[1] <= 1 + len(smaller_batches(4))
