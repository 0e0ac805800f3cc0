"""Many requests at once on four GPUs, simulated: does drafting cost speed while a batch fills?

    python -m benchmarks.compare_policies crowds

As pairs.py, with the shipped fits' steps of four H200s, more requests at once and three acceptance
seeds. Nobody is there at first; at a load above 1 the batch grows to its limit, and more and more
wait. Drafting that pays in passing has prompts read that are never repaid in the full batch. The
rules about it were tuned with 24 at once; of the other limits, which serve more requests of each
trace, some of the lowest speeds were looked at when a prompt's return was last set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.pages import markdown
from benchmarks.policies.cases import SEGMENTS
from benchmarks.policies.figures import NEEDED, SERIAL, SPECSERVE, Results, below
from benchmarks.policies.pairs import requests_at, simulated
from benchmarks.policies.segments import target_of
from benchmarks.policies.splits import LEAST_IN_SLO, WHOLE, sizes_of
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT

PAIRS = (
    "llama-3-70b-int4+llama-3.2-1b-int4",
    "llama-3-70b-int4+llama-3.2-3b-int4",
    "qwen2-72b-int4+qwen2-1.5b-int4",
)
TUNED, MANY = 24, 280
SIZES = {TUNED: 120, 16: MANY, 32: MANY, 48: MANY}  # requests, by how many at once
LOADS, SEEDS, OURS = (0.7, 1.0, 1.2, 2.0), (1, 2, 3), (SERIAL, SPECSERVE)
_KEPT = (
    "num_requests", "seconds", "latency_mean", "latency_p90", "ttft_p90", "slo_attainment",
    "goodput", "mean_batch", "peak_batch", "draft_tokens", "accepted_tokens",
)  # fmt: skip


class Case(NamedTuple):
    """So many at once of a trace, by a pair of models, with one acceptance seed."""

    at_once: int
    pair: str
    trace: str
    load: str
    seed: int

    @property
    def label(self) -> str:
        """Such as "70B + 3B, code at 1.2, 32 at once, seed 1"."""
        place = sizes_of((self.pair, self.trace, self.load))
        return f"{place}, {self.at_once} at once, seed {self.seed}"


Cases = Mapping[Case, Mapping[str, Mapping[str, Any]]]  # figures by case and policy


def measure(store: Any, traces: Path | None) -> None:
    """All limits, pairs, traces, loads, seeds and policies."""
    for batch, num in SIZES.items():
        for pair in PAIRS:
            fit = Fit.load(DEFAULT_FIT.parents[1] / f"h200-{pair}/fit.json")
            for name in SEGMENTS:
                for load in LOADS:
                    cost = fit.costs[WHOLE]
                    requests = requests_at(
                        name, traces, cost, load, num=num, batch=batch, read=None
                    )
                    _measure_case(store, f"{batch}/{pair}/{name}/{load}", requests, fit, batch)


def _measure_case(store: Any, case: str, requests: pd.DataFrame, fit: Fit, batch: int) -> None:
    slo = target_of(fit.costs[WHOLE])
    for seed in SEEDS:
        for policy in ("plain", *OURS):

            def make(policy: str = policy, seed: int = seed) -> dict[str, Any]:
                run = simulated(requests, fit, policy, WHOLE, slo, batch=batch, seed=seed)
                return {name: run[name] for name in _KEPT}

            store.get(f"crowds/{case}/{seed}/{policy}", make)


def cases_of(results: Results) -> Cases:
    """Figures of each policy, by case; without a case that a broken run has left unfinished."""
    found: dict[Case, dict[str, Mapping[str, Any]]] = {}
    for key, figures in below(results, "crowds").items():
        at_once, pair, trace, load, seed, policy = key.split("/")
        case = Case(int(at_once), pair, trace, load, int(seed))
        found.setdefault(case, {})[policy] = figures
    return {case: ways for case, ways in found.items() if ways.keys() >= {"plain", *OURS}}


def speeds_of(cases: Cases, policy: str, rival: str = "plain") -> dict[Case, float]:
    """Mean latency of a rival divided by the policy's."""
    return {
        case: found[rival]["latency_mean"] / found[policy]["latency_mean"]
        for case, found in cases.items()
    }


def sizes_said(cases: Cases) -> str:
    """Such as "16 to 48 at once"."""
    sizes = {case.at_once for case in cases}
    return f"{min(sizes)} to {max(sizes)} at once"


