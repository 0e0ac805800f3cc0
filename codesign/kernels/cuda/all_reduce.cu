// hidden = residual + sum over ranks of partial: one packet of 16 bytes a thread, one launch.
#include "exchange.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
all_reduce_add(const Packet<4>* partial, const Packet<4>* residual, Packet<4>* hidden,
               const __grid_constant__ Exchange e, int packets) {
  wait_for_previous();
  release_next();
  const int slot = blockIdx.x * THREADS + threadIdx.x;
  const bool inside = slot < packets;
  const u32 half = exchange_half(e);
  Packet<4> own = {}, rest = {};
  if (inside) {
    own = partial[slot];
    if (residual) rest = residual[slot];
    own = sendable(own);
    send_packet(e, half, slot, own);
  }
  __syncthreads();  // all have read the counter
  if (threadIdx.x == 0) count_call(e);
  if (!inside) return;
  Packet<4> p[WORLD];
  receive_packets(e, half, slot, own, p);
  float sum[8];
  add_packets(sum, p);
  add_packet(sum, rest);
  Packet<4> out;
#pragma unroll
  for (int i = 0; i < 4; i++) out.word[i] = to_bf16_pair(sum[2 * i], sum[2 * i + 1]);
  hidden[slot] = out;
}
