"""The draft's KV rows are right after every re-root.

A wrong row on the draft side never changes the output, only the acceptance, so it needs a test of
its own: every expansion's log probabilities equal those of a fresh forward of the whole path.
"""

from __future__ import annotations

import pytest
import torch

import codesign.engine.run as engine_run
from codesign.engine.drafter import ModelDrafter
from codesign.engine.kv_cache import KVCache
from codesign.engine.rows import RowBatch


class ParityDrafter(ModelDrafter):
    """Checks every answer against a forward from scratch."""

    num_checked = 0

    def forward(self, expansion, fanout):
        choices = super().forward(expansion, fanout)
        for rows, (tokens, log_probs) in zip(expansion, choices, strict=True):
            slab = _SLABS.setdefault((id(self), rows.request_id), [])
            slab += rows.tokens
            for i, node_tokens in enumerate(tokens):
                path = slab
                if rows.visible is not None:
                    prefix = len(slab) - 1 - rows.visible[-1][-1]
                    path = slab[:prefix] + [slab[prefix + s] for s in rows.visible[i]]
                expected = _fresh_log_probs(self._decoder, path)
                assert torch.tensor(log_probs[i]) == pytest.approx(
                    expected[node_tokens].numpy(), abs=1e-4
                )
                ParityDrafter.num_checked += 1
        return choices

    def move(self, moves):
        super().move(moves)
        for move in moves:
            slab = _SLABS.get((id(self), move.request_id))
            if slab is not None:
                slab[move.base :] = [slab[move.base + row] for row in move.rows]


_SLABS: dict[tuple[int, int], list[int]] = {}


def _fresh_log_probs(decoder, path):
    cache = KVCache(decoder.shape, num_slots=1, max_tokens=len(path))
    batch = RowBatch(
        slots=(cache.take(),),
        counts=(len(path),),
        tokens=torch.tensor(path),
        positions=torch.arange(len(path)),
        visible=(None,),
    )
    hidden = decoder.forward(batch, cache)
    return torch.log_softmax(decoder.logits(hidden[-1:]), dim=-1)[0]


@pytest.fixture
def parity(monkeypatch, overlapping_draft):
    _SLABS.clear()
    ParityDrafter.num_checked = 0
    monkeypatch.setattr(engine_run, "ModelDrafter", ParityDrafter)
    monkeypatch.setattr(engine_run, "RemoteDraft", lambda setup: overlapping_draft(setup.build()))
    return ParityDrafter


@pytest.mark.parametrize(
    "policy", ["chain-3", "threshold-5@0.4", "tree-8x4x2", "tree-4x2x3", "async-tree-8x4x3"]
)
def test_every_expansion_equals_a_fresh_forward_of_its_path(
    serve, serve_plain, make_requests, parity, policy
):
    plain = serve_plain(make_requests(4))
    ours = serve(policy, make_requests(4))
    assert ours.outputs == plain.outputs
    assert parity.num_checked > 100


@pytest.mark.parametrize("policy", ["tree-4x2x2", "async-tree-4x2x2"])
def test_a_draft_that_begins_late_and_rests_long_still_equals_a_fresh_forward(
    serve, make_requests, parity, resting, policy
):
    requests = make_requests(2, max_new_tokens=resting)
    ours = serve(policy, requests)
    assert ours.outputs == serve("plain", requests).outputs
    assert parity.num_checked > 50
    assert sum(len(rows) for rows in ours.outputs.values()) == 2 * resting


def test_a_wrong_move_is_caught(serve, make_requests, parity, monkeypatch):
    """Negative control: rows kept in the wrong order must not go unnoticed."""
    right = ModelDrafter.move

    def swapped(self, moves):
        right(self, moves)
        for move in moves:
            slot = self._slots.get(move.request_id)
            if slot is not None and len(move.rows) > 1:
                last = move.base + len(move.rows) - 1
                self.cache.gather(slot, last - 1, [last, last - 1])

    monkeypatch.setattr(ModelDrafter, "move", swapped)
    with pytest.raises(AssertionError):
        serve("async-tree-8x4x3", make_requests(4), check=False)
