"""Supervised fine-tuning, such as a cold start for GRPO, on the same machines as train_grpo.py:

    MODEL_PATH=... DATASET=my.jsonl OUTPUT_DIR=runs/sft python train_sft.py
    MODEL_PATH=runs/sft/hf OUTPUT_DIR=runs/grpo python train_grpo.py

A step makes the completions of P demonstrations more likely, in one update. The loss is the mean
negative log-likelihood over all tokens of the update that are trained on: those of the assistant's
turns, with the tokens that end them, without TEMPERATURE and without filters. demonstrations.py
says which tokens these are. Rows, updates, checkpoints and exports are those of train_grpo.py, for
which a demonstration is a prompt with a single completion (K = 1) of advantage 1.

BATCH_SIZE counts the demonstrations of a step on each process, ROLLOUT_GLOBAL_BATCH_SIZE those over
all processes. An evaluation prints the loss on the eval split, and with a REWARD_FN the accuracy.

Dimensions: P = B demonstrations of a step, T completion tokens, padded to MAX_LENGTH_SAMPLE.
"""
# ruff: noqa: E402 - settings are read and checked before jax is imported

import dataclasses
import os
import signal
import sys
from typing import Any

from config import Config, load
from infra.settings import to_text


def customize_settings(settings: dict[str, Any], layers: dict[str, str]) -> list[str]:
    """Gives this script defaults of its own, and removes settings of the sampler and of the
    objective, which it does not read, with a line for each. config.read_layers calls it."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    unread = {"ppo_epochs", "num_mini_batches", "sample_every_steps", "teacher_path"}
    unread.add("print_train_time_breakdown")
    if not settings.get("reward_fn"):  # nothing is sampled in evaluations either
        unread |= {"eval_samples", "eval_temperature", "reward_weights"}
    for name, field in fields.items():
        # The others in these groups are sizes and meshes, which a resumed run may change.
        if field.metadata["group"] in ("rollout", "loss") and field.metadata["fixed_on_resume"]:
            unread.add(name)
    unread.remove("max_length_sample")
    fixed = {"loss_type": "sft", "num_pre_q": 1}
    lines = []
    for name in sorted(unread & {*settings}):
        if (value := settings.pop(name)) not in (fields[name].default, fixed.get(name)):
            lines.append(f"{name.upper()}={to_text(value)} does nothing in train_sft.py")
    adapters = f"{settings['model_path']}/adapter_config.json"
    is_lora = settings.get("lora_rank") or os.path.isfile(adapters)
    defaults = fixed | {"learning_rate": 2e-4 if is_lora else 2e-5}
    if not settings.get("completion_column"):
        defaults["question_column"] = "messages"
    layers |= dict.fromkeys({*defaults} - {*settings}, "train_sft.py")
    settings |= defaults | settings
    return lines


if __name__ == "__main__":
    # Python's handler of Ctrl-C would print a traceback of the imports, or be lost in one of them.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # This ends the program for --print-config and for mistakes.
    CFG, FLAGS, LINES = load(sys.argv[1:], customize=customize_settings)

import contextlib
import math

import jax
import numpy as np

from chat import token_text
from data import Prompt, batch_indices
from evaluation import evaluate
from infra.chips import exit_on_oom
from infra.hosts import exiting_on_error
from infra.log import Clock, RunLog
from infra.mistakes import UserMistake, import_optional
from metrics import escape_control_characters, memory_peaks, nonfinite_metric, shorten
from model.params import Params, combine_params
from optimizer import learning_rate
from rows import Batch
from run import Run
from startup import export, start
from update import compute_batch_logps_and_entropies, train_on_mini_batch


def main(cfg: Config) -> None:
    """Trains the model for STEPS steps, evaluates it on the way, and exports it."""
    run, lifecycle, backend, state, _ = start(cfg)
    log, learner, P = lifecycle.log, run.learner, run.sizes.prompts_per_step
    _, eval_key = jax.random.split(jax.random.key(cfg.seed))

    def params() -> Params:
        # With LoRA the training state holds only the adapters.
        return combine_params(learner.base, state.params)

    def evaluate_now(full: bool = False) -> float:
        """The score by which the best checkpoint is chosen: the accuracy, or without a REWARD_FN
        exp(-loss), the geometric mean of the probabilities of the tokens trained on."""
        loss = evaluate_loss(run, log, params(), lifecycle.progress.step, full)
        if not run.rollout.functions:
            return math.exp(-loss)
        return evaluate(run, log, backend, eval_key, params(), lifecycle.progress.step, full)

    def save() -> None:
        lifecycle.save({"state": state})

    def export_now(is_done: bool) -> None:
        export(run, lifecycle.out, params(), is_done)

    # After SIGTERM, Ctrl-C or MAX_HOURS `ending` saves a checkpoint and ends the program.
    with contextlib.closing(backend), lifecycle.ending(save, evaluate_now, export_now):
        for step in range(lifecycle.progress.step, cfg.steps + 1):
            # Step 0 is the baseline; a resumed run first evaluates or saves what was still due.
            if lifecycle.evaluation_is_due():
                lifecycle.finish_evaluation(evaluate_now())
            if lifecycle.save_is_due():
                save()
            if step == cfg.steps:
                break
            clock = Clock(["update"])

            # ---- Batch: P demonstrations, the same on every process -----------------------------
            indices = batch_indices(len(run.train_prompts), P, step, cfg.seed)  # [P]
            batch = batch_of([run.train_prompts[i] for i in indices], cfg.max_length_sample)
            if step == 0:  # for people to check
                ids = batch.completion_ids[0][batch.completion_mask[0] > 0]
                text = token_text(ids, run.rollout.chat_format.tokenizer)
                text = escape_control_characters(shorten(text))
                log.print_line(f"first demonstration, {batch.prompts[0].source}: {text}")

            # ---- Update --------------------------------------------------------------------------
            lr = learning_rate(step, run.schedule)
            run.rollout.stop_signal.raise_if_stopped()  # the last point before the weights change
            state, metrics = train_on_mini_batch(learner, state, batch, lr)
            clock.lap("update")

            # ---- Log -----------------------------------------------------------------------------
            log_sft_step(run, log, step, batch, metrics | {"learning_rate": lr}, clock)
            lifecycle.finish_step(1, nonfinite_metric(metrics))

        if cfg.eval_full_sweep:  # the last checkpoint is saved before this long evaluation
            evaluate_now(full=True)
    with lifecycle.ending(save, evaluate_now, export_now):
        lifecycle.finish(export_now)


def batch_of(demonstrations: list[Prompt], T: int) -> Batch:
    """The demonstrations as a Batch: sequences of reward and advantage 1, whose masks have holes
    between the turns of a conversation."""
    B = len(demonstrations)
    ids, mask = np.zeros((2, B, T), np.int32)
    lengths = np.array([len(x.completion_ids) for x in demonstrations], np.int32)  # [B]
    for i, x in enumerate(demonstrations):
        ids[i, : lengths[i]], mask[i, : lengths[i]] = x.completion_ids, x.completion_mask
    logps = np.zeros((B, T), np.float32)  # placeholder: there is no sampler
    ones = np.ones(B)
    return Batch(
        prompts=demonstrations,
        completion_ids=ids,
        completion_mask=mask,
        lengths=lengths,
        sampling_logps=logps,
        sampled_mask=mask,
        stopped=ones > 0,
        rewards=ones,
        function_rewards=ones[:, None],
        advantages=ones,
    )


def evaluate_loss(run: Run, log: RunLog, params: Params, step: int, full: bool) -> float:
    """The mean negative log-likelihood of the tokens to train on, in the first EVAL_PROMPTS
    demonstrations of the eval split or, if `full`, in all. Also prints and records it."""
    clock, limit, P = Clock([]), run.cfg.eval_prompts, run.sizes.prompts_per_step
    demonstrations = run.eval_prompts if full or not limit else run.eval_prompts[:limit]
    total, tokens = 0.0, 0
    for i in range(0, len(demonstrations), P):
        run.rollout.stop_signal.raise_if_stopped()
        batch = batch_of(demonstrations[i : i + P], run.cfg.max_length_sample)
        logps, _ = compute_batch_logps_and_entropies(run.learner, params, batch)  # [B, T]
        mask = batch.completion_mask > 0
        total, tokens = total - logps[mask].sum(dtype=np.float64), tokens + int(mask.sum())
    loss, seconds, name = float(total / tokens), clock.total(), "eval_full" if full else "eval"
    log.print_line(
        f"{name} step={step} split={run.cfg.eval_split} demonstrations={len(demonstrations)} "
        f"tokens={tokens} loss={loss:.6f} t={seconds:.2f}s"
    )
    log.record_metrics(step, {f"{name}/loss": loss, f"time/{name}/loss_s": seconds})
    return loss


def log_sft_step(
    run: Run, log: RunLog, step: int, batch: Batch, metrics: dict[str, float], clock: Clock
) -> None:
    """Prints the lines of a step and writes its record. metrics: of train_on_mini_batch and the
    learning rate."""
    seconds, tokens = clock.total(), int(batch.completion_mask.sum())
    log.print_line(
        f"step={step} loss={metrics['loss']:z.6f} tokens={tokens} dt={seconds:.2f}s"
        f"{log.time_left(step, clock)}"
    )
    if wrong := nonfinite_metric(metrics):
        log.print_line(f"note step={step}: the update of this step was not applied: {wrong}")
    names = ("loss", "grad_norm", "param_norm", "learning_rate", "update_token_count")
    record = {f"train-other/{name}": metrics[name] for name in names}
    for name, lengths in (("prompt", batch.prompt_lengths()), ("completion", batch.lengths)):
        record[f"train-seq_len/{name}/mean"] = lengths.mean()
        record[f"train-seq_len/{name}/max"] = lengths.max()
    padding = "throughput/update/computed_per_token"
    record |= {padding: metrics[padding], "throughput/train/valid_tokens_per_s": tokens / seconds}
    record |= {"time/train/update_s": clock.seconds["update"], "time/train/step_s": seconds}
    record |= {"compile/programs": len(clock.compiled()), "compile/s": sum(clock.compiled())}
    record |= {f"memory/{name}": value for name, value in memory_peaks().items()}
    log.record_metrics(step, record)


if __name__ == "__main__":
    with exiting_on_error(), exit_on_oom(CFG):
        if FLAGS.plan:
            import_optional("tools.plan", "--plan").plan_and_exit(CFG, FLAGS)
        if FLAGS.eval_only or FLAGS.ask or FLAGS.probe:
            remedy = "run it without OUTPUT_DIR, and with the export as MODEL_PATH"
            raise UserMistake(f"--ask, --eval-only and --probe belong to train_grpo.py; {remedy}")
        print(*LINES, sep="\n", flush=True)
        main(CFG)
