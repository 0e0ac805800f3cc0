"""What lies between the steps of a round on ranks, from rounds that are served.

Steps are timed by themselves, after something else was staged; links and re-roots are as short as
whoever waits for them is awake. So made-up requests are served by small trees and chains, and the
spans of their rounds are timings: a whole round holds what no part of it shows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from codesign.profiler.steps import MAX_REQUESTS

if TYPE_CHECKING:
    from codesign.profiler.rank_bench import RankBench

# Of the buckets that streams are served in, and none of the plans that a campaign holds out.
_TREES = ("tree-3x2x2", "tree-7x3x3")
_CHAINS = {"chain-2": 2, "chain-7": 7}  # forwards of a round
_CHAIN_TOKENS = 80  # up to eight a round


def stream_timings(bench: RankBench) -> list[pd.DataFrame]:
    """Rounds of one request: the target's span, the re-root's and, of a split, links.

    Where target and draft take turns, the draft's span of chains, too: it tells what a row of
    forwards takes beside them.
    """
    trees = [bench.served_rounds(_policy(bench, tree), 1) for tree in _TREES]
    plain, chains = [], []
    if not bench.setup.draft_ranks:
        plain = [bench.served_rounds("plain", 1)]
        chains = [bench.served_rounds(chain, 1, _CHAIN_TOKENS) for chain in _CHAINS]
    rounds = [_timings("round", served, ["target"]) for served in (*plain, *chains, *trees)]
    drafted = [_drafted(served, n) for served, n in zip(chains, _CHAINS.values(), strict=False)]
    return [*rounds, *drafted, *_between(bench, trees)]


def batch_timings(bench: RankBench) -> list[pd.DataFrame]:
    """The re-root's span and links in rounds of up to ``MAX_REQUESTS``."""
    policies = [_policy(bench, tree) for tree in _TREES]
    return _between(bench, [bench.served_rounds(policy, MAX_REQUESTS) for policy in policies])


def _policy(bench: RankBench, tree: str) -> str:
    return f"async-{tree}" if bench.setup.draft_ranks else tree


def _between(bench: RankBench, served: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    frames = [
        _timings("reroot", rounds, ["reroot"]).assign(rows=rounds["draft_rows"])
        for rounds in served
    ]
    if bench.setup.draft_ranks:
        frames += [_timings("link", rounds, ["link_there", "link_back"]) for rounds in served]
    return frames


def _drafted(rounds: pd.DataFrame, forwards: int) -> pd.DataFrame:
    """Rows of the draft's span, of rounds with all their forwards; ``rows`` counts these."""
    whole = rounds.loc[rounds["num_expansions"] == forwards]
    spans = whole["draft"] + whole["link_back"]
    return _timings("drafted", whole.assign(rows=forwards, draft=spans), ["draft"])


def _timings(op: str, rounds: pd.DataFrame, spans: list[str]) -> pd.DataFrame:
    """Rows of steps.parquet, but for the deployment: the mean of some spans of each round."""
    shape = {"rows": rounds["rows"], "requests": rounds["batch"], "context": rounds["context"]}
    return pd.DataFrame(shape).assign(op=op, beside=False, seconds=rounds[spans].mean(axis=1))
