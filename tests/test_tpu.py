"""Claims about the device programs of a run, as compiled by the TPU compiler, without a TPU."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from runs import environment

from config import Config
from extras.sglang import _draw, program_for_engines
from infra import chips
from model.attention import KV, PackedRows
from model.layout import TRAIN_BATCH_AXES, Layout, make_mesh
from model.next_token import Sampling
from model.params import abstract_params, param_formats
from model.splash import splash_attention
from tools.plan import (
    Plan,
    array,
    bytes_per_device,
    compile_program,
    known_config,
    list_programs,
    make_plan,
    slice_devices,
)

pytest.importorskip("libtpu", reason='libtpu: pip install "jax[tpu]"')
pytestmark = pytest.mark.usefixtures("all_optimizations")
# MODEL_PATH and settings. ROLLOUT_MESH_SHAPE=auto gives 2,1,4 to 3B with all of its layers.
QWEN_3B = """Qwen/Qwen2.5-3B ROLLOUT_PER_DEVICE_BATCH_SIZE=2 GLOBAL_LENGTH=512
    MAX_LENGTH_SAMPLE=1024 ROLLOUT_MESH_SHAPE=2,1,4"""
KERNELS = [("v6e", 128, 0.0), ("v4", 128, 0.0), ("v6e", 64, 0.0), ("v5e", 256, 50.0)]


@functools.cache
def plan_of(run: str) -> Plan:
    """The plan of the run on a v6e-8, with two layers; lax.scan compiles the same program for any
    number."""
    name = run.split()[0]
    two_layers = dataclasses.replace(known_config(name), num_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.plan.known_config", lambda *_: two_layers)
        return make_plan(Config.from_env(environment(f"NUM_PRE_Q=8 MODEL_PATH={run}")), "v6e-8")


# ---- The collectives of a compiled program, from the text of its HLO -----------------------------

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


class Collective(NamedTuple):
    """A collective instruction of a program."""

    kind: str
    elements: int  # of its largest array
    loops: int  # around it


def collectives(hlo: str) -> list[Collective]:
    """Every collective in the text of compiled.as_text()."""
    computations: dict[str, list[str]] = {"": []}
    for line in hlo.splitlines():
        if match := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            computations[match.group(1)] = []
        [*computations.values()][-1].append(line)
    callers = {}  # computation -> its caller, and 1 if it is the body of a loop
    for name, lines in computations.items():
        for role, called in re.findall(r"(body|calls|to_apply)=%([\w.\-]+)", "\n".join(lines)):
            callers[called] = name, role == "body"

    def loops(name: str) -> int:
        caller, of_body = callers.get(name, (None, 0))
        return 0 if caller is None else loops(caller) + of_body

    instructions = []
    for name, lines in computations.items():
        for line in lines:
            if match := re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line):
                result, kind = match.groups()
                # A fusion that keeps a part of its all-reduce is a reduce-scatter.
                kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else kind
                shapes = re.findall(r"\w\[([\d,]*)\]", result)
                most = max(math.prod(int(n) for n in x.split(",") if n) for x in shapes)
                instructions.append(Collective(kind, most, loops(name)))
    return instructions


def collectives_of(plan: Plan, name: str) -> list[Collective]:
    return collectives(compile_program(list_programs(plan)[name]).as_text())


# ---- Decode --------------------------------------------------------------------------------------


def test_a_token_gathers_nothing_and_needs_two_all_reduces_and_two_exchanges_a_layer() -> None:
    instructions = collectives_of(plan_of(QWEN_3B), "decode")
    assert not [x for x in instructions if x.kind == "all-gather"]
    kinds = [x.kind for x in instructions if x.loops == 2]
    assert sorted(kinds) == ["all-reduce", "all-reduce", "all-to-all", "all-to-all"]


def test_decode_reads_gate_and_up_by_rows_as_sync_weights_writes_them() -> None:
    """tp=4 gives a device 2752 of their columns, which are no multiple of 128."""
    programs = list_programs(plan_of(QWEN_3B))
    written = programs["sync_weights"].function.eval_shape(*programs["sync_weights"].arguments)
    read = programs["decode"].arguments[0]
    formats = [[x.format for x in jax.tree.leaves(tree)] for tree in (written, read)]
    assert formats[0] == formats[1]
    assert read.layers.gate.format.layout.major_to_minor == (0, 1, 2)
    assert read.layers.wk.format.layout is None  # 64 columns


def test_a_device_decodes_with_the_keys_and_values_of_its_sequences_alone() -> None:
    """16 sequences of 1024 tokens and 2 prompts of 512, each token with 2 * 2 * 2 * 128 bytes in
    each of two layers."""
    _, _, state, *_ = list_programs(plan_of(QWEN_3B))["decode"].arguments
    assert bytes_per_device(state.completion) == 16 * 1024 * 2048
    assert bytes_per_device(state.prompt) == 2 * 512 * 2048
    assert bytes_per_device(state.outputs) == 16 * (4 * 1024 + 4 * 1024 + 4)


# ---- Training ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_never_puts_a_complete_gradient_or_embedding_on_a_device() -> None:
    plan = plan_of("Qwen/Qwen2.5-0.5B GLOBAL_LENGTH=128 MAX_LENGTH_SAMPLE=128")
    model = plan.training.model
    smallest_weight = model.hidden_size * model.num_kv_heads * model.head_dim  # wk of a layer
    instructions = collectives_of(plan, "micro_step")
    largest = {x.kind: x.elements for x in sorted(instructions, key=lambda x: x.elements)}
    assert largest["all-reduce"] < smallest_weight
    assert largest["all-gather"] < model.vocab_size * model.hidden_size


@pytest.mark.parametrize(
    "chip, head_dim, cap",
    [KERNELS[0], *(pytest.param(*kernel, marks=pytest.mark.slow) for kernel in KERNELS[1:])],
)
def test_splash_attention_and_its_gradient_compile(chip: str, head_dim: int, cap: float) -> None:
    """The last is Gemma 2's."""
    devices = slice_devices(f"{chip}-8")
    layout = Layout(
        Mesh(np.array(devices).reshape(1, -1, 1), ("dp", "fsdp", "tp")), TRAIN_BATCH_AXES
    )
    num_rows, S, completion_places = len(devices), 384, 2048
    width = S + completion_places

    def sharded(*shape: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return array(layout.mesh, shape, dtype, layout.batch_axes)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, *of_tokens: jax.Array) -> jax.Array:
        rows = PackedRows(*of_tokens, S=S)
        out = splash_attention(q, KV(k, v), rows, layout, cap)
        return out.astype(jnp.float32).sum()

    k, v = sharded(num_rows, 2, head_dim, width), sharded(num_rows, 2, width, head_dim)
    program = jax.jit(jax.grad(total, (0, 1, 2)))
    q, of_tokens = sharded(num_rows, width, 4, head_dim), sharded(num_rows, width, dtype=jnp.int32)
    text = program.lower(q, k, v, of_tokens, of_tokens).compile().as_text()
    assert text.count("tpu_custom_call") >= 3  # one kernel of forward and two of backward


