// What a pass writes: epilogues from accumulators to the units of units.cuh. Every output element
// is written exactly once, by one thread's value: no atomics, no order.
#pragma once

#include "mainloop.cuh"

namespace mok::sm90 {

// Where one box goes in a row-major matrix, for row by row copies.
struct Place {
  __nv_bfloat16* base;
  int64_t stride;
  int column;
};

// sigmoid of two values with one reciprocal: three special-function operations instead of four.
__device__ __forceinline__ void sigmoid(float x, float y, float& sx, float& sy) {
  constexpr float kLog2e = 1.4426950408889634f, kLargest = 1.0e18f;  // squared it is finite
  const float dx = 1.0f + fminf(exp2_fast(-kLog2e * x), kLargest);
  const float dy = 1.0f + fminf(exp2_fast(-kLog2e * y), kLargest);
  const float r = reciprocal_fast(dx * dy);
  sx = r * dy;
  sy = r * dx;
}

// One warp's 16 rows of a bf16 box of WIDTH columns: where this lane's part of the columns 16 q ..
// 16 q + 15 lies.
template <int WIDTH>
struct WarpBox {
  static constexpr int kRowBytes = 2 * WIDTH;
  uint32_t base;
  int swizzle, lane;
  __device__ __forceinline__ WarpBox(uint32_t box, int warp, int lane_)
      : base(box + (warp * 16 + (lane_ & 15)) * kRowBytes),
        swizzle(WIDTH == 64 ? lane_ & 7 : lane_ >> 1 & 3),
        lane(lane_) {}
  __device__ __forceinline__ uint32_t at(int q) const { return part(2 * q + (lane >> 4)); }
  // The 8 columns 8 c .. 8 c + 7 alone, in lanes 0 to 15.
  __device__ __forceinline__ uint32_t part(int c) const { return base + ((c ^ swizzle) << 4); }
};

// The thread's four pairs of columns 16 q of a 64-column part of the accumulators, in stmatrix
// order.
__device__ __forceinline__ uint32_t pair_of(const float* d, int q, int i) {
  return pack(d[8 * q + 2 * i], d[8 * q + 2 * i + 1]);
}

template <int WIDTH>
__device__ __forceinline__ void write_bf16(const WarpBox<WIDTH>& box, const float* d) {
#pragma unroll
  for (int q = 0; q < WIDTH / 16; ++q) {
    store_matrices(
        box.at(q), pair_of(d, q, 0), pair_of(d, q, 1), pair_of(d, q, 2), pair_of(d, q, 3));
  }
}

// ---- epilogues
//
// A unit is kKinds boxes of 64 rows by kWidth columns. live(): does a unit hold any column of the
// problem; leaves(): is it stored. write(): a warp fills its 16 rows of the unit at that address;
// `row` is this lane's first row, counted in the buffer, the other is row + 8. send() and bring()
// move a whole unit; place() is where a box of it goes, row by row.
//
// A slab's units are written in rounds of kRound units from the first kShift accumulators (and
// those half a tile further, where gate and up share a tile); then all accumulators move down by
// kShift. So the code of a round is there once: unrolled, dSwiGLU alone was 90 KB, and what ran
// beside it waited for instructions.

__device__ __forceinline__ float prob_of(const PassParameters& p, int row) {
  return p.prob == nullptr ? 1.0f : p.prob[row];
}

struct AllLeave {
  static __device__ __forceinline__ bool leaves(const Tile&, int) { return true; }
};

template <class T, int WIDTH = 64>
struct StoreRows : AllLeave {  // bf16 of the accumulators
  static constexpr int kWidth = WIDTH, kUnits = T::BLOCK_N / kWidth, kKinds = 1;
  static constexpr int kRound = 1, kShift = kWidth / 2;
  static constexpr int kUnitBytes = kBoxRows * 2 * kWidth;
  static constexpr bool kReads = false, kSums = false;
  static __device__ __forceinline__ int column(const Tile& tile, int unit) {
    return tile.n * T::BLOCK_N + unit * kWidth;
  }
  template <class P>
  static __device__ __forceinline__ bool live(const P& p, const Tile& tile, int unit) {
    return column(tile, unit) < p.columns;
  }
  template <class P>
  static __device__ __forceinline__ void write(const P&, const Tile&, const float* d, int,
                                               uint32_t at, int warp, int lane, int, float (&)[2]) {
    write_bf16(WarpBox<kWidth>(at, warp, lane), d);
  }
  template <class P>
  static __device__ __forceinline__ Place place(const P& p, const Tile& tile, int unit, int) {
    return {p.out_rows, p.columns, column(tile, unit)};
  }
  template <class P>
  static __device__ __forceinline__ void send(const P& p, const Tile& tile, int unit, uint32_t at,
                                              int row) {
    store_box(at, &p.out, column(tile, unit), row);
  }
};

// What it means that a plan has laps (device/plan.cuh): of the first one SwiGlu writes all; of
// later ones forward leaves gate and up out, and what backward does again writes nothing else.
enum class Laps { kOne, kSeveral, kAgain };

template <class T, Laps LAPS = Laps::kOne>
struct SwiGlu {  // columns: gate | up halves of the same columns. gate, up, then silu(gate) · up ·
                 // prob from the rounded two
  static constexpr int kHalf = T::BLOCK_N / 2, kWidth = kHalf % 64 == 0 ? 64 : 32;
  static constexpr int kUnits = 3 * kHalf / kWidth, kKinds = 1;
  static constexpr int kRound = 3, kShift = kWidth / 2;
  static constexpr int kUnitBytes = kBoxRows * 2 * kWidth;
  static constexpr bool kReads = false, kSums = false;
  static __device__ __forceinline__ int column(const Tile& tile, int unit) {
    return tile.n * kHalf + unit / 3 * kWidth;
  }
  template <class P>
  static __device__ __forceinline__ bool live(const P& p, const Tile& tile, int unit) {
    return column(tile, unit) < p.columns;
  }
  static __device__ __forceinline__ bool leaves(const Tile& tile, int unit) {
    if (LAPS == Laps::kAgain) return unit % 3 != 2;
    return LAPS == Laps::kOne || tile.lap == 0 || unit % 3 == 2;
  }
  template <class P>
  static __device__ __forceinline__ Place place(const P& p, const Tile& tile, int unit, int) {
    if (unit % 3 == 2) return {p.second_rows, p.columns, column(tile, unit)};
    return {p.out_rows, 2 * p.columns, unit % 3 * p.columns + column(tile, unit)};
  }
  template <class P>
  static __device__ __forceinline__ void send(const P& p, const Tile& tile, int unit, uint32_t at,
                                              int row) {
    if (unit % 3 == 2) return store_box(at, &p.second, column(tile, unit), row);
    store_box(at, &p.out, unit % 3 * p.columns + column(tile, unit), row);
  }
  template <class P>
  static __device__ __forceinline__ void write(const P& p, const Tile& tile, const float* gate,
                                               int part, uint32_t at, int warp, int lane, int row,
                                               float (&)[2]) {
    const WarpBox<kWidth> to(at, warp, lane);
    const float* const up = gate + kHalf / 2;
    if (part == 0) return write_bf16(to, gate);
    if (part == 1) return write_bf16(to, up);
    if (LAPS != Laps::kOne) row += tile.base;
    const float prob[2] = {prob_of(p, row), prob_of(p, row + 8)};
#pragma unroll
    for (int q = 0; q < kWidth / 16; ++q) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t g = pair_of(gate, q, i), u = pair_of(up, q, i);
        float s, t;
        sigmoid(low_of(g), high_of(g), s, t);
        a[i] = pack(low_of(g) * s * low_of(u) * prob[i & 1],
                    high_of(g) * t * high_of(u) * prob[i & 1]);
      }
      store_matrices(to.at(q), a[0], a[1], a[2], a[3]);
    }
  }
};

