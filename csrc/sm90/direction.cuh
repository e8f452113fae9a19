// One direction of the layer as one persistent kernel: moves, passes and combine of a plan
// (device/plan.cuh), in one grid.
//
// Who may touch what:
//   move         reads tokens, of all ranks, writes routed row buffers, raises ready[block], or
//                expert_rows for what only the last weight gradient reads; then waits for done1 and
//                sums of rows that go home, writes them there and signals their arrival; before a
//                later lap it waits for lap_done
//   load         waits for ready (pass 0), done0 (pass 1), expert_done or expert_rows (weight
//                gradients)
//   fetch        of a later lap, waits like load for what a pass before it has computed again
//   store        writes a pass's output, then raises done0 or done1 of its block, and, behind pass
//                0, expert_done and expert_rows; behind a weight gradient, lap_done
//   multiply     writes the sums itself and raises sums[block]; in a combine tile waits for done1
//                (and sums) and for arrivals, reads the rows through the stages and writes tokens
// Counters only grow within a call, from the zero that plan_work writes before the grid starts. A
// wait's cause is a move or a tile of an earlier ticket, or an arrival from a rank that runs; rows
// of the first lap are brought without a wait, and no product waits for rows that go home but those
// of later laps, whose tickets are later; so the smallest unfinished ticket can always go on,
// whatever set of CTAs runs.
//
// At the end of a CTA one warp waits for move and multiply, and adds what they have counted to the
// grid's; the last CTA judges it (device/census.cuh).
//
// A reader whose copies go through the async proxy fences after its acquire; store waits until its
// copies have arrived, not only left shared memory, before it raises a counter.
//
// Push or pull: tokens are pulled row block by row block by who computes on them, in the order in
// which its tiles need them, so that `ready` is a counter of the own GPU and no sender has to know
// the receiver's order. Results are pushed by who has them as soon as their block is done: a read
// would wait for them over the wire first. Combine finds them at home, as it does those of one
// rank, which lie where the last product left them. Several ranks take turns (Turns, plan.cuh).
#pragma once

#include "direction_parameters.cuh"

namespace mok::sm90 {

constexpr int kCombineTokens = 8;  // of one combine tile
constexpr int kPassWarps = 4;      // that raise sums for a tile
constexpr int kMultiplyWarps = 8;  // of a CTA

struct MoveLap {  // that a mover is in
  int32_t number;
  int32_t row;     // its first
  int32_t ticket;  // its first
  MoveOrder order;
};

template <class DIRECTION, class TILING, int SLOT_BYTES, bool READS, bool RANKS>
struct Direction {
  using Tiling = TILING;
  struct Storage : sm90::Storage<TILING, SLOT_BYTES> {
    MoveStorage move;
    int32_t move_expert[3];  // of the last ticket of each source, and of rows that go home
    MoveLap lap;
    PlanWalker walker;
    uint32_t counted[kCounts];
    uint64_t all_counted;              // phase 0: by multiply's warps and move
    uint64_t home_ns[kMultiplyWarps];  // that combine has waited
    CombineStorage combine[kMultiplyWarps];
  };
  using Parameters = DirectionParameters;
  static constexpr bool kReads = READS, kAnnounces = true, kLaps = RANKS;
  static_assert(sizeof(Storage) <= kMaxShared, "shared memory");
  static_assert(kMultiplyWarps * kCombineSlots * kCombineBytes <= sizeof(Storage::stage),
                "rows that are combined lie in the stages");

  struct Tickets {
    static __device__ __forceinline__ int start(const Parameters& p, Storage& storage) {
      storage.walker = {};
      return p.plan.count();
    }
    static __device__ __forceinline__ int take(const Parameters& p) {
      return take_ticket(p.counters.tickets);
    }
    static __device__ __forceinline__ bool find(const Parameters& p, Storage& storage, int ticket,
                                                Tile& tile) {
      return storage.walker.find(p.plan, ticket, tile);
    }
    static __device__ __forceinline__ void leave(const Parameters& p, const Storage& storage) {
      if constexpr (RANKS) {
        add_wait(p.exchange.peers, kWaitRows, storage.ahead.waited_ns / gridDim.x);
      }
    }
  };

