"""Claims about tools/bench.py, which prints what docs/speed.md says."""

import json
from pathlib import Path

import pytest
from runs import REPO, run_as_user, run_as_user_here

from model import hf
from tools import bench

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


@pytest.mark.parametrize("mean_tokens, stop_ids", [(0, [-1]), (256, [0, 256, 512])])
def test_one_token_of_many_or_none_ends_a_completion(tmp_path, mean_tokens, stop_ids) -> None:
    bench.make_random_model(REPO / "tiny", tmp_path / "random", SIZES)  # of 576 tokens
    bench.make_model(tmp_path / "random", tmp_path / "model", mean_tokens)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["eos_token_id"] == stop_ids
    model, _ = hf.read_model(tmp_path / "model", "")
    assert (model.hidden_size, model.intermediate_size, model.num_layers) == (32, 64, 1)


def test_the_first_two_steps_are_not_counted() -> None:
    seconds = (100.0, 10.0, 1.0, 3.0, 2.0)
    records = [dict.fromkeys(bench.MEDIANS.values(), x) | {"compile/programs": x} for x in seconds]
    fields = bench.measurements(records)
    assert (fields["steady_step_s"], fields["recompiled"], fields["first_step_s"]) == (2, 6, 100)


@pytest.mark.slow
def test_the_bench_of_a_step_measures_a_run_of_exact_lengths(tmp_path: Path) -> None:
    bench.make_random_model(REPO / "tiny", tmp_path / "model", SIZES)
    work = tmp_path / "work"
    work.mkdir()
    words = f"""--model {tmp_path / "model"} --prompt-tokens 20 --steps 4 NUM_PRE_Q=4
        ROLLOUT_GLOBAL_BATCH_SIZE=2 MAX_LENGTH_SAMPLE=90 TRAIN_MICRO_BATCH_SIZE=4 PPO_EPOCHS=2"""
    # Settings in the environment do not count.
    settings = {"SCRIPT": "tools/bench.py", "LEARNING_RATE": "fast"}
    fields = json.loads(run_as_user(work / "run", *words.split(), **settings).lines)
    assert not [*work.iterdir()]
    assert (fields["plen"], fields["clen"], fields["tokens"]) == (20, 90, 2 * 4 * 90)
    update_s, step_s = fields["steady_train_s"], fields["steady_step_s"]
    assert 0 < update_s < step_s and 0 < fields["steady_rollout_s"] < step_s
    assert fields["first_step_s"] > step_s, "it compiles"
    tokens_s = fields["steady_rollout_tok_s"] * fields["steady_rollout_s"]
    assert tokens_s == pytest.approx(720, rel=0.05)  # the seconds are rounded
    assert fields["recompiled"] == 0, "the lengths of all steps are equal"
    assert fields["peak_rss_mib"] > 100 and fields["device"] == "1 x cpu"


@pytest.mark.parametrize(
    "command, message",
    [
        ("bench.py REMATT=none", "unknown setting REMATT; did you mean REMAT?"),
        ("bench.py DATASET=tiny", "bench.py sets DATASET; leave it out"),
        ("bench.py --steps=2", "--steps 2: the first two do not count"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(
    command: str, message: str, tmp_path: Path
) -> None:
    script, *words = command.split()
    done = run_as_user_here(tmp_path / "run", *words, SCRIPT=f"tools/{script}")
    last = done.errors.splitlines()[-1]
    assert done.code == 2 and "error: " in last and message in last
