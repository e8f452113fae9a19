// One direction of the layer as one persistent kernel: moves, passes and combine of a plan
// (device/plan.cuh), in one grid.
//
// Who may touch what:
//   side warps   read tokens, write routed row buffers, raise ready[block]
//   load         waits for ready (pass 0), done0 (pass 1) or expert_done (weight gradients)
//   store        writes a pass's output, then raises done0 or done1 of its block, and expert_done
//   multiply     writes the sums itself and raises sums[block]; in a combine tile waits for done1
//                (and sums), reads the rows and writes tokens
// Counters only grow within a call, from the zero that plan_work writes before the grid starts. A
// wait's cause is a move or a tile of an earlier ticket; moves wait for nothing; so the smallest
// unfinished ticket can always go on, whatever set of CTAs runs.
//
// A reader whose copies go through the async proxy fences after its acquire; store waits until its
// copies have arrived, not only left shared memory, before it raises a counter.
//
// Push or pull: one rank so far, its rows are copied row block by row block in the order in which
// tiles need them, and combine reads them where the last product left them.
#pragma once

#include "../device/combine.cuh"
#include "../device/plan.cuh"
#include "launch.cuh"

namespace mok::sm90 {

constexpr int kMoveRows = 4;       // of one move ticket, of one block
constexpr int kCombineTokens = 8;  // of one combine tile
constexpr int kPassWarps = 4;      // that raise sums for a tile

struct Counters {        // zeroed before the grid starts
  uint32_t* tickets;     // next tile, next move
  int32_t* ready;        // [blocks] rows that are there
  int32_t* done0;        // [blocks, then the shared expert's] tiles of pass 0
  int32_t* done1;        // the same of pass 1
  int32_t* expert_done;  // [experts + 1] tiles of pass 0
  int32_t* sums;         // [blocks] warps that have written prob's parts
};

struct MoveArguments {
  const void* tokens[2];  // bf16 [T, H]
  void* rows[2];          // bf16 [R, H]
  int32_t sources;
  int32_t choices;
  int32_t pieces;  // of 16 bytes, of a row
  const int32_t* slot_R;
};

struct DirectionParameters {
  PassParameters pass[2 * kMaxPasses];  // routed, then the shared expert's
  Plan plan;
  Counters counters;
  MoveArguments move;
  CombineArguments combine;
  const float* parts;  // [R, parts_per_row], or null
  int32_t parts_per_row;
  Fault* fault;
};

template <class DIRECTION, class TILING, int SLOT_BYTES, bool READS>
struct Direction {
  using Tiling = TILING;
  using Storage = sm90::Storage<TILING, SLOT_BYTES>;
  using Parameters = DirectionParameters;
  static constexpr bool kReads = READS, kAnnounces = true;
  static_assert(sizeof(Storage) <= kMaxShared, "shared memory");

  struct Tickets {
    const Parameters& p;
    int segment = 0;
    __device__ __forceinline__ int count() const { return p.plan.count(); }
    __device__ __forceinline__ int take() {
      return static_cast<int>(atomicAdd(p.counters.tickets, 1u));
    }
    __device__ __forceinline__ Tile at(int ticket) { return p.plan.at(ticket, segment); }
    __device__ __forceinline__ void leave() {}
  };

  static __device__ __forceinline__ bool is_shared(const Parameters& p, const Tile& tile) {
    return tile.expert == p.plan.shape.experts;
  }
  // Of a tile with products: 0 to passes - 1.
  static __device__ __forceinline__ int kind(const Parameters& p, const Tile& tile) {
    const int passes = p.plan.shape.passes;
    return tile.pass < passes ? tile.pass : tile.pass - passes - 1;
  }
  static __device__ __forceinline__ int block(const Parameters& p, const Tile& tile) {
    const int inside = tile.row / kRowTile;
    return is_shared(p, tile) ? p.plan.shape.capacity / kRowTile + inside : inside;
  }

