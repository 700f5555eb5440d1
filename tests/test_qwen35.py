"""Claims about Qwen3.5: packed rows, decoding and sharded programs give the numbers of a reference
that goes token by token through each sequence alone, in float64 numpy."""

import functools
import json
import operator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_transformers import EAGER, compare_with_transformers
from qwen35_by_hand import MODEL, random_config, reference_logps
from runs import (
    REPO,
    checkpoint_arrays,
    copy_at_call,
    environment,
    few_examples,
    metric_records,
    run_here,
)
from small_model import NEVER, PAD, QWEN2, TINY_EXPERTS, TINY_QWEN35, batch_of, layout, train_layout

import train_grpo
import train_sft
from chat import open_think_tag
from config import Config
from data import pad_prompts
from model import blocks
from model.attention import map_kv
from model.linear_attention import CHUNK
from model.network import ComputeConfig
from model.next_token import Sampling
from model.params import (
    Leaf,
    ModelConfig,
    Params,
    abstract_params,
    arrange_layers,
    param_shardings,
    param_table,
)
from rows import MicroBatch, RowLimits, pack, plan_rows
from sampling import NaiveBackend, Stopping, prefill
from startup import set_up
from tools.bench import make_random_model
from tools.plan import known_config
from update import _accumulate, compute_logps_and_entropies

# ---- The reference -------------------------------------------------------------------------------


@functools.cache
def weights() -> Params:
    """Float64 numpy parameters whose distributions depend on every token."""
    rng = np.random.default_rng(3)

    def draw(leaf: Leaf) -> np.ndarray:
        x = rng.normal(size=leaf.shape)
        if leaf.kind in ("norm", "out_norm", "a_log", "dt_bias"):
            return 0.3 * x + (leaf.kind == "out_norm")
        scales = {"embed": 1.0, "lm_head": 0.4, "conv1d": 0.6}
        known = [scale for word, scale in scales.items() if word in leaf.name]
        return x * (known[0] if known else leaf.shape[1] ** -0.5)

    return jax.tree.map(draw, param_table(MODEL))


# ---- Packed rows ---------------------------------------------------------------------------------

# The first prompt is empty in a row, the second is shorter than the convolution.
PROMPTS = [1, 3, 71]
LENGTHS = [1, 2, 63, 64, 65, 3, 1, 30, 5]  # K = 3


@functools.cache
def packed() -> tuple[list[list[int]], np.ndarray, np.ndarray, list[MicroBatch]]:
    """The prompts, completion_ids [9, 65] and lengths, and all of them in a single row."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 39, n).tolist() for n in PROMPTS]
    lengths = np.array(LENGTHS, np.int32)
    ids = rng.integers(0, 39, (9, 65)).astype(np.int32)
    mask = (np.arange(65) < lengths[:, None]).astype(np.int32)
    zeros = np.zeros(ids.shape, np.float32)
    batch = batch_of(prompts, ids, mask, zeros, zeros[:, 0])
    limits = RowLimits(1, 9, 3, 65, 128, unit=CHUNK, chunk=CHUNK)
    [rows], widths = plan_rows(batch, range(9), limits)
    return prompts, ids, lengths, [pack(batch, rows, widths, pad_id=PAD)]


def mean_logp(params: Params, compute: ComputeConfig, x: MicroBatch) -> tuple[jax.Array, jax.Array]:
    logps, _ = compute_logps_and_entropies(params, x, 1.0, compute)
    return (logps * x.completion_mask).sum() / sum(LENGTHS), logps


gradient = jax.jit(jax.value_and_grad(mean_logp, has_aux=True), static_argnums=1)


def float32_weights() -> Params:
    return jax.tree.map(np.float32, weights())


@functools.cache
def on_a_device() -> Any:
    compute = ComputeConfig(MODEL, jnp.dtype("float32"), train_layout(1, 1, 1))
    return gradient(float32_weights(), compute, packed()[3][0])


def test_packed_completions_begin_with_the_state_of_their_prompt() -> None:
    prompts, ids, lengths, [row] = packed()
    (_, logps), _ = on_a_device()
    assert row.ids.shape == (1, 256 + 512), "192 places of prompts; 192, 128 and 36 of groups"
    order = row.sequence_indices[row.sequence_indices >= 0]
    assert sorted(order) == [*range(9)]
    for place, i in enumerate(order):
        expected = reference_logps(weights(), prompts[i // 3], ids[i, : lengths[i]])
        np.testing.assert_allclose(logps[place, : lengths[i]], expected, rtol=0, atol=2e-5)


def test_the_gradient_of_packed_rows_is_that_of_the_reference() -> None:
    """Along a random direction of all weights, by central differences in float64."""
    prompts, ids, lengths, _ = packed()
    _, grads = on_a_device()
    rng = np.random.default_rng(7)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape) * x.std(), weights())
    step = 1e-5

    def mean(sign: float) -> float:
        params = jax.tree.map(lambda x, d: x + sign * step * d, weights(), direction)
        sums = [
            reference_logps(params, prompts[i // 3], ids[i, :n]).sum()
            for i, n in enumerate(lengths)
        ]
        return sum(sums) / sum(LENGTHS)

    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), grads, direction)))
    assert slope == pytest.approx((mean(1) - mean(-1)) / (2 * step), rel=2e-4)


@pytest.mark.parametrize(
    "mesh, remat, layer_loop", [((1, 1, 2), "full", "unroll"), ((2, 2, 2), "dots", "scan")]
)
def test_meshes_remat_and_unrolled_layers_leave_the_gradient_unchanged(
    mesh: tuple[int, int, int], remat: str, layer_loop: str
) -> None:
    compute = ComputeConfig(
        MODEL, jnp.dtype("float32"), train_layout(*mesh), remat=remat, layer_loop=layer_loop
    )
    params = jax.device_put(float32_weights(), param_shardings(MODEL, compute.layout.mesh))
    rows = compute.layout.batch_shards
    [row] = packed()[3]
    row = jax.tree.map(lambda x: np.concatenate([x] * rows), row)
    (mean, logps), grads = gradient(params, compute, row)
    (expected, expected_logps), expected_grads = on_a_device()
    np.testing.assert_allclose(mean / rows, expected, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(x / rows, y, rtol=0, atol=2e-5 * np.abs(y).max())


def test_the_gradient_of_a_gpu_s_schedule_is_that_of_the_loop_over_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12 blocks of 64 tokens."""
    monkeypatch.setattr(blocks, "IN_ROUNDS", {"cpu"})
    compute = ComputeConfig(MODEL, jnp.dtype("float32"), train_layout(1, 1, 1))
    [row] = blocks.with_key_blocks(packed()[3], 256, compute.layout)
    assert row.key_blocks.shape[:2] == (1, 12)
    (_, logps), grads = gradient(float32_weights(), compute, row)
    (_, expected_logps), expected = on_a_device()
    np.testing.assert_allclose(logps, expected_logps, rtol=0, atol=1e-5)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6 * np.abs(y).max())


