// Stands for csrc/device/ptx.cuh: the same functions on the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../check.h"

namespace mok {

inline bool write_record(Fault* fault, Tag tag, uint32_t value) {
  if (fault->tag != 0) return false;
  fault->tag = static_cast<uint32_t>(tag);
  fault->thread = threadIdx.x;
  fault->value = value;
  return true;
}
[[noreturn]] inline void fail(Fault*, Tag tag, uint32_t value) {
  emulated::stop(std::string(describe(tag)) + ", saw " + std::to_string(value));
}

inline uint64_t global_nanoseconds() {  // each look at it takes a thousand
  static uint64_t now = 0;
  return now += 1000;
}
struct Stopwatch {  // of a wait that gives way
  bool passes(int64_t) const { return emulated::expired(); }
};
inline int lane_index() { return emulated::lane(); }

inline uint32_t shared_address(const void* pointer) {
  const auto* const at = static_cast<const uint8_t*>(pointer);
  if (at < emulated::shared() || at >= emulated::shared() + emulated::kSharedBytes) {
    emulated::stop("an address outside shared memory");
  }
  return static_cast<uint32_t>(at - emulated::shared());
}
inline uint8_t* at_shared(uint32_t address) { return emulated::shared() + address; }

// ---- mbarrier

struct Barrier {
  int16_t count, pending;
  int32_t phase : 1, bytes : 31;

  void settle() {
    if (pending < 0) emulated::stop("more arrivals at a barrier than it was made for");
    if (pending > 0 || bytes != 0) return;
    phase = ~phase;
    pending = count;
  }
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));
inline Barrier& barrier_of(uint64_t& word) { return reinterpret_cast<Barrier&>(word); }

inline void barrier_init(uint64_t& barrier, uint32_t arrivals) {
  const auto n = static_cast<int16_t>(arrivals);
  barrier_of(barrier) = {n, n, 0, 0};
}
inline void barrier_init_fence() {}
inline void arrive(uint64_t& barrier) {
  emulated::give_way();
  --barrier_of(barrier).pending;
  barrier_of(barrier).settle();
}
constexpr int kWarpArrivals = 1;
inline void arrive_of_warp(uint64_t& barrier) {
  if (threadIdx.x % 32 == 0) arrive(barrier);
}
inline void arrive_expect(uint64_t& barrier, uint32_t bytes) {
  emulated::give_way();
  barrier_of(barrier).bytes += static_cast<int32_t>(bytes);
  --barrier_of(barrier).pending;
  barrier_of(barrier).settle();
}
inline void complete_bytes(uint64_t& barrier, uint32_t bytes) {
  barrier_of(barrier).bytes -= static_cast<int32_t>(bytes);
  barrier_of(barrier).settle();
}
inline bool completed(uint64_t& barrier, uint32_t parity) {
  return (barrier_of(barrier).phase != 0 ? 1u : 0u) != parity;
}
inline void wait(uint64_t& barrier, uint32_t parity, Fault*, Tag tag) {
  if (parity > 1) emulated::stop("a parity above 1");
  emulated::block(describe(tag), [&barrier, parity] { return completed(barrier, parity); });
}

// ---- order: all of it, here

inline void fence_async_shared() {}
inline void release_tensor_maps() {}
inline void fence_async() {}
inline void fence_system() {}

// ---- counters

inline int32_t load_acquire(const int32_t* word) { return *word; }
inline void add_release(int32_t* word, int32_t amount) {
  emulated::give_way();
  *word += amount;
}
inline int take_ticket(uint32_t* word) {
  emulated::give_way();
  return static_cast<int>((*word)++);
}
inline void wait_count(const int32_t* word, int32_t wanted, Fault*, Tag tag) {
  emulated::block(describe(tag), [word, wanted] { return *word >= wanted; });
}
inline uint4 load_written(const uint4* from) { return *from; }
inline float2 load_written(const float2* from) { return *from; }
inline int32_t load_written(const int32_t* from) { return *from; }
inline float load_written(const float* from) { return *from; }
inline uint32_t load_acquire_system(const uint32_t* word) { return *word; }
inline uint64_t load_acquire_system(const uint64_t* word) { return *word; }
inline uint32_t load_relaxed_system(const uint32_t* word) { return *word; }
inline void store_relaxed_system(uint32_t* word, uint32_t value) { *word = value; }
inline void store_relaxed_system(uint64_t* word, uint64_t value) { *word = value; }

