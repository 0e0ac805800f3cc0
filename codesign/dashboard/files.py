"""Plans and runs that lie around, and files that a visitor brings, so that pages can show them."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from codesign.artifacts import read_json, replacing
from codesign.errors import InputError

RUN_FILE = "run.json"
_MOST_UNZIPPED = 2_000_000_000  # bytes
_SNIFFED = 64  # bytes of a JSON file, whose kind stands first


def plan_files(folder: Path) -> list[Path]:
    """Plans in a folder and in the folders in it, plan.json first, then the newest."""
    found = [p for pattern in ("*.json", "*/*.json") for p in folder.glob(pattern) if _is_plan(p)]
    return sorted(found, key=lambda p: (len(p.parts), p.name != "plan.json", -p.stat().st_mtime))


def unpacked(files: Mapping[str, bytes]) -> Path:
    """Path of plan.json after its files were written to a folder of this user, named by content."""
    folder = _own_folder("plans", b"".join(files[name] for name in sorted(files)))
    for name, content in files.items():
        _write_once(folder / name, content)
    return folder / "plan.json"


def keep_upload(name: str, data: bytes | memoryview) -> str:
    """Path of a file with what was uploaded, under the visitor's name; the same bytes keep it."""
    path = _own_folder("uploads", data) / (Path(name).name or "trace")
    _write_once(path, data)
    return str(path)


def unzipped(data: bytes) -> Path:
    """Folder of an uploaded ZIP's files; the same upload keeps its folder.

    Raises:
        InputError: If it is no ZIP file, or one that grows too large.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            if size > _MOST_UNZIPPED:
                raise InputError(
                    f"the ZIP holds {size / 1e9:.1f} GB, the limit is {_MOST_UNZIPPED / 1e9:g}. "
                    "Name the folder instead"
                )
            folder = _own_folder("runs", data)
            archive.extractall(folder)  # leaves out "..", drives and leading slashes
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as err:
        raise InputError(
            f"the upload is no readable ZIP file ({err}). Make one: zip -r runs.zip runs plan.json"
        ) from err
    return folder


def upload_folder(path: str) -> str:
    """What ``keep_upload`` put before the visitor's name of a file; "" for any other file."""
    folder = Path(path).parent
    return f"{folder}{os.sep}" if folder.parent == _above("uploads") else ""


def _write_once(path: Path, data: bytes | memoryview) -> None:
    """Write a file that another visitor may have written, or be writing."""
    if not path.is_file():
        with replacing(path) as temporary:
            temporary.write_bytes(data)


def _own_folder(kind: str, content: bytes | memoryview) -> Path:
    """A folder for temporary files of this user alone, named by what will be in it."""
    _above(kind).mkdir(exist_ok=True, mode=0o700)
    folder = _above(kind) / hashlib.sha256(content).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    return folder


def _above(kind: str) -> Path:
    return Path(tempfile.gettempdir()) / f"codesign-{kind}-{os.getuid()}"


def run_folders(folder: Path) -> list[Path]:
    """Folders of whole runs: the folder itself, or those in it and one level deeper.

    Raises:
        InputError: If there is none.
    """
    if (folder / RUN_FILE).is_file():
        return [folder]
    if not folder.is_dir():
        raise InputError(f"{folder} does not exist. Make it: codesign run --plan plan.json")
    patterns = (f"*/{RUN_FILE}", f"*/*/{RUN_FILE}")
    found = sorted({path.parent for pattern in patterns for path in folder.glob(pattern)})
    if not found:
        raise InputError(
            f"no run in {folder}: no {RUN_FILE}. Make one: codesign run --plan plan.json"
        )
    return found


def runs_of(plan_file: Path, label: str) -> list[Path]:
    """Runs of a candidate in the folder ``runs`` beside its plan."""
    try:
        found = run_folders(plan_file.parent / "runs")
        return [f for f in found if read_json(f / RUN_FILE, kind="run").get("label") == label]
    except InputError:
        return []


def plan_of_run(folder: Path, others: Iterable[Path] = ()) -> Path | None:
    """The plan that a run was made with, as its run.json says; else the first of ``others``.

    Raises:
        InputError: If run.json is broken.
    """
    named = read_json(folder / RUN_FILE, kind="run").get("inputs", {}).get("plan", {}).get("path")
    if named is None:
        return next(iter(others), None)
    path = Path(named)
    above = [folder, *folder.resolve().parents]
    tries = [*(base / path for base in above), *(base / path.name for base in above), path]
    return next((p for p in [*tries, *others] if p.is_file()), None)


def _is_plan(path: Path) -> bool:
    """By its first key: other JSON files may be large, and this is asked again and again."""
    try:
        with path.open("rb") as file:
            return b'"kind": "plan"' in file.read(_SNIFFED)
    except OSError:  # a folder, a link to nothing, somebody else's
        return False
