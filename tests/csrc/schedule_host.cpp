// The scheduler for the host: writes the tile of every ticket into a flat
// array.
#include <cstdint>

#include "../../csrc/device/schedule.cuh"

namespace {

template <class Schedule>
int32_t write_tiles(const Schedule &schedule, int32_t *out, int32_t most) {
  const int32_t count = schedule.count();
  for (int32_t ticket = 0; ticket < count && ticket < most; ++ticket) {
    const mok::Tile tile = schedule.at(ticket);
    const int32_t fields[7] = {tile.expert, tile.m,     tile.n,    tile.row,
                               tile.rows,   tile.depth, tile.fault};
    for (int i = 0; i < 7; ++i)
      out[7 * ticket + i] = fields[i];
  }
  return count;
}

} // namespace

extern "C" int32_t row_tiles(const int32_t *start, const int32_t *count,
                             int32_t experts, int32_t capacity, int32_t n_tiles,
                             int32_t depth, int32_t *out, int32_t most) {
  return write_tiles(
      mok::RowTiles{{start, count, experts, capacity}, n_tiles, depth}, out,
      most);
}

extern "C" int32_t weight_tiles(const int32_t *start, const int32_t *count,
                                int32_t experts, int32_t capacity,
                                int32_t m_tiles, int32_t n_tiles,
                                int32_t keep_empty, int32_t *out,
                                int32_t most) {
  return write_tiles(
      mok::WeightTiles{
          {start, count, experts, capacity}, m_tiles, n_tiles, keep_empty != 0},
      out, most);
}
