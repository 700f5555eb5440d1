"""Claims about metrics.py: what a run prints and records, on numbers worked by hand."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from config import Config
from data import Prompt
from evaluation import evaluation_record, majority_accuracy, pass_at, standard_error
from infra.log import Clock, compile_seconds
from metrics import PHASES, Step, memory_peaks, step_lines, step_record
from model.next_token import Sampling
from rewards import RewardFunction, extract_answer, reward_correct
from rows import Batch

NAN = float("nan")
# Two groups of two; the rewards of the second group are equal. One completion was cut off, and the
# first function does not apply to the last completion.
BATCH = Batch(
    prompts=[Prompt([1] * 10, {}), Prompt([1] * 20, {})],
    completion_ids=np.zeros((4, 8), np.int32),
    completion_mask=np.ones((4, 8), np.int32),
    lengths=np.array([3, 5, 4, 8]),
    sampling_logps=np.zeros((4, 8), np.float32),
    decode_steps=np.array([8, 8, 8, 16]),
    sampled_mask=np.array([[1] * n + [0] * (8 - n) for n in (3, 5, 4, 8)]),
    stopped=np.array([True, False, True, True]),
    rewards=np.array([2.0, 0.5, 1.0, 1.0]),
    function_rewards=np.array([[1.0, 1.0], [0.0, 0.5], [1.0, 0.0], [NAN, 1.0]]),
    advantages=np.array([1.0, -1.0, 0.0, 0.0]),
)
ROUNDS = [BATCH, BATCH]  # of 20 sampled tokens each
METRICS = {"loss": 0.25, "entropy": 1.5, "grad_norm": 2.0, "param_norm": 9.0, "updates_applied": 1}
LINE = "step=7 loss=0.250000 entropy=1.5000 reward_mean=1.1250 dt=4.00s"
NOTHING = "note step=7: all rewards of each group are equal, so the policy gradient is 0"
SAMPLED = {"rounds": 3.0, "kept_frac": 5 / 12, "reward_mean": 0.5}


def clock() -> Clock:
    """A step of 4 seconds, of which each phase of PHASES took 0.5 s."""
    made = Clock(PHASES)
    made.seconds, made.total = dict.fromkeys(PHASES, 0.5), lambda: 4.0
    return made


def run_of(samples: int = 1, temperature: float = 0.0) -> SimpleNamespace:
    """What metrics.py reads of a run with the functions `first`, which says what is right, and
    `second`, which has metrics, and with two completions of a prompt. samples, temperature: of its
    evaluations."""
    first = RewardFunction("first", reward_correct)
    second = dataclasses.replace(first, name="second", take_metrics=lambda count: {"count": count})
    rollout = SimpleNamespace(
        functions=[first, second],
        sampling=Sampling(1.0),
        eval_sampling=Sampling(temperature),
        environments=None,
    )
    cfg = Config(num_pre_q=2, eval_samples=samples, eval_split="test")
    return SimpleNamespace(cfg=cfg, rollout=rollout)


def lines(metrics: dict[str, float], **arrays: np.ndarray) -> list[str]:
    """The lines of step 7 with these metrics, and with these arrays in its batch."""
    step = Step(7, METRICS | metrics, BATCH._replace(**arrays), ROUNDS, clock())
    return step_lines(step, False)


def test_the_step_line_ends_with_its_seconds_and_each_note_has_a_line() -> None:
    assert lines({}) == [LINE]
    without_advantages = BATCH.completion_mask * [[0], [0], [1], [1]]
    assert lines({}, completion_mask=without_advantages) == [
        LINE,
        "note step=7: MASK_TRUNCATED_COMPLETIONS=1 drops all completions whose advantage is not 0, "
        "so the policy gradient is 0",
    ]
    nothing = {"advantages": np.zeros(4), "rewards": np.full(4, NAN)}
    assert lines({}, **nothing)[1:] == [
        "note step=7: no completion has a total reward, so the policy gradient is 0"
    ]
    equal = {"advantages": np.zeros(4), "rewards": np.array([0.1 + 0.2, 0.3, NAN, 1])}
    assert lines({}, **equal)[1:] == [NOTHING]
    # NaN weights sample equal nonsense.
    for arrays in ({}, nothing, equal):
        assert lines({"grad_norm": NAN}, **arrays)[1:] == [
            "note step=7: update 2 of this step was not applied: grad_norm is nan"
        ]


def test_the_step_record_by_hand() -> None:
    metrics = METRICS | {f"dynamic_sampling/{name}": value for name, value in SAMPLED.items()}
    step = Step(7, metrics, BATCH, ROUNDS, clock())
    compile_seconds().extend([1.25, 0.25])
    records = step_record(step, run_of().rollout, local_batch=4)
    expected = {
        "train-other/loss": 0.25,
        "train-other/batch_global": 4,
        "train-other/total_valid_token_count": 20,
        "train-other/dynamic_sampling/reward_mean": 0.5,
        "throughput/rollout/computed_per_token": 2.0,
        "train-other/frac_reward_zero_std": 0.5,
        "train-reward/total/mean": 1.125,
        "train-reward/total/min": 0.5,
        "train-reward/total/max": 2.0,
        "train-reward/accuracy": 2 / 3,  # by the first function, which applies to three
        "train-reward/func/first/mean": 2 / 3,
        "train-reward/func/second/mean": 0.625,
        "train-reward/advantage/std": np.sqrt(0.5),
        "train-reward/advantage/zero_frac": 0.5,
        "train-seq_len/prompt/mean": 15.0,
        "train-seq_len/total/max": 28.0,
        "train-seq_len/completion/hit_max_frac": 0.25,
        "time/train/rollout_s": 1.0,
        "time/train/step_s": 4.0,
        "throughput/train/valid_tokens_per_s": 5.0,
        "throughput/train/valid_tokens_per_s_update": 40.0,
        "compile/programs": 2,
        "compile/s": 1.5,
        "train-reward/model/count": None,  # of all rounds
    }
    assert {name: records[name] for name in expected} == pytest.approx(expected)


# ---- Evaluation ----------------------------------------------------------------------------------


def evaluated(
    rewards: list[list[float]], samples: int = 1, temperature: float = 0.0, full: bool = False
) -> tuple[str, dict[str, float]]:
    """The line and the record of an evaluation after step 3 of completions with these rewards."""
    n = len(rewards)
    evaluation = Batch(
        [Prompt([1], {})] * (n // samples),
        *[np.zeros((n, 0))] * 2,
        lengths=np.full(n, 5),
        sampling_logps=np.zeros((n, 0)),
        sampled_mask=np.zeros((n, 0)),
        stopped=np.ones(n, bool),
        advantages=np.zeros(n),
        rewards=np.array(rewards).sum(1),
        function_rewards=np.array(rewards),
    )
    return evaluation_record(run_of(samples, temperature), 3, evaluation, clock(), full)


def test_the_peak_of_the_host_is_that_of_the_kernel_in_gib() -> None:
    kib = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert memory_peaks()["host_peak_gib"] == pytest.approx(kib / 2**20, rel=0.1)


def test_several_samples_give_pass_at_k_and_the_error_is_over_questions() -> None:
    """Two questions with six samples each: 1 of 6 and 0 of 6 are right."""
    line, records = evaluated([[1, 0]] + [[0, 0]] * 11, samples=6, temperature=1.0, full=True)
    assert line == (
        "eval_full split=test questions=2 samples_per_question=6 accuracy=0.0833 "
        "accuracy_se=0.0833 accuracy_of=first pass_at_6=0.5000 decoding=sampled t=4.00s"
    )
    expected = {
        "eval_full/accuracy": 1 / 12,
        "eval_full/accuracy_se": 1 / 12,
        "eval_full/accuracy/pass_at_1": 1 / 12,
        "eval_full/accuracy/pass_at_2": 1 / 6,  # 5 of the 15 pairs of samples hold the right one
        "eval_full/accuracy/pass_at_4": 1 / 3,
        "eval_full/accuracy/pass_at_6": 1 / 2,
    }
    names = [name for name in records if name.startswith("eval_full/accuracy")]
    assert {name: records[name] for name in names} == pytest.approx(expected)


def test_a_completion_is_right_if_its_reward_is_at_least_1_and_left_out_if_it_has_none() -> None:
    _, records = evaluated([[1.0, 0.0], [0.5, 1.0], [0.99, NAN], [NAN, 0.0]])
    assert records["eval/accuracy"] == pytest.approx(1 / 3)
    sums = [0.7 + 0.2 + 0.1, sum([0.1] * 10), sum([1 / 6] * 6)]  # all of them are less than 1
    line, records = evaluated([[x, 0] for x in (*sums, 1 - 1.1e-6)])
    assert max(sums) < 1 and records["eval/accuracy"] == 0.75
    assert line == (
        "eval step=3 split=test questions=4 accuracy=0.7500 accuracy_se=0.2500 accuracy_of=first "
        "decoding=greedy t=4.00s"
    )
    assert "eval/reward/scored_frac" not in records
    assert records["eval/reward/model/count"] == 4, "what fills the passes does not count"


@pytest.mark.parametrize(
    "scores, accuracy",
    [
        ([1] + [NAN] * 7, "1.0000 accuracy_of=first decoding=greedy t=4.00s scored_frac=0.1250"),
        ([NAN] * 8, "nan accuracy_of=first decoding=greedy t=4.00s scored_frac=0.0000"),
        (
            [1, NAN, 0, 0],
            "0.3333 accuracy_se=0.3333 accuracy_of=first decoding=greedy t=4.00s "
            "scored_frac=0.7500",
        ),
    ],
)
def test_an_accuracy_says_how_many_completions_were_scored(scores: list, accuracy: str) -> None:
    """A single scored question has no standard error."""
    line, records = evaluated([[x, 0] for x in scores])
    assert line == f"eval step=3 split=test questions={len(scores)} accuracy={accuracy}"
    assert records["eval/reward/scored_frac"] == float(line.rpartition("=")[2])


# ---- Accuracy over many questions ----------------------------------------------------------------


def test_the_standard_error_is_over_questions() -> None:
    """The means of the questions are 1, 0.5 and 0: their variance is 0.25, over 3 questions."""
    correct = np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    assert standard_error(correct) == pytest.approx((0.25 / 3) ** 0.5)
    assert standard_error(np.array([[1.0], [NAN], [0.0]])) == pytest.approx((0.5 / 2) ** 0.5)
    assert np.isnan(standard_error(np.array([[1.0]])))


def test_pass_at_k_counts_the_sets_of_k_samples_with_a_right_one() -> None:
    for right, k, expected in [(1, 1, 1 / 4), (1, 2, 1 / 2), (2, 2, 5 / 6), (0, 4, 0), (3, 2, 1)]:
        samples = np.array([[1.0] * right + [0.0] * (4 - right)])
        assert pass_at(samples, k) == pytest.approx(expected)
    assert pass_at(np.eye(128)[:1], 64) == pytest.approx(0.5)  # comb(128, 64) has 38 digits


def test_a_question_with_fewer_than_k_samples_is_left_out_of_pass_at_k() -> None:
    """Of the questions 2 of 3, 0 of 2, 1 of 1 and none of none samples are right."""
    correct = np.array([[1, NAN, 0, 1], [0, 0, NAN, NAN], [NAN, NAN, NAN, 1], [NAN, NAN, NAN, NAN]])
    found = [pass_at(correct, k) for k in range(1, 5)]
    assert found == pytest.approx([(2 / 3 + 0 + 1) / 3, (1 + 0) / 2, 1, NAN], nan_ok=True)
    assert standard_error(correct) == pytest.approx((7 / 27 / 3) ** 0.5)  # of 2/3, 0 and 1


def test_the_majority_is_of_equal_numbers_and_the_first_of_a_tie() -> None:
    texts = ["<answer>5</answer>", "<answer>7</answer>", "so 5.0"]  # 5 twice
    texts += ["<answer>1</answer>", "<answer>2</answer>", "<answer>3</answer>"]  # a tie
    texts += ["no", "idea", "<answer>9</answer>"]  # no answer is the most frequent
    answers = [extract_answer(text) for text in texts]
    correct = np.array([[1.0, 0, 1], [0, 1, 0], [0, 0, 1]])
    assert majority_accuracy(correct, answers) == pytest.approx(1 / 3)
    unknown = np.concatenate([correct, [[NAN] * 3]])  # a question without a right answer
    assert majority_accuracy(unknown, answers + [6] * 3) == pytest.approx(1 / 3)
