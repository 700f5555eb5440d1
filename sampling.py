"""Prompts -> completions and their sampling log-probabilities, by the device programs of this file.

Dimensions: R sequences of a rollout pass over all processes and r on this process, G = R/share
prompts, each shared by `share` consecutive sequences, S+1 padded prompt tokens, T padded completion
tokens, V vocabulary.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.attention import MASKED, Cache, map_kv
from models.model import Compute, Params, forward, lm_head, prefix_of
from runtime.layout import TRAIN_BATCH_AXES, Layout, constrain, local_part, shard_batch
from runtime.sizes import prompt_share

STAGES, STAGE_TOKENS = 4, 128  # of decode, see stage_ends
# The tokens between two questions to other processes whether all sequences have ended.
ASK_EVERY = 10


class Sampling(NamedTuple):
    """How a token is drawn. The filters apply in this order; each is off at its default."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Stopping(NamedTuple):
    """Where completions end."""

    max_new_tokens: int  # T
    stop_ids: tuple[int, ...]  # a completion ends with the first of these; it stays in it
    pad_id: int  # what follows the end of a completion


class PaddedPrompts(NamedTuple):
    """The prompts of a program: on the host each prompt of this process once, else G prompts."""

    ids: Any  # [n or G, S+1] int32, left-padded
    mask: Any  # [n or G, S+1] int32, 0 on padding


class Completions(NamedTuple):
    """Completions of this process, on the host: r of a pass, b of a step."""

    completion_ids: np.ndarray  # [r or b, T] int32, right-padded
    completion_mask: np.ndarray  # [r or b, T] int32, 1 up to and including the stop token
    sampling_logps: np.ndarray  # [r or b, T] float32 nats, of the distribution that was sampled

    def lengths(self) -> np.ndarray:
        """[r or b] int: the tokens of each completion, its stop token included."""
        return self.completion_mask.sum(axis=1)

    def ids(self) -> list[list[int]]:
        """The token ids of each completion, its stop token included."""
        padded = zip(self.completion_ids.tolist(), self.lengths(), strict=True)
        return [ids[:length] for ids, length in padded]

    def texts(self, tokenizer: Any) -> list[str]:
        """The text of each completion, without its stop token and other special tokens."""
        return tokenizer.batch_decode(self.ids(), skip_special_tokens=True)

    def last_ids(self) -> np.ndarray:
        """[r or b] int32: the last token of each completion: a stop token, or it was cut off."""
        return np.take_along_axis(self.completion_ids, self.lengths()[:, None] - 1, axis=1)[:, 0]


def generate(
    params: Params,
    compute: Compute,
    prompts: PaddedPrompts,
    sequence_ids: np.ndarray,
    key: jax.Array,
    *,
    sampling: Sampling,
    stopping: Stopping,
) -> Completions:
    """The completions of one rollout pass, those of a prompt one after the other.

    prompts: of this process, each once. sequence_ids: [r] int32, the numbers of this process's
    sequences. What a sequence draws follows from (key, sequence id, token number)
    alone, on whatever device it runs.
    """
    layout, per_prompt = compute.layout, len(sequence_ids) // len(prompts.ids)
    per_shard = len(sequence_ids) * jax.process_count() // layout.batch_shards
    copies = per_prompt // prompt_share(per_prompt, per_shard)  # of each prompt, for its devices
    prompts = PaddedPrompts(*(shard_batch(np.repeat(x, copies, axis=0), layout) for x in prompts))
    prefix = prefill(params, compute, prompts)
    ids, logps, lengths = decode(
        params,
        compute,
        prompts,
        prefix,
        shard_batch(sequence_ids, layout),
        key,
        sampling=sampling,
        stopping=stopping,
    )
    mask = np.arange(stopping.max_new_tokens) < local_part(lengths)[:, None]  # [r, T]
    return Completions(local_part(ids), mask.astype(np.int32), local_part(logps))


@functools.partial(jax.jit, static_argnames=("compute",))
def prefill(params: Params, compute: Compute, prompts: PaddedPrompts) -> Any:
    """The KV of the prompts without their last token, as `forward` returns it."""
    ids, positions, mask = prefix_of(*prompts)
    _, prefix = forward(params, compute, ids, positions, prompt_mask=mask)
    return prefix


