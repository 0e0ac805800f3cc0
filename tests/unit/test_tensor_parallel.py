"""Every tensor parallel degree chooses the tokens of the CPU's decoder: plain, int4, inflated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from benchmarks.random_pair import random_tensors  # noqa: E402
from codesign.engine.gpu.forward import RankForward  # noqa: E402
from codesign.engine.gpu.slabs import Slabs  # noqa: E402
from codesign.engine.gpu.tensor_group import SingleRank  # noqa: E402
from codesign.engine.inflate import InflatedReader  # noqa: E402
from codesign.engine.kv_cache import KVCache  # noqa: E402
from codesign.engine.model import state_decoder  # noqa: E402
from codesign.engine.rank_weights import EMBEDDING, HEAD, RankWeights, StateReader  # noqa: E402
from codesign.engine.rows import causal_rows  # noqa: E402
from codesign.errors import InputError  # noqa: E402
from codesign.kernels.int4 import Int4Weight, quantize_int4  # noqa: E402
from codesign.models.recipe import Recipe  # noqa: E402
from codesign.models.shape import ModelShape, Rope  # noqa: E402
from codesign.models.sharding import Cut, Sharding  # noqa: E402
from codesign.policy.step_time import BUCKETS  # noqa: E402

DEGREES = (1, 2, 3, 4, 6, 8)
PROMPT = [5, 17, 3, 99, 42, 8]
NEW_TOKENS = 8
SMALL = ModelShape(
    family="llama",
    hidden=96,
    layers=2,
    heads=6,
    kv_heads=3,
    head_dim=16,
    intermediate=160,
    vocab=120,
    rope=Rope(10000.0),
    eps=1e-5,
    tie=True,
    qkv_bias=False,
    qk_norm=False,
    max_positions=128,
)
BIG = replace(
    SMALL,
    hidden=512,
    layers=3,
    heads=16,
    kv_heads=4,
    head_dim=32,
    intermediate=1024,
    vocab=200,
    eps=SMALL.eps * SMALL.hidden * (1 + 1 / 256) / 512,
    tie=False,
)
BIGS = {
    "heads twice as wide": BIG,
    "heads eight times as wide": replace(BIG, head_dim=128, heads=12, kv_heads=3),
    "equal heads": replace(BIG, head_dim=16, heads=32),
    "equal heads, twice as many": replace(BIG, head_dim=16, heads=48, kv_heads=8),
    "qwen2": replace(BIG, family="qwen2", qkv_bias=True, head_dim=64),
    "no spare layer": replace(BIG, layers=2),
}
RECIPE = Recipe(shape="tiny", role="target", source="tiny", source_sha256="", seed=3)


class Ranks:
    """Threads that act as ranks: each brings its part, all leave with the whole."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list = [None] * size

    def exchange(self, rank: int, part) -> list:
        self.parts[rank] = part
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


class ThreadRank(SingleRank):
    """A ``TensorGroup`` of threads."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def add(self, partial_TD, residual_TD):
        return residual_TD + torch.stack(self.ranks.exchange(self.rank, partial_TD)).sum(0)

    def add_map(self, linear, x_TK, residual_TD):
        return self.add(linear(x_TK), residual_TD)

    def all_gather(self, x_Tv):
        return torch.cat(self.ranks.exchange(self.rank, x_Tv), dim=1)


def greedy(logits_of: Callable[[list[int], int], torch.Tensor]) -> tuple[list[int], list]:
    """Return tokens and the logits that they were chosen from; ``logits_of(tokens, start)``."""
    tokens, rows = list(PROMPT), []
    new = tokens
    for _ in range(NEW_TOKENS):
        rows.append(logits_of(new, len(tokens) - len(new)))
        new = [int(rows[-1].argmax())]
        tokens += new
    return tokens[len(PROMPT) :], rows


def decode(shape: ModelShape, state: dict) -> tuple[list[int], list]:
    """Decode with the CPU's decoder."""
    decoder = state_decoder(shape, state)
    cache = KVCache(decoder.shape, num_slots=1, max_tokens=64)
    slot = cache.take()
    return greedy(
        lambda new, start: decoder.logits(
            decoder.forward(causal_rows(slot, new, start=start), cache)[-1:]
        )[0]
    )


def decode_on(reader, size: int) -> tuple[list[int], list]:
    """Decode on as many ranks, each a thread; assert that all chose alike."""
    ranks = Ranks(size)

    def work(rank: int):
        group = ThreadRank(ranks, rank) if size > 1 else SingleRank()
        weights = RankWeights(reader, size=size, rank=rank, dtype=torch.float32)
        forward = RankForward(weights, group)
        cpu, rows = torch.device("cpu"), BUCKETS[-1]
        slabs = Slabs(forward.shape, num_slots=1, max_tokens=rows, dtype=torch.float32, device=cpu)

        def logits_of(new: list[int], start: int) -> torch.Tensor:
            hidden = forward.prompt_hidden(torch.tensor(new), 0, slabs, start=start)
            return group.all_gather(forward.head.logits(hidden))[0, : reader.num_tokens]

        with torch.inference_mode():
            return greedy(logits_of)

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(work, range(size)))
    assert all(tokens == results[0][0] for tokens, _ in results)
    return results[0]


