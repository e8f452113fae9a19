// The order of a direction's work: tickets -> tiles of several phases. A plan is a list of
// segments, each the tiles of one phase and one expert; it is made on the device from the experts'
// rows, and compiles for the host too, where tests/csrc/test_plan.py visits every ticket.
//
// A tile waits only for tiles of earlier tickets (and for moved rows, which wait for nothing), and
// whoever holds a ticket is running: so the grid finishes with any set of CTAs. Between the tiles
// that write something and those that wait for it lie the first phase's tiles of `ahead` experts,
// so that nobody waits long. `ahead` changes no bit of any result.
//
//   shared first | first 0 .. ahead - 1 | shared rest | first i, rest i - ahead ... | rests |
//   combine
//
// where forward has: first = up, rest = down; backward: first = gradient of down and SwiGLU, rest =
// gradient of up, of w2, of w1.
//
// Laps. A rank of several may get more rows than its buffers hold. Its experts then take the
// buffers in turn: a lap is as many whole experts, one after the other, as fit (of the first, which
// is kept for backward, maybe none), and the plan is the laps' plans one behind the other, with the
// shared expert in the first and combine in the last.
// No move of a lap starts before the last reader of the lap before it is done (`steps`); all of a
// lap's tiles wait for its moves, so that the order still holds what they wait for. Forward keeps
// gate and up of the first lap alone; backward computes those of later laps again, in a pass of
// their own before the first. Whole experts, so that no sum is cut: laps change no bit either.
//
// Rows have two numbers: in the schedule, where experts follow each other and counters, slots and
// probabilities lie; and in the buffers, where a lap's first row is row 0 (Tile::base between).
#pragma once

#include "schedule.cuh"

namespace mok {

// A tile's `pass`: 0 to passes - 1 of a routed expert, `passes` for combine, passes + 1 and on of
// the shared expert, and behind those what a later lap computes again.
constexpr int kMaxPasses = 4;  // of one kind of expert
constexpr int kMoveRows = 4;   // that a move brings
constexpr int kPushRows = 16;  // that go home together
struct PassShape {
  int32_t m_tiles;  // of a weight gradient; 0: the expert's row tiles
  int32_t n_tiles;  // 0: nobody wants the pass
  int32_t depth;    // 0: the expert's rows
};

struct PlanShape {
  PassShape routed[kMaxPasses], shared[kMaxPasses], again;  // again: of laps behind the first
  int32_t passes;                                           // of an expert
  int32_t experts;  // routed; the shared one is number `experts`
  int32_t ahead;
  int32_t tokens;
  int32_t combine_tiles;
  bool keep_empty;  // an expert without rows still has weight tiles: its fresh gradient is zero
  const int32_t* start;
  const int32_t* count;
  int32_t kept;         // rows that the first lap holds, whose gate and up are kept
  int32_t capacity;     // rows that later ones hold: at least those of an expert
  int32_t most;         // rows that any routing brings
  int32_t laps;         // that those may take
  uint32_t behind_own;  // of several ranks: the part of an expert's rows, times 2^32, that pass 1
                        // leaves to the last

