// Skinny GEMM core for Hopper: out[m, n] = sum_k x[m, k] * weight[n, k] for at most 8 * NT rows m.
//
// Weights are the tensor cores' A operand (16 output features), rows of x the B operand (8 a tile).
// Three roles. The *producer* warp streams packed weights into a ring in shared memory, and starts
// before the previous kernel's results are waited for; then it may send tiles (gemm_send.cuh). Each
// *consumer* warp keeps the x of its own 128 columns in registers and multiplies it with every weight
// tile of the block. *Reducer* warps add the consumers' partial sums of a tile and run the epilogue, so
// that no consumer ever waits for one.
//
// Columns are cut into chunks of WARPS groups of 128. The blocks of a cluster take chunks in turn; each
// sends a tile's sums to the block that owns the tile as soon as it has them, through distributed
// shared memory, and an mbarrier there counts the bytes. A block with several chunks adds in its own.
//
// The RMSNorm in front of a linear map is fused: W * (h * w_norm), and rsqrt(mean h^2 + eps)
// multiplied after the product; the sum of squares falls out of loading h.
#include "gemm_product.cuh"
#include "gemm_send.cuh"

__device__ __forceinline__ void produce(const Gemm& a, const Plan& p) {
  const u64 policy = evict_first();
  int slot = 0, phase = 1;  // a fresh barrier counts as having completed the phase before
  int free = a.stages;
#pragma unroll 1
  for (int c = 0; c < p.chunks; c++) {
    const int group = (p.rank + c * p.size) * WARPS, count = min(WARPS, a.groups - group);
    const u8* from = a.weight + p.first_tile * tile_bytes(a.groups) + group * RECORD;
    const u32 to = p.ring + place_in_line(group);
    for (int s = 0; s < p.steps; s++) {
      random_delay();
      if (free-- == 0) wait_for_previous();
      if (PACED && free >= 0 && slot >= PACED) barrier_wait(p.full + 8 * (slot - PACED), 0);  // of our own copies
      barrier_wait(p.empty + 8 * slot, phase);
      const int tiles = min(TILES, p.num_tiles - s * TILES);
      barrier_expect(p.full + 8 * slot, tiles * count * RECORD);
      for (int i = 0; i < tiles; i++, from += tile_bytes(a.groups))
        bulk_copy(to + slot * STAGE + i * PIECE, from, count * RECORD, p.full + 8 * slot, policy);
      if (++slot == a.stages) slot = 0, phase ^= 1;
    }
  }
}

// Sums of squares of every row over this warp's columns, for the reducer that adds them up.
__device__ __forceinline__ void give_squares(const Plan& p, const Consumer& w, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float s = sum_of_four(w.squares[n]);
    if ((lane & 3) == 0) p.squares[warp * 8 * NT + 8 * n + (lane >> 2)] = s;
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(p.squared);
}

// The block's sums of squares to every block's `total`, by a reducer while others' sums are on their way.
__device__ __forceinline__ void share_squares(const Plan& p, int lane) {
  barrier_wait(p.squared, 0);
  if (lane < 8 * NT) {
    float s = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) s += p.squares[i * 8 * NT + lane];
    const u32 to = shared_address(p.total + p.rank * 8 * NT + lane);
    if (p.size == 1) p.total[lane] = s;  // st.async is illegal in a launch without clusters
    else
#pragma unroll 1
      for (int r = 0; r < p.size; r++) send(remote_address(to, r), s, remote_address(p.norm_ready, r));
  }
  __syncwarp();
  if (p.size == 1 && lane == 0) barrier_arrive(p.norm_ready);
}

// The factors of the fused norm for this lane's rows of x: wait for the sums of squares.
__device__ __forceinline__ void norm_factors(const Gemm& a, const Plan& p, int lane, float (&factor)[NT][2]) {
  arrival_wait(p.norm_ready);
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = 0.f;
      for (int r = 0; r < p.size; r++) sum += p.total[r * 8 * NT + 8 * n + 2 * (lane & 3) + i];
      factor[n][i] = norm_factor(sum, a.columns, a.eps);
    }
}

