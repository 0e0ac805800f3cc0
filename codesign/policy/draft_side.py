"""The draft's side of the round protocol: trees that grow, and answers to verdicts.

See codesign/policy/protocol.py. Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from codesign.policy.drafted import Drafted
from codesign.policy.interface import Speculation
from codesign.policy.messages import (
    Admission,
    Candidates,
    ExpansionRows,
    Growth,
    KVMove,
    Verdict,
)
from codesign.policy.tree import DraftTree


class DraftSide:
    """Grows trees and answers verdicts; whoever drives it runs the draft model."""

    def __init__(self, policy: Speculation) -> None:
        self.policy = policy
        self._requests: dict[int, Drafted] = {}
        self._now = 0.0
        self._is_resting = False

    @property
    def request_ids(self) -> tuple[int, ...]:
        """Requests that are being drafted for, in order of admission."""
        return tuple(self._requests)

    @property
    def kept(self) -> tuple[int, int]:
        """Trees of more than a root, and nodes of all but roots: what a re-root has kept."""
        sizes = [len(request.tree) - 1 for request in self._requests.values()]
        return sum(map(bool, sizes)), sum(sizes)

    def tree(self, request_id: int) -> DraftTree:
        """The draft tree of a request."""
        request = self._requests[request_id]
        request.catch_up()
        return request.tree

    def committed(self, request_id: int) -> tuple[int, ...]:
        """Tokens committed so far, prompt included."""
        return tuple(self._requests[request_id].committed)

    def admit(self, admission: Admission) -> None:
        """Start a request; its prompt is run together with its first expansion."""
        drafted = Drafted.admitted(admission, self.policy.tree_type)
        self._requests[admission.request_id] = drafted

    def stays_at_rest(self, verdict: Verdict) -> bool:
        """Whether the policy stays at rest in the round that a verdict starts.

        It is not asked about a round that leaves nobody to draft for, as of prompts alone.
        """
        over = {entry.request_id for entry in verdict.requests if entry.is_finished}
        over.update(verdict.dropped)
        joining = (admission.request_id for admission in verdict.admitted)
        is_empty = over.issuperset(self._requests) and over.issuperset(joining)
        return not is_empty and self.policy.stays_at_rest()

    def receive(
        self, verdict: Verdict, *, resting: bool | None = None
    ) -> tuple[list[KVMove], list[int]]:
        """Take in a verdict, with which a round starts.

        Args:
            verdict: The target's.
            resting: Whether the policy stays at rest, if it was asked already.

        Returns:
            KV moves to make in this order, and the requests that are over, whose slabs are free.
        """
        moves: list[KVMove] = []
        finished: list[int] = []
        self._now = verdict.now
        policy = self.policy
        policy.settle()
        policy.beside, policy.sharing, policy.now = verdict.beside, verdict.sharing, verdict.now
        if resting is None:
            resting = self.stays_at_rest(verdict)
        self._is_resting = resting
        for admission in verdict.admitted:
            self.admit(admission)
        for entry in verdict.requests:
            if entry.is_finished:
                self._requests.pop(entry.request_id).catch_up()
                finished.append(entry.request_id)
                continue
            request = self._requests[entry.request_id]
            request.commit(entry, self._now)
            if not resting:
                base = request.tree.prefix_len
                moves.append(KVMove(entry.request_id, base, request.catch_up()))
        for request_id in verdict.dropped:
            request = self._requests.pop(request_id, None)
            if request is not None:
                request.catch_up()
            finished.append(request_id)
        # A request may move and finish in one verdict: first its prefill's token, then a round's.
        return [move for move in moves if move.request_id in self._requests], finished

    def begin(self) -> bool:
        """Whether the policy looks at the trees, which it then does, or only roots are verified.

        With nobody to draft for it learns nothing, not even that plain decoding is best.
        """
        if self._is_resting or not self._requests:
            return False
        self._look()
        return True

    def _look(self) -> None:
        progress = ()
        if self.policy.needs_progress:
            progress = [request.progress(self._now) for request in self._requests.values()]
        self.policy.begin(self._trees(), progress)

    def look_ahead(self) -> tuple[list[KVMove], bool]:
        """In a round at rest, make the look that the next one would begin with, if it would.

        Returns:
            KV moves to make, and whether such a look has found that the policy rests on.
        """
        policy = self.policy
        if not (self._requests and policy.looks_ahead()):
            return [], False
        moves = [
            KVMove(request_id, request.tree.prefix_len, request.catch_up())
            for request_id, request in self._requests.items()
            if len(request.committed) > request.tree.base_len  # who sat out keeps its rows
        ]
        self._look()
        if any(policy.leaves(self._trees(), 0)):
            return moves, False
        policy.select(self._trees())
        return moves, policy.rests

    def next_expansion(self, done: int) -> list[ExpansionRows]:
        """Rows of the next draft forward before candidates are sent; none when that is enough."""
        return self._expand(self.policy.leaves(self._trees(), done))

    def overlap_expansion(self) -> list[ExpansionRows]:
        """Rows of the next draft forward that overlaps the target's verification."""
        if not self._requests:
            return []
        return self._expand(self.policy.overlap_leaves(self._trees()))

    def following(self, expansion: Sequence[ExpansionRows], done: int, *, overlaps: bool) -> int:
        """Expansions that are sure to follow one of a single request; see ``Speculation``."""
        if len(expansion) != 1:
            return 0
        tree = self._requests[expansion[0].request_id].tree
        policy = self.policy
        return (policy.overlap_following if overlaps else policy.following)(tree, done)

    def growth(self, rows: ExpansionRows, steps: int) -> Growth:
        """What so many expansions are chosen from that follow one; before its answer is taken in.

        Fewer where a chain ends before.
        """
        request, policy = self._requests[rows.request_id], self.policy
        tree, prefix = request.tree, request.tree.prefix_len
        weights, tokens, parents, slots = tree.log_weights, tree.tokens, tree.parents, tree.slots
        rivals = tree.leaves(policy.grown * steps)
        if not rivals:
            deepest = tree.max_depth - 1 - min([tree.depths[node] for node in rows.nodes])
            steps = max(min(steps, deepest), 0)
        return Growth(
            request_id=rows.request_id,
            steps=steps,
            width=policy.grown,
            fanout=policy.fanout,
            weights=tuple([weights[node] for node in rows.nodes]),
            rivals=tuple([(tokens[n], prefix + tree.depths[n], slots[parents[n]]) for n in rivals]),
            rival_weights=tuple([weights[n] for n in rivals]),
            slot_parents=tuple(tree.slot_parents()),
            prefix=prefix,
            end=prefix + tree.max_depth,
            calibration=policy.weighing,
        )

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
        policy = self.policy
        fanout, tree = policy.fanout, self._requests[rows.request_id].tree
        if max(map(len, tokens)) > fanout:
            tokens = [node_tokens[:fanout] for node_tokens in tokens]
            log_probs = [node_log_probs[:fanout] for node_log_probs in log_probs]
        weights = policy.weigh([log_prob for of_node in log_probs for log_prob in of_node])
        tree.add_answer(rows.nodes, tokens, weights)

    def candidates(self, round_number: int) -> Candidates:
        """The trees to verify, none if all are roots alone; after a round began with a look."""
        chosen = self.policy.select(self._trees())
        if self.policy.rests:
            return Candidates(round_number)
        entries = [
            request.candidates(request_id, nodes)
            for (request_id, request), nodes in zip(self._requests.items(), chosen, strict=True)
        ]
        return Candidates(round_number, tuple(entries))

    def _trees(self) -> list[DraftTree]:
        return [request.tree for request in self._requests.values()]

    def _expand(self, leaves: Sequence[Sequence[int]]) -> list[ExpansionRows]:
        return [
            request.expand(request_id, nodes)
            for (request_id, request), nodes in zip(self._requests.items(), leaves, strict=True)
            if nodes
        ]
