"""The training state, the arrays of a micro-batch, and the jitted programs of an update: micro_step
adds the gradient of one micro-batch, optimizer_step applies the sum.

Dimensions: X packed rows of a micro-batch over all devices, t = S + C tokens of a row: S places for
prompts and C for completions; n places for sequences in a row, R = X*n of them, T tokens of the
longest completion, padded; B sequences of a batch; U ids of a support.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data import pad_prompts
from loss import Objective, policy_loss
from models.attention import PackedRows
from models.logps import token_logps
from models.model import (
    Compute,
    ModelConfig,
    Params,
    abstract_params,
    arrange_layers,
    forward,
    lm_head,
    param_shardings,
    param_table,
)
from runtime.layout import gather_processes, local_part
from runtime.packing import Batch


@flax.struct.dataclass
class TrainState:
    """All that an optimizer step changes."""

    params: Params
    opt_state: Any


class MicroBatch(NamedTuple):
    """The sequences of one micro-step, in packed rows; see runtime/packing.py."""

    # [X, t] int32, what is fed: S places for prompts without their last tokens, then C places for
    # completions, each behind the last token of its prompt.
    ids: jax.Array
    positions: jax.Array  # [X, t] int32, of a token in its sequence
    prompt: jax.Array  # [X, t] int32, the number of the token's prompt in the row; -1: padding
    start: jax.Array  # [X, t] int32, where in the row the token's prompt or completion begins
    targets: jax.Array  # [X, C] int32, the completion token that follows each that is fed
    places: jax.Array  # [X, n, T] int32, where among the C places a sequence's tokens are
    sequences: jax.Array  # [R] int32, the number of each sequence in its batch; -1: no sequence
    completion_mask: jax.Array  # [R, T] int32, 1 on the tokens that count
    sampling_logps: jax.Array  # [R, T] float32 nats
    advantages: jax.Array  # [R] float32
    old_logps: jax.Array | None = None  # [R, T] float32 nats; None: logps, so that the ratio is 1
    ref_logps: jax.Array | None = None  # [R, T] float32 nats; None: no reference
    top_mask: jax.Array | None = None  # [R, T] int32, 1 where the policy learns; None: everywhere
    # [X, C, U] int32, the tokens that could be drawn, -1 in unused places; log-probabilities are
    # relative to them. None: to the complete vocabulary.
    support: jax.Array | None = None


def counts_of(batch: Batch) -> dict[str, np.ndarray]:
    """What the sums over an update are divided by, as policy_loss names it; float32, at least 1.

    batch: all sequences of the update.
    """
    counts = {"num_tokens": batch.completion_mask.sum(), "num_sequences": len(batch.lengths)}
    top = batch.completion_mask if batch.top_mask is None else batch.top_mask
    counts["num_top_tokens"] = top.sum()
    return {name: np.float32(max(count, 1)) for name, count in counts.items()}


def to_batch(
    values_of: Sequence[jax.Array], micro_batches: Sequence[MicroBatch], batch: Batch
) -> np.ndarray:
    """[B, T] float32 the values [R, T] of each micro-batch, on every process, with one gather for
    each micro-batch. They are 0 for sequences that no micro-batch holds, and mean nothing behind
    the end of a completion."""
    of_batch = np.zeros(batch.completion_ids.shape, np.float32)
    for micro_batch, values in zip(micro_batches, values_of, strict=True):
        local = jax.tree.map(local_part, (micro_batch.sequences, values))
        sequences, values = gather_processes(local)  # [R], [R, T]
        of_batch[sequences[sequences >= 0]] = values[sequences >= 0]
    return of_batch


def computed_per_token(
    micro_batches: Sequence[MicroBatch], batch: Batch, sequences: np.ndarray
) -> float:
    """The places of all rows, divided by the tokens of prompts and completions in them.

    sequences: those of the batch that the rows hold.
    """
    prompts = {batch.prompt_of(i) for i in sequences}
    tokens = sum(len(batch.prompts[p].ids) - 1 for p in prompts) + batch.lengths[sequences].sum()
    places = sum(micro_batch.ids.size for micro_batch in micro_batches)
    return float(places / tokens) if tokens else math.nan


def saved_arrays(batch: Batch) -> dict[str, np.ndarray]:
    """The arrays of a batch by name, and its prompts, left-padded: prompt_ids and prompt_mask."""
    width = max(len(prompt.ids) for prompt in batch.prompts)
    ids, mask = pad_prompts([prompt.ids for prompt in batch.prompts], width, pad_id=0)
    return batch.arrays() | {"prompt_ids": ids, "prompt_mask": mask}


def completion_scores(
    params: Params, micro_batch: MicroBatch, temperature: float, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    """The log-probabilities and the entropies of the completion tokens, both [R, T] float32 nats.

    params: as arrange_layers makes them.
    """
    S = micro_batch.ids.shape[1] - micro_batch.targets.shape[1]
    rows = PackedRows(micro_batch.prompt, micro_batch.start, S, longest=micro_batch.places.shape[2])
    hidden, _ = forward(params, compute, micro_batch.ids, micro_batch.positions, rows=rows)
    scores = token_logps(
        hidden[:, S:],
        lm_head(params),
        micro_batch.targets,
        support=micro_batch.support,
        temperature=temperature,
        mesh=compute.layout.mesh if compute.layout else None,
        kernel=compute.logps_kernel,
    )  # each [X, C]
    at_places = jax.vmap(lambda x, places: x[places])
    logps, entropy = (at_places(x, micro_batch.places) for x in scores)  # [X, n, T]
    shape = micro_batch.completion_mask.shape
    return logps.reshape(shape), entropy.reshape(shape)


@functools.partial(jax.jit, static_argnames=("temperature", "compute"))
def compute_logps_and_entropies(
    params: Params, micro_batch: MicroBatch, temperature: float, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    """The log-probabilities and the entropies of the completion tokens, both [R, T] float32 nats.

    params: the weights as the training state holds them.
    """
    weights = arrange_layers(params, compute.layer_loop, compute.dtype)
    return completion_scores(weights, micro_batch, temperature, compute)


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
) -> tuple[Params, dict[str, jax.Array], jax.Array]:
    """`grad_sum` with the gradient of this micro-batch added, its part of the update's metrics (for
    merge_metrics), and the log-probabilities [R, T] of its tokens.

    grad_sum: None for the first micro-batch of an update that has a single one by its settings.
    counts: of the update, from counts_of.
    """

    def loss_of(weights: Params) -> tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array]]:
        logps, entropy = completion_scores(weights, micro_batch, temperature, compute)  # [R, T]
        now = jax.lax.stop_gradient(logps)
        old_logps = now if micro_batch.old_logps is None else micro_batch.old_logps
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
        return loss, (metrics, now)

    weights = arrange_layers(params, compute.layer_loop, compute.dtype)
    grads, (metrics, logps) = jax.grad(loss_of, has_aux=True)(weights)
    if compute.layout:
        mesh = compute.layout.mesh
        shardings = param_shardings(compute.model, mesh, compute.layer_loop)
        grads = jax.lax.with_sharding_constraint(grads, shardings)
    return _add(grad_sum, grads), metrics, logps


def _add(grad_sum: Params | None, grads: Params) -> Params:
    """The float32 sum, with stacked layers. grads: of a scanned or of an unrolled program."""
    if not isinstance(grads.layers, tuple):
        return grads if grad_sum is None else jax.tree.map(jnp.add, grad_sum, grads)
    if grad_sum is None:
        stacked = jax.tree.map(lambda *g: jnp.stack(g).astype(jnp.float32), *grads.layers)
        return grads.replace(layers=stacked)
    layers = grad_sum.layers
    for i, layer in reversed(list(enumerate(grads.layers))):  # backward makes the last one first
        layers = jax.tree.map(
            lambda total, g, i=i: jax.lax.dynamic_update_index_in_dim(total, total[i] + g, i, 0),
            layers,
            layer,
        )
    rest = jax.tree.map(jnp.add, grad_sum.replace(layers=None), grads.replace(layers=None))
    return rest.replace(layers=layers)


def zero_grads(params: Params) -> Params:
    """Float32 zeros, laid out like params: the grad_sum before the first micro_step."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32, device=x.sharding), params)


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
    table = param_table(model)
    decays = jax.tree.map(lambda leaf: leaf.kind == "matrix", table)
    decay = optax.add_decayed_weights(optimizer.weight_decay, mask=decays)
    return optax.chain(rules[optimizer.name], decay)


