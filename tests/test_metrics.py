"""Claims about metrics.py: what a run prints and records, on numbers worked by hand."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_rollout import completions_of

from config import Config
from data import Prompt
from metrics import (
    PHASES,
    Step,
    are_right,
    drift_level,
    evaluation_record,
    is_shown,
    log_step,
    majority_accuracy,
    pass_at,
    sampling_metrics,
    standard_error,
    step_lines,
    step_records,
)
from models.draw import Sampling
from runtime.long_work import Compilation, compilations
from runtime.packing import Batch
from runtime.records import read_settings
from runtime.resume import Progress
from runtime.run_log import Clock, RunLog
from startup import open_log, set_up

NAN = float("nan")
# Two groups of two; the rewards of the second group are equal. One completion was cut off, and the
# first function does not apply to the last completion.
BATCH = Batch(
    prompts=[Prompt([1] * 10, {}), Prompt([1] * 20, {})],
    completion_ids=np.zeros((4, 8), np.int32),
    completion_mask=np.ones((4, 8), np.int32),
    lengths=np.array([3, 5, 4, 8]),
    sampling_logps=np.zeros((4, 8), np.float32),
    computed_tokens=np.array([8, 8, 8, 16]),
    stopped=np.array([True, False, True, True]),
    rewards=np.array([2.0, 0.5, 1.0, 1.0]),
    per_function=np.array([[1.0, 1.0], [0.0, 0.5], [1.0, 0.0], [NAN, 1.0]]),
    advantages=np.array([1.0, -1.0, 0.0, 0.0]),
    cut_tokens=np.array([3, 0, 2, 0]),
)
DRIFT = "sampling_logp_difference/mean"
METRICS = {"loss": 0.25, "entropy": 1.5, "grad_norm": 2.0, DRIFT: 1e-6, "updates_applied": 1}
LINE = "step=7 loss=0.250000 entropy=1.5000 reward_mean=1.1250 dt=0.00s"
NOTHING = "note step=7: all advantages that count are 0, and so is the policy gradient"


def clock() -> Clock:
    made = Clock(PHASES)
    for phase in ("rollout_sync", "rollout_generate", "update"):
        made.lap(phase)
    return made


def step(metrics: dict[str, float] = METRICS, learns: bool = True) -> Step:
    """Step 7. learns: the advantages of the first group are not 0."""
    batch = BATCH._replace(advantages=BATCH.advantages * learns)
    return Step(7, metrics, batch, 40, clock())


def test_the_step_line_ends_with_its_seconds_and_each_note_has_a_line() -> None:
    assert step_lines(step(), False) == [LINE]
    assert step_lines(step(learns=False), False) == [LINE, NOTHING]
    # Only completions without an advantage count.
    mask = BATCH.completion_mask * [[0], [0], [1], [1]]
    others = step()._replace(batch=BATCH._replace(completion_mask=mask))
    assert step_lines(others, False) == [LINE, NOTHING]
    assert step_lines(step(METRICS | {"grad_norm": NAN}), False) == [
        LINE,
        "note step=7: update 2 of this step was not applied: grad_norm is nan",
    ]


def test_a_zero_has_no_sign_in_the_step_line() -> None:
    """The clipped loss of advantages of 0 is -0.0, and rounding makes -0.0 of a small number."""
    zeros = step(METRICS | {"loss": -0.0, "entropy": -1e-9})
    zeros = zeros._replace(batch=BATCH._replace(rewards=np.full(4, -1e-5)))
    assert step_lines(zeros, False) == [
        "step=7 loss=0.000000 entropy=0.0000 reward_mean=0.0000 dt=0.00s"
    ]
    below = step(METRICS | {"loss": -0.0000012, "entropy": -0.25})
    assert step_lines(below, False)[0].startswith("step=7 loss=-0.000001 entropy=-0.2500 ")


def test_a_line_warns_of_a_difference_between_sampler_and_trainer_that_is_not_rounding() -> None:
    drifted = step(METRICS | {DRIFT: 0.25})
    assert step_lines(drifted, False) == step_lines(drifted, False, 0.25) == [LINE]
    (line, note) = step_lines(drifted, False, 0.05)
    assert note.startswith(
        "note step=7: sampling_logp_difference/mean=0.25 is above 0.05, which rounding"
    )


FILTERED_ENGINE = {"TOP_K": "20", "SAMPLING_SUPPORT": "full", "ROLLOUT_BACKEND": "sglang_jax"}


@pytest.mark.parametrize(
    "settings, dtypes, level",
    [
        ({}, ("float32", "float32"), 1e-3),
        ({}, ("bfloat16", "bfloat16"), 0.05),
        ({"ROLLOUT_BACKEND": "sglang_jax"}, ("float32", "bfloat16"), 0.05),
        ({"TOP_K": "20"}, ("float32", "float32"), 1e-3),
        ({"TOP_K": "20", "SAMPLING_SUPPORT": "full"}, ("float32", "float32"), math.inf),
        (FILTERED_ENGINE, ("float32", "float32"), 1e-3),
    ],
)
def test_the_level_of_the_difference_follows_from_the_dtypes(settings, dtypes, level) -> None:
    cfg = Config.from_env(settings)
    training, rollout = (SimpleNamespace(dtype=np.dtype(dtype)) for dtype in dtypes)
    assert drift_level(SimpleNamespace(cfg=cfg, training=training, rollout=rollout)) == level


def test_a_run_whose_difference_has_another_cause_keeps_no_level(tmp_path: Path) -> None:
    filtered = {"TOP_P": "0.9", "SAMPLING_SUPPORT": "full"}
    levels = []
    for name, settings in (("plain", {}), ("filtered", filtered)):
        run = set_up(Config.from_env(settings))
        open_log(run, tmp_path / name, Progress()).close()
        levels.append(read_settings(tmp_path / name).get("derived.drift_level"))
    assert levels == [0.001, None]


def test_a_line_says_what_jax_compiled_in_a_step_if_it_took_long() -> None:
    def compiled(*programs: tuple[str, float]) -> list[str]:
        done = step()
        compilations().extend(Compilation(*x) for x in programs)
        return step_lines(done, False)[1:]

    assert compiled(("decode", 1.25), ("iota", 0.01), ("micro_step", 3.0)) == [
        "compiled step=7 programs=3 t=4.26s decode=1.25s micro_step=3.00s"
    ]
    assert compiled(("iota", 0.01)) == compiled() == []


def test_dynamic_sampling_has_a_line_with_its_rounds_and_the_share_of_groups_kept() -> None:
    sampled = {"rounds": 3.0, "kept_frac": 5 / 12, "reward_mean": 0.5}
    metrics = METRICS | {f"dynamic_sampling/{name}": value for name, value in sampled.items()}
    told = "dynamic_sampling step=7 rounds=3 kept=0.4167"
    assert step_lines(step(metrics), False) == [LINE, told]
    line, *others = step_lines(step(metrics, learns=False), True)
    assert line.endswith(" completion_hit_max_frac=0.2500") and others == [told, NOTHING]
    records = step_records(step(metrics), 2, ["first", "second"])
    assert {f"train-other/dynamic_sampling/{name}": x for name, x in sampled.items()}.items() <= (
        records.items()
    )


def test_the_breakdown_names_phases_and_lengths() -> None:
    (line,) = step_lines(step(), True)
    assert " rollout=0.00s rollout_sync=0.00s rollout_generate=0.00s reward=0.00s" in line
    assert line.endswith(
        "prompt_len_mean=15.0 completion_len_mean=5.0 completion_len_max=8 "
        "completion_hit_max_frac=0.2500"
    )


def test_the_step_record_by_hand() -> None:
    records = step_records(step(), 2, ["first", "second"])
    expected = {
        "train-other/loss": 0.25,
        "train-other/batch_global": 4,
        "train-other/total_valid_token_count": 20,
        "throughput/rollout/computed_per_token": 2.0,
        "train-other/frac_reward_zero_std": 0.5,
        "train-reward/total/mean": 1.125,
        "train-reward/total/min": 0.5,
        "train-reward/total/max": 2.0,
        "train-reward/func/first/mean": 2 / 3,  # the function applies to three completions
        "train-reward/func/second/mean": 0.625,
        "train-reward/advantage/std": np.sqrt(0.5),
        "train-reward/advantage/zero_frac": 0.5,
        "train-seq_len/prompt/mean": 15.0,
        "train-seq_len/total/max": 28.0,
        "train-seq_len/completion/hit_max_frac": 0.25,
    }
    assert {name: records[name] for name in expected} == pytest.approx(expected)


def test_a_step_writes_its_lines_its_record_and_two_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step with 4 completions of each of 2 prompts; a sample is the first one of a prompt."""
    settings = {"BATCH_SIZE": "2", "NUM_PRE_Q": "4", "REWARD_FN": "reward_correct,reward_format"}
    run = set_up(Config.from_env(settings | {"REWARD_WEIGHTS": "1,0.5"}))
    texts = [f"<answer>{number}</answer>" for number in range(8)]
    per_function = np.array([[1.0, 1], [0, 1], [0, 0], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0]])
    rewards = np.array([1.5, 0.5, 0, 0, 0.5, 1, 1.5, 0])
    drawn = completions_of(texts, run.tokenizer)._asdict()
    batch = Batch(
        run.train_prompts[:2],
        **drawn,
        stopped=np.ones(8, bool),
        rewards=rewards,
        per_function=per_function,
        advantages=np.array([1.0, -1, 0, 0, -0.5, 0.5, 0, 0]),
    )
    log = RunLog(tmp_path, steps=10, writes=True, wandb=None)
    capsys.readouterr()
    metrics = METRICS | {"update_token_count": 40.0}
    log_step(run, log, Step(0, metrics, batch, 40, clock()))
    log.close()

    line = "step=0 loss=0.250000 entropy=1.5000 reward_mean=0.6250 dt=0.00s"
    question = run.train_prompts[0].columns["question"]
    assert capsys.readouterr().out.splitlines()[:4] == [
        line,
        f"sample step=0 question: {question}",
        "  reward=1.5 reward_correct=1 reward_format=1 advantage=1 tokens=4 ended=stop token",
        "    <answer>0</answer>",
    ]
    (record,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    expected = {
        "step": 0,
        "train-other/grad_norm": 2.0,
        "train-other/batch_local": 8,
        "train-other/batch_global": 8,
        "train-reward/func/reward_correct/mean": 3 / 8,
        "train-reward/func/reward_format/mean": 4 / 8,
        "train-seq_len/completion/mean": 4.0,
        "train-reward/accuracy": 3 / 8,
    }
    assert {name: record[name] for name in expected} == expected
    samples = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    for sample, prompt in zip(samples, run.train_prompts[:2], strict=True):
        assert prompt.columns["question"] in sample["prompt"]
        assert sample["question"] == prompt.columns["question"]
        assert sample["answer"] == prompt.columns["answer"]
    assert [[c["text"] for c in sample["completions"]] for sample in samples] == [
        texts[:4],
        texts[4:],
    ]
    assert samples[1]["completions"][1] == {
        "text": "<answer>5</answer>",
        "reward": 1.0,
        "rewards": {"reward_correct": 1.0, "reward_format": 0.0},
        "tokens": 4,
        "ended": "stop token",
        "advantage": 0.5,
    }


# ---- Evaluation ----------------------------------------------------------------------------------


def evaluation_of(
    per_function: list[list[float]], samples: int, temperature: float = 0.0
) -> tuple[SimpleNamespace, tuple[Batch, list[str]], np.ndarray]:
    """A run with the functions `first`, which says what is right, and `second`, its evaluation of
    completions with these rewards and texts, and which are right: [questions, samples]."""
    cfg = SimpleNamespace(eval_samples=samples, eval_split="test")
    functions = [SimpleNamespace(__name__=name) for name in ("first", "second")]
    run = SimpleNamespace(
        cfg=cfg,
        functions=functions,
        eval_sampling=Sampling(temperature),
    )
    rewards = np.array(per_function)
    n = len(rewards)
    evaluation = Batch(
        [Prompt([1], {})] * (n // samples),
        *[np.zeros((n, 0))] * 2,
        lengths=np.full(n, 5),
        sampling_logps=np.zeros((n, 0)),
        stopped=np.ones(n, bool),
        rewards=rewards.sum(1),
        per_function=rewards,
    )
    correct = are_right(run, rewards).reshape(-1, samples)
    return run, (evaluation, [""] * n), correct


def test_the_line_and_the_record_of_an_evaluation_by_hand() -> None:
    """Four questions of which the first is right: the variance is 3/16 * 4/3, over 4 questions."""
    run, evaluation, correct = evaluation_of([[1, 0.5], [0, 0.5], [0, 0.5], [0, 0.5]], samples=1)
    line, records = evaluation_record(run, 3, *evaluation, correct, clock(), False)
    assert line == (
        "eval step=3 split=test questions=4 accuracy=0.2500 accuracy_se=0.2500 accuracy_of=first "
        "decoding=greedy t=0.00s"
    )
    expected = {
        "eval/accuracy": 0.25,
        "eval/accuracy_se": 0.25,
        "eval/pass_at_1": 0.25,
        "eval/temperature": 0.0,
        "eval/reward/total/mean": 0.75,
        "eval/reward/func/first/mean": 0.25,
        "eval/seq_len/completion/mean": 5.0,
        "eval/seq_len/completion/hit_max_frac": 0.0,
        "eval/questions_global": 4,
    }
    assert {name: records[name] for name in expected} == expected


def test_several_samples_give_pass_at_k_and_the_error_is_over_questions() -> None:
    """Two questions with four samples each: 1 of 4 and 0 of 4 are right."""
    rewards = [[1, 0]] + [[0, 0]] * 7
    run, evaluation, correct = evaluation_of(rewards, samples=4, temperature=1.0)
    line, records = evaluation_record(run, 3, *evaluation, correct, clock(), True)
    assert line == (
        "eval_full split=test questions=2 samples_per_question=4 accuracy=0.1250 "
        "accuracy_se=0.1250 accuracy_of=first pass_at_4=0.5000 decoding=sampled t=0.00s"
    )
    names = [name for name in records if name.startswith("eval_full/accuracy")]
    assert {name: records[name] for name in names} == {
        "eval_full/accuracy": 0.125,
        "eval_full/accuracy_se": 0.125,
        "eval_full/accuracy/pass_at_1": 0.125,
        "eval_full/accuracy/pass_at_2": 0.25,  # 3 of the 6 pairs of samples hold the right one
        "eval_full/accuracy/pass_at_4": 0.5,
    }


def test_the_accuracy_is_pass_at_1_also_where_samples_have_no_value() -> None:
    """Two questions: 1 of 1 and 1 of 3 samples with a value are right."""
    rewards = [[1, 0], [NAN, 0], [NAN, 0], [1, 0], [0, 0], [0, 0]]
    run, evaluation, correct = evaluation_of(rewards, samples=3, temperature=1.0)
    _, records = evaluation_record(run, 3, *evaluation, correct, clock(), False)
    assert records["eval/accuracy"] == records["eval/pass_at_1"] == pytest.approx(2 / 3)
    assert records["eval/accuracy_se"] == pytest.approx(1 / 3)
    assert records["eval/pass_at_3"] == 1.0  # of the second question alone


def test_accuracy_is_the_share_of_completions_whose_reward_is_at_least_1() -> None:
    rewards = [[1.0, 0.0], [0.5, 1.0], [0.99, NAN], [NAN, 0.0]]
    run, evaluation, correct = evaluation_of(rewards, samples=1)
    _, records = evaluation_record(run, 0, *evaluation, correct, clock(), False)
    assert records["eval/accuracy"] == pytest.approx(1 / 3)  # it applies to three completions


def test_the_metrics_of_dynamic_sampling_cover_everything_that_was_sampled() -> None:
    """Six groups of two. `first` says what is right, and applies to no completion of the third."""
    rewards = np.array([0.7, 0.7, 0.5, 0, NAN, NAN, 1, 1, 0, 0, 1, 0])
    first = np.array([0, 0, 0.5, 0, NAN, NAN, 1, 1, 0, 0, 1, 0])
    per_function = np.column_stack([first, np.full(12, 0.25)])
    run, _, _ = evaluation_of([[0.0, 0.0]], samples=1)
    run.cfg = Config(num_pre_q=2)
    stopped = np.array([1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0]) > 0
    nothing = np.zeros((6, 0))

    def rounds_of(rewards: np.ndarray, per_function: np.ndarray) -> list[Batch]:
        return [
            Batch(
                [Prompt([1], {})] * 3,
                *[nothing] * 4,
                stopped=stopped[part],
                rewards=rewards[part],
                per_function=per_function[part],
            )
            for part in (slice(0, 6), slice(6, 12))
        ]

    assert sampling_metrics(run, rounds_of(rewards, per_function)) == pytest.approx(
        {
            "dynamic_sampling/rounds": 2,
            "dynamic_sampling/kept_frac": 1 / 3,
            "dynamic_sampling/reward_mean": 4.9 / 10,
            "dynamic_sampling/accuracy": 3 / 10,
            "dynamic_sampling/hit_max_frac": 3 / 12,
            "dynamic_sampling/func/first/mean": 3.5 / 10,
            "dynamic_sampling/func/second/mean": 0.25,
        }
    )
    none = sampling_metrics(run, rounds_of(rewards * NAN, per_function * NAN))
    assert np.isnan(none["dynamic_sampling/reward_mean"])
    assert np.isnan(none["dynamic_sampling/accuracy"])


# ---- Accuracy over many questions ----------------------------------------------------------------


def test_the_standard_error_is_over_questions() -> None:
    """The means of the questions are 1, 0.5 and 0: their variance is 0.25, over 3 questions."""
    correct = np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    assert standard_error(correct) == pytest.approx((0.25 / 3) ** 0.5)
    assert standard_error(np.array([[1.0], [np.nan], [0.0]])) == pytest.approx((0.5 / 2) ** 0.5)
    assert np.isnan(standard_error(np.array([[1.0]])))
    many = np.arange(1319)[:, None] < 1033  # 78.3 % of the test questions of GSM8K
    assert standard_error(many.astype(float)) == pytest.approx(0.01135, abs=1e-5)


@pytest.mark.parametrize(
    "right, n, k, expected",
    [
        (1, 4, 1, 1 / 4),
        (1, 4, 2, 1 / 2),
        (2, 4, 2, 5 / 6),
        (0, 4, 4, 0),
        (3, 4, 2, 1),
        (4, 4, 1, 1),
    ],
)
def test_pass_at_k_counts_the_sets_of_k_samples_with_a_right_one(right, n, k, expected) -> None:
    samples = np.array([[1.0] * right + [0.0] * (n - right)])
    assert pass_at(samples, k) == pytest.approx(expected)
    assert pass_at(np.eye(128)[:1], 64) == pytest.approx(0.5)  # comb(128, 64) has 38 digits
    both = np.concatenate([samples, np.zeros((1, n)), np.full((1, n), np.nan)])
    assert pass_at(both, k) == pytest.approx(expected / 2)  # the last question has no answer


def test_a_sample_without_a_value_is_left_out_and_a_question_with_too_few_samples_too() -> None:
    """Of the questions 2 of 3, 0 of 2, 1 of 1 and none of none samples are right."""
    correct = np.array([[1, NAN, 0, 1], [0, 0, NAN, NAN], [NAN, NAN, NAN, 1], [NAN, NAN, NAN, NAN]])
    assert pass_at(correct, 1) == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert pass_at(correct, 2) == pytest.approx((1 + 0) / 2)
    assert pass_at(correct, 3) == 1.0
    assert np.isnan(pass_at(correct, 4))
    assert standard_error(correct) == pytest.approx((7 / 27 / 3) ** 0.5)  # of 2/3, 0 and 1


def test_pass_at_1_is_the_mean_of_the_questions_to_the_last_bit() -> None:
    for n in range(1, 20):
        for right in range(n + 1):
            assert pass_at(np.array([[1.0] * right + [0.0] * (n - right)]), 1) == right / n


def test_the_majority_is_among_the_samples_with_a_value() -> None:
    texts = ["5", "5", "7", "8"] + ["1", "2", "3", "4"] + ["6", "6", "6", "6"]
    correct = np.array([[NAN, NAN, 1, 0], [0, 1, 0, NAN], [NAN, NAN, NAN, NAN]])
    assert majority_accuracy(correct, texts) == pytest.approx(1 / 2)  # of 7 and 8 the first
    assert np.isnan(majority_accuracy(np.array([[NAN, NAN]]), ["1", "2"]))


def test_the_majority_is_of_equal_numbers_and_the_first_of_a_tie() -> None:
    texts = ["<answer>5</answer>", "<answer>7</answer>", "so 5.0"]  # 5 twice
    texts += ["<answer>1</answer>", "<answer>2</answer>", "<answer>3</answer>"]  # a tie
    texts += ["no", "idea", "<answer>9</answer>"]  # no answer is the most frequent
    correct = np.array([[1.0, 0, 1], [0, 1, 0], [0, 0, 1]])
    assert majority_accuracy(correct, texts) == pytest.approx(1 / 3)
    assert [is_shown(k, 6) for k in range(1, 7)] == [True, True, False, True, False, True]