template <class T, Laps LAPS = Laps::kOne>
struct SwiGluGradient : AllLeave {  // accumulators: da. Reads gate, up; writes their gradients in
                                    // place, the activation, prob's parts
  static constexpr int kWidth = kPartColumns, kUnits = T::BLOCK_N / kWidth, kKinds = 3;
  static constexpr int kBytes = kBoxRows * 2 * kWidth, kUnitBytes = kKinds * kBytes;
  static constexpr int kRound = 1, kShift = kWidth / 2;
  static constexpr bool kReads = true, kSums = true;
  static __device__ __forceinline__ int column(const Tile& tile, int unit) {
    return tile.n * T::BLOCK_N + unit * kWidth;
  }
  template <class P>
  static __device__ __forceinline__ bool live(const P& p, const Tile& tile, int unit) {
    return column(tile, unit) < p.columns;
  }
  template <class P>
  static __device__ __forceinline__ Place place(const P& p, const Tile& tile, int unit, int kind) {
    if (kind == 2) return {p.second_rows, p.columns, column(tile, unit)};
    return {p.out_rows, 2 * p.columns, kind * p.columns + column(tile, unit)};
  }
  template <class P>
  static __device__ __forceinline__ void send(const P& p, const Tile& tile, int unit, uint32_t at,
                                              int row) {
    store_boxes(at, &p.out, column(tile, unit), row, 0);  // gate and up
    store_box(at + 2 * kBytes, &p.second, column(tile, unit), row);
  }
  template <class P>
  static __device__ __forceinline__ void bring(const P& p, const Tile& tile, int unit, uint32_t to,
                                               int row, uint64_t& ready) {
    arrive_expect(ready, 2 * kBytes);
    const bool again = LAPS != Laps::kOne && tile.lap > 0;  // where they have been written again
    load_boxes(to, again ? &p.out : &p.b, ready, column(tile, unit), row, 0);
  }
  template <class P>
  static __device__ __forceinline__ void write(const P& p, const Tile& tile, const float* d, int,
                                               uint32_t at, int warp, int lane, int row,
                                               float (&part)[2]) {
    const WarpBox<kWidth> gate(at, warp, lane);
    if (LAPS != Laps::kOne) row += tile.base;
    const float prob[2] = {prob_of(p, row), prob_of(p, row + 8)};
    part[0] = part[1] = 0.0f;
#pragma unroll
    for (int c = 0; c < kWidth / 8; ++c) convert(gate, d + 4 * c, c, prob, part);
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // four lanes hold a row
      part[i] += __shfl_xor_sync(~0u, part[i], 1);
      part[i] += __shfl_xor_sync(~0u, part[i], 2);
    }
  }
  template <class P>
  static __device__ __forceinline__ void write_sums(const P& p, const Tile& tile,
                                                    const float (&part)[2], int unit, int warp,
                                                    int lane, int first, int rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = warp * 16 + (lane >> 2) + 8 * i;
      if (p.parts != nullptr && (lane & 3) == 0 && row < rows) {
        p.parts[static_cast<int64_t>(first + row) * (p.columns / kWidth) +
                column(tile, unit) / kWidth] = part[i];
      }
    }
  }
  // 8 columns at a time: more would not fit beside the accumulators.
  static __device__ __forceinline__ void convert(const WarpBox<kWidth>& gate, const float* d, int c,
                                                 const float (&prob)[2], float (&part)[2]) {
    uint32_t g[2], u[2], a[2];
    load_matrices(gate.part(c), g);
    load_matrices(gate.part(c) + kBytes, u);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float g0 = low_of(g[i]), g1 = high_of(g[i]), u0 = low_of(u[i]), u1 = high_of(u[i]);
      const float w = prob[i], d0 = d[2 * i], d1 = d[2 * i + 1];
      float s0, s1;
      sigmoid(g0, g1, s0, s1);
      const float silu0 = g0 * s0, silu1 = g1 * s1;
      const float t0 = silu0 * u0, t1 = silu1 * u1;
      part[i] = fmaf(d1, t1, fmaf(d0, t0, part[i]));
      a[i] = pack(t0 * w, t1 * w);
      const float w0 = d0 * w, w1 = d1 * w;
      g[i] = pack(w0 * u0 * fmaf(silu0, 1.0f - s0, s0), w1 * u1 * fmaf(silu1, 1.0f - s1, s1));
      u[i] = pack(w0 * silu0, w1 * silu1);
    }
    __syncwarp();
    store_matrices(gate.part(c), g[0], g[1]);
    store_matrices(gate.part(c) + kBytes, u[0], u[1]);
    store_matrices(gate.part(c) + 2 * kBytes, a[0], a[1]);
  }
};

