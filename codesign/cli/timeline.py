"""``codesign timeline``: write runs as a timeline that Perfetto opens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from codesign.cli.argument_types import out_file
from codesign.cli.output import add_output_arguments, emit
from codesign.cli.trace_argument import parse_pair
from codesign.errors import counted

if TYPE_CHECKING:
    from codesign.records import RunRecords

_EXAMPLES = """\
examples:
  codesign timeline runs/simulated --out timeline.json
  codesign timeline runs/simulated runs/measured --slice 0:30 --out timeline.json.gz
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``codesign timeline`` takes."""
    parser.description = (
        "Write runs, simulated or measured, as one Chrome trace in which all of them "
        "start at 0. Open it at ui.perfetto.dev or in chrome://tracing."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUNDIR",
        help="folders of codesign run, or of codesign simulate --out",
    )
    parser.add_argument(
        "--slice",
        metavar="START:DURATION",
        help="only this time span, in seconds; hours are too much for most viewers",
    )
    output = parser.add_argument_group("files")
    output.add_argument(
        "--out",
        default="timeline.json",
        metavar="FILE",
        help="the trace, compressed if it ends in .gz (timeline.json)",
    )
    add_output_arguments(parser)
    parser.set_defaults(func=export)


def export(args: argparse.Namespace) -> None:
    """Write the timeline and say how much is in it."""
    from pathlib import Path

    from codesign.run_directory import read_run
    from codesign.timeline import TimelineRun, write_timeline

    window = None
    if args.slice is not None:
        window = parse_pair("--slice", args.slice, "START:DURATION")
    files = [file for folder in args.runs for file in Path(folder).glob("*")]
    out = out_file(args.out, "timeline.json", reads=files)
    runs = []
    for folder in args.runs:
        stored = read_run(folder)
        label = stored.summary.get("label", folder)
        runs.append(TimelineRun(f"{label} ({stored.origin}, {folder})", stored.records))
    if window is not None:
        _check_window(window, [run.records for run in runs])
    num_events = write_timeline(out, runs, window=window)
    payload = {"out": out, "num_events": num_events, "runs": [run.name for run in runs]}
    what = f"{num_events:,} events of {counted(len(runs), 'run')}"
    emit(args, payload, f"wrote {out}: {what}; open it at ui.perfetto.dev")


def _check_window(window: tuple[float, float], runs: Sequence[RunRecords]) -> None:
    from codesign.errors import InputError

    start, duration = window
    longest = max(records.seconds for records in runs)
    if duration <= 0 or start >= longest or start + duration <= 0:
        raise InputError(
            f"nothing happens from {start:g} s for {duration:g} s; the longest run takes "
            f"{longest:.1f} s. Another: --slice START:DURATION"
        )
