"""How contexts are shared out over clusters: launches, the order of tiles, a model of the sums."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from codesign.kernels.attention_shares import (
    CLASSES,
    ROWS,
    SPAN,
    SharedParts,
    cluster_blocks,
    clusters_of,
    max_tokens,
    most_items,
    shares_of,
)
from codesign.kernels.cuda_module import source_text

WARPS, KEYS = 4, 64  # warps that share out a tile's keys, and its keys
TILES_OF_SPAN = SPAN // KEYS
F = np.float32


def test_the_source_has_the_same_spans():
    found = re.search(r"SPAN = (\d+) / KEYS, CLASSES = (\d+);", source_text("fused_attention.cu"))
    assert found is not None
    assert (int(found[1]), int(found[2])) == (SPAN, CLASSES)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cluster", "clusters", "shares"),
    [
        (16, 2, 8, 8, 4),  # 70B TP4
        (32, 4, 8, 4, 2),  # 70B TP2
        (64, 8, 4, 4, 2),  # 70B TP1
        (32, 8, 8, 2, 2),  # 8B and 1B TP1
        (24, 8, 8, 2, 2),  # 3B TP1
        (12, 4, 8, 4, 4),  # 3B TP2
    ],
)
def test_a_request_of_eight_rows_takes_what_fits_at_once(
    heads: int, kv_heads: int, cluster: int, clusters: int, shares: int
):
    assert cluster_blocks(heads, kv_heads) == cluster
    assert clusters_of(8, most_items(132 // cluster, kv_heads)) == clusters
    assert shares_of(-(-8 // max_tokens(heads, kv_heads)), clusters) == shares


def test_few_rows_launch_no_more_clusters_than_they_can_use():
    assert clusters_of(1, 16) == CLASSES
    assert clusters_of(4, 16) == 16
    assert most_items(7, 8) == 1


def test_every_share_of_every_item_is_taken_once():
    for clusters in range(1, 34):
        for items in range(1, 40):
            shares = shares_of(items, clusters)
            assert shares == 1 + sum(n * items <= clusters for n in range(2, CLASSES + 1))
            units = [u for z in range(clusters) for u in range(z, items * shares, clusters)]
            assert sorted(units) == [*range(items * shares)]
            assert shares == 1 or items * shares <= clusters  # each cluster has one at most


def test_there_is_room_for_every_slot_that_the_kernel_counts():
    items, cluster, kv_heads, head_dim = 8, 8, 2, 128
    parts = SharedParts.of(items, cluster, kv_heads, head_dim, torch.device("cpu"))
    last_block = (((items - 1) * kv_heads + kv_heads - 1) * CLASSES + CLASSES - 1) * cluster
    last_class = ((items * cluster + items - 1) * kv_heads + kv_heads - 1) * CLASSES + CLASSES - 1
    assert last_block + cluster - 1 < items * kv_heads * CLASSES * cluster  # classes come behind
    assert last_class + 1 == parts.values.shape[0] == parts.scores.shape[0]
    assert parts.values[0].shape == (ROWS, head_dim)
    assert parts.arrived.numel() == items * kv_heads * cluster
    assert not parts.arrived.any()
    assert parts.values.nbytes < 20e6
    assert parts.values.numel() < 2**31  # the kernel counts in int


def tiles_of(share: int, shares: int, rank: int, cluster: int, num_tiles: int) -> Iterator[tuple]:
    """The kernel's sequence: (tile, class)."""
    num_classes = min(-(-num_tiles // TILES_OF_SPAN), CLASSES)
    tile, kind = share * TILES_OF_SPAN + rank, share
    while True:
        while kind < num_classes and tile >= num_tiles:
            kind += shares
            tile = kind * TILES_OF_SPAN + rank
        if kind >= num_classes:
            return
        yield tile, kind
        tile += cluster
        if tile % TILES_OF_SPAN < cluster:
            tile += (CLASSES - 1) * TILES_OF_SPAN


@pytest.mark.parametrize("cluster", [4, 8, 16])
@pytest.mark.parametrize("shares", [1, 2, 3, 4, 7, 8])
def test_every_tile_is_attended_once_in_the_order_of_its_class(cluster: int, shares: int):
    for num_tiles in (1, 7, 31, 32, 33, 64, 129, 255, 256, 257, 511, 520, 1563):
        seen: list[int] = []
        for share in range(shares):
            for rank in range(cluster):
                found = [*tiles_of(share, shares, rank, cluster, num_tiles)]
                kinds = [kind for _, kind in found]
                assert kinds == sorted(kinds)
                for tile, kind in found:
                    assert tile % cluster == rank
                    assert tile // TILES_OF_SPAN % CLASSES == kind
                    assert kind % shares == share
                for kind in {*kinds}:
                    tiles = [tile for tile, k in found if k == kind]
                    assert tiles == sorted(tiles)
                seen += [tile for tile, _ in found]
        assert sorted(seen) == [*range(num_tiles)]


@dataclass
class Part:
    """Of one row: what has been added up, its largest score, its sum of weights."""

    out: np.ndarray
    top: np.float32
    total: np.float32

    @classmethod
    def none(cls, width: int) -> Part:
        return cls(np.zeros(width, F), F(-np.inf), F(0))


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return (np.float64(a) * b + c).astype(F)


def power(x: Any) -> Any:
    return np.exp2(np.asarray(x, F)).astype(F)


def base_of(top: np.float32) -> np.float32:
    return F(0) if top == -np.inf else top


def weighed(part: Part, scores: np.ndarray, values: np.ndarray) -> Part:
    """A block of 16 keys behind what a warp has; -inf where the row sees none."""
    top = max(part.top, scores.max())
    shrink, weights = power(part.top - base_of(top)), power(scores - base_of(top))
    total = fused(part.total, shrink, weights.sum(dtype=F))
    return Part(part.out * shrink + (weights @ values).astype(F), top, total)


def joined(parts: list[Part]) -> Part:
    """Warps of a block, or blocks of a cluster."""
    top = max(part.top for part in parts)
    all_ = Part.none(len(parts[0].out))
    for part in parts:
        weight = power(part.top - base_of(top))
        all_ = Part(fused(weight, part.out, all_.out), top, fused(weight, part.total, all_.total))
    return all_


def joined_classes(a: Part, b: Part) -> Part:
    top = max(a.top, b.top)
    mine, other = power(a.top - base_of(top)), power(b.top - base_of(top))
    out, total = fused(other, b.out, mine * a.out), fused(other, b.total, mine * a.total)
    return Part(out, top, total)


def attended(scores: np.ndarray, values: np.ndarray, *, shares: int, more: int = 0) -> np.ndarray:
    """One row beside others of its item that see ``more`` keys, by some clusters of 8 blocks."""
    count, width, cluster = len(scores), values.shape[1], 8
    num_tiles = -(-(count + more) // KEYS)
    used = min(-(-num_tiles // TILES_OF_SPAN), CLASSES)
    padded = np.full(num_tiles * KEYS, -np.inf, F)
    padded[:count] = scores
    keys = np.zeros((num_tiles * KEYS, width), F)
    keys[:count] = values
    left: dict[int, Part] = {}
    for share in reversed(range(min(shares, used))):  # the first comes last, and joins
        warps = {
            (kind, rank, warp): Part.none(width)
            for kind in range(share, used, shares)
            for rank in range(cluster)
            for warp in range(WARPS)
        }
        for rank in range(cluster):
            for tile, kind in tiles_of(share, shares, rank, cluster, num_tiles):
                for warp in range(WARPS):
                    at = slice(tile * KEYS + warp * 16, tile * KEYS + warp * 16 + 16)
                    place = kind, rank, warp
                    warps[place] = weighed(warps[place], padded[at], keys[at])
        for kind in range(share, used, shares):
            blocks = [joined([warps[kind, r, w] for w in range(WARPS)]) for r in range(cluster)]
            left[kind] = joined(blocks)
    if used == 1:
        return left[0].out / left[0].total
    all_ = Part.none(width)
    for kind in range(used):
        all_ = joined_classes(all_, left[kind])
    return all_.out / all_.total


@pytest.mark.parametrize("count", [1, 500, 4096, 4097, 9000, 33_000])
def test_the_bits_are_the_same_for_every_number_of_clusters(count: int):
    rng = np.random.default_rng(count)
    scores = rng.normal(size=count).astype(F) * 3
    values = rng.normal(size=(count, 4)).astype(F)
    weights = np.exp2(scores.astype(np.float64))
    wanted = weights @ values / weights.sum()
    found = attended(scores, values, shares=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    for shares in (2, 3, 4, 8):
        assert attended(scores, values, shares=shares).tobytes() == found.tobytes()


@pytest.mark.parametrize("count", [3, 2040, 4096, 8186])
def test_rows_that_see_more_change_no_bit_even_where_they_open_a_class(count: int):
    rng = np.random.default_rng(count)
    scores, values = rng.normal(size=count).astype(F), rng.normal(size=(count, 4)).astype(F)
    alone = attended(scores, values, shares=1)
    for shares in (1, 4):
        beside = attended(scores, values, shares=shares, more=3000)
        assert beside.tobytes() == alone.tobytes()
