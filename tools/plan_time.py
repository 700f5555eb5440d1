"""How long a step takes on a TPU slice or a GPU that is not here: an estimate, as a range.

The work of a phase is counted, and divided by what a chip does at best and at worst.
docs/plan_time.md says what is not counted, and compares measured times with the ranges.

Work is an array [4], of a device: FLOPs, bytes that it reads and writes in its memory, bytes that
it sends to others, and kernels too small to reach any peak. Lengths are the prompts [P] and the
completions [P, K] of a step in tokens. Dimensions: D model, F feed-forward, L layers.
"""

import argparse
import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np

from config import Config
from infra.chips import CHIPS, Chip, chip_of
from infra.sizes import MICRO_SIZES, Sizes, completions_per_prompt_in_shard, divisors, size_setting
from model.layout import ROLLOUT_BATCH_AXES, Layout, make_mesh
from model.linear_attention import CHUNK
from model.network import ComputeConfig
from model.params import FULL, LINEAR, ModelConfig, abstract_params, lm_head
from model.placement import attention_flops, linear_attention_flops, update_flops
from model.splash import MAX_ROW_TOKENS
from sampling import stage_ends

Lengths = tuple[np.ndarray, np.ndarray]
# The shares that programs reach of a chip's FLOPs, memory and links, and seconds of a small kernel.
BEST, BEST_KERNEL_S = (0.70, 0.80, 0.80), 0.5e-6
WORST, WORST_KERNEL_S = (0.30, 0.45, 0.35), 1.5e-6
# A wait copies a condition to the host, which then launches the next kernel.
BEST_WAIT_S, WORST_WAIT_S = 10e-6, 40e-6
# By the compiler's schedule the vector unit of a v6e needs four times as long for the scores of
# splash as BEST says of its FLOPs. The matrix units of other chips take as long as theirs.
V6E_SPLASH = 4
KERNELS = 50  # of a layer in a decoding step; compiled programs have 37 to 60
# The delta rule in a forward of rows: float32 products are six of bfloat16 on a TPU, and about
# twice as many as update_flops counts are computed. It reads and writes 12 float32 arrays of the
# size of its values, and has 38 kernels for each chunk.
RULE_PRODUCTS, RULE_ARRAYS, RULE_KERNELS = 12, 12, 38
STATE_PASSES = 3  # over a state in a decoding step: it is read twice, and written


class Plan(NamedTuple):
    """The settings, sizes and layouts that determine the shapes of a run's programs."""

    cfg: Config
    sizes: Sizes
    training: ComputeConfig
    rollout: ComputeConfig
    processes: int
    S: int  # prompt tokens without the last
    mesh_reason: str  # why ROLLOUT_MESH_SHAPE=auto is what it is
    engine_tokens: int  # tokens whose keys and values a serving engine holds; 0 without an engine
    teacher: ComputeConfig | None  # None: no teacher
    scorer: ComputeConfig | None = None  # None: no reward_model

    def local_devices(self) -> int:
        return self.rollout.layout.mesh.size // self.processes


class Memory(NamedTuple):
    """The memory of a program, in bytes per device."""

    arguments: float
    temporaries: float  # with the outputs that do not reuse the memory of arguments
    rest: float  # the run's other arrays
    launches: tuple[int, int] = (0, 0)  # of its kernels on a GPU, and the waits for the host

    @property
    def total(self) -> float:
        return sum(self[:3])


def estimate_seconds(work: np.ndarray, chip: Chip, waits: float = 0) -> np.ndarray:
    """[2] the least and the most seconds. At best a device computes, reads and sends at once.
    waits: how often a GPU waits for its host within a program."""
    peaks = 1e12 * chip.tflops, 1e9 * chip.hbm_gbps, 1e9 * chip.ici_gbps
    at_peak, kernels = work[:3] / peaks, work[3]
    launches = np.array([BEST_KERNEL_S, WORST_KERNEL_S]) * kernels
    waiting = np.array([BEST_WAIT_S, WORST_WAIT_S]) * waits
    return np.array([(at_peak / BEST).max(), (at_peak / WORST).sum()]) + launches + waiting


def forward_work(compute: ComputeConfig, lengths: Lengths) -> np.ndarray:
    """The work of a forward of all tokens, or of as much of a backward."""
    model, mesh, itemsize = compute.model, compute.layout.mesh, compute.dtype.itemsize
    flops = update_flops(dataclasses.replace(model, lora=None), *lengths) / 3
    if compute.attention_impl == "splash" and chip_of(mesh.devices.flat[0]) is CHIPS["v6e"]:
        flops += (V6E_SPLASH - 1) * attention_flops(model, *lengths)
    numbers = sum(x.sum() for x in lengths) * model.num_layers * itemsize
    # Operations read and write 11 F + 18 D numbers; two all-reduces are over rings of tp devices.
    moe, F = model.moe, model.intermediate_size
    F = F * moe.top_k + moe.shared_width if moe else F
    widths = 11 * F + 18 * model.hidden_size
    reduced = 4 * (mesh.shape["tp"] - 1) * model.hidden_size
    work = np.array([flops, numbers * widths, numbers * reduced, 0]) / mesh.size
    return work + delta_rule_work(compute, sum(x.sum() for x in lengths))


