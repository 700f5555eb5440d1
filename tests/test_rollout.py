"""What a step learns from: groups, tokens, objectives. The runs' rewards write down what they saw;
before the first update the ratio is 1, so that the loss of a token is minus its advantage."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from test_train import Result, train, train_two

from config import Config
from data import Prompt, batch_indices, load_rows
from loss import Objective
from metrics import StepRows
from rollout import Rollout
from sampling import Round, choose_groups, enough, equal_groups
from startup import set_up

NAN = math.nan
P, K, T = 4, 8, 24  # of every run here; T cuts off some of the completions and not others
END = 2  # the tiny model's stop token
# Depends on the text where the answer is a multiple of DIFFER, and is 0.7 elsewhere.
REWARDS = """
import json
import os
import zlib
def hashed(completions, question, answer, completion_ids, **columns):
    varied = [int(a.rpartition("####")[2]) % int(os.environ["DIFFER"]) == 0 for a in answer]
    pairs = zip(completions, varied)
    rewards = [zlib.crc32(text.encode()) % 5 / 2 if v else 0.7 for text, v in pairs]
    with open(os.environ["RECORD_TO"], "a", encoding="utf-8") as file:
        for row in zip(question, rewards, completion_ids):
            file.write(json.dumps(row) + "\\n")
    return rewards
"""


class Group(NamedTuple):
    """What the reward saw of one prompt's completions."""

    question: str
    rewards: np.ndarray  # [K]
    ids: list[list[int]]  # [K] tokens

    def differs(self) -> bool:
        return len(set(self.rewards)) > 1


def groups_of(result: Result) -> list[Group]:
    columns = [zip(*rows, strict=True) for rows in parts(result.completions, K)]
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
    """[P*K], the default ones."""
    return scaled(np.array([g.rewards for g in groups])).reshape(-1)


def token_mean_loss(advantages: np.ndarray, lengths: np.ndarray) -> float:
    return -(advantages * lengths).sum() / lengths.sum()


def of(result: Result, name: str) -> list[float]:
    """A number of every step."""
    return [record[f"train-{name}"] for record in result.records]


def assert_same(a: Result, b: Result, *names: str) -> None:
    for name in names:
        assert of(a, f"other/{name}") == pytest.approx(of(b, f"other/{name}"), 1e-5, 1e-7), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounds")
    (folder / "mine.py").write_text(REWARDS)
    return folder


@pytest.fixture(scope="module")
def base(folder: Path) -> dict[str, str]:
    """The settings of every run here."""
    return {
        "REWARD_FN": f"{folder / 'mine.py'}:hashed",
        "REWARD_WEIGHTS": "1",
        "DIFFER": "1",
        "ROLLOUT_GLOBAL_BATCH_SIZE": str(P),
        "NUM_PRE_Q": str(K),
        "MAX_LENGTH_SAMPLE": str(T),
        "TRAIN_MICRO_BATCH_SIZE": str(P * K),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles sooner
    }


@pytest.fixture(scope="module")
def plain(folder: Path, base: dict[str, str]) -> Result:
    return train(folder / "plain", **base)


@pytest.fixture(scope="module")
def picky(base: dict[str, str]) -> dict[str, str]:
    """Of all groups, completions and tokens, learn from some."""
    settings = {"DIFFER": "2", "DYNAMIC_SAMPLING": "1", "MASK_TRUNCATED_COMPLETIONS": "1"}
    return base | settings | {"TOP_ENTROPY_QUANTILE": "0.2", "ENTROPY_COEF": "0.01"}


@pytest.fixture(scope="module")
def picked(folder: Path, picky: dict[str, str]) -> Result:
    return train(folder / "picked", **picky)


# ---- Dynamic sampling ----------------------------------------------------------------------------


