"""Claims about infra/packages.py: packages with which a run would break are refused early."""

import os
import subprocess
import sys
from pathlib import Path

import packaging.requirements  # noqa: F401 - a test hides its folder
import pytest
from runs import REPO

import config
from infra import packages
from infra.mistakes import UserMistake
from infra.packages import describe_newer_packages


def install(folder: Path, *packages: str) -> None:
    """Makes what importlib.metadata finds of packages, such as numpy==1.26.4, in a folder."""
    for package in packages:
        name, _, version = package.partition("==")
        made = folder / f"{name}-{version}.dist-info"
        made.mkdir()
        (made / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def mistake() -> str:
    with pytest.raises(UserMistake) as error:
        describe_newer_packages()
    return str(error.value)


@pytest.mark.parametrize(
    "packages, words",
    [
        ("transformers==4.57.3", "transformers 4.57.3 (needed: >=5.2)"),
        ("huggingface_hub==0.36.0", "huggingface_hub 0.36.0 (needed: >=1.3)"),
        ("datasets==2.14.7", "datasets 2.14.7 (needed: >=4.0)"),
        ("orbax_checkpoint==0.5.3", "orbax-checkpoint 0.5.3 (needed: >=0.11.36)"),
        ("PyYAML==5.4.1", "pyyaml 5.4.1 (needed: >=6.0.2)"),
        ("etils==1.11.0", "etils 1.11.0 (needed: >=1.12)"),
        ("safetensors==0.5rc1", "safetensors 0.5rc1 (needed: >=0.5)"),
        (
            "tokenizers==0.21.4 transformers==4.57.3",
            "transformers 4.57.3 (needed: >=5.2), tokenizers 0.21.4 (needed: >=0.22.1)",
        ),
    ],
)
def test_packages_below_a_bound_are_refused_in_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: str, words: str
) -> None:
    install(tmp_path, *packages.split())
    monkeypatch.syspath_prepend(tmp_path)
    command = f"run pip install -r {REPO}/requirements.txt"
    assert mistake() == f"packages are too old or missing: {words}; {command}"


@pytest.mark.parametrize(
    "package, note",
    [
        ("optax==0.2.6", ""),
        ("optax==0.2.8+local", ""),
        ("optax==0.3.0", "optax 0.3.0 is newer than any tested version (<0.3)"),
        ("transformers==6.0.0.dev0", "transformers 6.0.0.dev0 is newer than any tested version"),
        ("tqdm==5.1", "tqdm 5.1 is newer than any tested version (<5)"),
    ],
)
def test_a_package_above_a_bound_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, note: str
) -> None:
    assert describe_newer_packages() == []
    install(tmp_path, package)
    monkeypatch.syspath_prepend(tmp_path)
    lines = describe_newer_packages()
    assert len(lines) == bool(note) and "".join(lines).startswith(note)


def test_a_missing_package_counts_and_without_packaging_or_the_file_nothing_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tmp_path / "requirements.txt"
    monkeypatch.setattr(packages, "REQUIREMENTS", wanted)
    assert describe_newer_packages() == []
    lines = ("# a comment", "-r other.txt", "no-such-package>=1.0,<2  # why", "git+https://a/b")
    elsewhere = 'numpy>=99; sys_platform == "nowhere"'
    wanted.write_text("\n".join((*lines, elsewhere)))
    words = "packages are too old or missing: no-such-package is missing (needed: >=1.0); run "
    assert mistake() == f"{words}pip install -r {wanted}"
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert describe_newer_packages() == []


@pytest.mark.parametrize(
    "package, module",
    [
        ("made-here", "made_here.py"),
        ("pyyaml", "yaml/__init__.py"),
        ("orbax-checkpoint", "orbax/checkpoint/__init__.py"),
    ],
)
def test_a_package_that_imports_and_tells_no_version_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, module: str
) -> None:
    wanted, folder = tmp_path / "requirements.txt", tmp_path / "alone"
    wanted.write_text(f"{package}>=1.0,<2")
    monkeypatch.setattr(packages, "REQUIREMENTS", wanted)
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in {"yaml", "orbax"} & sys.modules.keys():
        monkeypatch.delitem(sys.modules, name)
    assert f"{package} is missing (needed: >=1.0)" in mistake()
    (folder / module).parent.mkdir(parents=True)
    sys.path_importer_cache.clear()
    if package == "pyyaml":  # a folder of its name is not the package
        assert f"{package} is missing (needed: >=1.0)" in mistake()
    (folder / module).touch()
    sys.path_importer_cache.clear()
    assert describe_newer_packages() == []


def test_where_the_engine_is_installed_its_bounds_replace_those_of_the_same_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "requirements.txt", tmp_path / "requirements-sglang.txt"
    files[0].write_text("jax>=0.11.1,<0.13\njinja2>=3.1,<4")
    files[1].write_text("jax>=0.10.0,<0.11\njinja2")
    for name, file in zip(("REQUIREMENTS", "OF_ENGINE"), files, strict=True):
        monkeypatch.setattr(packages, name, file)
    install(tmp_path, "jax==0.10.2", "jinja2==3.1.6")
    monkeypatch.syspath_prepend(tmp_path)
    words = "packages are too old or missing: jax 0.10.2 (needed: >=0.11.1); run pip install -r "
    assert mistake() == words + str(files[0])
    engine = tmp_path / "engine"
    engine.mkdir()
    install(engine, "sglang_jax==0.1.0rc0")
    monkeypatch.syspath_prepend(engine)
    assert describe_newer_packages() == []
    install(engine, "jax==0.9.0")
    assert "jax 0.9.0 (needed: >=0.10.0)" in mistake()
    assert mistake().endswith(f"pip install -r {files[0]} && pip install -r {files[1]}")


@pytest.mark.parametrize("script", ["train_grpo.py", "train_sft.py", "config.py"])
def test_a_script_says_so_before_it_imports_what_breaks_and_config_py_prints(
    tmp_path: Path, script: str
) -> None:
    install(tmp_path, "jax==0.8.1")
    (tmp_path / "jax.py").write_text("1 / 0\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "COMPLETION_COLUMN": "answer"}
    done = subprocess.run([sys.executable, REPO / script], env=env, capture_output=True, text=True)
    if script == "config.py":
        assert done.returncode == 0 and "# STEPS: " in done.stdout
    else:
        line = "error: packages are too old or missing: jax 0.8.1 (needed: >=0.1"
        assert done.returncode == 2 and done.stderr.startswith(line)
        assert done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.parametrize("value", ["1", "true", "Yes", "on", "2", ""])
def test_numbers_of_64_bits_are_refused_by_the_name_of_their_variable(value: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        config.load([], {"JAX_ENABLE_X64": value})
    line = f"error: JAX_ENABLE_X64={value}: a run has no numbers of 64 bits; unset it\n"
    assert capsys.readouterr().err == line
    for off in ("0", "False", "off"):
        config.load([], {"JAX_ENABLE_X64": off})
    with pytest.raises(SystemExit, match="0"):
        config.load(["--print-config"], {"JAX_ENABLE_X64": value})