  static __device__ __forceinline__ bool is_shared(const Parameters& p, const Tile& tile) {
    return tile.expert == p.plan.shape.experts;
  }
  // Of a tile with products: 0 to passes - 1, or passes of what is done again.
  static __device__ __forceinline__ int kind(const Parameters& p, const Tile& tile) {
    const int passes = p.plan.shape.passes;
    return tile.pass < passes ? tile.pass : tile.pass - passes - 1;
  }
  static __device__ __forceinline__ bool is_again(const Parameters& p, const Tile& tile) {
    return RANKS && tile.pass == pass_again(p.plan.shape);
  }
  static __device__ __forceinline__ int block(const Parameters& p, const Tile& tile) {
    const int inside = (tile.row + (RANKS ? tile.base : 0)) / kRowTile;
    return is_shared(p, tile) ? p.plan.shape.blocks() + inside : inside;
  }
  static __device__ __forceinline__ bool several_laps(const Parameters& p) {
    return RANKS && *p.plan.lap_count > 1;
  }

  template <class F>
  static __device__ __forceinline__ void with_pass(const Parameters& p, const Tile& tile, F&& f) {
    const int which = kind(p, tile), passes = p.plan.shape.passes;
    const int index = is_shared(p, tile) || is_again(p, tile) ? passes + which : which;
    DIRECTION::with_kind(which, p.pass[index], f);
  }

  static __device__ __forceinline__ void set_up(Storage& storage) {
    prepare(storage.move);
    for (uint32_t& count : storage.counted) count = 0;
    for (uint64_t& waited : storage.home_ns) waited = 0;
    for (CombineStorage& warp : storage.combine) prepare(warp);
    barrier_init(storage.all_counted, kMultiplyWarps * kWarpArrivals + 1);
    for (int32_t& expert : storage.move_expert) expert = 0;
  }

  static __device__ __forceinline__ void check(const Parameters& p) {
    for (int i = 0; i <= 2 * p.plan.shape.passes; ++i) check_table(p.pass[i], p.fault);
  }

  static __device__ __forceinline__ Input input(const Parameters& p, const Tile& tile) {
    const PlanShape& s = p.plan.shape;
    const bool shared = is_shared(p, tile);
    const int tiles = (shared ? s.shared : s.routed)[0].n_tiles, which = kind(p, tile);
    if (which == 0 || is_again(p, tile)) {
      if (shared) return {};
      int rows = tile.rows;
      if (RANKS && tile.lap > 0) {  // of all sources; then, where it is done, gate and up again
        rows *= p.move.sources;
        if (which == 0) rows += s.again.n_tiles;
      }
      return {p.counters.ready + block(p, tile), rows, Tag::kLoadRows};
    }
    if (which == 1) return {p.counters.done0 + block(p, tile), tiles, Tag::kLoadBlock};
    const int done = tiles_of(tile.rows, kRowTile) * tiles;
    if (which == 2) return {p.counters.expert_done + tile.expert, done, Tag::kLoadExpert};
    const bool waits = !shared && !(RANKS && tile.lap > 0);
    return {p.counters.expert_rows + tile.expert, done + (waits ? tile.rows : 0), Tag::kLoadExpert};
  }

  // What fetch reads has been written in this grid.
  static __device__ __forceinline__ bool fetch_waits(const Parameters& p, const Tile& tile) {
    return RANKS && tile.lap > 0 && kind(p, tile) == 0;
  }

  static __device__ __forceinline__ void announce(const Parameters& p, const Tile& tile) {
    const int which = kind(p, tile);
    if (which > 1) {
      if (is_again(p, tile)) {
        add_release(p.counters.ready + block(p, tile), 1);
      } else if (!is_shared(p, tile) && several_laps(p)) {
        add_release(p.counters.lap_done + tile.lap, 1);
      }
      return;
    }
    add_release((which == 0 ? p.counters.done0 : p.counters.done1) + block(p, tile), 1);
    if (which == 0 && p.plan.shape.passes > 2) {
      add_release(p.counters.expert_done + tile.expert, 1);
      add_release(p.counters.expert_rows + tile.expert, 1);
    }
  }

