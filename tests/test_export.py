"""Claims about the export: the trained weights in a Hugging Face folder that transformers reads."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formula_model import FAMILIES, write_folder
from safetensors import safe_open
from test_train import finish, start, start_two, train

from models import hf
from models.attention import prompt_rows
from models.model import Compute, Params, forward, lm_head
from runtime.layout import make_mesh
from update import Optimizer, TrainState, init_state, optimizer_step

REPO = Path(__file__).resolve().parent.parent


def tensors(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as content:
            found |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_the_source_s_folder_with_the_new_weights(
    tmp_path: Path, family: str, dtype: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    write_folder(source, family)
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    model, mesh = hf.read_config(source), make_mesh("MESH_SHAPE", "2,2,2", jax.devices())
    params = hf.load_params(source, model, mesh, jnp.float32)
    hf.save_model(target, params, model, source, dtype=dtype, shard_size=20_000)
    before, after = tensors(source), tensors(target)
    assert before.keys() == after.keys(), "tied heads stay tied"
    for name, tensor in after.items():
        assert tensor.dtype == jnp.dtype(dtype)
        assert (tensor == before[name].astype(dtype)).all(), name
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys() and len(set(index["weight_map"].values())) > 1
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (target, source))
    named = "torch_dtype" if "torch_dtype" in theirs else "dtype"
    assert ours == theirs | {named: dtype}
    assert (target / "generation_config.json").read_text() == '{"eos_token_id": [1, 2]}'


def test_an_export_replaces_an_earlier_export_and_no_other_file(tmp_path: Path) -> None:
    source, model = REPO / "tiny", hf.read_config(REPO / "tiny")
    mesh = make_mesh("MESH_SHAPE", "1,1,1", jax.devices()[:1])
    params = hf.load_params(source, model, mesh, jnp.float32)
    (tmp_path / "notes.md").write_text("mine")
    hf.save_model(tmp_path, params, model, source, dtype="float32", shard_size="1MB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    hf.save_model(tmp_path, params, model, source, dtype="float32")
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "config.json",
        "exported_from.json",
        "model.safetensors",
        "notes.md",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    hf.load_params(tmp_path, hf.read_config(tmp_path), mesh, jnp.float32)
    hf.load_tokenizer(tmp_path)


def test_the_export_of_an_export_names_the_model_that_was_trained(tmp_path: Path) -> None:
    model = hf.read_config(REPO / "tiny")
    mesh = make_mesh("MESH_SHAPE", "1,1,1", jax.devices()[:1])
    params = hf.load_params(REPO / "tiny", model, mesh, jnp.float32)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for source, target in ((REPO / "tiny", first), (first, second), (second, third)):
        hf.save_model(target, params, model, source, dtype="float32")
    for source, target in ((REPO / "tiny", first), (first, second), (second, third)):
        told = json.loads((target / "exported_from.json").read_text())
        assert told == {"model": str(source)}
    hf.save_model(third, params, model, first, dtype="float32")  # it replaces an earlier export
    assert json.loads((third / "exported_from.json").read_text()) == {"model": str(first)}


def test_the_chat_template_of_a_run_is_exported_and_replaces_the_tokenizer_s(
    tmp_path: Path,
) -> None:
    source, model, template = REPO / "tiny", hf.read_config(REPO / "tiny"), tmp_path / "mine.jinja"
    mesh = make_mesh("MESH_SHAPE", "1,1,1", jax.devices()[:1])
    params = hf.load_params(source, model, mesh, jnp.float32)
    template.write_text("{{ messages[0]['content'] }}!")
    target = tmp_path / "hf"
    hf.save_model(target, params, model, source, dtype="float32", chat_template=str(template))
    tokenizer = hf.load_tokenizer(target)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "Hi!"


def test_a_model_that_no_run_has_exported_is_not_overwritten(tmp_path: Path) -> None:
    shutil.copytree(REPO / "tiny", tmp_path / "mine" / "hf")
    before = (tmp_path / "mine" / "hf" / "config.json").read_bytes()
    for env in (
        {"EXPORT_HF": str(tmp_path / "mine" / "hf")},
        {"OUTPUT_DIR": str(tmp_path / "mine")},
        {"OUTPUT_DIR": str(tmp_path / "mine"), "MODEL_PATH": str(tmp_path / "mine" / "hf")},
    ):
        result = finish(start(tmp_path / "run", env, 1), tmp_path / "run")
        assert result.code == 2, result.lines
        assert "EXPORT_HF=" in result.errors or "its hf" in result.errors
        assert (tmp_path / "mine" / "hf" / "config.json").read_bytes() == before


@pytest.mark.slow
def test_two_processes_export_the_same_weights_as_one_process(tmp_path: Path) -> None:
    one = train(tmp_path / "one", BATCH_SIZE="4", NUM_PRE_Q="4", TRAIN_MICRO_BATCH_SIZE="16")
    outs = [tmp_path / "two", tmp_path / "two_1"]
    each = {"BATCH_SIZE": "2", "NUM_PRE_Q": "4", "TRAIN_MICRO_BATCH_SIZE": "8"}
    running = start_two(outs, 1, **each, MESH_SHAPE="1,2,1", EXPORT_HF=str(tmp_path / "elsewhere"))
    results = [finish(process, out) for process, out in zip(running, outs, strict=True)]
    assert [result.code for result in (one, *results)] == [0, 0, 0]
    ours, theirs = tensors(tmp_path / "one" / "hf"), tensors(tmp_path / "elsewhere")
    assert ours.keys() == theirs.keys() and not (outs[0] / "hf").exists()
    start = tensors(REPO / "tiny")
    assert any((ours[name] != start[name]).any() for name in ours), "it was trained"
    # Adam divides by the size of a gradient, so that the rounding of one near 0 counts: at most a
    # tenth of the learning rate of 1e-4 here.
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parity
def test_transformers_opens_the_export_of_a_run_with_the_same_logits(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="a parity test")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert train(tmp_path / "run", BATCH_SIZE="2", LEARNING_RATE="1e-3").code == 0
    folder = tmp_path / "run" / "hf"
    ids = np.arange(3, 43).reshape(2, 20)
    theirs = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor(ids)).logits.detach().numpy()
    model, mesh = hf.read_config(folder), make_mesh("MESH_SHAPE", "1,1,1", jax.devices()[:1])
    params = hf.load_params(folder, model, mesh, jnp.float32)
    positions = np.broadcast_to(np.arange(20), (2, 20))
    compute = Compute(model, jnp.dtype("float32"))
    rows = prompt_rows(jnp.ones(ids.shape, bool))
    hidden, _ = forward(params, compute, jnp.asarray(ids), jnp.asarray(positions), rows)
    np.testing.assert_allclose(hidden @ lm_head(params).T, theirs, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(folder).chat_template


@pytest.mark.parametrize("wrong", ["gradient", "loss"])
def test_an_update_that_is_not_finite_leaves_the_state_unchanged_to_the_bit(wrong: str) -> None:
    model, mesh = hf.read_config(REPO / "tiny"), make_mesh("MESH_SHAPE", "1,1,1", jax.devices()[:1])
    settings = {"optimizer": Optimizer("adamw", weight_decay=0.1, clip_norm=0.5), "model": model}

    def weights() -> Params:  # optimizer_step reuses the memory of the weights that it is given
        return hf.load_params(REPO / "tiny", model, mesh, jnp.float32)

    def step(grads: Params, loss: float) -> TrainState:
        state = init_state(weights(), **settings)
        return optimizer_step(state, grads, np.float32(0.1), np.float32(loss), **settings)[0]

    grads = weights()
    bad = grads.replace(embed=grads.embed.at[0, 0].set(jnp.nan)) if wrong == "gradient" else grads
    before = init_state(weights(), **settings)
    after = step(bad, np.nan if wrong == "loss" else 1.0)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    changed = step(weights(), 1.0)
    assert (np.asarray(changed.params.embed) != np.asarray(before.params.embed)).any()
    assert int(changed.opt_state[0].count) == 1
