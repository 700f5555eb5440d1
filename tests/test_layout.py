"""Claims about runtime/layout.py: which meshes are made, and where arrays lie on them."""

import types

import jax
import numpy as np
import pytest

from runtime.layout import (
    ROLLOUT_BATCH_AXES,
    TRAIN_BATCH_AXES,
    Layout,
    local_part,
    make_mesh,
    mesh_text,
    shard_batch,
)
from runtime.mistakes import UserMistake


def test_local_part_gives_back_the_array_that_shard_batch_was_given() -> None:
    layout = Layout(make_mesh("MESH_SHAPE", "2,2,2", jax.devices()), TRAIN_BATCH_AXES)
    x = np.arange(24).reshape(8, 3)
    assert shard_batch(x, layout).addressable_shards[0].data.shape == (2, 3)
    np.testing.assert_array_equal(local_part(shard_batch(x, layout)), x)
    assert layout.batch_shards == 4
    assert layout._replace(batch_axes=ROLLOUT_BATCH_AXES).batch_shards == 8


@pytest.mark.parametrize(
    "shape, auto, sizes",
    [
        ("2,2,2", (1, -1, 1), "2,2,2"),
        ("-1,4,1", (1, -1, 1), "2,4,1"),
        ("1,-1,2", (1, -1, 1), "1,4,2"),
        ("auto", (1, -1, 1), "1,8,1"),
        ("auto", (-1, 1, 4), "2,1,4"),
    ],
)
def test_mesh_sizes(shape: str, auto: tuple, sizes: str) -> None:
    mesh = make_mesh("MESH_SHAPE", shape, jax.devices()[::-1], auto)
    assert mesh_text(mesh) == sizes and mesh.axis_names == ("dp", "fsdp", "tp")
    assert [device.id for device in mesh.devices.flat] == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("shape", ["1,3,1", "1,4,1", "2,8,1", "-1,3,1", "-1,-1,1"])
def test_a_mesh_of_other_than_all_devices_is_refused(shape: str) -> None:
    with pytest.raises(
        UserMistake, match=f"ROLLOUT_MESH_SHAPE={shape} is a mesh of .* devices, but the run has 8"
    ):
        make_mesh("ROLLOUT_MESH_SHAPE", shape, jax.devices())


def test_tensor_parallelism_across_hosts_is_refused() -> None:
    four_hosts = [types.SimpleNamespace(process_index=i // 2, id=i) for i in range(8)]
    with pytest.raises(
        UserMistake, match="MESH_SHAPE=1,2,4: tp=4 does not divide the 2 devices of"
    ):
        make_mesh("MESH_SHAPE", "1,2,4", four_hosts)
