"""Claims about the two penalties of rewards.py, on numbers of TRL 1.16 and at their edges."""

from contextlib import closing
from pathlib import Path

import pytest

from config import Config
from rewards import (
    BUILT_IN,
    DEFAULTS,
    Rewards,
    load_reward_functions,
    penalties,
    total_rewards,
    weights_of,
)
from runtime.mistakes import UserMistake
from startup import set_up


def overlong(lengths: list[int], max_length: int, overlong_cache: int) -> Rewards:
    function = penalties(max_length, overlong_cache)["soft_overlong_penalty"]
    return function([""] * len(lengths), completion_ids=[[7] * n for n in lengths], answer=["1"])


def repetition(completion_ids: list[list[int]]) -> Rewards:
    function = penalties(100, 20)["repetition_penalty"]
    return function([""] * len(completion_ids), completion_ids=completion_ids, answer=["1"])


def test_the_overlong_penalty_falls_linearly_over_the_last_tokens_as_in_trl() -> None:
    lengths = [1, 50, 79, 80, 81, 90, 99, 100, 101, 200]
    expected = [0.0, 0.0, 0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0, -1.0]
    assert overlong(lengths, 100, 20) == pytest.approx(expected)


def test_the_overlong_penalty_at_its_edges() -> None:
    assert overlong([0, 1, 5, 9, 10], 10, 10) == pytest.approx([0, -0.1, -0.5, -0.9, -1])
    for cache in (0, 1):  # only a completion of the full length is penalized
        assert overlong([0, 8, 9, 10, 11], 10, cache) == [0, 0, 0, -1, -1]
    assert overlong([], 10, 2) == []


IDS = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2, 1, 2, 1, 2], [7], [1, 2, 3, 1, 2, 3, 4]]


def test_the_repetition_penalty_is_the_share_of_repeated_ngrams_as_in_trl() -> None:
    trl_at_most_half = [0.0, -1 / 3, -0.25, 0.0, -0.1]  # TRL with max_penalty -0.5
    assert [r / 2 for r in repetition(IDS)] == pytest.approx(trl_at_most_half)


def test_the_repetition_penalty_at_its_edges() -> None:
    assert repetition([[], [4], [4, 4], [4, 4, 4], [4, 4, 4, 4]]) == [0, 0, 0, 0, -0.5]
    assert repetition([[1, 2, 3, 2, 1]]) == [0]  # (1, 2, 3) is not (3, 2, 1)


def test_reward_fn_names_a_penalty_beside_a_built_in_one() -> None:
    named = load_reward_functions("repetition_penalty, tag_count_reward", 1, penalties(9, 2))
    assert [f.__name__ for f in named] == ["repetition_penalty", "tag_count_reward"]
    columns = {"answer": ["1", "1"], "completion_ids": [[3, 3, 3, 3, 4], [3, 4]]}
    total, per_function = total_rewards(["<think>", ""], columns, named, [3.0, 1.0])
    assert total.tolist() == pytest.approx([-0.75, 0.0])
    assert per_function.tolist() == [[pytest.approx(-1 / 3), 0.25], [0.0, 0.0]]


def test_no_penalty_counts_unless_reward_fn_names_it() -> None:
    functions = load_reward_functions("", 1, penalties(9, 2))
    names = "reward_correct reward_format tag_count_reward"
    assert [f.__name__ for f in functions] == names.split()


def test_an_unknown_name_is_refused_with_all_known_names() -> None:
    names = [*BUILT_IN, "soft_overlong_penalty", "repetition_penalty"]
    with pytest.raises(UserMistake) as error:
        load_reward_functions("overlong_penalty", 1, penalties(9, 2))
    assert str(error.value) == (
        f"REWARD_FN: 'overlong_penalty' is not file.py:name, nor one of {names}"
    )


def test_a_function_of_a_file_gets_the_tokens(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def last(completions, completion_ids, **columns):\n"
        "    return [ids[-1] if ids else None for ids in completion_ids]\n"
    )
    functions = load_reward_functions(f"{tmp_path / 'mine.py'}:last", 30)
    with closing(functions[0]):
        columns = {"answer": ["1"] * 3, "completion_ids": [[5, 6], [], [7]]}
        total, _ = total_rewards(["a", "", "b"], columns, functions, [0.5])
    assert total.tolist() == pytest.approx([3.0, float("nan"), 3.5], nan_ok=True)


def test_the_overlong_penalty_begins_a_fifth_before_the_end_by_default() -> None:
    settings = {"REWARD_FN": "soft_overlong_penalty", "REWARD_WEIGHTS": "1"}
    run = set_up(Config.from_env(settings | {"MAX_LENGTH_SAMPLE": "50"}))
    ids = [[1] * n for n in (40, 45, 50)]
    assert run.functions[0]([""] * 3, completion_ids=ids) == [0, -0.5, -1]


@pytest.mark.parametrize(
    "settings, weights",
    [
        ({}, (1.0, 0.5, 0.5)),
        ({"REWARD_FN": "reward_correct,soft_overlong_penalty"}, (1.0, 1.0)),
        ({"REWARD_FN": "reward_format"}, (1.0,)),
        ({"REWARD_FN": "reward_format", "REWARD_WEIGHTS": "0.5"}, (0.5,)),
    ],
)
def test_each_reward_that_reward_fn_names_has_weight_1_by_default(
    settings: dict, weights: tuple
) -> None:
    cfg = Config.from_env(settings)
    assert weights_of(cfg.reward_weights, cfg.reward_fn) == weights


def test_the_default_functions_are_built_in_and_a_new_built_in_one_changes_no_default() -> None:
    assert DEFAULTS.keys() <= BUILT_IN.keys()
    functions = load_reward_functions("", 1)
    assert [function.__name__ for function in functions] == [*DEFAULTS]
    assert len(weights_of((), "")) == len(functions)
    made_with = set_up(Config.from_env({})).made_with
    assert made_with["REWARD_WEIGHTS"] == "1.0,0.5,0.5"  # as in older checkpoints


def test_spaces_between_the_entries_of_reward_fn_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def zero(completions, **columns):\n    return [0.0]\n")
    entries = ["reward_correct", f"{tmp_path / 'mine.py'}:zero"]
    found = [
        set_up(Config.from_env({"REWARD_FN": joint.join(entries)})).made_with
        for joint in (",", " , ")
    ]
    assert found[0] == found[1]
    assert found[0]["REWARD_FN"] == "reward_correct,mine.py:zero"
    assert len(found[0]["the file of REWARD_FN mine.py"]) > 8  # its digest


def test_a_run_that_never_evaluates_needs_no_split_to_evaluate_on() -> None:
    settings = {"EVAL_SPLIT": "absent", "EVAL_EVERY_STEPS": "0"}
    assert set_up(Config.from_env(settings)).eval_prompts == []
    with pytest.raises(UserMistake, match="has no split 'absent'|absent"):
        set_up(Config.from_env(settings | {"EVAL_FULL_SWEEP": "1"}))
