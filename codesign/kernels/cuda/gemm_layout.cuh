// Sizes of a skinny GEMM, its arguments, and where everything lies in a block's shared memory.
//
// Macros: NT 1, 2 or 4 (8, 16 or 32 rows); WARPS consumers; TILES a consumer multiplies at a time
// (1, 2, 4); BLOCKS an SM must hold; PACED stages of the ring are on their way at a time while it is
// filled first (0: all), so that x need not wait behind them; CLUSTER blocks of a cluster and CHUNKS
// of every block (0: known when it runs); UNIT tiles are dealt out to clusters together; DELAYS 1:
// every role sleeps at random, for tests.
#include "fixed_point.cuh"

#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef PACED
#define PACED 0
#endif
#ifndef CLUSTER
#define CLUSTER 0
#endif
#ifndef UNIT
#define UNIT 1
#endif
#ifndef CHUNKS
#define CHUNKS 0
#endif
#define RECORD 1056
#define LINE 128  // of the caches
// Room for the records of a tile and a chunk, wherever in a line they begin. A copy that begins elsewhere in a line than in
// memory would be slower by several percent.
#define PIECE ((WARPS * RECORD + (WARPS * RECORD % LINE ? LINE - RECORD % LINE : 0) + LINE - 1) / LINE * LINE)
// Steps whose partial sums are in flight, each with a reducer warp of its own: a barrier whose phases
// a waiting warp skips could take an older phase for the one it waits for.
#define SLOTS (NT * TILES <= 2 ? 3 : 2)
#define SLOT (TILES * NT * WARPS * 512)  // bytes of a step's partial sums
#define THREADS (32 * (WARPS + 1 + SLOTS))
// Registers are left to load the next chunk's x while this one's is multiplied.
#define AHEAD (NT == 1 && TILES <= 2 && BLOCKS == 1 && CHUNKS != 1)
#define FETCHED (NT == 1 && !AHEAD)  // registers are left for the first tile's residual
#define EARLY (AHEAD || CHUNKS == 1)  // where the first x lies is known before the wait

struct Gemm {
  const u8* weight;  // (tiles, tile_bytes(groups))
  const u16* x;      // (rows, columns) bf16
  const u16* norm;   // (columns,) bf16, or null
  int rows, columns, groups, stages, part_tiles;
  u32 share, rest;  // units of a cluster; clusters, the first ones, that have one more
  float eps;
};

#define STAGE (TILES * PIECE)
#define UNIT_SETS (CHUNKS == 1 ? 1 : 2)  // of units: consumers begin a chunk while reducers are at the one before
#define MOST_STAGES 16
#define TO_EMPTY (8 * MOST_STAGES)  // from a stage's barrier `full` to its `empty`
#define BARRIERS 384             // bytes in front of the ring
#define TILE_BYTES (NT * 512)

// Of a tile's records, which begin a line.
__device__ __forceinline__ size_t tile_bytes(int groups) { return (size_t)groups * RECORD + LINE - 1 & ~(size_t)(LINE - 1); }
// Where in a line a group's record begins.
__device__ __forceinline__ int place_in_line(int group) { return group * RECORD & LINE - 1; }

// Where everything lies in a block's shared memory, and what the block works on.
struct Plan {
  int size, rank, shift;                   // blocks of the cluster, 1 << shift of them; this block's place
  int first_tile, num_tiles, steps;        // tiles of the cluster; steps of a chunk
  int chunks;                              // of this block
  int owned;                               // tiles that this block finishes: rank, rank + size, ...
  float4 *partial, *part;                  // (SLOTS, TILES, NT, WARPS, 32); (part_tiles, NT, 32)
  float *squares, *total;                  // (WARPS, 8 NT); (size, 8 NT) of the cluster's blocks
  float* units;                            // (UNIT_SETS, WARPS, 8 NT): of x in fixed point
  u32 ring, full, empty, partial_full, partial_empty, norm_ready, squared, arrived;
};

