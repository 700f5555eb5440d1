"""ROLLOUT_BACKEND=sglang_jax: a serving engine in this process samples the completions.

sglang-jax keeps keys and values in pages, admits sequences as others end and runs its own kernels.
It is an optional package, which docs/sglang.md installs. Each process of a run has an engine on its
own devices, for its own prompts. Four of the engine's parts are replaced here:

  * Devices: it would compute on those of all processes, and each process would run other programs.
  * Weights: update_weights puts the trainer's weights where the engine reads them at each call,
    without a second process or a file.
  * Sampling: _draw calls draw_tokens of model/next_token.py with the same keys as `naive`, so that
    both backends draw the same tokens, apart from rounding, in whatever order the engine computes.
  * Errors and scheduling: the engine would kill this process after an exception, and its scheduler
    would poll for requests while the trainer computes.

Dimensions: `sequences` of a rollout pass, `batch` sequences that the engine computes together, T
completion tokens, V vocabulary.
"""

import asyncio
import contextlib
import dataclasses
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from config import Config
from infra.chips import attribute_oom_to
from infra.hosts import waiting_for_processes
from infra.mistakes import UserMistake, in_one_line
from infra.sizes import PASS_SIZES, Sizes, eval_questions
from model.lora import merge_adapters
from model.next_token import Sampling, draw_tokens
from model.params import ModelConfig, Params, param_table
from run import Run
from sampling import Completions, sync_weights

# ---- Checks before any weight is loaded ----------------------------------------------------------

SETTING = "ROLLOUT_BACKEND=sglang_jax"
NAIVE = "use ROLLOUT_BACKEND=naive"
INSTALL = (
    'pip install -r requirements-sglang.txt "jax[tpu]" && '
    'pip install --no-deps --pre "sglang-jax==0.1.0rc0"'
)
# The families that the engine has, and the fields of ModelConfig in which they differ from Llama.
FAMILIES = {"qwen2": {"qkv_bias"}, "qwen3": {"qk_norm"}}
PAGE_TOKENS = {"tpu": 128, "cpu": 1}  # tokens in a page of keys and values
SPARE_TOKENS = 8  # positions that the engine needs beyond the longest prompt and its completion


def raise_if_platform_unsupported(platform: str) -> None:
    """Raises UserMistake if the engine has no programs for this platform of jax."""
    if platform not in PAGE_TOKENS:
        raise UserMistake(f"{SETTING} needs a TPU, or a CPU for tests, not a {platform}; {NAIVE}")


def engine_devices() -> list[jax.Device]:
    """The devices of this process, in the order of make_mesh."""
    return sorted(jax.local_devices(), key=lambda d: d.id)


def import_engine(devices: Sequence[jax.Device]) -> None:
    """Imports the engine and replaces parts of it, once, so that it will run on these devices.
    Raises UserMistake if they cannot run it, or if it is not installed."""
    platform = devices[0].platform
    raise_if_platform_unsupported(platform)
    logging.getLogger("sgl_jax").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # A module of jax's tests, which the engine imports, would abort this process 3 s after SIGTERM.
    util.install_failure_signal_handler = lambda: None
    try:
        from sgl_jax.srt.entrypoints import engine
        from sgl_jax.srt.managers import (
            scheduler,
            scheduler_output_processor_mixin,
            tokenizer_manager,
        )
        from sgl_jax.srt.model_executor import model_runner
    except ImportError as error:
        raise UserMistake(
            f"{SETTING} needs Python 3.12 or newer and sglang-jax, whose import says: "
            f"{in_one_line(error)}; {INSTALL}"
        ) from None
    # It would replace the handlers of SIGCHLD and SIGQUIT.
    engine._set_envs_and_config = lambda arguments: None
    # At exit it would end the children of this process, which are not the engine's.
    engine.Engine.shutdown = lambda self: None
    tokenizer_manager.kill_process_tree = raise_on_main_thread
    # Its argument device_indexes fails on a TPU's second host, and turns jax's cache off.
    scheduler.create_device_mesh = functools.partial(scheduler.create_device_mesh, devices=devices)
    free_memory = model_runner.get_available_device_memory
    # With `distributed` it would wait for the other processes.
    model_runner.get_available_device_memory = lambda device, distributed=False, **more: (
        free_memory(device, **more)
    )
    # After 50 tokens and after 100 it would send all log-probabilities so far once more.
    scheduler_output_processor_mixin.DEFAULT_FORCE_STREAM_INTERVAL = sys.maxsize


