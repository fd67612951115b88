// What all checks of the driver share: counting, dtypes, random numbers, comparisons.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels.h"

using namespace eagle;

inline int checks = 0, failures = 0;

inline void check(bool good, const char* format, ...) {
  checks++;
  if (good || ++failures > 20) return;
  va_list values;
  va_start(values, format);
  std::vprintf(format, values);
  va_end(values);
  std::puts("");
}

template <class E> struct Dtype;
template <> struct Dtype<Fp32> {
  using Value = float;
  static constexpr const char* NAME = "float32";
  static constexpr double ERROR = 2e-6;  // of one product, relative to the largest
  static float of(double x) { return float(x); }
  static double get(float x) { return x; }
};
template <> struct Dtype<Bf16> {
  using Value = uint16_t;
  static constexpr const char* NAME = "bfloat16";
  static constexpr double ERROR = 6e-3;
  static uint16_t of(double x) {
    const float rounded = float(x);
    uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  }
  static double get(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};
template <class E> using Values = std::vector<typename Dtype<E>::Value>;
using Doubles = std::vector<double>;

inline std::mt19937 source(1);
inline double draw_normal() {  // about normal
  double sum = -2;
  for (int i = 0; i < 4; i++) sum += source() * 0x1p-32;
  return sum * 1.7;
}
template <class E>
Values<E> draws(int64_t count) {
  Values<E> values(count);
  for (auto& value : values) value = Dtype<E>::of(draw_normal());
  return values;
}

template <class V>
bool same(const V& a, const V& b) {
  return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]);
}
template <class V>
V part_of(const V& all, int64_t first, int64_t count) { return V(all.begin() + first, all.begin() + first + count); }

// The largest difference, relative to the largest expected.
template <class E>
double error(const Values<E>& found, const Doubles& expected) {
  double most = 1e-30, apart = 0;
  for (size_t i = 0; i < expected.size(); i++) {
    const double difference = std::abs(Dtype<E>::get(found[i]) - expected[i]);
    if (!(difference <= apart)) apart = difference;  // a NaN too
    most = std::max(most, std::abs(expected[i]));
  }
  return apart / most;
}
