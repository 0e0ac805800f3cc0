"""``codesign simulate``: predict how one way to serve does on a trace."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from codesign.cli.argument_types import non_negative, positive
from codesign.cli.fit_argument import add_fit_argument, fit_from_args
from codesign.cli.output import add_output_arguments, emit, progress, say
from codesign.cli.serving_arguments import (
    add_serving_arguments,
    add_slo_arguments,
    serving_from_args,
    slo_from_args,
)
from codesign.cli.tables import number_text, table
from codesign.cli.trace_argument import add_trace_arguments, check_targets, trace_from_args
from codesign.errors import InputError, UsageError

if TYPE_CHECKING:
    from codesign.candidate import Candidate
    from codesign.config import SLO, Deployment
    from codesign.fit import Fit
    from codesign.metrics import Metrics
    from codesign.policy.speculation import SpeculationSpec

_EXAMPLES = """\
examples:
  codesign simulate --list-policies
  codesign simulate --trace conv-twin --rate-scale 0.1 --max-prompt 256 --max-output 64 \\
      --policy tree-8x4x2 --deployment 2 --out runs/simulated
  codesign simulate --trace conv-twin --device h100 --gpus 8 --target llama-3-70b:int4 \\
      --draft llama-3.2-1b:int4 --deployment 2x3+1 --policy async-tree-8x4x2 --max-batch 32 \\
      --preemption --routing least-loaded --json
"""

_PARTS = ("mean", "p50", "p90", "p99")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``codesign simulate`` takes."""
    parser.description = "Predict how one policy on one split of the machine serves a trace."
    parser.epilog = _EXAMPLES
    add_trace_arguments(parser, required=False)
    machine = parser.add_argument_group("hardware")
    add_fit_argument(machine)
    machine.add_argument(
        "--deployment",
        metavar="SPLIT",
        help="split of the workers: 2 (shared by target and draft), 1+1 (target + draft), 2x3+1 "
        "(2 replicas), 4/p2 (2 more for prompts) (largest of the fit)",
    )
    machine.add_argument(
        "--max-batch",
        type=positive,
        default=4,
        metavar="N",
        help="requests at once, per replica (4)",
    )
    add_serving_arguments(machine)
    parser.add_argument(
        "--policy",
        default="plain",
        metavar="LABEL",
        help="plain, chain-3, tree-8x4x2, async-tree-8x4x2, specserve-5, ... (plain)",
    )
    parser.add_argument(
        "--list-policies", action="store_true", help="list all kinds of policies and where they run"
    )
    parser.add_argument(
        "--seed", type=non_negative, default=0, help="seed of the acceptance draws (0)"
    )
    add_slo_arguments(parser, with_percentile=False)
    output = parser.add_argument_group("files")
    output.add_argument("--out", metavar="RUNDIR", help="write the run's tables into this folder")
    add_output_arguments(parser)
    parser.set_defaults(func=predict)


def predict(args: argparse.Namespace) -> None:
    """Simulate one candidate and print its metrics, or list the policies there are."""
    if args.list_policies:
        _list_policies(args)
    elif args.trace is None:
        raise UsageError(
            "the following arguments are required: --trace. See: codesign simulate --help"
        )
    else:
        _predict(args)


def _list_policies(args: argparse.Namespace) -> None:
    from codesign.policy.speculation import FAMILIES

    policies = [
        {
            "pattern": family.pattern,
            "example": family.spec.label,
            "summary": family.summary,
            "source": family.source,
            "draft_has_own_workers": family.spec.is_async,
            "needs_step_times": family.spec.needs_step_times,
            "runs_in": ["simulator", "engine"] if family.spec.runs_in_engine else ["simulator"],
        }
        for family in FAMILIES
    ]
    emit(args, {"policies": policies}, lambda: _policies_text(policies))


def _policies_text(policies: Sequence[dict[str, Any]]) -> str:
    from textwrap import fill

    def entry(policy: dict[str, Any]) -> str:
        facts = [
            "simulator and engine" if "engine" in policy["runs_in"] else "simulator only",
            "draft on separate workers" if policy["draft_has_own_workers"] else "",
            "decides by step times" if policy["needs_step_times"] else "",
            policy["source"],
        ]
        head, indent = f"{policy['pattern']:<24}", " " * 24
        return "\n".join(
            [
                fill(policy["summary"], 100, initial_indent=head, subsequent_indent=indent),
                fill(
                    "; ".join(filter(None, facts)),
                    100,
                    initial_indent=indent,
                    subsequent_indent=indent,
                ),
            ]
        )

    return "\n".join(map(entry, policies))


