#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;

  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {  // to nearest even
    uint32_t all;
    std::memcpy(&all, &x, 4);
    const bool nan = (all & 0x7fffffffu) > 0x7f800000u;
    bits = static_cast<uint16_t>(nan ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t all = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &all, 4);
    return x;
  }
};
