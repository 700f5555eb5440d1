"""Claims about runtime/long_work.py: what it says while work takes long, and that it then stops."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from models import hf
from runtime.layout import make_mesh
from runtime.long_work import LongWork, long_work
from test_smoke import REPO

TINY = REPO / "tiny"


def wait_for_lines(capsys: pytest.CaptureFixture[str], last: str) -> list[str]:
    """The lines that are printed up to one that the pattern `last` matches; 10 seconds at most."""
    lines, end = [], time.monotonic() + 10
    while time.monotonic() < end and not (lines and re.fullmatch(last, lines[-1])):
        time.sleep(0.01)
        lines += capsys.readouterr().out.splitlines()
    return lines


def test_short_work_says_nothing_and_long_work_a_line_in_each_interval(capsys) -> None:
    with long_work("loading", 3.0, "GB", interval_s=60):
        time.sleep(0.1)
    assert capsys.readouterr().out == ""
    began = time.monotonic()
    with long_work("exporting", 12, "tensors", interval_s=0.2) as work:
        work.advance(5)
        lines = wait_for_lines(capsys, r"exporting for \d+ s: 5 of 12 tensors")
        assert time.monotonic() - began >= 0.2
        work.advance()
        lines += wait_for_lines(capsys, r"exporting for \d+ s: 6 of 12 tensors")
    assert 2 <= len(lines) <= (time.monotonic() - began) / 0.2
    with long_work("loading", 3.0, "GB", interval_s=0.05) as work:
        work.advance(0.25)
        with long_work("compiling", interval_s=0.05):
            lines = wait_for_lines(capsys, r"compiling for \d+ s")
    assert re.fullmatch(r"loading for \d+ s: 0.2 of 3.0 GB", lines[0])


def test_an_error_ends_what_is_said_and_one_thread_serves_all_work(capsys) -> None:
    for _ in range(3):
        with pytest.raises(ValueError), long_work("loading", interval_s=0.05):
            assert wait_for_lines(capsys, r"loading for \d+ s")
            raise ValueError
    capsys.readouterr()
    time.sleep(0.3)
    assert capsys.readouterr().out == ""
    with long_work("a", interval_s=0.05), long_work("b", interval_s=0.05):
        threads = [thread for thread in threading.enumerate() if thread.name == "long work"]
    assert len(threads) <= 4  # one for each interval of this file and of long_work itself


PROGRAM = """
import sys, time
import jax, jax.numpy as jnp
from runtime.long_work import long_work, tell_compilations
if sys.argv[1] == "compile":
    tell_compilations(interval_s=0.02)
    @jax.jit
    def slow(x):
        for i in range(300):
            x = jnp.sin(x @ x) + i
        return x
    slow(jnp.ones((8, 8)))
    print("compiled", flush=True)
    time.sleep(0.2)
else:
    with long_work("loading", 10, "GB", interval_s=float(sys.argv[1])) as work:
        work.advance(4)
        time.sleep(0.5)
"""


def run_program(argument: str, errors: int = subprocess.PIPE) -> subprocess.CompletedProcess:
    """Runs PROGRAM in a process of its own. errors: where its stderr goes."""
    command = [sys.executable, "-c", PROGRAM, argument]
    return subprocess.run(
        command, cwd=REPO, text=True, check=True, stdout=subprocess.PIPE, stderr=errors
    )


def test_a_long_compilation_is_told_by_the_name_of_its_program_until_it_ends() -> None:
    done = run_program("compile")
    assert re.fullmatch(r"(compiling \w+ for \d+ s\n)+compiled\n", done.stdout)
    assert "compiling slow for " in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("interval, shown", [("1", True), ("60", False)])
def test_a_terminal_has_a_bar_after_a_tenth_of_the_interval_and_no_lines(interval, shown) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    done = run_program(interval, errors=theirs)
    os.write(theirs, b"end")
    told = os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
    assert done.stdout == "" and bool(re.search(r"loading: +40%.*4/10", told)) == shown


@pytest.mark.parametrize("mesh_shape", ["1,8,1", "8,1,1", "2,2,2"])
def test_loading_and_exporting_count_up_to_their_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh_shape: str
) -> None:
    counted = {}

    @contextlib.contextmanager
    def noted(what: str, total: float, unit: str) -> Iterator[LongWork]:
        with long_work(what, total, unit) as work:
            yield work
        counted[what] = work.done, total

    monkeypatch.setattr(hf, "long_work", noted)
    model, mesh = hf.read_config(TINY), make_mesh("MESH_SHAPE", mesh_shape, jax.devices())
    params = hf.load_params(TINY, model, mesh, jnp.float32)
    hf.save_model(tmp_path, params, model, TINY, dtype="float32")
    for what in ("loading weights", "exporting the model"):
        done, total = counted[what]
        assert done == pytest.approx(total) and total > 0, what
