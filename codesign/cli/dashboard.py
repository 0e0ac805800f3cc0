"""``codesign dashboard``: open the what-if dashboard in a browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from codesign.cli.output import say
from codesign.errors import HardwareError, UsageError

HOST = "localhost"  # pages read files that a visitor names: nobody else may visit
DEFAULT_PORT = 8501
_SWITCH = 0.0005  # seconds of Python between two answers to browsers while a simulation runs

_EXAMPLES = """\
examples:
  codesign dashboard
  codesign dashboard --port 8600 --no-browser
"""


def add_parser(subparsers: Any) -> None:
    """Add ``codesign dashboard``."""
    parser = subparsers.add_parser(
        "dashboard",
        help="open the what-if dashboard in a browser",
        description="Serve the what-if dashboard to browsers of this machine until Ctrl-C. Files "
        "are looked for in the folder that it is started in.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, metavar="N", help=f"port ({DEFAULT_PORT})"
    )
    parser.add_argument("--no-browser", action="store_true", help="only serve; open no browser")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(func=serve)


def serve(args: argparse.Namespace) -> NoReturn:
    """Become the server."""
    import sys
    from importlib.util import find_spec
    from threading import Thread

    if find_spec("streamlit") is None:
        raise HardwareError(
            "the dashboard needs streamlit, which is not installed. Install it: "
            "pip install 'codesign[app]'"
        )
    check_port(args.port)
    script = app_script()
    say(f"dashboard: http://{HOST}:{args.port} until Ctrl-C")
    sys.stdout.flush()

    from streamlit.web import cli

    from codesign.dashboard.warm_up import warm_up

    options = {
        "server.address": HOST,
        "server.port": args.port,
        "server.headless": str(args.no_browser).lower(),
    }
    sys.argv = ["streamlit", "run", str(script)]
    sys.argv += [f"--{name}={value}" for name, value in options.items()]
    sys.setswitchinterval(_SWITCH)
    # Not in a process of its own: what it has imported and worked out is for the pages.
    Thread(target=warm_up, args=(HOST, args.port), daemon=True).start()
    cli.main()
    raise AssertionError("Streamlit's command line exits by itself")


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
    raise HardwareError("the dashboard's pages are missing. Install again: pip install codesign")
