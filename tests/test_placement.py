"""Claims about models/placement.py and runtime/chips.py, each by numbers from hand."""

import dataclasses
import math
import types
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from small_model import MODEL, WORKLOAD

from models.model import ModelConfig, stop_if_indivisible
from models.placement import (
    Workload,
    choose_attention,
    choose_layer_loop,
    choose_layouts,
    decode_work,
    fastest_tp,
    num_params,
    smallest_tp,
)
from runtime import chips
from runtime.chips import CHIPS, Work, chip_of, memory_bytes
from runtime.layout import gather_processes, make_mesh
from runtime.mistakes import UserMistake
from tools.known_models import KNOWN, config_of

QWEN3B = config_of("Qwen/Qwen2.5-3B-Instruct")


def device(kind: str, **memory: int) -> Any:
    """A device of this process that is not here."""
    return types.SimpleNamespace(
        device_kind=kind, memory_stats=lambda: memory or None, process_index=0
    )


# ---- Models and chips ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, published",
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B-Base", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
    ],
)
def test_known_models_have_as_many_parameters_as_published(name: str, published: int) -> None:
    assert num_params(config_of(name)) == published


def test_the_second_release_of_qwen3_4b_has_longer_positions_and_another_rope_theta() -> None:
    first, second = (config_of(f"Qwen/Qwen3-4B{name}") for name in ("", "-Instruct-2507"))
    assert (second.rope_theta, second.max_positions) == (5e6, 262144)
    assert (first.rope_theta, first.max_positions) == (1e6, 32768)
    assert second == dataclasses.replace(first, rope_theta=5e6, max_positions=262144)


def test_every_known_model_is_in_that_list() -> None:
    assert len(KNOWN) == 11


@pytest.mark.parametrize(
    "kind, name",
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v6e", "v6e"),
        ("NVIDIA H100 80GB HBM3", None),
        ("TPU v3", None),
        ("cpu", None),
    ],
)
def test_a_chip_is_known_by_its_kind(kind: str, name: str | None) -> None:
    assert chip_of(device(kind)) == CHIPS.get(name)


def test_memory_is_the_compiler_s_limit_on_a_tpu_and_elsewhere_the_device_s_answer() -> None:
    assert memory_bytes(device("TPU v6 lite", bytes_limit=7)) == 33_554_432_000  # 31.25 GiB
    assert memory_bytes(device("NVIDIA H100 80GB HBM3", bytes_limit=7)) == 7
    assert memory_bytes(device("cpu")) == memory_bytes(jax.devices()[0]) == math.inf


def test_seconds_by_hand() -> None:
    work = Work(hbm_bytes=820e9, ici_bytes=90e9, hops=1000)
    assert work.seconds(CHIPS["v6e"]) == pytest.approx((0.5, 0.501))  # over two links of 90 GB/s
    assert Work(819e9).seconds(CHIPS["v5e"]) == pytest.approx((1, 0))


# ---- The work of a token -------------------------------------------------------------------------


def test_decoding_a_token_by_hand() -> None:
    # A device has one sequence: layers and head are 8064 + 768 weights. A key and its value are
    # 2*2*2*8 bytes a layer; completions have 6 of them, prompts 20/8.
    cache, logits = 64 * 3 * 8.5, 4 * 48
    assert decode_work(MODEL, 8, 1, WORKLOAD) == Work(2 * 8832 + cache + 4 * logits, 0, 0)
    # Over two devices each reads half the weights. Of two tokens' 32 bytes half go twice, in two
    # all-reduces a layer; of a token's 96 numbers of heads and 48 logits half go once.
    assert decode_work(MODEL, 8, 2, WORKLOAD) == Work(
        8832 + cache + 4 * logits, 3 * (128 + 96) + 96, 40
    )


# ---- The tp of decoding --------------------------------------------------------------------------

V6E_8 = [device("TPU v6 lite")] * 8
BATCH = Workload(R=16 * 8, G=16, S=512, T=1024)


def fastest(model: ModelConfig, devices: list, local: int, workload: Workload) -> tuple[int, str]:
    """fastest_tp with weights of two bytes."""
    return fastest_tp(model, devices[0], len(devices), local, workload, 2)


