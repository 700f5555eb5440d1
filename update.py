"""An update: micro_step adds the gradient of a micro-batch to a sum, and train_on_mini_batch runs
it for all micro-batches of a mini-batch and applies the sum with optimizer.py.

Dimensions as in rows.py: X packed rows of S + C slots and Q sequences, T completion tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infra.chips import attribute_oom_to
from infra.sizes import MICRO_SIZES
from loss import MERGE, Objective, policy_loss
from model.attention import PackedRows
from model.blocks import with_key_blocks
from model.layout import gather_processes, local_part, shard_batch, slice_of_process
from model.logps import token_logps
from model.network import ComputeConfig, forward
from model.params import (
    Params,
    arrange_layers,
    combine_params,
    is_unrolled,
    lm_head,
    param_shardings,
    trainable_params,
)
from optimizer import Optimizer, TrainState, optimizer_step
from rows import Batch, MicroBatch, RowLimits, pack, plan_rows

# Prefixes of the metrics that are means over tokens with log-probabilities of the trainer.
COMPUTED_TOKEN_METRICS = ("sampling_logp_difference/", "is_weight/")


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """How a batch becomes updates of the weights."""

    compute: ComputeConfig  # how training computes the model
    objective: Objective
    optimizer: Optimizer
    temperature: float
    limits: RowLimits  # of the rows of a micro-batch
    pad_id: int
    accumulates: bool  # an update may have several micro-batches
    skips_zero_advantages: bool  # sequences of advantage 0 add nothing, and are not computed
    base: Any = None  # Params: the frozen weights of LoRA or a teacher; None: all are trained


def loss_counts(batch: Batch) -> dict[str, Any]:
    """The denominators of policy_loss, by the names of its arguments, counted over all sequences of
    an update: float32 and at least 1."""
    counts = {"num_tokens": batch.completion_mask.sum(), "num_sequences": len(batch.lengths)}
    top_mask = batch.completion_mask if batch.top_mask is None else batch.top_mask
    counts["num_top_tokens"] = top_mask.sum()
    return {name: np.float32(max(count, 1)) for name, count in counts.items()}


@functools.partial(jax.jit, static_argnames=("temperature", "compute"), inline=True)
def compute_logps_and_entropies(
    params: Params, micro_batch: MicroBatch, temperature: float, compute: ComputeConfig
) -> tuple[jax.Array, jax.Array]:
    """The log-probabilities of the completion tokens, and the entropies of the distributions over
    the vocabulary at their positions, both [X*Q, T] float32 nats.

    params: all weights; their layers may be stacked, or arranged by arrange_layers.
    """
    weights = arrange_layers(params, compute.layer_loop, compute.dtype)
    S = micro_batch.ids.shape[1] - micro_batch.targets.shape[1]
    rows = PackedRows(micro_batch.segment_ids, micro_batch.start, S, (), micro_batch.key_blocks)
    hidden, _ = forward(weights, compute, micro_batch.ids, micro_batch.positions, rows=rows)
    row_values = (compute.logps_kernel or token_logps)(
        hidden[:, S:],
        lm_head(weights),
        micro_batch.targets,
        support=micro_batch.support,
        temperature=temperature,
        cap=compute.model.logits_softcap,
        mesh=compute.layout.mesh,
    )  # each [X, C]
    at_slots = jax.vmap(lambda x, slots: x[slots])
    shape = micro_batch.completion_mask.shape
    logps, entropy = (at_slots(x, micro_batch.target_slots).reshape(shape) for x in row_values)
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
    compute: ComputeConfig,
) -> tuple[Params, dict[str, jax.Array]]:
    """The sum of gradients with that of this micro-batch added, and the micro-batch's part of the
    metrics, which merge_metrics merges.

    params: all weights. grad_sum: of the trained weights; None: this micro-batch begins the sum.
    counts: of the entire update, from loss_counts.
    """
    weights = arrange_layers(params, compute.layer_loop, compute.dtype)

    def compute_loss(trained: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
        logps, entropy = compute_logps_and_entropies(
            combine_params(weights, trained), micro_batch, temperature, compute
        )
        old_logps = micro_batch.old_logps  # [X*Q, T], like logps and entropy
        old_logps = jax.lax.stop_gradient(logps) if old_logps is None else old_logps
        advantages = micro_batch.advantages  # [X*Q]
        if micro_batch.teacher_logps is not None:
            teacher_gap = micro_batch.teacher_logps - old_logps  # [X*Q, T]
            advantages = objective.reward_coef * advantages[:, None]
            advantages = advantages + objective.distill_coef * teacher_gap  # [X*Q, T]
        loss, metrics = policy_loss(
            logps,
            old_logps,
            advantages,
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
        if micro_batch.teacher_logps is not None:  # E[log p - log p_teacher] is the reverse KL
            metrics["reverse_kl"] = jnp.where(mask, -teacher_gap, 0.0).sum() / counts["num_tokens"]
        gap = jnp.where(mask, jnp.abs(old_logps - micro_batch.sampling_logps), 0.0)
        metrics["sampling_logp_difference/mean"] = gap.sum() / counts["num_tokens"]
        metrics["sampling_logp_difference/max"] = gap.max()
        return loss, metrics

    grads, metrics = jax.grad(compute_loss, has_aux=True)(trainable_params(weights))
    shardings = param_shardings(compute.model, compute.layout.mesh, compute.layer_loop)
    grads = jax.lax.with_sharding_constraint(grads, trainable_params(shardings))
    return _accumulate(grad_sum, grads), metrics


def _accumulate(grad_sum: Params | None, grads: Params) -> Params:
    """The float32 sum, with stacked layers. grads: with stacked or with unrolled layers."""

    def add(g: Any, total: Any = None) -> Any:
        if not is_unrolled(g):
            return g if total is None else total + g
        if total is None:
            return jax.tree.map(lambda *layers: jnp.stack(layers).astype(jnp.float32), *g)
        for i, layer in reversed(list(enumerate(g))):  # backward reaches the last layer first
            total = jax.tree.map(
                lambda x, y, i=i: jax.lax.dynamic_update_index_in_dim(x, x[i] + y, i, 0),
                total,
                layer,
            )
        return total

    trees = (grads,) if grad_sum is None else (grads, grad_sum)
    return jax.tree.map(add, *trees, is_leaf=is_unrolled)


# ---- A batch, in micro-batches -------------------------------------------------------------------


# If a device runs out of memory here, the error names this program and a smaller size to try.
@attribute_oom_to("compute_logps_and_entropies", MICRO_SIZES)
def compute_batch_logps_and_entropies(
    learner: LearnerConfig, params: Params, batch: Batch
) -> np.ndarray:
    """[2, B, T] float32 nats, on every process: the log-probabilities of the completion tokens, and
    the entropies of the distributions over the vocabulary at their positions. Both are 0 for
    sequences that are not computed, and undefined on padding."""
    logps_and_entropies = np.zeros((2, *batch.completion_ids.shape), np.float32)
    sequences = computed_sequences(batch, learner.skips_zero_advantages)
    micro_batches = pack_to_devices(learner, batch, sequences)
    on_devices = [
        compute_logps_and_entropies(params, micro_batch, learner.temperature, learner.compute)
        for micro_batch in micro_batches
    ]
    for micro_batch, pair in zip(micro_batches, on_devices, strict=True):
        local = jax.tree.map(local_part, (micro_batch.sequence_indices, pair))
        indices, pair_of_all = gather_processes(local)  # [X*Q], and two of [X*Q, T]
        logps_and_entropies[:, indices[indices >= 0]] = np.stack(pair_of_all)[:, indices >= 0]
    return logps_and_entropies


def computed_sequences(batch: Batch, skips_zero_advantages: bool) -> np.ndarray:
    """The indices of the sequences that an update computes: those with a token in the loss and, if
    zero advantages are skipped, with an advantage that is not 0."""
    is_computed = batch.completion_mask.any(axis=1)  # [B]
    if skips_zero_advantages:  # Sequences with NaN are computed, because a metric must show it.
        is_finite = np.isfinite(batch.sampling_logps).all(axis=1)
        is_computed &= (batch.advantages != 0) | ~is_finite
    return np.flatnonzero(is_computed)


def pack_to_devices(
    learner: LearnerConfig, batch: Batch, sequences: np.ndarray
) -> list[MicroBatch]:
    """The rows of each micro-step of an update, on the devices. sequences: indices in the batch."""
    micro_steps, shape = plan_rows(batch, sequences, learner.limits)
    packed = [pack(batch, slice_of_process(rows), shape, learner.pad_id) for rows in micro_steps]
    layout = learner.compute.layout
    return [shard_batch(x, layout) for x in with_key_blocks(packed, shape.S, layout)]


def train_on_mini_batch(
    learner: LearnerConfig, state: TrainState, mini_batch: Batch, lr: float
) -> tuple[TrainState, dict[str, float]]:
    """The state after one optimizer step on the mini-batch, and the metrics of this update."""
    params = combine_params(learner.base, state.params)
    grads, metrics = accumulate_gradients(learner, params, mini_batch)
    with attribute_oom_to("optimizer_step"):
        state, norms = optimizer_step(
            state,
            grads,
            np.float32(lr),
            metrics["loss"],
            optimizer=learner.optimizer,
            model=learner.compute.model,
        )
    return state, metrics | norms


@attribute_oom_to("micro_step", MICRO_SIZES)
def accumulate_gradients(
    learner: LearnerConfig, params: Params, mini_batch: Batch
) -> tuple[Params, dict[str, float]]:
    """The gradient of the mini-batch, summed over its micro-batches, and the metrics of the update.

    params: all weights. With LoRA the gradient is only of the adapters.
    """
    sequences = computed_sequences(mini_batch, learner.skips_zero_advantages)
    counts = loss_counts(mini_batch)
    micro_batches = pack_to_devices(learner, mini_batch, sequences)
    needs_zeros = learner.accumulates or not micro_batches  # None would be one more program
    grads: Any = jax.tree.map(jnp.zeros_like, trainable_params(params)) if needs_zeros else None
    metrics_of_micro_steps = []
    for micro_batch in micro_batches:
        grads, metrics = micro_step(
            params,
            grads,
            micro_batch,
            counts,
            objective=learner.objective,
            temperature=learner.temperature,
            compute=learner.compute,
        )
        metrics_of_micro_steps.append(metrics)
    # If no sequence is computed, the loss is the only metric.
    metrics = merge_metrics(metrics_of_micro_steps or [{"loss": 0.0}])
    metrics = rescale_to_all_tokens(metrics, mini_batch, sequences)
    per_token = computed_per_token(micro_batches, mini_batch, sequences)
    return grads, metrics | {"throughput/update/computed_per_token": per_token}


# ---- The metrics of an update -------------------------------------------------------------------


def merge_metrics(micro_steps: list[dict[str, jax.Array]]) -> dict[str, float]:
    """The metrics of an update: those of its micro-steps, reduced by loss.MERGE."""
    all_values = jax.device_get(micro_steps)
    names = all_values[0]
    return {name: float(MERGE.get(name, sum)(x[name] for x in all_values)) for name in names}


def rescale_to_all_tokens(
    metrics: dict[str, float], batch: Batch, sequences: np.ndarray
) -> dict[str, float]:
    """The metrics of an update, corrected for the sequences that it does not compute: they add
    nothing to the loss, and none of their ratios is clipped.

    metrics: from merge_metrics; NaN means that there is no value. batch: all sequences of the
    update. sequences: the indices of those that its micro-steps have computed. Means that need the
    trainer's log-probabilities are over their update_token_count tokens. The entropy is minus the
    mean of sampling_logps over all tokens of the loss, an unbiased estimate.
    """
    mask = batch.completion_mask
    counted, computed = mask.sum(), mask[sequences].sum()
    logps = np.where(mask > 0, batch.sampling_logps, 0)
    entropy = -logps.sum(dtype=np.float64) / counted if counted else math.nan
    metrics = metrics | {"entropy": float(entropy), "update_token_count": float(computed)}
    for name in (x for x in metrics if x.startswith(COMPUTED_TOKEN_METRICS) and x not in MERGE):
        metrics[name] *= float(counted / computed)
    if computed < counted and "clip_ratio/low_min" in metrics:
        metrics["clip_ratio/low_min"] = 0.0
    return metrics


def computed_per_token(
    micro_batches: Sequence[MicroBatch], batch: Batch, sequences: np.ndarray
) -> float:
    """The number of slots in all rows (their tokens and padding), divided by the tokens of the
    prompts and completions that they hold.

    sequences: the indices of the sequences in the rows.
    """
    prompts = {batch.prompt_of(i) for i in sequences}
    tokens = sum(len(batch.prompts[p].ids) - 1 for p in prompts) + batch.lengths[sequences].sum()
    slots = sum(micro_batch.ids.size for micro_batch in micro_batches)
    return float(slots / tokens) if tokens else math.nan
