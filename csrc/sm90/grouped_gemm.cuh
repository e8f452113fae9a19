// The persistent kernel around a kernel description K (mainloop.cuh): set-up, and who does what.
//
//   warp 0      load     one thread: tickets, waits for inputs, operand copies
//   warp 1      fetch    one thread, in kernels with a pass that reads
//   warp 2      store    whole warp: copies out, announcements
//   warp 3      move     one thread: brings rows (direction.cuh)
//   warps 4-11  multiply: two warpgroups, a tile each in turn, products and epilogue
//
// GroupedGemm is one pass over its own schedule: for tests and benchmarks of the parts, and for
// weight gradients that the backward kernel leaves out.
#pragma once

#include "units.cuh"

namespace mok::sm90 {

template <Product PRODUCT, bool GATED, class EPILOGUE>
struct Pass {
  static constexpr Product kProduct = PRODUCT;
  static constexpr bool kGated = GATED;
  using Epilogue = EPILOGUE;
};

template <class G, class TILING>
struct GroupedGemm {
  using Tiling = TILING;
  using Schedule = std::conditional_t<kOverRows<G::kProduct>, WeightTiles, RowTiles>;
  using Storage = sm90::Storage<TILING, G::Epilogue::kUnitBytes>;
  static constexpr bool kReads = G::Epilogue::kReads, kAnnounces = false, kLaps = false;
  static_assert(sizeof(Storage) <= kMaxShared, "shared memory");

  struct Parameters {
    PassParameters pass;
    Schedule schedule;
    uint32_t* tickets;
    Fault* fault;
  };

  struct Tickets {
    static __device__ __forceinline__ int start(const Parameters& p, Storage&) {
      return p.schedule.count();
    }
    static __device__ __forceinline__ int take(const Parameters& p) {
      return take_ticket(p.tickets);
    }
    static __device__ __forceinline__ bool find(const Parameters& p, Storage&, int ticket,
                                                Tile& tile) {
      tile = p.schedule.at(ticket);
      return true;
    }
    static __device__ __forceinline__ void leave(const Parameters& p, const Storage&) {
      if (atomicAdd(p.tickets + 1, 1u) == gridDim.x - 1) {  // all have taken a ticket too many
        p.tickets[0] = 0;
        p.tickets[1] = 0;
      }
    }
  };

  template <class F>
  static __device__ __forceinline__ void with_pass(const Parameters& p, const Tile&, F&& f) {
    f(G{}, p.pass);
  }
  static __device__ __forceinline__ void check(const Parameters& p) {
    check_table(p.pass, p.fault);
  }
  static __device__ __forceinline__ Input input(const Parameters&, const Tile&) { return {}; }
  static __device__ __forceinline__ void announce(const Parameters&, const Tile&) {}
  static __device__ __forceinline__ void set_up(Storage&) {}
  static __device__ __forceinline__ void side_work(const Parameters&, Storage&) {}
  static __device__ __forceinline__ void after(const Parameters&, const Tile&, int) {}
  static __device__ __forceinline__ void no_product(const Parameters&, Storage&, const Tile&) {}
  static __device__ __forceinline__ void end(const Parameters&, Storage&) {}
};

template <class K>
__device__ __forceinline__ void set_up(typename K::Storage& s) {
  using T = typename K::Tiling;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTileSlots; ++i) {
      barrier_init(s.tile_full[i], 1);
      // multiply's warps and store's; fetch
      barrier_init(s.tile_empty[i], (8 + 1) * kWarpArrivals + (K::kReads ? 1 : 0));
    }
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(s.stage_full[i], 1);
      barrier_init(s.stage_empty[i], T::kReaders * kWarpArrivals);
    }
    for (int i = 0; i < K::Storage::kUnitSlots; ++i) {
      barrier_init(s.unit_ready[i], 1);
      barrier_init(s.unit_filled[i], 4 * kWarpArrivals);
      barrier_init(s.unit_drained[i], kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(s.products_turn[i], 4 * kWarpArrivals);
      barrier_init(s.fill_turn[i], 4 * kWarpArrivals);
    }
    K::set_up(s);
    barrier_init_fence();
  }
  __syncthreads();
}

template <class K>
__device__ __forceinline__ void multiply(const typename K::Parameters& p,
                                         typename K::Storage& storage, int warpgroup) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  TileReader<K, true> tiles{storage, p.fault};
  Multiplier<K> products{storage, p.fault, warpgroup, lane};
  Filler<K> epilogue{storage, p.fault, warpgroup, warp, lane};
  typename Multiplier<K>::Accumulators d;  // one for all passes: two would not fit
  // Tiles go to the warpgroups in turn, and to a warpgroup in two turns, whose parities differ.
  static_assert(kTileSlots == 4, "the slot says whose tile it is, and in which turn");
  const auto mine = [&] { return tiles.ring.slot() % 2 == warpgroup; };
  const Tile* tile = &tiles.front();
  for (; !tile->last() && tile->depth > 0; tile = &tiles.next()) {
    K::with_pass(p, *tile, [&](auto g, const PassParameters& q) {
      using G = decltype(g);
      if (!mine()) {
        products.skip(*tile);
        epilogue.template skip<G>();
        return;
      }
      const int turn = tiles.ring.slot() / 2;
      products.template run<G>(q, *tile, turn, d);
      epilogue.template run<G>(q, *tile, turn, d);
      K::after(p, *tile, lane);
    });
  }
  // Tiles without products come last, and need no turns. They may use the stages, so no warp begins
  // one before all products of the CTA are over: those of the own warpgroup, which meets here, and
  // of the other. Who has the first such tile waits for the other's last one; who has the second
  // has itself had the last tile with products, and so waited for the one before.
  for (int i = 0; !tile->last(); tile = &tiles.next(), ++i) {
    if (!mine()) continue;
    if (i < 2) named_sync(NamedBarrier::kZeroed, warpgroup, 128);
    if (i == 0) epilogue.await_turn(tiles.ring.slot() / 2);
    K::no_product(p, storage, *tile);
  }
  K::end(p, storage);
}

template <class K>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const __grid_constant__ typename K::Parameters p) {
  using T = typename K::Tiling;
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<typename K::Storage*>(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  set_up<K>(storage);

  if (warp < 4) {
    give_registers<T::kLoadRegisters>();
    const bool one = threadIdx.x % 32 == 0;
    if (warp == 0) {
      if (one) Loader<K>{p, storage}.run();
    } else if (warp == 1) {
      if (one && K::kReads) fetch<K>(p, storage);
    } else if (warp == 2) {
      Store<K>{p, storage, {storage, p.fault}}.run();
    } else {
      K::side_work(p, storage);
    }
  } else {
    take_registers<T::kMultiplyRegisters>();
    multiply<K>(p, storage, warp / 4 - 1);
  }
}

}  // namespace mok::sm90
