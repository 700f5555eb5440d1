"""infra/checkpoint.py: a restored checkpoint is equal to what was saved, on any mesh."""

import contextlib
import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from runs import REPO

from infra.checkpoint import Checkpoints, Progress, record_digest
from infra.mistakes import Unwritable, UserMistake
from infra.resume import find_checkpoints


def arrays_of(step: int, mesh: Mesh | None = None) -> dict:
    """Arrays with other values for each step: float32, bfloat16 and int32.

    mesh: where they are sharded or replicated; without a mesh they are on one device.
    """
    rng = np.random.default_rng(step)
    values = {
        "matrix": rng.normal(size=(64, 48)).astype(np.float32),
        "half": rng.normal(size=(16, 8)).astype(ml_dtypes.bfloat16),
        "count": np.int32(step),
    }
    if mesh is None:
        return {"state": {name: jnp.asarray(value) for name, value in values.items()}}
    sharded = NamedSharding(mesh, PartitionSpec("a", "b"))
    replicated = NamedSharding(mesh, PartitionSpec())
    where = {"matrix": sharded, "half": sharded, "count": replicated}
    return {"state": {name: jax.device_put(value, where[name]) for name, value in values.items()}}


def accept(record: dict) -> None:
    """A check of a record that refuses no record."""


def abstract(arrays: dict) -> dict:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )


def mesh_of(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("a", "b"))


def progress_after(step: int, best_step: int = -1) -> Progress:
    return Progress({"SEED": "0"}, step=step, rounds=7, best_step=best_step)


def saved(folder: Path, steps: int, keep: int = 0, best: tuple[int, ...] = ()) -> Checkpoints:
    """Saves checkpoints of the steps from 1. best: the best step when each of them is saved."""
    checkpoints = Checkpoints(str(folder), keep)
    for step, best_step in zip(range(1, steps + 1), best or [-1] * steps, strict=True):
        checkpoints.save(arrays_of(step), progress_after(step, best_step))
    checkpoints.wait_until_saved()
    return checkpoints


def restored(folder: Path, like: dict | None = None) -> tuple[int, dict, list[str]]:
    """The step, the arrays and the lines that were printed; step -1 without a checkpoint."""
    wanted = abstract(like or arrays_of(0))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = Checkpoints(str(folder), 0).restore(wanted, accept)
    said = printed.getvalue().splitlines()
    return (result[1]["step"], result[0], said) if result else (-1, {}, said)


def assert_equal(ours: dict, theirs: dict) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_the_newest_checkpoint_and_its_record_are_restored_to_the_bit(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "c", 3)
    assert (checkpoints.newest, checkpoints.steps()) == (3, [1, 2, 3])
    checkpoints.save(arrays_of(0), progress_after(3))  # this step has a checkpoint
    step, arrays, said = restored(tmp_path / "c")
    assert (step, said) == (3, [])
    assert_equal(arrays, arrays_of(3))
    result = Checkpoints(str(tmp_path / "c"), 0).restore(abstract(arrays_of(0)), accept, 2)
    assert (result[1]["rounds"], result[1]["made_with"]) == (7, {"SEED": "0"})
    assert_equal(result[0], arrays_of(2))


def test_arrays_saved_on_one_mesh_are_restored_onto_another_mesh(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path / "c"), 0)
    checkpoints.save(arrays_of(1, mesh_of(4, 2)), progress_after(1))
    checkpoints.wait_until_saved()
    for mesh in (mesh_of(2, 2), mesh_of(1, 1), mesh_of(2, 4)):
        like = arrays_of(0, mesh)
        step, arrays, _ = restored(tmp_path / "c", like)
        assert step == 1
        assert_equal(arrays, arrays_of(1))
        assert arrays["state"]["matrix"].sharding == like["state"]["matrix"].sharding