def delta_rule_work(compute: ComputeConfig, tokens: float) -> np.ndarray:
    """What the delta rule in chunks adds to a forward of tokens, beyond its FLOPs of update_flops;
    a device has all chunks of its rows, and its part of the heads."""
    model, mesh = compute.model, compute.layout.mesh
    if (sizes := model.linear) is None:
        return np.zeros(4)
    layers = model.count_layers(LINEAR)
    flops = (RULE_PRODUCTS - 1) * linear_attention_flops(model)
    numbers = RULE_ARRAYS * layers * sizes.value_heads * sizes.value_dim
    kernels = RULE_KERNELS * layers * mesh.shape["tp"] / CHUNK
    return tokens * np.array([flops, 4 * numbers, 0, kernels]) / mesh.size


def rollout_work(
    compute: ComputeConfig, lengths: Lengths, steps: int, keys: float, sequences: float = 0.0
) -> np.ndarray:
    """The work of prefill and of decoding steps. On average a device reads in a step the keys and
    values of `keys` slots and the states of linear layers of `sequences`."""
    model, (prompts, completions) = compute.model, lengths
    # Decoding has no chunks, and a step's activations are few.
    work = forward_work(compute, lengths) - delta_rule_work(compute, completions.sum())
    work[1] = forward_work(compute, (prompts, 0 * completions))[1]
    kv = 2 * model.count_layers(FULL) * model.num_kv_heads * model.head_dim * compute.dtype.itemsize
    cached = kv * keys + STATE_PASSES * state_bytes(model) * sequences
    read, gathered = weight_bytes(compute)
    return work + steps * np.array([0, read + cached, gathered, KERNELS * model.num_layers])


def state_bytes(model: ModelConfig) -> int:
    """The bytes of the states of a sequence in all linear layers; they do not grow with it."""
    if (sizes := model.linear) is None:
        return 0
    numbers = sizes.value_heads * sizes.key_dim * sizes.value_dim
    return 4 * model.count_layers(LINEAR) * numbers


def update_work(compute: ComputeConfig, lengths: Lengths, micro_steps: float) -> np.ndarray:
    """The work of forward and backward of all tokens; the optimizer adds little to it."""
    remat, (read, gathered) = compute.remat == "full", weight_bytes(compute)
    passes = (2 if compute.model.lora else 3) + remat
    # A forward gathers the weights, and backward sends as many bytes of gradients back.
    weight_work = np.array([0, (3 + remat) * read, (2 + remat) * gathered, 0])
    return passes * forward_work(compute, lengths) + micro_steps * weight_work


def weight_bytes(compute: ComputeConfig) -> tuple[float, float]:
    """The bytes of the weights that a device multiplies with, and of those gathered over fsdp."""
    mesh = compute.layout.mesh
    params = abstract_params(compute.model, mesh, compute.dtype, compute.layer_loop)
    arrays = jax.tree.leaves((params.layers, params.adapters, lm_head(params)))
    read = sum(x.size * x.dtype.itemsize for x in arrays) / mesh.shape["tp"]
    return read, read * (1 - 1 / mesh.shape["fsdp"])


