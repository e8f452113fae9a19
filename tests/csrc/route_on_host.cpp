// route.cuh and choices.cuh on the host, many cases in one call. A CUDA thread
// is a stack of its own; at a collective it gives way, and which of those that
// may go on does is drawn, so what a missing barrier leaves open happens in one
// order and in the other. Buffers have words around them that must stay as they
// are.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#define __device__
#define __forceinline__ inline
using std::max;
using std::min;

struct Index {
  unsigned x;
};
static Index threadIdx, blockDim;

namespace {

constexpr int kMostThreads = 1024;
constexpr int kStackBytes =
    (16 << 10) + 192; // not a power of two: each in cache lines of its own

enum class State { kMayGoOn, kWaitsForWarp, kWaitsForCta, kHasEnded };

struct Thread {
  jmp_buf here;
  State state;
};

std::vector<Thread> threads(kMostThreads);
std::vector<char> stacks(kMostThreads *kStackBytes);
jmp_buf scheduler;
ucontext_t outside, inside;
const std::function<void()> *body;
std::array<int, kMostThreads> exchanged;
std::mt19937 draw;

[[gnu::noinline]] void give_way(State state) {
  threads[threadIdx.x].state = state;
  if (_setjmp(threads[threadIdx.x].here) == 0)
    _longjmp(scheduler, 1);
}

[[gnu::noinline]] void go_on(int thread) {
  threadIdx.x = thread;
  if (_setjmp(scheduler) == 0)
    _longjmp(threads[thread].here, 1);
}

void live() {
  if (_setjmp(threads[threadIdx.x].here) == 0)
    swapcontext(&inside, &outside);
  for (;;) {
    (*body)();
    give_way(State::kHasEnded);
  }
}

void make_threads() {
  for (int thread = 0; thread < kMostThreads; ++thread) {
    getcontext(&inside);
    inside.uc_stack.ss_sp = &stacks[thread * kStackBytes];
    inside.uc_stack.ss_size = kStackBytes;
    makecontext(&inside, live, 0);
    threadIdx.x = thread;
    swapcontext(&outside, &inside);
  }
}

// All of a group wait for it: they may go on.
void release(int count, int group, State waiting) {
  for (int first = 0; first < count; first += group) {
    const auto begin = threads.begin() + first, end = begin + group;
    const auto waits = [&](const Thread &t) { return t.state == waiting; };
    if (std::all_of(begin, end, waits)) {
      std::for_each(begin, end, [](Thread &t) { t.state = State::kMayGoOn; });
    }
  }
}

// Runs a CTA; false when it stands still, and then its threads are of no more
// use.
bool launch(int count, const std::function<void()> &what) {
  static bool made = false;
  if (!made)
    make_threads();
  made = true;
  body = &what;
  blockDim.x = count;
  for (int thread = 0; thread < count; ++thread)
    threads[thread].state = State::kMayGoOn;
  for (;;) {
    const unsigned first = draw(),
                   stride = draw() | 1; // odd: meets every thread, 2^n of them
    bool moved = false, ended = true;
    for (int i = 0; i < count; ++i) {
      const int thread = (first + i * stride) % count;
      if (threads[thread].state == State::kMayGoOn) {
        go_on(thread);
        moved = true;
      }
      ended = ended && threads[thread].state == State::kHasEnded;
    }
    if (ended)
      return true;
    if (!moved)
      return made = false;
    release(count, 32, State::kWaitsForWarp);
    release(count, count, State::kWaitsForCta);
  }
}

// Every lane's value, then `read` of its warp's, before any lane goes on.
template <class Read> int exchange(int mine, Read read) {
  exchanged[threadIdx.x] = mine;
  give_way(State::kWaitsForWarp);
  const int result = read(&exchanged[threadIdx.x / 32 * 32]);
  give_way(State::kWaitsForWarp);
  return result;
}

} // namespace

static void __syncwarp() { give_way(State::kWaitsForWarp); }
[[maybe_unused]] static void __syncthreads() { give_way(State::kWaitsForCta); }
static void __threadfence_system() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}
static int __popc(uint32_t bits) { return std::popcount(bits); }
static uint32_t __match_any_sync(uint32_t, int mine) {
  return exchange(mine, [&](const int *value) {
    uint32_t peers = 0;
    for (int lane = 0; lane < 32; ++lane)
      peers |= (value[lane] == mine ? 1u : 0u) << lane;
    return static_cast<int>(peers);
  });
}
static int __shfl_sync(uint32_t, int mine, int from) {
  return exchange(mine, [&](const int *value) { return value[from]; });
}
static int __shfl_up_sync(uint32_t, int mine, int by) {
  const int lane = threadIdx.x % 32;
  return exchange(mine, [&](const int *value) {
    return value[lane < by ? lane : lane - by];
  });
}

