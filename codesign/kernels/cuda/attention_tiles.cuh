// What a warp of the attention kernel computes: rotated queries and keys, and attention of 16
// query rows to 16 keys at a time: scores, weights, the weighted sum of their values.
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

// Where the paths of an item's tokens lie among the tail's rows in shared memory.
struct TailRows {
  const Item& item;
  const Rows& rows;
  int tokens, tail_start, tail_rows;
  const int *positions, *prefixes, *paths;
  // Element offset of the key at a position that a token sees; of any key where it sees none.
  __device__ __forceinline__ int offset(int at, int position) const {
    const int prefix = prefixes[at], step = position - prefix;
    if (position > positions[at]) return 0;
    const bool in_path = step >= 0 && step < rows.path_length;
    const int row = in_path ? prefix + paths[(at - item.start) * rows.path_length + step] : position;
    return min(max(row - tail_start, 0), tail_rows - 1) * LD;
  }
};

// A block of 16 positions of the tail. Every token has its own keys: it fills in the scores of its rows, and adds
// for them. SIDE tokens are attended together; after the last, the last one's keys are read again and not used.
__device__ __forceinline__ void attend_tail(State& st, const u32 (&q)[E / 16][4], float (&s)[1][2][4], u32 (&p)[1][4], const u16* tail, const TailRows& path, int block, int wm, int lane, float scale) {
  const int key_lane = (lane & 7) + (lane >> 4) * 8, key_part = (lane >> 3 & 1) * 8;
  const int value_lane = lane & 15, value_part = (lane >> 4) * 8;
  const int row0 = wm * 16 + (lane >> 2), token0 = row0 / GROUP, token1 = (row0 + 8) / GROUP;
  const int first = wm * 16 / GROUP, last = min(path.tokens - 1, (wm * 16 + 15) / GROUP);
  auto address = [&](int token, int i) { return path.offset(path.item.start + min(token, last), block * 16 + i); };
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[0][n][i] = NONE;
#pragma unroll 1
  for (int token = first; token <= last; token += SIDE) {
    float own[SIDE][2][4];
    u32 keys[SIDE];
#pragma unroll
    for (int j = 0; j < SIDE; j += 2) {  // each half of the warp finds a token's keys
      const int at = address(token + j + lane / 16, lane & 15);
      keys[j] = shared_address(tail + __shfl_sync(~0u, at, key_lane) + key_part);
      keys[j + 1] = shared_address(tail + __shfl_sync(~0u, at, 16 + key_lane) + key_part);
    }
    score(own, q, keys);
#pragma unroll
    for (int j = 0; j < SIDE; j++) {
      const int count = token + j <= last ? path.positions[path.item.start + token + j] + 1 - block * 16 : 0;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (8 * n + 2 * (lane & 3) + (i & 1) < count && (i < 2 ? token0 : token1) == token + j) s[0][n][i] = __fmul_rn(own[j][n][i], scale);
    }
  }
  weigh(st, s[0], p[0]);
#pragma unroll 1
  for (int token = first; token <= last; token += SIDE) {
    u32 own[SIDE][4], values[SIDE];
#pragma unroll
    for (int j = 0; j < SIDE; j += 2) {
      const int at = address(token + j + lane / 16, lane & 15);
      values[j] = shared_address(tail + TAIL * LD + __shfl_sync(~0u, at, value_lane) + value_part);
      values[j + 1] = shared_address(tail + TAIL * LD + __shfl_sync(~0u, at, 16 + value_lane) + value_part);
    }
#pragma unroll
    for (int j = 0; j < SIDE; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) own[j][i] = (i & 1 ? token1 : token0) == token + j ? p[0][i] : 0;
    }
    add_values(st, own, values);
  }
}
