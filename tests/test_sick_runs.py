"""The verdicts on runs of the tiny model: two that are sick, and the healthy run of the README.

A sick run is made so by its settings or rewards alone, but for sampler_drift: no setting makes the
sampler differ from the trainer. test_verdict.py has all rules, on records that are written by hand.
"""

import json
from pathlib import Path

import pytest
from runs import REPO, Result, environment, finish, run_as_user, start

COMMON = f"""
    ROLLOUT_GLOBAL_BATCH_SIZE=4 TRAIN_MICRO_BATCH_SIZE=32 SAVE_EVERY_STEPS=0 EXPORT_HF=none
    REWARD_FN= REWARD_WEIGHTS= DATASET={REPO}/tiny
"""
STEADY = "LR_SCHEDULE=constant WARMUP_RATIO=0"
SICK_RUNS = {
    "sampler_drift": "STEPS=12",
    "reward_hacked": (
        "STEPS=20 LEARNING_RATE=3e-4 EVAL_EVERY_STEPS=20 EVAL_PROMPTS=50 "
        "REWARD_FN=reward_correct,mine.py:nines REWARD_WEIGHTS=0,1"
    ),
}
REWARDS = """
def nines(completions, **columns):
    return [text.partition("<answer>")[2].count("9") / 3 for text in completions]
"""
# The sampler keeps the weights of the first step, as if those of later steps did not reach it.
STALE = f"""
import runpy, sys
import jax, jax.numpy as jnp
sys.path.insert(0, {str(REPO)!r})
from sampling import NaiveBackend
copy_weights, kept = NaiveBackend.update_weights, []
def update_weights(self, params):
    if not kept:
        copy_weights(self, params)
        kept.append(jax.tree.map(jnp.copy, self._weights))
    self._weights = kept[0]
NaiveBackend.update_weights = update_weights
runpy.run_path({str(REPO / "train_grpo.py")!r}, run_name="__main__")
"""


def run_once(out: Path, settings: str, repo: Path = REPO) -> tuple[Result, list[str]]:
    """A run with these settings, and the verdict in its summary."""
    (out / "mine.py").write_text(REWARDS)
    settings = settings.replace("mine.py", f"{out}/mine.py")
    result = finish(start(out / "run", environment(f"{COMMON} {settings}"), 1, repo), out / "run")
    return result, json.loads((out / "run" / "summary.json").read_text())["verdict"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SICK_RUNS)
def test_a_sick_run_is_named_rightly_before_its_last_line(tmp_path: Path, name: str) -> None:
    repo = REPO
    if name == "sampler_drift":
        repo = tmp_path / "stale"
        repo.mkdir()
        (repo / "train_grpo.py").write_text(STALE)
    result, verdict = run_once(tmp_path, f"{STEADY} {SICK_RUNS[name]}", repo)
    assert result.code == 0, result.errors
    assert name in [line.split(": ")[1] for line in verdict]
    before = result.lines.splitlines()
    done = next(i for i, line in enumerate(before) if line.startswith("DONE: "))
    assert before[done - len(verdict) : done] == verdict


@pytest.mark.slow
def test_the_run_of_the_readme_learns_to_calculate_and_raises_no_alarm(tmp_path: Path) -> None:
    """Three seeds in the README reach 0.964 and more."""
    fast = {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}  # 200 steps take a while
    result = run_as_user(tmp_path / "run", SAVE_EVERY_STEPS="0", EXPORT_HF="none", **fast)
    assert result.code == 0, result.errors
    accuracies = [r["eval/accuracy"] for r in result.records if "eval/accuracy" in r]
    assert accuracies[0] == pytest.approx(0.446, abs=0.01) and accuracies[-1] >= 0.95
    lines = result.lines.splitlines()
    (verdict,) = (line for line in lines if line.startswith("verdict: "))
    assert verdict.startswith("verdict: no sign of trouble in 200 steps: accuracy 0.44")
    notes = [line for line in lines if line.startswith("note ")]
    assert not [note for note in notes if "all advantages that count are 0" not in note]