// The barrier of the slot behind one, in a circle.
__device__ __forceinline__ u32 slot_after(u32 slot, u32 last) { return slot == last ? last - 8 * (SLOTS - 1) : slot + 8; }

// `x`: of the first chunk; `scale`: its norm's weights, where they are loaded ahead. `first`: of the first tile that this warp
// finishes, asked for behind x and long before it is needed.
template <class Epilogue>
__device__ __forceinline__ void consume(const Gemm& a, const Plan& p, Epilogue& epilogue, int warp, int lane, const Place& x, uint4 (&scale)[4],
                                        typename Epilogue::Ready& first) {
  Consumer w;
#pragma unroll
  for (int n = 0; n < NT; n++) w.squares[n] = 0.f;
  // Barriers of the stage and of the slot that the warp is at; what it loads and stores lies at multiples of them. All that
  // a step needs stays in a register: found anew in every step it was a fifth of the instructions.
  u32 stage = p.full, slot = p.partial_full, phase = 0;
  u32 first_stage = p.full, last_stage = p.full + 8 * (a.stages - 1), last_slot = p.partial_full + 8 * (SLOTS - 1);
  u32 codes = p.ring + warp * RECORD + lane * 16 - p.full * (STAGE / 8), ends = codes + 1024 + (lane >> 2) * 4 - lane * 16;
  u32 sums = shared_address(p.partial + warp * 32 + lane) - p.partial_full * (SLOT / 8);
  u32 taken = (1 << SLOTS) - 1;  // bit i: parity to wait for of the i-th slot from here on
  keep(first_stage), keep(last_stage), keep(last_slot), keep(sums);
  uint4 raw[NT][4];
  wait_for_previous();
  if (EARLY) fetch_rows(a, x, lane, raw);
  if (FETCHED && (p.size > 1 || Epilogue::kDefer) && warp < p.owned) epilogue.fetch(tile_row(p, warp), lane, first);
  if constexpr (Epilogue::kDefer) epilogue.begin();
#pragma unroll 1
  for (int c = 0; c < p.chunks; c++) {
    const int group = (p.rank + c * p.size) * WARPS + warp;
    const int place_of_chunk = place_in_line(group - warp);
    codes += place_of_chunk, ends += place_of_chunk;
    if (group >= a.groups) codes -= warp * RECORD, ends -= warp * RECORD;  // x is zero there: any weights do
    keep(codes), keep(ends);
    if (!EARLY) fetch_rows(a, place_of(a, group, lane), lane, raw);
    if (c > 0 || NT > 1) fetch_norm(a, group, lane, scale);
    take_rows(a, raw, scale, lane, w, units_of(p, c) + warp * 8 * NT);
    if (AHEAD && c + 1 < p.chunks) fetch_rows(a, place_of(a, group + p.size * WARPS, lane), lane, raw);
    bool has_squares = c == p.chunks - 1 && a.norm;  // to give: neither before the first product nor behind the last
    int s = 0, end = has_squares ? 1 : p.steps;  // no cluster is without a tile
#pragma unroll 1
    while (true) {
#pragma unroll 1
      for (; s < end; s++) {
        random_delay();
        watched_wait(stage, phase);
        Records r;  // stale behind the last tile: nobody adds it
        load_records(stage * (STAGE / 8) + codes, stage * (STAGE / 8) + ends, r);
        float acc[TILES][NT][4];
        multiply_records(r, w, acc);
        watched_wait(slot + 8 * SLOTS, taken & 1);
        taken = taken >> 1 | (~taken & 1) << SLOTS - 1;
#pragma unroll
        for (int i = 0; i < TILES * NT; i++) {
          const float(&v)[4] = acc[i / NT][i % NT];
          store_shared4(slot * (SLOT / 8) + sums + i * WARPS * 512, make_float4(v[0], v[1], v[2], v[3]));
        }
        random_delay();
        __syncwarp();
        // The stage is freed here, behind stores that need its contents. A release right behind the loads
        // orders them before other threads' accesses, not before the copy engine's: loads still under way
        // then found the next records.
        if (lane == 0) barrier_arrive(stage + TO_EMPTY), barrier_arrive(slot);
        if (stage == last_stage) stage = first_stage, phase ^= 1;
        else stage += 8;
        slot = slot_after(slot, last_slot);
      }
      if (!has_squares) break;
      give_squares(p, w, warp, lane);
      has_squares = false, end = p.steps;
    }
    codes -= place_of_chunk, ends -= place_of_chunk;
    // Past the slots that this chunk had no step for: the next one begins with the first.
    for (; slot != last_slot - 8 * (SLOTS - 1); slot = slot_after(slot, last_slot))
      taken = taken >> 1 | (taken & 1) << SLOTS - 1;
  }
}

