"""Reads settings from the environment, YAML and .env, and writes settings as text.

A mistake is a line of text that names the setting and where it stands; one reading finds all of
them. Imports neither jax nor flax, and no package if all settings are in the environment.
"""

import argparse
import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, TypeVar

from infra.mistakes import (
    NOT_SETTINGS,
    OTHER_NAMES,
    OTHER_VALUES,
    UserMistake,
    find_misspelt_name,
    reading,
)

Default = TypeVar("Default")
Value = bool | int | float | str | tuple[float, ...]  # of a setting
LIST_ALL = "(`python config.py` lists all)"
REPO = Path(__file__).resolve().parents[1]
BOOLS = {"0": False, "1": True, "false": False, "true": True}
LIMITS = {"at_least": ge, "at_most": le, "above": gt, "below": lt}
MESH = r"auto|(?!.*-1.*-1)(-1|[1-9]\d*)(,(-1|[1-9]\d*)){2}"


# ---- Making settings -----------------------------------------------------------------------------


def setting_field(
    group: str,
    default: Default,
    help: str,
    *,
    yaml: str = "",
    choices: str = "",
    form: str = "",
    fixed_on_resume: bool = True,
    per_process: bool = False,
    **limits: float,
) -> Default:
    """The field of a dataclass for a setting.

    group: the group in YAML. yaml: the name in that group; empty: the name of the field.
    choices: the allowed texts but the default, separated by |. form: a regular expression that
    a text must match. fixed_on_resume: whether a resumed run must have the same value. per_process:
    whether processes may have different values. limits: at_least, at_most, above, below; without a
    lower limit a number is at least 0.
    """
    if not {"at_least", "above"} & limits.keys():
        limits["at_least"] = 0
    metadata: dict[str, object] = {"group": group, "help": help, "yaml": yaml, "form": form}
    metadata |= {"choices": choices, "per_process": per_process, "limits": limits}
    metadata["fixed_on_resume"] = fixed_on_resume
    return dataclasses.field(default=default, metadata=metadata)


def yaml_name(field: dataclasses.Field) -> str:
    return f"{field.metadata['group']}.{field.metadata['yaml'] or field.name}"


# ---- Reading the command line, the environment and YAML ------------------------------------------


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """The flags; a wrong one ends the program with exit code 2."""
    parser = argparse.ArgumentParser(
        usage="STEPS=1 python %(prog)s [flags]; --help lists them",
        description="Settings are environment variables. `python config.py` lists them.",
    )
    parser.add_argument("--config", metavar="FILE.yaml", default="", help="settings as YAML")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--print-config", action="store_true", help="print every setting and exit")
    only.add_argument("--plan", metavar="SLICE", default="", help="say whether the run fits it")
    only.add_argument(
        "--eval-only",
        action="store_true",
        help="evaluate OUTPUT_DIR's newest checkpoint on the complete eval split; without "
        "OUTPUT_DIR MODEL_PATH",
    )
    only.add_argument(
        "--ask",
        metavar="QUESTION",
        help="let the same weights as for --eval-only answer greedily, and score the answer",
    )
    only.add_argument(
        "--probe",
        type=int,
        metavar="N",
        help="sample N questions of training, and say what would keep a run from learning",
    )
    parser.add_argument(
        "--answer", metavar="TEXT", help="the right answer to --ask's question; --answer=-1/2 works"
    )
    add = parser.add_argument
    add("--mean-completion", type=int, metavar="N", help="tokens of a completion, for --plan")
    add("--out", metavar="FOLDER", default="", help="--probe writes the useful questions there")
    add("--time", action="store_true", help="--probe also times a step")
    add("--price-per-chip-hour", type=float, metavar="X", help="adds costs to --plan")
    parser.add_argument("--processes", type=int, default=1, help="processes to print sizes for")
    parser.add_argument("--local-devices", type=int, default=1, help="devices of each process")
    args = parser.parse_args(argv)
    counts = args.processes, args.local_devices
    if min(counts) < 1 or (max(counts) > 1 and not args.print_config):
        parser.error("--processes and --local-devices are at least 1, and only for --print-config")
    for_plan = [x for x in (args.mean_completion, args.price_per_chip_hour) if x is not None]
    if for_plan and not (args.plan and min(for_plan) > 0):
        parser.error("--mean-completion and --price-per-chip-hour are above 0, and only for --plan")
    if (args.ask, args.answer) != (None, None) and not (args.ask or "").strip():
        parser.error("--ask needs a question, and --answer is only for --ask")
    if (args.probe is not None or args.out or args.time) and (args.probe or 0) < 1:
        parser.error("--probe needs at least 1 question, and --out and --time are only for --probe")
    return args


