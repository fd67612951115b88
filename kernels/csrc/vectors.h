// Vectors of 32-bit words as wide as the registers, their arithmetic, and what a dtype is to the loops.
//
// A word is a float, an integer, or a pair of bfloat16. What has no operator is in the file of the instruction
// set. Nothing here may be contracted or reordered (-ffp-contract=off): every loop that adds up the same
// numbers must get the same bits.
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
// 1.5 * 2^23: a number of this size has no fraction, so adding it rounds a smaller one, ties to even.
constexpr float ROUND = 12582912.0f;
// What four bits stand for, in bfloat16: 8 more than the value, and e2m1.
inline constexpr uint16_t INTEGERS[16] = {0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
                                          0,      0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
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
#ifndef BF16_STORE  // an instruction set may have one of its own
inline void store_bf16(void* to, Floats x) { store_shorts(to, to_bf16(x)); }
#endif

// What a dtype is to the loops. `dot` multiplies words and adds them to float sums; `get` and `put` move up to
// LANES values to floats and back.
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
    std::memcpy(to, values, count * sizeof(Value));  // of variable size, it is a call
  }
};
// A bfloat16 in the room of a float, widened once for all the products that read it.
struct Widened : Fp32 {
  static void put(Value* to, Floats x, int64_t count = LANES) {
    Fp32::put(to, (Floats)(to_bf16(x) << 16), count);
  }
};
template <class E> using Value = typename E::Value;

// What products read values of E as: as they are, or widened where nothing multiplies pairs of bfloat16.
template <class E> struct ReadAs { using Type = E; };
#ifndef BF16_DOT
template <> struct ReadAs<Bf16> { using Type = Widened; };
#endif
template <class E> using Read = typename ReadAs<E>::Type;

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// 2^f for f in -0.5 .. 0.5: to a relative 1e-7, or 1e-4, a twentieth of the rounding of bfloat16.
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

// e^x for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2], to a relative 2e-7; 0 below -87.
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
// x times the sigmoid of z.
inline Floats swish(Floats x, Floats z) {
  const Floats e = exponential(z < 0.0f ? z : -z);
  return x * (z < 0.0f ? e : broadcast(1.0f)) / (e + 1.0f);
}
// gpt-oss': (up + 1) gate / (1 + e^(-1.702 gate)) of limited values.
inline Floats clamped_swiglu(Floats gate, Floats up) {
  const Floats most = broadcast(7.0f);
  gate = gate < most ? gate : most;
  up = larger(up < most ? up : most, -most);
  return swish(gate, gate * 1.702f) * (up + 1.0f);
}
inline Floats silu(Floats x) { return swish(x, x); }
// GELU by its tanh: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
inline Floats gelu(Floats x) { return swish(x, (x * x * 0.044715f + 1.0f) * x * 1.59576912f); }

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
