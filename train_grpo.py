"""GRPO on one CPU, one GPU, one TPU host or a TPU pod slice: `STEPS=1 python train_grpo.py`.

One step: sample K completions of each of P prompts, score them, ask of each how much better it is
than its group, and move the policy towards those that are. Read `main` from top to bottom; the
formulas are in loss.py, a round of sampling in sampling.py, the programs that run on devices in
rollout.py and update.py.

Where this departs from the GRPO paper (arXiv 2402.03300), as most of the field now does:
 1. The loss is the mean over all completion tokens of the step, not over each sequence first
    (LOSS_TYPE=grpo is the paper's).
 2. No KL penalty unless BETA > 0; it then is the k3 estimate times the ratio, whose gradient is
    that of the KL itself (KL_BIAS_CORRECTION=0 is the paper's).
 3. Advantages divide by std + 1e-4 (ddof = 1), and are exactly 0 when a group's rewards are equal.
"""
# ruff: noqa: E402 - settings are read and checked before jax is imported

import sys

import config as settings

if __name__ == "__main__":
    COMMAND = settings.load(sys.argv[1:])  # prints the settings and exits, with --print-config
    if COMMAND.slice_name:
        from tools import plan_tpu

        try:
            raise SystemExit(plan_tpu.main(COMMAND.cfg, COMMAND.slice_name))
        except ValueError as error:
            settings.fail(error)
    print(*COMMAND.lines, sep="\n", flush=True)

import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import data
from loss import group_advantages, top_entropy_mask
from metrics import (
    Clock,
    RunLog,
    StepRows,
    evaluation,
    not_finite,
    sample_records,
    sampling_metrics,
    step_lines,
    step_records,
)
from models import hf
from models.model import Params
from rollout import Rollout, Sampling, bucket, pad_prompts, prompt_width, share
from runtime import memory
from runtime.layout import gather_rows, local_rows, put_rows
from runtime.processes import Stopped, StopSignal, ending_together, lost_contact
from runtime.resume import (
    begin,
    is_finished,
    leave,
    mark_finished,
    open_checkpoints,
    output_folder,
    record_of,
)
from runtime.sizes import eval_questions
from sampling import (
    RewardError,
    Round,
    choose_groups,
    complete,
    copy_weights,
    enough,
    equal_groups,
    sample_round,
    score,
)
from startup import Run, open_log, set_up, start_jax
from update import (
    Counts,
    MicroBatch,
    TrainState,
    learning_rate,
    merge_metrics,
    micro_step,
    mix_weights,
    optimizer_step,
    score_tokens,
    zero_grads,
)


