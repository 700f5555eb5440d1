"""The training state and the programs of an update: micro_step adds the gradient of one
micro-batch, optimizer_step applies the sum.

Dimensions as in rows.py: X packed rows of a micro-batch, each with S places for prompts,
C for completions and Q for sequences; T tokens of the longest completion, padded.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from loss import Objective, policy_loss
from model.attention import PackedRows
from model.logps import token_logps
from model.network import Compute, forward
from model.params import (
    ModelConfig,
    Params,
    abstract_params,
    arrange_layers,
    combine_params,
    is_unrolled,
    lm_head,
    param_shardings,
    param_table,
    trainable_params,
)
from rows import Batch, Limits, MicroBatch


@dataclasses.dataclass(frozen=True)
class Learner:
    """What turns a batch into updates of the weights."""

    compute: Compute
    objective: Objective
    optimizer: "Optimizer"
    temperature: float
    limits: Limits  # of packed rows
    pad_id: int
    accumulates: bool  # an update may have several micro-batches
    skips_zero_advantages: bool  # a sequence whose advantage is 0 is not computed
    base: Params | None = None  # the weights that LoRA does not train; None: all are trained


@flax.struct.dataclass
class TrainState:
    """All that an optimizer step changes."""

    params: Params  # with LoRA the adapters alone, see `trained` in model/params.py
    opt_state: Any


def loss_denominators(batch: Batch) -> dict[str, np.ndarray]:
    """What the sums over an update are divided by, as policy_loss names it; float32, at least 1.

    batch: all sequences of the update.
    """
    counts = {"num_tokens": batch.completion_mask.sum(), "num_sequences": len(batch.lengths)}
    top = batch.completion_mask if batch.top_mask is None else batch.top_mask
    counts["num_top_tokens"] = top.sum()
    return {name: np.float32(max(count, 1)) for name, count in counts.items()}


@functools.partial(jax.jit, static_argnames=("temperature", "compute"), inline=True)
def compute_logps_and_entropies(
    params: Params, micro_batch: MicroBatch, temperature: float, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    """The log-probabilities and the entropies of the completion tokens, both [X*Q, T] float32 nats.

    params: as the training state holds them, or as arrange_layers makes them.
    """
    weights = arrange_layers(params, compute.layer_loop, compute.dtype)
    S = micro_batch.ids.shape[1] - micro_batch.targets.shape[1]
    rows = PackedRows(micro_batch.prompt, micro_batch.start, S)
    hidden, _ = forward(weights, compute, micro_batch.ids, micro_batch.positions, rows=rows)
    in_rows = token_logps(
        hidden[:, S:],
        lm_head(weights),
        micro_batch.targets,
        support=micro_batch.support,
        temperature=temperature,
        mesh=compute.layout.mesh,
        kernel=compute.logps_kernel,
    )  # each [X, C]
    at_places = jax.vmap(lambda x, places: x[places])
    shape = micro_batch.completion_mask.shape
    logps, entropy = (at_places(x, micro_batch.places).reshape(shape) for x in in_rows)
    return logps, entropy


@functools.partial(
    jax.jit, static_argnames=("objective", "temperature", "compute"), donate_argnames=("grad_sum",)
)
def micro_step(
    params: Params,
    grad_sum: Params | None,
    micro_batch: MicroBatch,
    counts: dict[str, Any],
    *,
    objective: Objective,
    temperature: float,
    compute: Compute,
) -> tuple[Params, dict[str, jax.Array]]:
    """`grad_sum` with the gradient of this micro-batch added, and its part of the update's metrics,
    for merge_metrics.

    params: all weights. grad_sum: of those that training changes, None for the first micro-batch of
    an update that has a single one by its settings. counts: of the update, from loss_denominators.
    """
    weights = arrange_layers(params, compute.layer_loop, compute.dtype)

    def loss_of(changed: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
        logps, entropy = compute_logps_and_entropies(
            combine_params(weights, changed), micro_batch, temperature, compute
        )
        old_logps = micro_batch.old_logps  # [X*Q, T], like logps and entropy
        old_logps = jax.lax.stop_gradient(logps) if old_logps is None else old_logps
        loss, metrics = policy_loss(
            logps,
            old_logps,
            micro_batch.advantages,
            micro_batch.completion_mask,
            objective=objective,
            **counts,
            ref_logps=micro_batch.ref_logps,
            sampling_logps=micro_batch.sampling_logps,
            entropy=entropy,
            top_mask=micro_batch.top_mask,
        )
        mask = micro_batch.completion_mask.astype(bool)
        if objective.entropy_coef > 0 or micro_batch.top_mask is not None:
            metrics["exact_entropy"] = jnp.where(mask, entropy, 0.0).sum() / counts["num_tokens"]
        gap = jnp.where(mask, jnp.abs(old_logps - micro_batch.sampling_logps), 0.0)
        metrics["sampling_logp_difference/mean"] = gap.sum() / counts["num_tokens"]
        metrics["sampling_logp_difference/max"] = gap.max()
        return loss, metrics

    grads, metrics = jax.grad(loss_of, has_aux=True)(trainable_params(weights))
    shardings = param_shardings(compute.model, compute.layout.mesh, compute.layer_loop)
    grads = jax.lax.with_sharding_constraint(grads, trainable_params(shardings))
    return _add(grad_sum, grads), metrics


def _add(grad_sum: Params | None, grads: Params) -> Params:
    """The float32 sum, with stacked layers. grads: of a scanned or of an unrolled program."""

    def add(g: Any, total: Any = None) -> Any:
        if not is_unrolled(g):
            return g if total is None else total + g
        if total is None:
            return jax.tree.map(lambda *layers: jnp.stack(layers).astype(jnp.float32), *g)
        for i, layer in reversed(list(enumerate(g))):  # backward makes the last one first
            total = jax.tree.map(
                lambda x, y, i=i: jax.lax.dynamic_update_index_in_dim(x, x[i] + y, i, 0),
                total,
                layer,
            )
        return total

    trees = (grads,) if grad_sum is None else (grads, grad_sum)
    return jax.tree.map(add, *trees, is_leaf=is_unrolled)


# ---- The optimizer -------------------------------------------------------------------------------


class Optimizer(NamedTuple):
    """The optimizer's settings; hashable, so that it can be a static argument."""

    name: str = "adamw"  # adamw, lion, sgd
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # the largest global norm of a gradient; 0: no clipping


