"""What answers a draft expansion: a draft model, or a look-up of n-grams without any model.

A drafter holds one KV slab per request, laid out [prefix | tree], and applies the moves that
``DraftSide`` plans. It decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch

from codesign.engine.blocks import block_ids
from codesign.engine.kv_cache import KVCache
from codesign.engine.model import Decoder
from codesign.engine.prefix_store import PrefixStore
from codesign.engine.rows import RowBatch, causal_rows
from codesign.policy.kv_memory import PREFIX_BLOCK
from codesign.policy.protocol import ExpansionRows, Growth, KVMove, PromptRows

Choices = tuple[list[list[int]], list[list[float]]]  # per node: tokens, log probabilities
Grow = Callable[[int], Growth]


class Drafter(Protocol):
    """Proposes tokens below tree nodes."""

    def forward(self, expansion: Sequence[ExpansionRows], fanout: int) -> list[Choices]:
        """Run one forward.

        Args:
            expansion: Rows of each request; a request that is new here gets a slab.
            fanout: Most tokens wanted per node.

        Returns:
            Per request, for each of its nodes: distinct tokens by descending log probability.
        """
        ...

    def run_prompts(self, prompts: Sequence[PromptRows]) -> None:
        """Run parts of prompts for requests that join later; their first expansion is shorter."""
        ...

    def move(self, moves: Sequence[KVMove]) -> None:
        """Make KV moves, in this order. Requests without a slab yet have nothing to move."""
        ...

    def release(self, request_ids: Sequence[int]) -> None:
        """Free the slabs of finished requests."""
        ...


@runtime_checkable
class AheadDrafter(Drafter, Protocol):
    """A drafter that can run forwards before they are asked for, and beside the host.

    Attributes:
        meanwhile: Called while a forward runs.
    """

    meanwhile: Callable[[], None]

    def expect(self, steps: int, *, width: int, fanout: int, grow: Grow) -> None:
        """Say, before a forward of one request, what is sure to follow it.

        Args:
            steps: Forwards.
            width: Leaves of each, the heaviest there are.
            fanout: Most children of a node.
            grow: What so many forwards, or fewer, are chosen from; asked within the next forward.
        """
        ...


class ModelDrafter:
    """A draft model with its KV cache.

    Args:
        decoder: The model.
        cache: A slab per request.
        store: Prompt blocks of earlier requests; None to keep none.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, store: PrefixStore | None = None) -> None:
        self._decoder = decoder
        self.cache = cache
        self._store = store
        self._slots: dict[int, int] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}  # that run in parts
        self._unkept: dict[int, tuple[int, ...]] = {}  # blocks that may be kept

    def slot(self, request_id: int) -> int:
        """KV slab of a request."""
        return self._slots[request_id]

    @torch.inference_mode()
    def forward(self, expansion: Sequence[ExpansionRows], fanout: int) -> list[Choices]:
        """See ``Drafter.forward``."""
        batch = self._row_batch(expansion)
        hidden = self._decoder.forward(batch, self.cache)
        self._keep([rows.request_id for rows in expansion])
        ends = list(accumulate(batch.counts))
        wanted = [
            end - len(rows.nodes) + i
            for rows, end in zip(expansion, ends, strict=True)
            for i in range(len(rows.nodes))
        ]
        log_probs_NV = torch.log_softmax(self._decoder.logits(hidden[wanted]), dim=-1)
        best = log_probs_NV.topk(min(fanout, log_probs_NV.shape[-1]), dim=-1)
        tokens_NK = best.indices
        if self._decoder.token_map is not None:
            tokens_NK = self._decoder.token_map[tokens_NK]
        tokens, log_probs = tokens_NK.tolist(), best.values.tolist()
        choices: list[Choices] = []
        at = 0
        for rows in expansion:
            end = at + len(rows.nodes)
            choices.append((tokens[at:end], log_probs[at:end]))
            at = end
        return choices

    @torch.inference_mode()
    def run_prompts(self, prompts: Sequence[PromptRows]) -> None:
        """See ``Drafter.run_prompts``."""
        for part in prompts:
            if part.tokens:
                self._prompts[part.request_id] = part.tokens
                self._open(part.request_id, part.tokens)
            slot = self._slots[part.request_id]
            start = self.cache.length(slot)
            if start < part.end:
                tokens = self._prompts[part.request_id][start : part.end]
                self._decoder.forward(causal_rows(slot, tokens, start=start), self.cache)
        self._keep([part.request_id for part in prompts])

    def _open(self, request_id: int, prompt: tuple[int, ...]) -> None:
        """Give a request a slab, with the blocks of its prompt that are there; not the last row."""
        slot = self._slots[request_id] = self.cache.take()
        if self._store is not None:
            blocks = self._unkept[request_id] = block_ids(prompt)
            found = self._store.restore(self.cache, slot, blocks, prompt)
            self.cache.truncate(slot, min(found, len(prompt) - 1))

    def _keep(self, request_ids: Sequence[int]) -> None:
        """Keep prompts' blocks for later requests, once they have been run."""
        for request_id in request_ids:
            blocks, slot = self._unkept.get(request_id, ()), self._slots[request_id]
            if self._store is None or self.cache.length(slot) < PREFIX_BLOCK * len(blocks):
                continue
            self._store.keep(self.cache, slot, blocks, self.cache.length(slot))
            self._unkept.pop(request_id, None)

    def _row_batch(self, expansion: Sequence[ExpansionRows]) -> RowBatch:
        """Rows of an expansion, without those that are in the slab already."""
        skips = []
        for rows in expansion:
            if rows.request_id not in self._slots:
                self._open(rows.request_id, rows.tokens)
            skips.append(self.cache.length(self._slots[rows.request_id]) - rows.context)
        pairs = list(zip(expansion, skips, strict=True))
        return RowBatch(
            slots=tuple(self._slots[rows.request_id] for rows in expansion),
            counts=tuple(len(rows.tokens) - skip for rows, skip in pairs),
            tokens=torch.tensor([t for rows, skip in pairs for t in rows.tokens[skip:]]),
            positions=torch.tensor([p for rows, skip in pairs for p in rows.positions[skip:]]),
            visible=tuple(_visible_mask(rows) for rows in expansion),
        )

    def move(self, moves: Sequence[KVMove]) -> None:
        """See ``Drafter.move``."""
        for move in moves:
            slot = self._slots.get(move.request_id)
            if slot is not None:
                self.cache.gather(slot, move.base, [move.base + row for row in move.rows])

    def release(self, request_ids: Sequence[int]) -> None:
        """See ``Drafter.release``."""
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            self._prompts.pop(request_id, None)
            self._unkept.pop(request_id, None)
            if slot is not None:
                self.cache.free(slot)


