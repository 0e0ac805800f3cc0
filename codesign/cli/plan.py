"""``codesign plan``: search for the plan that meets the SLO on a trace."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from codesign.cli.output import MAX_COLUMNS, add_output_arguments, emit, progress, say, table
from codesign.cli.trace import add_trace_arguments, trace_from_args
from codesign.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from pathlib import Path

    from codesign.fit import Fit
    from codesign.plan import Candidate, Interval, Plan, ScoredCandidate
    from codesign.planner import Answer
    from codesign.traces import Trace

_EXAMPLES = """\
examples:
  codesign plan --trace conv-twin --slice 0:60 --fit fit.json
  codesign plan --trace conv-twin --fit fit.json --slo-ttft-ms 1000 --slo-tpot-ms 50 \\
      --objective latency --out plans/steady.json
"""

_COLUMNS = ("plan", "TPOT p50", "p90 ms", "TTFT p90", "tokens/s", "accepted", "in SLO", "fits")


def add_parser(subparsers: Any) -> None:
    """Add ``codesign plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="search for the plan that meets the SLO on a trace",
        description="Search policies, splits of the machine and batch limits for the plan that "
        "meets the SLO on a trace.",
        epilog=_EXAMPLES,
    )
    add_trace_arguments(parser)
    machine = parser.add_argument_group("hardware")
    machine.add_argument("--fit", metavar="FIT", help="what codesign fit wrote")
    machine.add_argument("--workers", type=int, metavar="N", help="CPU threads (all)")
    machine.add_argument(
        "--max-kv-tokens", type=int, default=4096, metavar="N", help="KV rows in all (4096)"
    )
    targets = parser.add_argument_group("SLO")
    targets.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="time to first token")
    targets.add_argument("--slo-tpot-ms", type=float, metavar="MS", help="time per later token")
    targets.add_argument(
        "--slo-percentile", type=float, default=90.0, metavar="P", help="of requests, each (90)"
    )
    search = parser.add_argument_group("search")
    search.add_argument(
        "--objective",
        choices=("goodput", "latency"),
        default="goodput",
        help="most requests/s that meet the SLO, or lowest mean TPOT (goodput)",
    )
    search.add_argument("--max-batch", type=int, default=8, metavar="N", help="largest limit (8)")
    search.add_argument("--policies", metavar="LABEL,...", help="only these, as plain,chain-3")
    search.add_argument("--seed", type=int, default=0, help="of prompts and simulations (0)")
    search.add_argument("--resume", action="store_true", help="use what an interrupted search kept")
    files = parser.add_argument_group("files")
    files.add_argument("--out", default="plan.json", metavar="FILE", help="plan (plan.json)")
    add_output_arguments(parser)
    parser.set_defaults(func=make_plan)


def make_plan(args: argparse.Namespace) -> None:
    """Search, write the plan and the prepared trace, print the result."""
    import time
    from pathlib import Path

    from codesign.plan import FileRef
    from codesign.prepared_trace import prepare_trace
    from codesign.traces import write_parquet

    fit, fit_file = _load_fit(args.fit)
    trace = trace_from_args(args)
    prepared = prepare_trace(trace, fit.target, seed=args.seed, max_requests=args.max_requests)
    for note in prepared.notes[len(trace.notes) :]:
        say(f"trace {trace.name}: {note}")
    out = Path(args.out)
    start = time.monotonic()
    answer = _search(args, fit, FileRef.of(fit_file), prepared, out)
    seconds = time.monotonic() - start
    trace_file = out.with_name(f"{out.stem}.trace.parquet")
    write_parquet(prepared, trace_file)
    plan = _as_plan(args, fit, FileRef.of(fit_file), FileRef.of(trace_file), prepared, answer)
    plan.save(out)
    payload = {
        "plan": out,
        "chosen": plan.chosen.to_dict(),
        "alternatives": [scored.to_dict() for scored in plan.alternatives],
        "ties": plan.ties,
        "reason": plan.reason,
        "notes": plan.notes,
        "num_candidates": answer.num_candidates,
        "num_simulated": answer.num_simulated,
        "num_feasible": answer.num_feasible,
        "search_seconds": seconds,
    }
    emit(args, payload, lambda: _as_text(plan, prepared, fit, answer, seconds, out))


def _load_fit(path: str | None) -> tuple[Fit, Path]:
    from pathlib import Path

    from codesign.fit import Fit

    if path is None:
        raise InputError(
            "no step times to plan with. Measure this machine: codesign profile, then codesign "
            "fit; and name the result: --fit FIT"
        )
    file = Path(path)
    if file.is_dir():
        file = file / "fit.json"
    return Fit.load(file), file


