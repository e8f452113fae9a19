// Top-k choices -> schedule: count, prefix, place. A stable counting sort of the slots by expert.
//
// Order of rows: expert, token, choice; the same on every run, because a slot's row is a function
// of the choices alone: which thread or CTA does the work, and when, changes nothing. No atomics
// but in the sums of the census.
//
// A chunk is kChunk consecutive slots and belongs to one warp.
//   count   a chunk's slots per expert                                 -> counts[chunk]
//   prefix  per expert, over the chunks: counts before each chunk, sum -> counts[chunk], counts[C]
//   place   row = start of the expert + count before the chunk + slots of the expert before this
//   one in the chunk
// Each phase reads what all chunks of the phase before it wrote: a kernel boundary today.
//
// Choices are data: every slot is checked in both passes, always. A slot whose id is out of range,
// or repeats an earlier one of its token, or whose probability is not finite, is counted in column
// E and gets no row, so that no bad id becomes an address; the first such slot, in slot order, is
// written into the fault record, and combine fills the call's results with NaN.
#pragma once

#include <cstdint>

#include "../layer_arguments.h"
#include "schedule.cuh"

namespace mok {

constexpr int kRouteWarps = 4;
constexpr int kRouteThreads = 32 * kRouteWarps;
constexpr int kPrefixColumns = 32, kPrefixSegments = 32;  // of a CTA of `prefix`

// The first rule that a slot which is not empty breaks, by its expert and probability.
__device__ __forceinline__ RouteFaultKind broken_rule(const RouteArguments& a, int slot, int expert,
                                                      float prob) {
  if (expert < 0 || expert >= a.experts) return RouteFaultKind::kIdOutOfRange;
  for (int other = slot - slot % a.choices; other < slot; ++other) {
    if (a.expert_TK[other] == expert) return RouteFaultKind::kDuplicate;
  }
  return prob - prob == 0.0f ? RouteFaultKind::kNone : RouteFaultKind::kNotFinite;
}

// The slot's expert, -1 when it is empty, E when it breaks a rule.
__device__ __forceinline__ int column_of(const RouteArguments& a, int slot, int expert,
                                         float prob) {
  if (expert == -1) return -1;
  return broken_rule(a, slot, expert, prob) == RouteFaultKind::kNone ? expert : a.experts;
}

// One warp takes its chunk's slots in order: take(slot, column, n) where n is next[column], which
// grows by one a slot.
template <class Take>
__device__ __forceinline__ void visit(const RouteArguments& a, int chunk, int32_t* next,
                                      Take take) {
  const int lane = threadIdx.x % 32, slots = a.tokens * a.choices;
  int column[kChunk / 32];
  float prob[kChunk / 32];
#pragma unroll
  for (int i = 0; i < kChunk / 32; ++i) {  // all at once: memory is waited for a single time
    const int slot = chunk * kChunk + i * 32 + lane;
    column[i] = slot < slots ? a.expert_TK[slot] : -1;
    prob[i] = slot < slots ? a.prob_TK[slot] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kChunk / 32; ++i) {
    column[i] = column_of(a, chunk * kChunk + i * 32 + lane, column[i], prob[i]);
  }
#pragma unroll
  for (int i = 0; i < kChunk / 32; ++i) {
    const int slot = chunk * kChunk + i * 32 + lane;
    const uint32_t peers = __match_any_sync(~0u, column[i]), before = peers & ((1u << lane) - 1);
    const int first = column[i] < 0 ? 0 : next[column[i]];
    __syncwarp();
    if (column[i] >= 0 && before == 0) next[column[i]] = first + __popc(peers);
    __syncwarp();
    if (slot < slots) take(slot, column[i], first + __popc(before));
  }
}

// One warp; next: E + 1 words of shared memory of its own.
__device__ __forceinline__ void count_chunk(const RouteArguments& a, int chunk, int32_t* next) {
  for (int column = threadIdx.x % 32; column <= a.experts; column += 32) next[column] = 0;
  __syncwarp();
  visit(a, chunk, next, [](int, int, int) {});
  int32_t* const counts = a.counts + static_cast<int64_t>(chunk) * (a.experts + 1);
  for (int column = threadIdx.x % 32; column <= a.experts; column += 32)
    counts[column] = next[column];
}

// A CTA of kPrefixColumns x kPrefixSegments threads turns its columns into exclusive sums and
// appends their totals.
__device__ __forceinline__ void prefix_columns(const RouteArguments& a, int first_column,
                                               int32_t (&sums)[kPrefixSegments][kPrefixColumns]) {
  const int inside = threadIdx.x % kPrefixColumns, segment = threadIdx.x / kPrefixColumns;
  const int column = first_column + inside, columns = a.experts + 1;
  const int length = tiles_of(a.chunks, kPrefixSegments);
  const int begin = min(segment * length, a.chunks), end = min(begin + length, a.chunks);
  int sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int chunk = begin; chunk < end; ++chunk)
      sum += a.counts[static_cast<int64_t>(chunk) * columns + column];
  }
  sums[segment][inside] = sum;
  __syncthreads();
  if (column >= columns) return;
  int before = 0;
  for (int earlier = 0; earlier < segment; ++earlier) before += sums[earlier][inside];
  for (int chunk = begin; chunk < end; ++chunk) {
    int32_t& count = a.counts[static_cast<int64_t>(chunk) * columns + column];
    const int here = count;
    count = before;
    before += here;
  }
  if (segment == kPrefixSegments - 1)
    a.counts[static_cast<int64_t>(a.chunks) * columns + column] = before;
}

