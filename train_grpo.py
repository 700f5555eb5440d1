"""GRPO on one CPU, one GPU, one TPU host or a TPU pod slice: `STEPS=1 python train_grpo.py`.

A step samples K completions of each of P prompts, rewards them, compares each completion with the
others of its prompt, and makes the better ones more likely. Read `main` from top to bottom. The
formulas are in loss.py, the phases of a rollout in rollout.py, the jitted programs in sampling.py,
update.py and optimizer.py. startup.py has what happens before the first step, and the export.

Dimensions: P prompts of a step, K completions per prompt, B = P*K sequences of a step, of which
each process samples local_batch. T completion tokens, padded to MAX_LENGTH_SAMPLE. X packed
rows of Q sequences on the devices.

A data.Prompt is a question and its ids. Each process samples its Completions (sampling.py).
gather_batch turns them into a Batch: NumPy arrays of all sequences, on every process.
pack_to_devices turns a Batch into MicroBatches: packed rows on the devices (picture: rows.py).

This departs from the GRPO paper (arXiv 2402.03300) in five points, as most of the field does:
 1. The loss is the mean over all completion tokens of an update; by default a step has one update.
    The paper takes the mean over each sequence first (LOSS_TYPE=grpo).
 2. There is no KL penalty unless BETA > 0. It is then the k3 estimate times the ratio, whose
    gradient is unbiased; the paper does not multiply by it (KL_BIAS_CORRECTION=0).
 3. Advantages divide by std + 1e-4 (ddof = 1), and are exactly 0 if a group's rewards are equal.
    The divisor counts these sequences, and update.computed_sequences skips them where it can.
 4. TEMPERATURE divides the logits in sampling and in all log-probabilities of the loss. The
    tokens that TOP_K, TOP_P and MIN_P drop in sampling have probability 0 in the loss too
    (SAMPLING_SUPPORT=full drops them in sampling only).
 5. old_logps are the trainer's own logps: each ratio of a step's first update is exactly 1. The
    sampler's, which differ by rounding, enter by IS_MODE, OFF_POLICY_MASK_THRESHOLD and DPPO alone.
"""
# ruff: noqa: E402 - settings are read and checked before jax is imported

import signal
import sys

from config import Config, load

if __name__ == "__main__":
    # Python's handler of Ctrl-C would print a traceback of the imports, or be lost in one of them.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # This ends the program for --print-config and for mistakes.
    CFG, FLAGS, LINES = load(sys.argv[1:])

import contextlib

import jax
import numpy as np

from evaluation import evaluate
from infra.chips import exit_on_oom
from infra.hosts import exiting_on_error
from infra.log import Clock
from infra.mistakes import UserMistake, import_optional
from loss import group_advantages, top_entropy_mask
from metrics import (
    PHASES,
    Step,
    check_drift,
    dynamic_sampling_metrics,
    log_step,
    merge_updates,
    nonfinite_metric,
)
from model.layout import slice_of_process
from model.params import Params, combine_params
from optimizer import TrainState, learning_rate
from rollout import (
    choose_groups,
    gather_batch,
    has_enough_groups,
    prompts_of_round,
    reward_completions,
    sample_completions,
)
from rows import Batch
from run import Run
from startup import export, start
from update import LearnerConfig, compute_batch_logps_and_entropies, train_on_mini_batch


