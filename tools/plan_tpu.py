"""Does a run fit a TPU slice, and what does it cost there? Asked of the TPU's compiler, anywhere.

    python train_grpo.py --plan v6e-8        # environment and --config as for the run itself

Compiles the run's own programs, for the layouts in which they run, with libtpu; no TPU and no
weights are needed. Memory and collectives are the compiler's. Times are estimates (roofline.py).
Exit codes: 0 it fits, 3 it does not, 2 a mistake in the settings or no libtpu.
"""

import dataclasses
import math
import re
import time
from collections import defaultdict
from typing import NamedTuple

import jax

from config import Config
from models import hf
from models.placement import decode_work, num_params
from runtime.chips import CHIPS, OUT_OF_MEMORY_CODE, SLICES
from runtime.layout import mesh_text
from runtime.sizes import MICRO_SIZES, PASS_SIZES, derive, prompt_width, smaller_sizes
from startup import how_to_compute, sampling_of, stop_if_too_long
from tools import roofline
from tools.hlo import collectives
from tools.programs import PROGRAMS, ROLLOUT, Plan, bytes_of, call, rest_of_run, runs, slice_devices

GIB = 2**30
ASSUMED_PROMPT = 512  # tokens, where neither MAX_PROMPT_LENGTH nor GLOBAL_LENGTH says


class Memory(NamedTuple):
    """Of one program, bytes per device."""

    arguments: float
    temporaries: float  # and outputs that do not replace arguments
    rest: float  # what else the run holds meanwhile

    @property
    def total(self) -> float:
        return sum(self)


def main(cfg: Config, name: str) -> int:
    """Prints the plan of the run that cfg describes on that slice; returns the exit code."""
    plan, why = make_plan(cfg, name)
    print_plan(plan, name, why)
    chip = CHIPS[SLICES[name].chip]
    limit = chip.hbm_gib * GIB
    print("| GiB per device | arguments | temporaries | rest of run | total | fits | compiled in |"
          " collectives: GiB sent; by loops, MiB each time |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|", flush=True)
    memories = {}
    for program in PROGRAMS:
        if not runs(plan, program):
            continue
        began = time.perf_counter()
        memories[program], text = memory, _ = compiled(plan, program)
        seconds = time.perf_counter() - began
        row = " | ".join(f"{x / GIB:.2f}" for x in (*memory, memory.total))
        barely = "yes" if memory.total <= 0.95 * limit else "barely"
        verdict = f"{barely if memory.total <= limit else 'NO'} | {seconds:.0f} s"
        print(f"| {program} | {row} | {verdict} | {collectives_text(text)} |", flush=True)
    print_estimates(plan, name)

    misfits = [program for program, memory in memories.items() if memory.total > limit]
    for program in misfits:
        print(f"{program} does not fit; {', or '.join(remedies(plan, name, program, limit))}")
    most = max(memories, key=lambda program: memories[program].total)
    total = f"{memories[most].total / GIB:.2f} of {chip.hbm_gib} GiB in {most}"
    print(f"{name}: {'DOES NOT FIT' if misfits else 'fits'}, {total}")
    return OUT_OF_MEMORY_CODE if misfits else 0


def make_plan(cfg: Config, name: str) -> tuple[Plan, str]:
    """And why the rollout's mesh is what it is. Raises ValueError for settings that do not suit the
    model or the slice."""
    devices, hosts = slice_devices(name), SLICES[name].hosts
    sizes = derive(cfg, hosts, len(devices) // hosts)
    model = hf.config_of(cfg.model_path, cfg.model_revision)
    longest = cfg.max_prompt_length or cfg.global_length or ASSUMED_PROMPT
    stop_if_too_long(cfg, model, longest)
    S, T = prompt_width(longest, cfg.global_length) - 1, cfg.max_length_sample
    training, rollout, reason = how_to_compute(cfg, model, sizes, S, devices)
    return Plan(cfg, sizes, training, rollout, hosts, sampling_of(cfg), S, T), reason


def print_plan(plan: Plan, name: str, why: str) -> None:
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
        f"rollout={mesh_text(mesh)} ({cfg.rollout_mesh_shape}{why})\n"
        f"dtype={training.dtype} remat={training.remat} attention_impl={training.attention_impl} "
        f"policy_loss_impl={training.policy_loss_impl}",
        flush=True,
    )


def compiled(plan: Plan, program: str) -> tuple[Memory, str]:
    """The memory of a program by the TPU's compiler, and its HLO: "" if it is too large for it."""
    function, arguments, static = call(plan, program)
    rest = rest_of_run(plan, program)
    try:
        executable = function.lower(*arguments, **static).compile()
    except jax.errors.JaxRuntimeError as error:
        match = re.search(r"HLO temporaries \(([\d.]+)G\) exceeds", str(error))
        if not match:
            raise
        given = bytes_of(arguments)
        return Memory(given, float(match.group(1)) * GIB - given, rest), ""  # it counts them too
    m = executable.memory_analysis()
    made = m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return Memory(m.argument_size_in_bytes, made, rest), executable.as_text()


# ---- What would fit ------------------------------------------------------------------------------


