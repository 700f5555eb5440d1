"""GRPO on one CPU, one GPU, one TPU host or a TPU pod slice: `STEPS=1 python train_grpo.py`.

One step samples K completions of each of P prompts, rewards them, compares each completion with
the others of its prompt, and makes the better ones more likely. Read `main` from top to bottom. The
formulas are in loss.py, what happens in a rollout in rollout.py, the programs that run on devices
in sampling.py and update.py, and all that comes before the first step in startup.py.

Dimensions: P prompts of a step, K completions per prompt, B = P*K sequences, R sequences and G
prompts of a micro-batch. P, B, R and G count all processes together; b and r are this process's
parts of B and R. S+1 padded prompt tokens, T padded completion tokens: MAX_LENGTH_SAMPLE in
the rollout, and after it as many as the step's longest completion needs.

This departs from the GRPO paper (arXiv 2402.03300) in four points, as most of the field does:
 1. The loss is the mean over all completion tokens of the step, not the mean over each sequence
    first (LOSS_TYPE=grpo is the paper's).
 2. There is no KL penalty unless BETA > 0. It then is the k3 estimate times the ratio, so
    that its gradient is on average that of the KL itself (KL_BIAS_CORRECTION=0 is the paper's).
 3. Advantages divide by std + 1e-4 (ddof = 1), and are exactly 0 if a group's rewards are equal.
 4. TEMPERATURE divides the logits in sampling and in all log-probabilities of the loss. TOP_K,
    TOP_P and MIN_P drop tokens in sampling only.
"""
# ruff: noqa: E402 - settings are read and checked before jax is imported

import sys

from config import Config, load

if __name__ == "__main__":
    COMMAND = load(sys.argv[1:])  # it ends the program for --print-config and for mistakes

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import data
from loss import group_advantages, top_entropy_mask
from metrics import Step, log_evaluation, log_step, sampling_metrics, what_is_not_finite
from models import hf
from models.model import Params
from rollout import Groups, answer_questions, sample_groups
from run import Backend, Run
from runtime.chips import memory_errors_in_sizes
from runtime.layout import gather_processes, local_part, shard_batch
from runtime.lifecycle import Lifecycle
from runtime.processes import StopSignal, ending_together
from runtime.run_log import Clock
from runtime.sizes import MICRO_SIZES, PASS_SIZES, bucket, prompt_share, prompt_width
from startup import start
from update import (
    MicroBatch,
    MiniBatch,
    TrainState,
    compute_logps,
    count,
    gather_batch,
    learning_rate,
    merge_metrics,
    merge_updates,
    micro_step,
    mix_weights,
    optimizer_step,
    zero_grads,
)


