// The agents of protocol_model.h, one function each. Counter targets are those of
// csrc/sm90/direction.cuh: input(), announce(), combine_when_ready().
#pragma once

#include <algorithm>

#include "protocol_model.h"

namespace protocol {

enum Phase : Word { kPublish, kSend, kGather, kRead, kGrid, kFinished, kDead, kExpired };
enum Stage : Word { kNothing, kInHand, kIssued, kVisible };  // of a mover's move
constexpr int kRing = 2;    // tiles that a CTA has taken and not announced
constexpr int kFlight = 3;  // most copies of a mover under way

struct Block {  // counters beside what is true
  Word ready, brought, done0, made0, done1, made1, sums;
};
struct Cta {
  Word status;  // 0: waits for a slot, 1: runs, 2: has left
  Word ticket[kRing], taken, loaded, multiplied, summed, made, announced, no_more, token, peek;
  Word move, stage, row, flight[kFlight], under_way, no_moves;
};

class Machine {
 public:
  explicit Machine(const Setup& setup) : s(setup), works(setup.ranks) {
    size_t longest = 0;
    for (const auto& calls : s.order) longest = std::max(longest, calls.size());
    epochs = {s.epoch};
    for (size_t i = 0; i < longest; ++i)
      epochs.push_back(s.seed == kFrozenEpoch && i > 0 ? epochs.back()
                                                       : mok::next_epoch(epochs.back()));
    for (int r = 0; r < s.ranks; ++r) {
      for (size_t i = 0; i < s.order[r].size(); ++i) {
        works[r].push_back(work_of(s, s.calls[s.order[r][i]], r, is_refused(r, i)));
        const Work& w = works[r].back();
        tokens_most = std::max<int>(tokens_most, w.shape.tokens);
        blocks_most = std::max<int>(blocks_most, w.blocks() + w.shape.shared_blocks());
      }
    }
    slots = s.most * s.choices;
    grid = 9 + 4 * s.ranks + 2 * slots;
    first_block = grid + 2 + s.local + tokens_most;
    rank_words = first_block + blocks_most * words<Block>() + s.ctas * words<Cta>();
    state.assign(static_cast<size_t>(rank_words) * s.ranks, 0);
    for (int r = 0; r < s.ranks; ++r)
      if (s.order[r].empty()) phase(r) = kFinished;
  }

  std::vector<Word> state;
  std::string fault;

  // Agents of a rank: stream, death, a sender and a watcher for each peer, and of each CTA load,
  // multiply, store, mover, and who comes and goes.
  int agents_of_rank() const { return 2 + 2 * s.ranks + 5 * s.ctas; }
  int agents() const { return agents_of_rank() * s.ranks; }

  // One step of an agent; false: it cannot go. `quiet`: only steps that commute with those of all
  // others and that nobody else can tell the time of.
  bool step(int agent, bool quiet) {
    const int r = agent / agents_of_rank();
    int which = agent % agents_of_rank();
    if (phase(r) >= kFinished) return false;
    if (which == 0) return stream(r, quiet);
    if (which == 1) return !quiet && r == s.dies && set(phase(r), kDead);
    if ((which -= 2) < s.ranks) return !quiet && send(r, which);
    if ((which -= s.ranks) < s.ranks) return (!quiet || which == r) && watch(r, which);
    which -= s.ranks;
    if (phase(r) != kGrid) return false;
    Cta& a = cta(r, which / 5);
    switch (which % 5) {
      case 0:
        return load(r, a, which / 5, quiet);
      case 1:
        return multiply(r, a, quiet);
      case 2:
        return store(r, a);
      case 3:
        return !quiet && mover(r, a);
      default:
        return come_or_go(r, a, quiet);
    }
  }

  // An agent that may be able to go.
  template <class Random>
  int draw(Random& random) {
    const auto below = [&random](int end) { return static_cast<int>(random() % end); };
    const int r = below(s.ranks), first = r * agents_of_rank(), peer = below(s.ranks);
    if (r == s.dies && below(100) == 0) return first + 1;
    switch (phase(r)) {
      case kSend:
        return first + (sent(r) + 1 == 1 << s.ranks ? 0 : 2 + peer);
      case kGather:
        return first + (begun(r) + 1 == 1 << s.ranks ? 0 : 2 + s.ranks + peer);
      case kGrid:
        if (below(8) != 0) return first + 2 + 2 * s.ranks + below(5 * s.ctas);
        return first;
      default:
        return first;
    }
  }

