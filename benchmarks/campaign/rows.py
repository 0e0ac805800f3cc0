"""Rows of the tables of goals: what a row is called and asks for, the same for pairs and together.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.campaign.goals import (
    COVERAGE,
    LENGTH,
    REPLAY,
    SPAN,
    SPEED,
    WORST_SPEED,
    Result,
    between,
    percent,
    table,
)

# Label and goal as text.
SPEED_HEAD = "decode speed, one stream, mean error", percent(SPEED, 0)
WORST_HEAD = "the same, worst", percent(WORST_SPEED, 0)
LENGTH_HEAD = "acceptance length, mean error", percent(LENGTH, 0)
COVERAGE_HEAD = "coverage of 80 % intervals", between(COVERAGE)


def span_head(span: str) -> tuple[str, str]:
    """Label and goal of a span's error."""
    return f"span: {span.replace('_', ' ')}, mean error", percent(SPAN, 0)


def replay_head(name: str) -> tuple[str, str]:
    """Label and goal of the error of a replay's figure."""
    return f"replay: {name.replace('_', ' ').upper()}, worst error", percent(REPLAY, 0)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    Attributes:
        label: What it is.
        goal: As text; "" without one.
        cell: Of one result; "-" where nothing tells it.
        is_optional: Left out where nothing tells it of any result.
    """

    label: str
    goal: str
    cell: Callable[[Result], str]
    is_optional: bool = False

    def of(self, results: Sequence[Result]) -> list[str]:
        """Its texts."""
        return [self.label, self.goal, *map(self.cell, results)]


def table_of(rows: Iterable[Row], results: Sequence[Result], heads: Sequence[str]) -> str:
    """A table with a column for each result.

    Args:
        rows: In this order.
        results: In this order.
        heads: Of the label, of the goal, and of each result.
    """
    texts = [(row, row.of(results)) for row in rows]
    kept = [text for row, text in texts if not row.is_optional or set(text[2:]) - {"-"}]
    return table(heads, kept)
