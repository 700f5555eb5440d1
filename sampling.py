"""Prompts -> completions and their sampling log-probabilities, by the device programs of this file.

Dimensions, of a rollout pass over all processes: B sequences; P = B/share prompts, each shared by
`share` consecutive sequences; S+1 padded prompt tokens, T padded completion tokens, V vocabulary,
U places of a support, the tokens that pass the filters.
"""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from infra.chips import attribute_oom_to
from infra.log import progress_bar
from infra.sizes import PASS_SIZES, prompt_share
from model.attention import Cache, map_kv, prompt_rows
from model.layout import TRAIN_BATCH_AXES, concatenate_trees, constrain, local_part, shard_batch
from model.logps import dot
from model.network import Compute, forward, forward_token, split_prefix
from model.next_token import Sampling, draw_tokens, support_size
from model.params import (
    Params,
    arrange_layers,
    combine_params,
    lm_head,
    param_shardings,
    trainable_params,
)

if TYPE_CHECKING:
    from extras.sglang import SglangBackend

STAGES, STAGE_TOKENS = 4, 128  # of decode, see stage_ends


class Stopping(NamedTuple):
    """Where completions end."""

    max_length_sample: int  # T
    stop_ids: tuple[int, ...]  # a completion ends with the first of these; it stays in it
    pad_id: int  # what follows the end of a completion


class Completions(NamedTuple):
    """Completions of this process, on the host: of a pass or of a round, `count` of them."""

    sequence_ids: np.ndarray  # [count] int32, the index of each in its round or its evaluation
    completion_ids: np.ndarray  # [count, T] int32, right-padded
    drawn_mask: np.ndarray  # [count, T] int32, 1 on the tokens that the policy has drawn
    lengths: np.ndarray  # [count] int32 tokens, stop tokens and an environment's tokens included
    sampling_logps: np.ndarray  # [count, T] float32 nats, of the distribution that was sampled
    computed_tokens: np.ndarray  # [count] int32, decoding steps with the sequence in the batch
    support: np.ndarray | None = None  # [count, T, U] int32 ids, -1 in unused places
    cut_tokens: np.ndarray | None = None  # [count] int32, tokens whose support lost ids


class NaiveBackend:
    """ROLLOUT_BACKEND=naive: what samples completions, token ids in and token ids out, with the
    programs of this file on the devices of all processes."""

    def __init__(self, rollout: Compute, stopping: Stopping, drop_ended: bool) -> None:
        """drop_ended: sequences that have ended leave the batch."""
        self._rollout = rollout
        self._stopping = stopping
        self._drop_ended = drop_ended
        self._weights: Params | None = None

    @attribute_oom_to("the copy of the weights that samples")
    def update_weights(self, params: Params) -> None:
        """Takes these weights, before the rollout passes of a step or of an evaluation: copies them
        in the dtype and the layout of the rollout, and waits until they are there."""
        copy = sync_weights(self._rollout)(params)
        copy = combine_params(params, copy) if self._rollout.shares_base else copy
        self._weights = jax.block_until_ready(copy)

    @attribute_oom_to("prefill, decode or drop_sequences", PASS_SIZES)
    def generate(
        self,
        prompt_ids: np.ndarray,
        prompt_mask: np.ndarray,
        sequence_ids: np.ndarray,
        key: jax.Array,
        sampling: Sampling,
        earlier: np.ndarray | None = None,
    ) -> Completions:
        """The completions of one rollout pass, those of a prompt one after the other.

        prompt_ids, prompt_mask: [prompts, S+1] int32, left-padded, each prompt of this process
        once; the mask is 0 on padding. sequence_ids: [count] int32, in ascending order. The random
        bits of a token follow from the key, the sequence's id and the token's index alone, on
        whatever device the sequence is computed. earlier: [count] int32, in a later turn: the
        tokens of the completion that the prompt ends with. They count in the token's index and in
        MAX_LENGTH_SAMPLE, and are not returned again. None: there are no such tokens.
        """
        compute, stopping = self._rollout, self._stopping
        per_prompt = len(sequence_ids) // len(prompt_ids)
        per_shard = len(sequence_ids) * jax.process_count() // compute.layout.batch_shards
        # Of each prompt there are copies for its devices.
        copies = per_prompt // prompt_share(per_prompt, per_shard)
        ids = shard_batch(np.repeat(prompt_ids, copies, axis=0), compute.layout)  # [P, S+1]
        mask = shard_batch(np.repeat(prompt_mask, copies, axis=0), compute.layout)  # [P, S+1]
        prefix = prefill(self._weights, compute, ids, mask)
        # A turn is mostly short, and programs of smaller batches would have to be compiled for it.
        drop = self._drop_ended and earlier is None
        earlier = np.zeros_like(sequence_ids) if earlier is None else earlier
        state = begin(
            compute,
            ids,
            mask,
            prefix,
            shard_batch(sequence_ids, compute.layout),
            shard_batch(earlier, compute.layout),
            key,
            width=stage_ends(stopping.max_length_sample, compute.layer_loop)[0],
            sampling=sampling,
            stopping=stopping,
        )
        parts = decode_all(
            self._weights, compute, state, sampling=sampling, stopping=stopping, drop=drop
        )
        arrays = concatenate_trees(parts)
        order = np.argsort(arrays["sequence_ids"])  # They left the batch in another order.
        arrays = {name: x[order] for name, x in arrays.items()}
        is_drawn = np.arange(stopping.max_length_sample) < arrays["lengths"][:, None]  # [count, T]
        return Completions(drawn_mask=is_drawn.astype(np.int32), **arrays)

    def release(self) -> None:
        """Frees the copy of the weights, until the next update_weights."""
        self._weights = None

    def close(self) -> None:
        """Does nothing; other backends end what they have started."""


