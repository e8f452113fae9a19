// The product pipeline: tickets -> tile queue -> TMA -> shared stages -> wgmma. The same for all
// passes.
//
// What is accumulated: one fp32 sum an element, K steps of 16 in ascending order, whatever the
// tiling. A stage is 128 rows or columns of A, then those of B (gate, then up). Loads reach past
// the problem where a tile does: zeros, or a neighbour's values, whose products are never stored.
// In a weight gradient K runs over an expert's rows: the rows past its end, which may hold
// anything, are zeroed in shared memory before the last products.
//
// Few large copies, not many small ones: boxes of 4 KB cost up to a quarter of the rate.
//
// Parities. Every barrier is used in a fixed cycle of slots, and each side counts its own uses with
// a Ring: use u of a slot has phase u & 1 in the ring of both sides, because both advance once for
// each K step of each tile, in ticket order (a warpgroup that skips the other's tile advances by
// its depth).
//
// - stage_full completes phase u when load's expect_tx and its bytes are in. multiply waits for
//   phase u. It cannot be two phases behind: use u + 1 is loaded only after stage_empty's phase u.
// - stage_empty completes phase u when all warps that read the stage have arrived, once each. load
//   waits for phase u - 1 before use u, parity (u & 1) ^ 1, which an unused barrier satisfies.
//   After the last product the stages are those of the tiles without products.
// - tile_full and tile_empty: the same pair around a slot of the tile queue, with one arrival of
//   load and one of each reading warp.
// - products_turn[w] completes phase c when the four warps of the other warpgroup have
//   issued the products of their tile. Warpgroup 1 waits for phase c before its tile c; warpgroup 0
//   for phase c - 1, as on an empty barrier. One is at most one phase ahead, because each waits for
//   the other in between. It also carries the argument for stage_full across the turns: who waits
//   for use u of a slot has seen the other warpgroup consume use u - 1, so phase u - 1 is over.
#pragma once

#include "tiling.cuh"

namespace mok::sm90 {

enum class Product {
  kForward,         // a [R, K] · W [N, K]^T: both operands K-major
  kInputGradient,   // a [R, K] · W [K, N]: B is MN-major
  kWeightGradient,  // a [R, M]^T · b [R, N]: both are MN-major, K is the rows
};

template <Product P>
constexpr bool kOverRows = P == Product::kWeightGradient;

// A kernel K has Tiling, Storage, Parameters with `fault`, and tells the roles apart by
//   Tickets                 tickets -> tiles, and where they are counted: start() gives their
//   number;
//                           find() is called until it says that the tile is there, and then for
//                           the next ticket; leave() ends it
//   with_pass(p, tile, f)   f(G{}, parameters of the tile's pass G)
//   input(p, tile)          load: the count that says that what the tile reads has been written
//   announce(p, tile)       store: what the tile writes is in memory
//   kReads, kAnnounces      has passes that read old values; other CTAs wait for tiles
//   kLaps                   has a plan's laps; then fetch_waits(p, tile) says whether fetch waits
//                           for the input too
// and a pass G its product, whether a tile holds gate and up of a column, and its Epilogue.

// What a pass needs; what one does not use stays empty.
struct PassParameters {
  CUtensorMap a, b;          // b: the second operand of a weight gradient, or where fetch reads
  CUtensorMap out, second;   // boxes that leave
  const CUtensorMap* table;  // one map an expert: its weight, or its gradient
  TableHeader header;        // what the table must say
  int32_t first_expert;      // the table's first map is of that expert
  int32_t experts;           // maps
  int32_t columns;           // N; F where a tile holds gate and up
  int32_t output_rows;       // M of a weight gradient
  __nv_bfloat16 *out_rows, *second_rows;
  const float* prob;  // null: 1
  float* parts;       // null: not wanted

