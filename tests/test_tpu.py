"""The programs of a real run, compiled by the real TPU compiler, which needs no TPU."""

import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attention import KV
from layout import ROLLOUT_ROWS, Layout
from model import ModelConfig, param_shardings, param_table
from rollout import Sampling, decode

pytest.importorskip("libtpu", reason='the TPU compiler: pip install "jax[tpu]"')
# Qwen2.5-3B but for its depth: the layers are scanned, so two tell what 36 do.
CONFIG = ModelConfig(
    151936, 2048, 11008, 2, 16, 2, 128, 1e-6, 1e6, None, True, True, False, 32768
)  # fmt: skip
G, K, S, T = 16, 8, 512, 1024
SMALLEST_WEIGHT = 2048 * 256  # wk of a layer


def compiled_decode(shape: tuple[int, int, int]) -> str:
    """The HLO of decoding 16 prompts x 8 on a v6e-8 of this (dp, fsdp, tp) mesh."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # else the compiler looks for the TPU's host
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nor does it need a TPU to itself
    one_host = {"topology_name": "v6e:2x4", "chips_per_host_bounds": [2, 4, 1]}
    devices = topologies.get_topology_desc(platform="tpu", **one_host).devices
    mesh = Mesh(np.array(devices).reshape(shape), ("dp", "fsdp", "tp"))
    layout = Layout(mesh, ROLLOUT_ROWS)

    def array(shape: tuple[int, ...], dtype: jnp.dtype, *axes: object) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    params = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=where),
        param_table(CONFIG),
        param_shardings(CONFIG, mesh),
    )
    kv = array((2, G, 2, S, 128), jnp.bfloat16, None, layout.rows)
    prompt = array((G, S + 1), jnp.int32, layout.rows)
    rows = array((G * K,), jnp.int32, layout.rows)
    key = jax.eval_shape(lambda: jax.random.key(0))
    lowered = decode.lower(
        params, CONFIG, KV(kv, kv), prompt, prompt, rows, array(key.shape, key.dtype),
        max_new_tokens=T, stop_ids=(151643, 151645), pad_id=0, sampling=Sampling(),
        dtype=jnp.dtype("bfloat16"), layout=layout,
    )  # fmt: skip
    return lowered.compile().as_text()


def gathered_weights(hlo: str) -> list[str]:
    """Shapes of all-gathers as large as a weight, or of the prompts' keys and values."""
    shapes = re.findall(r"= \(?(\w+\[[\d,]*\]).* all-gather(?:-start)?\(", hlo)
    sizes = [math.prod(int(n) for n in re.findall(r"\d+", s.split("[")[1])) for s in shapes]
    return [shape for shape, size in zip(shapes, sizes, strict=True) if size >= SMALLEST_WEIGHT]


def test_decoding_with_tensor_parallelism_gathers_no_weight_and_no_prompt() -> None:
    assert gathered_weights(compiled_decode((1, 1, 8))) == []


def test_decoding_on_weights_sharded_for_training_would_be_caught() -> None:
    assert gathered_weights(compiled_decode((1, 8, 1)))
