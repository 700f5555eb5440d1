"""runtime/long_work.py: a terminal sees bars of long work, and a log what took long to compile."""

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from runs import REPO
from tqdm import tqdm

from models import hf
from runtime import long_work
from runtime.layout import make_mesh

TINY = REPO / "tiny"


def run_program(text: str, **where: int) -> subprocess.CompletedProcess:
    """Runs a program of its own. where: its stdout and stderr, if they are no pipes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | where
    return subprocess.run([sys.executable, "-c", text], cwd=REPO, text=True, check=True, **pipes)


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


def test_a_compilation_that_took_long_gets_a_line_with_the_name_of_its_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    long_work.compilations()

    @jax.jit
    def short_program(x: jax.Array) -> jax.Array:
        return x + 1

    @jax.jit
    def long_program(x: jax.Array) -> jax.Array:
        return x + 2

    short_program(jnp.ones(3))
    monkeypatch.setattr(long_work, "LONG_S", 0.0)
    long_program(jnp.ones(3))
    assert re.findall(r"compiling (\w+) took \d s", capsys.readouterr().out) == ["long_program"]


def test_loading_and_exporting_count_up_to_their_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = []

    def shown(what: str, total: int, unit: str) -> tqdm:
        bars.append(tqdm(desc=what, total=total, file=open(os.devnull, "w")))
        return bars[-1]

    monkeypatch.setattr(hf, "progress_bar", shown)
    model, mesh = hf.read_config(TINY), make_mesh("MESH_SHAPE", "2,2,2", jax.devices())
    params = hf.load_params(TINY, model, mesh, jnp.float32)
    hf.save_model(tmp_path, params, model, TINY, dtype="float32")
    assert [bar.desc for bar in bars] == ["loading weights", "exporting the model"]
    assert all(bar.n == bar.total > 0 for bar in bars)
