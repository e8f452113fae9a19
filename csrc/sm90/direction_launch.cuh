// Host side of a direction: what forward and backward share.
#pragma once

#include <array>

#include "../device/plan_words.cuh"
#include "direction.cuh"

namespace mok::sm90 {

inline int ctas_of(const DirectionLaunch& launch) {
  return launch.ctas > 0 ? launch.ctas : sm_count(launch.device);
}

// Enough tiles of pass 0 before the first tile that waits for one: two for each CTA.
inline int choose_ahead(const Routing& r, int n_tiles, const DirectionLaunch& launch) {
  if (launch.ahead > 0) return std::min(launch.ahead, r.experts);
  const int64_t slots = static_cast<int64_t>(r.tokens) * r.choices;
  const int64_t rows = std::max<int64_t>(slots / r.experts, 1);
  const int64_t tiles = (rows + kRowTile - 1) / kRowTile * n_tiles;
  return static_cast<int>(
      std::clamp<int64_t>((2 * ctas_of(launch) + tiles - 1) / tiles, 1, r.experts));
}

inline PlanShape plan_shape(const Routing& r, int passes) {
  PlanShape s{};
  s.passes = passes;
  s.experts = r.experts;
  s.tokens = r.tokens;
  s.combine_tiles = tiles_of(r.tokens, kCombineTokens);
  s.start = r.row_start;
  s.count = r.row_count;
  s.capacity = r.rows;
  s.most = r.most;
  s.laps = most_laps(r.most, r.rows);
  return s;
}

// After moves and combine are set.
inline void place_words(DirectionParameters& p, const Routing& r, int32_t* words) {
  const PlanShape& s = p.plan.shape;
  const PlanWords at = PlanWords::of(s.most, s.tokens, s.experts, s.laps);
  p.plan.first = words + at.first;
  p.plan.segment = reinterpret_cast<const Segment*>(words + at.segment);
  p.plan.lap = reinterpret_cast<const Lap*>(words + at.lap);
  p.plan.lap_count = words + at.lap_count;
  p.counters = {.tickets = reinterpret_cast<uint32_t*>(words),
                .ready = words + at.ready,
                .done0 = words + at.done0,
                .done1 = words + at.done1,
                .expert_done = words + at.expert_done,
                .expert_rows = words + at.expert_rows,
                .sums = words + at.sums,
                .lap_done = words + at.lap_done,
                .movers = reinterpret_cast<uint32_t*>(words + at.movers)};
  p.census = {.planned = r.census,
              .row_count = r.row_count,
              .experts = r.experts,
              .sources = static_cast<uint32_t>(p.move.sources),
              .chunks = static_cast<uint32_t>(tiles_of(p.move.row_bytes, kMoveBytes)),
              .pieces = static_cast<uint32_t>(p.combine.hidden / kPiece),
              .counted = reinterpret_cast<Counted*>(words + at.counted),
              .fault = exchange_fault_record()};
}

// The table of pass `q`: of all routed experts, or of the shared one alone.
inline void set_table(PassParameters& q, const void* table, const Matrix& weight, OperandBox box,
                      const Routing& r, bool shared) {
  q.table = static_cast<const CUtensorMap*>(table);
  q.header = table_header(weight, box);
  q.first_expert = shared ? r.experts : 0;
  q.experts = shared ? 1 : r.experts;
}

template <class K>
void launch_direction(const DirectionParameters& p, const DirectionLaunch& launch) {
  launch_plan(p.plan.shape, launch.words, launch.stream);
  const Launch plain{.tickets = nullptr,
                     .ctas = launch.ctas,
                     .tiling = 0,
                     .device = launch.device,
                     .stream = launch.stream};
  launch_kernel<K>(p, plain);
}

// Where the sources of moves lie in a workspace, and what goes home.
inline void set_exchange(DirectionParameters& p, const Peers& peers, const DirectionLaunch& launch,
                         std::array<const int64_t*, 2> sources, const void* pushed) {
  p.exchange.peers = peers;
  p.exchange.movers = launch.movers > 0 ? launch.movers : ctas_of(launch);
  p.plan.shape.ranks = peers.ranks;
  p.plan.shape.rank = peers.rank;
  p.exchange.pushed = static_cast<const uint8_t*>(pushed);
  for (int source = 0; source < p.move.sources; ++source) {
    std::copy_n(sources[source], kGenerations, p.exchange.pulled[source]);
  }
}

// Kernels of several ranks, compiled apart.
void launch_forward_of_ranks(const DirectionParameters& p, const DirectionLaunch& launch);
void launch_backward_of_ranks(const DirectionParameters& p, const DirectionLaunch& launch,
                              Gradient type, bool accumulate);

}  // namespace mok::sm90
