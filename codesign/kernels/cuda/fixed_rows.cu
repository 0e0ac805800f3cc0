// Rows of x in fixed point, in the order in which the blocks of many_rows.cu copy them.
//
// One block a row; without a norm, which needs the squares of a whole row in order, one for each round of chunks of a
// row. Four lanes take a group of 128 columns, as four lanes of a consumer do in gemm_product.cuh: the
// same bytes, units and sums, and sums of squares in the same order.
// Macros: ROWS of a block of many_rows.cu; WARPS groups of a chunk; CLUSTER blocks that take chunks in turn.
#include "row_blocks.cuh"

#define GROUPS_AT_A_TIME 64

extern "C" __global__ void __launch_bounds__(4 * GROUPS_AT_A_TIME)
fixed_rows(const u16* x, const u16* norm, u8* blocks, float* factors, int columns, int groups, float eps) {
  __shared__ float squares[CLUSTER * WARPS], total[CLUSTER];
  release_next();
  const int row = blockIdx.x, t = threadIdx.x & 3;
  RowBlock to = row_block(blocks, row / ROWS, groups);
  wait_for_previous();
  // All four lanes of a group, and all groups of a warp, take part to the end.
  for (int first = 0; first < CLUSTER * WARPS; first += GROUPS_AT_A_TIME) {
    const int place = first + threadIdx.x / 4, rank = place / WARPS;
    float square = 0.f;
    for (int chunk = blockIdx.y * CLUSTER; chunk * WARPS < groups; chunk += gridDim.y * CLUSTER) {
      const int group = (chunk + rank) * WARPS + place % WARPS;
      const bool is_real = place < CLUSTER * WARPS && group < groups;
      u32 pair[16];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int k = group * GROUP + t * 8 + 32 * i;
        uint4 raw = make_uint4(0, 0, 0, 0), scale = raw;
        if (is_real) {
          raw = load_fresh4(x + (size_t)row * columns + k);
          if (norm) scale = load_fresh4(norm + k);
        }
        const u32 r[4] = {raw.x, raw.y, raw.z, raw.w}, s[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
        for (int q = 0; q < 4; q++) pair[4 * i + q] = norm ? weigh_pair(r[q], s[q], square) : r[q];
      }
      const auto [scale, unit] = fixed_point(pair);
      int sum = 0;
#pragma unroll
      for (int s = 0; s < 8; s++) {
        u32 high, low;
        to_fixed(pair[2 * s], pair[2 * s + 1], scale, high, low);
        sum += (add_signed_bytes(high) << 8) + add_bytes(low);
        if (is_real) {
          *(u32*)(to.tile(group) + place_in_tile(row % ROWS, s, t)) = high;
          *(u32*)(to.tile(group) + TILE_ROWS_BYTES + place_in_tile(row % ROWS, s, t)) = low;
        }
      }
      sum = sum_of_four(sum);
      if (is_real && t == 0) {
        float* const ends = to.ends(group) + row % ROWS / 2 * 4 + row % 2;
        ends[0] = unit, ends[2] = __int_as_float(-sum);
      }
    }
    square = sum_of_four(square);
    if (place < CLUSTER * WARPS && t == 0) squares[place] = square;
  }
  __syncthreads();
  if (threadIdx.x < CLUSTER) {
    float s = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) s += squares[threadIdx.x * WARPS + w];
    total[threadIdx.x] = s;
  }
  __syncthreads();
  if (threadIdx.x == 0 && blockIdx.y == 0) {
    float sum = 0.f;
    for (int r = 0; r < CLUSTER; r++) sum += total[r];
    factors[row] = norm ? norm_factor(sum, columns, eps) : 1.f;
  }
}
