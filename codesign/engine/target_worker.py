"""The target's half of a round: prefill prompts, verify trees, keep accepted KV rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from codesign.engine.kv_cache import KVCache
from codesign.engine.model import Decoder
from codesign.engine.pieces import PromptPiece
from codesign.engine.prefix_store import PrefixStore
from codesign.engine.rows import RowBatch, causal_rows, join_rows
from codesign.engine.target import Target, never, nothing
from codesign.policy.protocol import (
    Admission,
    Candidates,
    RequestVerdict,
    TargetSide,
    VerifyRows,
)
from codesign.policy.stop_text import Push
from codesign.policy.turns import Turns
from codesign.policy.walk import Sampling, sample_token


class TargetWorker(Target):
    """Drives ``TargetSide`` with the target model.

    Args:
        decoder: The target model.
        cache: A slab per running request.
        sampling: How logits become tokens; its seed keys the noise.
        stop_tokens: Tokens that end a request.
        new_text: Makes what turns tokens into text, for requests with stop strings.
        store: Prompt blocks of earlier requests; None to keep none.
        turns: Who takes part in rounds of plain decoding; None if all do.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        sampling: Sampling,
        stop_tokens: frozenset[int] = frozenset(),
        new_text: Callable[[], Push] | None = None,
        store: PrefixStore | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.side = TargetSide(new_text, turns)
        self.cache = cache
        self._decoder = decoder
        self._sampling = sampling
        self._stop_tokens = stop_tokens
        self._store = store
        self._slots: dict[int, int] = {}
        self._blocks: dict[int, Sequence[int]] = {}
        self._samplings: dict[int, Sampling] = {}

    def open_prompt(self, admission: Admission, blocks: Sequence[int]) -> int:
        """See ``Target.open_prompt``."""
        request_id = admission.request_id
        slot = self._slots[request_id] = self.cache.take()
        self._blocks[request_id] = blocks
        self._samplings[request_id] = admission.options.sampling or self._sampling
        if self._store is None:
            return 0
        return self._store.restore(self.cache, slot, blocks, admission.tokens)

    @torch.inference_mode()
    def run_pieces(self, pieces: Sequence[PromptPiece]) -> list[RequestVerdict]:
        """Run parts of prompts in one forward, and commit the token after each that is complete."""
        parts = _joined(pieces)
        for part in parts:
            self.cache.truncate(self._slots[part.request_id], part.start)
        batch = join_rows(
            [causal_rows(self._slots[p.request_id], p.tokens, start=p.start) for p in parts]
        )
        hidden = self._decoder.forward(batch, self.cache)
        ends = torch.tensor(batch.counts).cumsum(0) - 1
        last = [i for i, part in enumerate(parts) if part.is_last]
        logits_BV = self._decoder.logits(hidden[ends[last]]).numpy() if last else ()
        verdicts = []
        for i, logits_V in zip(last, logits_BV, strict=True):
            admission = parts[i].admission
            token = sample_token(
                logits_V,
                self._samplings[admission.request_id],
                request_id=admission.request_id,
                position=len(admission.tokens),
            )
            self.side.admit(admission, self._stop_tokens)
            verdicts.append(self.side.commit_first(admission.request_id, token))
        if self._store is not None:
            for part in parts:
                slot, blocks = self._slots[part.request_id], self._blocks[part.request_id]
                self._store.keep(self.cache, slot, blocks, part.end)
        self.free_finished(verdicts)
        return verdicts

    @torch.inference_mode()
    def verify(
        self,
        candidates: Candidates | None,
        meanwhile: Callable[[], None] = nothing,
        goes_on: Callable[[], bool] = never,
    ) -> tuple[list[VerifyRows], list[RequestVerdict]]:
        """Run every request's tree (or last token) in one forward, walk, and commit."""
        meanwhile()
        rows = self.side.verify_rows(candidates)
        hidden = self._decoder.forward(self._row_batch(rows), self.cache)
        logits_TV = self._decoder.logits(hidden).numpy()
        verdicts = []
        first = 0
        for request in rows:
            logits_NV = logits_TV[first : first + len(request.tokens)]
            verdict, move = self.side.judge(
                request,
                lambda row, request=request, logits_NV=logits_NV: sample_token(
                    logits_NV[row],
                    self._samplings.get(request.request_id, self._sampling),
                    request_id=request.request_id,
                    position=request.positions[row] + 1,
                ),
            )
            verdicts.append(verdict)
            self.cache.gather(
                self._slots[request.request_id], move.base, [move.base + r for r in move.rows]
            )
            first += len(request.tokens)
        self.free_finished(verdicts)
        return rows, verdicts

    def _row_batch(self, rows: Sequence[VerifyRows]) -> RowBatch:
        return RowBatch(
            slots=tuple(self._slots[r.request_id] for r in rows),
            counts=tuple(len(r.tokens) for r in rows),
            tokens=torch.tensor([t for r in rows for t in r.tokens]),
            positions=torch.tensor([p for r in rows for p in r.positions]),
            visible=tuple(_ancestor_mask(r) for r in rows),
        )

    def free(self, request_id: int) -> None:
        """See ``Target.free``."""
        if request_id in self._slots:
            self.cache.free(self._slots.pop(request_id))
            self._blocks.pop(request_id, None)
            self._samplings.pop(request_id, None)


def _joined(pieces: Sequence[PromptPiece]) -> list[PromptPiece]:
    """Pieces that follow one another as one: a CPU's forward takes any number of rows."""
    parts: list[PromptPiece] = []
    for piece in pieces:
        if parts and parts[-1].request_id == piece.request_id:
            start = parts.pop().start
            piece = replace(piece, start=start, count=piece.end - start)
        parts.append(piece)
    return parts


def _ancestor_mask(rows: VerifyRows) -> torch.Tensor:
    """(N, N) bool: row i sees itself and its ancestors."""
    mask = torch.zeros(len(rows.tokens), len(rows.tokens), dtype=torch.bool)
    for i, seen in enumerate(rows.ancestors()):
        mask[i, seen] = True
    return mask
