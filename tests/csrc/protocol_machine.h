// The agents of protocol_model.h, one function each, but movers. Counter
// targets are those of csrc/sm90/direction.cuh: input(), announce(),
// combine_when_ready().
#pragma once

#include "protocol_moves.h"

namespace protocol {

class Machine : public Moves {
public:
  using Moves::Moves;

  // Agents of a rank: stream, death, a sender and a watcher for each peer, and
  // of each CTA load, multiply, store, mover, and who comes and goes.
  int agents_of_rank() const { return 2 + 2 * s.ranks + 5 * s.ctas; }
  int agents() const { return agents_of_rank() * s.ranks; }

  // One step of an agent; false: it cannot go. `quiet`: only steps that commute
  // with those of all others and that nobody else can tell the time of.
  bool step(int agent, bool quiet) {
    const int r = agent / agents_of_rank();
    int which = agent % agents_of_rank();
    if (phase(r) >= kFinished)
      return false;
    if (which == 0)
      return stream(r, quiet);
    if (which == 1)
      return !quiet && r == s.dies && set(phase(r), kDead);
    if ((which -= 2) < s.ranks)
      return !quiet && send(r, which);
    if ((which -= s.ranks) < s.ranks)
      return (!quiet || which == r) && watch(r, which);
    which -= s.ranks;
    if (phase(r) != kGrid)
      return false;
    Cta &a = cta(r, which / 5);
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
  template <class Random> int draw(Random &random) {
    const auto below = [&random](int end) {
      return static_cast<int>(random() % end);
    };
    const int r = below(s.ranks), first = r * agents_of_rank(),
              peer = below(s.ranks);
    if (r == s.dies && below(100) == 0)
      return first + 1;
    switch (phase(r)) {
    case kSend:
      return first + (sent(r) + 1 == 1 << s.ranks ? 0 : 2 + peer);
    case kGather:
      return first + (begun(r) + 1 == 1 << s.ranks ? 0 : 2 + s.ranks + peer);
    case kGrid:
      if (below(8) != 0)
        return first + 2 + 2 * s.ranks + below(5 * s.ctas);
      return first;
    default:
      return first;
    }
  }

  // Nobody can go. A rank whose waits have deadlines ends, and tells the
  // others; false: it hangs.
  bool expire() {
    for (int r = 0; r < s.ranks && s.may_expire; ++r) {
      if (phase(r) >= kFinished)
        continue;
      if (phase(r) == kGather && s.seed == kNoDeadline)
        return false;
      for (int p = 0; p < s.ranks; ++p)
        if (phase(p) == kExpired)
          wrong("a rank waits out its own limit after another's", r);
      return stop(r, kExpired);
    }
    return false;
  }

private:
  // ---- the stream: publish, gather, grid after grid

  bool stream(int r, bool quiet) {
    const Word all = (1u << s.ranks) - 1;
    const int g = generation(r);
    switch (phase(r)) {
    case kPublish:
      if (quiet)
        return false;
      if (what(r).tokens[r] <= s.most) {
        x(r, g) = unseen(now(r));
        if (!what(r).backward)
          choices(r, g) = unseen(now(r));
      }
      return set(phase(r), kSend);
    case kSend:
      if (sent(r) != all)
        return false;
      make_visible(x(r, g)); // at the latest when the kernel ends
      make_visible(choices(r, g));
      begun(r) = 0;
      return set(phase(r), kGather);
    case kGather:
      return (begun(r) == all || s.seed == kNoStartWait) &&
             set(phase(r), kRead);
    case kRead:
      if (quiet)
        return false;
      for (int p = 0; p < s.ranks && !what(r).backward && !work(r).refused; ++p)
        read(choices(p, g), r, "gather reads choices that are not this call's");
      return open_grid(r);
    default:
      for (int c = 0; c < s.ctas; ++c)
        if (cta(r, c).status != 2)
          return false;
      return close_grid(r);
    }
  }

  // Whoever was told passes it on.
  bool stop(int r, Phase how) {
    for (int p = 0; p < s.ranks; ++p)
      told(p) |= how == kAborted || s.seed != kAbortNotTold;
    return set(phase(r), how);
  }

  bool send(int r, int p) {
    const Word bit = 1u << p;
    if (phase(r) != kSend || (sent(r) & bit))
      return false;
    const int g = generation(r);
    const bool early = s.seed == kEarlyStart;
    if (s.seed == kDroppedStart && r == 0 && p == s.ranks - 1)
      return set(sent(r), sent(r) | bit);
    if (!(begun(r) & bit)) {
      start(p, g, r) = unseen(now(r));
      if (early)
        start_epoch(p, g, r) = now(r);
      return set(begun(r), begun(r) | bit);
    }
    make_visible(start(p, g, r)); // the fence, then the epoch
    make_visible(x(r, g));
    make_visible(choices(r, g));
    if (!early)
      start_epoch(p, g, r) = now(r);
    return set(sent(r), sent(r) | bit);
  }

  bool watch(int r, int p) {
    const Word bit = 1u << p;
    if (phase(r) != kGather || (begun(r) & bit))
      return false;
    const int g = generation(r), at = s.seed == kWrongGeneration ? 1 - g : g;
    const Word seen = start_epoch(r, at, p);
    if (epoch(seen) != epoch(now(r)))
      return told(r) && stop(r, kAborted);
    read(start(r, at, p), r, "gather reads a start that is not this call's");
    return set(begun(r), begun(r) | bit);
  }

  bool open_grid(int r) {
    std::vector<Word> old(blocks_most);
    for (int b = 0; b < blocks_most; ++b)
      old[b] = block(r, b).done1;
    std::fill(of(r) + grid, of(r) + rank_words, 0);
    for (int b = 0; b < blocks_most && s.seed == kStaleCounters; ++b)
      block(r, b).done1 = old[b];
    return set(phase(r), kGrid);
  }

  bool close_grid(int r) {
    const Work &w = work(r);
    for (int t = 0; t < w.shape.tokens; ++t)
      if (combined(r, t) != 1)
        wrong("a token is not combined once", r);
    for (int b = 0; b < w.blocks(); ++b) {
      const Block &at = block(r, b);
      if (at.made0 != s.n0 || at.made1 != s.n1)
        wrong("a product is not made once", r);
      const bool later = w.lap_of(b) > 0;
      const int again = later ? w.shape.again.n_tiles : 0;
      if (at.again != again)
        wrong("a product is not made again once", r);
      if (at.brought != w.brought[b] ||
          at.ready != at.brought + (later ? at.brought1 + again : 0) ||
          at.brought1 != (what(r).backward ? at.brought : 0))
        wrong("a row is not there once", r);
    }
    ++call(r);
    sent(r) = begun(r) = 0;
    return set(phase(r), call(r) == s.order[r].size() ? kFinished : kPublish);
  }

  // ---- tiles

  bool come_or_go(int r, Cta &a, bool quiet) {
    if (a.status == 0) {
      if (quiet || running(r) == s.slots)
        return false;
      ++running(r);
      if (movers(r) == s.movers)
        a.no_moves = 1;
      else
        ++movers(r);
      return set(a.status, 1);
    }
    const bool idle = a.no_more && done(a) == a.taken && a.no_moves;
    if (a.status != 1 || !idle)
      return false;
    --running(r);
    a = Cta{};
    return set(a.status, 2);
  }

  static Word done(const Cta &a) {
    return std::min({a.summed, a.made, a.announced});
  }

  static bool is_shared(const Work &w, const mok::Tile &tile) {
    return tile.expert == w.shape.experts && tile.pass != w.shape.passes;
  }
  // 0 to passes - 1; passes: combine; then what is done again
  static int kind(const Work &w, const mok::Tile &tile) {
    if (tile.pass == mok::pass_again(w.shape))
      return w.shape.passes + 1;
    return tile.pass <= w.shape.passes ? tile.pass
                                       : tile.pass - w.shape.passes - 1;
  }
  static bool is_again(const Work &w, const mok::Tile &tile) {
    return kind(w, tile) > w.shape.passes;
  }
  Block &block_of(int r, const mok::Tile &tile) {
    const Work &w = work(r);
    return block(r, (is_shared(w, tile) ? w.blocks() : 0) + number(tile));
  }
  static int number(const mok::Tile &tile) {
    return (tile.row + tile.base) / mok::kRowTile;
  }

  // What load and fetch read of the buffers.
  void read_input(int r, const mok::Tile &tile) {
    const Work &w = work(r);
    const int which = kind(w, tile), first = number(tile);
    if (which == w.shape.passes || is_shared(w, tile))
      return;
    const int count = mok::tiles_of(tile.rows, mok::kRowTile);
    const bool again = is_again(w, tile),
               after = tile.lap > 0 && what(r).backward;
    for (int b = first; b < first + count; ++b) {
      if (which == 0 || which == 2)
        read_rows(r, kRows0, b);
      if (which == 3 || again)
        read_rows(r, kRows1, b);
      if (!again && (which > 0 || after))
        read_rows(r, kMade0, b);
    }
  }

  bool load(int r, Cta &a, int c, bool quiet) {
    if (a.status != 1)
      return false;
    const Work &w = work(r);
    if (a.loaded < a.taken) {
      const mok::Tile &tile = w.tiles[a.ticket[a.loaded % kRing]];
      if (!may_load(r, tile))
        return false;
      read_input(r, tile);
      return set(a.loaded, a.loaded + 1);
    }
    if (quiet || a.no_more || a.taken - done(a) >= kRing)
      return false;
    int ticket = tickets(r);
    if (s.seed == kTornTicket) {
      if (a.peek == 0)
        return set(a.peek, ticket + 1);
      ticket = a.peek - 1;
      a.peek = 0;
      tickets(r) = ticket + 1;
    } else if (s.seed == kOwnedTiles) {
      ticket = c + s.ctas * a.taken;
    } else {
      ++tickets(r);
    }
    if (ticket >= static_cast<int>(w.tiles.size()))
      return set(a.no_more, 1);
    a.ticket[a.taken % kRing] = ticket;
    return set(a.taken, a.taken + 1);
  }

  bool may_load(int r, const mok::Tile &tile) {
    const Work &w = work(r);
    const int which = kind(w, tile);
    const bool shared = is_shared(w, tile), again = is_again(w, tile);
    if (which == w.shape.passes || (which == 0 && shared))
      return true;
    Block &at = block_of(r, tile);
    if (which == 0 || again) {
      int wanted = tile.rows;
      if (tile.lap > 0) {
        const int sources = what(r).backward ? 2 : 1;
        wanted *= s.seed == kOneSource && again ? 1 : sources;
        if (which == 0 && s.seed != kNoAgain)
          wanted += w.shape.again.n_tiles;
      }
      if (at.ready < wanted)
        return false;
      if ((again ? at.brought1 : at.brought) < tile.rows)
        wrong("a pass reads rows that are not there", r);
      if (which == 0 && tile.lap > 0 && at.again < w.shape.again.n_tiles)
        wrong("pass 0 reads what is not made again", r);
    } else if (which == 1) {
      const bool swapped = s.seed == kSwappedWait && !shared;
      if (swapped ? at.ready < tile.rows : at.done0 < s.n0)
        return false;
      if (at.made0 < s.n0)
        wrong("pass 1 reads what pass 0 has not made", r);
    } else {
      const bool later = tile.lap > 0 && s.seed != kFirstPass;
      const int first =
          shared ? w.blocks() : w.start[tile.expert] / mok::kRowTile;
      const int count = shared
                            ? w.shape.shared_blocks()
                            : w.start[tile.expert + 1] / mok::kRowTile - first;
      const bool second = which == 3 && s.seed != kNoRows;
      const int moved = second && !shared && !later ? w.count[tile.expert] : 0;
      const Word seen =
          second ? expert_rows(r, tile.expert) : expert_done(r, tile.expert);
      if (seen < count * s.n0 + moved)
        return false;
      for (int b = first; b < first + count; ++b) {
        if (block(r, b).made0 < s.n0)
          wrong("a weight gradient reads what is not made", r);
        if (which == 3 && !shared && block(r, b).brought1 < w.brought[b])
          wrong("a weight gradient reads rows that are not there", r);
      }
    }
    return true;
  }

  bool multiply(int r, Cta &a, bool quiet) {
    const Work &w = work(r);
    if (a.summed < a.multiplied) { // store may already have announced the tile
      const mok::Tile &tile = w.tiles[a.ticket[a.summed % kRing]];
      if (what(r).backward && kind(w, tile) == 0 && !is_shared(w, tile)) {
        if (quiet)
          return false;
        ++block_of(r, tile).sums;
        write_rows(r, kSums, number(tile));
      }
      return set(a.summed, a.summed + 1);
    }
    if (a.multiplied == a.loaded)
      return false;
    const mok::Tile &tile = w.tiles[a.ticket[a.multiplied % kRing]];
    if (kind(w, tile) != w.shape.passes) {
      read_input(r, tile);
      return set(a.multiplied, a.multiplied + 1);
    }
    const int t = tile.m * s.token_tile + a.token;
    if (a.token == s.token_tile || t >= w.shape.tokens) {
      a.token = 0;
      return set(a.multiplied, a.multiplied + 1);
    }
    if (quiet)
      return false;
    if (!may_combine(r, t))
      return phase(r) == kAborted;
    ++combined(r, t);
    return set(a.token, a.token + 1);
  }

  bool may_combine(int r, int t) {
    const Work &w = work(r);
    if (what(r).spoiled)
      return true;
    for (int c = 0; c < s.ctas && s.seed == kGridBarrier; ++c)
      if (cta(r, c).status == 0)
        return false;
    for (const Work::Piece &piece : w.pieces[t]) {
      if (piece.here) {
        const bool sums = !what(r).backward || block(r, piece.at).sums >= s.n0;
        if (block(r, piece.at).done1 < s.n1 || !sums)
          return false;
        continue;
      }
      const Word seen = arrived(r, piece.at);
      if (s.seed == kAnyArrival ? seen == 0 : epoch(seen) != epoch(now(r))) {
        if (told(r) && s.seed != kAbortNotPolled)
          stop(r, kAborted);
        return false;
      }
    }
    if (s.shared && block(r, w.blocks() + t / mok::kRowTile).done1 < s.n1)
      return false;
    for (const Work::Piece &piece : w.pieces[t]) {
      if (!piece.here) {
        read(home(r, piece.at), r, "combine reads a row that is not home");
      } else if (block(r, piece.at).made1 < s.n1) {
        wrong("combine reads what pass 1 has not made", r);
      } else {
        read_rows(r, kMade1, piece.at);
        if (what(r).backward)
          read_rows(r, kSums, piece.at);
      }
    }
    return true;
  }

  bool store(int r, Cta &a) {
    const bool early = s.seed == kEarlyDone,
               make = early ? a.announced > a.made : a.announced == a.made;
    const Word at = make ? a.made : a.announced;
    if (at == a.multiplied)
      return false;
    if (!make && s.seed == kOwedAnnounce && a.multiplied == a.made &&
        !(a.no_more && a.made == a.taken))
      return false; // looks for the next tile first
    const Work &w = work(r);
    const mok::Tile &tile = w.tiles[a.ticket[at % kRing]];
    const int which = kind(w, tile);
    const bool again = is_again(w, tile), rows = !is_shared(w, tile);
    if (make && rows && (which <= 1 || again))
      write_rows(r, which == 1 ? kMade1 : kMade0, number(tile));
    if (again) {
      ++(make ? block_of(r, tile).again : block_of(r, tile).ready);
    } else if (which > 1 && which < w.shape.passes) {
      if (!make && rows && s.seed != kNoWeightTiles)
        ++lap_done(r, tile.lap);
    } else if (which <= 1) {
      Block &b = block_of(r, tile);
      ++(make         ? which == 0 ? b.made0 : b.made1
         : which == 0 ? b.done0
                      : b.done1);
      if (!make && which == 0) {
        ++expert_done(r, tile.expert);
        ++expert_rows(r, tile.expert);
      }
    }
    return make ? set(a.made, a.made + 1) : set(a.announced, a.announced + 1);
  }
};

} // namespace protocol
