// Brings rows home: a token's rows are added in slot order, then the shared expert's, in fp32,
// rounded once.
//
// Rows come through shared memory, in chunks, of which each warp has a ring: 128 KB a SM under way.
// Loads into registers were up to 2 % of a layer slower; believed is that each holds a line of L1
// until it is back, and L1 is what shared memory leaves: 28 KB (scripts/results/attempts.md, #39).
//
// Chunk number c of a warp uses slot c % kCombineSlots; `full` completes phase c / kCombineSlots of
// a slot when its bytes are in. The warp that asks for a chunk is its only reader, and asks for the
// slot's next one when all its lanes have read it: nobody is two phases behind.
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

constexpr int kCombineBytes = 2048;  // of a chunk
constexpr int kCombineSlots = 8;     // chunks of a warp under way
static_assert(256 % (2 * kCombineSlots) == 0, "chunks are counted modulo 256");

// racecheck follows no order that a __syncwarp makes, so in its build (kWarpArrivals) each lane
// counts the chunks for itself, and tells through `read` that it has read one.
constexpr bool kEveryLane = kWarpArrivals > 1;

struct CombineStorage {  // of a warp, beside its ring
  uint64_t full[kCombineSlots];
  uint64_t read[kEveryLane ? kCombineSlots : 1];
  uint8_t chunks[kWarpArrivals];  // so far, modulo 256: a slot and its phase repeat with 16
};

__device__ __forceinline__ void prepare(CombineStorage& storage) {
  for (uint64_t& full : storage.full) barrier_init(full, 1);
  if (kEveryLane) {
    for (uint64_t& read : storage.read) barrier_init(read, kWarpArrivals);
  }
  for (uint8_t& chunks : storage.chunks) chunks = 0;
}

// One warp: tokens up to `end`, whose rows are in memory. They may have been written by other CTAs
// of this grid, or by other ranks; the caller has waited for them and fenced. RANKS: of several
// ranks, whose rows of other ranks' experts have arrived in `home`, a slot's at its number.
template <bool RANKS>
struct Combiner {
  const CombineArguments& a;
  const uint8_t* home;
  CombineStorage& storage;
  const uint32_t ring;  // shared address
  Fault* fault;
  const int end;
  int token, block = 0, k = 0;  // of the next chunk to ask for
  uint32_t asked = storage.chunks[lane_index() % kWarpArrivals], used = asked;

  // Returns the pieces of routed rows that this lane has added.
  __device__ __forceinline__ uint32_t run() {
    uint32_t added = 0;
    const int first = token;
    for (int i = 0; i < kCombineSlots; ++i) ask();
    for (int t = first; t < end; ++t) {
      for (int b = 0; b < blocks(); ++b) added += add(t, b);
    }
    if (kEveryLane || lane_index() == 0)
      storage.chunks[lane_index() % kWarpArrivals] = static_cast<uint8_t>(used);
    __syncwarp();
    return added;
  }

 private:
  __device__ __forceinline__ int row_bytes() const { return 2 * a.hidden; }
  __device__ __forceinline__ int blocks() const {
    return (row_bytes() + kCombineBytes - 1) / kCombineBytes;
  }
  __device__ __forceinline__ int bytes_of(int b) const {
    return min(row_bytes() - b * kCombineBytes, kCombineBytes);
  }
  __device__ __forceinline__ int sources() const {
    return a.choices + (a.shared != nullptr ? 1 : 0);
  }

  // Row number i of a token, the shared expert's behind the routed ones; null where there is none.
  __device__ __forceinline__ const uint8_t* row(int t, int i) const {
    const auto at = [this](const void* rows, int64_t number) {
      return static_cast<const uint8_t*>(rows) + number * row_bytes();
    };
    if (i == a.choices) return at(a.shared, t);
    const int64_t slot = static_cast<int64_t>(t) * a.choices + i;
    const int number = a.row_TK[slot];
    if (RANKS && number == kElsewhere) return at(home, slot);
    return number < 0 ? nullptr : at(a.rows, number);
  }

  __device__ __forceinline__ void ask() {
    while (token < end) {
      const uint8_t* const from = row(token, k);
      const int b = block;
      if (++k == sources()) {
        k = 0;
        if (++block == blocks()) {
          block = 0;
          ++token;
        }
      }
      if (from == nullptr) continue;
      const uint32_t slot = asked % kCombineSlots, round = asked / kCombineSlots;
      ++asked;
      if (lane_index() == 0) {
        if (kEveryLane) wait(storage.read[slot], (round & 1) ^ 1, fault, Tag::kCombineChunk);
        arrive_expect(storage.full[slot], bytes_of(b));
        bulk_load(
            ring + slot * kCombineBytes, from + b * kCombineBytes, bytes_of(b), storage.full[slot]);
      }
      return;
    }
  }

  __device__ __forceinline__ uint32_t add(int t, int b) {
    constexpr int kPieces = kCombineBytes / 16 / 32;  // of a lane
    const int lane = lane_index(), pieces = bytes_of(b) / 16;
    uint32_t added = 0;
    Sum sum[kPieces]{};
    for (int i = 0; i < sources(); ++i) {
      if (row(t, i) == nullptr) continue;
      const uint32_t slot = used % kCombineSlots;
      wait(storage.full[slot], used / kCombineSlots & 1, fault, Tag::kCombineChunk);
      ++used;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int piece = lane + 32 * j;
        if (piece >= pieces) break;
        sum[j].add(load_shared_16(ring + slot * kCombineBytes + 16 * piece));
        added += i < a.choices ? 1 : 0;
      }
      __syncwarp();
      if (kEveryLane) arrive_of_warp(storage.read[slot]);
      ask();
    }
    const bool faulty = *a.faulty != 0;
    uint4* const out = static_cast<uint4*>(a.out) + static_cast<int64_t>(t) * (row_bytes() / 16) +
                       b * (kCombineBytes / 16);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int piece = lane + 32 * j;
      if (piece >= pieces) break;
      constexpr uint32_t kNaN = 0x7fff7fffu;
      out[piece] = faulty ? uint4{kNaN, kNaN, kNaN, kNaN} : sum[j].rounded();
    }
    return added;
  }
};

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
