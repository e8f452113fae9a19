// Brings rows home: a token's rows are added in slot order, then the shared expert's, in fp32,
// rounded once.
//
// The order is fixed by the slots alone. A call in which a choice broke a rule has no result: all
// of it becomes NaN, by select, whatever the rows hold.
#pragma once

#include "dispatch.cuh"
#include "ptx.cuh"

namespace mok {

struct Sum {  // of one piece
  float value[kPiece];

  __device__ __forceinline__ void add(const uint4& piece) {
    const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      value[2 * i] += low_of(pairs[i]);
      value[2 * i + 1] += high_of(pairs[i]);
    }
  }

  __device__ __forceinline__ uint4 rounded() const {
    return {pack(value[0], value[1]),
            pack(value[2], value[3]),
            pack(value[4], value[5]),
            pack(value[6], value[7])};
  }
};

// All threads of a CTA; rows: kMaxChoices words of shared memory.
__device__ __forceinline__ void combine_token(const CombineArguments& a, int token, int32_t* rows,
                                              int32_t& listed) {
  if (threadIdx.x < 32) {
    const int count = list_rows(a.row_TK, token, a.choices, rows);
    if (threadIdx.x == 0) listed = count;
  }
  __syncthreads();
  const int pieces = a.hidden / kPiece, count = listed;
  const bool faulty = *a.faulty != 0;
  const int64_t first = static_cast<int64_t>(token) * pieces;
  const uint4* const from = static_cast<const uint4*>(a.rows);
  const uint4* const shared = static_cast<const uint4*>(a.shared);
  uint4* const out = static_cast<uint4*>(a.out);
  for (int piece = threadIdx.x; piece < pieces; piece += blockDim.x) {
    Sum sum{};
#pragma unroll 4
    for (int i = 0; i < count; ++i)
      sum.add(__ldg(from + static_cast<int64_t>(rows[i]) * pieces + piece));
    if (shared != nullptr) sum.add(__ldg(shared + first + piece));
    constexpr uint32_t kNaN = 0x7fff7fffu;
    out[first + piece] = faulty ? uint4{kNaN, kNaN, kNaN, kNaN} : sum.rounded();
  }
  if (a.d_prob_R != nullptr && static_cast<int>(threadIdx.x) < a.choices) {
    const int64_t slot = static_cast<int64_t>(token) * a.choices + threadIdx.x;
    const int row = a.row_TK[slot];
    a.d_prob_TK[slot] = faulty ? __int_as_float(0x7fffffff) : row < 0 ? 0.0f : a.d_prob_R[row];
  }
}

}  // namespace mok
