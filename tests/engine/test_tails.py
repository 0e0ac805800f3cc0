"""No request's tail is longer than the graph of its step has room for, and none could have less.

Tails are counted here as the attention kernel does it, from the rows that a forward gets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import codesign.engine.gpu.run as run_module
from codesign.config import Deployment, Serving
from codesign.engine.gpu import step_rows
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.gpu.step_rows import BUCKETS, RequestRows, pack_step
from codesign.engine.gpu.tails import target_tail
from codesign.engine.run import PolicySetup
from codesign.kernels.attention_shares import max_tokens
from codesign.kernels.fused_attention import MAX_TAIL, TAIL_BLOCK
from codesign.kernels.leaf_choices import SLOTS
from codesign.plan import Candidate
from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.interface import MAX_TREE_ROWS
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest


@dataclass(frozen=True)
class Tail:
    """A tail of some rows in a forward, and the room there."""

    rows: int
    bucket: int
    room: int

    @property
    def is_draft(self) -> bool:
        return self.room == MAX_TAIL


def items_of(slots: list[int], places: list[int], most: int) -> Iterator[tuple[range, range]]:
    """Rows of each of the kernel's items, and those of the run that it is a part of."""
    starts = [
        i
        for i in range(len(slots))
        if i == 0 or slots[i] != slots[i - 1] or places[i] != places[i - 1] + 1
    ]
    for start, end in itertools.pairwise([*starts, len(slots)]):
        for first in range(start, end, most):
            yield range(first, min(first + most, end)), range(start, end)


class Tails:
    """Stands before ``RankForward.hidden``: looks at the rows, then lets them run."""

    def __init__(self) -> None:
        self.found: list[Tail] = []

    def of_targets(self) -> list[Tail]:
        return [tail for tail in self.found if not tail.is_draft]

    def of_drafts(self) -> list[Tail]:
        return [tail for tail in self.found if tail.is_draft]

    def watched(self):
        hidden = RankForward.hidden

        def looked_at(forward, rows, slabs, scratch, *, max_tail=MAX_TAIL, in_pairs=False):
            self.look(forward, rows, slabs.scratch_slot, max_tail)
            return hidden(forward, rows, slabs, scratch, max_tail=max_tail, in_pairs=in_pairs)

        return mock.patch.object(RankForward, "hidden", looked_at)

    def look(self, forward, rows, scratch_slot: int, room: int) -> None:
        columns = (rows.slots_T, rows.kv_rows_T, rows.prefixes_T, rows.positions_T)
        slots, places, prefixes, positions = (column.tolist() for column in columns)
        paths = rows.path_TP.tolist()
        bucket, count = len(slots), sum(slot != scratch_slot for slot in slots)
        assert scratch_slot not in slots[:count], "padding comes last"
        most = max_tokens(forward.shape.heads, forward.shape.kv_heads)
        for item, run in items_of(slots[:count], places[:count], most):
            least = min(prefixes[row] for row in item)
            first = min(least, places[run[0]]) & ~15
            end = places[run[-1]] + 1
            assert end - first <= room, f"{end - first} rows in a tail of {room}"
            self.found.append(Tail(end - first, bucket, room))
            for row in item:  # what is not seen by all lies in the tail
                path = paths[row][: max(positions[row] + 1 - prefixes[row], 0)]
                assert all(first <= prefixes[row] + step < end for step in path)
                assert first <= prefixes[row] or positions[row] < first


POLICIES = (
    "plain", "chain-7", "static-tree-3x2x1", "tree-8x4x4", "tree-31x16x8", "async-tree-8x4x8",
    "async-tree-16x16x8", "async-batch-tree-8x2x4", "inflight-tree-5x2x3", "pipeinfer-4x2x2",
    "ssd-3x2", "adaserve-4x2x9",
)  # fmt: skip
SERVINGS = (
    Serving(),
    Serving(preemption=True),
    Serving(prefill_chunk=50),
    Serving(prefill_chunk=30, prefix_cache=True, preemption=True),
)
TARGET = StepTime.linear(alpha=1e-7, gamma=1e-4, delta=0.01)
DRAFT = StepTime.linear(alpha=1e-7, gamma=1e-5, delta=0.001)
COST = RoundCost(TARGET, DRAFT, TARGET, DRAFT)
PROMPTS = st.lists(st.integers(1, 90), min_size=1, max_size=5)


