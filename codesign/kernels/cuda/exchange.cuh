// Exchange of packets between the GPUs of a tensor-parallel group, without barriers and flags.
//
// A packet is 8 or 16 bytes of bfloat16. A slot that holds EMPTY in any of its 4-byte words is not
// filled yet: the reader polls its own memory until all words are, takes them and writes EMPTY back.
// No sum of finite numbers has EMPTY's bits (two NaNs with all bits set); a sender turns a word that
// has them into another NaN. So readiness travels in the data, each word is its own flag (nothing is
// assumed of the atomicity of 16 bytes), and no byte is spent on flags.
//
// Slots lie in two halves, used in turn by consecutive calls. A half may be written again two calls
// later: the sender has by then the receiver's packets of the call between, which the receiver sent
// after a kernel boundary behind the EMPTYs it wrote. Which half comes from a counter in device
// memory, so a captured graph can be replayed; every call adds exactly CALL to it, whatever its
// number of blocks, and a block adds only after it has read.
//
// Macro: WORLD ranks.
#include "hopper.cuh"

constexpr u32 EMPTY = 0xffffffffu, OTHER_NAN = 0x7fff7fffu, CALL = 1u << 16;

struct Exchange {
  unsigned char* inbox[8];  // every rank's slots, as this GPU addresses them: [half][source][bytes]
  u32* calls;               // this rank's counter
  u32* lost;                // 0, or 1 + a rank that a packet was missing from
  u32* report;              // the same where the host reads it; too far away to be polled
  int rank, bytes;          // of one half and source
  u64 patience;             // nanoseconds until a missing packet counts as lost
};

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Which half this call uses; behind griddepcontrol.wait.
__device__ __forceinline__ u32 exchange_half(const Exchange& e) { return *(volatile u32*)e.calls / CALL & 1; }

// By one thread of every block, after all of the block have read.
__device__ __forceinline__ void count_call(const Exchange& e) {
  atomicAdd(e.calls, blockIdx.x == 0 ? CALL - (gridDim.x - 1) : 1u);
}

template <int WORDS>  // 2 or 4
struct Packet {
  u32 word[WORDS];
};

template <int WORDS>
__device__ __forceinline__ Packet<WORDS> sendable(Packet<WORDS> p) {
#pragma unroll
  for (int i = 0; i < WORDS; i++) p.word[i] = p.word[i] == EMPTY ? OTHER_NAN : p.word[i];
  return p;
}

template <int WORDS>
__device__ __forceinline__ bool is_full(const Packet<WORDS>& p) {
  bool full = true;
#pragma unroll
  for (int i = 0; i < WORDS; i++) full = full && p.word[i] != EMPTY;
  return full;
}

__device__ __forceinline__ void put(void* at, const Packet<4>& p) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(p.word[0]), "r"(p.word[1]),
               "r"(p.word[2]), "r"(p.word[3]) : "memory");
}
__device__ __forceinline__ void put(void* at, const Packet<2>& p) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(p.word[0]), "r"(p.word[1]) : "memory");
}
__device__ __forceinline__ void peek(const void* at, Packet<4>& p) {
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(p.word[0]), "=r"(p.word[1]),
               "=r"(p.word[2]), "=r"(p.word[3]) : "l"(at) : "memory");
}
__device__ __forceinline__ void peek(const void* at, Packet<2>& p) {
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(p.word[0]), "=r"(p.word[1]) : "l"(at) : "memory");
}

__device__ __forceinline__ unsigned char* slot_of(const Exchange& e, int owner, u32 half, int source, int slot, int size) {
  return e.inbox[owner] + ((size_t)half * WORLD + source) * e.bytes + (size_t)slot * size;
}

// Stores a packet (already `sendable`) in every other rank's slot.
template <int WORDS>
__device__ __forceinline__ void send_packet(const Exchange& e, u32 half, int slot, const Packet<WORDS>& p) {
#pragma unroll
  for (int i = 1; i < WORLD; i++) {
    const int to = (e.rank + i) % WORLD;  // ranks start at different peers
    put(slot_of(e, to, half, e.rank, slot, 4 * WORDS), p);
  }
}

// Waits for every other rank's packet of a slot, takes them and empties the slots. p[rank] = own.
template <int WORDS>
__device__ __forceinline__ void receive_packets(const Exchange& e, u32 half, int slot, const Packet<WORDS>& own,
                                                Packet<WORDS> (&p)[WORLD]) {
  unsigned char* mine = slot_of(e, e.rank, half, 0, slot, 4 * WORDS);
  u64 start = 0;
  for (u32 polls = 1;; polls++) {
    bool all = true;
#pragma unroll
    for (int r = 0; r < WORLD; r++) {
      p[r] = own;
      if (r != e.rank) peek(mine + (size_t)r * e.bytes, p[r]);
    }
#pragma unroll
    for (int r = 0; r < WORLD; r++) all = all && is_full(p[r]);
    if (all) break;
    if (polls % 64 == 0) {
      const u64 now = nanoseconds();
      if (start == 0) start = now;
      if (now - start > e.patience) {
#pragma unroll
        for (int r = 0; r < WORLD; r++)
          if (!is_full(p[r])) *(volatile u32*)e.lost = *(volatile u32*)e.report = 1u + r;
      }
      if (*(volatile u32*)e.lost) break;
    }
  }
  Packet<WORDS> empty;
#pragma unroll
  for (int i = 0; i < WORDS; i++) empty.word[i] = EMPTY;
#pragma unroll
  for (int r = 0; r < WORLD; r++)
    if (r != e.rank) put(mine + (size_t)r * e.bytes, empty);
}

template <int WORDS>
__device__ __forceinline__ void add_packet(float (&sum)[2 * WORDS], const Packet<WORDS>& p) {
#pragma unroll
  for (int i = 0; i < WORDS; i++) sum[2 * i] += low_bf16(p.word[i]), sum[2 * i + 1] += high_bf16(p.word[i]);
}

// Adds all ranks' packets in rank order, so that every rank gets the same bits.
template <int WORDS>
__device__ __forceinline__ void add_packets(float (&sum)[2 * WORDS], const Packet<WORDS> (&p)[WORLD]) {
#pragma unroll
  for (int i = 0; i < 2 * WORDS; i++) sum[i] = 0.f;
#pragma unroll
  for (int r = 0; r < WORLD; r++) add_packet(sum, p[r]);
}
