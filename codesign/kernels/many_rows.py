"""Linear maps for many rows over packed weights, with the bits that each row has among few.

A launch of ``gemm`` takes up to 16 or 32 rows, whose x lies in registers. Here weights are read
once for 64: a launch of its own brings rows to fixed point (cuda/fixed_rows.cu), and warpgroups
multiply bytes (cuda/many_rows.cu). Both multiply whole numbers and round in the same order, so a
request decodes to the same tokens alone and in a large batch.

Letters in shapes: M rows, K inputs, N outputs.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from codesign.kernels.cuda_module import CudaKernel, load_kernel
from codesign.kernels.packed_reference import Norm
from codesign.kernels.packing import GROUP, PackedLinear
from codesign.kernels.tiling import RECORD_BYTES, Tiling, shared_room

_RING = 1024  # bytes in front of it
_TILES, _THREADS = 8, 288  # of a block: tiles of 16 features at a time, a warp each, and one warp
_FIX_THREADS = 256  # of a block that brings a row to fixed point
_MOST_STAGES = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """Launch shape; results do not depend on it.

    Attributes:
        rows: Of a block: 32 or 64.
        teams: Of a block, each with columns of its own: 1 or 2.
        blocks: That a multiprocessor holds: 1 or 2, or 3 of 32 rows.
        stages: Of a block's ring.
    """

    rows: int
    teams: int
    blocks: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return _RING + self.stages * _stage_bytes(self.rows, self.teams)


def _group_bytes(rows: int) -> int:
    """Of a block's rows, of a group of columns: see row_blocks.cuh."""
    return rows * (2 * GROUP + 8)


def _stage_bytes(rows: int, teams: int) -> int:
    own = teams * _group_bytes(rows) + _TILES * RECORD_BYTES
    return -(-own // 1024) * 1024


def run(
    x_MK: Tensor,
    weight: PackedLinear,
    out_MN: Tensor,
    *,
    norm: Norm | None,
    bias_N: Tensor | None,
    residual_MN: Tensor | None,
    activation: int,
    tiling: Tiling,
    sms: int,
    pdl: bool = True,
    cut: Cut | None = None,
) -> None:
    """Write a linear map of ``gemm`` to ``out_MN``.

    Args:
        tiling: By which ``gemm`` cuts the columns of this weight.
        sms: Multiprocessors.
        pdl: As in ``gemm``.
        cut: Launch shape; None chooses.
    """
    rows, columns = x_MK.shape
    tiles, groups = weight.num_tiles, weight.num_groups
    plan = _plan(rows, tiles, groups, tiling, activation, sms, cut)
    blocks = x_MK.new_empty(plan.scratch_bytes, dtype=torch.uint8)
    factors_M = x_MK.new_empty(plan.padded_rows, dtype=torch.float32)
    norm_K, eps = (None, 0.0) if norm is None else (norm.weight_K, norm.eps)
    args = [x_MK, norm_K, blocks, factors_M, columns, groups, eps]
    rounds = plan.rounds if norm is None else 1
    plan.fix.launch((rows, rounds), _FIX_THREADS, args, pdl=pdl)
    args = [weight.data, blocks, factors_M, out_MN, bias_N, residual_MN]
    args += [rows, out_MN.shape[1], tiles, groups, plan.row_blocks]
    plan.product.launch(
        plan.grid,
        _THREADS,
        args,
        shared_bytes=plan.shared_bytes,
        cluster=plan.cluster,
        pdl=pdl,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    fix: CudaKernel
    rounds: int  # of chunks, one to each block of a cluster
    product: CudaKernel
    grid: tuple[int]
    cluster: int
    shared_bytes: int
    row_blocks: int
    padded_rows: int
    scratch_bytes: int


@cache
def _plan(
    rows: int,
    tiles: int,
    groups: int,
    tiling: Tiling,
    activation: int,
    sms: int,
    cut: Cut | None,
) -> _Plan:
    warps, cluster = tiling.warps, tiling.cluster
    cut = cut or choose(rows, tiles=tiles, shares=cluster, sms=sms)
    row_blocks = -(-rows // cut.rows)
    both = {"ROWS": cut.rows, "WARPS": warps, "CLUSTER": cluster}
    own = {
        "TEAMS": cut.teams,
        "BLOCKS": cut.blocks,
        "STAGES": cut.stages,
        "SEVERAL": int(-(-groups // warps) > cluster),
        "ACTIVATION": activation,
        "DELAYS": int(tiling.delays),
    }
    return _Plan(
        load_kernel("fixed_rows.cu", "fixed_rows", both),
        -(-groups // (warps * cluster)),
        load_kernel("many_rows.cu", "many_rows", both | own),
        (_num_blocks(row_blocks, tiles, cluster, cut.teams),),
        cluster // cut.teams,
        cut.shared_bytes,
        row_blocks,
        row_blocks * cut.rows,
        row_blocks * groups * _group_bytes(cut.rows),
    )


def choose(rows: int, *, tiles: int, shares: int, sms: int) -> Cut:
    """The launch shape for so many rows.

    Two teams where there are few features; two blocks on a multiprocessor where there are many;
    blocks of half of the rows where those of 64 would leave half of the chip idle, and of one team
    and three to a multiprocessor where the chip then takes them in fewer turns.

    Args:
        rows: Of x.
        tiles: Of 16 features.
        shares: In which ``gemm`` adds up the columns, its cluster.
        sms: Multiprocessors.
    """
    of_block = 32 if rows <= 32 else 64
    row_blocks = -(-rows // of_block)
    teams = 1 if shares % 2 or _num_blocks(row_blocks, tiles, shares, 1) >= 6 * sms else 2
    if _num_blocks(row_blocks, tiles, shares, teams) <= sms // 2:
        of_block, row_blocks = 32, -(-rows // 32)
    alone = _num_blocks(row_blocks, tiles, shares, 1)
    if of_block == 32 and -(-alone // (3 * sms)) < -(-alone // (2 * sms)):
        return _cut(of_block, 1, 3)
    blocks = 2 if _num_blocks(row_blocks, tiles, shares, teams) > sms else 1
    return _cut(of_block, teams, blocks)


def _cut(rows: int, teams: int, blocks: int) -> Cut:
    stages = (shared_room(blocks) - _RING) // _stage_bytes(rows, teams)
    return Cut(rows, teams, blocks, min(stages, _MOST_STAGES))


def _num_blocks(row_blocks: int, tiles: int, shares: int, teams: int) -> int:
    return -(-tiles // (_TILES // teams)) * row_blocks * (shares // teams)
