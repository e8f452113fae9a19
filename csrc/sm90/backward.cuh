// The backward kernel, of one rank (backward.cu) or of several (backward_ranks.cu).
#pragma once

#include "direction_launch.cuh"

namespace mok::sm90 {

using BackwardTiling = Moving192;

template <Gradient TYPE, bool ACCUMULATE, bool RANKS>
struct Backward
    : Direction<Backward<TYPE, ACCUMULATE, RANKS>, BackwardTiling, 2 * kBoxBytes, true, RANKS> {
  using Down = Pass<Product::kInputGradient, false,
                    SwiGluGradient<BackwardTiling, RANKS ? Laps::kSeveral : Laps::kOne>>;
  using Up = Pass<Product::kInputGradient, false, StoreRows<BackwardTiling>>;
  using Weight =
      Pass<Product::kWeightGradient, false, WriteGradient<BackwardTiling, TYPE, ACCUMULATE>>;

  using Again = Pass<Product::kForward, true, SwiGlu<BackwardTiling, Laps::kAgain>>;

  template <class F>
  static __device__ __forceinline__ void with_kind(int kind, const PassParameters& q, F& f) {
    if constexpr (RANKS) {
      if (kind == 4) return f(Again{}, q);
    }
    kind == 0 ? f(Down{}, q) : kind == 1 ? f(Up{}, q) : f(Weight{}, q);
  }
};

template <bool RANKS, class What>
void with_gradients(Gradient type, bool accumulate, What what) {
  constexpr Gradient kWide = Gradient::kFp32, kNarrow = Gradient::kBf16;
  if (accumulate) {
    type == kWide ? what(Backward<kWide, true, RANKS>{}) : what(Backward<kNarrow, true, RANKS>{});
  } else {
    type == kWide ? what(Backward<kWide, false, RANKS>{}) : what(Backward<kNarrow, false, RANKS>{});
  }
}

template <bool RANKS>
void launch_backward(const DirectionParameters& p, const DirectionLaunch& launch, Gradient type,
                     bool accumulate) {
  with_gradients<RANKS>(
      type, accumulate, [&](auto kernel) { launch_direction<decltype(kernel)>(p, launch); });
}

}  // namespace mok::sm90