// Of a cluster, `part` of a block begins with what it receives: (owned, size, NT, 32).
__device__ __forceinline__ Plan make_plan(const Gemm& a, u8* memory) {
  Plan p;
  // Every kernel waits for this: shifts, and one division of the host's.
  p.size = CLUSTER ? CLUSTER : cluster_size(), p.rank = CLUSTER == 1 ? 0 : cluster_rank(), p.shift = p.size >> 1;
  const u32 cluster = blockIdx.x >> p.shift;
  p.first_tile = (cluster * a.share + min(cluster, a.rest)) * UNIT;
  p.num_tiles = (a.share + (cluster < a.rest)) * UNIT;
  p.steps = (p.num_tiles + TILES - 1) / TILES;
  p.chunks = CHUNKS ? CHUNKS : ((a.groups + WARPS - 1) / WARPS - p.rank + p.size - 1) >> p.shift;
  p.owned = (p.num_tiles - p.rank + p.size - 1) >> p.shift;
  // Barriers first, where their places are known when this is compiled.
  p.full = shared_address(memory), p.empty = p.full + TO_EMPTY, p.partial_full = p.empty + TO_EMPTY;
  p.partial_empty = p.partial_full + 8 * SLOTS, p.norm_ready = p.partial_empty + 8 * SLOTS, p.squared = p.norm_ready + 8;
  p.ring = p.full + BARRIERS;
  p.partial = (float4*)(memory + BARRIERS + a.stages * STAGE);
  p.part = p.partial + SLOTS * TILES * WARPS * NT * 32;
  p.squares = (float*)(p.part + a.part_tiles * NT * 32);
  p.units = p.squares + WARPS * 8 * NT;
  p.total = p.units + UNIT_SETS * WARPS * 8 * NT;
  p.arrived = shared_address(p.total + p.size * 8 * NT);
  return p;
}
// First feature of the `place`-th tile that this block finishes.
__device__ __forceinline__ int tile_row(const Plan& p, int place) { return (p.first_tile + place * p.size + p.rank) * 16; }
// Units of a chunk.
__device__ __forceinline__ float* units_of(const Plan& p, int chunk) { return p.units + (chunk & UNIT_SETS - 1) * WARPS * 8 * NT; }
// What block `from` has sent of the `place`-th owned tile; and this block's own sums over chunks.
__device__ __forceinline__ float4* received(const Plan& p, int place, int from) {
  return p.part + (place * p.size + from) * NT * 32;
}
__device__ __forceinline__ float4* kept(const Plan& p, int index) {
  const int places = (p.num_tiles + p.size - 1) >> p.shift;
  return p.part + ((p.size > 1 ? places << p.shift : 0) + index) * NT * 32;
}

// By one lane of each warp that consumes nothing: lanes of one warp would take turns, 50 cycles each.
__device__ __forceinline__ void start_barriers(const Gemm& a, const Plan& p, int which) {
#pragma unroll 1
  for (int i = which; i < a.stages; i += SLOTS + 1) barrier_init(p.full + 8 * i, 1), barrier_init(p.empty + 8 * i, WARPS);
  if (which < SLOTS) barrier_init(p.partial_full + 8 * which, WARPS), barrier_init(p.partial_empty + 8 * which, 1);
  if (which == SLOTS) barrier_init(p.norm_ready, 1), barrier_init(p.squared, WARPS);
  if (p.size > 1)
#pragma unroll 1
    for (int i = which; i < p.owned; i += SLOTS + 1) barrier_init(p.arrived + 8 * i, 1);
  publish_barriers();  // all that others must find here behind the cluster's barrier
  if (p.size == 1) return;
  if (which == SLOTS && a.norm) barrier_expect(p.norm_ready, p.size * 8 * NT * 4);
#pragma unroll 1
  for (int i = which; i < p.owned; i += SLOTS + 1) barrier_expect(p.arrived + 8 * i, p.size * TILE_BYTES);
}

// With DELAYS, sleep for up to 2 us, one time in four.
__device__ __forceinline__ void random_delay() {
#if DELAYS
  u32 now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  now = (now ^ (threadIdx.x / 32 + 64 * blockIdx.x) * 0x9e3779b9u) * 0x85ebca6bu;
  now ^= now >> 15;
  if ((now & 3) == 0) asm volatile("nanosleep.u32 %0;" ::"r"((now >> 8) & 2047));
  __syncwarp(__activemask());
#endif
}
