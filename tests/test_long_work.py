"""Claims about runtime/long_work.py: what is seen of work that takes long, and what is not."""

import io
import os
import pty
import re
import subprocess
import sys
import termios
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tqdm import tqdm

from models import hf
from runtime.layout import make_mesh
from runtime.long_work import tell_if_long
from test_smoke import REPO

TINY = REPO / "tiny"


def test_work_that_takes_long_gets_one_line_and_other_work_none_also_after_an_error(capsys) -> None:
    with tell_if_long("loading weights", limit_s=0.1):
        time.sleep(0.4)
    assert capsys.readouterr().out == "loading weights takes longer than 0.1 s\n"
    with pytest.raises(ValueError), tell_if_long("loading weights", limit_s=0.1):
        raise ValueError
    time.sleep(0.3)
    assert capsys.readouterr().out == ""


PROGRAM = """
import sys, time
import jax, jax.numpy as jnp
from runtime import long_work
if sys.argv[1] == "compile":
    long_work.compilations(limit_s=0.5)
    @jax.jit
    def slow(x):
        for i in range(900):
            x = jnp.sin(x @ x) + i
        return x
    slow(jnp.ones((8, 8)))
    print("compiled", flush=True)
    time.sleep(0.8)
else:
    long_work.DELAY_S = float(sys.argv[1])
    with long_work.progress_bar("loading", 10, "GB") as bar:
        for _ in range(4):
            time.sleep(0.2)
            bar.update()
"""


def run_program(argument: str, **where: int) -> subprocess.CompletedProcess:
    """Runs PROGRAM in a process of its own. where: its stdout and stderr, if they are no pipes."""
    command = [sys.executable, "-c", PROGRAM, argument]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, cwd=REPO, text=True, check=True, **pipes | where)


def test_a_long_compilation_is_told_once_by_the_name_of_its_program() -> None:
    done = run_program("compile")
    assert done.stdout == "compiling slow takes longer than 0.5 s\ncompiled\n"
    assert done.stderr == ""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_line_that_cannot_be_written_raises_nothing_in_its_thread(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    sys.stdout.close()
    with tell_if_long("loading weights", limit_s=0.1):
        time.sleep(0.4)


@pytest.mark.parametrize("delay, shown", [("0.3", True), ("60", False)])
def test_a_terminal_has_a_bar_for_work_that_takes_a_while_and_a_pipe_has_nothing(
    delay: str, shown: bool
) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    done = run_program(delay, stderr=theirs)
    os.write(theirs, b"end")
    told = os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
    assert done.stdout == "" and bool(re.search(r"loading: +40%.*4/10", told)) == shown
    if shown:
        assert run_program(delay).stderr == ""


@pytest.mark.parametrize("mesh_shape", ["1,8,1", "8,1,1", "2,2,2"])
def test_loading_and_exporting_count_up_to_their_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh_shape: str
) -> None:
    bars = []

    def shown(what: str, total: int, unit: str) -> tqdm:
        bars.append(tqdm(desc=what, total=total, file=open(os.devnull, "w")))
        return bars[-1]

    monkeypatch.setattr(hf, "progress_bar", shown)
    model, mesh = hf.read_config(TINY), make_mesh("MESH_SHAPE", mesh_shape, jax.devices())
    params = hf.load_params(TINY, model, mesh, jnp.float32)
    hf.save_model(tmp_path, params, model, TINY, dtype="float32")
    assert [bar.desc for bar in bars] == ["loading weights", "exporting the model"]
    assert all(bar.n == bar.total > 0 for bar in bars)
