"""The training state and the programs of an update, pure and jitted: micro_step adds one
micro-batch's gradient, optimizer_step applies the sum, sync_weights makes the copy that decodes.

Dimensions: R sequences of a micro-batch over all processes, G = R/s prompt rows each shared by s
consecutive sequences, S+1 padded prompt tokens, T padded completion tokens.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from loss import Objective, policy_loss
from loss_pallas import token_logps
from models.model import (
    ModelConfig,
    Params,
    abstract_params,
    forward,
    lm_head,
    param_shardings,
    param_table,
    prefix_of,
)
from runtime.layout import Layout


@flax.struct.dataclass
class TrainState:
    params: Params
    opt_state: Any
    step: jax.Array  # int32, updates done


class MicroBatch(NamedTuple):
    prompt_ids: jax.Array  # [G, S+1] int32, left-padded
    prompt_mask: jax.Array  # [G, S+1] int32
    completion_ids: jax.Array  # [R, T] int32, right-padded
    completion_mask: jax.Array  # [R, T] int32, 1 on the tokens that count, the stop token included
    sampling_logps: jax.Array  # [R, T] float32 nats
    advantages: jax.Array  # [R] float32
    old_logps: jax.Array | None = None  # [R, T] float32 nats; None: those of this very forward
    ref_logps: jax.Array | None = None  # [R, T] float32 nats; None: no reference
    top_mask: jax.Array | None = None  # [R, T] int32, 1 where the policy learns; None: everywhere


class Counts(NamedTuple):
    """Of the whole step: what its sums are divided by. float32."""

    num_tokens: Any  # completion tokens that count, at least 1
    num_sequences: Any
    num_top_tokens: Any  # those of num_tokens that top_mask keeps, at least 1


class Compute(NamedTuple):
    """What of the settings only speed and memory depend on; hashable, a static argument."""

    config: ModelConfig
    dtype: Any
    layout: Layout | None = None
    remat: str = "none"
    impl: str = "jax"  # of token_logps
    attention_impl: str = "xla"


def completion_logps(
    params: Params, batch: MicroBatch, temperature: float, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each completion token and entropy of its distribution, [R, T] float32."""
    (R, T), (G, width) = batch.completion_ids.shape, batch.prompt_ids.shape
    s, S = R // G, width - 1
    ids, positions, mask = prefix_of(batch.prompt_ids, batch.prompt_mask)  # [G, S]
    last = jnp.repeat(batch.prompt_ids[:, -1:], s, axis=0)  # [R, 1]
    fed = jnp.concatenate([last, batch.completion_ids[:, :-1]], axis=1)  # [R, T]
    start = batch.prompt_mask.sum(axis=1, keepdims=True) - 1  # [G, 1]
    after = jnp.tile(start + jnp.arange(T), (1, s))  # [G, s*T]
    hidden, _ = forward(
        params, compute.config, jnp.concatenate([ids, fed.reshape(G, s * T)], axis=1),
        jnp.concatenate([positions, after], axis=1), prompt_mask=mask, num_sequences=s,
        dtype=compute.dtype, layout=compute.layout, remat=compute.remat,
        attention_impl=compute.attention_impl,
    )  # fmt: skip
    logps, entropy = token_logps(
        hidden[:, S:], lm_head(params), batch.completion_ids.reshape(G, s * T),
        temperature=temperature, impl=compute.impl,
        mesh=compute.layout.mesh if compute.layout else None,
    )  # [G, s*T]  # fmt: skip
    return logps.reshape(R, T), entropy.reshape(R, T)


score_tokens = jax.jit(completion_logps, static_argnames=("temperature", "compute"))


@functools.partial(
    jax.jit, static_argnames=("objective", "temperature", "compute"), donate_argnames=("total",)
)
def micro_step(
    params: Params,
    total: Params,
    batch: MicroBatch,
    counts: Counts,
    *,
    objective: Objective,
    temperature: float,
    compute: Compute,
) -> tuple[Params, dict[str, jax.Array], jax.Array]:
    """`total` with this micro-batch's gradient added, its part of the step's metrics, for
    merge_metrics, and its logps [R, T]."""

    def loss_of(params: Params) -> tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array]]:
        logps, entropy = completion_logps(params, batch, temperature, compute)
        now = jax.lax.stop_gradient(logps)
        old_logps = now if batch.old_logps is None else batch.old_logps
        loss, metrics = policy_loss(
            logps,
            old_logps,
            batch.advantages,
            batch.completion_mask,
            **counts._asdict(),
            ref_logps=batch.ref_logps,
            sampling_logps=batch.sampling_logps,
            entropy=entropy,
            top_mask=batch.top_mask,
            **objective._asdict(),
        )
        mask = batch.completion_mask.astype(bool)
        gap = jnp.where(mask, jnp.abs(old_logps - batch.sampling_logps), 0.0)
        metrics["entropy"] = jnp.where(mask, entropy, 0.0).sum() / counts.num_tokens
        metrics["sampling_logp_difference/mean"] = gap.sum() / counts.num_tokens
        metrics["sampling_logp_difference/max"] = gap.max()
        return loss, (metrics, now)

    grads, (metrics, logps) = jax.grad(loss_of, has_aux=True)(params)
    if compute.layout:
        shardings = param_shardings(compute.config, compute.layout.mesh)
        grads = jax.lax.with_sharding_constraint(grads, shardings)
    return jax.tree.map(jnp.add, total, grads), metrics, logps


