"""The packages of a run, which config.py compares with requirements.txt before jax is imported."""

import contextlib
from importlib import metadata, util

from infra.mistakes import UserMistake
from infra.settings import REPO

MODULES = {"pyyaml": "yaml", "orbax-checkpoint": "orbax"}  # those of another name
REQUIREMENTS, OF_ENGINE = REPO / "requirements.txt", REPO / "requirements-sglang.txt"


def describe_newer_packages() -> list[str]:
    """A line for each package that is above its bound in REQUIREMENTS, or where sglang-jax is
    installed in OF_ENGINE. Raises UserMistake if packages are below their bounds or missing. A
    package without metadata that can be imported passes."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:  # other packages bring it; without it nothing is compared
        return []
    files = [REQUIREMENTS] + [OF_ENGINE] * any(metadata.distributions(name="sglang-jax"))
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    bounds, newer, older = {}, [], []
    for line in "\n".join(texts).splitlines():
        with contextlib.suppress(InvalidRequirement):  # a comment, or an option of pip
            wanted = Requirement(line.partition(" #")[0])
            if wanted.specifier and (not wanted.marker or wanted.marker.evaluate()):
                bounds[wanted.name] = wanted.specifier
    for name, bound in ((name, bound) for name, both in bounds.items() for bound in both):
        # The first is that of the folder from which Python imports.
        version = next((x.version for x in metadata.distributions(name=name) if x.version), "")
        if version and bound.contains(version, prereleases=True):
            continue
        spec = util.find_spec(module := MODULES.get(name, name.replace("-", "_")))
        # Python can import any folder of that name. orbax is a folder without __init__.py.
        is_missing = not version and not (spec and (spec.origin or module == "orbax"))
        if (version or is_missing) and not bound.operator.startswith("<"):
            older.append(f"{name} {version or 'is missing'} (needed: {bound})")
        elif version:
            newer.append(f"{name} {version} is newer than any tested version ({bound})")
    if older:
        command = " && ".join(f"pip install -r {file}" for file in files)
        raise UserMistake(f"packages are too old or missing: {', '.join(older)}; run {command}")
    return newer
