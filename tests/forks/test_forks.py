"""Forks: each drill of drills.py is small and works in a real run; tests of what it adds pass."""

import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from drills import (
    BUILT_IN_REWARD,
    COUNTDOWN,
    DR_GRPO,
    DRILLS,
    ESTIMATOR,
    FROZEN_EMBEDDING,
    OBJECTIVE,
    REPO,
    SCHEDULE,
    SETTING,
    edited,
    make_fork,
    table,
)
from runs import Result, environment, finish, start
from runs import train as train_here
from safetensors.numpy import load_file

from rewards import load_reward_functions

# 16 sequences in a step, and the rewards of a run without REWARD_FN. With SEED=1 rewards of the
# first step differ within a group.
SMALL = environment(
    """BATCH_SIZE=4 NUM_PRE_Q=4 MAX_LENGTH_SAMPLE=32 SEED=1 REWARD_FN= REWARD_WEIGHTS=
    EXPORT_HF=none SAVE_EVERY_STEPS=0 SAMPLE_EVERY_STEPS=1"""
)
# The tests that read what these drills edit.
TESTS_OF_ADDITIONS = """
    tests/test_config.py tests/test_rewards.py tests/test_readme.py
    tests/test_contributing.py::test_every_setting_is_read
    tests/test_loss.py::test_each_objective_has_an_entry_of_facts_and_a_loss_of_a_token
    tests/test_loss.py::test_an_objective_reads_the_settings_of_clipping_that_its_facts_name
""".split()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forks")


def train(repo: Path, out: Path, settings: str = "") -> Result:
    """A run of the code in `repo`; later runs find the compiled programs of earlier ones."""
    result = finish(start(out, SMALL | environment(settings), 1, repo), out)
    assert result.code == 0, result.errors
    return result


