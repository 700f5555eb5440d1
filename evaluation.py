"""An evaluation: the accuracy on held-out questions, its standard error and its record."""

import collections
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

import data
from contracts import Backend
from infra.log import Clock, RunLog, mean_without_nan
from infra.sizes import eval_questions
from metrics import are_right, completion_entries, completion_record, phase_seconds
from model.layout import concatenate_trees, slice_of_process
from model.params import Params
from rollout import completion_texts, gather_batch, reward_completions, sample_completions
from rows import Batch
from run import Run

EVAL_PHASES = ("rollout_sync", "rollout_generate", "reward")
EVALUATION_ROUND = 0  # the round_number of an evaluation's episodes; those of training begin at 1


def evaluate(
    run: Run,
    log: RunLog,
    backend: Backend,
    key: jax.Array,
    params: Params,
    step: int,
    full: bool = False,
) -> float:
    """The accuracy on the first EVAL_PROMPTS questions of the eval split or, if `full`, on all.

    It also prints the line of the evaluation, writes its record, and adds an entry for each
    question to eval.jsonl.
    """
    clock = Clock(EVAL_PHASES)
    limit = run.cfg.eval_prompts
    questions = run.eval_prompts if full or not limit else run.eval_prompts[:limit]
    backend.update_weights(params)
    clock.lap("rollout_sync")
    evaluation = answer_questions(run, backend, questions, key, clock, step)
    backend.release()
    line, record = evaluation_record(run, step, evaluation, clock, full)
    log.print_line(line)
    log.record_metrics(step, record)
    prefix = "eval_full" if full else "eval"
    if jax.process_index() == 0:
        correct = are_right(evaluation.function_rewards)
        entries = completion_entries(run.rollout, evaluation, "correct", correct)
        log.append_entries(
            "eval.jsonl", step, [{"evaluation": prefix} | entry for entry in entries]
        )
    return record[f"{prefix}/accuracy"]


def answer_questions(
    run: Run,
    backend: Backend,
    questions: list[data.Prompt],
    key: jax.Array,
    clock: Clock,
    step: int = 0,
    round_number: int = EVALUATION_ROUND,
) -> Batch:
    """K = EVAL_SAMPLES completions of each question, sampled by eval_sampling, and their rewards.
    step: the number of steps that have trained the weights. round_number: of their episodes."""
    rollout, K = run.rollout, run.cfg.eval_samples
    # The questions of a pass on each process. The last question is repeated until all passes have
    # the same size.
    size = eval_questions(run.sizes, run.cfg.num_pre_q, K, jax.local_device_count())
    missing = -len(questions) % (size * jax.process_count())
    padded = [*questions, *[questions[-1]] * missing]
    if rollout.environments is not None:
        T, model = rollout.stopping.max_length_sample, rollout.compute.model
        padded = rollout.environments.begin_episodes(padded, round_number, K, model, T)
    completions = sample_completions(
        rollout,
        backend,
        padded,
        key,
        rollout.eval_sampling,
        completions_per_prompt=K,
        prompts_per_pass=size,
        title="evaluation",
    )
    clock.lap("rollout_generate")
    local_questions = slice_of_process(padded)
    parts = []
    # REWARD_TIMEOUT_S limits one call of a reward function, which gets the completions of one pass.
    for i in range(0, len(local_questions), size):
        span = slice(i * K, (i + size) * K)
        part = jax.tree.map(lambda x, span=span: x[span], completions)
        prompts = local_questions[i : i + size]
        parts.append(reward_completions(rollout, prompts, part, step, run.cfg.steps))
    rewards, function_rewards = concatenate_trees(parts)
    batch = gather_batch(rollout, padded, completions, rewards, function_rewards)
    clock.lap("reward")
    return batch.select_groups(np.arange(len(questions)))


