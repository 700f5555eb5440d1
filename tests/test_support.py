"""SAMPLING_SUPPORT=auto: the loss scores tokens among those that the sampler could draw."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from small_model import KERNELS, numpy_softmax
from small_model import token_inputs as inputs

from model.logps import token_logps

# ---- What is scored ------------------------------------------------------------------------------


def random_support(ids: np.ndarray, V: int, U: int) -> np.ndarray:
    """[..., U] ids of which the first is the sampled one, and some are -1."""
    rng = np.random.default_rng(2)
    rows = [rng.choice(V, U, replace=False) for _ in range(ids.size)]
    support = np.stack(rows).astype(np.int32).reshape(*ids.shape, U)
    taken = support == ids[..., None]
    support[..., 1:][rng.random(support[..., 1:].shape) < 0.3] = -1
    support[taken] = -1
    support[..., 0] = ids
    return support


def enumerated(
    hidden: np.ndarray, lm_head: np.ndarray, support: np.ndarray, cotangents: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """logps, entropy, and the gradients of hidden and lm_head, in float64, one token after the
    other. cotangents: of logps and entropy."""
    D, w = hidden.shape[-1], lm_head.astype(float)
    outputs, grad_hidden, grad_w = [], [], np.zeros(w.shape)
    rows = zip(hidden.reshape(-1, D), support.reshape(-1, support.shape[-1]), strict=True)
    for (x, kept), (g, g_entropy) in zip(rows, cotangents.reshape(2, -1).T, strict=True):
        logits = w @ x.astype(float) / 0.7
        p = numpy_softmax(logits)
        kept = kept[kept >= 0]
        within = p[kept] / p[kept].sum()
        entropy = -(p * np.log(p)).sum()
        outputs.append((np.log(within[0]), entropy))
        grad = -p * g_entropy * (np.log(p) + entropy)
        grad[kept] -= g * within
        grad[kept[0]] += g
        grad_hidden.append(grad @ w / 0.7)
        grad_w += np.outer(grad, x) / 0.7
    shape = hidden.shape[:-1]
    return [np.reshape(x, shape) for x in zip(*outputs, strict=True)], [
        np.reshape(grad_hidden, hidden.shape),
        grad_w,
    ]


def check(shape: tuple[int, ...], V: int, U: int, **how: object) -> None:
    hidden, lm_head, ids = inputs(*shape, V=V, D=16)
    lm_head *= 0.3
    support = random_support(ids, V, U)
    cotangents = np.float32(np.random.default_rng(3).normal(size=(2, *shape)))

    @jax.jit
    def both(hidden: jax.Array, lm_head: jax.Array) -> tuple:
        def scored(hidden: jax.Array, lm_head: jax.Array) -> tuple:
            return token_logps(hidden, lm_head, ids, support=support, temperature=0.7, **how)

        outputs, pull = jax.vjp(scored, hidden, lm_head)
        return outputs, pull((cotangents[0], cotangents[1]))

    found, grads = both(hidden, lm_head)
    expected, expected_grads = enumerated(hidden, lm_head, support, cotangents)
    for a, b in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1))


@pytest.mark.parametrize("V", [997, 60])
@pytest.mark.parametrize("tiles", [True, False], ids=["in_tiles", "at_once"])
def test_log_probabilities_and_gradients_are_those_of_the_support(
    V: int, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiles:
        monkeypatch.setattr("model.logps.LOGITS_TILE_BYTES", 1)  # tiles of 128 columns
    check((2, 11), V, U=50)


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)], ids=str)
def test_so_they_are_on_meshes(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.logps.LOGITS_TILE_BYTES", 1)
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("dp", "fsdp", "tp"))
    check((8, 3), 1000, U=20, mesh=mesh)


# ---- What cannot be scored -----------------------------------------------------------------------


def test_the_kernel_refuses_a_support() -> None:
    hidden, lm_head, ids = inputs(2, 3, V=7)
    with pytest.raises(ValueError, match="computes no support; jax does"):
        KERNELS["pallas"](hidden, lm_head, ids, support=ids[..., None])


@pytest.mark.parametrize("tiles", [True, False], ids=["in_tiles", "at_once"])
def test_an_improbable_support_and_one_without_tokens_have_finite_gradients(
    tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding has no support. The others have the least likely tokens, of probability e^-200."""
    if tiles:
        monkeypatch.setattr("model.logps.LOGITS_TILE_BYTES", 1)
    hidden, lm_head = np.ones((2, 3, 1), np.float32), np.linspace(0, 400, 300, dtype=np.float32)
    ids = np.full((2, 3), 150, np.int32)
    support = np.stack([ids, ids - 1], axis=-1)
    support[0] = -1

    def loss(hidden: jax.Array, lm_head: jax.Array) -> jax.Array:
        return token_logps(hidden, lm_head, ids, support=support)[0].sum()

    value, grads = jax.value_and_grad(loss, (0, 1))(hidden, lm_head[:, None])
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in grads)
