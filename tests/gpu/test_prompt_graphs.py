"""Prompts as CUDA graphs on a Hopper GPU: as kernel by kernel, whatever the padding.

python -m pytest tests/gpu/test_prompt_graphs.py
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bench_forward import RandomWeights
from benchmarks.bench_prompt_graphs import TOKENS, rank_of
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.graphs import Graphs
from codesign.engine.gpu.model_rank import ModelRank
from codesign.engine.gpu.paging import Entry, Paging
from codesign.engine.gpu.prompt_rows import buckets_up_to, prompt_message
from codesign.engine.gpu.slot_messages import pages_message
from codesign.engine.gpu.step_rows import Words, pack_step
from codesign.engine.gpu.tensor_group import SingleRank
from codesign.kernels import prompt_linear
from codesign.kernels.prompt_attention import prompt_attention, slab_attention

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
PAGE = 64
PIECES = [(0, 1, 16), (0, 16, 16), (0, 100, 128), (5, 33, 64), (700, 200, 256), (767, 1, 16)]
PIECES += [(0, 300, 512), (700, 1500, 1536), (0, 2048, 2048)]
ALL = buckets_up_to(2048)


@pytest.fixture(scope="module")
def forward() -> Iterator[RankForward]:
    """Two layers of the 1B's shape with random weights."""
    torch.manual_seed(0)
    weights: Any = RandomWeights("llama-3.2-1b", 1)
    weights.shape = replace(weights.shape, layers=2)
    with torch.inference_mode():
        yield RankForward(weights, SingleRank())


def prepared(forward: RankForward, *, buckets: tuple[int, ...], **slab_options: Any) -> ModelRank:
    """A greedy target; without buckets its prompts are launched kernel by kernel."""
    rank = rank_of(forward, **slab_options)
    rank.prepare((8,), buckets)
    return rank


def made_up(count: int, slot: int, *, seed: int = 0, **options: Any) -> Words:
    """A prompt's message."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 100_000, (count,), generator=random).tolist()
    return prompt_message(tokens, slot, 0, **options)


def keys_of(rank: ModelRank, slot: int, count: int) -> Tensor:
    """(G, count, E) of the last layer."""
    return rank.slabs.prompt_rows(slot, count)(len(rank.slabs.layers) - 1)[0][0].float()


def is_close_call(forward: RankForward, rank: ModelRank, tokens: Words, token: int) -> bool:
    """Whether rounding may decide for a token: a random model's best two may be that near."""
    prompt = torch.tensor(tokens.tolist(), device="cuda")
    logits = forward.head.logits(forward.prompt_hidden(prompt, 0, rank.slabs))[0]
    return bool(logits[token] > logits.max() - 0.01 * logits.std())