  __device__ __forceinline__ const CUtensorMap* map(const Tile& tile) const {
    return table + (tile.expert - first_expert);
  }
};

struct Input {  // of a tile: a count between CTAs to wait for; no word, no wait
  const int32_t* word = nullptr;
  int32_t count = 0;
  Tag tag = Tag::kNone;
};

// The table says what its maps describe; a wrong one would load boxes that nobody waits for.
__device__ __forceinline__ void check_table(const PassParameters& p, Fault* fault) {
  if (p.table == nullptr) return;
  const TableHeader& h = *reinterpret_cast<const TableHeader*>(p.table + p.experts);
  const TableHeader& wanted = p.header;
  if (h.magic != wanted.magic || h.rows != wanted.rows || h.columns != wanted.columns ||
      h.fp32 != wanted.fp32 || h.box_rows != wanted.box_rows || h.box_blocks != wanted.box_blocks) {
    fail(fault, Tag::kWrongTable, h.rows);
  }
}

// The tile queue's reading end. A whole warp reads, or one thread of it. A tile is read where it
// lies, to spare registers, and so stays in its slot until its reader is through with it.
template <class K, bool WHOLE_WARP>
struct TileReader {
  typename K::Storage& storage;
  Fault* fault;
  Ring<kTileSlots> ring{};

  __device__ __forceinline__ bool ready() const {
    return completed(storage.tile_full[ring.slot()], ring.phase());
  }

  __device__ __forceinline__ const Tile& front() const {
    wait(storage.tile_full[ring.slot()], ring.phase(), fault, Tag::kNextTile);
    return storage.tile[ring.slot()];
  }
  __device__ __forceinline__ void release(int slot) const {
    if constexpr (WHOLE_WARP) {
      __syncwarp();
      arrive_of_warp(storage.tile_empty[slot]);
    } else {
      arrive(storage.tile_empty[slot]);
    }
  }
  __device__ __forceinline__ void pop() {
    release(ring.slot());
    ring.advance();
  }
  __device__ __forceinline__ const Tile& next() {
    pop();
    return front();
  }
};

// Valid rows, 0 to 64, of a slab of a tile's output.
template <class G>
__device__ __forceinline__ int slab_rows(const PassParameters& p, const Tile& tile, int slab) {
  const int rows = kOverRows<G::kProduct> ? p.output_rows - tile.m * BLOCK_M : tile.rows;
  return min(max(rows - slab * kSlab, 0), kSlab);
}

// ---- load: one thread

// One operand of a tile, box by box.
struct Operand {
  const CUtensorMap* map;
  int row, block;    // of the next box
  int rows, blocks;  // from one box to the next
};

struct Operands {
  Operand a, b;
  int second;  // rows from gate to up, where a tile holds both; else 0

  template <class K, class G>
  static __device__ __forceinline__ Operands of(const PassParameters& q, const Tile& tile) {
    using T = typename K::Tiling;
    constexpr int kHalf = T::BLOCK_N / (G::kGated ? 2 : 1);
    const int column = tile.n * kHalf;
    if constexpr (kOverRows<G::kProduct>) {
      return {{&q.a, tile.row, tile.m * (BLOCK_M / 64), BLOCK_K, 0},
              {&q.b, tile.row, column / 64, BLOCK_K, 0},
              0};
    } else if constexpr (G::kProduct == Product::kInputGradient) {
      return {{&q.a, tile.row, 0, 0, 1}, {q.map(tile), 0, column / 64, BLOCK_K, 0}, 0};
    } else {
      return {{&q.a, tile.row, 0, 0, 1}, {q.map(tile), column, 0, 0, 1}, G::kGated ? q.columns : 0};
    }
  }
};

template <class K>
struct Loader {
  using T = typename K::Tiling;

  // How far the tile after the one that is being loaded has come. A step is taken with each of the
  // last K steps, while the ring of stages is full, so that its latency is not one between tiles.
  enum Phase : int {
    kTake,   // take its ticket
    kFind,   // find what the ticket says
    kOpen,   // publish it
    kInput,  // see that what it reads is there
    kReady,
  };
  static constexpr int kSteps = 6;  // usually until kReady

  const typename K::Parameters& p;
  typename K::Storage& storage;
  Ring<T::kStages> stage_ring{};

  __device__ __forceinline__ void run() {
    K::check(p);
    storage.ahead = {K::Tickets::start(p, storage), kTake, 0, -1, -1, {}, 0};
    for (;;) {
      const Tile& tile = storage.tile[storage.ahead.ring.slot()];
      finish(tile);
      storage.ahead.phase = kTake;
      storage.ahead.ring.advance();
      if (tile.last()) break;
      if (tile.depth > 0) load(tile);
    }
    K::Tickets::leave(p, storage);
  }

