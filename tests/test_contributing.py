"""CONTRIBUTING.md and .github/: what they say about the tests is true."""

import ast
import re
from pathlib import Path

import yaml

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


def test_no_function_of_the_product_is_longer_than_the_rule_says() -> None:
    longer = []
    for file in REPO.glob("**/*.py"):
        inside = file.relative_to(REPO)
        if inside.parts[0] in ("tests", "runs") or inside.name == "test_smoke.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 80:
                longer.append((str(inside), node.name))
    assert longer == [("train_grpo.py", "main")]


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
