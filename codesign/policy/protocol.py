"""The round protocol: a draft side and a target side that exchange two messages.

Target to draft, a ``Verdict``: per request the tokens emitted since its base length, whether it is
finished, and requests newly admitted. Draft to target, ``Candidates``: per request a base length
and a tree of tokens. A base length that is not the target's own marks a stale entry, and a missing
or stale entry means "root only", which is plain decoding: load shedding and a dead draft are the
same code path.

Neither side owns a model. Whoever drives them (the engine with forwards, the simulator with
predicted times and drawn acceptance) runs the expansions that the draft side names and samples the
rows that the target side names.

One round of a request, in KV rows:
    target  [prefix]            + rows of the candidates -> accepted rows join the prefix
    draft   [prefix | tree]     -> re-root: promoted rows join the prefix, kept rows stay

Must not import torch or read a clock.

Source:
    SwiftSpec, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from codesign.policy.interface import Progress, Speculation
from codesign.policy.options import AS_THE_RUN, RequestOptions
from codesign.policy.stop_text import Push, StopText
from codesign.policy.tree import DraftTree
from codesign.policy.walk import Walk, walk


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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
            token. Where prompts run between rounds, 0 and the requests that came while they ran:
            their prompts run after this round.
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Candidates:
    """One message from the draft to the target, in answer to the verdict of the same round."""

    round: int
    requests: tuple[RequestCandidates, ...] = ()


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(slots=True)
class _Drafted:
    """Draft state of one request: committed tokens, rows in the prefix, and the tree.

    And its progress: when its first token was told, the tokens committed then, its own target.
    """

    committed: list[int]
    prefix_len: int
    tree: DraftTree
    slo_tpot: float | None
    first_at: float | None = None
    first_len: int = 0


class DraftSide:
    """Grows trees and answers verdicts; whoever drives it runs the draft model."""

    def __init__(self, policy: Speculation) -> None:
        self.policy = policy
        self._requests: dict[int, _Drafted] = {}
        self._now = 0.0

    @property
    def request_ids(self) -> tuple[int, ...]:
        """Requests that are being drafted for, in order of admission."""
        return tuple(self._requests)

    def tree(self, request_id: int) -> DraftTree:
        """The draft tree of a request."""
        return self._requests[request_id].tree

    def prefix_len(self, request_id: int) -> int:
        """KV rows in a request's prefix."""
        return self._requests[request_id].prefix_len

    def committed(self, request_id: int) -> tuple[int, ...]:
        """Tokens committed so far, prompt included."""
        return tuple(self._requests[request_id].committed)

    def admit(self, admission: Admission) -> None:
        """Start a request; its prompt is run together with its first expansion."""
        tree = self.policy.tree_type(
            admission.tokens[-1],
            base_len=len(admission.tokens),
            max_depth=max(admission.max_new_tokens - 1, 0),
        )
        self._requests[admission.request_id] = _Drafted(
            list(admission.tokens), 0, tree, admission.slo_tpot
        )

    def receive(self, verdict: Verdict) -> tuple[list[KVMove], list[int]]:
        """Take in a verdict.

        Returns:
            KV moves to make in this order, and the requests that are over, whose slabs are free.
        """
        moves: list[KVMove] = []
        finished: list[int] = []
        self._now = verdict.now
        policy = self.policy
        policy.beside, policy.sharing, policy.now = verdict.beside, verdict.sharing, verdict.now
        for admission in verdict.admitted:
            self.admit(admission)
        for entry in verdict.requests:
            if entry.is_finished:
                del self._requests[entry.request_id]
                finished.append(entry.request_id)
            else:
                moves.append(self._reroot(entry))
        for request_id in verdict.dropped:
            self._requests.pop(request_id, None)
            finished.append(request_id)
        # A request may move and finish in one verdict: first its prefill's token, then a round's.
        return [move for move in moves if move.request_id in self._requests], finished

    def _reroot(self, entry: RequestVerdict) -> KVMove:
        request = self._requests[entry.request_id]
        assert entry.base_len == len(request.committed), "verdict out of step"
        base = request.prefix_len
        reroot = request.tree.reroot(entry.tokens)
        request.committed += entry.tokens
        request.prefix_len += len(reroot.promoted)
        if request.first_at is None:
            request.first_at, request.first_len = self._now, len(request.committed)
        return KVMove(entry.request_id, base, reroot.promoted + reroot.kept)

    def begin(self) -> None:
        """A round starts: tell the policy."""
        if not self.policy.needs_progress:
            self.policy.begin(self._trees())
            return
        progress = [self._progress(request) for request in self._requests.values()]
        self.policy.begin(self._trees(), progress)

    def _progress(self, request: _Drafted) -> Progress:
        if request.first_at is None:
            return Progress(slo_tpot=request.slo_tpot)
        tokens = len(request.committed) - request.first_len
        return Progress(self._now - request.first_at, tokens, request.slo_tpot)

    def next_expansion(self, done: int) -> list[ExpansionRows]:
        """Rows of the next draft forward before candidates are sent; none when that is enough."""
        return self._expand(self.policy.leaves(self._trees(), done))

    def overlap_expansion(self) -> list[ExpansionRows]:
        """Rows of the next draft forward that overlaps the target's verification."""
        return self._expand(self.policy.overlap_leaves(self._trees()))

    def expanded(
        self,
        rows: ExpansionRows,
        tokens: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
    ) -> None:
        """Take in the draft model's answer.

        Args:
            rows: As named by ``next_expansion`` or ``overlap_expansion``.
            tokens: Per node of ``rows`` the likeliest tokens, at most ``policy.fanout`` are used.
            log_probs: Their log probabilities, descending.
        """
        tree = self._requests[rows.request_id].tree
        fanout = self.policy.fanout
        for node, node_tokens, node_log_probs in zip(rows.nodes, tokens, log_probs, strict=True):
            weights = self.policy.weigh(node_log_probs[:fanout])
            tree.add_children(node, node_tokens[:fanout], weights)

    def candidates(self, round_number: int) -> Candidates:
        """The trees to verify, one for every request."""
        chosen = self.policy.select(self._trees())
        entries = []
        for (request_id, request), nodes in zip(self._requests.items(), chosen, strict=True):
            selection = request.tree.select(nodes)
            entries.append(
                RequestCandidates(
                    request_id,
                    len(request.committed),
                    selection.tokens,
                    selection.parents,
                    request.tree.chances(selection.nodes),
                )
            )
        return Candidates(round_number, tuple(entries))

    def _trees(self) -> list[DraftTree]:
        return [request.tree for request in self._requests.values()]

    def _expand(self, leaves: Sequence[Sequence[int]]) -> list[ExpansionRows]:
        return [
            self._expansion_rows(request_id, request, nodes)
            for (request_id, request), nodes in zip(self._requests.items(), leaves, strict=True)
            if nodes
        ]

    def _expansion_rows(
        self, request_id: int, request: _Drafted, nodes: Sequence[int]
    ) -> ExpansionRows:
        tree = request.tree
        context = request.prefix_len + tree.num_expanded
        missing = request.committed[request.prefix_len : -1] if tree.slots[0] < 0 else []
        tree.expand(nodes)
        request.prefix_len += len(missing)
        root = tree.base_len - 1
        depths = tree.depths
        return ExpansionRows(
            request_id=request_id,
            tokens=(*missing, *[tree.tokens[n] for n in nodes]),
            positions=(*range(root - len(missing), root), *[root + depths[n] for n in nodes]),
            nodes=tuple(nodes),
            visible=None if nodes[0] == 0 else tuple([tuple(tree.visible_slots(n)) for n in nodes]),
            context=context,
            trust=tree.trust(nodes),
        )


