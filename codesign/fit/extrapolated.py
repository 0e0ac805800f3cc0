"""Step times of a measured pair on more GPUs than it was measured on.

A forward on so many GPUs takes what it took on the largest group measured that has no more of
them, times what a line says of both sizes. The line is the roofline's (roofline.py), in the number
of GPUs: fixed seconds, what one GPU reads and computes by its data sheet, and seconds for each peer
in an all-reduce. Its three coefficients are the engine's own, fitted to the sizes measured: for
each model, and for prompts apart. Groups among which heads cannot be shared evenly take longer than
the line says, by as much as those measured do. What else a round takes is that of the nearest
deployment. docs/planner.md has the errors of this and of other ways. No line knows that a group
may cross hosts (``across_hosts``).

Letters in shapes: S sizes of groups, P coefficients. Must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import numpy as np

from codesign.candidate import SIGMAS
from codesign.config import Deployment, parse_deployment
from codesign.errors import counted
from codesign.fit import DRAFTS, EXTRAPOLATED, MEDIAN_ERROR, ROOFLINE, Fit, gpus_of
from codesign.fit.least_squares import Floats
from codesign.fit.measured_pair import as_measured, with_long_prompts
from codesign.fit.priced_model import PricedModel
from codesign.fit.roofline import Forward, Software
from codesign.policy.cost import RoundCost, StepTime

Shape = tuple[int, int, int]  # rows, context, requests

# Of one request, whose timings scatter least from fit to fit; batches are only judged by.
STEPS: tuple[Shape, ...] = ((1, 500, 1), (4, 1000, 1), (8, 1000, 1), (16, 1000, 1), (32, 1000, 1))
BATCHES: tuple[Shape, ...] = ((16, 4000, 4), (64, 8000, 8))
PROMPTS: tuple[Shape, ...] = ((256, 0, 1), (1000, 0, 1), (2000, 0, 1))
_OPS = {"target": STEPS, "draft": STEPS, "prefill": PROMPTS, "draft_prefill": PROMPTS}
BARE = Software(  # what is shared out, and nothing else
    layer=0.0, all_reduce={"nvlink": 0.0, "pcie": 0.0}, peer=0.0
)
AT_MEDIAN = MEDIAN_ERROR / SIGMAS  # of errors, over half of the interval that holds 90 % of them
HOST_GPUS = 8  # whose links are as fast as those of the groups measured
_WITH_PEERS = 3  # sizes from which on a peer's seconds can be told from fixed ones


@dataclass(frozen=True, slots=True)
class SizeLine:
    """How the seconds of one kind of forward follow from the number of GPUs.

    Attributes:
        times: As measured, by number of GPUs.
        forward: The model by data sheet; the number of GPUs in it does not count.
        shapes: Forwards that the line is fitted to, by the mean of their logarithms.
    """

    times: Mapping[int, StepTime]
    forward: Forward
    shapes: Sequence[Shape]

    def ratio(self, gpus: int, base: int, *, most: int | None = None) -> float:
        """Seconds on so many GPUs over those on ``base``.

        Args:
            gpus: How many.
            base: Others.
            most: GPUs of the largest group that the line is fitted to; None for all.
        """
        sizes = [size for size in self._even if most is None or size <= most]
        num_terms = 3 if len(sizes) >= _WITH_PEERS else 2
        seconds_S = np.array([self._mean_seconds(size) for size in sizes])
        design_SP = np.array([self._terms(size)[:num_terms] for size in sizes])
        line_P = _non_negative(design_SP / seconds_S[:, None], np.ones(len(sizes)))
        return self._told(gpus, line_P) / self._told(base, line_P)

    @property
    def left_out_error(self) -> float | None:
        """Largest error of the largest group's forwards, told from groups of half as many GPUs.

        None where fewer than two are that small.
        """
        most = max(self._even, default=0)
        halves = [size for size in self._even if 2 * size <= most]
        if len(halves) < 2:
            return None
        base = max(halves)
        ratio = self.ratio(most, base, most=base)
        judged = self.shapes if self.shapes is PROMPTS else (*self.shapes, *BATCHES)
        told = [ratio * self.times[base](*s) / self.times[most](*s) for s in judged]
        return max(abs(each - 1.0) for each in told)

    @property
    def _even(self) -> list[int]:
        return [size for size in self.times if self._is_even(size)]

    def _is_even(self, gpus: int) -> bool:
        """Whether each GPU has as many heads, and key-value heads unless as many GPUs share one."""
        shape = self.forward.model.shape
        shared = shape.kv_heads % gpus == 0 or gpus % shape.kv_heads == 0
        return shared and shape.heads % gpus == 0

    def _told(self, gpus: int, line_P: Floats) -> float:
        """What the line says; uneven shares take as much longer as those measured do."""
        seconds = float(line_P @ self._terms(gpus)[: len(line_P)])
        if self._is_even(gpus):
            return seconds
        uneven = [size for size in self.times if not self._is_even(size)]
        longer = [
            self._mean_seconds(size) / float(line_P @ self._terms(size)[: len(line_P)])
            for size in uneven
        ]
        return seconds * max(1.0, float(np.mean(longer or [1.0])))

    def _mean_seconds(self, size: int) -> float:
        return math.exp(float(np.mean([math.log(self.times[size](*s)) for s in self.shapes])))

    def _terms(self, gpus: int) -> Floats:
        """(P,) what each coefficient is multiplied by."""
        one = replace(self.forward, gpus=gpus)
        time = one.prefill if self.shapes is PROMPTS else one.decode
        work = float(np.mean([time(rows, context) for rows, context, _ in self.shapes]))
        return np.array([1.0, work, gpus - 1.0])


def _non_negative(design_SP: Floats, seconds_S: Floats) -> Floats:
    """(P,) coefficients of least squares, none below 0: of two or three, without scipy."""
    num = design_SP.shape[1]
    best_P, least = np.zeros(num), math.inf
    for kept in (list(c) for size in range(1, num + 1) for c in combinations(range(num), size)):
        found = np.linalg.lstsq(design_SP[:, kept], seconds_S, rcond=None)[0]
        miss = float(np.linalg.norm(design_SP[:, kept] @ found - seconds_S))
        if (found >= 0.0).all() and miss < least:
            best_P, least = np.zeros(num), miss
            best_P[kept] = found
    return best_P


def extrapolated_fit(fit: Fit, priced: Fit, target: Forward, draft: PricedModel) -> Fit | None:
    """The fit of all that a roofline prices, from a pair that was measured on fewer GPUs.

    What was measured is kept. Errors of all else are those of what it is told from and, by
    squares, what the line was off when the largest group was left out, for each doubling of the
    GPUs and at least once.

    Args:
        fit: Of the pair, as measured.
        priced: Its roofline: what deployments there are, what fits their memory.
        target: By data sheet, on whatever number of GPUs.
        draft: The other model, on the same device.

    Returns:
        None if too few sizes were measured.
    """
    bare = replace(target, software=BARE)
    lines = {
        op: SizeLine(_times(fit, op), replace(bare, model=draft) if op in DRAFTS else bare, shapes)
        for op, shapes in _OPS.items()
    }
    left_out = {op: line.left_out_error for op, line in lines.items()}
    found = {op: error for op, error in left_out.items() if error is not None}
    if len(found) < len(_OPS):
        return None
    costs, errors = {}, dict(fit.errors)
    ratio = cache(lambda op, gpus, base: lines[op].ratio(gpus, base))  # of many deployments
    for label, sheet in priced.costs.items():
        if label in fit.costs:
            costs[label] = as_measured(fit, label, sheet)
            continue
        sources = {op: _source(fit, op, label) for op in _OPS}
        costs[label] = _cost(fit, label, sheet, ratio, sources)
        for op, source in sources.items():
            far = max(abs(math.log2(gpus_of(op, label) / gpus_of(op, source))), 1.0)
            # The largest error: half of an interval, as an error that half of all errors exceed.
            more = far * found[op] * AT_MEDIAN if gpus_of(op, label) != gpus_of(op, source) else 0.0
            errors[f"{label}/{op}"] = math.hypot(fit.errors[f"{source}/{op}"], more)
    return replace(fit, costs=costs, errors=errors, origin=EXTRAPOLATED)


def most_measured(fit: Fit) -> int:
    """GPUs of the largest deployment whose forwards were measured."""
    return max(_workers(name.partition("/")[0]) for name in fit.steps)


def extent(fit: Fit) -> str:
    """What an extrapolated fit rests on, in words."""
    most = counted(most_measured(fit), "GPU")
    return f"measured on up to {most}, other groups extrapolated by data sheets"


def origin_text(fit: Fit, origin: str) -> str:
    """Where step times come from, in words: those of a fit, or of a deployment (``origin_of``)."""
    if origin == EXTRAPOLATED:
        return extent(fit)
    if origin == ROOFLINE:
        return "roofline (data sheets, not measured)"
    return "fitted to measurements"


def across_hosts(fit: Fit, deployment: Deployment) -> str:
    """One line if extrapolated groups do not fit into one host, of which no line knows; else ""."""
    sizes = deployment.target_workers, deployment.draft_workers, deployment.prefill_workers
    if fit.origin_of(deployment) != EXTRAPOLATED or max(sizes) <= HOST_GPUS:
        return ""
    return (
        f"a group of {max(sizes)} GPUs crosses hosts of {HOST_GPUS}; its steps are extrapolated "
        "from groups within one host, whose links are faster, so they may take longer"
    )


def _cost(
    fit: Fit,
    label: str,
    sheet: RoundCost,
    ratio: Callable[[str, int, int], float],
    sources: Mapping[str, str],
) -> RoundCost:
    """Each forward of its source, scaled; messages and the host's part of the nearest like it."""

    def scaled(op: str) -> StepTime:
        time: StepTime = getattr(fit.costs[sources[op]], op)
        gpus, base = gpus_of(op, label), gpus_of(op, sources[op])
        return time if gpus == base else time.scaled(ratio(op, gpus, base))

    rows = {op: fit.steps[f"{sources[op]}/{op}"].most_rows for op in ("prefill", "draft_prefill")}
    cost = replace(
        fit.costs[_alike(fit, label)],
        target=scaled("target"),
        draft=scaled("draft"),
        prefill=scaled("prefill"),
        draft_prefill=scaled("draft_prefill"),
        kv_tokens=sheet.kv_tokens,
        plain_kv_tokens=sheet.plain_kv_tokens,
    )
    return with_long_prompts(cost, sheet, rows)