// One warp: start[e] = rows before expert e, each expert padded to a multiple of the row tile;
// start[E] is the end.
__device__ __forceinline__ void scan_starts(const RouteArguments& a, int32_t* start) {
  const int lane = threadIdx.x % 32;
  const int32_t* const total = a.counts + static_cast<int64_t>(a.chunks) * (a.experts + 1);
  int before = 0;
  for (int base = 0; base <= a.experts; base += 32) {
    const int expert = base + lane;
    const int padded = expert < a.experts ? tiles_of(total[expert], kRowTile) * kRowTile : 0;
    int sum = padded;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (expert <= a.experts) start[expert] = before + sum - padded;
    before += __shfl_sync(~0u, sum, 31);
  }
}

__device__ __forceinline__ void report(const RouteArguments& a, int slot) {
  volatile RouteFault* const record = a.fault;
  if (record == nullptr || record->kind != 0) return;
  record->expert = a.expert_TK[slot];
  record->token = slot / a.choices;
  record->choice = slot % a.choices;
  record->experts = a.experts;
  record->choices = a.choices;
  record->prob = a.prob_TK[slot];
  record->rank_tokens = a.rank_tokens;
  __threadfence_system();
  record->kind = static_cast<int32_t>(broken_rule(a, slot, a.expert_TK[slot], a.prob_TK[slot]));
}

// One warp: the sum of its lanes' values, in shared or global memory.
__device__ __forceinline__ void add_of_warp(uint32_t* word, uint32_t value) {
  const uint32_t sum = __reduce_add_sync(~0u, value);
  if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(word, sum);
}

// One warp; start: E + 1 words that all warps of the CTA share; next: E + 1 of its own.
__device__ __forceinline__ void place_chunk(const RouteArguments& a, int chunk,
                                            const int32_t* start, int32_t* next) {
  const int32_t* const before = a.counts + static_cast<int64_t>(chunk) * (a.experts + 1);
  for (int column = threadIdx.x % 32; column <= a.experts; column += 32) {
    next[column] = before[column] + (column < a.experts ? start[column] : 0);
  }
  __syncwarp();
  uint32_t sent = 0, slots = 0;
  visit(a, chunk, next, [&](int slot, int column, int position) {
    const bool routed = column >= 0 && column < a.experts;
    a.row_TK[slot] = routed ? position : -1;
    if (routed) {
      ++sent;
      slots += slot + 1;
      a.slot_R[position] = slot;
      a.prob_R[position] = a.prob_TK[slot];
    } else if (column == a.experts && position == 0) {
      report(a, slot);
    }
  });
  add_of_warp(&a.census->sent, sent);
  add_of_warp(&a.census->kept, sent);
  add_of_warp(&a.census->sent_slots, slots);
  add_of_warp(&a.census->received_slots, slots);
}

// One warp: the rows between an expert's last one and the next expert's first.
__device__ __forceinline__ void place_padding(const RouteArguments& a, int expert,
                                              const int32_t* start) {
  const int32_t* const total = a.counts + static_cast<int64_t>(a.chunks) * (a.experts + 1);
  for (int row = start[expert] + total[expert] + threadIdx.x % 32; row < start[expert + 1];
       row += 32) {
    a.slot_R[row] = -1;
    a.prob_R[row] = 0.0f;
  }
}

// One CTA: the parts of the schedule that are a few words.
__device__ __forceinline__ void place_split(const RouteArguments& a, const int32_t* start) {
  const int32_t* const total = a.counts + static_cast<int64_t>(a.chunks) * (a.experts + 1);
  for (int expert = threadIdx.x; expert <= a.experts; expert += blockDim.x) {
    a.row_start[expert] = start[expert];
    if (expert < a.experts) a.row_count[expert] = total[expert];
  }
  if (threadIdx.x == 0) {
    a.shared_start[0] = 0;
    a.shared_start[1] = tiles_of(a.tokens, kRowTile) * kRowTile;
    a.shared_count[0] = a.tokens;
    a.faulty[0] = total[a.experts];
  }
}

}  // namespace mok
