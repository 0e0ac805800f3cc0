"""What draft side and target side tell each other, and the rows that each asks its driver to run.

See codesign/policy/protocol.py. Must not import torch or read a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from codesign.policy.cost import Calibration
from codesign.policy.light import light
from codesign.policy.options import AS_THE_RUN, RequestOptions


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that joins: its first ``tokens`` (prompt) and how many tokens it may emit.

    ``slo_tpot`` is its own target of seconds per token, None for the run's. ``options`` are the
    target's to heed.
    """

    request_id: int
    tokens: tuple[int, ...]
    max_new_tokens: int
    slo_tpot: float | None = None
    options: RequestOptions = AS_THE_RUN

    @property
    def is_drafted_for(self) -> bool:
        """Not if it wants no speculation, or ends with the token that its prompt gives."""
        return self.options.speculates and self.max_new_tokens > 1


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of a prompt that the draft runs beside this round, for a request that joins later.

    Attributes:
        request_id: The request.
        tokens: The whole prompt, with the first of its rows; () with the others.
        end: Rows of it that must have been run afterwards.
    """

    request_id: int
    tokens: tuple[int, ...]
    end: int


@light
class RequestVerdict:
    """What the target emitted for one request.

    Attributes:
        request_id: The request.
        base_len: Committed tokens before these.
        tokens: Emitted tokens, the bonus token last.
        is_finished: The request is over; its draft state can go.
    """

    request_id: int
    base_len: int
    tokens: tuple[int, ...]
    is_finished: bool = False


@light
class Verdict:
    """One message from the target to the draft.

    Attributes:
        round: Its number.
        requests: What was emitted since the last one.
        admitted: Requests that join.
        prompts: Parts of prompts to run beside this round.
        dropped: Requests that lose their KV rows; they may join again, with a longer prompt.
        is_last: The draft may end.
        now: Seconds since the start of the run, by the target's clock: neither side has one. Read
            by policies that need each request's progress alone.
        beside: Requests of the batch that the draft is not told of, as they want no speculation,
            and their KV rows.
        sharing: Prompt rows that share this round's forward, and requests that wait for their first
            token. Where prompts run between rounds, 0 and the requests that came while they ran and
            find a free place: their prompts run after this round.
    """

    round: int
    requests: tuple[RequestVerdict, ...] = ()
    admitted: tuple[Admission, ...] = ()
    prompts: tuple[PromptRows, ...] = ()
    dropped: tuple[int, ...] = ()
    is_last: bool = False
    now: float = 0.0
    beside: tuple[int, int] = (0, 0)
    sharing: tuple[int, int] = (0, 0)


@light
class RequestCandidates:
    """A tree for the target to verify: row 0 is the last committed token.

    ``chances`` are those of each row, given its parent's, as the draft side sees them. Nothing is
    decided by them; reports say how right they were.
    """

    request_id: int
    base_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...] = ()


@light
class Candidates:
    """One message from the draft to the target, in answer to the verdict of the same round."""

    round: int
    requests: tuple[RequestCandidates, ...] = ()


@light
class KVMove:
    """Rows of a request's slab that survive, in their new order.

    Attributes:
        request_id: The request.
        base: Prefix rows, which stay where they are.
        rows: Offsets from ``base``; they become base, base + 1, ... and nothing lies behind them.
    """

    request_id: int
    base: int
    rows: tuple[int, ...]


@light
class ExpansionRows:
    """Rows of one request in a draft forward.

    Attributes:
        request_id: The request.
        tokens: (R,) tokens to run; first committed tokens that lack a KV row, then tree nodes.
        positions: (R,) absolute positions.
        nodes: Tree nodes that the last rows stand for; logits are needed for these alone.
        visible: Tree slots that each row sees besides the prefix, its own included; None when the
            rows just follow one another (catching up with committed tokens, then the root).
        context: KV rows before this forward.
        trust: Per node, share of its acceptance that is left to a draft head that reads features
            of its own (codesign/policy/features.py); empty for other draft models.
    """

    request_id: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    nodes: tuple[int, ...]
    visible: tuple[tuple[int, ...], ...] | None
    context: int
    trust: tuple[float, ...] = ()


@light
class Growth:
    """What a tree will be grown from behind an expansion: all that the next choices depend on.

    Attributes:
        request_id: The request.
        steps: Expansions that are sure to follow.
        width: Leaves of each, the heaviest.
        fanout: Most children of a node.
        weights: (n,) log weight of each node of the expansion.
        rivals: Other leaves that may grow, heaviest first and of equal ones the oldest, as many as
            could still be taken: token, position, slot of the parent.
        rival_weights: Their log weights.
        slot_parents: Of each expanded node in order of slots, the slot of its parent; -1 of a root.
        prefix: KV rows before the tree, which is also the root's position.
        end: Nodes at this position or behind it do not grow: the request ends there.
        calibration: Of the draft model's log probabilities.
    """

    request_id: int
    steps: int
    width: int
    fanout: int
    weights: tuple[float, ...]
    rivals: tuple[tuple[int, int, int], ...]
    rival_weights: tuple[float, ...]
    slot_parents: tuple[int, ...]
    prefix: int
    end: int
    calibration: Calibration


@light
class VerifyRows:
    """Rows of one request in a target forward.

    Attributes:
        request_id: The request.
        tokens: (N,) candidate tokens, the last committed token first.
        parents: (N,) row of each parent; -1 for the root.
        positions: (N,) absolute positions.
        context: KV rows before this forward.
        chances: (N,) of each row given its parent's, as the draft side sees it; or ().
    """

    request_id: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    positions: tuple[int, ...]
    context: int
    chances: tuple[float, ...] = ()

    def ancestors(self) -> list[list[int]]:
        """Rows that each row sees besides the prefix, its own included; not to be changed."""
        return ancestors_of(self.parents)


# The same few hundred shapes come again and again, unless trees are large.
@lru_cache(maxsize=512)
def ancestors_of(parents: tuple[int, ...]) -> list[list[int]]:
    """Rows on the path to each row of a tree, its own included; not to be changed."""
    seen: list[list[int]] = []
    for row, parent in enumerate(parents):
        seen.append([row] if parent < 0 else [*seen[parent], row])
    return seen


@lru_cache(maxsize=512)
def depths_of(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Depth of each row of a tree; 0 of its root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return tuple(depths)