def main(cfg: Config) -> None:
    """Trains the model for STEPS steps, evaluates it on the way, and exports it."""
    started = start(cfg)
    if started is None:  # all steps were done before
        return
    run, life, backend, state, ref_params = started
    rollout_key, eval_key = jax.random.split(jax.random.key(cfg.seed))

    def save() -> None:
        life.save({"state": state} | ({"ref_params": ref_params} if cfg.beta > 0 else {}))

    # After a signal `ending` saves a checkpoint and ends the program.
    with contextlib.closing(backend), life.ending(save):
        for step in range(life.progress.step, cfg.steps):
            # ---- Evaluation: the accuracy on held-out questions; step 0 is the baseline ----------
            if cfg.eval_every_steps and step % cfg.eval_every_steps == 0:
                accuracy = evaluate(run, life, backend, state.params, eval_key, step)
                life.progress.evals[step] = accuracy
            clock = Clock()

            # ---- Rollout: K completions of each of P prompts, to the host and rewarded there -----
            backend.update_weights(state.params)
            clock.lap("rollout_sync")
            first_round = life.progress.rounds  # the rounds that all earlier steps took
            sampled = sample_groups(run, backend, life.stop, rollout_key, first_round, clock)
            groups = sampled.groups  # completions of this process [b, T], rewards of all [B]
            backend.release()

            # ---- Advantages: how much better each completion is than its group -------------------
            advantages = group_advantages(
                groups.results.rewards,
                cfg.num_pre_q,
                estimator=cfg.adv_estimator,
                scale_rewards=cfg.scale_rewards,
                per_function=groups.results.per_function,
                weights=run.weights,
            )  # [B]
            # [B] True: the loss includes this completion. One that was cut off may be left out.
            counted = (groups.results.stopped > 0) | (not cfg.mask_truncated_completions)
            clock.lap("advantages")

            # ---- Micro-batches, on the devices: arrays [G, S+1], [R, T] and [R] ------------------
            micro_batches = split_into_micro_batches(run, groups, advantages, counted)
            clock.lap("shard")  # the programs from here on count in the lap "update"
            micro_batches = with_ref_logps(run, ref_params, micro_batches)
            micro_batches, num_top_tokens = with_top_entropy(run, state.params, micro_batches)
            num_tokens = int((groups.results.completion_lengths * counted).sum())
            counts = count(num_tokens, len(counted), num_top_tokens)
            all_groups = MiniBatch(np.arange(len(groups.prompts)), micro_batches, counts)

            # ---- Update: PPO_EPOCHS times an optimizer step for each of NUM_MINI_BATCHES parts ---
            lr = learning_rate(
                step,
                peak=cfg.learning_rate,
                schedule=cfg.lr_schedule,
                warmup_ratio=cfg.warmup_ratio,
                decay_steps=cfg.lr_decay_steps or cfg.steps,
            )
            state, ref_params, last, metrics = update_policy(
                run, life.stop, state, ref_params, all_groups, lr, step
            )
            clock.lap("update")

            # ---- Log -----------------------------------------------------------------------------
            if cfg.dynamic_sampling:
                metrics |= sampling_metrics(sampled)
            metrics["learning_rate"] = lr
            done = Step(step, metrics, groups.results, advantages, counted, clock)
            log_step(run, life.log, done, groups)

            # ---- Save ----------------------------------------------------------------------------
            wrong = what_is_not_finite(metrics)
            arrays = gather_batch(last.micro_batches) if wrong else {}
            life.step_done(sampled.num_rounds, wrong, arrays)
            due = cfg.save_every_steps and life.progress.step % cfg.save_every_steps == 0
            if due and life.progress.step < cfg.steps:
                save()

        if cfg.eval_every_steps:
            accuracy = evaluate(run, life, backend, state.params, eval_key, cfg.steps)
            life.progress.evals[cfg.steps] = accuracy
        if cfg.steps:
            save()  # the last checkpoint, with the last accuracy
        if cfg.eval_full_sweep:
            evaluate(run, life, backend, state.params, eval_key, cfg.steps, full=True)
    life.finish(lambda: export(run, life.out, state.params))


# ---- Micro-batches -------------------------------------------------------------------------------


