"""Reads settings from the environment, YAML and .env, and writes settings as text.

A mistake is a line of text that names the setting and where it stands; one reading finds all of
them. Imports neither jax nor flax.
"""

import argparse
import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, NoReturn

import yaml

from runtime.mistakes import LIST_ALL, NOT_SETTINGS, Mistake, UserMistake, misspelt

REPO = Path(__file__).resolve().parents[1]
BOOLS = {"0": False, "1": True, "false": False, "true": True}
LIMITS = {"at_least": ge, "at_most": le, "above": gt, "below": lt}
MESH = r"auto|(?!.*-1.*-1)(-1|[1-9]\d*)(,(-1|[1-9]\d*)){2}"
NAME = r"\S.*"


# ---- Making settings -----------------------------------------------------------------------------


def knob(
    group: str,
    default: Any,
    help: str,
    *,
    yaml: str = "",
    choices: str = "",
    form: str = "",
    kept: bool = True,
    per_process: bool = False,
    also: str = "",
    **limits: float,
) -> Any:
    """A setting, as the field of a dataclass.

    group: the group in YAML. yaml: the name in that group; empty: the name of the field.
    choices: the allowed texts beside the default, separated by |. form: a regular expression that
    a text must match. kept: whether a resumed run must keep the value. per_process: whether the
    value may differ between processes. also: what other programs call the setting and its values,
    such as "ROLLOUT_ENGINE rollout.n vanilla=naive"; a name in lower case occurs only in YAML.
    limits: at_least, at_most, above, below; without a lower limit a number is at least 0.
    """
    if not {"at_least", "above"} & limits.keys():
        limits["at_least"] = 0
    metadata = {"group": group, "help": help, "yaml": yaml, "choices": choices, "form": form}
    metadata |= {"kept": kept, "per_process": per_process, "also": also, "limits": limits}
    return dataclasses.field(default=default, metadata=metadata)


def yaml_name(field: dataclasses.Field) -> str:
    return f"{field.metadata['group']}.{field.metadata['yaml'] or field.name}"


def names_elsewhere(fields: Sequence[dataclasses.Field]) -> dict[str, str]:
    """{another name: the environment name of our setting}: what other programs call a setting, and
    the names that people make of its YAML name, such as ROLLOUT_TEMPERATURE and LOSS_BETA."""
    found = {}
    for field in fields:
        if field.metadata["group"] in ("rollout", "loss"):
            found[yaml_name(field).upper().replace(".", "_")] = field.name.upper()
        names = [name for name in field.metadata["also"].split() if "=" not in name]
        found |= dict.fromkeys(names, field.name.upper())
    return found


# ---- Reading the command line, the environment and YAML ------------------------------------------


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """The flags; a wrong one ends the program with exit code 2."""
    parser = argparse.ArgumentParser(
        description="Settings are environment variables: STEPS=1 python train_grpo.py",
        epilog="`python config.py` lists all settings.",
    )
    parser.add_argument("--config", metavar="FILE.yaml", default="", help="settings as YAML")
    parser.add_argument("--print-config", action="store_true", help="print every setting and exit")
    parser.add_argument("--plan", metavar="SLICE", default="", help="say if the run fits there")
    parser.add_argument(
        "--eval-only",
        action="store_true",
        help="evaluate OUTPUT_DIR's newest checkpoint, else MODEL_PATH, on the complete eval split",
    )
    parser.add_argument(
        "--ask",
        metavar="QUESTION",
        help="ask OUTPUT_DIR's newest checkpoint, else MODEL_PATH, and score the greedy answer",
    )
    parser.add_argument(
        "--answer", metavar="TEXT", help="the right answer to --ask's question; --answer=-1/2 works"
    )
    parser.add_argument("--processes", type=int, default=1, help="processes to print sizes for")
    parser.add_argument("--local-devices", type=int, default=1, help="devices of each process")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        hint = "; settings go before the command: STEPS=1 python train_grpo.py"
        given = any(re.match(r"[A-Za-z_]\w*=", text) for text in unknown)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint if given else ''}")
    if min(args.processes, args.local_devices) < 1:
        parser.error("--processes and --local-devices must be at least 1")
    if (args.processes, args.local_devices) != (1, 1) and not args.print_config:
        parser.error("--processes and --local-devices are only for --print-config")
    if args.ask is not None and not args.ask.strip():
        parser.error("--ask needs a question")
    if args.answer is not None and not args.ask:
        parser.error("--answer is only for --ask")
    return args


