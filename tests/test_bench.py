"""Claims about the tools: they run from any folder, and the benches print what the docs say."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loss import Objective
from models import hf
from models.model import Compute, ModelConfig, init_params
from models.placement import attention_flops, update_flops
from tools import bench
from tools.make_random import change, make_random
from update import MicroBatch, micro_step

REPO = Path(__file__).resolve().parent.parent


def printed(script: str, *args: str, cwd: Path, **env: str) -> str:
    """What the script prints when a user runs it in the folder `cwd`."""
    keep = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, str(REPO / script), *args],
        cwd=cwd,
        env=keep | env,
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_tool_runs_from_any_folder(tmp_path: Path) -> None:
    help_text = printed("tools/make_tiny.py", "--help", cwd=tmp_path)
    assert help_text.startswith("usage: make_tiny.py")
    assert not [*tmp_path.iterdir()]


# ---- bench.py step -------------------------------------------------------------------------------


@pytest.fixture
def race(tmp_path: Path) -> ModelConfig:
    """The model of a run without --model."""
    values = json.loads((REPO / "tiny" / "config.json").read_text())
    values |= dict(change(text) for text in bench.RANDOM_MODEL)
    (tmp_path / "config.json").write_text(json.dumps(values))
    return hf.read_config(tmp_path)


def flops_of_an_update(model: ModelConfig, P: int, K: int, S: int, T: int) -> float:
    """S, T: the tokens of each prompt without its last, and of each completion."""
    return update_flops(model, np.full(P, S), np.full((P, K), T))


def test_the_flops_of_an_update_by_hand(race: ModelConfig) -> None:
    # The matrices of a layer have 2*256*256 + 2*256*128 + 3*256*1024 = 983,040 numbers.
    # 8 prompts of 63 tokens and 32 * 128 tokens of completions are 4600 tokens, with
    # 8 * 63 * 63 / 2 + 32 * (128 * 63 + 128 * 128 / 2) = 536,068 pairs of a query and a key.
    layers = 2 * 4 * 983_040 * 4600 + 4 * 256 * 4 * 536_068
    forward = layers + 2 * 256 * 4096 * 32 * 128
    assert forward == 46_961_541_120
    assert flops_of_an_update(race, 8, 4, 63, 128) == 3 * forward
    assert flops_of_an_update(race, 4, 8, 383, 256) == pytest.approx(336.0e9, rel=1e-4)


def test_the_flops_of_an_update_are_those_that_xla_counts(race: ModelConfig) -> None:
    R, G, S, T = 8, 2, 32, 32
    # XLA counts the body of the loop over the layers once.
    model = dataclasses.replace(race, num_layers=1, vocab_size=512)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))

    def array(*shape: int, dtype: type = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    n = R // G  # each prompt has a row with its completions
    row, tokens, logps = array(G, S + n * T), array(R, T), array(R, T, dtype=jnp.float32)
    targets, places = array(G, n * T), array(G, n, T)
    numbers, scalar, advantages = array(R), array(dtype=jnp.float32), array(R, dtype=jnp.float32)
    lowered = micro_step.lower(
        params,
        params,
        MicroBatch(row, row, row, row, targets, places, numbers, tokens, logps, advantages),
        dict.fromkeys(("num_tokens", "num_sequences", "num_top_tokens"), scalar),
        objective=Objective(),
        temperature=1.0,
        compute=Compute(model, jnp.dtype("float32")),
    )
    update = flops_of_an_update(model, G, n, S, T)
    # The program also computes scores that no query sees: half of each prompt's, and all but T/2 of
    # the T + T/4 tokens of completions with which each token of a completion is compared.
    masked = 3 * attention_flops(model, G * S * S / 2 + R * T * (T + T / 4 - T / 2))
    counted = lowered.cost_analysis()["flops"]  # with the operations that are no matmuls
    assert 1.0 < counted / (update + masked) < 1.02


@pytest.mark.parametrize("mean_tokens, stop_ids", [(0, []), (256, [0, 256, 512])])
def test_one_token_of_many_or_none_ends_a_completion(tmp_path, mean_tokens, stop_ids) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    make_random(REPO / "tiny", tmp_path / "random", sizes)  # of 576 tokens
    bench.make_model(tmp_path / "random", tmp_path / "model", mean_tokens)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["eos_token_id"] == stop_ids


@pytest.mark.slow
def test_the_bench_of_a_step_measures_a_run_of_exact_lengths(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    make_random(REPO / "tiny", tmp_path / "model", sizes)
    work = tmp_path / "work"
    work.mkdir()
    line = printed(
        *("tools/bench.py", "step", "--model", str(tmp_path / "model")),
        *("--prompt-tokens", "20", "--steps", "4", "ROLLOUT_GLOBAL_BATCH_SIZE=2", "NUM_PRE_Q=4"),
        *("MAX_LENGTH_SAMPLE=90", "TRAIN_MICRO_BATCH_SIZE=4", "PPO_EPOCHS=2"),
        cwd=work,
        LEARNING_RATE="fast",  # settings in the environment do not count
    )
    assert not [*work.iterdir()]
    found = json.loads(line)
    assert (found["plen"], found["clen"], found["tokens"]) == (20, 90, 2 * 4 * 90)
    # 32*32 + 2*32*16 + 32*32 + 3*32*64 numbers in the matrices; 2 * 19 + 720 tokens of the layer;
    # 32 columns of queries; the lm_head of 576 x 32
    pairs = 2 * 19 * 19 / 2 + 8 * (90 * 19 + 90 * 90 / 2)
    forward = 2 * 9216 * 758 + 4 * 32 * pairs + 2 * 32 * 576 * 720
    assert found["update_flops"] == 6 * forward
    update_s, step_s = found["steady_train_s"], found["steady_step_s"]
    assert 0 < update_s < step_s and 0 < found["steady_rollout_s"] < step_s
    assert 0 < found["first_step_s"] < found["wall_s"]
    tokens_s = found["steady_rollout_tok_s"] * found["steady_rollout_s"]
    assert tokens_s == pytest.approx(720, rel=0.05)  # the seconds are rounded
    fraction = found["update_flops"] / update_s / found["matmul_peak_gflops"] / 1e9
    assert found["update_fraction_of_peak"] == pytest.approx(fraction, rel=0.2, abs=1e-4)
    assert found["recompiled"] == 0, "the lengths of all steps are equal"
    assert found["peak_rss_mib"] > 100 and found["device"] == "cpu"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("REMAT", "'REMAT' is not NAME=VALUE"),
        ("REMATT=none", "unknown setting REMATT; did you mean REMAT?"),
        ("DATASET=tiny", "bench.py sets DATASET; leave it out"),
        ("--steps=2", "--steps 2: the first two do not count"),
    ],
)
def test_a_wrong_argument_of_step_is_refused_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "step", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in last and message in last


# ---- The loop of docs/objectives.md --------------------------------------------------------------


@pytest.mark.slow
def test_the_loop_that_compares_objectives_prints_accuracies_before_and_after(
    tmp_path: Path,
) -> None:
    page = (REPO / "docs" / "objectives.md").read_text(encoding="utf-8")
    [loop] = re.findall(r"```bash\n(.*?)```", page, re.S)
    for name in ("train_grpo.py", "tools"):
        (tmp_path / name).symlink_to(REPO / name)
    env = os.environ | {"STEPS": "1", "EVAL_EVERY_STEPS": "1", "EVAL_PROMPTS": "8"}
    env |= {"BATCH_SIZE": "2", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", loop]
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    for run in ("SEED=0", "SEED=1", "ADV_ESTIMATOR=rloo", "LOSS_TYPE=dr_grpo,SCALE_REWARDS=none"):
        line = rf"^{run} eval/accuracy: [01]\.\d+ eval/accuracy: [01]\.\d+$"
        assert re.search(line, done.stdout, re.M), done.stdout
    assert "verdict: eval/accuracy: " in done.stdout
