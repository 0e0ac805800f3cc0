"""How a skinny GEMM is cut over warps, blocks and clusters: sizes only, no torch.

The cut along the columns fixes the order of additions, so it depends on the weight alone: a row's
result is the same bits whatever the number of other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

RECORD_BYTES = 1056  # of a tile of 16 features by a group of 128 columns; see packing.py
LINE_BYTES = 128  # of the caches: a tile's records begin one
SHARED_BYTES = 227 << 10  # of a Hopper SM, what one block may use
_MOST_STAGES = 16
_BARRIERS = 384  # bytes in front of the ring
_RESERVED = 1 << 10  # of every block on the SM, on top of what it asks for
MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class Tiling:
    """Launch shape of one GEMM.

    Attributes:
        warps: Warps side by side along the columns, a group of 128 each.
        tiles: Tiles of 16 features that a warp multiplies at a time: 1, 2 or 4.
        cluster: Blocks that share a tile's columns.
        blocks: Blocks an SM is to hold.
        launched: Of those, how many a launch fills; in the room that is left, the blocks of the
            next launch start early and fill their rings. 0 for all.
        paced: Stages that are on their way at a time while the ring is filled first, so that rows
            wait behind few; 0 for all.
        delays: Let every role of the kernel sleep at random, for tests.
    """

    warps: int
    tiles: int
    cluster: int = 1
    blocks: int = 1
    launched: int = 0
    paced: int = 2
    delays: bool = False

    def slots(self, num_row_tiles: int) -> int:
        """Steps whose partial sums are in flight, and reducer warps, as in gemm_layout.cuh."""
        return 3 if num_row_tiles * self.tiles <= 2 else 2

    def threads(self, num_row_tiles: int) -> int:
        """Threads of a block: consumers, the warp that fills the ring, reducers."""
        return 32 * (self.warps + 1 + self.slots(num_row_tiles))

    def macros(self, num_row_tiles: int, plan: Layout) -> dict[str, int]:
        """Return what gemm_core.cuh is compiled with, for launches laid out so."""
        return {
            "NT": num_row_tiles,
            "WARPS": self.warps,
            "TILES": self.tiles,
            "BLOCKS": self.blocks,
            "CLUSTER": self.cluster,
            "CHUNKS": plan.chunks,
            "UNIT": plan.unit,
            "PACED": self.paced,
        }

    def clusters(self, num_sms: int) -> int:
        """Clusters of the grid; those of four and more do not fill every part of the chip."""
        blocks = self.launched or self.blocks
        usable = num_sms * blocks // self.cluster
        return usable if self.cluster <= 2 else min(usable, 120 * blocks // self.cluster)


@dataclass(frozen=True, slots=True)
class Layout:
    """Shared memory of one launch, in bytes and tiles.

    Tiles are dealt out in units, whole steps where there are enough: the first clusters, whose
    blocks start first, have one more.
    """

    clusters: int
    unit: int  # tiles
    chunks: int  # of every block; 0 if some have one less
    steps: int  # of a block, over its chunks
    stages: int
    part_tiles: int
    shared_bytes: int


def shared_room(blocks: int) -> int:
    """Return the bytes of shared memory of each of so many blocks on a multiprocessor."""
    return (SHARED_BYTES + _RESERVED) // blocks - _RESERVED


def row_tiles(num_rows: int) -> int:
    """Return how many tiles of 8 rows of x a launch works on: 1, 2 or 4."""
    return 1 if num_rows <= 8 else 2 if num_rows <= 16 else 4


def layout(
    tiling: Tiling,
    *,
    tiles: int,
    groups: int,
    num_row_tiles: int,
    num_sms: int,
    keep: bool = False,
) -> Layout:
    """Return a launch's shared memory: as deep a ring as fits.

    Args:
        tiling: How the work is cut.
        tiles: Tiles of 16 features.
        groups: Groups of 128 columns.
        num_row_tiles: From ``row_tiles``.
        num_sms: Of the device.
        keep: The epilogue needs all sums of a block at once.
    """
    clusters = max(1, min(tiling.clusters(num_sms), tiles))
    chunks = -(-groups // tiling.warps)
    unit = _unit(tiling, tiles, clusters)
    most = -(-tiles // (clusters * unit)) * unit  # tiles of a cluster
    owned = -(-most // tiling.cluster) if tiling.cluster > 1 else 0
    sums_up = chunks > tiling.cluster or (keep and tiling.cluster == 1)
    part_tiles = owned * tiling.cluster + (most if sums_up else 0)
    slots = tiling.slots(num_row_tiles)
    fixed = 512 * num_row_tiles * (slots * tiling.tiles * tiling.warps + part_tiles)
    each, unequal = divmod(chunks, tiling.cluster)
    each = 0 if unequal else each
    per_warp = 2 if each == 1 else 3  # squares, units of a chunk or two
    fixed += 32 * num_row_tiles * (per_warp * tiling.warps + tiling.cluster) + 8 * owned + _BARRIERS
    room = shared_room(tiling.blocks) - fixed
    stage = tiling.tiles * _piece_bytes(tiling.warps)
    used = -(-most // tiling.tiles) * -(-chunks // tiling.cluster)
    stages = min(_MOST_STAGES, room // stage, max(used, 2))
    return Layout(clusters, unit, each, used, stages, part_tiles, fixed + stages * stage)


def tile_bytes(groups: int) -> int:
    """Return the bytes of a tile's records, whole lines."""
    return -(-groups * RECORD_BYTES // LINE_BYTES) * LINE_BYTES


def _piece_bytes(warps: int) -> int:
    """Room for so many records of a tile, wherever in a line they begin (PIECE in CUDA)."""
    most = LINE_BYTES - RECORD_BYTES % LINE_BYTES if warps * RECORD_BYTES % LINE_BYTES else 0
    return -(-(warps * RECORD_BYTES + most) // LINE_BYTES) * LINE_BYTES


def _unit(tiling: Tiling, tiles: int, clusters: int) -> int:
    """Tiles that are dealt out together: a step, where every cluster gets one and none is cut."""
    each, cut = divmod(tiles, tiling.tiles)
    return tiling.tiles if each >= clusters and not cut else 1


# Fastest on an H200 within whole forwards of 8 rows, and for more rows the fastest that cuts the
# columns alike (of 32 where those of 16 would spill); by tiles and groups. The fastest by itself
# can be slower between its neighbours.
MEASURED: dict[tuple[int, int], tuple[Tiling, ...]] = {
    # Llama 70B over four GPUs: qkv, o, gate_up, down
    (160, 64): (Tiling(16, 1, 4), Tiling(16, 1, 4)),
    (512, 16): (Tiling(8, 2, 2, 2, 1), Tiling(8, 1, 2)),
    (896, 64): (Tiling(16, 2, 4), Tiling(16, 1, 4)),
    (512, 56): (Tiling(14, 2, 4), Tiling(14, 1, 4)),
    # over two
    (320, 64): (Tiling(16, 1, 4), Tiling(16, 1, 4)),
    (512, 32): (Tiling(16, 2, 2), Tiling(16, 1, 2)),
    (1792, 64): (Tiling(16, 2, 4), Tiling(16, 2, 4)),
    (512, 112): (Tiling(14, 2, 4), Tiling(14, 1, 4)),
    # on one
    (640, 64): (Tiling(16, 2, 4), Tiling(16, 1, 4)),
    (512, 64): (Tiling(16, 2, 4), Tiling(16, 1, 4)),
    (3584, 64): (Tiling(16, 2, 2), Tiling(16, 1, 2)),
    (512, 224): (Tiling(14, 2, 4), Tiling(14, 1, 4)),
    # Llama 8B
    (384, 32): (Tiling(8, 2, 4), Tiling(8, 2, 4)),
    (256, 32): (Tiling(8, 2, 4, 2, 1), Tiling(8, 2, 4)),
    (1792, 32): (Tiling(16, 2, 2), Tiling(16, 2, 2)),
    (256, 112): (Tiling(14, 2, 4), Tiling(14, 1, 4)),
    # over two
    (192, 32): (Tiling(8, 2, 4), Tiling(8, 1, 4)),
    (256, 16): (Tiling(4, 2, 4), Tiling(4, 4, 4)),
    (896, 32): (Tiling(8, 2, 4, paced=4), Tiling(8, 2, 4)),
    (256, 56): (Tiling(14, 1, 4, paced=3), Tiling(14, 1, 4)),
    # Llama 3B
    (320, 24): (Tiling(6, 4, 4), Tiling(6, 1, 4, 2, 1), Tiling(6, 2, 4)),
    (192, 24): (Tiling(6, 2, 4, 2, 1), Tiling(6, 4, 4), Tiling(6, 2, 4)),
    (1024, 24): (Tiling(12, 2, 2), Tiling(12, 1, 2)),
    (192, 64): (Tiling(16, 1, 4), Tiling(16, 1, 4)),
    # over two; its down is cut as the 8B's qkv
    (160, 24): (Tiling(6, 2, 4), Tiling(6, 2, 4)),
    (192, 12): (Tiling(6, 2, 2), Tiling(6, 2, 2)),
    (512, 24): (Tiling(12, 1, 2), Tiling(12, 1, 2)),
    # Llama 1B
    (192, 16): (Tiling(4, 2, 4), Tiling(4, 2, 4)),
    (128, 16): (Tiling(4, 2, 4), Tiling(4, 2, 4)),
    (1024, 16): (Tiling(8, 4, 2), Tiling(8, 2, 2)),
    (128, 64): (Tiling(16, 1, 4), Tiling(16, 1, 4)),
    # over two; its gate_up is cut as the 70B's o over four
    (96, 16): (Tiling(4, 4, 4, 2, 1, paced=4), Tiling(4, 2, 4)),
    (128, 8): (Tiling(4, 2, 2), Tiling(4, 2, 2)),
    (128, 32): (Tiling(8, 2, 4), Tiling(8, 2, 4)),
    # Qwen2 72B: gate_up, down
    (3696, 64): (Tiling(8, 2, 1, paced=4), Tiling(8, 4, 1)),
    (512, 231): (Tiling(12, 2, 4, paced=4), Tiling(12, 2, 4)),
    # over two
    (1856, 64): (Tiling(16, 2, 4), Tiling(16, 1, 4)),
    (512, 116): (Tiling(15, 2, 4), Tiling(15, 1, 4)),
    # Qwen2 1.5B; over two
    (128, 12): (Tiling(6, 1, 2), Tiling(6, 1, 2, 2, 1), Tiling(6, 2, 2)),
    (96, 12): (Tiling(3, 2, 4), Tiling(3, 2, 4, 2, 1), Tiling(3, 2, 4)),
    (1120, 12): (Tiling(12, 2, 1), Tiling(12, 1, 1, paced=4)),
    (96, 70): (Tiling(9, 2, 4, paced=4), Tiling(9, 1, 4)),
    (64, 12): (Tiling(12, 1), Tiling(12, 1)),
    (96, 6): (Tiling(6, 1), Tiling(6, 1)),
    # heads of drafts, by themselves: 1B, 3B
    (8016, 16): (Tiling(8, 2), Tiling(8, 2)),
    (8016, 24): (Tiling(12, 1), Tiling(12, 1)),
}


def choose(*, tiles: int, groups: int, num_row_tiles: int = 1, num_sms: int = 132) -> Tiling:
    """Return the tiling for a weight; warps and cluster are the same for every number of rows.

    Without a measurement: whole tiles to blocks if they share out evenly, else tiles cut along the
    columns over a cluster; chunks as large as the warps of a block hold.
    """
    if num_sms == 132 and (tiles, groups) in MEASURED:
        of_rows = MEASURED[tiles, groups]
        return of_rows[min(num_row_tiles // 2, len(of_rows) - 1)]
    best: tuple[float, Tiling] | None = None
    for cluster in (1, 2, 4):
        for warps in range(min(16, groups), 0, -1):
            chunks = -(-groups // warps)
            if chunks % cluster:
                continue
            tiling = Tiling(warps, 2, cluster)
            price = cost(tiling, tiles=tiles, groups=groups, num_sms=num_sms)
            if _is_cramped(tiling, tiles=tiles, groups=groups, num_sms=num_sms):
                price *= 2.0  # 16 rows would not fit a launch
            if best is None or price < best[0] - 1e-9:
                best = price, tiling
    assert best is not None
    return best[1]


def _is_cramped(tiling: Tiling, *, tiles: int, groups: int, num_sms: int) -> bool:
    """Whether the sums of 16 rows leave no ring of three stages."""
    plan = layout(
        tiling,
        tiles=tiles,
        groups=groups,
        num_row_tiles=2,
        num_sms=num_sms,
    )
    return plan.stages < min(3, plan.steps)


def cost(tiling: Tiling, *, tiles: int, groups: int, num_sms: int) -> float:
    """Return the groups that the busiest block multiplies, its fixed steps estimated in groups."""
    steps = -(-tiles // min(tiling.clusters(num_sms), tiles))
    chunks = -(-groups // tiling.warps) // tiling.cluster
    work = steps * chunks * tiling.warps
    fixed = 24.0 * chunks + (16.0 if tiling.cluster > 1 else 0.0)  # orders the searched maps
    return work * (1.0 + 2.0 / tiling.warps) + fixed
