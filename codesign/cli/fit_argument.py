"""``--fit``: the flag of the verbs that predict, and the fit that it stands for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from codesign.cli.output import say

if TYPE_CHECKING:
    from pathlib import Path

    from codesign.fit import Fit

DEFAULT_FILE = "fit.json"  # where codesign fit writes


def add_fit_argument(group: Any) -> None:
    """Add ``--fit`` to a parser or one of its groups."""
    group.add_argument(
        "--fit", metavar="FIT", help=f"what codesign fit wrote ({DEFAULT_FILE}, else shipped)"
    )


def fit_from_args(args: argparse.Namespace) -> tuple[Fit, Path]:
    """The fit that ``--fit`` names, and its file; what was taken without the flag is said.

    Returns:
        Without the flag fit.json of this folder, else the fit that ships with the package. A
        folder stands for the fit.json in it.

    Raises:
        InputError: If the file is missing or broken.
    """
    from pathlib import Path

    from codesign.fit import Fit
    from codesign.fit.shipped import DEFAULT_FIT, machine_of

    file = Path(DEFAULT_FILE if args.fit is None else args.fit)
    if args.fit is None and not file.is_file():
        say(
            f"fit: the one that ships with the package ({machine_of(DEFAULT_FIT)}). For this "
            "machine: codesign profile --out profile, then codesign fit profile"
        )
        file = DEFAULT_FIT
    elif args.fit is None:
        say(f"fit: {file}")
    elif file.is_dir():
        file = file / DEFAULT_FILE
    return Fit.load(file), file
