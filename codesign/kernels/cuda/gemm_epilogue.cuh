// A finished tile of a skinny GEMM, and what epilogues load and store where it lies.
#include "gemm_layout.cuh"

// A finished tile, in one warp. Lane 4 g + t holds v[n] = features row + g (v[n][0], v[n][1]) and
// row + g + 8 (v[n][2], v[n][3]) of rows of x 8 n + 2 t and 8 n + 2 t + 1.
struct Tile {
  int row, lane;
  float v[NT][4];
};

// The pairs of a (rows, features) bf16 matrix where a tile lies, in memory's order: word [n][h] is of row
// 8 n + lane / 4, features row + 8 h + 2 (lane % 4) and the next. `features` is even; outside is zero.
struct Pairs {
  u32 word[NT][2];
};
__device__ __forceinline__ void load_pairs(Pairs& pairs, const u16* from, int rows, int features, int row, int lane) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int m = 8 * n + (lane >> 2), feature = row + 8 * h + 2 * (lane & 3);
      pairs.word[n][h] = 0;
      if (from && m < rows && feature < features) pairs.word[n][h] = load_fresh_pair(from + (size_t)m * features + feature);
    }
}
// Adds what `rest` holds (transposed back) to features row + lane / 4 + 8 h of rows 8 n + 2 (lane % 4) and
// the next, and stores them in bf16.
__device__ __forceinline__ void store_pair(u16* to, float low, float high, u32 rest, int rows, int features, int row, int n, int h, int lane) {
  const u32 added = transposed(rest);
  const u32 word = transposed(to_bf16_pair(low + low_bf16(added), high + high_bf16(added)));
  const int m = 8 * n + (lane >> 2), feature = row + 8 * h + 2 * (lane & 3);
  if (m < rows && feature < features) *(u32*)(to + (size_t)m * features + feature) = word;
}
