"""Claims about attention.py: every implementation and layout gives float64 numpy's results.

Pallas' interpreter runs the TPU kernel here.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention
from models.attention import KV, Cache, SharedPromptMask
from runtime.layout import ROLLOUT_BATCH_AXES, TRAIN_BATCH_AXES, Layout, make_mesh

# (G, S, share, T, H, N, h): inputs, prompt tokens, sequences of an input, tokens of a sequence,
# query heads, kv heads, head_dim.
SMALL = [
    (3, 7, 3, 5, 6, 2, 11),
    (2, 13, 1, 7, 3, 3, 5),
    (1, 5, 5, 3, 4, 1, 7),
    (2, 11, 1, 0, 6, 3, 5),  # an input that is only a prompt
]
FOR_SPLASH = [
    (1, 128, 1, 128, 2, 1, 64),  # two blocks of 128; nothing is padded
    (1, 256, 2, 128, 2, 2, 64),  # four blocks; the second sequence does not see the first
    (2, 100, 3, 60, 4, 2, 128),  # the prompt and the sequences are padded
    (1, 250, 1, 256, 2, 1, 64),  # blocks of 256; the prompt is padded by 6
    (1, 128, 3, 20, 2, 1, 64),  # only the sequences are padded
    (2, 150, 1, 0, 2, 1, 128),  # an input that is only a prompt
]


class Inputs(NamedTuple):
    q: np.ndarray  # [G, t, H, h]
    kv: KV  # [G, N, t, h]
    prompt_mask: np.ndarray  # [G, S]
    share: int
    # [G, t, H*h], the gradient of the loss with respect to the result. It is 0 at hidden tokens,
    # whose results mean nothing.
    towards: np.ndarray

    @property
    def seen(self) -> np.ndarray:
        """[G, t, 1]: the tokens that are not hidden."""
        G, t = self.q.shape[:2]
        sequences = np.ones((G, t - self.prompt_mask.shape[1]), bool)
        return np.concatenate([self.prompt_mask, sequences], axis=1)[..., None]


class Result(NamedTuple):
    out: np.ndarray  # [G, t, H*h], 0 at hidden tokens
    to_q: np.ndarray
    to_k: np.ndarray
    to_v: np.ndarray


def inputs(
    G: int, S: int, share: int, T: int, H: int, N: int, h: int, hidden: tuple[int, ...] = ()
) -> Inputs:
    """Random inputs.

    hidden: how many tokens of each prompt the padding hides; by default half of the first prompt,
    none of the second, all but one of the third, and so on.
    """
    rng, t = np.random.default_rng(S), S + share * T
    hidden = hidden or tuple((S // 2, 0, S - 1)[g % 3] for g in range(G))
    made = Inputs(
        rng.normal(size=(G, t, H, h)).astype(np.float32),
        kv_of(*rng.normal(size=(2, G, N, t, h)).astype(np.float32)),
        np.arange(S) >= np.array(hidden)[:, None],
        share,
        rng.normal(size=(G, t, H * h)).astype(np.float32),
    )
    return made._replace(towards=made.towards * made.seen)


def kv_of(k: np.ndarray, v: np.ndarray) -> KV:
    """A KV of keys and values that are both [..., tokens, h]."""
    return KV(np.ascontiguousarray(np.swapaxes(k, -1, -2)), v)


def visible(i: int, mask: np.ndarray, share: int, t: int) -> list[int]:
    """The keys that token i of an input sees; a hidden token sees none."""
    S = len(mask)
    before = [j for j in range(min(i + 1, S)) if mask[j]]
    if i < S:
        return before if mask[i] else []
    T = (t - S) // share
    return before + list(range(i - (i - S) % T, i + 1))


def numpy_attention(x: Inputs) -> Result:
    """The values and gradients in float64, computed for each query separately."""
    q, k, v = (np.asarray(a, float) for a in (x.q, x.kv.k.swapaxes(2, 3), x.kv.v))
    (G, t, H, h), N = q.shape, k.shape[1]
    towards = np.asarray(x.towards, float).reshape(q.shape)
    out, to_q, to_k, to_v = (np.zeros(a.shape) for a in (q, q, k, v))
    for g, head, i in np.ndindex(G, H, t):
        if keys := visible(i, x.prompt_mask[g], x.share, t):
            n = head // (H // N)
            scores = k[g, n, keys] @ q[g, i, head] / math.sqrt(h)
            p = np.exp(scores - scores.max())
            p /= p.sum()
            out[g, i, head] = p @ v[g, n, keys]
            to_p = v[g, n, keys] @ towards[g, i, head]
            to_scores = p * (to_p - p @ to_p) / math.sqrt(h)
            to_q[g, i, head] = to_scores @ k[g, n, keys]
            to_k[g, n, keys] += np.outer(to_scores, q[g, i, head])
            to_v[g, n, keys] += np.outer(p, towards[g, i, head])
    return Result(out.reshape(x.towards.shape), to_q, to_k.swapaxes(2, 3), to_v)


# Most of the time of these tests is compilation, which takes less without optimizations.
unoptimised = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def program(
    x: Inputs, impl: str, layout: Layout | None = None, jit: Callable[..., Any] = unoptimised
) -> Callable[[Any, KV], tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, KV]]]:
    """A function of (q, kv): the sum of attention times `towards`, its gradient, the attention."""

    def loss(q: jax.Array, kv: KV) -> tuple[jax.Array, jax.Array]:
        out = attention.attention(q, kv, jnp.asarray(x.prompt_mask), x.share, layout, impl)
        return (out * x.towards).sum(), out

    return jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def run(x: Inputs, impl: str, layout: Layout | None = None) -> Result:
    (_, out), (to_q, to_kv) = jax.device_get(program(x, impl, layout)(x.q, x.kv))
    assert out.shape == x.towards.shape and out.dtype == np.float32
    assert np.isfinite(out).all()  # at hidden tokens too
    return Result(np.where(x.seen, out, 0), to_q, *to_kv)


def assert_same(got: Result, expected: Result, tolerance: float = 1e-5) -> None:
    """The arrays are equal, up to `tolerance` times the largest number of each array."""
    for name, a, b in zip(Result._fields, got, expected, strict=True):
        assert a.shape == b.shape, name
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes splash run in Pallas' interpreter."""
    splash = functools.partial(attention._splash, interpret=True)
    monkeypatch.setattr(attention, "_splash", splash)


