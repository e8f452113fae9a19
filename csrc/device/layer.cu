// What runs beside a direction's grid: choices and their gradient, the three kernels of route, and
// the writer of tensor-map tables. The order of the stream is all the synchronisation there is.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "choices.cuh"
#include "ptx.cuh"
#include "route.cuh"

namespace mok {
namespace {

__global__ void __launch_bounds__(kRouteThreads, 8)
    route_count(const __grid_constant__ RouteArguments a) {
  extern __shared__ int32_t words[];
  const int warp = threadIdx.x / 32, chunk = blockIdx.x * kRouteWarps + warp;
  if (chunk < a.chunks) count_chunk(a, chunk, words + warp * (a.experts + 1));
  if (chunk == 0 && threadIdx.x == 0) *a.census = {};
}

__global__ void __launch_bounds__(kPrefixColumns* kPrefixSegments)
    route_prefix(const __grid_constant__ RouteArguments a) {
  __shared__ int32_t sums[kPrefixSegments][kPrefixColumns];
  prefix_columns(a, blockIdx.x * kPrefixColumns, sums);
}

__global__ void __launch_bounds__(kRouteThreads, 8)
    route_place(const __grid_constant__ RouteArguments a) {
  extern __shared__ int32_t words[];
  const int warp = threadIdx.x / 32, columns = a.experts + 1;
  int32_t* const start = words;
  if (warp == 0) scan_starts(a, start);
  __syncthreads();
  const int warps = gridDim.x * kRouteWarps, first = blockIdx.x * kRouteWarps + warp;
  if (first < a.chunks) place_chunk(a, first, start, words + (warp + 1) * columns);
  for (int expert = first; expert < a.experts; expert += warps) place_padding(a, expert, start);
  if (blockIdx.x == 0) place_split(a, start);
}

template <class P>
__global__ void __launch_bounds__(32 * kChoiceWarps)
    choose(const __grid_constant__ ChoiceArguments a) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kChoiceWarps + threadIdx.x / 32;
  if (token < a.tokens) choose_token<P>(a, token, threadIdx.x % 32);
}

template <class P>
__global__ void __launch_bounds__(32 * kChoiceWarps)
    spread(const __grid_constant__ SpreadArguments a) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kChoiceWarps + threadIdx.x / 32;
  if (token < a.tokens) spread_token<P>(a, token, threadIdx.x % 32);
}

struct alignas(128) TableRecord {
  uint4 words[8];
};
constexpr int kRecordsPerLaunch = 64;
struct TablePart {
  TableRecord records[kRecordsPerLaunch];
  TableRecord* table;
};

// The maps are read through the tensor-map proxy by later kernels: released here, beyond what the
// kernel's end does.
__global__ void __launch_bounds__(8 * kRecordsPerLaunch)
    write_table(const __grid_constant__ TablePart part) {
  const int record = threadIdx.x / 8, word = threadIdx.x % 8;
  part.table[record].words[word] = part.records[record].words[word];
  release_tensor_maps();
}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("mok: ") + what +
                             " failed: " + cudaGetErrorString(status));
  }
}

}  // namespace

RouteFault* route_fault_record() {
  static RouteFault* const record = [] {
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, sizeof(RouteFault), cudaHostAllocMapped | cudaHostAllocPortable) !=
        cudaSuccess) {
      return static_cast<RouteFault*>(nullptr);
    }
    std::memset(memory, 0, sizeof(RouteFault));
    return static_cast<RouteFault*>(memory);
  }();
  return record;
}

void launch_counts(const RouteArguments& a) {
  if (a.tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const int ctas = tiles_of(a.chunks, kRouteWarps), columns = a.experts + 1;
  const int bytes = columns * static_cast<int>(sizeof(int32_t));
  route_count<<<ctas, kRouteThreads, kRouteWarps * bytes, stream>>>(a);
  check(cudaGetLastError(), "launch of route_count");
  route_prefix<<<tiles_of(columns, kPrefixColumns), kPrefixColumns * kPrefixSegments, 0, stream>>>(
      a);
  check(cudaGetLastError(), "launch of route_prefix");
}

void launch_route(const RouteArguments& a) {
  if (a.tokens == 0) return;
  launch_counts(a);
  route_place<<<tiles_of(a.chunks, kRouteWarps),
                kRouteThreads,
                (kRouteWarps + 1) * (a.experts + 1) * sizeof(int32_t),
                static_cast<cudaStream_t>(a.stream)>>>(a);
  check(cudaGetLastError(), "launch of route_place");
}
static_assert((kRouteWarps + 1) * (kMaxExperts + 1) * sizeof(int32_t) <= 48 * 1024,
              "no opt-in to more shared memory");

void launch_choices(const ChoiceArguments& a) {
  if (a.tokens == 0) return;
  const auto ctas = static_cast<unsigned>((a.tokens + kChoiceWarps - 1) / kChoiceWarps);
  const auto kernel = a.type == Dense::kBf16   ? choose<__nv_bfloat16>
                      : a.type == Dense::kFp32 ? choose<float>
                                               : choose<double>;
  kernel<<<ctas, 32 * kChoiceWarps, 0, static_cast<cudaStream_t>(a.stream)>>>(a);
  check(cudaGetLastError(), "launch of choose");
}

void launch_spread(const SpreadArguments& a) {
  if (a.tokens == 0) return;
  const auto ctas = static_cast<unsigned>((a.tokens + kChoiceWarps - 1) / kChoiceWarps);
  const auto kernel = a.type == Dense::kBf16   ? spread<__nv_bfloat16>
                      : a.type == Dense::kFp32 ? spread<float>
                                               : spread<double>;
  kernel<<<ctas, 32 * kChoiceWarps, 0, static_cast<cudaStream_t>(a.stream)>>>(a);
  check(cudaGetLastError(), "launch of spread");
}

void load_layer() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, route_count), "cudaFuncGetAttributes");
  check(cudaFuncGetAttributes(&attributes, route_prefix), "cudaFuncGetAttributes");
  check(cudaFuncGetAttributes(&attributes, route_place), "cudaFuncGetAttributes");
  check(cudaFuncGetAttributes(&attributes, write_table), "cudaFuncGetAttributes");
}

void launch_write_table(const void* host_records, int count, void* table, void* stream) {
  const auto* const records = static_cast<const TableRecord*>(host_records);
  for (int first = 0; first < count; first += kRecordsPerLaunch) {
    const int here = std::min(kRecordsPerLaunch, count - first);
    TablePart part;
    std::memcpy(static_cast<void*>(part.records), records + first, here * sizeof(TableRecord));
    part.table = static_cast<TableRecord*>(table) + first;
    write_table<<<1, 8 * here, 0, static_cast<cudaStream_t>(stream)>>>(part);
    check(cudaGetLastError(), "launch of write_table");
  }
}

}  // namespace mok
