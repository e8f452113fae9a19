// Conservation: rows sent = rows received = rows combined, checked at the end of every grid.
//
// What is counted lies where the work is done: movers count the chunks that left their ring and the
// slots they were told, combine the pieces it added and the slots they belong to. A CTA adds up in
// shared memory; when its moves and combines are done, one warp adds its counts to the grid's, and
// that of the last CTA compares them with what route has planned: rows by its pass that counts,
// slots by its pass that places. All modulo 2^32: a row too many or too few always shows, and one
// instead of another unless their slots sum to the same.
#pragma once

#include "ptx.cuh"
#include "view.cuh"

namespace mok {

enum Count : int {
  kMoved,          // chunks of rows brought in, of all sources
  kMovedSlots,     // the sum of their slots
  kPushed,         // chunks of rows sent home to other ranks
  kCombined,       // pieces of rows added up
  kCombinedSlots,  // the sum of their slots
  kCounts,
};

struct Counted {  // of a grid; zero before it
  uint32_t seen[kCounts];
  uint32_t left;  // CTAs
};

struct CensusArguments {
  const Census* planned;
  const int32_t* row_count;  // [experts]
  int32_t experts;
  uint32_t sources, chunks, pieces;  // of moves; of a row
  Counted* counted;
  ExchangeFault* fault;
};

// One warp, behind all work of its CTA: whether this is the grid's last CTA.
__device__ __forceinline__ bool leave(Counted* to, const uint32_t* seen, int lane) {
  if (lane < kCounts) atomicAdd(&to->seen[lane], seen[lane]);
  __threadfence();
  __syncwarp();
  const bool last = lane == 0 && atomicAdd(&to->left, 1u) == gridDim.x - 1;
  __threadfence();
  return __shfl_sync(~0u, last, 0) != 0;
}

// One warp of the last CTA; reports the first count that is not as planned.
__device__ __forceinline__ bool conserved(const CensusArguments& a, const Peers& group, int lane) {
  uint32_t rows = 0;
  for (int expert = lane; expert < a.experts; expert += 32) rows += a.row_count[expert];
  const uint32_t received = __reduce_add_sync(~0u, rows);
  const Census planned = *a.planned;
  const uint32_t wanted = lane == kMoved        ? received * a.sources * a.chunks
                          : lane == kMovedSlots ? planned.received_slots * a.sources
                          : lane == kPushed     ? (received - planned.kept) * a.chunks
                          : lane == kCombined   ? planned.sent * a.pieces
                                                : planned.sent_slots;
  const auto* const words = reinterpret_cast<const int32_t*>(a.counted->seen);
  const uint32_t seen = lane < kCounts ? load_acquire(words + lane) : wanted;
  const uint32_t wrong = __ballot_sync(~0u, seen != wanted);
  if (wrong == 0) return true;
  if (lane == __ffs(wrong) - 1) {
    report(group,
           a.fault,
           {static_cast<int32_t>(ExchangeFaultKind::kCounted) + lane, group.rank, seen, wanted, 0});
  }
  return false;
}

}  // namespace mok