# ---- The values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_values_and_gradients_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    x = inputs(*shape)
    assert_same(run(x, "xla"), numpy_attention(x))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("shape", FOR_SPLASH, ids=str)
def test_the_kernel_s_values_and_gradients_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    x = inputs(*shape)
    assert_same(run(x, "splash"), numpy_attention(x))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", ["xla", "splash"])
def test_a_fully_padded_prompt_is_finite_and_its_sequences_see_only_themselves(impl: str) -> None:
    x = inputs(3, 19, 2, 23, 2, 1, 64, hidden=(19, 0, 19))
    got = run(x, impl)
    assert all(np.isfinite(a).all() for a in got)
    assert_same(got, numpy_attention(x))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", ["xla", "splash"])
def test_bfloat16_is_near_float64(impl: str) -> None:
    x = inputs(1, 37, 2, 29, 4, 2, 64)
    q, kv = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (x.q, x.kv))
    attend = unoptimised(lambda q, kv: attention.attention(q, kv, x.prompt_mask, 2, None, impl))
    out = attend(q, kv)
    assert out.dtype == jnp.bfloat16 and out.shape == (1, 95, 256)
    error = np.where(x.seen, np.asarray(out, float), 0) - numpy_attention(x).out
    assert 0 < np.abs(error).max() < 0.03


