"""``codesign export``: a plan as the nearest configuration of another engine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from codesign.cli.argument_types import positive
from codesign.cli.output import add_output_arguments, emit, progress, say
from codesign.cli.tables import wrapped

if TYPE_CHECKING:
    from codesign.export import Export
    from codesign.export.prediction import Forecast

_EXAMPLES = """\
examples:
  codesign export --plan plan.json --to vllm
  codesign export --plan plan.json --to sglang --candidate tree --draft-model Qwen/Qwen2-1.5B
"""


# A shell starts what is in its background deaf to Ctrl-C. `$!`: the one that `pids` may lack yet.
_END_TOGETHER = ["trap 'kill $pids $!' EXIT", "trap 'exit 130' INT TERM"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``codesign export`` takes."""
    parser.description = (
        "Write a candidate of a plan as the nearest configuration that another engine "
        "can run, list what that engine cannot express, and predict what that costs."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument("--plan", required=True, metavar="FILE", help="what codesign plan wrote")
    parser.add_argument(
        "--to", required=True, choices=("vllm", "sglang", "trtllm"), help="the engine"
    )
    parser.add_argument(
        "--candidate",
        default="",
        metavar="LABEL",
        help="another candidate of the plan, by label, policy or family (the chosen one)",
    )
    models = parser.add_argument_group("models, as Hugging Face names or folders")
    models.add_argument(
        "--target-model", type=_name, metavar="NAME", help="instead of the plan's target"
    )
    models.add_argument(
        "--draft-model", type=_name, metavar="NAME", help="instead of the plan's draft"
    )
    models.add_argument("--head", type=_name, metavar="NAME", help="EAGLE head, for eagle policies")
    machine = parser.add_argument_group("hardware")
    machine.add_argument(
        "--tensor-parallel",
        type=positive,
        metavar="N",
        help="GPUs of one copy of the models (the fastest number)",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--out", metavar="DIR", help="write commands and configuration files here")
    add_output_arguments(parser)
    parser.set_defaults(func=export)


def _name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must be a name or a folder, not '{text}'")
    return text


def export(args: argparse.Namespace) -> None:
    """Print the configuration, and write its files."""
    from codesign.export import ENGINES, Checkpoints, export_plan
    from codesign.fit import Fit
    from codesign.plan import Plan

    plan = Plan.load(args.plan)
    fit = Fit.load(plan.fit.check())
    with progress(args) as report:
        found = export_plan(
            plan,
            fit,
            ENGINES[args.to],
            candidate=args.candidate,
            checkpoints=Checkpoints(args.target_model, args.draft_model, args.head),
            tensor_parallel=args.tensor_parallel,
            progress=report,
        )
    payload = _payload(found, args)
    if args.out is not None:
        _write(found, payload, args.out)
    elif found.configuration.files and not args.json:
        say("the commands read files that --out DIR writes")
    emit(args, payload, lambda: _as_text(found, args))


def _write(found: Export, payload: dict[str, Any], out: str) -> None:
    from pathlib import Path

    from codesign.artifacts import to_json, write_text
    from codesign.run_directory import make_folder

    folder = Path(out)
    make_folder(folder)
    commands = found.configuration.commands
    script = ["#!/bin/sh", f"# {found.engine.title}: {found.scored.label}", "set -e"]
    if len(commands) > 1:
        script += _END_TOGETHER
    for command in commands:
        script += ["", f"# {command.role}", command.shell]
        if len(commands) > 1:
            script[-1] += ' &\npids="$pids $!"'
    if len(commands) > 1:
        script += ["", "wait"]
    write_text(folder / "serve.sh", "\n".join(script) + "\n")
    write_text(folder / "export.json", to_json(payload) + "\n")
    for name, text in found.configuration.files.items():
        write_text(folder / name, text)
    say(
        f"wrote {out}: serve.sh, export.json" + "".join(f", {n}" for n in found.configuration.files)
    )


def _payload(found: Export, args: argparse.Namespace) -> dict[str, Any]:
    configuration = found.configuration
    return {
        "plan": args.plan,
        "engine": found.engine.name,
        "checked_against": {"version": found.engine.version, "sources": found.engine.sources},
        "candidate": found.scored.label,
        "num_gpus": found.nearest.setup.num_gpus,
        "arguments": configuration.arguments,
        "commands": [
            {"role": c.role, "argv": c.argv, "environment": dict(c.environment)}
            for c in configuration.commands
        ],
        "files": configuration.files,
        "cannot_express": found.losses,
        "notes": found.notes,
        "prediction": _prediction(found),
        "better_candidate": found.better or None,
    }


def _prediction(found: Export) -> dict[str, Any] | None:
    forecast = found.forecast
    if forecast is None:
        return None
    return {
        "simulated_as": forecast.label,
        "num_seeds": forecast.num_seeds,
        "slower": forecast.slower,
        "planned": dict(forecast.planned),
        "exported": dict(forecast.exported),
        "note": forecast.note,
    }


def _as_text(found: Export, args: argparse.Namespace) -> str:
    from textwrap import indent

    engine, configuration = found.engine, found.configuration
    lines = [
        *wrapped("plan", f"{args.plan}: {found.scored.label}"),
        *wrapped("engine", f"{engine.title}, {engine.version}"),
        *wrapped("predicted", _forecast_text(found)),
        "",
    ]
    for command in configuration.commands:
        lines += [f"{command.role}:", indent(command.shell, "  "), ""]
    for name, text in configuration.files.items():
        lines += [f"{name}:", indent(text.rstrip("\n"), "  "), ""]
    if not found.losses:
        lines += wrapped("lost", "nothing: the engine does what the plan says")
    for loss in found.losses:
        lines += wrapped("lost", f"{loss.what} -> {loss.instead}")
    for note in found.notes:
        lines += wrapped("note", note)
    if found.better:
        lines += wrapped(
            "better",
            f"{engine.title} runs the policy and the split of {found.better} as planned, and they "
            f"are predicted to serve better than this: --candidate {found.better!r}",
        )
    return "\n".join(lines)


def _forecast_text(found: Export) -> str:
    forecast = found.forecast
    if forecast is None:
        return "nothing: the plan's fit has no step times for both models on the same GPUs"
    slower = forecast.slower
    if slower is None:
        return "nothing: too few requests finish"
    if forecast.exported == forecast.planned and not forecast.note:
        return f"as planned: {_figure_text(forecast)}"
    word = "slower" if slower >= 0 else "faster"
    note = f"; {forecast.note}" if forecast.note else ""
    return (
        f"{abs(slower):.0%} {word} than the plan's candidate by our model: "
        f"{_figure_text(forecast)} (simulated as {forecast.label}{note})"
    )


def _figure_text(forecast: Forecast) -> str:
    parts = []
    for name, title, factor, unit in (
        ("tpot_mean", "mean TPOT", 1000.0, "ms"),
        ("goodput", "goodput", 1.0, "requests/s"),
        ("acceptance_length", "accepted", 1.0, "tokens a round"),
    ):
        if name in forecast.exported and name in forecast.planned:
            here, there = (factor * f[name].value for f in (forecast.exported, forecast.planned))
            planned = "" if forecast.exported == forecast.planned else f" against {there:.4g}"
            parts.append(f"{title} {here:.4g}{planned} {unit}")
    return ", ".join(parts)