  static __device__ __forceinline__ void after(const Parameters& p, const Tile& tile, int lane) {
    if (p.parts == nullptr || kind(p, tile) != 0 || is_shared(p, tile)) return;
    __syncwarp();
    if (lane == 0) add_release(p.counters.sums + block(p, tile), 1);
  }

  // ---- moves: one thread, a few rows at a time, in the plan's order

  static __device__ __forceinline__ void side_work(const Parameters& p, Storage& storage) {
    const bool one = threadIdx.x % 32 == 0;
    if (RANKS ? is_mover(p) : one) {
      Mover mover{storage.move, p.fault};
      int ticket = one ? take_move(p) : 0;
      if constexpr (RANKS) {
        fence_async();  // generic stores of other ranks, which gather has seen
        if (one) begin_lap(p, storage.lap, 0);
        __syncwarp();
        do {
          if (one) ticket = bring_rows(p, storage.lap.order, storage, mover, ticket);
          ticket = send_rows_home(p, storage, mover, ticket);
          if (one) begin_lap(p, storage.lap, storage.lap.number + 1);
          __syncwarp();
        } while (storage.lap.number < *p.plan.lap_count);
      } else {
        bring_rows(
            p, MoveOrder::of(p.plan.shape, p.move.sources, p.plan.lap, 0), storage, mover, ticket);
      }
    }
    if (one) arrive(storage.all_counted);
  }

  static __device__ __forceinline__ bool is_mover(const Parameters& p) {
    const int before = threadIdx.x % 32 == 0 ? take_ticket(p.counters.movers) : 0;
    return static_cast<uint32_t>(__shfl_sync(~0u, before, 0)) < p.exchange.movers;
  }

  static __device__ __forceinline__ void begin_lap(const Parameters& p, MoveLap& lap, int number) {
    lap.ticket = number == 0 ? 0 : lap.ticket + lap.order.count() + lap.order.pushes;
    lap.number = number;
    if (number == *p.plan.lap_count) return;
    lap.row = p.plan.lap[number].row;
    lap.order = MoveOrder::of(p.plan.shape, p.move.sources, p.plan.lap, number);
  }

  // A group of ROWS rows, of all rows, for a ticket's; the ticket's expert only grows.
  template <int ROWS>
  static __device__ __forceinline__ int group_of(const Parameters& p, int ticket, int32_t& expert) {
    const int32_t* const start = p.plan.shape.start;
    while (start[expert + 1] <= ticket * ROWS) ++expert;
    if constexpr (!RANKS) return ticket;
    const Peers& group = p.exchange.peers;
    const int first = start[expert] / ROWS, groups = start[expert + 1] / ROWS - first;
    return first + Turns::of(group.ranks, group.rank, kRowTile / ROWS).at(ticket - first, groups);
  }

  // The ring covers what a ticket's slots cost; the number of the next one is on its way meanwhile.
  // Returns the ticket in hand that is no longer one of a move of the lap.
  static __device__ __forceinline__ int bring_rows(const Parameters& p, const MoveOrder& order,
                                                   Storage& storage, Mover& mover, int ticket) {
    const int first = RANKS ? storage.lap.ticket : 0, end = first + order.count();
    const uint32_t before = mover.stored;
    uint32_t slots = 0;
    if (RANKS && ticket < end) {
      await_lap(p, storage.lap.number - 1);
    }
    while (ticket < end) {
      const int next = take_move(p);
      move(p, order.at(ticket - first), storage, mover, slots);
      ticket = next;
    }
    mover.settle();
    storage.counted[kMoved] += mover.stored - before;
    storage.counted[kMovedSlots] += slots;
    return ticket;
  }

  // The lap's buffers have been read for the last time.
  static __device__ __forceinline__ void await_lap(const Parameters& p, int lap) {
    if (lap < 0) return;
    wait_count(p.counters.lap_done + lap, p.plan.lap[lap].steps, p.fault, Tag::kMoveLap);
    fence_async();
  }

  static __device__ __forceinline__ int take_move(const Parameters& p) {
    return take_ticket(p.counters.tickets + 1);
  }