  MOK_HOST_DEVICE int shared_blocks() const { return tiles_of(tokens, kRowTile); }
  MOK_HOST_DEVICE int blocks() const { return most / kRowTile; }
};

// The most laps and segments of any routing. Behind the first, two neighbours hold more than the
// buffers do.
MOK_HOST_DEVICE int most_laps(int64_t most, int64_t kept, int64_t capacity) {
  return most <= kept ? 1 : static_cast<int>(2 * most / capacity) + 2;
}
MOK_HOST_DEVICE int64_t most_segments(int64_t experts, int64_t laps) {
  return (kMaxPasses + 1) * experts + kMaxPasses + 1 + laps;
}

constexpr int kLapEntries = 256;  // one more than the laps that a byte of a tile can name

struct alignas(16) Lap {
  int32_t expert;   // its first; the last lap is followed by one of the experts' number
  int32_t row;      // its first, in the schedule
  int32_t segment;  // its first
  int32_t steps;    // that are counted in the lap: groups of rows sent home, weight tiles, and rows
                    // that no tile waits for
};

// What a segment is; 16 bytes, as it is read at once.
struct alignas(16) Segment {
  int16_t expert;
  uint8_t pass, lap;  // pass: as of tiles
  int32_t row;        // the expert's first, in the schedule
  int32_t valid;      // rows; negative: outside the contract
  int32_t base;       // the lap's first row
};
static_assert(sizeof(Segment) == 16);

MOK_HOST_DEVICE bool is_combine(const PlanShape& s, const Segment& g) { return g.pass == s.passes; }
MOK_HOST_DEVICE bool is_shared(const PlanShape& s, const Segment& g) {
  return g.expert == s.experts && !is_combine(s, g);
}
MOK_HOST_DEVICE int pass_again(const PlanShape& s) { return 2 * s.passes + 1; }
MOK_HOST_DEVICE const PassShape& pass_of(const PlanShape& s, int pass) {
  if (pass < s.passes) return s.routed[pass];
  return pass == pass_again(s) ? s.again : s.shared[pass - s.passes - 1];
}

// Whether a tile of the first lap waits for the rows of the second source, where there is one. Of
// weights that nobody wants a gradient of, none does; but they are under way, and the next lap's
// must not meet them.
MOK_HOST_DEVICE bool second_is_read(const PlanShape& s) {
  return s.again.n_tiles == 0 || s.routed[s.passes - 1].n_tiles > 0;
}

// Finds the laps of the experts' rows; laps: [most_laps + 1]. Returns how many there are.
MOK_HOST_DEVICE int find_laps(const PlanShape& s, Lap* laps) {
  int count = 0, segment = 0;
  for (int expert = 0; count == 0 || expert < s.experts;) {
    const int first = expert, row = s.start[first], room = count == 0 ? s.kept : s.capacity;
    if (count + 1 >= s.laps || s.start[s.experts] - row <= room) {
      expert = s.experts;
    } else {
      while (expert < s.experts && s.start[expert + 1] - row <= room) ++expert;
    }
    const int experts = expert - first, rows = s.start[expert] - row;
    int steps = 0;
    if (expert < s.experts) {  // or nobody waits for them
      int weight_tiles = 0;
      for (int pass = 0; pass < s.passes; ++pass) {
        weight_tiles += s.routed[pass].m_tiles * s.routed[pass].n_tiles;
      }
      const bool alone = count == 0 && !second_is_read(s);
      steps = rows / kPushRows;
      for (int e = first; e < expert; ++e) {
        steps += s.keep_empty || s.count[e] > 0 ? weight_tiles : 0;
        steps += alone ? s.count[e] : 0;
      }
    }
    laps[count] = {first, row, segment, steps};
    segment += experts * (s.passes + (count > 0 && s.again.n_tiles > 0)) +
               (count == 0 ? s.passes : 0) + (expert == s.experts);
    ++count;
  }
  laps[count] = {s.experts, s.start[s.experts], segment, 0};
  return count;
}

// The segment number `index` of all.
MOK_HOST_DEVICE Segment segment_at(const PlanShape& s, const Lap* laps, int index) {
  int number = 0;
  while (laps[number + 1].segment <= index) ++number;
  const Lap &lap = laps[number], &next = laps[number + 1];
  const auto of = [&](int inside, int pass) {  // pass: in the lap's order
    Segment g{};
    const int expert = lap.expert + inside;
    const int rows = s.start[expert + 1] - s.start[expert];
    const bool again = number > 0 && s.again.n_tiles > 0;
    g.expert = static_cast<int16_t>(expert);
    g.pass = static_cast<uint8_t>(!again ? pass : pass == 0 ? pass_again(s) : pass - 1);
    g.lap = static_cast<uint8_t>(number);
    g.row = s.start[expert];
    g.valid = s.count[expert];
    g.base = lap.row;
    if (g.row % kRowTile != 0 || g.row < lap.row || g.valid < 0 ||
        rows != tiles_of(g.valid, kRowTile) * kRowTile ||
        g.row + rows - lap.row > (number == 0 ? s.kept : s.capacity)) {
      g.valid = -1;
    }
    return g;
  };
  const auto apart = [&](int pass) {  // of no routed expert
    Segment g{};
    g.expert = static_cast<int16_t>(s.experts);
    g.pass = static_cast<uint8_t>(pass);
    g.valid = s.tokens;
    return g;
  };
  index -= lap.segment;
  const int experts = next.expert - lap.expert, ahead = s.ahead < experts ? s.ahead : experts;
  const int passes = s.passes + (number > 0 && s.again.n_tiles > 0), rest = passes - 1;
  const bool shared = number == 0;
  if (shared) {
    if (index == 0) return apart(s.passes + 1);
    index -= 1;
  }
  if (index < ahead) return of(index, 0);
  index -= ahead;
  if (shared) {
    if (index < rest) return apart(s.passes + 2 + index);
    index -= rest;
  }
  const int steady = experts - ahead;
  if (index < steady * passes) {
    const int step = index / passes, inside = index - step * passes;
    return inside == 0 ? of(ahead + step, 0) : of(step, inside);
  }
  index -= steady * passes;
  if (index < ahead * rest) return of(steady + index / rest, 1 + index % rest);
  return apart(s.passes);
}

MOK_HOST_DEVICE int segment_tiles(const PlanShape& s, const Segment& g) {
  if (is_combine(s, g)) return s.combine_tiles;
  const PassShape& pass = pass_of(s, g.pass);
  const bool shared = is_shared(s, g);
  if (pass.m_tiles > 0) {
    const bool rows = (shared ? s.tokens : s.count[g.expert]) > 0;
    return rows || s.keep_empty ? pass.m_tiles * pass.n_tiles : 0;
  }
  const int blocks =
      shared ? s.shared_blocks() : (s.start[g.expert + 1] - s.start[g.expert]) / kRowTile;
  return blocks * pass.n_tiles;
}

struct Plan {
  PlanShape shape;
  const int32_t* first;    // [segments + 4], 16-byte aligned: the segments'
                           // first tickets; the last is their number
  const Segment* segment;  // [segments]
  const Lap* lap;          // [laps + 1]
  const int32_t* lap_count;

