"""The feed-forward of a mixture of experts: each token passes the k experts that its router
prefers, and in some models one more expert, which all tokens share.

There are three ways to compute them (FORMS), which differ by rounding. tp splits the experts: a
device computes those of its own for all tokens of its part of the batch, and a sum joins them.

Dimensions: n tokens, D model, E experts, k experts of a token, F feed-forward of an expert. A pair
is a token and one of its experts; there are n*k of them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from model.int8 import Int8, matmul
from model.layout import TRAIN_BATCH_AXES
from model.params import Moe

# The most tokens of a device with which all experts are computed for each of them. For about so few
# tokens the products take no longer than reading the experts, of which they need nearly all.
DENSE_TOKENS = 256
SMALLEST_BLOCK, LARGEST_BLOCK = 8, 256  # tokens


class Experts(NamedTuple):
    """The weights of experts, float or Int8."""

    gate: Any  # [E, D, F]
    up: Any  # [E, D, F]
    down: Any  # [E, F, D]


def feed_forward(y: jax.Array, w: Any, compute: Any) -> jax.Array:
    """The output [n, D] of the experts of a layer. y: [n, D], of any tokens, padding too. w,
    compute: the LayerWeights and the ComputeConfig of network.py."""
    model, mesh, base = compute.model, compute.layout.mesh, w.base
    batch = PartitionSpec(TRAIN_BATCH_AXES)
    weights, chosen = route(y, base.router, model.moe)
    tokens = len(y) * mesh.shape["tp"] // mesh.size
    form = choose_form(mesh.devices.flat[0].platform, tokens)
    of_device, specs = partial(_experts_of_device, form), (batch, batch, batch, PartitionSpec("tp"))
    sharded = jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=batch, check_vma=False)
    out = sharded(y, weights, chosen, Experts(base.gate, base.up, base.down))
    if model.moe.shared_width:
        gate, up = (w.project(y, f"shared_{name}", model.lora) for name in ("gate", "up"))
        shared = w.project(jax.nn.silu(gate) * up, "shared_down", model.lora)
        out = out + jax.nn.sigmoid(y @ base.shared_weight) * shared
    return out


def route(y: jax.Array, router: jax.Array, moe: Moe) -> tuple[jax.Array, jax.Array]:
    """The weights [n, k] and the experts [n, k] of the tokens y [n, D]. router: [D, E]. Only the
    weights have a gradient."""
    # In the dtype of the model, as in transformers: more exact logits would choose other experts.
    # Otherwise XLA might keep the float32 sums of the product in some programs.
    dtype = jnp.finfo(y.dtype)
    logits = jax.lax.reduce_precision((y @ router).astype(jnp.float32), dtype.nexp, dtype.nmant)
    probabilities = jax.nn.softmax(logits, axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, moe.top_k)
    if moe.normed:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights.astype(y.dtype), chosen


def choose_form(platform: str, tokens: int) -> str:
    """A name in FORMS. tokens: of a device."""
    # On CPUs and GPUs ragged_dot multiplies every pair with every expert.
    return "dense" if tokens <= DENSE_TOKENS else "ragged" if platform == "tpu" else "blocks"


def _experts_of_device(
    form: str, y: jax.Array, weights: jax.Array, chosen: jax.Array, w: Experts
) -> jax.Array:
    E = len(jax.tree.leaves(w)[0])
    own = chosen - E * jax.lax.axis_index("tp")
    own = jnp.where((own >= 0) & (own < E), own, E)  # E: of another device
    return jax.lax.psum(FORMS[form](y, weights, own, w, E), "tp")


# ---- The forms -----------------------------------------------------------------------------------
# chosen: [n, k] int32, the number of an expert in w, or E for a pair that is not computed.


def dense(y: jax.Array, weights: jax.Array, chosen: jax.Array, w: Experts, E: int) -> jax.Array:
    """Every expert for every token."""
    is_chosen = chosen[..., None] == jnp.arange(E)  # [n, k, E]
    of_expert = jnp.where(is_chosen, weights[..., None], 0).sum(axis=1)  # [n, E]
    out = jax.vmap(_multiply, in_axes=(None, 0))(y, w)  # [E, n, D]
    out = jnp.einsum("end,ne->nd", out, of_expert, preferred_element_type=jnp.float32)
    return out.astype(y.dtype)


def blocks(y: jax.Array, weights: jax.Array, chosen: jax.Array, w: Experts, E: int) -> jax.Array:
    """The pairs of each expert are padded to blocks, and a loop takes these one by one."""
    n, k = chosen.shape
    # A quarter of an expert's tokens, so that the padding is little.
    quarter = max(n * k // (4 * E), 1)
    block = min(max(1 << quarter.bit_length() - 1, SMALLEST_BLOCK), LARGEST_BLOCK)
    num_blocks = -(-n * k // block) + E  # at most, since an expert wastes less than a block
    order, expert, sizes = _sort_pairs(chosen, E)
    blocks_of = -(-sizes // block)
    ends = jnp.cumsum(blocks_of)
    first_slot = (ends - blocks_of) * block - (jnp.cumsum(sizes) - sizes)
    slot = first_slot.at[expert].get(mode="clip") + jnp.arange(n * k)
    slot = jnp.where(expert < E, slot, num_blocks * block)
    token = jnp.full(num_blocks * block, n).at[slot].set(order // k, mode="drop")
    x = y.at[token].get(mode="fill", fill_value=0).reshape(num_blocks, block, -1)
    number = jnp.searchsorted(ends, jnp.arange(num_blocks), side="right")

    # Without the checkpoint backward would keep a copy of an expert for each block.
    @partial(jax.checkpoint, prevent_cse=False)
    def multiply(x_and_number: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, number = x_and_number
        return _multiply(x, jax.tree.map(lambda stack: stack[number], w))

    out = jax.lax.map(multiply, (x, jnp.minimum(number, E - 1))).reshape(num_blocks * block, -1)
    return _add_pairs(out, jnp.zeros_like(slot).at[order].set(slot), weights)


def ragged(y: jax.Array, weights: jax.Array, chosen: jax.Array, w: Experts, E: int) -> jax.Array:
    """The pairs of all experts in products that the platform has for this."""
    order, expert, sizes = _sort_pairs(chosen, E)

    def product(x: jax.Array, stack: jax.Array | Int8) -> jax.Array:
        if not isinstance(stack, Int8):
            return jax.lax.ragged_dot(x, stack, sizes)
        values, in_float32 = stack.values.astype(x.dtype), {"preferred_element_type": jnp.float32}
        out = jax.lax.ragged_dot(x, values, sizes, **in_float32)
        return (out * stack.scale.at[expert].get(mode="clip")).astype(x.dtype)

    @partial(jax.checkpoint, prevent_cse=False)  # else it would keep converted values
    def multiply(x: jax.Array) -> jax.Array:
        return product(jax.nn.silu(product(x, w.gate)) * product(x, w.up), w.down)

    # A TPU writes no rows behind those of its experts, in no product and in no gradient.
    is_own = (expert < E)[:, None]
    out = multiply(jnp.where(is_own, y[order // chosen.shape[1]], 0))
    place = jnp.where(expert < E, jnp.arange(len(order)), len(order))
    return _add_pairs(out, jnp.zeros_like(place).at[order].set(place), weights)


FORMS = {"dense": dense, "blocks": blocks, "ragged": ragged}


def _multiply(x: jax.Array, expert: Experts) -> jax.Array:
    return matmul(jax.nn.silu(matmul(x, expert.gate)) * matmul(x, expert.up), expert.down)


def _sort_pairs(chosen: jax.Array, E: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The pairs in the order of their experts [n*k], their experts, and the pairs of each expert
    [E]."""
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    expert = chosen.reshape(-1)[order]
    return order, expert, jnp.zeros(E, jnp.int32).at[expert].add(1, mode="drop")


def _add_pairs(out: jax.Array, place: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum [n, D] of the outputs of each token's experts. place: [n*k], of a pair in `out`, or
    its length for a pair that is not computed."""
    pairs = out.at[place].get(mode="fill", fill_value=0).reshape(*weights.shape, -1)
    total = jnp.einsum("nkd,nk->nd", pairs, weights, preferred_element_type=jnp.float32)
    return total.astype(out.dtype)
