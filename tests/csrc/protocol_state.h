// Where the words of a state are: of each rank its stream's, its workspace's,
// its grid's.
#pragma once

#include "protocol_model.h"

namespace protocol {

enum Phase : Word {
  kPublish,
  kSend,
  kGather,
  kRead,
  kGrid,
  kFinished,
  kDead,
  kExpired, // by a limit of its own
  kAborted  // because another has expired
};
enum Stage : Word { kNothing, kIssued, kVisible }; // of rows that go home
constexpr int kRing = 2;   // tiles that a CTA has taken and not announced
constexpr int kFlight = 3; // most moves of a mover under way, and in its hands

struct Block { // counters beside what is true
  Word ready, brought, brought1, again, done0, made0, done1, made1, sums;
};
// Of a block of the buffers, whose bytes are in each part: a block's number
// + 1. Forward: x, then y, by rows 0, and the activation; backward: rows of dy
// and x, what pass 0 makes (and before it what is done again), dx, and prob's
// parts.
enum Part { kRows0, kRows1, kMade0, kMade1, kSums, kParts };
struct Buffer {
  Word owner[kParts];
};
struct Cta {
  Word status; // 0: waits for a slot, 1: runs, 2: has left
  Word ticket[kRing], taken, loaded, multiplied, summed, made, announced,
      no_more, token, peek;
  Word hand[kFlight], hands, flight[kFlight], under_way, stage, row, no_moves;
};

class State {
public:
  explicit State(const Setup &setup) : s(setup), works(setup.ranks) {
    size_t longest = 0;
    for (const auto &calls : s.order)
      longest = std::max(longest, calls.size());
    epochs = {s.epoch};
    for (size_t i = 0; i < longest; ++i)
      epochs.push_back(s.seed == kFrozenEpoch && i > 0
                           ? epochs.back()
                           : mok::next_epoch(epochs.back()));
    for (int r = 0; r < s.ranks; ++r) {
      for (size_t i = 0; i < s.order[r].size(); ++i) {
        works[r].push_back(
            work_of(s, s.calls[s.order[r][i]], r, is_refused(r, i)));
        const Work &w = works[r].back();
        tokens_most = std::max<int>(tokens_most, w.shape.tokens);
        blocks_most =
            std::max<int>(blocks_most, w.blocks() + w.shape.shared_blocks());
        for (int b = 0; b < w.blocks(); ++b)
          buffers_most = std::max(buffers_most, w.buffer(b) + 1);
      }
    }
    slots = s.most * s.choices;
    grid = 10 + 4 * s.ranks + 2 * slots;
    first_block = grid + 3 + 2 * (s.local + 1) + (s.local + 1) + tokens_most;
    first_cta = first_block + blocks_most * words<Block>() +
                buffers_most * words<Buffer>();
    rank_words = first_cta + s.ctas * words<Cta>();
    state.assign(static_cast<size_t>(rank_words) * s.ranks, 0);
    for (int r = 0; r < s.ranks; ++r)
      if (s.order[r].empty())
        phase(r) = kFinished;
  }

  std::vector<Word> state;
  std::string fault;

  // The state with the CTAs of each rank sorted: they are interchangeable.
  const std::vector<Word> &canonical() {
    sorted = state;
    const int each = words<Cta>();
    for (int r = 0; r < s.ranks && s.ctas > 1 && s.seed != kOwnedTiles; ++r) {
      Word *const first = sorted.data() +
                          static_cast<size_t>(r + 1) * rank_words -
                          s.ctas * each;
      for (int i = 1; i < s.ctas; ++i)
        for (int j = i; j > 0; --j) {
          Word *const b = first + j * each;
          if (std::lexicographical_compare(b, b + each, b - each, b))
            std::swap_ranges(b, b + each, b - each);
        }
    }
    return sorted;
  }

  bool finished() const {
    for (int r = 0; r < s.ranks; ++r)
      if (state[static_cast<size_t>(r) * rank_words] < kFinished)
        return false;
    return true;
  }

  std::string where() {
    std::string text = "all are blocked:";
    for (int r = 0; r < s.ranks; ++r)
      text += " rank " + std::to_string(r) + " in call " +
              std::to_string(call(r)) + ", phase " + std::to_string(phase(r)) +
              ";";
    return text;
  }

protected:
  const Setup &s;
  std::vector<uint32_t> epochs;         // [calls + 1]
  std::vector<std::vector<Work>> works; // [P][calls of the rank]
  std::vector<Word> sorted;
  int tokens_most = 0, blocks_most = 0, buffers_most = 0, slots = 0, grid = 0,
      first_block = 0, first_cta = 0, rank_words = 0;

  template <class T> static constexpr int words() {
    return sizeof(T) / sizeof(Word);
  }

