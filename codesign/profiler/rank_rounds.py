"""What lies between the steps of a round on ranks, from rounds that are served.

Steps are timed by themselves, after something else was staged; links and re-roots are as short as
whoever waits for them is awake. So made-up requests are served by small trees and chains, and the
spans of their rounds are timings: a whole round holds what no part of it shows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from codesign.fit.round_costs import KEPT, MISSED, NODES
from codesign.fit.served_rounds import AHEAD
from codesign.policy.labels import parse_policy
from codesign.policy.speculation import drafting_of
from codesign.profiler.grids import MAX_REQUESTS
from codesign.profiler.link import single_timings

if TYPE_CHECKING:
    from codesign.profiler.rank_bench import RankBench

# Of the buckets that streams are served in, and none of the plans that a campaign holds out.
# Their rows get 2, 6 and 14 children: what a re-root takes by rows is told from that by nodes.
_TREES = ("tree-3x2x2", "tree-7x3x3", "tree-15x4x5")
_BATCHES = (MAX_REQUESTS, MAX_REQUESTS, MAX_REQUESTS // 2)  # the last has twice the rows
_PLAIN = (MAX_REQUESTS, MAX_REQUESTS // 2)  # requests that decode plainly at once
# Mean KV rows of these. Within a page or two of keys attention takes less than its fit says, which
# would count as time that running ahead saves: 55 to 80 us of an 8B's 140 on H200s.
_CONTEXT = 256
# Keeps most of what it grows from round to round, as the others seldom do where target and draft
# take turns: 6 to 15 of 130 rounds with a node or two said nothing of trees that keep a dozen.
_DEEP = "tree-3x2x7"
# Of each of its requests: made-up answers then repeat themselves as those of runs do, where trees
# grow to dozens of nodes each. In 40 tokens they had 12 to 20, half of a run's.
_DEEP_TOKENS = 80
_CHAINS = {"chain-2": 2, "chain-7": 7}  # forwards of a round
_CHAIN_TOKENS = 80  # up to eight a round
# Of a stream of trees: tokens of a request, and requests. Answers of these soon repeat themselves,
# and then every tree is a hit: one request of 80 tokens missed in none of 34 rounds on four H100s.
_SHORT = (16, 5)
_STEADY = (
    1.15  # quartiles of rounds; 188 of 189 kinds of rounds on H200s and an H100 had less than 1.08
)
_TRIES = 3


def loop_timings(bench: RankBench) -> list[pd.DataFrame]:
    """Rounds of one request and of many; twice in a profile, as the host has slow phases."""
    return [
        single_timings("loop", bench.loop_seconds(count)).assign(requests=count)
        for count in (1, MAX_REQUESTS)
    ]


def stream_timings(bench: RankBench) -> list[pd.DataFrame]:
    """Rounds of one request: the target's span, the re-root's and, of a split, links.

    Where target and draft take turns, the draft's span of chains, too: it tells what a row of
    forwards takes beside them. On a split it is that of rounds which begin with a lone forward.
    """
    is_split = bench.setup.draft_ranks > 0
    trees = {tree: _steady_rounds(bench, _policy(bench, tree), *_SHORT) for tree in _TREES}
    plain, chains = [], []
    if not is_split:
        plain = [_steady_rounds(bench, "plain")]
        chains = [_steady_rounds(bench, chain, _CHAIN_TOKENS) for chain in _CHAINS]
    # Not the last round of each request, a root alone: of one row it is plain decoding that tells.
    grown = [served.loc[served["rows"] > 1] for served in trees.values()]
    rounds = [_timings("round", served, ["target"]) for served in (*plain, *chains, *grown)]
    drafted = [_drafted(served, n) for served, n in zip(chains, _CHAINS.values(), strict=False)]
    missed = [_missed(trees[_TREES[0]], _TREES[0])] if is_split else []
    return [*rounds, *drafted, *missed, *_between(bench, trees)]


def batch_timings(bench: RankBench) -> list[pd.DataFrame]:
    """The re-root's span and links in rounds of up to ``MAX_REQUESTS``.

    Where target and draft take turns, the draft's span, too: of rows with few children and with
    many, which no timing of a step tells apart. No fit prices a child yet. And the target's of
    plain rounds, in which ranks run ahead of the host there.
    """
    counts = zip(_TREES, _BATCHES, strict=True)
    served = {tree: bench.served_rounds(_policy(bench, tree), n) for tree, n in counts}
    grown, plain = [], []
    if not bench.setup.draft_ranks:
        grown = [_grown(rounds, tree) for tree, rounds in served.items()]
        plain = [_steady_rounds(bench, "plain", batch=n, context=_CONTEXT) for n in _PLAIN]
        served[_DEEP] = bench.served_rounds(_DEEP, MAX_REQUESTS, _DEEP_TOKENS)
    ahead = [_timings(AHEAD, rounds, ["target"]) for rounds in plain]
    return [*grown, *ahead, *_between(bench, served)]


def _steady_rounds(
    bench: RankBench, policy: str, *asked: int, batch: int = 1, context: int | None = None
) -> pd.DataFrame:
    """Rounds that are served again where something disturbed them: the steadiest of three.

    They last a tenth of a second. On one H100 half of the plain rounds took up to 1.5 times as
    long as the others, and a prediction was 12 % too slow.
    """
    tries: list[pd.DataFrame] = []
    while len(tries) < _TRIES and all(_spread(rounds) > _STEADY for rounds in tries):
        tries.append(bench.served_rounds(policy, batch, *asked, context=context))
    return min(tries, key=_spread)


def _spread(rounds: pd.DataFrame) -> float:
    """By which factor quartiles of the target's span lie apart, among rounds of as many rows."""
    if rounds.empty:
        return 1.0
    usual = rounds["rows"].mode()[0]
    low, high = np.quantile(rounds.loc[rounds["rows"] == usual, "target"], [0.25, 0.75])
    return float(high / low)