def _search(args: argparse.Namespace, fit: Fit, fit_ref: Any, prepared: Trace, out: Path) -> Answer:
    from codesign.artifacts import hardware
    from codesign.planner import Question, search
    from codesign.search_cache import SearchCache, search_key

    slo = _slo(args)
    question = Question(
        requests=prepared.requests,
        fit=fit,
        slo=slo,
        objective=args.objective,
        workers=hardware()["cores"] if args.workers is None else args.workers,
        max_batch=args.max_batch,
        policies=tuple(args.policies.split(",")) if args.policies else (),
        max_kv_tokens=args.max_kv_tokens,
        seed=args.seed,
    )
    kept = out.with_name(f"{out.stem}.search.jsonl")
    key = search_key(prepared.requests, fit_ref.sha256, slo, args.max_kv_tokens)
    cache = SearchCache(key, kept, resume=args.resume)
    try:
        with progress(args) as report:
            answer = search(question, cache=cache, progress=report)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"kept {len(cache)} simulations in {kept}; go on with the same command and --resume"
        ) from None
    except InfeasibleError:
        cache.remove()
        raise
    cache.remove()
    return answer


def _slo(args: argparse.Namespace) -> Any:
    from codesign.config import SLO

    ttft, tpot = args.slo_ttft_ms, args.slo_tpot_ms
    return SLO(
        ttft=None if ttft is None else ttft / 1000.0,
        tpot=None if tpot is None else tpot / 1000.0,
        percentile=args.slo_percentile,
    )


def _as_plan(
    args: argparse.Namespace,
    fit: Fit,
    fit_ref: Any,
    trace_ref: Any,
    prepared: Trace,
    answer: Answer,
) -> Plan:
    from codesign.plan import Plan
    from codesign.planner import NUM_SEEDS
    from codesign.policy.walk import Sampling

    return Plan(
        target=fit.target,
        draft=fit.draft,
        slo=_slo(args),
        objective=args.objective,
        sampling=Sampling(temperature=fit.temperature, seed=args.seed),
        max_kv_tokens=args.max_kv_tokens,
        trace=trace_ref,
        num_requests=len(prepared),
        fit=fit_ref,
        seed=args.seed,
        num_seeds=NUM_SEEDS,
        chosen=answer.chosen,
        alternatives=answer.ranked[1:],
        ties=answer.ties,
        reason=answer.reason,
        notes=(*(f"trace: {note}" for note in prepared.notes), *answer.notes),
    )


def _as_text(
    plan: Plan, prepared: Trace, fit: Fit, answer: Answer, seconds: float, out: Path
) -> str:
    from codesign.traces import summarise

    trace = summarise(prepared)
    error = max(fit.errors.values(), default=None)
    shown_error = "" if error is None else f", held-out error at most {error:.1%}"
    feasible = "meet the SLO" if plan.slo.ttft or plan.slo.tpot else "no SLO set"
    number = f"{answer.num_feasible} {feasible}" if plan.slo.ttft or plan.slo.tpot else feasible
    lines = [
        f"trace     {prepared.name:<18} {trace.num_requests:,} requests, {trace.rate:.2g} req/s, "
        f"prompt p50 {trace.prompt.p50:,.0f}, output p50 {trace.output.p50:,.0f}",
        f"fit       {plan.fit.path.name:<18} {plan.target} with {plan.draft or 'no draft'}"
        f"{shown_error}",
        f"searched  {answer.num_candidates:,} plans in {seconds:.1f} s, {answer.num_simulated} "
        f"simulated, {number}",
        "",
        f"best      {plan.chosen.label}",
        f"          {describe(plan.chosen.candidate)}",
        *_figures(plan),
        *_wrapped("why", plan.reason),
    ]
    if plan.ties:
        more = f" and {len(plan.ties) - 3} more" if len(plan.ties) > 3 else ""
        lines += _wrapped("ties", f"{'; '.join(plan.ties[:3])}{more}")
    lines.append(f"data      step times and acceptance {plan.chosen.origin}; predictions simulated")
    lines += [line for note in plan.notes for line in _wrapped("note", note)]
    lines += ["", table(_COLUMNS, _family_rows(plan)), "", f"next      codesign run --plan {out}"]
    return "\n".join(lines)


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
        "tree": f"trees of {spec.rows} rows, {spec.expansions} draft forwards of {spec.width}",
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
    """The best of each family, best first."""
    best: dict[str, ScoredCandidate] = {}
    for scored in plan.scored:
        best.setdefault(scored.candidate.family, scored)
    rows: list[list[object]] = []
    for scored in best.values():
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
