"""ROLLOUT_BACKEND=sglang_jax: a serving engine in this process samples the completions.

sglang-jax holds keys and values in pages, admits sequences as others end and runs its own kernels.
It is not a dependency: docs/sglang.md says how to install it. Three of its parts are replaced here:

  * Its weights: update_weights puts the trainer's weights where the engine reads them at each call.
    There is no second process and no file.
  * Its sampler: _draw uses draw_tokens of model/next_token.py with the same keys as `naive`, so
    that both backends draw the same tokens, apart from rounding, in whatever order the engine
    computes.
  * Its handling of errors: the engine would kill the process, and its scheduler would never rest.

Dimensions: b sequences of a rollout pass, c sequences of a program of the engine, T completion
tokens, V vocabulary.
"""

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from config import Config
from infra.chips import program
from infra.mistakes import UserMistake, in_one_line
from infra.sizes import PASS_SIZES, Sizes, eval_questions
from model.lora import merge
from model.next_token import Sampling, draw_tokens
from model.params import Leaf, ModelConfig, Params, param_table
from sampling import Completions, sync_weights

if TYPE_CHECKING:
    from startup import Run

INSTALL = (
    'pip install -r requirements-sglang.txt "jax[tpu]" && '
    'pip install --no-deps --pre "sglang-jax==0.1.0rc0"'
)
NAIVE = "use ROLLOUT_BACKEND=naive"
# Positions that the engine needs beyond the longest prompt and its completion.
SPARE_TOKENS = 8
FAMILIES = ("qwen2", "qwen3")  # of models that the engine samples
PAGE_TOKENS = {"tpu": 128, "cpu": 1}  # tokens in a page of keys and values


# ---- What stops a run before any weight is loaded ------------------------------------------------


def import_engine(devices: Sequence[jax.Device]) -> Any:
    """The engine's module. Raises UserMistake if it cannot run on the devices of this run."""
    asked, platform = "ROLLOUT_BACKEND=sglang_jax", devices[0].platform
    if (count := jax.process_count()) > 1:
        raise UserMistake(
            f"{asked} runs in one process, and {count} have joined: each engine schedules on its "
            f"own, so that the programs of the processes would differ; {NAIVE}"
        )
    if platform not in PAGE_TOKENS:
        raise UserMistake(f"{asked} needs a TPU, or a CPU for tests, not a {platform}; {NAIVE}")
    logging.getLogger("sgl_jax").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from sgl_jax.srt.entrypoints import engine
        from sgl_jax.srt.managers import scheduler_output_processor_mixin, tokenizer_manager
    except ImportError as error:
        raise UserMistake(
            f"{asked} needs Python 3.12 or newer and sglang-jax, whose import says: "
            f"{in_one_line(error)}; {INSTALL}"
        ) from None
    # It would replace the handlers of SIGCHLD and SIGQUIT.
    engine._set_envs_and_config = lambda arguments: None
    # At exit it would end the children of this process, which are not the engine's.
    engine.Engine.shutdown = lambda self: None
    tokenizer_manager.kill_process_tree = fail_on_main_thread
    # After 50 tokens, and again after 100, it would send all log-probabilities so far once more.
    scheduler_output_processor_mixin.DEFAULT_FORCE_STREAM_INTERVAL = sys.maxsize
    return engine


