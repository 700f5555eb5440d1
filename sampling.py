"""Samples completions: prefill of the prompts, then a decoding loop, as jitted programs.

Dimensions, of a pass over all processes: B sequences, P prompts (and their copies for other shards)
of B/P consecutive sequences each, S+1 padded prompt tokens, T padded completion tokens, V
vocabulary, U ids of a support (the tokens that the filters keep).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from infra.chips import attribute_oom_to
from infra.log import progress_bar
from infra.sizes import PASS_SIZES, completions_per_prompt_in_shard
from model.attention import KV, Cache, map_kv, prompt_rows
from model.layout import TRAIN_BATCH_AXES, concatenate_trees, constrain, local_part, shard_batch
from model.logps import dot, softcap
from model.network import ComputeConfig, forward, forward_token, split_prefix
from model.next_token import Sampling, draw_tokens, support_size
from model.params import (
    Params,
    arrange_layers,
    cast,
    combine_params,
    lm_head,
    param_formats,
    trainable_params,
)

STAGES, STAGE_TOKENS = 4, 128  # of decode, see stage_ends


class Stopping(NamedTuple):
    """What ends a completion in `decode`: a length of T tokens, or a stop token. Stop tokens are
    those that the model's files name (hf.read_stop_ids), and the one that the chat template writes
    after an answer (chat.end_of_turn_id); startup.find_stop_ids joins them."""

    max_length_sample: int  # T
    stop_ids: tuple[int, ...]
    pad_id: int


class Completions(NamedTuple):
    """NumPy arrays of `count` completions of this process, of a pass or of a round."""

    sequence_ids: np.ndarray  # [count] int32, the index of each in its round or its evaluation
    completion_ids: np.ndarray  # [count, T] int32, right-padded
    sampled_mask: np.ndarray  # [count, T] int32, 1 on the tokens that the policy has sampled
    lengths: np.ndarray  # [count] int32 tokens, stop tokens and an environment's tokens included
    sampling_logps: np.ndarray  # [count, T] float32 nats, of the distribution that was sampled
    decode_steps: np.ndarray  # [count] int32, decoding steps with the sequence in the batch
    support: np.ndarray | None = None  # [count, T, U] int32, with record_support; unused: -1
    # [count] int32, tokens for which the filters would keep more than U ids; None: no filters
    cut_tokens: np.ndarray | None = None


class NaiveBackend:
    """ROLLOUT_BACKEND=naive: samples completions with the programs of this file, on the devices of
    all processes; token ids in, token ids out."""

    def __init__(self, compute: ComputeConfig, stopping: Stopping, drop_ended: bool) -> None:
        self._compute = compute
        self._stopping = stopping
        self._drop_ended = drop_ended
        self._weights: Any = None  # Params, from update_weights to release

    @attribute_oom_to("the rollout's copy of the weights")
    def update_weights(self, params: Params) -> None:
        """Copies the weights to the dtype and the layout of the rollout, and waits for it."""
        self.release()  # MAX_HOURS may have ended a rollout before it did so
        copy = sync_weights(self._compute)(params)
        copy = combine_params(params, copy) if self._compute.shares_base else copy
        self._weights = jax.block_until_ready(copy)

    @attribute_oom_to("prefill, decode or drop_sequences", PASS_SIZES)
    def generate(
        self,
        prompt_ids: np.ndarray,
        prompt_mask: np.ndarray,
        sequence_ids: np.ndarray,
        key: jax.Array,
        sampling: Sampling,
        earlier_tokens: np.ndarray | None = None,
    ) -> Completions:
        """The completions of one rollout pass; those of a prompt are adjacent.

        prompt_ids, prompt_mask: [prompts, S+1] int32, left-padded, each prompt of this process
        once; the mask is 0 on padding. sequence_ids: [count] int32, in ascending order. A token's
        random bits depend only on the key, the sequence's id and the token's index, not on the
        device. earlier_tokens: [count] int32, for a later turn: how many tokens of the completion
        the prompt ends with. They count in the token's index and in MAX_LENGTH_SAMPLE, and are
        not returned. None: the first turn.
        """
        compute, stopping = self._compute, self._stopping
        K = len(sequence_ids) // len(prompt_ids)
        per_shard = len(sequence_ids) * jax.process_count() // compute.layout.batch_shards
        # If several shards hold completions of a prompt, each of them gets a copy of the prompt.
        copies = K // completions_per_prompt_in_shard(K, per_shard)
        ids = shard_batch(np.repeat(prompt_ids, copies, axis=0), compute.layout)  # [P, S+1]
        mask = shard_batch(np.repeat(prompt_mask, copies, axis=0), compute.layout)  # [P, S+1]
        prefix = prefill(self._weights, compute, ids, mask)
        # Later turns are short: compiling programs for smaller batches costs more than it saves.
        drop = self._drop_ended and earlier_tokens is None
        earlier_tokens = np.zeros_like(sequence_ids) if earlier_tokens is None else earlier_tokens
        decoding = begin_decoding(
            compute,
            ids,
            mask,
            prefix,
            shard_batch(sequence_ids, compute.layout),
            shard_batch(earlier_tokens, compute.layout),
            key,
            width=stage_ends(stopping.max_length_sample)[0],
            sampling=sampling,
            stopping=stopping,
        )._replace(prompt=map_kv(lambda x: x if isinstance(x, KV) else None, prefix))
        del prefix  # Only the keys and values stay; each completion has a copy of the states.
        parts = decode_all(
            self._weights, compute, decoding, sampling=sampling, stopping=stopping, drop=drop
        )
        arrays = concatenate_trees(parts)
        order = np.argsort(arrays["sequence_ids"])  # sequences were dropped in another order
        arrays = {name: x[order] for name, x in arrays.items()}
        places = np.arange(stopping.max_length_sample)
        is_sampled = places < arrays["lengths"][:, None]  # [count, T]
        return Completions(sampled_mask=is_sampled.astype(np.int32), **arrays)

    def release(self) -> None:
        """Frees the copy of the weights until the next update_weights."""
        self._weights = None

    def close(self) -> None:
        """Does nothing; an engine ends its processes and threads."""


# ---- Copies of the weights -----------------------------------------------------------------------


@functools.lru_cache
def sync_weights(compute: ComputeConfig) -> Callable[[Params], Params]:
    """The jitted program that copies Params to the mesh, the dtype and the layer_loop of `compute`.
    If the rollout shares LoRA's base with training, it copies only the adapters.

    The meshes of training and of the rollout have to list the devices in the same order.
    """
    select = trainable_params if compute.shares_base else lambda params: params

    def copy(params: Params) -> Params:
        params = cast(select(params), compute.dtype)
        return arrange_layers(params, compute.layer_loop, compute.dtype)

    formats = param_formats(compute.model, compute.layout.mesh, compute.layer_loop)
    return jax.jit(copy, out_shardings=select(formats))


# ---- Decoding ------------------------------------------------------------------------------------


def decode_all(
    params: Params,
    compute: ComputeConfig,
    decoding: "Decoding",
    *,
    sampling: Sampling,
    stopping: Stopping,
    drop: bool,
) -> list[dict[str, np.ndarray]]:
    """The finished sequences of this process: one dict each time that sequences leave the batch,
    with the arrays of Completions except sampled_mask.

    drop: sequences that have ended are dropped, and the batch shrinks to sizes of smaller_batches.
    """
    T, finished = stopping.max_length_sample, []
    ends = stage_ends(T)
    sizes = smaller_batches(len(decoding.done) // compute.layout.batch_shards) if drop else []

    def finish(sequence_ids: jax.Array, outputs: dict[str, jax.Array], t: int) -> None:
        arrays = jax.tree.map(local_part, {"sequence_ids": sequence_ids, **outputs})
        count = len(arrays["sequence_ids"])
        finished.append(arrays | {"decode_steps": np.full(count, t, np.int32)})

    with progress_bar("decoding", T, "tokens") as bar:
        while True:
            pause_at = sizes[0] if sizes else 0
            # decode donates its argument. On a CPU, donating an array whose computation ran out of
            # memory hangs; block_until_ready raises the error instead.
            decoding = jax.block_until_ready(decoding)
            decoding = decode(
                params, compute, decoding, np.int32(pause_at), sampling=sampling, stopping=stopping
            )
            t, live = int(decoding.t), int(decoding.live)
            bar.update(t - bar.n)
            if live == 0 or t == T:
                finish(decoding.sequence_ids, decoding.outputs, t)
                return finished
            if live <= pause_at:
                size = min(size for size in sizes if size >= live)
                sizes = [smaller for smaller in sizes if smaller < size]
                decoding, sequence_ids, outputs = drop_sequences(compute, decoding, size=size)
                finish(sequence_ids, outputs, t)
            if t == decoding.width():
                decoding = widen(decoding, end=ends[ends.index(t) + 1])


def stage_ends(T: int) -> list[int]:
    """The number of tokens at which each stage of decoding ends; the last one ends at T.

    The caches grow from stage to stage, so that attention reads few slots that are not written yet;
    slices of caches of T tokens would do so on TPUs, but CPUs would copy them for every token. A
    program is compiled for each stage: there are at most STAGES, of at least STAGE_TOKENS.
    """
    stages = max(min(STAGES, T // STAGE_TOKENS), 1)
    return [math.ceil(T * (i + 1) / stages) for i in range(stages)]


def smaller_batches(count: int) -> list[int]:
    """The sizes to which the `count` sequences of a shard may shrink, in descending order.

    A decode is compiled for each size, and for each stage in which it runs.
    With these sizes and geometric lengths, decoding computes 1.2 tokens for each real one.
    """
    fractions = (3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16)
    return sorted({math.ceil(count * x) for x in fractions} - {count}, reverse=True)


@functools.partial(jax.jit, static_argnames=("compute",))
def prefill(
    params: Params, compute: ComputeConfig, prompt_ids: jax.Array, prompt_mask: jax.Array
) -> Any:
    """The KV and States of the prompts [P, S+1] without their last token, as `forward` returns."""
    ids, positions, mask = split_prefix(prompt_ids, prompt_mask)
    _, prefix = forward(params, compute, ids, positions, rows=prompt_rows(mask))
    return prefix


class Decoding(NamedTuple):
    """B sequences that are decoded: all sequences of a pass, until drop_sequences keeps fewer."""

    t: jax.Array  # int32, the number of decoding steps so far
    live: jax.Array  # int32, the unfinished sequences on the shard that has most of them
    key: jax.Array  # the random key of the rollout
    sequence_ids: jax.Array  # [B] int32
    earlier_tokens: jax.Array  # [B] int32, see NaiveBackend.generate
    last_position: jax.Array  # [B] int32, the position of the prompt's last token
    token: jax.Array  # [B] int32, the newest token; at first the prompt's last token
    done: jax.Array  # [B] bool
    # By their names in Completions: completion_ids and sampling_logps [B, T], lengths [B], with
    # filters cut_tokens [B], and with record_support `support` [B, T, U].
    outputs: dict[str, jax.Array]
    prompt: Any  # KV of the prompts without their last token: of P prompts, or one per sequence
    prompt_mask: jax.Array  # [P or B, S] bool
    completion: Any  # KV and States of the B completions

    def width(self) -> int:
        return jax.tree.leaves(self.completion)[-1].shape[-2]  # of v of the last layer


@functools.partial(jax.jit, static_argnames=("compute", "width", "sampling", "stopping"))
def begin_decoding(
    compute: ComputeConfig,
    prompt_ids: jax.Array,
    prompt_mask: jax.Array,
    prefix: Any,
    sequence_ids: jax.Array,
    earlier_tokens: jax.Array,
    key: jax.Array,
    *,
    width: int,
    sampling: Sampling,
    stopping: Stopping,
) -> Decoding:
    """The Decoding before the first token, without `prompt`, which the caller adds.

    prompt_ids, prompt_mask: [P, S+1] int32. prefix: from prefill. sequence_ids, earlier_tokens:
    [B] int32. width: tokens of the caches.
    """
    layout, B, T = compute.layout, sequence_ids.shape[0], stopping.max_length_sample
    per_prompt = B // len(prompt_ids)  # or fewer than K, if a prompt has several copies
    *_, prefix_mask = split_prefix(prompt_ids, prompt_mask)
    outputs = {
        "completion_ids": jnp.full((B, T), stopping.pad_id, jnp.int32),
        "sampling_logps": jnp.zeros((B, T)),
        "lengths": jnp.zeros(B, jnp.int32),
    }
    if sampling.has_filters():
        outputs["cut_tokens"] = jnp.zeros(B, jnp.int32)
    if sampling.record_support:
        U = support_size(sampling, compute.model.vocab_size)
        outputs["support"] = jnp.full((B, T, U), -1, jnp.int32)
    per_sequence = {
        "sequence_ids": sequence_ids,
        "earlier_tokens": earlier_tokens,
        "last_position": jnp.repeat(prompt_mask.sum(axis=1) - 1, per_prompt),
        "token": jnp.repeat(prompt_ids[:, -1], per_prompt),
        "done": earlier_tokens >= T,
        "outputs": outputs,
    }
    completion = map_kv(lambda kv: kv.begin_completions(B, width), prefix)
    return Decoding(
        t=jnp.int32(0),
        live=jnp.int32(B // layout.batch_shards),
        key=key,
        **_split_sequences(per_sequence, compute),
        prompt=None,
        prompt_mask=prefix_mask,
        completion=_split_sequences(completion, compute, _kv_axis(compute)),
    )


@functools.partial(
    jax.jit, static_argnames=("compute", "sampling", "stopping"), donate_argnames="decoding"
)
def decode(
    params: Params,
    compute: ComputeConfig,
    decoding: Decoding,
    pause_at: jax.Array,
    *,
    sampling: Sampling,
    stopping: Stopping,
) -> Decoding:
    """Decodes until the caches are full, or no shard has more than `pause_at` live sequences."""
    layout = compute.layout
    sequence_ids = decoding.sequence_ids
    sequence_keys = jax.vmap(jax.random.fold_in, (None, 0))(decoding.key, sequence_ids)  # [B]
    head = lm_head(params).astype(compute.dtype)

    def goes_on(decoding: Decoding) -> jax.Array:
        return (decoding.t < decoding.width()) & (decoding.live > pause_at)

    def decode_token(decoding: Decoding) -> Decoding:
        t, done, outputs = decoding.t, decoding.done, decoding.outputs
        cache = Cache(decoding.prompt, decoding.prompt_mask, decoding.completion, t)
        positions = decoding.last_position + t  # [B]
        hidden, completion = forward_token(params, compute, decoding.token, positions, cache)
        logits = softcap(dot(hidden, head, 1, 1), compute.model.logits_softcap)  # [B, V] float32
        # The matmul splits V over tp, like the lm_head. Drawing a token needs all V logits of the
        # sequence on one device.
        logits = constrain(logits, layout, TRAIN_BATCH_AXES, "tp")
        logits = constrain(logits, layout, layout.batch_axes)
        token_indices = decoding.earlier_tokens + t  # [B]
        keys = jax.vmap(jax.random.fold_in)(sequence_keys, token_indices)  # [B]
        drawn = draw_tokens(keys, logits, sampling)
        token = jnp.where(done, stopping.pad_id, drawn.token)
        ids, logps = outputs["completion_ids"], outputs["sampling_logps"]
        outputs = outputs | {
            "completion_ids": ids.at[:, t].set(token),
            "sampling_logps": logps.at[:, t].set(jnp.where(done, 0.0, drawn.logp)),
            "lengths": outputs["lengths"] + ~done,
        }
        if drawn.was_cut is not None:
            outputs["cut_tokens"] += drawn.was_cut & ~done
        if sampling.record_support and drawn.support is not None:
            support = jnp.where(done[:, None], -1, drawn.support)
            outputs["support"] = outputs["support"].at[:, t].set(support)
        done = done | jnp.isin(token, jnp.array(stopping.stop_ids))
        done = done | (token_indices + 1 >= stopping.max_length_sample)
        live = (~done).reshape(layout.batch_shards, -1).sum(axis=1).max()
        return decoding._replace(
            t=t + 1, live=live, token=token, done=done, outputs=outputs, completion=completion
        )

    decoding = jax.lax.while_loop(goes_on, decode_token, decoding)
    t, live = (constrain(x, layout) for x in (decoding.t, decoding.live))
    arrays = decoding.token, decoding.done, decoding.outputs
    token, done, outputs = _split_sequences(arrays, compute)
    return decoding._replace(t=t, live=live, token=token, done=done, outputs=outputs)


@functools.partial(jax.jit, static_argnames=("compute", "size"))
def drop_sequences(
    compute: ComputeConfig, decoding: Decoding, *, size: int
) -> tuple[Decoding, jax.Array, dict[str, jax.Array]]:
    """The Decoding of `size` sequences of each shard, among them all unfinished ones; then the
    sequence_ids and the outputs of the dropped sequences.

    Each sequence that is kept gets a copy of its prompt's keys and values, since the completions of
    a prompt end at different times.
    """
    shards, done = compute.layout.batch_shards, decoding.done
    order = jnp.argsort(done.reshape(shards, -1), axis=1, stable=True)  # [shards, sequences]
    kept, dropped = order[:, :size], order[:, size:]
    prompts = kept // (len(done) // len(decoding.prompt_mask))

    def pick(arrays: Any, indices: jax.Array, axis: int = 0) -> Any:
        """The arrays at indices [shards, sequences] along their axis of sequences or prompts."""
        take = jax.vmap(lambda part, i: jnp.take(part, i, axis, mode="clip"), (axis, 0), axis)

        def pick_from(x: jax.Array) -> jax.Array:
            parts = x.reshape(*x.shape[:axis], shards, -1, *x.shape[axis + 1 :])
            return take(parts, indices).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

        return _split_sequences(jax.tree.map(pick_from, arrays), compute, axis)

    names = ("sequence_ids", "earlier_tokens", "last_position", "token", "done", "outputs")
    smaller = decoding._replace(
        **pick({name: getattr(decoding, name) for name in names}, kept),
        prompt=pick(decoding.prompt, prompts, _kv_axis(compute)),
        prompt_mask=pick(decoding.prompt_mask, prompts),
        completion=pick(decoding.completion, kept, _kv_axis(compute)),
    )
    return smaller, *pick((decoding.sequence_ids, decoding.outputs), dropped)


@functools.partial(jax.jit, static_argnames=("end",))
def widen(decoding: Decoding, *, end: int) -> Decoding:
    return decoding._replace(completion=map_kv(lambda kv: kv.widen(end), decoding.completion))


def _split_sequences(arrays: Any, compute: ComputeConfig, axis: int = 0) -> Any:
    """The arrays with their sequences split over the devices, as attention needs them. Without it
    constants would be replicated. axis: the dimension of the sequences."""
    axes = (*[None] * axis, compute.layout.batch_axes)
    return jax.tree.map(lambda x: constrain(x, compute.layout, *axes), arrays)


def _kv_axis(compute: ComputeConfig) -> int:
    """The dimension of the sequences in a KV; in stacked layers the layers come first."""
    return int(compute.layer_loop == "scan")
