"""How long sessions of a campaign took, as docs/validation-runs.md says it. Imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.campaign.goals import WIDTH, Result, signed, table

_PHASES = ("start", "profile", "acceptance", "check", "runs")


def seconds_table(results: Sequence[Result]) -> str:
    """How long each session took."""
    rows = [
        [result.name, each["label"], *(_seconds(each.get(name)) for name in _PHASES),
         f"{each['served']}, cut in {each['cut']}" if "cut" in each else str(each["served"])]
        for result in results
        for each in result.pair["sessions"]
    ]  # fmt: skip
    if not rows:
        return ""
    heads = ["pair", "GPUs", *_PHASES, "number of runs"]
    needed = [f"{_to_profile(r):.0f} s of {r.name}" for r in results if r.pair["sessions"]]
    text = f"All of a pair but its runs takes {', '.join(needed)}."
    text = f"{text}{_changes(results)}"
    return f"## Seconds on the machine\n\n{table(heads, rows)}\n{textwrap.fill(text, WIDTH)}\n"


def _changes(results: Sequence[Result]) -> str:
    """How the host's pace was after the runs, where it was looked at."""
    found = [
        f"{signed(each['changed'])} of {result.name} on {each['label']}"
        for result in results
        for each in result.pair["sessions"]
        if each.get("changed") is not None
    ]
    if not found:
        return ""
    return f" Small steps timed again after the runs, relative to the profile: {', '.join(found)}."


def _to_profile(result: Result) -> float:
    phases = [name for name in _PHASES if name != "runs"]
    first = [each for each in result.pair["sessions"] if each.get("profile")]  # others serve more
    return sum(each.get(name) or 0.0 for each in first for name in phases)


def _seconds(value: float | None) -> str:
    return f"{value:.1f}" if value else ""
