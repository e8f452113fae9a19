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

struct PlanWords {  // offsets; all before `first` start at zero
  int64_t counted, ready, done0, done1, expert_done, expert_rows, sums, first, total;

  static PlanWords of(int64_t rows, int64_t tokens, int64_t experts) {
    const int64_t blocks = rows / kRowTile;
    const int64_t with_shared = blocks + (tokens + kRowTile - 1) / kRowTile;
    PlanWords at{};
    at.counted = 2;  // after the tickets
    at.ready = 8;
    static_assert(2 + sizeof(Counted) / sizeof(int32_t) <= 8);
    at.done0 = at.ready + blocks;
    at.done1 = at.done0 + with_shared;
    at.expert_done = at.done1 + with_shared;
    at.expert_rows = at.expert_done + experts + 1;
    at.sums = at.expert_rows + experts + 1;
    at.first = (at.sums + blocks + 3) / 4 * 4;
    at.total = at.first + kMaxPasses * (experts + 1) + 2 + 3;
    return at;
  }
};

void launch_plan(const PlanShape& shape, int32_t* words, void* stream);

}  // namespace mok
