"""The text of settings -> their values, from environment, YAML and .env; and back to text.

Every error names the setting and where it stands. Imports neither jax nor flax.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Mapping
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent
LIST_ALL = "(`python config.py` lists all)"
BOOLS = {"0": False, "1": True, "false": False, "true": True}
LIMITS = {"at_least": ge, "at_most": le, "above": gt, "below": lt}
MESH = r"auto|(?!.*-1.*-1)(-1|[1-9]\d*)(,(-1|[1-9]\d*)){2}"
NAME = r"\S.*"
PLAIN = r"(?ai:(?!null$)[\w/]([\w/.:\\-]*[\w/])?)"  # text that YAML takes without quotes
# What a text must look like, where not every text will do.
FORMS = {"mesh_shape": MESH, "rollout_mesh_shape": MESH}
FORMS |= {"dataset": NAME, "train_split": NAME, "eval_split": NAME}
FORMS |= {"question_column": NAME, "answer_column": NAME}
# What TRL calls settings that have another name here.
TRL_NAMES = {"EPSILON": "EPS_LOW", "EPSILON_HIGH": "EPS_HIGH", "NUM_GENERATIONS": "NUM_PRE_Q"}
TRL_NAMES |= {"NUM_ITERATIONS": "PPO_EPOCHS", "MAX_COMPLETION_LENGTH": "MAX_LENGTH_SAMPLE"}
# What is no setting and why, with what would do instead.
NOT_SETTINGS = {
    "PARAM_DTYPE": "trained weights are float32, since bfloat16 loses most updates of them; to "
    "save memory lower TRAIN_PER_DEVICE_MICRO_BATCH_SIZE or use more devices"
}
# Environment names of other programs, however close to ours.
FOREIGN = ("WANDB_", "JAX_", "HF_", "TPU_", "XLA_", "SGLANG_")


def yaml_name(field: dataclasses.Field) -> str:
    group = field.metadata["group"]
    return group if "." in group else f"{group}.{field.name}"


def stop_at_typos(env: Mapping[str, str], known: list[str]) -> None:
    """Raises ValueError at a name in `env` that can only be one of `known` misspelt."""
    for name in sorted(env):
        if name in TRL_NAMES:
            raise ValueError(f"{name} is called {TRL_NAMES[name]} here {LIST_ALL}")
        if name in NOT_SETTINGS:
            raise ValueError(f"there is no setting {name}: {NOT_SETTINGS[name]}")
        # Three letters are too few to tell a typo of SEED from a tool (SED); TYPE is no DTYPE.
        if name in known or name.startswith(FOREIGN) or len(name) <= 3 or name == "TYPE":
            continue
        for meant in difflib.get_close_matches(name.upper(), known, cutoff=0.85):
            if is_misspelt(name.upper(), meant):
                raise ValueError(f"unknown setting {name}; did you mean {meant}? {LIST_ALL}")


def is_misspelt(name: str, meant: str) -> bool:
    """True if the words that two similar names do not share are similar too, or only left out.

    LERNING_RATE and BATCHSIZE are misspelt; MODULE_PATH and MY_BATCH_SIZE are other names.
    """
    words, meant_words = name.split("_"), meant.split("_")
    extra = "".join(word for word in words if word not in meant_words)
    missing = "".join(word for word in meant_words if word not in words)
    return not extra or difflib.SequenceMatcher(None, extra, missing).ratio() >= 0.75


def parse(field: dataclasses.Field, text: str, label: str) -> Any:
    """The value of one setting from its text, which is the same in YAML and in the environment."""
    choices, help = field.metadata["choices"], field.metadata["help"]
    if text.startswith("{repo}/"):
        text = str(REPO / text.removeprefix("{repo}/"))
    if choices and text not in choices.split("|"):
        raise ValueError(f"{label}={text!r} is not one of {choices}")
    if field.name in FORMS and not re.fullmatch(FORMS[field.name], text):
        raise ValueError(f"{label}={text!r} does not fit; wanted: {help}")
    if field.type is str:
        return text
    if field.type is bool:
        if text.lower() not in BOOLS:
            raise ValueError(f"{label}={text!r} is not a bool (0/1/true/false)")
        return BOOLS[text.lower()]
    if field.type in (int, float):
        return number(field.type, text, label, field.metadata["limits"])
    return tuple(number(float, part, label, {}) for part in text.split(","))


def number(kind: type, text: str, label: str, limits: Mapping[str, float]) -> int | float:
    try:
        value = kind(text)
    except ValueError:
        noun = {int: "whole number", float: "number"}[kind]
        raise ValueError(f"{label}={text!r} is not a {noun}") from None
    if not -math.inf < value < math.inf:
        raise ValueError(f"{label}={text!r} is not finite")
    for word, bound in limits.items():
        if not LIMITS[word](value, bound):
            raise ValueError(f"{label}={value} must be {word.replace('_', ' ')} {bound}")
    return value


def read_yaml(path: str | Path, config: type) -> dict[str, Any]:
    """The settings in a YAML file, {attribute: value}, from nested groups or group.name keys.

    config: the dataclass whose fields, made by config.knob, are the settings. One that is null is
    left out, as if the file did not name it; a text that is null is the empty text.
    """
    yaml = import_yaml()
    try:
        # Nodes, not values: they keep 1e-6 and 0123 as written, and a key that comes twice.
        root = yaml.compose(Path(path).read_bytes(), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if root and root.id != "mapping":
        raise ValueError(f"{path} holds a {root.id}; wanted: `group.name: value` lines")

    fields = {yaml_name(field): field for field in dataclasses.fields(config)}
    spellings = {name: name for name in fields} | {f.name: name for name, f in fields.items()}
    settings, seen = {}, set()
    for key, node in yaml_items(root) if root else ():
        if key.startswith("derived."):
            continue
        if (last := key.rpartition(".")[2].upper()) in NOT_SETTINGS:
            raise ValueError(f"{path}: there is no setting {key}: {NOT_SETTINGS[last]}")
        if key not in fields:
            meant = spellings[difflib.get_close_matches(key.lower(), spellings, 1, cutoff=0)[0]]
            raise ValueError(f"{path}: unknown setting {key}; did you mean {meant}? {LIST_ALL}")
        name, label = fields[key].name, f"{path}: {key}"
        if name in seen:
            raise ValueError(f"{label} is set twice, again in line {node.start_mark.line + 1}")
        seen.add(name)
        if is_null(node) and fields[key].type is not str:  # of a text null is the empty one
            continue
        settings[name] = parse(fields[key], yaml_text(node, label), label)
    return settings


def yaml_items(mapping: Any, group: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (group.name, node of the value) from a mapping node and the groups in it."""
    for key, node in mapping.value:
        if node.id == "mapping" and not group:
            yield from yaml_items(node, f"{key.value}.")
        elif group or node.value or "." in key.value:  # not a group that is empty
            yield f"{group}{key.value}", node


