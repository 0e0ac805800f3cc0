"""Fits that come with the package, so that a plan can be tried before anything was measured.

Acceptance belongs to a pair of models and holds on any machine; step times belong to the machine
that the fit's header names. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from codesign.artifacts import read_json
from codesign.fit import Fit

if TYPE_CHECKING:
    import pandas as pd

_FOLDER = Path(__file__).parents[1] / "data" / "fits"
DEFAULT_FIT = _FOLDER / "smollm2-135m-cpu" / "fit.json"


def machine_of(path: Path) -> str:
    """The machine and the day of a fit's measurements, in a few words."""
    meta = read_json(path, kind="fit")
    return f"{meta['hardware']['cpu']}, measured {meta['created'][:10]}"


def shipped_acceptance(target: str, draft: str, temperature: float) -> pd.DataFrame | None:
    """Recorded acceptance of a pair at a temperature, if the package has it.

    Returns:
        Columns as in a profile's acceptance.parquet; None if nothing fits.
    """
    for fit in _shipped():
        if (fit.target, fit.draft, fit.temperature) == (target, draft, temperature):
            return fit.acceptance.to_table()
    return None


def _shipped() -> Iterator[Fit]:
    for path in sorted(_FOLDER.glob("*/fit.json")):
        yield Fit.load(path)
