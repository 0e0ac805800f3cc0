"""Steps of the engine, one at a time, at any batch and context, with a clock around them.

The workers are the engine's own, so bookkeeping, sampling, the walk and KV moves are timed along
with the forward. Only what a step finds is staged: KV rows hold noise, and trees hold made-up
tokens, because neither changes the time. Staging is never timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from codesign.engine.drafter import ModelDrafter, NgramDrafter
from codesign.engine.kv_cache import KVCache
from codesign.engine.model import Decoder
from codesign.engine.pieces import PromptPiece
from codesign.engine.rows import causal_rows
from codesign.engine.target import Target
from codesign.engine.target_worker import TargetWorker
from codesign.policy.protocol import (
    Admission,
    Candidates,
    RequestCandidates,
    TargetSide,
)
from codesign.policy.walk import Sampling
from codesign.profiler.draft_steps import (
    ALPHABET,
    ENDLESS,
    DraftSteps,
    StagedDrafter,
    made_up_tokens,
)
from codesign.profiler.steps import StepShape

SPARE_ROWS = 128  # behind the longest context: tree rows
MAX_PREFILLS = 4  # prompts in one forward


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
        staged = [*enumerate(shape.contexts)]
        if any(place not in self._next for place in staged):
            self._stage(shape)
            for verdict in self.verify(None)[1]:
                self._next[staged[verdict.request_id]] = verdict.tokens[0]
            self._restore(shape)
        self._stage(shape)
        candidates = staged_candidates(shape, [self._next[i] for i in staged], self._vocab)
        start = perf_counter()
        self.verify(candidates)
        seconds = perf_counter() - start
        self._restore(shape)
        return seconds

    def _restore(self, shape: StepShape) -> None:
        """Put back the noise that the step has overwritten, or a longer context would change."""
        for request_id, context in enumerate(shape.contexts):
            slot, end = self._slots[request_id], context + shape.rows
            _set_length(self.cache, slot, context)
            _fill(self.cache, slot, self._noise[context:end], self._num_layers)

    def _stage(self, shape: StepShape) -> None:
        self.side = TargetSide()
        for request_id, context in enumerate(shape.contexts):
            tokens = made_up_tokens(request_id, context + 1, self._vocab)
            self.side.admit(Admission(request_id, tokens, ENDLESS))
            _set_length(self.cache, self._slots[request_id], context)

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
    for request_id, (context, token) in enumerate(zip(shape.contexts, true, strict=True)):
        root = made_up_tokens(request_id, context + 1, vocab)[-1]
        others = [(token + i) % vocab for i in range(1, shape.rows - 1)]
        tokens = [root, *others, token][: shape.rows]
        parents = [-1, *[i // 2 for i in range(len(others))], 0][: shape.rows]
        trees.append(RequestCandidates(request_id, context + 1, tuple(tokens), tuple(parents)))
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
