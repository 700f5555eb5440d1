"""Compares attention with plain attention, times and profiles steps of two sizes on the device of
this machine, and prints a line of JSON. It takes about four minutes on a GPU.

    python tools/gpu_check.py

docs/speed.md explains the fields. The exit code is 1 if attention is wrong or a run failed, unless
the memory of the device is too small for it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that it runs from any folder

from fingerprint import commit_of
from infra.chips import OUT_OF_MEMORY_CODE
from infra.log import to_json_values
from model.attention import KV, PackedRows, attention
from model.blocks import block_attention, with_key_blocks
from model.layout import TRAIN_BATCH_AXES, Layout, make_mesh
from model.splash import splash_attention
from tools.bench import bench, make_parser, make_random_model
from tools.plan import KNOWN_MODELS

# The models, of random weights, and the arguments of bench.py; profile_step.py takes the last step.
FULL = (
    ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B"],
    """--prompt-tokens 200 --steps 6 ROLLOUT_GLOBAL_BATCH_SIZE=16 BATCH_SIZE=16 NUM_PRE_Q=8
    MAX_LENGTH_SAMPLE=256 TRAIN_MICRO_BATCH_SIZE=32""",
)
SMALL = ["bench.py"], "--steps 4 MAX_LENGTH_SAMPLE=32"  # the model of bench.py
TOLERANCE = 2e-2  # bfloat16 rounds to 8 significant bits, and a gradient several times


def compare_attention(small: bool) -> dict[str, Any]:
    """The device, and how far its attention of an update in bfloat16 is from that of attention.py.

    A row has 4 prompts, each with 8 completions of random lengths, as long as in the runs. With 4
    query heads the scores of all pairs of tokens fit in the memory of any GPU.
    """
    devices, rng, (H, N, h) = jax.devices(), np.random.default_rng(0), (4, 2, 64)
    small = small or devices[0].platform == "cpu"
    S, C = (128, 512) if small else (1024, 8192)
    lengths = [S // 5] * 4 + [*rng.integers(1, C // 32 + 1, size=32)]
    segment_ids, start = np.full((1, S + C), -1, np.int32), np.arange(S + C, dtype=np.int32)[None]
    slot = 0
    for i, length in enumerate(lengths):
        slot = S if i == 4 else slot
        segment_ids[:, slot : slot + length] = i if i < 4 else (i - 4) // 8
        start[:, slot : slot + length] = slot
        slot += length
    layout = Layout(make_mesh("MESH_SHAPE", "1,1,1", devices[:1]), TRAIN_BATCH_AXES)
    [rows] = with_key_blocks([PackedRows(segment_ids, start, S)], S, layout)
    shapes = (1, S + C, H, h), (1, N, h, S + C), (1, N, S + C, h), (1, S + C, H * h)
    *qkv, grad_out = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)

    def result_and_gradients(attend: Callable[..., jax.Array]) -> list[np.ndarray]:
        def compute(arrays: dict[str, Any], grad_out: jax.Array, *qkv: jax.Array) -> Any:
            these = rows._replace(**arrays)
            is_token = these.segment_ids[..., None] >= 0  # padding has any result
            out, gradients = jax.vjp(
                lambda q, k, v: attend(q, KV(k, v), these, layout, 0.0) * is_token, *qkv
            )
            return out, *gradients(grad_out)

        arrays = {name: x for name, x in rows._asdict().items() if isinstance(x, np.ndarray)}
        return [np.asarray(x, np.float32) for x in jax.jit(compute)(arrays, grad_out, *qkv)]

    ours = splash_attention if devices[0].platform == "tpu" else block_attention
    pairs = zip(result_and_gradients(ours), result_and_gradients(attention), strict=True)
    differences = [round(float(abs(x - y).max() / abs(y).max()), 5) for x, y in pairs]
    fields = dict(zip(("out", "grad_q", "grad_k", "grad_v"), differences, strict=True))
    within = all(x <= TOLERANCE for x in differences)  # not with a NaN
    device = f"{len(devices)} x {devices[0].device_kind}"
    return {"device": device, "small": small, "attention": fields | {"within": within}}


def measure_steps(name: str, arguments: str) -> dict[str, Any]:
    """The fields of a run of bench.py and the profile of its last step, or its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        model, trace, words = Path(folder) / "model", Path(folder) / "trace", arguments.split()
        if name in KNOWN_MODELS:
            make_random_model(REPO / "tiny", model, KNOWN_MODELS[name])
            words += ["--model", str(model)]
        try:
            args = make_parser().parse_args(words)
            fields = bench(args, ["tools/profile_step.py", str(trace)])
        except SystemExit as error:  # the run has said why
            return {"exit_code": error.code}
        fields["decode_ms_per_token"] = round(1000 * fields["steady_rollout_s"] / fields["clen"], 4)
        return fields | {"profile": json.loads((trace / "profile.json").read_text())}


def exit_code(fields: dict[str, Any]) -> int:
    codes = {run.get("exit_code", 0) for run in fields["runs"].values()}
    return 0 if fields["attention"]["within"] and codes <= {0, OUT_OF_MEMORY_CODE} else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--small", action="store_true", help="a small model, as always on a CPU")
    small = parser.parse_args().small
    # Each part is a process that has the devices for itself; this one does not use them.
    jax.config.update("jax_platforms", "cpu")
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        fields = process.submit(compare_attention, small).result()
    names, arguments = SMALL if fields["small"] else FULL
    runs = {name: measure_steps(name, arguments) for name in names}
    fields |= {"jax": jax.__version__, "commit": commit_of(REPO), "runs": runs}
    print(json.dumps(to_json_values(fields)))
    sys.exit(exit_code(fields))


if __name__ == "__main__":
    main()