def read_env(env: Mapping[str, str], config: type, mistakes: list[str]) -> dict[str, Any]:
    fields = {field.name.upper(): field for field in dataclasses.fields(config)}
    return parse_settings(dict(sorted(env.items())), fields, "", mistakes)


def read_yaml(path: str | Path, config: type, mistakes: list[str]) -> dict[str, Any]:
    """The settings in a YAML file, {attribute: value}; adds lines to `mistakes`.

    A key is group.name, or a name inside a group. config: a dataclass of `setting_field` fields.
    Raises UserMistake if the file cannot be read as such keys.
    """
    import yaml  # the machine from which run_tpu.sh starts a run may not have it

    with reading(f"{path} cannot be read"):
        # This loader keeps 1e-6, 0123 and true as they are written.
        text = Path(path).read_bytes()
        content = yaml.load(text, Loader=yaml.BaseLoader) or {}
        repeated = repeated_keys(yaml.compose(text, Loader=yaml.BaseLoader))
    if not isinstance(content, dict):
        raise UserMistake(f"{path} does not hold `group.name: value` lines")
    mistakes += (f"{path}: the key {key} stands there more than once; keep one" for key in repeated)

    fields = {yaml_name(field): field for field in dataclasses.fields(config)}
    texts, prefix = {}, f"{path}: "
    for key, value in yaml_items(content):
        items = value if isinstance(value, list) else [value]
        if key in fields and not all(isinstance(item, str) for item in items):
            mistakes.append(f"{prefix}{key} must be one value, or a list of values")
        elif key in texts:
            mistakes.append(f"{prefix}{key} is set twice; keep one")
        elif not key.startswith("derived."):
            texts[key] = ",".join(map(str, items)) or "null"
    return parse_settings(texts, fields, prefix, mistakes)


def repeated_keys(node: Any) -> list[str]:
    """The keys that a mapping of YAML, or one within it, has more than once. Loading it keeps only
    the last value of such a key. node: as yaml.compose returns it."""
    pairs = node.value if node and node.id == "mapping" else []
    keys = [key.value for key, _ in pairs]
    own = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    return own + [key for _, value in pairs for key in repeated_keys(value)]