  // The state with the CTAs of each rank sorted: they are interchangeable.
  const std::vector<Word>& canonical() {
    sorted = state;
    const int each = words<Cta>();
    for (int r = 0; r < s.ranks && s.ctas > 1 && s.seed != kOwnedTiles; ++r) {
      Word* const first = sorted.data() + static_cast<size_t>(r + 1) * rank_words - s.ctas * each;
      for (int i = 1; i < s.ctas; ++i)
        for (int j = i; j > 0; --j) {
          Word* const b = first + j * each;
          if (std::lexicographical_compare(b, b + each, b - each, b))
            std::swap_ranges(b, b + each, b - each);
        }
    }
    return sorted;
  }

  bool finished() const {
    for (int r = 0; r < s.ranks; ++r)
      if (state[static_cast<size_t>(r) * rank_words] < kFinished) return false;
    return true;
  }

  // Nobody can go. A rank whose waits have deadlines ends; false: it hangs.
  bool expire() {
    for (int r = 0; r < s.ranks && s.may_expire; ++r) {
      if (phase(r) >= kFinished) continue;
      if (phase(r) == kGather && s.seed == kNoDeadline) return false;
      return set(phase(r), kExpired);
    }
    return false;
  }

  std::string where() {
    std::string text = "all are blocked:";
    for (int r = 0; r < s.ranks; ++r)
      text += " rank " + std::to_string(r) + " in call " + std::to_string(call(r)) + ", phase " +
              std::to_string(phase(r)) + ";";
    return text;
  }

 private:
  const Setup& s;
  std::vector<uint32_t> epochs;          // [calls + 1]
  std::vector<std::vector<Work>> works;  // [P][calls of the rank]
  std::vector<Word> sorted;
  int tokens_most = 0, blocks_most = 0, slots = 0, grid = 0, first_block = 0, rank_words = 0;

  template <class T>
  static constexpr int words() {
    return sizeof(T) / sizeof(Word);
  }

  bool is_refused(int r, size_t i) const {  // what every rank finds in the starts
    const Call& mine = s.calls[s.order[r][i]];
    bool refused = false;
    for (int p = 0; p < s.ranks; ++p) {
      if (i >= s.order[p].size()) continue;
      const Call& theirs = s.calls[s.order[p][i]];
      const bool differs = theirs.layer != mine.layer || theirs.backward != mine.backward;
      refused |= (s.seed != kUncheckedStart && differs) || theirs.tokens[p] > s.most;
    }
    return refused;
  }

  // ---- where things are

  Word* of(int r) { return state.data() + static_cast<size_t>(r) * rank_words; }
  Word& phase(int r) { return of(r)[0]; }
  Word& call(int r) { return of(r)[1]; }
  Word& begun(int r) { return of(r)[2]; }  // senders under way, then peers whose start was seen
  Word& sent(int r) { return of(r)[3]; }
  Word& running(int r) { return of(r)[4]; }
  Word& x(int r, int g) { return of(r)[5 + g]; }
  Word& choices(int r, int g) { return of(r)[7 + g]; }
  Word& start(int r, int g, int from) { return of(r)[9 + g * s.ranks + from]; }
  Word& start_epoch(int r, int g, int from) { return of(r)[9 + (2 + g) * s.ranks + from]; }
  Word& home(int r, int slot) { return of(r)[grid - 2 * slots + slot]; }
  Word& arrived(int r, int slot) { return of(r)[grid - slots + slot]; }
  Word& tickets(int r) { return of(r)[grid]; }
  Word& move_tickets(int r) { return of(r)[grid + 1]; }
  Word& expert_done(int r, int e) { return of(r)[grid + 2 + e]; }
  Word& combined(int r, int token) { return of(r)[grid + 2 + s.local + token]; }
  Block& block(int r, int b) { return reinterpret_cast<Block*>(of(r) + first_block)[b]; }
  Cta& cta(int r, int c) {
    return reinterpret_cast<Cta*>(of(r) + first_block + blocks_most * words<Block>())[c];
  }

  const Work& work(int r) { return works[r][call(r)]; }
  const Call& what(int r) { return s.calls[s.order[r][call(r)]]; }
  // Cells and signals hold a call's number on its rank, from 1; the kernels compare its epoch.
  Word now(int r) { return call(r) + 1; }
  uint32_t epoch(Word number) const { return number == 0 ? 0 : epochs[number]; }  // 0: zeroed
  int generation(int r) { return s.seed == kOneGeneration ? 0 : epoch(now(r)) % mok::kGenerations; }
  static Word unseen(Word number) { return number | 0x8000; }
  static void make_visible(Word& cell) { cell &= 0x7fff; }

