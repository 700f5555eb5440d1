"""--ask and --eval-only of train_grpo.py: a model answers one question, or the complete eval split.

The weights are those of the newest checkpoint in OUTPUT_DIR. RESUME may name another checkpoint.
Without OUTPUT_DIR or with RESUME=never they are those of MODEL_PATH.
"""

import argparse
import contextlib
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from config import Config, contradictions
from data import as_messages, read_question
from evaluation import EVAL_PHASES, answer_questions, evaluate
from fingerprint import result_fingerprint
from infra import hosts, resume
from infra.checkpoint import Checkpoints, Progress, raise_if_arrays_differ
from infra.log import DONE, Clock
from infra.mistakes import Unwritable, UserMistake, exit_with_mistakes
from infra.sizes import MICRO_SIZES, PASS_SIZES, STEP_SIZES
from metrics import dialogues_of
from model.params import Params, abstract_params, combine_params, trainable_params
from rewards import RewardFunction, Rewards
from run import Run
from startup import first_params, make_backend, open_log, open_reviewer, read_base, set_up

# Settings of both commands: they train nothing and export nothing.
NO_STEPS = {"steps": 0, "export_hf": "none", "push_to_hub": "", "eval_full_sweep": True}
NO_STEPS |= {"report_to": "", "wandb_mode": "disabled"}
# What adapters were trained with.
MADE_WITH = ("LORA_ALPHA", "LORA_BASE_DTYPE", "the model's weights")
# Settings of --ask: the question is answered greedily, in the smallest batch.
ONE_QUESTION = dict.fromkeys((*PASS_SIZES, *STEP_SIZES, *MICRO_SIZES, "grad_accum_steps"), 0)
ONE_QUESTION |= {"rollout_per_device_batch_size": 1, "num_pre_q": 1, "num_mini_batches": 1}
ONE_QUESTION |= {"eval_samples": 1, "eval_temperature": 0.0}


class Weights(NamedTuple):
    """The part of a TrainState that is restored: without the optimizer's state."""

    params: Params


def find_weights(cfg: Config, required: bool = True) -> Config:
    """The settings with a RESUME that names the checkpoints of the run in OUTPUT_DIR, if it is set.
    Raises UserMistake if there is no complete one and it is required."""
    if cfg.resume != "auto" or not (cfg.output_dir or cfg.checkpoint_dir):
        return cfg
    checkpoints = cfg.checkpoint_dir or f"{cfg.output_dir}/checkpoints"
    if Checkpoints(checkpoints, read_only=True).steps():
        return replace(cfg, resume=checkpoints)
    if not required:
        return cfg
    name = f"OUTPUT_DIR={cfg.output_dir}" if cfg.output_dir else f"CHECKPOINT_DIR={checkpoints}"
    raise UserMistake(
        f"{name} has no weights: no complete checkpoint in {checkpoints}; name the folder of a "
        f"run, or set RESUME=never to ask MODEL_PATH, which may be an export"
    )


def load_weights(run: Run) -> tuple[Params, int]:
    """All weights, in float32 without LoRA, and the number of steps that have trained them: 0 if
    they come from a model's folder. Raises UserMistake."""
    cfg, compute = run.cfg, run.learner.compute
    source, step = resume.find_checkpoints(cfg.resume)
    shapes = abstract_params(compute.model, compute.layout.mesh, jnp.float32)
    wanted = {"state": Weights(trainable_params(shapes))}

    def raise_if_unsuitable(record: dict[str, Any]) -> None:
        fingerprint = result_fingerprint(run)
        for name in MADE_WITH if compute.model.lora else ():
            before, now = (x.get(name, "auto") for x in (record["made_with"], fingerprint))
            if before != now:  # the adapters were trained with it
                raise UserMistake(f"{source.folder}: {name} was {before} and is {now}; set it back")
        raise_if_arrays_differ(wanted, record, part=True)

    if source and (restored := source.restore(wanted, raise_if_unsuitable, step)):
        arrays, record = restored
        print(f"weights={source.folder}/{record['step']}", flush=True)
        params = combine_params(read_base(run.folder, compute), arrays["state"].params)
        return params, record["step"]
    if source:
        raise UserMistake(f"RESUME={cfg.resume} is not the folder of a complete checkpoint")
    print(f"weights={run.adapters or run.folder}", flush=True)
    return combine_params(read_base(run.folder, compute), first_params(run, jnp.float32)), 0


