"""Rows of an update: what stands where, and how full they are. That they change no result:
test_update.py and test_saved_work.py."""

import time

import numpy as np
import pytest
from small_model import batch_of

from rows import Batch, RowLimits, RowShape, pack, plan_rows, prompts_of


def numbered(lengths: list[int], prompts: list[int], T: int = 0) -> Batch:
    """Sequences with these lengths; every token of prompts and completions is another number."""
    T = T or max(lengths)
    mask = (np.arange(T) < np.array(lengths)[:, None]).astype(np.int32)
    ids = 20_000 + np.arange(mask.size, dtype=np.int32).reshape(mask.shape)
    texts = [[1000 * p + i for i in range(n)] for p, n in enumerate(prompts)]
    logps = -ids.astype(np.float32)
    return batch_of(texts, ids * mask, mask, logps, np.arange(len(lengths), dtype=np.float32))


def limits(**changes: int) -> RowLimits:
    """Of one device with micro-batches of 4 sequences."""
    given = {
        "shards": 1,
        "full_length_sequences_per_shard": 4,
        "completions_per_prompt": 4,
        "max_length_sample": 16,
    }
    return RowLimits(**given | {"longest_prompt_slots": 8} | changes)


# ---- What stands where ---------------------------------------------------------------------------


def test_in_long_rows_the_steps_of_S_grow_with_C() -> None:
    given = limits(max_length_sample=2048, longest_prompt_slots=160)
    for length, S, C in ((500, 256, 2048), (1000, 256, 4096), (1500, 384, 6144)):
        steps, widths = plan_rows(numbered([length] * 4, [151]), range(4), given)
        assert (steps, widths) == ([[[0, 1, 2, 3]]], RowShape(S, C, Q=32))


def test_rows_by_hand() -> None:
    """Groups of 300, 250, 200 and 150 tokens behind prompts of 50. A device takes 4 sequences of
    128 tokens and a prompt of 64, or 576 slots, in a micro-step."""
    lengths = [100, 75, 75, 50] + [100, 50, 50, 50] + [50] * 4 + [50, 50, 25, 25]
    batch = numbered(lengths, [51] * 4)
    given = limits(max_length_sample=128, longest_prompt_slots=64)
    assert given.widest() == RowShape(S=64, C=512, Q=32)
    first, second, third, fourth = ([*range(i, i + 4)] for i in (0, 4, 8, 12))
    # With C = 512 there are 64 places for prompts, too few for two. A fourth of all tokens is 225,
    # for which the first group is too large.
    rows = [[[0, 1, 2]], [[3, *third]], [second], [fourth]]
    assert plan_rows(batch, range(16), given) == (rows, RowShape(S=128, C=256, Q=32))
    # 8 sequences have 128 places for prompts and 1024 for completions.
    wider = given._replace(full_length_sequences_per_shard=8)
    assert wider.widest() == RowShape(S=128, C=1024, Q=64)
    assert plan_rows(batch, range(8), wider) == ([[first + second]], RowShape(S=128, C=768, Q=64))
    both = [first + third, second + fourth]
    assert plan_rows(batch, range(16), wider) == ([[x] for x in both], RowShape(S=128, C=512, Q=64))
    # Two devices share a micro-step, down to the completions of a single group.
    twice = wider._replace(shards=2)
    assert plan_rows(batch, range(16), twice) == ([both], RowShape(S=128, C=512, Q=64))
    assert plan_rows(batch, range(4), twice) == ([[[0, 1, 2], [3]]], RowShape(S=128, C=256, Q=64))
    assert plan_rows(batch, range(1), twice) == ([[[0], []]], RowShape(S=128, C=256, Q=64))
    assert plan_rows(batch, [], twice)[0] == []


