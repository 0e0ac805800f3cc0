"""A file that another file depends on: its place, relative to that file, and its checksum.

A folder can so be moved as a whole, and a file that has changed is noticed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from codesign.artifacts import sha256
from codesign.errors import InputError


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file that a plan depends on, and its checksum when the plan was made."""

    path: Path
    sha256: str

    @classmethod
    def of(cls, path: str | Path) -> FileRef:
        """Reference to a file as it is now.

        Raises:
            InputError: If it cannot be read.
        """
        return cls(Path(path), sha256(path))

    def check(self) -> Path:
        """Its path, if the file has not changed.

        Raises:
            InputError: If it is gone or has changed since.
        """
        if not self.path.is_file():
            raise InputError(
                f"{self.path}, which the plan names, was not found, nor a copy next to the plan. "
                "Copy it, or plan again: codesign plan --trace TRACE"
            )
        if sha256(self.path) != self.sha256:
            raise InputError(
                f"{self.path} has changed since the plan was made. Plan again: codesign plan "
                "--trace TRACE"
            )
        return self.path

    def to_dict(self, folder: Path) -> dict[str, str]:
        """As JSON; the path is relative to this folder."""
        return {"path": os.path.relpath(self.path, folder), "sha256": self.sha256}

    @classmethod
    def from_dict(cls, values: Mapping[str, str], folder: Path) -> FileRef:
        """The inverse; if the file moved, the same one in this folder or in the package."""
        named, checksum = folder / values["path"], values["sha256"]
        if named.is_file():
            return cls(named, checksum)
        from codesign.fit.shipped import FITS

        places = [folder / named.name, *sorted(FITS.glob("*/fit.json"))]
        found = (path for path in places if path.is_file() and sha256(path) == checksum)
        return cls(next(found, named), checksum)
