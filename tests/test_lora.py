"""Claims about LoRA: what adapters add, their gradient, how little memory they need, and where they
come from and go to.

The reference for gradients is full training: at the merged weights W + s A B, with the gradient G
of W, that of A is s G B^T and that of B is s A^T G.
"""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import (
    ALL,
    DRIFT,
    FIELDS,
    FLOAT32,
    KL,
    MODEL,
    answers,
    by_full_training,
    gradient,
    hidden_of,
    merged_by_hand,
    whole,
)
from mistakes import few, mistake_of
from runs import REPO, Result, checkpoint_arrays, environment, metric_records, train
from safetensors.numpy import load_file
from small_model import QWEN2, assert_close, train_layout, weights, write_folder

import metrics
from config import Config
from infra.mistakes import UserMistake
from metrics import check_drift
from model import hf, lora
from model.families import QWEN35
from model.network import ComputeConfig
from model.params import (
    FULL,
    LINEAR,
    Adapter,
    LinearSizes,
    Lora,
    Moe,
    combine_params,
    init_params,
    param_shardings,
    trainable_params,
)
from sampling import NaiveBackend, Stopping
from startup import export, set_up

# ---- What adapters add ---------------------------------------------------------------------------


def test_new_adapters_change_nothing_to_the_bit() -> None:
    params = combine_params(
        jax.tree.map(np.float32, weights()), init_params(MODEL, jax.random.key(0))
    )
    assert np.abs(params.adapters.wq.a).max() <= 0.25, "1 / sqrt(16)"
    assert np.abs(params.adapters.down.a).std() > 0.01
    assert not any(np.any(getattr(params.adapters, name).b) for name in FIELDS)
    np.testing.assert_array_equal(hidden_of(params, MODEL), hidden_of(weights(), QWEN2))


def test_merging_says_which_share_of_the_numbers_it_has_changed() -> None:
    params = whole()
    merged, share = lora.merge_adapters(params, MODEL.lora)
    assert_close(merged, jax.tree.map(np.float32, merged_by_hand(params)), 1e-5)
    assert share == 1
    adapters = jax.tree.map(np.zeros_like, params.adapters).replace(wq=params.adapters.wq)
    assert 0 < lora.merge_adapters(params.replace(adapters=adapters), MODEL.lora)[1] < 0.2
    tiny = jax.tree.map(lambda x: np.float32(1e-4 * x), params.adapters)
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params).replace(adapters=tiny)
    assert lora.merge_adapters(rounded, MODEL.lora)[1] < 0.01, "bfloat16 loses small changes"


# ---- The gradient --------------------------------------------------------------------------------


@functools.cache
def of_whole() -> dict[str, Adapter]:
    return by_full_training(whole())


@pytest.mark.parametrize(
    "settings",
    [{"layer_loop": "unroll", "micro": 4}, {"mesh": (2, 2, 2), "remat": "full"}],
    ids=str,
)
def test_the_gradient_is_that_of_full_training_times_the_other_factor(settings: dict) -> None:
    grads = gradient(whole(), MODEL, **settings)
    assert (grads.embed, grads.layers, grads.final_norm, grads.lm_head) == (None,) * 4
    for name, expected in of_whole().items():
        for x, y in zip(getattr(grads.adapters, name), expected, strict=True):
            assert x.dtype == np.float32 and np.abs(y).max() > 1e-3
            np.testing.assert_allclose(x, y, rtol=0, atol=5e-6, err_msg=name)


# ---- Memory --------------------------------------------------------------------------------------


