"""``codesign fit``: turn a profile into step-time and acceptance models.

With ``--acceptance-from``, acceptance comes from what another server published instead.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from codesign.cli.argument_types import out_file, positive
from codesign.cli.output import add_output_arguments, emit, say
from codesign.cli.tables import table
from codesign.errors import UsageError

if TYPE_CHECKING:
    from codesign.fit import Fit
    from codesign.importers import AcceptanceSummary
    from codesign.importers.run_model import RunModel

_EXAMPLES = """\
examples:
  codesign fit profile --out fit.json
  codesign fit profile --out fit.json --json
  codesign fit --steps-from fit.json --acceptance-from metrics.txt --out served.json

--acceptance-from reads vLLM's /metrics; SGLang's /server_info, responses (meta_info) or log;
AIPerf's profile_export_aiperf.json, profile_export.jsonl or server_metrics_export.json. What
these do not contain (confidences, and draft tokens other than the likeliest) is taken from the
recordings of --steps-from.
"""

_SHOWN_CHAINS = (1, 2, 3, 4, 5, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``codesign fit`` takes."""
    parser.description = (
        "Fit step times, acceptance and the draft's calibration to a profile, and report "
        "the held-out error of each."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "profile", nargs="?", metavar="PROFILE", help="folder that codesign profile wrote"
    )
    elsewhere = parser.add_argument_group("acceptance measured elsewhere, instead of PROFILE")
    elsewhere.add_argument(
        "--acceptance-from", metavar="FILE", help="metrics of vLLM, SGLang or AIPerf (see below)"
    )
    elsewhere.add_argument(
        "--steps-from",
        metavar="FIT",
        help="fit that provides the step times (fit.json, else the one that ships)",
    )
    elsewhere.add_argument(
        "--chain", type=positive, metavar="N", help="draft tokens per round, if FILE does not say"
    )
    output = parser.add_argument_group("files")
    output.add_argument(
        "--out",
        default="fit.json",
        metavar="FILE",
        help="the fit; the recorded acceptance is written next to it (fit.json)",
    )
    add_output_arguments(parser)
    parser.set_defaults(func=make_fit)


def make_fit(args: argparse.Namespace) -> None:
    """Fit a profile, or import acceptance, and print how good the fit is."""
    from pathlib import Path

    from codesign.fit import PROFILE_FILE, STEPS_FILE, fit_profile
    from codesign.profiler.store import measured_note

    if args.acceptance_from is not None:
        _import_acceptance(args)
        return
    if args.profile is None or args.steps_from is not None or args.chain is not None:
        raise UsageError(
            "give PROFILE (codesign fit profile), or --acceptance-from FILE with --steps-from FIT "
            "and --chain N if needed"
        )
    folder, out = Path(args.profile), out_file(args.out, "fit.json")
    fit = fit_profile(folder)
    note = measured_note(fit.measured)
    if note:
        say(f"{folder}: {note}")
    fit.save(out, inputs={"profile": folder / PROFILE_FILE, "steps": folder / STEPS_FILE})
    emit(args, {"out": out, **_payload(fit)}, lambda: f"{_as_text(fit)}\nwrote {out}")


def _import_acceptance(args: argparse.Namespace) -> None:
    from pathlib import Path

    from codesign.cli.fit_argument import fit_from_args
    from codesign.importers import agreement_model, imported_fit, read_summary

    if args.profile is not None:
        raise UsageError("give PROFILE or --acceptance-from FILE, not both")
    steps, steps_file = fit_from_args(argparse.Namespace(fit=args.steps_from))
    summary = read_summary(args.acceptance_from, chain=args.chain)
    out = out_file(args.out, "fit.json")
    if out.resolve() == steps_file.resolve():
        raise UsageError(f"--out {out} would replace the fit that the step times come from")
    for note in summary.notes:
        say(f"{args.acceptance_from}: {note}")
    fit, model = imported_fit(steps, summary), agreement_model(steps, summary)
    fit.save(out, inputs={"steps": steps_file, "acceptance": Path(args.acceptance_from)})
    payload = {
        "out": out,
        "target": fit.target,
        "draft": fit.draft,
        "origin": fit.origin,
        "acceptance_origin": fit.acceptance_origin,
        "summary": summary,
        "hits_after_run": model.hits,
        "acceptance_error": fit.errors["acceptance"],
        "calibration": fit.calibration,
    }
    emit(args, payload, lambda: f"{_imported_text(steps, summary, model)}\nwrote {out}")