def lowest(results: Results) -> str:
    """For the page's summary: the lowest speeds of all cases; nothing without any."""
    cases = cases_of(results)
    if not cases:
        return ""
    ours, theirs = (_least(speeds_of(cases, policy)) for policy in OURS)
    return (
        f"Where {sizes_said(cases)} go from idle to overload (simulated) it has at least {ours} "
        f"of plain decoding's speed, and SpecServe {theirs}."
    )


def crowds_section(results: Results) -> str:
    """The lowest speeds relative to plain decoding, by how many at once and by trace."""
    cases = cases_of(results)
    if not cases:
        return ""
    sizes, traces, loads, seeds = (
        list(dict.fromkeys(getattr(case, name) for case in cases))
        for name in ("at_once", "trace", "load", "seed")
    )
    rows = [_row({c: f for c, f in cases.items() if c.at_once == s}, traces) for s in sizes]
    head = ("at once", "requests", *traces, "cases", f"below {NEEDED}")
    most = " and ".join(f"{max(speeds_of(cases, policy).values()):.2f}" for policy in OURS)
    return f"""\
## From idle to overload with many at once

As in the section before on four GPUs, which are idle at first; {len(seeds)} acceptance seeds.
Lowest speed relative to plain decoding of {" / ".join(OURS)} at loads of {", ".join(loads)}, and
where. The rules were tuned on the row of {TUNED} at once, and looked at in eight cases of all.

{markdown(head, rows)}

The highest are {most}. The batch tree has at least {_least(speeds_of(cases, SERIAL, SPECSERVE))} of
SpecServe's speed.{_goodput(cases)} By the code of noon of 26 November {TUNED} at once had down to
0.92 and 0.93: it read prompts that just paid, and repeated rounds slower than plain ones.

Requests [take turns](policies.md#turns) here, in plain decoding as in pauses. Without turns plain
decoding itself was 5 % slower on average, and 36 % at most ({TUNED} at once, "conv" at 1), and 6 of
864 speeds were below {NEEDED}, the least 0.966: a few milliseconds of drafting then lead from 16
requests to a 17th, whose rounds take 1.8 times as long, and the queue stays. With turns they were
3, and none where a draft's prompt has to save twice what it takes instead of 1.5 times, or one to
two times, more the more requests pay (all by the steps of 26 November)."""


def _row(cases: Cases, traces: Sequence[str]) -> tuple[object, ...]:
    """Of one number at once."""
    speeds = [speeds_of(cases, policy) for policy in OURS]
    cells = [" / ".join(_lowest_of(speed, trace) for speed in speeds) for trace in traces]
    missed = " / ".join(str(sum(x < NEEDED for x in speed.values())) for speed in speeds)
    case, found = next(iter(cases.items()))
    return case.at_once, found["plain"]["num_requests"], *cells, len(cases), missed


def _lowest_of(speeds: Mapping[Case, float], trace: str) -> str:
    """Such as "0.986 (70B + 3B at 0.7)"."""
    case = min((case for case in speeds if case.trace == trace), key=speeds.__getitem__)
    place = sizes_of((case.pair, case.trace, case.load)).replace(f", {trace}", "")
    return f"{_figure(speeds[case])} ({place})"


def _figure(speed: float) -> str:
    """Three digits, or four where three would hide that it is below the goal."""
    return f"{speed:.{4 if speed < NEEDED <= round(speed, 3) else 3}f}"


def _least(speeds: Mapping[Case, float]) -> str:
    """Such as "0.969 (below 0.98 in 4 of 432)"."""
    missed = sum(speed < NEEDED for speed in speeds.values())
    where = f" (below {NEEDED} in {missed} of {len(speeds)})" if missed else ""
    return f"{_figure(min(speeds.values()))}{where}"


def _goodput(cases: Cases) -> str:
    """How far the batch tree's goodput is behind SpecServe's, where targets are met."""
    shares = {
        case: found[SERIAL]["goodput"] / found[SPECSERVE]["goodput"]
        for case, found in cases.items()
        if found[SPECSERVE]["slo_attainment"] >= LEAST_IN_SLO
    }
    if not shares:
        return ""
    worst = min(shares, key=shares.__getitem__)
    ours, theirs = (
        round(f["slo_attainment"] * f["num_requests"])
        for f in (cases[worst][policy] for policy in OURS)
    )
    behind = sum(share < NEEDED for share in shares.values())
    return f""" Its goodput, where SpecServe attains 5 % or more, is over 2 % lower in {behind} of
{len(shares)}; at worst {shares[worst]:.2f}, {ours} requests within the SLO to {theirs}."""
