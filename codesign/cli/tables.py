"""Tables and folded lines as text, for terminals and pipes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from codesign.cli.output import is_rich

MAX_COLUMNS = 100
_LEAST_WIDTH = 20  # of a column that is cut to fit
_GAP = "  "


def table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None
) -> str:
    """Return a table as text, with colour if stdout is a terminal.

    On a terminal that is too narrow, cells are folded between words. Elsewhere long texts are cut
    so that lines have 100 columns; names, in the first column, and numbers are not.

    Args:
        columns: Heads of the columns.
        rows: Cells: strings as they are, integers with thousands separators, floats with four
            significant digits, None as ``-``. Columns without strings are set to the right.
        title: A line above the table, or more where it is too long.

    Returns:
        Lines without a newline at the end, ready for ``emit``.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    right = [all(not isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    if is_rich(sys.stdout):
        return _rich_table(columns, cells, right, title)
    widths = _fit_widths([max(map(len, c)) for c in zip(columns, *cells, strict=True)])
    lines = [] if title is None else _folded(title)
    for row in (list(columns), *cells):
        padded = [
            _clip(cell, width).rjust(width) if to_right else _clip(cell, width).ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append(_GAP.join(padded).rstrip())
    return "\n".join(lines)


def number_text(value: float) -> str:
    """Four significant digits, or whole numbers: never with an exponent."""
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"


def wrapped(head: str, text: str) -> list[str]:
    """Return lines with ``text`` to the right of ``head``: as wide as the terminal, at most 100."""
    return _folded(text, first=f"{head:<10}", later=" " * 10)


def _folded(text: str, *, first: str = "", later: str = "") -> list[str]:
    from shutil import get_terminal_size
    from textwrap import wrap

    width = MAX_COLUMNS
    if sys.stdout.isatty():
        width = min(get_terminal_size((MAX_COLUMNS, 1)).columns, MAX_COLUMNS)
    return wrap(
        text,
        max(width, _LEAST_WIDTH),
        initial_indent=first,
        subsequent_indent=later,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _rich_table(
    columns: Sequence[str], cells: Sequence[Sequence[str]], right: list[bool], title: str | None
) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    room = console.width - len(_GAP) * (len(columns) - 1)
    widths = _word_widths(list(zip(columns, *cells, strict=True)), room)
    # The box has one column between two cells, the padding another: together a gap.
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column, to_right, width in zip(columns, right, widths, strict=True):
        justify = "right" if to_right else "left"
        drawn.add_column(Text(column), justify=justify, overflow="fold", width=width)
    for row in cells:
        drawn.add_row(*map(Text, row))
    with console.capture() as captured:
        if title is not None:
            console.print(Text("\n".join(_folded(title)), style="italic"))
        console.print(drawn)
    return captured.get().rstrip("\n")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return number_text(value) if isinstance(value, float) else str(value)


def _fit_widths(widths: list[int]) -> list[int]:
    """Return widths that fit in a line, if long texts give way: the widest first."""
    name, *rest = widths
    room = MAX_COLUMNS - name - len(_GAP) * len(rest)
    while sum(rest) > room and max(rest, default=0) > _LEAST_WIDTH:
        rest[rest.index(max(rest))] -= 1
    return [name, *rest]


def _word_widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return widths that fit into ``room``: the widest gives way first, words as late as can be."""
    widths = [max(map(len, column)) for column in columns]
    words = [
        max((len(w) for cell in column for w in cell.split()), default=1) for column in columns
    ]
    for least in (words, [1] * len(columns)):
        while sum(widths) > room and widths != least:
            wider = [index for index, width in enumerate(widths) if width > least[index]]
            widths[max(wider, key=widths.__getitem__)] -= 1
    return widths


def _clip(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: max(width - 2, 0)] + ".."[:width]
