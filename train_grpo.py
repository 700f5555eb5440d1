"""GRPO on one CPU, one GPU, one TPU host or a TPU pod slice: `STEPS=1 python train_grpo.py`.

One step: sample K completions of each of P prompts, score them, ask of each how much better it is
than its group, and move the policy towards those that are. Read `main` from top to bottom; the
formulas are in loss.py, the programs that run on devices in rollout.py and update.py.

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
    CFG, SLICE = settings.load(sys.argv[1:])  # prints them and exits, with --print-config
    if SLICE:
        import plan_tpu

        try:
            raise SystemExit(plan_tpu.main(CFG, SLICE))
        except ValueError as error:
            settings.fail(error)

import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import data
import rewards
from layout import Layout, gather_rows, local_rows, put_rows
from loss import group_advantages, top_entropy_mask
from metrics import (
    Clock,
    RunLog,
    StepRows,
    evaluation,
    sample_records,
    sampling_metrics,
    step_line,
    step_records,
    stop_if_not_finite,
)
from model import Params
from processes import ending_together, lost_contact
from rollout import Rollout, Sampling, bucket, generate, pad_prompts, prompt_width, share
from sizes import eval_questions
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
    sync_weights,
    zero_grads,
)


def main(cfg: settings.Config) -> None:
    began = time.perf_counter()
    try:
        start_jax(cfg)
        run, state = set_up(cfg)
        log = open_log(run)
    except ValueError as error:
        if lost_contact(error):
            raise
        settings.fail(error)
    # B = P*K sequences of a step over all processes, b of them on this one: the rows `own`
    K, b = cfg.num_pre_q, run.sizes.local_batch
    own = slice(jax.process_index() * b, (jax.process_index() + 1) * b)
    rollout_key, eval_key = jax.random.split(jax.random.key(cfg.seed))
    ref_params = None
    if cfg.beta > 0:  # a reference that follows by small steps needs float32's digits
        ref_dtype = jnp.dtype("float32") if cfg.ref_sync_steps else run.compute.dtype
        ref_params = copy_weights(run, state.params, run.compute.layout, ref_dtype)
    rounds_done = 0  # of sampling; each takes the next P prompts

    for step in range(cfg.steps):
        if cfg.eval_every_steps and step % cfg.eval_every_steps == 0:
            evaluate(run, log, state.params, eval_key, step)
        clock = Clock()

        # ---- Rollout and rewards, from a copy of the weights laid out to decode ------------------
        decoder = copy_weights(run, state.params, run.rollout, run.compute.dtype)
        clock.lap("rollout_sync")
        rounds: list[Round] = []
        while not enough(run, rounds):  # a second time only with DYNAMIC_SAMPLING
            rounds.append(sample_round(run, decoder, rollout_key, rounds_done, own, clock))
            rounds_done += 1
        del decoder
        prompts, roll, rows = choose_groups(run, rounds, own)  # [b/K], [b, T], [B]

        # ---- Advantages --------------------------------------------------------------------------
        advantages = group_advantages(
            rows.rewards, K, estimator=cfg.adv_estimator, scale_rewards=cfg.scale_rewards,
            per_function=rows.per_function, weights=cfg.reward_weights,
        )  # [B]  # fmt: skip
        learns = (rows.stopped > 0) | (not cfg.mask_truncated_completions)  # [B]
        num_tokens = num_top_tokens = int((rows.completion_lengths * learns).sum())
        clock.lap("advantages")

        # ---- Update: PPO_EPOCHS times, the gradient of every micro-batch, then one step ----------
        micros = micro_batches(run, prompts, roll, advantages[own], learns[own], rows)
        clock.lap("shard")
        if cfg.top_entropy_quantile < 1:
            micros, num_top_tokens = keep_top_entropy(run, state.params, micros, own)
        totals = (num_tokens, len(rows.rewards), num_top_tokens)
        counts = Counts(*(np.float32(max(total, 1)) for total in totals))
        if ref_params is not None:
            for i, micro in enumerate(micros):
                logps, _ = score_tokens(ref_params, micro, cfg.temperature, run.compute)
                micros[i] = micro._replace(ref_logps=logps)
        lr = learning_rate(
            step, peak=cfg.learning_rate, schedule=cfg.lr_schedule, warmup_ratio=cfg.warmup_ratio,
            decay_steps=cfg.lr_decay_steps or cfg.steps,
        )  # fmt: skip
        epochs = []
        for epoch in range(cfg.ppo_epochs):
            state, metrics, logps = update(run, state, micros, counts, lr)
            epochs.append(metrics)
            if epoch == 0 and cfg.ppo_epochs > 1:  # the next compare with what was before the first
                micros = [m._replace(old_logps=x) for m, x in zip(micros, logps, strict=True)]
            updates = step * cfg.ppo_epochs + epoch + 1
            if cfg.ref_sync_steps and updates % cfg.ref_sync_steps == 0:
                ref_params = mix_weights(ref_params, state.params, cfg.ref_sync_alpha)
        means = {name: float(np.mean([e[name] for e in epochs])) for name in epochs[0]}
        clock.lap("update")
        stop_if_not_finite(step, means)

        # ---- Log ---------------------------------------------------------------------------------
        if cfg.dynamic_sampling:
            sampled = np.concatenate([r.rows.rewards for r in rounds])
            means |= sampling_metrics(len(rounds), equal_groups(run, rounds), sampled)
        teaches = bool((advantages * learns).any())
        log.line(step_line(step, means, rows, teaches, clock, cfg.print_train_time_breakdown))
        names = [function.__name__ for function in run.functions]
        records = step_records(means | {"learning_rate": lr}, rows, advantages, clock, K, names)
        log.record(step, records | {"train-other/batch_local": b})
        texts = Rollout(*(x[: 2 * K : K] for x in roll)).texts(run.tokenizer)
        log.samples(
            step, sample_records(run.tokenizer, prompts[:2], texts, rows.rewards[own][: 2 * K : K])
        )
        log.step_done()

    if cfg.eval_every_steps:
        evaluate(run, log, state.params, eval_key, cfg.steps)
    if cfg.eval_full_sweep:
        evaluate(run, log, state.params, eval_key, cfg.steps, full=True)
    log.line(f"DONE: steps={cfg.steps} elapsed_sec={time.perf_counter() - began:.3f}")
    log.close()


# ---- Sampling ------------------------------------------------------------------------------------


class Round(NamedTuple):
    """K completions of each of P prompts, with their rewards."""

    prompts: list[data.Prompt]  # [P], on every process
    roll: Rollout  # [b, T] of this process
    rows: StepRows  # [B] of all processes


def sample_round(
    run: Run, decoder: Params, rollout_key: jax.Array, number: int, own: slice, clock: Clock
) -> Round:
    """Round `number` (from 0) of the run: it alone decides the prompts and what is drawn."""
    P, K, size = run.sizes.prompts_per_step, run.cfg.num_pre_q, run.sizes.prompt_batch_size
    indices = data.batch_indices(len(run.train), P, number, run.cfg.seed)  # [P]
    prompts = [run.train[i] for i in indices]
    width = prompt_width(max(len(p.ids) for p in prompts), run.cfg.global_length)
    mine = prompts[own.start // K : own.stop // K]  # [b/K]
    row_ids = np.arange(own.start, own.stop, dtype=np.int32)  # [b]
    key = jax.random.fold_in(rollout_key, number)
    roll = complete(run, decoder, mine, row_ids, key, K, run.sampling, width, size)
    clock.lap("rollout_generate")

    scores, per_function = score(run, roll, mine, K)  # [b], [b, F]
    clock.lap("reward")
    prompt_lengths = np.repeat([len(p.ids) for p in mine], K)
    stopped = np.isin(roll.last_ids(), run.stop_ids)
    columns = [scores, prompt_lengths, roll.lengths(), stopped, *per_function.T]
    rows = StepRows.of(gather_rows(np.column_stack(columns).astype(np.float64)))
    clock.lap("advantages")
    return Round(prompts, roll, rows)


def enough(run: Run, rounds: list[Round]) -> bool:
    """True after one round or, with DYNAMIC_SAMPLING, once the rewards differ in P groups, or
    after DYNAMIC_SAMPLING_MAX_ROUNDS: the same on every process, which all see all rewards."""
    limit = run.cfg.dynamic_sampling_max_rounds if run.cfg.dynamic_sampling else 1
    if not rounds or len(rounds) == limit:
        return bool(rounds)
    return (~equal_groups(run, rounds)).sum() >= run.sizes.prompts_per_step


def equal_groups(run: Run, rounds: list[Round]) -> np.ndarray:
    """[rounds * P] bool: the group's rewards are equal; for gdpo, those of each function."""
    K, by_function = run.cfg.num_pre_q, run.cfg.adv_estimator == "gdpo"
    return np.concatenate([r.rows.equal_groups(K, by_function) for r in rounds])


