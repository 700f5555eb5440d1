"""Claims about runtime/long_work.py: what is seen of work that takes long, and what is not."""

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
from runtime import long_work
from runtime.layout import make_mesh
from test_smoke import REPO

TINY = REPO / "tiny"


def test_work_that_takes_long_gets_one_line_and_other_work_none_also_after_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(long_work, "LIMIT_S", 0.1)
    with long_work.tell_if_long("loading weights"):
        time.sleep(0.4)
    assert capsys.readouterr().out == "loading weights takes longer than 0.1 s\n"
    with pytest.raises(ValueError), long_work.tell_if_long("loading weights"):
        raise ValueError
    time.sleep(0.3)
    assert capsys.readouterr().out == ""


def run_program(text: str, **where: int) -> subprocess.CompletedProcess:
    """Runs a program of its own. where: its stdout and stderr, if they are no pipes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | where
    return subprocess.run([sys.executable, "-c", text], cwd=REPO, text=True, check=True, **pipes)


def test_a_long_compilation_is_told_once_by_the_name_of_its_program() -> None:
    done = run_program("""
import time
import jax, jax.numpy as jnp
from runtime import long_work
long_work.LIMIT_S = 0.5
long_work.compilations()
@jax.jit
def slow(x):
    for i in range(900):
        x = jnp.sin(x @ x) + i
    return x
slow(jnp.ones((8, 8)))
print("compiled", flush=True)
time.sleep(0.8)
""")
    assert done.stdout == "compiling slow takes longer than 0.5 s\ncompiled\n"
    assert done.stderr == ""


def test_a_terminal_has_a_bar_for_work_that_takes_a_while_and_a_pipe_has_nothing() -> None:
    program = """
import time
from runtime import long_work
long_work.DELAY_S = 0.3
with long_work.progress_bar("loading", 10, "GB") as bar:
    for _ in range(4):
        time.sleep(0.2)
        bar.update()
"""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    done = run_program(program, stderr=theirs)
    os.write(theirs, b"end")  # without it a read of nothing would wait
    told = os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
    assert done.stdout == "" and re.search(r"loading: +40%.*4/10", told)
    assert run_program(program).stderr == ""


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