def _policy(bench: RankBench, tree: str) -> str:
    return f"async-{tree}" if bench.setup.draft_ranks else tree


def _between(bench: RankBench, served: Mapping[str, pd.DataFrame]) -> list[pd.DataFrame]:
    """Rows of re-roots, and of messages on a split, of rounds by their tree."""
    frames = []
    for tree, found in served.items():
        fanout = _fanout(tree)
        rounds = found if bench.setup.draft_ranks else _after_another(found)
        rows = rounds["draft_rows"]
        timed = _timings("reroot", rounds, ["reroot"])
        kept = {name: rounds[name] for name in KEPT if name in rounds}
        frames.append(timed.assign(**{"rows": rows, NODES: fanout * rows}, **kept))
    if bench.setup.draft_ranks:
        links = ["link_there", "link_back"]
        frames += [_timings("link", rounds, links) for rounds in served.values()]
    return frames


def _after_another(rounds: pd.DataFrame) -> pd.DataFrame:
    """Rounds behind others of these, with the rows that the draft ran in the one before.

    Where target and draft take turns a round drafts after its re-root, which is of the trees that
    the round before has grown. A request's last round has a whole tree to drop, and drafts little.
    """
    before = rounds[["round", "draft_rows"]].shift(fill_value=-2)  # in front of them is none
    is_known = rounds["round"] - before["round"] == 1
    return rounds.assign(draft_rows=before["draft_rows"]).loc[is_known]


def _drafted(rounds: pd.DataFrame, forwards: int) -> pd.DataFrame:
    """Rows of the draft's span, of rounds with all their forwards; ``rows`` counts these."""
    whole = rounds.loc[rounds["num_expansions"] == forwards]
    spans = whole["draft"] + whole["link_back"]
    return _timings("drafted", whole.assign(rows=forwards, draft=spans), ["draft"])


def _missed(rounds: pd.DataFrame, tree: str) -> pd.DataFrame:
    """Rows of the draft's span, of rounds with one forward more than those beside the target.

    Their tree was dropped, and the candidates waited for a new one's root. It is the smallest tree:
    larger ones grow for longer than a small target's step, which is in the span, too.
    """
    lone = rounds["num_expansions"] == parse_policy(tree).expansions + 1
    seen = rounds["draft"] > 0.0  # of a host that looks late there is none
    return _timings(MISSED, rounds.loc[lone & seen], ["draft"])


def _grown(rounds: pd.DataFrame, tree: str) -> pd.DataFrame:
    """Rows of the draft's span, of rounds in which all requests grew whole trees.

    ``rows`` counts those of all forwards, and ``NODES`` their children.
    """
    spec = parse_policy(tree)
    rows = rounds["batch"] * (1 + spec.width * (spec.expansions - 1))
    whole = rounds.loc[
        (rounds["num_expansions"] == spec.expansions) & (rounds["draft_rows"] == rows)
    ]
    spans = whole["draft"] + whole["link_back"]
    timed = _timings("grown", whole.assign(rows=whole["draft_rows"], draft=spans), ["draft"])
    return timed.assign(**{NODES: _fanout(tree) * whole["draft_rows"]})


def _fanout(tree: str) -> int:
    """Children that each of its rows gets."""
    return drafting_of(parse_policy(tree)).fanout


def _timings(op: str, rounds: pd.DataFrame, spans: list[str]) -> pd.DataFrame:
    """Rows of steps.parquet, but for the deployment: the mean of some spans of each round."""
    shape = {"rows": rounds["rows"], "requests": rounds["batch"], "context": rounds["context"]}
    return pd.DataFrame(shape).assign(op=op, beside=False, seconds=rounds[spans].mean(axis=1))
