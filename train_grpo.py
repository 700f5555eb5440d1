"""GRPO on one CPU, one GPU, one TPU host or a TPU pod slice: `STEPS=1 python train_grpo.py`.

One step samples K completions of each of P prompts, rewards them, compares each completion with
the others of its prompt, and makes the better ones more likely. Read `main` from top to bottom. The
formulas are in loss.py, what happens in a rollout in rollout.py, the programs that run on devices
in sampling.py and update.py; startup.py has all that comes before the first step, and the export.

Dimensions: P prompts of a step, K completions per prompt, B = P*K sequences, R places for sequences
in a micro-batch. P, B and R count all processes together; b is this process's part of B. T padded
completion tokens: MAX_LENGTH_SAMPLE in the rollout, and after it one of a few widths, which holds
the longest completion of the step (completion_width in rows.py).

On the way a question is a data.Prompt, and what one process samples are Completions (sampling.py).
From gather_batch on, a Batch holds all sequences in NumPy arrays on every process. A MicroBatch
holds some of them in rows on the devices; rows.py has a picture of such a row.

This departs from the GRPO paper (arXiv 2402.03300) in four points, as most of the field does:
 1. The loss is the mean over all completion tokens of an update, which by default is the step,
    not the mean over each sequence first (LOSS_TYPE=grpo is the paper's).
 2. There is no KL penalty unless BETA > 0. It then is the k3 estimate times the ratio, so
    that its gradient is on average that of the KL itself (KL_BIAS_CORRECTION=0 is the paper's).
 3. Advantages divide by std + 1e-4 (ddof = 1), and are exactly 0 if a group's rewards are equal.
 4. TEMPERATURE divides the logits in sampling and in all log-probabilities of the loss. The
    tokens that TOP_K, TOP_P and MIN_P drop in sampling have probability 0 in the loss too
    (SAMPLING_SUPPORT=full drops them in sampling only).
"""
# ruff: noqa: E402 - settings are read and checked before jax is imported

import sys

from config import Config, load

if __name__ == "__main__":
    # This ends the program for --print-config and for mistakes.
    CFG, FLAGS, LINES = load(sys.argv[1:])

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from evaluation import evaluate
from infra.chips import memory_errors_in_sizes, program
from infra.hosts import ending_together
from infra.log import Clock
from infra.sizes import MICRO_SIZES
from loss import group_advantages, top_entropy_mask
from metrics import (
    PHASES,
    Step,
    log_step,
    merge_metrics,
    merge_updates,
    of_all_tokens,
    sampling_metrics,
    stop_if_apart,
    what_is_not_finite,
)
from model.layout import gather_processes, local_part, shard_batch
from model.params import Params, on_base, trained
from rollout import (
    Run,
    choose_groups,
    complete_prompts,
    enough,
    gather_batch,
    local_part_of,
    prompts_of_round,
    reward_completions,
)
from rows import Batch, MicroBatch, pack, plan_rows
from startup import export, start
from update import (
    TrainState,
    compute_logps_and_entropies,
    computed_per_token,
    counts_of,
    learning_rate,
    micro_step,
    optimizer_step,
)