def read_env(env: Mapping[str, str], config: type, mistakes: list[Mistake]) -> dict[str, Any]:
    """The settings in the environment, {attribute: value}; adds to `mistakes`.

    The value null means what it means in YAML: a setting that is not set, or an empty text.
    config: a dataclass whose fields are made by `knob`.
    """
    fields = dataclasses.fields(config)
    known, elsewhere = {field.name.upper(): field for field in fields}, names_elsewhere(fields)
    settings = {}
    for name in sorted(env):
        if name in known:
            field, text = known[name], "" if env[name] == "null" else env[name]
            if env[name] == "null" and field.type is not str:
                continue
            try:
                settings[field.name] = parse(field, text, name)
            except UserMistake as error:
                mistakes.append(Mistake(name, str(error)))
        elif name in NOT_SETTINGS:
            mistakes.append(Mistake(name, f"there is no setting {name}: {NOT_SETTINGS[name]}"))
        elif ours := elsewhere.get(name.upper()) or (name.upper() in known and name.upper()):
            mistakes.append(Mistake(ours, f"{name} is called {ours} here {LIST_ALL}"))
        elif meant := misspelt(name, [*known, *elsewhere]):
            ours = elsewhere.get(meant, meant)
            called = f"{meant}, which is called {ours} here" if ours != meant else meant
            text = f"unknown setting {name}; did you mean {called}? {LIST_ALL}"
            mistakes.append(Mistake(ours, text))
    return settings


def parse(field: dataclasses.Field, text: str, label: str) -> Any:
    """The value of a setting from its text; YAML and the environment have the same texts."""
    choices, form, help = (field.metadata[name] for name in ("choices", "form", "help"))
    if text.startswith("{repo}/"):
        text = str(REPO / text.removeprefix("{repo}/"))
    if choices and text not in (field.default, *choices.split("|")):
        values = dict(x.split("=") for x in field.metadata["also"].split() if "=" in x)
        here = f"; {text} is called {values[text]} here" if text in values else ""
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


