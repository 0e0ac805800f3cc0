"""What deciding costs on this host is timed over rounds in which there is something to decide."""

from __future__ import annotations

from codesign.policy.batch_tree import BatchTree
from codesign.profiler.deciding import BATCHES, deciding_timings


def test_looks_are_timed_at_every_batch_while_the_policy_drafts_and_verifies(monkeypatch):
    selected, made = [], []
    select, leaves = BatchTree.select, BatchTree.leaves

    def spy_leaves(policy, trees, done):
        found = leaves(policy, trees, done)
        made.append((len(trees), any(found)))
        return found

    def spy_select(policy, trees):
        chosen = select(policy, trees)
        selected.append((len(trees), sum(map(len, chosen))))
        return chosen

    monkeypatch.setattr(BatchTree, "leaves", spy_leaves)
    monkeypatch.setattr(BatchTree, "select", spy_select)
    timings = deciding_timings()
    assert tuple(timings["requests"]) == BATCHES
    assert (timings["seconds"] > 0).all()
    for batch in BATCHES:
        rounds = [rows for size, rows in selected if size == batch]
        assert sum(rows > batch for rows in rounds) > len(rounds) / 2  # most verify draft tokens
        assert sum(drafts for size, drafts in made if size == batch) >= len(rounds)
