"""Gives the tests eight CPU devices, before jax is imported, so that sharded programs run anywhere.

Programs compile in less than half the time, and run slower. Runs that tests start as processes do
not read XLA_FLAGS, but most of them get the same settings from runs.py.
"""

import atexit
import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

for number in (signal.SIGINT, signal.SIGHUP):  # a background job ignores them, and so would runs
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["WANDB_API_KEY"] = ""  # no test logs to the W&B of whoever runs it
# The references of NumPy and torch have small arrays, and their threads would wait for a core that
# is busy: torch's took 50 times as long.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")

from cloud import Cloud  # noqa: E402 - NumPy, which it imports, reads the environment
from runs import FASTER_TO_COMPILE, FLAGS  # noqa: E402

# Tests and the runs that they start, on both workers, load what an earlier one has compiled.
# .ci/run names a folder for all tiers.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="cache_")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
flags = os.environ.get("XLA_FLAGS", "")
flags += f" --xla_force_host_platform_device_count=8 {FLAGS}"
os.environ |= FASTER_TO_COMPILE | {"XLA_FLAGS": flags.strip()}
# As infra/hosts.py does, which tests in this process do not start.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
gc.set_threshold(10_000)

QUICK = "not slow and not parity and not engine"  # the addopts of pyproject.toml
# A worker takes one file after the other. The files that take longest come first, so that both
# workers end together.
LONGEST = """
    test_plan.py test_verdict.py test_notebook.py test_two_processes.py test_max_hours.py
    test_faults.py test_qwen35.py test_saved_work.py test_teacher.py test_sft.py test_forks.py
    test_tpu.py test_reliability.py test_train.py test_hub.py test_run_tpu.py test_loss_pallas.py
    test_processes.py test_guess.py test_scorer.py test_turns.py test_rollout.py test_resume.py
    test_int8.py test_replay_by_hand.py test_gpu_check.py
""".split()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "leave out the tests of style, architecture and pages, which a fork may change"
    parser.addoption("--no-style", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == QUICK and all("::" in arg for arg in config.args):
        config.option.markexpr = ""  # a test that the user names runs, also if it is slow
    needed = ("torch", "peft", "wandb", "trackio", "tensorboard", "reasoning_gym")
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if config.option.markexpr == "parity" and lacking:
        raise pytest.UsageError(
            f"`pytest -m parity` compares with {' and '.join(lacking)}, which this environment "
            f"lacks; in an environment for it: pip install -r requirements-parity.txt"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.no_style:
        left_out = [item for item in items if item.get_closest_marker("style")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With NO_SKIPS=1, which .ci/run sets, a skipped test is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    skipped = [report.nodeid for report in reports if isinstance(report, pytest.TestReport)]
    if skipped and os.environ.get("NO_SKIPS") == "1":
        print("\nerror: NO_SKIPS=1, and these were skipped:", *skipped, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def all_optimizations() -> Iterator[None]:
    """For tests of how a program is compiled for its user. They ask for it with usefixtures."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def cloud(tmp_path: Path):
    made = Cloud(tmp_path, FASTER_TO_COMPILE)
    yield made
    for file in tmp_path.glob("worker*/grpo/logs/*Z.pid"):  # a failed test leaves them
        try:
            os.kill(int(file.read_text()), signal.SIGKILL)
        except (ProcessLookupError, ValueError):
            continue
