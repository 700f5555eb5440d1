"""Claims about attention.py, blocks.py and splash.py: every implementation and layout gives float64
numpy's results.

Pallas' interpreter runs the TPU kernel here.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import train_layout

from model import blocks, splash
from model.attention import KV, PackedRows, attention
from model.blocks import block_attention, block_pairs, needed_blocks
from model.layout import ROLLOUT_BATCH_AXES, Layout

ONE_DEVICE = train_layout(1, 1, 1)
# A row is its prompts and its completions, each as (prompt, tokens), end to end. Prompt -1 is
# padding, which also fills the rest of the places.
Row = tuple[list[tuple[int, int]], list[tuple[int, int]]]
EMPTY: Row = [], []  # its results and gradients are finite
ONE_GROUP: Row = [(0, 30)], [(0, 20), (0, 30)]
TWO_GROUPS: Row = [(0, 7), (1, 9)], [(0, 5), (0, 17), (1, 1), (1, 11), (0, 13)]
OTHER: Row = [(1, 20)], [(1, 16), (1, 2), (1, 3)]
LEFT_PADDED: Row = [(-1, 6), (0, 7)], []
# A prompt of one token has no place in its row: its completions begin with it.
NO_PROMPT: Row = [(0, 5)], [(0, 23), (1, 12), (1, 2)]
NO_PROMPTS: Row = [], [(0, 20), (0, 23)]
EQUAL: Row = [(0, 5)], [(0, 3)] * 5
OF_ONE_TOKEN: Row = [(0, 4)], [(0, 1)] * 5

# (S, C, rows, H, N, h): places for prompts and for completions, query heads, kv heads, head_dim.
SMALL = [
    (20, 61, [TWO_GROUPS, OTHER, EMPTY, NO_PROMPT, NO_PROMPTS, OF_ONE_TOKEN], 6, 2, 11),
    (5, 15, [EQUAL], 4, 1, 7),  # nothing is padded
    (3, 40, [([(0, 1), (1, 2)], [(1, 1), (0, 37), (1, 1), (0, 1)])], 2, 2, 8),
    (13, 0, [LEFT_PADDED, ([(0, 13)], [])], 6, 3, 5),  # only prompts
]
# Places for prompts and for completions are multiples of 128.
FOR_SPLASH = [
    (128, 384, [([(0, 40), (1, 60)], [(0, 90), (0, 30), (1, 100), (1, 70)]), OTHER], 2, 2, 128),
    (128, 128, [NO_PROMPT, EMPTY, NO_PROMPTS], 2, 1, 64),
    # Rows of more than 512 places, which are padded to 1024.
    (256, 512, [([(0, 140), (1, 100)], [(0, 90), (1, 300), (1, 70)])], 4, 2, 64),
    (128, 512, [([(0, 1), (1, 127)], [(1, 1), (0, 507), (0, 1), (1, 1)]), EMPTY], 2, 2, 64),
    (640, 128, [([(-1, 600), (0, 40)], []), ([(0, 640)], [(0, 1)])], 2, 1, 64),
]


class Inputs(NamedTuple):
    q: np.ndarray  # [X, t, H, h]
    kv: KV  # [X, N, t, h]
    rows: PackedRows
    towards: np.ndarray  # [X, t, H*h], the gradient with respect to the result; 0 at padding
    positions: np.ndarray  # [X, t] int32
    window: int = 2**30  # how many positions a token sees
    cap: float = 0.0  # of the scores

    @property
    def seen(self) -> np.ndarray:
        """[X, t, 1]: the tokens that are not padding."""
        return self.rows.segment_ids[..., None] >= 0


class Result(NamedTuple):
    out: np.ndarray  # [X, t, H*h], 0 at padding
    to_q: np.ndarray
    to_k: np.ndarray
    to_v: np.ndarray


def packed(S: int, C: int, rows: list[Row]) -> PackedRows:
    """The rows as the trainer gives them. A token of padding starts at itself."""
    prompt = np.full((len(rows), S + C), -1, np.int32)
    start = np.tile(np.arange(S + C, dtype=np.int32), (len(rows), 1))
    for x, row in enumerate(rows):
        for at, parts in zip((0, S), row, strict=True):
            for of, tokens in parts:
                prompt[x, at : at + tokens] = of
                start[x, at : at + tokens] = at if of >= 0 else start[x, at : at + tokens]
                at += tokens
    return PackedRows(prompt, start, S)


def positions_of(S: int, C: int, rows: list[Row]) -> np.ndarray:
    """[X, t] int32: a completion's first token stands behind the tokens of its prompt."""
    positions = np.zeros((len(rows), S + C), np.int32)
    for x, (prompts, completions) in enumerate(rows):
        for at, parts, first in ((0, prompts, {}), (S, completions, dict(prompts))):
            for of, tokens in parts:
                positions[x, at : at + tokens] = first.get(of, 0) + np.arange(tokens)
                at += tokens
    return positions