def _imported_text(steps: Fit, summary: AcceptanceSummary, model: RunModel) -> str:
    """Tokens per round of chains, measured there and as the model has them."""
    from codesign.importers.run_model import template_shape

    before = template_shape(steps.acceptance, max(_SHOWN_CHAINS))
    chains = sorted({*_SHOWN_CHAINS, summary.chain})
    rows = [
        [
            chain,
            summary.length if chain == summary.chain else None,
            model.acceptance_length(chain),
            before.acceptance_length(chain),
        ]
        for chain in chains
    ]
    counted = "" if summary.num_rounds is None else f" over {summary.num_rounds:,.0f} rounds"
    heads = ["draft tokens", "measured there", "this fit", "step times' fit"]
    return "\n".join(
        [
            f"{summary.source}: {summary.length:.3f} tokens per round{counted}",
            "",
            table(heads, rows, "tokens per round of a chain, bonus token included"),
            "",
            "ranks beyond the first and confidences: of recorded tokens that agreed, or did not",
            f"models and step times: {steps.target} with {steps.draft}, {steps.origin}",
        ]
    )


def _payload(fit: Fit) -> dict[str, Any]:
    acceptance = fit.acceptance
    return {
        "target": fit.target,
        "draft": fit.draft,
        "temperature": fit.temperature,
        "origin": fit.origin,
        "costs": fit.costs,
        "errors": fit.errors,
        "visit_spread": fit.visit_spread,
        "steps": fit.steps,
        "calibration": fit.calibration_fit,
        "acceptance": {
            "num_tokens": acceptance.num_tokens,
            "top_1": acceptance.hit_rate(1),
            "top_4": acceptance.hit_rate(4),
            "by_category": {
                name: {"top_1": acceptance.hit_rate(1, name), "top_4": acceptance.hit_rate(4, name)}
                for name in acceptance.categories
            },
        },
    }


def _as_text(fit: Fit) -> str:
    title = f"{fit.target} with draft {fit.draft} at temperature {fit.temperature:g}"
    return "\n".join([title, "", _step_table(fit), "", _constant_table(fit), "", _token_table(fit)])


def _step_table(fit: Fit) -> str:
    """Milliseconds without context at 1, 4 and 8 rows; of prefills at 64 and 256."""
    from codesign.fit.steps import MAX_LINE_ERROR

    rows = []
    for name, step in fit.steps.items():
        label, _, op = name.partition("/")
        at = [64, 256, None] if "prefill" in op else [1, 4, 8]
        times = [None if n is None else step.time(n) * 1e3 for n in at]
        line, chosen = step.held_out["line"], step.held_out[step.form]
        errors = [f"{line.mean:.1%}", step.form, f"{chosen.median:.1%} / {chosen.max:.0%}"]
        rows.append([label, op, step.time.alpha * 1e6, *times, *errors])
    return table(
        ["workers", "step", "us/context", "1 (64)", "4 (256)", "8 ms", "line", "form", "error"],
        rows,
        "ms of 1, 4, 8 rows (prefills: 64, 256); mean held-out error of a line; the form used (not "
        f"the line if that is above {MAX_LINE_ERROR:.0%}), its median / max held-out error",
    )


def _constant_table(fit: Fit) -> str:
    rows = [
        [
            label,
            cost.reroot * 1e3,
            cost.link * 1e3 if "+" in label else None,
            cost.slowdown if "+" in label else None,
            f"{fit.visit_spread[label]:.1%}" if label in fit.visit_spread else None,
        ]
        for label, cost in fit.costs.items()
    ]
    return table(
        ["workers", "re-root ms", "message ms", "loss per s of drafting", "another visit, +-"],
        rows,
        "what the target loses per second of drafting beside it; how far steps of a further visit "
        "are off",
    )


def _token_table(fit: Fit) -> str:
    acceptance, checked = fit.acceptance, fit.calibration_fit
    kinds = [("all", None), *((name, name) for name in acceptance.categories)]
    text = table(
        ["prompts", "in top 1", "in top 4"],
        [
            [name, acceptance.hit_rate(1, kind), acceptance.hit_rate(4, kind)]
            for name, kind in kinds
        ],
        f"agreement over {acceptance.num_tokens:,} tokens",
    )
    if checked is None:
        return text
    after = "-" if checked.error_after is None else f"{checked.error_after:.3f}"
    slope, intercept = fit.calibration.slope, fit.calibration.intercept
    return (
        f"{text}\nconfidences are calibrated with slope {slope:.3g}, intercept {intercept:.3g}:\n"
        f"calibration error {checked.error_before:.3f} before, {after} after, on requests not "
        "fitted to"
    )
