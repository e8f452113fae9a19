// From accumulators to global memory, through a ring of units. A unit is kKinds boxes of 64 rows:
// one for most epilogues, gate, up and activation for the gradient of SwiGLU.
//
// A tile's output is a fixed sequence of units, the same for every role: for each of the two slabs
// of 64 rows, for each column unit. fetch brings old values into units that need them (only in
// kernels with a pass that reads), multiply fills a unit, store sends it. Units outside the problem
// pass through all hands empty. A slab with fewer than 64 valid rows is copied row by row, by
// store's lanes: padding is never written.
//
// Every output element is written exactly once, by one thread's value: no atomics, no order.
//
// Parities: unit number i of the whole sequence is use i / kUnitSlots of slot i % kUnitSlots, for
// all roles; a tile of a pass has kUnitsPerTile of that pass, which all know from the tile.
//
// - unit_drained completes phase u when the copy engine has read use u (store arrives). Who fills
//   use u waits for phase u - 1, parity (u & 1) ^ 1: fetch where the kernel reads, else multiply.
// - unit_ready (kernels that read): fetch arrives once for each use, with or without bytes;
//   multiply waits for phase u.
// - unit_filled: four warps arrive once for each use; store waits for phase u.
// - fill_turn[w] completes phase c when the four warps of the other warpgroup have filled all units
//   of their tile; waited for like products_turn. Without it a warpgroup that skips the other's
//   units could wait for a phase two behind the one it needs, whose parity is the same, and pass.
//   With it, who waits for use u has seen use u - 1 filled, which had itself waited for phase u - 2
//   of unit_drained and for phase u - 1 of unit_ready. It is waited for once more before the first
//   tile without products, which may use the stages.
//
// store lets kLag units be under way before it frees the oldest. Whoever waits for a slot waits for
// the unit kUnitSlots before it, which store has taken or will take: kLag < kUnitSlots.
//
// Where other CTAs wait for a tile, store announces it: once all its copies are complete, and
// before store waits for anything that may take long, so that no cycle of waits can close. It keeps
// the tile's slot of the queue until then: of the kTileSlots, store holds one announced late and
// one under way, the warpgroups one each.
#pragma once

#include "epilogue.cuh"

namespace mok::sm90 {

template <class G>
constexpr int kUnitsPerTile = 2 * G::Epilogue::kUnits;

template <class G>
__device__ __forceinline__ int first_output_row(const Tile& tile, int slab) {
  return (kOverRows<G::kProduct> ? tile.m * BLOCK_M : tile.row) + slab * kSlab;
}

// A warp copies the valid rows of a box.
template <int WIDTH>
__device__ __forceinline__ void copy_rows(uint32_t box, const Place& place, int first, int rows) {
  constexpr int kPieces = WIDTH / 8;  // of a row
  const int lane = lane_index();
  const int piece = lane % kPieces;
  __nv_bfloat16* const to = place.base + place.column + piece * 8;
  for (int r = lane / kPieces; r < rows; r += 32 / kPieces) {
    const int swizzle = WIDTH == 64 ? r & 7 : r >> 1 & 3;
    const uint4 v = load_shared_16(box + r * 2 * WIDTH + ((piece ^ swizzle) << 4));
    *reinterpret_cast<uint4*>(to + static_cast<int64_t>(first + r) * place.stride) = v;
  }
}

template <class K>
struct Filler {  // multiply's part
  typename K::Storage& storage;
  Fault* fault;
  const int warpgroup, warp, lane;  // warp: of four
  Ring<K::Storage::kUnitSlots> ring{};

  template <class G>
  __device__ __forceinline__ void skip() {
    ring.advance(kUnitsPerTile<G>);
  }

  __device__ __forceinline__ void await_turn(int turn) {
    wait(storage.fill_turn[warpgroup], turn ^ warpgroup ^ 1, fault, Tag::kFillTurn);
  }
  __device__ __forceinline__ void pass_turn() { arrive_of_warp(storage.fill_turn[warpgroup ^ 1]); }

  // Uses the accumulators up.
  template <class G, int COUNT>
  __device__ __forceinline__ void run(const PassParameters& p, const Tile& tile, int turn,
                                      float (&d)[2][COUNT]) {
    using E = typename G::Epilogue;
    static_assert(E::kUnits % E::kRound == 0, "a slab is whole rounds");
    await_turn(turn);
    int at = 0;  // of both slabs' units: one counter, to spare a register
#pragma unroll 1
    do {
#pragma unroll 1
      do {
        const int slab = at < E::kUnits ? 0 : 1, unit = at < E::kUnits ? at : at - E::kUnits;
#pragma unroll
        for (int part = 0; part < E::kRound; ++part) {
          fill<G>(p, tile, d[0], unit + part, part, slab);
          ring.advance();
        }
#pragma unroll
        for (int i = 0; i < COUNT - E::kShift; ++i) d[0][i] = d[0][i + E::kShift];
        at += E::kRound;
      } while (at != E::kUnits && at != 2 * E::kUnits);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) d[0][i] = d[1][i];
    } while (at == E::kUnits);
    pass_turn();
  }

  template <class G>
  __device__ __forceinline__ void fill(const PassParameters& p, const Tile& tile, const float* d,
                                       int unit, int part, int slab) {
    using E = typename G::Epilogue;
    const int rows = slab_rows<G>(p, tile, slab), first = first_output_row<G>(tile, slab);
    if constexpr (K::kReads) {
      wait(storage.unit_ready[ring.slot()], ring.phase(), fault, Tag::kMultiplyUnit);
    } else {
      wait(storage.unit_drained[ring.slot()], ring.phase() ^ 1, fault, Tag::kMultiplyUnit);
    }
    const uint32_t at = shared_address(storage.unit[ring.slot()]);
    float sums[2];  // over a row, of epilogues that have them
    if (rows > 0 && E::live(p, tile, unit)) {
      E::write(p, tile, d, part, at, warp, lane, first + warp * 16 + (lane >> 2), sums);
    }
    fence_async_shared();
    __syncwarp();
    arrive_of_warp(storage.unit_filled[ring.slot()]);
    // Not before: the fence would wait until these stores have arrived in memory.
    if constexpr (E::kSums) {
      if (rows > 0 && E::live(p, tile, unit)) {
        E::write_sums(p, tile, sums, unit, warp, lane, first, rows);
      }
    }
  }
};