def stop_if_unable(
    cfg: Config, model: ModelConfig, longest: int, devices: Sequence[jax.Device]
) -> None:
    """Raises UserMistake for a model or a length that the engine cannot compute.

    longest: tokens of the longest prompt. devices: those of the run.
    """
    platform, needed = devices[0].platform, context_of(cfg, longest)
    for name, unit in (("context_length", 1), ("max_total_tokens", PAGE_TOKENS[platform])):
        given = getattr(cfg, f"sglang_jax_{name}")
        if given and given // unit * unit < needed:
            raise UserMistake(
                f"SGLANG_JAX_{name.upper()}={given}, in pages of {unit}, has less than {needed} "
                f"tokens: the longest prompt has {longest}, MAX_LENGTH_SAMPLE is "
                f"{cfg.max_length_sample}, and the engine keeps {SPARE_TOKENS} free; raise it, or "
                f"set 0"
            )
    if model.num_heads % len(devices):
        raise UserMistake(
            f"ROLLOUT_BACKEND=sglang_jax splits the heads among all devices, and {len(devices)} "
            f"devices do not divide the model's {model.num_heads} heads; {NAIVE}"
        )
    if family_of(model) not in FAMILIES:
        raise UserMistake(
            f"ROLLOUT_BACKEND=sglang_jax samples {' and '.join(FAMILIES)}, and the model is of the "
            f"family {family_of(model)}; {NAIVE}"
        )
    if platform == "cpu" and model.head_dim % 128:
        raise UserMistake(
            f"ROLLOUT_BACKEND=sglang_jax on a CPU needs a head_dim that is a multiple of 128, and "
            f"the model has {model.head_dim}; {NAIVE}, or a copy of the model that "
            f"tests/widen_heads.py makes"
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


def engine_arguments(run: "Run", devices: Sequence[jax.Device]) -> dict[str, Any]:
    """The arguments of the engine, by their names in its ServerArgs. Raises UserMistake."""
    cfg, platform = run.cfg, devices[0].platform
    longest = max(len(prompt.ids) for prompt in run.train_prompts + run.eval_prompts)
    stop_if_unable(cfg, run.learner.compute.model, longest, devices)
    sequences, pool_tokens = pool_of(cfg, run.sizes, longest, devices)
    return {
        "model_path": str(run.folder.resolve()),
        "dtype": str(run.rollout.compute.dtype),
        # transformers 5 keeps rope_theta where the engine does not look for it.
        "json_model_override_args": json.dumps(
            {"rope_theta": run.learner.compute.model.rope_theta}
        ),
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
        "watchdog_timeout": 24 * 3600,  # the watchdog would end the parent of this process
    }


# ---- The engine ----------------------------------------------------------------------------------


class SglangBackend:
    """An engine on all devices of this process, with the functions of NaiveBackend in sampling.py.

    It is made on the main thread and before the training state, since the engine takes
    SGLANG_JAX_MEM_FRACTION_STATIC of the memory that is free then. It holds weights, keys and
    values only between update_weights and release.
    """

    def __init__(self, run: "Run") -> None:
        """Raises UserMistake if the engine cannot compute the run, or has too little memory."""
        self._run = run
        module = import_engine(jax.devices())
        arguments = engine_arguments(run, jax.devices())
        Errors(logging.getLogger("sgl_jax"))
        try:
            self._engine = module.Engine(**arguments)
            tokens = self._engine.scheduler_info["max_total_num_tokens"]
        except EngineFailed as error:
            if not re.search("mem-fraction-static|pool size is too small", str(error)):
                raise
            tokens = 0
        if tokens < arguments["context_length"]:
            raise UserMistake(
                f"SGLANG_JAX_MEM_FRACTION_STATIC={arguments['mem_fraction_static']} leaves memory "
                f"for {tokens} tokens beside the engine's weights, and the longest sequence needs "
                f"{arguments['context_length']}; raise it"
            )
        scheduler = self._engine.scheduler_info["scheduler"]
        # It would send the signal about an exception in its thread to the parent of this process.
        scheduler.tp_worker.parent_process = SimpleNamespace(send_signal=fail_on_main_thread)
        self._gate = Gate(scheduler)
        self._runner = scheduler.tp_worker.worker.model_runner
        self._runner.sample = self._sample
        self._runner.compute_logprobs = lambda logps, tokens: logps  # _sample has computed them
        self._shapes = take_weights(self._runner.model)
        self.release()

    @program("the copy of the weights that samples")
    def update_weights(self, params: Params) -> None:
        """Gives the engine these weights, and memory for keys and values.

        Raises UserMistake for a weight of the engine that the trainer does not have.
        """
        model, sync = self._run.rollout.compute.model, sync_weights(self._run.rollout.compute)
        if lora := self._run.learner.compute.model.lora:
            params, share = merge(params, self._run.learner.compute.model)
            told = f"sglang_jax merged adapters of rank {lora.rank}: {share:.2%} of their matrices'"
            print(f"{told} numbers differ from the base", flush=True)
        table = getattr(self._runner.model, f"_create_{family_of(model)}_weight_mappings")()
        # engine_leaves frees each array of the copy once the engine has it.
        leaves = engine_leaves(sync(params), model, table, self._shapes)
        self._runner.model_state_leaves = jax.block_until_ready(leaves)
        self._runner.token_to_kv_pool._create_buffers()

    @program("what the serving engine computes", PASS_SIZES)
    def generate(
        self,
        prompt_ids: np.ndarray,
        prompt_mask: np.ndarray,
        sequence_ids: np.ndarray,
        key: jax.Array,
        sampling: Sampling,
    ) -> Completions:
        """As NaiveBackend.generate; the log-probabilities are those among all tokens. Raises
        EngineFailed."""
        stopping, everywhere = (
            self._run.rollout.stopping,
            NamedSharding(self._runner.mesh, PartitionSpec()),
        )
        ids = [
            padded[mask > 0].tolist() for padded, mask in zip(prompt_ids, prompt_mask, strict=True)
        ]
        ids = [prompt for prompt in ids for _ in range(len(sequence_ids) // len(ids))]  # [b]
        last_positions = np.array([len(prompt) - 1 for prompt in ids], np.int32)  # [b]
        arrays = jax.device_put((key, sequence_ids, last_positions), everywhere)
        self._draw = functools.partial(_draw, *arrays, sampling=sampling)
        wanted = {"max_new_tokens": stopping.max_new_tokens, "stop_token_ids": [*stopping.stop_ids]}
        asked = self._engine.async_generate(
            input_ids=ids,
            sampling_params=[wanted | {"sampling_seed": i} for i in range(len(ids))],
            return_logprob=True,
        )
        with self._gate.passing(len(ids)):
            outputs = asyncio.run_coroutine_threadsafe(asked, self._engine.loop).result()
        b, T = len(ids), stopping.max_new_tokens
        completion_ids, logps = np.full((b, T), stopping.pad_id, np.int32), np.zeros((b, T), "f")
        for i, output in enumerate(outputs):
            length = len(output["output_ids"])
            completion_ids[i, :length] = output["output_ids"]
            logps[i, :length] = [x for x, *_ in output["meta_info"]["output_token_logprobs"]]
        lengths = np.array([len(output["output_ids"]) for output in outputs], np.int32)  # [b]
        mask = (np.arange(T) < lengths[:, None]).astype(np.int32)  # [b, T]
        return Completions(sequence_ids, completion_ids, mask, lengths, logps, lengths)

    def release(self) -> None:
        """Frees the engine's weights, keys and values, until the next update_weights."""
        for buffer in self._runner.token_to_kv_pool.kv_buffer:
            buffer.delete()
        self._runner.model_state_leaves = [*self._shapes.values()]

    def close(self) -> None:
        """Ends what computes, and removes the engine's files. Threads that only wait are left."""
        self._gate.end()
        self._engine.loop.call_soon_threadsafe(self._engine.loop.stop)
        for name in vars(self._engine.port_args).values():
            if str(name).startswith("ipc://"):
                Path(name.removeprefix("ipc://")).unlink(missing_ok=True)

    def _sample(self, logits_output: Any, metadata: Any) -> tuple[jax.Array, jax.Array, None]:
        """Replaces ModelRunner.sample: the tokens [c] and their log-probabilities [c]."""
        with jax.set_mesh(self._runner.mesh):
            drawn = self._draw(
                logits_output.next_token_logits, metadata.sampling_seeds, metadata.positions
            )
        return *drawn, None


# The engine's mesh has explicit axes, with which most of jax asks for the sharding of results.
@functools.partial(jax.jit, static_argnames=("sampling",))
@functools.partial(jax.sharding.auto_axes, out_sharding=(PartitionSpec("data"),) * 2)
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

    sequence_ids, last_positions: [b], of a pass: the numbers of its sequences, and the positions of
    the last tokens of their prompts. index: [c], which of the b sequences the logits belong to.
    positions: [c], of the token before the one that is drawn. The filters of `sampling` do not
    count in the log-probability.
    """
    devices = jax.sharding.get_abstract_mesh().shape["tensor"]
    axis = "tensor" if len(index) % devices == 0 else None
    logits = jax.lax.with_sharding_constraint(logits, PartitionSpec(axis)).astype(jnp.float32)
    t = positions - last_positions[index]  # [c], tokens of the completion so far
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, sequence_ids[index])
    keys = jax.vmap(jax.random.fold_in)(keys, t)  # [c]
    tokens, _ = draw_tokens(keys, logits, sampling)
    logps = jax.nn.log_softmax(logits / (sampling.temperature or 1.0))  # [c, V]
    return tokens, jnp.take_along_axis(logps, tokens[:, None], axis=-1)[:, 0]


# ---- The engine's weights ------------------------------------------------------------------------


def family_of(model: ModelConfig) -> str:
    """The family of a model, as model_type in config.json names it."""
    if model.gemma3:
        return "gemma3_text"
    return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"


def engine_leaves(
    params: Params,
    model: ModelConfig,
    table: Mapping[str, Any],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """The engine's weights in its order, shapes, dtypes and shardings, from the trainer's.

    params: unrolled. table: of the engine, {name in a Hugging Face file: an entry with target_path,
    transpose and kv_head_padding}. shapes: of the engine's weights, by their paths. Raises
    UserMistake if the trainer has other weights than the engine.
    """
    sources = _sources(params, model)
    del params
    names = {table[name].target_path if name in table else name: name for name in sources}
    if different := names.keys() ^ shapes.keys():
        raise UserMistake(
            f"this sglang-jax has other weights than the trainer, such as {min(different)}; "
            f"install sglang-jax==0.1.0rc0"
        )
    leaves = []
    for path, shape in shapes.items():
        entry, (leaf, x) = table[names[path]], sources.pop(names[path])
        x = x if entry.transpose == leaf.transposed else x.T
        if entry.kv_head_padding:
            # With more devices than kv heads, each head is there several times.
            heads = x.reshape(*x.shape[:-1], -1, model.head_dim)
            copies = shape.shape[-1] // x.shape[-1]
            x = jnp.repeat(heads, copies, axis=-2).reshape(shape.shape)
        leaves.append(jax.device_put(x.astype(shape.dtype), shape.sharding))
    return leaves


def _sources(params: Params, model: ModelConfig) -> dict[str, tuple[Leaf, jax.Array]]:
    """{name in a Hugging Face file: what the array is, and the array} of unrolled params."""
    table, found = param_table(model, "unroll"), {}
    for i, (leaves, arrays) in enumerate(zip(table.layers, params.layers, strict=True)):
        pairs = zip(jax.tree.leaves(leaves), jax.tree.leaves(arrays), strict=True)
        found |= {leaf.name.format(i): (leaf, array) for leaf, array in pairs}
    leaves, arrays = (jax.tree.leaves(tree.replace(layers=())) for tree in (table, params))
    return found | {leaf.name: (leaf, x) for leaf, x in zip(leaves, arrays, strict=True)}


def take_weights(model: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Takes the first weights from the engine's model: {path: shape} of them is returned, in the
    engine's order, and their memory is free."""
    from flax import nnx

    state = nnx.split(model)[1]
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    nnx.update(model, shapes)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    found = jax.tree.leaves_with_path(shapes)
    return {keystr(path).removesuffix(".value"): x for path, x in found}


# ---- Keeping the engine from slowing, changing or ending this process ----------------------------


class EngineFailed(jax.errors.JaxRuntimeError):
    """A thread of the engine has ended with an exception, whose traceback is in the message.

    It is an error of jax, because it may be about the memory of a device.
    """


class Gate:
    """Lets the engine's scheduler work only while a rollout pass waits for it.

    Otherwise it would ask for new sequences all the time, also while the trainer computes. It gets
    all sequences of a pass at once and in their order, so that it computes the same each time.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._receive = scheduler, scheduler.recv_requests
        self._open, self._missing = threading.Event(), 0
        self._arrived: list[Any] = []
        scheduler.recv_requests = self._next

    @contextlib.contextmanager
    def passing(self, sequences: int) -> Iterator[None]:
        """The scheduler works within this context, once so many sequences have arrived."""
        self._missing = sequences
        self._open.set()
        try:
            yield
            # A program may still run that was started before its last sequence was known to end.
            while self._scheduler.last_batch is not None:
                time.sleep(0.001)
        finally:
            self._open.clear()

    def end(self) -> None:
        """Ends the scheduler's thread. If it computes while Python ends, the process aborts."""
        self._scheduler.recv_requests = sys.exit
        self._open.set()
        for thread in threading.enumerate():
            if thread.name.startswith("sglang::scheduler"):
                thread.join(timeout=5)

    def _next(self) -> list[Any]:
        """Replaces recv_requests of the scheduler, which calls it before each of its programs."""
        self._open.wait()
        self._arrived += self._receive()
        if not self._arrived or len(self._arrived) < self._missing:
            time.sleep(0.001)
            return []
        arrived, self._arrived, self._missing = self._arrived, [], 0
        return sorted(arrived, key=lambda request: request.sampling_params.sampling_seed)


class Errors(logging.Handler):
    """Raises on the main thread what a thread of the engine has logged before its end."""

    def __init__(self, logger: logging.Logger) -> None:
        """logger: of the engine, whose threads log an exception before they send SIGQUIT."""
        super().__init__(logging.ERROR)
        self._lines: list[str] = []
        logger.addHandler(self)
        logger.propagate = False  # what it says comes with the exception
        signal.signal(signal.SIGQUIT, self._raise)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def _raise(self, *_: Any) -> None:
        raise EngineFailed("\n".join(self._lines) or "SIGQUIT")


def fail_on_main_thread(*_: Any, **__: Any) -> None:
    """Replaces the functions with which the engine's threads would end this process or its parent
    after an exception."""
    os.kill(os.getpid(), signal.SIGQUIT)
