// Rows of x in fixed point, and what becomes of products of whole numbers: each float operation on the way from x to a
// sum of a group, in one place, as gemm_core.cuh and many_rows.cu must give the same bits.
#include "hopper.cuh"

#define GROUP 128  // columns with scales, and a unit, of their own

// A pair of x times that of the norm's weight; adds its squares.
__device__ __forceinline__ u32 weigh_pair(u32 pair, u32 weight, float& squares) {
  squares += low_bf16(pair) * low_bf16(pair);
  squares += high_bf16(pair) * high_bf16(pair);
  return multiply_bf16(pair, weight);
}
// The norm's factor of a row, whose squares add up to `sum`.
__device__ __forceinline__ float norm_factor(float sum, int columns, float eps) { return rsqrtf(__fdividef(sum, (float)columns) + eps); }
// Over four lanes, which have a group of a row.
template <class Number>
__device__ __forceinline__ Number sum_of_four(Number sum) {
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  return sum;
}

// Four of x as q = x times `scale` to the nearest integer, 16 bits: its high and its low bytes, in the
// order in which a word of codes has their columns.
__device__ __forceinline__ void to_fixed(u32 first, u32 second, float scale, u32& high, u32& low) {
  const float one = 12582912.f;  // 1.5 * 2^23: the sum's last bits are q
  const u32 q0 = __float_as_uint(fmaf(low_bf16(first), scale, one)), q1 = __float_as_uint(fmaf(high_bf16(first), scale, one));
  const u32 q2 = __float_as_uint(fmaf(low_bf16(second), scale, one)), q3 = __float_as_uint(fmaf(high_bf16(second), scale, one));
  const u32 even = __byte_perm(q0, q2, 0x5140), odd = __byte_perm(q1, q3, 0x5140);
  low = __byte_perm(even, odd, 0x5410), high = __byte_perm(even, odd, 0x7632);
}

// The fixed point of a row of a group: of its largest size all 8 bits of a bf16 and 7 more, so what is above a 128th of
// it is exact. Rows with infinities or NaNs have a unit that is none.
struct FixedPoint {
  float scale;  // the largest comes to 2^14 and more
  float unit;   // what a one is worth
};
// Of 16 pairs of each of four lanes.
__device__ __forceinline__ FixedPoint fixed_point(const u32 (&x)[16]) {
  u32 top[4];
#pragma unroll
  for (int i = 0; i < 4; i++) top[i] = larger_bf16(larger_bf16(x[4 * i], x[4 * i + 1]), larger_bf16(x[4 * i + 2], x[4 * i + 3]));
  u32 most = larger_bf16(larger_bf16(top[0], top[1]), larger_bf16(top[2], top[3]));
  most = larger_bf16(most, __shfl_xor_sync(~0u, most, 1));
  most = larger_bf16(most, __shfl_xor_sync(~0u, most, 2));
  most &= 0x7f807f80u;
  const u32 exponent = max(max(most, most << 16) & 0x7f800000u, 32u << 23);
  return {__uint_as_float((268u << 23) - exponent), __uint_as_float(exponent == 0x7f800000u ? 0x7fffffffu : exponent - (14u << 23))};
}

// Scales and zero points of rows g and g + 8 of a tile, as its record ends: 12 bits of a float16 and 4 each. A word's bytes
// are the codes of row g and 16 times those of row g + 8; so are its zero and the inverse of its scale.
struct Scales {
  float s0, s1;
  int z0, z1;
};
__device__ __forceinline__ Scales scales_of(u32 ends) {
  Scales r;
  split_half(ends >> 1 & 0x7ff87ff8u, r.s0, r.s1);
  r.s1 *= 0.0625f;
  r.z0 = ends & 0x0f, r.z1 = ends >> 12 & 0xf0;
  return r;
}
// What `c`, codes of a tile's row times a row of x, is worth in units of that row; `less`: minus the sum of x. All of it is
// a whole number below 2^31 until it is scaled.
__device__ __forceinline__ float worth(int c, int less, float scale, int zero) { return __fmul_rn(scale, (float)(c + zero * less)); }
