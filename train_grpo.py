"""GRPO on one CPU, one GPU, one TPU host or a TPU pod slice: `STEPS=1 python train_grpo.py`.

One step: sample K completions of each of P prompts, score them, ask of each how much better it is
than its group, and move the policy towards those that are. Read `main` from top to bottom; the
formulas are in loss_pallas.py, the programs that run on devices in rollout.py and update.py.

Where this departs from the GRPO paper (arXiv 2402.03300), as most of the field now does:
 1. The loss is the mean over all completion tokens of the step, not over each sequence first.
 2. No KL penalty unless BETA > 0; it then is the k3 estimate, added to the loss.
 3. Advantages divide by std + 1e-4 (ddof = 1), and are exactly 0 when a group's rewards are equal.
"""
# ruff: noqa: E402 - settings are read and checked before jax is imported

import sys

import config as settings

if __name__ == "__main__":
    CFG = settings.load(sys.argv[1:])  # also prints them and exits, with --print-config

import dataclasses
import math
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import data
import hf
import rewards
from loss_pallas import group_advantages
from metrics import (
    Clock,
    RunLog,
    StepRows,
    evaluation,
    sample_records,
    step_line,
    step_records,
    stop_if_not_finite,
)
from model import (
    ROLLOUT_ROWS,
    TRAIN_ROWS,
    Layout,
    Params,
    gather_rows,
    make_mesh,
    mesh_text,
    put_rows,
)
from rollout import Rollout, Sampling, bucket, generate, pad_prompts, prompt_width, share
from update import (
    Batch,
    Compute,
    Objective,
    Optimizer,
    TrainState,
    init_state,
    learning_rate,
    micro_step,
    optimizer_step,
    ref_logps,
    rollout_tp,
    sync_weights,
    zero_total,
)


class Run(NamedTuple):
    """What is settled before the first step and does not change."""

    cfg: settings.Config
    sizes: settings.Batch
    tokenizer: Any
    stop_ids: tuple[int, ...]
    train: list[data.Prompt]
    test: list[data.Prompt]
    functions: list[rewards.RewardFunction]
    sampling: Sampling
    objective: Objective
    optimizer: Optimizer
    compute: Compute  # of training
    rollout: Layout


