"""Forks: each drill of drills.py is small and works in real runs, and tests of its fork stay green.

A drill that replaces a formula turns those tests red that have figures of the formula, and no
others.
"""

import json
import os
import re
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
    FROZEN_EMBEDDING,
    LORA,
    REPO,
    REWARD_OF_A_FILE,
    SCHEDULE,
    SETTING,
    Drill,
    Edit,
    edited,
    make_fork,
    new_lines,
    table,
)
from safetensors.numpy import load_file
from test_readme import README
from test_readme import table as table_of_page
from test_train import Result, finish, start

from rewards import load_reward_functions

# 16 sequences in a step, and the rewards of a run without REWARD_FN. With SEED=1 rewards of the
# first step differ within a group.
SMALL = """
    BATCH_SIZE=4 NUM_PRE_Q=4 MAX_LENGTH_SAMPLE=32 SEED=1 REWARD_FN= REWARD_WEIGHTS= EXPORT_HF=none
    SAVE_EVERY_STEPS=0 SAMPLE_EVERY_STEPS=1
"""
QUESTIONS = 16  # of an evaluation
ADDITIONS = (REWARD_OF_A_FILE, BUILT_IN_REWARD, COUNTDOWN, SCHEDULE, SETTING)
# The tests that read what these drills edit.
TESTS_OF_ADDITIONS = """
    tests/test_config.py tests/test_parsing.py tests/test_contradictions.py tests/test_rewards.py
    tests/test_readme.py
    tests/test_penalties.py::test_an_unknown_name_is_refused_with_all_known_names
    tests/test_optimizer.py::test_the_learning_rate_by_hand
    tests/test_optimizer.py::test_an_unknown_schedule_of_the_learning_rate_is_refused
    test_smoke.py::test_every_file_can_be_imported
    test_smoke.py::test_a_file_imports_only_from_its_room_and_the_rooms_below
    test_smoke.py::test_the_top_level_is_a_handful_of_files_and_each_room_says_what_it_is
    test_smoke.py::test_every_setting_is_read
""".split()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forks")


def settings_of(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split())


def train(repo: Path, out: Path, settings: str = "") -> Result:
    """A run of the code in `repo`; later runs find the compiled programs of earlier ones."""
    result = finish(start(out, settings_of(SMALL + settings), 1, repo), out)
    assert result.code == 0, result.errors
    return result


def of(result: Result, name: str) -> list[float]:
    """The values of a metric of all steps."""
    return [r[f"train-{name}"] for r in result.records if f"train-{name}" in r]


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def unedited(out: Path) -> Result:
    """A step of the code as it is, with the defaults, after an evaluation."""
    return train(REPO, out / "unedited", f"EVAL_EVERY_STEPS=1 EVAL_PROMPTS={QUESTIONS}")


