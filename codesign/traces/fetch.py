"""Download published traces into the user's cache, by checksum.

A file appears under its name only when it is whole and its checksum is right. What came before
a broken connection stays beside it as ``.part`` and is continued the next time. Prints nothing.
"""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from codesign import Progress, __version__
from codesign.artifacts import alone, elsewhere, sha256
from codesign.errors import HardwareError, InputError
from codesign.traces.catalog import PUBLISHED, PublishedTrace, cached_path, find_published

_CHUNK = 2**20
_TIMEOUT = 30.0  # seconds without a byte
_NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    ssl.SSLError,
)
_PARTIAL_CONTENT, _RANGE_NOT_SATISFIABLE = 206, 416


@dataclass(frozen=True, slots=True)
class FetchedTrace:
    """What a fetch did.

    Attributes:
        was_there: The file was in the cache already; its checksum was checked again.
        check: What the checksum was held against, in words; always show it.
    """

    name: str
    path: Path
    sha256: str
    was_there: bool
    check: str


def fetch_trace(name: str, *, progress: Progress | None = None) -> FetchedTrace:
    """Put a published trace into the cache unless it is there, and check it either way.

    Args:
        name: A name from the catalogue, such as ``azure-conv``.
        progress: Called with (name, bytes so far, bytes in all or 0).

    Raises:
        InputError: If the name is unknown, the checksum is wrong or the cache cannot be written.
        HardwareError: If the file cannot be downloaded.
    """
    published = find_published(name)
    if published is None:
        known = ", ".join(known.name for known in PUBLISHED)
        raise InputError(f"no published trace '{name}'. Fix: one of {known}")
    path = cached_path(published)
    was_there = path.is_file()
    if not was_there:
        with alone(path.parent):
            was_there = path.is_file()  # by another process, for which this one waited
            if not was_there:
                _fetch(published, path, progress or (lambda _name, _done, _total: None))
    if was_there:
        _check(published, path)
    check = f"sha256 agrees ({published.checksum_from})"
    return FetchedTrace(published.name, path, published.sha256, was_there, check)


def _fetch(published: PublishedTrace, path: Path, progress: Progress) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        _download(published, part, progress)
        _check(published, part)
        part.replace(path)
    except OSError as err:
        why = err.strerror or err
        raise InputError(f"cannot write {path}: {why}{elsewhere(path)}") from err


def _check(published: PublishedTrace, file: Path) -> None:
    found = sha256(file)
    if found == published.sha256:
        return
    if file.suffix == ".part":
        file.unlink()
        fix = f"it was deleted; try again: codesign trace fetch {published.name}"
    else:
        fix = f"delete it, then: codesign trace fetch {published.name}"
    raise InputError(
        f"{file.name} has sha256 {found}, expected {published.sha256} "
        f"({published.checksum_from}); {fix}"
    )


def _download(published: PublishedTrace, part: Path, progress: Progress) -> None:
    by_hand = f"Fix: put the file at {cached_path(published)} by hand, or try again with a network"
    try:
        _receive(published, part, progress)
    except _NETWORK_ERRORS as err:
        reason = " ".join(str(getattr(err, "reason", err) or type(err).__name__).split())
        raise HardwareError(f"cannot download {published.url} ({reason}). {by_hand}") from err


def _receive(published: PublishedTrace, part: Path, progress: Progress) -> None:
    start = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(
        published.url, headers={"User-Agent": f"codesign/{__version__}"}
    )
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as err:
        with err:
            if not start or err.code != _RANGE_NOT_SATISFIABLE:
                raise
        part.unlink()  # whole or too long, yet not accepted: begin again
        return _receive(published, part, progress)
    with answer:
        # A server that ignores the range sends everything with 200: begin again.
        start = start if answer.status == _PARTIAL_CONTENT else 0
        total = start + int(answer.headers.get("Content-Length") or 0)
        done = start
        with part.open("ab" if start else "wb") as file:
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                progress(published.name, done, total)
    if done < total:
        raise http.client.IncompleteRead(b"", total - done)
    return None
