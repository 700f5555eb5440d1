"""GRPO on one CPU, one GPU, one TPU host or a TPU pod slice: `STEPS=1 python train_grpo.py`.

One step samples K completions of each of P prompts, rewards them, compares each completion with
the others of its prompt, and makes the better ones more likely. Read `main` from top to bottom. The
formulas are in loss.py, what happens in a rollout in rollout.py, the programs that run on devices
in sampling.py and update.py; startup.py has all that comes before the first step, and the export.

Dimensions: P prompts of a step, K completions per prompt, B = P*K sequences, R places for sequences
in a micro-batch. P, B and R count all processes together; b is this process's part of B. T padded
completion tokens: MAX_LENGTH_SAMPLE in the rollout, and after it one of a few widths, which holds
the longest completion of the step (completion_width in runtime/packing.py).

On the way a question is a data.Prompt, and what one process samples are Completions (sampling.py,
which decodes with the state Decoding). From gather_batch on, a Batch (runtime/packing.py) holds all
sequences in NumPy arrays on every process. It also draws their rows, whose sizes are Widths. A
MicroBatch (update.py) holds some rows on the devices, and TrainState what an update changes.

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
    COMMAND = load(sys.argv[1:])  # it ends the program for --print-config and for mistakes

import contextlib

import jax
import numpy as np

from loss import group_advantages, metrics_of_nothing, top_entropy_mask
from metrics import (
    PHASES,
    Step,
    evaluate,
    log_step,
    merge_metrics,
    merge_updates,
    of_all_tokens,
    sampling_metrics,
    what_is_not_finite,
)
from models.model import Params
from rollout import (
    Run,
    choose_groups,
    complete_prompts,
    enough,
    gather_batch,
    prompts_of_round,
    reward_completions,
)
from runtime.chips import memory_errors_in_sizes, program
from runtime.layout import shard_batch
from runtime.packing import Batch, pack, plan_rows
from runtime.processes import StopSignal, ending_together
from runtime.run_log import Clock
from runtime.sizes import MICRO_SIZES
from startup import export, start
from update import (
    MicroBatch,
    TrainState,
    compute_logps_and_entropies,
    computed_per_token,
    counts_of,
    learning_rate,
    micro_step,
    optimizer_step,
    saved_arrays,
    to_batch,
    zero_grads,
)


def main(cfg: Config) -> None:
    """Trains the model for STEPS steps, evaluates it on the way, and exports it."""
    run, life, backend, state, ref_params = start(cfg)
    rollout_key, eval_key = jax.random.split(jax.random.key(cfg.seed))

    def evaluate_after(steps: int, full: bool = False) -> float:
        return evaluate(run, life.log, life.stop, backend, eval_key, state.params, steps, full)

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
            backend.update_weights(state.params)
            clock.lap("rollout_sync")
            rounds: list[Batch] = []
            while not enough(run, rounds):  # only DYNAMIC_SAMPLING needs more than one round
                number = life.progress.rounds + len(rounds)  # of the run, from 0
                prompts = prompts_of_round(run, number)  # [P], the same on every process
                key = jax.random.fold_in(rollout_key, number)
                completions = complete_prompts(run, backend, life.stop, prompts, key)  # [b, T]
                clock.lap("rollout_generate")
                local = prompts[run.local_prompts()]  # of this process, like the completions
                totals, per_function = reward_completions(run, local, completions)  # [b]
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

            # ---- Scores: what the loss needs to know of the tokens before the first update -------
            batch = with_scores(run, state.params, ref_params, batch)

            # ---- Update: PPO_EPOCHS times, an optimizer step for each mini-batch -----------------
            lr = learning_rate(
                step,
                peak=cfg.learning_rate,
                schedule=cfg.lr_schedule,
                warmup_ratio=cfg.warmup_ratio,
                decay_steps=cfg.lr_decay_steps or cfg.steps,
            )
            state, last_mini_batch, metrics = update_policy(run, life.stop, state, batch, lr, step)
            clock.lap("update")

            # ---- Log -----------------------------------------------------------------------------
            if cfg.dynamic_sampling:
                metrics |= sampling_metrics(run, rounds)
            metrics["learning_rate"] = lr
            sampled_tokens = sum(int(sampled.lengths.sum()) for sampled in rounds)
            log_step(run, life.log, Step(step, metrics, batch, sampled_tokens, clock))

            # ---- Save ----------------------------------------------------------------------------
            not_finite = what_is_not_finite(metrics)  # its name and value, or ""
            arrays = saved_arrays(last_mini_batch) if not_finite else {}
            life.count_step(len(rounds), not_finite, arrays)
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
        life.finish(lambda: export(run, life.out, state.params))


# ---- Scores --------------------------------------------------------------------------------------


def with_scores(run: Run, params: Params, ref_params: Params | None, batch: Batch) -> Batch:
    """The batch with what the loss needs to know of its tokens before the first update: ref_logps
    if BETA > 0, old_logps if NUM_MINI_BATCHES > 1, and the top_mask of TOP_ENTROPY_QUANTILE, whose
    threshold is that of the complete step."""
    cfg = run.cfg
    scores = {}  # arrays [B, T]
    if ref_params is not None:
        scores["ref_logps"], _ = score(run, ref_params, batch)
    if cfg.scores_policy():
        logps, entropies = score(run, params, batch)
        if cfg.num_mini_batches > 1:
            scores["old_logps"] = logps
        if cfg.top_entropy_quantile < 1:
            top = top_entropy_mask(entropies, batch.completion_mask, cfg.top_entropy_quantile)
            scores["top_mask"] = top.astype(np.int32)
    return batch._replace(**scores)


@program("compute_logps_and_entropies", MICRO_SIZES)
def score(run: Run, params: Params, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The log-probabilities and the entropies of the completions' tokens by these weights, both
    [B, T] float32 nats, as to_batch returns them."""
    micro_batches = to_devices(run, batch, computed_sequences(run, batch))
    scores = [
        compute_logps_and_entropies(params, x, run.cfg.temperature, run.training)
        for x in micro_batches
    ]
    logps, entropies = ([x[i] for x in scores] for i in (0, 1))
    return to_batch(logps, micro_batches, batch), to_batch(entropies, micro_batches, batch)


