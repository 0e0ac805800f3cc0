"""Fits that come with the package, so that a plan can be tried before anything was measured.

Acceptance belongs to a pair of models and holds on any machine; step times belong to the machine
that the fit's header names. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codesign.artifacts import read_json
from codesign.artifacts.machine import machine_name
from codesign.fit import ROOFLINE, Fit
from codesign.models import DEFAULT_FIT_NAME

if TYPE_CHECKING:
    import pandas as pd

    from codesign.policy.walk import Sampling

FITS = Path(__file__).parents[1] / "data" / "fits"
DEFAULT_FIT = FITS / DEFAULT_FIT_NAME / "fit.json"


# Shapes of the same sizes.
_SAME = {"llama-3.1-70b": "llama-3-70b"}


def machine_of(path: Path) -> str:
    """The machine and the day of a fit's measurements, in a few words."""
    meta = read_json(path, kind="fit")
    days = [part["day"] for part in _timed(meta)] or [meta["created"][:10]]
    return f"{' and '.join(machines_of(path))}, measured {max(days)}"


def machines_of(path: Path) -> list[str]:
    """GPUs or CPUs whose step times a fit holds, each once.

    A profile may be fitted on another machine than it was measured on. Fits that do not say where
    that was were made on the same machine.
    """
    meta = read_json(path, kind="fit")
    found = [part["machine"] for part in _timed(meta)]
    return list(dict.fromkeys(found)) or [machine_name(meta["hardware"])]


def is_of_gpus(meta: Mapping[str, Any]) -> bool:
    """Whether a fit's step times are of GPUs, by its JSON; not if they are from data sheets."""
    if meta["origin"] == ROOFLINE:
        return False
    device = meta.get("device")
    if not device:  # only GPUs' memory is measured
        has_memory = any(cost.get("kv_tokens") is not None for cost in meta["costs"].values())
        device = "cuda" if meta["hardware"].get("gpus") or has_memory else "cpu"
    return device == "cuda"


def _timed(meta: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Parts of a fit's profile that hold step times, by machine and day."""
    return [part for part in meta.get("measured", ()) if part["parts"] != ["acceptance"]]


def shipped_pair(device: str, target: str, draft: str) -> Path | None:
    """The fit of a pair on a GPU that the package has measured, if there is one.

    Args:
        device: As the command line names it.
        target: Label of a shape, as "llama-3-70b:int4".
        draft: The same.
    """
    target, draft = (_canonical(label).replace(":", "-") for label in (target, draft))
    path = FITS / f"{device}-{target}+{draft}" / "fit.json"
    return path if path.is_file() else None


def _canonical(label: str) -> str:
    name, colon, weights = label.partition(":")
    return f"{_SAME.get(name, name)}{colon}{weights}"


def shipped_acceptance(target: str, draft: str, sampling: Sampling) -> pd.DataFrame | None:
    """Recorded acceptance of a pair for a way to sample, if the package has it.

    Args:
        target: Name of the target.
        draft: Name of the draft.
        sampling: Its temperature, top_k and top_p must be those of the record; the seed need not.

    Returns:
        Columns as in a profile's acceptance.parquet; None if nothing fits.
    """
    wanted = (target, draft, sampling.temperature, sampling.top_k, sampling.top_p)
    for path in sorted(FITS.glob("*/fit.json")):
        meta = read_json(path, kind="fit")  # without the record, which takes far longer to read
        recorded = (meta["target"], meta["draft"], meta["temperature"])
        if wanted == (*recorded, meta.get("top_k", 0), meta.get("top_p", 1.0)):
            return Fit.load(path).acceptance.to_table()
    return None
