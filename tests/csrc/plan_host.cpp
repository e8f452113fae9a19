// The plan for the host: writes the tiles of a walker's tickets into a flat
// array. And which weight tiles are idle.
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "../../csrc/device/plan.cuh"

namespace {

// In the order of test_plan.py's Shape.words().
mok::PlanShape shape_of(const int32_t *words, const int32_t *start,
                        const int32_t *count) {
  mok::PlanShape shape{};
  for (mok::PassShape *passes : {shape.routed, shape.shared}) {
    for (int i = 0; i < mok::kMaxPasses; ++i, words += 3)
      passes[i] = {words[0], words[1], words[2]};
  }
  shape.passes = words[0];
  shape.experts = words[1];
  shape.ahead = words[2];
  shape.tokens = words[3];
  shape.combine_tiles = words[4];
  shape.keep_empty = words[5] != 0;
  shape.capacity = words[6];
  shape.start = start;
  shape.count = count;
  return shape;
}

void write(const mok::Tile &tile, int32_t *out) {
  for (int32_t field :
       {tile.expert, tile.pass, tile.m, tile.n, tile.row, tile.rows, tile.depth,
        int32_t{tile.fault}, int32_t{tile.idle}})
    *out++ = field;
}

struct Walker {
  mok::PlanWalker walker;

  mok::Tile find(const mok::Plan &plan, int32_t ticket) {
    mok::Tile tile;
    while (!walker.find(plan, ticket, tile)) {
    }
    return tile;
  }
};

constexpr int kAfter = 3; // words after the first tickets that may be read

} // namespace

// first: 16-byte aligned, room for segments + 1 and kAfter. Returns the number
// of tickets.
extern "C" int32_t plan_first(const int32_t *words, const int32_t *start,
                              const int32_t *count, int32_t *first) {
  const mok::PlanShape shape = shape_of(words, start, count);
  first[0] = 0;
  for (int i = 0; i < shape.segments(); ++i) {
    first[i + 1] =
        first[i] + mok::segment_tiles(shape, mok::segment_at(shape, i));
  }
  return mok::Plan{shape, first}.count();
}

// One walker: tickets ascend, all below the number of tickets.
extern "C" void plan_walk(const int32_t *words, const int32_t *start,
                          const int32_t *count, const int32_t *first,
                          const int32_t *tickets, int32_t n, int32_t *out) {
  const mok::Plan plan{shape_of(words, start, count), first};
  Walker walker;
  for (int32_t i = 0; i < n; ++i)
    write(walker.find(plan, tickets[i]), out + 9 * i);
}

// {group, source} of every move, in ticket order, into `out`; returns `lag`.
extern "C" int32_t move_order(const int32_t *words, const int32_t *start,
                              const int32_t *count, int32_t sources,
                              int32_t *out) {
  const mok::MoveOrder order =
      mok::MoveOrder::of(shape_of(words, start, count), sources);
  for (int32_t ticket = 0; ticket < order.count(); ++ticket) {
    const mok::Move move = order.at(ticket);
    *out++ = move.group;
    *out++ = move.source;
  }
  return order.lag;
}

// The order in which a rank takes `groups` of an expert, into `out`.
extern "C" void turns(int32_t ranks, int32_t rank, int32_t most, int32_t groups,
                      int32_t *out) {
  const mok::Turns order = mok::Turns::of(ranks, rank, most);
  for (int32_t i = 0; i < groups; ++i)
    out[i] = order.at(i, groups);
}

// All tickets of many shapes. cases: words of a shape, experts, walkers, room
// in `out`, for each; ticket i goes to walker i * i % walkers. Where the tiles
// do not fill the room, the first word is -9.
extern "C" void plan_cases(const int32_t *cases, int32_t n, const int32_t *rows,
                           int32_t *out) {
  constexpr int kWords = 6 * mok::kMaxPasses + 7;
  for (; n > 0; --n, cases += kWords + 3) {
    const int32_t experts = cases[kWords], walkers = cases[kWords + 1],
                  room = cases[kWords + 2];
    const int32_t *start = rows, *count = rows + experts + 1;
    std::vector<int32_t> first(shape_of(cases, start, count).segments() + 1 +
                               kAfter);
    const int32_t tickets = plan_first(cases, start, count, first.data());
    if (tickets * 9 != room) {
      if (room > 0)
        *out = -9;
    } else {
      const mok::Plan plan{shape_of(cases, start, count), first.data()};
      std::vector<Walker> walker(walkers);
      for (int32_t i = 0; i < tickets; ++i)
        write(walker[static_cast<int64_t>(i) * i % walkers].find(plan, i),
              out + 9 * i);
    }
    rows += 2 * experts + 1;
    out += room;
  }
}

// idle of every weight tile, in ticket order.
extern "C" void weight_idle(const int32_t *start, const int32_t *count,
                            int32_t experts, int32_t capacity, int32_t m_tiles,
                            int32_t n_tiles, int32_t keep_empty, int32_t *out) {
  const mok::WeightTiles tiles{
      {start, count, experts, capacity}, m_tiles, n_tiles, keep_empty != 0};
  for (int32_t ticket = 0; ticket < tiles.count(); ++ticket)
    out[ticket] = tiles.at(ticket).idle;
}