def tps(text: str) -> list[int]:
    """The tps that an explanation names."""
    return [int(part.split()[0]) for part in text.split("tp=")[1:]]


def test_a_v6e_8_decodes_qwen_3b_over_four_chips() -> None:
    tp, why = fastest(QWEN3B, V6E_8, 8, BATCH)
    assert tp == 4
    # 6.17 GB of weights at 1640 GB/s are 3.76 ms; 0.42 more are caches and logits
    assert why.startswith("estimated ms per token, HBM + collectives: tp=1 4.18 + 0.00, tp=2 2.30")
    assert tps(why) == [1, 2, 4, 8]


def test_the_longer_a_hop_takes_the_fewer_chips_decode_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = []
    for seconds in (1e-8, 1e-6, 3e-6, 1e-5):
        monkeypatch.setattr(chips, "HOP_SECONDS", seconds)
        chosen.append(fastest(QWEN3B, V6E_8, 8, BATCH)[0])
    assert chosen == [8, 4, 2, 1]


def test_tensor_parallelism_stays_inside_a_host_and_divides_its_devices() -> None:
    assert tps(fastest(QWEN3B, V6E_8, 4, BATCH)[1]) == [1, 2, 4]
    assert tps(fastest(QWEN3B, V6E_8[:6], 6, BATCH)[1]) == [1, 2]
    assert fastest(QWEN3B, V6E_8[:1], 1, BATCH)[0] == 1


def test_weights_take_two_fifths_of_the_memory_at_most() -> None:
    qwen7b = config_of("Qwen/Qwen2.5-7B-Instruct")  # 15.2 GB
    v5e = [device("TPU v5 lite")] * 8  # 6.76 GB are two fifths
    assert tps(fastest(qwen7b, v5e, 8, BATCH)[1]) == [4, 8]
    deep = dataclasses.replace(qwen7b, num_layers=280)  # fits nowhere
    assert tps(fastest(deep, v5e, 8, BATCH)[1]) == [8]


def test_tp_divides_every_dimension_that_it_splits_and_the_message_names_the_setting() -> None:
    odd = dataclasses.replace(QWEN3B, vocab_size=151665)  # an embedding cut to its tokenizer
    assert tps(fastest(odd, V6E_8, 8, BATCH)[1]) == [1]
    assert smallest_tp(odd, 1e6, 8) == 1
    with pytest.raises(
        UserMistake, match="^ROLLOUT_MESH_SHAPE .* tp=8 does not divide model.embed"
    ):
        mesh = make_mesh("ROLLOUT_MESH_SHAPE", "1,1,8", jax.devices())
        stop_if_indivisible("ROLLOUT_MESH_SHAPE", odd, mesh)


@pytest.mark.parametrize(
    "limit, local, tp",
    [
        (44_721, 8, 1),  # 2 * 8944 bytes are two fifths of 44720
        (44_719, 8, 2),
        (11_181, 8, 4),
        (1, 8, 8),
        (1, 6, 2),
        (0, 8, 1),  # the device does not say
    ],
)
def test_without_a_tpu_it_is_the_smallest_tp_that_holds_the_weights(
    limit: int, local: int, tp: int
) -> None:
    memory = {"bytes_limit": limit} if limit else {}
    gpus = [device("NVIDIA H100 80GB HBM3", **memory)] * 8
    assert fastest(MODEL, gpus, local, WORKLOAD) == (tp, "")
    double = device("NVIDIA H100 80GB HBM3", **{name: 2 * n for name, n in memory.items()})
    assert fastest_tp(MODEL, double, 8, local, WORKLOAD, 4) == (tp, "")  # float32, twice the memory


# ---- Layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["MESH_SHAPE", "ROLLOUT_MESH_SHAPE"])
def test_a_mesh_that_does_not_divide_the_weights_is_refused_under_its_setting(setting: str) -> None:
    odd = dataclasses.replace(MODEL, vocab_size=49)
    shapes = {"mesh_shape": "auto", "rollout_mesh_shape": "auto", setting.lower(): "4,1,2"}
    if setting == "ROLLOUT_MESH_SHAPE":
        shapes["mesh_shape"] = "8,1,1"
    with pytest.raises(UserMistake, match=f"^{setting} .* tp=2 does not divide model.embed_tokens"):
        choose_layouts(odd, jax.devices(), WORKLOAD, 4, **shapes)