@pytest.mark.parametrize(("size", "heads", "groups"), [(64, 32, 8), (128, 64, 8)])
@torch.inference_mode()
def test_attention_of_padded_rows_is_that_of_flash_and_the_same_in_pages_and_pieces(
    size: int, heads: int, groups: int
) -> None:
    random = torch.Generator("cuda").manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16)

    def ints(a: int, b: int, c: int) -> tuple[Tensor, Tensor, Tensor]:
        words = torch.tensor([[a], [b], [c]], dtype=torch.int32, device="cuda")
        return words[0], words[1], words[2]

    slabs = [make(3, groups, TOKENS, size) for _ in range(2)]
    order = torch.randperm(3 * TOKENS // PAGE, generator=random, device="cuda")
    tables = order.view(3, -1).int().contiguous()
    paged = []
    for slab in slabs:
        pages = slab.view(3, groups, TOKENS // PAGE, PAGE, size).transpose(1, 2).flatten(0, 1)
        paged.append(torch.empty_like(pages).index_copy_(0, order, pages))
    for start, count, bucket in PIECES:
        q = torch.zeros(bucket, heads, size, device="cuda", dtype=torch.bfloat16)
        q[:count] = make(count, heads, size)
        words = ints(1, start, count)
        found = slab_attention(q, slabs[0], slabs[1], *words)
        wanted = prompt_attention(q[:count], *(s[1:2, :, : start + count] for s in slabs))
        torch.testing.assert_close(found[:count], wanted, atol=0.02, rtol=0.02)
        assert torch.equal(found, slab_attention(q, paged[0], paged[1], *words, tables))
        assert found.isfinite().all()
        last = q[count - 1 : count].expand(16, -1, -1).contiguous()
        words = ints(1, start + count - 1, 1)
        assert torch.equal(slab_attention(last, slabs[0], slabs[1], *words)[0], found[count - 1])


@torch.inference_mode()
def test_a_graph_gives_the_token_and_keys_of_the_same_prompt_launched_kernel_by_kernel(
    forward: RankForward,
) -> None:
    graphs = prepared(forward, buckets=ALL)
    launched = prepared(forward, buckets=())
    for count in (1, 16, 64, 147, 256, 257, 512, 700, 1024, 1500, 2048):
        message = made_up(count, 0, seed=count)
        [token], [other] = graphs.answer(message).tolist(), launched.answer(message).tolist()
        assert token == other or is_close_call(forward, launched, message[-count:], token)
        ours, theirs = keys_of(graphs, 0, count), keys_of(launched, 0, count)
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@torch.inference_mode()
def test_graphs_of_several_models_unpack_weights_into_the_same_memory(forward: RankForward) -> None:
    ranks = [prepared(forward, buckets=ALL) for _ in range(2)]
    message = made_up(700, 0)
    answers = [rank.answer(message).tolist() for rank in (*ranks, prepared(forward, buckets=()))]
    assert answers[0] == answers[1] == answers[2]
    assert len(prompt_linear._scratch) == 1


@torch.inference_mode()
def test_neither_padding_nor_another_graph_in_between_changes_a_bit(forward: RankForward) -> None:
    rank = prepared(forward, buckets=ALL)
    full, part, short = made_up(256, 0), made_up(147, 1), made_up(60, 1)
    assert part[-147:].tolist() == full[-256 : -256 + 147].tolist()
    rank.answer(full)
    rank.answer(part)
    assert torch.equal(keys_of(rank, 0, 147), keys_of(rank, 1, 147))
    idle = pack_step((), bucket=8, scratch_slot=rank.slabs.scratch_slot)
    runs = []
    for _ in range(3):
        runs.append((rank.answer(short).tolist(), keys_of(rank, 1, 60)))
        rank.answer(idle)
        rank.answer(full)
    assert all(run[0] == runs[0][0] and torch.equal(run[1], runs[0][1]) for run in runs)


@torch.inference_mode()
def test_rows_within_graphs_carry_their_labels_through_pages(forward: RankForward) -> None:
    paging = Paging(PAGE, 2 * TOKENS // PAGE)
    rank = prepared(forward, buckets=ALL, paging=paging, check=True)
    pages = iter(range(2 * TOKENS // PAGE - 1, -1, -1))
    entries = [Entry(slot, i, next(pages)) for i in range(TOKENS // PAGE) for slot in (0, 1)]
    rank.answer(pages_message(entries))
    ends = (100, 116, 372, 373, 1100, 2100)
    for start, end in itertools.pairwise((0, *ends)):
        rank.answer(made_up(end - start, 1, seed=end, start=start, is_last=end == ends[-1]))
    assert rank.num_faults() == 0
    positions = [position for position, _ in rank.slabs.labels(1)[: ends[-1]]]
    assert positions == list(range(ends[-1]))
    rank.answer(made_up(5, 0, start=3, is_last=False))  # the three rows in front are missing
    assert rank.num_faults() == 3


class Cycle:
    """A graph that only the collector of reference cycles ends."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph, self.itself = graph, self


def test_a_graph_that_is_garbage_spoils_no_capture_of_another() -> None:
    graphs = Graphs(SingleRank(), torch.device("cuda", 0))
    values = torch.zeros(8, device="cuda")
    old = torch.cuda.CUDAGraph()
    with torch.cuda.graph(old):
        values.add_(1)
    held = [old]
    del old

    def run() -> None:
        values.add_(1)
        if torch.cuda.is_current_stream_capturing():
            Cycle(held.pop())  # young garbage, which the next collection takes
        assert len([[] for _ in range(2000)]) == 2000  # more than the collector lets pass

    thresholds = gc.get_threshold()
    gc.set_threshold(100)
    try:
        replay = graphs.captured(run)
    finally:
        gc.set_threshold(*thresholds)
    assert not held
    values.zero_()
    replay()
    assert values.tolist() == [1.0] * 8
