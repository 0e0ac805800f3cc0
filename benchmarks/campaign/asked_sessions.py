"""Which sessions the flags of a campaign ask for, and whose requests these serve.

Imports no torch.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.campaign.expected_seconds import unit_seconds
from benchmarks.campaign.schedule import Session, Wanted, scheduled
from benchmarks.campaign.units import (
    FULL,
    LEADING,
    PAIRS,
    SMALL,
    Pair,
    Size,
    deployments,
    find_pair,
    grid,
)

SPARE = 1.1  # times the guess for --plans, which they may take


def sessions(args: argparse.Namespace) -> list[Session]:
    """What is to be measured, in order: the schedule, unless the flags name something else."""
    pairs = [p for p in PAIRS if p.is_inflated == (args.device == "cuda")]
    if args.pair:
        pairs = [find_pair(name) for name in args.pair]
    if not args.deployments and all(pair.is_inflated for pair in pairs):
        wanted = [w for w in scheduled(args.gpus, args.run_seconds) if w.pair in pairs]
    else:
        streams, batches, segments = args.plans or (LEADING, LEADING, 1)
        wanted = [
            Wanted(pair, label, args.run_seconds, segments, batches, streams)
            for pair in pairs
            for label in labels_of(args)
        ]
    return [_session(args, each) for each in wanted]


def _session(args: argparse.Namespace, wanted: Wanted) -> Session:
    size, seconds = size_of(args, wanted), wanted.run_seconds
    units = () if wanted.pair.name in args.profile_only else tuple(grid(wanted.label, size))
    if args.plans:
        leading = units[: sum(args.plans)]
        guess = sum(unit_seconds(work, wanted.pair) for work in leading)
        seconds = min(seconds, SPARE * guess)
    return Session(wanted.pair, wanted.label, units, seconds, size)


def size_of(args: argparse.Namespace, wanted: Wanted) -> Size:
    """Of the grid."""
    size = SMALL if args.small else FULL
    return replace(
        size,
        segments=wanted.segments,
        batches=wanted.batches,
        streams=wanted.streams,
        requests=wanted.share * args.requests * size.requests,
        seconds=args.replay_seconds,
    )


def seed_for(args: argparse.Namespace, pair: Pair) -> int:
    """Of what a pair serves and records: each pair of ``PAIRS`` its own, if one is named."""
    if args.seed is None:
        return 0
    return args.seed + (PAIRS.index(pair) if pair in PAIRS else 0)


def labels_of(args: argparse.Namespace) -> list[str]:
    """Deployments to measure."""
    return args.deployments.split(",") if args.deployments else deployments(args.gpus)
