"""What the parts of the page of policies share: names, and figures as a table shows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.policies.cases import NAMES

DOCS = Path(__file__).parents[2] / "docs"
SERIAL, ASYNC, SPECSERVE = "batch-tree-16x2x8", "async-batch-tree-16x2x8", "specserve-8"
# Evaluating with an 8B on one H200, by its shipped fit: us and ms of a round of one request, and
# percent on average over rounds. On one core of an EPYC, 25 November 2026.
EVALUATING_8B = 287, 2.8, 7
Results = Mapping[str, Mapping[str, Any]]


def name_of(policy: str) -> str:
    """As the tables show it."""
    return NAMES.get(policy, policy)


def below(results: Results, prefix: str) -> dict[str, Mapping[str, Any]]:
    """Results below a prefix, by what is left of the key."""
    return {
        key.removeprefix(f"{prefix}/"): value
        for key, value in results.items()
        if key.startswith(f"{prefix}/")
    }


def in_ms(value: float | None) -> str:
    """Seconds as milliseconds; "-" for none."""
    return "-" if value is None else f"{1e3 * value:,.3g}" if value < 1 else f"{1e3 * value:,.0f}"
