// Brings rows home: a token's rows are added in slot order, then the shared expert's, in fp32,
// rounded once.
//
// The order is fixed by the slots alone. A call in which a choice broke a rule has no result: all
// of it becomes NaN, by select, whatever the rows hold.
#pragma once

#include "../exchange_arguments.h"
#include "ptx.cuh"

namespace mok {

constexpr int kPiece = 8;  // bf16 elements of one 16-byte access

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

// One warp: its lanes take a token's pieces. The rows may have been written by other CTAs of this
// grid, or by other ranks, which the caller has waited for. home: of several ranks, where the rows
// of other ranks' experts have arrived, a slot's at its number. added: of this lane, grows by the
// pieces of rows that it adds.
template <bool RANKS = false>
__device__ __forceinline__ void combine_token(const CombineArguments& a, int token, int lane,
                                              uint32_t& added, const uint4* home = nullptr) {
  constexpr int kGroup = 8, kAtOnce = 2;  // rows, and pieces of each, under way
  const int pieces = a.hidden / kPiece;
  const bool faulty = *a.faulty != 0;
  const int64_t first = static_cast<int64_t>(token) * pieces;
  const int32_t* const row_K = a.row_TK + static_cast<int64_t>(token) * a.choices;
  const uint4* const from = static_cast<const uint4*>(a.rows);
  const uint4* const shared = static_cast<const uint4*>(a.shared);
  uint4* const out = static_cast<uint4*>(a.out);
  for (int piece = lane; piece < pieces; piece += 32 * kAtOnce) {
    const bool two = piece + 32 < pieces;
    Sum sum[kAtOnce]{};
    for (int base = 0; base < a.choices; base += kGroup) {
      int row[kGroup];
      uint4 value[kAtOnce][kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) row[i] = base + i < a.choices ? row_K[base + i] : -1;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const uint4* at = from + static_cast<int64_t>(row[i]) * pieces + piece;
        if (RANKS && row[i] == kElsewhere) {
          const int64_t slot = static_cast<int64_t>(token) * a.choices + base + i;
          at = home + slot * pieces + piece;
        }
        if (RANKS ? row[i] == -1 : row[i] < 0) continue;
        value[0][i] = load_written(at);
        if (two) value[1][i] = load_written(at + 32);
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (RANKS ? row[i] == -1 : row[i] < 0) continue;
        sum[0].add(value[0][i]);
        if (two) sum[1].add(value[1][i]);
        added += two ? 2 : 1;
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i > 0 && !two) break;
      const int64_t at = first + piece + 32 * i;
      if (shared != nullptr) sum[i].add(load_written(shared + at));
      constexpr uint32_t kNaN = 0x7fff7fffu;
      out[at] = faulty ? uint4{kNaN, kNaN, kNaN, kNaN} : sum[i].rounded();
    }
  }
}

// One warp: a token of a call that has no result.
__device__ __forceinline__ void spoil_token(const CombineArguments& a, int token, int lane) {
  const int pieces = a.hidden / kPiece;
  uint4* const out = static_cast<uint4*>(a.out) + static_cast<int64_t>(token) * pieces;
  constexpr uint32_t kNaN = 0x7fff7fffu;
  for (int piece = lane; piece < pieces; piece += 32) out[piece] = {kNaN, kNaN, kNaN, kNaN};
  if (a.d_prob_TK == nullptr) return;
  for (int k = lane; k < a.choices; k += 32) {
    a.d_prob_TK[static_cast<int64_t>(token) * a.choices + k] = __int_as_float(0x7fffffff);
  }
}

}  // namespace mok
