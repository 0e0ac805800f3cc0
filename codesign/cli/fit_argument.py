"""The flags of the verbs that predict which say what is known of a machine: a fit, or a device.

``--fit`` names what was measured. ``--device`` with ``--gpus``, ``--target`` and ``--draft`` asks
"what if" of GPUs that nobody profiled.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from codesign.cli.argument_types import chance, positive
from codesign.cli.output import say
from codesign.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from codesign.fit import Fit

DEFAULT_FILE = "fit.json"  # where codesign fit writes
_PAIR = ("gpus", "target", "draft")


def add_fit_argument(group: Any) -> None:
    """Add ``--fit`` and its alternative to a parser or one of its groups."""
    from codesign.models import DEFAULT_FIT_NAME  # light: this is for help, too

    group.add_argument(
        "--fit",
        metavar="FIT",
        help=f"file from codesign fit, or the name of one that ships, as "
        f"h200-llama-3-70b-int4+llama-3.2-1b-int4 ({DEFAULT_FILE}, else {DEFAULT_FIT_NAME})",
    )
    group.add_argument(
        "--device",
        metavar="GPU",
        help="instead of --fit: a GPU such as h100, or FILE.json with a data sheet, with --gpus, "
        "--target and --draft; step times measured on it if the package has them, extrapolated to "
        "more GPUs than were measured, else from data sheets",
    )
    group.add_argument("--gpus", type=positive, metavar="N", help="number of GPUs of --device")
    group.add_argument(
        "--target", metavar="MODEL", help="with --device: llama-3-70b, llama-3-70b:int4 or a folder"
    )
    group.add_argument("--draft", metavar="MODEL", help="with --device: llama-3.2-3b:int4, ...")
    group.add_argument(
        "--acceptance",
        type=chance,
        metavar="P",
        help="with --device: probability that the first draft token is accepted (as recorded for "
        "the shipped pair)",
    )


def fit_from_args(args: argparse.Namespace) -> tuple[Fit, Path]:
    """The fit that ``--fit`` or ``--device`` stands for, and its file.

    What was taken without either flag is said.

    Returns:
        Without a flag fit.json of this folder, else the fit that ships with the package. A folder
        stands for the fit.json in it.

    Raises:
        InputError: If the file is missing or broken, or a device or model is unknown.
        UsageError: If flags contradict each other or one is missing.
    """
    from pathlib import Path

    from codesign.fit import Fit
    from codesign.fit.shipped import DEFAULT_FIT, FITS, machine_of

    if getattr(args, "device", None) is not None:
        return _what_if(args)
    stray = [name for name in (*_PAIR, "acceptance") if getattr(args, name, None) is not None]
    if stray:
        raise UsageError(f"--{stray[0]} needs --device; a fit has its own")
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
    elif not file.exists() and (FITS / file / DEFAULT_FILE).is_file():
        file = FITS / file / DEFAULT_FILE
    return Fit.load(file), file


def _what_if(args: argparse.Namespace) -> tuple[Fit, Path]:
    from codesign.fit.extrapolated import origin_text
    from codesign.fit.what_if import device_fit, kept_device_fit, measured_note

    missing = [name for name in _PAIR if getattr(args, name) is None]
    if args.fit is not None or missing:
        raise UsageError(
            "give --device or --fit, not both"
            if args.fit is not None
            else f"--device needs --{missing[0]}; for example --device h100 --gpus 8 "
            "--target llama-3.1-70b:int4 --draft llama-3.2-1b:int4"
        )
    fit = device_fit(args.device, args.gpus, args.target, args.draft, acceptance=args.acceptance)
    times = origin_text(fit, fit.origin)
    say(f"fit: {args.gpus} x {args.device}, {times}; acceptance {fit.acceptance_origin}")
    if note := measured_note(fit, args.device):
        say(f"note: {note}")
    return kept_device_fit(fit, args.device, args.gpus, acceptance=args.acceptance)