def main(cfg: Config) -> None:
    """Trains the model for STEPS steps, evaluates it on the way, and exports it."""
    run, life, backend, state, ref_params = start(cfg)
    rollout_key, eval_key = jax.random.split(jax.random.key(cfg.seed))

    def params() -> Params:
        return on_base(run.base, state.params)  # with LoRA the state has the adapters alone

    def evaluate_after(steps: int, full: bool = False) -> float:
        return evaluate(run, life.log, backend, eval_key, params(), steps, full)

    def save() -> None:
        life.save({"state": state})

    # After a signal `ending` saves a checkpoint and ends the program.
    with contextlib.closing(backend), life.ending(save):
        for step in range(life.progress.step, cfg.steps):
            # ---- Evaluation: the accuracy on held-out questions; step 0 is the baseline ----------
            if life.evaluation_is_due(step):
                life.note_evaluation(step, evaluate_after(step))
            clock = Clock(PHASES)

            # ---- Rollout and rewards: K completions of each of P prompts, rewarded on the host ---
            backend.update_weights(params())
            clock.lap("rollout_sync")
            rounds: list[Batch] = []
            while not enough(run, rounds):  # only DYNAMIC_SAMPLING needs more than one round
                number = life.progress.rounds + len(rounds)  # of the run, from 0
                prompts = prompts_of_round(run, number)  # [P], the same on every process
                key = jax.random.fold_in(rollout_key, number)
                completions = complete_prompts(run, backend, prompts, key)  # [b, T]
                clock.lap("rollout_generate")
                local = local_part_of(prompts)  # of this process, like the completions
                # [b] and [b, functions]
                totals, per_function = reward_completions(run, local, completions)
                clock.lap("reward")
                rounds.append(gather_batch(run, prompts, completions, totals, per_function))
                clock.lap("shard")
            backend.release()

            # ---- Advantages: how much better each completion is than its group -------------------
            batch = choose_groups(run, rounds)  # P groups, if possible with rewards that differ
            advantages = group_advantages(
                batch.rewards,
                cfg.num_pre_q,
                estimator=cfg.adv_estimator,
                scale_rewards=cfg.scale_rewards,
                per_function=batch.per_function,
                weights=run.weights,
            )  # [B] float64
            # The loss may leave out completions that were cut off.
            is_counted = batch.stopped | (not cfg.mask_truncated_completions)  # [B]
            mask = batch.completion_mask * is_counted[:, None]  # [B, T]
            batch = batch._replace(advantages=advantages, completion_mask=mask)
            clock.lap("advantages")

            # ---- Log-probabilities before the first update, by the policy and the reference -----
            batch = with_logps(run, params(), ref_params, batch)
            clock.lap("logps")

            # ---- Update: PPO_EPOCHS times, an optimizer step for each mini-batch -----------------
            lr = learning_rate(
                step,
                peak=cfg.learning_rate,
                schedule=cfg.lr_schedule,
                warmup_ratio=cfg.warmup_ratio,
                decay_steps=cfg.lr_decay_steps or cfg.steps,
            )
            state, metrics = update_policy(run, state, batch, lr, step)
            clock.lap("update")

            # ---- Log -----------------------------------------------------------------------------
            if cfg.dynamic_sampling:
                metrics |= sampling_metrics(run, rounds)
            metrics["learning_rate"] = lr
            sampled_tokens = sum(int(sampled.drawn_mask.sum()) for sampled in rounds)
            log_step(run, life.log, Step(step, metrics, batch, sampled_tokens, clock))
            if step == 0:
                stop_if_apart(run, metrics)

            # ---- Save ----------------------------------------------------------------------------
            life.count_step(len(rounds), what_is_not_finite(metrics))
            due = cfg.save_every_steps and life.progress.step % cfg.save_every_steps == 0
            if due and life.progress.step < cfg.steps:
                save()

        if life.evaluation_is_due(cfg.steps):
            life.note_evaluation(cfg.steps, evaluate_after(cfg.steps))
        if cfg.steps:
            save()  # the last checkpoint, with the last accuracy
        if cfg.eval_full_sweep:
            evaluate_after(cfg.steps, full=True)
    with life.ending(save):
        life.finish(lambda: export(run, life.out, params()))


# ---- Log-probabilities before the first update ---------------------------------------------------


def with_logps(run: Run, params: Params, ref_params: Params | None, batch: Batch) -> Batch:
    """The batch with what the loss needs to know of its tokens before the first update: ref_logps
    if BETA > 0, old_logps if there are several updates, and the top_mask of TOP_ENTROPY_QUANTILE,
    whose threshold is that of the complete step."""
    cfg = run.cfg
    found = {}  # arrays [B, T]
    if ref_params is not None:
        found["ref_logps"], _ = batch_logps_and_entropies(run, ref_params, batch)
    if cfg.needs_policy_logps():
        logps, entropies = batch_logps_and_entropies(run, params, batch)
        if run.sizes.updates_per_step > 1:
            found["old_logps"] = logps
        if cfg.top_entropy_quantile < 1:
            top = top_entropy_mask(entropies, batch.completion_mask, cfg.top_entropy_quantile)
            found["top_mask"] = top.astype(np.int32)
    return batch._replace(**found)


@program("compute_logps_and_entropies", MICRO_SIZES)
def batch_logps_and_entropies(run: Run, params: Params, batch: Batch) -> np.ndarray:
    """[2, B, T] float32 nats, on every process: the log-probabilities and the entropies of the
    completions' tokens by these weights. They are 0 for sequences that are not computed, and mean
    nothing behind the end of a completion."""
    found = np.zeros((2, *batch.completion_ids.shape), np.float32)
    micro_batches = to_devices(run, batch, computed_sequences(run, batch))
    compute = run.cfg.temperature, run.training
    computed = [compute_logps_and_entropies(params, x, *compute) for x in micro_batches]
    for micro_batch, values in zip(micro_batches, computed, strict=True):
        local = jax.tree.map(local_part, (micro_batch.sequences, *values))
        sequences, *values = gather_processes(local)  # [R], [R, T], [R, T]
        found[:, sequences[sequences >= 0]] = np.stack(values)[:, sequences >= 0]
    return found