@functools.partial(jax.jit, static_argnames=("compute", "sampling", "stopping"))
def decode(
    params: Params,
    compute: Compute,
    prompts: PaddedPrompts,
    prefix: Any,
    sequence_ids: jax.Array,
    key: jax.Array,
    *,
    sampling: Sampling,
    stopping: Stopping,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """completion_ids [R, T], sampling_logps [R, T], lengths [R], once every sequence has ended.

    prefix: from prefill. The caches of unrolled layers grow in stages, so that attention reads few
    places that are not written yet. A stacked cache would be in memory twice while it grows.
    """
    R, T, layout = sequence_ids.shape[0], stopping.max_new_tokens, compute.layout
    share = R // len(prompts.ids)
    *_, prefix_mask = prefix_of(*prompts)
    last_position = jnp.repeat(prompts.mask.sum(axis=1) - 1, share)  # [R]
    sequence_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, sequence_ids)  # [R]

    def unfinished(end: int, state: Any) -> jax.Array:
        t, _, done, *_ = state
        return (t < end) & ~done.all()

    def next_tokens(end: int, state: Any) -> Any:
        last = jnp.minimum(state[0] + ASK_EVERY, end)
        return jax.lax.while_loop(lambda state: state[0] < last, next_token, state)

    def next_token(state: Any) -> Any:
        t, token, done, ids, logps, lengths, completion = state
        hidden, completion = forward(
            params,
            compute,
            token[:, None],
            (last_position + t)[:, None],
            cache=Cache(prefix, prefix_mask, completion, t),
        )
        head = lm_head(params).astype(compute.dtype)
        logits = jnp.einsum(
            "rd,vd->rv", hidden[:, 0], head, preferred_element_type=jnp.float32
        )  # [R, V]
        if layout is not None:
            # First V is split over tp like the lm_head; then each device gets all V logits of the
            # sequences for which it draws tokens.
            logits = constrain(logits, layout, TRAIN_BATCH_AXES, "tp")
            logits = constrain(logits, layout, layout.batch_axes)
        keys = jax.vmap(jax.random.fold_in, (0, None))(sequence_keys, t)  # [R]
        token, logp = draw_tokens(keys, logits, sampling)
        token = jnp.where(done, stopping.pad_id, token)
        ids = ids.at[:, t].set(token)
        logps = logps.at[:, t].set(jnp.where(done, 0.0, logp))
        lengths = lengths + ~done
        done = done | jnp.isin(token, jnp.array(stopping.stop_ids))
        return t + 1, token, done, ids, logps, lengths, completion

    ends = stage_ends(T) if compute.layer_loop == "unroll" else [T]
    completion = map_kv(lambda kv: kv.empty(R, ends[0]), prefix)
    last_token = jnp.repeat(prompts.ids[:, -1], share)  # [R]
    ids, logps = jnp.full((R, T), stopping.pad_id, jnp.int32), jnp.zeros((R, T), jnp.float32)
    lengths, done = jnp.zeros(R, jnp.int32), jnp.zeros(R, bool)
    state = (0, last_token, done, ids, logps, lengths, completion)
    for end in ends:
        *rest, completion = state
        completion = map_kv(lambda kv, end=end: kv.widen(end), completion)
        body = functools.partial(next_tokens, end) if _asking_is_slow(layout) else next_token
        unfinished_stage = functools.partial(unfinished, end)
        state = jax.lax.while_loop(unfinished_stage, body, (*rest, completion))
    _, _, _, ids, logps, lengths, _ = state
    return ids, logps, lengths


def _asking_is_slow(layout: Layout | None) -> bool:
    """True if the devices belong to several processes, and no links of a TPU join them."""
    devices = [] if layout is None else [*layout.mesh.devices.flat]
    return len({d.process_index for d in devices}) > 1 and devices[0].platform != "tpu"


