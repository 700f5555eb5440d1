"""What a phase of a step costs a TPU at least: estimates from the model and the layout.

FLOPs, HBM bytes and ICI (chip to chip) bytes of one device, which computes in bfloat16, divided by
what the chip can do. Not a measurement: kernels reach a part of it, and small transfers less.
plan_tpu.py prints these, ROLLOUT_MESH_SHAPE=auto picks by them.

Dimensions: n devices, R sequences, G prompt rows, S prompt tokens, T completion tokens, V
vocabulary, D model.
"""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from loss_pallas import LOGITS_TILE_BYTES, block_sizes
from models.model import ModelConfig, param_table


class Chip(NamedTuple):
    """Facts of one chip, as Google publishes them."""

    kinds: tuple[str, ...]  # how its device_kind begins
    tflops: float  # bfloat16
    hbm_gib: float  # what the compiler lets a program use
    hbm_gbps: float  # GB/s
    ici_gbps: float  # GB/s of one link, one way


CHIPS = {
    "v4": Chip(("TPU v4",), 275, 30.75, 1228, 45),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), 197, 15.75, 819, 45),
    "v5p": Chip(("TPU v5",), 459, 95.74, 2765, 90),
    "v6e": Chip(("TPU v6",), 918, 31.25, 1640, 90),
}
HOP_SECONDS = 1e-6  # from a chip to its neighbour, of a transfer that is all latency


class Slice(NamedTuple):
    """The shape of a slice's torus and its hosts."""

    chip: str
    shape: tuple[int, ...]
    hosts: int
    options: dict[str, Any]  # of jax's get_topology_desc

    @property
    def topology(self) -> dict[str, Any]:
        shape = "x".join(map(str, self.shape))
        return {"platform": "tpu", "topology_name": f"{self.chip}:{shape}", **self.options}


MEGACORE = {"chip_config_name": "megacore"}  # the two cores of a chip are one device
ONE_HOST = {"chips_per_host_bounds": [2, 4, 1]}  # else it has hosts of four chips
SLICES = {
    "v4-8": Slice("v4", (2, 2, 1), 1, MEGACORE),
    "v4-16": Slice("v4", (2, 2, 2), 2, MEGACORE),
    "v4-32": Slice("v4", (2, 2, 4), 4, MEGACORE),
    "v5e-8": Slice("v5e", (2, 4), 1, ONE_HOST),
    "v5e-16": Slice("v5e", (4, 4), 4, {}),
    "v5p-8": Slice("v5p", (2, 2, 1), 1, MEGACORE),
    "v6e-8": Slice("v6e", (2, 4), 1, ONE_HOST),
    "v6e-16": Slice("v6e", (4, 4), 4, {}),
    "v6e-64": Slice("v6e", (8, 8), 16, {}),
    "v6e-256": Slice("v6e", (16, 16), 64, {}),
}


def chip_of(device: jax.Device) -> Chip | None:
    """The facts of a TPU device, by its kind; None for any other device."""
    chips = [c for c in CHIPS.values() if device.device_kind.startswith(c.kinds)]
    return chips[0] if chips else None


def memory_bytes(device: jax.Device) -> float:
    """What programs may use of a device's memory; infinite where nobody says."""
    if chip := chip_of(device):
        return chip.hbm_gib * 2**30
    return (device.memory_stats() or {}).get("bytes_limit", math.inf)


class Work(NamedTuple):
    """Of one device."""

    flops: float
    hbm_bytes: float
    ici_bytes: float = 0.0
    hops: float = 0.0  # that wait for one another

    def seconds(self, chip: Chip, links: int) -> tuple[float, float, float]:
        """Of the arithmetic, of HBM, of the links."""
        ici = self.ici_bytes / (links * chip.ici_gbps * 1e9) + self.hops * HOP_SECONDS
        return self.flops / (chip.tflops * 1e12), self.hbm_bytes / (chip.hbm_gbps * 1e9), ici


class Rows(NamedTuple):
    """What a rollout pass or a micro-step works on, over all devices."""

    R: int
    G: int
    S: int
    T: int

    @property
    def tokens(self) -> int:
        return self.R * self.T + self.G * self.S

    @property
    def pairs(self) -> float:
        return self.G * self.S**2 / 2 + self.R * (self.T * self.S + self.T**2 / 2)


# ---- The model -----------------------------------------------------------------------------------


def num_params(config: ModelConfig) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_table(config)))


