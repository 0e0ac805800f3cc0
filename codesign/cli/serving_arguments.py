"""Flags of the verbs that simulate: targets, how memory and steps are shared between requests."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from codesign.cli.argument_types import above_0, percentile, positive

if TYPE_CHECKING:
    from codesign.config import SLO, Serving
    from codesign.fit import Fit


def add_serving_arguments(group: Any) -> None:
    """Add the flags to a parser or one of its groups; read them with ``serving_from_args``."""
    group.add_argument(
        "--max-kv-tokens",
        type=positive,
        metavar="N",
        help="memory of a replica, in KV rows (as in the fit, else 4096)",
    )
    group.add_argument(
        "--prefill-chunk",
        type=positive,
        metavar="N",
        help="run prompts in chunks of N tokens that share steps with decoding (whole prompts "
        "between steps)",
    )
    group.add_argument(
        "--prefix-cache", action="store_true", help="reuse the KV rows of shared prompt prefixes"
    )
    group.add_argument(
        "--preemption",
        action="store_true",
        help="allocate KV rows as requests grow; evict the youngest request when they run out",
    )
    group.add_argument(
        "--routing",
        choices=("round-robin", "least-loaded", "prefix-aware"),
        default="round-robin",
        help="how requests are assigned to replicas (round-robin)",
    )
    group.add_argument(
        "--scheduling",
        choices=("fcfs", "slo"),
        default="fcfs",
        help="who joins the batch next: first come, first served, or so that as many requests as "
        "possible keep the SLO's targets (fcfs)",
    )


def serving_from_args(args: argparse.Namespace, fit: Fit) -> Serving:
    """What the flags ask for; a limit of KV rows where neither they nor the fit have one."""
    from codesign.config import Serving
    from codesign.planner.defaults import bounded

    serving = Serving(
        max_kv_tokens=args.max_kv_tokens,
        prefill_chunk=args.prefill_chunk,
        prefix_cache=args.prefix_cache,
        preemption=args.preemption,
        routing=args.routing,
        scheduling=args.scheduling,
    )
    return bounded(serving, fit)


def add_slo_arguments(parser: argparse.ArgumentParser, *, with_percentile: bool) -> None:
    """Add the targets; read them with ``slo_from_args``."""
    group = parser.add_argument_group("SLO")
    for flag, words in (
        ("ttft", "time to first token"),
        ("tpot", "time per output token after the first"),
    ):
        group.add_argument(f"--slo-{flag}-ms", type=above_0, metavar="MS", help=words)
    if with_percentile:
        group.add_argument(
            "--slo-percentile",
            type=percentile,
            default=90.0,
            metavar="P",
            help="percentile for each target (90)",
        )


def slo_from_args(args: argparse.Namespace) -> SLO:
    """The targets, in seconds."""
    from codesign.config import SLO

    ttft, tpot = (
        None if milliseconds is None else milliseconds / 1000.0
        for milliseconds in (args.slo_ttft_ms, args.slo_tpot_ms)
    )
    return SLO(ttft=ttft, tpot=tpot, percentile=getattr(args, "slo_percentile", 90.0))
