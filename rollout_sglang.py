"""ROLLOUT_BACKEND=sglang_jax: a serving engine in this process samples the completions.

sglang-jax holds keys and values in pages, admits sequences as others end and runs its own kernels.
It is not a dependency: docs/sglang.md says how to install it. Three of its parts are replaced here:

  * Its weights: update_weights puts the trainer's weights where the engine reads them at each call.
    There is no second process and no file.
  * Its sampler: _draw uses draw_tokens of models/draw.py with the same keys as `naive`, so that
    both backends draw the same tokens, apart from rounding, in whatever order the engine computes.
  * Its handling of errors: the engine would kill the process, and its scheduler would never rest.

Dimensions: r sequences of a rollout pass, c sequences of a program of the engine, T completion
tokens, V vocabulary.
"""

import asyncio
import dataclasses
import functools
import json
import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from config import Config
from models.draw import Sampling, draw_tokens
from models.engine_weights import engine_leaves, family_of, take_weights
from models.model import ModelConfig, Params
from rollout import Run
from runtime.chips import program
from runtime.containment import (
    ERRORS,
    EngineFailed,
    Gate,
    ThisProcess,
    fail_on_main_thread,
    side_effects_undone,
)
from runtime.mistakes import UserMistake, in_one_line
from runtime.sizes import PASS_SIZES, Sizes, eval_questions
from sampling import Completions
from update import sync_weights

INSTALL = (
    'pip install -r requirements-sglang.txt "jax[tpu]" && '
    'pip install --no-deps --pre "sglang-jax==0.1.0rc0"'
)
NAIVE = "use ROLLOUT_BACKEND=naive"
# Positions that the engine needs beyond the longest prompt and its completion.
SPARE_TOKENS = 8
# The functions of the engine's models that name the sources of their weights.
MAPPINGS = {
    "qwen2": "_create_qwen2_weight_mappings",
    "qwen3": "_create_qwen3_weight_mappings",
}
PAGE_TOKENS = {"tpu": 128, "cpu": 1}  # tokens in a page of keys and values


# ---- What stops a run before any weight is loaded ------------------------------------------------


def import_engine(devices: Sequence[jax.Device]) -> Any:
    """The engine's module. Raises UserMistake where the engine cannot run.

    devices: those of the run.
    """
    asked, platform, kind = (
        "ROLLOUT_BACKEND=sglang_jax",
        devices[0].platform,
        devices[0].device_kind,
    )
    if (count := jax.process_count()) > 1:
        raise UserMistake(
            f"{asked} runs in one process, and {count} have joined: each engine schedules on its "
            f"own, so that the programs of the processes would differ; {NAIVE}"
        )
    if sys.version_info < (3, 12):
        found = python_version()
        raise UserMistake(f"{asked} needs Python 3.12 or newer, and this is {found}; {NAIVE}")
    if platform not in PAGE_TOKENS:
        raise UserMistake(f"{asked} needs a TPU, or a CPU for tests, not a {platform}; {NAIVE}")
    if kind.startswith(("TPU v2", "TPU v3")):
        raise UserMistake(f"{asked} needs a TPU v4 or newer, and this is a {kind}; {NAIVE}")
    names = os.environ.get("JAX_PLATFORMS", "")
    if names and (names, platform) != ("cpu", "cpu"):
        raise UserMistake(f"JAX_PLATFORMS={names} stops the engine of {asked}; unset it")
    logging.getLogger("sgl_jax").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        with side_effects_undone():
            from sgl_jax.srt.entrypoints import engine
            from sgl_jax.srt.managers import tokenizer_manager
            from sgl_jax.srt.model_executor.model_runner import ModelRunner
            from sgl_jax.srt.server_args import ServerArgs
    except (ImportError, SyntaxError) as error:
        text = f"{asked} needs sglang-jax, whose import says: {in_one_line(error)}; {INSTALL}"
        raise UserMistake(text) from None
    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    needed = {"enable_single_process", "enable_engine_loop_run_forever_daemon"}
    if needed - fields or not hasattr(ModelRunner, "sample"):
        raise UserMistake(f"{asked}: this sglang-jax is too old; {INSTALL}")
    engine.kill_process_tree = tokenizer_manager.kill_process_tree = fail_on_main_thread
    # At exit it would end the children of this process, which are not the engine's.
    engine.Engine.shutdown = lambda self: None
    return engine