def read_yaml(path: str | Path, config: type, mistakes: list[Mistake]) -> dict[str, Any]:
    """The settings in a YAML file, {attribute: value}; adds to `mistakes`.

    A key is group.name, or a name inside a group. A setting that is null counts as not set, but a
    text that is null is empty. config: a dataclass of `knob` fields.
    Raises UserMistake if the file cannot be read as such keys.
    """
    try:
        # Nodes keep 1e-6 and 0123 as written, and also a key that occurs twice; values do not.
        root = yaml.compose(Path(path).read_bytes(), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, RecursionError) as error:
        raise UserMistake(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if root and root.id != "mapping":
        raise UserMistake(f"{path} holds a {root.id}; wanted: `group.name: value` lines")

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
                raise UserMistake(f"{label} is set twice, again in line {node.start_mark.line + 1}")
            if not is_null(node) or fields[key].type is str:
                settings[name] = parse(fields[key], yaml_text(node, label), label)
        except UserMistake as error:
            mistakes.append(Mistake(name.upper(), str(error)))
        seen.add(name)
    return settings


def unknown_key(path: str | Path, key: str, fields: dict[str, dataclasses.Field]) -> Mistake:
    """The mistake of an unknown key in a YAML file. fields: all settings by their YAML names."""
    last = key.rpartition(".")[2].upper()
    spelling = {field.name.upper(): name for name, field in fields.items()}
    elsewhere = names_elsewhere([*fields.values()])
    if last in NOT_SETTINGS:
        return Mistake(last, f"{path}: there is no setting {key}: {NOT_SETTINGS[last]}")
    if ours := elsewhere.get(key) or elsewhere.get(last) or (last in spelling and last):
        return Mistake(ours, f"{path}: {key} is called {spelling[ours]} here {LIST_ALL}")
    yaml_names = {name: name for name in fields} | {f.name: name for name, f in fields.items()}
    meant = yaml_names[difflib.get_close_matches(key.lower(), yaml_names, 1, cutoff=0)[0]]
    text = f"{path}: unknown setting {key}; did you mean {meant}? {LIST_ALL}"
    return Mistake(fields[meant].name.upper(), text)


def yaml_items(mapping: Any, group: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (group.name, node of the value) of each setting in a mapping node and its groups."""
    for key, node in mapping.value:
        if node.id == "mapping" and not group:
            yield from yaml_items(node, f"{key.value}.")
        elif group or node.value or "." in key.value:  # an empty group is skipped
            yield f"{group}{key.value}", node


def is_null(node: Any) -> bool:
    return node.tag.endswith(":null")


def yaml_text(node: Any, label: str) -> str:
    """The text of a node as in the environment: null is empty, a list is joined by commas."""
    items = node.value if node.id == "sequence" else [node]
    if any(item.id != "scalar" for item in items):
        raise UserMistake(f"{label} must be one value, or a list of values")
    return ",".join("" if is_null(item) else item.value for item in items)


def overlay(upper: dict, lower: dict, rivals: Sequence[tuple[Sequence, Sequence]]) -> dict:
    """`lower`, replaced by `upper` wherever `upper` has a value.

    rivals: pairs of names (set, hidden). If `upper` sets one of the first names, then all of the
    second names are removed from `lower`.
    """
    hidden = {n for names, rest in rivals if any(map(upper.get, names)) for n in rest}
    return {name: value for name, value in lower.items() if name not in hidden} | upper


def read_dotenv(path: Path) -> dict[str, str]:
    """The NAME=value lines of a file, {} without the file; nothing in the file is executed.

    An `export` before the name, quotes around the value and a ` # comment` after it are dropped.
    Raises UserMistake with the number of a line of any other form, never with its text.
    """
    if not path.exists():
        return {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        raise UserMistake(f"{path} cannot be read: {type(error).__name__}") from None
    values = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(.*?)\s*", line, re.ASCII)
        if not match or "\0" in line:
            raise UserMistake(f"{path}: line {number} is not NAME=value")
        name, value = match.groups()
        if quoted := re.fullmatch(r"""(["'])(.*)\1(\s+#.*)?""", value):
            values[name] = quoted[2]
        else:
            values[name] = re.split(r"\s+#", value)[0]
    return values


# ---- Printing ------------------------------------------------------------------------------------


def to_text(value: Any) -> str:
    """The value as a line of ASCII that YAML reads back as the same value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if not isinstance(value, str):
        return str(value)
    one_word = value and not re.search(r"\s", value)
    if one_word and yaml.safe_dump(value, width=math.inf) == f"{value}\n...\n":
        return value
    return yaml.safe_dump(value, default_style='"', width=math.inf).strip()


def yaml_lines(cfg: Any) -> list[str]:
    """A line of YAML for each setting, with its environment name, help and default."""
    lines = []
    for field in dataclasses.fields(cfg):
        value, help = getattr(cfg, field.name), field.metadata["help"]
        choices = f" ({field.metadata['choices']})" if field.metadata["choices"] else ""
        mark = "default" if value == field.default else f"changed from {to_text(field.default)}"
        line = f"{yaml_name(field)}: {to_text(value)}"
        lines.append(f"{line:<40}  # {field.name.upper()}: {help}{choices}  [{mark}]")
    return lines


def print_and_exit(text: str) -> NoReturn:
    """Prints the text and ends the program, also if the reader of a pipe, such as `head`, has ended
    before."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes again at the end, and would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)