def main(cfg: settings.Config) -> None:
    began = time.perf_counter()
    try:
        start_jax(cfg)
        run, state = set_up(cfg)
        log = open_log(run)
    except ValueError as error:
        settings.fail(error)
    K, rank = cfg.num_pre_q, jax.process_index()
    rollout_key, eval_key = jax.random.split(jax.random.key(cfg.seed))
    ref_params = copy_weights(run, state.params, run.compute.layout) if cfg.beta > 0 else None

    for step in range(cfg.steps):
        if cfg.eval_every_steps and step % cfg.eval_every_steps == 0:
            evaluate(run, log, state.params, eval_key, step)
        clock = Clock()

        # ---- Prompts: every process knows the whole step's, and takes its share ------------------
        P, B = run.sizes.prompts_per_step, run.sizes.local_batch
        indices = data.batch_indices(len(run.train), P, step, cfg.seed)  # [P]
        width = prompt_width([run.train[i].ids for i in indices], cfg.global_length)
        rows = np.arange(rank * B, (rank + 1) * B, dtype=np.int32)  # of the step's P*K
        prompts = [run.train[i] for i in indices[rows[::K] // K]]

        # ---- Rollout: K completions per prompt, from a copy of the weights laid out to decode ----
        decoder = copy_weights(run, state.params, run.rollout)
        clock.lap("rollout_sync")
        key = jax.random.fold_in(rollout_key, step)
        size = run.sizes.prompt_batch_size  # prompts of one pass
        roll = complete(run, decoder, prompts, rows, key, K, run.sampling, width, size)  # [B, T]
        del decoder
        clock.lap("rollout_generate")

        # ---- Rewards -----------------------------------------------------------------------------
        texts = roll.texts(run.tokenizer)
        scores, per_function = score(run, texts, prompts, K)  # [B], [B, F]
        clock.lap("reward")

        # ---- Advantages: from here on every process sees all sequences' rewards and lengths ------
        prompt_lengths = np.repeat([len(p.ids) for p in prompts], K)
        stopped = np.isin(roll.last_ids(), run.stop_ids)
        own = [scores, prompt_lengths, roll.lengths(), stopped, *per_function.T]
        everyone = StepRows.of(gather_rows(np.column_stack(own).astype(np.float64)))  # [P*K] each
        advantages = group_advantages(everyone.rewards, K, scale_rewards=cfg.scale_rewards)
        clock.lap("advantages")

        # ---- Update: PPO_EPOCHS times, the gradient of every micro-batch, then one step ----------
        num_tokens = np.float32(everyone.completion_lengths.sum())
        longest = int(everyone.completion_lengths.max())
        micros = micro_batches(run, prompts, roll, advantages[rows], width, longest)
        if ref_params is not None:
            for i, micro in enumerate(micros):
                logps, _ = ref_logps(ref_params, micro, cfg.temperature, run.compute)
                micros[i] = micro._replace(ref_logps=logps)
        clock.lap("shard")
        lr = learning_rate(
            step, peak=cfg.learning_rate, schedule=cfg.lr_schedule, warmup_ratio=cfg.warmup_ratio,
            decay_steps=cfg.lr_decay_steps or cfg.steps,
        )  # fmt: skip
        epochs = []
        for epoch in range(cfg.ppo_epochs):
            state, sums, logps = update(run, state, micros, num_tokens, lr)
            epochs.append(jax.device_get(sums))
            if epoch == 0 and cfg.ppo_epochs > 1:  # the next compare with what was before the first
                micros = [m._replace(old_logps=x) for m, x in zip(micros, logps, strict=True)]
        means = {name: float(np.mean([e[name] for e in epochs])) for name in epochs[0]}
        clock.lap("update")
        stop_if_not_finite(step, means)

        # ---- Log ---------------------------------------------------------------------------------
        log.line(step_line(step, means, everyone, clock, K, cfg.print_train_time_breakdown))
        names = [function.__name__ for function in run.functions]
        records = step_records(means | {"learning_rate": lr}, everyone, advantages, clock, K, names)
        log.record(step, records | {"train-other/batch_local": B})
        log.samples(step, sample_records(run.tokenizer, prompts, texts, scores, K))
        log.step_done()

    if cfg.eval_every_steps:
        evaluate(run, log, state.params, eval_key, cfg.steps)
    if cfg.eval_full_sweep:
        evaluate(run, log, state.params, eval_key, cfg.steps, full=True)
    log.line(f"DONE: steps={cfg.steps} elapsed_sec={time.perf_counter() - began:.3f}")
    log.close()


# ---- Set-up --------------------------------------------------------------------------------------


def start_jax(cfg: settings.Config) -> None:
    """Joins the other processes, if there are any, before anything touches a device."""
    cache = cfg.jax_compilation_cache_dir or ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", os.path.abspath(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    on_tpu_vm = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        counts = [os.environ.get(name, "") for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")]
        if not all(count.isdecimal() for count in counts):
            raise ValueError(
                f"JAX_COORDINATOR_ADDRESS={address} needs JAX_NUM_PROCESSES (a number, the same "
                f"everywhere) and JAX_PROCESS_ID (from 0, each process its own)"
            )
        jax.distributed.initialize(address, *map(int, counts))
    elif on_tpu_vm and os.environ.get("JAX_PLATFORMS", "tpu").startswith("tpu"):
        jax.distributed.initialize()  # the hosts of a TPU slice find each other
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for a platform not installed
        wanted, reason = os.environ.get("JAX_PLATFORMS", ""), " ".join(str(error).split())
        raise ValueError(f"JAX_PLATFORMS={wanted}: no such device here. {reason}") from None
    print(
        f"backend={jax.default_backend()} process={jax.process_index()}/{jax.process_count()} "
        f"device_count={jax.device_count()} local_device_count={jax.local_device_count()}",
        flush=True,
    )


