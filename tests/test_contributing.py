"""CONTRIBUTING.md and .github/: what they say about the tests is true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ANYWHERE

REPO = Path(__file__).resolve().parent.parent
PAGE = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
CI_RUN = (REPO / ".ci" / "run").read_text(encoding="utf-8")


def cells_of(heading: str, column: int = 0) -> list[str]:
    """The cells of a column of the table whose head begins with these words."""
    lines = PAGE.partition(f"\n| {heading}")[2].partition("\n\n")[0].splitlines()[2:]
    return [line.strip("| ").split(" | ")[column] for line in lines]


def test_the_table_of_claims_has_each_test_file_once() -> None:
    named = re.findall(r"`(\w+)`", " ".join(cells_of("files in `tests/`")))
    files = [file.stem.removeprefix("test_") for file in (REPO / "tests").glob("test_*.py")]
    assert sorted(named) == sorted(files)


def test_ci_run_has_the_command_of_each_tier_and_skips_nothing() -> None:
    commands = [cell.strip("`") for cell in cells_of("tier", column=1)]
    assert commands == ["pytest", "pytest -m slow", "pytest -m parity", "pytest -m engine"]
    assert [*re.findall(r"^(pytest.*?) --", CI_RUN, re.M)] == commands
    assert re.search(r"^export NO_SKIPS=1 ", CI_RUN, re.M)
    command = "STEPS=1 python train_grpo.py\n"
    assert command in CI_RUN and command in (REPO / "README.md").read_text(encoding="utf-8")


def test_github_runs_what_ci_run_runs_and_may_only_read() -> None:
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    [job] = workflow["jobs"].values()
    assert job["timeout-minutes"] == 90 and "permissions" not in job
    checkout, python, run = job["steps"]
    assert run == {"run": "bash .ci/run"}
    for step in (checkout, python):
        assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
    # The last version is `python3`, which .ci/run uses; it looks for python3.12 by its name.
    assert python["with"]["python-version"].split() == ["3.12", "3.11"]


@pytest.mark.parametrize(
    "word, jax, flax",
    [
        ("lowest", ["==0.10.0", "==0.11.1"], ["==0.12.0", "==0.12.12"]),
        ("newest", [">=0.10.0,<0.11", ">=0.11.1,<0.13"], [">=0.12.0,<0.13", ">=0.12.12,<0.13"]),
        ("beyond", [">=0.10.0", ">=0.11.1"], [">=0.12.0", ">=0.12.12"]),
    ],
)
def test_versions_changes_bounds_and_keeps_what_a_requirement_is_for(
    word: str, jax: list[str], flax: list[str]
) -> None:
    script = (REPO / ".ci" / "versions").read_text(encoding="utf-8")
    [bounds] = re.findall(rf"^  {word}\) bounds='(.*)' ;;$", script, re.M)
    command = ["sed", "-E", bounds, REPO / "requirements.txt"]
    lines = subprocess.run(command, text=True, capture_output=True, check=True).stdout.splitlines()
    markers = ['; python_version < "3.12"', '; python_version >= "3.12"']
    for name, versions in (("jax", jax), ("flax", flax)):
        wanted = [f"{name}{v}{m}" for v, m in zip(versions, markers, strict=True)]
        assert [line for line in lines if line.startswith(name)] == wanted


@pytest.mark.slow
def test_without_modules_that_windows_lacks_settings_are_tested_and_the_rest_is_skipped() -> None:
    code = "import sys, pytest; sys.modules |= {'fcntl': None, 'resource': None}; "
    code += "sys.exit(pytest.main(['-n', '0', '-q', '-rs', '-p', 'no:cacheprovider']))"
    env = {name: x for name, x in os.environ.items() if name not in ("NO_SKIPS", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPO, env=env, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout
    told = r"^SKIPPED \[(\d+)\] (\S+):\d+: training needs Linux, macOS or WSL"
    skipped = {file: int(count) for count, file in re.findall(told, done.stdout, re.M)}
    files = {file.stem for file in (REPO / "tests").rglob("test_*.py")}
    left = len(files - set(ANYWHERE.split()))
    assert skipped == {"test_smoke.py": 1, "tests/conftest.py": left}
    assert re.search(r"^\d{3} passed", done.stdout, re.M)
