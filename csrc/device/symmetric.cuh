// A rank's view of the group: addresses in the workspaces of all, and the two signals between ranks
// (workspace.h).
#pragma once

#include "../exchange_arguments.h"
#include "ptx.cuh"

namespace mok {

template <class T>
__device__ __forceinline__ T* part(const Peers& group, int rank, int64_t offset) {
  return reinterpret_cast<T*>(group.base[rank] + offset);
}

// ---- abort: a rank has stopped while it waited for another

// What the rank has been told, or 0. Looked at after each failed poll of a wait for another rank,
// so that no rank waits out a limit of its own when one has found that a third does not come. All
// other waits end without another rank (workspace.h, (6)). One of those that takes too long all the
// same tells nobody: in each of them that would take registers that multiply has not.
__device__ __forceinline__ uint32_t abort_of(const Peers& group) {
  return load_relaxed_system(&part<Control>(group, group.rank, group.at.control)->abort);
}

// Tells all, or, told by another itself, passes on what that has said: the word names the one that
// has found the fault.
__device__ __forceinline__ void call_abort(const Peers& group, Tag tag, uint32_t value) {
  const uint32_t own = static_cast<uint32_t>(tag) << 24 | group.rank << 12 | threadIdx.x;
  const uint32_t word = tag == Tag::kAborted ? value : own;
  for (int rank = 0; rank < group.ranks; ++rank) {
    store_relaxed_system(&part<Control>(group, rank, group.at.control)->abort, word);
  }
  fence_system();
}

// A wait for another rank was in vain, or another has called abort: written down once in a process,
// with the epoch that did not come, and told to all, so that nobody waits any more.
__device__ __forceinline__ void give_up(const Peers& group, Fault* fault, Tag tag, uint32_t seen,
                                        uint32_t epoch) {
  if (fault != nullptr && *static_cast<volatile uint32_t*>(&fault->tag) == 0) {
    fault->expected = epoch;  // before the tag: whoever waits now, waits for the same
  }
  __threadfence_system();
  if (write_record(fault, tag, seen)) call_abort(group, tag, seen);
}

// One of many that add up.
__device__ __forceinline__ void add_wait(const Peers& group, Wait wait, uint64_t nanoseconds) {
  if (nanoseconds == 0) return;
  auto* const to = &part<Control>(group, group.rank, group.at.control)->waited_ns[wait];
  atomicAdd(reinterpret_cast<unsigned long long*>(to),
            static_cast<unsigned long long>(nanoseconds));
}

// ---- start: a rank's call is published

// What this thread has seen written is there for who has seen `to`'s epoch.
__device__ __forceinline__ void send_start(Start* to, const Start& start) {
  constexpr int kWords = sizeof(Start) / sizeof(uint32_t);
  static_assert(offsetof(Start, epoch) == 0);
  const auto* const from = reinterpret_cast<const uint32_t*>(&start);
  auto* const words = reinterpret_cast<uint32_t*>(to);
#pragma unroll
  for (int i = 1; i < kWords; ++i) store_relaxed_system(words + i, from[i]);
  fence_system();
  store_relaxed_system(words, start.epoch);
}

// An entry is not written again before this call has ended here, so its epoch cannot be passed
// over. The other rank may be held up for as long as the host allows: patience_ns. False: it is
// given up.
__device__ __forceinline__ bool await_start(const Peers& group, const Start* from, uint32_t epoch,
                                            int64_t patience_ns, Fault* fault, Start& start) {
  const auto* const words = reinterpret_cast<const uint32_t*>(from);
  const Stopwatch watch;
  for (;;) {
    const uint32_t seen = load_acquire_system(words);
    if (seen == epoch) break;
    const uint32_t abort = abort_of(group);
    if (abort == 0 && !watch.passes(patience_ns)) continue;
    give_up(
        group, fault, abort != 0 ? Tag::kAborted : Tag::kStart, abort != 0 ? abort : seen, epoch);
    return false;
  }
  constexpr int kWords = sizeof(Start) / sizeof(int32_t);
  auto* const to = reinterpret_cast<int32_t*>(&start);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    to[i] = load_written(reinterpret_cast<const int32_t*>(words) + i);
  }
  return true;
}

// ---- arrival: a row is home

// After a fence_system behind the row's own completion.
__device__ __forceinline__ void send_arrival(Arrival* to, uint32_t epoch, float d_prob) {
  const uint64_t both = static_cast<uint64_t>(__float_as_uint(d_prob)) << 32 | epoch;
  static_assert(offsetof(Arrival, epoch) == 0 && offsetof(Arrival, d_prob) == 4);
  store_relaxed_system(reinterpret_cast<uint64_t*>(to), both);
}

// Until a row is home, or its rank is given up.
__device__ __forceinline__ void await_arrival(const Peers& group, const Arrival* from,
                                              uint32_t epoch, Fault* fault) {
  const auto* const word = reinterpret_cast<const uint64_t*>(from);
  const Stopwatch watch;
  for (;;) {
    const auto seen = static_cast<uint32_t>(load_acquire_system(word));
    if (seen == epoch) return;
    const uint32_t abort = abort_of(group);
    if (abort == 0 && !watch.passes(wait_limit.other_ns)) continue;
    const bool told = abort != 0;
    return give_up(
        group, fault, told ? Tag::kAborted : Tag::kCombineHome, told ? abort : seen, epoch);
  }
}

}  // namespace mok
