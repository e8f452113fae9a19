// The plan for the host: writes the tiles of a walker's tickets into a flat
// array. And which weight tiles are idle.
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
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
  shape.again = {words[0], words[1], words[2]};
  words += 3;
  shape.passes = words[0];
  shape.experts = words[1];
  shape.ahead = words[2];
  shape.tokens = words[3];
  shape.combine_tiles = words[4];
  shape.keep_empty = words[5] != 0;
  shape.capacity = words[6];
  shape.most = words[7];
  shape.laps = mok::most_laps(shape.most, shape.capacity);
  shape.ranks = words[8];
  shape.rank = words[9];
  shape.start = start;
  shape.count = count;
  return shape;
}

void write(const mok::Tile &tile, int32_t *out) {
  for (int32_t field :
       {tile.expert, int32_t{tile.pass}, tile.m, tile.n, tile.row, tile.rows,
        tile.depth, int32_t{tile.fault}, int32_t{tile.idle}, int32_t{tile.lap},
        tile.base})
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

constexpr int kFields = 11;
constexpr int kAfter = 3; // words after the first tickets that may be read

// A plan as plan_work leaves it on the device.
struct Made {
  std::vector<mok::Lap> laps;
  std::vector<mok::Segment> segments;
  std::vector<mok::FourTickets> room; // aligned
  int32_t lap_count = 0;
  mok::Plan plan{};

  Made(const int32_t *words, const int32_t *start, const int32_t *count) {
    const mok::PlanShape shape = shape_of(words, start, count);
    laps.resize(shape.laps + 1);
    lap_count = mok::find_laps(shape, laps.data());
    const int n = laps[lap_count].segment;
    if (n > mok::most_segments(shape.experts, shape.laps))
      throw std::length_error("more segments than there is room for");
    segments.resize(n);
    room.resize((n + 1 + kAfter + 3) / 4);
    int32_t *const first = room[0].value;
    for (int i = 0; i < n; ++i) {
      segments[i] = mok::segment_at(shape, laps.data(), i);
      first[i + 1] = first[i] + mok::segment_tiles(shape, segments[i]);
    }
    plan = {shape, first, segments.data(), laps.data(), &lap_count};
  }
};

} // namespace

// Returns the number of tickets.
extern "C" int32_t plan_count(const int32_t *words, const int32_t *start,
                              const int32_t *count) {
  return Made(words, start, count).plan.count();
}

// {expert, row, segment, steps} of every lap, and of the end; returns how many
// laps there are.
extern "C" int32_t plan_laps(const int32_t *words, const int32_t *start,
                             const int32_t *count, int32_t *out) {
  const Made made(words, start, count);
  for (int i = 0; i <= made.lap_count; ++i) {
    const mok::Lap &lap = made.laps[i];
    for (int32_t field : {lap.expert, lap.row, lap.segment, lap.steps})
      *out++ = field;
  }
  return made.lap_count;
}

// One walker: tickets ascend, all below the number of tickets.
extern "C" void plan_walk(const int32_t *words, const int32_t *start,
                          const int32_t *count, const int32_t *tickets,
                          int32_t n, int32_t *out) {
  const Made made(words, start, count);
  Walker walker;
  for (int32_t i = 0; i < n; ++i)
    write(walker.find(made.plan, tickets[i]), out + kFields * i);
}

// {group, source} of every move of a lap, in ticket order, into `out`; returns
// `lag`.
extern "C" int32_t move_order(const int32_t *words, const int32_t *start,
                              const int32_t *count, int32_t sources,
                              int32_t lap, int32_t *out) {
  const Made made(words, start, count);
  const mok::MoveOrder order =
      mok::MoveOrder::of(made.plan.shape, sources, made.laps.data(), lap);
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
  constexpr int kWords = 6 * mok::kMaxPasses + 3 + 10;
  for (; n > 0; --n, cases += kWords + 3) {
    const int32_t experts = cases[kWords], walkers = cases[kWords + 1],
                  room = cases[kWords + 2];
    const int32_t *start = rows, *count = rows + experts + 1;
    const Made made(cases, start, count);
    if (made.plan.count() * kFields != room) {
      if (room > 0)
        *out = -9;
    } else {
      std::vector<Walker> walker(walkers);
      for (int32_t i = 0; i < made.plan.count(); ++i)
        write(
            walker[static_cast<int64_t>(i) * i % walkers].find(made.plan, i),
            out + kFields * i);
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
