"""The text of settings -> their values, from environment, YAML and .env; and back to text.

A mistake is a line that names the setting and where it stands; all mistakes are found in one
reading. Imports neither jax nor flax.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[1]
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
# What other programs have and this one has not, with what to use instead.
NOT_SETTINGS = {
    "PARAM_DTYPE": "trained weights are float32, since bfloat16 loses most updates of them; to "
    "save memory lower TRAIN_PER_DEVICE_MICRO_BATCH_SIZE or use more devices",
    "NUM_EPOCHS": "a run takes STEPS steps; an epoch has as many steps as the dataset has rows, "
    "divided by the prompts of a step",
    "EVAL_BATCHES": "EVAL_PROMPTS is the number of questions in an evaluation",
    "MAX_LENGTH_TOTAL": "a row is as long as its prompt and MAX_LENGTH_SAMPLE new tokens need; "
    "MAX_PROMPT_LENGTH limits the prompt",
    "USE_VLLM": "ROLLOUT_BACKEND says who generates",
}
NOT_SETTINGS["NUM_TRAIN_EPOCHS"] = NOT_SETTINGS["TOTAL_EPOCHS"] = NOT_SETTINGS["NUM_EPOCHS"]
# Environment names of other programs, however close to ours.
FOREIGN = ("WANDB_", "JAX_", "HF_", "TPU_", "XLA_", "SGLANG_")


def yaml_name(field: dataclasses.Field) -> str:
    group = field.metadata["group"]
    return group if "." in group else f"{group}.{field.name}"


class Mistake(NamedTuple):
    """What is wrong, in a line, with the setting of this environment name."""

    setting: str
    text: str


def read_env(env: Mapping[str, str], config: type, mistakes: list[Mistake]) -> dict[str, Any]:
    """The settings in the environment, {attribute: value}; adds to `mistakes`.

    config: the dataclass whose fields, made by config.knob, are the settings.
    """
    known = {field.name.upper(): field for field in dataclasses.fields(config)}
    others = {name: n for n, field in known.items() for name in field.metadata["others"]}
    settings = {}
    for name in sorted(env):
        if name in known:
            try:
                settings[known[name].name] = parse(known[name], env[name], name)
            except ValueError as error:
                mistakes.append(Mistake(name, str(error)))
        elif name in others:
            text = f"{name} is called {others[name]} here {LIST_ALL}"
            mistakes.append(Mistake(others[name], text))
        elif name in NOT_SETTINGS:
            mistakes.append(Mistake(name, f"there is no setting {name}: {NOT_SETTINGS[name]}"))
        elif meant := misspelt(name, list(known)):
            text = f"unknown setting {name}; did you mean {meant}? {LIST_ALL}"
            mistakes.append(Mistake(meant, text))
    return settings


def misspelt(name: str, known: list[str]) -> str:
    """The one of `known` that an environment variable can only be meant to be, or ""."""
    # Three letters are too few to tell a typo of SEED from a tool (SED); TYPE is no DTYPE.
    if name.startswith(FOREIGN) or len(name) <= 3 or name == "TYPE":
        return ""
    close = difflib.get_close_matches(name.upper(), known, cutoff=0.85)
    return next((meant for meant in close if is_misspelt(name.upper(), meant)), "")


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


def read_yaml(path: str | Path, config: type, mistakes: list[Mistake]) -> dict[str, Any]:
    """The settings in a YAML file, {attribute: value}, from nested groups or group.name keys; adds
    to `mistakes`. Raises ValueError for what is no such file.

    A setting that is null is left out, as if the file did not name it; a text that is null is the
    empty text. config: as read_env's.
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
    settings, seen = {}, set()
    for key, node in yaml_items(root) if root else ():
        if key.startswith("derived."):
            continue
        if key not in fields:
            mistakes.append(unknown_key(path, key, fields))
            continue
        name, label = fields[key].name, f"{path}: {key}"
        try:
            if name in seen:
                raise ValueError(f"{label} is set twice, again in line {node.start_mark.line + 1}")
            if not is_null(node) or fields[key].type is str:  # of a text null is the empty one
                settings[name] = parse(fields[key], yaml_text(node, label), label)
        except ValueError as error:
            mistakes.append(Mistake(name.upper(), str(error)))
        seen.add(name)
    return settings


def unknown_key(path: str | Path, key: str, fields: dict[str, dataclasses.Field]) -> Mistake:
    """Says what a key of a YAML file that is no setting could mean. fields: by their YAML names."""
    last = key.rpartition(".")[2].upper()
    if last in NOT_SETTINGS:
        return Mistake(last, f"{path}: there is no setting {key}: {NOT_SETTINGS[last]}")
    for name, field in fields.items():
        if {key, last} & {field.name.upper(), *field.metadata["others"]}:
            return Mistake(field.name.upper(), f"{path}: {key} is called {name} here {LIST_ALL}")
    spellings = {name: name for name in fields} | {f.name: name for name, f in fields.items()}
    meant = spellings[difflib.get_close_matches(key.lower(), spellings, 1, cutoff=0)[0]]
    text = f"{path}: unknown setting {key}; did you mean {meant}? {LIST_ALL}"
    return Mistake(fields[meant].name.upper(), text)


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


def overlay(upper: dict, lower: dict, rivals: Sequence[tuple[Sequence, Sequence]]) -> dict:
    """`upper` over `lower`; what is set in `upper` silences its rivals, (set, silenced) names."""
    silenced = {n for names, rest in rivals if any(map(upper.get, names)) for n in rest}
    return {name: value for name, value in lower.items() if name not in silenced} | upper


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
