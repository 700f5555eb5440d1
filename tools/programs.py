"""The device programs of a run with their arguments as shapes: to compile what runs, not to run it.

plan_tpu.py and tests compile these for TPU slices that are not here. Dimensions: B sequences and G
prompt rows of a rollout pass, R sequences of a micro-batch, S prompt tokens, T completion tokens.
"""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import config as settings
from models.attention import KV
from models.model import ModelConfig, Params, abstract_params
from rollout import Sampling, decode, prefill, share
from runtime.layout import Layout
from runtime.sizes import Sizes, eval_questions
from startup import objective_of, optimizer_of
from tools.roofline import SLICES
from update import (
    Compute,
    Counts,
    MicroBatch,
    TrainState,
    abstract_state,
    compute_logps,
    micro_step,
    optimizer_step,
    sync_program,
)

ROLLOUT = ("prefill", "decode", "eval_prefill", "eval_decode")
PROGRAMS = ("sync_weights", *ROLLOUT, "compute_logps", "micro_step", "optimizer_step")


class Plan(NamedTuple):
    """What the shapes of all programs follow from."""

    cfg: settings.Config
    config: ModelConfig
    sizes: Sizes
    compute: Compute  # of training
    rollout: Layout
    processes: int
    sampling: Sampling
    S: int  # prompt tokens but for the last
    T: int  # completion tokens

    def evaluation(self) -> "Plan":
        """With the sizes and the sampling of an evaluation's rollout, for that alone."""
        k, local = self.cfg.eval_samples, self.rollout.mesh.size // self.processes
        size = eval_questions(self.cfg, self.sizes, local)
        return self._replace(
            cfg=dataclasses.replace(self.cfg, num_pre_q=k),
            sizes=self.sizes._replace(prompt_batch_size=size),
            sampling=self.sampling if k > 1 else Sampling(temperature=0.0),
        )

    def rollout_rows(self) -> tuple[int, int]:
        """B and G."""
        B = self.sizes.prompt_batch_size * self.cfg.num_pre_q * self.processes
        return B, B // share(self.cfg.num_pre_q, B // self.rollout.batch_shards)

    def train_rows(self) -> tuple[int, int]:
        """R and G."""
        R = self.sizes.micro_batch_size * self.processes
        return R, R // share(self.cfg.num_pre_q, R // self.compute.layout.batch_shards)


def slice_devices(name: str) -> Sequence[jax.Device]:
    """The devices of a TPU slice that is not here; ValueError for an unknown one or no libtpu."""
    if name not in SLICES:
        raise ValueError(f"{name!r} is not a slice known here; these are: {', '.join(SLICES)}")
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError('the TPU compiler is not installed: pip install "jax[tpu]"')
    # The compiler needs no TPU, nor one for itself alone, but libtpu looks for the host it is on.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v6e-8"}
    jax.config.update("jax_platforms", "cpu")
    return topologies.get_topology_desc(**SLICES[name].topology).devices


# ---- Arguments -----------------------------------------------------------------------------------


