"""A draft's steps, one at a time, with whatever answers them: a decoder, n-grams, a rank group.

As in bench.py the worker is the engine's own, so that its bookkeeping is timed along with the
forward, and only what a step finds is staged.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from codesign.engine.draft_worker import DraftWorker
from codesign.engine.drafter import Drafter
from codesign.fit.children import WIDE
from codesign.policy.cost import Calibration
from codesign.policy.protocol import Admission, RequestVerdict, Verdict
from codesign.policy.speculation import SpeculationSpec, build_speculation
from codesign.profiler.steps import StepShape

ENDLESS = 1 << 30  # output tokens; no staged request ever finishes
ALPHABET = 61  # few tokens, so that n-grams repeat
_IN_A_ROW = 3  # forwards of a round
_CALIBRATION = Calibration(0.85, 0.25)  # as fits have: any but the identity takes the same time
_LEVELS, _KEPT_LEVELS = 2, 4  # of a tree before the step that is timed: 36 and 92 nodes of 8x4


def made_up_tokens(request_id: int, count: int, vocab: int) -> tuple[int, ...]:
    """Made-up tokens of a request: aperiodic, of a small alphabet."""
    limit = min(vocab, ALPHABET)
    return tuple([(request_id + i * i + i // 7) % limit for i in range(count)])


class StagedDrafter(Drafter, Protocol):
    """A drafter that can pretend to have run."""

    def stage(self, request_id: int, tokens: tuple[int, ...]) -> None:
        """Make a request's slab hold as many rows as there are tokens."""
        ...


class DraftSteps:
    """A draft worker whose requests can be put at any context.

    Args:
        drafter: What answers it.
        vocab: Tokens that the drafter knows.
        num_requests: Largest batch.
        is_apart: The target has workers of its own, so that trees are kept and grow beside it.
    """

    def __init__(
        self, drafter: StagedDrafter, *, vocab: int, num_requests: int, is_apart: bool = False
    ) -> None:
        self._drafter = drafter
        self._levels = _KEPT_LEVELS if is_apart else _LEVELS
        self._vocab = vocab
        self._num_requests = num_requests

    def seconds(self, shape: StepShape, *, before: Callable[[], None] | None = None) -> float:
        """Time one step.

        Args:
            shape: Of the step.
            before: Done between staging a step and timing it, but for prompts, as a round has the
                target's step there: the host takes longer for what it has not just done.
        """
        if shape.op == "draft_prefill":
            return self._prefill_seconds(shape)
        if shape.op in ("draft", WIDE):
            return self._expansion_seconds(shape, before or _nothing)
        if shape.op == "drafted":
            return self._chain_seconds(shape, before or _nothing)
        return self._answer_seconds(shape, before or _nothing)

    def _expansion_seconds(self, shape: StepShape, before: Callable[[], None]) -> float:
        """An overlapped expansion of ``shape.rows`` leaves per request.

        They are run as a round runs them: some forwards in a row, of which this is the mean. Ranks
        run ahead of the host by those of one request, and of several the host has just run the
        same code. Of trees these are levels below the root, where the host looks at more nodes and
        takes in more children than at first, and at still more of them in a tree that was kept from
        round to round.
        """
        worker = self._worker(rows=shape.tree_rows, width=shape.rows, expansions=_IN_A_ROW)
        self._stage(worker, shape, expansions=self._levels if shape.is_tree else 1)
        return _overlap_seconds(worker, before) / _IN_A_ROW

    def _chain_seconds(self, shape: StepShape, before: Callable[[], None]) -> float:
        """All of ``shape.rows`` overlapped forwards in a row, each of one leaf."""
        worker = self._worker(rows=2, width=1, expansions=shape.rows)
        self._stage(worker, shape, expansions=1)
        return _overlap_seconds(worker, before)

    def _prefill_seconds(self, shape: StepShape) -> float:
        worker = self._worker(rows=2, width=1)  # a tree that is done after one forward
        ids = range(self._num_requests, self._num_requests + shape.requests)
        admitted = [Admission(i, made_up_tokens(i, shape.rows, self._vocab), ENDLESS) for i in ids]
        _, times = worker.answer(Verdict(0, admitted=tuple(admitted)))
        self._drafter.release(ids)
        return times.answered - times.rerooted

    def _answer_seconds(self, shape: StepShape, before: Callable[[], None]) -> float:
        """A part of an answer without a forward: re-root and KV moves, or choice of candidates."""
        worker = self._worker(rows=shape.rows, width=shape.rows // 2)
        self._stage(worker, shape, expansions=max(self._levels, 3))
        entries = []
        for request_id in range(shape.requests):
            tree = worker.side.tree(request_id)
            token = tree.tokens[2]  # not the first child: rows must move
            entries.append(RequestVerdict(request_id, tree.base_len, (token,)))
        before()
        _, times = worker.answer(Verdict(0, tuple(entries)))
        assert times.num_expansions == 0, "the staged tree was too small"
        if shape.op == "choice":
            return times.answered - times.rerooted
        return times.rerooted - times.received

    def _worker(self, *, rows: int, width: int, expansions: int = 1) -> DraftWorker:
        spec = SpeculationSpec(
            kind="tree", is_async=True, rows=rows, width=width, expansions=expansions
        )
        return DraftWorker(build_speculation(spec, calibration=_CALIBRATION), self._drafter)

    def _stage(self, worker: DraftWorker, shape: StepShape, *, expansions: int) -> None:
        """Admit requests of ``shape.contexts`` tokens and pretend that forwards were run."""
        side, fanout = worker.side, worker.side.policy.fanout
        for request_id, context in enumerate(shape.contexts):
            tokens = made_up_tokens(request_id, context, self._vocab)
            side.admit(Admission(request_id, tokens, ENDLESS))
        slabs: dict[int, tuple[int, ...]] = {}
        log_probs = [-0.5 - 0.6 * i for i in range(fanout)]  # a draft that is fairly sure
        for _ in range(expansions):
            for rows in side.overlap_expansion():
                slabs[rows.request_id] = slabs.get(rows.request_id, ()) + rows.tokens
                children = [list(range(fanout))] * len(rows.nodes)
                side.expanded(rows, children, [log_probs] * len(rows.nodes))
        for request_id, slab in slabs.items():
            self._drafter.stage(request_id, slab)


def _overlap_seconds(worker: DraftWorker, before: Callable[[], None]) -> float:
    before()
    start = perf_counter()
    worker.overlap()
    return perf_counter() - start


def _nothing() -> None:
    pass