@pytest.mark.parametrize("index", [0, 3, 6])
@pytest.mark.parametrize("with_prompt", [True, False], ids=["prompt", "no_prompt"])
def test_a_new_token_sees_in_the_cache_what_it_sees_in_a_complete_input(
    with_prompt: bool, index: int
) -> None:
    G, S, share, T, H, N, h = 2, 5, 3, 7, 6, 2, 11
    R = G * share
    x = inputs(G, S, share, T, H, N, h, hidden=(2, 0) if with_prompt else (S, S))
    keys_and_values = x.kv.k.swapaxes(2, 3), x.kv.v
    prompt = kv_of(*[a[:, :, :S] for a in keys_and_values])
    completion = [a[:, :, S:].reshape(G, N, share, T, h).swapaxes(1, 2) for a in keys_and_values]
    # Places of the cache that are not written yet must not be read.
    written = np.arange(T)[:, None] <= index
    completion = kv_of(
        *[np.where(written, a.reshape(R, N, T, h), np.float32(1e4)) for a in completion]
    )
    cache = Cache(prompt, x.prompt_mask, completion, index)
    q = x.q[:, S:].reshape(R, T, H, h)[:, index][:, None]
    out = attention.cached_attention(q, cache, None)
    assert out.shape == (6, 1, 66)  # [R, 1, H*h]
    expected = numpy_attention(x).out[:, S:].reshape(R, T, H * h)[:, index]
    np.testing.assert_allclose(out[:, 0], expected, rtol=0, atol=1e-5)


# ---- On a mesh -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", ["xla", "splash"])
@pytest.mark.parametrize(
    "mesh_shape, batch_axes",
    [("2,2,2", TRAIN_BATCH_AXES), ("1,4,2", TRAIN_BATCH_AXES), ("2,1,4", ROLLOUT_BATCH_AXES)],
)
def test_several_devices_give_what_one_device_gives(
    mesh_shape: str, batch_axes: tuple[str, ...], impl: str
) -> None:
    x = inputs(8, 37, 2, 30, 4, 2, 64)
    layout = Layout(make_mesh("MESH_SHAPE", mesh_shape, jax.devices()), batch_axes)
    assert_same(run(x, impl, layout), numpy_attention(x))


@pytest.mark.parametrize(
    "mesh_shape, batch_axes, shape",
    [
        ("2,2,2", TRAIN_BATCH_AXES, (4, 97, 2, 64)),
        ("1,2,4", TRAIN_BATCH_AXES, (8, 97, 1, 64)),
        ("2,1,4", ROLLOUT_BATCH_AXES, (2, 97, 4, 64)),
    ],
)
def test_each_device_s_kernel_gets_a_part_of_the_inputs_and_in_training_a_part_of_the_heads(
    monkeypatch: pytest.MonkeyPatch,
    mesh_shape: str,
    batch_axes: tuple[str, ...],
    shape: tuple[int, ...],
) -> None:
    x, shapes = inputs(16, 37, 2, 30, 4, 4, 64), []

    def shard(
        share: int, interpret: bool, q: jax.Array, kv: KV, prompt_mask: jax.Array
    ) -> jax.Array:
        shapes.append(q.shape)
        assert kv.k.shape == (shape[0], shape[2], 64, 97)
        assert kv.v.shape == (shape[0], shape[2], 97, 64)
        return q.reshape(*q.shape[:2], -1)

    monkeypatch.setattr(attention, "_splash_shard", shard)
    layout = Layout(make_mesh("MESH_SHAPE", mesh_shape, jax.devices()), batch_axes)
    jax.eval_shape(
        lambda q, kv: attention.attention(q, kv, x.prompt_mask, 2, layout, "splash"), x.q, x.kv
    )
    assert shapes == [shape]


# ---- In chunks -----------------------------------------------------------------------------------


def chunks(x: Inputs, layout: Layout | None = None) -> list[int]:
    """The number of chunks of the prompts' attention and of the sequences'; 1 is left out."""
    jaxpr = jax.make_jaxpr(
        lambda q, kv: attention.attention(q, kv, x.prompt_mask, x.share, layout, "xla")
    )
    return [int(n) for n in re.findall(r" length=(\d+)", str(jaxpr(x.q, x.kv)))]


# A query's scores take 4*2*4*13 = 416 bytes in the prompts, 4*6*4*20 = 1920 in the sequences.
@pytest.mark.parametrize(
    "scores_bytes, expected",
    [
        (1, [13, 7]),  # one query at a time
        (2080, [3, 7]),  # 5, 5 and 3
        (5760, [3]),  # 3, 3 and 1
        (2**20, []),
    ],
)
def test_chunks_leave_values_and_gradients_unchanged(
    monkeypatch: pytest.MonkeyPatch, scores_bytes: int, expected: list[int]
) -> None:
    monkeypatch.setattr(attention, "SCORES_BYTES", scores_bytes)
    x = inputs(2, 13, 3, 7, 4, 2, 5)
    assert chunks(x) == expected
    assert_same(run(x, "xla"), numpy_attention(x))


