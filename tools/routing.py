"""The share of tokens whose experts differ between the sampler and the trainer, in any layer.

    python tools/routing.py    # the environment and --config are as for the run

It samples a round of completions with the weights of the run's newest checkpoint, or of MODEL_PATH,
and computes their tokens again in both ways: one by one behind caches, and in packed rows. A step
does not measure it, since its programs would have to return the experts of all tokens and layers.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository

import jax
import jax.numpy as jnp
import numpy as np

from config import load
from data import pad_prompts
from infra import hosts
from infra.mistakes import UserMistake, exit_with_mistakes
from infra.sizes import prompt_width
from model import experts
from model.attention import Cache, PackedRows, map_kv
from model.network import ComputeConfig, forward, forward_token, split_prefix
from model.params import Params, arrange_layers, combine_params
from rollout import complete, gather_batch, prompts_of_round
from rows import Batch, MicroBatch
from run import Run
from sampling import prefill, sync_weights
from startup import make_backend, set_up
from tools.ask import NO_STEPS, find_weights, load_weights
from update import pack_to_devices


@contextlib.contextmanager
def recording() -> Iterator[list[jax.Array]]:
    """A list that gets the experts [n, k] of each layer of which a program is traced meanwhile, in
    ascending order. Its layers have to be unrolled."""
    chosen, route = [], experts.route

    def record(*arguments: Any) -> tuple[jax.Array, jax.Array]:
        weights, of_layer = route(*arguments)
        chosen.append(jnp.sort(of_layer, axis=-1))
        return weights, of_layer

    experts.route = record
    try:
        yield chosen
    finally:
        experts.route = route


@functools.partial(jax.jit, static_argnames="compute")
def experts_of_sampler(
    params: Params, compute: ComputeConfig, ids: Any, mask: Any, completion_ids: Any
) -> jax.Array:
    """[B, T, L, k] the experts of the tokens that predict completion_ids [B, T]. ids, mask:
    [P, S+1] of prompts, left-padded."""
    (B, T), K = completion_ids.shape, len(completion_ids) // len(ids)
    prefix, (*_, seen) = prefill(params, compute, ids, mask), split_prefix(ids, mask)
    last, position = (jnp.repeat(x, K, axis=0) for x in (ids[:, -1:], mask.sum(axis=1) - 1))
    inputs = jnp.concatenate([last, completion_ids[:, :-1]], axis=1)  # [B, T]

    def step(completion: Any, t: jax.Array) -> tuple[Any, jax.Array]:
        cache = Cache(prefix, seen, completion, t)
        with recording() as chosen:
            _, completion = forward_token(params, compute, inputs[:, t], position + t, cache)
        return completion, jnp.stack(chosen, axis=1)  # [B, L, k]

    empty = map_kv(lambda kv: kv.begin_completions(B, T), prefix)
    return jax.lax.scan(step, empty, jnp.arange(T))[1].swapaxes(0, 1)


@functools.partial(jax.jit, static_argnames="compute")
def experts_of_trainer(params: Params, compute: ComputeConfig, rows: MicroBatch) -> jax.Array:
    """[X*Q, T, L, k] the experts of the tokens that predict the targets of packed rows."""
    (X, t), S = rows.ids.shape, rows.ids.shape[1] - rows.targets.shape[1]
    packed = PackedRows(rows.segment_ids, rows.start, S, (), rows.key_blocks)
    with recording() as chosen:
        forward(params, compute, rows.ids, rows.positions, packed)
    of_slots = jnp.stack(chosen, axis=1).reshape(X, t, len(chosen), -1)[:, S:]
    found = jax.vmap(lambda x, slots: x[slots])(of_slots, rows.target_slots)
    return found.reshape(-1, *found.shape[2:])


def sample_batch(run: Run, params: Params) -> Batch:
    """The completions of the first round of training, without rewards."""
    P, K = run.sizes.prompts_per_step, run.cfg.num_pre_q
    prompts = prompts_of_round(run.rollout, run.train_prompts, P, K, 0, run.cfg.seed)
    with contextlib.closing(make_backend(run)) as backend:
        backend.update_weights(params)
        completions = complete(
            *(run.rollout, backend, prompts, jax.random.key(run.cfg.seed), run.rollout.sampling),
            completions_per_prompt=K,
            prompts_per_pass=run.sizes.prompt_batch_size,
            title="sampling",
        )
        backend.release()
    none = np.zeros(P * K)
    return gather_batch(run.rollout, prompts, completions, none, none[:, None])


def compare_experts(run: Run, params: Params, batch: Batch) -> np.ndarray:
    """[tokens, L] bool: whether the experts of a token of the loss differ."""
    sampler, trainer = (
        x.compute._replace(layer_loop="unroll", remat="none") for x in (run.rollout, run.learner)
    )
    copy = sync_weights(run.rollout.compute)(params)
    copy = combine_params(params, copy) if sampler.shares_base else copy
    width = prompt_width(int(batch.prompt_lengths().max()), run.rollout.global_length)
    prompts = pad_prompts([x.ids for x in batch.prompts], width, run.rollout.stopping.pad_id)
    copy = arrange_layers(copy, "unroll", sampler.dtype)
    ours = np.asarray(experts_of_sampler(copy, sampler, *prompts, batch.completion_ids))
    params, found = arrange_layers(params, "unroll", trainer.dtype), []
    for rows in pack_to_devices(run.learner, batch, np.arange(len(batch.lengths))):
        theirs, i = experts_of_trainer(params, trainer, rows), np.asarray(rows.sequence_indices)
        differ = (np.asarray(theirs) != ours[i]).any(axis=-1)  # [X*Q, T, L]
        found.append(differ[np.asarray(rows.completion_mask) > 0])
    return np.concatenate(found)


def main() -> None:
    cfg, *_ = load(sys.argv[1:])
    hosts.start_jax(cfg.jax_compilation_cache_dir, cfg.init_timeout_s)
    kept = {"steps": 1, "eval_full_sweep": False, "eval_every_steps": 0}  # prompts of training
    run = set_up(replace(find_weights(cfg, required=False), **NO_STEPS | kept))
    if run.learner.compute.model.moe is None:
        raise UserMistake(f"MODEL_PATH={cfg.model_path} has no experts; name a mixture of experts")
    params, _ = load_weights(run)
    differ = compare_experts(run, params, sample_batch(run, params))
    print(
        f"routing tokens={len(differ)} layers={differ.shape[1]} dtype={run.rollout.compute.dtype} "
        f"differing_frac={differ.any(axis=1).mean():.5f} of_choices={differ.mean():.6f}"
    )


if __name__ == "__main__":
    try:
        main()
    except UserMistake as error:
        exit_with_mistakes(error)
