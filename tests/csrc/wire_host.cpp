// device/wire.cuh on the host: ranks' movers that ask for their rows' times, step by step, in a
// drawn order.
#include <cstdint>
#include <random>
#include <vector>

#include "../../csrc/device/wire.cuh"

namespace {

struct Word {
  uint64_t *at;
  void raise(uint64_t time) const { *at = time > *at ? time : *at; }
  uint64_t add(uint64_t time) const {
    const uint64_t before = *at;
    *at += time;
    return before;
  }
};

// A word whose two steps another's may come between.
struct Split {
  uint64_t *at;
  std::vector<Word> *later;
  void raise(uint64_t time) const { Word{at}.raise(time); }
  uint64_t add(uint64_t time) const {
    for (const Word &word : *later)
      word.add(time);
    later->clear();
    return Word{at}.add(time);
  }
};

struct Mover {
  uint64_t free = 0; // when it asks again
};

} // namespace

extern "C" uint32_t per_byte(double rate) { return mok::wire_per_byte(rate); }
extern "C" uint64_t time_of(uint32_t bytes, uint32_t per_byte) {
  return mok::wire_time(bytes, per_byte);
}

// Another rank's request of `other` between the steps of ours of `time`: when ours ends.
extern "C" uint64_t between(uint64_t free, uint64_t now, uint64_t time) {
  std::vector<Word> later{Word{&free}};
  mok::reserve(Split{&free, &later}, now, time);
  return free;
}

// Each of `movers` of every rank copies `rows` of `bytes` from ranks that are drawn, or, `hot`, all
// from rank 0; it asks `pause` after its last row has come, from `start` on (2^-10 ns). out: of each
// rank when its first and its last row have come, and what it has received and sent.
extern "C" void pull_all(int ranks, int movers, int rows, uint32_t bytes, double rate,
                         uint64_t start, uint64_t pause, int hot, uint64_t seed, uint64_t *out) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> free_out(ranks), free_in(ranks);
  std::vector<Mover> every(static_cast<size_t>(ranks) * movers, Mover{start});
  std::vector<int> left(every.size(), rows);
  const uint32_t each = mok::wire_per_byte(rate);
  for (int r = 0; r < ranks; ++r)
    out[4 * r] = ~0ull;
  for (size_t go = every.size() * rows; go > 0; --go) {
    size_t next = 0; // who asks first, in time
    for (size_t i = 1; i < every.size(); ++i)
      if (left[i] > 0 && (left[next] == 0 || every[i].free < every[next].free))
        next = i;
    const int to = static_cast<int>(next) / movers,
              from = hot ? 0 : static_cast<int>(random() % ranks);
    const uint64_t now = every[next].free;
    uint64_t end = now;
    if (from != to) {
      const uint64_t time = mok::wire_time(bytes, each);
      const uint64_t a = mok::reserve(Word{&free_out[from]}, now, time);
      const uint64_t b = mok::reserve(Word{&free_in[to]}, now, time);
      end = a > b ? a : b;
      out[4 * to + 2] += bytes;
      out[4 * from + 3] += bytes;
      out[4 * to] = end < out[4 * to] ? end : out[4 * to];
      out[4 * to + 1] = end > out[4 * to + 1] ? end : out[4 * to + 1];
    }
    every[next].free = end + pause;
    --left[next];
  }
}
