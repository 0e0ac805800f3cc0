"""Acceptance measured elsewhere, as a fit that the planner and the simulator read.

A server's summary says how often its chains were accepted. What it cannot say is filled in, and
the fit says so: hits come in runs (``run_model``); ranks beyond the first, and confidences, are
those of recorded tokens that were, or were not, the first choice; requests do not differ from each
other. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from codesign.candidate import SIGMAS
from codesign.fit.calibration import fit_calibration
from codesign.importers.readers import read_summary
from codesign.importers.run_model import RunModel, template_shape
from codesign.importers.summary import AcceptanceSummary

if TYPE_CHECKING:
    from codesign.fit import Fit

# How far the run model was off, at most, on chains of another length than it was made from.
_MODEL_ERROR = 0.02
_UNKNOWN_ERROR = 0.03  # of a mean of a few hundred rounds; who gives only the mean says no better
_SEED = 0

__all__ = ["AcceptanceSummary", "agreement_model", "imported_fit", "read_summary"]


def imported_fit(steps: Fit, summary: AcceptanceSummary) -> Fit:
    """The step times of a fit with the acceptance of a summary.

    Raises:
        InputError: If the summary contradicts itself, or the fit's recordings are too few.
    """
    model = agreement_model(steps, summary)
    acceptance = model.recordings(steps.acceptance, seed=_SEED)
    calibration = fit_calibration(acceptance)
    sampling = _UNKNOWN_ERROR if summary.error is None else summary.error
    return replace(
        steps,
        acceptance=acceptance,
        calibration=calibration.calibration,
        calibration_fit=calibration,
        errors={**steps.errors, "acceptance": math.hypot(SIGMAS * sampling, _MODEL_ERROR)},
        acceptance_origin=f"imported from {summary.source}",
        parts_covariance=(),
    )


def agreement_model(steps: Fit, summary: AcceptanceSummary) -> RunModel:
    """The model of agreement that a summary determines; a mean alone takes the fit's shape."""
    # One position says nothing about runs either.
    if summary.survival is None or summary.chain == 1:
        shape = template_shape(steps.acceptance, max(summary.chain, 3))
        return RunModel.from_length(summary.length, chain=summary.chain, shape=shape)
    return RunModel.from_survival(summary.survival)