  __device__ __forceinline__ void finish(const Tile& next) {
    while (storage.ahead.phase < kInput) advance();
    if (storage.ahead.phase == kReady) return;
    const Input input = K::input(p, next);
    if (input.word == nullptr) return;
    const uint64_t began = global_nanoseconds();
    wait_count(input.word, input.count, p.fault, input.tag);
    if (input.tag == Tag::kLoadRows) storage.ahead.waited_ns += global_nanoseconds() - began;
    fence_async();
  }

  __device__ __forceinline__ void advance() {
    LookAhead& at = storage.ahead;
    const int slot = at.ring.slot();
    Tile& next = storage.tile[slot];
    if (at.phase == kTake) {
      at.ticket = K::Tickets::take(p);
      at.phase = kFind;
    } else if (at.phase == kFind) {
      Tile tile = no_tile();
      if (at.ticket < at.end) {
        if (!K::Tickets::find(p, storage, at.ticket, tile)) return;
        if (tile.fault) fail(p.fault, Tag::kRowsOutOfRange, tile.expert);
        if (tile.nothing()) {
          at.phase = kTake;
          return;
        }
      }
      wait(storage.tile_empty[slot], at.ring.phase() ^ 1, p.fault, Tag::kLoadTileSlot);
      next = tile;
      at.phase = kOpen;
    } else if (at.phase == kOpen) {
      const bool product = next.depth > 0;
      if (product && (next.expert != at.expert || next.pass != at.pass)) {
        at.expert = next.expert;
        at.pass = next.pass;
        K::with_pass(
            p, next, [&](auto, const PassParameters& q) { acquire_tensor_map(q.map(next)); });
      }
      arrive(storage.tile_full[slot]);  // fetch and store read the map from here on
      at.phase = product ? kInput : kReady;
    } else if (at.phase == kInput) {
      const Input input = K::input(p, next);
      if (input.word != nullptr) {
        if (load_acquire(input.word) < input.count) return;
        fence_async();
      }
      at.phase = kReady;
    }
  }

  __device__ __forceinline__ void load(const Tile& tile) {
    Operands from;
    K::with_pass(p, tile, [&](auto g, const PassParameters& q) {
      from = Operands::of<K, decltype(g)>(q, tile);
    });
    for (int left = tile.depth; left > 0; --left) {
      if (left <= T::kStages + kSteps) advance();
      const int slot = stage_ring.slot();
      wait(storage.stage_empty[slot], stage_ring.phase() ^ 1, p.fault, Tag::kLoadStage);
      uint64_t& full = storage.stage_full[slot];
      arrive_expect(full, T::kStageBytes);
      const uint32_t a = shared_address(storage.stage[slot]), b = a + BLOCK_M * BLOCK_K * 2;
      bring(from.a, a, full);
      if (from.second > 0) {  // boxes are half as large
        load_operand(b + T::BLOCK_N / 2 * BLOCK_K * 2,
                     from.b.map,
                     full,
                     from.b.row + from.second,
                     from.b.block);
      }
      bring(from.b, b, full);
      stage_ring.advance();
    }
  }

  static __device__ __forceinline__ void bring(Operand& from, uint32_t to, uint64_t& full) {
    load_operand(to, from.map, full, from.row, from.block);
    from.row += from.rows;
    from.block += from.blocks;
  }
};

// ---- multiply: a warpgroup

template <class K>
struct Multiplier {
  using T = typename K::Tiling;
  using Accumulators = float[T::kSlabs][T::kAccumulators];

  typename K::Storage& storage;
  Fault* fault;
  const int warpgroup;  // 0 or 1 of the two that multiply
  const int lane;
  Ring<T::kStages> ring{};

  __device__ __forceinline__ void skip(const Tile& tile) { ring.advance(tile.depth); }

