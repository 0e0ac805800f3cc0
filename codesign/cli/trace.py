"""``codesign trace``: list, inspect, synthesise and fetch request traces."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from codesign.cli.argument_types import above_0, non_negative, out_file, positive, variation
from codesign.cli.output import add_output_arguments, emit, progress, say
from codesign.cli.tables import table
from codesign.cli.trace_argument import add_change_arguments, changed_trace
from codesign.errors import UsageError, counted

if TYPE_CHECKING:
    from codesign.traces import LengthSummary, Trace, TraceSummary

_EXAMPLES = """\
examples:
  codesign trace show conv-twin
  codesign trace show AzureLLMInferenceTrace_code.csv --slice 600:300 --rate-scale 0.5
  codesign trace synth bursty --duration 3600 --out bursty.parquet
  codesign trace show azure-conv --out conv.jsonl
  codesign trace fetch azure-conv
"""

_SPARK_WIDTH = 60
_SPARK = " .:-=+*#%@"  # from no request to the peak


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``codesign trace`` takes."""
    parser.description = "List, inspect, synthesise or fetch request traces."
    parser.epilog = _EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_list(actions)
    _add_show(actions)
    _add_synth(actions)
    _add_fetch(actions)


def _add_list(actions: Any) -> None:
    parser = actions.add_parser(
        "list",
        help="list bundled, cached and fetchable traces",
        description="List the traces that ship with codesign, are cached, or can be fetched.",
    )
    add_output_arguments(parser)
    parser.set_defaults(func=list_all)


def _add_show(actions: Any) -> None:
    parser = actions.add_parser(
        "show",
        help="check a trace and show its statistics",
        description="Check every row of a trace and show its statistics and notes.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("trace", metavar="TRACE", help="a file, or a name from trace list")
    add_change_arguments(parser.add_argument_group("changes to the trace"))
    _add_out(parser)
    add_output_arguments(parser)
    parser.set_defaults(func=show)


def _add_synth(actions: Any) -> None:
    parser = actions.add_parser(
        "synth",
        help="make a synthetic trace from published statistics",
        description="Make a synthetic trace: steady (Azure conversation), bursty (Azure coding) or "
        "low (Mooncake).",
        epilog=_EXAMPLES,
    )
    parser.add_argument("preset", metavar="PRESET", help="steady, bursty or low")
    parser.add_argument(
        "--seed", type=non_negative, default=1, help="seed of all random numbers (1)"
    )
    parser.add_argument("--duration", type=above_0, metavar="S", help="seconds (600)")
    parser.add_argument("--requests", type=positive, metavar="N", help="instead of --duration")
    parser.add_argument("--rate", type=above_0, metavar="R", help="requests/s (the published rate)")
    parser.add_argument(
        "--cv",
        type=variation,
        help="coefficient of variation of the gaps between arrivals (the published one)",
    )
    _add_out(parser)
    add_output_arguments(parser)
    parser.set_defaults(func=synth)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the trace as .parquet or .csv (ours), or as .jsonl (Mooncake, for other tools)",
    )


