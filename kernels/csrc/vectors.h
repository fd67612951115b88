// Vectors of 32-bit words of the width of registers, their arithmetic, and traits of dtypes.
//
// A word is a float, an integer, or a pair of bfloat16. Instructions without a C operator are in the instruction
// set's file. Nothing may be contracted or reordered (-ffp-contract=off): loops over the same numbers must get the
// same bits.
#pragma once

#include "kernels.h"

namespace eagle {

#if defined(__AVX512F__) && !defined(PORTABLE)
constexpr int LANES = 16;
#elif defined(__AVX2__) && !defined(PORTABLE)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}
template <class Vector>
inline void store(void* to, Vector vector) { std::memcpy(to, &vector, sizeof vector); }
inline Floats broadcast(float x) { return x - Floats{}; }  // not Floats{} + x, which would turn -0 into 0
inline Words broadcast(uint32_t x) { return Words{} + x; }
// 1.5 * 2^23: adding it rounds a smaller number to an integer, ties to even.
constexpr float ROUND = 12582912.0f;
// The values of e2m1 codes in bfloat16.
inline constexpr uint16_t E2M1[16] = {0,      0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,
                                      0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

}  // namespace eagle

#if defined(PORTABLE)
#include "portable.h"
#elif defined(__AVX2__)
#include "x86.h"
#elif defined(__aarch64__)
#include "neon.h"
#else
#error "kernels/isa.py names no such instruction set"
#endif

namespace eagle {

// The even and the odd bfloat16 of each pair.
inline Floats even(Words pairs) { return (Floats)(pairs << 16); }
inline Floats odd(Words pairs) { return (Floats)(pairs & 0xFFFF0000u); }
// The bits of the nearest bfloat16, ties to even.
inline Words to_bf16(Floats x) {
  const Words bits = (Words)x, rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return x == x ? rounded : broadcast(0x7FC0u);
}
#ifndef BF16_STORE  // otherwise the instruction set defines it
inline void store_bf16(void* to, Floats x) { store_shorts(to, to_bf16(x)); }
#endif

// Traits of a dtype. `dot` multiplies words and adds to float sums; `get` and `put` convert up to LANES values.
struct Fp32 {
  using Value = float;
  static constexpr int PER_WORD = 1;
  static Floats dot(Floats sum, Words a, Words b) { return fma((Floats)a, (Floats)b, sum); }
  static Floats get(const Value* from, int64_t count = LANES) {
    if (count >= LANES) return load<Floats>(from);
    Floats x = {};
    std::memcpy(&x, from, count * sizeof(Value));
    return x;
  }
  static void put(Value* to, Floats x, int64_t count = LANES) {
    if (count >= LANES) store(to, x);
    else std::memcpy(to, &x, count * sizeof(Value));
  }
};
struct Bf16 {
  using Value = uint16_t;
  static constexpr int PER_WORD = 2;
  static Floats dot(Floats sum, Words a, Words b) {
#ifdef BF16_DOT
    return dot_bf16(sum, a, b);
#else
    return fma(odd(a), odd(b), fma(even(a), even(b), sum));
#endif
  }
  static Floats get(const Value* from, int64_t count = LANES) {
    if (count >= LANES) return (Floats)(words_of_shorts(from) << 16);
    Value values[LANES] = {};
    std::memcpy(values, from, count * sizeof(Value));
    return (Floats)(words_of_shorts(values) << 16);
  }
  static void put(Value* to, Floats x, int64_t count = LANES) {
    if (count >= LANES) return store_bf16(to, x);
    Value values[LANES];
    store_bf16(values, x);
    std::memcpy(to, values, count * sizeof(Value));  // a constant size avoids a call
  }
};
// A bfloat16 stored as float, widened once for all products.
struct Widened : Fp32 {
  static void put(Value* to, Floats x, int64_t count = LANES) {
    Fp32::put(to, (Floats)(to_bf16(x) << 16), count);
  }
};
template <class E> using Value = typename E::Value;

// The input type of products: E, or widened where there is no product of bfloat16 pairs.
template <class E> struct InputOf { using Type = E; };
#ifndef BF16_DOT
template <> struct InputOf<Bf16> { using Type = Widened; };
#endif
template <class E> using Input = typename InputOf<E>::Type;

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// 2^f for f in -0.5 .. 0.5, with a relative error of 1e-7, or 1e-4 (5 % of bfloat16's rounding).
template <bool PRECISE>
inline Floats power_of_two(Floats f) {
  if constexpr (!PRECISE) {
    const Floats p = fma(broadcast(0.055171669f), f, broadcast(0.24261113f));
    return fma(fma(p, f, broadcast(0.69326099f)), f, broadcast(0.99992807f));
  }
  Floats p = broadcast(1.5252734e-5f);  // ln(2)^k / k!
  for (float c : {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f,
                  1.0f})
    p = fma(p, f, broadcast(c));
  return p;
}

// e^x for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2], with a relative error of 2e-7; 0 below -87.
inline Floats exponential(Floats x) {
  const Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);  // truncated: to nearest if x <= 0
  const Floats n_rounded = to_floats(n);
  Floats r = fma(n_rounded, broadcast(-0.693359375f), x);
  r = fma(n_rounded, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, broadcast(c));
  const Floats scaled = p * (Floats)((n + 127) << 23);
  return x < -87.0f ? Floats{} : scaled;
}
// x * sigmoid(z).
inline Floats swish(Floats x, Floats z) {
  const Floats e = exponential(z < 0.0f ? z : -z);
  return x * (z < 0.0f ? e : broadcast(1.0f)) / (e + 1.0f);
}
// cap * tanh(x / cap).
inline Floats soft_cap(Floats x, float cap) {
  const Floats e = exponential((x < 0.0f ? x : -x) * (2 / cap)), bounded = (1.0f - e) / (1.0f + e) * cap;
  return x < 0.0f ? -bounded : bounded;
}
// gpt-oss: (up + 1) * gate * sigmoid(1.702 * gate) of clamped values.
inline Floats clamped_swiglu(Floats gate, Floats up) {
  const Floats limit = broadcast(7.0f);
  gate = gate < limit ? gate : limit;
  up = larger(up < limit ? up : limit, -limit);
  return swish(gate, gate * 1.702f) * (up + 1.0f);
}
inline Floats silu(Floats x) { return swish(x, x); }
// GELU by its tanh: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
inline Floats gelu(Floats x) { return swish(x, (x * x * 0.044715f + 1.0f) * x * 1.59576912f); }

// RMSNorm of a row [size] with weight [size], computed in float32.
template <class E, class Out = E>
inline void norm_row(const Value<E>* row, const float* weight, int64_t size, float eps, Value<Out>* out) {
  Floats part = {};
  for (int64_t i = 0; i < size; i += LANES) {
    const Floats x = E::get(row + i, size - i);
    part = fma(x, x, part);
  }
  float sum = 0;
  for (int l = 0; l < LANES; l++) sum += part[l];
  const float factor = 1.0f / std::sqrt(sum / float(size) + eps);
  for (int64_t i = 0; i < size; i += LANES)
    Out::put(out + i, E::get(row + i, size - i) * factor * Fp32::get(weight + i, size - i), size - i);
}

}  // namespace eagle
