"""The devices of a run: facts of TPU chips and slices, and what to do when memory runs out."""

import contextlib
import math
import shlex
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from runtime.sizes import derive, smaller_sizes

OUT_OF_MEMORY_CODE = 3  # the exit code, which is also that of a --plan that does not fit
LINKS = 2  # of a chip, over which it sends at the same time
HOP_SECONDS = 1e-6  # from a chip to its neighbour, for a transfer so small that only latency counts


class Chip(NamedTuple):
    """Facts of one chip, as Google publishes them."""

    kinds: tuple[str, ...]  # the beginnings of its jax device_kind
    tflops: float  # bfloat16
    hbm_gib: float  # what the compiler lets a program use
    hbm_gbps: float  # GB/s
    ici_gbps: float  # GB/s of one link between chips, in one direction


CHIPS = {
    "v4": Chip(("TPU v4",), 275, 30.75, 1228, 45),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), 197, 15.75, 819, 45),
    "v5p": Chip(("TPU v5",), 459, 95.74, 2765, 90),
    "v6e": Chip(("TPU v6",), 918, 31.25, 1640, 90),
}


# NVIDIA's figures for dense matmuls, by the beginning of the jax device_kind.
GPU_TFLOPS = {"NVIDIA A100": 312, "NVIDIA H100": 989, "NVIDIA H200": 989, "NVIDIA B200": 2250}


class Slice(NamedTuple):
    """The shape of a slice's torus, and its hosts."""

    chip: str
    shape: tuple[int, ...]
    hosts: int
    options: dict[str, Any]  # of jax's get_topology_desc

    @property
    def topology(self) -> dict[str, Any]:
        shape = "x".join(map(str, self.shape))
        return {"platform": "tpu", "topology_name": f"{self.chip}:{shape}", **self.options}


MEGACORE = {"chip_config_name": "megacore"}  # the two cores of a chip are one device
# Without these jax assumes hosts of four chips.
ONE_CHIP, ONE_HOST = ({"chips_per_host_bounds": bounds} for bounds in ([1, 1, 1], [2, 4, 1]))
SLICES = {
    "v4-8": Slice("v4", (2, 2, 1), 1, MEGACORE),
    "v4-16": Slice("v4", (2, 2, 2), 2, MEGACORE),
    "v4-32": Slice("v4", (2, 2, 4), 4, MEGACORE),
    "v5e-1": Slice("v5e", (1, 1), 1, ONE_CHIP),
    "v5e-4": Slice("v5e", (2, 2), 1, {}),
    "v5e-8": Slice("v5e", (2, 4), 1, ONE_HOST),
    "v5e-16": Slice("v5e", (4, 4), 4, {}),
    "v5p-8": Slice("v5p", (2, 2, 1), 1, MEGACORE),
    "v6e-1": Slice("v6e", (1, 1), 1, ONE_CHIP),
    "v6e-4": Slice("v6e", (2, 2), 1, {}),
    "v6e-8": Slice("v6e", (2, 4), 1, ONE_HOST),
    "v6e-16": Slice("v6e", (4, 4), 4, {}),
    "v6e-64": Slice("v6e", (8, 8), 16, {}),
    "v6e-256": Slice("v6e", (16, 16), 64, {}),
}


def chip_of(device: jax.Device) -> Chip | None:
    """The facts of a TPU device, found by its kind; None for any other device."""
    chips = [chip for chip in CHIPS.values() if device.device_kind.startswith(chip.kinds)]
    return chips[0] if chips else None


def peak_flops(device: jax.Device) -> float:
    """The bfloat16 FLOPs per second that the maker of the device states; NaN if not known here."""
    if chip := chip_of(device):
        return chip.tflops * 1e12
    known = [x for kind, x in GPU_TFLOPS.items() if device.device_kind.startswith(kind)]
    return known[0] * 1e12 if known else math.nan


def memory_peaks() -> dict[str, float]:
    """The most memory so far, in GiB: of this process, and of its devices if they tell."""
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    device_peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices()]
    if known := [peak for peak in device_peaks if peak]:
        peaks["device_peak_gib"] = max(known) / 2**30
    return peaks


def slice_of(devices: list[jax.Device]) -> str:
    """The name by which --plan knows the TPU slice of these devices; "" for any other slice."""
    chip = chip_of(devices[0])
    for name, known in SLICES.items():
        if CHIPS[known.chip] is chip and math.prod(known.shape) == len(devices):
            return name
    return ""


def memory_bytes(device: jax.Device) -> float:
    """The bytes of a device's memory that programs may use; infinite if the device does not say."""
    if chip := chip_of(device):
        return chip.hbm_gib * 2**30
    return (device.memory_stats() or {}).get("bytes_limit", math.inf)


class Work(NamedTuple):
    """What one device has to move to decode a token."""

    hbm_bytes: float
    ici_bytes: float = 0.0  # from chip to chip
    hops: float = 0.0  # transfers that wait for one another

    def seconds(self, chip: Chip) -> tuple[float, float]:
        """Seconds of the memory traffic, and of the traffic between chips."""
        ici = self.ici_bytes / (LINKS * chip.ici_gbps * 1e9) + self.hops * HOP_SECONDS
        return self.hbm_bytes / (chip.hbm_gbps * 1e9), ici


# ---- A device has run out of memory --------------------------------------------------------------


@contextlib.contextmanager
def program(name: str, sizes: tuple[str, ...] = ()) -> Iterator[None]:
    """Notes on an error of jax which program has failed: the innermost around both the call and the
    fetch of its results, where the error arrives. sizes: those that make the program smaller."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        error.program = getattr(error, "program", (name, sizes))
        raise


def out_of_memory(cfg: Any, error: Exception) -> str:
    """The line about a device that has too little memory: the program, if it is known, what was
    asked for, the next smaller size that leaves the step as it is, and on a TPU the command that
    checks this size."""
    name, names = getattr(error, "program", ("", ()))
    wanted = " ".join(str(error).partition("RESOURCE_EXHAUSTED:")[2].split())[:200].rstrip(".")
    what = (
        f"{name} does not fit the memory of a device" if name else "the memory of a device ran out"
    )
    text = f"{what}: {wanted}. "
    if not names:
        return text + "Use more devices; OPTIMIZER=sgd or lion, or BETA=0, need less"
    slice_ = jax.process_count(), jax.local_device_count()
    sizes_to_try = smaller_sizes(cfg, derive(cfg, *slice_), *slice_, names)
    if not sizes_to_try:
        return text + "Use more devices, or a lower MAX_LENGTH_SAMPLE or MAX_PROMPT_LENGTH"
    smaller = " ".join(f"{name.upper()}={size}" for name, size in sizes_to_try[-1].items())
    text += f"Try {smaller}"
    if name := slice_of(jax.devices()):
        flags = shlex.join([*sys.argv[1:], "--plan", name])
        text += f"; this checks it: {smaller} python train_grpo.py {flags}"
    return text


@contextlib.contextmanager
def memory_errors_in_sizes(cfg: Any) -> Iterator[None]:
    """Ends the program with the line of out_of_memory if a device runs out of memory within."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"error: {out_of_memory(cfg, error)}", file=sys.stderr)
        raise SystemExit(OUT_OF_MEMORY_CODE) from None
