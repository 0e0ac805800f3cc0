"""What ``codesign plan`` prints for people: the result block and the table of alternatives."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from codesign.cli.plan_economics import pays_text
from codesign.cli.tables import number_text, table, wrapped
from codesign.errors import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from codesign.candidate import Candidate, Interval, ScoredCandidate
    from codesign.config import SLO
    from codesign.fit import Fit
    from codesign.plan import Doubt, Plan
    from codesign.planner import Answer
    from codesign.traces import Trace

_CHECKPOINTS = " --target FOLDER --draft FOLDER"
_MOST_DOUBTS = 2
_MOST_TIES = 3
_COLUMNS = (
    *("plan (times in ms)", "TPOT p50", "p90", "TTFT p90"),
    *("tok/s", "tok/round", "load", "in SLO"),
)


def result_text(
    plan: Plan, prepared: Trace, fit: Fit, answer: Answer, seconds: float, then: str
) -> str:
    """The result block of ``codesign plan``: what was searched, the best, why, what else."""
    from codesign.traces import summarise

    trace = summarise(prepared)
    number = f"{answer.num_feasible} meeting the SLO" if plan.slo.is_set else "no SLO set"
    lines = [
        f"trace     {prepared.name:<18} {counted(trace.num_requests, 'request')}, "
        + (f"{trace.rate:.2g} req/s, " if trace.duration else "all at once, ")
        + f"prompt p50 {trace.prompt.p50:,.0f}, "
        f"output p50 {trace.output.p50:,.0f}",
        f"fit       {plan.fit.path.name:<18} {plan.target} with {plan.draft or 'no draft'}",
        f"searched  {counted(answer.num_candidates, 'plan')} screened in "
        f"{answer.screen_seconds:.1f} s, {answer.num_simulated} simulated in "
        f"{seconds - answer.screen_seconds:.1f} s, {len(plan.scored)} on all requests, {number}",
        "",
        f"best      {plan.chosen.label}",
        *wrapped("", describe(plan.chosen.candidate)),
        *_figures(plan, has_own=trace.own_targets > 0),
        *wrapped("why", plan.reason),
    ]
    lines += wrapped("second", plan.runner_up) if plan.runner_up else []
    lines += wrapped("ties", ties_text(plan)) if plan.ties else []
    lines += wrapped("pays", pays) if (pays := pays_text(plan)) else []
    lines += wrapped("doubt", _doubts(plan, fit)) if plan.doubts else []
    lines += wrapped("data", _origin(plan, fit))
    lines += [line for note in plan.notes for line in wrapped("note", note)]
    columns = _COLUMNS if plan.slo.is_set else _COLUMNS[:-1]
    shown = _family_plans(plan)
    rows = [row[: len(columns)] for row in _rows(shown)]
    lines += ["", table(columns, rows), *_seeds_note(shown), *_attainment_note(shown, plan.slo)]
    lines += ["", f"next      {then}"]
    return "\n".join(lines)


def next_command(plan: Plan, out: Path, fit: Fit) -> str:
    """What to type after a plan was written to ``out``: shapes of data sheets need checkpoints."""
    from codesign.export import closest_engine
    from codesign.fit.profile_command import device_of
    from codesign.models import FETCHABLE, has_model

    file = quote(str(out))
    candidate = plan.chosen.candidate
    if candidate.deployment.prefill_workers:
        engine = closest_engine(plan, fit)
        name = "vllm" if engine is None else engine.name
        why = "the engine here has no workers for prompts alone: plan with --runnable"
        return f"codesign export --plan {file} --to {name}  # {why}"
    if candidate.speculation.runs_in_engine:
        device = "" if (device := device_of(fit)) == "cpu" else f" --device {device}"
        is_known = plan.target in FETCHABLE or has_model(plan.target)
        return f"codesign run --plan {file}{device}{'' if is_known else _CHECKPOINTS}"
    return (
        f"codesign export --plan {file} --to vllm --head NAME  # the engine here has no such head"
    )


def ties_text(plan: Plan) -> str:
    """What the prediction cannot tell from the best: one label of each policy and split."""
    batch = {
        label.rpartition(", ")[0]: label for label in reversed((plan.chosen.label, *plan.ties))
    }
    others = [label for label in batch.values() if label != plan.chosen.label]
    own = plan.chosen.label.rpartition(", ")[0]
    shown = sorted(others, key=plan.ties.index)[:_MOST_TIES]
    if len(others) > len(shown):
        shown.append(f"{len(others) - len(shown)} more")
    if any(label.startswith(f"{own}, ") for label in plan.ties):
        shown.append("the best with other batch limits")
    return "; ".join(shown)


def doubt_text(plan: Plan) -> str:
    """What would change the choice; the fit may be that far off."""
    named = [
        f"if {_term_text(d.term)} {abs(d.change):.0%} {'above' if d.change > 0 else 'below'} the "
        f"fit, {d.rival} would be {d.regret:.0%} better{_in_what(d)}"
        for d in plan.doubts[:_MOST_DOUBTS]
    ]
    return f"{'; '.join(named)}. The fit may be that far off"


def _doubts(plan: Plan, fit: Fit) -> str:
    from codesign.fit import SHEETS
    from codesign.fit.profile_command import profile_command

    where = ", on such a machine" if fit.origin in SHEETS else ""
    return f"{doubt_text(plan)}; to find out{where}: {profile_command(fit)}"


def _in_what(doubt: Doubt) -> str:
    from codesign.planner.explanation import FIGURE_WORDS

    return f" in {FIGURE_WORDS[doubt.figure]}" if doubt.figure in FIGURE_WORDS else ""


def _term_text(term: str) -> str:
    """A doubt's term as the subject of a sentence: "draft step of 3+1", "tokens per round"."""
    step, of, label = term.partition(" of ")
    return f"the {step}s on {label} are" if of else f"{term} are"


