"""Steps of the engine, one at a time, at any batch and context, with a clock around them.

The workers are the engine's own, so bookkeeping, sampling, the walk and KV moves are timed along
with the forward. Only what a step finds is staged: KV rows hold noise, and trees hold made-up
tokens, because neither changes the time. Staging is never timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import torch

from codesign.engine.draft_worker import DraftWorker
from codesign.engine.drafter import Drafter, ModelDrafter, NgramDrafter
from codesign.engine.kv_cache import KVCache
from codesign.engine.model import Decoder
from codesign.engine.rows import causal_rows
from codesign.engine.schedule import PromptPiece
from codesign.engine.target import Target
from codesign.engine.target_worker import TargetWorker
from codesign.policy.cost import Calibration
from codesign.policy.protocol import (
    Admission,
    Candidates,
    RequestCandidates,
    RequestVerdict,
    TargetSide,
    Verdict,
)
from codesign.policy.speculation import SpeculationSpec, build_speculation
from codesign.policy.walk import Sampling
from codesign.profiler.steps import StepShape

SPARE_ROWS = 128  # behind the longest context: tree rows
MAX_PREFILLS = 4  # prompts in one forward
ENDLESS = 1 << 30  # output tokens; no staged request ever finishes
ALPHABET = 61  # few tokens, so that n-grams repeat
_MOST_LEAVES = 4  # that one forward runs of a tree
_IN_A_ROW = 3  # forwards of a round
_CALIBRATION = Calibration(0.85, 0.25)  # as fits have: any but the identity takes the same time
_LEVELS, _KEPT_LEVELS = 2, 4  # of a tree before the step that is timed: 36 and 92 nodes of 8x4


class TargetBench(TargetWorker):
    """A target worker whose requests can be put at any context.

    Args:
        decoder: The target.
        sampling: As the engine will sample.
        num_requests: Largest batch.
        max_context: Longest context, prompt lengths included.
    """

    def __init__(
        self, decoder: Decoder, *, sampling: Sampling, num_requests: int, max_context: int
    ) -> None:
        self._noise = _noise(decoder, max_context + SPARE_ROWS)
        cache = _noisy_cache(decoder, self._noise, num_slots=num_requests + MAX_PREFILLS)
        super().__init__(decoder, cache, sampling=sampling)
        self._slots = {i: cache.take() for i in range(num_requests)}
        self._vocab = decoder.shape.vocab
        self._num_layers = decoder.shape.layers
        self._next: dict[tuple[int, int], int] = {}  # what follows the root: (request, context)

    def seconds(self, shape: StepShape) -> float:
        """Time one step."""
        if shape.op == "prefill":
            return self._prefill_seconds(shape)
        if any((i, shape.context) not in self._next for i in range(shape.requests)):
            self._stage(shape)
            for verdict in self.verify(None)[1]:
                self._next[verdict.request_id, shape.context] = verdict.tokens[0]
            self._restore(shape)
        self._stage(shape)
        candidates = staged_candidates(
            shape, [self._next[i, shape.context] for i in range(shape.requests)], self._vocab
        )
        start = perf_counter()
        self.verify(candidates)
        seconds = perf_counter() - start
        self._restore(shape)
        return seconds

    def _restore(self, shape: StepShape) -> None:
        """Put back the noise that the step has overwritten, or a longer context would change."""
        end = shape.context + shape.rows
        for request_id in range(shape.requests):
            slot = self._slots[request_id]
            _set_length(self.cache, slot, shape.context)
            _fill(self.cache, slot, self._noise[shape.context : end], self._num_layers)

    def _stage(self, shape: StepShape) -> None:
        self.side = TargetSide()
        for request_id in range(shape.requests):
            tokens = made_up_tokens(request_id, shape.context + 1, self._vocab)
            self.side.admit(Admission(request_id, tokens, ENDLESS))
            _set_length(self.cache, self._slots[request_id], shape.context)

    def _prefill_seconds(self, shape: StepShape) -> float:
        self.side = TargetSide()
        ids = range(len(self._slots), len(self._slots) + shape.requests)
        admissions = [
            Admission(i, made_up_tokens(i, shape.rows, self._vocab), ENDLESS) for i in ids
        ]
        start = perf_counter()
        run_prompts(self, admissions)
        seconds = perf_counter() - start
        for i in ids:
            self.cache.free(self._slots.pop(i))
        return seconds


def run_prompts(worker: Target, admissions: Sequence[Admission]) -> None:
    """Run whole prompts, as an engine does between rounds."""
    for admission in admissions:
        worker.open_prompt(admission, ())
    worker.run_pieces([PromptPiece(a, 0, len(a.tokens)) for a in admissions])


class _StagedModel(ModelDrafter):
    """A model drafter that can pretend to have run on any number of rows."""

    def stage(self, request_id: int, tokens: tuple[int, ...]) -> None:
        """Put a request's slab at ``len(tokens)`` rows."""
        if request_id not in self._slots:
            self._slots[request_id] = self.cache.take()
        _set_length(self.cache, self._slots[request_id], len(tokens))


