from __future__ import annotations

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from codesign.kernels.gemm import most_rows
from codesign.kernels.tiling import MEASURED, SHARED_BYTES, Tiling, choose, layout, row_tiles


@given(
    tiles=st.integers(1, 10_000),
    groups=st.integers(1, 256),
    rows=st.integers(1, 32),
)
def test_eight_rows_of_every_shape_get_a_ring_of_two_stages_that_fits(tiles, groups, rows):
    tiling = choose(tiles=tiles, groups=groups)
    chunks = -(-groups // tiling.warps)
    assert chunks % tiling.cluster == 0, "a block of the cluster would have no columns"
    kept = tiling.cluster > 1 or chunks > 1
    for most in (rows, 8):
        count = row_tiles(most)
        plan = layout(
            tiling,
            tiles=tiles,
            groups=groups,
            num_row_tiles=count,
            num_sms=132,
        )
        assert plan.shared_bytes <= SHARED_BYTES
        assert plan.chunks == chunks // tiling.cluster
        assert plan.clusters * tiling.cluster <= 132 * tiling.blocks
        assert tiling.threads(count) * tiling.blocks <= 768, "more leave too few registers a thread"
        assert plan.part_tiles * plan.clusters >= tiles * kept
    # Of more rows as many are run at a time as leave room for a ring.
    assert plan.stages >= 2 or plan.part_tiles > 128, "a vocabulary keeps too many sums"


@given(
    shape=st.sampled_from([*MEASURED]),
    rows=st.integers(1, 32),
)
def test_the_cut_along_the_columns_does_not_depend_on_the_rows(shape, rows):
    tiles, groups = shape
    one = choose(tiles=tiles, groups=groups)
    many = choose(tiles=tiles, groups=groups, num_row_tiles=row_tiles(rows))
    assert (one.warps, one.cluster) == (many.warps, many.cluster)
    assert -(-groups // one.warps) % one.cluster == 0, "blocks of a cluster with unequal columns"
    plan = layout(
        many,
        tiles=tiles,
        groups=groups,
        num_row_tiles=row_tiles(min(rows, 16)),
        num_sms=132,
    )
    assert plan.stages >= 2


@given(shape=st.sampled_from([*MEASURED]), rows=st.sampled_from([8, 16]))
def test_tiles_are_dealt_out_in_whole_steps_and_no_cluster_takes_more_of_them(shape, rows):
    tiles, groups = shape
    count = row_tiles(rows)
    tiling = choose(tiles=tiles, groups=groups, num_row_tiles=count)
    plan = layout(tiling, tiles=tiles, groups=groups, num_row_tiles=count, num_sms=132)
    whole = tiles % tiling.tiles == 0 and tiles // tiling.tiles >= plan.clusters
    assert plan.unit == (tiling.tiles if whole else 1)
    assert tiles % plan.unit == 0
    assert plan.clusters * plan.unit <= tiles, "a cluster without tiles"
    evenly = -(-tiles // plan.clusters)
    chunks = ceil(ceil(groups / tiling.warps) / tiling.cluster)
    assert plan.steps == -(-evenly // tiling.tiles) * chunks


def test_chunks_are_unknown_where_blocks_of_a_cluster_have_unequal_many():
    for cluster, chunks in ((1, 3), (2, 0), (4, 0)):
        plan = layout(Tiling(4, 1, cluster), tiles=8, groups=12, num_row_tiles=1, num_sms=132)
        assert plan.chunks == chunks


def test_sixteen_rows_of_the_largest_maps_run_in_one_launch():
    """70B on one GPU: the sums of two chunks in a cluster of two left room for one stage."""
    for tiles, groups in ((640, 64), (512, 64), (3584, 64), (512, 224), (1792, 64)):
        tiling = choose(tiles=tiles, groups=groups, num_row_tiles=2)
        plan = layout(tiling, tiles=tiles, groups=groups, num_row_tiles=2, num_sms=132)
        assert plan.stages >= 2, (tiles, groups, tiling)


def test_more_than_sixteen_rows_share_a_launch_only_where_registers_are_left():
    """Of the 70B's maps over four GPUs, its down on one, the 72B's and the 3B's."""
    most = {
        (160, 64): 16,
        (512, 16): 32,
        (896, 64): 16,
        (512, 56): 16,
        (512, 224): 16,
        (512, 231): 16,
        (192, 24): 32,
    }
    found = {cut: most_rows(*cut, None, 132) for cut in most}
    assert found == most
