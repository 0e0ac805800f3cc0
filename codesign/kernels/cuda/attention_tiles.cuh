// What a warp of the attention kernel computes: rotated queries and keys, the scores of 16 query rows and
// 16 keys at a time, the weighted sum of their values, and the join of such results.
#include "attention_work.cuh"

// Elements [8 i, 8 i + 8) of both halves of a head, to be turned by a row's angles:
// (a, b) -> (a cos - b sin, b cos + a sin). Loading and turning are apart so that loads overlap.
struct Turn {
  uint4 a, b;
  float4 cos[2], sin[2];
  __device__ __forceinline__ void load(const u16* head, const float* row_cos, const float* row_sin, int i) {
    a = load_fresh4(head + 8 * i), b = load_fresh4(head + E / 2 + 8 * i);
#pragma unroll
    for (int k = 0; k < 2; k++) cos[k] = ((const float4*)(row_cos + 8 * i))[k], sin[k] = ((const float4*)(row_sin + 8 * i))[k];
  }
  __device__ __forceinline__ static void pair(u32 x, u32 y, float cos0, float cos1, float sin0, float sin1, u32& low, u32& high) {
    low = to_bf16_pair(low_bf16(x) * cos0 - low_bf16(y) * sin0, high_bf16(x) * cos1 - high_bf16(y) * sin1);
    high = to_bf16_pair(low_bf16(y) * cos0 + low_bf16(x) * sin0, high_bf16(y) * cos1 + high_bf16(x) * sin1);
  }
  __device__ __forceinline__ void turned(uint4& low, uint4& high) const {
    pair(a.x, b.x, cos[0].x, cos[0].y, sin[0].x, sin[0].y, low.x, high.x);
    pair(a.y, b.y, cos[0].z, cos[0].w, sin[0].z, sin[0].w, low.y, high.y);
    pair(a.z, b.z, cos[1].x, cos[1].y, sin[1].x, sin[1].y, low.z, high.z);
    pair(a.w, b.w, cos[1].z, cos[1].w, sin[1].z, sin[1].w, low.w, high.w);
  }
};

struct State {  // of one warp: 16 query rows, its blocks of positions
  float out[E / 8][4], top[2], sum[2];
};

// Scores of 16 query rows and N times 16 keys, whose rows the lanes give to ldmatrix; even and odd
// parts of the head apart, for shorter chains.
template <int N>
__device__ __forceinline__ void score(float (&s)[N][2][4], const u32 (&q)[E / 16][4], const u32 (&key)[N]) {
  float odd[N][2][4];
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[j][n][i] = odd[j][n][i] = 0.f;
#pragma unroll
  for (int k = 0; k < E / 16; k++)
#pragma unroll
    for (int j = 0; j < N; j++) {
      u32 b[4];
      load_matrices(b, key[j] + 32 * k);
      mma_bf16(k & 1 ? odd[j][0] : s[j][0], q[k], b[0], b[1]);
      mma_bf16(k & 1 ? odd[j][1] : s[j][1], q[k], b[2], b[3]);
    }
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[j][n][i] += odd[j][n][i];
}

// Turns scores (times log2 e; NONE where a row does not see a key) into weights, as the A operand.
__device__ __forceinline__ void weigh(State& st, float (&s)[2][4], u32 (&p)[4]) {
  float shrink[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    top = fmaxf(top, st.top[r]);
    const float base = top == NONE ? 0.f : top;  // nothing seen yet: all weights 0, not NaN
    shrink[r] = st.top[r] == NONE ? 1.f : power_of_two(st.top[r] - base);  // before the first keys nothing
    st.top[r] = top;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) s[n][2 * r + i] = power_of_two(s[n][2 * r + i] - base);
    st.sum[r] = fmaf(st.sum[r], shrink[r], s[0][2 * r] + s[0][2 * r + 1] + s[1][2 * r] + s[1][2 * r + 1]);
  }
  if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
    for (int n = 0; n < E / 8; n++) {
      st.out[n][0] *= shrink[0], st.out[n][1] *= shrink[0];
      st.out[n][2] *= shrink[1], st.out[n][3] *= shrink[1];
    }
  }
  p[0] = to_bf16_pair(s[0][0], s[0][1]), p[1] = to_bf16_pair(s[0][2], s[0][3]);
  p[2] = to_bf16_pair(s[1][0], s[1][1]), p[3] = to_bf16_pair(s[1][2], s[1][3]);
}

// N times: weights of 16 keys, and those keys' values.
template <int N>
__device__ __forceinline__ void add_values(State& st, const u32 (&p)[N][4], const u32 (&value)[N]) {
#pragma unroll
  for (int n = 0; n < E / 16; n++)
#pragma unroll
    for (int j = 0; j < N; j++) {
      u32 b[4];
      load_transposed_matrices(b, value[j] + 32 * n);
      mma_bf16(st.out[2 * n], p[j], b[0], b[1]);
      mma_bf16(st.out[2 * n + 1], p[j], b[2], b[3]);
    }
}

struct Part {  // of a row's result: two channels, and the largest score and the sum of weights of what was added up
  float low, high, top, sum;
};

// The results of all columns, in order: of each two channels, and (top, sum).
__device__ __forceinline__ Part joined_columns(const float2 (&values)[C], const float2 (&scores)[C]) {
  Part all = {0.f, 0.f, NONE, 0.f};
#pragma unroll
  for (int c = 0; c < C; c++) all.top = fmaxf(all.top, scores[c].x);
  const float base = all.top == NONE ? 0.f : all.top;
#pragma unroll
  for (int c = 0; c < C; c++) {
    const float weight = power_of_two(scores[c].x - base);
    all.low = fmaf(weight, values[c].x, all.low), all.high = fmaf(weight, values[c].y, all.high);
    all.sum = fmaf(weight, scores[c].y, all.sum);
  }
  return all;
}

// Two classes, the former first. One without keys leaves the other's bits as they are.
__device__ __forceinline__ Part joined_classes(const Part& a, const Part& b) {
  const float top = fmaxf(a.top, b.top), base = top == NONE ? 0.f : top;
  const float mine = power_of_two(a.top - base), other = power_of_two(b.top - base);
  return {fmaf(other, b.low, mine * a.low), fmaf(other, b.high, mine * a.high), top, fmaf(other, b.sum, mine * a.sum)};
}