def main(cfg: Config) -> None:
    """Trains the model for STEPS steps, evaluates it on the way, and exports it."""
    run, lifecycle, backend, state, ref_params = start(cfg)
    log, learner, rollout = lifecycle.log, run.learner, run.rollout
    P, K = run.sizes.prompts_per_step, cfg.num_pre_q
    advantage_config, max_rounds = run.advantage_config, cfg.max_rounds()
    rollout_key, eval_key = jax.random.split(jax.random.key(cfg.seed))

    def params() -> Params:
        # With LoRA the training state holds only the adapters.
        return combine_params(learner.base, state.params)

    def evaluate_now(full: bool = False) -> float:
        return evaluate(run, log, backend, eval_key, params(), lifecycle.progress.step, full)

    def save() -> None:
        lifecycle.save({"state": state})

    def export_now(is_done: bool) -> None:
        export(run, lifecycle.out, params(), is_done)

    # After SIGTERM, Ctrl-C or MAX_HOURS `ending` saves a checkpoint and ends the program.
    with contextlib.closing(backend), lifecycle.ending(save, evaluate_now, export_now):
        first_step, knows_drift = lifecycle.progress.step, False
        for step in range(first_step, cfg.steps + 1):
            # ---- Evaluation on held-out questions, then a checkpoint, which knows its score ------
            # Step 0 is the baseline; a resumed run first evaluates or saves what was still due.
            if lifecycle.evaluation_is_due():
                lifecycle.finish_evaluation(evaluate_now())
            if lifecycle.save_is_due():
                save()
            if step == cfg.steps:
                break

            # ---- Rollout and rewards: K completions of each of P prompts, rewarded on the host ---
            clock = Clock(PHASES)
            backend.update_weights(params())
            clock.lap("rollout_sync")
            rounds: list[Batch] = []
            # A step has one round, unless DYNAMIC_SAMPLING needs more.
            while not has_enough_groups(rounds, advantage_config, max_rounds):
                round_number = lifecycle.progress.rounds + len(rounds)  # of the run, from 0
                # [P], the same on every process
                prompts = prompts_of_round(rollout, run.train_prompts, P, K, round_number, cfg.seed)
                key = jax.random.fold_in(rollout_key, round_number)
                completions = sample_completions(
                    rollout,
                    backend,
                    prompts,
                    key,
                    rollout.sampling,
                    completions_per_prompt=K,
                    prompts_per_pass=run.sizes.prompt_batch_size,
                    title="rollout",
                )  # of this process, [local_batch, T]
                clock.lap("rollout_generate")
                # [local_batch] and [local_batch, functions]
                rewards, function_rewards = reward_completions(
                    rollout, slice_of_process(prompts), completions, step, cfg.steps
                )
                clock.lap("reward")
                rounds += [gather_batch(rollout, prompts, completions, rewards, function_rewards)]
                clock.lap("gather")
            backend.release()

            # ---- Advantages: how much better each completion is than its group -------------------
            # DYNAMIC_SAMPLING prefers groups whose rewards differ.
            batch = choose_groups(rounds, advantage_config)
            # [B] float64
            advantages = group_advantages(
                batch.rewards, K, advantage_config, batch.function_rewards
            )
            # MASK_TRUNCATED_COMPLETIONS leaves completions that were cut off out of the loss.
            is_counted = batch.stopped | (not cfg.mask_truncated_completions)  # [B]
            mask = batch.completion_mask * is_counted[:, None]  # [B, T]
            batch = batch._replace(advantages=advantages, completion_mask=mask)
            clock.lap("advantages")

            # ---- Log-probabilities before the first update: of the policy and the reference -----
            batch = with_logps(run, params(), ref_params, batch)
            clock.lap("logps")

            # ---- Updates: PPO_EPOCHS times an optimizer step on each mini-batch ------------------
            lr = learning_rate(step, run.schedule)
            groups = groups_of_updates(P, cfg.num_mini_batches, cfg.ppo_epochs, (cfg.seed, step))
            rollout.stop_signal.raise_if_stopped()  # the last point before the weights change
            state, metrics = update_policy(learner, state, batch, groups, lr)
            clock.lap("update")

            # ---- Log -----------------------------------------------------------------------------
            if cfg.dynamic_sampling:
                metrics |= dynamic_sampling_metrics(rounds, advantage_config)
            metrics["learning_rate"] = lr
            log_step(run, log, Step(step, metrics, batch, rounds, clock))
            if not knows_drift:  # a step that computes no sequence cannot tell
                knows_drift = check_drift(run, log, step, metrics, is_new_run=first_step == 0)
            lifecycle.finish_step(len(rounds), nonfinite_metric(metrics))

        if cfg.eval_full_sweep:  # the last checkpoint is saved before this long evaluation
            evaluate_now(full=True)
    # The sampler is closed: an engine's memory is free for the export.
    with lifecycle.ending(save, evaluate_now, export_now):
        lifecycle.finish(export_now)