  bool is_refused(int r,
                  size_t i) const { // what every rank finds in the starts
    const Call &mine = s.calls[s.order[r][i]];
    bool refused = false;
    for (int p = 0; p < s.ranks; ++p) {
      if (i >= s.order[p].size())
        continue;
      const Call &theirs = s.calls[s.order[p][i]];
      const bool differs =
          theirs.layer != mine.layer || theirs.backward != mine.backward;
      refused |=
          (s.seed != kUncheckedStart && differs) || theirs.tokens[p] > s.most;
    }
    return refused;
  }

  // ---- where things are

  Word *of(int r) { return state.data() + static_cast<size_t>(r) * rank_words; }
  Word &phase(int r) { return of(r)[0]; }
  Word &call(int r) { return of(r)[1]; }
  Word &begun(int r) {
    return of(r)[2];
  } // senders under way, then peers whose start was seen
  Word &sent(int r) { return of(r)[3]; }
  Word &running(int r) { return of(r)[4]; }
  Word &x(int r, int g) { return of(r)[5 + g]; }
  Word &choices(int r, int g) { return of(r)[7 + g]; }
  Word &told(int r) { return of(r)[9]; } // that a rank has stopped
  Word &start(int r, int g, int from) { return of(r)[10 + g * s.ranks + from]; }
  Word &start_epoch(int r, int g, int from) {
    return of(r)[10 + (2 + g) * s.ranks + from];
  }
  Word &home(int r, int slot) { return of(r)[grid - 2 * slots + slot]; }
  Word &arrived(int r, int slot) { return of(r)[grid - slots + slot]; }
  Word &tickets(int r) { return of(r)[grid]; }
  Word &move_tickets(int r) { return of(r)[grid + 1]; }
  Word &movers(int r) { return of(r)[grid + 2]; }
  Word &expert_done(int r, int e) { return of(r)[grid + 3 + e]; }
  Word &expert_rows(int r, int e) { return of(r)[grid + 4 + s.local + e]; }
  Word &lap_done(int r, int lap) { return of(r)[grid + 5 + 2 * s.local + lap]; }
  Word &combined(int r, int token) {
    return of(r)[first_block - tokens_most + token];
  }
  Block &block(int r, int b) {
    return reinterpret_cast<Block *>(of(r) + first_block)[b];
  }
  Word &owner(int r, Part part, int b) { // of a block's rows in the buffers
    return reinterpret_cast<Buffer *>(of(r) + first_block +
                                      blocks_most *
                                          words<Block>())[work(r).buffer(b)]
        .owner[part];
  }
  Cta &cta(int r, int c) {
    return reinterpret_cast<Cta *>(of(r) + first_cta)[c];
  }

  const Work &work(int r) { return works[r][call(r)]; }
  const Call &what(int r) { return s.calls[s.order[r][call(r)]]; }
  // Cells and signals hold a call's number on its rank, from 1; the kernels
  // compare its epoch.
  Word now(int r) { return call(r) + 1; }
  uint32_t epoch(Word number) const {
    return number == 0 ? 0 : epochs[number];
  } // 0: zeroed
  int generation(int r) {
    return s.seed == kOneGeneration ? 0 : epoch(now(r)) % mok::kGenerations;
  }
  static Word unseen(Word number) { return number | 0x8000; }
  static void make_visible(Word &cell) { cell &= 0x7fff; }

  template <class T> static bool set(Word &word, T value) {
    word = value;
    return true;
  }
  void wrong(const char *text, int r) {
    if (fault.empty())
      fault = std::string(text) + ": rank " + std::to_string(r) + ", call " +
              std::to_string(call(r));
  }
  void read(Word cell, int r, const char *text) {
    if (cell != now(r))
      wrong(text, r);
  }

  // ---- rows in the buffers; b: their block in the schedule

  void write_rows(int r, Part part, int b) {
    owner(r, part, b) = b + 1;
    if (!what(r).backward && (part == kRows0 || part == kMade1)) // one buffer
      owner(r, part == kRows0 ? kMade1 : kRows0, b) = 0;
  }
  void
  read_rows(int r, Part part, int b,
            const char *text = "others' rows lie where a block's are read") {
    if (owner(r, part, b) != b + 1)
      wrong(text, r);
  }

  // What a lap counts until its last readers are done.
  int lap_steps(const Work &w, int lap) const {
    const int all = w.laps[lap].steps,
              groups = (w.laps[lap + 1].row - w.laps[lap].row) / mok::kPushRows;
    int second = 0; // rows
    for (int e = 0; e < w.laps[1].expert && lap == 0; ++e)
      second += mok::second_is_read(w.shape) ? 0 : w.count[e];
    switch (s.seed) {
    case kNoHomeRows:
      return all - groups;
    case kNoSecondRows:
      return all - second;
    case kNoWeightTiles:
      return groups + second;
    default:
      return all;
    }
  }
};

} // namespace protocol
