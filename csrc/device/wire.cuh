// A wire between virtual ranks of one GPU that is no faster than a link between GPUs would be, for
// scripts/bench_wire.py. Only a build with -DMOK_THROTTLED_WIRE has it; in every other nothing of
// this file is compiled into a kernel.
//
// Each rank has a way out and a way in, of one rate. A copy of n bytes takes n / rate of its
// sender's way out and of its receiver's way in; each way serves in the order of asking, and is
// idle only while nobody asks. A copy is issued when both ways would have carried its last byte.
// So what a rank sends and receives is bounded exactly, while latency is that of the GPU's own
// memory, and no switch is imitated.
//
// Time is in 2^-10 ns, modulo 2^64 (208 days). A rank's words lie behind `Control` in its
// workspace, where the host writes the rate before a call; zero, as a workspace starts: no bound.
#pragma once

#include <cstdint>

#include "schedule.cuh"  // MOK_HOST_DEVICE

namespace mok {

#ifdef MOK_THROTTLED_WIRE
constexpr bool kThrottledWire = true;
#else
constexpr bool kThrottledWire = false;
#endif

constexpr int64_t kWireOffset = 128;  // bytes behind a workspace's control part

struct Wire {
  uint64_t out, in;   // when each way is free
  uint32_t per_byte;  // wire_per_byte() of the rate, or 0
};

enum class Way { kOut, kIn };

// rate: bytes a nanosecond.
constexpr uint32_t wire_per_byte(double rate) {
  return static_cast<uint32_t>(1024.0 * 1024.0 / rate + 0.5);
}

MOK_HOST_DEVICE uint64_t wire_time(uint32_t bytes, uint32_t per_byte) {
  return static_cast<uint64_t>(bytes) * per_byte >> 10;
}

// When the way will have carried what takes `time`. Others may come between the two steps: each
// only moves `free` on, to a time that has come, or by its own time.
template <class Word>
MOK_HOST_DEVICE uint64_t reserve(Word free, uint64_t now, uint64_t time) {
  free.raise(now);
  return free.add(time) + time;
}

}  // namespace mok

#ifdef __CUDACC__
#include "symmetric.cuh"

namespace mok {

struct WireWord {
  unsigned long long* at;
  __device__ __forceinline__ void raise(uint64_t time) const {
    atomicMax(at, static_cast<unsigned long long>(time));
  }
  __device__ __forceinline__ uint64_t add(uint64_t time) const {
    return atomicAdd(at, static_cast<unsigned long long>(time));
  }
};

__device__ __forceinline__ uint64_t wire_now() { return global_nanoseconds() << 10; }

__device__ __forceinline__ Wire* wire_of(const Peers& group, int rank) {
  return part<Wire>(group, rank, group.at.control + kWireOffset);
}

// When a copy may be issued.
__device__ __forceinline__ uint64_t carried(const Peers& group, int from, int to, uint32_t bytes,
                                            uint64_t now) {
  const uint32_t per_byte = wire_of(group, group.rank)->per_byte;
  if (from == to || per_byte == 0) return now;
  const uint64_t time = wire_time(bytes, per_byte);
  const auto word = [](uint64_t& free) {
    return WireWord{reinterpret_cast<unsigned long long*>(&free)};
  };
  const uint64_t out = reserve(word(wire_of(group, from)->out), now, time);
  const uint64_t in = reserve(word(wire_of(group, to)->in), now, time);
  return out > in ? out : in;
}

__device__ __forceinline__ void wait_until(uint64_t time) {
  while (wire_now() < time) __nanosleep(32);
}

// Waits until a copy may be issued.
__device__ __forceinline__ void carry(const Peers& group, int from, int to, uint32_t bytes) {
  wait_until(carried(group, from, to, bytes, wire_now()));
}

// The same for rows of four slots, negative ones apart, that are pulled here. Neighbours of one
// rank ask once.
__device__ __forceinline__ void carry_rows(const Peers& group, int4 slots, uint32_t bytes) {
  const uint64_t now = wire_now();
  uint64_t last = now;
  int from = group.rank;
  uint32_t together = 0;
#pragma unroll 1
  for (int i = 0; i <= 4; ++i, slots = {slots.y, slots.z, slots.w, -1}) {
    const int rank = i == 4 ? -1 : slots.x < 0 ? from : slots.x / group.slots;
    if (rank != from) {
      const uint64_t end = carried(group, from, group.rank, together, now);
      last = end > last ? end : last;
      from = rank;
      together = 0;
    }
    together += slots.x < 0 ? 0 : bytes;
  }
  wait_until(last);
}

}  // namespace mok
#endif