def _add_fetch(actions: Any) -> None:
    parser = actions.add_parser(
        "fetch",
        help="download a published trace into the cache",
        description="Download a published trace into the cache and check its sha256.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help="a name from trace list")
    add_output_arguments(parser)
    parser.set_defaults(func=fetch)


def list_all(args: argparse.Namespace) -> None:
    """Print bundled, cached and fetchable traces."""
    from codesign.traces.catalog import PUBLISHED, TWINS, cached_path

    rows = [
        {"name": twin, "state": "bundled", "bytes": None, "about": f"synthetic, preset {preset}"}
        for twin, preset in TWINS.items()
    ]
    for known in PUBLISHED:
        path = cached_path(known)
        is_cached = path.is_file()
        rows.append(
            {
                "name": known.name,
                "state": "cached" if is_cached else "fetchable",
                "bytes": path.stat().st_size if is_cached else known.size,
                "about": known.about,
                "licence": known.licence,
                "url": known.url,
                "sha256": known.sha256,
                "sha256_from": known.checksum_from,
                "path": path,
            }
        )
    emit(args, {"traces": rows}, lambda: _list_text(rows))


def show(args: argparse.Namespace) -> None:
    """Print the statistics and notes of a trace."""
    _check_out(args.out, reads=args.trace)
    _report(args, changed_trace(args))


def synth(args: argparse.Namespace) -> None:
    """Make a synthetic trace and print its statistics."""
    from codesign.traces.synth import synthesise

    _check_out(args.out)
    trace = synthesise(
        args.preset,
        num_requests=args.requests,
        duration=args.duration,
        rate=args.rate,
        cv=args.cv,
        seed=args.seed,
    )
    _report(args, trace)
    if args.out is None:
        say("nothing was written; to keep the trace add --out FILE.parquet")


def fetch(args: argparse.Namespace) -> None:
    """Download a published trace into the cache."""
    from codesign.traces.fetch import fetch_trace

    with progress(args) as report:
        fetched = fetch_trace(args.name, progress=report)
    verb = "already there" if fetched.was_there else "fetched"
    text = f"{fetched.name}: {verb}: {fetched.path}\n{fetched.check}"
    emit(args, {"trace": fetched}, text)


def _check_out(out: str | None, *, reads: str | None = None) -> None:
    """Refuse, before the work, what ``_write`` cannot write, or would write over what it reads."""
    if out is None:
        return
    if not out.endswith((".parquet", ".csv", ".jsonl")):
        raise UsageError(f"--out takes a name that ends in .parquet, .csv or .jsonl, not '{out}'")
    out_file(out, "trace.parquet", reads=(reads,))


def _report(args: argparse.Namespace, trace: Trace) -> None:
    from codesign.traces import summarise

    if args.out is not None:
        _write(trace, args.out)
    summary = summarise(trace)
    payload = {
        "name": trace.name,
        "source": trace.source,
        "sha256": trace.sha256,
        "notes": trace.notes,
        "summary": summary,
        "out": args.out,
    }
    emit(args, payload, lambda: _show_text(trace, summary, args.out))


def _write(trace: Trace, out: str) -> None:
    from codesign.traces import write_csv, write_parquet
    from codesign.traces.mooncake import write_mooncake

    if out.endswith(".jsonl"):
        if "hash_ids" not in trace.requests:
            say(f"trace {trace.name}: no prefix blocks, so every prompt in {out} gets its own")
        if "speculates" in trace.requests:
            say(f"trace {trace.name}: {out} does not say which requests are never drafted for")
        if "slo_tpot" in trace.requests:
            say(f"trace {trace.name}: {out} does not say which requests have targets of their own")
        write_mooncake(trace, out)
    else:
        (write_csv if out.endswith(".csv") else write_parquet)(trace, out)


def _list_text(rows: list[dict[str, Any]]) -> str:
    from codesign.artifacts import cache_dir

    cells = [[row["name"], row["state"], _megabytes(row["bytes"]), row["about"]] for row in rows]
    lines = [table(["name", "state", "size", "about"], cells)]
    lines += [f"cache  {cache_dir() / 'traces'}", "next   codesign trace show conv-twin"]
    return "\n".join(lines)


def _megabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:,.1f} MB"


def _show_text(trace: Trace, summary: TraceSummary, out: str | None) -> str:
    lines = [
        f"trace       {trace.name}",
        f"source      {trace.source}",
        f"sha256      {trace.sha256}",
        f"requests    {summary.num_requests:,} in {summary.duration:,.1f} s"
        + (f", {summary.rate:.4g} requests/s" if summary.duration else ""),
        f"arrivals    cv of gaps {summary.interarrival_cv:.3g}, at most "
        f"{summary.peak_requests:,} in one second",
        f"            [{_sparkline(trace)}]",
        f"prompt      {_length_text(summary.prompt)}",
        f"output      {_length_text(summary.output)}",
    ]
    if summary.prefix_hit_rate is not None:
        lines.append(
            f"prefix      {summary.prefix_hit_rate:.1%} of prompt blocks seen before"
            " (infinite cache)"
        )
    if summary.categories:
        shares = (f"{n} {c / len(trace):.0%}" for n, c in summary.categories.items())
        lines.append(f"categories  {', '.join(shares)}")
    if summary.tightest_target is not None:
        lines.append(
            f"targets     {counted(summary.own_targets, 'request')} with TPOT targets of their "
            f"own, {1e3 * summary.tightest_target:g} ms at least"
        )
    lines += [f"note        {note}" for note in trace.notes]
    if out is not None:
        lines.append(f"written     {out}")
    return "\n".join(lines)


def _length_text(lengths: LengthSummary) -> str:
    return (
        f"mean {lengths.mean:,.1f}, p50 {lengths.p50:,.0f}, p90 {lengths.p90:,.0f}, "
        f"p99 {lengths.p99:,.0f}, max {lengths.max:,}, {lengths.total:,} tokens in all"
    )


def _sparkline(trace: Trace) -> str:
    """Return requests over time as text, one column for an equal part of the duration."""
    import numpy as np

    arrival = trace.requests["arrival"].to_numpy()
    counts, _ = np.histogram(arrival, bins=_SPARK_WIDTH, range=(0, trace.duration or 1.0))
    # Upwards, so that only a part without any request is blank.
    levels = np.ceil(counts / counts.max() * (len(_SPARK) - 1)).astype(int)
    return "".join(_SPARK[level] for level in levels)