def evaluate_weights(cfg: Config) -> None:
    """Evaluates the weights on the complete eval split, as EVAL_FULL_SWEEP does. Its outputs go to
    a new folder in OUTPUT_DIR, or in runs/. Raises UserMistake and Unwritable."""
    run = set_up(cfg)
    with contextlib.closing(make_backend(run)) as backend:
        params, step = load_weights(run)
        out = resume.output_folder("", f"{cfg.output_dir or 'runs'}/eval")
        _, key = jax.random.split(jax.random.key(cfg.seed))
        with contextlib.closing(open_log(run, out, Progress(step=step))) as log:
            evaluate(run, log, backend, key, params, step, full=True)
            open_reviewer(out, log)(DONE, "")


def ask(cfg: Config, example: dict[str, Any]) -> tuple[str, list[str]]:
    """The greedy completion of a question and, if the example has an answer, a line with the reward
    of each function, or why it has none: it may need another column. Raises UserMistake."""
    run = set_up(replace(cfg, **ONE_QUESTION), example)
    mistakes: dict[str, str] = {}
    functions = [noting_mistake(function, mistakes) for function in run.rollout.functions]
    if "answer" not in example:
        functions = [x for x in functions if x.name == "reward_model" and not x.reads_answer]
    weights = (1.0,) * len(functions)  # the total is not shown
    run = replace(run, rollout=replace(run.rollout, functions=functions, reward_weights=weights))
    with contextlib.closing(make_backend(run)) as backend:
        params, step = load_weights(run)
        backend.update_weights(params)
        key, clock = jax.random.key(cfg.seed), Clock(EVAL_PHASES)
        answered = answer_questions(run, backend, run.eval_prompts, key, clock, step)
    [text] = dialogues_of(run.rollout, answered)
    names = [function.name for function in functions]
    rewards = zip(names, answered.function_rewards[0], strict=True)
    return text, [f"{name} {mistakes.get(name, format(reward, 'g'))}" for name, reward in rewards]


def noting_mistake(function: RewardFunction, mistakes: dict[str, str]) -> RewardFunction:
    """The function, which gives None instead of raising UserMistake, and notes it by its name."""

    def call(completions: list[str], /, **columns: list) -> Rewards:
        try:
            return function(completions, **columns)
        except UserMistake as error:
            mistakes[function.name] = f"is not known: {error}"
            return [None] * len(completions)

    # A single question gains nothing from prefetch.
    return replace(function, call=call, prefetch=None)


def read_asked(text: str) -> dict[str, Any]:
    """The question of --ask as columns of an example: a text, or a list of messages as JSON. Raises
    UserMistake."""
    messages = as_messages(text)
    return read_question(messages, "--ask") if messages else {"question": text}


def answer_command(cfg: Config, flags: argparse.Namespace) -> None:
    """Runs the command --eval-only or --ask."""
    try:
        hosts.start_jax(cfg.jax_compilation_cache_dir, cfg.init_timeout_s)
        cfg = replace(find_weights(cfg), **NO_STEPS)
        if flags.eval_only:
            if lines := [*contradictions(cfg)]:  # the run may not have evaluated
                raise UserMistake("\n".join(lines))
            evaluate_weights(cfg)
        else:
            example = {} if flags.answer is None else {"answer": flags.answer}
            example |= read_asked(flags.ask)
            text, rewards = ask(cfg, example)
            print(f"\n{flags.ask}\n\n{text}\n", *rewards, sep="\n")
    except (UserMistake, Unwritable) as error:
        exit_with_mistakes(error)
