"""Claims about roofline.py, and about what startup.py settles by it, each by numbers from hand."""

import dataclasses
import math
import types
from typing import Any

import jax
import pytest

from models import hf
from models.model import ModelConfig, param_shardings
from runtime.layout import make_mesh
from startup import attention_impl
from tools import roofline
from tools.roofline import CHIPS, Rows, Work, best_tp, chip_of, layer_tp, memory_bytes, num_params

# A layer's matrices: 16*32 + 2*16*16 + 32*16 + 3*16*24 = 2688 numbers; of three layers, 8064.
# All parameters: 48*16 + 3*(2688 + 2*16) + 16 = 8944.
CONFIG = ModelConfig(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, rope_llama3=None, tied=True, qkv_bias=False,
    qk_norm=False, max_positions=64,
)  # fmt: skip
# 8 sequences of 2 prompts: 8*6 + 2*10 = 68 tokens, 2*10*10/2 + 8*(6*10 + 6*6/2) = 724 pairs of
# a query and a key.
ROWS = Rows(R=8, G=2, S=10, T=6)
QWEN3B = hf.config_of("Qwen/Qwen2.5-3B-Instruct")


def device(kind: str, **memory: int) -> Any:
    return types.SimpleNamespace(device_kind=kind, memory_stats=lambda: memory or None)


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
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
    ],
)
def test_known_models_have_as_many_parameters_as_published(name: str, published: int) -> None:
    assert num_params(hf.config_of(name)) == published


def test_every_known_model_is_in_that_list() -> None:
    assert len(hf._KNOWN) == 10


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


def test_memory_is_the_compiler_s_limit_on_a_tpu_and_elsewhere_what_the_device_says() -> None:
    assert memory_bytes(device("TPU v6 lite", bytes_limit=7)) == 33_554_432_000  # 31.25 GiB
    assert memory_bytes(device("NVIDIA H100 80GB HBM3", bytes_limit=7)) == 7
    assert memory_bytes(device("cpu")) == memory_bytes(jax.devices()[0]) == math.inf


def test_seconds_by_hand() -> None:
    work = Work(flops=918e12, hbm_bytes=820e9, ici_bytes=90e9, hops=1000)
    assert work.seconds(CHIPS["v6e"], 1) == pytest.approx((1, 0.5, 1.001))
    assert work.seconds(CHIPS["v6e"], 2) == pytest.approx((1, 0.5, 0.501))
    assert Work(197e12, 819e9).seconds(CHIPS["v5e"], 4) == pytest.approx((1, 1, 0))


# ---- Rollout -------------------------------------------------------------------------------------


def test_weights_come_over_once_but_for_the_part_that_is_there() -> None:
    # 4 * 8944 / 8 = 4472 bytes read; 2 * 8944 / tp written, of which a tp-th part of 8 is own
    assert roofline.sync(CONFIG, 8, 1) == Work(0, 4472 + 17888, 17888 * 7 / 8)
    assert roofline.sync(CONFIG, 8, 2) == Work(0, 4472 + 8944, 8944 * 6 / 8)
    assert roofline.sync(CONFIG, 8, 8) == Work(0, 4472 + 2236, 0)


def test_prefill_by_hand() -> None:
    # 2*10 tokens and 100 pairs on 8 devices: 2*8064*2.5, and 4*32 FLOPs a pair in three layers.
    # A token moves 2*(4*16 + 2*32 + 2*16 + 3*24) = 464 bytes a layer.
    flops, activations = 40320 + 4800, 2.5 * 3 * 464
    assert roofline.prefill(CONFIG, 8, 1, ROWS) == Work(flops, 16128 + activations, 0, 0)
    # All-reduces of 5 tokens of 32 bytes send half of them twice; three layers have two each.
    assert roofline.prefill(CONFIG, 8, 2, ROWS) == Work(flops, 8064 + activations, 960, 12)


