// Stands for csrc/sm90/ptx.cuh: tensor copies and warpgroup products on the
// host.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../device/ptx.cuh"

namespace mok::sm90 {

constexpr int kBoxBytes = 8192;
constexpr int kBoxRows = 64;

// ---- tensor copies

inline void acquire_tensor_map(const CUtensorMap*) {}

// Calls f(offset in shared memory, address in global memory or null) for the
// pieces of 16 bytes.
template <class F>
void each_piece(const CUtensorMap& map, uint32_t shared, const int (&first)[3], F f) {
  const uint64_t row = map.box[0] * map.size;
  const uint32_t mask = map.swizzle_bits == CU_TENSOR_MAP_SWIZZLE_128B ? 7 : 3;
  uint32_t at = shared;
  for (uint64_t z = 0; z < map.box[2]; ++z) {
    for (uint64_t y = 0; y < map.box[1]; ++y) {
      for (uint64_t piece = 0; piece < row / 16; ++piece, at += 16) {
        const int64_t index[3] = {
            first[0] + static_cast<int64_t>(piece * 16 / map.size),
            first[1] + static_cast<int64_t>(y),
            first[2] + static_cast<int64_t>(z),
        };
        uint8_t* global = reinterpret_cast<uint8_t*>(map.base);
        for (int i = 0; i < 3; ++i) {
          const bool inside = index[i] >= 0 && index[i] < static_cast<int64_t>(map.extent[i]);
          global = inside && global != nullptr ? global + index[i] * map.stride[i] : nullptr;
        }
        f(at ^ (at >> 7 & mask) << 4, global);
      }
    }
  }
}
inline uint32_t box_bytes(const CUtensorMap& map) {
  return static_cast<uint32_t>(map.size * map.box[0] * map.box[1] * map.box[2]);
}
inline void load_box(uint32_t to, const CUtensorMap& map, uint64_t& barrier, int x, int y, int z) {
  if (to % 128 > 0) emulated::stop("a box that is not at 128 bytes");
  under_way([map, to, base = emulated::shared(), x, y, z, &barrier] {
    each_piece(map, to, {x, y, z}, [&](uint32_t at, const uint8_t* global) {
      global == nullptr ? std::memset(base + at, 0, 16) : std::memcpy(base + at, global, 16);
    });
    complete_bytes(barrier, box_bytes(map));
  });
}
inline void send_box(uint32_t from, const CUtensorMap& map, int x, int y, int z) {
  if (from % 128 > 0) emulated::stop("a box that is not at 128 bytes");
  using Pieces = std::vector<std::pair<uint8_t*, uint4>>;
  store_later(
      [=, base = emulated::shared()] {
        Pieces pieces;
        each_piece(map, from, {x, y, z}, [&](uint32_t at, uint8_t* global) {
          uint4 piece;
          std::memcpy(&piece, base + at, 16);
          if (global != nullptr) pieces.push_back({global, piece});
        });
        return pieces;
      },
      [](const Pieces& pieces) {
        for (const auto& [global, piece] : pieces) std::memcpy(global, &piece, 16);
      });
}

inline void load_operand(uint32_t to, const CUtensorMap* map, uint64_t& barrier, int row,
                         int block) {
  load_box(to, *map, barrier, 0, row, block);
}
inline void store_box(uint32_t from, const CUtensorMap* map, int column, int row) {
  send_box(from, *map, column, row, 0);
}
inline void store_boxes(uint32_t from, const CUtensorMap* map, int column, int row, int z) {
  send_box(from, *map, column, row, z);
}
inline void load_boxes(uint32_t to, const CUtensorMap* map, uint64_t& barrier, int column, int row,
                       int z) {
  load_box(to, *map, barrier, column, row, z);
}
inline uint64_t evict_first() { return 0; }
inline void store_boxes_once(uint32_t from, const CUtensorMap* map, int column, int row, int z,
                             uint64_t) {
  send_box(from, *map, column, row, z);
}
inline void load_boxes_once(uint32_t to, const CUtensorMap* map, uint64_t& barrier, int column,
                            int row, int z, uint64_t) {
  load_box(to, *map, barrier, column, row, z);
}

// ---- registers

template <int COUNT>
void take_registers() {}
template <int COUNT>
void give_registers() {}

// ---- warpgroup products: done when they are waited for. The instructions are
// of whole warps: their lanes come to them, and leave them, together.

template <bool MN_MAJOR>
uint64_t describe_operand(uint32_t address) {
  constexpr uint64_t leading = MN_MAJOR ? kBoxBytes >> 4 : 1, stride = 1024 >> 4;
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | leading << 16 | stride << 32 |
         uint64_t{1} << 62;
}
template <bool MN_MAJOR>
constexpr uint64_t kNextK16 = (MN_MAJOR ? 16 * 128 : 16 * 2) >> 4;

inline void products_fence() { emulated::gather(0); }
inline void products_commit() { emulated::now().products.emplace_back(); }
template <int PENDING>
void products_wait() {
  auto& groups = emulated::now().products;
  while (groups.size() > PENDING + 1) {
    for (const auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  emulated::gather(0);
}
template <int COUNT>
void pin(float (&)[COUNT]) {}

template <bool MN_MAJOR>
float element(const uint8_t* shared, uint64_t operand, int mn, int k) {
  const auto field = [operand](int bit) {
    return static_cast<uint32_t>(operand >> bit & 0x3fff) << 4;
  };
  uint32_t at = field(0);
  at += MN_MAJOR ? mn / 64 * field(16) + k / 8 * field(32) + k % 8 * 128 + mn % 64 * 2
                 : mn / 8 * field(32) + mn % 8 * 128 + k * 2;
  at ^= (at >> 7 & 7) << 4;
  uint16_t bits;
  std::memcpy(&bits, shared + at, 2);
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

template <int COLUMNS, bool A_MN, bool B_MN, int COUNT>
void multiply_add(float (&d)[COUNT], uint64_t a, uint64_t b, uint32_t keep) {
  static_assert(COUNT >= COLUMNS / 2);
  const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
  emulated::now().products.back().push_back([=, &d, shared = emulated::shared()] {
    float rows[2][16];
    for (int k = 0; k < 16; ++k) {
      for (int half = 0; half < 2; ++half) {
        rows[half][k] = element<A_MN>(shared, a, row + 8 * half, k);
      }
    }
    for (int i = 0; i < COLUMNS / 2; i += 4) {
      for (int c = 0; c < 2; ++c) {
        const int column = 2 * i + lane % 4 * 2 + c;
        float low = keep != 0 ? d[i + c] : 0.0f, high = keep != 0 ? d[i + 2 + c] : 0.0f;
        for (int k = 0; k < 16; ++k) {
          const float x = element<B_MN>(shared, b, column, k);
          low += rows[0][k] * x;
          high += rows[1][k] * x;
        }
        d[i + c] = low;
        d[i + 2 + c] = high;
      }
    }
  });
}

}  // namespace mok::sm90