def geometric(
    mean: int,
    longest: int,
    prompts: int,
    K: int,
    seed: int,
    prompt_tokens: tuple[int, int] = (20, 60),
) -> Batch:
    """Sequences of geometric lengths."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(1 / mean, prompts * K), longest)
    return numbered([*lengths], [*rng.integers(*prompt_tokens, prompts)], longest)


@pytest.mark.parametrize(
    "seed, changes",
    [
        *((0, {"shards": shards, "unit": unit}) for shards in (1, 4) for unit in (1, 128)),
        *((seed, {"shards": 2, "unit": 64, "chunk": 64}) for seed in range(8)),
    ],
    ids=str,
)
def test_every_token_stands_in_one_place_of_a_row_and_a_chunk_has_one_prompt(
    seed: int, changes: dict[str, int]
) -> None:
    batch = geometric(30, 120, 16, 4, seed)
    chosen = [i for i in range(64) if i % 5]
    given = limits(max_length_sample=120, longest_prompt_slots=96, **changes)
    steps, widths = plan_rows(batch, chosen, given)
    assert sorted(i for rows in steps for row in rows for i in row) == chosen
    for rows in steps:
        assert len(rows) == given.shards
        x = pack(batch, rows, widths, pad_id=7)
        assert x.ids.shape == (len(rows), widths.S + widths.C)
        assert widths.S % given.unit == widths.C % given.unit == 0
        of_rows = (x.ids, x.segment_ids, x.start, x.targets, x.target_slots)
        for row, *arrays in zip(rows, *of_rows, strict=True):
            ids, prompt, start, targets, places = arrays
            for j, i in enumerate(row):
                at = places[j, : batch.lengths[i]]
                given_ids = batch.prompts[batch.prompt_of(i)].ids
                drawn = batch.completion_ids[i, : batch.lengths[i]]
                assert targets[at].tolist() == drawn.tolist()
                fed, own = at + widths.S, prompt[at[0] + widths.S]
                assert ids[fed].tolist() == [given_ids[-1], *drawn[:-1]]
                assert set(prompt[fed]) == {own} and set(start[fed]) == {fed[0]}
                before = np.flatnonzero(prompt[: widths.S] == own)
                assert ids[before].tolist() == given_ids[:-1]
            tokens = [batch.prompt_tokens(p) for p in prompts_of(batch, row)]
            assert (prompt >= 0).sum() == batch.lengths[row].sum() + sum(tokens)
            for chunk in prompt.reshape(-1, given.chunk):
                assert given.chunk == 1 or len({*chunk} - {-1}) <= 1


def test_with_chunks_prompts_end_and_groups_begin_at_their_multiples() -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]
    ids = np.array([[11, 12, 13], [14, 15, 0], [16, 0, 0], [17, 0, 0], [18, 19, 0], [20, 0, 0]])
    lengths = np.array([3, 2, 1, 1, 2, 1])
    mask = (np.arange(3) < lengths[:, None]).astype(np.int32)
    batch = batch_of(prompts, ids, mask, np.zeros((6, 3)), np.zeros(6))
    x = pack(batch, [[2, 3, 0, 1, 4, 5]], RowShape(S=12, C=16, Q=6, chunk=4), pad_id=0)
    assert x.ids[0].tolist() == [0, 0, 1, 2, 0, 0, 0, 4, 5, 6, 7, 8] + [
        *[9, 9, 0, 0],  # the prompts of the row are in order, its groups need not be
        *[3, 11, 12, 3, 14, 0, 0, 0],
        *[10, 18, 10, 0],
    ]
    assert x.segment_ids[0].tolist() == [-1, -1, 0, 0, -1, -1, -1, 1, 1, 1, 1, 1] + [
        *[1, 1, -1, -1, 0, 0, 0, 0, 0, -1, -1, -1, 2, 2, 2, -1]
    ]
    assert x.target_slots[0, 2].tolist() == [4, 5, 6], "targets begin with the group"
    assert x.targets[0, 4:9].tolist() == [11, 12, 13, 14, 15]


def test_a_prompt_longer_than_all_questions_has_the_rows_of_a_run_that_knew_of_it() -> None:
    batch = geometric(30, 120, 16, 4, 0, prompt_tokens=(60, 200))
    longest = max(len(prompt.ids) for prompt in batch.prompts) - 1
    assert 128 < longest <= 192
    given = limits(max_length_sample=120, longest_prompt_slots=96)
    known = given._replace(longest_prompt_slots=192)
    assert plan_rows(batch, range(64), given) == plan_rows(batch, range(64), known)


# ---- How full rows are ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"unit": 128}, {"shards": 2, "full_length_sequences_per_shard": 16}], ids=str
)
def test_a_row_has_at_most_the_places_of_the_longest_sequences_of_a_micro_step(
    changes: dict[str, int],
) -> None:
    given = limits(
        **{
            "full_length_sequences_per_shard": 8,
            "max_length_sample": 120,
            "longest_prompt_slots": 60,
        }
        | changes
    )
    most = given.widest().S + given.widest().C
    if given.unit == 1:
        assert most == given.full_length_sequences_per_shard // 4 * (60 + 4 * 120)
    for seed in range(10):
        steps, at = plan_rows(geometric(60, 120, 8, 4, seed), range(32), given)
        assert at.S + at.C <= most
        assert at.S % given.unit == at.C % given.unit == 0
        if given.shards * given.full_length_sequences_per_shard == 32:
            assert len(steps) == 1, "an update of one micro-step stays one"


@pytest.mark.parametrize(
    "prompts, mean, longest, micro, prompt_tokens, most",
    [
        (16, 256, 1024, 16, (20, 60), 1.15),
        (4, 64, 256, 8, (383, 384), 1.15),
        (16, 24, 32, 32, (80, 96), 1.4),
    ],
    ids=["of GSM8K", "long prompts", "short completions"],
)
def test_rows_of_real_lengths_are_full_and_have_few_widths(
    prompts: int, mean: int, longest: int, micro: int, prompt_tokens: tuple[int, int], most: float
) -> None:
    """8 completions of each prompt, in 40 steps."""
    changes = {
        "full_length_sequences_per_shard": micro,
        "completions_per_prompt": 8,
        "max_length_sample": longest,
    }
    given = limits(**changes, longest_prompt_slots=prompt_tokens[1])
    computed, programs = [], set()
    for seed in range(40):
        batch = geometric(mean, longest, prompts, 8, seed, prompt_tokens)
        real = batch.lengths.sum() + sum(len(prompt.ids) - 1 for prompt in batch.prompts)
        steps, at = plan_rows(batch, range(prompts * 8), given)
        computed.append(len(steps) * (at.S + at.C) / real)
        programs.add(at)
    assert np.mean(computed) < most
    assert len(programs) <= 10


def test_the_rows_of_256_hosts_are_planned_in_a_second() -> None:
    """Each of them plans all rows of a step: 16,384 sequences on 1,024 devices. A search through
    the rows for each group, in Python, took 4 seconds."""
    batch = geometric(30, 120, 2048, 8, 0)
    given = limits(shards=1024, completions_per_prompt=8, max_length_sample=120)
    began = time.thread_time()
    steps, _ = plan_rows(batch, range(16_384), given._replace(longest_prompt_slots=60))
    assert time.thread_time() - began < 1
    assert sorted(i for rows in steps for row in rows for i in row) == [*range(16_384)]