def test_decoding_a_token_by_hand() -> None:
    # A device has one sequence: layers and head are 8064 + 768 weights, and it sees 16 keys.
    # A key and its value are 2*2*2*8 bytes a layer; there are 6 of its own, and 20/8 of prompts.
    flops, cache, logits = 2 * 8832 + 128 * 3 * 16, 64 * 3 * 8.5, 4 * 48
    assert roofline.decode_token(CONFIG, 8, 1, ROWS) == Work(
        flops, 2 * 8832 + cache + 4 * logits, 0, 0
    )
    # Over two devices each reads half the weights. Of two tokens' 32 bytes half go twice, in two
    # all-reduces a layer; of a token's 96 numbers of heads and 48 logits half go once.
    assert roofline.decode_token(CONFIG, 8, 2, ROWS) == Work(
        flops, 8832 + cache + 4 * logits, 3 * (128 + 96) + 96, 40
    )


# ---- Which tp ------------------------------------------------------------------------------------

V6E_8 = [device("TPU v6 lite")] * 8
BATCH = Rows(R=16 * 8, G=16, S=512, T=1024)


def picked(config: ModelConfig, devices: list, local: int, rows: Rows) -> tuple[int, str]:
    """best_tp with weights of two bytes."""
    return best_tp(config, devices[0], len(devices), local, rows, 2)


def tps(text: str) -> list[int]:
    """Those that an explanation names."""
    return [int(part.split()[0]) for part in text.split("tp=")[1:]]


def test_a_v6e_8_decodes_qwen_3b_over_four_chips() -> None:
    tp, why = picked(QWEN3B, V6E_8, 8, BATCH)
    assert tp == 4
    # 6.17 GB of weights at 1640 GB/s are 3.76 ms; 0.42 more are caches and logits
    assert why.startswith("estimated ms per token, HBM + collectives: tp=1 4.18 + 0.00, tp=2 2.30")
    assert tps(why) == [1, 2, 4, 8]


def test_the_longer_a_hop_takes_the_fewer_chips_decode_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = []
    for seconds in (1e-8, 1e-6, 3e-6, 1e-5):
        monkeypatch.setattr(roofline, "HOP_SECONDS", seconds)
        chosen.append(picked(QWEN3B, V6E_8, 8, BATCH)[0])
    assert chosen == [8, 4, 2, 1]


def test_tensor_parallelism_stays_inside_a_host_and_divides_its_devices() -> None:
    assert tps(picked(QWEN3B, V6E_8, 4, BATCH)[1]) == [1, 2, 4]
    assert tps(picked(QWEN3B, V6E_8[:6], 6, BATCH)[1]) == [1, 2]
    assert picked(QWEN3B, V6E_8[:1], 1, BATCH)[0] == 1


def test_weights_take_two_fifths_of_the_memory_at_most() -> None:
    qwen7b = hf.config_of("Qwen/Qwen2.5-7B-Instruct")  # 15.2 GB
    v5e = [device("TPU v5 lite")] * 8  # 6.76 GB are two fifths
    assert tps(picked(qwen7b, v5e, 8, BATCH)[1]) == [4, 8]
    deep = dataclasses.replace(qwen7b, num_layers=280)  # fits nowhere
    assert tps(picked(deep, v5e, 8, BATCH)[1]) == [8]


def test_tp_divides_whatever_lies_over_it_and_the_message_names_the_setting() -> None:
    odd = dataclasses.replace(QWEN3B, vocab_size=151665)  # an embedding cut to its tokenizer
    assert tps(picked(odd, V6E_8, 8, BATCH)[1]) == [1]
    assert layer_tp(odd, 1e6, 8) == 1
    with pytest.raises(ValueError, match="^ROLLOUT_MESH_SHAPE .* tp=8 does not divide model.embed"):
        mesh = make_mesh("ROLLOUT_MESH_SHAPE", "1,1,8", jax.devices())
        param_shardings(odd, mesh, "ROLLOUT_MESH_SHAPE")


