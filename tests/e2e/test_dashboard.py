"""The dashboard's pages in Streamlit's own harness, and the verb that serves them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from codesign.cli.dashboard import app_script

PAGES = ("what_if", "plan", "timeline", "validate", "profiles")


def open_page(name: str, **query: str) -> AppTest:
    app = AppTest.from_file(str(app_script()), default_timeout=60.0)
    for key, value in query.items():
        app.query_params[key] = value
    app.run()
    return app if name == "what_if" else app.switch_page(f"app_pages/{name}.py").run()


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens_in_an_empty_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = open_page(name)
    assert not page.exception
    assert page.title[0].value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def answer(url: str, seconds: float) -> str:
    """The body, asked for until the server is there."""
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.read().decode()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def test_the_verb_serves_on_this_machine_alone_until_it_is_ended(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "codesign", "dashboard", "--port", str(port), "--no-browser"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert answer(f"http://localhost:{port}/_stcore/health", 60) == "ok"
            assert server.stderr.readline() == (
                f"dashboard: http://localhost:{port} until Ctrl-C\n"
            )
        finally:
            server.terminate()
        server.wait(timeout=30)


def test_a_port_that_is_taken_is_one_line_with_the_next_one(cli):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = cli("dashboard", "--port", port, "--no-browser")
    assert result.returncode == 2
    assert result.stderr.startswith(f"codesign dashboard: port {port} cannot be had: ")
    assert f"codesign dashboard --port {port + 1}" in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_streamlit_the_line_says_what_to_install(tmp_path):
    code = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'streamlit' else found(n, *a)\n"
        "from codesign.cli import main\n"
        "sys.exit(main(['dashboard']))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd(), check=False
    )
    assert result.returncode == 5
    assert "pip install 'codesign[app]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_theme_asks_no_other_machine_for_anything():
    config = (app_script().parent / ".streamlit" / "config.toml").read_text(encoding="utf-8")
    assert "http" not in config
    assert "gatherUsageStats = false" in config
