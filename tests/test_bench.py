"""Claims about the tools: they run from any folder, and the benches print what the docs say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("tool", ["bench", "compare_objectives", "make_tiny", "plot_run"])
def test_a_tool_runs_from_any_folder(tmp_path: Path, tool: str) -> None:
    help_text = printed(f"tools/{tool}.py", "--help", cwd=tmp_path)
    assert help_text.startswith(f"usage: {tool}.py")
    assert not [*tmp_path.iterdir()]


def test_the_loss_bench_times_each_implementation_that_runs_here(tmp_path: Path) -> None:
    sizes = ("--tokens", "64", "-D", "32", "-V", "512", "--repeats", "1")
    table = printed("tools/bench.py", "loss", *sizes, cwd=tmp_path)
    assert table.startswith("cpu: 64 tokens, D 32, V 512, float32\n")
    number = r"[\d.e-]+"
    for impl in ("full", "jax"):
        line = rf"^\| {impl} \| {number} \| {number} \| {number} \| \d+\.\d\d \|$"
        assert re.search(line, table, re.M), table
    assert "| pallas | needs a TPU | | | |" in table


@pytest.mark.slow
def test_the_objectives_are_compared_in_a_table(tmp_path: Path) -> None:
    quick = {"STEPS": "1", "EVAL_EVERY_STEPS": "1", "EVAL_PROMPTS": "8", "BATCH_SIZE": "2"}
    table = printed("tools/compare_objectives.py", "rloo", "cispo", cwd=tmp_path, **quick)
    for line in ("rloo | ADV_ESTIMATOR=rloo", "cispo | LOSS_TYPE=cispo EPS_HIGH=5 PPO_EPOCHS=2"):
        assert re.search(rf"^\| {line} \| [01]\.\d+ -> [01]\.\d+ \|$", table, re.M), table
    assert (tmp_path / "runs" / "objectives" / "cispo_0" / "metrics.jsonl").is_file()
