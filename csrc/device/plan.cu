// Writes a plan's first tickets and zeroes its counters, before the direction's grid starts.
#include "plan_words.cuh"

namespace mok {
namespace {

constexpr int kPlanThreads = 1024;

// One CTA. A warp finds laps and scans the segments 32 at a time.
__global__ void __launch_bounds__(kPlanThreads)
    plan_work(const __grid_constant__ PlanShape shape, int32_t* words, const PlanWords at) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x >= 32) {
    for (int i = threadIdx.x - 32; i < at.lap_count; i += kPlanThreads - 32) words[i] = 0;
    return;
  }
  __shared__ Lap laps[kLapEntries];
  const int count = __shfl_sync(~0u, lane == 0 ? find_laps(shape, laps) : 0, 0);
  __syncwarp();
  for (int lap = lane; lap <= count; lap += 32) {
    reinterpret_cast<Lap*>(words + at.lap)[lap] = laps[lap];
  }
  if (lane == 0) words[at.lap_count] = count;
  const int segments = laps[count].segment;
  int before = 0;
  for (int base = 0; base < segments + 4; base += 32) {
    const int index = base + lane;
    int tiles = 0;
    if (index < segments) {
      const Segment segment = segment_at(shape, laps, index);
      reinterpret_cast<Segment*>(words + at.segment)[index] = segment;
      tiles = segment_tiles(shape, segment);
    }
    int sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (index < segments + 4) words[at.first + index] = before + sum - tiles;  // 3 are never used
    before += __shfl_sync(~0u, sum, 31);
  }
}

}  // namespace

int64_t direction_words(int64_t rows, int64_t capacity, int64_t most, int64_t tokens,
                        int64_t experts) {
  return PlanWords::of(most, tokens, experts, most_laps(most, rows, capacity)).total;
}

void load_plan() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, plan_work) != cudaSuccess) {
    throw std::runtime_error("mok: plan_work cannot be loaded");
  }
}

void launch_plan(const PlanShape& shape, int32_t* words, void* stream) {
  const PlanWords at = PlanWords::of(shape.most, shape.tokens, shape.experts, shape.laps);
  plan_work<<<1, kPlanThreads, 0, static_cast<cudaStream_t>(stream)>>>(shape, words, at);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("mok: launch of plan_work failed: ") +
                             cudaGetErrorString(status));
  }
}

}  // namespace mok
