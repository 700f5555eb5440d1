"""Prompts -> completions and their sampling log-probabilities; the `naive` backend: ours.

Dimensions: P prompts, K completions per prompt, B = P*K sequences, G = B/s prompt rows each shared
by s consecutive sequences, S+1 padded prompt tokens, T padded completion tokens, V vocabulary.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.attention import KV, MASKED
from models.model import ModelConfig, Params, forward, lm_head, prefix_of
from runtime.layout import TRAIN_ROWS, Layout, constrain, local_rows, put_rows


class Sampling(NamedTuple):
    """How a token is drawn. Filters apply in this order; each off at its default."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Rollout(NamedTuple):
    """This process's sequences, on the host."""

    completion_ids: np.ndarray  # [B, T] int32, right-padded
    completion_mask: np.ndarray  # [B, T] int32, 1 up to and including the stop token
    sampling_logps: np.ndarray  # [B, T] float32 nats, of the distribution that was sampled

    def lengths(self) -> np.ndarray:
        """[B] tokens of each completion, its stop token included."""
        return self.completion_mask.sum(axis=1)

    def ids(self) -> list[list[int]]:
        """[B] the tokens of each completion, its stop token included."""
        rows = zip(self.completion_ids.tolist(), self.lengths(), strict=True)
        return [row[:n] for row, n in rows]

    def texts(self, tokenizer: Any) -> list[str]:
        """[B] the completions, without their stop token and other special ones."""
        return tokenizer.batch_decode(self.ids(), skip_special_tokens=True)

    def last_ids(self) -> np.ndarray:
        """[B] each completion's last token: a stop token, unless it was cut off."""
        return np.take_along_axis(self.completion_ids, self.lengths()[:, None] - 1, axis=1)[:, 0]


