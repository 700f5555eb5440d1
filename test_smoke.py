"""The quick offline claims: `pytest test_smoke.py`, under 90 s on 2 cores, no network.

One real two-step run of the main job, what it leaves behind, and what stops it before it starts.
Each module has its deeper tests in tests/.
"""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import config

pytest.importorskip("fcntl", reason="training needs Linux, macOS or WSL")

REPO = Path(__file__).resolve().parent
# Published names: of a step, of an evaluation, and of the last values in summary.json. All others:
# tests/test_metrics_page.py.
OF_A_STEP = """
    train-other/loss train-other/entropy train-other/grad_norm train-other/learning_rate
    train-reward/total/mean train-reward/total/std train-reward/func/reward_correct/mean
    train-seq_len/completion/mean time/train/step_s throughput/train/valid_tokens_per_s
""".split()
OF_AN_EVALUATION = "eval/accuracy eval/reward/total/mean time/eval/step_s".split()
OF_THE_SUMMARY = """
    eval_full/accuracy eval/reward/func/reward_correct/mean eval/reward/total/mean
    time/train/step_avg_last10_s time/eval_full/step_s
""".split()
KNOWN_LINES = re.compile(
    "(backend|local_batch|model|loss.loss_type|output|step)=.*|mesh dp,fsdp,tp train=.*|"
    "rollout.backend: naive|(changed|DONE): .*|eval(_full)? .*|"
    r"sample step=.* question: .*|  .*|verdict: .*"
)


class Run(NamedTuple):
    code: int
    lines: str
    errors: str
    out: Path

    def records(self, name: str) -> list[dict]:
        """The records of metrics.jsonl that have a metric."""
        lines = (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record for record in map(json.loads, lines) if name in record]


