// Skinny GEMM core for Hopper: out[m, n] = sum_k x[m, k] * weight[n, k] for at most 8 * NT rows m.
//
// Weights are the tensor cores' A operand (16 output features), rows of x the B operand (8 a tile).
// Three roles. The *producer* warp streams packed weights into a ring in shared memory, and starts
// before the previous kernel's results are waited for. Each *consumer* warp keeps the x of its own
// 128 columns in registers and multiplies it with every weight tile of the block. *Reducer* warps add
// the consumers' partial sums of a tile and run the epilogue, so that no consumer ever waits for one.
//
// Columns are cut into chunks of WARPS groups of 128. The blocks of a cluster take chunks in turn; each
// sends a tile's sums to the block that owns the tile as soon as it has them, through distributed
// shared memory, and an mbarrier there counts the bytes. A block with several chunks adds in its own.
//
// The RMSNorm in front of a linear map is fused: W * (h * w_norm), and rsqrt(mean h^2 + eps)
// multiplied after the product; the sum of squares falls out of loading h.
//
// Macros: NT 1, 2 or 4 (8, 16 or 32 rows); WARPS consumers; TILES a consumer multiplies
// at a time (1, 2, 4); BLOCKS an SM must hold; PACED stages of the ring are on
// their way at a time while it is filled first (0: all), so that x has not to wait behind them; CLUSTER blocks of a
// cluster and CHUNKS of every block (0: known when it runs); UNIT tiles are dealt out to clusters together;
// DELAYS 1: every role dawdles, for tests.
// packing.py has the layout of a record. No CUDA header.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

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
#define GROUP 128
#define RECORD 1088
// Steps whose partial sums are in flight, each with a reducer warp of its own: a barrier whose phases
// a waiting warp skips could take an older phase for the one it waits for.
#define SLOTS (NT * TILES <= 2 ? 3 : 2)
#define THREADS (32 * (WARPS + 1 + SLOTS))
// Registers are left to load the next chunk's x while this one's is multiplied.
#ifndef AHEAD
#define AHEAD (NT == 1 && TILES <= 2 && BLOCKS == 1 && CHUNKS != 1)
#endif
#ifndef FETCHED
#define FETCHED (NT == 1 && !AHEAD)  // registers are left for the first tile's residual
#endif
#define EARLY (AHEAD || CHUNKS == 1)  // where the first x lies is known before the wait

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void barrier_init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Wait for the phase of that parity to complete. A wait of seconds is a bug: trap, do not hang. (So every
// role first waits for the kernel in front, which may wait for another GPU.)
__device__ __forceinline__ void barrier_wait(u32 bar, int parity) {
  for (u32 tries = 0;; tries++) {
    u32 done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    if (done) return;
    if (tries > (1u << 22)) asm volatile("trap;");
  }
}
// The same for the first phase of a barrier that counts bytes from other blocks.
__device__ __forceinline__ void arrival_wait(u32 bar) {
  for (u32 tries = 0;; tries++) {
    u32 done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(bar) : "memory");
    if (done) return;
    if (tries > (1u << 22)) asm volatile("trap;");
  }
}
// Sleep for up to 2 us, one time in four.
__device__ __forceinline__ void dawdle() {
#if DELAYS
  u32 now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  now = (now ^ (threadIdx.x / 32 + 64 * blockIdx.x) * 0x9e3779b9u) * 0x85ebca6bu;
  now ^= now >> 15;
  if ((now & 3) == 0) asm volatile("nanosleep.u32 %0;" ::"r"((now >> 8) & 2047));
  __syncwarp(__activemask());
#endif
}
__device__ __forceinline__ void bulk_copy(u32 to, const u8* from, int bytes, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Wait until the kernels before this one are complete and their writes visible.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Let the next kernel's CTAs start (they wait in turn for this kernel's end).
__device__ __forceinline__ void release_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Shows the others nothing but that this block has started: an arrival with release compiles to a fence of the whole GPU.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ int cluster_size() {
  int n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return n;
}
__device__ __forceinline__ int cluster_rank() {
  int n;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n));
  return n;
}
__device__ __forceinline__ u32 remote_address(u32 local, int rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  return remote;
}
// To a block of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void send4(u32 to, float4 v, u32 bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v.x),
      "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar) : "memory");
}
__device__ __forceinline__ void send1(u32 to, float v, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v), "r"(bar) : "memory");
}
__device__ __forceinline__ uint4 load_shared4(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 load_shared2(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
// Past the first-level cache: a previous kernel that still ran when this one started wrote it.
__device__ __forceinline__ uint4 load_fresh4(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_fresh_pair(const u16* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float load_fresh_bf16(const u16* p) {
  u16 v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return __uint_as_float((u32)v << 16);
}
__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 multiply_bf16(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u16 to_bf16(float v) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}
__device__ __forceinline__ u32 to_bf16_pair(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Transpose 8 x 8 bf16 over a warp: lane 4 i + j gives row i, columns 2 j and 2 j + 1, and gets column i,
// rows 2 j and 2 j + 1. It turns an accumulator, features by rows of x, into memory's order and back.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
__device__ __forceinline__ void split_half(u32 pair, float& low, float& high) {
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(pair));
}
__device__ __forceinline__ u32 fma_half(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// The larger sizes of two pairs, with some sign; not a number if either is none.
__device__ __forceinline__ u32 larger_bf16(u32 a, u32 b) {
  u32 r;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Bytes: A without a sign, B with one (HIGH) or without.
template <bool HIGH>
__device__ __forceinline__ void mma_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (HIGH)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

struct Gemm {
  const u8* weight;  // (tiles, groups, RECORD)
  const u16* x;      // (rows, columns) bf16
  const u16* norm;   // (columns,) bf16, or null
  int rows, columns, groups, stages, part_tiles;
  u32 share, rest;  // units of a cluster; clusters, the first ones, that have one more
  float eps;
};

// A finished tile, in one warp. Lane 4 g + t holds v[n] = features row + g (v[n][0], v[n][1]) and
// row + g + 8 (v[n][2], v[n][3]) of rows of x 8 n + 2 t and 8 n + 2 t + 1.
struct Tile {
  int row, lane;
  float v[NT][4];
};

// The pairs of a (rows, features) bf16 matrix where a tile lies, in memory's order: word [n][h] is of row
// 8 n + lane / 4, features row + 8 h + 2 (lane % 4) and the next. `features` is even; outside is zero.
struct Pairs {
  u32 word[NT][2];
};
__device__ __forceinline__ void load_pairs(Pairs& pairs, const u16* from, int rows, int features, int row, int lane) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int m = 8 * n + (lane >> 2), feature = row + 8 * h + 2 * (lane & 3);
      pairs.word[n][h] = 0;
      if (from && m < rows && feature < features) pairs.word[n][h] = load_fresh_pair(from + (size_t)m * features + feature);
    }
}
// Adds what `rest` holds (transposed back) to features row + lane / 4 + 8 h of rows 8 n + 2 (lane % 4) and
// the next, and stores them in bf16.
__device__ __forceinline__ void store_pair(u16* to, float low, float high, u32 rest, int rows, int features, int row, int n, int h, int lane) {
  const u32 added = transposed(rest);
  const u32 word = transposed(to_bf16_pair(low + low_bf16(added), high + high_bf16(added)));
  const int m = 8 * n + (lane >> 2), feature = row + 8 * h + 2 * (lane & 3);
  if (m < rows && feature < features) *(u32*)(to + (size_t)m * features + feature) = word;
}

struct Consumer {
  // x of this warp's group as B fragments, in fixed point: high bytes with the sign, and low bytes.
  u32 high[NT][8], low[NT][8];
  float unit[NT][2];  // what a one of that is worth, for this lane's two rows
  float sums[NT][2];  // sum of x over the group
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

// Four of x as q = x times `scale` to the nearest integer, 16 bits: its high and its low bytes, in the
// order in which a word of codes has their columns.
__device__ __forceinline__ void to_fixed(u32 first, u32 second, float scale, u32& high, u32& low) {
  const float one = 12582912.f;  // 1.5 * 2^23: the sum's last bits are q
  const u32 q0 = __float_as_uint(fmaf(low_bf16(first), scale, one)), q1 = __float_as_uint(fmaf(high_bf16(first), scale, one));
  const u32 q2 = __float_as_uint(fmaf(low_bf16(second), scale, one)), q3 = __float_as_uint(fmaf(high_bf16(second), scale, one));
  const u32 even = __byte_perm(q0, q2, 0x5140), odd = __byte_perm(q1, q3, 0x5140);
  low = __byte_perm(even, odd, 0x5410), high = __byte_perm(even, odd, 0x7632);
}

// Fixed point for a row of a group: of the largest size all 8 bits of a bf16 and 7 more, so what is above a
// 128th of it is exact. Rows with infinities or NaNs have a unit that is none.
__device__ __forceinline__ void fix_rows(const u32 (&x)[16], int n, int lane, Consumer& w) {
  u32 top[4];
#pragma unroll
  for (int i = 0; i < 4; i++) top[i] = larger_bf16(larger_bf16(x[4 * i], x[4 * i + 1]), larger_bf16(x[4 * i + 2], x[4 * i + 3]));
  u32 most = larger_bf16(larger_bf16(top[0], top[1]), larger_bf16(top[2], top[3]));
  most = larger_bf16(most, __shfl_xor_sync(~0u, most, 1));
  most = larger_bf16(most, __shfl_xor_sync(~0u, most, 2));
  most &= 0x7f807f80u;
  const u32 exponent = max(max(most, most << 16) & 0x7f800000u, 32u << 23);
  const float scale = __uint_as_float((268u << 23) - exponent);  // the largest comes to 2^14 and more
  const float unit = __uint_as_float(exponent == 0x7f800000u ? 0x7fffffffu : exponent - (14u << 23));
#pragma unroll
  for (int s = 0; s < 8; s++) to_fixed(x[2 * s], x[2 * s + 1], scale, w.high[n][s], w.low[n][s]);
  int c[4] = {0, 0, 0, 0}, d[4] = {0, 0, 0, 0};
#pragma unroll
  for (int s = 0; s < 8; s += 2) {
    mma_bytes<true>(c, 0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u, w.high[n][s], w.high[n][s + 1]);
    mma_bytes<false>(d, 0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u, w.low[n][s], w.low[n][s + 1]);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    w.unit[n][i] = __shfl_sync(~0u, unit, 8 * (lane & 3) + 4 * i);
    w.sums[n][i] = (float)((c[i] << 8) + d[i]) * w.unit[n][i];
  }
}

// Make them B fragments, times the norm's weight.
__device__ __forceinline__ void take_rows(const Gemm& a, const uint4 (&raw)[NT][4], const uint4 (&scale)[4], int lane, Consumer& w) {
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
          w.squares[n] += low_bf16(pair) * low_bf16(pair);
          w.squares[n] += high_bf16(pair) * high_bf16(pair);
          pair = multiply_bf16(pair, s[q]);
        }
      }
    }
    fix_rows(x, n, lane, w);
  }
}

// TILES records (16 features x 128 columns each, WARPS records apart), as a warp holds them.
struct Records {
  uint4 q[TILES][2];
  uint2 ends[TILES];  // scales of rows g and g + 8, and 128 + zero of both
};

// `codes` and `ends`: addresses of this lane's first piece of either.
__device__ __forceinline__ void load_records(u32 codes, u32 ends, Records& r) {
#pragma unroll
  for (int i = 0; i < TILES; i++) {
#pragma unroll
    for (int j = 0; j < sizeof(r.q[0]) / 16; j++) r.q[i][j] = load_shared4(codes + i * WARPS * RECORD + j * 512);
    r.ends[i] = load_shared2(ends + i * WARPS * RECORD);
  }
}

// acc[i] = record i times x.
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
    float s0, s1, z0, z1;
    split_half(r.ends[i].x, s0, s1);
    split_half(fma_half(r.ends[i].y, 0x4c003c00u, 0xe800d800u), z0, z1);  // less 128; of row g + 8 times 16
    s1 *= 0.0625f;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int c0 = (high[i][n][j] << 8) + low[i][n][j], c1 = (high[i][n][2 + j] << 8) + low[i][n][2 + j];
        acc[i][n][j] = s0 * fmaf(-z0, w.sums[n][j], (float)c0 * w.unit[n][j]);
        acc[i][n][2 + j] = s1 * fmaf(-z1, w.sums[n][j], (float)c1 * w.unit[n][j]);
      }
  }
}