def choose_groups(
    run: Run, rounds: list[Round], own: slice
) -> tuple[list[data.Prompt], Rollout, StepRows]:
    """The step's P groups: the first whose rewards differ, then others if those are fewer.

    Returns this process's prompts [b/K] and completions [b, T], and all processes' rows [B].
    """
    P, K = run.sizes.prompts_per_step, run.cfg.num_pre_q
    groups = np.sort(np.argsort(equal_groups(run, rounds), kind="stable")[:P])
    chosen = (groups[:, None] * K + np.arange(K)).reshape(-1)  # [B] of rounds * B
    columns = zip(*(r.rows for r in rounds), strict=True)
    rows = StepRows(*(np.concatenate(column)[chosen] for column in columns))
    prompts = [p for r in rounds for p in r.prompts]
    mine = [prompts[group] for group in groups[own.start // K : own.stop // K]]
    if len(rounds) == 1:
        return mine, rounds[0].roll, rows
    everyone = []  # of all processes: a group may be learnt from elsewhere than it was sampled
    for arrays in zip(*(r.roll for r in rounds), strict=True):
        everyone.append(np.concatenate([gather_rows(x) for x in arrays]))  # [rounds * B, T]
    return mine, Rollout(*(x[chosen[own]] for x in everyone)), rows


def copy_weights(run: Run, params: Params, layout: Layout, dtype: jnp.dtype) -> Params:
    """The parameters in dtype, laid out for decoding or for training."""
    return sync_weights(params, config=run.compute.config, mesh=layout.mesh, dtype=dtype)


def complete(
    run: Run, params: Params, prompts: list[data.Prompt], rows: np.ndarray, key: jax.Array,
    num_pre_q: int, sampling: Sampling, width: int, size: int,
) -> Rollout:  # fmt: skip
    """num_pre_q completions of each prompt, in passes of `size` prompts."""
    passes = []
    for start in range(0, len(prompts), size):
        ids, mask = pad_prompts(
            [p.ids for p in prompts[start : start + size]], width, run.stop_ids[0]
        )
        one = generate(
            params, run.compute.config, ids, mask,
            rows[start * num_pre_q : (start + size) * num_pre_q], key,
            num_pre_q=num_pre_q, max_new_tokens=run.cfg.max_length_sample, stop_ids=run.stop_ids,
            pad_id=run.stop_ids[0], sampling=sampling, dtype=run.compute.dtype, layout=run.rollout,
            attention_impl=run.compute.attention_impl,
        )  # fmt: skip
        passes.append(one)
    return Rollout(*(np.concatenate(parts) for parts in zip(*passes, strict=True)))


def score(
    run: Run, roll: Rollout, prompts: list[data.Prompt], num_pre_q: int
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted rewards [b] and those of each function [b, F], NaN where none applies."""
    names = prompts[0].columns
    columns = {n: [p.columns.get(n) for p in prompts for _ in range(num_pre_q)] for n in names}
    columns["completion_ids"] = roll.ids()
    try:
        return rewards.score(
            roll.texts(run.tokenizer), columns, run.functions, run.cfg.reward_weights
        )
    except ValueError as error:  # a reward function of the user's failed; the message names it
        settings.fail(error)


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


def update(
    run: Run, state: TrainState, micros: list[MicroBatch], counts: Counts, lr: float
) -> tuple[TrainState, dict[str, float], list[jax.Array]]:
    """One optimizer step on the sum of the micro-batches' gradients: the state, the step's metrics,
    and the logps of each micro-batch before it. The gradient lives in here only."""
    grads, parts, before = zero_grads(state.params), [], []
    for micro in micros:
        grads, metrics, logps = micro_step(
            state.params, grads, micro, counts,
            objective=run.objective, temperature=run.cfg.temperature, compute=run.compute,
        )  # fmt: skip
        parts.append(metrics)
        before.append(logps)
    state, norm = optimizer_step(
        state, grads, np.float32(lr), optimizer=run.optimizer, config=run.compute.config
    )
    return state, merge_metrics(parts) | {"grad_norm": float(norm)}, before


# ---- Evaluation ----------------------------------------------------------------------------------


def evaluate(
    run: Run, log: RunLog, params: Params, key: jax.Array, step: int, full: bool = False
) -> None:
    """Logs the accuracy on the first EVAL_PROMPTS questions of the eval split, or on all of it.

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
        roll = complete(run, decoder, own, rows, key, k, sampling, width, size)
        clock.lap("rollout_generate")
        scores, per_function = score(run, roll, own, k)
        answers = [p.columns["answer"] for p in own for _ in range(k)]
        correct = rewards.reward_correct(roll.texts(run.tokenizer), answers)
        results.append(gather_rows(np.column_stack([scores, correct, per_function]).astype(float)))
        clock.lap("reward")
    table = np.concatenate(results)[: len(prompts) * k]  # [questions * k, 2 + F]
    names = [function.__name__ for function in run.functions]
    line, records = evaluation(step, cfg.eval_split, table, k, names, clock, full)
    log.line(line)
    log.record(step, records)


if __name__ == "__main__":
    with ending_together():
        main(CFG)
