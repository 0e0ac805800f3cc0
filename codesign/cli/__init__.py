"""The command line: parse, call one function of one verb, turn errors into exit codes.

Each verb is a module of this package with ``add_arguments(parser)``; only the module of
the verb that was typed is imported, and verbs import the library inside their functions,
so that ``codesign --help`` stays well under 0.3 s. Import nothing heavier than argparse
here.

Exit codes: 0 done; 1 a bug in codesign; 2 usage; 3 no plan meets the SLO; 4 bad input;
5 hardware or an optional package is missing; 6 validation outside the tolerance;
130 interrupted; 141 the reader of standard output went away.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from typing import Any, NoReturn

from codesign import __version__
from codesign.cli.output import emit_error, say
from codesign.errors import CodesignError, InputError, UsageError

VERBS = (
    ("trace", "list, inspect, synthesise or fetch request traces"),
    ("models", "list, fetch, import, quantise or inflate the language models"),
    ("profile", "measure step times and acceptance on this machine"),
    ("fit", "turn a profile into step-time and acceptance models"),
    ("simulate", "predict how one plan serves a trace"),
    ("plan", "search for the plan that meets the SLO on a trace"),
    ("export", "write a plan for vLLM, SGLang or TensorRT-LLM"),
    ("run", "serve a trace with a plan on the real engine"),
    ("validate", "compare measured runs with their prediction"),
    ("timeline", "write runs as a timeline for Perfetto"),
    ("dashboard", "open the what-if dashboard in a browser"),
    ("env", "show versions, hardware and folders for a bug report"),
)

_EXAMPLES = """\
examples:
  codesign plan --trace conv-twin --rate-scale 0.1 --max-prompt 128 --max-output 48 \\
      --max-requests 20
  codesign run --plan plan.json
"""


# What the system refuses by a user's hand: files of others, full disks, a file for a folder, names
# that no file can have.
_REFUSALS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose epilog keeps its line breaks."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(**kwargs)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        """Refuse here what nobody knows: argparse would let the topmost parser name its help."""
        known, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError that names the help page to read."""
        raise UsageError(f"{message}. See: {self.prog} --help")


def build_parser(verb: str | None = None) -> Parser:
    """Return the parser with the flags of ``verb``; the other verbs are names with a help line."""
    parser = Parser(
        prog="codesign",
        description="Simulate, plan, run and validate LLM speculative decoding.",
        epilog=_EXAMPLES,
    )
    # Two names, because argparse is as wide as the longest option here: a verb needs the room.
    parser.add_argument("-V", "--version", action="version", version=f"codesign {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, help_line in VERBS:
        added = subparsers.add_parser(name, help=help_line)
        if name == verb:
            importlib.import_module(f"codesign.cli.{name}").add_arguments(added)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code; only ``--help`` and ``--version`` exit."""
    words = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may be in any script
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _answer(words)
    except BrokenPipeError:
        # Python flushes stdout again when it exits: give it a pipe that cannot break.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _answer(words: list[str]) -> int:
    verb = next((word for word in words if not word.startswith("-")), None)
    args = argparse.Namespace()
    try:
        build_parser(verb).parse_args(words or ["--help"], args)
        code = args.func(args)
        sys.stdout.flush()
        return code or 0
    except CodesignError as err:
        _traceback_if_asked(words)
        message, code = _one_line(err), err.exit_code
    except KeyboardInterrupt as stop:
        message = f"interrupted; {str(stop) or 'every file that was written is whole'}"
        code = 130
    except BrokenPipeError:
        raise
    except Exception as err:
        _traceback_if_asked(words)
        message, code = _unforeseen(err, words)
    say(f"codesign: {message}" if verb is None else f"codesign {verb}: {message}")
    if "--json" in words:
        emit_error(args, message, code)
    return code


def _one_line(err: CodesignError) -> str:
    """What it says; a line break in a name that was typed is shown as Python writes it."""
    return "\\n".join(str(err).splitlines())


def _unforeseen(err: Exception, words: list[str]) -> tuple[str, int]:
    """What nobody caught, and its code: a file that the system refuses is the user's, not ours."""
    if isinstance(err, OSError) and err.errno in _REFUSALS:
        from codesign.artifacts import elsewhere

        place = err.filename or "a file"
        message = f"cannot use {place}: {err.strerror}{elsewhere(place)}"
        return message, InputError.exit_code
    detail = " ".join(str(err).split())
    hint = "" if "--debug" in words else ". For the traceback add --debug"
    return f"bug in codesign: {type(err).__name__}: {detail}{hint}", 1


def _traceback_if_asked(words: list[str]) -> None:
    if "--debug" in words:
        import traceback

        traceback.print_exc()