def raise_if_engine_cannot_compute(
    cfg: Config, model: ModelConfig, longest: int, devices: Sequence[jax.Device]
) -> None:
    """Raises UserMistake for a model or a length that the engine cannot compute.

    longest: tokens of the longest prompt. devices: of a host.
    """
    platform, needed = devices[0].platform, context_tokens(cfg.max_length_sample, longest)
    raise_if_platform_unsupported(platform)
    for name, unit in (("context_length", 1), ("max_total_tokens", PAGE_TOKENS[platform])):
        tokens = getattr(cfg, f"sglang_jax_{name}")
        if tokens and tokens // unit * unit < needed:
            raise UserMistake(
                f"SGLANG_JAX_{name.upper()}={tokens}, in pages of {unit}, has less than {needed} "
                f"tokens: the longest prompt has {longest}, MAX_LENGTH_SAMPLE is "
                f"{cfg.max_length_sample}, and the engine keeps {SPARE_TOKENS} free; raise it, or "
                f"set 0"
            )
    if model.num_heads % len(devices):
        raise UserMistake(
            f"{SETTING} splits the heads among a host's devices, and {len(devices)} devices do "
            f"not divide the model's {model.num_heads} heads; {NAIVE}"
        )
    if model_family(model) not in FAMILIES:
        families = " and ".join(FAMILIES)
        raise UserMistake(f"{SETTING} samples {families}, and not this model's family; {NAIVE}")
    if platform == "cpu" and model.head_dim % 128:
        raise UserMistake(
            f"{SETTING} on a CPU needs a head_dim that is a multiple of 128, and the model has "
            f"{model.head_dim}; {NAIVE}, or a copy of the model that tests/widen_heads.py makes"
        )


def model_family(model: ModelConfig) -> str:
    """The family of a model, as model_type in config.json names it; "" if it is not of FAMILIES."""
    fields = [x for x in dataclasses.fields(model) if x.default is not dataclasses.MISSING]
    changed = {x.name for x in fields if getattr(model, x.name) != x.default} - {"lora"}
    return next((name for name, its_own in FAMILIES.items() if changed == its_own), "")


def context_tokens(max_length_sample: int, longest: int) -> int:
    """The engine's context length for a prompt of `longest` tokens and its completion."""
    return longest + max_length_sample + SPARE_TOKENS


# ---- The arguments of the engine -----------------------------------------------------------------


def pool_size(
    cfg: Config, sizes: Sizes, longest: int, devices: Sequence[jax.Device]
) -> tuple[int, int]:
    """The most sequences in the engine's batch, and the tokens whose keys and values it holds, if
    the memory suffices. longest: tokens of the longest prompt."""
    questions = eval_questions(sizes, cfg.num_pre_q, cfg.eval_samples, len(devices))
    sequences = max(sizes.prompt_batch_size * cfg.num_pre_q, questions * cfg.eval_samples)
    page = PAGE_TOKENS[devices[0].platform]
    pages = sequences * math.ceil(context_tokens(cfg.max_length_sample, longest) / page)
    return sequences, cfg.sglang_jax_max_total_tokens or pages * page


