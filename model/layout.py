"""Device meshes with the axes (dp, fsdp, tp), and the transfer of arrays between hosts and devices.

tp stays within one host. What the axes split (of weights: param_table in params.py):

        wq wk wv gate up    wo down    experts    embed lm_head    batch     heads, F of activations
dp      -                   -          -          -                yes       -
fsdp    inputs              inputs     D          D                yes       -
tp      outputs             inputs     E          V                decoding  matmuls, training
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infra.mistakes import UserMistake

# The mesh axes that split the batch dimension of activations.
TRAIN_BATCH_AXES = ("dp", "fsdp")
ROLLOUT_BATCH_AXES = ("dp", "fsdp", "tp")
GATHER_BYTES = 2**26  # the most bytes that gather_processes puts on a device at once

Axis = str | tuple[str, ...] | None  # the mesh axis or axes that split a dimension


class Layout(NamedTuple):
    """The sharding of activations on a mesh with the axes dp, fsdp and tp.

    Matmuls split the batch over (dp, fsdp) and the weights over tp. Attention splits the batch over
    `batch_axes`. If tp is one of them (decoding), each device computes all heads of its sequences,
    so the kv cache is split by sequence, however few kv heads there are. If it is not
    (training), a device computes a part of the heads.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]

    @property
    def batch_shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)


def make_mesh(
    setting: str, shape: str, devices: Sequence[jax.Device], auto: Sequence[int] = (1, -1, 1)
) -> Mesh:
    """The devices as a mesh (dp, fsdp, tp).

    setting: the name of the setting, for error messages. shape: sizes such as "1,4,2", or "auto"
    for `auto`; -1 stands for all remaining devices. All meshes list the devices in the same order,
    process by process, so that arrays can move between two meshes within one program.
    Raises UserMistake for sizes that do not fit the devices.
    """
    devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    sizes = list(auto if shape == "auto" else map(int, shape.split(",")))
    known = math.prod(size for size in sizes if size > 0)
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        raise UserMistake(
            f"{setting}={shape} is a mesh of {math.prod(sizes)} devices, but the run has "
            f"{len(devices)}; set {setting}=auto"
        )
    local = devices_per_process(devices)
    if local % sizes[2]:
        raise UserMistake(
            f"{setting}={shape}: tp={sizes[2]} does not divide the {local} devices of a host; "
            f"tensor parallelism stays inside one host"
        )
    return Mesh(np.array(devices).reshape(sizes), ("dp", "fsdp", "tp"))


def devices_per_process(devices: Sequence[jax.Device]) -> int:
    return sum(d.process_index == devices[0].process_index for d in devices)


def mesh_text(mesh: Mesh) -> str:
    return ",".join(str(size) for size in mesh.shape.values())


# ---- From host to devices and back ---------------------------------------------------------------


def shard_batch(tree: Any, layout: Layout) -> Any:
    """Global arrays from the NumPy arrays of every process: they are concatenated along their first
    axis, in process order, and split over the layout's batch axes."""
    sharding = NamedSharding(layout.mesh, PartitionSpec(layout.batch_axes))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), tree)


def local_part(x: jax.Array) -> np.ndarray:
    """The part of a global array that this process gave to shard_batch, in the same order."""
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def slice_of_process(values: Sequence[Any]) -> Sequence[Any]:
    """This process's part of the values: each process has an equal part, in process order."""
    count = len(values) // jax.process_count()
    return values[jax.process_index() * count : (jax.process_index() + 1) * count]


def gather_processes(tree: Any) -> Any:
    """The NumPy arrays of all processes, concatenated along their first axis in process order;
    float64 stays float64. All processes have to call it."""

    def gather(x: np.ndarray) -> np.ndarray:
        # As bytes, because jax would round float64; in pieces, because each device holds the bytes
        # of all processes.
        data = x.reshape(-1).view(np.uint8)
        num_pieces = max(-(-data.nbytes * jax.process_count() // GATHER_BYTES), 1)
        pieces = np.array_split(data, num_pieces)
        gathered = [multihost_utils.process_allgather(piece) for piece in pieces]
        joined = np.concatenate(gathered, axis=1)  # [processes, bytes]
        return joined.reshape(-1).view(x.dtype).reshape(len(joined) * len(x), *x.shape[1:])

    return tree if jax.process_count() == 1 else jax.tree.map(gather, tree)


def concatenate_trees(parts: Sequence[Any]) -> Any:
    """One tree of NumPy arrays from trees of the same structure, whose arrays are concatenated
    along their first axis."""
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def gather_to_host(x: jax.Array) -> np.ndarray:
    """The complete array on every process; all processes have to call it."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


# ---- Within a program ----------------------------------------------------------------------------


def constrain(x: jax.Array, layout: Layout, *axes: Axis) -> jax.Array:
    """x with its dimensions split over these mesh axes; those that are left out are not split."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, PartitionSpec(*axes)))


def constrain_batch(x: jax.Array, layout: Layout) -> jax.Array:
    """x with its first dimension split over the batch axes of attention; the compiler chooses the
    sharding of the others.

    A reshape of the batch dimension loses its sharding, and the compiler would then gather keys.
    """
    unconstrained = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    spec = PartitionSpec(layout.batch_axes, *unconstrained)
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))


def exchange(arrays: Sequence[jax.Array], layout: Layout) -> Sequence[jax.Array]:
    """Results [X*t, columns] of matmuls, whose columns are split over tp, as attention needs them:
    in decoding each device gets all columns of its sequences, those of all arrays in one
    all-to-all."""
    # This constraint is the layout of the matmul. With only the constraint of attention below, the
    # compiler would gather the weights in every layer, for every token.
    arrays = [constrain(x, layout, TRAIN_BATCH_AXES, "tp") for x in arrays]
    tp = layout.mesh.shape["tp"]
    if tp == 1 or "tp" not in layout.batch_axes:
        return arrays
    joined = jnp.concatenate([x.reshape(len(x), tp, -1) for x in arrays], axis=2)
    joined = constrain(constrain(joined, layout, TRAIN_BATCH_AXES, "tp"), layout, layout.batch_axes)
    ends = np.cumsum([x.shape[1] // tp for x in arrays])[:-1]
    return [x.reshape(len(x), -1) for x in jnp.split(joined, ends, axis=2)]


def gather_fsdp(weight: jax.Array, axes: tuple[Axis, ...], layout: Layout) -> jax.Array:
    """A weight, gathered over fsdp just before its use, as in ZeRO-3: activations stay where they
    are, but for tp.

    axes: of each dimension of the weight. Without fsdp the weight itself is returned, so that the
    backward of a scan keeps no second copy of weights that have no gradient.
    """
    if layout.mesh.shape["fsdp"] == 1:
        return weight
    without_fsdp: dict[Axis, Axis] = {"fsdp": None, ("tp", "fsdp"): "tp"}
    return constrain(weight, layout, *(without_fsdp.get(axis, axis) for axis in axes))
