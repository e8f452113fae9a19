// Tiles, stages, boxes and registers of each class, and the storage they imply.
//
// Each of the two multiplying warpgroups owns a whole tile in turn: one multiplies while the
// other's epilogue runs. 128 x 192 asks for 138 bytes of shared memory a cycle, of 128, and the
// epilogue's traffic comes on top: 98 KB of fp32 read, added and written cost 3,000 cycles of a
// tile. Both warpgroups on one tile of 128 x 256 ask for 128, but nobody multiplies while the
// epilogue runs: measured 0.95-1.04 where this gives 0.98-1.13, and gone.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../device/schedule.cuh"
#include "ptx.cuh"

namespace mok::sm90 {

constexpr int BLOCK_M = kRowTile;
constexpr int BLOCK_K = kDepthTile;
constexpr int kSlab = 64;      // rows of one product; a row tile has two
constexpr int kTileSlots = 4;  // tiles that a role still needs, or load has published ahead
constexpr int kThreads = 384;  // warpgroup 0 loads, fetches, stores, moves; 1 and 2 multiply
constexpr int kMaxShared = 232448;
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;

template <int COLUMNS, int STAGES, int BOXES>
struct Tiling {
  static constexpr int BLOCK_N = COLUMNS;
  static constexpr int kStages = STAGES;
  static constexpr int kBoxes = BOXES;  // of 8 KB, for the epilogue's units
  static constexpr int kSlabs = 2;      // of a tile, in one warpgroup's accumulators
  static constexpr int kReaders = 4;    // warps that read a stage
  static constexpr int kStageBytes = (BLOCK_M + BLOCK_N) * BLOCK_K * 2;
  static constexpr int kAccumulators = BLOCK_N / 2;  // a thread and slab

  // A CTA starts with kLaunchRegisters a thread, and what it takes must be given first: a sum above
  // that never starts.
  static constexpr int kLoadRegisters = 40;
  static constexpr int kMultiplyRegisters = 232;
  static_assert(128 * kLoadRegisters + 256 * kMultiplyRegisters <= kThreads * kLaunchRegisters,
                "register file");
  static_assert(kSlabs * kAccumulators <= 192, "accumulators leave too little for the rest");
};

// Position in a ring of N barriers, counted over two rounds, so that one register holds the slot
// and the parity of the number of rounds.
template <int N>
struct Ring {
  int position = 0;
  __device__ __forceinline__ int slot() const { return position < N ? position : position - N; }
  __device__ __forceinline__ int before(int by) const {  // slot; by: 0 to N
    return slot() < by ? slot() - by + N : slot() - by;
  }
  __device__ __forceinline__ uint32_t phase() const { return position < N ? 0u : 1u; }
  __device__ __forceinline__ void advance(int by = 1) {
    position = by == 1 ? (position == 2 * N - 1 ? 0 : position + 1) : (position + by) % (2 * N);
  }
};

// How far load has come with the tile after the one that it is loading. It is load's alone, and
// lies in shared memory because it is touched once a K step and would take registers in all of
// them.
struct LookAhead {
  int32_t end;  // tickets
  int32_t phase, ticket;
  int32_t expert, pass;   // whose tensor map has been acquired
  Ring<kTileSlots> ring;  // of the tile queue; here, to spare a register
  uint64_t waited_ns;     // for moved rows
};

// SLOT_BYTES: of the largest unit of the kernel's passes.
template <class T, int SLOT_BYTES>
struct Storage {
  static constexpr int kUnitSlots = T::kBoxes * kBoxBytes / SLOT_BYTES;
  static_assert(kUnitSlots >= 2, "one unit leaves while the next is filled");
  alignas(1024) uint8_t stage[T::kStages][T::kStageBytes];
  alignas(1024) uint8_t unit[kUnitSlots][SLOT_BYTES];
  Tile tile[kTileSlots];
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  uint64_t stage_full[T::kStages], stage_empty[T::kStages];
  uint64_t unit_ready[kUnitSlots], unit_filled[kUnitSlots], unit_drained[kUnitSlots];
  uint64_t products_turn[2], fill_turn[2];
  LookAhead ahead;
};

// ---- the table
// Columns, stages, boxes. Measured on one H200 as parts of the rate of dense cuBLAS with the
// same M, N, K, five shapes, balanced rows (scripts/results/; noise 0.02).

// products 0.98-1.13, up 0.95-1.02, down_gradient 0.75-1.01
using Deep192 = Tiling<192, 5, 3>;
// products 0.95-1.10, down_gradient 0.74-0.97, gradients += fp32 0.91-1.07 from 2048 rows an expert
using Buffered192 = Tiling<192, 4, 8>;

// the kernels of a whole direction, whose moves need 16 KB beside the stages
using Moving192 = Tiling<192, 4, 6>;

// Not here: 128 columns in turns, 0.71-0.77; 192 columns with 3 stages and 12 boxes, 0.1 less; the
// old values of a gradient prefetched into L2, 0.03 to 0.08 less.

// Calls f with the tiling of that class; 0 is the table's choice.
template <Role ROLE, class F>
void with_tiling(int tiling, F&& f) {
  if constexpr (ROLE == Role::kGradient) {
    if (tiling <= 1) return f(Buffered192{});
    throw std::runtime_error("mok: a weight gradient has tilings 0 and 1, got " +
                             std::to_string(tiling));
  } else {
    if (tiling <= 1) return f(Deep192{});
    if (tiling == 2) return f(Buffered192{});
    throw std::runtime_error("mok: a product has tilings 0 to 2, got " + std::to_string(tiling));
  }
}

// The box in which an operand comes.
struct OperandBox {
  int rows;
  int blocks;  // of 64 columns
};
template <Role ROLE, class T>
constexpr OperandBox operand_box() {
  if constexpr (ROLE == Role::kProduct) return {T::BLOCK_N, 1};
  if constexpr (ROLE == Role::kUp) return {T::BLOCK_N / 2, 1};
  if constexpr (ROLE == Role::kInputGradient || ROLE == Role::kDownGradient)
    return {64, T::BLOCK_N / 64};
  return {0, 0};  // no operand
}

}  // namespace mok::sm90