# ---- A serving engine on each host ---------------------------------------------------------------


@functools.cache
def two_hosts() -> Mesh:
    return make_mesh("MESH_SHAPE", "auto", slice_devices("v4-16"))


def of_engine(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
    """An array of the engine on the second host."""
    chips = two_hosts().devices.reshape(2, 1, 4)[1]
    mesh = Mesh(chips, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    return array(mesh, shape, jnp.bfloat16, *axes)


@pytest.mark.parametrize("name, order", [("Qwen2.5-7B", (0, 1)), ("Qwen2.5-3B", (1, 0))])
def test_a_weight_reaches_the_engines_of_two_hosts_and_is_complete_on_no_chip(
    name: str, order: tuple[int, int]
) -> None:
    """sync_weights has written the gate by rows. An engine's quarter of its columns has the layout
    of the engine's own arrays."""
    model, mesh = dataclasses.replace(known_config(name), num_layers=1), two_hosts()
    gate = abstract_params(model, mesh, jnp.bfloat16, "unroll").layers[0].gate
    gate = gate.update(sharding=param_formats(model, mesh, "unroll").layers[0].gate)
    assert gate.format.layout.major_to_minor == (0, 1)
    wanted, share = of_engine(gate.shape, None, "tensor"), gate.size * 2 / 4
    compiled = program_for_engines(mesh, wanted, False, 0).lower(gate).compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes == pytest.approx(share, rel=0.03)  # a chip pads columns
    assert memory.temp_size_in_bytes < 0.001 * share
    zeros = jax.jit(lambda: jnp.zeros(gate.shape, gate.dtype), out_shardings=wanted.sharding)
    layout = zeros.lower().compile().output_formats.layout
    assert compiled.output_formats.layout == layout and layout.major_to_minor == order
    if name == "Qwen2.5-7B":
        at_once = jax.jit(lambda x: x, out_shardings=compiled.output_shardings)
        assert at_once.lower(gate).compile().memory_analysis().temp_size_in_bytes > 3.9 * share


def test_an_engine_decodes_on_the_chips_of_the_second_host() -> None:
    """The feed-forward of a layer, the logits, and the tokens that are drawn."""
    B, D, F, V = 64, 1024, 4096, 8192
    weights = of_engine((D, F), None, "tensor"), of_engine((F, D), "tensor", None)
    x, weights = of_engine((B, D), "data", None), [*weights, of_engine((D, V), None, "tensor")]
    numbers = array(x.sharding.mesh, (B,), jnp.int32)

    def decode(x, weights, key, numbers):
        for w in weights:
            x = jnp.matmul(x, w, out_sharding=PartitionSpec("data", "tensor"))
        return _draw(key, numbers, numbers, x, numbers, numbers, sampling=Sampling())

    with jax.set_mesh(x.sharding.mesh):
        arguments = x, weights, jax.eval_shape(jax.random.key, 0), numbers
        compiled = jax.jit(decode).lower(*arguments).compile()
    assert {d.id for d in compiled.output_shardings[0].device_set} == {4, 5, 6, 7}
    assert "all-reduce" in {x.kind for x in collectives(compiled.as_text())}


# ---- Slices --------------------------------------------------------------------------------------

DEVICES_AND_HOSTS = {
    "v4-8": (4, 1),
    "v4-16": (8, 2),
    "v4-32": (16, 4),
    "v5e-1": (1, 1),
    "v5e-4": (4, 1),
    "v5e-8": (8, 1),
    "v5e-16": (16, 4),
    "v5p-8": (4, 1),
    "v6e-1": (1, 1),
    "v6e-4": (4, 1),
    "v6e-8": (8, 1),
    "v6e-16": (16, 4),
    "v6e-64": (64, 16),
    "v6e-256": (256, 64),
}


GCLOUD = {
    "v5litepod-8": "v5e-8",
    "v5litepod-16": "v5e-16",
    "V5E-4": "v5e-4",
    "V6E-8": "v6e-8",
    "V5P-8": "v5p-8",
}


def test_a_slice_has_the_devices_and_hosts_that_the_cloud_gives_and_its_names_in_any_case() -> None:
    slices = {}
    for name in [*chips.SLICES, *GCLOUD]:
        devices = slice_devices(name)
        slices[name] = len(devices), len({d.process_index for d in devices})
        chip = GCLOUD.get(name, name).partition("-")[0]
        assert chips.chip_of(devices[0]) is chips.CHIPS[chip]
    aliases = {alias: DEVICES_AND_HOSTS[name] for alias, name in GCLOUD.items()}
    assert slices == DEVICES_AND_HOSTS | aliases
