"""What the command line prints: the result on stdout, everything else on stderr.

Only modules of ``codesign.cli`` print. rich is imported only when the stream is a
terminal; in a pipe, or with NO_COLOR, everything is plain text.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from codesign.errors import InputError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

MAX_COLUMNS = 100
_LEAST_WIDTH = 20  # of a column that is cut to fit
_GAP = "  "
_PIPE_INTERVAL = 10.0  # seconds between two progress lines in a pipe

Report = Callable[[str, int, int], None]


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, ``--quiet`` and ``--debug``; call it last, so that the group is last."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    group.add_argument("--quiet", action="store_true", help="show no progress")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number of ``least`` or above."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of {least} or above, not '{text}'"
            )
        return number

    return parse


def _number(words: str, is_right: Callable[[float], bool]) -> Callable[[str], float]:
    """An argparse type: a finite number that is ``words``."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and is_right(number)):
            raise argparse.ArgumentTypeError(f"must be a number {words}, not '{text}'")
        return number

    return parse


above_0 = _number("above 0", lambda x: x > 0)
from_0 = _number("of 0 or above", lambda x: x >= 0)
percentile = _number("above 0, at most 100", lambda x: 0 < x <= 100)
share = _number("above 0, at most 1", lambda x: 0 < x <= 1)
variation = _number("above 0, at most 10,000", lambda x: 0 < x <= 1e4)  # as a trace may have
chance = _number("from 0.01 to 0.99", lambda x: 0.01 <= x <= 0.99)
non_negative = _at_least(0)  # as seeds must be
positive = _at_least(1)


def out_file(
    text: str, usual: str, flag: str = "--out", *, reads: Iterable[str | Path | None] = ()
) -> Path:
    """The path ``text`` that was typed after ``flag``; advice names a ``usual`` file.

    Raises:
        UsageError: If a folder is there, or a file that the command ``reads`` and would destroy.
        InputError: If its folder takes no files. Both are said before the work, not after it.
    """
    from pathlib import Path

    out = Path(text)
    if out.is_dir():
        raise UsageError(f"{flag} {out} is a folder. Name a file: {flag} {out / usual}")
    if any(out.is_file() and Path(r).is_file() and out.samefile(r) for r in reads if r):
        raise UsageError(f"{flag} {out} is a file that is read. Name another: {flag} {usual}")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not os.access(f"{folder}/", os.W_OK | os.X_OK):
        raise InputError(f"cannot write {out}: {folder} takes no files. Name another: {flag} FILE")
    return out


def emit(
    args: argparse.Namespace, payload: Mapping[str, Any], text: str | Callable[[], str]
) -> None:
    """Print the result once: ``payload`` as one JSON object with ``--json``, else ``text``.

    Args:
        args: Parsed arguments with ``json`` (see ``add_output_arguments``).
        payload: The result; NumPy values, paths and dataclasses are converted, and numbers
            that JSON cannot hold (NaN, infinity) become null.
        text: The same result for people, or a function that makes it.
    """
    if args.json:
        from codesign.artifacts import to_json

        print(to_json(payload))
    else:
        print(text() if callable(text) else text)


def say(message: str) -> None:
    """Print one line on stderr: a warning, the next step, an error."""
    print(message, file=sys.stderr, flush=True)


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
    if _is_rich(sys.stdout):
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


@contextmanager
def progress(args: argparse.Namespace) -> Iterator[Report]:
    """Yield ``report(stage, done, total)``, the callback that long library functions take.

    A bar with the time left on a terminal; in a pipe a line each 10 s and one at the end;
    nothing with ``--quiet``.
    """
    if args.quiet:
        yield lambda stage, done, total: None
    elif _is_rich(sys.stderr):
        with _rich_progress() as report:
            yield report
    else:
        yield from _plain_progress()


def _plain_progress() -> Iterator[Report]:
    start = last = time.monotonic()
    begun: dict[str, tuple[float, int]] = {}  # of each stage, when and how far it was first heard

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        since, before = begun.setdefault(stage, (now, done))
        if now - last >= _PIPE_INTERVAL:
            last = now
            share = f" ({done / total:.0%})" if total else ""
            left = (now - since) * (total - done) / (done - before) if done > before else 0.0
            ahead = f", about {left:.0f} s left" if left >= 1 else ""
            say(f"{stage}: {done:,} of {total:,}{share}, {now - start:.0f} s so far{ahead}")

    yield report
    if last > start:
        say(f"done in {time.monotonic() - start:.0f} s")


@contextmanager
def _rich_progress() -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, Elapsed(), Remaining(), console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def _is_rich(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


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
