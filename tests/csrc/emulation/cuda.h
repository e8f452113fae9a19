// Tensor maps on the host.
#pragma once

#include "cuda_runtime.h"

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT32 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_64B = 2, CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap {
  uint64_t base, size, dimensions, swizzle_bits;
  uint64_t extent[3], stride[3], box[3];  // elements; bytes; elements
  uint64_t rest[3];
};
static_assert(sizeof(CUtensorMap) == 128);

inline int64_t encoded = 0;  // maps, since the library was loaded

inline CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t dimensions,
                             void* base, const cuuint64_t* extents, const cuuint64_t* strides,
                             const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                             CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                             CUtensorMapFloatOOBfill) {
  ++encoded;
  *map = {};
  map->base = reinterpret_cast<uint64_t>(base);
  map->size = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  map->dimensions = dimensions;
  map->swizzle_bits = swizzle;
  uint64_t bytes = 1;
  for (uint32_t i = 0; i < 3; ++i) {
    map->extent[i] = i < dimensions ? extents[i] : 1;
    map->box[i] = i < dimensions ? box[i] : 1;
    map->stride[i] = i == 0 ? map->size : i < dimensions ? strides[i - 1] : 0;
    if (map->extent[i] == 0 || map->box[i] == 0 || map->box[i] > 256 || map->stride[i] % 16 > 0) {
      if (i > 0) return CUDA_ERROR_INVALID_VALUE;
    }
    bytes *= map->box[i];
  }
  const uint64_t row = map->box[0] * map->size;
  if (row != (swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128u : 64u) || map->base % 16 > 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, unsigned,
                                                    cudaDriverEntryPointQueryResult*) {
  *found = reinterpret_cast<void*>(encode_tiled);
  return cudaSuccess;
}
