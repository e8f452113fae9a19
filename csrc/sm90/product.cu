// Plain products: out = a · W^T (forward) and a · W (input gradient), bf16.
#include "launch.cuh"

namespace mok::sm90 {
namespace {

template <Role ROLE>
void launch(const ProductArguments& x) {
  constexpr Product kProduct = ROLE == Role::kProduct ? Product::kForward : Product::kInputGradient;
  const bool forward = kProduct == Product::kForward;
  const Matrix weight = bf16(nullptr, forward ? x.columns : x.depth, forward ? x.depth : x.columns);
  with_tiling<ROLE>(x.launch.tiling, [&](auto tiling) {
    using T = decltype(tiling);
    using K = GroupedGemm<Pass<kProduct, false, StoreRows<T>>, T>;
    auto p = parameters<K>(x.rows, x.launch);
    p.pass.a = encode_operand(bf16(x.a, x.rows.capacity, x.depth), {BLOCK_M, 1});
    p.pass.out = encode_boxes(bf16(x.out, x.rows.capacity, x.columns), 128);
    p.pass.table = static_cast<const CUtensorMap*>(x.weights);
    p.pass.header = table_header(weight, operand_box<ROLE, T>());
    p.schedule.n_tiles = tiles_of(x.columns, T::BLOCK_N);
    p.schedule.depth = x.depth / BLOCK_K;
    p.pass.columns = x.columns;
    p.pass.out_rows = static_cast<__nv_bfloat16*>(x.out);
    launch_kernel<K>(p, x.launch);
  });
}

}  // namespace

void launch_product(const ProductArguments& x) { launch<Role::kProduct>(x); }
void launch_input_gradient(const ProductArguments& x) { launch<Role::kInputGradient>(x); }

}  // namespace mok::sm90
