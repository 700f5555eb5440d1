"""runtime/checkpoint.py: a restored checkpoint is equal to what was saved, on any mesh."""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_train import REPO, Result, finish, start_two

from runtime.checkpoint import Checkpoints, checksums, space_lines
from runtime.mistakes import UserMistake

RECORD = {"rounds": 7, "evals": [[0, 0.5]], "made_with": {"SEED": "0"}}


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


def test_a_run_says_what_it_will_write_and_which_disk_is_too_small(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert space_lines([]) == ["disk: no checkpoints and no export"]
    half = free * 6 // 10
    [line] = space_lines([("1 x 2 GB of checkpoints", tmp_path / "not" / "yet", half)])
    told = rf"disk: 1 x 2 GB of checkpoints in {tmp_path}/not/yet, \S+ GB free"
    assert re.fullmatch(told, line)
    two = [("checkpoints", tmp_path / "a", half), ("an export", tmp_path / "b", half)]
    line, note = space_lines(two)  # each fits, both do not
    assert re.fullmatch(
        rf"disk: checkpoints in {tmp_path}/a, \S+ GB free; an export in {tmp_path}/b, \S+ GB free",
        line,
    )
    assert note.startswith(f"note: the run needs {2 * half / 1e9:.3g} GB of disk, and ")
    assert "EXPORT_HF=none" in note


def mesh_of(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("a", "b"))


def saved(folder: Path, steps: int, keep: int = 0, evals: dict | None = None) -> Checkpoints:
    checkpoints = Checkpoints(str(folder), keep)
    for step in range(1, steps + 1):
        checkpoints.save(step, arrays_of(step), RECORD, evals or {})
    checkpoints.wait()
    return checkpoints


def restored(folder: Path, like: dict | None = None) -> tuple[int, dict, list[str]]:
    """The step, the arrays and the lines that were printed; step -1 without a checkpoint."""
    checkpoints, said = Checkpoints(str(folder), 0), []
    checkpoints.say = said.append
    wanted = abstract(like or arrays_of(0))
    found = checkpoints.restore(wanted, accept)
    return (found[1]["step"], found[0], said) if found else (-1, {}, said)


def assert_equal(ours: dict, theirs: dict) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_the_newest_checkpoint_and_its_record_are_restored_to_the_bit(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "c", 3)
    assert (checkpoints.newest, checkpoints.newest_begun, checkpoints.steps()) == (3, 3, [1, 2, 3])
    step, arrays, said = restored(tmp_path / "c")
    assert (step, said) == (3, [])
    assert_equal(arrays, arrays_of(3))
    found = Checkpoints(str(tmp_path / "c"), 0).restore(abstract(arrays_of(0)), accept, [2])
    assert {name: found[1][name] for name in RECORD} == RECORD
    assert_equal(found[0], arrays_of(2))


def test_arrays_saved_on_one_mesh_are_restored_onto_another_mesh(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path / "c"), 0)
    checkpoints.save(1, arrays_of(1, mesh_of(4, 2)), RECORD, {})
    checkpoints.wait()
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
        checkpoints.save(step, arrays, RECORD, {})
        arrays = double(arrays)
    checkpoints.wait()
    for step in (1, 2, 3):
        found = Checkpoints(str(tmp_path / "c"), 0).restore(abstract(arrays), accept, [step])
        first = np.arange(3_000_000, dtype=np.float32) * 2 ** (step - 1)
        assert (np.asarray(found[0]["state"]["big"]) == first).all()


def test_the_newest_checkpoints_and_the_best_one_stay(tmp_path: Path) -> None:
    evals = {1: 0.2, 2: 0.9, 3: 0.5, 5: float("nan")}
    assert saved(tmp_path / "c", 6, keep=2, evals=evals).steps() == [2, 5, 6]
    assert saved(tmp_path / "d", 4, keep=1).steps() == [4]


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("kind", ["truncated", "deleted", "flipped"])
def test_a_damaged_checkpoint_is_never_restored_as_something_else(
    tmp_path: Path, kind: str
) -> None:
    """Each of 30 copies is damaged elsewhere; step 3 is restored, or step 2 and a line names 3."""
    saved(tmp_path / "c", 3)
    rng, fell_back = random.Random(kind), 0
    for i in range(30):
        folder = tmp_path / str(i)
        shutil.copytree(tmp_path / "c", folder)
        file = rng.choice(files_of(folder / "3"))
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


