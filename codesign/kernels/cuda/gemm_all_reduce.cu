// A row-parallel linear map with the sum over ranks in its epilogue: hidden = residual + sum of x W^T.
//
// Every finished tile goes to the other ranks at once; behind the last, each is received by the warp
// and lanes that hold this rank's part of it. A lane's packet is its part of the accumulator.
#include "gemm_core.cuh"
#include "exchange.cuh"

struct AllReduce {
  struct Args {
    u16* hidden;
    const u16* residual;  // or null
    int rows, features;
    Exchange exchange;
  };
  static const bool kDefer = true, kWhole = false;
  static const int WORDS = NT == 1 ? 2 : 4, PACKETS = 2 * NT / WORDS;  // of a lane

  static __device__ __forceinline__ int slot(const Tile& tile, int packet) {
    return (tile.row / 16 * PACKETS + packet) * 32 + tile.lane;
  }
  static __device__ __forceinline__ Packet<WORDS> own(const Tile& tile, int packet) {
    Packet<WORDS> p;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      const int word = packet * WORDS + i;
      p.word[i] = pair_of(tile.v[word / 2][word % 2 * 2], tile.v[word / 2][word % 2 * 2 + 1]);
    }
    return sendable(p);
  }
  static __device__ __forceinline__ void send(const Args& e, const Tile& tile) {
    const u32 half = exchange_half(e.exchange);
#pragma unroll
    for (int k = 0; k < PACKETS; k++) send_packet(e.exchange, half, slot(tile, k), own(tile, k));
  }
  static __device__ __forceinline__ void finish(const Args& e, const Tile& tile) {
    const u32 half = exchange_half(e.exchange);
    const int feature = tile.row + (tile.lane >> 2);
#pragma unroll
    for (int k = 0; k < PACKETS; k++) {
      float rest[2 * WORDS], sum[2 * WORDS];
#pragma unroll
      for (int i = 0; i < 2 * WORDS; i++) {  // before the wait, so that both overlap
        const int at = packet_element(tile, k, i);
        rest[i] = 0.f;
        if (e.residual && is_inside(e, tile, k, i)) rest[i] = load_fresh_bf16(e.residual + (size_t)row(tile, at) * e.features + feature + (at & 2) * 4);
      }
      Packet<WORDS> p[WORLD];
      receive_packets(e.exchange, half, slot(tile, k), own(tile, k), p);
      add_packets(sum, p);
#pragma unroll
      for (int i = 0; i < 2 * WORDS; i++) {
        const int at = packet_element(tile, k, i);
        if (is_inside(e, tile, k, i)) e.hidden[(size_t)row(tile, at) * e.features + feature + (at & 2) * 4] = to_bf16(sum[i] + rest[i]);
      }
    }
  }
  // Element i of a packet is element `at` % 4 of accumulator `at` / 4: feature + 8 if `at` & 2.
  static __device__ __forceinline__ int packet_element(const Tile&, int packet, int i) { return packet * 2 * WORDS + i; }
  static __device__ __forceinline__ int row(const Tile& tile, int at) { return at / 4 * 8 + (tile.lane & 3) * 2 + (at & 1); }
  static __device__ __forceinline__ bool is_inside(const Args& e, const Tile& tile, int packet, int i) {
    const int at = packet_element(tile, packet, i);
    return row(tile, at) < e.rows && tile.row + (tile.lane >> 2) + (at & 2) * 4 < e.features;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gemm_all_reduce(const u8* weight, const u16* x, const __grid_constant__ AllReduce::Args e, int columns, int tiles,
                int groups, int stages, int part_tiles) {
  const Gemm a = {weight, x, nullptr, e.rows, columns, tiles, groups, stages, part_tiles, 0.f};
  gemm_main<AllReduce>(a, e);
  __syncthreads();  // all have read the counter
  if (threadIdx.x == 0) count_call(e.exchange);
}