  template <class T>
  static bool set(Word& word, T value) {
    word = value;
    return true;
  }
  void wrong(const char* text, int r) {
    if (fault.empty())
      fault =
          std::string(text) + ": rank " + std::to_string(r) + ", call " + std::to_string(call(r));
  }
  void read(Word cell, int r, const char* text) {
    if (cell != now(r)) wrong(text, r);
  }

  // ---- the stream: publish, gather, grid after grid

  bool stream(int r, bool quiet) {
    const Word all = (1u << s.ranks) - 1;
    const int g = generation(r);
    switch (phase(r)) {
      case kPublish:
        if (quiet) return false;
        if (what(r).tokens[r] <= s.most) {
          x(r, g) = unseen(now(r));
          if (!what(r).backward) choices(r, g) = unseen(now(r));
        }
        return set(phase(r), kSend);
      case kSend:
        if (sent(r) != all) return false;
        make_visible(x(r, g));  // at the latest when the kernel ends
        make_visible(choices(r, g));
        begun(r) = 0;
        return set(phase(r), kGather);
      case kGather:
        return (begun(r) == all || s.seed == kNoStartWait) && set(phase(r), kRead);
      case kRead:
        if (quiet) return false;
        for (int p = 0; p < s.ranks && !what(r).backward && !work(r).refused; ++p)
          read(choices(p, g), r, "gather reads choices that are not this call's");
        return open_grid(r);
      default:
        for (int c = 0; c < s.ctas; ++c)
          if (cta(r, c).status != 2) return false;
        return close_grid(r);
    }
  }

  bool send(int r, int p) {
    const Word bit = 1u << p;
    if (phase(r) != kSend || (sent(r) & bit)) return false;
    const int g = generation(r);
    const bool early = s.seed == kEarlyStart;
    if (s.seed == kDroppedStart && r == 0 && p == s.ranks - 1) return set(sent(r), sent(r) | bit);
    if (!(begun(r) & bit)) {
      start(p, g, r) = unseen(now(r));
      if (early) start_epoch(p, g, r) = now(r);
      return set(begun(r), begun(r) | bit);
    }
    make_visible(start(p, g, r));  // the fence, then the epoch
    make_visible(x(r, g));
    make_visible(choices(r, g));
    if (!early) start_epoch(p, g, r) = now(r);
    return set(sent(r), sent(r) | bit);
  }

  bool watch(int r, int p) {
    const Word bit = 1u << p;
    if (phase(r) != kGather || (begun(r) & bit)) return false;
    const int g = generation(r), at = s.seed == kWrongGeneration ? 1 - g : g;
    const Word seen = start_epoch(r, at, p);
    if (epoch(seen) != epoch(now(r))) return false;
    read(start(r, at, p), r, "gather reads a start that is not this call's");
    return set(begun(r), begun(r) | bit);
  }

  bool open_grid(int r) {
    std::vector<Word> old(blocks_most);
    for (int b = 0; b < blocks_most; ++b) old[b] = block(r, b).done1;
    std::fill(of(r) + grid, of(r) + rank_words, 0);
    for (int b = 0; b < blocks_most && s.seed == kStaleCounters; ++b) block(r, b).done1 = old[b];
    return set(phase(r), kGrid);
  }

  bool close_grid(int r) {
    const Work& w = work(r);
    for (int t = 0; t < w.shape.tokens; ++t)
      if (combined(r, t) != 1) wrong("a token is not combined once", r);
    for (int b = 0; b < w.blocks(); ++b) {
      const Block& at = block(r, b);
      if (at.made0 != s.n0 || at.made1 != s.n1) wrong("a product is not made once", r);
      if (at.brought != w.brought[b] || at.ready != at.brought) wrong("a row is not there once", r);
    }
    ++call(r);
    sent(r) = begun(r) = 0;
    return set(phase(r), call(r) == s.order[r].size() ? kFinished : kPublish);
  }

  // ---- tiles

  bool come_or_go(int r, Cta& a, bool quiet) {
    if (a.status == 0) {
      if (quiet || running(r) == s.slots) return false;
      ++running(r);
      return set(a.status, 1);
    }
    const bool idle = a.no_more && done(a) == a.taken && a.no_moves;
    if (a.status != 1 || !idle) return false;
    --running(r);
    a = Cta{};
    return set(a.status, 2);
  }

