"""Claims about rollout.py, and about the groups and tokens from which a step learns.

The reward function of these runs records what it rewards. Before the first update every ratio is 1,
so that the loss of a token is minus its advantage.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_train import Result, train, train_two

from config import Config
from data import Prompt, batch_indices, load_examples
from models import hf
from rollout import (
    choose_groups,
    enough,
    have_equal_rewards,
    reward_completions,
)
from runtime.mistakes import UserMistake
from runtime.packing import Batch
from sampling import Completions

NAN = math.nan
TINY = Path(__file__).resolve().parent.parent / "tiny"
# The sizes of every run here; T cuts off a part of the completions.
P, K, T = 4, 8, 24
END = 2  # the tiny model's stop token
# The reward depends on the text if the answer is a multiple of DIFFER; else it is 0.7.
REWARDS = """
import json
import os
import zlib
def hashed(completions, question, answer, completion_ids, **columns):
    varied = [int(a.rpartition("####")[2]) % int(os.environ["DIFFER"]) == 0 for a in answer]
    pairs = zip(completions, varied)
    rewards = [zlib.crc32(text.encode()) % 5 / 2 if v else 0.7 for text, v in pairs]
    with open(os.environ["RECORD_TO"], "a", encoding="utf-8") as file:
        for entry in zip(question, rewards, completion_ids):
            file.write(json.dumps(entry) + "\\n")
    return rewards
def repeated(completions, completion_ids, **columns):
    return [len(set(ids)) / len(ids) - 1 for ids in completion_ids]
