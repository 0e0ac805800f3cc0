"""The server of the dashboard: ``python serve.py HOST PORT HEADLESS``."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Thread

SWITCH = 0.0005  # seconds that Python works on before it looks after a browser again


def main(host: str, port: str, headless: str) -> None:
    from streamlit.web import cli

    from codesign.dashboard.warm_up import warm_up

    sys.setswitchinterval(SWITCH)
    # Here, not in a process of its own: what it imports and works out is for the pages.
    Thread(target=warm_up, args=(host, int(port)), daemon=True).start()
    sys.argv = [
        "streamlit", "run", str(Path(__file__).with_name("streamlit_app.py")),
        f"--server.address={host}", f"--server.port={port}", f"--server.headless={headless}",
    ]  # fmt: skip
    cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