def main(cfg: settings.Config) -> None:
    began, stop, out = time.perf_counter(), StopSignal(cfg.preemption_grace_s), None
    try:
        start_jax(cfg)
        run = set_up(cfg)
        if is_finished(run):
            print(f"OUTPUT_DIR={cfg.output_dir}: all STEPS={cfg.steps} are done; raise it to go on")
            print(f"DONE: steps={cfg.steps} elapsed_sec={time.perf_counter() - began:.3f}")
            return
        out = output_folder(cfg)
        checkpoints, seen = open_checkpoints(cfg, out)
        state, ref_params, progress = begin(run, checkpoints, out, seen)
        log = open_log(run, out, progress.step, progress.wandb_id, progress.forked_from)
    except ValueError as error:
        if lost_contact(error):
            raise
        if out and jax.process_index() == 0:
            leave(Path(cfg.checkpoint_dir or out / "checkpoints"), out)
        settings.fail(error)
    checkpoints.say, saves = log.line, seen and cfg.save_every_steps > 0
    progress.wandb_id = log.wandb_id or progress.wandb_id
    stop.running = True
    # B = P*K sequences of a step over all processes, b of them on this one: the rows `own`
    K, b = cfg.num_pre_q, run.sizes.local_batch
    own = slice(jax.process_index() * b, (jax.process_index() + 1) * b)
    rollout_key, eval_key = jax.random.split(jax.random.key(cfg.seed))

    def save() -> None:
        """Saves a checkpoint, unless there is one of this step or there are to be none."""
        if saves and checkpoints.latest != progress.step:
            arrays = {"state": state} | ({"ref_params": ref_params} if cfg.beta > 0 else {})
            checkpoints.save(progress.step, arrays, record_of(run, progress), progress.evals)

    try:
        if progress.step and checkpoints.latest < 0:  # from another run's checkpoint
            save()
        for step in range(progress.step, cfg.steps):
            if cfg.eval_every_steps and step % cfg.eval_every_steps == 0:
                progress.evals[step] = evaluate(run, log, stop, state.params, eval_key, step)
            clock = Clock()

            # ---- Rollout and rewards, from a copy of the weights laid out to decode --------------
            decoder = copy_weights(run, state.params, run.rollout, run.compute.dtype)
            clock.lap("rollout_sync")
            rounds: list[Round] = []
            while not enough(run, rounds):  # a second time only with DYNAMIC_SAMPLING
                number = progress.rounds + len(rounds)
                rounds.append(sample_round(run, decoder, stop, rollout_key, number, own, clock))
            del decoder
            prompts, roll, rows = choose_groups(run, rounds, own)  # [b/K], [b, T], [B]

            # ---- Advantages ----------------------------------------------------------------------
            advantages = group_advantages(
                rows.rewards, K, estimator=cfg.adv_estimator, scale_rewards=cfg.scale_rewards,
                per_function=rows.per_function, weights=cfg.reward_weights,
            )  # [B]  # fmt: skip
            learns = (rows.stopped > 0) | (not cfg.mask_truncated_completions)  # [B]
            num_tokens = num_top_tokens = int((rows.completion_lengths * learns).sum())
            clock.lap("advantages")

            # ---- Update: PPO_EPOCHS times, the gradient of every micro-batch, then a step --------
            micros = micro_batches(run, prompts, roll, advantages[own], learns[own], rows)
            clock.lap("shard")
            if cfg.top_entropy_quantile < 1:
                micros, num_top_tokens = keep_top_entropy(run, state.params, micros, own)
            totals = (num_tokens, len(rows.rewards), num_top_tokens)
            counts = Counts(*(np.float32(max(total, 1)) for total in totals))
            lr = learning_rate(
                step, peak=cfg.learning_rate, schedule=cfg.lr_schedule,
                warmup_ratio=cfg.warmup_ratio, decay_steps=cfg.lr_decay_steps or cfg.steps,
            )  # fmt: skip
            state, ref_params, means = learn(
                run, stop, state, ref_params, micros, counts, lr, step
            )  # fmt: skip
            clock.lap("update")
            wrong = not_finite(means)
            progress.not_finite = progress.not_finite + 1 if wrong else 0

            # ---- Log -----------------------------------------------------------------------------
            if cfg.dynamic_sampling:
                sampled = np.concatenate([r.rows.rewards for r in rounds])
                means |= sampling_metrics(len(rounds), equal_groups(run, rounds), sampled)
            teaches = bool((advantages * learns).any())
            breakdown = cfg.print_train_time_breakdown
            for line in step_lines(step, means, rows, teaches, clock, breakdown):
                log.line(line)
            names = [function.__name__ for function in run.functions]
            logged = means | {"learning_rate": lr}
            records = step_records(logged, rows, advantages, clock, K, names)
            log.record(step, records | {"train-other/batch_local": b})
            first = slice(None, 2 * K, K)
            texts = Rollout(*(x[first] for x in roll)).texts(run.tokenizer)
            rewarded = rows.rewards[own][first]
            log.samples(step, sample_records(run.tokenizer, prompts[:2], texts, rewarded))
            log.step_done()

            # ---- Save ----------------------------------------------------------------------------
            progress.step, progress.rounds = step + 1, progress.rounds + len(rounds)
            if wrong:
                log.arrays(f"bad_step_{step}.npz", whole_batch(micros))
            if progress.not_finite >= cfg.nonfinite_limit:
                checkpoints.wait()
                log.close()
                raise SystemExit(
                    f"error: step {step}: {wrong}, for NONFINITE_LIMIT={cfg.nonfinite_limit} steps "
                    f"in a row; their batches are {out}/bad_step_N.npz. Lower LEARNING_RATE?"
                )
            if cfg.save_every_steps and progress.step % cfg.save_every_steps == 0:
                save()

        if cfg.steps:
            save()
        if cfg.eval_every_steps:
            evaluate(run, log, stop, state.params, eval_key, cfg.steps)
        if cfg.eval_full_sweep:
            evaluate(run, log, stop, state.params, eval_key, cfg.steps, full=True)
    except RewardError as error:
        if jax.process_count() == 1:  # the others do not know of it
            save()
            checkpoints.wait()
        log.close()
        settings.fail(error)
    except jax.errors.JaxRuntimeError as error:
        if memory.out_of_memory(cfg, run.sizes, error):  # told below, where the program ends
            log.close()
        raise
    except Stopped as signal:
        save()
        checkpoints.wait()
        saved = checkpoints.newest if checkpoints.newest >= 0 else "none"
        log.line(f"STOPPED: {signal} steps={progress.step} saved_step={saved}")
        log.close()
        raise SystemExit(signal.exit_code) from None

    checkpoints.wait()
    if cfg.steps:
        export(run, log, out, state.params)
        if saves and checkpoints.newest < cfg.steps:
            log.close()
            raise SystemExit(f"error: the last checkpoint is not in {checkpoints.folder}")
        mark_finished(run, out)
    log.line(f"DONE: steps={cfg.steps} elapsed_sec={time.perf_counter() - began:.3f}")
    log.close()


