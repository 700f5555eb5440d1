"""The work of each phase of a training step, from which plan_tpu.py estimates the least time.

A Work has the FLOPs, HBM bytes and ICI (chip to chip) bytes of one device, which computes in
bfloat16. Divided by the rates of the chip they give the least time of the phase. Real kernels reach
only a part of these rates, and small transfers an even smaller part.

Dimensions: n devices, R sequences and G prompts of a program over all devices, S prompt tokens, T
completion tokens, V vocabulary, D model.
"""

from jax.sharding import Mesh

from loss_pallas import block_sizes
from models.logps import LOGITS_TILE_BYTES
from models.model import ModelConfig
from models.placement import Workload, attention_flops, layer_weights, num_params
from runtime.chips import Work


def _activation_bytes(model: ModelConfig) -> int:
    """The bytes of bfloat16 that the matmuls of a layer read and write per token."""
    Hh, Nh = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return 2 * (4 * model.hidden_size + 2 * Hh + 2 * Nh + 3 * model.intermediate_size)


# ---- Rollout -------------------------------------------------------------------------------------


def sync_work(model: ModelConfig, shards: int, tp: int) -> Work:
    """The work of copying float32 weights on `shards` devices to bfloat16 weights split over tp."""
    W = num_params(model)
    received = 2 * W / tp * max(1 - tp / shards, 0)
    return Work(0, 4 * W / shards + 2 * W / tp, received)


def prefill_work(model: ModelConfig, n: int, tp: int, workload: Workload) -> Work:
    """The work of the prefill of a rollout pass."""
    tokens = workload.G * workload.S / n
    weights = model.num_layers * layer_weights(model)
    flops = 2 * weights * tokens + attention_flops(model, tokens * workload.S / 2)
    hbm = 2 * weights / tp + tokens * model.num_layers * _activation_bytes(model)
    # Each layer has two all-reduces, of the tokens of all tp devices.
    ici = model.num_layers * 2 * 2 * (2 * tokens * tp * model.hidden_size) * (tp - 1) / tp
    return Work(flops, hbm, ici, 2 * model.num_layers * tp if tp > 1 else 0)


# ---- Training ------------------------------------------------------------------------------------


def model_flops(model: ModelConfig, workload: Workload) -> float:
    """The FLOPs of one forward over all devices, as MFU counts them: without recomputation."""
    head = model.vocab_size * model.hidden_size * workload.R * workload.T
    weights = model.num_layers * layer_weights(model) * workload.tokens
    return 2 * (weights + head) + attention_flops(model, workload.pairs)


def train_work(
    model: ModelConfig, mesh: Mesh, workload: Workload, *, backward: bool, remat: str, impl: str
) -> Work:
    """The work of one forward or, with `backward`, of a micro-step."""
    dp, fsdp, tp = mesh.shape.values()
    n, L, D = dp * fsdp * tp, model.num_layers, model.hidden_size
    again = backward and remat == "full"
    times = 1 + again + 2 * backward  # backward has two matmuls for each matmul of forward
    weights = L * layer_weights(model)
    layers = 2 * weights * workload.tokens + attention_flops(model, workload.pairs)
    kind = mesh.devices.flat[0].device_kind
    loss_matmuls, loss_bytes = loss_costs(
        impl, workload.R * workload.T * tp // n, D, model.vocab_size // tp, kind
    )
    loss_matmuls = loss_matmuls if backward else 1
    head = 2 * workload.R * workload.T * D * model.vocab_size * loss_matmuls
    tokens = workload.tokens * tp / n  # of the tp devices that share them
    hbm = times * tokens / tp * L * _activation_bytes(model) + (loss_bytes if backward else 0)
    # Weights are written when they are gathered, and read when they are used.
    hbm += (1 + 2 * backward) * 2 * 2 * weights / tp
    gathered = 2 * weights / tp * (1 + 2 * backward)  # forward; backward, with gradients
    gathered += model.vocab_size * D / tp * (8 if backward else 2)
    gathered += (2 if backward else 1) * 2 * tokens * D  # embeddings: see models.model._embed
    ici = gathered * (fsdp - 1) / fsdp
    if backward:  # an all-reduce over dp of the part of the gradients that a device has
        ici += 2 * 4 * (weights + model.vocab_size * D) / (fsdp * tp) * (dp - 1) / dp
    if tp > 1:  # each layer has two all-reduces in forward, in forward again, and in backward
        ici += L * (times - backward) * 2 * 2 * 2 * tokens * D * (tp - 1) / tp
    return Work((times * layers + head) / n, hbm, ici)


def loss_costs(impl: str, n: int, D: int, V: int, device_kind: str) -> tuple[int, float]:
    """Returns the number of matmuls [n, D] x [D, V] and the HBM bytes of token_logps and gradients.

    The bytes are those that the matmuls and the other operations on logits in HBM read and write.
    n: tokens per device.
    """
    hidden, weights, logits = 2 * n * D, 2 * V * D, 4 * n * V  # bfloat16, bfloat16, float32
    grad_hidden, grad_weights, stats = 4 * n * D, 4 * V * D, 4 * n * 128  # float32
    if impl == "full":
        # Forward writes the logits and reads them for maximum, sum and entropy. Backward reads
        # them, writes their gradient and reads the gradient for two matmuls.
        return 3, 8 * logits + 3 * (weights + hidden) + grad_weights
    if impl == "jax":
        # Forward writes the logits and reads them twice. Backward writes and reads them again. It
        # also writes their gradient, in half the bytes, and reads it for two matmuls.
        tiles = max(logits / LOGITS_TILE_BYTES, 1)
        per_tile = 3 * hidden + 2 * grad_hidden
        return 4, 6.5 * logits + tiles * per_tile + 3 * weights + grad_weights
    _, v = block_sizes(D, 2, device_kind)
    forward = V / v * (hidden + 2 * stats) + weights
    per_tile = hidden + 2 * grad_hidden + stats
    return 4, forward + V / v * per_tile + weights + grad_weights


def optimizer_work(model: ModelConfig, shards: int, optimizer: str) -> Work:
    """The work of an optimizer step on float32 arrays split over `shards` devices.

    Weights and moments are read and written, gradients are read.
    """
    moments = {"adamw": 2, "lion": 1, "sgd": 0}[optimizer]
    return Work(0, 4 * num_params(model) / shards * (3 + 2 * moments))
