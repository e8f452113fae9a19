// The backward kernels of several ranks; backward.cu sets their parameters.
#include "backward.cuh"

namespace mok::sm90 {

void launch_backward_of_ranks(const DirectionParameters& p, const DirectionLaunch& launch,
                              Gradient type, bool accumulate) {
  launch_backward<true>(p, launch, type, accumulate);
}

void load_backward_of_ranks(int32_t deadline) {
  check(set_deadline(deadline), "cudaMemcpyToSymbol");
  for (const Gradient type : {Gradient::kFp32, Gradient::kBf16}) {
    for (const bool accumulate : {false, true}) {
      with_gradients<true>(type, accumulate, [](auto kernel) { load_kernel<decltype(kernel)>(); });
    }
  }
}

}  // namespace mok::sm90
