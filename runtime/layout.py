"""Where arrays lie: meshes of axes (dp, fsdp, tp), rows over processes and devices, and back."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

TRAIN_ROWS = ("dp", "fsdp")
ROLLOUT_ROWS = ("dp", "fsdp", "tp")


class Layout(NamedTuple):
    """Where activations lie on the mesh (axes dp, fsdp, tp).

    Matmuls run on rows over (dp, fsdp) with weights over tp. Attention runs on rows over `rows`:
    with tp among them (decode) every device attends for whole sequences, so that the kv cache is
    sharded by sequence however few kv heads there are; without it (training) for its own heads.
    """

    mesh: Mesh
    rows: tuple[str, ...]

    @property
    def row_shards(self) -> int:
        return int(np.prod([self.mesh.shape[axis] for axis in self.rows]))

    @property
    def heads(self) -> str | None:
        """The mesh axis over which attention's heads lie."""
        return None if "tp" in self.rows else "tp"


def make_mesh(
    setting: str, shape: str, devices: Sequence[jax.Device], auto: Sequence[int] = (1, -1, 1)
) -> Mesh:
    """The devices as a (dp, fsdp, tp) mesh. shape: "auto", which is `auto`, or such as "1,4,2".

    One order of devices for every mesh, process by process, so that arrays move between meshes
    within a program. -1 stands for the rest. ValueError names `setting`.
    """
    devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    sizes = list(auto if shape == "auto" else map(int, shape.split(",")))
    known = math.prod(n for n in sizes if n > 0)
    sizes = [len(devices) // known if n == -1 else n for n in sizes]
    if math.prod(sizes) != len(devices):
        raise ValueError(f"{setting}={shape} does not make {len(devices)} devices; auto does")
    local = local_count(devices)
    if local % sizes[2]:
        raise ValueError(
            f"{setting}={shape}: tp={sizes[2]} does not divide the {local} devices of a host; "
            f"tensor parallelism stays inside one"
        )
    return Mesh(np.array(devices).reshape(sizes), ("dp", "fsdp", "tp"))


def local_count(devices: Sequence[jax.Device]) -> int:
    """Devices of one process; all have as many."""
    return sum(d.process_index == devices[0].process_index for d in devices)


def mesh_text(mesh: Mesh) -> str:
    return ",".join(str(size) for size in mesh.shape.values())


def put_rows(x: np.ndarray, layout: Layout) -> jax.Array:
    """The global array whose rows are each process's `x`, in process order, sharded over rows."""
    return jax.make_array_from_process_local_data(NamedSharding(layout.mesh, P(layout.rows)), x)


def local_rows(x: jax.Array) -> np.ndarray:
    """This process's rows of an array sharded over rows: what it gave to put_rows, and in order."""
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def gather_rows(x: np.ndarray) -> np.ndarray:
    """The rows of every process's `x`, in process order; float64 stays float64."""
    if jax.process_count() == 1:
        return x
    bits = multihost_utils.process_allgather(np.ascontiguousarray(x).view(np.uint32))
    return np.concatenate(bits).view(x.dtype)


def on_host(x: jax.Array) -> np.ndarray:
    """The whole of an array, on every process; all have to ask for it."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


# ---- Within a program ----------------------------------------------------------------------------


def constrain(x: jax.Array, layout: Layout | None, *axes: Any) -> jax.Array:
    """x laid out on these mesh axes, one entry a dimension, as in a PartitionSpec."""
    if layout is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, P(*axes)))


def by_row(x: jax.Array, layout: Layout | None) -> jax.Array:
    """x with its rows where attention wants them; a reshape of rows loses that, and the
    partitioner then gathers the keys. The other dimensions stay as they are."""
    if layout is None:
        return x
    return constrain(x, layout, layout.rows, *[P.UNCONSTRAINED] * (x.ndim - 1))


def whole(weight: jax.Array, axes: tuple[Any, ...], layout: Layout | None) -> jax.Array:
    """A weight gathered over fsdp, just before its use: activations move over tp only."""
    without = {"fsdp": None, ("tp", "fsdp"): "tp"}
    return constrain(weight, layout, *(without.get(axis, axis) for axis in axes))
