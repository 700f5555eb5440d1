"""Runs with the serving engine of ROLLOUT_BACKEND=sglang_jax, as a user starts them.

`pytest -m engine` runs these tests, in an environment as docs/sglang.md describes it.
"""

import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest
from runs import (
    RECORDER,
    REPO,
    Result,
    environment,
    few_examples,
    finish,
    metric_records,
    start,
    start_two,
    train,
    train_two,
    wait_for,
)

from extras.sglang import engine_devices, import_engine
from model import hf
from model.placement import num_params
from tools.bench import make_random_model

TINY = REPO / "tiny"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("sgl_jax") is None, reason="sglang-jax is not installed"
    ),
]

# A reward that differs within groups, also for a model with random weights.
REWARD = """
def even(completions, completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""
SETTINGS = environment(
    f"""BATCH_SIZE=2 NUM_PRE_Q=4 MAX_LENGTH_SAMPLE=12 STEPS=3 EVAL_EVERY_STEPS=2 EVAL_PROMPTS=8
    SAVE_EVERY_STEPS=1 SAVE_KEEP=0 LEARNING_RATE=2e-3 DATASET={few_examples()} EXPORT_HF=none"""
)
ENGINE = {"ROLLOUT_BACKEND": "sglang_jax", "SGLANG_JAX_DTYPE": "float32"}
DRIFT = "train-other/sampling_logp_difference/max"
# The second line holds for what is the same, apart from rounding, if the same tokens are drawn.
SAME = (
    "train-reward/total/mean train-seq_len/completion/mean train-other/loss eval/accuracy".split()
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sglang")
    (folder / "even.py").write_text(REWARD)
    (folder / "recorder.py").write_text(RECORDER)  # for processes whose folders lie deeper
    sizes = """hidden_size=256 intermediate_size=256 num_hidden_layers=2 num_attention_heads=2
        num_key_value_heads=1"""
    qwen2 = {name: int(size) for name, size in environment(sizes).items()}
    qwen3 = qwen2 | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
    qwen3 |= {"attention_bias": False, "tie_word_embeddings": False, "rope_theta": 500.0}
    for name, changes in (("qwen2", qwen2), ("qwen3", qwen3), ("stopping", qwen3)):
        make_random_model(TINY, folder / name, changes)
    stop_ids = {"eos_token_id": [*range(0, hf.read_config(TINY).vocab_size, 16)]}
    (folder / "stopping" / "generation_config.json").write_text(json.dumps(stop_ids))
    return folder


def settings(folder: Path, model: str, **more: str) -> dict[str, str]:
    reward = {"REWARD_FN": f"{folder}/even.py:even,{folder}/recorder.py:record"}
    paths = {"MODEL_PATH": str(folder / model), "REWARD_WEIGHTS": "1,0"}
    return SETTINGS | reward | paths | more


# The models and settings of runs on one device.
RUNS = {
    "short": ("qwen2", {}),
    "long": ("qwen3", {"MAX_LENGTH_SAMPLE": "60"}),
    "adapters": ("qwen2", {"LORA_RANK": "4", "LEARNING_RATE": "3e-2"}),
}


@functools.cache
def engine_run(folder: Path, name: str) -> Result:
    model, more = RUNS[name]
    return train(folder / f"{name}_engine", **settings(folder, model, **more), **ENGINE)


def assert_same(ours: Result, theirs: Result, bound: float = 1e-4) -> None:
    """The engine drew the tokens that `naive` drew, and its log-probabilities are the trainer's."""
    assert ours.completions == theirs.completions
    for a, b in zip(ours.records, theirs.records, strict=True):
        assert a.get(DRIFT, 0) <= bound
        assert {name: a[name] for name in SAME if name in a} == pytest.approx(
            {name: b[name] for name in SAME if name in b}, abs=bound
        )


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_the_engine_is_the_run_without_it(folder, name) -> None:
    """Also with adapters, which it merges."""
    ours, (model, more) = engine_run(folder, name), RUNS[name]
    theirs = train(folder / f"{name}_naive", here=False, **settings(folder, model, **more))
    assert sum(DRIFT in record for record in ours.records) == 3
    assert_same(ours, theirs)
    assert "\nrollout.backend: sglang_jax\n" in ours.lines
    assert ours.errors == ""
    shares = re.findall(r"\nsglang_jax merged adapters of rank 4: (\S+)% of", ours.lines)
    assert name != "adapters" or (float(shares[0]) == 0 and float(shares[-1]) > 90)


