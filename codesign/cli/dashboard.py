"""``codesign dashboard``: open the what-if dashboard in a browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from codesign.cli.output import say
from codesign.errors import HardwareError, UsageError

HOST = "localhost"  # pages read files that a visitor names: nobody else may visit
DEFAULT_PORT = 8501

_EXAMPLES = """\
examples:
  codesign dashboard
  codesign dashboard --port 8600 --no-browser
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``codesign dashboard`` takes."""
    parser.description = (
        "Serve the what-if dashboard to browsers on this machine until Ctrl-C. It looks "
        "for files in the folder in which it is started."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, metavar="N", help=f"port ({DEFAULT_PORT})"
    )
    parser.add_argument("--no-browser", action="store_true", help="only serve; open no browser")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(func=serve)


def serve(args: argparse.Namespace) -> NoReturn:
    """Become the server."""
    import os
    import sys
    from importlib.util import find_spec

    if find_spec("streamlit") is None:
        raise HardwareError(
            "the dashboard needs streamlit, which is not installed. Install it: "
            "pip install 'codesign[app]'"
        )
    check_port(args.port)
    script = app_script().with_name("serve.py")
    say(f"dashboard: http://{HOST}:{args.port} until Ctrl-C")
    sys.stdout.flush()
    words = [HOST, str(args.port), str(args.no_browser).lower()]
    os.execv(sys.executable, [sys.executable, str(script), *words])


def check_port(port: int) -> None:
    """Fail now, with the way out, where Streamlit would fail later.

    Raises:
        UsageError: If there is no such port, or another program has it.
    """
    import socket

    if not 1 <= port <= 65535:
        raise UsageError(f"--port must lie in [1, 65535], got {port}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as err:
            raise UsageError(
                f"port {port} cannot be had: {err.strerror}. Try another: "
                f"codesign dashboard --port {port % 65535 + 1}"
            ) from err


def app_script() -> Path:
    """The script that Streamlit runs: the repository's, or the installed copy.

    Raises:
        HardwareError: If neither is there.
    """
    package = Path(__file__).parents[1]
    for folder in (package.parent / "app", package / "_app"):
        if (script := folder / "streamlit_app.py").is_file():
            return script
    raise HardwareError("the dashboard's pages are missing. Install the package again")
