// The language model's head with the best KEPT features of every row of x and the row's sum of
// exponentials in its epilogue: no logit is written to memory.
//
// Every lane of a reducer warp keeps the best of its own features and rows; behind the last tile the
// eight lanes of a row join theirs. What remains, a list a reducer, another launch joins.
//
// Macro: KEPT, a power of two.
#include "gemm_core.cuh"

#define NO_TOKEN 0x7fffffff
#define NOTHING __int_as_float(0xff800000)  // minus infinity

struct Choice {
  float value;
  int feature;
};
__device__ __forceinline__ bool is_better(const Choice& a, const Choice& b) {
  return a.value > b.value || (a.value == b.value && a.feature < b.feature);
}
__device__ __forceinline__ void swap_if_better(Choice& a, Choice& b) {  // the better one to a
  const Choice first = is_better(b, a) ? b : a, second = is_better(b, a) ? a : b;
  a = first, b = second;
}

struct Best {  // of one row, in descending order
  Choice list[KEPT];
  float top, sum;  // largest value, sum of exp(value - top)
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < KEPT; j++) list[j] = {NOTHING, NO_TOKEN};
    top = NOTHING, sum = 0.f;
  }
  __device__ __forceinline__ void add(Choice c) {
    const float above = fmaxf(top, c.value);
    if (above > NOTHING) sum = sum * __expf(top - above) + __expf(c.value - above);
    top = above;
    if (c.value > list[KEPT - 1].value) {
#pragma unroll
      for (int j = 0; j < KEPT; j++) swap_if_better(list[j], c);
    }
  }
  // Join with the lane whose number differs in that bit; both then have the same.
  __device__ __forceinline__ void join(int bit) {
    Choice other[KEPT];
#pragma unroll
    for (int j = 0; j < KEPT; j++)
      other[j] = {__shfl_xor_sync(~0u, list[j].value, bit), __shfl_xor_sync(~0u, list[j].feature, bit)};
#pragma unroll
    for (int j = 0; j < KEPT; j++) list[j] = is_better(other[KEPT - 1 - j], list[j]) ? other[KEPT - 1 - j] : list[j];
#pragma unroll
    for (int stride = KEPT / 2; stride > 0; stride /= 2)
#pragma unroll
      for (int j = 0; j < KEPT; j++)
        if ((j & stride) == 0) swap_if_better(list[j], list[j + stride]);
    const float top2 = __shfl_xor_sync(~0u, top, bit), sum2 = __shfl_xor_sync(~0u, sum, bit), above = fmaxf(top, top2);
    if (above > NOTHING) sum = sum * __expf(top - above) + sum2 * __expf(top2 - above);
    top = above;
  }
};

struct Choices {
  float* values;  // (rows, lists, KEPT)
  int* features;
  float* sums;  // (rows, lists, 2): top, sum
  int rows, num_features;
  Best best[NT][2];
  struct Ready {};
  static const bool kDefer = false;
  __device__ __forceinline__ void fetch(int, int, Ready&) const {}
  __device__ __forceinline__ void finish(const Tile& tile, const Ready&) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int feature = tile.row + (tile.lane >> 2) + 8 * h;
      if (feature < num_features) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) best[n][i].add({tile.v[n][2 * h + i], feature});
      }
    }
  }
  __device__ __forceinline__ void close(int place, int lane) {
    __syncwarp();
    const int lists = gridDim.x * SLOTS, list = blockIdx.x * SLOTS + place;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        Best& b = best[n][i];
        b.join(4), b.join(8), b.join(16);
        const int row = 8 * n + 2 * (lane & 3) + i, at = row * lists + list;
        if (lane < 4 && row < rows) {
#pragma unroll
          for (int j = 0; j < KEPT; j++) values[at * KEPT + j] = b.list[j].value, features[at * KEPT + j] = b.list[j].feature;
          sums[2 * at] = b.top, sums[2 * at + 1] = b.sum;
        }
      }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
head(const u8* weight, const u16* x, const u16* norm, float* values, int* best_features, float* sums, int rows, int columns,
     int features, int groups, int stages, int part_tiles, int share, int rest, float eps) {
  const Gemm a = {weight, x, norm, rows, columns, groups, stages, part_tiles, (u32)share, (u32)rest, eps};
  Choices epilogue;
  epilogue.values = values, epilogue.features = best_features, epilogue.sums = sums;
  epilogue.rows = rows, epilogue.num_features = features;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) epilogue.best[n][i].clear();
  gemm_main(a, epilogue);
}
