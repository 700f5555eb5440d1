"""Claims that LoRA is PEFT's: its logits, its gradients, and the folders that each one writes for
the other. PEFT computes them with torch."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import ALL
from safetensors.numpy import load_file, save_file
from small_model import IDS, POSITIONS, train_layout, write_folder, write_gemma_with_images

from config import Config
from model import hf, lora
from model.attention import prompt_rows
from model.logps import softcap
from model.network import ComputeConfig, forward
from model.params import Lora, Params, combine_params, init_params, lm_head, trainable_params

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TARGETS = {"qwen2": ALL, "llama3": ("q_proj", "v_proj", "down_proj"), "gemma3_with_images": ALL}
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
TARGETS["phi3"] = FUSED
OF_LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
TARGETS["qwen3_5"] = (*ALL, *OF_LINEAR)
TARGETS |= {"qwen3_moe": ALL[:4], "qwen3_5_moe": TARGETS["qwen3_5"]}
INPUT, POSITION = IDS[:1], POSITIONS[:1]  # [1, 80], without padding
FLOAT32, ONE_DEVICE = jnp.dtype("float32"), train_layout(1, 1, 1)


def ours(folder: Path, model: Any) -> Params:
    """The base of a folder with random adapters."""
    base = hf.load_params(folder, model, ONE_DEVICE.mesh, np.float32)
    rng, made = np.random.default_rng(0), trainable_params(init_params(model, jax.random.key(0)))
    made = jax.tree.map(lambda x: jnp.float32(0.1 * rng.normal(size=x.shape)), made)
    return combine_params(base, made)


def logits_of(params: Params, model: Any) -> jax.Array:
    """[80, V] float32."""
    compute = ComputeConfig(model, FLOAT32, ONE_DEVICE)
    hidden, _ = forward(params, compute, INPUT, POSITION, prompt_rows(np.ones(INPUT.shape, bool)))
    return softcap(hidden[0] @ lm_head(params).T, model.logits_softcap)


def theirs(folder: Path, adapters: Path) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # torch's own has no float64
    )
    return peft.PeftModel.from_pretrained(base, adapters, is_trainable=True).double()


def torch_logits(model: Any) -> Any:
    return model(input_ids=torch.tensor(INPUT, dtype=torch.long)).logits[0]


def round_to_int8(folder: Path) -> None:
    """Replaces the weights that LORA_BASE_DTYPE=int8 rounds by their rounded numbers."""
    weights = load_file(folder / hf.WEIGHTS)
    for name, w in weights.items():
        module = name.split(".")[-2]
        if module in (*ALL, *OF_LINEAR, *FUSED, "experts") and module not in (
            "in_proj_a",
            "in_proj_b",
        ):
            scale = np.abs(w).max(axis=-1, keepdims=True) / 127  # files hold [out, in]
            weights[name] = np.rint(w / scale) * scale
    save_file(weights, folder / hf.WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "family, int8", [(name, False) for name in TARGETS] + [("phi3", True), ("qwen3_5_moe", True)]
)
def test_peft_opens_an_export_and_has_the_same_logits_and_gradients(
    family: str, int8: bool, tmp_path: Path
) -> None:
    with_images = family == "gemma3_with_images"
    folder = write_gemma_with_images(tmp_path) if with_images else write_folder(tmp_path, family)
    model = dataclasses.replace(hf.read_config(folder), lora=Lora(3, 4.5, TARGETS[family], int8))
    params, exported = ours(folder, model), tmp_path / "adapters"
    if int8:
        round_to_int8(folder)
    lora.save_adapters(exported, params, model, model.lora, str(folder), "", chat_template="")

    other = theirs(folder, exported)
    weights = np.random.default_rng(1).normal(size=(80, model.vocab_size))
    expected = torch_logits(other)
    (expected * torch.tensor(weights)).sum().backward()
    # The norm behind linear attention enlarges the rounding of outputs that are near 0.
    rounding = 1e-4 if family.startswith("qwen3_5") else 1e-5
    expected = expected.detach().numpy()

    @functools.partial(jax.grad, has_aux=True)
    def logits_and_gradient(adapters: Params, base: Params) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(combine_params(base, adapters), model)
        return (logits * np.float32(weights)).sum(), logits

    grads, logits = jax.jit(logits_and_gradient)(trainable_params(params), params)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=rounding)
    other.disable_adapter_layers()
    assert np.abs(torch_logits(other).detach().numpy() - expected).max() > 0.1

    found = dict(hf.hf_tensors(grads, model))
    named = {
        name.replace(".default", ""): x.grad.numpy()
        for name, x in other.named_parameters()
        if x.grad is not None
    }
    # In Qwen3.5 the seven matrices of a full layer and the eight of a linear one.
    matrices = 15 if family.startswith("qwen3_5") else 2 * len(TARGETS[family])
    assert found.keys() == named.keys() and len(found) == 2 * matrices
    tolerance = rounding if int8 else 2 * rounding
    for name, grad in named.items():
        most = np.abs(grad).max()
        assert most > 0.1
        np.testing.assert_allclose(found[name], grad, rtol=0, atol=tolerance * most, err_msg=name)


@pytest.mark.parametrize("family, targets", [("qwen3", ALL), ("phi3", FUSED)])
def test_adapters_that_peft_has_written_are_read(
    family: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, family)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules="all-linear",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    other = peft.get_peft_model(base, config).eval()
    adapters = tmp_path / "adapters"
    other.save_pretrained(adapters)
    assert json.loads((adapters / "adapter_config.json").read_text())["peft_version"]

    found = lora.fetch_base(str(adapters), "")
    assert found == (folder, adapters)
    model = hf.read_config(folder)
    model = dataclasses.replace(model, lora=lora.read_lora(Config(), model, adapters))
    assert (model.lora.rank, model.lora.alpha) == (4, 6.0)
    assert set(model.lora.targets) == set(targets)
    mesh = ONE_DEVICE.mesh
    first = lora.initial_adapters(adapters, model, mesh, seed=0)
    params = combine_params(hf.load_params(folder, model, mesh, np.float32), first)
    expected = torch_logits(other).detach().numpy()
    logits = jax.jit(logits_of, static_argnums=1)(params, model)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    again = tmp_path / "again"
    lora.save_adapters(again, params, model, model.lora, str(folder), "", chat_template="")
    ours, theirs = (load_file(x / hf.ADAPTERS) for x in (again, adapters))
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])
