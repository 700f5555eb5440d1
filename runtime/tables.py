"""Tables for people: drawn on a terminal, plain lines elsewhere, such as in a log."""

import io
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

LONGEST_TEXT = 400  # characters of a text in a table; the files have the complete text


def table_text(title: str, rows: list[dict[str, str]]) -> str:
    """The rows as a text. All rows have the same columns, and the last column may be long.

    A terminal gets a drawn table as wide as it is. Elsewhere each row is a line of name=value pairs
    and, indented, the lines of its last column.
    """
    if sys.stdout.isatty():
        return drawn_table(title, rows, Console().width)
    lines = [title]
    for row in rows:
        *pairs, (_, text) = row.items()
        lines.append("  " + " ".join(f"{name}={value}" for name, value in pairs))
        lines += [f"    {line}" for line in text.splitlines() or [""]]
    return "\n".join(lines)


def drawn_table(title: str, rows: list[dict[str, str]], width: int) -> str:
    """The rows as a table with borders, `width` characters wide: on the left a line for each short
    column, on the right the last column."""
    table = Table(title=Text(title), title_justify="left", show_lines=True, show_header=False)
    table.expand = True
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for row in rows:
        *pairs, (_, text) = row.items()
        left = "\n".join(f"{name} {value}" for name, value in pairs)
        table.add_row(Text(left), Text(text))  # Text: brackets are no markup
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(table)
    return console.file.getvalue().rstrip()


def shorten(text: str) -> str:
    """The text, or its beginning if it is longer than LONGEST_TEXT."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."
