"""``codesign validate``: hold the prediction against the measurement."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codesign.cli.argument_types import above_0, out_file
from codesign.cli.output import add_output_arguments, emit, progress, say
from codesign.cli.tables import table, wrapped
from codesign.errors import UsageError, ValidationError, counted

if TYPE_CHECKING:
    from codesign.plan import Plan
    from codesign.validate import Comparison, RunComparison, Validation

_EXAMPLES = """\
examples:
  codesign validate --plan plan.json --run runs/plain runs/chain-3
  codesign validate --plan plan.json --run runs/* --tolerance 10 --report report.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``codesign validate`` takes."""
    parser.description = (
        "Simulate what each run served, and report the errors of the prediction. "
        "Exit code 6 if acceptance length, mean TPOT or throughput of a run is outside the "
        "tolerance."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument("--plan", required=True, metavar="FILE", help="what codesign plan wrote")
    parser.add_argument(
        "--run", required=True, nargs="+", metavar="RUNDIR", help="folders that codesign run wrote"
    )
    parser.add_argument("--fit", metavar="FIT", help="use this fit instead of the plan's")
    check = parser.add_argument_group("check")
    check.add_argument(
        "--tolerance",
        type=above_0,
        default=15.0,
        metavar="PERCENT",
        help="largest error allowed (15)",
    )
    check.add_argument("--no-check", action="store_true", help="report only, never exit with 6")
    files = parser.add_argument_group("files")
    files.add_argument("--report", metavar="FILE.html", help="write tables and charts here")
    add_output_arguments(parser)
    parser.set_defaults(func=compare)


def compare(args: argparse.Namespace) -> None:
    """Print the comparison, write the report, and check the tolerance."""
    from codesign.artifacts import sha256
    from codesign.fit import Fit
    from codesign.plan import Plan
    from codesign.validate import validate
    from codesign.validate.report import html_report
    from codesign.validate.words import cause

    if args.report is not None and not args.report.endswith(".html"):
        raise UsageError(f"--report takes a name that ends in .html, not '{args.report}'")
    if args.report is not None:
        out_file(args.report, "report.html", "--report")
    plan = Plan.load(args.plan)
    fit_file = plan.fit.check() if args.fit is None else Path(args.fit)
    fit = Fit.load(fit_file)
    with progress(args) as report:
        runs = [Path(run) for run in args.run]
        validation = validate(plan, fit, runs, plan_hash=sha256(args.plan), progress=report)
    tolerance = args.tolerance / 100.0
    reason = cause(validation, fit, fit_file, tolerance)
    if args.report is not None:
        page = html_report(validation, plan, tolerance=tolerance, fit=fit, cause=reason)
        _write_report(args.report, page)
    payload = {**_payload(validation, args), "cause": reason}
    emit(args, payload, lambda: _as_text(validation, plan, tolerance, reason))
    if not args.no_check:
        _check(validation, plan, args, reason)


def _check(validation: Validation, plan: Plan, args: argparse.Namespace, reason: str) -> None:
    """Raise if a run is not whole or a figure further off than ``--tolerance``."""
    from codesign.cli.validate_advice import again_command, unfinished_text

    percent = args.tolerance
    if validation.unfinished:
        raise ValidationError(unfinished_text(validation.unfinished, plan, args.plan))
    outside = validation.outside(percent / 100.0)
    if outside:
        run, worst = outside[0]
        again = again_command(run, plan, args.plan)
        reason = reason or (
            f"see the report (--report FILE.html), or measure again on an idle machine: {again}"
        )
        raise ValidationError(
            f"{counted(len(outside), 'figure')} more than {percent:g} % off; the worst is "
            f"{_line(worst)} of {run.label}; {reason}"
        )


def _write_report(path: str, page: str) -> None:
    from codesign.artifacts import write_text
    from codesign.validate import charts

    write_text(path, page)
    say(f"wrote {path}")
    if not charts.available():
        say("the report has no charts; to get them: pip install 'codesign[report]'")


def _line(comparison: Comparison) -> str:
    from codesign.validate.words import SHOWN, error_text, figure_text

    name, predicted = comparison.name, comparison.predicted.value
    title, unit, _ = SHOWN[name]
    return (
        f"{title}: predicted {figure_text(name, predicted)}, measured "
        f"{figure_text(name, comparison.measured)} {unit} ({error_text(comparison)})"
    )


def _payload(validation: Validation, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "plan": args.plan,
        "tolerance_percent": args.tolerance,
        "is_within_tolerance": validation.is_within(args.tolerance / 100.0),
        "runs": [_run_payload(run) for run in validation.runs],
        "rankings": validation.rankings,
        "chosen": validation.chosen,
        "report": args.report,
    }


def _run_payload(run: RunComparison) -> dict[str, Any]:
    return {
        "run": run.path,
        "label": run.label,
        "origin": run.origin,
        "num_unfinished": run.num_unfinished,
        "figures": {c.name: _comparison_payload(c) for c in run.figures},
        "spans": {c.name: _comparison_payload(c) for c in run.spans},
        "rounds": {c.name: _comparison_payload(c) for c in run.rounds},
        "request_error": {name: run.request_error(name) for name in ("ttft", "tpot")},
        "step_pace": run.step_pace,
        "notes": run.notes,
    }


def _comparison_payload(comparison: Comparison) -> dict[str, Any]:
    return {
        "predicted": comparison.predicted,
        "measured": comparison.measured,
        "error": comparison.error,
        "is_inside": comparison.is_inside,
    }


def _as_text(validation: Validation, plan: Plan, tolerance: float, reason: str) -> str:
    from codesign.validate.words import ranking_text

    lines = [
        f"plan      {counted(plan.num_requests, 'request')}, {plan.target} with "
        f"{plan.draft or 'no draft'}; predictions are means of "
        f"{counted(validation.num_seeds, 'simulation')}",
        "",
    ]
    for run in validation.runs:
        lines += [*_run_lines(run, tolerance), ""]
    if len(validation.runs) > 1:
        lines += [_overview(validation), ""]
    for ranking in validation.rankings:
        name = ranking.figure.replace("_", " ").replace("tpot", "TPOT")
        lines += wrapped("ranking", f"{name}: {ranking_text(ranking)}")
    lines += wrapped("cause", reason) if reason else []
    number = len(validation.outside(tolerance))
    verdict = f"{number} outside" if number else "all within"
    if validation.unfinished:
        lines.append(f"unfinished  {', '.join(run.label for run in validation.unfinished)}")
    lines.append(f"checked   acceptance length, mean TPOT, throughput: {verdict} {tolerance:.0%}")
    return "\n".join(lines)


def _run_lines(run: RunComparison, tolerance: float) -> list[str]:
    from codesign.validate.words import error_text, figure_text, figure_title, shown_comparisons

    rows = []
    for comparison in shown_comparisons(run):
        name, interval = comparison.name, comparison.predicted
        rows.append(
            [
                figure_title(name),
                figure_text(name, interval.value),
                f"[{figure_text(name, interval.low)}, {figure_text(name, interval.high)}]",
                figure_text(name, comparison.measured),
                error_text(comparison),
                "inside" if comparison.is_inside else "outside",
                "TOO FAR" if comparison.is_too_far(tolerance) else "",
            ]
        )
    head = f"{run.label}   {run.path} ({run.origin})"
    columns = ("figure", "predicted", "interval", "measured", "error", "interval", "")
    errors = [
        f"{name.upper()} {error:.1%}"
        for name in ("ttft", "tpot")
        if (error := run.request_error(name)) is not None
    ]
    return [
        table(columns, rows, title=head),
        f"single requests, median error: {', '.join(errors) or 'none in common'}",
        *(f"note: {note}" for note in run.notes),
    ]


def _overview(validation: Validation) -> str:
    from codesign.validate import CHECKED
    from codesign.validate.words import figure_text

    rows = []
    for run in validation.runs:
        cells = [run.label]
        for name in CHECKED:
            comparison = run.figure(name)
            if comparison is None:
                cells.append("-")
                continue
            both = (comparison.predicted.value, comparison.measured)
            shown = " / ".join(figure_text(name, value) for value in both)
            error = comparison.error
            cells.append(shown if error is None else f"{shown}, {error:+.0%}")
        rows.append(cells)
    return table(["predicted / measured", "tok/round", "TPOT mean, ms", "tokens/s"], rows)
