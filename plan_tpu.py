"""Does a run fit a TPU slice, and what does it cost there? Asked of the TPU's compiler, anywhere.

    python train_grpo.py --plan v6e-8        # environment and --config as for the run itself

Compiles the run's own programs, for the layouts in which they run, with libtpu; no TPU and no
weights are needed. Memory and collectives are the compiler's. Times are estimates (roofline.py).
Exit codes: 0 it fits, 3 it does not, 2 a mistake in the settings or no libtpu.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax

import config as settings
import hf
import roofline
from hlo import collectives
from layout import mesh_text
from programs import PROGRAMS, ROLLOUT, Plan, bytes_of, call, rest_of_run, runs, slice_devices
from rollout import prompt_width, share
from sizes import derive
from startup import layouts, sampling_of

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


def main(cfg: settings.Config, name: str) -> int:
    """Prints the plan of the run that cfg describes on that slice; returns the exit code."""
    plan = make_plan(cfg, name)
    chip = roofline.CHIPS[roofline.SLICES[name].chip]
    limit = chip.hbm_gib * GIB
    print("| GiB per device | arguments | temporaries | rest of run | total | fits | compiled in |"
          " collectives: loops they run in, MiB sent each time |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|", flush=True)
    memories = {}
    for program in PROGRAMS:
        if not runs(plan, program):
            continue
        began = time.perf_counter()
        memories[program], text = memory, _ = compiled(plan, program)
        row = " | ".join(f"{x / GIB:.2f}" for x in (*memory, memory.total))
        verdict = (
            f"{'yes' if memory.total <= limit else 'NO'} | {time.perf_counter() - began:.0f} s"
        )
        print(f"| {program} | {row} | {verdict} | {collectives_text(text)} |", flush=True)
    print_estimates(plan, name)

    misfits = [program for program, memory in memories.items() if memory.total > limit]
    for program in misfits:
        print(f"{program} does not fit; {', or '.join(remedies(plan, program, limit))}", flush=True)
    most = max(memories, key=lambda program: memories[program].total)
    total = f"{memories[most].total / GIB:.2f} of {chip.hbm_gib} GiB in {most}"
    print(f"{name}: {'DOES NOT FIT' if misfits else 'fits'}, {total}")
    return 3 if misfits else 0


def make_plan(cfg: settings.Config, name: str) -> Plan:
    """Raises ValueError for settings that do not suit the model or the slice; prints the layout."""
    devices, hosts = slice_devices(name), roofline.SLICES[name].hosts
    local = len(devices) // hosts
    sizes = derive(cfg, hosts, local)
    config = hf.config_of(cfg.model_path, cfg.model_revision)
    known = cfg.max_prompt_length or cfg.global_length
    S = prompt_width(known or ASSUMED_PROMPT, cfg.global_length) - 1
    compute, rollout, why = layouts(cfg, config, sizes, S, devices)
    print(
        f"{name}: {len(devices)} x {devices[0].device_kind}, hosts={hosts}, {cfg.model_path} of "
        f"{roofline.num_params(config) / 1e9:.2f}B parameters\n"
        f"a step: {sizes.global_batch} sequences of {S}{'' if known else ' (assumed)'} + "
        f"{cfg.max_length_sample} tokens; per device "
        f"{sizes.prompt_batch_size * cfg.num_pre_q // local} in each of {sizes.passes_per_step} "
        f"passes, {sizes.micro_batch_size // local} in each of {sizes.grad_accum_steps} "
        f"micro-steps\n"
        f"mesh dp,fsdp,tp train={mesh_text(compute.layout.mesh)} ({cfg.mesh_shape}) "
        f"rollout={mesh_text(rollout.mesh)} ({cfg.rollout_mesh_shape}{why})\n"
        f"dtype={compute.dtype} remat={compute.remat} attention_impl={compute.attention_impl} "
        f"policy_loss_impl={compute.impl}",
        flush=True,
    )
    sampling, T = sampling_of(cfg), cfg.max_length_sample
    return Plan(cfg, config, sizes, compute, rollout, hosts, sampling, S, T)


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
        return Memory(bytes_of(arguments), float(match.group(1)) * GIB, rest), ""
    m = executable.memory_analysis()
    made = m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return Memory(m.argument_size_in_bytes, made, rest), executable.as_text()


# ---- What would fit ------------------------------------------------------------------------------


def remedies(plan: Plan, program: str, limit: float) -> list[str]:
    """Settings with which the program fits, each confirmed by compiling it with them."""
    sizes, local = plan.sizes, len(plan.rollout.mesh.devices.flat) // plan.processes
    if program in ("micro_step", "score_tokens"):
        setting, per = "TRAIN_PER_DEVICE_MICRO_BATCH_SIZE", 1
        name, whole = "micro_batch_size", sizes.local_batch
    elif program in ROLLOUT:
        setting, per = "ROLLOUT_PER_DEVICE_BATCH_SIZE", plan.cfg.num_pre_q
        name, whole = "prompt_batch_size", sizes.prompts_per_step // plan.processes
    else:
        return ["weights and optimizer state alone are too much for it: take a larger slice"]
    now = max(getattr(sizes, name) // local, 1)
    smaller = [n for n in range(1, now) if whole // local % n == 0]

    def tokens(n: int, T: int) -> float:
        rows = n * per
        return rows * T + rows // share(plan.cfg.num_pre_q, rows) * plan.S

    def total(n: int, T: int) -> float:
        other = plan._replace(sizes=sizes._replace(**{name: n * local}), T=T)
        return compiled(other, program)[0].total

    # Memory grows by the token: a line through two small programs says which are worth a try.
    small, large = (smaller[:2] + [now])[:2] if smaller else (now, now)
    x1, x2 = tokens(small, plan.T // 2), tokens(large, plan.T)
    y1, y2 = total(small, plan.T // 2), total(large, plan.T)
    room = x1 + (limit - y1) * (x2 - x1) / (y2 - y1)

    def largest(candidates: Iterable[int], shape: Callable[[int], tuple[int, int]]) -> str:
        likely = [n for n in candidates if tokens(*shape(n)) <= room]
        for n in sorted(likely, reverse=True)[:3]:
            if (memory := total(*shape(n))) <= limit:
                return f"{n} does ({memory / GIB:.2f} GiB)"
        return ""

    step = -(-plan.T // 16 // 128) * 128
    found = {
        setting: largest(smaller, lambda n: (n, plan.T)),
        "MAX_LENGTH_SAMPLE": largest(range(step, plan.T, step), lambda T: (now, T)),
    }
    texts = [f"{name}={text}" for name, text in found.items() if text]
    return texts or [f"no {setting} or MAX_LENGTH_SAMPLE does: take a larger slice"]


# ---- Collectives and estimates -------------------------------------------------------------------


def collectives_text(hlo_text: str) -> str:
    """How many there are in each loop of a program, and MiB that each kind sends each time."""
    sent: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in collectives(hlo_text):
        sent[one.loops][one.kind].append(one.sent_bytes / 2**20)
    texts = []
    for loops, kinds in sorted(sent.items(), key=lambda item: len(item[0])):
        where = ", ".join("each token" if n is None else f"{n} x" for n in loops) or "once"
        counts = [f"{len(mib)} {kind} {sum(mib):.2f}" for kind, mib in kinds.items()]
        texts.append(f"{where}: {', '.join(counts)}")
    return "; ".join(texts)


def print_estimates(plan: Plan, name: str) -> None:
    """Roofline times of the phases of a step in which every completion runs to its end."""
    where, cfg, config, sizes = roofline.SLICES[name], plan.cfg, plan.config, plan.sizes
    chip, n, tp = roofline.CHIPS[where.chip], plan.rollout.mesh.size, plan.rollout.mesh.shape["tp"]
    links = sum(2 if size >= 16 else 1 for size in where.shape if size > 1)
    sampled = roofline.Rows(*plan.rollout_rows(), plan.S, plan.T)
    learnt = roofline.Rows(*plan.train_rows(), plan.S, plan.T)
    passes, accum, epochs = sizes.passes_per_step, sizes.grad_accum_steps, cfg.ppo_epochs
    scorings = accum * ((cfg.beta > 0) + (cfg.top_entropy_quantile < 1))
    scoring, training = (
        roofline.train_pass(
            config, plan.compute.layout.mesh, learnt, backward=backward, remat=cfg.remat,
            impl=plan.compute.impl,
        )
        for backward in (False, True)
    )  # fmt: skip
    phases = [
        ("weight sync", roofline.sync(config, n, tp), 1),
        ("prefill", roofline.prefill(config, n, tp, sampled), passes),
        ("decode, a token", roofline.decode_token(config, n, tp, sampled), passes * plan.T),
        ("scoring", scoring, scorings),
        ("micro-step", training, accum * epochs),
        ("optimizer step", roofline.optimizer_step(config, n, cfg.optimizer), epochs),
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
    flops = 3 * accum * epochs * roofline.model_flops(config, learnt)
    peak = n * chip.tflops * 1e12
    print(
        f"{step:.1f} s a step by this estimate, {sizes.global_batch * plan.T / step / n:.0f} new "
        f"tokens per second and device; MFU of the update {flops / update / peak:.0%}, of the step "
        f"{flops / step / peak:.0%}"
    )
