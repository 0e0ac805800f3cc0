"""What ``codesign plan`` prints for people: the result block and the table of alternatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from codesign.cli.output import MAX_COLUMNS, table

if TYPE_CHECKING:
    from pathlib import Path

    from codesign.fit import Fit
    from codesign.plan import Candidate, Interval, Plan, ScoredCandidate
    from codesign.planner import Answer
    from codesign.traces import Trace

_COLUMNS = ("plan", "TPOT p50", "p90 ms", "TTFT p90", "tokens/s", "accepted", "in SLO", "fits")


def result_text(
    plan: Plan, prepared: Trace, fit: Fit, answer: Answer, seconds: float, out: Path
) -> str:
    """The result block of ``codesign plan``: what was searched, the best, why, what else.

    Args:
        plan: As saved.
        prepared: The requests that were simulated.
        fit: Where the step times came from.
        answer: How large the search was.
        seconds: How long it took.
        out: The plan's file.
    """
    from codesign.traces import summarise

    trace = summarise(prepared)
    has_slo = plan.slo.ttft is not None or plan.slo.tpot is not None
    number = f"{answer.num_feasible} meet the SLO" if has_slo else "no SLO set"
    lines = [
        f"trace     {prepared.name:<18} {trace.num_requests:,} requests, {trace.rate:.2g} req/s, "
        f"prompt p50 {trace.prompt.p50:,.0f}, output p50 {trace.output.p50:,.0f}",
        f"fit       {plan.fit.path.name:<18} {plan.target} with {plan.draft or 'no draft'}",
        f"searched  {answer.num_candidates:,} plans in {seconds:.1f} s, {answer.num_simulated} "
        f"simulated, {number}",
        "",
        f"best      {plan.chosen.label}",
        *_wrapped("", describe(plan.chosen.candidate)),
        *_figures(plan),
        *_wrapped("why", plan.reason),
    ]
    if plan.ties:
        more = f" and {len(plan.ties) - 3} more" if len(plan.ties) > 3 else ""
        lines += _wrapped("ties", f"{'; '.join(plan.ties[:3])}{more}")
    lines += _wrapped("data", _origin(plan, fit))
    lines += [line for note in plan.notes for line in _wrapped("note", note)]
    lines += ["", table(_COLUMNS, _family_rows(plan)), "", f"next      codesign run --plan {out}"]
    return "\n".join(lines)


def _origin(plan: Plan, fit: Fit) -> str:
    label = plan.chosen.candidate.deployment.label
    errors = [
        f"{op} {fit.errors[name]:.1%}"
        for op in ("target", "draft")
        if (name := f"{label}/{op}") in fit.errors
    ]
    shown = f" (held-out error: {', '.join(errors)})" if errors else ""
    times = f"step times {plan.chosen.origin}{shown}"
    return f"{times}, acceptance {fit.acceptance_origin}, predictions simulated"


def _wrapped(head: str, text: str) -> list[str]:
    from textwrap import wrap

    indent = " " * 10
    return wrap(text, MAX_COLUMNS, initial_indent=f"{head:<10}", subsequent_indent=indent)


def describe(candidate: Candidate) -> str:
    """A candidate in words."""
    spec, workers = candidate.speculation, candidate.deployment
    how = {
        "plain": "plain decoding, no draft",
        "chain": f"chains of {spec.max_depth} draft tokens",
        "threshold": f"chains of up to {spec.max_depth}, cut after the first unsure token",
        "tree": f"trees of {spec.rows} rows, {spec.expansions} x {spec.width} leaves drafted",
        "specserve": f"chains of up to {spec.max_depth}, as long as goodput is predicted to rise",
    }[spec.kind]
    if workers.draft_workers:
        where = f"target on {workers.target_workers} and draft on {workers.draft_workers} workers"
        where += ", at the same time"
    else:
        where = f"{workers.target_workers} workers" + ("" if spec.kind == "plain" else ", in turn")
    return f"{how}; {where}; at most {candidate.max_batch} requests at once"


def _figures(plan: Plan) -> list[str]:
    predicted, percent = plan.chosen.predicted, f"p{plan.slo.percentile:g}"
    rows = [("", "predicted", "SLO", "")]
    for name, target in (("ttft", plan.slo.ttft), ("tpot", plan.slo.tpot)):
        if f"{name}_slo" in predicted:
            value = predicted[f"{name}_slo"]
            limit = "" if target is None else f"{1000 * target:g} ms"
            verdict = "" if target is None else "ok" if value.value <= target else "missed"
            rows.append((f"{name.upper()} {percent}", _shown(value, 1000.0, "ms"), limit, verdict))
    for name, unit in (
        ("throughput", "tokens/s"),
        ("goodput", "req/s"),
        ("acceptance_length", "tokens per round"),
    ):
        if name in predicted:
            rows.append((name.replace("_", " "), _shown(predicted[name], 1.0, unit), "", ""))
    return [f"  {a:<18}  {b:<34}  {c:<9} {d}".rstrip() for a, b, c, d in rows]


def _shown(interval: Interval, factor: float, unit: str) -> str:
    value, low, high = (factor * x for x in (interval.value, interval.low, interval.high))
    return f"{value:,.4g} {unit}  [{low:,.4g}, {high:,.4g}]"


def _family_rows(plan: Plan) -> list[list[object]]:
    """The best of each family, and the policies that are always compared; best first."""
    from codesign.planner import COMPARED

    families: dict[str, ScoredCandidate] = {}
    compared: dict[str, ScoredCandidate] = {}
    for scored in plan.scored:
        families.setdefault(scored.candidate.family, scored)
        if scored.candidate.speculation in COMPARED:
            compared.setdefault(scored.candidate.speculation.label, scored)
    wanted = {scored.label for scored in (*families.values(), *compared.values())}
    rows: list[list[object]] = []
    for scored in plan.scored:
        if scored.label not in wanted:
            continue
        values = {name: interval.value for name, interval in scored.predicted.items()}
        times = [values.get(name) for name in ("tpot_p50", "tpot_p90", "ttft_p90")]
        attained = values.get("slo_attainment")
        rows.append(
            [
                scored.label,
                *(None if value is None else 1000 * value for value in times),
                values.get("throughput"),
                values.get("acceptance_length"),
                "-" if attained is None else f"{attained:.0%}",
                "yes" if scored.is_feasible else "no",
            ]
        )
    return rows
