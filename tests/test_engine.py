"""Runs with the serving engine of ROLLOUT_BACKEND=sglang_jax, as a user starts them.

`pytest -m engine` runs these tests, in an environment as docs/sglang.md describes it.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import RECORDER, Result, environment, finish, metric_records, start, train, wait_for

from model import hf
from model.placement import num_params
from tools.bench import make_random_model

REPO = Path(__file__).resolve().parent.parent
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
    SAVE_EVERY_STEPS=1 SAVE_KEEP=0 LEARNING_RATE=2e-3 DATASET={TINY} EXPORT_HF=none"""
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
    sizes = "hidden_size=256 intermediate_size=256 num_hidden_layers=2 num_attention_heads=2"
    changes = dict(pair.split("=") for pair in sizes.split())
    changes = {name: int(value) for name, value in changes.items()} | {"num_key_value_heads": 1}
    make_random_model(TINY, folder / "qwen2", changes)
    values = json.loads((folder / "qwen2" / "config.json").read_text())
    values |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
    values |= {"attention_bias": False, "tie_word_embeddings": False, "rope_theta": 500.0}
    shapes = folder / "shapes"
    shapes.mkdir()
    for file in TINY.glob("*.json"):
        (shapes / file.name).write_bytes(file.read_bytes())
    (shapes / "config.json").write_text(json.dumps(values))
    make_random_model(shapes, folder / "qwen3", {})
    return folder


def settings(folder: Path, model: str, **more: str) -> dict[str, str]:
    reward = {"REWARD_FN": f"{folder}/even.py:even,{folder}/recorder.py:record"}
    paths = {"MODEL_PATH": str(folder / model), "REWARD_WEIGHTS": "1,0"}
    return SETTINGS | reward | paths | more


def assert_same(ours: Result, theirs: Result, bound: float = 1e-4) -> None:
    """The engine drew the tokens that `naive` drew, and its log-probabilities are the trainer's."""
    assert ours.completions == theirs.completions
    for a, b in zip(ours.records, theirs.records, strict=True):
        assert a.get(DRIFT, 0) <= bound
        assert {name: a[name] for name in SAME if name in a} == pytest.approx(
            {name: b[name] for name in SAME if name in b}, abs=bound
        )


@pytest.mark.parametrize("model, tokens", [("qwen2", "12"), ("qwen3", "60")])
def test_a_run_with_the_engine_is_the_run_without_it(folder, model, tokens) -> None:
    given = settings(folder, model, MAX_LENGTH_SAMPLE=tokens)
    ours = train(folder / f"{model}_engine", **given, **ENGINE)
    theirs = train(folder / f"{model}_naive", **given)
    assert sum(DRIFT in record for record in ours.records) == 3
    assert_same(ours, theirs)
    assert "\nrollout.backend: sglang_jax\n" in ours.lines
    assert ours.errors == ""


def test_the_engine_samples_with_merged_adapters(folder) -> None:
    given = settings(folder, "qwen2", LORA_RANK="4", LEARNING_RATE="3e-2")
    ours = train(folder / "lora_engine", **given, **ENGINE)
    assert_same(ours, train(folder / "lora_naive", **given))
    shares = re.findall(r"\nsglang_jax merged adapters of rank 4: (\S+)% of", ours.lines)
    assert float(shares[0]) == 0 and float(shares[-1]) > 90


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
    assert stopped.code == 128 + signal.SIGTERM and "STOPPED: SIGTERM" in stopped.lines
    second = start(out, given | ENGINE | {"SGLANG_JAX_MAX_TOTAL_TOKENS": "120"}, 1)
    wait_for(second, "^step=1")
    second.kill()
    second.communicate()
    assert finish(start(out, given | ENGINE, 1), out).code == 0
    undisturbed = folder / "qwen2_engine"
    if not undisturbed.exists():
        train(undisturbed, **given, **ENGINE)
    assert metric_records(out) == metric_records(undisturbed)


# Prints how many bytes come and go with a pass of the engine.
FACTS = """
import json, os
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
facts = {}
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
facts["first"], facts["second"] = sample(), sample()
if "BREAK" in os.environ:
    backend._runner.forward = lambda *a, **k: 1 / 0  # in another thread with OVERLAP
    with __import__("contextlib").closing(backend):
        sample()
backend.close()
print(json.dumps(facts))
"""


def in_a_process(folder: Path, **more: str) -> subprocess.CompletedProcess:
    (folder / "recorder.py").write_text("def record(completions, **columns): return [0.0]")
    env = settings(folder, "qwen2") | ENGINE | more | {"PYTHONPATH": str(REPO)}
    env |= {"RECORD_TO": os.devnull, "JAX_PLATFORMS": "cpu"}
    env["OUTPUT_DIR"] = str(folder / "facts")
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "JAX_COMPILATION_CACHE_DIR")}
    command = [sys.executable, "-c", FACTS]
    return subprocess.run(command, env=keep | env, cwd=folder, capture_output=True, text=True)


def test_the_memory_of_the_engine_is_free_while_the_trainer_learns(folder) -> None:
    done = in_a_process(folder)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    # Each time the weights, and keys and values, come and go.
    weights = 4 * num_params(hf.read_config(folder / "qwen2"))
    assert min(facts["first"], facts["second"]) > weights


@pytest.mark.parametrize("more", [{}, {"OVERLAP": "1"}], ids=["one thread", "overlapping"])
def test_an_exception_in_the_engine_ends_the_run_with_its_traceback(folder, more) -> None:
    """The schedule of a TPU computes in another thread than that of the scheduler."""
    done = in_a_process(folder, BREAK="1", **more)
    assert done.returncode == 1
    assert re.search(r"EngineFailed: (Scheduler|ModelWorkerClient) hit an exception", done.stderr)
    assert "ZeroDivisionError: division by zero" in done.stderr