def _origin(plan: Plan, fit: Fit) -> str:
    from codesign.fit.extrapolated import origin_text

    label = plan.chosen.candidate.deployment.unit.label
    errors = [
        f"{op} {fit.errors[name]:.1%}"
        for op in ("target", "draft")
        if (name := f"{label}/{op}") in fit.errors
    ]
    shown = f" (held-out error: {', '.join(errors)})" if errors else ""
    times = f"step times {origin_text(fit, plan.chosen.origin)}{shown}"
    return f"{times}, acceptance {fit.acceptance_origin}, predictions simulated"


def describe(candidate: Candidate) -> str:
    """A candidate in words."""
    from codesign.policy.speculation import summarise_policy

    spec, workers = candidate.speculation, candidate.deployment
    how = {
        "plain": "plain decoding, no draft",
        "chain": f"chains of {counted(spec.max_depth, 'draft token')}",
        "threshold": f"chains of up to {spec.max_depth}, cut after the first unsure token",
        "tree": f"trees of {spec.rows} rows, {spec.expansions} x {spec.width} leaves drafted",
        "specserve": f"chains of up to {spec.max_depth}, as long as goodput is predicted to rise",
        "batch-tree": f"trees that share the rows of the batch, up to {spec.rows} rows a request, "
        f"up to {spec.expansions} x {spec.width} leaves drafted",
    }.get(spec.kind) or f"{spec.label} ({summarise_policy(spec)})"
    if workers.draft_workers:
        draft = counted(workers.draft_workers, "worker")
        where = f"target on {workers.target_workers} and draft on {draft}, at the same time"
    else:
        where = counted(workers.target_workers, "worker")
        where += "" if spec.kind == "plain" else ", target and draft in turn"
    if workers.replicas > 1:
        where = f"{workers.replicas} replicas, each: {where}"
    if workers.prefill_workers:
        own = "of its own" if workers.prefill_workers == 1 else "of their own"
        where += f"; prompts on {counted(workers.prefill_workers, 'worker')} {own}"
    each = " per replica" if workers.replicas > 1 else ""
    return f"{how}; {where}; at most {counted(candidate.max_batch, 'request')} at once{each}"


