// What crosses the border between ops.cpp and the kernels: plain data, no torch, no CUDA.
//
// Letters: R rows (128-aligned start per expert, padding after each), L local experts, H hidden,
// F expert width. Pointers are device pointers unless a comment says otherwise.
#pragma once

#include <cstdint>

namespace mok {

// Where each expert's rows are. `start` has L + 1 entries, non-decreasing multiples of 128, the
// last one is the end; `count` has L. Both are read on the device only: no host knows the split.
struct Rows {
  const int32_t* start;
  const int32_t* count;
  int32_t experts;
  int32_t capacity;  // R: rows that the buffers hold
};

// How a launch runs. None of it may change a bit of any result.
struct Launch {
  uint32_t* tickets;  // two words: next ticket, CTAs that have finished; left at zero by the kernel
  int32_t ctas;       // 0: one for each SM
  int32_t
      tiling;  // 0: the table's choice (sm90/tiling.cuh); otherwise a class, for tests and tuning
  int32_t device;
  void* stream;
};

// out[R, columns] = a[R, depth] · W^T with W [columns, depth], or · W with W [depth, columns].
struct ProductArguments {
  Rows rows;
  Launch launch;
  const void* a;
  const void* weights;  // table of tensor maps, one for each expert
  void* out;
  int32_t columns;
  int32_t depth;
};

// gate_up[R, 2F] = x[R, H] · W1^T;  activation[R, F] = silu(gate) · up · prob.
struct UpArguments {
  Rows rows;
  Launch launch;
  const void* x;
  const void* weights;
  const float* prob;
  void* gate_up;
  void* activation;
  int32_t hidden;
  int32_t width;
};

// da = dy[R, H] · W2;  d_gate_up, activation and prob's gradient from it and the kept gate_up.
struct DownGradientArguments {
  Rows rows;
  Launch launch;
  const void* dy;
  const void* weights;
  const float* prob;
  const void* gate_up;
  void* d_gate_up;
  void* activation;
  float* prob_parts;  // [R, F / kPartColumns]: sums over that many columns each
  float* d_prob;      // [R]: their sum in column order
  int32_t hidden;
  int32_t width;
};

enum class Gradient : int32_t { kFp32 = 0, kBf16 = 1 };

// d_weight_e[M, N] (+)= a^T · b over the rows of expert e, a [R, M], b [R, N].
struct WeightGradientArguments {
  Rows rows;
  Launch launch;
  const void* a;
  const void* b;
  const void* gradients;  // table of tensor maps, one for each expert
  int32_t m;
  int32_t n;
  Gradient type;
  bool accumulate;  // false: the old value is not read
};

constexpr int kPartColumns = 32;

// A row-major, contiguous matrix.
struct Matrix {
  const void* data;
  int64_t rows;
  int64_t columns;
  bool fp32;  // else bf16
};

// What a table of tensor maps serves: the boxes differ.
enum class Role : int32_t { kProduct, kInputGradient, kUp, kDownGradient, kGradient };

// A table on the device: a map of 128 bytes for each expert, then this record, which load compares.
constexpr int kTensorMapBytes = 128;
struct TableHeader {
  int64_t rows;
  int64_t columns;
  int32_t fp32;
  int32_t box_rows;
  int32_t box_blocks;
  int32_t magic;
};

namespace sm90 {
// Each throws std::runtime_error when CUDA refuses.
int compute_capability(int device);  // 90 on Hopper
int sm_count(int device);
void encode_table(Role role, int tiling, const Matrix* matrices, int count, void* host_table);
void launch_product(const ProductArguments& arguments);
void launch_input_gradient(const ProductArguments& arguments);
void launch_up(const UpArguments& arguments);
void launch_down_gradient(const DownGradientArguments& arguments);
void launch_weight_gradient(const WeightGradientArguments& arguments);
}  // namespace sm90
}  // namespace mok
