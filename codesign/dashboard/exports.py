"""A plan that was found here, as the configuration of another engine."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from codesign.dashboard.kept import Kept
from codesign.export import ENGINES, export_plan
from codesign.fit import Fit
from codesign.plan import Plan

if TYPE_CHECKING:
    from codesign.dashboard.planning import Found

ENGINE_TITLES = {name: engine.title for name, engine in ENGINES.items()}


@dataclass(frozen=True, slots=True)
class Exported:
    """What another engine is given.

    Attributes:
        commands: Lines for a shell.
        files: That the commands read, by name.
        losses: What the engine cannot express, and what was done instead.
    """

    commands: str
    files: dict[str, str]
    losses: tuple[str, ...]


_exports: Kept[Exported] = Kept(16)


def export_text(found: Found, engine: str) -> Exported:
    """The chosen candidate for an engine, one of ENGINE_TITLES.

    Raises:
        InputError: If the candidate makes no sense on any engine.
    """
    key = hashlib.sha256(found.files["plan.json"]).digest(), engine
    return _exports.get(key) or _exports.put(key, _export(found, engine))


def _export(found: Found, engine: str) -> Exported:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in found.files.items():
            (Path(folder) / name).write_bytes(content)
        plan = Plan.load(Path(folder) / "plan.json")
        exported = export_plan(plan, Fit.load(plan.fit.check()), ENGINES[engine])
    setup = exported.configuration
    return Exported(
        commands="\n\n".join(command.shell for command in setup.commands),
        files=dict(setup.files),
        losses=tuple(f"{loss.what}: {loss.instead}" for loss in exported.losses),
    )