"""


class Group(NamedTuple):
    """The completions of one prompt, as the reward function recorded them."""

    question: str
    rewards: np.ndarray  # [K]
    ids: list[list[int]]  # the tokens of K completions

    def differs(self) -> bool:
        return len(set(self.rewards)) > 1


def groups_of(result: Result) -> list[Group]:
    columns = [zip(*entries, strict=True) for entries in parts(result.completions, K)]
    return [Group(questions[0], np.array(rewards), ids) for questions, rewards, ids in columns]


def parts(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def lengths(groups: list[Group]) -> np.ndarray:
    return np.array([len(ids) for g in groups for ids in g.ids])


def centered(r: np.ndarray) -> np.ndarray:
    return r - r.mean(axis=1, keepdims=True)


def scaled(r: np.ndarray) -> np.ndarray:
    return centered(r) / (r.std(axis=1, ddof=1, keepdims=True) + 1e-4)


def advantages(groups: list[Group]) -> np.ndarray:
    """[P*K] the advantages with the default settings."""
    return scaled(np.array([g.rewards for g in groups])).reshape(-1)


def token_mean_loss(advantages: np.ndarray, lengths: np.ndarray) -> float:
    return -(advantages * lengths).sum() / lengths.sum()


def of(result: Result, name: str) -> list[float]:
    """The values of a metric, one for each step."""
    return [record[f"train-{name}"] for record in result.records]


def assert_same(a: Result, b: Result, *names: str) -> None:
    for name in names:
        assert of(a, f"other/{name}") == pytest.approx(of(b, f"other/{name}"), 1e-5, 1e-7), name


def settings_of(folder: Path) -> dict[str, str]:
    """The settings of every run here, after the reward function is written to the folder."""
    (folder / "mine.py").write_text(REWARDS)
    return {
        "REWARD_FN": f"{folder / 'mine.py'}:hashed",
        "REWARD_WEIGHTS": "1",
        "DIFFER": "1",
        "DATASET": str(TINY),
        "ROLLOUT_GLOBAL_BATCH_SIZE": str(P),
        "NUM_PRE_Q": str(K),
        "MAX_LENGTH_SAMPLE": str(T),
        "TRAIN_MICRO_BATCH_SIZE": str(P * K),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollout")


@pytest.fixture(scope="module")
def base(folder: Path) -> dict[str, str]:
    return settings_of(folder)


@pytest.fixture(scope="module")
def plain(folder: Path, base: dict[str, str]) -> Result:
    return train(folder / "plain", **base)


@pytest.fixture(scope="module")
def picky(base: dict[str, str]) -> dict[str, str]:
    """The settings with which a step learns from a part of its groups, completions and tokens."""
    settings = {"DIFFER": "2", "DYNAMIC_SAMPLING": "1", "MASK_TRUNCATED_COMPLETIONS": "1"}
    return base | settings | {"TOP_ENTROPY_QUANTILE": "0.2", "ENTROPY_COEF": "0.01"}


@pytest.fixture(scope="module")
def picked(folder: Path, picky: dict[str, str]) -> Result:
    return train(folder / "picked", **picky)


# ---- The rewards of completions ------------------------------------------------------------------


def rewarding(*functions: Any) -> SimpleNamespace:
    """What reward_completions reads of a run, with these reward functions."""
    weights = (1.0,) * len(functions)
    return SimpleNamespace(tokenizer=hf.load_tokenizer(TINY), functions=functions, weights=weights)


def completions_of(texts: list[str], tokenizer: Any) -> Completions:
    ids = [tokenizer(text)["input_ids"] for text in texts]
    width = max(map(len, ids)) + 1
    padded = np.array([[*tokens, *[END] * (width - len(tokens))] for tokens in ids], np.int32)
    mask = np.array([[1] * (len(tokens) + 1) + [0] * (width - len(tokens) - 1) for tokens in ids])
    lengths = mask.sum(axis=1)
    return Completions(padded, mask, lengths, np.zeros(mask.shape, np.float32), lengths)


def test_each_completion_is_rewarded_with_the_tag_that_its_prompt_has_opened() -> None:
    """The tag is no part of the tokens. The columns of a prompt belong to all its completions."""
    rewarded: dict[str, list] = {}

    def lengths(completions: list[str], **columns: list) -> list[float]:
        rewarded.update(columns, completions=completions)
        return [float(len(ids)) for ids in columns["completion_ids"]]

    run = rewarding(lengths)
    starts = ["Add.<think>\n", "Add.", "Add.<think>"]
    prompts = [
        Prompt(run.tokenizer(start)["input_ids"], {"answer": f"{i}"})
        for i, start in enumerate(starts)
    ]
    texts = ["1+1=2", "2</think>", "3", "4 5", "6", "7"]
    completions = completions_of(texts, run.tokenizer)
    totals, per_function = reward_completions(run, prompts, completions)
    assert rewarded["completions"] == [
        "<think>\n1+1=2",
        "<think>\n2</think>",
        "3",
        "4 5",
        "<think>6",
        "<think>7",
    ]
    assert rewarded["answer"] == ["0", "0", "1", "1", "2", "2"]
    padded = zip(completions.completion_ids.tolist(), completions.lengths, strict=True)
    assert rewarded["completion_ids"] == [ids[:length] for ids, length in padded]
    assert totals.tolist() == completions.lengths.tolist()
    assert per_function.tolist() == [[total] for total in totals]


def test_a_reward_function_that_returns_too_few_rewards_is_a_mistake_of_the_user() -> None:
    def short(completions: list[str], **columns: list) -> list[float]:
        return [0.0]

    run = rewarding(short)
    completions = completions_of(["1", "2"], run.tokenizer)
    with pytest.raises(UserMistake, match="reward short must return a list of 2 rewards, not 1"):
        reward_completions(run, [Prompt([5], {"answer": "1"})], completions)


# ---- Dynamic sampling ----------------------------------------------------------------------------


def rounds_of(*rewards: list[float], P: int = 3) -> tuple[SimpleNamespace, list[Batch]]:
    """A run with P prompts per step and K=4, and its rounds with these rewards.

    Prompts and sequences are numbered over all rounds.
    """
    rounds = []
    for number, round_rewards in enumerate(rewards):
        count = len(round_rewards)
        ids = number * count + np.arange(count)  # [B]
        columns = (np.stack([x, 0 * x, 0 * x], axis=1) for x in (ids, ids + 1000, ids + 0.5))
        names = ("completion_ids", "completion_mask", "sampling_logps")
        arrays = dict(zip(names, columns, strict=True))  # [B, 3]
        arrays |= {"lengths": ids % 2 + 1, "stopped": ids % 2 > 0, "computed_tokens": 300 + ids}
        arrays |= {"rewards": np.array(round_rewards), "per_function": np.stack([ids, -ids], 1)}
        prompts = [Prompt([number * count // 4 + i], {}) for i in range(count // 4)]
        rounds.append(Batch(prompts, **arrays))
    cfg = Config(num_pre_q=4, dynamic_sampling=True, dynamic_sampling_max_rounds=3)
    run = SimpleNamespace(cfg=cfg, sizes=SimpleNamespace(prompts_per_step=P), weights=(1.0, 1.0))
    run.limits = SimpleNamespace(completion_width=lambda longest: longest)
    return run, rounds


SAME = [[0.7] * 4, [0.0] * 4, [1.0] * 4, [NAN] * 4, [NAN, 1.0, 1.0, 1.0]]
# In VARY[0] two rewards equal the mean; in VARY[3] only two rewards apply.
VARY = [[0.5, 0.5, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.7, 0.7, 0.7, 0.7000001], [NAN, 0, 1, NAN]]


@pytest.mark.parametrize(
    "first, second, chosen",
    [
        ([SAME[0], VARY[0], SAME[1]], [VARY[1], SAME[3], VARY[3]], [1, 3, 5]),
        ([SAME[0], VARY[0], SAME[1]], [VARY[1], VARY[2], VARY[3]], [1, 3, 4]),  # the first three
        ([SAME[0], SAME[1], VARY[0]], [SAME[2], SAME[3], VARY[2]], [0, 2, 5]),  # one group fills up
        ([SAME[4], SAME[1], SAME[2]], [SAME[3], SAME[4], VARY[3]], [0, 1, 5]),
        ([SAME[0], SAME[1], SAME[2]], [SAME[3], SAME[4], SAME[0]], [0, 1, 2]),
    ],
)
def test_a_step_takes_the_first_groups_whose_rewards_differ_then_fills_up(
    first: list, second: list, chosen: list[int]
) -> None:
    run, rounds = rounds_of(sum(first, []), sum(second, []))
    ids = [4 * group + k for group in chosen for k in range(4)]
    batch = choose_groups(run, rounds)
    assert [p.ids for p in batch.prompts] == [[group] for group in chosen]
    assert batch.completion_ids[:, 0].tolist() == ids
    assert batch.completion_mask[:, 0].tolist() == [1000 + i for i in ids]
    assert batch.sampling_logps[:, 0].tolist() == [i + 0.5 for i in ids]
    assert batch.sampling_logps.shape == (12, 2), "the width of the longest completion"
    np.testing.assert_array_equal(batch.rewards, np.array(sum(first + second, []))[ids])
    assert batch.prompt_lengths().tolist() == [1] * 12
    assert batch.lengths.tolist() == [i % 2 + 1 for i in ids]
    assert batch.stopped.tolist() == [i % 2 > 0 for i in ids]
    assert batch.computed_tokens.tolist() == [300 + i for i in ids]
    assert batch.per_function.tolist() == [[i, -i] for i in ids]


def test_of_many_groups_the_first_are_taken_in_order() -> None:
    equal = [group % 3 != 1 and group < 50 for group in range(60)]
    rewards = sum((SAME[0] if e else VARY[0] for e in equal), [])
    run, rounds = rounds_of(rewards[:120], rewards[120:], P=30)
    batch = choose_groups(run, rounds)
    kept = [g for g in range(60) if g % 3 == 1 or g >= 50]
    assert len(kept) == 27 and [p.ids[0] for p in batch.prompts] == sorted([0, 2, 3] + kept)


def test_rounds_go_on_until_enough_groups_differ_or_the_limit_is_reached() -> None:
    one, none, two = VARY[0] + SAME[0] + SAME[3], SAME[0] + SAME[1] + SAME[4], sum(VARY[2:], [])
    run, rounds = rounds_of(one, two + SAME[0], none)
    assert [enough(run, rounds[:n]) for n in range(4)] == [False, False, True, True]
    run, rounds = rounds_of(none, one, one)
    assert [enough(run, rounds[:n]) for n in range(4)] == [False, False, False, True]
    run.cfg = Config(num_pre_q=4)
    assert [enough(run, rounds[:n]) for n in range(2)] == [False, True]


def test_for_gdpo_a_group_differs_if_the_rewards_of_one_function_differ() -> None:
    """The functions here give the number of the sequence and its opposite, whatever the total."""
    run, rounds = rounds_of(SAME[0] * 3)
    assert have_equal_rewards(run, rounds).tolist() == [True, True, True]
    run.cfg = Config(num_pre_q=4, adv_estimator="gdpo")
    assert have_equal_rewards(run, rounds).tolist() == [False, False, False]
    run.weights = (0.0, 0.0)  # functions without a weight only measure
    assert have_equal_rewards(run, rounds).tolist() == [True, True, True]


def test_one_round_gives_the_step_without_dynamic_sampling(
    folder: Path, base: dict[str, str], plain: Result
) -> None:
    one = train(folder / "one", **base, DYNAMIC_SAMPLING="1", DYNAMIC_SAMPLING_MAX_ROUNDS="1")
    assert one.completions == plain.completions
    same, added = plain.records[0], one.records[0].keys() - plain.records[0].keys()
    of_machine = ("time/", "throughput/", "memory/", "compile/")
    for name in (name for name in same if not name.startswith(of_machine)):
        assert one.records[0][name] == same[name], name
    assert added and all(name.startswith("train-other/dynamic_sampling/") for name in added)
    groups = groups_of(plain)
    loss = token_mean_loss(advantages(groups), lengths(groups))
    assert of(plain, "other/loss") == pytest.approx([loss], abs=1e-6) and abs(loss) > 1e-3
    assert of(plain, "other/total_valid_token_count") == [lengths(groups).sum()]


@pytest.mark.parametrize("differ, runs_out", [("2", False), ("8", True)])
def test_a_step_learns_from_the_groups_that_differ_and_the_next_takes_new_prompts(
    folder: Path, base: dict[str, str], differ: str, runs_out: bool
) -> None:
    settings = {"STEPS": "2", "DYNAMIC_SAMPLING": "1", "DYNAMIC_SAMPLING_MAX_ROUNDS": "3"}
    result = train(folder / f"differ{differ}", **base | settings | {"DIFFER": differ})
    left = groups_of(result)
    tiny = load_examples(str(TINY), "", "train")
    in_order = batch_indices(len(tiny), len(left), 0, 0)  # the epoch's order, without repeats
    assert [g.question for g in left] == [tiny[i]["question"] for i in in_order]

    for record in result.records:
        sampled: list[Group] = []
        while len(sampled) < 3 * P and sum(g.differs() for g in sampled) < P:
            sampled, left = sampled + left[:P], left[P:]
        kept = [g for g in sampled if g.differs()]
        step = (kept + [g for g in sampled if not g.differs()])[:P]
        assert len(sampled) > P and 0 < len(kept) and (len(kept) < P) == runs_out
        expected = {
            "other/batch_global": 32,
            "other/dynamic_sampling/rounds": len(sampled) // P,
            "other/dynamic_sampling/kept_frac": len(kept) / len(sampled),
            "other/dynamic_sampling/reward_mean": np.mean([g.rewards for g in sampled]),
            "other/dynamic_sampling/accuracy": np.mean([g.rewards >= 1 for g in sampled]),
            "other/dynamic_sampling/hit_max_frac": 1 - finished(sampled).mean(),
            "other/frac_reward_zero_std": max(0, 1 - len(kept) / P),
            "other/total_valid_token_count": lengths(step).sum(),
            "other/loss": token_mean_loss(advantages(step), lengths(step)),
            "reward/total/mean": np.mean([g.rewards for g in step]),
        }
        found = {name: record[f"train-{name}"] for name in expected}
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        told = f" rounds={len(sampled) // P} kept={len(kept) / len(sampled):.4f}\n"
        assert told in result.lines
    assert not left


def test_each_round_draws_new_tokens_and_equal_rewards_give_no_gradient(
    folder: Path, base: dict[str, str]
) -> None:
    example = '{"question": "What is 3 + 4 + 5?", "answer": "#### 12"}\n'
    (folder / "same.jsonl").write_text(50 * example)
    settings = {"DATASET": str(folder / "same.jsonl"), "DIFFER": "1000", "STEPS": "2"}
    settings |= {"DYNAMIC_SAMPLING": "1", "DYNAMIC_SAMPLING_MAX_ROUNDS": "2"}
    result = train(folder / "same", **base | settings)
    drawn = [str([g.ids for g in four]) for four in parts(groups_of(result), P)]
    assert len(drawn) == len(set(drawn)) == 4
    assert of(result, "other/batch_global") == [32, 32]
    assert of(result, "other/frac_reward_zero_std") == [1, 1]
    assert of(result, "other/loss") == of(result, "other/grad_norm") == [0, 0]
    for step in (0, 1):
        told = f"dynamic_sampling step={step} rounds=2 kept=0.0000\nnote step={step}: all adv"
        assert told in result.lines


@pytest.mark.slow
def test_two_processes_choose_the_groups_and_the_tokens_that_one_process_chooses(
    folder: Path, picky: dict[str, str], picked: Result
) -> None:
    first, second = train_two(folder / "two", 2, **picky | {"TRAIN_MICRO_BATCH_SIZE": "8"})
    halves = [parts(groups_of(r), P // 2) for r in (first, second)]
    groups = [g for pair in zip(*halves, strict=True) for half in pair for g in half]
    assert [g.ids for g in groups] == [g.ids for g in groups_of(picked)]
    kept = [i for i, g in enumerate(groups) if g.differs()][:P]
    assert len(groups) > P == len(kept)
    assert all(finished([groups[i] for i in half]).any() for half in parts(kept, 2))
    assert [i % P // 2 for i in kept] != [0, 0, 1, 1], "every group is trained where it was sampled"
    assert_same(picked, first, "loss", "policy_loss", "grad_norm", "entropy")
    assert_same(picked, first, "dynamic_sampling/rounds", "dynamic_sampling/kept_frac")
    assert of(first, "reward/total/mean") == [np.mean([groups[i].rewards for i in kept])]


# ---- Which tokens --------------------------------------------------------------------------------


def finished(groups: list[Group]) -> np.ndarray:
    """[P*K] bool: a stop token ended the completion."""
    return np.array([ids[-1] == END for g in groups for ids in g.ids])


def test_completions_that_were_cut_off_teach_nothing(
    folder: Path, base: dict[str, str], plain: Result
) -> None:
    masked = train(folder / "masked", **base, MASK_TRUNCATED_COMPLETIONS="1")
    assert masked.completions == plain.completions
    groups = groups_of(masked)
    ended = finished(groups)
    assert 0.1 < ended.mean() < 0.9
    loss = token_mean_loss(advantages(groups)[ended], lengths(groups)[ended])
    assert of(masked, "other/loss") == pytest.approx([loss], abs=1e-6)
    assert abs(loss - of(plain, "other/loss")[0]) > 1e-3
    assert of(masked, "seq_len/completion/hit_max_frac") == pytest.approx([1 - ended.mean()])
    assert of(masked, "reward/total/mean") == of(plain, "reward/total/mean")


def test_the_tokens_of_highest_entropy_in_a_step_do_not_depend_on_the_micro_batch(
    folder: Path, picky: dict[str, str], picked: Result
) -> None:
    small = train(folder / "micro4", **picky | {"TRAIN_MICRO_BATCH_SIZE": "4"})
    assert_same(picked, small, "loss", "policy_loss", "grad_norm", "entropy")
    groups = [g for g in groups_of(picked) if g.differs()][:P]
    ended = finished(groups)
    assert 0.1 < ended.mean() < 0.9
    every_token = token_mean_loss(advantages(groups)[ended], lengths(groups)[ended])
    values = {n: of(picked, f"other/{n}")[0] for n in ("loss", "policy_loss", "exact_entropy")}
    assert abs(values["policy_loss"] - every_token) > 1e-3
    # The bonus is the mean entropy of a fifth of the tokens, which have nearly all the entropy.
    bonus = (values["policy_loss"] - values["loss"]) / 0.01
    assert 2 < bonus / values["exact_entropy"] < 5.1


def test_a_bug_in_a_built_in_reward_keeps_its_traceback() -> None:
    def buggy(completions: list[str], **columns: list) -> list[float]:
        return [float(int("1.5"))]

    run = rewarding(buggy)
    with pytest.raises(ValueError, match="invalid literal") as error:
        reward_completions(run, [Prompt([5], {})], completions_of(["1"], run.tokenizer))
    assert type(error.value) is ValueError and error.traceback[-1].name == "buggy"
