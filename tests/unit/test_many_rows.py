"""Maps of many rows without a GPU: launch shapes, and the order of columns in both operands."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from codesign.kernels.int4 import quantize_int4, unpack_nibbles
from codesign.kernels.many_rows import choose
from codesign.kernels.packing import pack_int4
from codesign.kernels.tiling import MEASURED, SHARED_BYTES
from codesign.kernels.tiling import choose as tiling_of

RESERVED = 1 << 10  # of every block on a multiprocessor
EXCHANGED = 256 * 16 // 8  # bytes a row: a fragment of every thread for each eight


@pytest.mark.parametrize("rows", [17, 32, 33, 64, 65, 128])
def test_a_launch_fits_the_multiprocessor_and_its_teams_share_the_columns(rows: int):
    for tiles, groups in MEASURED:
        shares = tiling_of(tiles=tiles, groups=groups).cluster
        cut = choose(rows, tiles=tiles, shares=shares, sms=132)
        assert cut.stages >= 2, (tiles, groups, cut)
        assert cut.blocks * (cut.shared_bytes + RESERVED) <= SHARED_BYTES + RESERVED
        assert shares % cut.teams == 0
        assert cut.shared_bytes - 1024 >= cut.rows * EXCHANGED, "sums lie where the ring was"


def test_few_features_have_two_teams_and_many_two_blocks():
    few, many = (choose(64, tiles=n, shares=4, sms=132) for n in (128, 3584))
    assert (few.teams, few.blocks) == (2, 1)
    assert (many.teams, many.blocks) == (1, 2)
    assert choose(64, tiles=128, shares=1, sms=132).teams == 1


def test_blocks_of_fewer_rows_fill_a_chip_that_is_half_idle():
    """The 1B's o and down have 64 blocks of 64 rows, its qkv 96."""
    half, most = (choose(64, tiles=n, shares=4, sms=132) for n in (128, 192))
    assert (half.rows, half.blocks) == (32, 1)
    assert most.rows == 64
    assert choose(128, tiles=128, shares=4, sms=132).rows == 64


def test_three_blocks_share_a_multiprocessor_where_they_save_a_turn_of_the_chip():
    """Of 132 multiprocessors: 320 and 896 blocks take fewer turns by three, 448 and 256 do not."""
    of_70b = {"qkv": (640, 4), "gate_up": (3584, 2), "o": (512, 4), "gate_up of four": (896, 4)}
    blocks = {
        name: choose(32, tiles=tiles, shares=shares, sms=132).blocks
        for name, (tiles, shares) in of_70b.items()
    }
    assert blocks == {"qkv": 3, "gate_up": 3, "o": 2, "gate_up of four": 2}
    assert choose(32, tiles=640, shares=4, sms=132).teams == 1
    assert choose(64, tiles=3584, shares=2, sms=132).blocks == 2, "sums of 64 rows need registers"


def arranged(q_N128: np.ndarray) -> np.ndarray:
    """The low bytes of a group as fixed_rows.cu stores them, flat."""
    tile = np.zeros(q_N128.size, np.uint8)
    for row, values in enumerate(q_N128.astype(np.uint8)):
        for t in range(4):
            for s in range(8):
                start = 8 * t + 32 * (s // 2) + 4 * (s % 2)
                at = row // 8 * 1024 + row % 8 * 128 + ((s ^ row % 8) << 4) + 4 * t
                tile[at : at + 4] = values[start + np.array([0, 2, 1, 3])]
    return tile


def operand_of_rows(tile: np.ndarray, num_rows: int, step: int) -> np.ndarray:
    """(rows, 32) bytes that wgmma reads of 32 columns, in squares of 8 by 128, swizzled by 128."""
    found = np.empty((num_rows, 32), np.uint8)
    for row in range(num_rows):
        for k in range(32):
            byte = 32 * step + k
            chunk = (byte >> 4) ^ (row % 8)
            found[row, k] = tile[row // 8 * 1024 + row % 8 * 128 + 16 * chunk + byte % 16]
    return found


def operand_of_weights(record: np.ndarray, step: int) -> np.ndarray:
    """(16, 32) codes of 32 columns as the lanes of a warp hold them; of row g + 8 times 16."""
    words = record[:512].view(np.uint32).reshape(32, 4)
    more = record[512:1024].view(np.uint32).reshape(32, 4)
    found = np.empty((16, 32), np.uint8)
    for lane in range(32):
        g, t = divmod(lane, 4)
        word = [*words[lane], *more[lane]]
        for half, mask in ((0, 0x0F0F0F0F), (8, 0xF0F0F0F0)):
            for part in range(2):
                codes = (word[2 * step + part] & np.uint32(mask)).reshape(1).view(np.uint8)
                found[g + half, 16 * part + 4 * t : 16 * part + 4 * t + 4] = codes
    return found


def test_both_operands_have_the_columns_in_the_same_order():
    generator = torch.Generator().manual_seed(3)
    weight = quantize_int4(torch.randn(16, 128, generator=generator), group=128)
    record = pack_int4(weight).records[0, 0].numpy()
    q = np.random.default_rng(4).integers(0, 256, (24, 128))
    tile = arranged(q)
    found = np.zeros((16, 24), np.int64)
    for step in range(4):
        rows = operand_of_rows(tile, 24, step).astype(np.int64)
        found += operand_of_weights(record, step).astype(np.int64) @ rows.T
    expected = unpack_nibbles(weight.packed).numpy().astype(np.int64) @ q.T
    expected[8:] *= 16
    np.testing.assert_array_equal(found, expected)
