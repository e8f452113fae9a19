// What a direction's kernel is given; direction.cuh says who may touch what.
#pragma once

#include "../device/census.cuh"
#include "../device/combine.cuh"
#include "../device/move.cuh"
#include "../device/plan.cuh"
#include "../device/symmetric.cuh"
#include "../device/wire.cuh"
#include "launch.cuh"

namespace mok::sm90 {

struct Counters {        // zeroed before the grid starts
  uint32_t* tickets;     // next tile, next move
  int32_t* ready;        // [blocks] rows that are there, and, of later laps, tiles done again
  int32_t* done0;        // [blocks, then the shared expert's] tiles of pass 0
  int32_t* done1;        // the same of pass 1
  int32_t* expert_done;  // [experts + 1] tiles of pass 0
  int32_t* expert_rows;  // [experts + 1] the same, and rows of the second source
  int32_t* sums;         // [blocks] warps that have written prob's parts
  int32_t* lap_done;     // [laps] groups of rows sent home, weight tiles, and rows of no reader
  uint32_t* movers;      // CTAs that wanted to move rows
};

struct MoveArguments {
  const void* tokens[2];  // bf16 [T, H]
  void* rows[2];          // bf16 [R, H]
  int32_t sources;
  int32_t choices;
  int32_t row_bytes;
  const int32_t* slot_R;
};

struct ExchangeArguments {  // of several ranks
  uint32_t movers;          // the most CTAs that move rows: those that come first, so that they run
  Peers peers;
  int64_t pulled[2][kGenerations];  // where the sources lie in a workspace
  const uint8_t* pushed;            // bf16 [R, H]: what goes home
};

struct DirectionParameters {
  PassParameters pass[2 * kMaxPasses + 1];  // routed, the shared expert's, and what is done again
  Plan plan;
  Counters counters;
  MoveArguments move;
  CombineArguments combine;
  const float* parts;  // [R, parts_per_row], or null
  int32_t parts_per_row;
  Fault* fault;
  ExchangeArguments exchange;
  CensusArguments census;
};

}  // namespace mok::sm90