# ---- Log-probabilities before the first update ---------------------------------------------------


def with_logps(run: Run, params: Params, ref_params: Params | None, batch: Batch) -> Batch:
    """The batch with the arrays that need the weights before the first update: ref_logps with a
    reference, teacher_logps with a teacher, old_logps if a step has several updates, and top_mask
    with TOP_ENTROPY_QUANTILE, a quantile over the entire step. By default it has none of them."""
    learner, teacher, quantile = run.learner, run.teacher, run.cfg.top_entropy_quantile
    if ref_params is not None:
        ref_logps, _ = compute_batch_logps_and_entropies(learner, ref_params, batch)
        batch = batch._replace(ref_logps=ref_logps)
    if teacher:
        teacher_logps, _ = compute_batch_logps_and_entropies(teacher, teacher.base, batch)
        batch = batch._replace(teacher_logps=teacher_logps)
    needs_old_logps = run.sizes.updates_per_step > 1
    if needs_old_logps or quantile < 1:
        logps, entropies = compute_batch_logps_and_entropies(learner, params, batch)
        if needs_old_logps:
            batch = batch._replace(old_logps=logps)
        if quantile < 1:
            top_mask = top_entropy_mask(entropies, batch.completion_mask, quantile)
            batch = batch._replace(top_mask=top_mask.astype(np.int32))
    return batch


# ---- Update --------------------------------------------------------------------------------------


def groups_of_updates(
    P: int, num_mini_batches: int, ppo_epochs: int, seed: tuple[int, int]
) -> np.ndarray:
    """[updates, groups] the indices of the groups in the mini-batch of each update of a step. Each
    epoch shuffles the groups, unless there is a single mini-batch."""
    epochs = []
    for epoch in range(ppo_epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(P)
        order = np.arange(P) if num_mini_batches == 1 else order
        epochs.append(order.reshape(num_mini_batches, -1))
    return np.concatenate(epochs)


def update_policy(
    learner: LearnerConfig, state: TrainState, batch: Batch, groups_of_update: np.ndarray, lr: float
) -> tuple[TrainState, dict[str, float]]:
    """The state after the updates of a step, and the metrics of the step.

    groups_of_update: [updates, groups]. An update whose loss or norm is not finite is not applied,
    and the remaining updates of the step are left out.
    """
    updates: list[dict[str, float]] = []
    applied = 0
    for groups in groups_of_update:
        mini_batch = batch.select_groups(groups)
        if not updates:  # The policy is still the old one, and micro_step computes its logps.
            mini_batch = mini_batch._replace(old_logps=None)
        state, metrics = train_on_mini_batch(learner, state, mini_batch, lr)
        updates.append(metrics)
        if nonfinite_metric(metrics):
            break
        applied += 1
    return state, merge_updates(updates) | {"updates_applied": applied}


if __name__ == "__main__":
    with exiting_on_error(), exit_on_oom(CFG):
        if CFG.loss_type == "sft":
            remedy = "for GRPO after it set MODEL_PATH to its export, and a new OUTPUT_DIR or none"
            raise UserMistake(f"LOSS_TYPE=sft needs train_sft.py; {remedy}")
        if FLAGS.plan:
            import_optional("tools.plan", "--plan").plan_and_exit(CFG, FLAGS)
        print(*LINES, sep="\n", flush=True)
        if FLAGS.eval_only or FLAGS.ask:
            flag = "--eval-only" if FLAGS.eval_only else "--ask"
            import_optional("tools.ask", flag).answer_command(CFG, FLAGS)
        elif FLAGS.probe:
            import_optional("tools.probe", "--probe").probe_command(CFG, FLAGS)
        else:
            main(CFG)