template <class K>
__device__ __forceinline__ void fetch(const typename K::Parameters& p,
                                      typename K::Storage& storage) {
  TileReader<K, false> tiles{storage, p.fault};
  Ring<K::Storage::kUnitSlots> ring;
  for (;; tiles.pop()) {
    const Tile& tile = tiles.front();
    if (tile.last()) break;
    if (tile.depth == 0) continue;
    if constexpr (K::kLaps) {
      if (K::fetch_waits(p, tile)) {
        const Input input = K::input(p, tile);
        wait_count(input.word, input.count, p.fault, input.tag);
        fence_async();
      }
    }
    K::with_pass(p, tile, [&](auto g, const PassParameters& q) {
      using G = decltype(g);
      using E = typename G::Epilogue;
      for (int i = 0; i < kUnitsPerTile<G>; ++i, ring.advance()) {
        const int slab = i / E::kUnits, unit = i % E::kUnits;
        wait(storage.unit_drained[ring.slot()], ring.phase() ^ 1, p.fault, Tag::kFetchUnit);
        uint64_t& ready = storage.unit_ready[ring.slot()];
        if constexpr (E::kReads) {
          if (E::live(q, tile, unit) && slab_rows<G>(q, tile, slab) > 0) {
            E::bring(q,
                     tile,
                     unit,
                     shared_address(storage.unit[ring.slot()]),
                     first_output_row<G>(tile, slab),
                     ready);
            continue;
          }
        }
        arrive(ready);
      }
    });
  }
}

// initcheck does not see what a tensor map stores, so for it (scripts/sanitize.py) there is a build
// in which whole slabs of rows leave as partial ones do.
#ifdef MOK_SANITIZED
constexpr bool kBoxesLeave = false;
#else
constexpr bool kBoxesLeave = true;
#endif

template <class K>
struct Store {  // a warp; lane 0 has the copies of whole slabs
  static constexpr int kSlots = K::Storage::kUnitSlots;
  static constexpr int kFew = K::kReads && kSlots < 3 ? 0 : 1, kLag = kSlots < 8 ? kFew : 3;
  static_assert(kLag < kSlots, "multiply would wait for a unit that store holds");

  const typename K::Parameters& p;
  typename K::Storage& storage;
  TileReader<K, true> tiles;
  Ring<kSlots> ring{};
  int starting = kLag;  // units that are sent before the first is waited for
  bool owed = false;    // the tile before is sent and not announced yet

  static __device__ __forceinline__ bool leads() { return lane_index() == 0; }

  __device__ __forceinline__ void run() {
    for (;;) {
      if (owed && !__any_sync(~0u, tiles.ready())) settle<0>();
      const Tile& tile = tiles.front();
      if (tile.last()) break;
      if (tile.depth == 0) {
        if (owed) settle<0>();  // which knows its tile as the one before
        tiles.pop();
        continue;
      }
      K::with_pass(p, tile, [&](auto g, const PassParameters& q) { send<decltype(g)>(q, tile); });
      if constexpr (K::kAnnounces) {
        owed = true;
        tiles.ring.advance();
      } else {
        tiles.pop();
      }
    }
    if (owed) settle<0>();
    bulk_wait<0>();
  }

  template <int PENDING>
  __device__ __forceinline__ void settle() {
    bulk_wait<PENDING>();
    __syncwarp();  // rows that other lanes have copied
    const int slot = tiles.ring.before(1);
    if (leads()) K::announce(p, storage.tile[slot]);
    tiles.release(slot);
    owed = false;
  }

  template <class G>
  __device__ __forceinline__ void send(const PassParameters& q, const Tile& tile) {
    using E = typename G::Epilogue;
    for (int i = 0; i < kUnitsPerTile<G>; ++i, ring.advance()) {
      const int slab = i / E::kUnits, unit = i % E::kUnits;
      if (owed && !__any_sync(~0u, completed(storage.unit_filled[ring.slot()], ring.phase()))) {
        settle<0>();
      }
      wait(storage.unit_filled[ring.slot()], ring.phase(), p.fault, Tag::kStoreUnit);
      const uint32_t at = shared_address(storage.unit[ring.slot()]);
      const bool some = E::live(q, tile, unit) && E::leaves(tile, unit);
      const int rows = some ? slab_rows<G>(q, tile, slab) : 0;
      const int first = first_output_row<G>(tile, slab);
      if (rows == kSlab && (kBoxesLeave || kOverRows<G::kProduct>)) {
        if (leads()) E::send(q, tile, unit, at, first);
      } else if constexpr (!kOverRows<G::kProduct>) {
        for (int kind = 0; kind < E::kKinds && rows > 0; ++kind) {
          copy_rows<E::kWidth>(
              at + kind * (E::kUnitBytes / E::kKinds), E::place(q, tile, unit, kind), first, rows);
        }
      }
      bulk_commit();
      if (owed) settle<1>();
      __syncwarp();
      if (starting > 0) {
        --starting;
        continue;
      }
      bulk_wait_read<kLag>();
      arrive_of_warp(storage.unit_drained[ring.before(kLag)]);
    }
  }
};

}  // namespace mok::sm90