def within(x: Inputs, window: int) -> Inputs:
    """The same inputs for a layer with a sliding window."""
    return x._replace(rows=x.rows.with_window(x.positions, window), window=window)


def inputs(S: int, C: int, rows: list[Row], H: int, N: int, h: int) -> Inputs:
    """Random inputs of these rows."""
    rng, X, t = np.random.default_rng(S), len(rows), S + C
    made = Inputs(
        rng.normal(size=(X, t, H, h)).astype(np.float32),
        kv_of(*rng.normal(size=(2, X, N, t, h)).astype(np.float32)),
        packed(S, C, rows),
        rng.normal(size=(X, t, H * h)).astype(np.float32),
        positions_of(S, C, rows),
    )
    return made._replace(towards=made.towards * made.seen)


def kv_of(k: np.ndarray, v: np.ndarray) -> KV:
    """A KV of keys and values that are both [..., tokens, h]."""
    return KV(np.ascontiguousarray(np.swapaxes(k, -1, -2)), v)


def visible(inputs: Inputs, x: int, i: int) -> list[int]:
    """The keys that token i of row x sees; padding sees none."""
    rows, position = inputs.rows, inputs.positions[x]
    prompt, start = rows.segment_ids[x], rows.start[x]
    before = [j for j in range(i + 1) if prompt[j] == prompt[i] >= 0]
    before = [j for j in before if j < rows.S or start[j] == start[i]]
    return [j for j in before if position[i] - position[j] < inputs.window]


def numpy_attention(x: Inputs) -> Result:
    """The values and gradients in float64, computed for each query separately."""
    q, k, v = (np.asarray(a, float) for a in (x.q, x.kv.k.swapaxes(2, 3), x.kv.v))
    (X, t, H, h), N = q.shape, k.shape[1]
    towards = np.asarray(x.towards, float).reshape(q.shape)
    out, to_q, to_k, to_v = (np.zeros(a.shape) for a in (q, q, k, v))
    for row, i in np.ndindex(X, t):
        keys = visible(x, row, i)
        for head in range(H if keys else 0):
            n = head // (H // N)
            scores = k[row, n, keys] @ q[row, i, head] / math.sqrt(h)
            slope = 1.0
            if x.cap:
                slope = np.cosh(scores / x.cap) ** -2
                scores = x.cap * np.tanh(scores / x.cap)
            p = np.exp(scores - scores.max())
            p /= p.sum()
            out[row, i, head] = p @ v[row, n, keys]
            to_p = v[row, n, keys] @ towards[row, i, head]
            to_scores = slope * p * (to_p - p @ to_p) / math.sqrt(h)
            to_q[row, i, head] = to_scores @ k[row, n, keys]
            to_k[row, n, keys] += np.outer(to_scores, q[row, i, head])
            to_v[row, n, keys] += np.outer(p, towards[row, i, head])
    return Result(out.reshape(x.towards.shape), to_q, to_k.swapaxes(2, 3), to_v)


