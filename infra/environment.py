"""What a run needs of its environment, before jax is imported. Imports neither jax nor flax."""

import contextlib
from collections.abc import Mapping
from importlib import metadata

from infra.mistakes import UserMistake
from infra.settings import REPO

# The engine runs with other versions of some packages, which only the second file has.
REQUIREMENTS, OF_ENGINE = REPO / "requirements.txt", REPO / "requirements-sglang.txt"


def raise_if_float64(env: Mapping[str, str]) -> None:
    value = env.get("JAX_ENABLE_X64", "0")
    if value.lower() not in ("0", "false", "f", "no", "n", "off"):  # as jax reads it
        reason = "numbers of 64 bits do not fit the programs of a run"
        raise UserMistake(f"JAX_ENABLE_X64={value}: {reason}; unset it, or set 0")


def describe_newer_packages() -> list[str]:
    """A line for each package that is newer than its bound in REQUIREMENTS. Raises UserMistake if
    packages are older or missing.

    If sglang-jax is installed, the bounds of OF_ENGINE replace those of the same packages. Nothing
    is compared without the files, or without `packaging`, which other packages bring.
    """
    try:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return []
    files = [REQUIREMENTS] + [OF_ENGINE] * bool(installed_version("sglang-jax"))
    bounds: dict[str, SpecifierSet] = {}
    newer, older = [], []
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            with contextlib.suppress(InvalidRequirement):  # a comment, or an option of pip
                wanted = Requirement(line.partition(" #")[0])
                known = file == REQUIREMENTS or (wanted.name in bounds and wanted.specifier)
                if known and (not wanted.marker or wanted.marker.evaluate()):
                    bounds[wanted.name] = wanted.specifier
    for name, specifier in bounds.items():
        version = installed_version(name)
        for bound in specifier:
            if version and bound.contains(version, prereleases=True):
                continue
            if not bound.operator.startswith("<"):
                older.append(f"{name} {version or 'is missing'} (needed: {bound})")
            elif version:
                newer.append(f"{name} {version} is newer than {REQUIREMENTS.name} allows ({bound})")
    if older:
        command = " && ".join(f"pip install -r {file}" for file in files)
        raise UserMistake(f"packages are too old or missing: {', '.join(older)}; run {command}")
    return newer


def installed_version(package: str) -> str:
    """The version that an import would find, or "" if the package is not installed."""
    versions = (found.version for found in metadata.distributions(name=package))
    return next(filter(None, versions), "")