def split_into_micro_batches(
    run: Run, groups: Groups, advantages: np.ndarray, counted: np.ndarray
) -> list[MicroBatch]:
    """The step's sequences in micro-batches, on the devices; T holds the step's longest completion.

    advantages: [B] float64. counted: [B] bool, False: the loss leaves this sequence out.
    """
    layout, K, results = run.training.layout, run.cfg.num_pre_q, groups.results
    r, local = run.sizes.micro_batch_size, run.local_sequences()
    T = min(bucket(int(results.completion_lengths.max())), run.cfg.max_length_sample)
    width = prompt_width(int(results.prompt_lengths.max()), run.cfg.global_length)
    share = prompt_share(K, r * jax.process_count() // layout.batch_shards)
    # A prompt is repeated for every `share` sequences; each copy lies on the device of these.
    prompts = [p.ids for p in groups.prompts[run.local_prompts()] for _ in range(K // share)]
    prompt_arrays = data.pad_prompts(prompts, width, run.stopping.pad_id)  # [b/share, S+1] each
    ids, mask, sampling_logps = (x[:, :T] for x in groups.completions)  # [b, T] each
    mask = mask * counted[local, None].astype(np.int32)
    sequence_arrays = (ids, mask, sampling_logps, advantages[local].astype(np.float32))

    def micro_batch(i: int) -> MicroBatch:
        shared, sequences = slice(i * r // share, (i + 1) * r // share), slice(i * r, (i + 1) * r)
        return MicroBatch(
            *(shard_batch(x[shared], layout) for x in prompt_arrays),
            *(shard_batch(x[sequences], layout) for x in sequence_arrays),
        )

    return [micro_batch(i) for i in range(len(ids) // r)]


def with_ref_logps(
    run: Run, ref_params: Params | None, micro_batches: list[MicroBatch]
) -> list[MicroBatch]:
    """The micro-batches with the log-probabilities of the reference, if BETA compares with it."""
    if ref_params is None:
        return micro_batches
    temperature, training = run.cfg.temperature, run.training
    return [
        batch._replace(ref_logps=compute_logps(ref_params, batch, temperature, training)[0])
        for batch in micro_batches
    ]


def with_top_entropy(
    run: Run, params: Params, micro_batches: list[MicroBatch]
) -> tuple[list[MicroBatch], int | None]:
    """The micro-batches with their top_mask, and the number of tokens in the step that it keeps.

    Without TOP_ENTROPY_QUANTILE there is no top_mask, and the number is None. The entropies are
    those before the first update; the threshold is that of the complete step, not of a micro-batch.
    """
    if run.cfg.top_entropy_quantile == 1:
        return micro_batches, None
    layout, r = run.training.layout, run.sizes.micro_batch_size
    entropies = [
        local_part(compute_logps(params, batch, run.cfg.temperature, run.training)[1])
        for batch in micro_batches
    ]
    masks = [local_part(batch.completion_mask) for batch in micro_batches]
    entropy, mask = (gather_processes(np.concatenate(x)) for x in (entropies, masks))  # [B, T]
    top = top_entropy_mask(entropy, mask, run.cfg.top_entropy_quantile)  # [B, T]
    local = top[run.local_sequences()].astype(np.int32)  # [b, T]
    micro_batches = [
        batch._replace(top_mask=shard_batch(local[i * r : (i + 1) * r], layout))
        for i, batch in enumerate(micro_batches)
    ]
    return micro_batches, int(top.sum())


def with_old_logps(run: Run, params: Params, part: MiniBatch) -> MiniBatch:
    """The part with the log-probabilities of the policy before the step's first update."""
    temperature, training = run.cfg.temperature, run.training
    scored = [
        batch._replace(old_logps=compute_logps(params, batch, temperature, training)[0])
        for batch in part.micro_batches
    ]
    return part._replace(micro_batches=scored)


def shuffle_groups(run: Run, parts: list[MiniBatch], step: int, epoch: int) -> list[MiniBatch]:
    """The groups of all parts in NUM_MINI_BATCHES new parts, which follow from SEED, the step and
    the epoch alone. A group may come to another process."""
    n = run.cfg.num_mini_batches
    if n == 1:
        return parts
    # Each process gets all arrays of the step, as [P, rows of a group, ...] in the groups' order.
    place = np.argsort(np.concatenate([part.groups for part in parts]))  # [P]
    by_part = [
        {name: x.reshape(len(part.groups), -1, *x.shape[1:]) for name, x in arrays.items()}
        for part in parts
        for arrays in [gather_batch(part.micro_batches)]
    ]
    arrays = {name: np.concatenate([x[name] for x in by_part])[place] for name in by_part[0]}
    order = np.random.default_rng([run.cfg.seed, step, epoch]).permutation(len(place))
    return [_mini_batch(run, arrays, groups) for groups in order.reshape(n, -1)]


def _mini_batch(run: Run, arrays: dict[str, np.ndarray], groups: np.ndarray) -> MiniBatch:
    """Some groups of a step on the devices. arrays: {name: [P, rows of a group, ...]}."""
    local = np.array_split(groups, jax.process_count())[jax.process_index()]
    rows = {name: x[local].reshape(-1, *x.shape[2:]) for name, x in arrays.items()}
    pieces = {name: np.split(x, run.sizes.grad_accum_steps) for name, x in rows.items()}
    micro_batches = [
        MicroBatch(**{name: shard_batch(x[i], run.training.layout) for name, x in pieces.items()})
        for i in range(run.sizes.grad_accum_steps)
    ]
    mask = arrays["completion_mask"][groups]  # [groups, K, T]
    top = arrays["top_mask"][groups].sum() if "top_mask" in arrays else None
    return MiniBatch(groups, micro_batches, count(mask.sum(), mask[..., 0].size, top))


# ---- Update --------------------------------------------------------------------------------------


def update_policy(
    run: Run,
    stop: StopSignal,
    state: TrainState,
    ref_params: Params | None,
    all_groups: MiniBatch,
    lr: float,
    step: int,
) -> tuple[TrainState, Params | None, MiniBatch, dict[str, float]]:
    """The updates of a step: the state, the reference (which may follow the policy), what the last
    update learnt from, and the metrics of the step.

    An update whose loss or gradient is not finite leaves the state as it is, and is the last one.
    """
    cfg, updates = run.cfg, []
    first, *later = shuffle_groups(run, [all_groups], step, epoch=0)
    parts = [first]
    for part in later:
        stop.check()
        parts.append(with_old_logps(run, state.params, part))
    stop.check()  # once the first update is applied, the run stops only after the step
    for epoch in range(cfg.ppo_epochs):
        parts = shuffle_groups(run, parts, step, epoch) if epoch else parts
        for i, part in enumerate(parts):
            state, metrics, logps = one_update(run, state, part, lr)
            updates.append(metrics)
            if what_is_not_finite(metrics):
                applied = {"updates_applied": len(updates) - 1}
                return state, ref_params, part, merge_updates(updates) | applied
            if part is first and cfg.ppo_epochs > 1:
                pairs = zip(first.micro_batches, logps, strict=True)
                scored = [batch._replace(old_logps=before) for batch, before in pairs]
                parts[i] = first._replace(micro_batches=scored)
            number = step * run.sizes.updates_per_step + len(updates)
            if cfg.ref_sync_steps and number % cfg.ref_sync_steps == 0:
                ref_params = mix_weights(ref_params, state.params, cfg.ref_sync_alpha)
    return state, ref_params, part, merge_updates(updates) | {"updates_applied": len(updates)}


def one_update(
    run: Run, state: TrainState, part: MiniBatch, lr: float
) -> tuple[TrainState, dict[str, float], list[jax.Array]]:
    """One optimizer step on the sum of the gradients of all micro-batches: the state, the metrics,
    and the log-probabilities [R, T] of each micro-batch before the update."""
    grads = zero_grads(state.params) if len(part.micro_batches) > 1 else None
    metrics_of, before = [], []
    for micro_batch in part.micro_batches:
        grads, metrics, logps = micro_step(
            state.params,
            grads,
            micro_batch,
            part.counts,
            objective=run.objective,
            temperature=run.cfg.temperature,
            compute=run.training,
        )
        metrics_of.append(metrics)
        before.append(logps)
    state, norm = optimizer_step(
        state,
        grads,
        np.float32(lr),
        sum(metrics["loss"] for metrics in metrics_of),
        optimizer=run.optimizer,
        model=run.model,
    )
    return state, merge_metrics(metrics_of) | {"grad_norm": float(norm)}, before


# ---- Evaluation and export -----------------------------------------------------------------------


def evaluate(
    run: Run,
    life: Lifecycle,
    backend: Backend,
    params: Params,
    key: jax.Array,
    step: int,
    full: bool = False,
) -> float:
    """The accuracy on the first EVAL_PROMPTS questions of the eval split, or on all; logged.

    With EVAL_SAMPLES=1 decoding is greedy. With more it samples EVAL_SAMPLES completions of each
    question at the run's temperature.
    """
    clock, limit = Clock(), run.cfg.eval_prompts
    questions = run.eval_prompts if full or not limit else run.eval_prompts[:limit]
    backend.update_weights(params)
    clock.lap("rollout_sync")
    table = answer_questions(run, backend, life.stop, questions, key, clock)
    backend.release()
    return log_evaluation(run, life.log, step, table, clock, full)


def export(run: Run, out: Path, params: Params) -> None:
    """Writes the trained model as a Hugging Face folder. Raises OSError, which names EXPORT_HF."""
    cfg = run.cfg
    if cfg.export_hf == "none":
        return
    folder = Path(cfg.export_hf or out / "hf")
    try:
        hf.save_model(
            folder,
            params,
            run.model,
            run.folder,
            dtype=jnp.dtype(run.training.dtype if cfg.export_dtype == "auto" else cfg.export_dtype),
            writes=jax.process_index() == 0,
            chat_template=cfg.chat_template,
        )
    except OSError as error:
        raise OSError(f"EXPORT_HF={folder} cannot be written: {error}") from None


# For the line about a device that ran out of memory: a function in the stack trace -> the programs
# that it runs, and the settings that make them smaller.
WAITING = {
    "load_state": ("what holds the weights and the optimizer's state", ()),
    "save": ("checksums", ()),
    "update_weights": ("the copy of the weights that samples", ()),
    "generate": ("prefill or decode", PASS_SIZES),
    "with_ref_logps": ("compute_logps", MICRO_SIZES),
    "with_top_entropy": ("compute_logps", MICRO_SIZES),
    "with_old_logps": ("compute_logps", MICRO_SIZES),
    "one_update": ("micro_step or optimizer_step", MICRO_SIZES),
    "update_policy": ("mix_weights", MICRO_SIZES),
}


if __name__ == "__main__":
    if COMMAND.slice_name:
        from tools.plan_tpu import plan_and_exit

        plan_and_exit(COMMAND.cfg, COMMAND.slice_name)
    print(*COMMAND.lines, sep="\n", flush=True)
    with ending_together(), memory_errors_in_sizes(COMMAND.cfg, WAITING):
        main(COMMAND.cfg)