def attention_in_rounds(
    q: jax.Array, kv: KV, rows: PackedRows, layout: Layout, cap: float
) -> jax.Array:
    """The schedule of a GPU, here on CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "IN_ROUNDS", {"cpu"})
        return block_attention(q, kv, rows, layout, cap)


def with_lists(rows: PackedRows, layout: Layout) -> PackedRows:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "IN_ROUNDS", {"cpu"})
        [listed] = blocks.with_key_blocks([rows], rows.S, layout)
    return listed


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "at_once": attention,
    "blocks": block_attention,
    "rounds": attention_in_rounds,
    "splash": functools.partial(splash.splash_attention, interpret=True),
}
PLAIN = ("at_once", "blocks", "rounds")


def attend(x: Inputs, impl: str, layout: Layout = ONE_DEVICE) -> Callable[..., jax.Array]:
    """The attention as a function of q, kv, prompt and start."""
    rows = with_lists(x.rows, layout) if impl == "rounds" else x.rows
    return lambda q, kv, prompt, start: IMPLEMENTATIONS[impl](
        q, kv, rows._replace(segment_ids=prompt, start=start), layout, x.cap
    )


def arguments(x: Inputs) -> tuple[Any, ...]:
    return x.q, x.kv, x.rows.segment_ids, x.rows.start


def program(
    x: Inputs, impl: str, layout: Layout = ONE_DEVICE
) -> Callable[..., tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, KV]]]:
    """The sum of attention times `towards`, the attention, and the gradient of the sum."""

    def loss(*given: Any) -> tuple[jax.Array, jax.Array]:
        out = attend(x, impl, layout)(*given)
        return (out * x.towards).sum(), out

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def run(x: Inputs, impl: str, layout: Layout = ONE_DEVICE) -> Result:
    (_, out), (to_q, to_kv) = jax.device_get(program(x, impl, layout)(*arguments(x)))
    assert out.shape == x.towards.shape and out.dtype == np.float32
    assert np.isfinite(out).all()  # at padding too
    return Result(np.where(x.seen, out, 0), to_q, to_kv.k, to_kv.v)


def assert_same(got: Result, expected: Result, tolerance: float = 1e-5) -> None:
    """The arrays are equal, up to `tolerance` times the largest number of each array."""
    for name, a, b in zip(Result._fields, got, expected, strict=True):
        assert a.shape == b.shape, name
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name


def assert_like_numpy(x: Inputs, impls: tuple[str, ...], layout: Layout = ONE_DEVICE) -> None:
    expected = numpy_attention(x)
    for impl in impls:
        assert_same(run(x, impl, layout), expected)


# ---- The values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SMALL + FOR_SPLASH, ids=str)
def test_values_and_gradients_are_those_of_numpy(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[Any, ...]
) -> None:
    """Blocks of 5 tokens, which divide few of the numbers of slots."""
    monkeypatch.setitem(blocks.BLOCK, "cpu", 5)
    x = inputs(*shape)
    assert_like_numpy(x, PLAIN if shape in SMALL else ("splash",))


@pytest.mark.parametrize("shape, window", [(SMALL[0], 3), (SMALL[3], 5)], ids=str)
def test_a_sliding_window_goes_by_positions_and_not_by_places(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[Any, ...], window: int
) -> None:
    """Blocks of 4 tokens, so that some have nothing within the window."""
    monkeypatch.setitem(blocks.BLOCK, "cpu", 4)
    assert_like_numpy(within(inputs(*shape), window), PLAIN)


def test_scores_are_capped_before_the_mask_also_within_a_window_on_a_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third of the scores of std 1 are above the cap, and a row has queries that see no key."""
    monkeypatch.setitem(blocks.BLOCK, "cpu", 5)
    x = inputs(20, 61, [TWO_GROUPS, OTHER, EMPTY, NO_PROMPT], 4, 2, 5)._replace(cap=0.9)
    assert_like_numpy(within(x, 11), PLAIN, train_layout(2, 2, 2))
    for shape in (FOR_SPLASH[0], FOR_SPLASH[2]):
        assert_like_numpy(inputs(*shape)._replace(cap=0.9), ("splash",))


@pytest.mark.parametrize("window, mesh", [(2**30, (1, 1, 1)), (9, (2, 2, 2))])
def test_rounds_and_the_loop_over_pairs_differ_by_rounding(
    monkeypatch: pytest.MonkeyPatch, window: int, mesh: tuple[int, ...]
) -> None:
    monkeypatch.setitem(blocks.BLOCK, "cpu", 16)
    rows = [ONE_GROUP, TWO_GROUPS, OTHER, NO_PROMPT] * 2
    x = within(inputs(32, 64, rows, 8, 4, 16), window)
    layout = train_layout(*mesh)
    assert_same(run(x, "rounds", layout), run(x, "blocks", layout), tolerance=1e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_bfloat16_is_near_float64(impl: str) -> None:
    x = inputs(128, 128, [ONE_GROUP], 4, 2, 64)
    q, kv = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (x.q, x.kv))
    out = jax.jit(attend(x, impl))(q, kv, *arguments(x)[2:])
    assert out.dtype == jnp.bfloat16 and out.shape == (1, 256, 256)
    error = np.where(x.seen, np.asarray(out, float), 0) - numpy_attention(x).out
    assert 0 < np.abs(error).max() < 0.03


