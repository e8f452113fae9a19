// The forward kernel, of one rank (forward.cu) or of several (forward_ranks.cu).
#pragma once

#include "direction_launch.cuh"

namespace mok::sm90 {

#ifndef FV
#define FV 0
#endif
constexpr int kDeepStages = FV == 0 ? 5 : 4, kDeepBoxes = FV == 0 ? 2 : 6,
              kForwardMoves = FV == 0 ? 4 : 8, kDownColumns = FV == 0 ? 32 : 64;
using ForwardTiling = Tiling<192, kDeepStages, kDeepBoxes>;
constexpr int kColumns = 32;  // of a unit: SwiGLU's half tiles have 96 columns

template <bool RANKS>
struct Forward : Direction<Forward<RANKS>, ForwardTiling, kBoxRows * 2 * kDownColumns,
                           kForwardMoves, false, RANKS> {
  using Up = Pass<Product::kForward, true, SwiGlu<ForwardTiling>>;
  using Down = Pass<Product::kForward, false, StoreRows<ForwardTiling, kDownColumns>>;
  static_assert(SwiGlu<ForwardTiling>::kWidth == kColumns);

  template <class F>
  static __device__ __forceinline__ void with_kind(int kind, const PassParameters& q, F& f) {
    kind == 0 ? f(Up{}, q) : f(Down{}, q);
  }
};

}  // namespace mok::sm90
