"""What the parts of the page of policies share: names, and figures as a table shows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.policies.cases import NAMES

DOCS = Path(__file__).parents[2] / "docs"
SERIAL, ASYNC, SPECSERVE = "batch-tree-16x2x8", "async-batch-tree-16x2x8", "specserve-8"
NEEDED = 0.98  # of another policy's speed or goodput: "at most 2 % slower"
MOST_DECIDING = 0.02  # of a round
SMALL = "8B, 1 H200"  # in the price of deciding: whose rounds are the shortest
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
