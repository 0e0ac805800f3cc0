"""The target's half of a round: prefill prompts, verify trees, keep accepted KV rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from codesign.engine.kv_cache import KVCache
from codesign.engine.model import Decoder
from codesign.engine.rows import RowBatch
from codesign.policy.protocol import (
    Admission,
    Candidates,
    RequestVerdict,
    TargetSide,
    VerifyRows,
)
from codesign.policy.walk import Sampling, sample_token


class TargetWorker:
    """Drives ``TargetSide`` with the target model.

    Args:
        decoder: The target model.
        cache: A slab per running request.
        sampling: How logits become tokens; its seed keys the noise.
        stop_tokens: Tokens that end a request.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        sampling: Sampling,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.side = TargetSide()
        self.cache = cache
        self._decoder = decoder
        self._sampling = sampling
        self._stop_tokens = stop_tokens
        self._slots: dict[int, int] = {}

    @torch.inference_mode()
    def prefill(self, admissions: Sequence[Admission]) -> list[RequestVerdict]:
        """Run whole prompts in one forward and commit the token after each."""
        for admission in admissions:
            self.side.admit(admission, self._stop_tokens)
            self._slots[admission.request_id] = self.cache.take()
        counts = [len(a.tokens) for a in admissions]
        batch = RowBatch(
            slots=tuple(self._slots[a.request_id] for a in admissions),
            counts=tuple(counts),
            tokens=torch.tensor([t for a in admissions for t in a.tokens]),
            positions=torch.tensor([p for count in counts for p in range(count)]),
            visible=(None,) * len(counts),
        )
        hidden = self._decoder.forward(batch, self.cache)
        last_rows = torch.tensor(counts).cumsum(0) - 1
        logits_BV = self._decoder.logits(hidden[last_rows]).numpy()
        verdicts = []
        for admission, logits_V in zip(admissions, logits_BV, strict=True):
            token = sample_token(
                logits_V,
                self._sampling,
                request_id=admission.request_id,
                position=len(admission.tokens),
            )
            verdicts.append(self.side.commit_first(admission.request_id, token))
        self._release_finished(verdicts)
        return verdicts

    @torch.inference_mode()
    def verify(
        self, candidates: Candidates | None
    ) -> tuple[list[VerifyRows], list[RequestVerdict]]:
        """Run every request's tree (or last token) in one forward, walk, and commit."""
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
                    self._sampling,
                    request_id=request.request_id,
                    position=request.positions[row] + 1,
                ),
            )
            verdicts.append(verdict)
            self.cache.gather(
                self._slots[request.request_id], move.base, [move.base + r for r in move.rows]
            )
            first += len(request.tokens)
        self._release_finished(verdicts)
        return rows, verdicts

    def _row_batch(self, rows: Sequence[VerifyRows]) -> RowBatch:
        return RowBatch(
            slots=tuple(self._slots[r.request_id] for r in rows),
            counts=tuple(len(r.tokens) for r in rows),
            tokens=torch.tensor([t for r in rows for t in r.tokens]),
            positions=torch.tensor([p for r in rows for p in r.positions]),
            visible=tuple(_ancestor_mask(r) for r in rows),
        )

    def _release_finished(self, verdicts: Sequence[RequestVerdict]) -> None:
        for verdict in verdicts:
            if verdict.is_finished:
                self.cache.free(self._slots.pop(verdict.request_id))


def _ancestor_mask(rows: VerifyRows) -> torch.Tensor:
    """(N, N) bool: row i sees itself and its ancestors."""
    mask = torch.zeros(len(rows.tokens), len(rows.tokens), dtype=torch.bool)
    for i, seen in enumerate(rows.ancestors()):
        mask[i, seen] = True
    return mask