def test_two_devices_share_the_engine_and_the_filters_are_those_of_naive(folder) -> None:
    filters = {"TEMPERATURE": "0.7", "TOP_K": "20", "TOP_P": "0.9", "MIN_P": "0.02"}
    filters["SAMPLING_SUPPORT"] = "full"
    given = settings(folder, "qwen2", **filters, STEPS="2", EVAL_SAMPLES="2")
    ours = train(folder / "two_engine", devices=2, **given, **ENGINE)
    theirs = train(folder / "two_naive", devices=2, **given)
    # The model has one kv head, which both devices hold.
    assert ours.completions == theirs.completions
    # The engine's log-probabilities are those of the whole vocabulary, as the trainer's are; those
    # of `naive` are of the tokens that the filters leave.
    drifts = [[r[DRIFT] for r in x.records if DRIFT in r] for x in (ours, theirs)]
    assert max(drifts[0]) < 1e-4 < 0.1 < min(drifts[1])


def test_a_run_with_the_engine_that_is_stopped_and_killed_ends_like_the_undisturbed_one(
    folder,
) -> None:
    given, out = settings(folder, "qwen2"), folder / "disturbed"
    first = start(out, given | ENGINE, 1)
    wait_for(first, "^step=0")
    first.send_signal(signal.SIGTERM)
    stopped = finish(first, out)
    assert stopped.code == 128 + signal.SIGTERM, stopped.errors
    assert "STOPPED: SIGTERM" in stopped.lines and stopped.errors == ""
    second = start(out, given | ENGINE | {"SGLANG_JAX_MAX_TOTAL_TOKENS": "120"}, 1)
    wait_for(second, "^step=1")
    second.kill()
    second.communicate()
    assert finish(start(out, given | ENGINE, 1), out).code == 0
    assert metric_records(out) == metric_records(engine_run(folder, "short").out)


# Prints how many bytes come and go with two passes of the engine. The third pass fails.
PASSES = """
import contextlib, json, os
import jax, numpy as np
import data, startup
from config import Config

cfg = Config.from_env(os.environ)
if "OVERLAP" in os.environ:
    from extras import sglang
    arguments = sglang.engine_arguments
    overlapping = {"disable_overlap_schedule": False}
    sglang.engine_arguments = lambda *given: arguments(*given) | overlapping
run, lifecycle, backend, training, _ = startup.start(cfg)
ids = [prompt.ids for prompt in run.train_prompts[:2]]
prompts = data.pad_prompts(ids, 96, run.rollout.stopping.pad_id)
def held():
    return sum(x.nbytes for x in jax.live_arrays())
def sample():
    backend.update_weights(training.params)
    with_weights = held()
    ids, sampling = np.arange(8, dtype=np.int32), run.rollout.sampling
    backend.generate(*prompts, ids, jax.random.key(0), sampling)
    backend.release()
    return with_weights - held()
with contextlib.closing(backend):
    print(json.dumps([sample(), sample()]), flush=True)
    backend._runner.forward = lambda *a, **k: 1 / 0  # in another thread with OVERLAP
    sample()
"""


