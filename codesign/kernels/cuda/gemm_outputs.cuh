// What a linear map does with its finished tiles: plain with bias and residual, SwiGLU, float32.
#include "gemm_epilogue.cuh"

__device__ __forceinline__ float silu(float v) { return v / (1.f + __expf(-v)); }

// out[m, n] = product + bias[n] + residual[m, n], in bf16.
struct Plain {
  u16* out;
  const u16* bias;
  const u16* residual;
  int rows, features;
  struct Ready {
    Pairs residual;
    float bias[2];
  };
  static const bool kDefer = false;
  __device__ __forceinline__ void fetch(int row, int lane, Ready& ready) const {
    load_pairs(ready.residual, residual, rows, features, row, lane);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int feature = row + (lane >> 2) + 8 * h;
      ready.bias[h] = bias && feature < features ? load_fresh_bf16(bias + feature) : 0.f;
    }
  }
  __device__ __forceinline__ void finish(const Tile& tile, const Ready& ready) const {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        store_pair(out, tile.v[n][2 * h] + ready.bias[h], tile.v[n][2 * h + 1] + ready.bias[h], ready.residual.word[n][h], rows,
                   features, tile.row, n, h, tile.lane);
  }
};

// out[m, n] = product, in float32: logits.
struct Wide {
  float* out;
  int rows, features;
  struct Ready {};
  static const bool kDefer = false;
  __device__ __forceinline__ void fetch(int, int, Ready&) const {}
  __device__ __forceinline__ void finish(const Tile& tile, const Ready&) const {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int m = 8 * n + 2 * (tile.lane & 3) + j % 2, feature = tile.row + (tile.lane >> 2) + 8 * (j / 2);
        if (m < rows && feature < features) out[(size_t)m * features + feature] = tile.v[n][j];
      }
  }
};

// out[m, j] = silu(gate) * up: rows are packed so that a tile holds 8 gates, then their 8 ups.
struct Swiglu {
  u16* out;
  int rows, features;  // features = columns of out
  struct Ready {};
  static const bool kDefer = false;
  __device__ __forceinline__ void fetch(int, int, Ready&) const {}
  __device__ __forceinline__ void finish(const Tile& tile, const Ready&) const {
#pragma unroll
    for (int n = 0; n < NT; n++)
      store_pair(out, silu(tile.v[n][0]) * tile.v[n][2], silu(tile.v[n][1]) * tile.v[n][3], 0, rows, features, tile.row / 2, n, 0,
                 tile.lane);
  }
};

// The one that ACTIVATION says, from a row of x on.
#if ACTIVATION == 2
typedef Wide Output;
#elif ACTIVATION == 1
typedef Swiglu Output;
#else
typedef Plain Output;
#endif
__device__ __forceinline__ Output output_of(void* out, const u16* bias, const u16* residual, int first, int rows, int features) {
  const size_t from = (size_t)first * features;
#if ACTIVATION == 2
  return {(float*)out + from, rows - first, features};
#elif ACTIVATION == 1
  return {(u16*)out + from, rows - first, features};
#else
  return {(u16*)out + from, bias, residual ? residual + from : nullptr, rows - first, features};
#endif
}
