"""The device programs of a run with shapes as arguments, so that they can be compiled, not run.

plan_tpu.py and the tests compile these programs for TPU slices that are not here.

Dimensions: R sequences of a rollout pass or of a micro-batch, over all processes, G = R/share
prompts, each shared by `share` sequences, S prompt tokens without the last, T completion tokens.
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from config import Config
from models.draw import Sampling, support_size
from models.model import Compute, Params, abstract_params
from models.placement import limits_of
from runtime.chips import SLICES
from runtime.mistakes import UserMistake
from runtime.packing import widest
from runtime.sizes import Sizes, eval_questions, prompt_share
from sampling import Stopping, begin, decode, drop_sequences, prefill, smaller_batches
from startup import eval_sampling_of, objective_of, optimizer_of
from update import (
    MicroBatch,
    TrainState,
    abstract_state,
    compute_logps_and_entropies,
    micro_step,
    optimizer_step,
    sync_weights,
)

OF_A_PASS = ("prefill", "decode", "drop_sequences")
ROLLOUT = (*OF_A_PASS, *(f"eval_{name}" for name in OF_A_PASS))
OF_MICRO_BATCHES = ("compute_logps_and_entropies", "micro_step")
PROGRAMS = ("sync_weights", *ROLLOUT, *OF_MICRO_BATCHES, "optimizer_step")


class Plan(NamedTuple):
    """The settings, sizes and layouts that the shapes of a run's programs follow from."""

    cfg: Config
    sizes: Sizes
    training: Compute
    rollout: Compute
    processes: int
    sampling: Sampling
    S: int  # prompt tokens without the last
    T: int  # completion tokens

    def evaluation(self) -> "Plan":
        """The plan with the sizes and the sampling of an evaluation, to plan its rollout pass."""
        samples, local = self.cfg.eval_samples, self.rollout.layout.mesh.size // self.processes
        size = eval_questions(self.sizes, self.cfg.num_pre_q, samples, local)
        return self._replace(
            cfg=dataclasses.replace(self.cfg, num_pre_q=samples),
            sizes=self.sizes._replace(prompt_batch_size=size),
            sampling=eval_sampling_of(self.cfg),
        )

    def of_a_pass(self) -> tuple[int, int]:
        """R and G of a rollout pass."""
        R = self.sizes.prompt_batch_size * self.cfg.num_pre_q * self.processes
        return R, R // prompt_share(self.cfg.num_pre_q, R // self.rollout.layout.batch_shards)


def slice_devices(name: str) -> Sequence[jax.Device]:
    """The devices of a TPU slice that is not here.

    Raises UserMistake if the slice is unknown or libtpu is not installed.
    """
    if name not in SLICES:
        raise UserMistake(f"{name!r} is not a slice known here; these are: {', '.join(SLICES)}")
    if importlib.util.find_spec("libtpu") is None:
        raise UserMistake('the TPU compiler is not installed: pip install "jax[tpu]"')
    # libtpu asks which host this is, and lets only one process load it; compiling needs neither.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v6e-8"}
    jax.config.update("jax_platforms", "cpu")
    (shape, options), chip = SLICES[name], name.partition("-")[0]
    return topologies.get_topology_desc(f"{chip}:{shape}", "tpu", **options).devices


# ---- Arguments -----------------------------------------------------------------------------------


