"""Trains with the settings of the environment and measures the run. bench.py step starts this file.

    python tools/bench_run.py RESULT.json

The run is train_grpo.main itself. The times come from its metrics.jsonl.

Dimensions: P prompts of a step, K completions per prompt, B = P*K sequences, S prompt tokens
without the last, T completion tokens.
"""
# ruff: noqa: E402 - the clock starts before the imports, which are a part of the time of a run

import time

STARTED = time.perf_counter()

import argparse
import json
import math
import os
import resource
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

import train_grpo
from config import Config
from models import hf
from models.model import ModelConfig
from models.placement import Workload
from runtime.chips import memory_errors_in_sizes
from runtime.mistakes import UserMistake, fail
from runtime.processes import ending_together
from tools.bench import median_seconds
from tools.roofline import model_flops


def step_flops(model: ModelConfig, cfg: Config, workload: Workload) -> tuple[float, float]:
    """The FLOPs of the matmuls that the rollout and the update of a step need.

    The rollout is one forward. An update is three: its backward has two matmuls for each
    matmul of forward. What remat, tiles and padding add is not counted. workload: the entire step,
    with each prompt once for its K completions.
    """
    forward = model_flops(model, workload)
    return forward, (3 * cfg.ppo_epochs + (cfg.beta > 0) + cfg.scores_policy()) * forward


def matmul_gflops() -> float:
    """The rate of a large matmul on one device: float32 on a CPU, else bfloat16. Median of 20."""
    rows, inner, columns, dtype, calls = 8192, 4096, 8192, jnp.bfloat16, 10
    if jax.default_backend() == "cpu":
        rows, inner, columns, dtype, calls = 4096, 256, 1024, jnp.float32, 1
    keys = jax.random.split(jax.random.key(0))
    a = jax.random.normal(keys[0], (rows, inner), dtype)
    b = jax.random.normal(keys[1], (inner, columns), dtype)
    matmul = jax.jit(jnp.matmul)
    seconds = median_seconds(lambda: [matmul(a, b) for _ in range(calls)], 20)
    return 2 * rows * inner * columns * calls / seconds / 1e9


def steady(records: list[dict[str, Any]]) -> dict[str, float]:
    """The medians over the steps of metrics.jsonl, without the first two, or of four steps and
    fewer without the first one, in which jax compiles."""
    counted = records[2 if len(records) > 4 else 1 :]
    columns = {name: [record[name] for record in counted] for name in counted[0]}

    def median(name: str) -> float:
        """NaN if no step has a value."""
        return statistics.median([x for x in columns[name] if x is not None] or [math.nan])

    rollout_s, update_s, step_s, tokens, length, decoded, trained = (
        median(name)
        for name in (
            "time/train/rollout_s",
            "time/train/update_s",
            "time/train/step_s",
            "train-other/total_valid_token_count",
            "train-seq_len/completion/mean",
            "throughput/rollout/computed_per_token",
            "throughput/update/computed_per_token",
        )
    )
    return {
        "steady_rollout_s": rollout_s,
        "steady_rollout_tok_s": tokens / rollout_s,
        "steady_train_s": update_s,
        "steady_step_s": step_s,
        "min_step_s": min(columns["time/train/step_s"]),
        "recompiled": sum(columns["compile/programs"]),
        "first_step_s": records[0]["time/train/step_s"],
        "tokens": tokens,
        "plen": records[-1]["train-seq_len/prompt/mean"],
        "clen": length,
        "rollout_computed_per_token": decoded,
        "update_computed_per_token": trained,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="the file that gets the measurements")
    file = parser.parse_args().result
    try:
        cfg = Config.from_env(os.environ)
    except UserMistake as error:
        fail(error)
    with ending_together(), memory_errors_in_sizes(cfg):
        train_grpo.main(cfg)
    result = {
        "wall_s": time.perf_counter() - STARTED,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    memory = [device.memory_stats() or {} for device in jax.local_devices()]
    if peaks := [stats["peak_bytes_in_use"] for stats in memory if "peak_bytes_in_use" in stats]:
        result["peak_device_mib"] = max(peaks) / 2**20

    lines = (Path(cfg.output_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "time/train/step_s" in record]
    B = int(records[0]["train-other/batch_global"])
    result = steady(records) | result
    S, T = round(result["plen"]) - 1, round(result["clen"])
    workload = Workload(R=B, G=B // cfg.num_pre_q, S=S, T=T)
    rollout, update = step_flops(hf.read_config(Path(cfg.model_path)), cfg, workload)
    peak = matmul_gflops()
    # The devices that jax shows of a CPU share its cores.
    devices = 1 if jax.default_backend() == "cpu" else jax.device_count()
    result |= {"update_flops": update, "rollout_flops": rollout, "matmul_peak_gflops": peak}
    fraction = update / result["steady_train_s"] / (peak * 1e9 * devices)
    result = {name: round(value, 6) for name, value in result.items()}
    result |= {
        "update_fraction_of_peak": round(fraction, 6),
        "device": jax.devices()[0].device_kind,
    }
    file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
