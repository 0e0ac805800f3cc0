// How the attention kernel joins results: those of a block's warps, then of columns, then of classes; within a
// cluster through the shared memory of its blocks, else through `space` in global memory.
#include "attention_tiles.cuh"

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

// Counts this block's arrival, behind what the block has stored; whether it is the last, which then
// sees what the others have stored and leaves the counter at zero.
__device__ __forceinline__ bool arrive_last(u32* counter, u32 count) {
  u32 before;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  if (before + 1 == count) *(volatile u32*)counter = 0;
  return before + 1 == count;
}

// Where a warp's results lie: eight rows in the room of 16 keys or values of its gang.
__device__ __forceinline__ int result_row(int gang, int row) { return (row / 8 * KW + gang) * 8 + row % 8; }

// The warps' results of one of several columns or classes to space, eight rows at a time as the ring is in use.
__device__ __forceinline__ void leave_in_space(const State& st, const Space& space, int slot, float* joined, const float (&tops)[ROWS][KW],
                                               const float (&sums)[ROWS][KW], int used_rows, int tid, int lane, int wm, int wk) {
#pragma unroll 1
  for (int pass = 0; pass * 8 < used_rows; pass++) {
    if (wm == pass / 2) {
      const int row = lane >> 2;
      float* result = joined + (wk * 8 + row) * E + 2 * (lane & 3);
#pragma unroll
      for (int n = 0; n < E / 8; n++)
        *(float2*)(result + 8 * (n ^ row)) = pass % 2 ? make_float2(st.out[n][2], st.out[n][3]) : make_float2(st.out[n][0], st.out[n][1]);
    }
    __syncthreads();
    const int taken = GROUP < 8 ? min(used_rows - pass * 8, 8) : 8;
#pragma unroll 1
    for (int i = tid; i < taken * (E / 2); i += THREADS) {
      const int place = i / (E / 2), at = i % (E / 2) * 2, row = pass * 8 + place;
      float top = NONE, sum = 0.f;
#pragma unroll
      for (int k = 0; k < KW; k++) top = fmaxf(top, tops[row][k]);
      float2 v = make_float2(0, 0);
#pragma unroll
      for (int k = 0; k < KW; k++) {
        const float weight = power_of_two(tops[row][k] - (top == NONE ? 0.f : top));
        const float2 r = *(const float2*)(joined + (k * 8 + place) * E + 8 * (at / 8 ^ place) + at % 8);
        v.x = fmaf(weight, r.x, v.x), v.y = fmaf(weight, r.y, v.y), sum = fmaf(weight, sums[row][k], sum);
      }
      *(float2*)(space.values + (slot + row) * E + at) = v;
      if (at == 0) *(float2*)(space.scores + (slot + row) * 2) = make_float2(top, sum);
    }
    __syncthreads();
  }
}

// Each warp's result to shared memory; the block's sums of a row to the block that owns it.
__device__ __forceinline__ void send_columns(const State& st, float* results, float* joined, float2 (&joined_scores)[C][OWNED], const float (&tops)[ROWS][KW],
                                             const float (&sums)[ROWS][KW], u32 barrier, int used_rows, int rank, int tid, int wm, int wk) {
  meet_gang(wk);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = wm * 16 + ((tid & 31) >> 2) + 8 * r;
    float* result = results + result_row(wk, row) * OLD + 2 * (tid & 3);
#pragma unroll
    for (int n = 0; n < E / 8; n++) *(float2*)(result + 8 * n) = make_float2(st.out[n][2 * r], st.out[n][2 * r + 1]);
  }
  __syncthreads();
  int start = tid;
  asm volatile("" : "+r"(start));  // no address is found, and kept in a register, before
  constexpr int SUMS = 2, STEP = THREADS / (E / 4);  // rows whose sums a thread has a part of at once; rows of the block's threads
#pragma unroll
  for (int begin = 0; begin < ROWS; begin += SUMS * STEP) {
    if (begin >= used_rows) break;
    const int at = start % (E / 4) * 4;
    float4 v[SUMS];
    float2 total[SUMS];
#pragma unroll
    for (int j = 0; j < SUMS; j++) {
      const int row = begin + j * STEP + start / (E / 4);
      float top = NONE, sum = 0.f;
#pragma unroll
      for (int k = 0; k < KW; k++) top = fmaxf(top, tops[row][k]);
      const float base = top == NONE ? 0.f : top;
      v[j] = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int k = 0; k < KW; k++) {
        const float weight = power_of_two(tops[row][k] - base);
        const float4 r = *(const float4*)(results + result_row(k, row) * OLD + at);
        v[j].x = fmaf(weight, r.x, v[j].x), v[j].y = fmaf(weight, r.y, v[j].y);
        v[j].z = fmaf(weight, r.z, v[j].z), v[j].w = fmaf(weight, r.w, v[j].w), sum = fmaf(weight, sums[row][k], sum);
      }
      total[j] = make_float2(top, sum);
    }
#pragma unroll
    for (int j = 0; j < SUMS; j++) {
      const int row = begin + j * STEP + start / (E / 4), owner = row / OWNED, place = row % OWNED;
      if (row >= used_rows) break;
      const u32 counted = remote_address(barrier, owner);
      send(remote_address(shared_address(joined + (rank * OWNED + place) * E + at), owner), v[j], counted);
      if (at == 0) send(remote_address(shared_address(&joined_scores[rank][place]), owner), total[j], counted);
    }
  }
}
