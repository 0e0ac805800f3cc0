"""How figures at the SLO's percentile (``metrics.slo_values``), and attainment, are told to people.

A TPOT in milliseconds, unless requests have targets of their own: then what is held to the SLO is
each TPOT over its request's target, and "TPOT p90" remains the name of plain milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from codesign.config import SLO


@dataclass(frozen=True, slots=True)
class SloFigure:
    """One figure at the percentile.

    Attributes:
        title: With the percentile.
        factor: From seconds to ``unit``.
        unit: "ms", or "%" of each request's own target.
        explanation: In a sentence.
    """

    title: str
    factor: float
    unit: str
    explanation: str


_OWN = (
    "Time per later token over the request's own target, at the SLO's percentile; 100 % just meets "
    "it. A request without one is held to the common target."
)
_EXPLANATIONS = {
    "ttft": "Arrival to first token, at the SLO's percentile.",
    "tpot": "Time per later token, at the SLO's percentile.",
}


def in_slo_text(slo: SLO) -> str:
    """Why fewer requests than the percentile may be in an SLO that is met."""
    return (
        f"requests within every target at once; p{slo.percentile:g} is asked of each target by "
        "itself, on average over simulations, so the SLO may be met with fewer"
    )


def slo_figure(name: str, slo: SLO, *, has_own: bool) -> SloFigure:
    """How "ttft" or "tpot" is told.

    Args:
        name: Which of them.
        slo: Targets.
        has_own: Requests have TPOT targets of their own.
    """
    place = f"p{slo.percentile:g}"
    if name == "tpot" and has_own and slo.tpot is not None:
        return SloFigure(f"TPOT / target {place}", 100.0 / slo.tpot, "%", _OWN)
    return SloFigure(f"{name.upper()} {place}", 1000.0, "ms", _EXPLANATIONS[name])
