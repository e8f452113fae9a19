// Megatron's dense routing -> choices, and the gradient of the probabilities back to dense.
//
// One warp a token, which reads its row of the map once: 32 experts a step, and an expert's slot is
// the number of chosen ones before it. So the experts of a token ascend, unused slots hold -1 and
// probability 0, and a token with more routes than slots holds kOverfull in all of them.
#pragma once

#include <cstdint>

#include "../layer_arguments.h"

namespace mok {

constexpr int kChoiceWarps = 8;  // of a CTA
constexpr int kOverfull = -2;    // OVERFULL in mok_megatron/contract.py

template <class P>
__device__ __forceinline__ void choose_token(const ChoiceArguments& a, int64_t token, int lane) {
  const bool* const map_E = a.map_TE + token * a.experts;
  const P* const prob_E = static_cast<const P*>(a.dense_TE) + token * a.experts;
  int32_t* const expert_K = a.expert_TK + token * a.choices;
  float* const prob_K = a.prob_TK + token * a.choices;
  int found = 0;
  for (int base = 0; base < a.experts; base += 32) {
    const int expert = base + lane;
    const bool chosen = expert < a.experts && map_E[expert];
    const uint32_t all = __ballot_sync(~0u, chosen);
    const int slot = found + __popc(all & ((1u << lane) - 1));
    if (chosen && slot < a.choices) {
      expert_K[slot] = expert;
      prob_K[slot] = static_cast<float>(prob_E[expert]);
    }
    found += __popc(all);
  }
  __syncwarp();
  const bool overfull = found > a.choices;
  for (int slot = overfull ? lane : found + lane; slot < a.choices; slot += 32) {
    expert_K[slot] = overfull ? kOverfull : -1;
    prob_K[slot] = 0.0f;
  }
}

// d_dense [T, E] of d_prob [T, K]: zero where nothing was chosen.
template <class P>
__device__ __forceinline__ void spread_token(const SpreadArguments& a, int64_t token, int lane) {
  P* const dense_E = static_cast<P*>(a.d_dense_TE) + token * a.experts;
  for (int expert = lane; expert < a.experts; expert += 32) dense_E[expert] = static_cast<P>(0.0f);
  __syncwarp();
  for (int slot = lane; slot < a.choices; slot += 32) {
    const int expert = a.expert_TK[token * a.choices + slot];
    if (expert >= 0) dense_E[expert] = static_cast<P>(a.d_prob_TK[token * a.choices + slot]);
  }
}

}  // namespace mok