# ---- The tp of training --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "memory, local, tp",
    [
        (math.inf, 8, 1),
        (64_512, 8, 1),  # 3 * 2 * 2688 = 16128 bytes are a quarter of it
        (64_511, 8, 2),
        (32_255, 8, 4),
        (1, 8, 8),
        (1, 4, 4),
        (1, 6, 2),
        (1, 1, 1),
    ],
)
def test_the_tp_of_training_leaves_three_quarters_of_the_memory_beside_gathered_layers(
    memory: float, local: int, tp: int
) -> None:
    assert smallest_tp(MODEL, memory, local) == tp


def test_no_known_model_needs_tp_to_train_on_a_v6e() -> None:
    for name in KNOWN:
        assert smallest_tp(config_of(name), 31.25 * 2**30, 8) == 1
    assert smallest_tp(config_of("Qwen/Qwen2.5-7B-Instruct"), 4 * 2**30, 8) == 2  # 1.4 GB


WIDE = config_of("Qwen/Qwen3-4B")  # head_dim 128, 32 heads, 8 kv heads
NARROW = config_of("Qwen/Qwen2.5-0.5B-Instruct")  # 64, 14, 2


@pytest.mark.parametrize(
    "setting, model, platform, tp, impl",
    [
        ("auto", WIDE, "tpu", 8, "splash"),
        ("auto", NARROW, "tpu", 2, "splash"),
        ("splash", NARROW, "tpu", 1, "splash"),
        ("xla", WIDE, "tpu", 1, "xla"),
        ("auto", WIDE, "gpu", 1, "xla"),
        ("auto", WIDE, "cpu", 1, "xla"),
        ("auto", WIDE, "tpu", 16, "xla"),
        ("auto", MODEL, "tpu", 1, "xla"),
    ],
)
def test_auto_chooses_the_kernel_where_it_can_run(
    setting: str, model: ModelConfig, platform: str, tp: int, impl: str
) -> None:
    assert choose_attention(setting, model, platform, tp) == impl


@pytest.mark.parametrize(
    "model, platform, tp, why",
    [
        (WIDE, "gpu", 1, "it is a TPU kernel, and this is gpu"),
        (MODEL, "tpu", 1, "it wants a head_dim that is a multiple of 64, not 8"),
        (WIDE, "tpu", 16, "MESH_SHAPE's tp=16 does not divide 8 kv heads"),
    ],
)
def test_a_kernel_that_cannot_run_here_is_refused_with_the_reason(
    model: ModelConfig, platform: str, tp: int, why: str
) -> None:
    with pytest.raises(UserMistake) as error:
        choose_attention("splash", model, platform, tp)
    assert str(error.value) == f"ATTENTION_IMPL=splash: {why}; leave it at auto"


@pytest.mark.parametrize(
    "platform, remat, loop",
    [
        ("tpu", "none", "scan"),
        ("gpu", "none", "unroll"),
        ("gpu", "full", "scan"),
        ("cpu", "none", "unroll"),
        ("cpu", "dots", "scan"),
    ],
)
def test_layers_are_unrolled_where_no_memory_has_to_be_saved(
    platform: str, remat: str, loop: str
) -> None:
    assert choose_layer_loop(platform, remat) == loop


# ---- Between processes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        np.arange(12).reshape(4, 3) % 2 == 0,
        np.arange(6, dtype=np.float64).reshape(2, 3) / 7,
        np.arange(5, dtype=np.int32),
        np.ones((2, 3, 5), np.float16),
    ],
    ids=lambda x: f"{x.dtype}{[*x.shape]}",
)
def test_arrays_of_any_dtype_and_shape_are_gathered_as_they_are(monkeypatch, x: np.ndarray) -> None:
    """jax sends them as bytes; as numbers it would round float64."""
    sent = []

    def allgather(data: np.ndarray) -> np.ndarray:
        sent.append(data.dtype)
        return np.stack([data, data])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
    gathered = gather_processes(x)
    assert gathered.dtype == x.dtype and sent == [np.uint8]
    np.testing.assert_array_equal(gathered, np.concatenate([x, x]))