def stop_if_unable(
    cfg: Config, model: ModelConfig, longest: int, devices: Sequence[jax.Device]
) -> None:
    """Raises UserMistake for a model or a length that the engine cannot compute.

    longest: tokens of the longest prompt. devices: those of the run.
    """
    platform, needed = devices[0].platform, context_of(cfg, longest)
    page = PAGE_TOKENS[platform]
    for name, unit in (("context_length", 1), ("max_total_tokens", page)):
        given = getattr(cfg, f"sglang_jax_{name}")
        if given and given // unit * unit < needed:
            pages = f" in pages of {unit}" if unit > 1 else ""
            raise UserMistake(
                f"SGLANG_JAX_{name.upper()}={given}{pages} has less than {needed} tokens: the "
                f"longest prompt has {longest}, MAX_LENGTH_SAMPLE is {cfg.max_length_sample}, and "
                f"the engine keeps {SPARE_TOKENS} free; raise it, or set 0"
            )
    if model.num_heads % len(devices):
        raise UserMistake(
            f"ROLLOUT_BACKEND=sglang_jax splits the heads among all devices, and {len(devices)} "
            f"devices do not divide the model's {model.num_heads} heads; {NAIVE}"
        )
    if family_of(model) not in MAPPINGS:
        raise UserMistake(
            f"ROLLOUT_BACKEND=sglang_jax samples {' and '.join(MAPPINGS)}, and the model is of the "
            f"family {family_of(model)}; {NAIVE}"
        )
    if platform == "cpu" and model.head_dim % 128:
        raise UserMistake(
            f"ROLLOUT_BACKEND=sglang_jax on a CPU needs a head_dim that is a multiple of 128, and "
            f"the model has {model.head_dim}; {NAIVE}, or a copy of the model that "
            f"tools/widen_heads.py makes"
        )


def context_of(cfg: Config, longest: int) -> int:
    """The tokens of the longest sequence, as the engine counts them. longest: of the prompts."""
    return longest + cfg.max_length_sample + SPARE_TOKENS


def pool_of(
    cfg: Config, sizes: Sizes, longest: int, devices: Sequence[jax.Device]
) -> tuple[int, int]:
    """How many sequences the engine computes at once, and for how many tokens it holds keys and
    values, if the memory suffices. longest: tokens of the longest prompt."""
    questions = eval_questions(sizes, cfg.num_pre_q, cfg.eval_samples, len(devices))
    sequences = max(sizes.prompt_batch_size * cfg.num_pre_q, questions * cfg.eval_samples)
    page = PAGE_TOKENS[devices[0].platform]
    pages = sequences * math.ceil(context_of(cfg, longest) / page)
    return sequences, cfg.sglang_jax_max_total_tokens or pages * page