def test_the_rollout_reads_the_arrays_of_training_if_their_layouts_are_the_same() -> None:
    where, params = train_layout(1, 1, 1), whole()
    params = jax.device_put(params, param_shardings(MODEL, where.mesh))
    for shares in (True, False):
        compute = ComputeConfig(MODEL, FLOAT32, where, shares_base=shares)
        backend = NaiveBackend(compute, Stopping(4, (1,), 0), drop_ended=False)
        backend.update_weights(params)
        same = [
            x.unsafe_buffer_pointer() == y.unsafe_buffer_pointer()
            for x, y in zip(*map(jax.tree.leaves, (backend._weights, params)), strict=True)
        ]
        of_base = len(jax.tree.leaves(params.replace(adapters=None)))
        assert sum(same) == of_base * shares


# ---- The tripwire --------------------------------------------------------------------------------


def test_the_drift_that_rounding_explains_depends_on_the_dtypes() -> None:
    def note_of(
        nats: float | None, learner: Any, rollout: Any, filters: bool = False, is_new: bool = False
    ) -> str:
        lines, cfg = [], SimpleNamespace(filters_logps=lambda: filters)
        learner, rollout = SimpleNamespace(compute=learner), SimpleNamespace(compute=rollout)
        run = SimpleNamespace(cfg=cfg, learner=learner, rollout=rollout)
        found = {} if nats is None else {"sampling_logp_difference/mean": nats}
        log = SimpleNamespace(print_line=lines.append)
        assert check_drift(run, log, 1, found, is_new_run=is_new) == (nats is not None)
        return "".join(lines)

    training = ComputeConfig(MODEL, FLOAT32, None)
    assert note_of(0.0009, training, training) == note_of(None, training, training) == ""
    words = "differ by 0.0011 nats on average; rounding explains at most 0.001"
    assert words in note_of(0.0011, training, training)
    remedy = "; to find the cause set, one after the other, ROLLOUT_BACKEND=naive, ATTENTION_IMPL="
    with pytest.raises(RuntimeError, match=f"{words}{remedy}xla, POLICY.*=jax, DTYPE=float32$"):
        note_of(0.0011, training, training, is_new=True)
    assert note_of(0.0011, training, training, filters=True) == ""
    rollout = training._replace(dtype=jnp.dtype("bfloat16"))
    assert note_of(0.049, training, rollout) == ""
    sizes = LinearSizes(2, 4, 6, 10, 4)
    linear = dataclasses.replace(MODEL, period=(LINEAR, FULL), linear=sizes, **QWEN35)
    assert note_of(0.06, training._replace(model=linear), rollout) == ""  # measured
    experts = dataclasses.replace(MODEL, moe=Moe(8, 12, normed=True))
    assert note_of(0.06, training._replace(model=experts), rollout) == ""


@pytest.mark.slow
def test_drift_ends_a_run_once_a_step_has_a_gradient_and_is_told_in_a_resumed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late.py").write_text(
        "def late(completions, trainer_state, **columns):\n"
        "    return [i % 2 * trainer_state.global_step for i in range(len(completions))]\n"
    )
    settings = environment("BATCH_SIZE=2 NUM_PRE_Q=4 SAVE_EVERY_STEPS=1 LR_DECAY_STEPS=2")
    # All rewards of step 0 are equal.
    settings |= {"REWARD_FN": f"{tmp_path}/late.py:late", "REWARD_WEIGHTS": "1"}
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="explains at most -1; "):
        patch.setitem(metrics.DRIFT_LEVELS, "float32", -1.0)
        train(tmp_path / "drifting", **settings, STEPS="2")
    assert len(metric_records(tmp_path / "drifting")) == 2
    train(tmp_path / "run", **settings, STEPS="1")
    monkeypatch.setitem(metrics.DRIFT_LEVELS, "float32", -1.0)
    resumed = train(tmp_path / "run", **settings, STEPS="2")
    assert re.search("^note step=1: .* rounding explains at most -1$", resumed.lines, re.M)


# ---- Runs, and folders of PEFT -------------------------------------------------------------------

