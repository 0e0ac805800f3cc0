// Rows of x in fixed point: what the integer products of gemm_product.cuh and many_rows.cu take.
#include "hopper.cuh"

// Four of x as q = x times `scale` to the nearest integer, 16 bits: its high and its low bytes, in the
// order in which a word of codes has their columns.
__device__ __forceinline__ void to_fixed(u32 first, u32 second, float scale, u32& high, u32& low) {
  const float one = 12582912.f;  // 1.5 * 2^23: the sum's last bits are q
  const u32 q0 = __float_as_uint(fmaf(low_bf16(first), scale, one)), q1 = __float_as_uint(fmaf(high_bf16(first), scale, one));
  const u32 q2 = __float_as_uint(fmaf(low_bf16(second), scale, one)), q3 = __float_as_uint(fmaf(high_bf16(second), scale, one));
  const u32 even = __byte_perm(q0, q2, 0x5140), odd = __byte_perm(q1, q3, 0x5140);
  low = __byte_perm(even, odd, 0x5410), high = __byte_perm(even, odd, 0x7632);
}

// The fixed point of a row of a group, of its largest size: of that all 8 bits of a bf16 and 7 more, so what is
// above a 128th of it is exact. Rows with infinities or NaNs have a unit that is none.
struct FixedPoint {
  float scale;  // the largest comes to 2^14 and more
  float unit;   // what a one is worth
};
// `most`: the larger of two sizes, as a pair.
__device__ __forceinline__ FixedPoint fixed_point(u32 most) {
  most &= 0x7f807f80u;
  const u32 exponent = max(max(most, most << 16) & 0x7f800000u, 32u << 23);
  return {__uint_as_float((268u << 23) - exponent), __uint_as_float(exponent == 0x7f800000u ? 0x7fffffffu : exponent - (14u << 23))};
}
// The largest size of sixteen pairs.
__device__ __forceinline__ u32 largest(const u32 (&x)[16]) {
  u32 top[4];
#pragma unroll
  for (int i = 0; i < 4; i++) top[i] = larger_bf16(larger_bf16(x[4 * i], x[4 * i + 1]), larger_bf16(x[4 * i + 2], x[4 * i + 3]));
  return larger_bf16(larger_bf16(top[0], top[1]), larger_bf16(top[2], top[3]));
}