#define STAGE (TILES * WARPS * RECORD)
#define MOST_STAGES 16
#define TO_EMPTY (8 * MOST_STAGES)  // from a stage's barrier `full` to its `empty`
#define BARRIERS 384             // bytes in front of the ring
#define TILE_BYTES (NT * 512)

// Where everything lies in a block's shared memory, and what the block works on.
struct Plan {
  int size, rank, shift;                   // blocks of the cluster, 1 << shift of them; this block's place
  int first_tile, num_tiles, steps;        // tiles of the cluster; steps of a chunk
  int chunks;                              // of this block
  int owned;                               // tiles that this block finishes: rank, rank + size, ...
  float4 *partial, *part;                  // (SLOTS, TILES, NT, WARPS, 32); (part_tiles, NT, 32)
  float *squares, *total;                  // (WARPS, 8 NT); (size, 8 NT) of the cluster's blocks
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
  p.total = p.squares + WARPS * 8 * NT;
  p.arrived = shared_address(p.total + p.size * 8 * NT);
  return p;
}
// First feature of the `place`-th tile that this block finishes.
__device__ __forceinline__ int tile_row(const Plan& p, int place) { return (p.first_tile + place * p.size + p.rank) * 16; }
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
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // all that others must find here behind the cluster's barrier
  if (p.size == 1) return;
  if (which == SLOTS && a.norm) barrier_expect(p.norm_ready, p.size * 8 * NT * 4);