class StagedNgrams(NgramDrafter):
    """An n-gram drafter whose slabs can be set."""

    def stage(self, request_id: int, tokens: tuple[int, ...]) -> None:
        """Make a request's slab hold ``tokens``."""
        self._slabs[request_id] = list(tokens)


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
            before: Done between staging an expansion and timing it, as a round has the target's
                step there: the host takes longer for what it has not just done.
        """
        if shape.op == "draft":
            return self._expansion_seconds(shape, before or _nothing)
        return self._prefill_seconds(shape) if shape.op == "draft_prefill" else self._reroot(shape)

    def _expansion_seconds(self, shape: StepShape, before: Callable[[], None]) -> float:
        """An overlapped expansion of ``shape.rows`` leaves per request.

        Few leaves are run as a round runs them: some forwards in a row, of which this is the mean.
        More than one are staged as trees have them: of twice as many rows, levels below the root,
        where the host looks at more nodes and takes in more children than at first, and at still
        more of them in a tree that was kept from round to round.
        """
        is_tree = 1 < shape.rows <= _MOST_LEAVES
        rows = 2 * shape.rows if is_tree else shape.rows + 1
        count = _IN_A_ROW if shape.rows <= _MOST_LEAVES else 1
        worker = self._worker(rows=rows, width=shape.rows, expansions=count)
        self._stage(worker, shape, expansions=self._levels if is_tree else 1)
        before()
        start = perf_counter()
        worker.overlap()
        return (perf_counter() - start) / count

    def _prefill_seconds(self, shape: StepShape) -> float:
        worker = self._worker(rows=2, width=1)  # a tree that is done after one forward
        ids = range(self._num_requests, self._num_requests + shape.requests)
        admitted = [Admission(i, made_up_tokens(i, shape.rows, self._vocab), ENDLESS) for i in ids]
        _, times = worker.answer(Verdict(0, admitted=tuple(admitted)))
        self._drafter.release(ids)
        return times.answered - times.rerooted

    def _reroot(self, shape: StepShape) -> float:
        """A whole answer without a forward: re-root, KV moves, choice of candidates."""
        worker = self._worker(rows=shape.rows, width=shape.rows // 2)
        self._stage(worker, shape, expansions=max(self._levels, 3))
        entries = []
        for request_id in range(shape.requests):
            tree = worker.side.tree(request_id)
            token = tree.tokens[2]  # not the first child: rows must move
            entries.append(RequestVerdict(request_id, tree.base_len, (token,)))
        _, times = worker.answer(Verdict(0, tuple(entries)))
        assert times.num_expansions == 0, "the staged tree was too small"
        return times.answered - times.received

    def _worker(self, *, rows: int, width: int, expansions: int = 1) -> DraftWorker:
        spec = SpeculationSpec(
            kind="tree", is_async=True, rows=rows, width=width, expansions=expansions
        )
        return DraftWorker(build_speculation(spec, calibration=_CALIBRATION), self._drafter)

    def _stage(self, worker: DraftWorker, shape: StepShape, *, expansions: int) -> None:
        """Admit requests of ``shape.context`` tokens and pretend that forwards were run."""
        side, fanout = worker.side, worker.side.policy.fanout
        for request_id in range(shape.requests):
            tokens = made_up_tokens(request_id, shape.context, self._vocab)
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


def _nothing() -> None:
    pass


class DraftBench(DraftSteps):
    """The draft worker of this process.

    Args:
        decoder: The draft model; None for n-grams.
        num_requests: Largest batch.
        max_context: Longest context, prompt lengths included.
    """

    def __init__(self, decoder: Decoder | None, *, num_requests: int, max_context: int) -> None:
        drafter: StagedDrafter = StagedNgrams()
        if decoder is not None:
            noise = _noise(decoder, max_context + SPARE_ROWS)
            cache = _noisy_cache(decoder, noise, num_slots=num_requests + MAX_PREFILLS)
            drafter = _StagedModel(decoder, cache)
        vocab = ALPHABET if decoder is None else decoder.shape.vocab
        super().__init__(drafter, vocab=vocab, num_requests=num_requests)


def staged_candidates(shape: StepShape, true: Sequence[int], vocab: int) -> Candidates:
    """Trees of which one draft token, the last row, is accepted: KV rows must move.

    Args:
        shape: The verification.
        true: What the target says after each request's root.
        vocab: Tokens that it knows.
    """
    trees = []
    for request_id, token in enumerate(true):
        root = made_up_tokens(request_id, shape.context + 1, vocab)[-1]
        others = [(token + i) % vocab for i in range(1, shape.rows - 1)]
        tokens = [root, *others, token][: shape.rows]
        parents = [-1, *[i // 2 for i in range(len(others))], 0][: shape.rows]
        base_len = shape.context + 1
        trees.append(RequestCandidates(request_id, base_len, tuple(tokens), tuple(parents)))
    return Candidates(0, tuple(trees))


def _noise(decoder: Decoder, num_rows: int) -> torch.Tensor:
    """(num_rows, G, E) made-up keys, or values, of one layer."""
    size = (num_rows, decoder.shape.kv_heads, decoder.shape.head_dim)
    return 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(0))


def _noisy_cache(decoder: Decoder, noise: torch.Tensor, *, num_slots: int) -> KVCache:
    """A cache whose memory is really there: pages that were never written all read as one."""
    cache = KVCache(decoder.shape, num_slots=num_slots, max_tokens=len(noise))
    slots = [cache.take() for _ in range(num_slots)]
    for slot in slots:
        _fill(cache, slot, noise, decoder.shape.layers)
    for slot in reversed(slots):
        cache.free(slot)
    return cache


def _fill(cache: KVCache, slot: int, rows: torch.Tensor, num_layers: int) -> None:
    """Append the same rows to every layer of a slab."""
    _set_length(cache, slot, cache.length(slot) + len(rows))
    for layer in range(num_layers):
        cache.append(layer, slot, rows, rows)


def _set_length(cache: KVCache, slot: int, length: int) -> None:
    missing = length - cache.length(slot)
    if missing > 0:
        cache.extend(causal_rows(slot, [0] * missing))
    else:
        cache.truncate(slot, length)


def made_up_tokens(request_id: int, count: int, vocab: int) -> tuple[int, ...]:
    """Made-up tokens of a request: aperiodic, of a small alphabet."""
    limit = min(vocab, ALPHABET)
    return tuple([(request_id + i * i + i // 7) % limit for i in range(count)])
