"""How contexts are shared out over blocks: launches, the order of tiles, a model of the sums."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from codesign.engine.gpu.step_rows import bucket_of
from codesign.kernels.attention_shares import (
    CLASSES,
    PAIR,
    ROWS,
    SPAN,
    Crowd,
    SharedParts,
    cluster_blocks,
    clusters_of,
    max_tokens,
    most_items,
    num_columns,
    pairs_do_more,
    pairs_may_do_more,
    shares_of,
    teams_of,
)
from codesign.kernels.nvrtc import source_text

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
    assert cluster_blocks(8, heads, kv_heads) == num_columns(heads, kv_heads) == cluster
    assert clusters_of(8, most_items(132 // cluster, kv_heads)) == clusters
    assert shares_of(-(-8 // max_tokens(heads, kv_heads)), clusters) == shares


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "blocks"),
    [
        (16, 32, 8, 4),  # 8B and 1B TP1
        (32, 32, 8, 2),
        (256, 32, 8, 2),
        (16, 16, 2, 8),  # 70B TP4
        (32, 16, 2, 4),
        (64, 16, 2, 2),
        (16, 64, 8, 2),  # 70B TP1, whose keys are in four columns
    ],
)
def test_clusters_are_smaller_where_rows_fill_the_chip(
    rows: int, heads: int, kv_heads: int, blocks: int
):
    assert cluster_blocks(rows, heads, kv_heads) == blocks


LLAMA_3B, LLAMA_8B, LLAMA_70B = (24, 8), (32, 8), (64, 8)
LLAMA_70B_TP2, LLAMA_70B_TP4 = (32, 4), (16, 2)
MEASURED = Path(__file__).parents[2] / "benchmarks/results/attention_clusters_2026-11-23_h200.json"
HEADS_OF = {
    "1b tp1": LLAMA_8B,
    "3b tp1": LLAMA_3B,
    "8b tp1": LLAMA_8B,
    "70b tp1": LLAMA_70B,
    "70b tp2": LLAMA_70B_TP2,
}


def measured_shapes() -> list[tuple[dict[str, Any], int]]:
    """Shapes that were measured in larger clusters and in pairs, and the blocks of the larger."""
    found = []
    for row in json.loads(MEASURED.read_text())["rows"]:
        bucket = bucket_of(row["requests"] * row["rows_of_each"])
        blocks = cluster_blocks(bucket, *HEADS_OF[row["model"]])
        if blocks > PAIR:
            found.append((row, blocks))
    return found


def test_pairs_are_taken_for_all_measured_shapes_that_they_are_faster_for_and_no_others():
    shapes = measured_shapes()
    assert len(shapes) > 70
    for row, blocks in shapes:
        requests, heads = row["requests"], HEADS_OF[row["model"]]
        rows, spans = requests * row["rows_of_each"], requests * (row["context"] // SPAN + 1)
        faster = max(row["clusters_of_2_us"]) < min(row[f"clusters_of_{blocks}_us"])
        crowd = Crowd(bucket_of(rows), rows, requests, spans)
        assert pairs_do_more(crowd, *heads, 132) == faster, row


@pytest.mark.parametrize(
    ("heads", "bucket", "rows", "requests", "spans", "pays"),
    [
        # One request: only with classes enough for twice as many blocks.
        (LLAMA_8B, 8, 8, 1, 4, False),
        (LLAMA_8B, 8, 8, 1, 5, True),
        # Several: in teams of four blocks, or of two.
        (LLAMA_8B, 8, 2, 2, 2, False),
        (LLAMA_8B, 8, 3, 3, 3, True),
        (LLAMA_70B_TP2, 8, 6, 6, 6, False),
        (LLAMA_70B_TP2, 8, 7, 7, 7, True),
        (LLAMA_70B_TP2, 16, 16, 16, 16, True),
        (LLAMA_70B_TP4, 8, 8, 8, 8, False),
        # As many blocks in pairs, but one of them has hardly anything of a second class.
        (LLAMA_70B_TP4, 8, 8, 8, 16, False),
        (LLAMA_70B_TP4, 8, 8, 8, 24, True),
        # These have pairs anyway.
        (LLAMA_8B, 32, 32, 32, 32, False),
        (LLAMA_70B, 16, 16, 16, 16, False),
        (LLAMA_8B, 8, 0, 0, 0, False),
    ],
)
def test_pairs_are_taken_where_larger_clusters_are_cut_into_them_or_keep_fewer_blocks_busy(
    heads: tuple[int, int], bucket: int, rows: int, requests: int, spans: int, pays: bool
):
    assert pairs_do_more(Crowd(bucket, rows, requests, spans), *heads, 132) == pays


@pytest.mark.parametrize("heads", [LLAMA_8B, LLAMA_70B_TP2, (40, 8), (12, 2), (9, 3), (6, 1)])
@pytest.mark.parametrize("bucket", [8, 16, 32])
@pytest.mark.parametrize("slots", [1, 4, 32])
@pytest.mark.parametrize("most_spans", [1, 3, 9])
def test_a_graph_of_pairs_is_foreseen_for_every_forward_that_wants_one(
    heads: tuple[int, int], bucket: int, slots: int, most_spans: int
):
    found = [
        pairs_do_more(Crowd(bucket, rows, requests, spans), *heads, 132)
        for requests in range(1, min(slots, bucket) + 1)
        for rows in range(requests, bucket + 1)
        for spans in {requests, requests * (1 + most_spans) // 2, requests * most_spans}
    ]
    foreseen = pairs_may_do_more(bucket, min(slots, bucket), most_spans, *heads, 132)
    assert foreseen == any(found)


def test_every_item_of_a_batch_has_a_team_as_long_as_there_are_blocks():
    for clusters in range(1, 20):
        for items in range(1, 80):
            for blocks in (2, 4, 8):
                teams = teams_of(items, clusters, blocks)
                assert blocks % teams == 0
                assert teams == blocks or teams * clusters >= items
                assert teams == 1 or shares_of(items, clusters) == 1
                taken = turns_of(items, clusters, blocks)
                found = [i for turns in taken.values() for i in turns if i >= 0]
                assert sorted(found) == [*range(items)]
                for z in range(clusters):  # none of a cluster's turns is nobody's
                    own = [turns for (cluster, _), turns in taken.items() if cluster == z]
                    assert not own[0] or max(turns[-1] for turns in own) >= 0


def larger_clusters(items: int, clusters: int, teams: int) -> int:
    """Clusters with half the teams, of twice the blocks, as the kernel has it."""
    return max(teams * clusters - items, 0) // (teams // 2) if teams > 1 else 0


def turns_of(
    items: int, clusters: int, blocks: int, shares: int = 1
) -> dict[tuple[int, int], list[int]]:
    """Items, by their length, that each team (cluster, number) takes turn by turn; -1 for none.

    As the kernel has it: all teams of a cluster have as many turns, as they meet in each.
    """
    most = teams_of(items, clusters, blocks)
    larger = larger_clusters(items, clusters, most)
    at_once = clusters * most - larger * (most // 2)
    found: dict[tuple[int, int], list[int]] = {}
    for z in range(clusters):
        teams = most // 2 if z < larger else most
        place, share = z * most - min(z, larger) * (most // 2), 0
        while share + 1 < shares and place >= items:
            place, share = place - items, share + 1
        times, left = divmod(items, at_once)
        times += (at_once - place - teams if times % 2 else place) < left
        for team in range(teams):
            turns = [-1] * times
            for item in range(items):
                time, at = divmod(item, at_once)
                if (at_once - 1 - at if time % 2 else at) == place + team:
                    turns[time] = item
            found[z, team] = turns
    return found


def test_no_team_is_idle_and_the_longest_items_share_theirs_with_the_shortest():
    for clusters in range(1, 20):
        for items in range(clusters + 1, 80):
            for blocks in (2, 4, 8):
                taken = turns_of(items, clusters, blocks)
                most = teams_of(items, clusters, blocks)
                half = larger_clusters(items, clusters, most)
                # As many items as a larger cluster has teams are the longest.
                assert [taken[z, t][0] for z in range(half) for t in range(most // 2)] == [
                    *range(half * most // 2)
                ]
                numbers = [sum(i >= 0 for i in turns) for turns in taken.values()]
                assert max(numbers) - min(numbers) <= 1
                assert min(numbers) > 0 or items < len(taken) < items + most


def test_batches_of_mixed_contexts_end_sooner_than_in_turn():
    """Positions that the busiest block attends: 8B on one GPU, contexts of 60 to 540."""
    clusters, blocks = 8, PAIR
    for items, share in ((11, 0.75), (14, 0.9), (24, 0.75)):
        contexts = np.random.default_rng(items).permutation(np.linspace(60, 540, items))
        ranked = sorted(contexts, reverse=True)
        most = teams_of(items, clusters, blocks)
        larger = larger_clusters(items, clusters, most)
        ours = max(
            sum(ranked[i] for i in turns if i >= 0) * (most // 2 if z < larger else most) / blocks
            for (z, _), turns in turns_of(items, clusters, blocks).items()
        )
        places = clusters * most
        in_turn = max(contexts[place::places].sum() for place in range(min(places, items)))
        assert ours < share * in_turn


def test_few_rows_launch_no_more_clusters_than_they_can_use():
    assert clusters_of(1, 16) == CLASSES
    assert clusters_of(4, 16) == 16
    assert most_items(7, 8) == 1


def test_every_share_of_every_item_is_taken_once():
    for clusters in range(1, 34):
        for items in range(1, 40):
            shares = shares_of(items, clusters)
            assert shares == 1 + sum(n * items <= clusters for n in range(2, CLASSES + 1))
            if teams_of(items, clusters, PAIR) == 1:
                taken = turns_of(items, clusters, PAIR, shares)
                found = [i for turns in taken.values() for i in turns]
                assert sorted(found) == sorted([*range(items)] * shares)
            assert shares == 1 or items * shares <= clusters  # each cluster has one at most


def test_there_is_room_for_every_slot_that_the_kernel_counts():
    items, columns, kv_heads, head_dim = 16, 8, 8, 128
    parts = SharedParts.of(items, columns, kv_heads, head_dim, torch.device("cpu"))
    for blocks in (2, 4, 8):
        clusters = items // blocks  # as many as a launch has
        for many in range(1, 80):  # no cluster has more teams than blocks, of any number of items
            assert all(team < blocks for _, team in turns_of(many, clusters, blocks))
        last_team = clusters * blocks - 1
        last_column = ((last_team * kv_heads + kv_heads - 1) * CLASSES + CLASSES) * columns - 1
        assert last_column < parts.values.shape[0]
        # Of several shares a cluster is one team; classes come behind its columns.
        last_class = (clusters * columns + clusters) * kv_heads * CLASSES - 1
        assert clusters * kv_heads * CLASSES * columns <= last_class < parts.values.shape[0]
        assert clusters * kv_heads * columns <= parts.arrived.numel()
    assert parts.values[0].shape == (ROWS, head_dim)
    assert not parts.arrived.any()
    assert parts.values.nbytes < 155e6
    assert parts.values.numel() < 2**31  # the kernel counts in int


def tiles_of(
    share: int, shares: int, member: int, blocks: int, num_tiles: int, *, columns: int = 8
) -> Iterator[tuple[int, int, int]]:
    """The kernel's sequence for a block of a team: (tile, class, column)."""
    num_classes = min(-(-num_tiles // TILES_OF_SPAN), CLASSES)
    tile, kind, column = share * TILES_OF_SPAN + member, share, member
    while True:
        while kind < num_classes and tile >= num_tiles:
            column += blocks
            if column >= columns:
                column = member
                kind += shares
            tile = kind * TILES_OF_SPAN + column
        if kind >= num_classes:
            return
        yield tile, kind, column
        tile += columns
        if tile % TILES_OF_SPAN < columns:
            tile += (CLASSES - 1) * TILES_OF_SPAN


@pytest.mark.parametrize(("columns", "blocks"), [(4, 4), (4, 2), (4, 1), (8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("shares", [1, 2, 3, 4, 7, 8])
def test_every_tile_is_attended_once_in_the_order_of_its_column_and_class(
    columns: int, blocks: int, shares: int
):
    for num_tiles in (1, 7, 31, 32, 33, 64, 129, 255, 256, 257, 511, 520, 1563):
        seen: list[int] = []
        for share in range(shares):
            for member in range(blocks):
                found = [*tiles_of(share, shares, member, blocks, num_tiles, columns=columns)]
                places = [(kind, column) for _, kind, column in found]
                assert places == sorted(places)
                for tile, kind, column in found:
                    assert tile % columns == column
                    assert column % blocks == member
                    assert tile // TILES_OF_SPAN % CLASSES == kind
                    assert kind % shares == share
                for place in {*places}:
                    tiles = [tile for tile, *at in found if tuple(at) == place]
                    assert tiles == sorted(tiles)
                seen += [tile for tile, *_ in found]
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
    """Warps of a column, or columns."""
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


def attended(
    scores: np.ndarray, values: np.ndarray, *, shares: int, more: int = 0, blocks: int = 8
) -> np.ndarray:
    """One row beside others of its item that see ``more`` keys, by teams of some blocks."""
    count, width, columns = len(scores), values.shape[1], 8
    num_tiles = -(-(count + more) // KEYS)
    used = min(-(-num_tiles // TILES_OF_SPAN), CLASSES)
    padded = np.full(num_tiles * KEYS, -np.inf, F)
    padded[:count] = scores
    keys = np.zeros((num_tiles * KEYS, width), F)
    keys[:count] = values
    left: dict[int, Part] = {}
    for share in reversed(range(min(shares, used))):  # the first comes last, and joins
        warps = {
            (kind, column, warp): Part.none(width)
            for kind in range(share, used, shares)
            for column in range(columns)
            for warp in range(WARPS)
        }
        for member in range(blocks):
            for tile, kind, column in tiles_of(share, shares, member, blocks, num_tiles):
                for warp in range(WARPS):
                    at = slice(tile * KEYS + warp * 16, tile * KEYS + warp * 16 + 16)
                    place = kind, column, warp
                    warps[place] = weighed(warps[place], padded[at], keys[at])
        for kind in range(share, used, shares):
            left[kind] = joined(
                [joined([warps[kind, c, w] for w in range(WARPS)]) for c in range(columns)]
            )
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
    for blocks in (4, 1):
        assert attended(scores, values, shares=1, blocks=blocks).tobytes() == found.tobytes()


@pytest.mark.parametrize("count", [3, 2040, 4096, 8186])
def test_rows_that_see_more_change_no_bit_even_where_they_open_a_class(count: int):
    rng = np.random.default_rng(count)
    scores, values = rng.normal(size=count).astype(F), rng.normal(size=(count, 4)).astype(F)
    alone = attended(scores, values, shares=1)
    for shares in (1, 4):
        beside = attended(scores, values, shares=shares, more=3000)
        assert beside.tobytes() == alone.tobytes()