def computed_sequences(run: Run, batch: Batch) -> np.ndarray:
    """The numbers of the sequences that an update computes. It leaves out those without a token
    that counts and, if only the advantage decides (Config.skips), those whose advantage is 0."""
    computed = batch.completion_mask.any(axis=1)  # [B]
    if run.cfg.skips():  # An advantage of 0 adds 0, but NaN shows that the weights are broken.
        computed &= (batch.advantages != 0) | ~np.isfinite(batch.sampling_logps).all(axis=1)
    return np.flatnonzero(computed)


def to_devices(run: Run, batch: Batch, sequences: np.ndarray) -> list[MicroBatch]:
    """These sequences of the batch, packed in rows, all on the devices at once."""
    micro_batches = []
    rows_of_micro_steps, widths = plan_rows(batch, sequences, run.limits)
    for rows in rows_of_micro_steps:
        packed = pack(batch, local_part_of(rows), widths, run.stopping.pad_id)
        micro_batches.append(shard_batch(packed, run.training.layout))
    return micro_batches


# ---- Update --------------------------------------------------------------------------------------


def update_policy(
    run: Run, state: TrainState, batch: Batch, lr: float, step: int
) -> tuple[TrainState, dict[str, float]]:
    """The updates of a step: the state and the metrics.

    An update that is not finite leaves the state as it is, and is the last one.
    """
    updates = []
    epochs = [groups_of_mini_batches(run, step, epoch) for epoch in range(run.cfg.ppo_epochs)]
    run.stop.check()  # once the first update is applied, the run stops only after the step
    for group_indices in np.concatenate(epochs):  # [updates, groups of a mini-batch]
        mini_batch = batch.groups(group_indices)
        if not updates:  # Without old_logps, which another program has rounded, each ratio is 1.
            mini_batch = mini_batch._replace(old_logps=None)
        state, metrics = one_update(run, state, mini_batch, lr)
        updates.append(metrics)
        if what_is_not_finite(metrics):
            break
    applied = len(updates) - bool(what_is_not_finite(metrics))
    return state, merge_updates(updates) | {"updates_applied": applied}


def groups_of_mini_batches(run: Run, step: int, epoch: int) -> np.ndarray:
    """[NUM_MINI_BATCHES, groups] the groups of each update in this epoch, in an order that follows
    from SEED, the step and the epoch alone; a single mini-batch keeps the order of the batch."""
    P, n = run.sizes.prompts_per_step, run.cfg.num_mini_batches
    order = np.random.default_rng([run.cfg.seed, step, epoch]).permutation(P)
    return (np.arange(P) if n == 1 else order).reshape(n, -1)


def one_update(
    run: Run, state: TrainState, mini_batch: Batch, lr: float
) -> tuple[TrainState, dict[str, float]]:
    """The state after one optimizer step on the gradient of the mini-batch, and the metrics."""
    grads, metrics = sum_of_gradients(run, on_base(run.base, state.params), mini_batch)
    how = {"optimizer": run.optimizer, "model": run.model}
    with program("optimizer_step"):
        state, norms = optimizer_step(state, grads, np.float32(lr), metrics["loss"], **how)
        return state, metrics | norms


@program("micro_step", MICRO_SIZES)
def sum_of_gradients(
    run: Run, params: Params, mini_batch: Batch
) -> tuple[Params, dict[str, float]]:
    """The sum of the gradients of all micro-batches, and the metrics of the update. params: all
    weights; the gradients are of those that training changes."""
    sequences, counts = computed_sequences(run, mini_batch), counts_of(mini_batch)
    micro_batches = to_devices(run, mini_batch, sequences)
    needs_zeros = run.sizes.grad_accum_steps > 1 or not micro_batches
    grads = jax.tree.map(jnp.zeros_like, trained(params)) if needs_zeros else None
    metrics_of = []
    for micro_batch in micro_batches:
        grads, metrics = micro_step(
            params,
            grads,
            micro_batch,
            counts,
            objective=run.objective,
            temperature=run.cfg.temperature,
            compute=run.training,
        )
        metrics_of.append(metrics)
    metrics = merge_metrics(metrics_of or [{"loss": 0.0}])  # nothing to learn from: no other metric
    metrics = of_all_tokens(metrics, mini_batch, sequences)
    per_token = computed_per_token(micro_batches, mini_batch, sequences)
    return grads, metrics | {"throughput/update/computed_per_token": per_token}


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # it may lack characters of a model
    if FLAGS.plan:
        from tools.plan import plan_and_exit

        plan_and_exit(CFG, FLAGS.plan)
    print(*LINES, sep="\n", flush=True)
    with ending_together(), memory_errors_in_sizes(CFG):
        if FLAGS.eval_only or FLAGS.ask:
            from tools.ask import answer_command

            answer_command(CFG, FLAGS)
        else:
            main(CFG)
