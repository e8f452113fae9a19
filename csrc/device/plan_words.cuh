// Where a plan's counters and first tickets lie in a call's words.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../direction_arguments.h"
#include "census.cuh"
#include "plan.cuh"

namespace mok {

struct PlanWords {  // offsets; all before `lap_count` start at zero
  int64_t counted, ready, done0, done1, expert_done, expert_rows, sums, lap_done, movers;
  int64_t lap_count, lap;
  int64_t segment, first, total;

  // rows: of any routing.
  static PlanWords of(int64_t rows, int64_t tokens, int64_t experts, int64_t laps) {
    const int64_t blocks = rows / kRowTile;
    const int64_t with_shared = blocks + (tokens + kRowTile - 1) / kRowTile;
    const int64_t segments = most_segments(experts, laps);
    constexpr int64_t kLapWords = sizeof(Lap) / sizeof(int32_t);
    constexpr int64_t kSegmentWords = sizeof(Segment) / sizeof(int32_t);
    PlanWords at{};
    at.counted = 2;  // after the tickets
    at.ready = 8;
    static_assert(2 + sizeof(Counted) / sizeof(int32_t) <= 8);
    at.done0 = at.ready + blocks;
    at.done1 = at.done0 + with_shared;
    at.expert_done = at.done1 + with_shared;
    at.expert_rows = at.expert_done + experts + 1;
    at.sums = at.expert_rows + experts + 1;
    at.lap_done = at.sums + blocks;
    at.movers = at.lap_done + laps;
    at.lap_count = at.movers + 1;
    at.lap = (at.lap_count + 1 + 3) / 4 * 4;
    at.segment = at.lap + kLapWords * (laps + 1);
    at.first = at.segment + kSegmentWords * segments;
    at.total = at.first + segments + 1 + 3;
    return at;
  }
};

void launch_plan(const PlanShape& shape, int32_t* words, void* stream);

}  // namespace mok