def stage_ends(T: int) -> list[int]:
    """The number of tokens at which each stage of decoding T tokens ends.

    A stage compiles its own loop, so there are at most STAGES, of STAGE_TOKENS or more.
    """
    stages = max(min(STAGES, T // STAGE_TOKENS), 1)
    return [math.ceil(T * (i + 1) / stages) for i in range(stages)]


# ---- One token -----------------------------------------------------------------------------------


def draw_tokens(
    keys: jax.Array, logits: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """A token [R] int32 for each sequence, and its log-probability [R] float32 as it was drawn.

    keys: [R], one for each sequence. logits: [R, V] float32. A greedy token gets its
    log-probability at temperature 1.
    """
    if sampling.temperature == 0:
        token, logsumexp = jnp.argmax(logits, axis=-1), jax.nn.logsumexp(logits, axis=-1)
    else:
        logits = filter_logits(logits / sampling.temperature, sampling)
        token, logsumexp = jax.vmap(_categorical)(keys, logits)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token.astype(jnp.int32), chosen - logsumexp


def _categorical(key: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One index of logits [V], and their logsumexp.

    It draws a block of about sqrt(V) tokens, then a token in the block. The distribution is that of
    jax.random.categorical, with 2 sqrt(V) random numbers instead of V. The logsumexp comes from
    those of the blocks, so that the logits are read less often.
    """
    V = logits.shape[0]
    width = 2 ** math.ceil(math.log2(V) / 2)
    blocks = jnp.pad(logits, (0, -V % width), constant_values=MASKED).reshape(-1, width)
    block_key, token_key = jax.random.split(key)
    of_blocks = jax.nn.logsumexp(blocks, axis=-1)
    block = jax.random.categorical(block_key, of_blocks)
    token = block * width + jax.random.categorical(token_key, blocks[block])
    return token, jax.nn.logsumexp(of_blocks)


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """logits [R, V] with the tokens masked that top-k, top-p and min-p drop.

    logits: already divided by the temperature. A token that ties with the last token that is kept
    is kept too.
    """
    candidates = logits  # [R, n], for the last token that top-p keeps
    if 0 < sampling.top_k < logits.shape[-1]:
        candidates = _largest(logits, sampling.top_k)
        # XLA compiles the minimum to a fast top_k, and the last of the candidates to a full sort.
        kth = candidates.min(axis=-1, keepdims=True)
        logits = jnp.where(logits < kth, MASKED, logits)
    if sampling.top_p < 1:
        # Tokens that tie with the k-th are missing in the candidates, but not in the mass. If top-p
        # needs their mass, it keeps them all: no candidate is the last, and the floor is -inf.
        highest = logits.max(axis=-1, keepdims=True)
        mass = jnp.exp(logits - highest).sum(axis=-1, keepdims=True)
        floor = _weighted_floor(candidates, jnp.exp(candidates - highest), sampling.top_p * mass)
        logits = jnp.where(logits < floor, MASKED, logits)
    if sampling.min_p > 0:
        floor = jnp.max(logits, axis=-1, keepdims=True) + math.log(sampling.min_p)
        logits = jnp.where(logits < floor, MASKED, logits)
    return logits


def _largest(logits: jax.Array, k: int) -> jax.Array:
    """The k largest of logits [R, V]. They lie in the k blocks with the largest maxima."""
    R, V = logits.shape
    width = 128  # the lanes of a TPU
    if k * width < V / 2:
        blocks = jnp.pad(logits, ((0, 0), (0, -V % width)), constant_values=-jnp.inf)
        blocks = blocks.reshape(R, -1, width)
        _, places = jax.lax.top_k(blocks.max(axis=-1), k)  # [R, k]
        logits = jnp.take_along_axis(blocks, places[..., None], axis=1).reshape(R, -1)
    return jax.lax.top_k(logits, k)[0]


def _weighted_floor(values: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """The highest floor [R, 1] such that the values [R, n] at or above it weigh at least `limit`.

    The floor is one of the values, or -inf if all values together weigh less. It needs no sort of
    the values: each of 16 passes finds the next two of its 32 bits.
    """

    def add_bits(i: jax.Array, found: jax.Array) -> jax.Array:
        unit = jnp.uint32(1) << (30 - 2 * i).astype(jnp.uint32)
        above = [jnp.where(values >= _float_at(found + n * unit), weights, 0) for n in (1, 2, 3)]
        return found + unit * sum(w.sum(axis=-1, keepdims=True) >= limit for w in above)

    found = jax.lax.fori_loop(0, 16, add_bits, jnp.zeros(limit.shape, jnp.uint32))
    return jnp.where(found == 0, -jnp.inf, _float_at(found))


def _float_at(place: jax.Array) -> jax.Array:
    """The float32 at a place, a uint32, in the ascending order of all float32."""
    bits = jnp.where(place >> 31 == 1, place ^ jnp.uint32(1 << 31), ~place)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
