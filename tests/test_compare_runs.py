"""Claims about tools/compare_runs.py, and the comparison of the kernel with jax in docs/kernel.md.

The kernel runs in Pallas' interpreter: its numbers are those of the kernel, its times are not.
"""

import json
import math
import os
import re
from pathlib import Path

import pytest
from runs import REPO, start_script, train, with_changes

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


def compare(*folders: Path) -> list[str]:
    """The lines of tools/compare_runs.py."""
    script, env = REPO / "tools" / "compare_runs.py", dict(os.environ)
    process = start_script(script, *map(str, folders), cwd=REPO, env=env)
    lines, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    return lines.splitlines()


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
    "accuracy, temperature, change",
    [
        (0.810, 0.0, "0.0270 ± 0.0157: noise"),
        (0.829, 0.0, "0.0460 ± 0.0154: B is better"),
        (0.737, 0.0, "-0.0460 ± 0.0166: A is better"),
        (0.635, 0.7, "not compared: the temperature is 0 and 0.7"),
    ],
    ids=str,
)
def test_a_difference_within_two_standard_errors_is_noise(
    tmp_path: Path, accuracy: float, temperature: float, change: str
) -> None:
    a = write_run(tmp_path / "a", 0.783)
    b = write_run(tmp_path / "b", accuracy, temperature)
    lines = compare(a, b)
    (row,) = [line for line in lines if line.startswith("| eval_full/accuracy ")]
    change = change.replace("A is", f"{a} is").replace("B is", f"{b} is")
    assert row.startswith("| eval_full/accuracy | 0.7830 ± 0.0113 | ")
    assert row.endswith(f" | {change} |")
    assert lines[-2:] == [
        "the settings differ in: nothing",
        f"verdict: eval_full/accuracy: {change}",
    ]


def test_settings_that_differ_are_named_also_where_they_come_to_the_same(tmp_path: Path) -> None:
    """On a CPU ATTENTION_IMPL=auto computes xla, so derived.attention_impl is the same."""
    a, b = write_run(tmp_path / "a", 0.783), write_run(tmp_path / "b", 0.783)
    for folder, impl in ((a, "xla"), (b, "auto")):
        with open(folder / "config.yaml", "a", encoding="utf-8") as file:
            file.write(f"train.attention_impl: {impl}\nderived.attention_impl: xla\n")
            file.write(f"run.output_dir: {folder}\n")
    assert compare(a, b)[-2] == "the settings differ in: train.attention_impl xla and auto"


# ---- The kernel and jax --------------------------------------------------------------------------


@pytest.mark.slow
def test_twenty_steps_with_the_kernel_are_those_with_jax_as_docs_kernel_shows(
    tmp_path: Path,
) -> None:
    """Accuracies may differ a little between kinds of CPUs, and times do."""
    jax = train(tmp_path / "jax", **SETTINGS)
    settings = SETTINGS | {"POLICY_LOSS_IMPL": "pallas"}
    pallas = with_changes(tmp_path / "pallas", INTERPRETED, settings)
    assert "kernel interpret=True" in pallas.lines.splitlines() and "kernel" not in jax.lines
    assert len(jax.completions) == len(pallas.completions) > 20 * 16
    assert jax.completions == pallas.completions
    for a, b in zip(jax.records, pallas.records, strict=True):
        for name in ("train-other/loss", "train-other/entropy", "train-other/grad_norm"):
            if name in a:
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name

    lines = compare(jax.out, pallas.out)
    print(*lines, sep="\n")
    shown = (REPO / "docs" / "kernel.md").read_text(encoding="utf-8")
    shown = shown.partition("## The kernel in a run")[2]

    def values(text: str, name: str) -> list[float]:
        (row,) = re.findall(rf"^\| {name} \|(.*)\|$", text, re.M)
        return [float(x) for x in re.findall(r"-?\d+\.?\d*", row)]

    for name in ("steps", "eval_full/accuracy", "eval/accuracy", "eval/reward/total/mean"):
        assert values(shown, name) == pytest.approx(values("\n".join(lines), name), abs=0.04), name
    name = "policy_loss_impl jax and pallas"
    assert lines[-2] == f"the settings differ in: train.{name}, derived.{name}"
    assert lines[-1].startswith("verdict: eval_full/accuracy: ") and lines[-1].endswith(": noise")
    assert lines[-2] in shown.splitlines()
