// The forward kernel, of one rank (forward.cu) or of several (forward_ranks.cu).
#pragma once

#include "direction_launch.cuh"

namespace mok::sm90 {

using ForwardTiling = Moving192;
constexpr int kColumns = 32;      // of a unit of up: SwiGLU's half tiles have 96 columns
constexpr int kDownColumns = 64;  // of a unit of down

template <bool RANKS>
struct Forward
    : Direction<Forward<RANKS>, ForwardTiling, kBoxRows * 2 * kDownColumns, false, RANKS> {
  using Up =
      Pass<Product::kForward, true, SwiGlu<ForwardTiling, RANKS ? Laps::kSeveral : Laps::kOne>>;
  using Down = Pass<Product::kForward, false, StoreRows<ForwardTiling, kDownColumns>>;
  static_assert(Up::Epilogue::kWidth == kColumns);

  template <class F>
  static __device__ __forceinline__ void with_kind(int kind, const PassParameters& q, F& f) {
    kind == 0 ? f(Up{}, q) : f(Down{}, q);
  }
};

}  // namespace mok::sm90