def small_state(shape: ModelShape = SMALL, seed: int = 0) -> dict:
    """Random weights with choices that differ from token to token, and far from a tie."""
    state = random_tensors(shape.tensors(), seed)
    state["model.embed_tokens.weight"] *= 0.5  # else a tied head repeats what it read
    return state


class Int4Reader(StateReader):
    """Quantises what it is asked for, as a quantised checkpoint would hold it."""

    def __init__(self, shape: ModelShape, state: dict, group: int) -> None:
        super().__init__(shape, state)
        self.group = group
        self.made: dict[str, Int4Weight] = {}

    def matrix(self, name: str, rows: Cut, columns: Cut):
        if name in (EMBEDDING, HEAD):
            return super().matrix(name, rows, columns)
        whole = quantize_int4(self._state[f"{name}.weight"], group=self.group)
        words = slice(columns.start // 8, columns.stop // 8)
        groups = slice(columns.start // self.group, columns.stop // self.group)
        part = slice(rows.start, rows.stop)
        return Int4Weight(
            whole.packed[part, words], whole.scales[part, groups], whole.zeros[part, groups]
        )


FAMILIES = {
    "llama": {},
    "untied": {"tie": False},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", DEGREES[1:])
def test_zero_padded_shards_choose_the_tokens_of_the_whole_model(family, size):
    shape = replace(SMALL, **FAMILIES[family])
    state = small_state(shape)
    want, logits = decode(shape, state)
    got, others = decode_on(StateReader(shape, state), size)
    assert got == want
    assert len(set(want)) > 2, "a model that repeats itself proves little"
    for a, b in zip(logits, others, strict=True):
        assert a.shape == b.shape == (shape.vocab,)
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("size", DEGREES)
def test_int4_shards_choose_the_tokens_of_the_dequantised_model(size):
    shape = replace(SMALL, hidden=128, intermediate=320, heads=8, kv_heads=2)
    state = small_state(shape)
    reader = Int4Reader(shape, state, group=64)
    plain = {
        name: quantize_int4(tensor, group=64).dequantize()
        if name.endswith("_proj.weight")
        else tensor
        for name, tensor in state.items()
    }
    want, _ = decode(shape, plain)
    assert decode_on(reader, size)[0] == want


@lru_cache
def inflated(name: str) -> InflatedReader:
    return InflatedReader(RECIPE, SMALL, small_state(), big=BIGS[name])


@pytest.mark.parametrize("name", BIGS)
@pytest.mark.parametrize("size", DEGREES)
def test_an_inflated_model_chooses_the_small_models_tokens_on_any_number_of_ranks(name, size):
    reader = inflated(name)
    want, small = decode(SMALL, reader.small_state())
    got, big = decode_on(reader, size)
    assert got == want
    assert len(set(want)) > 2
    for a, b in zip(small, big, strict=True):
        assert b.shape == (SMALL.vocab,)
        factor = float((a * b).sum() / (a * a).sum())
        assert 0 < factor < 1.0001
        torch.testing.assert_close(factor * a, b, atol=2e-3 * float(b.abs().max()), rtol=0)


def test_shards_cover_every_head_channel_and_row_once():
    for size in DEGREES:
        shards = [Sharding(SMALL, size=size, rank=rank) for rank in range(size)]
        for cuts in (
            [shard.q_rows for shard in shards],
            [shard.kv_rows for shard in shards],
            [shard.channels for shard in shards],
            [shard.head_rows for shard in shards],
        ):
            covered = [i for cut in cuts for i in range(cut.start, cut.stop)]
            assert covered == list(range(covered[-1] + 1))
            assert len({cut.length for cut in cuts}) == 1
        assert {s.shape.heads // s.shape.kv_heads for s in shards} == {2}


def test_llama_70b_on_six_ranks_pads_as_the_arithmetic_says():
    shape = replace(SMALL, heads=64, kv_heads=8, head_dim=128, hidden=8192, intermediate=28672)
    shards = [Sharding(shape, size=6, rank=rank, group=128) for rank in range(6)]
    assert shards[0].shape.heads * 6 == 96
    assert shards[0].shape.kv_heads * 6 == 12
    assert shards[0].shape.intermediate * 6 == 29184
    assert {shard.shape.head_dim for shard in shards} == {128}
    assert shards[5].q_rows.num_real == 0
    assert shards[3].q_rows == Cut(6144, 8192, 2048)


def test_int4_shards_start_on_group_boundaries():
    shape = replace(SMALL, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536)
    for size in DEGREES:
        for rank in range(size):
            shard = Sharding(shape, size=size, rank=rank, group=64)
            for cut in (shard.q_rows, shard.channels):
                assert cut.start % 64 == cut.length % 64 == 0


def test_a_rank_that_is_not_there_and_a_width_without_whole_groups_are_refused():
    with pytest.raises(InputError, match=r"rank must be in \[0, 2\)"):
        Sharding(SMALL, size=2, rank=2)
    with pytest.raises(InputError, match="hidden size 96"):
        Sharding(SMALL, group=128)
