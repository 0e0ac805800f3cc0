"""Gets ready while a browser still loads the page: what the first view imports, and its answer."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from importlib import import_module

from codesign.errors import CodesignError

_LATER = ("words", "what_if_charts", "commands")  # what the first page needs besides
_LONGEST = 60.0  # seconds to wait for the server
_POLL = 0.01


def warm_up(host: str, port: int) -> None:
    """Wait until a server listens, then make the answer that most visitors see first.

    Not before, because both share one interpreter and the browser waits for the server. The answer
    is worked out as any other and kept where the page looks for it.
    """
    end = time.monotonic() + _LONGEST
    while not _listens(host, port):
        if time.monotonic() > end:
            return
        time.sleep(_POLL)
    from codesign.dashboard.what_if import first_question, predict

    with suppress(CodesignError):  # the page says what is wrong
        predict(first_question(), is_coarse=True)
    for name in _LATER:
        import_module(f"codesign.dashboard.{name}")


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
