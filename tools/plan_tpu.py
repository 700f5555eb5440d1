"""Tells whether a run fits a TPU slice, and estimates its times, without a TPU and without weights.

    python train_grpo.py --plan v6e-8        # the environment and --config are as for the run

The device programs of the run are compiled with libtpu, for the layouts that they have in the run.
Memory and collectives are read from the compiled programs; times are estimates (roofline.py).
The exit code is 0 if the run fits, 3 if it does not, and 2 if the settings are wrong or libtpu is
missing.
"""

import dataclasses
import math
import re
import time
from collections import defaultdict
from typing import NamedTuple, NoReturn

import jax
import numpy as np

from config import Config
from data import Prompt
from models.placement import (
    Workload,
    decode_work,
    how_to_compute,
    limits_of,
    num_params,
    rollout_mesh,
    stop_if_too_long,
)
from rollout_sglang import PAGE_TOKENS, pool_of, stop_if_unable
from runtime.chips import CHIPS, OUT_OF_MEMORY_CODE, SLICES, Chip, Work
from runtime.layout import mesh_text
from runtime.mistakes import UserMistake, fail
from runtime.packing import Batch, plan_rows
from runtime.sizes import MICRO_SIZES, PASS_SIZES, derive, prompt_width, smaller_sizes
from sampling import smaller_batches
from startup import logps_kernel, sampling_of
from tools import known_models, roofline
from tools.hlo import collectives
from tools.programs import PROGRAMS, ROLLOUT, Plan, bytes_of, call, rest_of_run, runs, slice_devices

GIB = 2**30
ASSUMED_PROMPT = 512  # tokens, if neither MAX_PROMPT_LENGTH nor GLOBAL_LENGTH is set
MICRO_STEP, OPTIMIZER_STEP = "micro-step", "optimizer step"  # the phases of an update


class Memory(NamedTuple):
    """The memory of a program, in bytes per device."""

    arguments: float
    temporaries: float  # with the outputs that do not reuse the memory of arguments
    rest: float  # other arrays of the run, which stay in memory meanwhile

    @property
    def total(self) -> float:
        return sum(self)


def plan_and_exit(cfg: Config, name: str) -> NoReturn:
    """Prints the plan of the run with these settings on the slice `name`, and ends the program."""
    try:
        raise SystemExit(print_all(cfg, name))
    except UserMistake as error:
        fail(error)


