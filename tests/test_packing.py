"""Rows of an update: what stands where, and how full they are. That they change no result:
test_update.py and test_saved_work.py."""

import functools
from typing import Any

import numpy as np
import pytest
from small_model import batch_of

from rows import Batch, Limits, Widths, fill_rows, pack, plan_rows, prompts_of, round_up, widest


def numbered(lengths: list[int], prompts: list[int], T: int = 0) -> Batch:
    """Sequences with these lengths; every token of prompts and completions is another number."""
    T = T or max(lengths)
    mask = (np.arange(T) < np.array(lengths)[:, None]).astype(np.int32)
    ids = 1000 + np.arange(mask.size, dtype=np.int32).reshape(mask.shape)
    texts = [[100 * p + i for i in range(n)] for p, n in enumerate(prompts)]
    logps = -ids.astype(np.float32)
    return batch_of(texts, ids * mask, mask, logps, np.arange(len(lengths), dtype=np.float32))


def limits(**changes: Any) -> Limits:
    """Of one device with padded micro-batches of 4 sequences."""
    given: dict[str, Any] = {"shards": 1, "sequences": 4, "completions": 4}
    given |= {"max_length_sample": 16, "longest_prompt": 8, "shortest_prompt": 0}
    return Limits(
        **given | {"pack": True, "unit": 1, "row_tokens": 2**31, "matmul_keys": 1e4} | changes
    )


# ---- What stands where ---------------------------------------------------------------------------


def test_the_grid_by_hand() -> None:
    rounded = [round_up(n, 4) for n in (1, 8, 9, 16, 17, 100, 128, 129)]
    assert rounded == [1, 8, 10, 16, 20, 112, 128, 160]
    assert [round_up(n, 8, 128) for n in (1, 128, 129, 2048, 2049)] == [128, 128, 256, 2048, 2304]


def test_a_group_is_split_only_if_a_row_is_too_small_for_it() -> None:
    batch = numbered([5, 1, 2, 2, 6, 6, 1, 1], [3, 4])  # groups of 10 and 14 tokens

    def rows_of(C: int) -> list[list[int]]:
        groups = [[4, 5, 6, 7], [0, 2, 3, 1]]  # those with most tokens first
        return fill_rows(batch, batch.lengths.tolist(), groups, Widths(1, 9, C, 9, 6))

    assert rows_of(14) == [[4, 5, 6, 7], [0, 2, 3, 1]]
    assert rows_of(24) == [[4, 5, 6, 7, 0, 2, 3, 1]]
    assert rows_of(12) == [[4, 5], [6, 7, 0, 2, 3, 1]]
    assert prompts_of(batch, [6, 7, 0, 2]) == [0, 1]


@functools.cache
def geometric(
    mean: int,
    longest: int,
    prompts: int,
    K: int,
    seed: int,
    prompt_tokens: tuple[int, int] = (20, 60),
) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(1 / mean, prompts * K), longest)
    return numbered(lengths.tolist(), rng.integers(*prompt_tokens, prompts).tolist(), longest)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("pack_rows", [True, False])
@pytest.mark.parametrize("unit", [1, 128])
def test_every_token_stands_in_one_place_of_a_row(shards, pack_rows, unit) -> None:
    batch = geometric(30, 120, 16, 4, 0)
    chosen = [i for i in range(64) if i % 5]
    given = limits(
        shards=shards, max_length_sample=120, longest_prompt=60, pack=pack_rows, unit=unit
    )
    steps, widths = plan_rows(batch, chosen, given)
    assert sorted(i for rows in steps for row in rows for i in row) == chosen
    for rows in steps:
        assert len(rows) == shards * widths.rows
        x = pack(batch, rows, widths, pad_id=7)
        assert x.ids.shape == (len(rows), widths.S + widths.C)
        assert widths.S % unit == widths.C % unit == 0
        of_rows = (x.ids, x.prompt, x.start, x.targets, x.places)
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


