// A grid on the host: every thread of every CTA is a fiber, and one scheduler
// draws who goes on.
//
// What it shows: that roles never wait for each other in a circle, that every
// arrival is counted once, that no slot is overwritten or read too early
// (copies and tensor products take effect as late as the draw wants), and that
// the bytes are right. What it does not: the order in which other threads see
// writes (fences do nothing here), registers, time.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace emulated {

constexpr int kSharedBytes = 232448;
constexpr size_t kStackBytes = 96 * 1024;

struct Index {
  unsigned x = 0;
};

struct Warp {  // a collective of its lanes; all 32 take part in each
  uint32_t arrived = 0, generation = 0;
  uint64_t value[32], seen[32];
};

struct NamedBarrier {
  int arrived = 0;
  uint32_t generation = 0;
};

struct Cta {
  Index block, grid, size;
  int threads;
  std::unique_ptr<uint8_t[]> memory;
  uint8_t* shared;
  std::vector<Warp> warps;
  std::map<int, NamedBarrier> barriers;
  std::map<std::string, std::unique_ptr<uint8_t[]>> objects;  // static ones in shared memory
};

struct Group {  // of bulk stores
  int unread = 0, unwritten = 0;
};

struct Launch {
  std::function<void()> kernel;
  int ctas, threads;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Cta* cta = nullptr;
  const Launch* launch = nullptr;
  void* stream = nullptr;
  Index thread;
  bool (*ready)(void*) = nullptr;  // null: it can go on
  void* condition = nullptr;
  const char* waits = "";
  bool polls = false, ended = false;
  std::vector<std::shared_ptr<Group>> groups;  // the last one is open
  std::vector<std::vector<std::function<void()>>> products;
};

struct Machine {
  std::mt19937_64 draw;
  std::map<void*, std::deque<Launch>> streams;  // the first of each runs
  std::map<void*, int> running;                 // fibers of it that have not ended
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::function<void()>> copies;  // under way, done in any order
  ucontext_t scheduler;
  Fiber* now = nullptr;
  std::string fault;     // why it stopped
  int started_ctas = 0;  // of a direction's grid; the others never start. 0: all
  int64_t switches = 0;
  bool expired = false;  // nobody but those who look at the clock can go on
};

inline std::unique_ptr<Machine> machine;
inline int planted = 0;  // a fault of emulation.py's list; 0: none

inline Fiber& now() { return *machine->now; }
inline Warp& warp() { return now().cta->warps[now().thread.x / 32]; }
inline int lane() { return static_cast<int>(now().thread.x % 32); }
inline uint8_t* shared() { return now().cta->shared; }

template <class T>
T& shared_object(const char* name) {
  auto& memory = now().cta->objects[name];
  if (!memory) {
    memory = std::make_unique<uint8_t[]>(sizeof(T));
    std::fill_n(memory.get(), sizeof(T), 0xff);
  }
  return *reinterpret_cast<T*>(memory.get());
}

inline void leave_fiber() { swapcontext(&machine->now->context, &machine->scheduler); }

// Goes on when condition() holds.
template <class Condition>
void block(const char* waits, Condition condition) {
  Fiber& self = now();
  while (!condition()) {
    self.ready = [](void* c) { return (*static_cast<Condition*>(c))(); };
    self.condition = &condition;
    self.waits = waits;
    leave_fiber();
  }
}

inline void give_way() {
  now().waits = "its turn";
  leave_fiber();
}

[[noreturn]] inline void stop(const std::string& why) {
  if (machine->fault.empty()) {
    machine->fault = "CTA " + std::to_string(now().cta->block.x) + ", thread " +
                     std::to_string(now().thread.x) + ": " + why;
  }
  for (;;) leave_fiber();
}

// After a failed poll: whether nobody else has had anything to do for long.
inline bool expired() {
  now().polls = true;
  give_way();
  return machine->expired;
}

// All lanes' values.
inline const uint64_t* gather(uint64_t value) {
  Warp& w = warp();
  const int i = lane();
  if (w.arrived >> i & 1) stop("a lane came twice to a collective of its warp");
  w.value[i] = value;
  w.arrived |= 1u << i;
  const uint32_t generation = w.generation;
  if (w.arrived == ~0u) {
    std::copy(w.value, w.value + 32, w.seen);
    w.arrived = 0;
    ++w.generation;
  } else {
    block("the lanes of its warp", [&w, generation] { return w.generation != generation; });
  }
  return w.seen;
}

inline void sync(int name, int threads) {
  NamedBarrier& b = now().cta->barriers[name];
  const uint32_t generation = b.generation;
  if (++b.arrived == threads) {
    b.arrived = 0;
    ++b.generation;
  } else {
    block("a named barrier", [&b, generation] { return b.generation != generation; });
  }
}

inline void enter() {
  machine->now->launch->kernel();
  machine->now->ended = true;
  for (;;) leave_fiber();
}

