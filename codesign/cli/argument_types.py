"""What may be typed after a flag: numbers in a range, and files to write.

A wrong one is said before the work: with the value, and what would do.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from codesign.errors import InputError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


_TOO_LARGE = 2**63  # no file of ours holds it


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
        if number >= _TOO_LARGE:
            raise argparse.ArgumentTypeError(f"must be below 2^63, not '{text}'")
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