def _visible_mask(rows: ExpansionRows) -> torch.Tensor | None:
    """(n, tree rows after this forward) bool, or None for rows that just follow one another."""
    if rows.visible is None:
        return None
    width = max(row[-1] for row in rows.visible) + 1
    mask = torch.zeros(len(rows.visible), width, dtype=torch.bool)
    for i, slots in enumerate(rows.visible):
        mask[i, list(slots)] = True
    return mask


class NgramDrafter:
    """Prompt look-up: propose what followed the same last tokens earlier in the request.

    The longest suffix of the path that occurred before wins; its continuations are ranked by how
    often, then how recently they followed. Their chance is a count-based guess that grows with the
    length of the match; ``codesign fit`` calibrates it like any other confidence.

    Source:
        Prompt lookup decoding, as in Hugging Face transformers' ``prompt_lookup_num_tokens``.
    """

    MAX_NGRAM = 3

    def __init__(self) -> None:
        self._slabs: dict[int, list[int]] = {}  # one token per KV row, laid out [prefix | tree]

    def forward(self, expansion: Sequence[ExpansionRows], fanout: int) -> list[Choices]:
        """See ``Drafter.forward``."""
        return [self._request_choices(rows, fanout) for rows in expansion]

    def _request_choices(self, rows: ExpansionRows, fanout: int) -> Choices:
        slab = self._slabs.setdefault(rows.request_id, [])
        slab += rows.tokens
        if rows.visible is None:  # they follow one another
            first = len(slab) - len(rows.nodes) + 1
            paths = [slab[:end] for end in range(first, len(slab) + 1)]
        else:
            prefix = len(slab) - 1 - max(row[-1] for row in rows.visible)
            paths = [slab[:prefix] + [slab[prefix + s] for s in row] for row in rows.visible]
        found = [_continuations(path, self.MAX_NGRAM)[:fanout] for path in paths]
        return (
            [[token for token, _ in pairs] for pairs in found],
            [[log_prob for _, log_prob in pairs] for pairs in found],
        )

    def run_prompts(self, prompts: Sequence[PromptRows]) -> None:
        """See ``Drafter.run_prompts``; a look-up needs no rows before."""

    def move(self, moves: Sequence[KVMove]) -> None:
        """See ``Drafter.move``."""
        for move in moves:
            slab = self._slabs.get(move.request_id)
            if slab is not None:
                slab[move.base :] = [slab[move.base + row] for row in move.rows]

    def release(self, request_ids: Sequence[int]) -> None:
        """See ``Drafter.release``."""
        for request_id in request_ids:
            self._slabs.pop(request_id, None)


def _continuations(path: list[int], max_ngram: int) -> list[tuple[int, float]]:
    """Tokens that followed the longest repeated suffix of ``path``, likeliest first."""
    for size in range(min(max_ngram, len(path) - 1), 0, -1):
        suffix = path[-size:]
        count: dict[int, int] = {}
        latest: dict[int, int] = {}
        for end in range(size, len(path)):
            if path[end - size : end] == suffix:
                count[path[end]] = count.get(path[end], 0) + 1
                latest[path[end]] = end
        if count:
            total = sum(count.values()) + 2.0 / size  # Laplace-like: short matches are less sure
            ranked = sorted(count, key=lambda t: (-count[t], -latest[t]))
            return [(t, math.log(count[t] / total)) for t in ranked]
    return []