  template <class F>
  static __device__ __forceinline__ void with_pass(const Parameters& p, const Tile& tile, F&& f) {
    const int which = kind(p, tile);
    const int index = is_shared(p, tile) ? p.plan.shape.passes + which : which;
    DIRECTION::with_kind(which, p.pass[index], f);
  }

  static __device__ __forceinline__ void check(const Parameters& p) {
    for (int i = 0; i < 2 * p.plan.shape.passes; ++i) check_table(p.pass[i], p.fault);
  }

  static __device__ __forceinline__ Input input(const Parameters& p, const Tile& tile) {
    const PlanShape& s = p.plan.shape;
    const bool shared = is_shared(p, tile);
    const int tiles = (shared ? s.shared : s.routed)[0].n_tiles, which = kind(p, tile);
    if (which == 0) {
      if (shared) return {};
      return {p.counters.ready + block(p, tile), tile.rows, Tag::kLoadRows};
    }
    if (which == 1) return {p.counters.done0 + block(p, tile), tiles, Tag::kLoadBlock};
    const int blocks =
        shared ? s.shared_blocks() : (s.start[tile.expert + 1] - s.start[tile.expert]) / kRowTile;
    return {p.counters.expert_done + tile.expert, blocks * tiles, Tag::kLoadExpert};
  }

  static __device__ __forceinline__ void announce(const Parameters& p, const Tile& tile) {
    const int which = kind(p, tile);
    if (which > 1) return;
    add_release((which == 0 ? p.counters.done0 : p.counters.done1) + block(p, tile), 1);
    if (which == 0 && p.plan.shape.passes > 2) {
      add_release(p.counters.expert_done + tile.expert, 1);
    }
  }

  static __device__ __forceinline__ void after(const Parameters& p, const Tile& tile, int lane) {
    if (p.parts == nullptr || kind(p, tile) != 0 || is_shared(p, tile)) return;
    __syncwarp();
    if (lane == 0) add_release(p.counters.sums + block(p, tile), 1);
  }

  // ---- moves: a warp takes a few rows at a time, in schedule order

  // A ticket's rows are on their way to L2 while those of the ticket before are copied.
  static __device__ __forceinline__ void side_work(const Parameters& p) {
    const int end = move_tickets(p);
    int ticket = take_move(p), token = token_of(p, ticket, end);
    while (ticket < end) {
      const int next = take_move(p), next_token = token_of(p, next, end);
      prefetch_rows(p, next_token);
      move_rows(p, ticket * kMoveRows, token);
      ticket = next;
      token = next_token;
    }
  }

  static __device__ __forceinline__ int move_tickets(const Parameters& p) {
    const PlanShape& s = p.plan.shape;
    return s.start[s.experts] / kMoveRows;
  }
  static __device__ __forceinline__ int take_move(const Parameters& p) {
    int ticket = 0;
    if (threadIdx.x % 32 == 0) ticket = static_cast<int>(atomicAdd(p.counters.tickets + 1, 1u));
    return __shfl_sync(~0u, ticket, 0);
  }

  // In lanes below kMoveRows: the token of the ticket's row; -1: padding.
  static __device__ __forceinline__ int token_of(const Parameters& p, int ticket, int end) {
    const int lane = threadIdx.x % 32;
    if (ticket >= end || lane >= kMoveRows) return -1;
    const int slot = p.move.slot_R[ticket * kMoveRows + lane];
    return slot < 0 ? -1 : slot / p.move.choices;
  }

  static __device__ __forceinline__ void prefetch_rows(const Parameters& p, int token) {
    for (int i = 0; i < kMoveRows; ++i) {
      const int from = __shfl_sync(~0u, token, i);
      if (from < 0) continue;
      for (int j = 0; j < p.move.sources; ++j) {
        const uint4* const row = static_cast<const uint4*>(p.move.tokens[j]) +
                                 static_cast<int64_t>(from) * p.move.pieces;
        for (int piece = threadIdx.x % 32 * 8; piece < p.move.pieces; piece += 32 * 8) {
          prefetch_l2(row + piece);
        }
      }
    }
  }