  MOK_HOST_DEVICE int count() const { return first[lap[*lap_count].segment]; }
};

// The tile number `inside` of a segment.
MOK_HOST_DEVICE Tile tile_of(const PlanShape& s, const Segment& g, int inside) {
  Tile tile = no_tile();
  tile.expert = g.expert;
  tile.pass = g.pass;
  tile.lap = g.lap;
  tile.base = g.base;
  if (is_combine(s, g)) {
    tile.m = inside;
    return tile;
  }
  tile.fault = g.valid < 0;
  if (tile.fault) return tile;
  const PassShape& pass = pass_of(s, g.pass);
  tile.row = g.row - g.base;
  if (pass.m_tiles > 0) {
    place(inside, pass.m_tiles, pass.n_tiles, tile);
    tile.rows = g.valid;
    tile.depth = g.valid > 0 ? tiles_of(g.valid, kDepthTile) : 1;
    return tile;
  }
  const int blocks = tiles_of(g.valid, kRowTile);
  place(inside, blocks, pass.n_tiles, tile);
  if (g.pass == 1) {  // rows lie by the rank whose tokens they are: those that go far come first
    tile.m += static_cast<int>(static_cast<uint64_t>(blocks) * s.behind_own >> 32);
    if (tile.m >= blocks) tile.m -= blocks;
  }
  tile.row += tile.m * kRowTile;
  const int left = g.valid - tile.m * kRowTile;
  tile.rows = left < kRowTile ? left : kRowTile;
  tile.depth = pass.depth;
  return tile;
}

struct alignas(16) FourTickets {
  int32_t value[4];
};

// Finds the tiles of tickets, which only grow. Each call looks at what the call before has asked of
// memory, so that who calls now and then never waits.
struct PlanWalker {
  int32_t segment = 0;  // the ticket's, or one before it
  int32_t first = 0;    // its first ticket
  int32_t state = 0;    // nothing is asked for; `ahead` is; `what` is
  FourTickets ahead{};  // first tickets of the four segments around and after it
  Segment what{};

