"""Claims about LORA_BASE_DTYPE=int8: the base is what rounding by hand makes of the folder's
weights, every program computes with these numbers, and none keeps a float copy of them.

The reference is the same model with the rounded numbers as float matrices.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import DRIFT, FIELDS, KL, MODEL, answers, by_full_training, gradient, whole
from runs import REPO, Result, environment, run_here, train, with_defaults
from safetensors.numpy import load_file
from small_model import write_folder

import train_grpo
from config import Config
from model import blocks, hf, network
from model.int8 import Int8, matmul, quantize
from model.layout import TRAIN_BATCH_AXES, Layout, make_mesh
from model.network import ComputeConfig
from model.params import Lora, Params, param_shardings, param_table
from model.placement import params_bytes, rollout_tp
from sampling import sync_weights
from tools import plan

INT8 = dataclasses.replace(MODEL, lora=MODEL.lora._replace(int8_base=True))


def numbers_of(w: Int8) -> np.ndarray:
    """The matrix that an Int8 stands for, in float64."""
    return np.float64(w.values) * np.float64(w.scale)[..., None, :]


def in_int8() -> tuple[Params, Params]:
    """The weights of test_lora.py with a base of Int8, and with the numbers that it stands for."""
    params = whole()

    def quantize_layers(name: str) -> Int8:
        return Int8(*map(np.stack, zip(*map(quantize, getattr(params.layers, name)), strict=True)))

    made = {name: quantize_layers(name) for name in FIELDS}
    layers = params.layers.replace(**made)
    rounded = {name: numbers_of(w) for name, w in made.items()}
    return params.replace(layers=layers), params.replace(layers=layers.replace(**rounded))


# ---- One matrix ----------------------------------------------------------------------------------


def test_a_number_is_rounded_to_the_nearest_multiple_of_its_column_s_scale() -> None:
    """The scales are 2.54 / 127 and 1.27 / 127; a column of zeros stays one."""
    w = quantize(np.array([[2.54, 0, 0.012], [-1.0, 0, -1.27], [0.011, 0, 0.004]]))
    assert w.values.tolist() == [[127, 0, 1], [-50, 0, -127], [1, 0, 0]]
    np.testing.assert_allclose(w.scale, [0.02, 1, 0.01], rtol=1e-6)
    assert (w.values.dtype, w.scale.dtype) == (np.int8, np.float32)


def test_a_product_and_the_gradient_of_its_input_are_those_of_the_rounded_matrix() -> None:
    rng = np.random.default_rng(0)
    w, x, g = (
        quantize(rng.normal(size=(211, 53))),
        rng.normal(size=(7, 211)),
        rng.normal(size=(7, 53)),
    )
    x, g = np.float32(x), np.float32(g)
    product, pull = jax.vjp(lambda x: matmul(x, Int8(*map(jnp.asarray, w))), x)
    for ours, expected in ((product, x @ numbers_of(w)), (pull(g)[0], g @ numbers_of(w).T)):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    half = matmul(jnp.asarray(x, jnp.bfloat16), Int8(*map(jnp.asarray, w)))
    expected = np.float64(jnp.asarray(x, jnp.bfloat16)) @ numbers_of(w)
    np.testing.assert_allclose(np.float64(half), expected, rtol=2**-8, atol=1e-5)


# ---- The model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"layer_loop": "unroll", "micro": 4}, {"mesh": (2, 2, 2), "remat": "full"}],
    ids=str,
)
def test_gradients_of_adapters_are_those_on_the_rounded_base(settings: dict) -> None:
    params, rounded = in_int8()
    grads = gradient(params, INT8, **settings)
    for name, expected in by_full_training(rounded).items():
        for x, y in zip(getattr(grads.adapters, name), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max(), err_msg=name)


def test_the_gradients_of_a_gpu_s_schedule_are_those_of_the_loop_over_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of 20 tokens in blocks of 4. The model is one of this test alone, since jax keeps
    the programs of a model."""
    monkeypatch.setattr(network, "SHORT_TOKENS", 0)
    monkeypatch.setitem(blocks.BLOCK, "cpu", 4)
    made = []
    for platforms in (set(), {"cpu"}):
        monkeypatch.setattr(blocks, "IN_ROUNDS", platforms)
        model = dataclasses.replace(INT8, max_positions=INT8.max_positions + 1)
        made.append(gradient(in_int8()[0], model, (2, 2, 2)))
    for x, y in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_allclose(y, x, rtol=0, atol=1e-6 * np.abs(x).max())


