// The product of a skinny GEMM, of one consumer warp: x in fixed point times packed 4-bit weights.
//
// packing.py has the layout of a record: the weights of 16 features and 128 columns.
#include "fixed_point.cuh"
#include "gemm_layout.cuh"

struct Consumer {
  // x of this warp's group as B fragments, in fixed point: high bytes with the sign, and low bytes.
  u32 high[NT][8], low[NT][8];
  int less[NT][2];    // minus the sum of x over the group, for this lane's two rows
  float squares[NT];  // of row lane / 4, this lane's columns
};

// Where this lane's part of the x of a group begins, and how many columns there are from there on.
struct Place {
  const u16* from;
  int left;
};
__device__ __forceinline__ Place place_of(const Gemm& a, int group, int lane) {
  const int k = group * GROUP + (lane & 3) * 8;
  return {a.x + (size_t)(lane >> 2) * a.columns + k, a.columns - k};
}
// That part, as in memory.
__device__ __forceinline__ void fetch_rows(const Gemm& a, const Place& x, int lane, uint4 (&raw)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      raw[n][i] = make_uint4(0, 0, 0, 0);
      if (8 * n + (lane >> 2) < a.rows && i * 32 < x.left) raw[n][i] = load_fresh4(x.from + 8 * n * (size_t)a.columns + i * 32);
    }
}

// This lane's part of the norm's weight, which no kernel writes. Not by __ldg: such loads are moved behind the wait for
// the kernel in front, even volatile ones.
__device__ __forceinline__ void fetch_norm(const Gemm& a, int group, int lane, uint4 (&scale)[4]) {
  const int k = group * GROUP + (lane & 3) * 8, left = a.norm ? a.columns - k : 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    scale[i] = make_uint4(0, 0, 0, 0);
    if (i * 32 < left) scale[i] = load_fresh4(a.norm + k + i * 32);
  }
}

// A row of a group in fixed point, and the sum of it; what a one is worth to `units`, for the reducers.
__device__ __forceinline__ void fix_rows(const u32 (&x)[16], int n, int lane, Consumer& w, float* units) {
  const auto [scale, unit] = fixed_point(x);
  if ((lane & 3) == 0) units[8 * n + (lane >> 2)] = unit;
#pragma unroll
  for (int s = 0; s < 8; s++) to_fixed(x[2 * s], x[2 * s + 1], scale, w.high[n][s], w.low[n][s]);
  int c[4] = {0, 0, 0, 0}, d[4] = {0, 0, 0, 0};
#pragma unroll
  for (int s = 0; s < 8; s += 2) {
    minus_bytes<true>(c, w.high[n][s], w.high[n][s + 1]);
    minus_bytes<false>(d, w.low[n][s], w.low[n][s + 1]);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) w.less[n][i] = (c[i] << 8) + d[i];
}

// Make them B fragments, times the norm's weight.
__device__ __forceinline__ void take_rows(const Gemm& a, const uint4 (&raw)[NT][4], const uint4 (&scale)[4], int lane, Consumer& w, float* units) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    u32 x[16];
#pragma unroll
    for (int i = 0; i < 4; i++) x[4 * i] = raw[n][i].x, x[4 * i + 1] = raw[n][i].y, x[4 * i + 2] = raw[n][i].z, x[4 * i + 3] = raw[n][i].w;
    if (a.norm) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 s[4] = {scale[i].x, scale[i].y, scale[i].z, scale[i].w};
#pragma unroll
        for (int q = 0; q < 4; q++) {
          u32& pair = x[4 * i + q];
          pair = weigh_pair(pair, s[q], w.squares[n]);
        }
      }
    }
    fix_rows(x, n, lane, w, units);
  }
}

// TILES records (16 features x 128 columns each, a PIECE apart), as a warp holds them.
struct Records {
  uint4 q[TILES][2];
  u32 ends[TILES];  // scale and zero of rows g and g + 8
};

// `codes` and `ends`: addresses of this lane's first piece of either.
__device__ __forceinline__ void load_records(u32 codes, u32 ends, Records& r) {
#pragma unroll
  for (int i = 0; i < TILES; i++) {
#pragma unroll
    for (int j = 0; j < sizeof(r.q[0]) / 16; j++) r.q[i][j] = load_shared4(codes + i * PIECE + j * 512);
    r.ends[i] = load_shared1(ends + i * PIECE);
  }
}

// acc[i] = record i times x, in units of x's rows.
__device__ __forceinline__ void multiply_records(const Records& r, const Consumer& w, float (&acc)[TILES][NT][4]) {
  // A word's bytes are the codes of row g and 16 times those of row g + 8.
  int high[TILES][NT][4], low[TILES][NT][4];
#pragma unroll
  for (int i = 0; i < TILES * NT * 4; i++) (&high[0][0][0])[i] = (&low[0][0][0])[i] = 0;
#pragma unroll
  for (int s = 0; s < 8; s += 2)
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const uint4 quad = r.q[i][s >> 2];
      const u32 v0 = s & 2 ? quad.z : quad.x, v1 = s & 2 ? quad.w : quad.y;
      const u32 a0 = v0 & 0x0f0f0f0fu, a1 = v0 & 0xf0f0f0f0u, a2 = v1 & 0x0f0f0f0fu, a3 = v1 & 0xf0f0f0f0u;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        mma_bytes<true>(high[i][n], a0, a1, a2, a3, w.high[n][s], w.high[n][s + 1]);
        mma_bytes<false>(low[i][n], a0, a1, a2, a3, w.low[n][s], w.low[n][s + 1]);
      }
    }
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    const Scales k = scales_of(r.ends[i]);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int c0 = (high[i][n][j] << 8) + low[i][n][j], c1 = (high[i][n][2 + j] << 8) + low[i][n][2 + j];
        acc[i][n][j] = worth(c0, w.less[n][j], k.s0, k.z0);
        acc[i][n][2 + j] = worth(c1, w.less[n][j], k.s1, k.z1);
      }
  }
}
