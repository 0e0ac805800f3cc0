"""Words about a plan's economics: whether speculation pays, how much, and up to which load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from codesign.errors import counted

if TYPE_CHECKING:
    from collections.abc import Collection

    from codesign.plan import Economics, Plan

_LITTLE_GAIN = 0.05  # in decoding speed: what a good prediction may be off


def pays_text(plan: Plan) -> str:
    """Whether speculation pays, up to which load, from which acceptance on, and how far it could.

    One sentence each, with which of the compared plans misses the SLO; "" if the plan does not
    know.
    """
    if plan.economics is None:
        return ""
    missing = {scored.label for scored in plan.scored if not scored.is_feasible}
    return _economics_text(plan.economics, missing, _error_of(plan, plan.economics.speculative))


def _error_of(plan: Plan, label: str) -> float:
    """By what share the mean TPOT of a plan may be off; 0 if nobody knows."""
    tpot = next((s.predicted.get("tpot_mean") for s in plan.scored if s.label == label), None)
    return (tpot.high - tpot.low) / (2 * tpot.value) if tpot and tpot.value > 0 else 0.0


def _economics_text(economics: Economics, missing: Collection[str], error: float) -> str:

    def told(label: str) -> str:
        name = label.rpartition(", ")[0]  # it decodes alike at any batch limit
        return f"{name} (misses the SLO)" if label in missing else name

    word = "faster" if economics.gain >= 1 else "slower"
    ratio = economics.gain if economics.gain >= 1 else 1 / economics.gain
    load = f"{told(economics.speculative)} {_up_to(economics, error)}"
    if economics.lasting:
        load += f"; {told(economics.lasting)} up to {economics.lasting_crossover:,}"
    rate = economics.break_even_rate
    subject = economics.speculative.rpartition(", ")[0] if economics.lasting else "it"
    chance = "" if rate is None else f" (each draft token accepted with {rate:.0%})"
    off = f", less than the prediction may be off ({error:.0%})" if ratio - 1 < error else ""
    return (
        f"{load}. With {economics.batch:.3g} running on each, prompts not counted, {subject} "
        f"decodes {ratio:.3g} times {word} than {told(economics.null_plan)}{off}; it breaks even "
        f"at {economics.break_even_length:.2f} tokens per round{chance} and emits "
        f"{economics.acceptance_length:.2f}; perfect knowledge of which tokens will be accepted "
        f"would make it {economics.oracle_gain:.3g} times"
    )


def _up_to(economics: Economics, error: float) -> str:
    """Whether a plan pays, up to which load: a small gain, or one that may be none, by name."""
    if economics.crossover == 0:
        return "pays at no load"
    verb = "pays"
    if 1 <= economics.gain < 1 + max(error, _LITTLE_GAIN):
        verb = "hardly pays," if economics.gain < 1 + _LITTLE_GAIN else "may pay"
    if economics.crossover is None:
        most = counted(economics.largest_batch, "running request")
        return f"{verb} up to {most}, the most that can run at any batch limit"
    return f"{verb} up to {counted(economics.crossover, 'running request')}, not above"