def test_another_layout_has_the_same_int8_numbers() -> None:
    """LORA_BASE_COPY and another ROLLOUT_MESH_SHAPE copy the base; a cast would drop the scales."""
    params, _ = in_int8()
    mesh, other = (make_mesh("MESH_SHAPE", shape, jax.devices()) for shape in ("8,1,1", "2,2,2"))
    params = jax.device_put(params, param_shardings(INT8, mesh))
    compute = ComputeConfig(INT8, jnp.dtype("bfloat16"), Layout(other, TRAIN_BATCH_AXES), "none")
    copied = sync_weights(compute._replace(layer_loop="unroll"))(params)
    for name in FIELDS:
        for i, layer in enumerate(copied.layers):
            values, scale = getattr(layer, name)
            assert (values.dtype, scale.dtype) == (jnp.int8, jnp.float32)
            np.testing.assert_array_equal(values, getattr(params.layers, name).values[i])
            np.testing.assert_array_equal(scale, getattr(params.layers, name).scale[i])
    assert copied.layers[0].attn_norm.dtype == jnp.bfloat16


# ---- The folder ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, mesh_shape, layer_loop",
    [("qwen2", "1,4,2", "scan"), ("gemma3", "2,2,2", "unroll"), ("qwen3_5", "1,4,2", "scan")],
)
def test_a_folder_is_read_as_int8_with_scales_split_as_columns(
    tmp_path: Path, family: str, mesh_shape: str, layer_loop: str
) -> None:
    folder, mesh = (
        write_folder(tmp_path, family),
        make_mesh("MESH_SHAPE", mesh_shape, jax.devices()),
    )
    model = dataclasses.replace(hf.read_config(folder), lora=Lora(2, 4.0, ("q_proj",), True))
    params = hf.load_params(folder, model, mesh, jnp.bfloat16, layer_loop)
    tensors, count = load_file(folder / "model.safetensors"), 0
    table = dataclasses.replace(param_table(model, layer_loop), adapters=None)
    of_leaves = jax.tree.structure(table).flatten_up_to(params)
    for leaf, array in zip(jax.tree.leaves(table), of_leaves, strict=True):
        is_matrix = leaf.kind == "matrix" and "layers" in leaf.name
        if not is_matrix or "in_proj_a" in leaf.name or "in_proj_b" in leaf.name:
            assert array.dtype == leaf.dtype(jnp.bfloat16), leaf.name
            continue
        assert array.scale.sharding.spec[-1] == array.values.sharding.spec[-1]
        for i, number in enumerate(leaf.layers or [0]):
            w = tensors[leaf.name.format(number)].T
            scale = np.abs(w).max(axis=0) / 127
            values, scales = (x[i] if leaf.layers else x for x in array)
            np.testing.assert_allclose(scales, scale, rtol=1e-6)
            error = np.abs(np.asarray(values) * np.asarray(scales) - w) / scale
            assert error.max() <= 0.5001 and np.abs(values).max() == 127
            count += 1
    # Seven of a full layer; of a linear one three and those of the feed-forward.
    full = model.num_periods
    assert count == 7 * full + 6 * (model.num_layers - full)


def test_a_base_in_8_bits_counts_a_byte_for_each_of_its_numbers() -> None:
    """Of 7.6 billion parameters of Qwen2.5-7B 6.53 are in the matrices of layers."""
    model = plan.known_config("Qwen/Qwen2.5-7B")
    model = dataclasses.replace(model, lora=Lora(16, 32.0, ("q_proj",), True))
    assert params_bytes(model, 2) == pytest.approx(6.53e9 + 2 * 1.09e9, rel=2e-3)
    described = jax.devices("cpu")[0]
    tp, reason = rollout_tp(model, [described], 2)
    assert tp == 1 and reason == "8.71 GB of weights on a device"


# ---- Memory --------------------------------------------------------------------------------------


