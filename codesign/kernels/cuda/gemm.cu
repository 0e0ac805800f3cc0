// Linear maps for few rows: plain with bias and residual (ACTIVATION 0), SwiGLU (ACTIVATION 1).
#include "gemm_core.cuh"

__device__ __forceinline__ float silu(float v) { return v / (1.f + __expf(-v)); }

// out[m, n] = product + bias[n] + residual[m, n], in bf16.
struct Plain {
  struct Args {
    u16* out;
    const u16* bias;
    const u16* residual;
    int rows, features;
  };
  static const bool kDefer = false, kWhole = false;
  static __device__ __forceinline__ void finish(const Args& e, const Tile& tile) {
    const int g = tile.lane >> 2, t = tile.lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int feature = tile.row + g + (i >> 1) * 8, m = 8 * n + 2 * t + (i & 1);
        if (m >= e.rows || feature >= e.features) continue;
        const size_t at = (size_t)m * e.features + feature;
        float v = tile.v[n][i];
        if (e.bias) v += load_fresh_bf16(e.bias + feature);
        if (e.residual) v += load_fresh_bf16(e.residual + at);
        e.out[at] = to_bf16(v);
      }
  }
};

// out[m, j] = silu(gate) * up: rows are packed so that a tile holds 8 gates, then their 8 ups.
struct Swiglu {
  typedef Plain::Args Args;  // features = columns of out
  static const bool kDefer = false, kWhole = false;
  static __device__ __forceinline__ void finish(const Args& e, const Tile& tile) {
    const int j = tile.row / 2 + (tile.lane >> 2), t = tile.lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int m = 8 * n + 2 * t + i;
        if (m < e.rows && j < e.features) e.out[(size_t)m * e.features + j] = to_bf16(silu(tile.v[n][i]) * tile.v[n][i + 2]);
      }
  }
};

#if ACTIVATION == 1
typedef Swiglu Chosen;
#else
typedef Plain Chosen;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gemm(const u8* weight, const u16* x, const u16* norm, u16* out, const u16* bias, const u16* residual, int rows, int columns,
     int features, int tiles, int groups, int stages, int part_tiles, float eps) {
  const Gemm a = {weight, x, norm, rows, columns, tiles, groups, stages, part_tiles, eps};
  const Chosen::Args e = {out, bias, residual, rows, features};
  gemm_main<Chosen>(a, e);
}
