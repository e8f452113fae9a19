// Writes a plan's first tickets and zeroes its counters, before the direction's grid starts.
#include "plan_words.cuh"

namespace mok {
namespace {

constexpr int kPlanThreads = 1024;

// One CTA. A warp scans the segments 32 at a time.
__global__ void __launch_bounds__(kPlanThreads)
    plan_work(const __grid_constant__ PlanShape shape, int32_t* first, int32_t* zeroed, int words) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x >= 32) {
    for (int i = threadIdx.x - 32; i < words; i += kPlanThreads - 32) zeroed[i] = 0;
    return;
  }
  const int segments = shape.segments();
  int before = 0;
  for (int base = 0; base <= segments; base += 32) {
    const int index = base + lane;
    const int tiles = index < segments ? segment_tiles(shape, segment_at(shape, index)) : 0;
    int sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (index <= segments) first[index] = before + sum - tiles;
    before += __shfl_sync(~0u, sum, 31);
  }
}

}  // namespace

int64_t direction_words(int64_t rows, int64_t tokens, int64_t experts) {
  return PlanWords::of(rows, tokens, experts).total;
}

void load_plan() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, plan_work) != cudaSuccess) {
    throw std::runtime_error("mok: plan_work cannot be loaded");
  }
}

void launch_plan(const PlanShape& shape, int32_t* words, void* stream) {
  const PlanWords at = PlanWords::of(shape.capacity, shape.tokens, shape.experts);
  plan_work<<<1, kPlanThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      shape, words + at.first, words, static_cast<int>(at.first));
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("mok: launch of plan_work failed: ") +
                             cudaGetErrorString(status));
  }
}

}  // namespace mok