def temporaries(
    monkeypatch: pytest.MonkeyPatch, folder: Path, base: str, slice_name: str, layer_loop: str
) -> float:
    """The bytes of temporaries of micro_step with REMAT=none, for 4 layers of 0.94M numbers."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    config = json.loads((write_folder(folder, "qwen2") / "config.json").read_text())
    config |= sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(config))
    if slice_name == "cpu":
        monkeypatch.setattr(plan, "slice_devices", lambda name: jax.devices()[:1])
    env = {"MODEL_PATH": str(folder), "LORA_RANK": "4", "LORA_BASE_DTYPE": base, "REMAT": "none"}
    env |= {"MAX_PROMPT_LENGTH": "16", "MAX_LENGTH_SAMPLE": "16", "NUM_PRE_Q": "4"}
    planned = plan.make_plan(Config.from_env(env | {"BATCH_SIZE": "1"}), slice_name)
    planned = planned._replace(training=planned.training._replace(layer_loop=layer_loop))
    memory = plan.measure_memory(plan.list_programs(planned)["micro_step"], "micro_step")
    assert base == "auto" or memory.arguments < 7 * 2**20, "the base itself has 8 bits"
    return memory.temporaries


NUMBERS = 4 * 256 * (2 * 256 + 2 * 128 + 3 * 1024)


@pytest.mark.parametrize(
    "device, layer_loop",
    [
        ("cpu", "scan"),
        pytest.param("v5e-1", "scan", marks=pytest.mark.slow),
        pytest.param("v5e-1", "unroll", marks=pytest.mark.slow),
    ],
)
def test_backward_keeps_no_float_copy_of_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, layer_loop: str
) -> None:
    """A copy has four bytes for each number on a CPU, and two on a TPU."""
    if device != "cpu":
        pytest.importorskip("libtpu", reason='libtpu: pip install "jax[tpu]"')
    plain, of_int8 = (
        temporaries(monkeypatch, tmp_path, base, device, layer_loop) for base in ("auto", "int8")
    )
    assert of_int8 < plain + 0.4 * NUMBERS


# ---- Runs ----------------------------------------------------------------------------------------

RUN = environment(
    """STEPS=2 BATCH_SIZE=4 NUM_PRE_Q=4 LORA_RANK=4 LEARNING_RATE=3e-3 LR_SCHEDULE=constant
    WARMUP_RATIO=0 BETA=0.05 EVAL_EVERY_STEPS=2 EVAL_PROMPTS=16 SAVE_EVERY_STEPS=1
    LORA_BASE_DTYPE=int8"""
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("int8") / "run", **RUN)


def test_sampler_trainer_and_reference_have_the_same_rounded_base(run: Result) -> None:
    assert " base=shared int8\nnote: on a CPU LORA_BASE_DTYPE=int8 saves memory" in run.lines
    drifts = [x[DRIFT] for x in run.records if DRIFT in x]
    assert len(drifts) == 2 and max(drifts) < 1e-4
    assert abs(next(x[KL] for x in run.records if KL in x)) < 1e-6
    exported = json.loads((run.out / "hf" / "adapter_config.json").read_text())
    assert exported["base_model_name_or_path"] == str(REPO / "tiny")


def test_a_merged_export_adds_to_the_weights_of_the_folder(run: Result, tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    again = train(run.out, **RUN | {"EXPORT_HF": str(merged), "EXPORT_LORA": "merged"})
    line = "note: the adapters, trained on an int8 base, are merged with the float weights of"
    assert f"{line} {REPO / 'tiny'}" in again.lines.splitlines()
    files = REPO / "tiny" / hf.WEIGHTS, run.out / "hf" / hf.ADAPTERS, merged / hf.WEIGHTS
    base, adapters, made = map(load_file, files)
    assert made.keys() == base.keys()
    for name, w in base.items():
        prefix = f"base_model.model.{name.removesuffix('weight')}lora_"
        if f"{prefix}A.weight" in adapters:
            added = adapters[f"{prefix}B.weight"] @ adapters[f"{prefix}A.weight"]
            w = w + 32.0 / 4 * added  # LORA_ALPHA / LORA_RANK
        np.testing.assert_allclose(made[name], w, rtol=0, atol=1e-6, err_msg=name)


def test_a_run_goes_on_with_the_same_base_alone(run: Result, tmp_path: Path) -> None:
    whole_run = shutil.copytree(run.out, tmp_path / "run")
    shutil.rmtree(whole_run / "checkpoints" / "2")
    env = with_defaults(whole_run, RUN | {"LORA_BASE_DTYPE": "auto"})
    other = run_here(whole_run, train_grpo, env)
    assert other.code == 2
    assert "LORA_BASE_DTYPE was int8 and is not there; set it back" in other.errors
    resumed = train(whole_run, **RUN)
    assert "resumed after 1 of 2 steps" in resumed.lines
    assert answers(whole_run, step=2) == answers(run.out, step=2)
    ours, theirs = (load_file(x.out / "hf" / hf.ADAPTERS) for x in (resumed, run))
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])