def _predict(args: argparse.Namespace) -> None:
    from pathlib import Path

    from codesign.fit.extrapolated import across_hosts, origin_text
    from codesign.metrics import summarise
    from codesign.planner.defaults import expecting
    from codesign.planner.predict import prompt_note
    from codesign.planner.prepared_trace import too_long_note
    from codesign.records import has_own_targets
    from codesign.run_directory import make_folder, write_run
    from codesign.sim import simulate

    slo = slo_from_args(args)
    fit, fit_file = fit_from_args(args)
    candidate = _candidate(args, fit)
    serving = serving_from_args(args, fit)
    trace = trace_from_args(args)
    check_targets(args, trace)
    serving = expecting(serving, trace.requests)
    if args.out is not None:
        make_folder(Path(args.out))
    for note in (prompt_note(fit, trace.requests), across_hosts(fit, candidate.deployment)):
        if note:
            say(f"fit: {note}")
    if note := too_long_note(fit.target, trace.requests):
        say(f"trace {trace.name}: {note}")
    with progress(args) as report:
        records = simulate(
            trace.requests,
            candidate,
            fit,
            slo=slo,
            serving=serving,
            seed=args.seed,
            progress=report,
        )
    metrics = summarise(records, slo)
    origin = fit.origin_of(candidate.deployment)
    payload = {
        "candidate": candidate.to_dict(),
        "label": candidate.label,
        "trace": {"name": trace.name, "sha256": trace.sha256, "notes": list(trace.notes)},
        "slo": slo,
        "serving": serving.to_dict(),
        "data": origin,
        "acceptance": fit.acceptance_origin,
        "metrics": metrics.to_dict(),
    }
    if args.out is not None:
        write_run(
            args.out,
            records,
            origin="simulated",
            summary=payload,
            seed=args.seed,
            inputs={"fit": fit_file},
        )
        say(f"wrote {args.out}")
    data = f"step times {origin_text(fit, origin)}, acceptance {fit.acceptance_origin}"
    has_own = has_own_targets(trace.requests)
    emit(
        args,
        {**payload, "out": args.out},
        lambda: _as_text(candidate, metrics, slo, data, has_own=has_own),
    )


def _candidate(args: argparse.Namespace, fit: Fit) -> Candidate:
    from codesign.candidate import Candidate
    from codesign.policy.speculation import parse_policy

    spec = parse_policy(args.policy)
    return Candidate(_deployment(args.deployment, spec, fit), spec, args.max_batch)


def _deployment(text: str | None, spec: SpeculationSpec, fit: Fit) -> Deployment:
    """What the user named, or the largest of the fit that the policy can run on."""
    from codesign.config import parse_deployment

    if text is None:
        priced = [parse_deployment(label) for label in fit.costs]
        suited = [d for d in priced if (d.draft_workers > 0) == spec.is_async]
        return max(suited or priced, key=lambda d: (d.num_workers, d.target_workers))
    try:
        return parse_deployment(text)
    except InputError as err:
        raise UsageError(f"--deployment: {err}") from err


def _as_text(candidate: Candidate, metrics: Metrics, slo: SLO, data: str, *, has_own: bool) -> str:
    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * 1000.0

    tpot = milliseconds(slo.tpot)  # given if any request has its own
    told = f"own, or {number_text(tpot)}" if has_own and tpot is not None else tpot
    targets = (("ttft", milliseconds(slo.ttft)), ("tpot", told))
    times = [
        [
            f"{key.upper()} ms",
            *(milliseconds(getattr(metrics, f"{key}_{part}")) for part in _PARTS),
            *([target] if slo.is_set else []),
        ]
        for key, target in targets
    ]
    spans = [
        [name.replace("_", " "), milliseconds(seconds)]
        for name, seconds in metrics.spans.items()
        if seconds
    ]
    figures = [
        ["requests finished", f"{metrics.num_finished:,} of {metrics.num_requests:,}"],
        ["seconds", _figure(metrics.seconds)],
        ["throughput, tokens/s", _figure(metrics.throughput)],
        ["goodput, requests/s", _figure(metrics.goodput)],
        *([["within every target", f"{metrics.slo_attainment:.1%}"]] if slo.is_set else []),
        ["acceptance length", _figure(metrics.acceptance_length)],
        ["mean batch", _figure(metrics.mean_batch)],
    ]
    columns = ["", *_PARTS, *(["SLO"] if slo.is_set else [])]
    return "\n".join(
        [
            table(columns, times, f"predicted for {candidate.label}; {data}"),
            table(["figure", "value"], figures),
            table(["span of a round", "mean ms"], spans),
        ]
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else number_text(value)