# ---- On a mesh -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function, impl", [("_blocks_shard", "blocks"), ("_splash_shard", "splash")]
)
def test_several_devices_give_what_one_gives_and_each_gets_its_rows_and_heads(
    monkeypatch: pytest.MonkeyPatch, function: str, impl: str
) -> None:
    x = inputs(128, 256, [ONE_GROUP, TWO_GROUPS, OTHER, EMPTY] * 2, 4, 2, 64)
    module = splash if impl == "splash" else blocks
    of_device = Mock(wraps=getattr(module, function))
    monkeypatch.setattr(module, function, of_device)
    assert_same(run(x, impl, train_layout(2, 2, 2)), numpy_attention(x))
    shapes = {tuple(a.shape for a in call.args[3:8]) for call in of_device.call_args_list}
    X, H, N, t = 2, 2, 1, 128 + 256  # of a device
    assert shapes == {((X, H, t, 64), (X, N, t, 64), (X, N, t, 64), (X, t), (X, t))}


def test_kv_heads_that_tp_does_not_divide_are_repeated() -> None:
    x = inputs(20, 61, [TWO_GROUPS, OTHER], 8, 2, 6)
    assert_like_numpy(x, ("blocks", "rounds"), train_layout(1, 2, 4))


def test_prompts_of_several_devices_are_split_as_decoding_needs_them() -> None:
    x = inputs(13, 0, [LEFT_PADDED, ([(0, 13)], [])] * 4, 6, 3, 5)
    layout = train_layout(2, 1, 4)._replace(batch_axes=ROLLOUT_BATCH_AXES)
    assert_like_numpy(x, ("blocks", "rounds"), layout)


# ---- What memory holds ---------------------------------------------------------------------------


