// Opens a call of several ranks: publish, gather, and route with the own rank's view; workspace.h
// has the protocol. Whoever waits here are few CTAs, so that other streams find SMs meanwhile.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "symmetric.cuh"
#include "view.cuh"
#include "wire.cuh"

namespace mok {
namespace {

constexpr int kPublishThreads = 256;
constexpr int kGatherThreads = 1024, kGatherCtas = 32;
static_assert(kMaxRanks <= kGatherThreads);

__device__ __forceinline__ void copy(const void* from, void* to, int64_t pieces) {
  const auto* const source = static_cast<const uint4*>(from);
  auto* const target = static_cast<uint4*>(to);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < pieces; i += 4 * step) {
    uint4 piece[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) piece[j] = source[i + j * step];
#pragma unroll
    for (int j = 0; j < 4; ++j) target[i + j * step] = piece[j];
  }
  for (; i < pieces; i += step) target[i] = source[i];
}

template <class T>
__device__ __forceinline__ void copy_words(const T* from, T* to, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    to[i] = from[i];
  }
}

__global__ void __launch_bounds__(kPublishThreads)
    publish(const __grid_constant__ PublishArguments a) {
  __shared__ bool last;
  const Peers& group = a.peers;
  Control* const control = part<Control>(group, group.rank, group.at.control);
  const uint32_t epoch = next_epoch(control->epoch), g = epoch % kGenerations;
  // Who has given a rank up waits for nobody, and must not write where that one may still read.
  if (a.start.tokens <= a.limit && abort_of(group) == 0) {
    const int64_t slots = static_cast<int64_t>(a.start.tokens) * a.choices;
    const int64_t pieces = static_cast<int64_t>(a.start.tokens) * (a.hidden / 8);
    copy(a.x, part<void>(group, group.rank, group.at.x[g]), pieces);
    if (a.forward == nullptr) {
      copy_words(a.expert_TK, part<int32_t>(group, group.rank, group.at.expert[g]), slots);
      copy_words(a.prob_TK, part<float>(group, group.rank, group.at.prob[g]), slots);
    } else {
      copy(a.dy, part<void>(group, group.rank, group.at.dy[g]), pieces);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&control->published, 1u) == gridDim.x - 1;  // all have read the epoch
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  if (threadIdx.x == 0) {
    control->published = 0;
    control->epoch = epoch;
  }
  Start start = a.start;
  start.forward = a.forward == nullptr ? 0 : *a.forward;
  start.epoch = epoch;
  for (int rank = threadIdx.x; rank < group.ranks; rank += blockDim.x) {
    send_start(part<Start>(group, rank, group.at.start[g]) + group.rank, start);
  }
}

__device__ __forceinline__ bool same_call(const Start& a, const Start& b) {
  return a.settings == b.settings && a.direction == b.direction && a.layer == b.layer &&
         a.forward == b.forward && a.rows == b.rows;
}

// The first of all starts that breaks a rule, and the same on every rank. A call is wrong that is
// not the one that most ranks make (by Boyer and Moore's vote; of two, rank 0).
__device__ __forceinline__ ExchangeFault judge(const Start* start, int ranks, int limit) {
  using Kind = ExchangeFaultKind;
  const auto fault = [](Kind kind, int rank, int64_t value, int64_t other) {
    return ExchangeFault{static_cast<int32_t>(kind), rank, value, other, 0};
  };
  int most = 0, lead = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const int tokens = start[rank].tokens;
    if (tokens < 0 || tokens > limit) return fault(Kind::kTokens, rank, tokens, limit);
    if (lead == 0) most = rank;
    lead += same_call(start[rank], start[most]) ? 1 : -1;
  }
  const Start wanted = start[most];
  for (int rank = 0; rank < ranks; ++rank) {
    const Start& s = start[rank];
    if (s.settings != wanted.settings)
      return fault(Kind::kSettings,
                   rank,
                   static_cast<int64_t>(s.settings),
                   static_cast<int64_t>(wanted.settings));
    if (s.direction != wanted.direction)
      return fault(Kind::kDirection, rank, s.direction, wanted.direction);
    if (s.layer != wanted.layer) return fault(Kind::kLayer, rank, s.layer, wanted.layer);
    if (s.forward != wanted.forward) return fault(Kind::kForward, rank, s.forward, wanted.forward);
    if (s.rows != wanted.rows) return fault(Kind::kRows, rank, s.rows, wanted.rows);
  }
  return fault(Kind::kNone, 0, 0, 0);
}

// The choices and probabilities of all ranks, a chunk of kGatherThreads x 4 slots at a time.
__device__ __forceinline__ void bring_choices(const GatherArguments& a, const Start* start,
                                              uint32_t g, bool refused) {
  constexpr int kEach = 4, kSpan = kEach * kGatherThreads;
  const int spans = tiles_of(a.peers.slots, kSpan);
  for (int job = blockIdx.x; job < spans * a.peers.ranks; job += gridDim.x) {
    const int rank = job / spans, first = (job - rank * spans) * kSpan + threadIdx.x;
    const int valid = refused ? 0 : start[rank].tokens * a.choices;
    if constexpr (kThrottledWire) {
      const int here = min(max(valid - (first - static_cast<int>(threadIdx.x)), 0), kSpan);
      if (threadIdx.x == 0) carry(a.peers, rank, a.peers.rank, 8 * here);
      __syncthreads();
    }
    const int32_t* const expert = part<int32_t>(a.peers, rank, a.peers.at.expert[g]);
    const float* const prob = part<float>(a.peers, rank, a.peers.at.prob[g]);
    int32_t id[kEach];
    float p[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int slot = first + i * kGatherThreads;
      id[i] = slot < valid ? load_written(expert + slot) : -1;
      p[i] = slot < valid ? load_written(prob + slot) : 0.0f;
    }
    const int64_t to = static_cast<int64_t>(rank) * a.peers.slots;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int slot = first + i * kGatherThreads;
      if (slot >= a.peers.slots) continue;
      a.expert[to + slot] = id[i];
      a.prob[to + slot] = p[i];
    }
  }
}