def computed_sequences(run: Run, batch: Batch) -> np.ndarray:
    """The numbers of the sequences that an update computes. It leaves out those without a token
    that counts and, if only the advantage decides (Config.skips), those whose advantage is 0."""
    computed = batch.completion_mask.any(axis=1)  # [B]
    if run.cfg.skips():  # An advantage of 0 adds 0, but NaN shows that the weights are broken.
        computed &= (batch.advantages != 0) | ~np.isfinite(batch.sampling_logps).all(axis=1)
    return np.flatnonzero(computed)


def to_devices(run: Run, batch: Batch, sequences: np.ndarray) -> list[MicroBatch]:
    """These sequences of the batch, packed in rows, all on the devices at once. to_batch in
    update.py brings values of micro-batches back to the places of the batch."""
    layout, micro_batches = run.training.layout, []
    rows_of_micro_steps, widths = plan_rows(batch, sequences, run.limits)
    for rows in rows_of_micro_steps:
        count = len(rows) // jax.process_count()  # rows of a process
        local = rows[jax.process_index() * count : (jax.process_index() + 1) * count]
        arrays = pack(batch, local, widths, run.stopping.pad_id)
        micro_batches.append(MicroBatch(**{k: shard_batch(x, layout) for k, x in arrays.items()}))
    return micro_batches


# ---- Update --------------------------------------------------------------------------------------