def bucket(length: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96, ... that holds `length`: few shapes, few compiles."""
    power = 16
    while power < length:
        power *= 2
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power


def prompt_width(longest: int, floor: int = 0) -> int:
    """S+1: a bucket for all but the last token, which is fed with the completion, and that one."""
    return bucket(max(floor, longest - 1)) + 1


def share(num_pre_q: int, rows_per_shard: int) -> int:
    """s: how many consecutive sequences of a shard have one prompt row in common."""
    return math.gcd(num_pre_q, rows_per_shard)


def pad_prompts(prompts: list[list[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """prompt_ids and prompt_mask [P, width] int32, left-padded."""
    ids = np.full((len(prompts), width), pad_id, np.int32)
    mask = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def generate(
    params: Params,
    config: ModelConfig,
    prompt_ids: np.ndarray,
    prompt_mask: np.ndarray,
    row_ids: np.ndarray,
    key: jax.Array,
    *,
    num_pre_q: int,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
    sampling: Sampling,
    dtype: Any,
    layout: Layout,
    attention_impl: str = "xla",
) -> Rollout:
    """num_pre_q completions of each of this process's prompts, one group after the other.

    prompt_ids, prompt_mask: [P, S+1] int32, left-padded. row_ids: [B] int32, the sequence's number
    in the whole step: what it draws follows from (key, row id, token) alone, wherever it runs.
    stop_ids: the tokens that end a completion; the one drawn stays in it.
    """
    s = share(num_pre_q, len(row_ids) * jax.process_count() // layout.row_shards)
    shared = functools.partial(np.repeat, repeats=num_pre_q // s, axis=0)  # [G, ...]
    prompt_ids, prompt_mask = (
        put_rows(shared(prompt_ids), layout),
        put_rows(shared(prompt_mask), layout),
    )
    static = {"dtype": dtype, "layout": layout}
    prefix = prefill(
        params, config, prompt_ids, prompt_mask, attention_impl=attention_impl, **static
    )
    ids, logps, lengths = decode(
        params, config, prefix, prompt_ids, prompt_mask, put_rows(row_ids, layout), key,
        max_new_tokens=max_new_tokens, stop_ids=stop_ids, pad_id=pad_id, sampling=sampling,
        **static,
    )  # fmt: skip
    mask = np.arange(max_new_tokens) < local_rows(lengths)[:, None]  # [B, T]
    return Rollout(local_rows(ids), mask.astype(np.int32), local_rows(logps))


@functools.partial(jax.jit, static_argnames=("config", "dtype", "layout", "attention_impl"))
def prefill(
    params: Params, config: ModelConfig, prompt_ids: jax.Array, prompt_mask: jax.Array,
    *, dtype: Any, layout: Layout | None = None, attention_impl: str = "xla",
) -> KV:  # fmt: skip
    """Keys and values [L, G, N, S, h] of the prompts [G, S+1], but for their last token."""
    ids, positions, mask = prefix_of(prompt_ids, prompt_mask)
    _, prefix = forward(
        params, config, ids, positions, prompt_mask=mask, dtype=dtype, layout=layout,
        attention_impl=attention_impl,
    )  # fmt: skip
    return prefix


@functools.partial(
    jax.jit,
    static_argnames=(
        "config", "max_new_tokens", "stop_ids", "pad_id", "sampling", "dtype", "layout"
    ),
)  # fmt: skip
def decode(
    params: Params,
    config: ModelConfig,
    prefix: KV,
    prompt_ids: jax.Array,
    prompt_mask: jax.Array,
    row_ids: jax.Array,
    key: jax.Array,
    *,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
    sampling: Sampling,
    dtype: Any,
    layout: Layout | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """completion_ids [B, T], sampling_logps [B, T], lengths [B]; ends when every row has."""
    B, T, s = row_ids.shape[0], max_new_tokens, row_ids.shape[0] // prompt_ids.shape[0]
    *_, prefix_mask = prefix_of(prompt_ids, prompt_mask)
    last_position = jnp.repeat(prompt_mask.sum(axis=1) - 1, s)  # [B]
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, row_ids)  # [B]
    L, _, N, _, h = prefix.k.shape

    def unfinished(state: Any) -> jax.Array:
        t, _, done, *_ = state
        return (t < T) & ~done.all()

    def next_token(state: Any) -> Any:
        t, token, done, ids, logps, lengths, cache = state
        hidden, cache = forward(
            params, config, token[:, None], (last_position + t)[:, None],
            prompt=(prefix, prefix_mask), cache=cache, cache_index=t, dtype=dtype, layout=layout,
        )  # fmt: skip
        logits = jnp.einsum(
            "rd,vd->rv", hidden[:, 0], lm_head(params).astype(dtype),
            preferred_element_type=jnp.float32,
        )  # [B, V]  # fmt: skip
        if layout is not None:  # as the lm_head lies, then each row whole where it is sampled
            logits = constrain(logits, layout, TRAIN_ROWS, "tp")
            logits = constrain(logits, layout, layout.rows)
        token, logp = sample(jax.vmap(jax.random.fold_in, (0, None))(row_keys, t), logits, sampling)
        token = jnp.where(done, pad_id, token)
        ids = ids.at[:, t].set(token)
        logps = logps.at[:, t].set(jnp.where(done, 0.0, logp))
        lengths = lengths + ~done
        done = done | jnp.isin(token, jnp.array(stop_ids))
        return t + 1, token, done, ids, logps, lengths, cache

    cache = jnp.zeros((L, B, N, T, h), prefix.k.dtype)
    first = jnp.repeat(prompt_ids[:, -1], s)  # [B]
    ids, logps = jnp.full((B, T), pad_id, jnp.int32), jnp.zeros((B, T), jnp.float32)
    state = (0, first, jnp.zeros(B, bool), ids, logps, jnp.zeros(B, jnp.int32), KV(cache, cache))
    _, _, _, ids, logps, lengths, _ = jax.lax.while_loop(unfinished, next_token, state)
    return ids, logps, lengths


def sample(keys: jax.Array, logits: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """A token [B] int32 from each row of logits [B, V], and its logp [B] as it was drawn.

    Greedy tokens get their logp at temperature 1. keys: [B], one per row.
    """
    if sampling.temperature == 0:
        token = jnp.argmax(logits, axis=-1)
    else:
        logits = filter_logits(logits / sampling.temperature, sampling)
        token = jax.vmap(_categorical)(keys, logits)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token.astype(jnp.int32), chosen - jax.nn.logsumexp(logits, axis=-1)


def _categorical(key: jax.Array, logits: jax.Array) -> jax.Array:
    """One index of logits [V]: first a block of about sqrt(V) tokens, then a token in it.

    The same distribution as jax.random.categorical, from 2 sqrt(V) random numbers and not V.
    """
    V = logits.shape[0]
    width = 2 ** math.ceil(math.log2(V) / 2)
    blocks = jnp.pad(logits, (0, -V % width), constant_values=MASKED).reshape(-1, width)
    which_block, which_token = jax.random.split(key)
    block = jax.random.categorical(which_block, jax.nn.logsumexp(blocks, axis=-1))
    return block * width + jax.random.categorical(which_token, blocks[block])


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """logits [B, V] (already divided by the temperature) with what top-k, top-p, min-p drop masked.

    A token that ties with the last one kept is kept too.
    """
    V = logits.shape[-1]
    if 0 < sampling.top_k < V:
        kth = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]  # [B, 1]
        logits = jnp.where(logits < kth, MASKED, logits)
    if sampling.top_p < 1:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        probs = jax.nn.softmax(ranked)
        before = jnp.cumsum(probs, axis=-1) - probs  # mass of the likelier tokens
        last = jnp.min(jnp.where(before < sampling.top_p, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < last, MASKED, logits)
    if sampling.min_p > 0:
        floor = jnp.max(logits, axis=-1, keepdims=True) + math.log(sampling.min_p)
        logits = jnp.where(logits < floor, MASKED, logits)
    return logits
