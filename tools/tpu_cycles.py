"""What the TPU compiler says of a run's speed, without a TPU: trust ratios and not seconds.

    python tools/tpu_cycles.py v6e-8 --config FILE  # of a run: cycles, collectives and memory
    python tools/tpu_cycles.py splash  # six kinds of rows of Qwen2.5-3B on a v6e-8

Cycles are XLA's estimates, without collectives and Pallas kernels. Splash is counted in bundles of
instructions, without stalls: those of all kernels of an update on the slowest chip.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the repository

import jax
import numpy as np

from config import load
from data import Prompt
from infra.mistakes import UserMistake, exit_with_mistakes
from model.attention import KV, PackedRows
from model.blocks import needed_blocks
from model.layout import TRAIN_BATCH_AXES, Layout, make_mesh
from model.splash import LANES, splash_attention
from rows import Batch, RowLimits, pack, plan_rows
from tools.plan import array, compile_program, list_programs, make_plan, slice_devices

COLLECTIVE = r" (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
CALLED = r"(?:body|calls|to_apply)=%?([\w.\-]+)"
DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
# T, the mean tokens of a completion (T: all have T) and the sequences of a micro-step
ROWS = [(1024, 1024, 16), (1024, 304, 16), (1024, 304, 32)]
ROWS += [(4096, 1522, 16), (8192, 3044, 16), (8192, 8192, 8)]


def count_cycles(hlo: str, name: str = "ENTRY ") -> np.ndarray:
    """[2] the cycles and the collectives of an execution of a computation of the program."""
    parts = re.split(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", hlo, flags=re.M)[1:]
    computations = {parts[i] or parts[i + 1]: parts[i + 2] for i in range(0, len(parts), 3)}

    def count(name: str) -> np.ndarray:
        total = np.zeros(2)
        for line in computations[name].splitlines():
            cycles, times = re.findall(r'"estimated_cycles":"(\d+)"', line), 1
            if match := re.search(r" while\(.*condition=%?([\w.\-]+)", line):
                # The condition compares the number of the iteration with a constant.
                times = max(map(int, re.findall(r" constant\((\d+)\)", computations[match[1]])))
            # Those of a Pallas kernel are unknown, which is written as the largest int64.
            known = sum(int(x) for x in cycles if int(x) < 2**62)
            total += known, bool(re.search(COLLECTIVE, line))
            total += times * sum(count(called) for called in re.findall(CALLED, line))
        return total

    return count(name)


def print_programs() -> None:
    cfg, flags, _ = load(["--plan", *sys.argv[1:]])
    programs = list_programs(make_plan(cfg, flags.plan))
    print("| | M cycles | collectives | GiB |\n|---|---|---|---|")
    for name in ("sync_weights", "decode", "micro_step"):
        compiled = compile_program(programs[name])
        stats, hlo = compiled.memory_analysis(), compiled.as_text()
        used = stats.argument_size_in_bytes + stats.temp_size_in_bytes + programs[name].rest
        used += stats.output_size_in_bytes - stats.alias_size_in_bytes
        [*_, loop] = ["", *re.findall(r" while\(.*body=%?([\w.\-]+)", hlo)]
        token = name == "decode"  # the last loop of the text is that over its tokens
        cycles, collectives = count_cycles(hlo, loop) if token else count_cycles(hlo)
        text = f"{cycles / 1e6:.2f} | {collectives:.0f} | {used / 2**30:.2f}"
        print(f"| {'a token of ' * token}{name} | {text} |", flush=True)


def kernel_bundles(S: int, C: int, folder: Path) -> tuple[int, np.ndarray]:
    """The size of a block, and [3] the bundles of an update for each needed pair of blocks, for
    each pair, and for each block of queries, of one head."""
    t, mesh = S + C, make_mesh("MESH_SHAPE", "1,1,1", slice_devices("v6e-1"))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, *tokens: jax.Array) -> jax.Array:
        rows, layout = PackedRows(*tokens, S=S), Layout(mesh, TRAIN_BATCH_AXES)
        return splash_attention(q, KV(k, v), rows, layout, 0.0).astype("float32").sum()

    for file in folder.iterdir():  # of other rows
        file.unlink()
    arrays = [array(mesh, (1, *x), "bfloat16") for x in ((t, 1, 128), (1, 128, t), (1, t, 128))]
    arrays += [array(mesh, (1, t), "int32")] * 2
    hlo = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arrays).compile().as_text()
    bundles = np.zeros(3)
    for kernel, times in (("fwd", 2), ("dkv", 1), ("dq", 1)):  # backward recomputes the forward
        text = max(folder.glob(f"*splash_mha_{kernel}*final_bundles.txt")).read_text()
        begin, branch, skipped = 0, 0, []  # the lengths of code that a branch skips
        lines = re.findall(r"^ *(?:0x)?([0-9a-f]+) +(LB|PF)?: .*?(sbr\.rel|$)", text, re.M)
        for address, mark, branches in ((int(x, 16), *marks) for x, *marks in lines):
            if mark == "PF" and branch:
                skipped.append(address - branch)
            begin = address if mark == "LB" else begin
            branch = address if branches else 0 if mark else branch
        rest = branch - begin - sum(skipped)
        bundles += times * np.array([max(skipped), rest, sum(skipped) - max(skipped)])
    return int(re.findall(r'block_q\\*": (\d+)', hlo)[0]), bundles


def print_rows(T: int, mean: int, micro_batch: int, folder: Path) -> None:
    """A row of the table of splash: 16 prompts of 100 to 300 tokens with 8 completions each, of
    log-normal lengths; if all have T tokens, the prompts have 512."""
    rng, zeros = np.random.default_rng(0), np.zeros((128, T), np.int32)
    prompts, lengths = rng.integers(100, 301, 16), rng.lognormal(np.log(mean) - 0.18, 0.6, 128)
    if mean == T:
        prompts, lengths = np.full(16, 513), np.full(128, T)
    arrays = zeros, zeros, lengths.astype(int).clip(1, T), *[zeros] * 2, *[zeros[:, 0]] * 2
    batch = Batch([Prompt([0] * n, {}) for n in prompts], *arrays, zeros, advantages=zeros[:, 0])
    limits = RowLimits(8, micro_batch // 8, 8, T, prompts.max() - 1, LANES)
    steps, shape = plan_rows(batch, range(128), limits)
    size, bundles = kernel_bundles(shape.S, shape.C, folder)
    n, needed = -(-(shape.S + shape.C) // size), 0
    for rows in (pack(batch, step, shape, pad_id=0) for step in steps):
        pad = (0, 0), (0, n * size - rows.ids.shape[1])
        tokens = (np.pad(x, pad, constant_values=-1) for x in (rows.segment_ids, rows.start))
        blocks = zip(*(x.reshape(len(x), n, 1, size) for x in tokens), strict=True)
        needed += max(needed_blocks(row, shape.S).sum() for row in blocks)
    counts = np.array([needed, len(steps) * n**2, len(steps) * n])
    pairs = f"{size} | {needed} of {counts[1]} | {bundles[0]:.0f}, {bundles[1]:.0f}"
    total = 16 * 36 * counts @ bundles / 1e6  # 16 heads and 36 layers
    text = f"T={T}, mean {mean}, micro {micro_batch} | {shape.S} + {shape.C} | {pairs}"
    print(f"| {text} | {total:.0f} |", flush=True)


def print_splash() -> None:
    print("| rows | S + C | block | needed pairs | bundles of these, of all | M bundles |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = DUMP.format(folder)
        jax.config.update("jax_enable_compilation_cache", False)  # a cached program has no dump
        for row in ROWS:
            print_rows(*row, Path(folder))


if __name__ == "__main__":
    try:
        print_splash() if sys.argv[1:] == ["splash"] else print_programs()
    except UserMistake as error:
        exit_with_mistakes(error)