def update_policy(
    run: Run,
    stop: StopSignal,
    state: TrainState,
    batch: Batch,
    lr: float,
    step: int,
) -> tuple[TrainState, Batch, dict[str, float]]:
    """The updates of a step: the state, the mini-batch of the last update, and the metrics.

    An update whose loss or gradient is not finite leaves the state as it is, and is the last one.
    """
    cfg = run.cfg
    updates = []
    epochs = [groups_of_mini_batches(run, step, epoch) for epoch in range(cfg.ppo_epochs)]
    groups_of_updates = np.concatenate(epochs)  # [updates, groups of a mini-batch]
    stop.check()  # once the first update is applied, the run stops only after the step
    for number, group_indices in enumerate(groups_of_updates, start=1):
        mini_batch = batch.groups(group_indices)
        if number == 1:  # Without old_logps, which another program has rounded, each ratio is 1.
            mini_batch = mini_batch._replace(old_logps=None)
        state, metrics, logps, micro_batches = one_update(run, state, mini_batch, lr)
        updates.append(metrics)
        if what_is_not_finite(metrics):
            applied = {"updates_applied": number - 1}
            return state, mini_batch, merge_updates(updates) | applied
        if batch.old_logps is None and len(groups_of_updates) > 1:  # one mini-batch, many epochs
            batch = batch._replace(old_logps=to_batch(logps, micro_batches, batch))
    return state, mini_batch, merge_updates(updates) | {"updates_applied": number}


def groups_of_mini_batches(run: Run, step: int, epoch: int) -> np.ndarray:
    """[NUM_MINI_BATCHES, groups] the groups of each update in this epoch, in an order that follows
    from SEED, the step and the epoch alone. A single mini-batch keeps the order of the batch, since
    its log-probabilities become old_logps of the batch."""
    P, n = run.sizes.prompts_per_step, run.cfg.num_mini_batches
    order = np.random.default_rng([run.cfg.seed, step, epoch]).permutation(P)
    return (np.arange(P) if n == 1 else order).reshape(n, -1)


def one_update(
    run: Run, state: TrainState, mini_batch: Batch, lr: float
) -> tuple[TrainState, dict[str, float], list[jax.Array], list[MicroBatch]]:
    """One optimizer step on the sum of the gradients of all micro-batches: the state, the metrics,
    each micro-batch's log-probabilities [R, T] before the update, and the micro-batches."""
    sequences, counts = computed_sequences(run, mini_batch), counts_of(mini_batch)
    micro_batches = to_devices(run, mini_batch, sequences)
    metrics_of, logps_of = [], []
    with program("micro_step", MICRO_SIZES):
        several = run.sizes.grad_accum_steps > 1
        grads = zero_grads(state.params) if several or not micro_batches else None
        for micro_batch in micro_batches:
            grads, metrics, logps = micro_step(
                state.params,
                grads,
                micro_batch,
                counts,
                objective=run.objective,
                temperature=run.cfg.temperature,
                compute=run.training,
            )
            metrics_of.append(metrics)
            logps_of.append(logps)
    if not micro_batches:  # nothing to learn from
        metrics_of = [metrics_of_nothing(run.objective.loss_type)]
    with program("optimizer_step"):
        loss = sum(metrics["loss"] for metrics in metrics_of)
        state, norm = optimizer_step(
            state, grads, np.float32(lr), loss, optimizer=run.optimizer, model=run.model
        )
    # A program that fails is told when its results are read: first those of the micro-steps.
    with program("micro_step", MICRO_SIZES):
        metrics = of_all_tokens(merge_metrics(metrics_of), mini_batch, sequences)
    with program("optimizer_step"):
        metrics["grad_norm"] = float(norm)
    per_token = computed_per_token(micro_batches, mini_batch, sequences)
    metrics["throughput/update/computed_per_token"] = per_token
    return state, metrics, logps_of, micro_batches


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # it may lack characters of a model
    if COMMAND.slice_name:
        from tools.plan_tpu import plan_and_exit

        plan_and_exit(COMMAND.cfg, COMMAND.slice_name)
    print(*COMMAND.lines, sep="\n", flush=True)
    with ending_together(), memory_errors_in_sizes(COMMAND.cfg):
        if COMMAND.eval_only or COMMAND.question:
            from tools.ask import answer_command

            answer_command(COMMAND)
        else:
            main(COMMAND.cfg)
