"""A served dashboard and a headless Chromium, for the tests here and for ``screenshots.py``."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

ROOT = Path(__file__).parents[2]
# Headless in a container, without asking any other machine for anything.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
)  # fmt: skip
DESKTOP: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}


def chromium() -> str | None:
    """The installed browser: $CHROMIUM, or a known name on the path."""
    names = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def free_port() -> int:
    """A port that nobody listens on, below those that a system gives to whoever asks for any.

    Of those, another program may get it before the server binds it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", port))
            except OSError:
                continue
            return port


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The dashboard, served from ``folder``; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "codesign", "dashboard", "--no-browser", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        (folder / "dashboard.log").open("wb") as log,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log) as server,
    ):
        try:
            wait_for(f"http://localhost:{port}/_stcore/health")
            yield f"http://localhost:{port}"
        finally:
            server.terminate()


def wait_for(url: str, seconds: float = 90.0) -> None:
    """Until the address answers.

    Raises:
        OSError: If it does not.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """A headless Chromium; Playwright gives each one a fresh profile."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def settle(page: Page, timeout: float = 60.0) -> None:
    """Until the script has run and nothing is drawn as stale or loading any more."""
    app = page.locator("[data-testid=stApp]")
    app.wait_for(timeout=1e3 * timeout)
    quiet_since, end = None, time.monotonic() + timeout
    while time.monotonic() < end:
        is_idle = app.get_attribute("data-test-script-state") == "notRunning"
        is_idle = is_idle and not page.locator("[data-testid=stSkeleton]:visible").count()
        if not is_idle:
            quiet_since = None
        elif quiet_since is None:
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since > 0.25:
            return
        page.wait_for_timeout(50)
    raise TimeoutError(f"the page still runs after {timeout:g} s")
