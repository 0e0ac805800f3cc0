"""Finds the plans and runs that lie around, so that a page has something to show.

Must not import streamlit or torch.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from codesign.artifacts import read_json
from codesign.errors import InputError

RUN_FILE = "run.json"


def plan_files(folder: Path) -> list[Path]:
    """Plans in a folder and in the folders in it, plan.json first, then the newest."""
    found = [p for pattern in ("*.json", "*/*.json") for p in folder.glob(pattern) if _is_plan(p)]
    return sorted(found, key=lambda p: (len(p.parts), p.name != "plan.json", -p.stat().st_mtime))


def unpacked(files: Mapping[str, bytes]) -> Path:
    """Path of plan.json after its files were written to a folder of this user, named by content."""
    digest = hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    folder = Path(tempfile.gettempdir()) / f"codesign-plans-{user}" / digest
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, content in files.items():
        if not (folder / name).is_file():
            (folder / name).write_bytes(content)
    return folder / "plan.json"


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
    if path.stat().st_size > 50_000_000:
        return False
    try:
        read_json(path, kind="plan")
    except (InputError, UnicodeDecodeError):
        return False
    return True
