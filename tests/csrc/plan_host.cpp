// The plan for the host: writes the tiles of a walker's tickets into a flat
// array. And which weight tiles are idle.
#include <cstdint>
#include <initializer_list>

#include "../../csrc/device/plan.cuh"

namespace {

// In the order of test_plan.py's Shape.words().
mok::PlanShape shape_of(const int32_t* words, const int32_t* start, const int32_t* count) {
  mok::PlanShape shape{};
  for (mok::PassShape* passes : {shape.routed, shape.shared}) {
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

}  // namespace

// first: room for segments + 1. Returns the number of tickets.
extern "C" int32_t plan_first(const int32_t* words, const int32_t* start, const int32_t* count,
                              int32_t* first) {
  const mok::PlanShape shape = shape_of(words, start, count);
  first[0] = 0;
  for (int i = 0; i < shape.segments(); ++i) {
    first[i + 1] = first[i] + mok::segment_tiles(shape, mok::segment_at(shape, i));
  }
  return mok::Plan{shape, first}.count();
}

// One walker: tickets ascend, all below the number of tickets.
extern "C" void plan_walk(const int32_t* words, const int32_t* start, const int32_t* count,
                          const int32_t* first, const int32_t* tickets, int32_t n, int32_t* out) {
  const mok::Plan plan{shape_of(words, start, count), first};
  int segment = 0;
  for (int32_t i = 0; i < n; ++i) {
    const mok::Tile tile = plan.at(tickets[i], segment);
    const int32_t fields[] = {tile.expert,
                              tile.pass,
                              tile.m,
                              tile.n,
                              tile.row,
                              tile.rows,
                              tile.depth,
                              tile.fault,
                              tile.idle};
    for (int32_t field : fields) *out++ = field;
  }
}

// idle of every weight tile, in ticket order.
extern "C" void weight_idle(const int32_t* start, const int32_t* count, int32_t experts,
                            int32_t capacity, int32_t m_tiles, int32_t n_tiles, int32_t keep_empty,
                            int32_t* out) {
  const mok::WeightTiles tiles{
      {start, count, experts, capacity}, m_tiles, n_tiles, keep_empty != 0};
  for (int32_t ticket = 0; ticket < tiles.count(); ++ticket) out[ticket] = tiles.at(ticket).idle;
}
