"""Everything that can go wrong by a user's hand, each with its exit code.

A message is one line: what happened, the value found, and the command that fixes it.
"""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return "1 run", "2 runs"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class CodesignError(Exception):
    """Base class: something the user can act on."""

    exit_code = 1


class UsageError(CodesignError):
    """The command line does not make sense."""

    exit_code = 2


class InfeasibleError(CodesignError):
    """No plan in the search space meets the SLO."""

    exit_code = 3


class InputError(CodesignError):
    """A file or a value that was handed in cannot be used."""

    exit_code = 4


class HardwareError(CodesignError):
    """A device, a worker or an optional package that is needed is missing."""

    exit_code = 5


class ValidationError(CodesignError):
    """The measurement lies outside the tolerance around the prediction."""

    exit_code = 6