  static Word done(const Cta& a) { return std::min({a.summed, a.made, a.announced}); }

  static bool is_shared(const Work& w, const mok::Tile& tile) {
    return tile.expert == w.shape.experts && tile.pass != w.shape.passes;
  }
  static int kind(const Work& w, const mok::Tile& tile) {  // 0 to passes - 1; passes: combine
    return tile.pass <= w.shape.passes ? tile.pass : tile.pass - w.shape.passes - 1;
  }
  Block& block_of(int r, const mok::Tile& tile) {
    const Work& w = work(r);
    return block(r, (is_shared(w, tile) ? w.blocks() : 0) + tile.row / mok::kRowTile);
  }

  bool load(int r, Cta& a, int c, bool quiet) {
    if (a.status != 1) return false;
    const Work& w = work(r);
    if (a.loaded < a.taken) {
      const mok::Tile& tile = w.tiles[a.ticket[a.loaded % kRing]];
      return may_load(r, tile) && set(a.loaded, a.loaded + 1);
    }
    if (quiet || a.no_more || a.taken - done(a) >= kRing) return false;
    int ticket = tickets(r);
    if (s.seed == kTornTicket) {
      if (a.peek == 0) return set(a.peek, ticket + 1);
      ticket = a.peek - 1;
      a.peek = 0;
      tickets(r) = ticket + 1;
    } else if (s.seed == kOwnedTiles) {
      ticket = c + s.ctas * a.taken;
    } else {
      ++tickets(r);
    }
    if (ticket >= static_cast<int>(w.tiles.size())) return set(a.no_more, 1);
    a.ticket[a.taken % kRing] = ticket;
    return set(a.taken, a.taken + 1);
  }

  bool may_load(int r, const mok::Tile& tile) {
    const Work& w = work(r);
    const int which = kind(w, tile);
    if (which == w.shape.passes || (which != 1 && is_shared(w, tile))) return true;
    Block& at = block_of(r, tile);
    if (which == 0) {
      if (at.ready < tile.rows) return false;
      if (at.brought < tile.rows) wrong("pass 0 reads rows that are not there", r);
    } else if (which == 1) {
      const bool swapped = s.seed == kSwappedWait && !is_shared(w, tile);
      if (swapped ? at.ready < tile.rows : at.done0 < s.n0) return false;
      if (at.made0 < s.n0) wrong("pass 1 reads what pass 0 has not made", r);
    } else {
      const int first = w.start[tile.expert] / mok::kRowTile,
                end = w.start[tile.expert + 1] / mok::kRowTile;
      if (expert_done(r, tile.expert) < (end - first) * s.n0) return false;
      for (int b = first; b < end; ++b)
        if (block(r, b).made0 < s.n0) wrong("a weight gradient reads what is not made", r);
    }
    return true;
  }

  bool multiply(int r, Cta& a, bool quiet) {
    const Work& w = work(r);
    if (a.summed < a.multiplied) {  // store may already have announced the tile
      const mok::Tile& tile = w.tiles[a.ticket[a.summed % kRing]];
      if (what(r).backward && kind(w, tile) == 0 && !is_shared(w, tile)) {
        if (quiet) return false;
        ++block_of(r, tile).sums;
      }
      return set(a.summed, a.summed + 1);
    }
    if (a.multiplied == a.loaded) return false;
    const mok::Tile& tile = w.tiles[a.ticket[a.multiplied % kRing]];
    if (kind(w, tile) < w.shape.passes) return set(a.multiplied, a.multiplied + 1);
    const int t = tile.m * s.token_tile + a.token;
    if (a.token == s.token_tile || t >= w.shape.tokens) {
      a.token = 0;
      return set(a.multiplied, a.multiplied + 1);
    }
    if (quiet || !may_combine(r, t)) return false;
    ++combined(r, t);
    return set(a.token, a.token + 1);
  }

