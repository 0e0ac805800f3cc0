// Products of a warpgroup, 64 features by ROWS rows (32 or 64), of bytes: weights without a sign from registers,
// rows of x from shared memory.
#include "hopper.cuh"

#if ROWS == 32
#define PRODUCT(B) \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %21, 0;\n wgmma.mma_async.sync.aligned.m64n32k32.s32.u8." B " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
               "}, {%16, %17, %18, %19}, %20, p;\n}" \
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), \
                 "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"((int)adds))
#elif ROWS == 64
#define PRODUCT(B) \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n wgmma.mma_async.sync.aligned.m64n64k32.s32.u8." B " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
               "}, {%32, %33, %34, %35}, %36, p;\n}" \
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), \
                 "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), \
                 "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), \
                 "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"((int)adds))
#endif

// d = or += a times rows; `rows`: of 32 columns, from ``rows_operand``. SIGNED: the bytes of rows.
template <bool SIGNED>
__device__ __forceinline__ void multiply_bytes(int (&d)[ROWS / 2], const u32 (&a)[4], u64 rows, bool adds) {
  if (SIGNED) PRODUCT("s8");
  else PRODUCT("u8");
}
#undef PRODUCT

// The operand at an address, a multiple of 1,024: squares of eight rows by 128 bytes, one after another, swizzled by
// 128 bytes. 32 columns further are 2 more of it.
__device__ __forceinline__ u64 rows_operand(u32 address) {
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | (address & 0x3ffff) >> 4;
}
// Registers that products read or add to have been written; all products are done.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
