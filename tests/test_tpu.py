"""Claims about the device programs of a run, as compiled by the TPU compiler, without a TPU."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Collective, collectives
from jax.sharding import Mesh

from config import Config
from models import attention, model, placement
from runtime import chips
from runtime.layout import TRAIN_BATCH_AXES, Layout, constrain
from tools import known_models, plan_tpu, programs

pytest.importorskip("libtpu", reason='the TPU compiler: pip install "jax[tpu]"')
pytestmark = pytest.mark.usefixtures("all_optimizations")
RUN = {"NUM_PRE_Q": "8", "ROLLOUT_PER_DEVICE_BATCH_SIZE": "2", "MAX_LENGTH_SAMPLE": "1024"}
RUNS = {  # model, slice, settings
    "3b": ("Qwen/Qwen2.5-3B", "v6e-8", {"GLOBAL_LENGTH": "512"}),
    "7b": ("Qwen/Qwen2.5-7B", "v4-16", {"GLOBAL_LENGTH": "128"}),
    "0.5b": ("Qwen/Qwen2.5-0.5B", "v6e-8", {"GLOBAL_LENGTH": "128", "MAX_LENGTH_SAMPLE": "128"}),
}
ALL_RUNS = ["3b", *(pytest.param(run, marks=pytest.mark.slow) for run in ("7b", "0.5b"))]
ALL_KERNELS = [
    pytest.param(chip, dim, marks=() if (chip, dim) == ("v6e", 128) else pytest.mark.slow)
    for chip in chips.CHIPS
    for dim in (64, 128)
]


@functools.cache
def plan_of(run: str, slice_name: str = "", **env: str) -> programs.Plan:
    """The plan of the run with two layers; lax.scan compiles the same program for any number."""
    name, usual_slice, sizes = RUNS[run]
    two_layers = dataclasses.replace(known_models.config_of(name), num_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_models, "config_of", lambda *_: two_layers)
        cfg = Config.from_env({"MODEL_PATH": name} | RUN | sizes | env)
        return plan_tpu.make_plan(cfg, slice_name or usual_slice)[0]


@functools.cache
def compiled(plan: programs.Plan, program: str) -> jax.stages.Compiled:
    function, arguments, static = programs.call(plan, program)
    return function.lower(*arguments, **static).compile()


@functools.cache
def collectives_of(plan: programs.Plan, program: str) -> list[Collective]:
    return collectives(compiled(plan, program).as_text())


def elements(collective: Collective) -> int:
    """The number of elements of its largest array."""
    shapes = re.findall(r"\[([\d,]*)\]", collective.shape)
    return max(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


def smallest_weight(plan: programs.Plan) -> int:
    """The number of elements of wk in a layer."""
    model = plan.training.model
    return model.hidden_size * model.num_kv_heads * model.head_dim


# ---- Decode --------------------------------------------------------------------------------------


def gathered_weights(plan: programs.Plan) -> list[str]:
    """The all-gathers of decode that are as large as a weight or the prompts' keys."""
    gathers = [x for x in collectives_of(plan, "decode") if x.kind == "all-gather"]
    return [x.shape for x in gathers if elements(x) >= smallest_weight(plan)]


@pytest.mark.parametrize("run", ALL_RUNS)
def test_decoding_gathers_no_weight_and_no_prompt(run: str) -> None:
    assert gathered_weights(plan_of(run)) == []


@pytest.mark.slow
def test_decoding_on_weights_sharded_for_training_would_be_caught() -> None:
    assert gathered_weights(plan_of("3b", ROLLOUT_MESH_SHAPE="1,8,1"))


@pytest.mark.parametrize("run", ALL_RUNS)
def test_each_layer_has_two_all_reduces_and_four_exchanges_per_token(run: str) -> None:
    found = collectives_of(plan_of(run), "decode")
    kinds = sorted(x.kind for x in found if x.loops == (None, 2))
    assert kinds.count("all-reduce") == 2 and len(kinds) == 6


def test_a_device_decodes_with_the_keys_and_values_of_its_sequences_alone() -> None:
    """16 sequences of 1024 tokens and 2 prompts of 512, each token with 2 * 2 * 2 * 128 bytes in
    each of two layers."""
    _, (_, _, state, *_), _ = programs.call(plan_of("3b"), "decode")
    assert programs.bytes_of(state.completion) == 16 * 1024 * 2048
    assert programs.bytes_of(state.prompt) == 2 * 512 * 2048
    assert programs.bytes_of(state.drawn) == 16 * (4 * 1024 + 4 * 1024 + 4)


