"""Errors of a benchmark's command, shown as the CLI shows them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from codesign.errors import CodesignError


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the command with one line and the exit code of an error that the package raises."""
    try:
        yield
    except CodesignError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
