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
from infra.sizes import MICRO_SIZES, PASS_SIZES, derive_sizes, smaller_sizes

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
    begins = "error: prefill, decode or drop_sequences does not fit the memory of a device: "
    assert last.startswith(begins) and "Out of memory" in last, last
    assert last.endswith(". Try BATCH_SIZE=512 ROLLOUT_BATCH_SIZE=8192"), last
    assert '"why": "memory ran out"' in (tmp_path / "run" / "summary.json").read_text()


def smaller(settings: str, slice_: tuple[int, int], names: tuple[str, str]) -> list[dict]:
    """The smaller sizes on a slice. slice_: the number of processes and of devices of each."""
    cfg = Config.from_env(environment(f"MODEL_PATH=m {settings}"))
    return smaller_sizes(cfg, derive_sizes(cfg, *slice_), *slice_, names)


def test_smaller_sizes_do_not_change_the_step_and_use_the_user_s_unit() -> None:
    assert smaller("BATCH_SIZE=6", (1, 1), PASS_SIZES) == [
        {"batch_size": n, "rollout_batch_size": 48} for n in (1, 2, 3)
    ]
    # 8 completions of one prompt fill 8 devices.
    assert smaller("BATCH_SIZE=8", (1, 8), PASS_SIZES) == [
        {"batch_size": n, "rollout_batch_size": 64} for n in (1, 2, 4)
    ]
    step = "ROLLOUT_BATCH_SIZE=256 ROLLOUT_PER_DEVICE_BATCH_SIZE=4"
    assert smaller(step, (2, 4), PASS_SIZES) == [
        {"rollout_per_device_batch_size": n} for n in (1, 2)
    ]
    micro = "BATCH_SIZE=8 TRAIN_MICRO_BATCH_SIZE=32"
    assert smaller(micro, (2, 4), MICRO_SIZES) == [
        {"train_micro_batch_size": n} for n in (4, 8, 16)
    ]
    micro = "BATCH_SIZE=8 TRAIN_PER_DEVICE_MICRO_BATCH_SIZE=8 GRAD_ACCUM_STEPS=2"
    assert smaller(micro, (2, 4), MICRO_SIZES) == [
        {"train_per_device_micro_batch_size": n, "grad_accum_steps": 0} for n in (1, 2, 4)
    ]
    assert smaller("BATCH_SIZE=1", (1, 1), PASS_SIZES) == []


@pytest.mark.parametrize(
    "names, text",
    [("", "the memory of a device ran out"), ("ab", "b does not fit the memory of a device")],
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
