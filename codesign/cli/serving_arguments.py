"""Flags of the verbs that simulate: how memory and steps are shared between requests."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from codesign.cli.output import positive

if TYPE_CHECKING:
    from codesign.config import Serving
    from codesign.fit import Fit

DEFAULT_MAX_KV_TOKENS = 4096  # where a fit does not say, as on a CPU


def add_serving_arguments(group: Any) -> None:
    """Add the flags to a parser or one of its groups; read them with ``serving_from_args``."""
    group.add_argument(
        "--max-kv-tokens",
        type=positive,
        metavar="N",
        help=f"KV rows of a replica (what the fit says, else {DEFAULT_MAX_KV_TOKENS})",
    )
    group.add_argument(
        "--prefill-chunk",
        type=positive,
        metavar="N",
        help="prompt tokens that share a step with decoding (whole prompts between steps)",
    )
    group.add_argument(
        "--prefix-cache", action="store_true", help="keep KV rows of prompts for the same prefix"
    )
    group.add_argument(
        "--preemption",
        action="store_true",
        help="take KV rows as requests grow, evict the youngest when they run out",
    )
    group.add_argument(
        "--routing",
        choices=("round-robin", "least-loaded", "prefix-aware"),
        default="round-robin",
        help="which replica a request goes to (round-robin)",
    )


def serving_from_args(args: argparse.Namespace, fit: Fit) -> Serving:
    """What the flags ask for; a limit of KV rows where neither they nor the fit have one."""
    from codesign.config import Serving

    rows = args.max_kv_tokens
    if rows is None and not knows_memory(fit):
        rows = DEFAULT_MAX_KV_TOKENS
    return Serving(
        max_kv_tokens=rows,
        prefill_chunk=args.prefill_chunk,
        prefix_cache=args.prefix_cache,
        preemption=args.preemption,
        routing=args.routing,
    )


def knows_memory(fit: Fit) -> bool:
    """Whether a fit says how many KV rows its machine holds, in every deployment."""
    return all(cost.kv_tokens is not None for cost in fit.costs.values())
