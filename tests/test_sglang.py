"""ROLLOUT_BACKEND=sglang_jax: what stops a run, the engine's arguments, and how weights are mapped.

These tests run without the engine; test_engine.py has those that need it.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from mistakes import refused
from runs import environment, finish, start
from small_model import MODEL

from config import Config
from extras import sglang
from extras.sglang import (
    arrange_engine_weights,
    engine_arguments,
    import_engine,
    raise_if_engine_cannot_compute,
)
from infra.mistakes import UserMistake
from model.families import GEMMA, QWEN35
from model.params import arrange_layers, init_params

# ---- What stops a run ----------------------------------------------------------------------------

CPU, V4, GPU = (SimpleNamespace(platform=name) for name in ("cpu", "tpu", "gpu"))
NO_GPU = "needs a TPU, or a CPU for tests, not a gpu"
NO_FAMILY = "samples qwen2 and qwen3, and not this model's family; use"
MODEL_128 = dataclasses.replace(MODEL, qkv_bias=True, head_dim=128)
BACKEND = {"ROLLOUT_BACKEND": "sglang_jax", "MAX_LENGTH_SAMPLE": "64", "MODEL_PATH": "x"}


def check_engine(settings: str, devices: list[SimpleNamespace], change: dict[str, Any]) -> None:
    """The longest prompt has 100 tokens; with 64 new ones and 8 to spare these are 172."""
    cfg = Config.from_env(BACKEND | environment(settings))
    raise_if_engine_cannot_compute(cfg, dataclasses.replace(MODEL_128, **change), 100, devices)


@pytest.mark.parametrize(
    "settings, devices, change, words",
    [
        ("SGLANG_JAX_CONTEXT_LENGTH=171", [V4], {}, "CONTEXT_LENGTH=171, .* than 172 tokens"),
        ("SGLANG_JAX_MAX_TOTAL_TOKENS=171", [CPU], {}, "MAX_TOTAL_TOKENS=171, .* than 172"),
        ("SGLANG_JAX_MAX_TOTAL_TOKENS=255", [V4], {}, "=255, in pages of 128, has less than 172"),
        ("", [V4] * 3, {}, "3 devices do not divide the model's 4 heads"),
        ("", [GPU], {}, NO_GPU),  # as in --plan, which has no engine to import
        ("", [CPU], {"qkv_bias": False}, NO_FAMILY),
        ("", [CPU], GEMMA, NO_FAMILY),
        ("", [CPU], QWEN35, "not this model's family; use"),
        ("", [CPU], {"logits_softcap": 30.0}, "not this model's family; use"),
        ("", [CPU], {"head_dim": 64}, "needs a head_dim that is a multiple of 128, .* has 64"),
    ],
)
def test_lengths_devices_and_models_that_do_not_suit_the_engine_are_refused(
    settings: str, devices: list[SimpleNamespace], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserMistake, match=words):
        check_engine(settings, devices, change)


@pytest.mark.parametrize(
    "settings, devices, change",
    [
        ("SGLANG_JAX_CONTEXT_LENGTH=256", [V4], {}),
        ("SGLANG_JAX_MAX_TOTAL_TOKENS=172", [CPU], {}),
        ("SGLANG_JAX_MAX_TOTAL_TOKENS=256", [V4], {}),
        ("", [V4] * 2, {}),
        ("", [CPU], {}),
        ("", [V4], {"head_dim": 64}),  # the TPU's kernel pads it
    ],
)
def test_lengths_devices_and_models_that_suit_the_engine_are_accepted(
    settings: str, devices: list[SimpleNamespace], change: dict[str, Any]
) -> None:
    check_engine(settings, devices, change)


def test_an_engine_is_not_imported_on_a_gpu() -> None:
    refused(lambda: import_engine([GPU]), NO_GPU)


def test_a_run_without_the_engine_ends_in_one_line_with_the_command_that_installs_it(
    tmp_path,
) -> None:
    (tmp_path / "sgl_jax.py").write_text("raise ImportError('gone')")
    env = {"ROLLOUT_BACKEND": "sglang_jax", "PYTHONPATH": str(tmp_path)}
    result = finish(start(tmp_path / "out", env, 1), tmp_path / "out")
    assert result.code == 2 and len(result.errors.splitlines()) == 1
    assert "import says: ImportError: gone" in result.errors
    assert sglang.INSTALL in result.errors


# ---- Its arguments and its weights ---------------------------------------------------------------


def test_the_arguments_of_the_engine_follow_from_the_run() -> None:
    text = "BATCH_SIZE=3 NUM_PRE_Q=4 SGLANG_JAX_MEM_FRACTION_STATIC=0.8"
    cfg = Config.from_env(BACKEND | environment(text))
    run = SimpleNamespace(
        cfg=cfg,
        learner=SimpleNamespace(compute=SimpleNamespace(model=MODEL_128)),
        folder=Path("/models/x"),
        sizes=SimpleNamespace(prompt_batch_size=3),
        rollout=SimpleNamespace(compute=SimpleNamespace(dtype=jnp.dtype("bfloat16"))),
        train_prompts=[SimpleNamespace(ids=[1] * 100)],
        eval_prompts=[SimpleNamespace(ids=[1] * 120)],
    )
    actual = engine_arguments(run, [V4] * 4)
    # 3 * 4 sequences of a rollout pass, or 12 questions; 120 + 64 + 8 tokens are two pages of 128.
    assert actual["max_running_requests"] == 12 and actual["context_length"] == 192
    assert actual["max_total_tokens"] == 12 * 256 and actual["page_size"] == 128
    assert actual["tp_size"] == 4 and actual["dtype"] == "bfloat16" and actual["device"] == "tpu"
    assert actual["mem_fraction_static"] == 0.8 and not actual["disable_overlap_schedule"]
    assert actual["json_model_override_args"] == '{"rope_theta": 10000.0}'
    assert engine_arguments(run, [CPU])["max_total_tokens"] == 12 * 192
    run.cfg = dataclasses.replace(cfg, sglang_jax_max_total_tokens=1000)
    assert engine_arguments(run, [V4] * 4)["max_total_tokens"] == 1000


def engine_table(copies: int) -> tuple[dict, dict[str, jax.ShapeDtypeStruct]]:
    """The table and the shapes of an engine whose kv heads are there `copies` times, in another
    order than the trainer's."""
    D, h, H, N, F, V = 16, 8, 4, 2 * copies, 24, 48
    table, shapes = {}, {}

    def add(name: str, path: str, shape: tuple[int, ...], turned: bool = True, kv: bool = False):
        table[name] = SimpleNamespace(target_path=path, transpose=turned, kv_head_padding=kv)
        shapes[path] = shape

    for i in (2, 1, 0):
        block = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{block}.{norm}.weight", f"{block}.{norm}.scale", (D,), False)
        for name, width, kv in (("q", H, False), ("k", N, True), ("v", N, True)):
            place = f"{block}.self_attn.{name}_proj"
            add(f"{place}.weight", f"{place}.weight", (D, width * h), True, kv)
            add(f"{place}.bias", f"{place}.bias", (width * h,), False, kv)
        add(f"{block}.self_attn.o_proj.weight", f"{block}.self_attn.o_proj.weight", (H * h, D))
        for name, shape in (("gate", (D, F)), ("up", (D, F)), ("down", (F, D))):
            add(f"{block}.mlp.{name}_proj.weight", f"{block}.mlp.{name}_proj.weight", shape)
    add("model.norm.weight", "model.norm.scale", (D,), False)
    add("model.embed_tokens.weight", "model.embed_tokens.embedding", (V, D), False)
    table["model.layers.0.self_attn.o_proj.bias"] = SimpleNamespace(
        target_path="model.layers.0.self_attn.o_proj.bias", transpose=False, kv_head_padding=False
    )  # the engine's table has names that its model does not have
    where = SingleDeviceSharding(jax.devices()[0])
    return table, {
        path: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)
        for path, shape in shapes.items()
    }