def train(out: Path, **env: str) -> Run:
    """`python train_grpo.py` in a process of its own, away from the settings of this shell, but
    for the cache of compiled programs."""
    names = {field.name.upper() for field in dataclasses.fields(config.Config)}
    others = names - {"JAX_COMPILATION_CACHE_DIR"} | {"XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    shell = {k: v for k, v in os.environ.items() if k not in others}
    settings = {"JAX_PLATFORMS": "cpu", "WANDB_API_KEY": "", "OUTPUT_DIR": str(out)}
    command = [sys.executable, str(REPO / "train_grpo.py")]
    env = shell | settings | env
    done = subprocess.run(
        command, env=env, cwd=out.parent, text=True, capture_output=True, timeout=300
    )
    return Run(done.returncode, done.stdout, done.stderr, out)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of the defaults, from another folder than the repository's."""
    out = tmp_path_factory.mktemp("smoke") / "run"
    settings = {"STEPS": "2", "EVAL_EVERY_STEPS": "2", "EVAL_PROMPTS": "64"}
    settings |= {"EVAL_FULL_SWEEP": "1", "SAVE_EVERY_STEPS": "2", "PRINT_TRAIN_TIME_BREAKDOWN": "1"}
    return train(out, **settings)


def test_the_main_job_runs_and_prints_the_lines_people_parse(run: Run) -> None:
    assert run.code == 0, run.errors
    number, seconds = r"-?\d+\.\d+", r"\d+\.\d\ds"
    phases = "rollout rollout_sync rollout_generate reward advantages shard update".split()
    breakdown = "".join(rf" {phase}={seconds}" for phase in phases)
    lengths = (
        rf" prompt_len_mean={number} completion_len_mean={number} completion_len_max=\d+"
        rf" completion_hit_max_frac={number}"
    )
    accuracy = rf"accuracy=[01]\.\d{{4}} accuracy_se={number} accuracy_of=reward_correct"
    accuracy += " decoding=greedy"
    for line in (
        "backend=cpu process=0/1 device_count=1 local_device_count=1",
        "local_batch=128 global_batch=128 rollout.prompt_batch_size=16 rollout.passes_per_step=1 "
        r"train.micro_batch_size=\d+ train.grad_accum_steps=\d+ train.updates_per_step=1",
        rf"eval step=0 split=test questions=\d+ {accuracy} t={seconds}",
        r"step=0 loss=-?\d+\.\d{6} entropy=\d\.\d{4} reward_mean=\d\.\d{4} "
        rf"dt={seconds}{breakdown}{lengths}",
        rf"step=1 loss=.*{lengths}",
        rf"eval step=2 split=test questions=\d+ {accuracy} t={seconds}",
        rf"eval_full split=test questions=500 samples_per_question=1 {accuracy} t={seconds}",
        r"DONE: steps=2 elapsed_sec=\d+\.\d{3}",
    ):
        assert re.search(f"^{line}$", run.lines, re.M), f"{line}\nnot in\n{run.lines}"


def test_the_records_and_the_summary_have_the_names_that_dashboards_read(run: Run) -> None:
    steps, evaluations = run.records("train-other/loss"), run.records("eval/accuracy")
    [swept] = run.records("eval_full/accuracy")
    last = json.loads((run.out / "summary.json").read_text(encoding="utf-8"))["last"]
    assert [r["step"] for r in steps] == [0, 1] and [r["step"] for r in evaluations] == [0, 2]
    for record, names in (
        *((record, OF_A_STEP) for record in steps),
        *((record, OF_AN_EVALUATION) for record in evaluations),
        (last, OF_THE_SUMMARY),
    ):
        assert [name for name in names if not math.isfinite(record[name])] == []
    assert (swept["eval_full/split"], swept["eval_full/questions_global"]) == ("test", 500)
    assert swept["eval_full/accuracy/pass_at_1"] == swept["eval_full/accuracy"]


def test_a_run_prints_nothing_but_its_own_lines(run: Run) -> None:
    assert run.errors == ""
    assert [line for line in run.lines.splitlines() if not KNOWN_LINES.fullmatch(line)] == []


def test_the_trainer_gives_the_tokens_the_sampler_s_own_probabilities(run: Run) -> None:
    for record in run.records("train-other/loss"):
        assert record["train-other/sampling_logp_difference/max"] < 1e-4
        assert record["train-other/clip_ratio/region_mean"] == 0  # one update: on-policy
        assert abs(record["train-reward/advantage/mean"]) < 1e-9
        assert record["train-other/grad_norm"] > 0


def test_the_last_checkpoint_knows_its_accuracy_and_how_long_the_files_were(run: Run) -> None:
    """It is saved before the long evaluation of the complete split."""
    saved = json.loads((run.out / "checkpoints/2/record/metadata").read_text())
    assert saved["accuracy"] == run.records("eval/accuracy")[-1]["eval/accuracy"]
    metrics = (run.out / "metrics.jsonl").read_text()[saved["lengths"]["metrics.jsonl"] :]
    (later,) = map(json.loads, metrics.splitlines())
    assert later["step"] == 2 and "eval_full/accuracy" in later
    samples = (run.out / "samples.jsonl").read_text()
    assert saved["lengths"]["samples.jsonl"] == len(samples.encode())
    assert {json.loads(line)["step"] for line in samples.splitlines()} == {0, 1}


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("LERNING_RATE", "1", "unknown setting LERNING_RATE; did you mean LEARNING_RATE?"),
        ("TRAIN_MICRO_BATCH_SIZE", "7", "TRAIN_MICRO_BATCH_SIZE=7 must divide local_batch"),
        ("OUTPUT_DIR", str(REPO / "LICENSE"), "LICENSE cannot be written"),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(
    tmp_path: Path, name: str, value: str, words: str
) -> None:
    """Also where jax itself looks for a device and finds no TPU, with jax[tpu] installed."""
    mistaken = train(tmp_path / "run", JAX_PLATFORMS="", **{name: value})
    [line] = mistaken.errors.splitlines()
    assert mistaken.code == 2 and line.startswith("error: ") and words in line
    assert not (tmp_path / "run").exists()
