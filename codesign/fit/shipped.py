"""Fits that come with the package, so that a plan can be tried before anything was measured.

Acceptance belongs to a pair of models and holds on any machine; step times belong to the machine
that the fit's header names. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from codesign.artifacts import read_json
from codesign.artifacts.machine import machine_name
from codesign.fit import Fit

if TYPE_CHECKING:
    import pandas as pd

    from codesign.policy.walk import Sampling

FITS = Path(__file__).parents[1] / "data" / "fits"
DEFAULT_FIT = FITS / "smollm2-135m-cpu" / "fit.json"


# Shapes of the same sizes.
_SAME = {"llama-3.1-70b": "llama-3-70b"}


def machine_of(path: Path) -> str:
    """The machine and the day of a fit's measurements, in a few words."""
    meta = read_json(path, kind="fit")
    return f"{machine_name(meta['hardware'])}, measured {meta['created'][:10]}"


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
    for fit in _shipped():
        recorded = (fit.target, fit.draft, fit.temperature, fit.top_k, fit.top_p)
        if recorded == (target, draft, sampling.temperature, sampling.top_k, sampling.top_p):
            return fit.acceptance.to_table()
    return None


def _shipped() -> Iterator[Fit]:
    for path in sorted(FITS.glob("*/fit.json")):
        yield Fit.load(path)