def engine_arguments(run: Run, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """The arguments of the engine, by their names in its ServerArgs. Raises UserMistake."""
    cfg, platform = run.cfg, devices[0].platform
    longest = max(len(prompt.ids) for prompt in run.train_prompts + run.eval_prompts)
    stop_if_unable(cfg, run.model, longest, devices)
    sequences, pool_tokens = pool_of(cfg, run.sizes, longest, devices)
    return {
        "model_path": str(run.folder.resolve()),
        "dtype": str(run.rollout.dtype),
        # transformers 5 keeps rope_theta where the engine does not look for it.
        "json_model_override_args": json.dumps({"rope_theta": run.model.rope_theta}),
        "device": platform,
        "tp_size": len(devices),
        "mem_fraction_static": cfg.sglang_jax_mem_fraction_static,
        "max_total_tokens": pool_tokens,
        "context_length": cfg.sglang_jax_context_length or context_of(cfg, longest),
        "max_running_requests": sequences,
        "page_size": PAGE_TOKENS[platform],
        # On a CPU the engine cannot decode a batch of one row.
        "precompile_bs_paddings": [2**i for i in range(1, 9)] if platform == "cpu" else None,
        # On a CPU the overlapping schedule overwrites an array that a program still reads.
        "disable_overlap_schedule": platform == "cpu",
        "disable_radix_cache": True,  # it would use keys and values of earlier weights
        "enable_deterministic_sampling": True,  # tells _sample whose logits it gets
        "enable_single_process": True,
        "enable_engine_loop_run_forever_daemon": True,
        "load_format": "dummy",  # the weights come from the trainer
        "skip_tokenizer_init": True,  # token ids in, token ids out, the stop token included
        "grammar_backend": "none",
        "chunked_prefill_size": -1,
        "disable_precompile": True,
        "skip_server_warmup": True,
        "watchdog_timeout": 24 * 3600,  # the watchdog would end the parent of this process
        "random_seed": 0,
        "log_level": "error",
    }


# ---- The engine ----------------------------------------------------------------------------------


class SglangBackend:
    """An engine on all devices of this process, with the functions of NaiveBackend.

    It is made on the main thread and before the training state, since the engine takes
    SGLANG_JAX_MEM_FRACTION_STATIC of the memory that is free then. It holds weights, keys and
    values only between update_weights and release.
    """

    def __init__(self, run: Run) -> None:
        """Raises UserMistake if the engine cannot compute the run, or has too little memory."""
        self._run, self._told = run, False
        module = import_engine(jax.devices())
        arguments = engine_arguments(run, jax.devices())
        log = logging.getLogger("sgl_jax")
        log.addHandler(ERRORS)
        log.propagate = False  # what it says comes with the exception
        self._handler_before = signal.signal(signal.SIGQUIT, fail_on_main_thread)
        try:
            with side_effects_undone():
                self._engine = module.Engine(**arguments)
        except EngineFailed as error:
            if not re.search("mem-fraction-static|pool size is too small", str(error)):
                raise
            raise UserMistake(
                f"SGLANG_JAX_MEM_FRACTION_STATIC={arguments['mem_fraction_static']} leaves no "
                f"memory for keys and values beside the engine's weights; raise it"
            ) from None
        scheduler = self._scheduler = self._engine.scheduler_info["scheduler"]
        # They would send the signal about an exception in a thread to the parent of this process.
        for part in (scheduler, scheduler.tp_worker, scheduler.tp_worker.worker):
            part.parent_process = ThisProcess()
        self._gate = Gate(scheduler)
        self._runner = scheduler.tp_worker.worker.model_runner
        self._runner.sample = self._sample
        self._runner.compute_logprobs = lambda logps, tokens: logps  # _sample has computed them
        self._paths, self._shapes = take_weights(self._runner.model)
        self.release()
        names = "dtype tp_size mem_fraction_static context_length page_size"
        found = {"version": version("sglang-jax")} | {n: arguments[n] for n in names.split()}
        found["max_running_requests"] = scheduler.max_running_requests
        found["max_total_tokens"] = tokens = scheduler.max_total_num_tokens
        print("sglang_jax", *(f"{name}={value}" for name, value in found.items()), flush=True)
        if tokens < arguments["context_length"]:
            self.close()
            raise UserMistake(
                f"SGLANG_JAX_MEM_FRACTION_STATIC={arguments['mem_fraction_static']} leaves memory "
                f"for {tokens} tokens, and the longest sequence needs "
                f"{arguments['context_length']}; raise it"
            )

    @program("the copy of the weights that samples")
    def update_weights(self, params: Params) -> None:
        """Gives the engine these weights, and memory for keys and values.

        Raises UserMistake for a weight of the engine that the trainer does not have.
        """
        began = time.perf_counter()
        model, rollout = self._run.model, self._run.rollout
        sync = sync_weights(model, rollout.layout.mesh, rollout.dtype, "unroll")
        mappings = getattr(self._runner.model, MAPPINGS[family_of(model)])()
        # engine_leaves frees each array of the copy once the engine has it.
        leaves = engine_leaves(sync(params), model, mappings, self._paths, self._shapes)
        self._runner.model_state_leaves = jax.block_until_ready(leaves)
        self._runner.token_to_kv_pool._create_buffers()
        if not self._told:
            self._told, size = True, sum(leaf.nbytes for leaf in leaves)
            seconds = time.perf_counter() - began
            print(f"sglang_jax weights={len(leaves)} bytes={size} t={seconds:.2f}s", flush=True)

    @program("prefill, decode or drop_sequences", PASS_SIZES)
    def generate(
        self,
        prompt_ids: np.ndarray,
        prompt_mask: np.ndarray,
        sequence_ids: np.ndarray,
        key: jax.Array,
        sampling: Sampling,
    ) -> Completions:
        """As NaiveBackend.generate; the log-probabilities are those among all tokens.

        Raises EngineFailed, or JaxRuntimeError if a device runs out of memory.
        """
        stopping, everywhere = self._run.stopping, NamedSharding(self._runner.mesh, PartitionSpec())
        ids = [
            padded[mask > 0].tolist() for padded, mask in zip(prompt_ids, prompt_mask, strict=True)
        ]
        ids = [prompt for prompt in ids for _ in range(len(sequence_ids) // len(ids))]  # [r]
        last_positions = np.array([len(prompt) - 1 for prompt in ids], np.int32)  # [r]
        arrays = jax.device_put((key, sequence_ids, last_positions), everywhere)
        self._draw = functools.partial(_draw, *arrays, sampling=sampling)
        wanted = {"max_new_tokens": stopping.max_new_tokens, "stop_token_ids": [*stopping.stop_ids]}
        asked = self._engine.async_generate(
            input_ids=ids,
            sampling_params=[wanted | {"sampling_seed": i} for i in range(len(ids))],
            return_logprob=True,
        )
        try:
            with self._gate.passing(len(ids)):
                outputs = asyncio.run_coroutine_threadsafe(asked, self._engine.loop).result()
        except EngineFailed as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise jax.errors.JaxRuntimeError(str(error)) from None
            raise
        for output in outputs:
            if (reason := output["meta_info"]["finish_reason"])["type"] not in ("stop", "length"):
                raise EngineFailed(f"the engine did not finish a sequence: {reason}")
        r, T = len(ids), stopping.max_new_tokens
        completion_ids, logps = np.full((r, T), stopping.pad_id, np.int32), np.zeros((r, T), "f")
        mask = np.zeros((r, T), np.int32)
        for i, output in enumerate(outputs):
            drawn = output["meta_info"]["output_token_logprobs"]
            length = len(output["output_ids"])
            completion_ids[i, :length] = output["output_ids"]
            logps[i, :length] = [logp for logp, *_ in drawn]
            mask[i, :length] = 1
        lengths = mask.sum(axis=1, dtype=np.int32)
        return Completions(completion_ids, mask, lengths, logps, computed_tokens=lengths)

    def release(self) -> None:
        """Frees the engine's weights, keys and values, until the next update_weights."""
        for buffer in self._runner.token_to_kv_pool.kv_buffer:
            buffer.delete()
        self._runner.model_state_leaves = self._shapes

    def close(self) -> None:
        """Ends what computes, and removes the engine's files. Threads that only wait are left."""
        self._gate.end()
        if queue := getattr(self._scheduler.tp_worker, "input_queue", None):
            queue.put((None,) * 4)  # ends the thread of the overlapping schedule
        self._engine.loop.call_soon_threadsafe(self._engine.loop.stop)
        for name in vars(self._engine.port_args).values():
            if str(name).startswith("ipc://"):
                Path(name.removeprefix("ipc://")).unlink(missing_ok=True)
        signal.signal(signal.SIGQUIT, self._handler_before)

    def _sample(self, logits_output: Any, metadata: Any) -> tuple[jax.Array, jax.Array, None]:
        """Replaces ModelRunner.sample: the tokens [c] and their log-probabilities [c]."""
        with jax.set_mesh(self._runner.mesh):
            drawn = self._draw(
                logits_output.next_token_logits, metadata.sampling_seeds, metadata.positions
            )
        return *drawn, None


@functools.partial(jax.jit, static_argnames=("sampling",))
def _draw(
    key: jax.Array,
    sequence_ids: jax.Array,
    last_positions: jax.Array,
    logits: jax.Array,
    index: jax.Array,
    positions: jax.Array,
    *,
    sampling: Sampling,
) -> tuple[jax.Array, jax.Array]:
    """A token [c] int32 of logits [c, V] for each sequence, and its log-probability [c] float32.

    sequence_ids, last_positions: [r], of a pass: the numbers of its sequences, and the positions of
    the last tokens of their prompts. index: [c], which of the r sequences the logits belong to.
    positions: [c], of the token before the one that is drawn. The filters of `sampling` do not
    count in the log-probability.
    """

    def draw(key, sequence_ids, last_positions, logits, index, positions):  # noqa: ANN001
        axis = "tensor" if len(index) % mesh.shape["tensor"] == 0 else None
        logits = jax.lax.with_sharding_constraint(logits, PartitionSpec(axis)).astype(jnp.float32)
        t = positions - last_positions[index]  # [c], tokens of the completion so far
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, sequence_ids[index])
        keys = jax.vmap(jax.random.fold_in)(keys, t)  # [c]
        tokens, _ = draw_tokens(keys, logits, sampling)
        logps = jax.nn.log_softmax(logits / (sampling.temperature or 1.0))  # [c, V]
        return tokens, jnp.take_along_axis(logps, tokens[:, None], axis=-1)[:, 0]

    # The engine's mesh has explicit axes, with which most of jax asks for the sharding of results.
    mesh, split = jax.typeof(logits).sharding.mesh, PartitionSpec("data")
    draw = jax.sharding.auto_axes(draw, axes=mesh.axis_names, out_sharding=(split, split))
    return draw(key, sequence_ids, last_positions, logits, index, positions)
