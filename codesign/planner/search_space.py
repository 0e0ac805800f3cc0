"""The plans that the planner considers: deployments x policies x batch limits.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product

from codesign.config import Deployment
from codesign.errors import InputError
from codesign.plan import Candidate
from codesign.policy.speculation import SpeculationSpec, parse_policy

CHAIN_LENGTHS = (1, 2, 3, 4, 5)
TREE_ROWS = (4, 8, 16)
TREE_WIDTHS = (1, 2, 4)
TREE_EXPANSIONS = (1, 2, 3, 4)
ADAPTIVE_LENGTH = 5  # of threshold and specserve
BATCH_LIMITS = (1, 2, 4, 8)


def default_policies() -> list[SpeculationSpec]:
    """All policies that are tried unless the user restricts them, simple ones first."""
    specs = [SpeculationSpec()]
    specs += [SpeculationSpec(kind="chain", max_depth=depth) for depth in CHAIN_LENGTHS]
    specs += [
        SpeculationSpec(kind="threshold", max_depth=ADAPTIVE_LENGTH),
        SpeculationSpec(kind="specserve", max_depth=ADAPTIVE_LENGTH),
    ]
    shapes = list(product(TREE_ROWS, TREE_WIDTHS, TREE_EXPANSIONS))
    specs += [
        SpeculationSpec(
            kind="tree", is_async=is_async, rows=rows, width=width, expansions=expansions
        )
        for is_async in (False, True)
        for rows, width, expansions in shapes
    ]
    return specs


def splits(workers: int) -> list[Deployment]:
    """All workers in one process, then each split between target and draft."""
    apart = [Deployment(workers - draft, draft) for draft in range(1, workers)]
    return [Deployment(workers), *apart]


def search_space(
    measured: Collection[str],
    *,
    workers: int,
    max_batch: int,
    policies: Sequence[str] = (),
) -> tuple[list[Candidate], list[str]]:
    """Candidates, and a note for each part of the space that is left out.

    Args:
        measured: Labels of the deployments that the fit has step times for.
        workers: Workers of the machine; every candidate uses all of them.
        max_batch: Largest batch limit.
        policies: Labels to restrict the search to; none for ``default_policies``.

    Raises:
        InputError: If a label names no policy, or nothing remains.
    """
    specs = [parse_policy(label) for label in policies] or default_policies()
    limits = [limit for limit in BATCH_LIMITS if limit <= max_batch]
    if max_batch not in limits:
        limits.append(max_batch)
    usable = [d for d in splits(workers) if d.label in measured]
    missing = [d for d in splits(workers) if d.label not in measured]
    candidates = [
        Candidate(deployment, spec, limit)
        for spec in specs
        for deployment in usable
        if (deployment.draft_workers > 0) == spec.is_async
        for limit in limits
    ]
    if not candidates:
        raise InputError(_nothing_remains(measured, workers, specs))
    notes = []
    is_needed = {True: any(s.is_async for s in specs), False: not all(s.is_async for s in specs)}
    missing = [d for d in missing if is_needed[d.draft_workers > 0]]
    if missing:
        notes.append(
            f"not searched, no step times: {_enumerate(d.label for d in missing)}. Add them: "
            f"codesign profile --workers {workers} --out profile, then codesign fit profile"
        )
    if workers == 1 and is_needed[True]:
        notes.append("not searched: asynchronous trees, which need at least 2 workers")
    return candidates, notes


def _nothing_remains(
    measured: Collection[str], workers: int, specs: Sequence[SpeculationSpec]
) -> str:
    labels = _enumerate(measured) or "nothing"
    if any(d.label in measured for d in splits(workers)):
        return (
            f"none of the policies {_enumerate(s.label for s in specs)} runs on what the fit has "
            f"step times for with {workers} workers: {labels}. Restrict --policies less"
        )
    return (
        f"the fit has no step times for {workers} workers, only for {labels}. Measure them: "
        f"codesign profile --workers {workers} --out profile, then codesign fit profile; or plan "
        "for those of the fit: --workers N"
    )


def _enumerate(labels: Iterable[str]) -> str:
    return ", ".join(labels)
