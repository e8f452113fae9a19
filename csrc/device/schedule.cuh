// Order of tiles: a ticket becomes {expert, m, n}. A pure function of the counts; it compiles for
// the host too, where tests/csrc/test_schedule.py visits every ticket.
//
// A tile is taken by ticket, so any set of running CTAs finishes the work, and no CTA owns a tile
// before it runs. Which CTA computes a tile, and when, changes no bit of it: `depth`, and with it
// the order of summation, depends on the shape (row tiles) or on the expert's own row count (weight
// tiles) alone.
//
// Order: expert-major, so that an expert's weights stay in L2 while its rows pass. Inside an
// expert, groups of kGroup row tiles, m fastest, then n: 132 CTAs then hold 16 row tiles and about
// 8 column tiles.
#pragma once

#include <cstdint>

#include "../arguments.h"

#ifdef __CUDACC__
#define MOK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOK_HOST_DEVICE inline
#endif

namespace mok {

constexpr int kRowTile = 128;  // every expert's rows start at a multiple of it
constexpr int kDepthTile = 64;
constexpr int kGroup = 16;

MOK_HOST_DEVICE int tiles_of(int extent, int tile) { return (extent + tile - 1) / tile; }

struct alignas(16) Tile {
  int32_t expert;  // -1: no tile is left
  int32_t m;       // row tile, counted in the expert (row tiles) or in the gradient (weight tiles)
  int32_t n;       // column tile
  int32_t row;     // first row: of the tile, or of the expert
  int32_t rows;    // valid rows from there: at most 128, or the expert's count
  int32_t depth;   // K steps of kDepthTile
  uint8_t fault;   // the rows it names are outside the contract
  uint8_t idle;    // nothing to do
  uint8_t pass;    // which of a kernel's passes
  uint8_t lap;     // of a plan's (plan.cuh)
  int32_t base;    // what `row` counts from

  MOK_HOST_DEVICE bool last() const { return expert < 0; }
  // A place in the order without work: a gradient to which no row adds.
  MOK_HOST_DEVICE bool nothing() const { return idle != 0; }
};

MOK_HOST_DEVICE Tile no_tile() { return Tile{-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}; }

// m and n of the i-th tile of a grid of m_tiles x n_tiles.
MOK_HOST_DEVICE void place(int i, int m_tiles, int n_tiles, Tile& tile) {
  const int group = i / (kGroup * n_tiles);
  const int first = group * kGroup;
  const int size = m_tiles - first < kGroup ? m_tiles - first : kGroup;
  const int inside = i - first * n_tiles;
  tile.n = inside / size;
  tile.m = first + inside - tile.n * size;
}

// Tiles of out[R, N]: the rows of one expert by a column tile.
struct RowTiles {
  Rows rows;
  int32_t n_tiles;
  int32_t depth;

  // Tickets below count() name the 128-row slices between the first and the last start; a slice
  // without a valid row comes back with rows == 0 and stores nothing.
  MOK_HOST_DEVICE int count() const {
    return rows.experts > 0 ? (rows.start[rows.experts] - rows.start[0]) / kRowTile * n_tiles : 0;
  }

  MOK_HOST_DEVICE Tile at(int ticket) const {
    const int base = rows.start[0];
    const int slice = ticket / n_tiles;
    int low = 0, high = rows.experts;  // start[low] <= base + 128 * slice < start[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if ((rows.start[middle] - base) / kRowTile <= slice) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int first = rows.start[low], end = rows.start[low + 1], valid = rows.count[low];
    Tile tile = no_tile();
    tile.expert = low;
    tile.depth = depth;
    tile.fault = (first | end) % kRowTile != 0 || first < 0 || valid < 0 || end - first < valid ||
                 end > rows.capacity;
    if (tile.fault) return tile;
    place(ticket - (first - base) / kRowTile * n_tiles, (end - first) / kRowTile, n_tiles, tile);
    tile.row = first + tile.m * kRowTile;
    const int left = valid - tile.m * kRowTile;
    tile.rows = left < 0 ? 0 : left < kRowTile ? left : kRowTile;
    return tile;
  }
};

// Tiles of an [M, N] gradient for each expert; the depth is the expert's rows.
struct WeightTiles {
  Rows rows;
  int32_t m_tiles;
  int32_t n_tiles;
  bool keep_empty;  // an expert without rows still has tiles: its fresh gradient is zero

  MOK_HOST_DEVICE int count() const { return rows.experts * m_tiles * n_tiles; }

  MOK_HOST_DEVICE Tile at(int ticket) const {
    const int expert = ticket / (m_tiles * n_tiles);
    const int first = rows.start[expert], valid = rows.count[expert];
    Tile tile = no_tile();
    tile.expert = expert;
    tile.row = first;
    tile.rows = valid;
    tile.depth = valid > 0 ? tiles_of(valid, kDepthTile) : 1;
    tile.idle = valid <= 0 && !keep_empty;
    tile.fault = first % kRowTile != 0 || first < 0 || valid < 0 ||
                 static_cast<int64_t>(first) + valid > rows.capacity;
    place(ticket - expert * m_tiles * n_tiles, m_tiles, n_tiles, tile);
    return tile;
  }
};

}  // namespace mok
