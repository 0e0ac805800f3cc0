"""docs/file-formats.md against the code: a field that is written has its name on the page."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from codesign.artifacts import header
from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.config import SLO, Deployment, Serving
from codesign.file_ref import FileRef
from codesign.fit import STEP_COLUMNS, Fit
from codesign.fit.calibration import CalibrationFit
from codesign.fit.drift import VISIT
from codesign.fit.round_costs import NODES
from codesign.fit.steps import HeldOut, StepFit
from codesign.metrics import Metrics
from codesign.plan import Economics, Plan
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.walk import Sampling
from codesign.records import RequestRecord, RoundRecord

PAGE = (Path(__file__).parents[2] / "docs" / "file-formats.md").read_text(encoding="utf-8")
WRITTEN = {
    "Fit": (Fit, RoundCost, StepTime, StepFit, HeldOut, Calibration, CalibrationFit),
    "Plan": (
        Plan, FileRef, SLO, Serving, Sampling, Economics, ScoredCandidate, Interval, Candidate,
        Deployment,
    ),
    "Run directory": (RequestRecord, RoundRecord, Metrics),
}  # fmt: skip


def names_in(section: str) -> set[str]:
    text = re.search(rf"^## {section} .*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert text, section
    return set(re.findall(r"`(\w+)`", text[0]))


@pytest.mark.parametrize("section", WRITTEN)
def test_every_field_that_is_written_is_on_the_page(section):
    known = names_in(section)
    for cls in WRITTEN[section]:
        assert {field.name for field in fields(cls)} - {"seed"} <= known, cls.__name__


def test_the_header_and_the_columns_of_timings_are_on_the_page():
    assert set(header("fit", seed=None)) <= set(re.findall(r"`(\w+)`", PAGE.split("## ")[0]))
    assert {*STEP_COLUMNS, NODES, VISIT} <= names_in("Profile")
