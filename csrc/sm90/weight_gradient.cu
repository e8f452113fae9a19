// Weight gradients: a^T · b over an expert's rows, added to the expert's own matrix or written over
// it.
#include "launch.cuh"

namespace mok::sm90 {
namespace {

template <Gradient TYPE, bool ACCUMULATE>
void launch(const WeightGradientArguments& x) {
  const Matrix gradient{
      .data = nullptr, .rows = x.m, .columns = x.n, .fp32 = TYPE == Gradient::kFp32};
  with_tiling<Role::kGradient>(x.launch.tiling, [&](auto tiling) {
    using T = decltype(tiling);
    using E = WriteGradient<T, TYPE, ACCUMULATE>;
    using K = GroupedGemm<Pass<Product::kWeightGradient, false, E>, T>;
    auto p = parameters<K>(x.rows, x.launch);
    p.pass.a = encode_operand(bf16(x.a, x.rows.capacity, x.m), {BLOCK_K, BLOCK_M / 64});
    p.pass.b = encode_operand(bf16(x.b, x.rows.capacity, x.n), {BLOCK_K, T::BLOCK_N / 64});
    p.pass.table = static_cast<const CUtensorMap*>(x.gradients);
    p.pass.header = table_header(gradient, operand_box<Role::kGradient, T>());
    p.schedule.m_tiles = tiles_of(x.m, BLOCK_M);
    p.schedule.n_tiles = tiles_of(x.n, T::BLOCK_N);
    p.schedule.keep_empty = !ACCUMULATE;
    p.pass.columns = x.n;
    p.pass.output_rows = x.m;
    launch_kernel<K>(p, x.launch);
  });
}

template <Gradient TYPE>
void choose_mode(const WeightGradientArguments& x) {
  x.accumulate ? launch<TYPE, true>(x) : launch<TYPE, false>(x);
}

}  // namespace

void launch_weight_gradient(const WeightGradientArguments& x) {
  x.type == Gradient::kFp32 ? choose_mode<Gradient::kFp32>(x) : choose_mode<Gradient::kBf16>(x);
}

}  // namespace mok::sm90
