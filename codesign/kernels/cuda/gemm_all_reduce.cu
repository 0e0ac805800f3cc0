// A row-parallel linear map with the sum over ranks in its epilogue: hidden = residual + sum of x W^T.
//
// Every finished tile goes to the other ranks at once; behind the last product, each is received by a
// warp whose lanes hold this rank's part of it. A lane's packet is its part of the accumulator.
#include "gemm_core.cuh"
#include "exchange.cuh"

struct Args {
  u16* hidden;
  const u16* residual;  // or null
  int rows, features;
  Exchange exchange;
};

struct AllReduce {
  const Args& e;
  u32 half;  // read long before it is needed
  struct Ready {
    Pairs residual;
  };
  static const bool kDefer = true;
  static const int WORDS = NT == 1 ? 2 : 4, PACKETS = 2 * NT / WORDS;  // of a lane

  static __device__ __forceinline__ int slot(const Tile& tile, int packet) {
    return (tile.row / 16 * PACKETS + packet) * 32 + tile.lane;
  }
  static __device__ __forceinline__ Packet<WORDS> own(const Tile& tile, int packet) {
    Packet<WORDS> p;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      const int word = packet * WORDS + i;
      p.word[i] = to_bf16_pair(tile.v[word / 2][word % 2 * 2], tile.v[word / 2][word % 2 * 2 + 1]);
    }
    return sendable(p);
  }
  __device__ __forceinline__ void begin() { half = exchange_half(e.exchange); }
  __device__ __forceinline__ void send(const Tile& tile) const {
#pragma unroll
    for (int k = 0; k < PACKETS; k++) send_packet(e.exchange, half, slot(tile, k), own(tile, k));
  }
  __device__ __forceinline__ void fetch(int row, int lane, Ready& ready) const {
    load_pairs(ready.residual, e.residual, e.rows, e.features, row, lane);
  }
  __device__ __forceinline__ void finish(const Tile& tile, const Ready& ready) const {
#pragma unroll
    for (int k = 0; k < PACKETS; k++) {
      float sum[2 * WORDS];
      Packet<WORDS> p[WORLD];
      receive_packets(e.exchange, half, slot(tile, k), own(tile, k), p);
      add_packets(sum, p);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        const int n = (k * WORDS + i) / 2, h = (k * WORDS + i) % 2;
        store_pair(e.hidden, sum[2 * i], sum[2 * i + 1], ready.residual.word[n][h], e.rows, e.features, tile.row, n, h, tile.lane);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gemm_all_reduce(const u8* weight, const u16* x, const __grid_constant__ Args e, int columns, int groups, int stages,
                int part_tiles, int share, int rest) {
  const Gemm a = {weight, x, nullptr, e.rows, columns, groups, stages, part_tiles, (u32)share, (u32)rest, 0.f};
  AllReduce epilogue = {e, 0};
  gemm_main(a, epilogue);
  __syncthreads();  // all have read the counter
  if (threadIdx.x == 0) count_call(e.exchange);
}
