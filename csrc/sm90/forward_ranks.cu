// The forward kernel of several ranks; forward.cu sets its parameters.
#include "forward.cuh"

namespace mok::sm90 {

void launch_forward_of_ranks(const DirectionParameters& p, const DirectionLaunch& launch) {
  launch_direction<Forward<true>>(p, launch);
}

void load_forward_of_ranks(int32_t deadline) {
  check(set_deadline(deadline), "cudaMemcpyToSymbol");
  load_kernel<Forward<true>>();
}

}  // namespace mok::sm90