def test_half_written_checkpoints_and_changed_records_are_reported_and_skipped(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "c", 2)
    (tmp_path / "c" / "3.orbax-checkpoint-tmp-9").mkdir()
    record = tmp_path / "c" / "2" / "record" / "metadata"
    record.write_text(record.read_text().replace('"rounds": 7', '"rounds": 8'))
    step, arrays, said = restored(tmp_path / "c")
    assert step == 1
    assert said[0].endswith("3.orbax-checkpoint-tmp-9 is half-written and passed over")
    assert said[1].endswith("/2 is damaged and passed over: its record is not what was saved")
    assert restored(tmp_path / "nowhere") == (-1, {}, [])


def test_a_run_does_not_begin_anew_when_no_checkpoint_can_be_read(tmp_path: Path) -> None:
    saved(tmp_path / "c", 2)
    for step in (1, 2):
        (tmp_path / "c" / str(step) / "record" / "metadata").write_text("{}")
    with pytest.raises(
        UserMistake, match="none of the checkpoints in .* can be read; RESUME=never"
    ):
        restored(tmp_path / "c")


def test_nothing_is_deleted_in_the_folder_of_another_run(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1)
    saving = tmp_path / "c" / "2.orbax-checkpoint-tmp-1"
    saving.mkdir()
    there = Checkpoints(str(tmp_path / "c"), read_only=True)
    assert there.restore(abstract(arrays_of(0)), accept)[1]["step"] == 1
    assert saving.exists()


def test_the_error_of_the_check_of_a_record_reaches_the_caller(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "c", 1)

    def refuse(record: dict) -> None:
        raise UserMistake(f"SEED was {record['made_with']['SEED']}")

    with pytest.raises(UserMistake, match="SEED was 0"):
        checkpoints.restore(abstract(arrays_of(0)), refuse)


def test_later_checkpoints_are_set_aside_and_not_lost(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "run" / "checkpoints", 4)
    checkpoints.set_aside(2, tmp_path / "run" / "earlier")
    assert checkpoints.steps() == [1, 2]
    assert sorted(f.name for f in (tmp_path / "run" / "earlier").iterdir()) == ["3", "4"]
    checkpoints.save(3, arrays_of(33), RECORD, {})
    checkpoints.wait()
    assert_equal(restored(tmp_path / "run" / "checkpoints")[1], arrays_of(33))


def test_each_save_into_a_folder_that_cannot_be_written_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    checkpoints, said = Checkpoints(str(tmp_path / "file" / "c"), 1), []
    checkpoints.say = said.append
    for step in (1, 2):
        checkpoints.save(step, arrays_of(step), RECORD, {})
        checkpoints.wait()
    assert checkpoints.newest == -1 and len(said) == 2
    assert said[1].startswith(f"checkpoint of step 2 cannot be written to {tmp_path}/file/c: ")


def test_a_checksum_depends_on_the_order_of_the_elements_and_not_on_the_sharding() -> None:
    values = np.array([[1.0, -2.0], [0.5, np.nan]], np.float32)
    by_hand = int((values.view(np.uint32).astype(object) * [[1, 3], [5, 7]]).sum() % 2**32)
    assert int(checksums(values[::-1])) != by_hand
    assert int(checksums(values)) == by_hand
    where = NamedSharding(mesh_of(2, 2), PartitionSpec("a", "b"))
    assert int(checksums(jax.device_put(values, where))) == by_hand
    assert int(checksums(jnp.array([1, 2**31], jnp.uint32))) == (1 + 3 * 2**31) % 2**32
    half = np.array([1.0, 3.0], ml_dtypes.bfloat16)
    assert int(checksums(half)) == int((half.view(np.uint16).astype(int) * [1, 3]).sum())