@pytest.mark.parametrize("more", [{}, {"OVERLAP": "1"}], ids=["one thread", "overlapping"])
def test_memory_of_the_engine_is_free_after_a_pass_and_its_exception_ends_the_run(
    folder, more
) -> None:
    """The schedule of a TPU computes in another thread than that of the scheduler."""
    env = settings(folder, "qwen2") | ENGINE | more | {"PYTHONPATH": str(REPO)}
    env |= {"RECORD_TO": os.devnull, "JAX_PLATFORMS": "cpu"}
    env["OUTPUT_DIR"] = str(folder / "passes")
    env |= {name: os.environ[name] for name in ("PATH", "HOME", "JAX_COMPILATION_CACHE_DIR")}
    command = [sys.executable, "-c", PASSES]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"EngineFailed: (Scheduler|ModelWorkerClient) hit an exception", done.stderr)
    assert "ZeroDivisionError: division by zero" in done.stderr
    # Each time the weights, and keys and values, come and go.
    freed = json.loads(done.stdout.splitlines()[-1])
    assert len(freed) == 2 and min(freed) > 4 * num_params(hf.read_config(folder / "qwen2"))


# ---- An engine in each of two processes ----------------------------------------------------------


@pytest.fixture(scope="module")
def two_engines(folder) -> list[Result]:
    return train_two(folder / "two", 1, **settings(folder, "qwen2", BATCH_SIZE="1"), **ENGINE)


def test_the_engines_of_two_processes_sample_what_one_engine_does(folder, two_engines) -> None:
    [first, second], one = two_engines, engine_run(folder, "short")
    for result in two_engines:
        assert len(result.completions) == 3 * 4 + 3 * 4  # of three steps and three evaluations
        assert result.errors == ""
    assert sorted(first.completions + second.completions) == sorted(one.completions)
    assert_same(first._replace(completions=one.completions), one)


# No thread but the main one may start a program of both processes, and another one tries to.
GUARDED = """
import threading
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from extras import sglang
from infra.hosts import exiting_on_error
main, generate = train_grpo.main, sglang.SglangBackend.generate

def guarded_main(cfg):
    with exiting_on_error(), jax.thread_guard(True):
        main(cfg)

def try_a_program_of_all_devices(layout):
    try:
        jax.device_put(jnp.zeros(8), NamedSharding(layout.mesh, PartitionSpec())) + 1
    except Exception as error:
        print("refused:", error, flush=True)

def checked_generate(self, *arguments):
    leaves = self._runner.model_state_leaves
    assert all(leaf.is_fully_addressable for leaf in leaves)
    shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
    for device in jax.local_devices():
        print("weights:", sum(x.data.nbytes for x in shards if x.device == device), flush=True)
    thread = threading.Thread(target=try_a_program_of_all_devices, args=[self._compute.layout])
    thread.start()
    thread.join()
    return generate(self, *arguments)

train_grpo.main, sglang.SglangBackend.generate = guarded_main, checked_generate
"""


