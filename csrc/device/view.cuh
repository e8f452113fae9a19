// What one rank of several keeps of the schedule of all: the rows of its own experts, numbered from
// the first of them, and where its own tokens' rows are. Every rank places all slots, so that all
// agree, and writes what is its own. Where the rows do not fit into its buffers at once, all of
// them go home, those of its own tokens too, and row_TK says so.
//
// Order of rows inside an expert: rank, token, choice, for any number of ranks.
#pragma once

#include "../exchange_arguments.h"
#include "route.cuh"

namespace mok {

// Of what all ranks find alike; written like a RouteFault.
__device__ __forceinline__ void report(const Peers& group, ExchangeFault* to,
                                       const ExchangeFault& found) {
  volatile ExchangeFault* const record = to;
  if (record == nullptr || record->kind != 0) return;
  record->rank = found.rank;
  record->value = found.value;
  record->wanted = found.wanted;
  record->balanced = group.slots;
  __threadfence_system();
  record->kind = found.kind;
}

__device__ __forceinline__ int local_experts(const ViewArguments& a) {
  return a.route.experts / a.peers.ranks;
}

// One warp: whether the rows of every expert fit; `says`: who reports the one with the most.
__device__ __forceinline__ bool within_budget(const ViewArguments& a, const int32_t* start,
                                              bool says) {
  int most = 0, expert = 0;
  for (int e = threadIdx.x % 32; e < a.route.experts; e += 32) {
    const int rows = start[e + 1] - start[e];
    if (rows > most) {
      most = rows;
      expert = e;
    }
  }
  const int largest = __reduce_max_sync(~0u, most);
  if (largest <= a.rows) return true;
  const int first = __reduce_min_sync(~0u, most == largest ? expert : a.route.experts);
  if (says && threadIdx.x == 0) {
    report(a.peers,
           a.record,
           {static_cast<int32_t>(ExchangeFaultKind::kBudget),
            first / local_experts(a),
            largest,
            a.rows,
            0});
  }
  return false;
}

// One warp, as place_chunk.
__device__ __forceinline__ void view_chunk(const ViewArguments& a, int chunk, const int32_t* start,
                                           int32_t* next, bool admitted) {
  const RouteArguments& r = a.route;
  const int local = local_experts(a), first = a.peers.rank * local, base = start[first];
  const int own = a.peers.rank * a.peers.slots, own_slots = a.tokens * r.choices;
  const bool stay = start[first + local] - base <= a.rows;  // one lap: the own tokens' rows
  const int32_t* const before = r.counts + static_cast<int64_t>(chunk) * (r.experts + 1);
  for (int column = threadIdx.x % 32; column <= r.experts; column += 32) {
    next[column] = before[column] + (column < r.experts ? start[column] : 0);
  }
  __syncwarp();
  Census lanes{};  // of this lane's slots
  visit(r, chunk, next, [&](int slot, int column, int position) {
    const bool routed = admitted && column >= 0 && column < r.experts;
    const bool here = routed && column >= first && column < first + local;
    const int row = position - base, mine = slot - own;
    if (mine >= 0 && mine < own_slots) {
      r.row_TK[mine] = here && stay ? row : routed ? kElsewhere : -1;
      lanes.sent += routed;
      lanes.sent_slots += routed ? mine + 1 : 0;
      lanes.kept += here && stay;
    }
    if (here) {
      lanes.received_slots += slot + 1;
      r.slot_R[row] = slot;
      r.prob_R[row] = r.prob_TK[slot];
    } else if (column == r.experts && position == 0) {
      report(r, slot);
    }
  });
  add_of_warp(&r.census->sent, lanes.sent);
  add_of_warp(&r.census->sent_slots, lanes.sent_slots);
  add_of_warp(&r.census->received_slots, lanes.received_slots);
  add_of_warp(&r.census->kept, lanes.kept);
}

// One warp, as place_padding; expert: of this rank.
__device__ __forceinline__ void view_padding(const ViewArguments& a, int expert,
                                             const int32_t* start) {
  const RouteArguments& r = a.route;
  const int first = a.peers.rank * local_experts(a), base = start[first], all = first + expert;
  const int32_t* const total = r.counts + static_cast<int64_t>(r.chunks) * (r.experts + 1);
  for (int row = start[all] + total[all] + threadIdx.x % 32; row < start[all + 1]; row += 32) {
    r.slot_R[row - base] = -1;
    r.prob_R[row - base] = 0.0f;
  }
}

// One CTA, as place_split.
__device__ __forceinline__ void view_split(const ViewArguments& a, const int32_t* start,
                                           bool admitted) {
  const RouteArguments& r = a.route;
  const int local = local_experts(a), first = a.peers.rank * local, base = start[first];
  const int32_t* const total = r.counts + static_cast<int64_t>(r.chunks) * (r.experts + 1);
  for (int expert = threadIdx.x; expert <= local; expert += blockDim.x) {
    r.row_start[expert] = admitted ? start[first + expert] - base : 0;
    if (expert < local) r.row_count[expert] = admitted ? total[first + expert] : 0;
  }
  if (threadIdx.x == 0) {
    r.shared_start[0] = 0;
    r.shared_start[1] = tiles_of(a.tokens, kRowTile) * kRowTile;
    r.shared_count[0] = a.tokens;
    r.faulty[0] = admitted ? total[r.experts] : 1;
  }
}

}  // namespace mok
