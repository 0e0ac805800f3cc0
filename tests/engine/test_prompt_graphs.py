"""Prompts padded to a bucket, as graphs run them, against prompts of their own length.

A graph is captured on a GPU; what it does runs here call by call.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import codesign
from codesign.engine.checkpoint import open_rank
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.heads import DraftHead, TargetHead
from codesign.engine.gpu.model_rank import ModelRank
from codesign.engine.gpu.paging import Entry, Paging
from codesign.engine.gpu.prompt_rows import (
    LONG_BUCKETS,
    LONG_CONTEXT,
    PROMPT_BUCKETS,
    bucket_for,
    buckets_up_to,
    long_buckets,
    prompt_message,
)
from codesign.engine.gpu.row_sampling import RowTargetHead, sampling_words
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.slot_messages import pages_message, sampling_message
from codesign.engine.gpu.tensor_group import SingleRank
from codesign.models.shape import model_shape
from codesign.models.sharding import Sharding
from codesign.policy.walk import Sampling

SHAPES = Path(codesign.__file__).parent / "data" / "shapes"
CPU, TOKENS, SLOTS, PAGE = torch.device("cpu"), 640, 3, 16
WARM, OTHER = Sampling(temperature=0.9, seed=4), Sampling(temperature=1.2, top_k=5, seed=6)
NUCLEUS, COLD = Sampling(temperature=1.0, top_p=0.9), Sampling(top_k=3, top_p=0.5)
HEADS = {
    "greedy": lambda: TargetHead(Sampling()),
    "warm": lambda: TargetHead(WARM),
    "by row": lambda: RowTargetHead(SLOTS, CPU, (WARM, OTHER)),
    "draft": lambda: DraftHead(3),
}


@pytest.fixture
def both(pair):
    """Make two ranks that differ in how they run prompts: as they are, and padded."""

    def make(head: str = "greedy", *, paged: bool = False) -> list[ModelRank]:
        paging = Paging(PAGE, SLOTS * TOKENS // PAGE) if paged else None
        ranks = []
        for buckets in ((), buckets_up_to(512)):
            weights = open_rank(pair.target_dir, size=1, rank=0, device=CPU, dtype=torch.float32)
            forward = RankForward(weights, SingleRank())
            slabs = Slabs(
                forward.shape, num_slots=SLOTS, max_tokens=TOKENS, dtype=torch.float32, device=CPU,
                paging=paging, check=True,
            )  # fmt: skip
            rank = ModelRank(forward, slabs, HEADS[head]())
            rank.prepare((8,), buckets)
            if paged:  # the last pages first
                pages = range(paging.num_pages - 1, -1, -1)
                places = [(slot, i) for i in range(TOKENS // PAGE) for slot in range(SLOTS)]
                entries = [Entry(*place, page) for place, page in zip(places, pages, strict=True)]
                rank.answer(pages_message(entries))
            ranks.append(rank)
        return ranks

    return make


def made_up(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 61, (count,), generator=generator).tolist()


def ask(ranks: Sequence[ModelRank], tokens: list[int], slot: int, key: int = 0, **how) -> list[int]:
    """What both ranks answer; it must be the same."""
    answers = [rank.answer(prompt_message(tokens, slot, key, **how)).tolist() for rank in ranks]
    assert answers[0] == answers[1]
    return answers[0]


def rows_of(rank: ModelRank, slot: int, count: int) -> list[torch.Tensor]:
    rows_of_layer = rank.slabs.prompt_rows(slot, count)
    return [part for layer in range(len(rank.slabs.layers)) for part in rows_of_layer(layer)]


def same(ranks: Sequence[ModelRank], slot: int, count: int) -> None:
    """The first rows of a slab are the same, and nobody saw a row in a wrong place."""
    for present, padded in zip(*(rows_of(rank, slot, count) for rank in ranks), strict=True):
        torch.testing.assert_close(padded, present, rtol=0, atol=1e-5)
    labels = [rank.slabs.labels(slot)[:count] for rank in ranks]
    assert labels[0] == labels[1]
    assert [position for position, _ in labels[1]] == list(range(count))
    assert [rank.num_faults() for rank in ranks] == [0, 0]


@pytest.mark.parametrize("ways", [(WARM,), (WARM, OTHER), (WARM, NUCLEUS), (OTHER, COLD)])
def test_a_head_knows_the_cuts_of_its_run_and_the_numbers_of_its_rows(ways):
    head = RowTargetHead(SLOTS, CPU, ways)
    head.note(1, sampling_words(ways[-1]))
    head.slots_T = torch.tensor([1, SLOTS], dtype=torch.int32)  # the last is padding, and greedy
    found = head.sampling_of_rows()
    assert (found.has_top_k, found.has_top_p) == (OTHER in ways, NUCLEUS in ways)
    numbers = [found.temperature_T, found.top_k_T, found.top_p_T]
    wanted = [ways[-1].temperature, ways[-1].top_k, ways[-1].top_p]
    assert [column.tolist() for column in numbers] == [[number, 0] for number in wanted]


LENGTHS = (1, 15, 16, 17, 64, 65, 200, 256, 257, 512)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_a_padded_prompt_writes_its_rows_and_answers_as_one_of_its_own_length(
    both, head, paged, monkeypatch
):
    ranks = both(head, paged=paged)
    monkeypatch.setattr(ranks[1]._prompts, "_launch", None)  # not called
    for i, count in enumerate(LENGTHS):
        slot = i % SLOTS
        if head == "by row":
            for rank in ranks:
                rank.answer(sampling_message(slot, (WARM, OTHER)[i % 2]))
        answer = ask(ranks, made_up(count, i), slot, 12345678901234 + i)
        assert len(answer) == (head != "draft")
        same(ranks, slot, count)


@pytest.mark.parametrize("paged", [False, True])
def test_pieces_follow_each_other_in_any_bucket_and_in_none(both, paged):
    ranks, tokens = both("warm", paged=paged), made_up(300, 1)
    for start, end in ((0, 20), (20, 21), (21, 100), (100, 116), (116, 299)):
        assert ask(ranks, tokens[start:end], 1, 9, start=start, is_last=False) == []
    assert len(ask(ranks, tokens[299:], 1, 9, start=299)) == 1
    same(ranks, 1, 300)
    assert ask(ranks, tokens, 0, 9) == ask(ranks, tokens[295:], 1, 9, start=295)
    same(ranks, 0, 300)


@pytest.mark.parametrize("paged", [False, True])
def test_rows_that_are_there_and_those_of_others_stay(both, paged):
    ranks = both(paged=paged)
    for slot in range(SLOTS):
        ask(ranks, made_up(20 + slot, slot), slot)
    before = [[part.clone() for part in rows_of(ranks[1], slot, 20)] for slot in range(SLOTS)]
    ask(ranks, made_up(25, 7), 0, start=10, first_written=20)  # others of rows 10 to 19, not kept
    ask(ranks, made_up(1, 8), 1, start=20, first_written=21)  # the last row of a cached prompt
    for slot, parts in enumerate(before):
        for ours, theirs in zip(rows_of(ranks[1], slot, 20), parts, strict=True):
            assert torch.equal(ours, theirs)
    same(ranks, 0, 35)
    same(ranks, 1, 21)


def test_what_pads_a_prompt_changes_no_bit(both, monkeypatch):
    rank, tokens = both()[1], [token or 1 for token in made_up(18, 4)]
    monkeypatch.setattr(rank._prompts, "_launch", None)
    found = []
    for slot in (0, 1):
        answer = rank.answer(prompt_message(tokens, slot, 0)).tolist()
        found.append((answer, [part.clone() for part in rows_of(rank, slot, 18)]))
        rank.forward.embedding_VD[0] *= -3.0  # of the token that pads
        rank.answer(prompt_message(made_up(32, 5), 2, 0))  # leaves more words than the next one has
    assert found[0][0] == found[1][0]
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(ours, theirs)


def test_a_padded_piece_without_its_beginning_is_a_fault(both):
    rank = both()[1]
    rank.answer(prompt_message(made_up(5, 0), 0, 0, start=3, is_last=False))
    assert rank.num_faults() == 3


def test_pages_are_entered_in_order(both):
    rank = both(paged=True)[0]
    before = rank.slabs.tables_SK.clone()
    rank.answer(pages_message([Entry(1, 2, 5), Entry(0, 3, 4), Entry(1, 2, 7)]))
    before[1, 2], before[0, 3] = 7, 4
    assert torch.equal(rank.slabs.tables_SK, before)


def test_a_run_prepares_the_buckets_that_its_prompts_can_take():
    assert buckets_up_to(10) == (16,)
    assert buckets_up_to(16) == (16,)
    assert buckets_up_to(17) == (16, 32)
    assert buckets_up_to(257) == (*PROMPT_BUCKETS, 512)
    assert buckets_up_to(5000) == (*PROMPT_BUCKETS, *LONG_BUCKETS)
    assert buckets_up_to(5000, (512, 768)) == (*PROMPT_BUCKETS, 512, 768)
    assert buckets_up_to(5000, ()) == PROMPT_BUCKETS


SHARDED = {("llama-3.2-1b", 1): 2048, ("llama-3.2-3b", 1): 2048, ("llama-3.1-8b", 1): 1024}
SHARDED |= {("llama-3-70b", 1): 0, ("llama-3-70b", 2): 768, ("llama-3-70b", 4): 2048}


@pytest.mark.parametrize(("model", "ranks"), SHARDED)
def test_a_long_prompt_is_a_graph_where_its_launches_would_take_longer(model: str, ranks: int):
    shape = Sharding(model_shape(SHAPES / model), size=ranks, group=128).shape
    found = long_buckets(shape.layer_weights, adds_ranks=ranks > 1)
    assert found == tuple(b for b in LONG_BUCKETS if b <= SHARDED[model, ranks])


def test_a_long_bucket_is_for_prompts_near_their_beginning():
    assert bucket_for((16, 256, 512), 200, 100_000) == 256
    assert bucket_for((16, 256, 512), 512, LONG_CONTEXT - 512) == 512
    assert bucket_for((16, 256, 512), 512, LONG_CONTEXT - 511) is None
    assert bucket_for((16, 256, 512), 513, 0) is None
    assert bucket_for((), 1, 0) is None