@pytest.mark.parametrize(
    "limit, local, tp",
    [
        (44_721, 8, 1),  # 2 * 8944 bytes are two fifths of 44720
        (44_719, 8, 2),
        (11_181, 8, 4),
        (1, 8, 8),
        (1, 6, 2),
        (0, 8, 1),  # it does not say
    ],
)
def test_off_a_tpu_it_is_the_smallest_that_holds_the_weights(
    limit: int, local: int, tp: int
) -> None:
    memory = {"bytes_limit": limit} if limit else {}
    gpus = [device("NVIDIA H100 80GB HBM3", **memory)] * 8
    assert picked(CONFIG, gpus, local, ROWS) == (tp, "")
    double = device("NVIDIA H100 80GB HBM3", **{name: 2 * n for name, n in memory.items()})
    assert best_tp(CONFIG, double, 8, local, ROWS, 4) == (tp, "")  # float32, twice the memory


# ---- Training ------------------------------------------------------------------------------------


def train_pass(mesh_shape: str, **changes: Any) -> Work:
    settings = {"backward": True, "remat": "full", "impl": "jax"} | changes
    mesh = make_mesh("MESH_SHAPE", mesh_shape, jax.devices())
    return roofline.train_pass(CONFIG, mesh, ROWS, **settings)


LAYERS = 2 * 8064 * 68 + 128 * 3 * 724  # FLOPs of forward
HEAD = 2 * 48 * 16 * 48


def test_model_flops_are_those_of_one_forward() -> None:
    assert (ROWS.tokens, ROWS.pairs) == (68, 724)
    assert roofline.model_flops(CONFIG, ROWS) == LAYERS + HEAD == 1_448_448


@pytest.mark.parametrize(
    "changes, layers, head",
    [
        ({"backward": False}, 1, 1),
        ({"remat": "none"}, 3, 4),
        ({"remat": "dots"}, 3, 4),
        ({"remat": "full"}, 4, 4),  # forward twice, backward has two matmuls for each of its
        ({"impl": "full"}, 4, 3),  # the logits are kept
        ({"impl": "pallas", "backward": False}, 1, 1),
    ],
)
def test_a_micro_step_s_flops_are_so_many_forwards(
    changes: dict[str, Any], layers: int, head: int
) -> None:
    for mesh_shape in ("1,8,1", "2,2,2"):
        work = train_pass(mesh_shape, **changes)
        assert work.flops == (layers * LAYERS + head * HEAD) / 8


def test_a_forward_pass_by_hand() -> None:
    # 68/8 tokens of 464 bytes a layer; half of the 8064 weights are written and read
    # 3/4 of half the layers' and the head's weights are gathered; embeddings of 17 tokens; and in
    # three layers two all-reduces of 17 tokens over tp, of which half go twice
    hbm, ici = 8.5 * 3 * 464 + 16128, (8064 + 768 + 17 * 32) * 3 / 4 + 3264
    assert train_pass("1,4,2", backward=False) == Work((LAYERS + HEAD) / 8, hbm, ici)


def test_a_micro_step_by_hand() -> None:
    # four passes of activations; weights gathered twice, gradients once; and the loss
    loss = roofline.loss_costs("jax", 12, 16, 24, "cpu")[1]
    work = train_pass("1,4,2")
    assert work.hbm_bytes == 4 * 8.5 * 3 * 464 + 3 * 16128 + loss
    # the head's weights are gathered twice, its gradient is float32: 8 bytes each
    # forward, forward again and backward have all-reduces over tp
    assert work.ici_bytes == (3 * 8064 + 8 * 384 + 2 * 17 * 32) * 3 / 4 + 3 * 3264
    assert train_pass("1,4,2", remat="none").ici_bytes == work.ici_bytes - 3264


