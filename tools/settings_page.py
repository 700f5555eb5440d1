"""Prints docs/settings.md, the page of all settings, from config.py.

python tools/settings_page.py > docs/settings.md
"""

import dataclasses
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

import config
from runtime.parsing import to_text, yaml_name

HEAD = """
[migration.md](migration.md) says what each batch size counts. In the table, every number is at
least 0 if no other limit is given. "Kept" is yes if a resumed run must have the same value. If
others change, a resumed run must still get the same model, prompts, prompts per step and end of
the schedule. "Per process" is yes if the processes of a run may have different values.

| setting | default | what it does | kept | per process |
|---|---|---|---|---|"""


def page() -> str:
    """The text of docs/settings.md: the docstring of config.py, and a table of the settings, with a
    line for the name of each group."""
    lines = ["# Settings\n" + config.__doc__.partition("\n")[2] + HEAD]
    settings = dataclasses.fields(config.Config)
    for group, fields in itertools.groupby(settings, lambda field: field.metadata["group"]):
        lines += [f"| **{group}** | | | | |", *map(line_of, fields)]
    return "\n".join(lines)


def line_of(field: dataclasses.Field) -> str:
    """The line of one setting in the table."""
    about = field.metadata
    name = field.name.upper() + (f", in YAML {yaml_name(field)}" if about["yaml"] else "")
    default = "empty" if field.default in ("", ()) else to_text(field.default)
    text = about["help"]
    if about["choices"]:
        text += f" Choices: {about['choices'].replace('|', ', ')}."
    limits = [(word.replace("_", " "), bound) for word, bound in about["limits"].items()]
    limits = [f"{word} {bound}" for word, bound in limits if (word, bound) != ("at least", 0)]
    if limits and field.type in (int, float):
        text += f" {', '.join(limits).capitalize()}."
    kept, per_process = ("yes" if about[key] else "no" for key in ("kept", "per_process"))
    return f"| {name} | {default} | {text} | {kept} | {per_process} |"


if __name__ == "__main__":
    print(page())
