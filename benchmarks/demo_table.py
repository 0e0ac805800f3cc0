"""Predicted against measured for the demo's plan: runs in, JSON and the README's table out.

    python -m benchmarks.demo_table collect --plan demo/plan.json \
        --out benchmarks/results/demo_DATE.json RUNS ...
    python -m benchmarks.demo_table readme benchmarks/results/demo_DATE.json

RUNS are folders that ``codesign run --baselines --out RUNS`` wrote, one per repetition. ``readme``
rewrites the part of README.md between the markers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.pages import write_between
from codesign.plan import Plan
from codesign.run_directory import read_run

FIGURES = {"acceptance_length": (1.0, 2), "tpot_mean": (1e3, 1), "throughput": (1.0, 1)}
BEGIN, END = "<!-- demo table -->", "<!-- end of demo table -->"
README = Path(__file__).parents[1] / "README.md"


def collect(plan_path: Path, repetitions: list[Path]) -> dict[str, Any]:
    """Predictions of the plan and what each repetition measured, by candidate."""
    plan = Plan.load(plan_path)
    runs: dict[str, list[dict[str, Any]]] = {}
    about: dict[str, Any] = {}
    for repetition in repetitions:
        for folder in sorted(repetition.iterdir()):
            about = read_run(folder).summary
            runs.setdefault(about["label"], []).append(about["metrics"])
    rows = [
        {
            "label": label,
            "is_chosen": label == plan.chosen.label,
            **{
                name: {
                    "predicted": vars_of(plan.find(label).predicted[name]),
                    "measured": [metrics[name] for metrics in measured],
                }
                for name in FIGURES
            },
        }
        for label, measured in runs.items()
    ]
    hardware, created = about["hardware"], about["created"]
    return {
        "what": "the demo's plan on a CPU: predictions, and measured runs in order of repetition",
        "created": created,
        "hardware": hardware,
        "command": "codesign run --plan demo/plan.json --baselines",
        "codesign_version": about["codesign_version"],
        "num_requests": plan.num_requests,
        "notes": list(plan.notes),
        "rows": sorted(rows, key=lambda row: row["tpot_mean"]["predicted"]["value"]),
    }


def vars_of(interval: Any) -> dict[str, float]:
    """An interval's fields."""
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def table(result: dict[str, Any]) -> str:
    """Markdown: predicted, median measured with its range, error of the median."""
    lines = [
        "| plan | acceptance length | TPOT, ms | tokens/s |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [cell(row[name], *how) for name, how in FIGURES.items()]
        mark = " (chosen)" if row["is_chosen"] else ""
        lines.append(f"| {row['label']}{mark} | " + " | ".join(cells) + " |")
    count = len(result["rows"][0]["tpot_mean"]["measured"])
    lines += [
        "",
        f"Predicted / median measured [range of {count} runs], error of the prediction. "
        f"{result['num_requests']} requests, SmolLM2-135M with the shipped draft, float32, "
        f"{result['hardware']['cpu']}, {result['hardware']['cores']} cores, "
        f"{result['created'][:10]}.",
    ]
    return "\n".join(lines)


def cell(figure: dict[str, Any], scale: float, digits: int) -> str:
    """One figure of one plan."""
    predicted, measured = figure["predicted"]["value"], figure["measured"]
    median = statistics.median(measured)
    numbers = [f"{x * scale:.{digits}f}" for x in (predicted, median, min(measured), max(measured))]
    error = predicted / median - 1
    spread = "" if numbers[2] == numbers[3] else f" [{numbers[2]}, {numbers[3]}]"
    return f"{numbers[0]} / {numbers[1]}{spread}, {error:+.0%}"


def main() -> None:
    """Collect runs, or write the README's table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    collecting = actions.add_parser("collect")
    collecting.add_argument("--plan", type=Path, required=True)
    collecting.add_argument("--out", type=Path, required=True)
    collecting.add_argument("runs", type=Path, nargs="+")
    readme = actions.add_parser("readme")
    readme.add_argument("result", type=Path)
    args = parser.parse_args()
    if args.action == "collect":
        result = collect(args.plan, args.runs)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    else:
        result = json.loads(args.result.read_text(encoding="utf-8"))
        write_between(README, BEGIN, END, table(result))


if __name__ == "__main__":
    main()