@dataclass(frozen=True, slots=True)
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
        """Rows that each row sees besides the prefix, its own included."""
        seen: list[list[int]] = []
        for row, parent in enumerate(self.parents):
            seen.append([row] if parent < 0 else [*seen[parent], row])
        return seen


@dataclass(slots=True)
class _Verified:
    """Target state of one request."""

    committed: list[int]
    prompt_len: int
    max_new_tokens: int
    stop_tokens: frozenset[int]


class TargetSide:
    """Owns the requests and decides every token.

    Args:
        new_text: Makes what turns a request's tokens into text; for stop strings.
    """

    def __init__(self, new_text: Callable[[], Push] | None = None) -> None:
        self._requests: dict[int, _Verified] = {}
        self._new_text = new_text
        self._stops: dict[int, StopText] = {}  # kept while a request is evicted

    @property
    def request_ids(self) -> tuple[int, ...]:
        """Running requests, in order of admission."""
        return tuple(self._requests)

    def output(self, request_id: int) -> tuple[int, ...]:
        """Tokens emitted so far."""
        request = self._requests[request_id]
        return tuple(request.committed[request.prompt_len :])

    def admit(self, admission: Admission, stop_tokens: frozenset[int] = frozenset()) -> None:
        """Start a request; its prompt must be prefilled and its first token committed next."""
        self._requests[admission.request_id] = _Verified(
            list(admission.tokens),
            len(admission.tokens),
            admission.max_new_tokens,
            stop_tokens | admission.options.stop_tokens,
        )
        strings = admission.options.stop_strings
        if strings and admission.request_id not in self._stops:
            assert self._new_text is not None, "stop strings without a tokenizer"
            self._stops[admission.request_id] = StopText(strings, self._new_text())

    def evict(self, request_id: int) -> None:
        """Forget a request that loses its KV rows; it may come back with a longer prompt."""
        del self._requests[request_id]

    def commit_first(self, request_id: int, token: int) -> RequestVerdict:
        """Commit the token that the prefill's last row gave."""
        request = self._requests[request_id]
        is_finished = token in request.stop_tokens or request.max_new_tokens == 1
        _, is_stopped = self._until_stop(request_id, (token,))
        return self._commit(request_id, (token,), is_finished=is_finished or is_stopped)

    def verify_rows(self, candidates: Candidates | None) -> list[VerifyRows]:
        """Rows of the next target forward: each request's tree, or its last token alone.

        Entries whose base length is not the request's own are stale and ignored.
        """
        sent = {} if candidates is None else {c.request_id: c for c in candidates.requests}
        return [
            self._request_rows(request_id, request, sent.get(request_id))
            for request_id, request in self._requests.items()
        ]

    def _request_rows(
        self, request_id: int, request: _Verified, entry: RequestCandidates | None
    ) -> VerifyRows:
        base_len = len(request.committed)
        tokens: tuple[int, ...] = (request.committed[-1],)
        parents: tuple[int, ...] = (-1,)
        chances: tuple[float, ...] = ()
        if entry is not None and entry.base_len == base_len:
            assert entry.tokens[0] == request.committed[-1], "root is not the last committed token"
            tokens, parents, chances = entry.tokens, entry.parents, entry.chances
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        positions = tuple(base_len - 1 + d for d in depths)
        return VerifyRows(request_id, tokens, parents, positions, base_len - 1, chances)

    def judge(
        self, rows: VerifyRows, sample: Callable[[int], int]
    ) -> tuple[RequestVerdict, KVMove]:
        """Walk one request's tree and commit what it yields.

        Args:
            rows: As named by ``verify_rows``.
            sample: Token that the target emits after a row.

        Returns:
            The verdict, and the rows of the target's slab that survive.
        """
        request = self._requests[rows.request_id]
        emitted = len(request.committed) - request.prompt_len
        walked: Walk = walk(
            rows.tokens,
            rows.parents,
            sample,
            stop_tokens=request.stop_tokens,
            limit=request.max_new_tokens - emitted,
        )
        tokens, is_stopped = self._until_stop(rows.request_id, walked.tokens)
        is_finished = walked.is_stopped or is_stopped
        verdict = self._commit(rows.request_id, tokens, is_finished=is_finished)
        return verdict, KVMove(rows.request_id, rows.context, walked.accepted[: len(tokens)])

    def _until_stop(self, request_id: int, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """The tokens up to the end of a stop string, and whether there is one."""
        stop = self._stops.get(request_id)
        count = None if stop is None else stop.end(tokens)
        return tokens[:count], count is not None

    def _commit(
        self, request_id: int, tokens: tuple[int, ...], *, is_finished: bool
    ) -> RequestVerdict:
        request = self._requests[request_id]
        verdict = RequestVerdict(request_id, len(request.committed), tokens, is_finished)
        request.committed += tokens
        if is_finished:
            del self._requests[request_id]
            self._stops.pop(request_id, None)
        return verdict