QWEN2 = dataclasses.replace(MODEL, qkv_bias=True)


@pytest.fixture(scope="module")
def params():
    made = init_params(QWEN2, jax.random.key(0))
    made = jax.tree.map(lambda x: x + jnp.arange(x.size).reshape(x.shape) / x.size, made)
    return arrange_layers(made, "unroll", jnp.float32)


def test_every_weight_of_the_engine_gets_its_source(params) -> None:
    table, shapes = engine_table(copies=2)
    leaves = dict(zip(shapes, arrange_engine_weights(params, QWEN2, table, shapes), strict=True))
    assert len(leaves) == 3 * 12 + 2 and all(x.dtype == jnp.bfloat16 for x in leaves.values())
    actual = {name: np.asarray(x, np.float32) for name, x in leaves.items()}
    layer = params.layers[1]

    def check(name: str, expected: jax.Array) -> None:
        wanted = np.asarray(expected.astype(jnp.bfloat16), np.float32)
        np.testing.assert_array_equal(actual[name], wanted)

    check("model.embed_tokens.embedding", params.embed)
    check("model.norm.scale", params.final_norm)
    check("model.layers.1.mlp.down_proj.weight", layer.down)
    check("model.layers.1.self_attn.q_proj.bias", layer.bq)
    # Two kv heads of 8 numbers, each of them twice.
    first, second = layer.wk[:, :8], layer.wk[:, 8:]
    check("model.layers.1.self_attn.k_proj.weight", jnp.hstack([first, first, second, second]))
    first, second = layer.bv[:8], layer.bv[8:]
    check("model.layers.1.self_attn.v_proj.bias", jnp.hstack([first, first, second, second]))


def test_weights_that_do_not_match_are_refused_by_name(params) -> None:
    table, shapes = engine_table(copies=1)
    new, lost = "model.layers.0.self_attn.gate.weight", "model.embed_tokens.embedding"
    others = {path: shape for path, shape in shapes.items() if path != lost}
    for name, changed in ((new, shapes | {new: shapes["model.norm.scale"]}), (lost, others)):
        with pytest.raises(UserMistake, match=f"trainer, such as {name}; install"):
            arrange_engine_weights(params, QWEN2, table, changed)
