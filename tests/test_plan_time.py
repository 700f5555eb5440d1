"""tools/plan_time.py: the work of a device by hand, and the published times of docs/plan_time.md
beside the ranges. tests/test_plan.py has what --plan prints."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from runs import REPO
from small_model import MODEL

from infra.chips import CHIPS, GPUS, Chip
from model.layout import TRAIN_BATCH_AXES, Layout
from model.network import ComputeConfig
from model.params import ModelConfig
from tools.launches import count_launches
from tools.plan import known_config
from tools.plan_time import estimate_seconds, forward_work, rollout_work, update_work, weight_bytes
from tools.tpu_cycles import count_cycles


def computing(
    model: ModelConfig, dp: int = 1, fsdp: int = 1, tp: int = 1, remat: str = "full"
) -> ComputeConfig:
    mesh = AbstractMesh((dp, fsdp, tp), ("dp", "fsdp", "tp"))
    return ComputeConfig(model, jnp.dtype("bfloat16"), Layout(mesh, TRAIN_BATCH_AXES), remat)


# ---- By hand -------------------------------------------------------------------------------------


def test_the_work_of_a_device_by_hand() -> None:
    """test_the_flops_of_an_update_by_hand has the 291,840 FLOPs of this forward of 16 tokens, 8 of
    them of prompts. A layer's operations have 11 * 24 + 18 * 16 = 552 numbers, and all three layers
    and the head have 8928 weights, of which each of 4 devices multiplies with a half."""
    compute = computing(MODEL, fsdp=2, tp=2)
    lengths = np.array([3, 5]), np.array([[2, 4], [1, 1]])
    forward = [291_840 / 4, 16 * 3 * 552 * 2 / 4, 16 * 3 * 4 * 16 * 2 / 4, 0]
    assert forward_work(compute, lengths).tolist() == forward
    weights, gathered, kv = 8928, 4464, 2 * 3 * 2 * 8 * 2  # bytes, those of kv for each place
    hbm = 8 * 3 * 552 * 2 / 4 + 4 * (weights + 10 * kv)
    sampled = rollout_work(compute, lengths, 4, keys=10)
    assert sampled.tolist() == [forward[0], hbm, forward[2] + 4 * gathered, 4 * 50 * 3]
    assert update_work(compute, lengths, 3).tolist() == [
        4 * forward[0],
        4 * forward[1] + 3 * 4 * weights,
        4 * forward[2] + 3 * 3 * gathered,
        0,
    ]


def test_at_best_the_longest_part_counts_and_at_worst_their_sum() -> None:
    chip = Chip((), tflops=1, hbm_gib=1, hbm_gbps=1000, ici_gbps=1)
    work = np.array([0.7e12, 1.6e12, 0.4e9, 1e6])
    worst = 0.7 / 0.3 + 1.6 / 0.45 + 0.4 / 0.35 + 1.5
    np.testing.assert_allclose(estimate_seconds(work, chip), [2 + 0.5, worst])
    one_gpu = GPUS["l4"]  # it sends nothing
    assert estimate_seconds(np.array([0.7 * 121e12, 0, 0, 0]), one_gpu)[0] == pytest.approx(1)


# ---- Published times -----------------------------------------------------------------------------

SIZES = {  # V, D, F, L, H, N, h
    "Llama-3.1-8B": (128256, 4096, 14336, 32, 32, 8, 128),
    "Qwen3-32B": (151936, 5120, 25600, 64, 64, 8, 128),
}
NAMES = "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim"
OTHER_CHIPS = {
    "l40s": Chip((), 362, 0, 864),
    "a100-64": Chip((), 312, 0, 1640, 300),
    "h100s": GPUS["h100"]._replace(ici_gbps=450),
}


def named(name: str) -> ModelConfig:
    if name not in SIZES:
        return known_config(f"Qwen/{name}")
    sizes = dict(zip(NAMES.split(), SIZES[name], strict=True))
    return dataclasses.replace(known_config("Qwen/Qwen3-8B"), **sizes)


def sequences(count: int, prompt: int, completion: int, K: int = 1) -> tuple:
    return np.full(count // K, float(prompt)), np.full((count // K, K), float(completion))


def token(name: str, count: int, places: int, tp: int = 1) -> list[np.ndarray]:
    """A token of each of `count` sequences with this number of places."""
    compute = computing(named(name), tp=tp)
    return [rollout_work(compute, sequences(count, 0, 1), 1, count / tp * places)]


def mllm_jax(name: str, devices: int, tp: int, count: int, tokens: int, micro_steps: int) -> list:
    """Its rollout decodes with float32 weights and repeats keys and values for all query heads, its
    update gathers float32 weights; both compute 512 + 1024 places of each sequence."""
    model = named(name)
    rollout, training = computing(model, tp=tp), computing(model, fsdp=devices)
    keys = count / devices * 1536 * model.num_heads / model.num_kv_heads
    sampled = rollout_work(rollout, sequences(count, 512, tokens), tokens, keys)
    update = update_work(training, sequences(count, 0, 1536), micro_steps)
    float32 = np.array([0, tokens * weight_bytes(rollout)[0], 0, 0])
    return [sampled + float32, update * [1, 1, 2, 1]]


def nemo_rl(name: str, devices: int, tp: int, mean: int) -> list[np.ndarray]:
    """The longest of 2048 completions has 4096 tokens; the others leave when they have ended."""
    rollout = computing(named(name), dp=devices // tp, tp=tp)
    training = computing(named(name), fsdp=devices, remat="none")
    step, live = sequences(2048, 0, mean), 2048 / devices * mean / 4096
    update = update_work(training, step, 4)
    return [
        rollout_work(rollout, step, 4096, live * mean / 2),
        2 * forward_work(training, step),
        update,
    ]


def marin() -> list[np.ndarray]:
    compute, step = computing(named("Qwen2.5-1.5B"), dp=4), sequences(1024, 150, 300)
    return [rollout_work(compute, step, 512, 256 * 300), update_work(compute, step, 8)]


# The kernels and waits of a micro-step of the program that was timed, before attention was computed
# in rounds: count_launches of its HLO (jax 0.10.2), where each loop over pairs has 39 iterations.
BEFORE = {"Qwen2.5-0.5B": (38978, 2808), "Qwen2.5-1.5B": (50863, 3276)}


def this_program(name: str) -> list[np.ndarray]:
    """The run of docs/speed.md: its caches have 128 places, then 256."""
    launched = np.array([0, 0, 0, 4 * BEFORE[name][0]])
    compute, lengths = computing(named(name)), sequences(128, 256, 256, K=8)
    sampled = rollout_work(compute, lengths, 256, 128 * 192 + 16 * 256)
    return [sampled, update_work(compute, sequences(128, 200, 256, K=8), 4) + launched]


OURS_SMALL, OURS = this_program("Qwen2.5-0.5B"), this_program("Qwen2.5-1.5B")
MLLM_3B = mllm_jax("Qwen2.5-3B", 8, 8, 128, 1024, 4)
# The run and its part in docs/plan_time.md -> the chip, the works, the measured seconds
ANCHORS = {
    "sglang-jax, Qwen3-8B, v6e-4: token of 64": ("v6e", token("Qwen3-8B", 64, 1536, 4), 0.01111),
    "sglang-jax, Qwen3-8B, v6e-4: token of 256": ("v6e", token("Qwen3-8B", 256, 1536, 4), 0.030),
    "vLLM, Qwen3-8B, v5p-8: token of 32": ("v5p", token("Qwen3-8B", 32, 1000, 4), 32 / 5216),
    "SkyRL, Qwen3-4B, L40S: token of 128": ("l40s", token("Qwen3-4B", 128, 150), 128 / 7591),
    "MLLM-JAX, Qwen2.5-3B, v6e-8: rollout": ("v6e", MLLM_3B[:1], 9.12),
    "MLLM-JAX, Qwen2.5-3B, v6e-8: update": ("v6e", MLLM_3B[1:], 3.89),
    "MLLM-JAX, Qwen2.5-3B, v6e-8: step": ("v6e", MLLM_3B, 12.12),
    "MLLM-JAX, Qwen2.5-7B, v4-8: step of 32": (
        "v4",
        mllm_jax("Qwen2.5-7B", 4, 4, 32, 600, 8),
        22.92,
    ),
    "MLLM-JAX, Qwen2.5-7B, v4-8: step of 4": ("v4", mllm_jax("Qwen2.5-7B", 4, 4, 4, 400, 1), 5.48),
    "NeMo-RL, Llama-3.1-8B, 16 H100: step": ("h100s", nemo_rl("Llama-3.1-8B", 16, 1, 1060), 97.7),
    "NeMo-RL, Qwen3-32B, 32 H100: step": ("h100s", nemo_rl("Qwen3-32B", 32, 4, 3206), 393),
    "Marin, Qwen2.5-1.5B, 4 A100-64GB: step": ("a100-64", marin(), 20),
    "this program, Qwen2.5-0.5B, H100: rollout": ("h100", OURS_SMALL[:1], 0.548),
    "this program, Qwen2.5-0.5B, H100: update": ("h100", OURS_SMALL[1:], 1.10),
    "this program, Qwen2.5-0.5B, H100: step": ("h100", OURS_SMALL, 1.67),
    "this program, Qwen2.5-1.5B, H100: rollout": ("h100", OURS[:1], 0.927),
    "this program, Qwen2.5-1.5B, H100: update": ("h100", OURS[1:], 1.77),
    "this program, Qwen2.5-1.5B, H100: step": ("h100", OURS, 2.73),
}
WAITS = {  # of four micro-steps
    f"this program, {name}, H100: {part}": 4 * waits
    for name, (_, waits) in BEFORE.items()
    for part in ("update", "step")
}
PAGE = (REPO / "docs" / "plan_time.md").read_text()


@pytest.mark.parametrize("name", ANCHORS)
def test_a_published_time_is_within_its_range(name: str) -> None:
    chip, works, measured = ANCHORS[name]
    chips = CHIPS | GPUS | OTHER_CHIPS
    waiting = estimate_seconds(np.zeros(4), chips[chip], WAITS.get(name, 0))
    low, high = sum((estimate_seconds(work, chips[chip]) for work in works), waiting)
    assert low < measured < high
    assert high < 4 * low or name.endswith(("rollout", "update"))
    scale, unit = (1000, "ms") if measured < 0.1 else (1, "s")
    run, part = name.split(": ")
    texts = f"{scale * measured:.3g} {unit}", f"{scale * low:.3g} to {scale * high:.3g} {unit}"
    assert f"| {run} | {part} | {texts[0]} | {texts[1]} | " in PAGE


def test_the_page_has_no_other_times() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| [\d.]+ m?s \|", PAGE, re.M)
    assert [": ".join(row) for row in rows] == [*ANCHORS]


# ---- Launches ------------------------------------------------------------------------------------

HLO = """
%fused (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  ROOT %b = f32[2]{0} add(%a, %a)
}
%layer (c: (s32[], f32[2])) -> (s32[], f32[2]) {
  %c = (s32[], f32[2]{0}) parameter(0)
  %d = (s32[], f32[2]{0}) while(%c), condition=%less, body=%pair
  %e = f32[2]{0} fusion(%d), kind=kLoop, calls=%fused
  ROOT %f = (s32[], f32[2]{0}) tuple(%d, %e)
}
%pair (g: (s32[], f32[2])) -> (s32[], f32[2]) {
  %g = (s32[], f32[2]{0}) parameter(0)
  %h = f32[2]{0} custom-call(%g), custom_call_target="__cublas$gemm"
  ROOT %i = (s32[], f32[2]{0}) copy(%h)
}
ENTRY %main (j: f32[2]) -> f32[2] {
  %j = f32[2]{0} parameter(0)
  %k = (s32[], f32[2]{0}) while(%j), body=%layer, backend_config={"known_trip_count":{"n":"24"}}
  ROOT %l = f32[2]{0} fusion(%k), kind=kLoop, calls=%fused
}
"""


def test_the_bodies_of_loops_are_counted_as_often_as_they_run() -> None:
    """24 layers with a fusion and a loop over 39 pairs of two kernels each; a fusion at the end."""
    assert count_launches(HLO, 39) == (24 * (39 * 2 + 1) + 1, 24 * 39)
    assert count_launches(HLO.replace("%less", '%less, {"known_trip_count":{"n":"3"}}'))[1] == 0


# ---- Cycles --------------------------------------------------------------------------------------

TPU_HLO = """
%fused (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  ROOT %b = f32[2]{0} all-reduce(%a), to_apply=%add
}
%add (c: f32[], d: f32[]) -> f32[] {
  ROOT %e = f32[] add(%c, %d)
}
%layer.less (f: (s32[], f32[2])) -> pred[] {
  %g = s32[]{:T(128)} constant(36)
  ROOT %h = pred[] compare(%f, %g), direction=LT
}
%layer (i: (s32[], f32[2])) -> (s32[], f32[2]) {
  %j = f32[2]{0} fusion(%i), calls=%fused, backend_config={"estimated_cycles":"1000"}
  ROOT %k = f32[2]{0} all-to-all-start(%j), backend_config={"estimated_cycles":"20"}
}
%token.less (l: (s32[], s32[], f32[2])) -> pred[] {
  %m = s32[]{:T(128)} constant(1024)
  ROOT %n = pred[] compare(%l, %m), direction=LT
}
%token (o: (s32[], s32[], f32[2])) -> (s32[], s32[], f32[2]) {
  %p = (s32[], f32[2]{0}) while(%o), condition=%layer.less, body=%layer
  ROOT %q = f32[2]{0} copy(%p), backend_config={"estimated_cycles":"3"}
}
ENTRY %main (r: f32[2]) -> f32[2] {
  %s = f32[2]{0} copy(%r), backend_config={"estimated_cycles":"7"}
  %u = f32[2]{0} custom-call(%s), backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %t = (s32[], s32[], f32[2]{0}) while(%s), condition=%token.less, body=%token
}
"""


def test_cycles_and_collectives_count_as_often_as_their_loops_run() -> None:
    assert count_cycles(TPU_HLO, "token").tolist() == [36 * 1020 + 3, 36 * 2]
    assert count_cycles(TPU_HLO).tolist() == [1024 * (36 * 1020 + 3) + 7, 1024 * 36 * 2]