// One CTA.
__device__ __forceinline__ void admit(const GatherArguments& a, bool refused) {
  for (int i = threadIdx.x; i <= a.experts; i += blockDim.x) {
    a.admitted_start[i] = refused ? 0 : a.start[i];
    if (i < a.experts) a.admitted_count[i] = refused ? 0 : a.count[i];
  }
  if (threadIdx.x == 0) *a.admitted_faulty = refused ? 1 : *a.faulty;
}

__global__ void __launch_bounds__(kGatherThreads, 1)
    gather(const __grid_constant__ GatherArguments a) {
  __shared__ Start start[kMaxRanks];
  __shared__ ExchangeFault found;
  __shared__ bool absent;
  const Peers& group = a.peers;
  const uint32_t epoch = part<Control>(group, group.rank, group.at.control)->epoch;
  const uint32_t g = epoch % kGenerations;
  const uint64_t began = global_nanoseconds();
  if (threadIdx.x == 0) absent = false;
  __syncthreads();
  if (threadIdx.x < group.ranks) {  // thread p waits for rank p
    const bool came = await_start(group,
                                  part<Start>(group, group.rank, group.at.start[g]) + threadIdx.x,
                                  epoch,
                                  a.patience_ns,
                                  a.fault,
                                  start[threadIdx.x]);
    if (!came) absent = true;
  }
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    add_wait(group, kWaitStart, global_nanoseconds() - began);
  }
  if (threadIdx.x == 0) {
    found = absent ? ExchangeFault{static_cast<int32_t>(ExchangeFaultKind::kAbsent), 0, 0, 0, 0}
                   : judge(start, group.ranks, a.limit);
  }
  __syncthreads();
  const bool refused = found.kind != 0;
  if (a.expert != nullptr) bring_choices(a, start, g, refused);
  if (blockIdx.x != 0) return;
  if (a.start != nullptr) admit(a, refused);
  if (threadIdx.x != 0) return;
  if (a.epoch != nullptr) *a.epoch = epoch;
  if (a.refused != nullptr) *a.refused = found.kind;
  if (refused && !absent) report(group, a.record, found);
}

__global__ void __launch_bounds__(kRouteThreads, 8)
    route_view(const __grid_constant__ ViewArguments a) {
  extern __shared__ int32_t words[];
  __shared__ bool admitted;
  const RouteArguments& r = a.route;
  const int warp = threadIdx.x / 32, columns = r.experts + 1;
  int32_t* const start = words;
  if (warp == 0) {
    scan_starts(r, start);
    __syncwarp();
    const bool fits = within_budget(a, start, blockIdx.x == 0);
    if (threadIdx.x == 0) admitted = fits && *a.refused == 0;
  }
  __syncthreads();
  const int warps = gridDim.x * kRouteWarps, first = blockIdx.x * kRouteWarps + warp;
  if (first < r.chunks) view_chunk(a, first, start, words + (warp + 1) * columns, admitted);
  const int local = r.experts / a.peers.ranks;
  for (int expert = first; expert < local && admitted; expert += warps)
    view_padding(a, expert, start);
  if (blockIdx.x == 0) view_split(a, start, admitted);
}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("mok: ") + what +
                             " failed: " + cudaGetErrorString(status));
  }
}

}  // namespace

ExchangeFault* exchange_fault_record() {
  static ExchangeFault* const record = [] {
    void* memory = nullptr;
    if (cudaHostAlloc(&memory,
                      sizeof(ExchangeFault),
                      cudaHostAllocMapped | cudaHostAllocPortable) != cudaSuccess) {
      return static_cast<ExchangeFault*>(nullptr);
    }
    std::memset(memory, 0, sizeof(ExchangeFault));
    return static_cast<ExchangeFault*>(memory);
  }();
  return record;
}

void load_exchange(int32_t deadline) {
  check(set_deadline(deadline), "cudaMemcpyToSymbol");
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, publish), "cudaFuncGetAttributes");
  check(cudaFuncGetAttributes(&attributes, gather), "cudaFuncGetAttributes");
  check(cudaFuncGetAttributes(&attributes, route_view), "cudaFuncGetAttributes");
}

#ifdef MOK_THROTTLED_WIRE  // the host's part: where the rate goes, and in which number
extern "C" int64_t mok_wire_place() { return kWireOffset + offsetof(Wire, per_byte); }
extern "C" uint32_t mok_wire_per_byte(double rate) { return wire_per_byte(rate); }
#endif

void launch_publish(const PublishArguments& a) {
  publish<<<a.ctas, kPublishThreads, 0, static_cast<cudaStream_t>(a.stream)>>>(a);
  check(cudaGetLastError(), "launch of publish");
}

void launch_view(const ViewArguments& a) {
  launch_counts(a.route);
  route_view<<<tiles_of(a.route.chunks, kRouteWarps),
               kRouteThreads,
               (kRouteWarps + 1) * (a.route.experts + 1) * sizeof(int32_t),
               static_cast<cudaStream_t>(a.route.stream)>>>(a);
  check(cudaGetLastError(), "launch of route_view");
}

void launch_gather(const GatherArguments& a) {
  const int ctas = std::min(a.ctas, kGatherCtas);
  gather<<<ctas, kGatherThreads, 0, static_cast<cudaStream_t>(a.stream)>>>(a);
  check(cudaGetLastError(), "launch of gather");
}

}  // namespace mok