static uint32_t __ballot_sync(uint32_t, bool mine) {
  return exchange(mine, [](const int *value) {
    uint32_t all = 0;
    for (int lane = 0; lane < 32; ++lane)
      all |= (value[lane] != 0 ? 1u : 0u) << lane;
    return static_cast<int>(all);
  });
}

static uint32_t __reduce_add_sync(uint32_t, uint32_t mine) {
  return exchange(static_cast<int>(mine), [](const int *value) {
    uint32_t sum = 0;
    for (int lane = 0; lane < 32; ++lane)
      sum += static_cast<uint32_t>(value[lane]);
    return static_cast<int>(sum);
  });
}
static int __reduce_max_sync(uint32_t, int mine) {
  return exchange(
      mine, [](const int *value) { return *std::max_element(value, value + 32); });
}
static int __reduce_min_sync(uint32_t, int mine) {
  return exchange(
      mine, [](const int *value) { return *std::min_element(value, value + 32); });
}
static void atomicAdd(uint32_t *word, uint32_t amount) { *word += amount; }

#include "device/choices.cuh"
#include "device/view.cuh"

namespace {

constexpr int32_t kUnset = -77;
constexpr int kAround = 64;

template <class T> struct Buffer {
  std::vector<T> all;
  explicit Buffer(int count)
      : all(count + 2 * kAround, static_cast<T>(kUnset)) {}
  T *data() { return all.data() + kAround; }
  int count() const { return static_cast<int>(all.size()) - 2 * kAround; }
  // From word `used` on nobody has written, nor before the first.
  bool untouched_from(int used) const {
    const auto unset = [](T word) { return word == static_cast<T>(kUnset); };
    return std::all_of(all.begin(), all.begin() + kAround, unset) &&
           std::all_of(all.begin() + kAround + used, all.end(), unset);
  }
  bool intact() const { return untouched_from(count()); }
};

std::vector<int> in_any_order(int count, int step) {
  std::vector<int> order((count + step - 1) / step);
  for (size_t i = 0; i < order.size(); ++i)
    order[i] = static_cast<int>(i) * step;
  std::shuffle(order.begin(), order.end(), draw);
  return order;
}

bool same(const mok::Census &a, const mok::Census &b) {
  return a.sent == b.sent && a.sent_slots == b.sent_slots &&
         a.received_slots == b.received_slots && a.kept == b.kept;
}

// Whether every rank's view of what `all` has placed is the part of it that it
// should be, for some number of ranks among which tokens and experts can be
// shared. start: scan_starts'.
bool views_are_right(const mok::RouteArguments &all, const int32_t *start) {
  std::vector<int> sizes;
  for (int ranks = 1; ranks <= 8; ++ranks) {
    if (all.experts % ranks == 0 && all.tokens % ranks == 0)
      sizes.push_back(ranks);
  }
  const int ranks = sizes[draw() % sizes.size()], local = all.experts / ranks;
  const int slots = all.tokens / ranks * all.choices;
  int most = 0, loaded = 0; // rows, and on which rank, of an expert
  int schedule = 0;         // of a rank
  for (int expert = 0; expert < all.experts; ++expert) {
    const int rows = start[expert + 1] - start[expert];
    if (rows > most)
      loaded = expert / local;
    most = max(most, rows);
  }
  for (int rank = 0; rank < ranks; ++rank)
    schedule = max(schedule, start[(rank + 1) * local] - start[rank * local]);
  const bool fits = most == 0 || draw() % 4 != 0;
  const int least = draw() % 2 == 0 ? most : schedule; // with laps, or without
  const int room =
      fits ? least + static_cast<int>(draw() % 2) * 128 : most - 128;
  bool right = true;
  for (int rank = 0; rank < ranks && right; ++rank) {
    const int tokens =
        max(0, all.tokens / ranks - static_cast<int>(draw() % 3));
    Buffer<int32_t> row(tokens * all.choices), slot(schedule),
        next(all.experts + 1);
    Buffer<int32_t> row_start(local + 1), row_count(local), shared(2), count(1),
        faulty(1);
    Buffer<float> prob(schedule);
    mok::RouteFault choice{};
    mok::ExchangeFault fault{};
    mok::ViewArguments a{.route = all,
                         .peers = {.base = nullptr,
                                   .ranks = ranks,
                                   .rank = rank,
                                   .slots = slots},
                         .tokens = tokens,
                         .rows = room,
                         .refused = nullptr,
                         .record = &fault};
    a.route.row_start = row_start.data();
    a.route.row_count = row_count.data();
    a.route.shared_start = shared.data();
    a.route.shared_count = count.data();
    a.route.faulty = faulty.data();
    a.route.row_TK = row.data();
    a.route.slot_R = slot.data();
    a.route.prob_R = prob.data();
    mok::Census census{}, counted{};
    a.route.census = &census;
    a.route.fault = &choice;
    bool ran = launch(32, [&] {
      right = mok::within_budget(a, start, true) == fits && right;
    });
    for (int chunk : in_any_order(all.chunks, 1))
      ran = ran && launch(32, [&] {
              mok::view_chunk(a, chunk, start, next.data(), fits);
            });
    ran = ran && (!fits || launch(32, [&] {
            for (int e = 0; e < local; ++e)
              mok::view_padding(a, e, start);
          }));
    ran = ran && launch(32, [&] { mok::view_split(a, start, fits); });
    if (!ran)
      return false;

    const int first = rank * local, base = start[first],
              rows = start[first + local] - base;
    const int used = fits ? rows : 0;
    right = right && slot.untouched_from(used) && prob.untouched_from(used);
    for (auto *b :
         {&row, &next, &row_start, &row_count, &shared, &count, &faulty})
      right = right && b->intact();
    for (int i = 0; i < used; ++i) {
      right = right && slot.data()[i] == all.slot_R[base + i];
      right = right && prob.data()[i] == all.prob_R[base + i];
    }
    for (int e = 0; e <= local; ++e)
      right =
          right && row_start.data()[e] == (fits ? start[first + e] - base : 0);
    for (int e = 0; e < local; ++e)
      right =
          right && row_count.data()[e] == (fits ? all.row_count[first + e] : 0);
    for (int i = 0; i < row.count(); ++i) {
      const int there = all.row_TK[rank * slots + i];
      const bool here = there >= base && there < base + rows;
      const int wanted = !fits || there < 0 ? -1
                         : here && rows <= room ? there - base
                                                : mok::kElsewhere;
      right = right && row.data()[i] == wanted;
      counted.sent += wanted != -1;
      counted.sent_slots += wanted != -1 ? i + 1 : 0;
      counted.kept += wanted >= 0;
    }
    for (int i = 0; i < used; ++i)
      counted.received_slots += slot.data()[i] + 1;
    right = right && same(census, counted);
    const mok::ExchangeFault wanted =
        fits ? mok::ExchangeFault{}
             : mok::ExchangeFault{.kind = static_cast<int32_t>(
                                      mok::ExchangeFaultKind::kBudget),
                                  .rank = loaded,
                                  .value = most,
                                  .wanted = room,
                                  .balanced = slots};
    right = right && fault.kind == wanted.kind && fault.rank == wanted.rank;
    right =
        right && fault.value == wanted.value && fault.wanted == wanted.wanted;
    right = right && fault.balanced == wanted.balanced;
    right = right && faulty.data()[0] == (fits ? all.faulty[0] : 1);
    right = right && count.data()[0] == tokens &&
            shared.data()[1] == (tokens + 127) / 128 * 128;
  }
  return right;
}

// The words of test_route.py's oracle; empty when a CTA stood still.
std::vector<int32_t> routed(int tokens, int choices, int experts,
                            const int32_t *ids, const float *probs) {
  const int slots = tokens * choices,
            chunks = mok::tiles_of(slots, mok::kChunk);
  const int columns = experts + 1, most = slots + 127 * min(slots, experts);
  Buffer<int32_t> id(slots), counts((chunks + 1) * columns), start(columns),
      count(experts);
  Buffer<int32_t> row(slots), slot(most), starts(columns), next(columns);
  Buffer<int32_t> shared_start(2), shared_count(1), faulty(1);
  Buffer<float> prob(slots), row_prob(most);
  std::copy(ids, ids + slots, id.data());
  std::copy(probs, probs + slots, prob.data());
  mok::RouteFault fault{};
  mok::Census census{}, counted{};
  const mok::RouteArguments a{.expert_TK = id.data(),
                              .prob_TK = prob.data(),
                              .tokens = tokens,
                              .choices = choices,
                              .experts = experts,
                              .chunks = chunks,
                              .counts = counts.data(),
                              .row_start = start.data(),
                              .row_count = count.data(),
                              .shared_start = shared_start.data(),
                              .shared_count = shared_count.data(),
                              .faulty = faulty.data(),
                              .row_TK = row.data(),
                              .slot_R = slot.data(),
                              .prob_R = row_prob.data(),
                              .census = &census,
                              .fault = &fault,
                              .stream = nullptr};
  static int32_t sums[mok::kPrefixSegments][mok::kPrefixColumns];
  bool ran = true;
  for (int chunk : in_any_order(chunks, 1))
    ran = ran && launch(32, [&] { mok::count_chunk(a, chunk, next.data()); });
  for (int first : in_any_order(columns, mok::kPrefixColumns))
    ran = ran && launch(mok::kPrefixColumns * mok::kPrefixSegments,
                        [&] { mok::prefix_columns(a, first, sums); });
  ran = ran && launch(32, [&] { mok::scan_starts(a, starts.data()); });
  for (int chunk : in_any_order(chunks, 1))
    ran = ran && launch(32, [&] {
            mok::place_chunk(a, chunk, starts.data(), next.data());
          });
  const std::vector<int> order = in_any_order(experts, 1);
  ran = ran && launch(32, [&] {
          for (int expert : order)
            mok::place_padding(a, expert, starts.data());
        });
  ran = ran && launch(32, [&] { mok::place_split(a, starts.data()); });
  if (!ran)
    return {};

  const int rows = max(0, min(start.data()[experts], most));
  bool right = slot.untouched_from(rows) && row_prob.untouched_from(rows) &&
               prob.intact();
  for (const auto *b : {&id, &counts, &start, &count, &row, &starts, &next,
                        &shared_start, &shared_count, &faulty}) {
    right = right && b->intact();
  }
  for (int i = 0; i < rows; ++i) {
    const int from = slot.data()[i];
    right = right && row_prob.data()[i] ==
                         (from < 0 || from >= slots ? 0.0f : prob.data()[from]);
  }
  for (int i = 0; i < slots; ++i) {
    counted.sent += row.data()[i] >= 0;
    counted.sent_slots += row.data()[i] >= 0 ? i + 1 : 0;
  }
  for (int i = 0; i < rows; ++i)
    counted.received_slots += slot.data()[i] + 1;
  counted.kept = counted.sent;
  right = right && same(census, counted);
  if (right && draw() % 4 == 0)
    right = views_are_right(a, starts.data());
  std::vector<int32_t> words{right,         fault.kind,
                             fault.expert,  fault.token,
                             fault.choice,  fault.experts,
                             fault.choices, std::bit_cast<int32_t>(fault.prob)};
  const auto add = [&](Buffer<int32_t> &b, int n) {
    words.insert(words.end(), b.data(), b.data() + n);
  };
  add(faulty, 1);
  add(shared_start, 2);
  add(shared_count, 1);
  add(start, columns);
  add(count, experts);
  add(row, slots);
  add(slot, rows);
  return words;
}

} // namespace