def import_yaml() -> Any:
    """The module yaml; imported late, so that reading the environment needs nothing installed."""
    try:
        import yaml
    except ImportError:
        raise ValueError(
            "settings are read and printed as YAML, for which pyyaml is not installed: "
            "pip install -r requirements.txt"
        ) from None
    return yaml


def is_null(node: Any) -> bool:
    return node.tag.endswith(":null")


def yaml_text(node: Any, label: str) -> str:
    """What the environment would say: null is the empty text, a list is joined by commas."""
    items = node.value if node.id == "sequence" else [node]
    if any(item.id != "scalar" for item in items):
        raise ValueError(f"{label} must be one value, or a list of values")
    return ",".join("" if is_null(item) else item.value for item in items)


def read_dotenv(path: Path) -> dict[str, str]:
    """The NAME=value lines of a file, if it is there; read as text, nothing in it is executed.

    An `export` before the name, quotes around the value and a ` # comment` after it are dropped.
    Raises ValueError with the number of a line that is something else, never with the line.
    """
    if not path.exists():
        return {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}") from None
    values = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(.*?)\s*", line, re.ASCII)
        if not match:
            raise ValueError(f"{path}: line {number} is not NAME=value")
        name, value = match.groups()
        if quoted := re.fullmatch(r"""(["'])(.*)\1(\s+#.*)?""", value):
            values[name] = quoted[2]
        else:
            values[name] = re.split(r"\s+#", value)[0]
    return values


def to_text(value: Any) -> str:
    """A value as one line of ASCII, which YAML reads back to the same value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if not isinstance(value, str) or re.fullmatch(PLAIN, value):
        return str(value)
    return import_yaml().safe_dump(value, default_style='"', width=math.inf).strip()
