"""Claims about mixtures of experts: transformers' numbers by packed rows and decoding, forms that
agree with plain numpy, and files of both layouts.

goldens/qwen3_moe, qwen3_moe_unnormed and qwen35_moe have what transformers 5.23 computes in float64
with random models, whose weights they hold as `weight:NAME`. Weights of qwen35_moe have all experts
in a tensor, those of the others have a tensor for each expert.
"""

import dataclasses
import functools
import importlib.util
import re
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_transformers import (
    EAGER,
    assert_same_gradients,
    decoded,
    golden,
    golden_batch,
    golden_folder,
    golden_gradients,
    golden_logps,
)
from safetensors.numpy import load_file, save_file
from small_model import FAMILIES, MODEL, in_rows, layout, tensors, train_layout, write_config

from model import experts, hf
from model.experts import Experts
from model.families import FUSED_EXPERTS
from model.int8 import Int8, quantize
from model.layout import TRAIN_BATCH_AXES, Layout, constrain, make_mesh
from model.network import ComputeConfig, LayerWeights
from model.params import Layers, Lora, ModelConfig, Moe, Params, lm_head, param_table
from model.placement import update_flops
from rows import MicroBatch, RowLimits, pack, plan_rows
from tools.plan import array, known_config, slice_devices
from tools.routing import experts_of_sampler, experts_of_trainer
from update import compute_logps_and_entropies

MODELS = ("qwen3_moe", "qwen3_moe_unnormed", "qwen35_moe")
FORMS = ("dense", "blocks", "ragged")


def compute_of(model: ModelConfig, *mesh: int) -> ComputeConfig:
    return ComputeConfig(model, jnp.dtype("float32"), train_layout(*(mesh or (1, 1, 1))))


def use_form(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr("model.experts.choose_form", lambda *_: form)
    monkeypatch.setattr("jax.lax.ragged_dot", dot_as_on_a_tpu)


RAGGED_DOT = jax.lax.ragged_dot


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dot_as_on_a_tpu(
    x: jax.Array, stack: jax.Array, sizes: jax.Array, preferred_element_type: Any = None
) -> jax.Array:
    """jax.lax.ragged_dot, where the rows behind those of all experts are NaN, in the product and in
    the gradient of x. A TPU does not write them."""
    out = RAGGED_DOT(x, stack, sizes, preferred_element_type=preferred_element_type)
    return with_rest(out, sizes, jnp.nan)


def with_rest(x: jax.Array, sizes: jax.Array, value: float) -> jax.Array:
    return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], x, value)


