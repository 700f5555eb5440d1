"""Tables for people: drawn on a terminal, plain lines elsewhere, such as in a log."""

import io
import re
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

LONGEST_TEXT = 400  # characters of a text in a table; the files have the complete text
# Line separators and what controls a terminal; a tab does no harm.
CONTROL = re.compile(r"[\x00-\x08\n-\x1f\x7f-\x9f\u2028\u2029]")

Row = tuple[list[tuple[str, str]], str]  # short values with their names, and a long text


def table_text(title: str, rows: list[Row]) -> str:
    """The rows as a text: a drawn table as wide as the terminal, or plain lines elsewhere. There
    the short values of a row are a line of name=value pairs, and the lines of its text follow.

    A log is read by programs, so that the title is a single line, whatever it holds."""
    title = visible(title)
    rows = [(pairs, "\n".join(map(visible, text.splitlines()))) for pairs, text in rows]
    if sys.stdout.isatty():
        return drawn_table(title, rows, Console().width)
    lines = [title]
    for pairs, text in rows:
        lines.append("  " + " ".join(f"{name}={value}" for name, value in pairs))
        lines += [f"    {line}" for line in text.splitlines() or [""]]
    return "\n".join(lines)


def drawn_table(title: str, rows: list[Row], width: int) -> str:
    """The rows as a table with borders, `width` characters wide: on the left a line for each short
    value, on the right the text."""
    table = Table(title=Text(title), title_justify="left", show_lines=True, show_header=False)
    table.expand = True
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for pairs, text in rows:
        left = "\n".join(f"{name} {value}" for name, value in pairs)
        table.add_row(Text(left), Text(text))  # Text: brackets are no markup
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(table)
    return console.file.getvalue().rstrip()


def visible(text: str) -> str:
    """The text as a single line, with its control characters as escapes such as \\n."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shorten(text: str) -> str:
    """The text, or its beginning if it is longer than LONGEST_TEXT."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


def pairs_of(completion: dict[str, Any]) -> list[tuple[str, str]]:
    """What an entry of samples.jsonl or eval.jsonl says of a completion, but for its text."""
    numbers = [("reward", completion["reward"]), *completion["rewards"].items()]
    if "advantage" in completion:
        numbers.append(("advantage", completion["advantage"]))
    pairs = [(name, "-" if number is None else f"{number:z.4g}") for name, number in numbers]
    return [*pairs, ("tokens", f"{completion['tokens']}"), ("ended", completion["ended"])]