def set_up(cfg: settings.Config) -> tuple[Run, TrainState]:
    """Everything a step needs, cheapest checks first. Raises ValueError for a user's mistake."""
    sizes = settings.derive(cfg, jax.process_count(), jax.local_device_count())
    print(
        f"local_batch={sizes.local_batch} global_batch={sizes.global_batch} "
        f"rollout.prompt_batch_size={sizes.prompt_batch_size} "
        f"rollout.passes_per_step={sizes.passes_per_step} "
        f"train.micro_batch_size={sizes.micro_batch_size} "
        f"train.grad_accum_steps={sizes.grad_accum_steps}",
        flush=True,
    )
    functions = rewards.load_reward_functions(cfg.reward_fn, cfg.reward_timeout_s)
    if len(cfg.reward_weights) != len(functions):
        names = ", ".join(f.__name__ for f in functions)
        weights = ",".join(map(str, cfg.reward_weights))
        raise ValueError(
            f"REWARD_WEIGHTS={weights} has {len(cfg.reward_weights)} numbers; "
            f"give {len(functions)}, one each for {names}"
        )

    folder = hf.fetch_model(cfg.model_path, cfg.model_revision)
    config = hf.read_config(folder)
    tokenizer = hf.load_tokenizer(folder)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"MODEL_PATH={folder}: its tokenizer has {len(tokenizer)} tokens, its config.json "
            f"vocab_size={config.vocab_size}; they are of two models"
        )
    train, test = (
        load_prompts(cfg, tokenizer, split) for split in (cfg.train_split, cfg.eval_split)
    )
    longest = max(len(p.ids) for p in train + test) + cfg.max_length_sample
    if longest > config.max_positions:
        raise ValueError(
            f"MAX_LENGTH_SAMPLE={cfg.max_length_sample} after the longest prompt makes {longest} "
            f"tokens, and the model has {config.max_positions} positions; lower it or "
            f"set MAX_PROMPT_LENGTH={config.max_positions - cfg.max_length_sample}"
        )

    dtype = cfg.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    dtype = jnp.dtype(dtype)
    mesh = make_mesh("MESH_SHAPE", cfg.mesh_shape, tp=1, fsdp=-1)
    tp = rollout_tp(config, dtype)
    rollout_mesh = make_mesh("ROLLOUT_MESH_SHAPE", cfg.rollout_mesh_shape, tp=tp, fsdp=1)
    run = Run(
        cfg=cfg,
        sizes=sizes,
        tokenizer=tokenizer,
        stop_ids=hf.stop_ids(folder, tokenizer),
        train=train,
        test=test,
        functions=functions,
        sampling=Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p),
        objective=Objective(
            cfg.temperature, cfg.eps_low, cfg.eps_high, cfg.beta, cfg.policy_loss_impl
        ),
        optimizer=Optimizer(cfg.optimizer, cfg.weight_decay, cfg.clip_norm),
        compute=Compute(config, dtype, Layout(mesh, TRAIN_ROWS), cfg.remat),
        rollout=Layout(rollout_mesh, ROLLOUT_ROWS),
    )
    params = hf.load_params(folder, config, mesh, jnp.dtype(cfg.param_dtype))
    size = sum(x.size for x in jax.tree.leaves(params))
    print(
        f"model={folder} parameters={size / 1e6:.2f}M dtype={dtype} train={len(train)} "
        f"test={len(test)} prompts rewards={','.join(f.__name__ for f in functions)}\n"
        f"mesh dp,fsdp,tp train={mesh_text(mesh)} ({cfg.mesh_shape}) "
        f"rollout={mesh_text(rollout_mesh)} ({cfg.rollout_mesh_shape})\n"
        f"rollout.backend={cfg.rollout_backend} loss.loss_type={cfg.loss_type}",
        flush=True,
    )
    return run, init_state(params, optimizer=run.optimizer, config=config)


def load_prompts(cfg: settings.Config, tokenizer: Any, split: str) -> list[data.Prompt]:
    rows = data.load_rows(cfg.dataset, cfg.dataset_config, split)
    system_prompt = data.text_of(cfg.system_prompt) or rewards.SYSTEM_PROMPT
    prompts = data.build_prompts(rows, tokenizer, system_prompt)
    return data.fit_prompts(prompts, cfg.max_prompt_length, cfg.prompt_too_long, split)


def open_log(run: Run) -> RunLog:
    cfg, now = run.cfg, datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
    out = Path(cfg.output_dir or f"runs/{cfg.wandb_name or Path(cfg.model_path).name}_{now}")
    writes = jax.process_index() == 0
    wandb = None
    if cfg.wandb_mode != "disabled":
        wandb = {"mode": cfg.wandb_mode, "config": dataclasses.asdict(cfg)}
        wandb |= {"project": cfg.wandb_project or "grpo", "name": cfg.wandb_name or None}
    try:
        log = RunLog(out, steps=cfg.steps, writes=writes, wandb=wandb)
    except OSError as error:
        raise ValueError(f"OUTPUT_DIR={out} cannot be written: {error.strerror}") from None
    if writes:
        text = settings.describe(cfg, jax.process_count(), jax.local_device_count())
        (out / "config.yaml").write_text(text + "\n", encoding="utf-8")
        log.line(f"output={out}")
    return log


# ---- One step's parts ----------------------------------------------------------------------------


def copy_weights(run: Run, params: Params, layout: Layout) -> Params:
    """The parameters in the compute dtype, laid out for decoding or for training."""
    config, dtype = run.compute.config, run.compute.dtype
    return sync_weights(params, config=config, mesh=layout.mesh, dtype=dtype)


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
        )  # fmt: skip
        passes.append(one)
    return Rollout(*(np.concatenate(parts) for parts in zip(*passes, strict=True)))


