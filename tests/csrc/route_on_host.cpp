// route.cuh on the host: a lane is a thread, a warp's collectives are barriers.
// Reads cases from stdin, "T K E" and T x K ids each, until the end; writes for
// each: faulty, the fault record, starts, counts, rows of slots, slots of rows
// up to the last start.
#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
using std::max;
using std::min;

struct Index {
  unsigned x;
};
thread_local Index threadIdx;
Index blockDim;

struct Warp {
  std::barrier<> barrier{32};
  std::array<int, 32> value;

  // Every lane's value, then `read` of them, before any lane goes on.
  template <class Read>
  int exchange(int mine, Read read) {
    value[threadIdx.x % 32] = mine;
    barrier.arrive_and_wait();
    const int result = read(value);
    barrier.arrive_and_wait();
    return result;
  }
};
thread_local Warp* warp;
thread_local std::barrier<>* cta;

void __syncwarp() { warp->barrier.arrive_and_wait(); }
void __syncthreads() { cta->arrive_and_wait(); }
void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
int __popc(uint32_t bits) { return std::popcount(bits); }

uint32_t __match_any_sync(uint32_t, int mine) {
  return warp->exchange(mine, [&](const auto& value) {
    uint32_t peers = 0;
    for (int lane = 0; lane < 32; ++lane) peers |= (value[lane] == mine ? 1u : 0u) << lane;
    return static_cast<int>(peers);
  });
}
uint32_t __ballot_sync(uint32_t, bool mine) {
  return warp->exchange(mine, [&](const auto& value) {
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= (value[lane] ? 1u : 0u) << lane;
    return static_cast<int>(votes);
  });
}
int __shfl_sync(uint32_t, int mine, int from) {
  return warp->exchange(mine, [&](const auto& value) { return value[from]; });
}
int __shfl_up_sync(uint32_t, int mine, int by) {
  const int lane = threadIdx.x % 32;
  return warp->exchange(mine,
                        [&](const auto& value) { return value[lane < by ? lane : lane - by]; });
}

#include "device/route.cuh"

template <class Body>
void launch(int threads, Body body) {
  std::vector<Warp> warps(threads / 32);
  std::barrier<> barrier(threads);
  blockDim.x = threads;
  std::vector<std::thread> running;
  for (int thread = 0; thread < threads; ++thread) {
    running.emplace_back([&, thread] {
      threadIdx.x = thread;
      warp = &warps[thread / 32];
      cta = &barrier;
      body();
    });
  }
  for (auto& thread : running) thread.join();
}

void print(const int32_t* values, int count) {
  for (int i = 0; i < count; ++i) std::printf("%d ", values[i]);
  std::printf("\n");
}

int main() {
  static constexpr int32_t kUnset = -77;
  int tokens, choices, experts;
  while (std::scanf("%d %d %d", &tokens, &choices, &experts) == 3) {
    const int slots = tokens * choices, chunks = mok::tiles_of(slots, mok::kChunk),
              columns = experts + 1;
    const auto words = [](int count) { return std::vector<int32_t>(count, kUnset); };
    auto ids = words(slots), counts = words((chunks + 1) * columns), start = words(columns),
         count = words(experts);
    auto row = words(slots), slot = words(slots + 128 * experts), starts = words(columns),
         next = words(columns);
    for (int& id : ids) {
      if (std::scanf("%d", &id) != 1) return 1;
    }
    int32_t shared_start[2], shared_count, faulty;
    std::vector<float> prob(slots), row_prob(slot.size());
    for (int i = 0; i < slots; ++i) prob[i] = static_cast<float>(i);
    mok::RouteFault fault{};
    const mok::RouteArguments a{.expert_TK = ids.data(),
                                .prob_TK = prob.data(),
                                .tokens = tokens,
                                .choices = choices,
                                .experts = experts,
                                .chunks = chunks,
                                .counts = counts.data(),
                                .row_start = start.data(),
                                .row_count = count.data(),
                                .shared_start = shared_start,
                                .shared_count = &shared_count,
                                .faulty = &faulty,
                                .row_TK = row.data(),
                                .slot_R = slot.data(),
                                .prob_R = row_prob.data(),
                                .fault = &fault,
                                .stream = nullptr};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      launch(32, [&] { mok::count_chunk(a, chunk, next.data()); });
    }
    static int32_t sums[mok::kPrefixSegments][mok::kPrefixColumns];
    for (int first = 0; first < columns; first += mok::kPrefixColumns) {
      launch(mok::kPrefixColumns * mok::kPrefixSegments,
             [&] { mok::prefix_columns(a, first, sums); });
    }
    launch(32, [&] { mok::scan_starts(a, starts.data()); });
    for (int chunk = chunks - 1; chunk >= 0; --chunk) {  // in any order
      launch(32, [&] { mok::place_chunk(a, chunk, starts.data(), next.data()); });
    }
    launch(32, [&] {
      for (int expert = 0; expert < experts; ++expert) mok::place_padding(a, expert, starts.data());
      mok::place_split(a, starts.data());
    });
    print(&faulty, 1);
    print(&fault.kind, 4);
    print(start.data(), columns);
    print(count.data(), experts);
    print(row.data(), slots);
    print(slot.data(), start[experts]);

    bool right = shared_count == tokens && shared_start[0] == 0 &&
                 shared_start[1] == (tokens + 127) / 128 * 128;
    for (int i = 0; i < start[experts]; ++i)
      right = right && row_prob[i] == (slot[i] < 0 ? 0.0f : prob[slot[i]]);
    for (size_t i = start[experts]; i < slot.size(); ++i) right = right && slot[i] == kUnset;
    std::printf("%d\n", right ? 1 : 0);
  }
  return 0;
}