def layer_weights(config: ModelConfig) -> int:
    """Numbers in the matrices of one layer: each is multiplied by every token once."""
    layers = jax.tree.leaves(param_table(config).layers)
    return sum(math.prod(leaf.shape[1:]) for leaf in layers if len(leaf.shape) == 3)


def _activation_bytes(c: ModelConfig) -> int:
    """bfloat16 that the matmuls of a layer read and write per token."""
    Hh, Nh = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return 2 * (4 * c.hidden_size + 2 * Hh + 2 * Nh + 3 * c.intermediate_size)


def _attention_flops(c: ModelConfig, pairs: float) -> float:
    """Forward, of all layers, for so many pairs of a query and a key."""
    return 4 * c.num_heads * c.head_dim * c.num_layers * pairs


# ---- Rollout -------------------------------------------------------------------------------------


def sync(config: ModelConfig, shards: int, tp: int) -> Work:
    """float32 over `shards` devices -> a bfloat16 copy over tp."""
    W = num_params(config)
    received = 2 * W / tp * max(1 - tp / shards, 0)
    return Work(0, 4 * W / shards + 2 * W / tp, received)


def prefill(config: ModelConfig, n: int, tp: int, rows: Rows) -> Work:
    c, tokens = config, rows.G * rows.S / n
    weights = c.num_layers * layer_weights(c)
    flops = 2 * weights * tokens + _attention_flops(c, tokens * rows.S / 2)
    hbm = 2 * weights / tp + tokens * c.num_layers * _activation_bytes(c)
    # two all-reduces a layer, of the tokens of the tp devices that share them
    ici = c.num_layers * 2 * 2 * (2 * tokens * tp * c.hidden_size) * (tp - 1) / tp
    return Work(flops, hbm, ici, 2 * c.num_layers * tp if tp > 1 else 0)


def decode_token(config: ModelConfig, n: int, tp: int, rows: Rows) -> Work:
    """One token of every sequence. Caches are read to their end, whatever is written yet."""
    c, R = config, rows.R / n
    weights = c.num_layers * layer_weights(c) + c.vocab_size * c.hidden_size
    kv = 2 * 2 * c.num_kv_heads * c.head_dim * c.num_layers * (rows.G * rows.S / n + R * rows.T)
    logits = 4 * R * c.vocab_size
    flops = 2 * weights * R + _attention_flops(c, R * (rows.S + rows.T))
    heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    # a layer: two all-reduces, and four exchanges between heads and rows; then the logits
    sent = c.num_layers * (2 * 2 * 2 * R * tp * c.hidden_size + 2 * R * heads) + logits
    hops = (6 * c.num_layers + 2) * tp if tp > 1 else 0
    return Work(flops, 2 * weights / tp + kv + 4 * logits, sent * (tp - 1) / tp, hops)


def possible_tp(config: ModelConfig, local_devices: int) -> list[int]:
    """The powers of two that divide a host's devices and every dimension that lies over tp."""
    leaves = jax.tree.leaves(param_table(config))
    sizes = [n for leaf in leaves for n, axes in zip(leaf.shape, leaf.axes, strict=True)
             if axes and "tp" in axes]  # fmt: skip
    powers = [2**i for i in range(local_devices.bit_length())]
    return [tp for tp in powers if not any(size % tp for size in (local_devices, *sizes))]


def layer_tp(config: ModelConfig, memory: float, local_devices: int) -> int:
    """The least tp at which a layer gathered over fsdp, the next one and a gradient, all bfloat16,
    take at most a quarter of a device's memory; the largest there is if none does."""
    possible = possible_tp(config, local_devices)
    small = [tp for tp in possible if 3 * 2 * layer_weights(config) / tp <= memory / 4]
    return (small or possible[-1:])[0]


def best_tp(
    config: ModelConfig, device: jax.Device, n: int, local_devices: int, rows: Rows, itemsize: int
) -> tuple[int, str]:
    """The tp, inside a host, at which decoding one token is estimated fastest, and why.

    Among those whose weights take at most 40 % of the memory of `device`, one of n and of this
    process's; off a TPU the least of them.
    """
    chip, possible = chip_of(device), possible_tp(config, local_devices)
    limit = 0.4 * memory_bytes(device)
    fits = [tp for tp in possible if itemsize * num_params(config) / tp <= limit]
    fits = fits or possible[-1:]
    if chip is None:
        return fits[0], ""
    costs = {}
    for tp in fits:
        work = decode_token(config, n, tp, rows)
        _, hbm, ici = (1e3 * x for x in work.seconds(chip, 2))
        costs[tp] = (hbm + ici, f"tp={tp} {hbm:.2f} + {ici:.2f}")
    best = min(costs, key=lambda tp: costs[tp][0])
    why = ", ".join(text for _, text in costs.values())
    return best, f"estimated ms per token, HBM + collectives: {why}"