  // `moved`: the sum of slots.
  static __device__ __forceinline__ void move(const Parameters& p, const Move& what,
                                              Storage& storage, Mover& mover, uint32_t& moved) {
    int32_t& expert = storage.move_expert[what.source];
    const int row = RANKS ? storage.lap.row : 0, ticket = what.group + row / kMoveRows;
    const int group = RANKS || what.source == 1 ? group_of<kMoveRows>(p, ticket, expert) : ticket;
    int4 slots = __ldg(reinterpret_cast<const int4*>(p.move.slot_R) + group);
    const int first = group * kMoveRows, bytes = p.move.row_bytes;
    if constexpr (RANKS && kThrottledWire) carry_rows(p.exchange.peers, slots, bytes);
    const uint8_t* const tokens = static_cast<const uint8_t*>(p.move.tokens[what.source]);
    uint8_t* to =
        static_cast<uint8_t*>(p.move.rows[what.source]) + static_cast<int64_t>(first - row) * bytes;
    int valid = 0;
#pragma unroll 1
    for (int i = 0; i < kMoveRows; ++i, to += bytes) {
      const int slot = slots.x;
      slots = {slots.y, slots.z, slots.w, 0};
      if (slot < 0) continue;  // padding
      ++valid;
      moved += slot + 1;
      const uint8_t* const from =
          RANKS ? pulled(p, what.source, slot)
                : tokens + static_cast<int64_t>(slot / p.move.choices) * bytes;
      mover.copy(from, to, bytes);
    }
    if (valid == 0) return;
    if (what.source == 0 || (RANKS && storage.lap.number > 0)) {
      mover.signal(p.counters.ready + first / kRowTile, valid);
    } else if (!RANKS || second_is_read(p.plan.shape)) {
      mover.signal(p.counters.expert_rows + expert, valid);
    } else {
      mover.signal(p.counters.lap_done, valid);
    }
  }

  // ---- several ranks: rows come from all of them, and go home

  static __device__ __forceinline__ uint32_t epoch(const Parameters& p) {
    const Peers& group = p.exchange.peers;
    return part<Control>(group, group.rank, group.at.control)->epoch;
  }

  // A slot of all ranks' -> its token on its rank.
  static __device__ __forceinline__ const uint8_t* pulled(const Parameters& p, int source,
                                                          int slot) {
    const Peers& group = p.exchange.peers;
    const int rank = slot / group.slots, token = (slot - rank * group.slots) / p.move.choices;
    const int64_t at = p.exchange.pulled[source][epoch(p) % kGenerations];
    return part<uint8_t>(group, rank, at + static_cast<int64_t>(token) * p.move.row_bytes);
  }

  // The whole warp; tickets behind the lap's last pull, the first of them in lane 0's hands.
  // Returns the one that is no longer of the lap.
  static __device__ __forceinline__ int send_rows_home(const Parameters& p, Storage& storage,
                                                       Mover& mover, int ticket) {
    const uint32_t before = mover.stored;
    for (;;) {
      const bool one = threadIdx.x % 32 == 0;
      const MoveLap& lap = storage.lap;
      const int push = __shfl_sync(~0u, ticket, 0) - lap.ticket - lap.order.count();
      if (push >= lap.order.pushes) break;
      const int at = push + storage.lap.row / kPushRows;
      const int group = one ? group_of<kPushRows>(p, at, storage.move_expert[2]) : 0;
      send_home(p, __shfl_sync(~0u, group, 0) * kPushRows, storage.lap.row, mover);
      if (one) {
        if (several_laps(p)) add_release(p.counters.lap_done + storage.lap.number, 1);
        ticket = take_move(p);
      }
    }
    if (threadIdx.x % 32 == 0) storage.counted[kPushed] += mover.stored - before;
    __syncwarp();
    return ticket;
  }