  // `turn`: how many tiles this warpgroup has had before, modulo 2.
  __device__ __forceinline__ void await_turn(int turn) {
    wait(storage.products_turn[warpgroup], turn ^ warpgroup ^ 1, fault, Tag::kMultiplyTurn);
  }
  __device__ __forceinline__ void pass_turn() {
    arrive_of_warp(storage.products_turn[warpgroup ^ 1]);
  }

  // The tile's products into the accumulators. They are complete on return.
  template <class G>
  __device__ __forceinline__ void run(const PassParameters& p, const Tile& tile, int turn,
                                      Accumulators& d) {
    clear(d);
    await_turn(turn);
    if (T::BLOCK_N > 128 && !G::kGated && p.columns - tile.n * T::BLOCK_N <= 128) {
      products<G, 2, 128>(tile, d);
    } else if (!kOverRows<G::kProduct> && slab_rows<G>(p, tile, 1) == 0) {
      products<G, 1, T::BLOCK_N>(tile, d);
    } else {
      products<G, 2, T::BLOCK_N>(tile, d);
    }
  }

  // The epilogue moves the accumulators: ptxas must see that nothing of them lives on, or it keeps
  // them twice.
  static __device__ __forceinline__ void clear(Accumulators& d) {
#pragma unroll
    for (int i = 0; i < T::kSlabs; ++i) {
#pragma unroll
      for (int j = 0; j < T::kAccumulators; ++j) d[i][j] = 0.0f;
      pin(d[i]);
    }
  }

  // SLABS x COLUMNS: the part of the tile that holds anything.
  template <class G, int SLABS, int COLUMNS>
  __device__ __forceinline__ void products(const Tile& tile, Accumulators& d) {
    constexpr bool kMnA = kOverRows<G::kProduct>, kMnB = G::kProduct != Product::kForward;
    const int depth = tile.depth, rows = tile.rows;
    int before = ring.slot();
    for (int step = 0; step < depth; ++step) {
      const int slot = await<G>(rows - step * BLOCK_K);
      const uint32_t a = shared_address(storage.stage[slot]);
      const uint64_t a_at = describe_operand<kMnA>(a);
      const uint64_t b_at = describe_operand<kMnB>(a + BLOCK_M / 64 * kBoxBytes);
      products_fence();
#pragma unroll
      for (int k = 0; k < BLOCK_K / 16; ++k) {
#pragma unroll
        for (int i = 0; i < SLABS; ++i) {
          multiply_add<COLUMNS, kMnA, kMnB>(
              d[i], a_at + k * kNextK16<kMnA> + i * (kBoxBytes >> 4), b_at + k * kNextK16<kMnB>, 1);
        }
      }
      products_commit();
      if (step > 0) {
        products_wait<1>();
        release(before);
      }
      before = slot;
    }
    pass_turn();
    products_wait<0>();
#pragma unroll
    for (int i = 0; i < SLABS; ++i) pin(d[i]);
    release(before);
  }

  // Waits for the next stage and, where the expert's rows end inside it, zeroes the rest.
  template <class G>
  __device__ __forceinline__ int await(int valid) {
    const int slot = ring.slot();
    wait(storage.stage_full[slot], ring.phase(), fault, Tag::kMultiplyStage);
    ring.advance();
    if constexpr (kOverRows<G::kProduct>) {
      if (valid < BLOCK_K) zero_rows(storage.stage[slot], valid);
    }
    return slot;
  }

  __device__ __forceinline__ void release(int slot) { arrive_of_warp(storage.stage_empty[slot]); }

  // Rows from `valid` on, of every box. All threads that read the stage take part.
  __device__ __forceinline__ void zero_rows(const uint8_t* stage, int valid) {
    constexpr int kGroupThreads = 32 * T::kReaders;
    const uint32_t from = shared_address(stage) + valid * 128;
    const int pieces = (BLOCK_K - valid) * 128 / 16;
    for (int box = 0; box < T::kStageBytes / kBoxBytes; ++box) {
      for (int i = threadIdx.x % kGroupThreads; i < pieces; i += kGroupThreads) {
        zero_shared_16(from + box * kBoxBytes + i * 16);
      }
    }
    fence_async_shared();
    named_sync(NamedBarrier::kZeroed, warpgroup, kGroupThreads);
  }
};

}  // namespace mok::sm90
