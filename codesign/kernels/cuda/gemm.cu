// Linear maps for few rows: plain with bias and residual (ACTIVATION 0), SwiGLU (1), float32 (2).
#include "gemm_core.cuh"
#include "gemm_outputs.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gemm(const u8* weight, const u16* x, const u16* norm, void* out, const u16* bias, const u16* residual, int rows, int columns,
     int features, int groups, int stages, int part_tiles, int share, int rest, float eps) {
  const Gemm a = {weight, x, norm, rows, columns, groups, stages, part_tiles, (u32)share, (u32)rest, eps};
  Output epilogue = output_of(out, bias, residual, 0, rows, features);
  gemm_main(a, epilogue);
}