RUN = environment(
    """STEPS=2 BATCH_SIZE=4 NUM_PRE_Q=4 LORA_RANK=4 LEARNING_RATE=3e-3 LR_SCHEDULE=constant
    WARMUP_RATIO=0 NUM_MINI_BATCHES=2 BETA=0.05 EVAL_EVERY_STEPS=2 EVAL_PROMPTS=64
    SAVE_EVERY_STEPS=2 SAMPLE_EVERY_STEPS=1"""
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("lora") / "run", **RUN)


@pytest.fixture
def adapters(run: Result, tmp_path: Path) -> Path:
    """A copy of the folder that the run has exported."""
    return shutil.copytree(run.out / "hf", tmp_path / "adapters")


def test_checkpoints_and_exports_hold_adapters_alone(run: Result) -> None:
    arrays = checkpoint_arrays(run.out, 2)
    of_params = [name for name in arrays if name.startswith("['state']['params']")]
    assert len(of_params) == 14 and all("['adapters']" in name for name in of_params)
    drifts = [x[DRIFT] for x in run.records if DRIFT in x]
    assert len(drifts) == 2 and max(drifts) < 1e-4, "the newest adapters sample"
    exported = load_file(run.out / "hf" / "adapter_model.safetensors")
    config = json.loads((run.out / "hf" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (
        4,
        32.0,
        sorted(ALL),
    )
    assert config["base_model_name_or_path"] == str(REPO / "tiny")
    b = exported["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"]
    saved = arrays["['state']['params']['adapters']['down']['b']"]
    np.testing.assert_array_equal(b, saved[0].T)
    assert np.abs(b).max() > 1e-3


def test_a_merged_model_answers_as_the_run(run: Result, tmp_path: Path) -> None:
    """It is made of the run's checkpoint by the same command, as soon as that asks for it."""
    merged, out = tmp_path / "merged", tmp_path / "run"
    train(run.out, **RUN | {"EXPORT_HF": str(merged), "EXPORT_LORA": "merged"})
    assert not (merged / "adapter_config.json").exists()
    train(out, **RUN | {"STEPS": "0", "LORA_RANK": "0", "MODEL_PATH": str(merged)})
    assert answers(out, step=0) == answers(run.out, step=2)


def test_training_begins_with_the_adapters_of_a_folder_and_so_does_the_reference(
    run: Result, tmp_path: Path
) -> None:
    """Against the base without adapters the KL of the first update would not be 0."""
    given = {"LORA_RANK": "0", "MODEL_PATH": str(run.out / "hf"), "NUM_MINI_BATCHES": "1"}
    began = train(tmp_path / "run", **RUN | given | {"STEPS": "1", "LEARNING_RATE": "0"})
    assert len(answers(began.out, step=0)) == 64
    assert answers(began.out, step=0) == answers(run.out, step=2)
    of_runs = [[x[KL] for x in result.records if KL in x] for result in (began, run)]
    assert abs(of_runs[0][0]) < 1e-6 and len(of_runs[1]) == 2
    assert of_runs[1][-1] > 1e-4, "after updates it is not 0"
    ours, theirs = (load_file(x.out / "hf" / hf.ADAPTERS) for x in (began, run))
    assert ours.keys() == theirs.keys() and len(ours) == 2 * 7 * 4
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.parametrize(
    ("changes", "env", "words"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type='IA3'; only plain LoRA is supported"),
        ({"use_dora": True}, {}, "use_dora=True"),
        ({"bias": "all"}, {}, "bias='all'"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, {}, "'embed_tokens' is none of q_proj"),
        ({"target_modules": ["q_proj"]}, {}, "has unknown tensors"),
        ({"r": 8}, {}, "lora_A.weight is [4, 128], its config says [8, 128]"),
        ({"base_model_name_or_path": "./nowhere"}, {}, "the base of MODEL_PATH="),
        ({}, {"LORA_RANK": "8"}, "LORA_RANK=8, and the adapters of MODEL_PATH={} have 4"),
        ({}, {"LORA_ALPHA": "16"}, "LORA_ALPHA=16.0, and the adapters of MODEL_PATH={} have 32.0"),
    ],
    ids=str,
)
def test_a_folder_of_other_adapters_is_told_before_weights_are_read(
    adapters: Path, changes: dict[str, Any], env: dict[str, str], words: str
) -> None:
    """A rank beside the folder must be theirs, too."""
    file = adapters / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert words.format(adapters) in mistake_of(MODEL_PATH=str(adapters), **env)


def test_weights_beside_adapters_for_another_model_are_refused_and_their_own_rank_is_accepted(
    adapters: Path,
) -> None:
    """As a merge into the folder of the adapters leaves them."""
    env = {"MODEL_PATH": str(adapters), "LORA_RANK": "4"}
    assert set_up(Config.from_env(few() | env)).learner.compute.model.lora.rank == 4
    (adapters / "model.safetensors").touch()
    words = f"MODEL_PATH={adapters} is a folder of adapters for .*, and model.safetensors would"
    with pytest.raises(UserMistake, match=words):
        set_up(Config.from_env(few() | env))


def test_a_folder_keeps_its_chat_template_and_the_revision_of_its_base(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = (REPO / "docs" / "chat_template.jinja").read_text(encoding="utf-8")
    folder, base = tmp_path / "adapters", str(REPO / "tiny")
    model = set_up(Config.from_env(few() | {"LORA_RANK": "2"})).learner.compute.model
    params = init_params(model, jax.random.key(0))
    lora.save_adapters(
        folder, params, model, model.lora, base, "v2", chat_template=text + "{# mine #}"
    )
    assert lora.read_base_name(folder) == (base, "v2")
    env = few() | {"MODEL_PATH": str(folder)}
    run = set_up(Config.from_env(env))
    assert run.rollout.chat_format.tokenizer.chat_template.endswith("{# mine #}")
    for how, dtype, b in (  # what is trained from this folder keeps it too
        ("adapters", "float32", 3e-10),
        ("merged", "float32", 3e-10),
        ("merged", "bfloat16", 1e-5),
    ):
        cfg = dataclasses.replace(run.cfg, export_lora=how, export_hf=str(tmp_path / f"of_{how}"))
        compute = run.learner.compute._replace(dtype=jnp.dtype(dtype))
        learner = dataclasses.replace(run.learner, compute=compute)
        params = init_params(compute.model, jax.random.key(0))
        small = jax.tree.map(lambda x, b=b: jnp.where(x == 0, b, x), params.adapters)
        params = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), params).replace(
            adapters=small
        )
        export(dataclasses.replace(run, cfg=cfg, learner=learner), tmp_path, params)
        exported = (tmp_path / f"of_{how}" / "chat_template.jinja").read_text(encoding="utf-8")
        assert exported.endswith("{# mine #}")
        share = r"EXPORT_LORA=merged changes [1-4]\d\.\d\d% of the numbers of the adapted matrices"
        notes = re.findall(rf"^note: {share}; {dtype} rounds", capsys.readouterr().out, re.M)
        assert len(notes) == (how == "merged")
    other = env | {"CHAT_TEMPLATE": str(REPO / "docs" / "chat_template.jinja")}
    assert set_up(Config.from_env(other)).rollout.chat_format.tokenizer.chat_template == text
    # Until 2025 TRL and unsloth wrote the template into the settings of the tokenizer.
    settings = json.dumps({"chat_template": text + "{# theirs #}"})
    (folder / "tokenizer_config.json").write_text(settings)
    run = set_up(Config.from_env(env))
    assert run.rollout.chat_format.tokenizer.chat_template.endswith("{# mine #}")
    (folder / "chat_template.jinja").unlink()
    run = set_up(Config.from_env(env))
    assert run.rollout.chat_format.tokenizer.chat_template.endswith("{# theirs #}")


def test_adapters_by_a_regular_expression_and_with_the_names_of_a_model_of_images_are_read(
    tmp_path: Path,
) -> None:
    """As unsloth writes those of Qwen3.5, whose folders on the hub also see images."""
    model = dataclasses.replace(
        hf.read_config(write_folder(tmp_path, "qwen3_5")), lora=Lora(2, 4.0, ("q_proj", "up_proj"))
    )
    params, folder = init_params(model, jax.random.key(0)), tmp_path / "adapters"
    lora.save_adapters(folder, params, model, model.lora, str(tmp_path), "", chat_template="")
    before, text = load_file(folder / hf.ADAPTERS), "model.model.language_model.layers"
    renamed = {name.replace("model.model.layers", text): x for name, x in before.items()}
    assert renamed.keys().isdisjoint(before)
    hf.save_tensors(renamed, folder / hf.ADAPTERS)
    file = folder / "adapter_config.json"
    expression = r"(?:.*?(?:language|text).*?(?:q_proj|up_proj).*?)"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": expression}))
    found = lora.read_lora(Config(), dataclasses.replace(model, lora=None), folder)
    assert found == model.lora
    read = lora.initial_adapters(folder, model, train_layout(1, 1, 1).mesh, seed=0)
    for name, tensor in hf.hf_tensors(read, model):
        np.testing.assert_array_equal(tensor, before[name])


@pytest.mark.parametrize("targets", [("qkv_proj", "gate_up_proj", "down_proj"), ("qkv_proj",)])
def test_the_weights_of_a_fused_tensor_share_the_a_of_their_adapter(
    tmp_path: Path, targets: tuple[str, ...]
) -> None:
    """As in PEFT, which adapts the tensor. The base plus B A is made of the two files by hand."""
    (tmp_path / "base").mkdir()
    (tmp_path / "dense").mkdir()
    base = hf.read_config(write_folder(tmp_path / "base", "phi3"))
    model, mesh = dataclasses.replace(base, lora=Lora(3, 4.5, targets)), train_layout(1, 1, 1).mesh
    rng, made = np.random.default_rng(0), trainable_params(init_params(model, jax.random.key(0)))
    made = jax.tree.map(lambda x: np.float32(0.3 * rng.normal(size=x.shape)), made)
    folder = tmp_path / "adapters"
    lora.save_adapters(folder, made, model, model.lora, str(tmp_path / "base"), "", "")
    assert lora.read_lora(Config(), base, folder) == model.lora._replace(
        targets=(*sorted(targets),)
    )
    read = lora.initial_adapters(folder, model, mesh, seed=0)
    jax.tree.map(np.testing.assert_array_equal, read, made)

    factors, dense = load_file(folder / hf.ADAPTERS), load_file(tmp_path / "base" / hf.WEIGHTS)
    assert len(factors) == 2 * 2 * len(targets)
    for name, w in dense.items():
        factor = f"base_model.model.{name.removesuffix('weight')}lora_"
        if f"{factor}A.weight" in factors:
            dense[name] = w + 1.5 * factors[f"{factor}B.weight"] @ factors[f"{factor}A.weight"]
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "dense")
    hf.save_tensors(dense, tmp_path / "dense" / hf.WEIGHTS)
    params = combine_params(hf.load_params(tmp_path / "base", model, mesh, np.float32), made)
    expected = hidden_of(hf.load_params(tmp_path / "dense", base, mesh, np.float32), base)
    for layer_loop in ("scan", "unroll"):
        np.testing.assert_allclose(hidden_of(params, model, layer_loop), expected, atol=2e-5)
    merged = hf.hf_tensors(lora.merge_adapters(params, model.lora)[0], base)
    for tensors in (merged, lora.merge_with_folder(tmp_path / "base", params, model, np.float32)):
        found = dict(tensors)
        assert found.keys() == dense.keys()
        for name, x in found.items():
            np.testing.assert_allclose(x, dense[name], rtol=0, atol=1e-6, err_msg=name)
