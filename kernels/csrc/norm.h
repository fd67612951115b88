// RMS norm of one row.
#pragma once

#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace eagle {

// Row [size] over its root mean square, times weight [size], into `out`, through floats only.
template <class E, class Out = E>
inline void norm_row(const Value<E>* row, const float* weight, int64_t size, float eps, Value<Out>* out) {
  Floats part = {};
  for (int64_t i = 0; i < size; i += LANES) {
    const Floats x = E::get(row + i, size - i);
    part = fma(x, x, part);
  }
  float sum = 0;
  for (int l = 0; l < LANES; l++) sum += part[l];
  const float share = 1.0f / std::sqrt(sum / float(size) + eps);
  for (int64_t i = 0; i < size; i += LANES)
    Out::put(out + i, E::get(row + i, size - i) * share * Fp32::get(weight + i, size - i), size - i);
}

}  // namespace eagle