def test_a_prompt_longer_than_all_questions_has_the_rows_of_a_run_that_knew_of_it() -> None:
    batch = geometric(30, 120, 16, 4, 0, prompt_tokens=(60, 200))
    longest = max(len(prompt.ids) for prompt in batch.prompts) - 1
    assert 96 < longest <= 256
    for pack_rows in (True, False):
        given = limits(max_length_sample=120, longest_prompt=96, pack=pack_rows, sequences=16)
        known = given._replace(longest_prompt=256 if longest > 192 else 192)
        assert plan_rows(batch, range(64), given) == plan_rows(batch, range(64), known)


# ---- How full rows are ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"row_tokens": 600}, {"shards": 2, "sequences": 16}], ids=str
)
def test_a_device_has_no_more_tokens_than_with_padded_rows_and_a_row_no_more_than_a_kernel_takes(
    changes: dict[str, int],
) -> None:
    given = limits(**{"sequences": 8, "max_length_sample": 120, "longest_prompt": 60} | changes)
    most = widest(given)
    assert most.rows * (most.S + most.C) == given.sequences // 4 * (60 + 4 * 120)
    for seed in range(10):
        steps, at = plan_rows(geometric(60, 120, 8, 4, seed), range(32), given)
        assert at.rows * (at.S + at.C) <= most.rows * (most.S + most.C)
        assert at.S + at.C <= given.row_tokens
        if given.shards * given.sequences == 32:
            assert len(steps) == 1, "an update of one micro-step stays one"


def test_one_long_completion_among_short_ones_makes_no_larger_arrays() -> None:
    """They would have a place of the longest one for each sequence of a row."""
    lengths = [3] * 1023 + [1024]
    given = limits(sequences=16, completions=16, max_length_sample=1024, longest_prompt=60)
    batch = numbered(lengths, [20] * 64)
    steps, at = plan_rows(batch, range(1024), given)
    most = widest(given)
    real = batch.lengths.sum() + 64 * 19
    assert len(steps) * at.rows * (at.S + at.C) < 2.5 * real
    assert at.rows * at.Q * at.T <= 8 * most.rows * (most.S + most.C) < 1024 * 1024


def test_the_width_of_completions_is_the_longest_one_halved() -> None:
    widths = [limits(max_length_sample=100).completion_width(n) for n in (0, 1, 2, 13, 14, 26, 51)]
    assert widths == [1, 1, 2, 13, 25, 50, 100]
    padded = limits(max_length_sample=100, pack=False)
    assert [padded.completion_width(n) for n in (1, 17, 51, 97)] == [16, 24, 64, 100]


@pytest.mark.parametrize(
    "prompts, mean, longest, micro, prompt_tokens",
    [(16, 256, 1024, 16, (20, 60)), (4, 64, 256, 8, (383, 384))],
    ids=["of GSM8K", "long prompts"],
)
def test_rows_of_real_lengths_are_full_and_have_few_widths(
    prompts: int, mean: int, longest: int, micro: int, prompt_tokens: tuple[int, int]
) -> None:
    """8 completions of each prompt, with a mean of a quarter of the longest, in 40 steps. Padded
    rows compute more than two tokens for each real one."""
    changes = {"sequences": micro, "completions": 8, "max_length_sample": longest}
    given = limits(**changes, longest_prompt=prompt_tokens[1])
    packed, padded, programs = [], [], set()
    for seed in range(40):
        batch = geometric(mean, longest, prompts, 8, seed, prompt_tokens)
        real = batch.lengths.sum() + sum(len(prompt.ids) - 1 for prompt in batch.prompts)
        for pack_rows, found in ((True, packed), (False, padded)):
            steps, at = plan_rows(batch, range(prompts * 8), given._replace(pack=pack_rows))
            found.append(len(steps) * at.rows * (at.S + at.C) / real)
            programs |= {at} if pack_rows else set()
    assert np.mean(packed) < 1.15 and np.mean(padded) > 2
    assert len(programs) <= 10