#pragma unroll 1
  for (int i = which; i < p.owned; i += SLOTS + 1) barrier_expect(p.arrived + 8 * i, p.size * TILE_BYTES);
}

__device__ __forceinline__ void produce(const Gemm& a, const Plan& p) {
  const u64 policy = evict_first();
  int slot = 0, phase = 1;  // a fresh barrier counts as having completed the phase before
  int free = a.stages;
#pragma unroll 1
  for (int c = 0; c < p.chunks; c++) {
    const int group = (p.rank + c * p.size) * WARPS, count = min(WARPS, a.groups - group);
    const u8* from = a.weight + ((size_t)p.first_tile * a.groups + group) * RECORD;
    for (int s = 0; s < p.steps; s++) {
      dawdle();
      if (free-- == 0) wait_for_previous();
      if (PACED && free >= 0 && slot >= PACED) barrier_wait(p.full + 8 * (slot - PACED), 0);  // of our own copies
      barrier_wait(p.empty + 8 * slot, phase);
      const int tiles = min(TILES, p.num_tiles - s * TILES);
      barrier_expect(p.full + 8 * slot, tiles * count * RECORD);
      for (int i = 0; i < tiles; i++, from += (size_t)a.groups * RECORD)
        bulk_copy(p.ring + slot * STAGE + i * WARPS * RECORD, from, count * RECORD, p.full + 8 * slot, policy);
      if (++slot == a.stages) slot = 0, phase ^= 1;
    }
  }
}

