// Assembly that needs sm_90a: tensor copies, warpgroup products, register reallocation. No other
// file in sm90/ has any.
#pragma once

#include <cuda.h>  // CUtensorMap; nothing of libcuda is linked

#include <cstdint>

#include "../device/ptx.cuh"

namespace mok::sm90 {

// ---- tensor copies
//
// An operand is
// seen as {64 columns, rows, columns / 64} and comes in one box of several 64-column blocks or many
// rows: rows of 128 bytes, swizzled, block after block. An epilogue box is 64 rows of at most 128
// bytes of a plain matrix.

// A map in global memory that another kernel, or a replayed one, has written may still be in the
// cache of maps with its old content.
__device__ __forceinline__ void acquire_tensor_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

constexpr int kBoxBytes = 8192;
constexpr int kBoxRows = 64;

__device__ __forceinline__ void load_operand(uint32_t to, const CUtensorMap* map, uint64_t& barrier,
                                             int row, int block) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map),
      "r"(shared_address(&barrier)),
      "r"(0),
      "r"(row),
      "r"(block)
      : "memory");
}

// Epilogue transfers. `z` counts what the third extent is: gate or up, or 128-byte blocks of
// columns.
__device__ __forceinline__ void store_box(uint32_t from, const CUtensorMap* map, int column,
                                          int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(from),
      "r"(column),
      "r"(row)
      : "memory");
}
__device__ __forceinline__ void store_boxes(uint32_t from, const CUtensorMap* map, int column,
                                            int row, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from),
      "r"(column),
      "r"(row),
      "r"(z)
      : "memory");
}
__device__ __forceinline__ void load_boxes(uint32_t to, const CUtensorMap* map, uint64_t& barrier,
                                           int column, int row, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map),
      "r"(shared_address(&barrier)),
      "r"(column),
      "r"(row),
      "r"(z)
      : "memory");
}

// The same for data that nobody reads again soon: it leaves L2 before what the products read.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void store_boxes_once(uint32_t from, const CUtensorMap* map, int column,
                                                 int row, int z, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], "
      "[%1], %5;" ::"l"(map),
      "r"(from),
      "r"(column),
      "r"(row),
      "r"(z),
      "l"(policy)
      : "memory");
}
__device__ __forceinline__ void load_boxes_once(uint32_t to, const CUtensorMap* map,
                                                uint64_t& barrier, int column, int row, int z,
                                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map),
      "r"(shared_address(&barrier)),
      "r"(column),
      "r"(row),
      "r"(z),
      "l"(policy)
      : "memory");
}

// ---- registers

template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- warpgroup products

// Operand in 128-byte swizzled boxes. K-major: rows of 64 K values, groups of 8 rows 1 KB apart.
// MN-major: rows of 64 M or N values; the next 64 of them one box further, the next 8 K rows 1 KB.
template <bool MN_MAJOR>
__device__ __forceinline__ uint64_t describe_operand(uint32_t address) {
  constexpr uint64_t leading = MN_MAJOR ? kBoxBytes >> 4 : 1, stride = 1024 >> 4, swizzle_128 = 1;
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | leading << 16 | stride << 32 |
         swizzle_128 << 62;
}
template <bool MN_MAJOR>
constexpr uint64_t kNextK16 = (MN_MAJOR ? 16 * 128 : 16 * 2) >> 4;

__device__ __forceinline__ void products_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler may not move a use of the accumulators above this point.
template <int COUNT>
__device__ __forceinline__ void pin(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d = a · b (+ d when keep is not 0), 64 x COLUMNS x 16, both operands in shared memory.
#define MOK_R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOK_R16(i) MOK_R4(i), MOK_R4(i + 4), MOK_R4(i + 8), MOK_R4(i + 12)

template <bool A_MN, bool B_MN, int COUNT>
__device__ __forceinline__ void multiply_add_192(float (&d)[COUNT], uint64_t a, uint64_t b,
                                                 uint32_t keep) {
  static_assert(COUNT >= 96);
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
      "}, %96, %97, p, 1, 1, %99, %100;\n}\n"
      : MOK_R16(0), MOK_R16(16), MOK_R16(32), MOK_R16(48), MOK_R16(64), MOK_R16(80)
      : "l"(a), "l"(b), "r"(keep), "n"(A_MN ? 1 : 0), "n"(B_MN ? 1 : 0));
}

template <bool A_MN, bool B_MN, int COUNT>
__device__ __forceinline__ void multiply_add_128(float (&d)[COUNT], uint64_t a, uint64_t b,
                                                 uint32_t keep) {
  static_assert(COUNT >= 64);
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, %67, %68;\n}\n"
      : MOK_R16(0), MOK_R16(16), MOK_R16(32), MOK_R16(48)
      : "l"(a), "l"(b), "r"(keep), "n"(A_MN ? 1 : 0), "n"(B_MN ? 1 : 0));
}

template <int COLUMNS, bool A_MN, bool B_MN, int COUNT>
__device__ __forceinline__ void multiply_add(float (&d)[COUNT], uint64_t a, uint64_t b,
                                             uint32_t keep) {
  static_assert(COLUMNS == 192 || COLUMNS == 128);
  if constexpr (COLUMNS == 192) multiply_add_192<A_MN, B_MN>(d, a, b, keep);
  if constexpr (COLUMNS == 128) multiply_add_128<A_MN, B_MN>(d, a, b, keep);
}

#undef MOK_R16
#undef MOK_R4

}  // namespace mok::sm90
