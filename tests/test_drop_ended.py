"""Sequences that have ended leave the batch in decoding, and change nothing by it."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sampling import MODEL, NEVER, PAD, PROMPTS, assert_same, layout, weights
from test_sampling import run as sample
from test_train import finish, start_two, train

from config import Config
from data import pad_prompts
from models.draw import Sampling
from models.model import Compute
from runtime.parsing import REPO
from sampling import (
    Stopping,
    begin,
    decode,
    drop_sequences,
    prefill,
    smaller_batches,
    stage_ends,
)
from tools import programs as device_programs
from tools.make_random import make_random
from tools.plan_tpu import make_plan
from update import sync_weights


def often_stopping() -> tuple[int, ...]:
    """Stop ids with which the sequences have very different lengths."""
    drawn = sample().completion_ids
    return tuple({int(drawn[i, t]) for i, t in ((0, 1), (3, 4), (9, 7))})


@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
@pytest.mark.parametrize(
    "mesh",
    [(1, 1, 1), pytest.param((2, 1, 1), marks=pytest.mark.slow), (2, 1, 4)],
    ids=str,
)
def test_sequences_that_leave_the_batch_change_nothing(
    mesh: tuple[int, int, int], layer_loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, stop_ids = Sampling(0.7, top_k=9, replay=True), often_stopping()
    how = {"mesh": mesh, "layer_loop": layer_loop, "stop_ids": stop_ids, "T": 24}
    expected = sample(sampling, **how)
    assert (expected.computed_tokens == expected.lengths.max()).all()
    monkeypatch.setattr("sampling.STAGE_TOKENS", 8)
    found = sample(sampling, **how, drop=True)
    assert_same(found, expected)
    for ours, theirs, length in zip(found.support, expected.support, found.lengths, strict=True):
        assert [{*row} for row in ours[:length]] == [{*row} for row in theirs[:length]]
    assert (found.lengths <= found.computed_tokens).all()
    assert len({*found.lengths}) > 5, "the sequences have many lengths"
    share = {16: 0.7, 8: 0.75, 2: 0.95}[16 // math.prod(mesh)]  # by the sequences of a device
    assert found.computed_tokens.sum() < share * expected.computed_tokens.sum()


def test_sequences_leave_at_few_sizes_and_a_second_pass_compiles_none(monkeypatch) -> None:
    monkeypatch.setattr("sampling.STAGE_TOKENS", 8)
    stop_ids = often_stopping()
    assert smaller_batches(32) == [24, 16, 12, 8, 4, 2]
    assert smaller_batches(5) == [4, 3, 2, 1] and smaller_batches(1) == []
    before, programs = decode._cache_size(), []
    for key in (0, 1, 0, 1):
        sample(T=24, stop_ids=stop_ids, key=key, drop=True, layer_loop="unroll")
        programs.append(decode._cache_size() - before)
    stages = stage_ends(24, "unroll")
    assert programs[3] == programs[1] <= len(stages) * (1 + len(smaller_batches(16)))


@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
def test_the_caches_and_all_that_is_known_of_a_sequence_lie_on_its_device(layer_loop) -> None:
    where = layout(2, 1, 4)
    compute = Compute(MODEL, jnp.dtype("float32"), where, layer_loop=layer_loop)
    params = sync_weights(MODEL, where.mesh, compute.dtype, layer_loop)(
        jax.tree.map(np.float32, weights())
    )
    prompts = pad_prompts(PROMPTS * 4, 11, PAD)
    how = {"sampling": Sampling(top_k=9, replay=True), "stopping": Stopping(24, (NEVER,), PAD)}
    prefix, ids = prefill(params, compute, *prompts), np.arange(32, dtype=np.int32)
    state = begin(compute, *prompts, prefix, ids, jax.random.key(0), width=8, **how)
    smaller, *left = drop_sequences(compute, state, size=3)
    for decoding, of_device in ((state, 4), (smaller, 3)):
        names = ("completion", "sequence_ids", "last_position", "token", "done", "drawn")
        for x in jax.tree.leaves([getattr(decoding, name) for name in names]):
            axis = int(x.ndim == 5)
            assert x.sharding.shard_shape(x.shape)[axis] == of_device == x.shape[axis] // 8, x.shape
    assert {x.sharding.shard_shape(x.shape)[0] for x in jax.tree.leaves(left)} == {1}


# ---- Runs ----------------------------------------------------------------------------------------


def small_model(folder: Path) -> Path:
    """Makes a model that ends a completion at each token with probability 1/32 or so."""
    small = folder / "small"
    make_random(REPO / "tiny", small, {"hidden_size": 32, "num_hidden_layers": 1})
    stop_ids = list(range(0, json.loads((small / "config.json").read_text())["vocab_size"], 32))
    (small / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
    return small


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    small = small_model(tmp_path_factory.mktemp("models"))
    text = "STEPS=2 BATCH_SIZE=8 NUM_PRE_Q=4 MAX_LENGTH_SAMPLE=128 EXPORT_HF=none EVAL_PROMPTS=16"
    text += f" EVAL_EVERY_STEPS=2 MODEL_PATH={small}"
    return dict(pair.split("=") for pair in text.split())


def test_a_run_draws_the_same_and_computes_less(tmp_path: Path, settings: dict[str, str]) -> None:
    expected = train(tmp_path / "off", **settings, SWITCHED_OFF="drops_ended")
    result = train(tmp_path / "auto", **settings)
    assert result.completions == expected.completions
    for ours, theirs in zip(result.records, expected.records, strict=True):
        for name in {"train-other/loss", "train-other/grad_norm", "eval/reward/total/mean"} & {
            *ours
        }:
            assert ours[name] == pytest.approx(theirs[name], 1e-4, 1e-6), name
    name = "throughput/rollout/computed_per_token"
    ours, theirs = ([x[name] for x in r.records if name in x] for r in (result, expected))
    assert max(ours) < 1.4 and min(theirs) > 2


@pytest.mark.slow
def test_two_processes_draw_the_same(tmp_path: Path, settings: dict[str, str]) -> None:
    expected = train(tmp_path / "one", **settings, SWITCHED_OFF="drops_ended")
    outs = [tmp_path / "first", tmp_path / "second"]
    started = start_two(outs, 2, **settings | {"BATCH_SIZE": "4"})
    results = [finish(process, out) for process, out in zip(started, outs, strict=True)]
    assert [result.code for result in results] == [0, 0], results[0].errors
    texts = [pair for result in results for pair in result.completions]
    assert sorted(texts) == sorted(expected.completions)


# ---- The plan ------------------------------------------------------------------------------------


def test_a_plan_has_a_smaller_batch_only_where_a_device_has_several_sequences() -> None:
    pytest.importorskip("libtpu", reason='the TPU compiler: pip install "jax[tpu]"')
    text = "MODEL_PATH=Qwen/Qwen2.5-0.5B-Instruct NUM_PRE_Q=8 EVAL_PROMPTS=8 MAX_LENGTH_SAMPLE=256"
    given = dict(pair.split("=") for pair in text.split())
    for prompts, runs in (("1", False), ("2", True)):
        plan, _ = make_plan(Config.from_env(given | {"BATCH_SIZE": prompts}), "v6e-8")
        assert device_programs.runs(plan, "drop_sequences") is runs
    assert device_programs.call(plan, "drop_sequences")[2] == {"size": 1}