def array(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


def train_state(plan: Plan) -> TrainState:
    """As init_state makes it."""
    return abstract_state(plan.config, plan.compute.layout.mesh, optimizer_of(plan.cfg))


def reference(plan: Plan) -> Params | None:
    """The weights that BETA compares with."""
    if plan.cfg.beta == 0:
        return None
    dtype = jnp.float32 if plan.cfg.ref_sync_steps else plan.compute.dtype
    return abstract_params(plan.config, plan.compute.layout.mesh, dtype)


def micro_batch(plan: Plan) -> MicroBatch:
    (R, G), cfg, layout = plan.train_rows(), plan.cfg, plan.compute.layout

    def rows(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return array(layout.mesh, shape, dtype, layout.batch_axes)

    prompt, tokens = rows(jnp.int32, G, plan.S + 1), rows(jnp.int32, R, plan.T)
    logps = rows(jnp.float32, R, plan.T)
    return MicroBatch(
        prompt, prompt, tokens, tokens, logps, rows(jnp.float32, R),
        old_logps=logps if cfg.ppo_epochs > 1 else None,
        ref_logps=logps if cfg.beta > 0 else None,
        top_mask=tokens if cfg.top_entropy_quantile < 1 else None,
    )  # fmt: skip


def bytes_of(tree: Any) -> int:
    """Per device, of the arrays among the leaves."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]
    shapes = [x.sharding.shard_shape(x.shape) if x.sharding else x.shape for x in arrays]
    sizes = [math.prod(shape) for shape in shapes]
    return sum(n * jnp.dtype(x.dtype).itemsize for n, x in zip(sizes, arrays, strict=True))


# ---- Programs ------------------------------------------------------------------------------------


def runs(plan: Plan, program: str) -> bool:
    """False for what the settings switch off."""
    cfg = plan.cfg
    if program == "compute_logps":
        return cfg.beta > 0 or cfg.top_entropy_quantile < 1
    return not program.startswith("eval_") or cfg.eval_every_steps > 0 or cfg.eval_full_sweep


def call(plan: Plan, program: str) -> tuple[Any, tuple, dict[str, Any]]:
    """The jitted function, its arguments and its static ones, as the run calls it."""
    cfg, config, compute, state = plan.cfg, plan.config, plan.compute, train_state(plan)
    grads = abstract_params(config, compute.layout.mesh, jnp.float32)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    if program == "sync_weights":
        return sync_program(config, plan.rollout.mesh, compute.dtype), (state.params,), {}
    if program == "compute_logps":
        scored = reference(plan) or state.params
        return compute_logps, (scored, micro_batch(plan), cfg.temperature, compute), {}
    if program == "micro_step":
        static = {"objective": objective_of(cfg), "temperature": cfg.temperature}
        arguments = (state.params, grads, micro_batch(plan), Counts(scalar, scalar, scalar))
        return micro_step, arguments, static | {"compute": compute}
    if program == "optimizer_step":
        static = {"optimizer": optimizer_of(cfg), "config": config}
        return optimizer_step, (state, grads, scalar, scalar), static
    plan = plan.evaluation() if program.startswith("eval_") else plan
    return prefill_call(plan) if program.endswith("prefill") else decode_call(plan)


def prefill_call(plan: Plan) -> tuple[Any, tuple, dict[str, Any]]:
    (_, G), layout, compute = plan.rollout_rows(), plan.rollout, plan.compute
    weights = abstract_params(plan.config, layout.mesh, compute.dtype)
    prompt = array(layout.mesh, (G, plan.S + 1), jnp.int32, layout.batch_axes)
    static = {"dtype": compute.dtype, "layout": layout, "attention_impl": compute.attention_impl}
    return prefill, (weights, plan.config, prompt, prompt), static


def decode_call(plan: Plan) -> tuple[Any, tuple, dict[str, Any]]:
    _, (weights, config, prompt, _), _ = prefill_call(plan)
    (B, G), (mesh, rows), dtype = plan.rollout_rows(), plan.rollout, plan.compute.dtype
    shape = (config.num_layers, G, config.num_kv_heads, plan.S, config.head_dim)
    kv = array(mesh, shape, dtype, None, rows)
    key = array(mesh, (), jax.eval_shape(lambda: jax.random.key(0)).dtype)
    static = {
        "dtype": dtype, "layout": plan.rollout, "max_new_tokens": plan.T, "stop_ids": (0, 1),
        "pad_id": 0, "sampling": plan.sampling,
    }  # fmt: skip
    sequence_ids = array(mesh, (B,), jnp.int32, rows)
    return decode, (weights, config, KV(kv, kv), prompt, prompt, sequence_ids, key), static


def rest_of_run(plan: Plan, program: str) -> int:
    """Bytes per device of what the run keeps all the time and this program is not given."""
    state, ref = train_state(plan), bytes_of(reference(plan))
    params, opt_state = bytes_of(state.params), bytes_of(state.opt_state)
    given = {
        "sync_weights": params,
        "compute_logps": ref or params,
        "micro_step": params,
        "optimizer_step": params + opt_state,
    }
    return params + opt_state + ref - given.get(program, 0)
