"""What the command line prints: the result on stdout, everything else on stderr.

Only modules of ``codesign.cli`` print. rich is imported only when the stream is a
terminal; in a pipe, or with NO_COLOR, everything is plain text.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

_PIPE_INTERVAL = 10.0  # seconds between two progress lines in a pipe

Report = Callable[[str, int, int], None]


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, ``--quiet`` and ``--debug``; call it last, so that the group is last."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    group.add_argument("--quiet", action="store_true", help="show no progress")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")


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
    args.has_emitted = True


def emit_error(args: argparse.Namespace, message: str, exit_code: int) -> None:
    """Print an error as the one JSON object, unless a result was printed before it.

    Args:
        args: As far as they could be parsed.
        message: As on stderr, without the verb.
        exit_code: Of the process.
    """
    import json

    is_first = "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"
    if is_first and not getattr(args, "has_emitted", False):
        error = {"message": message, "exit_code": exit_code}
        try:
            print(json.dumps({"error": error}), flush=True)
        except BrokenPipeError:
            raise
        except OSError:  # stdout takes nothing, which may be the very error
            sys.stdout = None


def say(message: str) -> None:
    """Print one line on stderr: a warning, the next step, an error."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def progress(args: argparse.Namespace) -> Iterator[Report]:
    """Yield ``report(stage, done, total)``, the callback that long library functions take.

    A bar with the time left on a terminal; in a pipe a line each 10 s and one at the end;
    nothing with ``--quiet``.
    """
    if args.quiet:
        yield lambda stage, done, total: None
    elif is_rich(sys.stderr):
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


def is_rich(stream: TextIO) -> bool:
    """Whether the stream is a terminal that may have colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR")