def test_what_the_loss_moves_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # 12 x 24 float32 logits are 1152 bytes; hidden and weights 384 and 768 of bfloat16, their
    # gradients 768 and 1536 of float32
    full = 8 * 1152 + 3 * (384 + 768) + 1536
    assert roofline.loss_costs("full", 12, 16, 24, "cpu") == (3, full)
    for tiles in (1, 4):  # in each: hidden three times, its gradient read and written
        monkeypatch.setattr(roofline, "LOGITS_TILE_BYTES", 1152 // tiles)
        tiled = 6.5 * 1152 + tiles * (3 * 384 + 2 * 768) + 3 * 768 + 1536
        assert roofline.loss_costs("jax", 12, 16, 24, "cpu") == (4, tiled)
    # Of three tiles: hidden and 12 x 128 float32 statistics in, out; the same in backward, which
    # has hidden's gradient in and out too.
    monkeypatch.setattr(roofline, "block_sizes", lambda *_: (4, 8))
    forward = 3 * (384 + 2 * 6144) + 768
    backward = 3 * (384 + 2 * 768 + 6144) + 768 + 1536
    assert roofline.loss_costs("pallas", 12, 16, 24, "cpu") == (4, forward + backward)


def test_the_kernel_moves_less_than_half_of_what_logits_in_memory_do() -> None:
    """16 x 1024 tokens of Qwen2.5-3B on a v6e: 9.96 GB of logits."""
    costs = {
        impl: roofline.loss_costs(impl, 16 * 1024, 2048, 151936, "TPU v6 lite")[1]
        for impl in ("full", "jax", "pallas")
    }
    assert costs["pallas"] < min(costs["full"], costs["jax"]) / 2
    assert costs["full"] == pytest.approx(8 * 9.957e9, rel=0.05)


@pytest.mark.parametrize("optimizer, floats", [("adamw", 7), ("lion", 5), ("sgd", 3)])
def test_an_optimizer_reads_and_writes_weights_and_moments_and_reads_gradients(
    optimizer: str, floats: int
) -> None:
    assert roofline.optimizer_step(CONFIG, 8, optimizer) == Work(0, floats * 4 * 8944 / 8)


# ---- What startup settles by it ------------------------------------------------------------------


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
def test_layers_go_over_so_many_devices_that_three_take_a_quarter_of_the_memory(
    memory: float, local: int, tp: int
) -> None:
    assert layer_tp(CONFIG, memory, local) == tp


def test_layers_of_all_known_models_lie_whole_on_a_v6e() -> None:
    for name in hf._KNOWN:
        assert layer_tp(hf.config_of(name), 31.25 * 2**30, 8) == 1
    assert layer_tp(hf.config_of("Qwen/Qwen2.5-7B-Instruct"), 4 * 2**30, 8) == 2  # 1.4 GB


WIDE = hf.config_of("Qwen/Qwen3-4B")  # head_dim 128, 32 heads, 8 kv heads
NARROW = hf.config_of("Qwen/Qwen2.5-0.5B-Instruct")  # 64, 14, 2


@pytest.mark.parametrize(
    "setting, config, backend, tp, impl",
    [
        ("auto", WIDE, "tpu", 8, "splash"),
        ("auto", NARROW, "tpu", 2, "splash"),
        ("splash", NARROW, "tpu", 1, "splash"),
        ("xla", WIDE, "tpu", 1, "xla"),
        ("auto", WIDE, "gpu", 1, "xla"),
        ("auto", WIDE, "cpu", 1, "xla"),
        ("auto", WIDE, "tpu", 16, "xla"),
        ("auto", CONFIG, "tpu", 1, "xla"),
    ],
)
def test_attention_is_the_kernel_s_where_it_can_be(
    setting: str, config: ModelConfig, backend: str, tp: int, impl: str
) -> None:
    assert attention_impl(setting, config, backend, tp) == impl


@pytest.mark.parametrize(
    "config, backend, tp, why",
    [
        (WIDE, "gpu", 1, "it is a TPU kernel, and this is gpu"),
        (CONFIG, "tpu", 1, "it wants a head_dim that is a multiple of 64, not 8"),
        (WIDE, "tpu", 16, "MESH_SHAPE's tp=16 does not divide 8 kv heads"),
    ],
)
def test_a_kernel_that_cannot_be_says_why(
    config: ModelConfig, backend: str, tp: int, why: str
) -> None:
    with pytest.raises(ValueError) as error:
        attention_impl("splash", config, backend, tp)
    assert str(error.value) == f"ATTENTION_IMPL=splash: {why}; leave it at auto"
