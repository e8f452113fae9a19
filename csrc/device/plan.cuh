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

// Where a walker through the segments stands; tickets only grow.
struct Plan {
  PlanShape shape;
  const int32_t* first;  // [segments + 1]: the segments' first tickets; the last is their number

  MOK_HOST_DEVICE int count() const { return first[shape.segments()]; }

  MOK_HOST_DEVICE Tile at(int ticket, int& segment) const {
    while (first[segment + 1] <= ticket) ++segment;
    const Segment what = segment_at(shape, segment);
    const int inside = ticket - first[segment];
    Tile tile = no_tile();
    tile.expert = what.expert;
    tile.pass = what.pass;
    if (what.pass == shape.passes) {
      tile.m = inside;
      return tile;
    }
    const bool shared = what.expert == shape.experts;
    if (shared) tile.pass += shape.passes + 1;
    const PassShape& pass = (shared ? shape.shared : shape.routed)[what.pass];
    const int start = shared ? 0 : shape.start[what.expert];
    const int valid = shared ? shape.tokens : shape.count[what.expert];
    const int end = shared ? shape.shared_blocks() * kRowTile : shape.start[what.expert + 1];
    tile.fault = (start | end) % kRowTile != 0 || start < 0 || valid < 0 || end - start < valid ||
                 (!shared && end > shape.capacity);
    if (tile.fault) return tile;
    tile.row = start;
    if (pass.m_tiles > 0) {
      place(inside, pass.m_tiles, pass.n_tiles, tile);
      tile.rows = valid;
      tile.depth = valid > 0 ? tiles_of(valid, kDepthTile) : 1;
      return tile;
    }
    place(inside, (end - start) / kRowTile, pass.n_tiles, tile);
    tile.row += tile.m * kRowTile;
    const int left = valid - tile.m * kRowTile;
    tile.rows = left < 0 ? 0 : left < kRowTile ? left : kRowTile;
    tile.depth = pass.depth;
    return tile;
  }
};

// The order of moves: tickets -> groups of kMoveRows rows. Source 0 is what the first pass reads.
// Source 1, where there is one, is read by the last pass alone, and so follows by as many experts
// as that pass does.
constexpr int kMoveRows = 4;
constexpr int kPushRows = 16;  // that go home together; tickets of them follow those of moves

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
