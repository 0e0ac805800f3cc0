"""The flags by which every verb that takes a trace names and changes it."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from codesign.cli.argument_types import above_0, non_negative, positive
from codesign.cli.output import say
from codesign.errors import UsageError

if TYPE_CHECKING:
    from codesign.traces import Trace


def add_trace_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add ``--trace`` and the flags that change it; read them with ``trace_from_args``."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--trace", required=required, metavar="TRACE", help="a file, or a name from trace list"
    )
    add_change_arguments(group)


def trace_from_args(args: argparse.Namespace, *, most: int | None = None) -> Trace:
    """Return the trace with the changes that were asked for; say every note on stderr.

    Changes are made in this order: jitter, slice, number of requests, rate, lengths. So what is
    said of rates and lengths is of the requests that are left.

    Args:
        args: Parsed.
        most: Requests where ``--max-requests`` does not say; None for all.

    Raises:
        UsageError: If a flag does not parse.
        InputError: If the trace cannot be used.
    """
    trace = changed_trace(args, most=most)
    for note in trace.notes:
        say(f"trace {trace.name}: {note}")
    return trace


def check_targets(args: argparse.Namespace, trace: Trace) -> None:
    """A trace whose requests have TPOT targets of their own needs one for the others.

    If there are no others it is the longest of theirs: each is held to its own.

    Raises:
        UsageError: If ``--slo-tpot-ms`` is missing.
    """
    from codesign.records import own_targets

    own = own_targets(trace.requests)
    known = [target for target in own if target is not None]
    if args.slo_tpot_ms is None and known:
        if len(known) == len(own):
            args.slo_tpot_ms = 1000 * max(known)
            return
        raise UsageError(
            f"requests of trace {trace.name} have TPOT targets of their own, so the others need "
            "one, too: --slo-tpot-ms MS"
        )


def add_change_arguments(group: Any) -> None:
    """Add the flags that change a trace; ``changed_trace`` reads them."""
    group.add_argument(
        "--slice",
        metavar="START:DURATION",
        help="only this time span, in seconds, shifted to start at 0",
    )
    group.add_argument(
        "--rate-scale", type=above_0, metavar="X", help="X times as many requests per second"
    )
    group.add_argument(
        "--length-scale",
        metavar="X[:Y]",
        help="multiply prompt lengths by X, output lengths by Y (X)",
    )
    group.add_argument("--max-prompt", type=positive, metavar="N", help="cut prompts to N tokens")
    group.add_argument("--max-output", type=positive, metavar="N", help="cut outputs to N tokens")
    group.add_argument(
        "--max-requests", type=positive, metavar="N", help="only the first N requests"
    )
    group.add_argument(
        "--jitter",
        type=non_negative,
        metavar="SEED",
        help="spread requests with equal timestamps over the clock tick, with this seed",
    )


def changed_trace(args: argparse.Namespace, *, most: int | None = None) -> Trace:
    """Return the trace with the changes that were asked for, as ``trace_from_args`` does."""
    from codesign.traces import load_trace

    window = None if args.slice is None else parse_pair("--slice", args.slice, "START:DURATION")
    scales = (1.0, 1.0)
    if args.length_scale is not None:
        text = args.length_scale
        scales = parse_pair("--length-scale", text, "X or X:Y", is_one_enough=True)
        if not 0 < min(scales) <= max(scales) < math.inf:
            raise UsageError(f"--length-scale must be above 0 and finite, not '{text}'")
    trace = load_trace(args.trace)
    if args.jitter is not None:
        trace = trace.spread_ticks(args.jitter)
    if window is not None:
        trace = trace.slice(*window)
    limit = most if args.max_requests is None else args.max_requests
    if limit is not None:
        trace = trace.head(limit)
    if args.rate_scale is not None:
        trace = trace.scale_rate(args.rate_scale)
    return trace.scale_lengths(
        prompt=scales[0], output=scales[1], max_prompt=args.max_prompt, max_output=args.max_output
    )


def parse_pair(
    flag: str, text: str, form: str, *, is_one_enough: bool = False
) -> tuple[float, float]:
    """Return the two numbers of a flag such as START:DURATION, or one for both.

    Raises:
        UsageError: If they are not such.
    """
    try:
        numbers = [float(number) for number in text.split(":")]
        first, second = 2 * numbers if is_one_enough and len(numbers) == 1 else numbers
    except ValueError:
        first = second = math.nan
    if math.isnan(first + second):
        raise UsageError(f"{flag} takes {form} in numbers, not '{text}'")
    return first, second