def _times(fit: Fit, op: str) -> dict[int, StepTime]:
    """By number of GPUs, of one group where both were measured."""
    sizes = sorted({gpus_of(op, label) for label in fit.costs})
    return {size: getattr(fit.costs[_source(fit, op, str(size))], op) for size in sizes}


def _source(fit: Fit, op: str, label: str) -> str:
    """What was measured of a model on the most GPUs, no more than here; of the same kind if so."""
    wanted = gpus_of(op, label)
    sizes = {known: gpus_of(op, known) for known in fit.costs}
    most = max((size for size in sizes.values() if size <= wanted), default=min(sizes.values()))
    same = [known for known in fit.costs if sizes[known] == most]
    return max(same, key=lambda known: (_is_apart(known) == _is_apart(label), _workers(known)))


def _alike(fit: Fit, label: str) -> str:
    """The measured deployment of the same kind whose target has as many GPUs, or the next fewer."""
    wanted = gpus_of("target", label)
    return max(
        fit.costs,
        key=lambda known: (
            _is_apart(known) == _is_apart(label),
            gpus_of("target", known) <= wanted,
            -abs(gpus_of("target", known) - wanted),
            _workers(known),
        ),
    )


def _is_apart(label: str) -> bool:
    return parse_deployment(label).draft_workers > 0


def _workers(label: str) -> int:
    return parse_deployment(label).num_workers
