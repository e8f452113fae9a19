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
#pragma once

#include "schedule.cuh"

namespace mok {

// A tile's `pass`: 0 to passes - 1 of a routed expert, `passes` for combine, passes + 1 and on of
// the shared expert.
constexpr int kMaxPasses = 4;  // of one kind of expert
struct PassShape {
  int32_t m_tiles;  // of a weight gradient; 0: the expert's row tiles
  int32_t n_tiles;  // 0: nobody wants the pass
  int32_t depth;    // 0: the expert's rows
};

struct PlanShape {
  PassShape routed[kMaxPasses], shared[kMaxPasses];
  int32_t passes;   // of an expert
  int32_t experts;  // routed; the shared one is number `experts`
  int32_t ahead;
  int32_t tokens;
  int32_t combine_tiles;
  bool keep_empty;  // an expert without rows still has weight tiles: its fresh gradient is zero
  const int32_t* start;
  const int32_t* count;
  int32_t capacity;  // rows that the buffers hold

  MOK_HOST_DEVICE int segments() const { return passes * (experts + 1) + 1; }
  MOK_HOST_DEVICE int shared_blocks() const { return tiles_of(tokens, kRowTile); }
};

struct Segment {
  int32_t expert;
  int32_t pass;  // passes: combine
};

MOK_HOST_DEVICE Segment segment_at(const PlanShape& s, int index) {
  const int rest = s.passes - 1, ahead = s.ahead < s.experts ? s.ahead : s.experts;
  if (index == 0) return {s.experts, 0};
  index -= 1;
  if (index < ahead) return {index, 0};
  index -= ahead;
  if (index < rest) return {s.experts, 1 + index};
  index -= rest;
  const int steady = s.experts - ahead;
  if (index < steady * s.passes) {
    const int step = index / s.passes, inside = index - step * s.passes;
    return inside == 0 ? Segment{ahead + step, 0} : Segment{step, inside};
  }
  index -= steady * s.passes;
  if (index < ahead * rest) return {steady + index / rest, 1 + index % rest};
  return {s.experts, s.passes};
}

MOK_HOST_DEVICE int segment_tiles(const PlanShape& s, Segment segment) {
  if (segment.pass == s.passes) return s.combine_tiles;
  const bool shared = segment.expert == s.experts;
  const PassShape& pass = (shared ? s.shared : s.routed)[segment.pass];
  if (pass.m_tiles > 0) {
    const bool rows = shared ? s.tokens > 0 : s.count[segment.expert] > 0;
    return rows || s.keep_empty ? pass.m_tiles * pass.n_tiles : 0;
  }
  const int blocks = shared ? s.shared_blocks()
                            : (s.start[segment.expert + 1] - s.start[segment.expert]) / kRowTile;
  return blocks * pass.n_tiles;
}

struct Plan {
  PlanShape shape;
  const int32_t* first;  // [segments + 1, then 3 of any value], 16-byte aligned: the segments'
                         // first tickets; the last is their number

  MOK_HOST_DEVICE int count() const { return first[shape.segments()]; }
};

struct ExpertRows {
  int32_t start, end, valid;
};

MOK_HOST_DEVICE ExpertRows rows_of(const PlanShape& s, const Segment& segment) {
  if (segment.pass == s.passes) return {0, 0, 0};  // combine
  if (segment.expert == s.experts) return {0, s.shared_blocks() * kRowTile, s.tokens};
  return {s.start[segment.expert], s.start[segment.expert + 1], s.count[segment.expert]};
}

// The tile number `inside` of a segment.
MOK_HOST_DEVICE Tile tile_of(const PlanShape& s, const Segment& segment, int inside,
                             const ExpertRows& rows) {
  Tile tile = no_tile();
  tile.expert = segment.expert;
  tile.pass = segment.pass;
  if (segment.pass == s.passes) {
    tile.m = inside;
    return tile;
  }
  const bool shared = segment.expert == s.experts;
  if (shared) tile.pass += s.passes + 1;
  const PassShape& pass = (shared ? s.shared : s.routed)[segment.pass];
  tile.fault = rows.start % kRowTile != 0 || rows.start < 0 || rows.valid < 0 ||
               rows.end - rows.start != tiles_of(rows.valid, kRowTile) * kRowTile ||
               (!shared && rows.end > s.capacity);
  if (tile.fault) return tile;
  tile.row = rows.start;
  if (pass.m_tiles > 0) {
    place(inside, pass.m_tiles, pass.n_tiles, tile);
    tile.rows = rows.valid;
    tile.depth = rows.valid > 0 ? tiles_of(rows.valid, kDepthTile) : 1;
    return tile;
  }
  place(inside, (rows.end - rows.start) / kRowTile, pass.n_tiles, tile);
  tile.row += tile.m * kRowTile;
  const int left = rows.valid - tile.m * kRowTile;
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
  int32_t state = 0;    // nothing is asked for; `ahead` is; `rows` are
  FourTickets ahead{};  // first tickets of the four segments around and after it
  ExpertRows rows{};

  MOK_HOST_DEVICE bool find(const Plan& plan, int ticket, Tile& tile) {
    if (state < 2) {
      if (state == 0 || !walk(ticket)) {
        ahead = *reinterpret_cast<const FourTickets*>(plan.first + (segment + 1) / 4 * 4);
        state = 1;
        return false;
      }
      rows = rows_of(plan.shape, segment_at(plan.shape, segment));
      state = 2;
      return false;
    }
    tile = tile_of(plan.shape, segment_at(plan.shape, segment), ticket - first, rows);
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

// The order of moves: tickets -> groups of kMoveRows rows. Source 0 is what the first pass reads.
// Source 1, where there is one, is read by the last pass alone, and so follows by as many experts
// as that pass does.
constexpr int kMoveRows = 4;
constexpr int kPushRows = 16;  // that go home together; tickets of them follow those of moves

// The order of a rank's groups inside an expert. Its rows lie by the rank whose tokens they are, so
// in their order all ranks would read from rank 0 at once, then all from rank 1. Here they take
// turns through as many parts of the expert as there are ranks, each from another part on.
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
  int32_t group;
  int32_t source;
};

struct MoveOrder {
  int32_t sources;
  int32_t groups;  // of one source
  int32_t lag;

  MOK_HOST_DEVICE static MoveOrder of(const PlanShape& s, int sources) {
    const int ahead = s.ahead < s.experts ? s.ahead + 1 : s.experts;
    return {sources,
            s.start[s.experts] / kMoveRows,
            s.start[ahead < s.experts ? ahead : s.experts] / kMoveRows};
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
