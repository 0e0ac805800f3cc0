"""All pairs of a machine together: single pairs have few runs and one draw of prompts each.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.campaign.goals import (
    Result,
    coverage,
    length_error,
    mean_error,
    span_error,
    table,
    worst_error,
)
from codesign.records import SPANS


def together(results: Sequence[Result]) -> str:
    """The goals that are means over runs or shares of them, over all pairs of a machine."""
    merged = [_merged(machine, results) for machine in dict.fromkeys(r.machine for r in results)]
    rows = [
        ["decode speed, one stream, mean error", "3 %", *map(mean_error, merged)],
        ["the same, worst", "8 %", *map(worst_error, merged)],
        ["streams", "", *(str(len(result.runs("stream"))) for result in merged)],
        ["acceptance length, mean error", "3 %", *map(length_error, merged)],
        *(
            [f"span: {span}, mean error", "10 %", *(span_error(r, span) for r in merged)]
            for span in SPANS[:3]
        ),
        ["coverage of 80 % intervals", "70 to 90 %", *map(coverage, merged)],
    ]
    heads = ["all pairs together", "goal", *(result.machine for result in merged)]
    return table(heads, rows)


def _merged(machine: str, results: Sequence[Result]) -> Result:
    runs = [run for result in results if result.machine == machine for run in result.runs()]
    return Result(machine, {"pair": "all pairs", "runs": runs})
