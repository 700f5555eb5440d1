"""Claims about model/placement.py, model/layout.py and the facts of infra/chips.py, each by
numbers from hand."""

import dataclasses
import math
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from mistakes import few
from small_model import MODEL

from config import Config
from infra.chips import CHIPS, GPUS, chip_of, has_bfloat16, usable_memory_bytes
from infra.mistakes import UserMistake
from infra.sizes import derive_sizes
from loss_pallas import Kernel
from model import placement
from model.families import QWEN35
from model.layout import (
    ROLLOUT_BATCH_AXES,
    TRAIN_BATCH_AXES,
    Layout,
    gather_processes,
    local_part,
    make_mesh,
    mesh_text,
    shard_batch,
)
from model.network import ComputeConfig
from model.params import FULL, LINEAR, LinearSizes, Lora, ModelConfig, param_table
from model.placement import (
    choose_attention,
    drop_idle_windows,
    num_params,
    plan_compute,
    rollout_tp,
    update_flops,
)
from startup import set_up
from tools.plan import KNOWN_MODELS, known_config

QWEN3B = known_config("Qwen/Qwen2.5-3B-Instruct")


def device(kind: str, host: int = 0, **memory: int) -> Any:
    """A device that is not here; `host` 0 is this process."""
    return types.SimpleNamespace(
        device_kind=kind, memory_stats=lambda: memory or None, process_index=host
    )


# ---- Models and chips ----------------------------------------------------------------------------

PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b-it": 27_227_128_320,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "Qwen/Qwen3.5-0.8B": 752_393_024,  # as all of Qwen3.5 without images and MTP
    "Qwen/Qwen3.5-2B-Base": 1_881_825_088,
    "Qwen/Qwen3.5-4B": 4_205_751_296,
    "Qwen/Qwen3.5-9B": 8_953_803_264,
    "Qwen/Qwen3.5-27B": 26_895_998_464,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "google/gemma-3-270m-it": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "google/gemma-3-4b": 4_300_079_472 - 419_816_304,  # without the part that sees images
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen/Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen/Qwen3.6-35B-A3B": 34_660_610_688,
}


def test_known_models_have_as_many_parameters_as_published() -> None:
    assert {name: num_params(known_config(name)) for name in PUBLISHED} == PUBLISHED
    assert len(KNOWN_MODELS) == len(PUBLISHED)
    with pytest.raises(UserMistake, match="MODEL_PATH=x* cannot be read: .* File name too long"):
        known_config("x" * 300)


@pytest.mark.parametrize(
    "kind, name",
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6e", "v6e"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla T4", "t4"),
        ("TPU v3", None),
        ("cpu", None),
    ],
)
def test_a_chip_is_known_by_its_kind(kind: str, name: str | None) -> None:
    assert chip_of(device(kind)) == (CHIPS | GPUS).get(name)


@pytest.mark.parametrize(
    "kind, platform, capability, expected",
    [
        ("NVIDIA L4", "gpu", "8.9", True),
        ("NVIDIA GeForce RTX 2080 Ti", "gpu", "7.5", False),
        ("NVIDIA H100 80GB HBM3", "gpu", "", True),  # a described device has no capability
        ("Tesla T4", "gpu", "", False),
        ("TPU v5 lite", "tpu", "", True),
        ("cpu", "cpu", "", False),
    ],
)
def test_old_gpus_and_cpus_compute_in_float32(
    kind: str, platform: str, capability: str, expected: bool
) -> None:
    facts = {"compute_capability": capability} if capability else {}
    described = types.SimpleNamespace(device_kind=kind, platform=platform, **facts)
    assert has_bfloat16(described) == expected


def test_memory_is_the_compiler_s_limit_on_a_tpu_and_elsewhere_the_device_s_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory_stats() -> None:
        raise jax.errors.JaxRuntimeError("only for addressable devices")

    assert usable_memory_bytes(device("TPU v6 lite", bytes_limit=7)) == 33_554_432_000  # 31.25 GiB
    assert usable_memory_bytes(device("NVIDIA H100 80GB HBM3", bytes_limit=7)) == 7
    assert usable_memory_bytes(device("cpu")) == usable_memory_bytes(jax.devices()[0]) == math.inf
    absent, h100 = device("NVIDIA L4"), device("NVIDIA H100 80GB HBM3")  # a run takes a part
    absent.memory_stats = h100.memory_stats = no_memory_stats
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert usable_memory_bytes(absent) == pytest.approx(0.92 * 22 * 2**30)
    assert f"{usable_memory_bytes(h100) / 2**30:.2f}" == "72.77"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert usable_memory_bytes(absent) == pytest.approx(11 * 2**30)


# ---- The tp of decoding --------------------------------------------------------------------------