Backend: TypeAlias = "NaiveBackend | SglangBackend"  # what samples; both have the same methods


# ---- Copies of the weights -----------------------------------------------------------------------


@functools.lru_cache
def sync_weights(compute: Compute) -> Callable[[Params], Params]:
    """The jitted program that copies Params to the mesh, the dtype and the layer_loop of `compute`,
    such as the rollout's; with a base that is shared, the adapters alone.

    Both meshes have to list the devices in the same order.
    """
    part = trainable_params if compute.shares_base else lambda params: params

    def copy(params: Params) -> Params:
        params = jax.tree.map(lambda x: x.astype(compute.dtype), part(params))
        return arrange_layers(params, compute.layer_loop, compute.dtype)

    shardings = param_shardings(compute.model, compute.layout.mesh, compute.layer_loop)
    return jax.jit(copy, out_shardings=part(shardings))


# ---- Decoding ------------------------------------------------------------------------------------


def decode_all(
    params: Params,
    compute: Compute,
    state: "Decoding",
    *,
    sampling: Sampling,
    stopping: Stopping,
    drop: bool,
) -> list[dict[str, np.ndarray]]:
    """The sequences of this process, in the order in which they leave the batch. There is a dict
    for all that leave together, with their sequence_ids and most arrays of Completions.

    drop: sequences that have ended leave the batch, at the sizes of smaller_batches.
    """
    T, all_left = stopping.max_length_sample, []
    ends = stage_ends(T, compute.layer_loop)
    sizes = smaller_batches(len(state.done) // compute.layout.batch_shards) if drop else []

    def leave(sequence_ids: jax.Array, drawn: dict[str, jax.Array], t: int) -> None:
        arrays = jax.tree.map(local_part, {"sequence_ids": sequence_ids, **drawn})
        count = len(arrays["sequence_ids"])
        all_left.append(arrays | {"computed_tokens": np.full(count, t, np.int32)})

    with progress_bar("decoding", T, "tokens") as bar:
        while True:
            fewest = sizes[0] if sizes else 0
            # decode takes over the memory of the state, so the state has to be there: on a CPU
            # decode would wait forever for a state that did not fit into memory.
            state = jax.block_until_ready(state)
            state = decode(
                params, compute, state, np.int32(fewest), sampling=sampling, stopping=stopping
            )
            t, live = int(state.t), int(state.live)
            bar.update(t - bar.n)
            if live == 0 or t == T:
                leave(state.sequence_ids, state.drawn, t)
                return all_left
            if live <= fewest:
                size = min(size for size in sizes if size >= live)
                sizes = [smaller for smaller in sizes if smaller < size]
                state, sequence_ids, drawn = drop_sequences(compute, state, size=size)
                leave(sequence_ids, drawn, t)
            if t == state.width():
                state = widen(state, end=ends[ends.index(t) + 1])


def stage_ends(T: int, layer_loop: str) -> list[int]:
    """The number of tokens at which each stage of decoding T tokens ends.

    The caches of unrolled layers grow from stage to stage, so that attention reads few places that
    are not written yet. A stacked cache would be in memory twice while it grows. A stage compiles
    its own program, so there are at most STAGES, of STAGE_TOKENS or more.
    """
    stages = max(min(STAGES, T // STAGE_TOKENS), 1) if layer_loop == "unroll" else 1
    return [math.ceil(T * (i + 1) / stages) for i in range(stages)]


def smaller_batches(count: int) -> list[int]:
    """The numbers of sequences to which the `count` of a device may shrink, in descending order.

    For each of them a decode is compiled, with unrolled layers one for each stage in which it runs.
    If the lengths of completions are geometric, 1.2 tokens are computed for each real one.
    """
    shares = (3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16)
    return sorted({math.ceil(count * share) for share in shares} - {count}, reverse=True)


@functools.partial(jax.jit, static_argnames=("compute",))
def prefill(params: Params, compute: Compute, prompt_ids: jax.Array, prompt_mask: jax.Array) -> Any:
    """The KV of the prompts [P, S+1] without their last token, as `forward` returns it."""
    ids, positions, mask = split_prefix(prompt_ids, prompt_mask)
    _, prefix = forward(params, compute, ids, positions, rows=prompt_rows(mask))
    return prefix


class Decoding(NamedTuple):
    """The B sequences that are decoded: first those of a pass, later fewer, see drop_sequences."""

    t: jax.Array  # int32, the tokens of each sequence so far
    live: jax.Array  # int32, the unfinished sequences on the device that has most of them
    key: jax.Array  # of the pass
    sequence_ids: jax.Array  # [B] int32
    earlier: jax.Array  # [B] int32, how many tokens of its completion the prompt ends with
    last_position: jax.Array  # [B] int32, of the prompt's last token
    token: jax.Array  # [B] int32, the newest token, first the prompt's last one
    done: jax.Array  # [B] bool
    # By their names in Completions: completion_ids and sampling_logps [B, T], lengths [B], and
    # with sampling.replay support [B, T, U] and cut_tokens [B].
    drawn: dict[str, jax.Array]
    prompt: Any  # KV of the prompts without their last token: of P, or of one for each sequence
    prompt_mask: jax.Array  # [P or B, S] bool
    completion: Any  # KV of the B sequences

    def width(self) -> int:
        """The tokens for which the completions have room."""
        return jax.tree.leaves(self.completion)[0].shape[-1]


@functools.partial(
    jax.jit, static_argnames=("compute", "width", "sampling", "stopping"), donate_argnames="prefix"
)
def begin(
    compute: Compute,
    prompt_ids: jax.Array,
    prompt_mask: jax.Array,
    prefix: Any,
    sequence_ids: jax.Array,
    earlier: jax.Array,
    key: jax.Array,
    *,
    width: int,
    sampling: Sampling,
    stopping: Stopping,
) -> Decoding:
    """The sequences before their first token. prefix: from prefill. width: of their caches."""
    layout, B, T = compute.layout, sequence_ids.shape[0], stopping.max_length_sample
    share = B // len(prompt_ids)
    *_, prefix_mask = split_prefix(prompt_ids, prompt_mask)
    drawn = {
        "completion_ids": jnp.full((B, T), stopping.pad_id, jnp.int32),
        "sampling_logps": jnp.zeros((B, T)),
        "lengths": jnp.zeros(B, jnp.int32),
    }
    if sampling.replay:
        U = support_size(sampling, compute.model.vocab_size)
        drawn["support"] = jnp.full((B, T, U), -1, jnp.int32)
        drawn["cut_tokens"] = jnp.zeros(B, jnp.int32)
    per_sequence = {
        "sequence_ids": sequence_ids,
        "earlier": earlier,
        "last_position": jnp.repeat(prompt_mask.sum(axis=1) - 1, share),
        "token": jnp.repeat(prompt_ids[:, -1], share),
        "done": earlier >= T,
        "drawn": drawn,
    }
    empty = map_kv(lambda kv: kv.empty(B, width), prefix)
    return Decoding(
        t=jnp.int32(0),
        live=jnp.int32(B // layout.batch_shards),
        key=key,
        **_on_their_devices(per_sequence, compute),
        prompt=prefix,
        prompt_mask=prefix_mask,
        completion=_on_their_devices(empty, compute, _kv_axis(compute)),
    )


@functools.partial(
    jax.jit, static_argnames=("compute", "sampling", "stopping"), donate_argnames="state"
)
def decode(
    params: Params,
    compute: Compute,
    state: Decoding,
    fewest: jax.Array,
    *,
    sampling: Sampling,
    stopping: Stopping,
) -> Decoding:
    """The state once its caches are full, or once no device has more than `fewest` unfinished
    sequences."""
    layout = compute.layout
    sequence_keys = jax.vmap(jax.random.fold_in, (None, 0))(state.key, state.sequence_ids)  # [B]
    head = lm_head(params).astype(compute.dtype)

    def unfinished(carry: Any) -> jax.Array:
        t, live, *_ = carry
        return (t < state.width()) & (live > fewest)

    def next_token(carry: Any) -> Any:
        t, _, token, done, drawn, completion = carry
        cache = Cache(state.prompt, state.prompt_mask, completion, t)
        positions = state.last_position + t  # [B]
        hidden, completion = forward_token(params, compute, token, positions, cache)
        logits = dot(hidden, head, 1, 1)  # [B, V] float32, as the trainer computes them
        # First V is split over tp like the lm_head; then each device gets all V logits of the
        # sequences for which it draws tokens.
        logits = constrain(logits, layout, TRAIN_BATCH_AXES, "tp")
        logits = constrain(logits, layout, layout.batch_axes)
        keys = jax.vmap(jax.random.fold_in)(sequence_keys, state.earlier + t)  # [B]
        token, logp, *drawn_from = draw_tokens(keys, logits, sampling)
        token = jnp.where(done, stopping.pad_id, token)
        ids, logps = drawn["completion_ids"], drawn["sampling_logps"]
        drawn = drawn | {
            "completion_ids": ids.at[:, t].set(token),
            "sampling_logps": logps.at[:, t].set(jnp.where(done, 0.0, logp)),
            "lengths": drawn["lengths"] + ~done,
        }
        if sampling.replay:
            support, was_cut = drawn_from
            drawn["support"] = drawn["support"].at[:, t].set(jnp.where(done[:, None], -1, support))
            drawn["cut_tokens"] += was_cut & ~done
        done = done | jnp.isin(token, jnp.array(stopping.stop_ids))
        done = done | (state.earlier + t + 1 >= stopping.max_length_sample)
        live = (~done).reshape(layout.batch_shards, -1).sum(axis=1).max()
        return t + 1, live, token, done, drawn, completion

    carry = state.t, state.live, state.token, state.done, state.drawn, state.completion
    t, live, token, done, drawn, completion = jax.lax.while_loop(unfinished, next_token, carry)
    token, done, drawn = _on_their_devices((token, done, drawn), compute)
    t, live = (constrain(x, layout) for x in (t, live))
    return state._replace(
        t=t, live=live, token=token, done=done, drawn=drawn, completion=completion
    )


@functools.partial(jax.jit, static_argnames=("compute", "size"))
def drop_sequences(
    compute: Compute, state: Decoding, *, size: int
) -> tuple[Decoding, jax.Array, dict[str, jax.Array]]:
    """`size` sequences of each device, among them all that have not ended; then the sequence_ids
    of the others, and what was drawn for them.

    Each sequence gets a copy of its prompt's keys and values, since the sequences of a prompt leave
    at different times.
    """
    shards = compute.layout.batch_shards
    order = jnp.argsort(state.done.reshape(shards, -1), axis=1, stable=True)  # [shards, sequences]
    kept, left = order[:, :size], order[:, size:]
    of_prompt = kept // (len(state.done) // len(state.prompt_mask))

    def pick(arrays: Any, index: jax.Array, axis: int = 0) -> Any:
        """The sequences at an index [shards, sequences], of each device. axis: their dimension."""
        take = jax.vmap(lambda part, i: jnp.take(part, i, axis, mode="clip"), (axis, 0), axis)

        def of_array(x: jax.Array) -> jax.Array:
            parts = x.reshape(*x.shape[:axis], shards, -1, *x.shape[axis + 1 :])
            return take(parts, index).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

        return _on_their_devices(jax.tree.map(of_array, arrays), compute, axis)

    names = ("sequence_ids", "earlier", "last_position", "token", "done", "drawn")
    smaller = state._replace(
        **pick({name: getattr(state, name) for name in names}, kept),
        prompt=pick(state.prompt, of_prompt, _kv_axis(compute)),
        prompt_mask=pick(state.prompt_mask, of_prompt),
        completion=pick(state.completion, kept, _kv_axis(compute)),
    )
    return smaller, *pick((state.sequence_ids, state.drawn), left)


@functools.partial(jax.jit, static_argnames=("end",))
def widen(state: Decoding, *, end: int) -> Decoding:
    """The state with room for `end` tokens in the caches."""
    return state._replace(completion=map_kv(lambda kv: kv.widen(end), state.completion))


def _on_their_devices(arrays: Any, compute: Compute, axis: int = 0) -> Any:
    """The arrays with their sequences split as attention needs them; constants would lie on every
    device in full. axis: the dimension of the sequences."""
    axes = (*[None] * axis, compute.layout.batch_axes)
    return jax.tree.map(lambda x: constrain(x, compute.layout, *axes), arrays)


def _kv_axis(compute: Compute) -> int:
    """The dimension of the sequences in a KV; that of stacked layers comes first."""
    return int(compute.layer_loop == "scan")