template <class Epilogue>
__device__ __forceinline__ void finish_tile(Epilogue& epilogue, Tile& tile, const typename Epilogue::Ready& ready, const float (&factor)[NT][2]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) tile.v[n][i] = __fmul_rn(tile.v[n][i], factor[n][i & 1]);  // by itself, not with what is added next
  epilogue.finish(tile, ready);
}

// Sums over the consumers, each times the unit of its row.
__device__ __forceinline__ void add_partial(const float4* from, const float2* units, float (&sums)[TILES][NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float2 unit = units[(w * NT + n) * 4];
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        const float4 v = from[((i * NT + n) * WARPS + w) * 32];
        float(&sum)[4] = sums[i][n];
        if (w == 0) {
          // Rounded by themselves, not with what may be added next: as many_rows.cu begins.
          sum[0] = __fmul_rn(v.x, unit.x), sum[1] = __fmul_rn(v.y, unit.y);
          sum[2] = __fmul_rn(v.z, unit.x), sum[3] = __fmul_rn(v.w, unit.y);
        } else {
          sum[0] = fmaf(v.x, unit.x, sum[0]), sum[1] = fmaf(v.y, unit.y, sum[1]);
          sum[2] = fmaf(v.z, unit.x, sum[2]), sum[3] = fmaf(v.w, unit.y, sum[3]);
        }
      }
    }
}

// Reducer `place` adds the tiles of steps place, place + SLOTS, ... of every chunk.
template <class Epilogue>
__device__ __forceinline__ void reduce(const Gemm& a, const Plan& p, Epilogue& epilogue, int place, int lane) {
  const bool defer = p.size > 1 || Epilogue::kDefer;
  const float4* const from = p.partial + place * TILES * NT * WARPS * 32 + lane;
  float factor[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++) factor[n][0] = factor[n][1] = 1.f;
  wait_for_previous();  // the epilogue reads and writes what earlier kernels may use
  int phase = 0;
#pragma unroll 1
  for (int c = 0; c < p.chunks; c++) {
    const bool last = c == p.chunks - 1;
    if (last && a.norm && place == SLOTS - 1) share_squares(p, lane);
    for (int s = place; s < p.steps; s += SLOTS, phase ^= 1) {
      float sums[TILES][NT][4];
      typename Epilogue::Ready ready[TILES];
      if (last && !defer) {
#pragma unroll
        for (int i = 0; i < TILES; i++)
          if (s * TILES + i < p.num_tiles) epilogue.fetch((p.first_tile + s * TILES + i) * 16, lane, ready[i]);
      }
      random_delay();
      barrier_wait(p.partial_full + 8 * place, phase);
      add_partial(from, (const float2*)units_of(p, c) + (lane & 3), sums);
      random_delay();
      __syncwarp();
      if (lane == 0) barrier_arrive(p.partial_empty + 8 * place);
      if (s == place && last && a.norm && !defer) norm_factors(a, p, lane, factor);
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        const int index = s * TILES + i;
        if (index >= p.num_tiles) break;
        Tile tile;
        tile.row = (p.first_tile + index) * 16, tile.lane = lane;
#pragma unroll
        for (int n = 0; n < NT; n++) {
          float4* own = kept(p, index) + n * 32 + lane;  // this lane alone touches it
          float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
          if (c > 0) v = *own;
          v.x += sums[i][n][0], v.y += sums[i][n][1], v.z += sums[i][n][2], v.w += sums[i][n][3];
          tile.v[n][0] = v.x, tile.v[n][1] = v.y, tile.v[n][2] = v.z, tile.v[n][3] = v.w;
          if (last && p.size > 1) {
            const int owner = index & (p.size - 1), at = index >> p.shift;
            const u32 to = shared_address(received(p, at, p.rank) + n * 32 + lane);
            send(remote_address(to, owner), v, remote_address(p.arrived + 8 * at, owner));
          } else if (!last || defer) {
            *own = v;
          }
        }
        if (last && !defer) finish_tile(epilogue, tile, ready[i], factor);
      }
    }
  }
}