def rounds_of(*rewards: list[float], size: int = 3) -> tuple[SimpleNamespace, list[Round]]:
    """A run of P=3, K=4 and its rounds with these rewards; prompts and rows are numbered."""
    rounds = []
    for number, row in enumerate(rewards):
        first, count = number * len(row), len(row)
        ids = np.arange(first, first + count)[:, None]  # [B, 1]
        prompts = [Prompt([first // 4 + i], {}) for i in range(count // 4)]
        table = np.column_stack([row, 100 + ids, 200 + ids, ids % 2, ids, -ids])
        rounds.append(Round(prompts, Rollout(ids, ids + 1000, ids + 0.5), StepRows.of(table)))
    settings = {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 3}
    cfg = SimpleNamespace(num_pre_q=4, adv_estimator="grpo", **settings)
    return SimpleNamespace(cfg=cfg, sizes=SimpleNamespace(prompts_per_step=size)), rounds


SAME = [[0.7] * 4, [0.0] * 4, [1.0] * 4, [NAN] * 4, [NAN, 1.0, 1.0, 1.0]]
# The mean of the first is that of no reward at all; the last has two rewards that apply.
VARY = [[0.5, 0.5, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.7, 0.7, 0.7, 0.7000001], [NAN, 0, 1, NAN]]


@pytest.mark.parametrize(
    "first, second, chosen",
    [
        ([SAME[0], VARY[0], SAME[1]], [VARY[1], SAME[3], VARY[3]], [1, 3, 5]),
        ([SAME[0], VARY[0], SAME[1]], [VARY[1], VARY[2], VARY[3]], [1, 3, 4]),  # the first three
        ([SAME[0], SAME[1], VARY[0]], [SAME[2], SAME[3], VARY[2]], [0, 2, 5]),  # and one to fill up
        ([SAME[4], SAME[1], SAME[2]], [SAME[3], SAME[4], VARY[3]], [0, 1, 5]),
        ([SAME[0], SAME[1], SAME[2]], [SAME[3], SAME[4], SAME[0]], [0, 1, 2]),
    ],
)
def test_a_step_takes_the_first_groups_whose_rewards_differ_then_fills_up(
    first: list, second: list, chosen: list[int]
) -> None:
    run, rounds = rounds_of(sum(first, []), sum(second, []))
    rows = [4 * group + k for group in chosen for k in range(4)]
    prompts, roll, table = choose_groups(run, rounds, slice(0, 12))
    assert [p.ids for p in prompts] == [[group] for group in chosen]
    assert roll.completion_ids[:, 0].tolist() == rows
    assert roll.completion_mask[:, 0].tolist() == [1000 + row for row in rows]
    assert roll.sampling_logps[:, 0].tolist() == [row + 0.5 for row in rows]
    rewards = np.array(sum(first + second, []))[rows]
    np.testing.assert_array_equal(table.rewards, rewards)
    assert table.prompt_lengths.tolist() == [100 + row for row in rows]
    assert table.completion_lengths.tolist() == [200 + row for row in rows]
    assert table.stopped.tolist() == [row % 2 for row in rows]
    assert table.per_function.tolist() == [[row, -row] for row in rows]
    # The second of three processes has the second group, and everyone's rows.
    prompts, roll, table = choose_groups(run, rounds, slice(4, 8))
    assert [p.ids for p in prompts] == [[chosen[1]]]
    assert roll.completion_ids[:, 0].tolist() == rows[4:8]
    assert table.prompt_lengths.tolist() == [100 + row for row in rows]


def test_of_many_groups_the_first_are_taken_in_order() -> None:
    equal = [group % 3 != 1 and group < 50 for group in range(60)]
    rewards = sum((SAME[0] if e else VARY[0] for e in equal), [])
    run, rounds = rounds_of(rewards[:120], rewards[120:], size=30)
    prompts, *_ = choose_groups(run, rounds, slice(0, 120))
    kept = [g for g in range(60) if g % 3 == 1 or g >= 50]
    assert len(kept) == 27 and [p.ids[0] for p in prompts] == sorted([0, 2, 3] + kept)


def test_rounds_go_on_until_enough_groups_differ_or_the_limit_is_reached() -> None:
    one, none, two = VARY[0] + SAME[0] + SAME[3], SAME[0] + SAME[1] + SAME[4], sum(VARY[2:], [])
    run, rounds = rounds_of(one, two + SAME[0], none)
    assert [enough(run, rounds[:n]) for n in range(4)] == [False, False, True, True]
    run, rounds = rounds_of(none, one, one)
    assert [enough(run, rounds[:n]) for n in range(4)] == [False, False, False, True]
    run.cfg.dynamic_sampling = False
    assert [enough(run, rounds[:n]) for n in range(2)] == [False, True]


def test_for_gdpo_a_group_differs_if_one_function_does() -> None:
    """Here the functions give the row's number and its opposite, whatever the total."""
    run, rounds = rounds_of(SAME[0] * 3)
    assert equal_groups(run, rounds).tolist() == [True, True, True]
    run.cfg.adv_estimator = "gdpo"
    assert equal_groups(run, rounds).tolist() == [False, False, False]


def test_one_round_is_the_step_without_dynamic_sampling(
    folder: Path, base: dict[str, str], plain: Result
) -> None:
    one = train(folder / "one", **base, DYNAMIC_SAMPLING="1", DYNAMIC_SAMPLING_MAX_ROUNDS="1")
    assert one.completions == plain.completions
    same, added = plain.records[0], one.records[0].keys() - plain.records[0].keys()
    seconds = {name for name in same if name.startswith(("time/", "throughput/"))}
    assert {n: one.records[0][n] for n in same.keys() - seconds} == {
        n: same[n] for n in same.keys() - seconds
    }
    assert {name.rpartition("/")[0] for name in added} == {"train-other/dynamic_sampling"}
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
    tiny = load_rows(str(Path(__file__).parent.parent / "tiny"), "", "train")
    in_order = batch_indices(len(tiny), len(left), 0, 0)  # of the epoch; none comes twice
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


def test_rounds_of_one_prompt_draw_anew_and_without_a_difference_there_is_no_gradient(
    folder: Path, base: dict[str, str]
) -> None:
    row = '{"question": "What is 3 + 4 + 5?", "answer": "#### 12"}\n'
    (folder / "same.jsonl").write_text(50 * row)
    settings = {"DATASET": str(folder / "same.jsonl"), "DIFFER": "1000", "STEPS": "2"}
    settings |= {"DYNAMIC_SAMPLING": "1", "DYNAMIC_SAMPLING_MAX_ROUNDS": "2"}
    result = train(folder / "same", **base | settings)
    drawn = [str([g.ids for g in four]) for four in parts(groups_of(result), P)]
    assert len(drawn) == len(set(drawn)) == 4
    assert of(result, "other/batch_global") == [32, 32]
    assert of(result, "other/frac_reward_zero_std") == [1, 1]
    assert of(result, "other/loss") == of(result, "other/grad_norm") == [0, 0]
    for step in (0, 1):
        told = f"dynamic_sampling step={step} rounds=2 kept=0.0000\nnote step={step}: no completion"
        assert told in result.lines


@pytest.mark.slow
def test_two_processes_choose_the_groups_and_the_tokens_that_one_does(
    folder: Path, picky: dict[str, str], picked: Result
) -> None:
    first, second = train_two(folder / "two", 2, **picky | {"TRAIN_MICRO_BATCH_SIZE": "8"})
    halves = [parts(groups_of(r), P // 2) for r in (first, second)]
    groups = [g for pair in zip(*halves, strict=True) for half in pair for g in half]
    assert [g.ids for g in groups] == [g.ids for g in groups_of(picked)]
    kept = [i for i, g in enumerate(groups) if g.differs()][:P]
    assert len(groups) > P == len(kept)
    assert all(finished([groups[i] for i in half]).any() for half in parts(kept, 2))
    assert [i % P // 2 for i in kept] != [0, 0, 1, 1], "none learns where it was not sampled"
    assert_same(picked, first, "loss", "policy_loss", "grad_norm", "entropy")
    assert_same(picked, first, "dynamic_sampling/rounds", "dynamic_sampling/kept_frac")
    assert of(first, "reward/total/mean") == [np.mean([groups[i].rewards for i in kept])]


# ---- Which tokens --------------------------------------------------------------------------------


def finished(groups: list[Group]) -> np.ndarray:
    """[P*K] bool: ended by a stop token."""
    return np.array([ids[-1] == END for g in groups for ids in g.ids])


def test_completions_that_were_cut_off_teach_nothing(
    folder: Path, base: dict[str, str], plain: Result
) -> None:
    masked = train(folder / "masked", **base, MASK_TRUNCATED_COMPLETIONS="1")
    assert masked.completions == plain.completions
    groups = groups_of(masked)
    whole = finished(groups)
    assert 0.1 < whole.mean() < 0.9
    loss = token_mean_loss(advantages(groups)[whole], lengths(groups)[whole])
    assert of(masked, "other/loss") == pytest.approx([loss], abs=1e-6)
    assert abs(loss - of(plain, "other/loss")[0]) > 1e-3
    assert of(masked, "seq_len/completion/hit_max_frac") == pytest.approx([1 - whole.mean()])
    assert of(masked, "reward/total/mean") == of(plain, "reward/total/mean")


def test_the_tokens_of_the_highest_entropy_are_those_of_the_step_whatever_the_micro_batch(
    folder: Path, picky: dict[str, str], picked: Result
) -> None:
    eight = train(folder / "micro4", **picky | {"TRAIN_MICRO_BATCH_SIZE": "4"})
    assert_same(picked, eight, "loss", "policy_loss", "grad_norm", "entropy")
    groups = [g for g in groups_of(picked) if g.differs()][:P]
    whole = finished(groups)
    assert 0.1 < whole.mean() < 0.9
    every_token = token_mean_loss(advantages(groups)[whole], lengths(groups)[whole])
    values = {n: of(picked, f"other/{n}")[0] for n in ("loss", "policy_loss", "entropy")}
    assert abs(values["policy_loss"] - every_token) > 1e-3
    # The bonus is the mean over the fifth of the tokens that has nearly all of the entropy.
    bonus = (values["policy_loss"] - values["loss"]) / 0.01
    assert 2 < bonus / values["entropy"] < 5.1


# ---- Which objective -----------------------------------------------------------------------------


def test_the_reference_becomes_the_policy_every_ref_sync_steps_updates(
    folder: Path, base: dict[str, str]
) -> None:
    settings = {"BETA": "0.1", "REF_SYNC_STEPS": "2", "REF_SYNC_ALPHA": "1", "STEPS": "4"}
    settings |= {"LEARNING_RATE": "1e-3", "LR_SCHEDULE": "constant", "WARMUP_RATIO": "0"}
    kl = of(train(folder / "sync", **base | settings), "other/kl")
    assert [x < 1e-9 for x in kl] == [True, False, True, False]
    assert min(kl[1], kl[3]) > 1e-5


def over_std(x: np.ndarray, of: np.ndarray) -> np.ndarray:
    return x / (of.std(ddof=1) + 1e-4)


# settings -> advantages from rewards r [P, K], of each function f [F, P, K]; loss from A, n [P*K]
OBJECTIVES = {
    "LOSS_TYPE=gspo ADV_ESTIMATOR=rloo": (
        lambda r, f: centered(r) * 8 / 7, lambda A, n: -A.mean()
    ),
    "LOSS_TYPE=cispo EPS_HIGH=5 ADV_ESTIMATOR=reinforce": (
        lambda r, f: over_std(r - r.mean(), r), None  # it needs the logps
    ),
    "LOSS_TYPE=dr_grpo SCALE_REWARDS=none": (
        lambda r, f: centered(r), lambda A, n: -(A * n).sum() / (P * K * T)
    ),
    "LOSS_TYPE=sapo ADV_ESTIMATOR=gdpo": (
        lambda r, f: over_std(x := scaled(f[0]) + 0.5 * scaled(f[1]) + 2 * scaled(f[2]), x),
        lambda A, n: -(2 * A / np.where(A > 0, 1, 1.05)).mean(),
    ),
    "LOSS_TYPE=bnpo ADV_ESTIMATOR=reinforce++": (
        lambda r, f: over_std(centered(r), centered(r)), token_mean_loss
    ),
    "LOSS_TYPE=grpo SCALE_REWARDS=batch IS_MODE=sequence_mask": (
        lambda r, f: over_std(centered(r), r), lambda A, n: -A.mean()
    ),
}  # fmt: skip
SLOW = [x for x in OBJECTIVES if "cispo" not in x and "sapo" not in x]
ALL = [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in OBJECTIVES]


@pytest.mark.parametrize("settings", ALL)
def test_every_objective_and_estimator_takes_its_step(
    folder: Path, base: dict[str, str], settings: str
) -> None:
    env = dict(setting.split("=") for setting in settings.split())
    functions = f"{base['REWARD_FN']},soft_overlong_penalty,repetition_penalty"
    env |= {"REWARD_FN": functions, "REWARD_WEIGHTS": "1,0.5,2", "OVERLONG_CACHE": "8"}
    result = train(folder / env["LOSS_TYPE"], **base | env | {"REPETITION_NGRAM": "1"})
    assert f"loss.loss_type={env['LOSS_TYPE']} loss.adv_estimator=" in result.lines

    groups = groups_of(result)
    n = lengths(groups)
    hashed = np.concatenate([g.rewards for g in groups])
    distinct = np.array([len(set(ids)) for g in groups for ids in g.ids])
    f = np.array([hashed, np.clip((T - 8 - n) / 8, -1, 0), distinct / n - 1]).reshape(3, P, K)
    names = ("hashed", "soft_overlong_penalty", "repetition_penalty")
    means = [of(result, f"reward/func/{name}/mean")[0] for name in names]
    assert means == pytest.approx([x.mean() for x in f]) and max(means[1:]) < 0
    advantages_of, loss_of = OBJECTIVES[settings]
    A = advantages_of(f[0] + 0.5 * f[1] + 2 * f[2], f).reshape(-1)
    spread = [of(result, f"reward/advantage/{name}")[0] for name in ("min", "std", "max")]
    assert spread == pytest.approx([A.min(), A.std(), A.max()], 1e-6)
    if loss_of:
        assert of(result, "other/loss") == pytest.approx([loss_of(A, n)], 1e-5, 1e-6)
    assert of(result, "other/grad_norm")[0] > 1e-3
    if "IS_MODE" in env:
        assert of(result, "other/is_weight/mean") == pytest.approx([1], 1e-3)
        assert of(result, "other/is_weight/over_cap") == [0]


def test_every_setting_of_the_objective_reaches_it() -> None:
    settings = {
        "LOSS_TYPE": "grpo", "EPS_LOW": "0.1", "EPS_HIGH": "0.3", "DELTA": "2",
        "IMPORTANCE_SAMPLING_LEVEL": "sequence", "BETA": "0.05", "KL_ESTIMATOR": "k2",
        "KL_BIAS_CORRECTION": "0", "ENTROPY_COEF": "0.01", "IS_MODE": "token_mask",
        "IS_CAP": "2.5", "MAX_LENGTH_SAMPLE": "24",
    }  # fmt: skip
    run = set_up(Config.from_env(settings))
    assert run.objective == Objective(
        "grpo", 0.1, 0.3, 2.0, "sequence", 0.05, "k2", False, 0.01, "token_mask", 2.5, 24
    )
