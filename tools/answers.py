"""What --eval-only and --ask of train_grpo.py do: weights answer questions and are not trained.

The weights are those of the checkpoint that RESUME asks for in OUTPUT_DIR, by default the newest,
or those of MODEL_PATH if there is no checkpoint.
"""

import contextlib
import dataclasses
import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rewards
from config import Command, Config
from metrics import EVAL_PHASES, evaluate
from models import hf
from models.model import Params, abstract_params
from review import Reviewer
from rollout import Backend, Run, answer_questions, texts_of
from runtime import processes, resume
from runtime.checkpoint import Checkpoints
from runtime.mistakes import Unwritable, UserMistake, fail
from runtime.processes import StopSignal
from runtime.records import DONE
from runtime.run_log import Clock
from runtime.sizes import MICRO_SIZES, PASS_SIZES, STEP_SIZES
from startup import make_backend, open_log, set_up

# Settings of a program that only answers: no step, no checkpoint, no export.
NO_STEPS = {
    "steps": 0,
    "beta": 0.0,
    "save_every_steps": 0,
    "export_hf": "none",
    "wandb_mode": "disabled",
    "eval_every_steps": 0,
    "eval_full_sweep": True,
}
# One question is answered greedily, in the smallest batch.
ONE_QUESTION = dict.fromkeys((*PASS_SIZES, *STEP_SIZES, *MICRO_SIZES, "grad_accum_steps"), 0)
ONE_QUESTION |= {"rollout_per_device_batch_size": 1, "num_pre_q": 1, "num_mini_batches": 1}
ONE_QUESTION |= {"eval_samples": 1, "eval_temperature": 0.0}


class Weights(NamedTuple):
    """The part of a training state that answers questions; a checkpoint has the rest too."""

    params: Params


class Answering(NamedTuple):
    """What answers questions."""

    run: Run
    stop: StopSignal
    backend: Backend
    params: Params
    step: int  # how many steps the weights were trained


def answer_command(command: Command) -> None:
    """Does what --eval-only or --ask asks for."""
    cfg = dataclasses.replace(command.cfg, **NO_STEPS)
    try:
        if command.eval_only:
            evaluate_weights(cfg)
        else:
            ask(dataclasses.replace(cfg, **ONE_QUESTION), command.question, command.answer)
    except (UserMistake, Unwritable) as error:
        fail(error)


def evaluate_weights(cfg: Config) -> None:
    """Evaluates the weights on the complete eval split, as EVAL_FULL_SWEEP does.

    The record and the answers go to a new folder in OUTPUT_DIR, or in runs.
    """
    run, stop, backend, params, step = start_answering(cfg)
    with contextlib.closing(backend):
        out = resume.output_folder("", f"{cfg.output_dir or 'runs'}/eval")
        _, key = jax.random.split(jax.random.key(cfg.seed))
        with contextlib.closing(open_log(run, out, resume.Progress(step))) as log:
            evaluate(run, log, stop, backend, key, params, step, full=True)
            Reviewer(out, log, jax.process_index() == 0).write(DONE)


def ask(cfg: Config, question: str, answer: str | None) -> None:
    """Prints the greedy answer to a question, and the rewards of all functions that can tell.

    answer: the right answer; without it, functions that compare with one are left out.
    """
    example = {"question": question} | ({} if answer is None else {"answer": answer})
    run, stop, backend, params, _ = start_answering(cfg, example)
    functions = [f for f in run.functions if answer is not None or not needs_answer(f)]
    if answer is None:
        functions = [none_after_mistakes(function) for function in functions]
    run = dataclasses.replace(run, functions=functions, weights=(1.0,) * len(functions))
    with contextlib.closing(backend):
        backend.update_weights(params)
        key = jax.random.key(cfg.seed)
        evaluation = answer_questions(run, backend, stop, run.eval_prompts, key, Clock(EVAL_PHASES))
    [text] = texts_of(run.tokenizer, run.eval_prompts, evaluation)
    print(f"\n{question}\n\n{text}\n")
    for function, reward in zip(functions, evaluation.per_function[0], strict=True):
        if not np.isnan(reward):
            print(f"{function.__name__} {reward:g}")


def needs_answer(function: rewards.RewardFunction) -> bool:
    """Whether the function has a parameter `answer`."""
    return "answer" in inspect.signature(function).parameters


def none_after_mistakes(function: rewards.RewardFunction) -> rewards.RewardFunction:
    """The function, which does not apply where it raises UserMistake: it may look for the answer
    among its columns."""

    def score(completions: list[str], **columns: list) -> rewards.Rewards:
        try:
            return function(completions, **columns)
        except UserMistake as error:
            print(f"{function.__name__} gives no score without --answer: {error}")
            return [None] * len(completions)

    score.__name__ = function.__name__
    return score


# ---- What answers --------------------------------------------------------------------------------


def start_answering(cfg: Config, example: dict[str, str] | None = None) -> Answering:
    """Reads all that is needed. Raises UserMistake.

    example: the only question, instead of the eval split.
    """
    stop, backend = StopSignal(), None
    try:
        processes.start_jax(cfg)
        run = set_up(cfg, example)
        backend = make_backend(run)
        return Answering(run, stop, backend, *load_weights(run))
    except UserMistake:
        if backend:
            backend.close()
        raise


def load_weights(run: Run) -> tuple[Params, int]:
    """The weights, float32, and after how many steps they are. Raises UserMistake."""
    cfg, model, mesh = run.cfg, run.training.model, run.training.layout.mesh
    folder = cfg.checkpoint_dir or (f"{cfg.output_dir}/checkpoints" if cfg.output_dir else "")
    own = Checkpoints(folder, read_only=True) if folder else None
    source, step = resume.checkpoint_source(cfg.resume, own)
    wanted = {"state": Weights(abstract_params(model, mesh, jnp.float32))}
    check = functools.partial(resume.stop_if_other_arrays, wanted, part=True)
    if source and (found := source.restore(wanted, check, step)):
        arrays, record = found
        print(f"weights={source.folder}/{record['step']}", flush=True)
        return arrays["state"].params, record["step"]
    if cfg.resume not in ("auto", "never"):
        raise UserMistake(f"RESUME={cfg.resume} is not the folder of a complete checkpoint")
    print(f"weights={run.folder}", flush=True)
    return hf.load_params(run.folder, model, mesh, jnp.float32), 0
