"""Claims about model/: transformers' numbers, and the same numbers by every route and layout."""

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_model
from by_transformers import (
    EAGER,
    assert_same_gradients,
    compare_with_transformers,
    decoded,
    golden,
    golden_batch,
    golden_folder,
    golden_gradients,
    golden_logps,
)
from safetensors.numpy import save_file
from small_model import (
    FAMILIES,
    GOLDENS,
    IDS,
    KERNELS,
    MASK,
    PLACES,
    POSITIONS,
    batch_of,
    in_rows,
    numpy_softmax,
    tensors,
    transformers_logits,
    write_config,
    write_folder,
)

from extras.scorer import score_last_tokens
from model import families, hf
from model.attention import KV, PackedRows, prompt_rows
from model.blocks import BLOCK, block_attention
from model.layout import ROLLOUT_BATCH_AXES, TRAIN_BATCH_AXES, Layout, make_mesh, shard_batch
from model.logps import softcap
from model.network import ComputeConfig, LayerWeights, _embed, _output_proj_and_mlp, forward
from model.next_token import Sampling
from model.one_softmax import attend_with_one_softmax, has_one_softmax
from model.params import (
    ModelConfig,
    Moe,
    Params,
    Rope,
    Variant,
    arrange_layers,
    init_params,
    lm_head,
    param_shardings,
    param_table,
)
from sampling import NaiveBackend, Stopping
from update import compute_logps_and_entropies

# Everything at once: biases, head norms, scaled rotary angles in the first layer and none in the
# second, an lm_head beside the embedding, multipliers, and h != D/H.
MODEL = dataclasses.replace(
    small_model.MODEL,
    vocab_size=32,
    num_layers=2,
    rms_norm_eps=1e-5,
    variants=(Variant(Rope(100.0, llama3=(8.0, 1.0, 4.0, 16))), Variant(None)),
    layer_variants=(0, 1),
    tied=False,
    qkv_bias=True,
    qk_norm=True,
    embedding_multiplier=1.5,
    query_multiplier=0.8,
    residual_multiplier=0.6,
    logits_divisor=1.25,
)
# Sequences have up to 12 tokens, and tokens of local layers see four.
GEMMA = dataclasses.replace(MODEL, num_layers=3, tied=True, qkv_bias=False, **families.GEMMA)
VARIANTS = Variant(Rope(100.0, factor=8.0)), Variant(Rope(30.0), window=4)
GEMMA = dataclasses.replace(GEMMA, variants=VARIANTS, layer_variants=(1, 0, 1))
GEMMA = dataclasses.replace(GEMMA, residual_multiplier=1.0, logits_divisor=1.0)
ONE_DEVICE = small_model.train_layout(1, 1, 1)
FLOAT32 = ComputeConfig(MODEL, jnp.dtype("float32"), ONE_DEVICE)
BFLOAT16 = ComputeConfig(MODEL, jnp.dtype("bfloat16"), ONE_DEVICE)
R, S, T, K = 8, 6, 5, 4  # two prompts of 7 and 4 tokens, four completions of each
RNG = np.random.default_rng(0)
PROMPT_IDS = RNG.integers(0, 32, (2, S + 1)).astype(np.int32)
PROMPT_MASK = np.array([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]], np.int32)
COMPLETION_IDS = RNG.integers(0, 32, (R, T)).astype(np.int32)
COUNTS = np.arange(T) < np.array([5, 2, 4, 1, 3, 5, 5, 2])[:, None]  # [R, T] the tokens of rows
PROBE = RNG.standard_normal((R, T, 16)).astype(np.float32)  # a loss whose gradient reaches all
PARAMS = jax.tree.map(
    lambda leaf: ("norm" in leaf.name) + 0.4 * RNG.standard_normal(leaf.shape).astype(np.float32),
    param_table(MODEL),
)
OF = {"all": (PARAMS, FLOAT32)}
MOE = dataclasses.replace(MODEL, moe=Moe(8, 3, True, shared_width=8))
for name, model in (("gemma3", GEMMA), ("moe", MOE)):
    params = jax.tree.map(
        lambda leaf: 0.4 * RNG.standard_normal(leaf.shape).astype(np.float32), param_table(model)
    )
    OF[name] = params, FLOAT32._replace(model=model)