def test_arrays_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    double = jax.jit(lambda x: jax.tree.map(lambda y: y + y, x), donate_argnums=0)
    checkpoints = Checkpoints(str(tmp_path / "c"), 0)
    arrays = {"state": {"big": jnp.arange(3_000_000, dtype=jnp.float32)}}
    for step in (1, 2, 3):
        checkpoints.save(arrays, progress_after(step))
        arrays = double(arrays)
    checkpoints.wait_until_saved()
    for step in (1, 2, 3):
        result = Checkpoints(str(tmp_path / "c"), 0).restore(abstract(arrays), accept, step)
        first = np.arange(3_000_000, dtype=np.float32) * 2 ** (step - 1)
        assert (np.asarray(result[0]["state"]["big"]) == first).all()


def test_the_newest_checkpoints_and_the_best_one_stay(tmp_path: Path) -> None:
    assert saved(tmp_path / "c", 6, keep=2, best=(-1, 2, 2, 2, 2, 2)).steps() == [2, 5, 6]
    assert saved(tmp_path / "d", 4, keep=1, best=(1, 1, 3, 3)).steps() == [3, 4]
    assert saved(tmp_path / "e", 4, keep=1).steps() == [4]


def test_the_name_of_a_folder_may_have_any_character(tmp_path: Path) -> None:
    """A folder beside it, which the name would match as a pattern, changes nothing."""
    for beside in ("v", "x1y", "azb"):
        saved(tmp_path / beside / "c", 2)
    for name in ("[v2]", "x[1]y", "[!a]", "][", "a**b", "a*?", "{a,b}", "50% #1", "é\n"):
        saved(tmp_path / name / "c", 1)
        step, arrays, said = restored(tmp_path / name / "c")
        assert (step, said) == (1, []), name
        assert_equal(arrays, arrays_of(1))


@pytest.mark.parametrize("lost", ["1/arrays/manifest.ocdbt", "1/record/metadata", "1"])
def test_a_store_that_does_not_keep_the_first_checkpoint_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    wait = ocp.CheckpointManager.wait_until_finished

    def wait_and_lose(manager: ocp.CheckpointManager) -> None:
        wait(manager)
        path = tmp_path / "c" / lost
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)

    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", wait_and_lose)
    with pytest.raises(Unwritable) as error:
        Checkpoints(f"{tmp_path}/c").save(arrays_of(1), progress_after(1))
    line = str(error.value)
    assert line.startswith(f"checkpoint of step 1 was saved, but {tmp_path}/c cannot be read: ")
    assert line.endswith("; set CHECKPOINT_DIR to another folder") and "\n" not in line


@pytest.mark.parametrize("kind", ["truncated", "deleted", "flipped"])
def test_a_damaged_checkpoint_is_never_restored_as_something_else(
    tmp_path: Path, kind: str
) -> None:
    """In each copy another file is damaged; step 3 is restored, or step 2 and a line names 3."""
    saved(tmp_path / "c", 3)
    rng, fell_back = random.Random(kind), 0
    files = sorted(file for file in (tmp_path / "c" / "3").rglob("*") if file.is_file())
    for i, original in enumerate(files):
        folder = tmp_path / str(i)
        shutil.copytree(tmp_path / "c", folder)
        file = folder / original.relative_to(tmp_path / "c")
        size = file.stat().st_size
        if kind == "deleted":
            file.unlink()
        elif kind == "truncated":
            os.truncate(file, rng.randrange(size))
        else:
            content = bytearray(file.read_bytes())
            content[rng.randrange(size)] ^= 1 << rng.randrange(8)
            file.write_bytes(content)
        step, arrays, said = restored(folder)
        assert step in (2, 3), file
        assert_equal(arrays, arrays_of(step))
        if step == 2:
            fell_back += 1
            assert len(said) <= 1
            assert all(f"{folder}/3 is damaged and passed over: " in line for line in said)
    assert fell_back >= 3, "the damage matters in some places"


