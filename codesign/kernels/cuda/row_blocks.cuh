// Where rows of x lie that many_rows.cu multiplies: blocks of ROWS rows, group by group.
//
// Of a group of 128 columns: the high bytes of its rows, then the low ones, each as wgmma reads a K-major operand with
// a swizzle of 128 bytes: eight rows of 128 bytes in a square, whose sixteen bytes are exchanged by the row. Then of
// each two rows their units and, as integers, minus their sums.
#include "fixed_point.cuh"

#define TILE_ROWS_BYTES (ROWS * GROUP)
#define ENDS_BYTES (ROWS * 8)
#define GROUP_ROWS_BYTES (2 * TILE_ROWS_BYTES + ENDS_BYTES)

struct RowBlock {
  u8* from;
  __device__ __forceinline__ u8* tile(int group) const { return from + (size_t)group * GROUP_ROWS_BYTES; }
  __device__ __forceinline__ float* ends(int group) const { return (float*)(tile(group) + 2 * TILE_ROWS_BYTES); }
};
__device__ __forceinline__ RowBlock row_block(u8* blocks, int block, int groups) {
  return {blocks + (size_t)block * groups * GROUP_ROWS_BYTES};
}
// Place of word s of lane t of four: as A's fragments have the columns, bytes 16 s + 4 t of the row.
__device__ __forceinline__ int place_in_tile(int row, int s, int t) {
  return row / 8 * 1024 + row % 8 * 128 + ((s ^ row % 8) << 4) + 4 * t;
}