enum class NamedBarrier : int { kSetUp = 0, kZeroed = 1 };
inline void named_sync(NamedBarrier name, int offset, int threads) {
  emulated::sync(static_cast<int>(name) + offset, threads);
}

// ---- bulk copies: a load reads and writes at once, some time later; a store
// reads some time later and writes later still

inline void under_way(std::function<void()> copy) {
  emulated::machine->copies.push_back(std::move(copy));
}
template <class Read, class Write>  // Read gives what Write takes
void store_later(Read read, Write write) {
  const auto group = emulated::now().groups.back();
  ++group->unread;
  ++group->unwritten;
  under_way([group, read, write] {
    auto bytes = read();
    --group->unread;
    under_way([group, bytes, write] {
      write(bytes);
      --group->unwritten;
    });
  });
}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint64_t& barrier) {
  if (to % 16 + bytes % 16 + reinterpret_cast<uint64_t>(from) % 16 > 0 || bytes == 0) {
    emulated::stop("a bulk copy that is not of 16 bytes");
  }
  under_way([shared = at_shared(to), from, bytes, &barrier] {
    std::memcpy(shared, from, bytes);
    complete_bytes(barrier, bytes);
  });
}
inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  store_later(
      [shared = at_shared(from), bytes] { return std::vector<uint8_t>(shared, shared + bytes); },
      [to](const std::vector<uint8_t>& bytes) { std::memcpy(to, bytes.data(), bytes.size()); });
}
inline void bulk_commit() { emulated::now().groups.push_back(std::make_shared<emulated::Group>()); }
template <int PENDING, class Open>
void await_groups(const char* what, Open open) {
  auto& groups = emulated::now().groups;
  while (groups.size() > PENDING + 40 && !open(*groups.front())) groups.erase(groups.begin());
  emulated::block(what, [&groups, open] {
    for (size_t i = 0; i + 1 + PENDING < groups.size(); ++i) {
      if (open(*groups[i])) return false;
    }
    return true;
  });
}
template <int PENDING>
void bulk_wait_read() {
  await_groups<PENDING>("that its stores have read",
                        [](const emulated::Group& g) { return g.unread > 0; });
}
template <int PENDING>
void bulk_wait() {
  await_groups<PENDING>("that its stores have written",
                        [](const emulated::Group& g) { return g.unwritten > 0; });
}

// ---- shared memory

template <int COUNT>
void move_matrices(uint32_t address, uint32_t (&r)[COUNT], bool stores) {
  uint64_t row[32];
  std::copy_n(emulated::gather(address), 32, row);
  const int lane = emulated::lane();
  for (int i = 0; i < COUNT; ++i) {
    uint8_t* const word = at_shared(static_cast<uint32_t>(row[8 * i + lane / 4])) + lane % 4 * 4;
    stores ? std::memcpy(word, &r[i], 4) : std::memcpy(&r[i], word, 4);
  }
  emulated::gather(0);  // all have moved theirs
}
inline void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t r[4] = {a, b, c, d};
  move_matrices(address, r, true);
}
inline void store_matrices(uint32_t address, uint32_t a, uint32_t b) {
  uint32_t r[2] = {a, b};
  move_matrices(address, r, true);
}
template <int COUNT>
void load_matrices(uint32_t address, uint32_t (&r)[COUNT]) {
  move_matrices(address, r, false);
}
template <class T>
T shared_value(uint32_t address) {
  T value;
  std::memcpy(&value, at_shared(address), sizeof(T));
  return value;
}
inline void store_shared(uint32_t address, float x, float y) {
  const float2 both = {x, y};
  std::memcpy(at_shared(address), &both, 8);
}
inline float2 load_shared(uint32_t address) { return shared_value<float2>(address); }
inline uint4 load_shared_16(uint32_t address) { return shared_value<uint4>(address); }
inline void zero_shared_16(uint32_t address) { std::memset(at_shared(address), 0, 16); }

// ---- numbers

inline uint32_t pack(float low, float high) {
  return __nv_bfloat16(low).bits | static_cast<uint32_t>(__nv_bfloat16(high).bits) << 16;
}
inline float low_of(uint32_t both) { return __uint_as_float(both << 16); }
inline float high_of(uint32_t both) { return __uint_as_float(both & 0xffff0000u); }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal_fast(float x) { return 1.0f / x; }

}  // namespace mok