def test_half_written_checkpoints_and_changed_records_are_passed_over(tmp_path: Path) -> None:
    """Nothing is deleted in the folder of another run that RESUME names: it may be alive."""
    saved(tmp_path / "c", 2)
    half_written = tmp_path / "c" / "3.orbax-checkpoint-tmp-9"
    half_written.mkdir()
    other, _ = find_checkpoints(f"{tmp_path}/c")
    assert other.restore(abstract(arrays_of(0)), accept)[1]["step"] == 2 and half_written.exists()
    record = tmp_path / "c" / "2" / "record" / "metadata"
    record.write_text(record.read_text().replace('"rounds": 7', '"rounds": 8'))
    step, arrays, said = restored(tmp_path / "c")
    assert step == 1
    message = f"checkpoint {tmp_path}/c/2 is damaged and passed over: "
    assert said == [f"{message}the checksum of its record is wrong"]
    values = json.loads(record.read_text()) | {"rounds": 7, "format": 2}
    del values["sha256"]
    record.write_text(json.dumps(values | {"sha256": record_digest(values)}))
    assert restored(tmp_path / "c")[2] == [f"{message}another version of this code has saved it"]
    assert restored(tmp_path / "nowhere") == (-1, {}, [])


def test_a_run_does_not_begin_anew_when_no_checkpoint_can_be_read(tmp_path: Path) -> None:
    saved(tmp_path / "c", 2)
    for step in (1, 2):
        (tmp_path / "c" / str(step) / "record" / "metadata").write_text("{}")
    with pytest.raises(
        UserMistake, match="the checkpoints of step 1, 2 in .* cannot be read; begin a new run"
    ):
        restored(tmp_path / "c")


def test_a_save_that_fails_is_told_with_the_newest_checkpoint_that_stays(tmp_path: Path) -> None:
    """One fails in the background, the other when it begins. Their folders have names that an error
    of a lost connection has, too."""
    first, second = (saved(tmp_path / name, 1) for name in ("barrier", "nccl"))
    shutil.rmtree(tmp_path / "nccl")
    (tmp_path / "nccl").write_text("no folder")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    try:
        for checkpoints, why in ((first, "File too large"), (second, "Not a directory")):
            with pytest.raises(Unwritable) as error:
                checkpoints.save(arrays_of(2), progress_after(2))
                end = time.monotonic() + 20
                while time.monotonic() < end:
                    checkpoints.raise_if_save_failed()  # as each step does; it never waits
            failed = f"checkpoint of step 2 cannot be written to {checkpoints.folder}: {why}"
            assert str(error.value) == f"{failed}; step 1 stays the newest"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


# Each array is written by itself, and each write fails.
FAILING_SAVE = """
import resource, sys
import jax.numpy as jnp, numpy as np
from infra.checkpoint import Checkpoints, Progress
from infra.mistakes import Unwritable
arrays = {str(i): jnp.asarray(np.random.default_rng(i).normal(size=10**5)) for i in range(99)}
resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999))
try:
    checkpoints = Checkpoints(sys.argv[1])
    checkpoints.save(arrays, Progress(step=1))
    checkpoints.wait_until_saved()
except Unwritable as error:
    print(error)
"""


def test_a_save_that_fails_prints_no_traceback_of_another_thread(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAILING_SAVE, str(tmp_path / "c")]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    result = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
    assert result.stdout.startswith(f"checkpoint of step 1 cannot be written to {tmp_path}/c: File")
    assert (result.stderr, result.returncode) == ("", 0)


def test_the_next_save_deletes_a_damaged_checkpoint_which_counts_for_nothing(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "c", 3)
    (tmp_path / "c" / "3" / "record" / "metadata").write_text("{}")
    checkpoints = Checkpoints(str(tmp_path / "c"), keep=2)
    assert checkpoints.restore(abstract(arrays_of(0)), accept)[1]["step"] == 2
    checkpoints.save(arrays_of(4), progress_after(4, best_step=3))  # SAVE_EVERY_STEPS has changed
    checkpoints.wait_until_saved()
    assert checkpoints.steps() == [2, 4], "the newest two that are sound stay"
