// The grouped product as one persistent kernel, for tests and benchmarks of the parts; the forward
// and backward kernels put the same loader, multiplier, filler, fetch and store around a schedule
// of several phases.
#pragma once

#include "epilogue.cuh"

namespace mok::sm90 {

// One argument for every pass; what a pass does not use stays empty.
template <class Schedule>
struct KernelParameters {
  CUtensorMap a, b;          // b: the second operand of a weight gradient, or where fetch reads
  CUtensorMap out, second;   // boxes that leave
  const CUtensorMap* table;  // one map an expert: its weight, or its gradient
  TableHeader header;        // what the table must say
  Schedule schedule;
  int32_t columns;      // N; F where a tile holds gate and up
  int32_t output_rows;  // M of a weight gradient
  __nv_bfloat16 *out_rows, *second_rows;
  const float* prob;
  float* parts;
  uint32_t* tickets;
  Fault* fault;
};

template <Product PRODUCT, bool GATED, class TILING, class EPILOGUE>
struct GroupedGemm {
  static constexpr Product kProduct = PRODUCT;
  static constexpr bool kGated = GATED;
  using Tiling = TILING;
  using Epilogue = EPILOGUE;
  using Schedule = std::conditional_t<kOverRows<PRODUCT>, WeightTiles, RowTiles>;
  using Parameters = KernelParameters<Schedule>;
  using Storage = sm90::Storage<TILING, EPILOGUE::kUnitBytes>;
  static constexpr int kStorers =
      TILING::kAlternate ? 1 : 2;  // warps; two take every second unit each
  static constexpr int kTileReaders = 8 + kStorers + (EPILOGUE::kReads ? 1 : 0);
  static_assert(TILING::kAlternate || Storage::kUnitSlots % 2 == 0,
                "a slot that both warpgroups use in turn breaks the argument for unit_ready");
  static_assert(sizeof(Storage) <= kMaxShared, "shared memory");
};

template <class G>
__device__ __forceinline__ void set_up(typename G::Storage& s) {
  using T = typename G::Tiling;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTileSlots; ++i) {
      barrier_init(s.tile_full[i], 1);
      barrier_init(s.tile_empty[i], G::kTileReaders);
    }
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(s.stage_full[i], 1);
      barrier_init(s.stage_empty[i], T::kReaders);
    }
    for (int i = 0; i < G::Storage::kUnitSlots; ++i) {
      barrier_init(s.unit_ready[i], 1);
      barrier_init(s.unit_filled[i], 4);
      barrier_init(s.unit_drained[i], 1);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(s.products_turn[i], 4);
      barrier_init(s.fill_turn[i], 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
}

template <class G>
__device__ __forceinline__ void multiply(const typename G::Parameters& p,
                                         typename G::Storage& storage, int warpgroup) {
  using T = typename G::Tiling;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
  TileReader<G, true> tiles{storage, p.fault};
  Multiplier<G> products{p, storage, warpgroup, lane};
  Filler<G> epilogue(p, storage, warpgroup, warp, lane);
  uint32_t count = 0;
  for (Tile tile = tiles.next(); !tile.last(); tile = tiles.next(), ++count) {
    if (T::kAlternate && count % 2 != warpgroup) {
      products.skip(tile);
      epilogue.skip();
      continue;
    }
    typename Multiplier<G>::Accumulators d;
    products.run(tile, count / 2, d);
    epilogue.run(tile, count / 2, d);
  }
}

template <class G>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const __grid_constant__ typename G::Parameters p) {
  using T = typename G::Tiling;
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<typename G::Storage*>(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  set_up<G>(storage);

  if (warp < 4) {
    give_registers<T::kLoadRegisters>();
    if (threadIdx.x % 32 == 0) {
      if (warp == 0) Loader<G>{p, storage}.run();
      if constexpr (G::Epilogue::kReads) {
        if (warp == 1) fetch<G>(p, storage);
      }
      if (warp >= 2 && warp < 2 + G::kStorers) store<G>(p, storage, warp - 2);
    }
  } else {
    take_registers<T::kMultiplyRegisters>();
    multiply<G>(p, storage, warp / 4 - 1);
  }
}

}  // namespace mok::sm90
