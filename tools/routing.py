"""The share of tokens whose experts differ between the sampler and the trainer, in any layer.

    python tools/routing.py    # the environment and --config are as for the run

It samples a round of completions with the weights of the newest checkpoint, or of MODEL_PATH, and
computes the experts again in both ways: token by token behind caches, and in packed rows. In a step
the programs would have to return the experts of all tokens and layers.
"""

import contextlib
import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository

import jax
import jax.numpy as jnp
import numpy as np

from config import load
from data import batch_indices, pad_prompts
from infra import hosts
from infra.mistakes import UserMistake, exit_with_mistakes
from infra.sizes import completions_per_prompt_in_shard, prompt_width
from model import experts
from model.attention import Cache, PackedRows, map_kv
from model.network import ComputeConfig, forward, forward_token, split_prefix
from model.params import Params, arrange_layers
from rows import Batch, MicroBatch
from run import Run
from sampling import prefill
from startup import make_backend, set_up
from tools.ask import NO_STEPS, find_weights, load_weights
from tools.probe import sample_round
from update import pack_to_devices


def record_experts(function: Any, *arguments: Any) -> tuple[Any, jax.Array]:
    """What the function returns, and the experts [n, L, k] that it chooses, in ascending order. Its
    layers have to be unrolled."""
    chosen, route = [], experts.route

    def record(*arguments: Any) -> tuple[jax.Array, jax.Array]:
        weights, of_layer = route(*arguments)
        chosen.append(jnp.sort(of_layer, axis=-1))
        return weights, of_layer

    experts.route = record
    try:
        return function(*arguments), jnp.stack(chosen, axis=1)
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
        token = inputs[:, t], position + t, Cache(prefix, seen, completion, t)
        (_, completion), chosen = record_experts(forward_token, params, compute, *token)
        return completion, chosen

    empty = map_kv(lambda kv: kv.begin_completions(B, T), prefix)
    return jax.lax.scan(step, empty, jnp.arange(T))[1].swapaxes(0, 1)


@functools.partial(jax.jit, static_argnames="compute")
def experts_of_trainer(params: Params, compute: ComputeConfig, rows: MicroBatch) -> jax.Array:
    """[X*Q, T, L, k] the experts of the tokens that predict the targets of packed rows."""
    (X, t), S = rows.ids.shape, rows.ids.shape[1] - rows.targets.shape[1]
    packed = PackedRows(rows.segment_ids, rows.start, S, (), rows.key_blocks)
    _, chosen = record_experts(forward, params, compute, rows.ids, rows.positions, packed)
    of_slots = chosen.reshape(X, t, *chosen.shape[1:])[:, S:]
    found = jax.vmap(lambda x, slots: x[slots])(of_slots, rows.target_slots)
    return found.reshape(-1, *found.shape[2:])


def compare_experts(run: Run, params: Params, batch: Batch) -> np.ndarray:
    """[tokens, L] bool: whether the experts of a token of the loss differ."""
    how = {"layer_loop": "unroll", "remat": "none"}
    sampler, trainer = (x.compute._replace(**how) for x in (run.rollout, run.learner))
    width = prompt_width(int(batch.prompt_lengths().max()), run.rollout.global_length)
    K, per_shard = run.cfg.num_pre_q, len(batch.lengths) // sampler.layout.batch_shards
    copies = K // completions_per_prompt_in_shard(K, per_shard)  # of a prompt, as in the sampler
    ids = [prompt.ids for prompt in batch.prompts for _ in range(copies)]
    prompts = pad_prompts(ids, width, run.rollout.stopping.pad_id)
    params, found = arrange_layers(params, "unroll", trainer.dtype), []
    ours = np.asarray(experts_of_sampler(params, sampler, *prompts, batch.completion_ids))
    for rows in pack_to_devices(run.learner, batch, np.arange(len(batch.lengths))):
        theirs = np.asarray(experts_of_trainer(params, trainer, rows))
        differ = (theirs != ours[np.asarray(rows.sequence_indices)]).any(axis=-1)  # [X*Q, T, L]
        found.append(differ[np.asarray(rows.completion_mask) > 0])
    return np.concatenate(found)


def main() -> None:
    cfg, *_ = load(sys.argv[1:])
    hosts.start_jax(cfg.jax_compilation_cache_dir, cfg.init_timeout_s)
    if jax.process_count() > 1:
        raise UserMistake(f"tools/routing.py has {jax.process_count()} processes; start one alone")
    kept = {"steps": 1, "eval_full_sweep": False, "eval_samples": cfg.num_pre_q}
    run = set_up(replace(find_weights(cfg, required=False), **NO_STEPS | kept))
    if run.learner.compute.model.moe is None:
        raise UserMistake(f"MODEL_PATH={cfg.model_path} has no experts; name a mixture of experts")
    run = replace(run, rollout=replace(run.rollout, eval_sampling=run.rollout.sampling))
    params, step = load_weights(run)
    with contextlib.closing(make_backend(run)) as backend:
        backend.update_weights(params)
        pool, P = len(run.train_prompts), run.sizes.prompts_per_step
        batch = sample_round(run, backend, batch_indices(pool, P, 0, cfg.seed), 0, step)
        backend.release()
    differ = compare_experts(run, params, batch)
    tokens, layers = differ.shape
    shares = f"differing_frac={differ.any(axis=1).mean():.5f} of_layers={differ.mean():.6f}"
    print(f"routing tokens={tokens} layers={layers} dtype={run.rollout.compute.dtype} {shares}")


if __name__ == "__main__":
    try:
        main()
    except UserMistake as error:
        exit_with_mistakes(error)
