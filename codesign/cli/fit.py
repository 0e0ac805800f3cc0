"""``codesign fit``: turn a profile into step-time and acceptance models."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from codesign.cli.output import add_output_arguments, emit, table

if TYPE_CHECKING:
    from codesign.fit import Fit

_EXAMPLES = """\
examples:
  codesign fit profile --out fit.json
  codesign fit profile --out fit.json --json
"""


def add_parser(subparsers: Any) -> None:
    """Add ``codesign fit``."""
    parser = subparsers.add_parser(
        "fit",
        help="turn a profile into step-time and acceptance models",
        description="Fit step times, acceptance and the draft's calibration to a profile, and say "
        "how far off each is on measurements that it has not seen.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("profile", metavar="PROFILE", help="folder that codesign profile wrote")
    output = parser.add_argument_group("files")
    output.add_argument(
        "--out",
        default="fit.json",
        metavar="FILE",
        help="the fit; the recorded acceptance is put beside it (fit.json)",
    )
    add_output_arguments(parser)
    parser.set_defaults(func=make_fit)


def make_fit(args: argparse.Namespace) -> None:
    """Fit a profile and print how good the fit is."""
    from pathlib import Path

    from codesign.fit import PROFILE_FILE, STEPS_FILE, fit_profile

    folder, out = Path(args.profile), Path(args.out)
    fit = fit_profile(folder)
    fit.save(out, inputs={"profile": folder / PROFILE_FILE, "steps": folder / STEPS_FILE})
    emit(args, {"out": out, **_payload(fit)}, lambda: f"{_as_text(fit)}\nwrote {out}")


def _payload(fit: Fit) -> dict[str, Any]:
    acceptance = fit.acceptance
    return {
        "target": fit.target,
        "draft": fit.draft,
        "temperature": fit.temperature,
        "origin": fit.origin,
        "costs": fit.costs,
        "errors": fit.errors,
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
        f"the line\nif that is above {MAX_LINE_ERROR:.0%}), its median / max held-out error",
    )


def _constant_table(fit: Fit) -> str:
    rows = [
        [
            label,
            cost.reroot * 1e3,
            cost.link * 1e3 if "+" in label else None,
            cost.slowdown if "+" in label else None,
        ]
        for label, cost in fit.costs.items()
    ]
    return table(
        ["workers", "re-root ms", "message ms", "target's loss per second of drafting"], rows
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
        f"{text}\nconfidences are calibrated with slope {slope:.3g} and intercept {intercept:.3g}:\n"
        f"calibration error {checked.error_before:.3f} before, {after} after, on requests not "
        "fitted to"
    )