def backward(dtype: Any, saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    x, stack, sizes = saved

    def product(x: jax.Array, stack: jax.Array) -> jax.Array:
        return RAGGED_DOT(x, stack, sizes, preferred_element_type=dtype)

    of_x, of_stack = jax.vjp(product, with_rest(x, sizes, 0), stack)[1](with_rest(grad, sizes, 0))
    return with_rest(of_x, sizes, jnp.nan), of_stack, None


dot_as_on_a_tpu.defvjp(lambda *given: (dot_as_on_a_tpu(*given), given[:3]), backward)


# ---- A layer's experts, beside numpy -------------------------------------------------------------

N, D, E, F, K = 61, 16, 8, 12, 3


def layer_inputs() -> tuple[np.ndarray, np.ndarray, Experts]:
    """y [n, D], a router with which one expert has no token and another one many, and experts."""
    rng = np.random.default_rng(0)
    y, router = rng.normal(size=(N, D)), 0.5 * rng.normal(size=(D, E))
    y[:, 0], router[0] = 1, [4, 0, 0, 0, 0, 0, 1, -40]
    shapes = (E, D, F), (E, D, F), (E, F, D)
    return y, router, Experts(*(rng.normal(size=shape) / 3 for shape in shapes))


def numpy_experts(y: np.ndarray, router: np.ndarray, w: Experts, normed: bool) -> np.ndarray:
    """Token by token, in float64."""
    out = np.zeros_like(y)
    for i, x in enumerate(y):
        p = np.exp(x @ router)
        p /= p.sum()
        chosen = np.argsort(-p)[:K]
        for e in chosen:
            gate = x @ w.gate[e]
            hidden = gate / (1 + np.exp(-gate)) * (x @ w.up[e])
            out[i] += p[e] / (p[chosen].sum() if normed else 1) * (hidden @ w.down[e])
    return out


def as_int8(w: Experts) -> tuple[Experts, Experts]:
    """The experts as Int8, and the numbers that these stand for."""
    of_experts = [[quantize(matrix) for matrix in stack] for stack in w]
    stacked = [Int8(*map(np.stack, zip(*matrices, strict=True))) for matrices in of_experts]
    return Experts(*stacked), Experts(*(x.values * x.scale[:, None].astype(float) for x in stacked))


MESHES = (1, 1, 1), (2, 1, 4), (1, 2, 2)


@pytest.mark.parametrize(
    "form, mesh, int8",  # each form and each mesh with int8 and without
    [(x, y, (i + j) % 2 > 0) for i, x in enumerate(FORMS) for j, y in enumerate(MESHES)],
)
def test_each_form_on_each_mesh_gives_the_sums_of_experts_and_their_gradient(
    monkeypatch: pytest.MonkeyPatch, form: str, mesh: tuple[int, int, int], int8: bool
) -> None:
    """The gradient along a random direction, by central differences in float64. An expert without
    tokens, one with a third of the pairs, and numbers of pairs that are no multiples of blocks."""
    use_form(monkeypatch, form)
    y, router, w = layer_inputs()
    y = np.concatenate([y, y[:3]])  # 64 tokens
    model = dataclasses.replace(MODEL, moe=Moe(E, K, normed=not int8))
    given, meant = as_int8(w) if int8 else (jax.tree.map(np.float32, w), w)
    compute = compute_of(model, *mesh)
    rng = np.random.default_rng(1)
    probe, changes = rng.normal(size=y.shape), [rng.normal(size=y.shape), rng.normal(size=(D, E))]

    def loss(y: jax.Array, router: jax.Array, w: Experts) -> tuple[jax.Array, jax.Array]:
        layers = Layers(gate=w.gate, up=w.up, down=w.down, router=router)
        y = constrain(y, compute.layout, TRAIN_BATCH_AXES)
        out = experts.feed_forward(y, LayerWeights(layers, None), compute)
        return (out * probe).sum(), out

    arguments = (0, 1) if int8 else (0, 1, 2)
    run = jax.jit(jax.value_and_grad(loss, arguments, has_aux=True))
    (_, out), grads = run(np.float32(y), np.float32(router), given)
    np.testing.assert_allclose(out, numpy_experts(y, router, meant, not int8), rtol=0, atol=1e-5)

    def moved(step: float) -> float:
        moves = [x + step * change for x, change in zip((y, router), changes, strict=True)]
        of_w = meant if int8 else Experts(*(x + step * np.sin(9 * x) for x in meant))
        return (numpy_experts(*moves, of_w, not int8) * probe).sum()

    slope = sum((np.float64(g) * d).sum() for g, d in zip(grads[:2], changes, strict=True))
    if not int8:
        pairs = zip(grads[2], meant, strict=True)
        slope += sum((np.float64(g) * np.sin(9 * x)).sum() for g, x in pairs)
    expected = (moved(1e-6) - moved(-1e-6)) / 2e-6
    assert slope == pytest.approx(expected, rel=2e-4)


def test_a_router_in_bfloat16_chooses_by_rounded_logits() -> None:
    """As transformers does. XLA alone would keep the float32 sums of the product."""
    y, router = (
        jax.random.normal(jax.random.key(seed), shape).astype("bfloat16")
        for seed, shape in enumerate(((400, 64), (64, 128)))
    )
    _, chosen = jax.jit(experts.route, static_argnums=2)(y, router, Moe(128, 8, normed=True))
    exact = np.float32(y) @ np.float32(router)

    def differing(logits: np.ndarray) -> float:
        best = jax.lax.top_k(jax.nn.softmax(jnp.float32(logits)), 8)[1]
        return (np.sort(best) != np.sort(chosen)).any(axis=1).mean()

    assert differing(jnp.asarray(exact, "bfloat16")) == 0 and differing(exact) > 0.01


def test_blocks_take_fewer_pairs_than_experts() -> None:
    """300 tokens with an expert each, of 128: fewer than four tokens have the same one."""
    rng = np.random.default_rng(0)
    y, chosen = rng.normal(size=(300, D)), rng.integers(0, 128, (300, 1))
    w = Experts(*(rng.normal(size=shape) / 3 for shape in ((128, D, F), (128, D, F), (128, F, D))))
    arrays = jax.tree.map(jnp.float32, (y, np.ones((300, 1)), w))
    outs = [experts.FORMS[form](arrays[0], arrays[1], chosen, arrays[2], 128) for form in FORMS]
    np.testing.assert_allclose(outs[0], outs[1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(outs[0], outs[2], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "platform, tokens, form",
    [
        ("cpu", 64, "dense"),
        ("gpu", 256, "dense"),
        ("tpu", 256, "dense"),
        ("cpu", 257, "blocks"),
        ("gpu", 8192, "blocks"),
        ("tpu", 8192, "ragged"),
    ],
)
def test_the_form_follows_from_the_platform_and_the_tokens(
    platform: str, tokens: int, form: str
) -> None:
    assert experts.choose_form(platform, tokens) == form


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu")
def test_a_tpu_multiplies_a_pair_with_its_expert_alone() -> None:
    """The kernels of three products and of their gradients for the tokens; n k pairs in each."""
    n, k, D, F, count = 2048, 2, 256, 128, 32
    mesh = make_mesh("MESH_SHAPE", "1,1,1", slice_devices("v6e-1"))
    model = dataclasses.replace(MODEL, moe=Moe(count, k, normed=True))
    compute = ComputeConfig(model, jnp.dtype("bfloat16"), Layout(mesh, TRAIN_BATCH_AXES))

    def loss(y: jax.Array, w: Layers) -> jax.Array:
        return experts.feed_forward(y, LayerWeights(w, None), compute).astype("float32").sum()

    shapes = {"gate": (count, D, F), "up": (count, D, F), "down": (count, F, D)}
    arrays = {x: array(mesh, y, "bfloat16") for x, y in (shapes | {"router": (D, count)}).items()}
    lowered = jax.jit(jax.grad(loss)).lower(array(mesh, (n, D), "bfloat16"), Layers(**arrays))
    kernels = re.findall(r'cost_estimate":\{"flops":"(\d+)"', lowered.compile().as_text())
    assert kernels == [str(2 * n * k * D * F)] * 6


# ---- transformers' numbers -----------------------------------------------------------------------


def golden_row(name: str, model: ModelConfig) -> MicroBatch:
    """One row: the golden sequences, each behind a prompt of its first token."""
    batch = golden_batch(name)
    if not model.linear:
        return in_rows(batch, 3)
    [rows], widths = plan_rows(batch, range(3), RowLimits(1, 3, 1, 23, 128, unit=64, chunk=64))
    return pack(batch, rows, widths, pad_id=0)


@pytest.mark.parametrize(
    "name, form, tolerance",
    [
        ("qwen3_moe", "blocks", 3e-5),
        ("qwen3_moe_unnormed", "ragged", 3e-5),
        pytest.param("qwen35_moe", "blocks", 5e-5, marks=pytest.mark.slow),
    ],
)
def test_packed_rows_have_transformers_logps_and_gradients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, form: str, tolerance: float
) -> None:
    use_form(monkeypatch, form)
    model = hf.read_config(golden_folder(tmp_path, name))
    compute, row = compute_of(model), golden_row(name, model)
    params = hf.load_params(tmp_path, model, compute.layout.mesh, np.float32)

    def mean(params: Params) -> tuple[jax.Array, jax.Array]:
        logps, _ = compute_logps_and_entropies.__wrapped__(params, row, 1.0, compute)
        return -(logps * row.completion_mask).sum() / row.completion_mask.sum(), logps

    (loss, logps), grads = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    assert loss == pytest.approx(float(golden(name)["loss"]), abs=1e-5)
    for place, i in enumerate(row.sequence_indices[row.sequence_indices >= 0]):
        n = golden_batch(name).lengths[i]
        expected = golden_logps(name)[0, i, :n]
        np.testing.assert_allclose(logps[place, :n], expected, rtol=0, atol=5e-5)
    assert_same_gradients(grads, model, golden_gradients(name), tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decoding_have_transformers_logits(tmp_path: Path, name: str) -> None:
    """Prompts of 14 tokens, of which some are padding, and 10 tokens after each."""
    model = hf.read_config(golden_folder(tmp_path, name))
    compute = compute_of(model)._replace(layout=layout(1, 1, 1))
    params = hf.load_params(tmp_path, model, compute.layout.mesh, np.float32)
    ids, mask, logits = (golden(name)[x] for x in ("ids", "mask", "logits"))
    prompts = ids[:, :14], mask[:, :14]
    hidden = jax.jit(decoded, static_argnums=1)(params, compute, *prompts, ids[:, 14:])
    tolerance = (2e-5 if model.linear else 1e-5) * np.abs(logits).max()
    ours = hidden @ lm_head(params).T
    np.testing.assert_allclose(ours, logits[:, 13:-1], rtol=0, atol=tolerance)


def test_the_routing_tool_finds_transformers_experts_of_sampler_and_trainer(tmp_path: Path) -> None:
    name = "qwen3_moe"
    model = hf.read_config(golden_folder(tmp_path, name))
    compute, rows = compute_of(model)._replace(layer_loop="unroll"), golden_row(name, model)
    params = hf.load_params(tmp_path, model, compute.layout.mesh, np.float32, "unroll")
    batch, mask = golden_batch(name), np.array([[0, 1]] * 3)
    prompts = np.array([[0, *prompt.ids] for prompt in batch.prompts])
    sampler = compute._replace(layout=layout(1, 1, 1))
    ours = experts_of_sampler(params, sampler, prompts, mask, batch.completion_ids)
    theirs = experts_of_trainer(params, compute, rows)
    for place, i in enumerate(rows.sequence_indices):
        expected = np.sort(golden(name)["experts"][i][golden(name)["mask"][i] == 1][:-1])
        for found in (ours[i], theirs[place]):
            np.testing.assert_array_equal(found[: len(expected)], expected)


# ---- Sizes ---------------------------------------------------------------------------------------


def test_an_update_counts_the_experts_that_a_token_passes() -> None:
    """A prompt of 3 tokens and a completion of 5, whose logits are computed."""
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512
    matrices = 48 * (attention + 2048 * 128 + 8 * 3 * 2048 * 768)
    pairs = 3**2 / 2 + 5 * 3 + 5**2 / 2
    expected = 6 * (8 * matrices + 5 * 151936 * 2048) + 3 * 4 * 32 * 128 * 48 * pairs
    found = update_flops(known_config("Qwen/Qwen3-30B-A3B"), np.array([3]), np.array([[5]]))
    assert found == pytest.approx(expected, rel=1e-12)


# ---- Files ---------------------------------------------------------------------------------------


def in_other_layout(weights: dict[str, np.ndarray], num_experts: int) -> dict[str, np.ndarray]:
    """The tensors with the experts of a layer in one tensor where each had its own, or with a
    tensor for each where they were in one."""
    found, others = {x: y for x, y in weights.items() if ".experts." not in x}, dict(weights)
    while name := next((x for x in others if ".experts." in x), ""):
        block, _, rest = name.partition(".experts.")
        block += ".experts."
        if rest == "gate_up_proj":
            for e, pair in enumerate(others.pop(name)):
                parts = zip(("gate", "up"), np.split(pair, 2), strict=True)
                found |= {f"{block}{e}.{x}_proj.weight": part.copy() for x, part in parts}
        elif rest == "down_proj":
            stack = enumerate(others.pop(name))
            found |= {f"{block}{e}.down_proj.weight": x.copy() for e, x in stack}
        else:
            one = [
                {x: others.pop(f"{block}{e}.{x}_proj.weight") for x in ("gate", "up", "down")}
                for e in range(num_experts)
            ]
            pairs = [np.concatenate([x["gate"], x["up"]]) for x in one]
            found[f"{block}gate_up_proj"] = np.stack(pairs)
            found[f"{block}down_proj"] = np.stack([x["down"] for x in one])
    return found


@pytest.mark.parametrize("other_layout", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen35_moe"])
def test_both_layouts_of_experts_are_read_and_exported_as_they_were(
    tmp_path: Path, name: str, other_layout: bool
) -> None:
    """On a mesh, the shards are parts of the tensors."""
    (tmp_path / "a").mkdir()
    source = golden_folder(tmp_path / "a", name)
    model, one = hf.read_config(source), train_layout(1, 1, 1).mesh
    mesh = train_layout(1, 2, 4 if name == "qwen3_moe" else 2).mesh
    even = functools.partial(hf.load_params, dtype=np.float32, vocab_size=60)
    before, plain = even(source, model, one), hf.load_params(source, model, one, np.float32)
    if other_layout:
        weights = in_other_layout(load_file(source / "model.safetensors"), 8)
        save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
        assert hf.read_config(source).names != model.names
        model = hf.read_config(source)
    params = even(source, model, mesh)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    assert tuple(params.layers.gate.sharding.spec) == (None, "tp", "fsdp", None)
    hf.save_model(
        tmp_path / "b",
        hf.hf_tensors(plain, model, np.float32),
        model,
        source,
        dtype=np.float32,
        stop_ids=[1],
    )
    written = load_file(tmp_path / "b" / "model.safetensors")
    weights = load_file(source / "model.safetensors")
    text = [x for x in weights if "visual" not in x]
    shorter = {x.replace("model.language_model.", "model."): weights[x] for x in text}
    assert written.keys() == shorter.keys()
    for x, y in shorter.items():
        np.testing.assert_array_equal(written[x], y, err_msg=x)


@pytest.mark.parity
@pytest.mark.parametrize("other_layout", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen35_moe"])
def test_transformers_opens_exports_of_both_layouts(
    tmp_path: Path, name: str, other_layout: bool
) -> None:
    import torch
    import transformers

    (tmp_path / "a").mkdir()
    source = golden_folder(tmp_path / "a", name)
    if other_layout:
        weights = in_other_layout(load_file(source / hf.WEIGHTS), 8)
        save_file(weights, source / hf.WEIGHTS, metadata={"format": "pt"})
    model = hf.read_config(source)
    params = hf.load_params(source, model, train_layout(1, 1, 1).mesh, np.float32)
    export, tensors = tmp_path / "b", hf.hf_tensors(params, model)
    hf.save_model(export, tensors, model, source, dtype=np.float32, stop_ids=[1])
    opened = transformers.AutoModelForCausalLM.from_pretrained(export, **EAGER)
    ids, mask = (torch.tensor(golden(name)[x]) for x in ("ids", "mask"))
    logits = opened(input_ids=ids, attention_mask=mask).logits.detach().numpy()[mask == 1]
    expected = golden(name)["logits"][mask == 1]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert hf.read_config(tmp_path / "b") == model


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_reading_holds_no_second_copy_of_experts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fused: bool, int8: bool
) -> None:
    """They are eight layers of eight experts, whose second copy would be one of a layer at most."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 64, "moe_intermediate_size": 64}
    config = FAMILIES["qwen3_moe"] | sizes
    write_config(tmp_path, config)
    weights = in_other_layout(tensors(config), 8) if fused else tensors(config)
    save_file(weights, tmp_path / "model.safetensors")
    model = dataclasses.replace(hf.read_config(tmp_path), lora=Lora(2, 4.0, ("q_proj",), int8))
    shares, put, before = [], jax.make_array_from_callback, [0]

    def measured(shape: tuple[int, ...], sharding: Any, callback: Any) -> jax.Array:
        nbytes = callback((slice(None),) * len(shape)).nbytes
        if len(shape) == 4:
            shares.append((tracemalloc.get_traced_memory()[1] - before[0]) / nbytes)
        array = put(shape, sharding, callback)
        tracemalloc.reset_peak()
        before[0] = tracemalloc.get_traced_memory()[0]
        return array

    monkeypatch.setattr(jax, "make_array_from_callback", measured)
    tracemalloc.start()
    hf.load_params(tmp_path, model, train_layout(1, 1, 1).mesh, np.float32)
    tracemalloc.stop()
    assert len(shares) == 3 and max(shares) < 1.4, shares


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen35_moe"])
def test_int8_quantizes_each_expert_alone_and_neither_routers_nor_gates(
    tmp_path: Path, name: str
) -> None:
    model = hf.read_config(golden_folder(tmp_path, name))
    model = dataclasses.replace(model, lora=Lora(2, 4.0, ("q_proj",), True))
    for loop, mesh in (("scan", (1, 2, 2)), ("unroll", (1, 1, 1))):
        mesh = train_layout(*mesh).mesh
        read = hf.load_params(tmp_path, model, mesh, np.float32, loop, vocab_size=60)
        plain = hf.load_params(
            tmp_path, dataclasses.replace(model, lora=None), train_layout(1, 1, 1).mesh, np.float32
        )
        layers = (
            read.layers if loop == "scan" else jax.tree.map(lambda *x: np.stack(x), *read.layers)
        )
        assert layers.router.dtype == np.float32
        for stack, floats in zip(
            (layers.gate, layers.up, layers.down),
            (plain.layers.gate, plain.layers.up, plain.layers.down),
            strict=True,
        ):
            assert stack.scale.shape == (*floats.shape[:2], floats.shape[3])
            for place in np.ndindex(floats.shape[:2]):
                expected = quantize(np.asarray(floats[place]))
                np.testing.assert_array_equal(stack.values[place], expected.values)
                np.testing.assert_array_equal(stack.scale[place], expected.scale)


def test_adapters_are_on_attention_and_the_shared_expert_alone(tmp_path: Path) -> None:
    for name, expected in (
        ("qwen3_moe", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("qwen35_moe", {"q_proj", "in_proj_qkv", "out_proj", "gate_proj", "up_proj", "down_proj"}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        model = hf.read_config(golden_folder(folder, name))
        targets = (*expected,)
        for of_files in ((), FUSED_EXPERTS):  # a tensor for each expert, or one for all
            changes = {"lora": Lora(2, 4.0, targets), "names": of_files}
            table = param_table(dataclasses.replace(model, **changes))
            names = {leaf.name for leaf in jax.tree.leaves(table.adapters)}
            assert {x.split(".")[-3] for x in names} == expected
            assert not any(".experts." in x or ".mlp.gate." in x for x in names)
            assert any("shared_expert" in x for x in names) == (name == "qwen35_moe")