# ---- Training ------------------------------------------------------------------------------------


def model_flops(config: ModelConfig, rows: Rows) -> float:
    """Of forward over all devices, as MFU counts: nothing is made twice."""
    head = config.vocab_size * config.hidden_size * rows.R * rows.T
    weights = config.num_layers * layer_weights(config) * rows.tokens
    return 2 * (weights + head) + _attention_flops(config, rows.pairs)


def train_pass(
    config: ModelConfig, mesh: Mesh, rows: Rows, *, backward: bool, remat: str, impl: str
) -> Work:
    """A forward pass, or a micro-step with backward, on a mesh of dp, fsdp and tp."""
    c, (dp, fsdp, tp) = config, mesh.shape.values()
    n, L, D = dp * fsdp * tp, config.num_layers, config.hidden_size
    again = backward and remat == "full"
    passes = 1 + again + 2 * backward  # backward is two matmuls for each of forward's
    weights = L * layer_weights(c)
    layers = 2 * weights * rows.tokens + _attention_flops(c, rows.pairs)
    kind = mesh.devices.flat[0].device_kind
    loss_passes, loss_bytes = loss_costs(
        impl, rows.R * rows.T * tp // n, D, c.vocab_size // tp, kind
    )
    loss_passes = loss_passes if backward else 1
    head = 2 * rows.R * rows.T * D * c.vocab_size * loss_passes
    tokens = rows.tokens * tp / n  # of the devices that share their rows
    hbm = passes * tokens / tp * L * _activation_bytes(c) + (loss_bytes if backward else 0)
    hbm += (1 + 2 * backward) * 2 * 2 * weights / tp  # written when gathered, read when used
    gathered = 2 * weights / tp * (1 + 2 * backward)  # forward; backward, and gradients back
    gathered += c.vocab_size * D / tp * (8 if backward else 2)
    gathered += (2 if backward else 1) * 2 * tokens * D  # rows of the embedding, for its parts
    ici = gathered * (fsdp - 1) / fsdp
    if backward:  # gradients, each device its part
        ici += 2 * 4 * (weights + c.vocab_size * D) / (fsdp * tp) * (dp - 1) / dp
    if tp > 1:  # two all-reduces a layer and pass
        ici += L * (passes - backward) * 2 * 2 * 2 * tokens * D * (tp - 1) / tp
    return Work((passes * layers + head) / n, hbm, ici)


def loss_costs(impl: str, n: int, D: int, V: int, device_kind: str) -> tuple[int, float]:
    """Matmul passes over [n, D] x [D, V] and HBM bytes of token_logps and its gradients: what each
    matmul, and each pass over logits that are in HBM, reads and writes."""
    hidden, weights, logits = 2 * n * D, 2 * V * D, 4 * n * V  # bfloat16, bfloat16, float32
    to_hidden, to_weights, stats = 4 * n * D, 4 * V * D, 4 * n * 128  # float32
    if impl == "full":
        # forward writes the logits and reads them for maximum, sum and entropy; backward reads
        # them, writes the gradient towards them and reads it for two matmuls
        return 3, 8 * logits + 3 * (weights + hidden) + to_weights
    if impl == "jax":
        # written and read twice; backward: written, read, its gradient half as wide
        tiles = max(logits / LOGITS_TILE_BYTES, 1)
        per_tile = 3 * hidden + 2 * to_hidden
        return 4, 6.5 * logits + tiles * per_tile + 3 * weights + to_weights
    block, v = block_sizes(D, 2, device_kind)
    forward = V / v * (hidden + 2 * stats) + weights
    if impl == "pallas":
        per_tile = hidden + 2 * to_hidden + stats
        return 4, forward + V / v * per_tile + weights + to_weights
    # two kernels: hidden's walks the weights for each block of tokens, the weights' the tokens
    apart = n / block * weights + hidden + to_hidden + V / v * hidden + weights + to_weights
    return 5, forward + apart


def optimizer_step(config: ModelConfig, shards: int, optimizer: str) -> Work:
    """float32, over `shards` devices: weights and moments are read and written, gradients read."""
    moments = {"adamw": 2, "lion": 1, "sgd": 0}[optimizer]
    return Work(0, 4 * num_params(config) / shards * (3 + 2 * moments))
