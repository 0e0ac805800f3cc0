"""The fields of a fit, from the file that ``Fit.save`` has written.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from codesign.fit.calibration import CalibrationFit
from codesign.fit.round_costs import FORWARDS
from codesign.fit.steps import HeldOut, StepFit
from codesign.policy.cost import Calibration, RoundCost, StepTime


def read_fields(payload: Mapping[str, Any]) -> dict[str, Any]:
    """All of them but the acceptance, which has a file of its own.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: If the file is incomplete or damaged.
    """
    checked = payload["calibration_fit"]
    return {
        "target": payload["target"],
        "draft": payload["draft"],
        "temperature": payload["temperature"],
        "top_k": payload.get("top_k", 0),  # fits of the first day do not say
        "top_p": payload.get("top_p", 1.0),
        "costs": {label: _read_cost(cost) for label, cost in payload["costs"].items()},
        "calibration": Calibration(**payload["calibration"]),
        "errors": dict(payload["errors"]),
        "origin": payload["origin"],
        "acceptance_origin": payload.get("acceptance_origin", "recorded"),
        "steps": {name: _read_step(step) for name, step in payload["steps"].items()},
        "calibration_fit": None if checked is None else _read_calibration(checked),
        "measured": tuple(payload.get("measured", ())),
        "host_spread": dict(payload.get("host_spread", {})),
        "visit_spread": dict(payload.get("visit_spread", {})),
        "device": payload.get("device", ""),
        "parts_covariance": tuple(map(tuple, payload.get("parts_covariance", ()))),
    }


def _read_time(values: Mapping[str, Any]) -> StepTime:
    rows, seconds = tuple(values["rows"]), tuple(values["seconds"])
    ascend = all(before < after for before, after in pairwise(rows))
    if not rows or len(rows) != len(seconds) or not ascend:
        raise ValueError(f"no step time: seconds {seconds} of rows {rows}")
    alone = values.get("alone")
    known = {**values, "rows": rows, "seconds": seconds}
    alone = None if alone is None else _read_time(alone)
    return StepTime(**{**known, "alone": alone})


def _read_cost(values: Mapping[str, Any]) -> RoundCost:
    times = {name: _read_time(values[name]) for name in FORWARDS}
    return RoundCost(**{**values, **times})


def _read_step(values: Mapping[str, Any]) -> StepFit:
    return StepFit(
        time=_read_time(values["time"]),
        form=values["form"],
        held_out={form: HeldOut(**error) for form, error in values["held_out"].items()},
        num_shapes=values["num_shapes"],
        most_rows=values.get("most_rows", 0),
        unsure=dict(values.get("unsure", {})),
    )


def _read_calibration(values: Mapping[str, Any]) -> CalibrationFit:
    return CalibrationFit(**{**values, "calibration": Calibration(**values["calibration"])})