def transform(optimizer: Optimizer, model: ModelConfig) -> optax.GradientTransformation:
    """The rule of an update without its learning rate.

    Weight decay leaves biases and norms alone, as transformers does.
    """
    rules = {
        "adamw": optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8),
        "lion": optax.scale_by_lion(b1=0.9, b2=0.99),
        "sgd": optax.identity(),
    }
    table = trainable_params(param_table(model))
    decays = jax.tree.map(lambda leaf: leaf.kind not in ("norm", "bias"), table)
    decay = optax.add_decayed_weights(optimizer.weight_decay, mask=decays)
    return optax.chain(rules[optimizer.name], decay)


def init_state(params: Params, *, optimizer: Optimizer, model: ModelConfig) -> TrainState:
    """The state before the first step; the optimizer's arrays are sharded like the parameters."""
    # This is not jitted, because zeros like a traced parameter would be replicated.
    opt_state = transform(optimizer, model).init(params)
    state = TrainState(params=params, opt_state=opt_state)
    # Scalars are replicated, like the outputs of jit, so that the second call does not compile
    # again.
    replicated = NamedSharding(jax.tree.leaves(params)[0].sharding.mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if x.ndim else jnp.zeros_like(x, device=replicated), state)


def abstract_state(model: ModelConfig, mesh: Mesh, optimizer: Optimizer) -> TrainState:
    """Shapes, dtypes and shardings of what init_state makes, on a mesh that need not exist here."""
    params = trainable_params(abstract_params(model, mesh, jnp.float32))
    rule = transform(optimizer, model)
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
    """The state after an update with these summed gradients, and the global norms of the gradients
    before clipping and of the new weights."""
    norm = optax.tree.norm(grads)
    if optimizer.clip_norm > 0:
        factor = jnp.minimum(1.0, optimizer.clip_norm / (norm + 1e-6))  # as torch and TRL
        grads = jax.tree.map(lambda g: g * factor, grads)
    updates, opt_state = transform(optimizer, model).update(grads, state.opt_state, state.params)
    params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
    norms = {"grad_norm": norm, "param_norm": optax.tree.norm(params)}
    return TrainState(params=params, opt_state=opt_state), norms


@functools.partial(jax.jit, static_argnames=("optimizer", "model"))
def compute_norms(
    state: TrainState, grads: Params, lr: jax.Array, optimizer: Optimizer, model: ModelConfig
) -> dict[str, jax.Array]:
    """The norms of next_state. A program that also returned the state would hold the old weights
    and the new ones until it knows the norms."""
    return next_state(state, grads, lr, optimizer, model)[1]


@functools.partial(jax.jit, static_argnames=("optimizer", "model"), donate_argnames=("state",))
def apply_update(
    state: TrainState, grads: Params, lr: jax.Array, optimizer: Optimizer, model: ModelConfig
) -> TrainState:
    """The state of next_state, in the memory of the old one."""
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
    """The new state and the norms of next_state; donates the memory of the old state. If a norm or
    the loss is not finite, the state stays as it is, to the bit."""
    arguments = state, grads, lr, optimizer, model
    norms = {name: float(norm) for name, norm in compute_norms(*arguments).items()}
    is_finite = all(map(math.isfinite, (loss, *norms.values())))
    return apply_update(*arguments) if is_finite else state, norms


def learning_rate(
    step: int, *, peak: float, schedule: str, warmup_ratio: float, decay_steps: int
) -> float:
    """The learning rate of training step `step` (from 0): linear warm-up, then the schedule.

    schedule: constant, warmup_cosine or linear. The last two are above 0 in all steps before
    decay_steps, and 0 from then on.
    """
    warmup = round(warmup_ratio * decay_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = 1.0 if step >= decay_steps else (step - warmup) / (decay_steps - warmup)
    if schedule == "warmup_cosine":
        return peak * (0.5 * (1 + math.cos(math.pi * done)))
    if schedule == "linear":
        return peak * (1 - done)
    if schedule == "constant":
        return peak
    raise ValueError(f"LR_SCHEDULE={schedule!r} is unknown; see learning_rate in update.py")