// Sums of squares of every row over this warp's columns, for the reducer that adds them up.
__device__ __forceinline__ void give_squares(const Plan& p, const Consumer& w, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float s = w.squares[n];
    s += __shfl_xor_sync(~0u, s, 1);
    s += __shfl_xor_sync(~0u, s, 2);
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
      for (int r = 0; r < p.size; r++) send1(remote_address(to, r), s, remote_address(p.norm_ready, r));
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
      factor[n][i] = rsqrtf(__fdividef(sum, (float)a.columns) + a.eps);
    }
}

// `x`: of the first chunk; `scale`: its norm's weights, where they are loaded ahead. `first`: of the first tile that this warp
// finishes, asked for behind x and long before it is needed.
template <class Epilogue>
__device__ __forceinline__ void consume(const Gemm& a, const Plan& p, Epilogue& epilogue, int warp, int lane, const Place& x, uint4 (&scale)[4],
                                        typename Epilogue::Ready& first) {
  Consumer w;
#pragma unroll
  for (int n = 0; n < NT; n++) w.squares[n] = 0.f;
  // This lane's pieces of the stage's records.
  u32 codes = p.ring + warp * RECORD + lane * 16, ends = p.ring + warp * RECORD + 1024 + (lane >> 2) * 8;
  float4* const to = p.partial + warp * 32 + lane;
  const u32 end = p.full + 8 * a.stages;
  u32 bar = p.full, phase = 0;
  u32 taken = ~0u;  // bit i: parity of partial_empty[i] to wait for
  uint4 raw[NT][4];
  wait_for_previous();
  if (EARLY) fetch_rows(a, x, lane, raw);
  if (FETCHED && (p.size > 1 || Epilogue::kDefer) && warp < p.owned) epilogue.fetch(tile_row(p, warp), lane, first);
  if constexpr (Epilogue::kDefer) epilogue.begin();
#pragma unroll 1
  for (int c = 0; c < p.chunks; c++) {
    const int group = (p.rank + c * p.size) * WARPS + warp;
    if (group >= a.groups) codes -= warp * RECORD, ends -= warp * RECORD;  // x is zero there: any weights do
    if (!EARLY) fetch_rows(a, place_of(a, group, lane), lane, raw);
    if (c > 0 || NT > 1) fetch_norm(a, group, lane, scale);
    take_rows(a, raw, scale, lane, w);
    if (AHEAD && c + 1 < p.chunks) fetch_rows(a, place_of(a, group + p.size * WARPS, lane), lane, raw);
    const bool has_squares = c == p.chunks - 1 && a.norm;
    int place = 0;
    for (int s = 0; s < p.steps; s++) {
      dawdle();
      barrier_wait(bar, phase);
      Records r;  // stale behind the last tile: nobody adds it
      load_records(codes, ends, r);
      float acc[TILES][NT][4];
      multiply_records(r, w, acc);
      barrier_wait(p.partial_empty + 8 * place, taken >> place & 1);
      taken ^= 1u << place;
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
          to[((place * TILES + i) * NT + n) * WARPS * 32] = make_float4(acc[i][n][0], acc[i][n][1], acc[i][n][2], acc[i][n][3]);
      dawdle();
      __syncwarp();
      // The stage is freed here, behind stores that need its contents. A release right behind the loads
      // orders them before other threads' accesses, not before the copy engine's: loads still under way
      // then found the next records.
      if (lane == 0) barrier_arrive(bar + TO_EMPTY), barrier_arrive(p.partial_full + 8 * place);
      codes += STAGE, ends += STAGE, bar += 8;
      if (bar == end) codes -= a.stages * STAGE, ends -= a.stages * STAGE, bar = p.full, phase ^= 1;
      if (++place == SLOTS) place = 0;
      if (has_squares && s == 0) give_squares(p, w, warp, lane);  // neither before the first product nor behind the last
    }
  }
}

