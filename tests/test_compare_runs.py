"""Claims about tools/compare_runs.py, and the comparison of the kernel with jax in docs/kernel.md.

The kernel runs in Pallas' interpreter: its numbers are those of the kernel, its times are not.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_replay_by_hand import with_changes
from test_train import REPO, Result, train

QUESTIONS = 1319  # of GSM8K's test split
SETTINGS = {
    "STEPS": "20",
    "BATCH_SIZE": "4",
    "NUM_PRE_Q": "4",
    "LEARNING_RATE": "1e-4",
    "EVAL_EVERY_STEPS": "10",
    "EVAL_PROMPTS": "64",
    "EVAL_FULL_SWEEP": "1",
    "SAVE_EVERY_STEPS": "0",
    "EXPORT_HF": "none",
    "DATASET": str(REPO / "tiny"),  # docs/kernel.md shows these runs
}
# On a CPU how_to_compute refuses pallas, so the script puts it in place of jax, and interprets it.
INTERPRETED = """
import dataclasses
import functools
import loss_pallas
import startup
from models import placement

how_to_compute, pallas_call = placement.how_to_compute, loss_pallas.pl.pallas_call

def with_pallas(cfg, *args):
    return how_to_compute(dataclasses.replace(cfg, policy_loss_impl="jax"), *args)

def told_call(*args, **settings):
    print("kernel interpret={interpret}".format(**settings))
    return pallas_call(*args, **settings)

placement.how_to_compute, loss_pallas.pl.pallas_call = with_pallas, told_call
startup.Kernel = functools.partial(loss_pallas.Kernel, interpret=True)
"""


def compare(*folders: Path) -> str:
    command = [sys.executable, str(REPO / "tools" / "compare_runs.py"), *map(str, folders)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def write_run(folder: Path, accuracy: float, temperature: float = 0.0) -> Path:
    """The files of a run that has evaluated GSM8K."""
    folder.mkdir()
    se = math.sqrt(accuracy * (1 - accuracy) / QUESTIONS)
    values = {"accuracy": accuracy, "accuracy_se": se, "temperature": temperature}
    record = {"step": 100} | {f"eval_full/{name}": value for name, value in values.items()}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "summary.json").write_text('{"state": "done", "why": ""}\n')
    (folder / "config.yaml").write_text("data.seed: 0\nderived.dtype: bfloat16\n")
    return folder


# ---- What is noise -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "accuracy, change",
    [
        (0.797, "0.0140 ± 0.0159: noise"),
        (0.829, "0.0460 ± 0.0154: B is better"),
        (0.737, "-0.0460 ± 0.0166: A is better"),
    ],
    ids=str,
)
def test_a_difference_within_two_standard_errors_is_noise(
    tmp_path: Path, accuracy: float, change: str
) -> None:
    a, b = write_run(tmp_path / "a", 0.783), write_run(tmp_path / "b", accuracy)
    lines = compare(a, b).splitlines()
    (row,) = [line for line in lines if line.startswith("| eval_full/accuracy ")]
    change = change.replace("A is", f"{a} is").replace("B is", f"{b} is")
    assert row.startswith("| eval_full/accuracy | 0.7830 ± 0.0113 | ")
    assert row.endswith(f" | {change} |")
    assert lines[-2:] == [
        "the settings differ in: nothing",
        f"verdict: eval_full/accuracy: {change}",
    ]


def test_greedy_and_sampled_accuracies_are_not_compared(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", 0.783), write_run(tmp_path / "b", 0.635, temperature=0.7)
    change = "not compared: the temperature is 0 and 0.7"
    lines = compare(a, b).splitlines()
    assert f"| eval_full/accuracy | 0.7830 ± 0.0113 | 0.6350 ± 0.0133 | {change} |" in lines
    assert lines[-1] == f"verdict: eval_full/accuracy: {change}"


def test_settings_that_differ_are_named_also_where_they_come_to_the_same(tmp_path: Path) -> None:
    """On a CPU ATTENTION_IMPL=auto computes xla, so derived.attention_impl is the same."""
    a, b = write_run(tmp_path / "a", 0.783), write_run(tmp_path / "b", 0.783)
    for folder, impl in ((a, "xla"), (b, "auto")):
        with open(folder / "config.yaml", "a", encoding="utf-8") as file:
            file.write(f"train.attention_impl: {impl}\nderived.attention_impl: xla\n")
            file.write(f"run.output_dir: {folder}\n")
    lines = compare(a, b).splitlines()
    assert lines[-2] == "the settings differ in: train.attention_impl xla and auto"


# ---- The kernel and jax --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Result]]:
    """The folders and the results of 20 steps with jax, and of 20 steps with the kernel."""
    out = tmp_path_factory.mktemp("ab")
    jax = train(out / "jax", **SETTINGS)
    pallas = with_changes(out / "pallas", INTERPRETED, SETTINGS | {"POLICY_LOSS_IMPL": "pallas"})
    return [(out / "jax", jax), (out / "pallas", pallas)]


@pytest.mark.slow
def test_twenty_steps_with_the_kernel_are_those_with_jax(both: list[tuple[Path, Result]]) -> None:
    (_, jax), (folder, pallas) = both
    assert "derived.policy_loss_impl: pallas" in (folder / "config.yaml").read_text().splitlines()
    assert "kernel interpret=True" in pallas.lines.splitlines()
    assert "kernel" not in jax.lines
    assert len(jax.completions) == len(pallas.completions) > 20 * 16
    assert jax.completions == pallas.completions
    for a, b in zip(jax.records, pallas.records, strict=True):
        for name in ("train-other/loss", "train-other/entropy", "train-other/grad_norm"):
            if name in a:
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_docs_kernel_shows_the_comparison_of_these_runs(both: list[tuple[Path, Result]]) -> None:
    """Accuracies may differ a little between kinds of CPUs, and times do."""
    text = compare(*(folder for folder, _ in both))
    print(text)
    shown = (REPO / "docs" / "kernel.md").read_text(encoding="utf-8")
    shown = shown.partition("## The kernel in a run")[2]

    def values(text: str, name: str) -> list[float]:
        (row,) = re.findall(rf"^\| {name} \|(.*)\|$", text, re.M)
        return [float(x) for x in re.findall(r"-?\d+\.?\d*", row)]

    for name in ("steps", "eval_full/accuracy", "eval/accuracy", "eval/reward/total/mean"):
        assert values(shown, name) == pytest.approx(values(text, name), abs=0.04), name
    settings, verdict = text.splitlines()[-2:]
    name = "policy_loss_impl jax and pallas"
    assert settings == f"the settings differ in: train.{name}, derived.{name}"
    assert verdict.startswith("verdict: eval_full/accuracy: ") and verdict.endswith(": noise")
    assert settings in shown.splitlines()
