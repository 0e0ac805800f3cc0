"""What a report says, the same in HTML, on the command line and on the dashboard.

Titles and units of figures, numbers as text, and the sentences about a validation. Imports no
torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from codesign.fit.step_pace import step_pace_note
from codesign.validate.comparison import CHECKED

if TYPE_CHECKING:
    from pathlib import Path

    from codesign.fit import Fit
    from codesign.validate.comparison import Comparison, RunComparison, Validation
    from codesign.validate.ranking import Ranking

# Title, unit and factor of each figure that is shown.
SHOWN = {
    "ttft_p50": ("TTFT p50", "ms", 1000.0),
    "ttft_p90": ("TTFT p90", "ms", 1000.0),
    "ttft_p99": ("TTFT p99", "ms", 1000.0),
    "tpot_mean": ("TPOT mean", "ms", 1000.0),
    "tpot_p50": ("TPOT p50", "ms", 1000.0),
    "tpot_p90": ("TPOT p90", "ms", 1000.0),
    "tpot_p99": ("TPOT p99", "ms", 1000.0),
    "throughput": ("throughput", "tokens/s", 1.0),
    "acceptance_length": ("acceptance length", "tokens", 1.0),
    "slo_attainment": ("SLO attainment", "%", 100.0),
    "goodput": ("goodput", "req/s", 1.0),
    "mean_batch": ("batch", "requests", 1.0),
    "target": ("span: target", "ms", 1000.0),
    "draft": ("span: draft", "ms", 1000.0),
    "reroot": ("span: re-root", "ms", 1000.0),
    "link_there": ("span: link there", "ms", 1000.0),
    "link_back": ("span: link back", "ms", 1000.0),
    "seconds": ("round", "ms", 1000.0),
    "prefill": ("prefill before a round", "ms", 1000.0),
    "batch": ("requests in a round", "", 1.0),
    "rows": ("rows verified", "", 1.0),
    "context": ("KV rows of the batch", "", 1.0),
    "num_expansions": ("draft forwards", "", 1.0),
    "draft_rows": ("rows drafted", "", 1.0),
    "num_emitted_tokens": ("tokens emitted", "", 1.0),
}

_LITTLE = 0.002  # of a round


def figure_title(name: str) -> str:
    """A figure with the unit that it is shown in, for example "TTFT p50, ms"."""
    title, unit, _ = SHOWN[name]
    return f"{title}, {unit}" if unit else title


def shown_comparisons(run: RunComparison) -> list[Comparison]:
    """Figures and spans of a run, without spans that are next to nothing on both sides."""
    little = _LITTLE * sum(span.measured for span in run.spans)
    spans = [s for s in run.spans if max(s.predicted.value, s.measured) > little]
    return [*run.figures, *spans]


def error_text(comparison: Comparison) -> str:
    """The relative error with its sign, for example "+3.1 %"."""
    return "-" if comparison.error is None else f"{100 * comparison.error:+.1f} %"


def figure_text(name: str, value: float) -> str:
    """A figure in the unit that it is shown in, without the unit."""
    if not math.isfinite(value):
        return "-"
    shown = SHOWN[name][2] * value
    return f"{shown:,.0f}" if abs(shown) >= 1000 else f"{shown:.3g}"


def verdict(validation: Validation, tolerance: float) -> tuple[bool, str]:
    """Whether every checked figure of every run is within the tolerance, and one sentence."""
    number = len(validation.runs)
    runs = f"{number} run" + ("" if number == 1 else "s")
    if unfinished := validation.unfinished:
        return False, (
            f"{runs}: {len(unfinished)} with requests that did not finish "
            f"({', '.join(run.label for run in unfinished)}), which cannot be compared with a "
            "prediction of a whole run."
        )
    figures = ", ".join(SHOWN[name][0] for name in CHECKED)
    outside = validation.outside(tolerance)
    if not outside:
        return True, f"{runs}: {figures} are all within {tolerance:.0%} of the measurement."
    run, worst = outside[0]
    return False, (
        f"{runs}: {len(outside)} of the figures {figures} are more than {tolerance:.0%} off; the "
        f"worst is {SHOWN[worst.name][0]} of {run.label} ({error_text(worst)})."
    )


def cause(validation: Validation, fit: Fit, fit_file: Path, tolerance: float) -> str:
    """Why times are off, with what to type, where the fit is of a faster or slower machine."""
    runs = validation.of_another_pace(tolerance)
    paces = [(run.candidate.deployment, run.step_pace) for run in runs]
    served = next((run.served for run in runs if run.served), None)
    if served is None:
        return ""
    return step_pace_note(paces, fit, fit_file, served, tolerance=tolerance)


def ranking_text(ranking: Ranking) -> str:
    """One sentence: how many pairs came out in the predicted order, and the choice's regret."""
    apart = ranking.num_pairs - ranking.num_tied
    text = f"{apart - ranking.num_wrong} of {apart} pairs in the predicted order"
    if not apart:
        text = f"all {ranking.num_pairs} pairs too close to predict"
    elif ranking.num_tied:
        text += f", {ranking.num_tied} too close to predict"
    if ranking.correlation is not None:
        text += f", rank correlation {ranking.correlation:.2f}"
    if ranking.regret is not None:
        lost = "is the best measured" if ranking.regret <= 0 else f"loses {ranking.regret:.1%}"
        text += f"; the plan's choice {lost}"
        text += "" if ranking.regret <= 0 else " to the best measured"
    return text