# ---- Update --------------------------------------------------------------------------------------


def micro_batches(
    run: Run, prompts: list[data.Prompt], roll: Rollout, advantages: np.ndarray,
    learns: np.ndarray, rows: StepRows,
) -> list[MicroBatch]:  # fmt: skip
    """This process's part of each micro-batch, on the devices; T holds the step's longest.

    advantages: [b]. learns: [b] bool, False: the loss leaves this sequence out.
    """
    R, K, layout = run.sizes.micro_batch_size, run.cfg.num_pre_q, run.compute.layout
    T = min(bucket(int(rows.completion_lengths.max())), run.cfg.max_length_sample)
    width = prompt_width(int(rows.prompt_lengths.max()), run.cfg.global_length)
    s = share(K, R * jax.process_count() // layout.row_shards)
    prompt_rows = [p.ids for p in prompts for _ in range(K // s)]  # one for s sequences
    prompt_ids, prompt_mask = pad_prompts(prompt_rows, width, run.stop_ids[0])  # [b/s, S+1]
    roll = roll._replace(completion_mask=roll.completion_mask * learns[:, None].astype(np.int32))
    sequences = [x[:, :T] for x in roll] + [advantages.astype(np.float32)]  # [b, T], [b]

    def micro(i: int) -> MicroBatch:
        shared = slice(i * R // s, (i + 1) * R // s)
        parts = [put_rows(x[i * R : (i + 1) * R], layout) for x in sequences]
        return MicroBatch(
            put_rows(prompt_ids[shared], layout), put_rows(prompt_mask[shared], layout), *parts
        )

    return [micro(i) for i in range(run.sizes.grad_accum_steps)]


def keep_top_entropy(
    run: Run, params: Params, micros: list[MicroBatch], own: slice
) -> tuple[list[MicroBatch], int]:
    """The micro-batches with their top_mask, and the tokens it keeps of the whole step's.

    Entropies are those before the first update, of a forward pass of their own: the threshold is
    the step's, whatever the micro-batch.
    """
    cfg, R, layout = run.cfg, run.sizes.micro_batch_size, run.compute.layout
    scored = [score_tokens(params, micro, cfg.temperature, run.compute)[1] for micro in micros]
    entropy = gather_rows(np.concatenate([local_rows(x) for x in scored]))  # [B, T]
    mask = gather_rows(np.concatenate([local_rows(m.completion_mask) for m in micros]))
    top = top_entropy_mask(entropy, mask, cfg.top_entropy_quantile)
    mine = top[own].astype(np.int32)  # [b, T]
    masks = [put_rows(mine[i * R : (i + 1) * R], layout) for i in range(len(micros))]
    return [m._replace(top_mask=x) for m, x in zip(micros, masks, strict=True)], int(top.sum())


def whole_batch(micros: list[MicroBatch]) -> dict[str, np.ndarray]:
    """The step's batch, of all micro-batches and processes, by the names in MicroBatch."""
    parts = {name: x for name, x in zip(MicroBatch._fields, zip(*micros, strict=True), strict=True)}
    return {
        name: gather_rows(np.concatenate([local_rows(x) for x in arrays]))
        for name, arrays in parts.items()
        if arrays[0] is not None
    }


def learn(
    run: Run, stop: StopSignal, state: TrainState, ref_params: Params | None,
    micros: list[MicroBatch], counts: Counts, lr: float, step: int,
) -> tuple[TrainState, Params | None, dict[str, float]]:  # fmt: skip
    """PPO_EPOCHS updates: the state, the reference, which may follow, and the epochs' mean metrics.

    After an update whose loss or gradient is not finite, which leaves the state as it was, no more.
    """
    cfg, epochs = run.cfg, []
    if ref_params is not None:
        for i, micro in enumerate(micros):
            logps, _ = score_tokens(ref_params, micro, cfg.temperature, run.compute)
            micros[i] = micro._replace(ref_logps=logps)
    for epoch in range(cfg.ppo_epochs):
        # Before the first update a stop costs no more than what the step has done so far.
        state, metrics, logps = update(run, stop if epoch == 0 else None, state, micros, counts, lr)
        epochs.append(metrics)
        if not_finite(metrics):
            break
        if epoch == 0 and cfg.ppo_epochs > 1:  # the next compare with what was before the first
            micros = [m._replace(old_logps=x) for m, x in zip(micros, logps, strict=True)]
        updates = step * cfg.ppo_epochs + epoch + 1
        if cfg.ref_sync_steps and updates % cfg.ref_sync_steps == 0:
            ref_params = mix_weights(ref_params, state.params, cfg.ref_sync_alpha)
    return state, ref_params, {n: float(np.mean([e[n] for e in epochs])) for n in epochs[0]}


def update(
    run: Run,
    stop: StopSignal | None,
    state: TrainState,
    micros: list[MicroBatch],
    counts: Counts,
    lr: float,
) -> tuple[TrainState, dict[str, float], list[jax.Array]]:
    """One optimizer step on the sum of the micro-batches' gradients: the state, the step's metrics,
    and the logps of each micro-batch before it. The gradient lives in here only."""
    grads, parts, before = zero_grads(state.params), [], []
    for micro in micros:
        if stop:
            stop.check()
        grads, metrics, logps = micro_step(
            state.params, grads, micro, counts,
            objective=run.objective, temperature=run.cfg.temperature, compute=run.compute,
        )  # fmt: skip
        parts.append(metrics)
        before.append(logps)
    state, norm = optimizer_step(
        state, grads, np.float32(lr), sum(part["loss"] for part in parts),
        optimizer=run.optimizer, config=run.compute.config,
    )  # fmt: skip
    return state, merge_metrics(parts) | {"grad_norm": float(norm)}, before


# ---- Evaluation ----------------------------------------------------------------------------------


def evaluate(
    run: Run, log: RunLog, stop: StopSignal, params: Params, key: jax.Array, step: int,
    full: bool = False,
) -> float:  # fmt: skip
    """The accuracy on the first EVAL_PROMPTS questions of the eval split, or on all of it; logged.

    Greedy with EVAL_SAMPLES=1; else so many samples a question, at the run's temperature.
    """
    clock, cfg, k = Clock(), run.cfg, run.cfg.eval_samples
    prompts = run.test if full or not cfg.eval_prompts else run.test[: cfg.eval_prompts]
    processes = jax.process_count()
    size = eval_questions(cfg, run.sizes, jax.local_device_count())
    passes = math.ceil(len(prompts) / (size * processes))
    padded = [*prompts, *[prompts[-1]] * (passes * size * processes - len(prompts))]
    width = prompt_width(max(len(p.ids) for p in prompts), cfg.global_length)
    sampling = run.sampling if k > 1 else Sampling(temperature=0.0)
    decoder = copy_weights(run, params, run.rollout, run.compute.dtype)
    results = []
    for i in range(passes):
        first = (i * processes + jax.process_index()) * size  # this process's first question
        own = padded[first : first + size]
        rows = np.arange(first * k, (first + size) * k, dtype=np.int32)
        roll = complete(run, decoder, stop, own, rows, key, k, sampling, width, size)
        clock.lap("rollout_generate")
        scores, per_function = score(run, roll, own, k)
        results.append(gather_rows(np.column_stack([scores, per_function])))
        clock.lap("reward")
    table = np.concatenate(results)[: len(prompts) * k]  # [questions * k, 1 + F]
    names = [function.__name__ for function in run.functions]
    line, records = evaluation(step, cfg.eval_split, table, k, names, run.accuracy, clock, full)
    log.line(line)
    log.record(step, records)
    return records["eval_full/accuracy" if full else "eval/accuracy"]


# ---- The trained model ---------------------------------------------------------------------------


def export(run: Run, log: RunLog, out: Path, params: Params) -> None:
    """Writes EXPORT_HF, a Hugging Face folder."""
    if run.cfg.export_hf == "none":
        return
    folder, dtype = Path(run.cfg.export_hf or out / "hf"), run.cfg.export_dtype
    dtype = jnp.dtype(dtype if dtype != "auto" else run.compute.dtype)
    writes = jax.process_index() == 0
    try:
        hf.save_model(
            folder, params, run.compute.config, run.folder, dtype=dtype, writes=writes,
            chat_template=run.cfg.chat_template,
        )  # fmt: skip
    except OSError as error:
        log.close()
        raise SystemExit(f"error: EXPORT_HF={folder} cannot be written: {error}") from None


if __name__ == "__main__":
    with ending_together(), memory.told_in_sizes(COMMAND.cfg):
        main(COMMAND.cfg)