def engine_arguments(run: Run, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """The arguments of the engine, by their names in its ServerArgs. Raises UserMistake."""
    cfg, model, platform = run.cfg, run.learner.compute.model, devices[0].platform
    longest = max(len(prompt.ids) for prompt in run.train_prompts + run.eval_prompts)
    context = context_tokens(cfg.max_length_sample, longest)
    raise_if_engine_cannot_compute(cfg, model, longest, devices)
    sequences, pool_tokens = pool_size(cfg, run.sizes, longest, devices)
    rope = model.variants[0].rope
    assert rope, "a family that the engine has without rope"
    return {
        "model_path": str(run.folder.resolve()),
        "dtype": str(run.rollout.compute.dtype),
        # transformers 5 keeps rope_theta where the engine does not look for it.
        "json_model_override_args": json.dumps({"rope_theta": rope.theta}),
        "device": platform,
        "tp_size": len(devices),
        "mem_fraction_static": cfg.sglang_jax_mem_fraction_static,
        "max_total_tokens": pool_tokens,
        "context_length": cfg.sglang_jax_context_length or context,
        "max_running_requests": sequences,
        "page_size": PAGE_TOKENS[platform],
        # On a CPU the engine cannot decode a batch of one row.
        "precompile_bs_paddings": [2**i for i in range(1, 9)] if platform == "cpu" else None,
        # On a CPU the overlapping schedule overwrites an array that a program still reads.
        "disable_overlap_schedule": platform == "cpu",
        "disable_radix_cache": True,  # it would use keys and values of earlier weights
        "enable_deterministic_sampling": True,  # so that _sample gets the index of each sequence
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
    """An engine on all devices of this process, with the methods of NaiveBackend in sampling.py.

    It is made on the main thread and before the training state, since the engine takes
    SGLANG_JAX_MEM_FRACTION_STATIC of the memory that is free then. It holds weights, keys and
    values only between update_weights and release.
    """

    def __init__(self, run: Run) -> None:
        """Raises UserMistake if the engine cannot compute the run, or has too little memory."""
        from sgl_jax.srt.entrypoints.engine import Engine  # set_up has called import_engine

        self._model, self._stopping = run.learner.compute.model, run.rollout.stopping
        self._compute = run.rollout.compute
        arguments = engine_arguments(run, engine_devices())
        EngineErrorHandler(logging.getLogger("sgl_jax"))
        try:
            self._engine = Engine(**arguments)
            tokens = self._engine.scheduler_info["max_total_num_tokens"]
        except EngineFailed as error:
            if not re.search("mem-fraction-static|pool size is too small", str(error)):
                raise
            tokens = 0
        if tokens < arguments["context_length"]:
            raise UserMistake(
                f"SGLANG_JAX_MEM_FRACTION_STATIC={arguments['mem_fraction_static']} leaves memory "
                f"for {tokens} tokens, and the longest sequence needs "
                f"{arguments['context_length']}; raise it"
            )
        scheduler = self._engine.scheduler_info["scheduler"]
        # It would send the signal about an exception in its thread to the parent of this process.
        scheduler.tp_worker.parent_process = SimpleNamespace(send_signal=raise_on_main_thread)
        self._scheduler = Scheduler(scheduler)
        self._runner = scheduler.tp_worker.worker.model_runner
        self._runner.sample = self._sample
        self._runner.compute_logprobs = lambda logps, tokens: logps  # _sample has computed them
        self._shapes = take_weights(self._runner.model)
        self.release()

    @attribute_oom_to("the rollout's copy of the weights")
    def update_weights(self, params: Params) -> None:
        """Gives the engine these weights, and memory for keys and values.

        Raises UserMistake for a weight of the engine that the trainer does not have.
        """
        self.release()  # MAX_HOURS may have ended a rollout before it did so
        if lora := self._model.lora:
            params, share = merge_adapters(params, lora)
            print(
                f"sglang_jax merged adapters of rank {lora.rank}: {share:.2%} of their matrices' "
                f"numbers differ from the base",
                flush=True,
            )
        model, sync = self._compute.model, sync_weights(self._compute)
        table = getattr(self._runner.model, f"_create_{model_family(model)}_weight_mappings")()
        # arrange_engine_weights frees each array of the copy once the engine has it.
        leaves = arrange_engine_weights(sync(params), model, table, self._shapes)
        self._runner.model_state_leaves = jax.block_until_ready(leaves)
        self._runner.token_to_kv_pool._create_buffers()

    @attribute_oom_to("what the serving engine computes", PASS_SIZES)
    def generate(
        self,
        prompt_ids: np.ndarray,
        prompt_mask: np.ndarray,
        sequence_ids: np.ndarray,
        key: jax.Array,
        sampling: Sampling,
        earlier_tokens: np.ndarray | None = None,
    ) -> Completions:
        """As NaiveBackend.generate, but the log-probabilities are relative to the complete
        vocabulary, without the filters of `sampling`. Raises EngineFailed."""
        assert earlier_tokens is None, "config.py refuses environments with an engine"
        sequences, T = len(sequence_ids), self._stopping.max_length_sample
        prompts = [
            ids[mask > 0].tolist() for ids, mask in zip(prompt_ids, prompt_mask, strict=True)
        ]
        prompts = [ids for ids in prompts for _ in range(sequences // len(prompts))]  # [sequences]
        last_positions = np.array([len(ids) - 1 for ids in prompts], np.int32)  # [sequences]
        replicated = NamedSharding(self._runner.mesh, PartitionSpec())
        key, numbers, positions = jax.device_put((key, sequence_ids, last_positions), replicated)
        self._draw = functools.partial(_draw, key, numbers, positions, sampling=sampling)
        limits = {"max_new_tokens": T, "stop_token_ids": [*self._stopping.stop_ids]}
        request = self._engine.async_generate(
            input_ids=prompts,
            sampling_params=[limits | {"sampling_seed": index} for index in range(sequences)],
            return_logprob=True,
        )
        # A program of all hosts would meet chips that are still in a program of their engine.
        with waiting_for_processes(), self._scheduler.awake(sequences):
            outputs = asyncio.run_coroutine_threadsafe(request, self._engine.loop).result()
        completion_ids = np.full((sequences, T), self._stopping.pad_id, np.int32)
        logps = np.zeros((sequences, T), np.float32)
        lengths = np.array([len(output["output_ids"]) for output in outputs], np.int32)
        for i, output in enumerate(outputs):
            completion_ids[i, : lengths[i]] = output["output_ids"]
            logps[i, : lengths[i]] = [x for x, *_ in output["meta_info"]["output_token_logprobs"]]
        mask = (np.arange(T) < lengths[:, None]).astype(np.int32)  # [sequences, T]
        return Completions(sequence_ids, completion_ids, mask, lengths, logps, lengths)

    def release(self) -> None:
        """Frees the engine's weights, keys and values, until the next update_weights."""
        for buffer in self._runner.token_to_kv_pool.kv_buffer:
            buffer.delete()
        self._runner.model_state_leaves = [*self._shapes.values()]

    def close(self) -> None:
        """Ends the engine's computation and removes its files. Threads that only wait are left."""
        self._scheduler.end()
        self._engine.loop.call_soon_threadsafe(self._engine.loop.stop)
        for name in vars(self._engine.port_args).values():
            if str(name).startswith("ipc://"):
                Path(name.removeprefix("ipc://")).unlink(missing_ok=True)

    def _sample(self, logits_output: Any, metadata: Any) -> tuple[jax.Array, jax.Array, None]:
        """Replaces ModelRunner.sample: the tokens [batch] and their log-probabilities [batch]."""
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
    """The next token [batch] int32 of each sequence, and its log-probability [batch] float32 in the
    softmax over the complete vocabulary.

    sequence_ids: [sequences], their numbers. last_positions: [sequences], of the last token of the
    prompt. logits: [batch, V]. index: [batch], the slot of a sequence in the two arrays above.
    positions: [batch], of the token before the one that is drawn.
    """
    devices = jax.sharding.get_abstract_mesh().shape["tensor"]
    axis = "tensor" if len(index) % devices == 0 else None
    logits = jax.lax.with_sharding_constraint(logits, PartitionSpec(axis)).astype(jnp.float32)
    t = positions - last_positions[index]  # [batch], tokens of the completion so far
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, sequence_ids[index])
    keys = jax.vmap(jax.random.fold_in)(keys, t)  # [batch]
    tokens = draw_tokens(keys, logits, sampling).token
    logps = jax.nn.log_softmax(logits / (sampling.temperature or 1.0))  # [batch, V]
    return tokens, jnp.take_along_axis(logps, tokens[:, None], axis=-1)[:, 0]


# ---- The engine's weights ------------------------------------------------------------------------


def arrange_engine_weights(
    params: Params,
    model: ModelConfig,
    table: Mapping[str, Any],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """The trainer's weights in the engine's order, shapes, dtypes and shardings.

    params: unrolled. table: of the engine, {name in a Hugging Face file: an entry with target_path,
    transpose and kv_head_padding}. shapes: of the engine's weights, by their paths.
    Raises UserMistake if the trainer has other weights than the engine.
    """
    pairs = zip(jax.tree.leaves(param_table(model, "unroll")), jax.tree.leaves(params), strict=True)
    sources = {leaf.name: (leaf, array) for leaf, array in pairs}
    del params, pairs  # only `sources` refers to an array until the engine has it
    names = {table[name].target_path if name in table else name: name for name in sources}
    if different := names.keys() ^ shapes.keys():
        raise UserMistake(
            f"this sglang-jax has other weights than the trainer, such as {min(different)}; "
            f"install sglang-jax==0.1.0rc0"
        )
    leaves = []
    for path, shape in shapes.items():
        entry, (leaf, x) = table[names[path]], sources.pop(names[path])
        head_dim = model.head_dim if entry.kv_head_padding else 0
        leaves.append(put_on_engine(x, shape, entry.transpose != leaf.transposed, head_dim))
    return leaves


def put_on_engine(
    x: jax.Array, wanted: jax.ShapeDtypeStruct, turned: bool, head_dim: int
) -> jax.Array:
    """A weight of the trainer as the engine of this process has it; see arrange. All processes
    have to call it: one program gives all engines their parts, which are taken without a copy."""
    if jax.process_count() == 1:
        return jax.device_put(arrange(x, wanted, turned, head_dim), wanted.sharding)
    assert isinstance(x.sharding, NamedSharding), "a weight of the trainer has no mesh"
    program = program_for_engines(x.sharding.mesh, wanted, turned, head_dim)
    # On a CPU many programs that wait for other processes would use up the threads.
    x = jax.block_until_ready(program(x))
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, wanted.sharding, parts)


def arrange(x: jax.Array, wanted: jax.ShapeDtypeStruct, turned: bool, head_dim: int) -> jax.Array:
    """A weight of the trainer with the shape and the dtype of the engine's. turned: whether the
    engine has [out, in]. head_dim: of keys and values; 0 for other weights."""
    x = x.T if turned else x
    if head_dim:
        # With more devices than kv heads, the engine has copies of each head.
        heads = x.reshape(*x.shape[:-1], -1, head_dim)
        copies = wanted.shape[-1] // x.shape[-1]
        x = jnp.repeat(heads, copies, axis=-2).reshape(wanted.shape)
    return x.astype(wanted.dtype)


@functools.lru_cache
def program_for_engines(
    mesh: Mesh, wanted: jax.ShapeDtypeStruct, turned: bool, head_dim: int
) -> Callable[[jax.Array], jax.Array]:
    """The jitted program that arranges a weight on the trainer's mesh and gives it to the engines
    of all processes. wanted: of one of the engines."""
    engine, shape = wanted.sharding.mesh, wanted.shape
    # The meshes of all engines as one. No weight is split over `process`.
    devices = mesh.devices.reshape(-1, *engine.devices.shape)
    engines = Mesh(devices, ("process", *engine.axis_names))
    last = [*wanted.sharding.spec, *[None] * (len(shape) - len(wanted.sharding.spec))]
    # First the processes get different parts, or each device would hold all of x for a moment.
    first, processes = [*last], len(devices)
    for i, size in enumerate(shape):
        if last[i] is None and size % processes == 0 and "process" not in first:
            first[i] = "process"
    stages = [NamedSharding(engines, PartitionSpec(*axes)) for axes in (first, last)]

    def move(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(arrange(x, wanted, turned, head_dim), stages[0])

    return jax.jit(move, out_shardings=stages[1])


def take_weights(model: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Frees the engine's first weights, and returns {path: shape} of them in the engine's order."""
    from flax import nnx

    state = nnx.split(model)[1]
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    nnx.update(model, shapes)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    leaves = jax.tree.leaves_with_path(shapes)
    return {keystr(path).removesuffix(".value"): shape for path, shape in leaves}


# ---- The engine's threads ------------------------------------------------------------------------


class EngineFailed(jax.errors.JaxRuntimeError):
    """A thread of the engine has ended with an exception, whose traceback is in the message.

    It is an error of jax, because the memory of a device may have run out.
    """


class Scheduler:
    """The engine's scheduler, which sleeps unless a rollout pass waits for it.

    Otherwise it would poll for requests all the time, also while the trainer computes. It gets all
    sequences of a pass at once and in their order, so that each pass is computed in the same way.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._receive = scheduler, scheduler.recv_requests
        self._awake, self._expected = threading.Event(), 0
        self._arrived: list[Any] = []
        scheduler.recv_requests = self._next_requests

    @contextlib.contextmanager
    def awake(self, sequences: int) -> Iterator[None]:
        """Within this context the scheduler works, once this number of sequences has arrived."""
        self._expected = sequences
        self._awake.set()
        try:
            yield
            # The engine starts a program before it knows that the last sequence has ended.
            while self._scheduler.last_batch is not None:
                time.sleep(0.001)
        finally:
            self._awake.clear()

    def end(self) -> None:
        """Ends the scheduler's thread: a thread that computes while Python ends aborts Python."""
        self._scheduler.recv_requests = sys.exit
        self._awake.set()
        for thread in threading.enumerate():
            if thread.name.startswith("sglang::scheduler"):
                thread.join(timeout=5)

    def _next_requests(self) -> list[Any]:
        """Replaces recv_requests of the scheduler, which calls it before each of its programs."""
        self._awake.wait()
        self._arrived += self._receive()
        if not self._arrived or len(self._arrived) < self._expected:
            time.sleep(0.001)
            return []
        arrived, self._arrived, self._expected = self._arrived, [], 0
        return sorted(arrived, key=lambda request: request.sampling_params.sampling_seed)


class EngineErrorHandler(logging.Handler):
    """Raises EngineFailed on the main thread, with the errors that the engine has logged."""

    def __init__(self, logger: logging.Logger) -> None:
        """logger: of the engine, whose threads log an exception before they send SIGQUIT."""
        super().__init__(logging.ERROR)
        self._lines: list[str] = []
        logger.addHandler(self)
        logger.propagate = False  # the exception has the lines
        signal.signal(signal.SIGQUIT, self._raise)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        raise EngineFailed("\n".join(self._lines) or "SIGQUIT")


def raise_on_main_thread(*_: object, **__: object) -> None:
    """Replaces the functions by which the engine's threads would end this process or its parent
    after an exception."""
    os.kill(os.getpid(), signal.SIGQUIT)
