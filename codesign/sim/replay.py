"""One request of a trace again, round by round, with the draft trees that a simulation forgets.

The policy's own objects play it alone on the machine, on the draws that ``simulate`` gives it with
the same seed. A policy that divides a round's rows among requests gives all of them to this one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from codesign.config import SLO, Serving
from codesign.errors import InputError
from codesign.policy.protocol import Candidates, DraftSide
from codesign.policy.tree import DraftTree
from codesign.sim import cost_of
from codesign.sim.acceptance import TRUE_TOKEN, SyntheticDrafter
from codesign.sim.batches import hears_early, policy_of
from codesign.sim.played import PlayedBatch
from codesign.sim.requests import categories_of
from codesign.sim.stretches import Luck
from codesign.sim.timing import Spans, Timing, timing_of
from codesign.sim.work import Entering

if TYPE_CHECKING:
    import pandas as pd

    from codesign.candidate import Candidate
    from codesign.fit import Fit


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    """The draft tree of a round when its verification ends. Node 0 is the root.

    Attributes:
        number: From 0.
        spans: When it is alone on the machine, seconds.
        parents: (N,) node before each; -1 for the root.
        depths: (N,) draft tokens from the root.
        chances: (N,) that the target takes all tokens up to the node, as the policy believes.
        has_kv: (N,) whether the draft model has run on it.
        num_sent_from: Nodes that were there when the candidates were sent; later ones grew while
            the target verified.
        verified: Nodes that the target verified, root included; empty where the draft answered
            before the first token was known, so that the target verified that token alone.
        accepted: Nodes on the path that the target took, without the root.
        kept: Nodes that the draft keeps for the next round; the rest is dropped.
        is_hit: All emitted tokens were in the tree. False keeps nothing.
        num_emitted: Tokens emitted, the target's own included.
    """

    number: int
    spans: Spans
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    chances: tuple[float, ...]
    has_kv: tuple[bool, ...]
    num_sent_from: int
    verified: frozenset[int]
    accepted: tuple[int, ...]
    kept: frozenset[int]
    is_hit: bool
    num_emitted: int


def replay(
    requests: pd.DataFrame,
    request_id: int,
    candidate: Candidate,
    fit: Fit,
    *,
    serving: Serving,
    slo: SLO | None = None,
    seed: int,
) -> list[ReplayedRound]:
    """The rounds of one request.

    Args:
        requests: All of the trace, as ``simulate`` takes them.
        request_id: Row of the one to play.
        candidate: What serves it.
        fit: Step times and recorded acceptance.
        serving: How steps are shared.
        slo: Steers policies that serve an SLO.
        seed: Of the acceptance draws.

    Raises:
        InputError: If the candidate has no draft model, there is no such request, or it asked
            not to be drafted for.
    """
    if not candidate.speculation.has_draft:
        raise InputError(
            f"{candidate.label} drafts nothing, so that there is no tree. Choose another candidate"
        )
    if not 0 <= request_id < len(requests):
        raise InputError(f"there are requests 0 to {len(requests) - 1}, got {request_id}")
    row, categories = requests.iloc[request_id], categories_of(requests)
    if not row.get("speculates", True):
        raise InputError(
            f"request {request_id} is never drafted for, so that there is no tree. Choose another "
            "request"
        )
    prompt_tokens, output_tokens = int(row["prompt_tokens"]), int(row["output_tokens"])
    if output_tokens < 2:
        return []
    cost = cost_of(fit, candidate.deployment.unit.label)
    policy = policy_of(candidate.speculation, fit, cost, slo, serving)
    side = _WatchedSide(policy)
    luck = Luck.of(fit.answers, categories, requests["output_tokens"].tolist(), seed)
    batch = PlayedBatch(
        side,
        SyntheticDrafter(fit.answers, seed, luck.path),
        hears_early=hears_early(candidate, serving),
    )
    cost = cost.drafting(policy.drafting)
    timing = timing_of(cost, is_apart=candidate.deployment.draft_workers > 0)
    entering = Entering(request_id, categories[request_id], prompt_tokens, output_tokens)
    return _play(side, batch, timing, entering)


class _WatchedSide(DraftSide):
    """A draft side that remembers what it sent for its one request."""

    sent: Candidates
    num_nodes: int

    def candidates(self, round_number: int) -> Candidates:
        """See DraftSide.candidates."""
        self.sent = super().candidates(round_number)
        self.num_nodes = len(self.tree(self.request_ids[0]))
        return self.sent


def _play(
    side: _WatchedSide,
    batch: PlayedBatch,
    timing: Timing,
    entering: Entering,
) -> list[ReplayedRound]:
    rounds: list[ReplayedRound] = []
    committed, now = entering.prompt_tokens + 1, 0.0  # the first token came with the prompt
    end, joining = entering.prompt_tokens + entering.output_tokens, [entering]
    while committed < end:
        work = batch.begin(joining, now)
        spans = timing.spans(now, 0.0, work)
        tree = side.tree(entering.request_id)
        num_emitted, _ = batch.end()
        rounds.append(_round(len(rounds), spans, side, tree, committed, num_emitted))
        committed += num_emitted
        now, joining = now + spans.seconds, []
    return rounds


def _round(
    number: int,
    spans: Spans,
    side: _WatchedSide,
    tree: DraftTree,
    committed: int,
    num_emitted: int,
) -> ReplayedRound:
    unknown = committed - tree.base_len  # tokens that the draft had not heard of
    path = _descend(tree, [TRUE_TOKEN] * (unknown + num_emitted))
    again = copy.deepcopy(tree).reroot([TRUE_TOKEN] * (unknown + num_emitted))
    return ReplayedRound(
        number=number,
        spans=spans,
        parents=tuple(tree.parents),
        depths=tuple(tree.depths),
        chances=tuple(math.exp(weight) for weight in tree.log_weights),
        has_kv=tuple(slot >= 0 for slot in tree.slots),
        num_sent_from=side.num_nodes,
        verified=frozenset() if unknown else _sent_nodes(tree, side.sent),
        accepted=() if unknown else tuple(path[1:num_emitted]),
        kept=frozenset(tree.subtree(path[-1])) if again.is_hit else frozenset(),
        is_hit=again.is_hit,
        num_emitted=num_emitted,
    )


def _sent_nodes(tree: DraftTree, sent: Candidates) -> frozenset[int]:
    """Nodes of the rows that were sent: children of a node have distinct tokens."""
    nodes = [0]
    if not sent.requests:
        return frozenset(nodes)
    rows = sent.requests[0]
    for token, parent in zip(rows.tokens[1:], rows.parents[1:], strict=True):
        child = tree.child(nodes[parent], token)
        assert child is not None, "rows are of the tree"
        nodes.append(child)
    return frozenset(nodes)


def _descend(tree: DraftTree, tokens: Sequence[int]) -> list[int]:
    path = [0]
    for token in tokens:
        child = tree.child(path[-1], token)
        if child is None:
            break
        path.append(child)
    return path
