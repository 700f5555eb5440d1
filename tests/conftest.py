"""Eight CPU devices, set before jax is imported, so that sharded programs run anywhere.

XLA's older emitters compile in half the time; runs that tests start by themselves use its defaults.
"""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from cloud import Cloud

os.environ["JAX_PLATFORMS"] = "cpu"
flags = os.environ.get("XLA_FLAGS", "")
flags += " --xla_force_host_platform_device_count=8 --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = flags.strip()

QUICK = "not slow and not parity"  # the addopts of pyproject.toml
# A worker takes whole files: those that take longest come first, so that both end together.
LONGEST = """
    test_run_tpu.py test_train.py test_reliability.py test_tpu.py test_sampling_rounds.py
    test_run_tpu_start.py test_mistakes.py test_loss_pallas.py test_plan.py test_variants.py
    test_processes.py
""".split()


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == QUICK and all("::" in arg for arg in config.args):
        config.option.markexpr = ""  # a test that is asked for by its name runs, whatever its tier
    lacking = [name for name in ("torch", "wandb") if importlib.util.find_spec(name) is None]
    if config.option.markexpr == "parity" and lacking:
        raise pytest.UsageError(
            f"`pytest -m parity` compares with {' and '.join(lacking)}, which this environment "
            f"lacks; in one of its own: pip install -r requirements-parity.txt"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With NO_SKIPS=1, as .ci/run sets it, a claim that was skipped is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    claims = [report.nodeid for report in reports if isinstance(report, pytest.TestReport)]
    if claims and os.environ.get("NO_SKIPS") == "1":
        print("\nerror: NO_SKIPS=1, and these were skipped:", *claims, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cloud(tmp_path: Path, cache: Path):
    made = Cloud(tmp_path, cache)
    yield made
    for file in tmp_path.glob("worker*/grpo/logs/*Z.pid"):  # of a test that failed
        try:
            os.kill(int(file.read_text()), signal.SIGKILL)
        except (ProcessLookupError, ValueError):
            continue