def prompts_for(share: int) -> tuple[np.ndarray, np.ndarray]:
    """prompt_ids and prompt_mask [R/share, S+1]: a copy for every `share` sequences."""
    copies = K // share
    return np.repeat(PROMPT_IDS, copies, axis=0), np.repeat(PROMPT_MASK, copies, axis=0)


def packed(share: int) -> list[np.ndarray]:
    """The inputs of hidden_of: all sequences in their order, `share` in each row."""
    prompts = [ids[mask == 1] for ids, mask in zip(PROMPT_IDS, PROMPT_MASK, strict=True)]
    unused = np.zeros((R, T), np.float32)
    batch = batch_of(prompts, COMPLETION_IDS, COUNTS.astype(np.int32), unused, unused[:, 0])
    names = (
        "ids",
        "positions",
        "segment_ids",
        "start",
        "targets",
        "target_slots",
        "completion_mask",
    )
    return [getattr(in_rows(batch, share), name) for name in names]


def hidden_of(params, compute, ids, positions, prompt, start, targets, places, mask):
    """[R, T, D] hidden states that predict the completions, computed as in training; 0 where a
    completion has no token."""
    params = arrange_layers(params, compute.layer_loop, compute.dtype)
    rows = PackedRows(prompt, start, S := ids.shape[1] - targets.shape[1])
    hidden, _ = forward(params, compute, ids, positions, rows=rows)
    found = jax.vmap(lambda x, at: x[at])(hidden[:, S:], places)  # [X, share, T, D]
    return (found.reshape(*mask.shape, -1) * mask[..., None].astype(hidden.dtype))[:R]


def prefill(params, compute, ids, positions, mask):
    return forward(params, compute, ids, positions, rows=prompt_rows(mask))


def loss_of(params, compute, *inputs):
    hidden = hidden_of(params, compute, *inputs)
    return (hidden * PROBE).sum(), hidden


jit = functools.partial(jax.jit, static_argnames=("compute",))
prefill_jit, decoded_jit = map(jit, (prefill, decoded))
gradient_jit = jit(jax.value_and_grad(loss_of, has_aux=True))


def traced_now(function):
    """The compiled function, which reads what a test has patched."""
    return jit(lambda params, compute, *inputs: function(params, compute, *inputs))


@functools.cache
def unpadded(model: str = "all") -> np.ndarray:
    """[R, T, D] from one forward per sequence: no padding, no packed rows and no cache."""
    found, (params, compute) = [], OF[model]
    for prompt, mask, ids in zip(*prompts_for(1), COMPLETION_IDS, strict=True):
        sequence = np.concatenate([prompt[mask == 1], ids[:-1]])[None]
        positions = np.arange(sequence.shape[1])[None]
        mask = np.ones(sequence.shape, bool)
        hidden, _ = prefill_jit(params, compute, sequence, positions, mask)
        found.append(np.asarray(hidden[0, -T:]))
    return np.stack(found)


@functools.cache
def plain_gradient(model: str = "all"):
    """The hidden states and the gradient of loss_of on one device, without remat."""
    (_, hidden), grads = gradient_jit(*OF[model], *packed(1))
    return hidden, grads


