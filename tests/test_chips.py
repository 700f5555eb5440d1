"""runtime/chips.py: a run that needs too much memory names the program and a smaller size."""

import ast
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from forked import FASTER_TO_COMPILE
from test_config import env
from test_train import REPO

import train_grpo
from config import Config
from runtime import chips
from runtime.sizes import MICRO_SIZES, PASS_SIZES, derive, smaller_sizes
from test_smoke import code
from tools import programs

ADDRESS_SPACE = 6 * 10**9  # bytes, of which jax needs a part
# Settings, the beginning and the end of the line.
RUNS = [
    pytest.param(
        "BATCH_SIZE=1024 NUM_PRE_Q=8 MAX_LENGTH_SAMPLE=1024 LAYER_LOOP=scan",
        "error: prefill, decode or drop_sequences does not fit the memory of a device: ",
        ". Try BATCH_SIZE=512 ROLLOUT_BATCH_SIZE=8192",
        id="rollout",
    ),
    pytest.param(
        "BATCH_SIZE=256 NUM_PRE_Q=8 MAX_LENGTH_SAMPLE=24 TRAIN_MICRO_BATCH_SIZE=2048 REMAT=none",
        "error: micro_step or optimizer_step does not fit the memory of a device: ",
        ". Try TRAIN_MICRO_BATCH_SIZE=1024",
        id="update",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("settings, begins, ends", RUNS)
def test_a_program_that_exhausts_the_memory_is_named_with_the_size_to_try(
    tmp_path: Path, settings: str, begins: str, ends: str
) -> None:
    program = (
        f"import resource, runpy; resource.setrlimit(resource.RLIMIT_AS, ({ADDRESS_SPACE},) * 2); "
        f"runpy.run_path('train_grpo.py', run_name='__main__')"
    )
    more = {"JAX_PLATFORMS": "cpu", "OUTPUT_DIR": str(tmp_path / "run"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPO,
        env=env(settings) | FASTER_TO_COMPILE | more | {"STEPS": "1", "EVAL_EVERY_STEPS": "0"},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(begins) and last.endswith(ends) and "Out of memory" in last, last


def smaller(settings: str, slice_: tuple[int, int], names: tuple[str, str]) -> list[dict]:
    """The smaller sizes on a slice. slice_: the number of processes and of devices of each."""
    cfg = Config.from_env(env(f"MODEL_PATH=m {settings}"))
    return smaller_sizes(cfg, derive(cfg, *slice_), *slice_, names)


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


def test_other_errors_of_jax_are_not_about_memory() -> None:
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    cfg = Config.from_env({})
    assert chips.out_of_memory(cfg, derive(cfg, 1, 1), {}, error) == ""


def test_every_function_that_waits_for_a_device_exists() -> None:
    """Under another name its error would not say which size to lower."""
    nodes = [node for file in code().values() for node in ast.walk(ast.parse(file.read_text()))]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert set(train_grpo.PROGRAMS_OF_FUNCTION) <= defined


@pytest.mark.parametrize("name", ["v6e-8", "v4-16"])
def test_the_line_names_the_slice_with_which_the_plan_checks_the_size(name: str) -> None:
    pytest.importorskip("libtpu", reason='the TPU compiler: pip install "jax[tpu]"')
    assert chips.slice_of(programs.slice_devices(name)) == name