def score(
    run: Run, texts: list[str], prompts: list[data.Prompt], num_pre_q: int
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted rewards [B] and those of each function [B, F], NaN where none applies."""
    names = prompts[0].columns
    columns = {n: [p.columns.get(n) for p in prompts for _ in range(num_pre_q)] for n in names}
    try:
        return rewards.score(texts, columns, run.functions, run.cfg.reward_weights)
    except ValueError as error:  # a reward function of the user's failed; the message names it
        settings.fail(error)


def micro_batches(
    run: Run, prompts: list[data.Prompt], roll: Rollout, advantages: np.ndarray, width: int,
    longest: int,
) -> list[Batch]:  # fmt: skip
    """This process's part of each micro-batch, on the devices; T holds the longest completion."""
    R, K, layout = run.sizes.micro_batch_size, run.cfg.num_pre_q, run.compute.layout
    T = min(bucket(longest), run.cfg.max_length_sample)
    s = share(K, R * jax.process_count() // layout.row_shards)
    prompt_rows = [p.ids for p in prompts for _ in range(K // s)]  # one for s sequences
    prompt_ids, prompt_mask = pad_prompts(prompt_rows, width, run.stop_ids[0])  # [B/s, S+1]
    sequences = [x[:, :T] for x in roll] + [advantages.astype(np.float32)]  # [B, T], [B]

    def micro(i: int) -> Batch:
        shared = slice(i * R // s, (i + 1) * R // s)
        own = [put_rows(x[i * R : (i + 1) * R], layout) for x in sequences]
        return Batch(
            put_rows(prompt_ids[shared], layout), put_rows(prompt_mask[shared], layout), *own
        )

    return [micro(i) for i in range(run.sizes.grad_accum_steps)]


def update(
    run: Run, state: TrainState, micros: list[Batch], num_tokens: np.float32, lr: float
) -> tuple[TrainState, dict[str, jax.Array], list[jax.Array]]:
    """One optimizer step on the sum of the micro-batches' gradients: the state, the step's metrics,
    and the logps of each micro-batch before it. The gradient lives in here only."""
    total, before = zero_total(state.params, run.objective), []
    for micro in micros:
        total, logps = micro_step(
            state.params, total, micro, num_tokens, objective=run.objective, compute=run.compute
        )
        before.append(logps)
    grads, sums = total
    state, norm = optimizer_step(
        state, grads, np.float32(lr), optimizer=run.optimizer, config=run.compute.config
    )
    return state, sums | {"grad_norm": norm}, before


# ---- Evaluation ----------------------------------------------------------------------------------


def evaluate(
    run: Run, log: RunLog, params: Params, key: jax.Array, step: int, full: bool = False
) -> None:
    """Logs the accuracy on the first EVAL_PROMPTS questions of the eval split, or on all of it.

    Greedy with EVAL_SAMPLES=1; else so many samples a question, at the run's temperature.
    """
    clock, cfg, k = Clock(), run.cfg, run.cfg.eval_samples
    prompts = run.test if full or not cfg.eval_prompts else run.test[: cfg.eval_prompts]
    devices, processes = jax.local_device_count(), jax.process_count()
    size = devices * max(1, run.sizes.prompt_batch_size * cfg.num_pre_q // (k * devices))
    passes = math.ceil(len(prompts) / (size * processes))
    padded = [*prompts, *[prompts[-1]] * (passes * size * processes - len(prompts))]
    width = prompt_width([p.ids for p in prompts], cfg.global_length)
    sampling = run.sampling if k > 1 else Sampling(temperature=0.0)
    decoder = copy_weights(run, params, run.rollout)
    results = []
    for i in range(passes):
        first = (i * processes + jax.process_index()) * size  # this process's first question
        own = padded[first : first + size]
        rows = np.arange(first * k, (first + size) * k, dtype=np.int32)
        roll = complete(run, decoder, own, rows, key, k, sampling, width, size)
        clock.lap("rollout_generate")
        texts = roll.texts(run.tokenizer)
        scores, per_function = score(run, texts, own, k)
        correct = rewards.reward_correct(
            texts, [p.columns["answer"] for p in own for _ in range(k)]
        )
        results.append(gather_rows(np.column_stack([scores, correct, per_function]).astype(float)))
        clock.lap("reward")
    table = np.concatenate(results)[: len(prompts) * k]  # [questions * k, 2 + F]
    names = [function.__name__ for function in run.functions]
    line, records = evaluation(step, cfg.eval_split, table, k, names, clock, full)
    log.line(line)
    log.record(step, records)


if __name__ == "__main__":
    main(CFG)