def assert_same(a, b, atol):
    """The two trees have equal arrays, up to atol times the largest number of each array."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol * max(1.0, np.abs(y).max()))


# ---- transformers' numbers -----------------------------------------------------------------------


def logits_of(folder: Path) -> np.ndarray:
    model = hf.read_config(folder)
    params = hf.load_params(folder, model, ONE_DEVICE.mesh, "f4")
    hidden, _ = prefill_jit(params, FLOAT32._replace(model=model), IDS, POSITIONS, MASK)
    return np.asarray(softcap(hidden @ lm_head(params).T, model.logits_softcap))


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_own_model(tmp_path, family):
    pytest.importorskip("torch", reason="compares with transformers' torch model")
    folder = write_folder(tmp_path, family)
    theirs = transformers_logits(folder)
    np.testing.assert_allclose(logits_of(folder)[MASK], theirs[MASK], rtol=0, atol=1e-4)
    golden = json.loads(GOLDENS.read_text())[family]
    np.testing.assert_allclose(theirs[PLACES][:, :12], golden, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_numbers_transformers_gave(tmp_path: Path, family: str) -> None:
    golden = json.loads(GOLDENS.read_text())[family]
    ours = logits_of(write_folder(tmp_path, family))[PLACES][:, :12]
    np.testing.assert_allclose(ours, golden, rtol=0, atol=1e-4)


MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


def random_longrope(rng: np.random.Generator, frequencies: int) -> dict[str, Any]:
    factors = {x: rng.uniform(1, 3, frequencies).tolist() for x in ("short_factor", "long_factor")}
    return {"type": "longrope"} | factors


def random_config(family: str, seed: int) -> dict[str, Any]:
    """A config.json of the family with random sizes."""
    rng = np.random.default_rng(seed)
    kv_heads, share, h = rng.integers(1, 4), rng.integers(1, 4), 2 * rng.integers(2, 9)
    sizes = {"num_attention_heads": kv_heads * share, "num_key_value_heads": kv_heads}
    sizes |= {"hidden_size": kv_heads * share * h, "intermediate_size": rng.integers(5, 50)}
    sizes |= {"num_hidden_layers": rng.integers(1, 6), "vocab_size": 50}
    sizes = {name: int(size) for name, size in sizes.items()}
    of_family = {
        "mistral": {"head_dim": int(2 * h)},
        "smollm3": {"no_rope_layers": rng.integers(0, 2, 6).tolist() if seed else None},
        "gemma2": {"head_dim": int(h), "sliding_window": int(rng.integers(3, 20))}
        | {"attn_logit_softcapping": seed * 0.9 or None, "final_logit_softcapping": 1.0 + seed}
        | {"pad_token_id": None},  # torch gives that token's embedding no gradient
        "phi3": {"partial_rotary_factor": h // 4 * 2 / h}
        | {"original_max_position_embeddings": 130 + seed}
        | {"rope_scaling": random_longrope(rng, int(h) // 4)},
        "qwen3_moe": {"head_dim": int(h), "norm_topk_prob": seed != 3}
        | {"num_experts": int(rng.integers(5, 12)), "num_experts_per_tok": int(rng.integers(2, 5))}
        | {"moe_intermediate_size": int(rng.integers(5, 30))},
        "granite": {name: rng.uniform(0.3, 1.5) for name in MULTIPLIERS}
        | {"attention_multiplier": rng.uniform(0.5, 1.5) * h**-0.5},
    }
    tied = {"tie_word_embeddings": bool(seed % 2)}
    return FAMILIES[family] | sizes | of_family[family] | tied | {"rope_theta": 300.0}


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", ["mistral", "smollm3", "granite", "gemma2", "phi3", "qwen3_moe"])
def test_random_models_have_transformers_logits_and_gradients(
    family: str, seed: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    config = random_config(family, seed)
    write_config(tmp_path, config)
    # With the large scores of `tensors` rounding would count.
    weights = {name: x / (4 if "q_proj" in name else 1) for name, x in tensors(config).items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, **EAGER
    )
    ids = np.random.default_rng(seed).integers(0, 50, (1, 130))
    compare_with_transformers(other, tmp_path, ids, 1e-5, 3e-5)


# ---- One forward, every route --------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["at_once", "blocks", "rounds"])
@pytest.mark.parametrize("model", ["all", "gemma3"])
def test_packed_rows_equal_one_unpadded_forward_at_once_and_in_blocks_if_they_are_long(
    monkeypatch: pytest.MonkeyPatch, model: str, schedule: str
) -> None:
    """With 3 in a row both groups stand in the second row, and each in another row too."""
    rows, blocks = packed(3), Mock(wraps=block_attention)
    monkeypatch.setattr("model.blocks.IN_ROUNDS", {"cpu"} if schedule == "rounds" else set())
    longest = rows[0].shape[1] - (schedule != "at_once")
    monkeypatch.setattr("model.network.SHORT_TOKENS", longest)
    monkeypatch.setattr("model.network.block_attention", blocks)
    hidden = traced_now(hidden_of)(*OF[model], *rows)
    np.testing.assert_allclose(hidden, unpadded(model) * COUNTS[..., None], rtol=0, atol=1e-5)
    assert blocks.called == (schedule != "at_once")


@pytest.mark.parametrize(
    "model, share, platform",
    [("all", 4, "cpu"), ("all", 1, "gpu"), ("gemma3", 4, "cpu"), ("gemma3", 4, "gpu")],
)
def test_decoding_token_by_token_equals_one_unpadded_forward(
    monkeypatch: pytest.MonkeyPatch, model: str, share: int, platform: str
) -> None:
    """With the attention of this platform."""
    one_softmax = Mock(wraps=attend_with_one_softmax)
    monkeypatch.setattr("model.attention.attend_with_one_softmax", one_softmax)
    monkeypatch.setattr("model.one_softmax.ONE_SOFTMAX", {"cpu"} if platform == "gpu" else {"gpu"})
    hidden = traced_now(decoded)(*OF[model], *prompts_for(share), COMPLETION_IDS)
    np.testing.assert_allclose(hidden, unpadded(model), rtol=0, atol=1e-5)
    assert one_softmax.called == (platform == "gpu")


@pytest.mark.parametrize("kv_heads, expected", [(4, True), (8, False)])
def test_one_softmax_is_for_at_most_four_kv_heads(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, expected: bool
) -> None:
    monkeypatch.setattr("model.one_softmax.ONE_SOFTMAX", {"cpu"})
    kv = KV(jnp.zeros((2, kv_heads, 4, 3)), jnp.zeros((2, kv_heads, 3, 4)))
    assert has_one_softmax(kv, OF["all"][1].layout) == expected


def test_an_empty_row_and_a_fully_padded_prompt_are_finite_and_leave_others_alone() -> None:
    empty = np.array([[1], [0]])
    *tokens, prompt, start, targets, places, mask = packed(4)
    rows = np.where(empty, prompt, -1), start, targets, places, mask * np.repeat(empty, K, axis=0)
    (_, hidden), grads = gradient_jit(PARAMS, FLOAT32, *tokens, *rows)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((hidden, grads)))
    np.testing.assert_allclose(hidden[:K], (unpadded() * COUNTS[..., None])[:K], rtol=0, atol=1e-5)
    hidden = decoded_jit(PARAMS, FLOAT32, PROMPT_IDS, PROMPT_MASK * empty, COMPLETION_IDS)
    assert np.isfinite(hidden).all()
    np.testing.assert_allclose(hidden[:K], unpadded()[:K], rtol=0, atol=1e-5)


def test_bfloat16_tells_far_positions_apart() -> None:
    start, mask = np.arange(T)[None].repeat(R, axis=0), np.ones((R, T), bool)
    near, far = (
        np.asarray(prefill_jit(PARAMS, BFLOAT16, COMPLETION_IDS, positions, mask)[0], "f4")
        for positions in (start, start + 4001)  # bfloat16 rounds 4001 and 4005 alike, to 4000
    )
    assert np.sqrt(((near - far) ** 2).mean() / (near**2).mean()) < 0.03


# ---- Softcaps of 4 and 3, by transformers' numbers of a Gemma 2 --------------------------------


@pytest.fixture
def gemma2(tmp_path: Path) -> tuple[ModelConfig, Params]:
    """Of four layers; the even ones have windows of 7 tokens."""
    model = hf.read_config(golden_folder(tmp_path, "gemma2"))
    assert (model.attention_softcap, model.logits_softcap) == (4, 3)
    return model, hf.load_params(tmp_path, model, ONE_DEVICE.mesh, np.float32)


ROUTES = ["at_once", "blocks", "rounds", "tiles", "pallas"]


@pytest.mark.parametrize("route", ROUTES)
def test_packed_rows_have_transformers_capped_logps_and_gradients(
    monkeypatch: pytest.MonkeyPatch, gemma2: tuple[ModelConfig, Params], route: str
) -> None:
    model, params = gemma2
    monkeypatch.setattr("loss_pallas.block_sizes", lambda *_, **__: (16, 16))
    monkeypatch.setattr("model.logps._number_of_tiles", lambda *_: 4 if route == "tiles" else 1)
    if route in ("blocks", "rounds"):
        monkeypatch.setattr("model.network.SHORT_TOKENS", 8)
        monkeypatch.setitem(BLOCK, "cpu", 8)
        monkeypatch.setattr("model.blocks.IN_ROUNDS", {"cpu"} if route == "rounds" else set())
    kernel = KERNELS["pallas"] if route == "pallas" else None
    compute = FLOAT32._replace(model=model, logps_kernel=kernel)

    def mean(params: Params, temperature: float, rows: Any) -> Any:
        logps, entropy = compute_logps_and_entropies.__wrapped__(params, rows, temperature, compute)
        mask = rows.completion_mask
        return -(logps * mask).sum() / mask.sum(), (logps * mask, entropy * mask)

    run = jax.jit(jax.value_and_grad(mean, has_aux=True), static_argnums=1)
    (loss, values), grads = run(params, 1.0, in_rows(golden_batch("gemma2"), 3))
    assert_same(values, tuple(golden_logps("gemma2")), 1e-5)
    assert loss == pytest.approx(float(golden("gemma2")["loss"]), abs=1e-5)
    assert_same_gradients(grads, model, golden_gradients("gemma2"), 3e-5)
    if route == "tiles":
        rows = in_rows(golden_batch("gemma2", 6, share=2), 6)
        _, values = jax.jit(mean, static_argnums=1)(params, 0.7, rows)
        assert_same(values, tuple(golden_logps("gemma2", 6, 2, temperature=0.7)), 1e-5)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_decoding_has_transformers_capped_logits(
    monkeypatch: pytest.MonkeyPatch, gemma2: tuple[ModelConfig, Params], platform: str
) -> None:
    """8 times, behind prompts of 14, 9 and 2 tokens, padded on the left, 10 tokens each."""
    monkeypatch.setattr("model.one_softmax.ONE_SOFTMAX", {"cpu"} if platform == "gpu" else {"gpu"})
    model, params = gemma2
    ids, mask, logits = (golden("gemma2")[name] for name in ("ids", "mask", "logits"))
    prompts, completions = (ids[:, :14], mask[:, :14]), np.repeat(ids[:, 14:], 8, axis=0)
    hidden = traced_now(decoded)(params, FLOAT32._replace(model=model), *prompts, completions)
    ours = softcap(hidden @ params.embed.T, 3.0)
    assert_same(ours, np.repeat(logits[:, 13:-1], 8, axis=0), 1e-5)


def test_the_sampler_draws_from_the_capped_logits(gemma2: tuple[ModelConfig, Params]) -> None:
    """Its log-probabilities are those of training, at a temperature of 0.7."""
    model, params = gemma2
    compute = FLOAT32._replace(model=model, layout=small_model.layout(1, 1, 1))
    backend = NaiveBackend(compute, Stopping(9, (-1,), 0), drop_ended=False)
    backend.update_weights(params)
    prompts = golden("gemma2")["ids"][:, -8:], golden("gemma2")["mask"][:, -8:]
    drawn = backend.generate(
        *prompts, np.arange(24, dtype=np.int32), jax.random.key(0), Sampling(0.7)
    )
    ones = np.ones((24, 9), np.int32)
    batch = batch_of([*prompts[0]], drawn.completion_ids, ones, drawn.sampling_logps, ones[:, 0])
    rows, compute = in_rows(batch, 24), FLOAT32._replace(model=model)
    logps, _ = compute_logps_and_entropies(params, rows, 0.7, compute)
    np.testing.assert_allclose(drawn.sampling_logps, logps, rtol=0, atol=1e-5)


def test_a_judge_compares_the_capped_logits_of_its_words(
    gemma2: tuple[ModelConfig, Params],
) -> None:
    """The scores of the words 5 and 9 behind the golden texts, and their probability together."""
    model, params = gemma2
    texts, compute = golden("gemma2"), FLOAT32._replace(model=model)
    arguments = params, texts["ids"], texts["mask"], compute, (5, 9)
    scores, probability = score_last_tokens(*arguments).T
    logits = texts["logits"][:, -1].astype(float)
    expected = 1 / (1 + np.exp(logits[:, 9] - logits[:, 5]))
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(probability, numpy_softmax(logits)[:, [5, 9]].sum(axis=1), atol=1e-5)


# ---- Layouts -------------------------------------------------------------------------------------


def placed(
    model: str, mesh_shape: str, batch_axes: tuple[str, ...], inputs: Iterable[np.ndarray]
) -> tuple[ComputeConfig, Params, list[jax.Array]]:
    """How to compute, the parameters and the inputs, placed on the devices as in a run."""
    layout = Layout(make_mesh("MESH_SHAPE", mesh_shape, jax.devices()), batch_axes)
    params, compute = OF[model]
    params = jax.tree.map(jax.device_put, params, param_shardings(compute.model, layout.mesh))
    return compute._replace(layout=layout), params, [shard_batch(x, layout) for x in inputs]


@pytest.mark.parametrize(
    "model, mesh_shape, share, remat, layer_loop",
    [
        ("all", "2,2,2", 2, "full", "scan"),
        ("all", "1,8,1", 1, "dots", "unroll"),
        ("gemma3", "2,2,2", 2, "full", "unroll"),
        ("moe", "2,2,2", 2, "full", "scan"),
    ],
)
def test_training_layouts_remat_and_unrolled_layers_leave_the_gradient_unchanged(
    model: str, mesh_shape: str, share: int, remat: str, layer_loop: str
) -> None:
    compute, params, inputs = placed(model, mesh_shape, TRAIN_BATCH_AXES, packed(share))
    compute = compute._replace(remat=remat, layer_loop=layer_loop)
    (_, hidden), grads = gradient_jit(params, compute, *inputs)
    assert_same((hidden, grads), plain_gradient(model), 1e-5)


@pytest.mark.parametrize(
    "model, mesh_shape, layer_loop",
    [("all", "4,1,2", "scan"), ("gemma3", "1,2,4", "unroll"), ("moe", "2,1,4", "unroll")],
)
def test_decoding_layouts_leave_hidden_states_unchanged(
    model: str, mesh_shape: str, layer_loop: str
) -> None:
    inputs = *prompts_for(1), COMPLETION_IDS
    compute, params, inputs = placed(model, mesh_shape, ROLLOUT_BATCH_AXES, inputs)
    hidden = decoded_jit(params, compute._replace(layer_loop=layer_loop), *inputs)
    np.testing.assert_allclose(hidden, unpadded(model), rtol=0, atol=1e-5)


# ---- First weights, and embeddings ---------------------------------------------------------------


def test_init_follows_transformers_rule() -> None:
    model = dataclasses.replace(MODEL, vocab_size=4096)
    params = jax.jit(init_params, static_argnums=0)(model, jax.random.key(0))
    assert (params.layers.q_norm == 1).all() and (params.final_norm == 1).all()
    assert (params.layers.bk == 0).all()
    assert float(params.embed.std()) == pytest.approx(0.02, rel=0.02)
    assert float(abs(params.embed - params.lm_head).max()) > 0.02
    params = jax.jit(init_params, static_argnums=0)(GEMMA, jax.random.key(0))
    assert (params.layers.mlp_post_norm == 0).all()  # 1 is added when it multiplies


def test_bfloat16_does_not_round_the_multiplier_of_what_a_layer_adds() -> None:
    """0.22 * 1008 = 221.76 is rounded to 222. With the 0.2197 of bfloat16 it would be 221."""
    model = dataclasses.replace(MODEL, residual_multiplier=0.22)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], jnp.bfloat16), PARAMS.layers)
    w = LayerWeights(dataclasses.replace(zeros, wo=zeros.wo.at[0, 0].set(1)), None)
    out = jnp.full((1, 1, 32), 1008, jnp.bfloat16)
    x = _output_proj_and_mlp(
        jnp.zeros((1, 16), jnp.bfloat16), out, w, BFLOAT16._replace(model=model)
    )
    assert x[0, 0] == 222


def test_embeddings_of_gemma_are_multiplied_by_the_rounded_root_of_their_width() -> None:
    """In bfloat16 sqrt(1152) = 33.94 is 34, and 34 * 1.09375 is 37.25. 33.94 * 1.09375 is 37."""
    model = dataclasses.replace(GEMMA, embedding_multiplier=1152**0.5)
    compute, ids = BFLOAT16._replace(model=model), np.zeros((1, 1), np.int32)
    embed = np.full((4, 1152), 1.09375, np.float32)
    found = jax.jit(_embed, static_argnums=2)(embed, ids, compute)
    assert found.dtype == jnp.bfloat16 and (found == 37.25).all()
