"""Claims about loss_pallas.py: token log-probabilities and entropies.

goldens/trl.npz holds what TRL 1.16 makes of seeded random inputs, trl.json the settings behind it.
"""

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loss_pallas
from loss import policy_loss
from loss_pallas import token_logps

GOLDENS = Path(__file__).parent / "goldens"
TRL = json.loads((GOLDENS / "trl.json").read_text(encoding="utf-8"))["logits"]
ARRAYS = dict(np.load(GOLDENS / "trl.npz"))
LOGITS = {
    name: ARRAYS[f"logits.in.{name}"]
    for name in ("logits", "ids", "completion_mask", "advantages", "old_logps")
}


def numpy_token_logps(
    hidden: np.ndarray, lm_head: np.ndarray, ids: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Float64: log p of ids, entropy, and the log-probabilities [..., V] behind them."""
    logits = hidden.astype(float) @ lm_head.astype(float).T / temperature
    logits = logits - logits.max(axis=-1, keepdims=True)
    table = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(table, ids[..., None], axis=-1)[..., 0]
    return chosen, -(np.exp(table) * table).sum(axis=-1), table


def inputs(*lead: int, V: int, D: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """hidden [*lead, D], lm_head [V, D] and ids [*lead]."""
    rng = np.random.default_rng(V)
    hidden, lm_head = rng.normal(size=(*lead, D)), rng.normal(size=(V, D))
    return np.float32(hidden), np.float32(lm_head), rng.integers(0, V, lead).astype(np.int32)


def force_chunks(monkeypatch: pytest.MonkeyPatch, rows: int, V: int, chunk: int) -> None:
    monkeypatch.setattr(loss_pallas, "LOGITS_CHUNK_BYTES", rows * V * 4 * chunk + 3)


@pytest.mark.parametrize("case", TRL)
def test_logps_and_entropy_are_those_of_trl(case: str) -> None:
    logits, ids = jnp.asarray(LOGITS["logits"]), jnp.asarray(LOGITS["ids"])  # [8, 12, 40], [8, 12]
    temperature = TRL[case]["temperature"]
    logps, entropy = token_logps(logits, jnp.eye(40), ids, temperature=temperature)
    mask = LOGITS["completion_mask"]  # TRL has 0 where it is 0
    np.testing.assert_allclose(logps * mask, ARRAYS[f"logits.{case}.logps"], atol=2e-6)
    np.testing.assert_allclose(entropy * mask, ARRAYS[f"logits.{case}.entropies"], atol=3e-6)


def test_the_objective_s_gradient_in_the_logits_is_that_of_trl() -> None:
    """Through the log-probabilities and, by the bonus, the entropies."""
    golden = TRL["t0p7_entropy_bonus"]

    def objective(logits: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        ids, temperature = jnp.asarray(LOGITS["ids"]), golden["temperature"]
        logps, entropy = token_logps(logits, jnp.eye(40), ids, temperature=temperature)
        names = ("old_logps", "advantages", "completion_mask")
        others = [jnp.asarray(LOGITS[name]) for name in names]
        num_tokens = LOGITS["completion_mask"].sum()
        return policy_loss(logps, *others, num_tokens, entropy=entropy, **golden["settings"])

    value_and_grad = jax.value_and_grad(objective, has_aux=True)
    (loss, metrics), grad = value_and_grad(jnp.asarray(LOGITS["logits"]))
    assert loss == metrics.pop("loss")
    assert loss == pytest.approx(ARRAYS["logits.t0p7_entropy_bonus.loss"], abs=1e-6)
    np.testing.assert_allclose(grad, ARRAYS["logits.t0p7_entropy_bonus.grad_logits"], atol=1e-6)
    assert not grad[LOGITS["completion_mask"] == 0].any()
    assert metrics == pytest.approx(golden["metrics"], abs=1e-6)


# n = 11 in chunks of 1, of 4 (an uneven last), of 11 and more (none)
@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_numpy(
    monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: float
) -> None:
    R, n, V = 3, 11, 23
    hidden, lm_head, ids = inputs(R, n, V=V)
    force_chunks(monkeypatch, R, V, chunk)
    run = functools.partial(token_logps, ids=jnp.asarray(ids), temperature=temperature)
    (logps, entropy), pull = jax.vjp(jax.jit(run), jnp.asarray(hidden), jnp.asarray(lm_head))
    assert logps.shape == entropy.shape == (R, n)
    assert logps.dtype == entropy.dtype == jnp.float32
    expected, H, table = numpy_token_logps(hidden, lm_head, ids, temperature)
    np.testing.assert_allclose(logps, expected, atol=2e-6)
    np.testing.assert_allclose(entropy, H, atol=3e-6)

    towards_logps, towards_entropy = np.random.default_rng(1).normal(size=(2, R, n))
    to_hidden, to_lm_head = pull((jnp.float32(towards_logps), jnp.float32(towards_entropy)))
    probs = np.exp(table)
    to_logits = towards_logps[..., None] * (np.eye(V)[ids] - probs)  # [R, n, V]
    to_logits -= towards_entropy[..., None] * probs * (table + H[..., None])
    to_logits /= temperature
    np.testing.assert_allclose(to_hidden, to_logits @ lm_head, atol=5e-6)
    flat = to_logits.reshape(-1, V).T @ hidden.reshape(R * n, -1)
    np.testing.assert_allclose(to_lm_head, flat, atol=2e-5)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_any_number_of_leading_axes_is_kept(
    monkeypatch: pytest.MonkeyPatch, lead: tuple[int, ...]
) -> None:
    hidden, lm_head, ids = inputs(*lead, 7, V=13)
    force_chunks(monkeypatch, math.prod(lead), 13, 3)
    logps, entropy = token_logps(jnp.asarray(hidden), jnp.asarray(lm_head), jnp.asarray(ids))
    expected, H, _ = numpy_token_logps(hidden, lm_head, ids, 1.0)
    np.testing.assert_allclose(logps, expected, atol=2e-6)
    np.testing.assert_allclose(entropy, H, atol=3e-6)


def test_bfloat16_operands_have_float32_logits() -> None:
    hidden, lm_head, ids = inputs(3, 7, V=1009, D=17)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (hidden, lm_head)]
    logps, entropy = token_logps(*rounded, jnp.asarray(ids))
    assert logps.dtype == entropy.dtype == jnp.float32
    exact = [np.asarray(x, np.float64) for x in rounded]
    expected, H, _ = numpy_token_logps(*exact, ids, 1.0)
    np.testing.assert_allclose(logps, expected, atol=1e-5)
    np.testing.assert_allclose(entropy, H, atol=1e-5)


def test_the_logits_of_a_whole_sequence_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    R, n, V = 2, 128, 1009
    hidden, lm_head, ids = inputs(R, n, V=V)

    def temporary_bytes(chunk: int) -> int:
        """What loss and gradient hold beside their inputs and outputs."""
        force_chunks(monkeypatch, R, V, chunk)

        def loss(hidden: jax.Array, lm_head: jax.Array) -> jax.Array:
            logps, entropy = token_logps(hidden, lm_head, jnp.asarray(ids))
            return logps.sum() + 0.1 * entropy.sum()

        program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, lm_head).compile()
        return program.memory_analysis().temp_size_in_bytes

    whole = R * n * V * 4
    assert temporary_bytes(n) > whole
    assert temporary_bytes(4) < whole / 4  # a chunk is 1/32 of it


def test_a_device_chunks_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 2 shards, 4 rows make as many logits a device as 2 rows do on one: the same chunks."""
    hidden, lm_head, ids = inputs(4, 12, V=13)
    force_chunks(monkeypatch, 2, 13, 3)

    def scans(rows: int, shards: int) -> list[int]:
        run = functools.partial(token_logps, shards=shards)
        program = jax.make_jaxpr(run)(hidden[:rows], lm_head, ids[:rows])
        return [e.params["length"] for e in program.eqns if e.primitive.name == "scan"]

    assert scans(2, 1) == scans(4, 2) == [4]
    assert scans(4, 1) == [12]


def test_an_unknown_implementation_is_named() -> None:
    hidden, lm_head, ids = inputs(2, 3, V=7)
    with pytest.raises(ValueError, match="POLICY_LOSS_IMPL='cuda'"):
        token_logps(hidden, lm_head, ids, impl="cuda")
