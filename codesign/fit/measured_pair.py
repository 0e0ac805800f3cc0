"""Costs of deployments from what was measured of a pair, if it tells the times of enough of them.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from codesign.config import parse_deployment
from codesign.fit import Fit
from codesign.policy.cost import RoundCost, StepTime

_DOUBLINGS = 12  # of the longest prompt timed, within which knots follow the roofline's parabola


def covering(fit: Fit, priced: Fit) -> Fit | None:
    """A measured fit of a roofline's deployments; None if too few of them were measured."""
    costs, errors = {}, dict(fit.errors)
    is_whole = _tells_all_gpus(
        fit, max(parse_deployment(label).num_workers for label in priced.costs)
    )
    for label in set(priced.costs) & set(fit.costs):
        costs[label] = as_measured(fit, label, priced.costs[label])
    for label in set(priced.costs) - set(costs):
        size = parse_deployment(label)
        sides = _sides(fit, size.target_workers)
        if size.draft_workers or sides is None:
            if is_whole:
                continue
            return None
        costs[label] = joined(costs[sides[0]], costs[sides[1]], priced.costs[label])
        for side, op in zip(sides, ("target", "draft"), strict=True):
            errors[f"{label}/{op}"] = fit.errors[f"{side}/{op}"]
    told = [label for label in priced.costs if label in costs]
    return replace(fit, costs={label: costs[label] for label in told}, errors=errors)


def _tells_all_gpus(fit: Fit, gpus: int) -> bool:
    """Whether so many GPUs were timed as one group, and as two."""
    sizes = [parse_deployment(label) for label in fit.costs]
    return {size.draft_workers > 0 for size in sizes if size.num_workers == gpus} == {False, True}


def with_long_prompts(
    cost: RoundCost, priced: RoundCost, most_rows: Mapping[str, int]
) -> RoundCost:
    """A deployment's cost; beyond the longest prompt timed, rows cost what the roofline says.

    Args:
        cost: As measured.
        priced: The roofline's.
        most_rows: Of the longest prompt timed, of "prefill" and "draft_prefill"; 0 if unknown.
    """

    def longer(op: str, time: StepTime, sheet: StepTime) -> StepTime:
        largest = most_rows[op]
        if not largest:
            return time
        knots = [n for n in (0, *time.rows) if n < largest]
        more = [largest << doubling for doubling in range(_DOUBLINGS)]
        seconds = [time(n) for n in dict.fromkeys(knots)]
        seconds += [time(largest) + sheet(n) - sheet(largest) for n in more]
        rows = (*dict.fromkeys(knots), *more)
        return replace(time, rows=rows, seconds=tuple(seconds), gamma=0.0, cross=sheet.cross)

    return replace(
        cost,
        prefill=longer("prefill", cost.prefill, priced.prefill),
        draft_prefill=longer("draft_prefill", cost.draft_prefill, priced.draft_prefill),
    )


def as_measured(fit: Fit, label: str, priced: RoundCost) -> RoundCost:
    """The cost of a deployment that was measured, with prompts of any length."""
    rows = {op: fit.steps[f"{label}/{op}"].most_rows for op in ("prefill", "draft_prefill")}
    return with_long_prompts(fit.costs[label], priced, rows)


def _sides(fit: Fit, gpus: int) -> tuple[str, str] | None:
    """Splits in which the target, and in which the draft, has so many GPUs."""
    splits = [d for label in fit.costs if (d := parse_deployment(label)).draft_workers]
    target = next((d.label for d in splits if d.target_workers == gpus), None)
    draft = next((d.label for d in splits if d.draft_workers == gpus), None)
    return None if target is None or draft is None else (target, draft)


def joined(target: RoundCost, draft: RoundCost, priced: RoundCost) -> RoundCost:
    """Both models in turn on GPUs that each was timed on alone; what fits is arithmetic."""
    return replace(
        target,
        draft=draft.draft,
        draft_prefill=draft.draft_prefill,
        link=0.0,
        link_each=0.0,
        choice_alone=draft.first_alone,
        first_alone=0.0,
        slowdown=0.0,
        reroot_node=0.0,  # of trees that are kept
        child=draft.child,
        kv_tokens=priced.kv_tokens,
        plain_kv_tokens=priced.plain_kv_tokens,
    )
