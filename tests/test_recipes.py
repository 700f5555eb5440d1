"""recipes/: every recipe begins with its command, and makes the sizes of the run of its name."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from config import Config
from infra.sizes import derive_sizes

REPO = Path(__file__).resolve().parent.parent
RECIPES = sorted((REPO / "recipes").glob("*.yaml"))
SMOKE_4B = {"ROLLOUT_GLOBAL_BATCH_SIZE": "16", "ROLLOUT_PER_DEVICE_BATCH_SIZE": "1"}
SMOKE_4B |= {"NUM_PRE_Q": "2", "TRAIN_PER_DEVICE_MICRO_BATCH_SIZE": "1"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_begins_with_the_command_that_runs_it(recipe: Path) -> None:
    """Commands are the indented lines of the comment at the top."""
    top = recipe.read_text(encoding="utf-8").split("\n\n")[0].replace("\\\n#", "")
    commands = [shlex.split(line) for line in re.findall(r"^#     (.*)$", top, re.M)]
    assert commands and f"recipes/{recipe.name}" in commands[-1]
    for words in commands:
        env = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        assert words[len(env)] in ("./run_tpu.sh", "python")
        Config.from_env(env, recipe)


# recipe, environment, (processes, local devices), (prompts per pass, passes per step,
# sequences per step per process, sequences per micro-step, micro-steps)
SIZES = [
    ("grpo_gsm8k_qwen25_3b_bs128_steps100", {}, (1, 8), (16, 1, 128, 16, 8)),
    ("grpo_gsm8k_qwen25_7b_v4_16_smoke", {}, (2, 4), (2, 1, 16, 4, 4)),
    ("grpo_gsm8k_qwen25_7b_v4_16_smoke", SMOKE_4B, (2, 4), (4, 2, 16, 4, 4)),
    ("grpo_gsm8k_bs128_steps100", {}, (2, 4), (8, 1, 64, 16, 4)),
    ("tunix_qwen3_4b_10steps", {}, (1, 4), (2, 1, 4, 4, 1)),
    ("tunix_qwen3_4b_10steps_sglang", {}, (1, 4), (2, 1, 4, 4, 1)),
    ("tunix_qwen3_4b_10steps_sglang", {}, (2, 4), (2, 1, 4, 4, 1)),
    ("grpo_gsm8k_qwen25_7b_v4_8_sglang_smoke", {}, (1, 4), (1, 1, 4, 4, 1)),
    ("dapo_qwen25_7b", {}, (16, 4), (2, 16, 512, 4, 8)),
    ("qwen3_calculator", {}, (1, 8), (4, 4, 128, 32, 4)),
    ("smollm2_arithmetic", {}, (1, 1), (8, 1, 128, 32, 4)),
    ("guess", {}, (1, 1), (8, 1, 128, 16, 8)),
    ("math", {}, (1, 8), (16, 1, 128, 16, 8)),
    ("math", {"ROLLOUT_GLOBAL_BATCH_SIZE": "8"}, (1, 1), (8, 1, 64, 16, 4)),
    ("smollm2_gsm8k", {}, (1, 1), (8, 1, 64, 16, 4)),
    ("gsm8k_135m", {}, (1, 1), (8, 1, 64, 4, 16)),
    ("lora_gemma3_1b_v5e8", {}, (1, 8), (16, 1, 128, 128, 1)),
    ("lora_gemma2_2b_v5e8", {}, (1, 8), (16, 1, 128, 128, 1)),
    ("tiny", {}, (1, 1), (16, 1, 128, 8, 16)),
    ("tiny", {}, (2, 4), (8, 1, 64, 8, 8)),
]


@pytest.mark.parametrize("name, env, devices, sizes", SIZES)
def test_a_recipe_makes_the_published_sizes(
    name: str, env: dict[str, str], devices: tuple[int, int], sizes: tuple[int, ...]
) -> None:
    cfg = Config.from_env(env, REPO / "recipes" / f"{name}.yaml")
    made = derive_sizes(cfg, *devices)
    rollout = (made.prompt_batch_size, made.passes_per_step, made.local_batch)
    assert sizes == (*rollout, made.micro_batch_size, made.grad_accum_steps)


def test_published_runs_keep_what_the_published_runs_kept() -> None:
    """At most one checkpoint and curves in W&B; smoke runs save nothing."""
    for recipe in RECIPES:
        cfg, name = Config.from_env({}, recipe), recipe.stem
        kept = (cfg.save_every_steps, cfg.export_hf, cfg.eval_every_steps)
        if "smoke" in name or "tunix" in name:
            assert kept == (0, "none", 0), name
        if "gsm8k_bs128" in name:
            assert kept == (0, "", 10), name
        if "bs128_steps100" in name and "qwen25_3b" in name:
            assert kept == (cfg.steps, "", 10), name
            assert (cfg.steps, cfg.max_length_sample, cfg.num_pre_q) == (100, 1024, 8)
            assert (cfg.wandb_mode, cfg.wandb_project) == ("online", "mllm-jax-grpo-gsm8k")


@pytest.mark.parametrize(
    "recipe, module, package",
    [("gym", "reasoning_gym", "reasoning-gym"), ("math_answers", "math_verify", "math-verify")],
)
def test_without_its_package_a_recipe_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, recipe: str, module: str, package: str
) -> None:
    monkeypatch.delitem(sys.modules, f"recipes.{recipe}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # it cannot be found now
    with pytest.raises(SystemExit, match=rf"{module}.*; pip install {package}$"):
        importlib.import_module(f"recipes.{recipe}")
