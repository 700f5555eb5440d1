"""The verdicts on runs of the tiny model: one whose reward is hacked, and the healthy run of the
README. test_verdict.py has all rules, on records that are written by hand."""

import json
from pathlib import Path

import pytest
from runs import REPO, environment, run_as_user, train

COMMON = f"""
    ROLLOUT_GLOBAL_BATCH_SIZE=4 TRAIN_MICRO_BATCH_SIZE=32 SAVE_EVERY_STEPS=0 EXPORT_HF=none
    REWARD_FN= REWARD_WEIGHTS= DATASET={REPO}/tiny
"""
HACKED = """
    STEPS=20 LEARNING_RATE=3e-4 EVAL_EVERY_STEPS=20 EVAL_PROMPTS=50 LR_SCHEDULE=constant
    WARMUP_RATIO=0 REWARD_FN=reward_correct,mine.py:nines REWARD_WEIGHTS=0,1
"""
REWARDS = """
def nines(completions, **columns):
    return [text.partition("<answer>")[2].count("9") / 3 for text in completions]
"""


@pytest.mark.slow
def test_a_sick_run_is_named_rightly_before_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    settings = environment(f"{COMMON} {HACKED}".replace("mine.py", f"{tmp_path}/mine.py"))
    result = train(tmp_path / "run", **settings)
    verdict = json.loads((result.out / "summary.json").read_text())["verdict"]
    assert "reward_hacked" in [line.split(": ")[1] for line in verdict]
    before = result.lines.splitlines()
    done = next(i for i, line in enumerate(before) if line.startswith("DONE: "))
    assert before[done - len(verdict) : done] == verdict


@pytest.mark.slow
def test_the_run_of_the_readme_learns_to_calculate_and_raises_no_alarm(tmp_path: Path) -> None:
    """Three seeds in the README reach 0.966 and more."""
    fast = {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}  # 200 steps take a while
    result = run_as_user(tmp_path / "run", SAVE_EVERY_STEPS="0", EXPORT_HF="none", **fast)
    assert result.code == 0, result.errors
    accuracies = [r["eval/accuracy"] for r in result.records if "eval/accuracy" in r]
    assert accuracies[0] == pytest.approx(0.446, abs=0.01) and accuracies[-1] >= 0.95
    lines = result.lines.splitlines()
    (verdict,) = (line for line in lines if line.startswith("verdict: "))
    assert verdict.startswith("verdict: no sign of trouble in 200 steps: accuracy 0.44")
    notes = [line for line in lines if line.startswith("note ")]
    assert not [note for note in notes if "rewards are equal in each group" not in note]