def test_a_record_is_a_json_file_that_any_program_can_read(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1)
    record = json.loads((tmp_path / "c" / "1" / "record" / "metadata").read_text())
    assert record["step"] == 1 and record["made_with"] == {"SEED": "0"}
    assert len(record["checksums"]) == 3 and len(record["sha256"]) == 64
    assert "['state']['matrix'] float32[64, 48]" in record["arrays"]


LIMIT = """
import os
import resource
if size := int(os.environ.get("FILE_LIMIT", "0")):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
"""


def limited(tmp_path: Path, fails: int, size: str) -> list[Result]:
    """The results of two processes that save after each of three steps.

    Process `fails` cannot write a file of more than `size` bytes.
    """
    (tmp_path / "sitecustomize.py").write_text(LIMIT)
    outs, each = [tmp_path / "0", tmp_path / "1"], [{}, {}]
    each[fails] = {"FILE_LIMIT": size}
    both = {"STEPS": "3", "SAVE_EVERY_STEPS": "1", "BATCH_SIZE": "2", "EXPORT_HF": "none"}
    both |= {"HEARTBEAT_TIMEOUT_S": "10", "PYTHONPATH": str(tmp_path)}
    running = start_two(outs, 1, *each, **both)
    return [finish(process, out) for process, out in zip(running, outs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fails, size",
    [(1, "300000"), (0, "2000000"), (1, "2000000")],
    ids=["1 before a save", "0 during a save", "1 during a save"],
)
def test_after_a_failed_save_on_one_process_both_processes_go_on(
    tmp_path: Path, fails: int, size: str
) -> None:
    """Both do all steps, neither waits for the other, and they try every later save."""
    began = time.monotonic()
    lost = [
        f"checkpoint of step {step} cannot be written to {tmp_path}/0/checkpoints: File too large; "
        f"there is none yet"
        for step in (1, 2, 3)
    ]
    for result in limited(tmp_path, fails, size):
        lines = result.lines.splitlines()
        assert [line for line in lines if line.startswith("checkpoint")] == lost
        steps = [line.partition(" ")[0] for line in lines if line.startswith("step=")]
        assert steps == ["step=0", "step=1", "step=2"]
        assert result.code == 1 and "Traceback" not in result.errors
        last = result.errors.strip().splitlines()[-1]
        assert last == f"error: the last checkpoint is not in {tmp_path}/0/checkpoints"
    assert time.monotonic() - began < 200


VOTER = """
import sys
import time
import jax
from runtime import checkpoint, processes
from runtime.mistakes import UserMistake
processes.join(init_timeout_s=60, heartbeat_timeout_s=10)
saves = checkpoint.Checkpoints(sys.argv[1])
print(saves._vote("no space" if jax.process_index() else "", 60), flush=True)
if jax.process_index() == 0:
    time.sleep(30)  # it stands for a process that waits for process 1 within orbax
with processes.ending_together():
    saves._vote("no space again", 3)
"""


def test_a_process_ends_by_itself_if_another_process_waits_for_it_within_orbax(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    where = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}
    began = time.monotonic()
    command = [sys.executable, "-c", VOTER, str(tmp_path)]
    running = []
    for i in range(2):
        env = os.environ | where | {"JAX_PROCESS_ID": str(i)}
        running.append(
            subprocess.Popen(command, cwd=REPO, env=env, text=True, stdout=PIPE, stderr=PIPE)
        )
    lines, errors = running[1].communicate(timeout=100)
    assert time.monotonic() - began < 60 and running[1].returncode == 1
    assert lines.splitlines()[-1] == "['', 'no space']"
    assert errors.splitlines()[-1] == (
        f"error: this process cannot write its part of a checkpoint to {tmp_path}: no space again; "
        f"another process waits for this part, so the run has to end"
    )
    assert running[0].stdout.readline() == "['', 'no space']\n"
    running[0].kill()
    running[0].communicate()