  bool may_combine(int r, int t) {
    const Work& w = work(r);
    for (int c = 0; c < s.ctas && s.seed == kGridBarrier; ++c)
      if (cta(r, c).status == 0) return false;
    for (const Work::Piece& piece : w.pieces[t]) {
      if (piece.here) {
        const bool sums = !what(r).backward || block(r, piece.at).sums >= s.n0;
        if (block(r, piece.at).done1 < s.n1 || !sums) return false;
        continue;
      }
      const Word seen = arrived(r, piece.at);
      if (s.seed == kAnyArrival ? seen == 0 : epoch(seen) != epoch(now(r))) return false;
    }
    if (s.shared && block(r, w.blocks() + t / mok::kRowTile).done1 < s.n1) return false;
    for (const Work::Piece& piece : w.pieces[t]) {
      if (!piece.here) {
        read(home(r, piece.at), r, "combine reads a row that is not home");
      } else if (block(r, piece.at).made1 < s.n1) {
        wrong("combine reads what pass 1 has not made", r);
      }
    }
    return true;
  }

  bool store(int r, Cta& a) {
    const bool early = s.seed == kEarlyDone,
               make = early ? a.announced > a.made : a.announced == a.made;
    const Word at = make ? a.made : a.announced;
    if (at == a.multiplied) return false;
    if (!make && s.seed == kOwedAnnounce && a.multiplied == a.made &&
        !(a.no_more && a.made == a.taken))
      return false;  // looks for the next tile first
    const Work& w = work(r);
    const mok::Tile& tile = w.tiles[a.ticket[at % kRing]];
    const int which = kind(w, tile);
    if (which <= 1) {
      Block& b = block_of(r, tile);
      ++(make ? which == 0 ? b.made0 : b.made1 : which == 0 ? b.done0 : b.done1);
      if (!make && which == 0 && !is_shared(w, tile)) ++expert_done(r, tile.expert);
    }
    return make ? set(a.made, a.made + 1) : set(a.announced, a.announced + 1);
  }

  // ---- moves: rows in, then rows home

  bool mover(int r, Cta& a) {
    if (a.status != 1 || a.no_moves) return false;
    const Work& w = work(r);
    if (a.stage == kNothing) {
      if (move_tickets(r) == static_cast<int>(w.moves.size())) {
        return a.under_way > 0 ? settle(r, a) : set(a.no_moves, 1);
      }
      if (a.under_way == s.depth) return settle(r, a);
      a.move = move_tickets(r)++;
      const Work::Move& move = w.moves[a.move];
      if (move.home) return set(a.stage, kInHand);
      read_tokens(r, move.at);
      if (s.seed == kEarlyReady) ++block(r, w.rows[move.at].block).ready;
      a.flight[a.under_way++] = move.at;
      return true;
    }
    if (a.under_way > 0 && s.seed != kUnsettled) return settle(r, a);
    return push(r, a, w.moves[a.move].at);
  }

  void read_tokens(int r, int at) {
    read(
        x(work(r).rows[at].rank, generation(r)), r, "a pull reads tokens that are not this call's");
  }

  bool settle(int r, Cta& a) {  // of the oldest copy
    const int at = a.flight[0];
    read_tokens(r, at);
    Block& b = block(r, work(r).rows[at].block);
    ++b.brought;
    if (s.seed != kEarlyReady) ++b.ready;
    std::copy(a.flight + 1, a.flight + kFlight, a.flight);
    a.flight[kFlight - 1] = 0;
    return set(a.under_way, a.under_way - 1);
  }

  bool push(int r, Cta& a, int b) {
    const Work& w = work(r);
    const std::vector<int>& rows = w.away[b];
    const bool sums = what(r).backward;
    if (a.stage == kInHand) {
      if (s.seed != kPushEarly && block(r, b).done1 < s.n1) return false;
      if (sums && s.seed != kNoSums && block(r, b).sums < s.n0) return false;
      if (block(r, b).made1 < s.n1) wrong("a push reads what pass 1 has not made", r);
      if (sums && block(r, b).sums < s.n0) wrong("a push reads sums that are not there", r);
      for (const int i : rows) home(w.rows[i].rank, w.rows[i].slot) = unseen(now(r));
      return set(a.stage, kIssued);
    }
    const bool early = s.seed == kEarlyArrival;
    if (a.stage == (early ? kVisible : kIssued)) {
      for (const int i : rows) make_visible(home(w.rows[i].rank, w.rows[i].slot));
      return set(a.stage, early ? kNothing : kVisible);
    }
    const Work::Row& row = w.rows[rows[a.row]];
    const bool last = a.row + 1u == rows.size();
    if (!last || s.seed != kDroppedArrival) arrived(row.rank, row.slot) = now(r);
    a.row = last ? 0 : a.row + 1;
    if (last) a.stage = early ? kVisible : kNothing;
    return true;
  }
};

}  // namespace protocol
