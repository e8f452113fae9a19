// The two products that meet the activation: up (forward) and the gradient of down (backward).
#include "launch.cuh"

namespace mok::sm90 {
namespace {

// A row's parts in ascending column order: the order depends on F alone.
__global__ void add_prob_parts(Rows rows, const float* parts, float* d_prob, int count) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows.capacity || rows.experts == 0) return;
  int low = 0, high = rows.experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (rows.start[middle] <= row ? low : high) = middle;
  }
  const int inside = row - rows.start[low];
  if (inside < 0 || inside >= rows.count[low]) return;  // padding stays as it is
  const float2* const pairs =
      reinterpret_cast<const float2*>(parts + static_cast<int64_t>(row) * count);
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < count / 2; ++i) {  // F is a multiple of 64
    const float2 pair = pairs[i];
    sum += pair.x;
    sum += pair.y;
  }
  d_prob[row] = sum;
}

}  // namespace

void launch_up(const UpArguments& x) {
  const Matrix weight = bf16(nullptr, 2 * x.width, x.hidden);
  with_tiling<Role::kUp>(x.launch.tiling, [&](auto tiling) {
    using T = decltype(tiling);
    using E = SwiGlu<T>;
    using K = GroupedGemm<Pass<Product::kForward, true, E>, T>;
    auto p = parameters<K>(x.rows, x.launch);
    p.pass.a = encode_operand(bf16(x.x, x.rows.capacity, x.hidden), {BLOCK_M, 1});
    p.pass.out = encode_boxes(bf16(x.gate_up, x.rows.capacity, 2 * x.width), 2 * E::kWidth);
    p.pass.second = encode_boxes(bf16(x.activation, x.rows.capacity, x.width), 2 * E::kWidth);
    p.pass.table = static_cast<const CUtensorMap*>(x.weights);
    p.pass.header = table_header(weight, operand_box<Role::kUp, T>());
    p.schedule.n_tiles = tiles_of(x.width, T::BLOCK_N / 2);
    p.schedule.depth = x.hidden / BLOCK_K;
    p.pass.columns = x.width;
    p.pass.out_rows = static_cast<__nv_bfloat16*>(x.gate_up);
    p.pass.second_rows = static_cast<__nv_bfloat16*>(x.activation);
    p.pass.prob = x.prob;
    launch_kernel<K>(p, x.launch);
  });
}

void launch_down_gradient(const DownGradientArguments& x) {
  const Matrix weight = bf16(nullptr, x.hidden, x.width);
  with_tiling<Role::kDownGradient>(x.launch.tiling, [&](auto tiling) {
    using T = decltype(tiling);
    using E = SwiGluGradient<T>;
    using K = GroupedGemm<Pass<Product::kInputGradient, false, E>, T>;
    auto p = parameters<K>(x.rows, x.launch);
    p.pass.a = encode_operand(bf16(x.dy, x.rows.capacity, x.hidden), {BLOCK_M, 1});
    p.pass.b = encode_gate_up(bf16(x.gate_up, x.rows.capacity, 2 * x.width), 2 * E::kWidth);
    p.pass.out = encode_gate_up(bf16(x.d_gate_up, x.rows.capacity, 2 * x.width), 2 * E::kWidth);
    p.pass.second = encode_boxes(bf16(x.activation, x.rows.capacity, x.width), 2 * E::kWidth);
    p.pass.table = static_cast<const CUtensorMap*>(x.weights);
    p.pass.header = table_header(weight, operand_box<Role::kDownGradient, T>());
    p.schedule.n_tiles = tiles_of(x.width, T::BLOCK_N);
    p.schedule.depth = x.hidden / BLOCK_K;
    p.pass.columns = x.width;
    p.pass.out_rows = static_cast<__nv_bfloat16*>(x.d_gate_up);
    p.pass.second_rows = static_cast<__nv_bfloat16*>(x.activation);
    p.pass.prob = x.prob;
    p.pass.parts = x.prob_parts;
    launch_kernel<K>(p, x.launch);
  });
  constexpr int kRowsPerCta = 128;
  add_prob_parts<<<tiles_of(x.rows.capacity, kRowsPerCta),
                   kRowsPerCta,
                   0,
                   static_cast<cudaStream_t>(x.launch.stream)>>>(
      x.rows, x.prob_parts, x.d_prob, x.width / kPartColumns);
  check(cudaGetLastError(), "launch of add_prob_parts");
}

}  // namespace mok::sm90
