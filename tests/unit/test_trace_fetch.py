"""Fetching published traces: from a server of our own, whole, broken, lying and absent."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from codesign.errors import HardwareError, InputError
from codesign.traces.catalog import PublishedTrace
from codesign.traces.fetch import fetch_trace

BODY = bytes(range(256)) * 40
SUM = hashlib.sha256(BODY).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves BODY; remembers the ranges asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []
        self.break_after: int | None = None
        self.knows_ranges = True
        self.status = 200
        self.before_answer = lambda: None


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.ranges.append(asked)
        server.before_answer()
        if server.status != 200:
            self.send_error(server.status)
            return
        start = int(asked[6:-1]) if asked and server.knows_ranges else 0
        if start >= len(BODY):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(BODY) - start))
        self.end_headers()
        stop = len(BODY) if server.break_after is None else start + server.break_after
        self.wfile.write(BODY[start:stop])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def published(server, tmp_path, monkeypatch):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    url = f"http://127.0.0.1:{server.server_port}/trace.csv"
    known = PublishedTrace("mine", url, "a trace", "none", SUM, "publisher", len(BODY))

    def publish(**changes):
        monkeypatch.setattr("codesign.traces.catalog.PUBLISHED", (replace(known, **changes),))
        return tmp_path / "traces" / "trace.csv"

    publish()
    return publish


def test_a_file_arrives_whole_and_its_checksum_is_held_against_the_published_one(published):
    seen = []
    fetched = fetch_trace("mine", progress=lambda *report: seen.append(report))
    path = published()
    assert path.read_bytes() == BODY
    assert (fetched.path, fetched.sha256, fetched.was_there) == (path, SUM, False)
    assert fetched.check == "sha256 agrees (publisher)"
    assert seen[-1] == ("mine", len(BODY), len(BODY))
    assert not path.with_name("trace.csv.part").exists()


def test_a_file_that_is_there_is_checked_and_not_downloaded_again(published, server):
    fetch_trace("mine")
    fetched = fetch_trace("mine")
    assert (fetched.was_there, len(server.ranges)) == (True, 1)
    published().write_bytes(b"changed")
    with pytest.raises(InputError, match="delete it, then: codesign trace fetch mine"):
        fetch_trace("mine")
    assert published().read_bytes() == b"changed"  # perhaps the user's own: not ours to delete


def test_a_broken_download_leaves_no_file_and_continues_where_it_stopped(published, server):
    server.break_after = 5000
    with pytest.raises(HardwareError, match="cannot download http://127"):
        fetch_trace("mine")
    assert not published().exists()
    server.break_after = None
    fetch_trace("mine")
    assert server.ranges == [None, "bytes=5000-"]
    assert published().read_bytes() == BODY


def test_of_two_that_fetch_at_once_one_waits_for_the_other(published, server):
    both = threading.Barrier(2, timeout=30)
    server.before_answer = lambda: time.sleep(0.3)
    found = []

    def fetch() -> None:
        both.wait()
        found.append(fetch_trace("mine"))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fetched.was_there for fetched in found) == [False, True]
    assert server.ranges == [None]
    assert published().read_bytes() == BODY


def test_a_server_without_ranges_starts_again(published, server):
    server.knows_ranges = False
    published().parent.mkdir()
    published().with_name("trace.csv.part").write_bytes(b"x" * 99)
    fetch_trace("mine")
    assert published().read_bytes() == BODY


def test_a_part_that_is_too_long_is_thrown_away(published):
    path = published()
    path.parent.mkdir()
    path.with_name("trace.csv.part").write_bytes(b"x" * (len(BODY) + 1))
    fetch_trace("mine")
    assert path.read_bytes() == BODY


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(published):
    path = published(sha256="0" * 64)
    with pytest.raises(InputError, match=f"has sha256 {SUM}, expected 0000") as caught:
        fetch_trace("mine")
    assert "try again: codesign trace fetch mine" in str(caught.value)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_refuses_names_the_address_and_where_to_put_the_file(
    published, server, status
):
    server.status = status
    with pytest.raises(HardwareError) as caught:
        fetch_trace("mine")
    message = str(caught.value)
    assert f"http://127.0.0.1:{server.server_port}/trace.csv" in message
    assert f"put the file at {published()} by hand" in message
    assert "\n" not in message
    assert caught.value.exit_code == 5


def test_no_network_is_one_line(published):
    published(url="http://127.0.0.1:1/trace.csv")
    with pytest.raises(HardwareError, match=r"Connection refused.*by hand"):
        fetch_trace("mine")


def test_an_unknown_name_lists_the_known_ones(published):
    with pytest.raises(InputError, match="no published trace 'yours'"):
        fetch_trace("yours")


def test_a_cache_that_cannot_be_written_is_an_input_error(published, tmp_path):
    (tmp_path / "traces").write_text("in the way", encoding="ascii")
    with pytest.raises(InputError, match="cannot write"):
        fetch_trace("mine")