def serve(pair, policy, lengths, *, serving=SERVINGS[0], new_tokens=24, batch=3, spare=4000,
          smallest=8, overlapping=None) -> Tails:  # fmt: skip
    """Serve prompts of these lengths on a CPU rank; all tails of its steps."""
    spec, watch = parse_policy(policy), Tails()
    vocab = pair.target.shape.vocab
    requests = [
        BoundRequest(i, 0.0, "", tuple((7 * i + j * j) % vocab for j in range(length)), new_tokens)
        for i, length in enumerate(lengths)
    ]
    limit = max(lengths) + new_tokens + spec.kv_rows + 16 + spare
    candidate = Candidate(Deployment(1, int(spec.is_async)), spec, batch)
    shares = {"serving": serving, "max_kv_tokens": limit}
    setup = rank_setup(
        candidate, requests, target=pair.target_dir, draft=pair.draft_dir, device="cpu",
        dtype="float32", page_rows=16, smallest_bucket=smallest, check=True,
        sampling=Sampling(0.7, seed=len(lengths)), policy=PolicySetup(spec, COST, slo_tpot=0.05),
        **shares,
    )  # fmt: skip
    local = run_module.LocalDraft if overlapping is None else overlapping
    with watch.watched(), mock.patch.object(run_module, "LocalDraft", local):
        faults: list[int] = []
        result = run_on_ranks(
            replace(setup, draft_ranks=0), candidate, requests, **shares,
            inspect=lambda rank: faults.extend(m.num_faults() for m in rank.models.values()),
        )  # fmt: skip
    assert not any(faults)
    assert all(len(tokens) == new_tokens for tokens in result.outputs.values())
    return watch


@given(
    st.sampled_from(POLICIES),
    PROMPTS,
    st.sampled_from(SERVINGS),
    st.sampled_from((1, 3, 6)),
    st.sampled_from((0, 40, 4000)),
    st.sampled_from((8, 8, 16, 32)),
)
@settings(
    max_examples=12,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a smaller case takes minutes to find
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a class
)
def test_tails_fit_their_graphs_whatever_is_served(
    pair, overlapping_draft, policy, lengths, serving, batch, spare, smallest
):
    overlapping = overlapping_draft if parse_policy(policy).is_async else None
    watch = serve(
        pair, policy, lengths, serving=serving, batch=batch, spare=spare, smallest=smallest,
        overlapping=overlapping,
    )  # fmt: skip
    assert all(tail.room == target_tail(tail.bucket) for tail in watch.of_targets())
    assert all(tail.rows <= MAX_TREE_ROWS + 15 for tail in watch.of_drafts())
    assert watch.of_targets()


def test_a_target_needs_every_row_of_its_tail_and_packing_says_so_if_there_is_one_less(pair):
    watch = serve(pair, "chain-7", [9], new_tokens=60)
    assert max(tail.rows for tail in watch.of_targets()) == 8 + 15 == target_tail(8)
    shorter = mock.patch.object(step_rows, "target_tail", lambda bucket: bucket + 14)
    with shorter, pytest.raises(AssertionError, match="a tail of 23 rows in a step whose graph"):
        serve(pair, "chain-7", [9], new_tokens=60)


def test_a_draft_needs_more_than_a_target_of_its_bucket(pair):
    drafts = serve(pair, "tree-31x16x8", [9], new_tokens=40).of_drafts()
    assert max(tail.rows for tail in drafts if tail.bucket == 16) > 100 > target_tail(16)


def test_rows_behind_a_grown_tree_do_not_pass_for_a_target():
    leaves = RequestRows(0, (1,), (42,), 80, (40,), ((0, 5, 40),), (-1,))
    pack_step([leaves], bucket=8, scratch_slot=1, max_tail=MAX_TAIL)
    with pytest.raises(AssertionError, match="slab 0: a tail of 49 rows in a step whose graph"):
        pack_step([leaves], bucket=8, scratch_slot=1)


def test_every_bucket_and_every_tree_has_room():
    assert [target_tail(bucket) for bucket in BUCKETS] == [23, 31, 47, 79, 143]
    assert max(MAX_TREE_ROWS, SLOTS, BUCKETS[-1]) + TAIL_BLOCK - 1 <= MAX_TAIL