def of(result: Result, name: str) -> list[float]:
    """The values of a metric of all steps."""
    return [r[f"train-{name}"] for r in result.records if f"train-{name}" in r]


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def pytest_of(fork: Path, *arguments: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", *arguments]
    return subprocess.run(command, cwd=fork, env=env, capture_output=True, text=True, timeout=900)


# ---- The drills ----------------------------------------------------------------------------------


@pytest.mark.style
def test_the_pages_say_how_many_lines_of_which_files_a_drill_edits() -> None:
    """README does not name the file in which a new setting acts: that can be any file."""
    assert "\n".join(table()) in (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "| a setting | `config.py`, `train_grpo.py` | 1, 1 |" in table()
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    for drill in DRILLS:
        rows = [line for line in readme.splitlines() if line.startswith("| ") and drill.row in line]
        if drill.row:
            assert all(file in rows[0] for file in edited(drill).keys() - {"train_grpo.py"})


@pytest.mark.slow
def test_a_fork_with_all_drills_passes_the_tests_of_what_it_adds(tmp_path: Path) -> None:
    fork = make_fork(tmp_path / "fork", *DRILLS)
    done = pytest_of(fork, *TESTS_OF_ADDITIONS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_fork_with_a_test_and_a_style_of_its_own_leaves_out_the_tests_of_style(
    tmp_path: Path,
) -> None:
    fork = make_fork(tmp_path / "fork")
    (fork / "mine.py").write_text(
        "from rows import Batch\nclass Mine(Batch):\n" + "    x = 1\n" * 99
    )
    (fork / "tests" / "test_mine.py").write_text(
        "import mine\ndef test_x():\n    assert mine.Mine.x\n"
    )
    (fork / "README.md").write_text("# Mine\n" * 200)
    files = [f"tests/test_{name}.py" for name in ("mine", "contributing", "readme", "config")]
    done = pytest_of(fork, "--no-style", *files)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- Rewards, a setting, a schedule and another task ---------------------------------------------


@pytest.fixture(scope="module")
def additions(out: Path) -> Path:
    drills = BUILT_IN_REWARD, SETTING, SCHEDULE, FROZEN_EMBEDDING, ESTIMATOR, COUNTDOWN
    return make_fork(out / "additions", *drills)


@pytest.fixture(scope="module")
def puzzles(additions: Path) -> list[dict[str, str]]:
    """What the generator of countdown prints."""
    command = [sys.executable, "countdown.py"]
    printed = subprocess.run(command, cwd=additions, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in printed.stdout.splitlines()]


@pytest.fixture(scope="module")
def added(out: Path, additions: Path, puzzles: list[dict[str, str]]) -> Result:
    """A run with all of these drills."""
    file = out / "puzzles.jsonl"
    file.write_text("\n".join(map(json.dumps, puzzles[:200])), encoding="utf-8")
    settings = "STEPS=4 LR_SCHEDULE=inverse_sqrt LEARNING_RATE=1e-3 WARMUP_RATIO=1 LR_DECAY_STEPS=2"
    rewards = "REWARD_FN=countdown.py:countdown,reward_correct,reward_format,brevity "
    rewards += "REWARD_WEIGHTS=1,1,2,0.5 REWARD_SCALE=3"
    more = f"ADV_ESTIMATOR=median WEIGHT_DECAY=0.1 EXPORT_HF={out}/hf EVAL_EVERY_STEPS=4"
    return train(additions, out / "added", f"DATASET={file} {settings} {rewards} {more}")


def test_new_rewards_a_new_setting_and_a_new_schedule_do_what_they_say(added: Result) -> None:
    """The schedule is the inverse square root: 1/2 and 1, then the root of 2/3 and of 2/4."""
    groups = lines_of(added.out / "samples.jsonl")
    completions = [completion for group in groups for completion in group["completions"]]
    assert len(completions) >= 4
    for completion in completions:
        rewards = completion["rewards"]
        assert rewards["brevity"] == -len(completion["text"]) / 100
        total = rewards["countdown"] + rewards["reward_correct"]
        total += 2 * rewards["reward_format"] + 0.5 * rewards["brevity"]
        assert completion["reward"] == pytest.approx(3 * total)
    assert of(added, "other/grad_norm")[0] > 0
    assert re.search("^changed: .*REWARD_SCALE=3.0 [(]environment[)]", added.lines, re.M)
    rates = [0.5e-3, 1e-3, 0.81649658e-3, 0.70710678e-3]
    assert of(added, "other/learning_rate") == pytest.approx(rates, rel=1e-6)


def test_a_frozen_embedding_keeps_its_bits_and_all_other_weights_change(added: Result) -> None:
    """Weight decay alone would change it too."""
    trained = added.out.parent / "hf"
    before, after = (load_file(x / "model.safetensors") for x in (REPO / "tiny", trained))
    assert before.keys() == after.keys() and len(before) == 50
    kept = {name for name in before if np.array_equal(before[name], after[name])}
    assert kept == {"model.embed_tokens.weight"}


def test_a_new_estimator_has_its_advantages(additions: Path) -> None:
    """The median of 1, 2, 9 and 3 is 2.5. The run above trains with it."""
    loss = runpy.run_path(str(additions / "loss.py"))
    config = loss["AdvantageConfig"]("median", "group", ())
    advantages = loss["group_advantages"]([1, 2, 9, 3], 4, config)
    assert advantages.tolist() == [-1.5, -0.5, 6.5, 0.5]


CASES = """
    1 (8-3)*1+1 6 8 3 1 1 | 1 3*8 24 3 8 | 1 8/(3-8/3) 24 3 3 8 8 | 1 3-8 -5 3 8 | 0 24 24 3 8
    0 8*3*1 24 3 8 | 0 38-14 24 3 8 14 | 0 9**9**9**9 6 9 9 9 9 | 0 9//2 4 2 9 | 0 3(8) 24 3 8
    0 3/(3-3) 24 3 3 3 | 0 (3*8 24 3 8 | 0 3+8 24 3 8 | 0 3*08 24 3 8
"""


def rewards_of(fork: Path, texts: list[str], **columns: list[str]) -> list[float]:
    workers = {}
    (reward,) = load_reward_functions(f"{fork}/countdown.py:countdown", 10, 32, 0, workers)
    with closing(*workers.values()):
        return reward([f"<answer>{text}</answer>" for text in texts], **columns)


def test_countdown_rewards_calculations_with_the_numbers_of_the_question(additions: Path) -> None:
    """Each case is the reward, the calculation, the answer, and the numbers of the question."""
    cases = [case.split() for line in CASES.strip().splitlines() for case in line.split("|")]
    rewards, texts, answers, *_ = zip(*cases, strict=False)
    texts, answers = [*texts, "-" * 9999 + "3*8"], [*answers, "24"]
    numbers = [" ".join(case[3:]) for case in cases] + ["3 8"]
    given = rewards_of(additions, texts, answer=answers, numbers=numbers)
    assert given == [*map(float, rewards), 0.0]


def test_every_puzzle_of_countdown_has_a_solution_and_is_there_once(
    additions: Path, puzzles: list[dict[str, str]]
) -> None:
    assert len({puzzle["question"] for puzzle in puzzles}) == len(puzzles) > 1000
    columns = {name: [puzzle[name] for puzzle in puzzles] for name in puzzles[0]}
    solutions = columns["solution"]
    assert rewards_of(additions, solutions, **columns) == [1.0] * len(puzzles)
    others = rewards_of(additions, solutions[1:] + solutions[:1], **columns)
    assert others == [0.0] * len(puzzles)


def test_a_run_trains_on_countdown_and_evaluates_held_out_puzzles(added: Result) -> None:
    told = "^eval step=0 .* questions=20 accuracy=0.0000 .* accuracy_of=countdown "
    assert re.search(told, added.lines, re.M), "the tiny model solves no puzzle"
    (group, *_) = lines_of(added.out / "samples.jsonl")
    assert group["question"].startswith("Reach ")
    assert of(added, "reward/func/countdown/mean") == [0.0] * 4


# ---- The objective -------------------------------------------------------------------------------


def test_dr_grpo_by_hand_is_the_one_of_the_settings(out: Path) -> None:
    by_hand = train(make_fork(out / "dr_grpo", DR_GRPO), out / "by_hand")
    by_settings = train(REPO, out / "by_settings", "LOSS_TYPE=dr_grpo SCALE_REWARDS=none")
    for name in ("other/loss", "other/grad_norm", "reward/advantage/std", "reward/advantage/max"):
        assert of(by_hand, name) == of(by_settings, name) and len(of(by_hand, name)) == 1
    assert of(by_hand, "other/grad_norm")[0] > 0


def test_an_objective_of_a_fork_trains_and_its_entry_gives_its_notes(out: Path) -> None:
    """With one update per step every ratio is 1, and the gradient that of dapo."""
    fork = make_fork(out / "objective", OBJECTIVE)
    ours = train(fork, out / "topr", "LOSS_TYPE=topr EPS_HIGH=0.3")
    dapo = train_here(out / "dapo", **SMALL)
    assert of(ours, "other/grad_norm") == pytest.approx(of(dapo, "other/grad_norm"), rel=1e-3)
    assert of(ours, "other/grad_norm")[0] > 0 and of(ours, "other/loss") != of(dapo, "other/loss")
    assert "note: EPS_HIGH=0.3 does nothing with LOSS_TYPE=topr\n" in ours.lines
    clipped = "other/clip_ratio/region_mean"
    assert of(dapo, clipped) == [0] and of(ours, clipped) == []
