"""infra/chips.py: a run that needs too much memory names the program and a smaller size."""

import contextlib
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from runs import FASTER_TO_COMPILE, REPO, environment

from config import Config
from infra import chips
from infra.sizes import MICRO_SIZES, PASS_SIZES, derive_sizes, suggest_smaller_size

ADDRESS_SPACE = 6 * 10**9  # bytes, of which jax needs a part


def test_a_program_that_exhausts_the_memory_is_named_with_the_size_to_try(tmp_path: Path) -> None:
    settings = "BATCH_SIZE=1024 NUM_PRE_Q=8 MAX_LENGTH_SAMPLE=1024 STEPS=1 EVAL_EVERY_STEPS=0"
    extra = {"JAX_PLATFORMS": "cpu", "OUTPUT_DIR": str(tmp_path / "run"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["prlimit", f"--as={ADDRESS_SPACE}", sys.executable, "train_grpo.py"],
        cwd=REPO,
        env=environment(settings) | FASTER_TO_COMPILE | extra,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    begins = "error: prefill, decode or drop_sequences does not fit in the memory of a device: "
    assert last.startswith(begins) and "Out of memory" in last, last
    assert last.endswith(". Try BATCH_SIZE=512 ROLLOUT_BATCH_SIZE=8192"), last
    assert '"why": "memory ran out"' in (tmp_path / "run" / "summary.json").read_text()


# Processes x local devices, the settings of a program that is too large -> what to try.
SMALLER = """
1x1 BATCH_SIZE=6 -> BATCH_SIZE=3 ROLLOUT_BATCH_SIZE=48
1x8 BATCH_SIZE=8 NUM_PRE_Q=2 -> BATCH_SIZE=4 ROLLOUT_BATCH_SIZE=16
1x8 BATCH_SIZE=4 NUM_PRE_Q=2 ->
2x4 ROLLOUT_BATCH_SIZE=256 ROLLOUT_PER_DEVICE_BATCH_SIZE=4 -> ROLLOUT_PER_DEVICE_BATCH_SIZE=2
2x4 BATCH_SIZE=8 TRAIN_MICRO_BATCH_SIZE=32 -> TRAIN_MICRO_BATCH_SIZE=16
2x4 BATCH_SIZE=8 GRAD_ACCUM_STEPS=2 -> TRAIN_PER_DEVICE_MICRO_BATCH_SIZE=4 GRAD_ACCUM_STEPS=0
"""


@pytest.mark.parametrize("row", SMALLER.strip().splitlines())
def test_a_smaller_size_does_not_change_the_step_and_has_the_user_s_unit(row: str) -> None:
    case, advice = row.split(" ->")
    slice_, settings = case.split(" ", 1)
    processes, devices = map(int, slice_.split("x"))
    cfg = Config.from_env(environment(f"MODEL_PATH=m {settings}"))
    names = MICRO_SIZES if "TRAIN" in advice else PASS_SIZES
    sizes = derive_sizes(cfg, processes, devices)
    suggested = suggest_smaller_size(cfg, sizes, processes, devices, names)
    more_devices = "Use more devices, or a lower MAX_LENGTH_SAMPLE or MAX_PROMPT_LENGTH"
    assert suggested == (f"Try{advice}" if advice else more_devices)


@pytest.mark.parametrize(
    "names, text",
    [("", "the memory of a device ran out"), ("ab", "b does not fit in the memory of a device")],
)
def test_the_inner_program_is_named(names: str, text: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="3"), chips.exit_on_oom(Config.from_env({})):
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(chips.attribute_oom_to(name))
            jax.device_get(jax.jit(lambda: jnp.zeros(2**45) + 1)())
    asked = "Out of memory allocating 140737488355328 bytes"
    remedy = "Use more devices; OPTIMIZER=sgd or lion, or BETA=0, need less"
    assert capsys.readouterr().err == f"error: {text}: {asked}. {remedy}\n"


def test_other_errors_of_jax_are_not_about_memory() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError), chips.exit_on_oom(None):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
