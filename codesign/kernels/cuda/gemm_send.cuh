// The sending role of a skinny GEMM whose epilogue sends tiles to other GPUs: what a cluster has summed.
#include "gemm_epilogue.cuh"

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

// Send the block's own tiles, each as soon as the cluster's sums of it are there, by the warp whose copies
// are all on their way: the consumers still multiply.
template <class Epilogue>
__device__ __forceinline__ void send_tiles(const Plan& p, Epilogue& epilogue, int lane) {
  wait_for_previous();
  epilogue.begin();
#pragma unroll 1
  for (int place = 0; place < p.owned; place++) {
    Tile tile;
    random_delay();
    arrival_wait(p.arrived + 8 * place);
    take_tile(p, place, lane, tile);
    epilogue.send(tile);
  }
}
