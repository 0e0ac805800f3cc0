"""Which tiles of keys an attention block reads: the CUDA source's own functions, run on the CPU."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from codesign.kernels.attention_shares import CLASSES, SPAN
from codesign.kernels.nvrtc import SOURCES

KEYS = 64  # positions of a tile
COMPILER = shutil.which("g++") or shutil.which("c++")
PROGRAM = """
#include <algorithm>
#include <cstdio>
#define __device__
#define __forceinline__ inline
using u32 = unsigned;
using std::min;
constexpr int C = {columns}, SPAN = {span}, CLASSES = {classes};
{walk}
int main() {{
  int tiles, classes, member, blocks, share, shares;
  while (scanf("%d %d %d %d %d %d", &tiles, &classes, &member, &blocks, &share, &shares) == 6) {{
    const Walk walk = {{tiles, classes, member, blocks, share, shares}};
    for (Place at = walk.begin(); at.left > 0; walk.advance(at)) {{
      printf("%d:%d:%d ", at.tile, at.kind, at.column);
    }}
    printf("\\n");
  }}
}}
"""
SHARED = [(CLASSES, share, shares) for shares in (1, 3, 8) for share in range(shares)]
COUNTS = [0, 1, 2, 7, 8, 9, 15, 63, 64, 65, 72, 511, 512, 513, 520, 777, 1500]


def expected_tiles(
    tiles: int, classes: int, member: int, blocks: int, share: int, shares: int, columns: int
) -> list[str]:
    """Tiles below ``tiles`` that are a block's, by class, column and position."""
    span = SPAN // KEYS
    mine = [
        (kind, column)
        for kind in range(share, classes, shares)
        for column in range(member, columns, blocks)
    ]
    return [
        f"{tile}:{kind}:{column}"
        for kind, column in mine
        for tile in range(tiles)
        if tile // span % CLASSES == kind and tile % columns == column
    ]


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("columns", [4, 8, 16])
def test_a_block_reads_its_tiles_by_class_column_and_position(columns: int, tmp_path: Path):
    source = (SOURCES / "attention_walk.cuh").read_text()
    walk = "\n".join(line for line in source.splitlines() if not line.startswith("#include"))
    numbers = {"columns": columns, "span": SPAN // KEYS, "classes": CLASSES}
    (tmp_path / "walk.cpp").write_text(PROGRAM.format(walk=walk, **numbers))
    program = tmp_path / "walk"
    command = [str(COMPILER), "-std=c++17", "-o", str(program), str(tmp_path / "walk.cpp")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    teams = [(c, member, columns, *rest) for c, *rest in SHARED for member in (0, columns - 1)]
    teams += [(CLASSES, member, 2, 0, 1) for member in range(2)]
    teams += [(CLASSES, 0, 1, 0, 1), (1, 1, columns, 0, 1)]
    cases = [(tiles, *team) for tiles, team in itertools.product(COUNTS, teams)]
    words = "\n".join(" ".join(map(str, case)) for case in cases)
    run = subprocess.run([program], input=words, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    found = [line.split() for line in run.stdout.splitlines()]
    assert found == [expected_tiles(*case, columns) for case in cases]
