"""The fit of a deployment as it was before its first run: what a prediction may be made from.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import isclose
from pathlib import Path
from typing import Any

from benchmarks.campaign.schedule import BLIND
from codesign.artifacts import sha256, to_json, write_text
from codesign.fit import Fit
from codesign.policy.cost import Calibration, RoundCost

SAME = 1e-6  # relative: another machine may round its fit otherwise


def keep_blind(folder: Path, label: str, cost: RoundCost, calibration: Calibration) -> str:
    """Write the fit of a deployment, unless it is there from before earlier runs; its SHA-256."""
    file = folder / BLIND / f"{label}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, to_json(_body(cost, calibration), indent=2) + "\n")
    return sha256(file)


def blind_fits(folder: Path, fit: Fit) -> dict[str, dict[str, Any]]:
    """By deployment: the hash of what was written before its runs, and whether ``fit`` says it."""
    found = {}
    for file in sorted((folder / BLIND).glob("*.json")):
        if file.stem in fit.costs:
            now = json.loads(to_json(_body(fit.costs[file.stem], fit.calibration)))
            is_same = _is_same(json.loads(file.read_text(encoding="utf-8")), now)
            found[file.stem] = {"sha256": sha256(file), "is_same": is_same}
    return found


def _body(cost: RoundCost, calibration: Calibration) -> dict[str, Any]:
    return {"cost": asdict(cost), "calibration": asdict(calibration)}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.get("each") == other.get("each") == 0.0:  # a tie: what it multiplies has no effect
            one, other = ({k: v for k, v in step.items() if k != "tile"} for step in (one, other))
        added = other.keys() - one.keys()  # a later version's: without effect as long as they are 0
        is_same = all(k in other and _is_same(one[k], other[k]) for k in one)
        return is_same and not any(other[k] for k in added)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, float) and isinstance(other, int | float):
        return isclose(one, other, rel_tol=SAME, abs_tol=1e-15)
    return bool(one == other)
