"""Claims about rollout.py, and about the groups and completions from which a step learns.

The reward function of these runs records what it rewards. Before the first update every ratio is 1,
so that the loss of a token is minus its advantage.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from mistakes import few, refused
from runs import Result, environment, few_examples, train
from small_model import without_rewards

from chat import ChatFormat, read_prefix_messages
from config import Config
from data import Prompt, batch_indices, build_prompts, load_examples
from fingerprint import result_fingerprint
from loss import AdvantageConfig, Objective
from model import hf
from model.next_token import Sampling
from optimizer import Optimizer
from rollout import choose_groups, completion_texts, have_equal_rewards
from rows import Batch
from sampling import Completions, Stopping
from startup import set_up

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


def finished(groups: list[Group]) -> np.ndarray:
    """[P*K] bool: a stop token ended the completion."""
    return np.array([ids[-1] == END for g in groups for ids in g.ids])


def parts(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def lengths(groups: list[Group]) -> np.ndarray:
    return np.array([len(ids) for g in groups for ids in g.ids])


def advantages(groups: list[Group]) -> np.ndarray:
    """[P*K] with SCALE_REWARDS=batch."""
    rewards = np.array([g.rewards for g in groups])
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    return (centered / (rewards.std(ddof=1) + 1e-4)).reshape(-1)


def token_mean_loss(advantages: np.ndarray, lengths: np.ndarray) -> float:
    return -(advantages * lengths).sum() / lengths.sum()


def of(result: Result, name: str) -> list[float]:
    """The values of a metric, one for each step."""
    return [record[f"train-{name}"] for record in result.records]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollout")


@pytest.fixture(scope="module")
def base(folder: Path) -> dict[str, str]:
    """The settings of every run here, after the reward function is written to the folder."""
    (folder / "mine.py").write_text(REWARDS)
    sizes = f"ROLLOUT_GLOBAL_BATCH_SIZE={P} NUM_PRE_Q={K} TRAIN_MICRO_BATCH_SIZE={P * K}"
    given = f"MAX_LENGTH_SAMPLE={T} DATASET={few_examples()} DIFFER=1 REWARD_WEIGHTS=1"
    return environment(f"{sizes} {given} REWARD_FN={folder}/mine.py:hashed")


# ---- Dynamic sampling ----------------------------------------------------------------------------


def rounds_of(*rewards: list[float]) -> list[Batch]:
    """Rounds of 3 prompts, K=4, with these rewards. Prompts and sequences are numbered over all
    rounds; the reward functions give the number of a sequence and its opposite."""
    rounds, numbers = [], np.arange(12 * len(rewards)).reshape(-1, 12)
    for ids, round_rewards in zip(numbers, rewards, strict=True):
        tokens = np.repeat(ids[:, None], 3, axis=1)  # [B, 3]
        arrays = {"completion_ids": tokens, "completion_mask": tokens, "sampling_logps": tokens}
        arrays |= {"lengths": ids % 2 + 1, "rewards": np.array(round_rewards)}
        arrays["function_rewards"] = np.stack([ids, -ids], axis=1)
        arrays = without_rewards(tokens) | arrays | {"advantages": ids}
        rounds.append(Batch([Prompt([i], {}) for i in ids[::4] // 4], **arrays))
    return rounds


SAME = [[0.7] * 4, [0.0] * 4, [1.0] * 4, [NAN] * 4, [NAN, 1.0, 1.0, 1.0]]
# In VARY[0] two rewards equal the mean; in VARY[3] only two rewards apply.
VARY = [[0.5, 0.5, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.7, 0.7, 0.7, 0.70001], [NAN, 0, 1, NAN]]


@pytest.mark.parametrize(
    "first, second, chosen",
    [
        ([SAME[0], VARY[0], SAME[1]], [VARY[1], SAME[3], VARY[3]], [1, 3, 5]),
        ([SAME[0], VARY[0], SAME[1]], [VARY[1], VARY[2], VARY[3]], [1, 3, 4]),  # the first three
        ([SAME[4], SAME[1], SAME[2]], [SAME[3], SAME[4], VARY[3]], [0, 1, 5]),  # one: filled up
        ([SAME[0], SAME[1], SAME[2]], [SAME[3], SAME[4], SAME[0]], [0, 1, 2]),
    ],
)
def test_a_step_takes_the_first_groups_whose_rewards_differ_then_fills_up(
    first: list, second: list, chosen: list[int]
) -> None:
    rounds = rounds_of(sum(first, []), sum(second, []))
    ids = [4 * group + k for group in chosen for k in range(4)]
    batch = choose_groups(rounds, AdvantageConfig("grpo", weights=(1.0, 1.0)))
    assert [p.ids for p in batch.prompts] == [[group] for group in chosen]
    assert batch.completion_ids[:, 0].tolist() == batch.function_rewards[:, 0].tolist() == ids
    np.testing.assert_array_equal(batch.rewards, np.array(sum(first + second, []))[ids])
    assert batch.lengths.tolist() == [i % 2 + 1 for i in ids]


def test_for_gdpo_a_group_differs_if_the_rewards_of_one_function_differ() -> None:
    """The functions here give the number of the sequence and its opposite, whatever the total."""
    (batch,) = rounds_of(SAME[0] * 3)
    grpo, gdpo = (AdvantageConfig(name, weights=(1.0, 1.0)) for name in ("grpo", "gdpo"))
    assert have_equal_rewards(batch, grpo).tolist() == [True, True, True]
    assert have_equal_rewards(batch, gdpo).tolist() == [False, False, False]
    # Functions without a weight only measure.
    for weights, are_equal in (((0.0, 0.0), True), ((0.0, -1.0), False)):
        gdpo = AdvantageConfig("gdpo", weights=weights)
        assert have_equal_rewards(batch, gdpo).tolist() == [are_equal] * 3


def test_a_step_learns_from_the_groups_that_differ_and_the_next_takes_new_prompts(
    folder: Path, base: dict[str, str]
) -> None:
    """MASK_TRUNCATED_COMPLETIONS takes out the completions that no stop token has ended."""
    settings = {"STEPS": "2", "DYNAMIC_SAMPLING": "1", "DYNAMIC_SAMPLING_MAX_ROUNDS": "3"}
    settings |= {"DIFFER": "2", "MASK_TRUNCATED_COMPLETIONS": "1", "SCALE_REWARDS": "batch"}
    result = train(folder / "differ", **base | settings)
    left = groups_of(result)
    examples = load_examples(base["DATASET"], "", "train")
    in_order = batch_indices(len(examples), len(left), 0, 0)  # the epoch's order, without repeats
    assert [g.question for g in left] == [examples[i]["question"] for i in in_order]

    for record in result.records:
        sampled: list[Group] = []
        while len(sampled) < 3 * P and sum(g.differs() for g in sampled) < P:
            sampled, left = sampled + left[:P], left[P:]
        kept = [g for g in sampled if g.differs()]
        step = (kept + [g for g in sampled if not g.differs()])[:P]
        assert len(sampled) > P and len(kept) >= P
        ended = finished(step)
        assert 0.1 < ended.mean() < 0.9
        A, n = advantages(step), lengths(step)
        loss = token_mean_loss(A[ended], n[ended])
        assert abs(loss - token_mean_loss(A, n)) > 1e-3
        expected = {
            "other/batch_global": 32,
            "other/dynamic_sampling/rounds": len(sampled) // P,
            "other/dynamic_sampling/kept_frac": len(kept) / len(sampled),
            "other/dynamic_sampling/reward_mean": np.mean([g.rewards for g in sampled]),
            "other/dynamic_sampling/accuracy": np.mean([g.rewards >= 1 for g in sampled]),
            "other/dynamic_sampling/hit_max_frac": 1 - finished(sampled).mean(),
            "other/frac_reward_zero_std": max(0, 1 - len(kept) / P),
            "seq_len/completion/hit_max_frac": 1 - ended.mean(),
            "other/total_valid_token_count": n.sum(),
            "other/loss": loss,
            "reward/total/mean": np.mean([g.rewards for g in step]),
        }
        found = {name: record[f"train-{name}"] for name in expected}
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
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
        assert f"\nnote step={step}: all rewards of each group are equal" in result.lines


# ---- Objectives, estimators and other settings ---------------------------------------------------


def test_an_estimator_a_schedule_a_support_and_a_bonus_for_entropy_reach_a_run(
    folder: Path, base: dict[str, str]
) -> None:
    """Three reward functions have weights. Two of five steps warm up, and the learning rate falls
    to 0 in the three steps after them."""
    repeated = base["REWARD_FN"].replace(":hashed", ":repeated")
    functions = f"{base['REWARD_FN']},soft_overlong_penalty,{repeated}"
    text = """
        REWARD_WEIGHTS=1,0.5,2 OVERLONG_CACHE=8 ADV_ESTIMATOR=gdpo TEMPERATURE=0.7 TOP_K=50
        TOP_P=0.99 TOP_ENTROPY_QUANTILE=0.2 ENTROPY_COEF=0.01 STEPS=4 LEARNING_RATE=1e-3
        LR_SCHEDULE=linear WARMUP_RATIO=0.4 LR_DECAY_STEPS=5
    """
    result = train(folder / "gdpo", **base | environment(text) | {"REWARD_FN": functions})
    assert "loss.loss_type=dapo loss.adv_estimator=gdpo" in result.lines
    rates = of(result, "other/learning_rate")
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 1e-3 * 2 / 3], rel=1e-9)

    groups = groups_of(result)[:P]
    n = lengths(groups)
    hashed = np.concatenate([g.rewards for g in groups])
    distinct = np.array([len(set(ids)) for g in groups for ids in g.ids])
    f = np.array([hashed, np.clip((T - 8 - n) / 8, -1, 0), distinct / n - 1])
    names = ("hashed", "soft_overlong_penalty", "repeated")
    means = [of(result, f"reward/func/{name}/mean")[0] for name in names]
    assert means == pytest.approx(f.mean(axis=1)) and max(means[1:]) < 0
    centered = f.reshape(3, P, K) - f.reshape(3, P, K).mean(axis=2, keepdims=True)
    scaled = centered / (centered.std(axis=2, ddof=1, keepdims=True) + 1e-4)
    x = scaled[0] + 0.5 * scaled[1] + 2 * scaled[2]
    A = x / (x.std(ddof=1) + 1e-4)
    spread = [of(result, f"reward/advantage/{name}")[0] for name in ("min", "std", "max")]
    assert spread == pytest.approx([A.min(), A.std(), A.max()], 1e-6)

    assert max(of(result, "other/sampling_logp_difference/max")) < 1e-4, "at one temperature"
    assert of(result, "other/support/cut_tokens")[0] == 0
    # The bonus is the mean entropy of a fifth of the tokens, which have nearly all the entropy.
    values = {n: of(result, f"other/{n}")[0] for n in ("loss", "policy_loss", "exact_entropy")}
    bonus = (values["policy_loss"] - values["loss"]) / 0.01
    assert 2 < bonus / values["exact_entropy"] < 5.1


def test_every_setting_of_the_objective_the_sampler_and_the_optimizer_reaches_it() -> None:
    text = """
        LOSS_TYPE=grpo EPS_LOW=0.1 EPS_HIGH=0.3 DELTA=2 BETA=0.05 KL_ESTIMATOR=k2
        KL_BIAS_CORRECTION=0 ENTROPY_COEF=0.01 IS_MODE=token_mask IS_FLOOR=0.5 IS_CAP=2.5
        OFF_POLICY_MASK_THRESHOLD=0.25
        MAX_LENGTH_SAMPLE=24 TEMPERATURE=0.7 TOP_K=9 TOP_P=0.8 MIN_P=0.2 OPTIMIZER=lion
        WEIGHT_DECAY=0.04 CLIP_NORM=0.5 REWARD_FN=soft_overlong_penalty
    """
    run = set_up(Config.from_env(few() | environment(text)))
    assert run.learner.objective == Objective(
        loss_type="grpo",
        eps_low=0.1,
        eps_high=0.3,
        delta=2.0,
        beta=0.05,
        kl_estimator="k2",
        kl_bias_correction=False,
        entropy_coef=0.01,
        is_mode="token_mask",
        is_floor=0.5,
        is_cap=2.5,
        off_policy_mask_threshold=0.25,
        max_length_sample=24,
    )
    assert run.rollout.sampling == Sampling(
        temperature=0.7, top_k=9, top_p=0.8, min_p=0.2, record_support=True
    )
    assert run.learner.optimizer == Optimizer(name="lion", weight_decay=0.04, clip_norm=0.5)
    for made in (run.learner.objective, run.rollout.sampling, run.learner.optimizer):
        left = {name for name, x in made._asdict().items() if x == made._field_defaults[name]}
        left -= {"distill_coef", "reward_coef"}  # they need a teacher: see test_teacher.py
        assert not left, "a new field needs a value in this test"
    # The penalty begins a fifth of the tokens before the end.
    ids = [[1] * n for n in (20, 22, 24)]
    assert run.rollout.functions[0]([""] * 3, completion_ids=ids) == [0, -0.5, -1]


def test_a_run_that_never_evaluates_needs_no_split_to_evaluate_on() -> None:
    settings = few() | {"EVAL_SPLIT": "absent", "EVAL_EVERY_STEPS": "0"}
    run = set_up(Config.from_env(settings))
    assert run.eval_prompts == []
    assert result_fingerprint(run)["REWARD_WEIGHTS"] == "1.0,0.5,0.5"  # as in older checkpoints
    refused(lambda: set_up(Config.from_env(settings | {"EVAL_FULL_SWEEP": "1"})), "absent")


# ---- The text of a completion --------------------------------------------------------------------


@pytest.mark.parametrize(
    "special, drawn, text",
    [
        ([], "<think>1 .</think>5<|im_end|>", "<think>1 .</think>5"),
        (["<think>", "</think>"], "<think>1</think>5<|im_end|>", "<think>1</think>5"),
        (["<answer>", "</answer>"], "<answer>5</answer><|im_end|>", "<answer>5</answer>"),
        (["<tool_call>"], "<tool_call>{}</tool_call><|im_end|>", "<tool_call>{}</tool_call>"),
        ([], "It is 5</answer>", "It is 5"),  # ended by a stop token that is not special
        ([], "Is <|im_start|> it 5", "Is <|im_start|> it 5"),  # cut off
        ([], "<|im_end|>", ""),
    ],
)
def test_a_text_is_every_drawn_token_but_the_stop_token_whatever_is_special(
    special: list[str], drawn: str, text: str
) -> None:
    tokenizer = hf.load_tokenizer(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    ids = tokenizer(drawn, add_special_tokens=False)["input_ids"]
    stopping = Stopping(T, (END, tokenizer.convert_tokens_to_ids("</answer>")), pad_id=END)
    rollout = SimpleNamespace(chat_format=ChatFormat(tokenizer, []), stopping=stopping)
    rollout.environments = None
    row = np.array([ids + [END] * (T - len(ids))], np.int32)
    completions = Completions(
        *(np.zeros(1, np.int32), row, (np.arange(T) < len(ids))[None].astype(np.int32)),
        *(np.array([len(ids)]), np.zeros((1, T)), np.zeros(1, np.int32)),
    )
    if "<answer>5</answer><" in drawn:  # </answer> is no stop token of this model
        rollout.stopping = stopping._replace(stop_ids=(END,))
    (opened,) = build_prompts(
        [{"question": "2+3?"}], ChatFormat(tokenizer, read_prefix_messages("Think."))
    )
    assert completion_texts(rollout, [opened], completions) == [text]
    think = tokenizer("<think>\n", add_special_tokens=False)["input_ids"]
    opened = opened._replace(ids=opened.ids + think)
    assert completion_texts(rollout, [opened], completions) == ["<think>\n" + text]
