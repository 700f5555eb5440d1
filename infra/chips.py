"""The devices of a run: facts of TPUs and GPUs, and what to do when memory runs out."""

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from infra.sizes import BatchSettings, derive_sizes, suggest_smaller_size

OUT_OF_MEMORY_CODE = 3  # the exit code, which is also that of a --plan that does not fit


class Chip(NamedTuple):
    """Facts of one TPU chip or of one GPU, as their makers publish them."""

    kinds: tuple[str, ...]  # its jax device_kind; a variant, such as a part of a GPU, has another
    tflops: float  # dense matmuls in bfloat16; of a GPU without bfloat16 in float32
    hbm_gib: float  # as the TPU's compiler lets a program use it, or as CUDA reports it
    hbm_gbps: float  # GB/s of its memory
    ici_gbps: float = math.inf  # GB/s that a TPU sends to its neighbours along an axis of the torus


CHIPS = {  # TPUs
    "v4": Chip(("TPU v4",), 275, 30.75, 1228, 100),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), 197, 15.75, 819, 100),
    "v5p": Chip(("TPU v5", "TPU v5p"), 459, 95.74, 2765, 200),
    "v6e": Chip(("TPU v6 lite", "TPU v6e"), 918, 31.25, 1640, 200),
}
GPUS = {
    "h100": Chip(("NVIDIA H100 80GB HBM3",), 989, 79.1, 3352),
    "h100-pcie": Chip(("NVIDIA H100 PCIe",), 756, 79.1, 2039),
    "h100-nvl": Chip(("NVIDIA H100 NVL",), 835, 93.1, 3938),
    "h200": Chip(("NVIDIA H200",), 989, 139.8, 4800),
    "h200-nvl": Chip(("NVIDIA H200 NVL",), 835, 139.8, 4800),
    "b200": Chip(("NVIDIA B200",), 2250, 178.3, 8000),
    "a100-80": Chip(("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 312, 79.1, 1935),
    "a100-40": Chip(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), 312, 39.4, 1555),
    "l4": Chip(("NVIDIA L4",), 121, 22.0, 300),
    "rtx4090": Chip(("NVIDIA GeForce RTX 4090",), 165, 23.5, 1008),
    "t4": Chip(("Tesla T4",), 8.1, 14.6, 320),
}
NO_BFLOAT16 = ("Tesla",)  # the beginnings of the kinds of GPUs before 2020: T4, V100, P100
MEM_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # the share of a GPU's memory that jax takes
OUR_MEM_FRACTION = "0.92"  # jax takes 0.75 by default

MEGACORE = {"chip_config_name": "megacore"}  # the two cores of a chip are one device
# Without these jax assumes hosts of four chips.
ONE_CHIP, ONE_HOST = ({"chips_per_host_bounds": bounds} for bounds in ([1, 1, 1], [2, 4, 1]))
# The torus of each TPU slice, whose name begins with its chip, and options of get_topology_desc.
SLICES: dict[str, tuple[str, dict[str, Any]]] = {
    "v4-8": ("2x2x1", MEGACORE),
    "v4-16": ("2x2x2", MEGACORE),
    "v4-32": ("2x2x4", MEGACORE),
    "v5e-1": ("1x1", ONE_CHIP),
    "v5e-4": ("2x2", {}),
    "v5e-8": ("2x4", ONE_HOST),
    "v5e-16": ("4x4", {}),
    "v5p-8": ("2x2x1", MEGACORE),
    "v6e-1": ("1x1", ONE_CHIP),
    "v6e-4": ("2x2", {}),
    "v6e-8": ("2x4", ONE_HOST),
    "v6e-16": ("4x4", {}),
    "v6e-64": ("8x8", {}),
    "v6e-256": ("16x16", {}),
}


def chip_of(device: jax.Device) -> Chip | None:
    """The facts of a TPU or a GPU, found by its kind; None for devices that are not known here."""
    chips = (*CHIPS.values(), *GPUS.values())
    return next((chip for chip in chips if device.device_kind in chip.kinds), None)


def has_bfloat16(device: jax.Device) -> bool:
    """Whether the device multiplies bfloat16 numbers faster than float32; CPUs do not."""
    # A GPU of NVIDIA has it from compute capability 8.0 on. Plans know only the kind of a GPU.
    too_old = str(getattr(device, "compute_capability", "")).startswith(("5.", "6.", "7."))
    return not (too_old or device.platform == "cpu" or device.device_kind.startswith(NO_BFLOAT16))


def usable_memory_bytes(device: jax.Device) -> float:
    """The bytes of a device's memory that programs may use; infinite if the device does not say."""
    chip = chip_of(device)
    if chip and chip in CHIPS.values():
        return chip.hbm_gib * 2**30
    try:
        return (device.memory_stats() or {}).get("bytes_limit", math.inf)
    except jax.errors.JaxRuntimeError:  # a GPU that is not here, for which a plan compiles
        if not chip:
            raise
        fraction = float(os.environ.get(MEM_FRACTION, OUR_MEM_FRACTION))
        return fraction * chip.hbm_gib * 2**30


# ---- A device has run out of memory --------------------------------------------------------------


@contextlib.contextmanager
def attribute_oom_to(name: str, size_settings: tuple[str, ...] = ()) -> Iterator[None]:
    """Adds to an error of jax the name of the program that has failed: the innermost one around
    both the call and the fetch of its results, where the error arrives.

    size_settings: PASS_SIZES or MICRO_SIZES if a smaller size makes the program smaller.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        error.program = getattr(error, "program", (name, size_settings))
        raise


@contextlib.contextmanager
def exit_on_oom(cfg: BatchSettings) -> Iterator[None]:
    """Ends the program with a line if a device runs out of memory within this context: the program
    that has failed, if it is known, the memory that was requested, and what to try."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        name, size_settings = getattr(error, "program", ("", ()))
        failure = f"{name} does not fit in the memory of a device"
        failure = failure if name else "the memory of a device ran out"
        message = " ".join(str(error).partition("RESOURCE_EXHAUSTED:")[2].split())
        requested = message[:200].rstrip(".")
        processes, local_devices = jax.process_count(), jax.local_device_count()
        sizes = derive_sizes(cfg, processes, local_devices)
        advice = suggest_smaller_size(cfg, sizes, processes, local_devices, size_settings)
        print(f"error: {failure}: {requested}. {advice}", file=sys.stderr)
        raise SystemExit(OUT_OF_MEMORY_CODE) from None