template <class Epilogue>
__device__ __forceinline__ void finish_tile(Epilogue& epilogue, Tile& tile, const typename Epilogue::Ready& ready, const float (&factor)[NT][2]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) tile.v[n][i] *= factor[n][i & 1];
  epilogue.finish(tile, ready);
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
      dawdle();
      barrier_wait(p.partial_full + 8 * place, phase);
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
          float4 sum = from[(i * NT + n) * WARPS * 32];
#pragma unroll
          for (int w = 1; w < WARPS; w++) {
            const float4 v = from[((i * NT + n) * WARPS + w) * 32];
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
          }
          sums[i][n][0] = sum.x, sums[i][n][1] = sum.y, sums[i][n][2] = sum.z, sums[i][n][3] = sum.w;
        }
      dawdle();
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
            send4(remote_address(to, owner), v, remote_address(p.arrived + 8 * at, owner));
          } else if (!last || defer) {
            *own = v;
          }
        }
        if (last && !defer) finish_tile(epilogue, tile, ready[i], factor);
      }
    }
  }
}

// The cluster's sums of the `place`-th owned tile, in the order of its blocks.
__device__ __forceinline__ void take_tile(const Plan& p, int place, int lane, Tile& tile) {
  tile.row = tile_row(p, place), tile.lane = lane;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int r = 0; r < p.size; r++) {
      const float4 v = received(p, place, r)[n * 32 + lane];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    tile.v[n][0] = sum.x, tile.v[n][1] = sum.y, tile.v[n][2] = sum.z, tile.v[n][3] = sum.w;
  }
}

// Finish the block's own tiles, shared out to the consumer warps. A block alone keeps them as a
// cluster's owner receives them.
template <class Epilogue>
__device__ __forceinline__ void finish_together(const Gemm& a, const Plan& p, Epilogue& epilogue, int warp, int lane, const typename Epilogue::Ready& first) {
  float factor[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++) factor[n][0] = factor[n][1] = 1.f;
  for (int pass = Epilogue::kDefer ? 0 : 1; pass < 2; pass++) {
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
// keep all tiles of the block, then send(tile) for all, then finish for all, same warp and lane (send's
// tile is without the norm's factor).
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
  if (p.size > 1) cluster_arrive();
  if (warp == WARPS) {
    if (lane == 0) produce(a, p);
    __syncwarp();
    if (p.size > 1) cluster_wait();
  } else {
    if (p.size > 1) cluster_wait();  // before anything is sent to a block, it must have started
    if (warp < WARPS) consume(a, p, epilogue, warp, lane, x, scale, first);
    else reduce(a, p, epilogue, warp - WARPS - 1, lane);
  }
  if (p.size == 1 && !Epilogue::kDefer) return;
  if (p.size == 1) __syncthreads();
  if (warp < WARPS) finish_together(a, p, epilogue, warp, lane, first);
}