// cases: tokens, choices, experts, seed of the order of things, room in `out`,
// for each. Where the words do not fill the room, the first is -1 (they are too
// few or too many) or -2 (a CTA stood still).
extern "C" void route_cases(const int32_t *cases, int32_t count,
                            const int32_t *ids, const float *probs,
                            int32_t *out) {
  for (; count > 0; --count, cases += 5) {
    draw.seed(static_cast<uint32_t>(cases[3]));
    const std::vector<int32_t> words =
        routed(cases[0], cases[1], cases[2], ids, probs);
    const size_t room = static_cast<size_t>(cases[4]);
    std::copy_n(words.begin(), min(words.size(), room), out);
    if (words.size() != room)
      *out = words.empty() ? -2 : -1;
    ids += cases[0] * cases[1];
    probs += cases[0] * cases[1];
    out += room;
  }
}

// Of every token, then the gradient of what was chosen; false when a warp stood
// still.
extern "C" bool choose(const float *dense, const bool *map, int32_t tokens,
                       int32_t choices, int32_t experts, int32_t order,
                       int32_t *expert, float *prob, const float *d_prob,
                       float *d_dense) {
  draw.seed(static_cast<uint32_t>(order));
  const mok::ChoiceArguments forward{.dense_TE = dense,
                                     .map_TE = map,
                                     .tokens = tokens,
                                     .choices = choices,
                                     .experts = experts,
                                     .type = mok::Dense::kFp32,
                                     .expert_TK = expert,
                                     .prob_TK = prob,
                                     .stream = nullptr};
  const mok::SpreadArguments backward{.d_prob_TK = d_prob,
                                      .expert_TK = expert,
                                      .tokens = tokens,
                                      .choices = choices,
                                      .experts = experts,
                                      .type = mok::Dense::kFp32,
                                      .d_dense_TE = d_dense,
                                      .stream = nullptr};
  bool ran = true;
  for (int token : in_any_order(tokens, 1)) {
    ran = ran && launch(32, [&] {
            mok::choose_token<float>(forward, token, threadIdx.x);
          });
    ran = ran && launch(32, [&] {
            mok::spread_token<float>(backward, token, threadIdx.x);
          });
  }
  return ran;
}
