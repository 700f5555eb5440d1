"""Claims about loss_pallas.py and model/logps.py: token log-probabilities and entropies, over the
vocabulary and among the tokens that the sampler could draw.

The TPU kernel runs here in Pallas' interpreter, and through the compiler of the TPU."""

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from small_model import KERNELS, numpy_softmax, train_layout
from small_model import token_inputs as inputs

import loss_pallas
from infra.settings import REPO
from loss_pallas import Kernel
from model.logps import token_logps
from tools import plan


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128 columns, so that a vocabulary of 1027 has 9 and the last reaches back."""
    monkeypatch.setattr("model.logps.LOGITS_TILE_BYTES", 1)
    monkeypatch.setattr(loss_pallas, "block_sizes", lambda *_, **__: (64, 128))


class Gradients(NamedTuple):
    logps: np.ndarray
    entropy: np.ndarray
    grad_hidden: np.ndarray
    grad_lm_head: np.ndarray


def program(
    impl: Kernel | None,
    ids: Any,
    temperature: float,
    mesh: Mesh | None = None,
    support: np.ndarray | None = None,
    cap: float = 0.0,
) -> Callable[..., Gradients]:
    """(hidden, lm_head, cotangents) -> the outputs of `impl` and its pullback of `cotangents`,
    [2, ...]."""

    def both(hidden: jax.Array, lm_head: jax.Array) -> Any:
        settings = {"support": support, "temperature": temperature, "mesh": mesh, "cap": cap}
        return (impl or token_logps)(hidden, lm_head, ids, **settings)

    @jax.jit
    def all_four(hidden: jax.Array, lm_head: jax.Array, cotangents: Any) -> Gradients:
        outputs, pull = jax.vjp(both, hidden, lm_head)
        return Gradients(*outputs, *pull((cotangents[0], cotangents[1])))

    return lambda *arrays: jax.device_get(all_four(*arrays))


def numpy_gradients(
    hidden: np.ndarray,
    lm_head: np.ndarray,
    ids: np.ndarray,
    cotangents: Any,
    temperature: float,
    support: np.ndarray | None = None,
    cap: float = 0.0,
) -> Gradients:
    """The same in float64."""
    hidden, lm_head = hidden.astype(float), lm_head.astype(float)
    V, D = lm_head.shape
    logits, slope = hidden @ lm_head.T, 1.0
    if cap:
        logits, slope = cap * np.tanh(logits / cap), np.cosh(logits / cap) ** -2
    p = numpy_softmax(logits / temperature)  # [..., V]
    entropy = -(p * np.log(p)).sum(axis=-1, keepdims=True)
    in_support = np.ones(p.shape)
    if support is not None:
        in_support = (support[..., None] == np.arange(V)).any(axis=-2)
    kept = p * in_support / (p * in_support).sum(axis=-1, keepdims=True)
    is_chosen = ids[..., None] == np.arange(V)
    logps = np.log(kept[is_chosen]).reshape(ids.shape)
    grad_logps, grad_entropy = np.asarray(cotangents, float)[..., None]
    grad_logits = grad_logps * (is_chosen - kept) - grad_entropy * p * (np.log(p) + entropy)
    grad_logits *= slope / temperature
    grad_lm_head = grad_logits.reshape(-1, V).T @ hidden.reshape(-1, D)
    return Gradients(logps, entropy[..., 0], grad_logits @ lm_head, grad_lm_head)


def random_cotangents(*lead: int) -> np.ndarray:
    return np.float32(np.random.default_rng(1).normal(size=(2, *lead)))


def assert_relative(got: Gradients, expected: Gradients, tolerance: float) -> None:
    """Of each array, to its largest value."""
    for name, a, b in zip(Gradients._fields, got, expected, strict=True):
        assert a.shape == b.shape, name
        scale = max(np.abs(b).max(), 1.0)
        assert np.abs(np.asarray(a, float) - b).max() <= tolerance * scale, name


# ---- The values ----------------------------------------------------------------------------------


def random_support(ids: np.ndarray, V: int, U: int) -> np.ndarray:
    """[..., U] ids of which the first is the sampled one, and some are -1."""
    rng = np.random.default_rng(2)
    rows = [rng.choice(V, U, replace=False) for _ in range(ids.size)]
    support = np.stack(rows).astype(np.int32).reshape(*ids.shape, U)
    is_unused = (support == ids[..., None]) | (rng.random(support.shape) < 0.3)
    support[is_unused] = -1
    support[..., 0] = ids
    return support


class Case(NamedTuple):
    """Inputs of the log-probabilities. lead: the shape of the ids."""

    lead: tuple[int, ...]
    V: int
    D: int = 64
    temperature: float = 0.7
    cap: float = 0.0
    U: int = 0  # the size of a support; 0: all tokens
    mesh: tuple[int, int, int] = (1, 1, 1)
    tile_bytes: int = 1  # of jax; 1: tiles of 128 columns


BY_BOTH = {
    "a tile that is not full": Case((7,), V=17, D=896, temperature=1.0),
    "nine tiles, the last of which reaches back": Case((129,), V=1027),
    "a cap before the temperature": Case((129,), V=997, cap=1.3),
    "devices with uneven tiles": Case((8, 37), V=1030, mesh=(2, 2, 2)),
}
BY_JAX = {
    "a support": Case((8, 3), V=997, D=16, U=50),
    "a support of a single tile": Case((8, 3), V=60, D=16, U=50, tile_bytes=2**28),
    "a support on devices": Case((8, 3), V=1000, D=16, U=50, mesh=(2, 2, 2)),
    "a support and a cap": Case((129,), V=997, U=50, cap=1.3),
}
CASES = [(name, impl) for name in BY_BOTH for impl in KERNELS] + [(name, "jax") for name in BY_JAX]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name, impl", CASES)
def test_values_and_gradients_are_those_of_numpy(
    name: str, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the gradient of the entropy and without. Two thirds of the logits of std 3 are above the
    cap. Some targets are on both sides of the border between two devices."""
    case = (BY_BOTH | BY_JAX)[name]
    monkeypatch.setattr("model.logps.LOGITS_TILE_BYTES", case.tile_bytes)
    hidden, lm_head, ids = inputs(*case.lead, V=case.V, D=case.D)
    lm_head *= 3 / math.sqrt(case.D)
    at_border = ids.reshape(len(ids), -1)[:8, 0]
    at_border[:] = case.V // 2 - 4 + np.arange(len(at_border))
    support = random_support(ids, case.V, case.U) if case.U else None
    mesh = train_layout(*case.mesh).mesh
    run = program(KERNELS[impl], ids, case.temperature, mesh, support, case.cap)
    for parts in ([[1], [1]], [[1], [0]]):
        cotangents = random_cotangents(ids.size) * np.float32(parts)
        arguments = cotangents.reshape(2, *case.lead), case.temperature, support, case.cap
        expected = numpy_gradients(hidden, lm_head, ids, *arguments)
        assert_relative(run(hidden, lm_head, arguments[0]), expected, 1e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("impl", ["jax", "pallas"])
def test_bfloat16_operands_have_float32_logits_and_float32_sums(impl: str) -> None:
    """hidden says in what the lm_head is multiplied. The gradients are off by the rounding of the
    factors, and that of hidden by the rounding of the result."""
    hidden, lm_head, ids = inputs(3, 43, V=1009)
    hidden, lm_head = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(lm_head * 0.3)
    cotangents, run = random_cotangents(3, 43), program(KERNELS[impl], ids, 1.0)
    got = run(hidden, lm_head, cotangents)
    assert got.logps.dtype == got.entropy.dtype == np.float32
    assert (got.grad_hidden.dtype, got.grad_lm_head.dtype) == (jnp.bfloat16, np.float32)
    exact = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (hidden, lm_head)]
    expected = numpy_gradients(*exact, ids, cotangents, 1.0)
    np.testing.assert_allclose(got.logps, expected.logps, atol=2e-5)
    np.testing.assert_allclose(got.entropy, expected.entropy, atol=2e-5)
    for a, b, tolerance in zip(got[2:], expected[2:], (2.8e-3, 2e-3), strict=True):
        assert np.linalg.norm(np.float64(a) - b) < tolerance * np.linalg.norm(b)
    # LoRA may freeze the weights in bfloat16.
    assert run(hidden, lm_head.astype(hidden.dtype), cotangents).grad_lm_head.dtype == jnp.bfloat16