def evaluation_record(
    run: Run, step: int, evaluation: Batch, clock: Clock, full: bool
) -> tuple[str, dict[str, Any]]:
    """The line and the record of one evaluation.

    The accuracy is pass@1: the mean over the questions of the fraction of right completions among
    those to which the first reward function applies.
    """
    K, split, seconds = run.cfg.eval_samples, run.cfg.eval_split, clock.total()
    prefix = "eval_full" if full else "eval"
    correct = are_right(evaluation.function_rewards).reshape(-1, K)  # [questions, K]
    questions = len(correct)
    accuracy, error = pass_at(correct, 1), standard_error(correct)
    # The powers of two, and K itself.
    ks = [k for k in range(1, K + 1) if k == K or k & (k - 1) == 0]
    estimates = {f"pass_at_{k}": pass_at(correct, k) for k in ks}
    function = run.rollout.functions[0]
    if K > 1 and function.extract_answer:
        texts = completion_texts(run.rollout, evaluation.prompts, evaluation)
        answers = [function.extract_answer(text) for text in texts]
        estimates[f"maj_at_{K}"] = majority_accuracy(correct, answers)
    results = f"accuracy={accuracy:.4f}"
    results += "" if math.isnan(error) else f" accuracy_se={error:.4f}"
    results += f" accuracy_of={function.name}"
    if K > 1:
        headline = [name for name in estimates if name.endswith(f"_{K}")]
        results += "".join(f" {name}={estimates[name]:.4f}" for name in headline)
    decoding = "sampled" if run.rollout.eval_sampling.temperature else "greedy"
    results += f" decoding={decoding} t={seconds:.2f}s"
    record: dict[str, Any] = {f"{prefix}/accuracy": accuracy, f"{prefix}/accuracy_se": error}
    record |= {f"{prefix}/accuracy/{name}": value for name, value in estimates.items()}
    record[f"{prefix}/questions_global"] = questions
    record |= completion_record(f"{prefix}/", run.rollout, evaluation, len(evaluation.rewards))
    if (scored := record.get(f"{prefix}/reward/scored_frac")) is not None:
        results += f" scored_frac={scored:.4f}"
    record[f"time/{prefix}/step_s"] = seconds
    if full:
        record["time/eval_full/s_per_question"] = seconds / questions
        record |= {"eval_full/split": split, "eval_full/samples_per_question": K}
        title = f"eval_full split={split} questions={questions} samples_per_question={K}"
    else:
        record |= {f"time/eval/{phase}_s": x for phase, x in phase_seconds(clock).items()}
        title = f"eval step={step} split={split} questions={questions}"
    return f"{title} {results}", record


# ---- Accuracy over many questions ----------------------------------------------------------------


def standard_error(correct: np.ndarray) -> float:
    """The standard error of the accuracy, over the questions; NaN for fewer than two.

    correct: [questions, K], NaN where the accuracy does not apply.
    """
    means = np.array([mean_without_nan(values) for values in correct])
    means = means[~np.isnan(means)]
    return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan


def pass_at(correct: np.ndarray, k: int) -> float:
    """pass@k: an unbiased estimate of the probability that at least one of k samples of a question
    is right, averaged over the questions with at least k values. pass@1 is the accuracy.

    correct: [questions, K], NaN where a sample has no value. Source: arXiv 2107.03374, eq. 1.
    """
    hits = []
    for values in correct:
        n, wrong = np.isfinite(values).sum(), (values == 0).sum()
        if n >= k:
            sets = math.comb(n, k)  # the sets of k samples; an exact integer
            hits.append((sets - math.comb(wrong, k)) / sets)
    return mean_without_nan(np.array(hits))


def majority_accuracy(correct: np.ndarray, answers: Sequence[Hashable]) -> float:
    """maj@n: the fraction of questions whose most frequent answer is right. Among equally frequent
    answers the first one counts. "No answer" counts as an answer, which is always wrong.

    correct: [questions, K], NaN for all samples of a question without a right answer, which
    is left out. answers: [questions * K]; None: no answer.
    """
    chosen = []
    for i, is_right in enumerate(correct):
        question_answers = answers[i * len(is_right) : (i + 1) * len(is_right)]
        frequent = collections.Counter(question_answers).most_common(1)[0][0]
        chosen.append(is_right[question_answers.index(frequent)])
    return mean_without_nan(np.array(chosen))
