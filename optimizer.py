"""The optimizer: its state, one step of it, and the learning rate.

A step clips the gradient to a global norm, applies one of optax's rules and the weight decay, and
multiplies by the learning rate. If the loss or a norm is not finite, the step is not applied: the
program compute_norms finds out, and apply_update then computes the update again, in place.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.params import ModelConfig, Params, abstract_params, param_table, trainable_params


class Optimizer(NamedTuple):
    """The settings of the optimizer; hashable, so that it can be a static argument."""

    name: str = "adamw"  # adamw, lion, sgd
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # the largest global norm of a gradient; 0: no limit


@flax.struct.dataclass
class TrainState:
    """What an optimizer step changes."""

    params: Params  # the trained weights: with LoRA only the adapters
    opt_state: Any


def make_transformation(optimizer: Optimizer, model: ModelConfig) -> optax.GradientTransformation:
    """The optax transformation of gradients into updates, before the learning rate.

    Weight decay leaves out biases (dt_bias, too) and norms, as transformers does.
    """
    rules = {
        "adamw": optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8),
        "lion": optax.scale_by_lion(b1=0.9, b2=0.99),
        "sgd": optax.identity(),
    }
    table = trainable_params(param_table(model))
    no_decay = ("norm", "bias", "out_norm", "dt_bias")
    decays = jax.tree.map(lambda leaf: leaf.kind not in no_decay, table)
    decay = optax.add_decayed_weights(optimizer.weight_decay, mask=decays)
    clip = optax.clip_by_global_norm(optimizer.clip_norm or math.inf)
    return optax.chain(clip, rules[optimizer.name], decay)


def init_state(params: Params, *, optimizer: Optimizer, model: ModelConfig) -> TrainState:
    """The state before the first step; the optimizer's arrays are sharded like the parameters."""
    # Not jitted, because zeros_like of a traced parameter would lose the parameter's sharding.
    opt_state = make_transformation(optimizer, model).init(params)
    state = TrainState(params=params, opt_state=opt_state)
    # Scalars are replicated, like the outputs of jit, so that the second call does not compile
    # again.
    replicated = NamedSharding(jax.tree.leaves(params)[0].sharding.mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if x.ndim else jnp.zeros_like(x, device=replicated), state)


def abstract_state(model: ModelConfig, mesh: Mesh, optimizer: Optimizer) -> TrainState:
    """The shapes, dtypes and shardings of init_state, on a mesh whose devices need not exist."""
    params = trainable_params(abstract_params(model, mesh, jnp.float32))
    rule = make_transformation(optimizer, model)
    replicated = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_utils.tree_map_params(
        rule,
        lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.sharding),
        jax.eval_shape(rule.init, params),
        params,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
    )
    return TrainState(params=params, opt_state=opt_state)


def next_state(
    state: TrainState, grads: Params, lr: jax.Array, optimizer: Optimizer, model: ModelConfig
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after an update with these gradients, and two global norms: of the gradients before
    clipping, and of the new weights."""
    norm = optax.tree.norm(grads)
    updates, opt_state = make_transformation(optimizer, model).update(
        grads, state.opt_state, state.params
    )
    params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
    norms = {"grad_norm": norm, "param_norm": optax.tree.norm(params)}
    return TrainState(params=params, opt_state=opt_state), norms


@functools.partial(jax.jit, static_argnames=("optimizer", "model"))
def compute_norms(
    state: TrainState, grads: Params, lr: jax.Array, optimizer: Optimizer, model: ModelConfig
) -> dict[str, jax.Array]:
    """The norms of next_state. apply_update computes the update a second time, because a non-finite
    norm must leave the old state intact: a single program that selects the state would need a
    quarter more memory on a TPU with jnp.where, and a third more on eight TPUs with lax.cond."""
    return next_state(state, grads, lr, optimizer, model)[1]


@functools.partial(jax.jit, static_argnames=("optimizer", "model"), donate_argnames=("state",))
def apply_update(
    state: TrainState, grads: Params, lr: jax.Array, optimizer: Optimizer, model: ModelConfig
) -> TrainState:
    """The state of next_state, in the memory of the old state."""
    return next_state(state, grads, lr, optimizer, model)[0]


def optimizer_step(
    state: TrainState,
    grads: Params,
    lr: np.float32,
    loss: float,
    *,
    optimizer: Optimizer,
    model: ModelConfig,
) -> tuple[TrainState, dict[str, float]]:
    """The new state, in the memory of the old one, and the norms of next_state. If a norm or the
    loss is not finite, the update is not applied."""
    on_devices = compute_norms(state, grads, lr, optimizer, model)
    norms = {name: float(norm) for name, norm in on_devices.items()}
    if all(map(math.isfinite, (loss, *norms.values()))):
        state = apply_update(state, grads, lr, optimizer, model)
    return state, norms


class Schedule(NamedTuple):
    """The learning rate over a run: linear warm-up to the peak, then the named decay."""

    peak: float
    name: str  # constant, or warmup_cosine or linear, which reach 0 at decay_steps
    warmup_ratio: float  # warm-up steps / decay_steps
    decay_steps: int


def learning_rate(step: int, schedule: Schedule) -> float:
    """The learning rate of training step `step`, from 0. Raises ValueError for another name."""
    peak, name, warmup_ratio, decay_steps = schedule
    warmup = round(warmup_ratio * decay_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    decayed = 1.0 if step >= decay_steps else (step - warmup) / (decay_steps - warmup)
    if name == "warmup_cosine":
        return peak * (0.5 * (1 + math.cos(math.pi * decayed)))
    if name == "linear":
        return peak * (1 - decayed)
    if name == "constant":
        return peak
    raise ValueError(f"LR_SCHEDULE={name!r} is unknown; see learning_rate in optimizer.py")