def red_tests(fork: Path, *arguments: str) -> set[str]:
    """The names of the tests that fail in a fork. arguments: of pytest."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-rfE", *arguments]
    done = subprocess.run(command, cwd=fork, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1) and " passed" in done.stdout, done.stdout + done.stderr
    print(done.stdout)  # pytest shows it if the caller's claim fails
    return set(re.findall(r"^(?:FAILED|ERROR) \S+?::(\w+)", done.stdout, re.M))


# ---- The drills ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_a_drill_edits_at_most_two_files_and_no_more_lines_than_it_says(drill: Drill) -> None:
    lines = new_lines(drill)
    assert len([file for file in lines if not file.startswith("tests/")]) <= 2
    assert sum(lines.values()) <= drill.lines


@pytest.mark.parametrize("drill", [d for d in DRILLS if d.row], ids=lambda drill: drill.name)
def test_the_readme_names_the_files_that_a_drill_edits(drill: Drill) -> None:
    """But not the file in which a new setting acts: that can be any file."""
    (row,) = [row for row in table_of_page(README, "To change X, edit Y") if drill.row in row[0]]
    for file in edited(drill).keys() - {"rollout.py"}:
        assert file in row[1]


def test_the_page_for_contributors_has_the_table_of_drills() -> None:
    assert "\n".join(table()) in (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_table_of_drills_counts_new_and_changed_lines() -> None:
    rows = table()
    assert len(rows) == 2 + len(DRILLS)
    assert "| some of the weights only | `update.py` | 2 |" in rows
    assert "| a setting | `config.py`, `rollout.py`, `tests/test_config.py` | 1, 2, 1 |" in rows


@pytest.mark.parametrize("old, times", [("no such text", 0), ("Software", 5)])
def test_a_drill_that_no_longer_fits_says_which_one_and_which_file(old: str, times: int) -> None:
    drill = Drill("mine", 1, (Edit("LICENSE", old, ""),))
    told = f"^the drill 'mine' replaces a text that LICENSE holds {times} times, not once; update"
    with pytest.raises(AssertionError, match=told):
        edited(drill)


@pytest.mark.slow
def test_the_additions_turn_no_test_red(tmp_path: Path) -> None:
    """They are files of the user, a reward, a schedule and a setting, all in one fork."""
    assert red_tests(make_fork(tmp_path / "fork", *ADDITIONS), *TESTS_OF_ADDITIONS) == set()


@pytest.mark.slow
def test_a_fork_with_all_drills_passes_the_first_tests(tmp_path: Path) -> None:
    """But adapters, which take the place of the edits for some of the weights."""
    drills = [drill for drill in DRILLS if drill is not LORA]
    assert red_tests(make_fork(tmp_path / "fork", *drills), "test_smoke.py") == set()


# ---- Rewards -------------------------------------------------------------------------------------


def test_a_reward_of_a_file_and_a_new_built_in_one_reward_each_completion(out: Path) -> None:
    fork = make_fork(out / "rewarding", REWARD_OF_A_FILE, BUILT_IN_REWARD)
    result = train(fork, out / "rewarded", "REWARD_FN=my.py:score,brevity REWARD_WEIGHTS=2,0.5")
    groups = lines_of(out / "rewarded" / "samples.jsonl")
    completions = [completion for group in groups for completion in group["completions"]]
    assert len(completions) >= 4
    for completion in completions:
        sevens, length = completion["text"].count("7"), len(completion["text"])
        assert completion["rewards"] == {"score": sevens, "brevity": -length / 100}
        assert completion["reward"] == pytest.approx(2 * sevens - 0.5 * length / 100)
    means = [of(result, f"reward/func/{name}/mean")[0] for name in ("score", "brevity")]
    assert of(result, "reward/total/mean") == [pytest.approx(2 * means[0] + 0.5 * means[1])]
    assert of(result, "other/grad_norm")[0] > 0


def test_a_new_setting_reaches_the_step_and_is_checked_like_the_others(
    out: Path, unedited: Result
) -> None:
    fork = make_fork(out / "setting", SETTING)
    result = train(fork, out / "scaled", "REWARD_SCALE=3")
    assert re.search("^changed: .*REWARD_SCALE=3.0 [(]environment[)]", result.lines, re.M)
    mean = of(unedited, "reward/total/mean")[0]
    assert of(result, "reward/total/mean") == [pytest.approx(3 * mean)] and mean > 0
    wrong = {
        "REWARD_SCALES=3": "unknown setting REWARD_SCALES; did you mean REWARD_SCALE?",
        "REWARD_SCALE=three": "REWARD_SCALE='three' is not a number",
        "REWARD_SCALE=0": "REWARD_SCALE=0.0 must be above 0",
    }
    for setting, told in wrong.items():
        mistaken = finish(start(out / "wrong", settings_of(setting), 1, fork), out / "wrong")
        assert mistaken.code == 2 and mistaken.errors.startswith(f"error: {told}")
        assert len(mistaken.errors.splitlines()) == 1


# ---- Another task --------------------------------------------------------------------------------

CASES = """
    1 (8-3)*1+1 6 8 3 1 1 | 1 3*8 24 3 8 | 1 8/(3-8/3) 24 3 3 8 8 | 1 3-8 -5 3 8 | 0 24 24 3 8
    0 8*3*1 24 3 8 | 0 38-14 24 3 8 14 | 0 9**9**9**9 6 9 9 9 9 | 0 9//2 4 2 9 | 0 3(8) 24 3 8
    0 3/(3-3) 24 3 3 3 | 0 (3*8 24 3 8 | 0 3+8 24 3 8 | 0 3*08 24 3 8
"""


@pytest.fixture(scope="module")
def countdown(out: Path) -> Path:
    return make_fork(out / "countdown", COUNTDOWN)


@pytest.fixture(scope="module")
def puzzles(countdown: Path) -> list[dict[str, str]]:
    """What the generator of countdown prints."""
    command = [sys.executable, "countdown.py"]
    printed = subprocess.run(command, cwd=countdown, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in printed.stdout.splitlines()]


def rewards_of(countdown: Path, texts: list[str], **columns: list[str]) -> list[float]:
    (reward,) = load_reward_functions(f"{countdown}/countdown.py:countdown", timeout_s=10)
    with closing(reward):
        return reward([f"<answer>{text}</answer>" for text in texts], **columns)


def test_countdown_rewards_calculations_with_the_numbers_of_the_question(countdown: Path) -> None:
    """Each case is the reward, the calculation, the answer, and the numbers of the question."""
    cases = [case.split() for line in CASES.strip().splitlines() for case in line.split("|")]
    rewards, texts, answers, *_ = zip(*cases, strict=False)
    texts, answers = [*texts, "-" * 9999 + "3*8"], [*answers, "24"]
    numbers = [" ".join(case[3:]) for case in cases] + ["3 8"]
    given = rewards_of(countdown, texts, answer=answers, numbers=numbers)
    assert given == [*map(float, rewards), 0.0]


def test_every_puzzle_of_countdown_has_a_solution_and_is_there_once(
    countdown: Path, puzzles: list[dict[str, str]]
) -> None:
    assert len({puzzle["question"] for puzzle in puzzles}) == len(puzzles) > 1000
    columns = {name: [puzzle[name] for puzzle in puzzles] for name in puzzles[0]}
    solutions = columns["solution"]
    assert rewards_of(countdown, solutions, **columns) == [1.0] * len(puzzles)
    others = rewards_of(countdown, solutions[1:] + solutions[:1], **columns)
    assert others == [0.0] * len(puzzles)


def test_the_accuracy_of_countdown_is_the_share_of_right_calculations(
    out: Path, unedited: Result, countdown: Path, puzzles: list[dict[str, str]]
) -> None:
    """What the tiny model answers to its questions is known from the unedited run. As puzzles they
    get numbers and answers so that five calculations are right: the accuracy is 5/16."""
    asked = [entry for entry in lines_of(out / "unedited" / "eval.jsonl") if entry["step"] == 0]
    texts = [entry["completions"][0]["text"] for entry in asked]
    found = [re.search(r"<answer>(\d+)</answer>", text) for text in texts]
    said = [int(match[1]) if match else 0 for match in found]
    plain = [i for i in range(QUESTIONS) if found[i]]
    assert len(texts) == QUESTIONS and len(plain) > 8
    examples = [
        {"question": entry["question"], "answer": str(number), "numbers": f"{number} 1"}
        for entry, number in zip(asked, said, strict=True)
    ]  # all leave out the number 1
    for i in plain[:5]:
        examples[i]["numbers"] = str(said[i])  # these are right
    for i in plain[5:7]:
        examples[i] |= {"answer": str(said[i] + 1), "numbers": str(said[i])}  # these miss by 1

    # The last tenth of a single file is held out.
    lines = map(json.dumps, [*puzzles[: 9 * QUESTIONS], *examples])
    (out / "known.jsonl").write_text("\n".join(lines), encoding="utf-8")
    settings = f"DATASET={out}/known.jsonl EVAL_EVERY_STEPS=1 EVAL_PROMPTS={QUESTIONS} "
    settings += "REWARD_FN=countdown.py:countdown,reward_correct"
    result = train(countdown, out / "known", settings)
    again = [entry for entry in lines_of(out / "known" / "eval.jsonl") if entry["step"] == 0]
    assert [entry["completions"][0]["text"] for entry in again] == texts
    assert re.search(
        "^eval step=0 .* accuracy=0.3125 .* accuracy_of=countdown ", result.lines, re.M
    )
    evaluated = next(record for record in result.records if "eval/accuracy" in record)
    assert evaluated["eval/accuracy"] == 5 / 16
    assert evaluated["eval/reward/func/reward_correct/mean"] > 5 / 16, "GSM8K's differs"
    (group, *_) = lines_of(out / "known" / "samples.jsonl")
    assert group["question"].startswith("Reach ")
    assert of(result, "reward/func/countdown/mean")[0] >= 0


# ---- The objective, the learning rate and the weights --------------------------------------------


@pytest.fixture(scope="module")
def dr_grpo(out: Path) -> Path:
    return make_fork(out / "dr_grpo", DR_GRPO)


def test_dr_grpo_by_hand_is_the_one_of_the_settings(
    out: Path, unedited: Result, dr_grpo: Path
) -> None:
    by_hand = train(dr_grpo, out / "by_hand")
    by_settings = train(REPO, out / "by_settings", "LOSS_TYPE=dr_grpo SCALE_REWARDS=none")
    names = ("other/loss", "other/grad_norm", "reward/advantage/std", "reward/advantage/max")
    for name in names:
        assert of(by_hand, name) == of(by_settings, name) and len(of(by_hand, name)) == 1
        assert of(by_hand, name) != pytest.approx(of(unedited, name), rel=0.1)


OF_THE_LOSS = """
    test_the_objective_is_that_of_trl test_the_loss_of_a_token_by_hand test_the_kl_by_hand
    test_the_denominators_by_hand test_what_weights_top_tokens_and_entropy_apply_to
"""


@pytest.mark.parametrize(
    "file, red",
    [
        ("test_advantages.py", "test_advantages_by_hand test_advantages_are_those_of_trl"),
        pytest.param("test_loss.py", OF_THE_LOSS, marks=pytest.mark.slow),
    ],
)
def test_dr_grpo_by_hand_turns_only_tests_red_that_have_figures_of_the_old_formulas(
    dr_grpo: Path, file: str, red: str
) -> None:
    assert red_tests(dr_grpo, f"tests/{file}") == set(red.split())


def test_a_new_schedule_gives_the_rates_of_its_formula_without_a_word_about_their_end(
    out: Path,
) -> None:
    """The inverse square root: 1/2 and 1, then the root of 2/3 and of 2/4."""
    fork = make_fork(out / "schedule", SCHEDULE)
    settings = "LR_SCHEDULE=inverse_sqrt LEARNING_RATE=1e-3 STEPS=4 "
    result = train(fork, out / "scheduled", settings + "WARMUP_RATIO=1 LR_DECAY_STEPS=2")
    expected = [0.5e-3, 1e-3, 0.81649658e-3, 0.70710678e-3]
    assert of(result, "other/learning_rate") == pytest.approx(expected, rel=1e-6)
    assert "note: LR_DECAY_STEPS" not in result.lines


@pytest.fixture(scope="module")
def frozen(out: Path) -> Path:
    return make_fork(out / "frozen", FROZEN_EMBEDDING)


def test_a_frozen_embedding_keeps_its_bits_and_all_other_weights_change(
    out: Path, frozen: Path
) -> None:
    """Weight decay alone would change it too."""
    settings = f"LEARNING_RATE=1e-3 WEIGHT_DECAY=0.1 EXPORT_HF={out}/hf"
    train(frozen, out / "trained", settings)
    before, after = (load_file(x / "model.safetensors") for x in (REPO / "tiny", out / "hf"))
    assert before.keys() == after.keys() and len(before) == 50
    kept = {name for name in before if np.array_equal(before[name], after[name])}
    assert kept == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(
    "file, red",
    [
        ("test_optimizer.py", "test_three_updates_follow_the_formulas"),
        pytest.param(
            "test_update.py",
            "test_loss_gradient_and_metrics_equal_those_of_numpy",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_frozen_embedding_turns_only_a_test_red_that_updates_all_weights(
    frozen: Path, file: str, red: str
) -> None:
    assert red_tests(frozen, f"tests/{file}") == {red}


@pytest.fixture(scope="module")
def lora(out: Path) -> Path:
    return make_fork(out / "lora", LORA)


def test_adapters_change_each_matrix_of_a_layer_by_their_rank_and_nothing_else(
    out: Path, lora: Path
) -> None:
    settings = f"STEPS=2 LEARNING_RATE=1e-2 WEIGHT_DECAY=0.1 EXPORT_HF={out}/lora_hf "
    train(lora, out / "adapted", settings + "LR_SCHEDULE=constant")
    before, after = (load_file(x / "model.safetensors") for x in (REPO / "tiny", out / "lora_hf"))
    for name in before:
        change = after[name] - before[name]
        if "_proj.weight" in name:
            sizes = np.linalg.svd(change.astype(np.float64), compute_uv=False)
            assert sizes[7] > 1e-4 > 1e-6 > sizes[8], name
        else:
            assert not change.any(), name


@pytest.mark.slow
def test_adapters_go_on_from_a_checkpoint_to_the_bit(out: Path, lora: Path) -> None:
    settings = "LEARNING_RATE=1e-2 LR_DECAY_STEPS=2 SAVE_EVERY_STEPS=1 "
    train(lora, out / "straight", f"{settings} STEPS=2 EXPORT_HF={out}/straight_hf")
    train(lora, out / "resumed", f"{settings} STEPS=1")
    train(lora, out / "resumed", f"{settings} STEPS=2 EXPORT_HF={out}/resumed_hf")
    straight, resumed = (
        load_file(out / f"{name}_hf" / "model.safetensors") for name in ("straight", "resumed")
    )
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)


def test_the_gradients_of_adapters_are_those_of_jax(lora: Path) -> None:
    code = """if True:
        import jax, numpy as np, update
        from models.model import Layers
        rng = np.random.default_rng(0)
        W, C = rng.normal(size=(2, 3, 12, 10)).astype(np.float32)
        adapters = {"up": (rng.normal(size=(3, 12, 8)), rng.normal(size=(3, 8, 10)))}
        loss = lambda w: (np.float32(2) * C * jax.numpy.sin(w)).sum()
        of_adapters = lambda x: loss(W + update.SCALE * x["up"][0] @ x["up"][1])
        w = W + update.SCALE * adapters["up"][0] @ adapters["up"][1]
        fields = {name: None for name in Layers.__dataclass_fields__} | {"up": jax.grad(loss)(w)}
        params = update.Params(embed=None, layers=Layers(**fields), final_norm=None, lm_head=None)
        found = update.adapter_grads(params, adapters)["up"]
        for ours, exact in zip(found, jax.grad(of_adapters)(adapters)["up"], strict=True):
            assert ours.shape == exact.shape
            np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-4)
    """
    subprocess.run([sys.executable, "-c", code], cwd=lora, check=True)
