// Brings rows in: a token's vector is read once and written to each of its rows.
//
// Token by token, not row by row: the source is read once instead of K times. Padding rows are not
// written: whoever reads the rows masks them.
#pragma once

#include "route.cuh"

namespace mok {

constexpr int kPiece = 8;  // bf16 elements of one 16-byte access

// All threads of a CTA; rows: kMaxChoices words of shared memory.
__device__ __forceinline__ void dispatch_token(const DispatchArguments& a, int source, int token,
                                               int32_t* rows, int32_t& listed) {
  if (threadIdx.x < 32) {
    const int count = list_rows(a.row_TK, token, a.choices, rows);
    if (threadIdx.x == 0) listed = count;
  }
  __syncthreads();
  const int pieces = a.hidden / kPiece, count = listed;
  const uint4* const from =
      static_cast<const uint4*>(a.tokens[source]) + static_cast<int64_t>(token) * pieces;
  uint4* const to = static_cast<uint4*>(a.rows[source]);
  for (int piece = threadIdx.x; piece < pieces; piece += blockDim.x) {
    const uint4 value = __ldg(from + piece);
    for (int i = 0; i < count; ++i) to[static_cast<int64_t>(rows[i]) * pieces + piece] = value;
  }
}

}  // namespace mok