def _figures(plan: Plan, *, has_own: bool) -> list[str]:
    from codesign.slo_figure import slo_figure

    predicted = plan.chosen.predicted
    has_draft = plan.chosen.candidate.speculation.has_draft
    rows = [("", "predicted", "SLO" if plan.slo.is_set else "", "")]
    for name, target in (("ttft", plan.slo.ttft), ("tpot", plan.slo.tpot)):
        if f"{name}_slo" in predicted:
            value = predicted[f"{name}_slo"]
            told = slo_figure(name, plan.slo, has_own=has_own)
            limit = "" if target is None else f"{number_text(told.factor * target)} {told.unit}"
            verdict = "" if target is None else "ok" if value.value <= target else "missed"
            rows.append((told.title, _shown(value, told.factor, told.unit), limit, verdict))
    for name, unit in (
        ("throughput", "tokens/s"),
        ("goodput", "req/s"),
        ("acceptance_length", "tokens per round"),
    ):
        if name in predicted and (name != "acceptance_length" or has_draft):
            rows.append((name.replace("_", " "), _shown(predicted[name], 1.0, unit), "", ""))
    return [f"  {a:<18}  {b:<34}  {c:<9} {d}".rstrip() for a, b, c, d in rows]


def _shown(interval: Interval, factor: float, unit: str) -> str:
    ends = (interval.value, interval.low, interval.high)
    value, low, high = (number_text(factor * x) for x in ends)
    return f"{value} {unit}  [{low}, {high}]"


def _family_plans(plan: Plan) -> list[ScoredCandidate]:
    """The first, the second that is told of, the best of each family, what is always compared."""
    from codesign.planner.halving import representatives

    shown = {0, *representatives([scored.candidate for scored in plan.scored])}
    told = [n for n, s in enumerate(plan.scored) if plan.runner_up.startswith(f"{s.label}: ")]
    return [plan.scored[index] for index in sorted(shown.union(told))]


def _rows(shown: Sequence[ScoredCandidate]) -> list[list[object]]:
    """Cells of the table; plans of fewer simulations than the first have a star."""
    rows: list[list[object]] = []
    for scored in shown:
        values = {name: interval.value for name, interval in scored.predicted.items()}
        times = [values.get(name) for name in ("tpot_p50", "tpot_p90", "ttft_p90")]
        attained = values.get("slo_attainment")
        rows.append(
            [
                scored.label + (" *" if scored.num_seeds < shown[0].num_seeds else ""),
                *(None if value is None else 1000 * value for value in times),
                values.get("throughput"),
                values.get("acceptance_length"),
                scored.saturation,
                ("" if attained is None else f"{attained:.0%}")
                + ("" if scored.is_feasible else " no"),
            ]
        )
    return rows


def _seeds_note(shown: Sequence[ScoredCandidate]) -> list[str]:
    """What the stars of ``_rows`` mean."""
    most, least = shown[0].num_seeds, min(scored.num_seeds for scored in shown)
    if least == most:
        return []
    return [f"* {counted(least, 'simulation')}; the others are means of {most}"]


def _attainment_note(shown: Sequence[ScoredCandidate], slo: SLO) -> list[str]:
    """What "in SLO" counts, where a plan that meets the SLO has less of it than the percentile."""
    from codesign.slo_figure import in_slo_text

    attained = [s.predicted.get("slo_attainment") for s in shown if s.is_feasible]
    least = min((each.value for each in attained if each is not None), default=1.0)
    if not slo.is_set or least >= slo.percentile / 100 - 1e-9:
        return []
    return wrapped("in SLO", in_slo_text(slo))