def tp_of(model: ModelConfig, kind: str, hosts: Sequence[int] = (0,) * 8, **memory: int) -> int:
    """The tp for weights of two bytes. hosts: that of each device."""
    return rollout_tp(model, [device(kind, host, **memory) for host in hosts], 2)[0]


def test_on_a_tpu_a_device_reads_its_weights_in_one_and_a_quarter_milliseconds() -> None:
    """6.17 GB of weights are 1.54 GB on each of four devices, which a v6e reads in 0.94 ms and a
    v5e in 1.88 ms."""
    v6e = [device("TPU v6 lite")] * 8
    assert rollout_tp(QWEN3B, v6e, 2) == (4, "1.54 GB of weights on a device")
    assert tp_of(QWEN3B, "TPU v5 lite") == 8
    assert tp_of(known_config("Qwen/Qwen2.5-0.5B"), "TPU v6 lite") == 1
    assert tp_of(QWEN3B, "NVIDIA L4", bytes_limit=2**40) == 1  # only memory counts on a GPU


def test_tensor_parallelism_stays_inside_a_host_and_divides_what_it_splits() -> None:
    deep = dataclasses.replace(QWEN3B, num_layers=360)  # of which no device holds enough
    assert tp_of(deep, "TPU v6 lite") == 8
    assert tp_of(deep, "TPU v6 lite", hosts=(0, 0, 0, 0, 1, 1, 1, 1)) == 4
    assert tp_of(deep, "TPU v6 lite", hosts=(0,) * 6) == 2
    odd = dataclasses.replace(deep, vocab_size=151665)  # an embedding cut to its tokenizer
    assert tp_of(odd, "TPU v6 lite") == 1


@pytest.mark.parametrize(
    "limit, tp",
    [
        (44_721, 1),  # 2 * 8944 bytes are two fifths of 44720
        (44_719, 2),
        (11_181, 4),
        (1, 8),
        (0, 1),  # the device does not say
    ],
)
def test_without_a_tpu_it_is_the_smallest_tp_that_holds_the_weights(limit: int, tp: int) -> None:
    memory = {"bytes_limit": limit} if limit else {}
    assert tp_of(MODEL, "NVIDIA H100 80GB HBM3", **memory) == tp


@pytest.mark.parametrize(
    "kind, remat, setting, copies",
    [
        ("NVIDIA H100 80GB HBM3", "full", "auto", True),  # 2 * 15.3 GB of 85.9
        ("NVIDIA L4", "full", "auto", False),  # of 23.6
        ("NVIDIA L4", "full", "1", True),
        ("NVIDIA H100 80GB HBM3", "full", "0", False),
        ("NVIDIA H100 80GB HBM3", "none", "auto", False),  # whose layers are unrolled in training
        ("TPU v6 lite", "full", "auto", False),
    ],
)
def test_a_gpu_with_room_copies_the_base_that_it_would_copy_for_every_token(
    kind: str, remat: str, setting: str, copies: bool
) -> None:
    lora = Lora(16, 32.0, ("q_proj",))
    model = dataclasses.replace(known_config("Qwen/Qwen2.5-7B"), lora=lora)
    platform = "tpu" if kind.startswith("TPU") else "gpu"
    there = device(kind, bytes_limit={"NVIDIA L4": 22, "TPU v6 lite": 32}.get(kind, 80) * 2**30)
    there.platform = platform
    training = ComputeConfig(
        model,
        dtype=jnp.dtype("bfloat16"),
        layout=Layout(make_mesh("MESH_SHAPE", "1,1,1", jax.devices()[:1], (1, 1, 1)), ()),
        layer_loop=placement.choose_layer_loop(platform, remat),
    )
    assert placement.copies_base(Config(lora_base_copy=setting), training, [there], 1) is copies


# ---- The work of an update -----------------------------------------------------------------------


def test_the_flops_of_an_update_by_hand() -> None:
    """MODEL has 8064 numbers in the matrices of its layers. Two prompts of 3 and 5 tokens with
    completions of 2 and 4, and of 1 and 1 tokens, are 16 tokens with 9/2 + 25/2 pairs of a query
    and a key in the prompts, and 2*3 + 4*3 + 5 + 5 + (4 + 16 + 1 + 1)/2 of completions."""
    pairs = 17 + 39
    forward = 2 * 8064 * 16 + 2 * 48 * 16 * 8 + 4 * 4 * 8 * 3 * pairs
    lengths = np.array([3, 5]), np.array([[2, 4], [1, 1]])
    assert update_flops(MODEL, *lengths) == 3 * forward
    # With adapters no gradient of the base is computed, but all of attention.
    adapted = dataclasses.replace(MODEL, lora=Lora(2, 32.0, ("q_proj",)))
    assert update_flops(adapted, *lengths) == 2 * forward + 4 * 4 * 8 * 3 * pairs


