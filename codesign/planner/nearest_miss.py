"""What to say when nothing meets the SLO: the nearest plan, what binds, and what would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count

import pandas as pd

from codesign import Progress
from codesign.candidate import Candidate
from codesign.config import SLO
from codesign.planner.explanation import milliseconds
from codesign.planner.predict import Outcome, misses
from codesign.planner.ranking import Entry
from codesign.slo_figure import slo_figure

# Simulates candidates, each with the arrival rate times a factor; outcomes by seed of each.
AtRates = Callable[[Sequence[tuple[Candidate, float]]], list[list[Outcome]]]

Steps = Callable[[int, int], None]  # told how many are done, of how many

_NUM_NEAREST = 3  # candidates whose sustainable rate is looked for
_MAX_HALVINGS = 10  # of the rate, until the machine counts as idle
_NUM_BISECTIONS = 4
_MANY_TOGETHER = 0.1  # of the requests
_MANY_TIMES = 3.0  # from where on a miss is said as a factor
_TOO_MANY_TIMES = 1e6  # and from where on as none


def nearest_miss(
    ordered: Sequence[Entry],
    slo: SLO,
    simulate: AtRates,
    simulate_all: AtRates | None = None,
    progress: Progress | None = None,
    *,
    rate_scale: float = 1.0,
    has_own: bool = False,
    together: int = 1,
) -> str:
    """One line: which candidate comes nearest, what binds, what would fit.

    Args:
        ordered: What was simulated, best first; nothing meets the SLO.
        slo: Targets.
        simulate: Outcomes at other arrival rates.
        simulate_all: The same on the whole trace, where ``simulate`` takes a stretch of it.
        progress: Called with ("nearest miss", done, total), in rates tried, and with another stage
            where rates must be tried on the whole trace.
        rate_scale: See ``Question``.
        has_own: Requests have TPOT targets of their own.
        together: Requests that arrive at the same moment, at most, if many do; else 1.
    """
    nearest = min(ordered, key=lambda entry: entry.miss)
    by_target = misses(nearest.outcomes, slo)
    target = max(by_target, key=by_target.__getitem__)
    line = (
        f"none of {len(ordered)} simulated plans meets the SLO. Nearest miss: "
        f"{nearest.candidate.label}: "
        f"{_shown(target, slo, by_target[target], has_own=has_own)}"
    )
    entries = _likely(nearest, ordered, slo)
    steps = progress and partial(progress, "nearest miss")
    rates = sustained_rates([entry.candidate for entry in entries], slo, simulate, steps)
    best = max(range(len(rates)), key=rates.__getitem__)
    rate = rates[best]
    if simulate_all is not None:
        simulate = simulate_all
        steps = progress and partial(progress, "nearest miss on all requests")
        rate = _confirmed(entries[best].candidate, rate, slo, simulate, steps)
    names = ["it" if entry is nearest else entry.candidate.label for entry in entries]
    if rate > 0:
        return f"{line}. {_at_rate(rate, names[best], rate_scale)}"
    idle_rate = 0.5**_MAX_HALVINGS
    outcomes = simulate([(entry.candidate, idle_rate) for entry in entries])
    idle = [misses(found, slo) for found in outcomes]
    least = min(range(len(idle)), key=lambda index: max(idle[index].values()))
    if max(idle[least].values()) <= 1:  # on the whole trace, where the plan above did not
        return f"{line}. {_at_rate(idle_rate, names[least], rate_scale)}"
    flags = _flags(idle[least], slo, has_own=has_own)
    return f"{line}. {_when_idle(flags, names[least], together)}"


def arriving_together(requests: pd.DataFrame) -> int:
    """Requests that arrive at one moment, at most; 1 if few share theirs with another."""
    counts = requests["arrival"].value_counts()
    sharing = int(counts[counts > 1].sum())
    return int(counts.max()) if sharing > _MANY_TOGETHER * len(requests) else 1


def _at_rate(rate: float, name: str, rate_scale: float) -> str:
    scale = f"{rate * rate_scale:.6g}"
    return f"At {rate:.2g} times this arrival rate {name} meets the SLO: --rate-scale {scale}"


def _flags(missed: Mapping[str, float], slo: SLO, *, has_own: bool) -> str:
    """What would be met at these ratios to the targets; "" if some figure has none."""
    flags = [
        f"--slo-{target}-ms {math.ceil(1050 * ratio * (getattr(slo, target) or 0.0))}"
        for target, ratio in missed.items()
        if 1 < ratio < math.inf and not (has_own and target == "tpot")
    ]
    if has_own and 1 < missed.get("tpot", 0.0) < math.inf:
        times = f"{1.05 * missed['tpot']:,.3g} times the TPOT targets"
        flags.append(f"{times} (slo_tpot in the trace, --slo-tpot-ms of others)")
    return " and ".join(flags) if has_own else " ".join(flags)


def _when_idle(flags: str, name: str, together: int) -> str:
    """What would fit where no rate helps: not one request at a time, or all that arrive at once."""
    if together > 1:
        meets = f"; so {name} would meet {flags}" if flags else ""
        return (
            f"No arrival rate helps, as up to {together:,} requests arrive at the same moment"
            f"{meets}. --jitter SEED spreads them"
        )
    if not flags:
        return "An idle machine never reaches it. Shorter answers may: --max-output N"
    return f"An idle machine misses it too: idle, {name} would meet {flags}"


def _likely(nearest: Entry, ordered: Sequence[Entry], slo: SLO) -> list[Entry]:
    """Those that may come nearest at other loads: the first few, and each target's best.

    Under a queue plans with the most throughput come first, without one those with short rounds.
    """
    missed = [(misses(entry.outcomes, slo), entry) for entry in ordered]
    best = [
        min(missed, key=lambda pair: pair[0][name])[1] for name in misses(nearest.outcomes, slo)
    ]
    first = (nearest, *ordered[:_NUM_NEAREST], *best)
    return list({entry.candidate.label: entry for entry in first}.values())


def _confirmed(
    candidate: Candidate, rate: float, slo: SLO, simulate: AtRates, steps: Steps | None
) -> float:
    """A rate found on a stretch of the trace if it holds on all of it, else the one that does."""
    if rate and max(misses(simulate([(candidate, rate)])[0], slo).values()) <= 1:
        return rate
    return sustained_rates([candidate], slo, simulate, steps)[0]


def sustained_rates(
    candidates: Sequence[Candidate], slo: SLO, simulate: AtRates, steps: Steps | None = None
) -> list[float]:
    """Largest share of the trace's rate at which each candidate meets the SLO, 0 if none.

    Only rates of two digits are tried: what is printed has been simulated.

    Args:
        candidates: Which do not meet the SLO at the trace's own rate.
        slo: Targets.
        simulate: Outcomes of each candidate with the trace at that share of its rate.
        steps: Called with (done, total), in rates tried of each.
    """
    tried = count(1)

    def fit(rates: Sequence[tuple[int, float]]) -> list[bool]:
        simulated = simulate([(candidates[index], rate) for index, rate in rates])
        if steps:
            steps(next(tried), _MAX_HALVINGS + _NUM_BISECTIONS)
        return [max(misses(outcomes, slo).values()) <= 1 for outcomes in simulated]

    low = dict.fromkeys(range(len(candidates)), 0.0)
    for halving in range(1, _MAX_HALVINGS + 1):
        open_ones = [(i, _rounded_down(0.5**halving)) for i, rate in low.items() if not rate]
        for (index, rate), fits in zip(open_ones, fit(open_ones), strict=True):
            low[index] = rate if fits else 0.0
    high = {index: 2 * rate for index, rate in low.items() if rate}
    for _ in range(_NUM_BISECTIONS):
        middle = [(i, _rounded_down((low[i] + high[i]) / 2)) for i in high]
        for (index, rate), fits in zip(middle, fit(middle), strict=True):
            low[index], high[index] = (rate, high[index]) if fits else (low[index], rate)
    return list(low.values())


def _rounded_down(rate: float) -> float:
    """To two digits."""
    if rate <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return math.floor(rate / step) * step


def _shown(target: str, slo: SLO, ratio: float, *, has_own: bool) -> str:
    limit, figure = getattr(slo, target), slo_figure(target, slo, has_own=has_own)
    name = figure.title
    if figure.unit == "%":
        return f"{name} is {f'{ratio:.0%}' if ratio < _TOO_MANY_TIMES else 'far beyond 100%'}"
    if not math.isfinite(ratio):
        return f"{name} is never reached, target {milliseconds(limit)}"
    over = f"{ratio - 1:.0%} over"
    if ratio >= _MANY_TIMES:
        over = f"{ratio:,.1f} times that" if ratio < _TOO_MANY_TIMES else "far beyond"
    return f"{name} {milliseconds(limit * ratio)}, target {milliseconds(limit)} ({over})"
