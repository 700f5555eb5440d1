"""Claims about loss_pallas.py: advantages, the objective and token log-probabilities.

goldens/trl.json holds what TRL 1.16 makes of seeded random inputs; null is a reward of None.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loss_pallas
from loss_pallas import group_advantages, policy_loss, token_logps

TRL = json.loads((Path(__file__).parent / "goldens" / "trl.json").read_text(encoding="utf-8"))
NAN = math.nan


# ---- Advantages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards, K, scale, expected",
    [
        # std of 1,0,0,0 (ddof 1) is 0.5; of 1,0,2 is 1
        ([1, 0, 0, 0, 1, 1, 1, 1], 4, "none", [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0]),
        ([1, 0, 0, 0], 4, "group", [0.75 / 0.5001, *[-0.25 / 0.5001] * 3]),
        ([1, 0, 2], 3, "group", [0, -1 / 1.0001, 1 / 1.0001]),
        # "batch": the std of all of 2,0,1,1 is sqrt(2/3); the mean is still the group's
        ([2, 0, 1, 1], 2, "batch", [1 / 0.8165966, -1 / 0.8165966, 0, 0]),
        ([5, 7], 1, "none", [0, 0]),
        ([5, 7], 1, "group", [0, 0]),
        ([5, 7], 1, "batch", [0, 0]),
        # NaN counts in neither mean nor std and gets 0
        ([1, NAN, 0, 2], 4, "group", [0, 0, -1 / 1.0001, 1 / 1.0001]),
        ([1, NAN, 3, NAN], 4, "none", [-1, 0, 1, 0]),
        ([2, NAN, 0, NAN, 1, 1], 2, "batch", [0] * 6),  # alone in its group: nothing to compare to
        ([4, 2, NAN, NAN], 2, "batch", [1 / 1.4143136, -1 / 1.4143136, 0, 0]),
        ([NAN, NAN, 1, 3], 2, "none", [0, 0, -1, 1]),
        ([NAN] * 4, 2, "group", [0] * 4),
        ([NAN] * 4, 2, "batch", [0] * 4),
    ],
)
def test_advantages_by_hand(rewards: list, K: int, scale: str, expected: list) -> None:
    advantages = group_advantages(np.array(rewards, float), K, scale_rewards=scale)
    np.testing.assert_allclose(advantages, expected, atol=1e-7)
    assert advantages.shape == (len(rewards),) and advantages.dtype == np.float64


@pytest.mark.parametrize("value", [0.7, 0.1, 1.0, -0.3, 1e6 + 0.1])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_no_advantage_at_all(value: float, scale: str) -> None:
    for rewards in (np.full(6, value), np.full(6, value, np.float32)):
        rewards[3:] = [1, 0, NAN]  # the other group has some
        advantages = group_advantages(rewards, 3, scale_rewards=scale)
        assert advantages[:3].tolist() == [0, 0, 0]
        assert advantages[3] > 0 > advantages[4]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("case", TRL["advantages"])
def test_advantages_are_those_of_trl(case: str, scale: str) -> None:
    golden = TRL["advantages"][case]
    per_function = np.array(golden["rewards"], float)  # [F, B]
    rewards = np.nansum(per_function * np.array(golden["weights"])[:, None], axis=0)
    rewards[np.isnan(per_function).all(axis=0)] = NAN
    advantages = group_advantages(rewards, golden["num_generations"], scale_rewards=scale)
    # TRL leaks float32 noise into the equal group of point1; the rest is 2e-7 of its size.
    atol = 4e-6 if case == "point1" else 2e-7
    np.testing.assert_allclose(advantages, golden[scale], rtol=2e-7, atol=atol)


# ---- The objective -------------------------------------------------------------------------------


def value_and_grad(
    logps: np.ndarray, old: np.ndarray, advantages: np.ndarray, mask: np.ndarray, num_tokens: float,
    **settings: Any,
) -> tuple[float, np.ndarray, dict[str, float]]:  # fmt: skip
    """The loss, its gradient [R, T] and its metrics."""
    inputs = [jnp.asarray(x, jnp.float32) for x in (old, advantages)]

    def loss(logps: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return policy_loss(logps, *inputs, jnp.asarray(mask), num_tokens, **settings)

    (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(jnp.float32(logps))
    assert value.shape == () and float(metrics.pop("loss")) == float(value)
    return float(value), np.asarray(grad), {name: float(x) for name, x in metrics.items()}


def trl_inputs() -> dict[str, np.ndarray]:
    """Finite garbage under the mask, row 4 without a token."""
    return {name: np.array(x, np.float32) for name, x in TRL["loss"]["in"].items()}


def trl_case(name: str, x: dict[str, np.ndarray]) -> tuple[float, np.ndarray, dict[str, float]]:
    settings = TRL["loss"]["cases"][name]["settings"]
    rows = slice(*settings["rows"])
    return value_and_grad(
        x["logps"][rows], x["old_logps" if settings["old"] else "logps"][rows],
        x["advantages"][rows], x["completion_mask"][rows], x["completion_mask"].sum(),
        eps_high=settings["eps_high"], beta=settings["beta"],
        ref_logps=jnp.asarray(x["ref_logps"][rows]),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["onpolicy", "offpolicy", "onpolicy_kl", "offpolicy_kl"])
def test_the_objective_is_trl_s_dapo(name: str) -> None:
    golden = TRL["loss"]["cases"][name]
    loss, grad, metrics = trl_case(name, trl_inputs())
    assert loss == pytest.approx(golden["loss"], abs=1e-6)
    np.testing.assert_allclose(grad, golden["grad_logps"], atol=1e-6)
    assert metrics == pytest.approx(golden["metrics"], abs=1e-6)


def test_a_micro_batch_contributes_what_trl_accumulates() -> None:
    """TRL's normaliser of one of 2 accumulated micro-batches is the whole step's tokens."""
    for name in ("accum2_mb0", "accum2_mb1"):
        loss, grad, _ = trl_case(name, trl_inputs())
        assert loss == pytest.approx(TRL["loss"]["cases"][name]["loss"], abs=1e-6)
        np.testing.assert_allclose(grad, TRL["loss"]["cases"][name]["grad_logps"], atol=1e-6)


@pytest.mark.parametrize("garbage", [1e4, -1e4, math.inf, -math.inf, NAN])
def test_what_is_under_the_mask_changes_nothing(garbage: float) -> None:
    clean, dirty = trl_inputs(), trl_inputs()
    for name in ("logps", "old_logps", "ref_logps"):
        clean[name][clean["completion_mask"] == 0] = -1.0
        dirty[name][dirty["completion_mask"] == 0] = garbage
    loss, grad, metrics = trl_case("offpolicy_kl", clean)
    assert (grad[clean["completion_mask"] == 0] == 0).all()
    dirty_loss, dirty_grad, dirty_metrics = trl_case("offpolicy_kl", dirty)
    assert (dirty_loss, dirty_metrics) == (loss, metrics)
    assert dirty_grad.tolist() == grad.tolist()


@pytest.mark.parametrize(
    "ratio, advantage, loss, slope, low, high",
    [  # the loss of one token and its slope in logp, d(-ratio A)/dlogp = -ratio A unless clipped
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.1, 2.0, -2.2, -2.2, 0, 0),
        (1.5, 2.0, -2.6, 0.0, 0, 1),  # held at 1.3: no reward for going further
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # a good token got rarer: never clipped
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # held at 0.8
        (1.5, -2.0, 3.0, 3.0, 0, 0),  # a bad token got likelier: never clipped
        (0.9, -2.0, 1.8, 1.8, 0, 0),
    ],
)
def test_clipping_by_hand(
    ratio: float, advantage: float, loss: float, slope: float, low: int, high: int
) -> None:
    value, grad, metrics = value_and_grad(
        [[math.log(ratio) - 1.5]], [[-1.5]], [advantage], [[1]], 1.0, eps_low=0.2, eps_high=0.3
    )
    assert value == pytest.approx(loss, rel=1e-6)
    assert grad[0, 0] == pytest.approx(slope, rel=1e-6)
    names = [f"clip_ratio/{which}_mean" for which in ("low", "high", "region")]
    assert metrics == dict(zip(names, [low, high, low + high], strict=True))


def test_the_kl_is_k3_and_moves_the_gradient() -> None:
    """ref 2x likelier: 2 - ln 2 - 1, slope 1 - 2. ref half as likely: .5 + ln 2 - 1, slope 1/2."""
    logps = np.array([[-1.0, -2.0, -3.0]])
    ref = jnp.float32(logps + [[math.log(2), -math.log(2), 0]])
    same = (logps, logps, [0.0], [[1, 1, 1]], 4.0)
    value, grad, metrics = value_and_grad(*same, beta=0.5, ref_logps=ref)
    assert metrics["kl"] == pytest.approx((0.3068528 + 0.1931472 + 0) / 4, abs=1e-7)
    assert value == pytest.approx(0.5 * 0.5 / 4, abs=1e-7)
    np.testing.assert_allclose(grad, [[-0.5 / 4, 0.25 / 4, 0]], atol=1e-7)
    value, grad, metrics = value_and_grad(*same)
    assert value == 0 and not grad.any() and "kl" not in metrics


def test_the_advantage_belongs_to_the_row_and_the_denominator_to_the_step() -> None:
    """Rows of 1 and 3 tokens, advantages 5 and 1: -(5 + 1 + 1 + 1) / 8."""
    mask = [[1, 0, 0], [1, 1, 1]]
    loss, grad, _ = value_and_grad(np.zeros((2, 3)), np.zeros((2, 3)), [5.0, 1.0], mask, 8.0)
    assert loss == -1.0
    assert grad.tolist() == [[-5 / 8, 0, 0], [-1 / 8, -1 / 8, -1 / 8]]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_add_up_to_the_batch(size: int) -> None:
    x = trl_inputs()
    mask, num_tokens = x["completion_mask"], x["completion_mask"].sum()

    def part(rows: slice, num_tokens: float) -> tuple[float, np.ndarray, dict[str, float]]:
        return value_and_grad(
            x["logps"][rows], x["old_logps"][rows], x["advantages"][rows], mask[rows], num_tokens,
            beta=0.1, ref_logps=jnp.asarray(x["ref_logps"][rows]),
        )  # fmt: skip

    loss, grad, metrics = part(slice(0, 8), num_tokens)
    parts = [slice(i, i + size) for i in range(0, 8, size)]
    losses, grads, partial = zip(*(part(rows, num_tokens) for rows in parts), strict=True)
    assert sum(losses) == pytest.approx(loss, abs=1e-6)
    np.testing.assert_allclose(np.concatenate(grads), grad, atol=1e-7)
    assert {n: sum(p[n] for p in partial) for n in metrics} == pytest.approx(metrics, abs=1e-6)
    # Means of the micro-batches' own means are something else, so the above would see them.
    own = [part(rows, max(mask[rows].sum(), 1))[0] / len(parts) for rows in parts]
    assert abs(sum(own) - loss) > 1e-3


# ---- Token log-probabilities ---------------------------------------------------------------------


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


@pytest.mark.parametrize("case", ["t1_dapo", "t0p7_dapo", "t1p3_grpo"])
def test_logps_and_entropy_are_those_of_trl(case: str) -> None:
    golden = TRL["logits"][case]
    logits = jnp.float32(np.array(TRL["logits"]["logits"]))  # [2, 12, 40]
    ids = jnp.array(TRL["logits"]["ids"])
    logps, entropy = token_logps(logits, jnp.eye(40), ids, temperature=golden["temperature"])
    mask = np.array(TRL["logits"]["completion_mask"])  # TRL has 0 where it is 0
    np.testing.assert_allclose(logps * mask, golden["logps"], atol=2e-6)
    np.testing.assert_allclose(entropy * mask, golden["entropies"], atol=3e-6)


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