def work_of_phases(plan: Plan, mean: float, kernels: int = 0) -> dict[str, np.ndarray]:
    """The work of each phase of a step. mean: the tokens of a completion on average. kernels: of a
    micro-step on a GPU."""
    cfg, sizes, training, rollout = plan.cfg, plan.sizes, plan.training, plan.rollout
    T, work = cfg.max_length_sample, {}

    def lengths(sequences: int, tokens: float) -> Lengths:
        # A prompt is computed once for those of its completions that are on a device together.
        share = completions_per_prompt_in_shard(cfg.num_pre_q, sequences)
        rows = sizes.global_batch // share
        return np.full(rows, plan.S), np.full((rows, share), tokens)

    if cfg.loss_type != "sft":
        if plan.engine_tokens:  # each engine has all devices of its host on tp
            shape, devices = f"-1,1,{plan.local_devices()}", rollout.layout.mesh.devices.ravel()
            mesh = make_mesh("MESH_SHAPE", shape, devices)
            rollout = rollout._replace(layout=Layout(mesh, ROLLOUT_BATCH_AXES))
        sequences = sizes.global_batch // sizes.passes_per_step // rollout.layout.batch_shards
        drops = sequences > 1 and (cfg.drops_ended() or plan.engine_tokens > 0)
        computed = min(T, 1.2 * mean + 0.1 * T) if drops else T  # see smaller_batches
        live, sampled = sequences * computed / T, lengths(sequences, computed)
        # Sequences that stay when others leave the batch get copies of their prompts.
        prompts = live if computed < T else sequences / sampled[1].shape[1]
        keys = live * np.mean(stage_ends(T)) + prompts * plan.S
        steps = T * sizes.passes_per_step
        work["rollout"] = rollout_work(rollout, sampled, steps, keys, sequences=live)
        if rollout.layer_loop == "scan" and training.layout.mesh.devices.flat[0].platform != "tpu":
            work["rollout"][1] *= 2.6  # its slices are copied, see choose_layer_loop
    trained = lengths(sizes.micro_batch_size * plan.processes // training.layout.batch_shards, mean)
    if passes := (cfg.beta > 0) + (sizes.updates_per_step > 1 or cfg.top_entropy_quantile < 1):
        work["logps"] = passes * forward_work(training, trained)
    if plan.teacher:
        work["teacher"] = forward_work(plan.teacher, trained)
    if plan.scorer:  # each text has a prompt of its own
        texts = np.full(sizes.global_batch, plan.S + mean), np.zeros((sizes.global_batch, 1))
        work["scorer"] = forward_work(plan.scorer, texts)
    # A row takes more sequences if they are shorter.
    micro_steps = cfg.num_mini_batches * np.ceil(sizes.grad_accum_steps * mean / T)
    update = update_work(training, trained, micro_steps) + micro_steps * np.array(
        [0, 0, 0, kernels]
    )
    return work | {"update": cfg.ppo_epochs * update}


def describe_time(
    plan: Plan, flags: argparse.Namespace, launches: tuple[int, int] = (0, 0)
) -> list[str]:
    """The table of estimated seconds, and a line about 100 steps. launches: from count_launches, of
    a micro-step."""
    T, devices = plan.cfg.max_length_sample, plan.training.layout.mesh.devices
    mean, price = flags.mean_completion or T / 2, flags.price_per_chip_hour
    chip, work = chip_of(devices.flat[0]), work_of_phases(plan, mean, launches[0])
    seconds = {name: estimate_seconds(phase, chip) for name, phase in work.items()}
    seconds["step"] = sum(seconds.values())
    source = "" if flags.mean_completion else " (half of MAX_LENGTH_SAMPLE)"
    head = f"estimate with completions of {mean:g} tokens on average{source}"
    lines = [f"| {head} | seconds | completion tokens per second |", "|---|---|---|"]
    for name, ends in seconds.items():
        speeds = plan.sizes.global_batch * mean / ends[::-1]
        lines.append(f"| {name} | {range_text(ends)} | {range_text(speeds)} |")
    hours = seconds["step"] * 100 / 3600
    cost = f", ${range_text(price * devices.size * hours)}" if price else ""
    if launches[0]:
        lines.append("a micro-step launches {} kernels and waits {} times".format(*launches))
    return [*lines, f"estimate of 100 steps, without compiling: {range_text(hours)} hours{cost}"]


def suggest_larger_micro_batch(
    plan: Plan, flags: argparse.Namespace, memories: list[Memory], kernels: int, limit: float
) -> list[str]:
    """A line about the micro-batch with the shortest update that fits, if it saves more than 10 %
    of the geometric mean of the estimate. memories: of the programs that compute a micro-batch,
    whose temporaries grow no faster than it. kernels: of a micro-step on a GPU. limit: bytes of a
    device."""
    cfg, sizes, training, seconds = plan.cfg, plan.sizes, plan.training, {}
    chip, T = chip_of(training.layout.mesh.devices.flat[0]), cfg.max_length_sample
    mean, shards = flags.mean_completion or T / 2, training.layout.batch_shards
    longest_row = MAX_ROW_TOKENS if training.attention_impl == "splash" else math.inf
    name, _, unit = size_setting(cfg, *MICRO_SIZES, plan.local_devices(), "")
    rest = " GRAD_ACCUM_STEPS=0" if cfg.grad_accum_steps else ""
    for n in divisors(sizes.grad_accum_steps):
        size, count = sizes.micro_batch_size * n, sizes.grad_accum_steps // n
        larger = plan._replace(sizes=sizes._replace(micro_batch_size=size, grad_accum_steps=count))
        work = work_of_phases(larger, mean, kernels)["update"]
        needed = max(memory.total + (n - 1) * memory.temporaries for memory in memories)
        row = size * plan.processes // shards * (plan.S + T)
        if n == 1 or (needed <= 0.95 * limit and row <= longest_row):
            setting = f"{name}={size // unit}{rest}"
            text = f"{setting} needs at most {needed / 2**30:.2f} GiB and would save"
            seconds[text] = math.sqrt(estimate_seconds(work, chip).prod())
    best = min(seconds, key=seconds.__getitem__)
    saved = 100 * (1 - seconds[best] / next(iter(seconds.values())))
    return [f"{best} about {saved:.0f} % of the update"] if saved > 10 else []


def range_text(ends: np.ndarray) -> str:
    """The ends of a range, with two digits that count."""
    return " to ".join(f"{float(f'{x:.2g}'):.12g}" for x in ends)