  MOK_HOST_DEVICE bool find(const Plan& plan, int ticket, Tile& tile) {
    if (state < 2) {
      if (state == 0 || !walk(ticket)) {
        ahead = *reinterpret_cast<const FourTickets*>(plan.first + (segment + 1) / 4 * 4);
        state = 1;
        return false;
      }
      what = plan.segment[segment];
      state = 2;
      return false;
    }
    tile = tile_of(plan.shape, what, ticket - first);
    state = 1;  // `ahead` is still of this segment
    return true;
  }

 private:
  // Within `ahead`; true if the ticket's segment is among them.
  MOK_HOST_DEVICE bool walk(int ticket) {
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int i = 0; i < 4; ++i) {
      if (i != (segment + 1) % 4) continue;
      if (ahead.value[i] > ticket) return true;
      first = ahead.value[i];
      ++segment;
    }
    return false;
  }
};

// The order of a lap's moves: tickets -> groups of kMoveRows rows; tickets of what goes home
// follow, then those of the next lap. Source 0 is what the first pass reads. Source 1, where there
// is one, is read by the last pass alone, and so follows by as many experts as that pass does; but
// of later laps their first pass reads it too. The order of a rank's groups inside an expert. Its
// rows lie by the rank whose tokens they are, so in their order all ranks would read from rank 0 at
// once, then all from rank 1. Here they take turns through as many parts of the expert as there are
// ranks, each from another part on.
struct Turns {
  int32_t log2 = 0;  // of the parts
  int32_t first = 0;

  // most: parts that an expert's groups can be cut into, whose number is a multiple of it.
  MOK_HOST_DEVICE static Turns of(int ranks, int rank, int most) {
    Turns t;
    while ((2 << t.log2) <= ranks && (2 << t.log2) <= most) ++t.log2;
    t.first = rank;
    return t;
  }

  // The one that is taken as number i, of `groups`.
  MOK_HOST_DEVICE int at(int i, int groups) const {
    return ((i + first) & ((1 << log2) - 1)) * (groups >> log2) + (i >> log2);
  }
};

struct Move {
  int32_t group;  // of the lap
  int32_t source;
};

struct MoveOrder {
  int32_t sources;
  int32_t groups;  // of one source
  int32_t lag;
  int32_t pushes;  // groups of kPushRows rows

  MOK_HOST_DEVICE static MoveOrder of(const PlanShape& s, int sources, const Lap* laps, int lap) {
    const int row = laps[lap].row, rows = laps[lap + 1].row - row;
    const int experts = laps[lap + 1].expert - laps[lap].expert;
    const int ahead = s.ahead < experts ? s.ahead + 1 : experts;
    const int lead = laps[lap].expert + (ahead < experts ? ahead : experts);
    return {sources,
            rows / kMoveRows,
            lap > 0 ? 0 : (s.start[lead] - row) / kMoveRows,
            rows / kPushRows};
  }

  MOK_HOST_DEVICE int count() const { return sources * groups; }

  MOK_HOST_DEVICE Move at(int ticket) const {
    if (sources == 1 || ticket < lag) return {ticket, 0};
    const int after = ticket - lag, both = 2 * (groups - lag);
    if (after >= both) return {groups - lag + after - both, 1};
    return after % 2 == 0 ? Move{lag + after / 2, 0} : Move{after / 2, 1};
  }
};

}  // namespace mok