def init_state(params: Params, *, optimizer: Optimizer, model: ModelConfig) -> TrainState:
    """The state before the first step; the optimizer's arrays are sharded like the parameters."""
    # This is not jitted, because zeros like a traced parameter would be replicated.
    opt_state = transform(optimizer, model).init(params)
    state = TrainState(params=params, opt_state=opt_state)
    # Scalars are replicated, like the outputs of jit, so that the second call does not compile
    # again.
    replicated = NamedSharding(params.embed.sharding.mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if x.ndim else jnp.zeros_like(x, device=replicated), state)


def abstract_state(model: ModelConfig, mesh: Mesh, optimizer: Optimizer) -> TrainState:
    """Shapes, dtypes and shardings of what init_state makes, on a mesh that need not exist here."""
    params, rule = abstract_params(model, mesh, jnp.float32), transform(optimizer, model)
    replicated = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_utils.tree_map_params(
        rule,
        lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.sharding),
        jax.eval_shape(rule.init, params),
        params,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
    )
    return TrainState(params=params, opt_state=opt_state)


@functools.partial(jax.jit, static_argnames=("optimizer", "model"), donate_argnames=("state",))
def optimizer_step(
    state: TrainState,
    grads: Params,
    lr: jax.Array,
    loss: jax.Array,
    *,
    optimizer: Optimizer,
    model: ModelConfig,
) -> tuple[TrainState, jax.Array]:
    """The state after an update with these summed gradients, and their norm before clipping.

    If the norm or the loss of the update is not finite, the state stays as it is, to the bit.
    """
    norm = optax.tree.norm(grads)
    if optimizer.clip_norm > 0:
        factor = jnp.minimum(1.0, optimizer.clip_norm / (norm + 1e-6))  # as torch and TRL
        grads = jax.tree.map(lambda g: g * factor, grads)
    updates, opt_state = transform(optimizer, model).update(grads, state.opt_state, state.params)
    params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
    updated = TrainState(params=params, opt_state=opt_state)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state), norm


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


# ---- Copies of the weights -----------------------------------------------------------------------


@functools.lru_cache
def sync_weights(
    model: ModelConfig, mesh: Mesh, dtype: Any, layer_loop: str = "scan"
) -> Callable[[Params], Params]:
    """The jitted program that copies Params to a mesh in a dtype, such as the rollout's.

    Both meshes have to list the devices in the same order. The layers of the copy are unrolled if
    layer_loop is "unroll".
    """

    def copy(params: Params) -> Params:
        return arrange_layers(jax.tree.map(lambda x: x.astype(dtype), params), layer_loop, dtype)

    return jax.jit(copy, out_shardings=param_shardings(model, mesh, layer_loop))