def array(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array on a mesh; axes: the mesh axis or axes that split each dimension."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def train_state(plan: Plan) -> TrainState:
    """The shapes of the training state."""
    training = plan.training
    return abstract_state(training.model, training.layout.mesh, optimizer_of(plan.cfg))


def reference(plan: Plan) -> Params | None:
    """The shapes of the reference's weights; None if BETA is 0."""
    if plan.cfg.beta == 0:
        return None
    training = plan.training
    return abstract_params(training.model, training.layout.mesh, training.dtype)


def rollout_weights(plan: Plan) -> Params:
    """The shapes of the copy of the weights that samples."""
    rollout = plan.rollout
    return abstract_params(rollout.model, rollout.layout.mesh, rollout.dtype, rollout.layer_loop)


def micro_batch(plan: Plan) -> MicroBatch:
    """The shapes of a micro-batch of the longest prompts and completions."""
    cfg, layout, T = plan.cfg, plan.training.layout, plan.T
    limits = limits_of(cfg, plan.sizes, plan.training, plan.processes, plan.S)
    of_device, S, C, n, _ = widest(limits)
    X = layout.batch_shards * of_device

    def batch(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return array(layout.mesh, shape, dtype, layout.batch_axes)

    row, tokens = batch(jnp.int32, X, S + C), batch(jnp.int32, X * n, T)
    logps = batch(jnp.float32, X * n, T)
    U = support_size(plan.sampling, plan.training.model.vocab_size)
    return MicroBatch(
        ids=row,
        positions=row,
        prompt=row,
        start=row,
        targets=batch(jnp.int32, X, C),
        places=batch(jnp.int32, X, n, T),
        sequences=batch(jnp.int32, X * n),
        completion_mask=tokens,
        sampling_logps=logps,
        advantages=batch(jnp.float32, X * n),
        old_logps=logps if plan.sizes.updates_per_step > 1 else None,
        ref_logps=logps if cfg.beta > 0 else None,
        top_mask=tokens if cfg.top_entropy_quantile < 1 else None,
        support=batch(jnp.int32, X, C, U) if plan.sampling.replay else None,
    )


def bytes_of(tree: Any) -> int:
    """The bytes per device of the arrays among the leaves."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]
    shapes = [x.sharding.shard_shape(x.shape) if x.sharding else x.shape for x in arrays]
    sizes = [math.prod(shape) for shape in shapes]
    return sum(n * x.dtype.itemsize for n, x in zip(sizes, arrays, strict=True))


# ---- Programs ------------------------------------------------------------------------------------


def runs(plan: Plan, program: str) -> bool:
    """False if the settings switch the program off."""
    cfg = plan.cfg
    if program in ROLLOUT and cfg.rollout_backend != "naive":  # the engine has programs of its own
        return False
    if program.endswith("drop_sequences"):
        plan = plan.evaluation() if program.startswith("eval_") else plan
        alone = plan.of_a_pass()[0] == plan.rollout.layout.batch_shards
        if alone or not cfg.drops_ended():
            return False
    if program == "compute_logps_and_entropies":
        return cfg.beta > 0 or cfg.scores_policy()
    return not program.startswith("eval_") or cfg.eval_every_steps > 0 or cfg.eval_full_sweep


def call(plan: Plan, program: str) -> tuple[Any, tuple, dict[str, Any]]:
    """The jitted function, its arguments and its static keyword arguments, as in the run."""
    cfg, training, state = plan.cfg, plan.training, train_state(plan)
    model = training.model
    grads = abstract_params(model, training.layout.mesh, jnp.float32)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    if program == "sync_weights":
        rollout = plan.rollout
        sync = sync_weights(model, rollout.layout.mesh, rollout.dtype, rollout.layer_loop)
        return sync, (state.params,), {}
    if program == "compute_logps_and_entropies":
        params = reference(plan) or state.params
        arguments = (params, micro_batch(plan), cfg.temperature, training)
        return compute_logps_and_entropies, arguments, {}
    if program == "micro_step":
        static = {"objective": objective_of(cfg), "temperature": cfg.temperature}
        counts = dict.fromkeys(("num_tokens", "num_sequences", "num_top_tokens"), scalar)
        grad_sum = grads if plan.sizes.grad_accum_steps > 1 else None
        arguments = (state.params, grad_sum, micro_batch(plan), counts)
        return micro_step, arguments, static | {"compute": training}
    if program == "optimizer_step":
        static = {"optimizer": optimizer_of(cfg), "model": model}
        return optimizer_step, (state, grads, scalar, scalar), static
    plan = plan.evaluation() if program.startswith("eval_") else plan
    return call_of_a_pass(plan, program.removeprefix("eval_"))


def call_of_a_pass(plan: Plan, program: str) -> tuple[Any, tuple, dict[str, Any]]:
    """The result of `call` for a program of a rollout pass."""
    rollout, weights = plan.rollout, rollout_weights(plan)
    (mesh, batch_axes), (R, G), S, T = rollout.layout, plan.of_a_pass(), plan.S, plan.T
    prompts = (array(mesh, (G, S + 1), jnp.int32, batch_axes),) * 2  # ids and mask
    if program == "prefill":
        return prefill, (weights, rollout, *prompts), {}

    stacked = (None,) * (rollout.layer_loop == "scan")  # the layers come before the sequences

    def placed(tree: Any, *axes: Any) -> Any:
        """The arrays of the tree on the mesh; a scalar is on every device."""
        return jax.tree.map(lambda x: array(mesh, x.shape, x.dtype, *axes[: x.ndim]), tree)

    static = {"sampling": plan.sampling, "stopping": Stopping(T, stop_ids=(0, 1), pad_id=0)}
    sequence_ids, number = array(mesh, (R,), jnp.int32, batch_axes), array(mesh, (), jnp.int32)
    key, prefix = jax.eval_shape(jax.random.key, 0), prefill.eval_shape(weights, rollout, *prompts)
    state = begin.eval_shape(rollout, *prompts, prefix, sequence_ids, key, width=T, **static)
    state = placed(state, batch_axes)._replace(
        prompt=placed(state.prompt, *stacked, batch_axes),
        completion=placed(state.completion, *stacked, batch_axes),
    )
    if program == "decode":
        return decode, (weights, rollout, state, number, number), static
    # the first time that sequences leave the batch
    sizes = smaller_batches(R // rollout.layout.batch_shards)
    return drop_sequences, (rollout, state), {"size": sizes[0]}


def rest_of_run(plan: Plan, program: str) -> int:
    """The bytes per device of arrays that the run always keeps and the program does not get."""
    state, ref = train_state(plan), bytes_of(reference(plan))
    params, opt_state = bytes_of(state.params), bytes_of(state.opt_state)
    given = {
        "sync_weights": params,
        "compute_logps_and_entropies": ref or params,
        "micro_step": params,
        "optimizer_step": params + opt_state,
    }
    if program.endswith("drop_sequences"):
        given[program] = -bytes_of(rollout_weights(plan))
    return params + opt_state + ref - given.get(program, 0)