def temporaries(x: Inputs) -> int:
    """The bytes that the program of the gradient needs beside its arguments and results."""
    compiled = program(x, "blocks").lower(*arguments(x)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("has_completions", [True, False])
def test_the_memory_of_long_rows_grows_with_their_tokens_and_not_with_the_square(
    has_completions: bool,
) -> None:
    """Scores of all pairs would take 16 times as much for 4 times the tokens. Backward does not
    keep the scores of forward either."""
    few, many = (
        temporaries(inputs(S, n - S, [([(0, S)], [(0, n - S)])], 4, 2, 8))
        for n in (1024, 4096)
        for S in [64 if has_completions else n]
    )
    assert few < many < 5 * few < 4 * 4 * 4096 * 4096 / 8


TWO_PROMPTS: Row = [(0, 2), (1, 1)], [(0, 3), (0, 3), (1, 2)]


@pytest.mark.parametrize(
    "row, window, expected",
    [
        (TWO_PROMPTS, 99, [[0], [1], [0, 2], [0, 2, 3], [0, 3, 4], [1, 5], [6]]),
        (([], []), 99, [[i] for i in range(7)]),  # only padding: each block sees itself
        (([(0, 4)], [(0, 10)]), 99, [[*range(i + 1)] for i in range(7)]),  # all below the diagonal
        (
            ([(0, 2), (1, 2)], [(1, 5), (0, 5)]),
            99,
            [[0], [1], [1, 2], [1, 2, 3], [0, 1, 2, 3, 4], [0, 4, 5], [0, 4, 5, 6]],
        ),
        # The second completion sees its prompt, which stands 5 places before it, and then itself.
        (([(0, 4)], [(0, 6), (0, 4)]), 3, [[0], [0, 1], [1, 2], [2, 3], [3, 4], [1, 5], [5, 6]]),
    ],
)
def test_each_block_of_queries_computes_and_lists_only_blocks_in_which_something_is_seen(
    monkeypatch: pytest.MonkeyPatch, row: Row, window: int, expected: list[list[int]]
) -> None:
    """Lists leave windows out, since all layers have the same."""
    monkeypatch.setitem(blocks.BLOCK, "cpu", 2)
    x = within(inputs(4, 10, [row], 1, 1, 1), window)
    needed = {(i // 2, j // 2) for i in range(14) for j in visible(x, 0, i)}
    by_hand = {(i, j) for i, of_block in enumerate(expected) for j in of_block}
    assert needed | {(i, i) for i in range(7)} <= by_hand
    prompt, start, S, others, _ = x.rows
    tokens = tuple(np.reshape(a, (-1, 1, 2)) for a in (prompt, start, *others))
    pairs, count = block_pairs(needed_blocks(tokens, S))
    assert sorted((int(i), int(j)) for i, j in pairs[:count]) == sorted(by_hand)
    if window == 99:
        lists = with_lists(x.rows, ONE_DEVICE).key_blocks[0]
        assert [[int(j) for j in needed if j < 7] for needed in lists] == expected


def test_the_rows_of_all_micro_steps_have_the_same_number_of_rounds_and_it_has_few_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of 2 tokens; a completion of 2 n tokens needs n rounds."""
    monkeypatch.setattr(blocks, "IN_ROUNDS", {"cpu"})
    monkeypatch.setitem(blocks.BLOCK, "cpu", 2)

    def rounds(*lengths: int) -> list[int]:
        steps = [packed(0, 40, [([], [(0, n)])]) for n in lengths]
        return [x.key_blocks.shape[2] for x in blocks.with_key_blocks(steps, 0, ONE_DEVICE)]

    assert rounds(2, 10, 4) == [6, 6, 6] and rounds() == []
    values = [1, 2, 3, 4, 6, 6, 8, 8, *[12] * 4, *[16] * 4, *[20] * 4]  # a row has 20 blocks
    assert [rounds(2 * n) for n in range(1, 21)] == [[value] for value in values]
    monkeypatch.setattr(blocks, "gather_processes", lambda x: np.stack([x, [9]]))
    assert rounds(2, 10) == [12, 12], "another process needs 9"


# ---- The kernel's mask and blocks ----------------------------------------------------------------


@pytest.mark.parametrize(
    "S, C, num_blocks",
    [
        (128, 128, 2),
        (128, 384, 4),  # blocks of 128, as 384 divides no 512
        (256, 256, 2),
        (128, 512, 2),
        (640, 1792, 5),
        (896, 14336, 30),
    ],
)
def test_rows_of_more_than_512_places_have_blocks_of_512(S: int, C: int, num_blocks: int) -> None:
    q = jax.ShapeDtypeStruct((1, S + C, 3, 64), np.float32)
    kv = KV(*[jax.ShapeDtypeStruct((1, 1, *x), np.float32) for x in ((64, S + C), (S + C, 64))])

    def loss(q: jax.Array, kv: KV) -> jax.Array:
        return IMPLEMENTATIONS["splash"](q, kv, packed(S, C, [EMPTY]), ONE_DEVICE).sum()

    grids = re.findall(r"grid=\((.*?)\)", str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(q, kv)))
    of_heads = [sorted(map(int, grid.split(", "))) for grid in grids]
    assert of_heads == [sorted([3, num_blocks, num_blocks])] * 3  # forward, and two of backward


def test_the_kernel_computes_these_pairs_and_fetches_no_other_block() -> None:
    prompt, start, S, *_ = packed(4, 10, [TWO_PROMPTS])
    by_query, by_key = splash._blocks_to_compute(prompt[0], start[0], S, 2)
    assert by_query.block_mask.sum() == by_key.block_mask.sum() == 13
    # A block that is skipped is not fetched: the one before it stays.
    assert by_query.data_next[0, 4].tolist() == [0, 0, 0, 3, 4, 4, 4]
    assert by_key.data_next[0, :, 0].tolist() == [0, 0, 2, 3, 4, 4, 4]


def test_a_row_that_does_not_fit_in_the_mask_is_refused() -> None:
    prompt = np.zeros((1, splash.MAX_ROW_TOKENS + splash.LANES), np.int32)
    q = np.zeros((*prompt.shape, 1, 1), np.float32)
    with pytest.raises(AssertionError, match="a row of 131200 slots does not fit"):
        splash.splash_attention(q, KV(q, q), PackedRows(prompt, prompt, 128), ONE_DEVICE, 0.0)


def test_the_longest_row_and_completion_fit_in_an_int32() -> None:
    """The last query of the row is the last one of its completion."""
    prompt, start, S, *_ = packed(2**16, 2**16, [([(0, 9)], [(0, 2**16 - 2**14), (0, 2**14)])])
    query = splash._blocks_to_compute(prompt[0], start[0], S, 512)[0].q_sequence[-1]
    keys = jnp.array([0, 2**16 - 1, 2**16, 2**17 - 2**14 - 1, 2**17 - 2**14, 2**17 - 1])
    assert splash._splash_mask(S, query, keys).tolist() == [True, True, False, False, True, True]
