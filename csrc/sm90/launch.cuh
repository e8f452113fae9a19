// Host side of one launch: tensor maps of the operands, shared memory, grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "grouped_gemm.cuh"

namespace mok::sm90 {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("mok: ") + what +
                             " failed: " + cudaGetErrorString(status));
  }
}

// An operand: {64 columns, rows, columns / 64}, in one box.
CUtensorMap encode_operand(const Matrix& matrix, OperandBox box);
// A matrix that the epilogue writes, in boxes of 64 rows by `bytes`.
CUtensorMap encode_boxes(const Matrix& matrix, int bytes);
// Gate and up, [R, 2F], as {F, R, 2}: one transfer moves a box of each.
CUtensorMap encode_gate_up(const Matrix& matrix, int bytes);
int sm_count(int device);

inline Matrix bf16(const void* data, int64_t rows, int64_t columns) {
  return {.data = data, .rows = rows, .columns = columns, .fp32 = false};
}

inline TableHeader table_header(const Matrix& x, OperandBox box) {
  return {.rows = x.rows,
          .columns = x.columns,
          .fp32 = x.fp32,
          .box_rows = box.rows,
          .box_blocks = box.blocks,
          .magic = 0x6d6f6b};
}

template <class K>
typename K::Parameters parameters(const Rows& rows, const Launch& launch) {
  typename K::Parameters p{};
  p.schedule.rows = rows;
  p.pass.experts = rows.experts;
  p.tickets = launch.tickets;
  p.fault = fault_record();
  return p;
}

// Once for each kernel and device, since it costs about as much as a launch. Two threads may both
// do it.
template <class K>
void allow_shared_memory(int device, int bytes) {
  static std::atomic<uint64_t> allowed{0};  // a bit for each device
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return;
  check(cudaFuncSetAttribute(grouped_gemm<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute");
  allowed.fetch_or(bit, std::memory_order_relaxed);
}

// On the current device, which is launch.device.
template <class K>
void launch_kernel(const typename K::Parameters& p, const Launch& launch) {
  constexpr int kBytes = sizeof(typename K::Storage);
  allow_shared_memory<K>(launch.device, kBytes);
  const int ctas = launch.ctas > 0 ? launch.ctas : sm_count(launch.device);
  grouped_gemm<K><<<ctas, kThreads, kBytes, static_cast<cudaStream_t>(launch.stream)>>>(p);
  check(cudaGetLastError(), "launch of grouped_gemm");
}

// A kernel is loaded at its first launch, or here. Loading may wait for kernels that run.
template <class K>
void load_kernel() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, grouped_gemm<K>), "cudaFuncGetAttributes");
}

}  // namespace mok::sm90
