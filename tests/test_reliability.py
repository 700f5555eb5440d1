"""A run that was killed ends like an undisturbed run, see also faults/test_faults.py; how signals
before the first step and bad steps end a run."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import (
    DEMANDING,
    REPO,
    Result,
    assert_same_run,
    checkpoint_arrays,
    copy_at_call,
    environment,
    finish,
    run_here,
    start,
    wait_for,
)
from safetensors.numpy import load_file, save_file

import train_grpo

# ---- Killed and stopped --------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters_that_play_in_turns_end_like_an_undisturbed_run_if_they_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill in the third step leaves is copied."""
    game = f"ENVIRONMENT_CLASS={Path(__file__).parent}/games.py:Chance MAX_TURNS=2"
    env = DEMANDING | environment(f"{game} MAX_LENGTH_SAMPLE=64 LORA_RANK=4 LEARNING_RATE=3e-3")
    env |= environment("STEPS=3 EVAL_EVERY_STEPS=0 REWARD_FN= REWARD_WEIGHTS=")
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    with monkeypatch.context() as patch:
        copy_at_call(patch, train_grpo, "update_policy", 3, undisturbed, 2, killed)
        assert run_here(undisturbed, train_grpo, env).code == 0
    result = run_here(killed, train_grpo, env)
    assert result.code == 0 and "\nresumed after 2 of 3 steps" in result.lines
    assert_same_run(killed, undisturbed, 3)


def test_ctrl_c_before_the_first_step_ends_the_run_at_once_without_a_traceback(
    tmp_path: Path,
) -> None:
    process = start(tmp_path, {}, 1)
    wait_for(process, "^backend=")
    process.send_signal(signal.SIGINT)
    result = finish(process, tmp_path)
    assert (result.code, result.errors) == (-signal.SIGINT, "")  # a shell calls this 130


def test_a_run_in_the_background_of_a_script_ignores_ctrl_c_from_the_start(tmp_path: Path) -> None:
    """Here it arrives while jax is imported."""
    (tmp_path / "jax.py").write_text("import os; os.kill(os.getpid(), 2); os._exit(7)")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    for script in ("train_grpo.py", "train_sft.py"):
        command = ["sh", "-c", f"{sys.executable} {REPO}/{script} & wait $!"]
        assert subprocess.run(command, cwd=tmp_path, env=env, capture_output=True).returncode == 7


# ---- Steps that are not finite -------------------------------------------------------------------


def run_short(out: Path, text: str, **env: str) -> Result:
    """A run without a reference, evaluations and other rounds. text: more settings."""
    settings = environment(
        f"""MAX_LENGTH_SAMPLE=32 NUM_MINI_BATCHES=1 DYNAMIC_SAMPLING=0 BETA=0 EVAL_EVERY_STEPS=0
        {text}"""
    )
    return run_here(out, train_grpo, DEMANDING | settings | env)


def test_steps_that_are_not_finite_are_not_applied_and_end_the_run_after_the_limit(
    tmp_path: Path,
) -> None:
    """With this learning rate the weights leave the range of float32 in the first update."""
    settings = "LEARNING_RATE=1e39 LR_SCHEDULE=constant WARMUP_RATIO=0 SAVE_KEEP=0"
    result = run_short(tmp_path, settings)
    assert (result.code, result.errors.splitlines()[-1]) == (
        1,
        "error: step 2: param_norm is inf, the last of 3 such steps in a row. Lower LEARNING_RATE?",
    )
    assert result.lines.splitlines()[-1].startswith("verdict: non_finite_steps: ")
    told = re.findall("update (.) of this step was not applied: param_norm is inf\n", result.lines)
    assert told == ["1", "1", "1"]
    good, bad = checkpoint_arrays(tmp_path, 1), checkpoint_arrays(tmp_path, 2)
    assert all(good[name].tobytes() == bad[name].tobytes() for name in good)


def test_weights_that_are_not_finite_end_the_run_with_a_line_that_names_them(
    tmp_path: Path,
) -> None:
    """They sample equal nonsense, whose equal rewards are no cause."""
    model = tmp_path / "model"
    shutil.copytree(REPO / "tiny", model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    result = run_short(tmp_path / "run", "", MODEL_PATH=str(model))
    assert (result.code, result.errors.splitlines()[-1]) == (
        1,
        "error: step 2: loss is nan, the last of 3 such steps in a row. Are the weights of "
        "MODEL_PATH finite?",
    )
    assert "equal" not in result.lines and "differ by" not in result.lines
