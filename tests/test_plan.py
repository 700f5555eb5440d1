"""Claims about train_grpo.py --plan: its tables, its suggestions and its exit codes."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from config import Config
from tools import plan_tpu, programs

REPO = Path(__file__).resolve().parent.parent
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SMALL = {"NUM_PRE_Q": "8", "MAX_PROMPT_LENGTH": "128", "MAX_LENGTH_SAMPLE": "128"}
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='the TPU compiler: pip install "jax[tpu]"'
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with only a config.json, without weights and tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def planned(
    slice_name: str, model: Path, *, before: str = "", **env: str
) -> subprocess.CompletedProcess:
    """train_grpo.py --plan as a user runs it, after the Python code `before`."""
    of_tests = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    keep = {k: v for k, v in os.environ.items() if k not in of_tests}
    argv = [str(REPO / "train_grpo.py"), "--plan", slice_name]
    run = f"import runpy, sys; sys.argv = {argv}; sys.path.insert(0, {str(REPO)!r}); {before}\n"
    run += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", run],
        cwd=model,
        text=True,
        capture_output=True,
        timeout=500,
        env=keep | {"MODEL_PATH": str(model)} | SMALL | env,
    )


@pytest.mark.slow
@needs_compiler
def test_the_engine_s_memory_is_its_weights_and_its_pool(model: Path) -> None:
    """The pool has 4 kv heads of 128 numbers: each of the 4 devices holds one of the model's 2, and
    the engine pads their 64 numbers. It has a page of 128 tokens more than it was asked for."""
    layer = 256 * (2 * 256 + 2 * 128 + 3 * 512) + 512 + 2 * 256
    parameters, pool = 8192 * 256 + 2 * layer + 256, 3_000_128 * 2 * 2 * 4 * 128
    gib = (parameters + pool) * 2 / 4 / 2**30
    env = {"ROLLOUT_BACKEND": "sglang_jax", "BATCH_SIZE": "2", "EVAL_EVERY_STEPS": "0"}
    env["SGLANG_JAX_MAX_TOTAL_TOKENS"] = "3000000"
    assert f"{gib:.2f}" == "2.86"
    done = planned("v4-8", model, **env)
    assert done.returncode == 0, done.stderr
    names = re.findall(r"^\| (\w+) \|.* (?:\d+ s|not compiled) \|", done.stdout, re.M)
    assert names == ["engine", "sync_weights", "micro_step", "optimizer_step"]
    assert f"| engine | 0.00 | {gib:.2f} | " in done.stdout
    assert "some will wait" not in done.stdout and "a decoded token" not in done.stdout
    refused = planned("v4-16", model, **env)
    assert refused.returncode == 2 and "runs on one host; v4-16 has 2" in refused.stderr


@pytest.mark.slow
@needs_compiler
def test_a_plan_lists_every_program_of_the_run_and_fits(model: Path) -> None:
    done = planned("v6e-8", model, BETA="0.04")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for program in programs.PROGRAMS:  # the first three columns add up to the fourth
        row = re.search(rf"^\| {program} \| ([\d. |]+) \| yes \| \d+ s \|$", done.stdout, re.M)
        assert row, program
        *parts, total = map(float, row.group(1).split(" | "))
        assert sum(parts) == pytest.approx(total, abs=0.02) and total > 0
    assert "mesh dp,fsdp,tp train=1,8,1 (auto) rollout=8,1,1 (auto; estimated ms" in done.stdout
    assert "a step: 128 sequences of 128 + 128 tokens; per device 16 in each of 1" in done.stdout
    assert re.search(
        r"^a decoded token takes at least [\d.]+ ms, a lower bound: ", done.stdout, re.M
    )
    assert re.search(r"^v6e-8: fits, [\d.]+ of 31.25 GiB in \w+$", done.stdout, re.M)
    assert list(model.iterdir()) == [model / "config.json"]  # the plan leaves no file behind


@pytest.mark.slow
@needs_compiler
def test_a_plan_that_does_not_fit_names_sizes_that_fit(model: Path) -> None:
    # Its programs are soon compiled, and the keys and values of 8192 completions fill a device.
    narrow = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    (model / "config.json").write_text(json.dumps(MODEL | narrow))
    sizes = {"ROLLOUT_PER_DEVICE_BATCH_SIZE": "1024", "TRAIN_PER_DEVICE_MICRO_BATCH_SIZE": "8"}
    fewer_programs = {"EVAL_EVERY_STEPS": "0"}
    done = planned("v5e-1", model, MAX_LENGTH_SAMPLE="1024", **sizes, **fewer_programs)
    assert done.returncode == 3, done.stdout + done.stderr
    assert re.search(r"^\| decode \| .* \| NO \| ", done.stdout, re.M)
    remedy = re.search(
        r"^decode does not fit; "
        r"ROLLOUT_PER_DEVICE_BATCH_SIZE=(\d+) ROLLOUT_BATCH_SIZE=8192 would fit \(([\d.]+) GiB\), "
        r"or MAX_LENGTH_SAMPLE=(\d+) would fit \(([\d.]+) GiB\)$",
        done.stdout,
        re.M,
    )
    assert remedy, done.stdout
    size, first, length, second = map(float, remedy.groups())
    assert 1024 % size == 0 and size < 1024 and length < 1024
    assert max(first, second) <= 15.75 and min(first, second) > 15.75 / 4  # nor far too small
    assert re.search(r"^v5e-1: DOES NOT FIT, ", done.stdout, re.M)


@pytest.mark.slow
@needs_compiler
def test_what_would_fit_for_an_update_is_a_smaller_micro_batch_or_shorter_completions(
    model: Path,
) -> None:
    env = SMALL | {"MODEL_PATH": str(model), "MAX_LENGTH_SAMPLE": "256"}
    cfg = Config.from_env(env | {"TRAIN_PER_DEVICE_MICRO_BATCH_SIZE": "2"})
    plan, _ = plan_tpu.make_plan(cfg, "v5e-1")
    found = plan_tpu.remedies(plan, "v5e-1", "micro_step")
    told = [re.sub(r" \([\d.]+ GiB\)$", "", text) for text in found]
    assert told == [
        "TRAIN_PER_DEVICE_MICRO_BATCH_SIZE=1 would fit",
        "MAX_LENGTH_SAMPLE=128 would fit",
    ]


@pytest.mark.slow
@needs_compiler
def test_where_no_smaller_size_fits_a_larger_slice_is_the_remedy() -> None:
    """Weights and gradients of Qwen2.5-3B and the moments of adamw take 46 of 15.75 GiB."""
    env = SMALL | {"MODEL_PATH": "Qwen/Qwen2.5-3B", "TRAIN_PER_DEVICE_MICRO_BATCH_SIZE": "2"}
    plan, _ = plan_tpu.make_plan(Config.from_env(env), "v5e-1")
    larger = "use a larger slice"
    assert plan_tpu.remedies(plan, "v5e-1", "micro_step") == [
        f"none of its smaller sizes fits either: {larger}"
    ]
    assert plan_tpu.remedies(plan, "v5e-1", "optimizer_step") == [
        f"{larger}, OPTIMIZER=sgd or lion, or BETA=0"
    ]


def test_without_the_compiler_a_plan_says_how_to_get_it(model: Path) -> None:
    done = planned("v6e-8", model, before="sys.modules['libtpu'] = None")  # as if not installed
    message = 'error: the TPU compiler is not installed: pip install "jax[tpu]"\n'
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_a_plan_for_an_unknown_slice_names_the_known_ones(model: Path) -> None:
    done = planned("v9-8", model)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"error: 'v9-8' is not a slice known here; these are: v4-8, .*\n", done.stderr
    )


@needs_compiler
def test_a_plan_stops_at_wrong_settings(model: Path) -> None:
    done = planned("v6e-8", model, TRAIN_MICRO_BATCH_SIZE="7")
    assert done.returncode == 2 and done.stderr.startswith("error: TRAIN_MICRO_BATCH_SIZE=7 must")
    (model / "config.json").unlink()
    done = planned("v6e-8", model)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"error: MODEL_PATH={model} has no config.json; give a Hugging Face folder\n"
    )


@needs_compiler
def test_a_decoded_token_takes_at_least_the_time_that_its_bytes_need() -> None:
    """A device has 16 sequences, and with tp=4 a quarter of 3.09e9 weights of two bytes: 1.54 GB.
    The keys and values of (16 * 512 + 128 * 1024) / 8 tokens, each of 2 * 2 * 2 * 128 bytes in 36
    layers, are 0.64 GB, and four times the logits of the 16 tokens are 0.04 GB."""
    recipe = REPO / "recipes" / "grpo_gsm8k_qwen25_3b_bs128_steps100.yaml"
    plan, _ = plan_tpu.make_plan(Config.from_env({}, recipe), "v6e-8")
    assert plan_tpu.least_time_of_a_token(plan, "v6e-8") == (
        "a decoded token takes at least 1.36 ms, a lower bound: each device moves 2.22 GB of "
        "weights, caches and logits, at 1640 GB/s"
    )