def test_only_the_scores_of_one_device_count_against_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = inputs(8, 16, 2, 4, 4, 2, 8)
    monkeypatch.setattr(attention, "SCORES_BYTES", 4 * 8 * 4 * 16 * 16 // 8)  # an eighth of all
    layout = Layout(make_mesh("MESH_SHAPE", "2,2,2", jax.devices()), TRAIN_BATCH_AXES)
    assert chunks(x) == [8, 4] and chunks(x, layout) == []


@pytest.mark.parametrize("shape", [(1, 1024, 1, 0), (1, 512, 2, 256)], ids=["prompt", "sequences"])
def test_many_scores_never_exist_at_once(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """Nor do they in the program of the gradient, which could keep them from forward."""
    x = inputs(*shape, 4, 2, 8)
    _, S, share, T = shape
    scores = 4 * 4 * max(S * S, share * T * (S + T))  # float32 of four heads

    def temporaries() -> int:
        compiled = program(x, "xla", jit=jax.jit).lower(x.q, x.kv).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries() > scores  # below the limit they are kept
    monkeypatch.setattr(attention, "SCORES_BYTES", scores // 16)
    assert temporaries() < scores / 2


# ---- The kernel's mask and blocks ----------------------------------------------------------------


def test_the_mask_by_hand() -> None:
    mask = SharedPromptMask(S=2, share=2, T=3)
    assert mask.shape == (8, 8)
    assert mask[:, :].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 1, 1, 1],
    ]
    assert mask[4:6, 1:6].astype(int).tolist() == [[1, 1, 1, 1, 0], [1, 0, 0, 0, 1]]
    prompt = SharedPromptMask(S=3, share=1, T=0)
    assert prompt[:, :].astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


# The comments tell the tokens of prompt and sequences after padding to blocks of 512, 384, 256
# and 128.
@pytest.mark.parametrize(
    "S, share, T, block",
    [
        (512, 8, 1024, 512),  # 8704, ., ., 8704
        (512, 8, 768, 384),  # 8704, 6912, ., 6656
        (384, 8, 1024, 512),  # 8704, ., ., 8576
        (512, 8, 256, 256),  # 4608, 3840, 2560, 2560
        (2048, 4, 640, 128),  # 6144, 5376, 5120, 4608
        (64, 8, 100, 128),  # 4608, 3456, 2304, 1152
        (0, 8, 1024, 512),  # 8192, ., ., 8192
        (0, 1, 1, 128),  # 512, 384, 256, 128
        (0, 1, 1150, 384),  # 1536, 1152, ., 1152
        (0, 1, 1400, 512),  # 1536, ., ., 1408: 9 % more
        (0, 1, 1700, 384),  # 2048, 1920, ., 1792: 14 and 7 % more
        (1000, 1, 0, 512),  # 1024, ., ., 1024
        (1, 4, 0, 128),  # 512, 384, 256, 128
    ],
)
def test_the_block_is_the_largest_that_needs_at_most_a_tenth_more_padding(
    S: int, share: int, T: int, block: int
) -> None:
    assert attention._block(S, share, T) == block


@pytest.mark.parametrize(
    "S, share, T", [(500, 3, 1024), (300, 3, 380), (250, 2, 256), (100, 4, 60)]
)
def test_after_padding_only_blocks_on_a_diagonal_are_partly_masked(
    S: int, share: int, T: int
) -> None:
    block = attention._block(S, share, T)
    mask = SharedPromptMask(S + -S % block, share, T + -T % block)
    count = mask.shape[0] // block
    parts = [slice(i * block, (i + 1) * block) for i in range(count)]
    for i, j in np.ndindex(count, count):
        part = mask[parts[i], parts[j]]
        if i == j:
            np.testing.assert_array_equal(part, np.tri(block, dtype=bool))
        else:
            assert part.all() or not part.any(), (i, j)
