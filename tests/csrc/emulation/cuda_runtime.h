// What the kernels use of CUDA's language and runtime, on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "grid.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __constant__
#define __launch_bounds__(...)
#define threadIdx (emulated::now().thread)
#define blockIdx (emulated::now().cta->block)
#define gridDim (emulated::now().cta->grid)
#define blockDim (emulated::now().cta->size)

using std::max;
using std::min;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

template <class To, class From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &value, sizeof(to));
  return to;
}
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline float __int_as_float(int32_t x) { return bits_as<float>(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
template <class T>
T __ldg(const T* from) {
  return *from;
}

inline void __syncthreads() { emulated::sync(0, emulated::now().cta->threads); }
inline void __syncwarp() { emulated::gather(0); }
inline void __threadfence() {}
inline void __threadfence_system() {}

template <class T>
T shuffle(T value, int from) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const uint64_t found = emulated::gather(bits)[from];
  std::memcpy(&value, &found, sizeof(T));
  return value;
}
template <class T>
T __shfl_sync(uint32_t, T value, int from) {
  return shuffle(value, from % 32);
}
template <class T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
  return shuffle(value, emulated::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(uint32_t, T value, int by) {
  const int lane = emulated::lane();
  return shuffle(value, lane < by ? lane : lane - by);
}
inline uint32_t __ballot_sync(uint32_t, bool mine) {
  const uint64_t* const all = emulated::gather(mine ? 1 : 0);
  uint32_t found = 0;
  for (int i = 0; i < 32; ++i) found |= static_cast<uint32_t>(all[i]) << i;
  return found;
}
inline uint32_t __match_any_sync(uint32_t, int value) {
  const uint64_t* const all = emulated::gather(static_cast<uint32_t>(value));
  uint32_t found = 0;
  for (int i = 0; i < 32; ++i) found |= uint32_t{all[i] == static_cast<uint32_t>(value)} << i;
  return found;
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
  const uint64_t* const all = emulated::gather(value);
  uint32_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<uint32_t>(all[i]);
  return sum;
}
inline int __reduce_max_sync(uint32_t, int value) {
  const uint64_t* const all = emulated::gather(static_cast<uint32_t>(value));
  int found = static_cast<int>(all[0]);
  for (int i = 1; i < 32; ++i) found = std::max(found, static_cast<int>(all[i]));
  return found;
}
inline int __reduce_min_sync(uint32_t mask, int value) { return -__reduce_max_sync(mask, -value); }
inline bool __any_sync(uint32_t mask, bool mine) { return __ballot_sync(mask, mine) != 0; }

template <class T>
T atomicAdd(T* word, T amount) {
  emulated::give_way();
  const T old = *word;
  *word += amount;
  return old;
}

template <class T>
T atomicMax(T* word, T value) {
  emulated::give_way();
  const T old = *word;
  *word = std::max(old, value);
  return old;
}
inline void __nanosleep(unsigned) { emulated::give_way(); }

// ---- runtime

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount
};
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
struct cudaFuncAttributes {};
constexpr unsigned cudaHostAllocMapped = 0, cudaHostAllocPortable = 0, cudaEnableDefault = 0;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
template <class F>
cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <class F>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, F) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2;
  return cudaSuccess;
}
template <class T>
cudaError_t cudaMemcpyToSymbol(T& symbol, const T* from, size_t) {
  symbol = *from;
  return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned,
                                             cudaDriverEntryPointQueryResult*);
