"""Runs of a plan's candidates: where they lie, and whether they gave the same tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from codesign.candidate import ScoredCandidate
from codesign.errors import counted
from codesign.metrics import Metrics

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One candidate's run on this machine.

    Attributes:
        scored: The candidate and what was predicted for it.
        metrics: What was measured.
        notes: What happened on the way.
        outputs: Emitted tokens by request number.
        directory: Where the records lie.
        refused: Why some requests were not served, by number.
        step_pace: Of the target's steps, as ``codesign.fit.step_pace`` has it; None where unknown.
    """

    scored: ScoredCandidate
    metrics: Metrics
    notes: tuple[str, ...]
    outputs: dict[int, list[int]]
    directory: Path
    refused: dict[int, str]
    step_pace: float | None

    @property
    def is_complete(self) -> bool:
        """Whether every request finished, but for those that were refused."""
        return self.metrics.num_finished + len(self.refused) == self.metrics.num_requests


def run_directories(out: Path, candidates: Sequence[ScoredCandidate]) -> Iterator[Path]:
    """A folder under ``out`` for each candidate, named after it."""
    for scored in candidates:
        yield out / re.sub(r"[^a-z0-9.@+-]+", "_", scored.label.lower())


def differing_requests(runs: Sequence[MeasuredRun]) -> list[int]:
    """Requests whose tokens are not the same in all runs; none when speculation is lossless.

    Requests that a run refused are not compared.
    """
    refused = {request_id for run in runs for request_id in run.refused}
    return [
        request_id
        for request_id, tokens in runs[0].outputs.items()
        if request_id not in refused
        and any(
            not _agree(
                tokens, run.outputs[request_id], whole=runs[0].is_complete and run.is_complete
            )
            for run in runs[1:]
        )
    ]


def agreement(runs: Sequence[MeasuredRun]) -> str:
    """Which requests have the same tokens in all runs, in words.

    A target on another number of GPUs adds its sums in another order, and rounds a choice between
    two tokens that are as likely differently now and then: that is no fault of speculation.
    """
    if not (differing := differing_requests(runs)):
        return "the same tokens in every run"
    groups: dict[int, list[MeasuredRun]] = {}
    for run in runs:
        groups.setdefault(run.scored.candidate.deployment.target_workers, []).append(run)
    within = sorted({i for group in groups.values() for i in differing_requests(group)})
    if within:
        numbers = ", ".join(map(str, within[:_MOST_NAMED])) + ", ..." * (len(within) > _MOST_NAMED)
        count = counted(len(within), "request")
        return (
            f"{count} not alike in runs whose target has as many workers ({numbers}): with "
            "--device cuda forwards of other sizes may round otherwise (--padded-rows)"
        )
    sizes = " and ".join(map(str, sorted(groups)))
    count = f"{counted(len(differing), 'request')} not alike on {sizes} workers"
    if all(len(group) == 1 for group in groups.values()):
        return f"{count}; to compare policies run two on one split, such as plain (--candidate)"
    compared = " and ".join(str(size) for size in sorted(groups) if len(groups[size]) > 1)
    return (
        f"the same tokens in all runs whose target has {compared} workers; {count}, which add "
        "their sums in another order"
    )


def _agree(one: Sequence[int], other: Sequence[int], *, whole: bool) -> bool:
    """Whether two outputs are equal; as far as both go where a run was interrupted."""
    return (len(one) == len(other) or not whole) and all(
        a == b for a, b in zip(one, other, strict=False)
    )