  // A lane has a row in its charge, but lane 0 all copies. first: of all rows; base: what lies
  // first in the buffers. With laps the own tokens' rows go home too, before others take their
  // place.
  static __device__ __forceinline__ void send_home(const Parameters& p, int first, int base,
                                                   Mover& mover) {
    const Peers& group = p.exchange.peers;
    const int lane = threadIdx.x % 32, bytes = p.move.row_bytes, row = first + lane;
    const int slot = lane < kPushRows ? p.move.slot_R[row] : -1;
    const int rank = slot < 0 ? group.rank : slot / group.slots;
    const bool mine = slot >= 0 && (rank != group.rank || several_laps(p));
    uint32_t away = __ballot_sync(~0u, mine);
    if (away == 0) return;
    if (lane == 0) {
      await_block(p, first / kRowTile, Tag::kPushRows, Tag::kPushSums);
      fence_async();
    }
    __syncwarp();
    const int inside = slot - rank * group.slots;
    uint8_t* const space = group.base[rank];
    const auto to =
        reinterpret_cast<uint64_t>(space + group.at.home + static_cast<int64_t>(inside) * bytes);
    if constexpr (kThrottledWire) carry(group, group.rank, rank, bytes + sizeof(Arrival));
    const uint8_t* const from = p.exchange.pushed + static_cast<int64_t>(first - base) * bytes;
    const float sum = mine && p.parts != nullptr ? sum_of_parts(p, row - base) : 0.0f;
    for (; away != 0; away &= away - 1) {
      const int i = __ffs(away) - 1;
      auto* const there = reinterpret_cast<uint8_t*>(__shfl_sync(~0u, to, i));
      if (lane == 0) {
        mover.copy(from + static_cast<int64_t>(i) * bytes, there, bytes);
      }
    }
    if (lane == 0) mover.settle();
    __syncwarp();
    fence_system();
    if (mine) {
      send_arrival(reinterpret_cast<Arrival*>(space + group.at.arrived) + inside, epoch(p), sum);
    }
  }

  // The last product of a block, and prob's parts of its rows, are in memory.
  static __device__ __forceinline__ void await_block(const Parameters& p, int at, Tag rows,
                                                     Tag sums) {
    const PlanShape& s = p.plan.shape;
    wait_count(p.counters.done1 + at, s.routed[1].n_tiles, p.fault, rows);
    if (p.parts != nullptr) {
      wait_count(p.counters.sums + at, kPassWarps * s.routed[0].n_tiles, p.fault, sums);
    }
  }

  static __device__ __forceinline__ const Arrival* arrival(const Parameters& p, int64_t slot) {
    const Peers& group = p.exchange.peers;
    return part<Arrival>(group, group.rank, group.at.arrived) + slot;
  }

  // ---- combine: a warp takes two neighbouring tokens, and waits for the rows of both at once;
  // they come through the stages, which no product needs any more

  static constexpr int kWarpTokens = kCombineTokens / 4;
  static_assert(kRowTile % kWarpTokens == 0, "they share a block of the shared expert");

  static __device__ __forceinline__ void no_product(const Parameters& p, Storage& storage,
                                                    const Tile& tile) {
    const int first = tile.m * kCombineTokens + threadIdx.x / 32 % 4 * kWarpTokens;
    const int end = min(first + kWarpTokens, p.combine.tokens), lane = threadIdx.x % 32;
    if (first >= end) return;
    if constexpr (RANKS) {  // a refused call has nothing to wait for
      if (*p.combine.faulty != 0) {
        for (int token = first; token < end; ++token) spoil_token(p.combine, token, lane);
        return;
      }
    }
    clock_home(storage, false);
    const uint32_t summed = await_rows(p, first, end);  // of this lane: slots
    clock_home(storage, true);
    fence_async();  // lane 0 copies what all lanes have seen
    const uint8_t* home = nullptr;
    if constexpr (RANKS) {
      const Peers& group = p.exchange.peers;
      home = part<uint8_t>(group, group.rank, group.at.home);
    }
    const int warp = threadIdx.x / 32 % kMultiplyWarps;
    const uint32_t ring = shared_address(storage.stage) + warp * (kCombineSlots * kCombineBytes);
    Combiner<RANKS> rows{p.combine, home, storage.combine[warp], ring, p.fault, end, first};
    const uint32_t added = rows.run();  // of this lane: pieces
    for (int token = first; token < end && p.parts != nullptr; ++token) add_parts(p, token);
    add_of_warp(&storage.counted[kCombined], added);
    add_of_warp(&storage.counted[kCombinedSlots], summed);
  }