def remedies(plan: Plan, name: str, program: str, limit: float) -> list[str]:
    """Settings with which the program fits, each confirmed by compiling it with them."""
    cfg, sizes, local = plan.cfg, plan.sizes, plan.rollout.layout.mesh.size // plan.processes
    if program in ("micro_step", "compute_logps"):
        names = MICRO_SIZES
    elif program in ROLLOUT:
        names = PASS_SIZES
    else:
        return ["a larger slice, OPTIMIZER=sgd or lion, or BETA=0 may do"]
    smaller = smaller_sizes(cfg, sizes, plan.processes, local, names)
    step = -(-plan.T // 16 // 128) * 128
    shorter = [{"max_length_sample": T} for T in range(step, plan.T, step)]
    if program.endswith("prefill"):
        shorter = []  # its size does not depend on the completion's

    def planned(changes: dict[str, int]) -> Plan:
        free = dict.fromkeys(names if changes.keys() & set(names) else (), 0)
        changed = dataclasses.replace(cfg, **{"grad_accum_steps": 0} | free | changes)
        return make_plan(changed, name)[0]

    def total(changes: dict[str, int]) -> float:
        return compiled(planned(changes), program)[0].total

    # Memory grows by the token: a line through two small programs says where to begin.
    room, sizes_to_try = math.inf, smaller or shorter
    if len(sizes_to_try) > 1:
        probes = sizes_to_try[0], sizes_to_try[len(sizes_to_try) // 2]
        (x1, y1), (x2, y2) = ((tokens(planned(one), program), total(one)) for one in probes)
        room = x1 + (limit - y1) * (x2 - x1) / (y2 - y1) if y2 > y1 else math.inf

    def largest(candidates: list[dict[str, int]]) -> str:
        i = sum(tokens(planned(one), program) <= room for one in candidates) - 1
        while i >= 0:
            if (memory := total(candidates[i])) <= limit:
                text = " ".join(f"{key.upper()}={n}" for key, n in candidates[i].items())
                return f"{text} does ({memory / GIB:.2f} GiB)"
            i = min(i - 1, i * 3 // 4)
        return ""

    texts = [text for text in (largest(smaller), largest(shorter)) if text]
    return texts or ["none of its sizes does: take a larger slice"]


def tokens(plan: Plan, program: str) -> float:
    """That a program has in memory, over all devices."""
    if program not in ROLLOUT:
        return plan.train_workload().tokens
    plan = plan.evaluation() if program.startswith("eval_") else plan
    work = plan.rollout_workload()
    return work.G * work.S if program.endswith("prefill") else work.tokens


# ---- Collectives and estimates -------------------------------------------------------------------


def collectives_text(hlo_text: str) -> str:
    """GiB that a program sends, or a token of it; how many collectives there are in each of its
    loops, and the MiB that they send each time."""
    found = collectives(hlo_text)
    sent: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        sent[one.loops][one.kind].append(one.sent_bytes / 2**20)
    texts = [f"{sum(one.times * one.sent_bytes for one in found) / GIB:.2f} GiB"] if found else []
    for loops, kinds in sorted(sent.items(), key=lambda item: len(item[0])):
        where = ", ".join("each token" if n is None else f"{n} x" for n in loops) or "once"
        counts = [f"{len(mib)} {kind} {sum(mib):.2f}" for kind, mib in kinds.items()]
        texts.append(f"{where}: {', '.join(counts)}")
    return "; ".join(texts)


def print_estimates(plan: Plan, name: str) -> None:
    """Roofline times of the phases of a step in which every completion runs to its end."""
    where, cfg, model, sizes = SLICES[name], plan.cfg, plan.training.model, plan.sizes
    chip, n, tp = (
        CHIPS[where.chip],
        plan.rollout.layout.mesh.size,
        plan.rollout.layout.mesh.shape["tp"],
    )
    shards = math.prod(plan.training.layout.mesh.shape[axis] for axis in ("fsdp", "tp"))
    links = sum(2 if size >= 16 else 1 for size in where.shape if size > 1)
    sampled = plan.rollout_workload()
    learnt = plan.train_workload()
    passes, accum, epochs = sizes.passes_per_step, sizes.grad_accum_steps, cfg.ppo_epochs
    scorings = accum * ((cfg.beta > 0) + (cfg.top_entropy_quantile < 1))
    scoring, training = (
        roofline.train_work(
            model, plan.training.layout.mesh, learnt, backward=backward, remat=cfg.remat,
            impl=plan.training.policy_loss_impl,
        )
        for backward in (False, True)
    )  # fmt: skip
    phases = [
        ("weight sync", roofline.sync_work(model, shards, tp), 1),
        ("prefill", roofline.prefill_work(model, n, tp, sampled), passes),
        ("decode, a token", decode_work(model, n, tp, sampled), passes * plan.T),
        ("scoring", scoring, scorings),
        ("micro-step", training, accum * epochs),
        ("optimizer step", roofline.optimizer_work(model, shards, cfg.optimizer), epochs),
    ]
    print("| estimate, all completions full | times | TFLOP | HBM GB | ICI GB | compute ms |"
          " HBM ms | ICI ms | s per step |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    step = update = 0.0
    for phase, work, times in phases:
        if not times:
            continue
        compute, hbm, ici = work.seconds(chip, links)
        # A token waits for every collective; elsewhere they run beside the matmuls.
        one = max(compute, hbm) + ici if phase.startswith("decode") else max(compute, hbm, ici)
        columns = [work.flops / 1e12, work.hbm_bytes / 1e9, work.ici_bytes / 1e9]
        columns += [1e3 * compute, 1e3 * hbm, 1e3 * ici, times * one]
        print(f"| {phase} | {times} | {' | '.join(f'{x:.3g}' for x in columns)} |")
        step += times * one
        update += times * one if phase in ("micro-step", "optimizer step") else 0
    flops = 3 * accum * epochs * roofline.model_flops(model, learnt)
    peak = n * chip.tflops * 1e12
    print(
        f"{step:.1f} s a step by this estimate, {sizes.global_batch * plan.T / step / n:.0f} new "
        f"tokens per second and device; MFU of the update {flops / update / peak:.0%}, of the step "
        f"{flops / step / peak:.0%}"
    )