inline std::string who_waits() {
  std::map<std::string, int> count;
  for (const auto& f : machine->fibers) {
    if (f->ended) continue;
    ++count["CTA " + std::to_string(f->cta->block.x) + ", warp " +
            std::to_string(f->thread.x / 32) + ": " + f->waits];
  }
  std::string text = "nobody can go on:";
  for (const auto& [who, lanes] : count) text += "\n  " + who + " (" + std::to_string(lanes) + ")";
  return text;
}

inline void run_one_copy() {
  std::swap(machine->copies[machine->draw() % machine->copies.size()], machine->copies.back());
  const auto copy = std::move(machine->copies.back());
  machine->copies.pop_back();
  copy();
}

inline void start(void* stream, const Launch& launch) {
  for (int c = 0; c < launch.ctas; ++c) {
    machine->ctas.push_back(std::make_unique<Cta>());
    Cta& cta = *machine->ctas.back();
    cta.block = {static_cast<unsigned>(c)};
    cta.grid = {static_cast<unsigned>(launch.ctas)};
    cta.size = {static_cast<unsigned>(launch.threads)};
    cta.threads = launch.threads;
    if (launch.threads == 384 && machine->started_ctas > 0 && c >= machine->started_ctas) continue;
    cta.warps.resize((launch.threads + 31) / 32);
    cta.memory = std::make_unique<uint8_t[]>(kSharedBytes + 1024);
    cta.shared = cta.memory.get() + 1024 - reinterpret_cast<uint64_t>(cta.memory.get()) % 1024;
    std::fill_n(cta.shared, kSharedBytes, 0xff);
    for (int t = 0; t < launch.threads; ++t) {
      machine->fibers.push_back(std::make_unique<Fiber>());
      Fiber& f = *machine->fibers.back();
      f.cta = &cta;
      f.launch = &launch;
      f.stream = stream;
      f.thread = {static_cast<unsigned>(t)};
      f.stack = std::unique_ptr<char[]>(new char[kStackBytes]);
      f.groups.push_back(std::make_shared<Group>());
      f.products.emplace_back();
      getcontext(&f.context);
      f.context.uc_stack = {.ss_sp = f.stack.get(), .ss_flags = 0, .ss_size = kStackBytes};
      f.context.uc_link = nullptr;
      makecontext(&f.context, enter, 0);
      ++machine->running[stream];
    }
  }
}

inline void start_what_can() {
  for (auto& [stream, launches] : machine->streams) {
    int& fibers = machine->running[stream];
    if (fibers > 0 || launches.empty()) continue;
    if (fibers == 0) launches.pop_front();  // the one that has ended
    if (launches.empty()) continue;
    fibers = 0;
    start(stream, launches.front());
  }
}

// Runs all launches to their end, or until nobody can go on.
inline void run() {
  for (auto& [stream, launches] : machine->streams) {
    launches.push_front({});  // as if one had ended
    machine->running[stream] = 0;
  }
  std::vector<Fiber*> going;
  int polled = 0, rounds = 0;
  uint64_t starved = 0, rare = 0;
  for (;;) {
    start_what_can();
    std::erase_if(machine->fibers, [](const auto& f) { return f->ended; });
    going.clear();
    bool others = false;
    for (const auto& f : machine->fibers) {
      if (f->ready != nullptr && !f->ready(f->condition)) continue;
      going.push_back(f.get());
      others |= !f->polls;
    }
    auto& copies = machine->copies;
    if (machine->fibers.empty() && copies.empty()) return;
    polled = others || !copies.empty() ? 0 : polled + 1;
    if (polled > 1000) machine->expired = true;
    if ((going.empty() && copies.empty()) || polled > 2000) {
      machine->fault = who_waits();
      return;
    }
    // For a while some warps, and perhaps all copies, wait until nobody else
    // can go on.
    if (--rounds < 0) {
      rounds = std::array<int, 3>{64, 512, 4096}[machine->draw() % 3];
      starved = machine->draw() & machine->draw();
      rare = std::array<uint64_t, 3>{2, 16, 0}[machine->draw() % 3];
    }
    std::shuffle(going.begin(), going.end(), machine->draw);
    const auto fed = std::partition(going.begin(), going.end(), [starved](const Fiber* f) {
      return (starved >> (f->cta->block.x * 12 + f->thread.x / 32) % 64 & 1) == 0;
    });
    if (fed != going.begin()) going.erase(fed, going.end());
    if (machine->draw() % 2 == 0) going.resize((going.size() + 1) / 2);
    while (!copies.empty() && (going.empty() || (rare > 0 && machine->draw() % rare == 0))) {
      run_one_copy();
      if (going.empty()) break;
    }
    for (Fiber* f : going) {
      f->ready = nullptr;
      f->polls = false;
      machine->now = f;
      ++machine->switches;
      swapcontext(&machine->scheduler, &f->context);
      if (!machine->fault.empty()) return;
      if (f->ended) --machine->running[f->stream];
    }
  }
}

template <class... A, class... B>
void launch(void (*kernel)(A...), int ctas, int threads, int bytes, void* stream, B... arguments) {
  if (bytes > kSharedBytes) throw std::runtime_error("more shared memory than an SM has");
  machine->streams[stream].push_back({[=] { kernel(arguments...); }, ctas, threads});
}

}  // namespace emulated