def test_the_kernel_refuses_a_support() -> None:
    hidden, lm_head, ids = inputs(2, 3, V=7)
    with pytest.raises(ValueError, match="computes no support; jax does"):
        KERNELS["pallas"](hidden, lm_head, ids, support=ids[..., None])


@pytest.mark.parametrize("tile_bytes", [1, 2**28], ids=["in_tiles", "at_once"])
def test_an_improbable_support_and_one_without_tokens_have_finite_gradients(
    tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding has no support. The others have the least likely tokens, of probability e^-200."""
    monkeypatch.setattr("model.logps.LOGITS_TILE_BYTES", tile_bytes)
    hidden, lm_head = np.ones((2, 3, 1), np.float32), np.linspace(0, 400, 300, dtype=np.float32)
    ids = np.full((2, 3), 150, np.int32)
    support = np.stack([ids, ids - 1], axis=-1)
    support[0] = -1
    cotangents = np.stack([np.ones((2, 3)), np.zeros((2, 3))])
    got = program(None, ids, 1.0, support=support)(hidden, lm_head[:, None], cotangents)
    assert all(np.isfinite(x).all() for x in got)


WATCH = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("tokens, interpret", [(256, WATCH), (232, True)], ids=["256", "232"])
def test_the_two_cores_of_a_v4_race_with_nobody_and_add_no_token_behind_the_end(
    monkeypatch: pytest.MonkeyPatch, tokens: int, interpret: bool | pltpu.InterpretParams
) -> None:
    """Every block adds to the gradients of the one before; each core of a v4 has one gradient, and
    two of the four blocks. The last block of 232 tokens has 40 tokens, then NaN."""
    monkeypatch.setitem(loss_pallas.CORES, "cpu", (16, 2))
    hidden, lm_head, ids = inputs(tokens, V=300)
    cotangents = random_cotangents(tokens)
    got = program(Kernel("cpu", interpret), ids, 1.0)(hidden, lm_head, cotangents)
    assert interpret is True or not interpret_pallas_call.races.races_found
    assert_relative(got, numpy_gradients(hidden, lm_head, ids, cotangents, 1.0), 1e-5)


# ---- The compiler of the TPU ---------------------------------------------------------------------

HEADS = {"Qwen2.5-3B": (2048, 151936), "Qwen2.5-14B": (5120, 152064)}  # D, V
HEADS["Gemma-2-2B"] = 2304, 256000  # with a softcap, which takes one more array in VMEM
# Chips with 16, 64 and 128 MiB of VMEM for a core, and a wide model beside the least of them, whose
# small tiles compile fastest. The shapes are those of the mesh.
TO_COMPILE = [
    ("jax", "v6e", "Qwen2.5-3B", (2, 2, 2)),
    ("pallas", "v4", "Qwen2.5-14B", (1, 4, 1)),
    ("pallas", "v4", "Gemma-2-2B", (1, 4, 1)),
    pytest.param("pallas", "v5p", "Qwen2.5-3B", (1, 4, 1), marks=pytest.mark.slow),
    pytest.param("pallas", "v6e", "Qwen2.5-3B", (1, 8, 1), marks=pytest.mark.slow),
]


def compile_for(mesh: Mesh, impl: str, D: int, V: int) -> jax.stages.Compiled:
    """The gradient with respect to hidden and lm_head, for 16 x 1024 tokens on each device."""
    sequences = 16 * mesh.shape["dp"] * mesh.shape["fsdp"]
    hidden = plan.array(mesh, (sequences, 1024, D), jnp.bfloat16, ("dp", "fsdp"))
    lm_head = plan.array(mesh, (V, D), jnp.float32, "tp", "fsdp")
    ids = plan.array(mesh, (sequences, 1024), jnp.int32, ("dp", "fsdp"))
    compute = Kernel(mesh.devices.flat[0].device_kind) if impl == "pallas" else token_logps

    def loss(hidden: jax.Array, lm_head: jax.Array, ids: jax.Array) -> jax.Array:
        cap = 30.0 if (D, V) == HEADS["Gemma-2-2B"] else 0.0
        logps, entropy = compute(hidden, lm_head, ids, cap=cap, mesh=mesh)
        return logps.sum() + 0.01 * entropy.sum()

    return jax.jit(jax.grad(loss, (0, 1))).lower(hidden, lm_head, ids).compile()


def largest_float32(compiled: jax.stages.Compiled) -> int:
    """The most numbers of a float32 array on a device."""
    shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize("impl, chip, head, mesh_shape", TO_COMPILE)
def test_tpus_hold_no_logits_and_a_part_of_the_gradient_of_the_lm_head_for_each_shard(
    impl: str, chip: str, head: str, mesh_shape: tuple[int, int, int]
) -> None:
    pytest.importorskip("libtpu", reason='libtpu: pip install "jax[tpu]"')
    (D, V), devices = HEADS[head], plan.slice_devices(f"{chip}-8")
    mesh = Mesh(np.array(devices).reshape(mesh_shape), ("dp", "fsdp", "tp"))
    compiled = compile_for(mesh, impl, D, V)
    if impl == "pallas":
        assert compiled.as_text().count("tpu_custom_call") >= 2, "forward and backward"
    _, fsdp, tp = mesh_shape
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 16 * 1024 * V / tp / 8
    assert largest_float32(compiled) == V * D // (fsdp * tp)


def test_a_model_too_wide_for_the_chip_is_named() -> None:
    with pytest.raises(
        ValueError, match="hidden size 8192 is too wide for the 16 MiB .* of TPU v4"
    ):
        loss_pallas.block_sizes(8192, 2, "TPU v4")
    assert loss_pallas.block_sizes(8192, 2, "TPU v6 lite")[1] >= 1024


def test_a_softcap_takes_one_more_array_of_a_block_and_a_tile() -> None:
    """Blocks of 64 tokens and tiles of 512 rows take 64 * 24 * D + 512 * 8 * D + 64 * 512 * 4 * 12
    bytes of the 16 MiB of a v4: with D = 2688 16.71 million of 16.78, and too many if 12 is 13."""
    sizes = [loss_pallas.block_sizes(2688, 2, "TPU v4", has_cap) for has_cap in (False, True)]
    assert sizes == [(64, 512), (128, 256)]


# ---- Alone ---------------------------------------------------------------------------------------

ALONE = """
import jax, jax.numpy as jnp
from loss_pallas import Kernel, reference
hidden, lm_head = jax.random.normal(jax.random.key(0), (2, 300, 8))
ids = jnp.arange(300) * 7 % 300
def loss(compute):
    def total(*arrays):
        logps, entropy = compute(*arrays, ids, temperature=0.7, cap=2.0)
        return (logps + 0.3 * entropy).mean()
    return jax.value_and_grad(total, (0, 1))(hidden, lm_head)
for a, b in zip(*map(jax.tree.leaves, map(loss, (Kernel("cpu", interpret=True), reference)))):
    assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6), (a, b)
print("equal")
"""


def test_the_kernel_copied_alone_computes_what_its_reference_does(tmp_path: Path) -> None:
    shutil.copy(REPO / "loss_pallas.py", tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.stdout == "equal\n", run.stderr