def yaml_items(content: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yields (group.name, value) of each setting: a key is this name, or a group of names."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        elif value or "." in key:  # an empty group is skipped
            yield key, value


def parse_settings(
    texts: Mapping[str, str],
    fields: Mapping[str, dataclasses.Field],
    prefix: str,
    mistakes: list[str],
) -> dict[str, Any]:
    """The settings of a layer, {attribute: value}; adds lines to `mistakes`.

    texts: {name: text}; null means that the setting is not set, or is an empty text.
    fields: all settings by their names in this layer. prefix: of each line, names the file, or "".
    """
    settings = {}
    for name, text in texts.items():
        if name not in fields:
            mistakes.extend(describe_unknown_name(name, fields, prefix))
        elif text != "null" or fields[name].type is str:
            try:
                text = "" if text == "null" else text
                settings[fields[name].name] = parse(fields[name], text, prefix + name)
            except UserMistake as error:
                mistakes.append(str(error))
    return settings


def describe_unknown_name(
    name: str, fields: Mapping[str, dataclasses.Field], prefix: str
) -> Iterator[str]:
    """Yields a line about a name that is no setting, or none if another program may read it.

    fields, prefix: as in parse_settings. In a file every unknown name is a mistake.
    """
    spelling = {field.name.upper(): known for known, field in fields.items()}
    last = name.rpartition(".")[2].upper()
    # People make such names of the YAML names: ROLLOUT_TEMPERATURE of rollout.temperature.
    without_group = re.sub("^(ROLLOUT|LOSS)_", "", last)
    ours = OTHER_NAMES.get(name) or OTHER_NAMES.get(last) or without_group
    if last in NOT_SETTINGS:
        yield f"{prefix}there is no setting {name}: {NOT_SETTINGS[last]}"
    elif ours in spelling:
        yield f"{prefix}{name} is called {spelling[ours]} here {LIST_ALL}"
    elif prefix:
        close = difflib.get_close_matches(name.lower(), fields, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        yield f"{prefix}unknown setting {name}{hint} {LIST_ALL}"
    elif meant := find_misspelt_name(name, [*fields, *OTHER_NAMES]):
        hint = f"did you mean {OTHER_NAMES.get(meant, meant)}?"
        yield f"unknown setting {name}; {hint} {LIST_ALL}"


def parse(field: dataclasses.Field, text: str, label: str) -> Value:
    """The value of a setting from its text; YAML and the environment have the same texts."""
    choices, form, help = (field.metadata[name] for name in ("choices", "form", "help"))
    text = expand_path(text)
    if choices and text not in (field.default, *choices.split("|")):
        ours = OTHER_VALUES.get(text)
        here = f"; {text} is called {ours} here" if ours in choices.split("|") else ""
        raise UserMistake(f"{label}={text!r} is not one of {choices}{here}")
    if form and not re.fullmatch(form, text):
        raise UserMistake(f"{label}={text!r} does not have the right form: {help}")
    if field.type is str:
        return text
    if field.type is bool:
        if text.lower() not in BOOLS:
            raise UserMistake(f"{label}={text!r} is not a bool (0/1/true/false)")
        return BOOLS[text.lower()]
    if field.type in (int, float):
        return number(field.type, text, label, field.metadata["limits"])
    return tuple(number(float, part, label, {}) for part in text.split(",")) if text else ()


def expand_path(text: str) -> str:
    """A setting's text, with the folders that {repo}/ and ~ at its beginning stand for."""
    if text.startswith("{repo}/"):
        text = str(REPO / text.removeprefix("{repo}/"))
    # The shell leaves ~ in quotes and in YAML.
    return os.path.expanduser(text) if text.startswith("~") and "/" in text else text


def number(kind: type, text: str, label: str, limits: Mapping[str, float]) -> int | float:
    try:
        value = kind(text)
    except ValueError:
        noun = {int: "whole number", float: "number"}[kind]
        raise UserMistake(f"{label}={text!r} is not a {noun}") from None
    if not -math.inf < value < math.inf:
        raise UserMistake(f"{label}={text!r} is not finite")
    for word, bound in limits.items():
        if not LIMITS[word](value, bound):
            raise UserMistake(f"{label}={value} must be {word.replace('_', ' ')} {bound}")
    return value


def overlay_layers(upper: dict, lower: dict, synonyms: Sequence[tuple[Sequence, Sequence]]) -> dict:
    """`lower`, replaced by `upper` wherever `upper` has a value.

    synonyms: pairs of names (set, hidden). If `upper` sets one of the first names, then all of the
    second names are removed from `lower`.
    """
    hidden = {name for names, rest in synonyms if any(map(upper.get, names)) for name in rest}
    return {name: value for name, value in lower.items() if name not in hidden} | upper


def read_dotenv(path: Path) -> dict[str, str]:
    """The NAME=value lines of a file, {} without the file; nothing in the file is executed.

    An `export` before the name, quotes around the value and a ` # comment` after it are dropped.
    Raises UserMistake with the number of a line of any other form, never with its text.
    """
    lines = read_text(path).splitlines() if path.exists() else []
    values = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(.*?)\s*", line, re.ASCII)
        if not match:
            raise UserMistake(f"{path}: line {number} is not NAME=value")
        name, value = match.groups()
        quoted = re.fullmatch(r"""(["'])(.*)\1(\s+#.*)?""", value)
        values[name] = quoted[2] if quoted else re.split(r"\s+#", value)[0]
    return values


def read_text(file: str | Path, setting: str = "") -> str:
    """The text of a file that a setting names, without the byte order mark that editors of Windows
    write. Raises UserMistake if it cannot be read as UTF-8."""
    with reading(f"{setting}={file} cannot be read" if setting else f"{file} cannot be read"):
        return Path(file).read_text(encoding="utf-8-sig")


# ---- Printing ------------------------------------------------------------------------------------


def to_text(value: object) -> str:
    """The value as a line of ASCII that YAML reads back as the same value."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if not isinstance(value, str):
        return str(value).lower()  # of a bool too
    import yaml  # as in read_yaml

    one_word = value and not re.search(r"\s", value)
    if one_word and yaml.safe_dump(value, width=math.inf) == f"{value}\n...\n":
        return value
    return yaml.safe_dump(value, default_style='"', width=math.inf).strip()