def zero_grads(params: Params) -> Params:
    """What the first micro_step adds to: in float32, laid out as params."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32, device=x.sharding), params)


def merge_metrics(parts: list[dict[str, jax.Array]]) -> dict[str, float]:
    """The step's metrics from its micro-steps': extremes of those named so, sums of the others."""
    parts = jax.device_get(parts)
    merge = {name: {"min": min, "max": max}.get(name[-3:], sum) for name in parts[0]}
    return {name: float(merge[name](part[name] for part in parts)) for name in parts[0]}


# ---- The optimizer -------------------------------------------------------------------------------


class Optimizer(NamedTuple):
    """Hashable, a static argument."""

    name: str = "adamw"  # adamw, lion, sgd
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # of the global gradient; 0: no clipping


def transform(optimizer: Optimizer, config: ModelConfig) -> optax.GradientTransformation:
    """The update before the learning rate. Decay skips biases and norms, as transformers does."""
    rules = {
        "adamw": optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8),
        "lion": optax.scale_by_lion(b1=0.9, b2=0.99),
        "sgd": optax.identity(),
    }
    table = param_table(config)
    decays = jax.tree.map(lambda leaf: "norm" not in leaf.name and "bias" not in leaf.name, table)
    decay = optax.add_decayed_weights(optimizer.weight_decay, mask=decays)
    return optax.chain(rules[optimizer.name], decay)


def _everywhere(params: Params) -> NamedSharding:
    """Where a scalar lies that comes out of a program; put there at first, none compiles twice."""
    return NamedSharding(params.embed.sharding.mesh, PartitionSpec())


def init_state(params: Params, *, optimizer: Optimizer, config: ModelConfig) -> TrainState:
    """The state before the first step; the optimizer's arrays are sharded as the parameters."""
    # Not jitted: what is zeros_like a traced parameter lies whole on every device.
    opt_state = transform(optimizer, config).init(params)
    state = TrainState(params=params, opt_state=opt_state, step=jnp.zeros((), jnp.int32))
    scalar = _everywhere(params)
    return jax.tree.map(lambda x: x if x.ndim else jnp.zeros_like(x, device=scalar), state)


def abstract_state(config: ModelConfig, mesh: Mesh, optimizer: Optimizer) -> TrainState:
    """Shapes, dtypes and shardings of what init_state makes, on a mesh that need not be here."""
    params, rule = abstract_params(config, mesh, jnp.float32), transform(optimizer, config)
    everywhere = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_utils.tree_map_params(
        rule, lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.sharding),
        jax.eval_shape(rule.init, params), params,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
    )  # fmt: skip
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return TrainState(params=params, opt_state=opt_state, step=step)


@functools.partial(jax.jit, static_argnames=("optimizer", "config"), donate_argnames=("state",))
def optimizer_step(
    state: TrainState, grads: Params, lr: jax.Array, loss: jax.Array | float = 0.0,
    *, optimizer: Optimizer, config: ModelConfig,
) -> tuple[TrainState, jax.Array]:  # fmt: skip
    """The state after one update with the step's summed gradient, and its norm before clipping.

    Where the norm or the loss is not finite the state stays as it is, to the bit.
    """
    norm = optax.tree.norm(grads)
    if optimizer.clip_norm > 0:
        factor = jnp.minimum(1.0, optimizer.clip_norm / (norm + 1e-6))  # as torch and TRL
        grads = jax.tree.map(lambda g: g * factor, grads)
    updates, opt_state = transform(optimizer, config).update(grads, state.opt_state, state.params)
    params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
    updated = TrainState(params=params, opt_state=opt_state, step=state.step + 1)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state), norm


def learning_rate(
    step: int, *, peak: float, schedule: str, warmup_ratio: float, decay_steps: int
) -> float:
    """The rate of training step `step` (from 0): linear warm-up, then cosine, linear or constant.

    Neither the first nor the last step's rate is 0; from decay_steps on all but constant are.
    """
    warmup = round(warmup_ratio * decay_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = 1.0 if step >= decay_steps else (step - warmup) / (decay_steps - warmup)
    shape = {"warmup_cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done}
    return peak * shape.get(schedule, 1.0)


# ---- The copy that decodes -----------------------------------------------------------------------


def sync_weights(params: Params, *, config: ModelConfig, mesh: Mesh, dtype: Any) -> Params:
    """The parameters in the rollout's dtype, laid out on the rollout's mesh."""
    return sync_program(config, mesh, dtype)(params)


@functools.partial(jax.jit, donate_argnames=("ref_params",))
def mix_weights(ref_params: Params, params: Params, alpha: float) -> Params:
    """The reference moved towards the policy: alpha * params + (1 - alpha) * ref_params."""

    def mix(ref: jax.Array, new: jax.Array) -> jax.Array:
        return (alpha * new + (1 - alpha) * ref.astype(jnp.float32)).astype(ref.dtype)

    return jax.tree.map(mix, ref_params, params)


@functools.lru_cache
def sync_program(config: ModelConfig, mesh: Mesh, dtype: Any) -> Any:
    cast = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
    return jax.jit(cast, out_shardings=param_shardings(config, mesh))
