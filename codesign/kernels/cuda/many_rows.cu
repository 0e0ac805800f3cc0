// A linear map of more rows than a skinny GEMM takes, with the same bits: products of bytes by warpgroups.
//
// A block has two warpgroups, which multiply 64 features each, and a producer warp, which fills a ring of stages: the
// weights and the rows of a group of 128 columns. The products of a group are whole numbers, so their order is free;
// from there on everything is added in the order of gemm_core.cuh: groups of a chunk, chunks of a block there, blocks of
// a cluster there. What such a block takes is a *share* of the columns here. The warpgroups are one team, of a share, or
// two, which take a share each of the same features. Teams of a block and blocks of a cluster exchange their sums.
//
// Macros: ROWS 32 or 64; TEAMS 1 or 2; BLOCKS an SM holds; STAGES of the ring; WARPS groups of a chunk; CLUSTER
// shares, which take chunks in turn; SEVERAL 1: more than one each; ACTIVATION, DELAYS as for gemm.cu.
#define NT 1
#define TILES 1
#include "gemm_outputs.cuh"
#include "row_blocks.cuh"
#include "wgmma_bytes.cuh"

#define CONSUMERS 8                     // warps
#define TEAM_TILES (CONSUMERS / TEAMS)  // of 16 features
#define OWN_THREADS (32 * CONSUMERS)
#define BLOCKS_OF_CLUSTER (CLUSTER / TEAMS)
#define ALL_ROWS_BYTES (TEAMS * 2 * TILE_ROWS_BYTES)
#define ALL_ENDS_BYTES (TEAMS * ENDS_BYTES)
#define ALL_BYTES ((ALL_ROWS_BYTES + ALL_ENDS_BYTES + CONSUMERS * RECORD + 1023) / 1024 * 1024)
#define RING 1024  // where it begins: behind the barriers

// The groups of a share, one after another.
struct Walk {
  int groups, chunk, group, end;
  __device__ __forceinline__ Walk(int groups, int share) : groups(groups), chunk(share) { enter(); }
  __device__ __forceinline__ void enter() { group = chunk * WARPS, end = min(group + WARPS, groups); }
  __device__ __forceinline__ bool is_over() const { return group >= groups; }
  // Whether a chunk ends here.
  __device__ __forceinline__ bool next() {
    if (++group < end) return false;
    chunk += CLUSTER, enter();
    return true;
  }
};
// Groups of a block's first share, which has most.
__device__ __forceinline__ int num_steps(int groups, int share) {
  int steps = 0;
  for (int chunk = share; chunk * WARPS < groups; chunk += CLUSTER) steps += min(WARPS, groups - chunk * WARPS);
  return steps;
}

struct Ring {
  u32 full, empty, stages;
  int slot = 0, phase = 0;
  __device__ __forceinline__ Ring(u8* memory) : full(shared_address(memory)), empty(full + 8 * STAGES), stages(full + RING) {}
  __device__ __forceinline__ u32 stage() const { return stages + slot * ALL_BYTES; }
  // Of a team its rows, and what ends them; weights of the i-th tile.
  __device__ __forceinline__ u32 rows(int team) const { return stage() + team * 2 * TILE_ROWS_BYTES; }
  __device__ __forceinline__ u32 ends(int team) const { return stage() + ALL_ROWS_BYTES + team * ENDS_BYTES; }
  __device__ __forceinline__ u32 weights(int i) const { return stage() + ALL_ROWS_BYTES + ALL_ENDS_BYTES + i * RECORD; }
  __device__ __forceinline__ void next() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
};

// The producer: lane i copies the i-th tile, and a team's first lane its rows.
struct Producer {
  Ring ring;
  Walk at;
  const u8* weight;  // of this lane's tile
  RowBlock rows;
  int lane, team, place, tiles;  // that the block has
  u64 policy;
  __device__ __forceinline__ void next() { at.next(), ring.next(); }
  __device__ __forceinline__ void copy_weights() {
    random_delay();
    const u32 bar = ring.full + 8 * ring.slot;
    const int count = __popc(__ballot_sync(~0u, lane < CONSUMERS && place == 0 && !at.is_over()));
    if (lane == 0) barrier_expect(bar, count * (tiles * RECORD + GROUP_ROWS_BYTES));
    __syncwarp();
    if (lane >= CONSUMERS || place >= tiles || at.is_over()) return;
    bulk_copy(ring.weights(lane), weight + (size_t)at.group * RECORD, RECORD, bar, policy);
  }
  __device__ __forceinline__ void copy_rows() {
    const u32 bar = ring.full + 8 * ring.slot;
    if (lane >= CONSUMERS || place > 0 || at.is_over()) return;
    bulk_copy(ring.rows(team), rows.tile(at.group), 2 * TILE_ROWS_BYTES, bar);
    bulk_copy(ring.ends(team), (const u8*)rows.ends(at.group), ENDS_BYTES, bar);
  }
  __device__ __forceinline__ void run(int steps) {
    Producer first = *this;
    // Weights need not wait for the kernel in front.
    for (int i = 0; i < min(STAGES, steps); i++, next()) copy_weights();
    wait_for_previous();
    for (int i = 0; i < min(STAGES, steps); i++, first.next()) first.copy_rows();
    for (int i = STAGES; i < steps; i++, next()) {
      barrier_wait(ring.empty + 8 * ring.slot, ring.phase ^ 1);
      copy_weights();
      copy_rows();
    }
  }
};