@pytest.mark.slow
def test_the_bytes_between_chips_by_which_tp_is_chosen_are_those_of_the_compiled_program() -> None:
    plan = plan_of("3b")
    model, mesh = plan.training.model, plan.rollout.layout.mesh
    token = placement.decode_work(model, mesh.size, mesh.shape["tp"], plan.rollout_workload())
    sent = sum(x.times * x.sent_bytes for x in collectives_of(plan, "decode"))
    assert token.ici_bytes == pytest.approx(sent, rel=0.2)


# ---- Training ------------------------------------------------------------------------------------


def complete_weights(plan: programs.Plan) -> list[str]:
    """The collectives of a micro-step that put a complete gradient or embedding on a device."""
    table = plan.training.model.vocab_size * plan.training.model.hidden_size
    limits = {"all-reduce": smallest_weight(plan), "all-gather": table}
    found = collectives_of(plan, "micro_step")
    return [x.shape for x in found if elements(x) >= limits.get(x.kind, math.inf)]


@pytest.mark.slow
def test_training_never_puts_a_complete_gradient_or_embedding_on_a_device() -> None:
    assert complete_weights(plan_of("3b")) == []


@pytest.mark.slow
def test_an_embedding_that_is_gathered_for_the_lookup_would_be_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gathered(embed: jax.Array, ids: jax.Array, compute: model.Compute) -> jax.Array:
        embed = constrain(embed.astype(compute.dtype), compute.layout)
        return constrain(embed[ids], compute.layout, TRAIN_BATCH_AXES).reshape(ids.size, -1)

    monkeypatch.setattr(model, "_embed", gathered)
    assert complete_weights(plan_of("0.5b"))


@pytest.mark.slow
def test_with_twice_the_chips_each_holds_half_and_sends_at_most_half_more() -> None:
    # Another temperature, because jit would reuse the trace that the test above has patched.
    other = {"TEMPERATURE": "0.9"}
    plans = [plan_of("0.5b", name, **other) for name in ("v6e-8", "v6e-16")]
    small, large = (compiled(plan, "micro_step").memory_analysis() for plan in plans)
    arguments = small.argument_size_in_bytes
    assert large.argument_size_in_bytes == pytest.approx(arguments / 2, rel=0.01)
    assert large.temp_size_in_bytes < small.temp_size_in_bytes
    # On many chips the compiler may reduce a sharded gradient by all-reduce, twice the bytes.
    sent, sent_by_many = (
        sum(x.times * x.sent_bytes for x in collectives_of(plan, "micro_step")) for plan in plans
    )
    assert sent_by_many < 1.5 * sent * (15 / 16) / (7 / 8)


@pytest.mark.parametrize("chip, head_dim", ALL_KERNELS)
def test_splash_attention_and_its_gradient_compile(chip: str, head_dim: int) -> None:
    devices = programs.slice_devices(f"{chip}-8")
    layout = Layout(
        Mesh(np.array(devices).reshape(1, -1, 1), ("dp", "fsdp", "tp")), TRAIN_BATCH_AXES
    )
    X, S, C = len(devices), 384, 2000

    def array(*shape: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return programs.array(layout.mesh, shape, dtype, layout.batch_axes)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, *of_tokens: jax.Array) -> jax.Array:
        rows = attention.PackedRows(*of_tokens, S=S, longest=1000)
        out = attention.attention(q, attention.KV(k, v), rows, layout, "splash")
        return out.astype(jnp.float32).sum()

    k, v = array(X, 2, head_dim, S + C), array(X, 2, S + C, head_dim)
    program = jax.jit(jax.grad(total, (0, 1, 2)))
    of_tokens = (array(X, S + C, dtype=jnp.int32),) * 2
    arguments = array(X, S + C, 4, head_dim), k, v, *of_tokens
    text = program.lower(*arguments).compile().as_text()
    assert text.count("tpu_custom_call") >= 3  # one kernel of forward and two of backward


# ---- Slices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, devices, hosts",
    [
        ("v4-8", 4, 1),
        ("v4-16", 8, 2),
        ("v4-32", 16, 4),
        ("v5e-1", 1, 1),
        ("v5e-4", 4, 1),
        ("v5e-8", 8, 1),
        ("v5e-16", 16, 4),
        ("v5p-8", 4, 1),
        ("v6e-1", 1, 1),
        ("v6e-4", 4, 1),
        ("v6e-8", 8, 1),
        ("v6e-16", 16, 4),
        ("v6e-64", 64, 16),
        ("v6e-256", 256, 64),
    ],
)
def test_a_slice_has_the_devices_and_hosts_that_the_cloud_gives(
    name: str, devices: int, hosts: int
) -> None:
    found = programs.slice_devices(name)
    assert len(found) == devices and len({d.process_index for d in found}) == hosts
    assert chips.SLICES[name].hosts == hosts
    assert chips.chip_of(found[0]) is chips.CHIPS[chips.SLICES[name].chip]