// Finish the block's own tiles, shared out to the consumer warps. A block alone keeps them as a
// cluster's owner receives them, and sends them here.
template <class Epilogue>
__device__ __forceinline__ void finish_together(const Gemm& a, const Plan& p, Epilogue& epilogue, int warp, int lane, const typename Epilogue::Ready& first) {
  float factor[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++) factor[n][0] = factor[n][1] = 1.f;
  for (int pass = Epilogue::kDefer && p.size == 1 ? 0 : 1; pass < 2; pass++) {
    if (pass == 1 && a.norm) norm_factors(a, p, lane, factor);  // also keeps the block until all have sent
    for (int place = warp; place < p.owned; place += WARPS) {
      Tile tile;
      typename Epilogue::Ready ready = first;
      if (pass == 1 && (!FETCHED || place >= WARPS)) epilogue.fetch(tile_row(p, place), lane, ready);
      if (p.size > 1) arrival_wait(p.arrived + 8 * place);
      take_tile(p, place, lane, tile);
      if constexpr (Epilogue::kDefer) {
        if (pass == 0) {
          epilogue.send(tile);
          continue;
        }
      }
      finish_tile(epilogue, tile, ready, factor);
    }
  }
}

// Epilogue: a struct with Ready, what it loads before a tile's sums are there: fetch(row, lane, ready);
// finish(tile, ready) for each finished tile; kDefer: begin() behind the wait for the kernel in front,
// keep all tiles of the block; send(tile) for each by one warp, of a block alone by all behind the last;
// finish behind that, same lane (send's tile is without the norm's factor).
template <class Epilogue>
__device__ __forceinline__ void gemm_main(const Gemm& a, Epilogue& epilogue) {
  extern __shared__ __align__(128) u8 memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // The next kernel's blocks come as soon as there is room for them, not when this one's x is there: they
  // wait for it themselves. Before they do, they read weights and, of attention, keys of earlier steps.
  release_next();
  const Plan p = make_plan(a, memory);
  Place x;
  uint4 scale[4];
  typename Epilogue::Ready first;
  if (warp < WARPS) {
    if (EARLY) x = place_of(a, p.rank * WARPS + warp, lane);
    if (EARLY) asm volatile("" : "+l"(x.from), "+r"(x.left));  // not behind the wait for the kernel in front
    // Asked for before the ring, whose copies would be in its way. Of more rows, registers are short.
    if (NT == 1) fetch_norm(a, p.rank * WARPS + warp, lane, scale);
  }
  if (warp >= WARPS && lane == 0) start_barriers(a, p, warp - WARPS);
  __syncthreads();
  if (p.size > 1) cluster_arrive_relaxed();
  if (warp == WARPS) {
    if (lane == 0) produce(a, p);
    __syncwarp();
    if (p.size > 1) cluster_wait();
    if constexpr (Epilogue::kDefer) {
      if (p.size > 1) send_tiles(p, epilogue, lane);
    }
  } else {
    if (p.size > 1) cluster_wait();  // before anything is sent to a block, it must have started
    if (warp < WARPS) consume(a, p, epilogue, warp, lane, x, scale, first);
    else reduce(a, p, epilogue, warp - WARPS - 1, lane);
  }
  if (p.size == 1 && !Epilogue::kDefer) return;
  if (p.size == 1) __syncthreads();
  if (warp < WARPS) finish_together(a, p, epilogue, warp, lane, first);
}