template <class T, Gradient TYPE, bool ACCUMULATE>
struct WriteGradient
    : AllLeave {  // into the expert's own matrix, added to the old value or in its place
  static constexpr bool kWide = TYPE == Gradient::kFp32;
  static constexpr int kWidth = 64, kUnits = T::BLOCK_N / kWidth,
                       kKinds = kWide ? 2 : 1;  // 128-byte blocks of columns
  static constexpr int kUnitBytes = kKinds * kBoxBytes;
  static constexpr int kRound = 1, kShift = kWidth / 2;
  static constexpr bool kReads = ACCUMULATE, kSums = false;
  template <class P>
  static __device__ __forceinline__ bool live(const P& p, const Tile& tile, int unit) {
    return tile.n * T::BLOCK_N + unit * kWidth < p.columns;
  }
  static __device__ __forceinline__ int block(const Tile& tile, int unit) {
    return (tile.n * kUnits + unit) * kKinds;
  }
  template <class P>
  static __device__ __forceinline__ void send(const P& p, const Tile& tile, int unit, uint32_t at,
                                              int row) {
    store_boxes_once(at, p.map(tile), 0, row, block(tile, unit), evict_first());
  }
  template <class P>
  static __device__ __forceinline__ void bring(const P& p, const Tile& tile, int unit, uint32_t to,
                                               int row, uint64_t& ready) {
    arrive_expect(ready, kUnitBytes);
    load_boxes_once(to, p.map(tile), ready, 0, row, block(tile, unit), evict_first());
  }
  template <class P>
  static __device__ __forceinline__ void write(const P&, const Tile&, const float* d, int,
                                               uint32_t at, int warp, int lane, int, float (&)[2]) {
    if constexpr (kWide) {
      write_fp32(at, d, warp, lane);
      write_fp32(at + kBoxBytes, d + 16, warp, lane);
    } else {
      const WarpBox<64> to(at, warp, lane);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        uint32_t v[4];
        if constexpr (ACCUMULATE) load_matrices(to.at(q), v);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float x = d[8 * q + 2 * i], y = d[8 * q + 2 * i + 1];
          if constexpr (ACCUMULATE) {
            x += low_of(v[i]);
            y += high_of(v[i]);
          }
          v[i] = pack(x, y);
        }
        __syncwarp();
        store_matrices(to.at(q), v[0], v[1], v[2], v[3]);
      }
    }
  }
  // 16 rows by 32 columns. Odd rows take the groups of 8 columns in another order, which keeps
  // 8-byte accesses free of bank conflicts.
  static __device__ __forceinline__ void write_fp32(uint32_t box, const float* d, int warp,
                                                    int lane) {
    const int r = lane >> 2;
    const bool odd = r & 1;
    const uint32_t base = box + warp * 2048 + r * 128 + (lane & 1) * 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t at = base + (((2 * (odd ? j ^ 2 : j) + ((lane & 3) >> 1)) ^ r) << 4);
      float2 v[2];  // rows r and r + 8
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        v[half] = ACCUMULATE ? load_shared(at + half * 1024) : make_float2(0.0f, 0.0f);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = odd ? d[4 * (j ^ 2) + 2 * half] : d[4 * j + 2 * half];
        const float y = odd ? d[4 * (j ^ 2) + 2 * half + 1] : d[4 * j + 2 * half + 1];
        store_shared(
            at + half * 1024, ACCUMULATE ? v[half].x + x : x, ACCUMULATE ? v[half].y + y : y);
      }
    }
  }
};

}  // namespace mok::sm90
