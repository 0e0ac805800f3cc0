"""A profile from the parts that a campaign has come to. Imports no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from codesign.artifacts import read_table, sha256, to_json, write_text
from codesign.artifacts.machine import hardware, machine_name
from codesign.config import parse_deployment
from codesign.errors import InputError
from codesign.fit import PROFILE_FILE
from codesign.policy.walk import Sampling
from codesign.profiler.store import ACCEPTANCE_PART, PartStore, ProfileSettings


def closed_profile(folder: Path) -> Path:
    """A copy of the parts that are there, as a whole profile."""
    copy, source = folder / "closed", folder / "profile" / "parts"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source, copy / "parts")
    names = sorted(p.stem for p in source.glob("*.parquet"))
    names.sort(key=lambda name: (name == ACCEPTANCE_PART, len(name), name))
    meta = read_table(source / f"{names[0]}.parquet", kind="profile")[1]
    values = dict(meta["settings"])
    sampling = Sampling(**values.pop("sampling"))
    labels = tuple(name for name in names if name != ACCEPTANCE_PART)
    workers = max(parse_deployment(label).num_workers for label in labels)
    settings = ProfileSettings(
        **{**values, "workers": workers, "deployments": labels, "sampling": sampling}
    )
    store = PartStore(copy, settings)
    about = store.finish(names, [])
    # The first machine that measured, not the one that joins; ``measured`` names all.
    kept = {key: meta[key] for key in _OF_MACHINE if key in meta}
    kept["contexts"] = meta.get("contexts", "equal")
    write_text(copy / PROFILE_FILE, to_json({**about, **kept}, indent=2) + "\n")
    return copy


def check_machine(folder: Path) -> None:
    """Refuse to go on with a pair that another kind of GPU was profiled for.

    Args:
        folder: The pair's.

    Raises:
        InputError: If a part of its profile is of another machine.
    """
    here = machine_name(hardware())
    for part in sorted((folder / "profile" / "parts").glob("*.parquet")):
        there = machine_name(read_table(part, kind="profile")[1]["hardware"])
        if there != here:
            raise InputError(
                f"{part} was measured on {there}, and this is {here}: a campaign is of one. "
                "Fix: --out with another folder"
            )


_OF_MACHINE = ("hardware", "created", "command")


def keep_machine(fit_file: Path, profile_file: Path) -> None:
    """Let a fit's header name the machine and the day of its measurements."""
    profile, fit = (json.loads(path.read_text()) for path in (profile_file, fit_file))
    fit |= {key: profile[key] for key in _OF_MACHINE}
    fit["inputs"] = {"profile": {"path": PROFILE_FILE, "sha256": sha256(profile_file)}}
    write_text(fit_file, to_json(fit, indent=2) + "\n")