@pytest.mark.parametrize("model", [MODEL, QWEN2])
def test_gradients_of_stacked_and_of_unrolled_layers_add_up_to_stacked_ones(
    model: ModelConfig,
) -> None:
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), param_table(model))
    for grads in (ones, arrange_layers(ones, "unroll", np.float32)):
        for total, expected in ((None, 1), (ones, 2)):
            added = _accumulate(total, grads)
            assert jax.tree.structure(added) == jax.tree.structure(ones)
            assert all((x == expected).all() for x in jax.tree.leaves(added))


# ---- Decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer_loop, mesh, K, T", [("scan", (2, 2, 2), 8, 12), ("unroll", (1, 1, 1), 1, 260)]
)
def test_sampled_logps_are_those_of_the_reference(
    layer_loop: str, mesh: tuple[int, int, int], K: int, T: int
) -> None:
    """After 1, 2, 64, 65, 66 and 201 tokens of prompts that are padded on the left, with sequences
    that leave the batch when they have ended, or with 260 tokens in two stages."""
    rng = np.random.default_rng(9)
    prompts = [rng.integers(0, 39, n).tolist() for n in (1, 2, 3, 64, 65, 66, 200, 201)]
    compute = ComputeConfig(MODEL, jnp.dtype("float32"), layout(*mesh), layer_loop=layer_loop)
    stop_ids = (NEVER,) if K == 1 else (0, 7, 11)
    backend = NaiveBackend(compute, Stopping(T, stop_ids, PAD), drop_ended=True)
    backend.update_weights(
        jax.device_put(float32_weights(), param_shardings(MODEL, compute.layout.mesh))
    )
    sequence_ids = np.arange(len(prompts) * K, dtype=np.int32)
    drawn = backend.generate(
        *pad_prompts(prompts, 210, PAD), sequence_ids, jax.random.key(0), Sampling(1.0)
    )
    assert K == 1 or len({*drawn.decode_steps}) > 1, "sequences leave"
    for i, n in enumerate(drawn.lengths):
        expected = reference_logps(weights(), prompts[i // K], drawn.completion_ids[i, :n])
        np.testing.assert_allclose(drawn.sampling_logps[i, :n], expected, rtol=0, atol=2e-5)


def test_the_states_of_decoding_are_as_large_for_any_number_of_tokens() -> None:
    """Those of 0.8B: 18 linear layers of 16 heads of 128 * 128 float32 are 18 MiB."""
    model = known_config("Qwen/Qwen3.5-0.8B")
    compute = ComputeConfig(model, jnp.dtype("bfloat16"), layout(1, 1, 1), layer_loop="unroll")
    params = abstract_params(model, compute.layout.mesh, jnp.bfloat16, "unroll")
    sizes = []
    for S, width in ((64, 32), (1024, 4096)):
        ids = jax.ShapeDtypeStruct((2, S + 1), jnp.int32)
        prefix = prefill.eval_shape(params, compute, ids, ids)
        begin = operator.methodcaller("begin_completions", 16, width)
        *states, full = jax.eval_shape(functools.partial(map_kv, begin), prefix)
        assert {kv.k.shape for kv in full} == {(16, 2, 256, width)}
        sizes.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states)))
    conv = 18 * 3 * 6144 * 2
    assert sizes == [16 * (18 * 2**20 + conv)] * 2


