"""Times the steps of a run, or the log-probability kernel beside two other implementations.

    python tools/bench.py step              # times a run on the device of this machine
    python tools/bench.py step --scale      # prints a table over batch, length and vocabulary
    python tools/bench.py loss              # times token_logps on the device of this machine
    python tools/bench.py loss --tpu v6e    # compiles it for a TPU that is not here; needs libtpu

`step` is explained in docs/speed.md, and its code is in bench_step.py. `loss` computes the
log-probabilities and entropies of tokens from hidden states, and the gradients with respect to the
hidden states and the lm_head. The three implementations are `full`, which keeps all logits in
memory, and `jax` and `pallas`, the two values of POLICY_LOSS_IMPL.
"""
# ruff: noqa: E402 - the folder of the project has to be on the path before its modules are imported

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from loss_pallas import Kernel
from models.logps import token_logps, token_logps_reference
from runtime.chips import CHIPS
from runtime.mistakes import UserMistake, fail
from startup import logps_kernel
from tools import bench_step
from tools.programs import array, slice_devices
from tools.roofline import loss_costs

IMPLEMENTATIONS = ("full", "jax", "pallas")


class Shape(NamedTuple):
    """The sizes of the benchmark."""

    n: int  # tokens per device
    D: int  # width of the model
    V: int  # size of the vocabulary


def loss_program(impl: str, backward: bool, mesh: Any = None) -> Callable:
    """A function of hidden [R, T, D], lm_head [V, D] and ids [R, T].

    It returns a scalar or, with `backward`, the gradients with respect to hidden and lm_head.
    """
    device = mesh.devices.flat[0] if mesh else jax.devices()[0]
    kernel = Kernel(device.device_kind) if impl == "pallas" else None
    program = functools.partial(token_logps, mesh=mesh, kernel=kernel)
    program = token_logps_reference if impl == "full" else program

    def loss(hidden: Any, lm_head: Any, ids: Any) -> Any:
        logps, entropy = program(hidden, lm_head, ids)
        return logps.sum() + 0.01 * entropy.sum()

    return jax.grad(loss, (0, 1)) if backward else loss


# ---- On the device of this machine ---------------------------------------------------------------


def bench_loss(shape: Shape, repeats: int) -> None:
    """Prints a table of times, FLOP rate and memory on the first device."""
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, shape.n, shape.D), dtype)
    lm_head = 0.02 * jax.random.normal(keys[1], (shape.V, shape.D), jnp.float32)
    ids = jax.random.randint(keys[2], (1, shape.n), 0, shape.V)
    print(f"{device.device_kind}: {shape.n} tokens, D {shape.D}, V {shape.V}, {dtype.__name__}")
    print("| | forward ms | with gradient ms | TFLOP/s | temporaries GiB |\n|---|---|---|---|---|")
    for impl in IMPLEMENTATIONS:
        if impl == "pallas" and device.platform != "tpu":
            print("| pallas | needs a TPU | | | |")
            continue
        times = []
        for backward in (False, True):
            program = jax.jit(loss_program(impl, backward))
            program = program.lower(hidden, lm_head, ids).compile()
            times.append(median_seconds(lambda p=program: p(hidden, lm_head, ids), repeats))
        tflops = 6 * shape.n * shape.D * shape.V / times[1] / 1e12
        memory = program.memory_analysis().temp_size_in_bytes / 2**30
        columns = f"{times[0] * 1e3:.1f} | {times[1] * 1e3:.1f} | {tflops:.3g} | {memory:.2f}"
        print(f"| {impl} | {columns} |", flush=True)


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """The median time of `repeats` calls, after two calls that are not counted.

    Each call is timed until its results are ready.
    """
    seconds = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


# ---- For a TPU that is not here ------------------------------------------------------------------


def compile_loss(impl: str, backward: bool, shape: Shape, name: str) -> Any:
    """The program compiled for the slice NAME-8.

    fsdp splits the batch and the weights; each device has 16 sequences.
    """
    devices = slice_devices(f"{name}-8")
    mesh = Mesh(np.array(devices).reshape(1, -1, 1), ("dp", "fsdp", "tp"))
    R, T = 16 * len(devices), shape.n // 16
    hidden = array(mesh, (R, T, shape.D), jnp.bfloat16, ("dp", "fsdp"))
    lm_head = array(mesh, (shape.V, shape.D), jnp.float32, "tp", "fsdp")
    ids = array(mesh, (R, T), jnp.int32, ("dp", "fsdp"))
    out_shardings = (hidden.sharding, lm_head.sharding) if backward else None
    program = jax.jit(loss_program(impl, backward, mesh), out_shardings=out_shardings)
    return program.lower(hidden, lm_head, ids).compile()


def plan_loss(shape: Shape, name: str) -> None:
    """Prints a table: memory by the TPU compiler, bytes and times by the formulas of loss_costs."""
    logps_kernel("pallas", shape.D, CHIPS[name].kinds[0])  # for its UserMistake
    print(f"{name}: {shape.n} tokens per device, D {shape.D}, V {shape.V}")
    print("| | temporaries GiB: forward | with gradient | matmuls | HBM GB | roofline ms |")
    print("|---|---|---|---|---|---|")
    for impl in IMPLEMENTATIONS:
        compiled = [compile_loss(impl, backward, shape, name) for backward in (False, True)]
        memory = [c.memory_analysis().temp_size_in_bytes / 2**30 for c in compiled]
        columns = " | ".join(f"{gib:.2f}" for gib in memory)
        print(f"| {impl} | {columns} | {estimate(impl, shape, name)} |", flush=True)


def estimate(impl: str, shape: Shape, name: str) -> str:
    """Three columns: number of matmuls [n, D] x [D, V], HBM GB and roofline ms, with gradient."""
    chip = CHIPS[name]
    matmuls, hbm_bytes = loss_costs(impl, *shape, chip.kinds[0])
    compute_ms = matmuls * 2 * shape.n * shape.D * shape.V / chip.tflops / 1e9
    ms = max(compute_ms, hbm_bytes / chip.hbm_gbps / 1e6)
    return f"{matmuls} | {hbm_bytes / 1e9:.0f} | {ms:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_subparsers(dest="what", required=True, help="the benchmark")
    step = what.add_parser(
        "step", usage="%(prog)s [arguments] [NAME=VALUE ...]", help="the steps of a run"
    )
    bench_step.add_arguments(step)
    loss = what.add_parser("loss", help="the log-probability kernel")
    loss.add_argument(
        "--tpu",
        choices=CHIPS,
        help="compile for this TPU instead of timing the device of this machine",
    )
    loss.add_argument("--tokens", type=int, help="tokens per device")
    loss.add_argument("-D", type=int, help="width of the model")
    loss.add_argument("-V", type=int, help="size of the vocabulary")
    loss.add_argument("--repeats", type=int, default=10, help="timed calls, 10 by default")
    args = parser.parse_args()
    try:
        bench_step.bench_step(args) if args.what == "step" else time_or_plan_loss(args)
    except UserMistake as error:
        fail(error)


def time_or_plan_loss(args: argparse.Namespace) -> None:
    """Does what the arguments of `loss` ask for."""
    shape = Shape(16 * 1024, 2048, 151936)  # Qwen2.5-3B
    if not args.tpu and jax.default_backend() == "cpu":
        shape = Shape(4096, 256, 32768)
    shape = Shape(args.tokens or shape.n, args.D or shape.D, args.V or shape.V)
    plan_loss(shape, args.tpu) if args.tpu else bench_loss(shape, args.repeats)


if __name__ == "__main__":
    main()
