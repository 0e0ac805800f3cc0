"""Where files go: the cache, whole or not at all, and one process at a time."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from codesign.errors import InputError


def cache_dir() -> Path:
    """Return the folder for models and downloads: $CODESIGN_HOME, else the user's cache."""
    home = os.environ.get("CODESIGN_HOME")
    if home:
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "codesign"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a sibling to write; it takes the place of ``path`` if the body does not raise.

    Raises:
        InputError: If the path cannot be written.
    """
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder. Name a file")
    # Of this thread alone, and not by a process's number, which another container's may have, too.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as err:
        why = err.strerror or err
        raise InputError(f"cannot write {path}: {why}{elsewhere(path)}") from err
    finally:
        with suppress(OSError):  # its folder may not even be one
            temporary.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process at a time make files in a folder that others may want as well; they wait.

    A process that dies is out. A file system without locks has none.

    Raises:
        InputError: If there can be no such folder.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = os.open(folder, os.O_RDONLY)
    except OSError as err:
        why = err.strerror or err
        raise InputError(f"cannot write into {folder}: {why}{elsewhere(folder)}") from err
    try:
        with suppress(OSError):
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def beside(path: Path, what: str) -> Path:
    """Return the file that goes with another one: NAME.json has NAME.``what``.

    A file with any other ending, or none, has NAME-``what``, its ending kept. So no two files
    share what goes with them.
    """
    name, mark = (path.stem, ".") if path.suffix == ".json" else (path.name, "-")
    return path.with_name(f"{name}{mark}{what}")


def elsewhere(path: str | Path) -> str:
    """How the cache is put elsewhere, to end the error of a path in it; "" of any other."""
    is_cached = Path(path).is_relative_to(cache_dir())
    return ". Name another folder for the cache: CODESIGN_HOME=FOLDER" if is_cached else ""
