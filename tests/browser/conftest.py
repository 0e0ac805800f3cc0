"""A browser and a served dashboard; every test here is skipped where there is no Chromium."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("streamlit")

from playwright.sync_api import expect

_spec = importlib.util.spec_from_file_location("harness", Path(__file__).with_name("harness.py"))
harness = importlib.util.module_from_spec(_spec)
sys.modules["harness"] = harness  # tests import it by this name
_spec.loader.exec_module(harness)


WAIT = 60_000  # milliseconds; Playwright's own 5 s for what is expected are few on a busy machine


@pytest.fixture(scope="session")
def browser():
    if harness.chromium() is None:
        pytest.skip("no Chromium: apt-get install chromium, or set CHROMIUM")
    expect.set_options(timeout=WAIT)
    with harness.opened_browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def address(planned_folder):
    """Of a dashboard that is served from a folder with a plan and two runs."""
    if harness.chromium() is None:
        pytest.skip("no Chromium: apt-get install chromium, or set CHROMIUM")
    with harness.served(planned_folder) as url:
        yield url


@pytest.fixture
def page(browser, address):
    """A new page; any request to another machine, and any error in the page, fails the test."""
    context = browser.new_context(viewport=harness.DESKTOP, accept_downloads=True)
    opened = context.new_page()
    opened.set_default_timeout(WAIT)
    elsewhere, errors = [], []
    opened.on("request", lambda r: elsewhere.append(r.url) if is_elsewhere(r.url) else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    context.close()
    assert elsewhere == []
    assert errors == []


def is_elsewhere(url: str) -> bool:
    return url.startswith("http") and "://localhost:" not in url