def print_all(cfg: Config, name: str) -> int:
    """Prints the plan; returns the exit code."""
    plan, reason = make_plan(cfg, name)
    print_plan(plan, name, reason)
    chip = CHIPS[SLICES[name].chip]
    limit = chip.hbm_gib * GIB
    engine = engine_memory(plan, limit) if plan.cfg.rollout_backend == "sglang_jax" else None
    print(
        "| GiB per device | arguments | temporaries | rest of run | total | fits | compiled in | "
        "collectives: GiB sent; by loops, MiB each time |\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    memories = {}
    if engine:
        memories["engine"] = memory = engine
        print(f"| engine | {row(memory, limit)} | not compiled | |", flush=True)
    for program in PROGRAMS:
        if not runs(plan, program):
            continue
        began = time.perf_counter()
        memories[program], text = memory, _ = compiled(plan, program)
        seconds = time.perf_counter() - began
        columns = f"{row(memory, limit)} | {seconds:.0f} s"
        print(f"| {program} | {columns} | {collectives_text(text)} |", flush=True)
    print_estimates(plan, name)

    misfits = [program for program, memory in memories.items() if memory.total > limit]
    for program in misfits:
        print(f"{program} does not fit; {', or '.join(remedies(plan, name, program, limit))}")
    most = max(memories, key=lambda program: memories[program].total)
    total = f"{memories[most].total / GIB:.2f} of {chip.hbm_gib} GiB in {most}"
    print(f"{name}: {'DOES NOT FIT' if misfits else 'fits'}, {total}")
    return OUT_OF_MEMORY_CODE if misfits else 0


def engine_memory(plan: Plan, limit: float) -> Memory:
    """What the serving engine holds while it samples: its weights, and a pool of keys and values,
    which together get at most a fraction of the memory that is free without the training state."""
    cfg, model, rollout = plan.cfg, plan.rollout.model, plan.rollout
    devices = [*rollout.layout.mesh.devices.flat]
    _, tokens = pool_of(cfg, plan.sizes, plan.S + 1, devices)
    tokens += PAGE_TOKENS["tpu"]  # a page that holds what is not needed
    heads = max(model.num_kv_heads, len(devices))  # each device holds at least one
    width = 128 * math.ceil(model.head_dim / 128)
    numbers = num_params(model) + tokens * model.num_layers * 2 * heads * width
    held = numbers * rollout.dtype.itemsize / len(devices)
    most = cfg.sglang_jax_mem_fraction_static * limit
    if held > most:
        print(
            f"the engine needs {held / GIB:.2f} GiB for all sequences of a pass, and "
            f"SGLANG_JAX_MEM_FRACTION_STATIC gives it {most / GIB:.2f}: some will wait for others"
        )
    return Memory(0, min(held, most), rest_of_run(plan, "engine"))


def row(memory: Memory, limit: float) -> str:
    """The memory of a program in GiB, and whether it fits, as columns of the table."""
    columns = " | ".join(f"{x / GIB:.2f}" for x in (*memory, memory.total))
    barely = "yes" if memory.total <= 0.95 * limit else "barely"
    return f"{columns} | {barely if memory.total <= limit else 'NO'}"


def make_plan(cfg: Config, name: str) -> tuple[Plan, str]:
    """The plan of the run, and the reason for the rollout's mesh.

    Raises UserMistake for settings that do not suit the model or the slice.
    """
    devices, hosts = slice_devices(name), SLICES[name].hosts
    sizes = derive(cfg, hosts, len(devices) // hosts)
    model = known_models.config_of(cfg.model_path, cfg.model_revision)
    longest = cfg.max_prompt_length or cfg.global_length or ASSUMED_PROMPT
    stop_if_too_long(cfg.max_length_sample, model, longest)
    if cfg.rollout_backend == "sglang_jax":
        if hosts > 1:
            raise UserMistake(f"ROLLOUT_BACKEND=sglang_jax runs on one host; {name} has {hosts}")
        stop_if_unable(cfg, model, longest, devices)
    S, T = prompt_width(longest, cfg.global_length) - 1, cfg.max_length_sample
    training, rollout, reason = how_to_compute(cfg, model, sizes, S, devices)
    kernel = logps_kernel(cfg.policy_loss_impl, model.hidden_size, devices[0].device_kind)
    training = training._replace(logps_kernel=kernel)
    return Plan(cfg, sizes, training, rollout, hosts, sampling_of(cfg), S, T), reason


def print_plan(plan: Plan, name: str, reason: str) -> None:
    """Prints the sizes and the layouts of the run."""
    cfg, sizes, training = plan.cfg, plan.sizes, plan.training
    mesh = plan.rollout.layout.mesh
    local = mesh.size // plan.processes
    S = f"{plan.S}{'' if cfg.max_prompt_length else ' (assumed, as MAX_PROMPT_LENGTH=0)'}"
    print(
        f"{name}: {mesh.size} x {mesh.devices.flat[0].device_kind}, hosts={plan.processes}, "
        f"{cfg.model_path} of {num_params(training.model) / 1e9:.2f}B parameters\n"
        f"a step: {sizes.global_batch} sequences of {S} + {plan.T} tokens; per device "
        f"{sizes.prompt_batch_size * cfg.num_pre_q // local} in each of {sizes.passes_per_step} "
        f"passes, {sizes.micro_batch_size // local} in each of {sizes.grad_accum_steps} "
        f"micro-steps\n"
        f"mesh dp,fsdp,tp train={mesh_text(training.layout.mesh)} ({cfg.mesh_shape}) "
        f"rollout={rollout_mesh(cfg, plan.rollout)} ({cfg.rollout_mesh_shape}{reason})\n"
        f"dtype={training.dtype} remat={training.remat} attention_impl={training.attention_impl} "
        f"policy_loss_impl={cfg.policy_loss_impl}",
        flush=True,
    )


def compiled(plan: Plan, program: str) -> tuple[Memory, str]:
    """The memory of a program as compiled for the TPU, and the text of its HLO.

    The text is "" if the compiler refuses the program because it is too large.
    """
    function, arguments, static = call(plan, program)
    rest = rest_of_run(plan, program)
    try:
        executable = function.lower(*arguments, **static).compile()
    except jax.errors.JaxRuntimeError as error:
        match = re.search(r"HLO temporaries \(([\d.]+)G\) exceeds", str(error))
        if not match:
            raise
        given = bytes_of(arguments)
        # This number of the compiler includes the arguments.
        return Memory(given, float(match.group(1)) * GIB - given, rest), ""
    m = executable.memory_analysis()
    made = m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return Memory(m.argument_size_in_bytes, made, rest), executable.as_text()


# ---- What would fit ------------------------------------------------------------------------------


def remedies(plan: Plan, name: str, program: str, limit: float) -> list[str]:
    """What to change so that the program fits; sizes are compiled before they are proposed."""
    cfg, sizes, local = plan.cfg, plan.sizes, plan.rollout.layout.mesh.size // plan.processes
    if program in ("micro_step", "compute_logps_and_entropies"):
        names = MICRO_SIZES
    elif program in ROLLOUT:
        names = PASS_SIZES
    elif program == "engine":
        free = 1 - rest_of_run(plan, program) / limit
        return [f"SGLANG_JAX_MEM_FRACTION_STATIC={math.floor(100 * free) / 100:.2f} would fit"]
    else:
        return ["use a larger slice, OPTIMIZER=sgd or lion, or BETA=0"]
    smaller = smaller_sizes(cfg, sizes, plan.processes, local, names)
    step = -(-plan.T // 16 // 128) * 128
    shorter = [{"max_length_sample": T} for T in range(step, plan.T, step)]
    if program.endswith("prefill"):
        shorter = []  # its size does not depend on the completions

    def planned(changes: dict[str, int]) -> Plan:
        free = dict.fromkeys(names if changes.keys() & set(names) else (), 0)
        changed = dataclasses.replace(cfg, **{"grad_accum_steps": 0} | free | changes)
        return make_plan(changed, name)[0]

    def total(changes: dict[str, int]) -> float:
        return compiled(planned(changes), program)[0].total

    # Memory grows linearly with the tokens, so two small programs tell where to begin the search.
    room, sizes_to_try = math.inf, smaller or shorter
    if len(sizes_to_try) > 1:
        probes = sizes_to_try[0], sizes_to_try[len(sizes_to_try) // 2]
        (x1, y1), (x2, y2) = (
            (tokens(planned(changes), program), total(changes)) for changes in probes
        )
        room = x1 + (limit - y1) * (x2 - x1) / (y2 - y1) if y2 > y1 else math.inf

    def largest(candidates: list[dict[str, int]]) -> str:
        """The largest of the candidates that fits, as a text; "" if none fits."""
        i = sum(tokens(planned(changes), program) <= room for changes in candidates) - 1
        while i >= 0:
            if (memory := total(candidates[i])) <= limit:
                text = " ".join(f"{key.upper()}={n}" for key, n in candidates[i].items())
                return f"{text} would fit ({memory / GIB:.2f} GiB)"
            i = min(i - 1, i * 3 // 4)
        return ""

    texts = [text for text in (largest(smaller), largest(shorter)) if text]
    return texts or ["none of its smaller sizes fits either: use a larger slice"]


def tokens(plan: Plan, program: str) -> float:
    """The tokens that a program has in memory, over all devices."""
    if program not in ROLLOUT:
        return plan.train_workload().tokens
    plan = plan.evaluation() if program.startswith("eval_") else plan
    work = plan.rollout_workload()
    return work.G * work.S if program.endswith("prefill") else work.tokens


# ---- Collectives and estimates -------------------------------------------------------------------


def collectives_text(hlo_text: str) -> str:
    """The collectives of a program as a text.

    It tells the GiB that a device sends (in decode per token), and then for each loop the number of
    its collectives and the MiB that they send each time.
    """
    found = collectives(hlo_text)
    sent: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for collective in found:
        sent[collective.loops][collective.kind].append(collective.sent_bytes / 2**20)
    total = sum(collective.times * collective.sent_bytes for collective in found)
    texts = [f"{total / GIB:.2f} GiB"] if found else []
    for loops, kinds in sorted(sent.items(), key=lambda item: len(item[0])):
        where = ", ".join("each token" if n is None else f"{n} x" for n in loops) or "once"
        counts = [f"{len(mib)} {kind} {sum(mib):.2f}" for kind, mib in kinds.items()]
        texts.append(f"{where}: {', '.join(counts)}")
    return "; ".join(texts)


class Phase(NamedTuple):
    """A phase of a step, as estimated."""

    name: str
    times: int  # how often it runs in a step
    work: Work  # of a device, each time
    rates: tuple[float, float, float]  # seconds of arithmetic, memory and links, each time
    seconds: float  # of all times together


def phases(plan: Plan, name: str) -> list[Phase]:
    """The phases of a step whose completions all have T tokens."""
    cfg, model, sizes = plan.cfg, plan.training.model, plan.sizes
    mesh, sampling_mesh = plan.training.layout.mesh, plan.rollout.layout.mesh
    chip, n, tp = CHIPS[SLICES[name].chip], sampling_mesh.size, sampling_mesh.shape["tp"]
    shards = mesh.shape["fsdp"] * mesh.shape["tp"]
    sampled, trained = plan.rollout_workload(), plan.train_workload()
    passes, accum, updates = sizes.passes_per_step, sizes.grad_accum_steps, sizes.updates_per_step
    forwards = accum * cfg.num_mini_batches * ((cfg.beta > 0) + cfg.scores_policy())
    how = {"remat": cfg.remat, "impl": cfg.policy_loss_impl}
    logps, micro_step = (
        roofline.train_work(model, mesh, trained, backward=backward, **how)
        for backward in (False, True)
    )
    works = [
        ("weight sync", roofline.sync_work(model, shards, tp), 1),
        ("prefill", roofline.prefill_work(model, n, tp, sampled), passes),
        ("decode, a token", decode_work(model, n, tp, sampled), passes * plan.T),
        ("compute logps", logps, forwards),
        (MICRO_STEP, micro_step, accum * updates),
        (OPTIMIZER_STEP, roofline.optimizer_work(model, shards, cfg.optimizer), updates),
    ]
    found = []
    for phase, work, times in works:
        seconds = least_seconds(work, chip, links_of(name), phase.startswith("decode"))
        if times:
            rates = work.seconds(chip, links_of(name))
            found.append(Phase(phase, times, work, rates, times * seconds))
    return found


def links_of(name: str) -> int:
    """The links of a chip over which a collective of the slice sends; 1 if nothing is sent."""
    # A dimension of 16 chips or more is a ring, so that a chip has two links in it.
    return sum(2 if size >= 16 else 1 for size in SLICES[name].shape if size > 1) or 1


def print_estimates(plan: Plan, name: str) -> None:
    """Prints estimated times of the phases of a step whose completions all have T tokens."""
    sizes, chip = plan.sizes, CHIPS[SLICES[name].chip]
    n = plan.rollout.layout.mesh.size
    print(
        "| estimate, all completions full | times | TFLOP | HBM GB | ICI GB | compute ms | HBM ms "
        "| ICI ms | s per step |\n|---|---|---|---|---|---|---|---|---|"
    )
    found = phases(plan, name)
    for phase, times, work, rates, seconds in found:
        columns = [work.flops / 1e12, work.hbm_bytes / 1e9, work.ici_bytes / 1e9]
        columns += [*(1e3 * x for x in rates), seconds]
        print(f"| {phase} | {times} | {' | '.join(f'{x:.3g}' for x in columns)} |")
    step = sum(phase.seconds for phase in found)
    update = sum(phase.seconds for phase in found if phase.name in (MICRO_STEP, OPTIMIZER_STEP))
    micro_steps = sizes.grad_accum_steps * sizes.updates_per_step
    flops = 3 * micro_steps * roofline.model_flops(plan.training.model, plan.train_workload())
    peak = n * chip.tflops * 1e12
    print(
        f"{step:.1f} s a step by this estimate, {sizes.global_batch * plan.T / step / n:.0f} new "
        f"tokens per second and device; MFU of the update {flops / update / peak:.0%}, of the step "
        f"{flops / step / peak:.0%}"
    )
    if plan.cfg.packs() and plan.cfg.drops_ended():
        print(shorter_line(plan, chip, links_of(name)))


def least_seconds(work: Work, chip: Chip, links: int, decodes: bool = False) -> float:
    """The least time of a phase. Decoding a token waits for every collective; elsewhere they
    overlap with the matmuls."""
    compute, hbm, ici = work.seconds(chip, links)
    return max(compute, hbm) + ici if decodes else max(compute, hbm, ici)


def shorter_line(plan: Plan, chip: Chip, links: int) -> str:
    """A line with the time of a step whose completions have T/4 tokens in the mean.

    Their lengths are drawn from a geometric distribution. Ended sequences leave the batch, and
    rows are packed, as in a run.
    """
    cfg, sizes, (mesh, _) = plan.cfg, plan.sizes, plan.training.layout
    rng, model, prompts = np.random.default_rng(0), plan.training.model, sizes.prompts_per_step
    lengths = np.minimum(rng.geometric(4 / plan.T, sizes.global_batch), plan.T)
    mask = (np.arange(plan.T) < lengths[:, None]).astype(np.int32)
    prompt = Prompt(range(plan.S + 1), {})
    batch = Batch([prompt] * prompts, mask, mask, lengths, sampling_logps=mask)
    limits = limits_of(cfg, sizes, plan.training, plan.processes, plan.S)
    groups = np.arange(prompts).reshape(cfg.num_mini_batches, -1)
    update = 0.0
    for part in groups:
        mini_batch = batch.groups(part)
        everything = range(len(mini_batch.lengths))
        steps, (rows, S, C, *_) = plan_rows(mini_batch, everything, limits)
        X, mean = limits.shards * rows, int(lengths.mean())
        work = Workload(X * C // mean, X * S // plan.S, plan.S, mean)
        how = {"backward": True, "remat": cfg.remat, "impl": cfg.policy_loss_impl}
        micro_step = roofline.train_work(model, mesh, work, **how)
        update += len(steps) * least_seconds(micro_step, chip, links)
    n, tp = plan.rollout.layout.mesh.size, plan.rollout.layout.mesh.shape["tp"]
    local = plan.rollout_workload().R // n
    decode = 0.0
    for of_pass in np.split(lengths, sizes.passes_per_step):
        for t in range(plan.T):
            live = -(-int((of_pass > t).sum()) // n)
            size = min(x for x in (local, *smaller_batches(local)) if x >= live)
            work = decode_work(model, n, tp, Workload(size * n, size * n, plan.S, plan.T))
            decode += least_seconds(work, chip, links, decodes=True) if live else 0.0
    update *= cfg.ppo_epochs
    return (
        f"with completions of {mean} tokens in the mean: decoding {decode:.2f} s, micro-steps "
        f"{update:.2f} s, so that a step takes at least {decode + update:.1f} s"
    )