// The weights of a tile and a group, as a lane holds them.
struct Weights {
  u32 a[4][4];  // of 32 columns each
  u32 ends;     // scale and zero of rows g and g + 8
};
__device__ __forceinline__ Weights load_weights(u32 record, int lane) {
  const uint4 low = load_shared4(record + lane * 16), high = load_shared4(record + 512 + lane * 16);
  const u32 word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  Weights w;
  w.ends = load_shared1(record + 1024 + (lane >> 2) * 4);
  // A word's bytes are the codes of row g and 16 times those of row g + 8.
#pragma unroll
  for (int k = 0; k < 4; k++) {
    w.a[k][0] = word[2 * k] & 0x0f0f0f0fu, w.a[k][1] = word[2 * k] & 0xf0f0f0f0u;
    w.a[k][2] = word[2 * k + 1] & 0x0f0f0f0fu, w.a[k][3] = word[2 * k + 1] & 0xf0f0f0f0u;
  }
  return w;
}

typedef int Products[ROWS / 2];
typedef float Sums[ROWS / 2];

// The products of a group with the high bytes of rows; or with the low ones, which are added.
template <bool HIGH>
__device__ __forceinline__ void multiply(Products& c, const Weights& w, u64 rows) {
  begin_products();
#pragma unroll
  for (int k = 0; k < 4; k++) multiply_bytes<HIGH>(c, w.a[k], rows + 2 * k, !HIGH || k > 0);
  await_products();
}

// Products of a group, added to the sums of a chunk.
__device__ __forceinline__ void add_products(const Products& c, u32 ends_of_weights, u32 ends, int lane, Sums& sums) {
  const Scales k = scales_of(ends_of_weights);
#pragma unroll
  for (int j = 0; j < ROWS / 8; j++) {
    const uint4 raw = load_shared4(ends + (4 * j + (lane & 3)) * 16);
    const float unit[2] = {__uint_as_float(raw.x), __uint_as_float(raw.y)};
    const int less[2] = {(int)raw.z, (int)raw.w};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float &first = sums[4 * j + i], &second = sums[4 * j + 2 + i];
      first = fmaf(worth(c[4 * j + i], less[i], k.s0, k.z0), unit[i], first);
      second = fmaf(worth(c[4 * j + 2 + i], less[i], k.s1, k.z1), unit[i], second);
    }
  }
}

// Free a stage, once all that was loaded from it has been used: behind sums that came of it. Else it could be filled
// again while loads are under way, which an arrival does not order before the copy engine's writes.
__device__ __forceinline__ void release(u32 bar, int lane, const Sums& sums) {
  u32 bits = 0;
#pragma unroll
  for (int j = 0; j < ROWS / 8; j++) bits ^= __float_as_uint(sums[4 * j]);
  u32 ones;
  asm("popc.b32 %0, %1;" : "=r"(ones) : "r"(bits));  // a shift by six leaves nothing, which no compiler knows
  __syncwarp();
  if (lane == 0) barrier_arrive(bar + (ones >> 6));
}

// `sums` of the share.
__device__ __forceinline__ void consume(Ring ring, Walk at, int steps, int team, int warp, int lane, Sums& sums) {
#if SEVERAL
  Sums of_chunks;  // not in registers: there are too few, and it is rarely needed
  float* total = of_chunks;
  asm volatile("" : "+l"(total));
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) total[i] = 0.f;
#endif
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) sums[i] = 0.f;
#pragma unroll 1
  for (int step = 0; step < steps; step++, ring.next()) {
    random_delay();
    barrier_wait(ring.full + 8 * ring.slot, ring.phase);
    if (at.is_over()) {  // the stage is the other team's
      if (lane == 0) barrier_arrive(ring.empty + 8 * ring.slot);
      continue;
    }
    const Weights w = load_weights(ring.weights(warp), lane);
    const u64 rows = rows_operand(ring.rows(team));
    Products c;
    multiply<true>(c, w, rows);
#pragma unroll
    for (int n = 0; n < ROWS / 2; n++) c[n] <<= 8;
    multiply<false>(c, w, rows + (TILE_ROWS_BYTES >> 4));
    random_delay();
    add_products(c, w.ends, ring.ends(team), lane, sums);
    release(ring.empty + 8 * ring.slot, lane, sums);
    const bool ends_chunk = at.next();
#if SEVERAL
    if (ends_chunk) {
#pragma unroll
      for (int i = 0; i < ROWS / 2; i++) {
        total[i] += sums[i], sums[i] = 0.f;
        asm volatile("" ::: "memory");  // one after another: registers are short
      }
    }
#endif
  }
