"""What a rank group's draft holds and says is what a fresh forward would; its timing is nobody's.

A wrong row on the draft's side changes no token, only what is accepted: it needs tests of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import codesign.engine.gpu.ranks as rank_module
import codesign.engine.gpu.run as run_module
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.gpu.group_drafter import GroupDrafter, PendingMove
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.request_rows import rows_to_expand
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.gpu.slabs import Slabs
from codesign.policy.speculation import parse_policy
from codesign.policy.step_time import BUCKETS


class ParityDrafter(GroupDrafter):
    """Compares the slab rows that each new row sees, and its answer, with a fresh forward."""

    num_checked = 0

    def forward(self, expansion, fanout):
        choices = super().forward(expansion, fanout)
        for rows, (tokens, log_probs) in zip(expansion, choices, strict=True):
            request = rows_to_expand(rows, self._slots[rows.request_id])
            seen_in_tree = rows.visible or [()] * len(rows.tokens)
            first = len(rows.tokens) - len(rows.nodes)  # rows before are not asked about
            for i, (best, chances) in enumerate(zip(tokens, log_probs, strict=True), first):
                steps = [request.prefixes[i] + step for step in seen_in_tree[i]]
                self.check([*range(request.prefixes[i]), *steps], request.slot, best, chances)
        return choices

    def check(self, rows, slot, best, chances):
        rank = self._leader.rank
        labels = rank.slabs.labels(slot)
        assert [labels[row][0] for row in rows] == list(range(len(rows)))
        path = torch.tensor([labels[row][1] for row in rows])
        fresh = Slabs(
            rank.forward.shape,
            num_slots=1,
            max_tokens=len(rows),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        with torch.inference_mode():
            hidden = rank.forward.prompt_hidden(path, 0, fresh)
            wanted = torch.log_softmax(rank.forward.head.logits(hidden)[0], dim=-1)
        assert torch.tensor(chances) == pytest.approx(wanted[best].numpy(), abs=1e-4)
        for ours, theirs in (
            (rank.slabs.keys_LBGME, fresh.keys_LBGME),
            (rank.slabs.values_LBGME, fresh.values_LBGME),
        ):
            torch.testing.assert_close(ours[:, slot][:, :, rows], theirs[:, 0], rtol=0, atol=1e-4)
        ParityDrafter.num_checked += 1


def serve(pair, policy, requests, *, in_one_process=True, max_batch=3, **options):
    spec = parse_policy(policy)
    candidate = Candidate(Deployment(1, int(spec.is_async)), spec, max_batch)
    setup = rank_setup(
        candidate, requests, target=pair.target_dir, draft=pair.draft_dir, device="cpu",
        dtype="float32", check=True, **options,
    )  # fmt: skip
    if in_one_process:
        setup = replace(setup, draft_ranks=0)
    return run_on_ranks(setup, candidate, requests)


@pytest.fixture
def parity(monkeypatch, overlapping_draft):
    ParityDrafter.num_checked = 0
    monkeypatch.setattr(rank_module, "GroupDrafter", ParityDrafter)
    monkeypatch.setattr(run_module, "LocalDraft", overlapping_draft)
    return ParityDrafter


@pytest.mark.parametrize("policy", ["chain-3", "tree-4x2x3", "async-tree-8x4x3"])
def test_every_row_that_the_draft_sees_equals_a_fresh_forward(pair, make_requests, parity, policy):
    requests = make_requests(4)
    ours = serve(pair, policy, requests)
    assert ours.outputs == serve(pair, "plain", requests).outputs
    assert parity.num_checked > 100


@pytest.mark.parametrize("policy", ["tree-4x2x2", "async-tree-4x2x2"])
def test_a_draft_that_rests_for_more_rows_than_a_forward_has_catches_up(
    pair, make_requests, parity, resting, policy
):
    requests = make_requests(2, max_new_tokens=resting)
    ours = serve(pair, policy, requests)
    assert ours.outputs == serve(pair, "plain", requests).outputs
    assert parity.num_checked > 50
    assert ours.records.rounds.column("draft_rows").max() > BUCKETS[-1]


def test_a_wrong_move_is_caught(pair, make_requests, parity, monkeypatch):
    """Negative control: a move forgotten must not go unnoticed."""
    monkeypatch.setattr(PendingMove, "pairs", lambda self: iter(()))
    with pytest.raises(AssertionError):
        serve(pair, "async-tree-8x4x3", make_requests(4))


def test_a_thousand_rounds_over_slow_links_change_no_token(pair, make_requests, slow_links):
    requests = make_requests(7, max_new_tokens=320)
    ours = serve(
        pair, "async-tree-8x4x3", requests, in_one_process=False, max_batch=1,
        draft_delay=slow_links,
    )  # fmt: skip
    assert len(ours.records.rounds) >= 1000
    assert not ours.records.notes
    assert ours.outputs == serve(pair, "plain", requests, max_batch=7).outputs
