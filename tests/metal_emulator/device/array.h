// <metal_array>
#pragma once

#include "scalars.h"

namespace metal {

template <class T, size_t N>
struct array {
  EMULATOR_INLINE constexpr T& operator[](size_t i) { return elements[i]; }
  EMULATOR_INLINE constexpr const T& operator[](size_t i) const { return elements[i]; }
  static constexpr size_t size() { return N; }

  T elements[N];
};

}  // namespace metal