def test_the_flops_of_linear_attention_by_hand() -> None:
    """In a chunk of 64 tokens the key head of 4 numbers multiplies keys and queries with the keys,
    2 * 2 * 64 * 4 for a token. A value head of 6 numbers solves a triangular system with 4 + 6
    columns, 64 * 10, multiplies corrections, 2 * 64 * 6, and its state three times, 3 * 2 * 4 * 6.
    Two of the four layers are linear."""
    model = dataclasses.replace(MODEL, num_layers=4, period=(LINEAR, FULL), **QWEN35)
    model = dataclasses.replace(model, linear=LinearSizes(1, 2, 4, 6, 4))
    linear = 2 * (1024 + 2 * (640 + 768 + 144))
    lengths, longer = (np.array([3]), np.array([[2]])), (np.array([3]), np.array([[3]]))
    added = update_flops(model, *longer) - update_flops(model, *lengths)
    table = jax.tree.leaves(param_table(model).layers)
    matrices = sum(math.prod(leaf.shape) for leaf in table if leaf.kind == "matrix")
    attention = 4 * 4 * 8 * 2 * (3 + 2.5)  # in the two full layers
    assert added == 3 * (2 * matrices + 2 * 48 * 16 + attention + linear)


# ---- Meshes and kernels of a run -----------------------------------------------------------------


@pytest.mark.parametrize("setting", ["MESH_SHAPE", "ROLLOUT_MESH_SHAPE"])
def test_a_mesh_that_does_not_divide_the_weights_is_refused_under_its_setting(setting: str) -> None:
    odd = dataclasses.replace(MODEL, vocab_size=49)
    cfg = Config.from_env({"NUM_PRE_Q": "8", "MESH_SHAPE": "8,1,1"} | {setting: "4,1,2"})
    with pytest.raises(UserMistake, match=f"^{setting} .* tp=2 does not divide model.embed_tokens"):
        plan_compute(cfg, odd, derive_sizes(cfg, 1, 8), 16, jax.devices())


def test_a_training_mesh_that_splits_a_head_is_refused_and_auto_makes_none() -> None:
    model = dataclasses.replace(MODEL, num_heads=12, num_kv_heads=4)
    cfg = Config.from_env({"NUM_PRE_Q": "8", "MESH_SHAPE": "1,1,8"})
    with pytest.raises(UserMistake, match="^MESH_SHAPE .*tp=8 does not divide the model's 12 qu"):
        plan_compute(cfg, model, derive_sizes(cfg, 1, 8), 16, jax.devices())
    linear = dataclasses.replace(MODEL, num_layers=4, num_heads=8, num_kv_heads=8, vocab_size=64)
    linear = dataclasses.replace(linear, period=(LINEAR, FULL), **QWEN35)
    linear = dataclasses.replace(linear, linear=LinearSizes(4, 8, 4, 8, 4))
    with pytest.raises(UserMistake, match="tp=8 does not divide the model's 4 key heads of linear"):
        plan_compute(cfg, linear, derive_sizes(cfg, 1, 8), 16, jax.devices())
    full = [device("NVIDIA H100 80GB HBM3", bytes_limit=1)] * 8
    assert [rollout_tp(model, full, 2, heads=heads)[0] for heads in (0, 12)] == [8, 4]


def test_a_run_trains_on_fsdp_and_decodes_without_remat_on_meshes_of_all_devices() -> None:
    cfg = Config.from_env({"NUM_PRE_Q": "8", "ROLLOUT_MESH_SHAPE": "2,1,4", "REMAT": "full"})
    training, rollout, reason = plan_compute(cfg, MODEL, derive_sizes(cfg, 1, 8), 16, jax.devices())
    assert [mesh_text(compute.layout.mesh) for compute in (training, rollout)] == ["1,8,1", "2,1,4"]
    assert training.layout.batch_axes == TRAIN_BATCH_AXES
    assert rollout.layout.batch_axes == ROLLOUT_BATCH_AXES and reason == ""
    assert (training.remat, training.layer_loop) == ("full", "scan")
    assert (rollout.remat, rollout.layer_loop) == ("none", "unroll")
    assert training.dtype == rollout.dtype == np.float32 and training.attention_impl == "xla"


WIDE = known_config("Qwen/Qwen3-4B")  # head_dim 128, 32 heads, 8 kv heads
NARROW = known_config("Qwen/Qwen2.5-0.5B-Instruct")  # 64, 14, 2
WINDOWED = known_config("google/gemma-3-1b-it")