def test_two_engines_of_two_devices_hold_a_part_of_the_weights_and_start_no_program_of_all_devices(
    folder,
) -> None:
    """A step has two passes, and completions end at very different lengths."""
    more = {"MAX_LENGTH_SAMPLE": "60", "ROLLOUT_GLOBAL_BATCH_SIZE": "8", "SAVE_EVERY_STEPS": "0"}
    given = settings(folder, "stopping", STEPS="2", **more)
    ours = train_two(folder / "four", 2, GUARDED, **given, **ENGINE)
    for engine, naive in zip(ours, train_two(folder / "four_naive", 2, **given), strict=True):
        assert_same(engine, naive)
        assert engine.errors == ""
        # Tables and matrices are split, and both devices hold the only kv head and the norms.
        V, D, h = 576, 256, 128
        layer = (2 * D * 2 * h + 3 * D * D) // 2 + 2 * D * h + 2 * D + 2 * h
        held = re.findall("^weights: (.*)$", engine.lines, re.M)
        assert set(held) == {str(4 * (2 * V * D // 2 + 2 * layer + D))}
        refused = re.findall("^refused: .* because the thread guard was set", engine.lines, re.M)
        assert len(refused) == len(held) / 2 == 6  # passes, of two devices each
    longest, mean = (ours[0].records[1][f"train-seq_len/completion/{x}"] for x in ("max", "mean"))
    assert longest > 1.5 * mean


# The engine of process 1 fails in its second pass.
FAILING = """
import os
from extras import sglang
from infra.hosts import exiting_on_error
main, generate = train_grpo.main, sglang.SglangBackend.generate
passes = []

def main_of_script(cfg):
    with exiting_on_error():
        main(cfg)

def failing_generate(self, *arguments):
    passes.append(arguments)
    if os.environ["JAX_PROCESS_ID"] == "1" and len(passes) == 2:
        self._runner.forward = lambda *a, **k: 1 / 0
    return generate(self, *arguments)

train_grpo.main, sglang.SglangBackend.generate = main_of_script, failing_generate
"""


def test_if_one_of_two_engines_fails_or_is_stopped_both_end_and_go_on_to_the_same_records(
    folder, two_engines
) -> None:
    given = settings(folder, "qwen2", BATCH_SIZE="1") | ENGINE
    outs = [folder / "struck" / str(i) for i in range(2)]

    def end(running: list[subprocess.Popen]) -> list[Result]:
        return [finish(process, out) for process, out in zip(running, outs, strict=True)]

    running = start_two(outs, 1, **given)
    wait_for(running[1], "^step=0")
    running[1].send_signal(signal.SIGTERM)
    for stopped in end(running):
        assert stopped.code == 128 + signal.SIGTERM and "STOPPED: SIGTERM" in stopped.lines
        assert stopped.errors == ""
    other, failed = end(start_two(outs, 1, **given, changes=FAILING))
    assert (other.code, failed.code) == (1, 1), other.errors + failed.errors
    gone = "error: another process is gone; its log says why (process 1 failed before a barrier)"
    assert other.errors == f"{gone}\n"
    assert "EngineFailed: Scheduler hit an exception" in failed.errors
    assert "ZeroDivisionError: division by zero" in failed.errors
    results = end(start_two(outs, 1, **given))
    assert [result.code for result in results] == [0, 0]
    assert "\nresumed after " in results[0].lines
    assert metric_records(outs[0]) == metric_records(two_engines[0].out)


def test_the_engine_of_a_second_host_has_its_chips_and_their_memory(monkeypatch) -> None:
    from sgl_jax.srt.managers import scheduler
    from sgl_jax.srt.model_executor import model_runner

    def chip(i: int) -> Mock:
        stats = {"bytes_limit": 2**30, "bytes_in_use": 2**20 * abs(i - 5)}  # most of them on chip 0
        return Mock(id=i, platform="tpu", process_index=i // 4, memory_stats=lambda: stats)

    chips = [chip(i) for i in (0, 1, 2, 3, 6, 4, 7, 5)]
    monkeypatch.setattr(jax, "devices", lambda *_: chips)
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: chips[4:])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "device_count", Mock(side_effect=AssertionError("of all processes")))
    replaced = (scheduler, "create_device_mesh"), (model_runner, "get_available_device_memory")
    for module, name in replaced:  # by import_engine
        monkeypatch.setattr(module, name, getattr(module, name))
    import_engine(engine_devices())
    sizes = {"ici_parallelism": [1, 4], "dcn_parallelism": [1, 1]}
    mesh = scheduler.create_device_mesh(**sizes, device_indexes=None)
    assert [device.id for device in mesh.devices.flat] == [4, 5, 6, 7]
    args = SimpleNamespace(device_indexes=None)
    runner = SimpleNamespace(device="tpu", tp_size=4, server_args=args)
    assert model_runner.ModelRunner.get_available_device_memory(runner) == 2**30 - 2 * 2**20
