// What happens when something that must hold does not.
//
// On the device every wait has a deadline, in real time, and a tag. When it passes, the first
// thread to notice writes one record into pinned host memory and traps: the launch fails with an
// error, it never hangs. The record outlives the dead context, so the next call can say which wait
// it was.
//
// Kernels of several ranks wait as long as their host says (--mok-deadline; gather, for a rank that
// comes late to a call, as long as the group's own time limit), all others kDeadlineSeconds and a
// quarter.
#pragma once

#include <cstdint>

namespace mok {

enum class Tag : uint32_t {
  kNone = 0,
  kLoadStage,       // load waits for a free stage
  kLoadTileSlot,    // load waits for a free slot of the tile queue
  kNextTile,        // a role waits for the next tile
  kMultiplyStage,   // multiply waits for a loaded stage
  kMultiplyTurn,    // multiply waits for the other warpgroup's products
  kFillTurn,        // multiply waits for the other warpgroup's epilogue
  kMultiplyUnit,    // multiply waits for an epilogue unit
  kFetchUnit,       // fetch waits for a drained unit
  kStoreUnit,       // store waits for a filled unit
  kLoadRows,        // load waits for moved rows
  kLoadBlock,       // load waits for a block's earlier product
  kLoadExpert,      // load waits for an expert's earlier product
  kMoveChunk,       // mover waits for a chunk of a row
  kCombineRows,     // combine waits for a token's rows
  kCombineSums,     // combine waits for the sums of prob's gradient
  kPushRows,        // move waits for rows that go home
  kPushSums,        // move waits for the sums that go with them
  kStart,           // gather waits for the start of a rank's call
  kCombineHome,     // combine waits for a row from another rank
  kWrongTable,      // a table of tensor maps is of other matrices than the call says
  kRowsOutOfRange,  // row_start / row_count name rows outside the buffers, or not 128-aligned
  kMoveLap,         // move waits for the last readers of the rows before
  kEndCounts,       // the end of a CTA waits for what its warps have counted
  kAborted,         // another rank of the group has stopped, and said so
  kCombineChunk,    // combine waits for a chunk of a row
};

inline const char* describe(Tag tag) {
  switch (tag) {
    case Tag::kNone:
      return "none";
    case Tag::kLoadStage:
      return "load waited for a free stage";
    case Tag::kLoadTileSlot:
      return "load waited for a free slot of the tile queue";
    case Tag::kNextTile:
      return "a role waited for its next tile";
    case Tag::kMultiplyStage:
      return "multiply waited for a loaded stage";
    case Tag::kMultiplyTurn:
      return "multiply waited for its turn";
    case Tag::kFillTurn:
      return "multiply waited for its turn to fill units";
    case Tag::kMultiplyUnit:
      return "multiply waited for an epilogue unit";
    case Tag::kFetchUnit:
      return "fetch waited for a drained unit";
    case Tag::kStoreUnit:
      return "store waited for a filled unit";
    case Tag::kLoadRows:
      return "load waited for the rows of its block";
    case Tag::kLoadBlock:
      return "load waited for the earlier product of its block";
    case Tag::kLoadExpert:
      return "load waited for the earlier product of its expert";
    case Tag::kMoveChunk:
      return "the mover waited for a piece of a row";
    case Tag::kCombineRows:
      return "combine waited for the rows of a token";
    case Tag::kCombineChunk:
      return "combine waited for a piece of a row";
    case Tag::kCombineSums:
      return "combine waited for the sums of a probability's gradient";
    case Tag::kPushRows:
      return "the mover waited for the rows of a block that go home";
    case Tag::kPushSums:
      return "the mover waited for the sums of a probability's gradient that go home";
    case Tag::kMoveLap:
      return "the mover waited for the lap before its rows";
    case Tag::kEndCounts:
      return "the end of a CTA waited for what its warps have counted";
    case Tag::kAborted:
      return "another rank has called abort";
    case Tag::kStart:
      return "gather waited for the start of the call on the rank that is the thread's number (see "
             "--distributed-timeout-minutes, and that rank's log)";
    case Tag::kCombineHome:
      return "combine waited for a row from another rank (see --mok-deadline, and the ranks' logs)";
    case Tag::kWrongTable:
      return "a table of tensor maps describes other matrices or boxes than the call needs";
    case Tag::kRowsOutOfRange:
      return "row_start / row_count are not 128-aligned, overlap, or leave the buffers";
  }
  return "unknown tag";
}

struct Fault {
  uint32_t tag;  // Tag; 0 while nothing happened
  uint32_t cta;
  uint32_t thread;
  uint32_t value;     // what the wait or the check saw; of kAborted: the word
  uint32_t expected;  // of kStart, kCombineHome and kAborted: the epoch of the call; else 0
};

// What a rank tells that has stopped, in a word: tag << 24 | rank << 12 | thread of its record.
struct Abort {
  Tag tag;
  uint32_t rank, thread;

  static Abort of(uint32_t word) {
    return {static_cast<Tag>(word >> 24), word >> 12 & 0xfff, word & 0xfff};
  }
};

// Process-wide record, pinned and mapped; null only before the first launch.
Fault* fault_record();

constexpr int64_t kNanosecondsPerSecond = 1'000'000'000;
constexpr int32_t kDeadlineSeconds = 10;  // a healthy wait inside a rank takes microseconds

#ifdef __CUDACC__
// A wait for another rank expires first: those of the own rank that hang on it have a quarter more.
struct Deadline {
  int64_t other_ns, own_ns;
};
constexpr Deadline deadline_of(int32_t seconds) {
  return {seconds * kNanosecondsPerSecond, seconds * kNanosecondsPerSecond / 4 * 5};
}
// Of the kernels of one file, on each device; set_deadline sets it, before the first launch.
[[maybe_unused]] static __constant__ Deadline wait_limit = deadline_of(kDeadlineSeconds);

[[maybe_unused]] static cudaError_t set_deadline(int32_t seconds) {
  const Deadline deadline = deadline_of(seconds);
  return cudaMemcpyToSymbol(wait_limit, &deadline, sizeof(deadline));
}
#endif

}  // namespace mok