@pytest.mark.parametrize(
    "setting, model, platform, tp, row, impl",
    [
        ("auto", WIDE, "tpu", 8, 4096, "splash"),
        ("splash", NARROW, "tpu", 1, 4096, "splash"),
        ("xla", WIDE, "tpu", 1, 4096, "xla"),
        ("auto", WIDE, "gpu", 1, 4096, "xla"),
        ("auto", MODEL, "tpu", 1, 4096, "xla"),
        ("splash", MODEL, "tpu", 1, 4096, "a head_dim that is a multiple of 64, not 8"),
        ("auto", WINDOWED, "tpu", 1, 4096, "xla"),
        ("splash", WINDOWED, "tpu", 1, 4096, "it has no sliding window, and one of the model's is"),
        ("auto", drop_idle_windows(WINDOWED, 513), "tpu", 1, 4096, "xla"),
        ("auto", drop_idle_windows(WINDOWED, 512), "tpu", 1, 4096, "splash"),
        ("auto", WIDE, "tpu", 16, 4096, "xla"),
        ("splash", WIDE, "tpu", 16, 4096, "MESH_SHAPE's tp=16 does not divide 8 kv heads"),
        ("auto", WIDE, "tpu", 1, 2**17 + 1, "xla"),
        ("splash", WIDE, "tpu", 1, 2**17 + 1, "131072 tokens and completions 16384"),
    ],
)
def test_auto_chooses_the_kernel_where_it_can_run_and_splash_is_refused_where_it_cannot(
    setting: str, model: ModelConfig, platform: str, tp: int, row: int, impl: str
) -> None:
    if impl in ("xla", "splash"):
        assert choose_attention(setting, model, platform, tp, row, 1024) == impl
        return
    with pytest.raises(UserMistake) as error:
        choose_attention(setting, model, platform, tp, row, 1024)
    assert str(error.value).startswith("ATTENTION_IMPL=splash: ") and impl in str(error.value)


# ---- model/layout.py ---------------------------------------------------------------------------


def test_local_part_gives_back_the_array_that_shard_batch_was_given() -> None:
    layout = Layout(make_mesh("MESH_SHAPE", "2,2,2", jax.devices()), TRAIN_BATCH_AXES)
    x = np.arange(24).reshape(8, 3)
    assert shard_batch(x, layout).addressable_shards[0].data.shape == (2, 3)
    np.testing.assert_array_equal(local_part(shard_batch(x, layout)), x)
    assert layout.batch_shards == 4
    assert layout._replace(batch_axes=ROLLOUT_BATCH_AXES).batch_shards == 8


@pytest.mark.parametrize(
    "shape, auto, sizes",
    [
        ("2,2,2", (1, -1, 1), "2,2,2"),
        ("-1,4,1", (1, -1, 1), "2,4,1"),
        ("1,-1,2", (1, -1, 1), "1,4,2"),
        ("auto", (1, -1, 1), "1,8,1"),
        ("auto", (-1, 1, 4), "2,1,4"),
    ],
)
def test_mesh_sizes(shape: str, auto: tuple, sizes: str) -> None:
    mesh = make_mesh("MESH_SHAPE", shape, jax.devices()[::-1], auto)
    assert mesh_text(mesh) == sizes and mesh.axis_names == ("dp", "fsdp", "tp")
    assert [device.id for device in mesh.devices.flat] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_mesh_of_other_than_all_devices_or_with_tp_across_hosts_is_refused() -> None:
    with pytest.raises(UserMistake, match="^ROLLOUT_MESH_SHAPE=-1,3,1 is a mesh of .* has 8"):
        make_mesh("ROLLOUT_MESH_SHAPE", "-1,3,1", jax.devices())
    four_hosts = [types.SimpleNamespace(process_index=i // 2, id=i) for i in range(8)]
    with pytest.raises(UserMistake, match="^MESH_SHAPE=1,2,4: tp=4 does not divide the 2 devices"):
        make_mesh("MESH_SHAPE", "1,2,4", four_hosts)


@pytest.mark.parametrize(
    "x",
    [
        np.arange(12).reshape(4, 3) % 2 == 0,
        np.arange(6, dtype=np.float64).reshape(2, 3) / 7,
        np.empty((2, 0), np.float32),  # the rewards of no functions
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


def test_a_run_that_asks_for_the_kernel_computes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU plan_compute refuses pallas, so it is asked for jax."""

    def as_with_jax(cfg: Config, *args: Any) -> tuple:
        return plan_compute(dataclasses.replace(cfg, policy_loss_impl="jax"), *args)

    monkeypatch.setattr(placement, "plan_compute", as_with_jax)
    for impl, kernel in (("jax", None), ("pallas", Kernel("cpu"))):
        run = set_up(Config.from_env({"POLICY_LOSS_IMPL": impl, "BATCH_SIZE": "2"} | few()))
        assert run.learner.compute.logps_kernel == kernel