  static __device__ __forceinline__ void move_rows(const Parameters& p, int first, int token) {
    for (int i = 0; i < kMoveRows; ++i) {
      const int from = __shfl_sync(~0u, token, i);
      if (from < 0) continue;
      for (int j = 0; j < p.move.sources; ++j) {
        copy_row(p.move.tokens[j], from, p.move.rows[j], first + i, p.move.pieces);
      }
    }
    const int valid = __popc(__ballot_sync(~0u, token >= 0));
    fence_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0 && valid > 0) {
      add_release(p.counters.ready + first / kRowTile, valid);
    }
  }

  static __device__ __forceinline__ void copy_row(const void* tokens, int token, void* rows,
                                                  int row, int pieces) {
    constexpr int kUnder = 4;  // loads under way: more do not fit the registers
    const int lane = threadIdx.x % 32;
    const uint4* from = static_cast<const uint4*>(tokens) + static_cast<int64_t>(token) * pieces;
    uint4* to = static_cast<uint4*>(rows) + static_cast<int64_t>(row) * pieces;
    for (int left = pieces - lane; left > 0; left -= 32 * kUnder) {
      uint4 value[kUnder];
#pragma unroll
      for (int i = 0; i < kUnder; ++i) {
        if (32 * i < left) value[i] = __ldg(from + lane + 32 * i);
      }
#pragma unroll
      for (int i = 0; i < kUnder; ++i) {
        if (32 * i < left) to[lane + 32 * i] = value[i];
      }
      from += 32 * kUnder;
      to += 32 * kUnder;
    }
  }

  // ---- combine: a warp a token

  static __device__ __forceinline__ void no_product(const Parameters& p, const Tile& tile) {
    const int warp = threadIdx.x / 32 % 4;
    for (int i = warp; i < kCombineTokens; i += 4) {
      const int token = tile.m * kCombineTokens + i;
      if (token < p.combine.tokens) combine_when_ready(p, token);
    }
  }

  static __device__ __forceinline__ void combine_when_ready(const Parameters& p, int token) {
    const PlanShape& s = p.plan.shape;
    const CombineArguments& c = p.combine;
    const int64_t slots = static_cast<int64_t>(token) * c.choices;
    for (int k = threadIdx.x % 32; k < c.choices; k += 32) {
      const int row = c.row_TK[slots + k];
      if (row < 0) continue;
      const int at = row / kRowTile;
      wait_count(p.counters.done1 + at, s.routed[1].n_tiles, p.fault, Tag::kCombineRows);
      if (p.parts != nullptr) {
        const int warps = kPassWarps * s.routed[0].n_tiles;
        wait_count(p.counters.sums + at, warps, p.fault, Tag::kCombineSums);
      }
    }
    if (c.shared != nullptr && threadIdx.x % 32 == 0) {
      const int at = s.capacity / kRowTile + token / kRowTile;
      wait_count(p.counters.done1 + at, s.shared[1].n_tiles, p.fault, Tag::kCombineRows);
    }
    __syncwarp();
    combine_token(c, token, threadIdx.x % 32);
    if (p.parts != nullptr) add_parts(p, token);
  }

  // A slot's parts in ascending column order: the order depends on F alone.
  static __device__ __forceinline__ void add_parts(const Parameters& p, int token) {
    const CombineArguments& c = p.combine;
    const bool faulty = *c.faulty != 0;
    for (int k = threadIdx.x % 32; k < c.choices; k += 32) {
      const int64_t slot = static_cast<int64_t>(token) * c.choices + k;
      const int row = c.row_TK[slot];
      float sum = 0.0f;
      if (row >= 0) {
        const float2* const pairs =
            reinterpret_cast<const float2*>(p.parts + static_cast<int64_t>(row) * p.parts_per_row);
#pragma unroll 8
        for (int i = 0; i < p.parts_per_row / 2; ++i) {  // F is a multiple of 64
          const float2 pair = load_written(pairs + i);
          sum += pair.x;
          sum += pair.y;
        }
      }
      c.d_prob_TK[slot] = faulty ? __int_as_float(0x7fffffff) : sum;
    }
  }
};

}  // namespace mok::sm90