# ---- Runs ----------------------------------------------------------------------------------------

RUN = environment("STEPS=2 LR_DECAY_STEPS=3 BATCH_SIZE=4 TRAIN_MICRO_BATCH_SIZE=4 REMAT=full")
RUN |= environment("MAX_LENGTH_SAMPLE=32 SAVE_EVERY_STEPS=1 EVAL_EVERY_STEPS=0")
GRPO = environment("NUM_PRE_Q=4 LORA_RANK=2")
SFT = environment("REWARD_FN= REWARD_WEIGHTS= MAX_LENGTH_SAMPLE=96 COMPLETION_COLUMN=answer")


@pytest.mark.slow
def test_a_cold_start_and_grpo_behind_it_end_to_the_bit_as_ever_if_they_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With linear layers and experts. The model of the cold start is the teacher of GRPO. What a
    kill leaves is copied."""
    make_random_model(REPO / "tiny", tmp_path / "model", TINY_QWEN35 | TINY_EXPERTS)
    model = str(tmp_path / "model")
    sft, grpo = tmp_path / "sft", tmp_path / "grpo"
    of_grpo = GRPO | {"MODEL_PATH": f"{sft}/hf", "TEACHER_PATH": model}
    for out, script, update, env in (
        (sft, train_sft, "train_on_mini_batch", SFT | {"MODEL_PATH": model}),
        (grpo, train_grpo, "update_policy", of_grpo),
    ):
        killed = out.with_name(f"{out.name}_killed")
        with monkeypatch.context() as patch:
            copy_at_call(patch, script, update, 2, out, 1, killed)
            assert run_here(out, script, RUN | env).code == 0
        resumed = run_here(killed, script, RUN | env)
        assert resumed.code == 0 and "\nresumed after 1 of 2 steps" in resumed.lines
        ours, theirs = (checkpoint_arrays(folder, 2) for folder in (out, killed))
        assert ours.keys() == theirs.keys()
        assert all(ours[key].tobytes() == theirs[key].tobytes() for key in ours)
        assert metric_records(out) == metric_records(killed)
    kl = [record["train-other/reverse_kl"] for record in metric_records(grpo)]
    assert np.abs(kl).max() < 0.1 and kl[0] != 0, "the cold start was short"


# ---- transformers' numbers -----------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize(
    "seed, experts, inputs, tolerances",
    [(seed, False, 2, (1e-5, 2e-4)) for seed in range(3)]
    + [(seed, True, 1, (2e-5, 1e-4)) for seed in range(2)],
)
def test_random_models_have_transformers_logits_and_gradients(
    seed: int, experts: bool, inputs: int, tolerances: tuple[float, float], tmp_path: Path
) -> None:
    """Of 130 tokens. Those of experts choose two or more: the router of one, whose weight is 1, has
    no gradient but rounding."""
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(seed)
    other = transformers.AutoModelForCausalLM.from_config(
        random_config(seed, experts), dtype=torch.float32, **EAGER
    ).eval()
    with torch.no_grad():
        for name, x in other.named_parameters():
            scale = 1.0 if "embed" in name else 0.3 if x.ndim < 2 else x.shape[-1] ** -0.5
            x.normal_(float("linear_attn.norm" in name), scale)
    other.save_pretrained(tmp_path)
    ids = np.random.default_rng(seed).integers(0, 48, (inputs, 130))
    compare_with_transformers(other, tmp_path, ids, *tolerances)


@pytest.mark.parity
@pytest.mark.parametrize(
    "name, thinks, tag",
    [("nothink", None, ""), ("nothink", True, "<think>\n"), ("think", None, "<think>\n")]
    + [("think", False, "")],
)
def test_the_released_templates_think_as_chat_template_kwargs_says(
    name: str, thinks: bool | None, tag: str
) -> None:
    """Those of 0.8B and 2B, then those of larger models; rewards see a tag that a prompt opens."""
    trl = pytest.importorskip("trl")
    template = Path(trl.__file__).parent / "chat_templates" / f"qwen3_5_{name}.jinja"
    env = {"CHAT_TEMPLATE": str(template), "DATASET": str(few_examples(9, 9))}
    if thinks is not None:
        env["CHAT_TEMPLATE_KWARGS"] = json.dumps({"enable_thinking": thinks})
    run = set_up(Config.from_env(env))
    assert open_think_tag(run.train_prompts[0].ids, run.rollout.chat_format.tokenizer) == tag