  // Of several ranks, a warp's time before a wait, or after it: nothing is kept in registers.
  static __device__ __forceinline__ void clock_home(Storage& storage, bool after) {
    if (!RANKS || threadIdx.x % 32 != 0) return;
    uint64_t& waited = storage.home_ns[threadIdx.x / 32 % kMultiplyWarps];
    waited = after ? waited + global_nanoseconds() : waited - global_nanoseconds();
  }

  // Until the tokens' rows are in memory. Returns the sum of this lane's slots that have one.
  static __device__ __forceinline__ uint32_t await_rows(const Parameters& p, int first, int end) {
    const PlanShape& s = p.plan.shape;
    const CombineArguments& c = p.combine;
    uint32_t summed = 0;
    const int64_t slots = static_cast<int64_t>(first) * c.choices;
    for (int k = threadIdx.x % 32; k < (end - first) * c.choices; k += 32) {
      const int row = c.row_TK[slots + k];
      if (row != -1) summed += slots + k + 1;
      if (RANKS && row == kElsewhere) {
        await_arrival(p.exchange.peers, arrival(p, slots + k), epoch(p), p.fault);
      }
      if (row < 0) continue;
      await_block(p, row / kRowTile, Tag::kCombineRows, Tag::kCombineSums);
    }
    if (c.shared != nullptr && threadIdx.x % 32 == 0) {
      const int at = s.blocks() + first / kRowTile;
      wait_count(p.counters.done1 + at, s.shared[1].n_tiles, p.fault, Tag::kCombineRows);
    }
    __syncwarp();
    return summed;
  }

  // ---- the end of a CTA, for its multiplying warps: one of them counts

  static __device__ __forceinline__ void end(const Parameters& p, Storage& storage) {
    __syncwarp();
    arrive_of_warp(storage.all_counted);
    if (threadIdx.x / 32 != 4) return;
    wait(storage.all_counted, 0, p.fault, Tag::kEndCounts);
    const CombineArguments& c = p.combine;
    const int lane = threadIdx.x % 32;
    if constexpr (RANKS) {
      if (lane < kMultiplyWarps) {
        const uint64_t all = static_cast<uint64_t>(kMultiplyWarps) * gridDim.x;
        add_wait(p.exchange.peers, kWaitHome, storage.home_ns[lane] / all);
      }
    }
    if (!leave(p.census.counted, storage.counted, lane)) return;
    if (*c.faulty != 0) return;
    const bool given_up = RANKS && abort_of(p.exchange.peers) != 0;
    if (conserved(p.census, p.exchange.peers, lane) && !given_up) return;
    for (int token = 0; token < c.tokens; ++token) spoil_token(c, token, lane);
  }

  // A row's parts in ascending column order: the order depends on F alone.
  static __device__ __forceinline__ float sum_of_parts(const Parameters& p, int row) {
    const float2* const pairs =
        reinterpret_cast<const float2*>(p.parts + static_cast<int64_t>(row) * p.parts_per_row);
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < p.parts_per_row / 2; ++i) {  // F is a multiple of 64
      const float2 pair = load_written(pairs + i);
      sum += pair.x;
      sum += pair.y;
    }
    return sum;
  }

  static __device__ __forceinline__ void add_parts(const Parameters& p, int token) {
    const CombineArguments& c = p.combine;
    const bool faulty = *c.faulty != 0;
    for (int k = threadIdx.x % 32; k < c.choices; k += 32) {
      const int64_t slot = static_cast<int64_t>(token) * c.choices + k;
      const int row = c.row_TK[slot];
      float sum = row >= 0 ? sum_of_parts(p, row) : 0.0f;
      if (RANKS && row == kElsewhere) sum = load_written(&arrival(p, slot)->d_prob);
      c.d_prob_TK[slot] = faulty ? __int_as_float(0x7fffffff) : sum;
    }
  }
};

}  // namespace mok::sm90