#if SEVERAL
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) sums[i] = total[i];
#endif
}

// Where fragment j of a thread of a team lies, while shares are exchanged.
__device__ __forceinline__ u32 exchanged(u32 from, int j, int team, int thread) {
  return from + ((j * TEAMS + team) * (OWN_THREADS / TEAMS) + thread) * 16;
}
// The sums of all shares, added in their order.
__device__ __forceinline__ float4 sum_of_shares(u32 from, int j, int thread) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int share = 0; share < CLUSTER; share++) {
    const u32 at = exchanged(from, j, share % TEAMS, thread);
    const float4 v = load_remote4(BLOCKS_OF_CLUSTER > 1 ? remote_address(at, share / TEAMS) : at);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  return sum;
}

// A cluster takes TEAM_TILES of the `tiles` of the weight; clusters of the same tiles and different rows stand side by
// side.
extern "C" __global__ void __launch_bounds__(OWN_THREADS + 32, BLOCKS)
many_rows(const u8* weight, u8* blocks, const float* factors, void* out, const u16* bias, const u16* residual, int rows, int features,
          int tiles, int groups, int row_blocks) {
  extern __shared__ __align__(1024) u8 memory[];
  // The same for all lanes, as the compiler is to know: operands of wgmma are in registers of the warp's.
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int rank = BLOCKS_OF_CLUSTER == 1 ? 0 : cluster_rank(), cluster = blockIdx.x / BLOCKS_OF_CLUSTER;
  const int first_row = cluster % row_blocks * ROWS, first_tile = cluster / row_blocks * TEAM_TILES, own = min(TEAM_TILES, tiles - first_tile);
  // Where blocks share multiprocessors, some of them start late: the next launch would take their places.
  if (BLOCKS == 1) release_next();
  const Ring ring(memory);
  if (threadIdx.x == 0)
    for (int i = 0; i < STAGES; i++) barrier_init(ring.full + 8 * i, 1), barrier_init(ring.empty + 8 * i, CONSUMERS);
  publish_barriers();
  __syncthreads();
  const int steps = num_steps(groups, rank * TEAMS);
  const int team = warp / TEAM_TILES, place = warp % TEAM_TILES;  // the tile of a team
  Sums sums;
  if (warp == CONSUMERS) {
    const int of_lane = lane / TEAM_TILES % TEAMS, tile = first_tile + lane % TEAM_TILES;
    Producer producer = {ring, Walk(groups, rank * TEAMS + of_lane), weight + tile * tile_bytes(groups),
                         row_block(blocks, first_row / ROWS, groups), lane, of_lane, lane % TEAM_TILES, own, evict_first()};
    producer.run(steps);
    __syncwarp();
  } else {
    wait_for_previous();  // first, as barriers are not to be polled while that kernel waits for another GPU
    consume(ring, Walk(groups, rank * TEAMS + team), steps, team, warp, lane, sums);
  }
  if (BLOCKS > 1) release_next();
  const int thread = place * 32 + lane;  // of a team
  if (CLUSTER > 1) {
    __syncthreads();  // the ring is done with
    if (warp < CONSUMERS)
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++)
        store_shared4(exchanged(ring.stages, j, team, thread), make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
    if (BLOCKS_OF_CLUSTER > 1) cluster_arrive(), cluster_wait();
    else __syncthreads();
  }
  if (warp < CONSUMERS && place < own) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      if (CLUSTER > 1 && j % CLUSTER != rank * TEAMS + team) continue;
      const int row = first_row + 8 * j;
      if (row >= rows) break;
      float4 sum = make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
      if (CLUSTER > 1) sum = sum_of_shares(ring.stages, j, thread);
      Tile tile;
      tile.row = (first_tile + place) * 16, tile.lane = lane;
      const float2 factor = load_fresh_pair(factors + row + 2 * (lane & 3));
      tile.v[0][0] = __fmul_rn(sum.x, factor.x), tile.v[0][1] = __fmul_rn(sum.y, factor.y);
      tile.v[0][2] = __fmul_rn(sum.z, factor.x), tile.v[0][3] = __fmul_rn(sum.w, factor.y);
      const Output epilogue = output_of(out, bias, residual, row, rows, features);
      Output::Ready ready;
      epilogue.fetch(tile.row, lane, ready);
      epilogue.finish(tile, ready);
    }
  }
  if (BLOCKS_OF_CLUSTER > 1) cluster_arrive_relaxed(), cluster_wait();  // until others have read this block's sums
}
